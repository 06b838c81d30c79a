// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* brake.h and settle.h for user space: the tests call what the kernel runs. */
#include <linux/types.h>

#include "../brake.h"
#include "settle.h"

const struct mtn_brake_params mtn_brake_host_defaults = MTN_BRAKE_DEFAULTS;

void mtn_brake_host_init(struct mtn_brake *b)
{
	mtn_brake_init(b);
}

void mtn_brake_host_ack(struct mtn_brake *b, const struct mtn_brake_params *p,
			const struct mtn_ack *a)
{
	mtn_brake_ack(b, p, a);
}

void mtn_brake_host_tx_start(struct mtn_brake *b, const struct mtn_brake_params *p, __u64 now_us,
			     __u32 total, __u64 idle_us, int app_limited)
{
	mtn_brake_tx_start(b, p, now_us, total, idle_us, app_limited);
}

__u64 mtn_brake_host_pacing(const struct mtn_brake *b, const struct mtn_ack *a, __u64 rate)
{
	return mtn_brake_pacing(b, a, rate);
}

__u32 mtn_brake_host_cwnd(const struct mtn_brake *b, const struct mtn_brake_params *p,
			  const struct mtn_ack *a, __u32 own)
{
	return mtn_brake_cwnd(b, p, a, own);
}

__u32 mtn_brake_host_own_cwnd(__u32 cwnd, __u32 own, __u32 limited, int loss)
{
	return mtn_brake_own_cwnd(cwnd, own, limited, loss);
}

__u64 mtn_brake_host_bps_of_bbr(__u32 bw, __u32 mss)
{
	return mtn_bps_of_bbr(bw, mss);
}

__u32 mtn_brake_host_published_gain(__u32 gain, __u64 max_bps, __u64 bps)
{
	return mtn_published_gain(gain, max_bps, bps);
}

void mtn_settle_host_ack(struct mtn_settle *s, const struct mtn_ack *a)
{
	mtn_settle_ack(s, a);
}

void mtn_settle_host_tx_start(struct mtn_settle *s, __u64 idle_us)
{
	mtn_settle_tx_start(s, idle_us);
}

__u32 mtn_settle_host_cwnd(const struct mtn_settle *s, const struct mtn_ack *a)
{
	return mtn_settle_cwnd(s, a);
}
