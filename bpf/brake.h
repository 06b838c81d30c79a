/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The delta brake: how fast a flow may send after the bandwidth under it fell.
 *
 * Pure code over plain data, the clock passed in. It is one text for BPF (Mountain's bpf/), for the
 * kernel's own BBR (net/ipv4/, in Mountain's kernel series) and for tests in user space: change
 * both files or none. The reasons for every number are in Mountain's docs/congestion-control.md.
 *
 * BBR paces at the highest delivery rate of the last ten round trips. When the path slows down, it
 * goes on at the old rate for that long, and the difference piles up in the bottleneck's queue. The
 * brake watches each *slice* of time (an eighth of the smallest RTT, mostly a quarter while it
 * limits) for the three signs of such a drop together: ACKs are further apart than the packets were
 * (`grow`), the delay rises, and the delivery rate has fallen well below the estimate. Then it
 * limits the *bandwidth* that pacing and window are made of, never a gain:
 *
 *   OFF ---- drop, not clear yet ----> HOLD: window stays at what is in flight, for one slice
 *   OFF, HOLD, RELEASE ---- drop ----> CUT: rate = what is delivered, window = one BDP of it,
 *                                      so that the queue drains
 *   CUT ---- queue gone -------------> RELEASE: rate doubles each round trip that finds no queue,
 *                                      past BBR's estimate to what that was when the brake engaged
 *   CUT ---- ACKs come much faster --> RELEASE: the path is back, however long the queue still is
 *   RELEASE ---- there --------------> OFF
 *   RELEASE ---- a queue ------------> CUT to what is delivered, until it is gone
 *   RELEASE ---- a queue, and the estimate reached ---> CUT to the estimate, then OFF
 *   CUT ---- queue does not drain ---> OFF for a while: it is someone else's
 *   CUT ---- a small one stays ------> RELEASE: as good as gone
 *   OFF ---- a fade seems over ------> RELEASE
 *
 * What it brakes to is never below what was measured to be delivered, nor below half of the limit
 * or BBR's estimate, whichever is less.
 *
 * In a fade longer than ten round trips BBR forgets what the path carried before, and finds it
 * again by a quarter every eight round trips. The brake remembers for a while: where BBR's estimate
 * has risen without a queue, it goes on from there.
 *
 * A path whose rate keeps falling far and coming back punishes an empty queue: nothing is there to
 * be sent. Each time that the brake engages again soon, and has to go far down, it leaves a larger
 * part of the queue (`slack`), up to a limit, and forgets that in calm. As long as there is any the
 * path is *restless*: what is in flight when its rate falls is what queues, so that the window is
 * little more than one BDP instead of BBR's two, and what comes back is taken up faster.
 *
 * Units: bit/s, µs, packets; shares in 1/1024. All rates are kept within 1 .. MTN_BPS_MAX, so that
 * a product with a time of up to MTN_US_MAX or a share stays within 64 bits.
 */
#ifndef MOUNTAIN_BRAKE_H
#define MOUNTAIN_BRAKE_H

/* An includer may have its own: BPF wants all inlined, 32-bit kernels divide by a function. */
#ifndef mtn_inline
#define mtn_inline inline
#endif
#ifndef mtn_div
#define mtn_div(a, b)	((a) / (b))
#endif
#ifndef fallthrough
#define fallthrough	__attribute__((__fallthrough__))
#endif

#define MTN_ONE			1024
#define MTN_BPS_MAX		(1ULL << 39)	/* 550 Gbit/s */
#define MTN_US_MAX		(1U << 24)	/* 17 s */
#define MTN_BRAKE_OFF		(~0ULL)
#define MTN_CWND_MIN		4
#define MTN_CWND_OFF		(~0U)
#define MTN_HOLD_OFF_FIRST	64		/* slices */
#define MTN_SLICE_PACKETS	4
#define MTN_UNREST		256		/* slices */
#define MTN_DEEP		(MTN_ONE * 5 / 8)	/* falling below this share of it is far */
#define MTN_AT_ONCE		4	/* times the limit: ACKs as fast need no second look */
#define MTN_OUTAGE_ROUNDS	10		/* smallest RTTs without an ACK */
#define MTN_MEMORY_US		10000000	/* as long as BBR remembers the smallest RTT */
#define MTN_IDLE_US		1000000		/* what is known is out of date after it */
#define MTN_PUBLISHED_MIN	512		/* the published change slows no more than this */
#define MTN_BBR_BW_SHIFT	24		/* BBR's bandwidth is packets/µs times 2 to this */

