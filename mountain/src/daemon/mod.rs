// SPDX-License-Identifier: GPL-2.0-or-later
//! The daemon behind `mountain up`: measures, decides, writes the verdict to the kernel.
//!
//! One thread, one loop. Answers to probes are read before anything else, so that a pause of the
//! process is not mistaken for a late path; then netlink changes, then timers and requests. Changes
//! that come without pause take turns with these ([`Monitor::next`]).
//! Whatever is attached is owned by [`Steer`] and goes with it, also by `kill -9`.

mod feed;
pub(crate) mod firewall;
mod headerless;
mod ids;
mod neighbours;
pub(crate) mod probing;
mod reading;
mod report;
mod server;
pub(crate) mod snat_sources;
pub(crate) mod topology;

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use futures::future::select_all;
use nix::sys::signal::Signal;
use tokio::signal::unix::{self, signal, SignalKind};
use tokio::time::{interval, MissedTickBehavior};
use tracing::{info, warn};

use crate::bpf::flows::MoveLog;
use crate::bpf::foreign::{self, CgroupProgram};
use crate::bpf::{self, PathTraffic, Settings, Steer, SteerProgram};
use crate::config::Config;
use crate::control::presence;
use crate::control::run_dir::RunDir;
use crate::control::status::{CgroupStatus, MoveStatus};
use crate::host::{signals, sysctl};
use crate::measure::probe::Prober;
use crate::netlink::{self, Change, Monitor};
use crate::placement::{self, Placer};
use crate::redirect::watch::Watching;
use crate::steer::policy::{self, Event, Policy};
use crate::steer::PolicyKind;
use crate::topology::{Filter, Memory, Path, PathMasks, MAX_PATHS};
use feed::Feed;
use firewall::Follower;
use headerless::Headerless;
use neighbours::Kept;
use reading::Reader;
use snat_sources::SnatSources;
use topology::{no_groups, Paths};

/// How often the policy looks at the clock, ...
const TICK: Duration = Duration::from_millis(10);
/// ... and while every path is probed as seldom as on an idle host: the processor of a laptop wants to sleep. From 100 ms
/// on it would be a pause to the policy.
const TICK_IDLE: Duration = Duration::from_millis(80);
/// How often rates are taken and single moves are collected.
const RATES: Duration = Duration::from_millis(100);
/// How often that is done where there is no path to measure or steer: the processor of a laptop wants to sleep.
const RATES_WITHOUT_PATHS: Duration = Duration::from_millis(500);
/// After attaching or a change of mode, flows first seen stay where the kernel has them.
const ADOPT_MS: u64 = 2_000;
/// A change that could not be followed is tried again after this.
const TRY_AGAIN: Duration = Duration::from_secs(1);
/// Where new flows do not choose their path, as the program for that failed, it is tried again after this.
const PLACE_AGAIN: Duration = Duration::from_secs(30);
/// The longest that this grows to, as it fails again and again.
const PLACE_SELDOM: Duration = Duration::from_secs(3600);
/// Poll interval for what nothing announces: forwarding, translation, cgroups, the MTU of IPv6, detached programs.
const FORWARDING: Duration = Duration::from_secs(5);
/// Samples from which on a path's cost is held against others.
const COSTED: u64 = 20;
const CANNOT_START: &str = "cannot start: `mountain check` says what is missing here";
/// Single moves that are kept for `explain`.
const MOVES_KEPT: usize = 10_000;

/// How `mountain up` was asked to run.
#[derive(Clone, Debug, Default)]
pub(crate) struct UpOptions {
    /// Which devices and prefixes are steered.
    pub filter: Filter,
    /// Decide and explain, attach nothing.
    pub dry_run: bool,
    /// Stay when there is no multipath route, and wait for one.
    pub wait: bool,
}

