// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain redirect` end to end: UDP and TCP through a router in namespaces of their own.

mod faults;
mod rules;

use std::io::{Read, Write};
use std::net::Shutdown;
use std::thread;
use std::time::Duration;

use mountain::redirect::Backend;

use crate::net::{ask, ask_in_vain, ask_tcp, assert_answers, echo, Net};

const RULE: &str = "--proto udp --from 10.0.8.17:8080";

#[test]
fn udp_goes_to_the_target_and_back_until_del() {
    let net = Net::serving();
    let said = net.redirect(&format!("add {RULE} --to 10.0.1.2:8083"));
    let rule = "rule 0: udp 10.0.8.17:8080 => 10.0.1.2:8083, by nft\n";
    assert_eq!(said, rule);
    let socket = net.client.udp("10.0.8.18:0");
    assert_answers(&socket, "10.0.8.17:8080", "server");
    // Neither another port nor another protocol.
    ask_in_vain(&socket, "10.0.8.17:8081");
    assert!(ask_tcp(&net.client, "10.0.8.17:8080", "x").is_err());

    let listed = net.list().remove(0);
    let (rule, plan) = (listed.installed.rule, listed.installed.plan);
    assert_eq!(rule.from.to_string(), "10.0.8.17:8080");
    assert_eq!((plan.backend, listed.active), (Backend::Nft, true));

    let said = net.redirect(&format!("del {RULE}"));
    assert!(said.starts_with("rule 0 is deleted: udp"), "{said}");
    // The same flow is no longer redirected, although it goes on.
    ask_in_vain(&socket, "10.0.8.17:8080");
    assert_eq!(net.rules(), 0);
    net.assert_clean();
    let why = "no rule redirects udp 10.0.8.17:8080";
    net.refuses(&format!("del {RULE}"), why);
}

#[test]
fn both_protocols_and_families() {
    let net = Net::new();
    for (proto, from, to, name) in [
        ("tcp", "10.0.8.17:80", "10.0.1.2:8001", "v4"),
        ("udp", "10.0.8.17:80", "10.0.1.2:8001", "v4"),
        // No address of the router: what passes by is redirected as well.
        ("udp", "192.0.2.77:53", "10.0.1.2:8001", "v4"),
        ("tcp", "[fd08::17]:80", "[fd01::2]:8002", "v6"),
        ("udp", "[fd08::17]:80", "[fd01::2]:8002", "v6"),
    ] {
        net.add(proto, from, to, "nft");
        if proto == "tcp" {
            net.serve(&net.server, name, to);
            let answer = ask_tcp(&net.client, from, "hello").unwrap();
            assert_eq!(answer, format!("{name} hello"));
        } else {
            let local = ["10.0.8.18:0", "[fd08::18]:0"][(name == "v6") as usize];
            assert_answers(&net.client.udp(local), from, name);
        }
    }
    assert_eq!(net.rules(), 5);
    assert_eq!(net.redirect("del --all"), "deleted 5 rules\n");
    assert!(ask_tcp(&net.client, "[fd08::17]:80", "x").is_err());
    net.assert_clean();
}

#[test]
fn many_rules_share_a_target() {
    let net = Net::serving();
    for port in 9000..9020 {
        let from = format!("10.0.8.17:{port}");
        net.add("udp", &from, "10.0.1.2:8083", "nft");
    }
    // One socket: only the port spoken to tells its flows apart.
    let socket = net.client.udp("10.0.8.18:4000");
    for _ in 0..2 {
        for port in 9000..9020 {
            assert_answers(&socket, &format!("10.0.8.17:{port}"), "server");
        }
    }
    net.redirect("del --proto udp --from 10.0.8.17:9007");
    ask_in_vain(&socket, "10.0.8.17:9007");
    assert_answers(&socket, "10.0.8.17:9006", "server");
    assert_answers(&socket, "10.0.8.17:9008", "server");
    assert_eq!(net.rules(), 19);
}

#[test]
fn a_hairpin_comes_back_only_with_a_source_of_ours() {
    let (net, _neighbour) = Net::with_neighbour();
    let socket = net.client.udp("10.0.8.18:0");
    let add = format!("add {RULE} --to 10.0.8.19:9000");
    // The target answers the client directly, from an address that the client did not speak to.
    net.redirect(&format!("{add} --snat never"));
    let (_, from) = ask(&socket, "10.0.8.17:8080", "hello");
    assert_eq!(from, "10.0.8.19:9000");
    net.redirect(&format!("del {RULE}"));

    for (snat, tcp) in [("auto", 1), ("always", 2)] {
        net.redirect(&format!("{add} --snat {snat}"));
        let source = net.list()[0].installed.plan.snat;
        assert_eq!(source, "10.0.8.17".parse().ok());
        net.reaches("neighbour");
        assert_eq!(net.counted(0), [1, 33, 1, 43]);
        let from = format!("10.0.8.17:{tcp}");
        let rule = format!("--from {from} --to 10.0.8.19:9000 --snat {snat}");
        net.redirect(&format!("add --proto tcp {rule}"));
        assert_eq!(ask_tcp(&net.client, &from, "x").unwrap(), "neighbour x");
        let from = format!("[fd08::17]:{tcp}");
        let rule = format!("--from {from} --to [fd08::19]:9000 --snat {snat}");
        net.redirect(&format!("add --proto udp {rule}"));
        assert_answers(&net.client.udp("[fd08::18]:0"), &from, "neighbour");
        net.redirect("del --all");
        net.assert_clean();
    }
}

