// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab replay`: recorded and made-up paths through the pure policy, thousands of times
//! faster than real time, beside what bounds it.
//!
//! It shows what a policy would have done to flows on those paths. It shows neither the daemon's
//! timers nor what the flows themselves do to a path; `mountain-lab run` does.

mod chooser;
mod compare;
mod made;
mod score;
mod window;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::slice;

use anyhow::{ensure, Context, Result};
use mountain::measure::verdict::Interval;
use mountain::report::table::{align, head, row as cells, Words};
use mountain_lab::result::write_atomically;
use mountain_lab::workload::stats::resamples;
use rand::rngs::StdRng;
use rand::SeedableRng;
use serde::{Deserialize, Serialize};

use chooser::ChooserKind;

use crate::recording::playback::Half;
use crate::recording::{Recording, Stalls};
use score::{play, Score, ScoreFigures, LATE_MS};
use window::{joined, Input, Window};

/// Resamples of the windows for an interval of 95%.
const RESAMPLES: usize = 200;
/// What the ratios of the summary are to, where it is among the choosers.
const REFERENCE: &str = "late-60";

#[derive(clap::Args)]
pub struct ReplayArgs {
    /// Recordings of two or more paths (CSV or .csv.gz), or made-up paths (made:NAME, made:all; made:list
    /// lists them)
    #[arg(required_unless_present = "run", value_name = "FILE")]
    inputs: Vec<PathBuf>,
    /// Replay what a run on recordings has played, and compare: the folder of its result
    #[arg(long, value_name = "DIR", conflicts_with = "inputs")]
    run: Option<PathBuf>,
    /// Compare these: hash, pathN, oracle, late-MS, banded-MS-ADVANTAGE, mountain, mountain-20, mountain-100
    #[arg(long = "policy", value_name = "NAME", value_delimiter = ',')]
    policies: Vec<String>,
    /// Take the windows of this half of the recording
    #[arg(long, value_enum, default_value_t = Half::All)]
    half: Half,
    /// Choose what lies between two samples of which the second is smaller
    #[arg(long, value_enum, default_value_t = Stalls::Hold)]
    stalls: Stalls,
    /// Play the windows as one, and carry over what was learnt
    #[arg(long)]
    joined: bool,
    /// Do not score this many seconds at the start of a window [default: 5; made-up paths: 20]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(0..=3600))]
    warm_up: Option<u64>,
    /// Play this many windows of made-up paths
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=1000))]
    windows: u64,
    /// Score this many seconds of a window of made-up paths
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// Derive every random event of the policies from this number
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write the figures as JSON to this file
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// What one chooser did on one recording.
#[derive(Deserialize, Serialize)]
pub struct Row {
    pub policy: String,
    pub figures: ScoreFigures,
    /// 95%, by resampling the windows.
    p99_ms: Option<Interval>,
    above_200_percent: Option<Interval>,
}

impl Row {
    /// The 99th percentile, ms, with its interval.
    pub fn p99(&self) -> String {
        with_interval(self.figures.p99_ms, &self.p99_ms, 0)
    }

    /// The share later than 200 ms, %, with its interval.
    pub fn above_200(&self) -> String {
        with_interval(self.figures.above_percent[1], &self.above_200_percent, 2)
    }
}

fn with_interval(value: f64, interval: &Option<Interval>, digits: usize) -> String {
    match interval {
        Some(i) => format!("{value:.digits$} [{:.digits$}-{:.digits$}]", i.low, i.high),
        None => format!("{value:.digits$}"),
    }
}

/// What all choosers did on one recording.
#[derive(Deserialize, Serialize)]
pub struct Table {
    pub recording: String,
    paths: Vec<String>,
    pub windows: usize,
    /// Once it stood beside the tables.
    #[serde(default)]
    warm_up_s: u64,
    pub scored_seconds: f64,
    pub rows: Vec<Row>,
}

/// Geometric means over recordings of the ratios to [`REFERENCE`].
#[derive(Deserialize, Serialize)]
struct Ratio {
    policy: String,
    p99: Option<f64>,
    above_200: Option<f64>,
    moves_per_flow_minute: f64,
}

/// What `--out` writes.
#[derive(Deserialize, Serialize)]
pub struct Report {
    schema: String,
    pub version: String,
    pub half: Half,
    joined: bool,
    /// Once there was no choice.
    #[serde(default)]
    stalls: Stalls,
    pub seed: u64,
    pub tables: Vec<Table>,
    reference: String,
    ratios: Vec<Ratio>,
}

/// Windows of an input, and the seconds of warm-up of each.
fn load(input: &Path, args: &ReplayArgs) -> Result<(Input, u64)> {
    if let Some(name) = made_name(input) {
        let warm_up_s = args.warm_up.unwrap_or(20);
        let length_us = (warm_up_s + args.seconds) * 1_000_000;
        let made = made::make(name, args.windows, length_us, args.seed)?;
        return Ok((made, warm_up_s));
    }
    let recording = Recording::load(input)?;
    let shown = input.display();
    ensure!(recording.paths.len() >= 2, "{shown}: fewer than two paths");
    let input = Input::recorded(recording, args.stalls);
    Ok((input, args.warm_up.unwrap_or(5)))
}

