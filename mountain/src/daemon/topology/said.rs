// SPDX-License-Identifier: GPL-2.0-or-later
//! What the log says of groups and of routes that are not adopted, and why there is nothing to steer.

use tracing::{info, warn};

use super::super::Daemon;
use crate::placement;
use crate::topology::{destinations_told, Filter, Topology};

impl Daemon {
    /// Says which groups are other ones than when that was last said, and which are gone.
    pub(super) fn say_groups(&mut self) {
        let t = &self.paths.topology;
        let groups = t.groups.iter().map(|g| {
            let members = g.members.iter().filter_map(|m| self.paths.id(m.path));
            let members: Vec<_> = members.map(|id| self.paths.name(id)).collect();
            format!(
                "{} (table {}) by {}: {}",
                destinations_told(&g.prefixes),
                g.table,
                members.join(", "),
                placement::kind_text(g.kind, g.members.len(), self.config.placement.new_flows())
            )
        });
        let groups: Vec<String> = groups.collect();
        news(&self.paths.told, &groups)
            .iter()
            .for_each(|line| info!("{line}"));
        if self.options.dry_run {
            match placement::preview(t, &self.config.placement) {
                Ok(lines) => lines.iter().for_each(|line| info!("would add: {line}")),
                Err(e) => warn!("{e:#}"),
            }
        }
        if t.groups.is_empty() && t.suspended.is_empty() {
            warn!("no multipath route to steer: waiting for one");
        }
        self.paths.told = groups;
    }

    /// Says which routes are not adopted that were not among these.
    pub(super) fn say_skipped(&self, known: &[String]) {
        let t = &self.paths.topology;
        // The reason of a suspension has a warning of its own, except in a dry run.
        let is_said = |reason: &str| t.left_to_kernel().any(|s| reason.ends_with(&s.why));
        let new = t.skipped.iter().filter(|reason| !known.contains(reason));
        for reason in new.filter(|reason| self.options.dry_run || !is_said(reason)) {
            info!("not adopted: {reason}");
        }
    }
}

/// What the log has not said yet: `before` was said of each group, and `now` is so.
fn news(before: &[String], now: &[String]) -> Vec<String> {
    let other = now.iter().enumerate();
    let other = other.filter(|(i, group)| before.get(*i) != Some(*group));
    let other = other.map(|(i, group)| format!("group {i}: {group}"));
    let gone = (now.len()..before.len()).map(|i| format!("group {i} is gone"));
    other.chain(gone).collect()
}

/// Why there is nothing to steer, and what to do.
pub(in crate::daemon) fn no_groups(topology: &Topology, filter: &Filter) -> String {
    let mut text = match topology.suspended.first() {
        Some(suspended) => format!("nothing to steer: {}\n", suspended.why),
        None => "no multipath route to steer: `ip route` shows none with several `nexthop`s that can be adopted\n"
            .to_owned(),
    };
    if let Some(limits) = filter.limits() {
        text += &limits;
        text.push('\n');
    } else if !filter.adopt {
        text += "With two providers, that is two default routes, run `mountain up --adopt`.\n";
    }
    text +=
        "`mountain check` says what to change; with --wait, mountain starts and waits for a route.";
    for reason in &topology.skipped {
        text += &format!("\n  - {reason}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::Suspended;

    #[test]
    fn only_groups_that_differ_are_said() {
        let groups = |texts: &[&str]| texts.iter().map(|t| (*t).to_owned()).collect::<Vec<_>>();
        let said = |before: &[&str], now: &[&str]| news(&groups(before), &groups(now));
        assert_eq!(said(&[], &["a", "b"]), ["group 0: a", "group 1: b"]);
        assert_eq!(said(&["a", "b"], &["a", "b"]), [""; 0]);
        assert_eq!(said(&["a", "b"], &["a", "c"]), ["group 1: c"]);
        assert_eq!(said(&["a", "b"], &["b"]), ["group 0: b", "group 1 is gone"]);
        assert_eq!(said(&["a"], &[]), ["group 0 is gone"]);
    }

    #[test]
    fn where_there_is_nothing_to_steer_the_advice_fits_the_host() {
        let adopting = Filter {
            adopt: true,
            ..Filter::default()
        };
        let mut topology = Topology::default();
        let said = no_groups(&topology, &Filter::default());
        assert!(
            said.contains("no multipath route") && said.contains("up --adopt"),
            "{said}"
        );
        // Who has said so is not told to say so.
        let said = no_groups(&topology, &adopting);
        assert!(
            said.contains("no multipath route") && !said.contains("--adopt"),
            "{said}"
        );
        let limited = Filter {
            routes: vec!["10.0.0.0/8".parse().unwrap()],
            ..Filter::default()
        };
        let said = no_groups(&topology, &limited);
        assert!(
            said.contains("only routes within 10.0.0.0/8 count"),
            "{said}"
        );
        topology.suspended.push(Suspended {
            ipv6: false,
            paths: Vec::new(),
            why: "the kernel prefers tun0".into(),
            whole: false,
        });
        let said = no_groups(&topology, &adopting);
        assert!(
            said.starts_with("nothing to steer: the kernel prefers tun0"),
            "{said}"
        );
    }
}