enum mtn_cc_mode {
	MTN_CC_BRAKE = 0,	/* what this is for */
	MTN_CC_BBR = 1,		/* pass everything through: what wrapping alone costs */
	MTN_CC_PUBLISHED = 2,	/* the original change, in effect (docs/congestion-control.md) */
};

enum mtn_brake_state {
	MTN_STATE_OFF = 0,
	MTN_STATE_HOLD = 1,
	MTN_STATE_CUT = 2,
	MTN_STATE_RELEASE = 3,
};

/* Set when the program is loaded. */
struct mtn_brake_params {
	__u32 mode;		/* enum mtn_cc_mode */
	__u32 slice_min_us;	/* a slice is at least this long */
	__u32 engage;		/* share of the estimate below which delivery has dropped */
	__u32 hold;		/* ... below which it may be dropping */
	__u32 queue;		/* share of the smallest RTT up to which the queue counts as gone */
	__u32 queue_min_us;	/* ... but no delay below this counts as a queue */
	__u32 grow;		/* growth of the rate in a round trip without a queue */
	__u32 hold_off_max;	/* most slices to stay off after braking for someone else's queue */
	__u32 slack_max;	/* most of the queue to leave, share of the smallest RTT */
};

/* For which docs/congestion-control.md gives the reasons. mountain.toml can set others for BPF. */
#define MTN_BRAKE_DEFAULTS {				\
	.mode		= MTN_CC_BRAKE,			\
	.slice_min_us	= 2000,				\
	.engage		= MTN_ONE * 13 / 16,		\
	.hold		= MTN_ONE * 15 / 16,		\
	.queue		= MTN_ONE / 8,			\
	.queue_min_us	= 2000,				\
	.grow		= MTN_ONE,			\
	.hold_off_max	= 2048,				\
	.slack_max	= MTN_ONE,			\
}

/* What one ACK tells. */
struct mtn_ack {
	__u64 now_us;
	__u64 max_bps;		/* BBR's estimate */
	__u32 delivered;	/* packets of the rate sample; 0: no sample */
	__u32 interval_us;	/* of the sample */
	__u32 snd_us;		/* in which they were sent */
	__u32 rcv_us;		/* in which they were acknowledged */
	__u32 rtt_us;		/* 0: no sample */
	__u32 min_rtt_us;
	__u32 total;		/* packets delivered since the flow began, wraps */
	__u32 inflight;		/* packets */
	__u32 mss;		/* bytes of a packet */
	__u8 app_limited;	/* the sample says what was sent, not what the path carries */
	__u8 ack_delayed;	/* the RTT includes the receiver's waiting */
	__u8 suspended;		/* BBR drains, probes the RTT or follows a policer: stand back */
	__u8 startup;		/* BBR has not found the bandwidth yet */
};

struct mtn_brake {
	__u64 bps;		/* the limit, or MTN_BRAKE_OFF */
	__u64 goal_bps;		/* the release ends here: the estimate when the brake engaged */
	__u64 goal_until_us;	/* when that is forgotten */
	__u64 low_bps;		/* BBR's lowest estimate since there was a queue */
	__u64 release_bps;	/* the limit when it began to grow */
	__u64 cut_bps;		/* what it was cut from, if that may tell how far it falls */
	__u64 ack_bps;		/* at which ACKs came in the last slice */
	/* The current slice. */
	__u64 slice_start_us;
	__u64 slice_bps;	/* highest delivery rate */
	__u32 slice_rtt_us;	/* lowest RTT, 0: none */
	__u32 slice_total;	/* mtn_ack.total at its start */
	__u8 grow;		/* the last sample's ACKs were further apart than its packets */
	__u8 grow_all;		/* all samples', by far */
	__u8 app_limited;	/* any sample was */
	__u8 state;		/* enum mtn_brake_state */
	__u8 drain;		/* this CUT only removes a queue that the release has made */
	__u8 raised;		/* this RELEASE has raised the limit */
	/* Between slices. */
	__u64 last_bps;		/* delivery of the last slice */
	__u32 queue_us;		/* its queue */
	__u32 hold_cwnd;
	__u32 round_end;	/* mtn_ack.total from which on ACKs tell of the limit as it is */
	__u32 stuck;		/* rounds in CUT at the target with a queue that stays */
	__u32 hold_off;		/* slices to stay off */
	__u32 hold_off_next;
	__u32 slack_us;		/* queue to leave */
	__u32 unrest;		/* slices in which braking again counts as soon */
	/* For people. */
	__u32 engagements;
	__u32 holds;
	__u32 deepened;
	__u32 abandoned;
	__u64 braked_us;	/* time not OFF, to the end of the last slice */
};