/// What is to be made up, if it is no file.
fn made_name(input: &Path) -> Option<&str> {
    input.to_str()?.strip_prefix(made::PREFIX)
}

/// Plays every input to every chooser.
///
/// # Errors
/// A name or a file is not understood, or the result cannot be written.
pub fn replay(args: &ReplayArgs) -> Result<ExitCode> {
    if let Some(folder) = &args.run {
        print!("{}", compare::compare(folder, args.seed)?);
        return Ok(ExitCode::SUCCESS);
    }
    let named = |name: &str| format!("{}{name}", made::PREFIX);
    let each = args.inputs.iter().flat_map(|input| match made_name(input) {
        Some("all") => made::all().iter().map(|name| named(name).into()).collect(),
        _ => vec![input.clone()],
    });
    let inputs: Vec<PathBuf> = each.collect();
    if inputs.iter().any(|input| made_name(input) == Some("list")) {
        let rows = made::KINDS.map(|(name, about)| cells([&named(name), &about]));
        print!("{}", align(&rows, Words::All));
        return Ok(ExitCode::SUCCESS);
    }
    let names: Vec<String> = match args.policies.is_empty() {
        true => ChooserKind::DEFAULT.split(',').map(str::to_owned).collect(),
        false => args.policies.clone(),
    };
    let kinds = names
        .into_iter()
        .map(|name| Ok((ChooserKind::parse(&name)?, name)))
        .collect::<Result<Vec<_>>>()?;
    let mut report = Report {
        schema: "mountain-replay-2".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        half: args.half,
        joined: args.joined,
        stalls: args.stalls,
        seed: args.seed,
        tables: Vec::new(),
        reference: REFERENCE.to_owned(),
        ratios: Vec::new(),
    };
    for input in &inputs {
        let (input, warm_up_s) = load(input, args)?;
        let table = table(&input, &kinds, args, warm_up_s).with_context(|| input.name.clone())?;
        print!("{}", text(&table));
        report.tables.push(table);
    }
    if report.tables.len() > 1 {
        print!("{}", overview(&report.tables));
    }
    report.ratios = ratios(&report.tables);
    print!("{}", ratios_text(&report.ratios, report.tables.len()));
    if let Some(out) = &args.out {
        let json = serde_json::to_string_pretty(&report)? + "\n";
        write_atomically(out, json.as_bytes())?;
    }
    Ok(ExitCode::SUCCESS)
}

fn table(
    input: &Input,
    kinds: &[(ChooserKind, String)],
    args: &ReplayArgs,
    warm_up_s: u64,
) -> Result<Table> {
    let windows = args.half.of(&input.windows);
    let joined = args.joined.then(|| joined(windows)).flatten();
    let windows = joined.as_ref().map_or(windows, slice::from_ref);
    let warm_up_us = warm_up_s * 1_000_000;
    let scored_us = |w: &Window| w.length_us.saturating_sub(warm_up_us);
    let scored_seconds = windows.iter().map(scored_us).sum::<u64>() as f64 / 1e6;
    ensure!(scored_seconds > 0.0, "no window is longer than the warm-up");
    let paths = input.paths.len();
    for (kind, name) in kinds {
        kind.fit(paths).with_context(|| name.clone())?;
    }
    let rows = kinds.iter().map(|(kind, name)| {
        let scores: Vec<Score> = (0u64..)
            .zip(windows)
            .map(|(i, window)| {
                let chooser = kind.chooser(paths, args.seed.wrapping_add(i));
                play(window, chooser, warm_up_us)
            })
            .collect();
        row(name, &scores, args.seed)
    });
    Ok(Table {
        recording: input.name.clone(),
        paths: input.paths.clone(),
        windows: windows.len(),
        warm_up_s,
        scored_seconds,
        rows: rows.collect(),
    })
}

fn row(name: &str, scores: &[Score], seed: u64) -> Row {
    let sum = |chosen: &mut dyn Iterator<Item = &Score>| {
        let mut all = Score::default();
        chosen.for_each(|score| all.add(score));
        all.figures()
    };
    let figures = sum(&mut scores.iter());
    let mut rng = StdRng::seed_from_u64(seed);
    let draws: Vec<ScoreFigures> = match scores.len() {
        // Nothing to resample.
        0..=1 => Vec::new(),
        n => resamples(n, RESAMPLES, &mut rng, |pick| {
            sum(&mut pick.iter().map(|i| &scores[*i]))
        }),
    };
    let interval = |of: fn(&ScoreFigures) -> f64| {
        Interval::of(of(&figures), draws.iter().map(of).collect(), 0.95)
    };
    let p99_ms = interval(|f| f.p99_ms);
    let above_200_percent = interval(|f| f.above_percent[1]);
    Row {
        policy: name.to_owned(),
        figures,
        p99_ms,
        above_200_percent,
    }
}

