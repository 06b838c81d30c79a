// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * cc: TCP congestion control that brakes when the bandwidth under a flow drops.
 *
 * Theory of operation
 * ===================
 *
 * A `struct tcp_congestion_ops` made of BPF programs (struct_ops) around the kernel's own BBR, whose
 * functions are exported to BPF. BBR models the path; after each ACK that it has seen, the brake
 * (brake.h) looks at the same rate sample, and where it is engaged, pacing rate and window are
 * limited to what the brake allows:
 *
 *   ACK -> pacing rate and window as BBR left them last time
 *       -> bbr_main()
 *       -> brake takes the sample in, and so does settling (settle.h) once a flow has found its rate
 *       -> pacing rate and window limited; BBR's own kept for the next ACK
 *
 * BBR's rate is kept and put back because in STARTUP BBR only ever raises the rate that it finds:
 * fed with a limited one, or a raised one, it would build on that. And the window, because BBR grows
 * it by what each ACK acknowledges: from a limited one it would take round trips to come back when
 * the limit has gone.
 *
 * BBR reads nothing of the brake. A flow that is braked delivers less, and after ten round trips
 * BBR's estimate has followed; the brake ends when it has grown back to the estimate.
 *
 * State is in a socket's local storage, because BBR fills all of icsk_ca_priv. It goes with the
 * socket, or when another congestion control is chosen. Where there is no memory for it the flow is
 * an ordinary BBR flow.
 *
 * What else is here: `mountain_flows`, an iterator whose pinned link is a file in bpffs that lists
 * the live flows of the reader's network namespace, one struct mtn_flow_report each; and `mountain_scope`, a sockops program that
 * gives the sockets of a cgroup this congestion control, except those whose program chose one itself.
 */
#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>

#include "tcp_types.h"

/* Where BPF calls a function of its own it may not leave a stack address in r0; clang does. */
#define mtn_inline __always_inline
#include "../brake.h"
#include "settle.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define SOL_TCP		6
#define TCP_CONGESTION	13
#define AF_INET6	10

/* TCP_CONG_NON_RESTRICTED: sockets without CAP_NET_ADMIN and of other namespaces may choose it. */
#define NON_RESTRICTED	1
/* BBR's modes, enum bbr_mode. */
#define BBR_STARTUP	0
#define BBR_PROBE_BW	2

/* User space sets the name and the mode before loading. */
const volatile char cc_name[16] = "mountain";
const volatile struct mtn_brake_params params = MTN_BRAKE_DEFAULTS;

/* One flow. */
struct mtn_cc_flow {
	struct mtn_brake brake;
	struct mtn_settle settle;
	__u64 pacing_rate;	/* BBR's own, bytes/s */
	__u64 last_ack_us;
	__u64 since_us;		/* tcp_mstamp of the first ACK */
	__u64 max_bps;		/* BBR's estimate */
	__u32 min_rtt_us;
	__u32 acks;
	__u32 cwnd;		/* BBR's own, packets */
	__u32 cwnd_limited;	/* what was made of it */
};

/* What the iterator writes. */
struct mtn_flow_report {
	struct mtn_cc_flow flow;
	__u64 pacing_rate;	/* in force, bytes/s */
	__u64 acked;		/* bytes, since the connection began */
	__u32 saddr[4];		/* network byte order; IPv4 in the first word */
	__u32 daddr[4];
	__u16 sport;
	__u16 dport;
	__u32 ipv6;
	__u32 cwnd;
	__u32 retransmits;
};

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct mtn_cc_flow);
} flows SEC(".maps");

