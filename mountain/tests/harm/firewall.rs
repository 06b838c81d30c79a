// SPDX-License-Identifier: GPL-2.0-or-later
//! Firewall, NAT and egress hooks of the device that a moved packet really leaves by.

pub mod programs;
mod rewritten;
mod rules;

use std::time::Duration;

use ipnet::IpNet;

use crate::support::*;

/// Why the flows of the client's group of a family are not moved.
fn held(net: &Net, ipv6: bool) -> Option<String> {
    let mut groups = net.client.status().groups.into_iter();
    let group = groups.find(|g| matches!(g.prefixes[0], IpNet::V6(_)) == ipv6);
    let held = group.expect("a group of the family").held;
    held.map(|difference| difference.what)
}

fn wait_held(net: &Net, by: &str) {
    let mut last = None;
    wait_until(&format!("flows are held by {by}"), 2 * LEAVE, || {
        last = held(net, false);
        last.as_ref().is_some_and(|why| why.contains(by))
    });
}

fn wait_free(net: &Net) {
    wait_until("flows are moved again", 2 * LEAVE, || {
        held(net, false).is_none()
    });
}

/// All by path 1: path 0 is left, and what the kernel sends there is moved.
fn all_moved(traffic: &Traffic) -> bool {
    let counts = traffic.during(Duration::from_millis(300));
    counts.by_path[0] == 0 && counts.nearly_all_arrived()
}

/// Rules that keep packets from leaving by u1, each at another hook.
const BARRED: [[&str; 3]; 3] = [
    ["inet t c", OUTPUT, "oifname u1 udp dport 7000 drop"],
    ["ip t c", POSTROUTING, "oif u1 udp dport 7000 drop"],
    ["netdev t c", EGRESS, "udp dport 7000 drop"],
];
/// One more, by a jump.
const BARRED_BY_JUMP: &str = "table inet t { chain more { udp dport 7000 drop; }\nchain c {\n\
     type filter hook output priority 0; oifname vmap { \"u1\" : jump more }\n} }";
const OUTPUT: &str = "filter hook output priority 0";
const POSTROUTING: &str = "filter hook postrouting priority 300";
const EGRESS: &str = "filter hook egress device u1 priority 0";

/// Has the rules of IPv6 tell the uplinks apart: what is announced before is answered once it is held.
fn bar_ipv6(net: &Net) {
    net.client.chain("ip6 m c", OUTPUT, "oifname u1 drop");
    wait_until("the rules are read", LEAVE, || held(net, true).is_some());
}

/// Ends [`bar_ipv6`] and whatever other rules there are.
fn flush(net: &Net) {
    net.client.run("nft flush ruleset");
    wait_until("the rules are read", LEAVE, || held(net, true).is_none());
}

#[test]
fn packets_moved_to_an_uplink_do_not_get_past_its_firewall() {
    let mut net = Net::new();
    let log = net.start("up --foreground");
    wait_until("it runs", 6 * LEAVE, || {
        net.client.mountain("status").status.success()
    });
    net.wait_good();
    net.client.wait_settled();
    let traffic = Traffic::start(&net, SERVER4, 20);
    net.lose(0);
    wait_until("flows are moved to u1", LEAVE, || all_moved(&traffic));
    let barred = |by: &str| {
        wait_held(&net, &format!("{by} handle"));
        // Those that had been moved go back, and those that the kernel sends by u1 are dropped.
        let counts = traffic.during(Duration::from_millis(300));
        assert_eq!(counts.by_path[1], 0, "{by}: {counts:?}");
        assert!(counts.sent > 0);
        net.client.run("nft flush ruleset");
        wait_free(&net);
    };
    for [by, hook, rule] in BARRED {
        net.client.chain(by, hook, rule);
        barred(by);
    }
    net.client.nft(BARRED_BY_JUMP);
    barred("inet t more");
    // A family that no rule tells apart goes on.
    bar_ipv6(&net);
    assert_eq!(held(&net, false), None);
    wait_until("flows are moved again", LEAVE, || all_moved(&traffic));
    // Nor does a rule that does nothing but to count.
    net.client.run("nft flush ruleset");
    net.client.chain("inet t c", OUTPUT, "oifname u1 counter");
    wait_until("IPv6 is not held", LEAVE, || held(&net, true).is_none());
    assert_eq!(held(&net, false), None);
    let stay = "running flows stay where the kernel sends them: the firewall treats u0 and u1";
    let parts = [stay, "inet t c handle", "flows are moved again"];
    assert_has(&said(&log), &parts);
}

#[test]
fn check_and_status_name_the_rule() {
    let net = Net::new();
    let hook = "filter hook forward priority 0";
    net.client
        .chain("inet t c", hook, "oifname u1 tcp dport 25 drop");
    let rule = "inet t c handle";
    let text = "oifname \"u1\" meta l4proto tcp dport 25 drop";
    assert_has(&stdout(&net.client.mountain("check")), &[rule, text]);
    net.up();
    wait_held(&net, rule);
    let held = "what follows is not carried out";
    assert_has(&net.client.mountain_ok("status"), &[rule, text, held]);
    assert_eq!(net.path("u0").flows, None);
    let held = net.client.status().groups.remove(0).held.unwrap();
    assert!(held.rule.unwrap().starts_with(rule));
}

/// Legacy xtables announce nothing.
#[test]
fn a_legacy_rule_for_one_uplink_is_noticed() {
    let net = Net::steered();
    assert_eq!(held(&net, false), None);
    net.client
        .run("iptables-legacy -t mangle -A POSTROUTING -o u1 -j DROP");
    let rule = "iptables-legacy -t mangle POSTROUTING, rule 1: oifname \"u1\" drop";
    wait_held(&net, rule);
    net.client.run("iptables-legacy -t mangle -F");
    wait_free(&net);
    // Nothing is asked of the kernel that would make a table.
    let names = "cat /proc/net/ip_tables_names /proc/net/ip6_tables_names";
    assert_eq!(net.client.run(names), "mangle\n");
}

/// What cannot be read may be anything.
#[test]
fn a_firewall_that_cannot_be_read_holds_flows() {
    let net = Net::new();
    let without = ["--bounding-set=-net_admin", "--inh-caps=-net_admin"];
    let args = [&without[..], &[MOUNTAIN, "check"]].concat();
    let text = stdout(&net.client.output("setpriv", &args));
    let told = "cannot be read, so no running flow is moved";
    assert_has(&text, &[told]);
}
