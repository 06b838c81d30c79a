// SPDX-License-Identifier: GPL-2.0-or-later
//! What the addresses of devices say of paths, and which devices are those of the networks behind this host.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use libc::RTN_UNICAST;

use crate::netlink::kinds::Lower;
use crate::netlink::link::{Address, Link};
use crate::netlink::nexthop::NextHop;
use crate::netlink::snapshot::{Route, Snapshot, TABLE_MAIN};
use crate::topology::global::private_nets;
use crate::topology::{InnerNet, Path, PathKey};

/// The address our probes of a path are sent from.
pub(super) fn source_address(snapshot: &Snapshot, path: &PathKey) -> Option<IpAddr> {
    let on_gateways_subnet = |subnet: &Option<IpNet>| match (subnet, &path.gateway) {
        (Some(subnet), Some(gateway)) => subnet.contains(gateway),
        _ => false,
    };
    snapshot
        .addresses
        .iter()
        .filter(|a| a.ifindex == path.ifindex && a.address.is_ipv6() == path.ipv6)
        // The first of the best: min_by_key returns the first of equals.
        .min_by_key(|a| (!a.global, a.second_choice, !on_gateways_subnet(&a.subnet)))
        .map(|a| a.address)
}

/// A route's next hops. A route by a point-to-point device needs no gateway, and pppd makes it without: there it is the
/// far end.
pub(super) fn next_hops<'a>(
    snapshot: &'a Snapshot,
    route: &'a Route,
) -> impl Iterator<Item = NextHop> + 'a {
    let ipv6 = route.is_ipv6();
    route.hops.iter().map(move |hop| NextHop {
        gateway: hop.gateway.or_else(|| far_end(snapshot, hop.ifindex, ipv6)),
        ..hop.clone()
    })
}

/// Address of the far end of a device without link-layer addresses: what pppd gives the device's own address as its
/// peer (IFA_ADDRESS).
fn far_end(snapshot: &Snapshot, ifindex: u32, ipv6: bool) -> Option<IpAddr> {
    snapshot.links.get(&ifindex).filter(|link| !link.ethernet)?;
    let own = snapshot.addresses.iter();
    let mut own = own.filter(|a| a.ifindex == ifindex && a.address.is_ipv6() == ipv6);
    own.find_map(|a| {
        let peer = a.subnet.filter(|s| s.prefix_len() == s.max_prefix_len())?;
        (peer.addr() != a.address).then_some(peer.addr())
    })
}

/// Global addresses on a path's device.
pub(super) fn own_addresses<'a>(
    snapshot: &'a Snapshot,
    path: &PathKey,
) -> impl Iterator<Item = &'a Address> + 'a {
    let (ifindex, ipv6) = (path.ifindex, path.ipv6);
    snapshot
        .addresses
        .iter()
        .filter(move |a| a.ifindex == ifindex && a.address.is_ipv6() == ipv6 && a.global)
}

/// The networks that addresses on these devices are in.
pub(super) fn nets_on(snapshot: &Snapshot, devices: &BTreeSet<u32>) -> BTreeSet<(u32, IpNet)> {
    let on_them = snapshot
        .addresses
        .iter()
        .filter(|a| devices.contains(&a.ifindex));
    on_them
        .filter_map(|a| Some((a.ifindex, a.subnet?.trunc())))
        .collect()
}

/// Is an address in the network of some path's device, and not in that of every other one? It is that uplink's, whatever
/// device it is on: keepalived's is on a macvlan, others are on `lo`. `nets`: those on the paths' devices.
pub(super) fn is_in_some(nets: &BTreeSet<(u32, IpNet)>, paths: &[Path], address: IpAddr) -> bool {
    let near = nets.iter().filter(|(_, net)| net.contains(&address));
    let near: BTreeSet<u32> = near.map(|(device, _)| *device).collect();
    let mut alike = paths
        .iter()
        .filter(|path| path.key.ipv6 == address.is_ipv6());
    !near.is_empty() && !alike.all(|path| near.contains(&path.key.ifindex))
}

/// Of tunnels that name one of these devices, or a mark by which they may be routed: where they lead. Where that is anywhere, or
/// a prefix of a group's own: the addresses that they send from.
pub(super) fn tunnels(
    snapshot: &Snapshot,
    devices: &BTreeSet<u32>,
    adopted: &BTreeMap<IpNet, u32>,
) -> (BTreeSet<IpNet>, BTreeSet<IpAddr>) {
    let tunnels = snapshot.links.values().filter_map(|l| l.tunnel.as_ref());
    let bound = tunnels.filter(|tunnel| tunnel.mark != 0 || devices.contains(&tunnel.over));
    let ends = snapshot.tunnel_ends.iter();
    let near = ends.filter(|(over, _)| devices.contains(over));
    let mut to: BTreeSet<IpNet> = near.map(|(_, end)| IpNet::from(*end)).collect();
    let mut from = BTreeSet::new();
    to.retain(|end| !adopted.contains_key(end));
    for tunnel in bound {
        let remote = tunnel.remote.map(IpNet::from);
        match remote.filter(|remote| !adopted.contains_key(remote)) {
            Some(remote) => to.extend([remote]),
            None => from.extend(tunnel.local),
        }
    }
    (to, from)
}

