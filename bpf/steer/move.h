/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Which path a known flow takes with its next packet, and its move to another one. When a flow may leave its path:
 * steer.bpf.c.
 */
#ifndef MOUNTAIN_MOVE_H
#define MOUNTAIN_MOVE_H

/* How far the coarse clock may be behind (mtn_gap_ns). */
#define MTN_STALLED_TICKS	7

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 256 * 1024);
} moves SEC(".maps");

/*
 * Time since the flow's last packet, at least: a coarse stamp may be a tick before its packet, and more
 * when the CPU that keeps the time was halted (5 ticks: MAX_STALLED_JIFFIES in tick-sched.c).
 */
static __always_inline __u64 mtn_gap_ns(const struct mtn_flow *flow, __u64 now)
{
	__u64 last_ns = flow->last_ns + (flow->exact ? 0 : MTN_STALLED_TICKS * (__u64)config.tick_ns);

	return now > last_ns ? now - last_ns : 0;
}

/* Moves @flow, with @key, and reports that. */
static __always_inline void mtn_move(struct mtn_flow_key *key, struct mtn_flow *flow, __u32 to,
				     __u32 reason, __u64 now, __u64 gap_ns, __u64 need_us)
{
	struct mtn_move *m = bpf_ringbuf_reserve(&moves, sizeof(*m), 0);
	__u32 from = flow->path;

	mtn_count(MTN_STAT_MOVE_FLOWLET + reason);
	flow->path = to;
	/* Back where it began, or where it looked for a path itself. Others than TCP have no use for it. */
	if (key->proto != IPPROTO_TCP || reason == MTN_MOVE_REHASHED ||
	    (flow->came_from & MTN_NO_FLAG) == to + 1)
		flow->came_from = 0;
	else
		flow->came_from = flow->came_from ? flow->came_from & MTN_NO_FLAG : from + 1;
	flow->moves++;
	if (!m)
		return;
	m->at_ns = now;
	m->gap_us = gap_ns / 1000;
	m->need_us = need_us;
	m->key = *key;
	m->from = from;
	m->to = to;
	m->reason = reason;
	m->class = flow->class;
	m->pad = 0;
	bpf_ringbuf_submit(m, 0);
}

/*
 * The path that a known flow is on, whose packet came by @here. It is the table's, unless packets went by the kernel's
 * paths since the flow was seen last, or nothing can be sent to the table's any more: then it is the kernel's.
 */
static __always_inline __u32 mtn_path_of(const struct mtn_flow *flow, const struct mtn_group *g, __u32 may,
					 __u32 alive, __u32 here)
{
	__u32 path = flow->path;

	if (flow->last_ns < config.steered_since_ns && (!may || mtn_has(may, mtn_member(g, here))))
		return here;
	if (path != here && mtn_has(alive, mtn_member(g, path)) &&
	    !mtn_takes(mtn_path_at(here), mtn_path_at(path)))
		return here;
	return path;
}

/* The path that a known flow, now on @here, takes with this packet; moves the flow if it may and should. */
__noinline int mtn_flow_next(struct mtn_pkt *pkt, struct mtn_flow *flow, __u32 here)
{
	union mtn_masks masks;
	struct mtn_group *g;
	__u32 group, from, to, may, reason, member, choice;
	__u64 now, gap_ns, need_us = 0;
	bool fits, ejected, bulk;

	if (!pkt || !flow)
		return MTN_MAX_PATHS;
	if (pkt->l3_len > flow->l3_len_max)
		flow->l3_len_max = pkt->l3_len;
	group = flow->group;
	if (group >= MTN_MAX_GROUPS)
		return MTN_MAX_PATHS;
	g = mtn_group_at(group);
	masks.word = mtn_masks_of(group);
	bulk = flow->class == MTN_CLASS_BULK;
	may = bulk ? masks.bulk : masks.latency;
	if (argmax_load)
		may = masks.alive;
	may &= masks.alive;
	from = mtn_path_of(flow, g, may, masks.alive, here);
	if (from >= MTN_MAX_PATHS)
		return MTN_MAX_PATHS;
	/* Where the kernel has it by now, its sender has found another path already. */
	if (from != flow->path || flow->last_ns < config.steered_since_ns)
		pkt->sender_is = MTN_SENDER_CONTENT;
	if (from != flow->path) {
		flow->path = from;
		flow->came_from = 0;
	}
	member = mtn_member(g, from);
	fits = flow->l3_len_max <= mtn_path_at(from)->mtu;
	ejected = !bulk && mtn_has(masks.ejected, member);
	if ((pkt->sender_is == MTN_SENDER_REHASHED || pkt->sender_is == MTN_SENDER_UNHEARD) && !argmax_load) {
		now = bpf_ktime_get_ns();
		to = from;
		if (now - flow->fled_ns >= MTN_FLEE_NS)
			to = mtn_elsewhere(pkt, flow, group, may, masks.alive, from, here);
		if (to < MTN_MAX_PATHS && to != from) {
			flow->fled = from + 1;
			if (pkt->sender_is == MTN_SENDER_UNHEARD)
				flow->fled |= MTN_FLED_FOR_GOOD;
			flow->fled_ns = now;
			mtn_move(&pkt->key, flow, to, MTN_MOVE_REHASHED, now, 0, 0);
			return to;
		}
	}
	if (mtn_has(may, member) && fits && !ejected && !(bulk && mtn_has(g->full, member)) &&
	    !mtn_has(g->lighter, member)) {
		/* The coarse clock may still be behind an exact stamp, which this packet then leaves. */
		flow->exact = 0;
		return from;
	}

	now = bpf_ktime_get_ns();
	gap_ns = mtn_gap_ns(flow, now);
	flow->last_ns = now;
	flow->exact = 1;
	choice = mtn_choose(group, mtn_but_fled(flow, g, may, masks.alive, now),
			    mtn_flow_hash(&pkt->key, config.hash_seed), flow->l3_len_max, here);
	if (choice < MTN_MAX_MEMBERS) {
		to = mtn_member_path(g, choice);
	} else {
		/* The kernel decides, and may have left a dead path. While all are dead, there is no verdict. */
		if (!(mtn_path_at(from)->flags & MTN_PATH_DOWN) &&
		    (!masks.alive || mtn_has(masks.alive, member)))
			return from;
		to = here;
	}
	if (to >= MTN_MAX_PATHS || to == from)
		return from;

	if (!mtn_has(masks.alive, member)) {
		reason = MTN_MOVE_DEAD;
	} else if (ejected) {
		reason = MTN_MOVE_EJECTED;
	} else if (!fits) {
		/* Its large packets pass by the kernel's path already: keep the small ones with them. */
		reason = MTN_MOVE_FORCED;
	} else {
		__u32 max_us = mtn_path_at(from)->delay_max_us, min_us = mtn_path_at(to)->delay_min_us;
		__u64 since = mtn_leave_since(g, bulk, member);

		need_us = (max_us > min_us ? max_us - min_us : 0) + config.margin_us;
		if (gap_ns >= need_us * 1000)
			reason = MTN_MOVE_FLOWLET;
		else if (since && now > since && now - since >= config.force_after_ns)
			reason = MTN_MOVE_FORCED;
		else
			return from;
	}
	mtn_move(&pkt->key, flow, to, reason, now, gap_ns, need_us);
	return to;
}

#endif
