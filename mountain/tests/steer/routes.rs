// SPDX-License-Identifier: GPL-2.0-or-later
//! Reads real routing tables, in network namespaces of its own. Needs root.

use crate::support::netns::{addr, hops, nets, prefix, Net, TWO_HOPS, TWO_HOPS_V6};
use ipnet::IpNet;
use mountain::topology::{FibRule, Member, Topology};

/// Each group's prefixes, with device, gateway and weight of its members.
fn groups(topology: &Topology) -> Vec<String> {
    let text = |g: usize| {
        let prefixes = topology.groups[g].prefixes.iter().map(IpNet::to_string);
        let prefixes: Vec<String> = prefixes.collect();
        format!("{}: {}", prefixes.join(" "), hops(topology, g))
    };
    (0..topology.groups.len()).map(text).collect()
}

#[track_caller]
fn assert_skipped(topology: &Topology, route: &str, reason: &str) {
    let skipped = &topology.skipped;
    let named = |s: &String| s.starts_with(route) && s.contains(reason);
    let is_told = skipped.iter().any(named);
    assert!(is_told, "no '{route} ... {reason}' in {skipped:#?}");
}

#[test]
fn without_a_multipath_route_there_is_nothing() {
    let net = Net::new(2);
    net.host.ip("route add default via 10.0.0.2 dev u0");
    net.host.ip("rule add fwmark 1 lookup 100");
    net.host.ip("route add default via 10.0.1.2 table 100");
    assert_eq!(net.host.topology(), Topology::default());
}

#[test]
fn ipv4_multipath_default() {
    let net = Net::with_default();
    let host = &net.host;
    host.ip("neigh replace 10.0.0.2 dev u0 lladdr 02:00:00:00:00:09 nud permanent");
    host.ip("link set u1 mtu 1280");
    host.ip("addr add 192.0.2.1/32 dev lo");
    host.ip("route add 203.0.113.0/24 via 10.0.1.2 dev u1");
    host.ip("route add blackhole 198.51.100.0/24");
    net.wait_up();
    let topology = host.topology();

    let hops = "u0 10.0.0.2 1, u1 10.0.1.2 3";
    assert_eq!(groups(&topology), [format!("0.0.0.0/0: {hops}")]);
    assert_eq!(topology.groups[0].table, 254);
    let [u0, u1] = &topology.paths[..] else {
        panic!("{:#?}", topology.paths)
    };
    assert_eq!(u0.key.ifindex, host.index("u0"));
    assert!(u0.up && u0.ethernet && !u0.key.ipv6);
    assert_eq!(u0.source, Some(addr("10.0.0.1")));
    assert_eq!((u0.mtu, u1.mtu), (1500, 1280));
    assert_eq!(u0.gateway_mac, Some([2, 0, 0, 0, 0, 9]));
    assert_eq!(u1.gateway_mac, None);

    // Connected, more specific, blackholed and local destinations are not ours; entries inside
    // others (10.0.0.1/32 of the local table) are left out.
    let connected = ["10.0.0.0/24", "10.0.1.0/24", "127.0.0.0/8", "192.0.2.1/32"];
    let others = ["198.51.100.0/24", "203.0.113.0/24"];
    assert_eq!(topology.not_ours, nets(&[&connected[..], &others].concat()));
    let bound = &topology.uplink_bound_sources;
    for pinned in ["10.0.0.1", "10.0.1.1", "fd00:0::1"] {
        assert!(bound.contains(&addr(pinned)), "{pinned}");
    }
    assert!(bound.iter().any(|a| a.to_string().starts_with("fe80:")));
    assert!(!bound.contains(&addr("192.0.2.1")), "service address");
    assert_eq!(topology.fib_rules, []);
    assert_eq!(topology.skipped, Vec::<String>::new());
}

