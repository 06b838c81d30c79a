// SPDX-License-Identifier: GPL-2.0-or-later
//! What the addresses of devices say of paths, and which devices are those of the networks behind this host.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;

use crate::netlink::link::{Address, Link};
use crate::netlink::snapshot::Snapshot;
use crate::topology::PathKey;

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

/// Networks that addresses on uplinks are in.
pub(super) fn uplink_nets(snapshot: &Snapshot, uplinks: &BTreeSet<u32>) -> Vec<IpNet> {
    let addresses = snapshot.addresses.iter();
    let on_uplinks = addresses.filter(|a| uplinks.contains(&a.ifindex));
    let mut nets: Vec<IpNet> = on_uplinks
        .filter_map(|a| a.subnet.map(|n| n.trunc()))
        .collect();
    nets = IpNet::aggregate(&nets);
    nets.sort();
    nets
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
