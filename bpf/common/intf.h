/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the steering program and user space share: limits, configuration, counters.
 *
 * Structures and enumerations reach Rust through the skeletons, which are generated from the type
 * information (BTF) of the compiled programs: whatever a variable or a map mentions. The names of
 * counters are those of `enum mtn_stat`.
 */
#ifndef MOUNTAIN_INTF_H
#define MOUNTAIN_INTF_H

#define MTN_MAX_PATHS		64	/* on one host, over all groups */
#define MTN_MAX_GROUPS		64
#define MTN_MAX_MEMBERS		16	/* paths in one group: bits of a __u16 mask */
#define MTN_MAX_FIB_RULES	64

/* Of `mountain reflect` (mountain/src/measure/wire.rs): its replies stay on the probe's path. */
#define MTN_REFLECT_PORT	8629

/* The flow table (flow_table.h). */
#define MTN_FLOW_SET		8	/* slots in a set, a power of 2; a flow may use three sets */
#define MTN_FLOW_STALE_NS	60000000000ULL	/* an entry unused for so long goes first */

/* Sources that may move (sources.h). */
#define MTN_MAX_ASKED		256	/* new sources between two looks of user space */
#define MTN_PERMIT_NS		(MTN_PERMIT_S * 1000000000ULL)
#define MTN_PERMIT_NEW_NS	2000000000ULL	/* meanwhile flows of the source stay where they are */

/* Permissions of sources, which user space gives. */
enum mtn_permits {
	MTN_MAX_PERMITS = 16384,
	MTN_PERMIT_S = 300,	/* one holds for so long, s */
};

enum mtn_member {
	MTN_NO_MEMBER = 0xff,
};

enum mtn_tag {
	MTN_TAG_NEVER = 0,	/* nobody has used the slot */
	MTN_TAG_FORGOTTEN = 1,	/* user space has taken the flow out; flows' tags are above */
};

enum mtn_mode {
	MTN_MODE_PASS = 0,		/* count, never move */
	MTN_MODE_STEER = 1,		/* the masks of group_masks decide */
};

enum mtn_class {
	MTN_CLASS_LATENCY = 0,
	MTN_CLASS_BULK = 1,
};

enum mtn_path_flags {
	MTN_PATH_ETHERNET = 1 << 0,	/* frames carry Ethernet headers */
	MTN_PATH_NEIGH_VALID = 1 << 1,	/* the gateway's neighbour entry is usable */
	MTN_PATH_DOWN = 1 << 2,		/* no carrier, or switched off: nothing is redirected there */
};

/* Why a packet or flow was treated as it was; index of the `stats` map. `status` has the names in lower case. */
enum mtn_stat {
	MTN_STAT_REDIRECTED,		/* packets sent by another path than the kernel's */
	MTN_STAT_FLOW_NEW,
	MTN_STAT_FLOW_ADOPTED,		/* seen first in the grace time: left where it was */
	MTN_STAT_FLOW_UNTRACKED,	/* TCP without SYN after the grace time: evicted or long idle */
	MTN_STAT_MOVE_FLOWLET,
	MTN_STAT_MOVE_EJECTED,
	MTN_STAT_MOVE_DEAD,
	MTN_STAT_MOVE_FORCED,
	MTN_STAT_MOVE_REHASHED,
	MTN_STAT_PASS_BOUND,		/* the socket is bound to a device, or names one */
	MTN_STAT_PASS_FIB_RULE,		/* an ip rule outside the group's table */
	MTN_STAT_PASS_UPLINK_BOUND,	/* the source address belongs to one uplink */
	MTN_STAT_PASS_DEST,		/* multicast, broadcast, link-local */
	MTN_STAT_PASS_MTU,		/* larger than the MTU of every eligible path */
	MTN_STAT_PASS_NEIGH,		/* an eligible path's neighbour is not valid, no Ethernet, or down */
	MTN_STAT_PASS_NO_PATH,		/* no path known good: the kernel decides */
	MTN_STAT_PASS_PARSE,		/* not IP, truncated */
	MTN_STAT_FLOW_EVICTED,		/* entries of flows in use that a new flow took */
	MTN_STAT_PASS_SOURCE,		/* the source is not known to be movable */
	MTN_STAT_PASS_FOREIGN,		/* this host's routing did not send it here: a guest's frame */
	MTN_STAT_PASS_CGROUP,		/* programs at the egress of its socket's cgroup */
	MTN_STAT_PASS_PRIVATE,		/* somebody behind the uplinks translates its source */
	MTN_STAT_PASS_UNATTENDED,	/* the daemon hangs or is stopped */
	MTN_STAT_MAX,
};

