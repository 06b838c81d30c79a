/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The life of a flow: its pair of directions is made, proven, and looked after.
 *
 * A pair begins half-open. It is proven when the client answers the target: with the ACK of the target's
 * SYN-ACK, which nobody can send who does not see that, or with a second datagram. Only then it enters
 * the table of established flows, from which nothing but idleness removes it. A target that has taken data
 * with the SYN (TCP Fast Open, RFC 7413) may send before the client answers, whose first ACK that arrives
 * here may be one of such data.
 */
#ifndef MOUNTAIN_REDIRECT_PAIR_H
#define MOUNTAIN_REDIRECT_PAIR_H

/* What @flow's addresses and ports add to the sums of the packets that @key names. */
static __always_inline void mtn_rd_deltas(const struct mtn_rd_key6 *key, struct mtn_rd_flow6 *flow)
{
	__u32 sum = 0;
	int i;

	for (i = 0; i < 4; i++)
		sum += mtn_diff32(key->saddr[i], flow->saddr[i]) +
		       mtn_diff32(key->daddr[i], flow->daddr[i]);
	flow->f.addr_delta = mtn_fold(sum);
	sum += (__u16)~key->sport + flow->f.sport + (__u16)~key->dport + flow->f.dport;
	flow->f.l4_delta = mtn_fold(sum);
}

/* The forward flow of @rule for packets with @key, source port still the client's. */
static __always_inline void mtn_rd_forward(const struct mtn_rd_key6 *key,
					   const struct mtn_rd_rule *rule, struct mtn_rd_half6 *fwd)
{
	struct mtn_rd_flow6 *flow = &fwd->flow;

	__builtin_memset(fwd, 0, sizeof(*fwd));
	flow->f.flags = rule->flags | MTN_RD_HALF;
	flow->f.backend = rule->backend;
	flow->f.rule = rule->id;
	flow->f.client_dev = rule->client_dev;
	flow->f.target_dev = rule->target_dev;
	flow->f.out_veth = rule->target_veth;
	__builtin_memcpy(flow->f.in_mac, rule->client_mac, ETH_ALEN);
	__builtin_memcpy(flow->saddr, rule->flags & MTN_RD_SNAT ? rule->snat : key->saddr, 16);
	__builtin_memcpy(flow->daddr, rule->to, 16);
	flow->f.sport = key->sport;
	flow->f.dport = rule->to_port;
}

/* The flow back of the forward flow @fwd, whose packets have @key. */
static __always_inline void mtn_rd_reverse(const struct mtn_rd_key6 *key,
					   const struct mtn_rd_rule *rule,
					   const struct mtn_rd_half6 *fwd, struct mtn_rd_half6 *rev)
{
	struct mtn_rd_flow6 *flow = &rev->flow;

	*rev = *fwd;
	flow->f.flags |= MTN_RD_REPLY;
	flow->f.mtu = 0;
	flow->f.out_veth = rule->client_veth;
	__builtin_memcpy(flow->f.in_mac, rule->target_mac, ETH_ALEN);
	__builtin_memcpy(flow->saddr, key->daddr, 16);
	__builtin_memcpy(flow->daddr, key->saddr, 16);
	flow->f.sport = key->dport;
	flow->f.dport = key->sport;
}

/* The rule that names forward packets with @key which come in by a device. */
static __always_inline struct mtn_rd_rule *mtn_rd_rule_of(const struct mtn_rd_key6 *key,
							  __u32 ifindex, bool ipv6)
{
	struct mtn_rd_rule_key rule_key = {
		.ifindex = ifindex,
		.port = key->dport,
		.proto = key->proto,
		.ipv6 = ipv6,
	};

	__builtin_memcpy(rule_key.addr, key->daddr, 16);
	return bpf_map_lookup_elem(&rules, &rule_key);
}

