// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * steer: keep each flow on the steadiest of the paths that the routing table offers.
 *
 * Theory of operation
 * ===================
 *
 * The program sits at tcx egress of every device that a multipath route uses. There the kernel has chosen a next hop
 * and written its link-layer address, so device and destination MAC tell which path a packet is on. User space (the
 * daemon) measures the paths and writes, per group of paths, which of them each class of traffic may use (union
 * mtn_masks). This program finds a packet's flow, keeps the flow on its path while it may, and otherwise moves it so
 * that its packets cannot overtake each other. Everything it does not understand passes as the kernel sent it. While
 * the daemon hangs or is stopped, every packet passes (alive.h).
 *
 *   packet -> handed over to this path by the run before? -> account, pass     (second run)
 *          -> on a known path? sent here by this host's routing (origin.h)? to a steerable
 *             destination? socket not bound? not chosen by another ip rule?      no -> pass
 *          -> flow in the table?
 *               yes: keep, or move (mtn_flow_next), update time and class
 *               no:  group by destination (LPM; a more specific route is "not ours"), source
 *                    known to be movable (sources.h) -> choose by weighted rendezvous hashing
 *          -> chosen path is this one -> account, pass
 *          -> else bpf_redirect_neigh() to the chosen path's device. That it is up, its neighbour is
 *             known valid, the packet fits its MTU and both devices speak Ethernet is part of the choice
 *
 * When a flow may leave its path:
 *   - path dead: with this packet;
 *   - TCP whose sender looks for another path (rehash.h): with this packet;
 *   - path ejected, latency flow: with this packet (a late packet is a lost packet to it). Where the path is eligible
 *     as well, more flows have come to it than it carries: those leave that the hash gives to another one;
 *   - path filled by bulk flows while another one has room, bulk flow that the hash gives to another one; path whose
 *     weight has fallen, flow that the hash gives to another one; or path no longer eligible: once the gap since the
 *     flow's last packet exceeds the flowlet gap, recent maximum delay of the old path - minimum delay of the new one +
 *     margin, which makes reordering impossible (FLARE, LetFlow); or after force_after_ns without such a gap.
 *
 * A packet has passed Netfilter for the device that the kernel chose. User space compares what the
 * firewall does for the devices of a group and takes the group's prefixes out where that differs.
 * For programs at the egress of a socket's cgroup it looks itself (cgroups.h).
 *
 * Why there are no loops: a redirected packet enters the chosen device's egress, and so this
 * program, on the same CPU before anything else can run there (softirqs are off). The first run
 * leaves a note for it (`handover`), and a run that finds its note never redirects.
 *
 * Time is the coarse clock, which lags by up to a tick: reading the exact clock is expensive, above all in virtual
 * machines. The exact clock is read where a tick matters, for flowlet gaps. Otherwise the two are the same clock.
 *
 * Concurrency: two CPUs may work on one flow at a time; its fields are plain stores, and the worst
 * outcome is one packet more on the old path. The verdict on a group is one 64-bit word.
 *
 * The verifier walks a global function once and learns nothing of its result. It walks a static one
 * from each call, and goes on from each result. So the functions with many results are global. Loops are plain ones with a
 * bound, and call such functions: that of Linux 6.8 walks a loop of bpf_for() anew for each value that is left in any
 * register, used or not, and may never end. It also takes each call to need 32 bytes of the stack's 512 at least.
 *
 * The argmax-load baseline (averages.h) is a program of its own from this source, see `argmax_load`.
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
#include <linux/version.h>
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 4, 0)
/* Debian 12's headers are older than the kernels that this program runs on. */
struct bpf_iter_num {
	__u64 __opaque[1];
} __attribute__((aligned(8)));
#endif
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>

#define AF_INET		2
#define AF_INET6	10
/* Mean length of a full-sized packet, bytes: between a video call's and what an MTU of 1280 leaves. */
#define MTN_FULL_SIZED	1000

#include "../common/intf.h"
#include "../common/alive.h"
#include "../common/parse.h"
#include "origin.h"
#include "device.h"
#include "traffic.h"
#include "averages.h"
#include "../common/rendezvous.h"
#include "../common/dest.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

