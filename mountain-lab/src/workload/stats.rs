// SPDX-License-Identifier: GPL-2.0-or-later
//! Medians and bootstrap intervals. The quantile is Mountain's own: [`percentile`].

pub use mountain::measure::stats::quantile_unsorted as percentile;

use mountain::measure::stats::{ascending, quantile};
use mountain::measure::verdict::Interval;
use rand::{Rng, RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;

/// Resamples behind an interval: the 2.5% and 97.5% points are then settled by 25 values each.
const RESAMPLES: usize = 1_000;

/// The `p` quantile of values in any order; `None` if there are none.
pub fn quantile_of(values: &[f64], p: f64) -> Option<f64> {
    quantile(&ascending(values.iter().copied()), p)
}

/// The median; of an even number of values the mean of the middle two. NaN if there are none.
pub fn median(values: &[f64]) -> f64 {
    quantile_of(values, 0.5).unwrap_or(f64::NAN)
}

/// 95% percentile-bootstrap interval of the median over independent repeats.
///
/// Efron, "Bootstrap methods: another look at the jackknife", 1979. One value gives an interval of
/// no width: that is not certainty, which is why every table shows the number of repeats.
pub fn bootstrap_median(values: &[f64], seed: u64) -> (f64, f64) {
    let mut rng = Pcg64Mcg::seed_from_u64(seed);
    // One index can be drawn in one way only.
    let count = match values.len() {
        0 | 1 => values.len(),
        _ => RESAMPLES,
    };
    let mut draws = resamples(values.len(), count, &mut rng, |pick| {
        median(&pick.iter().map(|i| values[*i]).collect::<Vec<_>>())
    });
    draws.retain(|draw| !draw.is_nan());
    let interval = Interval::of(f64::NAN, draws, 0.95);
    interval.map_or((f64::NAN, f64::NAN), |i| (i.low, i.high))
}

/// A statistic of `count` resamples, each of `n` indices with replacement.
pub fn resamples<T>(
    n: usize,
    count: usize,
    rng: &mut impl Rng,
    mut statistic: impl FnMut(&[usize]) -> T,
) -> Vec<T> {
    let mut pick = vec![0; n];
    let mut draw = || {
        pick.fill_with(|| rng.random_range(0..n));
        statistic(&pick)
    };
    (0..count).map(|_| draw()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn interval_of_the_median_covers_it_and_shrinks_with_repeats() {
        let values = |n: usize| {
            (0..n)
                .map(|i| ((i * 7919) % 1000) as f64)
                .collect::<Vec<_>>()
        };
        let (lo, hi) = bootstrap_median(&values(10), 1);
        let (lo_many, hi_many) = bootstrap_median(&values(1000), 1);
        let middle = median(&values(1000));
        assert!(
            lo_many < middle && middle < hi_many,
            "{lo_many} {middle} {hi_many}"
        );
        assert!(
            hi_many - lo_many < (hi - lo) / 3.0,
            "{lo}..{hi} against {lo_many}..{hi_many}"
        );
        assert_eq!(bootstrap_median(&[5.0], 1), (5.0, 5.0));
        assert!(bootstrap_median(&[], 1).0.is_nan());
        assert_eq!(
            bootstrap_median(&values(10), 9),
            bootstrap_median(&values(10), 9),
            "seeded"
        );
    }
}
