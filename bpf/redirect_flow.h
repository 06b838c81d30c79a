/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What redirect.bpf.c does seldom: new flows, their other direction, their way out, the log.
 *
 * Here both families share the wide key and flow, IPv4 in the first word of addresses.
 */
#ifndef MOUNTAIN_REDIRECT_FLOW_H
#define MOUNTAIN_REDIRECT_FLOW_H

#define EEXIST		17
#define MTN_SECOND	1000000000ULL
/* How long a flow without packets is one, ns; as the kernel's connection tracking has it. */
const volatile __u64 idle_udp_ns = 180 * MTN_SECOND;
const volatile __u64 idle_tcp_ns = 5 * 24 * 3600 * MTN_SECOND;
const volatile __u64 idle_closing_ns = 120 * MTN_SECOND;
/* How far the clocks of two CPUs may be apart, 67 s: more than they are, less than a limit's wrapping. */
#define MTN_RD_AHEAD_TICKS	(1U << 16)
/* linux/bpf.h of 6.3 and later */
#define MTN_FIB_SKIP_NEIGH	(1U << 2)

/* A time as flows keep it. */
static __always_inline __u32 mtn_rd_ticks(__u64 ns)
{
	return ns >> 20;
}

/* A packet as far as the way out depends on it. */
struct mtn_rd_look {
	__u64 now;	/* ns, the coarse clock */
	__u32 len;	/* network layer */
	__u8 ttl;
	__u8 tos;
	__u8 proto;
	__u8 tcp_flags;
};

/* Room for a new pair: too much for the stack. */
struct mtn_rd_pair {
	struct mtn_rd_flow6 fwd;
	struct mtn_rd_flow6 rev;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct mtn_rd_pair);
} rd_pair SEC(".maps");

/* One's complement sum of two. */
static __always_inline __u16 mtn_sum(__u16 a, __u16 b)
{
	__u32 sum = (__u32)a + b;

	return sum + (sum >> 16);
}

/* What replacing @old by @new adds to a sum. */
static __always_inline __u32 mtn_diff32(__u32 old, __u32 new)
{
	return (new & 0xffff) + (new >> 16) + (~old & 0xffff) + (~old >> 16);
}

/* Folded; never 0, so that no sum becomes 0 by it (0xffff is as good). */
static __always_inline __u16 mtn_fold(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum ? sum : 0xffff;
}

static __always_inline void mtn_rd_count_drop(__u32 rule, __u32 reason)
{
	struct mtn_rd_drop_key key = { .rule = rule, .reason = reason };
	__u64 *count, one = 1;

	count = bpf_map_lookup_elem(&rule_drops, &key);
	if (count)
		*count += 1;
	else
		bpf_map_update_elem(&rule_drops, &key, &one, BPF_NOEXIST);
}

static __always_inline void mtn_narrow_key(const struct mtn_rd_key6 *key, struct mtn_rd_key4 *to)
{
	to->saddr = key->saddr[0];
	to->daddr = key->daddr[0];
	to->sport = key->sport;
	to->dport = key->dport;
	to->proto = key->proto;
}

static __always_inline void mtn_widen_key(const struct mtn_rd_key4 *key, struct mtn_rd_key6 *to)
{
	to->saddr[0] = key->saddr;
	to->daddr[0] = key->daddr;
	to->sport = key->sport;
	to->dport = key->dport;
	to->proto = key->proto;
}

__noinline int mtn_rd_insert(struct mtn_rd_key6 *key, struct mtn_rd_flow6 *flow, bool ipv6)
{
	struct mtn_rd_flow4 narrow = {};
	struct mtn_rd_key4 key4 = {};

	if (!key || !flow)
		return -1;
	if (ipv6)
		return bpf_map_update_elem(&flows6, key, flow, BPF_NOEXIST);
	mtn_narrow_key(key, &key4);
	narrow.f = flow->f;
	narrow.saddr = flow->saddr[0];
	narrow.daddr = flow->daddr[0];
	return bpf_map_update_elem(&flows4, &key4, &narrow, BPF_NOEXIST);
}

__noinline int mtn_rd_delete(struct mtn_rd_key6 *key, bool ipv6)
{
	struct mtn_rd_key4 key4 = {};

	if (!key)
		return -1;
	if (ipv6)
		return bpf_map_delete_elem(&flows6, key);
	mtn_narrow_key(key, &key4);
	return bpf_map_delete_elem(&flows4, &key4);
}

