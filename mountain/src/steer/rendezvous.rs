// SPDX-License-Identifier: GPL-2.0-or-later
//! Weighted rendezvous hashing: which of the eligible paths a flow takes.
//!
//! Every path gives every flow a score; the lowest wins. A score depends on that flow and that path only,
//! so when a path leaves or comes back only the flows of that path move. With
//! score = −ln(u)/weight for u uniform in (0, 1), the winner is the first of exponential clocks with
//! rates equal to the weights, hence the shares are proportional to the weights (Thaler and
//! Ravishankar 1998; Schindelhauer and Schomaker 2005 for the weighted form).
//!
//! # Exact algorithm
//!
//! The BPF programs compute it (`bpf/common/rendezvous.h`). `reference`, which only tests have, is the
//! same in Rust; they must choose the same path, bit for bit. All numbers unsigned:
//!
//! 1. For path i: `h = fmix32(flow_hash ^ path_salts[i])`, with the finalizer of MurmurHash3:
//!    `h ^= h >> 16; h *= 0x85ebca6b; h ^= h >> 13; h *= 0xc2b2ae35; h ^= h >> 16` in 32 bits.
//! 2. `h |= 1`, so that u = h/2^32 lies strictly between 0 and 1.
//! 3. −log2(u) in fixed point with 26 bits (the base of a logarithm scales all
//!    scores alike, so it is free to choose): with `lz` = number of leading zero bits of h, and
//!    `m = h << lz` (bit 31 set), `i = (m >> 23) & 0xff`, `f = m & 0x7fffff` (23 bits):
//!    `n = (lz << 26) + T[i] − (((u64)(T[i] − T[i+1]) · f) >> 23)`, where
//!    `T[i] = (1 − log2(1 + i/256)) · 2^26`, rounded to nearest, 257 entries
//!    (`bpf/common/neg_ln_table.h`). n < 2^31 + 2^26.
//! 4. `score = (u64)n · inv_weights[i]`, where `inv_weights[i] = 2^31/weight` rounded to nearest
//!    ([`inv_weight`]); below 2^63.
//! 5. The lowest score among the paths whose bit is set in `eligible` wins; of equal ones the
//!    path with the lowest index.
//!
//! Linear interpolation is off by at most 3·10^-6 of a bit, which is lost in the noise of any hash.

#[cfg(any(test, feature = "test-hooks"))]
mod reference;

#[cfg(any(test, feature = "test-hooks"))]
pub use reference::{choose, flow_hash};

/// Numerator of the reciprocal weights.
const INV_ONE: u32 = 1 << 31;

/// The finalizer of MurmurHash3 (32 bits): every input bit changes every output bit with
/// probability close to one half.
pub(crate) const fn fmix32(mut h: u32) -> u32 {
    h ^= h >> 16;
    h = h.wrapping_mul(0x85eb_ca6b);
    h ^= h >> 13;
    h = h.wrapping_mul(0xc2b2_ae35);
    h ^ (h >> 16)
}

/// Salt of the path known by `name` (any stable text or bytes, e.g. device and gateway): FNV-1a,
/// then [`fmix32`]. It must not depend on the order of the paths, or adding one would move the
/// flows of the others.
pub fn path_salt(name: &[u8]) -> u32 {
    fmix32(name.iter().fold(0x811c_9dc5, |h, b| {
        (h ^ u32::from(*b)).wrapping_mul(0x0100_0193)
    }))
}

/// Reciprocal of a route weight (1..=256) in units of 2^-31, as step 4 wants it. 0 counts as 1.
pub const fn inv_weight(weight: u16) -> u32 {
    let weight = if weight == 0 { 1 } else { weight as u32 };
    (INV_ONE + weight / 2) / weight
}
