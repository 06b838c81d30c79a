// SPDX-License-Identifier: GPL-2.0-or-later
//! Watching the firewall, so that rules may be carried by something faster than nft.
//!
//! Theory of operation. A fast backend skips hooks of the firewall. It is right only where nothing
//! at these hooks could matter, and only for as long as somebody looks. One process per network
//! namespace does ([`run`]): it hears of every change of the ruleset, and of devices, routes and
//! settings ([`sources`]). After each it decides anew for every rule whose backend is automatic,
//! takes away what is no longer right first, with running flows handed over to nft, and then adds
//! what has become right. The programs are held by this process and end with it ([`Fast`]). The nft
//! rule is always there underneath, and is put back if something removes it.
//!
//! When the picture is incomplete, everything is left to nft. The programs do so themselves when nobody has said for some
//! seconds that it still watches, as it is stopped or hangs (bpf/common/alive.h).

mod far;
mod sources;

use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::rc::Rc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use nix::fcntl::{Flock, FlockArg};
use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::bpf::fast::{self, Carried, Fast};
use super::preflight::firewall;
use super::preflight::HostReadings;
use super::store::Store;
use super::{actions, nft, Backend, Finding, Installed, Proto};
use crate::bpf::hooks;
use crate::host::atomic_file::is_at;
use crate::host::capabilities;
use crate::host::folder;
use crate::host::text::count;
use crate::netlink::ruleset::Ruleset;
use actions::{Beside, SHOWN};
use far::FarEnds;
use sources::{Heard, Notifications};

/// How often is looked at what nothing announces.
const POLL: Duration = Duration::from_millis(250);
/// How long a decision waits for other commands before everything is left to nft.
const LOCK_WAIT: Duration = Duration::from_millis(300);
/// What failed is tried again after so many polls.
const RETRY_POLLS: u32 = 4;
/// How often far ends are looked at again.
const FAR_LOOK: Duration = Duration::from_secs(5);
/// After a round, this many times as long passes before the next one that no change of the firewall asks for.
const REST: u32 = 9;
/// How often one that waits looks whether it may watch, milliseconds.
const STANDBY_MS: u16 = 1000;

/// Watches until `stop` is readable. `say` gets lines for the user; `ready` is called once the rules are as they should
/// be; `changed` before each look at a host that has changed otherwise than in its firewall, and again soon if it
/// returns true. While another process of this network namespace watches, this one waits to take its place.
///
/// # Errors
/// When the kernel refuses what is needed for it.
pub fn run(
    stop: BorrowedFd,
    say: impl Fn(&str),
    ready: impl Fn(),
    mut changed: impl FnMut() -> bool,
) -> Result<()> {
    let Some(_alone) = Alone::wait(stop, &say, &ready)? else {
        return Ok(());
    };
    if let Some(why) = hooks::refusal() {
        say(&format!(
            "this process may not use bpf() ({why}): rules stay by nft"
        ));
    }
    let mut sources = Notifications::open().context("cannot hear of changes: run as root")?;
    let mut watcher = Watcher {
        fast: Fast::default(),
        firewall: None,
        refused: HashMap::new(),
        failed: None,
        far: FarEnds::default(),
        seen: HostReadings::default(),
        lines: Vec::new(),
    };
    let mut heard = Heard {
        firewall: true,
        rest: true,
        stop: false,
    };
    let (mut polls, mut again) = (0, false);
    let mut is_ready = false;
    let (mut rests_until, mut far_at) = (Instant::now(), Instant::now());
    let mut rest = Duration::ZERO;
    while !heard.stop {
        polls = if heard.anything() { 0 } else { polls + 1 };
        let begin = Instant::now();
        let far = !watcher.far.is_empty() && begin >= far_at;
        let unheard = far || ((watcher.failed.is_some() || again) && polls % RETRY_POLLS == 0);
        if heard.anything() || (unheard && begin >= rests_until) {
            if heard.rest || again {
                again = changed();
            }
            watcher.round(heard, far);
            sources.poll_devices(watcher.fast.devices());
            let end = Instant::now();
            rest = (end - begin) * REST;
            rests_until = end + rest;
            if far || heard.rest {
                far_at = end + FAR_LOOK;
            }
        }
        watcher.say_alive();
        watcher.lines.drain(..).for_each(|line| say(&line));
        if !std::mem::replace(&mut is_ready, true) {
            ready();
        }
        heard = sources
            .wait(stop, POLL, rest)
            .context("cannot wait for changes")?;
    }
    // Connections go on by nft. Commands wait meanwhile, unless one takes too long itself.
    let _locked = Store::open_within(LOCK_WAIT);
    fast::end()
}