/* Has an established flow looked at from time to time. */
__noinline int mtn_rd_enqueue(struct mtn_rd_key6 *key, struct mtn_rd_half6 *fwd, bool ipv6)
{
	struct mtn_rd_age age = { .ipv6 = ipv6 };

	if (!key || !fwd || fwd->flow.f.flags & MTN_RD_HALF)
		return 0;
	age.key = *key;
	return bpf_map_push_elem(&rd_ages, &age, 0);
}

/* How mtn_rd_new() is called. */
#define MTN_RD_BY_XDP	(1 << 0)
#define MTN_RD_MIDWAY	(1 << 1)	/* TCP, and not the first packet of a connection */
#define MTN_RD_ORPHAN	(1 << 2)	/* and no socket of this host has that connection */

/* What mtn_rd_new() returns besides 0, when the pair is there. */
#define MTN_RD_NOT_OURS	(-1)	/* no business of this hook */
#define MTN_RD_DROP	1
#define MTN_RD_DOUBT	2	/* ours if no socket of this host has the connection */

/* Whether a pair for packets with @key may be made by this rule at this hook. */
static __always_inline bool mtn_rd_is_here(const struct mtn_rd_rule *rule, bool xdp)
{
	if (rule->flags & MTN_RD_DIRECT)
		return xdp == (rule->backend == MTN_RD_XDP);
	return !xdp || rule->backend == MTN_RD_XDP_REDIRECT ||
	       (rule->backend == MTN_RD_XDP && !(rule->flags & MTN_RD_SNAT));
}

/* Whether packets of a rule go around the kernel's forwarding. */
static __always_inline bool mtn_rd_goes_around(const struct mtn_rd_rule *rule)
{
	return rule->flags & MTN_RD_SNAT || rule->backend == MTN_RD_TCX_PEER ||
	       rule->backend == MTN_RD_XDP_REDIRECT;
}

/*
 * Whether the kernel forwards nothing from the source of packets with @key: an address of this host, of loopback, of
 * a group or of all hosts of a link, nobody's, and with IPv6 one that is valid on its link only.
 */
__noinline int mtn_rd_is_martian(struct mtn_rd_key6 *key, bool ipv6)
{
	struct mtn_rd_own own = { .prefix_len = 32 + 128, .ipv6 = ipv6 };
	__u32 first;

	if (!key)
		return 0;
	first = bpf_ntohl(key->saddr[0]);
	if (ipv6) {
		if (first >> 22 == 0xfe80 >> 6 || first >> 24 == 0xff)
			return 1;
		if (!(key->saddr[0] | key->saddr[1] | key->saddr[2]) &&
		    bpf_ntohl(key->saddr[3]) <= 1)
			return 1;
	} else if (first >> 24 == 0 || first >> 24 == 127 || first >> 28 == 14 ||
		   first == 0xffffffff) {
		return 1;
	}
	__builtin_memcpy(own.addr, key->saddr, 16);
	return bpf_map_lookup_elem(&own_addresses, &own) ? 1 : 0;
}

/* Whether nobody has proven a flow, which is not one of clients that speak to the target itself. */
static __always_inline bool mtn_rd_is_unproven(const struct mtn_rd_half6 *half)
{
	return (half->flow.f.flags & (MTN_RD_HALF | MTN_RD_DIRECT)) == MTN_RD_HALF &&
	       !(half->state & MTN_RD_PROVEN);
}

/*
 * Makes room for the other direction of the pair, @back, where another flow is in its way that is over.
 * Clients that speak to the target itself come before a flow that nobody has proven yet: one forged
 * packet must not take their answers away. (Not before a SYN: that can still take another port.)
 * Returns whether the place is free.
 */
static __always_inline bool mtn_rd_make_room(struct mtn_rd_key6 *back, struct mtn_rd_pair *room,
					     bool precious, bool ipv6)
{
	bool over = mtn_rd_is_idle(&room->found.flow.f, back->proto, bpf_ktime_get_coarse_ns());

	if (!over && !(precious && mtn_rd_is_unproven(&room->found)))
		return false;
	mtn_rd_forget(back, &room->found, ipv6);
	return true;
}

