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
    /// Steps for so many repeats.
    fn steps(self, repeats: u32) -> u32 {
        match self {
            Self::Run => repeats * run_time::TIMED.len() as u32,
            Self::Packet => repeats * run_time::PACKET_STEPS,
            Self::Repeat => repeats * run_time::REPEATED.len() as u32,
            Self::Tcp => repeats * 2 * tcp::COMPARED.len() as u32,
            Self::Table => 2,
            Self::Connect => repeats * 2 * start::SOCKETS.len() as u32,
            Self::Forward => repeats * 2 * start::FORWARD_ROUNDS,
        }
    }

    fn measure(self, session: &mut Session, rig: &SteeredRig) -> Result<()> {
        let client = &rig.client;
        match self {
            Self::Run => client
                .enter(|| run_time::under_traffic(session, rig))
                .context("time per run"),
            Self::Packet => client
                .enter(|| run_time::whole_packet(session, rig))
                .context("time per packet"),
            Self::Repeat => client
                .enter(|| run_time::repeated(session))
                .context("BPF_PROG_RUN"),
            Self::Tcp => client
                .enter(|| tcp::all(session, rig))
                .context("TCP throughput"),
            Self::Table => client.enter(|| table::measure(session)),
            Self::Connect => start::connects(session).context("connect()"),
            Self::Forward => start::forwarded(session).context("forwarding"),
        }
    }
}

/// Repetitions of a time per run, and pairs of a comparison.
fn repeats(args: &CommonArgs) -> u32 {
    args.quick_or(5, 15)
}

/// How long packets are sent for one figure.
fn segment(args: &CommonArgs) -> Duration {
    Duration::from_millis(args.quick_or(200, 1_000))
}

/// How long they are sent before that.
fn warm_up(args: &CommonArgs) -> Duration {
    Duration::from_millis(args.quick_or(100, 200))
}

/// `mountain-lab cost`.
pub fn cost(args: &CostArgs) -> Result<ExitCode> {
    let repeats = repeats(&args.common);
    let steps = args.only.iter().map(|part| u64::from(part.steps(repeats)));
    let mut session = Session::begin("cost", &args.common, repeats, steps.sum());
    let rig = SteeredRig::build()?;
    session.result.note("eviction", [(); 0]);
    // In this order, whatever the user's.
    let parts = CostPart::value_variants().iter();
    for part in parts.filter(|part| args.only.contains(part)) {
        part.measure(&mut session, &rig)?;
    }
    session.finish(args.check, &[])
}

/// Differences within pairs.
fn less(these: &[f64], those: &[f64]) -> Vec<f64> {
    let pairs = these.iter().zip(those);
    pairs.map(|(this, that)| this - that).collect()
}
