/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the program that places new flows shares with user space, as intf.h does. Paths, groups and
 * masks are those of intf.h.
 */
#ifndef MOUNTAIN_PLACEMENT_H
#define MOUNTAIN_PLACEMENT_H

#include "../common/intf.h"

#define MTN_MAX_RULES	64
#define MTN_MAX_LEFT_NETS	64
#define MTN_MAX_PUBLISHED	4096
#define MTN_MAX_BRIDGES	1024
#define MTN_RECENT		8192	/* slots for forwarded flows that were placed lately; a power of 2 */

enum mtn_any {
	MTN_ANY_DSCP = 0xff,
	MTN_ANY_FAMILY = 0xff,
};

/* How often what happened; index of the `stats` map. `status` has the names in lower case. */
enum mtn_placement_stat {
	MTN_PLACE_PLACED_CONNECT,	/* connections of local sockets that were placed */
	MTN_PLACE_PLACED_UNCONNECTED,	/* exchanges of unconnected sockets that were placed */
	MTN_PLACE_PLACED_FORWARDED,	/* forwarded flows that were placed, some of them again and again */
	MTN_PLACE_BY_RULE,	/* of these three, those that a rule decided */
	MTN_PLACE_LEFT_DEAD,	/* exchanges that went on by another path, as theirs was dead */
	MTN_PLACE_PASS_BOUND,	/* the socket has chosen a source address or a device */
	MTN_PLACE_PASS_MARKED,	/* its owner, or who has forwarded it, has marked it */
	MTN_PLACE_PASS_PORT,	/* it has a port of its own: others may know it by its address */
	MTN_PLACE_PASS_FIB_RULE, /* an ip rule that comes first */
	MTN_PLACE_PASS_SOURCE,	/* forwarded, from an address that needs no translation */
	MTN_PLACE_PASS_NO_PATH,	/* no path known good, or its address is not known */
	MTN_PLACE_PASS_FAILED,	/* the kernel refused the mark */
	MTN_PLACE_PASS_PAUSED,	/* the routing or the firewall has changed and is being read again */
	MTN_PLACE_PASS_RUNNING,	/* datagrams of a socket that was there before anything was placed */
	MTN_PLACE_PASS_UNATTENDED, /* the daemon hangs or is stopped */
	MTN_PLACE_PASS_CGROUP,	/* a program at the egress of a cgroup may judge by device */
	MTN_PLACE_PASS_FIREWALL, /* the firewall may stop it on another uplink than the kernel's */
	MTN_PLACE_PASS_PROVIDER, /* to what may be a provider's own: a private network, a DNS server */
	MTN_PLACE_PASS_MPTCP,	/* which chooses paths by itself */
	MTN_PLACE_PASS_SIGNALLING, /* about packets that only the kernel places, or such: not TCP, UDP or ICMP */
	MTN_PLACE_PASS_PUBLISHED, /* from a host to which ports are forwarded: others know it by that address */
	MTN_PLACE_STAT_MAX,
};

/* What a rule wants. */
enum mtn_rule_wants {
	MTN_USE_STEADIEST = 0,	/* the paths that latency flows may use */
	MTN_USE_BULK = 1,	/* those that bulk flows may use */
	MTN_USE_PATHS = 2,	/* certain ones, while they are alive */
};

/* An uplink, by path id: of one family. */
struct mtn_placement_path {
	__u32 mark;		/* within config.mark_mask; 0: there is no such path */
	__u32 salt;		/* in rendezvous hashing */
	__u32 addr[4];		/* source of datagrams, network byte order; 0: none */
};

/* A network whose forwarded flows are the kernel's to place, above all one that an uplink's address is in. */
struct mtn_left_net {
	__u32 addr[4];		/* as in the flow key */
	__u32 mask[4];
	__u32 ipv6;
	__u32 unless;		/* 1: not where a rule names their path, nor while the path is dead that the kernel takes */
};

