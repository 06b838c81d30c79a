// SPDX-License-Identifier: GPL-2.0-or-later
//! Runs a scenario: policies in turn within one run, the same schedule for all of a repeat.

use std::net::IpAddr;
use std::ops::Range;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use mountain_lab::result::{too_short, VoidRun};
use mountain_lab::workload::game::Packet;
use mountain_lab::workload::sys::NoHalt;
use serde_json::Value;

use crate::cgroup::Cgroup;
use crate::emulator::{monotonic_ns, Emulator, REFERENCE_DELAY_US};
use crate::evaluate;
use crate::hosts::Hosts;
use crate::policy_ctl::{Product, Reflector};
use crate::scenario::{Limits, Policy, Scenario};
use crate::traffic::{Observed, Traffic};
use crate::{stopped, RunArgs};

/// How often a void segment is run again.
const RETRIES: u32 = 2;
/// From the order to play a segment to its begin.
const AHEAD: Duration = Duration::from_millis(300);

/// How far the emulator was from what it should have done, on the idle reference path.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub struct EmulatorError {
    pub n: usize,
    pub p50_us: u32,
    pub p99_us: u32,
    pub max_us: u32,
    pub loss: f64,
    /// CPU cores that the emulator used.
    pub cores: f64,
}

/// What one policy did in one repeat.
pub struct Segment {
    pub repeat: u32,
    pub policy: Policy,
    /// CLOCK_MONOTONIC at time 0 of the schedule.
    pub start_ns: u64,
    /// What the traffic saw, in the discarded part too: an onset at the start of the measured part
    /// has to know where the flows were before.
    pub seen: Observed,
    /// The measured part, CLOCK_MONOTONIC.
    pub measured: Range<u64>,
    pub error: EmulatorError,
    /// Share of all CPUs that was busy, 0 to 1.
    pub cpu_busy: f64,
    pub product_cores: Option<f64>,
    pub status: Value,
    pub explain: Value,
    /// The product's last moves of single flows.
    pub moves: Value,
}

impl Segment {
    /// Why this segment does not count.
    fn void(&self, limits: &Limits) -> Option<String> {
        let e = &self.error;
        if e.n == 0 {
            return Some("no packet on the reference path".into());
        }
        let error_ms = f64::from(e.p99_us) / 1e3;
        if error_ms > limits.error_p99_ms {
            let limit = limits.error_p99_ms;
            return Some(format!("emulator error p99 {error_ms:.2} ms > {limit} ms"));
        }
        if e.loss > limits.reference_loss {
            return Some(format!(
                "the emulator lost {:.2}% by itself",
                e.loss * 100.0
            ));
        }
        let health = &self.seen.health;
        let skipped = health.skipped as f64 / health.sent.max(1) as f64;
        if skipped > limits.skipped {
            return Some(format!(
                "the generator missed {:.2}% of its packets",
                skipped * 100.0
            ));
        }
        None
    }
}

/// `mountain-lab run`.
pub fn run(args: &RunArgs) -> Result<ExitCode> {
    let scenario = adjusted(args)?;
    let out = args.out();
    std::fs::create_dir_all(&out).with_context(|| out.display().to_string())?;
    let bar = progress(&scenario);
    let _awake = NoHalt::hold();
    bar.set_message("building hosts");
    let hosts = Hosts::build(&scenario)?;
    let cgroup = match scenario.topology.has_own_addresses() {
        true => Some(Cgroup::join()?),
        false => None,
    };
    let mut emulator = Emulator::start(&hosts, &scenario, args.seed)?;
    let mut product = Product::new(
        hosts.steering(),
        "client",
        &(product_config(&scenario, &hosts, false) + &start_config(cgroup.as_ref())),
        &out,
    )?;
    let mut far = if scenario.both_ends {
        let config = product_config(&scenario, &hosts, true);
        Some(Product::new(&hosts.server, "server", &config, &out)?)
    } else {
        None
    };
    let _reflectors = if scenario.both_ends {
        let paths = 0..scenario.paths.len();
        let far: Vec<IpAddr> = paths.clone().map(|i| hosts.gateway(i)).collect();
        let near: Vec<IpAddr> = paths.map(|i| hosts.client_gateway(i)).collect();
        vec![
            Reflector::start(&hosts.server, "server", &far, &out)?,
            Reflector::start(hosts.steering(), "client", &near, &out)?,
        ]
    } else {
        vec![]
    };

    let mut segments = vec![];
    let mut voids: Vec<VoidRun> = vec![];
    let policies = scenario.run_policies();
    for repeat in 0..scenario.repeats {
        let n = policies.len();
        for i in 0..n {
            // Another order each time, so that a trend over the run favours nobody.
            let policy = policies[(i + repeat as usize) % n];
            let mut attempt = 0;
            loop {
                bar.set_message(format!(
                    "repeat {}/{} {}",
                    repeat + 1,
                    scenario.repeats,
                    policy.name()
                ));
                product.apply(policy)?;
                if let Some(far) = &mut far {
                    far.apply(policy)?;
                }
                let before = bar.position();
                let segment = run_segment(
                    &scenario,
                    &hosts,
                    &mut emulator,
                    &mut product,
                    repeat,
                    policy,
                    &bar,
                )?;
                let Some(reason) = segment.void(&scenario.limits) else {
                    segments.push(segment);
                    break;
                };
                bar.suspend(|| {
                    eprintln!("void: {} repeat {repeat}: {reason}", policy.name());
                });
                voids.push(VoidRun {
                    policy: policy.name().into(),
                    repeat,
                    reason,
                });
                attempt += 1;
                if attempt > RETRIES {
                    // Without this policy the repeat is no comparison.
                    segments.retain(|s: &Segment| s.repeat != repeat);
                    break;
                }
                bar.set_position(before);
            }
        }
    }
    bar.finish_and_clear();
    drop((product, far, emulator));
    evaluate::finish(args, &scenario, &segments, voids)
}

