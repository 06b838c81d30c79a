// SPDX-License-Identifier: GPL-2.0-or-later
//! What running flows stand on, where new ones choose among fewer uplinks or none.

use super::*;

/// What runs on the one that is left, or whole, keeps what it stands on; but not beside a VPN.
#[test]
fn an_uplink_that_is_gone_or_has_no_address_leaves_the_others_whole() {
    let kept_of = |snapshot: &Snapshot, placed: bool| {
        let chosen = || Some([2, 3].into());
        let placed = [chosen().filter(|_| placed), chosen()];
        let topology = build_on(snapshot, &filter(|f| f.adopt = true), &placed);
        let suspended = topology.suspended.iter();
        let kept = suspended.flat_map(|s| s.paths.iter().map(|p| (p.ifname.clone(), s.whole)));
        let groups = 0..topology.groups.len();
        let chosen = groups.map(|group| devices(&topology, group).join(" "));
        (kept.collect::<Vec<_>>(), chosen.collect::<Vec<_>>())
    };
    let lte = |whole| (vec![("lte".to_owned(), whole)], vec![]);
    let nothing = (vec![], vec![]);
    // New flows choose it alone: what begins now is to stay there.
    let chosen = (vec![], vec!["lte".to_owned()]);
    let without_route = |mut home: Snapshot| {
        home.routes.retain(|route| route.hops[0].ifindex != 2);
        home
    };
    let without_address = |mut home: Snapshot| {
        home.addresses.retain(|address| address.ifindex != 2);
        home
    };
    assert_eq!(kept_of(&without_route(home()), true), chosen);
    assert_eq!(kept_of(&without_route(home()), false), nothing);
    let beside_vpn = |metric| kept_of(&without_route(with_vpn("tun", metric)), true);
    assert_eq!(beside_vpn(50), lte(false));
    assert_eq!(beside_vpn(700), chosen);
    let mut policed = without_route(home());
    policed.policies.insert(Policy {
        to: "0.0.0.0/0".parse().unwrap(),
        device: None,
        marked: 0,
    });
    assert_eq!(kept_of(&policed, true), lte(true));

    assert_eq!(kept_of(&without_address(home()), true), lte(true));
    assert_eq!(kept_of(&without_address(home()), false), lte(false));
    for metric in [50, 100] {
        let tied = without_address(with_vpn("tun", metric));
        assert_eq!(kept_of(&tied, true), lte(false), "{metric}");
    }
}

/// As when the first router of three announces itself by two uplinks. What runs on the third goes on, and new flows go on
/// choosing from the others.
#[test]
fn an_uplink_behind_a_multipath_default_keeps_what_its_flows_stand_on() {
    let mut home = home();
    let third = Link {
        name: "dsl".into(),
        ..home.links[&2].clone()
    };
    home.links.insert(4, third);
    home.addresses.push(address(4, "203.0.113.9"));
    home.routes.push(default_by(4, "203.0.113.1", 700));
    let other = home.routes.remove(0).hops.remove(0);
    home.routes[0].hops.push(other);
    home.routes[0].multipath = true;
    let built = |home: &Snapshot, chosen: &[u32], adopt| {
        let placed = [Some(chosen.iter().copied().collect()), None];
        build_on(home, &filter(|f| f.adopt = adopt), &placed)
    };
    let kept = |topology: &Topology| {
        let whole = topology.suspended.iter().filter(|s| s.whole);
        let paths = whole.flat_map(|s| s.paths.iter().map(|path| path.ifname.clone()));
        paths.collect::<Vec<_>>()
    };
    for adopt in [true, false] {
        let topology = built(&home, &[2, 3, 4], adopt);
        assert_eq!(topology.groups[0].kind, Kind::PlaceAndMove);
        assert_eq!(devices(&topology, 0), ["fibre", "lte"]);
        assert_eq!(kept(&topology), ["dsl"]);
        assert_eq!(topology.left_to_kernel().count(), 0);
        testkit::assert_has(
            &topology.skipped[0],
            &["metric 700", "dsl comes after a multipath default route"],
        );
        // No flow has chosen it.
        let topology = built(&home, &[2, 3], adopt);
        assert_eq!(kept(&topology), [""; 0]);
        assert_eq!(topology.skipped.len(), usize::from(adopt));
    }
    let kept_with = |change: &dyn Fn(&mut Snapshot)| {
        let mut home = home.clone();
        change(&mut home);
        kept(&built(&home, &[2, 3, 4], true))
    };
    let policy = |to: &str, device| Policy {
        to: to.parse().unwrap(),
        device,
        marked: 0,
    };
    let by_tunnel = kept_with(&|home| home.links.get_mut(&2).unwrap().kind = Some("tun".into()));
    assert_eq!(by_tunnel, [""; 0]);
    let same_address = kept_with(&|home| home.addresses[2].address = ip("192.0.2.10"));
    assert_eq!(same_address, [""; 0]);
    let policed = kept_with(&|home| {
        home.policies.insert(policy("198.18.0.0/15", Some(4)));
    });
    assert_eq!(policed, [""; 0]);
    let all_policed = kept_with(&|home| {
        home.policies.insert(policy("0.0.0.0/0", None));
    });
    assert_eq!(all_policed, ["fibre", "lte", "dsl"]);
}

#[test]
fn single_destinations_by_the_gateway_of_an_uplink_are_kept() {
    let mut home = with_vpn("tun", 50);
    let host = |prefix: &str, ifindex| Route {
        prefix: prefix.parse().unwrap(),
        ..default_by(ifindex, "192.0.2.1", 0)
    };
    home.routes.push(host("203.0.113.5/32", 2)); // the VPN's server
    home.routes.push(host("203.0.113.0/24", 2));
    home.routes.push(host("203.0.113.6/32", 4)); // through the VPN
    let mut on_link = host("192.0.2.77/32", 2);
    on_link.hops[0].gateway = None;
    home.routes.push(on_link);
    let kept = adopted(&home).kept;
    let expected = Kept {
        host: ip("203.0.113.5"),
        ifindex: 2,
    };
    assert_eq!(kept, [expected]);
}
