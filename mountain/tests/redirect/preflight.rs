// SPDX-License-Identifier: GPL-2.0-or-later
//! What `redirect::preflight` finds on real devices, and what `redirect::fixes` does about it, in
//! network namespaces of its own (../net.rs). Needs root.

#[path = "preflight/fixes.rs"]
mod fixing;
mod net;
mod proof;

use crate::support::tcx::attach_passing_xdp;
use crate::support::Ns;
use mountain::redirect::{fixes, Backend, Rule, Snat};
use net::*;
use Backend::{Nft, Tcx, TcxPeer, Xdp, XdpRedirect};

#[test]
fn fresh_veths_refuse_xdp_for_checksums_and_napi() {
    let net = Net::bare();
    let found = net.look(&ordinary());
    let order: Vec<Backend> = found.0.iter().map(|f| f.backend).collect();
    assert_eq!(order, Backend::ALL);
    let client = net.client.name.clone();
    for backend in [Xdp, XdpRedirect] {
        let todo = format!(
            "nsenter --net=/run/netns/{client} ethtool -K c0 tx-checksum-ip-generic off (--fix does it)"
        );
        let why = "c0, the far end of rc, leaves checksums unfinished";
        found.refuses(backend, why, &todo);
    }
    // Replies are rewritten by XDP too, with xdp-redirect only.
    let both = found.refuses(XdpRedirect, "s0, the far end of rs, leaves", "s0 tx-");
    assert_eq!(both.refused.len(), 4, "{both:#?}");
    assert_eq!(found.of(Xdp).refused.len(), 1);
    for (end, near) in [("c0", "rc"), ("s0", "rs")] {
        let why = format!("{end}, the far end of {near}, does not poll by NAPI");
        found.refuses(XdpRedirect, &why, &format!("ethtool -K {end} rx-gro on"));
    }
    for backend in [TcxPeer, Tcx, Nft] {
        let plan = found.plan(backend);
        assert_eq!(plan.target_dev.as_ref().unwrap().name, "rs");
        assert_eq!(plan.fixes, []);
        // Clients of nft may come in by the target's device, too.
        let source = Some("10.0.1.1".parse().unwrap());
        assert_eq!(plan.snat, source.filter(|_| backend == Nft));
        let client = plan.client_dev.as_ref().map(|d| d.name.as_str());
        assert_eq!(client, Some("rc").filter(|_| backend != Nft));
    }
    // Cured by hand, all are possible.
    let net = net.ready();
    for rule in [ordinary(), rule("[fd08::17]:8080", "[fd01::2]:8083")] {
        let found = net.look(&rule);
        for backend in FASTEST_FIRST {
            assert_eq!(found.plan(backend).fixes, []);
            let found = found.of(backend);
            assert!(found.todo.is_empty() && !found.by_name_only, "{found:#?}");
        }
    }
}

