// SPDX-License-Identifier: GPL-2.0-or-later
use super::*;
use crate::topology::{Group, Kept, Kind, Member, Suspended};

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn path(ifindex: u32, gateway: &str, addresses: &[&str]) -> Path {
    Path {
        source: addresses.first().map(|a| ip(a)),
        addresses: addresses.iter().map(|a| ip(a)).collect(),
        ..Path::plain(ifindex, gateway)
    }
}

fn group(kind: Kind, paths: &[usize]) -> Group {
    Group {
        kind,
        table: 254,
        prefixes: vec!["0.0.0.0/0".parse().unwrap()],
        members: paths
            .iter()
            .map(|&path| Member { path, weight: 1 })
            .collect(),
        preferred: None,
        told_by: Default::default(),
    }
}

/// Two uplinks, both families on the first, and a pair of paths whose flows can move.
fn home() -> Topology {
    Topology {
        paths: vec![
            path(2, "192.0.2.1", &["192.0.2.10", "192.0.2.11"]),
            path(3, "198.51.100.1", &["198.51.100.7"]),
            path(2, "fe80::1", &["2001:db8:1::5"]),
            path(3, "fe80::2", &["2001:db8:2::5"]),
            path(4, "10.1.0.1", &["10.1.0.2"]),
            path(5, "10.2.0.1", &["10.2.0.2"]),
        ],
        groups: vec![
            group(Kind::Place, &[0, 1]),
            group(Kind::PlaceAndMove, &[2, 3]),
            group(Kind::Move, &[4, 5]),
        ],
        rule_priorities: [32765, 199],
        ..Topology::default()
    }
}

/// No rule of others has come since.
fn changes(there: &Routing, wanted: &Routing) -> Changes {
    let found = Found {
        routing: there.clone(),
        ..Found::default()
    };
    super::changes(&found, wanted)
}

fn mask() -> MarkMask {
    MarkMask::DEFAULT
}

/// Nothing is held, and no device has a number yet.
fn plan(topology: &Topology) -> PlacementPlan {
    let plan = super::plan((topology, &[]), mask(), &BTreeSet::new(), &BTreeMap::new()).unwrap();
    assert_eq!(uplink_addresses(topology), plan.routing.addresses());
    plan
}

#[test]
fn each_uplink_has_a_table_its_addresses_and_its_mark_lead_to() {
    let mut home = home();
    home.paths[1].preferred_source = Some(ip("198.51.100.7"));
    let plan = plan(&home);
    let lines = describe(&plan.routing, |i| format!("u{i}"));
    let [two, three] = [TABLE_BASE + 2, TABLE_BASE + 3];
    let users = "uidrange 0-4294967294";
    let expected = [
        format!("ip route add default via 192.0.2.1 dev u2 table {two}"),
        format!("ip route add default via 198.51.100.1 dev u3 src 198.51.100.7 table {three}"),
        format!("ip -6 route add default via fe80::1 dev u2 table {two}"),
        format!("ip -6 route add default via fe80::2 dev u3 table {three}"),
        "ip rule add priority 32765 from all uidrange 0-4294967294 lookup main suppress_prefixlength 0"
            .into(),
        format!("ip rule add priority 32765 from 192.0.2.10 lookup {two}"),
        format!("ip rule add priority 32765 from 192.0.2.11 lookup {two}"),
        format!("ip rule add priority 32765 from 198.51.100.7 lookup {three}"),
        format!("ip rule add priority 32765 fwmark 0x2000000/0xff000000 {users} lookup {two}"),
        format!("ip rule add priority 32765 fwmark 0x3000000/0xff000000 {users} lookup {three}"),
        "ip -6 rule add priority 199 from all uidrange 0-4294967294 lookup main suppress_prefixlength 0"
            .into(),
        format!("ip -6 rule add priority 199 from 2001:db8:1::5 lookup {two}"),
        format!("ip -6 rule add priority 199 from 2001:db8:2::5 lookup {three}"),
        format!("ip -6 rule add priority 199 fwmark 0x2000000/0xff000000 {users} lookup {two}"),
        format!("ip -6 rule add priority 199 fwmark 0x3000000/0xff000000 {users} lookup {three}"),
    ];
    assert_eq!(lines, expected);
    let marks: Vec<_> = plan.marks.into_iter().collect();
    let [a, b] = [0x0200_0000, 0x0300_0000];
    assert_eq!(marks, [(0, a), (1, b), (2, a), (3, b)]);
    assert_eq!(plan.uplinks, [(a, "u2".to_owned()), (b, "u3".to_owned())]);
}

