/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Packets of sockets below cgroups with programs at their egress: they stay where these have seen them. */
#ifndef MOUNTAIN_CGROUPS_H
#define MOUNTAIN_CGROUPS_H

#include "../common/held_cgroups.h"

/* Whether the kernel can tell a packet's cgroup. */
const volatile __u8 knows_cgroups = 1;

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
