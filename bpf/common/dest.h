/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Which group of paths a destination belongs to: the longest prefix decides, and a more specific
 * route that is no group's stands in the tries as "not ours".
 */
#ifndef MOUNTAIN_DEST_H
#define MOUNTAIN_DEST_H

/* Value of the destination tries: a group, or MTN_NOT_OURS. */
#define MTN_NOT_OURS	0xffffffff
/* Of one family: twice the Internet's. Entries are allocated as they are written. */
#define MTN_MAX_DESTS	(1 << 21)

struct mtn_lpm4_key {
	__u32 prefixlen;
	__u32 addr;
};

struct mtn_lpm6_key {
	__u32 prefixlen;
	__u32 addr[4];
};

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, MTN_MAX_DESTS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct mtn_lpm4_key);
	__type(value, __u32);
} dest4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, MTN_MAX_DESTS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct mtn_lpm6_key);
	__type(value, __u32);
} dest6 SEC(".maps");

/* The group of a destination, or MTN_NOT_OURS. */
static __always_inline __u32 mtn_group_of(const struct mtn_flow_key *key)
{
	__u32 *group;

	if (key->ipv6) {
		struct mtn_lpm6_key k = { .prefixlen = 128 };

		__builtin_memcpy(k.addr, key->daddr, 16);
		group = bpf_map_lookup_elem(&dest6, &k);
	} else {
		struct mtn_lpm4_key k = { .prefixlen = 32, .addr = key->daddr[0] };

		group = bpf_map_lookup_elem(&dest4, &k);
	}
	return group ? *group : MTN_NOT_OURS;
}

#endif
