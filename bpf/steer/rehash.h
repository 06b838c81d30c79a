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
 * What a connection of this host sends may not be acknowledged any more once it was moved: the next hops may be firewalls,
 * each of which knows only what it has seen begin. Such a flow goes back. The path that it came from is forgotten when
 * something was acknowledged since.
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
/* In mtn_flow.fled: not even where there is no other, as long as its own is alive. */
#define MTN_FLED_FOR_GOOD	0x80
/* In mtn_flow.came_from: a window has ended since. */
#define MTN_CAME_BEFORE		0x80
#define MTN_NO_FLAG		0x7f
_Static_assert(MTN_MAX_PATHS < MTN_NO_FLAG, "1 + path id has room beside the flag");

/* include/linux/net.h */
#define MTN_SOCK_STREAM		1

/*
 * A connection with so many timeouts in a row goes back: R1 of RFC 1122, 4.2.3.5. After a move away from a path that is
 * late, its acknowledgements may still come by that path. So one or two timeouts say little.
 */
#define MTN_TIMEOUTS_MAX	3

/* What the sender of a packet does about its path. */
enum mtn_sender {
	MTN_SENDER_CONTENT = 0,
	MTN_SENDER_REHASHED,	/* it looks for another one */
	MTN_SENDER_WAITING,	/* a timeout, and nothing acknowledged since */
	MTN_SENDER_UNHEARD,	/* MTN_TIMEOUTS_MAX of them */
};

/*
 * What the sender of a TCP packet has chosen its path by; 0: nothing, or not known. Says in @pkt if it waits. A function of
 * its own for the stack's sake.
 */
__noinline __u32 mtn_sender_hash(struct __sk_buff *ctx, struct mtn_pkt *pkt)
{
	struct inet_connection_sock *connection;
	struct tcp_request_sock *request;
	struct sk_buff *skb;
	struct sock *sk;
	__u8 state, timeouts;
	__u32 word;

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
	if (!bpf_core_field_exists(sk->sk_txhash) || !bpf_core_field_exists(sk->sk_protocol) ||
	    !bpf_core_field_exists(sk->sk_type))
		return 0;
	/* The kernel's own for resets, and others', are raw ones of this protocol. */
	if (sk->sk_protocol != IPPROTO_TCP || sk->sk_type != MTN_SOCK_STREAM)
		return 0;
	connection = bpf_rdonly_cast(sk, bpf_core_type_id_kernel(struct inet_connection_sock));
	if (bpf_core_field_exists(connection->icsk_retransmits)) {
		timeouts = connection->icsk_retransmits;
		if (timeouts)
			pkt->sender_is = timeouts < MTN_TIMEOUTS_MAX ? MTN_SENDER_WAITING :
								       MTN_SENDER_UNHEARD;
	}
	return sk->sk_txhash;
}

/* Notes by which path the kernel sends @pkt's flow now, and whether its sender, whose hash is @hash, looks for one. */
static __always_inline void mtn_follow_sender(struct mtn_pkt *pkt, struct mtn_flow *flow, __u32 here,
					      __u32 hash)
{
	bool rehashed = flow->sent_by != here && flow->hash && hash && flow->hash != hash;

	if (!flow->came_from || pkt->sender_is != MTN_SENDER_UNHEARD)
		pkt->sender_is = rehashed ? MTN_SENDER_REHASHED : MTN_SENDER_CONTENT;
	flow->sent_by = here;
	if (hash)
		flow->hash = hash;
}

/*
 * Forgets where @flow came from, a window after the one in which it was moved has ended and nothing that it sends has to be
 * acknowledged anew. @pkt's sender has just been asked.
 */
static __always_inline void mtn_settle(const struct mtn_pkt *pkt, struct mtn_flow *flow)
{
	if (!flow->came_from || pkt->sender_is >= MTN_SENDER_WAITING)
		return;
	if (flow->came_from & MTN_CAME_BEFORE)
		flow->came_from = 0;
	else
		flow->came_from |= MTN_CAME_BEFORE;
}

/* The members @may of @g without the one that @flow has fled, if there is another or it has fled for good. */
static __always_inline __u32 mtn_but_fled(const struct mtn_flow *flow, const struct mtn_group *g, __u32 may,
					  __u32 alive, __u64 now)
{
	__u32 member = MTN_MAX_MEMBERS, rest = may;
	bool stays = flow->fled & MTN_FLED_FOR_GOOD && mtn_has(alive, mtn_member(g, flow->path));

	if (flow->fled && now - flow->fled_ns < MTN_FLED_NS)
		member = mtn_member(g, (flow->fled & MTN_NO_FLAG) - 1);
	if (member < MTN_MAX_MEMBERS)
		rest &= ~(1U << member);
	return rest || stays ? rest : may;
}

/*
 * The path of @group for a flow of members @may whose sender looks for another one than @from: the kernel's, @here, or else
 * the one that the hash gives it to. @from if there is none. One that is not acknowledged goes back, if that path is @alive
 * and takes its packets, or stays.
 */
static __always_inline __u32 mtn_elsewhere(const struct mtn_pkt *pkt, const struct mtn_flow *flow, __u32 group,
					   __u32 may, __u32 alive, __u32 from, __u32 here)
{
	struct mtn_group *g = mtn_group_at(group);
	__u32 member = mtn_member(g, from), choice;

	if (pkt->sender_is == MTN_SENDER_UNHEARD) {
		choice = (flow->came_from & MTN_NO_FLAG) - 1;
		if (!mtn_has(alive, mtn_member(g, choice)) || mtn_path_at(choice)->mtu < flow->l3_len_max)
			return from;
		return choice == here || mtn_takes(mtn_path_at(here), mtn_path_at(choice)) ? choice : from;
	}
	if (member < MTN_MAX_MEMBERS)
		may &= ~(1U << member);
	if (mtn_has(may, mtn_member(g, here)))
		return here;
	choice = mtn_choose(group, may, mtn_flow_hash(&pkt->key, config.hash_seed), flow->l3_len_max, here);
	return choice < MTN_MAX_MEMBERS ? mtn_member_path(g, choice) : from;
}

#endif