/// What is remembered of a path for as long as the daemon runs, also while no route uses it.
#[derive(Clone, Debug, Default)]
struct PathMemory {
    probed_at: Option<Instant>,
    /// When one of its probes was answered last.
    answered_at: Option<Instant>,
    /// Since when none of its probes was answered.
    unanswered_since: Option<Instant>,
    said_unanswered: bool,
    /// Its traffic at the last look, and when that was, µs.
    traffic: Option<(PathTraffic, u64)>,
    /// bit/s over the last [`RATES`].
    rate_bps: f64,
    /// New flows that were placed on it by the last look.
    placed: Option<u64>,
    /// Since when its gateway's neighbour entry is missing.
    unresolved_since: Option<Instant>,
    /// When everyone on the link was last asked for its gateway.
    asked_at: Option<Instant>,
    /// That its gateway's last address is put back; `None` once the gateway is known to have it.
    kept: Option<Kept>,
    /// That it has gone dark.
    dark: Option<Kept>,
    /// Until when its gateway may answer before the last address is put back.
    asking_until: Option<Instant>,
    /// The kernel asks whether the gateway is still there.
    probed: bool,
    /// The device has lost its carrier.
    lost_carrier: bool,
    /// When its last route went, and what the path was, if it had answered by then.
    gone: Option<(Instant, Path)>,
    /// The gateway's address then, while the path is taken to answer still and its present one is not known yet.
    last_mac: Option<[u8; 6]>,
}

/// What a path says whose device is switched off, or has no carrier.
const NO_LINK: &str = "no link";

struct Daemon {
    config: Config,
    options: UpOptions,
    started: Instant,
    policy_kind: PolicyKind,
    policy: Policy,
    prober: Prober,
    paths: Paths,
    snat_sources: SnatSources,
    steer: Option<Steer>,
    firewall: Follower,
    /// Programs at cgroups whose sockets' flows are not moved.
    held_cgroups: Vec<CgroupProgram>,
    /// The same as it was said last.
    told_cgroups: Vec<CgroupStatus>,
    /// Made when there is a group whose flows choose when they start.
    placer: Option<Placer>,
    /// A patched kernel, which is told what is measured.
    feed: Option<Feed>,
    forwarding_at: Instant,
    /// Whether a topology was adopted, an empty one too.
    has_adopted: bool,
    /// When the last change could not be followed as a whole.
    failed_at: Option<Instant>,
    /// When the last look was for what nothing announces.
    looked_at: Instant,
    /// Why new flows do not choose their path although some may.
    not_placing: Option<NotPlacing>,
    /// Why it is not known which devices carry out IPsec.
    ipsec_failed: Option<String>,
    /// Why nothing is steered for now.
    suspended: Option<String>,
    /// When the programs were last told that the loop turns, ns of CLOCK_MONOTONIC.
    alive_ns: Option<u64>,
    /// Reads the kernel's routing where it has changed, and writes it to the tables.
    reader: Reader,
    move_log: Option<MoveLog>,
    moves: VecDeque<MoveStatus>,
    /// By path id.
    memory: [PathMemory; MAX_PATHS],
    seq: u64,
    /// Probes since the last look at the traffic, of those that the program counts.
    probes_seen: u64,
    /// Packets to hosts on the paths' links by the last look.
    to_link: u64,
    /// Whose packets the program does not count.
    headerless: Headerless,
    /// When the policy last looked at the clock.
    ticked_at: Instant,
    /// Time of the last decision that was logged.
    decided_us: u64,
    stop: bool,
}

/// New flows do not choose their path, as the program for that failed.
struct NotPlacing {
    at: Instant,
    /// After this it is tried again.
    wait: Duration,
    why: String,
}

/// Microseconds of CLOCK_MONOTONIC: the clock of the policy.
fn now_us() -> u64 {
    bpf::now_ns() / 1000
}

/// Runs until it is told to stop. `ready` is called once the control socket answers.
pub(crate) async fn run(config: Config, options: UpOptions, ready: impl FnOnce()) -> Result<()> {
    let run_dir = RunDir::of_this_namespace()?;
    let Some(lock) = run_dir.lock()? else {
        bail!(run_dir.already_runs());
    };
    let announced = presence::announce();
    let result = match announced {
        Ok(None) => {
            // Ours, so that the other one's is missed.
            run_dir.remove(&lock);
            Err(run_dir.already_runs().into())
        }
        // Where that fails no program loads either, and what says so comes later.
        Ok(Some(_)) | Err(_) => run_locked(config, options, &run_dir, ready).await,
    };
    // While its folder is there: who sees one without the other takes it for a daemon elsewhere.
    drop(announced);
    run_dir.remove(&lock);
    result
}

