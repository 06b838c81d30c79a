// SPDX-License-Identifier: GPL-2.0-or-later
//! Run files against each other: the same rows side by side, what the differences from the first
//! are worth, and what else differs. Pure; printing is the command line's.
//!
//! A side holds one run or several. With one run a side, a difference counts when it exceeds what the
//! runs' own slow variation explains ([`super::variation`]); with several, when it exceeds how far
//! the runs of a side differ ([`super::verdict::replicates`]), or, measured in turn, round by round
//! ([`super::paired`]). Method: docs/measuring.md.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{ensure, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::paired;
use super::ping::Clock;
use super::runfile::RunFile;
use super::stats::{ascending, choose_thresholds, Reply, Row, Table, Unit};
use super::variation::{self, extremes_of_parts, mean, Events, RunFigure, EXTREMES, SEGMENT_LEAST};
use super::verdict::{self, holm, RowDifference, RowVerdict};

/// Load averages (proc_loadavg(5)) that differ by no more are alike: half a busy process.
const LOAD: f64 = 0.5;
/// A warning names runs that differ so many times in length: the figures of the longer one vary less.
const UNEVEN: usize = 2;
/// Value of [`Comparison::schema`].
pub(crate) const SCHEMA: &str = "mountain-compare/2";
/// The rows that the headline rests on.
pub const HEADLINE: [&str; 3] = ["Median", "P99", "Loss"];

/// What is compared: one run, or several of the same thing.
#[derive(Clone, Debug, PartialEq)]
pub struct Side {
    /// Heads its column.
    pub name: String,
    /// All of the same thing; at least one.
    pub runs: Vec<RunFile>,
}

/// How to compare.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CompareOptions {
    /// Thresholds to count above, µs; empty: chosen by the first run's median.
    pub over_us: Vec<f64>,
    /// The sides' runs were measured in turn: the first of one belongs to the first of the other.
    pub paired: bool,
    /// By what programs saw, queues of this host included, where all runs have that.
    pub by_user: bool,
}

/// Everything that `mountain compare` says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// [`SCHEMA`].
    pub schema: String,
    /// The columns, the one that the others are compared with first.
    pub runs: Vec<Run>,
    /// In the order in which they are shown.
    pub rows: Vec<Compared>,
    /// Of each run but the first.
    pub headlines: Vec<Headline>,
    /// Differences in how the runs were made.
    pub warnings: Vec<Warning>,
    /// Answers per part of the runs that Min, Max and Max−Min are compared by.
    pub segment: usize,
    /// Whether the runs were judged in pairs.
    pub paired: bool,
    /// Whether delays are what programs saw, by their own clock: runs of two clocks cannot be compared otherwise.
    #[serde(default)]
    pub by_user: bool,
    /// Significance level of the verdicts, 0 to 1.
    pub level: f64,
}

/// One column.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Heads the column.
    pub name: String,
    /// What measured: [`RunFile::tool`].
    pub tool: String,
    /// Address or name that was probed.
    pub target: String,
    /// RFC 3339, UTC.
    pub started: String,
    /// How many runs it stands for; the others' tool, target and start are the first's.
    pub runs: usize,
    /// Probes of all its runs together.
    pub sent: u64,
    /// Answers to distinct probes, of all its runs together.
    pub answered: u64,
}

/// One row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Compared {
    /// Name of the figure, e.g. `P99`.
    pub name: String,
    /// Of `values`.
    pub unit: Unit,
    /// Of each run; of several the mean, of counts the sum.
    pub values: Vec<Option<f64>>,
    /// What interval and verdict are about, where that is not the value itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compared_by: Option<String>,
    /// Of each run but the first; empty for rows that are not judged.
    pub against_first: Vec<Against>,
}

/// A row of one run against the first run's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Against {
    /// Change of the value; `None` from 0 or where one is missing. Counts: per answer. Of Min, Max and Max−Min of parts: of
    /// what `compared_by` names.
    pub percent: Option<f64>,
    /// In the row's unit; `None` with too few samples.
    pub difference: Option<RowDifference>,
    /// By the interval of `difference`.
    pub verdict: RowVerdict,
}

/// The verdict on a run as a whole.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Headline {
    /// Name of the run that is judged.
    pub run: String,
    /// The rows of [`HEADLINE`] that could be tested.
    pub tests: Vec<Test>,
    /// At least one row is significantly better than the first run's.
    pub better: bool,
    /// At least one row is significantly worse.
    pub worse: bool,
    /// One sentence.
    pub text: String,
}