#define mtn_min(a, b)	((a) < (b) ? (a) : (b))
#define mtn_max(a, b)	((a) > (b) ? (a) : (b))

static mtn_inline __u64 mtn_share(__u64 value, __u32 share)
{
	return value * share / MTN_ONE;
}

static mtn_inline __u64 mtn_bps_clamp(__u64 bps)
{
	return bps < 1 ? 1 : mtn_min(bps, MTN_BPS_MAX);
}

/* Rate of @packets of @mss bytes in @us. */
static mtn_inline __u64 mtn_bps(__u32 packets, __u32 mss, __u32 us)
{
	/* 2^20 packets of 2^16 bytes are 2^39 bits; a second is 2^20 µs. */
	__u64 bits = (__u64)mtn_min(packets, 1U << 20) * mtn_min(mss, 1U << 16) * 8;

	return mtn_bps_clamp(mtn_div(bits * 1000000, mtn_max(us, 1U)));
}

/* BBR's estimate @bw, for packets of @mss bytes: bw has 32 bits, so the first product has 51. */
static mtn_inline __u64 mtn_bps_of_bbr(__u32 bw, __u32 mss)
{
	return ((__u64)bw * (mtn_min(mss, 1U << 16) * 8) >> 8) * 1000000 >> (MTN_BBR_BW_SHIFT - 8);
}

/* BBR's pacing_gain as the published change leaves it, where BBR's estimate is @max_bps. */
static mtn_inline __u32 mtn_published_gain(__u32 gain, __u64 max_bps, __u64 bps)
{
	__u64 share;

	if (!max_bps || bps >= max_bps)
		return gain;
	share = mtn_div(bps * MTN_ONE, max_bps);
	return gain * mtn_max(share, MTN_PUBLISHED_MIN) / MTN_ONE;
}

/* Packets in flight that keep a path of @bps and @us busy. */
static mtn_inline __u32 mtn_bdp(__u64 bps, __u32 us, __u32 mss)
{
	__u64 bytes = mtn_div(mtn_min(bps, MTN_BPS_MAX) * mtn_min(us, MTN_US_MAX), 8000000);
	__u64 packets = mtn_div(bytes, mtn_max(mss, 1U)) + 1;

	return mtn_min(packets, 1ULL << 30);
}

/* Delay up to which the queue counts as gone. */
static mtn_inline __u32 mtn_queue_low(const struct mtn_brake_params *p, __u32 min_rtt_us)
{
	__u32 us = mtn_share(mtn_min(min_rtt_us, MTN_US_MAX), p->queue);

	return mtn_max(us, p->queue_min_us);
}

/* Time of two packets at the limit: windows are rounded up to whole ones, which makes no queue. */
static mtn_inline __u32 mtn_two_packets_us(const struct mtn_brake *b, __u32 mss)
{
	__u64 us = mtn_div(2 * 8 * 1000000ULL * mtn_min(mss, 1U << 16), mtn_max(b->bps, 1ULL));

	return mtn_min(us, MTN_US_MAX);
}

/*
 * Round trip that a window has to last for. On paths of microseconds it is the hosts' own delays
 * that count: half of what counts as no queue, so that such a window makes none.
 */
static mtn_inline __u32 mtn_window_us(const struct mtn_brake_params *p, __u32 min_rtt_us)
{
	return mtn_max(mtn_min(min_rtt_us, MTN_US_MAX), p->queue_min_us / 2);
}

