// SPDX-License-Identifier: GPL-2.0-or-later
//! Every redirect backend with real sockets, over veths in every setting: what it accepts arrives
//! whole and with right checksums, and what it would corrupt or lose it refuses.

use std::io::ErrorKind;
use std::time::Duration;

use crate::net::{add, ask, assert_answers, echo, ethtool, features, Net, BACKENDS};
use crate::support::stream::{send, sink};
use crate::support::tcx::loaded;
use crate::support::{snmp, wait_until, Ns, MOUNTAIN};
use mountain::redirect::bpf::hooks::DeviceHook;
use mountain::redirect::{Backend, Installed};

/// Far ends are looked at every 5 s, and then the programs are made anew.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Addresses of one family: client, where it sends to, target.
fn places(ipv6: bool) -> (&'static str, &'static str, &'static str) {
    match ipv6 {
        false => ("10.0.8.18:0", "10.0.8.17:8080", "10.0.1.2:8083"),
        true => ("[fd08::18]:0", "[fd08::17]:8080", "[fd01::2]:8083"),
    }
}

/// Where [`tcp_echo`] serves: the port of `to` has a server.
fn tcp_target(to: &str) -> String {
    to.replace(":8083", ":8084")
}

/// Packets that a namespace's stack found with a wrong checksum.
fn bad_checksums(ns: &Ns) -> u64 {
    let of = |table| snmp(ns, &format!("{table}InCsumErrors"));
    ["Udp", "Tcp", "Icmp", "Udp6"].map(of).iter().sum()
}

/// A TCP transfer both ways at once: the server sends back what it gets. What comes back must be
/// what was sent, byte by byte.
fn tcp_echo(net: &Net, ipv6: bool, bytes: u64) {
    let (_, from, to) = places(ipv6);
    let (stream, server) = echo(net, from, &tcp_target(to));
    let back = sink(stream.try_clone().unwrap());
    send(&stream, bytes, |_| ());
    assert_eq!(back.join().unwrap(), bytes);
    let client = stream.local_addr().unwrap().ip();
    let peer = server.join().unwrap();
    assert_eq!(peer.ip(), client, "the server sees the client");
}

/// Datagrams of many sizes there and back.
fn udp_echo(net: &Net, ipv6: bool) {
    let (local, from, _) = places(ipv6);
    let socket = net.client.udp(local);
    for len in [0, 1, 2, 17, 100, 999, 1400, 1450] {
        let text = "x".repeat(len);
        let (answer, whom) = ask(&socket, from, &text);
        assert_eq!(answer, format!("target {text}"));
        assert_eq!(whom, from, "the answer comes from where it was sent to");
    }
    // Larger than the MTU: fragments both ways.
    let text = "y".repeat(1900);
    let (answer, whom) = ask(&socket, from, &text);
    assert_eq!((answer.len(), whom.as_str()), (1907, from));
}

/// Why a backend may refuse the devices as they are.
fn expected_refusal(backend: &str, tx: bool, gro: bool) -> Option<&'static str> {
    match backend {
        "xdp" | "xdp-redirect" if tx => Some("checksum"),
        "xdp-redirect" if !gro => Some("NAPI"),
        _ => None,
    }
}

fn delivers_or_refuses(net: &Net, backend: &str, ipv6: bool, refusal: Option<&str>, what: &str) {
    let (_, from, to) = places(ipv6);
    let add = |proto, to: &str| {
        format!("add --proto {proto} --from {from} --to {to} --backend {backend}")
    };
    if let Some(why) = refusal {
        net.refuses(&add("udp", to), why);
        return;
    }
    let bad = || [bad_checksums(&net.client), bad_checksums(&net.server)];
    let before = bad();
    net.redirect(&add("udp", to));
    net.redirect(&add("tcp", &tcp_target(to)));
    udp_echo(net, ipv6);
    tcp_echo(net, ipv6, 2_000_000);
    assert_eq!(bad(), before, "{what}: wrong checksums at client, server");
    let udp = &net.stats()[0].stats;
    let packets = udp.forward.packets.min(udp.reply.packets);
    assert!(packets >= 9, "{what}: {udp:?}");
    for proto in ["udp", "tcp"] {
        net.redirect(&format!("del --proto {proto} --from {from}"));
    }
}

