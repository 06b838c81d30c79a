// SPDX-License-Identifier: GPL-2.0-or-later
//! From the kernel's routing state to paths and groups. Pure: no system calls.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;

use ipnet::IpNet;
use libc::RTN_UNICAST;

use self::addresses::{
    bridges_of, inner_devices, inner_nets, ipvlans, is_in_some, nets_on, next_hops, own_addresses,
    source_address, tunnels, uplink_nets,
};
use super::read::Filter;
use super::rules::{self, Reach};
use super::{
    FibRule, Group, Kept, Member, Path, PathKey, Placed, Rewritable, RouteOptions, Topology,
    MAX_GROUPS, MAX_GROUP_PATHS, MAX_KEPT, MAX_PATHS,
};
use crate::netlink::link::{Address, Link};
use crate::netlink::nexthop::NextHop;
use crate::netlink::snapshot::{ds_field, Route, Snapshot, TABLE_MAIN};

mod addresses;
mod defaults;

/// Most reasons kept; a router with a million routes must not fill the memory with them.
const MAX_REASONS: usize = 200;

/// Condenses a snapshot. Takes time in proportion to the number of routes, which is a million and
/// more on some routers.
///
/// `placed`: what flows have chosen by now.
pub(super) fn build_on(snapshot: &Snapshot, filter: &Filter, placed: &Placed) -> Topology {
    let mut builder = Builder::new(snapshot, filter.mark_mask, placed);
    let mut candidates: Vec<&Route> = snapshot
        .routes
        .iter()
        .filter(|route| route.multipath)
        .collect();
    // The main table first: where tables overlap, it is the one that most packets use.
    candidates.sort_by_key(|route| {
        (
            route.is_ipv6(),
            route.table != TABLE_MAIN,
            route.table,
            route.prefix,
            route.metric,
        )
    });
    for route in candidates {
        let adopted = if !filter.admits(&route.prefix) {
            Err("not among the routes asked for".to_owned())
        } else if filter.may_be_shared(&route.prefix) {
            builder.shared.push(route.prefix);
            Ok(())
        } else {
            builder.adopt(route)
        };
        if let Err(reason) = adopted {
            builder.skip(route, &reason);
        }
    }
    for ipv6 in [false, true] {
        builder.adopt_by_metric(ipv6, filter);
    }
    builder.finish()
}

/// As [`build_on`], where nothing was before.
#[cfg(test)]
pub(super) fn build(snapshot: &Snapshot, filter: &Filter) -> Topology {
    build_on(snapshot, filter, &Placed::default())
}

struct Builder<'a> {
    snapshot: &'a Snapshot,
    /// Bits of the marks that placed flows bear.
    mark_mask: u32,
    /// What flows have chosen that may be in progress.
    placed: &'a Placed,
    topology: Topology,
    path_index: HashMap<PathKey, usize>,
    /// How the packets come to each table, by family.
    approaches: BTreeMap<(bool, u32), Result<Approach, String>>,
    /// Positions of all routes with the prefix of a multipath route, by table.
    by_prefix: HashMap<(u32, IpNet), Vec<usize>>,
    /// Prefixes of the groups with their tables.
    adopted: BTreeMap<IpNet, u32>,
    reasons_left_out: usize,
    /// Single addresses that the next hops of a route may share.
    shared: Vec<IpNet>,
}

/// The look-ups before a group's table, and where their routes lead.
struct Approach {
    reach: Reach,
    /// Routes for all packets to these prefixes, with the table.
    earlier: HashMap<IpNet, u32>,
}

impl<'a> Builder<'a> {
    fn new(snapshot: &'a Snapshot, mark_mask: u32, placed: &'a Placed) -> Self {
        let mut by_prefix: HashMap<_, Vec<usize>> = HashMap::new();
        for route in snapshot.routes.iter().filter(|route| route.multipath) {
            by_prefix.entry((route.table, route.prefix)).or_default();
        }
        for (position, route) in snapshot.routes.iter().enumerate() {
            if let Some(same) = by_prefix.get_mut(&(route.table, route.prefix)) {
                same.push(position);
            }
        }
        Self {
            snapshot,
            mark_mask,
            placed,
            topology: Topology::default(),
            path_index: HashMap::new(),
            approaches: BTreeMap::new(),
            by_prefix,
            adopted: BTreeMap::new(),
            reasons_left_out: 0,
            shared: Vec::new(),
        }
    }

