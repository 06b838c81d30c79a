// SPDX-License-Identifier: GPL-2.0-or-later
//! Rewritten sources follow this host's addresses and routes.

use std::collections::HashSet;
use std::net::IpAddr;

use anyhow::{Context, Result};

use super::choice::{look, Beside};
use super::{crash_point, SHOWN};
use crate::host::text::count;
use crate::netlink::{self, RouteLookUps, RouteTo};
use crate::redirect::preflight::HostReadings;
use crate::redirect::store::Store;
use crate::redirect::{nft, Backend, Finding, Installed};

/// A rule by nft as it would be planned today, if its source is none of this host's `own` addresses any more or its target
/// is behind another device by now. `findings`: of a look at it.
pub(in crate::redirect) fn moved(
    old: &Installed,
    findings: &[Finding],
    own: &HashSet<IpAddr>,
) -> Option<Installed> {
    let of_nft = findings.iter().find(|f| f.backend == Backend::Nft)?;
    let now = of_nft.plan.as_ref()?;
    let mut new = old.clone();
    new.plan.snat = now.snat;
    if new.plan.target_dev.as_ref().map(|d| &d.name) != now.target_dev.as_ref().map(|d| &d.name) {
        new.plan.target_dev = now.target_dev.clone();
    }
    let is_gone = old.plan.snat.is_none_or(|source| !own.contains(&source));
    let differs = is_gone && new.plan.snat != old.plan.snat || new.hairpin() != old.hairpin();
    (old.plan.backend == Backend::Nft && differs).then_some(new)
}

/// This host's addresses.
pub(in crate::redirect) fn own_addresses() -> Result<HashSet<IpAddr>> {
    let all = netlink::addresses().context("cannot list the addresses")?;
    Ok(all.into_iter().map(|(_, address)| address).collect())
}

/// Gives rules their new sources: `new` are [`moved`].
///
/// # Errors
/// When the kernel refuses; all is as it was then.
pub(in crate::redirect) fn follow(store: &mut Store, new: &[Installed]) -> Result<()> {
    if new.is_empty() {
        return Ok(());
    }
    let old = store.by_ids(new.iter().map(|i| i.id))?;
    nft::exchange(&old, new)?;
    crash_point("exchange");
    store.replace(new)
}

/// Rules that [`moved`]. Only those are looked at whose source is no address of this host any more, or whose target is
/// reached by another device: it would take too long for all of many.
pub(in crate::redirect) fn to_follow(
    store: &Store,
    is_meant: impl Fn(&Installed) -> bool,
) -> Result<Vec<Installed>> {
    let own = own_addresses()?;
    let mut routes = RouteLookUps::open().context("cannot ask for routes")?;
    let mut is_elsewhere = |rule: &Installed| {
        let Some(name) = rule.hairpin() else {
            return false;
        };
        let by = nix::net::if_::if_nametoindex(name).ok();
        let to = routes.to(rule.rule.to.ip());
        to.is_ok_and(|to| matches!(to, RouteTo::Out { first, .. } if by != Some(first.ifindex)))
    };
    let mut suspects = store.all_of(Backend::Nft)?;
    suspects.retain(|rule| {
        let is_gone = |source| !own.contains(&source);
        is_meant(rule) && (rule.plan.snat.is_some_and(is_gone) || is_elsewhere(rule))
    });
    let (mut seen, mut new) = (HostReadings::default(), Vec::new());
    let mut beside = Beside::read(store)?;
    for rule in &suspects {
        let beside = beside.except(Some(rule.id));
        // One that cannot be looked at keeps no other from it.
        match look(beside, &mut seen, &rule.rule, rule.may_fix(), None) {
            Ok(findings) => new.extend(moved(rule, &findings, &own)),
            Err(e) => eprintln!("mountain: rule {} ({}): {e:#}", rule.id, rule.rule),
        }
    }
    Ok(new)
}

/// Gives rules by nft the sources that they need now, and says so.
pub(crate) fn follow_all(store: &mut Store) {
    let new = to_follow(store, |_| true).and_then(|new| {
        follow(store, &new)?;
        Ok(new)
    });
    match new {
        Ok(new) => followed(&new)
            .iter()
            .for_each(|line| eprintln!("mountain: {line}")),
        Err(e) => eprintln!("mountain: {e:#}: rewritten sources stay as they are"),
    }
}

/// What is said of them: of each of the first, and how many there are besides.
pub(in crate::redirect) fn followed(new: &[Installed]) -> Vec<String> {
    let say = |one: &Installed| {
        let source = one
            .plan
            .snat
            .map_or("no other".to_owned(), |ip| ip.to_string());
        format!(
            "rule {} ({}): this host's addresses or routes have changed: packets that need another source get \
             {source} now",
            one.id, one.rule
        )
    };
    let mut said: Vec<String> = new.iter().take(SHOWN).map(say).collect();
    if new.len() > SHOWN {
        said.push(format!("and {} more", count(new.len() - SHOWN, "rule")));
    }
    said
}
