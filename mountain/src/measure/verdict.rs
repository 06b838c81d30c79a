//! How far a run's figures would have come out differently, and what follows for the difference
//! of two runs. Pure and seeded; delays are in µs.
//!
//! Method, sources and measured error rates: docs/measuring.md.

use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;
use serde::{Deserialize, Serialize};

use super::bootstrap::{block_length, Bootstrap, Interval};
use super::stats::{quantile, Reply, Table};

/// Two-sided level of every test; intervals have 1 − this.
pub const LEVEL: f64 = 0.05;
/// A quantile is compared when so many samples lie beyond it in each run.
const BEYOND: f64 = 10.0;
/// Other figures are compared from so many samples on.
const LEAST: usize = 20;
/// Parts that the shorter run is cut into to compare extremes, and the least samples of a part.
const SEGMENTS: usize = 40;
const SEGMENT_LEAST: usize = 10;
/// Longer runs are resampled in cells of several samples, so that there are no more cells.
const CELLS: usize = 10_000;
/// Events are also tested exactly up to so many; above, the resampling needs no help.
const RARE: u64 = 200;

/// What can be said about a row, less being better in all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    #[serde(rename = "better")]
    Better,
    #[serde(rename = "worse")]
    Worse,
    #[serde(rename = "no difference shown")]
    NoDifference,
    #[serde(rename = "too few samples")]
    TooFew,
}

impl Verdict {
    /// For a difference (second − first) and its p-value.
    pub fn of(difference: f64, p: f64) -> Self {
        match (p < LEVEL, difference < 0.0) {
            (false, _) => Verdict::NoDifference,
            (true, true) => Verdict::Better,
            (true, false) => Verdict::Worse,
        }
    }

    pub fn text(self) -> &'static str {
        match self {
            Verdict::Better => "better",
            Verdict::Worse => "worse",
            Verdict::NoDifference => "no difference shown",
            Verdict::TooFew => "too few samples",
        }
    }
}

/// Occurrences of something among trials, for the exact test.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Events {
    count: u64,
    trials: u64,
}

/// What a row is compared by, and values of it that other runs might have had.
#[derive(Clone, Debug, PartialEq)]
pub struct Draws {
    pub estimate: f64,
    draws: Vec<f64>,
    events: Option<Events>,
}

/// The difference of a row between two runs, second − first.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    #[serde(flatten)]
    pub interval: Interval,
    /// Two-sided p-value of "no difference".
    pub p: f64,
    pub verdict: Verdict,
}

/// One run, resampled.
#[derive(Clone, Debug, PartialEq)]
pub struct Resampled {
    /// Probes per block.
    pub block: usize,
    /// For each row of its [`Table::rows`]; `None` where nothing can be said.
    pub rows: Vec<Option<Draws>>,
}

/// The difference of `b` and `a`, the interval and p-value from their draws.
pub fn difference(a: &Draws, b: &Draws) -> Option<Difference> {
    let estimate = b.estimate - a.estimate;
    let draws: Vec<f64> = a.draws.iter().zip(&b.draws).map(|(a, b)| b - a).collect();
    let at_most = draws.iter().filter(|&&d| d <= 0.0).count();
    let at_least = draws.iter().filter(|&&d| d >= 0.0).count();
    let tail = (at_most.min(at_least) + 1) as f64 / (draws.len() + 1) as f64;
    let mut p = (2.0 * tail).min(1.0);
    if let (Some(a), Some(b)) = (a.events, b.events) {
        p = p.max(exact(a, b));
    }
    let mut interval = Interval::of(estimate, draws, 1.0 - LEVEL)?;
    if p >= LEVEL {
        // Where the exact test is what decides, the interval says the same.
        interval.low = interval.low.min(0.0);
        interval.high = interval.high.max(0.0);
    }
    Some(Difference {
        interval,
        p,
        verdict: Verdict::of(estimate, p),
    })
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
    // Probabilities of 0, 1, … n by their ratios, in logarithms as the first may be tiny.
    let mut log = n as f64 * (1.0 - share).ln();
    let mut weights = vec![log.exp()];
    for k in 0..n {
        log += ((n - k) as f64 / (k + 1) as f64).ln() + share.ln() - (1.0 - share).ln();
        weights.push(log.exp());
    }
    let at_most: f64 = weights[..=x as usize].iter().sum();
    let at_least: f64 = weights[x as usize..].iter().sum();
    (2.0 * at_most.min(at_least)).min(1.0)
}

/// How much wider than the draws the interval is to be: a variance from k blocks is too small by
/// (k − 1)/k, and itself uncertain (Student's t by its first Cornish–Fisher term).
fn widening(k: f64) -> f64 {
    let k = k.max(2.0);
    MARGIN * (k / (k - 1.0)).sqrt() * (1.0 + (1.96f64.powi(2) + 1.0) / (4.0 * (k - 1.0)))
}