struct mtn_config config;
struct mtn_path paths[MTN_MAX_PATHS];
struct mtn_group groups[MTN_MAX_GROUPS];
volatile union mtn_masks group_masks[MTN_MAX_GROUPS];

#include "../common/fib_rules.h"
#include "cgroups.h"
#include "fragments.h"

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct mtn_handover);
} handover SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, MTN_STAT_MAX);
	__type(key, __u32);
	__type(value, __u64);
} stats SEC(".maps");

static __always_inline void mtn_count(__u32 stat)
{
	__u64 *n = bpf_map_lookup_elem(&stats, &stat);

	if (n)
		(*n)++;
}

#include "flow_table.h"
#include "sources.h"
#include "routed.h"
#include "choose.h"
#include "rehash.h"
#include "move.h"

/* DSCP EF, AF41..AF43 and CS4 and up ask for low latency (RFC 4594). */
static __always_inline bool mtn_dscp_is_latency(__u8 dsfield)
{
	return dsfield >> 2 >= 32;
}

/* Network layer bytes of @skb's largest packet on the wire; it is on @here now. */
static __always_inline __u32 mtn_l3_len(struct __sk_buff *skb, const struct mtn_pkt *pkt,
					const struct mtn_path *here)
{
	__u32 len = skb->gso_size + pkt->hdr_len;

	if (!skb->gso_size)
		return skb->len - ETH_HLEN;
	/* The parts of SCTP have sizes of their own (GSO_BY_FRAGS): they stay together. */
	if (len > 0xffff)
		return 0xffff;
	/* A tunnel's inner headers are not known here, but it fits where it is. */
	return pkt->key.proto == IPPROTO_TCP || len > here->mtu ? len : here->mtu;
}

/*
 * Whether a window was full-sized packets on the whole: a sender that has always more to send. Many
 * such flows on one path have little each; taken for latency flows, they would all change paths at
 * once with the queue that they are.
 */
static __always_inline bool mtn_is_elastic(const struct mtn_flow *flow, const struct mtn_pkt *pkt)
{
	return pkt->key.proto == IPPROTO_TCP &&
	       flow->window_bytes >= (__u64)flow->window_packets * MTN_FULL_SIZED;
}

/* Accounts a packet to its flow and, once a window, settles the flow's class. */
static __always_inline void mtn_flow_account(struct mtn_flow *flow, struct __sk_buff *skb,
					     struct mtn_pkt *pkt, __u64 now)
{
	/* Another CPU may have begun the window in the next tick. */
	__u64 elapsed = now > flow->window_start_ns ? now - flow->window_start_ns : 0;

	if (flow->last_ns < now) {
		flow->last_ns = now;
		flow->exact = 0;
	}
	flow->window_bytes += skb->len;
	flow->window_packets++;
	if (skb->gso_segs > 1)
		flow->big = 1;
	if (mtn_dscp_is_latency(pkt->dsfield)) {
		flow->class = MTN_CLASS_LATENCY;
	} else if (flow->window_bytes > config.bulk_above && elapsed <= config.window_ns) {
		/* The window is not over, but nothing can lower its bytes. */
		flow->class = MTN_CLASS_BULK;
	}
	pkt->bulk = flow->class == MTN_CLASS_BULK;
	if (elapsed < config.window_ns)
		return;
	/* A window that began before a pause says nothing about the rate now: only whole ones. */
	if (mtn_is_elastic(flow, pkt)) {
		if (flow->window_bytes > config.elastic_above && elapsed < 2 * config.window_ns &&
		    !mtn_dscp_is_latency(pkt->dsfield))
			flow->class = MTN_CLASS_BULK;
	} else if (flow->window_bytes < config.latency_below && !flow->big) {
		flow->class = MTN_CLASS_LATENCY;
	}
	flow->rate_bps = elapsed > 0xffffffffULL ? 0 :
		(__u64)flow->window_bytes * 8000000ULL / (elapsed / 1000 + 1);
	flow->window_start_ns = now;
	flow->window_bytes = 0;
	flow->window_packets = 0;
	flow->big = 0;
	if (pkt->key.proto == IPPROTO_TCP) {
		pkt->sender = mtn_sender_hash(skb, pkt);
		if (pkt->sender)
			flow->hash = pkt->sender;
		mtn_settle(pkt, flow);
	}
	/* A flow in use keeps its source's permission: without one it would be the kernel's after the
	 * next change of the topology. */
	mtn_source_verdict(&pkt->key, now);
}

