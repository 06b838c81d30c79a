// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab`: experiments on emulated paths that compare policies in one run.

#[macro_use]
mod out;

#[cfg(test)]
mod documented;
mod driver;
mod emulate;
mod experiments;
#[cfg(test)]
mod layers;
mod policy_ctl;
mod recording;
mod report;
mod results;
mod scenario;
mod trace;

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use clap::{Parser, Subcommand, ValueEnum};
use mountain::host::stdout::lines;
use mountain::report::table::{align, row, Words};

use emulate::{cgroup, netns};
use experiments::{bench, cc, claims, redirect, replay, run, validate_ping};
use scenario::Scenario;

/// Set by SIGINT and SIGTERM; the run ends at the next look, and everything is removed.
static STOP: AtomicBool = AtomicBool::new(false);

#[derive(Parser)]
#[command(
    name = "mountain-lab",
    version,
    about = "Compare path policies on emulated paths in private network namespaces"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List the scenarios.
    List,
    /// Run a scenario by its name or from your own file.
    Run(run::RunArgs),
    /// Measure what steering costs: time per run, TCP throughput, large flow tables.
    Cost(bench::CostArgs),
    /// Check that measurements agree with ping(8) and irtt, beside a CPU hog and with a million samples.
    #[command(alias = "bars")]
    ValidatePing(validate_ping::ValidatePingArgs),
    /// Re-test what was published about this design, each claim as a controlled A/B experiment.
    Claims(claims::ClaimsArgs),
    /// Compare congestion controls on emulated links: rate steps, mobile links, several flows.
    Cc(cc::CcArgs),
    /// Measure what each redirect backend costs: router time per packet, an upload, latency.
    Redirect(redirect::RedirectArgs),
    /// Replay recorded paths through the policy and its bounds.
    Replay(replay::ReplayArgs),
    /// Make recordings of paths from logs of other programs.
    Trace(trace::TraceArgs),
    /// Print the committed results as one page of Markdown.
    Results(results::ResultsArgs),
    /// Count what `mountain-lab upload` sends by UDP.
    #[command(hide = true)]
    Serve(redirect::serve::ServeArgs),
    /// Send data by UDP to `mountain-lab serve`, at a fixed pace.
    #[command(hide = true)]
    Upload(redirect::client::UploadArgs),
    /// Remove the namespaces and cgroups that a killed run left behind.
    Clean,
    /// The emulator's process, started in a namespace of its own.
    #[command(hide = true)]
    Emulate,
}

fn main() -> ExitCode {
    mountain::host::program::complete_path();
    // A reader that is gone must not end a run whose namespaces are still there.
    mountain::host::stdout::keep_going();
    catch_signals();
    // Every flow is a socket.
    mountain::host::descriptors::raise_limit();
    match dispatch(Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("mountain-lab: {}", lines(&format!("{error:#}")));
            ExitCode::from(if STOP.load(Ordering::Relaxed) { 130 } else { 2 })
        }
    }
}

fn dispatch(cli: Cli) -> Result<ExitCode> {
    match cli.command {
        Command::List => {
            let scenarios = Scenario::list()?;
            let rows = scenarios.iter().map(|s| row([&s.name, &s.description]));
            print!("{}", align(&rows.collect::<Vec<_>>(), Words::All));
            Ok(ExitCode::SUCCESS)
        }
        Command::Run(args) => run::run(&args),
        Command::Cost(args) => bench::cost(&args),
        Command::ValidatePing(args) => validate_ping::validate_ping(&args),
        Command::Claims(args) => claims::claims(&args),
        Command::Cc(args) => cc::run(&args),
        Command::Redirect(args) => redirect::redirect(&args),
        Command::Replay(args) => replay::replay(&args),
        Command::Trace(args) => trace::trace(&args),
        Command::Results(args) => results::results(&args),
        Command::Serve(args) => redirect::serve::run(&args),
        Command::Upload(args) => redirect::client::run(&args),
        Command::Clean => {
            let names = [netns::clean()?, cgroup::clean()?].concat();
            for name in &names {
                println!("removed {name}");
            }
            if names.is_empty() {
                println!("nothing to remove");
            }
            Ok(ExitCode::SUCCESS)
        }
        Command::Emulate => emulate::child_main().map(|()| ExitCode::SUCCESS),
    }
}

/// A handler, not a mask: a mask would be inherited by the programs that the lab starts.
fn catch_signals() {
    use nix::sys::signal::{signal, SigHandler, Signal};
    extern "C" fn stop(_: i32) {
        STOP.store(true, Ordering::Relaxed);
    }
    for caught in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        // SAFETY: the handler only stores to an atomic.
        let _ = unsafe { signal(caught, SigHandler::Handler(stop)) };
    }
}

/// What stands for a value on the command line, and in results.
fn name_of(value: &impl ValueEnum) -> String {
    let value = value.to_possible_value().expect("none is left out");
    value.get_name().to_owned()
}

/// Whether the user wants the run to end.
fn stopped() -> bool {
    STOP.load(Ordering::Relaxed)
}
