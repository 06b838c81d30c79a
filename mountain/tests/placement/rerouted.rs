// SPDX-License-Identifier: GPL-2.0-or-later
//! A firewall that has the kernel route this host's packets again once they have an uplink's address.

use crate::net::{by_uplink, Home, EACH, SERVER};
use crate::support::{assert_has, stdout};

/// Rules of the user's that lead to the first uplink, or into a tunnel.
const BY_MARK: &str = "rule add pref 100 fwmark 1 lookup 54";
const PAST_A_VPN: &str = "rule add pref 100 fwmark 1 lookup main";
const BY_TOS: &str = "rule add pref 101 dsfield 0x10 lookup 54";
const INTO_TUNNEL: &str = "rule add pref 102 fwmark 2 lookup 56";

fn with_rule(rule: &str) -> Home {
    let net = Home::new();
    net.home.ip("tuntap add t9 mode tun");
    net.home.bring_up("t9", &["10.99.0.2/24"]);
    for (device, table) in [("via 10.40.0.1 dev u0", 54), ("dev t9", 56)] {
        let route = format!("route add default {device} table {table}");
        net.home.ip(&route);
    }
    if !rule.is_empty() {
        net.home.ip(rule);
    }
    net
}

const ROUTE: &str = "type route hook output priority mangle;";
const NAT: &str = "type nat hook output priority -100;";
const POST: &str = "type nat hook postrouting priority srcnat;";

#[test]
fn what_the_firewall_routes_again_is_left_to_the_kernel_unless_it_is_translated() {
    for (rule, chains, changed) in [
        (
            BY_MARK,
            format!("chain o {{ {ROUTE} tcp dport 7100 meta mark set 1\n}}"),
            "mark",
        ),
        (
            PAST_A_VPN,
            format!("chain o {{ {ROUTE} tcp dport 7100 meta mark set 1\n}}"),
            "mark",
        ),
        (
            BY_TOS,
            format!("chain o {{ {ROUTE} tcp dport 7100 ip dscp set 4\n}}"),
            "TOS",
        ),
        (
            "",
            format!("chain o {{ {NAT} tcp dport 53 dnat to 10.40.0.1\n}}"),
            "destination",
        ),
        // Translated by one of them only.
        (
            BY_MARK,
            format!(
                "chain o {{ {ROUTE} tcp dport 7100 meta mark set 1\n}}\n\
                 chain p {{ {POST} oifname u1 masquerade\n}}"
            ),
            "mark",
        ),
        // By both; some of it only.
        (
            BY_MARK,
            format!(
                "chain o {{ {ROUTE} tcp dport 7100 meta mark set 1\n}}\n\
                 chain p {{ {POST} oifname {{ u0, u1 }} tcp dport 25 masquerade\n}}"
            ),
            "mark",
        ),
    ] {
        let net = with_rule(rule);
        net.home.nft(&format!("table ip owner {{ {chains} }}"));
        net.up();
        let left = net.placement().left.join("\n");
        let why = format!("the firewall may change the {changed} of this host's packets");
        assert_has(&left, &[&why, "ip owner o"]);
        let opened = net.flows().open("tcp", EACH, SERVER[0]);
        assert_eq!(by_uplink(&opened), [EACH, 0], "{chains}");
        // IPv6 is none of its business.
        net.flows().open_by_both(&["tcp", "udp"], SERVER[1]);
        assert_eq!(net.refused(), 0, "{chains}");
    }
}

#[test]
fn what_the_firewall_does_at_output_besides_keeps_nothing_from_choosing() {
    for (rule, chains, kinds) in [
        // All by the first one, but with its address.
        (
            BY_MARK,
            format!(
                "chain o {{ {ROUTE} tcp dport 7100 meta mark set 1\n}}\n\
                 chain p {{ {POST} oifname {{ u0, u1 }} masquerade\n}}"
            ),
            &["udp"][..],
        ),
        // Into the tunnel; where nobody routes again.
        (
            BY_MARK,
            format!("chain o {{ {NAT} tcp dport 7100 meta mark set 1\n}}"),
            &["tcp", "udp"],
        ),
        (
            INTO_TUNNEL,
            format!("chain o {{ {ROUTE} tcp dport 53 meta mark set 2\n}}"),
            &["tcp", "udp"],
        ),
        (
            BY_MARK,
            "chain o { type filter hook output priority mangle; tcp dport 7100 meta mark set 1\n}"
                .to_owned(),
            &["tcp", "udp"],
        ),
        // To this host itself; to a container, as Docker and Kubernetes have it.
        (
            "",
            format!("chain o {{ {NAT} tcp dport 80 redirect to :3128\n}}"),
            &["tcp", "udp"],
        ),
        (
            "",
            format!("chain o {{ {NAT} ip daddr != 127.0.0.0/8 fib daddr type local dnat to 172.17.0.2\n}}"),
            &["tcp", "udp"],
        ),
        (
            "",
            format!("chain o {{ {NAT} ip daddr 10.43.0.1 tcp dport 443 dnat to 10.42.0.5\n}}"),
            &["tcp", "udp"],
        ),
    ] {
        let net = with_rule(rule);
        net.home.nft(&format!("table ip owner {{ {chains} }}"));
        net.up();
        let left = net.placement().left;
        assert!(left.is_empty(), "{chains}: {left:?}");
        let opened = net.flows().open("tcp", EACH, SERVER[0]);
        assert!(opened.iter().all(|flow| flow.server.is_some()), "{chains}: {opened:?}");
        net.flows().open_by_both(kinds, SERVER[0]);
        assert_eq!(net.refused(), 0, "{chains}");
    }
}

/// As Docker has it with iptables, of both kinds.
#[test]
fn a_rule_for_this_hosts_own_addresses_keeps_nothing_from_choosing() {
    let net = Home::new();
    let rule = |types: &str| {
        format!("OUTPUT ! -d 127.0.0.0/8 -m addrtype {types} -j DNAT --to-destination 172.17.0.2")
    };
    for iptables in ["iptables-nft", "iptables-legacy"] {
        for (types, is_left) in [
            ("--dst-type LOCAL", false),
            ("! --dst-type UNICAST", false),
            ("! --dst-type LOCAL", true),
            ("--src-type LOCAL", true),
        ] {
            net.home
                .run(&format!("{iptables} -t nat -A {}", rule(types)));
            let said = stdout(&net.home.mountain("check --adopt"));
            let why = "the firewall may change the destination of this host's packets";
            assert_eq!(said.contains(why), is_left, "{iptables} {types}: {said}");
            net.home.run(&format!("{iptables} -t nat -F"));
        }
    }
}
