// SPDX-License-Identifier: GPL-2.0-or-later
//! The routing that new flows choose from: a table for each uplink, and rules that lead there.
//!
//! Pure data from a [`Topology`]; [`super::uplinks`] puts it into the kernel. For each family:
//!
//! ```text
//! 32765: from all fwmark MARK/MASK lookup TABLE suppress_prefixlength 0
//!                                                         for uplinks with destinations to keep
//! 32765: from all uidrange 0-4294967294 lookup main suppress_prefixlength 0
//!                                                         everything but the default route
//! 32765: from ADDRESS lookup TABLE                        for every address of every uplink
//! 32765: from all fwmark MARK/MASK lookup TABLE           for every uplink
//! 32766: from all lookup main                             (the kernel's own)
//! ```
//!
//! The one by users makes copies of other routes needless: a table holds the uplink's default route, with all that
//! the main table's says, or, while its device is down, one that says "unreachable": a flow that cannot go on is told
//! so, rather than sent out by another uplink whose provider drops it. All rules stand behind every rule that others
//! have made, so that those go on deciding.
//! They have one priority, and the order in which they are added is that in which they are tried. Addresses
//! come before marks: a packet that has the address of an uplink leaves by it, whatever its mark. A rule of the same
//! priority that others add later would stand behind ours: ours are added anew then ([`Found`]).
//!
//! An address gets no rule while a connection from it is translated ([`super::held`]): the kernel has sent that
//! by another uplink, whose address its other end knows, and the rule would take it away from there. IPv6 gets no rule
//! at all where the kernel chooses among next hops and no address would have one.
//!
//! Destinations to keep ([`Topology::kept`]): a VPN client opens its outer connection and then adds a route to
//! its server by the gateway that the kernel prefers. The connection may have started on another uplink, whose
//! address it has. So to such a destination the mark goes before the main table's route. Only flows that
//! were placed bear a mark.
//!
//! While adoption is suspended, as the kernel prefers a VPN's default route, these are the only rules. Flows to other
//! destinations go where the kernel now sends them. All rules stay where it is suspended for something else, such as
//! one uplink being gone ([`Suspended::whole`](crate::topology::Suspended::whole)).
//!
//! An uplink's number, of which mark and table are made, comes from its device's index, which stays as
//! long as the device does. So connections that Netfilter has marked find their uplink again when
//! mountain is started anew. Where two indexes would give one number, each device keeps the one that it has, whichever
//! uplinks come and go, and one that is made anew has the number that it had ([`super::numbers`]).

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use anyhow::Result;
use serde::Deserialize;

use super::numbers::numbers;
use crate::netlink::snapshot::{FibRule, TABLE_MAIN};
use crate::topology::{Kept, Path, RouteOptions, Topology};

/// Tables of the uplinks: this plus the uplink's number.
pub(crate) const TABLE_BASE: u32 = 19_700;

/// First and last user that [`Selects::Specific`] and [`Selects::Mark`] are about: all, which says nothing but where
/// it is printed. Without it the former would read as one of wg-quick's, which removes what reads so until it finds none.
pub(crate) const EVERYBODY: (u32, u32) = (0, u32::MAX - 1);

/// The bits of packet marks that are ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "u32")]
pub struct MarkMask(u32);

impl MarkMask {
    /// The highest byte, which few other programs use.
    pub(crate) const DEFAULT: Self = Self(0xff00_0000);
    /// Fewest bits: three uplinks, and none.
    const BITS_MIN: u32 = 2;

    pub(crate) fn bits(self) -> u32 {
        self.0
    }

    /// The largest number that fits.
    fn largest(self) -> u32 {
        self.0 >> self.0.trailing_zeros()
    }

    /// The mark of the uplink of this number.
    pub(crate) fn mark(self, number: u32) -> u32 {
        number << self.0.trailing_zeros() & self.0
    }
}

impl TryFrom<u32> for MarkMask {
    type Error = String;

