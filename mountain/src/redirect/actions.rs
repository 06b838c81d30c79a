//! Adding and deleting rules: in steps that the journal knows, so that one that is killed between
//! two of them leaves something that the next command puts right.

use anyhow::{bail, Context, Result};

use super::store::{State, Store};
use super::validate::{self, Fits};
use super::{conntrack, fixes, nft, preflight, Backend, Finding, Fix, Installed, Rule, Stats};

/// A rule as it is asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Wanted {
    pub rule: Rule,
    /// `None`: the fastest that is correct.
    pub backend: Option<Backend>,
    /// Change what is in the way.
    pub fix: bool,
}

/// What became of it.
#[derive(Clone, Debug, PartialEq)]
pub enum Added {
    New(Installed),
    /// The very same was there.
    Was(Installed),
}

/// Rules that are installed together, at most: so much nft takes at a time.
const BATCH: usize = 4096;

/// Ends the process where a test wants it to be killed.
fn step(name: &str) {
    #[cfg(debug_assertions)]
    if std::env::var("MOUNTAIN_DIE_AFTER").is_ok_and(|at| at == name) {
        let _ = nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL);
    }
    let _ = name;
}

/// Opens the store and puts right what a killed command has left; says so.
pub fn open(to_add: bool) -> Result<Store> {
    let mut store = match to_add {
        true => Store::open_to_add()?,
        false => Store::open()?,
    };
    for (state, installed) in store.half_done()? {
        let rule = &installed.rule;
        match state {
            State::Adding => eprintln!(
                "mountain: a command was ended while it added rule {} ({rule}): taken back",
                installed.id
            ),
            _ => eprintln!(
                "mountain: a command was ended while it deleted rule {} ({rule}): finished",
                installed.id
            ),
        }
        let these = [installed];
        take_away(&mut store, &these)?;
    }
    Ok(store)
}

/// What the preflight says about a rule that is right in itself.
pub fn check(rule: &Rule, fix: bool) -> Result<Vec<Finding>> {
    validate::rule(rule)?;
    validate::among(rule, &open(false)?)?;
    preflight::look(rule, fix)
}

/// Adds rules. All are looked at before one is installed; they are installed in batches, each of
/// them as a whole.
///
/// # Errors
/// What is wrong with the first that cannot be added; nothing of its batch is left.
pub fn add(store: &mut Store, wanted: &[Wanted]) -> Result<Vec<Added>> {
    let mut done = Vec::new();
    let mut new = Vec::new();
    for (i, one) in wanted.iter().enumerate() {
        let at = || match wanted.len() {
            1 => String::new(),
            _ => format!("rule {} of {} ({})", i + 1, wanted.len(), one.rule),
        };
        let looked = look(store, one);
        // Without a word where there is only one.
        let looked = match at() {
            at if at.is_empty() => looked,
            at => looked.context(at),
        };
        match looked? {
            Added::New(installed) => new.push((done.len(), installed)),
            was => done.push(was),
        }
        let _ = i;
    }
    let ids = store.free_ids(new.len())?;
    for ((_, installed), id) in new.iter_mut().zip(ids) {
        installed.id = id;
    }
    let new: Vec<Installed> = new.into_iter().map(|(_, installed)| installed).collect();
    for batch in new.chunks(BATCH) {
        put(store, batch)?;
    }
    done.extend(new.into_iter().map(Added::New));
    Ok(done)
}

/// Validates a rule and plans it; nothing is changed.
fn look(store: &Store, wanted: &Wanted) -> Result<Added> {
    let rule = &wanted.rule;
    validate::rule(rule)?;
    if let Fits::Same(installed) = validate::among(rule, store)? {
        let as_asked = wanted.backend.is_none_or(|b| b == installed.plan.backend);
        if as_asked {
            return Ok(Added::Was(*installed));
        }
        bail!(
            "rule {} is the same by another backend, {}; delete it first: mountain redirect del {}",
            installed.id,
            installed.plan.backend,
            validate::options(rule)
        );
    }
    let findings = preflight::look(rule, wanted.fix)?;
    let plan = choose(findings, wanted.backend)?;
    Ok(Added::New(Installed {
        id: 0,
        rule: rule.clone(),
        plan,
    }))
}

