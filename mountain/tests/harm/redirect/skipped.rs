// SPDX-License-Identifier: GPL-2.0-or-later
//! Filters, shapers and settings that a fast backend would skip keep a rule with nft.

use std::net::SocketAddr;
use std::time::Duration;

use super::net::{ask, ask_in_vain, configured, Net};
use super::watch::{assert_served, carried, fast, wait_for, FROM, RULE};
use crate::support::{config, stderr, wait_until};

/// Rules that see packets before nft would redirect them, with the original port.
#[test]
fn filters_that_run_earlier_are_not_bypassed() {
    let (net, _watching) = fast();
    let nft = |line: &str| net.router.nft(line);
    nft("table ip early {\n\
         chain raw { type filter hook prerouting priority -300; }\n\
         chain mangle { type filter hook prerouting priority -150; }\n}\n\
         table netdev early { chain in { type filter hook ingress device rc priority 0; } }");
    for (chain, rule) in [
        ("ip early raw", "udp dport 8080 drop"),
        ("ip early raw", "ip saddr 10.0.8.66 drop"),
        ("ip early mangle", "udp dport 8080 meta mark set 7"),
        ("netdev early in", "udp dport 8080 drop"),
    ] {
        nft(&format!("add rule {chain} {rule}"));
        wait_for(&net, "nft");
        let named = format!("tcx-peer skips a rule of the firewall, so that only nft is chosen unless it is named: {chain} handle");
        let text = net.redirect(&format!("check {RULE}"));
        assert!(text.contains(&named), "{rule}: {text}");
        nft(&format!("flush chain {chain}"));
        wait_for(&net, "tcx-peer");
    }
    // What cannot concern these packets is in nobody's way.
    nft("add rule ip early raw tcp dport 8080 drop");
    nft("add rule ip early mangle iifname lo meta mark set 7");
    nft("add rule netdev early in tcp dport 8080 drop");
    let check = net.check(RULE);
    assert!(!check[1].by_name_only, "{check:#?}");
    // Each change is looked at, by nft meanwhile.
    wait_for(&net, "tcx-peer");
}

/// `rp_filter` drops forged sources, and a shaper holds the target's device back.
#[test]
fn source_filters_and_shapers_are_not_bypassed() {
    let (net, _watching) = fast();
    // Nobody at the client's device may have an address of the target's network.
    net.client.ip("addr add 10.0.1.66/32 dev c0");
    let forged = net.client.udp("10.0.1.66:0");
    let (hook, rule) = ("filter hook input priority 0", "ip saddr 10.0.1.66 counter");
    net.server.chain("ip count in", hook, rule);
    let server: SocketAddr = "10.0.8.17:8080".parse().unwrap();
    let honest = net.client.udp("10.0.8.18:0");
    let reached = |packets: u64| {
        forged.send_to(b"forged", server).unwrap();
        // The order is kept: whatever was to arrive is there by now.
        assert_served(&honest);
        assert_eq!(net.server.counted("chain ip count in"), [packets]);
    };
    let checked = |finding| {
        net.says(&format!("check {RULE}"), finding);
    };
    reached(1);
    net.router.sysctl("net.ipv4.conf.rc.rp_filter", "1");
    wait_for(&net, "nft");
    reached(1);
    checked("tcx-peer skips rp_filter = 1 on rc");
    // Loose: 10.0.1.66 has a route, others do not.
    net.router.sysctl("net.ipv4.conf.rc.rp_filter", "2");
    checked("tcx-peer skips rp_filter = 2 on rc");
    net.router.sysctl("net.ipv4.conf.rc.rp_filter", "0");
    wait_for(&net, "tcx-peer");
    net.router
        .run("tc qdisc add dev rs root tbf rate 1mbit burst 10kb latency 50ms");
    wait_for(&net, "nft");
    checked("the queueing discipline tbf of rs");
    net.router.run("tc qdisc del dev rs root");
    wait_for(&net, "tcx-peer");
}

