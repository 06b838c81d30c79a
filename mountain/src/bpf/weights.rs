// SPDX-License-Identifier: GPL-2.0-or-later
//! Weights of a group's members that fall: running flows follow that for a while.

use std::time::Duration;

/// For so long, running flows follow that a member's weight has fallen. All but those that never pause have done so by then.
pub(super) const FOLLOWED: Duration = Duration::from_secs(60);

/// The members, as bits, whose share of a group's flows falls with these `inv_weight`s (bpf/common/intf.h), which are 0
/// where there is no member.
pub(super) fn lighter(old: &[u32], new: &[u32]) -> u16 {
    let weight = |inv: u32| if inv == 0 { 0.0 } else { 1.0 / f64::from(inv) };
    let shares = |all: &[u32]| -> Vec<f64> {
        let sum: f64 = all.iter().map(|inv| weight(*inv)).sum();
        all.iter().map(|inv| weight(*inv) / sum).collect()
    };
    // Beyond what rounding makes of equal shares.
    let falls = |(old, new): (f64, f64)| new < old * (1.0 - 1e-9);
    let pairs = shares(old).into_iter().zip(shares(new)).enumerate();
    pairs.fold(0, |mask, (i, pair)| mask | u16::from(falls(pair)) << i)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_count_and_not_weights() {
        let group = |weights: [u32; 3]| weights.map(|w| (1u32 << 31).checked_div(w).unwrap_or(0));
        let falls = |old, new| lighter(&group(old), &group(new));
        assert_eq!(falls([1, 1, 0], [255, 1, 0]), 0b10);
        assert_eq!(falls([255, 1, 0], [1, 1, 0]), 0b01);
        assert_eq!(falls([1, 2, 3], [1, 2, 3]), 0);
        assert_eq!(falls([0; 3], [1, 1, 0]), 0, "it is new");
    }
}
