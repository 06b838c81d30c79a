// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * redirect: UDP and TCP traffic to one address:port goes to another one, both directions rewritten.
 *
 * Theory of operation
 * ===================
 *
 * The first packet that a rule names makes a pair of flows, one for each direction: client -> from
 * and to -> client. What is constant in a flow is computed once: new addresses and ports, and what
 * they add to the checksums, which are one's complement sums (RFC 1624). Every later packet costs
 * one look-up and a few stores. Pairs are made with BPF_NOEXIST, the reverse first; where that is
 * taken, because the client speaks to the same target by another rule from the same port, the flow
 * gets another source port; where the second cannot be made the first is taken back.
 *
 * A pair begins half-open, in LRU tables. It is established once the client has answered the target:
 * then it moves to plain tables, where nothing but idleness ends it. So a flood of forged first
 * packets pushes out half-open flows only. There is no process and no timer to end idle flows: each flow
 * that is established looks at two others, in turn. A flow is idle for as long as connection tracking
 * would keep it; then its port may be taken, and what comes back on it is left alone.
 *
 * Clients may speak to a rule's target themselves, through this host. The target's answers look alike
 * then, so those flows have pairs of their own (MTN_RD_DIRECT), which turn addresses and ports into
 * themselves: whoever comes second gets another source port. User space keeps a rule for that
 * beside each target.
 *
 *   hook          direction   MTN_RD_TCX        _TCX_PEER        _XDP            _XDP_REDIRECT
 *   XDP           forward     -                 -                rewrite, pass   rewrite, redirect
 *   XDP           reply       -                 -                -               rewrite, redirect
 *   tcx ingress   forward     rewrite, pass     rewrite, peer    (done by XDP)   rewrite, neighbour
 *   tcx ingress   reply       -                 rewrite, peer    -               rewrite, neighbour
 *   tcx egress    reply       rewrite           rewrite          rewrite         rewrite
 *
 * Each hook takes over what the one before could not do and left untouched: no neighbour known, too
 * big for the egress route, lifetime over, options of IPv4 and those of IPv6 for every hop. So the kernel answers with
 * ICMP where it has to, resolves neighbours, and drops packets for their options: source routes unless
 * `accept_source_route` is set, and what it does not know. One in 64 look-ups of a flow's egress route is left to it
 * on purpose, so that neighbour entries stay fresh.
 * A reply that the kernel forwards is rewritten at egress, because at ingress it would turn into a packet from an
 * address of this host, which the kernel takes for a forgery (a martian). What XDP leaves, and replies by _TCX_PEER, tcx
 * sends itself, by the kernel's routes: connection tracking has not seen the other packets, and might translate these.
 * Fragments are not for XDP: all of a datagram go one way.
 *
 * What follows the firewall says so several times a second. Once it has been silent for MTN_ALIVE_S (alive.h), every
 * packet passes, to the rule of nftables that lies underneath.
 *
 * With MTN_RD_SNAT (hairpins) both directions are redirected, never passed, for the same reason.
 *
 * ICMP errors: those about the flows above are translated at tcx, in both directions. Fragments after the
 * first have no ports and follow the first one by their id.
 *
 * Checksums: at tcx a packet of a local sender may have a checksum that is yet to be completed
 * (CHECKSUM_PARTIAL: the field holds the sum of the pseudo-header, not complemented), or a sum over
 * all of it by the device (CHECKSUM_COMPLETE). XDP cannot see either; user space uses it only where
 * neither occurs.
 */
#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/in6.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>

#include "../common/alive.h"
#include "redirect.h"