fn ratios(tables: &[Table]) -> Vec<Ratio> {
    let Some(first) = tables.first() else {
        return Vec::new();
    };
    fn of<'a>(table: &'a Table, name: &str) -> Option<&'a ScoreFigures> {
        let found = table.rows.iter().find(|row| row.policy == name);
        found.map(|row| &row.figures)
    }
    let mean = |values: Vec<Option<f64>>| -> Option<f64> {
        let n = values.len() as f64;
        let logs = values.into_iter().map(|v| v.map(f64::ln));
        let sum: f64 = logs.sum::<Option<f64>>()?;
        Some((sum / n).exp()).filter(|m| m.is_finite())
    };
    let ratios = first.rows.iter().map(|row| {
        let ratio = |figure: fn(&ScoreFigures) -> f64| {
            let each = tables.iter().map(|table| {
                let (ours, theirs) = (of(table, &row.policy)?, of(table, REFERENCE)?);
                Some(figure(ours) / figure(theirs))
            });
            mean(each.collect())
        };
        let moves = tables.iter().filter_map(|table| of(table, &row.policy));
        let moves = moves.map(|f| f.moves_per_flow_minute).sum::<f64>();
        Ratio {
            policy: row.policy.clone(),
            p99: ratio(|f| f.p99_ms),
            above_200: ratio(|f| f.above_percent[1]),
            moves_per_flow_minute: moves / tables.len() as f64,
        }
    });
    ratios.collect()
}

fn text(table: &Table) -> String {
    let late = LATE_MS.map(|ms| format!("> {ms} ms %")).join("|");
    let titles = format!("policy|p50 ms|p95 ms|p99 ms|p99.9 ms|{late}|moves/min|probes/s|shares %");
    let mut rows = vec![head(&titles)];
    for row in &table.rows {
        let f = &row.figures;
        rows.push(vec![
            row.policy.clone(),
            format!("{:.1}", f.p50_ms),
            format!("{:.1}", f.p95_ms),
            row.p99(),
            format!("{:.0}", f.p999_ms),
            format!("{:.2}", f.above_percent[0]),
            row.above_200(),
            format!("{:.2}", f.above_percent[2]),
            format!("{:.1}", f.moves_per_flow_minute),
            format!("{:.1}", f.probes_per_path_second),
            shares(&f.share_percent),
        ]);
    }
    format!(
        "{}: {} ({} windows, {:.0} s scored; [95% interval over windows])\n\n{}\n",
        table.recording,
        table.paths.join(", "),
        table.windows,
        table.scored_seconds,
        align(&rows, Words::All)
    )
}

/// Shares of the paths, in order; the least and the most of many.
fn shares(percent: &[f64]) -> String {
    if percent.len() <= 5 {
        let shown: Vec<String> = percent.iter().map(|p| format!("{p:.0}")).collect();
        return shown.join("/");
    }
    let least = percent.iter().copied().fold(100.0, f64::min);
    let most = percent.iter().copied().fold(0.0, f64::max);
    format!("{least:.1} to {most:.1}")
}

/// One line for each input, three figures for each policy.
fn overview(tables: &[Table]) -> String {
    let mut rows = vec![vec![String::new()]];
    let first = tables.first().map_or(&[][..], |table| &table.rows);
    rows[0].extend(first.iter().map(|row| row.policy.clone()));
    for table in tables {
        let mut line = vec![table.recording.clone()];
        for row in &table.rows {
            let f = &row.figures;
            let (p99, late, moves) = (f.p99_ms, f.above_percent[1], f.moves_per_flow_minute);
            line.push(format!("{p99:.0} / {late:.2} / {moves:.1}"));
        }
        rows.push(line);
    }
    let rows = align(&rows, Words::All);
    format!("p99 in ms / above 200 ms in % / moves per flow and minute\n\n{rows}\n")
}

fn ratios_text(ratios: &[Ratio], recordings: usize) -> String {
    let shown = |ratio: Option<f64>| ratio.map_or("-".to_owned(), |r| format!("{r:.2}"));
    let mut rows = vec![head("policy|p99|> 200 ms|moves/min")];
    for ratio in ratios {
        let moves = format!("{:.1}", ratio.moves_per_flow_minute);
        let (p99, above) = (shown(ratio.p99), shown(ratio.above_200));
        rows.push(cells([&ratio.policy, &p99, &above, &moves]));
    }
    format!(
        "ratios to {REFERENCE}, geometric means over {recordings} recordings; moves per flow and \
         minute\n\n{}\n",
        align(&rows, Words::All)
    )
}