/// The kernel drops what comes in from an address of its own. One that it gets while a program is there counts too, alone
/// or in a range that a route makes its own.
#[test]
fn packets_from_addresses_of_this_host_are_not_delivered() {
    let (net, _watching) = fast();
    net.client.ip("addr add 10.0.8.66/32 dev c0");
    let (hook, rule) = ("filter hook input priority 0", "ip saddr 10.0.8.66 counter");
    net.server.chain("ip count in", hook, rule);
    let honest = net.client.udp("10.0.8.18:0");
    // Of a new flow: how many have arrived.
    let arrived = || {
        let socket = net.client.udp("10.0.8.66:0");
        socket.send_to(b"whose?", FROM).unwrap();
        // The order is kept: whatever was to arrive is there by now.
        assert_served(&honest);
        net.server.counted("chain ip count in")[0]
    };
    let mut before = arrived();
    assert_eq!(before, 1);
    for [own, nobodys] in [
        [
            "addr add 10.0.8.66/32 dev rs",
            "addr del 10.0.8.66/32 dev rs",
        ],
        [
            "route add local 10.0.8.64/30 dev lo",
            "route del local 10.0.8.64/30 dev lo",
        ],
    ] {
        net.router.ip(own);
        wait_until("none arrives", Duration::from_secs(10), || {
            let now = arrived();
            std::mem::replace(&mut before, now) == now
        });
        assert_eq!(carried(&net), ["tcx-peer"], "{own}");
        net.router.ip(nobodys);
        wait_until("they arrive again", Duration::from_secs(10), || {
            arrived() > before
        });
    }
}

/// Of what is larger than the clients' device carries, one fragment would go by the program and the other by the
/// kernel: never whole anywhere.
#[test]
fn replies_larger_than_the_clients_device_are_left_to_nft() {
    let (net, _watching) = fast();
    for (ns, dev) in [(&net.client, "c0"), (&net.router, "rc")] {
        ns.ip(&format!("link set {dev} mtu 1400"));
    }
    wait_for(&net, "nft");
    let text = "x".repeat(1900);
    let (answer, from) = ask(&net.client.udp("10.0.8.18:0"), FROM, &text);
    assert_eq!((answer.len(), &*from), (1907, FROM));
    for (ns, dev) in [(&net.server, "s0"), (&net.router, "rs")] {
        ns.ip(&format!("link set {dev} mtu 1400"));
    }
    wait_for(&net, "tcx-peer");
}

/// The kernel fragments what is larger, or tells who has sent it. Of some of these MTUs a look-up by BPF says nothing.
#[test]
fn mtus_of_routes_are_not_gone_around() {
    let (net, _watching) = fast();
    net.router.ip("route add 10.0.8.18/32 dev rc mtu 1300");
    wait_for(&net, "nft");
    let why = "tcx-peer skips the MTU of the route 10.0.8.18/32";
    net.says(&format!("check {RULE}"), why);
    net.router.ip("route del 10.0.8.18/32");
    wait_for(&net, "tcx-peer");
}

/// A rule that the owner's `notrack` or own translation keeps packets from is no silent one.
#[test]
fn a_rule_that_can_never_match_is_reported() {
    let raw = "filter hook prerouting priority -300";
    let nat = "nat hook prerouting priority -110";
    for (hook, rule) in [
        (raw, "udp dport 8080 notrack"),
        (nat, "udp dport 8080 dnat to 10.0.1.2:99"),
        (raw, "udp dport 53 notrack"),
    ] {
        let net = Net::new();
        net.router.chain("ip owner c", hook, rule);
        let concerns = rule.contains("8080");
        let said = said_by_add(&net, "auto");
        for part in ["may never redirect anything", "ip owner c handle"] {
            assert_eq!(said.contains(part), concerns, "{said}");
        }
        for command in [format!("check {RULE}"), "list".to_owned()] {
            let text = net.redirect(&command);
            let told =
                |line: &str| line.contains("may never") && line.contains("ip owner c handle");
            assert_eq!(text.lines().any(told), concerns, "{rule}: {text}");
        }
    }
}

/// By nft it is for the name, by BPF for the device.
#[test]
fn a_rule_whose_device_is_renamed_is_named() {
    for (backend, said) in [
        (
            "nft",
            "redirects nothing at the moment: there is no device rc",
        ),
        (
            "tcx",
            "redirects what comes in by the device that was called rc",
        ),
    ] {
        let net = Net::new();
        net.redirect(&format!("add {RULE} --dev rc --backend {backend}"));
        let before = net.redirect("list");
        assert!(!before.contains("\nRule 0 "), "{before}");
        assert!(!net.redirect("list --json").contains("strayed"));
        net.router.ip("link set rc down name rx up");
        let after = net.redirect("list");
        assert!(after.contains(&format!("\nRule 0 {said}")), "{after}");
        let json = net.redirect("list --json");
        assert!(json.contains(&format!("\"strayed\": \"{said}")), "{json}");
        net.redirect("del --all");
    }
}

/// What is said when the rule is added by a backend.
fn said_by_add(net: &Net, backend: &str) -> String {
    let line = format!("redirect add {RULE} --backend {backend}");
    stderr(&net.router.mountain(&line))
}

