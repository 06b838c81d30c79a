/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The two averages of a path (docs/steering.md, "The two averages").
 *
 * Bytes are counted per CPU. The first packet of a new interval merges: it sums the CPUs' totals
 * and folds what came since the last merge into the averages, as the rate of one interval followed
 * by the empty ones that have passed. The arithmetic is that of the kernel edition, the same text
 * (path_average.h), and of mountain/src/steer/averages.rs; mountain/tests/vectors/averages.json holds all to
 * the same values.
 */
#ifndef MOUNTAIN_AVERAGES_H
#define MOUNTAIN_AVERAGES_H

#define path_avg_for bpf_for
#include "path_average.h"

#define MTN_AVG_INTERVAL_NS	PATH_AVG_INTERVAL_NS

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, MTN_MAX_PATHS);
	__type(key, __u32);
	__type(value, struct mtn_traffic);
} traffic SEC(".maps");

struct mtn_average averages[MTN_MAX_PATHS];

/* @bytes came in the first of @intervals intervals, nothing in the others. */
static __always_inline void mtn_average_update(struct mtn_average *avg, __u64 bytes,
					       __u64 intervals, __u64 k)
{
	struct path_average pair = {
		.ema_load = avg->ema_load,
		.ema_time_delta = avg->ema_time_delta,
	};

	path_avg_advance(&pair, bytes, intervals, k);
	avg->ema_load = pair.ema_load;
	avg->ema_time_delta = pair.ema_time_delta;
}

__noinline int mtn_average_merge(__u32 path, __u64 start, __u64 now, __u32 n_cpus,
					__u32 k)
{
	struct mtn_average *avg;
	__u64 total = 0, intervals, bytes;
	int cpu;

	if (path >= MTN_MAX_PATHS)
		return 0;
	avg = &averages[path];
	intervals = (now - start) / MTN_AVG_INTERVAL_NS;
	if (!__sync_bool_compare_and_swap(&avg->start_ns, start,
					  start + intervals * MTN_AVG_INTERVAL_NS))
		return 0;	/* another CPU merges */
	bpf_for(cpu, 0, (int)n_cpus) {
		struct mtn_traffic *t = bpf_map_lookup_percpu_elem(&traffic, &path, cpu);

		if (t)
			total += t->bytes;
	}
	bytes = total - avg->total_bytes;
	avg->total_bytes = total;
	mtn_average_update(avg, bytes, intervals, k);
	return 0;
}

/* Counts a packet of @len bytes that leaves by @path. */
static __always_inline void mtn_account(__u32 path, __u32 len, __u32 packets, __u64 now,
					__u32 n_cpus, __u32 k)
{
	struct mtn_traffic *t;
	__u64 start;

	if (path >= MTN_MAX_PATHS)
		return;
	start = averages[path].start_ns;
	if (now - start >= MTN_AVG_INTERVAL_NS && now > start)
		mtn_average_merge(path, start, now, n_cpus, k);
	t = bpf_map_lookup_elem(&traffic, &path);
	if (!t)
		return;
	t->packets += packets;
	t->bytes += len;
}

/* Counts a latency flow's packet of @len bytes that is to leave by @path. */
__noinline int mtn_account_latency(__u32 path, __u32 len)
{
	struct mtn_traffic *t = bpf_map_lookup_elem(&traffic, &path);

	if (t)
		t->latency_bytes += len;
	return 0;
}

#endif
