// SPDX-License-Identifier: GPL-2.0-or-later
//! What can be said about the difference of a figure between two sides. Pure; delays are in µs.
//!
//! Method, sources and measured error rates: docs/measuring.md.

use serde::{Deserialize, Deserializer, Serialize};
use statrs::distribution::{Binomial, ContinuousCDF, DiscreteCDF, StudentsT};

use super::stats::{ascending, quantile};
use super::variation::{Events, RunFigure};

/// Two-sided level of every test; intervals have 1 − this.
pub const LEVEL: f64 = 0.05;
/// Events are also tested exactly up to so many; above, the spread needs no help.
const RARE: u64 = 200;
/// No test is asked for more standard errors than this.
const FAR: f64 = 1e3;

/// What can be said about a row, less being better in all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RowVerdict {
    /// Significantly less.
    #[serde(rename = "better")]
    Better,
    /// Significantly more.
    #[serde(rename = "worse")]
    Worse,
    /// The difference may be chance.
    #[serde(rename = "cannot tell")]
    CannotTell,
    /// No test is possible.
    #[serde(rename = "too few samples")]
    TooFew,
}

impl RowVerdict {
    /// For a difference (second − first) and its p-value.
    pub fn of(difference: f64, p: f64) -> Self {
        match (p < LEVEL, difference < 0.0) {
            (false, _) => RowVerdict::CannotTell,
            (true, true) => RowVerdict::Better,
            (true, false) => RowVerdict::Worse,
        }
    }

    /// As tables and JSON have it.
    pub(crate) fn text(self) -> &'static str {
        match self {
            RowVerdict::Better => "better",
            RowVerdict::Worse => "worse",
            RowVerdict::CannotTell => "cannot tell",
            RowVerdict::TooFew => "too few samples",
        }
    }
}

/// An estimate and its confidence interval. A bound may be infinite: JSON's null.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// Best guess.
    pub estimate: f64,
    /// Lower bound.
    #[serde(deserialize_with = "no_low")]
    pub low: f64,
    /// Upper bound.
    #[serde(deserialize_with = "no_high")]
    pub high: f64,
}

impl Interval {
    /// The percentile interval of the given level (0.95) over resampled estimates; `None` without
    /// any.
    pub fn of(estimate: f64, draws: Vec<f64>, level: f64) -> Option<Self> {
        let draws = ascending(draws);
        let tail = (1.0 - level) / 2.0;
        let (low, high) = (quantile(&draws, tail)?, quantile(&draws, 1.0 - tail)?);
        Some(Self {
            estimate,
            low,
            high,
        })
    }
}

fn no_low<'de, D: Deserializer<'de>>(bound: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(bound)?.unwrap_or(f64::NEG_INFINITY))
}

fn no_high<'de, D: Deserializer<'de>>(bound: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(bound)?.unwrap_or(f64::INFINITY))
}

/// The difference of a row between two sides, second − first.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RowDifference {
    /// Of the difference, in the row's unit.
    #[serde(flatten)]
    pub interval: Interval,
    /// Two-sided p-value of "no difference".
    pub p: f64,
    /// By `p`.
    pub verdict: RowVerdict,
}

impl RowDifference {
    /// Where the p-value shows no difference, the interval says the same.
    pub(crate) fn new(mut interval: Interval, p: f64) -> Self {
        if p >= LEVEL {
            interval.low = interval.low.min(0.0);
            interval.high = interval.high.max(0.0);
        }
        Self {
            interval,
            p,
            verdict: RowVerdict::of(interval.estimate, p),
        }
    }

    /// Where a side has seen no event, there may be some all the same: up to the exact bound of their rate (Clopper and
    /// Pearson 1934). Where it has seen nothing else, likewise.
    pub(crate) fn with_unseen(mut self, events: [Option<Events>; 2]) -> Self {
        // How far the rate may be below what was seen, and above.
        let [a, b] = events.map(|events| {
            let Some(Events {
                count,
                trials,
                unit,
            }) = events.filter(|events| events.trials > 0)
            else {
                return (0.0, 0.0);
            };
            let unseen = unit * (1.0 - (LEVEL / 2.0).powf(1.0 / trials as f64));
            match count {
                0 => (0.0, unseen),
                all if all == trials => (unseen, 0.0),
                _ => (0.0, 0.0),
            }
        });
        let Interval { estimate, .. } = self.interval;
        self.interval.low = self.interval.low.min(estimate - a.1 - b.0);
        self.interval.high = self.interval.high.max(estimate + a.0 + b.1);
        self
    }
}

/// The difference of two runs, by what each varies of its own.
///
/// The interval combines the two figures' bounds, which need not be even (MOVER: Zou and Donner
/// 2008); the p-value is the level at which it no longer holds 0.
pub(crate) fn difference(a: &RunFigure, b: &RunFigure) -> RowDifference {
    let estimate = b.value - a.value;
    let freedom = welch(a, b);
    let (a, b) = (&a.as_uncertain_as(b), &b.as_uncertain_as(a));
    let bounds = |t: f64| {
        let ((a_low, a_high), (b_low, b_high)) = (a.reach(t), b.reach(t));
        (
            estimate - b_low.hypot(a_high),
            estimate + b_high.hypot(a_low),
        )
    };
    let shown = |t: f64| match bounds(t) {
        (low, _) if estimate > 0.0 => low > 0.0,
        (_, high) if estimate < 0.0 => high < 0.0,
        _ => false,
    };
    // The largest t whose interval leaves 0 out.
    let (mut from, mut to) = (0.0, FAR);
    for _ in 0..60 {
        let middle = (from + to) / 2.0;
        if shown(middle) {
            from = middle;
        } else {
            to = middle;
        }
    }
    let p = rare_too(two_sided(from, freedom), a.events, b.events);
    let (low, high) = bounds(critical(freedom));
    RowDifference::new(
        Interval {
            estimate,
            low,
            high,
        },
        p,
    )
}