extern void bbr_init(struct sock *sk) __ksym;
extern void bbr_main(struct sock *sk, __u32 ack, int flag, const struct rate_sample *rs) __ksym;
extern __u32 bbr_sndbuf_expand(struct sock *sk) __ksym;
extern __u32 bbr_undo_cwnd(struct sock *sk) __ksym;
extern __u32 bbr_ssthresh(struct sock *sk) __ksym;
extern __u32 bbr_min_tso_segs(struct sock *sk) __ksym;
extern void bbr_set_state(struct sock *sk, __u8 new_state) __ksym;
/* To 7.2 the first, from 7.3 the second. */
extern void bbr_cwnd_event(struct sock *sk, enum tcp_ca_event event) __ksym __weak;
extern void bbr_cwnd_event_tx_start(struct sock *sk) __ksym __weak;

/*
 * The settings for functions that take a plain pointer. The barrier keeps the compiler from taking
 * them for the zeros that they are before user space sets them.
 */
static __always_inline const struct mtn_brake_params *mtn_params(void)
{
	const struct mtn_brake_params *p = (const struct mtn_brake_params *)&params;

	barrier_var(p);
	return p;
}

static __always_inline struct bbr *mtn_bbr(struct sock *sk)
{
	return (struct bbr *)((struct inet_connection_sock *)sk)->icsk_ca_priv;
}

static __always_inline struct mtn_cc_flow *mtn_flow(struct sock *sk)
{
	return bpf_sk_storage_get(&flows, sk, 0, 0);
}

/* BBR drains, probes the RTT or follows a policer: the brake stands back. */
static __always_inline int mtn_suspended(struct sock *sk)
{
	struct bbr *bbr = mtn_bbr(sk);
	__u32 mode = BPF_CORE_READ_BITFIELD(bbr, mode);

	return (mode != BBR_STARTUP && mode != BBR_PROBE_BW) ||
	       BPF_CORE_READ_BITFIELD(bbr, lt_use_bw);
}

/* What the brake wants to know about this ACK. */
static __always_inline void mtn_ack_of(struct sock *sk, const struct rate_sample *rs,
				       struct mtn_ack *a)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	struct bbr *bbr = mtn_bbr(sk);
	__u32 left = tp->sacked_out + tp->lost_out;

	a->now_us = tp->tcp_mstamp;
	a->mss = tp->mss_cache;
	a->max_bps = mtn_bps_of_bbr(bbr->bw.s[0].v, a->mss);
	a->min_rtt_us = bbr->min_rtt_us == ~0U ? 0 : bbr->min_rtt_us;
	a->total = tp->delivered;
	a->inflight = tp->packets_out + tp->retrans_out;
	a->inflight = a->inflight > left ? a->inflight - left : 0;
	if (rs->delivered > 0 && rs->interval_us > 0) {
		a->delivered = rs->delivered;
		a->interval_us = mtn_min((__u64)rs->interval_us, 0xffffffffULL);
		a->snd_us = rs->snd_interval_us;
		a->rcv_us = rs->rcv_interval_us;
	}
	if (rs->rtt_us > 0)
		a->rtt_us = mtn_min((__u64)rs->rtt_us, 0xffffffffULL);
	a->app_limited = rs->is_app_limited;
	a->ack_delayed = rs->is_ack_delayed;
	a->startup = BPF_CORE_READ_BITFIELD(bbr, mode) == BBR_STARTUP;
	a->suspended = mtn_suspended(sk);
}

/*
 * The brake takes an ACK in. A global function: the verifier goes through it once, by itself, instead of once for
 * each way that leads to it and with each way that leads out of it.
 */
__noinline int mtn_take_ack(struct mtn_brake *b __arg_nonnull, struct mtn_ack *a __arg_nonnull)
{
	mtn_brake_ack(b, mtn_params(), a);
	return 0;
}

/*
 * The published change multiplied pacing_gain where the bandwidth is updated. BBR sets the gain anew
 * before it paces by it; what is left is that the code which ends the phases of its gain cycle reads
 * the changed one. Writing it before bbr_main() is the same.
 */
