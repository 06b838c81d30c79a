// SPDX-License-Identifier: GPL-2.0-or-later
//! Adding and deleting rules: in steps that the journal knows, so that one that is killed between
//! two of them leaves something that the next command puts right.

use std::collections::{BTreeSet, HashMap, HashSet};

use anyhow::{bail, ensure, Context, Result};

use super::preflight::{self, firewall, HostReadings};
use super::store::{Entry, RuleState, Store};
use super::validate::{self, Fits, RuleIndex};
use super::{
    bpf, fixes, module, nft, recover, Backend, Finding, Fix, Installed, Plan, Rule, Stats,
};
use crate::host::namespaces::{named, within};
use crate::netlink::conntrack;

/// A rule as it is asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Wanted {
    /// What the user asks for.
    pub rule: Rule,
    /// `None`: nft, and whatever faster one `redirect watch` finds correct while it runs.
    pub backend: Option<Backend>,
    /// Change what is in the way.
    pub fix: bool,
}

/// What became of it.
#[derive(Clone, Debug, PartialEq)]
pub enum Added {
    /// It was added just now.
    New(Installed),
    /// The very same was there.
    Was(Installed),
}

/// Rules that are installed together, at most: so much nft takes at a time.
pub const BATCH: usize = 4096;

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
        match &rules[..] {
            [] => continue,
            [one] => eprintln!(
                "mountain: a command was ended while it {what} rule {} ({}): {became}",
                one.id, one.rule
            ),
            many => eprintln!(
                "mountain: a command was ended while it {what} {} rules: {became}",
                many.len()
            ),
        }
        take_away(&mut store, &rules)?;
    }
    Ok(store)
}

/// What each backend would do with a rule that is right in itself, fastest first.
///
/// # Errors
/// What is wrong with it.
pub fn check(rule: &Rule, fix: bool) -> Result<Vec<Finding>> {
    validate::rule(rule)?;
    validate::here(rule)?;
    let store = open(false)?;
    // One that is there is no other.
    let itself = match validate::among(rule, &store)? {
        Fits::Same(installed) => Some(installed.id),
        Fits::New => None,
    };
    let seen = &mut HostReadings::default();
    look(&store, seen, rule, fix, target_kind(rule, &store, itself))
}

/// Plans rules; nothing is changed. What is new has no number yet: see [`put`].
pub fn plan(store: &Store, wanted: &[Wanted]) -> Vec<Result<Added>> {
    let mut new = RuleIndex::default();
    let mut kinds = HashMap::new();
    let mut seen = HostReadings::default();
    let mut plan = |one: &Wanted| {
        let rule = &one.rule;
        validate::rule(rule)?;
        validate::here(rule)?;
        new.fits(rule)?;
        if let Fits::Same(installed) = validate::among(rule, store)? {
            ensure!(
                one.backend.is_none_or(|b| b == installed.plan.backend),
                "rule {} is the same by another backend, {}; delete it first: \
                 mountain redirect del {}",
                installed.id,
                installed.plan.backend,
                validate::options(rule)
            );
            return Ok(Added::Was(Installed {
                fixed: installed.fixed || one.backend.is_some(),
                ..*installed
            }));
        }
        let target = (rule.proto, rule.to);
        let kind = match kinds.get(&target) {
            Some(kind) => Some(*kind),
            None => target_kind(rule, store, None),
        };
        let findings = look(store, &mut seen, rule, one.fix, kind)?;
        let faster = faster_fixes(&findings, one);
        let mut plan = choose(findings, one.backend)?;
        plan.fixes.extend(faster);
        kinds.insert(target, FlowKeeper::of(plan.backend));
        new.insert("a rule before it".to_owned(), rule);
        Ok(Added::New(Installed {
            id: 0,
            rule: rule.clone(),
            plan,
            fixed: one.backend.is_some(),
        }))
    };
    wanted.iter().map(&mut plan).collect()
}

