/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Sockets that name the device that their packets leave by: bound to it (SO_BINDTODEVICE), by IP_UNICAST_IF,
 * IPV6_UNICAST_IF or the socket option IPV6_PKTINFO for all packets, by a control message (IP_PKTINFO, IPV6_PKTINFO)
 * for each. A packet does not show the latter, but the socket's options do: a server that answers by the device
 * of the question has the kernel tell it that device (IP_PKTINFO). So an unconnected datagram socket that asks for it
 * and has a port of its own counts as such. Clients that ask (QUIC libraries do, for the address) have a port that
 * the kernel chose.
 */
#ifndef MOUNTAIN_DEVICE_H
#define MOUNTAIN_DEVICE_H

/* include/net/inet_sock.h: the bit of IP_PKTINFO in inet_flags. */
#define INET_FLAGS_PKTINFO	(1UL << 0)
/* include/net/sock.h: the port was asked for by bind(). */
#define SOCK_BINDPORT_LOCK	8
/* include/net/tcp_states.h: of a datagram socket without a connection; the smaller kinds of socket. */
#define MTN_UNCONNECTED		7
#define MTN_TIME_WAIT		6
#define MTN_NEW_SYN_RECV	12

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct ipv6_pinfo {
	struct {
		int ipi6_ifindex;
	} sticky_pktinfo;
	int ucast_oif;
	union {
		struct {
			__u16 rxinfo : 1;
		} bits;
	} rxopt;
};

struct inet_sock {
	struct ipv6_pinfo *pinet6;
	unsigned long inet_flags;
	int uc_index;
};
#pragma clang attribute pop

/*
 * A SYN-ACK with a cookie? It has no socket that would tell (tcp_make_synack(), net/ipv4/tcp_output.c), and its listener may
 * have named its device.
 */
static __always_inline bool mtn_is_cookie(struct __sk_buff *ctx, const struct mtn_pkt *pkt)
{
	return (pkt->flags & MTN_PKT_SYN) && !ctx->ingress_ifindex && !ctx->sk;
}

/* Has @ctx's socket named its device? */
static __always_inline bool mtn_names_device(struct __sk_buff *ctx)
{
	struct ipv6_pinfo *ipv6 = NULL;
	struct inet_sock *inet;
	struct sk_buff *skb;
	struct sock *sk;
	__u8 state;

	if (!mtn_origin_is_readable())
		return true;
	skb = bpf_cast_to_kern_ctx(ctx);
	sk = skb->sk;
	if (!sk)
		return false;
	sk = bpf_rdonly_cast(sk, bpf_core_type_id_kernel(struct sock));
	if (sk->__sk_common.skc_bound_dev_if)
		return true;
	state = sk->__sk_common.skc_state;
	if (state == MTN_TIME_WAIT || state == MTN_NEW_SYN_RECV ||
	    (sk->__sk_common.skc_family != AF_INET && sk->__sk_common.skc_family != AF_INET6))
		return false;
	inet = bpf_rdonly_cast(sk, bpf_core_type_id_kernel(struct inet_sock));
	if (inet->uc_index)
		return true;
	if (sk->__sk_common.skc_family == AF_INET6 && bpf_core_field_exists(inet->pinet6)) {
		ipv6 = inet->pinet6;
		if (ipv6 && (ipv6->ucast_oif || ipv6->sticky_pktinfo.ipi6_ifindex))
			return true;
	}
	if (state != MTN_UNCONNECTED ||
	    !(BPF_CORE_READ_BITFIELD(sk, sk_userlocks) & SOCK_BINDPORT_LOCK))
		return false;
	if (!bpf_core_field_exists(inet->inet_flags))
		return true;
	return (inet->inet_flags & INET_FLAGS_PKTINFO) ||
	       (ipv6 && BPF_CORE_READ_BITFIELD(ipv6, rxopt.bits.rxinfo));
}

#endif
