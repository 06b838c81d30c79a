// SPDX-License-Identifier: GPL-2.0-or-later
//! `--path NAME`: the device, gateway and source that a path of `mountain up` stands for.

use std::collections::BTreeSet;
use std::net::{IpAddr, ToSocketAddrs};

use anyhow::{bail, ensure, Context, Result};
use clap_complete::CompletionCandidate;

use crate::config::Config;
use crate::control::run_dir::RunDir;
use crate::control::status::PathStatus;
use crate::measure::ping::PingOptions;

/// Where probes over a path go.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ProbeRoute {
    device: String,
    /// `None`: next hops are on the link itself, or it is not known.
    gateway: Option<IpAddr>,
    /// The address that the daemon probes from, which is the device's own.
    source: Option<IpAddr>,
    ipv6: bool,
    /// Another path leaves by the same device, and the socket cannot choose between them.
    shared_with: Option<String>,
}

/// Has probes take a path's device, gateway and address.
pub(crate) fn choose(options: &mut PingOptions, name: &str) -> Result<()> {
    let way = look_up(name, &options.target, options.ipv6)?;
    if let (Some(gateway), Some(other)) = (way.gateway, &way.shared_with) {
        ensure!(
            options.target.parse() == Ok(gateway),
            "the paths {name:?} and {other:?} share {}, and which of their gateways a probe takes is the routing \
             table's choice: only {gateway} itself can be measured by --path {name}",
            way.device
        );
    }
    options.ipv6 = Some(way.ipv6);
    options.device = Some(way.device);
    options.gateway = way.gateway;
    options.source = way.source;
    Ok(())
}

/// Looks a path up in the running daemon or, without one, among the tables of the configuration.
/// `ipv6`: the family, if one is asked for; else the first of the target's that the path has.
fn look_up(name: &str, target: &str, ipv6: Option<bool>) -> Result<ProbeRoute> {
    let status = RunDir::of_this_namespace()?
        .status()
        .with_context(|| format!("--path {name}"))?;
    let families = ipv6.map_or_else(|| families_of(target), |v6| vec![v6]);
    match status {
        Some(status) => in_status(&status.paths, name, &families),
        None => in_config(&crate::cli::load_config(None)?, name, &families),
    }
}

/// The names that complete `--path`: those of the configuration and of the running daemon, which only
/// tells root. A completion has nowhere to report an error, so whatever cannot be read adds no name.
pub(crate) fn candidates() -> Vec<CompletionCandidate> {
    let config = crate::cli::load_config(None).unwrap_or_default();
    let configured = config
        .path
        .iter()
        .map(|p| p.name.as_ref().unwrap_or(&p.dev));
    let mut names: BTreeSet<String> = configured.cloned().collect();
    let status = RunDir::of_this_namespace().and_then(|dir| dir.status_quietly());
    if let Ok(Some(status)) = status {
        names.extend(status.paths.into_iter().map(|path| path.judged.name));
    }
    names.into_iter().map(CompletionCandidate::new).collect()
}

/// The families of an address or a name, in the order of its addresses: whether IPv6.
fn families_of(target: &str) -> Vec<bool> {
    let name = target.trim_matches(['[', ']']);
    let found = (name, 0).to_socket_addrs().into_iter().flatten();
    let mut families: Vec<bool> = found.map(|a| a.is_ipv6()).collect();
    families.dedup();
    families.truncate(2);
    families
}

