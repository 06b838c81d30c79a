// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab redirect`: what redirecting costs, by each backend. Method: docs/experiments/redirect.md.

mod chart;
pub mod client;
mod latency;
pub mod load;
pub mod napi;
mod pps;
pub mod programs;
pub mod rig;
mod rules;
mod scale;
pub mod segment;
pub mod serve;
mod upload;
pub mod way;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::ValueEnum;
use mountain::redirect::Backend;
use mountain_lab::result::{too_short, RunResult};
use serde_json::{json, Value};

use way::Way;

/// Repeats that the figures of `pps`, `scale` and `latency` need.
const REPEATS: u32 = 9;

#[derive(clap::Args)]
pub struct RedirectArgs {
    /// Measure only this part [default: all, each into its own folder].
    #[arg(value_enum)]
    part: Option<Part>,
    /// Run shorter, with fewer repeats, and judge no figure.
    #[arg(long)]
    quick: bool,
    /// Repeat this many times [default: 2 with --quick, else 9].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: Option<u32>,
    /// Measure only these rows; an unknown name lists them.
    #[arg(long, value_delimiter = ',', value_name = "ROW")]
    rows: Vec<String>,
    /// Derive every random choice from this number.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write result.json to this folder.
    #[arg(long, value_name = "DIR", default_value = "out/redirect")]
    out: PathBuf,
    /// Exit with 1 when a figure misses its limit.
    #[arg(long)]
    check: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Measure the router's processor time per delivered packet.
    Pps,
    /// Measure the same with 65,536 rules against one, and how long adding a rule takes.
    Scale,
    /// Send 512 MiB by UDP: what arrives, and what the whole machine spends on it.
    Upload,
    /// Measure round trips of single packets at 20,000 a second.
    Latency,
}

impl Part {
    fn name(self) -> &'static str {
        match self {
            Self::Pps => "pps",
            Self::Scale => "scale",
            Self::Upload => "upload",
            Self::Latency => "latency",
        }
    }

    fn run(self, args: &RedirectArgs, out: &Path) -> Result<ExitCode> {
        match self {
            Self::Pps => pps::run(args, out),
            Self::Scale => scale::run(args, out),
            Self::Upload => upload::run(args, out),
            Self::Latency => latency::run(args, out),
        }
    }
}

impl RedirectArgs {
    /// How often to measure, unless the user says it: `few` times with --quick, else as often as the
    /// figures need.
    fn repeats(&self, few: u32, enough: u32) -> u32 {
        self.repeat.unwrap_or(if self.quick { few } else { enough })
    }

    /// Why the run is too short for its figures, which need `enough` repeats.
    fn too_short(&self, enough: u32) -> Option<String> {
        let least = [("repeats", self.repeats(0, enough).into(), enough.into())];
        too_short(self.quick, &least)
    }
}

/// `mountain-lab redirect`.
pub fn redirect(args: &RedirectArgs) -> Result<ExitCode> {
    if let Some(part) = args.part {
        return part.run(args, &args.out);
    }
    let mut code = ExitCode::SUCCESS;
    for part in Part::value_variants() {
        let one = part.run(args, &args.out.join(part.name()))?;
        if one != ExitCode::SUCCESS {
            code = one;
        }
    }
    Ok(code)
}

/// The rows of what a server answers: directly, and by each backend.
fn plain_ways() -> Vec<Way> {
    let mut ways = vec![Way::Route];
    ways.extend(Backend::FASTEST_FIRST.into_iter().rev().map(Way::Backend));
    ways
}

/// The rows that are wanted, out of `all`; without names all of them.
fn chosen(names: &[String], all: &[Way]) -> Result<Vec<Way>> {
    if names.is_empty() {
        return Ok(all.into());
    }
    let known = || all.iter().map(|w| w.name()).collect::<Vec<_>>().join(", ");
    let find = |name: &String| {
        let found = all.iter().copied().find(|w| w.name() == *name);
        found.with_context(|| format!("no row {name}; there are {}", known()))
    };
    names.iter().map(find).collect()
}

/// The command line that repeats a run.
fn header(args: &RedirectArgs, part: &str) -> String {
    let mut command = format!("mountain-lab redirect {part}");
    if args.quick {
        command += " --quick";
    }
    if let Some(repeat) = args.repeat {
        command += &format!(" --repeat {repeat}");
    }
    if !args.rows.is_empty() {
        command += &format!(" --rows {}", args.rows.join(","));
    }
    format!("{command} --seed {}", args.seed)
}

/// A row that cannot be measured stands in the result with the reason.
fn refused(result: &mut RunResult, way: Way, why: &str) {
    let all = result.environment.entry("refused".into());
    if let Value::Object(rows) = all.or_insert_with(|| json!({})) {
        rows.insert(way.name(), why.into());
    }
}

/// The rows that were refused, for people.
fn refusals(result: &RunResult) -> String {
    let rows = result.environment.get("refused").and_then(Value::as_object);
    rows.into_iter()
        .flatten()
        .map(|(row, why)| format!("refused: {row}: {}\n", why.as_str().unwrap_or_default()))
        .collect()
}