#[test]
fn ipv6_has_no_rule_where_no_address_may_have_one() {
    let mut home = home();
    home.groups[1].prefixes = vec!["::/0".parse().unwrap()];
    let plan = |held: &[&str]| {
        let held = held.iter().map(|address| ip(address)).collect();
        super::plan((&home, &[]), mask(), &held, &BTreeMap::new()).unwrap()
    };
    let of = |plan: &PlacementPlan, ipv6| {
        let rules = plan.routing.rules.iter();
        rules.filter(|rule| rule.ipv6 == ipv6).count()
    };
    let all = ["2001:db8:1::5", "2001:db8:2::5"];
    let without = plan(&all);
    assert_eq!((of(&without, true), of(&without, false)), (0, 6));
    assert!(!without.routing.routes.iter().any(|route| route.ipv6));
    assert_eq!(without.marks.into_keys().collect::<Vec<_>>(), [0, 1]);
    assert_eq!(of(&plan(&all[..1]), true), 4);
    // The marks of IPv4 choose.
    let all = ["192.0.2.10", "192.0.2.11", "198.51.100.7"];
    assert_eq!(of(&plan(&all), false), 3);
}

#[test]
fn suspended_uplinks_keep_their_marks_for_single_destinations_only() {
    let mut home = home();
    let whole = plan(&home);
    let paths = home.paths[..2].to_vec();
    home.groups.remove(0);
    home.suspended = vec![Suspended {
        ipv6: false,
        paths,
        why: String::new(),
        whole: false,
    }];
    home.kept = vec![Kept {
        host: ip("203.0.113.5"),
        ifindex: 2,
    }];
    let of_ipv4 = |plan: &PlacementPlan| {
        let lines = describe(&plan.routing, |i| format!("u{i}"));
        let lines = lines.into_iter().filter(|line| line.starts_with("ip r"));
        lines.collect::<Vec<_>>()
    };
    let suspended = plan(&home);
    let three = TABLE_BASE + 3;
    let expected = [
        format!("ip route add 203.0.113.5 via 198.51.100.1 dev u3 table {three}"),
        format!(
            "ip rule add priority 32765 fwmark 0x3000000/0xff000000 lookup {three} suppress_prefixlength 0"
        ),
    ];
    assert_eq!(of_ipv4(&suspended), expected);
    let (now, before) = (&suspended.uplinks, &whole.uplinks);
    assert_eq!(now, before, "connections keep their marks");
    assert_eq!(suspended.marks.len(), 2, "IPv6 goes on");

    // By a rule that comes before ours: all of them stay.
    home.suspended[0].whole = true;
    let by_rule = of_ipv4(&plan(&home));
    let mut all = of_ipv4(&whole);
    all.extend(expected);
    assert_eq!(by_rule.len(), all.len());
    let has_all = all.iter().all(|line| by_rule.contains(line));
    assert!(has_all, "{by_rule:#?}");
    let first = by_rule.iter().find(|line| line.contains(" rule "));
    assert!(first.unwrap().contains("fwmark 0x3000000"), "{first:?}");
}

#[test]
fn an_uplink_that_rests_beside_a_group_keeps_all_and_is_not_chosen() {
    let mut home = home();
    let without = plan(&home);
    home.suspended = vec![Suspended {
        ipv6: false,
        paths: vec![path(6, "203.0.113.1", &["203.0.113.9"])],
        why: String::new(),
        whole: true,
    }];
    let plan = plan(&home);
    assert_eq!(plan.marks, without.marks);
    assert!(plan.uplinks.contains(&(0x0600_0000, "u6".to_owned())));
    let lines = describe(&plan.routing, |i| format!("u{i}"));
    let others = describe(&without.routing, |i| format!("u{i}"));
    let mut more: Vec<&String> = lines.iter().filter(|l| !others.contains(l)).collect();
    more.sort();
    let six = TABLE_BASE + 6;
    let expected = [
        format!("ip route add default via 203.0.113.1 dev u6 table {six}"),
        format!("ip rule add priority 32765 from 203.0.113.9 lookup {six}"),
        format!(
            "ip rule add priority 32765 fwmark 0x6000000/0xff000000 uidrange 0-4294967294 lookup {six}"
        ),
    ];
    assert_eq!(more, expected.iter().collect::<Vec<_>>());
    assert_eq!(lines.len(), others.len() + expected.len());
}

#[test]
fn groups_whose_flows_only_move_need_nothing() {
    let mut home = home();
    home.groups.drain(..2);
    let planned = plan(&home);
    assert_eq!(planned, PlacementPlan::default());
}