/*
 * A place for a new flow where all are taken: that of the flow which nobody has proven and whose last packet is the
 * oldest. Without it, forged packets would keep real clients out until those flows are idle.
 */
static __always_inline bool mtn_rd_take_place(struct mtn_rd_key6 *back, struct mtn_rd_pair *room,
					      bool ipv6)
{
	room->fwd.flow.f.sport = room->oldest;
	back->dport = room->oldest;
	mtn_rd_deltas(back, &room->rev.flow);
	if (!mtn_rd_get(back, &room->found, ipv6))
		return !mtn_rd_insert(back, &room->rev, ipv6);
	if (!mtn_rd_is_unproven(&room->found))
		return false;
	mtn_rd_forget(back, &room->found, ipv6);
	return !mtn_rd_insert(back, &room->rev, ipv6);
}

/* What mtn_rd_try() returns besides 0 and errors. */
#define MTN_RD_TAKEN	1	/* the port is another flow's */
#define MTN_RD_FOUND	2	/* the flow back is there already */

/*
 * Enters the flow back of the pair that is being made, by the port that the forward flow has. Of the flows in the way it
 * notes the oldest that nobody has proven. A function of its own to the verifier, which would else follow each way
 * through all tries.
 */
__noinline int mtn_rd_try(struct mtn_rd_key6 *back, bool enter, bool ipv6)
{
	struct mtn_rd_pair *room = mtn_rd_room();
	struct mtn_rd_flow *fwd;
	bool precious;
	__u32 age;
	int err;

	if (!back || !room)
		return -1;
	fwd = &room->fwd.flow.f;
	precious = fwd->flags & MTN_RD_DIRECT && !(room->fwd.state & MTN_RD_SYN);
	back->dport = fwd->sport;
	mtn_rd_deltas(back, &room->rev.flow);
	if (mtn_rd_get(back, &room->found, ipv6)) {
		if (mtn_rd_same(&room->found.flow, &room->rev.flow)) {
			/* This half belongs where the other is. */
			fwd->flags &= ~MTN_RD_HALF;
			fwd->flags |= room->found.flow.f.flags & MTN_RD_HALF;
			return MTN_RD_FOUND;
		}
		if (!mtn_rd_make_room(back, room, precious, ipv6)) {
			age = fwd->touched_ticks - room->found.flow.f.touched_ticks;
			if (mtn_rd_is_unproven(&room->found) && age >= room->oldest_age) {
				room->oldest_age = age;
				room->oldest = back->dport;
			}
			return MTN_RD_TAKEN;
		}
	}
	if (!enter)
		return MTN_RD_TAKEN;
	err = mtn_rd_insert(back, &room->rev, ipv6);
	return err == -EEXIST ? MTN_RD_TAKEN : err;
}

/*
 * Makes the pair of flows that the packets with @key need, when a rule names them, half-open. A TCP
 * connection that is under way was not redirected so far, and stays as it is. But one whose other
 * direction is known has only lost this half; and one that this host would answer with an RST,
 * because it was sent to this host and no socket has it, can only be a redirected one that was lost.
 * Returns 0 or MTN_RD_NOT_OURS, ...
 */
