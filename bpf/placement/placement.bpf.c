// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * placement: choose the uplink of a new flow, where it cannot be changed later.
 *
 * Theory of operation
 * ===================
 *
 * Uplinks with addresses of their own, as those of two providers: a flow's source address is that of
 * the uplink which it starts on, and so it can never change to another one. Here the choice is made
 * before the address is. The daemon measures the paths and writes which of them each class may use,
 * as for steer.bpf.c; it also keeps a routing table for each uplink and ip rules that lead there
 * (mountain/src/placement/). The programs only say which:
 *
 *   connect(), TCP and UDP    cgroup/connect4, connect6: the socket is given the uplink's mark, and
 *                             the kernel's own look-up, made right after, finds route and source
 *                             address by it. The mark stays with the socket, so does the path.
 *   sendto() without          cgroup/sendmsg4, sendmsg6: the mark would come too late (the kernel has
 *   connect()                 read it by now), so the datagram is given the uplink's address as its
 *                             source; the rule for that address does the rest. Remembered for each
 *                             socket and destination, so that an exchange keeps its address. So
 *                             do those that are under way when Mountain starts, and those that begin
 *                             while the kernel decides: their sockets are left to it until they
 *                             rest, or the uplink is dead that it takes.
 *   forwarded connections     tcx ingress of the inner devices: a packet that may begin a connection
 *                             is given the mark. Netfilter keeps it with the connection and gives
 *                             it to all further packets, whatever stands in them by then
 *                             (mountain/src/placement/nft.rs). Those of TCP get that of their SYN
 *                             here, too, if they have none (connection.h): who loads the firewall
 *                             anew takes our table away for a moment. Any datagram may begin a flow,
 *                             so what was chosen for a flow's last one is remembered, and need not
 *                             be found out again for each.
 *
 * Why a mark rather than bpf_bind() to the uplink's address: a socket bound so keeps the address when
 * it is connected to something else later (getaddrinfo() does that with one socket to sort addresses,
 * resolvers and the like do), also when that is on another network; binding fails for sockets that
 * have a port already; and the choice among an uplink's IPv6 addresses, temporary ones above all,
 * is the kernel's to make.
 *
 * Left alone: other network namespaces (the programs are attached to a cgroup, which knows none),
 * sockets that are bound to an address or device or marked by their owner, sockets that asked for a
 * port of their own unless a rule names them (others may have been told the address),
 * destinations with a route of their own, local ones, multicast; what an ip rule of the user's selects; sockets
 * below a cgroup with a program at its egress, which may let them leave by one device only; MPTCP, signalling and
 * what may be a provider's own (choose.h), unless the path is dead that the kernel takes; for sendmsg, a source, device or
 * mark per packet. Everything, when no path is known good, and while the daemon hangs or is stopped (alive.h).
 *
 * Nothing here ever refuses a call: each program returns 1.
 */
#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/in.h>
#include <linux/in6.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>

#define AF_INET		2
#define AF_INET6	10
/* <asm-generic/socket.h> of user space drags more in than these. */
#define SOL_SOCKET	1
#define SO_MARK		36
#define SOL_IP		0
#define IP_TOS		1
#define SOL_IPV6	41
#define IPV6_TCLASS	67
/* include/net/sock.h: the port was asked for by bind(). */
#define SOCK_BINDPORT_LOCK	8

#define ALLOW		1	/* the call goes on */

#include "placement.h"
#include "../common/alive.h"
#include "../common/parse.h"
#include "../common/rendezvous.h"
#include "../common/dest.h"
#include "../common/egress_programs.h"

/* The members of the kernel's sockets that are read here; their places are found at load (CO-RE). */
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
typedef struct {
	__u32 val;
} kuid_t;

struct sock {
	unsigned char sk_userlocks : 4;
	kuid_t sk_uid;
	struct sock_cgroup_data sk_cgrp_data;
};

struct ipv6_pinfo {
	struct {
		int ipi6_ifindex;
	} sticky_pktinfo;
	int ucast_oif;
	unsigned char srcprefs : 3;
};

struct inet_sock {
	struct ipv6_pinfo *pinet6;
	int uc_index;
};

struct tcp_sock {
	bool is_mptcp;
};

struct bpf_sock_addr_kern {
	void *t_ctx;
};

struct sockcm_cookie {
	__u32 mark;
};

struct ipcm_cookie {
	struct sockcm_cookie sockc;
	__be32 addr;
	int oif;
	__s16 tos;
};

