// SPDX-License-Identifier: GPL-2.0-or-later
//! What is no client's of a redirect goes where the kernel sends it, and a rule follows the host that it is on.

use std::fs;
use std::net::UdpSocket;
use std::thread;

use nix::sys::signal::Signal;

use super::net::{add, assert_answers, echo, Net};
use super::watch::{assert_alive, carried, fast, wait_for, watch, FROM, RULE};
use crate::redirect_flood::{connect, forge};
use crate::support::*;

const BACKENDS: [&str; 5] = ["nft", "tcx", "tcx-peer", "xdp", "xdp-redirect"];

/// Connection tracking, as any firewall has it.
fn track(net: &Net) {
    let hook = "filter hook output priority 0";
    net.router
        .chain("inet other f", hook, "ct state new counter");
}

/// Answers to what a socket of this host sends from a rule's address and port are not redirected: a time server that
/// asks another one.
#[test]
fn answers_to_this_host_itself_are_not_redirected() {
    let at = |v6: bool| match v6 {
        false => ("10.0.8.17:123", "10.0.1.2:9000", "10.0.8.18:123"),
        true => ("[fd08::17]:123", "[fd01::2]:9000", "[fd08::18]:123"),
    };
    for backend in BACKENDS {
        let net = Net::new();
        track(&net);
        for v6 in [false, true] {
            let (from, to, other) = at(v6);
            net.serve(&net.server, "server", to);
            net.serve(&net.client, "other", other);
            net.add("udp", from, to, backend);
            let own = net.router.udp(from);
            for _ in 0..3 {
                assert_answers(&own, other, "other");
            }
            // Clients are.
            let host = if v6 { "[fd08::18]:0" } else { "10.0.8.18:0" };
            assert_answers(&net.client.udp(host), from, "server");
        }
    }
}

/// A rule that `watch` carries does the same, with nothing but its own table to track connections.
#[test]
fn answers_to_this_host_itself_are_not_redirected_while_somebody_watches() {
    let (net, _watching) = fast();
    net.serve(&net.client, "other", "10.0.8.18:123");
    assert_answers(&net.router.udp(FROM), "10.0.8.18:123", "other");
    assert_answers(&net.client.udp("10.0.8.18:0"), FROM, "server");
    assert_eq!(carried(&net), ["tcx-peer"]);
}

/// Masqueraded connections of hosts behind this one may have a rule's port.
#[test]
fn answers_to_masqueraded_hosts_are_not_redirected() {
    for backend in BACKENDS {
        let net = Net::new();
        net.router.run("nft add table ip n");
        net.router
            .run("nft add chain ip n post { type nat hook postrouting priority 100; }");
        net.router
            .run("nft add rule ip n post oifname rc masquerade");
        let (from, to) = ("10.0.8.17:40000", "10.0.1.2:9000");
        net.serve(&net.server, "server", to);
        net.serve(&net.client, "other", "10.0.8.18:7000");
        net.add("udp", from, to, backend);
        net.add("tcp", from, to, backend);
        let behind = net.server.udp("10.0.1.2:40000");
        for _ in 0..2 {
            assert_answers(&behind, "10.0.8.18:7000", "other");
        }
        let listener = net.client.listen("10.0.8.18:7001");
        let server = thread::spawn(move || {
            let (stream, peer) = listener.accept().unwrap();
            let _ = std::io::copy(&mut &stream, &mut &stream);
            peer
        });
        let mut stream = connect(&net.server, "10.0.1.2:40000", "10.0.8.18:7001");
        for _ in 0..3 {
            assert_alive(&mut stream);
        }
        drop(stream);
        assert_eq!(server.join().unwrap().to_string(), from, "{backend}");
        // Another client than the one whose answers those were.
        assert_answers(&net.client.udp("10.0.8.18:0"), from, "server");
    }
}

/// Its first packet is the first that connection tracking sees, when a rule switches that on.
#[test]
fn a_connection_from_before_the_first_rule_goes_on() {
    for v6 in [false, true] {
        let net = Net::new();
        let (from, to) = match v6 {
            false => ("10.0.8.17:8080", "10.0.1.2:9000"),
            true => ("[fd08::17]:8080", "[fd01::2]:9000"),
        };
        let listener = net.router.listen(from);
        let here = thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let _ = std::io::copy(&mut &stream, &mut &stream);
        });
        let mut stream = net.client.connect(from);
        stream.set_read_timeout(Some(LEAVE)).unwrap();
        assert_alive(&mut stream);
        net.add("tcp", from, to, "nft");
        for _ in 0..3 {
            assert_alive(&mut stream);
        }
        // A new one is redirected.
        let (mut redirected, server) = echo(&net, from, to);
        assert_alive(&mut redirected);
        drop((stream, redirected));
        here.join().unwrap();
        server.join().unwrap();
    }
}

/// Entries of the router's connection tracking that name this.
fn tracked(net: &Net, part: &str) -> Vec<String> {
    let table = "/proc/thread-self/net/nf_conntrack";
    let all = net.router.with(|| fs::read_to_string(table).unwrap());
    let lines = all.lines().filter(|line| line.contains(part));
    lines.map(str::to_owned).collect()
}

