/* SPDX-License-Identifier: GPL-2.0-only */
/* What rules.c and packet.c share. */
#ifndef MTN_REDIRECT_H
#define MTN_REDIRECT_H

#include <linux/in.h>
#include <linux/mutex.h>
#include <linux/netfilter.h>
#include <linux/percpu.h>
#include <linux/rhashtable.h>
#include <linux/xarray.h>
#include <net/net_namespace.h>
#include <net/netns/generic.h>

enum mtn_direction {
	MTN_FORWARD,	/* from clients to the target */
	MTN_REPLY,	/* from the target to clients */
	MTN_DIRECTIONS,
};

/* One end, as a packet has it. Hashed and compared as bytes: no padding, unused ones are 0. */
struct mtn_end {
	union nf_inet_addr addr;
	__be16 port;
	u8 proto;	/* IPPROTO_ */
	u8 family;	/* NFPROTO_ */
	int ifindex;	/* of the clients' device, 0: any */
};

/* One for each CPU, changed by this_cpu operations only. */
struct mtn_counters {
	u64 packets[MTN_DIRECTIONS];
	u64 bytes[MTN_DIRECTIONS];
	u64 no_memory;
};

/*
 * Constant from the moment that it is linked. Packets find it under RCU; it is unlinked with the
 * namespace's lock held, and freed after a grace period.
 */
struct mtn_rule {
	struct rhash_head by_from;
	struct rhash_head by_to;
	struct mtn_end from;
	struct mtn_end to;
	struct mtn_counters __percpu *counters;
	u32 id;
	struct rcu_head rcu;
};

/* A network namespace. */
struct mtn_net {
	struct rhashtable by_from;
	struct rhashtable by_to;
	struct xarray by_id;
	struct mutex lock;		/* for all changes */
	unsigned int rules_ipv4;
	unsigned int rules_ipv6;
	unsigned int rules_of_devices;	/* packets read it without the lock */
};

extern unsigned int mtn_net_id;

/* Constants here, so that look-ups are compiled for them. */
static const struct rhashtable_params mtn_by_from_params = {
	.head_offset = offsetof(struct mtn_rule, by_from),
	.key_offset = offsetof(struct mtn_rule, from),
	.key_len = sizeof(struct mtn_end),
	.automatic_shrinking = true,
};

static const struct rhashtable_params mtn_by_to_params = {
	.head_offset = offsetof(struct mtn_rule, by_to),
	.key_offset = offsetof(struct mtn_rule, to),
	.key_len = sizeof(struct mtn_end),
	.automatic_shrinking = true,
};

static inline struct mtn_net *mtn_net(const struct net *net)
{
	return net_generic(net, mtn_net_id);
}

int mtn_hooks_register(struct net *net, u8 family);
void mtn_hooks_unregister(struct net *net, u8 family);

#endif /* MTN_REDIRECT_H */
