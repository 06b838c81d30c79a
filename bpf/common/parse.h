/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * From a packet at tcx egress to its flow key.
 *
 * Fragments: only the first one has ports; it is flagged so that the others can follow it.
 * ICMP errors quote the packet they are about, which came in on the flow that runs the other way:
 * that flow's key is found as well, so that they can travel with it.
 */
#ifndef MOUNTAIN_PARSE_H
#define MOUNTAIN_PARSE_H

#define MTN_PKT_FRAG_FIRST	(1 << 0)
#define MTN_PKT_FRAG_LATER	(1 << 1)
#define MTN_PKT_ICMP_ERROR	(1 << 2)
#define MTN_PKT_SYN		(1 << 3)
#define MTN_PKT_ACK		(1 << 4)

/* RFC 8200: hop-by-hop, routing, fragment, destination options twice; one spare. */
#define MTN_MAX_EXT_HDRS	6

/* RFC 792; <linux/icmp.h> of user space drags the C library in. */
#define ICMP_DEST_UNREACH	3
#define ICMP_SOURCE_QUENCH	4
#define ICMP_REDIRECT		5
#define ICMP_TIME_EXCEEDED	11
#define ICMP_PARAMETERPROB	12

#define IP_MF			0x2000
#define IP_OFFSET		0x1fff

/* An Ethernet address, aligned as in memory it is not, which the kernels' packet access allows: no
 * loads byte by byte.
 */
struct mtn_mac {
	__u16 word[3];
};

struct mtn_link_header {
	struct mtn_mac to;
	struct mtn_mac from;
};

/* Jumbo payload (RFC 2675). */
#define MTN_OPT_JUMBO		0xc2

/* What the headers of all transports with ports begin with. */
struct mtn_ports {
	__be16 source;
	__be16 dest;
};

struct mtn_pkt {
	struct mtn_flow_key key;	/* of the packet itself */
	struct mtn_flow_key quoted;	/* MTN_PKT_ICMP_ERROR: of the flow that it is about */
	__u32 frag_id;
	__u32 sender;		/* its sender's hash (rehash.h), set by the program */
	__u16 hdr_len;		/* network and transport headers, bytes */
	__u16 l3_len;		/* of the largest packet on the wire, set by the program */
	__u8 flags;		/* MTN_PKT_* */
	__u8 dsfield;
	__u8 bulk;		/* the flow's class, set by the program */
	__u8 sender_is;		/* enum mtn_sender (rehash.h), set by the program */
};

/*
 * Copies *@to from @off of the packet; returns non-zero beyond its end. Headers are nearly always in
 * the linear part, where they can be read in place; @off must have an upper bound the verifier sees.
 */
#define mtn_load(skb, off, to)								\
({											\
	void *__at = (void *)(long)(skb)->data + (off);					\
	int __ret = 0;									\
											\
	if (__at + sizeof(*(to)) <= (void *)(long)(skb)->data_end)			\
		*(to) = *(typeof(to))__at;						\
	else										\
		__ret = bpf_skb_load_bytes(skb, off, to, sizeof(*(to)));		\
	__ret;										\
})

static __always_inline bool mtn_icmp_is_error(__u8 type)
{
	return type == ICMP_DEST_UNREACH || type == ICMP_SOURCE_QUENCH || type == ICMP_REDIRECT ||
	       type == ICMP_TIME_EXCEEDED || type == ICMP_PARAMETERPROB;
}

static __always_inline bool mtn_has_ports(__u8 proto)
{
	return proto == IPPROTO_TCP || proto == IPPROTO_UDP || proto == IPPROTO_UDPLITE ||
	       proto == IPPROTO_SCTP || proto == IPPROTO_DCCP;
}

/*
 * The packet quoted at @off, addresses and ports swapped: key of the flow it arrived on, seen from
 * here. No flow is found when too little is quoted, or when the error goes to another host than
 * the one that sent what it quotes.
 */
