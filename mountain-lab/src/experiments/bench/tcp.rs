// SPDX-License-Identifier: GPL-2.0-or-later
//! TCP throughput over veth with and without the program.

use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Instant;

use anyhow::{ensure, Result};
use mountain_lab::workload::stream::Saturated;

use super::kernel::{Constant, PASS};
use super::rig::{self, PathVerdict, SteeredRig, SERVER};
use super::CostPlan;
use crate::stopped;

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
    let out = TcpStream::connect(listener.local_addr()?)?;
    let running = Saturated::start(out, listener.accept()?.0)?;
    thread::sleep(plan.warm_up);
    let (start, first) = (Instant::now(), running.received());
    thread::sleep(plan.tcp);
    let (took, last) = (start.elapsed(), running.received());
    running.finish()?;
    Ok((last - first) as f64 * 8.0 / took.as_secs_f64())
}
