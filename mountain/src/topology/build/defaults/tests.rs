// SPDX-License-Identifier: GPL-2.0-or-later
mod kept;

use std::net::IpAddr;

use super::super::{build, build_on};
use super::*;
use crate::netlink::kinds::Lower;
use crate::netlink::link::Address;
use crate::netlink::snapshot::{Action, FibRule, Snapshot};
use crate::netlink::xfrm::Policy;
use crate::topology::{Kept, Topology};

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn default_by(ifindex: u32, gateway: &str, metric: u32) -> Route {
    Route {
        table: TABLE_MAIN,
        prefix: match ip(gateway) {
            IpAddr::V4(_) => "0.0.0.0/0".parse().unwrap(),
            IpAddr::V6(_) => "::/0".parse().unwrap(),
        },
        metric,
        kind: RTN_UNICAST,
        hops: vec![NextHop {
            ifindex,
            gateway: Some(ip(gateway)),
            weight: 1,
            ..NextHop::default()
        }],
        ..Route::default()
    }
}

fn address(ifindex: u32, text: &str) -> Address {
    Address {
        ifindex,
        address: ip(text),
        subnet: None,
        global: !text.starts_with("fe80"),
        second_choice: false,
        fresh: true,
    }
}

/// Fibre (2) and 5G (3), IPv4, with default routes of metric 100 and 600.
fn home() -> Snapshot {
    let link = |name: &str| Link {
        name: name.into(),
        up: true,
        mtu: 1500,
        ethernet: true,
        ..Link::default()
    };
    Snapshot {
        links: [(2, link("fibre")), (3, link("lte"))].into(),
        addresses: vec![address(2, "192.0.2.10"), address(3, "198.51.100.7")],
        routes: vec![
            default_by(3, "198.51.100.1", 600),
            default_by(2, "192.0.2.1", 100),
        ],
        rules: vec![FibRule {
            priority: 32766,
            action: Action::Table(TABLE_MAIN),
            ..FibRule::default()
        }],
        ..Snapshot::default()
    }
}

fn filter(change: impl FnOnce(&mut Filter)) -> Filter {
    let mut filter = Filter::default();
    change(&mut filter);
    filter
}

fn adopted(snapshot: &Snapshot) -> Topology {
    build(snapshot, &filter(|f| f.adopt = true))
}

fn devices(topology: &Topology, group: usize) -> Vec<&str> {
    let members = topology.groups[group].members.iter();
    members.map(|m| &*topology.paths[m.path].ifname).collect()
}

#[test]
fn routes_that_differ_in_metric_are_a_group_when_asked_for() {
    let mut home = home();
    home.routes[1].preferred_source = Some(ip("192.0.2.10"));
    home.routes[1].metrics = vec![8, 0, 2, 0, 120, 5, 0, 0];
    home.routes[0].hops[0].realms = Some(7);
    let topology = adopted(&home);
    assert_eq!(topology.groups.len(), 1, "{:?}", topology.skipped);
    assert_eq!(topology.groups[0].kind, Kind::Place);
    let both = devices(&topology, 0);
    assert_eq!(both, ["fibre", "lte"], "the preferred first");
    assert!(topology.groups[0].members.iter().all(|m| m.weight == 1));
    assert_eq!(topology.metrics, [100], "the lowest");
    assert_eq!(topology.paths[0].preferred_source, Some(ip("192.0.2.10")));
    assert_eq!(topology.paths[1].preferred_source, None);
    assert_eq!(topology.paths[0].options.metrics, home.routes[1].metrics);
    assert_eq!(topology.paths[0].options.realms, None);
    assert!(topology.paths[1].options.metrics.is_empty());
    assert_eq!(topology.paths[1].options.realms, Some(7));
    assert_eq!(topology.paths[1].addresses, [ip("198.51.100.7")]);
    assert_eq!(topology.rule_priorities, [32765, 32765]);
    assert_eq!(topology.skipped, Vec::<String>::new());

    let not = build(&home, &Filter::default());
    assert_eq!(not.groups, []);
    let hint =
        "0.0.0.0/0 metric 100: default routes by fibre (metric 100), lte (metric 600) differ \
        only in metric: `mountain up --adopt` lets new flows choose";
    assert_eq!(not.skipped, [hint]);
}

