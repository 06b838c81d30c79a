// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab validate-ping`: whether measuring keeps its promises. Method: docs/validate-ping.md.

mod agreement;
mod hog;
mod size;
mod verdicts;

use std::process::ExitCode;

use anyhow::{Context, Result};
use mountain_lab::result::RunResult;
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
struct Validation<'a> {
    args: &'a CommonArgs,
    session: Session,
    /// For files under way.
    scratch: TempDir,
    result: RunResult,
}

/// `mountain-lab validate-ping`.
pub fn validate_ping(args: &ValidatePingArgs) -> Result<ExitCode> {
    if std::env::args_os()
        .nth(1)
        .is_some_and(|word| word == "bars")
    {
        eprintln!("`mountain-lab bars` is now `mountain-lab {NAME}`");
    }
    let common = &args.common;
    let extents = args.only.iter().map(|part| match part {
        ValidationPart::Agreement => agreement::AgreementPlan::new(common).extent(),
        ValidationPart::Hog => hog::HogPlan::new(common).extent(),
        ValidationPart::Size => size::SizePlan::new(common).extent(),
        ValidationPart::Verdicts => verdicts::VerdictsPlan::new(common).extent(),
    });
    // The most repeats of any, and all steps.
    let (repeats, steps) = extents.fold((0, 0), |(repeats, steps), (r, s)| {
        (r.max(repeats), s + steps)
    });
    let (session, result) = Session::begin(NAME, common, repeats, steps);
    let mut bench = Validation {
        args: common,
        session,
        scratch: tempfile::tempdir().context("no folder for files under way")?,
        result,
    };
    for part in &args.only {
        let (started, busy) = (std::time::Instant::now(), foreign_ticks());
        let run: fn(&mut Validation) -> Result<()> = match part {
            ValidationPart::Agreement => agreement::run,
            ValidationPart::Hog => hog::run,
            ValidationPart::Size => size::run,
            ValidationPart::Verdicts => verdicts::run,
        };
        let name = format!("{part:?}").to_lowercase();
        run(&mut bench).with_context(|| name.clone())?;
        if let (Some(before), Some(after)) = (busy, foreign_ticks()) {
            // The programs measured and the emulator are among them: for runs held against
            // each other.
            let ticks = after.saturating_sub(before) as f64;
            let cores = ticks / 100.0 / started.elapsed().as_secs_f64();
            let name = format!("{name}_busy_cores");
            bench.result.environment.insert(name, json!(cores));
        }
    }
    let Validation {
        session,
        mut result,
        ..
    } = bench;
    session.finish(&mut result, common, args.check, &[])
}
