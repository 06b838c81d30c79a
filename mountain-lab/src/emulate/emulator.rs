// SPDX-License-Identifier: GPL-2.0-or-later
//! The emulated paths: one child process in the emulator's namespace that copies frames between
//! the hosts' devices, late by what the [`Schedule`] says.
//!
//! Built on rattan-core's lower layer: its AF_PACKET driver and its rate limit with a drop-tail
//! queue; the delay is a cell of our own, because it has to follow the same schedule that the
//! oracle reads. Per path and direction:
//!
//! ```text
//! device ── rate + queue ── scheduled delay or drop ── device
//! ```
//!
//! The process is single-threaded, locked in memory and of real-time priority: an emulator that
//! waits for the CPU adds delay that nobody configured. What is left of that error is measured on
//! the idle reference path.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::sync::{Arc, RwLock};
use std::time::Duration;

use anyhow::{anyhow, bail, ensure, Context, Result};
use async_trait::async_trait;
use once_cell::sync::OnceCell;
use rand::RngExt;
use rand_pcg::Pcg64;
use rattan_core::cells::bandwidth::queue::{DropTailQueue, DropTailQueueConfig};
use rattan_core::cells::bandwidth::{BwCell, BwCellConfig, BwCellControlInterface, BwType};
use rattan_core::cells::external::{VirtualEthernet, VirtualEthernetId};
use rattan_core::cells::{ControlInterface, Egress, Packet, StdPacket};
use rattan_core::core::RattanCore;
use rattan_core::metal::io::af_packet::AfPacketDriver;
use rattan_core::metal::timer::Timer;
use rattan_core::netem_trace::Bandwidth;
use rattan_env::{MacAddr, NetNs, VethCell};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::cell::EgressCell;
use super::hosts::Hosts;
use super::netns::die_with_parent;
use super::{LinkConfig, Port};
use crate::scenario::schedule::Schedule;
use crate::scenario::Scenario;

/// One-way delay of the reference path.
pub const REFERENCE_DELAY_US: u32 = 10_000;
/// Above everything else in the lab: a late workload is measured, a late emulator falsifies.
const RT_PRIORITY: i32 = 50;

/// What the child reads as the first line of its standard input.
#[derive(Debug, Serialize, Deserialize)]
struct Config {
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

/// The running child. Dropping it stops it.
pub struct Emulator {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Emulator {
    /// Starts the child in the emulator's namespace and waits until it forwards.
    pub fn start(hosts: &Hosts, scenario: &Scenario, seed: u64) -> Result<Self> {
        let exe = std::env::current_exe().context("the path of this program")?;
        Self::start_program(exe.as_os_str(), hosts, scenario, seed)
    }

    fn start_program(
        program: &std::ffi::OsStr,
        hosts: &Hosts,
        scenario: &Scenario,
        seed: u64,
    ) -> Result<Self> {
        let mut command = hosts.emulator.command(program);
        command
            .arg("emulate")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        die_with_parent(&mut command);
        let mut child = command.spawn().context("cannot start the emulator")?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let mut emulator = Emulator {
            child,
            stdin: stdin.expect("piped above"),
            stdout: BufReader::new(stdout.expect("piped above")),
        };
        let config = Config {
            links: hosts.links.clone(),
            scenario: scenario.clone(),
            folder: scenario.folder.clone(),
            seed,
        };
        emulator.say(&config)?;
        hosts.wait_until_joined()?;
        Ok(emulator)
    }

    /// Plays the schedule of a repeat, soon; returns when it starts (CLOCK_MONOTONIC).
    ///
    /// # Errors
    /// The child is gone.
    pub fn play(&mut self, repeat: u32, ahead: Duration) -> Result<u64> {
        self.say(&Order::Draw { repeat })?;
        let start_ns = monotonic_ns() + ahead.as_nanos() as u64;
        self.say(&Order::Play { start_ns })?;
        Ok(start_ns)
    }

    /// CPU time that the child has used so far, in seconds.
    pub fn cpu_seconds(&self) -> f64 {
        cpu_seconds(self.child.id()).unwrap_or(0.0)
    }

