// SPDX-License-Identifier: GPL-2.0-or-later
//! Adding and deleting rules: in steps that the journal knows, so that one that is killed between
//! two of them leaves something that the next command puts right.

mod choice;
mod follow;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::slice::from_ref;

use anyhow::{Error, Result};
use nix::net::if_::if_nametoindex;

use super::preflight::firewall::{self, Look, Passed};
use super::preflight::HostReadings;
use super::store::{Entry, RuleState, Store};
use super::{bpf, fixes, module, nft, recover, Backend, Fix, Installed, Rule, Stats};
use crate::host::namespaces::{named, within};
use crate::netlink::conntrack;

pub use choice::{check, choose, plan, Added, Wanted};
pub(super) use choice::{look, look_alone, on_top, Beside};
pub(crate) use follow::follow_all;
pub(super) use follow::{follow, followed, moved, own_addresses, to_follow};

/// Rules that are installed together, at most: so much nft takes at a time.
pub const BATCH: usize = 4096;

/// Messages about single rules at a time.
pub(super) const SHOWN: usize = 20;

/// Kills the process where a test wants that: after the step that `$MOUNTAIN_DIE_AFTER` names.
#[cfg(feature = "test-hooks")]
pub(super) fn crash_point(step: &str) {
    if std::env::var("MOUNTAIN_DIE_AFTER").is_ok_and(|at| at == step) {
        let _ = nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL);
    }
}

#[cfg(not(feature = "test-hooks"))]
pub(super) fn crash_point(_: &str) {}

/// Opens the store and puts right what a killed command or a lost or damaged journal has left; says so.
pub fn open(to_add: bool) -> Result<Store> {
    let store = match to_add {
        true => Store::open_to_add()?,
        false => Store::open()?,
    };
    let mut store = recover::as_the_kernel_has_it(store)?;
    let half_done = store.half_done()?;
    for (state, what, became) in [
        (RuleState::Adding, "added", "taken back"),
        (RuleState::Removing, "deleted", "finished"),
    ] {
        let of = half_done.iter().filter(|(found, _)| *found == state);
        let rules: Vec<Installed> = of.map(|(_, installed)| installed.clone()).collect();
        if rules.is_empty() {
            continue;
        }
        let became = match take_away(&mut store, &rules) {
            Ok(()) => became.to_owned(),
            // What works goes on until `del --all`, and no command is kept from its work.
            Err(e) if e.is::<bpf::OtherVersion>() => e.to_string(),
            Err(e) => return Err(e),
        };
        match &rules[..] {
            [one] => eprintln!(
                "mountain: a command was ended while it {what} rule {} ({}): {became}",
                one.id, one.rule
            ),
            many => eprintln!(
                "mountain: a command was ended while it {what} {} rules: {became}",
                many.len()
            ),
        }
    }
    Ok(store)
}

/// Has the kernel load its module if it is among these backends.
pub fn load_module(mut named: impl Iterator<Item = Backend>) {
    if named.any(|backend| backend == Backend::Module) {
        module::load();
    }
}

/// Notes what a command asks of rules that are there already: that their backend is fixed.
///
/// # Errors
/// When that cannot be written.
pub fn keep(store: &mut Store, rules: &[Installed]) -> Result<()> {
    let asked: HashSet<u32> = rules.iter().filter(|i| i.fixed).map(|i| i.id).collect();
    if asked.is_empty() {
        return Ok(());
    }
    let mut changed = store.parse(|entry| asked.contains(&entry.id))?;
    changed.retain(|installed| !installed.fixed);
    for installed in &mut changed {
        installed.fixed = true;
    }
    bpf::fast::lower(&changed.iter().map(|i| i.id).collect())?;
    store.replace(&changed)
}

