// SPDX-License-Identifier: GPL-2.0-or-later
//! How far each figure of one run would have come out elsewhere in time: the variance of a mean
//! whose values drift. Pure; delays are in µs.
//!
//! A path's delay drifts over any length of time, and two runs lie further apart than any two
//! parts of one. So a run's slowest changes are measured, and carried on to slower ones by the rate
//! at which they grow: see [`SlowVariance`] and docs/measuring.md.

use std::rc::Rc;

use super::stats::{ascending, quantile, reordered, Reply, Table};

/// A quantile is compared when so many samples lie beyond it.
const BEYOND: f64 = 10.0;
/// Other figures are compared from so many samples on.
const LEAST: usize = 20;
/// Parts that the shorter run is cut into to compare extremes, and the least samples of a part.
const SEGMENTS: usize = 40;
pub(crate) const SEGMENT_LEAST: usize = 10;
/// Parts of a run whose sums are kept.
const CELLS: usize = 64;
/// Steps that delays may have been rounded to, µs, coarsest first: ping(8) prints whole ms from 100 ms on and
/// tenths from 10 ms on (iputils, ping_common.c).
const ROUNDED_TO: [f64; 4] = [1_000.0, 100.0, 10.0, 1.0];
/// By trial: where delays drift, the whole way would find half as many differences; none of it (straight lines from the
/// median itself) would take the two levels of a route that changes for a difference.
const MEDIAN_FOLLOWED: f64 = 0.5;
/// Parts of a run whose medians show how its level moves.
const LEVEL_PARTS: usize = 16;
/// The slowest cosines that show slow variation, and those that show how it grows.
const SLOW: usize = 4;
const FAST: usize = 16;
/// Power of the growth by which variation is carried on to slower changes than a run can show:
/// 1/f noise grows 4.8-fold from the fast to the slow cosines, and 2.9-fold from these to the
/// difference of two successive runs.
const CARRY: f64 = 0.68;
/// Bound of that factor.
const CARRY_MOST: f64 = 10.0;

/// Variance of a series' mean by its slowest changes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SlowVariance {
    /// Standard error of the mean.
    pub error: f64,
    /// Degrees of freedom of the error's square.
    pub freedom: f64,
}

impl SlowVariance {
    /// Of values in order of time, 8 or more.
    ///
    /// The projections on the slowest cosines have the variance of the mean (Lazarus, Lewis, Stock
    /// and Watson 2018). Where they are larger than the faster ones, the variation grows with its
    /// duration, and is taken to go on growing.
    pub(crate) fn of(series: &[f64]) -> Self {
        let n = series.len() as f64;
        let mean = mean(series);
        let power = |j: usize| {
            let wave = |i: usize| (std::f64::consts::PI * j as f64 * (i as f64 + 0.5) / n).cos();
            let sum: f64 = series
                .iter()
                .enumerate()
                .map(|(i, v)| (v - mean) * wave(i))
                .sum();
            2.0 / n * sum * sum
        };
        let slow_count = SLOW.min(series.len() / 2).max(1);
        let fast_end = FAST.min(series.len() - 1);
        let average = |from: usize, to: usize| {
            (from..=to).map(power).sum::<f64>() / (to + 1).saturating_sub(from).max(1) as f64
        };
        let slow = average(1, slow_count);
        let fast = average(slow_count + 1, fast_end);
        let growth = if fast > 0.0 { slow / fast } else { 1.0 };
        let carry = growth.max(1.0).powf(CARRY).min(CARRY_MOST);
        Self {
            error: (slow.max(fast) * carry / n).sqrt(),
            freedom: slow_count as f64,
        }
    }
}

/// Occurrences of something among trials.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Events {
    /// How often it occurred.
    pub count: u64,
    /// How often it could have.
    pub trials: u64,
    /// What a share of 1 is in the row's unit.
    pub unit: f64,
}

/// A figure of a run.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RunFigure {
    /// In the row's unit.
    pub value: f64,
    /// Degrees of freedom of its standard error.
    pub freedom: f64,
    /// For the exact test of rare events.
    pub events: Option<Events>,
    /// Answers that it is of, or probes.
    samples: f64,
    /// Standard error, the same in both directions.
    error: f64,
    /// The error is no smaller: it is rounding's, which is the same in a run of any length.
    least: f64,
    /// The quantile in the figure, and the one that is taken off it: their errors come on top.
    quantile: Option<UncertainQuantile>,
    less: Option<UncertainQuantile>,
}