/// A row as the headline counts it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Test {
    /// Name of the figure, as in [`HEADLINE`].
    pub row: String,
    /// Two-sided p-value of "no difference", before correction.
    pub p: f64,
    /// After Holm's correction.
    pub p_holm: f64,
    /// By `p_holm`.
    pub verdict: RowVerdict,
}

/// Something besides the figures in which a run differs from the first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Warning {
    /// Name of the run that differs.
    pub run: String,
    /// "environment.kernel.release", "interval_us", …
    pub what: String,
    /// The first run's value; null: not recorded.
    pub first: Value,
    /// The other run's value; null: not recorded.
    pub other: Value,
    /// One sentence for people.
    pub text: String,
}

/// A run, evaluated.
struct Measured {
    table: Table,
    /// Of the table.
    rows: Vec<Row>,
    replies: Vec<Reply>,
}

/// Probes of a side's runs.
fn sent(side: &[Measured]) -> u64 {
    side.iter().map(|run| run.table.sent).sum()
}

/// Answers to distinct probes, likewise.
fn answered(side: &[Measured]) -> u64 {
    side.iter().map(|run| run.table.count).sum()
}

/// Compares sides with the first.
pub fn compare(sides: &[Side], options: &CompareOptions) -> Result<Comparison> {
    ensure!(sides.len() > 1, "a comparison takes at least two run files");
    for side in sides {
        let empty = side.runs.iter().any(|run| run.samples.is_empty());
        ensure!(
            !empty && !side.runs.is_empty(),
            "{} holds no probes: there is nothing to compare",
            side.name
        );
        ensure!(
            !options.paired || side.runs.len() == sides[0].runs.len(),
            "{} has not as many runs as {}",
            side.name,
            sides[0].name
        );
    }
    let by_user = (options.by_user || clocks(sides) > 1) && all_runs(sides).all(has_user);
    let measured = measure(sides, &options.over_us, by_user);
    let rows = Judge::new(&measured, options.paired).rows();
    let headlines = (1..sides.len())
        .map(|i| headline(&sides[i].name, &sides[0].name, &rows, i))
        .collect();
    Ok(Comparison {
        schema: SCHEMA.into(),
        runs: sides.iter().zip(&measured).map(column).collect(),
        rows,
        headlines,
        warnings: all_warnings(sides),
        by_user,
        segment: segment(&measured),
        paired: options.paired,
        level: verdict::LEVEL,
    })
}

fn column((side, measured): (&Side, &Vec<Measured>)) -> Run {
    let run = &side.runs[0];
    Run {
        name: side.name.clone(),
        tool: run.tool.clone(),
        target: run.target.clone(),
        started: run.started.clone(),
        runs: side.runs.len(),
        sent: sent(measured),
        answered: answered(measured),
    }
}

fn all_runs(sides: &[Side]) -> impl Iterator<Item = &RunFile> {
    sides.iter().flat_map(|side| &side.runs)
}

/// By how many clocks there are round trips.
fn clocks(sides: &[Side]) -> usize {
    let clocks: BTreeSet<&str> = all_runs(sides).map(|run| run.clock.as_str()).collect();
    clocks.len()
}

/// Whether a run has round trips by its program's clock.
fn has_user(run: &RunFile) -> bool {
    run.clock == Clock::User.name() || !run.samples.user_rtt_us.is_empty()
}

fn measure(sides: &[Side], over_us: &[f64], by_user: bool) -> Vec<Vec<Measured>> {
    let replies = |run: &RunFile| {
        let samples = &run.samples;
        match by_user && run.clock != Clock::User.name() {
            true => samples.replies(&samples.user_rtt_us),
            false => samples.replies(&samples.rtt_us),
        }
    };
    let over_us = if over_us.is_empty() {
        let mut runs = sides.iter().flat_map(|side| &side.runs);
        let first = runs.find_map(|run| Table::new(0, &replies(run), &[1.0]).delays);
        choose_thresholds(first.map_or(0.0, |delays| delays.median)).to_vec()
    } else {
        over_us.to_vec()
    };
    let measured = |run: &RunFile| {
        let replies = replies(run);
        let table = Table::new(run.samples.len() as u64, &replies, &over_us);
        Measured {
            rows: table.rows(),
            table,
            replies,
        }
    };
    let of_side = |side: &Side| -> Vec<Measured> { side.runs.iter().map(measured).collect() };
    sides.iter().map(of_side).collect()
}

