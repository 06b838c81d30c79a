/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Where a flow starts: the first rule of the user's that matches it says which paths it may have, else
 * the verdict about its group does; rendezvous hashing takes one of them. Included by placement.bpf.c behind
 * the configuration that all of it reads.
 */
#ifndef MOUNTAIN_CHOOSE_H
#define MOUNTAIN_CHOOSE_H

/* A flow that is about to start. */
struct mtn_new_flow {
	struct mtn_flow_key key;	/* local flows: no source address, and no port that is not known yet */
	__u32 salt;			/* tells local flows apart, whose ports are not chosen yet */
	__u32 mark;
	__u32 uid;
	__u32 prefer;			/* path to stay with if it will do, or MTN_MAX_PATHS */
	__u8 dsfield;
	bool dsfield_unknown;
	__u8 left;			/* the kernel's to place, unless a rule names the path; result: it was */
	__u8 by_rule;			/* result: a rule decided */
	__u8 with_kernel;		/* counter of why it goes by the kernel's path while that is alive, or 0 */
	__u8 pad[2];			/* all of it is read by other functions, as the verifier sees it */
};

/* An index that was checked before; see mtn_path_at() in steer.bpf.c. */
static __always_inline struct mtn_placement_path *mtn_path_at(__u32 id)
{
	barrier_var(id);
	return &paths[id & (MTN_MAX_PATHS - 1)];
}

static __always_inline struct mtn_group *mtn_group_at(__u32 id)
{
	barrier_var(id);
	return &groups[id & (MTN_MAX_GROUPS - 1)];
}

static __always_inline bool mtn_is_path(__u32 path)
{
	return path < MTN_MAX_PATHS && mtn_path_at(path)->mark;
}

static __always_inline bool mtn_is_alive(__u32 path)
{
	return mtn_is_path(path) && (alive_paths >> (path & (MTN_MAX_PATHS - 1)) & 1);
}

static __always_inline bool mtn_is_member(__u32 group, __u32 path)
{
	barrier_var(path);
	return mtn_group_at(group)->member_of[path & (MTN_MAX_PATHS - 1)] < MTN_MAX_MEMBERS;
}

/* Does @r match? Whoever may call for the current task's cgroup says so by the constant @local. */
static __always_inline bool mtn_rule_matches(const struct mtn_placement_rule *r,
					     const struct mtn_new_flow *s, const bool local)
{
	if (r->ipv6 != MTN_ANY_FAMILY && r->ipv6 != s->key.ipv6)
		return false;
	if (r->proto && r->proto != s->key.proto)
		return false;
	if (!mtn_in_range(s->key.dport, r->dport_first, r->dport_last))
		return false;
	if ((s->mark & r->mark_mask) != r->mark)
		return false;
	/* Others' rules go by all bits of a mark that is there: only a rule that names it may add ours to it. */
	if (s->mark && !r->mark_mask)
		return false;
	if (!mtn_in_prefix(s->key.daddr, r->dst, r->dst_mask))
		return false;
	if (r->dscp != MTN_ANY_DSCP && r->dscp != s->dsfield >> 2)
		return false;
	if (!local)
		return !r->cgroup && !r->uid_first && r->uid_last == 0xffffffff;
	if (s->uid < r->uid_first || s->uid > r->uid_last)
		return false;
	return !r->cgroup || (local && bpf_get_current_ancestor_cgroup_id(r->cgroup_level) == r->cgroup);
}

/* Does the @i-th rule match a flow of the current task, or a forwarded one? Functions of their own as mtn_rule_selects(). */
__noinline int mtn_matches_local(__u32 i, struct mtn_new_flow *s)
{
	return s && i < MTN_MAX_RULES && mtn_rule_matches(&rules[i], s, true);
}

__noinline int mtn_matches_forwarded(__u32 i, struct mtn_new_flow *s)
{
	return s && i < MTN_MAX_RULES && mtn_rule_matches(&rules[i], s, false);
}

/* The first rule that matches, or MTN_MAX_RULES. @local is a constant. */
static __always_inline __u32 mtn_rule_for(struct mtn_new_flow *s, const bool local)
{
	__u32 i;

	for (i = 0; i < MTN_MAX_RULES && i < config.n_rules; i++) {
		if (local ? mtn_matches_local(i, s) : mtn_matches_forwarded(i, s))
			return i;
	}
	return MTN_MAX_RULES;
}