#[test]
fn ipv6_multipath_default() {
    let net = Net::new(2);
    net.host.ip(&format!("-6 route add default {TWO_HOPS_V6}"));
    net.host.ip("-6 route add 2001:db8:5::/48 via fd00:1::2");
    net.wait_up();
    // As a router announces it. A device that goes up begins with its own.
    net.host.sysctl("net.ipv6.conf.u1.mtu", "1400");
    let topology = net.host.topology();
    let all = "::/0: u0 fd00::2 200, u1 fd00:1::2 1";
    assert_eq!(groups(&topology), [all]);
    assert!(topology.paths.iter().all(|p| p.key.ipv6 && p.up));
    assert_eq!(topology.paths[1].source, Some(addr("fd00:1::1")));
    let mtus: Vec<u32> = topology.paths.iter().map(|p| p.mtu).collect();
    assert_eq!(mtus, [1500, 1400]);
    let not_ours = &topology.not_ours;
    for other in "2001:db8:5::/48 fd00:0::/64 fd00:1::/64 fe80::/64 ff00::/8".split(' ') {
        assert!(not_ours.contains(&prefix(other)), "{other}: {not_ours:?}");
    }
    assert!(not_ours.iter().all(|n| n.addr().is_ipv6()));
}

#[test]
fn nexthop_objects_of_both_kinds_and_families() {
    let net = Net::new(3);
    let host = &net.host;
    host.ip("nexthop add id 1 via 10.0.0.2 dev u0");
    host.ip("nexthop add id 2 via 10.0.1.2 dev u1");
    host.ip("nexthop add id 3 via fd00:0::2 dev u0");
    host.ip("nexthop add id 4 via fd00:2::2 dev u2");
    host.ip("nexthop add id 10 group 1,5/2,7");
    host.ip("nexthop add id 11 group 3,2/4,4 type resilient buckets 32 idle_timer 60");
    host.ip("route add 10.10.0.0/16 nhid 10");
    host.ip("-6 route add 2001:db8::/32 nhid 11");
    host.ip("route add 10.11.0.0/16 nhid 1");
    // Without the compatible form, routes carry the id only.
    for compatible in ["1", "0"] {
        host.sysctl("net/ipv4/nexthop_compat_mode", compatible);
        let topology = host.topology();
        let v4 = "10.10.0.0/16: u0 10.0.0.2 5, u1 10.0.1.2 7";
        let v6 = "2001:db8::/32: u0 fd00::2 2, u2 fd00:2::2 4";
        assert_eq!(groups(&topology), [v4, v6], "mode {compatible}");
        assert_eq!(topology.not_ours, [], "nothing lies inside the prefixes");
        assert_eq!(topology.skipped, Vec::<String>::new());
    }
}

#[test]
fn ipv4_over_ipv6_next_hops() {
    let net = Net::new(2);
    let host = &net.host;
    host.ip("route add 10.9.0.0/16 nexthop via inet6 fd00:0::2 dev u0 nexthop via 10.0.1.2 dev u1");
    host.ip("neigh replace fd00:0::2 dev u0 lladdr 02:00:00:00:00:07 nud reachable");
    let topology = host.topology();
    assert_eq!(hops(&topology, 0), "u0 fd00::2 1, u1 10.0.1.2 1");
    let path = &topology.paths[0];
    assert!(!path.key.ipv6, "the routes' family");
    assert_eq!(path.source, Some(addr("10.0.0.1")));
    assert_eq!(path.gateway_mac, Some([2, 0, 0, 0, 0, 7]));
}