struct flowi_common {
	int flowic_oif;
	__u32 flowic_mark;
};

struct flowi6 {
	struct flowi_common __fl_common;
	struct in6_addr saddr;
};
#pragma clang attribute pop

extern void *bpf_rdonly_cast(const void *obj, __u32 btf_id) __ksym;
extern void *bpf_cast_to_kern_ctx(void *obj) __ksym;

char LICENSE[] SEC("license") = "Dual BSD/GPL";

struct mtn_placement_config config;
struct mtn_placement_path paths[MTN_MAX_PATHS];
struct mtn_group groups[MTN_MAX_GROUPS];
struct mtn_placement_rule rules[MTN_MAX_RULES];
struct mtn_left_net left_nets[MTN_MAX_LEFT_NETS];
/* `ejected`: has been out of use for so long, or dead, that the new flows of a peer leave, too. */
volatile union mtn_masks group_masks[MTN_MAX_GROUPS];
/* Bits of path ids: those that deliver at all. One word, so that a run never sees half of it. */
volatile __u64 alive_paths;
/* Flows placed on each path; plain increments, for people. */
__u64 placed[MTN_MAX_PATHS];
/* union mtn_recent by hash; a new flow takes the slot of whichever was there. */
volatile __u64 recent[MTN_RECENT];

#include "../common/fib_rules.h"

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct mtn_unconnected_key);
	__type(value, struct mtn_unconnected);
} unconnected SEC(".maps");

/* Where the last new flow went by the one address that decides, or what is under way between two, see mtn_stay(). */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct mtn_flow_key);
	__type(value, struct mtn_unconnected);
} peers SEC(".maps");

/* Hosts behind this one to which the firewall forwards ports of the path that the kernel takes, see mtn_belongs(). */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, MTN_MAX_PUBLISHED);
	__type(key, struct mtn_source);
	__type(value, __u8);
} published SEC(".maps");

/* Ethernet addresses of bridges and of devices on them, two bytes of zeros behind each. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MTN_MAX_BRIDGES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, __u8);
} bridges SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, MTN_PLACE_STAT_MAX);
	__type(key, __u32);
	__type(value, __u64);
} stats SEC(".maps");

static __always_inline void mtn_count(__u32 stat)
{
	__u64 *n = bpf_map_lookup_elem(&stats, &stat);

	if (n)
		(*n)++;
}

#include "choose.h"

/* Nobody keeps up by what flows are placed? That counts as a call or packet that passes. */
static __always_inline bool mtn_passes_unattended(void)
{
	if (!mtn_is_unattended(config.alive_ns, bpf_ktime_get_coarse_ns()))
		return false;
	mtn_count(MTN_PLACE_PASS_UNATTENDED);
	return true;
}

/* Was the port asked for, rather than given by the kernel? */
static __always_inline bool mtn_has_own_port(struct bpf_sock *sk)
{
	struct sock *kernels = bpf_rdonly_cast(sk, bpf_core_type_id_kernel(struct sock));

	return BPF_CORE_READ_BITFIELD(kernels, sk_userlocks) & SOCK_BINDPORT_LOCK;
}

/* The user who made the socket, by whom ip rules go; the task that sends by it may be another's. */
static __always_inline __u32 mtn_uid(struct bpf_sock *sk)
{
	struct sock *kernels = bpf_rdonly_cast(sk, bpf_core_type_id_kernel(struct sock));

	return kernels->sk_uid.val;
}

/* Does the socket name a device for what it sends (IP_UNICAST_IF, IPV6_UNICAST_IF, the option IPV6_PKTINFO)? */
static __always_inline bool mtn_has_own_device(struct bpf_sock *sk, bool ipv6)
{
	struct inet_sock *inet = bpf_rdonly_cast(sk, bpf_core_type_id_kernel(struct inet_sock));

	return ipv6 ? inet->pinet6->ucast_oif | inet->pinet6->sticky_pktinfo.ipi6_ifindex : inet->uc_index;
}

/*
 * Does the socket ask for a kind of source address (IPV6_ADDR_PREFERENCES, RFC 5014), such as a temporary one? Which
 * it has is the kernel's to say.
 */
static __always_inline bool mtn_wants_source(struct bpf_sock *sk)
{
	struct inet_sock *inet = bpf_rdonly_cast(sk, bpf_core_type_id_kernel(struct inet_sock));

	return BPF_CORE_READ_BITFIELD(inet->pinet6, srcprefs);
}