#[test]
fn a_device_that_is_down_leads_nowhere_and_keeps_its_rules() {
    let mut home = home();
    let up = plan(&home);
    home.paths[1].up = false;
    let down = plan(&home);
    assert_eq!(down.routing.rules, up.routing.rules);
    let leads_nowhere = |plan: &PlacementPlan| {
        let routes = plan.routing.routes.iter();
        routes.map(|r| r.to == To::Unreachable).collect::<Vec<_>>()
    };
    assert_eq!(leads_nowhere(&up), [false; 4]);
    assert_eq!(leads_nowhere(&down), [false, true, false, false]);
}

#[test]
fn numbers_are_the_devices_own_and_differ() {
    let numbers = |devices: &[u32], largest| {
        let numbers = numbers(devices.iter().copied(), largest, &BTreeMap::new())?;
        anyhow::Ok(numbers.into_values().collect::<Vec<_>>())
    };
    assert_eq!(numbers(&[2, 3, 2], 255).unwrap(), [2, 3]);
    // 258 would be 3, which is taken; whoever is there does not depend on who else is, mostly.
    assert_eq!(numbers(&[3, 258, 300], 255).unwrap(), [3, 4, 45]);
    assert_eq!(numbers(&[258, 300], 255).unwrap(), [3, 45]);
    assert_eq!(numbers(&[255, 510], 255).unwrap(), [255, 1], "never 0");
    assert_eq!(numbers(&[1, 2, 3], 3).unwrap(), [1, 2, 3]);
    let error = numbers(&[1, 2, 3, 4], 3).unwrap_err().to_string();
    assert!(error.contains("mark_mask"), "{error}");
}

#[test]
fn a_device_keeps_its_number_whoever_comes_and_goes() {
    let numbers = |devices: &[u32], before: &[(u32, u32)]| {
        let before: BTreeMap<u32, u32> = before.iter().copied().collect();
        let numbers = numbers(devices.iter().copied(), 255, &before).unwrap();
        numbers.into_iter().collect::<Vec<_>>()
    };
    let both = numbers(&[3, 258], &[]);
    assert_eq!(both, [(3, 3), (258, 4)]);
    assert_eq!(numbers(&[258], &both), [(258, 4)], "the other one goes");
    let came_first = numbers(&[258], &[]);
    assert_eq!(came_first, [(258, 3)]);
    assert_eq!(numbers(&[3, 258], &came_first), [(3, 4), (258, 3)]);
    // Of a larger mask, or of two devices.
    assert_eq!(numbers(&[3], &[(3, 300)]), [(3, 3)]);
    assert_eq!(numbers(&[3, 4], &[(3, 7), (4, 7)]), [(3, 7), (4, 4)]);
    // What an earlier run has left in the kernel says it as well.
    let planned = plan(&home());
    assert_eq!(planned.numbers, BTreeMap::from([(2, 2), (3, 3)]));
    assert_eq!(planned.routing.numbers(), planned.numbers);
}

#[test]
fn masks_have_two_bits_or_more_in_a_row() {
    assert_eq!(mask().mark(7), 0x0700_0000);
    assert_eq!(MarkMask::try_from(0x30).unwrap().mark(3), 0x30);
    assert_eq!(MarkMask::try_from(u32::MAX).unwrap().mark(9), 9);
    for bad in [0, 1, 0x8000_0000, 0x5, 0xff0f] {
        let error = MarkMask::try_from(bad).unwrap_err();
        assert!(error.contains("next to each other"), "{error}");
    }
}

#[test]
fn only_what_differs_is_changed() {
    let wanted = plan(&home()).routing;
    let from_nothing = changes(&Routing::default(), &wanted);
    assert_eq!(from_nothing.add_rules, wanted.rules);
    assert_eq!(from_nothing.add_routes, wanted.routes);
    assert!(from_nothing.remove_rules.is_empty() && from_nothing.remove_routes.is_empty());
    assert!(changes(&wanted, &wanted).none());
    let to_nothing = changes(&wanted, &Routing::default());
    assert_eq!(to_nothing.remove_rules, wanted.rules);
    assert_eq!(to_nothing.remove_routes, wanted.routes);

    // Another lease: one address, gateway and source less, and one more.
    let mut home = home();
    home.paths[1] = path(3, "203.0.113.1", &["203.0.113.9"]);
    let renewed = plan(&home).routing;
    let change = changes(&wanted, &renewed);
    let from = |address: &str| Selects::From(ip(address));
    let selects = |rules: &[IpRule]| rules.iter().map(|r| r.selects).collect::<Vec<_>>();
    // The new address must stand before the marks.
    let marks = [2, 3].map(|n| Selects::Mark {
        mark: n << 24,
        mask: 0xff00_0000,
    });
    let expected = [from("198.51.100.7"), marks[0], marks[1]];
    assert_eq!(selects(&change.remove_rules), expected);
    let expected = [from("203.0.113.9"), marks[0], marks[1]];
    assert_eq!(selects(&change.add_rules), expected);
    assert_eq!(change.add_routes.len(), 1);
    assert_eq!(change.remove_routes, [], "replaced in place");

    // Another MTU.
    home.paths[1].options.metrics = vec![8, 0, 2, 0, 120, 5, 0, 0];
    let slower = plan(&home).routing;
    let change = changes(&renewed, &slower);
    assert_eq!(change.add_routes, [slower.routes[1].clone()]);
    assert!(change.add_rules.is_empty() && change.remove_routes.is_empty());
    let lines = describe(&slower, |i| format!("u{i}"));
    assert!(lines[1].ends_with("# and the metrics and realms of the main table's route"));

    // Another metric: the kernel keeps both until one is deleted.
    home.paths[1].options.metric = 50;
    let preferred = plan(&home).routing;
    let change = changes(&slower, &preferred);
    assert_eq!(change.add_routes, [preferred.routes[1].clone()]);
    assert_eq!(change.remove_routes, [slower.routes[1].clone()]);
    let lines = describe(&preferred, |i| format!("u{i}"));
    assert!(lines[1].contains(" metric 50 table "), "{}", lines[1]);
}