#[test]
fn routes_that_cannot_be_adopted_are_listed_with_the_reason() {
    let net = Net::new(3);
    let host = &net.host;
    host.ip("route add 10.20.0.0/16 nexthop dev u0 nexthop via 10.0.1.2 dev u1");
    host.ip("route add 10.21.0.0/16 nexthop via 10.0.0.2 nexthop via 10.0.0.2 weight 2");
    let hop = |n| format!(" nexthop via 10.0.0.{n} dev u0");
    let many: String = (2..19).map(hop).collect();
    host.ip(&format!("route add 10.22.0.0/16{many}"));
    host.ip(&format!("route add 10.23.0.0/16 metric 20 {TWO_HOPS}"));
    host.ip("route add 10.23.0.0/16 via 10.0.2.2 metric 10");
    host.ip(&format!("route add 10.24.0.0/16 tos 0x10 {TWO_HOPS}"));
    host.ip(&format!(
        "-6 route add 2001:db8:1::/48 from fd00::/16 {TWO_HOPS_V6}"
    ));
    host.ip("nexthop add id 1 blackhole");
    host.ip("nexthop add id 2 group 1");
    host.ip("route add 10.25.0.0/16 nhid 2");
    let topology = host.topology();
    assert_eq!(topology.groups, [], "{:#?}", topology.skipped);
    assert_eq!(topology.paths, []);
    assert_skipped(&topology, "10.20.0.0/16", "u0 has no gateway");
    assert_skipped(&topology, "10.21.0.0/16", "fewer than two");
    assert_skipped(&topology, "10.22.0.0/16", "17 next hops");
    let hidden = "metric 10 comes first: to use this one, delete that one or give";
    assert_skipped(&topology, "10.23.0.0/16 metric 20", hidden);
    assert_skipped(&topology, "10.24.0.0/16", "TOS 0x10");
    assert_skipped(&topology, "2001:db8:1::/48", "source address");
    assert_skipped(&topology, "10.25.0.0/16", "blackhole");
    assert_eq!(topology.skipped.len(), 7, "{:#?}", topology.skipped);

    // Skipped routes inside a group's prefix are not ours; the group's own prefix with another
    // metric is.
    host.ip(&format!("route add default metric 5 {TWO_HOPS}"));
    host.ip("route add default via 10.0.2.2 metric 9");
    let topology = host.topology();
    assert_eq!(topology.groups[0].prefixes, nets(&["0.0.0.0/0"]));
    for n in 20..=25 {
        let skipped = prefix(&format!("10.{n}.0.0/16"));
        assert!(topology.not_ours.contains(&skipped), "{skipped}");
    }
    assert!(!topology.not_ours.contains(&prefix("0.0.0.0/0")));
}

#[test]
fn encapsulated_next_hops_are_skipped() {
    let net = Net::new(2);
    let added = net.host.try_ip(
        "-6 route add 2001:db8::/32 nexthop encap seg6 mode encap segs fd00:0::99 via fd00:0::2 \
         dev u0 nexthop via fd00:1::2 dev u1",
    ) || net.host.try_ip(
        "route add 10.30.0.0/16 nexthop encap ip id 1 dst 10.0.0.2 via 10.0.0.2 dev u0 \
         nexthop via 10.0.1.2 dev u1",
    );
    if !added {
        eprintln!("skipped: this kernel has no light-weight tunnels");
        return;
    }
    let topology = net.host.topology();
    assert_eq!(topology.groups, []);
    assert_skipped(&topology, "", "encapsulates");
}

#[test]
fn single_addresses_are_left_alone_unless_they_are_named() {
    let net = Net::new(2);
    let host = &net.host;
    host.ip(&format!("route add default {TWO_HOPS}"));
    host.ip(&format!("route add 10.30.0.1/32 {TWO_HOPS}"));
    host.ip(&format!("-6 route add 2001:db8::1/128 {TWO_HOPS_V6}"));
    let shared = ["10.30.0.1/32", "2001:db8::1/128"];
    for routes in [&[][..], &["0.0.0.0/0", "::/0"][..]] {
        let topology = host.filtered(routes);
        assert_eq!(topology.groups.len(), 1, "{routes:?}");
        let said = "10.30.0.1/32 and 1 more to single addresses";
        assert_skipped(&topology, said, "may be servers");
        assert!(topology.not_ours.contains(&prefix(shared[0])));
    }
    assert_eq!(host.filtered(&shared).groups.len(), 2);
    assert_eq!(
        host.filtered(&["10.30.0.0/16", "2001:db8::/32"])
            .groups
            .len(),
        2
    );
}