/// Adding the rule by a backend says all of these parts, or none if its packets are not lost.
fn assert_told(net: &Net, (backend, lost): (&str, bool), parts: &[&str], rules: &str) {
    let said = said_by_add(net, backend);
    for part in parts {
        assert_eq!(said.contains(part), lost, "{backend}, {rules}: {said}");
    }
    net.redirect("del --all");
}

const ESTABLISHED: &str = "ct state established,related accept";

/// Policies and rules of a chain at the forward hook. What cannot be told before packets come is not told.
const FORWARD: &str = "lost: drop |
    lost: drop | ESTABLISHED
    drop | ESTABLISHED; ip daddr 10.0.1.2 accept
    drop | ct state vmap { established : accept, invalid : drop }; ct status dnat accept
    drop | ip daddr 10.0.1.2 accept; ip saddr 10.0.1.2 accept
    drop | ct state { new, established, related } accept
    drop | ct state vmap { new : accept, established : accept, invalid : drop }
    drop | ip daddr 10.0.1.2 accept
    drop | ESTABLISHED; ip saddr 192.168.0.0/16 accept
    accept | ESTABLISHED; ip saddr 192.168.0.0/16 return; drop
    lost: accept | ESTABLISHED; reject
    accept | ip saddr 10.0.8.66 drop";

/// Nor is one whose packets the firewall drops, as Docker's and ufw's do with all that they do not know.
#[test]
fn a_rule_whose_packets_are_dropped_is_reported() {
    let net = Net::new();
    let forward = |policy: &str, rules: &str| {
        let hook = format!("filter hook forward priority 0; policy {policy}");
        net.router.chain("inet guard f", &hook, rules);
    };
    let nothing = ["may redirect nothing"];
    let by_rule = ["rule 0 may redirect nothing", "inet guard f"];
    for case in FORWARD.lines().map(str::trim) {
        let chain = case.trim_start_matches("lost: ");
        let (policy, rules) = chain.split_once('|').unwrap();
        let rules = rules.replace(';', "\n");
        forward(policy, &rules.replace("ESTABLISHED", ESTABLISHED));
        let lost = chain != case;
        for told in [("auto", lost), ("tcx-peer", false)] {
            assert_told(&net, told, &by_rule, case);
        }
        net.router.nft("delete table inet guard");
    }
    // Of what BPF rewrites before connection tracking, that does not know a translation.
    let by_status = format!("{ESTABLISHED}\nct status dnat accept");
    forward("drop", &by_status);
    for told in [("nft", false), ("tcx", true)] {
        assert_told(&net, told, &nothing, &by_status);
    }
    net.router.nft("delete table inet guard");
    // As iptables has it.
    let iptables = |rule: &str| net.router.run(&format!("iptables-nft {rule}"));
    iptables("-P FORWARD DROP");
    iptables("-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT");
    for (rule, lost) in [
        ("-p udp --dport 53 -m conntrack --ctstate NEW", true),
        ("-m conntrack --ctstate NEW", false),
        ("-m state --state NEW", false),
        ("-m conntrack --ctstate DNAT", false),
        ("-s 192.168.0.0/16", false),
    ] {
        iptables(&format!("-A FORWARD {rule} -j ACCEPT"));
        assert_told(&net, ("auto", lost), &nothing, rule);
        iptables(&format!("-D FORWARD {rule} -j ACCEPT"));
    }
    iptables("-F FORWARD");
    iptables("-P FORWARD ACCEPT");
    // A file with many rules says it once.
    forward("drop", "");
    let file = config(&(1..=30).map(configured).collect::<String>());
    let line = format!("redirect restore --config {}", file.path().display());
    let said = stderr(&net.router.mountain(&line));
    assert_eq!(said.matches("may redirect nothing").count(), 1, "{said}");
}

/// What comes in by another device than the fast backend's, or from this host, is redirected too;
/// where nothing lies underneath, `list` names the device.
#[test]
fn packets_by_another_way_get_answers_or_list_tells() {
    let (net, watching) = fast();
    let router = net.router.udp("0.0.0.0:0");
    assert_served(&router);
    assert_eq!(carried(&net), ["tcx-peer"]);
    drop(watching);
    net.redirect("del --all");
    net.redirect(&format!("add {RULE} --backend tcx-peer"));
    let list = net.redirect("list");
    let row = list.lines().nth(1).unwrap();
    assert!(row.contains(" rc "), "{list}");
    ask_in_vain(&router, FROM);
}