_Static_assert(sizeof(struct mtn_rd_flow4) == 64, "a flow of IPv4 is one cache line");

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define AF_INET		2
#define AF_INET6	10
#define IP_MF		0x2000
#define IP_OFFSET	0x1fff
/* include/linux/skbuff.h */
#define CHECKSUM_COMPLETE	2
#define CHECKSUM_PARTIAL	3
#define PACKET_HOST		0
#define MTN_RD_L4_MAX		256	/* offset of a transport header, at most */
/* How long a flow keeps its egress route, and leaves its other direction alone. */
#define MTN_RD_FIB_NS		(250 * 1000 * 1000ULL)
#define MTN_RD_TOUCH_NS		(1000 * 1000 * 1000ULL)
/* One in this many look-ups goes through the kernel, which keeps neighbours fresh. */
#define MTN_RD_FRESHEN		64
/* Source ports that are tried for a new flow. */
#define MTN_RD_TRIES		16
/* Established flows that are looked at when one more is, and when the table is full. */
#define MTN_RD_AGE_EACH		2
#define MTN_RD_AGE_MAX		16
/* RFC 8200's extension headers before a fragment header or a transport header. */
#define MTN_RD_EXT_HDRS		4
/* Bytes of headers that are read in place. */
#define MTN_RD_HEADERS		(ETH_HLEN + sizeof(struct ipv6hdr) + sizeof(struct tcphdr))

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct sk_buff {
	unsigned char *head;
	unsigned char *data;
	__u16 csum_start;
	__u8 ip_summed : 2;
};
#pragma clang attribute pop

extern void *bpf_cast_to_kern_ctx(void *) __ksym;

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MTN_RD_ESTABLISHED);
	__type(key, struct mtn_rd_key4);
	__type(value, struct mtn_rd_flow4);
} flows4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MTN_RD_ESTABLISHED);
	__type(key, struct mtn_rd_key6);
	__type(value, struct mtn_rd_flow6);
} flows6 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, MTN_RD_HALF_OPEN);
	__type(key, struct mtn_rd_key4);
	__type(value, struct mtn_rd_half4);
} half4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, MTN_RD_HALF_OPEN);
	__type(key, struct mtn_rd_key6);
	__type(value, struct mtn_rd_half6);
} half6 SEC(".maps");

/* Established flows of both families. One that was deleted and made again may stand here twice. */
struct {
	__uint(type, BPF_MAP_TYPE_QUEUE);
	__uint(max_entries, 2 * MTN_RD_ESTABLISHED);
	__type(value, struct mtn_rd_age);
} rd_ages SEC(".maps");

/* Rules, and for each target that of its direct flows. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 2 * MTN_RD_MAX_RULES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct mtn_rd_rule_key);
	__type(value, struct mtn_rd_rule);
} rules SEC(".maps");

/* Addresses of this host, alone and by the range. The value means nothing. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, MTN_RD_MAX_OWN);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct mtn_rd_own);
	__type(value, __u32);
} own_addresses SEC(".maps");

/* When the process that watches last followed the host (alive.h). 0: the rules are there without one. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} rd_alive SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, MTN_RD_MAX_RULES);
	__type(key, __u32);
	__type(value, struct mtn_rd_stats);
} rule_stats SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_HASH);
	__uint(max_entries, MTN_RD_MAX_RULES * MTN_RD_DROP_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct mtn_rd_drop_key);
	__type(value, __u64);
} rule_drops SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct mtn_rd_frag_key);
	__type(value, struct mtn_rd_frag);
} rd_frags SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MTN_RD_MAX_RULES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct mtn_rd_log_limit);
} log_limits SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 18);
} log_events SEC(".maps");

/* Only so that the type is described to user space. */
struct mtn_rd_event unused_event;
enum mtn_rd_backend unused_backend;
enum mtn_rd_flags unused_flags;
enum mtn_rd_state unused_state;
enum mtn_rd_drop unused_drop;

#include "flow.h"
#include "parse.h"
#include "host.h"
#include "pair.h"
#include "egress.h"
#include "go.h"
#include "icmp.h"

/*
 * CHECKSUM_* of the transport header at offset @l4; XDP is used only where a packet's checksum is what
 * it should be. Of a tunnel it may be an inner header's that is yet to be completed.
 */
static __always_inline int mtn_ip_summed(void *ctx, __u32 l4, const int hook)
{
	struct sk_buff *skb;
	int summed;

	if (hook == MTN_HOOK_XDP)
		return 0;
	skb = bpf_cast_to_kern_ctx(ctx);
	summed = BPF_CORE_READ_BITFIELD(skb, ip_summed);
	if (summed == CHECKSUM_PARTIAL &&
	    (__u32)skb->csum_start != (__u32)((long)skb->data - (long)skb->head) + l4)
		return 0;
	return summed;
}

