// SPDX-License-Identifier: GPL-2.0-or-later
//! What is to be done with a rule: which backends are possible beside the rules that are there, and
//! which of them is taken. Nothing is changed here.

use std::collections::HashMap;

use anyhow::{anyhow, bail, ensure, Context, Result};

use crate::redirect::preflight::HostReadings;
use crate::redirect::store::{from_key, Entry, FromKey, RuleState, Store};
use crate::redirect::validate::{self, RuleIndex};
use crate::redirect::{bpf, Backend, Finding, Fix, Installed, Plan, Rule};

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

/// What each backend would do with a rule that is right in itself, fastest first.
///
/// # Errors
/// What is wrong with it.
pub fn check(rule: &Rule, fix: bool) -> Result<Vec<Finding>> {
    validate::rule(rule)?;
    validate::here(rule)?;
    let store = super::open(false)?;
    // One that is there is no other.
    let itself = validate::among(rule, &store)?.map(|same| same.id);
    let kind = target_kind(rule, &store, itself);
    look_alone(&store, rule, itself, fix, kind)
}

/// Plans rules; nothing is changed. What is new has no number yet: see [`super::put`].
pub fn plan(store: &Store, wanted: &[Wanted]) -> Vec<Result<Added>> {
    let mut new = RuleIndex::default();
    let mut kinds = HashMap::new();
    let mut seen = HostReadings::default();
    let beside = Beside::read(store).map_err(|e| format!("{e:#}"));
    let mut plan = |one: &Wanted| {
        let beside = beside.as_ref().map_err(|why| anyhow!("{why}"))?;
        let rule = &one.rule;
        validate::rule(rule)?;
        validate::here(rule)?;
        new.fits(rule)?;
        if let Some(installed) = validate::among(rule, store)? {
            let entry = store.entry(installed.id);
            ensure!(
                entry.is_some_and(|entry| entry.state == RuleState::Active),
                "rule {} is the same, and a command was ended while it added or deleted that: take all \
                 off with `mountain redirect del --all`",
                installed.id
            );
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
                ..installed
            }));
        }
        let target = (rule.proto, rule.to);
        let kind = match kinds.get(&target) {
            Some(kind) => Some(*kind),
            None => target_kind(rule, store, None),
        };
        let findings = look(beside, &mut seen, rule, one.fix, kind)?;
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
            fix: Some(one.fix),
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

/// The plan of the fastest backend that `redirect watch` may put on top of nft. `findings`: the fastest first.
pub(in crate::redirect) fn on_top(findings: &[Finding]) -> Option<&Plan> {
    // It must be possible to take it off again.
    let under = findings.iter().find(|f| f.backend == Backend::Nft)?;
    under.plan.as_ref()?;
    let right = findings.iter().filter(|finding| !finding.by_name_only);
    let mut plans = right.filter_map(|finding| finding.plan.as_ref());
    plans.find(|plan| bpf::fast::goes_around(plan))
}

/// Who keeps the flows: connection tracking, the maps of the BPF programs, or nobody: the module takes
/// everything that comes from a target for a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::redirect) enum FlowKeeper {
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

/// What there is beside a rule, read once for many of them.
pub(in crate::redirect) struct Beside<'a> {
    store: &'a Store,
    /// What all rules together have changed.
    pub(in crate::redirect) in_force: Vec<Fix>,
    by_from: HashMap<FromKey, Vec<u32>>,
    /// The rule that is looked at, if it is there already.
    itself: Option<u32>,
}

impl<'a> Beside<'a> {
    /// # Errors
    /// When the store cannot be read.
    pub(in crate::redirect) fn read(store: &'a Store) -> Result<Self> {
        let mut by_from: HashMap<FromKey, Vec<u32>> = HashMap::new();
        for entry in store.entries() {
            by_from.entry(entry.taken()).or_default().push(entry.id);
        }
        Ok(Self {
            store,
            in_force: store.fixes(|_| true)?.into_iter().collect(),
            by_from,
            itself: None,
        })
    }

    /// For a look at the rule of this number.
    pub(in crate::redirect) fn except(&mut self, itself: Option<u32>) -> &Self {
        self.itself = itself;
        self
    }

    /// Rules that take packets to the same address.
    fn of_same_address(&self, rule: &Rule) -> Result<Vec<Installed>> {
        let there = self.by_from.get(&from_key(rule.proto, rule.from));
        let ids = there.into_iter().flatten().copied();
        let others = ids.filter(|id| Some(*id) != self.itself);
        self.store.by_ids(others)
    }
}

/// [`look`] for one rule, which may be there already: the number that it has.
pub(in crate::redirect) fn look_alone(
    store: &Store,
    rule: &Rule,
    itself: Option<u32>,
    fix: bool,
    kind: Option<FlowKeeper>,
) -> Result<Vec<Finding>> {
    let mut beside = Beside::read(store)?;
    let seen = &mut HostReadings::default();
    look(beside.except(itself), seen, rule, fix, kind)
}

/// What the preflight says, and what goes for each backend wherever it is. `kind`: who keeps the flows
/// of other rules with the same target.
pub(in crate::redirect) fn look(
    beside: &Beside,
    seen: &mut HostReadings,
    rule: &Rule,
    fix: bool,
    kind: Option<FlowKeeper>,
) -> Result<Vec<Finding>> {
    let others = beside.of_same_address(rule)?;
    let mut findings = seen.look(rule, fix, &beside.in_force)?;
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
    let backend = wanted.unwrap_or(Backend::Nft);
    let has_plan = |finding: &&Finding| finding.plan.is_some();
    let possible: Vec<String> = (findings.iter().filter(has_plan))
        .map(|finding| finding.backend.to_string())
        .collect();
    let finding = findings.into_iter().find(|f| f.backend == backend);
    let finding = finding.with_context(|| format!("{backend} is not built in"))?;
    if let Some(plan) = finding.plan {
        return Ok(plan);
    }
    let todo = finding.todo.iter().map(|todo| format!("\n  → {todo}"));
    let mut why = format!(
        "{backend} is not possible here: {}{}",
        finding.refused.join("; "),
        todo.collect::<String>()
    );
    if wanted.is_none() {
        why += &match possible.as_slice() {
            [] => "\n`mountain redirect check` says what other backends lack".to_owned(),
            possible => format!(
                "\nwithout it, a backend is only used when you name it by --backend: {}",
                possible.join(", ")
            ),
        };
    }
    bail!(why)
}