/* One [[rule]] of the configuration. The first that matches decides; what is unset matches all. */
struct mtn_placement_rule {
	__u64 paths;		/* MTN_USE_PATHS: bits of path ids */
	__u64 cgroup;		/* id of a cgroup v2, 0: any; of local flows only */
	__u32 cgroup_level;	/* how deep it is below the root */
	__u32 uid_first;	/* of local flows only, unless 0..0xffffffff */
	__u32 uid_last;
	__u32 mark;
	__u32 mark_mask;
	__u32 dst[4];
	__u32 dst_mask[4];
	__u16 dport_first;	/* host byte order */
	__u16 dport_last;
	__u8 proto;		/* 0: any */
	__u8 dscp;		/* or MTN_ANY_DSCP */
	__u8 ipv6;		/* 0, 1 or MTN_ANY_FAMILY */
	__u8 wants;		/* enum mtn_rule_wants */
	__u32 pad;
};

/* What becomes of forwarded flows. */
enum mtn_forwarded {
	MTN_FORWARDED_LEFT,	/* they are the kernel's, and nobody looks which begin */
	MTN_FORWARDED_KNOWN,	/* TCP connections that have a mark keep it */
	MTN_FORWARDED_PLACED,	/* new ones are placed, too */
};

struct mtn_placement_config {
	__u64 netns_cookie;	/* the programs see the sockets of every namespace */
	__u64 alive_ns;		/* when the daemon last followed the host (alive.h) */
	__u64 idle_ns;		/* an exchange that rests for so long starts anew */
	__u32 mode;		/* MTN_MODE_PASS or MTN_MODE_STEER */
	__u32 hash_seed;
	__u32 mark_mask;	/* the bits of packet marks that are ours */
	__u32 n_rules;
	__u32 n_fib_rules;
	__u32 by_address;	/* one path for all to one address, and for all from one behind this host */
	__u32 rules_need_dscp;	/* some of them asks for it */
	__u32 fib_rules_need_dscp;
	__u32 generation;	/* of destinations, groups and rules; never 0 in its low 16 bits */
	__u32 paused;		/* no new flow is placed; exchanges in progress go on */
	__u32 n_left_nets;	/* more than MTN_MAX_LEFT_NETS: not all of them are known */
	/* Of each family one bit: 1 is IPv4, 2 is IPv6. */
	__u32 left;		/* local flows are the kernel's to place, but where a rule names their path, ... */
	__u32 preferred_dead;	/* ... unless the path is dead that it takes */
	__u32 preferred_known;	/* it takes one path for all */
	__u32 forwarded;	/* enum mtn_forwarded */
	__u32 publishes;	/* of each family one bit: ports of hosts that are not known may be forwarded to */
	__u32 n_published;	/* hosts whose ports are forwarded to */
	__u32 epoch;		/* what was remembered of connections in another one does not count */
};

/* Where a forwarded flow was placed: one aligned word, so that no run sees half of one. */
union mtn_recent {
	struct {
		__u32 hash;		/* of its key */
		__u16 generation;	/* of the configuration then */
		__u8 group;
		__u8 path;
	};
	__u64 word;
};

/* A forwarded TCP connection. */
struct mtn_connection {
	__u64 syn_ns;		/* when it was begun last */
	__u32 mark;		/* of its SYN; 0: it is the kernel's, or not known */
	__u32 epoch;		/* of the configuration then */
};

/* Datagrams of an unconnected socket to one destination. All 0 but the cookie: the socket itself. */
struct mtn_unconnected_key {
	__u64 cookie;
	__u32 daddr[4];
	__u16 dport;
	__u8 ipv6;
	__u8 pad[5];
};

struct mtn_unconnected {
	__u64 last_ns;
	__u32 path;		/* MTN_MAX_PATHS: where the kernel sends them, unless that is dead */
	__u32 mark;		/* that path's: it gets another id when its gateway changes */
};

#endif
