// SPDX-License-Identifier: GPL-2.0-or-later
//! The rows of every table of delays, and the quantile that all figures use. Pure; delays are in µs.
//!
//! Definitions and sources: docs/measuring.md.

use std::fmt;

use serde::{Deserialize, Serialize};

/// From so many samples on P99.9 is shown: 20 of them lie beyond it.
pub const P999_FROM: usize = 20_000;

/// One answered probe.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reply {
    /// Number in the order of sending.
    pub seq: u64,
    /// Round trip, µs.
    pub rtt_us: f64,
}

/// Figures of the delays themselves, µs; they exist from one sample on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Delays {
    /// Smallest.
    pub min: f64,
    /// Mean.
    pub avg: f64,
    /// 50th percentile.
    pub median: f64,
    /// 95th percentile.
    pub p95: f64,
    /// 99th percentile.
    pub p99: f64,
    /// From [`P999_FROM`] samples on.
    pub p999: Option<f64>,
    /// Largest.
    pub max: f64,
    /// Standard deviation with n − 1; 0 for one sample.
    pub stdev: f64,
    /// As ping(8) prints it: √(mean of squares − square of mean), so with n.
    pub mdev: f64,
    /// RFC 3550 section 6.4.1 (gain 1/16) over the RTTs in order of arrival, its last value.
    pub jitter: f64,
}

impl Delays {
    /// Max − min.
    pub(crate) fn range(&self) -> f64 {
        self.max - self.min
    }

    /// Delay variation, p99 − p50.
    pub(crate) fn pdv(&self) -> f64 {
        self.p99 - self.median
    }
}

/// How many samples exceeded a threshold.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Over {
    /// Delays above this are counted, µs.
    pub threshold_us: f64,
    /// How many were above it.
    pub count: u64,
}

/// Everything a table shows of one series of probes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Table {
    /// Probes sent.
    pub sent: u64,
    /// Answers, duplicates not counted.
    pub count: u64,
    /// Answers that came after one to a later probe (RFC 4737).
    pub reordered: u64,
    /// `None` without any answer.
    pub delays: Option<Delays>,
    /// One per threshold.
    pub over: Vec<Over>,
}

/// How to print a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Unit {
    /// Shown without places.
    #[serde(rename = "count")]
    Count,
    /// Shown as ms, with three places.
    #[serde(rename = "us")]
    Microseconds,
    /// From 0 to 100, with two places.
    #[serde(rename = "percent")]
    Percent,
}

impl Unit {
    /// A figure in words: ms with three places, percent with two, counts whole, – for none.
    pub fn text(self, value: Option<f64>) -> String {
        match (value, self) {
            (None, _) => "–".into(),
            (Some(v), Unit::Count) => format!("{v:.0}"),
            (Some(v), Unit::Microseconds) => format!("{:.3} ms", v / 1e3),
            (Some(v), Unit::Percent) => format!("{v:.2} %"),
        }
    }
}

/// One line of a table.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Heads the line.
    pub name: String,
    /// `None` where there are too few samples.
    pub value: Option<f64>,
    /// How `value` is printed.
    pub unit: Unit,
}

impl fmt::Display for Row {
    /// The value alone.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.unit.text(self.value))
    }
}

impl Table {
    /// Evaluates `replies`, in order of arrival, of `sent` probes. Further replies to the same
    /// probe must have been left out. With no `thresholds_us` they are chosen:
    /// [`choose_thresholds`].
    pub fn new(sent: u64, replies: &[Reply], thresholds_us: &[f64]) -> Self {
        let sorted = ascending(replies.iter().map(|r| r.rtt_us));
        let delays = (!sorted.is_empty()).then(|| delays(replies, &sorted));
        let chosen;
        let thresholds_us = match (&delays, thresholds_us) {
            (Some(delays), []) => {
                chosen = choose_thresholds(delays.median);
                &chosen[..]
            }
            _ => thresholds_us,
        };
        let over = thresholds_us.iter().map(|&threshold_us| {
            let at_most = sorted.partition_point(|&v| v <= threshold_us);
            Over {
                threshold_us,
                count: (sorted.len() - at_most) as u64,
            }
        });
        Self {
            sent,
            count: replies.len() as u64,
            reordered: reordered(replies).map(u64::from).sum(),
            over: over.collect(),
            delays,
        }
    }

    /// Probes without an answer.
    pub(crate) fn lost(&self) -> u64 {
        self.sent.saturating_sub(self.count)
    }