#[test]
fn each_backend_delivers_or_refuses() {
    let net = Net::new();
    for ipv6 in [false, true] {
        let (_, _, to) = places(ipv6);
        net.serve(&net.server, "target", to);
    }
    for (tx, gro) in [(true, true), (true, false), (false, true), (false, false)] {
        let [t, g] = [tx, gro].map(|on| if on { "on" } else { "off" });
        for (ns, dev) in [(&net.client, "c0"), (&net.server, "s0")] {
            ethtool(ns, dev, &format!("tx {t} gro {g}"));
        }
        for backend in BACKENDS {
            for ipv6 in [false, true] {
                let what = format!("{backend}, tx {t}, gro {g}, IPv6 {ipv6}");
                println!("{what}");
                let refusal = expected_refusal(backend, tx, gro);
                delivers_or_refuses(&net, backend, ipv6, refusal, &what);
            }
        }
    }
    net.assert_clean();
}

/// Of a datagram's fragments only the first are too big for the next device; what the kernel makes smaller, it needs
/// all of.
#[test]
fn fragments_cross_to_a_smaller_mtu_both_ways() {
    for (small, ends) in [("server", ["rs", "s0"]), ("client", ["rc", "c0"])] {
        let net = Net::new();
        let (local, from, to) = places(false);
        // Datagrams may be made smaller on the way.
        for ns in [&net.client, &net.server] {
            ns.sysctl("net.ipv4.ip_no_pmtu_disc", "1");
        }
        net.serve(&net.server, "target", to);
        let far = if small == "server" {
            &net.server
        } else {
            &net.client
        };
        net.router.ip(&format!("link set {} mtu 1300", ends[0]));
        far.ip(&format!("link set {} mtu 1300", ends[1]));
        // Connection tracking puts fragments together where some rule needs it.
        net.add("udp", "10.0.8.17:9", "10.0.1.2:9", "nft");
        for backend in BACKENDS {
            println!("{backend}, small at the {small}");
            net.add("udp", from, to, backend);
            let socket = net.client.udp(local);
            for _ in 0..3 {
                let (answer, whom) = ask(&socket, from, &"y".repeat(1900));
                assert_eq!((answer.len(), whom.as_str()), (1907, from), "{backend}");
            }
            net.redirect(&format!("del --proto udp --from {from}"));
        }
    }
}

/// Whoever resolves the target's link-layer address, the client hears that there is none.
#[test]
fn clients_hear_that_their_target_is_down() {
    let net = Net::new();
    for (from, to) in [
        ("10.0.8.17:8080", "10.0.1.9:8083"),
        ("[fd08::17]:8080", "[fd01::9]:8083"),
    ] {
        // tcx-peer serves addresses of a namespace only.
        for backend in BACKENDS.into_iter().filter(|b| *b != "tcx-peer") {
            net.add("tcp", from, to, backend);
            let heard = net.client.try_connect(from).unwrap_err();
            let unreachable = ErrorKind::HostUnreachable;
            assert_eq!(heard.kind(), unreachable, "{backend} to {to}");
            net.redirect(&format!("del --proto tcp --from {from}"));
        }
    }
}

/// With --fix every backend works on devices as they are made, and leaves them so.
#[test]
fn fix_makes_every_backend_possible_and_del_undoes_it() {
    let net = Net::new();
    net.serve(&net.server, "target", places(false).2);
    let features = |net: &Net| features(&net.client, "c0") + &features(&net.server, "s0");
    let before = features(&net);
    for backend in BACKENDS {
        let (_, from, to) = places(false);
        net.add("udp", from, to, backend);
        udp_echo(&net, false);
        let packets = net.stats()[0].stats.reply.packets;
        assert!(packets >= 9, "{backend}: {packets}");
        net.redirect(&format!("del --proto udp --from {from}"));
        assert_eq!(features(&net), before, "{backend}");
    }
    net.assert_clean();
}

