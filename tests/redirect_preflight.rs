//! What `redirect::preflight` finds on real devices, and what `redirect::fixes` does about it, in
//! network namespaces of its own. Needs root.
//!
//! ```text
//!   client c0 10.0.8.18 ---- 10.0.8.17 r0  router  r1 10.0.1.1 ---- 10.0.1.2 s0  server
//! ```
//!
//! Likewise fd00:8::18, ::17 and fd00:1::1, ::2.

#[path = "support/netns.rs"]
mod netns;

use std::process::Command;

use mountain::redirect::preflight::{look, look_beside};
use mountain::redirect::{fixes, Backend, Finding, Fix, Proto, Rule, Snat};
use netns::Namespace;

struct Net {
    client: Namespace,
    router: Namespace,
    server: Namespace,
}

impl Net {
    /// Forwarding is on, and so is nothing else.
    fn new() -> Self {
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
            side.ip(&format!("addr add 10.0.{v4}/24 dev {device}"));
            side.ip(&format!("addr add fd00:{address}/64 dev {device} nodad"));
            side.ip(&format!("link set {device} up"));
        }
        net.router.sysctl("ipv4/ip_forward", "1");
        net.router.sysctl("ipv6/conf/all/forwarding", "1");
        net
    }

    /// A veth from the router.
    fn join(&self, device: &str, to: &Namespace, peer: &str) {
        self.router.ip(&format!(
            "link add {device} type veth peer name {peer} netns {}",
            to.name
        ));
    }

    /// The far ends are as XDP needs them.
    fn ready(self) -> Self {
        for (side, device) in [(&self.client, "c0"), (&self.server, "s0")] {
            ethtool(side, device, "tx off");
            ethtool(side, device, "gro on");
        }
        self
    }

    fn look(&self, rule: &Rule) -> Vec<Finding> {
        self.router.within(async || look(rule, false).unwrap())
    }

    fn look_and_fix(&self, rule: &Rule) -> Vec<Finding> {
        self.router.within(async || look(rule, true).unwrap())
    }
}

/// Runs a command inside; what it prints.
fn inside(side: &Namespace, line: &str) -> String {
    let output = Command::new("nsenter")
        .arg(format!("--net=/run/netns/{}", side.name))
        .args(line.split_whitespace())
        .output()
        .unwrap();
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{line}: {}", said(&output.stderr));
    said(&output.stdout)
}

fn ethtool(side: &Namespace, device: &str, setting: &str) {
    inside(side, &format!("ethtool -K {device} {setting}"));
}

fn features(side: &Namespace, device: &str) -> String {
    inside(side, &format!("ethtool -k {device}"))
}

fn rule(from: &str, to: &str) -> Rule {
    Rule {
        proto: Proto::Udp,
        from: from.parse().unwrap(),
        to: to.parse().unwrap(),
        dev: None,
        snat: Snat::Auto,
        log: None,
    }
}

fn ordinary() -> Rule {
    rule("10.0.8.17:8080", "10.0.1.2:8083")
}

fn of(findings: &[Finding], backend: Backend) -> &Finding {
    let mut found = findings.iter().filter(|f| f.backend == backend);
    let one = found.next().unwrap();
    assert!(found.next().is_none());
    assert_eq!(one.plan.is_some(), one.refused.is_empty(), "{one:#?}");
    one
}

#[track_caller]
fn possible(findings: &[Finding], backend: Backend) -> &Finding {
    let found = of(findings, backend);
    assert!(found.plan.is_some(), "{found:#?}");
    found
}

/// The backend is refused, for a reason with `why` and a way out with `todo`.
#[track_caller]
fn refused<'a>(findings: &'a [Finding], backend: Backend, why: &str, todo: &str) -> &'a Finding {
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
fn noted(finding: &Finding, what: &str) {
    assert!(
        finding.notes.iter().any(|n| n.contains(what)),
        "'{what}' in {finding:#?}"
    );
}

const BPF: [Backend; 4] = [
    Backend::XdpRedirect,
    Backend::TcxPeer,
    Backend::Xdp,
    Backend::Tcx,
];

