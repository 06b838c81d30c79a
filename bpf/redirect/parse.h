/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Where the headers of a packet are, at XDP and at tcx. */
#ifndef MOUNTAIN_REDIRECT_PARSE_H
#define MOUNTAIN_REDIRECT_PARSE_H

enum mtn_rd_hook { MTN_HOOK_XDP, MTN_HOOK_IN, MTN_HOOK_OUT };

/* Where a packet's headers are. */
struct mtn_rd_at {
	__u32 l4;	/* offset of the transport header */
	__u32 frag_id;
	__u8 proto;
	__u8 first;	/* first fragment */
	__u8 later;	/* another one: no transport header */
	__u8 pad;
};

static __always_inline int mtn_pass(const int hook)
{
	return hook == MTN_HOOK_XDP ? XDP_PASS : TC_ACT_UNSPEC;
}

static __always_inline int mtn_load_bytes(void *ctx, __u32 off, void *to, __u32 len, const int hook)
{
	if (hook == MTN_HOOK_XDP)
		return bpf_xdp_load_bytes(ctx, off, to, len);
	return bpf_skb_load_bytes(ctx, off, to, len);
}

static __always_inline __u32 mtn_device(void *ctx, const int hook)
{
	if (hook == MTN_HOOK_XDP)
		return ((struct xdp_md *)ctx)->ingress_ifindex;
	return ((struct __sk_buff *)ctx)->ifindex;
}

/* Past the extension headers of IPv6; @at->proto is the first one. Returns non-zero for odd ones. */
static __always_inline int mtn_rd_ext(void *ctx, struct mtn_rd_at *at, const int hook)
{
	__u32 off = ETH_HLEN + sizeof(struct ipv6hdr);
	__u8 proto = at->proto;
	int i;

	for (i = 0; i < MTN_RD_EXT_HDRS; i++) {
		__u8 ext[8];	/* next header, length in 8 bytes beyond the first, ... */

		if (proto != IPPROTO_HOPOPTS && proto != IPPROTO_ROUTING &&
		    proto != IPPROTO_FRAGMENT && proto != IPPROTO_DSTOPTS)
			break;
		if (mtn_load_bytes(ctx, off, ext, sizeof(ext), hook))
			return -1;
		if (proto == IPPROTO_FRAGMENT) {
			__u16 frag_off;

			__builtin_memcpy(&frag_off, ext + 2, 2);
			__builtin_memcpy(&at->frag_id, ext + 4, 4);
			at->later = !!(frag_off & bpf_htons(0xfff8));
			at->first = !at->later && (frag_off & bpf_htons(1));
			off += 8;
		} else {
			off += ((__u32)ext[1] + 1) * 8;
		}
		proto = ext[0];
		if (at->later)
			break;
	}
	at->proto = proto;
	at->l4 = off;
	return 0;
}

__noinline int mtn_rd_ext_xdp(struct xdp_md *ctx, struct mtn_rd_at *at)
{
	return at ? mtn_rd_ext(ctx, at, MTN_HOOK_XDP) : -1;
}

__noinline int mtn_rd_ext_skb(struct __sk_buff *ctx, struct mtn_rd_at *at)
{
	return at ? mtn_rd_ext(ctx, at, MTN_HOOK_IN) : -1;
}

/*
 * Length of the transport header at @l4, 0 when it is cut off; fills the ports of @key, which has
 * its protocol, and what @look says of TCP.
 */
#define mtn_rd_transport(key, look, l4, data_end)					\
({											\
	__u32 __len = 0;								\
											\
	if ((key)->proto == IPPROTO_TCP && (l4) + sizeof(struct tcphdr) <= (data_end)) { \
		__len = ((struct tcphdr *)(l4))->doff * 4;				\
		(look)->tcp_flags = ((__u8 *)(l4))[13];					\
		(look)->seq = bpf_ntohl(((struct tcphdr *)(l4))->seq);			\
		(look)->ack = bpf_ntohl(((struct tcphdr *)(l4))->ack_seq);		\
	} else if ((key)->proto == IPPROTO_UDP &&						\
		 (l4) + sizeof(struct udphdr) <= (data_end))				\
		__len = sizeof(struct udphdr);						\
	if (__len) {									\
		(key)->sport = ((struct mtn_rd_ports *)(l4))->sport;			\
		(key)->dport = ((struct mtn_rd_ports *)(l4))->dport;			\
	}										\
	__len;										\
})

#endif
