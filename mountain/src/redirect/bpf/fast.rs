// SPDX-License-Identifier: GPL-2.0-or-later
//! Fast backends on top of rules that nft carries out.
//!
//! The process that watches the firewall holds the programs by links ([`Fast`]), so that they end
//! with it, however it ends: from then on packets meet the nft rule again. The programs have maps of
//! their own, apart from those of rules whose backend the user named. Any command can take a rule
//! out of them ([`lower`]) or take them off ([`end`]).
//!
//! Only backends that go around the kernel's forwarding are used, so that connection tracking holds
//! no entry of a flow's rewritten packets. Therefore [`lower`] can hand running flows over: it gives
//! connection tracking the entries that it would have if nft had carried the flows from the start,
//! and then forgets them here.

use std::cell::Cell;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use libbpf_rs::{MapCore, MapFlags};
use nix::fcntl::{fcntl, FcntlArg};

use super::loaded::{linked, AttachedProgram, LoadedObject, Needs, OtherVersion, Prog};
use super::types::{mtn_rd_flags, mtn_rd_state};
use super::{backend_of, bytes_of, each_flow, enter, hooks, macs, rule_value, stats_of, take_out};
use super::{own, read_from, types, TableFlow, REPLY};
use crate::bpf::hooks::Order;
use crate::bpf::{coarse_ns, now_ns, ALIVE_NS};
use crate::host::descriptors;
use crate::netlink::conntrack::adopt::{adopt, Running, Stage};
use crate::netlink::conntrack::Redirected;
use crate::redirect::{Backend, Installed, Plan, Proto, Stats};

/// Closing, reset and half-open TCP flows, which are kept for a short time.
const BRIEF: u8 = (mtn_rd_flags::MTN_RD_CLOSING.0
    | mtn_rd_flags::MTN_RD_RESET.0
    | mtn_rd_flags::MTN_RD_HALF.0) as u8;
/// Links that are to end first have descriptors from this number on, or from half of this process's limit.
const MIDDLE: usize = 4096;
/// The map that holds when a process watched last.
const ALIVE_MAP: &str = "rd_alive";
/// Nanoseconds of a tick of a flow's clock.
const TICK_NS: u64 = 1 << 20;
/// How long flows without packets are kept, as the programs have it.
const UDP_IDLE: Duration = Duration::from_secs(180);
/// Of connection tracking for UDP without an answer (net.netfilter.nf_conntrack_udp_timeout).
const UDP_UNANSWERED: Duration = Duration::from_secs(30);
const TCP_IDLE: Duration = Duration::from_secs(5 * 24 * 3600);
const BRIEF_IDLE: Duration = Duration::from_secs(120);

/// Whether a plan goes around the kernel's forwarding with every packet of its flows.
pub(crate) fn goes_around(plan: &Plan) -> bool {
    match plan.backend {
        Backend::XdpRedirect | Backend::TcxPeer => true,
        Backend::Tcx => plan.snat.is_some(),
        _ => false,
    }
}

/// Programs and maps of this process.
#[derive(Default)]
pub struct Fast {
    loaded: Option<LoadedObject>,
    links: HashMap<(u32, Prog), OwnedFd>,
    /// Rules whose counters have begun.
    begun: HashMap<u32, Redirected>,
    alive: Alive,
}

