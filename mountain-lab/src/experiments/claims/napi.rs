// SPDX-License-Identifier: GPL-2.0-or-later
//! Claim 5: how long pings wait on one NAPI context while another one of the same processor is flooded, with fixed
//! NAPI weights (A) and adaptive ones (B).
//!
//! ```text
//!            v0 ── v1   floods, in bursts of a veth's ring
//!   source                                                 target
//!            w0 ── w1   pings
//! ```

use std::net::{Ipv4Addr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use mountain_lab::workload::sys::pin;
use mountain_lab::workload::worker::Worker;

use super::block;
use super::registry::ClaimVerdict;
use super::switches::{off_on, Switches};
use crate::driver::Session;
use crate::emulate::netns::Netns;
use crate::emulate::wire::lan;
use crate::experiments::probing::ab::Judgement;
use crate::experiments::probing::tool::{Block, Tool};

pub const WEIGHT: &str = "net.core.napi_adaptive_weight";
/// Packets of the local host's own that one run of the kernel takes from its backlog: more than a burst.
const BIAS: &str = "net.core.dev_weight_tx_bias";
const FLOODED: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
const PINGED: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 2);
/// Both devices are polled where their packets are sent.
const CPU: usize = 0;
/// So often at most netem lets go of what it keeps of the flood, which is `BURST` packets. They keep the processor
/// busy for about a millisecond.
const EVERY: Duration = Duration::from_millis(20);
const BURST: u32 = 256;
/// So many times the usual number of pings: only a few in a hundred meet a burst, and P99 stands on them.
const PINGS: usize = 4;

pub fn test(session: &mut Session) -> Result<ClaimVerdict> {
    let rig = NapiRig::build()?;
    let switches = Switches::hold(None, &[WEIGHT, BIAS])?;
    let source = &rig.source;
    let block = Block {
        cpu: Some(CPU),
        ..Block::of(block(&session.args).count * PINGS)
    };
    let mut measure = || {
        let before = rig.flooded()?;
        let _flood = flood(source)?;
        let run = Tool::MountainIcmp.measure(source, PINGED.into(), &block)?;
        let seen = rig.flooded()? - before;
        // A burst in one of four slots at least, or it was no flood.
        let least = block.seconds() / EVERY.as_secs_f64() * f64::from(BURST) / 4.0;
        ensure!(seen as f64 > least, "of the flood only {seen} packets came");
        Ok(run)
    };
    let mut modes = vec![];
    for mode in ["1", "2"] {
        let values: [&[&str]; 2] = [&["0", "4"], &[mode, "4"]];
        let name = format!("napi {mode}");
        let blocks = off_on(session, &name, &switches, values, &mut measure)?;
        modes.push(blocks.judge()?);
    }
    Ok(judge(&modes[0], &modes[1]))
}

/// As it was published a weight grows to four times the driver's, which is mode 2: it decides. What 1 does,
/// which stays at or below the driver's, is said with it.
fn judge(lower: &Judgement, published: &Judgement) -> ClaimVerdict {
    let said = |j: &Judgement| format!("{}: {}", j.figures(), j.text());
    let detail = format!(
        "pings beside a flooded device, off → mode 2 (as published): {}. Off → mode 1: {}",
        said(published),
        said(lower)
    );
    let claimed = match (&published.better[..], &published.worse[..]) {
        ([], []) => None,
        (_, worse) => Some(worse.is_empty()),
    };
    ClaimVerdict::by(claimed, detail)
}

struct NapiRig {
    source: Netns,
    target: Netns,
}

