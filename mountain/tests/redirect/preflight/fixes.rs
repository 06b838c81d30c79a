// SPDX-License-Identifier: GPL-2.0-or-later
//! What makes backends possible, and what takes it back.

use mountain::redirect::preflight::HostReadings;
use mountain::redirect::{fixes, Backend, Fix};

use super::net::*;
use crate::support::{assert_has, wait_until, Ns, LEAVE};
use Backend::{Nft, Tcx, TcxPeer, Xdp, XdpRedirect};

#[test]
fn fixes_make_it_possible_and_are_taken_back() {
    let net = Net::bare();
    let both = || [features(&net.client, "c0"), features(&net.server, "s0")];
    let before = both();
    let rule = ordinary();
    let found = net.look_and_fix(&rule);
    let fixes = &found.plan(XdpRedirect).fixes;
    assert_eq!(fixes.len(), 4, "{fixes:#?}");
    assert_eq!(found.plan(Xdp).fixes.len(), 1);
    assert_eq!(found.plan(Tcx).fixes, []);
    assert_eq!(both(), before, "looking changes nothing");

    net.router.within(async || fixes::apply(fixes).unwrap());
    let found = net.look(&rule);
    assert_eq!(found.plan(XdpRedirect).fixes, []);
    // Those of other rules are relied on.
    let found = net.router.within(async || {
        let mut readings = HostReadings::default();
        Found(readings.look(&rule, false, fixes).unwrap())
    });
    assert_eq!(found.plan(XdpRedirect).fixes, *fixes);
    assert_eq!(found.plan(Xdp).fixes.len(), 1);
    assert_eq!(found.plan(Tcx).fixes, []);
    for (side, device) in [(&net.client, "c0"), (&net.server, "s0")] {
        let now = [
            "tx-checksum-ip-generic: off",
            "tx-tcp-segmentation: off",
            "generic-receive-offload: on",
            // Not asked for, and not needed.
            "tx-checksum-sctp: on",
        ];
        assert_has(&features(side, device), &now);
    }
    net.router.within(async || fixes::undo(fixes).unwrap());
    assert_eq!(both(), before, "with TSO, which depends on the checksum");
    net.router.within(async || fixes::undo(fixes).unwrap());
    assert_eq!(both(), before, "once more does nothing");
}

#[test]
fn forwarding_is_needed_and_can_be_switched_on() {
    let net = Net::new().ready();
    net.router.sysctl("net/ipv4/ip_forward", "0");
    net.router.sysctl("net/ipv6/conf/all/forwarding", "0");
    let values = || net.router.run("sysctl -a --pattern forward");
    let before = values();
    for (rule, todo) in [
        (ordinary(), "sysctl -w net.ipv4.conf.rc.forwarding=1 (--fix"),
        (
            rule("[fd08::17]:80", "[fd01::2]:80"),
            "sysctl -w net.ipv6.conf.",
        ),
    ] {
        let found = net.look(&rule);
        for backend in FASTEST_FIRST {
            let looks_up = matches!(backend, XdpRedirect | TcxPeer);
            let why = match rule.to.is_ipv4() || !looks_up {
                true => "does not forward packets",
                false => "stops look-ups by BPF",
            };
            found.refuses(backend, why, todo);
        }
        let found = net.look_and_fix(&rule);
        found.only(&FASTEST_FIRST);
        let fixes = &found.plan(XdpRedirect).fixes;
        let pings = || net.client.pings(&format!("-c 1 -W 1 {}", rule.to.ip()));
        assert!(!pings());
        net.router.within(async || fixes::apply(fixes).unwrap());
        net.look(&rule).only(&FASTEST_FIRST);
        wait_until(&format!("packets pass: {fixes:#?}"), LEAVE, pings);
        net.router.within(async || fixes::undo(fixes).unwrap());
        assert_eq!(values(), before);
    }
    // Without a device all of them have to forward.
    let transit = rule("192.0.2.1:80", "10.0.1.2:80");
    // Who undoes that would switch off what others have switched on.
    for found in [net.look(&transit), net.look_and_fix(&transit)] {
        let todo = "net.ipv4.ip_forward=1 (for all devices, so --fix leaves it alone)";
        found.refuses(Nft, "net.ipv4.ip_forward = 0", todo);
    }
}

#[test]
fn fixes_are_all_or_nothing_and_leave_what_others_set() {
    let mut net = Net::bare();
    let feature = |side: &Ns, name: &str, feature: &str, on| Fix::Feature {
        namespace: side.within(async || mountain::host::namespaces::this_namespace().unwrap()),
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
    let proxy = || net.router.run("sysctl -n net.ipv4.conf.rc.proxy_arp");
    let gro = |side, device| features(side, device).contains("generic-receive-offload: on");

    let good = [
        sysctl("net/ipv4/conf/rc/proxy_arp"),
        feature(&net.client, "c0", "rx-gro", true),
        feature(&net.router, "rs", "rx-gro", true),
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
        let are_off = !gro(&net.client, "c0") && !gro(&net.router, "rs");
        assert!(are_off, "{error}");
    }

    apply(&good).unwrap();
    apply(&good).unwrap();
    assert!(proxy() == "1\n" && gro(&net.client, "c0") && gro(&net.router, "rs"));
    // What somebody has changed since is theirs.
    net.router.sysctl("net/ipv4/conf/rc/proxy_arp", "2");
    undo(&good).unwrap();
    assert_eq!(proxy(), "2\n");
    assert!(!gro(&net.client, "c0") && !gro(&net.router, "rs"));

    // What earlier versions have switched on for all devices stays on.
    for path in ["net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"] {
        net.router.sysctl(path, "1");
        undo(&[sysctl(path)]).unwrap();
        let now = net.router.run(&format!("cat /proc/sys/{path}"));
        assert_eq!(now, "1\n", "{path}");
    }

    // Gone is fine: the device here, a namespace there.
    apply(&good[1..]).unwrap();
    net.router.ip("link del rs");
    undo(&good[1..]).unwrap();
    assert!(!gro(&net.client, "c0"));
    apply(&good[1..2]).unwrap();
    net.client = Ns::new("c");
    undo(&good).unwrap();
}