__noinline int mtn_local_rule(struct mtn_new_flow *s)
{
	return mtn_rule_for(s, true);
}

__noinline int mtn_forwarded_rule(struct mtn_new_flow *s)
{
	return mtn_rule_for(s, false);
}

/* Is the path dead that the kernel takes for all of a family? What it has is lost there. */
static __always_inline bool mtn_is_preferred_dead(__u32 ipv6)
{
	return *(volatile __u32 *)&config.preferred_dead >> (ipv6 & 1) & 1;
}

/* Does the kernel take one path for all of a family, and is that alive? */
static __always_inline bool mtn_is_preferred_alive(__u32 ipv6)
{
	return *(volatile __u32 *)&config.preferred_known >> (ipv6 & 1) & 1 && !mtn_is_preferred_dead(ipv6);
}

/*
 * May the destination be a provider's own, which is not there, or not the same, by another uplink? So may private
 * networks (a modem's page, television), and a translator to IPv4 (64:ff9b::/96, RFC 6052; 64:ff9b:1::/48, RFC 8215). So may
 * servers of DNS and NTP (ports 53, 853 and 123) that a provider names, many of which answer its customers only.
 */
static __always_inline bool mtn_is_to_provider(const struct mtn_flow_key *key)
{
	__u16 port = bpf_ntohs(key->dport);

	if (port == 53 || port == 853 || port == 123)
		return true;
	if (!key->ipv6)
		return mtn_is_private4(bpf_ntohl(key->daddr[0]));
	return mtn_is_private6(key->daddr) ||
	       (key->daddr[0] == bpf_htonl(0x0064ff9b) &&
		(!(key->daddr[1] | key->daddr[2]) || bpf_ntohl(key->daddr[1]) >> 16 == 1));
}

/*
 * Does a connection need the kernel's path, because of its protocol or port? Protocols other than TCP, UDP and ICMP do: the
 * other end of a tunnel (6in4, IPIP, ESP) or of SCTP knows one address, GRE goes where PPTP's connection does, and the firewall
 * is not asked about them (`placed()`, steer/alike/translated.rs). Some connections are about other packets, which only the kernel
 * places. Those are of GRE (PPTP, RFC 2637; forwarded ones, too), and of this host's sockets with ports of their own. These
 * have media that RTSP (RFC 7826; also 322 and 8554), SIP (RFC 3261; also the ports behind its own, and those of FreePBX) and
 * H.323 have agreed on. Many servers want all from one address. mtr (to port 1) and hping3 (to 11111) ask so for the source of
 * their raw packets, and send nothing by the socket. Programs that want to know this host's address ask for it likewise: to port
 * 80, 9 (discard), 1 or 0, at which no UDP is served, or to 10002 and 65530, as much copied code does. A peer of BGP
 * (RFC 4271) or multihop BFD (RFC 5883) takes no other address than the one that it has been told. Nor does who gets mail by
 * SMTP (RFC 5321): the domain names the servers that may send (SPF, RFC 7208), and their addresses have names. Mail from
 * another one is refused for good.
 */
static __always_inline bool mtn_is_signalling(const struct mtn_flow_key *key, const bool local)
{
	__u16 port = bpf_ntohs(key->dport);

	if (key->proto != IPPROTO_TCP && key->proto != IPPROTO_UDP && key->proto != IPPROTO_ICMP &&
	    key->proto != IPPROTO_ICMPV6)
		return true;
	if (key->proto == IPPROTO_TCP && (port == 25 || port == 1723))
		return true;
	if (!local)
		return false;
	if (key->proto == IPPROTO_TCP && port == 179)
		return true;
	if (key->proto == IPPROTO_UDP &&
	    (port <= 1 || port == 9 || port == 80 || port == 4784 || port == 10002 || port == 11111 || port == 65530))
		return true;
	return port == 322 || port == 554 || port == 8554 || port == 1720 ||
	       (port >= 5060 && port <= 5099) || port == 5160 || port == 5161;
}

/* On Linux, ports below are asked for, and those above chosen by the kernel (ip_local_port_range, net/ipv4/af_inet.c). */
#define MTN_CHOSEN_PORT		32768