impl NapiRig {
    fn build() -> Result<Self> {
        let rig = NapiRig {
            source: Netns::create("source")?,
            target: Netns::create("target")?,
        };
        let (source, target) = (&rig.source, &rig.target);
        for (dev, peer, to) in [("v0", "v1", FLOODED), ("w0", "w1", PINGED)] {
            let [a, b, c, _] = to.octets();
            lan((source, dev, Ipv4Addr::new(a, b, c, 1)), (target, peer, to))?;
            // Only what comes from a peer without TSO goes through the NAPI context that a veth has with GRO.
            source.run("ethtool", ["-K", dev, "tso", "off"])?;
            target.run("ethtool", ["-K", peer, "gro", "on"])?;
        }
        // What a processor sends itself it has received before it sends more, and nobody waits. So netem
        // keeps the flood and lets go of a veth's ring at a time, all before the first is polled; and
        // it keeps each ping for a time of its own, so that they arrive at all moments between two bursts.
        // That time does not count: a ping is stamped behind it.
        let every = EVERY.as_millis();
        let netem = |dev: &str, how: &str| {
            let add = format!("qdisc replace dev {dev} root netem {how}");
            let added = source.run("tc", add.split(' '));
            added.context("this takes netem (CONFIG_NET_SCH_NETEM)")
        };
        netem("v0", &format!("delay 1us slot {every}ms limit {BURST}"))?;
        netem("w0", "delay 13ms 10ms")?;
        Ok(rig)
    }

    /// Packets of the flood that the target has received.
    fn flooded(&self) -> Result<u64> {
        self.target.received("v1")
    }
}

/// More than a burst in each of netem's slots, with the processor idle for most of them: bursts and not
/// a steady rate, as [`mountain_lab::workload::load`] has. Dropping it ends it.
fn flood(source: &Netns) -> Result<Worker<()>> {
    let open = || {
        pin(0, CPU)?;
        UdpSocket::bind(("0.0.0.0", 0)).context("a socket")
    };
    let flood = |socket: UdpSocket, stop: &Arc<AtomicBool>| {
        while !stop.load(Ordering::Relaxed) {
            for _ in 0..BURST + BURST / 4 {
                // What netem has no room for is refused; that is meant.
                let _ = socket.send_to(&[0; 64], (FLOODED, 9));
            }
            std::thread::sleep(EVERY * 5 / 8);
        }
    };
    let worker = Worker::start("flood", &source.path(), open, flood)?;
    std::thread::sleep(EVERY * 5);
    Ok(worker)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::probing::ab::Blocks;
    use crate::experiments::probing::pool::made_up;

    /// Eight rounds of 200 pings, on the other side later by so many us.
    fn judged(later_us: f64) -> Judgement {
        let run = |round: usize, side: usize| {
            let own = |i: usize| ((i * 7 + round * 3) % 11) as f64 + later_us * side as f64;
            made_up((0..200).map(|i| Some(100.0 + own(i))).collect())
        };
        let blocks = Blocks {
            names: ["off", "on"].map(str::to_owned),
            runs: [0, 1].map(|side| (0..8).map(|round| run(round, side)).collect()),
        };
        blocks.judge().unwrap()
    }

    #[test]
    fn what_was_published_decides() {
        let [less, same, more] = [-50.0, 0.0, 50.0].map(judged);
        let shown = judge(&same, &less).to_string();
        assert!(
            shown.starts_with("shown: pings beside a flooded device"),
            "{shown}"
        );
        assert!(
            shown.contains("mode 2 (as published): n = 1600 → 1600"),
            "{shown}"
        );
        assert!(shown.ends_with("no difference shown"), "{shown}");
        let refuted = judge(&less, &more).to_string();
        assert!(
            refuted.starts_with("refuted") && refuted.contains("better (Median"),
            "{refuted}"
        );
        let none = judge(&less, &same);
        assert!(matches!(none, ClaimVerdict::NoDifference(_)), "{none}");
    }

    /// Where netem is missing, it says so.
    #[test]
    fn the_flood_comes_or_netem_is_asked_for() {
        let rig = match NapiRig::build() {
            Ok(rig) => rig,
            Err(error) => {
                return assert!(format!("{error:#}").contains("NET_SCH_NETEM"), "{error:#}")
            }
        };
        let before = rig.flooded().unwrap();
        let flood = flood(&rig.source).unwrap();
        std::thread::sleep(EVERY * 5);
        drop(flood);
        assert!(rig.flooded().unwrap() - before >= u64::from(BURST));
    }
}