/// A quantile, which is as uncertain as the share of samples below it, and at least as its level.
#[derive(Clone, Debug, PartialEq)]
struct UncertainQuantile {
    sorted: Rc<[f64]>,
    value: f64,
    /// Of the samples, 0 to 1, and its standard error.
    share: f64,
    error: f64,
    /// Standard error of the level.
    level: f64,
    /// What the level's error is at least, by rounding.
    least: f64,
    /// Up to this part of a bound's way the run's distribution says how far it is in delay; on from there it is as far
    /// again for the same share.
    followed: f64,
}

impl UncertainQuantile {
    fn reach(&self, t: f64) -> (f64, f64) {
        let off = t * self.error * self.followed;
        let (low, high) = (self.share - off, self.share + off);
        let at = |p: f64| quantile(&self.sorted, p).unwrap_or(self.value);
        // With no sample beyond, nothing tells how far it is.
        let below = if low > 0.0 {
            self.value - at(low)
        } else {
            f64::INFINITY
        };
        let above = if high < 1.0 {
            at(high) - self.value
        } else {
            f64::INFINITY
        };
        let least = t * self.level.max(self.least);
        let whole = |part: f64| (part / self.followed).max(least);
        (whole(below), whole(above))
    }
}

impl RunFigure {
    fn even(value: f64, slow: SlowVariance) -> Self {
        Self {
            value,
            freedom: slow.freedom,
            events: None,
            samples: 0.0,
            error: slow.error,
            least: 0.0,
            quantile: None,
            less: None,
        }
    }

    /// How far below and above the value its bounds lie, `t` standard errors away.
    pub(crate) fn reach(&self, t: f64) -> (f64, f64) {
        let even = t * self.error.max(self.least);
        let reach = |quantile: &Option<UncertainQuantile>| {
            quantile.as_ref().map_or((0.0, 0.0), |q| q.reach(t))
        };
        let (below, above) = reach(&self.quantile);
        let (less_below, less_above) = reach(&self.less);
        (
            below.hypot(less_above).hypot(even),
            above.hypot(less_below).hypot(even),
        )
    }

    /// The figure, at least as uncertain as the same one of another run, or as that would be if it were as short. What a run
    /// happened not to meet (a burst) it does not know of.
    pub(crate) fn as_uncertain_as(&self, other: &Self) -> Self {
        let mut figure = self.clone();
        let shorter = (other.samples / self.samples.max(1.0)).max(1.0).sqrt();
        figure.error = figure.error.max(other.error * shorter);
        figure.least = figure.least.max(other.least);
        for (own, least) in [
            (&mut figure.quantile, &other.quantile),
            (&mut figure.less, &other.less),
        ] {
            if let Some((own, least)) = own.as_mut().zip(least.as_ref()) {
                own.error = own.error.max(least.error * shorter);
                own.level = own.level.max(least.level * shorter);
                own.least = own.least.max(least.least);
            }
        }
        figure
    }

    fn with_events(mut self, events: Events) -> Self {
        self.events = Some(events);
        self
    }

    /// The figure, no surer than by this error of rounding.
    fn at_least(mut self, error: f64) -> Self {
        self.least = self.least.max(error);
        self
    }

    fn scaled(mut self, factor: f64) -> Self {
        self.value *= factor;
        self.error *= factor;
        self.least *= factor;
        self
    }
}

/// Columns of the cells before the thresholds'.
const SENT: usize = 0;
const ANSWERED: usize = 1;
const SUM: usize = 2;
const SQUARES: usize = 3;
const STEPS: usize = 4;
const PAIRS: usize = 5;
const REORDERED: usize = 6;
const QUANTILES: usize = 7;
const OVER: usize = QUANTILES + LEVELS.len();
const LEVELS: [f64; 4] = [0.5, 0.95, 0.99, 0.999];

/// Sums of everything the rows are made of, by cell of successive probes.
struct Cells {
    columns: usize,
    sums: Vec<f64>,
    total: Vec<f64>,
}