__noinline int mtn_rd_new(struct mtn_rd_key6 *key, __u32 ifindex, __u32 how, bool ipv6)
{
	struct mtn_rd_key6 back = {};
	struct mtn_rd_rule *rule;
	struct mtn_rd_pair *room;
	bool direct, midway, enter, made;
	int i, err = MTN_RD_TAKEN;
	__u32 hash;

	if (!key)
		return MTN_RD_NOT_OURS;
	rule = mtn_rd_rule_of(key, ifindex, ipv6);
	room = mtn_rd_room();
	if (!rule || !room || !mtn_rd_is_here(rule, how & MTN_RD_BY_XDP))
		return MTN_RD_NOT_OURS;
	if (mtn_rd_goes_around(rule) && mtn_rd_is_martian(key, ipv6))
		return MTN_RD_NOT_OURS;
	direct = rule->flags & MTN_RD_DIRECT;
	midway = how & MTN_RD_MIDWAY;

	mtn_rd_forward(key, rule, &room->fwd);
	room->fwd.flow.f.touched_ticks = mtn_rd_ticks(bpf_ktime_get_coarse_ns());
	room->fwd.state = key->proto == IPPROTO_TCP && !midway ? MTN_RD_SYN : 0;
	mtn_rd_reverse(key, rule, &room->fwd, &room->rev);
	mtn_rd_mirror(&room->fwd.flow, key->proto, &back);

	/* Always the same first choice, so that a flow that lost one half finds the other again. */
	hash = (key->saddr[0] ^ key->saddr[1] ^ key->saddr[2] ^ key->saddr[3] ^
		((__u32)key->sport << 16 | key->dport)) * 0x9e3779b1;
	hash = (hash ^ hash >> 15) * 0x85ebca6b;
	room->oldest_age = 0;
	room->oldest = 0;
	for (i = 0; i < MTN_RD_TRIES && err == MTN_RD_TAKEN; i++) {
		if (i || rule->flags & MTN_RD_SNAT)
			room->fwd.flow.f.sport =
				bpf_htons(MTN_RD_PORT_MIN + ((hash >> 16) + i) % MTN_RD_PORTS);
		/* In the midst of a connection its port is what it was. */
		enter = !midway || (!i && (direct || how & MTN_RD_ORPHAN));
		err = mtn_rd_try(&back, enter, ipv6);
	}
	if (err < 0)
		goto no_memory;
	made = !err;
	if (err == MTN_RD_TAKEN) {
		if (midway && rule->flags & MTN_RD_LOCAL && !(how & MTN_RD_ORPHAN))
			return MTN_RD_DOUBT;
		if (midway || direct)
			return MTN_RD_NOT_OURS;
		made = room->oldest && mtn_rd_take_place(&back, room, ipv6);
		if (!made) {
			mtn_rd_count_drop(rule->id, MTN_RD_DROP_PORTS);
			return MTN_RD_DROP;
		}
	}
	mtn_rd_deltas(key, &room->fwd.flow);
	err = mtn_rd_insert(key, &room->fwd, ipv6);
	if (!err) {
		mtn_rd_enqueue(key, &room->fwd, ipv6);
		return 0;
	}
	/* Another CPU may have been faster, with the same outcome or with another port. */
	if (made && !(mtn_rd_get(key, &room->found, ipv6) &&
		      mtn_rd_same(&room->found.flow, &room->fwd.flow)))
		mtn_rd_delete(&back, true, ipv6);
	if (err == -EEXIST)
		return 0;
no_memory:
	if (direct)
		return MTN_RD_NOT_OURS;
	mtn_rd_count_drop(rule->id, MTN_RD_DROP_MEMORY);
	return MTN_RD_DROP;
}

/* Enters the other direction of the forward flow @fwd, whose packets have @key, beside it. */
__noinline int mtn_rd_put_back(struct mtn_rd_key6 *key, struct mtn_rd_half6 *fwd, bool ipv6)
{
	struct mtn_rd_pair *room = mtn_rd_room();
	struct mtn_rd_rule *rule;

	if (!key || !fwd || !room)
		return -1;
	rule = mtn_rd_rule_of(key, fwd->flow.f.client_dev, ipv6);
	if (!rule)
		return -1;
	mtn_rd_reverse(key, rule, fwd, &room->rev);
	mtn_rd_mirror(&fwd->flow, key->proto, &room->back);
	mtn_rd_deltas(&room->back, &room->rev.flow);
	return mtn_rd_insert(&room->back, &room->rev, ipv6);
}

