// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab cost`: what steering costs. Method: docs/cost.md.

pub mod kernel;
mod rig;
mod run_time;
mod start;
mod table;
mod tcp;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use mountain_lab::result::{Check, Metric, Op, RunResult};
use mountain_lab::workload::stats::{bootstrap_median, median};
use serde_json::json;

use crate::driver::{CommonArgs, Session};
use rig::SteeredRig;
use run_time::{Attached, TimedRun, Times, SEGMENTS};
use table::{Eviction, Live, SizeTimes};
use tcp::{Pair, With};

/// Limits of the checks.
const MAX_RUN_NS: f64 = 150.0;
const MIN_TCP_RATIO: f64 = 0.97;
const MAX_ZIPF_RATIO: f64 = 2.0;

#[derive(clap::Args)]
pub struct CostArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// Exit with 1 when a figure misses its limit.
    #[arg(long)]
    check: bool,
    /// Measure only these parts.
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = [Part::Run, Part::Packet, Part::Repeat, Part::Tcp, Part::Table, Part::Connect, Part::Forward])]
    only: Vec<Part>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Measure the time per run at 1,000 flows.
    Run,
    /// Measure the processor time of a whole packet with and without the program, statistics off.
    Packet,
    /// Measure the time per run of one packet by BPF_PROG_RUN.
    Repeat,
    /// Measure TCP throughput with and without the program.
    Tcp,
    /// Measure large flow tables and eviction.
    Table,
    /// Measure connect() with two providers, where new flows choose their uplink.
    Connect,
    /// Measure the processor time of a packet that is forwarded with two providers.
    Forward,
}

/// How long and how often.
pub struct CostPlan {
    seed: u64,
    /// Of the time per run.
    repeats: u32,
    segment: Duration,
    warm_up: Duration,
    /// Runs of one BPF_PROG_RUN.
    prog_runs: i32,
    pairs: u32,
    /// Measured part of one TCP connection.
    tcp: Duration,
    /// Flows in the large table, and runs of each distribution.
    entries: u32,
    table_runs: u64,
    eviction_rounds: u32,
    /// Calls of connect() in one segment.
    connects: u32,
}

impl CostPlan {
    fn new(quick: bool, seed: u64) -> Self {
        if quick {
            CostPlan {
                seed,
                repeats: 5,
                segment: Duration::from_millis(200),
                warm_up: Duration::from_millis(100),
                prog_runs: 100_000,
                pairs: 5,
                tcp: Duration::from_millis(500),
                entries: 50_000,
                table_runs: 100_000,
                eviction_rounds: 8,
                connects: 500,
            }
        } else {
            CostPlan {
                seed,
                repeats: 15,
                segment: Duration::from_secs(1),
                warm_up: Duration::from_millis(200),
                prog_runs: 1_000_000,
                pairs: 15,
                tcp: Duration::from_secs(2),
                entries: 1_000_000,
                table_runs: 1_000_000,
                eviction_rounds: 8,
                connects: 5_000,
            }
        }
    }
}

/// What was measured, before it is put into a result.
#[derive(Default)]
struct Measured {
    times: Option<Times>,
    packets: BTreeMap<Attached, Vec<f64>>,
    repeated: BTreeMap<TimedRun, Vec<f64>>,
    tcp: Vec<(With, Vec<Pair>)>,
    sizes: Option<SizeTimes>,
    evictions: Vec<Eviction>,
    start: start::Measured,
}

/// `mountain-lab cost`.
pub fn cost(args: &CostArgs) -> Result<ExitCode> {
    let plan = CostPlan::new(args.common.quick, args.common.seed);
    let steps = args.only.iter().map(|part| match part {
        Part::Tcp => With::ALL.len(),
        Part::Table => 2,
        Part::Connect => start::Connects::ALL.len(),
        _ => 1,
    });
    let steps = steps.sum::<usize>() as u64;
    let (session, mut result) = Session::begin("cost", &args.common, plan.repeats, steps);
    let rig = SteeredRig::build()?;
    let mut measured = rig
        .client
        .enter(|| measure(&session, &rig, &plan, &args.only))?;
    measured.start = measure_start(&session, &plan, &args.only)?;
    fill(&mut result, &measured, &plan);
    session.finish(&mut result, &args.common, args.check, &[])
}

