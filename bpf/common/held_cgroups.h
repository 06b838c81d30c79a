/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Cgroups with programs of others at their egress. What such a program says about a packet may depend on the device
 * that the kernel has chosen (RestrictNetworkInterfaces= of systemd, above all).
 */
#ifndef MOUNTAIN_HELD_CGROUPS_H
#define MOUNTAIN_HELD_CGROUPS_H

/* Deepest cgroup whose ancestors are all looked up; sockets in deeper ones are left alone. */
#define MTN_CGROUP_DEPTH	32

/* Ids of cgroups. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MTN_MAX_CGROUPS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, __u8);
} held_cgroups SEC(".maps");

#endif
