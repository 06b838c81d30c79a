/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * One tcp_bbr.c, made a part of this module: stock.c and patched.c include this before theirs. Both
 * have the same clock and draw the same random numbers, and neither registers itself.
 */
#ifndef BBR_OFF_H
#define BBR_OFF_H

#include <linux/btf.h>
#include <linux/module.h>
#include <linux/random.h>
#include <net/tcp.h>

/* What BBR is doing, for the driver to know what it has been through: bits; enum bbr_mode is 0 to 3. */
#define BBR_OFF_LT_BW		4	/* it follows a policer */
#define BBR_OFF_RESTART		5	/* from idleness */
#define BBR_OFF_CONSERVE	6	/* packet conservation, in a recovery */
#define BBR_OFF_STATES		7

struct bbr_off_variant {
	struct tcp_congestion_ops *ops;
	size_t size;			/* of its struct bbr */
	void (*set_delta)(unsigned int value);
	unsigned long (*states)(const struct sock *sk);
};

extern const struct bbr_off_variant bbr_off_stock, bbr_off_patched;

u32 bbr_off_jiffies(void);
u32 bbr_off_random(u32 ceiling);

#define BBR_OFF_VARIANT(name, setter)						\
	static unsigned long name##_states(const struct sock *sk)		\
	{									\
		const struct bbr *bbr = inet_csk_ca(sk);			\
										\
		return BIT(bbr->mode) |						\
		       (unsigned long)bbr->lt_use_bw << BBR_OFF_LT_BW |		\
		       (unsigned long)bbr->idle_restart << BBR_OFF_RESTART |	\
		       (unsigned long)bbr->packet_conservation << BBR_OFF_CONSERVE; \
	}									\
										\
	const struct bbr_off_variant name = {					\
		.ops = &tcp_bbr_cong_ops,					\
		.size = sizeof(struct bbr),					\
		.set_delta = setter,						\
		.states = name##_states,					\
	}

#ifdef BBR_OFF_INCLUDES
#undef tcp_jiffies32
#define tcp_jiffies32 bbr_off_jiffies()
#define get_random_u32_below(ceiling) bbr_off_random(ceiling)
#undef module_init
#define module_init(function) static int (*const unused_init)(void) __maybe_unused = function
#undef module_exit
#define module_exit(function) static void (*const unused_exit)(void) __maybe_unused = function
#undef __init
#define __init
#undef __exit
#define __exit
#endif

#endif /* BBR_OFF_H */