impl Cells {
    fn new(replies: &[Reply], table: &Table, center: f64, at: [f64; 4]) -> Self {
        let columns = OVER + table.over.len();
        let sent = table.sent as usize;
        let count = CELLS.min(sent).max(1);
        let mut sums = vec![0.0; count * columns];
        let cell_of = |i: usize| (i * count / sent.max(1)).min(count - 1) * columns;
        for i in 0..sent {
            sums[cell_of(i) + SENT] += 1.0;
        }
        let mut before = None;
        for (reply, is_reordered) in replies.iter().zip(reordered(replies)) {
            let start = cell_of(reply.seq as usize);
            let cell = &mut sums[start..start + columns];
            let x = reply.rtt_us - center;
            cell[ANSWERED] += 1.0;
            cell[SUM] += x;
            cell[SQUARES] += x * x;
            if let Some(before) = before.replace(x) {
                cell[STEPS] += (x - before).abs();
                cell[PAIRS] += 1.0;
            }
            cell[REORDERED] += f64::from(u8::from(is_reordered));
            for (sum, q) in cell[QUANTILES..].iter_mut().zip(at) {
                *sum += f64::from(u8::from(reply.rtt_us <= q));
            }
            for (sum, over) in cell[OVER..].iter_mut().zip(&table.over) {
                *sum += f64::from(u8::from(reply.rtt_us > over.threshold_us));
            }
        }
        let mut total = vec![0.0; columns];
        for cell in sums.chunks_exact(columns) {
            total.iter_mut().zip(cell).for_each(|(t, v)| *t += v);
        }
        Self {
            columns,
            sums,
            total,
        }
    }

    /// The ratio of two columns over the run, and its error: each cell's part in it is what it has
    /// beyond its share.
    fn ratio(&self, column: usize, of: usize) -> (f64, SlowVariance) {
        let all = self.total[of].max(1.0);
        let ratio = self.total[column] / all;
        let count = self.sums.len() / self.columns;
        let parts: Vec<f64> = (self.sums.chunks_exact(self.columns))
            .map(|cell| (cell[column] - ratio * cell[of]) * count as f64 / all)
            .collect();
        (ratio, SlowVariance::of(&parts))
    }

    fn share(&self, column: usize, of: usize) -> RunFigure {
        let (ratio, slow) = self.ratio(column, of);
        RunFigure::even(ratio, slow)
    }

    /// The standard deviation with n, µs.
    fn deviation(&self) -> RunFigure {
        let (variance, slow) = self.ratio(SQUARES, ANSWERED);
        let deviation = variance.sqrt();
        let error = slow.error / (2.0 * deviation).max(f64::MIN_POSITIVE);
        RunFigure::even(deviation, SlowVariance { error, ..slow })
    }

    /// Percent of the probes.
    fn loss(&self, table: &Table) -> RunFigure {
        let mut loss = self.share(ANSWERED, SENT).scaled(100.0);
        loss.value = 100.0 - loss.value;
        loss.with_events(Events {
            count: table.lost(),
            trials: table.sent,
            unit: 100.0,
        })
    }
}

/// What delays in ascending order were rounded to by whoever wrote them down, µs: the step that those above the
/// median are multiples of. 0: none that matters.
pub(crate) fn rounded_to(sorted: &[f64]) -> f64 {
    let upper = &sorted[sorted.len() / 2..];
    let fits = |step: &f64| {
        let off = |rtt: &f64| (rtt / step - (rtt / step).round()).abs();
        upper.iter().all(|rtt| off(rtt) < 1e-6)
    };
    ROUNDED_TO.into_iter().find(fits).unwrap_or(0.0)
}

/// How the level moves: medians of parts of the run.
fn level(replies: &[Reply]) -> Option<SlowVariance> {
    let part = replies.len().div_ceil(LEVEL_PARTS).max(1);
    let medians: Vec<f64> = (replies.chunks(part))
        .filter_map(|part| {
            let rtts = ascending(part.iter().map(|r| r.rtt_us));
            quantile(&rtts, 0.5)
        })
        .collect();
    (medians.len() >= 8).then(|| SlowVariance::of(&medians))
}