/*
 * Why a forwarded packet has to go by the kernel's path: a counter, or MTN_PLACE_STAT_MAX if it does not. Hosts to which ports
 * are forwarded tell others the address that they are seen with: games' servers, telephones, dynamic DNS. Who spreads the flows
 * of one host does not mind that, but for UDP, which such ports send.
 * A function of its own as mtn_rule_selects().
 */
__noinline int mtn_belongs(struct mtn_flow_key *key)
{
	struct mtn_source source = {};

	if (!key)
		return MTN_PLACE_STAT_MAX;
	if (mtn_is_signalling(key, false))
		return MTN_PLACE_PASS_SIGNALLING;
	if (key->proto == IPPROTO_UDP && bpf_ntohs(key->sport) < MTN_CHOSEN_PORT &&
	    *(volatile __u32 *)&config.publishes >> (key->ipv6 & 1) & 1)
		return MTN_PLACE_PASS_PUBLISHED;
	if (!*(volatile __u32 *)&config.n_published || (!config.by_address && key->proto != IPPROTO_UDP))
		return MTN_PLACE_STAT_MAX;
	__builtin_memcpy(source.addr, key->saddr, sizeof(source.addr));
	source.ipv6 = key->ipv6;
	return bpf_map_lookup_elem(&published, &source) ? MTN_PLACE_PASS_PUBLISHED : MTN_PLACE_STAT_MAX;
}

/* Are all members of @g alive, whichever the kernel takes? */
static __always_inline bool mtn_all_alive(const struct mtn_group *g, union mtn_masks masks)
{
	return masks.alive == (1U << (g->n_members & (2 * MTN_MAX_MEMBERS - 1))) - 1;
}

/*
 * Is it the kernel's path alone that will do, if that is alive and no rule decides? A counter, or MTN_PLACE_STAT_MAX. Where
 * the kernel takes several, it has one address to one server still, at least of IPv4 (fib_multipath_hash_policy = 0).
 */
static __always_inline __u32 mtn_why_preferred(const struct mtn_new_flow *s, __u32 rule, bool all_alive)
{
	bool known = *(volatile __u32 *)&config.preferred_known >> (s->key.ipv6 & 1) & 1;

	if (rule < MTN_MAX_RULES)
		return MTN_PLACE_STAT_MAX;
	if (!known)
		return s->with_kernel && all_alive ? s->with_kernel : MTN_PLACE_STAT_MAX;
	if (mtn_is_preferred_dead(s->key.ipv6))
		return MTN_PLACE_STAT_MAX;
	return mtn_is_to_provider(&s->key) ? MTN_PLACE_PASS_PROVIDER :
	       s->with_kernel ? s->with_kernel : MTN_PLACE_STAT_MAX;
}

/* Members of @g among the paths in @wanted. */
static __always_inline __u32 mtn_members_of(const struct mtn_group *g, __u64 wanted)
{
	__u32 i, members = 0;

	/* Without a branch, each way of which the verifier would follow from member to member. */
	for (i = 0; i < MTN_MAX_MEMBERS && i < g->n_members; i++)
		members |= (wanted >> (g->path[i] & (MTN_MAX_PATHS - 1)) & 1) << i;
	return members;
}

#define MTN_NO_SCORE	(~0ULL)

/* What speaks against the @i-th member of @group by rendezvous hashing, or MTN_NO_SCORE. As mtn_rule_selects(). */
__noinline __u64 mtn_score(__u32 group, __u32 i, __u32 hash)
{
	struct mtn_group *g;
	__u64 score;
	__u32 path;

	if (group >= MTN_MAX_GROUPS || i >= MTN_MAX_MEMBERS)
		return MTN_NO_SCORE;
	g = mtn_group_at(group);
	path = g->path[i & (MTN_MAX_MEMBERS - 1)];
	if (!mtn_is_path(path))
		return MTN_NO_SCORE;
	score = (__u64)mtn_neg_log2(mtn_fmix32(hash ^ mtn_path_at(path)->salt)) *
		g->inv_weight[i & (MTN_MAX_MEMBERS - 1)];
	return score < MTN_NO_SCORE ? score : MTN_NO_SCORE - 1;
}