enum mtn_move_reason {
	MTN_MOVE_FLOWLET = 0,	/* after a gap that makes reordering impossible */
	MTN_MOVE_EJECTED = 1,	/* latency flow, path ejected: at once */
	MTN_MOVE_DEAD = 2,	/* path dead: at once */
	MTN_MOVE_FORCED = 3,	/* no flowlet within force_after_ns */
	MTN_MOVE_REHASHED = 4,	/* its sender looks for another path (rehash.h): at once */
};

/* One next hop. Written by user space, read by every run of the program. */
struct mtn_path {
	__u32 ifindex;
	__u32 mtu;		/* network layer bytes */
	__u32 salt;		/* of the path in rendezvous hashing */
	__u32 gw_family;	/* AF_INET or AF_INET6 */
	__u32 gw[4];		/* network byte order, IPv4 in gw[0] */
	__u8 mac[6];		/* link-layer address of the gateway */
	__u8 flags;		/* enum mtn_path_flags */
	__u8 ipv6;		/* family of the routes that use it */
	__u32 delay_max_us;	/* recent maximum of the path's delay */
	__u32 delay_min_us;	/* minimum over the window */
	__u32 cost_weight;	/* of the argmax-load baseline */
};

/*
 * The verdict about one group: one aligned 64-bit word, so that a run of the program never sees
 * half of one. Bit i stands for the group's i-th member.
 */
union mtn_masks {
	struct {
		__u16 latency;	/* eligible for latency flows */
		__u16 bulk;	/* eligible for bulk flows */
		__u16 alive;	/* carrier, neighbour and probes say it carries packets */
		__u16 ejected;	/* latency flows leave at once, not at the next flowlet; where it is eligible
				 * too, those whose choice is another path */
	};
	__u64 word;
};

struct mtn_group {
	__u32 n_members;
	__u16 full;				/* members that bulk flows fill while another has room: those leave
						 * that the hash gives to another */
	__u16 lighter;				/* members whose weight has fallen: flows leave, in a gap, that the hash
						 * gives to another */
	__u8 path[MTN_MAX_MEMBERS];		/* path id of each member */
	__u8 member_of[MTN_MAX_PATHS];		/* inverse; MTN_NO_MEMBER */
	__u32 inv_weight[MTN_MAX_MEMBERS];	/* see rendezvous.h */
	__u64 leave_since_ns[2][MTN_MAX_MEMBERS];	/* by enum mtn_class: since when such flows are to leave it */
};

/* An ip rule that may have routed a packet by another table. Fields unset match everything. */
struct mtn_fib_rule {
	__u32 mark, mark_mask;
	__u32 src[4], src_mask[4];	/* as in the flow key */
	__u32 dst[4], dst_mask[4];
	__u32 iif;			/* 0: any */
	__u32 uid_first, uid_last;	/* 0..0xffffffff: any */
	__u16 sport_first, sport_last;	/* host byte order */
	__u16 dport_first, dport_last;
	__u8 ipproto;			/* 0: any */
	__u8 tos;			/* of the DS field, under tos_mask */
	__u8 tos_mask;			/* 0: any */
	__u8 ipv6;
	__u8 invert;
	__u8 auto_sport;		/* asks for source ports that the kernel gives sockets by itself */
	__u8 pad[2];
};

