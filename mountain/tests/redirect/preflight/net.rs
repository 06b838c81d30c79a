// SPDX-License-Identifier: GPL-2.0-or-later
//! The three hosts, and what is asked of findings.

use std::process::Command;

use mountain::redirect::preflight::HostReadings;
use mountain::redirect::{Backend, Finding, Proto, Rule, Snat};

use crate::support::netns::Namespace;
use Backend::{Tcx, TcxPeer, Xdp, XdpRedirect};

pub struct Net {
    pub client: Namespace,
    pub router: Namespace,
    pub server: Namespace,
}

impl Net {
    /// Forwarding is on, and so is nothing else.
    pub fn new() -> Self {
        let net = Self {
            client: Namespace::new(),
            router: Namespace::new(),
            server: Namespace::new(),
        };
        net.join("r0", &net.client, "c0");
        net.join("r1", &net.server, "s0");
        for (side, device, address) in [
            (&net.client, "c0", "8::18"),
            (&net.router, "r0", "8::17"),
            (&net.router, "r1", "1::1"),
            (&net.server, "s0", "1::2"),
        ] {
            let v4 = address.replace("::", ".");
            let [v4, v6] = [format!("10.0.{v4}/24"), format!("fd00:{address}/64")];
            side.bring_up(device, &[&v4, &v6]);
        }
        net.router.sysctl("net/ipv4/ip_forward", "1");
        net.router.sysctl("net/ipv6/conf/all/forwarding", "1");
        net
    }

    /// A veth from the router.
    pub fn join(&self, device: &str, to: &Namespace, peer: &str) {
        self.router.link(device, to, peer);
    }

    /// The far ends are as XDP needs them.
    pub fn ready(self) -> Self {
        for (side, device) in [(&self.client, "c0"), (&self.server, "s0")] {
            ethtool(side, device, "tx off");
            ethtool(side, device, "gro on");
        }
        self
    }

    pub fn look(&self, rule: &Rule) -> Vec<Finding> {
        self.router.within(async || look(rule, false))
    }

    pub fn look_and_fix(&self, rule: &Rule) -> Vec<Finding> {
        self.router.within(async || look(rule, true))
    }
}

fn look(rule: &Rule, fix: bool) -> Vec<Finding> {
    HostReadings::default().look(rule, fix, &[]).unwrap()
}

/// Runs a command inside; what it prints.
pub fn inside(side: &Namespace, line: &str) -> String {
    let output = Command::new("nsenter")
        .arg(format!("--net=/run/netns/{}", side.name))
        .args(line.split_whitespace())
        .output()
        .unwrap();
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{line}: {}", said(&output.stderr));
    said(&output.stdout)
}

pub fn ethtool(side: &Namespace, device: &str, setting: &str) {
    inside(side, &format!("ethtool -K {device} {setting}"));
}

pub fn features(side: &Namespace, device: &str) -> String {
    inside(side, &format!("ethtool -k {device}"))
}

pub fn rule(from: &str, to: &str) -> Rule {
    Rule {
        proto: Proto::Udp,
        from: from.parse().unwrap(),
        to: to.parse().unwrap(),
        dev: None,
        snat: Snat::Auto,
        log: None,
    }
}

pub fn ordinary() -> Rule {
    rule("10.0.8.17:8080", "10.0.1.2:8083")
}

pub fn of(findings: &[Finding], backend: Backend) -> &Finding {
    let mut found = findings.iter().filter(|f| f.backend == backend);
    let one = found.next().unwrap();
    assert!(found.next().is_none());
    assert_eq!(one.plan.is_some(), one.refused.is_empty(), "{one:#?}");
    one
}

#[track_caller]
pub fn possible(findings: &[Finding], backend: Backend) -> &Finding {
    let found = of(findings, backend);
    assert!(found.plan.is_some(), "{found:#?}");
    found
}

/// The backend is refused, for a reason with `why` and a way out with `todo`.
#[track_caller]
pub fn refused<'a>(
    findings: &'a [Finding],
    backend: Backend,
    why: &str,
    todo: &str,
) -> &'a Finding {
    let found = of(findings, backend);
    assert!(
        found.refused.iter().any(|r| r.contains(why)),
        "'{why}' in {found:#?}"
    );
    assert!(
        found.todo.iter().any(|t| t.contains(todo)),
        "'{todo}' in {found:#?}"
    );
    found
}

#[track_caller]
pub fn noted(finding: &Finding, what: &str) {
    assert!(
        finding.notes.iter().any(|n| n.contains(what)),
        "'{what}' in {finding:#?}"
    );
}

pub const BPF: [Backend; 4] = [XdpRedirect, TcxPeer, Xdp, Tcx];

/// Exactly these are possible.
#[track_caller]
pub fn only(findings: &[Finding], backends: &[Backend]) {
    let possible = findings.iter().filter(|f| f.plan.is_some());
    let possible: Vec<Backend> = possible.map(|f| f.backend).collect();
    assert_eq!(possible, backends, "{findings:#?}");
}