/// Gives planned rules their numbers and installs them, in batches, each of which is installed as a
/// whole or not at all.
///
/// # Errors
/// Why a batch could not be; those before it stay.
pub fn put(store: &mut Store, mut new: Vec<Installed>) -> Result<Vec<Installed>> {
    if new.iter().any(|i| i.plan.backend.is_bpf()) {
        // Before the journal knows of it: what is not begun needs not be taken back.
        bpf::is_readable()?;
    }
    let ids = store.free_ids(new.len())?;
    for (installed, id) in new.iter_mut().zip(ids) {
        installed.id = id;
    }
    for batch in new.chunks(BATCH) {
        store.adding(batch)?;
        crash_point("journal");
        if let Err(e) = install(store, batch) {
            return match take_away(store, batch) {
                Ok(()) => Err(e),
                Err(left) => Err(e.context(half_made(&left))),
            };
        }
        crash_point("install");
        store.added(batch)?;
    }
    Ok(new)
}

/// What became of many.
#[derive(Debug, Default)]
pub struct AddedPossible {
    /// These were added just now.
    pub added: Vec<Installed>,
    /// So many were there.
    pub was: usize,
    /// These are not possible now.
    pub refused: Vec<Wanted>,
}

/// Adds those of the rules that are possible; `refused` gets why others are not, with their places.
///
/// # Errors
/// When what is there cannot be noted.
pub fn add_possible(
    store: &mut Store,
    wanted: &[Wanted],
    mut refused: impl FnMut(usize, Error),
) -> Result<AddedPossible> {
    let mut done = AddedPossible::default();
    let mut refuse = |done: &mut AddedPossible, at: usize, why| {
        done.refused.push(wanted[at].clone());
        refused(at, why);
    };
    let mut new = Vec::new();
    for (at, planned) in plan(store, wanted).into_iter().enumerate() {
        match planned {
            Ok(Added::New(installed)) => new.push((at, installed)),
            Ok(Added::Was(installed)) => {
                keep(store, &[installed])?;
                done.was += 1;
            }
            Err(e) => refuse(&mut done, at, e),
        }
    }
    for batch in new.chunks(BATCH) {
        let planned = batch.iter().map(|(_, planned)| planned.clone());
        if let Ok(added) = put(store, planned.collect()) {
            done.added.extend(added);
            continue;
        }
        // Which of them is wrong?
        for (at, planned) in batch {
            match put(store, vec![planned.clone()]) {
                Ok(added) => done.added.extend(added),
                Err(e) => refuse(&mut done, *at, e),
            }
        }
    }
    Ok(done)
}

/// What is said of rules that can neither be installed nor taken back.
fn half_made(left: &anyhow::Error) -> String {
    format!("this failed, and so did taking it back ({left:#}); `mountain redirect list` shows what is left")
}

fn install(store: &Store, rules: &[Installed]) -> Result<()> {
    fixes::apply(&fixes_of(store, rules)?)?;
    crash_point("fixes");
    if rules.iter().any(|i| i.plan.backend.is_bpf()) {
        // One set of programs at a time.
        bpf::fast::end()?;
    }
    for (backend, rules) in by_backend(rules) {
        match backend {
            Backend::Nft => {
                // Rules that are renewed are on record as installed, and are not there.
                let is_other = beside(&rules);
                let one = store.one(|e| e.is_by(backend) && is_other(&e))?;
                let others = || store.parse(|e| e.is_by(backend) && is_other(&e));
                nft::install(&rules, &one, others)?;
                forget_direct(&rules);
            }
            Backend::Module => module::install(&rules)?,
            _ => {
                bpf::install(&rules)?;
                forget_direct(&rules);
            }
        }
    }
    Ok(())
}

/// Has running UDP flows follow new rules.
fn forget_direct(rules: &[Installed]) {
    let rules: Vec<_> = rules.iter().map(|i| i.rule.redirected()).collect();
    warn(
        conntrack::forget_direct(&rules),
        "flows under way are not redirected until they pause",
    );
}

/// Tells what stands in the store beside these rules.
fn beside(these: &[Installed]) -> impl Fn(&Entry) -> bool {
    let these: HashSet<u32> = these.iter().map(|i| i.id).collect();
    move |entry| !these.contains(&entry.id)
}