    /// Lost ÷ sent; 0 if nothing was sent.
    pub fn loss(&self) -> f64 {
        self.lost() as f64 / self.sent.max(1) as f64
    }

    /// The rows, the same everywhere and in this order.
    pub fn rows(&self) -> Vec<Row> {
        let us = |name: &str, value: fn(&Delays) -> Option<f64>| Row {
            name: name.into(),
            value: self.delays.as_ref().and_then(value),
            unit: Unit::Microseconds,
        };
        let count = |name: String, n: u64| Row {
            name,
            value: Some(n as f64),
            unit: Unit::Count,
        };
        let mut rows = vec![
            count("Count".into(), self.count),
            us("Min", |d| Some(d.min)),
            us("Avg", |d| Some(d.avg)),
            us("Median", |d| Some(d.median)),
            us("P95", |d| Some(d.p95)),
            us("P99", |d| Some(d.p99)),
            us("P99.9", |d| d.p999),
            us("Max", |d| Some(d.max)),
            us("Max−Min", |d| Some(d.range())),
            us("Stdev", |d| Some(d.stdev)),
            us("mdev", |d| Some(d.mdev)),
            us("PDV", |d| Some(d.pdv())),
            us("Jitter", |d| Some(d.jitter)),
            Row {
                name: "Loss".into(),
                value: (self.sent > 0).then_some(self.loss() * 100.0),
                unit: Unit::Percent,
            },
            count("Reordered".into(), self.reordered),
        ];
        rows.extend(
            self.over
                .iter()
                .map(|o| count(format!("> {} ms", o.threshold_us / 1e3), o.count)),
        );
        rows
    }
}

fn delays(replies: &[Reply], sorted: &[f64]) -> Delays {
    let n = sorted.len() as f64;
    let avg = sorted.iter().sum::<f64>() / n;
    // Two passes: the textbook one-pass formula cancels badly for small spreads.
    let squares: f64 = sorted.iter().map(|v| (v - avg).powi(2)).sum();
    let jitter = replies.windows(2).fold(0.0, |jitter, pair| {
        jitter + ((pair[1].rtt_us - pair[0].rtt_us).abs() - jitter) / 16.0
    });
    let q = |p| quantile(sorted, p).expect("not empty");
    Delays {
        min: sorted[0],
        avg,
        median: q(0.5),
        p95: q(0.95),
        p99: q(0.99),
        p999: (sorted.len() >= P999_FROM).then(|| q(0.999)),
        max: sorted[sorted.len() - 1],
        stdev: (squares / (n - 1.0).max(1.0)).sqrt(),
        mdev: (squares / n).sqrt(),
        jitter,
    }
}

/// Which arrivals are reordered (RFC 4737): those that come after one that was sent later.
pub(super) fn reordered(replies: &[Reply]) -> impl Iterator<Item = bool> + '_ {
    let mut next = 0;
    replies.iter().map(move |reply| {
        let is_reordered = reply.seq < next;
        next = next.max(reply.seq + 1);
        is_reordered
    })
}

/// The values in their order.
pub fn ascending(values: impl IntoIterator<Item = f64>) -> Vec<f64> {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted
}

/// From where on an RTT is an outlier: more than three interquartile ranges above the upper
/// quartile (Tukey's "far out", Exploratory Data Analysis 1977). `None` without samples.
pub fn far_out(sorted: &[f64]) -> Option<f64> {
    let (lower, upper) = (quantile(sorted, 0.25)?, quantile(sorted, 0.75)?);
    Some(upper + 3.0 * (upper - lower))
}

/// The `p` quantile of ascending values, interpolated (Hyndman and Fan's type 7, the default of R
/// and NumPy); `None` if there are none.
pub fn quantile(sorted: &[f64], p: f64) -> Option<f64> {
    let (below, above, share) = between(sorted.len(), p)?;
    Some(sorted[below] + (sorted[above] - sorted[below]) * share)
}

/// [`quantile`] of whole values in any order, which it changes; faster than sorting them.
pub fn quantile_unsorted(values: &mut [u32], p: f64) -> Option<f64> {
    let (below, above, share) = between(values.len(), p)?;
    let (_, low, rest) = values.select_nth_unstable(below);
    let low = f64::from(*low);
    let high = match above > below {
        true => rest.iter().min().copied().map_or(low, f64::from),
        false => low,
    };
    Some(low + (high - low) * share)
}

