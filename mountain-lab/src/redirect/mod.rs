//! `mountain-lab redirect`: what redirecting costs, by each backend. Method: docs/redirect.md.

mod load;
mod napi;
mod pps;
mod programs;
mod rig;
mod rules;
mod segment;
mod way;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;

#[derive(clap::Args)]
pub struct RedirectArgs {
    /// What to measure.
    #[arg(value_enum, default_value = "pps")]
    part: Part,
    /// Shorter, fewer repeats: to see whether it works, not to claim anything.
    #[arg(long)]
    quick: bool,
    /// Repeats [default: 2 with --quick, else 9].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: Option<u32>,
    /// Only these rows (see --list).
    #[arg(long, value_delimiter = ',', value_name = "ROW")]
    rows: Vec<String>,
    /// Decides every random choice.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Where result.json goes.
    #[arg(long, default_value = "out")]
    out: PathBuf,
    /// Exit with 1 when a figure is missed.
    #[arg(long)]
    check: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Processor time of the router per delivered packet.
    Pps,
}

/// `mountain-lab redirect`.
pub fn redirect(args: &RedirectArgs) -> Result<ExitCode> {
    match args.part {
        Part::Pps => pps::run(args),
    }
}
