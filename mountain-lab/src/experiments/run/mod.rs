// SPDX-License-Identifier: GPL-2.0-or-later
//! Runs a scenario: policies in turn within one run, the same schedule for all of a repeat.

mod evaluate;
mod pooled;
mod sessions;
mod traffic;

use std::net::IpAddr;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use mountain_lab::result::RunResult;
use mountain_lab::workload::game::Packet;
use mountain_lab::workload::stats::percentile;
use mountain_lab::workload::sys::{machine_ticks, monotonic_ns};
use serde_json::Value;

use crate::driver::{CommonArgs, Experiment, Session};
use crate::emulate::cgroup::Cgroup;
use crate::emulate::emulator::{Emulator, REFERENCE_DELAY_US};
use crate::emulate::hosts::Hosts;
use crate::policy_ctl::{reflect, Product};
use crate::scenario::{ComparedPolicy, Limits, Scenario};
use crate::stopped;
use traffic::{Observed, RunningTraffic};

#[derive(clap::Args)]
pub struct RunArgs {
    /// Run the scenario of this name (see `mountain-lab list`), or of this .toml file.
    scenario: String,
    /// Compare these policies instead of the scenario's; checks that need others are not run.
    #[arg(long, value_delimiter = ',', value_enum)]
    policies: Vec<ComparedPolicy>,
    /// Repeat this many times instead of as the scenario says; fewer are not judged.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: Option<u32>,
    /// Measure each policy for this many seconds a repeat; fewer than the scenario's are not judged.
    #[arg(long, value_parser = seconds)]
    seconds: Option<f64>,
    #[command(flatten)]
    common: CommonArgs,
    /// Exit with 1 when a figure misses the scenario's limit.
    #[arg(long)]
    check: bool,
}

/// Seconds of a segment: two at least, as statistics of less say nothing, and an hour at most.
fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (2.0..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("not a number of seconds from 2 to 3600".into()),
    }
}

impl RunArgs {
    /// Where the results go: a folder for each scenario, unless the user names one.
    fn out(&self) -> PathBuf {
        let name = Path::new(&self.scenario).file_stem();
        let name = name.unwrap_or(self.scenario.as_ref());
        self.common.out(&name.to_string_lossy())
    }
}

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
pub struct PolicySegment {
    pub repeat: u32,
    pub policy: ComparedPolicy,
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

impl PolicySegment {
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
            let lost = e.loss * 100.0;
            return Some(format!("the emulator lost {lost:.2}% by itself"));
        }
        let health = &self.seen.health;
        let skipped = health.skipped as f64 / health.sent.max(1) as f64;
        if skipped > limits.skipped {
            let missed = skipped * 100.0;
            return Some(format!("the generator missed {missed:.2}% of its packets"));
        }
        None
    }
}

/// A scenario's hosts and what runs on them.
struct Scenes<'a> {
    scenario: &'a Scenario,
    policies: Vec<ComparedPolicy>,
    hosts: &'a Hosts,
    emulator: Emulator,
    product: Product<'a>,
    /// The product on the server, if it runs there, too.
    far: Option<Product<'a>>,
    segments: Vec<PolicySegment>,
}