/// What these rules need changed and no other rule has changed.
fn fixes_of(store: &Store, rules: &[Installed]) -> Result<Vec<Fix>> {
    let is_other = beside(rules);
    let others = store.fixes(|entry| is_other(&entry))?;
    let mut fixes: Vec<Fix> = Vec::new();
    for fix in rules.iter().flat_map(|i| &i.plan.fixes) {
        if !others.contains(fix) && !fixes.contains(fix) {
            fixes.push(fix.clone());
        }
    }
    Ok(fixes)
}

/// What is good enough without.
fn warn<T>(done: Result<T>, what: &str) {
    if let Err(e) = done {
        eprintln!("mountain: {e:#}: {what}");
    }
}

/// Deletes rules.
///
/// # Errors
/// What could not be done; the next command tries again. Of another version's rules by BPF, single ones are not
/// begun with.
pub fn del(store: &mut Store, rules: &[Installed]) -> Result<()> {
    let by_bpf = rules.iter().any(|i| i.plan.backend.is_bpf());
    if by_bpf && !are_last(store, rules, Backend::is_bpf) {
        bpf::is_readable()?;
    }
    store.removing(rules)?;
    crash_point("del-journal");
    take_away(store, rules)
}

/// Whether no rule by such a backend is left without these.
fn are_last(store: &Store, these: &[Installed], by: impl Fn(Backend) -> bool) -> bool {
    let is_other = beside(these);
    let mut entries = store.entries();
    !entries.any(|entry| by(entry.backend()) && is_other(&entry))
}

/// Takes away all of what there is of rules that are being added or deleted.
fn take_away(store: &mut Store, rules: &[Installed]) -> Result<()> {
    take_off(store, rules)?;
    store.removed(rules)
}

/// The same, and their records stay.
fn take_off(store: &Store, rules: &[Installed]) -> Result<()> {
    let is_other = beside(rules);
    // Then whichever version of this program has installed them does not matter.
    let last_by_bpf = are_last(store, rules, Backend::is_bpf);
    for (backend, rules) in by_backend(rules) {
        match backend {
            Backend::Nft => {
                let last = are_last(store, &rules, |by| by == backend);
                if rules.iter().any(|i| !i.fixed) {
                    bpf::fast::forget(&rules.iter().map(|i| i.id).collect())?;
                }
                nft::remove(&rules, last)?;
                crash_point("del-remove");
                // Rules that differ only in their device share connections: nothing tells whose they are.
                let others: Vec<_> = store.entries().filter(&is_other).collect();
                let is_shared = |rule: &Rule| {
                    let same = |e: &Entry| {
                        e.is_from(rule.proto, rule.from) && e.is_to(rule.proto, rule.to)
                    };
                    rule.dev.is_some() && others.iter().any(same)
                };
                let rules = rules.iter().map(|i| &i.rule).filter(|r| !is_shared(r));
                let rules: Vec<_> = rules.map(Rule::redirected).collect();
                let forgotten = conntrack::forget_redirected(&rules);
                warn(
                    forgotten,
                    "connections under way stay redirected until they end",
                );
            }
            Backend::Module => module::remove(&rules)?,
            _ if last_by_bpf => bpf::remove_all()?,
            _ => bpf::remove(&rules)?,
        }
    }
    crash_point("del-flows");
    fixes::undo(&fixes_of(store, rules)?)?;
    crash_point("del-fixes");
    Ok(())
}

/// Carries out rules anew, by plans that may be others. Their records stay, so that a rule is listed and can be brought
/// back, whatever happens in between.
///
/// # Errors
/// Why it could not be; they are not in force then.
pub(super) fn renew(store: &mut Store, old: &[Installed], new: &[Installed]) -> Result<()> {
    take_off(store, old)?;
    store.replace(new)?;
    crash_point("renew");
    install(store, new).map_err(|e| match take_off(store, new) {
        Ok(()) => e,
        Err(left) => e.context(half_made(&left)),
    })
}

/// Rules by what moves their packets.
fn by_backend(rules: &[Installed]) -> Vec<(Backend, Vec<Installed>)> {
    Backend::ALL
        .into_iter()
        .map(|backend| {
            let of = rules.iter().filter(|i| i.plan.backend == backend);
            (backend, of.cloned().collect::<Vec<_>>())
        })
        .filter(|(_, rules)| !rules.is_empty())
        .collect()
}

