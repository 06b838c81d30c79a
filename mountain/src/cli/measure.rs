// SPDX-License-Identifier: GPL-2.0-or-later
//! The commands that measure: arguments and what is printed.

use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode, ExitStatus};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{bail, Result};
use clap::Args;
use clap_complete::ArgValueCandidates;
use hdrhistogram::Histogram;
use indicatif::ProgressBar;
use serde_json::json;

use super::{exit_code, path, print_json};
use crate::cli::compare::milliseconds;
use crate::cli::results::{check_writable, is_stdout, keep, label, progress};
use crate::control::steering;
use crate::host::stdout;
use crate::host::text::{count, duration};
use crate::measure::ping::{PingOptions, PingOutcome, Pinger};
use crate::measure::runfile::{self, RunFile, SCHEMA};
use crate::measure::stats::{quantile_counted, Table};
use crate::measure::{cpu, environment};
use crate::report::table::{align, Words};

/// Highest RTT of the live figures, µs.
const LIVE_MAX: u64 = 60_000_000;
/// How often they are renewed.
const LIVE_EVERY: Duration = Duration::from_millis(100);
/// What may be waited for: far more overflows when it is added to a time.
pub(super) const LONGEST: Duration = Duration::from_secs(366 * 86_400);

/// Less than this between the kernel's clock and a program's is the program's own time on a busy host, µs.
const OWN_QUEUE_US: f64 = 5e3;

#[derive(Args)]
pub(crate) struct Ping {
    /// Measure round trips to this address or name
    target: String,
    /// Send this many probes; `mountain compare` takes 1000 answers for P99
    #[arg(long, short = 'c', default_value_t = 1200)]
    count: usize,
    /// Wait this long between two probes, in seconds or with a unit: 0.2, 5ms
    #[arg(long, short = 'i', default_value = "10ms", value_parser = duration)]
    interval: Duration,
    /// Send this many bytes of payload in a probe
    #[arg(long, short = 's', default_value_t = 56, conflicts_with = "tcp")]
    size: usize,
    /// Send UDP probes to this port of a `mountain reflect`, instead of ICMP echo
    #[arg(long, value_name = "PORT", conflicts_with = "tcp")]
    udp: Option<u16>,
    /// Time TCP handshakes with this port instead; each connection is reset once it is made
    ///
    /// The far program sees as many connections come and go: choose an --interval that suits it.
    /// A refusal is an answer too. A lost SYN is a lost probe, although the kernel repeats it.
    #[arg(long, value_name = "PORT")]
    tcp: Option<u16>,
    /// Send over this device
    #[arg(long, value_name = "DEV")]
    dev: Option<String>,
    /// Send over this path, by the name that `mountain status` shows
    ///
    /// Probes take the path's device, gateway and address. Without a running daemon the path is
    /// looked up in the configuration.
    #[arg(long, value_name = "NAME", conflicts_with = "dev", add = ArgValueCandidates::new(path::candidates))]
    path: Option<String>,
    /// Switch the device's own timestamps on, if it has them, and back at the end
    ///
    /// Timestamps of the device that are on are used anyway. Other programs (PTP) may depend on this
    /// setting of the device. Only `kill -9` leaves it switched on.
    #[arg(long, conflicts_with = "tcp")]
    hardware: bool,
    /// Use IPv4 only
    #[arg(short = '4', conflicts_with = "ipv6")]
    ipv4: bool,
    /// Use IPv6 only
    #[arg(short = '6')]
    ipv6: bool,
    /// Write all samples and the circumstances to this run file; `-` is standard output, without the table
    #[arg(long, short = 'o', value_name = "FILE")]
    out: Option<PathBuf>,
    /// Use this name for the run in comparisons
    #[arg(long, value_parser = label)]
    label: Option<String>,
    /// Count answers slower than this many ms; several with commas [default: chosen by the median]
    #[arg(long, value_name = "MS", value_delimiter = ',', value_parser = milliseconds)]
    threshold: Vec<f64>,
    /// Print JSON; delays in it are in µs
    #[arg(long)]
    json: bool,
}