fn measure(
    session: &Session,
    rig: &SteeredRig,
    plan: &CostPlan,
    only: &[Part],
) -> Result<Measured> {
    let mut m = Measured::default();
    if only.contains(&Part::Run) {
        session.step("time per run under traffic")?;
        m.times = Some(run_time::under_traffic(rig, plan).context("time per run")?);
    }
    if only.contains(&Part::Packet) {
        session.step("time per packet, with and without")?;
        m.packets = run_time::whole_packet(rig, plan).context("time per packet")?;
    }
    if only.contains(&Part::Repeat) {
        session.step("time per run, the same packet again and again")?;
        m.repeated = run_time::repeated(plan).context("BPF_PROG_RUN")?;
    }
    if only.contains(&Part::Tcp) {
        for with in With::ALL {
            session.step(&format!("TCP throughput, {}", with.name()))?;
            let pairs = tcp::pairs(rig, plan, with).context("TCP throughput")?;
            m.tcp.push((with, pairs));
        }
    }
    if only.contains(&Part::Table) {
        session.step(&format!("flow table of {} entries", plan.entries))?;
        m.sizes = Some(table::size(plan).context("large flow table")?);
        session.step("eviction")?;
        for (live, held) in [
            (Live::Fewer, false),
            (Live::TooMany, false),
            (Live::Fewer, true),
        ] {
            let seen = table::eviction(plan, live, held).context("eviction")?;
            m.evictions.push(seen);
        }
    }
    Ok(m)
}

fn measure_start(session: &Session, plan: &CostPlan, only: &[Part]) -> Result<start::Measured> {
    let mut m = start::Measured::default();
    if only.contains(&Part::Connect) {
        for kind in start::Connects::ALL {
            session.step(&format!("connect(), {kind:?}"))?;
            let pairs = start::connects(plan, kind).context("connect()")?;
            m.connects.insert(kind, pairs);
        }
    }
    if only.contains(&Part::Forward) {
        session.step("time per forwarded packet, with and without")?;
        m.forwarded = start::forwarded(plan).context("forwarding")?;
    }
    Ok(m)
}

