//! Confidence intervals for series whose neighbouring samples are alike, as successive delays
//! are: resampling by blocks instead of single samples. Pure and seeded.
//!
//! Method and sources: docs/measuring.md.

use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;
use serde::{Deserialize, Serialize};

use super::stats::quantile;

/// How to resample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bootstrap {
    pub resamples: usize,
    /// Samples per block; `None` chooses by the series' autocorrelation.
    pub block: Option<usize>,
    pub seed: u64,
}

impl Default for Bootstrap {
    fn default() -> Self {
        Self {
            resamples: 2_000,
            block: None,
            seed: 1,
        }
    }
}

/// An estimate and its confidence interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    pub estimate: f64,
    pub low: f64,
    pub high: f64,
}

impl Interval {
    /// The percentile interval of the given level (0.95) over resampled estimates; `None` without
    /// any.
    pub fn of(estimate: f64, mut draws: Vec<f64>, level: f64) -> Option<Self> {
        draws.sort_unstable_by(f64::total_cmp);
        let tail = (1.0 - level) / 2.0;
        let (low, high) = (quantile(&draws, tail)?, quantile(&draws, 1.0 - tail)?);
        Some(Self {
            estimate,
            low,
            high,
        })
    }
}

impl Bootstrap {
    /// Draws of any statistic by circular block bootstrap of `series`, in order of time: for
    /// short series, as it evaluates whole resamples. Empty for an empty series.
    pub fn draws(&self, series: &[f64], statistic: impl Fn(&mut [f64]) -> f64) -> Vec<f64> {
        let n = series.len();
        if n == 0 {
            return Vec::new();
        }
        let block = self
            .block
            .unwrap_or_else(|| block_length(series))
            .clamp(1, n);
        let mut rng = Pcg64::seed_from_u64(self.seed);
        let mut resample = Vec::with_capacity(n + block);
        let draw = |_| {
            resample.clear();
            while resample.len() < n {
                let start = rng.random_range(0..n);
                resample.extend((start..start + block).map(|i| series[i % n]));
            }
            resample.truncate(n);
            statistic(&mut resample)
        };
        (0..self.resamples).map(draw).collect()
    }

    /// Draws of the `p` quantile of `series`, in order of time, fast for any length: what is
    /// resampled is the share of samples at or below the quantile, and each share is turned back
    /// into a quantile of the series (the Bahadur representation; see docs/measuring.md). Draws
    /// of two series may be subtracted or divided pairwise to compare them.
    pub fn quantile_draws(&self, series: &[f64], p: f64) -> Vec<f64> {
        let mut sorted = series.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        let Some(q) = quantile(&sorted, p) else {
            return Vec::new();
        };
        let n = series.len();
        let below: Vec<f64> = series
            .iter()
            .map(|&v| f64::from(u8::from(v <= q)))
            .collect();
        let share = below.iter().sum::<f64>() / n as f64;
        let block = self
            .block
            .unwrap_or_else(|| block_length(&below))
            .clamp(1, n);
        // Ten thousand blocks say all there is to say; longer ones then do no harm.
        let block = block.max(n / 10_000);
        // Sums over the series laid end to start, so that a block may wrap round.
        let mut sums = Vec::with_capacity(n + block + 1);
        sums.push(0.0);
        for i in 0..n + block {
            sums.push(sums[i] + below[i % n]);
        }
        let blocks = n.div_ceil(block);
        let mut rng = Pcg64::seed_from_u64(self.seed);
        let draw = |_| {
            let hits: f64 = (0..blocks)
                .map(|_| {
                    let start = rng.random_range(0..n);
                    sums[start + block] - sums[start]
                })
                .sum();
            let drawn = hits / (blocks * block) as f64;
            quantile(&sorted, p + share - drawn).expect("not empty")
        };
        (0..self.resamples).map(draw).collect()
    }

    /// The `p` quantile of `series`, in order of time, with its 95% interval; `None` for an empty
    /// series.
    pub fn quantile(&self, series: &[f64], p: f64) -> Option<Interval> {
        let mut sorted = series.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        let estimate = quantile(&sorted, p)?;
        Interval::of(estimate, self.quantile_draws(series, p), 0.95)
    }
}