/// Answers per part by which extremes are compared. Of several runs a side, the shortest is a part that has enough for one.
fn segment(measured: &[Vec<Measured>]) -> usize {
    let answered = measured.iter().flatten().map(|run| run.replies.len());
    match is_one_each(measured) {
        true => variation::segment(answered.min().unwrap_or(0)),
        false => answered.filter(|n| *n >= SEGMENT_LEAST).min().unwrap_or(0),
    }
}

fn is_one_each(measured: &[Vec<Measured>]) -> bool {
    measured.iter().all(|side| side.len() == 1)
}

/// Judges row by row.
struct Judge<'a> {
    measured: &'a [Vec<Measured>],
    /// Of each side, where all have one run.
    figures: Option<Vec<Vec<Option<RunFigure>>>>,
    /// Answers of the first run: counts are scaled to them.
    per: f64,
    segment: usize,
    paired: bool,
    /// Of each side, what its delays were rounded to, µs.
    steps: Vec<f64>,
}

impl<'a> Judge<'a> {
    fn new(measured: &'a [Vec<Measured>], paired: bool) -> Self {
        let segment = segment(measured);
        let first = &measured[0];
        let per = (answered(first) as f64 / first.len() as f64).max(1.0);
        let figures = |side: &Vec<Measured>| {
            variation::figures(&side[0].replies, &side[0].table, per, segment)
        };
        let step = |side: &Vec<Measured>| {
            let rtts = side.iter().map(|run| run.replies.iter().map(|r| r.rtt_us));
            let steps = rtts.map(|rtts| variation::rounded_to(&ascending(rtts)));
            steps.fold(0.0, f64::max)
        };
        Self {
            figures: (is_one_each(measured) && !paired)
                .then(|| measured.iter().map(figures).collect()),
            measured,
            per,
            segment,
            paired,
            steps: measured.iter().map(step).collect(),
        }
    }

    /// The step of rounding that a side's figure of this row does not see through, µs. A mean does where the delays
    /// spread over several steps.
    fn rounded_to(&self, row: &Row, side: usize) -> f64 {
        if row.unit != Unit::Microseconds {
            return 0.0;
        }
        let (step, measured) = (self.steps[side], &self.measured[side]);
        let mut delays = measured.iter().filter_map(|run| run.table.delays.as_ref());
        let is_mean = ["Avg", "Jitter", "Stdev", "mdev"].contains(&row.name.as_str());
        match is_mean && delays.all(|d| d.mdev >= step) {
            true => 0.0,
            false => step,
        }
    }

    fn rows(&self) -> Vec<Compared> {
        let first = &self.measured[0][0].rows;
        (0..first.len()).map(|i| self.row(i, &first[i])).collect()
    }

    fn row(&self, i: usize, first: &Row) -> Compared {
        let sides = 0..self.measured.len();
        let against = |side: usize| {
            let difference = self.difference(i, first, side);
            // Of counts and of extremes of parts, the value itself hangs on the length of the run.
            let of_parts = EXTREMES.contains(&first.name.as_str());
            let by_length =
                first.unit == Unit::Count || of_parts && self.compared_by(first).is_some();
            let (a, b) = match by_length {
                true => (self.comparable(i, 0), self.comparable(i, side)),
                false => (self.value(i, 0), self.value(i, side)),
            };
            let percent = (a.zip(b).filter(|(a, _)| *a != 0.0)).map(|(a, b)| 100.0 * (b - a) / a);
            Against {
                // Of too few parts it says nothing of the values beside it.
                percent: percent.filter(|_| difference.is_some() || !of_parts),
                verdict: difference.map_or(RowVerdict::TooFew, |d| d.verdict),
                difference,
            }
        };
        let judged = i > 0;
        Compared {
            name: first.name.clone(),
            unit: first.unit,
            compared_by: self.compared_by(first),
            against_first: (sides.clone().skip(1).filter(|_| judged))
                .map(against)
                .collect(),
            values: sides.map(|side| self.value(i, side)).collect(),
        }
    }

