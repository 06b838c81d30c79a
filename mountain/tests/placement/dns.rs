// SPDX-License-Identifier: GPL-2.0-or-later
//! Two providers, and DNS servers that may answer one's customers only: they are asked by the kernel's uplink.

use std::fs;
use std::time::Duration;

use crate::net::*;
use crate::support::*;

/// As the daemon looks every 5 s.
const NOTICED: Duration = Duration::from_secs(8);
/// Further addresses of the server, which does not answer datagrams from them. They are no DNS servers.
const OTHER: [&str; 2] = ["10.50.0.3", "fd50::3"];

fn other_addresses(net: &Home) {
    net.server.ip("addr add 10.50.0.3/24 dev w");
    net.server
        .ip("-6 addr add fd50::3/64 dev w nodad preferred_lft 0");
}

/// All flows to the server of both families go by the first uplink, forwarded ones too.
#[track_caller]
fn assert_left(net: &Home) {
    for server in SERVER {
        net.flows().assert_all_open(EACH, server, [EACH, 0]);
        for kind in ["tcp", "udp"] {
            let mut flows = net.inner_flows();
            flows.assert_opens(kind, EACH, server, [EACH, 0]);
        }
    }
}

#[test]
fn flows_to_dns_servers_are_left_to_the_kernel_while_its_uplink_is_alive() {
    let net = Home::new().with_lan();
    other_addresses(&net);
    let [first, second] = SERVER;
    let named = config(&format!(
        "search example.org\nnameserver {first}\nnameserver {second}\nnameserver 127.0.0.53\n"
    ));
    net.start_with_resolv_conf(named.path());
    net.wait_good();
    net.wait_forwarding();
    assert_left(&net);
    let counted = net.counter("pass_dns");
    assert!(counted >= 2 * 5 * EACH as u64, "{counted}");
    let said = net.home.run(&format!("{MOUNTAIN} status"));
    assert_has(
        &said,
        &[
            "flows to DNS servers are left to the kernel",
            "10.50.0.2, fd50::2.",
        ],
    );
    for other in OTHER {
        net.flows().open_by_both(&["tcp"], other);
        net.inner_flows().open_by_both(&["tcp"], other);
    }

    let mut resolver = net.flows();
    resolver.assert_opens("msg", 1, first, [1, 0]);
    net.blackhole(0);
    wait_until("the kernel's uplink is dead", LEAVE, || {
        [false, true]
            .iter()
            .all(|ipv6| net.path(0, *ipv6).judged.state == "dead")
    });
    for server in SERVER {
        net.flows().assert_all_open(8, server, [0, 8]);
        net.inner_flows().assert_opens("udp", 8, server, [0, 8]);
    }
    assert_eq!(by_uplink(&resolver.ask()), [0, 1]);
    net.no_blackhole();
    net.wait_good();
    assert_left(&net);
    assert_eq!(by_uplink(&resolver.ask()), [1, 0], "a socket that asks on");

    fs::write(named.path(), format!("nameserver {second}\n")).unwrap();
    wait_until("the first is no DNS server any more", NOTICED, || {
        let opened = net.flows().open("tcp", EACH, first);
        by_uplink(&opened)[0] < EACH
    });
    net.flows().open_by_both(&KINDS, first);
    net.inner_flows().open_by_both(&["tcp", "udp"], first);
    net.flows().assert_all_open(EACH, second, [EACH, 0]);
    assert_eq!(net.refused(), 0);
}

#[test]
fn a_rule_decides_about_dns_servers_too() {
    let [first, second] = SERVER;
    let rule = format!("[[rule]]\nmatch = {{ prefix = \"{first}/32\" }}\nuse = \"steadiest\"\n");
    let net = Home::with_config(&rule);
    let named = config(&format!("nameserver {first}\nnameserver {second}\n"));
    net.start_with_resolv_conf(named.path());
    net.wait_good();
    net.flows().open_by_both(&KINDS, first);
    net.flows().assert_all_open(EACH, second, [EACH, 0]);
}

/// Neither is a server with a route of its own, nor one behind a default route with several next hops.
#[test]
fn servers_by_other_routes_are_not_concerned() {
    let net = Home::new();
    let [first, second] = SERVER;
    net.home
        .ip(&format!("route add {first} via 10.41.0.1 dev u1"));
    for family in ["-4", "-6"] {
        net.home.ip(&format!("{family} route flush default"));
    }
    net.home
        .ip("route add default nexthop via 10.40.0.1 dev u0 nexthop via 10.41.0.1 dev u1");
    net.home
        .ip("-6 route add default nexthop via fd40::1 dev u0 nexthop via fd41::1 dev u1");
    let named = config(&format!("nameserver {first}\nnameserver {second}\n"));
    net.start_with_resolv_conf(named.path());
    net.wait_good();
    net.flows().assert_all_open(EACH, first, [0, EACH]);
    net.flows().open_by_both(&KINDS, second);
    assert_eq!(net.counter("pass_dns"), 0);
    let said = net.home.run(&format!("{MOUNTAIN} status"));
    assert!(!said.contains("DNS"), "{said}");
}