/* Whether the flow at @key rewrites to the same addresses and ports as @flow. */
__noinline int mtn_rd_same(struct mtn_rd_key6 *key, struct mtn_rd_flow6 *flow, bool ipv6)
{
	struct mtn_rd_key4 key4 = {};
	struct mtn_rd_flow4 *narrow;
	struct mtn_rd_flow6 *wide;

	if (!key || !flow)
		return 0;
	if (ipv6) {
		wide = bpf_map_lookup_elem(&flows6, key);
		return wide && wide->f.sport == flow->f.sport && wide->f.dport == flow->f.dport &&
		       wide->f.rule == flow->f.rule &&
		       !__builtin_memcmp(wide->saddr, flow->saddr, 16) &&
		       !__builtin_memcmp(wide->daddr, flow->daddr, 16);
	}
	mtn_narrow_key(key, &key4);
	narrow = bpf_map_lookup_elem(&flows4, &key4);
	return narrow && narrow->f.sport == flow->f.sport && narrow->f.dport == flow->f.dport &&
	       narrow->f.rule == flow->f.rule && narrow->saddr == flow->saddr[0] &&
	       narrow->daddr == flow->daddr[0];
}

static __always_inline bool mtn_rd_is_idle(const struct mtn_rd_flow *f, __u8 proto, __u64 now)
{
	__u64 limit = proto == IPPROTO_UDP ? idle_udp_ns :
		      f->flags & MTN_RD_CLOSING ? idle_closing_ns : idle_tcp_ns;
	__u32 idle = mtn_rd_ticks(now) - f->touched_ticks;

	/* Another CPU may be a little ahead. */
	return idle > mtn_rd_ticks(limit) && idle < -MTN_RD_AHEAD_TICKS;
}

/*
 * The packets of the other direction are named by what this one's are turned into, and the other way
 * round.
 */
static __always_inline void mtn_rd_mirror(const struct mtn_rd_flow6 *flow, __u8 proto,
					  struct mtn_rd_key6 *back)
{
	__builtin_memcpy(back->saddr, flow->daddr, 16);
	__builtin_memcpy(back->daddr, flow->saddr, 16);
	back->sport = flow->f.dport;
	back->dport = flow->f.sport;
	back->proto = proto;
}

