/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The tables of flows: look-ups, insertion, age.
 *
 * Established flows live in flows4 and flows6, half-open ones in half4 and half6, each with one entry for
 * each direction. What is done seldom treats both families alike: it uses the wide key and the wide
 * half-open entry, IPv4 in the first word of addresses.
 */
#ifndef MOUNTAIN_REDIRECT_FLOW_H
#define MOUNTAIN_REDIRECT_FLOW_H

#define EEXIST		17
#define E2BIG		7
#define MTN_SECOND	1000000000ULL
/*
 * How long a flow without packets is one, ns; as the kernel's connection tracking has it. A half-open
 * one of TCP ends as a closing one does.
 */
const volatile __u64 idle_udp_ns = 180 * MTN_SECOND;
const volatile __u64 idle_tcp_ns = 5 * 24 * 3600 * MTN_SECOND;
const volatile __u64 idle_closing_ns = 120 * MTN_SECOND;
/* Which sources the programs are of. User space shares maps and programs with these only. */
const volatile __u64 sources = 0;
/* How far the clocks of two CPUs may be apart, 67 s: more than they are, less than a limit's wrapping. */
#define MTN_RD_AHEAD_TICKS	(1U << 16)

/* A time as flows keep it. */
static __always_inline __u32 mtn_rd_ticks(__u64 ns)
{
	return ns >> 20;
}

/* What of a packet matters to its flow. */
struct mtn_rd_look {
	__u64 now;	/* ns, the coarse clock */
	__u32 len;	/* network layer */
	__u32 seq;	/* of TCP, host byte order */
	__u32 ack;
	__u32 oif;	/* the device it goes out by, once that is known */
	__u8 ttl;
	__u8 tos;
	__u8 proto;
	__u8 tcp_flags;
	bool fragment;
	bool options;	/* of IPv4, or those of IPv6 for every hop */
	__u16 headers;	/* of network and transport, 0 for a later fragment */
};

/* Byte 13 of a TCP header. */
#define MTN_TCP_FIN	(1 << 0)
#define MTN_TCP_SYN	(1 << 1)
#define MTN_TCP_RST	(1 << 2)
#define MTN_TCP_ACK	(1 << 4)

/* Room for entries: too much for the stack. */
struct mtn_rd_pair {
	struct mtn_rd_half6 fwd;
	struct mtn_rd_half6 rev;
	struct mtn_rd_half6 found;
	struct mtn_rd_half6 aged;
	struct mtn_rd_half4 narrow;
	struct mtn_rd_key6 back;	/* of mtn_rd_forget() and mtn_rd_put_back() */
	__u32 oldest_age;		/* of the flow that nobody has proven and that has the port */
	__u16 oldest;			/* network order, 0: there is none */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct mtn_rd_pair);
} rd_pair SEC(".maps");

static __always_inline struct mtn_rd_pair *mtn_rd_room(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&rd_pair, &zero);
}

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

/* The flow at @key, established or half-open. */
static __always_inline struct mtn_rd_flow4 *mtn_rd_find4(const struct mtn_rd_key4 *key)
{
	struct mtn_rd_flow4 *flow = bpf_map_lookup_elem(&flows4, key);

	return flow ? flow : bpf_map_lookup_elem(&half4, key);
}

static __always_inline struct mtn_rd_flow6 *mtn_rd_find6(const struct mtn_rd_key6 *key)
{
	struct mtn_rd_flow6 *flow = bpf_map_lookup_elem(&flows6, key);

	return flow ? flow : bpf_map_lookup_elem(&half6, key);
}

/* The same without its addresses, for either family. */
static __always_inline struct mtn_rd_flow *mtn_rd_find(const struct mtn_rd_key6 *key, bool ipv6)
{
	struct mtn_rd_key4 key4 = {};

	if (ipv6)
		return (struct mtn_rd_flow *)mtn_rd_find6(key);
	mtn_narrow_key(key, &key4);
	return (struct mtn_rd_flow *)mtn_rd_find4(&key4);
}

/* Copies the flow at @key. Returns whether there is one. */
__noinline int mtn_rd_get(struct mtn_rd_key6 *key, struct mtn_rd_half6 *to, bool ipv6)
{
	struct mtn_rd_key4 key4 = {};
	struct mtn_rd_half4 *narrow;
	struct mtn_rd_flow4 *flow4;
	struct mtn_rd_flow6 *flow6;
	struct mtn_rd_half6 *wide;

	if (!key || !to)
		return 0;
	__builtin_memset(to, 0, sizeof(*to));
	if (ipv6) {
		flow6 = bpf_map_lookup_elem(&flows6, key);
		if (flow6) {
			to->flow = *flow6;
			return 1;
		}
		wide = bpf_map_lookup_elem(&half6, key);
		if (!wide)
			return 0;
		*to = *wide;
		return 1;
	}
	mtn_narrow_key(key, &key4);
	flow4 = bpf_map_lookup_elem(&flows4, &key4);
	if (!flow4) {
		narrow = bpf_map_lookup_elem(&half4, &key4);
		if (!narrow)
			return 0;
		to->ack = narrow->ack;
		to->ack_all = narrow->ack_all;
		to->state = narrow->state;
		flow4 = &narrow->flow;
	}
	to->flow.f = flow4->f;
	to->flow.saddr[0] = flow4->saddr;
	to->flow.daddr[0] = flow4->daddr;
	return 1;
}