/// Degrees of freedom of a sum of two variances (Welch and Satterthwaite).
fn welch(a: &RunFigure, b: &RunFigure) -> f64 {
    let variance = |f: &RunFigure| {
        let (low, high) = f.reach(1.0);
        low.min(high).powi(2)
    };
    let (va, vb) = (variance(a), variance(b));
    if va + vb <= 0.0 {
        return a.freedom + b.freedom;
    }
    (va + vb).powi(2) / (va * va / a.freedom + vb * vb / b.freedom)
}

fn student(freedom: f64) -> StudentsT {
    StudentsT::new(0.0, 1.0, freedom.max(1.0)).expect("a scale of 1 and freedom above 0")
}

fn two_sided(t: f64, freedom: f64) -> f64 {
    (2.0 * student(freedom).sf(t)).min(1.0)
}

fn critical(freedom: f64) -> f64 {
    student(freedom).inverse_cdf(1.0 - LEVEL / 2.0)
}

/// The difference of two sides that hold several runs: of the runs' figures, by how far they differ
/// within a side (Student's t with one variance). `step`: what the figures were rounded to, 0 for nothing that
/// matters. `None` where no side has two.
pub(crate) fn replicates(
    a: &[f64],
    b: &[f64],
    events: [Option<Events>; 2],
    step: f64,
) -> Option<RowDifference> {
    let mean = |v: &[f64]| v.iter().sum::<f64>() / v.len() as f64;
    let squares = |v: &[f64]| v.iter().map(|x| (x - mean(v)).powi(2)).sum::<f64>();
    let freedom = (a.len() + b.len()).checked_sub(2).filter(|f| *f > 0)? as f64;
    if a.is_empty() || b.is_empty() {
        return None;
    }
    let estimate = mean(b) - mean(a);
    let variance = (squares(a) + squares(b)) / freedom;
    let error = (variance * (1.0 / a.len() as f64 + 1.0 / b.len() as f64)).sqrt();
    // A rounded delay is off by up to half a step, and all of a side by as much to the same side.
    let error = error.max(step / 2f64.sqrt());
    let p = match (estimate == 0.0, error > 0.0) {
        (true, _) => 1.0,
        (_, true) => two_sided((estimate / error).abs(), freedom),
        (_, false) => 0.0,
    };
    let half = critical(freedom) * error;
    let interval = Interval {
        estimate,
        low: estimate - half,
        high: estimate + half,
    };
    Some(RowDifference::new(
        interval,
        rare_too(p, events[0], events[1]),
    ))
}

/// Holm's step-down p-values (1979), in the order of `p`.
pub fn holm(p: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|&i, &j| p[i].total_cmp(&p[j]));
    let mut adjusted = vec![0.0; p.len()];
    let mut least: f64 = 0.0;
    for (rank, &i) in order.iter().enumerate() {
        least = least.max((p.len() - rank) as f64 * p[i]).min(1.0);
        adjusted[i] = least;
    }
    adjusted
}

/// A p-value, and no smaller than the exact one where both sides count events.
fn rare_too(p: f64, a: Option<Events>, b: Option<Events>) -> f64 {
    a.zip(b).map_or(p, |(a, b)| p.max(exact(a, b)))
}

/// p-value of equal rates of rare independent events: given their sum, the first run's share of
/// them is binomial (Przyborowski and Wilenski 1940). 0 where events are not rare.
fn exact(a: Events, b: Events) -> f64 {
    let rare = |e: Events| e.count.min(e.trials - e.count);
    let (mut x, mut y) = (a.count, b.count);
    if 2 * (x + y) > a.trials + b.trials {
        (x, y) = (a.trials - x, b.trials - y);
    }
    let n = x + y;
    if n == 0 {
        return 1.0;
    }
    if n > RARE || rare(a) + rare(b) > RARE {
        return 0.0;
    }
    let share = a.trials as f64 / (a.trials + b.trials) as f64;
    let of_first = Binomial::new(share, n).expect("a share of 0 to 1");
    let at_least = x.checked_sub(1).map_or(1.0, |less| of_first.sf(less));
    (2.0 * of_first.cdf(x).min(at_least)).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rare_events_are_tested_exactly() {
        let of = |count, trials| Events {
            count,
            trials,
            unit: 1.0,
        };
        for (a, b, expected) in [
            // All five on one of two equal sides: twice 1/2^5.
            (of(0, 100), of(5, 100), 1.0 / 16.0),
            (of(5, 100), of(0, 100), 1.0 / 16.0),
            // Three or all of four on the side with a third of the trials: twice (8 + 1) / 3^4.
            (of(3, 100), of(1, 200), 2.0 / 9.0),
            // Its absence is the rare event.
            (of(100, 100), of(95, 100), 1.0 / 16.0),
            (of(0, 100), of(0, 50), 1.0),
            (of(2, 100), of(2, 100), 1.0),
            // Too many: the spread tells.
            (of(150, 1_000), of(100, 1_000), 0.0),
        ] {
            let p = exact(a, b);
            assert!((p - expected).abs() < 1e-9, "{a:?} {b:?}: {p}");
        }
    }
}
