// SPDX-License-Identifier: GPL-2.0-or-later
//! From samples to the few points that a plot can show: pure functions. Delays in µs, points in ms.

use std::ops::Range;

/// One bin of a time-line.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bin {
    /// Middle of the bin, s.
    pub at_s: f64,
    /// Smallest RTT in it, ms.
    pub min_ms: f64,
    /// Median RTT, ms.
    pub mid_ms: f64,
    /// Largest RTT, ms: down-sampling must not hide the very thing measured.
    pub max_ms: f64,
}

/// Width of each of `bins` bins of `span`, rounded up, so that the end of the span falls into the
/// last bin.
pub fn width(span: &Range<u64>, bins: usize) -> u64 {
    (span.end.saturating_sub(span.start))
        .div_ceil(bins as u64)
        .max(1)
}

/// RTT over time of `samples` (moment in ns, RTT in µs) in `bins` equal bins of `span`; bins
/// without a sample are left out.
pub fn timeline(
    samples: impl Iterator<Item = (u64, f64)>,
    span: &Range<u64>,
    bins: usize,
) -> Vec<Bin> {
    let width_ns = width(span, bins);
    let mut rtts: Vec<Vec<f64>> = vec![Vec::new(); bins];
    for (at_ns, rtt_us) in samples {
        let bin = at_ns
            .checked_sub(span.start)
            .and_then(|at| rtts.get_mut((at / width_ns) as usize));
        if let Some(bin) = bin {
            bin.push(rtt_us);
        }
    }
    rtts.iter_mut()
        .enumerate()
        .filter(|(_, r)| !r.is_empty())
        .map(|(i, r)| {
            r.sort_unstable_by(f64::total_cmp);
            Bin {
                at_s: (span.start as f64 + (i as f64 + 0.5) * width_ns as f64) / 1e9,
                min_ms: r[0] / 1e3,
                mid_ms: r[r.len() / 2] / 1e3,
                max_ms: r[r.len() - 1] / 1e3,
            }
        })
        .collect()
}

/// Points (RTT ms, share of samples *above* it) of the complementary distribution.
///
/// Ranks are spaced evenly in the logarithm of the tail's share, so that the last one in 10,000 is
/// drawn as finely as the middle; the largest value is always a point.
pub fn tail(sorted: &[f64], points: usize) -> Vec<(f64, f64)> {
    let n = sorted.len();
    if n == 0 {
        return Vec::new();
    }
    let mut ranks: Vec<usize> = (0..=points)
        .map(|i| {
            let above = (n as f64).powf(1.0 - i as f64 / points as f64);
            n - (above.round() as usize).clamp(1, n)
        })
        // The body (above one half) falls between the first two of these ranks.
        .chain((0..=points / 2).map(|i| (n - 1) * i / points))
        .collect();
    ranks.sort_unstable();
    ranks.dedup();
    ranks
        .iter()
        .map(|r| (sorted[*r] / 1e3, (n - r) as f64 / n as f64))
        .collect()
}

/// Points (RTT ms, share of samples up to it) of the distribution.
pub fn cdf(sorted: &[f64], points: usize) -> Vec<(f64, f64)> {
    let n = sorted.len();
    if n == 0 {
        return Vec::new();
    }
    let mut ranks: Vec<usize> = (0..=points).map(|i| (n - 1) * i / points).collect();
    ranks.dedup();
    ranks
        .iter()
        .map(|r| (sorted[*r] / 1e3, (r + 1) as f64 / n as f64))
        .collect()
}

/// Share of all samples in each of `bins` equal bins of `span_ms`; what lies outside is in none.
pub fn histogram(sorted: &[f64], span_ms: &Range<f64>, bins: usize) -> Vec<f64> {
    let mut counts = vec![0u32; bins];
    let scale = bins as f64 / (span_ms.end - span_ms.start);
    for rtt in sorted {
        let at = (rtt / 1e3 - span_ms.start) * scale;
        if at >= 0.0 {
            if let Some(count) = counts.get_mut(at as usize) {
                *count += 1;
            }
        }
    }
    counts
        .iter()
        .map(|c| f64::from(*c) / sorted.len().max(1) as f64)
        .collect()
}

