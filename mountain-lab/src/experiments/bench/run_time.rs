// SPDX-License-Identifier: GPL-2.0-or-later
//! Time per run of the steering program under real traffic, and by BPF_PROG_RUN.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{ensure, Result};
use mountain_lab::result::RunResult;
use mountain_lab::workload::stats::median;
use mountain_lab::workload::sys::thread_time;
use rand::seq::SliceRandom;
use rand::SeedableRng;
use rand_pcg::Pcg64Mcg;

use super::kernel::{prog_run, Constant, RunTimeStats, Runs, PASS, REDIRECT};
use super::rig::{self, Setup, SteeredRig, Uplinks, CLIENT, SERVER};
use super::{less, repeats, segment, warm_up};
use crate::driver::Session;
use crate::emulate::netns::Netns;

/// Flows of the "at most 1,000 active flows" figures.
pub const FLOWS: usize = 1_000;
/// UDP payload: the smallest frame, since cost is per packet.
const PAYLOAD: [u8; 18] = [0; 18];
/// At least this share of what was sent must have arrived by the path it belongs on.
const DELIVERED: f64 = 0.9999;
/// Limit of the checks.
const MAX_RUN_NS: f64 = 150.0;

/// Whose runs are timed under traffic.
pub const TIMED: [Setup; 5] = [
    Setup::Empty,
    Setup::Ecmp,
    Setup::Stay,
    Setup::FirstRun,
    Setup::Moved,
];
/// With what the time of a whole packet is taken.
const WHOLE: [Setup; 4] = [Setup::Nothing, Setup::Ecmp, Setup::Stay, Setup::Moved];
/// Whose runs are timed by BPF_PROG_RUN.
pub const REPEATED: [Setup; 4] = [Setup::Empty, Setup::Ecmp, Setup::Stay, Setup::FirstRun];

/// Rounds of whole packets for one repeat of the time per run, and how much shorter they are: differences
/// of a few per cent want many neighbouring pairs.
const PACKET_ROUNDS: u32 = 4;
/// Steps of whole packets in a repeat.
pub const PACKET_STEPS: u32 = PACKET_ROUNDS * WHOLE.len() as u32;

/// 1,000 sockets that send in an order of their own.
pub struct Senders(Vec<UdpSocket>);

/// What was sent in a segment.
pub struct Sent {
    pub packets: u64,
    /// Processor time of the sender's thread, which carries a packet to the far end's ingress.
    cpu: Duration,
    /// Packets that came in by `s0` and `s1` of the far end.
    pub arrived: [u64; 2],
}

impl Sent {
    /// Processor time of a packet, ns.
    pub fn packet_ns(&self) -> f64 {
        self.cpu.as_nanos() as f64 / self.packets as f64
    }

    /// Whether `got` is what was sent: less would not be a cost but a loss.
    pub fn is_delivered(&self, got: u64) -> bool {
        got as f64 >= self.packets as f64 * DELIVERED
    }
}

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

    /// Sends to `far` for `time`, and sees what that took.
    pub fn timed(&self, far: &Netns, time: Duration) -> Result<Sent> {
        let (before, cpu) = (rig::arrived(far)?, thread_time()?);
        let packets = self.send(time)?;
        let cpu = thread_time()? - cpu;
        let after = rig::arrived(far)?;
        Ok(Sent {
            packets,
            cpu,
            arrived: [0, 1].map(|path| after[path] - before[path]),
        })
    }
}

/// Traffic of the client over the uplinks.
struct Traffic<'a> {
    rig: &'a SteeredRig,
    uplinks: Uplinks,
    senders: Senders,
    _sink: Vec<OwnedFd>,
}

impl<'a> Traffic<'a> {
    /// Call in the client's namespace.
    fn new(rig: &'a SteeredRig, seed: u64) -> Result<Self> {
        Ok(Traffic {
            rig,
            uplinks: Uplinks::new()?,
            senders: Senders::new(CLIENT, SERVER, seed)?,
            _sink: rig::sink(&rig.server)?,
        })
    }

    /// Sends for `time` after a warm-up; with the runs of the setup's program meanwhile, as far as the
    /// kernel counts them.
    fn segment(&mut self, setup: Setup, warm_up: Duration, time: Duration) -> Result<(Sent, Runs)> {
        self.uplinks.set_up(setup)?;
        // Every flow is in the table and has moved where it should before time is taken.
        self.senders.send(warm_up)?;
        let before = self.uplinks.runs(setup)?;
        let sent = self.senders.timed(&self.rig.server, time)?;
        let runs = self.uplinks.runs(setup)?.since(before);
        let (packets, path) = (sent.packets, setup.path());
        let got = sent.arrived[path];
        ensure!(
            sent.is_delivered(got),
            "{setup:?}: {packets} packets sent, {got} arrived by path {path}: not a cost but a loss"
        );
        Ok((sent, runs))
    }
}

