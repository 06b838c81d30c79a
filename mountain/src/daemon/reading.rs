// SPDX-License-Identifier: GPL-2.0-or-later
//! Following the kernel's routing beside measuring, and when nothing is steered.
//!
//! A full routing table takes a second to read and a while to write. Probes must not wait for either,
//! so both run on threads of their own, one job at a time. Changes that come meanwhile are read
//! together by the next job, and jobs take a quarter of the time at most, or half of it while rules or paths' devices change.
//!
//! Fail closed: when a change cannot be followed as a whole, after the loop has stood still, and while a large part of the
//! table is being written, nothing is steered and new flows choose nothing. What running flows need (rules,
//! tables, marks) stays, and rules and tables follow each reading. Datagrams of sockets that are not connected go as
//! the kernel sends them, since a rule or route that is not followed yet may take them.

use std::future::pending;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tokio::task::{spawn_blocking, JoinHandle};
use tracing::{info, warn};

use super::topology::{left, moved};
use super::{Daemon, ADOPT_MS, FORWARDING, TRY_AGAIN};
use crate::bpf::tries::{self, Entries, Shared};
use crate::bpf::{destinations, now_ns, ProgramGroup, Steer, SteerMode, ALIVE_NS};
use crate::netlink;
use crate::steer::PolicyKind;
use crate::topology::{read_on_blocking, Filter, Memory, Topology};

/// After a job that took a time, the next one waits for so many times that.
const REST: u32 = 3;
/// Longest such pause.
const REST_MAX: Duration = Duration::from_secs(10);
/// Where a reading takes longer, nothing is steered from a change of the rules until it is followed.
const SLOW: Duration = Duration::from_millis(200);
/// Changes to the tables of destinations that are written at once: some milliseconds.
const AT_ONCE: usize = 5_000;

/// What is under way on a thread of its own.
struct Job {
    is_reading: bool,
    /// How long it took, however late the loop asks, and what it gives.
    handle: JoinHandle<(Duration, Result<Topology>)>,
}

impl Job {
    fn begin(is_reading: bool, work: impl FnOnce() -> Result<Topology> + Send + 'static) -> Self {
        let handle = spawn_blocking(move || {
            let since = Instant::now();
            let done = work();
            (since.elapsed(), done)
        });
        Self { is_reading, handle }
    }

    /// What is said if it breaks off.
    fn interrupted(&self) -> &'static str {
        match self.is_reading {
            true => "reading the routing state was interrupted",
            false => "writing the routes was interrupted",
        }
    }
}

/// Reads the kernel's routing when asked to.
pub(crate) struct Reader {
    filter: Filter,
    memory: Arc<Mutex<Memory>>,
    job: Option<Job>,
    asked: bool,
    /// Placing is paused for something that the reading under way may not show.
    unsettled: bool,
    /// What cannot wait as long as routes has changed, and the reading under way may not show it.
    is_pressing: bool,
    /// The same for a rule.
    rule_unread: bool,
    /// The rules when the last reading began ([`netlink::rules_hash`]).
    rules: Option<u64>,
    not_before: Instant,
    /// How long the last reading took.
    took: Duration,
}

impl Reader {
    pub(crate) fn new(filter: Filter, memory: Memory) -> Self {
        Self {
            filter,
            memory: Arc::new(Mutex::new(memory)),
            job: None,
            asked: false,
            unsettled: false,
            is_pressing: false,
            rule_unread: false,
            rules: None,
            not_before: Instant::now(),
            took: Duration::ZERO,
        }
    }

    /// Reads what the routing is from now on, once what is under way has ended.
    pub(crate) fn ask(&mut self) {
        self.asked = true;
    }

    /// As [`Reader::ask`], and until then nothing is placed.
    pub(crate) fn ask_before_placing(&mut self) {
        self.asked = true;
        self.unsettled = true;
    }

    /// As [`Reader::ask`], sooner than for routes, of which those of a full table change all the time.
    pub(super) fn ask_soon(&mut self) {
        self.asked = true;
        self.is_pressing = true;
        self.not_before = self.not_before.min(Instant::now() + self.took);
    }

    /// Whether there are other rules than when the last reading began, or that cannot be told.
    pub(super) fn has_other_rules(&self) -> bool {
        self.rules.is_none() || self.rules != netlink::rules_hash().ok()
    }

    /// Whether the last reading that began shows all for which placing is paused.
    pub(crate) fn is_settled(&self) -> bool {
        !self.unsettled
    }

    /// Whether a reading, or the writing of tables, is asked for or under way.
    pub(crate) fn is_busy(&self) -> bool {
        self.asked || self.job.is_some()
    }

    /// Writes large tables; [`Reader::next`] gives the topology back that they are of.
    pub(crate) fn fill(&mut self, fill: Box<Fill>) {
        self.job = Some(Job::begin(false, move || fill.write()));
    }

