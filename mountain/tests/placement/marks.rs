// SPDX-License-Identifier: GPL-2.0-or-later
//! Marks that the owner's firewall gives forwarded packets and their connections.

use std::thread;
use std::time::Duration;

use crate::net::*;
use crate::support::*;

/// As of a proxy or a VPN whose table is loaded while connections run, and then anew: its chain comes after Mountain's or
/// before it. `fwmark 1` without a mask would not be met with bits of Mountain's.
#[test]
fn running_connections_follow_a_routing_rule_by_the_owners_mark() {
    let net = Home::new().with_lan().running();
    let mut flows = net.inner_flows();
    let opened = flows.open_by_both(&["udp"], SERVER[0]);
    net.home.run("ip route add blackhole default table 77");
    net.home.run("ip rule add fwmark 1 lookup 77 priority 77");
    let is_left = || {
        let table = net.home.run("nft list table inet mountain_start");
        table.contains("0x00000001 accept")
    };
    wait_until("Mountain knows the mark", LEAVE, is_left);
    let owner = "table inet owner { chain put { type filter hook prerouting priority mangle\n\
                 iifname lan0 meta mark set 1\n} }";
    net.home.nft(owner);
    for loaded in ["loaded", "loaded anew"] {
        assert_eq!(by_uplink(&flows.ask()), [0, 0], "{loaded}: nowhere else");
        net.home.nft(&format!("delete table inet owner\n{owner}"));
    }
    net.home.run("nft delete table inet owner");
    assert_eq!(flows.ask(), opened, "where they began");
    assert_eq!(net.refused(), 0);
    // Without the rule nothing is left out of the way.
    net.home.run("ip rule del priority 77");
    wait_until("Mountain forgets the mark", LEAVE, || !is_left());
}

/// As shapers set them, without a mask.
#[test]
fn forwarded_connections_whose_marks_are_taken_are_the_kernels() {
    let forward = "filter hook forward priority mangle";
    let prerouting = "filter hook prerouting priority mangle";
    for (hook, rule, taken) in [
        (forward, "ct mark set 20", true),
        (forward, "ct mark set ct mark and 0xff000000 or 0x14", false),
        (prerouting, "meta length < 100 meta mark set 3", true),
        (prerouting, "ip daddr 203.0.113.77 meta mark set 3", false),
    ] {
        let net = Home::new().with_lan();
        net.home.chain("inet owner put", hook, rule);
        net.up();
        let mut flows = net.inner_flows();
        if taken {
            flows.assert_all_open(EACH, SERVER[0], [EACH, 0]);
            let left = net.placement().left.join("\n");
            let expected = "forwarded connections are left to the kernel: the firewall sets marks without mountain's bits";
            assert_has(&left, &[expected, "inet owner put"]);
            assert_has(
                &stdout(&net.home.mountain("check")),
                &["marks without mountain's bits"],
            );
        } else {
            let opened = flows.open_by_both(&["tcp", "udp"], SERVER[0]);
            assert_eq!(flows.ask(), opened, "{rule}");
        }
        assert_eq!(net.refused(), 0, "{rule}");
    }
}

/// As before a captive portal, which marks whom it knows, and where programs are marked that may go out. A mark of Mountain's
/// must get nobody through.
#[test]
fn where_a_mark_gets_packets_through_nothing_is_placed() {
    let forward = ("filter hook forward priority filter", "iifname lan0");
    let output = ("filter hook output priority filter", "oifname { u0, u1 }");
    let ingress = (
        "filter hook ingress device lan0 priority 0",
        "tcp dport 7100",
    );
    let egress = (
        "filter hook egress devices = { u0, u1 } priority 0",
        "tcp dport 7100",
    );
    for ((hook, from), rule, is_own, is_left) in [
        (forward, "ct state new meta mark 0 drop", false, true),
        (
            forward,
            "ct state new meta mark and 0xff == 0 drop",
            false,
            false,
        ),
        (output, "tcp dport 7100 meta mark 0 reject", true, true),
        (forward, "ct state new meta mark 2 drop", false, false),
        (ingress, "meta mark 0 drop", false, true),
        (egress, "meta mark 0 drop", false, true),
        (egress, "meta mark 0 drop", true, true),
        (egress, "meta mark 2 drop", true, false),
    ] {
        let net = Home::new().with_lan();
        let family = if hook.contains("device") {
            "netdev"
        } else {
            "inet"
        };
        let chain = format!("{family} owner judges");
        net.home.chain(&chain, hook, &format!("{from} {rule}"));
        net.up();
        let opened = match is_own {
            true => net.flows().open("tcp", EACH, SERVER[0]),
            false => net.inner_flows().open("tcp", EACH, SERVER[0]),
        };
        if rule.contains("and 0xff") {
            assert_eq!(by_uplink(&opened), [0, 0], "{rule}");
        } else if is_left {
            assert_eq!(by_uplink(&opened), [0, 0], "{rule}: {opened:?}");
            let left = net.placement().left.join("\n");
            let expected = "the firewall treats packets otherwise if mountain's bits (0xff000000)";
            assert_has(&left, &[expected, &chain]);
        } else {
            assert_by_both(&opened);
        }
        assert_eq!(net.refused(), 0, "{rule}");
    }
}

