// SPDX-License-Identifier: GPL-2.0-or-later
//! Figures of two sides that were measured in turn, judged round by round. Pure.
//!
//! Whatever changes between measurements (a neighbour of the machine, where a process was put)
//! changes between rounds too, so the rounds themselves show how far equal sides differ.

use super::stats::ascending;
use super::verdict::{Interval, RowDifference, LEVEL};

/// More would make all choices of signs too many to go through.
pub const MOST_ROUNDS: u32 = 20;

/// Fisher's randomisation test of paired differences: if A and B were alike, each difference could
/// as well have had the other sign. The share of all choices of signs whose sum is as far from 0.
pub fn sign_flips(differences: &[f64]) -> f64 {
    let differences = &differences[..differences.len().min(MOST_ROUNDS as usize)];
    let n = differences.len();
    let sum = |signs: u32| -> f64 {
        let signed = differences.iter().enumerate();
        signed
            .map(|(i, d)| if signs >> i & 1 == 0 { *d } else { -d })
            .sum()
    };
    let seen = sum(0).abs();
    // Equal sums may differ in their last bits by the order of adding.
    let least = seen * (1.0 - 1e-9);
    let as_far = (0..1u32 << n).filter(|&s| sum(s).abs() >= least).count();
    as_far as f64 / f64::from(1u32 << n)
}

/// The mean difference with the interval that [`sign_flips`] does not reject: the means of all
/// subsets of the differences, less the outermost (Hartigan 1969). `None` without any.
pub(crate) fn difference(differences: &[f64]) -> Option<RowDifference> {
    let n = differences.len().min(MOST_ROUNDS as usize);
    if n == 0 {
        return None;
    }
    let differences = &differences[..n];
    let mean = |set: u32| {
        let of = differences.iter().enumerate();
        let of = of.filter(|(i, _)| set >> i & 1 == 1).map(|(_, d)| *d);
        of.sum::<f64>() / f64::from(set.count_ones())
    };
    let means = ascending((1..1u32 << n).map(mean));
    let outermost = ((LEVEL / 2.0 * f64::from(1u32 << n)) as usize).saturating_sub(1);
    let interval = Interval {
        estimate: differences.iter().sum::<f64>() / n as f64,
        low: means[outermost.min(means.len() - 1)],
        high: means[means.len() - 1 - outermost.min(means.len() - 1)],
    };
    Some(RowDifference::new(interval, sign_flips(differences)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::verdict::RowVerdict;

    #[test]
    fn p_values_of_sign_flips_by_hand() {
        assert_eq!(sign_flips(&[1.0; 8]), 2.0 / 256.0);
        assert_eq!(sign_flips(&[0.0; 8]), 1.0);
        // ±3 ±1: 4, 2, −2, −4.
        assert_eq!(sign_flips(&[3.0, -1.0]), 1.0);
        assert_eq!(sign_flips(&[3.0, 1.0]), 0.5);
        assert_eq!(sign_flips(&[]), 1.0);
    }

    #[test]
    fn interval_and_p_value_say_the_same() {
        let d = difference(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]).unwrap();
        assert_eq!((d.interval.estimate, d.verdict), (4.5, RowVerdict::Worse));
        assert!(0.0 < d.interval.low && d.interval.low < 3.0, "{d:?}");
        let d = difference(&[-1.0, 2.0, -3.0, 4.0, 5.0, -6.0, 7.0, 8.0]).unwrap();
        assert_eq!(d.verdict, RowVerdict::CannotTell);
        assert!(d.interval.low < 0.0 && d.interval.high > 0.0, "{d:?}");
        // With fewer than six rounds no p-value is low enough.
        let d = difference(&[5.0; 5]).unwrap();
        assert_eq!((d.verdict, d.interval.low), (RowVerdict::CannotTell, 0.0));
        assert_eq!(difference(&[]), None);
    }
}