    fn skip(&mut self, route: &Route, reason: &str) {
        if self.topology.skipped.len() >= MAX_REASONS {
            self.reasons_left_out += 1;
            return;
        }
        let table = match route.table {
            TABLE_MAIN => String::new(),
            other => format!(" (table {other})"),
        };
        let metric = match route.metric {
            0 => String::new(),
            other => format!(" metric {other}"),
        };
        let text = format!("{}{metric}{table}: {reason}", route.prefix);
        self.topology.skipped.push(text);
    }

    /// Makes the route's prefix part of a group, or says why not.
    fn adopt(&mut self, route: &Route) -> Result<(), String> {
        if route.hops.iter().any(|hop| hop.blackhole) {
            return Err("a next hop is a blackhole".to_owned());
        }
        if route.kind != RTN_UNICAST {
            return Err(format!("not a unicast route (type {})", route.kind));
        }
        if route.source.is_some() {
            return Err("chosen by source address".to_owned());
        }
        if route.tos != 0 {
            return Err(format!("only for TOS {:#04x}", route.tos));
        }
        self.check_precedence(route)?;
        self.check_rules(route)?;
        let hops = self.usable_hops(route)?;

        self.check_room(hops.iter().map(|hop| key(hop, route)))?;
        let full = self.topology.groups.len() >= MAX_GROUPS;
        let known_paths = self.topology.paths.len();
        let members = self.members(&hops, route);
        let ipv6 = route.is_ipv6();
        let known = self.topology.groups.iter_mut().find(|group| {
            group.table == route.table
                && group.members == members
                && group.prefixes.first().map(|p| p.addr().is_ipv6()) == Some(ipv6)
        });
        match known {
            Some(group) => group.prefixes.push(route.prefix),
            None if full => {
                self.topology.paths.truncate(known_paths);
                self.path_index.retain(|_, index| *index < known_paths);
                return Err(format!("more than {MAX_GROUPS} groups on this host"));
            }
            None => {
                let kind = self.kind(route, &members);
                self.topology.groups.push(Group {
                    kind,
                    table: route.table,
                    prefixes: vec![route.prefix],
                    members,
                    preferred: None,
                    told_by: BTreeSet::new(),
                });
                self.topology.metrics.push(route.metric);
            }
        }
        self.adopted.insert(route.prefix, route.table);
        Ok(())
    }

    /// Whether the kernel uses this route for all packets to its prefix.
    fn check_precedence(&self, route: &Route) -> Result<(), String> {
        let same = self.by_prefix.get(&(route.table, route.prefix));
        for other in same
            .into_iter()
            .flatten()
            .map(|position| &self.snapshot.routes[*position])
        {
            // fib6_node_lookup_1 in net/ipv6/ip6_fib.c: where a prefix has routes for some sources, packets from
            // others are looked up among shorter prefixes. Only the default route is found all the same.
            if other.source.is_some() && route.prefix.prefix_len() > 0 {
                return Err(
                    "the kernel passes it by: a route for some sources has its prefix".to_owned(),
                );
            }
            if std::ptr::eq(other, route) || is_conditional(other) {
                continue;
            }
            if other.metric < route.metric {
                return Err(format!(
                    "a route with metric {} comes first: to use this one, delete that one or give this one a lower metric",
                    other.metric
                ));
            }
            if other.metric == route.metric {
                return Err("another route has the same prefix and metric".to_owned());
            }
        }
        Ok(())
    }