/// What the fastest backend on top of a rule would need changed besides, with `--fix`.
fn faster_fixes(findings: &[Finding], wanted: &Wanted) -> Vec<Fix> {
    if wanted.backend.is_some() || !wanted.fix {
        return Vec::new();
    }
    let base = findings.iter().find(|f| f.backend == Backend::Nft);
    let base = base.and_then(|f| f.plan.as_ref());
    let known = |fix: &Fix| base.is_some_and(|plan| plan.fixes.iter().any(|f| f.same(fix)));
    let fastest = on_top(findings).into_iter().flat_map(|plan| &plan.fixes);
    fastest.filter(|fix| !known(fix)).cloned().collect()
}

/// The plan of the fastest backend that `redirect watch` may put on top of nft.
pub(super) fn on_top(findings: &[Finding]) -> Option<&Plan> {
    let fastest = Backend::FASTEST_FIRST.iter().find_map(|backend| {
        let finding = findings.iter().find(|f| f.backend == *backend)?;
        let plan = finding.plan.as_ref()?;
        (!finding.by_name_only && bpf::fast::goes_around(plan)).then_some(plan)
    });
    // It must be possible to take it off again.
    let under = findings.iter().find(|f| f.backend == Backend::Nft)?;
    fastest.filter(|_| under.plan.is_some())
}

/// Who keeps the flows: connection tracking, the maps of the BPF programs, or nobody: the module takes
/// everything that comes from a target for a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FlowKeeper {
    Nft,
    Bpf,
    Module,
}

impl FlowKeeper {
    fn of(backend: Backend) -> Self {
        match backend {
            Backend::Nft => Self::Nft,
            Backend::Module => Self::Module,
            _ => Self::Bpf,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Nft => "nft",
            Self::Bpf => "BPF",
            Self::Module => "the module",
        }
    }
}

/// Who keeps the flows of other rules with the same target, if there are any.
fn target_kind(rule: &Rule, store: &Store, except: Option<u32>) -> Option<FlowKeeper> {
    let mut entries = store.entries();
    let is_other = |entry: &Entry| Some(entry.id) != except;
    let other = entries.find(|entry| entry.is_to(rule.proto, rule.to) && is_other(entry));
    other.map(|other| FlowKeeper::of(other.backend()))
}

/// What the preflight says, and what goes for each backend wherever it is. `kind`: who keeps the flows
/// of other rules with the same target.
pub(super) fn look(
    store: &Store,
    seen: &mut HostReadings,
    rule: &Rule,
    fix: bool,
    kind: Option<FlowKeeper>,
) -> Result<Vec<Finding>> {
    let in_force: Vec<Fix> = store.fixes(|_| true)?.into_iter().collect();
    let others = store.all_from(rule.proto, rule.from)?;
    let mut findings = seen.look(rule, fix, &in_force)?;
    for finding in &mut findings {
        // One client may use the same port by both: its replies could not be told apart.
        let ours = FlowKeeper::of(finding.backend);
        if let Some(theirs) = kind.filter(|theirs| *theirs != ours) {
            finding.plan = None;
            finding.refused.push(format!(
                "another rule sends to {} by {}, which does not know of {}'s flows",
                rule.to,
                theirs.name(),
                ours.name()
            ));
        } else if kind == Some(FlowKeeper::Module) {
            finding.plan = None;
            finding.refused.push(format!(
                "another rule sends to {}, and the module tells replies by where they come from only",
                rule.to
            ));
        }
        // Which of two comes first is known to nft and the module only, each for its own rules.
        let other = others.iter().find(|other| {
            other.rule.dev.is_some() != rule.dev.is_some()
                && (finding.backend.is_bpf() || other.plan.backend != finding.backend)
        });
        if let Some(other) = other {
            finding.plan = None;
            finding.refused.push(format!(
                "rule {} ({}, by {}) is for the same address, and only nft, for both, knows which of two \
                 goes first, one with --dev and one without",
                other.id, other.rule, other.plan.backend
            ));
        }
        if !finding.backend.is_bpf() && rule.log.is_some() {
            finding.plan = None;
            finding.refused.push("only the BPF backends log".to_owned());
            let todo = "leave --log out, or name a BPF backend such as --backend tcx";
            finding.todo.push(todo.to_owned());
        }
    }
    Ok(findings)
}