#[test]
fn an_uplink_without_an_address_is_left_out_of_three() {
    let mut home = home();
    let third = home.links[&3].clone();
    home.links.insert(4, third);
    home.routes.push(default_by(4, "203.0.113.1", 700));
    let two = adopted(&home);
    assert_eq!(devices(&two, 0), ["fibre", "lte"]);
    testkit::assert_has(
        &two.skipped[0],
        &["metric 700", "has no address of its own"],
    );
    home.addresses.push(address(4, "203.0.113.9"));
    assert_eq!(adopted(&home).paths.len(), 3);
}

#[test]
fn connections_come_in_by_ports_of_bridges_and_by_what_is_no_uplink() {
    let mut home = home();
    let mut add = |ifindex, master, bridge: bool| {
        let link = Link {
            master,
            kind: bridge.then(|| "bridge".to_owned()),
            ..home.links[&2].clone()
        };
        home.links.insert(ifindex, link);
    };
    add(4, None, false); // an inner network
    add(5, None, true); // a bridge
    add(6, Some(5), false); // its port
    add(7, None, false); // a bond
    add(8, Some(7), false); // its port
    add(9, Some(3), false); // a port of the uplink
    add(10, None, false); // a macvlan on the bridge, and a VLAN on that
    add(11, None, false);
    for (ifindex, lower) in [(10, 5), (11, 10)] {
        home.links.get_mut(&ifindex).unwrap().lower = Lower::Here(lower);
    }
    home.links.get_mut(&3).unwrap().kind = Some("bridge".to_owned());
    for (ifindex, link) in &mut home.links {
        link.address = vec![2, 0, 0, 0, 0, *ifindex as u8];
    }
    let topology = adopted(&home);
    let mut inner = topology.inner_devices;
    inner.sort_unstable();
    assert_eq!(inner, [4, 6, 7, 10, 11]);
    // A frame for any of these is this host's.
    let bridges: Vec<u8> = topology
        .inner_bridges
        .iter()
        .map(|address| address[5])
        .collect();
    assert_eq!(bridges, [5, 10, 11]);
}

#[test]
fn a_default_route_by_a_point_to_point_device_leads_to_its_far_end() {
    // As pppd makes it.
    let mut home = home();
    home.routes[0].hops[0].gateway = None;
    let link = home.links.get_mut(&3).unwrap();
    (link.ethernet, link.kind, link.pppoe) = (false, Some("ppp".into()), Some("fibre".into()));
    let of = |home: &Snapshot| {
        let topology = adopted(home);
        let paths = topology.paths.iter();
        let gateway = paths.map(|path| path.key.gateway).nth(1).flatten();
        (gateway, topology.skipped.join("\n"))
    };
    let (gateway, said) = of(&home);
    assert_eq!(gateway, None);
    assert!(
        said.contains("lte has no gateway to measure (give"),
        "{said}"
    );

    home.addresses[1].subnet = Some("198.51.100.1/32".parse().unwrap());
    let (gateway, said) = of(&home);
    assert_eq!((gateway, &*said), (Some(ip("198.51.100.1")), ""));
    // Nobody tells what is behind its own address alone, or somewhere in its subnet.
    for own in ["198.51.100.7/32", "198.51.100.0/24"] {
        let mut home = home.clone();
        home.addresses[1].subnet = Some(own.parse().unwrap());
        assert_eq!(of(&home).0, None, "{own}");
    }
    // A peer on Ethernet is no gateway to all else.
    let mut wired = home.clone();
    let link = wired.links.get_mut(&3).unwrap();
    (link.ethernet, link.kind) = (true, None);
    assert!(of(&wired).1.contains("lte has no gateway to measure;"));
    // As a VPN client adds it to its server.
    let server = Route {
        prefix: "203.0.113.5/32".parse().unwrap(),
        ..home.routes[0].clone()
    };
    let connected = Route {
        prefix: "198.51.100.1/32".parse().unwrap(),
        ..home.routes[0].clone()
    };
    let learned = Route {
        prefix: "203.0.113.6/32".parse().unwrap(),
        dynamic: true,
        ..home.routes[0].clone()
    };
    home.routes.extend([server, connected, learned]);
    let kept: Vec<IpAddr> = adopted(&home).kept.iter().map(|kept| kept.host).collect();
    assert_eq!(kept, [ip("203.0.113.5")]);
    home.routes.truncate(2);
    // Of several next hops, too.
    let ppp = home.routes.remove(0).hops.remove(0);
    home.routes[0].hops.push(ppp);
    home.routes[0].multipath = true;
    home.routes[0].metrics = vec![8, 0, 2, 0, 120, 5, 0, 0];
    let topology = adopted(&home);
    assert_eq!(topology.groups[0].kind, Kind::PlaceAndMove);
    assert_eq!(devices(&topology, 0), ["fibre", "lte"]);
    let lte = &topology.paths[1];
    assert_eq!(lte.key.gateway, Some(ip("198.51.100.1")));
    assert_eq!(lte.options.metrics, home.routes[0].metrics);
}