/// Further widening, so that not only in the mean but in any batch of 200 equal pairs few are
/// called different: without it 6.2% were, by the row that errs most (docs/measuring.md).
const MARGIN: f64 = 1.12;

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
    per_cell: usize,
    sums: Vec<f64>,
    total: Vec<f64>,
    center: f64,
    sorted: Vec<f64>,
    at: [f64; 4],
}

impl Cells {
    fn new(replies: &[Reply], table: &Table) -> Self {
        let columns = OVER + table.over.len();
        let sent = table.sent as usize;
        let per_cell = sent.div_ceil(CELLS).max(1);
        let mut sorted: Vec<f64> = replies.iter().map(|r| r.rtt_us).collect();
        sorted.sort_unstable_by(f64::total_cmp);
        let at = LEVELS.map(|p| quantile(&sorted, p).unwrap_or(f64::NAN));
        let center = table.delays.as_ref().map_or(0.0, |d| d.avg);
        let mut sums = vec![0.0; sent.div_ceil(per_cell) * columns];
        for i in 0..sent {
            sums[i / per_cell * columns + SENT] += 1.0;
        }
        let (mut before, mut next) = (None, 0);
        for reply in replies {
            let start = reply.seq as usize / per_cell * columns;
            let cell = &mut sums[start..start + columns];
            let x = reply.rtt_us - center;
            cell[ANSWERED] += 1.0;
            cell[SUM] += x;
            cell[SQUARES] += x * x;
            if let Some(before) = before.replace(x) {
                cell[STEPS] += (x - before).abs();
                cell[PAIRS] += 1.0;
            }
            if reply.seq < next {
                cell[REORDERED] += 1.0;
            } else {
                next = reply.seq + 1;
            }
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
            per_cell,
            sums,
            total,
            center,
            sorted,
            at,
        }
    }

    fn len(&self) -> usize {
        self.sums.len() / self.columns
    }

    /// Cells per block: the longest that the rule of Politis and White asks for in any column.
    fn block(&self) -> usize {
        let variance = self.total[SQUARES] / self.total[ANSWERED].max(1.0);
        let of = |column: usize, over: usize, rate: f64| {
            let series: Vec<f64> = self
                .sums
                .chunks_exact(self.columns)
                .map(|cell| cell[column] - rate * cell[over])
                .collect();
            block_length(&series)
        };
        let rate = |column: usize, over: usize| self.total[column] / self.total[over].max(1.0);
        let shares = (REORDERED..self.columns).map(|c| of(c, ANSWERED, rate(c, ANSWERED)));
        shares
            .chain([
                of(SUM, ANSWERED, 0.0),
                of(SQUARES, ANSWERED, variance),
                of(STEPS, PAIRS, rate(STEPS, PAIRS)),
                of(ANSWERED, SENT, rate(ANSWERED, SENT)),
            ])
            .max()
            .unwrap_or(1)
            .clamp(1, (self.len() / 2).max(1))
    }

    /// The rows between Count and the thresholds, of one set of sums: Avg, the four quantiles,
    /// standard deviation with n, PDV, mean step, loss (%), then shares of answers.
    fn figures(&self, sums: &[f64], into: &mut Vec<f64>) {
        let answered = sums[ANSWERED].max(1.0);
        let mean = sums[SUM] / answered;
        into.clear();
        into.push(self.center + mean);
        for (i, p) in LEVELS.into_iter().enumerate() {
            let share = |sums: &[f64]| sums[QUANTILES + i] / sums[ANSWERED].max(1.0);
            let p = p + share(&self.total) - share(sums);
            into.push(quantile(&self.sorted, p).unwrap_or(self.at[i]));
        }
        into.push((sums[SQUARES] / answered - mean * mean).max(0.0).sqrt());
        into.push(into[3] - into[1]);
        into.push(sums[STEPS] / sums[PAIRS].max(1.0));
        into.push(100.0 * (1.0 - sums[ANSWERED] / sums[SENT].max(1.0)));
        into.push(sums[REORDERED] / answered);
        into.extend(sums[OVER..].iter().map(|v| v / answered));
    }
}