    fn say(&mut self, message: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_string(message)?;
        line.push('\n');
        let sent = self
            .stdin
            .write_all(line.as_bytes())
            .and_then(|()| self.stdin.flush());
        let mut answer = String::new();
        if sent.is_ok() {
            self.stdout.read_line(&mut answer)?;
        }
        ensure!(
            answer == "ready\n",
            "the emulator stopped ({:?})",
            self.child.try_wait()?
        );
        Ok(())
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// User and system CPU time of a process in seconds, from /proc.
pub fn cpu_seconds(pid: u32) -> Option<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may contain anything; fields are counted after it. proc(5): utime is
    // field 14, stime 15, in ticks of 1/100 s.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks: u64 = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
    Some(ticks as f64 / 100.0)
}

/// What the delay cells look up: changed by the control thread, read by the emulator's.
struct Playing {
    schedule: Option<Arc<Schedule>>,
    start: Instant,
}

/// The child's main function: reads its configuration from standard input, forwards until that
/// ends. Has to be called in the emulator's namespace.
pub fn child_main() -> Result<()> {
    let mut input = BufReader::new(std::io::stdin()).lines();
    let first = input
        .next()
        .ok_or_else(|| anyhow!("no configuration on standard input"))??;
    let mut config: Config = serde_json::from_str(&first).context("configuration")?;
    config.scenario.folder = config.folder.clone();
    config.scenario.read_traces()?;
    let playing = Arc::new(RwLock::new(Playing {
        schedule: None,
        start: Instant::now(),
    }));

    let runtime = Arc::new(
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?,
    );
    let cancel = CancellationToken::new();
    let mut core: RattanCore<AfPacketDriver> =
        RattanCore::new(runtime.clone(), cancel.child_token(), cancel.child_token());
    let mut ids = VethIds::default();
    // Drivers and timers register with the runtime when they are made.
    let context = runtime.enter();
    let mut rates = Rates::default();
    for (i, link) in config.links.iter().enumerate() {
        let joined = join(&mut core, &config, i, link, &playing, &mut ids);
        rates.0.extend(joined.with_context(|| format!("path {i}"))?);
    }
    drop(context);
    core.spawn_rattan().map_err(|e| anyhow!("{e:?}"))?;
    core.start_rattan().map_err(|e| anyhow!("{e:?}"))?;

    let (quit, mut quitting) = mpsc::channel::<()>(1);
    std::thread::spawn(move || {
        println!("ready");
        if let Err(e) = control(input, &config, &playing, &Arc::new(rates)) {
            eprintln!("emulator: {e:#}");
        }
        drop(quit);
    });
    // Only this thread, which runs every cell, becomes a real-time one.
    be_realtime()?;
    runtime.block_on(quitting.recv());
    // Ends with the pipe; the cells' tasks need no orderly end.
    std::process::exit(0)
}

fn control(
    input: impl Iterator<Item = std::io::Result<String>>,
    config: &Config,
    playing: &RwLock<Playing>,
    rates: &Arc<Rates>,
) -> Result<()> {
    let mut changes: Option<RateChanges> = None;
    let mut schedule: Option<Schedule> = None;
    for line in input {
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
                *playing.write().map_err(|_| anyhow!("a cell panicked"))? = Playing {
                    schedule: Some(Arc::new(schedule)),
                    start,
                };
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

/// CLOCK_MONOTONIC in ns: the clock of the workloads' time stamps and of `Instant`.
pub fn monotonic_ns() -> u64 {
    let now = nix::time::ClockId::CLOCK_MONOTONIC
        .now()
        .expect("the clock exists");
    now.tv_sec() as u64 * 1_000_000_000 + now.tv_nsec() as u64
}

pub fn be_realtime() -> Result<()> {
    use nix::sys::mman::{mlockall, MlockAllFlags};
    mlockall(MlockAllFlags::MCL_CURRENT | MlockAllFlags::MCL_FUTURE).context("mlockall")?;
    let param = libc::sched_param {
        sched_priority: RT_PRIORITY,
    };
    // SAFETY: plain system call on a valid struct; 0 is the calling thread.
    let ret = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &param) };
    if ret != 0 {
        bail!("SCHED_FIFO: {}", std::io::Error::last_os_error());
    }
    Ok(())
}

#[derive(Default)]
pub struct VethIds(u8);

impl VethIds {
    fn next(&mut self) -> VirtualEthernetId {
        self.0 += 1;
        let mut id = VirtualEthernetId::new();
        id.set_veth_id(self.0);
        id
    }
}

fn join(
    core: &mut RattanCore<AfPacketDriver>,
    config: &Config,
    i: usize,
    link: &LinkConfig,
    playing: &Arc<RwLock<Playing>>,
    ids: &mut VethIds,
) -> Result<Vec<(usize, bool, Arc<RateControl>)>> {
    let mut rates = Vec::new();
    let (client, server) = (format!("client{i}"), format!("server{i}"));
    add_port(core, &client, &link.client, ids)?;
    add_port(core, &server, &link.server, ids)?;
    let ends = [(&client, &server, true), (&server, &client, false)];
    for (from, to, forward) in ends {
        let delay = format!("delay-{from}");
        let cell = DelayEgress::cell(i, forward, playing.clone(), config.seed)?;
        core.build_cell(delay.clone(), |_| Ok(cell))
            .map_err(|e| anyhow!("{e:?}"))?;
        core.link_cell(delay.clone(), to.clone());
        let Some(path) = config.scenario.paths.get(i) else {
            // The reference path has no rate limit.
            core.link_cell(from.clone(), delay);
            continue;
        };
        let rate = format!("rate-{from}");
        let bandwidth = Bandwidth::from_bps((path.rate_mbit * 1e6) as u64);
        let queue =
            DropTailQueueConfig::new(None, (path.queue_kb * 1e3) as usize, BwType::NetworkLayer);
        let control = core
            .build_cell(rate.clone(), |_| {
                BwCell::new(bandwidth, DropTailQueue::new(queue), BwType::NetworkLayer)
            })
            .map_err(|e| anyhow!("{e:?}"))?;
        rates.push((i, forward, control));
        core.link_cell(from.clone(), rate.clone());
        core.link_cell(rate.clone(), delay);
        if let (Some(port), true) = (&link.foreign, forward) {
            let foreign = format!("foreign{i}");
            add_port(core, &foreign, port, ids)?;
            core.link_cell(foreign, rate);
        }
    }
    Ok(rates)
}

pub fn add_port(
    core: &mut RattanCore<AfPacketDriver>,
    name: &str,
    port: &Port,
    ids: &mut VethIds,
) -> Result<()> {
    let veth = |mac: [u8; 6]| -> Result<VethCell> {
        Ok(VethCell {
            name: port.device.clone(),
            index: nix::net::if_::if_nametoindex(port.device.as_str())?,
            mac_addr: MacAddr::new(mac),
            // Not used by the driver.
            ip_addr: (std::net::Ipv4Addr::UNSPECIFIED.into(), 0),
            peer: OnceCell::new(),
            namespace: NetNs::current()?,
        })
    };
    // The cell only refers weakly to its peer, whose address goes into every frame: the peer has
    // to live as long as the process.
    let (own, peer) = (Arc::new(veth(port.mac)?), Arc::new(veth(port.peer_mac)?));
    let _ = own.peer.set(Arc::downgrade(&peer));
    std::mem::forget(peer);
    let id = ids.next();
    core.build_cell(name.to_string(), move |_| {
        VirtualEthernet::<AfPacketDriver>::new(own, id)
    })
    .map_err(|e| anyhow!("{}: {e:?}", port.device))?;
    Ok(())
}

/// Holds each packet for as long as the schedule says for the moment at which it arrived.
struct DelayEgress {
    packets: mpsc::UnboundedReceiver<StdPacket>,
    playing: Arc<RwLock<Playing>>,
    path: usize,
    forward: bool,
    timer: Timer,
    last: Instant,
    /// Draws losses.
    rng: Pcg64,
}

impl DelayEgress {
    fn cell(
        path: usize,
        forward: bool,
        playing: Arc<RwLock<Playing>>,
        seed: u64,
    ) -> Result<EgressCell<Self>> {
        EgressCell::new(|packets| {
            Ok(DelayEgress {
                packets,
                playing,
                path,
                forward,
                timer: Timer::new().map_err(|e| anyhow!("{e:?}"))?,
                last: Instant::now(),
                rng: Pcg64::new(seed.into(), path as u128 * 2 + u128::from(forward)),
            })
        })
    }

    /// How long a packet that arrived at `t` is held; `None`: it is dropped.
    fn hold(&mut self, t: Instant) -> Option<Duration> {
        let playing = self.playing.read().ok()?;
        let (scheduled, start) = (playing.schedule.as_ref(), playing.start);
        let t_us = match t.checked_duration_since(start) {
            Some(since) => since.as_micros() as i64,
            None => -1,
        };
        let us = match scheduled {
            Some(s) if self.path < s.paths() => {
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