fn fill(result: &mut RunResult, m: &Measured, plan: &CostPlan) {
    let seed = plan.seed;
    let mut put = |policy: &str, name: &str, metric: Metric| {
        result
            .policies
            .entry(policy.into())
            .or_default()
            .insert(name.into(), metric);
    };
    let of = |unit: &str, values: &[f64], n: u64| {
        Metric::of_repeats(unit, values.iter().copied().map(Some).collect(), n, seed)
    };
    let mut checks = vec![];
    let mut limit = |name: &str, figure: f64, op, limit| {
        checks.push(Check::new(name, Some(figure), op, limit, None));
    };

    if let Some(times) = &m.times {
        for segment in SEGMENTS {
            let (ns, n) = &times[&segment];
            put(policy(segment), column(segment), of("ns", ns, *n));
        }
        // What a run costs when nobody measures it: less what an empty program shows.
        let empty = &times[&TimedRun::Empty].0;
        for segment in [TimedRun::Ecmp, TimedRun::Stay, TimedRun::FirstRun] {
            let (ns, n) = &times[&segment];
            let net: Vec<f64> = ns.iter().zip(empty).map(|(ns, empty)| ns - empty).collect();
            let name = format!("net_{}", column(segment));
            put(policy(segment), &name, of("ns", &net, *n));
        }
        let (first, moved) = (&times[&TimedRun::FirstRun], &times[&TimedRun::Moved]);
        // Of the same repeat: both saw the same machine.
        let second: Vec<f64> = moved
            .0
            .iter()
            .zip(&first.0)
            .map(|(both, one)| both - one)
            .collect();
        put("moved", "second_run_ns", of("ns", &second, moved.1));
        let at = |s: TimedRun| median(&times[&s].0);
        limit(
            "ns per run, ecmp mode",
            at(TimedRun::Ecmp),
            Op::AtMost,
            MAX_RUN_NS,
        );
        limit(
            "ns per run, packet stays",
            at(TimedRun::Stay),
            Op::AtMost,
            MAX_RUN_NS,
        );
        limit(
            "ns of a moved packet's first run",
            median(&first.0),
            Op::AtMost,
            MAX_RUN_NS,
        );
        limit(
            "ns of a moved packet's second run",
            median(&second),
            Op::AtMost,
            MAX_RUN_NS,
        );
    }
    for (attached, ns) in &m.packets {
        let name = match attached {
            Attached::Nothing => "none",
            Attached::Ecmp => "ecmp",
            Attached::Stay => "stay",
            Attached::Moved => "moved",
        };
        put(name, "packet_ns", of("ns", ns, ns.len() as u64));
        if *attached != Attached::Nothing {
            let without = &m.packets[&Attached::Nothing];
            let added: Vec<f64> = ns.iter().zip(without).map(|(ns, w)| ns - w).collect();
            put(name, "packet_added_ns", of("ns", &added, ns.len() as u64));
        }
    }
    for (segment, ns) in &m.repeated {
        let n = plan.prog_runs as u64 * ns.len() as u64;
        let name = if *segment == TimedRun::FirstRun {
            "prog_run_first_ns"
        } else {
            "prog_run_ns"
        };
        put(policy(*segment), name, of("ns", ns, n));
    }
    for (with, pairs) in &m.tcp {
        let each = |f: fn(&Pair) -> f64| pairs.iter().map(f).collect::<Vec<_>>();
        let n = pairs.len() as u64;
        let ratio = each(|p| p.with_bps / p.without_bps);
        let name = with.name();
        let without = format!("tcp_{}_pairs_bps", name.replace(' ', "_"));
        put("none", &without, of("bps", &each(|p| p.without_bps), n));
        put(name, "tcp_goodput_bps", of("bps", &each(|p| p.with_bps), n));
        put(name, "tcp_ratio", of("x", &ratio, n));
        // The control has no limit.
        if *with != With::Empty {
            let (lo, hi) = bootstrap_median(&ratio, seed);
            let name =
                format!("TCP throughput with / without, flow {name} [{lo:.3}-{hi:.3}] n={n}");
            limit(&name, median(&ratio), Op::AtLeast, MIN_TCP_RATIO);
        }
    }
    if let Some(t) = &m.sizes {
        let n = t.batch * t.small.len() as u64;
        for (name, ns) in [
            ("small", &t.small),
            ("zipf", &t.zipf),
            ("uniform", &t.uniform),
        ] {
            put("stay", &format!("table_{name}_ns"), of("ns", ns, n));
        }
        let ratio = median(&t.zipf) / median(&t.small);
        let name = format!("ns per run, Zipf over {} flows / 1000 flows", plan.entries);
        limit(&name, ratio, Op::AtMost, MAX_ZIPF_RATIO);
    }
    for e in &m.evictions {
        let held = if e.held {
            ", held off their hash's choice"
        } else {
            ""
        };
        let name = format!(
            "live flows on another path, {} live in a table for {}{held}",
            e.live, e.entries
        );
        limit(&name, e.changed as f64, Op::AtMost, 0.0);
    }
    checks.extend(m.start.report(&mut put, seed));
    result
        .environment
        .insert("eviction".into(), json!(m.evictions));
    result.checks = checks;
}

/// What a segment is called in the result.
fn policy(segment: TimedRun) -> &'static str {
    match segment {
        TimedRun::Empty => "empty program",
        TimedRun::Ecmp => "ecmp",
        TimedRun::Stay => "stay",
        TimedRun::FirstRun | TimedRun::Moved => "moved",
    }
}

fn column(segment: TimedRun) -> &'static str {
    match segment {
        TimedRun::FirstRun => "first_run_ns",
        TimedRun::Moved => "both_runs_ns",
        _ => "run_ns",
    }
}
