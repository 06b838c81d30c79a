// SPDX-License-Identifier: GPL-2.0-or-later
//! Which packets of a lossy path are lost. The numbers that identify a packet decide, not the order in which packets
//! are asked about: every policy loses the same ones.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Delays from here on are alike, µs. A lost packet is among them.
pub const MOST_US: u32 = 2_000_000;

/// A random generator for one packet: the same numbers, the same draws.
pub fn keyed(parts: [u64; 4]) -> StdRng {
    let mut key = [0; 32];
    for (bytes, part) in key.chunks_exact_mut(8).zip(parts) {
        bytes.copy_from_slice(&part.to_le_bytes());
    }
    StdRng::from_seed(key)
}

/// Whether a packet is lost of which a share is; the same key, the same answer.
pub fn is_lost(key: [u64; 4], loss: f64) -> bool {
    loss > 0.0 && (loss >= 1.0 || keyed(key).random_bool(loss))
}

/// Mean delay of packets on a path of delay `level_us` that loses the share `loss`, µs. A lost packet counts as
/// [`MOST_US`].
pub fn expected_us(level_us: f64, loss: f64) -> u32 {
    let most = f64::from(MOST_US);
    (level_us + loss * (most - level_us).max(0.0)) as u32
}