static mtn_inline void mtn_brake_slice_start(struct mtn_brake *b, __u64 now_us, __u32 total)
{
	b->slice_start_us = now_us;
	b->slice_total = total;
	b->slice_bps = 0;
	b->slice_rtt_us = 0;
	b->grow = 0;
	b->grow_all = 1;
	b->app_limited = 0;
}

static mtn_inline void mtn_brake_off(struct mtn_brake *b)
{
	b->bps = MTN_BRAKE_OFF;
	b->state = MTN_STATE_OFF;
	b->drain = 0;
	b->stuck = 0;
}

/* What is known of the path is out of date, or was not the path's. */
static mtn_inline void mtn_brake_forget(struct mtn_brake *b)
{
	mtn_brake_off(b);
	b->slack_us = 0;
	b->unrest = 0;
}

static mtn_inline int mtn_brake_restless(const struct mtn_brake *b)
{
	return b->slack_us != 0;
}

static mtn_inline void mtn_brake_init(struct mtn_brake *b)
{
	__builtin_memset(b, 0, sizeof(*b));
	mtn_brake_off(b);
	b->hold_off_next = MTN_HOLD_OFF_FIRST;
}

/* The queue is gone: grow from @bps on, at once. */
static mtn_inline void mtn_brake_release(struct mtn_brake *b, const struct mtn_brake_params *p,
					 const struct mtn_ack *a, __u64 bps)
{
	__u32 rtt = mtn_min(a->min_rtt_us, MTN_US_MAX);

	/* Where it fell far, and not for the first time, leave more of a queue. */
	if (b->bps < mtn_share(b->cut_bps, MTN_DEEP))
		b->slack_us = mtn_min(b->slack_us + rtt / 4,
				      (__u32)mtn_share(rtt, p->slack_max));
	b->cut_bps = 0;
	b->state = MTN_STATE_RELEASE;
	b->bps = bps;
	b->release_bps = bps;
	b->round_end = b->slice_total;
	b->raised = 0;
	b->drain = 0;
}

/* From now on the limit is @bps: ACKs tell of it after what is in flight. */
static mtn_inline void mtn_brake_set(struct mtn_brake *b, const struct mtn_ack *a, __u64 bps)
{
	b->bps = mtn_bps_clamp(bps);
	b->round_end = a->total + a->inflight;
}

/* The release has made a queue: @bps until it is gone. */
static mtn_inline void mtn_brake_too_far(struct mtn_brake *b, const struct mtn_ack *a, __u64 bps)
{
	mtn_brake_set(b, a, bps);
	b->state = MTN_STATE_CUT;
	b->stuck = 0;
}

/* The delivery of this slice, @bps, shows a drop: brake to it. */
static mtn_inline void mtn_brake_cut(struct mtn_brake *b, const struct mtn_brake_params *p,
				     const struct mtn_ack *a, __u64 ref, __u64 bps)
{
	__u32 rtt = mtn_min(a->min_rtt_us, MTN_US_MAX);

	if (b->state == MTN_STATE_CUT || b->state == MTN_STATE_RELEASE) {
		b->deepened++;
	} else {
		b->engagements++;
		if (a->now_us > b->goal_until_us)
			b->goal_bps = 0;
	}
	b->goal_bps = mtn_max(b->goal_bps, ref);
	b->goal_until_us = a->now_us + MTN_MEMORY_US;
	b->bps = mtn_bps_clamp(mtn_max(bps, ref / 2));
	if (b->state != MTN_STATE_CUT) {
		/* Our own growth was too much: not the path's fault. An outage: no rate at all. */
		if (b->unrest && a->now_us - b->slice_start_us < MTN_OUTAGE_ROUNDS * (__u64)rtt &&
		    (b->state != MTN_STATE_RELEASE ||
		     bps < mtn_share(b->release_bps, p->engage)))
			b->cut_bps = ref;
		else
			b->cut_bps = 0;
		b->unrest = MTN_UNREST;
		b->stuck = 0;
		b->round_end = a->total + a->inflight;
	}
	b->state = MTN_STATE_CUT;
	b->drain = 0;
}