    /// `mask`: bits next to each other.
    fn try_from(mask: u32) -> Result<Self, String> {
        let bits = mask.count_ones();
        let contiguous = bits > 0 && mask >> mask.trailing_zeros() == u32::MAX >> (32 - bits);
        if !contiguous || bits < Self::BITS_MIN {
            return Err(format!(
                "{mask:#010x} is not a mask of {} bits or more next to each other",
                Self::BITS_MIN
            ));
        }
        Ok(Self(mask))
    }
}

/// Which packets a rule selects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Selects {
    /// An uplink's mark, for destinations to keep.
    Kept {
        mark: u32,
        mask: u32,
    },
    /// All, for what is more specific than a default route.
    Specific,
    From(IpAddr),
    Mark {
        mark: u32,
        mask: u32,
    },
}

/// An ip rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct IpRule {
    pub ipv6: bool,
    pub priority: u32,
    pub selects: Selects,
    pub table: u32,
}

/// A route in an uplink's table.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct UplinkRoute {
    /// Family of what it routes; the gateway's may be another one.
    pub ipv6: bool,
    pub table: u32,
    /// The single destination that it leads to; `None`: a default route.
    pub host: Option<IpAddr>,
    pub to: To,
}

/// Where it leads.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum To {
    Gateway {
        ifindex: u32,
        gateway: IpAddr,
        preferred_source: Option<IpAddr>,
        options: RouteOptions,
    },
    /// For as long as there is no other.
    Unreachable,
}

impl To {
    /// Of a gateway. The kernel has room for one route of each.
    fn metric(&self) -> Option<u32> {
        match self {
            Self::Gateway { options, .. } => Some(options.metric),
            Self::Unreachable => None,
        }
    }
}

/// All that mountain adds to the kernel's routing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Routing {
    /// In the order in which they are tried.
    pub rules: Vec<IpRule>,
    pub routes: Vec<UplinkRoute>,
}

/// What new flows choose from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PlacementPlan {
    pub routing: Routing,
    /// Mark of each path that new flows may choose; by index into [`Topology::paths`].
    pub marks: BTreeMap<usize, u32>,
    /// Mark and device of each uplink.
    pub uplinks: Vec<(u32, String)>,
    /// Number of each device.
    pub numbers: BTreeMap<u32, u32>,
}

/// An uplink whose flows have the choice, or had it until that was suspended.
struct Uplink<'a> {
    /// Index into [`Topology::paths`]; `None`: suspended.
    index: Option<usize>,
    path: &'a Path,
    /// Whether all rules and routes are there, or only those of destinations to keep.
    whole: bool,
}

/// `gone`: uplinks that have no default route any more, and keep all for a moment.
fn uplinks<'a>(topology: &'a Topology, gone: &'a [Path]) -> Vec<Uplink<'a>> {
    let starting = topology.groups.iter().filter(|group| group.kind.places());
    let mut indexes: Vec<usize> = starting
        .flat_map(|group| group.members.iter().map(|member| member.path))
        .collect();
    indexes.sort_unstable();
    indexes.dedup();
    let active = indexes.into_iter().map(|index| Uplink {
        index: Some(index),
        path: &topology.paths[index],
        whole: true,
    });
    let suspended = topology.suspended.iter().flat_map(|suspended| {
        suspended.paths.iter().map(|path| Uplink {
            index: None,
            path,
            whole: suspended.whole,
        })
    });
    let gone = gone.iter().map(|path| Uplink {
        index: None,
        path,
        whole: true,
    });
    active.chain(suspended).chain(gone).collect()
}

/// All uplinks that have rules and a table by [`plan`].
pub(super) fn uplink_paths(topology: &Topology) -> Vec<Path> {
    let whole = uplinks(topology, &[]).into_iter().filter(|u| u.whole);
    whole.map(|uplink| uplink.path.clone()).collect()
}

/// All uplinks of [`plan`].
pub(super) fn all_paths(topology: &Topology, gone: &[Path]) -> Vec<Path> {
    let all = uplinks(topology, gone).into_iter();
    all.map(|uplink| uplink.path.clone()).collect()
}