/* Forgets the flow at @key, with its other direction, when it is over. Returns whether it was. */
__noinline int mtn_rd_expire(struct mtn_rd_key6 *key, bool ipv6)
{
	struct mtn_rd_key6 back = {};
	struct mtn_rd_key4 key4 = {};
	struct mtn_rd_flow4 *narrow;
	struct mtn_rd_flow6 *wide;

	if (!key)
		return 0;
	if (ipv6) {
		wide = bpf_map_lookup_elem(&flows6, key);
		if (!wide || !mtn_rd_is_idle(&wide->f, key->proto, bpf_ktime_get_coarse_ns()))
			return 0;
		mtn_rd_mirror(wide, key->proto, &back);
	} else {
		mtn_narrow_key(key, &key4);
		narrow = bpf_map_lookup_elem(&flows4, &key4);
		if (!narrow || !mtn_rd_is_idle(&narrow->f, key->proto, bpf_ktime_get_coarse_ns()))
			return 0;
		back.saddr[0] = narrow->daddr;
		back.daddr[0] = narrow->saddr;
		back.sport = narrow->f.dport;
		back.dport = narrow->f.sport;
		back.proto = key->proto;
	}
	mtn_rd_delete(&back, ipv6);
	mtn_rd_delete(key, ipv6);
	return 1;
}

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
					   const struct mtn_rd_rule *rule, struct mtn_rd_flow6 *flow)
{
	__builtin_memset(flow, 0, sizeof(*flow));
	flow->f.flags = rule->flags;
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

/* Byte 13 of a TCP header. */
#define MTN_TCP_FIN	(1 << 0)
#define MTN_TCP_SYN	(1 << 1)
#define MTN_TCP_RST	(1 << 2)
#define MTN_TCP_ACK	(1 << 4)

/* The flow back of the forward flow @fwd, whose packets have @key. */
static __always_inline void mtn_rd_reverse(const struct mtn_rd_key6 *key,
					   const struct mtn_rd_rule *rule,
					   const struct mtn_rd_flow6 *fwd, struct mtn_rd_flow6 *rev)
{
	*rev = *fwd;
	rev->f.flags |= MTN_RD_REPLY;
	rev->f.mtu = 0;
	rev->f.out_veth = rule->client_veth;
	__builtin_memcpy(rev->f.in_mac, rule->target_mac, ETH_ALEN);
	__builtin_memcpy(rev->saddr, key->daddr, 16);
	__builtin_memcpy(rev->daddr, key->saddr, 16);
	rev->f.sport = key->dport;
	rev->f.dport = key->sport;
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

/* How mtn_rd_new() is called. */
#define MTN_RD_BY_XDP	(1 << 0)
#define MTN_RD_MIDWAY	(1 << 1)	/* TCP, and not the first packet of a connection */

/*
 * Makes the pair of flows that the packets with @key need, when a rule names them. A connection that
 * is under way was not redirected so far, and stays as it is; but one whose other direction is known
 * has only lost this half.
 * Returns 0 when done, -1 when it is no business of this hook, 1 when the packet must be dropped.
 */
__noinline int mtn_rd_new(struct mtn_rd_key6 *key, __u32 ifindex, __u32 how, bool ipv6)
{
	bool xdp = how & MTN_RD_BY_XDP;
	struct mtn_rd_key6 back = {};
	struct mtn_rd_rule *rule;
	struct mtn_rd_pair *pair;
	__u32 zero = 0, hash;
	bool made = false;
	int i, err;

	if (!key)
		return -1;
	rule = mtn_rd_rule_of(key, ifindex, ipv6);
	pair = bpf_map_lookup_elem(&rd_pair, &zero);
	if (!rule || !pair)
		return -1;
	if (xdp && rule->backend != MTN_RD_XDP_REDIRECT &&
	    (rule->backend != MTN_RD_XDP || rule->flags & MTN_RD_SNAT))
		return -1;

	mtn_rd_forward(key, rule, &pair->fwd);
	pair->fwd.f.touched_ticks = mtn_rd_ticks(bpf_ktime_get_coarse_ns());
	mtn_rd_reverse(key, rule, &pair->fwd, &pair->rev);

	__builtin_memcpy(back.saddr, rule->to, 16);
	__builtin_memcpy(back.daddr, pair->fwd.saddr, 16);
	back.sport = rule->to_port;
	back.proto = key->proto;

	/* Always the same first choice, so that a flow that lost one half finds the other again. */
	hash = (key->saddr[0] ^ key->saddr[1] ^ key->saddr[2] ^ key->saddr[3] ^
		((__u32)key->sport << 16 | key->dport)) * 0x9e3779b1;
	hash = (hash ^ hash >> 15) * 0x85ebca6b;
	for (i = 0; i < MTN_RD_TRIES; i++) {
		if (i || rule->flags & MTN_RD_SNAT)
			pair->fwd.f.sport =
				bpf_htons(MTN_RD_PORT_MIN + ((hash >> 16) + i) % MTN_RD_PORTS);
		back.dport = pair->fwd.f.sport;
		mtn_rd_deltas(&back, &pair->rev);
		if (how & MTN_RD_MIDWAY) {
			if (mtn_rd_same(&back, &pair->rev, ipv6))
				break;
			continue;
		}
		err = mtn_rd_insert(&back, &pair->rev, ipv6);
		if (err == -EEXIST && !mtn_rd_same(&back, &pair->rev, ipv6) &&
		    mtn_rd_expire(&back, ipv6))
			err = mtn_rd_insert(&back, &pair->rev, ipv6);
		made = !err;
		if (made || (err == -EEXIST && mtn_rd_same(&back, &pair->rev, ipv6)))
			break;
		if (err != -EEXIST) {
			mtn_rd_count_drop(rule->id, MTN_RD_DROP_MEMORY);
			return 1;
		}
	}
	if (i == MTN_RD_TRIES && how & MTN_RD_MIDWAY)
		return -1;
	if (i == MTN_RD_TRIES) {
		mtn_rd_count_drop(rule->id, MTN_RD_DROP_PORTS);
		return 1;
	}
	mtn_rd_deltas(key, &pair->fwd);
	err = mtn_rd_insert(key, &pair->fwd, ipv6);
	if (!err)
		return 0;
	/* Another CPU may have been faster, with the same outcome or with another port. */
	if (made && !mtn_rd_same(key, &pair->fwd, ipv6))
		mtn_rd_delete(&back, ipv6);
	if (err == -EEXIST)
		return 0;
	mtn_rd_count_drop(rule->id, MTN_RD_DROP_MEMORY);
	return 1;
}

__noinline int mtn_rd_new4(struct mtn_rd_key4 *key, __u32 ifindex, __u32 how)
{
	struct mtn_rd_key6 wide = {};

	if (!key)
		return -1;
	mtn_widen_key(key, &wide);
	return mtn_rd_new(&wide, ifindex, how, false);
}

/*
 * Looks after the other direction: the look-up keeps the LRU from taking it for unused, and a reply's
 * that is gone is put back.
 */
__noinline int mtn_rd_put_back(struct mtn_rd_key6 *key, struct mtn_rd_flow6 *flow, bool ipv6)
{
	struct mtn_rd_key6 back = {};
	struct mtn_rd_rule *rule;
	struct mtn_rd_pair *pair;
	__u32 zero = 0;

	if (!key || !flow || flow->f.flags & MTN_RD_REPLY)
		return 0;
	pair = bpf_map_lookup_elem(&rd_pair, &zero);
	rule = mtn_rd_rule_of(key, flow->f.client_dev, ipv6);
	if (!pair || !rule)
		return 0;
	mtn_rd_reverse(key, rule, flow, &pair->rev);
	mtn_rd_mirror(flow, key->proto, &back);
	mtn_rd_deltas(&back, &pair->rev);
	return mtn_rd_insert(&back, &pair->rev, ipv6);
}

/* What a packet says of its flow. */
static __always_inline void mtn_rd_state(struct mtn_rd_flow *f, const struct mtn_rd_look *look)
{
	f->touched_ticks = mtn_rd_ticks(look->now);
	if (look->tcp_flags & (MTN_TCP_FIN | MTN_TCP_RST))
		f->flags |= MTN_RD_CLOSING;
	else if (look->tcp_flags & MTN_TCP_SYN)
		f->flags &= ~MTN_RD_CLOSING;
}

/*
 * Once a second of a flow's life, and for each FIN, RST and SYN. Returns non-zero when the flow is
 * over, or its other direction somebody else's by now: then it is gone.
 */
__noinline int mtn_rd_touch6(struct mtn_rd_key6 *key, struct mtn_rd_flow6 *flow,
			     struct mtn_rd_look *look)
{
	struct mtn_rd_key6 back = {};
	struct mtn_rd_flow6 *other;

	if (!key || !flow || !look)
		return 0;
	mtn_rd_mirror(flow, key->proto, &back);
	other = bpf_map_lookup_elem(&flows6, &back);
	if (flow->f.flags & MTN_RD_REPLY && mtn_rd_is_idle(&flow->f, key->proto, look->now)) {
		bpf_map_delete_elem(&flows6, &back);
		bpf_map_delete_elem(&flows6, key);
		return 1;
	}
	if (other && (other->f.dport != key->sport || other->f.sport != key->dport ||
		      __builtin_memcmp(other->saddr, key->daddr, 16) ||
		      __builtin_memcmp(other->daddr, key->saddr, 16))) {
		bpf_map_delete_elem(&flows6, key);
		return 1;
	}
	mtn_rd_state(&flow->f, look);
	if (!other)
		mtn_rd_put_back(key, flow, true);
	else
		mtn_rd_state(&other->f, look);
	return 0;
}

__noinline int mtn_rd_touch4(struct mtn_rd_key4 *key, struct mtn_rd_flow4 *flow,
			     struct mtn_rd_look *look)
{
	struct mtn_rd_key4 back = {};
	struct mtn_rd_key6 wide = {};
	struct mtn_rd_flow4 *other;
	struct mtn_rd_pair *pair;
	__u32 zero = 0;

	if (!key || !flow || !look)
		return 0;
	back.saddr = flow->daddr;
	back.daddr = flow->saddr;
	back.sport = flow->f.dport;
	back.dport = flow->f.sport;
	back.proto = key->proto;
	other = bpf_map_lookup_elem(&flows4, &back);
	if (flow->f.flags & MTN_RD_REPLY && mtn_rd_is_idle(&flow->f, key->proto, look->now)) {
		bpf_map_delete_elem(&flows4, &back);
		bpf_map_delete_elem(&flows4, key);
		return 1;
	}
	if (other && (other->f.dport != key->sport || other->f.sport != key->dport ||
		      other->saddr != key->daddr || other->daddr != key->saddr)) {
		bpf_map_delete_elem(&flows4, key);
		return 1;
	}
	mtn_rd_state(&flow->f, look);
	if (other) {
		mtn_rd_state(&other->f, look);
		return 0;
	}
	pair = bpf_map_lookup_elem(&rd_pair, &zero);
	if (!pair)
		return 0;
	mtn_widen_key(key, &wide);
	__builtin_memset(&pair->fwd, 0, sizeof(pair->fwd));
	pair->fwd.f = flow->f;
	pair->fwd.saddr[0] = flow->saddr;
	pair->fwd.daddr[0] = flow->daddr;
	mtn_rd_put_back(&wide, &pair->fwd, false);
	return 0;
}

/* Looks the way out up and keeps it in the flow; 0 when there is one. */
static __always_inline int mtn_rd_fib(void *ctx, struct mtn_rd_flow *f, struct bpf_fib_lookup *fib,
				      const struct mtn_rd_look *look, bool xdp)
{
	bool reply = f->flags & MTN_RD_REPLY;

	fib->l4_protocol = look->proto;
	fib->sport = f->sport;
	fib->dport = f->dport;
	fib->ifindex = reply ? f->target_dev : f->client_dev;
	/* At tcx the kernel looks at the packet's own length, or that of its segments. */
	fib->tot_len = xdp ? look->len : 0;
	if (bpf_fib_lookup(ctx, fib, sizeof(*fib), xdp ? 0 : MTN_FIB_SKIP_NEIGH))
		return -1;
	/* User space has looked at no other device. */
	if (xdp && fib->ifindex != (reply ? f->client_dev : f->target_dev))
		return -1;
	f->oif = fib->ifindex;
	/* No neighbour was asked for, which XDP needs: not for it to keep. */
	if (!xdp && f->backend == MTN_RD_XDP_REDIRECT)
		return 0;
	f->mtu = fib->mtu_result;
	__builtin_memcpy(f->macs, fib->dmac, ETH_ALEN);
	__builtin_memcpy(f->macs + ETH_ALEN, fib->smac, ETH_ALEN);
	f->fib_until_ticks = mtn_rd_ticks(look->now) + mtn_rd_ticks(MTN_RD_FIB_NS);
	return 0;
}

static __always_inline void mtn_rd_fib4(const struct mtn_rd_flow4 *flow,
					const struct mtn_rd_look *look, struct bpf_fib_lookup *fib)
{
	fib->family = AF_INET;
	fib->tos = look->tos;
	fib->ipv4_src = flow->saddr;
	fib->ipv4_dst = flow->daddr;
}

static __always_inline void mtn_rd_fib6(const struct mtn_rd_flow6 *flow, struct bpf_fib_lookup *fib)
{
	fib->family = AF_INET6;
	__builtin_memcpy(fib->ipv6_src, flow->saddr, 16);
	__builtin_memcpy(fib->ipv6_dst, flow->daddr, 16);
}

/* Now and then none, so that the packet goes through the kernel and the neighbour is asked. */
static __always_inline bool mtn_rd_freshen(void)
{
	return bpf_get_prandom_u32() % MTN_RD_FRESHEN == 0;
}

__noinline int mtn_rd_fib4_xdp(struct xdp_md *ctx, struct mtn_rd_flow4 *flow,
			       struct mtn_rd_look *look)
{
	struct bpf_fib_lookup fib = {};

	if (!flow || !look || mtn_rd_freshen())
		return -1;
	mtn_rd_fib4(flow, look, &fib);
	return mtn_rd_fib(ctx, &flow->f, &fib, look, true);
}

__noinline int mtn_rd_fib6_xdp(struct xdp_md *ctx, struct mtn_rd_flow6 *flow,
			       struct mtn_rd_look *look)
{
	struct bpf_fib_lookup fib = {};

	if (!flow || !look || mtn_rd_freshen())
		return -1;
	mtn_rd_fib6(flow, &fib);
	return mtn_rd_fib(ctx, &flow->f, &fib, look, true);
}

__noinline int mtn_rd_fib4_skb(struct __sk_buff *ctx, struct mtn_rd_flow4 *flow,
			       struct mtn_rd_look *look)
{
	struct bpf_fib_lookup fib = {};

	if (!flow || !look)
		return -1;
	mtn_rd_fib4(flow, look, &fib);
	return mtn_rd_fib(ctx, &flow->f, &fib, look, false);
}

__noinline int mtn_rd_fib6_skb(struct __sk_buff *ctx, struct mtn_rd_flow6 *flow,
			       struct mtn_rd_look *look)
{
	struct bpf_fib_lookup fib = {};

	if (!flow || !look)
		return -1;
	mtn_rd_fib6(flow, &fib);
	return mtn_rd_fib(ctx, &flow->f, &fib, look, false);
}

/* A line for the log, while the second's are not used up. */
static __always_inline struct mtn_rd_event *mtn_rd_event(const struct mtn_rd_flow *f,
							 const struct mtn_rd_look *look)
{
	struct mtn_rd_log_limit *limit;
	struct mtn_rd_event *event;
	__u64 second = look->now / 1000000000;
	__u32 rule = f->rule;

	limit = bpf_map_lookup_elem(&log_limits, &rule);
	if (!limit)
		return NULL;
	if (limit->second != second) {
		limit->second = second;
		limit->used = 0;
	}
	if (limit->used >= limit->per_second)
		return NULL;
	limit->used++;
	event = bpf_ringbuf_reserve(&log_events, sizeof(*event), 0);
	if (!event)
		return NULL;
	__builtin_memset(event, 0, sizeof(*event));
	event->new_sport = f->sport;
	event->new_dport = f->dport;
	event->rule = rule;
	event->len = look->len;
	event->proto = look->proto;
	event->reply = f->flags & MTN_RD_REPLY;
	return event;
}

__noinline int mtn_rd_log4(struct mtn_rd_key4 *key, struct mtn_rd_flow4 *flow,
			   struct mtn_rd_look *look)
{
	struct mtn_rd_event *event;

	if (!key || !flow || !look)
		return 0;
	event = mtn_rd_event(&flow->f, look);
	if (!event)
		return 0;
	event->saddr[0] = key->saddr;
	event->daddr[0] = key->daddr;
	event->new_saddr[0] = flow->saddr;
	event->new_daddr[0] = flow->daddr;
	event->sport = key->sport;
	event->dport = key->dport;
	bpf_ringbuf_submit(event, 0);
	return 0;
}

__noinline int mtn_rd_log6(struct mtn_rd_key6 *key, struct mtn_rd_flow6 *flow,
			   struct mtn_rd_look *look)
{
	struct mtn_rd_event *event;

	if (!key || !flow || !look)
		return 0;
	event = mtn_rd_event(&flow->f, look);
	if (!event)
		return 0;
	__builtin_memcpy(event->saddr, key->saddr, 16);
	__builtin_memcpy(event->daddr, key->daddr, 16);
	__builtin_memcpy(event->new_saddr, flow->saddr, 16);
	__builtin_memcpy(event->new_daddr, flow->daddr, 16);
	event->sport = key->sport;
	event->dport = key->dport;
	event->ipv6 = 1;
	bpf_ringbuf_submit(event, 0);
	return 0;
}

/* Ports of a fragment that is not the first; 0 when that one was not seen. */
__noinline __u32 mtn_rd_frag_ports(struct mtn_rd_frag_key *key)
{
	struct mtn_rd_ports *ports;

	if (!key)
		return 0;
	ports = bpf_map_lookup_elem(&rd_frags, key);
	return ports ? (__u32)ports->dport << 16 | ports->sport : 0;
}

__noinline int mtn_rd_frag_remember(struct mtn_rd_frag_key *key, __u32 both)
{
	struct mtn_rd_ports ports = { .sport = both & 0xffff, .dport = both >> 16 };

	if (!key)
		return 0;
	return bpf_map_update_elem(&rd_frags, key, &ports, BPF_ANY);
}

#endif
