// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab cost`: what steering costs. Method: docs/cost.md.

mod figures;
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

use crate::driver::{CommonArgs, Session};
use rig::SteeredRig;
use run_time::{RunTimes, TimedRun, UplinkPrograms};
use table::{Eviction, Live, SizeTimes};
use tcp::{Pair, With};

#[derive(clap::Args)]
pub struct CostArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// Exit with 1 when a figure misses its limit.
    #[arg(long)]
    check: bool,
    /// Measure only these parts.
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = [CostPart::Run, CostPart::Packet, CostPart::Repeat, CostPart::Tcp, CostPart::Table, CostPart::Connect, CostPart::Forward])]
    only: Vec<CostPart>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum CostPart {
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
struct CostFigures {
    times: Option<RunTimes>,
    packets: BTreeMap<UplinkPrograms, Vec<f64>>,
    repeated: BTreeMap<TimedRun, Vec<f64>>,
    tcp: Vec<(With, Vec<Pair>)>,
    sizes: Option<SizeTimes>,
    evictions: Vec<Eviction>,
    start: start::PlacementTimes,
}

/// `mountain-lab cost`.
pub fn cost(args: &CostArgs) -> Result<ExitCode> {
    let plan = CostPlan::new(args.common.quick, args.common.seed);
    let steps = args.only.iter().map(|part| match part {
        CostPart::Tcp => With::ALL.len(),
        CostPart::Table => 2,
        CostPart::Connect => start::ConnectKind::ALL.len(),
        _ => 1,
    });
    let steps = steps.sum::<usize>() as u64;
    let (session, mut result) = Session::begin("cost", &args.common, plan.repeats, steps);
    let rig = SteeredRig::build()?;
    let mut measured = rig
        .client
        .enter(|| measure(&session, &rig, &plan, &args.only))?;
    measured.start = measure_start(&session, &plan, &args.only)?;
    figures::fill(&mut result, &measured, &plan);
    session.finish(&mut result, &args.common, args.check, &[])
}

fn measure(
    session: &Session,
    rig: &SteeredRig,
    plan: &CostPlan,
    only: &[CostPart],
) -> Result<CostFigures> {
    let mut m = CostFigures::default();
    if only.contains(&CostPart::Run) {
        session.step("time per run under traffic")?;
        m.times = Some(run_time::under_traffic(rig, plan).context("time per run")?);
    }
    if only.contains(&CostPart::Packet) {
        session.step("time per packet, with and without")?;
        m.packets = run_time::whole_packet(rig, plan).context("time per packet")?;
    }
    if only.contains(&CostPart::Repeat) {
        session.step("time per run, the same packet again and again")?;
        m.repeated = run_time::repeated(plan).context("BPF_PROG_RUN")?;
    }
    if only.contains(&CostPart::Tcp) {
        for with in With::ALL {
            session.step(&format!("TCP throughput, {}", with.name()))?;
            let pairs = tcp::pairs(rig, plan, with).context("TCP throughput")?;
            m.tcp.push((with, pairs));
        }
    }
    if only.contains(&CostPart::Table) {
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

fn measure_start(
    session: &Session,
    plan: &CostPlan,
    only: &[CostPart],
) -> Result<start::PlacementTimes> {
    let mut m = start::PlacementTimes::default();
    if only.contains(&CostPart::Connect) {
        for kind in start::ConnectKind::ALL {
            session.step(&format!("connect(), {kind:?}"))?;
            let pairs = start::connects(plan, kind).context("connect()")?;
            m.connects.insert(kind, pairs);
        }
    }
    if only.contains(&CostPart::Forward) {
        session.step("time per forwarded packet, with and without")?;
        m.forwarded = start::forwarded(plan).context("forwarding")?;
    }
    Ok(m)
}
