// SPDX-License-Identifier: GPL-2.0-or-later
//! `--path NAME`: the device, gateway and source that a path of `mountain up` stands for.

use std::collections::BTreeSet;
use std::net::{IpAddr, ToSocketAddrs};

use anyhow::{bail, Context, Result};
use clap_complete::CompletionCandidate;
use serde_json::Value;

use crate::config::Config;
use crate::control::run_dir::{Request, RunDir};

/// Where probes over a path go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Way {
    pub device: String,
    /// `None`: next hops are on the link itself, or it is not known.
    pub gateway: Option<IpAddr>,
    /// The address that the daemon probes from, which is the device's own.
    pub source: Option<IpAddr>,
    pub ipv6: bool,
    /// Another path leaves by the same device, and the socket cannot choose between them.
    pub shared_with: Option<String>,
}

/// Looks a path up in the running daemon or, without one, among the tables of the configuration.
/// `ipv6`: the family, if one is asked for; else the first of the target's that the path has.
pub fn look_up(name: &str, target: &str, ipv6: Option<bool>) -> Result<Way> {
    let status = RunDir::of_this_namespace()?
        .ask(&Request::Status)
        .with_context(|| format!("--path {name}"))?;
    let families = ipv6.map_or_else(|| families_of(target), |v6| vec![v6]);
    match status {
        Some(status) => in_status(&status, name, &families),
        None => in_config(&crate::cli::load_config(None)?, name, &families),
    }
}

/// The names that complete `--path`: those of the configuration and of the running daemon, which only
/// tells root. A completion has nowhere to report an error, so whatever cannot be read adds no name.
pub fn candidates() -> Vec<CompletionCandidate> {
    let config = crate::cli::load_config(None).unwrap_or_default();
    let configured = config
        .path
        .iter()
        .map(|p| p.name.as_ref().unwrap_or(&p.dev));
    let mut names: BTreeSet<String> = configured.cloned().collect();
    let status = RunDir::of_this_namespace().and_then(|dir| dir.ask(&Request::Status));
    if let Ok(Some(status)) = status {
        let running = status["paths"].as_array().into_iter().flatten();
        names.extend(running.filter_map(|p| p["name"].as_str().map(str::to_owned)));
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
fn in_status(status: &Value, name: &str, families: &[bool]) -> Result<Way> {
    let none = Vec::new();
    let paths = status["paths"].as_array().unwrap_or(&none);
    let text = |p: &Value, key: &str| p[key].as_str().unwrap_or_default().to_owned();
    let address = |p: &Value, key: &str| p[key].as_str().and_then(|a| a.parse().ok());
    let via = |p: &Value| match p["gateway"].as_str() {
        Some(gateway) => format!("{} via {gateway}", text(p, "device")),
        None => text(p, "device"),
    };
    let named: Vec<&Value> = paths.iter().filter(|p| p["name"] == name).collect();
    if named.is_empty() {
        let mut names: Vec<String> = paths.iter().map(|p| text(p, "name")).collect();
        names.sort();
        names.dedup();
        match &names[..] {
            [] => bail!("there is no path {name:?}: mountain knows none (`mountain status`)"),
            _ => bail!(
                "there is no path {name:?}; mountain knows {}",
                names.join(", ")
            ),
        }
    }
    let ipv6 = (families.iter().copied()).find(|&v6| named.iter().any(|p| p["ipv6"] == v6));
    if let (None, [first, ..]) = (ipv6, families) {
        let family = if *first { "IPv6" } else { "IPv4" };
        bail!("the path {name:?} is not one of {family}, which the target's addresses are");
    }
    let of_family = |p: &&Value| ipv6.is_none_or(|v6| p["ipv6"] == v6);
    let fitting: Vec<&Value> = named.iter().copied().filter(of_family).collect();
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
    let shares = |p: &&Value| {
        ["device", "ipv6"].iter().all(|k| p[k] == path[k]) && p["gateway"] != path["gateway"]
    };
    Ok(Way {
        device: text(path, "device"),
        gateway: address(path, "gateway"),
        source: address(path, "source"),
        ipv6: path["ipv6"] == true,
        shared_with: paths.iter().find(shares).map(|p| text(p, "name")),
    })
}

fn in_config(config: &Config, name: &str, families: &[bool]) -> Result<Way> {
    type Path = crate::config::PathConfig;
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
        bail!(
            "there is no path {name:?}: mountain is not running in this network namespace (start \
             it with `mountain up`, or choose a device with --dev), and its configuration names \
             no such path"
        );
    };
    let other = |p: &&Path| p.dev == path.dev && p.gateway != path.gateway && of_family(p, ipv6);
    let other = config.path.iter().find(other);
    Ok(Way {
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
    use serde_json::json;
    use std::path::Path;

    fn status() -> Value {
        json!({ "paths": [
            { "name": "dsl", "device": "eth0", "gateway": "192.0.2.1", "ipv6": false,
              "source": "192.0.2.7" },
            { "name": "dsl", "device": "eth0", "gateway": "2001:db8::1", "ipv6": true,
              "source": null },
            { "name": "lte", "device": "wwan0", "gateway": null, "ipv6": false },
            { "name": "a", "device": "eth2", "gateway": "198.51.100.1", "ipv6": false },
            { "name": "b", "device": "eth2", "gateway": "198.51.100.2", "ipv6": false },
            { "name": "eth3", "device": "eth3", "gateway": "203.0.113.1", "ipv6": false },
            { "name": "eth3", "device": "eth3", "gateway": "203.0.113.2", "ipv6": false },
        ]})
    }

    #[test]
    fn a_name_and_a_family_are_one_path() {
        let dsl = in_status(&status(), "dsl", &[false]).unwrap();
        let expected = Way {
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
        let fails = |status: &Value, name: &str, families: &[bool], why: &str| {
            let error = in_status(status, name, families).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        };
        fails(
            &status(),
            "x",
            &[],
            "no path \"x\"; mountain knows a, b, dsl, eth3, lte",
        );
        fails(&status(), "lte", &[true], "not one of IPv6");
        fails(
            &status(),
            "dsl",
            &[],
            "eth0 via 192.0.2.1, eth0 via 2001:db8::1",
        );
        fails(&status(), "eth3", &[false], "stands for 2 paths");
        fails(&json!({ "paths": [] }), "x", &[], "knows none");
    }

    #[test]
    fn without_a_daemon_the_configuration_is_asked() {
        let text = "[[path]]\ndev = \"eth0\"\nname = \"dsl\"\ngateway = \"192.0.2.1\"\n\
            [[path]]\ndev = \"wwan0\"\n";
        let config = Config::parse(text, Path::new("f")).unwrap();
        let dsl = in_config(&config, "dsl", &[false]).unwrap();
        assert_eq!(dsl.device, "eth0");
        assert_eq!(dsl.gateway, Some("192.0.2.1".parse().unwrap()));
        assert_eq!(
            in_config(&config, "wwan0", &[true]).unwrap().device,
            "wwan0"
        );
        for (name, ipv6) in [("dsl", true), ("eth0", false)] {
            let error = in_config(&config, name, &[ipv6]).unwrap_err().to_string();
            assert!(error.contains("not running"), "{error}");
        }
    }

    #[test]
    fn a_target_has_a_family() {
        assert_eq!(families_of("[::1]"), [true]);
        assert_eq!(families_of("192.0.2.1"), [false]);
        assert!(families_of("no-such-host.invalid").is_empty());
    }
}
