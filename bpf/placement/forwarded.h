/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Where a forwarded flow starts: whether its source may leave by any uplink, the path that it is placed on, and
 * what is remembered of that by the flow's hash. Included by placement.bpf.c behind choose.h.
 */
#ifndef MOUNTAIN_FORWARDED_H
#define MOUNTAIN_FORWARDED_H

/*
 * Is a frame for another host, so that a bridge passes it on? pkt_type compares with the port's own address alone
 * (eth_type_trans() in net/ethernet/eth.c), so those of bridges are in a table.
 */
static __always_inline bool mtn_is_others(struct __sk_buff *skb)
{
	__u64 address = 0;

	if (skb->pkt_type == PACKET_HOST)
		return false;
	return bpf_skb_load_bytes(skb, 0, &address, ETH_ALEN) ||
	       !bpf_map_lookup_elem(&bridges, &address);
}

/*
 * An address that means nothing to the provider, so that the source will be translated on whichever
 * uplink the packet leaves by. Any other belongs to one uplink.
 */
static __always_inline bool mtn_is_inner(const struct mtn_flow_key *key)
{
	return key->ipv6 ? mtn_is_private6(key->saddr) : mtn_is_private4(bpf_ntohl(key->saddr[0]));
}

/* Is a flow's source in the @i-th network whose flows are left? A function of its own as mtn_rule_selects(). */
__noinline int mtn_is_from_left(__u32 i, struct mtn_flow_key *key)
{
	struct mtn_left_net *net;

	if (!key || i >= MTN_MAX_LEFT_NETS)
		return 0;
	net = &left_nets[i];
	return net->ipv6 == key->ipv6 && mtn_in_prefix(key->saddr, net->addr, net->mask);
}

/*
 * Is the source right on one uplink only, above all as it is of that uplink's own network? If it is the kernel's to place
 * for another reason, @s says so.
 */
__noinline int mtn_is_left_net(struct mtn_new_flow *s)
{
	__u32 i;

	if (!s || config.n_left_nets > MTN_MAX_LEFT_NETS)
		return 1;
	for (i = 0; i < MTN_MAX_LEFT_NETS && i < config.n_left_nets; i++) {
		if (!mtn_is_from_left(i, &s->key))
			continue;
		if (!left_nets[i].unless)
			return 1;
		s->left = !mtn_is_preferred_dead(s->key.ipv6);
	}
	return 0;
}

/* Of a flow's words, each times an odd number of its own: no multiplication waits for another one. */
static __always_inline __u32 mtn_recent_hash(const struct mtn_flow_key *key)
{
	const __u64 *word = (const __u64 *)key;
	__u64 sum = word[0] * 0x9e3779b97f4a7c15 + word[1] * 0xc2b2ae3d27d4eb4f +
		    word[2] * 0xd6e8feb86659fd93 + word[3] * 0xff51afd7ed558ccd +
		    word[4] * 0xc4ceb9fe1a85ec53 + config.hash_seed;

	return (sum ^ sum >> 29) * 0xbf58476d1ce4e5b9 >> 32;
}

static __always_inline volatile __u64 *mtn_recent_at(__u32 hash)
{
	barrier_var(hash);
	return &recent[hash & (MTN_RECENT - 1)];
}

/*
 * The path where the flow of this hash was placed, if a new one might be placed there now; else
 * MTN_MAX_PATHS. Two flows of one hash share their path: each could have had it.
 */
static __always_inline __u32 mtn_recent_path(__u32 hash, __u32 generation)
{
	union mtn_recent r = { .word = *mtn_recent_at(hash) };
	union mtn_masks masks;
	__u32 group, path, member;

	if (r.hash != hash || r.generation != (__u16)generation)
		return MTN_MAX_PATHS;
	group = r.group;
	path = r.path;
	barrier_var(group);
	masks.word = group_masks[group & (MTN_MAX_GROUPS - 1)].word;
	barrier_var(path);
	member = mtn_group_at(group)->member_of[path & (MTN_MAX_PATHS - 1)];
	if (member >= MTN_MAX_MEMBERS ||
	    !(((masks.latency & masks.alive) | mtn_keeps(masks)) & (1U << member)))
		return MTN_MAX_PATHS;
	return path;
}

/* Places the flow of a packet that may begin it. */
static __noinline int mtn_begin(struct __sk_buff *skb, const struct mtn_pkt *pkt, __u32 hash,
				__u32 generation)
{
	struct mtn_new_flow s = {};
	__u32 group, path;

	if (mtn_dest_is_local(&pkt->key))
		return MTN_MAX_PATHS;
	group = mtn_group_of(&pkt->key);
	if (group >= MTN_MAX_GROUPS)
		return MTN_MAX_PATHS;
	s.key = pkt->key;
	if (!mtn_is_inner(&s.key) || mtn_is_left_net(&s)) {
		mtn_count(MTN_PLACE_PASS_SOURCE);
		return MTN_MAX_PATHS;
	}
	s.mark = skb->mark;
	s.dsfield = pkt->dsfield;
	/* The kernel looks up forwarded packets as the superuser's (net/ipv4/route.c, net/ipv6/route.c). */
	if (config.n_fib_rules &&
	    mtn_selected_elsewhere(&s.key, s.mark, skb->ifindex, 0, s.dsfield)) {
		mtn_count(MTN_PLACE_PASS_FIB_RULE);
		return MTN_MAX_PATHS;
	}
	s.prefer = MTN_MAX_PATHS;
	path = mtn_place_forwarded(&s, group);
	if (path >= MTN_MAX_PATHS)
		return MTN_MAX_PATHS;
	mtn_placed(&s, path, MTN_PLACE_PLACED_FORWARDED);
	/* What a rule says may differ from packet to packet. */
	if (!config.n_rules) {
		union mtn_recent r = {
			.hash = hash,
			.generation = generation,
			.group = group,
			.path = path,
		};

		*mtn_recent_at(hash) = r.word;
	}
	return path;
}

/* The mark for a packet that may begin a flow; 0: the flow is the kernel's to place. */
static __always_inline __u32 mtn_mark_new(struct __sk_buff *skb, struct mtn_pkt *pkt, __u32 generation)
{
	__u32 hash, path = MTN_MAX_PATHS;

	/* Somebody else's mark, by which he routes: ours would take the place of its bits. */
	if (skb->mark & config.mark_mask || mtn_passes_unattended())
		return 0;
	/* Before the search for a path, which each packet would begin anew. */
	if (!config.n_rules && mtn_is_preferred_alive(pkt->key.ipv6) && mtn_belongs(&pkt->key) < MTN_PLACE_STAT_MAX)
		return 0;
	hash = mtn_recent_hash(&pkt->key);
	/* A SYN begins another connection, whatever had its ports before. */
	if (pkt->key.proto != IPPROTO_TCP && !skb->mark && !config.n_rules && !*(volatile __u32 *)&config.paused)
		path = mtn_recent_path(hash, generation);
	if (path >= MTN_MAX_PATHS)
		path = mtn_begin(skb, pkt, hash, generation);
	return mtn_is_path(path) ? mtn_path_at(path)->mark : 0;
}

#endif