/// Networks that addresses on uplinks are in.
pub(super) fn uplink_nets(snapshot: &Snapshot, uplinks: &BTreeSet<u32>) -> Vec<IpNet> {
    let nets = nets_on(snapshot, uplinks).into_iter().map(|(_, net)| net);
    let mut nets = IpNet::aggregate(&nets.collect());
    nets.sort();
    nets
}

/// Private networks to which the main table leads by devices that are no uplinks and have Ethernet headers: of other
/// devices, tunnels above all, no forwarded packet is placed. A host may have a route to each container of its; those
/// that are closer together than this are taken for one network. Networks on a link come first: behind routers there
/// may be any number.
pub(super) fn inner_nets(snapshot: &Snapshot, uplinks: &BTreeSet<u32>) -> Vec<InnerNet> {
    let private = private_nets();
    let links = &snapshot.links;
    let is_ethernet = |ifindex: &u32| links.get(ifindex).is_some_and(|link| link.ethernet);
    let routes = snapshot.routes.iter().filter(|route| {
        let mut hops = route.hops.iter();
        let inside = hops.clone().all(|hop| !uplinks.contains(&hop.ifindex));
        route.table == TABLE_MAIN
            && route.kind == RTN_UNICAST
            && inside
            && hops.any(|hop| is_ethernet(&hop.ifindex))
            && private.iter().any(|net| net.contains(&route.prefix))
    });
    let together = |prefix: IpNet| {
        let longest = if prefix.addr().is_ipv6() { 64 } else { 24 };
        let net = IpNet::new(prefix.addr(), prefix.prefix_len().min(longest));
        net.map_or(prefix, |net| net.trunc())
    };
    let mut found: BTreeMap<IpNet, (bool, BTreeSet<u32>)> = BTreeMap::new();
    for route in routes {
        let (is_on_link, devices) = found.entry(together(route.prefix)).or_default();
        *is_on_link |= route.hops.iter().any(|hop| hop.gateway.is_none());
        devices.extend(route.hops.iter().map(|hop| hop.ifindex));
    }
    let nets = found.into_iter().map(|(net, (is_on_link, devices))| {
        let device = devices.first().copied().filter(|_| devices.len() == 1);
        (!is_on_link, InnerNet { net, device })
    });
    let mut nets: Vec<(bool, InnerNet)> = nets.collect();
    nets.sort();
    nets.into_iter().map(|(_, net)| net).collect()
}

/// Those of these devices that are ipvlans on another one of them.
pub(super) fn ipvlans(snapshot: &Snapshot, devices: &BTreeSet<u32>) -> BTreeSet<u32> {
    let is_on_another = |link: &Link| {
        link.kind.as_deref() == Some("ipvlan")
            && matches!(link.lower, Lower::Here(lower) if devices.contains(&lower))
    };
    let links = snapshot.links.iter();
    let found = links.filter(|(ifindex, link)| devices.contains(*ifindex) && is_on_another(link));
    found.map(|(ifindex, _)| *ifindex).collect()
}

/// Ethernet addresses by which a frame at one of these ports is for this host: those of the ports' bridges, and of
/// devices on top of these, such as keepalived's macvlan.
pub(super) fn bridges_of(snapshot: &Snapshot, ports: &[u32]) -> BTreeSet<[u8; 6]> {
    let links = &snapshot.links;
    let masters = ports.iter().filter_map(|port| links.get(port)?.master);
    let is_bridge = |ifindex: &u32| links.get(ifindex).is_some_and(Link::is_bridge);
    let mut found: BTreeSet<u32> = masters.filter(is_bridge).collect();
    let mut known = 0;
    while found.len() > known {
        known = found.len();
        let stands = |link: &Link| matches!(link.lower, Lower::Here(x) if found.contains(&x));
        let more = links.iter().filter(|(_, link)| stands(link));
        let more: Vec<u32> = more.map(|(ifindex, _)| *ifindex).collect();
        found.extend(more);
    }
    let addresses = found.iter().map(|ifindex| &links[ifindex].address[..]);
    addresses
        .filter_map(|address| address.try_into().ok())
        .collect()
}

/// Where connections of the networks behind this host come in: by devices that are no uplinks, nor ports
/// of one. Of a bridge its ports: with br_netfilter (as Docker has it) Netfilter meets a packet before
/// the bridge's own ingress does, and what is marked there comes too late for the connection.
pub(super) fn inner_devices(snapshot: &Snapshot, uplinks: &BTreeSet<u32>) -> Vec<u32> {
    let is_bridge = |ifindex: u32| snapshot.links.get(&ifindex).is_some_and(Link::is_bridge);
    let is_inner = |ifindex: u32, link: &Link| {
        let is_first = match link.master {
            Some(master) => is_bridge(master) && !uplinks.contains(&master),
            None => !link.is_bridge(),
        };
        link.ethernet && is_first && !uplinks.contains(&ifindex)
    };
    let links = snapshot.links.iter();
    let inner = links.filter(|(ifindex, link)| is_inner(**ifindex, link));
    inner.map(|(ifindex, _)| *ifindex).collect()
}