/// What rules have done, in their order.
pub fn stats(rules: &[Installed]) -> Result<Vec<Stats>> {
    // What is not in force has counted nothing.
    let nothing = rules.iter().map(|i| (i.id, Stats::of(i.id)));
    let mut all: BTreeMap<u32, Stats> = nothing.collect();
    for (backend, rules) in by_backend(rules) {
        let counted = match backend {
            Backend::Nft => {
                let on_top: Vec<u32> = rules.iter().filter(|i| !i.fixed).map(|i| i.id).collect();
                let mut counted = nft::stats(&rules)?;
                if !on_top.is_empty() {
                    counted.extend(bpf::fast::stats(&on_top)?);
                }
                counted
            }
            Backend::Module => module::stats(&rules)?,
            _ => bpf::stats(&rules.iter().map(|i| i.id).collect::<Vec<_>>())?,
        };
        for one in counted {
            if let Some(sum) = all.get_mut(&one.id) {
                add(sum, one);
            }
        }
    }
    Ok(all.into_values().collect())
}

/// Adds what another backend has counted of the same rule.
fn add(sum: &mut Stats, more: Stats) {
    for (to, of) in [
        (&mut sum.forward, more.forward),
        (&mut sum.reply, more.reply),
    ] {
        to.packets += of.packets;
        to.bytes += of.bytes;
    }
    for (reason, count) in more.drops {
        *sum.drops.entry(reason).or_default() += count;
    }
}

/// Deletes all rules of the calling thread's network namespace; says how many.
///
/// # Errors
/// What could not be done; the next command tries again.
pub(crate) fn del_all() -> Result<usize> {
    let mut store = open(false)?;
    // Also those that are half done and could not be finished one by one.
    let rules = store.parse(|_| true)?;
    del(&mut store, &rules)?;
    // Also what no record tells of.
    sweep()?;
    Ok(rules.len())
}

/// Deletes all rules of every network namespace that a mount or a process leads to, and forgets those of
/// namespaces that are gone; says how many rules in how many namespaces.
///
/// # Errors
/// The first that failed; the others are done nevertheless.
pub(crate) fn del_everywhere() -> Result<(usize, usize)> {
    let (mut rules, mut namespaces, mut failed) = (0, 0, None);
    let mut there = HashSet::new();
    for found in named() {
        there.insert(found.inode);
        let done = within(&found.file, || match is_used()? {
            true => del_all().map(Some),
            false => Ok(None),
        });
        match done {
            Ok(Some(deleted)) => {
                rules += deleted;
                namespaces += 1;
            }
            Ok(None) => {}
            Err(e) => {
                let what = format!("in the network namespace {}", found.path.display());
                failed.get_or_insert(e.context(what));
            }
        }
    }
    Store::forget_others(&there);
    failed.map_or(Ok((rules, namespaces)), Err)
}

/// Whether there is anything of ours in the calling thread's network namespace.
fn is_used() -> Result<bool> {
    Ok(Store::folder()?.exists() || recover::is_in_kernel())
}

/// Takes away whatever is left in the kernel, on record or not.
///
/// # Errors
/// When the kernel refuses.
pub(crate) fn sweep() -> Result<()> {
    bpf::fast::end()?;
    nft::remove(&[], true)?;
    module::remove_all()?;
    bpf::remove_all()
}

/// Numbers of the rules that the kernel does not have any more: something else has removed them, or
/// a device has gone.
///
/// # Errors
/// When the kernel cannot be asked.
pub fn gone(rules: &[Installed]) -> Result<HashSet<u32>> {
    let mut gone = HashSet::new();
    for (backend, rules) in by_backend(rules) {
        let lost = match backend {
            Backend::Nft => nft::gone(rules)?,
            Backend::Module => module::gone(rules)?,
            _ => bpf::gone(rules)?,
        };
        gone.extend(lost.iter().map(|i| i.id));
    }
    Ok(gone)
}

