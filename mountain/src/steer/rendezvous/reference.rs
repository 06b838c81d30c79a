// SPDX-License-Identifier: GPL-2.0-or-later
//! The choice of a path in Rust: what tests hold the BPF programs against.

use super::fmix32;
use crate::topology::MAX_GROUP_PATHS;

/// Bits after the binary point of a negative logarithm.
const FRACTION_BITS: u32 = 26;
/// Number of segments of the table; it has one entry more.
const SEGMENTS: usize = 256;

/// `T[i] = (1 − log2(1 + i/256)) · 2^26`, computed at build time in integers only, so that no
/// floating-point library has a say in it.
static NEG_LOG2: [u32; SEGMENTS + 1] = neg_log2_table();

const fn neg_log2_table() -> [u32; SEGMENTS + 1] {
    let mut table = [0; SEGMENTS + 1];
    let mut i = 0;
    // The last entry, log2(2) = 1, stays 0.
    while i < SEGMENTS {
        // log2(x) bit by bit: squaring x doubles its logarithm, and when the square passes 2 the
        // next bit is 1 and the square is halved. x in [1, 2) with 60 fraction bits.
        let mut x: u128 = (SEGMENTS + i) as u128 * (1 << 60) / SEGMENTS as u128;
        let mut log: u64 = 0;
        let mut bit = 0;
        while bit < FRACTION_BITS + 8 {
            x = (x * x) >> 60;
            log <<= 1;
            if x >= 1 << 61 {
                log |= 1;
                x >>= 1;
            }
            bit += 1;
        }
        table[i] = (1 << FRACTION_BITS) - ((log + 128) >> 8) as u32;
        i += 1;
    }
    table
}

/// The table as the C header `bpf/common/neg_ln_table.h`; a test holds the committed file against it.
#[cfg(test)]
fn table_header() -> String {
    // REUSE-IgnoreStart
    let mut out = String::from(
        "/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */\n\
         /* Generated from mountain/src/steer/rendezvous.rs, which describes the algorithm.\n \
         * neg_ln_table[i] = (1 - log2(1 + i/256)) * 2^26, rounded to nearest.\n \
         */\n\
         #ifndef MOUNTAIN_NEG_LN_TABLE_H\n\
         #define MOUNTAIN_NEG_LN_TABLE_H\n\n\
         #define NEG_LN_FRACTION_BITS 26\n\
         #define NEG_LN_SEGMENTS 256\n\n\
         static const __u32 neg_ln_table[NEG_LN_SEGMENTS + 1] = {\n",
    );
    // REUSE-IgnoreEnd
    for row in NEG_LOG2.chunks(8) {
        let row: Vec<String> = row.iter().map(|v| v.to_string()).collect();
        out += &format!("\t{},\n", row.join(", "));
    }
    out + "};\n\n#endif\n"
}

/// Hash of a flow, as `mtn_flow_hash` in `bpf/common/rendezvous.h`: MurmurHash3's body over the words of
/// `struct mtn_flow_key`, then its finalizer. A word is four bytes of the key as they lie in memory.
pub fn flow_hash(key: &[u32; 10], seed: u32) -> u32 {
    let h = key.iter().fold(seed, |h, word| {
        let k = word.wrapping_mul(0xcc9e_2d51).rotate_left(15);
        let h = h ^ k.wrapping_mul(0x1b87_3593);
        h.rotate_left(13).wrapping_mul(5).wrapping_add(0xe654_6b64)
    });
    fmix32(h ^ size_of_val(key) as u32)
}

/// −log2(u) with [`FRACTION_BITS`] fraction bits, for u = (h | 1)/2^32.
fn neg_log2(h: u32) -> u32 {
    let h = h | 1;
    let lz = h.leading_zeros();
    let m = h << lz;
    let i = ((m >> 23) & 0xff) as usize;
    let f = u64::from(m & 0x7f_ffff);
    let step = u64::from(NEG_LOG2[i] - NEG_LOG2[i + 1]) * f;
    (lz << FRACTION_BITS) + NEG_LOG2[i] - (step >> 23) as u32
}

/// Score of a path for a flow; the lowest wins.
fn score(flow_hash: u32, path_salt: u32, inv_weight: u32) -> u64 {
    u64::from(neg_log2(fmix32(flow_hash ^ path_salt))) * u64::from(inv_weight)
}