/// [`quantile`] of values that were counted: `ascending` has each with its count, `n` values in all.
///
/// A histogram that keeps the lower ends of its bins is therefore low by the width of a bin at most.
pub fn quantile_counted(
    n: u64,
    ascending: impl IntoIterator<Item = (f64, u64)>,
    p: f64,
) -> Option<f64> {
    let (below, above, share) = between(n as usize, p)?;
    let (mut low, mut seen) = (None, 0);
    for (value, count) in ascending {
        seen += count;
        if low.is_none() && seen > below as u64 {
            low = Some(value);
        }
        if let (Some(low), true) = (low, seen > above as u64) {
            return Some(low + (value - low) * share);
        }
    }
    low
}

/// The places between which the `p` quantile of `n` ascending values lies, and how far it is from the
/// lower one, 0 to 1.
fn between(n: usize, p: f64) -> Option<(usize, usize, f64)> {
    let last = n.checked_sub(1)?;
    let at = p.clamp(0.0, 1.0) * last as f64;
    let below = (at.floor() as usize).min(last);
    Some((below, (below + 1).min(last), at - below as f64))
}

/// Three round numbers (1–2–5 series) from 1.5 × the median up, µs.
pub(crate) fn choose_thresholds(median_us: f64) -> [f64; 3] {
    let least = (median_us * 1.5).max(1.0);
    let decade = 10f64.powf(least.log10().floor());
    let series = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0].map(|m| m * decade);
    // A power of ten may come out a hair too low or high.
    let from = series
        .iter()
        .position(|&v| v >= least * (1.0 - 1e-9))
        .unwrap_or(3)
        .min(4);
    [series[from], series[from + 1], series[from + 2]]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replies(rtts: &[f64]) -> Vec<Reply> {
        rtts.iter()
            .enumerate()
            .map(|(n, &rtt_us)| Reply {
                seq: n as u64,
                rtt_us,
            })
            .collect()
    }

    #[test]
    fn a_small_table_by_hand() {
        let table = Table::new(6, &replies(&[10.0, 20.0, 30.0, 40.0, 100.0]), &[30.0, 99.0]);
        let d = table.delays.as_ref().unwrap();
        assert_eq!((d.min, d.avg, d.median, d.max), (10.0, 40.0, 30.0, 100.0));
        // Type 7: 0.95·4 = 3.8 → 40 + 0.8·60.
        assert!((d.p95 - 88.0).abs() < 1e-9 && (d.p99 - 97.6).abs() < 1e-9);
        assert_eq!(d.p999, None);
        assert_eq!(d.range(), 90.0);
        assert!((d.pdv() - 67.6).abs() < 1e-9);
        assert!((d.stdev - 1250f64.sqrt()).abs() < 1e-9);
        assert!((d.mdev - 1000f64.sqrt()).abs() < 1e-9);
        // 10·(1 − (15/16)³)·(15/16) + 60/16
        let jitter = 10.0 * (1.0 - 0.9375f64.powi(3)) * 0.9375 + 3.75;
        assert!((d.jitter - jitter).abs() < 1e-9, "{} {jitter}", d.jitter);
        assert_eq!(table.lost(), 1);
        assert!((table.loss() - 1.0 / 6.0).abs() < 1e-12);
        let over: Vec<_> = table.over.iter().map(|o| o.count).collect();
        assert_eq!(over, [2, 1], "strictly over");
    }

    #[test]
    fn a_quantile_is_the_same_of_values_in_any_order() {
        let values: Vec<u32> = (0..101).map(|i| i * 7919 % 1000).collect();
        let sorted = ascending(values.iter().map(|v| f64::from(*v)));
        for p in [0.0, 0.333, 0.5, 0.95, 0.999, 1.0] {
            let unsorted = quantile_unsorted(&mut values.clone(), p);
            assert_eq!(unsorted, quantile(&sorted, p), "{p}");
            let ones = sorted.iter().map(|v| (*v, 1));
            let counted = quantile_counted(sorted.len() as u64, ones, p);
            assert_eq!(counted, unsorted, "{p}");
        }
        assert_eq!(quantile_unsorted(&mut [1, 2], 0.5), Some(1.5));
        assert_eq!(quantile_unsorted(&mut [], 0.5), None);
        assert_eq!(quantile_counted(0, [], 0.5), None);
    }

    #[test]
    fn a_histogram_is_low_by_a_bin_at_most() {
        let sorted = ascending((0..2_000).map(|i| f64::from(i % 1_000 * (i % 1_000) % 9_973)));
        let width = 250.0;
        let mut bins = vec![0u64; 40];
        for value in &sorted {
            bins[(value / width) as usize] += 1;
        }
        for p in [0.0, 0.01, 0.5, 0.95, 0.99, 0.999, 1.0] {
            let counted = bins
                .iter()
                .zip(0..)
                .map(|(n, i)| (f64::from(i) * width, *n));
            let binned = quantile_counted(sorted.len() as u64, counted, p).unwrap();
            let exact = quantile(&sorted, p).unwrap();
            let is_near = (0.0..width).contains(&(exact - binned));
            assert!(is_near, "{p}: {exact} {binned}");
        }
    }

    #[test]
    fn rows_are_named_ordered_and_printed() {
        let table = Table::new(4, &replies(&[1500.0, 2500.0, 1500.0]), &[2000.0]);
        let rows = table.rows();
        let names: Vec<_> = rows.iter().map(|r| r.name.as_str()).collect();
        assert_eq!(
            names.join(", "),
            "Count, Min, Avg, Median, P95, P99, P99.9, Max, Max−Min, Stdev, mdev, PDV, Jitter, \
             Loss, Reordered, > 2 ms"
        );
        let text: Vec<_> = rows.iter().map(Row::to_string).collect();
        assert_eq!(text[..4], ["3", "1.500 ms", "1.833 ms", "1.500 ms"]);
        assert_eq!(text[6], "–");
        assert_eq!(text[13..], ["25.00 %", "0", "1"]);
        assert_eq!(format!("{:>6}", rows[0]), "     3");
    }

    #[test]
    fn no_answers_and_nothing_sent() {
        let table = Table::new(3, &[], &[5.0]);
        assert_eq!((table.delays.clone(), table.loss()), (None, 1.0));
        assert_eq!(
            table.over,
            [Over {
                threshold_us: 5.0,
                count: 0
            }]
        );
        assert_eq!(table.rows()[3].to_string(), "–");
        let table = Table::new(0, &[], &[]);
        assert_eq!(table.loss(), 0.0);
        assert_eq!(table.rows()[13].value, None, "no loss rate of nothing");
        assert_eq!(table.rows().len(), 15);
    }

    #[test]
    fn one_sample_has_no_spread() {
        let d = Table::new(1, &replies(&[7.0]), &[]).delays.unwrap();
        assert_eq!((d.stdev, d.mdev, d.jitter, d.p99), (0.0, 0.0, 0.0, 7.0));
    }

    #[test]
    fn p999_appears_at_twenty_thousand() {
        let rtts: Vec<f64> = (0..P999_FROM).map(|n| n as f64).collect();
        let p999 = |rtts: &[f64]| Table::new(0, &replies(rtts), &[]).delays.unwrap().p999;
        assert_eq!(p999(&rtts[1..]), None);
        assert!((p999(&rtts).unwrap() - 0.999 * 19_999.0).abs() < 1e-6);
    }

    #[test]
    fn reordering_follows_rfc_4737() {
        let of = |seqs: &[u64]| {
            let list: Vec<_> = seqs.iter().map(|&seq| Reply { seq, rtt_us: 1.0 }).collect();
            Table::new(10, &list, &[]).reordered
        };
        assert_eq!(of(&[0, 1, 2, 5, 9]), 0, "gaps are loss");
        assert_eq!(of(&[0, 3, 1, 2, 4]), 2, "both that were overtaken");
        assert_eq!(of(&[4, 3, 2]), 2);
    }

    #[test]
    fn chosen_thresholds_are_round_and_above_the_median() {
        let expected = [50_000.0, 100_000.0, 200_000.0];
        assert_eq!(choose_thresholds(20_000.0), expected);
        assert_eq!(choose_thresholds(300.0), [500.0, 1_000.0, 2_000.0]);
        assert_eq!(choose_thresholds(700.0), [2_000.0, 5_000.0, 10_000.0]);
        assert_eq!(choose_thresholds(0.0), [1.0, 2.0, 5.0]);
        for median in [1.0, 6.7, 33.0, 66.666_666, 1e5, 6.6e6] {
            let t = choose_thresholds(median);
            assert!(t[0] >= median * 1.49 && t[0] <= median * 4.0 && t[0] < t[1] && t[1] < t[2]);
        }
    }
}