/// With `auto` only those get another source who would not be answered through this host. And rules of two devices
/// have sources of their own.
#[test]
fn who_comes_from_elsewhere_keeps_the_source() {
    let (net, ns) = Net::with_neighbour();
    let hook = "filter hook prerouting priority 0";
    let rule = "udp dport 9000 ip saddr 10.0.1.2 counter";
    ns.chain("inet t c", hook, rule);
    ns.ip("route add default via 10.0.8.17");
    let keeps_its_source = |count: u64| {
        let other = net.server.udp("10.0.1.2:0");
        assert_answers(&other, "10.0.8.17:8080", "neighbour");
        assert_eq!(ns.counted("chain inet t c"), [count], "it keeps its source");
    };
    let add = format!("add {RULE} --to 10.0.8.19:9000");
    net.redirect(&add);
    keeps_its_source(1);
    net.redirect(&format!("del {RULE}"));

    net.redirect(&format!("{add} --dev br0 --snat always"));
    net.redirect(&format!("{add} --dev rs --snat never"));
    keeps_its_source(2);
    // The client would be answered directly without a source of ours. So it has one, whatever becomes of the others.
    net.reaches("neighbour");
    for snat in ["never", "always"] {
        net.redirect(&format!("del {RULE} --dev rs"));
        net.reaches("neighbour");
        net.redirect(&format!("{add} --dev rs --snat {snat}"));
    }
    net.redirect("del --all");
    net.assert_clean();
}

/// To connection tracking they are the same, and a connection of either has no device.
#[test]
fn a_connection_outlives_a_rule_that_differs_in_the_device_only() {
    let net = Net::new();
    let rule = "--proto tcp --from 10.0.8.17:8080";
    for dev in ["rc", "rs"] {
        net.redirect(&format!("add {rule} --to 10.0.1.2:8083 --dev {dev}"));
    }
    // Otherwise one that is forgotten is taken up again by its next packet, if that is the client's.
    net.router
        .sysctl("net.netfilter.nf_conntrack_tcp_loose", "0");
    let (mut stream, _) = echo(&net, "10.0.8.17:8080", "10.0.1.2:8083");
    let mut is_alive = || {
        let sent = stream.write_all(b"hello");
        sent.and_then(|()| stream.read_exact(&mut [0; 5])).is_ok()
    };
    assert!(is_alive());
    net.redirect(&format!("del {rule} --dev rs"));
    assert!(is_alive());
    net.redirect(&format!("del {rule} --dev rc"));
    assert!(!is_alive());
}

#[test]
fn this_host_itself_is_redirected_too() {
    let net = Net::serving();
    net.serve(&net.server, "server", "[fd01::2]:8083");
    net.redirect(&format!("add {RULE} --to 10.0.1.2:8083"));
    net.redirect("add --proto tcp --from 10.0.8.17:8080 --to 10.0.1.2:8083 --snat always");
    net.redirect("add --proto udp --from [fd08::17]:8080 --to [fd01::2]:8083");
    // To an address of its own, from any and from a given one.
    assert_answers(&net.router.udp("0.0.0.0:0"), "10.0.8.17:8080", "server");
    assert_answers(&net.router.udp("10.0.1.1:0"), "10.0.8.17:8080", "server");
    assert_answers(&net.router.udp("[::]:0"), "[fd08::17]:8080", "server");
    let answer = ask_tcp(&net.router, "10.0.8.17:8080", "x").unwrap();
    assert_eq!(answer, "server x");
    assert_eq!(net.counted(0), [2, 2 * 33, 2, 2 * 40]);
    assert_eq!(net.counted(2), [1, 53, 1, 60]);
}

#[test]
fn a_target_on_this_host() {
    let net = Net::new();
    net.serve(&net.router, "router", "10.0.1.1:9000");
    net.redirect(&format!("add {RULE} --to 10.0.1.1:9000"));
    net.redirect("add --proto tcp --from 10.0.8.17:8080 --to 10.0.1.1:9000");
    net.reaches("router");
    assert_eq!(net.counted(0), [1, 33, 1, 40]);
    let answer = ask_tcp(&net.client, "10.0.8.17:8080", "x").unwrap();
    assert_eq!(answer, "router x");
    // From this host to this host, by loopback: each packet counts once.
    assert_answers(&net.router.udp("0.0.0.0:0"), "10.0.8.17:8080", "router");
    assert_eq!(net.counted(0), [2, 66, 2, 80]);
    // And between loopback addresses.
    net.serve(&net.router, "loop", "127.0.0.1:9001");
    net.redirect("add --proto udp --from 127.0.0.5:53 --to 127.0.0.1:9001");
    assert_answers(&net.router.udp("0.0.0.0:0"), "127.0.0.5:53", "loop");
}