/// The path of a flow: index into `path_salts` and `inv_weights` (equally long, at most
/// [`MAX_GROUP_PATHS`]), among those whose bit is set in `eligible`. `None` when none is.
pub fn choose(
    flow_hash: u32,
    path_salts: &[u32],
    inv_weights: &[u32],
    eligible: u16,
) -> Option<usize> {
    path_salts
        .iter()
        .zip(inv_weights)
        .take(MAX_GROUP_PATHS)
        .enumerate()
        .filter(|(i, _)| eligible & (1 << i) != 0)
        .min_by_key(|(_, (salt, inv))| score(flow_hash, **salt, **inv))
        .map(|(i, _)| i)
}

#[cfg(test)]
mod tests {
    use super::super::{inv_weight, path_salt};
    use super::*;
    use proptest::prelude::*;

    const KEYS: u32 = 1_000_000;

    fn salts(n: usize) -> Vec<u32> {
        (0..n)
            .map(|i| path_salt(format!("eth{i} via 10.0.{i}.1").as_bytes()))
            .collect()
    }

    fn invs(weights: &[u16]) -> Vec<u32> {
        weights.iter().map(|w| inv_weight(*w)).collect()
    }

    /// Share of each path over 10^6 consecutive keys: the least random input there is.
    fn shares(weights: &[u16]) -> Vec<f64> {
        let (salts, invs) = (salts(weights.len()), invs(weights));
        let mut count = vec![0u32; weights.len()];
        for key in 0..KEYS {
            count[choose(key, &salts, &invs, !0).unwrap()] += 1;
        }
        count
            .iter()
            .map(|c| f64::from(*c) / f64::from(KEYS))
            .collect()
    }

