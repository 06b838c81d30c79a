/* SPDX-License-Identifier: GPL-2.0-only WITH Linux-syscall-note */
/*
 * Generic netlink family "mtn_redirect": the rules of a network namespace. Needs CAP_NET_ADMIN in
 * the user namespace that owns it.
 *
 *   NEW   ID, PROTO, FROM, FROM_PORT, TO, TO_PORT, optionally IFINDEX
 *   DEL   ID; without it: all rules
 *   GET   dump of all rules, with what they have done
 *
 * Errors: EEXIST (the number, FROM or TO is another rule's, the extended error says which), ENOENT
 * (no such rule), EINVAL, E2BIG (too many).
 */
#ifndef MTN_REDIRECT_UAPI_H
#define MTN_REDIRECT_UAPI_H

#define MTN_REDIRECT_FAMILY	"mtn_redirect"
#define MTN_REDIRECT_VERSION	1
#define MTN_REDIRECT_RULES_MAX	65536

enum mtn_redirect_command {
	MTN_REDIRECT_CMD_UNSPEC,
	MTN_REDIRECT_CMD_NEW,
	MTN_REDIRECT_CMD_DEL,
	MTN_REDIRECT_CMD_GET,
};

enum mtn_redirect_attribute {
	MTN_REDIRECT_A_UNSPEC,
	MTN_REDIRECT_A_PAD,
	MTN_REDIRECT_A_ID,		/* u32, 0..MTN_REDIRECT_RULES_MAX - 1 */
	MTN_REDIRECT_A_PROTO,		/* u8, IPPROTO_UDP or IPPROTO_TCP */
	MTN_REDIRECT_A_FROM,		/* 4 or 16 bytes */
	MTN_REDIRECT_A_FROM_PORT,	/* be16 */
	MTN_REDIRECT_A_TO,		/* as long as FROM */
	MTN_REDIRECT_A_TO_PORT,		/* be16 */
	MTN_REDIRECT_A_IFINDEX,		/* s32, the device that clients come in by */
	/* Of answers only; u64. Bytes are of the network layer. */
	MTN_REDIRECT_A_FORWARD_PACKETS,
	MTN_REDIRECT_A_FORWARD_BYTES,
	MTN_REDIRECT_A_REPLY_PACKETS,
	MTN_REDIRECT_A_REPLY_BYTES,
	MTN_REDIRECT_A_DROPS_MEMORY,	/* dropped: no memory to make the packet writable */
	__MTN_REDIRECT_A_MAX
};

#define MTN_REDIRECT_A_MAX (__MTN_REDIRECT_A_MAX - 1)

#endif /* MTN_REDIRECT_UAPI_H */