/* The path that @hash gives among the members of @group in @may; MTN_MAX_PATHS: there is none. */
__noinline int mtn_choose(__u32 group, __u32 may, __u32 hash)
{
	__u32 i, best = MTN_MAX_PATHS;
	__u64 best_score = MTN_NO_SCORE;
	struct mtn_group *g;

	if (group >= MTN_MAX_GROUPS)
		return MTN_MAX_PATHS;
	g = mtn_group_at(group);
	for (i = 0; i < MTN_MAX_MEMBERS && i < g->n_members; i++) {
		__u64 score;

		if (!(may & (1U << i)))
			continue;
		score = mtn_score(group, i, hash);
		if (score < best_score) {
			best_score = score;
			best = g->path[i];
		}
	}
	return best;
}

/* Was the exchange in use lately? Another CPU may have used it since @now was read. */
static __always_inline bool mtn_is_fresh(const struct mtn_unconnected *e, __u64 now)
{
	return (__s64)(now - e->last_ns) < (__s64)config.idle_ns;
}

/* The member of @group by the uplink of this mark, or MTN_MAX_PATHS. */
static __always_inline __u32 mtn_member_of_mark(__u32 mark, __u32 group)
{
	const struct mtn_group *g = mtn_group_at(group);
	__u32 i, found = MTN_MAX_PATHS;

	for (i = 0; i < MTN_MAX_MEMBERS && i < g->n_members; i++) {
		if (mtn_path_at(g->path[i])->mark == mark) {
			found = g->path[i];
			break;
		}
	}
	return found;
}

/* The member of @group on which an exchange is: by its uplink's mark, where its path has another id by now. */
static __always_inline __u32 mtn_exchange_path(const struct mtn_unconnected *e, __u32 group)
{
	if (e->path >= MTN_MAX_PATHS)
		return MTN_MAX_PATHS;
	if (mtn_path_at(e->path)->mark == e->mark && mtn_is_member(group, e->path))
		return e->path;
	return mtn_member_of_mark(e->mark, group);
}

/* Members of a group on which a peer's new flows stay, besides those that its verdict gives them to. */
static __always_inline __u16 mtn_keeps(union mtn_masks masks)
{
	return config.by_address ? masks.alive & ~masks.ejected : 0;
}

/*
 * The path of a new flow that @path was chosen for: that of the last one to, or from, the one address in @key, or of
 * connections between the two, while it is among the members in @keep. Some servers bind a session to the address that
 * they have seen (FTP's data connections, web sites), and a path leaves the verdict for every late probe. What went
 * elsewhere comes back when its choice has been another path for config.idle_ns, and no connection there is left. A
 * function of its own as mtn_rule_selects().
 */
__noinline int mtn_stay(struct mtn_flow_key *key, __u32 group, __u32 keep, __u32 path)
{
	struct mtn_unconnected *peer, new = {};
	__u32 was, member;
	__u64 now;

	if (!key || group >= MTN_MAX_GROUPS)
		return MTN_MAX_PATHS;
	now = bpf_ktime_get_ns();
	peer = bpf_map_lookup_elem(&peers, key);
	if (peer && mtn_is_fresh(peer, now)) {
		was = mtn_exchange_path(peer, group);
		barrier_var(was);
		member = mtn_group_at(group)->member_of[was & (MTN_MAX_PATHS - 1)];
		if (was < MTN_MAX_PATHS && member < MTN_MAX_MEMBERS && (keep >> member & 1)) {
			/* Not each time: all CPUs share it. */
			if (was == path && now - peer->last_ns > 1000000000)
				peer->last_ns = now;
			return was;
		}
	}
	if (path >= MTN_MAX_PATHS)
		return MTN_MAX_PATHS;
	new.last_ns = now;
	new.path = path;
	new.mark = mtn_path_at(path)->mark;
	bpf_map_update_elem(&peers, key, &new, BPF_ANY);
	return path;
}

