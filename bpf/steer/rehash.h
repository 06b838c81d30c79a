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
 * The hash of a socket of this host is read there. Of others', IPv6's flow label is made of it (RFC 6438).
 */
#ifndef MOUNTAIN_REHASH_H
#define MOUNTAIN_REHASH_H

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
/* A connection that is being accepted: its SYN-ACK has this hash, and its socket later. */
struct tcp_request_sock {
	__u32 txhash;
};
#pragma clang attribute pop

/* What the sender of a TCP packet has chosen its path by; 0: nothing, or not known. */
static __always_inline __u32 mtn_sender_hash(struct __sk_buff *ctx, const struct mtn_pkt *pkt)
{
	struct tcp_request_sock *request;
	struct ipv6hdr ip6;
	struct sk_buff *skb;
	struct sock *sk;
	__u8 state;

	if (pkt->key.proto != IPPROTO_TCP || !mtn_origin_is_readable())
		return 0;
	skb = bpf_cast_to_kern_ctx(ctx);
	sk = skb->sk;
	if (sk) {
		sk = bpf_rdonly_cast(sk, bpf_core_type_id_kernel(struct sock));
		state = sk->__sk_common.skc_state;
		if (state == MTN_TIME_WAIT)
			return 0;
		if (state == MTN_NEW_SYN_RECV) {
			request = bpf_rdonly_cast(sk, bpf_core_type_id_kernel(struct tcp_request_sock));
			return bpf_core_field_exists(request->txhash) ? request->txhash : 0;
		}
		if (bpf_core_field_exists(sk->sk_txhash) && bpf_core_field_exists(sk->sk_protocol) &&
		    sk->sk_protocol == IPPROTO_TCP)
			return sk->sk_txhash;
	}
	if (!pkt->key.ipv6 || mtn_load(ctx, ETH_HLEN, &ip6))
		return 0;
	return (ip6.flow_lbl[0] & 0xf) << 16 | ip6.flow_lbl[1] << 8 | ip6.flow_lbl[2];
}

/* Notes by which path the kernel sends a flow that it has sent by another one, and whether its sender looks for one. */
static __always_inline void mtn_follow_sender(struct __sk_buff *ctx, struct mtn_pkt *pkt,
					      struct mtn_flow *flow, __u32 here)
{
	__u32 hash = mtn_sender_hash(ctx, pkt);

	flow->sent_by = here;
	if (!hash)
		return;
	pkt->rehashed = flow->hash && flow->hash != hash;
	flow->hash = hash;
}

/*
 * The path of @group for a flow of members @may whose sender looks for another one than @from: the kernel's, @here, or else
 * the one that the hash gives it to. @from if there is none.
 */
static __always_inline __u32 mtn_elsewhere(const struct mtn_pkt *pkt, const struct mtn_flow *flow, __u32 group,
					   __u32 may, __u32 from, __u32 here)
{
	struct mtn_group *g = mtn_group_at(group);
	__u32 member = mtn_member(g, from), choice;

	if (member < MTN_MAX_MEMBERS)
		may &= ~(1U << member);
	if (mtn_has(may, mtn_member(g, here)))
		return here;
	choice = mtn_choose(group, may, mtn_flow_hash(&pkt->key, config.hash_seed), flow->l3_len_max, here);
	return choice < MTN_MAX_MEMBERS ? mtn_member_path(g, choice) : from;
}

#endif
