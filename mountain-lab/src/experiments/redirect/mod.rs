// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab redirect`: what redirecting costs, by each backend. Method: docs/experiments/redirect.md.

mod chart;
pub mod client;
pub mod contender;
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

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::ValueEnum;
use mountain::redirect::Backend;
use mountain_lab::result::{Check, Metric, RunResult};

use crate::driver::{CommonArgs, Session};
use contender::Contender;

#[derive(clap::Args)]
pub struct RedirectArgs {
    /// Measure only this part [default: all, each into its own folder].
    #[arg(value_enum)]
    part: Option<RedirectPart>,
    #[command(flatten)]
    common: CommonArgs,
    /// Repeat this many times [default: 2 with --quick, else 9; of upload 1 and 5].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: Option<u32>,
    /// Measure only these rows; an unknown name lists them.
    #[arg(long, value_delimiter = ',', value_name = "ROW")]
    rows: Vec<String>,
    /// Exit with 1 when a figure misses its limit.
    #[arg(long)]
    check: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum RedirectPart {
    /// Measure the router's processor time per delivered packet.
    Pps,
    /// Measure the same with 65,536 rules against one, and how long adding a rule takes.
    Scale,
    /// Send 512 MiB by UDP: what arrives, and what the whole machine spends on it.
    Upload,
    /// Measure round trips of single packets at 20,000 a second.
    Latency,
}

impl RedirectPart {
    /// Repeats that the figures need, and those of a quick run.
    fn repeats(self) -> (u32, u32) {
        match self {
            Self::Upload => (5, 1),
            _ => (9, 2),
        }
    }

    fn run(self, args: &RedirectArgs, out: PathBuf) -> Result<ExitCode> {
        let (enough, few) = self.repeats();
        let repeats = args.repeat.unwrap_or(args.common.quick_or(few, enough));
        let common = CommonArgs {
            out: Some(out),
            ..args.common.clone()
        };
        let name = format!("redirect-{}", crate::name_of(&self));
        let mut session = Session::begin(&name, &common, repeats, 0);
        let table = match self {
            Self::Pps => pps::run(args, &mut session)?,
            Self::Scale => scale::run(args, &mut session)?,
            Self::Upload => upload::run(args, &mut session)?,
            Self::Latency => latency::run(args, &mut session)?,
        };
        let least = [("repeats", repeats.into(), enough.into())];
        session.finish_as(args.check, &least, table)
    }
}

/// Prints the result of a part.
type Table = Box<dyn FnOnce(&RunResult) -> String>;

/// `mountain-lab redirect`.
pub fn redirect(args: &RedirectArgs) -> Result<ExitCode> {
    let out = args.common.out("redirect");
    if let Some(part) = args.part {
        return part.run(args, out);
    }
    let mut code = ExitCode::SUCCESS;
    for part in RedirectPart::value_variants() {
        let one = part.run(args, out.join(crate::name_of(part)))?;
        if one != ExitCode::SUCCESS {
            code = one;
        }
    }
    Ok(code)
}

/// A figure that is promised to be no higher than `limit`, relative to that of a row.
fn relative(what: &str, found: Option<&Metric>, limit: f64, reference: &str) -> Check {
    let interval = found.map_or(String::new(), |m| format!(" [{:.2}-{:.2}]", m.lo, m.hi));
    let figure = found.map(|m| m.median);
    Check::at_most(&format!("{what}{interval}"), figure, limit).relative_to(reference)
}

/// The rows of what a server answers: directly, and by each backend.
fn plain_ways() -> Vec<Contender> {
    let backends = Backend::ALL.into_iter().rev();
    let backends = backends.filter(|backend| *backend != Backend::Module);
    let backends = backends.map(Contender::Backend);
    [Contender::Route].into_iter().chain(backends).collect()
}

/// The rows that are wanted, out of `all`; without names all of them.
fn chosen(names: &[String], all: &[Contender]) -> Result<Vec<Contender>> {
    if names.is_empty() {
        return Ok(all.into());
    }
    let known: Vec<String> = all.iter().map(Contender::to_string).collect();
    let find = |name: &String| {
        let found = known.iter().position(|known| known == name);
        let known = || format!("no row {name}; there are {}", known.join(", "));
        found.map(|at| all[at]).with_context(known)
    };
    names.iter().map(find).collect()
}