/*
 * A flow that is not in the table, or in it from an older topology: find its group and path, and which path of the
 * group it is on now. Returns the path id, or MTN_MAX_PATHS when it is not ours.
 */
__noinline int mtn_flow_start(struct mtn_pkt *pkt, __u32 *here_out, __u64 now, __u32 *group_out)
{
	struct mtn_flow_key *key;
	__u32 group, member, may, source, here;
	union mtn_masks masks;
	struct mtn_group *g;

	if (!pkt || !here_out || !group_out)
		return MTN_MAX_PATHS;
	key = pkt->flags & MTN_PKT_ICMP_ERROR ? &pkt->quoted : &pkt->key;
	group = mtn_group_of(key);
	if (group >= MTN_MAX_GROUPS)
		return MTN_MAX_PATHS;
	if (pkt->key.proto == IPPROTO_UDP && pkt->key.sport == bpf_htons(MTN_REFLECT_PORT))
		return MTN_MAX_PATHS;
	g = mtn_group_at(group);
	here = mtn_here_in(group, *here_out);
	if (here >= MTN_MAX_PATHS)
		return MTN_MAX_PATHS;	/* another table sent it here */
	*here_out = here;
	member = mtn_member(g, here);
	source = mtn_source_verdict(&pkt->key, now);
	if (source == MTN_SOURCE_STAYS)
		return MTN_MAX_PATHS;
	*group_out = group;
	masks.word = mtn_masks_of(group);
	may = argmax_load ? masks.alive : masks.latency & masks.alive;
	if (!may) {
		mtn_count(MTN_STAT_PASS_NO_PATH);
		return here;
	}
	if ((now < config.grace_until_ns || source == MTN_SOURCE_NEW) && (may & (1U << member))) {
		mtn_count(MTN_STAT_FLOW_ADOPTED);
		return here;
	}
	if (pkt->key.proto == IPPROTO_TCP && !(pkt->flags & MTN_PKT_SYN) &&
	    now >= config.grace_until_ns)
		mtn_count(MTN_STAT_FLOW_UNTRACKED);
	member = mtn_choose(group, may, mtn_flow_hash(key, config.hash_seed), pkt->l3_len, here);
	return member < MTN_MAX_MEMBERS ? mtn_member_path(g, member) : here;
}

/* Can @pkt, now on @here, leave by @to instead? */
static __always_inline bool mtn_can_redirect(const struct mtn_pkt *pkt, const struct mtn_path *here,
					     const struct mtn_path *to)
{
	if (mtn_is_same_hop(here, to))
		return false;
	if (!mtn_takes(here, to)) {
		mtn_count(MTN_STAT_PASS_NEIGH);
		return false;
	}
	return pkt->l3_len <= to->mtu;
}

static __always_inline int mtn_redirect(struct __sk_buff *skb, __u32 path, struct mtn_path *to)
{
	struct bpf_redir_neigh nh = { .nh_family = to->gw_family };
	struct mtn_handover *note;
	__u32 zero = 0;

	note = bpf_map_lookup_elem(&handover, &zero);
	if (!note)
		return TC_ACT_UNSPEC;
	if (to->gw_family == AF_INET6)
		__builtin_memcpy(nh.ipv6_nh, to->gw, 16);
	else
		nh.ipv4_nh = to->gw[0];
	note->ifindex = to->ifindex;
	note->len = skb->len;
	note->path = path;
	mtn_count(MTN_STAT_REDIRECTED);
	return bpf_redirect_neigh(to->ifindex, &nh, sizeof(nh), 0);
}