/// Block length for the circular block bootstrap by Politis and White, "Automatic block-length
/// selection for the dependent bootstrap" (2004), with the correction of Patton, Politis and White
/// (2009). 1 for series without correlation.
pub fn block_length(series: &[f64]) -> usize {
    let n = series.len();
    let nf = n as f64;
    if n < 8 {
        return 1;
    }
    let mean = series.iter().sum::<f64>() / nf;
    let covariance = |lag: usize| {
        let products = series[lag..]
            .iter()
            .zip(series)
            .map(|(a, b)| (a - mean) * (b - mean));
        products.sum::<f64>() / nf
    };
    let variance = covariance(0);
    if variance <= 0.0 {
        return 1;
    }
    // The last lag that is followed by `run` insignificant ones.
    let run = 5.max(nf.log10().sqrt().ceil() as usize);
    let longest = (nf.sqrt().ceil() as usize + run).min(n - 1);
    let significant = 2.0 * (nf.log10() / nf).sqrt();
    let mut covariances = vec![variance];
    let mut last = 0;
    for lag in 1..=longest {
        let value = covariance(lag);
        covariances.push(value);
        if (value / variance).abs() > significant {
            last = lag;
        } else if lag - last >= run {
            break;
        }
    }
    let bandwidth = (2 * last).clamp(1, longest);
    while covariances.len() <= bandwidth {
        covariances.push(covariance(covariances.len()));
    }
    // Flat-top window, both signs of the lag.
    let (mut spectrum, mut slope) = (variance, 0.0);
    for (lag, value) in covariances.iter().enumerate().take(bandwidth + 1).skip(1) {
        let at = lag as f64 / bandwidth as f64;
        let weight = if at <= 0.5 { 1.0 } else { 2.0 * (1.0 - at) };
        spectrum += 2.0 * weight * value;
        slope += 2.0 * weight * lag as f64 * value;
    }
    if spectrum <= 0.0 {
        return 1;
    }
    let best = (2.0 * slope * slope / (4.0 / 3.0 * spectrum * spectrum)).cbrt() * nf.cbrt();
    let most = (3.0 * nf.sqrt()).min(nf / 3.0).ceil();
    best.ceil().clamp(1.0, most) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    /// AR(1) with uniform innovations.
    fn autocorrelated(n: usize, phi: f64, seed: u64) -> Vec<f64> {
        let mut rng = Pcg64::seed_from_u64(seed);
        let mut value = 0.0;
        let mut next = || {
            value = phi * value + rng.random_range(-1.0..1.0);
            value
        };
        (0..200 + n).map(|_| next()).skip(200).collect()
    }

    /// Share of 150 series whose interval contains the true median, 0.
    fn coverage(phi: f64, bootstrap: Bootstrap) -> f64 {
        let bootstrap = Bootstrap {
            resamples: 200,
            ..bootstrap
        };
        let hits = (0..150).filter(|&seed| {
            let interval = bootstrap
                .quantile(&autocorrelated(600, phi, seed), 0.5)
                .unwrap();
            interval.low <= 0.0 && 0.0 <= interval.high
        });
        hits.count() as f64 / 150.0
    }

    #[test]
    fn intervals_cover_the_truth_also_when_neighbours_are_alike() {
        let good = Bootstrap::default();
        for phi in [0.0, 0.7] {
            let covered = coverage(phi, good);
            assert!((0.87..=0.99).contains(&covered), "phi {phi}: {covered}");
        }
        let naive = coverage(
            0.8,
            Bootstrap {
                block: Some(1),
                ..good
            },
        );
        assert!(
            naive < 0.8,
            "without blocks the intervals are too narrow: {naive}"
        );
    }

    #[test]
    fn the_fast_quantile_draws_agree_with_whole_resamples() {
        for (phi, p) in [(0.0, 0.5), (0.5, 0.5), (0.5, 0.95)] {
            let series = autocorrelated(2000, phi, 7);
            let bootstrap = Bootstrap {
                resamples: 400,
                block: Some(25),
                seed: 3,
            };
            let fast = bootstrap.quantile(&series, p).unwrap();
            let slow = bootstrap.draws(&series, |v| {
                v.sort_unstable_by(f64::total_cmp);
                quantile(v, p).unwrap()
            });
            let slow = Interval::of(fast.estimate, slow, 0.95).unwrap();
            let (a, b) = (fast.high - fast.low, slow.high - slow.low);
            assert!(
                (0.8..1.25).contains(&(a / b)),
                "phi {phi} p {p}: {fast:?} {slow:?}"
            );
            assert!((fast.low - slow.low).abs() < 0.25 * b, "{fast:?} {slow:?}");
        }
    }

    #[test]
    fn block_length_grows_with_correlation() {
        let length = |phi| block_length(&autocorrelated(4000, phi, 11));
        let (none, some, strong) = (length(0.0), length(0.5), length(0.9));
        assert!(
            none <= 4 && none < some && some < strong,
            "{none} {some} {strong}"
        );
        // Theory for AR(1), φ = 0.5, n = 4000: (2·(2φ/(1−φ²))²/(4/3))^⅓ · n^⅓ ≈ 22.
        assert!((12..=35).contains(&some), "{some}");
        assert_eq!(block_length(&[5.0; 100]), 1);
        assert_eq!(block_length(&[]), 1);
    }

    #[test]
    fn the_same_seed_gives_the_same_interval_and_nothing_gives_none() {
        let series = autocorrelated(500, 0.3, 1);
        let draws = |seed| {
            Bootstrap {
                seed,
                ..Bootstrap::default()
            }
            .quantile_draws(&series, 0.9)
        };
        assert_eq!(draws(5), draws(5));
        assert_ne!(draws(5), draws(6));
        assert_eq!(Bootstrap::default().quantile(&[], 0.5), None);
        let one = Bootstrap::default().quantile(&[3.0], 0.5).unwrap();
        assert_eq!((one.low, one.high), (3.0, 3.0));
        let medians = Bootstrap::default().draws(&[1.0, 2.0, 3.0], |v| v[0]);
        assert!(medians.iter().all(|v| [1.0, 2.0, 3.0].contains(v)) && medians.len() == 2000);
    }

    #[test]
    fn long_series_cost_little_more_than_sorting_them() {
        let series = autocorrelated(200_000, 0.5, 2);
        // CPU time: the machine may be busy.
        let cpu = || -> std::time::Duration {
            nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID)
                .unwrap()
                .into()
        };
        let start = cpu();
        let bootstrap = Bootstrap {
            resamples: 50,
            ..Bootstrap::default()
        };
        let interval = bootstrap.quantile(&series, 0.99).unwrap();
        let used = cpu() - start;
        assert!(interval.low < interval.estimate && interval.estimate < interval.high);
        // An unoptimised build; whole resamples would take 10^7 draws and 50 sorts more.
        assert!(used.as_secs_f64() < 5.0, "{used:?}");
    }
}
