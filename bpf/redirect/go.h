/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* How a packet of a flow goes on: the table in redirect.bpf.c. */
#ifndef MOUNTAIN_REDIRECT_GO_H
#define MOUNTAIN_REDIRECT_GO_H

/* How a packet of a flow goes on. */
enum mtn_rd_go {
	MTN_GO_UNTOUCHED,	/* another hook does it */
	MTN_GO_PASS,		/* rewritten, the kernel routes it */
	MTN_GO_PEER,		/* rewritten, into the namespace behind the device */
	MTN_GO_NEIGH,		/* rewritten, the kernel finds the neighbour */
	MTN_GO_FAST,		/* rewritten, out by XDP */
	MTN_GO_DROP,
};

static __always_inline int mtn_rd_egress(void *ctx, void *flow, struct mtn_rd_look *look,
					  const bool ipv6, const int hook)
{
	struct mtn_rd_flow *f = flow;
	bool kept = f->mtu &&
		    f->fib_until_ticks - mtn_rd_ticks(look->now) <= mtn_rd_ticks(MTN_RD_FIB_NS);

	/* What XDP keeps is for XDP. */
	if (kept && (hook == MTN_HOOK_XDP ||
		     (f->backend != MTN_RD_XDP_REDIRECT && mtn_rd_size(ctx, look) <= f->mtu))) {
		look->oif = f->oif;
		return 0;
	}
	if (hook == MTN_HOOK_XDP)
		return ipv6 ? mtn_rd_fib6_xdp(ctx, flow, look) : mtn_rd_fib4_xdp(ctx, flow, look);
	return ipv6 ? mtn_rd_fib6_skb(ctx, flow, look) : mtn_rd_fib4_skb(ctx, flow, look);
}

/*
 * Decides how a packet goes on, by the table at the top. @mac: where it was sent to.
 * @flow: struct mtn_rd_flow4 or mtn_rd_flow6.
 */
static __always_inline int mtn_rd_go(void *ctx, void *flow, struct mtn_rd_look *look,
				     const __u8 *mac, const bool ipv6, const int hook)
{
	struct mtn_rd_flow *f = flow;
	bool reply = f->flags & MTN_RD_REPLY, snat = f->flags & MTN_RD_SNAT;
	__u32 in = reply ? f->target_dev : f->client_dev;
	/* Otherwise the kernel has something to say to the packet. */
	bool plain = look->ttl > 1 && !look->options;

	if (hook == MTN_HOOK_OUT)
		return reply && !snat && mtn_device(ctx, hook) == f->client_dev ?
			       MTN_GO_PASS : MTN_GO_UNTOUCHED;
	if (mtn_device(ctx, hook) != in)
		return MTN_GO_UNTOUCHED;
	if (hook == MTN_HOOK_XDP) {
		if (f->backend == MTN_RD_XDP)
			return reply || snat ? MTN_GO_UNTOUCHED : MTN_GO_PASS;
		/*
		 * Fragments of a datagram stay together: connection tracking waits for those that it does not see.
		 * A frame for another host, seen because the device is promiscuous: not to be sent on.
		 */
		if (f->backend != MTN_RD_XDP_REDIRECT || !plain || look->fragment ||
		    __builtin_memcmp(mac, f->in_mac, ETH_ALEN) ||
		    mtn_rd_egress(ctx, flow, look, ipv6, hook))
			return MTN_GO_UNTOUCHED;
		return look->len <= f->mtu ? MTN_GO_FAST : MTN_GO_UNTOUCHED;
	}
	if (snat) {
		if (look->ttl <= 1) {
			mtn_rd_count_drop(f->rule, MTN_RD_DROP_TTL);
			return MTN_GO_DROP;
		}
		if (mtn_rd_egress(ctx, flow, look, ipv6, hook)) {
			mtn_rd_count_drop(f->rule, MTN_RD_DROP_ROUTE);
			return MTN_GO_DROP;
		}
		return MTN_GO_NEIGH;
	}
	if (!reply && f->backend == MTN_RD_TCX_PEER)
		return f->out_veth && plain ? MTN_GO_PEER : MTN_GO_PASS;
	/*
	 * Connection tracking has not seen the other packets, and would take this one for the first of a
	 * connection, which is in the way of nft's rule later. Nor does the way back have to be the way in: the
	 * kernel's routes decide. By another device than the rule's, as a routing rule by the clients' device may want,
	 * bpf_redirect_neigh() would look for the target behind no gateway.
	 */
	if ((f->backend == MTN_RD_TCX_PEER || f->backend == MTN_RD_XDP_REDIRECT) && plain &&
	    !mtn_rd_egress(ctx, flow, look, ipv6, hook) && (reply || look->oif == f->target_dev))
		return f->backend == MTN_RD_TCX_PEER && f->out_veth && look->oif == f->client_dev ?
			       MTN_GO_PEER : MTN_GO_NEIGH;
	return reply ? MTN_GO_UNTOUCHED : MTN_GO_PASS;
}

/* Sends the rewritten packet on. */
static __always_inline int mtn_rd_send(struct mtn_rd_flow *f, const struct mtn_rd_look *look, int go,
				       const int hook)
{
	if (hook == MTN_HOOK_XDP)
		return go == MTN_GO_FAST ? bpf_redirect(look->oif, 0) : XDP_PASS;
	if (go == MTN_GO_PEER)
		return bpf_redirect_peer(f->flags & MTN_RD_REPLY ? f->client_dev : f->target_dev, 0);
	if (go == MTN_GO_NEIGH)
		return bpf_redirect_neigh(look->oif, NULL, 0, 0);
	return TC_ACT_UNSPEC;
}

#endif