/*
 * Has the queue stayed for two round trips, although our own part of it must be gone? Call where
 * there is one. However small it is: a CUT that waited for a queue which stays would never end.
 */
static mtn_inline int mtn_brake_in_vain(struct mtn_brake *b, const struct mtn_brake_params *p,
					const struct mtn_ack *a)
{
	__u32 us = mtn_window_us(p, a->min_rtt_us) + b->slack_us;

	if ((__s32)(a->total - b->round_end) < 0)
		return 0;
	b->round_end = a->total + a->inflight;
	if (a->inflight <= mtn_bdp(b->bps, us, a->mss) + 2)
		b->stuck++;
	else
		b->stuck = 0;
	return b->stuck >= 2;
}

static mtn_inline void mtn_brake_slice_end(struct mtn_brake *b, const struct mtn_brake_params *p,
					   const struct mtn_ack *a)
{
	__u64 max = mtn_bps_clamp(a->max_bps), ref = mtn_min(max, b->bps), bps = b->slice_bps;
	__u32 none = mtn_queue_low(p, a->min_rtt_us), low, high;
	__u64 acks = mtn_bps(a->total - b->slice_total, a->mss, a->now_us - b->slice_start_us);
	__u64 back = mtn_min(acks, b->ack_bps);
	__u32 queue, before = b->queue_us;
	int rising, drop, more;

	if (b->state >= MTN_STATE_CUT)
		none = mtn_max(none, mtn_two_packets_us(b, a->mss));
	low = none + b->slack_us;
	high = none + low;
	queue = b->slice_rtt_us > a->min_rtt_us ? b->slice_rtt_us - a->min_rtt_us : 0;
	rising = queue > before;
	b->queue_us = queue;
	b->last_bps = bps;
	b->ack_bps = acks;
	more = queue <= low && max > b->low_bps + b->low_bps / 8;
	if (queue > low || max < b->low_bps)
		b->low_bps = max;
	if (b->state != MTN_STATE_OFF)
		b->braked_us += a->now_us - b->slice_start_us;

	/* Slices of who sends little may take for ever. */
	if (a->now_us > b->goal_until_us)
		b->slack_us = b->unrest = 0;
	if (b->unrest)
		b->unrest--;
	else
		b->slack_us -= (b->slack_us + 15) / 16;
	if (b->hold_off) {
		b->hold_off--;
		return;
	}
	/*
	 * Rate samples span a round trip with its queue; how many ACKs come in a slice says at once
	 * that the path is faster again. Two slices: not only ACKs that had been held back. Where
	 * the path keeps coming back one is enough, if it is by far.
	 */
	if (mtn_brake_restless(b) && acks > MTN_AT_ONCE * b->bps)
		back = acks / 4 * 3;
	if (b->state == MTN_STATE_CUT && back > b->bps + b->bps / 2) {
		mtn_brake_release(b, p, a, mtn_min(back, mtn_max(max, b->goal_bps)));
		mtn_brake_set(b, a, b->bps);
		b->raised = 1;
		return;
	}
	/*
	 * Of an application that sends little, the rate says nothing about the path; but packets
	 * that all come out further apart than they went in do.
	 */
	if (b->app_limited)
		drop = b->grow_all && queue > high;
	else
		drop = b->grow && queue > low && (rising || queue > high) &&
		       bps < mtn_share(ref, p->engage);
	if (drop) {
		mtn_brake_cut(b, p, a, ref, bps);
		return;
	}

	switch (b->state) {
	case MTN_STATE_HOLD:
		b->state = MTN_STATE_OFF;
		fallthrough;
	case MTN_STATE_OFF:
		if (more && !a->startup && a->now_us < b->goal_until_us &&
		    max < mtn_share(b->goal_bps, p->engage)) {
			b->low_bps = max;
			mtn_brake_release(b, p, a, max);
			return;
		}
		/* A rate sample spans a round trip, a slice's ACKs do not: less sure, sooner. */
		if (!b->app_limited && rising && queue > low / 2 &&
		    ((b->grow && bps < mtn_share(ref, p->hold)) || acks < ref / 2)) {
			b->state = MTN_STATE_HOLD;
			b->hold_cwnd = mtn_max(a->inflight, MTN_CWND_MIN);
			b->holds++;
		}
		return;
	case MTN_STATE_CUT:
		if (queue > low) {
			/* A path with a queue is busy: what it delivers is what it carries. */
			if (b->grow && !b->app_limited && bps < b->bps)
				b->bps = mtn_max(bps, b->bps / 2);
			if (!mtn_brake_in_vain(b, p, a))
				return;
			if (queue <= high && !b->drain) {
				/*
				 * As good as gone: a limit that is a little too high leaves as
				 * much. Off, BBR could still go on at the rate of before.
				 */
				mtn_brake_release(b, p, a, b->bps);
			} else {
				mtn_brake_forget(b);
				b->abandoned++;
				b->hold_off = mtn_min(b->hold_off_next, p->hold_off_max);
				b->hold_off_next = mtn_min(2 * b->hold_off_next, p->hold_off_max);
			}
			return;
		}
		if (b->drain) {
			mtn_brake_off(b);
			return;
		}
		mtn_brake_release(b, p, a, b->bps);
		fallthrough;
	default:
		/*
		 * What BBR's estimate is made of counts here too, so that the limit is at the
		 * estimate after ten round trips at the latest, whatever the queue does.
		 */
		b->bps = mtn_bps_clamp(mtn_max(b->bps, bps));
		if (queue > low && b->bps < max && b->raised &&
		    (__s32)(a->total - b->round_end) >= 0) {
			mtn_brake_too_far(b, a, mtn_max(bps, b->bps / 2));
			return;
		}
		/* A whole slice of what was sent since the last time. */
		if (queue <= low && (__s32)(b->slice_total - b->round_end) >= 0) {
			__u64 raised = b->bps + mtn_share(b->bps, p->grow);

			if (mtn_brake_restless(b))
				raised += mtn_share(raised, p->grow);
			mtn_brake_set(b, a, raised);
			b->raised = 1;
		}
		if (b->bps < max)
			return;
		b->hold_off_next = MTN_HOLD_OFF_FIRST;
		if (queue > low) {
			/* More than it carries: BBR would keep the queue that this has made. */
			mtn_brake_too_far(b, a, max);
			b->drain = 1;
		} else if (b->bps >= b->goal_bps) {
			mtn_brake_off(b);
		}
	}
}