/// The scenario with the command line's changes.
fn adjusted(args: &RunArgs) -> Result<Scenario> {
    let mut scenario = Scenario::find(&args.scenario)?;
    if !args.policies.is_empty() {
        scenario.policies = args.policies.clone();
        ensure!(
            !scenario.run_policies().is_empty(),
            "--policies: at least one that is run is needed"
        );
        let there = |p: &str| p == "oracle" || scenario.policies.iter().any(|q| q.name() == p);
        scenario
            .checks
            .retain(|c| there(&c.policy) && c.reference.as_deref().is_none_or(there));
    }
    if args.quick {
        scenario.seconds = (scenario.seconds / 3.0).max(2.0);
        scenario.repeats = scenario.repeats.min(2);
    }
    if let Some(seconds) = args.seconds {
        scenario.seconds = seconds;
    }
    if let Some(repeat) = args.repeat {
        scenario.repeats = repeat;
    }
    scenario.read_traces()?;
    Ok(scenario)
}

/// Why the run is too short for the figures of its scenario, which says how long they take.
pub fn shortness(args: &RunArgs) -> Result<Option<String>> {
    let whole = Scenario::find(&args.scenario)?;
    let repeats = f64::from(args.repeat.unwrap_or(whole.repeats));
    let seconds = args.seconds.unwrap_or(whole.seconds);
    let least = [
        ("repeats", repeats, f64::from(whole.repeats)),
        ("seconds", seconds, whole.seconds),
    ];
    Ok(too_short(args.quick, &least))
}

fn progress(scenario: &Scenario) -> ProgressBar {
    let segments = u64::from(scenario.repeats) * scenario.run_policies().len() as u64;
    let bar = ProgressBar::new(segments * (scenario.segment_seconds() * 10.0) as u64);
    let style = ProgressStyle::with_template("{prefix} [{bar:40}] {percent}% {msg} (left: {eta})")
        .expect("a literal template");
    bar.set_style(style.progress_chars("=> "));
    bar.set_prefix(scenario.name.clone());
    bar
}

/// The scenario's configuration of the product, with the hosts' names filled in:
/// `{gateway0}` is the far end of path 0, `{dev0}` the own device.
fn product_config(scenario: &Scenario, hosts: &Hosts, server: bool) -> String {
    let mut text = scenario.product_config.clone();
    for i in 0..scenario.paths.len() {
        let (gateway, device) = if server {
            (hosts.client_gateway(i), format!("s{i}"))
        } else {
            (hosts.gateway(i), format!("u{i}"))
        };
        text = text.replace(&format!("{{gateway{i}}}"), &gateway.to_string());
        text = text.replace(&format!("{{dev{i}}}"), &device);
    }
    text
}

/// Flows choose when they start in scenarios that are about that, of sockets in the run's own cgroup.
fn start_config(cgroup: Option<&Cgroup>) -> String {
    match cgroup.map(|cgroup| cgroup.path().display()) {
        Some(path) => format!("\n[placement]\nadopt = true\ncgroup = \"{path}\"\n"),
        None => "\n[placement]\nenabled = false\n".to_owned(),
    }
}

