/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What redirect.bpf.c shares with user space: rules, flows, counters, log events.
 *
 * Addresses, ports and checksum deltas are in network byte order. IPv4 addresses in fields for both
 * families stand in the first word.
 */
#ifndef MOUNTAIN_REDIRECT_H
#define MOUNTAIN_REDIRECT_H

#define MTN_RD_MAX_RULES	65536
#define MTN_RD_MAX_OWN		16384
/* Entries of each table of flows; a flow has two, one for each direction. */
#define MTN_RD_ESTABLISHED	131072
#define MTN_RD_HALF_OPEN	65536
/* Ports that flows get whose own is taken, outside Linux's default ip_local_port_range. */
#define MTN_RD_PORT_MIN		61000
#define MTN_RD_PORTS		(65536 - MTN_RD_PORT_MIN)

/* Who handles the packets of a rule. */
enum mtn_rd_backend {
	MTN_RD_TCX,
	MTN_RD_TCX_PEER,
	MTN_RD_XDP,
	MTN_RD_XDP_REDIRECT,
};

/* Of rules and flows. */
enum mtn_rd_flags {
	MTN_RD_REPLY = 1 << 0,		/* flow: from the target to the client */
	MTN_RD_SNAT = 1 << 1,		/* the target sees an address of this host */
	MTN_RD_LOG = 1 << 2,
	MTN_RD_CLOSING = 1 << 3,	/* flow: a FIN has passed */
	MTN_RD_RESET = 1 << 4,		/* flow: the last packet was an RST */
	MTN_RD_HALF = 1 << 5,		/* flow: half-open */
	MTN_RD_DIRECT = 1 << 6,		/* clients speak to a rule's target itself: nothing is redirected */
	MTN_RD_LOCAL = 1 << 7,		/* rule: it is to this host, and nothing else redirects it */
};

/* Half-open flow: how far it has come. */
enum mtn_rd_state {
	MTN_RD_SYN = 1 << 0,		/* TCP, begun by a SYN: the client must acknowledge the SYN-ACK */
	MTN_RD_ANSWERED = 1 << 1,	/* the target has answered */
	MTN_RD_PROVEN = 1 << 2,		/* and the client again, but the table was full */
};

/* Why a packet that a rule names was dropped. */
enum mtn_rd_drop {
	MTN_RD_DROP_TTL = 0,	/* lifetime over, where the kernel cannot answer for us */
	MTN_RD_DROP_PORTS,	/* no free source port for a new flow */
	MTN_RD_DROP_MEMORY,	/* no memory for a new flow */
	MTN_RD_DROP_ROUTE,	/* no egress route for a packet that must not pass */
	MTN_RD_DROP_MAX,
};

struct mtn_rd_rule_key {
	__u32 addr[4];
	__u32 ifindex;		/* device that clients come in by */
	__u16 port;
	__u8 proto;
	__u8 ipv6;
};

/* Addresses that packets are for this host with: key of a trie. */
struct mtn_rd_own {
	__u32 prefix_len;	/* and the 32 bits of the family */
	__u32 ipv6;
	__u32 addr[4];
};

struct mtn_rd_rule {
	__u32 to[4];
	__u32 snat[4];		/* MTN_RD_SNAT */
	__u32 id;
	__u32 client_dev;
	__u32 target_dev;	/* 0: the target is on this host */
	__u16 to_port;
	__u8 backend;		/* enum mtn_rd_backend */
	__u8 flags;		/* enum mtn_rd_flags: SNAT, LOG, DIRECT, LOCAL */
	__u8 client_mac[6];	/* of the devices */
	__u8 target_mac[6];
	__u8 target_veth;	/* MTN_RD_TCX_PEER: redirect_peer() works to ... */
	__u8 client_veth;
	__u16 pad;
};

struct mtn_rd_key4 {
	__u32 saddr;
	__u32 daddr;
	__u16 sport;
	__u16 dport;
	__u8 proto;
	__u8 pad[3];
};

struct mtn_rd_key6 {
	__u32 saddr[4];
	__u32 daddr[4];
	__u16 sport;
	__u16 dport;
	__u8 proto;
	__u8 pad[3];
};

/*
 * One direction of a flow, except its new addresses. With those of IPv4 it is one cache line, and the
 * kernel's hash map puts it into one: the line before holds the map's own words and the key.
 * Ticks are 2^20 ns (1.05 ms) of the monotonic clock and wrap after 52 days.
 */
struct mtn_rd_flow {
	__u32 touched_ticks;	/* last packet of either direction, to a second */
	__u32 fib_until_ticks;	/* what follows is to be looked up again then */
	__u32 oif;
	__u8 macs[12];		/* Ethernet header of the egress route: destination, source */
	__u16 mtu;		/* 0: the egress route has not been looked up */
	__u16 addr_delta;	/* what the addresses add to a sum (RFC 1624), never 0 */
	__u16 l4_delta;		/* what addresses and ports add */
	__u16 sport;
	__u16 dport;
	__u8 flags;		/* enum mtn_rd_flags */
	__u8 backend;
	__u32 rule;
	__u32 client_dev;
	__u32 target_dev;
	__u8 in_mac[6];		/* of the device that this direction comes in by */
	__u8 out_veth;		/* redirect_peer() works on the egress route */
	__u8 pad;
};

struct mtn_rd_flow4 {
	struct mtn_rd_flow f;
	__u32 saddr;
	__u32 daddr;
};

struct mtn_rd_flow6 {
	struct mtn_rd_flow f;
	__u32 saddr[4];
	__u32 daddr[4];
};

/* One direction of a half-open flow. */
struct mtn_rd_half4 {
	struct mtn_rd_flow4 flow;
	__u32 ack;		/* what acknowledges the target's SYN-ACK, host byte order */
	__u32 ack_all;		/* and all that the target has sent */
	__u8 state;		/* enum mtn_rd_state */
	__u8 pad[3];
};

struct mtn_rd_half6 {
	struct mtn_rd_flow6 flow;
	__u32 ack;
	__u32 ack_all;
	__u8 state;
	__u8 pad[3];
};

/* An established flow's place in the queue that they are aged by. */
struct mtn_rd_age {
	struct mtn_rd_key6 key;	/* of packets to the target */
	__u32 ipv6;
};

struct mtn_rd_stats {
	__u64 packets[2];	/* to the target, from it */
	__u64 bytes[2];		/* network layer */
};

struct mtn_rd_drop_key {
	__u32 rule;
	__u32 reason;		/* enum mtn_rd_drop */
};

struct mtn_rd_frag_key {
	__u32 saddr[4];
	__u32 daddr[4];
	__u32 id;
	__u32 proto;
};

struct mtn_rd_ports {
	__u16 sport;
	__u16 dport;
};

/* What a datagram's first fragment says of the others. */
struct mtn_rd_frag {
	__u64 at_ns;
	struct mtn_rd_ports ports;
	__u32 pad;
};

/* Log lines of one rule in the present second. */
struct mtn_rd_log_limit {
	__u64 second;
	__u32 per_second;
	__u32 used;
};

struct mtn_rd_event {
	__u32 saddr[4];		/* as the packet came */
	__u32 daddr[4];
	__u32 new_saddr[4];	/* as it went on */
	__u32 new_daddr[4];
	__u16 sport;
	__u16 dport;
	__u16 new_sport;
	__u16 new_dport;
	__u32 rule;
	__u32 len;		/* network layer */
	__u8 proto;
	__u8 ipv6;
	__u8 reply;
	__u8 pad;
};

#endif
