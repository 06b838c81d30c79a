// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab validate-ping`: whether measuring keeps its promises. Method: docs/validate-ping.md.

mod agreement;
mod hog;
mod size;
mod verdicts;

use std::process::ExitCode;

use anyhow::{Context, Result};
use serde_json::json;
use tempfile::TempDir;

use crate::driver::{foreign_ticks, CommonArgs, Session};
use crate::experiments::probing::lane::Delay;

/// Of the result, and of its folder.
const NAME: &str = "validate-ping";
/// One way; so round trips take 20 ms ± 2 ms.
const DELAY: Delay = Delay {
    ms: 10.0,
    noise_ms: 1.0,
};

#[derive(clap::Args)]
pub struct ValidatePingArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// Exit with 1 when a figure misses its limit.
    #[arg(long)]
    check: bool,
    /// Measure only these parts.
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = [ValidationPart::Agreement, ValidationPart::Hog, ValidationPart::Size])]
    only: Vec<ValidationPart>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum ValidationPart {
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
struct Validation {
    quick: bool,
    seed: u64,
    session: Session,
    /// For files under way.
    scratch: TempDir,
}

impl Validation {
    /// Says what comes next; fails when the user wants an end.
    fn step(&self, what: &str) -> Result<()> {
        self.session.step(what)
    }

    fn say(&self, what: &str) {
        self.session.say(what);
    }
}

/// `mountain-lab validate-ping`.
pub fn validate_ping(args: &ValidatePingArgs) -> Result<ExitCode> {
    if std::env::args_os()
        .nth(1)
        .is_some_and(|word| word == "bars")
    {
        eprintln!("`mountain-lab bars` is now `mountain-lab {NAME}`");
    }
    let repeats = args.only.iter().map(|part| match part {
        ValidationPart::Agreement => agreement::AgreementPlan::new(args.common.quick).rounds,
        ValidationPart::Hog => hog::HogPlan::new(args.common.quick).rounds,
        ValidationPart::Size => size::SizePlan::new(args.common.quick).repeats,
        ValidationPart::Verdicts => 1,
    });
    let repeats = repeats.max().unwrap_or(0);
    let steps = args.only.iter().map(|part| match part {
        ValidationPart::Agreement => agreement::AgreementPlan::new(args.common.quick).steps(),
        ValidationPart::Hog => hog::HogPlan::new(args.common.quick).steps(),
        ValidationPart::Size => size::SizePlan::new(args.common.quick).steps(),
        ValidationPart::Verdicts => verdicts::VerdictsPlan::new(args.common.quick).steps(),
    });
    let (session, mut result) = Session::begin(NAME, &args.common, repeats, steps.sum());
    let mut bench = Validation {
        quick: args.common.quick,
        seed: args.common.seed,
        session,
        scratch: tempfile::tempdir().context("no folder for files under way")?,
    };
    for part in &args.only {
        let (started, busy) = (std::time::Instant::now(), foreign_ticks());
        match part {
            ValidationPart::Agreement => {
                agreement::run(&mut bench, &mut result).context("agreement")?
            }
            ValidationPart::Hog => hog::run(&mut bench, &mut result).context("hog")?,
            ValidationPart::Size => size::run(&mut bench, &mut result).context("size")?,
            ValidationPart::Verdicts => {
                verdicts::run(&mut bench, &mut result).context("verdicts")?
            }
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
    bench
        .session
        .finish(&mut result, &args.common, args.check, &[])
}

fn part_name(part: ValidationPart) -> String {
    format!("{part:?}").to_lowercase()
}
