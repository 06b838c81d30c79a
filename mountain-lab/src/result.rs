// SPDX-License-Identifier: GPL-2.0-or-later
//! The result file that every lab and bench command writes, its checks, and its plain-text table.
//!
//! The schema is documented in `docs/result-schema.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;

use anyhow::{ensure, Context, Result};
use mountain::report::table::{align, Words};
use serde::{Deserialize, Serialize};
use serde_json::{json, Value};

use crate::workload::metrics::Figures;
use crate::workload::stats::{bootstrap_median, median};

/// Value of `schema` in every file this version writes.
pub const SCHEMA: &str = "mountain-result/1";
/// Name of the file inside the output directory.
pub const FILE_NAME: &str = "result.json";

/// One figure of one policy over the repeats of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Metric {
    /// `us`, `ratio`, `count`, `bps`, `ns`...
    pub unit: String,
    /// Median over the repeats; NaN (`null` in the file) without any.
    #[serde(deserialize_with = "nan_from_null")]
    pub median: f64,
    /// Lower end of the 95% interval of the median.
    #[serde(deserialize_with = "nan_from_null")]
    pub lo: f64,
    /// Upper end of it.
    #[serde(deserialize_with = "nan_from_null")]
    pub hi: f64,
    /// Samples (packets, onsets, flows) behind all repeats together.
    pub n: u64,
    /// The figure of each repeat, `None` where the repeat was void or had no such figure.
    pub values: Vec<Option<f64>>,
}

impl Metric {
    /// Median and bootstrap interval over `values`, one a repeat, from `n` samples in all. What is not a number
    /// was not measured: a median would take it for the largest value.
    pub fn of_repeats(unit: &str, values: Vec<Option<f64>>, n: u64, seed: u64) -> Self {
        let numbers = values.into_iter().map(|v| v.filter(|v| !v.is_nan()));
        let values: Vec<Option<f64>> = numbers.collect();
        let present: Vec<f64> = values.iter().copied().flatten().collect();
        let (lo, hi) = bootstrap_median(&present, seed);
        Metric {
            unit: unit.to_owned(),
            median: median(&present),
            lo,
            hi,
            n,
            values,
        }
    }

    /// A figure that was taken once.
    pub fn single(unit: &str, value: f64, n: u64) -> Self {
        // An interval of no width, whatever the seed.
        Metric::of_repeats(unit, vec![Some(value)], n, 0)
    }
}

/// Whether at least half of the repeats that were asked for have a value: what fewer say is chance.
fn half(values: &[Option<f64>]) -> bool {
    values.iter().flatten().count() * 2 >= values.len()
}

/// Metrics by name.
pub type Metrics = BTreeMap<String, Metric>;

/// A segment that does not count.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VoidRun {
    /// The policy that ran.
    pub policy: String,
    /// The repeat, from 0.
    pub repeat: u32,
    /// What was past which limit.
    pub reason: String,
}

/// Everything one command measured.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunResult {
    /// [`SCHEMA`].
    pub schema: String,
    /// The command line that repeats the run.
    pub command: String,
    /// Version of this program.
    pub version: String,
    /// Commit of the source tree it ran in, if it ran in one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub git: Option<String>,
    /// Release and version of the kernel.
    pub kernel: String,
    /// Model and number of the processors.
    pub cpu: String,
    /// Start, RFC 3339, UTC.
    pub started: String,
    /// Seed of everything random.
    pub seed: u64,
    /// Repeats asked for; void ones included.
    pub repeats: u32,
    /// Name of the scenario or bench.
    pub scenario: String,
    /// Segments that do not count.
    #[serde(default)]
    pub void: Vec<VoidRun>,
    /// Per policy and metric. `oracle` stands here like a policy.
    pub policies: BTreeMap<String, Metrics>,
    /// Promised figures.
    #[serde(default)]
    pub checks: Vec<Check>,
    /// The emulator's own error and CPU use.
    #[serde(default)]
    pub emulator: Metrics,
    /// Whatever else a reader needs to judge the figures: parameters, sysctls, generator health.
    #[serde(default)]
    pub environment: BTreeMap<String, Value>,
}

impl RunResult {
    /// An empty result of a run that starts now on this machine.
    pub fn new(scenario: &str, command: &str, seed: u64, repeats: u32) -> Self {
        RunResult {
            schema: SCHEMA.to_owned(),
            command: command.to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            git: machine::git(),
            kernel: machine::kernel(),
            cpu: machine::cpu(),
            started: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            seed,
            repeats,
            scenario: scenario.to_owned(),
            ..RunResult::default()
        }
    }

