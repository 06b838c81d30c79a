/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * ip rules that look up another table than a group's. What they select was not routed by the
 * group's route, so it is left alone. Compared as net/core/fib_rules.c compares them.
 */
#ifndef MOUNTAIN_SELECTORS_H
#define MOUNTAIN_SELECTORS_H

#define LOOPBACK_IFINDEX	1
#define DSCP_MASK		0xfc	/* of the DS field; the rest is ECN's */

struct mtn_selector selectors[MTN_MAX_SELECTORS];

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

/* Did an ip rule that looks up another table select this packet? */
__noinline int mtn_selected_elsewhere(struct __sk_buff *skb, struct mtn_pkt *pkt)
{
	/* To ip rules, what the host itself sends came in by lo. */
	__u32 iif = skb->ingress_ifindex ? skb->ingress_ifindex : LOOPBACK_IFINDEX;
	__u32 uid = bpf_get_socket_uid(skb);
	__u32 i;

	if (!pkt)
		return 0;
	bpf_for(i, 0, config.n_selectors) {
		struct mtn_selector *s;
		bool match;

		if (i >= MTN_MAX_SELECTORS)
			break;
		s = &selectors[i];
		if (s->ipv6 != pkt->key.ipv6)
			continue;
		match = (skb->mark & s->mark_mask) == s->mark &&
			mtn_in_prefix(pkt->key.saddr, s->src, s->src_mask) &&
			mtn_in_prefix(pkt->key.daddr, s->dst, s->dst_mask) &&
			(!s->iif || s->iif == iif) &&
			uid >= s->uid_first && uid <= s->uid_last &&
			(!s->ipproto || s->ipproto == pkt->key.proto) &&
			mtn_in_range(pkt->key.sport, s->sport_first, s->sport_last) &&
			mtn_in_range(pkt->key.dport, s->dport_first, s->dport_last) &&
			(!s->tos || !((s->tos ^ pkt->dsfield) & DSCP_MASK));
		if (match != !!s->invert)
			return 1;
	}
	return 0;
}

#endif