/// The addresses that get a rule by [`plan`] while nothing is held.
pub(super) fn uplink_addresses(topology: &Topology) -> BTreeSet<IpAddr> {
    let whole = uplinks(topology, &[]).into_iter().filter(|u| u.whole);
    let addresses = whole.flat_map(|uplink| &uplink.path.addresses);
    addresses.copied().collect()
}

/// The routing for a topology's groups whose flows choose when they start; nothing when there are none.
/// `gone`: uplinks that keep theirs for a moment. `held`: addresses of uplinks that get no rule for the time being.
/// `before`: numbers that devices have.
///
/// # Errors
/// When there are more uplinks than marks.
pub(crate) fn plan(
    (topology, gone): (&Topology, &[Path]),
    mask: MarkMask,
    held: &BTreeSet<IpAddr>,
    before: &BTreeMap<u32, u32>,
) -> Result<PlacementPlan> {
    let uplinks = uplinks(topology, gone);
    let devices = uplinks.iter().map(|uplink| uplink.path.key.ifindex);
    let numbers = numbers(devices, mask.largest(), before)?;
    let mut plan = PlacementPlan::default();
    for ipv6 in [false, true] {
        let mut rules = Vec::new();
        let rule = |selects, table| IpRule {
            ipv6,
            priority: topology.rule_priorities[usize::from(ipv6)],
            selects,
            table,
        };
        let of_family = || uplinks.iter().filter(|u| u.path.key.ipv6 == ipv6);
        let rests = ipv6 && topology.chooses_by_hash(ipv6) && are_held(of_family(), held);
        for uplink in of_family().filter(|u| !(rests && u.whole)) {
            let path = uplink.path;
            let number = numbers[&path.key.ifindex];
            let (mark, table, mask) = (mask.mark(number), table(number), mask.bits());
            let kept = kept_routes(path, table, &topology.kept);
            if !kept.is_empty() {
                rules.push(rule(Selects::Kept { mark, mask }, table));
            }
            if uplink.whole {
                rules.push(rule(Selects::Specific, TABLE_MAIN));
                let own = path.addresses.iter().filter(|a| !held.contains(*a));
                rules.extend(own.map(|address| rule(Selects::From(*address), table)));
                rules.push(rule(Selects::Mark { mark, mask }, table));
                plan.routing.routes.push(default_route(path, table));
            }
            plan.routing.routes.extend(kept);
            plan.marks.extend(uplink.index.map(|index| (index, mark)));
            let uplink = (mark, path.ifname.clone());
            if !plan.uplinks.contains(&uplink) {
                plan.uplinks.push(uplink);
            }
        }
        // In the order in which they are tried, that of the first kind only once.
        rules.sort_by_key(rank);
        rules.dedup();
        plan.routing.rules.extend(rules);
    }
    plan.numbers = numbers;
    Ok(plan)
}

/// Whether no address of these uplinks may have a rule.
fn are_held<'a>(uplinks: impl Iterator<Item = &'a Uplink<'a>>, held: &BTreeSet<IpAddr>) -> bool {
    let whole = uplinks.filter(|uplink| uplink.whole);
    let mut addresses = whole.flat_map(|uplink| &uplink.path.addresses).peekable();
    addresses.peek().is_some() && addresses.all(|address| held.contains(address))
}

fn table(number: u32) -> u32 {
    TABLE_BASE + number
}

/// While the device is down, that nothing leads there. It does not stand behind the other one for good: the kernel takes
/// that one away with the device, this one never, and when nobody is left to put it back, the main table decides.
fn default_route(path: &Path, table: u32) -> UplinkRoute {
    UplinkRoute {
        ipv6: path.key.ipv6,
        table,
        host: None,
        to: by_gateway(path).unwrap_or(To::Unreachable),
    }
}