    #[test]
    fn shares_follow_the_weights_within_one_point() {
        for weights in [
            &[1, 1][..],
            &[1, 3],
            &[3, 1],
            &[1, 255],
            &[255, 1],
            &[256, 256],
            &[1, 2, 3, 4],
            &[1; 16],
            &[20, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        ] {
            let sum: f64 = weights.iter().map(|w| f64::from(*w)).sum();
            for (i, share) in shares(weights).iter().enumerate() {
                let want = f64::from(weights[i]) / sum;
                assert!(
                    (share - want).abs() < 0.01,
                    "{weights:?}: path {i} {share} for {want}"
                );
                // The light path of 1:255 must not vanish inside that point.
                assert!(
                    (share / want - 1.0).abs() < 0.05,
                    "{weights:?}: path {i} {share}/{want}"
                );
            }
        }
    }

    #[test]
    fn only_flows_of_the_changed_path_move() {
        let weights = [1, 3, 255, 16];
        let (salts, invs) = (salts(4), invs(&weights));
        for gone in 0..4 {
            let mut moved = 0;
            for key in 0..KEYS {
                let before = choose(key, &salts, &invs, 0b1111).unwrap();
                let after = choose(key, &salts, &invs, 0b1111 & !(1 << gone)).unwrap();
                if before == gone {
                    assert_ne!(after, gone);
                    moved += 1;
                } else {
                    assert_eq!(before, after, "flow {key} was not on {gone}, yet moved");
                }
            }
            assert!(moved > 0, "nothing was on {gone}: it proves nothing");
        }
    }

    #[test]
    fn flows_of_a_leaving_path_spread_over_the_others() {
        let (salts, invs) = (salts(3), invs(&[1, 1, 1]));
        let mut to = [0u32; 3];
        for key in (0..KEYS).filter(|k| choose(*k, &salts, &invs, 0b111) == Some(0)) {
            to[choose(key, &salts, &invs, 0b110).unwrap()] += 1;
        }
        let share = f64::from(to[1]) / f64::from(to[1] + to[2]);
        assert!((share - 0.5).abs() < 0.01, "{share}");
    }

    #[test]
    fn logarithm_is_accurate_and_monotone() {
        let one = f64::from(1u32 << FRACTION_BITS);
        let mut last = u32::MAX;
        for h in (0..KEYS).map(|i| (u64::from(i) * 4294 + 1) as u32 | 1) {
            let got = f64::from(neg_log2(h)) / one;
            let want = 32.0 - f64::from(h).log2();
            assert!((got - want).abs() < 4e-6, "{h}: {got} {want}");
            assert!(neg_log2(h) <= last, "not monotone at {h}");
            last = neg_log2(h);
        }
        assert_eq!(neg_log2(0), 32 << FRACTION_BITS);
        assert_eq!(neg_log2(1 << 31), neg_log2(1 << 31 | 1));
        assert!(neg_log2(u32::MAX) <= 1);
    }

    #[test]
    fn no_eligible_path_and_masks_beyond_the_paths() {
        let (salts, invs) = (salts(2), invs(&[1, 1]));
        assert_eq!(choose(1, &salts, &invs, 0), None);
        assert_eq!(choose(1, &salts, &invs, 0b100), None);
        assert_eq!(choose(1, &[], &[], !0), None);
        assert_eq!(choose(1, &salts, &invs, 0b10), Some(1));
    }

    /// What a C twin can be held against: any change of the algorithm shows here.
    #[test]
    fn fixed_choices() {
        assert_eq!(fmix32(1), 0x514e_28b7);
        // Ten zero words are 40 zero bytes; the words 'a'..'j' tell their order apart.
        assert_eq!(flow_hash(&[0; 10], 0), murmur3(&[0; 40], 0));
        let letters = std::array::from_fn(|i| b'a' as u32 + i as u32);
        let bytes: Vec<u8> = letters.iter().flat_map(|w: &u32| w.to_le_bytes()).collect();
        assert_eq!(flow_hash(&letters, 7), murmur3(&bytes, 7));
        assert_eq!(path_salt(b""), fmix32(0x811c_9dc5));
        let inverse = [1, 256, 0].map(inv_weight);
        assert_eq!(inverse, [1 << 31, 1 << 23, 1 << 31]);
        assert_eq!(inv_weight(3), 715_827_883);
        let got: Vec<_> = (0..24u32)
            .map(|k| choose(k, &[0, 1, 2], &invs(&[1, 2, 3]), 7).unwrap())
            .collect();
        assert_eq!(got, FIXED);
        let sum = (0..1000).fold(0u64, |s, k| s.wrapping_add(score(k, 7, inv_weight(100))));
        assert_eq!(sum, 1_970_305_217_977_140_920);
    }

    /// MurmurHash3_x86_32 of whole words, written from its definition.
    fn murmur3(bytes: &[u8], seed: u32) -> u32 {
        let mut h = seed;
        for w in bytes.chunks_exact(4) {
            let mut k = u32::from_le_bytes(w.try_into().unwrap());
            k = k.wrapping_mul(0xcc9e_2d51);
            k = k.rotate_left(15);
            k = k.wrapping_mul(0x1b87_3593);
            h ^= k;
            h = h.rotate_left(13);
            h = h.wrapping_mul(5).wrapping_add(0xe654_6b64);
        }
        fmix32(h ^ bytes.len() as u32)
    }

    const FIXED: [usize; 24] = [
        2, 2, 1, 2, 1, 0, 2, 2, 2, 2, 0, 1, 2, 2, 1, 1, 2, 2, 1, 2, 1, 2, 2, 2,
    ];

    #[test]
    fn committed_header_is_what_the_generator_writes() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../bpf/common/neg_ln_table.h");
        // MOUNTAIN_BLESS=1 cargo test -p mountain rendezvous: writes it anew.
        if std::env::var_os("MOUNTAIN_BLESS").is_some() {
            std::fs::write(path, table_header()).unwrap();
        }
        assert_eq!(std::fs::read_to_string(path).expect(path), table_header());
        for (i, got) in NEG_LOG2.iter().enumerate() {
            let want = (1.0 - (1.0 + i as f64 / 256.0).log2()) * f64::from(1u32 << 26);
            let is_near = (f64::from(*got) - want).abs() < 0.51;
            assert!(is_near, "entry {i}: {got} {want}");
        }
    }

    proptest! {
        #[test]
        fn the_winner_is_eligible_and_has_the_lowest_score(
            key: u32, seed: u32, eligible: u16,
            weights in prop::collection::vec(1u16..=256, 1..=16),
        ) {
            let salts: Vec<u32> = (0..weights.len() as u32).map(|i| fmix32(seed ^ i)).collect();
            let invs = invs(&weights);
            let known = eligible & ((1u32 << weights.len()) - 1) as u16;
            match choose(key, &salts, &invs, eligible) {
                None => prop_assert_eq!(known, 0),
                Some(won) => {
                    prop_assert!(known & (1 << won) != 0);
                    for i in (0..weights.len()).filter(|i| known & (1 << i) != 0) {
                        let (w, s) = (score(key, salts[won], invs[won]), score(key, salts[i], invs[i]));
                        prop_assert!(w < s || (w == s && won <= i));
                    }
                }
            }
        }
    }
}