/// What `check` says of new flows where a firewall goes by marks, or translates to one address.
#[test]
fn check_names_rules_by_which_marks_or_uplinks_matter() {
    let net = Home::new().with_lan();
    let check = || stdout(&net.home.mountain("check --adopt"));
    let by_mark = "otherwise if mountain's bits";
    let one_address = "the firewall does not translate all of them to each uplink's own address";
    let by_device = "the firewall treats u0 and u1 differently";
    let prerouting = "type nat hook prerouting priority dstnat;";
    let postrouting = "type nat hook postrouting priority srcnat - 1;";
    let forward = "type filter hook forward priority filter;";
    let accept_20 = format!("chain f {{ {forward} policy drop; ct mark 20 accept\n}}");
    let label = |value: &str| {
        let hook = "type filter hook prerouting priority mangle - 1;";
        format!("chain p {{ {hook} ct mark set {value}\n}}\n{accept_20}")
    };
    let output = "type nat hook output priority -100;";
    for (chains, expected) in [
        // A transparent proxy that spares what has a mark; by a mask, or by one mark of its own, it may.
        (format!("chain p {{ {prerouting} meta mark != 0 return; tcp dport 80 redirect to :3128\n}}"), by_mark),
        (format!("chain p {{ {prerouting} meta mark & 0xff != 0 return; tcp dport 80 redirect to :3128\n}}"), ""),
        (format!("chain o {{ {output} meta mark 255 return; tcp dport 80 redirect to :3128\n}}"), ""),
        (format!("chain o {{ {output} meta mark 0 tcp dport 80 redirect to :3128\n}}"), by_mark),
        (format!("chain f {{ {forward} meta mark & 0x02000000 != 0 drop\n}}"), by_mark),
        // Rules that sort into classes, write or do not track; counting does nothing to a packet.
        (format!("chain f {{ {forward} meta mark 0 udp dport 5000 meta mark set 6\n}}"), by_mark),
        ("chain m { type route hook output priority mangle; meta mark 0 udp dport 5000 meta mark set 6\n}".to_owned(), by_mark),
        (format!("chain f {{ {forward} meta mark 0 meta priority set 1:10\n}}"), by_mark),
        (format!("chain f {{ {forward} meta mark 0 ip dscp set ef\n}}"), by_mark),
        (format!("chain f {{ {forward} meta mark & 0xff == 0 ip dscp set ef\n}}"), ""),
        (format!("chain f {{ {forward} meta mark 0 counter log\n}}"), ""),
        ("chain r { type filter hook prerouting priority raw; meta mark 0 notrack\n}".to_owned(), by_mark),
        (format!("counter billed {{ }}\nchain f {{ {forward} meta mark 0 counter name billed\n}}"), ""),
        // By marks that the firewall sets, as Kubernetes, a VPN for one user, and a proxy do.
        (
            format!(
                "chain o {{ type filter hook output priority 0; meta mark set meta mark | 0x4000\n}}\n\
                 chain p {{ {postrouting} meta mark & 0x4000 == 0 return; meta mark set meta mark ^ 0x4000; masquerade\n}}"
            ),
            "",
        ),
        (
            format!(
                "chain m {{ type route hook output priority mangle; meta skuid 1234 meta mark set 42\n}}\n\
                 chain p {{ {postrouting} meta mark 42 masquerade\n}}"
            ),
            "",
        ),
        (
            format!(
                "chain m {{ type route hook output priority mangle; udp dport 53 meta mark set 1\n}}\n\
                 chain o {{ {output} meta mark 255 return; tcp dport 80 redirect to :3128\n}}"
            ),
            "",
        ),
        // A mark that is restored, and another chain that asks for a part of one.
        (
            format!(
                "chain m {{ type filter hook prerouting priority mangle; meta mark set ct mark\n}}\n\
                 chain f {{ {forward} meta mark & 0xff0000 == 0x40000 accept\n}}"
            ),
            "",
        ),
        // By the connection's mark.
        (format!("chain f {{ {forward} iifname lan0 ct state new ct mark 0 drop\n}}"), by_mark),
        (format!("chain f {{ {forward} iifname lan0 ct state new ct mark & 0xff == 0 drop\n}}"), ""),
        // Mountain's bits stay in it, and the rule that asks for it does not expect them.
        (label("ct mark and 0xff000000 or 20"), by_mark),
        (label("ct mark and 0xff000000 or 20").replace("ct mark 20", "ct mark & 0xff == 20"), ""),
        (format!("chain p {{ {postrouting} ip saddr 192.168.7.50 snat to 10.40.0.2\n}}"), one_address),
        (format!("chain p {{ {postrouting} tcp dport 25 snat to 10.40.0.2\n}}"), "the firewall gives this host's packets the same"),
        (format!("chain p {{ {postrouting} ip saddr 192.168.7.0/24 tcp dport 25 snat to 10.40.0.2\n}}"), one_address),
        // Each uplink's own, of all or of one.
        (format!("chain p {{ {postrouting} oifname u0 snat to 10.40.0.2; oifname u1 snat to 10.41.0.2\n}}"), ""),
        (format!("chain p {{ {postrouting} ip saddr 192.168.0.0/16 snat to oifname map {{ u0 : 10.40.0.2, u1 : 10.41.0.2 }}\n}}"), ""),
        (format!("chain p {{ {postrouting} oifname u0 snat to 10.40.0.2; oifname u1 snat to 10.40.0.2\n}}"), one_address),
        (format!("chain p {{ {postrouting} ip saddr 192.168.7.50 oifname u0 snat to 10.40.0.2; oifname {{ u0, u1 }} masquerade\n}}"), ""),
        (format!("chain p {{ {postrouting} oifname u0 snat to 10.40.0.2\n}}"), ""),
        (format!("chain p {{ {postrouting} ip saddr 192.168.7.50 oifname u1 return; oifname {{ u0, u1 }} masquerade\n}}"), by_device),
        // Another network's; back into this one.
        (format!("chain p {{ {postrouting} ip saddr {{ 10.8.0.0/24, 10.9.0.0-10.9.0.99 }} snat to 10.40.0.2\n}}"), ""),
        (format!("chain p {{ {postrouting} ip saddr 192.168.7.0/24 ip daddr 192.168.7.9 snat to 192.168.7.1\n}}"), ""),
    ] {
        net.home.nft(&format!("table ip owner {{ {chains} }}"));
        let said = check();
        match expected {
            "" => {
                for what in [by_mark, one_address, by_device, "without mountain's bits"] {
                    assert!(!said.contains(what), "{chains}: {said}");
                }
            }
            expected => assert_has(&said, &[expected]),
        }
        net.home.run("nft delete table ip owner");
    }
    for (table, rules) in [
        (
            "nat",
            &[
                "PREROUTING -m mark ! --mark 0 -j RETURN",
                "PREROUTING -p tcp -j REDIRECT --to-ports 3128",
            ][..],
        ),
        ("filter", &["FORWARD -m connmark --mark 0 -j DROP"]),
    ] {
        for rule in rules {
            net.home.run(&format!("iptables -t {table} -A {rule}"));
        }
        assert_has(&check(), &[by_mark, table]);
        net.home.run(&format!("iptables -t {table} -F"));
    }
}

