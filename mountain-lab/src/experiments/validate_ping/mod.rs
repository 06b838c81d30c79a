// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab validate-ping`: whether measuring keeps its promises. Method: docs/validate-ping.md.

mod agreement;
mod hog;
mod size;
mod verdicts;

use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::driver::{CommonArgs, ForeignLoad, Session};

/// Of the result, and of its folder.
const NAME: &str = "validate-ping";

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

impl ValidationPart {
    /// Its repeats and steps, and what measures it.
    fn plan(self, args: &CommonArgs) -> ((u32, u64), Measure) {
        match self {
            Self::Agreement => (agreement::extent(args), agreement::run),
            Self::Hog => (hog::extent(args), hog::run),
            Self::Size => (size::extent(args), size::run),
            Self::Verdicts => (verdicts::extent(args), verdicts::run),
        }
    }
}

type Measure = fn(&mut Session) -> Result<()>;

/// `mountain-lab validate-ping`.
pub fn validate_ping(args: &ValidatePingArgs) -> Result<ExitCode> {
    if std::env::args_os()
        .nth(1)
        .is_some_and(|word| word == "bars")
    {
        eprintln!("`mountain-lab bars` is now `mountain-lab {NAME}`");
    }
    let common = &args.common;
    let parts: Vec<_> = args.only.iter().map(|part| part.plan(common)).collect();
    // The most repeats of any, and all steps.
    let repeats = parts.iter().map(|((repeats, _), _)| *repeats).max();
    let steps = parts.iter().map(|((_, steps), _)| steps).sum();
    let mut session = Session::begin(NAME, common, repeats.unwrap_or(0), steps);
    for (part, (_, run)) in args.only.iter().zip(parts) {
        let others = ForeignLoad::watch();
        let name = crate::name_of(part);
        run(&mut session).with_context(|| name.clone())?;
        if let Some(cores) = others.cores() {
            // For runs held against each other.
            let name = format!("{name}_busy_cores");
            session.result.note(&name, cores);
        }
    }
    session.finish(args.check, &[])
}
