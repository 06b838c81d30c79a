// SPDX-License-Identifier: GPL-2.0-or-later
//! What the configuration names and this host does not have.

use super::{Level, Report};
use crate::config::wording::without_options;
use crate::config::Config;
use crate::daemon::probing::{doubts, measured_near, way};
use crate::host::cgroup;
use crate::placement::config::{means, RuleConfig, RuleUse};
use crate::redirect::config::RedirectConfig;
use crate::redirect::{validate, Backend};
use crate::topology::{Kind, Path, Topology};

/// Holds the tables of the configuration against the paths and cgroups that are there.
pub(super) fn check(report: &mut Report, topology: &Topology, config: &Config) {
    let paths = || {
        let of = |path: &Path| (path.ifname.clone(), path.key.gateway);
        topology.paths.iter().map(of)
    };
    for unused in config.unused_paths(paths()) {
        report.warn(
            "configuration",
            format!("{unused}: no route that is steered uses it"),
            "mend `dev` and `gateway`, or remove the table",
        );
    }
    for (name, dev) in names_of_devices(topology, config) {
        report.warn(
            "configuration",
            format!("the path of {dev} is called {name}, which is another path's device: `status` and a [[rule]] use it for both"),
            "give it another `name`",
        );
    }
    for unmet in unmet_targets(topology, config) {
        report.warn(
            "configuration",
            format!("{unmet}: its `probe_target` is of a family in which the path has no route, and is not used"),
            "name one of the path's own family",
        );
    }
    let near = measured_near(topology, config, way);
    for doubt in doubts(topology, config, &near, way) {
        report.warn("configuration", doubt.what, doubt.todo);
    }
    check_redirects(report, config);
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
    if let Some(cgroup) = folder.filter(|folder| !cgroup::is_one(folder)) {
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

/// Those of the redirects, which rest on no route.
pub(super) fn check_redirects(report: &mut Report, config: &Config) {
    for (i, one) in config.redirect.iter().enumerate() {
        for why in impossible(one) {
            report.warn("configuration", format!("redirect {}: {why}", i + 1), "");
        }
    }
}

/// Why a redirect of the file is not possible here, as far as a look at the file and the devices tells. `mountain redirect
/// check` tells the rest.
fn impossible(one: &RedirectConfig) -> Vec<String> {
    let here = validate::here(&one.rule()).err();
    let here = here.map(|e| without_options(&e.to_string()));
    let is_logged = one.wanted().backend.is_some_and(Backend::is_bpf);
    let log = (one.log.is_some() && !is_logged).then(|| {
        "log: only the BPF backends log: name one (backend = \"tcx\", backend_fixed = true), or remove the line"
            .to_owned()
    });
    here.into_iter().chain(log).collect()
}

/// Names of paths that another path has, too, as no table names that one and it is called by its device. With the device of
/// the named one.
fn names_of_devices<'a>(
    topology: &'a Topology,
    config: &'a Config,
) -> impl Iterator<Item = (&'a String, &'a String)> {
    let has = move |dev: &str, is_it: &dyn Fn(&Path) -> bool| {
        let mut paths = topology.paths.iter();
        paths.any(|path| path.ifname == dev && is_it(path))
    };
    let is_unnamed = |path: &Path| {
        let table = config.path(&path.ifname, path.key.gateway);
        table.is_none_or(|table| table.name.is_none())
    };
    let named = config.path.iter();
    let named = named.filter_map(|table| Some((table.name.as_ref()?, &table.dev)));
    let named = named.filter(move |(_, dev)| has(dev, &|_| true));
    named.filter(move |(name, dev)| name != dev && has(name, &is_unnamed))
}

/// The devices of `[[path]]` tables whose probe target is of another family than all of the paths that they are about.
fn unmet_targets<'a>(
    topology: &'a Topology,
    config: &'a Config,
) -> impl Iterator<Item = &'a str> + 'a {
    let aimed = config.path.iter().filter(|e| e.probe_target.is_some());
    let unmet = aimed.filter(|entry| {
        let is_about = |path: &&Path| {
            path.ifname == entry.dev
                && (entry.gateway).is_none_or(|gateway| path.key.gateway == Some(gateway))
        };
        let mut paths = topology.paths.iter().filter(is_about).peekable();
        paths.peek().is_some() && paths.all(|path| entry.target(path.key.ipv6).is_none())
    });
    unmet.map(|entry| entry.dev.as_str())
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
    rule.matches.ensure_possible()?;
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
        let config = Config::parse(text, "test.toml".as_ref()).unwrap();
        let mut report = Report::default();
        check(&mut report, &topology, &config);
        let items = report.items.into_iter();
        items.map(|item| item.what).collect()
    }

    #[test]
    fn probe_targets_of_a_family_without_a_path_are_told() {
        let topology = Topology {
            paths: vec![Path::plain(1, "192.0.2.1")],
            ..Topology::default()
        };
        for (target, told) in [("2001:db8::1", 1), ("198.51.100.7", 0)] {
            let text = format!("[[path]]\ndev = \"u1\"\nprobe_target = \"{target}\"\n");
            let config = Config::parse(&text, "test.toml".as_ref()).unwrap();
            let unmet: Vec<&str> = unmet_targets(&topology, &config).collect();
            assert_eq!(unmet.len(), told, "{unmet:?}");
        }
    }

    #[test]
    fn a_name_that_is_another_paths_device_is_told() {
        let topology = Topology {
            paths: vec![Path::plain(1, "192.0.2.1"), Path::plain(2, "198.51.100.1")],
            ..Topology::default()
        };
        for (text, told) in [
            ("[[path]]\ndev = \"u1\"\nname = \"u2\"\n", 1),
            ("[[path]]\ndev = \"u1\"\nname = \"u2\"\n[[path]]\ndev = \"u2\"\ncapacity_mbit = 3\n", 1),
            ("[[path]]\ndev = \"u1\"\nname = \"u1\"\n", 0),
            ("[[path]]\ndev = \"u3\"\nname = \"u2\"\n", 0),
            ("[[path]]\ndev = \"u1\"\nname = \"u2\"\n[[path]]\ndev = \"u2\"\nname = \"second\"\n", 0),
        ] {
            let config = Config::parse(text, "test.toml".as_ref()).unwrap();
            let names = Vec::from_iter(names_of_devices(&topology, &config));
            assert_eq!(names.len(), told, "{text}: {names:?}");
        }
    }

    #[test]
    fn redirects_that_are_not_possible_here_are_told() {
        let with = |more: &str| {
            let ends = "proto = \"udp\"\nfrom = \"192.0.2.1:1\"\nto = \"198.51.100.2:1\"";
            said(Kind::Move, &format!("[[redirect]]\n{ends}\n{more}"))
        };
        assert_eq!(with(""), [""; 0]);
        assert_eq!(
            with("log = 10\nbackend = \"tcx\"\nbackend_fixed = true"),
            [""; 0]
        );
        for (more, told) in [
            (
                "dev = \"nosuch0\"",
                "redirect 1: there is no device nosuch0",
            ),
            ("log = 10", "redirect 1: log: only the BPF backends log"),
            ("log = 10\nbackend = \"tcx\"", "redirect 1: log: only"),
        ] {
            testkit::assert_has(&with(more)[0], &[told]);
        }
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
