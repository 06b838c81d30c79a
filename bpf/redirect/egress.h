/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The egress route of redirected flows, their log lines, and the ports of their fragments. */
#ifndef MOUNTAIN_REDIRECT_EGRESS_H
#define MOUNTAIN_REDIRECT_EGRESS_H

/* linux/bpf.h of 6.3 and later */
#define MTN_FIB_SKIP_NEIGH	(1U << 2)

/*
 * Network layer bytes of the largest packet that an skb becomes on the wire: of a GSO packet, of a segment. To
 * bpf_fib_lookup() a GSO packet fits every device (is_skb_forwardable()), and so it does to the device then.
 * Of a fragment, what its device takes: all of a datagram go one way, as connection tracking waits for those that
 * it does not see.
 */
static __always_inline __u32 mtn_rd_size(struct __sk_buff *skb, const struct mtn_rd_look *look)
{
	__u32 mtu = 0;

	if (look->fragment && bpf_check_mtu(skb, 0, &mtu, 0, 0) >= 0)
		return mtu > look->len ? mtu : look->len;
	return skb->gso_size ? look->headers + skb->gso_size : look->len;
}

/* Looks the egress route up and keeps it in the flow; 0 when there is one. */
static __always_inline int mtn_rd_fib(void *ctx, struct mtn_rd_flow *f, struct bpf_fib_lookup *fib,
				      struct mtn_rd_look *look, bool xdp)
{
	bool reply = f->flags & MTN_RD_REPLY;
	__u32 usual = reply ? f->client_dev : f->target_dev;

	fib->l4_protocol = look->proto;
	fib->sport = f->sport;
	fib->dport = f->dport;
	fib->ifindex = reply ? f->target_dev : f->client_dev;
	/*
	 * What is too big the kernel tells the sender. With another source address nobody could: the device may take it
	 * after all. (At tcx, 0 asks for the packet's own length and the device's MTU.)
	 */
	fib->tot_len = xdp ? look->len : f->flags & MTN_RD_SNAT ? 0 : mtn_rd_size(ctx, look);
	if (bpf_fib_lookup(ctx, fib, sizeof(*fib), xdp ? 0 : MTN_FIB_SKIP_NEIGH))
		return -1;
	/* User space has looked at no other device. */
	if (xdp && fib->ifindex != usual)
		return -1;
	look->oif = fib->ifindex;
	/* Not to be kept: no neighbour was asked for, which XDP needs; or the way back is not the way in. */
	if (!xdp && (f->backend == MTN_RD_XDP_REDIRECT || fib->ifindex != usual))
		return 0;
	f->oif = fib->ifindex;
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

/* How long fragments are waited for (IP_FRAG_TIME in the kernel's include/net/ip.h): identifications come again. */
#define MTN_RD_FRAG_NS (30 * 1000000000ULL)

/* Ports of a fragment that is not the first; 0 when that one was not seen. */
__noinline __u32 mtn_rd_frag_ports(struct mtn_rd_frag_key *key)
{
	struct mtn_rd_frag *frag;

	if (!key)
		return 0;
	frag = bpf_map_lookup_elem(&rd_frags, key);
	if (!frag || bpf_ktime_get_coarse_ns() - frag->at_ns > MTN_RD_FRAG_NS)
		return 0;
	return (__u32)frag->ports.dport << 16 | frag->ports.sport;
}

/* Forgets a datagram of the same identification: another one begins. */
__noinline int mtn_rd_frag_forget(struct mtn_rd_frag_key *key)
{
	return key ? bpf_map_delete_elem(&rd_frags, key) : 0;
}

__noinline int mtn_rd_frag_remember(struct mtn_rd_frag_key *key, __u32 both)
{
	struct mtn_rd_frag frag = {
		.at_ns = bpf_ktime_get_coarse_ns(),
		.ports = { .sport = both & 0xffff, .dport = both >> 16 },
	};

	if (!key)
		return 0;
	return bpf_map_update_elem(&rd_frags, key, &frag, BPF_ANY);
}

#endif
