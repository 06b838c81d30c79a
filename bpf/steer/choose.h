/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Paths and groups by their numbers, which path a packet is on, and which of a group's a flow takes.
 */
#ifndef MOUNTAIN_STEER_CHOOSE_H
#define MOUNTAIN_STEER_CHOOSE_H

/*
 * An element by an index that was checked before; the mask is for the verifier, which loses track
 * of the check, and the barrier keeps the compiler from dropping it.
 */
static __always_inline struct mtn_path *mtn_path_at(__u32 id)
{
	barrier_var(id);
	return &paths[id & (MTN_MAX_PATHS - 1)];
}

static __always_inline struct mtn_group *mtn_group_at(__u32 id)
{
	barrier_var(id);
	return &groups[id & (MTN_MAX_GROUPS - 1)];
}

/* The verdict about a group, read at once. */
static __always_inline __u64 mtn_masks_of(__u32 group)
{
	barrier_var(group);
	return group_masks[group & (MTN_MAX_GROUPS - 1)].word;
}

/* The member of @g that @path is, or MTN_NO_MEMBER. */
static __always_inline __u32 mtn_member(const struct mtn_group *g, __u32 path)
{
	barrier_var(path);
	return g->member_of[path & (MTN_MAX_PATHS - 1)];
}

/* Whether @member is among those in @mask. */
static __always_inline bool mtn_has(__u32 mask, __u32 member)
{
	return member < MTN_MAX_MEMBERS && (mask & (1U << member));
}

/* The path id of the @member-th member of @g. */
static __always_inline __u32 mtn_member_path(const struct mtn_group *g, __u32 member)
{
	barrier_var(member);
	return g->path[member & (MTN_MAX_MEMBERS - 1)];
}

/* Since when flows of a class have had to leave the @member-th member of @g; 0: they need not. */
static __always_inline __u64 mtn_leave_since(const struct mtn_group *g, bool bulk, __u32 member)
{
	barrier_var(member);
	return g->leave_since_ns[bulk][member & (MTN_MAX_MEMBERS - 1)];
}

/*
 * Whether a packet is on its way through this device from another path's, which stands on it, as macvlan does. It has
 * been counted there. Guests of other network namespaces have no paths. A function of its own as the next one.
 */
__noinline int mtn_is_from_above(struct __sk_buff *skb)
{
	__u32 device = mtn_routed_elsewhere(skb), i;

	if (!device)
		return 0;
	for (i = 0; i < MTN_MAX_PATHS && i < config.n_paths; i++) {
		if (paths[i].ifindex == device && (paths[i].flags & MTN_PATH_NEIGH_VALID))
			return 1;
	}
	return 0;
}

/*
 * The path a packet is on: its device and the link-layer address the kernel wrote. MTN_MAX_PATHS if it is on
 * none, as with a VLAN's tag. A function of its own to the verifier, which would else follow each path to the program's
 * end.
 */
__noinline int mtn_path_here(struct __sk_buff *skb, struct mtn_link_header *link)
{
	bool ipv6 = skb->protocol == bpf_htons(ETH_P_IPV6);
	__u32 i;

	if (!link || skb->vlan_present)
		return MTN_MAX_PATHS;
	for (i = 0; i < MTN_MAX_PATHS && i < config.n_paths; i++) {
		struct mtn_path *p = &paths[i];

		if (p->ifindex == skb->ifindex && p->ipv6 == ipv6 &&
		    (p->flags & MTN_PATH_NEIGH_VALID) &&
		    !__builtin_memcmp(p->mac, &link->to, sizeof(link->to)))
			return mtn_is_from_above(skb) ? MTN_MAX_PATHS : i;
	}
	return MTN_MAX_PATHS;
}

/* Whether packets that are on @here can be redirected to @to. */
static __always_inline bool mtn_takes(const struct mtn_path *here, const struct mtn_path *to)
{
	__u8 needed = MTN_PATH_ETHERNET | MTN_PATH_NEIGH_VALID;

	return (here->flags & MTN_PATH_ETHERNET) && (to->flags & (needed | MTN_PATH_DOWN)) == needed;
}

/* Whether packets by either path are the same on the wire: to two addresses of one router. */
static __always_inline bool mtn_is_same_hop(const struct mtn_path *a, const struct mtn_path *b)
{
	return a->ifindex == b->ifindex && a->ipv6 == b->ipv6 &&
	       !__builtin_memcmp(a->mac, b->mac, sizeof(a->mac));
}