/// Routes to destinations that the main table sends out by another uplink.
fn kept_routes(path: &Path, table: u32, kept: &[Kept]) -> Vec<UplinkRoute> {
    let ipv6 = path.key.ipv6;
    let by_others = kept
        .iter()
        .filter(|kept| kept.host.is_ipv6() == ipv6 && kept.ifindex != path.key.ifindex);
    let to = by_gateway(path);
    let routes = by_others.filter_map(|kept| {
        Some(UplinkRoute {
            ipv6,
            table,
            host: Some(kept.host),
            to: to.clone()?,
        })
    });
    routes.collect()
}

fn by_gateway(path: &Path) -> Option<To> {
    let gateway = path.key.gateway.filter(|_| path.up)?;
    Some(To::Gateway {
        ifindex: path.key.ifindex,
        gateway,
        preferred_source: path.preferred_source,
        options: path.options.clone(),
    })
}

impl Routing {
    /// Addresses that have a rule.
    pub(crate) fn addresses(&self) -> BTreeSet<IpAddr> {
        let rules = self.rules.iter();
        let of = rules.filter_map(|rule| match rule.selects {
            Selects::From(address) => Some(address),
            _ => None,
        });
        of.collect()
    }

    /// Numbers of the devices by which routes lead out.
    pub(crate) fn numbers(&self) -> BTreeMap<u32, u32> {
        let routes = self.routes.iter();
        let of = routes.filter_map(|route| match route.to {
            To::Gateway { ifindex, .. } => Some((ifindex, route.table.checked_sub(TABLE_BASE)?)),
            To::Unreachable => None,
        });
        of.collect()
    }
}

/// What is in the kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    /// Of ours, rules in the kernel's order.
    pub routing: Routing,
    /// Whether a rule of others stands behind one of ours of its priority, so that ours decides before it; by
    /// family ([IPv4, IPv6]).
    pub overruled: [bool; 2],
}

impl Found {
    /// Takes note of the rule of others that comes next in the kernel's order.
    pub(crate) fn meet(&mut self, rule: Option<&FibRule>) {
        let Some(rule) = rule else { return };
        let mut ours = self.routing.rules.iter();
        self.overruled[usize::from(rule.ipv6)] |=
            ours.any(|own| own.ipv6 == rule.ipv6 && own.priority == rule.priority);
    }
}

/// What has to be done so that `wanted` is there instead of what is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Changes {
    pub remove_rules: Vec<IpRule>,
    pub add_routes: Vec<UplinkRoute>,
    pub add_rules: Vec<IpRule>,
    pub remove_routes: Vec<UplinkRoute>,
}

impl Changes {
    pub(crate) fn none(&self) -> bool {
        *self == Self::default()
    }
}

/// Where a rule has to stand among those of its family.
fn rank(rule: &IpRule) -> u8 {
    match rule.selects {
        Selects::Kept { .. } => 0,
        Selects::Specific => 1,
        Selects::From(_) => 2,
        Selects::Mark { .. } => 3,
    }
}