/*
 * Writes the ports, and the checksum over them. Returns what the transport header adds to a sum over
 * the packet, as replacing its addresses would.
 */
static __always_inline __u16 mtn_rd_put_ports(struct mtn_rd_flow *f, void *l4, void *data_end,
					      __u8 proto, int summed)
{
	bool tcp = proto == IPPROTO_TCP;
	__u16 *check = l4 + (tcp ? offsetof(struct tcphdr, check) : offsetof(struct udphdr, check));
	struct mtn_rd_ports *ports = l4;
	__u16 new;

	/* For the verifier, which has forgotten how the protocol goes with what was checked. */
	if ((void *)(check + 1) > data_end || (void *)(ports + 1) > data_end)
		return 0;
	ports->sport = f->sport;
	ports->dport = f->dport;
	/* 0 says that there is none (RFC 768): the ports go unnoticed. */
	if (!tcp && !*check)
		return mtn_sum(f->l4_delta, ~f->addr_delta);
	if (summed == CHECKSUM_PARTIAL) {
		*check = mtn_sum(*check, f->addr_delta);
		return 0;
	}
	/* A computed 0 is sent as its equal. */
	new = ~mtn_sum(~*check, f->l4_delta);
	*check = new || tcp ? new : 0xffff;
	return ~f->addr_delta;
}

/* Packets and bytes on the wire: a GSO packet's headers stand before each of its segments. */
static __always_inline void mtn_rd_account(void *ctx, struct mtn_rd_flow *f, __u32 len,
					   __u32 headers, const int hook)
{
	__u32 dir = f->flags & MTN_RD_REPLY ? 1 : 0, segs = 1, rule = f->rule;
	struct mtn_rd_stats *stats = bpf_map_lookup_elem(&rule_stats, &rule);

	if (!stats)
		return;
	if (hook != MTN_HOOK_XDP) {
		struct __sk_buff *skb = ctx;

		if (skb->gso_segs > 1) {
			segs = skb->gso_segs;
			len = skb->len - ETH_HLEN + (segs - 1) * headers;
		}
	}
	stats->packets[dir] += segs;
	stats->bytes[dir] += len;
}

static __always_inline bool mtn_rd_is_unattended(__u64 now)
{
	__u32 only = 0;
	__u64 *alive_ns = bpf_map_lookup_elem(&rd_alive, &only);

	return alive_ns && mtn_is_unattended(*alive_ns, now);
}