impl Fast {
    /// Carries these rules from now on; their plans are of [`goes_around`]'s backends.
    ///
    /// # Errors
    /// What the kernel lacks or refuses; none of them is carried then.
    pub(crate) fn raise(&mut self, rules: &[Installed]) -> Result<()> {
        if rules.is_empty() {
            return Ok(());
        }
        let macs = macs()?;
        let values = rules.iter().map(|rule| rule_value(rule, &macs));
        let values = values.collect::<Result<Vec<_>>>()?;
        let needs = Needs::of_rules(&values);
        let there = linked()?;
        // What is attached stays one set, whatever became of this process's own handles.
        let mine = match self.loaded.take() {
            Some(loaded) => Some(loaded),
            None => LoadedObject::find(&there)?,
        };
        let loaded = &*self
            .loaded
            .insert(LoadedObject::complete(mine, &needs.programs())?);
        self.alive.say(loaded)?;
        let there = attach(&mut self.links, loaded, &needs, there)?;
        own::tell(loaded)?;
        let begun = &self.begun;
        let entered = rules.iter().zip(&values);
        enter(loaded, &there, entered, |installed| {
            // With many rules this takes long. Where it fails, the trial of the next rule does.
            let _ = self.alive.say(loaded);
            begun.get(&installed.id) != Some(&installed.rule.redirected())
        })?;
        let begin = rules.iter().map(|rule| (rule.id, rule.rule.redirected()));
        self.begun.extend(begin);
        Ok(())
    }

    /// From now on the programs leave all packets to nft when this is [`ALIVE`] ago. After such a time they go on doing so
    /// until [`Self::came_back`]: their flows have to be handed over first.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(crate) fn say_alive(&self) -> Result<()> {
        match &self.loaded {
            Some(loaded) => self.alive.say(loaded),
            None => Ok(()),
        }
    }

    /// Whether the programs leave all packets to nft, as nobody has watched for too long.
    pub(crate) fn was_away(&self) -> bool {
        self.alive.was_away.get()
    }

    /// Everything has been handed over to nft.
    pub(crate) fn came_back(&mut self) {
        self.alive = Alive::default();
    }

    /// The devices that its programs are at.
    pub(crate) fn devices(&self) -> BTreeSet<u32> {
        self.links.keys().map(|(ifindex, _)| *ifindex).collect()
    }

    /// Lets go of all where nothing here tells of its rules any more: programs go with a device that moves to another
    /// namespace, and would redirect there.
    ///
    /// # Errors
    /// When the kernel refuses to read what is there.
    pub(crate) fn let_go(&mut self) -> Result<()> {
        let rules = self.loaded.as_ref().map(LoadedObject::rules).transpose()?;
        if rules.is_some_and(|rules| !rules.is_empty()) {
            *self = Self::default();
        }
        Ok(())
    }

    /// Takes programs off that no rule needs any more, and has the others end in the right order. They hear which addresses
    /// this host has now. To be called after [`Self::raise`].
    ///
    /// # Errors
    /// When the kernel refuses to read or change what is there.
    pub fn trim(&mut self) -> Result<()> {
        let Some(loaded) = &self.loaded else {
            return Ok(());
        };
        let rules = loaded.rules()?;
        let needs = Needs::of_rules(rules.iter().map(|(_, rule)| rule));
        self.links.retain(|at, _| needs.0.contains(at));
        let targets = rules.iter().map(|(_, rule)| rule.target_dev).collect();
        order(&mut self.links, &targets);
        own::tell(loaded)
    }
}

/// After this the programs of a process that has said nothing leave all packets to nft.
const ALIVE: Duration = Duration::from_nanos(ALIVE_NS);

/// Whether this process watches, as the programs know it: see [`Fast::say_alive`].
#[derive(Default)]
struct Alive {
    /// When it has last told them.
    said: Cell<Option<Instant>>,
    /// It has not for too long: the programs have left packets to nft meanwhile.
    was_away: Cell<bool>,
}

impl Alive {
    fn say(&self, loaded: &LoadedObject) -> Result<()> {
        let now = Instant::now();
        let before = self.said.replace(Some(now));
        if before.is_some_and(|before| now - before > ALIVE) {
            self.was_away.set(true);
        }
        if self.was_away.get() {
            return Ok(());
        }
        let map = loaded.map(ALIVE_MAP)?;
        map.update(&0u32.to_ne_bytes(), &now_ns().to_ne_bytes(), MapFlags::ANY)
            .context("cannot tell the programs that the firewall is watched")
    }
}