#[test]
fn ipsec_policies_leave_what_they_are_about_to_the_kernel() {
    let with = |to: &str, device| {
        let mut home = home();
        let to = to.parse().unwrap();
        let marked = 0;
        home.policies.insert(Policy { to, device, marked });
        home
    };
    let net = "203.0.113.0/24";
    let some = adopted(&with(net, None));
    assert_eq!(devices(&some, 0), ["fibre", "lte"]);
    assert_eq!(some.not_ours, [net.parse().unwrap()]);
    for (to, device, about, whole) in [
        ("0.0.0.0/0", None, "about all destinations", true),
        (net, Some(3), "for lte alone", false),
    ] {
        let mut home = with(to, device);
        let topology = adopted(&home);
        let assert_rests = |topology: &Topology| {
            let rests = &topology.suspended[0];
            assert!(rests.why.contains(about), "{}", rests.why);
            assert_eq!((rests.whole, rests.paths.len()), (whole, 2));
        };
        assert_eq!(topology.groups, []);
        assert_rests(&topology);
        // Of several next hops running flows move all the same, as far as the firewall's follower allows it.
        let other = home.routes.remove(0).hops.remove(0);
        home.routes[0].hops.push(other);
        home.routes[0].multipath = true;
        let topology = adopted(&home);
        assert_eq!(topology.groups[0].kind, Kind::Move);
        assert_eq!(topology.not_ours, []);
        assert_rests(&topology);
    }
    // As of a VTI device: packets without that mark never meet it.
    let mut vti = home();
    let (to, device, marked) = ("0.0.0.0/0".parse().unwrap(), None, 42);
    vti.policies.insert(Policy { to, device, marked });
    let with_marks = filter(|f| (f.adopt, f.mark_mask) = (true, 0xff00_0000));
    assert_eq!(devices(&build(&vti, &with_marks), 0), ["fibre", "lte"]);
    // By the bits that placed flows bear, it may be about them.
    let marked = 0x0200_0000;
    vti.policies.insert(Policy { to, device, marked });
    assert_eq!(build(&vti, &with_marks).groups, []);
    for (to, device) in [("::/0", None), (net, Some(9))] {
        let topology = adopted(&with(to, device));
        assert_eq!(devices(&topology, 0), ["fibre", "lte"], "{to} {device:?}");
    }
}

#[test]
fn what_cannot_be_told_apart_is_not_adopted() {
    let refused = |why: &str, change: &dyn Fn(&mut Snapshot)| {
        let mut home = home();
        change(&mut home);
        let topology = adopted(&home);
        assert_eq!(topology.groups, [], "{why}");
        let said = topology.skipped.join("\n");
        assert!(said.contains(why), "{said:?} does not say {why:?}");
    };
    refused("fibre and lte have the same address 192.0.2.10", &|home| {
        home.addresses[1].address = ip("192.0.2.10");
    });
    refused("lte has no address of its own", &|home| {
        home.addresses.pop();
    });
    refused(
        "lte has no gateway to measure; fewer than two uplinks",
        &|home| {
            home.routes[0].hops[0].gateway = None;
        },
    );
    refused("fewer than two uplinks", &|home| {
        home.routes[0].hops[0].ifindex = 2;
    });
    let throw = Route {
        prefix: "198.51.100.0/24".parse().unwrap(),
        kind: RTN_THROW,
        hops: Vec::new(),
        ..default_by(2, "192.0.2.1", 0)
    };
    refused("throw route to 198.51.100.0/24", &|home| {
        home.routes.push(throw.clone());
    });
    // One subnet on both, with different addresses, is fine: the device tells them apart.
    let mut home = home();
    home.addresses[1].address = ip("192.0.2.11");
    home.routes[0].hops[0].gateway = Some(ip("192.0.2.1"));
    assert_eq!(adopted(&home).groups.len(), 1);
    // One default route only, as before the second uplink has its lease, is none to speak of.
    home.routes.pop();
    let waiting = adopted(&home);
    assert_eq!((waiting.groups.len(), waiting.skipped.len()), (0, 0));
}