__noinline int mtn_parse_quoted(struct __sk_buff *skb, struct mtn_pkt *pkt, __u32 off)
{
	struct mtn_flow_key key = {};
	__u16 ports[2];
	__u8 proto;

	if (!pkt)
		return 0;
	if (pkt->key.ipv6) {
		struct ipv6hdr ip6;

		if (bpf_skb_load_bytes(skb, off, &ip6, sizeof(ip6)))
			return 0;
		__builtin_memcpy(key.saddr, &ip6.daddr, 16);
		__builtin_memcpy(key.daddr, &ip6.saddr, 16);
		proto = ip6.nexthdr;
		key.ipv6 = 1;
		off += sizeof(ip6);
	} else {
		struct iphdr ip;

		if (bpf_skb_load_bytes(skb, off, &ip, sizeof(ip)))
			return 0;
		if (ip.version != 4 || ip.ihl < 5 || (ip.frag_off & bpf_htons(IP_OFFSET)))
			return 0;
		key.saddr[0] = ip.daddr;
		key.daddr[0] = ip.saddr;
		proto = ip.protocol;
		off += ip.ihl * 4;
	}
	if (!mtn_has_ports(proto) || bpf_skb_load_bytes(skb, off, ports, sizeof(ports)))
		return 0;
	if (key.daddr[0] != pkt->key.daddr[0] || key.daddr[1] != pkt->key.daddr[1] ||
	    key.daddr[2] != pkt->key.daddr[2] || key.daddr[3] != pkt->key.daddr[3])
		return 0;
	key.proto = proto;
	key.sport = ports[1];
	key.dport = ports[0];
	pkt->quoted = key;
	pkt->flags |= MTN_PKT_ICMP_ERROR;
	return 1;
}

/* Transport header at @off of a packet that is no later fragment. */
static __always_inline int mtn_parse_transport(struct __sk_buff *skb, struct mtn_pkt *pkt,
					       __u32 off)
{
	__u8 proto = pkt->key.proto;

	if (proto == IPPROTO_TCP) {
		struct tcphdr tcp;

		if (mtn_load(skb, off, &tcp))
			return -1;
		pkt->key.sport = tcp.source;
		pkt->key.dport = tcp.dest;
		if (tcp.syn)
			pkt->flags |= MTN_PKT_SYN;
		if (tcp.ack)
			pkt->flags |= MTN_PKT_ACK;
		pkt->hdr_len = off - ETH_HLEN + tcp.doff * 4;
		return 0;
	}
	if (mtn_has_ports(proto)) {
		struct mtn_ports ports;

		if (mtn_load(skb, off, &ports))
			return -1;
		pkt->key.sport = ports.source;
		pkt->key.dport = ports.dest;
		pkt->hdr_len = off - ETH_HLEN + 8;
		return 0;
	}
	pkt->hdr_len = off - ETH_HLEN;
	if (proto == IPPROTO_ICMP || proto == IPPROTO_ICMPV6) {
		/* type, code, checksum, then the identifier of an echo */
		__u8 icmp[8];
		bool v6 = proto == IPPROTO_ICMPV6;

		if (bpf_skb_load_bytes(skb, off, icmp, sizeof(icmp)))
			return -1;
		/* RFC 4443: ICMPv6 errors are the types below 128. */
		if (v6 ? icmp[0] < 128 : mtn_icmp_is_error(icmp[0]))
			mtn_parse_quoted(skb, pkt, off + 8);
		else
			__builtin_memcpy(&pkt->key.sport, icmp + 4, 2);
	}
	return 0;
}

static __always_inline int mtn_parse_ipv4(struct __sk_buff *skb, struct mtn_pkt *pkt)
{
	struct iphdr ip;
	__u32 off;

	if (mtn_load(skb, ETH_HLEN, &ip))
		return -1;
	if (ip.version != 4 || ip.ihl < 5)
		return -1;
	off = ETH_HLEN + ip.ihl * 4;
	pkt->key.saddr[0] = ip.saddr;
	pkt->key.daddr[0] = ip.daddr;
	pkt->key.proto = ip.protocol;
	pkt->dsfield = ip.tos;
	pkt->hdr_len = off - ETH_HLEN;
	if (ip.frag_off & bpf_htons(IP_MF | IP_OFFSET)) {
		pkt->frag_id = ip.id;
		if (ip.frag_off & bpf_htons(IP_OFFSET)) {
			pkt->flags |= MTN_PKT_FRAG_LATER;
			return 0;
		}
		pkt->flags |= MTN_PKT_FRAG_FIRST;
	}
	return mtn_parse_transport(skb, pkt, off);
}

