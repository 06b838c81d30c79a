// SPDX-License-Identifier: GPL-2.0-or-later
//! The emulated link between client and server: the emulator's process, one for each segment, plays
//! a [`LinkPlan`] and reports what its queue was like.
//!
//! Client to server: rate and queue ([`Bottleneck`]), then half the round trip; back: the other
//! half, and what a plan adds there ([`Back`]). How late the process was is in its report.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{anyhow, Context, Result};
use async_trait::async_trait;
use etherparse::{LaxSlicedPacket, TransportSlice};
use mountain_lab::workload::stats::percentile;
use mountain_lab::workload::sys::monotonic_ns;
use rattan_core::cells::{Egress, Packet, StdPacket};
use rattan_core::metal::timer::Timer;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::bottleneck::{Back, Bottleneck, Fate, LinkPlan};
use super::cell::EgressCell;
use super::child::{Child, Core, Orders};
use super::netns::Netns;
use super::{LinkConfig, Plan};

/// Port of the server to which flows have the shorter way back, see [`Back::far_us`].
pub const NEAR_PORT: u16 = 7200;
/// Frames longer than this carry data: their queue is the one that counts.
const ETHERNET_HEADER: u64 = 14;

/// What the link saw, from the client to the server.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct LinkReport {
    /// Arrival (µs after the start) and departure of every packet that was not dropped.
    pub packets: Vec<(u64, u64)>,
    pub dropped: u64,
    pub lost: u64,
    /// How late packets left the emulator, 99th percentile and largest, of the direction in which it
    /// was later: a late ACK falsifies a run as a late packet does.
    pub late_p99_us: u32,
    pub late_max_us: u32,
}

impl LinkReport {
    /// Takes in what became of a packet that arrived at `t_us`; when it leaves, unless it is lost.
    pub fn note(&mut self, t_us: f64, fate: Fate) -> Option<f64> {
        let (Fate::Leaves(left) | Fate::Lost(left)) = fate else {
            self.dropped += 1;
            return None;
        };
        self.packets.push((t_us as u64, left as u64));
        let is_lost = matches!(fate, Fate::Lost(_));
        self.lost += u64::from(is_lost);
        (!is_lost).then_some(left)
    }

    /// Time that a packet would have waited in the queue, every ms of a stretch of time: the same
    /// moments for everybody, however few packets a sender has sent in a bad one.
    pub fn queue_us(&self, from_us: u64, until_us: u64) -> Vec<u32> {
        let mut samples = Vec::new();
        let (mut next, mut free_at) = (0, 0);
        for t in (from_us..until_us).step_by(1_000) {
            while let Some((arrived, left)) = self.packets.get(next).filter(|p| p.0 <= t) {
                debug_assert!(arrived <= left);
                free_at = *left;
                next += 1;
            }
            samples.push(free_at.saturating_sub(t).min(u32::MAX.into()) as u32);
        }
        samples
    }
}

/// The running process. Dropping it stops it.
pub struct Link {
    pub child: Child,
    /// CLOCK_MONOTONIC at time 0 of the plan.
    pub start_ns: u64,
}

impl Link {
    /// Starts the process in its namespace and waits until it forwards.
    pub fn start(emulator: &Netns, link: &LinkConfig, plan: &LinkPlan) -> Result<Self> {
        let plan = Plan::Link(link.clone(), plan.clone());
        let (child, answer) = Child::start(emulator, &plan)?;
        let start_ns = answer.parse();
        Ok(Link {
            child,
            start_ns: start_ns.with_context(|| format!("the emulator says {answer:?}"))?,
        })
    }

    /// Stops the link; what it saw.
    pub fn finish(self) -> Result<LinkReport> {
        serde_json::from_str(&self.child.finish()?).context("the emulator's report")
    }
}

#[derive(Default)]
struct Log {
    seen: LinkReport,
    /// There and back.
    late_us: [Vec<u32>; 2],
}

/// The process's part: forwards until its orders end, then reports.
pub(super) fn run(
    core: &mut Core,
    link: &LinkConfig,
    plan: LinkPlan,
    mut orders: Orders,
) -> Result<()> {
    let log = Arc::new(Mutex::new(Log::default()));
    let (start, start_ns) = (Instant::now(), monotonic_ns());
    core.add_port("client", &link.client)?;
    core.add_port("server", &link.server)?;
    let half = Duration::from_micros((plan.rtt_us / 2).into());
    let back = plan.back.clone();
    core.add("forward", || {
        EgressCell::new(|packets, timer| LinkEgress {
            packets,
            start,
            delay: half,
            bottleneck: Bottleneck::new(plan),
            log: log.clone(),
            timer,
        })
    })?;
    core.add("backward", || {
        EgressCell::new(|packets, timer| BackEgress {
            packets,
            start,
            delay: half,
            plan: back,
            log: log.clone(),
            waiting: BTreeMap::new(),
            arrived: 0,
            left: None,
            timer,
        })
    })?;
    core.link("client", "forward");
    core.link("forward", "server");
    core.link("server", "backward");
    core.link("backward", "client");
    core.forward(move || {
        println!("{start_ns}");
        while orders.next().is_some() {}
        Ok(())
    })?;
    let log = std::mem::take(&mut *log.lock().map_err(|_| anyhow!("a cell panicked"))?);
    let [mut there, mut back] = log.late_us;
    let mut late = |q: f64| {
        let of = |late: &mut Vec<u32>| percentile(late, q).unwrap_or(0.0) as u32;
        of(&mut there).max(of(&mut back))
    };
    let report = LinkReport {
        late_p99_us: late(0.99),
        late_max_us: late(1.0),
        ..log.seen
    };
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}

