/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What connection tracking knows of a packet's connection, before Netfilter asks it. Included by placement.bpf.c.
 */
#ifndef MOUNTAIN_CONNECTION_H
#define MOUNTAIN_CONNECTION_H

/* The first words of struct bpf_ct_opts, which all kernels take (net/netfilter/nf_conntrack_bpf.c). */
struct mtn_ct_opts {
	__s32 netns_id;
	__s32 error;
	__u8 l4proto;
	__u8 dir;
	__u8 reserved[2];
};

extern struct nf_conn *bpf_skb_ct_lookup(struct __sk_buff *, struct bpf_sock_tuple *, __u32,
					 struct mtn_ct_opts *, __u32) __ksym __weak;
extern void bpf_ct_release(struct nf_conn *) __ksym __weak;

/* Our bits of a connection's mark, if they name an uplink: others are somebody else's, and stay his. */
static __always_inline __u32 mtn_uplink_mark(__u32 mark)
{
	__u32 i, n = *(volatile __u32 *)&config.n_uplink_marks;

	mark &= config.mark_mask;
	for (i = 0; mark && i < MTN_MAX_UPLINK_MARKS && i < n; i++)
		if (uplink_marks[i] == mark)
			return mark;
	return 0;
}

/* Is there a connection that a packet with @key is of? Then @mark is that of its uplink, or 0. */
static __always_inline bool mtn_is_known(struct __sk_buff *skb, const struct mtn_flow_key *key, __u32 *mark)
{
	struct mtn_ct_opts opts = { .netns_id = BPF_F_CURRENT_NETNS, .l4proto = key->proto };
	struct bpf_sock_tuple tuple = {};
	struct nf_conn *found;
	__u32 size;

	if (!bpf_ksym_exists(bpf_skb_ct_lookup) || !bpf_ksym_exists(bpf_ct_release) ||
	    !bpf_core_field_exists(struct nf_conn, mark))
		return false;
	if (key->ipv6) {
		__builtin_memcpy(tuple.ipv6.saddr, key->saddr, 16);
		__builtin_memcpy(tuple.ipv6.daddr, key->daddr, 16);
		tuple.ipv6.sport = key->sport;
		tuple.ipv6.dport = key->dport;
		size = sizeof(tuple.ipv6);
	} else {
		tuple.ipv4.saddr = key->saddr[0];
		tuple.ipv4.daddr = key->daddr[0];
		tuple.ipv4.sport = key->sport;
		tuple.ipv4.dport = key->dport;
		size = sizeof(tuple.ipv4);
	}
	found = bpf_skb_ct_lookup(skb, &tuple, size, &opts, sizeof(opts));
	if (!found)
		return false;
	*mark = mtn_uplink_mark(found->mark);
	bpf_ct_release(found);
	return true;
}

#endif