/// Whether the fast programs leave all packets to nft, as the process that should watch stands still.
///
/// # Errors
/// When the kernel refuses to read what is there.
pub(crate) fn is_unattended() -> Result<bool> {
    let Some(loaded) = found()? else {
        return Ok(false);
    };
    let said = loaded
        .map(ALIVE_MAP)?
        .lookup(&0u32.to_ne_bytes(), MapFlags::ANY)?;
    let said = said.map_or(0, |said| read_from::<u64>(&said));
    Ok(coarse_ns().saturating_sub(said) > ALIVE_NS)
}

/// Attaches what is needed beside what is `there`; returns what is there then.
fn attach(
    links: &mut HashMap<(u32, Prog), OwnedFd>,
    loaded: &LoadedObject,
    needs: &Needs,
    there: Vec<AttachedProgram>,
) -> Result<Vec<AttachedProgram>> {
    // A device that has gone takes its programs off, and so may other commands.
    let places: HashSet<(u32, Prog)> = there.iter().map(|a| (a.ifindex, a.prog)).collect();
    links.retain(|at, _| places.contains(at));
    loaded.note();
    let mut is_new = false;
    for &(ifindex, prog) in &needs.0 {
        if links.contains_key(&(ifindex, prog)) {
            continue;
        }
        let link = hooks::link(prog.hook(), ifindex, loaded.program(prog), Order::First)
            .with_context(|| format!("cannot attach to {}", hooks::device_text(ifindex)))?;
        links.insert((ifindex, prog), link);
        is_new = true;
    }
    match is_new {
        true => linked(),
        false => Ok(there),
    }
}

/// Has what takes clients' packets in end before what translates the answers to them, if this process is killed: an
/// answer that is not translated ends its connection. At a device where a rule's target is, too, both are one.
///
/// The kernel closes what a process has had open from the highest descriptor down: `close_files` of fs/file.c goes up, and
/// puts each file in front of those before (`task_work_add`, kernel/task_work.c).
fn order(links: &mut HashMap<(u32, Prog), OwnedFd>, targets: &BTreeSet<u32>) {
    let middle = descriptors::limit().map_or(0, |limit| (limit / 2).min(MIDDLE)) as RawFd;
    for ((ifindex, prog), link) in links {
        let is_first = *prog != Prog::Out && !targets.contains(ifindex);
        if is_first == (link.as_raw_fd() >= middle) {
            continue;
        }
        let least = if is_first { middle } else { 0 };
        // Failing that, they end in another order.
        if let Ok(moved) = fcntl(&*link, FcntlArg::F_DUPFD_CLOEXEC(least)) {
            // SAFETY: it was made just now, and nobody else has it.
            *link = unsafe { OwnedFd::from_raw_fd(moved) };
        }
    }
}

fn found() -> Result<Option<LoadedObject>> {
    LoadedObject::find(&linked()?)
}

/// The same where rules are taken out. What another version has attached cannot be read: it is taken off, and its
/// flows pause until nft knows them.
fn found_or_cut() -> Result<Option<LoadedObject>> {
    match found() {
        Err(e) if e.is::<OtherVersion>() => cut().map(|()| None),
        found => found,
    }
}

/// Takes the programs off, whoever holds them.
fn cut() -> Result<()> {
    for link in linked()?.into_iter().filter_map(|a| a.link) {
        let _ = hooks::cut(link);
    }
    Ok(())
}

/// How a rule is carried: as the programs have it.
#[derive(Clone, Copy, Debug)]
pub struct Carried(types::mtn_rd_rule);

impl Carried {
    /// What moves its packets.
    pub fn backend(&self) -> Backend {
        backend_of(self.0.backend)
    }
}

impl PartialEq for Carried {
    fn eq(&self, other: &Self) -> bool {
        bytes_of(&self.0) == bytes_of(&other.0)
    }
}

/// How [`Fast::raise`] would carry these rules; what cannot be carried is left out.
///
/// # Errors
/// When the devices cannot be listed.
pub(crate) fn as_carried(rules: &[Installed]) -> Result<HashMap<u32, Carried>> {
    let macs = macs()?;
    let of = |installed: &Installed| {
        let value = rule_value(installed, &macs).ok()?;
        Some((installed.id, Carried(value)))
    };
    Ok(rules.iter().filter_map(of).collect())
}

