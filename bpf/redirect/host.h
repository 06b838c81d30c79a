/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What this host knows of a packet that a rule names: its sockets, and its connection tracking.
 */
#ifndef MOUNTAIN_REDIRECT_HOST_H
#define MOUNTAIN_REDIRECT_HOST_H

/* include/net/tcp_states.h */
#define TCP_LISTEN		10

/* The first words of struct bpf_ct_opts, which all kernels take (net/netfilter/nf_conntrack_bpf.c). */
struct mtn_ct_opts {
	__s32 netns_id;
	__s32 error;
	__u8 l4proto;
	__u8 dir;		/* of the entry that is found */
	__u8 reserved[2];
};
/* include/uapi/linux/netfilter/nf_conntrack_tuple_common.h */
#define IP_CT_DIR_REPLY	1

/* Of a type that is only declared, libbpf would not find the functions. */
struct nf_conn {
	unsigned long status;
};
extern struct nf_conn *bpf_skb_ct_lookup(struct __sk_buff *, struct bpf_sock_tuple *, __u32,
					 struct mtn_ct_opts *, __u32) __ksym __weak;
extern struct nf_conn *bpf_xdp_ct_lookup(struct xdp_md *, struct bpf_sock_tuple *, __u32,
					 struct mtn_ct_opts *, __u32) __ksym __weak;
extern void bpf_ct_release(struct nf_conn *) __ksym __weak;

/* Fills in a look-up's @tuple. Returns the size of it. */
static __always_inline __u32 mtn_rd_tuple(const struct mtn_rd_key6 *key, struct bpf_sock_tuple *tuple,
					  bool ipv6)
{
	if (ipv6) {
		__builtin_memcpy(tuple->ipv6.saddr, key->saddr, 16);
		__builtin_memcpy(tuple->ipv6.daddr, key->daddr, 16);
		tuple->ipv6.sport = key->sport;
		tuple->ipv6.dport = key->dport;
		return sizeof(tuple->ipv6);
	}
	tuple->ipv4.saddr = key->saddr[0];
	tuple->ipv4.daddr = key->daddr[0];
	tuple->ipv4.sport = key->sport;
	tuple->ipv4.dport = key->dport;
	return sizeof(tuple->ipv4);
}

/*
 * Whether a socket of this host has the connection that a packet with @key is of. A listening one has
 * not.
 */
static __always_inline int mtn_rd_has_socket(void *ctx, const struct mtn_rd_key6 *key, bool ipv6,
					     const int hook)
{
	struct bpf_sock_tuple tuple = {};
	struct bpf_sock *sk;
	bool has;

	sk = bpf_skc_lookup_tcp(ctx, &tuple, mtn_rd_tuple(key, &tuple, ipv6), BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return false;
	has = sk->state != TCP_LISTEN;
	bpf_sk_release(sk);
	return has;
}

__noinline int mtn_rd_has_socket_xdp(struct xdp_md *ctx, struct mtn_rd_key6 *key, bool ipv6)
{
	return key ? mtn_rd_has_socket(ctx, key, ipv6, MTN_HOOK_XDP) : true;
}

__noinline int mtn_rd_has_socket_skb(struct __sk_buff *ctx, struct mtn_rd_key6 *key, bool ipv6)
{
	return key ? mtn_rd_has_socket(ctx, key, ipv6, MTN_HOOK_IN) : true;
}

/*
 * Whether a packet with @key answers what a socket of this host, or a masqueraded one, has sent from a rule's address
 * and port: as far as connection tracking has seen that.
 */
static __always_inline int mtn_rd_is_answered(void *ctx, const struct mtn_rd_key6 *key, bool ipv6,
					      const int hook)
{
	struct mtn_ct_opts opts = { .netns_id = BPF_F_CURRENT_NETNS, .l4proto = key->proto };
	struct bpf_sock_tuple tuple = {};
	struct nf_conn *found;

	/* Without Netfilter's connection tracking there are none. */
	if (!bpf_ksym_exists(bpf_ct_release) ||
	    (hook == MTN_HOOK_XDP ? !bpf_ksym_exists(bpf_xdp_ct_lookup) :
				    !bpf_ksym_exists(bpf_skb_ct_lookup)))
		return 0;
	if (hook == MTN_HOOK_XDP)
		found = bpf_xdp_ct_lookup(ctx, &tuple, mtn_rd_tuple(key, &tuple, ipv6), &opts,
					  sizeof(opts));
	else
		found = bpf_skb_ct_lookup(ctx, &tuple, mtn_rd_tuple(key, &tuple, ipv6), &opts,
					  sizeof(opts));
	if (!found)
		return 0;
	bpf_ct_release(found);
	return opts.dir == IP_CT_DIR_REPLY;
}

__noinline int mtn_rd_is_answered_xdp(struct xdp_md *ctx, struct mtn_rd_key6 *key, bool ipv6)
{
	return key ? mtn_rd_is_answered(ctx, key, ipv6, MTN_HOOK_XDP) : true;
}

__noinline int mtn_rd_is_answered_skb(struct __sk_buff *ctx, struct mtn_rd_key6 *key, bool ipv6)
{
	return key ? mtn_rd_is_answered(ctx, key, ipv6, MTN_HOOK_IN) : true;
}

#endif