/* Enters a flow into the table that its flag MTN_RD_HALF tells, where it is not in there yet. */
__noinline int mtn_rd_insert(struct mtn_rd_key6 *key, struct mtn_rd_half6 *entry, bool ipv6)
{
	struct mtn_rd_pair *room = mtn_rd_room();
	struct mtn_rd_key4 key4 = {};
	struct mtn_rd_half4 *narrow;
	bool half;

	if (!key || !entry || !room)
		return -1;
	half = entry->flow.f.flags & MTN_RD_HALF;
	if (ipv6)
		return half ? bpf_map_update_elem(&half6, key, entry, BPF_NOEXIST) :
			      bpf_map_update_elem(&flows6, key, &entry->flow, BPF_NOEXIST);
	mtn_narrow_key(key, &key4);
	narrow = &room->narrow;
	narrow->flow.f = entry->flow.f;
	narrow->flow.saddr = entry->flow.saddr[0];
	narrow->flow.daddr = entry->flow.daddr[0];
	narrow->ack = entry->ack;
	narrow->ack_all = entry->ack_all;
	narrow->state = entry->state;
	return half ? bpf_map_update_elem(&half4, &key4, narrow, BPF_NOEXIST) :
		      bpf_map_update_elem(&flows4, &key4, &narrow->flow, BPF_NOEXIST);
}

__noinline int mtn_rd_delete(struct mtn_rd_key6 *key, bool half, bool ipv6)
{
	struct mtn_rd_key4 key4 = {};

	if (!key)
		return -1;
	if (ipv6)
		return half ? bpf_map_delete_elem(&half6, key) : bpf_map_delete_elem(&flows6, key);
	mtn_narrow_key(key, &key4);
	return half ? bpf_map_delete_elem(&half4, &key4) : bpf_map_delete_elem(&flows4, &key4);
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

/* Deletes the flow at @key, and the direction that its packets are turned into those of. */
__noinline int mtn_rd_forget(struct mtn_rd_key6 *key, struct mtn_rd_half6 *entry, bool ipv6)
{
	struct mtn_rd_pair *room = mtn_rd_room();

	if (!key || !entry || !room)
		return -1;
	mtn_rd_mirror(&entry->flow, key->proto, &room->back);
	mtn_rd_delete(&room->back, false, ipv6);
	mtn_rd_delete(&room->back, true, ipv6);
	mtn_rd_delete(key, false, ipv6);
	mtn_rd_delete(key, true, ipv6);
	return 0;
}

/* Whether two flows rewrite to the same addresses and ports, by the same rule. */
static __always_inline bool mtn_rd_same(const struct mtn_rd_flow6 *a, const struct mtn_rd_flow6 *b)
{
	return a->f.sport == b->f.sport && a->f.dport == b->f.dport && a->f.rule == b->f.rule &&
	       !__builtin_memcmp(a->saddr, b->saddr, 16) && !__builtin_memcmp(a->daddr, b->daddr, 16);
}

static __always_inline bool mtn_rd_is_idle(const struct mtn_rd_flow *f, __u8 proto, __u64 now)
{
	const __u8 brief = MTN_RD_CLOSING | MTN_RD_RESET | MTN_RD_HALF;
	__u64 limit = proto == IPPROTO_UDP ? idle_udp_ns :
		      f->flags & brief ? idle_closing_ns : idle_tcp_ns;
	__u32 idle = mtn_rd_ticks(now) - f->touched_ticks;

	/* Another CPU may be a little ahead. */
	return idle > mtn_rd_ticks(limit) && idle < -MTN_RD_AHEAD_TICKS;
}

/* Forgets the flow at @key, with its other direction, when it is over. Returns whether it was. */
__noinline int mtn_rd_expire(struct mtn_rd_key6 *key, bool ipv6)
{
	struct mtn_rd_pair *room = mtn_rd_room();

	if (!key || !room || !mtn_rd_get(key, &room->aged, ipv6) ||
	    !mtn_rd_is_idle(&room->aged.flow.f, key->proto, bpf_ktime_get_coarse_ns()))
		return 0;
	mtn_rd_forget(key, &room->aged, ipv6);
	return 1;
}

/* Whether @key names packets of an established flow. */
static __always_inline bool mtn_rd_is_established(const struct mtn_rd_key6 *key, bool ipv6)
{
	struct mtn_rd_key4 key4 = {};

	if (ipv6)
		return bpf_map_lookup_elem(&flows6, key);
	mtn_narrow_key(key, &key4);
	return bpf_map_lookup_elem(&flows4, &key4);
}

/* Looks at up to @count established flows, in turn, and forgets those that are over. */
__noinline int mtn_rd_age(__u32 count)
{
	struct mtn_rd_age age = {};
	__u32 i;

	for (i = 0; i < MTN_RD_AGE_MAX; i++) {
		if (i >= count || bpf_map_pop_elem(&rd_ages, &age))
			break;
		if (mtn_rd_is_established(&age.key, age.ipv6) && !mtn_rd_expire(&age.key, age.ipv6))
			bpf_map_push_elem(&rd_ages, &age, 0);
	}
	return 0;
}

#endif