    /// Adds the figures of one `repeat` (from 0, not void) of `policy` to its metrics.
    ///
    /// Median and interval are those of all repeats added so far; those that never are stay `None`.
    /// Adding a repeat twice replaces its value.
    pub fn add(&mut self, policy: &str, repeat: u32, figures: &Figures) {
        let (seed, repeats) = (self.seed, self.repeats as usize);
        let metrics = self.policies.entry(policy.to_owned()).or_default();
        for (name, figure) in figures {
            let old = metrics.remove(name).map(|old| (old.values, old.n));
            let (mut values, n) = old.unwrap_or_default();
            let repeat = repeat as usize;
            values.resize(values.len().max(repeats).max(repeat + 1), None);
            values[repeat] = Some(figure.value);
            let metric = Metric::of_repeats(figure.unit, values, n + figure.n, seed);
            metrics.insert(name.clone(), metric);
        }
    }

    /// Puts a metric of a policy in.
    pub fn put(&mut self, policy: &str, name: &str, metric: Metric) -> &Metric {
        let metrics = self.policies.entry(policy.to_owned()).or_default();
        metrics.insert(name.to_owned(), metric);
        &metrics[name]
    }

    /// Puts a metric of these values in, one a repeat, from `n` samples in all.
    pub fn put_values(
        &mut self,
        policy: &str,
        name: &str,
        unit: &str,
        values: &[f64],
        n: u64,
    ) -> &Metric {
        let values = values.iter().copied().map(Some).collect();
        let metric = Metric::of_repeats(unit, values, n, self.seed);
        self.put(policy, name, metric)
    }

    /// Puts in a figure that is promised to be no higher than `limit`.
    pub fn at_most(&mut self, what: &str, figure: Option<f64>, limit: f64) {
        self.checks.push(Check::at_most(what, figure, limit));
    }

    /// Puts in a figure that is promised to be no lower than `limit`.
    pub fn at_least(&mut self, what: &str, figure: Option<f64>, limit: f64) {
        self.checks.push(Check::at_least(what, figure, limit));
    }

    /// Puts into the environment what a reader needs besides the figures.
    pub fn note(&mut self, name: &str, value: impl Serialize) {
        self.environment.insert(name.to_owned(), json!(value));
    }

    /// A metric of a policy.
    pub fn metric(&self, policy: &str, name: &str) -> Option<&Metric> {
        self.policies.get(policy)?.get(name)
    }

    /// Compares the promised figures with the measured ones; call after the last repeat.
    ///
    /// With a reference the figure is the median over repeats of the ratio within each repeat:
    /// both saw the same schedule there. A repeat in which either was void does not count.
    ///
    /// A promise that something never happens ([`CheckSpec::is_of_none`]) is held against the repeat in which it
    /// happened most.
    ///
    /// Where fewer than half of the repeats that were asked for count, nothing was measured; how many
    /// that have to be is for who asks, so one of one is enough. Figures taken once from all repeats
    /// together ([`Metric::single`]) are not affected.
    pub fn evaluate(&mut self, specs: &[CheckSpec]) {
        for spec in specs {
            let name = spec.name.clone();
            let mut name = name.unwrap_or_else(|| format!("{} of {}", spec.metric, spec.policy));
            if spec.is_of_none() {
                name += ", most of any repeat";
            }
            self.checks.push(Check {
                reference: spec.reference.clone(),
                ..Check::new(&name, self.figure(spec), spec.op, spec.limit)
            });
        }
    }

    /// The median of a metric that at least half of the repeats have.
    pub fn median(&self, policy: &str, name: &str) -> Option<f64> {
        let metric = self.metric(policy, name)?;
        half(&metric.values).then_some(metric.median)
    }

    /// The largest value of any repeat. A median would hide what happens in almost half of them. One that is not
    /// 0 counts, however many repeats are void; that there was none takes half of them.
    fn most(&self, policy: &str, name: &str) -> Option<f64> {
        let metric = self.metric(policy, name)?;
        let most = metric.values.iter().flatten().copied().reduce(f64::max);
        most.filter(|most| *most > 0.0 || half(&metric.values))
    }