/// The figures of one run, for each row of its [`Table::rows`]; `None` where nothing can be said.
///
/// `replies` in order of arrival, of the table's `sent` probes, numbered from 0. Counts are
/// scaled to `per` answers, so that runs of different lengths compare. `segment`: samples per
/// part for Min and Max. All rows stand here one below the other, in the order of the table.
pub(crate) fn figures(
    replies: &[Reply],
    table: &Table,
    per: f64,
    segment: usize,
) -> Vec<Option<RunFigure>> {
    let n = replies.len();
    let sorted: Rc<[f64]> = ascending(replies.iter().map(|r| r.rtt_us)).into();
    let at = LEVELS.map(|p| quantile(&sorted, p).unwrap_or(f64::NAN));
    let center = table.delays.as_ref().map_or(0.0, |d| d.avg);
    let cells = Cells::new(replies, table, center, at);
    let some = n >= LEAST;
    // A rounded delay is off by up to half a step, and all of a run by as much to the same side.
    let step = rounded_to(&sorted);
    let rounding = step / 2.0;
    let level = level(replies).filter(|_| some);
    let judged = |i: usize| {
        let (level, followed) = match LEVELS[i] {
            0.5 => (Some(0.0), MEDIAN_FOLLOWED),
            _ => (level.map(|level| level.error), 1.0),
        };
        let (share, slow) = cells.ratio(QUANTILES + i, ANSWERED);
        let quantile = UncertainQuantile {
            sorted: sorted.clone(),
            value: at[i],
            share,
            error: slow.error,
            level: level?,
            least: rounding,
            followed,
        };
        let even = RunFigure::even(at[i], SlowVariance { error: 0.0, ..slow });
        (n >= beyond(LEVELS[i])).then_some(RunFigure {
            quantile: Some(quantile),
            ..even
        })
    };
    let [median, p95, p99] = [0, 1, 2].map(judged);
    let p999 = table.delays.as_ref().and_then(|d| d.p999);
    let p999 = p999.and_then(|_| judged(3));
    let pdv = p99
        .clone()
        .zip(median.as_ref())
        .map(|(high, low)| RunFigure {
            value: high.value - low.value,
            less: low.quantile.clone(),
            ..high
        });
    let avg = some.then(|| {
        let mut mean = cells.share(SUM, ANSWERED);
        mean.value += center;
        mean
    });
    let mdev = some.then(|| cells.deviation());
    // Only delays that spread over several steps tell by their mean where between two they are.
    let is_narrow = mdev.as_ref().is_some_and(|d| d.value < step);
    let avg = avg.map(|avg| avg.at_least(if is_narrow { rounding } else { 0.0 }));
    let extremes = Some(segment).filter(|segment| *segment >= SEGMENT_LEAST);
    let extremes = extremes.and_then(|segment| extremes_of_parts(replies, segment));
    let extreme = |i: usize| {
        let parts = &extremes.as_ref()?[i];
        let figure = RunFigure::even(mean(parts), SlowVariance::of(parts));
        Some(figure.at_least(rounding))
    };
    let one_less = (n as f64 / (n as f64 - 1.0)).sqrt();
    let stdev = mdev.clone().map(|d| d.scaled(one_less));
    let jitter = some.then(|| cells.share(STEPS, PAIRS));
    let loss = (table.sent >= LEAST as u64).then(|| cells.loss(table));
    let count = |column: usize, count: u64| {
        let share = || cells.share(column, ANSWERED).scaled(per);
        let (trials, unit) = (n as u64, per);
        some.then(|| {
            share().with_events(Events {
                count,
                trials,
                unit,
            })
        })
    };
    let mut rows = vec![
        None,
        extreme(0),
        avg,
        median,
        p95,
        p99,
        p999,
        extreme(1),
        extreme(2),
        stdev,
        mdev,
        pdv,
        jitter,
        loss,
        count(REORDERED, table.reordered),
    ];
    let over = table.over.iter().enumerate();
    rows.extend(over.map(|(i, over)| count(OVER + i, over.count)));
    for row in rows.iter_mut().flatten() {
        row.samples = row.events.map_or(n as f64, |events| events.trials as f64);
    }
    rows
}

/// Answers that the `p` quantile takes before it is judged.
fn beyond(p: f64) -> usize {
    (BEYOND / (1.0 - p)).round() as usize
}

/// Answers that a row takes before it is judged, of several runs in all.
pub(crate) fn least(row: &str) -> usize {
    match row {
        "P95" => beyond(0.95),
        "P99" | "PDV" => beyond(0.99),
        "P99.9" => beyond(0.999),
        _ => LEAST,
    }
}

/// Samples per segment for single runs of which the shortest has `n` answers.
pub(crate) fn segment(n: usize) -> usize {
    n / SEGMENTS
}

/// The rows of [`extremes_of_parts`].
pub(crate) const EXTREMES: [&str; 3] = ["Min", "Max", "Max−Min"];

/// The least, the largest and their difference of equally long parts, µs; `None` without a part. Extremes of a whole run
/// hang on single samples, nothing tells how far they would differ in another run, and a longer run has larger ones.
/// Their means over parts can be compared.
pub(crate) fn extremes_of_parts(replies: &[Reply], segment: usize) -> Option<[Vec<f64>; 3]> {
    if segment == 0 || replies.len() < segment {
        return None;
    }
    let parts = replies.chunks_exact(segment);
    let fold = |of: fn(f64, f64) -> f64| -> Vec<f64> {
        let rtts = parts.clone().map(|part| part.iter().map(|r| r.rtt_us));
        rtts.filter_map(|rtts| rtts.reduce(of)).collect()
    };
    let (low, high) = (fold(f64::min), fold(f64::max));
    let range = low.iter().zip(&high).map(|(low, high)| high - low);
    let range = range.collect();
    Some([low, high, range])
}

/// 0 of none.
pub(crate) fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}