    /// Whether the routing rules lead packets to this route.
    fn check_rules(&mut self, route: &Route) -> Result<(), String> {
        let ipv6 = route.is_ipv6();
        let snapshot = self.snapshot;
        let approach = self
            .approaches
            .entry((ipv6, route.table))
            .or_insert_with(|| approach(snapshot, route.table, ipv6))
            .as_ref()
            .map_err(Clone::clone)?;
        let hiding =
            enclosing(route.prefix).find_map(|outer| Some((outer, approach.earlier.get(&outer)?)));
        if let Some((prefix, table)) = hiding {
            return Err(format!(
                "{prefix} in table {table}, looked up first, hides it"
            ));
        }
        // Destinations alone tell groups apart, so two tables cannot both have one for the same.
        let outer = enclosing(route.prefix).find_map(|outer| self.adopted.get_key_value(&outer));
        let inner = || {
            let following = self.adopted.range(route.prefix..);
            following
                .take_while(|(prefix, _)| route.prefix.contains(*prefix))
                .find(|(_, table)| **table != route.table)
        };
        let outer = outer.filter(|(_, table)| **table != route.table);
        match outer.or_else(inner) {
            Some((prefix, table)) => Err(format!("overlaps {prefix} of table {table}")),
            None => Ok(()),
        }
    }

    /// The next hops that can be paths, equal ones merged.
    fn usable_hops(&mut self, route: &Route) -> Result<Vec<NextHop>, String> {
        let mut hops: Vec<NextHop> = Vec::new();
        for hop in next_hops(self.snapshot, route) {
            if hop.encapsulated {
                return Err("a next hop encapsulates its packets".to_owned());
            }
            let same = hops
                .iter_mut()
                .find(|other| (other.ifindex, other.gateway) == (hop.ifindex, hop.gateway));
            match same {
                Some(other) => {
                    other.weight = other.weight.saturating_add(hop.weight);
                    other.dead &= hop.dead;
                }
                None => hops.push(hop),
            }
        }
        if hops.len() < 2 {
            return Err("fewer than two different next hops".to_owned());
        }

        let mut reasons = Vec::new();
        hops.retain(|hop| match self.snapshot.links.get(&hop.ifindex) {
            None => {
                reasons.push(format!("next hop on device {} is gone", hop.ifindex));
                false
            }
            Some(link) if hop.gateway.is_none() => {
                reasons.push(format!(
                    "next hop on {} has no gateway: its neighbours cannot be known in advance",
                    link.name
                ));
                false
            }
            Some(_) => true,
        });
        if hops.len() < 2 {
            return Err(reasons.join("; "));
        }
        if hops.len() > MAX_GROUP_PATHS {
            return Err(format!(
                "{} next hops, at most {MAX_GROUP_PATHS} are handled",
                hops.len()
            ));
        }
        for reason in reasons {
            self.skip(route, &format!("{reason}; the others are used"));
        }
        Ok(hops)
    }

    /// Indexes of the next hops' paths, made if new, with weights of at most 256.
    fn members(&mut self, hops: &[NextHop], route: &Route) -> Vec<Member> {
        let heaviest = hops.iter().map(|hop| hop.weight).max().unwrap_or(1);
        let mut members: Vec<Member> = hops
            .iter()
            .map(|hop| Member {
                path: self.path(hop, route),
                weight: scaled_weight(hop.weight, heaviest),
            })
            .collect();
        members.sort_by_key(|member| member.path);
        members
    }

    fn path(&mut self, hop: &NextHop, route: &Route) -> usize {
        let key = key(hop, route);
        if let Some(&index) = self.path_index.get(&key) {
            return index;
        }
        let link = &self.snapshot.links[&hop.ifindex];
        self.put(self.new_path(key, link, hop))
    }

    /// Whether there is room for all of these paths.
    fn check_room(&self, keys: impl Iterator<Item = PathKey>) -> Result<(), String> {
        let new = keys.filter(|key| !self.path_index.contains_key(key));
        match self.topology.paths.len() + new.count() > MAX_PATHS {
            true => Err(format!("more than {MAX_PATHS} paths on this host")),
            false => Ok(()),
        }
    }

    /// Takes a path in, or what is newer of it; returns its index.
    fn put(&mut self, path: Path) -> usize {
        let paths = &mut self.topology.paths;
        let index = *self.path_index.entry(path.key).or_insert(paths.len());
        match paths.get_mut(index) {
            Some(known) => *known = path,
            None => paths.push(path),
        }
        index
    }

