// SPDX-License-Identifier: GPL-2.0-or-later
//! What the configuration names and this host does not have.

use std::collections::BTreeSet;

use super::{Level, Report};
use crate::config::Config;
use crate::daemon::probing::{measured_near, near_text, way};
use crate::host::cgroup;
use crate::placement::config::{RuleConfig, RuleUse};
use crate::topology::{Kind, Topology};

/// Holds the tables of the configuration against the paths and cgroups that are there.
pub(super) fn check(report: &mut Report, topology: &Topology, config: &Config) {
    let paths = || {
        let of = |path: &crate::topology::Path| (path.ifname.clone(), path.key.gateway);
        topology.paths.iter().map(of)
    };
    for unused in config.unused_paths(paths()) {
        report.warn(
            "configuration",
            format!("{unused}: no route that is steered uses it"),
            "mend `dev` and `gateway`, or remove the table",
        );
    }
    let near = measured_near(topology, config, way).into_iter();
    let near: BTreeSet<String> = near
        .map(|index| &topology.paths[index])
        .map(|path| config.path_name(&path.ifname, path.key.gateway))
        .collect();
    if !near.is_empty() {
        report.warn(
            "configuration",
            near_text(near),
            "for a far target, give each path its own and a route: `ip route add TARGET via GATEWAY dev DEVICE`",
        );
    }
    if !topology.places() || !config.placement.enabled {
        return;
    }
    let names: Vec<String> = paths()
        .map(|(dev, gateway)| config.path_name(&dev, gateway))
        .collect();
    for (i, rule) in config.rule.iter().enumerate() {
        if let Err(why) = applies(rule, &names) {
            report.warn(
                "configuration",
                format!("rule {} is not in force: {why}", i + 1),
                "",
            );
        }
    }
    if let Some(cgroup) = config
        .placement
        .cgroup
        .as_ref()
        .filter(|path| !path.exists())
    {
        // Without one, `up` moves running flows where it can and fails where it cannot.
        let level = match topology
            .groups
            .iter()
            .any(|group| group.kind == Kind::Place)
        {
            true => Level::Fail,
            false => Level::Warn,
        };
        report.push(
            "configuration",
            level,
            format!("placement.cgroup: there is no cgroup {}", cgroup.display()),
            "create it, or name another one (`systemd-cgls` lists them)",
        );
    }
}

/// Whether the path and the cgroup that a rule names are there.
fn applies(rule: &RuleConfig, names: &[String]) -> anyhow::Result<()> {
    if let RuleUse::Path(name) = &rule.wants {
        anyhow::ensure!(
            names.contains(name),
            "there is no path {name}; known are {}",
            names.join(", ")
        );
    }
    if let Some(cgroup) = &rule.matches.cgroup {
        cgroup::id(&cgroup::root()?, cgroup)?;
    }
    Ok(())
}
