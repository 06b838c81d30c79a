// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab cost`: what steering costs. Method: docs/cost.md.

pub mod kernel;
mod rig;
mod run_time;
mod start;
mod table;
mod tcp;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::driver::{CommonArgs, Session};
use rig::SteeredRig;

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

impl CostPart {
    fn measure(self, run: &mut CostRun, rig: &SteeredRig) -> Result<()> {
        let client = &rig.client;
        match self {
            Self::Run => client
                .enter(|| run_time::under_traffic(run, rig))
                .context("time per run"),
            Self::Packet => client
                .enter(|| run_time::whole_packet(run, rig))
                .context("time per packet"),
            Self::Repeat => client
                .enter(|| run_time::repeated(run))
                .context("BPF_PROG_RUN"),
            Self::Tcp => client
                .enter(|| tcp::all(run, rig))
                .context("TCP throughput"),
            Self::Table => client.enter(|| table::measure(run)),
            Self::Connect => start::connects(run).context("connect()"),
            Self::Forward => start::forwarded(run).context("forwarding"),
        }
    }
}

/// How long and how often.
#[derive(Clone, Copy)]
struct CostPlan {
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
    fn new(args: &CommonArgs) -> Self {
        let millis = |quick, full| Duration::from_millis(args.quick_or(quick, full));
        CostPlan {
            seed: args.seed,
            repeats: args.quick_or(5, 15),
            segment: millis(200, 1_000),
            warm_up: millis(100, 200),
            prog_runs: args.quick_or(100_000, 1_000_000),
            pairs: args.quick_or(5, 15),
            tcp: millis(500, 2_000),
            entries: args.quick_or(50_000, 1_000_000),
            table_runs: args.quick_or(100_000, 1_000_000),
            eviction_rounds: 8,
            connects: args.quick_or(500, 5_000),
        }
    }

    /// Steps of a part.
    fn steps(&self, part: CostPart) -> u32 {
        match part {
            CostPart::Run => self.repeats * run_time::TIMED.len() as u32,
            CostPart::Packet => self.repeats * run_time::PACKET_STEPS,
            CostPart::Repeat => self.repeats * run_time::REPEATED.len() as u32,
            CostPart::Tcp => self.pairs * 2 * tcp::COMPARED.len() as u32,
            CostPart::Table => 2,
            CostPart::Connect => self.pairs * 2 * start::SOCKETS.len() as u32,
            CostPart::Forward => self.pairs * 2 * start::FORWARD_ROUNDS,
        }
    }
}

/// What the parts share.
struct CostRun {
    session: Session,
    plan: CostPlan,
}

/// `mountain-lab cost`.
pub fn cost(args: &CostArgs) -> Result<ExitCode> {
    let plan = CostPlan::new(&args.common);
    let steps = args.only.iter().map(|part| u64::from(plan.steps(*part)));
    let session = Session::begin("cost", &args.common, plan.repeats, steps.sum());
    let rig = SteeredRig::build()?;
    let mut run = CostRun { session, plan };
    run.session.result.note("eviction", [(); 0]);
    // In this order, whatever the user's.
    let parts = CostPart::value_variants().iter();
    for part in parts.filter(|part| args.only.contains(part)) {
        part.measure(&mut run, &rig)?;
    }
    run.session.finish(args.check, &[])
}

/// Differences within pairs.
fn less(these: &[f64], those: &[f64]) -> Vec<f64> {
    let pairs = these.iter().zip(those);
    pairs.map(|(this, that)| this - that).collect()
}
