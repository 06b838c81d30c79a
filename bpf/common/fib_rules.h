/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * ip rules that look up another table than a group's. What they select was not routed by the
 * group's route, so it is left alone. Compared as net/core/fib_rules.c compares them.
 */
#ifndef MOUNTAIN_FIB_RULES_H
#define MOUNTAIN_FIB_RULES_H

#define LOOPBACK_IFINDEX	1
/* In the place of a DS field that is not known. */
#define MTN_DSFIELD_UNKNOWN	0x100

struct mtn_fib_rule fib_rules[MTN_MAX_FIB_RULES];

static __always_inline bool mtn_in_range(__u16 port_be, __u16 first, __u16 last)
{
	__u16 port = bpf_ntohs(port_be);

	return port >= first && port <= last;
}

static __always_inline bool mtn_in_prefix(const __u32 *addr, const __u32 *net, const __u32 *mask)
{
	return !(((addr[0] ^ net[0]) & mask[0]) | ((addr[1] ^ net[1]) & mask[1]) |
		 ((addr[2] ^ net[2]) & mask[2]) | ((addr[3] ^ net[3]) & mask[3]));
}

static __always_inline bool mtn_asks_ports(const struct mtn_fib_rule *s)
{
	return s->sport_first || s->sport_last != 0xffff || s->dport_first ||
	       s->dport_last != 0xffff;
}

/* What rules ask for besides a packet's addresses and ports. */
struct mtn_selected_by {
	__u32 mark;
	__u32 iif;
	__u32 uid;
	__u32 dsfield;	/* or MTN_DSFIELD_UNKNOWN */
};

/*
 * Does the @i-th rule select this packet, or may it, as far as is known of it? A function of its own to the verifier,
 * which would else follow each way through it in each round of the loop.
 */
__noinline int mtn_rule_selects(__u32 i, struct mtn_flow_key *key, struct mtn_selected_by *by)
{
	struct mtn_fib_rule *s;
	bool match, port_unknown, dsfield_unknown;

	if (!key || !by || i >= MTN_MAX_FIB_RULES)
		return 0;
	s = &fib_rules[i];
	if (s->ipv6 != key->ipv6)
		return 0;
	/*
	 * Where a packet has no ports, the kernel compares what stands in their place for some senders and nothing for
	 * others: an ICMP type, the key of a tunnel (union flowi_uli, include/net/flow.h).
	 */
	if (!mtn_has_ports(key->proto) && mtn_asks_ports(s) &&
	    (!s->ipproto || s->ipproto == key->proto))
		return 1;
	/* Of a socket that is not bound yet. */
	port_unknown = s->auto_sport && !key->sport;
	dsfield_unknown = s->tos_mask && by->dsfield == MTN_DSFIELD_UNKNOWN;
	match = (by->mark & s->mark_mask) == s->mark &&
		mtn_in_prefix(key->saddr, s->src, s->src_mask) &&
		mtn_in_prefix(key->daddr, s->dst, s->dst_mask) &&
		(!s->iif || s->iif == by->iif) &&
		by->uid >= s->uid_first && by->uid <= s->uid_last &&
		(!s->ipproto || s->ipproto == key->proto) &&
		(port_unknown || mtn_in_range(key->sport, s->sport_first, s->sport_last)) &&
		mtn_in_range(key->dport, s->dport_first, s->dport_last) &&
		(dsfield_unknown || (by->dsfield & s->tos_mask) == s->tos);
	if (match && (port_unknown || dsfield_unknown))
		return 1;
	return match != !!s->invert;
}

/* Did an ip rule that looks up another table select this packet, which came in by @iif? */
__noinline int mtn_selected_elsewhere(struct mtn_flow_key *key, __u32 mark, __u32 iif, __u32 uid,
				      __u32 dsfield)
{
	struct mtn_selected_by by = { .mark = mark, .iif = iif, .uid = uid, .dsfield = dsfield };
	__u32 i;

	if (!key)
		return 0;
	for (i = 0; i < MTN_MAX_FIB_RULES && i < config.n_fib_rules; i++) {
		if (mtn_rule_selects(i, key, &by))
			return 1;
	}
	return 0;
}

#endif