/// The plan of the backend that is asked for, or of nft: all others skip hooks of the firewall, and
/// are right only for as long as somebody watches that.
pub fn choose(findings: Vec<Finding>, wanted: Option<Backend>) -> Result<Plan> {
    let reasons = |finding: &Finding| {
        let todo = finding.todo.iter().map(|todo| format!("; to do: {todo}"));
        format!("{}{}", finding.refused.join("; "), todo.collect::<String>())
    };
    match wanted {
        Some(backend) => {
            let finding = findings.into_iter().find(|f| f.backend == backend);
            let finding = finding.with_context(|| format!("{backend} is not built in"))?;
            let reasons = reasons(&finding);
            finding
                .plan
                .with_context(|| format!("{backend} is not possible here: {reasons}"))
        }
        None => {
            let mut why = String::new();
            for finding in findings {
                let reasons = reasons(&finding);
                match finding.plan {
                    Some(plan) if finding.backend == Backend::Nft => return Ok(plan),
                    Some(_) => why += &format!("\n  {}: only when it is named", finding.backend),
                    None => why += &format!("\n  {}: {reasons}", finding.backend),
                }
            }
            bail!("nft is not possible here, and no other backend is chosen without it:{why}")
        }
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
    bpf::fast::lower(&changed.iter().map(|i| i.id).collect(), true)?;
    store.replace(&changed)
}

/// Gives planned rules their numbers and installs them, in batches, each of which is installed as a
/// whole or not at all.
///
/// # Errors
/// Why a batch could not be; those before it stay.
pub fn put(store: &mut Store, mut new: Vec<Installed>) -> Result<Vec<Installed>> {
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
                Err(left) => Err(e.context(format!("and taking it back failed: {left:#}"))),
            };
        }
        crash_point("install");
        store.added(batch)?;
    }
    Ok(new)
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
                nft::install(&rules, || store.all_of(Backend::Nft))?;
                let rules: Vec<_> = rules.iter().map(|i| i.rule.redirected()).collect();
                let forgotten = conntrack::forget_direct(&rules);
                warn(
                    forgotten,
                    "flows under way are not redirected until they pause",
                );
            }
            Backend::Module => module::install(&rules)?,
            _ => bpf::install(&rules)?,
        }
    }
    Ok(())
}

