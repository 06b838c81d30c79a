// SPDX-License-Identifier: GPL-2.0-or-later
//! TCP throughput over veth with and without the program.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{anyhow, ensure, Context, Result};
use nix::sched::{sched_setaffinity, CpuSet};
use nix::unistd::Pid;

use super::kernel::{Constant, PASS};
use super::rig::{self, PathVerdict, SteeredRig, SERVER};
use super::CostPlan;
use crate::stopped;

const CHUNK: usize = 256 * 1024;

/// Goodput of the two halves of a pair, bit/s.
#[derive(Clone, Copy, Debug)]
pub struct Pair {
    pub without_bps: f64,
    pub with_bps: f64,
}

/// What is compared with nothing at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum With {
    /// Two instructions: the control, which tells what a hook in use costs, and how far two equal
    /// halves differ.
    Empty,
    /// The program; connections stay on their path, or are moved.
    Stay,
    Moved,
}

impl With {
    pub const ALL: [Self; 3] = [Self::Empty, Self::Stay, Self::Moved];

    pub fn name(self) -> &'static str {
        match self {
            Self::Empty => "empty program",
            Self::Stay => "stay",
            Self::Moved => "moved",
        }
    }
}

/// `plan.pairs` pairs, in the order A B B A. Call in the client's namespace.
pub fn pairs(rig: &SteeredRig, plan: &CostPlan, compared: With) -> Result<Vec<Pair>> {
    // A socket stays in the namespace it was made in.
    let listener = rig.server.enter(|| Ok(TcpListener::bind((SERVER, 0))?))?;
    let mut steer = rig::steer(65_536, true)?;
    let empty = Constant::load(PASS)?;
    let moved = compared == With::Moved;
    rig::set(
        &mut steer,
        if moved {
            PathVerdict::Moved
        } else {
            PathVerdict::Stay
        },
    );
    let uplinks = rig::uplinks()?;
    let mut pairs = vec![];
    for i in 0..plan.pairs {
        ensure!(!stopped(), "interrupted");
        let mut run = |with: bool| -> Result<f64> {
            let mut links = vec![];
            match compared {
                With::Empty if with => {
                    for uplink in uplinks {
                        links.push(empty.at_egress(uplink)?);
                    }
                }
                _ if with => steer.attach_to(&uplinks)?,
                _ => steer.attach_to(&[])?,
            }
            let before = rig.arrived()?;
            let bps = goodput(&listener, plan)?;
            let arrived = rig.arrived()?;
            let path = usize::from(with && moved);
            let (on, off) = (
                arrived[path] - before[path],
                arrived[1 - path] - before[1 - path],
            );
            ensure!(
                on > 100 && off <= on / 100,
                "{on} packets on path {path}, {off} on the other: not the traffic to measure"
            );
            Ok(bps)
        };
        let (with_bps, without_bps);
        if i % 2 == 0 {
            without_bps = run(false)?;
            with_bps = run(true)?;
        } else {
            with_bps = run(true)?;
            without_bps = run(false)?;
        }
        pairs.push(Pair {
            without_bps,
            with_bps,
        });
    }
    Ok(pairs)
}

/// bit/s that the far end received of one new connection over `plan.tcp`, after a warm-up.
fn goodput(listener: &TcpListener, plan: &CostPlan) -> Result<f64> {
    let received = Arc::new(AtomicU64::new(0));
    let stop = Arc::new(AtomicBool::new(false));
    let mut out = TcpStream::connect(listener.local_addr()?)?;
    let (mut inward, _) = listener.accept()?;
    inward.set_read_timeout(Some(Duration::from_secs(5)))?;
    out.set_write_timeout(Some(Duration::from_secs(5)))?;
    let counter = Arc::clone(&received);
    let reader = thread::spawn(move || -> Result<()> {
        pin(1);
        let mut buffer = vec![0; CHUNK];
        loop {
            match inward
                .read(&mut buffer)
                .context("the receiver saw nothing for 5 s")?
            {
                0 => return Ok(()),
                n => counter.fetch_add(n as u64, Ordering::Relaxed),
            };
        }
    });
    let end = Arc::clone(&stop);
    let writer = thread::spawn(move || -> Result<()> {
        pin(0);
        let buffer = vec![0; CHUNK];
        while !end.load(Ordering::Relaxed) {
            out.write_all(&buffer)
                .context("the sender stalled for 5 s")?;
        }
        Ok(out.shutdown(Shutdown::Write)?)
    });
    thread::sleep(plan.warm_up);
    let (start, first) = (Instant::now(), received.load(Ordering::Relaxed));
    thread::sleep(plan.tcp);
    let (took, last) = (start.elapsed(), received.load(Ordering::Relaxed));
    stop.store(true, Ordering::Relaxed);
    for thread in [writer, reader] {
        thread
            .join()
            .map_err(|_| anyhow!("a thread of the connection panicked"))??;
    }
    Ok((last - first) as f64 * 8.0 / took.as_secs_f64())
}

/// Sender and receiver on processors of their own, where there are two: the scheduler's choice
/// would be the larger part of the spread.
fn pin(cpu: usize) {
    let mut set = CpuSet::new();
    if set.set(cpu).is_ok() {
        let _ = sched_setaffinity(Pid::from_raw(0), &set);
    }
}