impl Experiment for Scenes<'_> {
    type Segment = PolicySegment;
    const RETRIES: u32 = 2;

    fn sides(&self) -> Vec<String> {
        self.policies.iter().map(|p| p.name()).collect()
    }

    fn measure(&mut self, session: &Session, side: usize, repeat: u32) -> Result<PolicySegment> {
        let policy = self.policies[side];
        self.product.apply(policy)?;
        if let Some(far) = &mut self.far {
            far.apply(policy)?;
        }
        let (scenario, product) = (self.scenario, &mut self.product);
        let start_ns = self.emulator.play(repeat, AHEAD)?;
        ensure!(
            monotonic_ns() < start_ns,
            "the machine is too slow: the schedule came late"
        );
        wait_until(start_ns, None)?;
        let cpu = machine_ticks()?;
        let emulator_cpu = self.emulator.0.cpu_seconds();
        let product_cpu = product.cpu_seconds();
        let traffic = RunningTraffic::start(scenario, self.hosts)?;
        let from_ns = start_ns + (scenario.discard_seconds * 1e9) as u64;
        let end_ns = start_ns + (scenario.segment_seconds() * 1e9) as u64;
        wait_until(end_ns, Some((session, start_ns)))?;

        let seconds = (monotonic_ns() - start_ns) as f64 / 1e9;
        let (busy, all) = machine_ticks()?;
        let status = product.query(&["status", "--json"])?;
        let explain = product.query(&["explain", "--last", "1000", "--json"])?;
        let moves = product.query(&["explain", "--moves", "--last", "10000", "--json"])?;
        let emulator_cores = (self.emulator.0.cpu_seconds() - emulator_cpu) / seconds;
        let product_cpu = product.cpu_seconds().zip(product_cpu);
        let product_cores = product_cpu.map(|(now, then)| (now - then) / seconds);
        let seen = traffic.stop()?;
        let measured = from_ns..end_ns;
        let reference = seen.reference.iter();
        let mut error = emulator_error(reference.filter(|p| measured.contains(&p.sent_ns)));
        error.cores = emulator_cores;
        Ok(PolicySegment {
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

    fn void(&self, _: usize, segment: &PolicySegment) -> Option<String> {
        segment.void(&self.scenario.limits)
    }

    fn keep(&mut self, _: &mut RunResult, _: usize, _: u32, segment: PolicySegment) {
        self.segments.push(segment);
    }

    fn repeated(&mut self, _: &mut RunResult, repeat: u32, whole: bool) {
        // Without one of the policies the repeat is no comparison.
        self.segments.retain(|s| whole || s.repeat != repeat);
    }
}

/// `mountain-lab run`.
pub fn run(args: &RunArgs) -> Result<ExitCode> {
    let scenario = adjusted(args)?;
    let out = args.out();
    std::fs::create_dir_all(&out).with_context(|| out.display().to_string())?;
    let mut session = Session::begin(&scenario.name, &args.common, scenario.repeats, 0);
    session.message("building hosts");
    let hosts = Hosts::build(&scenario)?;
    let own = scenario.topology.has_own_addresses();
    let cgroup = own.then(Cgroup::join).transpose()?;
    let emulator = Emulator::start(&hosts, &scenario, args.common.seed)?;
    let near = hosts.steering();
    let config = product_config(&scenario, &hosts, false) + &start_config(cgroup.as_ref());
    let product = Product::new(near, "client", &config, &out)?;
    let (mut far, mut reflectors) = (None, vec![]);
    if scenario.both_ends {
        let config = product_config(&scenario, &hosts, true);
        far = Some(Product::new(&hosts.server, "server", &config, &out)?);
        let paths = 0..scenario.paths.len();
        let servers: Vec<IpAddr> = paths.clone().map(|i| hosts.gateway(i)).collect();
        let clients: Vec<IpAddr> = paths.map(|i| hosts.client_gateway(i)).collect();
        reflectors.push(reflect(&hosts.server, "server", &servers, &out)?);
        reflectors.push(reflect(near, "client", &clients, &out)?);
    }
    let mut scenes = Scenes {
        scenario: &scenario,
        policies: scenario.run_policies(),
        hosts: &hosts,
        emulator,
        product,
        far,
        segments: vec![],
    };
    session.interleave(&mut scenes)?;
    let segments = std::mem::take(&mut scenes.segments);
    drop(scenes);
    evaluate::finish(args, &scenario, &segments, session)
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
    }
    if args.common.quick {
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

/// What the figures of the scenario need, beside what the run has: its file says how long they take.
pub fn least(args: &RunArgs) -> Result<[(&'static str, f64, f64); 2]> {
    let whole = Scenario::find(&args.scenario)?;
    let repeats = f64::from(args.repeat.unwrap_or(whole.repeats));
    let seconds = args.seconds.unwrap_or(whole.seconds);
    Ok([
        ("repeats", repeats, f64::from(whole.repeats)),
        ("seconds", seconds, whole.seconds),
    ])
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
        Some(path) => {
            format!("\n[placement]\nadopt = true\nspread = \"flow\"\ncgroup = \"{path}\"\n")
        }
        None => "\n[placement]\nenabled = false\n".to_owned(),
    }
}

fn emulator_error<'a>(packets: impl Iterator<Item = &'a Packet>) -> EmulatorError {
    let (mut errors, mut lost) = (vec![], 0);
    for packet in packets {
        match packet.rtt_us {
            Some(rtt) => errors.push(rtt.abs_diff(2 * REFERENCE_DELAY_US)),
            None => lost += 1,
        }
    }
    let n = errors.len();
    let mut at = |q: f64| percentile(&mut errors, q).unwrap_or(0.0) as u32;
    EmulatorError {
        n,
        p50_us: at(0.5),
        p99_us: at(0.99),
        max_us: at(1.0),
        loss: f64::from(lost) / (n as f64 + f64::from(lost)).max(1.0),
        cores: 0.0,
    }
}

/// Sleeps until a moment of CLOCK_MONOTONIC, moving the bar from the second one on; fails when the user stops the run.
fn wait_until(end_ns: u64, bar: Option<(&Session, u64)>) -> Result<()> {
    loop {
        ensure!(!stopped(), "stopped");
        let now = monotonic_ns();
        if let Some((session, start_ns)) = bar {
            let passed = now.saturating_sub(start_ns) as f64;
            session.progress(passed / (end_ns - start_ns) as f64);
        }
        if now >= end_ns {
            return Ok(());
        }
        std::thread::sleep(Duration::from_nanos((end_ns - now).min(100_000_000)));
    }
}

#[cfg(test)]
mod tests {
    use mountain_lab::result::too_short;

    use super::*;

    fn args(scenario: &str, quick: bool) -> RunArgs {
        RunArgs {
            scenario: scenario.into(),
            policies: Vec::new(),
            repeat: None,
            seconds: None,
            common: CommonArgs::test(quick),
            check: true,
        }
    }

    #[test]
    fn a_run_shorter_than_its_scenario_is_not_judged() {
        // 3 x 100 s.
        let shortness = |change: fn(&mut RunArgs)| {
            let mut args = args("steady", false);
            change(&mut args);
            too_short(args.common.quick, &least(&args).unwrap())
        };
        assert_eq!(shortness(|_| ()), None);
        assert_eq!(shortness(|a| a.repeat = Some(4)), None);
        assert_eq!(shortness(|a| a.common.quick = true).unwrap(), "--quick");
        let fewer = shortness(|a| a.repeat = Some(1));
        assert_eq!(fewer.unwrap(), "1 of 3 repeats");
        let shorter = shortness(|a| a.seconds = Some(2.5));
        assert_eq!(shorter.unwrap(), "2.5 of 100 seconds");
    }

    #[test]
    fn checks_of_policies_that_are_left_out_are_not_run() {
        let mut args = args("spiky", false);
        args.policies = vec![ComparedPolicy::Mountain];
        let mut result = RunResult::new("spiky", "", 1, 1);
        evaluate::hold_checks(&adjusted(&args).unwrap(), &mut result);
        let [ecmp, oracle] = &result.checks[..] else {
            panic!("{:#?}", result.checks);
        };
        let why = "p99 of game flows against ecmp's: not run: --policies leaves out ecmp";
        assert_eq!(ecmp.to_string(), why);
        assert_eq!(oracle.not_run, None, "it is computed in any case");
        // Here nothing was measured, and of the other one that is a miss.
        assert_eq!(result.missed(), [oracle]);
        let file = serde_json::to_value(ecmp).unwrap();
        assert_eq!(file["not_run"], "--policies leaves out ecmp");
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
