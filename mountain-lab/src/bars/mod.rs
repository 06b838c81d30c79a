// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab bars`: whether measuring keeps its promises. Method: docs/bars.md.

mod agreement;
mod hog;
mod size;
mod verdicts;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{bail, Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use mountain_lab::result::{too_short, RunResult};
use mountain_lab::workload::sys::NoHalt;
use serde_json::json;
use tempfile::TempDir;

use crate::bench::foreign_ticks;
use crate::probing::lane::Delay;
use crate::stopped;

/// One way; so round trips take 20 ms ± 2 ms.
const DELAY: Delay = Delay {
    ms: 10.0,
    noise_ms: 1.0,
};

#[derive(clap::Args)]
pub struct BarsArgs {
    /// Run shorter, with fewer repeats and samples, and judge no figure.
    #[arg(long)]
    quick: bool,
    /// Write result.json to this folder.
    #[arg(long, value_name = "DIR", default_value = "out/bars")]
    out: PathBuf,
    /// Exit with 1 when a figure misses its limit.
    #[arg(long)]
    check: bool,
    /// Derive every random choice from this number.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Measure only these parts.
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = [Part::Agreement, Part::Hog, Part::Size])]
    only: Vec<Part>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Compare `mountain ping` with ping(8) and irtt, on an emulated path and on loopback.
    Agreement,
    /// Measure kernel timestamps beside a CPU hog.
    Hog,
    /// Pass a million samples through `compare` and `report`.
    Size,
    /// Count false and missed verdicts of `compare` and `ab`: half an hour, only on request.
    Verdicts,
}

/// What the parts share.
struct Bench {
    quick: bool,
    seed: u64,
    bar: ProgressBar,
    /// For files under way.
    scratch: TempDir,
}

impl Bench {
    /// Says what comes next; fails when the user wants an end.
    fn step(&self, what: &str) -> Result<()> {
        if stopped() {
            bail!("stopped");
        }
        self.bar.inc(1);
        self.bar.set_message(what.to_owned());
        Ok(())
    }

    fn say(&self, what: &str) {
        self.bar.suspend(|| eprintln!("{what}"));
    }
}

/// `mountain-lab bars`.
pub fn bars(args: &BarsArgs) -> Result<ExitCode> {
    let _awake = NoHalt::hold();
    let repeats = args.only.iter().map(|part| match part {
        Part::Agreement => agreement::Plan::new(args.quick).rounds,
        Part::Hog => hog::Plan::new(args.quick).rounds,
        Part::Size => size::Plan::new(args.quick).repeats,
        Part::Verdicts => 1,
    });
    let repeats = repeats.max().unwrap_or(0);
    let mut result = RunResult::new("bars", &command(args), args.seed, repeats);
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let environment = &mut result.environment;
    environment.insert("loadavg_before".into(), json!(load.trim()));
    environment.insert("quick".into(), json!(args.quick));
    let mut bench = Bench {
        quick: args.quick,
        seed: args.seed,
        bar: progress(args),
        scratch: tempfile::tempdir().context("no folder for files under way")?,
    };
    for part in &args.only {
        let (started, busy) = (std::time::Instant::now(), foreign_ticks());
        match part {
            Part::Agreement => agreement::run(&mut bench, &mut result).context("agreement")?,
            Part::Hog => hog::run(&mut bench, &mut result).context("hog")?,
            Part::Size => size::run(&mut bench, &mut result).context("size")?,
            Part::Verdicts => verdicts::run(&mut bench, &mut result).context("verdicts")?,
        }
        if let (Some(before), Some(after)) = (busy, foreign_ticks()) {
            // The programs measured and the emulator are among them: for runs held against
            // each other.
            let ticks = after.saturating_sub(before) as f64;
            let cores = ticks / 100.0 / started.elapsed().as_secs_f64();
            let name = format!("{}_busy_cores", part_name(*part));
            result.environment.insert(name, json!(cores));
        }
    }
    bench.bar.finish_and_clear();
    result.judge(too_short(args.quick, &[]));
    print!("{}", result.table());
    println!("{}", result.write(&args.out)?.display());
    Ok(result.exit_code(args.check))
}

fn part_name(part: Part) -> String {
    format!("{part:?}").to_lowercase()
}

fn command(args: &BarsArgs) -> String {
    let quick = if args.quick { " --quick" } else { "" };
    let only: Vec<String> = args.only.iter().copied().map(part_name).collect();
    format!(
        "mountain-lab bars{quick} --seed {} --only {}",
        args.seed,
        only.join(",")
    )
}

fn progress(args: &BarsArgs) -> ProgressBar {
    let steps = |part: &Part| match part {
        Part::Agreement => agreement::Plan::new(args.quick).steps(),
        Part::Hog => hog::Plan::new(args.quick).steps(),
        Part::Size => size::Plan::new(args.quick).steps(),
        Part::Verdicts => verdicts::Plan::new(args.quick).steps(),
    };
    let bar = ProgressBar::new(args.only.iter().map(steps).sum());
    let style = ProgressStyle::with_template("bars [{bar:40}] {percent}% {msg} (left: {eta})")
        .expect("a literal template");
    bar.set_style(style.progress_chars("=> "));
    bar
}
