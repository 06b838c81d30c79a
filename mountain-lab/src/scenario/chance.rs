// SPDX-License-Identifier: GPL-2.0-or-later
//! What chance does to a packet: a function of what names the packet, so that every policy meets the same.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Delays from here on are alike, µs. A lost packet is among them.
pub const MOST_US: u32 = 2_000_000;

/// A generator for one packet.
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

/// What is expected of a packet on a path of this delay that loses this share: a lost one counts as the latest
/// that is told apart.
pub fn expected_us(level_us: f64, loss: f64) -> u32 {
    let most = f64::from(MOST_US);
    (level_us + loss * (most - level_us).max(0.0)) as u32
}
