/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Whether another ip rule selected a packet, by what it was when the kernel routed it.
 *
 * NAT translates packets after that. At POSTROUTING it changes the source: by SNAT, and in the answers of a service
 * behind DNAT. At OUTPUT it changes the destination of what a socket sends. The kernel then routes the packet again
 * if the address is new, but not if only the port is. Connection tracking remembers the tuple before the translation.
 */
#ifndef MOUNTAIN_ROUTED_H
#define MOUNTAIN_ROUTED_H

/* include/linux/netfilter/nf_conntrack_common.h: the lowest bits of _nfct are an enum ip_conntrack_info. */
#define NFCT_INFOMASK	7UL
/* include/uapi/linux/netfilter/nf_conntrack_common.h; IPS_SRC_NAT | IPS_DST_NAT. */
#define IP_CT_RELATED	1
#define IP_CT_IS_REPLY	3
#define IPS_NAT_MASK	(1UL << 4 | 1UL << 5)

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
union nf_inet_addr {
	__u32 all[4];
};

struct nf_conntrack_man {
	union nf_inet_addr u3;
	union {
		__u16 all;
	} u;
};

struct nf_conntrack_tuple {
	struct nf_conntrack_man src;
	struct {
		union nf_inet_addr u3;
		union {
			__u16 all;
		} u;
	} dst;
};

struct nf_conntrack_tuple_hash {
	struct nf_conntrack_tuple tuple;
};

struct nf_conn {
	struct nf_conntrack_tuple_hash tuplehash[2];
	unsigned long status;
};
#pragma clang attribute pop

static __always_inline bool mtn_nat_is_readable(void)
{
	return bpf_core_field_exists(struct nf_conn, status) &&
	       bpf_core_field_exists(struct nf_conntrack_tuple_hash, tuple) &&
	       bpf_core_field_exists(struct nf_conntrack_tuple, src.u3) &&
	       bpf_core_field_exists(struct nf_conntrack_tuple, src.u) &&
	       bpf_core_field_exists(struct nf_conntrack_tuple, dst.u3) &&
	       bpf_core_field_exists(struct nf_conntrack_tuple, dst.u);
}

/* The packet's connection, and what the packet is to it. 0: none, as always where the kernel tracks none. */
static __always_inline __u64 mtn_connection(struct __sk_buff *ctx)
{
	struct sk_buff *skb;

	if (!mtn_origin_is_readable() || !bpf_core_field_exists(struct sk_buff, _nfct))
		return 0;
	skb = bpf_cast_to_kern_ctx(ctx);
	return skb->_nfct;
}

/*
 * Makes @key, of a packet of the connection @nfct that came in by @iif, what it was when the kernel routed it.
 * Returns 0 where NAT has not translated the connection, less than 0 where it cannot be told.
 */
static __always_inline int mtn_as_routed(struct mtn_flow_key *key, __u64 nfct, __u32 iif)
{
	struct nf_conn *ct = (struct nf_conn *)(nfct & ~NFCT_INFOMASK);
	bool icmp = key->proto == IPPROTO_ICMP || key->proto == IPPROTO_ICMPV6;
	__u32 info = nfct & NFCT_INFOMASK;
	struct nf_conntrack_tuple *was;
	unsigned long status = 0;
	__u32 daddr[4] = {};
	__u32 *kind;

	if (!ct) {
		/* A flow table translates packets that are in no connection. Others that are forwarded, but for IPsec's,
		 * have no address of this host. */
		if (iif == LOOPBACK_IFINDEX || !mtn_has_ports(key->proto))
			return 0;
		kind = mtn_source_kind(key);
		return kind && *kind == MTN_SOURCE_OWN ? -1 : 0;
	}
	if (!mtn_nat_is_readable() || bpf_core_read(&status, sizeof(status), &ct->status))
		return -1;
	if (!(status & IPS_NAT_MASK))
		return 0;
	/* An error is no packet of the connection that it is about, and any router may have sent it. */
	if (icmp && (info == IP_CT_RELATED || info == IP_CT_RELATED + IP_CT_IS_REPLY))
		return -1;
	was = info < IP_CT_IS_REPLY ? __builtin_preserve_access_index(&ct->tuplehash[0].tuple) :
				      __builtin_preserve_access_index(&ct->tuplehash[1].tuple);
	if (bpf_core_read(key->saddr, sizeof(key->saddr), &was->src.u3))
		return -1;
	if (!mtn_has_ports(key->proto))
		return 1;
	if (bpf_core_read(&key->sport, sizeof(key->sport), &was->src.u))
		return -1;
	if (iif != LOOPBACK_IFINDEX)
		return 1;
	if (bpf_core_read(daddr, sizeof(daddr), &was->dst.u3))
		return -1;
	/* With a new address it was routed again, by its new port. */
	if ((daddr[0] ^ key->daddr[0]) | (daddr[1] ^ key->daddr[1]) | (daddr[2] ^ key->daddr[2]) |
	    (daddr[3] ^ key->daddr[3]))
		return 1;
	return bpf_core_read(&key->dport, sizeof(key->dport), &was->dst.u) ? -1 : 1;
}

/*
 * The uid by which ip rules judge a packet: its socket's. Without one it is root's
 * (sock_net_uid() in the kernel), as in TIME_WAIT, where the socket is none that has a user.
 */
static __always_inline __u32 mtn_uid(struct __sk_buff *skb)
{
	struct bpf_sock *sk = skb->sk;

	return sk && sk->state != BPF_TCP_TIME_WAIT ? bpf_get_socket_uid(skb) : 0;
}

/*
 * Has an ip rule that looks up another table selected the packet, of the connection @nfct (mtn_connection)?
 * A function of its own to the verifier, which would else follow each case of it to the end.
 */
__noinline int mtn_is_selected(struct __sk_buff *skb, struct mtn_pkt *pkt, __u64 nfct)
{
	/* To ip rules, what the host itself sends came in by lo. */
	__u32 iif = skb->ingress_ifindex ? skb->ingress_ifindex : LOOPBACK_IFINDEX;
	struct mtn_flow_key was;
	int translated;
	__u32 *kind;
	__u32 uid;

	if (!pkt)
		return 0;
	uid = mtn_uid(skb);
	if (mtn_selected_elsewhere(&pkt->key, skb->mark, iif, uid, pkt->dsfield))
		return 1;
	was = pkt->key;
	translated = mtn_as_routed(&was, nfct, iif);
	if (translated < 0)
		return 1;
	if (!translated) {
		/* From an address of this host: IPsec has made it of a packet that came in, and sent it as the host's own. */
		kind = iif == LOOPBACK_IFINDEX ? NULL : mtn_source_kind(&was);
		if (!kind || *kind != MTN_SOURCE_OWN)
			return 0;
		iif = LOOPBACK_IFINDEX;
	}
	return mtn_selected_elsewhere(&was, skb->mark, iif, uid, pkt->dsfield);
}

#endif
