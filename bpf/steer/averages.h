/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The two averages of a path, which the argmax-load baseline chooses by (docs/steering.md, "The two
 * averages").
 *
 * The first packet of a new interval merges: it sums the CPUs' counters (traffic.h) and folds what came
 * since the last merge into the averages, as the rate of one interval followed by the empty ones that
 * have passed. The arithmetic is that of the kernel edition, the same text (path_average.h).
 * mountain/tests/vectors/averages.json holds both to the same values.
 */
#ifndef MOUNTAIN_AVERAGES_H
#define MOUNTAIN_AVERAGES_H

#define path_avg_for bpf_for
#include "path_average.h"

/*
 * Whether this is the baseline's program. A constant by the time the verifier sees it: in the program that
 * steers it drops all that serves the baseline alone. Set before the program is loaded.
 */
const volatile __u8 argmax_load;

struct mtn_average averages[MTN_MAX_PATHS];

/* What the baseline chooses by, B/s. @path is below MTN_MAX_PATHS. */
static __always_inline __u64 mtn_average_sum(__u32 path)
{
	struct mtn_average *avg;

	barrier_var(path);
	avg = &averages[path & (MTN_MAX_PATHS - 1)];
	return avg->ema_load + avg->ema_time_delta;
}

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
	intervals = (now - start) / PATH_AVG_INTERVAL_NS;
	if (!__sync_bool_compare_and_swap(&avg->start_ns, start,
					  start + intervals * PATH_AVG_INTERVAL_NS))
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

/* Merges what has been counted for @path, once its interval is over at @now of the exact clock. */
static __always_inline void mtn_average_advance(__u32 path, __u64 now, __u32 n_cpus, __u32 k)
{
	__u64 start;

	if (path >= MTN_MAX_PATHS)
		return;
	start = averages[path].start_ns;
	if (now - start >= PATH_AVG_INTERVAL_NS && now > start)
		mtn_average_merge(path, start, now, n_cpus, k);
}

#endif
