/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The flow table: sets of eight slots in an array, of which a flow may use three.
 *
 * A look-up in the kernel's LRU hash map touches four or five cache lines of which none is likely
 * to be near when a thousand flows take turns; they made up most of this program's time. Here a
 * flow in use is one line: its slot holds a 64-bit hash of the flow's key, the tag, and all that
 * changes with a packet. The key itself is in a second array, which only a new flow writes and only
 * user space reads. Two flows of one tag (chance 2^-59 for each look-up) would share an entry.
 *
 * The first of its sets is among the near slots, few at the array's beginning: as long as there are
 * few flows, they share few pages. A thousand of them scattered over a large table cost a walk of
 * the page tables for nearly every packet, 100 ns and more.
 *
 * A new flow takes the first of its slots that nobody has used for MTN_FLOW_STALE_NS, else the one
 * least recently used. Slots do not become free again (forgotten ones keep a tag that no flow
 * has), so the first one never used ends a search.
 *
 * Concurrency: plain stores. CPUs that start flows in one slot at a time may leave a mixture; a flow
 * whose group is not that of the path its packet came by is taken for unknown, and the flow that lost
 * starts anew.
 */
#ifndef MOUNTAIN_FLOW_TABLE_H
#define MOUNTAIN_FLOW_TABLE_H

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);	/* also: aligned to cache lines */
	__uint(max_entries, 131072);		/* user space sets the configured size */
	__type(key, __u32);
	__type(value, struct mtn_flow);
} flows SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 131072);		/* as flows */
	__type(key, __u32);
	__type(value, struct mtn_flow_key);
} flow_keys SEC(".maps");

static __always_inline struct mtn_flow *mtn_flow_at(__u32 slot)
{
	return bpf_map_lookup_elem(&flows, &slot);
}

/* The @i-th slot that a flow may use. */
static __always_inline __u32 mtn_flow_probe(__u64 tag, __u32 i)
{
	__u32 way = i & (MTN_FLOW_SET - 1), home;

	if (i < MTN_FLOW_SET)
		return (tag ^ way) & (config.near_slots - 1);
	home = i < 2 * MTN_FLOW_SET ? tag >> 32 : tag >> 16;
	return config.near_slots + ((home ^ way) & (config.far_slots - 1));
}

/*
 * Two multiplications a word: after one of them, what flips the top bit of a word flips known bits of
 * the hash, which the next word could flip back.
 */
static __always_inline __u64 mtn_mix64(__u64 h, __u64 word)
{
	h = (h ^ word) * 0xff51afd7ed558ccdULL;	/* MurmurHash3's 64-bit finalizer */
	h ^= h >> 33;
	h *= 0xc4ceb9fe1a85ec53ULL;
	return h ^ (h >> 33);
}

/* Hash of a key, none of the two tags that are not a flow's. */
static __always_inline __u64 mtn_flow_tag(const struct mtn_flow_key *key)
{
	const __u64 *word = (const __u64 *)key;
	__u64 h = config.hash_seed;

	if (key->ipv6) {
		h = mtn_mix64(h, word[0]);
		h = mtn_mix64(h, word[1]);
		h = mtn_mix64(h, word[2]);
		h = mtn_mix64(h, word[3]);
	} else {
		h = mtn_mix64(h, (__u64)key->saddr[0] << 32 | key->daddr[0]);
	}
	h = mtn_mix64(h, word[4]);
	return h > MTN_TAG_FORGOTTEN ? h : h + 2;
}

/* The slot of the flow with @tag or, when there is none, the slot that it should take. */
__noinline int mtn_flow_slot(__u64 tag, __u64 now)
{
	__u32 i, slot, take = mtn_flow_probe(tag, 0);
	__u64 oldest_ns = ~0ULL;

#pragma unroll
	for (i = 0; i < 3 * MTN_FLOW_SET; i++) {
		struct mtn_flow *flow;

		slot = mtn_flow_probe(tag, i);
		flow = mtn_flow_at(slot);
		if (!flow || flow->tag == tag)
			return slot;
		if (flow->tag == MTN_TAG_NEVER)
			return oldest_ns ? slot : take;
		if (!oldest_ns)
			continue;	/* a stale one was found; the flow may still come */
		if (flow->last_ns + MTN_FLOW_STALE_NS < now) {
			take = slot;
			oldest_ns = 0;
		} else if (flow->last_ns < oldest_ns) {
			take = slot;
			oldest_ns = flow->last_ns;
		}
	}
	return take;
}

/* The flow's entry, or the one that it should take: whose tag is another then. */
static __always_inline struct mtn_flow *mtn_flow_find(__u64 tag, __u64 now, __u32 *slot)
{
	struct mtn_flow *flow;

	*slot = mtn_flow_probe(tag, 0);
	flow = mtn_flow_at(*slot);
	if (flow && flow->tag == tag)
		return flow;
	*slot = mtn_flow_slot(tag, now);
	return mtn_flow_at(*slot);
}

/* Makes the entry @flow at @slot that of @pkt's flow, which starts on @path and is on @here now. */
static __always_inline void mtn_flow_add(struct mtn_flow *flow, __u32 slot, __u64 tag,
					 const struct mtn_pkt *pkt, __u32 group, __u32 path, __u32 here,
					 __u32 len, __u64 now)
{
	struct mtn_flow_key *key = bpf_map_lookup_elem(&flow_keys, &slot);

	if (!key)
		return;
	mtn_count(MTN_STAT_FLOW_NEW);
	if (flow->tag > MTN_TAG_FORGOTTEN && flow->last_ns + MTN_FLOW_STALE_NS >= now)
		mtn_count(MTN_STAT_FLOW_EVICTED);
	/* Nobody takes the entry for the old flow's or this one's before it is whole. */
	*(volatile __u64 *)&flow->tag = MTN_TAG_FORGOTTEN;
	flow->last_ns = now;
	flow->window_start_ns = now;
	flow->window_bytes = len;
	flow->window_packets = 1;
	flow->rate_bps = 0;
	flow->generation = config.generation;
	flow->moves = 0;
	flow->group = group;
	flow->path = path;
	flow->class = MTN_CLASS_LATENCY;
	flow->big = 0;
	flow->exact = 0;
	flow->sent_by = here;
	flow->fled = 0;
	/* One that has begun before is where the kernel had it. */
	flow->came_from = path != here && pkt->key.proto == IPPROTO_TCP && !(pkt->flags & MTN_PKT_SYN) ?
				  here + 1 : 0;
	flow->fled_ns = 0;
	flow->hash = pkt->sender;
	flow->l3_len_max = pkt->l3_len;
	*key = pkt->key;
	barrier();
	*(volatile __u64 *)&flow->tag = tag;
}

#endif