/// By the tunnel's own remote end, or an entry of its forwarding table. The kernel routes others freely.
#[test]
fn ends_of_vxlan_that_names_a_device_are_left_alone() {
    let net = Net::new(2);
    let host = &net.host;
    host.ip(&format!("route add default {TWO_HOPS}"));
    host.ip("link add v0 type vxlan id 1 dstport 4789 dev u0 remote 10.40.0.1");
    host.ip("link add v1 type vxlan id 2 dstport 4790");
    host.run("bridge fdb append 02:00:00:00:00:01 dev v0 dst 10.40.0.2");
    host.run("bridge fdb append 02:00:00:00:00:01 dev v1 dst 10.40.0.3 via u1");
    host.run("bridge fdb append 02:00:00:00:00:01 dev v1 dst 10.40.0.4");
    let not_ours = host.topology().not_ours;
    let stays = |n: u32| not_ours.contains(&prefix(&format!("10.40.0.{n}/32")));
    assert_eq!([1, 2, 3, 4].map(stays), [true, false, true, false]);
}

#[test]
fn a_next_hop_without_gateway_leaves_the_others() {
    let net = Net::new(3);
    let host = &net.host;
    host.ip(&format!("route add default {TWO_HOPS} nexthop dev u2"));
    let topology = host.topology();
    assert_eq!(hops(&topology, 0), "u0 10.0.0.2 1, u1 10.0.1.2 3");
    assert_skipped(&topology, "0.0.0.0/0", "u2 has no gateway");
    let bound = &topology.uplink_bound_sources;
    assert!(!bound.contains(&addr("10.0.2.1")), "{bound:?}");
}

#[test]
fn equal_next_hops_share_a_group_and_others_do_not() {
    let net = Net::new(2);
    let host = &net.host;
    host.ip(&format!("route add 10.40.0.0/16 {TWO_HOPS}"));
    host.ip(&format!("route add 10.41.0.0/16 {TWO_HOPS}"));
    host.ip("route add 10.42.0.0/16 nexthop via 10.0.0.2 nexthop via 10.0.1.2");
    let topology = host.topology();
    assert_eq!(topology.paths.len(), 2, "paths are shared: {topology:#?}");
    let both = "10.40.0.0/16 10.41.0.0/16: u0 10.0.0.2 1, u1 10.0.1.2 3";
    let other = "10.42.0.0/16: u0 10.0.0.2 1, u1 10.0.1.2 1";
    assert_eq!(groups(&topology), [both, other]);
}

#[test]
fn the_filter_narrows() {
    let net = Net::with_default();
    net.host.ip(&format!("route add 10.50.0.0/16 {TWO_HOPS}"));
    net.host.ip(&format!("-6 route add default {TWO_HOPS_V6}"));
    let prefixes = |topology: &Topology| -> Vec<IpNet> {
        let groups = topology.groups.iter();
        groups.flat_map(|g| g.prefixes.clone()).collect()
    };
    let all = nets(&["0.0.0.0/0", "10.50.0.0/16", "::/0"]);
    assert_eq!(prefixes(&net.host.topology()), all);
    let inside = net.host.filtered(&["10.0.0.0/8"]);
    assert_eq!(prefixes(&inside), nets(&["10.50.0.0/16"]));
    assert_skipped(&inside, "0.0.0.0/0", "not among the routes asked for");
    assert_eq!(prefixes(&net.host.filtered(&["::/0"])), nets(&["::/0"]));
    assert_eq!(prefixes(&net.host.filtered(&["10.50.1.0/24"])), nets(&[]));
    // What the filter leaves out inside an adopted prefix is not ours.
    let default = net.host.filtered(&["0.0.0.0/0", "::/0"]);
    assert_eq!(default.groups.len(), 2, "0.0.0.0/0 holds all of IPv4");
}

/// A rule that comes before the main table, but for a change.
fn rule(priority: u32, change: fn(&mut FibRule)) -> FibRule {
    let mut rule = FibRule {
        table: 254,
        priority,
        ..FibRule::default()
    };
    change(&mut rule);
    rule
}