/// A rule may send into a tunnel, or stop, what Mountain would place elsewhere. Elements of sets come and go all day.
#[test]
fn what_begins_while_a_changed_firewall_is_read_is_the_kernels() {
    const RULES: usize = 30_000;
    let net = Home::new();
    let rule = "ip saddr 192.0.2.1 ip daddr 192.0.2.2 drop\n";
    let rules = rule.repeat(RULES);
    net.home.nft(&format!(
        "table inet large {{\nset known {{ type ipv4_addr; }}\nchain c {{\n{rules}}}\n}}\n"
    ));
    net.up();
    let mut flows = net.flows();
    flows.open_by_both(&["tcp"], SERVER[0]);
    net.home.nft("add element inet large known { 192.0.2.3 }");
    flows.open_by_both(&["tcp"], SERVER[0]);
    // Until all is read, which takes a while.
    thread::sleep(Duration::from_secs(4));
    let drops = "oifname u1 tcp dport 7100 drop";
    let hook = "filter hook output priority 0";
    let are_all_left = || {
        net.home.chain("inet owner judges", hook, drops);
        let opened = net.flows().open("tcp", EACH, SERVER[0]);
        wait_until("it is read", LEAVE, || !net.placement().left.is_empty());
        by_uplink(&opened) == [EACH, 0]
    };
    // On a busy machine the daemon hears of it some ms late.
    let is_any_in_time = (0..3).any(|_| {
        let in_time = are_all_left();
        net.home.run("nft delete table inet owner");
        wait_until("it is over", LEAVE, || net.placement().left.is_empty());
        in_time
    });
    assert!(is_any_in_time);
}
