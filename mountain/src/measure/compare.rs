//! Run files against each other: the same rows side by side, what the differences from the first
//! are worth, and what else differs. Pure; printing is the command line's.
//!
//! Method: [`super::verdict`] and docs/measuring.md.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{ensure, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::runfile::RunFile;
use super::stats::{choose_thresholds, Reply, Row, Table, Unit};
use super::verdict::{self, difference, holm, Difference, Resampled, Verdict};

/// Value of [`Comparison::schema`].
pub const SCHEMA: &str = "mountain-compare/1";
/// The rows that the headline rests on.
pub const HEADLINE: [&str; 3] = ["Median", "P99", "Loss"];

/// How to compare.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Thresholds to count above, µs; empty: chosen by the first run's median.
    pub over_us: Vec<f64>,
    pub resamples: usize,
    pub seed: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            over_us: Vec::new(),
            resamples: 2_000,
            seed: 1,
        }
    }
}

/// Everything that `mountain compare` says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// [`SCHEMA`].
    pub schema: String,
    pub runs: Vec<Run>,
    pub rows: Vec<Compared>,
    /// Of each run but the first.
    pub headlines: Vec<Headline>,
    pub warnings: Vec<Warning>,
    /// Samples per part of the runs that Min, Max and Max−Min are compared by.
    pub segment: usize,
    pub resamples: usize,
    pub seed: u64,
    pub level: f64,
}

/// One column.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    pub name: String,
    pub tool: String,
    pub target: String,
    pub started: String,
    pub sent: u64,
    pub answered: u64,
    /// Successive probes that were resampled together.
    pub block: usize,
}

/// One row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Compared {
    pub name: String,
    /// "us", "percent" or "count".
    pub unit: String,
    /// Of each run.
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
    /// Change of the value; `None` from 0 or where one is missing. Counts: per answer.
    pub percent: Option<f64>,
    /// In the row's unit; `None` with too few samples.
    pub difference: Option<Difference>,
    pub verdict: Verdict,
}

/// The verdict on a run as a whole.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Headline {
    pub run: String,
    pub tests: Vec<Test>,
    pub better: bool,
    pub worse: bool,
    /// One sentence.
    pub text: String,
}

/// A row as the headline counts it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Test {
    pub row: String,
    pub p: f64,
    /// After Holm's correction.
    pub p_holm: f64,
    pub verdict: Verdict,
}

/// Something besides the figures in which a run differs from the first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Warning {
    pub run: String,
    /// "environment.kernel.release", "interval_us", …
    pub what: String,
    pub first: Value,
    pub other: Value,
    pub text: String,
}

/// Compares named runs with the first.
pub fn compare(runs: &[(String, RunFile)], options: &Options) -> Result<Comparison> {
    ensure!(runs.len() > 1, "a comparison takes at least two run files");
    for (name, run) in runs {
        ensure!(
            !run.samples.is_empty(),
            "{name} holds no probes: there is nothing to compare"
        );
    }
    let replies: Vec<Vec<Reply>> = runs
        .iter()
        .map(|(_, run)| run.samples.replies(&run.samples.rtt_us))
        .collect();
    let over_us = if options.over_us.is_empty() {
        let with_answers = replies.iter().find(|r| !r.is_empty());
        let median = with_answers.and_then(|r| Some(Table::new(0, r, &[1.0]).delays?.median));
        choose_thresholds(median.unwrap_or(0.0)).to_vec()
    } else {
        options.over_us.clone()
    };
    let tables: Vec<Table> = runs
        .iter()
        .zip(&replies)
        .map(|((_, run), replies)| Table::new(run.samples.len() as u64, replies, &over_us))
        .collect();
    let answers = tables[0].count.max(1) as f64;
    let shortest = replies.iter().map(Vec::len).min().unwrap_or(0);
    let segment = verdict::segment(shortest);
    let resampled: Vec<Resampled> = (0..runs.len())
        .map(|i| {
            let seed = options.seed.wrapping_add(2 * i as u64);
            let (r, t) = (&replies[i], &tables[i]);
            verdict::resample(r, t, answers, segment, options.resamples, seed)
        })
        .collect();
    let rows = rows(&tables, &resampled, segment);
    let headlines = (1..runs.len())
        .map(|i| headline(&runs[i].0, &runs[0].0, &rows, i))
        .collect();
    let warnings = (runs[1..].iter())
        .flat_map(|other| warnings(&runs[0], other))
        .collect();
    let runs = runs.iter().zip(&tables).zip(&resampled);
    let runs = runs.map(|(((name, run), table), resampled)| Run {
        name: name.clone(),
        tool: run.tool.clone(),
        target: run.target.clone(),
        started: run.started.clone(),
        sent: table.sent,
        answered: table.count,
        block: resampled.block,
    });
    Ok(Comparison {
        schema: SCHEMA.into(),
        runs: runs.collect(),
        rows,
        headlines,
        warnings,
        segment,
        resamples: options.resamples,
        seed: options.seed,
        level: verdict::LEVEL,
    })
}

