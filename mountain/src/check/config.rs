// SPDX-License-Identifier: GPL-2.0-or-later
//! What the configuration names and this host does not have.

use super::{Level, Report};
use crate::config::Config;
use crate::daemon::probing::{doubts, measured_near, way};
use crate::host::cgroup;
use crate::placement::config::{means, RuleConfig, RuleUse};
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
    let near = measured_near(topology, config, way);
    for doubt in doubts(topology, config, &near, way) {
        report.warn("configuration", doubt.what, doubt.todo);
    }
    if let Some(why) = without_effect(topology, config) {
        report.warn(
            "configuration",
            format!("[[rule]] has no effect: {why}"),
            "",
        );
    }
    if !topology.places() || !config.placement.enabled {
        return;
    }
    let indexes = 0..topology.paths.len();
    let names: Vec<String> = indexes.map(|i| config.path_name(topology, i)).collect();
    for (i, rule) in config.rule.iter().enumerate() {
        if let Err(why) = applies(rule, &names) {
            report.warn(
                "configuration",
                format!("rule {} is not in force: {why}", i + 1),
                "",
            );
        }
    }
    // Where no cgroups are mounted, placement::check reports that.
    let folder = config.placement.cgroup_folder().ok();
    if let Some(cgroup) = folder.filter(|folder| !folder.exists()) {
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

/// Why no new flow meets the rules, if there are any.
fn without_effect(topology: &Topology, config: &Config) -> Option<&'static str> {
    match (config.rule.is_empty(), config.placement.enabled) {
        (true, _) => None,
        (_, false) => Some("`enabled = false` in [placement]"),
        (_, true) if topology.has_placed() => None,
        _ => Some("no new flow chooses its path here, running flows move"),
    }
}

/// Whether the path and the cgroup that a rule names are there.
fn applies(rule: &RuleConfig, names: &[String]) -> anyhow::Result<()> {
    if let RuleUse::Path(name) = &rule.wants {
        anyhow::ensure!(
            names.iter().any(|path| means(name, path)),
            "there is no path {name}; known are {}",
            names.join(", ")
        );
    }
    if let Some(cgroup) = &rule.matches.cgroup {
        cgroup::id(&cgroup::root()?, cgroup)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::topology::Group;

    /// The findings about a configuration, on a host with one group of a kind.
    fn said(kind: Kind, text: &str) -> Vec<String> {
        let group = Group {
            kind,
            table: 254,
            prefixes: Vec::new(),
            members: Vec::new(),
            preferred: None,
            told_by: Default::default(),
        };
        let topology = Topology {
            groups: vec![group],
            ..Topology::default()
        };
        let config = Config::parse(text, Path::new("test.toml")).unwrap();
        let mut report = Report::default();
        check(&mut report, &topology, &config);
        let items = report.items.into_iter();
        items.map(|item| item.what).collect()
    }

    #[test]
    fn rules_that_no_flow_meets_are_told() {
        let rule = "[[rule]]\nmatch = { proto = \"tcp\" }\nuse = \"bulk\"\n";
        let moving = said(Kind::Move, rule);
        assert_eq!(moving.len(), 1, "{moving:?}");
        testkit::assert_has(
            &moving[0],
            &["[[rule]] has no effect", "running flows move"],
        );
        assert_eq!(said(Kind::Move, "").len(), 0);
        assert_eq!(said(Kind::Place, rule).len(), 0);
        let off = format!("[placement]\nenabled = false\n{rule}");
        testkit::assert_has(&said(Kind::Place, &off)[0], &["`enabled = false`"]);
    }
}