/* Where a flow to @group starts: a path id, or MTN_MAX_PATHS for the kernel's choice. */
static __always_inline __u32 mtn_place(struct mtn_new_flow *s, __u32 group, __u32 rule)
{
	struct mtn_flow_key key = s->key;
	union mtn_masks masks;
	struct mtn_group *g;
	__u32 may, keep, path, why;
	bool is_left = s->left, stays = config.by_address;

	if (*(volatile __u32 *)&config.paused) {
		mtn_count(MTN_PLACE_PASS_PAUSED);
		return MTN_MAX_PATHS;
	}
	g = mtn_group_at(group);
	barrier_var(group);
	masks.word = group_masks[group & (MTN_MAX_GROUPS - 1)].word;
	may = masks.latency & masks.alive;
	keep = mtn_keeps(masks);
	s->by_rule = 0;
	if (rule < MTN_MAX_RULES) {
		struct mtn_placement_rule *r;
		__u32 asked;

		barrier_var(rule);
		r = &rules[rule & (MTN_MAX_RULES - 1)];
		s->by_rule = 1;
		asked = r->wants == MTN_USE_BULK ? masks.bulk & masks.alive :
			r->wants == MTN_USE_PATHS ? mtn_members_of(g, r->paths) & masks.alive : may;
		/* What was asked for is dead, or not of this group: the steadiest then. */
		if (asked)
			may = asked;
		if (asked && r->wants == MTN_USE_PATHS) {
			is_left = stays = false;
			keep = 0;
		}
	}
	why = mtn_why_preferred(s, rule, mtn_all_alive(g, masks));
	if (why < MTN_PLACE_STAT_MAX) {
		s->left = true;
		mtn_count(why);
		return MTN_MAX_PATHS;
	}
	if (is_left) {
		mtn_count(MTN_PLACE_PASS_FIREWALL);
		return MTN_MAX_PATHS;
	}
	if (s->prefer < MTN_MAX_PATHS) {
		__u32 member, prefer = s->prefer;

		barrier_var(prefer);
		member = g->member_of[prefer & (MTN_MAX_PATHS - 1)];
		if (member < MTN_MAX_MEMBERS && mtn_is_alive(prefer) && ((may | keep) & (1U << member)))
			return prefer;
	}
	if (config.by_address) {
		key.sport = 0;
		key.dport = 0;
		key.proto = 0;
		s->salt = 0;
		if (key.saddr[0] | key.saddr[1] | key.saddr[2] | key.saddr[3]) {
			/* What is under way between the two goes before. */
			path = stays ? mtn_stay(&key, group, may | keep, MTN_MAX_PATHS) : MTN_MAX_PATHS;
			if (path < MTN_MAX_PATHS)
				return path;
			/* An inner host has one address to all, as RFC 4787 recommends (REQ-2). */
			__builtin_memset(key.daddr, 0, sizeof(key.daddr));
		}
	}
	path = mtn_choose(group, may, mtn_flow_hash(&key, config.hash_seed) ^ mtn_fmix32(s->salt));
	/* What a rule gives a path of its own leaves it only when it is dead, and is no guide for others. */
	if (stays)
		path = mtn_stay(&key, group, may | keep, path);
	if (path >= MTN_MAX_PATHS)
		mtn_count(MTN_PLACE_PASS_NO_PATH);
	return path;
}

/* The same by the first rule that matches, for flows of the current task ... */
__noinline int mtn_place_local(struct mtn_new_flow *s, __u32 group, __u32 rule)
{
	if (!s)
		return MTN_MAX_PATHS;
	s->left = config.left >> (s->key.ipv6 & 1) & 1 && !mtn_is_preferred_dead(s->key.ipv6);
	if (!s->with_kernel && mtn_is_signalling(&s->key, true))
		s->with_kernel = MTN_PLACE_PASS_SIGNALLING;
	return mtn_place(s, group, rule);
}

/* ... and for forwarded ones. A mark that no rule names is somebody's who routes by it. */
__noinline int mtn_place_forwarded(struct mtn_new_flow *s, __u32 group)
{
	__u32 rule, why;

	if (!s)
		return MTN_MAX_PATHS;
	rule = mtn_forwarded_rule(s);
	if (rule >= MTN_MAX_RULES && s->mark) {
		mtn_count(MTN_PLACE_PASS_MARKED);
		return MTN_MAX_PATHS;
	}
	why = mtn_belongs(&s->key);
	if (why < MTN_PLACE_STAT_MAX)
		s->with_kernel = why;
	return mtn_place(s, group, rule);
}

static __always_inline void mtn_placed(const struct mtn_new_flow *s, __u32 path, __u32 stat)
{
	barrier_var(path);
	placed[path & (MTN_MAX_PATHS - 1)]++;
	mtn_count(stat);
	if (s->by_rule)
		mtn_count(MTN_PLACE_BY_RULE);
}

#endif