/// ns per *packet* (one run, or the two of a moved packet). Call in the client's namespace.
pub fn under_traffic(session: &mut Session, rig: &SteeredRig) -> Result<()> {
    let args = &session.args;
    let mut traffic = Traffic::new(rig, args.seed)?;
    let _stats = RunTimeStats::enable()?;
    let measure = |i: usize, _| -> Result<(f64, u64)> {
        let setup = TIMED[i];
        let (sent, runs) = traffic.segment(setup, warm_up(args), segment(args))?;
        let expected = match setup {
            Setup::Moved => 2 * sent.packets,
            _ => sent.packets,
        };
        ensure!(
            runs.count.abs_diff(expected) * 1_000 <= expected,
            "{setup:?}: {} runs for {} packets, {expected} expected",
            runs.count,
            sent.packets
        );
        Ok((runs.ns as f64 / sent.packets as f64, sent.packets))
    };
    let sides = TIMED.map(Setup::policy);
    let seen = session.rounds("time per run", &sides, repeats(args), measure)?;
    let ns = |one: &Vec<(f64, u64)>| one.iter().map(|(ns, _)| *ns).collect();
    let packets = |one: &Vec<(f64, u64)>| one.iter().map(|(_, n)| *n).sum();
    let seen = seen.each_ref();
    put_runs(&mut session.result, seen.map(ns), seen.map(packets));
    Ok(())
}

/// Figures and checks of the time per run. ns and packets by [`TIMED`].
fn put_runs(result: &mut RunResult, ns: [Vec<f64>; 5], packets: [u64; 5]) {
    let [empty, ecmp, stay, first, moved] = &ns;
    for ((setup, ns), n) in TIMED.iter().zip(&ns).zip(packets) {
        let column = match setup {
            Setup::FirstRun => "first_run_ns",
            Setup::Moved => "both_runs_ns",
            _ => "run_ns",
        };
        result.put_values(setup.policy(), column, "ns", ns, n);
        // What a run costs when nobody measures it: less what an empty program shows.
        if !matches!(setup, Setup::Empty | Setup::Moved) {
            let name = format!("net_{column}");
            result.put_values(setup.policy(), &name, "ns", &less(ns, empty), n);
        }
    }
    // Of the same repeat: both saw the same machine.
    let second = less(moved, first);
    result.put_values("moved", "second_run_ns", "ns", &second, packets[4]);
    for (what, ns) in [
        ("ns per run, ecmp mode", ecmp),
        ("ns per run, packet stays", stay),
        ("ns of a moved packet's first run", first),
        ("ns of a moved packet's second run", &second),
    ] {
        result.at_most(what, Some(median(ns)), MAX_RUN_NS);
    }
}

/// Processor time of a whole packet, from the sender's system call to the far end's ingress, in ns,
/// with nothing attached and with the program, statistics off. Call in the client's namespace.
pub fn whole_packet(session: &mut Session, rig: &SteeredRig) -> Result<()> {
    let (args, rounds) = (&session.args, PACKET_ROUNDS);
    let mut traffic = Traffic::new(rig, args.seed)?;
    let measure = |i: usize, _| -> Result<f64> {
        let (warm_up, time) = (warm_up(args) / rounds, segment(args) / rounds);
        let (sent, _) = traffic.segment(WHOLE[i], warm_up, time)?;
        Ok(sent.packet_ns())
    };
    let (sides, rounds) = (WHOLE.map(Setup::policy), repeats(args) * rounds);
    let seen = session.rounds("time per packet", &sides, rounds, measure)?;
    let (n, result) = (rounds.into(), &mut session.result);
    for (policy, ns) in sides.iter().zip(&seen) {
        result.put_values(policy, "packet_ns", "ns", ns, n);
        if *policy != sides[0] {
            let added = less(ns, &seen[0]);
            let name = "packet_added_ns";
            result.put_values(policy, name, "ns", &added, n);
        }
    }
    Ok(())
}

/// Mean ns of one run by BPF_PROG_RUN, the same packet again and again, statistics off: empty
/// program, and the first runs of a packet that stays and of one that is moved. Call in the client's
/// namespace.
pub fn repeated(session: &mut Session) -> Result<()> {
    let args = &session.args;
    let runs = args.quick_or(100_000, 1_000_000);
    let empty = Constant::load(PASS)?;
    let mut steer = rig::steer(65_536, false)?;
    let uplink = rig::uplinks()?[0];
    let measure = |i: usize, _| -> Result<f64> {
        let setup = REPEATED[i];
        rig::set(&mut steer, setup);
        let (program, expected) = match setup {
            Setup::Empty => (empty.as_fd(), PASS),
            Setup::FirstRun => (steer.program().as_fd(), REDIRECT),
            _ => (steer.program().as_fd(), PASS),
        };
        // A flow for each verdict: at this rate it is a bulk flow, which does not move at once.
        let packet = rig::packet(40_000 + setup as u16);
        let (action, ns) = prog_run(program, &packet, uplink, runs)?;
        ensure!(
            action == expected,
            "{setup:?}: action {action}, {expected} expected"
        );
        Ok(f64::from(ns))
    };
    let sides = REPEATED.map(Setup::policy);
    let seen = session.rounds("BPF_PROG_RUN", &sides, repeats(args), measure)?;
    let result = &mut session.result;
    for (setup, ns) in REPEATED.iter().zip(&seen) {
        let name = match setup {
            Setup::FirstRun => "prog_run_first_ns",
            _ => "prog_run_ns",
        };
        let n = runs as u64 * ns.len() as u64;
        result.put_values(setup.policy(), name, "ns", ns, n);
    }
    Ok(())
}