/* The first subflow of an MPTCP connection? The kernel adds others by the addresses that are left. */
static __always_inline bool mtn_is_mptcp(struct bpf_sock_addr *ctx)
{
	struct tcp_sock *tcp;

	if (ctx->protocol != IPPROTO_TCP || !bpf_core_field_exists(struct tcp_sock, is_mptcp))
		return false;
	tcp = bpf_rdonly_cast(ctx->sk, bpf_core_type_id_kernel(struct tcp_sock));
	return tcp->is_mptcp;
}

/* Does the socket have a source address? An IPv6 one bound to IPv6 has a stand-in for IPv4. */
static __always_inline bool mtn_has_source(struct bpf_sock *sk)
{
	if (sk->src_ip4)
		return true;
	return sk->family == AF_INET6 &&
	       (sk->src_ip6[0] | sk->src_ip6[1] | sk->src_ip6[2] | sk->src_ip6[3]);
}

/* Does a program at the egress of its cgroup judge what the socket sends? It may let that leave by one uplink only. */
static __always_inline bool mtn_passes_cgroup(struct bpf_sock *sk)
{
	struct sock *kernels = bpf_rdonly_cast(sk, bpf_core_type_id_kernel(struct sock));

	if (mtn_cgroup_is_readable() && !mtn_is_judged(kernels->sk_cgrp_data.cgroup))
		return false;
	mtn_count(MTN_PLACE_PASS_CGROUP);
	return true;
}

/* May an ip rule send the flow another way? */
static __always_inline bool mtn_passes_fib_rule(struct mtn_new_flow *s)
{
	if (!config.n_fib_rules ||
	    !mtn_selected_elsewhere(&s->key, s->mark, LOOPBACK_IFINDEX, s->uid,
				    s->dsfield_unknown ? MTN_DSFIELD_UNKNOWN : s->dsfield))
		return false;
	mtn_count(MTN_PLACE_PASS_FIB_RULE);
	return true;
}

/* The socket's DS field, where some rule asks for it. Kernels do not tell it of all sockets of IPv6 with mapped addresses. */
static __always_inline void mtn_read_dsfield(struct bpf_sock_addr *ctx, struct mtn_new_flow *s)
{
	int tos = 0, failed;

	if (!config.rules_need_dscp && !config.fib_rules_need_dscp)
		return;
	if (s->key.ipv6)
		failed = bpf_getsockopt(ctx, SOL_IPV6, IPV6_TCLASS, &tos, sizeof(tos));
	else
		failed = bpf_getsockopt(ctx, SOL_IP, IP_TOS, &tos, sizeof(tos));
	s->dsfield = failed ? 0 : tos;
	s->dsfield_unknown = failed;
}

/*
 * Is all of a socket's mark one of ours, as an earlier connect() left it there? With other bits it is
 * its owner's, whichever of our bits it happens to have.
 */
static __always_inline bool mtn_is_own_mark(__u32 mark)
{
	bool is_own = false;
	__u32 i;

	if (!mark || (mark & ~config.mark_mask))
		return false;
	for (i = 0; i < MTN_MAX_PATHS; i++) {
		if (mtn_path_at(i)->mark == mark) {
			is_own = true;
			break;
		}
	}
	return is_own;
}

static __always_inline bool mtn_set_mark(struct bpf_sock_addr *ctx, __u32 now, __u32 mark)
{
	if (mark == now)
		return true;
	if (bpf_setsockopt(ctx, SOL_SOCKET, SO_MARK, &mark, sizeof(mark))) {
		mtn_count(MTN_PLACE_PASS_FAILED);
		return false;
	}
	return true;
}

#include "unconnected.h"

/* A socket of the namespace that is steered? */
static __always_inline bool mtn_is_mine(struct bpf_sock_addr *ctx)
{
	return config.mode == MTN_MODE_STEER && bpf_get_netns_cookie(ctx) == config.netns_cookie &&
	       !mtn_passes_unattended();
}

/* The same at connect(). While nothing is placed, a connection goes as the kernel sends it, after an undone one, too. */
static __always_inline bool mtn_is_mine_to_connect(struct bpf_sock_addr *ctx)
{
	if (mtn_is_mine(ctx))
		return true;
	if (bpf_get_netns_cookie(ctx) == config.netns_cookie)
		mtn_forget_mark(ctx);
	return false;
}

/*
 * connect() to the destination in @s. A mark of ours that is there is from an earlier connect() of
 * the same socket: it goes when the new destination is not to have one.
 */
