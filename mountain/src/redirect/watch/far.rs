// SPDX-License-Identifier: GPL-2.0-or-later
//! The far ends of veths, of whose changes nothing tells: whether the plans that rest on them are
//! still the same.
//!
//! What is on this side announces itself, and is not looked at for them.

use std::collections::HashSet;
use std::rc::Rc;

use anyhow::Result;

use crate::netlink::ruleset::Ruleset;
use crate::redirect::actions::on_top;
use crate::redirect::preflight::HostReadings;
use crate::redirect::{Fix, Plan, Rule};

/// Plans that rest on far ends, as they were when last decided.
#[derive(Default)]
pub(super) struct FarEnds {
    /// A rule for each pair of ends: its ports do not matter there.
    plans: Vec<(Rule, Option<Plan>)>,
    /// What rules have changed.
    in_force: Vec<Fix>,
}

impl FarEnds {
    /// Those of these rules.
    ///
    /// # Errors
    /// When the kernel cannot be asked.
    pub(super) fn read<'a>(
        seen: &mut HostReadings,
        in_force: &[Fix],
        rules: impl Iterator<Item = &'a Rule>,
    ) -> Result<Self> {
        let (mut known, mut plans) = (HashSet::new(), Vec::new());
        for rule in rules {
            let ends = (rule.from.ip(), rule.to.ip(), &rule.dev);
            if known.insert((ends, rule.proto, rule.snat)) {
                plans.push((rule.clone(), plan(seen, in_force, rule)?));
            }
        }
        let in_force = in_force.to_vec();
        Ok(Self { plans, in_force })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.plans.is_empty()
    }

    /// Whether one of the plans would be another now, with this firewall. `seen`: what earlier looks have kept; `beat` is
    /// called before each look.
    pub(super) fn have_changed(
        &self,
        seen: &mut HostReadings,
        firewall: &Rc<Ruleset>,
        beat: impl Fn(),
    ) -> bool {
        seen.with(firewall);
        let is_other = self.plans.iter().any(|(rule, before)| {
            beat();
            let now = plan(seen, &self.in_force, rule);
            // What cannot be asked is for the next decision to meet.
            now.map_or(true, |now| now != *before)
        });
        seen.forget();
        is_other
    }
}

fn plan(seen: &mut HostReadings, in_force: &[Fix], rule: &Rule) -> Result<Option<Plan>> {
    let findings = seen.look(rule, false, in_force)?;
    Ok(on_top(&findings).cloned())
}
