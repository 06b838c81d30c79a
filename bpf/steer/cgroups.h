/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Cgroups with programs at their egress. Such a program has judged a packet for the device that the
 * kernel chose (RestrictNetworkInterfaces= of systemd, above all), so packets of sockets below these
 * cgroups stay there.
 */
#ifndef MOUNTAIN_CGROUPS_H
#define MOUNTAIN_CGROUPS_H

/* Deepest cgroup whose ancestors are all looked up; sockets in deeper ones stay. */
#define MTN_CGROUP_DEPTH	32

/* Whether the kernel can tell a packet's cgroup. */
const volatile __u8 knows_cgroups = 1;

/* Ids of cgroups. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MTN_MAX_CGROUPS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, __u8);
} held_cgroups SEC(".maps");

/* A function of its own to the verifier, which would else follow each case of it to the end. */
__noinline int mtn_is_held_cgroup(struct __sk_buff *skb)
{
	__u64 id;
	int level;

	if (!knows_cgroups)
		return 0;
	for (level = 0; level < MTN_CGROUP_DEPTH; level++) {
		id = bpf_skb_ancestor_cgroup_id(skb, level);
		if (!id)	/* no socket, or all ancestors were looked up */
			return 0;
		if (bpf_map_lookup_elem(&held_cgroups, &id))
			return 1;
	}
	return 1;
}

#endif