/// The same with a VPN's device (4) of that link kind and its default route.
fn with_vpn(kind: &str, metric: u32) -> Snapshot {
    let mut home = home();
    let tunnel = Link {
        name: "vpn".into(),
        kind: Some(kind.into()),
        ..home.links[&2].clone()
    };
    home.links.insert(4, tunnel);
    home.addresses.push(address(4, "10.8.0.2"));
    home.routes.push(default_by(4, "10.8.0.1", metric));
    home
}

fn suspended(snapshot: &Snapshot) -> (Vec<String>, String) {
    let topology = adopted(snapshot);
    assert_eq!(topology.groups, [], "{:?}", topology.skipped);
    let [suspended] = &topology.suspended[..] else {
        panic!("{:?}", topology.suspended)
    };
    assert!(!suspended.whole);
    let paths = suspended.paths.iter().map(|path| path.ifname.clone());
    (paths.collect(), suspended.why.clone())
}

#[test]
fn a_better_default_route_by_a_tunnel_suspends_all() {
    let (paths, why) = suspended(&with_vpn("tun", 50));
    assert_eq!(paths, ["fibre", "lte"]);
    let expected =
        "the kernel prefers the default route by vpn (metric 50), and vpn counts as a tunnel \
        (tun): new flows are left to it";
    assert_eq!(why, expected);
    // Without a gateway, and where it ties with the best.
    let mut bare = with_vpn("wireguard", 50);
    bare.routes[2].hops[0].gateway = None;
    suspended(&bare);
    suspended(&with_vpn("ppp", 100));
    // A worse one is none of the uplinks.
    let worse = adopted(&with_vpn("tun", 101));
    assert_eq!(devices(&worse, 0), ["fibre", "lte"]);
    assert_eq!(worse.suspended, []);
    // Named in the configuration it is one.
    let filter = filter(|f| (f.adopt, f.named) = (true, vec!["vpn".into()]));
    let named = build(&with_vpn("tun", 50), &filter);
    assert_eq!(devices(&named, 0), ["vpn", "fibre", "lte"]);
    // Who did not ask for it is told nothing.
    let unasked = build(&with_vpn("tun", 50), &Filter::default());
    assert_eq!((unasked.skipped.len(), unasked.suspended.len()), (0, 0));
}

/// A VPN in a namespace or a container, to which a veth leads, or a bridge with such ports.
#[test]
fn what_leads_to_a_namespace_is_no_uplink_beside_a_wire() {
    let (paths, why) = suspended(&with_vpn("veth", 50));
    assert_eq!(paths, ["fibre", "lte"]);
    let leads = "vpn leads to another network namespace, where a VPN may be";
    assert!(why.contains(leads), "{why}");
    let mut bridged = with_vpn("bridge", 50);
    bridged.routes.retain(|route| route.hops[0].ifindex != 2);
    let port = Link {
        name: "port".into(),
        kind: Some("veth".into()),
        master: Some(4),
        ..home().links[&2].clone()
    };
    bridged.links.insert(5, port);
    bridged.links.get_mut(&3).unwrap().kind = Some("veth".into());
    let found = adopted(&bridged);
    assert_eq!(devices(&found, 0), ["vpn", "lte"], "a container");
    // The host's own wire may have a default route of the other family only.
    bridged.routes.push(default_by(2, "fe80::1", 1024));
    let found = adopted(&bridged);
    assert_eq!(found.groups, []);
    assert!(found.unlearned, "{:?}", found.skipped);
    assert!(
        found
            .skipped
            .iter()
            .any(|why| why.contains("has not met the gateway")),
        "{:?}",
        found.skipped
    );
    let hops = bridged.routes.iter().flat_map(|route| &route.hops);
    let gateway = hops.clone().find(|hop| hop.ifindex == 4).unwrap().gateway;
    let mac = [2, 0, 0, 0, 0, 9];
    bridged.neighbours.insert((4, gateway.unwrap()), mac);
    bridged.bridged.insert((4, mac), 5);
    let found = adopted(&bridged);
    assert!(!found.unlearned, "{:?}", found.skipped);
    assert!(
        !found
            .skipped
            .iter()
            .any(|why| why.contains("has not met the gateway")),
        "{:?}",
        found.skipped
    );

    // Behind the uplinks it is none of them.
    let worse = adopted(&with_vpn("veth", 700));
    assert_eq!(devices(&worse, 0), ["fibre", "lte"]);
    // Named in the configuration it is one, and what is named is a wire to the others.
    let named = |names: &[&str]| {
        let filter = Filter {
            adopt: true,
            named: names.iter().map(|name| (*name).to_owned()).collect(),
            ..Filter::default()
        };
        build(&with_vpn("veth", 50), &filter)
    };
    assert_eq!(devices(&named(&["vpn"]), 0), ["vpn", "fibre", "lte"]);
    assert_eq!(named(&["fibre", "lte"]).groups, []);
    // In a container all are veths.
    let mut container = home();
    for link in container.links.values_mut() {
        link.kind = Some("veth".into());
    }
    assert_eq!(devices(&adopted(&container), 0), ["fibre", "lte"]);
}