impl Ping {
    /// Exit code: 0 if anything answered, interrupted or not; 1 without any answer.
    pub(crate) fn run(self) -> Result<ExitCode> {
        check_writable(self.out.as_deref())?;
        let pinger = Pinger::new(self.options()?)?;
        let address = pinger.address().to_string();
        let mut live = Live::new(self.count);
        let mut outcome = pinger.run(|sent, rtt| live.update(sent, rtt))?;
        live.bar.finish_and_clear();
        outcome.run.label = self.label.clone();
        if let Some(path) = &self.path {
            let environment = &mut outcome.run.environment;
            environment.insert("path".into(), path.as_str().into());
        }

        let thresholds: Vec<f64> = self.threshold.iter().map(|ms| ms * 1e3).collect();
        let (kernel, user) = outcome.run.samples.tables(&thresholds);
        // Written before it is printed: the reader of a pipe may be gone, and what is left to be
        // said then is the exit code.
        stdout::keep_going();
        let run = &outcome.run;
        let written = run.check().and_then(|()| keep(self.out.as_deref(), run));
        if self.out.as_deref().is_some_and(is_stdout) {
            // The run file is what standard output is for.
        } else if self.json {
            let mut value = json!({
                "target": self.target,
                "address": address,
                "clock": outcome.run.clock,
                "interrupted": outcome.run.interrupted,
                "rtt": kernel,
                "user": user,
                "duplicates": outcome.duplicates,
                "errors": outcome.errors,
                "timestamps": outcome.timestamps,
            });
            if let Some(directions) = outcome.run.samples.directions() {
                value["directions"] = serde_json::to_value(directions)?;
            }
            if self.tcp.is_some() {
                value["refused"] = outcome.refused.into();
                value["repeated"] = outcome.repeated.into();
            }
            if let Some(error) = &outcome.last_error {
                value["last_error"] = error.as_str().into();
            }
            print_json(&value)?;
        } else {
            self.print(&outcome, &address, &kernel, user.as_ref());
            if let (Some(out), Ok(())) = (&self.out, &written) {
                println!("samples: {}", stdout::plain(&out.to_string_lossy()));
            }
        }
        written?;
        if kernel.count == 0 {
            let hint = reflector_hint(self.udp);
            eprintln!(
                "mountain: {} ({address}) does not answer{hint}",
                self.target
            );
        }
        Ok(exit_code(kernel.count > 0))
    }

    fn options(&self) -> Result<PingOptions> {
        let ipv6 = (self.ipv4 || self.ipv6).then_some(self.ipv6);
        let mut options = PingOptions {
            target: self.target.clone(),
            ipv6,
            count: self.count,
            interval: self.interval,
            size: if self.tcp.is_some() { 0 } else { self.size },
            udp: self.udp,
            tcp: self.tcp,
            device: self.dev.clone(),
            hardware: self.hardware,
            steering: steering(),
            ..PingOptions::default()
        };
        if let Some(name) = &self.path {
            path::choose(&mut options, name)?;
        }
        Ok(options)
    }

    fn print(&self, outcome: &PingOutcome, address: &str, kernel: &Table, user: Option<&Table>) {
        let run = &outcome.run;
        let how = match (self.udp, self.tcp) {
            (Some(port), _) => format!("UDP probes to port {port}, {} bytes", self.size),
            (_, Some(port)) => format!("TCP handshakes with port {port}"),
            _ => format!("ICMP echo, {} bytes", self.size),
        };
        println!(
            "{} ({address}): {} {how}, every {}",
            self.target,
            kernel.sent,
            humantime::format_duration(self.interval)
        );
        let first = match run.clock.as_str() {
            "user" => "steady clock",
            clock => clock,
        };
        let columns: Vec<(&str, &Table)> = std::iter::once((first, kernel))
            .chain(user.map(|t| ("user space", t)))
            .collect();
        print_columns(&columns);
        if self.threshold.is_empty() && kernel.count > 0 {
            println!("(thresholds chosen: from 1.5 × the median up)");
        }
        if kernel.count > 0 {
            self.print_clock(outcome);
        }
        if outcome.duplicates > 0 {
            println!("{}, not counted", count(outcome.duplicates, "duplicate"));
        }
        if let Some(error) = &outcome.last_error {
            println!("{}, the last: {error}", count(outcome.errors, "error"));
        }
        let silent = run.samples.silent_since();
        if silent >= 10 && kernel.count > 0 {
            println!(
                "no answer to the last {silent} probes: {} stopped answering {:.1} s before the end",
                self.target,
                run.seconds - run.samples.sent_us[run.samples.len() - silent] / 1e6
            );
        }
        if let Some(directions) = run.samples.directions() {
            for (name, d) in [
                ("forward", directions.forward),
                ("backward", directions.backward),
            ] {
                println!(
                    "{name}: median {:.3} ms, P99 {:.3} ms above the least",
                    d.median_us / 1e3,
                    d.p99_us / 1e3
                );
            }
        }
        if let Some(waited) = own_queue(kernel, user) {
            println!(
                "user space saw {:.1} ms more in the median: probes wait in a queue of this host, or mountain for a processor",
                waited / 1e3
            );
        }
        if run.interrupted {
            println!("interrupted after {} of {} probes", kernel.sent, self.count);
        }
    }