/// What these rules need changed and no other rule has changed.
fn fixes_of(store: &Store, rules: &[Installed]) -> Result<Vec<Fix>> {
    let are_these: HashSet<u32> = rules.iter().map(|i| i.id).collect();
    let others = store.fixes(|entry| !are_these.contains(&entry.id))?;
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
/// What could not be done; the next command tries again.
pub fn del(store: &mut Store, rules: &[Installed]) -> Result<()> {
    store.removing(rules)?;
    crash_point("del-journal");
    take_away(store, rules)
}

/// Takes away all of what there is of rules that are being added or deleted.
fn take_away(store: &mut Store, rules: &[Installed]) -> Result<()> {
    let are_these: HashSet<u32> = rules.iter().map(|i| i.id).collect();
    for (backend, rules) in by_backend(rules) {
        match backend {
            Backend::Nft => {
                let last = !store
                    .entries()
                    .any(|entry| entry.backend() == backend && !are_these.contains(&entry.id));
                if rules.iter().any(|i| !i.fixed) {
                    let ids: BTreeSet<u32> = rules.iter().map(|i| i.id).collect();
                    bpf::fast::lower(&ids, false)?;
                }
                nft::remove(&rules, last)?;
                crash_point("del-remove");
                let rules: Vec<_> = rules.iter().map(|i| i.rule.redirected()).collect();
                let forgotten = conntrack::forget_redirected(&rules);
                warn(
                    forgotten,
                    "connections under way stay redirected until they end",
                );
            }
            Backend::Module => module::remove(&rules)?,
            _ => {
                let last = !store
                    .entries()
                    .any(|e| e.backend().is_bpf() && !are_these.contains(&e.id));
                match last {
                    // Whichever version of this program has installed them.
                    true => bpf::remove_all()?,
                    false => bpf::remove(&rules)?,
                }
            }
        }
    }
    crash_point("del-flows");
    fixes::undo(&fixes_of(store, rules)?)?;
    crash_point("del-fixes");
    store.removed(rules)
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
    let mut all = Vec::new();
    for (backend, rules) in by_backend(rules) {
        match backend {
            Backend::Nft => {
                let on_top: Vec<u32> = rules.iter().filter(|i| !i.fixed).map(|i| i.id).collect();
                let mut stats = nft::stats(&rules)?;
                if !on_top.is_empty() {
                    add_up(&mut stats, bpf::fast::stats(&on_top)?);
                }
                all.extend(stats);
            }
            Backend::Module => all.extend(module::stats(&rules)?),
            _ => all.extend(bpf::stats(&rules.iter().map(|i| i.id).collect::<Vec<_>>())?),
        }
    }
    // What is not in force has counted nothing.
    let counted: HashSet<u32> = all.iter().map(|stats| stats.id).collect();
    let missing = rules.iter().filter(|i| !counted.contains(&i.id));
    all.extend(missing.map(|i| Stats {
        id: i.id,
        ..Stats::default()
    }));
    all.sort_by_key(|stats| stats.id);
    Ok(all)
}

/// What two backends have counted of the same rules.
fn add_up(stats: &mut [Stats], more: Vec<Stats>) {
    for more in more {
        let Some(sum) = stats.iter_mut().find(|sum| sum.id == more.id) else {
            continue;
        };
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
}

/// Deletes all rules of the calling thread's network namespace; says how many.
///
/// # Errors
/// What could not be done; the next command tries again.
pub(crate) fn del_all() -> Result<usize> {
    let mut store = open(false)?;
    let rules = store.all()?;
    del(&mut store, &rules)?;
    // Also what no record tells of.
    sweep()?;
    Ok(rules.len())
}

/// Deletes all rules of every network namespace that a name or a process leads to, and forgets those of
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
            Backend::Nft if nft::is_there()? => vec![],
            Backend::Nft => rules,
            Backend::Module => module::gone(rules)?,
            _ => bpf::gone(rules)?,
        };
        gone.extend(lost.iter().map(|i| i.id));
    }
    Ok(gone)
}

/// Rules by nft that may never redirect anything, by number, with the firewall's rule that keeps
/// packets from them.
pub fn never(rules: &[Installed]) -> HashMap<u32, String> {
    let by_nft = rules.iter().filter(|i| i.plan.backend == Backend::Nft);
    // What cannot be read is reported where it matters.
    let Ok(firewall) = firewall::ruleset() else {
        return HashMap::new();
    };
    let first = |i: &Installed| preflight::never(&firewall, &i.rule).into_iter().next();
    by_nft.filter_map(|i| Some((i.id, first(i)?))).collect()
}

/// Puts back what something else has removed, as far as that is possible; says for how many rules.
///
/// # Errors
/// When what could be put back is refused.
pub(crate) fn repair(store: &mut Store) -> Result<usize> {
    let mut back = 0;
    let nft = store.all_of(Backend::Nft)?;
    if nft::repair(&nft)? {
        back += nft.len();
    }
    let all = store.all()?;
    let lost = gone(&all)?;
    for old in all.into_iter().filter(|i| lost.contains(&i.id)) {
        // Its devices may be others by now, under their old names.
        let fix = !old.plan.fixes.is_empty();
        let planned = look(store, &mut HostReadings::default(), &old.rule, fix, None)
            .and_then(|findings| choose(findings, Some(old.plan.backend)));
        match planned {
            Ok(plan) => {
                del(store, std::slice::from_ref(&old))?;
                let rule = old.rule.clone();
                let new = Installed {
                    id: 0,
                    rule,
                    plan,
                    fixed: old.fixed,
                };
                match put(store, vec![new]) {
                    Ok(_) => back += 1,
                    Err(e) => {
                        eprintln!("mountain: rule {} ({}): {e:#}", old.id, old.rule);
                        // Still wanted, and still not in force.
                        let these = [old];
                        store.adding(&these)?;
                        store.added(&these)?;
                    }
                }
            }
            Err(e) => eprintln!("mountain: rule {} ({}): {e:#}", old.id, old.rule),
        }
    }
    Ok(back)
}