/* Updates what a half-open flow has come to. */
__noinline int mtn_rd_set_state(struct mtn_rd_key6 *key, __u32 state, __u32 ack, __u32 ack_all,
				bool ipv6)
{
	struct mtn_rd_key4 key4 = {};
	struct mtn_rd_half4 *narrow;
	struct mtn_rd_half6 *wide;

	if (!key)
		return 0;
	if (ipv6) {
		wide = bpf_map_lookup_elem(&half6, key);
		if (wide) {
			wide->ack = ack;
			wide->ack_all = ack_all;
			wide->state |= state;
		}
		return 0;
	}
	mtn_narrow_key(key, &key4);
	narrow = bpf_map_lookup_elem(&half4, &key4);
	if (narrow) {
		narrow->ack = ack;
		narrow->ack_all = ack_all;
		narrow->state |= state;
	}
	return 0;
}

/* Moves the half-open pair of @fwd to the established ones. Returns 0 when that was possible. */
__noinline int mtn_rd_establish(struct mtn_rd_key6 *key, struct mtn_rd_half6 *fwd, bool ipv6)
{
	struct mtn_rd_key6 back = {};
	int err;

	if (!key || !fwd)
		return -1;
	fwd->flow.f.flags &= ~MTN_RD_HALF;
	err = mtn_rd_put_back(key, fwd, ipv6);
	if (err && err != -EEXIST)
		return err;
	mtn_rd_mirror(&fwd->flow, key->proto, &back);
	err = mtn_rd_insert(key, fwd, ipv6);
	if (err && err != -EEXIST) {
		mtn_rd_delete(&back, false, ipv6);
		return -1;
	}
	mtn_rd_delete(key, true, ipv6);
	mtn_rd_delete(&back, true, ipv6);
	if (!err)
		mtn_rd_enqueue(key, fwd, ipv6);
	return 0;
}

/* Whether the target's packet shows that it takes part in the half-open flow whose state is @state. */
static __always_inline bool mtn_rd_is_answer(const struct mtn_rd_look *look, __u8 state)
{
	const __u8 syn_ack = MTN_TCP_SYN | MTN_TCP_ACK;

	if (look->proto == IPPROTO_UDP)
		return true;
	return state & MTN_RD_SYN ? (look->tcp_flags & syn_ack) == syn_ack :
				    !(look->tcp_flags & MTN_TCP_RST);
}

/* Whether the client's packet shows that it has seen the target's. */
static __always_inline bool mtn_rd_is_proof(const struct mtn_rd_look *look,
					    const struct mtn_rd_half6 *fwd)
{
	const __u8 flags = MTN_TCP_SYN | MTN_TCP_RST | MTN_TCP_ACK;

	if (!(fwd->state & MTN_RD_ANSWERED))
		return false;
	if (look->proto == IPPROTO_UDP || fwd->state & MTN_RD_PROVEN)
		return true;
	return (look->tcp_flags & flags) == MTN_TCP_ACK &&
	       (!(fwd->state & MTN_RD_SYN) || look->ack - fwd->ack <= fwd->ack_all - fwd->ack);
}

/* How far a packet brings TCP's sequence on, besides its SYN. Later fragments do not tell. */
static __always_inline __u32 mtn_rd_carries(const struct mtn_rd_look *look)
{
	__u32 data = look->headers && look->len > look->headers ? look->len - look->headers : 0;

	return data + !!(look->tcp_flags & MTN_TCP_FIN);
}

/*
 * Notes what the target's packet says of the half-open flow @fwd, whose packets have @key. Returns whether it is an
 * answer.
 */
static __always_inline bool mtn_rd_answered(struct mtn_rd_key6 *key, const struct mtn_rd_half6 *fwd,
					    const struct mtn_rd_look *look, bool ipv6)
{
	bool answer = mtn_rd_is_answer(look, fwd->state), known = fwd->state & MTN_RD_ANSWERED;
	__u32 carries = mtn_rd_carries(look);
	__u32 ack = answer ? look->seq + 1 : fwd->ack;
	__u32 all = look->seq + !!(look->tcp_flags & MTN_TCP_SYN) + carries;

	if (!answer && !(known && carries))
		return false;
	/* Sent again, or overtaken. */
	if (known && ack == fwd->ack && (__s32)(all - fwd->ack_all) < 0)
		all = fwd->ack_all;
	mtn_rd_set_state(key, MTN_RD_ANSWERED, ack, all, ipv6);
	return answer;
}