/* Takes one ACK in; call after BBR has seen it. */
static mtn_inline void mtn_brake_ack(struct mtn_brake *b, const struct mtn_brake_params *p,
				     const struct mtn_ack *a)
{
	__u32 length;

	if (a->suspended || !a->max_bps || !a->min_rtt_us) {
		/* A window held for one slice must not outlast it. */
		if (b->state == MTN_STATE_HOLD)
			b->state = MTN_STATE_OFF;
		mtn_brake_slice_start(b, a->now_us, a->total);
		return;
	}
	if (!b->slice_start_us)
		mtn_brake_slice_start(b, a->now_us, a->total);
	if (a->delivered) {
		__u64 bps = mtn_bps(a->delivered, a->mss, a->interval_us);

		b->slice_bps = mtn_max(b->slice_bps, bps);
		b->grow = (__u64)a->rcv_us * 15 > (__u64)a->snd_us * 16;
		if ((__u64)a->rcv_us * 13 <= (__u64)a->snd_us * 16)
			b->grow_all = 0;
		if (a->app_limited)
			b->app_limited = 1;
	}
	if (a->rtt_us && !a->ack_delayed && (!b->slice_rtt_us || a->rtt_us < b->slice_rtt_us))
		b->slice_rtt_us = a->rtt_us;

	/* Short ones see a drop soon; longer ones tell better what the path carries. */
	length = mtn_min(a->min_rtt_us, MTN_US_MAX) / 8;
	if (b->state == MTN_STATE_CUT ||
	    (b->state == MTN_STATE_RELEASE && !mtn_brake_restless(b)))
		length *= 2;
	length = mtn_max(length, p->slice_min_us);
	if (a->now_us - b->slice_start_us < length ||
	    a->total - b->slice_total < MTN_SLICE_PACKETS || !b->slice_rtt_us || !b->slice_bps) {
		/* Single messages of less than a packet never tell an RTT: brake no longer. */
		if (b->app_limited && !b->slice_rtt_us &&
		    a->now_us - b->slice_start_us > MTN_IDLE_US)
			mtn_brake_forget(b);
		return;
	}
	mtn_brake_slice_end(b, p, a);
	mtn_brake_slice_start(b, a->now_us, a->total);
}

