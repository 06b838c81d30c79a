// SPDX-License-Identifier: GPL-2.0-or-later
use libc::RTN_UNICAST;

use super::*;
use crate::netlink::kinds::{wire, Wire};
use crate::netlink::nexthop::NextHop;
use crate::netlink::snapshot::Route;
use crate::topology::{Group, Kind, Member, Suspended};

const BRIDGE: u32 = 2;
const UPLINK: u32 = 3;
const GUEST: u32 = 4;
const MAC: Mac = [2, 0, 0, 0, 0, 1];
const OTHER_MAC: Mac = [2, 0, 0, 0, 0, 2];

fn gateway() -> IpAddr {
    "192.0.2.1".parse().unwrap()
}

/// A default route by a bridge with a wire and a guest's port. `met`: the gateway's address, and its port.
fn host(met: Option<(Mac, Option<u32>)>) -> Snapshot {
    let link = |ifindex, kind: Option<&str>, master| {
        let link = Link {
            ifindex,
            kind: kind.map(str::to_owned),
            master,
            ethernet: true,
            ..Link::default()
        };
        (ifindex, link)
    };
    let hop = NextHop {
        ifindex: BRIDGE,
        gateway: Some(gateway()),
        weight: 1,
        ..NextHop::default()
    };
    let route = Route {
        table: TABLE_MAIN,
        metric: 100,
        kind: RTN_UNICAST,
        hops: vec![hop],
        ..Route::default()
    };
    let neighbours = met.map(|(mac, _)| ((BRIDGE, gateway()), mac));
    let bridged = met.and_then(|(mac, port)| Some(((BRIDGE, mac), port?)));
    Snapshot {
        links: [
            link(BRIDGE, Some("bridge"), None),
            link(UPLINK, None, Some(BRIDGE)),
            link(GUEST, Some("tun"), Some(BRIDGE)),
        ]
        .into(),
        neighbours: neighbours.into_iter().collect(),
        bridged: bridged.into_iter().collect(),
        routes: vec![route],
        ..Snapshot::default()
    }
}

fn is_wire(memory: &mut Memory, mut host: Snapshot) -> bool {
    memory.complete(&mut host);
    wire(&host, BRIDGE, Some(gateway())) == Ok(Wire::Own)
}

#[test]
fn a_gateway_is_where_it_was_met_last_until_something_newer_is_known() {
    let mut memory = Memory::default();
    assert!(!is_wire(&mut memory, host(None)), "it was never met");
    assert!(is_wire(&mut memory, host(Some((MAC, Some(UPLINK))))));
    // The cable is out: the bridge forgets the port. Then the kernel forgets the address.
    assert!(is_wire(&mut memory, host(Some((MAC, None)))));
    assert!(is_wire(&mut memory, host(None)));
    let mut flushed = host(None);
    flushed.routes.clear();
    memory.complete(&mut flushed);
    assert!(is_wire(&mut memory, host(None)), "the route was away");

    // Another router, nobody knows where; and then it is a guest.
    assert!(!is_wire(&mut memory, host(Some((OTHER_MAC, None)))));
    assert!(!is_wire(&mut memory, host(None)));
    assert!(is_wire(&mut memory, host(Some((MAC, Some(UPLINK))))));
    assert!(!is_wire(&mut memory, host(Some((MAC, Some(GUEST))))));
    assert!(!is_wire(&mut memory, host(None)));
}

#[test]
fn a_port_that_has_left_the_bridge_is_forgotten() {
    let mut memory = Memory::default();
    assert!(is_wire(&mut memory, host(Some((MAC, Some(UPLINK))))));
    let mut without = host(None);
    without.links.get_mut(&UPLINK).unwrap().master = None;
    assert!(!is_wire(&mut memory, without));
    assert!(!is_wire(&mut memory, host(None)));

    assert!(is_wire(&mut memory, host(Some((MAC, Some(UPLINK))))));
    memory.complete(&mut Snapshot::default());
    assert!(!is_wire(&mut memory, host(None)), "there was no bridge");
}

#[test]
fn what_is_remembered_does_not_grow_without_end() {
    let mut memory = Memory::default();
    for n in 0..2 * GATEWAYS_MAX as u32 {
        let mut host = host(Some((MAC, Some(UPLINK))));
        let other = IpAddr::from((0xc000_0300 + n).to_be_bytes());
        host.routes[0].hops[0].gateway = Some(other);
        host.neighbours.insert((BRIDGE, other), OTHER_MAC);
        memory.complete(&mut host);
    }
    assert!(memory.macs.len() <= GATEWAYS_MAX);
}

#[test]
fn that_flows_chose_is_remembered_as_long_as_an_uplink_is_left() {
    let resting = || Topology {
        suspended: vec![Suspended {
            ipv6: false,
            paths: vec![Path::plain(2, "192.0.2.1"), Path::plain(3, "192.0.2.1")],
            why: String::new(),
            whole: false,
        }],
        ..Topology::default()
    };
    let group = Group {
        kind: Kind::Place,
        table: TABLE_MAIN,
        prefixes: vec!["0.0.0.0/0".parse().unwrap()],
        members: vec![Member { path: 0, weight: 1 }],
        preferred: None,
        told_by: BTreeSet::new(),
    };
    let placing = Topology {
        paths: vec![Path::plain(2, "192.0.2.1")],
        groups: vec![group],
        ..Topology::default()
    };
    let mut memory = Memory::default();
    let chosen = || Some(BTreeSet::from([2]));
    for (topology, placed) in [
        (resting(), None),
        (placing, chosen()),
        // The other one was never chosen.
        (resting(), chosen()),
        (Topology::default(), None),
        (resting(), None),
    ] {
        memory.adopted(&topology);
        assert_eq!(memory.placed, [placed, None]);
    }
}
