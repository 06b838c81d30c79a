// SPDX-License-Identifier: GPL-2.0-or-later
//! What `redirect::preflight` finds on real devices, and what `redirect::fixes` does about it, in
//! network namespaces of its own. Needs root.
//!
//! ```text
//!   client c0 10.0.8.18 ---- 10.0.8.17 r0  router  r1 10.0.1.1 ---- 10.0.1.2 s0  server
//! ```
//!
//! Likewise fd00:8::18, ::17 and fd00:1::1, ::2.

#[path = "preflight/fixes.rs"]
mod fixing;
mod net;
mod proof;

use crate::support::netns::Namespace;
use crate::support::tcx::attach_passing_xdp;
use mountain::redirect::{fixes, Backend, Rule, Snat};
use net::*;
use Backend::{Nft, Tcx, TcxPeer, Xdp, XdpRedirect};

#[test]
fn fresh_veths_refuse_xdp_for_checksums_and_napi() {
    let net = Net::new();
    let found = net.look(&ordinary());
    let order: Vec<Backend> = found.iter().map(|f| f.backend).collect();
    assert_eq!(order, Backend::ALL);
    let client = net.client.name.clone();
    for backend in [Xdp, XdpRedirect] {
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
        XdpRedirect,
        "s0, the far end of r1, leaves",
        "s0 tx-",
    );
    assert_eq!(both.refused.len(), 4, "{both:#?}");
    assert_eq!(of(&found, Xdp).refused.len(), 1);
    for end in ["c0", "s0"] {
        let why = format!(
            "{end}, the far end of r{}, does not poll by NAPI",
            u8::from(end == "s0")
        );
        refused(
            &found,
            XdpRedirect,
            &why,
            &format!("ethtool -K {end} rx-gro on"),
        );
    }
    for backend in [TcxPeer, Tcx, Nft] {
        let plan = possible(&found, backend).plan.as_ref().unwrap();
        assert_eq!(plan.target_dev.as_ref().unwrap().name, "r1");
        assert_eq!(plan.fixes, []);
        // Clients of nft may come in by the target's device, too.
        let source = Some("10.0.1.1".parse().unwrap());
        assert_eq!(plan.snat, source.filter(|_| backend == Nft));
        let client = plan.client_dev.as_ref().map(|d| d.name.as_str());
        assert_eq!(client, Some("r0").filter(|_| backend != Nft));
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
fn looking_changes_nothing() {
    let net = Net::new();
    net.router.sysctl("net/ipv4/ip_forward", "0");
    let all = || {
        let mut text = String::new();
        for (side, devices) in [
            (&net.client, &["c0"][..]),
            (&net.router, &["r0", "r1"]),
            (&net.server, &["s0"]),
        ] {
            for line in [
                "ip -d link",
                "ip addr",
                "ip route show table all",
                "ip -6 route show table all",
                "ip rule",
                "bpftool net show",
                "nft list ruleset",
                "sysctl -a --pattern ^net",
            ] {
                text += &testkit::own_sysctls(&inside(side, line));
            }
            // Neighbours come and go with the kernel's own packets; none may come by a look.
            text += &inside(side, "ip -4 neigh");
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
    for rule in [ordinary(), rule("[fd00:8::17]:80", "[fd00:1::2]:80")] {
        net.look(&rule);
        net.look_and_fix(&rule);
    }
    let after = all();
    let changed: Vec<_> = before
        .lines()
        .zip(after.lines())
        .filter(|(a, b)| a != b)
        .collect();
    assert!(before == after, "{changed:#?}");
}

#[test]
fn targets_without_a_way_back_are_named() {
    let net = Net::new();
    let text = "10.0.1.2 has no route to 10.0.8.17: replies to clients there do not come back";
    noted(of(&net.look(&ordinary()), Nft), text);
    let mut always = ordinary();
    always.snat = Snat::Always;
    let silent = |rule: &Rule| {
        let notes = of(&net.look(rule), Nft).notes.clone();
        assert!(
            !notes.iter().any(|n| n.contains("has no route")),
            "{notes:#?}"
        );
    };
    silent(&always);
    net.server.ip("route add default via 10.0.1.1");
    silent(&ordinary());
}

#[test]
fn hairpins_rewrite_the_source() {
    let net = Net::new().ready();
    net.client.ip("addr add 10.0.8.19/24 dev c0");
    net.client.ip("addr add fd00:8::19/64 dev c0 nodad");
    for (mut rule, source) in [
        (rule("10.0.8.17:80", "10.0.8.19:8080"), "10.0.8.17"),
        (rule("[fd00:8::17]:80", "[fd00:8::19]:8080"), "fd00:8::17"),
    ] {
        let found = net.look(&rule);
        only(&found, &[XdpRedirect, Tcx, Nft]);
        for backend in [XdpRedirect, Tcx, Nft] {
            let plan = possible(&found, backend).plan.as_ref().unwrap();
            assert_eq!(plan.snat, Some(source.parse().unwrap()), "{plan:?}");
            assert_eq!(plan.target_dev.as_ref().unwrap().name, "r0");
        }
        refused(
            &found,
            Xdp,
            "the source address has to be rewritten",
            "use xdp-redirect, tcx",
        );
        rule.snat = Snat::Never;
        let found = net.look(&rule);
        let plan = possible(&found, Xdp).plan.as_ref().unwrap();
        assert_eq!(plan.snat, None);
        noted(of(&found, Xdp), "replies reach clients only if");
    }
    // Not a hairpin: only when asked for.
    let mut rule = ordinary();
    rule.snat = Snat::Always;
    let plan = possible(&net.look(&rule), Tcx).plan.clone().unwrap();
    assert_eq!(plan.snat, Some("10.0.1.1".parse().unwrap()));
}

#[test]
fn targets_on_this_host() {
    let net = Net::new().ready();
    let found = net.look(&rule("10.0.8.17:80", "10.0.1.1:8080"));
    only(&found, &[Xdp, Tcx, Nft]);
    refused(&found, XdpRedirect, "10.0.1.1 is on this host", "");
    let plan = possible(&found, Xdp).plan.as_ref().unwrap();
    assert_eq!((&plan.target_dev, plan.snat), (&None, None));

    let loopback = rule("10.0.8.17:80", "127.0.0.1:8080");
    let found = net.look(&loopback);
    only(&found, &[]);
    refused(&found, Tcx, "dropped as a martian", "or use nft");
    let todo = "sysctl -w net.ipv4.conf.r0.route_localnet=1 (--fix does it)";
    refused(&found, Nft, "route_localnet = 0", todo);
    let found = net.look_and_fix(&loopback);
    only(&found, &[Nft]);
    noted(of(&found, Nft), "lets hosts behind r0 reach everything");
    let fixes = &possible(&found, Nft).plan.as_ref().unwrap().fixes;
    net.router.within(async || fixes::apply(fixes).unwrap());
    only(&net.look(&loopback), &[Nft]);
    net.router.within(async || fixes::undo(fixes).unwrap());
    only(&net.look(&loopback), &[]);

    only(
        &net.look_and_fix(&rule("[fd00:8::17]:80", "[::1]:8080")),
        &[],
    );
    // What this host sends to itself is nft's.
    only(&net.look(&rule("127.0.0.1:80", "10.0.1.2:80")), &[]);
    let own = net.look(&rule("127.0.0.1:80", "127.0.0.1:8080"));
    only(&own, &[Nft]);
    refused(
        &own,
        Tcx,
        "only this host itself sends to 127.0.0.1",
        "use nft",
    );
}

#[test]
fn bpf_needs_to_know_where_clients_come_in() {
    let net = Net::new().ready();
    let mut transit = rule("192.0.2.1:80", "10.0.1.2:80");
    let found = net.look(&transit);
    only(&found, &[Nft]);
    for backend in BPF {
        refused(
            &found,
            backend,
            "no device of this host holds 192.0.2.1",
            "--dev",
        );
    }
    transit.dev = Some("r0".to_owned());
    let found = net.look(&transit);
    only(&found, &Backend::FASTEST_FIRST);
    noted(of(&found, Tcx), "clients have to be routed through");
    let nft = possible(&found, Nft).plan.as_ref().unwrap();
    assert_eq!(nft.snat, None, "no hairpin by that device");
    assert_eq!(nft.client_dev.as_ref().unwrap().name, "r0");
    transit.dev = Some("nodev0".to_owned());
    for backend in Backend::FASTEST_FIRST {
        refused(
            &net.look(&transit),
            backend,
            "there is no device nodev0",
            "ip link",
        );
    }
    // An address that is held for all devices says nothing about one.
    net.router.ip("addr add 192.0.2.1/32 dev lo");
    transit.dev = None;
    let found = net.look(&transit);
    only(&found, &[Nft]);
    refused(&found, Xdp, "no client comes in by lo", "--dev");
}

#[test]
fn kinds_of_devices() {
    let net = Net::new().ready();
    let router = &net.router;
    router.ip("link add br0 type bridge");
    // Kernels for virtual machines may lack it.
    let vlan = router.try_ip("link add link r0 name r0.7 type vlan id 7");
    router.ip("tuntap add dev t0 mode tun");
    for (n, device) in ["br0", "t0"].iter().enumerate() {
        router.ip(&format!("addr add 10.1.{n}.1/24 dev {device}"));
        router.ip(&format!("link set {device} up"));
    }
    let mut rule = ordinary();
    let mut by = |device: &str| {
        rule.dev = Some(device.to_owned());
        net.look(&rule)
    };
    let found = by("br0");
    only(&found, &[TcxPeer, Tcx, Nft]);
    refused(&found, Xdp, "br0 is a bridge device", "use tcx or nft");
    if vlan {
        let found = by("r0.7");
        refused(&found, XdpRedirect, "r0.7 is a vlan device", "use tcx");
    }
    let found = by("t0");
    only(&found, &[Nft]);
    for backend in BPF {
        refused(&found, backend, "t0 has no Ethernet headers", "use nft");
    }
    noted(of(&found, Tcx), "t0 is down or has no carrier");
    // Neither can the other side be one.
    let found = net.look(&self::rule("10.0.8.17:80", "10.1.1.2:80"));
    only(&found, &[Xdp, Tcx, Nft]);
    let found = net.look(&self::rule("10.0.8.17:80", "10.1.0.2:80"));
    only(&found, &[Xdp, Tcx, Nft]);
    refused(
        &found,
        TcxPeer,
        "reached by br0, which is no veth",
        "use xdp-redirect",
    );

    router.ip("link set r0 master br0");
    let found = by("r0");
    only(&found, &[Nft]);
    refused(&found, Tcx, "r0 is a port of the bridge br0", "--dev br0");
}

fn attach_xdp(side: &Namespace, device: &str, name: &str) {
    side.within(async || attach_passing_xdp(device, name));
}

#[test]
fn other_programs_stay() {
    let net = Net::new();
    ethtool(&net.client, "c0", "tx off");
    ethtool(&net.server, "s0", "tx off");
    attach_xdp(&net.router, "r0", "firewall");
    let found = net.look_and_fix(&ordinary());
    only(&found, &[TcxPeer, Tcx, Nft]);
    let todo = "ip link set dev r0 xdp off";
    refused(
        &found,
        Xdp,
        "another XDP program is attached to r0: firewall",
        todo,
    );
    net.router.ip("link set dev r0 xdp off");
    attach_xdp(&net.router, "r0", "mtn_redirect");
    possible(&net.look(&ordinary()), Xdp);
    // A program at the far end polls, as GRO would.
    let found = net.look(&ordinary());
    refused(
        &found,
        XdpRedirect,
        "c0, the far end of r0, does not poll",
        "c0 rx-gro on",
    );
    attach_xdp(&net.client, "c0", "any");
    attach_xdp(&net.server, "s0", "any");
    only(&net.look(&ordinary()), &Backend::FASTEST_FIRST);
}

#[test]
fn several_next_hops() {
    let net = Net::new().ready();
    net.join("r2", &net.server, "s1");
    net.router.ip("addr add 10.0.2.1/24 dev r2");
    for (side, device) in [(&net.router, "r2"), (&net.server, "s1")] {
        side.ip(&format!("link set {device} up"));
    }
    net.server.ip("addr add 10.9.9.9/32 dev lo");
    let hop = "nexthop via 10.0.1.2 dev r1";
    net.router.ip(&format!(
        "route add 10.9.9.9 {hop} nexthop via 10.0.2.2 dev r2"
    ));
    let rule = rule("10.0.8.17:80", "10.9.9.9:80");
    let found = net.look(&rule);
    only(&found, &[Xdp, Tcx, Nft]);
    refused(
        &found,
        XdpRedirect,
        "next hops on 2 devices",
        "route of its own",
    );
    noted(of(&found, Tcx), "several next hops");
    net.router.ip("route replace 10.9.9.9 via 10.0.1.2 dev r1");
    only(&net.look(&rule), &Backend::FASTEST_FIRST);
    // One route with a next hop on the clients' device is a hairpin for some.
    net.router.ip(&format!(
        "route replace 10.9.9.9 {hop} nexthop via 10.0.8.18 dev r0"
    ));
    only(&net.look(&rule), &[Nft]);
}

#[test]
fn peers_are_for_the_next_namespace() {
    let net = Net::new().ready();
    net.router.ip("route add 10.0.3.0/24 via 10.0.1.2");
    let further = rule("10.0.8.17:80", "10.0.3.3:80");
    let found = net.look(&further);
    only(&found, &[XdpRedirect, Xdp, Tcx, Nft]);
    refused(
        &found,
        TcxPeer,
        "not an address of the namespace behind r1",
        "use xdp-redirect",
    );
    net.server.ip("addr add 10.0.3.3/32 dev lo");
    only(&net.look(&further), &Backend::FASTEST_FIRST);

    // Replies go out by the bridge without a check of their size, and into a namespace need none.
    net.router.ip("link add br0 type bridge");
    net.router.ip("link set br0 up mtu 1400");
    let mut by_bridge = ordinary();
    by_bridge.dev = Some("br0".to_owned());
    let found = net.look(&by_bridge);
    let todo = format!(
        "nsenter --net=/run/netns/{} ip link set dev s0 mtu 1400",
        net.server.name
    );
    let why = "replies may have 1500 bytes, and br0 carries 1400";
    refused(&found, TcxPeer, why, &todo);
    for (side, device) in [(&net.client, "c0"), (&net.router, "r0")] {
        side.ip(&format!("link set {device} mtu 1400"));
    }
    let found = net.look(&ordinary());
    let peer = possible(&found, TcxPeer).plan.as_ref().unwrap();
    assert!(peer.client_dev.as_ref().unwrap().peer && peer.target_dev.as_ref().unwrap().peer);
    let text = "over 1400 bytes take the slower way";
    noted(possible(&found, XdpRedirect), text);
    let mut always = ordinary();
    always.snat = Snat::Always;
    let found = net.look(&always);
    only(&found, &[Nft]);
    let why = "and r0 carries 1400 bytes, r1 1500: larger packets would be lost";
    refused(&found, Tcx, why, "mtu 1400");
    net.server.ip("link set s0 mtu 1400");
    possible(&net.look(&by_bridge), TcxPeer);

    // Both ends here.
    net.router.ip("link add v0 type veth peer name v1");
    net.router.ip("addr add 10.0.4.1/24 dev v0");
    for device in ["v0", "v1"] {
        net.router.ip(&format!("link set {device} up"));
        ethtool(&net.router, device, "tx off");
        ethtool(&net.router, device, "gro on");
    }
    let found = net.look(&rule("10.0.8.17:80", "10.0.4.2:80"));
    refused(
        &found,
        TcxPeer,
        "both ends of the veth v0 are in this namespace",
        "",
    );
    possible(&found, XdpRedirect);
}

#[test]
fn far_ends_out_of_sight() {
    let net = Net::new().ready();
    // A namespace that only a thread lives in has no name.
    let (ready, is_ready) = std::sync::mpsc::channel();
    let (end, is_end) = std::sync::mpsc::channel::<()>();
    let thread = std::thread::spawn(move || {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        ready.send(nix::unistd::gettid()).unwrap();
        let _ = is_end.recv();
    });
    let hidden = is_ready.recv().unwrap();
    net.router.ip(&format!(
        "link add r5 type veth peer name c5 netns {hidden}"
    ));
    net.router.ip("addr add 10.0.5.1/24 dev r5");
    net.router.ip("link set r5 up");
    let found = net.look_and_fix(&rule("10.0.5.1:80", "10.0.1.2:80"));
    only(&found, &[TcxPeer, Tcx, Nft]);
    let why = "r5 is a veth whose far end cannot be looked at (the network namespace";
    refused(&found, Xdp, why, "use tcx or nft");
    let found = net.look_and_fix(&rule("10.0.8.17:80", "10.0.5.2:80"));
    only(&found, &[Xdp, Tcx, Nft]);
    refused(
        &found,
        TcxPeer,
        "the far end of r5 cannot be looked at",
        "use tcx or nft",
    );
    drop(end);
    thread.join().unwrap();
}

#[test]
fn firewalls_are_not_gone_around_unasked() {
    let net = Net::new().ready();
    let nft = |line: &str| drop(inside(&net.router, &format!("nft {line}")));
    nft("add table ip filter");
    nft("add chain ip filter FORWARD { type filter hook forward priority 0 ; policy accept ; }");
    nft("add rule ip filter FORWARD iifname nosuch counter accept");
    nft("add table ip6 filter");
    nft("add chain ip6 filter FORWARD { type filter hook forward priority 0 ; policy drop ; }");
    let by_name = |rule: &Rule| -> Vec<Backend> {
        let found = net.look(rule);
        only(&found, &Backend::FASTEST_FIRST);
        let found = found.iter().filter(|f| f.by_name_only);
        found.map(|f| f.backend).collect()
    };
    assert_eq!(by_name(&ordinary()), []);
    let v6 = rule("[fd00:8::17]:80", "[fd00:1::2]:80");
    assert_eq!(by_name(&v6), [XdpRedirect, TcxPeer]);
    noted(
        of(&net.look(&v6), Tcx),
        "the policy of chain ip6 filter FORWARD",
    );

    nft("add chain ip filter DOCKER-USER");
    nft("add rule ip filter FORWARD jump DOCKER-USER");
    assert_eq!(by_name(&ordinary()), []);
    nft("add rule ip filter DOCKER-USER ip saddr 192.0.2.0/24 drop");
    assert_eq!(by_name(&ordinary()), [XdpRedirect, TcxPeer]);
    let found = net.look(&ordinary());
    let text = "ip filter DOCKER-USER handle";
    noted(of(&found, XdpRedirect), text);
    noted(
        of(&found, Nft),
        "may drop redirected packets, by ip filter DOCKER-USER",
    );
    // Rules that see packets as clients send them, for every backend but nft.
    nft("delete table ip filter");
    nft("add table ip early");
    nft("add chain ip early raw { type filter hook prerouting priority -300 ; }");
    nft("add rule ip early raw meta l4proto icmp drop");
    assert_eq!(by_name(&ordinary()), []);
    let rule = ordinary();
    let (proto, from) = (rule.proto, rule.from);
    nft(&format!(
        "add rule ip early raw ip daddr {} {proto} dport {} drop",
        from.ip(),
        from.port()
    ));
    assert_eq!(by_name(&rule), [XdpRedirect, TcxPeer, Xdp, Tcx]);
    noted(of(&net.look(&rule), Tcx), "ip early raw handle");
    // One that nft itself never sees packets for.
    nft("flush chain ip early raw");
    nft(&format!(
        "add rule ip early raw ip daddr {} notrack",
        from.ip()
    ));
    noted(
        of(&net.look(&rule), Nft),
        "never come to be redirected by nft",
    );
}