/* What a packet says of its flow. An RST may be forged: it does not count once another packet follows. */
static __always_inline void mtn_rd_state(struct mtn_rd_flow *f, const struct mtn_rd_look *look)
{
	f->touched_ticks = mtn_rd_ticks(look->now);
	if (look->tcp_flags & MTN_TCP_RST) {
		f->flags |= MTN_RD_RESET;
		return;
	}
	f->flags &= ~MTN_RD_RESET;
	if (look->tcp_flags & MTN_TCP_FIN)
		f->flags |= MTN_RD_CLOSING;
	else if (look->tcp_flags & MTN_TCP_SYN)
		f->flags &= ~MTN_RD_CLOSING;
}

/* Whether @flow turns its packets into answers to those with @key. */
static __always_inline bool mtn_rd_turns_into(const struct mtn_rd_flow6 *flow,
					      const struct mtn_rd_key6 *key)
{
	return flow->f.sport == key->dport && flow->f.dport == key->sport &&
	       !__builtin_memcmp(flow->saddr, key->daddr, 16) &&
	       !__builtin_memcmp(flow->daddr, key->saddr, 16);
}

/* What mtn_rd_touch() returns besides 0. */
#define MTN_RD_GONE		1
#define MTN_RD_ESTABLISHED_NOW	2

/*
 * Looks after a flow: once a second of its life, for each FIN, RST and SYN, and until it is established
 * for what may prove it. Returns MTN_RD_GONE when the flow is over, or its other direction somebody
 * else's by now.
 */
__noinline int mtn_rd_touch(struct mtn_rd_key6 *key, struct mtn_rd_look *look, bool ipv6)
{
	struct mtn_rd_pair *room = mtn_rd_room();
	struct mtn_rd_flow *f, *other;
	struct mtn_rd_key6 back = {};
	bool reply;
	int err;

	if (!key || !look || !room || !mtn_rd_get(key, &room->fwd, ipv6))
		return 0;
	reply = room->fwd.flow.f.flags & MTN_RD_REPLY;
	if (reply && mtn_rd_is_idle(&room->fwd.flow.f, key->proto, look->now)) {
		mtn_rd_forget(key, &room->fwd, ipv6);
		return MTN_RD_GONE;
	}
	mtn_rd_mirror(&room->fwd.flow, key->proto, &back);
	if (mtn_rd_get(&back, &room->found, ipv6)) {
		if (!mtn_rd_turns_into(&room->found.flow, key)) {
			mtn_rd_delete(key, room->fwd.flow.f.flags & MTN_RD_HALF, ipv6);
			return MTN_RD_GONE;
		}
		other = mtn_rd_find(&back, ipv6);
		if (other)
			mtn_rd_state(other, look);
	} else if (!reply) {
		mtn_rd_put_back(key, &room->fwd, ipv6);
	}
	f = mtn_rd_find(key, ipv6);
	if (f)
		mtn_rd_state(f, look);
	if (!(room->fwd.flow.f.flags & MTN_RD_HALF))
		return 0;
	if (reply) {
		if (mtn_rd_answered(&back, &room->found, look, ipv6))
			mtn_rd_set_state(key, MTN_RD_ANSWERED, 0, 0, ipv6);
		return 0;
	}
	if (!mtn_rd_is_proof(look, &room->fwd))
		return 0;
	room->fwd.flow.f.touched_ticks = mtn_rd_ticks(look->now);
	/* Here and not in there, for the stack: Linux 6.8 takes each call to need 32 of its 512 bytes at least. */
	mtn_rd_age(MTN_RD_AGE_EACH);
	err = mtn_rd_establish(key, &room->fwd, ipv6);
	if (err == -E2BIG) {
		mtn_rd_age(MTN_RD_AGE_MAX);
		err = mtn_rd_establish(key, &room->fwd, ipv6);
	}
	if (!err)
		return MTN_RD_ESTABLISHED_NOW;
	mtn_rd_set_state(key, MTN_RD_PROVEN, room->fwd.ack, room->fwd.ack_all, ipv6);
	mtn_rd_set_state(&back, MTN_RD_PROVEN, 0, 0, ipv6);
	return 0;
}