static __always_inline void mtn_published(struct sock *sk, const struct rate_sample *rs)
{
	struct bbr *bbr = mtn_bbr(sk);
	struct mtn_ack a = {};
	__u32 gain;

	mtn_ack_of(sk, rs, &a);
	if (!a.delivered || a.startup || a.suspended)
		return;
	gain = mtn_published_gain(BPF_CORE_READ_BITFIELD(bbr, pacing_gain), a.max_bps,
				  mtn_bps(a.delivered, a.mss, a.interval_us));
	BPF_CORE_WRITE_BITFIELD(bbr, pacing_gain, gain);
}

/* What BBR finds must be its own rate. SO_MAX_PACING_RATE may have been lowered since. */
static __always_inline void mtn_own_rate(struct sock *sk, const struct mtn_cc_flow *flow)
{
	if (flow->pacing_rate)
		sk->sk_pacing_rate = mtn_min(flow->pacing_rate, (__u64)sk->sk_max_pacing_rate);
}

/* ... and its own window. */
static __always_inline void mtn_own_cwnd(struct sock *sk, const struct mtn_cc_flow *flow)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	struct inet_connection_sock *icsk = (struct inet_connection_sock *)sk;
	int loss = BPF_CORE_READ_BITFIELD(icsk, icsk_ca_state) == TCP_CA_Loss;

	tp->snd_cwnd = mtn_brake_own_cwnd(tp->snd_cwnd, flow->cwnd, flow->cwnd_limited, loss);
}

/* Limits what BBR decided to what brake and settling allow. */
static __always_inline void mtn_apply(struct sock *sk, struct mtn_cc_flow *flow,
				      const struct mtn_ack *a)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	__u32 cwnd = mtn_min(mtn_brake_cwnd(&flow->brake, mtn_params(), a, tp->snd_cwnd),
			     mtn_settle_cwnd(&flow->settle, a));

	flow->pacing_rate = sk->sk_pacing_rate;
	sk->sk_pacing_rate = mtn_min((__u64)mtn_brake_pacing(&flow->brake, a, flow->pacing_rate),
				     (__u64)sk->sk_max_pacing_rate);
	flow->cwnd = tp->snd_cwnd;
	if (tp->snd_cwnd > cwnd)
		tp->snd_cwnd = cwnd;
	flow->cwnd_limited = tp->snd_cwnd;
}

SEC("struct_ops")
void BPF_PROG(mountain_main, struct sock *sk, __u32 ack, int flag, const struct rate_sample *rs)
{
	struct mtn_cc_flow *flow = mtn_flow(sk);
	struct mtn_ack a = {};

	if (!flow || params.mode != MTN_CC_BRAKE) {
		if (params.mode == MTN_CC_PUBLISHED)
			mtn_published(sk, rs);
		bbr_main(sk, ack, flag, rs);
		return;
	}
	mtn_own_rate(sk, flow);
	mtn_own_cwnd(sk, flow);
	bbr_main(sk, ack, flag, rs);
	mtn_ack_of(sk, rs, &a);
	mtn_take_ack(&flow->brake, &a);
	mtn_settle_ack(&flow->settle, &a);
	mtn_apply(sk, flow, &a);
	if (!flow->since_us)
		flow->since_us = a.now_us;
	flow->last_ack_us = a.now_us;
	flow->max_bps = a.max_bps;
	flow->min_rtt_us = a.min_rtt_us;
	flow->acks++;
}

/*
 * After a pause BBR sets the pacing rate, or leaves the one that it finds: that must be its own, not
 * the limited one. Returns the flow's state where the brake is in use.
 */
static __always_inline struct mtn_cc_flow *mtn_before_tx_start(struct sock *sk)
{
	struct mtn_cc_flow *flow = params.mode == MTN_CC_BRAKE ? mtn_flow(sk) : NULL;

	if (!flow || !flow->pacing_rate)
		return NULL;
	mtn_own_rate(sk, flow);
	return flow;
}

