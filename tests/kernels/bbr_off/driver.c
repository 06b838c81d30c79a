// SPDX-License-Identifier: GPL-2.0-only
/*
 * bbr_off: is the series' tcp_bbr, with delta 0, the BBR of the unpatched kernel? Two sockets,
 * which no protocol knows of, one with each, live through the same made-up flow, ACK by ACK. After
 * each of them all of both sockets is compared, byte by byte: what BBR keeps, what it tells TCP,
 * and everything that it has no business with.
 *
 * The flow: a bottleneck with a queue, whose rate and delay change now and then; losses,
 * recoveries, undone ones, timeouts; an application that pauses, or sends little; policers; other
 * segment sizes, pacing limits and windows. It follows what BBR decides, as a network does.
 *
 * Says what it has seen in the kernel's log and refuses to stay. See tests/kernels/bbr-off.
 */
#define pr_fmt(fmt) "bbr_off: " fmt

#include <linux/inet_diag.h>
#include <linux/jhash.h>
#include <linux/module.h>
#include <linux/prandom.h>
#include <linux/slab.h>
#include <linux/tcp.h>
#include <net/tcp.h>

#include "bbr_off.h"

static unsigned int flows = 100;
module_param(flows, uint, 0);
MODULE_PARM_DESC(flows, "pairs of flows for each value of delta");
static unsigned int acks = 20000;
module_param(acks, uint, 0);
MODULE_PARM_DESC(acks, "ACKs that each flow lives through");
static unsigned int seed = 1;
module_param(seed, uint, 0);
MODULE_PARM_DESC(seed, "decides all that is random");

static struct rnd_state state;
static u64 now_us;
static u32 drawn;

u32 bbr_off_jiffies(void)
{
	return usecs_to_jiffies(1000) + (u32)div_u64(now_us * HZ, USEC_PER_SEC);
}

/* The same for both until the next ACK. */
u32 bbr_off_random(u32 ceiling)
{
	return drawn % ceiling;
}

static u32 below(u32 ceiling)
{
	return prandom_u32_state(&state) % ceiling;
}

static bool one_in(u32 n)
{
	return !below(n);
}

static u32 from_to(u32 low, u32 high)
{
	return low + below(high - low + 1);
}

/* A pair of sockets, and the path that both are on. */
struct pair {
	struct tcp_sock *tp[2];
	const struct bbr_off_variant *variant[2];
	u32 packets_per_s;
	u32 base_us;		/* round trip without a queue */
	u32 loss_in;		/* one in so many is lost, 0: none */
	u32 recovery;		/* ACKs until it is over */
	u32 inflight;		/* packets, before the next ACK */
	u64 budget;		/* bytes * us/s that pacing has left to send */
	u64 calls;
	unsigned long states;	/* that the stock one has been in */
};

#define for_both(pair, i, sk)							\
	for (int i = 0; i < 2; i++)						\
		for (struct sock *sk = (struct sock *)(pair)->tp[i]; sk; sk = NULL)

/* The first byte in which the second socket is not as the first, or -1. */
static int difference(const struct pair *pair)
{
	const u8 *a = (const u8 *)pair->tp[0], *b = (const u8 *)pair->tp[1];
	const size_t ops = offsetof(struct inet_connection_sock, icsk_ca_ops);

	for (size_t i = 0; i < sizeof(struct tcp_sock); i++)
		if (a[i] != b[i] && (i < ops || i >= ops + sizeof(void *)))
			return i;
	return -1;
}

/* Of what TCP is told, not of what BBR keeps: delta itself is in that. */
static bool told_differently(const struct pair *pair)
{
	const struct tcp_sock *a = pair->tp[0], *b = pair->tp[1];

	return a->snd_cwnd != b->snd_cwnd || a->snd_ssthresh != b->snd_ssthresh ||
	       ((struct sock *)a)->sk_pacing_rate != ((struct sock *)b)->sk_pacing_rate;
}

static void note(struct pair *pair)
{
	pair->states |= pair->variant[0]->states((struct sock *)pair->tp[0]);
}