/*
 * A transmission begins with nothing in flight, @idle_us after the last ACK. That is idleness only
 * where the application had nothing to send (@app_limited, BBR's condition too): a timeout leaves
 * nothing in flight either, and so does every gap of the brake's own pacing that is longer than the
 * round trip.
 *
 * Where the brake paces no slice is begun again: packets that come one at a time, each after such a
 * gap, would never make a slice complete, and the limit would stay what it is for ever. The pause
 * does no harm in it: what counts is the highest rate and the lowest RTT.
 */
static mtn_inline void mtn_brake_tx_start(struct mtn_brake *b, const struct mtn_brake_params *p,
					  __u64 now_us, __u32 total, __u64 idle_us, int app_limited)
{
	if (!app_limited)
		return;
	if (idle_us > MTN_IDLE_US)
		mtn_brake_forget(b);
	if (b->state < MTN_STATE_CUT && idle_us > p->slice_min_us) {
		/* The same. */
		b->state = MTN_STATE_OFF;
		mtn_brake_slice_start(b, now_us, total);
	}
}

/* Bytes/s to pace at, where BBR wants @rate. */
static mtn_inline __u64 mtn_brake_pacing(const struct mtn_brake *b, const struct mtn_ack *a,
					 __u64 rate)
{
	__u64 limit;

	if (a->suspended || b->state < MTN_STATE_CUT)
		return rate;
	/* 1% less, as BBR does: no queue from rounding. */
	limit = mtn_div(b->bps / 8 * 99, 100);
	limit = mtn_max(limit, 1ULL);
	/* Neither its probing up nor its draining afterwards: growth takes their place. */
	return a->startup ? mtn_min(rate, limit) : limit;
}

/* Most packets in flight, or MTN_CWND_OFF, where BBR wants @own. */
static mtn_inline __u32 mtn_brake_cwnd(const struct mtn_brake *b, const struct mtn_brake_params *p,
				       const struct mtn_ack *a, __u32 own)
{
	__u32 cwnd, own_bdp, us = mtn_window_us(p, a->min_rtt_us);

	if (a->suspended)
		return MTN_CWND_OFF;
	if (b->state == MTN_STATE_HOLD)
		return b->hold_cwnd;
	if (b->state == MTN_STATE_CUT) {
		cwnd = mtn_bdp(b->bps, us + b->slack_us, a->mss);
	} else if (mtn_brake_restless(b) && !a->startup && a->max_bps) {
		/* A quarter to probe with, and what BBR adds to two BDP for ACKs that come late. */
		cwnd = mtn_bdp(b->state == MTN_STATE_OFF ? a->max_bps : b->bps, us, a->mss);
		cwnd += cwnd / 4;
		own_bdp = mtn_bdp(a->max_bps, 2 * us, a->mss);
		if (own > own_bdp)
			cwnd += mtn_min(own - own_bdp, 1U << 30);
		if (b->state == MTN_STATE_RELEASE)
			cwnd += mtn_bdp(b->release_bps, b->slack_us, a->mss);
	} else if (b->state == MTN_STATE_RELEASE) {
		/* As much again as BBR allows itself for delayed and aggregated ACKs. */
		cwnd = mtn_bdp(b->bps, 2 * us + b->slack_us, a->mss);
	} else {
		return MTN_CWND_OFF;
	}
	return mtn_max(cwnd, MTN_CWND_MIN);
}

/*
 * The window that BBR goes on from, where @own was its last one and @limited what was made of it:
 * its own again, unless @cwnd has been changed by others since. After a timeout (@loss) TCP has.
 */
static mtn_inline __u32 mtn_brake_own_cwnd(__u32 cwnd, __u32 own, __u32 limited, int loss)
{
	return own > limited && cwnd == limited && !loss ? own : cwnd;
}

#endif /* MOUNTAIN_BRAKE_H */
