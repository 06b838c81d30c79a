/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Settling: a flow that has found its bandwidth makes room once, to see the round trip of the empty path.
 *
 * Flows that begin together measure their smallest RTT while STARTUP, their own and the others', fills the
 * queue. Each takes what it has seen for the path's own, allows itself two BDP of it, and so the queue stays
 * until BBR probes the RTT, ten seconds after it last saw a smaller one. Those that began first know better,
 * and get less.
 *
 * So when BBR has left STARTUP and DRAIN for the first time, the window is half of what is in flight, until
 * a round trip has passed that only saw packets sent into that window; and half of that for each round trip
 * that is shorter than all before it: then there is a queue, and the others are making room, too. Where
 * there is none it costs about a round trip's packets, once.
 *
 * Pure code over plain data, as brake.h, whose mtn_ack it takes. The reasons for the numbers are in
 * docs/congestion-control.md.
 */
#ifndef MOUNTAIN_SETTLE_H
#define MOUNTAIN_SETTLE_H

#include "../brake.h"

/* Most round trips that it lasts. */
#define MTN_SETTLE_ROUNDS	8

enum mtn_settle_state {
	MTN_SETTLE_BEFORE = 0,
	MTN_SETTLE_LOOKING = 1,
	MTN_SETTLE_DONE = 2,
};

/* All zeros before a flow's first ACK. */
struct mtn_settle {
	__u32 round_end;	/* mtn_ack.total at which this round trip ends */
	__u32 rtt_us;		/* lowest in it, 0: none */
	__u32 low_us;		/* lowest before it */
	__u32 cwnd;		/* the window, packets */
	__u8 rounds;
	__u8 state;		/* enum mtn_settle_state */
};

/* Takes one ACK in; call after BBR has seen it. */
static mtn_inline void mtn_settle_ack(struct mtn_settle *s, const struct mtn_ack *a)
{
	int shorter;

	if (s->state == MTN_SETTLE_DONE || a->startup || a->suspended || !a->min_rtt_us)
		return;
	if (s->state == MTN_SETTLE_BEFORE) {
		/* What an application sends in small parts makes no queue, and half of it is no window. */
		if (a->app_limited)
			return;
		s->state = MTN_SETTLE_LOOKING;
		s->low_us = a->min_rtt_us;
		s->cwnd = mtn_max(a->inflight / 2, MTN_CWND_MIN);
		s->round_end = a->total + a->inflight;
	}
	if (a->rtt_us && !a->ack_delayed && (!s->rtt_us || a->rtt_us < s->rtt_us))
		s->rtt_us = a->rtt_us;
	if ((__s32)(a->total - s->round_end) < 0 || !s->rtt_us)
		return;

	shorter = s->rtt_us < s->low_us - s->low_us / 16;
	s->rounds++;
	/* What was acknowledged in the first one had been sent before. */
	if ((s->rounds >= 2 && !shorter) || s->rounds >= MTN_SETTLE_ROUNDS) {
		s->state = MTN_SETTLE_DONE;
		return;
	}
	if (shorter)
		s->cwnd = mtn_max(s->cwnd / 2, MTN_CWND_MIN);
	s->low_us = mtn_min(s->low_us, s->rtt_us);
	s->rtt_us = 0;
	s->round_end = a->total + a->inflight;
}

/* A transmission begins with nothing in flight, after the application had nothing to send for @idle_us. */
static mtn_inline void mtn_settle_tx_start(struct mtn_settle *s, __u64 idle_us)
{
	/* The path has been empty: there is nothing to make room for. */
	if (s->state == MTN_SETTLE_LOOKING && idle_us > MTN_IDLE_US)
		s->state = MTN_SETTLE_DONE;
}

/* Most packets in flight, or MTN_CWND_OFF. */
static mtn_inline __u32 mtn_settle_cwnd(const struct mtn_settle *s, const struct mtn_ack *a)
{
	return s->state == MTN_SETTLE_LOOKING && !a->suspended ? s->cwnd : MTN_CWND_OFF;
}

#endif /* MOUNTAIN_SETTLE_H */
