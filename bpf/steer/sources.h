/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Which source addresses may take another uplink.
 *
 * A source that NAT has put there usually belongs to one uplink, and nothing in the packet says so.
 * So a source must be known to be movable before its flows move:
 *
 *   - the tries hold what user space knows in advance: the uplinks' own addresses stay, the configured
 *     prefixes move, and so do the host's other addresses;
 *   - `permits` holds sources that user space has judged movable. A permission ages. A new one is
 *     asked for by an entry in `asked` while the old one still holds.
 *
 * Where a source means something here only and the destination means the same everywhere, somebody
 * behind the uplinks has to translate it, and each uplink may do so in its own way: such a flow stays
 * unless its source is configured.
 *
 * Any other source stays on the kernel's path and is asked about. Where a table is full, its packets
 * stay as well: a flood of forged sources costs others their moves, never their uplink.
 */
#ifndef MOUNTAIN_SOURCES_H
#define MOUNTAIN_SOURCES_H

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct mtn_lpm4_key);
	__type(value, __u32);
} source4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct mtn_lpm6_key);
	__type(value, __u32);
} source6 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MTN_MAX_PERMITS);
	__type(key, struct mtn_source);
	__type(value, struct mtn_permit);
} permits SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MTN_MAX_ASKED);
	__type(key, struct mtn_source);
	__type(value, __u8);
} asked SEC(".maps");

/* What the tries say of a flow's source: enum mtn_source_kind, or NULL. */
static __always_inline __u32 *mtn_source_kind(const struct mtn_flow_key *key)
{
	if (key->ipv6) {
		struct mtn_lpm6_key k = { .prefixlen = 128 };

		__builtin_memcpy(k.addr, key->saddr, 16);
		return bpf_map_lookup_elem(&source6, &k);
	} else {
		struct mtn_lpm4_key k = { .prefixlen = 32, .addr = key->saddr[0] };

		return bpf_map_lookup_elem(&source4, &k);
	}
}

/*
 * Whether an address means the same everywhere: "globally reachable" in IANA's registries of special-purpose
 * addresses (RFC 6890), for a host order word. As topology/global.rs has it.
 */
static __always_inline bool mtn_is_global4(__u32 a)
{
	return !(a >> 24 == 0 || a >> 24 == 10 || a >> 24 == 127 ||	/* 0/8, 10/8, 127/8 */
		 a >> 22 == 0x64400000 >> 22 ||				/* 100.64/10 */
		 a >> 16 == 0xa9fe || a >> 20 == 0xac1 ||		/* 169.254/16, 172.16/12 */
		 a >> 8 == 0xc00000 || a >> 8 == 0xc00002 ||		/* 192.0.0/24, 192.0.2/24 */
		 a >> 16 == 0xc0a8 ||					/* 192.168/16 */
		 a >> 17 == 0xc6120000 >> 17 ||				/* 198.18/15 */
		 a >> 8 == 0xc63364 || a >> 8 == 0xcb0071 ||		/* 198.51.100/24, 203.0.113/24 */
		 a >= 0xe0000000);					/* 224/4, 240/4 */
}

/* As above: 2000::/3 but 2001:db8::/32 and 3fff::/20, and 64:ff9b::/96, behind which are all of IPv4. */
static __always_inline bool mtn_is_global6(const __u32 *addr)
{
	__u32 a = bpf_ntohl(addr[0]);

	return (a >> 29 == 1 && a != 0x20010db8 && a >> 12 != 0x3fff0) ||
	       (a == 0x0064ff9b && !addr[1] && !addr[2]);
}

static __always_inline bool mtn_is_translated_later(const struct mtn_flow_key *key)
{
	if (key->ipv6)
		return mtn_is_private6(key->saddr) && mtn_is_global6(key->daddr);
	return mtn_is_private4(bpf_ntohl(key->saddr[0])) && mtn_is_global4(bpf_ntohl(key->daddr[0]));
}

/* Whether flows from this source may take any uplink: enum mtn_source_kind. Counts those that stay. */
__noinline int mtn_source_verdict(struct mtn_flow_key *key, __u64 now)
{
	struct mtn_source source = {};
	struct mtn_permit *permit;
	__u32 *kind;
	__u64 age = ~0ULL;
	__u8 one = 1;

	if (!key)
		return MTN_SOURCE_STAYS;
	kind = mtn_source_kind(key);
	if (kind && *kind == MTN_SOURCE_STAYS) {
		mtn_count(MTN_STAT_PASS_UPLINK_BOUND);
		return MTN_SOURCE_STAYS;
	}
	if (kind && *kind == MTN_SOURCE_MOVES)
		return MTN_SOURCE_MOVES;
	if (mtn_is_translated_later(key)) {
		mtn_count(MTN_STAT_PASS_PRIVATE);
		return MTN_SOURCE_STAYS;
	}
	if (kind)
		return MTN_SOURCE_MOVES;
	__builtin_memcpy(source.addr, key->saddr, 16);
	source.ipv6 = key->ipv6;
	permit = bpf_map_lookup_elem(&permits, &source);
	/* The coarse clock may be behind user space's. */
	if (permit)
		age = now > permit->confirmed_ns ? now - permit->confirmed_ns : 0;
	if (age >= MTN_PERMIT_NS / 2)
		bpf_map_update_elem(&asked, &source, &one, BPF_NOEXIST);
	if (!permit || age >= MTN_PERMIT_NS) {
		mtn_count(MTN_STAT_PASS_SOURCE);
		return MTN_SOURCE_STAYS;
	}
	return now < permit->since_ns + MTN_PERMIT_NEW_NS ? MTN_SOURCE_NEW : MTN_SOURCE_MOVES;
}

#endif