static void new_path(struct pair *pair)
{
	pair->packets_per_s = 1U << from_to(4, 17);
	pair->packets_per_s += below(pair->packets_per_s);
	pair->base_us = one_in(4) ? from_to(20, 1000) : from_to(1000, 200000);
}

static void begin(struct pair *pair)
{
	u32 srtt = one_in(2) ? 0 : from_to(1, 300000) << 3;
	u32 mss = one_in(4) ? from_to(88, 1448) : 1448;
	unsigned long limit = one_in(4) ? from_to(10000, 10000000) : ~0UL;
	size_t size = pair->variant[0]->size;
	u8 *own;

	now_us += 10 * USEC_PER_SEC;
	new_path(pair);
	pair->loss_in = one_in(3) ? 0 : from_to(20, 2000);
	pair->recovery = 0;
	pair->inflight = TCP_INIT_CWND;
	pair->budget = 0;
	for_both(pair, i, sk) {
		struct tcp_sock *tp = tcp_sk(sk);

		memset(tp, 0, sizeof(*tp));
		/* As TCP makes a socket. */
		inet_csk(sk)->icsk_ca_ops = pair->variant[i]->ops;
		sk->sk_max_pacing_rate = limit;
		sk->sk_pacing_rate = ~0UL;
		sk->sk_pacing_shift = 10;
		tp->mss_cache = mss;
		tp->snd_cwnd = TCP_INIT_CWND;
		tp->snd_cwnd_clamp = ~0;
		tp->snd_ssthresh = TCP_INFINITE_SSTHRESH;
		tp->srtt_us = srtt;
		minmax_reset(&tp->rtt_min, tcp_jiffies32, ~0U);
		tp->tcp_mstamp = tp->delivered_mstamp = now_us;
		tp->tcp_clock_cache = tp->tcp_wstamp_ns = now_us * NSEC_PER_USEC;
		pair->variant[i]->ops->init(sk);
	}
	/* The brake's own part, which is made ready in any case, and not touched again. */
	own = (u8 *)inet_csk_ca((struct sock *)pair->tp[0]) + size;
	memcpy(own, (u8 *)inet_csk_ca((struct sock *)pair->tp[1]) + size, ICSK_CA_PRIV_SIZE - size);
	pair->calls++;
}

/* What changes for the path, the application or the socket before an ACK. */
static void things_happen(struct pair *pair)
{
	bool idle = one_in(500), limited = idle || one_in(20);
	bool resize = one_in(2000), clamp = one_in(1000);
	u32 mss = from_to(88, 8948), most = one_in(2) ? ~0U : from_to(4, 1000);
	unsigned long limit = one_in(2) ? ~0UL : from_to(10000, 10000000);

	if (one_in(2000))
		new_path(pair);
	if (one_in(3000))
		/* A policer drops a good part of what is sent. */
		pair->loss_in = one_in(3) ? 3 : one_in(2) ? 0 : from_to(20, 2000);
	if (idle) {
		now_us += one_in(10) ? from_to(1, 15) * USEC_PER_SEC : from_to(1000, 1000000);
		pair->inflight = from_to(1, 10);
	}
	for_both(pair, i, sk) {
		struct tcp_sock *tp = tcp_sk(sk);

		if (limited)
			tp->app_limited = (tp->delivered + tcp_packets_in_flight(tp)) ?: 1;
		if (resize)
			tp->mss_cache = mss;
		if (clamp) {
			tp->snd_cwnd_clamp = most;
			sk->sk_max_pacing_rate = limit;
		}
		if (idle) {
			tp->packets_out = tp->lost_out = 0;
			tp->tcp_mstamp = now_us;
			tp->tcp_clock_cache = now_us * NSEC_PER_USEC;
			pair->variant[i]->ops->cwnd_event(sk, CA_EVENT_TX_START);
		}
	}
	pair->calls += idle;
	note(pair);
}

