// SPDX-License-Identifier: GPL-2.0-or-later
//! The emulated paths: the emulator's process copies frames between the hosts' devices, late by
//! what the [`Schedule`] says.
//!
//! Built on rattan-core's lower layer: its AF_PACKET driver and its rate limit with a drop-tail
//! queue; the delay is a cell of our own, because it has to follow the same schedule that the
//! oracle reads. Per path and direction:
//!
//! ```text
//! device ── rate + queue ── scheduled delay or drop ── device
//! ```
//!
//! The emulator's remaining delay of its own is measured on the idle reference path.

use std::path::PathBuf;
use std::sync::{Arc, RwLock};
use std::time::Duration;

use anyhow::{anyhow, Context, Result};
use async_trait::async_trait;
use mountain_lab::workload::sys::monotonic_ns;
use rand::RngExt;
use rand_pcg::Pcg64;
use rattan_core::cells::bandwidth::queue::{DropTailQueue, DropTailQueueConfig};
use rattan_core::cells::bandwidth::{BwCell, BwCellConfig, BwCellControlInterface, BwType};
use rattan_core::cells::{ControlInterface, Egress, Packet, StdPacket};
use rattan_core::metal::timer::Timer;
use rattan_core::netem_trace::Bandwidth;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::cell::EgressCell;
use super::child::{Child, Core, Orders};
use super::hosts::Hosts;
use super::{LinkConfig, Plan};
use crate::scenario::schedule::Schedule;
use crate::scenario::Scenario;

/// One-way delay of the reference path.
pub const REFERENCE_DELAY_US: u32 = 10_000;
/// What the process is told first.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Config {
    /// In path order; the reference path last.
    links: Vec<LinkConfig>,
    scenario: Scenario,
    /// That of the scenario's file, which recordings are relative to.
    folder: PathBuf,
    seed: u64,
}

/// Every further line.
#[derive(Debug, Serialize, Deserialize)]
enum Order {
    /// Draw the schedule of a repeat, which takes a while.
    Draw { repeat: u32 },
    /// Play it from `start_ns` (CLOCK_MONOTONIC) on.
    Play { start_ns: u64 },
}

/// The running process. Dropping it stops it.
pub struct Emulator(pub Child);

impl Emulator {
    /// Starts the process in the emulator's namespace and waits until it forwards.
    pub fn start(hosts: &Hosts, scenario: &Scenario, seed: u64) -> Result<Self> {
        let plan = Plan::Paths(Config {
            links: hosts.links.clone(),
            scenario: scenario.clone(),
            folder: scenario.folder.clone(),
            seed,
        });
        let (child, _) = Child::start(&hosts.emulator, &plan)?;
        hosts.wait_until_joined()?;
        Ok(Emulator(child))
    }

    /// Plays the schedule of a repeat, soon; returns when it starts (CLOCK_MONOTONIC).
    ///
    /// # Errors
    /// The process is gone.
    pub fn play(&mut self, repeat: u32, ahead: Duration) -> Result<u64> {
        self.0.say(&Order::Draw { repeat })?;
        let start_ns = monotonic_ns() + ahead.as_nanos() as u64;
        self.0.say(&Order::Play { start_ns })?;
        Ok(start_ns)
    }
}

/// What the delay cells look up, and when it starts: changed by the control thread, read by the emulator's.
type Playing = RwLock<Option<(Schedule, Instant)>>;

/// The process's part: forwards until its orders end.
pub(super) fn run(core: &mut Core, mut config: Config, orders: Orders) -> Result<()> {
    config.scenario.folder = config.folder.clone();
    config.scenario.read_traces()?;
    let playing = Arc::new(Playing::default());
    let mut rates = Rates::default();
    for (i, link) in config.links.iter().enumerate() {
        let joined = join(core, &config, i, link, &playing);
        rates.0.extend(joined.with_context(|| format!("path {i}"))?);
    }
    core.forward(move || {
        println!("ready");
        obey(orders, &config, &playing, &Arc::new(rates))
    })
}

fn obey(orders: Orders, config: &Config, playing: &Playing, rates: &Arc<Rates>) -> Result<()> {
    let mut changes: Option<RateChanges> = None;
    let mut schedule: Option<Schedule> = None;
    for line in orders {
        match serde_json::from_str(&line?)? {
            Order::Draw { repeat } => {
                schedule = Some(Schedule::generate(&config.scenario, config.seed, repeat));
            }
            Order::Play { start_ns } => {
                let schedule = schedule.take().context("no schedule was drawn")?;
                let ahead = Duration::from_nanos(start_ns.saturating_sub(monotonic_ns()));
                let start = Instant::now() + ahead;
                drop(changes.take());
                changes = Some(RateChanges::follow(
                    rates.clone(),
                    &config.scenario,
                    &schedule,
                    start.into_std(),
                )?);
                let mut playing = playing.write().map_err(|_| anyhow!("a cell panicked"))?;
                *playing = Some((schedule, start));
            }
        }
        println!("ready");
    }
    Ok(())
}

type RateControl = BwCellControlInterface<StdPacket, DropTailQueue<StdPacket>>;

/// The rate limits, each with its path and whether it is that from client to server.
#[derive(Default)]
struct Rates(Vec<(usize, bool, Arc<RateControl>)>);

