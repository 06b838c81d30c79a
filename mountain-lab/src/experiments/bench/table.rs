// SPDX-License-Identifier: GPL-2.0-or-later
//! The flow table when it is large: time per run, and what eviction does to live flows.

use std::os::fd::{AsFd, BorrowedFd};

use anyhow::{bail, ensure, Context, Result};
use mountain::bpf::Steer;
use mountain_lab::result::RunResult;
use mountain_lab::workload::stats::median;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, Zipf};
use rand_pcg::Pcg64Mcg;
use serde::Serialize;

use super::kernel::{prog_run, RunTimeStats, Runs, PASS, REDIRECT};
use super::rig::{self, Setup};
use super::run_time::FLOWS;
use crate::driver::Session;
use crate::stopped;

/// For how many flows the table is made, per flow expected.
const HEADROOM: f64 = 1.3;
/// Runs between two looks at the statistics: one slow batch is an outlier, not a mean.
const BATCH: u64 = 50_000;
/// Limit of the check.
const MAX_ZIPF_RATIO: f64 = 2.0;

/// Packets of live flows per dead one. Between two packets of a live flow come 0.75·N others and
/// 0.125·N dead ones: the N least recently used ones never include it.
const LIVE_PER_DEAD: u32 = 6;
/// How often each live flow sends while dead ones come in.
const EVICTION_ROUNDS: u32 = 8;

/// Packets of chosen flows, one BPF_PROG_RUN each.
struct Feeder<'a> {
    program: BorrowedFd<'a>,
    uplink: u32,
    packet: Vec<u8>,
}

impl<'a> Feeder<'a> {
    fn new(steer: &'a Steer) -> Result<Self> {
        Ok(Feeder {
            program: steer.program().as_fd(),
            uplink: rig::uplinks()?[0],
            packet: rig::packet(0),
        })
    }

    /// One packet of flow `i` on path 0; the path it was given.
    fn send(&mut self, i: u32) -> Result<u8> {
        rig::become_flow(&mut self.packet, i);
        match prog_run(self.program, &self.packet, self.uplink, 1)?.0 {
            PASS => Ok(0),
            REDIRECT => Ok(1),
            other => bail!("action {other} for flow {i}"),
        }
    }

    /// Mean ns per run of each batch over `runs` packets of flows that `next` names.
    fn time(&mut self, runs: u64, mut next: impl FnMut() -> u32) -> Result<Vec<f64>> {
        let mut means = vec![];
        for _ in 0..runs.div_ceil(BATCH) {
            ensure!(!stopped(), "interrupted");
            let before = Runs::of(self.program)?;
            for _ in 0..BATCH {
                self.send(next())?;
            }
            let batch = Runs::of(self.program)?.since(before);
            let count = batch.count;
            ensure!(count == BATCH, "{count} runs counted of {BATCH}");
            means.push(batch.mean_ns());
        }
        Ok(means)
    }
}

/// ns per run of each batch with `n` flows in the table, all by one packet per BPF_PROG_RUN, so that they
/// compare: 1,000 flows in a table of the same size; all flows live, their packets distributed by Zipf's law
/// with exponent 1; all flows live, every one as likely.
fn size(session: &mut Session, n: u32) -> Result<()> {
    let runs = session.args.quick_or(100_000, 1_000_000);
    let mut steer = rig::steer((f64::from(n) * HEADROOM) as u32, false)?;
    rig::set(&mut steer, Setup::Stay);
    let mut feeder = Feeder::new(&steer)?;
    let mut rng = Pcg64Mcg::seed_from_u64(session.args.seed);
    let _stats = RunTimeStats::enable()?;
    let few = FLOWS as u32;
    for i in 0..few {
        feeder.send(i)?;
    }
    let small = feeder.time(runs, || rng.random_range(0..few))?;
    for i in few..n {
        feeder.send(i)?;
    }
    let new = counter(&steer, "flow_new")?;
    let zipf_law = Zipf::new(f64::from(n), 1.0).context("Zipf's law")?;
    let zipf = feeder.time(runs, || zipf_law.sample(&mut rng) as u32 - 1)?;
    let uniform = feeder.time(runs, || rng.random_range(0..n))?;
    let evicted = counter(&steer, "flow_new")? - new;
    // Else the figures would be those of flow starts, or of a smaller table.
    ensure!(
        evicted * 1_000 <= runs,
        "{evicted} of {n} flows were no longer in the table"
    );
    let (packets, result) = (BATCH * small.len() as u64, &mut session.result);
    for (name, ns) in [("small", &small), ("zipf", &zipf), ("uniform", &uniform)] {
        let name = format!("table_{name}_ns");
        result.put_values("stay", &name, "ns", ns, packets);
    }
    let ratio = median(&zipf) / median(&small);
    let name = format!("ns per run, Zipf over {n} flows / 1000 flows");
    result.at_most(&name, Some(ratio), MAX_ZIPF_RATIO);
    Ok(())
}

