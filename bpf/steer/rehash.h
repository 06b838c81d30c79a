/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * TCP that looks for another path by itself, as where packets are lost behind a gateway that answers.
 *
 * After a timeout, and when its acknowledgements seem to be lost, a sender gives its connection another hash, by which the
 * kernel may choose another next hop (sk_rethink_txhash(), include/net/sock.h; Wetherall et al., "Improving Network
 * Availability with Protective ReRoute", SIGCOMM 2023). Such a flow leaves its path, too, for one that is eligible.
 * It shows by both: the kernel sends it by another next hop than before, and its hash is another one. Alone, the
 * first may come from a change of the routes, the second does not matter to the kernel's choice.
 *
 * The hash of a socket of this host is read there. Of others', IPv6's flow label is made of it (ip6_make_flowlabel(),
 * include/net/ipv6.h). It is kept up to date once a window, so that one from long ago is not taken for news when the
 * routes change.
 *
 * A flow of this host that is not heard on a path to which it was moved goes back, or where the kernel sends it: the next
 * hops may be firewalls that each know only what began there.
 */
#ifndef MOUNTAIN_REHASH_H
#define MOUNTAIN_REHASH_H

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
/* A connection that is being accepted: its SYN-ACK has this hash, and its socket later. */
struct tcp_request_sock {
	__u32 txhash;
};

struct inet_connection_sock {
	__u8 icsk_retransmits;
};
#pragma clang attribute pop

/* A flow flees no more often, ns: the least timeout of TCP is 0.2 s. Some senders give each packet a label of its own. */
#define MTN_FLEE_NS		100000000ULL
/* For so long a flow does not go back to the path that it has fled last while there is another, ns. */
#define MTN_FLED_NS		600000000000ULL

/*
 * Timeouts in a row after which a connection is not heard: R1 of RFC 1122, 4.2.3.5. Fewer come about where answers by the
 * path that it has left are as late as it was left for.
 */
#define MTN_UNHEARD_TIMEOUTS	3

/* What the sender of a packet does about its path. */
enum mtn_sender {
	MTN_SENDER_CONTENT = 0,
	MTN_SENDER_REHASHED,	/* it looks for another one */
	MTN_SENDER_UNHEARD,	/* nothing that it sends is acknowledged */
};

/*
 * What the sender of a TCP packet has chosen its path by; 0: nothing, or not known. Says in @pkt if it is not heard. A
 * function of its own for the stack's sake.
 */
__noinline __u32 mtn_sender_hash(struct __sk_buff *ctx, struct mtn_pkt *pkt)
{
	struct inet_connection_sock *connection;
	struct tcp_request_sock *request;
	struct sk_buff *skb;
	struct sock *sk;
	__u32 word;
	__u8 state;

	if (!pkt || pkt->key.proto != IPPROTO_TCP || !mtn_origin_is_readable())
		return 0;
	if (ctx->ingress_ifindex || !only_routed) {
		if (!pkt->key.ipv6 || mtn_load(ctx, ETH_HLEN, &word))
			return 0;
		return bpf_ntohl(word) & 0xfffff;	/* after version and traffic class */
	}
	skb = bpf_cast_to_kern_ctx(ctx);
	sk = skb->sk;
	if (!sk)
		return 0;
	sk = bpf_rdonly_cast(sk, bpf_core_type_id_kernel(struct sock));
	state = sk->__sk_common.skc_state;
	if (state == MTN_TIME_WAIT)
		return 0;
	if (state == MTN_NEW_SYN_RECV) {
		request = bpf_rdonly_cast(sk, bpf_core_type_id_kernel(struct tcp_request_sock));
		return bpf_core_field_exists(request->txhash) ? request->txhash : 0;
	}
	if (!bpf_core_field_exists(sk->sk_txhash) || !bpf_core_field_exists(sk->sk_protocol))
		return 0;
	if (sk->sk_protocol != IPPROTO_TCP)
		return 0;
	connection = bpf_rdonly_cast(sk, bpf_core_type_id_kernel(struct inet_connection_sock));
	if (bpf_core_field_exists(connection->icsk_retransmits) &&
	    connection->icsk_retransmits >= MTN_UNHEARD_TIMEOUTS)
		pkt->sender_is = MTN_SENDER_UNHEARD;
	return sk->sk_txhash;
}

/* Whether @flow, which the kernel sends by @here, is not where it began. */
static __always_inline bool mtn_is_away(const struct mtn_flow *flow, __u32 here)
{
	return flow->came_from || flow->path != here;
}

/* Notes by which path the kernel sends @pkt's flow now, and whether its sender, whose hash is @hash, looks for one. */
static __always_inline void mtn_follow_sender(struct mtn_pkt *pkt, struct mtn_flow *flow, __u32 here,
					      __u32 hash)
{
	bool rehashed = flow->sent_by != here && flow->hash && hash && flow->hash != hash;

	if (!mtn_is_away(flow, here) || pkt->sender_is != MTN_SENDER_UNHEARD)
		pkt->sender_is = rehashed ? MTN_SENDER_REHASHED : MTN_SENDER_CONTENT;
	flow->sent_by = here;
	if (hash)
		flow->hash = hash;
}

/* The members @may of @g without the one that @flow has fled. That one, too, where its path is not @alive. */
static __always_inline __u32 mtn_but_fled(const struct mtn_flow *flow, const struct mtn_group *g, __u32 may,
					  __u32 alive, __u64 now)
{
	__u32 member = MTN_MAX_MEMBERS, rest = may;

	if (flow->fled && now - flow->fled_ns < MTN_FLED_NS)
		member = mtn_member(g, flow->fled - 1);
	if (member < MTN_MAX_MEMBERS)
		rest &= ~(1U << member);
	return rest || mtn_has(alive, mtn_member(g, flow->path)) ? rest : may;
}

/*
 * The path of @group for a flow of members @may whose sender looks for another one than @from: the kernel's, @here, or else
 * the one that the hash gives it to. @from if there is none. One that is not heard goes back if that path is @alive.
 */
static __always_inline __u32 mtn_elsewhere(const struct mtn_pkt *pkt, const struct mtn_flow *flow, __u32 group,
					   __u32 may, __u32 alive, __u32 from, __u32 here)
{
	struct mtn_group *g = mtn_group_at(group);
	__u32 member = mtn_member(g, from), choice;

	if (pkt->sender_is == MTN_SENDER_UNHEARD) {
		choice = flow->came_from ? flow->came_from - 1 : here;
		if (mtn_has(alive, mtn_member(g, choice)))
			return choice;
	}
	if (member < MTN_MAX_MEMBERS)
		may &= ~(1U << member);
	if (mtn_has(may, mtn_member(g, here)))
		return here;
	choice = mtn_choose(group, may, mtn_flow_hash(&pkt->key, config.hash_seed), flow->l3_len_max, here);
	return choice < MTN_MAX_MEMBERS ? mtn_member_path(g, choice) : from;
}

#endif
