/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * ICMP errors about redirected flows, at tcx: each side is told of its own addresses.
 *
 * An error quotes the packet it is about. One that comes from the client's side is about a reply
 * (from -> client) and must reach the target, with (to -> client) inside. One on its way to the
 * client is about (client -> to), and must say (client -> from). Either way the flow with the
 * quoted addresses the other way round tells what to write: the quoted source becomes that flow's
 * destination, and the quoted destination its source.
 *
 * With MTN_RD_SNAT the target's side knows this host in the client's place, and its errors are sent to this
 * host. They are translated where they come in, as the client's are, and the kernel routes them. They are from
 * where they were: the kernel drops what comes in from an address of its own.
 *
 * Rare packets, so the helpers that keep checksums are good enough. Those of the quoted packet's own
 * transport are left alone: nobody looks at them, and often they are cut off.
 */
#ifndef MOUNTAIN_REDIRECT_ICMP_H
#define MOUNTAIN_REDIRECT_ICMP_H

/* RFC 792; <linux/icmp.h> of user space drags the C library in. */
#define ICMP_DEST_UNREACH	3
#define ICMP_TIME_EXCEEDED	11
#define ICMP_PARAMETERPROB	12
#define MTN_ICMP_HDR		8

/* Replaces @len bytes at @off by @to, in the sum at @check too. */
static __always_inline void mtn_icmp_put(struct __sk_buff *skb, __u32 off, __u32 check, void *old,
					 void *new, __u32 len)
{
	__s64 diff = bpf_csum_diff(old, len, new, len, 0);

	bpf_l4_csum_replace(skb, check, 0, diff, 0);
	bpf_skb_store_bytes(skb, off, new, len, 0);
}

/* Whether errors about packets that @f names the other way round are translated here. */
static __always_inline bool mtn_rd_icmp_is_here(const struct mtn_rd_flow *f, __u32 device, bool out)
{
	bool reply = f->flags & MTN_RD_REPLY;

	if (f->flags & MTN_RD_SNAT)
		return !out && device == (reply ? f->target_dev : f->client_dev);
	return reply == out && device == f->client_dev;
}

__noinline int mtn_rd_icmp4_skb(struct __sk_buff *skb, bool out)
{
	struct mtn_rd_key4 key = {};
	struct mtn_rd_ports ports;
	struct mtn_rd_flow4 *flow;
	struct iphdr ip, quoted;
	__u32 icmp, inner, l4;
	__u32 old, new, leaves = out;
	__u8 type;

	/* For the verifier, which knows nothing of an argument but follows comparisons. */
	barrier_var(leaves);
	if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)) || ip.ihl < 5 ||
	    ip.frag_off & bpf_htons(IP_MF | IP_OFFSET))
		return 0;
	icmp = ETH_HLEN + ip.ihl * 4;
	inner = icmp + MTN_ICMP_HDR;
	if (bpf_skb_load_bytes(skb, icmp, &type, 1) ||
	    (type != ICMP_DEST_UNREACH && type != ICMP_TIME_EXCEEDED && type != ICMP_PARAMETERPROB))
		return 0;
	if (bpf_skb_load_bytes(skb, inner, &quoted, sizeof(quoted)) || quoted.version != 4 ||
	    quoted.ihl < 5 || quoted.frag_off & bpf_htons(IP_OFFSET))
		return 0;
	l4 = inner + quoted.ihl * 4;
	if (bpf_skb_load_bytes(skb, l4, &ports, sizeof(ports)))
		return 0;
	key.saddr = quoted.daddr;
	key.daddr = quoted.saddr;
	key.sport = ports.dport;
	key.dport = ports.sport;
	key.proto = quoted.protocol;
	flow = mtn_rd_find4(&key);
	if (!flow || !mtn_rd_icmp_is_here(&flow->f, skb->ifindex, leaves))
		return 0;

	/* In the quoted header addresses and checksum make up for each other. */
	new = flow->daddr;
	bpf_l3_csum_replace(skb, inner + offsetof(struct iphdr, check), quoted.saddr, new, sizeof(new));
	bpf_skb_store_bytes(skb, inner + offsetof(struct iphdr, saddr), &new, sizeof(new), 0);
	new = flow->saddr;
	bpf_l3_csum_replace(skb, inner + offsetof(struct iphdr, check), quoted.daddr, new, sizeof(new));
	bpf_skb_store_bytes(skb, inner + offsetof(struct iphdr, daddr), &new, sizeof(new), 0);
	/* Both: the source port may be another one, too. */
	ports.sport = flow->f.dport;
	ports.dport = flow->f.sport;
	{
		struct mtn_rd_ports before = { .sport = key.dport, .dport = key.sport };

		mtn_icmp_put(skb, l4, icmp + 2, &before, &ports, sizeof(ports));
	}
	/* The error's own address too, if it is an end of the flow. */
	old = leaves ? quoted.daddr : quoted.saddr;
	new = leaves ? flow->saddr : flow->daddr;
	if (leaves ? ip.saddr != old : ip.daddr != old)
		return 1;
	bpf_l3_csum_replace(skb, ETH_HLEN + offsetof(struct iphdr, check), old, new, sizeof(new));
	bpf_skb_store_bytes(skb, ETH_HLEN + (leaves ? offsetof(struct iphdr, saddr) :
					     offsetof(struct iphdr, daddr)), &new, sizeof(new), 0);
	return 1;
}