#[test]
fn of_equal_metrics_the_router_preference_decides() {
    let home = |preference| {
        let mut home = with_vpn("tun", 1024);
        home.routes.clear();
        for (ifindex, gateway, by) in [
            (2, "fe80::1", Preference::Medium),
            (3, "fe80::2", Preference::Medium),
            (4, "fe80::3", preference),
        ] {
            home.addresses
                .push(address(ifindex, &format!("2001:db8:{ifindex}::5")));
            home.routes.push(Route {
                preference: by,
                ..default_by(ifindex, gateway, 1024)
            });
        }
        home.rules[0].ipv6 = true;
        home
    };
    suspended(&home(Preference::High));
    suspended(&home(Preference::Medium));
    let low = adopted(&home(Preference::Low));
    assert_eq!(devices(&low, 0), ["fibre", "lte"]);
}

#[test]
fn a_kill_switch_or_a_default_for_some_packets_suspends_all() {
    let mut home = with_vpn("tun", 700);
    home.routes[2].kind = 7; // RTN_UNREACHABLE
    assert_eq!(adopted(&home).groups.len(), 1, "behind the uplinks");
    home.routes[2].metric = 50;
    let (_, why) = suspended(&home);
    testkit::assert_has(&why, &["default route that drops (metric 50)"]);

    let mut home = with_vpn("tun", 50);
    home.routes[2].source = Some("192.0.2.0/24".parse().unwrap());
    let (_, why) = suspended(&home);
    assert!(why.contains("packets from 192.0.2.0/24"), "{why}");
    home.routes[2].hops[0].ifindex = 3;
    assert_eq!(adopted(&home).groups.len(), 1, "by an uplink");
    home.routes[2].tos = 0x10;
    home.routes[2].source = None;
    suspended(&home);
}

#[test]
fn rules_that_take_unmarked_packets_suspend_and_those_that_read_our_marks_forbid() {
    let with_rule = |rule: FibRule, metric| {
        let mut home = with_vpn("tun", metric);
        home.routes[2].table = 51820;
        home.rules.insert(0, rule);
        home
    };
    let wg_quick = FibRule {
        priority: 32764,
        action: Action::Table(51820),
        fwmark: Some((51820, u32::MAX)),
        invert: true,
        ..FibRule::default()
    };
    let topology = adopted(&with_rule(wg_quick.clone(), 0));
    assert_eq!(topology.groups, []);
    let suspended = &topology.suspended[0];
    assert!(suspended.whole, "what still meets ours is the VPN's own");
    assert!(suspended.why.contains("rule of priority 32764"));
    let network = |r: &mut FibRule| {
        (r.src, r.invert, r.fwmark) = (Some("10.0.0.0/8".parse().unwrap()), false, None);
    };
    let harmless: [fn(&mut FibRule); 5] = [
        // Of one user, of one network, of marked packets; and with nothing behind it.
        |r| r.uid = Some((1000, 1000)),
        network,
        |r| r.invert = false,
        |r| r.action = Action::Table(7),
        |r| r.suppress_length = Some(0),
    ];
    for change in harmless {
        let mut rule = wg_quick.clone();
        change(&mut rule);
        let topology = adopted(&with_rule(rule.clone(), 0));
        assert_eq!(topology.groups.len(), 1, "{rule:?}: {:?}", topology.skipped);
    }
    let drops = FibRule {
        action: Action::Drop,
        ..wg_quick.clone()
    };
    assert_eq!(adopted(&with_rule(drops, 0)).suspended.len(), 1);

    let filter = filter(|f| (f.adopt, f.mark_mask) = (true, 0xff00_0000));
    for (mark, theirs, forbids) in [
        (0, u32::MAX, true), // the unmarked ones only
        (0x0200_0000, 0xff00_0000, true),
        (51820, u32::MAX, false),
        (1, 0xff, false),
    ] {
        let rule = FibRule {
            fwmark: Some((mark, theirs)),
            invert: false,
            action: Action::Table(7),
            ..wg_quick.clone()
        };
        let topology = build(&with_rule(rule, 0), &filter);
        assert_eq!(topology.groups.is_empty(), forbids, "{mark:#x}/{theirs:#x}");
        assert_eq!(topology.suspended, []);
        if forbids {
            assert!(topology.skipped[0].contains("mark_mask"));
        }
    }
}

