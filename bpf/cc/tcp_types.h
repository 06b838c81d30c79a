/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The members of the kernel's TCP structures that cc.bpf.c uses. Their offsets and sizes are found
 * when the program is loaded (CO-RE), so one object fits kernels whose structures differ.
 */
#ifndef MOUNTAIN_TCP_TYPES_H
#define MOUNTAIN_TCP_TYPES_H

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct in6_addr {
	union {
		__u32 u6_addr32[4];
	} in6_u;
};

struct sock_common {
	__u32 skc_daddr;
	__u32 skc_rcv_saddr;
	__u16 skc_dport;
	__u16 skc_num;
	unsigned short skc_family;
	volatile unsigned char skc_state;
	struct in6_addr skc_v6_daddr;
	struct in6_addr skc_v6_rcv_saddr;
};

struct sock {
	struct sock_common __sk_common;
	unsigned long sk_pacing_rate;
	__u32 sk_pacing_status;
	unsigned long sk_max_pacing_rate;
};

struct inet_connection_sock {
	__u8 icsk_ca_state:5;
	__u8 icsk_ca_setsockopt:1;
	__u64 icsk_ca_priv[13];
};

struct tcp_sock {
	__u64 tcp_mstamp;
	__u32 snd_cwnd;
	__u32 packets_out;
	__u32 retrans_out;
	__u32 sacked_out;
	__u32 lost_out;
	__u32 delivered;
	__u32 app_limited;
	__u32 mss_cache;
	__u32 total_retrans;
	__u64 bytes_acked;
};

struct rate_sample {
	__s32 delivered;
	long interval_us;
	__u32 snd_interval_us;
	__u32 rcv_interval_us;
	long rtt_us;
	_Bool is_app_limited;
	_Bool is_ack_delayed;
};

enum tcp_ca_state {
	TCP_CA_Loss = 4,
};

enum tcp_ca_event {
	CA_EVENT_TX_START,
};

struct minmax_sample {
	__u32 t;
	__u32 v;
};

struct minmax {
	struct minmax_sample s[3];
};

/* BBR's state, in icsk_ca_priv. */
struct bbr {
	__u32 min_rtt_us;
	struct minmax bw;
	__u32 mode:3;
	__u32 lt_use_bw:1;
	__u32 pacing_gain:10;
	__u32 full_bw_reached:1;
};

struct tcp_congestion_ops {
	__u32 (*ssthresh)(struct sock *sk);
	void (*set_state)(struct sock *sk, __u8 new_state);
	void (*cwnd_event)(struct sock *sk, enum tcp_ca_event ev);
	void (*cwnd_event_tx_start)(struct sock *sk);
	__u32 (*min_tso_segs)(struct sock *sk);
	void (*cong_control)(struct sock *sk, __u32 ack, int flag, const struct rate_sample *rs);
	__u32 (*undo_cwnd)(struct sock *sk);
	__u32 (*sndbuf_expand)(struct sock *sk);
	char name[16];
	__u32 flags;
	void (*init)(struct sock *sk);
	void (*release)(struct sock *sk);
};

struct seq_file;

struct bpf_iter_meta {
	struct seq_file *seq;
};

struct bpf_iter__tcp {
	struct bpf_iter_meta *meta;
	struct sock_common *sk_common;
};

#pragma clang attribute pop

#endif /* MOUNTAIN_TCP_TYPES_H */