/* As mtn_rd_icmp4_skb(); ICMPv6 sums the addresses as well, and there is no other checksum. */
__noinline int mtn_rd_icmp6_skb(struct __sk_buff *skb, bool out)
{
	const __u32 icmp = ETH_HLEN + sizeof(struct ipv6hdr);
	const __u32 inner = icmp + MTN_ICMP_HDR, l4 = inner + sizeof(struct ipv6hdr);
	struct mtn_rd_ports ports, before;
	struct mtn_rd_key6 key = {};
	struct mtn_rd_flow6 *flow;
	__u32 old[4], new[4], outer[4];
	__u32 leaves = out;
	__u8 type, proto;

	barrier_var(leaves);
	/* RFC 4443: errors are the types below 128. */
	if (bpf_skb_load_bytes(skb, icmp, &type, 1) || type >= 128)
		return 0;
	if (bpf_skb_load_bytes(skb, inner + offsetof(struct ipv6hdr, nexthdr), &proto, 1) ||
	    bpf_skb_load_bytes(skb, inner + offsetof(struct ipv6hdr, saddr), key.daddr, 16) ||
	    bpf_skb_load_bytes(skb, inner + offsetof(struct ipv6hdr, daddr), key.saddr, 16) ||
	    bpf_skb_load_bytes(skb, l4, &ports, sizeof(ports)))
		return 0;
	before = ports;
	key.sport = ports.dport;
	key.dport = ports.sport;
	key.proto = proto;
	flow = mtn_rd_find6(&key);
	if (!flow || !mtn_rd_icmp_is_here(&flow->f, skb->ifindex, leaves))
		return 0;

	/* Both: the source port may be another one, too. */
	ports.sport = flow->f.dport;
	ports.dport = flow->f.sport;
	mtn_icmp_put(skb, l4, icmp + 2, &before, &ports, sizeof(ports));
	__builtin_memcpy(new, flow->daddr, 16);
	mtn_icmp_put(skb, inner + offsetof(struct ipv6hdr, saddr), icmp + 2, key.daddr, new, 16);
	__builtin_memcpy(new, flow->saddr, 16);
	mtn_icmp_put(skb, inner + offsetof(struct ipv6hdr, daddr), icmp + 2, key.saddr, new, 16);
	__builtin_memcpy(old, leaves ? key.saddr : key.daddr, 16);
	__builtin_memcpy(new, leaves ? flow->saddr : flow->daddr, 16);
	if (bpf_skb_load_bytes(skb, ETH_HLEN + (leaves ? offsetof(struct ipv6hdr, saddr) :
						offsetof(struct ipv6hdr, daddr)), outer, 16) ||
	    __builtin_memcmp(outer, old, 16))
		return 1;
	mtn_icmp_put(skb, ETH_HLEN + (leaves ? offsetof(struct ipv6hdr, saddr) :
				      offsetof(struct ipv6hdr, daddr)), icmp + 2, old, new, 16);
	return 1;
}

#endif