fn run_segment(
    scenario: &Scenario,
    hosts: &Hosts,
    emulator: &mut Emulator,
    product: &mut Product,
    repeat: u32,
    policy: Policy,
    bar: &ProgressBar,
) -> Result<Segment> {
    let start_ns = emulator.play(repeat, AHEAD)?;
    ensure!(
        monotonic_ns() < start_ns,
        "the machine is too slow: the schedule came late"
    );
    wait_until(start_ns, None)?;
    let (cpu, emulator_cpu, product_cpu) =
        (busy_ticks()?, emulator.cpu_seconds(), product.cpu_seconds());
    let traffic = Traffic::start(scenario, hosts)?;
    let from_ns = start_ns + (scenario.discard_seconds * 1e9) as u64;
    let end_ns = start_ns + (scenario.segment_seconds() * 1e9) as u64;
    wait_until(end_ns, Some((bar, start_ns)))?;

    let seconds = (monotonic_ns() - start_ns) as f64 / 1e9;
    let (busy, all) = busy_ticks()?;
    let (status, explain, moves) = (
        product.query(&["status", "--json"])?,
        product.query(&["explain", "--last", "1000", "--json"])?,
        product.query(&["explain", "--moves", "--last", "10000", "--json"])?,
    );
    let emulator_cores = (emulator.cpu_seconds() - emulator_cpu) / seconds;
    let product_cores = product
        .cpu_seconds()
        .zip(product_cpu)
        .map(|(now, then)| (now - then) / seconds);
    let seen = traffic.stop()?;
    let measured = from_ns..end_ns;
    let mut error = emulator_error(
        seen.reference
            .iter()
            .filter(|p| measured.contains(&p.sent_ns)),
    );
    error.cores = emulator_cores;
    Ok(Segment {
        repeat,
        policy,
        start_ns,
        seen,
        measured,
        error,
        cpu_busy: (busy - cpu.0) as f64 / (all - cpu.1).max(1) as f64,
        product_cores,
        status,
        explain,
        moves: moves["moves"].clone(),
    })
}

fn emulator_error<'a>(packets: impl Iterator<Item = &'a Packet>) -> EmulatorError {
    let (mut errors, mut lost) = (vec![], 0);
    for packet in packets {
        match packet.rtt_us {
            Some(rtt) => errors.push(rtt.abs_diff(2 * REFERENCE_DELAY_US)),
            None => lost += 1,
        }
    }
    errors.sort_unstable();
    let n = errors.len();
    let at = |q: f64| {
        errors
            .get(((n.max(1) - 1) as f64 * q).ceil() as usize)
            .copied()
            .unwrap_or(0)
    };
    EmulatorError {
        n,
        p50_us: at(0.5),
        p99_us: at(0.99),
        max_us: at(1.0),
        loss: f64::from(lost) / (n as f64 + f64::from(lost)).max(1.0),
        cores: 0.0,
    }
}

/// Sleeps until a moment of CLOCK_MONOTONIC, moving the bar; fails when the user stops the run.
fn wait_until(end_ns: u64, bar: Option<(&ProgressBar, u64)>) -> Result<()> {
    let position = bar.map(|(bar, _)| bar.position()).unwrap_or(0);
    loop {
        ensure!(!stopped(), "stopped");
        let now = monotonic_ns();
        if let Some((bar, start_ns)) = bar {
            bar.set_position(position + now.min(end_ns).saturating_sub(start_ns) / 100_000_000);
        }
        if now >= end_ns {
            return Ok(());
        }
        std::thread::sleep(Duration::from_nanos((end_ns - now).min(100_000_000)));
    }
}

/// Busy and all CPU ticks of the machine since boot (proc(5), /proc/stat, first line).
fn busy_ticks() -> Result<(u64, u64)> {
    let stat = std::fs::read_to_string("/proc/stat")?;
    let line = stat.lines().next().context("/proc/stat is empty")?;
    let ticks: Vec<u64> = line
        .split_whitespace()
        .skip(1)
        .take(8)
        .filter_map(|t| t.parse().ok())
        .collect();
    ensure!(ticks.len() == 8, "/proc/stat: {line}");
    let all: u64 = ticks.iter().sum();
    // Idle and waiting for I/O.
    Ok((all - ticks[3] - ticks[4], all))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn args(scenario: &str, quick: bool) -> RunArgs {
        RunArgs {
            scenario: scenario.into(),
            policies: Vec::new(),
            repeat: None,
            seconds: None,
            seed: 1,
            out: None,
            quick,
            check: true,
        }
    }

    #[test]
    fn a_run_shorter_than_its_scenario_is_not_judged() {
        // 3 x 100 s.
        let shortness = |change: fn(&mut RunArgs)| {
            let mut args = args("steady", false);
            change(&mut args);
            shortness(&args).unwrap()
        };
        assert_eq!(shortness(|_| ()), None);
        assert_eq!(shortness(|a| a.repeat = Some(4)), None);
        assert_eq!(shortness(|a| a.quick = true).unwrap(), "--quick");
        let fewer = shortness(|a| a.repeat = Some(1));
        assert_eq!(fewer.unwrap(), "1 of 3 repeats");
        let shorter = shortness(|a| a.seconds = Some(2.5));
        assert_eq!(shorter.unwrap(), "2.5 of 100 seconds");
    }

    #[test]
    fn each_scenario_has_a_folder_of_its_own() {
        assert_eq!(args("steady", false).out(), PathBuf::from("out/steady"));
        assert_eq!(
            args("/home/me/own.toml", false).out(),
            PathBuf::from("out/own")
        );
    }
}