#[test]
fn rules_before_the_table_become_fib_rules() {
    let net = Net::with_default();
    let host = &net.host;
    host.ip("route add default via 10.0.0.2 table 100");
    host.ip("-6 route add default via fd00:0::2 table 100");
    host.ip("-6 route add default nexthop via fd00:0::2 nexthop via fd00:1::2");
    host.ip("rule add priority 10 fwmark 0x20/0xf0 lookup 100");
    host.ip("rule add priority 11 from 10.0.0.0/24 to 192.0.2.0/24 lookup 100");
    host.ip("rule add priority 12 iif u0 ipproto tcp sport 5-9 dport 443 lookup 100");
    host.ip("rule add priority 13 uidrange 1000-2000 tos 0x10 lookup 100");
    host.ip("rule add priority 14 iif lo from 10.9.9.9 prohibit");
    host.ip("rule add priority 15 not from 10.8.0.0/16 lookup 100");
    host.ip("-6 rule add priority 16 from fd00:0::/64 lookup 100");
    // None of these takes packets away from the main table's route:
    host.ip("rule add priority 20 from 10.7.0.0/16 lookup main");
    host.ip("rule add priority 21 fwmark 9 lookup 101"); // has no routes
    host.ip("rule add priority 22 oif u0 lookup 100");
    host.ip("rule add priority 23 iif nosuch lookup 100");
    host.ip("rule add priority 24 from 10.6.0.0/16 nop");
    host.ip("rule add priority 25 lookup main suppress_prefixlength 0");
    host.ip("rule add priority 40000 fwmark 7 lookup 100"); // too late
    let topology = host.topology();

    let mut expected = [
        rule(10, |r| r.fwmark = Some((0x20, 0xf0))),
        rule(11, |r| r.src = Some(prefix("10.0.0.0/24"))),
        rule(12, |r| {
            (r.sport, r.dport) = (Some((5, 9)), Some((443, 443)))
        }),
        rule(13, |r| r.uid = Some((1000, 2000))),
        rule(14, |r| {
            (r.iif, r.src) = (Some(1), Some(prefix("10.9.9.9/32")))
        }),
        rule(15, |r| {
            (r.invert, r.src) = (true, Some(prefix("10.8.0.0/16")))
        }),
        // What sockets send may have had no source yet.
        rule(15, |r| r.iif = Some(1)),
        rule(16, |r| {
            (r.src, r.ipv6) = (Some(prefix("fd00:0::/64")), true)
        }),
    ];
    expected[1].dst = Some(prefix("192.0.2.0/24"));
    (expected[2].iif, expected[2].ipproto) = (Some(host.index("u0")), Some(6));
    expected[3].tos = mountain::netlink::ds_field(0x10, false);
    assert_eq!(topology.fib_rules, expected);
    assert_eq!(topology.groups.len(), 2);
}

#[test]
fn wireguard_style_rules() {
    let net = Net::with_default();
    let host = &net.host;
    host.ip("route add default via 10.0.0.2 table 51820");
    host.ip("rule add not fwmark 51820 table 51820 priority 32764");
    host.ip("rule add table main suppress_prefixlength 0 priority 32763");
    let not_marked = |r: &mut FibRule| (r.invert, r.fwmark) = (true, Some((51820, u32::MAX)));
    assert_eq!(host.topology().fib_rules, [rule(32764, not_marked)]);
}

#[test]
fn goto_rules() {
    let net = Net::with_default();
    let host = &net.host;
    host.ip("route add default via 10.0.0.2 table 100");
    host.ip("rule add priority 50 fwmark 5 goto 32766");
    host.ip("rule add priority 100 goto 200");
    host.ip("rule add priority 150 from 10.3.0.0/16 lookup 100"); // jumped over
    host.ip("rule add priority 200 from 10.4.0.0/16 lookup 100");
    let topology = host.topology();
    let rules = topology.fib_rules.iter();
    let priorities: Vec<u32> = rules.map(|s| s.priority).collect();
    assert_eq!(priorities, [50, 200]);
}