/// `families`: those of the target, the one to be taken first; none: whichever the path has.
fn in_status(paths: &[PathStatus], name: &str, families: &[bool]) -> Result<ProbeRoute> {
    let via = |p: &PathStatus| match p.gateway {
        Some(gateway) => format!("{} via {gateway}", p.device),
        None => p.device.clone(),
    };
    let named: Vec<&PathStatus> = paths.iter().filter(|p| p.judged.name == name).collect();
    if named.is_empty() {
        let mut names: Vec<&str> = paths.iter().map(|p| p.judged.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        match &names[..] {
            [] => bail!("there is no path {name:?}: mountain knows none (`mountain status`)"),
            _ => bail!(
                "there is no path {name:?}; mountain knows {}",
                names.join(", ")
            ),
        }
    }
    let ipv6 = (families.iter().copied()).find(|&v6| named.iter().any(|p| p.ipv6 == v6));
    if let (None, [first, ..]) = (ipv6, families) {
        let family = if *first { "IPv6" } else { "IPv4" };
        bail!("the path {name:?} is not one of {family}, which the target's addresses are");
    }
    let of_family = |p: &&PathStatus| ipv6.is_none_or(|v6| p.ipv6 == v6);
    let fitting: Vec<&PathStatus> = named.iter().copied().filter(of_family).collect();
    let path = match fitting[..] {
        [path] => path,
        _ => {
            let ways: Vec<String> = fitting.iter().map(|p| via(p)).collect();
            bail!(
                "{name:?} stands for {} paths ({}): give each a name of its own in mountain.toml",
                ways.len(),
                ways.join(", ")
            )
        }
    };
    let shares = |p: &&PathStatus| {
        (&p.device, p.ipv6) == (&path.device, path.ipv6) && p.gateway != path.gateway
    };
    Ok(ProbeRoute {
        device: path.device.clone(),
        gateway: path.gateway,
        source: path.source,
        ipv6: path.ipv6,
        shared_with: paths.iter().find(shares).map(|p| p.judged.name.clone()),
    })
}

fn in_config(config: &Config, name: &str, families: &[bool]) -> Result<ProbeRoute> {
    type Path = crate::steer::config::ConfiguredPath;
    // A path without a gateway is of both.
    let of_family = |p: &Path, ipv6: bool| p.gateway.is_none_or(|g| g.is_ipv6() == ipv6);
    let find = |ipv6: bool| {
        let named = |p: &&Path| p.name.as_ref().unwrap_or(&p.dev) == name && of_family(p, ipv6);
        Some((config.path.iter().find(named)?, ipv6))
    };
    let unknown = if families.is_empty() {
        &[false, true][..]
    } else {
        families
    };
    let Some((path, ipv6)) = unknown.iter().copied().find_map(find) else {
        let names = config
            .path
            .iter()
            .map(|p| p.name.as_ref().unwrap_or(&p.dev));
        let names: BTreeSet<&str> = names.map(String::as_str).collect();
        let named = match Vec::from_iter(names)[..] {
            [] => "its configuration names none".to_owned(),
            ref names => format!("its configuration names {} only", names.join(", ")),
        };
        bail!(
            "there is no path {name:?}: mountain is not running in this network namespace (start it with `mountain up`, or \
             choose a device with --dev), and {named}"
        );
    };
    let other = |p: &&Path| p.dev == path.dev && p.gateway != path.gateway && of_family(p, ipv6);
    let other = config.path.iter().find(other);
    Ok(ProbeRoute {
        device: path.dev.clone(),
        gateway: path.gateway,
        source: None,
        ipv6,
        shared_with: other.map(|p| p.name.as_ref().unwrap_or(&p.dev).clone()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    use crate::control::status::Judged;

    fn path(name: &str, device: &str, gateway: Option<&str>, ipv6: bool) -> PathStatus {
        PathStatus {
            device: device.to_owned(),
            gateway: gateway.map(|g| g.parse().unwrap()),
            ipv6,
            judged: Judged {
                name: name.to_owned(),
                ..Judged::default()
            },
            ..PathStatus::default()
        }
    }

    fn status() -> Vec<PathStatus> {
        let dsl = PathStatus {
            source: Some("192.0.2.7".parse().unwrap()),
            ..path("dsl", "eth0", Some("192.0.2.1"), false)
        };
        vec![
            dsl,
            path("dsl", "eth0", Some("2001:db8::1"), true),
            path("lte", "wwan0", None, false),
            path("a", "eth2", Some("198.51.100.1"), false),
            path("b", "eth2", Some("198.51.100.2"), false),
            path("eth3", "eth3", Some("203.0.113.1"), false),
            path("eth3", "eth3", Some("203.0.113.2"), false),
        ]
    }

    #[test]
    fn a_name_and_a_family_are_one_path() {
        let dsl = in_status(&status(), "dsl", &[false]).unwrap();
        let expected = ProbeRoute {
            device: "eth0".into(),
            gateway: Some("192.0.2.1".parse().unwrap()),
            source: Some("192.0.2.7".parse().unwrap()),
            ipv6: false,
            shared_with: None,
        };
        assert_eq!(dsl, expected);
        let dsl = in_status(&status(), "dsl", &[true]).unwrap();
        assert_eq!(dsl.gateway, Some("2001:db8::1".parse().unwrap()));
        assert_eq!((dsl.source, dsl.ipv6, dsl.shared_with), (None, true, None));
        let lte = in_status(&status(), "lte", &[]).unwrap();
        assert_eq!((lte.device.as_str(), lte.gateway), ("wwan0", None));
        let a = in_status(&status(), "a", &[]).unwrap();
        assert_eq!(a.shared_with.as_deref(), Some("b"));
    }

    #[test]
    fn of_a_target_s_addresses_one_of_the_path_s_family_is_taken() {
        let lte = in_status(&status(), "lte", &[true, false]).unwrap();
        assert_eq!((lte.device.as_str(), lte.ipv6), ("wwan0", false));
        // With both in common the target's first counts.
        assert!(in_status(&status(), "dsl", &[true, false]).unwrap().ipv6);
        assert!(!in_status(&status(), "dsl", &[false, true]).unwrap().ipv6);
        let text = "[[path]]\ndev = \"eth0\"\nname = \"dsl\"\ngateway = \"192.0.2.1\"\n";
        let config = Config::parse(text, Path::new("f")).unwrap();
        assert!(!in_config(&config, "dsl", &[true, false]).unwrap().ipv6);
        assert!(!in_config(&config, "dsl", &[]).unwrap().ipv6);
    }

    #[test]
    fn what_is_no_path_or_several_is_said() {
        let fails = |status: &[PathStatus], name: &str, families: &[bool], why: &str| {
            let error = in_status(status, name, families).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        };
        let known = "no path \"x\"; mountain knows a, b, dsl, eth3, lte";
        fails(&status(), "x", &[], known);
        fails(&status(), "lte", &[true], "not one of IPv6");
        let both = "eth0 via 192.0.2.1, eth0 via 2001:db8::1";
        fails(&status(), "dsl", &[], both);
        fails(&status(), "eth3", &[false], "stands for 2 paths");
        fails(&[], "x", &[], "knows none");
    }

    #[test]
    fn without_a_daemon_the_configuration_is_asked() {
        let text = "[[path]]\ndev = \"eth0\"\nname = \"dsl\"\ngateway = \"192.0.2.1\"\n\
            [[path]]\ndev = \"wwan0\"\n";
        let config = Config::parse(text, Path::new("f")).unwrap();
        let dsl = in_config(&config, "dsl", &[false]).unwrap();
        assert_eq!(dsl.device, "eth0");
        assert_eq!(dsl.gateway, Some("192.0.2.1".parse().unwrap()));
        let modem = in_config(&config, "wwan0", &[true]).unwrap();
        assert_eq!(modem.device, "wwan0");
        for (name, ipv6) in [("dsl", true), ("eth0", false)] {
            let error = in_config(&config, name, &[ipv6]).unwrap_err().to_string();
            assert!(error.contains("not running"), "{error}");
            assert!(error.ends_with("names dsl, wwan0 only"), "{error}");
        }
    }

    #[test]
    fn a_target_has_a_family() {
        assert_eq!(families_of("[::1]"), [true]);
        assert_eq!(families_of("192.0.2.1"), [false]);
        assert!(families_of("no-such-host.invalid").is_empty());
    }
}