/* Tells the brake that a pause has ended; what it still limits is limited from the first packet on. */
static __always_inline void mtn_tx_start(struct sock *sk, struct mtn_cc_flow *flow)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	__u64 idle_us;

	if (!flow)
		return;
	idle_us = tp->tcp_mstamp - flow->last_ack_us;
	mtn_brake_tx_start(&flow->brake, mtn_params(), tp->tcp_mstamp, tp->delivered, idle_us,
			   tp->app_limited != 0);
	if (tp->app_limited)
		mtn_settle_tx_start(&flow->settle, idle_us);
	/* What is not limited any more has BBR's window from the first packet on, too. */
	if (flow->brake.state == MTN_STATE_OFF && !mtn_brake_restless(&flow->brake) &&
	    flow->settle.state != MTN_SETTLE_LOOKING)
		mtn_own_cwnd(sk, flow);
	flow->pacing_rate = sk->sk_pacing_rate;
	if (flow->brake.state >= MTN_STATE_CUT && !mtn_suspended(sk))
		sk->sk_pacing_rate = mtn_min(flow->pacing_rate, flow->brake.bps / 8 + 1);
}

SEC("struct_ops")
void BPF_PROG(mountain_cwnd_event, struct sock *sk, enum tcp_ca_event event)
{
	struct mtn_cc_flow *flow = NULL;

	if (event == CA_EVENT_TX_START)
		flow = mtn_before_tx_start(sk);
	if (bpf_ksym_exists(bbr_cwnd_event))
		bbr_cwnd_event(sk, event);
	mtn_tx_start(sk, flow);
}

SEC("struct_ops")
void BPF_PROG(mountain_cwnd_event_tx_start, struct sock *sk)
{
	struct mtn_cc_flow *flow = mtn_before_tx_start(sk);

	if (bpf_ksym_exists(bbr_cwnd_event_tx_start))
		bbr_cwnd_event_tx_start(sk);
	mtn_tx_start(sk, flow);
}