static __always_inline int mtn_rd_ipv4(void *ctx, void *data, void *data_end, __u64 now,
				       const int hook)
{
	struct ethhdr *eth = data;
	struct iphdr *ip = data + ETH_HLEN;
	struct mtn_rd_frag_key frag = {};
	struct mtn_rd_key4 key = {};
	struct mtn_rd_key6 wide = {};
	struct mtn_rd_look look = {};
	struct mtn_rd_half4 *half = NULL;
	struct mtn_rd_flow4 *flow;
	__u32 headers, l4_off;
	bool later;
	int ret;
	void *l4;

	if ((void *)(ip + 1) > data_end || ip->version != 4 || ip->ihl < 5)
		return mtn_pass(hook);
	if (ip->protocol == IPPROTO_ICMP && hook != MTN_HOOK_XDP) {
		mtn_rd_icmp4_skb(ctx, hook == MTN_HOOK_OUT);
		return TC_ACT_UNSPEC;
	}
	if (ip->protocol != IPPROTO_UDP && ip->protocol != IPPROTO_TCP)
		return mtn_pass(hook);
	l4_off = ETH_HLEN + ip->ihl * 4;
	l4 = data + l4_off;
	key.saddr = ip->saddr;
	key.daddr = ip->daddr;
	key.proto = ip->protocol;
	later = ip->frag_off & bpf_htons(IP_OFFSET);
	look.options = ip->ihl > 5;
	look.fragment = ip->frag_off & bpf_htons(IP_MF | IP_OFFSET);
	if (look.fragment) {
		frag.saddr[0] = ip->saddr;
		frag.daddr[0] = ip->daddr;
		frag.id = ip->id;
		frag.proto = ip->protocol;
		if (!later)
			mtn_rd_frag_forget(&frag);
	}
	if (later) {
		__u32 ports = mtn_rd_frag_ports(&frag);

		if (!ports)
			return mtn_pass(hook);
		key.sport = ports & 0xffff;
		key.dport = ports >> 16;
		headers = 0;
	} else {
		headers = mtn_rd_transport(&key, &look, l4, data_end);
		if (!headers)
			return mtn_pass(hook);
		headers += ip->ihl * 4;
	}
	look.now = now;
	look.len = bpf_ntohs(ip->tot_len);
	look.headers = headers;
	look.proto = ip->protocol;
	look.ttl = ip->ttl;
	look.tos = ip->tos;
	flow = bpf_map_lookup_elem(&flows4, &key);
	if (!flow) {
		half = bpf_map_lookup_elem(&half4, &key);
		if (!half && (hook == MTN_HOOK_OUT || later))
			return mtn_pass(hook);
		flow = half ? &half->flow : NULL;
	}
	if (!flow) {
		mtn_widen_key(&key, &wide);
		ret = mtn_rd_begin(ctx, &wide, &look, false, hook);
		if (ret == MTN_RD_DROP)
			return hook == MTN_HOOK_XDP ? XDP_DROP : TC_ACT_SHOT;
		flow = ret ? NULL : mtn_rd_find4(&key);
		if (!flow)
			return mtn_pass(hook);
	}
	/* Whichever hook handles the first fragment must find the others. */
	if (!later && ip->frag_off & bpf_htons(IP_MF))
		mtn_rd_frag_remember(&frag, (__u32)key.dport << 16 | key.sport);

	ret = mtn_rd_go(ctx, flow, &look, eth->h_dest, false, hook);
	if (ret == MTN_GO_UNTOUCHED)
		return mtn_pass(hook);
	if (ret == MTN_GO_DROP)
		return TC_ACT_SHOT;
	if (mtn_rd_is_due(&flow->f, &look, half ? half->state : 0)) {
		int state;

		mtn_widen_key(&key, &wide);
		state = mtn_rd_touch(&wide, &look, false);

		/* The half-open entry may be another flow's by now. */
		if (state == MTN_RD_ESTABLISHED_NOW)
			flow = bpf_map_lookup_elem(&flows4, &key);
		if (state == MTN_RD_GONE || !flow)
			return mtn_pass(hook);
	}
	if (mtn_rd_is_identity(&flow->f, key.sport, key.dport))
		return mtn_pass(hook);
	if (flow->f.flags & MTN_RD_LOG)
		mtn_rd_log4(&key, flow, &look);
	if (!(flow->f.flags & MTN_RD_DIRECT))
		mtn_rd_account(ctx, &flow->f, look.len, headers, hook);

	if (!later) {
		int summed = mtn_ip_summed(ctx, l4_off, hook);
		__u16 diff = mtn_rd_put_ports(&flow->f, l4, data_end, key.proto, summed);

		/* Addresses and IP checksum make up for each other. */
		if (summed == CHECKSUM_COMPLETE)
			bpf_csum_update(ctx, diff);
	}
	ip->saddr = flow->saddr;
	ip->daddr = flow->daddr;
	ip->check = ~mtn_sum(~ip->check, flow->f.addr_delta);
	if (ret != MTN_GO_PASS) {
		ip->ttl--;
		ip->check = ~mtn_sum(~ip->check, (__u16)~bpf_htons(0x0100));
	}
	if (ret == MTN_GO_FAST)
		__builtin_memcpy(eth, flow->f.macs, sizeof(flow->f.macs));
	return mtn_rd_send(&flow->f, &look, ret, hook);
}

/*
 * Whether there are options for every hop. Not those that say how long a packet of the kernel's own is which is yet to
 * be cut into segments: BIG TCP, which leaves the length in the header 0.
 */
static __always_inline bool mtn_rd_has_options6(void *ctx, const struct ipv6hdr *ip, const int hook)
{
	if (ip->nexthdr != IPPROTO_HOPOPTS)
		return false;
	if (hook == MTN_HOOK_XDP || ip->payload_len)
		return true;
	return !((struct __sk_buff *)ctx)->gso_size;
}