struct mtn_config {
	__u32 mode;		/* enum mtn_mode */
	__u32 generation;	/* of the topology: flows of an older one look their group up anew */
	__u32 n_paths;
	__u32 n_fib_rules;
	__u32 near_slots;	/* of the flow table, which flows take first; a power of 2 */
	__u32 far_slots;	/* the others; a power of 2 */
	__u32 hash_seed;
	__u32 k_factor;		/* 0..1024 */
	__u32 n_cpus;
	__u32 margin_us;	/* added to the flowlet gap */
	__u32 tick_ns;		/* resolution of the coarse clock */
	__u64 alive_ns;		/* when the daemon last followed the host (alive.h) */
	__u64 grace_until_ns;	/* flows first seen before stay where the kernel has them */
	__u64 steered_since_ns;	/* of the coarse clock; before, packets went by the kernel's paths */
	__u64 force_after_ns;	/* a bulk flow without a flowlet is moved after this long */
	__u64 window_ns;	/* of the classification */
	__u64 latency_below;	/* bytes in a window below which a flow may become latency */
	__u64 bulk_above;	/* bytes in a window above which a flow is bulk */
	__u64 elastic_above;	/* the same for TCP flows of full-sized packets */
};

struct mtn_flow_key {
	__u32 saddr[4];		/* network byte order, IPv4 in [0] */
	__u32 daddr[4];
	__u16 sport;		/* network byte order; ICMP echo: the identifier */
	__u16 dport;
	__u8 proto;
	__u8 ipv6;
	__u16 pad;
} __attribute__((aligned(8)));

/* One cache line: all that changes with a flow's packets. */
struct mtn_flow {
	__u64 tag;		/* hash of the key, or MTN_TAG_* */
	__u64 last_ns;
	__u64 window_start_ns;
	__u32 window_bytes;
	__u32 rate_bps;		/* of the last full window, bit/s, saturating */
	__u32 generation;
	__u16 moves;
	__u8 group;
	__u8 path;		/* path id */
	__u8 class;		/* enum mtn_class */
	__u8 big;		/* a GSO packet was seen in this window */
	__u16 l3_len_max;	/* largest packet so far, network layer bytes */
	__u32 window_packets;
	__u8 exact;		/* last_ns is of the exact clock */
	__u8 sent_by;		/* path id that the kernel chose for the last packet */
	__u8 fled;		/* 1 + path id that it has fled last, with MTN_FLED_FOR_GOOD, see rehash.h; 0: none */
	__u8 came_from;		/* 1 + path id that it is taken back to, with MTN_CAME_BEFORE, see rehash.h; 0: none */
	__u32 hash;		/* of its sender; 0: not known */
	__u64 fled_ns;		/* when */
};
_Static_assert(sizeof(struct mtn_flow) == 64, "a flow is one cache line");

enum mtn_source_kind {
	MTN_SOURCE_STAYS = 0,	/* it belongs to one uplink */
	MTN_SOURCE_MOVES = 1,
	MTN_SOURCE_NEW = 2,	/* a verdict: it moves, but was judged so a moment ago */
	MTN_SOURCE_OWN = 3,	/* the host's, on no uplink: as one with a permission */
};

struct mtn_source {
	__u32 addr[4];		/* network byte order, IPv4 in [0] */
	__u32 ipv6;
};

struct mtn_permit {
	__u64 since_ns;
	__u64 confirmed_ns;
};

/* All fragments of a datagram follow its first one, which alone has ports. */
struct mtn_frag_key {
	__u32 saddr[4];
	__u32 daddr[4];
	__u32 id;
	__u8 proto;
	__u8 ipv6;
	__u16 pad;
};

struct mtn_frag {
	__u64 at_ns;
	__u32 generation;	/* of the topology that it was written in */
	__u32 path;
};

struct mtn_traffic {
	__u64 packets;
	__u64 bytes;
	__u64 latency_bytes;	/* of latency flows, our own probes apart */
};

/* Per path; `start_ns` is the claim that lets one CPU merge an interval. */
struct mtn_average {
	__u64 start_ns;		/* of the interval under way */
	__u64 total_bytes;	/* merged so far */
	__u64 ema_load;		/* B/s */
	__u64 ema_time_delta;	/* B/s */
};

struct mtn_move {
	__u64 at_ns;
	__u64 gap_us;		/* since the flow's previous packet, at least */
	__u64 need_us;		/* the flowlet gap that it had to exceed */
	struct mtn_flow_key key;
	__u8 from;		/* path ids */
	__u8 to;
	__u8 reason;		/* enum mtn_move_reason */
	__u8 class;
	__u32 pad;
};

/* What the first run tells the second one, on the path that was chosen, on the same CPU. */
struct mtn_handover {
	__u32 ifindex;		/* 0: none */
	__u32 len;
	__u32 path;
};

#endif