/// What nobody has proven is not made more of when nft takes it over.
#[test]
fn forged_flows_are_not_taken_over_as_established() {
    let net = Net::serving();
    net.redirect(&format!("add {RULE} --backend auto"));
    net.redirect("add --proto tcp --from 10.0.8.17:8080 --to 10.0.1.2:9000 --backend auto");
    let watching = watch(&net);
    wait_for(&net, "tcx-peer");
    let real = net.client.udp("10.0.8.18:5000");
    for _ in 0..2 {
        assert_answers(&real, FROM, "server");
    }
    let (mut stream, server) = echo(&net, FROM, "10.0.1.2:9000");
    assert_alive(&mut stream);
    // Nobody there answers: no such host, and no route back.
    for n in 0..20 {
        for tcp in [false, true] {
            forge(&net.client, tcp, &format!("198.18.0.{}:6000", n + 1), FROM);
        }
    }
    watching.signal(Signal::SIGTERM);
    let _ = watching.finish();
    let forged = tracked(&net, "src=198.18.0.");
    assert_eq!(forged.len(), 40, "{forged:#?}");
    for line in &forged {
        let bad = ["ASSURED", "ESTABLISHED"]
            .iter()
            .any(|word| line.contains(word));
        assert!(!bad, "{line}");
    }
    let real_ones = tracked(&net, "sport=5000");
    assert!(real_ones[0].contains("ASSURED"), "{real_ones:#?}");
    assert_answers(&real, FROM, "server");
    assert_alive(&mut stream);
    drop(stream);
    server.join().unwrap();
}

/// The router's address on the server's side is another one.
fn renumber(net: &Net, from: &str, to: &str) {
    net.router.ip(&format!("addr add {to}/24 dev rs"));
    net.router.ip(&format!("addr del {from}/24 dev rs"));
    net.server.ip(&format!("route replace default via {to}"));
}

/// As by DHCP. A rule that goes on with an address that is not this host's any more gets no answers.
#[test]
fn a_rewritten_source_follows_this_hosts_address() {
    let net = Net::serving();
    net.redirect(&format!("add {RULE} --snat always"));
    let source = || net.list()[0].installed.plan.snat.unwrap().to_string();
    let seen = |socket: &UdpSocket| {
        assert_answers(socket, FROM, "server");
        source()
    };
    assert_eq!(seen(&net.client.udp("10.0.8.18:0")), "10.0.1.1");
    // Secondary addresses go with their first one.
    net.router
        .sysctl("net.ipv4.conf.all.promote_secondaries", "1");
    renumber(&net, "10.0.1.1", "10.0.1.7");
    assert_eq!(source(), "10.0.1.1");
    let none = tempfile::NamedTempFile::new().unwrap();
    let restore = format!("restore --config {}", none.path().display());
    let output = net.router.mountain(&format!("redirect {restore}"));
    assert_has(&stderr(&output), &["get 10.0.1.7 now"]);
    assert_eq!(seen(&net.client.udp("10.0.8.18:0")), "10.0.1.7");
    assert_eq!(net.counted(0)[0], 2, "its counters stay");
    let _watching = watch(&net);
    wait_until("it watches", LEAVE, || {
        renumber(&net, "10.0.1.7", "10.0.1.9");
        true
    });
    wait_until("the rule follows", LEAVE, || source() == "10.0.1.9");
    assert_eq!(seen(&net.client.udp("10.0.8.18:0")), "10.0.1.9");
}

/// Whoever adds it once more, as scripts do, has it back.
#[test]
fn adding_a_rule_again_brings_it_back() {
    let net = Net::serving();
    for backend in ["nft", "tcx"] {
        let rule = add("udp", FROM, "10.0.1.2:8083", backend) + " --dev rc";
        net.redirect(&rule);
        match backend {
            "nft" => drop(net.router.run("nft flush ruleset")),
            _ => {
                net.router.ip("link del rc");
                net.join_client();
                net.client.ip("route add default via 10.0.8.17");
            }
        }
        assert!(!net.list()[0].active, "{backend}");
        let output = net.router.mountain(&format!("redirect {rule}"));
        assert!(output.status.success(), "{output:?}");
        assert_has(&stderr(&output), &["brought back 1 rule"]);
        assert_has(&stdout(&output), &["is already there"]);
        assert!(net.list()[0].active, "{backend}");
        net.reaches("server");
        net.redirect("del --all");
    }
    net.assert_clean();
}

/// `--fix` is of the rule that was given it, whatever else shares its settings.
#[test]
fn saved_rules_have_no_fix_that_nobody_gave() {
    let net = Net::serving();
    net.router.sysctl("net.ipv4.ip_forward", "0");
    net.redirect("add --proto udp --from 10.0.8.17:1 --to 10.0.1.2:8083 --dev rc --fix");
    net.redirect("add --proto udp --from 10.0.8.17:2 --to 10.0.1.2:8083 --dev rc");
    let shared = &net.list()[1].installed.plan.fixes;
    assert!(
        !shared.is_empty(),
        "the second needs what the first has changed"
    );
    let file = tempfile::NamedTempFile::new().unwrap();
    net.redirect(&format!("save --config {}", file.path().display()));
    let saved = fs::read_to_string(file.path()).unwrap();
    let tables: Vec<&str> = saved.split("[[redirect]]").skip(1).collect();
    let has_fix = |table: &&str| table.contains("fix = true");
    assert!(has_fix(&tables[0]) && !has_fix(&tables[1]), "{saved}");
}