SEC("struct_ops")
void BPF_PROG(mountain_init, struct sock *sk)
{
	struct mtn_cc_flow *flow;

	bbr_init(sk);
	flow = bpf_sk_storage_get(&flows, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (flow) {
		__builtin_memset(flow, 0, sizeof(*flow));
		mtn_brake_init(&flow->brake);
	}
}

SEC("struct_ops")
void BPF_PROG(mountain_release, struct sock *sk)
{
	bpf_sk_storage_delete(&flows, sk);
}

SEC("struct_ops")
__u32 BPF_PROG(mountain_sndbuf_expand, struct sock *sk)
{
	return bbr_sndbuf_expand(sk);
}

SEC("struct_ops")
__u32 BPF_PROG(mountain_undo_cwnd, struct sock *sk)
{
	return bbr_undo_cwnd(sk);
}

SEC("struct_ops")
__u32 BPF_PROG(mountain_ssthresh, struct sock *sk)
{
	struct mtn_cc_flow *flow = params.mode == MTN_CC_BRAKE ? mtn_flow(sk) : NULL;
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	__u32 limited = tp->snd_cwnd, ssthresh;

	/* BBR keeps its window here, for the end of a recovery: its own. */
	if (flow)
		mtn_own_cwnd(sk, flow);
	ssthresh = bbr_ssthresh(sk);
	tp->snd_cwnd = limited;
	return ssthresh;
}

SEC("struct_ops")
__u32 BPF_PROG(mountain_min_tso_segs, struct sock *sk)
{
	return bbr_min_tso_segs(sk);
}

SEC("struct_ops")
void BPF_PROG(mountain_set_state, struct sock *sk, __u8 new_state)
{
	bbr_set_state(sk, new_state);
}

SEC(".struct_ops.link")
struct tcp_congestion_ops mountain = {
	.flags = NON_RESTRICTED,
	.init = (void *)mountain_init,
	.release = (void *)mountain_release,
	.cong_control = (void *)mountain_main,
	.cwnd_event = (void *)mountain_cwnd_event,
	.cwnd_event_tx_start = (void *)mountain_cwnd_event_tx_start,
	.sndbuf_expand = (void *)mountain_sndbuf_expand,
	.undo_cwnd = (void *)mountain_undo_cwnd,
	.ssthresh = (void *)mountain_ssthresh,
	.min_tso_segs = (void *)mountain_min_tso_segs,
	.set_state = (void *)mountain_set_state,
	.name = "mountain",
};

/*
 * Over sockets rather than over the storage: some kernels refuse, by EPERM, programs of iterators over the
 * elements of a map.
 */
SEC("iter/tcp")
int mountain_flows(struct bpf_iter__tcp *ctx)
{
	struct sock_common *common = ctx->sk_common;
	struct mtn_flow_report r = {};
	struct mtn_cc_flow *flow;
	struct tcp_sock *tp;
	struct sock *sk;

	if (!common)
		return 0;
	/* None of one that is no more than a connection request, or waits for its time to pass. */
	tp = bpf_skc_to_tcp_sock(common);
	if (!tp)
		return 0;
	flow = bpf_sk_storage_get(&flows, tp, NULL, 0);
	if (!flow)
		return 0;
	sk = (struct sock *)tp;
	__builtin_memcpy(&r.flow, flow, sizeof(r.flow));
	r.pacing_rate = sk->sk_pacing_rate;
	r.sport = sk->__sk_common.skc_num;
	r.dport = __builtin_bswap16(sk->__sk_common.skc_dport);
	r.ipv6 = sk->__sk_common.skc_family == AF_INET6;
	if (r.ipv6 && bpf_core_field_exists(sk->__sk_common.skc_v6_daddr)) {
		BPF_CORE_READ_INTO(&r.saddr, sk, __sk_common.skc_v6_rcv_saddr.in6_u.u6_addr32);
		BPF_CORE_READ_INTO(&r.daddr, sk, __sk_common.skc_v6_daddr.in6_u.u6_addr32);
	} else if (!r.ipv6) {
		r.saddr[0] = sk->__sk_common.skc_rcv_saddr;
		r.daddr[0] = sk->__sk_common.skc_daddr;
	}
	r.cwnd = tp->snd_cwnd;
	r.retransmits = tp->total_retrans;
	r.acked = tp->bytes_acked;
	bpf_seq_write(ctx->meta->seq, &r, sizeof(r));
	return 0;
}

/* Whether the program itself has chosen a congestion control; an accepted socket has its listener's. */
static __always_inline int mtn_chose(struct bpf_sock_ops *ops)
{
	struct inet_connection_sock *icsk;

	if (!ops->sk)
		return 0;
	icsk = (struct inet_connection_sock *)bpf_skc_to_tcp_sock(ops->sk);
	return icsk && BPF_CORE_READ_BITFIELD(icsk, icsk_ca_setsockopt);
}

SEC("sockops")
int mountain_scope(struct bpf_sock_ops *ops)
{
	const char *set = (const char *)cc_name;
	char name[16];

	barrier_var(set);
	/*
	 * Not at BPF_SOCK_OPS_TCP_CONNECT_CB: the kernel would put a route's in the place of this one, which has been
	 * initialized by then, and neither release this one nor initialize that (tcp_ca_dst_init()).
	 */
	if ((ops->op == BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB ||
	     ops->op == BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB) && !mtn_chose(ops)) {
		__builtin_memcpy(name, set, sizeof(name));
		bpf_setsockopt(ops, SOL_TCP, TCP_CONGESTION, name, sizeof(name));
	}
	return 1;
}

/* Types that only user space reads reach the skeleton through a variable that mentions them. */
struct mtn_flow_report unused_report;
struct mtn_ack unused_ack;
enum mtn_cc_mode unused_mode;
enum mtn_brake_state unused_state;