/// Without being asked for one by name, the fastest that is correct is chosen while somebody watches.
#[test]
fn auto_takes_the_fastest_that_is_correct() {
    let net = Net::new();
    let (_, from, to) = places(false);
    let rule = format!("--proto udp --from {from} --to {to}");
    let _watch = net.router.start(MOUNTAIN, &["redirect", "watch"]);
    let wait_for = |backend: &str, what: &str| {
        wait_until(&format!("{what}: by {backend}"), TIMEOUT, || {
            net.list()[0].carried_by.to_string() == backend
        });
    };
    for (features, backend) in [
        ("tx on gro off", "tcx-peer"),
        ("tx off gro off", "tcx-peer"),
        ("tx off gro on", "xdp-redirect"),
    ] {
        ethtool(&net.client, "c0", features);
        ethtool(&net.server, "s0", features);
        let added: Installed = net.json(&format!("add {rule} --backend auto"));
        assert_eq!(added.plan.backend, Backend::Nft, "{features}");
        wait_for(backend, features);
        net.redirect(&format!("del --proto udp --from {from}"));
    }
    let _: Installed = net.json(&format!("add {rule} --backend auto"));
    wait_for("xdp-redirect", "again");
    // Nothing tells of a far end's features.
    ethtool(&net.client, "c0", "gro off");
    wait_for("tcx-peer", "a far end has changed");
    ethtool(&net.client, "c0", "gro on");
    net.redirect(&format!("del --proto udp --from {from}"));
    // A firewall that may drop: what goes around it is not chosen.
    net.redirect(&format!("add {rule} --backend auto"));
    wait_for("xdp-redirect", "before the firewall");
    let hook = "filter hook forward priority 0; policy drop";
    net.router
        .chain("inet guard f", hook, "ip daddr 10.0.1.2 accept");
    wait_for("nft", "with the firewall");
    net.redirect(&format!("del --proto udp --from {from}"));
}

/// A far end may be a port of a bridge in its own namespace. Nothing tells of its features either, without which XDP
/// would lose what it redirects there.
#[test]
fn far_ends_on_bridges_are_looked_at_too() {
    let net = Net::new();
    for (ns, port, address, via) in [
        (&net.client, "c0", "10.0.8.18/24", "10.0.8.17"),
        (&net.server, "s0", "10.0.1.2/24", "10.0.1.1"),
    ] {
        ethtool(ns, port, "tx off gro on");
        ns.ip(&format!("addr flush dev {port}"));
        ns.ip("link add br0 type bridge");
        ns.ip(&format!("link set {port} master br0"));
        ns.bring_up("br0", &[address]);
        ns.ip(&format!("route add default via {via}"));
    }
    let (_, from, to) = places(false);
    let rule = format!("--proto udp --from {from} --to {to}");
    net.redirect(&format!("add {rule} --backend auto"));
    let _watch = net.router.start(MOUNTAIN, &["redirect", "watch"]);
    let wait_for = |backend: &str| {
        wait_until(&format!("by {backend}"), TIMEOUT, || {
            net.list()[0].carried_by.to_string() == backend
        });
    };
    wait_for("xdp-redirect");
    // What follows a new program has been looked at by then.
    std::thread::sleep(Duration::from_secs(1));
    ethtool(&net.client, "c0", "gro off");
    wait_for("nft");
}

/// All backends at once, the BPF ones with two targets between them.
#[test]
fn backends_work_side_by_side_and_go_one_at_a_time() {
    let net = Net::new();
    let targets = [
        ("10.0.1.2:8083", "target"),
        ("10.0.1.2:9000", "other"),
        ("10.0.1.2:9001", "third"),
    ];
    for (to, name) in targets {
        net.serve(&net.server, name, to);
    }
    let socket = net.client.udp("10.0.8.18:0");
    let mut there = vec![];
    for (i, backend) in BACKENDS.iter().enumerate() {
        let from = format!("10.0.8.17:{}", 8100 + i);
        let (to, name) = targets[if *backend == "nft" { 2 } else { i % 2 }];
        net.add("udp", &from, to, backend);
        there.push((from, name));
        // One socket, so that two rules with one target have clients of the same port.
        for (from, name) in &there {
            assert_answers(&socket, from, name);
        }
    }
    // The two kinds do not know of each other's flows.
    for (to, backend, by) in [
        ("10.0.1.2:9001", "tcx", "nft"),
        ("10.0.1.2:9000", "nft", "BPF"),
    ] {
        let why = format!("another rule sends to {to} by {by}");
        net.refuses(&add("udp", "10.0.8.17:1", to, backend), &why);
    }
    while let Some((from, _)) = there.pop() {
        net.redirect(&format!("del --proto udp --from {from}"));
        crate::net::ask_in_vain(&socket, &from);
        for (from, name) in &there {
            assert_answers(&socket, from, name);
        }
    }
    net.assert_clean();
}