    fn figure(&self, spec: &CheckSpec) -> Option<f64> {
        let Some(reference) = &spec.reference else {
            return match spec.is_of_none() {
                true => self.most(&spec.policy, &spec.metric),
                false => self.median(&spec.policy, &spec.metric),
            };
        };
        let metric = self.metric(&spec.policy, &spec.metric)?;
        let reference = self.metric(reference, &spec.metric)?;
        let pairs = metric.values.iter().zip(&reference.values);
        // Of 0 and 0 there is no ratio.
        let ratio = |a: Option<f64>, b: Option<f64>| Some(a? / b?).filter(|r| !r.is_nan());
        let ratios: Vec<Option<f64>> = pairs.map(|(a, b)| ratio(*a, *b)).collect();
        let present: Vec<f64> = ratios.iter().copied().flatten().collect();
        half(&ratios).then(|| median(&present))
    }

    /// Leaves every check open when the run is [`too_short`]; call when all checks are there.
    pub fn judge(&mut self, too_short: Option<String>) {
        let Some(why) = too_short else { return };
        self.environment.insert("too_short".into(), why.into());
        for check in &mut self.checks {
            (check.met, check.too_short) = (None, true);
        }
    }

    /// The checks that were not met or not measured. A run that is too short misses none, nor does one without the
    /// policies that a check needs.
    pub fn missed(&self) -> Vec<&Check> {
        let missed = |c: &&Check| c.met != Some(true) && !c.is_open();
        self.checks.iter().filter(missed).collect()
    }

    /// How a command with this result ends: with `check`, the figures missed are named and make it 1.
    pub fn exit_code(&self, check: bool) -> ExitCode {
        let missed = self.missed();
        if !check || missed.is_empty() {
            return ExitCode::SUCCESS;
        }
        missed.iter().for_each(|m| eprintln!("missed: {m}"));
        ExitCode::FAILURE
    }

    /// Writes `dir/result.json`: completely or not at all.
    pub fn write(&self, dir: &Path) -> Result<PathBuf> {
        let path = dir.join(FILE_NAME);
        let text = serde_json::to_string_pretty(self).context("cannot encode the result")?;
        write_atomically(&path, text.as_bytes())?;
        Ok(path)
    }

    /// Reads a result file; another schema or an unknown member is an error.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        let value: Value = serde_json::from_str(&text)
            .with_context(|| format!("{} is no JSON", path.display()))?;
        let schema = value["schema"].as_str().unwrap_or("none");
        ensure!(
            schema == SCHEMA,
            "{}: schema is {schema}, this program reads {SCHEMA}",
            path.display()
        );
        serde_json::from_value(value).with_context(|| format!("malformed {}", path.display()))
    }

    /// The plain-text table: a row a metric, a column a policy, then checks, void runs, emulator.
    pub fn table(&self) -> String {
        let mut out = format!(
            "{}: {} repeats, seed {}; median [95% interval] over repeats\n\n",
            self.scenario, self.repeats, self.seed
        );
        out.push_str(&align(&self.cells(), Words::All));
        if !self.emulator.is_empty() {
            out.push_str("\nemulator\n");
            let rows = self.emulator.iter();
            let rows = rows.map(|(n, m)| vec![row_label(n), cell(m)]);
            out.push_str(&align(&rows.collect::<Vec<_>>(), Words::All));
        }
        out + &self.notes()
    }

    /// The cells of a table: a row a metric, a column a policy, with their names.
    pub fn cells(&self) -> Vec<Vec<String>> {
        let columns = self.columns();
        let mut rows = vec![[vec![String::new()], columns.clone()].concat()];
        for name in self.rows() {
            let of = |column: &String| self.metric(column, &name).map_or("-".into(), cell);
            let cells = columns.iter().map(of).collect();
            rows.push([vec![row_label(&name)], cells].concat());
        }
        rows
    }

    /// What stands below the figures: rows refused, void segments, checks, why nothing is judged.
    pub fn notes(&self) -> String {
        let mut out = String::new();
        let refused = self.environment.get("refused").and_then(Value::as_object);
        for (row, why) in refused.into_iter().flatten() {
            let _ = writeln!(out, "refused: {row}: {}", why.as_str().unwrap_or_default());
        }
        for void in &self.void {
            let _ = writeln!(
                out,
                "void: {} repeat {}: {}",
                void.policy, void.repeat, void.reason
            );
        }
        if !self.checks.is_empty() {
            out.push('\n');
        }
        for check in &self.checks {
            let _ = writeln!(out, "{check}");
        }
        out + &self.shortness()
    }

    /// Why no figure is judged, as a line; empty where figures are judged.
    pub fn shortness(&self) -> String {
        let why = self.environment.get("too_short").and_then(Value::as_str);
        why.map_or(String::new(), |why| format!("too short to judge: {why}\n"))
    }

    /// A row that cannot be measured stands in the result with the reason.
    pub fn refuse(&mut self, row: String, why: &str) {
        let all = self.environment.entry("refused".into());
        if let Value::Object(rows) = all.or_insert_with(|| json!({})) {
            rows.insert(row, why.into());
        }
    }

    /// Policies in the order of the table: the plain kernel first, the bound last.
    pub fn columns(&self) -> Vec<String> {
        let rank = |name: &str| match name {
            "none" => 0,
            "ecmp" => 1,
            "mountain" => 3,
            "oracle" => 4,
            _ => 2,
        };
        let mut names: Vec<String> = self.policies.keys().cloned().collect();
        names.sort_by_key(|name| (rank(name), name.clone()));
        names
    }

    /// Metric names in the order of the table: the known ones first, as a reader asks for them.
    pub fn rows(&self) -> Vec<String> {
        let names = self.policies.values().flat_map(|m| m.keys().cloned());
        let mut names: Vec<String> = names.collect::<BTreeSet<_>>().into_iter().collect();
        let known = |name: &String| ROW_ORDER.split(' ').position(|row| row == name);
        // Otherwise by name, as they are.
        names.sort_by_key(|name| known(name).unwrap_or(usize::MAX));
        names
    }
}