/* TCP's states of congestion control, as tcp_input.c goes through them. */
static void loss_states(struct pair *pair, bool lost)
{
	bool timeout = one_in(2000), undo = one_in(10);
	u8 last = inet_csk((struct sock *)pair->tp[0])->icsk_ca_state, next = last;

	if (timeout)
		next = TCP_CA_Loss;
	else if (lost && last == TCP_CA_Open)
		next = TCP_CA_Recovery;
	else if (last != TCP_CA_Open && !pair->recovery)
		next = TCP_CA_Open;
	if (next != TCP_CA_Open && next != last)
		pair->recovery = from_to(1, 60);
	else if (pair->recovery)
		pair->recovery--;
	if (next == last)
		return;
	for_both(pair, i, sk) {
		const struct tcp_congestion_ops *ops = pair->variant[i]->ops;
		struct tcp_sock *tp = tcp_sk(sk);

		if (next != TCP_CA_Open) {
			tp->prior_cwnd = tcp_snd_cwnd(tp);
			tp->snd_ssthresh = ops->ssthresh(sk);
		} else if (undo) {
			tcp_snd_cwnd_set(tp, max(ops->undo_cwnd(sk), tp->prior_cwnd));
		}
		ops->set_state(sk, next);
		inet_csk(sk)->icsk_ca_state = next;
		if (next == TCP_CA_Loss)
			tcp_snd_cwnd_set(tp, tcp_packets_in_flight(tp) + 1);
	}
	pair->calls += 2;
}

/*
 * After an ACK of so many, @us after the last one: what pacing and window allow. Something is
 * always on its way.
 */
static void sends(struct pair *pair, u32 us, u32 acked)
{
	const struct sock *sk = (const struct sock *)pair->tp[0];
	u32 left = pair->inflight - min(acked, pair->inflight);
	u32 window = min(tcp_snd_cwnd(tcp_sk(sk)), 1U << 19);
	u64 rate = min_t(u64, sk->sk_pacing_rate, 1ULL << 34), packets;
	u64 packet = (u64)tcp_sk(sk)->mss_cache * USEC_PER_SEC;

	/* What was not used is not saved up. */
	pair->budget = min(pair->budget, packet) + rate * us;
	packets = min_t(u64, div64_u64(pair->budget, packet), window - min(left, window));
	pair->budget -= packets * packet;
	pair->inflight = max_t(u32, left + packets, 1);
}

