// SPDX-License-Identifier: GPL-2.0-only
/*
 * What happens to a packet.
 *
 * PRE_ROUTING, before connection tracking: a packet to a rule's `from` gets its `to` as the
 * destination, and everything after that, routing, filters, connection tracking, sees a packet to
 * `to`. POST_ROUTING, last of all: a packet from a rule's `to` gets `from` as its source, so that a
 * client sees replies come from where it sent to. There is no state between the two: what leaves
 * from `to` counts as a reply.
 *
 * Fragments are put together first, by nf_defrag, which is enabled with the hooks: those beyond the
 * first have no ports.
 *
 * The loopback device is left alone: this host's own sockets are not redirected, as a packet with a
 * local source cannot be routed again after PRE_ROUTING (it would be a martian).
 */
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/netfilter_ipv4.h>
#include <linux/netfilter_ipv6.h>
#include <linux/skbuff.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <net/checksum.h>
#include <net/dst.h>
#include <net/ip.h>
#include <net/ipv6.h>
#include <net/netfilter/ipv4/nf_defrag_ipv4.h>
#include <net/netfilter/ipv6/nf_defrag_ipv6.h>

#include "redirect.h"

#define CREATE_TRACE_POINTS
#include "trace.h"

/* After the table `raw`, before connection tracking. */
#define MTN_PRIORITY_PRE	(NF_IP_PRI_CONNTRACK - 1)
#define MTN_PRIORITY_POST	NF_IP_PRI_LAST

static unsigned int mtn_header_size(u8 proto)
{
	return proto == IPPROTO_TCP ? sizeof(struct tcphdr) : sizeof(struct udphdr);
}

/*
 * The end of @skb that rules go by, its destination forwards and its source in replies, and where
 * its transport header begins. False: it is nothing for us.
 */
static bool mtn_parse(const struct sk_buff *skb, u8 family, enum mtn_direction direction,
		      struct mtn_end *end, unsigned int *offset)
{
	const __be16 *ports;
	__be16 buffer[2];
	int proto;

	memset(end, 0, sizeof(*end));
	if (family == NFPROTO_IPV4) {
		const struct iphdr *ip = ip_hdr(skb);

		if (ip_is_fragment(ip))
			return false;
		*offset = skb_network_offset(skb) + ip_hdrlen(skb);
		proto = ip->protocol;
		end->addr.ip = direction == MTN_FORWARD ? ip->daddr : ip->saddr;
	} else {
		const struct ipv6hdr *ip6 = ipv6_hdr(skb);
		unsigned short fragment = 0;

		*offset = 0;
		proto = ipv6_find_hdr(skb, offset, -1, &fragment, NULL);
		if (proto < 0 || fragment)
			return false;
		end->addr.in6 = direction == MTN_FORWARD ? ip6->daddr : ip6->saddr;
	}
	if (proto != IPPROTO_UDP && proto != IPPROTO_TCP)
		return false;
	/* Cut short: whoever it is for will drop it. */
	if (skb->len < *offset + mtn_header_size(proto))
		return false;
	ports = skb_header_pointer(skb, *offset, sizeof(buffer), buffer);
	if (!ports)
		return false;
	end->port = ports[direction == MTN_FORWARD];
	end->proto = proto;
	end->family = family;
	return true;
}

static struct mtn_rule *mtn_find(struct mtn_net *mn, enum mtn_direction direction,
				 struct mtn_end *end, int ifindex)
{
	if (READ_ONCE(mn->rules_of_devices)) {
		struct mtn_rule *rule;

		end->ifindex = ifindex;
		rule = direction == MTN_FORWARD ?
			rhashtable_lookup(&mn->by_from, end, mtn_by_from_params) :
			rhashtable_lookup(&mn->by_to, end, mtn_by_to_params);
		if (rule)
			return rule;
		end->ifindex = 0;
	}
	return direction == MTN_FORWARD ?
		rhashtable_lookup(&mn->by_from, end, mtn_by_from_params) :
		rhashtable_lookup(&mn->by_to, end, mtn_by_to_params);
}

/* Makes @to of the end @from. The packet is writable up to the end of its transport header. */
static void mtn_rewrite(struct sk_buff *skb, enum mtn_direction direction,
			const struct mtn_end *from, const struct mtn_end *to, unsigned int offset)
{
	void *transport = skb->data + offset;
	u8 ip_summed = skb->ip_summed;
	__sum16 *check;
	__be16 *port;
	bool summed;

	/* That of a packet inside of this one, whose own sum is there or not wanted: left alone. */
	if (ip_summed == CHECKSUM_PARTIAL && skb_checksum_start(skb) != transport)
		skb->ip_summed = CHECKSUM_NONE;

	if (from->proto == IPPROTO_TCP) {
		struct tcphdr *tcp = transport;

		port = direction == MTN_FORWARD ? &tcp->dest : &tcp->source;
		check = &tcp->check;
		summed = true;
	} else {
		struct udphdr *udp = transport;

		port = direction == MTN_FORWARD ? &udp->dest : &udp->source;
		check = &udp->check;
		/* 0: the sender has not made one, and it stays so. */
		summed = *check || skb->ip_summed == CHECKSUM_PARTIAL;
	}

	/*
	 * These know CHECKSUM_PARTIAL (the field has the sum of the pseudo-header, which has the
	 * addresses but not the ports) and CHECKSUM_COMPLETE (skb->csum covers the addresses).
	 */
	if (summed) {
		if (from->family == NFPROTO_IPV4)
			inet_proto_csum_replace4(check, skb, from->addr.ip, to->addr.ip, true);
		else
			inet_proto_csum_replace16(check, skb, from->addr.ip6, to->addr.ip6, true);
		inet_proto_csum_replace2(check, skb, from->port, to->port, false);
		if (from->proto == IPPROTO_UDP && !*check)
			*check = CSUM_MANGLED_0;
	} else if (skb->ip_summed == CHECKSUM_COMPLETE) {
		/* Nothing in the packet makes up for the change, and nobody will ask. */
		skb->ip_summed = CHECKSUM_NONE;
	}
	if (ip_summed == CHECKSUM_PARTIAL)
		skb->ip_summed = ip_summed;
	*port = to->port;

	if (from->family == NFPROTO_IPV4) {
		struct iphdr *ip = ip_hdr(skb);

		csum_replace4(&ip->check, from->addr.ip, to->addr.ip);
		if (direction == MTN_FORWARD)
			ip->daddr = to->addr.ip;
		else
			ip->saddr = to->addr.ip;
	} else {
		struct ipv6hdr *ip6 = ipv6_hdr(skb);

		if (direction == MTN_FORWARD)
			ip6->daddr = to->addr.in6;
		else
			ip6->saddr = to->addr.in6;
	}
}