/// How rules are carried now that something faster than nft carries, by number; none, where what watches stands still. What
/// another version of Mountain carries cannot be read: this says so, and counts it as nothing.
///
/// # Errors
/// When the kernel refuses to read what is there.
pub(crate) fn carried() -> Result<HashMap<u32, bpf::fast::Carried>> {
    let carried = match bpf::fast::is_unattended() {
        Ok(true) => Ok(HashMap::new()),
        Ok(false) => bpf::fast::carried(),
        Err(e) => Err(e),
    };
    match carried {
        Err(e) if e.is::<bpf::OtherVersion>() => {
            eprintln!("mountain: {e}");
            Ok(HashMap::new())
        }
        carried => carried,
    }
}

/// Rules by nft that may never redirect anything, by number, with the firewall's rule that keeps
/// packets from them.
pub fn never(rules: &[Installed]) -> HashMap<u32, String> {
    let by_nft = rules.iter().filter(|i| i.plan.backend == Backend::Nft);
    // What cannot be read is reported where it matters.
    let Ok(rules_of_others) = firewall::ruleset() else {
        return HashMap::new();
    };
    let passed = Passed::default();
    let effects = |i: &Installed| Look::at(&rules_of_others, &i.rule, &passed).all();
    let first = |i: &Installed| effects(i).never.into_iter().next();
    by_nft.filter_map(|i| Some((i.id, first(i)?))).collect()
}

/// Rules whose device is not there, or not called so any more, by number, with what becomes of them. By nft they are for the
/// name, by BPF for the device.
pub(crate) fn strayed(rules: &[Installed]) -> BTreeMap<u32, String> {
    let strayed = |i: &Installed| {
        let name = i.rule.dev.as_deref()?;
        let now = if_nametoindex(name).ok();
        let at = i.plan.client_dev.as_ref().map(|device| device.ifindex);
        match i.plan.backend.is_bpf() {
            false if now.is_none() => Some(format!(
                "redirects nothing at the moment: there is no device {name}"
            )),
            true if now != at => Some(format!(
                "redirects what comes in by the device that was called {name}: delete it, and add it for that one's name now"
            )),
            _ => None,
        }
    };
    let strayed = rules.iter().map(|i| (i.id, strayed(i)));
    strayed.filter_map(|(id, what)| Some((id, what?))).collect()
}

/// Rules that may redirect nothing, by number, with what of the firewall drops all their packets or replies.
pub fn lost(rules: &[Installed]) -> HashMap<u32, String> {
    let mut seen = HostReadings::default();
    let through = rules.iter().filter(|i| !bpf::fast::goes_around(&i.plan));
    let lost = through.map(|i| (i.id, seen.lost(&i.rule, i.plan.backend).ok().flatten()));
    lost.filter_map(|(id, what)| Some((id, what?))).collect()
}

/// Puts back what something else has removed, as far as that is possible; says for how many rules.
///
/// # Errors
/// When what could be put back is refused.
pub(crate) fn repair(store: &mut Store) -> Result<usize> {
    let mut back = nft::repair(store.all_of(Backend::Nft)?)?;
    follow_all(store);
    let (all, own) = (store.all()?, own_addresses()?);
    let mut lost = gone(&all)?;
    // To its target a rule by BPF would send from an address that may be another host's by now.
    let is_astray = |i: &&Installed| {
        i.plan.backend.is_bpf() && i.plan.snat.is_some_and(|source| !own.contains(&source))
    };
    lost.extend(all.iter().filter(is_astray).map(|i| i.id));
    for old in all.into_iter().filter(|i| lost.contains(&i.id)) {
        // Its devices may be others by now, under their old names.
        let done = look_alone(store, &old.rule, Some(old.id), old.may_fix(), None)
            .and_then(|findings| choose(findings, Some(old.plan.backend)))
            .and_then(|plan| {
                let new = Installed {
                    plan,
                    ..old.clone()
                };
                renew(store, from_ref(&old), from_ref(&new))
            });
        match done {
            Ok(()) => back += 1,
            // Still wanted, and still not in force.
            Err(e) => eprintln!("mountain: rule {} ({}): {e:#}", old.id, old.rule),
        }
    }
    Ok(back)
}
