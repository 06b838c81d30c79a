// SPDX-License-Identifier: GPL-2.0-or-later
//! Where new flows choose their uplink, and which uplinks reach all of it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;

use super::PlacementPath;
use crate::bpf::ProgramGroup;
use crate::topology::{is_private, Kind, Path, Topology};

/// What is on no provider's Internet, but may be behind the uplink that the kernel takes: for benchmarks (RFC 2544), from
/// where proxies give fake addresses by default, reserved (RFC 1112), site-local (RFC 3879), SRv6's segments (RFC 9602), and
/// what Yggdrasil uses.
const SPECIAL: [&str; 5] = [
    "198.18.0.0/15",
    "240.0.0.0/4",
    "fec0::/10",
    "5f00::/16",
    "200::/7",
];
/// Usual length of the longest prefix that a whole site has (RFC 6177).
const SITE: u8 = 48;

/// Uplinks of IPv6 that have only unique local addresses (RFC 4193) for what is new, while another one has global ones. Not the
/// one that the kernel takes: its router may translate.
pub(super) fn local_only(
    topology: &Topology,
    known: &BTreeMap<usize, PlacementPath>,
) -> BTreeSet<usize> {
    let is_local = |ip: &IpAddr| ip.is_ipv6() && is_private(*ip);
    let is_global = |ip: &IpAddr| ip.is_ipv6() && !is_private(*ip);
    let uplinks = || known.values().map(|p| (p.index, &topology.paths[p.index]));
    if !uplinks().any(|(_, uplink)| uplink.taken.is_empty() && uplink.fresh.iter().any(is_global)) {
        return BTreeSet::new();
    }
    let preferred: Vec<usize> = topology.groups.iter().filter_map(|g| g.preferred).collect();
    let has_local = |fresh: &[IpAddr]| !fresh.is_empty() && fresh.iter().all(is_local);
    let these = uplinks().filter(|(_, uplink)| has_local(&uplink.fresh));
    let indexes = these.map(|(index, _)| index);
    indexes.filter(|i| !preferred.contains(i)).collect()
}

/// Destinations of a family that only the uplink which the kernel takes may reach: [`SPECIAL`] ones, and those of the site of
/// these paths, whose firewall takes no packet from outside.
pub(super) fn only_the_kernels<'a>(
    ipv6: bool,
    paths: impl Iterator<Item = &'a Path>,
) -> Vec<IpNet> {
    let special = SPECIAL.iter().map(|net| net.parse().expect("a prefix"));
    let special = special.filter(|net: &IpNet| net.addr().is_ipv6() == ipv6);
    let addresses = paths.flat_map(|path| &path.addresses).copied();
    let global = addresses.filter(|address| address.is_ipv6() && !is_private(*address));
    let sites = global.filter_map(|address| IpNet::new(address, SITE).ok());
    let all: BTreeSet<IpNet> = special.chain(sites.map(|net| net.trunc())).collect();
    all.into_iter().collect()
}

/// Groups with the destinations of new flows that choose, which is default routes only, and all other
/// prefixes as not ours.
pub(super) fn destinations(
    topology: &Topology,
    groups: &[ProgramGroup],
) -> (Vec<ProgramGroup>, Vec<IpNet>) {
    let mut not_ours = topology.not_ours.clone();
    let mut ours = Vec::new();
    for (group, config) in topology.groups.iter().zip(groups) {
        let is_ours = |prefix: &IpNet| group.kind.places() && prefix.prefix_len() == 0;
        let (choose, others): (Vec<IpNet>, Vec<IpNet>) =
            group.prefixes.iter().copied().partition(is_ours);
        not_ours.extend(others);
        // By a route with several next hops the kernel itself goes to these by any.
        if let (Kind::Place, Some(default)) = (group.kind, choose.first()) {
            let members = group.members.iter().map(|m| m.path);
            let preferred = members.filter(|m| group.preferred.is_none_or(|it| it == *m));
            let paths = preferred.map(|path| &topology.paths[path]);
            not_ours.extend(only_the_kernels(default.addr().is_ipv6(), paths));
        }
        ours.push(ProgramGroup {
            members: config.members.clone(),
            prefixes: choose,
        });
    }
    (ours, not_ours)
}