#[test]
fn fresh_veths_refuse_xdp_for_checksums_and_napi() {
    let net = Net::new();
    let found = net.look(&ordinary());
    let order: Vec<Backend> = found.iter().map(|f| f.backend).collect();
    assert_eq!(order, Backend::FASTEST_FIRST);
    let client = net.client.name.clone();
    for backend in [Backend::Xdp, Backend::XdpRedirect] {
        let todo = format!(
            "nsenter --net=/run/netns/{client} ethtool -K c0 tx-checksum-ip-generic off (--fix does it)"
        );
        refused(
            &found,
            backend,
            "c0, the far end of r0, leaves checksums unfinished",
            &todo,
        );
    }
    // Replies are rewritten by XDP too, with xdp-redirect only.
    let both = refused(
        &found,
        Backend::XdpRedirect,
        "s0, the far end of r1, leaves",
        "s0 tx-",
    );
    assert_eq!(both.refused.len(), 4, "{both:#?}");
    assert_eq!(of(&found, Backend::Xdp).refused.len(), 1);
    for end in ["c0", "s0"] {
        let why = format!(
            "{end}, the far end of r{}, does not poll by NAPI",
            u8::from(end == "s0")
        );
        refused(
            &found,
            Backend::XdpRedirect,
            &why,
            &format!("ethtool -K {end} rx-gro on"),
        );
    }
    for backend in [Backend::TcxPeer, Backend::Tcx, Backend::Nft] {
        let plan = possible(&found, backend).plan.as_ref().unwrap();
        assert_eq!(plan.target_dev.as_ref().unwrap().name, "r1");
        assert_eq!((plan.snat, &plan.fixes), (None, &vec![]));
        let client = plan.client_dev.as_ref().map(|d| d.name.as_str());
        assert_eq!(client, Some("r0").filter(|_| backend != Backend::Nft));
    }
}

#[test]
fn what_was_cured_by_hand_is_possible() {
    let net = Net::new().ready();
    for rule in [ordinary(), rule("[fd00:8::17]:8080", "[fd00:1::2]:8083")] {
        let found = net.look(&rule);
        for backend in Backend::FASTEST_FIRST {
            let found = possible(&found, backend);
            assert!(found.todo.is_empty() && !found.by_name_only, "{found:#?}");
            assert_eq!(found.plan.as_ref().unwrap().fixes, []);
        }
    }
}

#[test]
fn fixes_make_it_possible_and_are_taken_back() {
    let net = Net::new();
    let before = [features(&net.client, "c0"), features(&net.server, "s0")];
    let rule = ordinary();
    let found = net.look_and_fix(&rule);
    let fixes = &possible(&found, Backend::XdpRedirect)
        .plan
        .as_ref()
        .unwrap()
        .fixes;
    assert_eq!(fixes.len(), 4, "{fixes:#?}");
    assert_eq!(
        possible(&found, Backend::Xdp)
            .plan
            .as_ref()
            .unwrap()
            .fixes
            .len(),
        1
    );
    assert_eq!(
        possible(&found, Backend::Tcx).plan.as_ref().unwrap().fixes,
        []
    );
    assert_eq!(
        features(&net.client, "c0"),
        before[0],
        "looking changes nothing"
    );

    net.router.within(async || fixes::apply(fixes).unwrap());
    let found = net.look(&rule);
    assert_eq!(
        possible(&found, Backend::XdpRedirect)
            .plan
            .as_ref()
            .unwrap()
            .fixes,
        []
    );
    for (side, device) in [(&net.client, "c0"), (&net.server, "s0")] {
        let now = features(side, device);
        for line in [
            "tx-checksum-ip-generic: off",
            "tx-tcp-segmentation: off",
            "generic-receive-offload: on",
            // Not asked for, and not needed.
            "tx-checksum-sctp: on",
        ] {
            assert!(now.contains(line), "{line} in {now}");
        }
    }
    net.router.within(async || fixes::undo(fixes).unwrap());
    let after = [features(&net.client, "c0"), features(&net.server, "s0")];
    assert_eq!(after, before, "with TSO, which depends on the checksum");
    net.router.within(async || fixes::undo(fixes).unwrap());
    assert_eq!(
        features(&net.client, "c0"),
        before[0],
        "once more does nothing"
    );
}

#[test]
fn fixes_of_other_rules_are_relied_on() {
    let net = Net::new();
    let rule = ordinary();
    let in_force: Vec<Fix> = {
        let found = net.look_and_fix(&rule);
        possible(&found, Backend::XdpRedirect)
            .plan
            .clone()
            .unwrap()
            .fixes
    };
    net.router.within(async || fixes::apply(&in_force).unwrap());
    let found = net
        .router
        .within(async || look_beside(&rule, false, &in_force).unwrap());
    let fixes = |backend| possible(&found, backend).plan.clone().unwrap().fixes;
    assert_eq!(fixes(Backend::XdpRedirect), in_force);
    assert_eq!(fixes(Backend::Xdp).len(), 1);
    assert_eq!(fixes(Backend::Tcx), []);
}
