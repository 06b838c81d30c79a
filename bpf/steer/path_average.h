/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The two averages of a path's load, in exact integer arithmetic.
 *
 * Time is cut into intervals of PATH_AVG_INTERVAL_NS. The bytes of an interval
 * make its rate; with K in 1/1024 and every division rounding down
 *
 *   ema_load       = (K * rate + (1024 - K) * ema_load) / 1024
 *   ema_time_delta = (K * |rate - ema_load| + (1024 - K) * ema_time_delta) / 1024
 *
 * the second line with the ema_load that the first one has just made. All
 * three are bytes per second. An interval in which nothing was sent has rate 0.
 *
 * The same text serves the kernel, BPF programs and their tests: nothing here
 * but fixed-width integers.
 */
#ifndef _NET_PATH_AVERAGE_H
#define _NET_PATH_AVERAGE_H

#include <linux/types.h>

#define PATH_AVG_INTERVAL_NS	10000000ULL
#define PATH_AVG_PER_S		(1000000000ULL / PATH_AVG_INTERVAL_NS)
#define PATH_AVG_K_ONE		1024ULL
#define PATH_AVG_K_DEFAULT	512
/* Intervals caught up one by one; after a longer silence both averages are 0. */
#define PATH_AVG_CATCH_UP	64

/* BPF brings a loop of its own, which is cheaper to verify. */
#ifndef path_avg_for
#define path_avg_for(i, start, end) for (i = (start); i < (end); i++)
#endif

struct path_average {
	__u64 ema_load;		/* B/s */
	__u64 ema_time_delta;	/* B/s */
};

static __always_inline __u64 path_avg_ema(__u64 old, __u64 new, __u64 k)
{
	return (k * new + (PATH_AVG_K_ONE - k) * old) / PATH_AVG_K_ONE;
}

static __always_inline void path_avg_interval(struct path_average *avg,
					      __u64 rate, __u64 k)
{
	__u64 diff;

	avg->ema_load = path_avg_ema(avg->ema_load, rate, k);
	diff = rate > avg->ema_load ? rate - avg->ema_load :
				      avg->ema_load - rate;
	avg->ema_time_delta = path_avg_ema(avg->ema_time_delta, diff, k);
}

/*
 * @intervals have ended: @bytes were sent in the first of them, nothing in the
 * others. Exact while rate and averages stay below 2^53.
 */
static __always_inline void path_avg_advance(struct path_average *avg,
					     __u64 bytes, __u64 intervals,
					     __u64 k)
{
	int i;

	if (!intervals)
		return;
	if (intervals > PATH_AVG_CATCH_UP) {
		avg->ema_load = 0;
		avg->ema_time_delta = 0;
		return;
	}
	path_avg_interval(avg, bytes * PATH_AVG_PER_S, k);
	path_avg_for(i, 1, (int)intervals)
		path_avg_interval(avg, 0, k);
}

#endif