    /// As it is shown.
    fn value(&self, i: usize, side: usize) -> Option<f64> {
        let runs = &self.measured[side];
        let sum: Option<f64> = runs.iter().map(|run| run.rows[i].value).sum();
        match runs[0].rows[i].unit {
            Unit::Count => sum,
            _ => Some(sum? / runs.len() as f64),
        }
    }

    /// The mean of a side's runs, of a count by the number of answers that it is of.
    fn comparable(&self, i: usize, side: usize) -> Option<f64> {
        Some(mean(&self.by_run(i, side)?))
    }

    fn by_run(&self, i: usize, side: usize) -> Option<Vec<f64>> {
        let value = |run: &Measured| {
            let row = &run.rows[i];
            if let Some(i) = EXTREMES.iter().position(|name| *name == row.name) {
                let of_parts = extremes_of_parts(&run.replies, self.segment)?;
                return Some(mean(&of_parts[i]));
            }
            Some(match row.unit {
                Unit::Count => row.value? * self.per / run.table.count.max(1) as f64,
                _ => row.value?,
            })
        };
        self.measured[side].iter().map(value).collect()
    }

    fn difference(&self, i: usize, row: &Row, side: usize) -> Option<RowDifference> {
        if let Some(figures) = &self.figures {
            let (a, b) = (figures[0][i].as_ref()?, figures[side][i].as_ref()?);
            return Some(verdict::difference(a, b).with_unseen([a.events, b.events]));
        }
        let trials = |side: usize| match row.unit {
            Unit::Percent => sent(&self.measured[side]),
            _ => answered(&self.measured[side]),
        };
        let least = variation::least(&row.name) as u64;
        let (a, b) = (self.by_run(i, 0)?, self.by_run(i, side)?);
        if trials(0).min(trials(side)) < least {
            return None;
        }
        let events = [0, side].map(|side| {
            let (count, unit) = match row.unit {
                Unit::Microseconds => return None,
                Unit::Percent => {
                    let lost = self.measured[side].iter().map(|r| r.table.lost());
                    (lost.sum(), 100.0)
                }
                Unit::Count => (self.value(i, side)? as u64, self.per),
            };
            let trials = trials(side);
            Some(Events {
                count,
                trials,
                unit,
            })
        });
        let step = self.rounded_to(row, 0).max(self.rounded_to(row, side));
        let pairs = || a.iter().zip(&b).map(|(a, b)| b - a).collect::<Vec<f64>>();
        let difference = match self.paired {
            true => paired::difference(&pairs()),
            false => verdict::replicates(&a, &b, events, step),
        };
        difference.map(|difference| difference.with_unseen(events))
    }

    fn compared_by(&self, row: &Row) -> Option<String> {
        let (is_one_each, segment) = (self.figures.is_some(), self.segment);
        let mut runs = self.measured.iter().flatten();
        // A few lost probes make no part of a run.
        let is_longer = |run: &Measured| run.replies.len() > segment + segment / 20;
        let has_parts = segment > 0 && runs.any(is_longer);
        match row.name.as_str() {
            name if EXTREMES.contains(&name) => {
                has_parts.then(|| format!("its mean over parts of {segment} answers"))
            }
            "Count" => None,
            _ if !is_one_each => None,
            "Jitter" => Some("the mean difference of successive delays over the whole run".into()),
            _ if row.unit == Unit::Count => {
                Some("its share, scaled to the first run's answers".into())
            }
            _ => None,
        }
    }
}