#[test]
fn every_packet_and_byte_is_counted() {
    let net = Net::serving();
    net.serve(&net.server, "server", "[fd01::2]:8083");
    net.redirect(&format!("add {RULE} --to 10.0.1.2:8083"));
    net.redirect("add --proto udp --from [fd08::17]:8080 --to [fd01::2]:8083");
    net.redirect("add --proto udp --from 10.0.8.17:8081 --to 10.0.1.2:8083 --dev rc");
    let v4 = net.client.udp("10.0.8.18:0");
    let v6 = net.client.udp("[fd08::18]:0");
    let (mut bytes, count) = (0, 200);
    for i in 0..count {
        let text = "x".repeat(i * 7 % 1400);
        for (socket, to) in [
            (&v4, "10.0.8.17:8080"),
            (&v6, "[fd08::17]:8080"),
            (&v4, "10.0.8.17:8081"),
        ] {
            let (got, _) = ask(socket, to, &text);
            assert_eq!(got.len(), text.len() + 7);
        }
        bytes += text.len() as u64;
    }
    let count = count as u64;
    for (id, headers) in [(0, 28), (1, 48), (2, 28)] {
        let to = bytes + headers * count;
        assert_eq!(net.counted(id), [count, to, count, to + 7 * count], "{id}");
    }
    // Another flow of the same rule, and none of a rule that is new.
    net.reaches("server");
    assert_eq!(net.counted(0)[0], count + 1);
    net.redirect("del --proto udp --from 10.0.8.17:8081 --dev rc");
    net.redirect("add --proto udp --from 10.0.8.17:8081 --to 10.0.1.2:8083");
    assert_eq!(net.counted(2), [0; 4]);
    net.says("stats", &format!(" {} ", count + 1));
}

/// Rules come and go beside a TCP connection and a UDP flow, which do not notice.
#[test]
fn other_rules_are_not_disturbed() {
    let net = Net::serving();
    net.redirect("add --proto tcp --from 10.0.8.17:8080 --to 10.0.1.2:8083");
    net.redirect(&format!("add {RULE} --to 10.0.1.2:8083"));
    let mut stream = net.client.connect("10.0.8.17:8080");
    stream.write_all(b"one ").unwrap();
    let socket = net.client.udp("10.0.8.18:0");
    for port in 9000..9005 {
        assert_answers(&socket, "10.0.8.17:8080", "server");
        for proto in ["udp", "tcp"] {
            let rule = format!("--proto {proto} --from 10.0.8.17:{port}");
            net.redirect(&format!("add {rule} --to 10.0.1.2:8083"));
            stream.write_all(b"more ").unwrap();
            net.redirect(&format!("del {rule}"));
        }
    }
    thread::sleep(Duration::from_millis(50));
    let flows = net.router.run("cat /proc/net/nf_conntrack");
    let ours = flows.lines().filter(|l| l.contains("dport=8080")).count();
    assert_eq!(ours, 2, "{flows}");
    stream.shutdown(Shutdown::Write).unwrap();
    let mut got = String::new();
    stream.read_to_string(&mut got).unwrap();
    assert_eq!(got, format!("server one {}", "more ".repeat(10)));
    assert_eq!(net.counted(1)[0], 5);
}

/// A UDP flow that was there before the rule is redirected as well; `del` gives it back.
#[test]
fn a_flow_under_way_is_redirected_and_given_back() {
    let net = Net::serving();
    net.serve(&net.router, "router", "10.0.8.17:8080");
    // Something must track connections before there is a rule.
    net.redirect("add --proto udp --from 10.0.8.17:1 --to 10.0.1.2:1");
    let socket = net.client.udp("10.0.8.18:0");
    for _ in 0..3 {
        assert_answers(&socket, "10.0.8.17:8080", "router");
        net.redirect(&format!("add {RULE} --to 10.0.1.2:8083"));
        assert_answers(&socket, "10.0.8.17:8080", "server");
        net.redirect(&format!("del {RULE}"));
    }
    assert_answers(&socket, "10.0.8.17:8080", "router");
}

#[test]
fn a_device_goes_before_none() {
    let net = Net::serving();
    net.serve(&net.server, "special", "10.0.1.2:8084");
    net.redirect(&format!("add {RULE} --to 10.0.1.2:8083"));
    net.redirect(&format!("add {RULE} --to 10.0.1.2:8084 --dev rc"));
    let socket = net.client.udp("10.0.8.18:0");
    assert_answers(&socket, "10.0.8.17:8080", "special");
    // The router's own packets come in by no device.
    assert_answers(&net.router.udp("0.0.0.0:0"), "10.0.8.17:8080", "server");
    assert_eq!(net.counted(0), [1, 33, 1, 40]);
    assert_eq!(net.counted(1), [1, 33, 1, 41]);
    net.refuses(
        &format!("del {RULE} --dev rs"),
        "by rs in this network namespace: there is one without --dev, there is one with --dev rc",
    );
    net.redirect(&format!("del {RULE} --dev rc"));
    assert_answers(&socket, "10.0.8.17:8080", "server");
}