#[test]
fn the_last_rule_is_added_anew_where_a_table_of_ipv6_gets_its_default_route_back() {
    let wanted = plan(&home()).routing;
    for ipv6 in [false, true] {
        let is_it = |r: &UplinkRoute| {
            r.ipv6 == ipv6 && r.host.is_none() && matches!(r.to, To::Gateway { .. })
        };
        let mut without = wanted.clone();
        let at = without
            .routes
            .iter()
            .position(is_it)
            .expect("a default route");
        without.routes.remove(at);
        let change = changes(&without, &wanted);
        assert_eq!(change.add_routes.len(), 1);
        let last = wanted.rules.iter().rfind(|rule| rule.ipv6 == ipv6);
        let expected = Vec::from_iter(last.filter(|_| ipv6).copied());
        assert_eq!(change.add_rules, expected);
        assert_eq!(change.remove_rules, expected);
    }
}

#[test]
fn rules_that_do_not_begin_with_main_are_added_anew() {
    let wanted = plan(&home()).routing;
    let mut without = wanted.clone();
    without.rules.remove(0);
    let change = changes(&without, &wanted);
    let of_ipv4 = wanted.rules.iter().filter(|r| !r.ipv6).count();
    assert_eq!(change.remove_rules.len(), of_ipv4 - 1, "IPv6 is in order");
    assert_eq!(change.add_rules.len(), of_ipv4);
    assert_eq!(change.add_rules[0].selects, Selects::Specific);

    // An address behind the marks, as if it had come later.
    let mut late = wanted.clone();
    let address = late.rules.remove(1);
    late.rules.insert(of_ipv4 - 1, address);
    let change = changes(&late, &wanted);
    assert_eq!(change.remove_rules, wanted.rules[of_ipv4 - 2..of_ipv4]);
    assert_eq!(change.add_rules, change.remove_rules);

    let mut twice = wanted.clone();
    twice.rules.push(wanted.rules[1]);
    // The kernel removes the first of two, and the other one stands behind the marks.
    let change = changes(&twice, &wanted);
    let marks = &wanted.rules[of_ipv4 - 2..of_ipv4];
    assert_eq!(change.remove_rules, [marks, &[wanted.rules[1]]].concat());
    assert_eq!(change.add_rules, marks);
    let mut twice = wanted.clone();
    twice.rules.insert(2, wanted.rules[1]);
    let change = changes(&twice, &wanted);
    assert_eq!(change.remove_rules, [wanted.rules[1]]);
    assert!(change.add_rules.is_empty());
}

#[test]
fn a_rule_of_others_that_comes_later_goes_before_ours() {
    let wanted = plan(&home()).routing;
    let others = |ipv6, priority| FibRule {
        ipv6,
        priority,
        ..FibRule::default()
    };
    let mut found = Found::default();
    // There before ours, or of another priority, or of the other family, whose rules have another one.
    found.meet(Some(&others(false, 32765)));
    found.routing = wanted.clone();
    found.meet(Some(&others(false, 32764)));
    found.meet(Some(&others(false, 199)));
    found.meet(None);
    assert!(super::changes(&found, &wanted).none());
    found.meet(Some(&others(false, 32765)));
    let change = super::changes(&found, &wanted);
    let of_ipv4: Vec<IpRule> = wanted.rules.iter().filter(|r| !r.ipv6).copied().collect();
    assert_eq!(change.add_rules, of_ipv4, "in their order, behind it");
    assert_eq!(change.remove_rules, of_ipv4, "of two the first");
    assert!(change.add_routes.is_empty() && change.remove_routes.is_empty());
}