/// Resamples one run by circular blocks, all rows from the same blocks.
///
/// `replies` in order of arrival, of the table's `sent` probes, numbered from 0. Counts are
/// scaled to `per` answers, so that runs of different lengths compare. `segment`: samples per
/// part for Min and Max.
pub fn resample(
    replies: &[Reply],
    table: &Table,
    per: f64,
    segment: usize,
    resamples: usize,
    seed: u64,
) -> Resampled {
    let cells = Cells::new(replies, table);
    let block = cells.block();
    let (m, columns) = (cells.len(), cells.columns);
    // Sums of the block that starts at each cell and may wrap round.
    let mut blocks = vec![0.0; m * columns];
    let mut running = vec![0.0; columns];
    for i in 0..m + block {
        for (c, sum) in running.iter_mut().enumerate() {
            *sum += cells.sums[i % m.max(1) * columns + c];
            if i >= block {
                *sum -= cells.sums[(i - block) * columns + c];
            }
        }
        if i + 1 >= block && i + 1 - block < m {
            let start = (i + 1 - block) * columns;
            blocks[start..start + columns].copy_from_slice(&running);
        }
    }
    let mut estimates = Vec::new();
    cells.figures(&cells.total, &mut estimates);
    let mut draws = vec![Vec::with_capacity(resamples); estimates.len()];
    let k = m.div_ceil(block);
    let widening =
        widening(m as f64 / block as f64) * ((k * block) as f64 / m.max(1) as f64).sqrt();
    let mut rng = Pcg64::seed_from_u64(seed);
    let (mut sums, mut figures) = (vec![0.0; columns], Vec::new());
    let resamples = if m == 0 { 0 } else { resamples };
    for _ in 0..resamples {
        sums.fill(0.0);
        for _ in 0..k {
            let start = rng.random_range(0..m) * columns;
            for (sum, v) in sums.iter_mut().zip(&blocks[start..start + columns]) {
                *sum += v;
            }
        }
        cells.figures(&sums, &mut figures);
        for ((draws, v), estimate) in draws.iter_mut().zip(&figures).zip(&estimates) {
            draws.push(estimate + (v - estimate) * widening);
        }
    }
    let n = replies.len();
    let mut taken = estimates
        .into_iter()
        .zip(draws)
        .map(|(estimate, draws)| Draws {
            estimate,
            draws,
            events: None,
        });
    let mut take = |least: usize| taken.next().filter(|_| n >= least);
    let avg = take(LEAST);
    let quantiles = LEVELS.map(|p| take((BEYOND / (1.0 - p)).round() as usize));
    let [median, p95, p99, p999] = quantiles;
    let mdev = take(LEAST);
    let stdev = mdev
        .clone()
        .map(|d| scaled(d, (n as f64 / (n as f64 - 1.0)).sqrt()));
    let pdv = take((BEYOND / 0.01) as usize);
    let jitter = take(LEAST);
    let sent = table.sent;
    let loss = take(0).filter(|_| sent >= LEAST as u64);
    let loss = loss.map(|d| with_events(d, table.lost(), sent));
    let answers = n as u64;
    let reordered = take(LEAST).map(|d| with_events(scaled(d, per), table.reordered, answers));
    let extremes = Extremes {
        replies,
        segment,
        bootstrap: Bootstrap {
            resamples,
            block: Some((block * cells.per_cell).div_ceil(segment.max(1))),
            seed: seed ^ 1,
        },
    };
    let p999 = p999.filter(|_| table.delays.as_ref().is_some_and(|d| d.p999.is_some()));
    let mut rows = vec![
        None,
        extremes.draws(|low, _| low),
        avg,
        median,
        p95,
        p99,
        p999,
        extremes.draws(|_, high| high),
        extremes.draws(|low, high| high - low),
        stdev,
        mdev,
        pdv,
        jitter,
        loss,
        reordered,
    ];
    for over in &table.over {
        rows.push(take(LEAST).map(|d| with_events(scaled(d, per), over.count, answers)));
    }
    Resampled {
        block: block * cells.per_cell,
        rows,
    }
}

/// Samples per segment for runs of which the shortest has `n` answers.
pub fn segment(n: usize) -> usize {
    n / SEGMENTS
}

fn scaled(mut draws: Draws, factor: f64) -> Draws {
    draws.estimate *= factor;
    draws.draws.iter_mut().for_each(|v| *v *= factor);
    draws
}

fn with_events(mut draws: Draws, count: u64, trials: u64) -> Draws {
    draws.events = Some(Events { count, trials });
    draws
}

/// Extremes of a whole run hang on single samples, and resampling cannot tell how far they would
/// differ in another run. Their means over many equally long parts can be compared.
struct Extremes<'a> {
    replies: &'a [Reply],
    segment: usize,
    bootstrap: Bootstrap,
}

impl Extremes<'_> {
    fn draws(&self, of: impl Fn(f64, f64) -> f64) -> Option<Draws> {
        if self.segment < SEGMENT_LEAST {
            return None;
        }
        let parts: Vec<f64> = self
            .replies
            .chunks_exact(self.segment)
            .map(|part| {
                let fold = |f: fn(f64, f64) -> f64| part.iter().map(|r| r.rtt_us).reduce(f);
                let (low, high) = (fold(f64::min), fold(f64::max));
                of(low.unwrap_or(f64::NAN), high.unwrap_or(f64::NAN))
            })
            .collect();
        let mean = |v: &[f64]| v.iter().sum::<f64>() / v.len() as f64;
        let estimate = mean(&parts);
        let block = self.bootstrap.block.unwrap_or(1).clamp(1, parts.len());
        let widening = widening(parts.len() as f64 / block as f64);
        let mut draws = self.bootstrap.draws(&parts, |v| mean(v));
        for v in &mut draws {
            *v = estimate + (*v - estimate) * widening;
        }
        Some(Draws {
            estimate,
            draws,
            events: None,
        })
    }
}