/// Rules that are carried now, by number.
///
/// # Errors
/// When the kernel refuses to read what is there.
pub fn carried() -> Result<HashMap<u32, Carried>> {
    let Some(loaded) = found()? else {
        return Ok(HashMap::new());
    };
    let rules = loaded.rules()?.into_iter();
    Ok(rules.map(|(_, rule)| (rule.id, Carried(rule))).collect())
}

/// What the fast backends have counted of these rules.
///
/// # Errors
/// When the kernel refuses.
pub fn stats(ids: &[u32]) -> Result<Vec<Stats>> {
    stats_of(found()?, ids)
}

/// Leaves these rules to nft, with their running flows.
///
/// # Errors
/// When the kernel refuses to read or change what is there.
pub fn lower(ids: &BTreeSet<u32>) -> Result<()> {
    match found_or_cut()? {
        Some(loaded) if !ids.is_empty() => take_out(&loaded, ids, || {
            running(&loaded, ids).and_then(|flows| adopt(&flows))
        }),
        _ => Ok(()),
    }
}

/// Ends these rules, their running flows, and what they have counted.
///
/// # Errors
/// As [`lower`].
pub(crate) fn forget(ids: &BTreeSet<u32>) -> Result<()> {
    match found_or_cut()? {
        Some(loaded) => super::forget(&loaded, ids),
        None => Ok(()),
    }
}

/// Takes all fast backends off, of whichever version, with the running flows of this one's handed over to nft.
///
/// # Errors
/// When the kernel refuses; the programs are off nevertheless.
pub fn end() -> Result<()> {
    let lowered = match carried() {
        Err(e) if e.is::<OtherVersion>() => Ok(()),
        carried => carried.and_then(|all| lower(&all.into_keys().collect())),
    };
    cut()?;
    lowered
}

/// Flows of these rules that are not over.
fn running(loaded: &LoadedObject, ids: &BTreeSet<u32>) -> Result<Vec<Running>> {
    let ticks = (now_ns() / TICK_NS) as u32;
    let mut all = Vec::new();
    each_flow(loaded, |flow| {
        if flow.f.flags & REPLY != 0 || !ids.contains(&flow.f.rule) {
            return;
        }
        let limit = match flow.proto {
            p if p == Proto::Udp.number() => UDP_IDLE,
            _ if flow.f.flags & BRIEF != 0 => BRIEF_IDLE,
            _ => TCP_IDLE,
        };
        // Another processor's clock may be ahead of this one's.
        let idle = ticks
            .wrapping_sub(flow.f.touched_ticks)
            .cast_signed()
            .max(0);
        let idle = Duration::from_nanos(u64::from(idle.cast_unsigned()) * TICK_NS);
        let ([client, from], [source, to]) = (flow.before, flow.after);
        let stage = stage_of(flow);
        all.extend(limit.checked_sub(idle).map(|left| Running {
            proto: flow.proto,
            client,
            from,
            source,
            to,
            left: match (flow.proto == Proto::Udp.number(), stage) {
                (true, Stage::Begun) => left.min(UDP_UNANSWERED),
                _ => left,
            },
            stage,
        }));
    })?;
    Ok(all)
}

fn stage_of(flow: &TableFlow) -> Stage {
    let Some(state) = flow.half_open else {
        return Stage::Established;
    };
    let is = |what: mtn_rd_state| u32::from(state) & what.0 != 0;
    let answered = is(mtn_rd_state::MTN_RD_ANSWERED);
    let midway = flow.proto == Proto::Tcp.number() && !is(mtn_rd_state::MTN_RD_SYN);
    match (midway, answered) {
        (true, answered) => Stage::Midway { answered },
        (false, true) => Stage::Answered,
        (false, false) => Stage::Begun,
    }
}
