/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The marks with which the SYNs of forwarded TCP connections have left: for further packets that meet no table of ours,
 * as somebody loads the firewall anew. Netfilter itself has the last word where the table is. Asking connection tracking
 * (bpf_skb_ct_lookup) would know more, but takes CAP_SYS_ADMIN at load where that is a module. The daemon writes what it
 * knows when this begins, and when something may have been missed. Included by placement.bpf.c.
 */
#ifndef MOUNTAIN_CONNECTION_H
#define MOUNTAIN_CONNECTION_H

/* Within this a SYN may be one that is sent again: tcp_syn_retries 6 (Linux, 127 s), and a bit. */
#define MTN_SYN_AGAIN_NS	130000000000ULL

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct mtn_flow_key);
	__type(value, struct mtn_connection);
} connections SEC(".maps");

static __always_inline __u32 mtn_epoch(void)
{
	return *(volatile __u32 *)&config.epoch;
}

/* The mark of the connection that a packet with @key is of; 0: it is the kernel's, or not known. */
static __always_inline __u32 mtn_mark_of(const struct mtn_flow_key *key)
{
	struct mtn_connection *known = bpf_map_lookup_elem(&connections, key);

	return known && known->epoch == mtn_epoch() ? known->mark : 0;
}

/* An answer to a SYN that came in by an uplink: the connection is not what was begun from here by these ports. */
static __always_inline void mtn_forget(const struct mtn_flow_key *key)
{
	struct mtn_connection *known = bpf_map_lookup_elem(&connections, key);

	if (known)
		known->mark = 0;
}

/*
 * A SYN leaves with @mark, or with 0 as the kernel's: whatever had its ports before is over. Where one has lately left
 * otherwise, it is not known which of them the connection has.
 */
static __always_inline void mtn_remember(const struct mtn_flow_key *key, __u32 mark)
{
	struct mtn_connection now = { .syn_ns = bpf_ktime_get_ns(), .mark = mark, .epoch = mtn_epoch() };
	struct mtn_connection *was = bpf_map_lookup_elem(&connections, key);

	if (was && (was->mark != mark || was->epoch != now.epoch) && now.syn_ns - was->syn_ns < MTN_SYN_AGAIN_NS)
		now.mark = 0;
	bpf_map_update_elem(&connections, key, &now, BPF_ANY);
}

#endif