/* The member of @group, as a path id, that is the same hop as @here, or MTN_MAX_PATHS. */
__noinline int mtn_same_hop_in(__u32 group, __u32 here)
{
	__u32 found = MTN_MAX_PATHS, i;
	struct mtn_group *g;

	if (group >= MTN_MAX_GROUPS || here >= MTN_MAX_PATHS)
		return MTN_MAX_PATHS;
	g = mtn_group_at(group);
	for (i = 0; i < MTN_MAX_MEMBERS && i < g->n_members; i++) {
		__u32 path = mtn_member_path(g, i);

		if (path < MTN_MAX_PATHS && mtn_is_same_hop(mtn_path_at(path), mtn_path_at(here))) {
			found = path;
			break;
		}
	}
	return found;
}

/*
 * The path of @group that a packet is on, or MTN_MAX_PATHS. Of next hops that are the same on the wire,
 * mtn_path_here() knows the first only, @here, which another route may use.
 */
static __always_inline __u32 mtn_here_in(__u32 group, __u32 here)
{
	if (mtn_member(mtn_group_at(group), here) < MTN_MAX_MEMBERS)
		return here;
	return mtn_same_hop_in(group, here);
}

#define MTN_SCORE_NONE		(~0ULL)
#define MTN_SCORE_WORST		(~0ULL - 1)

/* A choice among members that is being made. */
struct mtn_choice {
	__u64 score;		/* the least so far */
	__u32 best;		/* whose it is, or MTN_NO_MEMBER */
	__u32 group, mask, hash, here;
	__u16 l3_len;
	__u16 unreachable;	/* whether packets that are here cannot be sent by some member */
};

/*
 * Takes the @i-th member, if its score is less than those so far: the flow's by rendezvous hashing. The argmax-load baseline
 * takes the highest (ema_load + ema_time_delta) * cost instead. A function of its own to the verifier, which would else
 * follow each outcome through all members.
 */
__noinline int mtn_weigh(struct mtn_choice *choice, __u32 i)
{
	struct mtn_group *g;
	__u64 score;
	__u32 path;

	if (!choice || choice->group >= MTN_MAX_GROUPS || !mtn_has(choice->mask, i))
		return 0;
	g = mtn_group_at(choice->group);
	path = mtn_member_path(g, i);
	if (path >= MTN_MAX_PATHS || mtn_path_at(path)->mtu < choice->l3_len)
		return 0;
	if (path != choice->here && !mtn_takes(mtn_path_at(choice->here), mtn_path_at(path))) {
		choice->unreachable = 1;
		return 0;
	}
	if (argmax_load)
		score = ~(mtn_average_sum(path) * mtn_path_at(path)->cost_weight);
	else
		score = (__u64)mtn_neg_log2(mtn_fmix32(choice->hash ^ mtn_path_at(path)->salt)) *
			g->inv_weight[i & (MTN_MAX_MEMBERS - 1)];
	if (score > MTN_SCORE_WORST)
		score = MTN_SCORE_WORST;
	if (score < choice->score) {
		choice->score = score;
		choice->best = i;
	}
	return 0;
}

/*
 * Member with the least score among those in @mask that a packet of @l3_len bytes on @here can leave by, or
 * MTN_NO_MEMBER: counted, unless @mask is empty. The first of equals.
 */
__noinline __u32 mtn_choose(__u32 group, __u32 mask, __u32 hash, __u32 l3_len, __u32 here)
{
	struct mtn_choice choice = {
		.score = MTN_SCORE_NONE,
		.best = MTN_NO_MEMBER,
		.group = group,
		.mask = mask,
		.hash = hash,
		.here = here,
		.l3_len = l3_len,
	};
	struct mtn_group *g;
	__u32 i;

	if (group >= MTN_MAX_GROUPS)
		return MTN_NO_MEMBER;
	g = mtn_group_at(group);
	for (i = 0; i < MTN_MAX_MEMBERS && i < g->n_members; i++)
		mtn_weigh(&choice, i);
	if (choice.best == MTN_NO_MEMBER && mask)
		mtn_count(choice.unreachable ? MTN_STAT_PASS_NEIGH : MTN_STAT_PASS_MTU);
	return choice.best;
}

#endif