    fn new_path(&self, key: PathKey, link: &Link, hop: &NextHop) -> Path {
        let own: BTreeSet<IpAddr> = own_addresses(self.snapshot, &key)
            .map(|a| a.address)
            .collect();
        Path {
            key,
            ifname: link.name.clone(),
            source: source_address(self.snapshot, &key),
            taken: (own.iter())
                .filter_map(|a| Some((*a, rules::taker(self.snapshot, *a, key.ifindex)?)))
                .collect(),
            addresses: own.into_iter().collect(),
            fresh: own_addresses(self.snapshot, &key)
                .filter(|a| a.fresh)
                .map(|a| a.address)
                .collect(),
            preferred_source: None,
            options: RouteOptions::default(),
            mtu: match link.mtu6 {
                Some(mtu) if key.ipv6 => mtu.min(link.mtu),
                _ => link.mtu,
            },
            ethernet: link.ethernet,
            modem: link.modem,
            demoted: false,
            up: link.up && !hop.dead,
            gateway_mac: key
                .gateway
                .and_then(|gateway| self.snapshot.neighbours.get(&(key.ifindex, gateway)))
                .copied(),
        }
    }

    fn finish(mut self) -> Topology {
        let mut others = BTreeSet::new();
        let mut fib_rules = Vec::new();
        for (&(ipv6, table), approach) in &self.approaches {
            let ours: HashSet<IpNet> = self
                .adopted
                .iter()
                .filter(|(prefix, t)| **t == table && prefix.addr().is_ipv6() == ipv6)
                .map(|(prefix, _)| *prefix)
                .collect();
            let (Ok(approach), false) = (approach, ours.is_empty()) else {
                continue;
            };
            fib_rules.extend(approach.reach.fib_rules.iter().cloned());
            let own = self
                .snapshot
                .routes
                .iter()
                .filter(|route| route.table == table && route.is_ipv6() == ipv6);
            for route in own.chain(earlier_routes(self.snapshot, &approach.reach)) {
                if ours.contains(&route.prefix) {
                    if is_conditional(route) {
                        fib_rules.push(FibRule {
                            table,
                            dst: Some(route.prefix),
                            src: route.source,
                            tos: ds_field(route.tos, ipv6),
                            ipv6,
                            ..FibRule::default()
                        });
                    }
                } else if enclosing(route.prefix).any(|outer| ours.contains(&outer)) {
                    others.insert(route.prefix);
                }
            }
        }
        let paths = self.topology.paths.iter();
        let devices: BTreeSet<u32> = paths.map(|path| path.key.ifindex).collect();
        let addresses = self.snapshot.addresses.iter();
        let near = nets_on(self.snapshot, &devices);
        let is_bound = |address: &&Address| {
            devices.contains(&address.ifindex)
                || is_in_some(&near, &self.topology.paths, address.address)
        };
        let (pinned, own): (Vec<&Address>, Vec<&Address>) = addresses.partition(is_bound);
        let mut pinned: BTreeSet<IpAddr> = pinned.iter().map(|a| a.address).collect();
        let (to, from) = tunnels(self.snapshot, &devices, &self.adopted);
        let policies = self.policies().map(|policy| policy.to);
        let policies =
            policies.filter(|to| self.topology.places() && !self.adopted.contains_key(to));
        others.extend(policies.chain(to).filter(|to| self.is_in_a_group(to)));
        pinned.extend(from);
        let own: BTreeSet<IpAddr> = own.iter().map(|a| a.address).collect();
        if !self.topology.groups.is_empty() {
            self.topology.own_sources = own.difference(&pinned).copied().collect();
        }
        self.topology.uplink_bound_sources = pinned.into_iter().collect();
        self.topology.not_ours = minimal(&others, &self.adopted);
        self.topology.fib_rules = fib_rules;
        self.topology.ipvlans = ipvlans(self.snapshot, &devices);
        for index in 0..self.topology.groups.len() {
            self.topology.groups[index].told_by = self.told_by(&self.topology.groups[index]);
        }
        self.topology.uplink_nets = uplink_nets(self.snapshot, &devices);
        if self.topology.has_placed() {
            // An uplink is none of the inner devices while it rests.
            let resting = self.topology.suspended.iter().flat_map(|s| &s.paths);
            let resting = resting.map(|path| path.key.ifindex);
            let devices: BTreeSet<u32> = devices.iter().copied().chain(resting).collect();
            self.topology.kept = self.kept();
            let inner = inner_devices(self.snapshot, &devices);
            self.topology.inner_bridges = bridges_of(self.snapshot, &inner);
            self.topology.inner_devices = inner;
            self.topology.uplink_nets = uplink_nets(self.snapshot, &devices);
            self.topology.inner_nets = inner_nets(self.snapshot, &devices);
            self.topology.rule_priorities =
                [false, true].map(|ipv6| rules::last_priority(self.snapshot, ipv6));
            self.topology.by_mark =
                [false, true].map(|ipv6| rules::by_mark(self.snapshot, ipv6, self.mark_mask));
            self.topology.rerouted_by =
                [false, true].map(|ipv6| rules::rerouted_by(self.snapshot, ipv6, &devices));
            self.topology.our_bits = self.mark_mask;
            self.topology.whole_marks =
                [false, true].map(|ipv6| rules::whole_marks(self.snapshot, ipv6, self.mark_mask));
        }
        // A router has one to each of its neighbours.
        if let Some(first) = self.shared.first() {
            let more = match self.shared.len() {
                1 => String::new(),
                n => format!(" and {} more to single addresses", n - 1),
            };
            self.topology.skipped.push(format!(
                "{first}{more}: the next hops may be servers that share it; name it in `routes` if all lead to one host"
            ));
        }
        if self.reasons_left_out > 0 {
            let more = format!("{} more routes", self.reasons_left_out);
            self.topology.skipped.push(more);
        }
        self.topology
    }
}