/// The way there: the bottleneck and what it saw.
struct LinkEgress {
    packets: mpsc::UnboundedReceiver<StdPacket>,
    start: Instant,
    delay: Duration,
    bottleneck: Bottleneck,
    log: Arc<Mutex<Log>>,
    timer: Timer,
}

impl LinkEgress {
    /// When the packet has crossed the bottleneck; `None`: it has not.
    fn cross(&mut self, arrived: Instant, bytes: u64) -> Option<Instant> {
        let t_us = micros(arrived.saturating_duration_since(self.start));
        let mut log = self.log.lock().ok()?;
        let left_us = log.seen.note(t_us, self.bottleneck.arrive(t_us, bytes))?;
        Some(self.start + Duration::from_nanos((left_us * 1e3) as u64))
    }
}

#[async_trait]
impl Egress<StdPacket> for LinkEgress {
    async fn dequeue(&mut self) -> Option<StdPacket> {
        let mut packet = self.packets.recv().await?;
        let bytes = packet.length() as u64 - ETHERNET_HEADER;
        // `None` is how a cell tells rattan that there is nothing to forward.
        let leaves = self.cross(packet.get_timestamp(), bytes)? + self.delay;
        self.timer.sleep_until(leaves).await.ok()?;
        note_late(&self.log, 0, leaves);
        packet.delay_until(leaves);
        Some(packet)
    }
}

fn micros(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}

fn note_late(log: &Mutex<Log>, direction: usize, due: Instant) {
    let late = Instant::now().saturating_duration_since(due);
    if let Ok(mut log) = log.lock() {
        log.late_us[direction].push(late.as_micros() as u32);
    }
}

/// The way back, where flows may differ in delay: a packet may overtake those of another flow.
struct BackEgress {
    packets: mpsc::UnboundedReceiver<StdPacket>,
    start: Instant,
    delay: Duration,
    plan: Back,
    log: Arc<Mutex<Log>>,
    /// By when they are due, and by their number: packets that are due together keep their order.
    waiting: BTreeMap<(Instant, u64), StdPacket>,
    arrived: u64,
    /// When the last one was due.
    left: Option<Instant>,
    timer: Timer,
}

impl BackEgress {
    fn push(&mut self, packet: StdPacket) {
        let t_us = micros(packet.get_timestamp().saturating_duration_since(self.start));
        let far = source_port(packet.as_slice()).is_some_and(|port| port != NEAR_PORT);
        let due_us = self.plan.leaves_us(t_us + micros(self.delay), far);
        let at = self.start + Duration::from_nanos((due_us * 1e3) as u64);
        self.waiting.insert((at, self.arrived), packet);
        self.arrived += 1;
    }
}

#[async_trait]
impl Egress<StdPacket> for BackEgress {
    async fn dequeue(&mut self) -> Option<StdPacket> {
        loop {
            let Some((&(at, _), _)) = self.waiting.first_key_value() else {
                let packet = self.packets.recv().await?;
                self.push(packet);
                continue;
            };
            tokio::select! {
                biased;
                packet = self.packets.recv() => {
                    self.push(packet?);
                    continue;
                }
                slept = self.timer.sleep_until(at) => {
                    slept.ok()?;
                }
            }
            // The rest of a burst waits for its first, as it would in a radio.
            if self.left != Some(at) {
                note_late(&self.log, 1, at);
            }
            self.left = Some(at);
            let (_, mut packet) = self.waiting.pop_first()?;
            packet.delay_until(at);
            return Some(packet);
        }
    }
}

/// Source port of an Ethernet frame with TCP.
fn source_port(frame: &[u8]) -> Option<u16> {
    match LaxSlicedPacket::from_ethernet(frame).ok()?.transport? {
        TransportSlice::Tcp(tcp) => Some(tcp.source_port()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use etherparse::PacketBuilder;

    use super::*;

    #[test]
    fn the_queue_is_sampled_by_time() {
        let report = LinkReport {
            packets: vec![(500, 3_500), (600, 4_600), (5_000, 5_100)],
            ..Default::default()
        };
        assert_eq!(
            report.queue_us(0, 6_000),
            [0, 3_600, 2_600, 1_600, 600, 100]
        );
    }

    #[test]
    fn ports_of_tcp_are_found() {
        let ip = || PacketBuilder::ethernet2([0; 6], [0; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64);
        let (mut tcp, mut udp) = (Vec::new(), Vec::new());
        let segment = ip().tcp(7200, 80, 1, 0).options_raw(&[1; 4]).unwrap();
        segment.write(&mut tcp, &[]).unwrap();
        ip().udp(7200, 80).write(&mut udp, &[]).unwrap();
        assert_eq!(source_port(&tcp), Some(7200));
        assert_eq!(source_port(&udp), None);
        assert_eq!(source_port(&tcp[..20]), None);
    }
}