#[test]
fn other_tables() {
    let net = Net::new(2);
    let host = &net.host;
    host.ip(&format!("route add default table 100 {TWO_HOPS}"));
    assert_skipped(&host.topology(), "0.0.0.0/0 (table 100)", "no routing rule");

    // Reached by one rule with a condition: all other packets are not ours.
    host.ip("rule add priority 90 fwmark 8 lookup main");
    host.ip("rule add priority 100 from 10.60.0.0/16 lookup 100");
    host.ip("rule add priority 110 fwmark 9 lookup main"); // too late
    let topology = host.topology();
    assert_eq!(topology.groups[0].table, 100);
    assert_eq!(topology.skipped.len(), 1, "{:?}", topology.skipped);
    assert_skipped(&topology, "0.0.0.0/0 (table 100)", "not in the main table");
    let rules = topology.fib_rules.iter();
    let rules = rules.map(|s| (s.table, s.priority, s.invert, s.src));
    let inverted = (100, 100, true, Some(prefix("10.60.0.0/16")));
    let sourceless = (100, 100, false, None);
    let expected = [(100, 90, false, None), inverted, sourceless];
    assert_eq!(rules.collect::<Vec<_>>(), expected);
    // The local table is looked up first, the main one only by others.
    let local = "10.0.0.1/32 10.0.0.255/32 10.0.1.1/32 10.0.1.255/32 127.0.0.0/8";
    let local: Vec<&str> = local.split(' ').collect();
    assert_eq!(topology.not_ours, nets(&local));

    host.ip("rule add priority 120 from 10.61.0.0/16 lookup 100");
    let default = "0.0.0.0/0 (table 100)";
    assert_skipped(&host.topology(), default, "several routing rules");

    host.ip("rule add priority 80 lookup 100");
    let topology = host.topology();
    assert_eq!(topology.groups.len(), 1);
    assert_eq!(topology.fib_rules, []);

    // Both tables: the main one is kept.
    host.ip(&format!("route add 10.0.0.0/8 {TWO_HOPS}"));
    host.ip("rule del priority 80");
    host.ip("rule del priority 120");
    let topology = host.topology();
    assert_eq!(topology.groups.len(), 1, "{topology:#?}");
    assert_eq!(topology.groups[0].table, 254);
    assert_skipped(&topology, default, "overlaps 10.0.0.0/8 of table 254");
}

#[test]
fn a_table_that_everybody_looks_up_first() {
    let net = Net::with_default();
    net.host.ip("rule add priority 220 lookup 220");
    let groups = net.host.topology().groups.len();
    assert_eq!(groups, 1, "an empty table does not matter");
    net.host.ip("route add 10.70.0.0/16 via 10.0.0.2 table 220");
    let topology = net.host.topology();
    assert_eq!(topology.groups.len(), 1);
    assert!(topology.not_ours.contains(&prefix("10.70.0.0/16")));
    assert_eq!(topology.fib_rules, []);
    net.host.ip("route add default via 10.0.0.2 table 220");
    let topology = net.host.topology();
    assert_eq!(topology.groups, []);
    let why = "in table 220, looked up first, hides it";
    assert_skipped(&topology, "0.0.0.0/0", why);
}

#[test]
fn routes_with_conditions_beside_the_group() {
    let net = Net::with_default();
    let host = &net.host;
    host.ip("route add default tos 0x08 via 10.0.0.2");
    host.ip(&format!("-6 route add default {TWO_HOPS_V6}"));
    host.ip("-6 route add default from fd00:5::/64 via fd00:0::2");
    let topology = host.topology();
    assert_eq!(topology.groups.len(), 2, "{:#?}", topology.skipped);
    let rules = topology.fib_rules.iter();
    let conditions: Vec<_> = rules.map(|s| (s.dst.unwrap(), s.tos, s.src)).collect();
    let tos = mountain::netlink::ds_field(8, false);
    let by_tos = (prefix("0.0.0.0/0"), tos, None);
    let by_source = (prefix("::/0"), None, Some(prefix("fd00:5::/64")));
    assert_eq!(conditions, [by_tos, by_source]);
}

