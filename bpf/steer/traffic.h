/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What has left by each path, counted per CPU.
 */
#ifndef MOUNTAIN_TRAFFIC_H
#define MOUNTAIN_TRAFFIC_H

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, MTN_MAX_PATHS);
	__type(key, __u32);
	__type(value, struct mtn_traffic);
} traffic SEC(".maps");

/* Counts @packets of @len bytes in all that leave by @path. */
static __always_inline void mtn_count_traffic(__u32 path, __u32 len, __u32 packets)
{
	struct mtn_traffic *t = bpf_map_lookup_elem(&traffic, &path);

	if (!t)
		return;
	t->packets += packets;
	t->bytes += len;
}

/* Counts a latency flow's packet of @len bytes that is to leave by @path. */
static __always_inline void mtn_count_latency(__u32 path, __u32 len)
{
	struct mtn_traffic *t = bpf_map_lookup_elem(&traffic, &path);

	if (t)
		t->latency_bytes += len;
}

#endif