/* Whether an entry is that of a flow with @tag whose packet came by @here, made a path of its group. */
static __always_inline bool mtn_is_flow(const struct mtn_flow *flow, __u64 tag, __u32 *here)
{
	__u32 group = flow->group, on;

	if (flow->tag != tag || flow->generation != config.generation || group >= MTN_MAX_GROUPS)
		return false;
	on = mtn_here_in(group, *here);
	if (on >= MTN_MAX_PATHS)
		return false;
	*here = on;
	return true;
}

/* The path that @pkt, now on @here, should take, or MTN_MAX_PATHS for "not ours". */
static __always_inline __u32 mtn_path_for(struct __sk_buff *skb, struct mtn_pkt *pkt, __u32 *here,
					  __u64 now)
{
	__u32 path, slot, group = 0;
	struct mtn_flow *flow;
	__u64 tag;

	if (pkt->flags & (MTN_PKT_FRAG_LATER | MTN_PKT_ICMP_ERROR)) {
		/* An error has a source of its own, and is no packet of the flow that it follows. */
		if (mtn_source_verdict(&pkt->key, now) == MTN_SOURCE_STAYS)
			return MTN_MAX_PATHS;
	}
	if (pkt->flags & MTN_PKT_FRAG_LATER)
		return mtn_frag_path(pkt);

	if (pkt->flags & MTN_PKT_ICMP_ERROR) {
		tag = mtn_flow_tag(&pkt->quoted);
		flow = mtn_flow_find(tag, now, &slot);
		if (flow && mtn_is_flow(flow, tag, here))
			return flow->path;
		return mtn_flow_start(pkt, here, now, &group);
	}

	tag = mtn_flow_tag(&pkt->key);
	flow = mtn_flow_find(tag, now, &slot);
	if (!flow)
		return MTN_MAX_PATHS;
	if (mtn_is_flow(flow, tag, here)) {
		if (flow->sent_by != *here || flow->came_from)
			mtn_follow_sender(pkt, flow, *here, mtn_sender_hash(skb, pkt));
		path = mtn_flow_next(pkt, flow, *here);
		mtn_flow_account(flow, skb, pkt, now);
		return path;
	}

	path = mtn_flow_start(pkt, here, now, &group);
	if (path >= MTN_MAX_PATHS) {
		/* Not ours for now, the flow is where the kernel sends it, also when it is ours again. */
		if (flow->tag == tag && flow->generation != config.generation) {
			flow->path = *here;
			flow->came_from = 0;
			flow->last_ns = now;
			flow->exact = 0;
		}
		return path;
	}
	pkt->sender = mtn_sender_hash(skb, pkt);
	if (flow->tag == tag) {
		/* The topology changed: the flow stays if its path is still in its group. */
		__u32 was = flow->path;

		flow->group = group;
		flow->generation = config.generation;
		if (group >= MTN_MAX_GROUPS || was >= MTN_MAX_PATHS ||
		    mtn_member(mtn_group_at(group), was) >= MTN_MAX_MEMBERS) {
			flow->path = path;
			flow->came_from = 0;
			flow->sent_by = *here;
		}
		mtn_follow_sender(pkt, flow, *here, pkt->sender);
		path = mtn_flow_next(pkt, flow, *here);
		mtn_flow_account(flow, skb, pkt, now);
		return path;
	}
	mtn_flow_add(flow, slot, tag, pkt, group, path, *here, skb->len, now);
	return path;
}

/* Counts a packet that leaves by @path. */
static __always_inline void mtn_account(struct __sk_buff *skb, __u32 path)
{
	if (argmax_load)
		mtn_average_advance(path, bpf_ktime_get_ns(), config.n_cpus, config.k_factor);
	mtn_count_traffic(path, skb->len, skb->gso_segs > 1 ? skb->gso_segs : 1);
}