/// Waits for any of these signals.
async fn which(signals: &mut [(Signal, unix::Signal)]) -> Signal {
    let each = signals.iter_mut().map(|(signal, come)| {
        Box::pin(async {
            come.recv().await;
            *signal
        })
    });
    select_all(each).await.0
}

/// From the first reading to the last answer. The order of the steps is what matters here, so it is one function.
async fn run_locked(
    config: Config,
    options: UpOptions,
    run_dir: &RunDir,
    ready: impl FnOnce(),
) -> Result<()> {
    run_dir.begin_own_log().context("cannot empty the log")?;
    config.hints.iter().for_each(|hint| warn!("{hint}"));
    sysctl::can_be_read().context(CANNOT_START)?;
    // Listening before reading: a change in between is seen as a change.
    let mut monitor = Monitor::new().context("cannot listen to the kernel's routing changes")?;
    let placed = placement::left_behind(&config.placement)?;
    let mut reader = Reader::new(options.filter.clone(), Memory::going_on(placed));
    reader.ask();
    let topology = reader.next().await?;
    if topology.groups.is_empty() && !options.wait {
        bail!("{}", no_groups(&topology, &options.filter));
    }
    // Before anything is put into the kernel, so that each of these ends by taking it out again.
    let asks = signals::asks_daemon_to_end();
    let listen = |to| Ok((to, signal(SignalKind::from_raw(to as i32))?));
    let mut ends = asks.iter().map(listen).collect::<io::Result<Vec<_>>>()?;
    let mut relieve = signal(SignalKind::user_defined1())?;
    let dry_run = options.dry_run;
    // Rules of `mountain redirect` may be carried faster while somebody watches the firewall.
    let _redirects = match dry_run {
        true => None,
        false => Watching::start(),
    };
    let mut server = server::Server::bind(run_dir)?;
    let mut daemon = Daemon::new(config, options, reader).context(CANNOT_START)?;
    foreign::note_own_in(run_dir.path());
    daemon.first_look_at_firewall(&topology).await;
    daemon.look_at_ipsec();
    daemon.adopt(topology).context(CANNOT_START)?;
    daemon.take_over()?;
    daemon.say_unknown_devices();
    daemon.resolve_missing();
    ready();

    let mut rates = ticker(RATES);
    let mut pathless = ticker(RATES_WITHOUT_PATHS);
    while !daemon.stop {
        let due = daemon.next_probe();
        let late = daemon.next_late();
        let tick = daemon.next_tick();
        let has_paths = daemon.paths.any();
        tokio::select! {
            biased;
            answer = daemon.prober.recv(), if has_paths => daemon.answered(&answer),
            change = monitor.next() => daemon.changed(change),
            () = daemon.firewall.changed() => daemon.firewall_changed(),
            read = daemon.reader.next() => {
                let settled = daemon.reader.is_settled();
                if let Some(fill) = daemon.follow(read, settled) {
                    daemon.reader.fill(fill);
                }
            }
            () = at(due) => daemon.send_probes(),
            () = at(late) => daemon.tick(),
            () = at(Some(tick)), if has_paths => daemon.tick(),
            _ = rates.tick(), if has_paths => daemon.look_around(),
            _ = pathless.tick(), if !has_paths => daemon.look_around(),
            (request, reply) = server.next() => {
                let response = daemon.respond(request);
                let _ = reply.send(response);
            }
            to = which(&mut ends), if !ends.is_empty() => daemon.end(to),
            _ = relieve.recv() => daemon.leave_to_the_next(),
        }
    }
    match dry_run {
        true => info!("stopping; nothing was attached"),
        false => info!("stopping: detaching from all devices"),
    }
    // Give the last answer time to leave before the socket closes.
    server.finish().await;
    Ok(())
}

/// A timer that does not make up for missed ticks: a burst of probes measures itself.
fn ticker(period: Duration) -> tokio::time::Interval {
    let mut t = interval(period);
    t.set_missed_tick_behavior(MissedTickBehavior::Delay);
    t
}