static void one_ack(struct pair *pair)
{
	const struct tcp_sock *first = pair->tp[0];
	u32 inflight, bdp, queue, acked, losses = 0, rtt, us;
	struct rate_sample rs = {};
	bool invalid = one_in(200);
	u32 ahead_ns = below(2000000);

	things_happen(pair);
	inflight = pair->inflight;
	bdp = div_u64((u64)pair->packets_per_s * pair->base_us, USEC_PER_SEC) + 1;
	acked = one_in(50) ? from_to(1, inflight) : from_to(1, min(inflight, 8U));
	for (u32 i = 0; pair->loss_in && i < acked; i++)
		losses += one_in(pair->loss_in);
	queue = inflight > bdp ? inflight - bdp : 0;
	rtt = pair->base_us + below(pair->base_us / 16 + 2) +
	      div_u64((u64)queue * USEC_PER_SEC, pair->packets_per_s);
	us = div_u64((u64)acked * USEC_PER_SEC, pair->packets_per_s) + 1;
	now_us += us;
	drawn = prandom_u32_state(&state);

	rs.prior_in_flight = inflight;
	rs.acked_sacked = acked;
	rs.losses = losses;
	rs.rtt_us = one_in(10) ? -1 : rtt;
	rs.snd_interval_us = rtt;
	rs.rcv_interval_us = from_to(rtt / 2, rtt * 2);
	rs.interval_us = max(rs.snd_interval_us, rs.rcv_interval_us);
	rs.is_app_limited = !!first->app_limited;
	rs.is_ack_delayed = one_in(20);
	rs.is_retrans = one_in(50);
	loss_states(pair, losses);
	for_both(pair, i, sk) {
		struct tcp_sock *tp = tcp_sk(sk);

		tp->tcp_mstamp = tp->delivered_mstamp = now_us;
		tp->tcp_clock_cache = now_us * NSEC_PER_USEC;
		tp->tcp_wstamp_ns = tp->tcp_clock_cache + ahead_ns;
		tp->delivered += acked;
		tp->lost += losses;
		tp->packets_out = inflight - min(acked, inflight);
		tp->lost_out = min(losses, tp->packets_out);
		if (tp->app_limited && after(tp->delivered, tp->app_limited))
			tp->app_limited = 0;
		tp->srtt_us = tp->srtt_us ? tp->srtt_us - (tp->srtt_us >> 3) + rtt : rtt << 3;
		if (rs.rtt_us > 0)
			minmax_running_min(&tp->rtt_min, 300 * HZ, bbr_off_jiffies(), rtt);
	}
	rs.prior_delivered = first->delivered - min(first->delivered, max(inflight, acked));
	rs.delivered = invalid ? -1 : (s32)(first->delivered - rs.prior_delivered);
	for_both(pair, i, sk)
		pair->variant[i]->ops->cong_control(sk, 0, 0, &rs);
	pair->calls++;
	/* What TCP asks between two ACKs. */
	for_both(pair, i, sk) {
		const struct tcp_congestion_ops *ops = pair->variant[i]->ops;
		struct tcp_sock *tp = tcp_sk(sk);
		union tcp_cc_info info = {};
		int attribute;

		/* Into members that BBR does not know, where they are compared. */
		tp->snd_up = ops->min_tso_segs(sk);
		tp->rcv_wup = ops->sndbuf_expand(sk);
		tp->snd_sml = ops->get_info(sk, BIT(INET_DIAG_BBRINFO - 1), &attribute, &info);
		tp->write_seq = jhash(&info, sizeof(info), 0);
	}
	pair->calls += 3;
	sends(pair, us, acked);
	note(pair);
}

/* How many flows come out otherwise with that delta: not @equal to the byte, or else for TCP. */
static unsigned int live(struct pair *pair, unsigned int delta, bool equal)
{
	unsigned int differ = 0;

	prandom_seed_state(&state, seed);
	pair->variant[1]->set_delta(delta);
	for (unsigned int flow = 0; flow < flows; flow++) {
		int where = -1;

		begin(pair);
		for (unsigned int ack = 0; ack < acks && where < 0; ack++) {
			one_ack(pair);
			if (equal)
				where = difference(pair);
			else if (told_differently(pair))
				where = 0;
			if (equal && where >= 0)
				pr_info("flow %u, ACK %u: byte %d of the socket\n",
					flow, ack, where);
		}
		differ += where >= 0;
		cond_resched();
	}
	return differ;
}

static int __init bbr_off(void)
{
	struct pair pair = { .variant = { &bbr_off_stock, &bbr_off_patched } };
	int error = -ENOMEM;

	for (int i = 0; i < 2; i++) {
		pair.tp[i] = kzalloc(sizeof(struct tcp_sock), GFP_KERNEL);
		if (!pair.tp[i])
			goto out;
	}
	now_us = USEC_PER_SEC;
	pr_info("seed: %u\n", seed);
	pr_info("delta 0 differ: %u\n", live(&pair, 0, true));
	pr_info("delta 0 calls: %llu\n", pair.calls);
	for (int i = 0; i < BBR_OFF_STATES; i++)
		pr_info("state %d: %d\n", i, !!(pair.states & BIT(i)));
	pr_info("delta 1 differ: %u\n", live(&pair, 1, false));
	pr_info("delta 2 differ: %u\n", live(&pair, 2, false));
	error = -ECANCELED;
out:
	kfree(pair.tp[0]);
	kfree(pair.tp[1]);
	return error;
}
module_init(bbr_off);

MODULE_DESCRIPTION("Compares the series' BBR with the unpatched kernel's");
MODULE_LICENSE("GPL");
