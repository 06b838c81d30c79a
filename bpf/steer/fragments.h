/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * All fragments of a datagram follow its first one, which alone has ports.
 */
#ifndef MOUNTAIN_FRAGMENTS_H
#define MOUNTAIN_FRAGMENTS_H

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct mtn_frag_key);
	__type(value, struct mtn_frag);
} frags SEC(".maps");

/* RFC 791: unique per addresses and protocol; RFC 8200: per addresses. */
static __always_inline void mtn_frag_key(const struct mtn_pkt *pkt, struct mtn_frag_key *key)
{
	__builtin_memcpy(key->saddr, pkt->key.saddr, 16);
	__builtin_memcpy(key->daddr, pkt->key.daddr, 16);
	key->id = pkt->frag_id;
	key->proto = pkt->key.ipv6 ? 0 : pkt->key.proto;
	key->ipv6 = pkt->key.ipv6;
}

/* How long fragments are waited for (IP_FRAG_TIME in the kernel's include/net/ip.h): identifications come again. */
#define MTN_FRAG_NS (30 * 1000000000ULL)

/* Path of a fragment that is not the first, or MTN_MAX_PATHS. */
__noinline int mtn_frag_path(struct mtn_pkt *pkt)
{
	struct mtn_frag_key key = {};
	struct mtn_frag *frag;

	if (!pkt)
		return MTN_MAX_PATHS;
	mtn_frag_key(pkt, &key);
	frag = bpf_map_lookup_elem(&frags, &key);
	/* Ids of an older topology may be those of other paths by now. */
	if (!frag || frag->generation != config.generation ||
	    bpf_ktime_get_coarse_ns() - frag->at_ns > MTN_FRAG_NS)
		return MTN_MAX_PATHS;
	return frag->path;
}

__noinline int mtn_frag_remember(struct mtn_pkt *pkt, __u32 path)
{
	struct mtn_frag_key key = {};
	struct mtn_frag frag = {
		.at_ns = bpf_ktime_get_coarse_ns(),
		.generation = config.generation,
		.path = path,
	};

	if (!pkt)
		return 0;
	mtn_frag_key(pkt, &key);
	bpf_map_update_elem(&frags, &key, &frag, BPF_ANY);
	return 0;
}

/* A datagram begins that stays where the kernel sends it: its rest follows no older one of its identification. */
__noinline int mtn_frag_forget(struct mtn_pkt *pkt)
{
	struct mtn_frag_key key = {};

	if (!pkt)
		return 0;
	mtn_frag_key(pkt, &key);
	bpf_map_delete_elem(&frags, &key);
	return 0;
}

#endif