/// Waits until then; for ever, if never.
async fn at(when: Option<Instant>) {
    match when {
        Some(when) => tokio::time::sleep_until(when.into()).await,
        None => std::future::pending().await,
    }
}

impl Daemon {
    fn end(&mut self, signal: Signal) {
        info!("{signal} asks to stop");
        self.stop = true;
    }

    fn new(config: Config, options: UpOptions, reader: Reader) -> Result<Self> {
        let steer = if options.dry_run {
            None
        } else {
            Some(Steer::load(&settings(&config))?)
        };
        let move_log = steer
            .as_ref()
            .map(|s| MoveLog::new(s.move_map()))
            .transpose()?;
        Ok(Self {
            policy: Policy::new(Vec::new(), Vec::new(), rand::random())
                .with_tolerance(config.steer.tolerance_ms * 1e3),
            prober: Prober::new(&[])?,
            paths: Paths::default(),
            snat_sources: SnatSources::default(),
            started: Instant::now(),
            policy_kind: PolicyKind::Mountain,
            steer,
            firewall: Follower::start(),
            held_cgroups: Vec::new(),
            told_cgroups: Vec::new(),
            placer: None,
            feed: if options.dry_run { None } else { Feed::open() },
            forwarding_at: Instant::now(),
            has_adopted: false,
            failed_at: None,
            not_placing: None,
            looked_at: Instant::now(),
            ipsec_failed: None,
            suspended: None,
            alive_ns: None,
            reader,
            move_log,
            moves: VecDeque::new(),
            memory: std::array::from_fn(|_| PathMemory::default()),
            seq: 0,
            probes_seen: 0,
            to_link: 0,
            headerless: Headerless::default(),
            ticked_at: Instant::now(),
            decided_us: 0,
            stop: false,
            config,
            options,
        })
    }

    fn changed(&mut self, change: Change) {
        match change {
            Change::Link {
                ifindex,
                up,
                deleted,
            } => {
                let paths = self.paths.on_device(ifindex);
                if up && !paths.is_empty() {
                    // Until it is read, the program moves nothing there that has to leave another path.
                    self.reader.ask_soon();
                }
                for path in paths {
                    let why = if deleted { "device deleted" } else { NO_LINK };
                    self.usable(path, up, why);
                    if !deleted {
                        self.carrier(path, up);
                    }
                }
                self.device_changed(ifindex);
                if deleted {
                    if let Some(steer) = &mut self.steer {
                        steer.forget(ifindex);
                    }
                    if let Some(placer) = &mut self.placer {
                        placer.forget(ifindex);
                    }
                }
                self.pause_placing();
                self.reader.ask_before_placing();
            }
            Change::Neighbour {
                ifindex,
                addr,
                mac,
                probed,
                confirmed,
                ..
            } => {
                let paths = self.paths.by_gateway(ifindex, addr);
                for path in &paths {
                    self.neighbour(*path, mac);
                    self.memory[*path].probed = probed;
                    if confirmed {
                        self.memory[*path].kept = None;
                    }
                }
                if paths.is_empty() {
                    return; // Any host on a link may make entries as often as it likes.
                }
            }
            // Until it is read, nothing is to be placed.
            Change::Preference => {
                self.pause_placing();
                self.reader.ask_before_placing();
            }
            Change::Rule => self.rule_changed(),
            Change::Overrun => {
                self.pause_placing();
                self.reader.ask_before_placing();
                if self.reader.has_other_rules() {
                    self.rule_changed();
                }
            }
            Change::Ipsec => self.look_at_ipsec(),
            Change::Routing => self.reader.ask(),
        }
        self.tick();
    }

    fn pause_placing(&mut self) {
        if let Some(placer) = &mut self.placer {
            placer.pause();
        }
    }

    fn usable(&mut self, path: usize, usable: bool, why: &'static str) {
        self.policy.event(Event::Usable {
            path,
            at_us: now_us(),
            usable,
            why,
        });
    }