/// Watches on a thread of this process for as long as the value lives.
pub(crate) struct Watching {
    stop: EventFd,
    thread: Option<JoinHandle<()>>,
}

impl Watching {
    /// In the calling thread's network namespace. `None`: this process lacks the privilege to find
    /// programs and other namespaces (CAP_SYS_ADMIN), or it cannot start a thread; rules stay with nft.
    pub fn start() -> Option<Self> {
        if !capabilities::is_admin() {
            return None;
        }
        let stop = EventFd::from_flags(EfdFlags::EFD_CLOEXEC).ok()?;
        let fd = stop.as_fd().try_clone_to_owned().ok()?;
        let work = move || {
            let say = |line: &str| tracing::info!("redirect: {line}");
            // The process has more to do until it is ready.
            if let Err(e) = run(fd.as_fd(), say, || {}, || false) {
                tracing::warn!("nobody watches the firewall for redirects: {e:#}");
            }
        };
        let thread = thread::Builder::new().name("redirects".to_owned());
        Some(Self {
            thread: Some(thread.spawn(work).ok()?),
            stop,
        })
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        let _ = self.stop.write(1);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// One process of a network namespace watches.
struct Alone {
    path: PathBuf,
    _lock: Flock<File>,
}

impl Alone {
    /// `None`: it is time to end.
    fn wait(stop: BorrowedFd, say: impl Fn(&str), ready: impl Fn()) -> Result<Option<Self>> {
        let mut told = false;
        loop {
            if let Some(alone) = Self::try_new()? {
                return Ok(Some(alone));
            }
            if !told {
                say("another process watches the firewall for redirects: this one waits for its end");
                ready();
                told = true;
            }
            let mut fds = [PollFd::new(stop, PollFlags::POLLIN)];
            let poll = poll(&mut fds, PollTimeout::from(STANDBY_MS));
            if poll.is_ok_and(|ready| ready > 0) {
                return Ok(None);
            }
        }
    }

    /// The file of this network namespace.
    fn path() -> Result<PathBuf> {
        let folder = Store::folder()?;
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        Ok(folder.with_file_name(format!("watch-{name}")))
    }

    /// `None`: another process watches.
    fn try_new() -> Result<Option<Self>> {
        let path = Self::path()?;
        if let Some(base) = path.parent() {
            folder::make_own(base).map_err(|e| folder::cannot_make(base, e))?;
        }
        loop {
            let mut options = File::options();
            options.write(true).create(true).truncate(false).mode(0o600);
            let file = options
                .open(&path)
                .map_err(|e| folder::cannot_make(&path, e))?;
            let Ok(lock) = Flock::lock(file, FlockArg::LockExclusiveNonblock) else {
                return Ok(None);
            };
            if is_at(&lock, &path) {
                return Ok(Some(Self { path, _lock: lock }));
            }
        }
    }
}

/// Removes the file that a killed watcher has left in this network namespace.
///
/// # Errors
/// The file is there and cannot be opened.
pub fn clear() -> Result<()> {
    if Alone::path()?.exists() {
        // Dropped at once, if nobody watches.
        Alone::try_new()?;
    }
    Ok(())
}

impl Drop for Alone {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

struct Watcher {
    fast: Fast,
    /// As it was when last decided.
    firewall: Option<Rc<Ruleset>>,
    /// Rules that the kernel did not take, and why: said once.
    refused: HashMap<u32, String>,
    /// Why the last round failed: said once, and tried again soon.
    failed: Option<String>,
    /// What hangs on the far ends of veths, of which nothing tells.
    far: FarEnds,
    /// What looks at the host keep for the next one.
    seen: HostReadings,
    /// Lines for the user. They are printed once other commands can go on: a terminal may stop them (Ctrl-S).
    lines: Vec<String>,
}

/// What carries a rule, if not nft alone, and why not.
type Choice = (Installed, Result<(), String>);

/// What is to become of rules.
struct Choices {
    /// Of those that are not fixed, by number.
    choices: HashMap<u32, Choice>,
    /// Those by nft that get another source.
    moved: Vec<Installed>,
}

impl Watcher {
    /// `far`: far ends are to be looked at.
    fn round(&mut self, heard: Heard, far: bool) {
        if !heard.anything() && self.failed.is_none() {
            let now = self.firewall.as_ref();
            let beat = || drop(self.fast.say_alive());
            let same = now.is_some_and(|now| !self.far.have_changed(&mut self.seen, now, beat));
            // Where another command is at work, they are looked at again later.
            if same || Store::open_within(LOCK_WAIT).is_err() {
                return;
            }
        }
        match self.decide(heard, far) {
            Ok(()) => self.failed = None,
            Err(e) => self.leave_all(&format!("{e:#}")),
        }
    }

    /// Leaves everything to nft, until the next round.
    fn leave_all(&mut self, why: &str) {
        self.firewall = None;
        let left = match fast::end().and_then(|()| self.fast.trim()) {
            Ok(()) => String::new(),
            Err(left) => format!("; {left:#}"),
        };
        let failed = format!("{why}: all redirects are left to nft{left}");
        if self.failed.as_ref() != Some(&failed) {
            self.lines.push(failed.clone());
            self.failed = Some(failed);
        }
    }

    /// Tells the programs that somebody watches. Where nobody did for some seconds, as this process was stopped, they have
    /// left packets to nft meanwhile, and their flows have to be handed over.
    fn say_alive(&mut self) {
        match self.fast.say_alive() {
            Err(e) => self.leave_all(&format!("{e:#}")),
            Ok(()) if self.fast.was_away() => {
                self.leave_all("this process stood still for some seconds");
                self.fast.came_back();
            }
            Ok(()) => {}
        }
    }

    /// For work that takes as long as there are rules.
    fn beat(&self) {
        // Where it fails, so it does at the end of the round, which says so.
        let _ = self.fast.say_alive();
    }

    fn decide(&mut self, heard: Heard, far: bool) -> Result<()> {
        let mut store = Store::open_within(LOCK_WAIT)?;
        if let Some(damage) = store.damage() {
            bail!("the list of rules cannot be read ({damage})");
        }
        if store.is_empty() {
            self.firewall = None;
            self.far = FarEnds::default();
            self.seen = HostReadings::default();
            fast::end()?;
            self.fast = Fast::default();
            return Ok(());
        }
        self.put_back(&mut store)?;
        let read = firewall::ruleset().context("cannot read the firewall")?;
        let before = self.firewall.as_ref().filter(|before| ***before == read);
        let same = before.is_some();
        let now = before.map_or_else(|| Rc::new(read), Rc::clone);
        let is_news = !heard.firewall || heard.rest || self.failed.is_some();
        let beat = || drop(self.fast.say_alive());
        if same && !is_news && !(far && self.far.have_changed(&mut self.seen, &now, beat)) {
            return Ok(());
        }
        let rules = store.all()?;
        let mut seen = std::mem::take(&mut self.seen);
        seen.with(&now);
        let mut beside = Beside::read(&store)?;
        let Choices { choices, mut moved } = self.choose(&mut beside, &mut seen, &rules)?;
        // The others: those that nothing is chosen for.
        let by_bpf = rules.iter().any(|i| i.plan.backend.is_bpf());
        moved.extend(actions::to_follow(&store, |i| i.fixed || by_bpf)?);
        let carried = self.lower(&choices)?;
        let by_far_ends = choices.values().filter(|choice| is_by_far_ends(choice));
        let by_far_ends = by_far_ends.map(|(rule, _)| &rule.rule);
        let by_far_ends = by_far_ends.inspect(|_| self.beat());
        self.far = FarEnds::read(&mut seen, &beside.in_force, by_far_ends)?;
        self.raise(choices, &carried);
        self.fast.trim()?;
        actions::follow(&mut store, &moved)?;
        for line in actions::followed(&moved) {
            self.lines.push(line);
        }
        self.firewall = Some(now);
        seen.forget();
        self.seen = seen;
        Ok(())
    }

    /// The nft rule is always there; rules of an earlier version, which had chosen something else by
    /// itself, get one.
    fn put_back(&mut self, store: &mut Store) -> Result<()> {
        match nft::repair(store.all_of(Backend::Nft)?)? {
            0 => {}
            back => self.lines.push(nft::lost(back)),
        }
        let mut old = store.all()?;
        old.retain(|i| !i.fixed && i.plan.backend.is_bpf());
        if old.is_empty() {
            return Ok(());
        }
        let as_nft = |one: &Installed| -> Result<Installed> {
            let found = actions::look_alone(store, &one.rule, Some(one.id), false, None)?;
            let plan = actions::choose(found, None)?;
            let one = one.clone();
            Ok(Installed { plan, ..one })
        };
        let new: Vec<Installed> = old.iter().map(as_nft).collect::<Result<_>>()?;
        // All at once: of another version's, single ones cannot be taken off.
        actions::renew(store, &old, &new)?;
        for one in &old {
            self.lines.push(format!(
                "rule {} ({}) was by {}, which an earlier version had chosen: it is by nft now",
                one.id, one.rule, one.plan.backend
            ));
        }
        Ok(())
    }

    /// The fastest right backend of each rule that is not fixed.
    fn choose(
        &self,
        beside: &mut Beside,
        seen: &mut HostReadings,
        rules: &[Installed],
    ) -> Result<Choices> {
        let (mut choices, mut moved) = (HashMap::new(), Vec::new());
        let fixed = rules.iter().find(|i| i.plan.backend.is_bpf());
        let own = actions::own_addresses()?;
        for rule in rules
            .iter()
            .filter(|i| !i.fixed && i.plan.backend == Backend::Nft)
        {
            self.beat();
            let choice = match fixed {
                Some(fixed) => Err(format!(
                    "rule {} is by {}, and one set of programs is used at a time",
                    fixed.id, fixed.plan.backend
                )),
                None => {
                    let beside = beside.except(Some(rule.id));
                    let findings = actions::look(beside, seen, &rule.rule, false, None)?;
                    moved.extend(actions::moved(rule, &findings, &own));
                    let plan = actions::on_top(&findings).cloned();
                    plan.ok_or_else(|| why_not(&findings))
                }
            };
            let mut carried = rule.clone();
            let choice = choice.map(|plan| carried.plan = plan);
            choices.insert(rule.id, (carried, choice));
        }
        // Who shares a target keeps its flows in one place.
        let mut targets: HashMap<(Proto, SocketAddr), bool> = HashMap::new();
        for (rule, choice) in choices.values() {
            let all = targets
                .entry((rule.rule.proto, rule.rule.to))
                .or_insert(true);
            *all &= choice.is_ok();
        }
        for (rule, choice) in choices.values_mut() {
            if choice.is_ok() && !targets[&(rule.rule.proto, rule.rule.to)] {
                *choice = Err(format!("another rule sends to {} by nft", rule.rule.to));
            }
        }
        Ok(Choices { choices, moved })
    }

    /// Takes away what is not right, or not right in this way; returns what stays.
    fn lower(&mut self, choices: &HashMap<u32, Choice>) -> Result<HashMap<u32, Carried>> {
        let wanted: Vec<Installed> = choices
            .values()
            .filter(|(_, choice)| choice.is_ok())
            .map(|(rule, _)| rule.clone())
            .collect();
        let wanted = fast::as_carried(&wanted)?;
        let mut carried = fast::carried()?;
        if carried.is_empty() {
            self.fast.let_go()?;
        }
        let wrong = carried
            .iter()
            .filter(|(id, carried)| wanted.get(id) != Some(carried));
        let wrong: BTreeSet<u32> = wrong.map(|(id, _)| *id).collect();
        if wrong.is_empty() {
            return Ok(carried);
        }
        let lowered = fast::lower(&wrong);
        for id in wrong.iter().take(SHOWN) {
            let by = carried[id].backend();
            match choices.get(id) {
                Some((rule, Err(why))) => self.lines.push(format!(
                    "rule {id} ({}) is by nft now instead of {by}: {why}",
                    rule.rule
                )),
                _ => self.lines.push(format!("rule {id} is no longer by {by}")),
            }
        }
        self.say_more(wrong.len());
        carried.retain(|id, _| !wrong.contains(id));
        lowered.map(|()| carried)
    }

    /// Adds what has become right to what is `carried`.
    fn raise(&mut self, choices: HashMap<u32, Choice>, carried: &HashMap<u32, Carried>) {
        self.refused.retain(|id, _| choices.contains_key(id));
        let right = choices.into_values().filter(|(_, choice)| choice.is_ok());
        let mut new: Vec<Installed> = right.map(|(rule, _)| rule).collect();
        new.retain(|rule| !carried.contains_key(&rule.id));
        new.sort_by_key(|rule| rule.id);
        // Where one of many is in the way, it is found by halves.
        let (mut done, mut rest) = (Vec::new(), vec![&new[..]]);
        while let Some(some) = rest.pop() {
            match (self.fast.raise(some), some) {
                (Ok(()), _) => done.extend_from_slice(some),
                (Err(e), [one]) => {
                    let why = format!("{e:#}");
                    if self.refused.insert(one.id, why.clone()).as_ref() != Some(&why) {
                        let (id, by) = (one.id, one.plan.backend);
                        let rule = &one.rule;
                        self.lines
                            .push(format!("rule {id} ({rule}) stays by nft, not {by}: {why}"));
                    }
                }
                (Err(_), _) => {
                    let (first, last) = some.split_at(some.len() / 2);
                    rest.extend([last, first]);
                }
            }
        }
        self.raised(&done);
    }

    fn raised(&mut self, rules: &[Installed]) {
        for one in rules.iter().take(SHOWN) {
            let (id, by) = (one.id, one.plan.backend);
            let devices = [&one.plan.client_dev, &one.plan.target_dev];
            let names = devices.into_iter().flatten().map(|d| d.name.as_str());
            let names: Vec<&str> = names.collect();
            self.refused.remove(&id);
            self.lines.push(format!(
                "rule {id} ({}) is by {by} now, from {} on",
                one.rule,
                names.join(" to ")
            ));
        }
        self.say_more(rules.len());
    }

    /// How many rules there are besides those that were shown.
    fn say_more(&mut self, rules: usize) {
        if rules > SHOWN {
            self.lines
                .push(format!("and {} more", count(rules - SHOWN, "rule")));
        }
    }
}

/// Whether a rule is carried by what rests on far ends: on their features, size and master. By themselves these backends
/// are chosen on veths only.
fn is_by_far_ends((rule, choice): &Choice) -> bool {
    let backend = rule.plan.backend;
    choice.is_ok() && matches!(backend, Backend::XdpRedirect | Backend::TcxPeer)
}

/// Why no backend that goes around the firewall is right.
fn why_not(findings: &[Finding]) -> String {
    let backends = [Backend::TcxPeer, Backend::XdpRedirect, Backend::Tcx];
    let of = |backend: &Backend| findings.iter().find(|f| f.backend == *backend);
    let around: Vec<&Finding> = backends.iter().filter_map(of).collect();
    let mut notes = around
        .iter()
        .filter(|finding| finding.by_name_only)
        .flat_map(|finding| &finding.notes);
    notes
        .find(|note| note.contains("unless it is named"))
        .or_else(|| around.iter().find_map(|finding| finding.refused.first()))
        .map_or("no faster backend is right here", String::as_str)
        .to_owned()
}