/// What is wrong elsewhere in the file keeps no redirect.
#[test]
fn a_mistake_in_another_section_keeps_the_redirects() {
    let net = Net::serving();
    let rule = "[[redirect]]\nproto = \"udp\"\nfrom = \"10.0.8.17:8080\"\nto = \"10.0.1.2:8083\"\n";
    let file = config(&format!("[steer]\ntolerence_ms = 10\n\n{rule}"));
    let path = file.path().display().to_string();
    let output = net
        .router
        .mountain(&format!("redirect restore --config {path}"));
    assert!(output.status.success(), "{output:?}");
    assert_has(&stderr(&output), &["tolerence_ms", "are used all the same"]);
    net.reaches("server");
    net.redirect(&format!("save --config {path}"));
    let saved = fs::read_to_string(&path).unwrap();
    assert_has(&saved, &["tolerence_ms = 10", "10.0.8.17:8080"]);
    // Of a redirect's own, none is taken.
    fs::write(&path, format!("{rule}porto = 1\n")).unwrap();
    let output = net
        .router
        .mountain(&format!("redirect restore --config {path}"));
    assert_eq!(output.status.code(), Some(78));
}

/// A command that is killed between the kernel's tables and the record locks nobody out.
#[test]
fn a_source_that_was_half_changed_can_be_deleted_and_followed() {
    let net = Net::serving();
    net.redirect(&format!("add {RULE} --snat always"));
    net.redirect("add --proto udp --from 10.0.8.17:81 --to 10.0.1.2:8083 --snat always");
    net.router
        .sysctl("net.ipv4.conf.all.promote_secondaries", "1");
    renumber(&net, "10.0.1.1", "10.0.1.7");
    let mut restore = net.router.command(MOUNTAIN);
    restore.args(["redirect", "restore", "--config", "/dev/null"]);
    let killed = restore
        .env("MOUNTAIN_DIE_AFTER", "exchange")
        .output()
        .unwrap();
    assert!(killed.status.code().is_none(), "{killed:?}");
    net.redirect("del --proto udp --from 10.0.8.17:8080");
    // The same `add` has the other one follow.
    net.redirect("add --proto udp --from 10.0.8.17:81 --to 10.0.1.2:8083 --snat always");
    assert_answers(&net.client.udp("10.0.8.18:0"), "10.0.8.17:81", "server");
    net.redirect("del --all");
    net.assert_clean();
}

/// The server has sent first, as WireGuard does: to connection tracking its clients' packets are answers.
#[test]
fn a_flow_that_the_server_began_follows_the_rule() {
    for backend in BACKENDS {
        let net = Net::new();
        track(&net);
        net.serve(&net.server, "server", "10.0.1.2:9000");
        let client = net.client.udp("10.0.8.18:5000");
        let old = net.router.udp(FROM);
        old.send_to(b"first", "10.0.8.18:5000").unwrap();
        client.recv_from(&mut [0; 100]).unwrap();
        net.add("udp", FROM, "10.0.1.2:9000", backend);
        assert_answers(&client, FROM, "server");
    }
}

/// At the start of the machine a route or a device may be late.
#[test]
fn the_service_adds_a_rule_when_it_becomes_possible() {
    let net = Net::serving();
    let from = "proto = \"udp\"\nfrom = \"10.0.8.17:8080\"\nto = \"10.0.7.2:8083\"\n";
    let file = config(&format!("[[redirect]]\n{from}"));
    let path = file.path().display().to_string();
    let late = ["redirect", "watch", "--restore", "--config", &path];
    let watching = Guard::piped(net.router.command(MOUNTAIN).args(late));
    net.server.ip("addr add 10.0.7.2/32 dev lo");
    net.serve(&net.server, "late", "10.0.7.2:8083");
    wait_until("it has looked", LEAVE, || {
        let folder = net.record().replace("redirect-", "watch-redirect-");
        std::path::Path::new(&folder).exists()
    });
    assert_eq!(net.rules(), 0);
    // `save` keeps what is not possible yet.
    net.says(
        &format!("save --config {path}"),
        "kept what is not possible now: 1 rule",
    );
    net.router.ip("route add 10.0.7.0/24 via 10.0.1.2");
    wait_until("the rule is there", LEAVE, || net.rules() == 1);
    net.reaches("late");
    watching.signal(Signal::SIGTERM);
    let output = watching.finish();
    assert_has(
        &stderr(&output),
        &["has no route to 10.0.7.2", "is added: it is possible now"],
    );
    net.redirect("del --all");
    net.refuses(&format!("save --config {path}"), "no rule is in force");
    assert!(fs::read_to_string(&path).unwrap().contains("10.0.7.2"));
}