static __always_inline int mtn_rd_ipv6(void *ctx, void *data, void *data_end, __u64 now,
				       const int hook)
{
	struct ethhdr *eth = data;
	struct ipv6hdr *ip = data + ETH_HLEN;
	struct mtn_rd_at at = { .l4 = ETH_HLEN + sizeof(*ip) };
	struct mtn_rd_frag_key frag = {};
	struct mtn_rd_key6 key = {};
	struct mtn_rd_look look = {};
	struct mtn_rd_half6 *half = NULL;
	struct mtn_rd_flow6 *flow;
	__u32 headers = 0;
	int ret, summed;
	__u16 diff;
	void *l4;

	if ((void *)(ip + 1) > data_end || ip->version != 6)
		return mtn_pass(hook);
	at.proto = ip->nexthdr;
	if (at.proto == IPPROTO_ICMPV6 && hook != MTN_HOOK_XDP) {
		mtn_rd_icmp6_skb(ctx, hook == MTN_HOOK_OUT);
		return TC_ACT_UNSPEC;
	}
	if (at.proto != IPPROTO_UDP && at.proto != IPPROTO_TCP) {
		if (hook == MTN_HOOK_XDP ? mtn_rd_ext_xdp(ctx, &at) : mtn_rd_ext_skb(ctx, &at))
			return mtn_pass(hook);
		if (at.proto != IPPROTO_UDP && at.proto != IPPROTO_TCP)
			return mtn_pass(hook);
	}
	if (at.l4 > MTN_RD_L4_MAX)
		return mtn_pass(hook);
	l4 = data + at.l4;
	__builtin_memcpy(key.saddr, &ip->saddr, 16);
	__builtin_memcpy(key.daddr, &ip->daddr, 16);
	key.proto = at.proto;
	look.fragment = at.first || at.later;
	if (look.fragment) {
		__builtin_memcpy(frag.saddr, key.saddr, 16);
		__builtin_memcpy(frag.daddr, key.daddr, 16);
		/* The protocol is not in a later fragment: its next header is what follows the fragment header. */
		frag.id = at.frag_id;
		if (at.first)
			mtn_rd_frag_forget(&frag);
	}
	if (at.later) {
		__u32 ports = mtn_rd_frag_ports(&frag);

		if (!ports)
			return mtn_pass(hook);
		key.sport = ports & 0xffff;
		key.dport = ports >> 16;
	} else {
		headers = mtn_rd_transport(&key, &look, l4, data_end);
		if (!headers)
			return mtn_pass(hook);
		headers += at.l4 - ETH_HLEN;
	}
	look.now = now;
	look.len = bpf_ntohs(ip->payload_len) + sizeof(*ip);
	look.headers = headers;
	look.proto = at.proto;
	look.ttl = ip->hop_limit;
	look.options = mtn_rd_has_options6(ctx, ip, hook);
	flow = bpf_map_lookup_elem(&flows6, &key);
	if (!flow) {
		half = bpf_map_lookup_elem(&half6, &key);
		if (!half && (hook == MTN_HOOK_OUT || at.later))
			return mtn_pass(hook);
		flow = half ? &half->flow : NULL;
	}
	if (!flow) {
		ret = mtn_rd_begin(ctx, &key, &look, true, hook);
		if (ret == MTN_RD_DROP)
			return hook == MTN_HOOK_XDP ? XDP_DROP : TC_ACT_SHOT;
		flow = ret ? NULL : mtn_rd_find6(&key);
		if (!flow)
			return mtn_pass(hook);
	}
	if (at.first)
		mtn_rd_frag_remember(&frag, (__u32)key.dport << 16 | key.sport);

	ret = mtn_rd_go(ctx, flow, &look, eth->h_dest, true, hook);
	if (ret == MTN_GO_UNTOUCHED)
		return mtn_pass(hook);
	if (ret == MTN_GO_DROP)
		return TC_ACT_SHOT;
	if (mtn_rd_is_due(&flow->f, &look, half ? half->state : 0)) {
		int state = mtn_rd_touch(&key, &look, true);

		/* The half-open entry may be another flow's by now. */
		if (state == MTN_RD_ESTABLISHED_NOW)
			flow = bpf_map_lookup_elem(&flows6, &key);
		if (state == MTN_RD_GONE || !flow)
			return mtn_pass(hook);
	}
	if (mtn_rd_is_identity(&flow->f, key.sport, key.dport))
		return mtn_pass(hook);
	if (flow->f.flags & MTN_RD_LOG)
		mtn_rd_log6(&key, flow, &look);
	if (!(flow->f.flags & MTN_RD_DIRECT))
		mtn_rd_account(ctx, &flow->f, look.len, headers, hook);

	summed = mtn_ip_summed(ctx, at.l4, hook);
	diff = flow->f.addr_delta;
	if (!at.later)
		diff = mtn_sum(diff, mtn_rd_put_ports(&flow->f, l4, data_end, key.proto, summed));
	if (summed == CHECKSUM_COMPLETE)
		bpf_csum_update(ctx, diff);
	__builtin_memcpy(&ip->saddr, flow->saddr, 16);
	__builtin_memcpy(&ip->daddr, flow->daddr, 16);
	if (ret != MTN_GO_PASS) {
		ip->hop_limit--;
		if (summed == CHECKSUM_COMPLETE)
			bpf_csum_update(ctx, (__u16)~bpf_htons(1));
	}
	if (ret == MTN_GO_FAST)
		__builtin_memcpy(eth, flow->f.macs, sizeof(flow->f.macs));
	return mtn_rd_send(&flow->f, &look, ret, hook);
}