    /// Whose times these are, and what kind of answers.
    fn print_clock(&self, outcome: &PingOutcome) {
        let user = outcome.run.clock == "user";
        match self.tcp {
            None if user => println!(
                "{} answers have no kernel timestamps on both ways (a driver that gives none?): \
                 all RTTs are user space's",
                outcome.unstamped
            ),
            None => println!("timestamps: {}", outcome.timestamps),
            Some(_) if user => {
                println!("the kernel does not time refused handshakes: all RTTs are user space's");
            }
            Some(_) => println!("kernel: its own measure of the handshake (TCP_INFO)"),
        }
        if outcome.refused > 0 {
            println!(
                "{} of the answers were refusals: nothing listens on the port, or a firewall rejects",
                outcome.refused
            );
        }
        if outcome.repeated > 0 {
            println!(
                "{} of the lost probes were answered when their SYN or SYN-ACK had been sent again",
                outcome.repeated
            );
        }
    }
}

/// What has to be at a target that does not answer.
pub(super) fn reflector_hint(udp: Option<u16>) -> String {
    udp.map_or(String::new(), |port| {
        format!(": run `mountain reflect --listen ADDRESS:{port}` there")
    })
}

/// By how much programs saw later answers than the path gave, µs, where that is as much as the path or more.
fn own_queue(kernel: &Table, user: Option<&Table>) -> Option<f64> {
    let median = |table: &Table| table.delays.as_ref().map(|d| d.median);
    let (path, seen) = (median(kernel)?, median(user?)?);
    Some(seen - path).filter(|more| *more >= path.max(OWN_QUEUE_US))
}

#[derive(Args)]
pub(crate) struct Cpu {
    /// Record intervals of this length, in seconds or with a unit: 0.5, 100ms
    #[arg(long, default_value = "1s", value_parser = duration)]
    interval: Duration,
    /// Record for this long when there is no command, in seconds or with a unit [default: 10s]
    #[arg(long, value_parser = duration, conflicts_with = "command")]
    duration: Option<Duration>,
    /// Write all intervals and the circumstances to this run file; `-` is standard output, without the table
    #[arg(long, short = 'o', value_name = "FILE")]
    out: Option<PathBuf>,
    /// Use this name for the run in comparisons
    #[arg(long, value_parser = label)]
    label: Option<String>,
    /// Run this and record until it ends
    ///
    /// Ctrl-C (SIGINT), SIGTERM, SIGHUP and SIGQUIT are passed on to it. A second one kills it, and ends what
    /// it started and left behind.
    #[arg(last = true)]
    command: Vec<String>,
}

impl Cpu {
    /// Exit code: the command's, 128 and the signal's number if one ended it; without a command
    /// that has ended 0, or 1 if something went wrong.
    pub(crate) fn run(self) -> Result<ExitCode> {
        if self.interval < Duration::from_millis(10) {
            bail!("--interval: at least 10ms, as the kernel counts in ticks");
        }
        for (name, length) in [
            ("interval", Some(self.interval)),
            ("duration", self.duration),
        ] {
            if length.is_some_and(|l| l > LONGEST) {
                bail!("--{name}: at most a year");
            }
        }
        if self.duration.is_some_and(|d| d.is_zero()) {
            bail!("--duration: nothing is recorded in no time");
        }
        check_writable(self.out.as_deref())?;
        let environment = environment::record(steering().as_deref());
        let started = humantime::format_rfc3339_millis(SystemTime::now()).to_string();
        let command = self
            .command
            .split_first()
            .map(|(program, arguments)| -> Result<Command> {
                let mut command = Command::new(program);
                command.args(arguments);
                if self.out.as_deref().is_some_and(is_stdout) {
                    // Standard output is the run file's.
                    command.stdout(std::io::stderr().as_fd().try_clone_to_owned()?);
                }
                Ok(command)
            });
        let mut command = command.transpose()?;
        let wait = Duration::from_secs(10);
        let duration = command.is_none().then_some(self.duration.unwrap_or(wait));
        // A command has the terminal for itself.
        let bar = duration.map(|length| {
            let length = humantime::format_duration(length);
            let bar = progress(0, &format!("recording: {{elapsed}} of {length}"));
            bar.enable_steady_tick(Duration::from_secs(1));
            bar
        });
        let recorded = cpu::record(self.interval, duration, command.as_mut());
        bar.inspect(ProgressBar::finish_and_clear);
        let recorded = recorded?;
        let run = RunFile {
            schema: SCHEMA.into(),
            label: self.label,
            tool: format!("mountain {} cpu", env!("CARGO_PKG_VERSION")),
            command: environment::command_line(),
            started,
            seconds: recorded.seconds,
            clock: "unknown".into(),
            interrupted: recorded.interrupted,
            cpu: recorded.cpu,
            environment,
            ..RunFile::default()
        };
        // Before anything is printed: standard output may be gone.
        stdout::keep_going();
        let written = run.check().and_then(|()| keep(self.out.as_deref(), &run));
        if !self.out.as_deref().is_some_and(is_stdout) {
            print_cpu(&run);
        }
        written?;
        if let Some(error) = &recorded.failed {
            eprintln!("mountain: {error:#}");
        }
        let otherwise = exit_code(recorded.failed.is_none());
        Ok(recorded.status.map_or(otherwise, as_ended))
    }
}