/* Of packets that find no flow. */
static __always_inline __u32 mtn_rd_how(const struct mtn_rd_look *look, const int hook)
{
	bool first = (look->tcp_flags & (MTN_TCP_SYN | MTN_TCP_ACK)) == MTN_TCP_SYN;

	return (hook == MTN_HOOK_XDP ? MTN_RD_BY_XDP : 0) |
	       (look->proto == IPPROTO_TCP && !first ? MTN_RD_MIDWAY : 0);
}

/* Makes the flow of a packet that has none. Returns what mtn_rd_new() does, but no doubts. */
static __always_inline int mtn_rd_begin(void *ctx, struct mtn_rd_key6 *key,
					const struct mtn_rd_look *look, bool ipv6, const int hook)
{
	const __u8 flags = MTN_TCP_SYN | MTN_TCP_RST | MTN_TCP_ACK;
	struct mtn_rd_rule *rule = mtn_rd_rule_of(key, mtn_device(ctx, hook), ipv6);
	__u32 how = mtn_rd_how(look, hook);
	int ret;

	if (!rule)
		return MTN_RD_NOT_OURS;
	if (!(rule->flags & MTN_RD_DIRECT) &&
	    (hook == MTN_HOOK_XDP ? mtn_rd_is_answered_xdp(ctx, key, ipv6) :
				    mtn_rd_is_answered_skb(ctx, key, ipv6)))
		return MTN_RD_NOT_OURS;
	ret = mtn_rd_new(key, mtn_device(ctx, hook), how, ipv6);
	if (ret != MTN_RD_DOUBT)
		return ret;
	if ((look->tcp_flags & flags) != MTN_TCP_ACK ||
	    (hook == MTN_HOOK_XDP ? mtn_rd_has_socket_xdp(ctx, key, ipv6) :
				    mtn_rd_has_socket_skb(ctx, key, ipv6)))
		return MTN_RD_NOT_OURS;
	return mtn_rd_new(key, mtn_device(ctx, hook), how | MTN_RD_ORPHAN, ipv6);
}

/*
 * Whether the flow's two directions are to be looked after. @state: of a half-open flow, which an answer
 * or a packet after one may prove.
 */
static __always_inline bool mtn_rd_is_due(const struct mtn_rd_flow *f,
					  const struct mtn_rd_look *look, __u8 state)
{
	bool reply = f->flags & MTN_RD_REPLY;
	/* What the target of a TCP connection sends before the client has answered. */
	bool early = (state & (MTN_RD_SYN | MTN_RD_PROVEN)) == MTN_RD_SYN && mtn_rd_carries(look);

	return mtn_rd_ticks(look->now) - f->touched_ticks > mtn_rd_ticks(MTN_RD_TOUCH_NS) ||
	       look->tcp_flags & (MTN_TCP_FIN | MTN_TCP_SYN | MTN_TCP_RST) ||
	       f->flags & MTN_RD_RESET ||
	       (f->flags & MTN_RD_HALF &&
		(reply ? !(state & MTN_RD_ANSWERED) || early :
			 (state & (MTN_RD_ANSWERED | MTN_RD_PROVEN)) == MTN_RD_ANSWERED));
}

/* Whether a flow, whose packets have these ports, leaves them as they are. */
static __always_inline bool mtn_rd_is_identity(const struct mtn_rd_flow *f, __u16 sport, __u16 dport)
{
	return f->flags & MTN_RD_DIRECT && f->sport == sport && f->dport == dport;
}

#endif
