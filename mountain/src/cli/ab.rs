// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain ab`: arguments, the course of the measurement, and what is printed.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{anyhow, ensure, Context, Result};
use clap::Args;
use clap_complete::ArgValueCandidates;
use indicatif::ProgressBar;
use serde::Serialize;

use crate::cli::compare::text;
use crate::cli::measure::{reflector_hint, LONGEST};
use crate::cli::results::{check_writable, is_stdout, keep, progress};
use crate::cli::{exit_code, path, print_json};
use crate::control::steering;
use crate::host::signals::{Asked, Ended};
use crate::host::stdout;
use crate::host::text::duration;
use crate::measure::ab::{order, Setting};
use crate::measure::compare::{self, compare, Comparison, Side};
use crate::measure::ping::{PingOptions, Pinger};
use crate::measure::runfile::RunFile;

/// Value of [`Result`]'s schema.
const SCHEMA: &str = "mountain-ab/1";

#[derive(Args)]
pub(crate) struct Ab {
    /// Measure this address or name
    target: String,
    /// Run this command before each half of A, and once more at the end
    ///
    /// The words are split as a shell would, but no shell runs: for pipes or variables, give
    /// `sh -c '...'`. A command must end by itself with exit status 0.
    #[arg(long, value_name = "COMMAND")]
    a: String,
    /// Run this command before each half of B
    #[arg(long, value_name = "COMMAND")]
    b: String,
    /// Measure this many rounds of one half A and one half B: an even number from 8 to 20
    #[arg(long, default_value_t = 8)]
    rounds: u32,
    /// Wait this long after each command, in seconds or with a unit
    #[arg(long, default_value = "1s", value_parser = duration)]
    settle: Duration,
    /// Send this many probes in each half
    #[arg(long, short = 'c', default_value_t = 500)]
    count: usize,
    /// Wait this long between two probes, in seconds or with a unit
    #[arg(long, short = 'i', default_value = "10ms", value_parser = duration)]
    interval: Duration,
    /// Send UDP probes to this port of a `mountain reflect` instead of ICMP echo
    #[arg(long, value_name = "PORT", conflicts_with = "tcp")]
    udp: Option<u16>,
    /// Time TCP handshakes with this port instead
    #[arg(long, value_name = "PORT")]
    tcp: Option<u16>,
    /// Send over this device
    #[arg(long, value_name = "DEV")]
    dev: Option<String>,
    /// Send over this path, by the name that `mountain status` shows
    ///
    /// It is looked up once, before the first command.
    #[arg(long, value_name = "NAME", conflicts_with = "dev", add = ArgValueCandidates::new(path::candidates))]
    path: Option<String>,
    /// Use IPv4 only
    #[arg(short = '4', conflicts_with = "ipv6")]
    ipv4: bool,
    /// Use IPv6 only
    #[arg(short = '6')]
    ipv6: bool,
    /// Write all samples and the comparison to this file; `-` is standard output, without the table
    #[arg(long, short = 'o', value_name = "FILE")]
    out: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What is left of an A/B.
#[derive(Serialize)]
struct AbRun {
    schema: &'static str,
    target: String,
    /// The commands.
    a: String,
    b: String,
    /// Whole rounds, by which it is judged.
    rounds: usize,
    interrupted: bool,
    /// `None` without a whole round.
    comparison: Option<Comparison>,
    /// Each side's halves in the order of rounds; in the file only.
    #[serde(skip_serializing_if = "Option::is_none")]
    runs: Option<[Vec<RunFile>; 2]>,
}

impl Ab {
    /// Exit code: 0, 130 if it was interrupted, 1 if a command failed or nothing answered.
    pub(crate) fn run(self) -> Result<ExitCode> {
        let order = order(self.rounds).context("--rounds")?;
        let settings = [
            Setting::parse(&self.a).context("--a")?,
            Setting::parse(&self.b).context("--b")?,
        ];
        ensure!(self.settle <= LONGEST, "--settle: at most a year");
        check_writable(self.out.as_deref())?;
        let mut options = self.options();
        if let Some(name) = &self.path {
            path::choose(&mut options, name)?;
        }
        // The name is looked up once: both sides have the same target. That can take long, and until then nothing is
        // changed that a signal would leave behind.
        options.target = Pinger::new(options.clone())?.numeric_target();
        let asked = Asked::to_end()?;
        let mut course = Course {
            settings,
            asked,
            options,
            settle: self.settle,
            last: None,
            bar: progress(
                order.len().saturating_mul(self.count),
                "{bar:30} {msg} ETA {eta}",
            ),
            runs: Default::default(),
        };
        let failed = course.all(&order).err();
        course.bar.finish_and_clear();
        let interrupted = failed.as_ref().is_some_and(|e| e.is::<Ended>());
        let problem = match (failed.filter(|_| !interrupted), course.restore()) {
            (None, Ok(())) => None,
            (None, Err(too)) => Some(too.context("A could not be put back in force")),
            (Some(error), Ok(())) => Some(anyhow!("{error:#}; A is in force again")),
            (Some(error), Err(too)) => Some(anyhow!(
                "{error:#}; A could not be put back in force: {too:#}"
            )),
        };
        // What was measured before is not lost.
        let measured = course.runs.iter().all(|side| !side.is_empty());
        match problem {
            Some(problem) if !measured => Err(problem),
            Some(problem) => match self.finish(course.runs, true) {
                Ok(_) => Err(problem),
                Err(too) => Err(anyhow!("{problem:#}. {too:#}")),
            },
            None => self.finish(course.runs, interrupted),
        }
    }