impl Rates {
    fn set(&self, path: usize, applies: impl Fn(bool) -> bool, bps: u64) -> Result<()> {
        for (own, forward, rate) in &self.0 {
            if *own == path && applies(*forward) {
                let changed = BwCellConfig::new(Bandwidth::from_bps(bps), None, None);
                rate.set_config(changed).map_err(|e| anyhow!("{e:?}"))?;
            }
        }
        Ok(())
    }
}

/// A thread that changes rates as a schedule says. Dropping it ends it.
struct RateChanges {
    quit: Option<std::sync::mpsc::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl RateChanges {
    /// Every path has its usual rate until the schedule changes it.
    fn follow(
        rates: Arc<Rates>,
        scenario: &Scenario,
        schedule: &Schedule,
        start: std::time::Instant,
    ) -> Result<Self> {
        let usual = |path: usize| (scenario.paths[path].rate_mbit * 1e6) as u64;
        for path in 0..scenario.paths.len() {
            rates.set(path, |_| true, usual(path))?;
        }
        // At, path, the event whose directions it is for, rate.
        let mut changes = Vec::new();
        for event in &schedule.events {
            if let Some(bps) = event.rate_bps {
                changes.push((event.start_us, *event, bps));
                changes.push((event.end_us, *event, usual(event.path)));
            }
        }
        changes.sort_by_key(|(at_us, ..)| *at_us);
        let (quit, quitting) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            for (at_us, event, bps) in changes {
                let at = start + Duration::from_micros(at_us.max(0) as u64);
                let left = at.saturating_duration_since(std::time::Instant::now());
                if quitting.recv_timeout(left) != Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                    return;
                }
                if let Err(e) = rates.set(event.path, |forward| event.touches(forward), bps) {
                    eprintln!("emulator: {e:#}");
                }
            }
        });
        Ok(RateChanges {
            quit: Some(quit),
            thread: Some(thread),
        })
    }
}

impl Drop for RateChanges {
    fn drop(&mut self) {
        drop(self.quit.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn join(
    core: &mut Core,
    config: &Config,
    i: usize,
    link: &LinkConfig,
    playing: &Arc<Playing>,
) -> Result<Vec<(usize, bool, Arc<RateControl>)>> {
    let mut rates = Vec::new();
    let (client, server) = (format!("client{i}"), format!("server{i}"));
    core.add_port(&client, &link.client)?;
    core.add_port(&server, &link.server)?;
    let ends = [(&client, &server, true), (&server, &client, false)];
    for (from, to, forward) in ends {
        let delay = format!("delay-{from}");
        core.add(&delay, || {
            EgressCell::new(|packets, timer| DelayEgress {
                packets,
                playing: playing.clone(),
                path: i,
                forward,
                timer,
                last: Instant::now(),
                rng: Pcg64::new(config.seed.into(), i as u128 * 2 + u128::from(forward)),
            })
        })?;
        core.link(&delay, to);
        let Some(path) = config.scenario.paths.get(i) else {
            // The reference path has no rate limit.
            core.link(from, &delay);
            continue;
        };
        let rate = format!("rate-{from}");
        let bandwidth = Bandwidth::from_bps((path.rate_mbit * 1e6) as u64);
        let queue =
            DropTailQueueConfig::new(None, (path.queue_kb * 1e3) as usize, BwType::NetworkLayer);
        let control = core.add(&rate, || {
            BwCell::new(bandwidth, DropTailQueue::new(queue), BwType::NetworkLayer)
                .map_err(|e| anyhow!("{e:?}"))
        })?;
        rates.push((i, forward, control));
        core.link(from, &rate);
        core.link(&rate, &delay);
        if let (Some(port), true) = (&link.foreign, forward) {
            let foreign = format!("foreign{i}");
            core.add_port(&foreign, port)?;
            core.link(&foreign, &rate);
        }
    }
    Ok(rates)
}

/// Holds each packet for as long as the schedule says for the moment at which it arrived.
struct DelayEgress {
    packets: mpsc::UnboundedReceiver<StdPacket>,
    playing: Arc<Playing>,
    path: usize,
    forward: bool,
    timer: Timer,
    last: Instant,
    /// Draws losses.
    rng: Pcg64,
}

impl DelayEgress {
    /// How long a packet that arrived at `t` is held; `None`: it is dropped.
    fn hold(&mut self, t: Instant) -> Option<Duration> {
        let playing = self.playing.read().ok()?;
        let us = match &*playing {
            Some((s, start)) if self.path < s.paths() => {
                let since = t.checked_duration_since(*start);
                let t_us = since.map_or(-1, |since| since.as_micros() as i64);
                let lost = s.loss(self.path, self.forward, t_us);
                if lost > 0.0 && self.rng.random::<f64>() < lost {
                    return None;
                }
                s.delay_us(self.path, self.forward, t_us)
            }
            _ => REFERENCE_DELAY_US,
        };
        Some(Duration::from_micros(us.into()))
    }
}

#[async_trait]
impl Egress<StdPacket> for DelayEgress {
    async fn dequeue(&mut self) -> Option<StdPacket> {
        let mut packet = self.packets.recv().await?;
        let arrived = packet.get_timestamp();
        // `None` is how a cell tells rattan that there is nothing to forward.
        let leaves = (arrived + self.hold(arrived)?).max(self.last);
        self.last = leaves;
        self.timer.sleep_until(leaves).await.ok()?;
        packet.delay_until(leaves);
        Some(packet)
    }
}
