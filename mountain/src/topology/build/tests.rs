// SPDX-License-Identifier: GPL-2.0-or-later
use super::*;
use crate::netlink::kinds::Lower;
use crate::netlink::link::Tunnel;
use crate::netlink::snapshot::Action;
use proptest::prelude::*;
use std::net::Ipv4Addr;

#[test]
fn heavy_weights_are_scaled_together() {
    assert_eq!(scaled_weight(256, 256), 256);
    assert_eq!(scaled_weight(3, 255), 3);
    assert_eq!(scaled_weight(1000, 1000), 256);
    assert_eq!(scaled_weight(500, 1000), 128);
    assert_eq!(scaled_weight(1, 1000), 1, "never without any traffic");
}

fn route(table: u32, prefix: &str, devices: &[u32]) -> Route {
    let hop = |ifindex: &u32| NextHop {
        ifindex: *ifindex,
        gateway: Some(Ipv4Addr::new(10, 0, 0, 2).into()),
        weight: 1,
        ..NextHop::default()
    };
    Route {
        table,
        prefix: prefix.parse().unwrap(),
        kind: RTN_UNICAST,
        multipath: devices.len() > 1,
        hops: devices.iter().map(hop).collect(),
        ..Route::default()
    }
}

fn look_up(priority: u32, table: u32) -> FibRule {
    FibRule {
        priority,
        action: Action::Table(table),
        ..FibRule::default()
    }
}

fn with_rules(rules: Vec<FibRule>) -> Snapshot {
    Snapshot {
        rules,
        ..Snapshot::default()
    }
}

#[test]
fn networks_behind_this_host_are_those_behind_ethernet() {
    let mut snapshot = Snapshot::default();
    for (ifindex, ethernet) in [(2, true), (3, true), (4, false)] {
        let link = Link {
            ethernet,
            ..Link::default()
        };
        snapshot.links.insert(ifindex, link);
    }
    let mut add = |prefix: &str, device: u32, by_router: bool| {
        let mut route = route(254, prefix, &[device]);
        route.hops[0].gateway = route.hops[0].gateway.filter(|_| by_router);
        snapshot.routes.push(route);
    };
    for n in 0..70 {
        add(&format!("10.0.{n}.0/24"), 4, true);
    }
    add("10.9.0.0/16", 3, true);
    add("192.168.1.7/32", 3, true);
    add("192.168.1.0/24", 3, false);
    add("172.16.5.0/24", 2, false);
    add("198.51.100.0/24", 3, false);
    let nets = inner_nets(&snapshot, &BTreeSet::from([2]));
    let nets: Vec<String> = nets.iter().map(|inner| inner.net.to_string()).collect();
    assert_eq!(nets, ["192.168.1.0/24", "10.9.0.0/16"], "on a link first");
}

#[test]
fn a_full_routing_table_takes_seconds_not_hours() {
    let mut snapshot = with_rules(vec![look_up(0, 255), look_up(10, 254)]);
    for ifindex in 2..5 {
        snapshot.links.insert(ifindex, Link::default());
    }
    for n in 0..30_000 {
        let prefix = format!("{}.{}.{}.0/24", 11 + n / 65536, n / 256 % 256, n % 256);
        // A third each: ours, ours with other members, not multipath.
        let devices: &[u32] = [&[2, 3][..], &[2, 4], &[3]][n % 3];
        snapshot.routes.push(route(254, &prefix, devices));
        snapshot
            .routes
            .push(route(255, &prefix.replace(".0/24", ".1/32"), &[1]));
    }
    // Of this thread: the machine may be busy with more than this test.
    let processor_time = || -> std::time::Duration {
        let clock = nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID;
        nix::time::clock_gettime(clock).unwrap().into()
    };
    let start = processor_time();
    let topology = build(&snapshot, &Filter::default());
    let elapsed = processor_time() - start;
    let sizes: Vec<_> = topology.groups.iter().map(|g| g.prefixes.len()).collect();
    assert_eq!(sizes, [10_000, 10_000]);
    let not_ours = topology.not_ours.len();
    assert_eq!(not_ours, 20_000, "local addresses inside them");
    assert!(elapsed.as_secs() < 20, "{elapsed:?}");

    let filter = Filter {
        routes: vec!["10.0.0.0/8".parse().unwrap()],
        ..Filter::default()
    };
    let nothing = build(&snapshot, &filter);
    assert_eq!(nothing.groups, []);
    assert_eq!(nothing.skipped.len(), MAX_REASONS + 1);
    assert_eq!(nothing.skipped[MAX_REASONS], "19800 more routes");
}

