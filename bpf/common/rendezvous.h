/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Weighted rendezvous hashing; bit for bit what mountain/src/steer/rendezvous.rs describes, where
 * the algorithm and its sources are written down.
 */
#ifndef MOUNTAIN_RENDEZVOUS_H
#define MOUNTAIN_RENDEZVOUS_H

#include "neg_ln_table.h"

static __always_inline __u32 mtn_fmix32(__u32 h)
{
	h ^= h >> 16;
	h *= 0x85ebca6b;
	h ^= h >> 13;
	h *= 0xc2b2ae35;
	return h ^ (h >> 16);
}

static __always_inline __u32 mtn_leading_zeros(__u32 h)
{
	__u32 n = 0;

	if (!(h >> 16)) { n += 16; h <<= 16; }
	if (!(h >> 24)) { n += 8; h <<= 8; }
	if (!(h >> 28)) { n += 4; h <<= 4; }
	if (!(h >> 30)) { n += 2; h <<= 2; }
	return n + !(h >> 31);
}

/* -log2((h | 1) / 2^32) in fixed point with NEG_LN_FRACTION_BITS. */
static __always_inline __u32 mtn_neg_log2(__u32 h)
{
	__u32 lz, m, i, t;

	h |= 1;
	lz = mtn_leading_zeros(h);
	m = h << lz;
	i = (m >> 23) & 0xff;
	t = neg_ln_table[i];
	return (lz << NEG_LN_FRACTION_BITS) + t -
	       (__u32)(((__u64)(t - neg_ln_table[i + 1]) * (m & 0x7fffff)) >> 23);
}

/* Hash of a flow: MurmurHash3's body over the key's words, then its finalizer. */
static __always_inline __u32 mtn_flow_hash(const struct mtn_flow_key *key, __u32 seed)
{
	const __u32 *word = (const __u32 *)key;
	__u32 h = seed, k;
	int i;

#pragma unroll
	for (i = 0; i < (int)(sizeof(*key) / 4); i++) {
		k = word[i] * 0xcc9e2d51;
		k = (k << 15) | (k >> 17);
		h ^= k * 0x1b873593;
		h = (h << 13) | (h >> 19);
		h = h * 5 + 0xe6546b64;
	}
	return mtn_fmix32(h ^ sizeof(*key));
}

#endif