__noinline int mtn_parse_ipv6_ext(struct __sk_buff *skb, struct mtn_pkt *pkt, __u8 proto)
{
	__u32 off = ETH_HLEN + sizeof(struct ipv6hdr), jumbo = 0;
	int i;

	if (!pkt)
		return -1;
	for (i = 0; i < MTN_MAX_EXT_HDRS; i++) {
		__u8 ext[8];	/* next header, length in 8 bytes beyond the first, first option, its length, ... */

		if (proto != IPPROTO_HOPOPTS && proto != IPPROTO_ROUTING &&
		    proto != IPPROTO_FRAGMENT && proto != IPPROTO_DSTOPTS)
			break;
		if (bpf_skb_load_bytes(skb, off, ext, sizeof(ext)))
			return -1;
		if (proto == IPPROTO_FRAGMENT) {
			__u16 frag_off;

			__builtin_memcpy(&frag_off, ext + 2, 2);
			__builtin_memcpy(&pkt->frag_id, ext + 4, 4);
			pkt->key.proto = ext[0];
			if (frag_off & bpf_htons(0xfff8)) {
				pkt->flags |= MTN_PKT_FRAG_LATER;
				pkt->hdr_len = off + 8 - ETH_HLEN;
				return 0;
			}
			/* An atomic fragment (RFC 6946) is whole: no M flag, offset 0. */
			if (frag_off & bpf_htons(1))
				pkt->flags |= MTN_PKT_FRAG_FIRST;
			off += 8;
		} else {
			/* BIG TCP's own, which no segment has (ipv6_has_hopopt_jumbo(), include/net/ipv6.h). */
			if (skb->gso_size && proto == IPPROTO_HOPOPTS && !ext[1] &&
			    ext[2] == MTN_OPT_JUMBO)
				jumbo = 8;
			off += ((__u32)ext[1] + 1) * 8;
		}
		proto = ext[0];
	}
	pkt->key.proto = proto;
	if (mtn_parse_transport(skb, pkt, off))
		return -1;
	if (pkt->hdr_len > jumbo)
		pkt->hdr_len -= jumbo;
	return 0;
}

/* A function of its own for the stack's sake. */
__noinline int mtn_parse_ipv6(struct __sk_buff *skb, struct mtn_pkt *pkt)
{
	struct ipv6hdr ip6;

	if (!pkt || mtn_load(skb, ETH_HLEN, &ip6))
		return -1;
	if (ip6.version != 6)
		return -1;
	__builtin_memcpy(pkt->key.saddr, &ip6.saddr, 16);
	__builtin_memcpy(pkt->key.daddr, &ip6.daddr, 16);
	pkt->key.ipv6 = 1;
	pkt->key.proto = ip6.nexthdr;
	pkt->dsfield = (ip6.priority << 4) | (ip6.flow_lbl[0] >> 4);
	if (ip6.nexthdr == IPPROTO_HOPOPTS || ip6.nexthdr == IPPROTO_ROUTING ||
	    ip6.nexthdr == IPPROTO_FRAGMENT || ip6.nexthdr == IPPROTO_DSTOPTS)
		return mtn_parse_ipv6_ext(skb, pkt, ip6.nexthdr);
	return mtn_parse_transport(skb, pkt, ETH_HLEN + sizeof(ip6));
}

/* Fills the zeroed @pkt. Returns -1 for what is not IP as this program understands it. */
static __always_inline int mtn_parse(struct __sk_buff *skb, struct mtn_pkt *pkt)
{
	if (skb->vlan_present)
		return -1;
	if (skb->protocol == bpf_htons(ETH_P_IP))
		return mtn_parse_ipv4(skb, pkt);
	if (skb->protocol == bpf_htons(ETH_P_IPV6))
		return mtn_parse_ipv6(skb, pkt);
	return -1;
}

/* 10/8, 172.16/12, 192.168/16 (RFC 1918), 100.64/10 (RFC 6598), 192.0.0/24 (RFC 7335), for a host order word. */
static __always_inline bool mtn_is_private4(__u32 a)
{
	return a >> 24 == 10 || a >> 20 == 0xac1 || a >> 16 == 0xc0a8 ||
	       a >> 22 == 0x64400000 >> 22 || a >> 8 == 0xc00000;
}

/* fc00::/7 (RFC 4193). */
static __always_inline bool mtn_is_private6(const __u32 *addr)
{
	return bpf_ntohl(addr[0]) >> 25 == 0xfc >> 1;
}

/* Multicast, limited broadcast, loopback, unspecified and link-local destinations stay. */
static __always_inline bool mtn_dest_is_local(const struct mtn_flow_key *key)
{
	__u32 first = bpf_ntohl(key->daddr[0]);

	if (key->ipv6)
		return (first >> 24) == 0xff || (first & 0xffc00000) == 0xfe800000 ||
		       (!key->daddr[0] && !key->daddr[1] && !key->daddr[2] &&
			bpf_ntohl(key->daddr[3]) <= 1);
	return (first >> 28) == 0xe || first == 0xffffffff || (first >> 24) == 127 ||
	       (first >> 24) == 0 || (first >> 16) == 0xa9fe;
}

#endif