#[test]
fn a_prefix_with_a_route_for_some_sources_is_left_to_the_kernel() {
    for (prefix, groups) in [("2001:db8::/48", 0), ("::/0", 1)] {
        let rule = FibRule {
            ipv6: true,
            ..look_up(10, 254)
        };
        let mut snapshot = with_rules(vec![rule]);
        let links = [2, 3].map(|ifindex| (ifindex, Link::default()));
        snapshot.links.extend(links);
        snapshot.routes.push(route(254, prefix, &[2, 3]));
        let mut for_some = route(254, prefix, &[2]);
        for_some.source = "fd98::1/128".parse().ok();
        snapshot.routes.push(for_some);
        let topology = build(&snapshot, &Filter::default());
        assert_eq!(topology.groups.len(), groups, "{:?}", topology.skipped);
    }
}

#[test]
fn tunnels_that_name_an_uplink_keep_to_it() {
    let mut snapshot = with_rules(vec![look_up(10, 254)]);
    snapshot.routes.push(route(254, "10.1.0.0/16", &[2, 3]));
    snapshot.routes.push(route(254, "10.1.0.7/32", &[2, 3]));
    let mut add = |ifindex: u32, over: u32, remote: &str| {
        let tunnel = Tunnel {
            over,
            mark: if over == 0 { ifindex / 10 } else { 0 },
            local: Some(Ipv4Addr::new(10, 7, 0, ifindex as u8).into()),
            remote: remote.parse().ok(),
        };
        let link = Link {
            tunnel: Some(tunnel).filter(|tunnel| tunnel.over != 0 || tunnel.mark != 0),
            ..Link::default()
        };
        snapshot.links.insert(ifindex, link);
    };
    for (ifindex, over, remote) in [
        (2, 0, ""),
        (3, 0, ""),
        (4, 2, "10.1.0.4"),
        (5, 3, "any"),
        (6, 9, "10.1.0.6"),
        (7, 2, "10.1.0.7"),
        (8, 2, "10.2.0.8"),
        (11, 0, "10.1.0.11"),
        (12, 0, "any"),
    ] {
        add(ifindex, over, remote);
    }
    for (over, end) in [(2, "10.1.0.7"), (2, "10.1.0.9"), (9, "10.1.0.10")] {
        snapshot.tunnel_ends.insert((over, end.parse().unwrap()));
    }
    let filter = Filter {
        routes: vec!["10.1.0.0/16".parse().unwrap()],
        ..Filter::default()
    };
    let topology = build(&snapshot, &filter);
    let not_ours: Vec<String> = topology.not_ours.iter().map(IpNet::to_string).collect();
    assert_eq!(not_ours, ["10.1.0.4/32", "10.1.0.9/32", "10.1.0.11/32"]);
    let bound: [IpAddr; 3] = [5, 7, 12].map(|n| Ipv4Addr::new(10, 7, 0, n).into());
    let why = "to many ends, and to one that a multipath route is for";
    assert_eq!(topology.uplink_bound_sources, bound, "{why}");
}

#[test]
fn an_address_in_the_network_of_one_uplink_is_that_uplinks() {
    let mut snapshot = with_rules(vec![look_up(10, 254)]);
    let links = [1, 2, 3, 7].map(|ifindex| (ifindex, Link::default()));
    snapshot.links.extend(links);
    snapshot.routes.push(route(254, "0.0.0.0/0", &[2, 3]));
    for (ifindex, address) in [
        (2, "10.0.2.1/24"),
        (2, "10.0.9.1/24"),
        (3, "10.0.3.1/24"),
        (3, "10.0.9.2/24"),
        // As keepalived's on a macvlan.
        (7, "10.0.2.51/32"),
        (1, "10.0.3.52/32"),
        // Of both networks, and of none.
        (1, "10.0.9.53/32"),
        (1, "10.0.4.54/32"),
        (1, "fd00::2:55/128"),
    ] {
        let subnet: IpNet = address.parse().unwrap();
        snapshot.addresses.push(Address {
            ifindex,
            address: subnet.addr(),
            subnet: Some(subnet),
            global: true,
            second_choice: false,
            fresh: true,
        });
    }
    let topology = build(&snapshot, &Filter::default());
    let text = |sources: &[IpAddr]| sources.iter().map(IpAddr::to_string).collect::<Vec<_>>();
    assert_eq!(
        text(&topology.uplink_bound_sources),
        [
            "10.0.2.1",
            "10.0.2.51",
            "10.0.3.1",
            "10.0.3.52",
            "10.0.9.1",
            "10.0.9.2"
        ]
    );
    assert_eq!(
        text(&topology.own_sources),
        ["10.0.4.54", "10.0.9.53", "fd00::2:55"]
    );
}