static unsigned int mtn_hook(struct sk_buff *skb, const struct nf_hook_state *state,
			     enum mtn_direction direction)
{
	const struct net_device *dev = direction == MTN_FORWARD ? state->in : state->out;
	const struct mtn_end *from, *to;
	struct mtn_rule *rule;
	unsigned int offset;
	struct mtn_end end;

	if (dev->flags & IFF_LOOPBACK)
		return NF_ACCEPT;
	if (!mtn_parse(skb, state->pf, direction, &end, &offset))
		return NF_ACCEPT;
	rule = mtn_find(mtn_net(state->net), direction, &end, dev->ifindex);
	if (!rule)
		return NF_ACCEPT;

	/* It may be shared with a sniffer, or in pages. This may move it. */
	if (skb_ensure_writable(skb, offset + mtn_header_size(end.proto))) {
		/* Where it was sent to it has no business. */
		this_cpu_inc(rule->counters->no_memory);
		trace_mtn_redirect_packet(skb, rule, direction, dev->ifindex, -ENOMEM);
		return NF_DROP;
	}
	from = direction == MTN_FORWARD ? &rule->from : &rule->to;
	to = direction == MTN_FORWARD ? &rule->to : &rule->from;
	mtn_rewrite(skb, direction, from, to, offset);
	/* It may have been routed before it came here: over a tunnel, by a program. */
	if (direction == MTN_FORWARD)
		skb_dst_drop(skb);

	this_cpu_inc(rule->counters->packets[direction]);
	this_cpu_add(rule->counters->bytes[direction], skb->len);
	trace_mtn_redirect_packet(skb, rule, direction, dev->ifindex, 0);
	return NF_ACCEPT;
}

static unsigned int mtn_forward(void *priv, struct sk_buff *skb, const struct nf_hook_state *state)
{
	return mtn_hook(skb, state, MTN_FORWARD);
}

static unsigned int mtn_reply(void *priv, struct sk_buff *skb, const struct nf_hook_state *state)
{
	return mtn_hook(skb, state, MTN_REPLY);
}

static const struct nf_hook_ops mtn_hooks_ipv4[] = {
	{
		.hook = mtn_forward,
		.pf = NFPROTO_IPV4,
		.hooknum = NF_INET_PRE_ROUTING,
		.priority = MTN_PRIORITY_PRE,
	},
	{
		.hook = mtn_reply,
		.pf = NFPROTO_IPV4,
		.hooknum = NF_INET_POST_ROUTING,
		.priority = MTN_PRIORITY_POST,
	},
};

static const struct nf_hook_ops mtn_hooks_ipv6[] = {
	{
		.hook = mtn_forward,
		.pf = NFPROTO_IPV6,
		.hooknum = NF_INET_PRE_ROUTING,
		.priority = MTN_PRIORITY_PRE,
	},
	{
		.hook = mtn_reply,
		.pf = NFPROTO_IPV6,
		.hooknum = NF_INET_POST_ROUTING,
		.priority = MTN_PRIORITY_POST,
	},
};

/* A namespace without rules of a family has no hooks: they would cost its packets time. */
int mtn_hooks_register(struct net *net, u8 family)
{
	int err;

	if (family == NFPROTO_IPV4) {
		err = nf_defrag_ipv4_enable(net);
		if (err)
			return err;
		err = nf_register_net_hooks(net, mtn_hooks_ipv4, ARRAY_SIZE(mtn_hooks_ipv4));
		if (err)
			nf_defrag_ipv4_disable(net);
	} else {
		err = nf_defrag_ipv6_enable(net);
		if (err)
			return err;
		err = nf_register_net_hooks(net, mtn_hooks_ipv6, ARRAY_SIZE(mtn_hooks_ipv6));
		if (err)
			nf_defrag_ipv6_disable(net);
	}
	return err;
}

/* Packets may be in the hooks for an RCU grace period more. */
void mtn_hooks_unregister(struct net *net, u8 family)
{
	if (family == NFPROTO_IPV4) {
		nf_unregister_net_hooks(net, mtn_hooks_ipv4, ARRAY_SIZE(mtn_hooks_ipv4));
		nf_defrag_ipv4_disable(net);
	} else {
		nf_unregister_net_hooks(net, mtn_hooks_ipv6, ARRAY_SIZE(mtn_hooks_ipv6));
		nf_defrag_ipv6_disable(net);
	}
}