    fn options(&self) -> PingOptions {
        PingOptions {
            target: self.target.clone(),
            ipv6: (self.ipv4 || self.ipv6).then_some(self.ipv6),
            count: self.count,
            interval: self.interval,
            size: if self.tcp.is_some() { 0 } else { 56 },
            udp: self.udp,
            tcp: self.tcp,
            device: self.dev.clone(),
            steering: steering(),
            ..PingOptions::default()
        }
    }

    fn finish(&self, mut runs: [Vec<RunFile>; 2], interrupted: bool) -> Result<ExitCode> {
        let rounds = runs[0].len().min(runs[1].len());
        runs.iter_mut().for_each(|side| side.truncate(rounds));
        let none = !runs.iter().any(|side| has_answers(side));
        let comparison = match rounds {
            0 => None,
            _ => Some(judge(&runs)?),
        };
        let mut measured = AbRun {
            schema: SCHEMA,
            target: self.target.clone(),
            a: self.a.clone(),
            b: self.b.clone(),
            rounds,
            interrupted,
            comparison,
            runs: Some(runs),
        };
        stdout::keep_going();
        let written = keep(self.out.as_deref(), &measured);
        measured.runs = None;
        match self.out.as_deref() {
            Some(out) if is_stdout(out) => {}
            _ if self.json => print_json(&measured)?,
            _ => self.print(&measured),
        }
        written?;
        if interrupted {
            return Ok(ExitCode::from(130));
        }
        if none {
            let hint = reflector_hint(self.udp);
            eprintln!("mountain: {} does not answer{hint}", self.target);
        }
        Ok(exit_code(!none))
    }

    fn print(&self, measured: &AbRun) {
        println!(
            "A: {}\nB: {}\n",
            stdout::plain(&self.a),
            stdout::plain(&self.b)
        );
        match &measured.comparison {
            Some(comparison) => print!("{}", text(comparison)),
            None => println!("no round was measured: there is nothing to compare"),
        }
        if measured.interrupted {
            println!(
                "interrupted after {} of {} rounds",
                measured.rounds, self.rounds
            );
        }
    }
}

fn has_answers(runs: &[RunFile]) -> bool {
    let mut rtts = runs.iter().flat_map(|run| &run.samples.rtt_us);
    rtts.any(Option::is_some)
}

fn judge(runs: &[Vec<RunFile>; 2]) -> Result<Comparison> {
    let sides = [0, 1].map(|i| Side {
        name: ["A", "B"][i].into(),
        runs: runs[i].clone(),
    });
    let options = compare::CompareOptions {
        paired: true,
        // What is changed may be queues of this host.
        by_user: true,
        ..compare::CompareOptions::default()
    };
    let mut comparison = compare(&sides, &options)?;
    // Each half is a run of its own; what differs between A and B is what was asked for.
    comparison.warnings.clear();
    Ok(comparison)
}

/// The measurement under way.
struct Course {
    settings: [Setting; 2],
    asked: Asked,
    options: PingOptions,
    settle: Duration,
    /// The side whose command was started last, and whether it has ended well.
    last: Option<(usize, bool)>,
    bar: ProgressBar,
    runs: [Vec<RunFile>; 2],
}

impl Course {
    fn all(&mut self, order: &[usize]) -> Result<()> {
        for (n, &side) in order.iter().enumerate() {
            let (round, rounds) = (n / 2 + 1, order.len() / 2);
            self.bar.set_message(format!("round {round} of {rounds}"));
            self.half(n, side)?;
            // It would go on so: 10 s of waiting for each half.
            let is_silent = |side: &Vec<RunFile>| !side.is_empty() && !has_answers(side);
            if round == 1 && self.runs.iter().all(is_silent) {
                break;
            }
        }
        Ok(())
    }

    fn half(&mut self, n: usize, side: usize) -> Result<()> {
        self.last = Some((side, false));
        self.settings[side].run(&self.asked)?;
        self.last = Some((side, true));
        self.asked.wait(self.settle)?;
        let done = n * self.options.count;
        let bar = &self.bar;
        let pinger = Pinger::new(self.options.clone())?;
        let mut outcome = pinger.run(|sent, _| bar.set_position((done + sent) as u64))?;
        if outcome.asked_to_end {
            return Err(Ended.into());
        }
        outcome.run.label = Some(["A", "B"][side].into());
        self.runs[side].push(outcome.run);
        Ok(())
    }

    /// Leaves A in force. It is not run again where it ran last and ended well.
    fn restore(&self) -> Result<()> {
        match self.last {
            None | Some((0, true)) => Ok(()),
            _ => self.settings[0].restore(&self.asked),
        }
    }
}