fn print_cpu(run: &RunFile) {
    println!(
        "{:.1} s, {} accounting; shares in %",
        run.seconds, run.cpu.accounting
    );
    let head = ["CPU"].into_iter().chain(runfile::Cpu::KINDS);
    let mut rows = vec![head.map(str::to_owned).collect()];
    for (i, shares) in cpu::means(&run.cpu).iter().enumerate() {
        let shares = shares.iter().map(|s| format!("{:.2}", s * 100.0));
        rows.push(
            std::iter::once(run.cpu.number(i).to_string())
                .chain(shares)
                .collect(),
        );
    }
    print!("{}", align(&rows, Words::In(&[0])));
    // Of 10 ms each (USER_HZ, proc_stat(5)).
    if run.seconds < 0.1 {
        println!("too short to tell: the kernel counts CPU time in steps of 10 ms");
    }
    if run.interrupted {
        println!("interrupted");
    }
}

/// A command's exit code, or 128 and the number of the signal that ended it, as for a shell.
fn as_ended(status: ExitStatus) -> ExitCode {
    let code = status.code().or(status.signal().map(|signal| 128 + signal));
    ExitCode::from(code.and_then(|c| u8::try_from(c).ok()).unwrap_or(1))
}

/// Tables side by side; their rows are the same.
fn print_columns(columns: &[(&str, &Table)]) {
    let tables: Vec<_> = columns.iter().map(|(_, table)| table.rows()).collect();
    let head = columns.iter().map(|(name, _)| (*name).to_owned());
    let mut rows: Vec<Vec<String>> = vec![std::iter::once(String::new()).chain(head).collect()];
    for (n, first) in tables[0].iter().enumerate() {
        let figures = tables.iter().map(|rows| rows[n].to_string());
        rows.push(std::iter::once(first.name.clone()).chain(figures).collect());
    }
    print!("{}", align(&rows, Words::In(&[0])));
}

/// The progress bar.
struct Live {
    bar: ProgressBar,
    rtts: Histogram<u64>,
    told_at: Option<Instant>,
}

impl Live {
    fn new(count: usize) -> Self {
        Self {
            // Within 80 columns.
            bar: progress(count, "{bar:10} {pos}/{len} {msg} ETA {eta}"),
            rtts: Histogram::new_with_max(LIVE_MAX, 3).expect("valid bounds"),
            told_at: None,
        }
    }

    fn update(&mut self, sent: usize, rtt_us: Option<f64>) {
        if self.bar.is_hidden() {
            return;
        }
        if let Some(rtt) = rtt_us {
            self.rtts.saturating_record(rtt.max(0.0) as u64);
        }
        self.bar.set_position(sent as u64);
        // Quantiles cost a walk through the histogram.
        if self.told_at.is_none_or(|at| at.elapsed() >= LIVE_EVERY) {
            self.told_at = Some(Instant::now());
            let counts = || {
                let recorded = self.rtts.iter_recorded();
                recorded.map(|at| (at.value_iterated_to() as f64, at.count_at_value()))
            };
            let n = self.rtts.len();
            let ms = |q| {
                let us = quantile_counted(n, counts(), q);
                us.map_or("-".to_owned(), |us| format!("{:.3} ms", us / 1e3))
            };
            let lost = (sent as u64).saturating_sub(self.rtts.len());
            self.bar.set_message(format!(
                "p50 {}  p99 {}  unanswered {lost}",
                ms(0.5),
                ms(0.99)
            ));
        }
    }
}