fn rows(tables: &[Table], resampled: &[Resampled], segment: usize) -> Vec<Compared> {
    let all: Vec<Vec<Row>> = tables.iter().map(Table::rows).collect();
    let row = |i: usize, first: &Row| {
        let values: Vec<Option<f64>> = all.iter().map(|rows| rows[i].value).collect();
        // A count means something only by the number of answers it is of.
        let comparable = |run: usize| {
            let scale = match first.unit {
                Unit::Count => tables[0].count as f64 / tables[run].count.max(1) as f64,
                _ => 1.0,
            };
            Some(values[run]? * scale)
        };
        let against = |run: usize| {
            let of = |run: usize| resampled[run].rows[i].as_ref();
            let difference = of(0).zip(of(run)).and_then(|(a, b)| difference(a, b));
            Against {
                percent: (comparable(0).zip(comparable(run)))
                    .filter(|(a, _)| *a != 0.0)
                    .map(|(a, b)| 100.0 * (b - a) / a),
                verdict: difference.map_or(Verdict::TooFew, |d| d.verdict),
                difference,
            }
        };
        Compared {
            name: first.name.clone(),
            unit: match first.unit {
                Unit::Count => "count",
                Unit::Microseconds => "us",
                Unit::Percent => "percent",
            }
            .into(),
            compared_by: compared_by(&first.name, first.unit, segment),
            against_first: if i == 0 {
                Vec::new()
            } else {
                (1..tables.len()).map(against).collect()
            },
            values,
        }
    };
    all[0].iter().enumerate().map(|(i, r)| row(i, r)).collect()
}

fn compared_by(name: &str, unit: Unit, segment: usize) -> Option<String> {
    match name {
        "Count" => None,
        "Min" | "Max" | "Max−Min" => Some(format!("its mean over parts of {segment} answers")),
        "Jitter" => Some("the mean difference of successive delays over the whole run".into()),
        _ if unit == Unit::Count => Some("its share, scaled to the first run's answers".into()),
        _ => None,
    }
}

fn headline(name: &str, first: &str, rows: &[Compared], run: usize) -> Headline {
    let judged: Vec<(&str, Difference)> = rows
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
            verdict: Verdict::of(d.interval.estimate, p_holm),
        })
        .collect();
    let named = |verdict: Verdict| {
        let names = tests.iter().filter(|t| t.verdict == verdict);
        names.map(|t| t.row.as_str()).collect::<Vec<_>>().join(", ")
    };
    let (better, worse) = (named(Verdict::Better), named(Verdict::Worse));
    let untested: Vec<&str> = (HEADLINE.iter().copied())
        .filter(|row| tests.iter().all(|t| t.row != *row))
        .collect();
    let mut text = match (better.is_empty(), worse.is_empty()) {
        _ if tests.is_empty() => format!("{name}: too few samples for a verdict"),
        (true, true) => format!("{name}: no difference from {first} shown"),
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

fn warnings(first: &(String, RunFile), other: &(String, RunFile)) -> Vec<Warning> {
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
    let names: BTreeSet<&String> = a.environment.keys().chain(b.environment.keys()).collect();
    match (a.environment.is_empty(), b.environment.is_empty()) {
        (false, false) => {
            for key in names {
                let of = |run: &RunFile| run.environment.get(key).cloned().unwrap_or_default();
                if of(a) != of(b) {
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