/// From what is there, in the kernel's order, to what is wanted.
///
/// Routes come before the rules that lead to them, and go after. What stays is not touched, but a rule that
/// has to stand behind a new one, or behind one of others, is added anew, as the kernel puts a new one behind those
/// of its priority. So is one of IPv6, where a table of ours gets its default route back.
pub(crate) fn changes(found: &Found, wanted: &Routing) -> Changes {
    let mut changes = Changes::default();
    let there = &found.routing;
    for ipv6 in [false, true] {
        let of = |rules: &[IpRule]| -> Vec<IpRule> {
            let rules = rules.iter().filter(|rule| rule.ipv6 == ipv6);
            rules.copied().collect()
        };
        let (have, want) = (of(&there.rules), of(&wanted.rules));
        let new = want.iter().filter(|rule| !have.contains(rule));
        let mut first_new = new.map(rank).min();
        let mut highest = 0;
        for rule in &have {
            // One that stands too far behind counts as new: all that belong behind it are behind it then.
            if rank(rule) < highest {
                first_new = Some(first_new.map_or(rank(rule), |r| r.min(rank(rule))));
            }
            highest = highest.max(rank(rule));
        }
        let mut kept: Vec<IpRule> = Vec::new();
        for rule in have {
            let stays = !found.overruled[usize::from(ipv6)]
                && first_new.is_none_or(|first| rank(&rule) <= first);
            // One that is there twice is there once too often.
            match want.contains(&rule) && stays && !kept.contains(&rule) {
                true => kept.push(rule),
                false => changes.remove_rules.push(rule),
            }
        }
        let new = want.into_iter().filter(|rule| !kept.contains(rule));
        let added = changes.add_rules.len();
        changes.add_rules.extend(new);
        // By IPv6, sockets that have looked a route up in another table, while ours was empty, go on by that until a rule
        // comes or goes: routes of one table do not touch what was found in another.
        let is_default = |route: &UplinkRoute| {
            route.ipv6 && route.host.is_none() && matches!(route.to, To::Gateway { .. })
        };
        let is_filled = |table: u32| {
            let mut routes = there.routes.iter();
            routes.any(|route| is_default(route) && route.table == table)
        };
        let mut defaults = wanted.routes.iter().filter(|route| is_default(route));
        let is_due = ipv6 && defaults.any(|route| !is_filled(route.table));
        if let Some(last) = kept
            .last()
            .filter(|_| is_due && changes.add_rules.len() == added)
        {
            changes.add_rules.push(*last);
            changes.remove_rules.push(*last);
        }
    }
    let missing = wanted.routes.iter().filter(|r| !there.routes.contains(r));
    changes.add_routes = missing.cloned().collect();
    // A route that takes another one's place does so at once (see [`super::uplinks`]).
    let replaced = |route: &UplinkRoute| {
        let kind = |r: &UplinkRoute| (r.table, r.ipv6, r.host, r.to.metric());
        wanted.routes.iter().any(|r| kind(r) == kind(route))
    };
    let gone = there.routes.iter().filter(|route| !replaced(route));
    changes.remove_routes = gone.cloned().collect();
    changes
}

/// The rules and routes as ip(8) would have them typed, for people.
pub(crate) fn describe(routing: &Routing, device: impl Fn(u32) -> String) -> Vec<String> {
    let family = |ipv6| if ipv6 { "ip -6" } else { "ip" };
    let table = |table| match table {
        TABLE_MAIN => "main".to_owned(),
        other => other.to_string(),
    };
    let routes = routing.routes.iter().map(|route| {
        let (family, table) = (family(route.ipv6), table(route.table));
        let prefix = match route.host {
            Some(host) => host.to_string(),
            None => "default".to_owned(),
        };
        match &route.to {
            To::Unreachable => format!("{family} route add unreachable {prefix} table {table}"),
            To::Gateway {
                ifindex,
                gateway,
                preferred_source,
                options,
            } => {
                let source = preferred_source.map_or(String::new(), |s| format!(" src {s}"));
                let device = device(*ifindex);
                let metric = match options.metric {
                    0 => String::new(),
                    metric => format!(" metric {metric}"),
                };
                let more = match options.metrics.is_empty() && options.realms.is_none() {
                    true => "",
                    false => " # and the metrics and realms of the main table's route",
                };
                format!(
                    "{family} route add {prefix} via {gateway} dev {device}{source}{metric} table {table}{more}"
                )
            }
        }
    });
    let users = format!("uidrange {}-{}", EVERYBODY.0, EVERYBODY.1);
    let rules = routing.rules.iter().map(|rule| {
        let selects = match rule.selects {
            Selects::Specific => format!("from all {users}"),
            Selects::From(address) => format!("from {address}"),
            Selects::Mark { mark, mask } => format!("fwmark {mark:#x}/{mask:#x} {users}"),
            Selects::Kept { mark, mask } => format!("fwmark {mark:#x}/{mask:#x}"),
        };
        let suppress = match rule.selects {
            Selects::Specific | Selects::Kept { .. } => " suppress_prefixlength 0",
            _ => "",
        };
        format!(
            "{} rule add priority {} {selects} lookup {}{suppress}",
            family(rule.ipv6),
            rule.priority,
            table(rule.table)
        )
    });
    routes.chain(rules).collect()
}

#[cfg(test)]
mod tests;