    /// Leaves paths alone on devices that carry out IPsec by themselves.
    fn look_at_ipsec(&mut self) {
        let devices = netlink::offloading_devices();
        let failed = devices.as_ref().err().map(ToString::to_string);
        if let Some(e) = failed.as_ref().filter(|_| self.ipsec_failed != failed) {
            warn!("cannot list the IPsec states, so flows are moved on no device: {e}");
        }
        self.ipsec_failed = failed;
        for device in self.paths.set_offloading(devices.ok()) {
            for path in self.paths.on_device(device) {
                self.write_path(path);
            }
        }
    }

    fn write_path(&mut self, path: usize) {
        if let (Some(steer), Some(config)) = (&mut self.steer, self.paths.path_config(path)) {
            if let Err(e) = steer.set_path(path, &config) {
                warn!("{e:#}");
            }
        }
    }

    fn tick(&mut self) {
        self.ticked_at = Instant::now();
        if let Some(placer) = &mut self.placer {
            placer.look_at_counters();
        }
        self.say_unresolved();
        self.put_back_unanswered();
        self.ask_for_kept();
        self.ask_for_dark();
        if let Some(verdict) = self.policy.tick(now_us()) {
            tracing::debug!(?verdict, "verdict");
        }
        self.say_decisions();
        self.write_verdict();
    }

    /// Writes the masks that the present policy gives each group.
    pub(super) fn write_verdict(&mut self) {
        let Some(steer) = &mut self.steer else { return };
        let verdict = self.policy.current();
        let mut preferred = [None; 2];
        for (i, &masks) in verdict.groups.iter().enumerate() {
            if self.paths.masks_changed(i, masks) {
                steer.set_masks(i, masks);
            }
            if let Some((ipv6, alive)) = self.paths.preferred(i, masks.alive) {
                preferred[usize::from(ipv6)] = Some(alive);
            }
            if let Some(placer) = &mut self.placer {
                let latency = self.policy.for_new_flows(i);
                let in_use = masks.latency & !self.paths.reserves_of(i, &self.config);
                placer.set_masks(i, PathMasks { latency, ..masks }, in_use);
            }
        }
        if let Some(placer) = &mut self.placer {
            placer.follow_preferred(preferred);
        }
    }

    /// Tells the policy what has left by each path since the last look. Our own probes and neighbour discovery are no
    /// traffic to it, or no host would ever be idle.
    fn take_traffic(&mut self, at_us: u64) {
        let Some(steer) = &self.steer else { return };
        let traffic = |path| Some((path, steer.traffic(path).ok()?));
        let ids = self.paths.ids().into_iter();
        let now: Vec<(usize, PathTraffic)> = ids.filter_map(traffic).collect();
        let told = steer.packets_to_link().unwrap_or(self.to_link);
        // Of all paths together: a probe may be counted on another one that is the same on the wire.
        let packets: u64 = now
            .iter()
            .filter_map(|(path, traffic)| {
                let (before, _) = self.memory[*path].traffic?;
                Some(traffic.packets.saturating_sub(before.packets))
            })
            .sum();
        let to_link = told.saturating_sub(std::mem::replace(&mut self.to_link, told));
        let is_idle = packets <= std::mem::take(&mut self.probes_seen) + to_link;
        let paths = now.iter().filter_map(|(path, _)| self.paths.path(*path));
        let headerless = paths.filter(|path| !path.ethernet);
        let devices: BTreeSet<u32> = headerless.map(|path| path.key.ifindex).collect();
        self.headerless.look(&devices, at_us);
        for (path, traffic) in now {
            let memory = &mut self.memory[path];
            let last = memory.traffic.replace((traffic, at_us));
            let Some((before, then_us)) = last.filter(|(_, then_us)| at_us > *then_us) else {
                continue;
            };
            let seconds = (at_us - then_us) as f64 / 1e6;
            let bps = |now: u64, before: u64| now.saturating_sub(before) as f64 * 8.0 / seconds;
            memory.rate_bps = bps(traffic.bytes, before.bytes);
            let headerless = self.paths.path(path).filter(|path| !path.ethernet);
            let is_busy = headerless.map(|path| self.headerless.is_busy(path.key.ifindex));
            self.policy.event(Event::Egress {
                path,
                at_us,
                rate_bps: match is_busy {
                    None if is_idle => 0.0,
                    None => memory.rate_bps,
                    Some(false) => 0.0,
                    // It is not known how much.
                    Some(true) => 1.0,
                },
                latency_bps: bps(traffic.latency_bytes, before.latency_bytes),
            });
        }
    }