/// What became of live flows while dead ones churned through the table.
#[derive(Default, Serialize)]
struct Eviction {
    entries: u32,
    live: u32,
    /// The flows began while only path 1 was eligible, so that half of them are on a path which
    /// the hash would not choose now.
    held: bool,
    /// Flows of one packet each that came in between.
    dead: u32,
    rounds: u32,
    /// Packets of live flows that found no entry.
    evicted: u64,
    /// How often a live flow was given another path than with its packet before.
    changed: u64,
    /// Live flows on path 1: both paths have to be in use for a change to show.
    on_path_1: u64,
}

/// Both parts. Call in the client's namespace.
pub fn measure(session: &mut Session) -> Result<()> {
    let entries = session.args.quick_or(50_000, 1_000_000);
    session.step(&format!("flow table of {entries} entries"))?;
    size(session, entries).context("large flow table")?;
    session.step("eviction")?;
    evictions(&mut session.result, entries).context("eviction")
}

/// What becomes of live flows, with the checks.
fn evictions(result: &mut RunResult, entries: u32) -> Result<()> {
    let mut all = vec![];
    // Three quarters of those that the table is for; half as many again as it has slots, so that some are
    // evicted with every round.
    let (near, far) = mountain::bpf::flows::slots(entries);
    let (fewer, too_many) = (entries / 4 * 3, (near + far) / 2 * 3);
    for (live, held) in [(fewer, false), (too_many, false), (fewer, true)] {
        let seen = eviction(entries, live, held)?;
        let held = match held {
            true => ", held off their hash's choice",
            false => "",
        };
        let name =
            format!("live flows on another path, {live} live in a table for {entries}{held}");
        let changed = Some(seen.changed as f64);
        result.at_most(&name, changed, 0.0);
        all.push(seen);
    }
    result.note("eviction", all);
    Ok(())
}

/// Fills a table for so many flows with live flows that may use both paths, and then sends
/// one packet of each live flow per round, with a new flow after every sixth.
fn eviction(entries: u32, live: u32, held: bool) -> Result<Eviction> {
    let (near, far) = mountain::bpf::flows::slots(entries);
    let mut steer = rig::steer(entries, false)?;
    let first = if held { Setup::Moved } else { Setup::Both };
    rig::set(&mut steer, first);
    let mut paths = {
        let mut feeder = Feeder::new(&steer)?;
        (0..live)
            .map(|i| feeder.send(i))
            .collect::<Result<Vec<_>>>()?
    };
    rig::set(&mut steer, Setup::Both);
    let mut feeder = Feeder::new(&steer)?;
    let mut seen = Eviction {
        entries,
        live,
        held,
        rounds: EVICTION_ROUNDS,
        on_path_1: paths.iter().map(|p| u64::from(*p)).sum(),
        ..Default::default()
    };
    let new = counter(&steer, "flow_new")?;
    for _ in 0..seen.rounds {
        for i in 0..live {
            let path = feeder.send(i)?;
            if path != std::mem::replace(&mut paths[i as usize], path) {
                seen.changed += 1;
            }
            if i % LIVE_PER_DEAD == 0 {
                feeder.send(live + seen.dead)?;
                seen.dead += 1;
            }
        }
        ensure!(!stopped(), "interrupted");
    }
    seen.evicted = counter(&steer, "flow_new")? - new - u64::from(seen.dead);
    ensure!(
        live < near + far || seen.evicted > 0,
        "{live} live flows in {} slots, and none was evicted",
        near + far
    );
    Ok(seen)
}

fn counter(steer: &Steer, name: &str) -> Result<u64> {
    let count = steer.stats()?.get(name).copied();
    count.with_context(|| format!("no counter {name}"))
}
