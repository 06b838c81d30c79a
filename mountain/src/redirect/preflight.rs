// SPDX-License-Identifier: GPL-2.0-or-later
//! Which backends would be correct for a rule on this host's actual devices, why others would not,
//! and what would make them so.
//!
//! Theory of operation. [`gather`] reads [`facts`] by rtnetlink, generic netlink, ethtool's ioctl
//! and /proc, those of the far ends of veths on a thread inside their namespaces; it changes
//! nothing. [`decide`] is a pure function from these to one [`Finding`] for each backend.
//! A backend is refused when it would lose or corrupt packets, not when it would be slow. What a
//! setting would mend is a [`Fix`]: with `fix` it goes into the plan, otherwise it refuses the
//! backend and says which command does the same by hand. `docs/redirect.md` lists what is looked at.

mod decide;
#[cfg(test)]
mod decide_tests;
mod facts;
pub(super) mod features;
pub mod firewall;
mod gather;

use std::collections::hash_map::Entry;
use std::collections::HashMap;
use std::net::IpAddr;
use std::rc::Rc;

use anyhow::Result;

use super::{Backend, Finding, Fix, Rule};
use crate::netlink::ruleset::{DeviceFact, Ruleset};
use crate::netlink::RouteTo;
use firewall::{FirewallEffects, KnownEffects, Look, Passed};

/// The devices that the packets of a rule pass.
fn passed(facts: &facts::HostFacts) -> Passed {
    let fact = |device: Option<&facts::DeviceFacts>| match device {
        Some(device) => DeviceFact::Known(Box::new(device.link.clone())),
        None => DeviceFact::Open,
    };
    // Which of several ways a packet takes is not known.
    let several = matches!(&facts.route, RouteTo::Out { devices, .. } if devices.len() > 1);
    let target = facts.target_device().filter(|_| !several);
    Passed {
        client: fact(facts.client_device()),
        target: fact(target),
        local: matches!(facts.route, RouteTo::Host),
    }
}

/// Addresses and device that facts depend on.
type Key = (IpAddr, IpAddr, Option<String>);

/// What was read of this host, for many rules of the same addresses while nothing changes: reading it
/// takes about 2 ms.
#[derive(Default)]
pub struct HostReadings {
    facts: HashMap<Key, facts::HostFacts>,
    known: gather::Known,
    /// The firewall, or why it cannot be read.
    rules: Option<Result<Rc<Ruleset>, String>>,
    /// What it does.
    effects: KnownEffects,
}

impl HostReadings {
    /// With what was read of the firewall already. What that does is still known if it is the one of before.
    pub(super) fn with(&mut self, rules: &Rc<Ruleset>) {
        if !matches!(&self.rules, Some(Ok(before)) if Rc::ptr_eq(before, rules)) {
            self.effects = KnownEffects::default();
        }
        self.rules = Some(Ok(Rc::clone(rules)));
    }

    /// Forgets what may be otherwise when it is looked again.
    pub(super) fn forget(&mut self) {
        self.facts = HashMap::new();
        self.known.forget();
    }

    /// Facts are kept of so many, some kilobytes each.
    const MOST: usize = 256;

    /// Looks at the devices that `rule` involves in the calling thread's network namespace and says for
    /// each backend, fastest first, whether it would be correct. With `fix`, settings that a backend
    /// needs changed are in its plan; they are applied by [`super::fixes::apply`], not here.
    ///
    /// It is looked at beside other rules, whose fixes are `in_force`. Where the rule relies on one of
    /// those, that one is in its plan too, with or without `fix`: it must not be undone before the
    /// last rule that needs it is gone.
    ///
    /// # Errors
    /// When the kernel cannot be asked.
    pub fn look(&mut self, rule: &Rule, fix: bool, in_force: &[Fix]) -> Result<Vec<Finding>> {
        let facts = self.facts(rule)?;
        Ok(decide::decide(rule, facts, fix, in_force))
    }

    /// What of the firewall drops all packets of a rule that `backend` carries out, or all replies.
    ///
    /// # Errors
    /// When the kernel cannot be asked.
    pub(super) fn lost(&mut self, rule: &Rule, backend: Backend) -> Result<Option<String>> {
        let passed = passed(self.facts(rule)?);
        // What cannot be read is reported where it matters.
        let Some(Ok(rules)) = &self.rules else {
            return Ok(None);
        };
        let translated = backend == Backend::Nft;
        Ok(Look::at(rules, rule, &passed).lost(translated))
    }

    fn facts(&mut self, rule: &Rule) -> Result<&facts::HostFacts> {
        if self.facts.len() >= Self::MOST {
            self.facts.clear();
        }
        let key = (rule.from.ip(), rule.to.ip(), rule.dev.clone());
        let facts = match self.facts.entry(key) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(gather::gather(rule, &mut self.known)?),
        };
        let read = || firewall::ruleset().map(Rc::new).map_err(|e| e.to_string());
        facts.firewall = match self.rules.get_or_insert_with(read) {
            Ok(rules) => self.effects.of(rules, rule, passed(facts)),
            Err(why) => FirewallEffects {
                unknown: Some(format!("the firewall cannot be read: {why}")),
                ..FirewallEffects::default()
            },
        };
        Ok(facts)
    }
}