/// The target has no such port: the client learns that from where it sent to, by ICMP or RST.
#[test]
fn a_target_that_is_down_says_so_to_the_client() {
    let net = Net::new();
    for backend in BACKENDS {
        for ipv6 in [false, true] {
            let (local, from, to) = places(ipv6);
            for proto in ["udp", "tcp"] {
                net.add(proto, from, to, backend);
            }
            let what = format!("{backend}, {from}");
            let socket = net.client.udp(local);
            socket.connect(from).unwrap();
            socket.send(b"anyone?").unwrap();
            let udp = socket.recv(&mut [0; 9]).unwrap_err();
            if backend == "nft" {
                let bytes = if ipv6 { 55 } else { 35 };
                assert_eq!(net.counted(0)[..3], [1, bytes, 0], "no answer");
            }
            for error in [udp, net.client.try_connect(from).unwrap_err()] {
                let kind = error.kind();
                assert_eq!(kind, ErrorKind::ConnectionRefused, "{what}: {error}");
            }
            net.redirect("del --all");
        }
    }
}

/// Names of the programs at a tcx hook of a device, in the order in which they run.
fn at_egress(ns: &Ns, dev: &'static str) -> Vec<String> {
    ns.with(move || {
        let programs = loaded(DeviceHook::TcxEgress, dev).into_iter();
        programs.map(|program| program.name).collect()
    })
}

/// The router has two ways to the server's address and steers among them, and clients' packets come
/// back through steering too: replies are rewritten before.
#[test]
fn steering_sees_replies_as_they_leave() {
    for steer_first in [true, false] {
        let net = Net::new();
        // A second way to the server and to the client.
        let (client, router, server) = (&net.client, &net.router, &net.server);
        router.join(("rs1", 1), server, ("s1", 2), ["10.0.2", "fd02"]);
        client.join(("c1", 18), router, ("rc1", 17), ["10.0.9", "fd09"]);
        net.server.ip("addr add 10.77.0.1/32 dev lo");
        net.client.ip("addr add 10.78.0.1/32 dev lo");
        for (to, one, other) in [
            ("10.77.0.1", "10.0.1.2", "10.0.2.2"),
            ("10.78.0.0/24", "10.0.8.18", "10.0.9.18"),
        ] {
            net.router.ip(&format!(
                "route add {to} nexthop via {one} nexthop via {other}"
            ));
        }
        let (from, to) = ("10.0.8.17:8080", "10.77.0.1:8083");
        net.serve(&net.server, "target", to);
        let up = |net: &Net| net.router.mountain_ok("up");
        // From the client's address on its uplink, which replies reach by one way only: what is
        // looked at is the order at a device that both programs are on.
        let rule = format!("--proto udp --from {from} --to {to} --dev rc --backend tcx");
        if steer_first {
            up(&net);
        }
        net.redirect(&format!("add {rule}"));
        if !steer_first {
            up(&net);
        }
        let order = at_egress(&net.router, "rc");
        assert_eq!(order, ["mtn_redirect_ou", "mountain_steer"]);
        let socket = net.client.udp("10.0.8.18:0");
        for _ in 0..20 {
            assert_answers(&socket, from, "target");
        }
        net.router.mountain_ok("down");
        assert_eq!(at_egress(&net.router, "rc"), ["mtn_redirect_ou"]);
        assert_answers(&socket, from, "target");
        net.redirect("del --all");
        assert_eq!(at_egress(&net.router, "rc"), [] as [&str; 0]);
    }
}

/// Each backend redirects the client to `to`, which answers as `name`, but for those that say why they cannot.
fn each_that_can(net: &Net, to: &str, name: &str, refusals: &[(&str, &str)]) {
    let socket = net.client.udp("10.0.8.18:0");
    let from = "10.0.8.17:8080";
    for backend in BACKENDS {
        let add = add("udp", from, to, backend);
        if let Some((_, why)) = refusals.iter().find(|(refusing, _)| *refusing == backend) {
            net.refuses(&add, why);
            continue;
        }
        net.redirect(&add);
        for _ in 0..5 {
            assert_answers(&socket, from, name);
        }
        assert_eq!(net.counted(0)[2], 5, "{backend}");
        net.redirect("del --all");
    }
    net.assert_clean();
}