#[test]
fn looking_changes_nothing() {
    let net = Net::bare();
    net.router.sysctl("net/ipv4/ip_forward", "0");
    let all = || {
        let mut text = String::new();
        for (side, devices) in [
            (&net.client, &["c0"][..]),
            (&net.router, &["rc", "rs"]),
            (&net.server, &["s0"]),
        ] {
            // With neighbours, none of which may come by a look.
            text += &side.fingerprint();
            text += &side.run("ip addr");
            text += &side.run("nft list ruleset");
            for device in devices {
                text += &features(side, device);
            }
        }
        text
    };
    // The kernel's link watch takes up to a second.
    while all().contains("state DOWN") || all().contains("state LOWERLAYERDOWN") {
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    let before = all();
    for rule in [ordinary(), rule("[fd08::17]:80", "[fd01::2]:80")] {
        net.look(&rule);
        net.look_and_fix(&rule);
    }
    let after = all();
    let lines = before.lines().zip(after.lines());
    let changed: Vec<_> = lines.filter(|(a, b)| a != b).collect();
    assert!(before == after, "{changed:#?}");
}

#[test]
fn targets_without_a_way_back_are_named() {
    let net = Net::bare();
    let text = "10.0.1.2 has no route to 10.0.8.17: replies to clients there do not come back";
    net.look(&ordinary()).notes(Nft, text);
    let silent = |rule: &Rule| {
        let notes = net.look(rule).of(Nft).notes.join("\n");
        assert!(!notes.contains("has no route"), "{notes}");
    };
    silent(&always());
    net.server.ip("route add default via 10.0.1.1");
    silent(&ordinary());
}

#[test]
fn hairpins_rewrite_the_source() {
    let net = Net::bare().ready();
    net.client.ip("addr add 10.0.8.19/24 dev c0");
    net.client.ip("addr add fd08::19/64 dev c0 nodad");
    for (mut rule, source) in [
        (rule("10.0.8.17:80", "10.0.8.19:8080"), "10.0.8.17"),
        (rule("[fd08::17]:80", "[fd08::19]:8080"), "fd08::17"),
    ] {
        let found = net.look(&rule);
        found.only(&[XdpRedirect, Tcx, Nft]);
        for backend in [XdpRedirect, Tcx, Nft] {
            let plan = found.plan(backend);
            assert_eq!(plan.snat, Some(source.parse().unwrap()), "{plan:?}");
            assert_eq!(plan.target_dev.as_ref().unwrap().name, "rc");
        }
        let why = "the source address has to be rewritten";
        found.refuses(Xdp, why, "use xdp-redirect, tcx");
        rule.snat = Snat::Never;
        let found = net.look(&rule);
        let plan = found.plan(Xdp);
        assert_eq!(plan.snat, None);
        found.notes(Xdp, "replies reach clients only if");
    }
    // Not a hairpin: only when asked for.
    let source = net.look(&always()).plan(Tcx).snat;
    assert_eq!(source, Some("10.0.1.1".parse().unwrap()));
}

#[test]
fn targets_on_this_host() {
    let net = Net::bare().ready();
    let found = net.look(&rule("10.0.8.17:80", "10.0.1.1:8080"));
    found.only(&[Xdp, Tcx, Nft]);
    found.refuses(XdpRedirect, "10.0.1.1 is on this host", "");
    let plan = found.plan(Xdp);
    assert_eq!((&plan.target_dev, plan.snat), (&None, None));

    // What comes in by the other device would be lost.
    let loopback = rule("10.0.8.17:80", "127.0.0.1:8080");
    let found = net.look_and_fix(&loopback);
    found.only(&[]);
    found.refuses(Nft, "what comes in by rs, which drops", "--dev rc");
    let loopback = Rule {
        dev: Some("rc".to_owned()),
        ..loopback
    };
    let found = net.look(&loopback);
    found.only(&[]);
    found.refuses(Tcx, "dropped as a martian", "or use nft");
    let todo = "sysctl -w net.ipv4.conf.rc.route_localnet=1 (--fix does it)";
    found.refuses(Nft, "route_localnet = 0", todo);
    let found = net.look_and_fix(&loopback);
    found.only(&[Nft]);
    found.notes(Nft, "lets hosts behind rc reach everything");
    let fixes = &found.plan(Nft).fixes;
    net.router.within(async || fixes::apply(fixes).unwrap());
    net.look(&loopback).only(&[Nft]);
    net.router.within(async || fixes::undo(fixes).unwrap());
    net.look(&loopback).only(&[]);

    net.look_and_fix(&rule("[fd08::17]:80", "[::1]:8080"))
        .only(&[]);
    // What this host sends to itself is nft's.
    net.look(&rule("127.0.0.1:80", "10.0.1.2:80")).only(&[]);
    let own = net.look(&rule("127.0.0.1:80", "127.0.0.1:8080"));
    own.only(&[Nft]);
    own.refuses(Tcx, "only this host itself sends to 127.0.0.1", "use nft");
}

/// As hosts with several uplinks have them.
#[test]
fn addresses_of_the_loopback_device_are_reached_by_any_other() {
    let net = Net::bare().ready();
    net.router.ip("addr add 192.0.2.1/32 dev lo");
    net.router.sysctl("net.ipv4.ip_forward", "0");
    for device in ["lo", "rs"] {
        net.router
            .sysctl(&format!("net.ipv4.conf.{device}.forwarding"), "1");
    }
    let common = rule("192.0.2.1:80", "10.0.1.2:8083");
    let found = net.look_and_fix(&common);
    found.refuses(
        Nft,
        "this host does not forward packets",
        "net.ipv4.ip_forward=1",
    );
    found.refuses(
        Tcx,
        "no device by which clients come in holds 192.0.2.1",
        "--dev",
    );
    net.router.sysctl("net.ipv4.ip_forward", "1");
    net.look(&common).only(&[Nft]);
}

#[test]
fn devices_that_do_not_forward_what_a_rule_takes_are_named() {
    let net = Net::bare().ready();
    net.router
        .wire(("rx", &["10.0.9.1/24"]), &net.client, ("cx", &[]));
    let note = "also takes what comes in by rx: that is dropped";
    let notes = || net.look(&ordinary()).of(Nft).notes.join("\n");
    assert!(!notes().contains(note), "{}", notes());
    net.router.sysctl("net.ipv4.ip_forward", "0");
    for device in ["rc", "rs"] {
        net.router
            .sysctl(&format!("net.ipv4.conf.{device}.forwarding"), "1");
    }
    net.look(&ordinary()).notes(Nft, note);
    net.router.sysctl("net.ipv4.conf.rx.forwarding", "1");
    assert!(!notes().contains(note), "{}", notes());
}

#[test]
fn bpf_needs_to_know_where_clients_come_in() {
    let net = Net::bare().ready();
    let mut transit = rule("192.0.2.1:80", "10.0.1.2:80");
    let found = net.look(&transit);
    found.only(&[Nft]);
    for backend in BPF {
        found.refuses(
            backend,
            "no device by which clients come in holds 192.0.2.1",
            "--dev",
        );
    }
    transit.dev = Some("rc".to_owned());
    let found = net.look(&transit);
    found.only(&FASTEST_FIRST);
    found.notes(Tcx, "clients have to be routed through");
    let nft = found.plan(Nft);
    assert_eq!(nft.snat, None, "no hairpin by that device");
    assert_eq!(nft.client_dev.as_ref().unwrap().name, "rc");
    transit.dev = Some("nodev0".to_owned());
    for backend in FASTEST_FIRST {
        net.look(&transit)
            .refuses(backend, "there is no device nodev0", "ip link");
    }
    // An address that is held for all devices says nothing about one.
    net.router.ip("addr add 192.0.2.1/32 dev lo");
    transit.dev = None;
    let found = net.look(&transit);
    found.only(&[Nft]);
    found.refuses(
        Xdp,
        "no device by which clients come in holds 192.0.2.1",
        "--dev",
    );
}

#[test]
fn kinds_of_devices() {
    let net = Net::bare().ready();
    let router = &net.router;
    router.ip("link add br0 type bridge");
    // Kernels for virtual machines may lack it.
    let vlan = router.try_ip("link add link rc name rc.7 type vlan id 7");
    router.ip("tuntap add dev t0 mode tun");
    for (n, device) in ["br0", "t0"].iter().enumerate() {
        router.ip(&format!("addr add 10.1.{n}.1/24 dev {device}"));
        router.ip(&format!("link set {device} up"));
    }
    let by = |device: &str| net.look(&by_device(device));
    let found = by("br0");
    found.only(&[TcxPeer, Tcx, Nft]);
    found.refuses(Xdp, "br0 is a bridge device", "use tcx or nft");
    if vlan {
        let found = by("rc.7");
        found.refuses(XdpRedirect, "rc.7 is a vlan device", "use tcx");
        let found = by("rc");
        for backend in [XdpRedirect, Xdp, TcxPeer, Tcx] {
            let by_xdp = matches!(backend, XdpRedirect | Xdp);
            assert_eq!(found.of(backend).by_name_only, by_xdp, "{backend}");
        }
        found.notes(XdpRedirect, "VLAN devices stand on rc");
        router.ip("link del rc.7");
        assert!(!by("rc").of(XdpRedirect).by_name_only);
    }
    let found = by("t0");
    found.only(&[Nft]);
    for backend in BPF {
        found.refuses(backend, "t0 has no Ethernet headers", "use nft");
    }
    found.notes(Tcx, "t0 is down or has no carrier");
    // Neither can the other side be one.
    let found = net.look(&self::rule("10.0.8.17:80", "10.1.1.2:80"));
    found.only(&[Xdp, Tcx, Nft]);
    let found = net.look(&self::rule("10.0.8.17:80", "10.1.0.2:80"));
    found.only(&[Xdp, Tcx, Nft]);
    let why = "reached by br0, which is not a veth";
    found.refuses(TcxPeer, why, "use xdp-redirect");

    router.ip("link set rc master br0");
    let found = by("rc");
    found.only(&[]);
    found.refuses(Tcx, "rc is a port of the bridge br0", "--dev br0");
    found.refuses(Nft, "rc is a port of br0, by which nftables", "--dev br0");
}

fn attach_xdp(side: &Ns, device: &str, name: &str) {
    side.with(|| attach_passing_xdp(device, name));
}

#[test]
fn other_programs_stay() {
    let net = Net::bare();
    ethtool(&net.client, "c0", "tx off");
    ethtool(&net.server, "s0", "tx off");
    attach_xdp(&net.router, "rc", "firewall");
    let found = net.look_and_fix(&ordinary());
    found.only(&[TcxPeer, Tcx, Nft]);
    let todo = "ip link set dev rc xdp off";
    let why = "another XDP program is attached to rc: firewall";
    for backend in [Xdp, XdpRedirect] {
        found.refuses(backend, why, todo);
    }
    net.router.ip("link set dev rc xdp off");
    attach_xdp(&net.router, "rc", "mtn_redirect");
    net.look(&ordinary()).plan(Xdp);
    // A program at the far end polls, as GRO would.
    let found = net.look(&ordinary());
    let why = "c0, the far end of rc, does not poll";
    found.refuses(XdpRedirect, why, "c0 rx-gro on");
    let by_name = || [XdpRedirect, TcxPeer].map(|b| net.look(&ordinary()).of(b).by_name_only);
    assert_eq!(by_name(), [false, false]);
    attach_xdp(&net.server, "s0", "any");
    // What is put into a namespace goes past it.
    assert_eq!(by_name(), [false, true]);
    attach_xdp(&net.client, "c0", "any");
    let found = net.look(&ordinary());
    found.only(&FASTEST_FIRST);
    for (end, near) in [("c0", "rc"), ("s0", "rs")] {
        let text = format!("the XDP program at {end}, the far end of {near}");
        found.notes(TcxPeer, &text);
    }
}

#[test]
fn several_next_hops() {
    let net = Net::bare().ready();
    net.router
        .wire(("r2", &["10.0.2.1/24"]), &net.server, ("s1", &[]));
    net.server.ip("addr add 10.9.9.9/32 dev lo");
    let hop = "nexthop via 10.0.1.2 dev rs";
    net.router.ip(&format!(
        "route add 10.9.9.9 {hop} nexthop via 10.0.2.2 dev r2"
    ));
    let rule = rule("10.0.8.17:80", "10.9.9.9:80");
    let found = net.look(&rule);
    found.only(&[Xdp, Tcx, Nft]);
    found.refuses(XdpRedirect, "next hops on 2 devices", "route of its own");
    found.notes(Tcx, "several next hops");
    // And not at all where the source has to be rewritten.
    let always = Rule {
        snat: Snat::Always,
        ..rule.clone()
    };
    net.look(&always).only(&[Nft]);
    net.router.ip("route replace 10.9.9.9 via 10.0.1.2 dev rs");
    net.look(&rule).only(&FASTEST_FIRST);
    // One route with a next hop on the clients' device is a hairpin for some.
    net.router.ip(&format!(
        "route replace 10.9.9.9 {hop} nexthop via 10.0.8.18 dev rc"
    ));
    net.look(&rule).only(&[Nft]);
}

#[test]
fn peers_are_for_the_next_namespace() {
    let net = Net::bare().ready();
    net.router.ip("route add 10.0.3.0/24 via 10.0.1.2");
    let further = rule("10.0.8.17:80", "10.0.3.3:80");
    let found = net.look(&further);
    found.only(&[XdpRedirect, Xdp, Tcx, Nft]);
    let why = "not an address of the namespace behind rs";
    found.refuses(TcxPeer, why, "use xdp-redirect");
    net.server.ip("addr add 10.0.3.3/32 dev lo");
    let found = net.look(&further);
    found.only(&FASTEST_FIRST);
    // The target's own route is no way back.
    assert!(!found.of(TcxPeer).by_name_only, "{found:#?}");
    net.router.ip("route del 10.0.3.0/24");

    // Replies that are too large for the bridge.
    net.router.ip("link add br0 type bridge");
    net.router.ip("link set br0 up mtu 1400");
    let by_bridge = by_device("br0");
    let found = net.look(&by_bridge);
    let todo = format!(
        "nsenter --net=/run/netns/{} ip link set dev s0 mtu 1400",
        net.server.name
    );
    let why = "replies may have 1500 bytes, and br0 carries 1400";
    found.refuses(TcxPeer, why, &todo);
    for (side, device) in [(&net.client, "c0"), (&net.router, "rc")] {
        side.ip(&format!("link set {device} mtu 1400"));
    }
    let found = net.look(&ordinary());
    let peer = found.plan(TcxPeer);
    assert!(peer.client_dev.as_ref().unwrap().peer && peer.target_dev.as_ref().unwrap().peer);
    let text = "over 1400 bytes take the slower way";
    found.notes(XdpRedirect, text);
    for backend in [XdpRedirect, TcxPeer] {
        assert!(found.of(backend).by_name_only);
        let text = "replies may have 1500 bytes, and rc carries 1400";
        found.notes(backend, text);
    }
    assert!(!found.of(Tcx).by_name_only);
    let found = net.look(&always());
    found.only(&[Nft]);
    let why = "and rc carries 1400 bytes, rs 1500: larger packets would be lost";
    found.refuses(Tcx, why, "mtu 1400");
    net.server.ip("link set s0 mtu 1400");
    net.look(&by_bridge).plan(TcxPeer);
    // What the client sends may be larger than what the target takes.
    net.server.ip("link set s0 mtu 1300");
    for backend in [XdpRedirect, TcxPeer] {
        assert!(!net.look(&ordinary()).of(backend).by_name_only);
    }
    net.router.ip("link set rs mtu 1300");
    let found = net.look(&ordinary());
    assert!(!found.of(TcxPeer).by_name_only && found.of(XdpRedirect).by_name_only);
    let text = "packets may have 1400 bytes, and rs carries 1300";
    found.notes(XdpRedirect, text);

    // Both ends here.
    net.router
        .wire(("v0", &["10.0.4.1/24"]), &net.router, ("v1", &[]));
    for device in ["v0", "v1"] {
        ethtool(&net.router, device, "tx off");
        ethtool(&net.router, device, "gro on");
    }
    let found = net.look(&rule("10.0.8.17:80", "10.0.4.2:80"));
    let why = "both ends of the veth v0 are in this namespace";
    found.refuses(TcxPeer, why, "");
    found.plan(XdpRedirect);
}

#[test]
fn far_ends_out_of_sight() {
    let net = Net::bare().ready();
    let hidden = Ns::new("h");
    net.router.link("r5", &hidden, "c5");
    net.router.bring_up("r5", &["10.0.5.1/24"]);
    // A namespace that only a socket is in has neither a name nor a process.
    let _socket = hidden.udp("127.0.0.1:0");
    testkit::ip(&format!("netns del {}", hidden.name));
    let found = net.look_and_fix(&rule("10.0.5.1:80", "10.0.1.2:80"));
    found.only(&[TcxPeer, Tcx, Nft]);
    let why = "r5 is a veth whose far end cannot be looked at (the network namespace";
    for backend in [Xdp, XdpRedirect] {
        found.refuses(backend, why, "use tcx or nft");
    }
    let found = net.look_and_fix(&rule("10.0.8.17:80", "10.0.5.2:80"));
    found.only(&[Xdp, Tcx, Nft]);
    let why = "the far end of r5 cannot be looked at";
    found.refuses(TcxPeer, why, "use tcx or nft");
}

/// Replies leave by the kernel's routes, and its rules may ask more than a program knows.
#[test]
fn routes_are_not_gone_around_unasked() {
    let net = Net::bare().ready();
    let rules = [ordinary(), rule("[fd08::17]:8080", "[fd01::2]:8083")];
    let by_name = || -> Vec<Vec<Backend>> {
        let of = |rule: &Rule| net.look(rule).by_name_only();
        rules.iter().map(of).collect()
    };
    let (none, fast) = (vec![], vec![XdpRedirect, TcxPeer]);
    let (neither, four, six) = (
        [none.clone(), none.clone()],
        [fast.clone(), none.clone()],
        [none, fast],
    );
    // By the clients' device, and to a host of another link.
    net.router.ip("route add default via 10.0.8.18");
    net.router.ip("route add 10.0.1.77 dev rs");
    assert_eq!(by_name(), neither);
    for (family, what, of) in [
        ("", "route 10.9.9.0/24 via 10.0.1.2 dev rs", &four),
        ("", "route 0.0.0.0/1 via 10.0.1.2 dev rs", &four),
        ("-6 ", "route fd09::/64 via fd01::2 dev rs", &six),
        ("", "rule from 10.0.8.18 prohibit pref 100", &four),
        ("", "rule iif rs lookup 100 pref 100", &four),
        ("-6 ", "rule from fd01::2 lookup 100 pref 100", &six),
    ] {
        let (kind, rest) = what.split_once(' ').unwrap();
        net.router.ip(&format!("{family}{kind} add {rest}"));
        assert_eq!(by_name(), *of, "{what}");
        net.router.ip(&format!("{family}{kind} del {rest}"));
        assert_eq!(by_name(), neither, "{what}");
    }
    // Mountain's own rules lead by routes that count themselves.
    net.router
        .ip("rule add fwmark 7 lookup 100 pref 100 protocol 77");
    assert_eq!(by_name(), neither);
    net.router.ip("route add 10.9.9.0/24 via 10.0.1.2");
    let found = net.look(&rules[0]);
    found.notes(TcxPeer, "may leave by the route 10.9.9.0/24 by rs");
}

#[test]
fn firewalls_are_not_gone_around_unasked() {
    let net = Net::bare().ready();
    // To a client of another link replies leave by that link's device, whatever client device a rule has.
    let hook = "filter hook forward priority 0";
    for (rule, counts) in [
        ("oifname mgmt0 drop", true),
        ("oifname mgmt0 accept", false),
        ("iifname mgmt0 drop", false),
    ] {
        net.router.chain("inet guard f", hook, rule);
        for backend in [XdpRedirect, TcxPeer, Tcx] {
            let by_name = net.look(&ordinary()).of(backend).by_name_only;
            assert_eq!(by_name, counts && backend != Tcx, "{backend}, {rule}");
        }
        net.router.nft("delete table inet guard");
    }
    let nft = |line: &str| drop(net.router.run(&format!("nft {line}")));
    nft("add table ip filter");
    nft("add chain ip filter FORWARD { type filter hook forward priority 0 ; policy accept ; }");
    nft("add rule ip filter FORWARD iifname nosuch counter accept");
    nft("add table ip6 filter");
    nft("add chain ip6 filter FORWARD { type filter hook forward priority 0 ; policy drop ; }");
    let by_name = |rule: &Rule| net.look(rule).by_name_only();
    assert_eq!(by_name(&ordinary()), []);
    let v6 = rule("[fd08::17]:80", "[fd01::2]:80");
    assert_eq!(by_name(&v6), [XdpRedirect, TcxPeer]);
    net.look(&v6)
        .notes(Tcx, "the policy of chain ip6 filter FORWARD");

    nft("add chain ip filter DOCKER-USER");
    nft("add rule ip filter FORWARD jump DOCKER-USER");
    assert_eq!(by_name(&ordinary()), []);
    nft("add rule ip filter DOCKER-USER ip saddr 192.0.2.0/24 drop");
    assert_eq!(by_name(&ordinary()), [XdpRedirect, TcxPeer]);
    let found = net.look(&ordinary());
    let text = "ip filter DOCKER-USER handle";
    found.notes(XdpRedirect, text);
    found.notes(Nft, "may drop redirected packets, by ip filter DOCKER-USER");
    // Rules that see packets as clients send them, for every backend but nft.
    nft("delete table ip filter");
    nft("add table ip early");
    nft("add chain ip early raw { type filter hook prerouting priority -300 ; }");
    nft("add rule ip early raw meta l4proto icmp drop");
    assert_eq!(by_name(&ordinary()), []);
    let rule = ordinary();
    let (proto, ip, port) = (rule.proto, rule.from.ip(), rule.from.port());
    let matching = format!("ip daddr {ip} {proto} dport {port} drop");
    nft(&format!("add rule ip early raw {matching}"));
    assert_eq!(by_name(&rule), [XdpRedirect, TcxPeer, Xdp, Tcx]);
    net.look(&rule).notes(Tcx, "ip early raw handle");
    // One that nft itself never sees packets for.
    nft("flush chain ip early raw");
    nft(&format!("add rule ip early raw ip daddr {ip} notrack"));
    net.look(&rule)
        .notes(Nft, "never come to be redirected by nft");
}