static __always_inline int mtn_connect(struct bpf_sock_addr *ctx, struct mtn_new_flow *s)
{
	struct bpf_sock *sk = ctx->sk;
	__u32 group, rule, now, path = MTN_MAX_PATHS;
	bool left = false;
	__u64 cookie;

	if (!sk)
		return ALLOW;
	now = sk->mark;
	s->mark = mtn_is_own_mark(now) ? 0 : now;
	/* A look-up by our mark for another device than the socket's would meet `unreachable` first. */
	if (sk->bound_dev_if || mtn_has_source(sk) || mtn_has_own_device(sk, s->key.ipv6)) {
		mtn_count(MTN_PLACE_PASS_BOUND);
		/* Bound since it was connected. One that still is has our source besides. */
		if (sk->state == BPF_TCP_CLOSE)
			mtn_set_mark(ctx, now, s->mark);
		return ALLOW;
	}
	s->key.proto = ctx->protocol;
	s->key.dport = ctx->user_port;
	s->prefer = MTN_MAX_PATHS;
	group = mtn_dest_is_local(&s->key) ? MTN_NOT_OURS : mtn_group_of(&s->key);
	if (group >= MTN_MAX_GROUPS)
		goto out;
	s->uid = mtn_uid(sk);
	/* 0 until the kernel gives it one, which it does later. */
	s->key.sport = bpf_htons(sk->src_port);
	mtn_read_dsfield(ctx, s);
	if (mtn_passes_cgroup(sk) || mtn_passes_fib_rule(s))
		goto out;
	rule = config.n_rules ? mtn_local_rule(s) : MTN_MAX_RULES;
	/* A rule adds our bits to a mark of the owner's, unless they would take the place of his. */
	if (rule >= MTN_MAX_RULES ? s->mark : s->mark & config.mark_mask) {
		mtn_count(MTN_PLACE_PASS_MARKED);
		return ALLOW;
	}
	if (rule >= MTN_MAX_RULES && mtn_has_own_port(sk)) {
		if (s->key.proto == IPPROTO_UDP) {
			mtn_count(MTN_PLACE_PASS_PORT);
			goto out;
		}
		/* Several connections from one port, as through two NATs (RFC 5128): one address to all. */
		s->with_kernel = MTN_PLACE_PASS_PORT;
	} else if (mtn_is_mptcp(ctx)) {
		s->with_kernel = MTN_PLACE_PASS_MPTCP;
	}
	cookie = bpf_get_socket_cookie(ctx);
	s->salt = cookie ^ cookie >> 32;
	if (s->key.proto == IPPROTO_UDP)
		s->prefer = mtn_sent_by(s, cookie, group, &left);
	if (left && rule >= MTN_MAX_RULES) {
		mtn_count(MTN_PLACE_PASS_RUNNING);
		goto out;
	}
	path = mtn_place_local(s, group, rule);
out:
	if (path >= MTN_MAX_PATHS) {
		mtn_set_mark(ctx, now, s->mark);
		return ALLOW;
	}
	if (mtn_set_mark(ctx, now, s->mark | mtn_path_at(path)->mark))
		mtn_placed(s, path, MTN_PLACE_PLACED_CONNECT);
	return ALLOW;
}

SEC("cgroup/connect4")
int mountain_con4(struct bpf_sock_addr *ctx)
{
	struct mtn_new_flow s = {};

	if (!mtn_is_mine_to_connect(ctx))
		return ALLOW;
	s.key.daddr[0] = ctx->user_ip4;
	return mtn_connect(ctx, &s);
}

SEC("cgroup/connect6")
int mountain_con6(struct bpf_sock_addr *ctx)
{
	struct mtn_new_flow s = {};

	if (!mtn_is_mine_to_connect(ctx))
		return ALLOW;
	if (!ctx->user_ip6[0] && !ctx->user_ip6[1] && ctx->user_ip6[2] == bpf_htonl(0xffff)) {
		s.key.daddr[0] = ctx->user_ip6[3];	/* IPv4-mapped */
	} else {
		s.key.daddr[0] = ctx->user_ip6[0];
		s.key.daddr[1] = ctx->user_ip6[1];
		s.key.daddr[2] = ctx->user_ip6[2];
		s.key.daddr[3] = ctx->user_ip6[3];
		s.key.ipv6 = 1;
	}
	return mtn_connect(ctx, &s);
}

