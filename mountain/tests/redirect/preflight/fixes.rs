// SPDX-License-Identifier: GPL-2.0-or-later
//! What makes backends possible, and what takes it back.

use std::process::Command;

use mountain::redirect::preflight::HostReadings;
use mountain::redirect::{fixes, Backend, Fix};

use super::net::*;
use crate::support::netns::Namespace;
use Backend::{Nft, Tcx, Xdp, XdpRedirect};

#[test]
fn fixes_make_it_possible_and_are_taken_back() {
    let net = Net::new();
    let before = [features(&net.client, "c0"), features(&net.server, "s0")];
    let rule = ordinary();
    let found = net.look_and_fix(&rule);
    let fixes = &possible(&found, XdpRedirect).plan.as_ref().unwrap().fixes;
    assert_eq!(fixes.len(), 4, "{fixes:#?}");
    assert_eq!(possible(&found, Xdp).plan.as_ref().unwrap().fixes.len(), 1);
    assert_eq!(possible(&found, Tcx).plan.as_ref().unwrap().fixes, []);
    assert_eq!(
        features(&net.client, "c0"),
        before[0],
        "looking changes nothing"
    );

    net.router.within(async || fixes::apply(fixes).unwrap());
    let found = net.look(&rule);
    assert_eq!(
        possible(&found, XdpRedirect).plan.as_ref().unwrap().fixes,
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
        possible(&found, XdpRedirect).plan.clone().unwrap().fixes
    };
    net.router.within(async || fixes::apply(&in_force).unwrap());
    let found = net.router.within(async || {
        HostReadings::default()
            .look(&rule, false, &in_force)
            .unwrap()
    });
    let fixes = |backend| possible(&found, backend).plan.clone().unwrap().fixes;
    assert_eq!(fixes(XdpRedirect), in_force);
    assert_eq!(fixes(Xdp).len(), 1);
    assert_eq!(fixes(Tcx), []);
}

#[test]
fn forwarding_is_needed_and_can_be_switched_on() {
    let net = Net::new().ready();
    net.client.ip("route add default via 10.0.8.17");
    net.server.ip("route add default via 10.0.1.1");
    net.client.ip("-6 route add default via fd00:8::17");
    net.server.ip("-6 route add default via fd00:1::1");
    net.router.sysctl("net/ipv4/ip_forward", "0");
    net.router.sysctl("net/ipv6/conf/all/forwarding", "0");
    let values = || inside(&net.router, "sysctl -a --pattern forward");
    let before = values();
    for (rule, todo) in [
        (ordinary(), "sysctl -w net.ipv4.conf.r0.forwarding=1 (--fix"),
        (
            rule("[fd00:8::17]:80", "[fd00:1::2]:80"),
            "sysctl -w net.ipv6.conf.",
        ),
    ] {
        let found = net.look(&rule);
        for backend in Backend::FASTEST_FIRST {
            let why = match rule.to.is_ipv4() || backend != XdpRedirect {
                true => "does not forward packets",
                false => "stops look-ups by BPF",
            };
            refused(&found, backend, why, todo);
        }
        let found = net.look_and_fix(&rule);
        only(&found, &Backend::FASTEST_FIRST);
        let fixes = &possible(&found, XdpRedirect).plan.as_ref().unwrap().fixes;
        let pings = || {
            let to = rule.to.ip().to_string();
            let mut ping = Command::new("nsenter");
            ping.arg(format!("--net=/run/netns/{}", net.client.name));
            ping.args(["ping", "-c", "1", "-W", "1", &to]);
            ping.output().unwrap().status.success()
        };
        assert!(!pings());
        net.router.within(async || fixes::apply(fixes).unwrap());
        only(&net.look(&rule), &Backend::FASTEST_FIRST);
        assert!(pings(), "{fixes:#?}");
        net.router.within(async || fixes::undo(fixes).unwrap());
        assert_eq!(values(), before);
    }
    // Without a device all of them have to forward.
    let transit = rule("192.0.2.1:80", "10.0.1.2:80");
    refused(
        &net.look(&transit),
        Nft,
        "net.ipv4.ip_forward = 0",
        "net.ipv4.ip_forward=1",
    );
}

#[test]
fn fixes_are_all_or_nothing_and_leave_what_others_set() {
    let net = Net::new();
    let feature = |side: &Namespace, name: &str, feature: &str, on| Fix::Feature {
        namespace: side.within(async || mountain::cc::scope::this_namespace().unwrap()),
        device: mountain::redirect::RuleDevice {
            ifindex: side.index(name),
            name: name.to_owned(),
            peer: false,
        },
        feature: feature.to_owned(),
        on,
    };
    let sysctl = |path: &str| Fix::Sysctl {
        path: path.to_owned(),
        before: "0".to_owned(),
        value: "1".to_owned(),
    };
    let apply = |fixes: &[Fix]| net.router.within(async || fixes::apply(fixes));
    let undo = |fixes: &[Fix]| net.router.within(async || fixes::undo(fixes));
    let proxy = || inside(&net.router, "sysctl -n net.ipv4.conf.r0.proxy_arp");
    let gro = |side, device| features(side, device).contains("generic-receive-offload: on");

    let good = [
        sysctl("net/ipv4/conf/r0/proxy_arp"),
        feature(&net.client, "c0", "rx-gro", true),
        feature(&net.router, "r1", "rx-gro", true),
    ];
    for bad in [
        sysctl("net/ipv4/conf/nodev0/proxy_arp"),
        sysctl("net/../kernel/panic"),
        feature(&net.server, "s0", "tx-checksum-ipv4", true),
        feature(&net.server, "s0", "no-such-feature", true),
        // Another device has the index now.
        Fix::Feature {
            namespace: 0,
            device: mountain::redirect::RuleDevice {
                ifindex: 1,
                name: "lo".to_owned(),
                peer: false,
            },
            feature: "rx-gro".to_owned(),
            on: false,
        },
    ] {
        let fixes: Vec<Fix> = good.iter().cloned().chain([bad]).collect();
        let error = format!("{:#}", apply(&fixes).unwrap_err());
        assert!(error.starts_with("cannot set "), "{error}");
        assert_eq!(proxy(), "0\n");
        assert!(
            !gro(&net.client, "c0") && !gro(&net.router, "r1"),
            "{error}"
        );
    }

    apply(&good).unwrap();
    apply(&good).unwrap();
    assert!(proxy() == "1\n" && gro(&net.client, "c0") && gro(&net.router, "r1"));
    // What somebody has changed since is theirs.
    net.router.sysctl("net/ipv4/conf/r0/proxy_arp", "2");
    undo(&good).unwrap();
    assert_eq!(proxy(), "2\n");
    assert!(!gro(&net.client, "c0") && !gro(&net.router, "r1"));

    // Gone is fine: the device here, a namespace there.
    apply(&good[1..]).unwrap();
    net.router.ip("link del r1");
    undo(&good[1..]).unwrap();
    assert!(!gro(&net.client, "c0"));
    apply(&good[1..2]).unwrap();
    let Net {
        client,
        router,
        server: _server,
    } = net;
    drop(client);
    router.within(async || fixes::undo(&good).unwrap());
}