    /// Waits for the next reading. Cancel safe.
    pub(crate) async fn next(&mut self) -> Result<Topology> {
        loop {
            if let Some(job) = &mut self.job {
                let ended = (&mut job.handle).await.context(job.interrupted());
                let is_reading = job.is_reading;
                self.job = None;
                let (took, done) = ended.unwrap_or_else(|e| (self.took, Err(e)));
                if is_reading {
                    self.took = took;
                }
                self.not_before = Instant::now() + (took * REST).min(REST_MAX);
                if self.is_pressing {
                    self.ask_soon();
                }
                return done;
            }
            if !self.asked {
                pending::<()>().await;
            }
            tokio::time::sleep_until(self.not_before.into()).await;
            self.asked = false;
            self.unsettled = false;
            self.is_pressing = false;
            self.rule_unread = false;
            self.rules = netlink::rules_hash().ok();
            let (filter, memory) = (self.filter.clone(), Arc::clone(&self.memory));
            let read = move || read_on_blocking(&filter, &memory);
            self.job = Some(Job::begin(true, read));
        }
    }
}

/// Tables of destinations to be written, and the reading that they are of.
pub(crate) struct Fill {
    topology: Topology,
    tables: Vec<(Shared, Entries)>,
}

impl Fill {
    fn write(self) -> Result<Topology> {
        for (table, wanted) in self.tables {
            tries::lock(&table).write(wanted)?;
        }
        Ok(self.topology)
    }
}

impl Daemon {
    /// What is done with running flows now.
    pub(super) fn mode(&self) -> SteerMode {
        match (&self.suspended, self.policy_kind) {
            (Some(_), _) | (None, PolicyKind::Ecmp) => SteerMode::Pass,
            (None, _) => SteerMode::Steer,
        }
    }

    /// What is done with new flows now. The rule of argmax-load does not place them.
    pub(super) fn placing_mode(&self) -> SteerMode {
        match self.policy_kind {
            PolicyKind::ArgmaxLoad => SteerMode::Pass,
            _ => self.mode(),
        }
    }

    pub(super) fn apply_mode(&mut self) {
        let (mode, placing) = (self.mode(), self.placing_mode());
        if let Some(steer) = &mut self.steer {
            steer.set_mode(mode, ADOPT_MS);
        }
        if let Some(placer) = &mut self.placer {
            placer.set_mode(placing);
        }
    }

    /// Follows a reading, or says what must be written first because it takes long. `settled`: it shows all
    /// for which placing is paused.
    pub(super) fn follow(&mut self, read: Result<Topology>, settled: bool) -> Option<Box<Fill>> {
        // Before all that may fail or take long.
        let routed = match &read {
            Ok(topology) => self.route_uplinks(topology),
            Err(_) => Ok(()),
        };
        let done = match read.map(|topology| self.large_part(topology)) {
            Ok(Err(fill)) => {
                self.suspend("the kernel's routes are being written to the tables".into());
                return Some(fill);
            }
            Ok(Ok(topology)) => {
                self.snat_sources.judge_again();
                self.take_moves();
                self.adopt(topology)
            }
            Err(e) => Err(e),
        };
        // Where others' rules do not come first, or a mark leads nowhere, nothing is placed.
        let done = done.and(routed);
        let done = match settled {
            true => done.and_then(|()| self.catch_up()),
            false => done,
        };
        match done {
            Ok(()) => {
                self.failed_at = None;
                // A rule that has come meanwhile is not followed yet.
                if !self.reader.rule_unread && self.suspended.take().is_some() {
                    info!("the kernel's routing is followed again: steering goes on");
                    self.apply_mode();
                }
                if let Some(placer) = self.placer.as_mut().filter(|_| settled) {
                    placer.resume();
                }
            }
            Err(e) => self.cannot_follow(&e),
        }
        self.resolve_missing();
        self.tick();
        None
    }

    /// Has what is in the kernel of the uplinks' rules and tables follow a reading.
    fn route_uplinks(&mut self, topology: &Topology) -> Result<()> {
        match self.placer.as_mut().filter(|placer| !placer.is_idle()) {
            Some(placer) => placer.route(topology),
            None => Ok(()),
        }
    }

    /// A rule of others came or went. It may take packets that are a group's by the last reading, so that moving them
    /// would go past it. Where a reading takes milliseconds, that is not worth a pause.
    pub(super) fn rule_changed(&mut self) {
        self.reader.rule_unread = true;
        self.reader.ask_soon();
        if self.reader.took > SLOW && self.suspended.is_none() {
            let why = "a routing rule has changed, and the routes have to be read again";
            self.suspended = Some(why.into());
            self.apply_mode();
            // Ordinary, and over in seconds: no warning each time that a rule comes and goes.
            info!("nothing is steered for now: {why}");
        }
    }

    /// Tells the programs that the loop turns. Where it has stood still for so long that they have left everything to the
    /// kernel, what is known of the host is as old: nothing is steered until its routing was read anew.
    pub(super) fn say_alive(&mut self) {
        let at_ns = now_ns();
        let before_ns = self.alive_ns.replace(at_ns).unwrap_or(at_ns);
        let still_ns = at_ns.saturating_sub(before_ns);
        // Before the programs go on.
        if still_ns >= ALIVE_NS && !self.options.dry_run {
            self.stood_still(Duration::from_nanos(still_ns));
        }
        if let Some(steer) = &mut self.steer {
            steer.say_alive(at_ns);
        }
        if let Some(placer) = &mut self.placer {
            placer.say_alive(at_ns);
        }
    }