SEC("cgroup/sendmsg4")
int mountain_msg4(struct bpf_sock_addr *ctx)
{
	struct mtn_new_flow s = {};
	__u32 path, addr, stale;

	if (!mtn_is_mine(ctx))
		return ALLOW;
	stale = mtn_forget_mark(ctx);
	/* The source is set: by bind(), by connect(), or in this packet (IP_PKTINFO). */
	if (ctx->msg_src_ip4)
		return ALLOW;
	s.key.daddr[0] = ctx->user_ip4;
	path = mtn_place_unconnected(ctx, &s, stale);
	if (path >= MTN_MAX_PATHS)
		return ALLOW;
	addr = mtn_path_at(path)->addr[0];
	if (addr)
		ctx->msg_src_ip4 = addr;
	else
		mtn_count(MTN_PLACE_PASS_NO_PATH);
	return ALLOW;
}

SEC("cgroup/sendmsg6")
int mountain_msg6(struct bpf_sock_addr *ctx)
{
	struct mtn_new_flow s = {};
	__u32 path, a, b, c, d, stale;

	if (!mtn_is_mine(ctx))
		return ALLOW;
	stale = mtn_forget_mark(ctx);
	if (ctx->msg_src_ip6[0] || ctx->msg_src_ip6[1] || ctx->msg_src_ip6[2] || ctx->msg_src_ip6[3])
		return ALLOW;
	/* IPv4-mapped destinations come by sendmsg4. */
	s.key.daddr[0] = ctx->user_ip6[0];
	s.key.daddr[1] = ctx->user_ip6[1];
	s.key.daddr[2] = ctx->user_ip6[2];
	s.key.daddr[3] = ctx->user_ip6[3];
	s.key.ipv6 = 1;
	path = mtn_place_unconnected(ctx, &s, stale);
	if (path >= MTN_MAX_PATHS)
		return ALLOW;
	a = mtn_path_at(path)->addr[0];
	b = mtn_path_at(path)->addr[1];
	c = mtn_path_at(path)->addr[2];
	d = mtn_path_at(path)->addr[3];
	if (a | b | c | d) {
		ctx->msg_src_ip6[0] = a;
		ctx->msg_src_ip6[1] = b;
		ctx->msg_src_ip6[2] = c;
		ctx->msg_src_ip6[3] = d;
	} else {
		mtn_count(MTN_PLACE_PASS_NO_PATH);
	}
	return ALLOW;
}

#include "connection.h"
#include "forwarded.h"

SEC("tcx/ingress")
int mountain_lan(struct __sk_buff *skb)
{
	/* Before all that it stands for: what is found out by an older one is not remembered. */
	__u32 generation = *(volatile __u32 *)&config.generation;
	__u32 forwarded = *(volatile __u32 *)&config.forwarded;
	struct mtn_pkt pkt = {};
	__u32 mark = 0;
	bool is_tcp;

	if (forwarded == MTN_FORWARDED_LEFT)
		return TC_ACT_UNSPEC;
	if (skb->protocol != bpf_htons(ETH_P_IP) && skb->protocol != bpf_htons(ETH_P_IPV6))
		return TC_ACT_UNSPEC;
	if (mtn_is_others(skb) || mtn_parse(skb, &pkt))
		return TC_ACT_UNSPEC;
	/* Of a datagram in fragments the first one's mark is the datagram's. */
	if (pkt.flags & (MTN_PKT_FRAG_LATER | MTN_PKT_ICMP_ERROR))
		return TC_ACT_UNSPEC;
	is_tcp = pkt.key.proto == IPPROTO_TCP;
	if (is_tcp && !(pkt.flags & MTN_PKT_SYN)) {
		if (!skb->mark)
			skb->mark = mtn_mark_of(&pkt.key);
		return TC_ACT_UNSPEC;
	}
	if (is_tcp && pkt.flags & MTN_PKT_ACK) {
		mtn_forget(&pkt.key);
		return TC_ACT_UNSPEC;
	}
	if (config.mode == MTN_MODE_STEER && forwarded == MTN_FORWARDED_PLACED)
		mark = mtn_mark_new(skb, &pkt, generation);
	if (is_tcp)
		mtn_remember(&pkt.key, skb->mark ? 0 : mark);
	skb->mark |= mark;
	return TC_ACT_UNSPEC;
}

/* Types that only maps use reach the skeleton through variables that mention them. */
struct mtn_unconnected_key unused_unconnected_key;
struct mtn_unconnected unused_unconnected;
struct mtn_connection unused_connection;
struct mtn_flow_key unused_flow_key;
enum mtn_any unused_any;
enum mtn_forwarded unused_forwarded;
enum mtn_placement_stat unused_stat;
enum mtn_rule_wants unused_wants;