impl Builder<'_> {
    fn is_in_a_group(&self, to: &IpNet) -> bool {
        enclosing(*to).any(|outer| self.adopted.contains_key(&outer))
    }

    /// What tells packets that others' rules and routes send out by a group's paths from the group's own.
    fn told_by(&self, group: &Group) -> BTreeSet<Rewritable> {
        let paths = group.members.iter().map(|m| &self.topology.paths[m.path]);
        let devices: BTreeSet<u32> = paths.clone().map(|path| path.key.ifindex).collect();
        let ipv6 = paths.clone().any(|path| path.key.ipv6);
        let others = self.snapshot.routes.iter().filter(|route| {
            is_conditional(route)
                && route.table == group.table
                && group.prefixes.contains(&route.prefix)
        });
        let mut found = BTreeSet::new();
        for route in others {
            found.extend((route.tos != 0).then_some(Rewritable::Tos));
            found.extend(route.source.map(|_| Rewritable::Address));
        }
        if let Some(Ok(approach)) = self.approaches.get(&(ipv6, group.table)) {
            let to = (group.table, ipv6);
            found.extend(rules::told_by(self.snapshot, &approach.reach, to, &devices));
        }
        found
    }

    /// Single destinations that the main table sends out by the gateway of an uplink where flows start, or did, as VPN
    /// clients have it.
    fn kept(&self) -> Vec<Kept> {
        let topology = &self.topology;
        let starting = topology.groups.iter().filter(|group| group.kind.places());
        let members = starting.flat_map(|group| &group.members);
        let paths = members.map(|member| &topology.paths[member.path]);
        let uplinks = paths
            .chain(topology.suspended.iter().flat_map(|s| &s.paths))
            .map(|path| (path.key.ifindex, path.key.ipv6));
        // A VPN may have put its default route in the place of the uplink's.
        let before = [false, true].map(|ipv6| (ipv6, &self.placed[usize::from(ipv6)]));
        let before = before.into_iter().flat_map(|(ipv6, devices)| {
            devices.iter().flatten().map(move |device| (*device, ipv6))
        });
        let uplinks: HashSet<(u32, bool)> = uplinks.chain(before).collect();
        let is_kept = |route: &&Route| {
            route.table == TABLE_MAIN
                && route.prefix.prefix_len() == route.prefix.max_prefix_len()
                && route.kind == RTN_UNICAST
                && !is_conditional(route)
                // Running flows have to follow it.
                && !route.dynamic
        };
        let hosts = self.snapshot.routes.iter().filter(is_kept);
        let kept: BTreeSet<Kept> = hosts
            .filter_map(
                |route| match &next_hops(self.snapshot, route).collect::<Vec<_>>()[..] {
                    [hop] if !hop.encapsulated && !hop.blackhole => {
                        let host = route.prefix.addr();
                        // The way to the gateway itself is not by it.
                        hop.gateway.filter(|gateway| *gateway != host)?;
                        Some(Kept {
                            host,
                            ifindex: hop.ifindex,
                        })
                    }
                    _ => None,
                },
            )
            .filter(|kept| uplinks.contains(&(kept.ifindex, kept.host.is_ipv6())))
            .collect();
        kept.into_iter().take(MAX_KEPT).collect()
    }
}