/// Splits where more than `gap_s` passed without an answer: a line across would invent data.
pub(crate) fn unbroken(bins: &[Bin], gap_s: f64) -> impl Iterator<Item = &[Bin]> {
    bins.chunk_by(move |a, b| b.at_s - a.at_s <= gap_s)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Range<u64> = 0..1_000_000_000;

    fn every_ms(n: u64) -> Vec<(u64, f64)> {
        (0..n).map(|ms| (ms * 1_000_000, 20_000.0)).collect()
    }

    #[test]
    fn timeline_keeps_the_extremes() {
        let mut samples = every_ms(1000);
        samples[550].1 = 240_000.0;
        samples[551].1 = 1_000.0;
        let bins = timeline(samples.into_iter(), &SECOND, 10);
        assert_eq!(bins.len(), 10);
        let worst = Bin {
            at_s: 0.55,
            min_ms: 1.0,
            mid_ms: 20.0,
            max_ms: 240.0,
        };
        assert_eq!(bins[5], worst);
        assert_eq!(bins[4].max_ms, 20.0);
    }

    #[test]
    fn a_span_that_starts_later_leaves_out_what_was_before() {
        let bins = timeline(every_ms(1000).into_iter(), &(500_000_000..SECOND.end), 5);
        assert_eq!((bins.len(), bins[0].at_s), (5, 0.55));
        assert!(timeline(every_ms(10).into_iter(), &(500_000_000..SECOND.end), 5).is_empty());
    }

    #[test]
    fn bins_without_answers_are_gaps() {
        let bins = timeline(std::iter::once((50_000_000, 9.0)), &(0..300_000_000), 3);
        assert_eq!(bins.len(), 1);
    }

    #[test]
    fn lines_break_where_nothing_was_answered() {
        let bin = |at_s| Bin {
            at_s,
            min_ms: 1.0,
            mid_ms: 1.0,
            max_ms: 1.0,
        };
        let bins = [bin(0.0), bin(0.1), bin(0.2), bin(1.5), bin(1.6)];
        let runs: Vec<usize> = unbroken(&bins, 0.3).map(<[Bin]>::len).collect();
        assert_eq!(runs, [3, 2]);
        assert_eq!(unbroken(&[], 0.3).count(), 0);
    }

    fn ascending(n: u32) -> Vec<f64> {
        (1..=n).map(f64::from).collect()
    }

    #[test]
    fn tail_reaches_the_largest_value_and_falls() {
        let points = tail(&ascending(10_000), 200);
        assert_eq!(points[0], (0.001, 1.0));
        assert_eq!(*points.last().unwrap(), (10.0, 0.0001));
        assert!(points
            .windows(2)
            .all(|w| w[0].0 <= w[1].0 && w[0].1 > w[1].1));
        assert!(points.len() < 400);
        assert!(tail(&[], 10).is_empty());
        assert_eq!(tail(&[7_000.0], 10), [(7.0, 1.0)]);
    }

    #[test]
    fn cdf_ends_at_one() {
        let points = cdf(&ascending(1_000), 100);
        assert_eq!(*points.last().unwrap(), (1.0, 1.0));
        assert_eq!(points[0], (0.001, 0.001));
        assert!(cdf(&[], 100).is_empty());
    }

    #[test]
    fn histogram_counts_what_is_inside() {
        let sorted = [1_000.0, 1_500.0, 9_000.0, 900_000.0];
        let bins = histogram(&sorted, &(0.0..10.0), 10);
        assert_eq!((bins[1], bins[9]), (0.5, 0.25));
        assert_eq!(bins.iter().sum::<f64>(), 0.75, "the outlier is outside");
        let bins = histogram(&sorted, &(5.0..1_000.0), 2);
        assert_eq!(bins, [0.25, 0.25]);
        assert_eq!(histogram(&[], &(0.0..1.0), 2), [0.0, 0.0]);
    }
}
