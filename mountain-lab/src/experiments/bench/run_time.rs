// SPDX-License-Identifier: GPL-2.0-or-later
//! Time per run of the steering program under real traffic, and by BPF_PROG_RUN.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use anyhow::{ensure, Result};
use mountain::bpf::Steer;
use rand::seq::SliceRandom;
use rand::SeedableRng;
use rand_pcg::Pcg64Mcg;

use super::kernel::{prog_run, Constant, RunTimeStats, Runs, PASS, REDIRECT};
use super::rig::{self, PathVerdict, SteeredRig, CLIENT, SERVER};
use super::CostPlan;
use crate::stopped;

/// Flows of the "at most 1,000 active flows" figures.
pub const FLOWS: usize = 1_000;
/// UDP payload: the smallest frame, since cost is per packet.
const PAYLOAD: [u8; 18] = [0; 18];
/// At least this share of what was sent must have arrived by the path it belongs on.
pub const DELIVERED: f64 = 0.9999;

/// What is attached to the uplinks in one segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TimedRun {
    /// A program of two instructions: what the statistics themselves cost.
    Empty,
    Ecmp,
    Stay,
    /// Moved packets, the program on their first device only: the first of their two runs.
    FirstRun,
    Moved,
}

pub const SEGMENTS: [TimedRun; 5] = [
    TimedRun::Empty,
    TimedRun::Ecmp,
    TimedRun::Stay,
    TimedRun::FirstRun,
    TimedRun::Moved,
];

/// What is attached to the uplinks when the time of a whole packet is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum UplinkPrograms {
    Nothing,
    Ecmp,
    Stay,
    Moved,
}

pub const ATTACHED: [UplinkPrograms; 4] = [
    UplinkPrograms::Nothing,
    UplinkPrograms::Ecmp,
    UplinkPrograms::Stay,
    UplinkPrograms::Moved,
];

/// Rounds of each, for one repeat of the time per run, and how much shorter they are: differences of
/// a few per cent want many neighbouring pairs.
const PACKET_ROUNDS: u32 = 4;

/// ns per *packet* (one run, or the two of a moved packet) for each repeat, and packets in all.
pub type RunTimes = BTreeMap<TimedRun, (Vec<f64>, u64)>;

/// 1,000 sockets that send in an order of their own.
pub struct Senders(Vec<UdpSocket>);

impl Senders {
    pub fn new(from: Ipv4Addr, to: Ipv4Addr, seed: u64) -> Result<Self> {
        let mut sockets = (0..FLOWS)
            .map(|_| {
                let socket = UdpSocket::bind((from, 0))?;
                socket.connect(SocketAddr::from((to, 9)))?;
                Ok(socket)
            })
            .collect::<Result<Vec<_>>>()?;
        // In the order of their making the hardware would guess the next one's memory.
        sockets.shuffle(&mut Pcg64Mcg::seed_from_u64(seed));
        Ok(Senders(sockets))
    }

    /// Sends in turn for `time`, whole rounds. Returns the number of packets.
    pub fn send(&self, time: Duration) -> Result<u64> {
        let end = Instant::now() + time;
        let mut sent = 0;
        while Instant::now() < end {
            for socket in &self.0 {
                socket.send(&PAYLOAD)?;
            }
            sent += self.0.len() as u64;
        }
        Ok(sent)
    }
}

/// Interleaves the segments. Call in the client's namespace.
pub fn under_traffic(rig: &SteeredRig, plan: &CostPlan) -> Result<RunTimes> {
    let (empty, drop) = (Constant::load(PASS)?, Constant::load(super::kernel::DROP)?);
    let _sink = rig.sink(&drop)?;
    let mut steer = rig::steer(65_536, true)?;
    let uplinks = rig::uplinks()?;
    let senders = Senders::new(CLIENT, SERVER, plan.seed)?;
    let _stats = RunTimeStats::enable()?;
    let mut times = RunTimes::new();
    for repeat in 0..plan.repeats {
        for i in 0..SEGMENTS.len() {
            ensure!(!stopped(), "interrupted");
            // Another order each time, so that a trend favours nobody.
            let segment = SEGMENTS[(i + repeat as usize) % SEGMENTS.len()];
            let mut links = vec![];
            let (attached, verdict): (&[u32], _) = match segment {
                TimedRun::Empty => (&[], PathVerdict::Ecmp),
                TimedRun::Ecmp => (&uplinks, PathVerdict::Ecmp),
                TimedRun::Stay => (&uplinks, PathVerdict::Stay),
                TimedRun::FirstRun => (&uplinks[..1], PathVerdict::Moved),
                TimedRun::Moved => (&uplinks, PathVerdict::Moved),
            };
            if segment == TimedRun::Empty {
                for uplink in uplinks {
                    links.push(empty.at_egress(uplink)?);
                }
            }
            steer.attach_to(attached)?;
            rig::set(&mut steer, verdict);
            let program = if segment == TimedRun::Empty {
                empty.as_fd()
            } else {
                fd(&steer)
            };
            // Every flow is in the table and has moved where it should before time is taken.
            senders.send(plan.warm_up)?;
            let before = (Runs::of(program)?, rig.arrived()?);
            let sent = senders.send(plan.segment)?;
            let runs = Runs::of(program)?.since(before.0);
            let arrived = rig.arrived()?;

            let path = usize::from(matches!(segment, TimedRun::FirstRun | TimedRun::Moved));
            let got = arrived[path] - before.1[path];
            ensure!(
                got as f64 >= sent as f64 * DELIVERED,
                "{segment:?}: {sent} packets sent, {got} arrived by path {path}: not a cost but a loss"
            );
            let expected = if segment == TimedRun::Moved {
                2 * sent
            } else {
                sent
            };
            ensure!(
                runs.count.abs_diff(expected) * 1_000 <= expected,
                "{segment:?}: {} runs for {sent} packets, {expected} expected",
                runs.count
            );
            let entry = times.entry(segment).or_default();
            entry.0.push(runs.ns as f64 / sent as f64);
            entry.1 += sent;
        }
    }
    Ok(times)
}