    fn look_around(&mut self) {
        self.say_alive();
        if let Some(placer) = &mut self.placer {
            placer.end_grace();
        }
        self.take_rates();
        self.try_again();
    }

    fn take_rates(&mut self) {
        let at_us = now_us();
        self.take_traffic(at_us);
        if let Some(steer) = &mut self.steer {
            steer.settle_weights();
            for (path, delays) in self.policy.path_delays(at_us).iter().enumerate() {
                let us = |v: u64| u32::try_from(v).unwrap_or(u32::MAX);
                steer.set_delays(path, us(delays.recent_max_us), us(delays.min_us));
            }
        }
        if let Some(placer) = &self.placer {
            for path in self.paths.ids() {
                let placed = placer.placed(path);
                let before = self.memory[path].placed.replace(placed).unwrap_or(placed);
                self.policy.event(Event::Placed {
                    path,
                    at_us,
                    flows: placed.saturating_sub(before),
                });
            }
        }
        self.feed_kernel();
        self.take_moves();
        self.look_for_snat_sources();
        if let Some(placer) = &mut self.placer {
            placer.give_up_dead();
            if self.forwarding_at.elapsed() >= FORWARDING {
                self.forwarding_at = Instant::now();
                placer.look_around();
                // While nothing is steered, `paths` may be older than what rules and tables have followed.
                if self.suspended.is_none() && placer.may_release() {
                    let groups = self.paths.groups();
                    if let Err(e) = self.update_placer(&groups) {
                        self.cannot_follow(&e);
                    }
                }
            }
        }
        self.try_to_place();
        self.say_unanswered();
    }

    /// Says which `[[path]]` tables of the configuration fit no path.
    fn say_unknown_devices(&self) {
        let ids = self.paths.ids();
        let paths = ids.iter().filter_map(|id| self.paths.path(*id));
        let paths = paths.map(|path| (path.ifname.clone(), path.key.gateway));
        for unused in self.config.unused_paths(paths) {
            warn!("configuration: {unused}: no route that is steered uses it");
        }
    }

    /// Ends, as another daemon is about to start: what keeps flows on their uplinks stays, as after
    /// `kill -9`.
    fn leave_to_the_next(&mut self) {
        if let Some(placer) = self.placer.take() {
            placer.leave();
            info!(
                "the uplinks' rules and tables stay for the next run; `mountain down` removes them"
            );
        }
        self.stop = true;
    }

    /// Switches the policy, and the program where the policy has one of its own.
    ///
    /// # Errors
    /// When the kernel does not take the program. The policy stays as it was then.
    fn set_policy(&mut self, name: PolicyKind) -> Result<()> {
        if let Some(steer) = &mut self.steer {
            steer.run(program_of(name)).with_context(|| {
                format!(
                    "cannot switch to {name}: the policy {} stays in force",
                    self.policy_kind
                )
            })?;
            if let Ok(run_dir) = RunDir::of_this_namespace() {
                foreign::note_own_in(run_dir.path());
            }
        }
        self.policy_kind = name;
        self.policy.set_mode(match name {
            PolicyKind::MinRtt => policy::Mode::MinRtt,
            _ => policy::Mode::Mountain,
        });
        self.apply_mode();
        info!("policy: {}", name.name());
        self.tick();
        Ok(())
    }
}

/// The data plane's part of the configuration.
pub(crate) fn settings(config: &Config) -> Settings {
    Settings::new(rand::random(), config.steer.flow_table_entries)
}

/// The program that carries a policy out.
fn program_of(name: PolicyKind) -> SteerProgram {
    match name {
        PolicyKind::Mountain | PolicyKind::Ecmp | PolicyKind::MinRtt => SteerProgram::Steer,
        PolicyKind::ArgmaxLoad => SteerProgram::ArgmaxLoad,
    }
}