/// The plan of the backend that is asked for, or of the fastest that is possible.
pub fn choose(findings: Vec<Finding>, wanted: Option<Backend>) -> Result<super::Plan> {
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
                if let Some(plan) = finding.plan {
                    return Ok(plan);
                }
                why += &format!("\n  {}: {reasons}", finding.backend);
            }
            bail!("no backend is possible here:{why}")
        }
    }
}

/// Installs rules that have their numbers.
fn put(store: &mut Store, rules: &[Installed]) -> Result<()> {
    store.adding(rules)?;
    step("journal");
    let installed = install(store, rules);
    if let Err(e) = installed {
        return match take_away(store, rules) {
            Ok(()) => Err(e),
            Err(left) => Err(e.context(format!("and taking it back failed: {left:#}"))),
        };
    }
    store.added(rules)
}

fn install(store: &Store, rules: &[Installed]) -> Result<()> {
    for installed in rules {
        fixes::apply(&installed.plan.fixes)?;
    }
    step("fixes");
    for (backend, rules) in by_backend(rules) {
        match backend {
            Backend::Nft => {
                nft::install(&rules, || store.all_of(Backend::Nft))?;
                for installed in &rules {
                    conntrack::forget_direct(&installed.rule)?;
                }
            }
            other => bail!("the backend {other} is not built in yet"),
        }
    }
    step("install");
    Ok(())
}

/// Deletes rules.
///
/// # Errors
/// What could not be done; the next command tries again.
pub fn del(store: &mut Store, rules: &[Installed]) -> Result<()> {
    store.removing(rules)?;
    step("del-journal");
    take_away(store, rules)
}

/// Takes away all of what there is of rules that are being added or deleted.
fn take_away(store: &mut Store, rules: &[Installed]) -> Result<()> {
    let are_these: std::collections::HashSet<u32> = rules.iter().map(|i| i.id).collect();
    for (backend, rules) in by_backend(rules) {
        match backend {
            Backend::Nft => {
                let name = backend.to_string();
                let last = !store
                    .entries()
                    .any(|entry| entry.is_of(&name) && !are_these.contains(&entry.id()));
                nft::remove(&rules, last)?;
                step("del-remove");
                let rules: Vec<&Rule> = rules.iter().map(|i| &i.rule).collect();
                conntrack::forget_redirected(&rules)?;
            }
            other => bail!("the backend {other} is not built in yet"),
        }
    }
    step("del-flows");
    let needed: Vec<Fix> = store
        .parse(|entry| entry.has_fixes() && !are_these.contains(&entry.id()))?
        .into_iter()
        .flat_map(|other| other.plan.fixes)
        .collect();
    for installed in rules {
        let mut fixes = installed.plan.fixes.clone();
        fixes.retain(|fix| !needed.contains(fix));
        fixes::undo(&fixes)?;
    }
    step("del-fixes");
    store.removed(rules)
}

/// Rules by what moves their packets.
fn by_backend(rules: &[Installed]) -> Vec<(Backend, Vec<Installed>)> {
    Backend::FASTEST_FIRST
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
            Backend::Nft => all.extend(nft::stats(&rules)?),
            other => bail!("the backend {other} is not built in yet"),
        }
    }
    all.sort_by_key(|stats| stats.id);
    Ok(all)
}

/// Whether the kernel still has what was installed: something else may have removed it.
pub fn is_there(backend: Backend) -> Result<bool> {
    match backend {
        Backend::Nft => nft::is_there(),
        other => bail!("the backend {other} is not built in yet"),
    }
}

/// Puts back what something else has removed; says for how many rules.
pub fn repair(store: &Store) -> Result<usize> {
    let rules = store.all_of(Backend::Nft)?;
    Ok(match nft::repair(&rules)? {
        true => rules.len(),
        false => 0,
    })
}