/// Processor time of a whole packet, from the sender's system call to the far end's ingress, in ns,
/// with nothing attached and with the program, statistics off: each round's, in turn. Call in the
/// client's namespace.
pub fn whole_packet(
    rig: &SteeredRig,
    plan: &CostPlan,
) -> Result<BTreeMap<UplinkPrograms, Vec<f64>>> {
    let drop = Constant::load(super::kernel::DROP)?;
    let _sink = rig.sink(&drop)?;
    let mut steer = rig::steer(65_536, true)?;
    let uplinks = rig::uplinks()?;
    let senders = Senders::new(CLIENT, SERVER, plan.seed)?;
    let mut times = BTreeMap::<UplinkPrograms, Vec<f64>>::new();
    for round in 0..(plan.repeats * PACKET_ROUNDS) as usize {
        for i in 0..ATTACHED.len() {
            ensure!(!stopped(), "interrupted");
            let attached = ATTACHED[(i + round) % ATTACHED.len()];
            let (devices, verdict): (&[u32], _) = match attached {
                UplinkPrograms::Nothing => (&[], PathVerdict::Ecmp),
                UplinkPrograms::Ecmp => (&uplinks, PathVerdict::Ecmp),
                UplinkPrograms::Stay => (&uplinks, PathVerdict::Stay),
                UplinkPrograms::Moved => (&uplinks, PathVerdict::Moved),
            };
            steer.attach_to(devices)?;
            rig::set(&mut steer, verdict);
            senders.send(plan.warm_up / PACKET_ROUNDS)?;
            let (before, cpu) = (rig.arrived()?, thread_time()?);
            let sent = senders.send(plan.segment / PACKET_ROUNDS)?;
            let cpu = thread_time()? - cpu;
            let path = usize::from(attached == UplinkPrograms::Moved);
            let got = rig.arrived()?[path] - before[path];
            ensure!(
                got as f64 >= sent as f64 * DELIVERED,
                "{attached:?}: {sent} packets sent, {got} arrived by path {path}: not a cost but a loss"
            );
            let ns = cpu.as_nanos() as f64 / sent as f64;
            times.entry(attached).or_default().push(ns);
        }
    }
    Ok(times)
}

/// Processor time of this thread.
pub fn thread_time() -> Result<Duration> {
    let clock = nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID;
    Ok(nix::time::clock_gettime(clock)?.into())
}

/// Mean ns of one run by BPF_PROG_RUN, the same packet again and again, statistics off: empty
/// program, and the first runs of a packet that stays and of one that is moved.
pub fn repeated(plan: &CostPlan) -> Result<BTreeMap<TimedRun, Vec<f64>>> {
    let empty = Constant::load(PASS)?;
    let mut steer = rig::steer(65_536, false)?;
    let uplink = rig::uplinks()?[0];
    let mut times = BTreeMap::<TimedRun, Vec<f64>>::new();
    for _ in 0..plan.repeats {
        for segment in [
            TimedRun::Empty,
            TimedRun::Ecmp,
            TimedRun::Stay,
            TimedRun::FirstRun,
        ] {
            let (verdict, expected) = match segment {
                TimedRun::Stay => (PathVerdict::Stay, PASS),
                TimedRun::FirstRun => (PathVerdict::Moved, REDIRECT),
                _ => (PathVerdict::Ecmp, PASS),
            };
            rig::set(&mut steer, verdict);
            // A flow for each verdict: at this rate it is a bulk flow, which does not move at once.
            let packet = rig::packet(CLIENT, 40_000 + segment as u16);
            let program = if segment == TimedRun::Empty {
                empty.as_fd()
            } else {
                fd(&steer)
            };
            let (action, ns) = prog_run(program, &packet, uplink, plan.prog_runs)?;
            ensure!(
                action == expected,
                "{segment:?}: action {action}, {expected} expected"
            );
            times.entry(segment).or_default().push(ns.into());
        }
    }
    Ok(times)
}

fn fd(steer: &Steer) -> BorrowedFd<'_> {
    steer.program().as_fd()
}
