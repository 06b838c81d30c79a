/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Whose packet is it? Only what this host's own routing sent to this device may be moved.
 *
 * Guests put frames on our device as well: macvlan, macvtap and ipvlan devices, bridge ports,
 * AF_PACKET sockets. Many of them live in other network namespaces, so no list of devices shows
 * them, and their frames may well bear the gateway's address. The packet itself tells:
 *
 *   - The kernel's routing leaves the route that it chose (the dst) with the packet, and tcx egress
 *     runs before it is released. A packet without one, or with one that leads to another device
 *     (the guest's own), was not routed to this device.
 *   - A socket of another network namespace, or one of family AF_PACKET, is a guest's.
 *   - An ipvlan guest in mode L3 is routed by the host, with a dst that leads here. Its packets have
 *     the guest's socket or, when the guest forwards, neither a socket nor a device that they
 *     came in by. The latter stay on devices that hand their packets to somebody (rx_handler).
 *   - Another source address than the device's own says that a bridge or a guest made the header.
 *   - What names its next hop itself has a route without a gateway (FLOWI_FLAG_KNOWN_NH of the kernel): copies by
 *     `dup to` of nftables and TEE, IPVS, a raw socket that sends to another destination than its header has.
 *
 * Where this kernel lacks one of the members that are read here, every packet counts as foreign.
 */
#ifndef MOUNTAIN_ORIGIN_H
#define MOUNTAIN_ORIGIN_H

#include "../common/egress_programs.h"

#define AF_PACKET	17
/* include/linux/skbuff.h: what is left of _skb_refdst without its flag is the dst. */
#define SKB_DST_NOREF	1UL
/* include/uapi/linux/route.h */
#define RTF_GATEWAY	0x0002

/* The members that are read; their places are found at load (CO-RE). */
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct net;

typedef struct {
	struct net *net;
} possible_net_t;

struct net_device {
	int ifindex;
	const unsigned char *dev_addr;
	void *rx_handler;
	possible_net_t nd_net;
};

struct dst_entry {
	struct net_device *dev;
};

/* Routes of IPv4 and IPv6. Both begin with their dst. */
struct rtable {
	__u8 rt_uses_gateway;
};

struct rt6_info {
	__u32 rt6i_flags;
};

struct sock_common {
	unsigned short skc_family;
	volatile unsigned char skc_state;
	int skc_bound_dev_if;
	possible_net_t skc_net;
	struct sock *skc_listener;
};

struct sock {
	struct sock_common __sk_common;
	unsigned char sk_userlocks : 4;
	__u16 sk_type;
	__u16 sk_protocol;
	__u32 sk_txhash;
	struct sock_cgroup_data sk_cgrp_data;
};

struct sk_buff {
	struct sock *sk;
	struct net_device *dev;
	unsigned long _skb_refdst;
	unsigned long _nfct;
};
#pragma clang attribute pop

extern void *bpf_cast_to_kern_ctx(void *ctx) __ksym __weak;
extern void *bpf_rdonly_cast(const void *obj, __u32 btf_id) __ksym __weak;

/*
 * Whether to look at all. Only BPF_PROG_RUN, whose packets nobody routed, does without; set before
 * the program is loaded.
 */
const volatile __u8 only_routed = 1;

static __always_inline bool mtn_origin_is_readable(void)
{
	return bpf_ksym_exists(bpf_cast_to_kern_ctx) && bpf_ksym_exists(bpf_rdonly_cast) &&
	       bpf_core_field_exists(struct sk_buff, sk) &&
	       bpf_core_field_exists(struct sk_buff, dev) &&
	       bpf_core_field_exists(struct sk_buff, _skb_refdst) &&
	       bpf_core_field_exists(struct dst_entry, dev) &&
	       bpf_core_field_exists(struct rtable, rt_uses_gateway) &&
	       bpf_core_field_exists(struct rt6_info, rt6i_flags) &&
	       bpf_core_field_exists(struct net_device, ifindex) &&
	       bpf_core_field_exists(struct net_device, dev_addr) &&
	       bpf_core_field_exists(struct net_device, rx_handler) &&
	       bpf_core_field_exists(struct net_device, nd_net) &&
	       bpf_core_field_exists(struct sock, __sk_common) &&
	       bpf_core_field_exists(struct sock_common, skc_family) &&
	       bpf_core_field_exists(struct sock_common, skc_net);
}

/*
 * Index of the device that the packet was routed to, if that is another one than this, of this network namespace;
 * else 0.
 */
static __always_inline __u32 mtn_routed_elsewhere(struct __sk_buff *ctx)
{
	struct net_device *dev, *to;
	struct dst_entry *dst;
	struct sk_buff *skb;

	if (!mtn_origin_is_readable())
		return 0;
	skb = bpf_cast_to_kern_ctx(ctx);
	dst = (struct dst_entry *)(skb->_skb_refdst & ~SKB_DST_NOREF);
	if (!dst)
		return 0;
	dst = bpf_rdonly_cast(dst, bpf_core_type_id_kernel(struct dst_entry));
	if (dst->dev == skb->dev)
		return 0;
	dev = bpf_rdonly_cast(skb->dev, bpf_core_type_id_kernel(struct net_device));
	to = bpf_rdonly_cast(dst->dev, bpf_core_type_id_kernel(struct net_device));
	return to->nd_net.net == dev->nd_net.net ? to->ifindex : 0;
}

/* Has this host's routing sent the packet, whose link-layer addresses are @link, to this device? */
static __always_inline bool mtn_is_routed_here(struct __sk_buff *ctx, const struct mtn_link_header *link)
{
	struct net_device *dev;
	struct dst_entry *dst;
	struct sk_buff *skb;
	struct mtn_mac own;
	struct sock *sk;

	if (!only_routed)
		return true;
	if (!mtn_origin_is_readable())
		return false;
	skb = bpf_cast_to_kern_ctx(ctx);
	dst = (struct dst_entry *)(skb->_skb_refdst & ~SKB_DST_NOREF);
	if (!dst)
		return false;
	dst = bpf_rdonly_cast(dst, bpf_core_type_id_kernel(struct dst_entry));
	dev = bpf_rdonly_cast(skb->dev, bpf_core_type_id_kernel(struct net_device));
	if (dst->dev != dev)
		return false;
	sk = skb->sk;
	if (sk) {
		sk = bpf_rdonly_cast(sk, bpf_core_type_id_kernel(struct sock));
		if (sk->__sk_common.skc_family == AF_PACKET ||
		    sk->__sk_common.skc_net.net != dev->nd_net.net)
			return false;
	} else if (!ctx->ingress_ifindex && dev->rx_handler) {
		return false;
	}
	return !bpf_probe_read_kernel(&own, sizeof(own), dev->dev_addr) &&
	       !__builtin_memcmp(&own, &link->from, sizeof(own));
}

/*
 * Has a packet that was routed here named its next hop itself? To be asked of destinations beyond the link only: what
 * goes to the gateway itself, as of neighbour discovery, has a route without a gateway, too.
 */
static __always_inline bool mtn_names_next_hop(struct __sk_buff *ctx)
{
	struct rt6_info *wide;
	struct rtable *narrow;
	struct sk_buff *skb;
	void *dst;

	if (!only_routed)
		return false;
	if (!mtn_origin_is_readable())
		return true;
	skb = bpf_cast_to_kern_ctx(ctx);
	dst = (void *)(skb->_skb_refdst & ~SKB_DST_NOREF);
	if (ctx->protocol == bpf_htons(ETH_P_IPV6)) {
		wide = bpf_rdonly_cast(dst, bpf_core_type_id_kernel(struct rt6_info));
		return !(wide->rt6i_flags & RTF_GATEWAY);
	}
	narrow = bpf_rdonly_cast(dst, bpf_core_type_id_kernel(struct rtable));
	return !narrow->rt_uses_gateway;
}

#endif