#[test]
fn probes_have_the_best_source_address() {
    let net = Net::new(3);
    let host = &net.host;
    host.ip("link add u7 type veth peer name p7");
    host.ip("link set p7 up");
    host.ip("link set u7 up");
    // The worse ones first, so that order alone would choose them.
    host.ip("addr add 192.0.2.9/32 dev u7");
    host.ip("addr add 10.0.7.1/24 dev u7");
    host.ip("-6 addr add fd00:7::1/64 dev u7 nodad preferred_lft 0");
    host.ip("-6 addr add fd00:7::3/64 dev u7 nodad");
    host.ip("route add default nexthop via 10.0.7.2 dev u7 nexthop via 10.0.0.2 dev u0");
    host.ip("-6 route add default nexthop via fe80::2 dev u7 nexthop via fe80::2 dev u0 nexthop via fe80::2 dev u2");
    host.ip("-6 addr del fd00:0::1/64 dev u0");
    // On u7 the deprecated address is the older, on u2 the newer one.
    host.ip("-6 addr add fd00:2::7/64 dev u2 nodad preferred_lft 0");
    let topology = host.topology();
    let source = |ifname: &str, ipv6: bool| {
        let mut paths = topology.paths.iter();
        let found = paths.find(|p| p.ifname == ifname && p.key.ipv6 == ipv6);
        found.unwrap().source.unwrap()
    };
    let subnet = "on the gateway's subnet";
    assert_eq!(source("u7", false), addr("10.0.7.1"), "{subnet}");
    assert_eq!(source("u7", true), addr("fd00:7::3"), "deprecated");
    assert_eq!(source("u2", true), addr("fd00:2::1"));
    let link_local = source("u0", true).to_string();
    assert!(link_local.starts_with("fe80:"), "better than none");
}

#[test]
fn a_device_without_ethernet_headers_is_marked() {
    let net = Net::new(1);
    let host = &net.host;
    host.ip("tuntap add t0 mode tun");
    host.ip("addr add 10.0.9.1/24 dev t0");
    host.ip("link set t0 up");
    host.ip("route add default nexthop via 10.0.0.2 dev u0 nexthop via 10.0.9.2 dev t0");
    net.wait_up();
    let topology = host.topology();
    let paths = topology.paths.iter();
    let marks: Vec<_> = paths.map(|p| (&*p.ifname, p.ethernet, p.up)).collect();
    // Nobody holds the tun open.
    assert_eq!(marks, [("u0", true, true), ("t0", false, false)]);
}

#[test]
fn links_that_go_down_stay_in_routes_but_leave_nexthop_groups() {
    let net = Net::new(3);
    let host = &net.host;
    host.ip(&format!("route add default {TWO_HOPS}"));
    host.ip(&format!("-6 route add default {TWO_HOPS_V6}"));
    for n in 0..3 {
        host.ip(&format!("nexthop add id {} via 10.0.{n}.2 dev u{n}", n + 1));
    }
    host.ip("nexthop add id 10 group 1/2/3");
    host.ip("route add 10.80.0.0/16 nhid 10");
    net.wait_up();
    // The devices of each group, with "-" those that are down.
    let states = || {
        let topology = host.topology();
        let state = |member: &Member| {
            let path = &topology.paths[member.path];
            format!("{}{}", if path.up { "" } else { "-" }, path.ifname)
        };
        let groups = topology.groups.iter();
        let states = groups.map(|g| g.members.iter().map(state).collect::<Vec<_>>().join(" "));
        states.collect::<Vec<_>>()
    };
    assert_eq!(states(), ["u0 u1", "u0 u1 u2", "u0 u1"]);
    host.ip("link set u1 down");
    assert_eq!(states(), ["u0 -u1", "u0 u2", "u0 -u1"]);
    host.ip("link set u1 up");
    net.wait_up();
    // The kernel does not bring the nexthop object back.
    assert_eq!(states(), ["u0 u1", "u0 u2", "u0 u1"]);
}
