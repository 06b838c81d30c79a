// SPDX-License-Identifier: GPL-2.0-or-later
//! What rules of the FIB ask for, and the firewall changes after the kernel has routed by it.

use std::time::Duration;

use super::{bar_ipv6, flush, held, wait_free, wait_held};
use crate::support::{wait_until, Net, Traffic, HALF, LEAVE, SERVER4};

/// Has the client's own packets of the traffic routed by mark, out by u0 alone.
const BY_MARK: &str = "table inet marks { chain c { type route hook output priority mangle;\n\
                       udp dport 7000 meta mark set 7\n} }";
/// Takes a mark off again when the packet leaves.
const OFF: &str = "table inet off { chain c { type filter hook postrouting priority mangle;\n\
                   meta mark set 0\n} }";

#[test]
fn packets_routed_by_a_mark_that_is_taken_off_stay() {
    let net = Net::steered();
    net.client.ip("rule add priority 100 fwmark 7 lookup 100");
    net.client
        .ip("route add 203.0.113.0/24 via 10.30.0.2 dev u0 src 10.98.0.1 table 100");
    net.client.nft(BY_MARK);
    net.client.nft(OFF);
    wait_held(&net, "inet off c handle");
    net.client.wait_settled();
    let traffic = Traffic::start(&net, SERVER4, 20);
    let by_u0 = || traffic.during(Duration::from_millis(200)).by_path[1] == 0;
    wait_until("all is routed by the mark", LEAVE, by_u0);
    net.lose(0);
    let counts = traffic.during(HALF);
    assert_eq!(counts.by_path[1], 0, "{counts:?}");
    assert!(counts.sent > 0);
}

const FWMARK: &[&str] = &["rule add priority 100 fwmark 7 lookup 100"];
const ROUTE_BY_TOS: &[&str] = &["route add 203.0.113.0/24 tos 0x10 via 10.30.0.2 dev u0"];
const SOURCE: &[&str] = &["rule add priority 100 from 10.50.0.0/24 lookup 100"];
const TOS: &[&str] = &["rule add priority 100 tos 0x10 lookup 100"];
/// Tailscale's: what bears the mark uses the main table, as all else does, or nothing at all.
const TAILSCALE: &[&str] = &[
    "rule add priority 100 fwmark 7 lookup main",
    "rule add priority 101 fwmark 7 unreachable",
];
const DSCP: &str = "table inet t { chain c { type filter hook forward priority mangle;\n\
                    ip dscp set 0\n} }";
const DSCP_AT_LAST: &str =
    "table inet t { chain c { type filter hook postrouting priority mangle;\n\
                            ip dscp set 0\n} }";
const SNAT: &str = "table inet t { chain c { type nat hook postrouting priority srcnat;\n\
                    snat ip to 10.98.0.7\n} }";
/// Of which connection tracking does not know.
const STATELESS: &str = "table inet t { chain c { type filter hook postrouting priority mangle;\n\
                         ip saddr 10.50.0.0/24 ip saddr set 10.98.0.7\n} }";
const NOT_THE_PACKETS: &str =
    "table inet t { chain c { type filter hook postrouting priority mangle;\n\
     ct mark set 5\nmeta priority set 1:1\n} }";
const AT_EGRESS: &str =
    "table netdev t { chain c { type filter hook egress devices = { u0, u1 } priority 0;\n\
     meta mark set 1\n} }";

/// Rules of the FIB, rules of the firewall, and whether they hold the group together.
const CASES: &[(&[&str], &str, bool)] = &[
    // A mark is set after routing, and nobody asks for it.
    (&[], OFF, false),
    (TAILSCALE, OFF, false),
    (FWMARK, OFF, true),
    // Set before the kernel routes, or routes again.
    (FWMARK, BY_MARK, false),
    (FWMARK, NOT_THE_PACKETS, false),
    (FWMARK, AT_EGRESS, true),
    (TOS, DSCP, true),
    (ROUTE_BY_TOS, DSCP_AT_LAST, true),
    (TOS, OFF, false),
    (&[], STATELESS, false),
    (SOURCE, STATELESS, true),
    (SOURCE, SNAT, false),
    (SOURCE, DSCP, false),
];

#[test]
fn only_where_a_rule_of_the_fib_leads_out_by_the_group_does_it_matter() {
    let net = Net::steered();
    net.client
        .ip("route add default via 10.30.0.2 dev u0 table 100");
    for (fib, rules, holds) in CASES {
        for line in *fib {
            net.client.ip(line);
        }
        net.client.nft(rules);
        bar_ipv6(&net);
        net.client.wait_settled();
        match holds {
            true => wait_held(&net, "the firewall may change it"),
            false => assert_eq!(held(&net, false), None, "{fib:?}, {rules}"),
        }
        flush(&net);
        for line in *fib {
            net.client.ip(&line.replacen(" add ", " del ", 1));
        }
        wait_free(&net);
    }
}