/// JSON has no NaN: it is written as `null`.
fn nan_from_null<'de, D: serde::Deserializer<'de>>(value: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(value)?.unwrap_or(f64::NAN))
}

const ROW_ORDER: &str =
    "rtt_p50_us rtt_p95_us rtt_p99_us rtt_p999_us rtt_max_us pdv_us forward_p99_us \
    backward_p99_us late loss late_or_lost above_200_ms reordered share_path0 \
    share_path1 share_path2 leave_p50_us leave_p95_us leave_max_us stayed switches moves \
    moves_per_flow_minute goodput_bps";

/// The unit a table shows for a unit of the file, and the factor to it.
fn shown_unit(unit: &str) -> (&str, f64) {
    match unit {
        "us" => ("ms", 1e-3),
        "ratio" => ("%", 100.0),
        "bps" => ("Mbit/s", 1e-6),
        "count" => ("", 1.0),
        other => (other, 1.0),
    }
}

/// Label of a metric: its name without the unit, which stands beside the figure.
pub fn row_label(name: &str) -> String {
    let stem = name.strip_suffix("_us").or(name.strip_suffix("_bps"));
    let stem = stem.unwrap_or(name);
    stem.replace("p999", "p99.9").replace('_', " ")
}

/// A metric as a table shows it: the figure with its unit, and interval and n.
pub fn cell_parts(metric: &Metric) -> (String, String) {
    let (unit, factor) = shown_unit(&metric.unit);
    let figure = format!("{} {unit}", number(metric.median * factor))
        .trim_end()
        .to_owned();
    let interval = interval_text(metric).map_or(String::new(), |text| text + " ");
    (figure, format!("{interval}n={}", metric.n))
}

/// The interval of a metric in the unit of its table, if it has a width.
pub fn interval_text(metric: &Metric) -> Option<String> {
    let (_, factor) = shown_unit(&metric.unit);
    let (lo, hi) = (number(metric.lo * factor), number(metric.hi * factor));
    (metric.lo != metric.hi).then(|| format!("[{lo}-{hi}]"))
}

/// The same in one piece.
fn cell(metric: &Metric) -> String {
    let (figure, detail) = cell_parts(metric);
    format!("{figure} {detail}")
}

/// Three significant digits without an exponent.
fn number(value: f64) -> String {
    if !value.is_finite() {
        return "?".to_owned();
    }
    let decimals = match value.fract() == 0.0 {
        true => 0,
        false => (2 - value.abs().log10().floor() as i32).clamp(0, 6) as usize,
    };
    format!("{value:.decimals$}")
}

/// Writes `bytes` to `path` by way of a temporary file beside it, so that no reader sees half.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || {
        std::fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
        mountain::host::atomic_file::write(path, true, |out| out.write_all(bytes))
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}

mod check;
mod machine;

pub use check::{too_short, Check, CheckSpec, LimitKind};

#[cfg(test)]
mod tests;