fn key(hop: &NextHop, route: &Route) -> PathKey {
    PathKey {
        ifindex: hop.ifindex,
        gateway: hop.gateway,
        ipv6: route.is_ipv6(),
    }
}

/// The prefix itself and all that enclose it, the longest first.
fn enclosing(prefix: IpNet) -> impl Iterator<Item = IpNet> {
    std::iter::successors(Some(prefix), IpNet::supernet)
}

fn approach(snapshot: &Snapshot, table: u32, ipv6: bool) -> Result<Approach, String> {
    let reach = rules::reach(snapshot, table, ipv6)?;
    let earlier = earlier_routes(snapshot, &reach)
        .filter(|route| !is_conditional(route))
        .map(|route| (route.prefix, route.table))
        .collect();
    Ok(Approach { reach, earlier })
}

/// Routes that packets meet in tables before the group's own.
fn earlier_routes<'a>(
    snapshot: &'a Snapshot,
    reach: &'a Reach,
) -> impl Iterator<Item = &'a Route> + 'a {
    snapshot.routes.iter().filter(|route| {
        reach.earlier.iter().any(|(table, ignored_up_to)| {
            route.table == *table
                && ignored_up_to.is_none_or(|length| u32::from(route.prefix.prefix_len()) > length)
        })
    })
}

/// Whether the route holds for some of the packets to its prefix only.
fn is_conditional(route: &Route) -> bool {
    route.tos != 0 || route.source.is_some()
}

/// Weights beyond 256 (kernels from 6.12 allow 65536) are scaled down alike.
fn scaled_weight(weight: u16, heaviest: u16) -> u16 {
    if heaviest <= 256 {
        return weight;
    }
    let scaled = u32::from(weight) * 256 / u32::from(heaviest);
    scaled.clamp(1, 256) as u16
}

/// Drops prefixes whose nearest enclosing prefix, ours or not, is itself one of `others`.
fn minimal(others: &BTreeSet<IpNet>, adopted: &BTreeMap<IpNet, u32>) -> Vec<IpNet> {
    // Sorted by address, then length: an enclosing prefix comes before what it encloses.
    let mut all: Vec<(IpNet, bool)> = adopted.keys().map(|prefix| (*prefix, true)).collect();
    all.extend(others.iter().map(|prefix| (*prefix, false)));
    all.sort();
    let mut enclosing: Vec<(IpNet, bool)> = Vec::new();
    let mut kept = Vec::new();
    for (prefix, ours) in all {
        while enclosing
            .last()
            .is_some_and(|(outer, _)| !outer.contains(&prefix))
        {
            enclosing.pop();
        }
        let redundant = !ours && enclosing.last().is_some_and(|(_, ours)| !ours);
        if redundant {
            continue;
        }
        if !ours {
            kept.push(prefix);
        }
        enclosing.push((prefix, ours));
    }
    kept
}

#[cfg(test)]
mod tests;