fn headline(name: &str, first: &str, rows: &[Compared], run: usize) -> Headline {
    let judged: Vec<(&str, RowDifference)> = rows
        .iter()
        .filter(|row| HEADLINE.contains(&row.name.as_str()))
        .filter_map(|row| Some((row.name.as_str(), row.against_first[run - 1].difference?)))
        .collect();
    let p: Vec<f64> = judged.iter().map(|(_, d)| d.p).collect();
    let corrected = holm(&p).into_iter();
    let tests: Vec<Test> = judged
        .iter()
        .zip(corrected)
        .map(|((row, d), p_holm)| Test {
            row: row.to_string(),
            p: d.p,
            p_holm,
            verdict: RowVerdict::of(d.interval.estimate, p_holm),
        })
        .collect();
    let named = |verdict: RowVerdict| {
        let names = tests.iter().filter(|t| t.verdict == verdict);
        names.map(|t| t.row.as_str()).collect::<Vec<_>>().join(", ")
    };
    let (better, worse) = (named(RowVerdict::Better), named(RowVerdict::Worse));
    let untested: Vec<&str> = (HEADLINE.iter().copied())
        .filter(|row| tests.iter().all(|t| t.row != *row))
        .collect();
    let mut text = match (better.is_empty(), worse.is_empty()) {
        _ if tests.is_empty() => format!("{name}: too few samples for a verdict"),
        (true, true) => format!("{name}: cannot tell it from {first}"),
        (false, true) => format!("{name} is better than {first} ({better})"),
        (true, false) => format!("{name} is worse than {first} ({worse})"),
        (false, false) => {
            format!("{name} against {first}: better in {better}, worse in {worse}")
        }
    };
    if !untested.is_empty() && !tests.is_empty() {
        text += &format!("; too few samples for {}", untested.join(", "));
    }
    Headline {
        run: name.into(),
        better: !better.is_empty(),
        worse: !worse.is_empty(),
        tests,
        text,
    }
}

/// Warnings of each side against the first, and of the runs of a side against its own first.
fn all_warnings(sides: &[Side]) -> Vec<Warning> {
    let name = |side: &Side, run: usize| match side.runs.len() {
        1 => side.name.clone(),
        _ => format!("{} (run {})", side.name, run + 1),
    };
    let first = (name(&sides[0], 0), &sides[0].runs[0]);
    let others = sides
        .iter()
        .skip(1)
        .map(|side| ((&first.0, first.1), side, 0));
    let within = sides.iter().flat_map(|side| {
        let first = (&side.name, &side.runs[0]);
        (1..side.runs.len()).map(move |run| (first, side, run))
    });
    others
        .chain(within)
        .flat_map(|(first, side, run)| warnings(first, (&name(side, run), &side.runs[run])))
        .collect()
}

fn warnings(first: (&String, &RunFile), other: (&String, &RunFile)) -> Vec<Warning> {
    let ((first_name, a), (name, b)) = (first, other);
    let mut warnings = Vec::new();
    let mut warn = |what: String, first: Value, other: Value| {
        let text = format!(
            "{what}: {} in {first_name}, {} in {name}",
            short(&first),
            short(&other)
        );
        warnings.push(Warning {
            run: name.clone(),
            what,
            first,
            other,
            text,
        });
    };
    let facts = |run: &RunFile| -> BTreeMap<&str, Value> {
        BTreeMap::from([
            ("clock", run.clock.clone().into()),
            ("interval_us", run.interval_us.into()),
            ("payload_bytes", run.payload_bytes.into()),
            ("target", run.target.clone().into()),
            ("tool", run.tool.clone().into()),
            ("interrupted", run.interrupted.into()),
        ])
    };
    let (facts_a, facts_b) = (facts(a), facts(b));
    for (what, value) in &facts_a {
        if *value != facts_b[what] {
            warn(what.to_string(), value.clone(), facts_b[what].clone());
        }
    }
    let probes = [a, b].map(|run| run.samples.len());
    if probes[0].max(probes[1]) >= UNEVEN * probes[0].min(probes[1]) {
        warn("probes".into(), probes[0].into(), probes[1].into());
    }
    let names: BTreeSet<&String> = a.environment.keys().chain(b.environment.keys()).collect();
    match (a.environment.is_empty(), b.environment.is_empty()) {
        (false, false) => {
            for key in names {
                let of = |run: &RunFile| run.environment.get(key).cloned().unwrap_or_default();
                let alike = match (key.as_str(), of(a).as_f64(), of(b).as_f64()) {
                    ("load.average", Some(a), Some(b)) => (a - b).abs() <= LOAD,
                    _ => of(a) == of(b),
                };
                if !alike {
                    warn(format!("environment.{key}"), of(a), of(b));
                }
            }
        }
        (no_a, no_b) => {
            let said = |no: bool| if no { "not recorded" } else { "recorded" }.into();
            warn("environment".into(), said(no_a), said(no_b));
        }
    }
    warnings
}

/// A value in a line of text.
fn short(value: &Value) -> String {
    let text = match value {
        Value::Null => return "not recorded".into(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    match text.char_indices().nth(60) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

#[cfg(test)]
#[path = "compare_tests.rs"]
mod tests;