#[test]
fn hairpins_and_targets_on_this_host_by_each_backend_that_can() {
    let net = Net::new();
    // Client and target behind one device: the target must answer through this host.
    net.client.ip("addr add 10.0.8.20/24 dev c0");
    net.serve(&net.client, "neighbour", "10.0.8.20:8083");
    let refusals = [("xdp", "source"), ("tcx-peer", "both behind rc")];
    each_that_can(&net, "10.0.8.20:8083", "neighbour", &refusals);
    // The target is this host: what leaves by the client device is rewritten as well.
    net.serve(&net.router, "here", "10.0.1.1:9000");
    let refusals = ["tcx-peer", "xdp-redirect"].map(|backend| (backend, "this host"));
    each_that_can(&net, "10.0.1.1:9000", "here", &refusals);
}

/// The device goes and takes the programs along: the list says so, and `restore` brings the rule back
/// when a device of that name has come.
#[test]
fn a_device_that_goes_takes_nothing_else_along() {
    let net = Net::new();
    net.serve(&net.server, "target", "10.0.1.2:8083");
    let socket = |net: &Net| net.client.udp("10.0.8.18:0");
    let (first, second) = ("10.0.8.17:8080", "10.0.8.17:8081");
    net.add("udp", first, "10.0.1.2:8083", "xdp-redirect");
    net.add("udp", second, "10.0.1.2:8084", "nft");
    assert_answers(&socket(&net), first, "target");
    let active = |net: &Net| net.list().iter().map(|r| r.active).collect::<Vec<_>>();
    assert_eq!(active(&net), [true, true]);
    net.client.ip("link del c0");
    assert_eq!(active(&net), [false, true]);
    assert!(net.redirect("list").contains("NOT IN FORCE"));
    net.join_client();
    net.client.ip("route add default via 10.0.8.17");
    assert_eq!(active(&net), [false, true]);
    net.redirect("restore");
    assert_eq!(active(&net), [true, true]);
    assert_answers(&socket(&net), first, "target");
    // Gone for good: the rule can be deleted all the same.
    net.client.ip("link del c0");
    for from in [first, second] {
        net.redirect(&format!("del --proto udp --from {from}"));
    }
    net.assert_clean();
}

/// The small program for ICMP gives way to the full one, which stays when the rule that brought it goes.
#[test]
fn a_rule_less_takes_nothing_from_the_others() {
    let net = Net::new();
    net.serve(&net.server, "target", "10.0.1.2:8083");
    for (from, backend) in [("10.0.8.17:8080", "xdp"), ("10.0.8.17:8081", "tcx")] {
        net.add("udp", from, "10.0.1.2:8083", backend);
    }
    net.redirect("del --proto udp --from 10.0.8.17:8081");
    assert!(net.list()[0].active);
    net.reaches("target");
    net.redirect("del --all");
    net.assert_clean();
}

/// The order of a rule with a device and one without is known to nft only.
#[test]
fn rules_with_and_without_a_device_are_for_nft() {
    let net = Net::new();
    let rule = "add --proto udp --from 10.0.8.17:8080 --to 10.0.1.2";
    net.redirect(&format!("{rule}:1 --backend tcx"));
    for backend in ["tcx", "nft"] {
        let add = format!("{rule}:2 --dev rc --backend {backend}");
        net.refuses(&add, "only nft, for both, knows which");
    }
}

/// The record is lost, the programs are not: `del --all` takes them away all the same.
#[test]
fn a_lost_record_keeps_nothing() {
    let net = Net::new();
    let rule = "add --proto udp --from 10.0.8.17:8080 --to 10.0.1.2:1";
    for backend in ["tcx", "nft"] {
        net.redirect(&format!("{rule} --backend {backend}"));
        std::fs::remove_dir_all(net.record()).unwrap();
        net.redirect("del --all");
        assert_eq!(at_egress(&net.router, "rc"), [] as [&str; 0], "{backend}");
        net.assert_clean();
    }
}