#[test]
fn nothing_is_moved_to_an_ipvlan_whose_lower_device_is_a_path() {
    let mut snapshot = with_rules(vec![look_up(10, 254)]);
    let devices = [2, 3, 4, 5];
    for (ifindex, kind, lower) in [
        (2, None, Lower::None),
        (3, Some("ipvlan"), Lower::Here(2)),
        (4, Some("macvlan"), Lower::Here(2)),
        (5, Some("ipvlan"), Lower::Here(9)),
    ] {
        let link = Link {
            ethernet: true,
            kind: kind.map(str::to_owned),
            lower,
            ..Link::default()
        };
        snapshot.links.insert(ifindex, link);
    }
    snapshot.routes.push(route(254, "10.1.0.0/16", &devices));
    let topology = build(&snapshot, &Filter::default());
    let paths = topology.paths.iter();
    let redirected = paths.filter(|path| topology.can_redirect(path));
    let redirected: Vec<u32> = redirected.map(|path| path.key.ifindex).collect();
    assert_eq!(redirected, [2, 4, 5]);
}

#[test]
fn more_groups_than_fit_are_refused_without_leaving_paths_behind() {
    let mut snapshot = with_rules(vec![look_up(10, 254)]);
    let groups = MAX_GROUPS as u32 + 1;
    for n in 0..groups {
        snapshot.links.insert(2, Link::default());
        // The last group needs a new path.
        let device = if n + 1 < groups { 3 } else { 4 };
        snapshot.links.insert(device, Link::default());
        let mut route = route(254, &format!("10.{n}.0.0/16"), &[2, device]);
        route.hops[0].weight = n as u16 + 1;
        snapshot.routes.push(route);
    }
    let topology = build(&snapshot, &Filter::default());
    assert_eq!(topology.groups.len(), MAX_GROUPS);
    assert_eq!(topology.paths.len(), 2);
    assert_eq!(topology.skipped.len(), 1);
    testkit::assert_has(&topology.skipped[0], &["more than 64 groups"]);

    let mut snapshot = with_rules(vec![look_up(10, 254)]);
    for n in 0..=MAX_PATHS as u32 / 2 {
        let devices = [2 * n + 2, 2 * n + 3];
        snapshot
            .links
            .extend(devices.map(|device| (device, Link::default())));
        snapshot
            .routes
            .push(route(254, &format!("10.{n}.0.0/16"), &devices));
    }
    let topology = build(&snapshot, &Filter::default());
    assert_eq!(topology.paths.len(), MAX_PATHS);
    testkit::assert_has(&topology.skipped[0], &["more than 64 paths"]);
}

fn prefix() -> impl Strategy<Value = IpNet> {
    // Few bits and many lengths, so that prefixes nest and coincide.
    (0u32..16, 0u8..=8).prop_map(|(high, length)| {
        let net = IpNet::new(Ipv4Addr::from(high << 26).into(), length).unwrap();
        net.trunc()
    })
}

/// Whether the longest prefix that holds the address is one of the adopted.
fn ours(address: IpAddr, adopted: &BTreeMap<IpNet, u32>, others: &[IpNet]) -> bool {
    let longest = |prefixes: &mut dyn Iterator<Item = &IpNet>| {
        let holding = prefixes.filter(|prefix| prefix.contains(&address));
        holding.map(IpNet::prefix_len).max()
    };
    let adopted = longest(&mut adopted.keys());
    adopted > longest(&mut others.iter())
}

proptest! {
    #[test]
    fn leaving_out_what_is_covered_changes_no_decision(
        adopted in prop::collection::vec(prefix(), 1..6),
        others in prop::collection::btree_set(prefix(), 0..12),
    ) {
        let adopted: BTreeMap<_, _> = adopted.into_iter().map(|prefix| (prefix, 254)).collect();
        // As in `finish`: a prefix is a group's or not, never both.
        let others: BTreeSet<_> = others
            .into_iter()
            .filter(|other| !adopted.contains_key(other))
            .collect();
        let all: Vec<_> = others.iter().copied().collect();
        let kept = minimal(&others, &adopted);
        for high in 0u32..=255 {
            let address = IpAddr::from(Ipv4Addr::from(high << 24 | 1));
            prop_assert_eq!(
                ours(address, &adopted, &all),
                ours(address, &adopted, &kept),
                "{} with {:?}", address, kept
            );
        }
        for (i, prefix) in kept.iter().enumerate() {
            let mut without = kept.clone();
            without.remove(i);
            prop_assert!(others.contains(prefix));
            let covered = without.iter().any(|outer| {
                outer.contains(prefix)
                    && !adopted.keys().any(|a| outer.contains(a) && a.contains(prefix))
            });
            prop_assert!(!covered, "{} is redundant in {:?}", prefix, kept);
        }
    }
}