static __always_inline int mtn_redirect(void *ctx, void *data, void *data_end, const int hook)
{
	__u64 now = bpf_ktime_get_coarse_ns();
	struct ethhdr *eth = data;

	if ((void *)(eth + 1) > data_end || mtn_rd_is_unattended(now))
		return mtn_pass(hook);
	if (eth->h_proto == bpf_htons(ETH_P_IP))
		return mtn_rd_ipv4(ctx, data, data_end, now, hook);
	if (eth->h_proto == bpf_htons(ETH_P_IPV6))
		return mtn_rd_ipv6(ctx, data, data_end, now, hook);
	return mtn_pass(hook);
}

SEC("xdp.frags")
int mtn_redirect_xdp(struct xdp_md *ctx)
{
	return mtn_redirect(ctx, (void *)(long)ctx->data, (void *)(long)ctx->data_end, MTN_HOOK_XDP);
}

/* Headers are nearly always in the linear part already. */
static __always_inline void mtn_pull(struct __sk_buff *skb)
{
	if (skb->data_end - skb->data < MTN_RD_HEADERS)
		bpf_skb_pull_data(skb, skb->len < MTN_RD_L4_MAX ? skb->len : MTN_RD_L4_MAX);
}

SEC("tcx/ingress")
int mtn_redirect_in(struct __sk_buff *skb)
{
	/* Tagged frames belong to another device; others are not for this host. */
	if (skb->vlan_present || skb->pkt_type != PACKET_HOST)
		return TC_ACT_UNSPEC;
	mtn_pull(skb);
	return mtn_redirect(skb, (void *)(long)skb->data, (void *)(long)skb->data_end, MTN_HOOK_IN);
}

/* In place of mtn_redirect_in() where XDP does the rest: ICMP errors only. */
SEC("tcx/ingress")
int mtn_redirect_icmp(struct __sk_buff *skb)
{
	__u8 proto = 0;

	if (skb->vlan_present || skb->pkt_type != PACKET_HOST)
		return TC_ACT_UNSPEC;
	if (mtn_rd_is_unattended(bpf_ktime_get_coarse_ns()))
		return TC_ACT_UNSPEC;
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		bpf_skb_load_bytes(skb, ETH_HLEN + offsetof(struct iphdr, protocol), &proto, 1);
		if (proto == IPPROTO_ICMP)
			mtn_rd_icmp4_skb(skb, false);
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		bpf_skb_load_bytes(skb, ETH_HLEN + offsetof(struct ipv6hdr, nexthdr), &proto, 1);
		if (proto == IPPROTO_ICMPV6)
			mtn_rd_icmp6_skb(skb, false);
	}
	return TC_ACT_UNSPEC;
}

SEC("tcx/egress")
int mtn_redirect_out(struct __sk_buff *skb)
{
	if (skb->vlan_present)
		return TC_ACT_UNSPEC;
	mtn_pull(skb);
	return mtn_redirect(skb, (void *)(long)skb->data, (void *)(long)skb->data_end, MTN_HOOK_OUT);
}