SEC("tcx/egress")
int mountain_steer(struct __sk_buff *skb)
{
	struct mtn_link_header link;
	struct mtn_handover *note;
	struct mtn_pkt pkt = {};
	__u32 zero = 0, here, len, to = MTN_MAX_PATHS;
	__u64 now;

	note = bpf_map_lookup_elem(&handover, &zero);
	if (note && note->ifindex) {
		bool mine = note->ifindex == skb->ifindex && note->len == skb->len;

		note->ifindex = 0;
		if (mine) {
			mtn_account(skb, note->path);
			return TC_ACT_UNSPEC;
		}
	}

	if (skb->protocol != bpf_htons(ETH_P_IP) && skb->protocol != bpf_htons(ETH_P_IPV6))
		return TC_ACT_UNSPEC;
	if (mtn_load(skb, 0, &link))
		return TC_ACT_UNSPEC;
	here = mtn_path_here(skb, &link);
	if (here >= MTN_MAX_PATHS)
		return TC_ACT_UNSPEC;
	if (config.mode == MTN_MODE_PASS)
		goto pass;
	if (!mtn_is_routed_here(skb, &link)) {
		mtn_count(MTN_STAT_PASS_FOREIGN);
		goto pass;
	}
	if (mtn_names_device(skb)) {
		mtn_count(MTN_STAT_PASS_BOUND);
		goto pass;
	}
	if (mtn_parse(skb, &pkt)) {
		mtn_count(MTN_STAT_PASS_PARSE);
		goto pass;
	}
	if (mtn_is_cookie(skb, &pkt)) {
		mtn_count(MTN_STAT_PASS_BOUND);
		goto pass;
	}
	if (mtn_dest_is_local(&pkt.key)) {
		mtn_count(MTN_STAT_PASS_DEST);
		goto pass;
	}
	if (mtn_path_at(here)->flags & MTN_PATH_ETHERNET && mtn_names_next_hop(skb)) {
		mtn_count(MTN_STAT_PASS_FOREIGN);
		goto pass;
	}
	if (config.n_fib_rules && mtn_is_selected(skb, &pkt, mtn_connection(skb))) {
		mtn_count(MTN_STAT_PASS_FIB_RULE);
		goto pass;
	}
	if (mtn_is_held_cgroup(skb)) {
		mtn_count(MTN_STAT_PASS_CGROUP);
		goto pass;
	}

	now = bpf_ktime_get_coarse_ns();
	if (mtn_is_unattended(config.alive_ns, now)) {
		mtn_count(MTN_STAT_PASS_UNATTENDED);
		goto pass;
	}

	len = mtn_l3_len(skb, &pkt, mtn_path_at(here));
	/* SCTP's gso_size is GSO_BY_FRAGS, 0xffff: too large for any path, also when it is kept in 16 bits. */
	pkt.l3_len = len > 0xffff ? 0xffff : len;
	to = mtn_path_for(skb, &pkt, &here, now);
	if (to >= MTN_MAX_PATHS) {
		mtn_count_latency(here, skb->len);
		goto pass;
	}
	if (to != here && !mtn_can_redirect(&pkt, mtn_path_at(here), mtn_path_at(to)))
		to = here;
	if (!pkt.bulk)
		mtn_count_latency(to, skb->len);
	if (pkt.flags & MTN_PKT_FRAG_FIRST)
		mtn_frag_remember(&pkt, to);
	if (to != here)
		return mtn_redirect(skb, to, mtn_path_at(to));
pass:
	if (pkt.flags & MTN_PKT_FRAG_FIRST && to >= MTN_MAX_PATHS)
		mtn_frag_forget(&pkt);
	mtn_account(skb, here);
	return TC_ACT_UNSPEC;
}

/* Types that only user space reads reach the skeleton through a variable that mentions them. */
struct mtn_move unused_move;
struct mtn_source unused_source;
struct mtn_permit unused_permit;
enum mtn_permits unused_permits;
enum mtn_member unused_member;
enum mtn_tag unused_tag;
enum mtn_alive unused_alive;
enum mtn_mode unused_mode;
enum mtn_class unused_class;
enum mtn_path_flags unused_path_flags;
enum mtn_stat unused_stat;
enum mtn_move_reason unused_move_reason;
enum mtn_source_kind unused_source_kind;