#[test]
fn families_are_adopted_apart_and_router_advertisements_may_share_a_metric() {
    let mut home = home();
    home.routes.push(default_by(2, "fe80::1", 1024));
    home.routes.push(default_by(3, "fe80::2", 1024));
    for (ifindex, text) in [(2, "2001:db8:1::5"), (3, "2001:db8:2::5"), (2, "fe80::5")] {
        home.addresses.push(address(ifindex, text));
    }
    home.rules.push(FibRule {
        ipv6: true,
        priority: 32766,
        action: Action::Table(TABLE_MAIN),
        ..FibRule::default()
    });
    let topology = adopted(&home);
    assert_eq!(topology.groups.len(), 2, "{:?}", topology.skipped);
    assert_eq!(devices(&topology, 1), ["fibre", "lte"]);
    let six = topology.groups[1].members[0].path;
    assert_eq!(topology.paths[six].addresses, [ip("2001:db8:1::5")]);
}

#[test]
fn an_uplink_whose_only_address_is_going_keeps_it_but_is_not_fresh() {
    let mut home = home();
    home.addresses[1].fresh = false;
    let fresh = |home: &Snapshot| {
        let paths = adopted(home).paths;
        let fresh = paths
            .iter()
            .map(|p| (p.addresses.len(), !p.fresh.is_empty()));
        fresh.collect::<Vec<_>>()
    };
    assert_eq!(fresh(&home), [(1, true), (1, false)]);
    home.addresses.push(address(3, "198.51.100.8"));
    assert_eq!(fresh(&home), [(1, true), (2, true)]);
}

/// A multipath default, with sources of the uplinks or one for all.
#[test]
fn a_multipath_default_chooses_at_the_start_where_sources_differ() {
    let mut home = home();
    let hop = home.routes.remove(0).hops.remove(0);
    home.routes[0].hops.push(hop);
    home.routes[0].multipath = true;
    home.routes[0].metrics = vec![8, 0, 2, 0, 120, 5, 0, 0];
    home.routes[0].hops[1].realms = Some(7);
    let topology = build(&home, &Filter::default());
    assert_eq!(topology.groups[0].kind, Kind::PlaceAndMove);
    for (path, realms) in topology.paths.iter().zip([None, Some(7)]) {
        assert_eq!(path.options.metrics, home.routes[0].metrics);
        assert_eq!(path.options.realms, realms);
    }
    assert!(topology.places());

    // As Shorewall has it.
    let mut elsewhere = home.clone();
    elsewhere.routes[0].table = 250;
    let main = (elsewhere.rules.iter()).position(|rule| rule.action == Action::Table(TABLE_MAIN));
    let rule = FibRule {
        priority: 32765,
        action: Action::Table(250),
        ..FibRule::default()
    };
    elsewhere.rules.insert(main.unwrap() + 1, rule);
    let topology = build(&elsewhere, &Filter::default());
    assert_eq!(topology.groups[0].kind, Kind::Move);
    let said = topology.skipped.last().unwrap();
    assert!(
        said.ends_with("new flows choose no uplink: it is not in the main table"),
        "{said}"
    );

    // A rule for unmarked packets would no longer match those that bear our mark.
    let mut by_mark = home.clone();
    let of_unmarked = FibRule {
        priority: 100,
        action: Action::Table(7),
        fwmark: Some((0, u32::MAX)),
        ..FibRule::default()
    };
    by_mark.rules.insert(0, of_unmarked);
    let filter = filter(|f| f.mark_mask = 0xff00_0000);
    let topology = build(&by_mark, &filter);
    assert_eq!(topology.groups[0].kind, Kind::Move);
    assert!(topology.skipped[0]
        .contains("new flows choose no uplink: the routing rule of priority 100"));

    home.routes[0].preferred_source = Some(ip("203.0.113.1"));
    let topology = build(&home, &Filter::default());
    assert_eq!(topology.groups[0].kind, Kind::Move);
    assert!(!topology.places());

    home.routes[0].preferred_source = None;
    home.routes[0].prefix = "10.0.0.0/8".parse().unwrap();
    let topology = build(&home, &Filter::default());
    assert_eq!(topology.groups[0].kind, Kind::Move, "not a default route");
}