    /// Has the routing read anew after a pause of the daemon itself, and steers nothing until then. What is being read
    /// may be as old as the pause, and a timer may be due before the changes of that time are heard of.
    fn stood_still(&mut self, time: Duration) {
        let seconds = time.as_secs();
        self.suspend(format!(
            "the daemon stood still for {seconds} s, and the routes have to be read again"
        ));
        self.pause_placing();
        self.reader.ask_before_placing();
        self.rule_changed();
    }

    /// Steers nothing until what has failed, which is tried again soon, has gone well.
    pub(super) fn cannot_follow(&mut self, why: &anyhow::Error) {
        self.failed_at = Some(Instant::now());
        self.suspend(format!("{why:#}"));
    }

    /// Steers nothing until a change was followed as a whole. Says why, once.
    pub(super) fn suspend(&mut self, why: String) {
        let known = self.suspended.replace(why.clone());
        if known.is_none() {
            self.apply_mode();
        }
        if known.as_ref() != Some(&why) {
            warn!("nothing is steered for now: {why}");
        }
    }

    /// Follows a change again that could not be followed, as that of a device which was down again by
    /// then. Looks now and then for what nothing announces: another MTU of IPv6, that the program was taken off, and,
    /// while something is not adopted for that, that a bridge has learned where the gateway is, or that a ppp device has
    /// its session.
    pub(super) fn try_again(&mut self) {
        let mut suspended = self.paths.topology().suspended.iter();
        let may_be_over = suspended.any(|suspended| !suspended.whole);
        let may_be_over = may_be_over || self.paths.topology().unlearned;
        let failed = self.failed_at.is_some_and(|at| at.elapsed() >= TRY_AGAIN);
        if failed {
            self.failed_at = Some(Instant::now());
            self.reader.ask();
        }
        if self.looked_at.elapsed() >= FORWARDING {
            self.looked_at = Instant::now();
            if may_be_over || self.paths.has_other_mtu() {
                self.reader.ask();
            }
            self.look_for_program();
        }
    }

    /// Has a reading attach the program again where somebody has taken it off. Flows have gone by the kernel's paths
    /// since then: they stay there, as after any pause.
    fn look_for_program(&mut self) {
        let taken_off = self.steer.as_ref().map(Steer::taken_off);
        let devices = taken_off.unwrap_or_default().join(", ");
        if !devices.is_empty() {
            self.suspend(format!(
                "somebody has taken the steering program off {devices}"
            ));
            self.reader.ask_soon();
        }
    }

    /// The topology itself, where few destinations differ from those in the tables.
    fn large_part(&self, topology: Topology) -> Result<Topology, Box<Fill>> {
        // As they will be written: what the firewall holds is not to be moved, not even until then.
        let held = self.firewall.held(&topology);
        let group = |prefixes| ProgramGroup {
            members: Vec::new(),
            prefixes,
        };
        let groups = moved(&topology, &held).into_iter().map(group);
        let groups: Vec<ProgramGroup> = groups.collect();
        let mut tables = Vec::new();
        if let Some(steer) = &self.steer {
            let wanted = destinations(&groups, &left(&topology, &held));
            tables.push((steer.dests(), wanted));
        }
        if let Some(placer) = &self.placer {
            tables.push(placer.destinations(&topology, &groups));
        }
        tables.retain(|(table, wanted)| tries::lock(table).changes(wanted) > AT_ONCE);
        match tables.is_empty() {
            true => Ok(topology),
            false => Err(Box::new(Fill { topology, tables })),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_pressing_does_not_wait_as_long_as_routes() {
        let took = Duration::from_millis(200);
        let mut reader = Reader::new(Filter::default(), Memory::default());
        reader.took = took;
        reader.not_before = Instant::now() + REST_MAX;
        reader.ask();
        assert!(reader.not_before > Instant::now() + took);
        reader.ask_soon();
        assert!(reader.not_before <= Instant::now() + took);
        reader.rule_unread = true;
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().build().unwrap();
        runtime.block_on(reader.next()).unwrap();
        assert!(!reader.is_pressing && !reader.rule_unread && !reader.is_busy());
        assert!(reader.took > Duration::ZERO && reader.took != took);
        // What comes while a reading is under way is read after it, and as soon.
        let took = Duration::from_millis(50);
        let since = Instant::now();
        let most = runtime.block_on(async {
            let job = Job::begin(true, move || {
                std::thread::sleep(took);
                Ok(Topology::default())
            });
            while !job.handle.is_finished() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let most = since.elapsed();
            reader.job = Some(job);
            reader.ask_soon();
            // However late it is asked for, its time is its own.
            tokio::time::sleep(took).await;
            reader.next().await.unwrap();
            most
        });
        assert!(reader.took >= took && reader.took <= most);
        assert!(reader.asked && reader.is_pressing);
        assert!(reader.not_before <= Instant::now() + reader.took);
    }
}
