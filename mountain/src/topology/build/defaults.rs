// SPDX-License-Identifier: GPL-2.0-or-later
//! Default routes by uplinks with addresses of their own: groups whose flows choose when they start.

use std::collections::BTreeSet;

use libc::{RTN_THROW, RTN_UNICAST};

use super::addresses::next_hops;
use super::{is_conditional, key, Builder};
use crate::netlink::kinds::{self, Wire};
use crate::netlink::link::Link;
use crate::netlink::nexthop::NextHop;
use crate::netlink::snapshot::{Preference, Route, TABLE_MAIN};
use crate::netlink::xfrm::Policy;
use crate::topology::read::Filter;
use crate::topology::rules;
use crate::topology::{
    Group, Kind, Member, Path, Suspended, MAX_GROUPS, MAX_GROUP_PATHS, NOT_IN_MAIN,
};

/// NetworkManager adds so much to the metrics of a device while its connectivity check has not found the Internet there
/// (_dev_default_route_metric_penalty_get() in src/core/devices/nm-device.c).
const DEMOTED: u32 = 20_000;

/// Candidates for a group of uplinks.
#[derive(Default)]
struct Uplinks<'a> {
    /// One for each device, the preferred one first.
    paths: Vec<Path>,
    /// Default routes by devices that are none, and why.
    reasons: Vec<(&'a Route, u32, Reason)>,
    /// One of them may show to be one when its bridge has met the gateway.
    unlearned: bool,
}

/// Why a device is no uplink, or what the kernel prefers instead of one.
struct Reason {
    why: String,
    /// It is one all the same, and lacks something at the moment.
    passes: bool,
    /// It may show to be one when its bridge has met the gateway.
    unlearned: bool,
}

impl Reason {
    fn lasting(why: String) -> Self {
        Self {
            why,
            passes: false,
            unlearned: false,
        }
    }
}

impl Uplinks<'_> {
    fn has(&self, ifindex: u32) -> bool {
        self.paths.iter().any(|path| path.key.ifindex == ifindex)
    }

    /// Whether they can be told apart, and are neither too few nor too many.
    fn check(&self) -> Result<(), String> {
        let because = |last: &str| {
            let reasons = self.reasons.iter().map(|(.., reason)| reason.why.as_str());
            reasons.chain([last]).collect::<Vec<_>>().join("; ")
        };
        let paths: Vec<&Path> = self.paths.iter().collect();
        own_sources(&paths).map_err(|reason| because(&reason))?;
        match paths.len() {
            0..=1 => Err(because("fewer than two uplinks can be used")),
            2..=MAX_GROUP_PATHS => Ok(()),
            n => Err(format!(
                "{n} uplinks, at most {MAX_GROUP_PATHS} are handled"
            )),
        }
    }
}

/// What is said of an uplink whose default route comes after a multipath one.
const BEHIND: &str = "comes after a multipath default route: no new flow chooses it";

/// In which order the kernel takes default routes: the lowest first.
fn rank(route: &Route) -> (u32, Preference) {
    (route.metric, route.preference)
}

impl Builder<'_> {
    /// Whether sockets that this multipath route sends out get an address of the uplink.
    pub(super) fn kind(&mut self, route: &Route, members: &[Member]) -> Kind {
        let paths: Vec<&Path> = members
            .iter()
            .map(|member| &self.topology.paths[member.path])
            .collect();
        // Whatever is more specific than a default route is found in the main table before an
        // uplink's own is looked up (`placement::routing`).
        let starts = route.prefix.prefix_len() == 0
            && route.preferred_source.is_none()
            && own_sources(&paths).is_ok()
            && self.check_throws(route.is_ipv6()).is_ok();
        let ipv6 = route.is_ipv6();
        if starts && route.table != TABLE_MAIN {
            let is_main = |other: &Route| {
                other.table == TABLE_MAIN
                    && other.prefix.prefix_len() == 0
                    && other.is_ipv6() == ipv6
            };
            // Beside one of the main table it is for some packets only.
            if !self.snapshot.routes.iter().any(is_main) {
                self.skip(route, &format!("new flows choose no uplink: {NOT_IN_MAIN}"));
            }
            return Kind::Move;
        }
        if let Some((why, whole)) = self.policed(ipv6, &paths).filter(|_| starts) {
            let why = format!("{why}: new flows are left to it");
            let paths = paths.into_iter().cloned().collect();
            self.skip(route, &why);
            self.suspend(ipv6, paths, why, whole);
            return Kind::Move;
        }
        match (starts, self.check_marks(ipv6)) {
            (true, Ok(())) => {
                // Routes to other prefixes may use the same paths and say something else.
                for hop in next_hops(self.snapshot, route) {
                    if let Some(&index) = self.path_index.get(&key(&hop, route)) {
                        self.topology.paths[index].options = route.options(&hop);
                    }
                }
                Kind::PlaceAndMove
            }
            (true, Err(why)) => {
                self.skip(route, &format!("new flows choose no uplink: {why}"));
                Kind::Move
            }
            (false, _) => Kind::Move,
        }
    }

    /// Refuses rules that a placed flow may meet otherwise than it would without its mark.
    fn check_marks(&self, ipv6: bool) -> Result<(), String> {
        match rules::marked_apart(self.snapshot, ipv6, self.mark_mask) {
            Some(rule) => Err(format!(
                "the routing rule of priority {} tells packets apart by bits of the mark that new flows would \
                 bear: set other ones, `mark_mask` in [placement]",
                rule.priority
            )),
            None => Ok(()),
        }
    }

    /// IPsec policies for packets without a mark, or with one of ours.
    pub(super) fn policies(&self) -> impl Iterator<Item = &Policy> + Clone {
        let ours = self.mark_mask;
        let policies = self.snapshot.policies.iter();
        policies.filter(move |policy| policy.marked & !ours == 0)
    }

    /// Why no flow starts on one of these paths because of IPsec policies, and whether what already runs may go on. They may
    /// be for some sources only, and a flow that starts on another uplink has another one. Policies about some
    /// destinations leave only those to the kernel; one for what leaves by an uplink's device knows nothing of the others.
    fn policed(&self, ipv6: bool, paths: &[&Path]) -> Option<(String, bool)> {
        let policies = self.policies();
        let mut policies = policies.filter(|policy| policy.to.addr().is_ipv6() == ipv6);
        let on = |device| paths.iter().find(|path| Some(path.key.ifindex) == device);
        if let Some(path) = policies.clone().find_map(|policy| on(policy.device)) {
            let device = &path.ifname;
            let why =
                format!("an IPsec policy is for {device} alone (`ip xfrm policy`, `dev {device}`)");
            return Some((why, false));
        }
        policies
            .find(|policy| policy.to.prefix_len() == 0)
            .map(|_| {
                let why = "an IPsec policy is about all destinations (`ip xfrm policy`)";
                (why.to_owned(), true)
            })
    }

    /// Refuses a main table with `throw` routes. What they throw goes on to the rules behind the main table, and an
    /// uplink's own table, which stands before those, would catch it.
    fn check_throws(&self, ipv6: bool) -> Result<(), String> {
        let throws = |route: &&Route| {
            route.table == TABLE_MAIN && route.kind == RTN_THROW && route.is_ipv6() == ipv6
        };
        match self.snapshot.routes.iter().find(throws) {
            Some(route) => Err(format!(
                "the main table has a throw route to {}, and an uplink's own table would catch what it throws",
                route.prefix
            )),
            None => Ok(()),
        }
    }

    /// Makes a group of the default routes that differ only in metric, if that was asked for and the kernel
    /// itself prefers one of them.
    pub(super) fn adopt_by_metric(&mut self, ipv6: bool, filter: &Filter) {
        let snapshot = self.snapshot;
        let defaults = snapshot.routes.iter().filter(|route| {
            route.table == TABLE_MAIN && route.prefix.prefix_len() == 0 && route.is_ipv6() == ipv6
        });
        let (conditional, mut defaults): (Vec<&Route>, Vec<&Route>) =
            defaults.partition(|route| is_conditional(route));
        defaults.sort_by_key(|route| rank(route));
        let Some(&best) = defaults.first() else {
            return;
        };
        if !filter.admits(&best.prefix) {
            return;
        }
        let uplinks = self.uplinks(&defaults, filter);
        self.topology.unlearned |= uplinks.unlearned && filter.adopt;
        let preferred = self.check_preferred(&defaults, &conditional, &uplinks);
        if self.adopted.contains_key(&best.prefix) {
            if preferred.is_ok() {
                self.keep_behind(&defaults, uplinks.paths, filter);
            }
            return;
        }
        let paths: Vec<&Path> = uplinks.paths.iter().collect();
        let diverted = match rules::diversion(snapshot, ipv6) {
            Some(rule) => Some((
                format!(
                    "the routing rule of priority {} takes unmarked packets elsewhere",
                    rule.priority
                ),
                true,
            )),
            None => self.policed(ipv6, &paths),
        };
        if let (Ok(()), [last]) = (&preferred, &uplinks.paths[..]) {
            self.keep_last(best, last, diverted.is_some());
        }
        if defaults.len() < 2 {
            return;
        }
        // Those are for `adopt`, which says why it did not take them.
        if defaults.iter().any(|route| route.multipath) {
            if let Err(reason) = preferred {
                self.suspend_for(ipv6, uplinks.paths, reason);
            }
            return;
        }
        let told = uplinks.check().and_then(|()| self.check_throws(ipv6));
        let adopted = match (told, preferred, diverted) {
            (Ok(()), Ok(()), None) if !filter.adopt => Err(format!(
                "default routes by {} differ only in metric: `mountain up --adopt` lets new flows choose",
                self.listed(&defaults)
            )),
            _ if !filter.adopt => Ok(()),
            (_, Err(reason), _) => {
                let why = reason.why.clone();
                self.suspend_for(ipv6, uplinks.paths, reason);
                Err(why)
            }
            (Ok(()), Ok(()), Some((why, whole))) => {
                let why = format!("{why}: new flows are left to it");
                self.suspend(ipv6, uplinks.paths, why.clone(), whole);
                Err(why)
            }
            (Ok(()), Ok(()), None) => {
                self.tell_left_out(&uplinks);
                self.tell_demoted(&defaults, &uplinks);
                self.adopt_uplinks(best, uplinks.paths)
            }
            (Err(why), ..) => {
                Err(format!("default routes by {}: {why}", self.listed(&defaults)))
            }
        };
        if let Err(reason) = adopted {
            self.skip(best, &reason);
        }
    }

    /// Says why some of the default routes are no uplinks', where the others are adopted.
    fn tell_left_out(&mut self, uplinks: &Uplinks) {
        for (route, ifindex, reason) in &uplinks.reasons {
            if !uplinks.has(*ifindex) {
                self.skip(route, &reason.why);
            }
        }
    }

    /// Says which uplinks are there for when the others are dead.
    fn tell_demoted(&mut self, defaults: &[&Route], uplinks: &Uplinks) {
        for path in uplinks.paths.iter().filter(|path| path.demoted) {
            let leads = |r: &&&Route| r.hops.iter().any(|hop| hop.ifindex == path.key.ifindex);
            if let Some(route) = defaults.iter().find(leads) {
                let why = format!(
                    "{} is used only while all others are dead: its metric is {DEMOTED} or more, as where NetworkManager \
                     finds no Internet",
                    path.ifname
                );
                self.skip(route, &why);
            }
        }
    }

    fn listed(&self, routes: &[&Route]) -> String {
        let listed = routes.iter().filter_map(|route| {
            let link = self.snapshot.links.get(&route.hops.first()?.ifindex)?;
            Some(format!("{} (metric {})", link.name, route.metric))
        });
        listed.collect::<Vec<_>>().join(", ")
    }

    /// Whether a default route of either family leaves by a wire of this host's own, as in no ordinary container.
    fn has_own_wire(&self) -> bool {
        let defaults = self.snapshot.routes.iter();
        let mut hops = defaults
            .filter(|route| route.table == TABLE_MAIN && route.prefix.prefix_len() == 0)
            .flat_map(|route| &route.hops);
        hops.any(|hop| kinds::wire(self.snapshot, hop.ifindex, hop.gateway) == Ok(Wire::Own))
    }

    /// Whether a device that the configuration does not name may be an uplink.
    fn check_wire(&self, link: &Link, hop: &NextHop, has_own_wire: bool) -> Result<(), String> {
        match kinds::wire(self.snapshot, hop.ifindex, hop.gateway)? {
            // A VPN with a namespace of its own looks just like that.
            Wire::Namespace if has_own_wire => Err(format!(
                "{} leads to another network namespace, where a VPN may be (if it is an uplink, name it in [[path]])",
                link.name
            )),
            Wire::Namespace | Wire::Own => Ok(()),
        }
    }

    /// The uplinks of default routes, the preferred one first, one for each device; and why others are none.
    fn uplinks<'r>(&self, routes: &[&'r Route], filter: &Filter) -> Uplinks<'r> {
        let has_own_wire = self.has_own_wire();
        let mut uplinks = Uplinks::default();
        let unicast = routes.iter().filter(|route| route.kind == RTN_UNICAST);
        for (route, hop) in
            unicast.flat_map(|r| next_hops(self.snapshot, r).map(move |hop| (*r, hop)))
        {
            let Some(link) = self.snapshot.links.get(&hop.ifindex) else {
                continue;
            };
            if hop.encapsulated || hop.blackhole || uplinks.has(hop.ifindex) {
                continue;
            }
            let uplink = || -> Result<Path, Reason> {
                let name = &link.name;
                if !filter.named.contains(name) {
                    let judged = self.check_wire(link, &hop, has_own_wire);
                    judged.map_err(|mut why| {
                        let unlearned =
                            kinds::is_unlearned(self.snapshot, hop.ifindex, hop.gateway);
                        if unlearned {
                            why += " (its bridge has not met the gateway yet: `ping` the gateway)";
                        }
                        Reason {
                            unlearned,
                            ..Reason::lasting(why)
                        }
                    })?;
                }
                if hop.gateway.is_none() {
                    let todo = match link.ethernet {
                        true => "",
                        // As NetworkManager makes it for some modems.
                        false => " (give its default route one: `via` the address of the far end)",
                    };
                    let why = format!("{name} has no gateway to measure{todo}");
                    return Err(Reason::lasting(why));
                }
                let mut path = self.new_path(key(&hop, route), link, &hop);
                path.preferred_source = route.preferred_source;
                path.options = route.options(&hop);
                let best = routes.first().map_or(0, |best| best.metric);
                path.demoted = best < DEMOTED && route.metric >= DEMOTED;
                match path.addresses.is_empty() {
                    true => Err(Reason {
                        why: format!("{name} has no address of its own"),
                        passes: true,
                        unlearned: false,
                    }),
                    false => Ok(path),
                }
            };
            match uplink() {
                Ok(path) => uplinks.paths.push(path),
                Err(reason) => {
                    uplinks.unlearned |= reason.unlearned;
                    uplinks.reasons.push((route, hop.ifindex, reason));
                }
            }
        }
        uplinks
    }

    /// Whether the default route that the kernel prefers is an uplink's; of several that tie, each. A default
    /// route for some packets only has to be an uplink's as well.
    fn check_preferred(
        &self,
        defaults: &[&Route],
        conditional: &[&Route],
        uplinks: &Uplinks,
    ) -> Result<(), Reason> {
        let best = defaults.first().map(|route| rank(route));
        let ties = defaults.iter().filter(|route| Some(rank(route)) == best);
        let mut reasons = Vec::new();
        for route in ties {
            if let Err((by, reason)) = self.check_ours(route, uplinks) {
                let (metric, why) = (route.metric, reason.why);
                let why = format!(
                    "the kernel prefers the default route {by} (metric {metric}){why}: new flows are left to it"
                );
                reasons.push(Reason { why, ..reason });
            }
        }
        for route in conditional {
            let Some(source) = route.source else {
                let why = format!("a default route is only for TOS {:#04x}", route.tos);
                reasons.push(Reason::lasting(why));
                continue;
            };
            if let Err((by, reason)) = self.check_ours(route, uplinks) {
                let why = reason.why;
                let why = format!("packets from {source} have a default route {by}{why}");
                reasons.push(Reason { why, ..reason });
            }
        }
        // One that lasts first: it may be a VPN.
        match reasons.into_iter().min_by_key(|reason| reason.passes) {
            Some(reason) => Err(reason),
            None => Ok(()),
        }
    }

    /// Whether all of a route's next hops are on devices of uplinks; else where it leads, and what that is.
    fn check_ours(&self, route: &Route, uplinks: &Uplinks) -> Result<(), (String, Reason)> {
        if route.kind != RTN_UNICAST || route.hops.is_empty() {
            return Err(("that drops".to_owned(), Reason::lasting(String::new())));
        }
        let mut incomplete = None;
        for hop in &route.hops {
            let link = self.snapshot.links.get(&hop.ifindex);
            let name = link.map_or("a device that is gone", |link| &link.name);
            if hop.encapsulated || hop.blackhole {
                let why = ", which encapsulates or drops".to_owned();
                return Err((format!("by {name}"), Reason::lasting(why)));
            }
            if !uplinks.has(hop.ifindex) {
                let mut reasons = uplinks.reasons.iter();
                let reason = reasons.find(|(_, ifindex, _)| *ifindex == hop.ifindex);
                let why = reason.map_or(String::new(), |(.., r)| format!(", and {}", r.why));
                let passes = reason.is_some_and(|(.., r)| r.passes);
                let found = (
                    format!("by {name}"),
                    Reason {
                        why,
                        passes,
                        unlearned: false,
                    },
                );
                match passes {
                    true => incomplete = Some(found),
                    false => return Err(found),
                }
            }
        }
        match incomplete {
            Some(found) => Err(found),
            None => Ok(()),
        }
    }

    /// Remembers uplinks of which flows may be in progress that new flows do not choose from at the moment.
    fn suspend(&mut self, ipv6: bool, paths: Vec<Path>, why: String, whole: bool) {
        if !paths.is_empty() {
            self.topology.suspended.push(Suspended {
                ipv6,
                paths,
                why,
                whole,
            });
        }
    }

    /// The same because of what the kernel prefers. If that is an uplink, which only lacks something at the moment,
    /// running flows on the others keep what they stand on.
    fn suspend_for(&mut self, ipv6: bool, paths: Vec<Path>, reason: Reason) {
        let whole = reason.passes && self.placed[usize::from(ipv6)].is_some();
        self.suspend(ipv6, paths, reason.why, whole);
    }

    /// Goes on with the one that is left of the uplinks that running flows chose from. It says what the main table says;
    /// but when the others are back, the kernel may prefer one of them, and what has begun meanwhile would go there.
    fn keep_last(&mut self, best: &Route, last: &Path, is_diverted: bool) {
        let ipv6 = best.is_ipv6();
        let stands = self.placed[usize::from(ipv6)].is_some()
            && self.check_throws(ipv6).is_ok()
            && self.check_marks(ipv6).is_ok()
            && self.check_rules(best).is_ok();
        let may_choose = stands && !is_diverted && !best.multipath;
        if stands && !(may_choose && self.adopt_uplinks(best, vec![last.clone()]).is_ok()) {
            let why = format!(
                "{} is the only uplink at the moment: new flows go where the kernel sends them",
                last.ifname
            );
            self.suspend(ipv6, vec![last.clone()], why, true);
        }
    }

    /// Keeps what running flows stand on where the best default route is a multipath one that is adopted, on uplinks
    /// behind it that they chose. Says of those behind it that new flows do not choose them, where they might.
    fn keep_behind(&mut self, defaults: &[&Route], uplinks: Vec<Path>, filter: &Filter) {
        let Some(best) = defaults.first() else { return };
        let ipv6 = best.is_ipv6();
        let mut groups = self.topology.groups.iter();
        let is_its = |g: &&Group| g.table == TABLE_MAIN && g.prefixes.contains(&best.prefix);
        let Some(group) = groups.find(is_its) else {
            return;
        };
        let paths = group.members.iter().map(|m| &self.topology.paths[m.path]);
        let members: BTreeSet<u32> = paths.map(|path| path.key.ifindex).collect();
        let places = group.kind.places();
        let placed = self.placed;
        let placed = placed[usize::from(ipv6)].as_ref();
        let is_placed = |path: &Path| placed.is_some_and(|p| p.contains(&path.key.ifindex));

        let told_apart = own_sources(&uplinks.iter().collect::<Vec<_>>()).is_ok();
        let mut behind = uplinks;
        behind.retain(|path| !members.contains(&path.key.ifindex));
        for path in behind.iter().filter(|path| filter.adopt || is_placed(path)) {
            let leads = |r: &&&Route| r.hops.iter().any(|hop| hop.ifindex == path.key.ifindex);
            if let Some(route) = defaults.iter().find(leads) {
                self.skip(route, &format!("{} {BEHIND}", path.ifname));
            }
        }
        behind.retain(is_placed);
        let policed = self.policed(ipv6, &behind.iter().collect::<Vec<_>>());
        if behind.is_empty() || !told_apart || policed.is_some_and(|(_, whole)| !whole) {
            return;
        }
        // With a suspension of the group's own the uplinks behind it share its reason.
        let mut suspended = self.topology.suspended.iter_mut();
        match suspended.find(|s| s.ipv6 == ipv6 && s.whole) {
            Some(suspended) => suspended.paths.extend(behind),
            None if places => self.suspend(ipv6, behind, BEHIND.to_owned(), true),
            None => {}
        }
    }

    fn adopt_uplinks(&mut self, best: &Route, paths: Vec<Path>) -> Result<(), String> {
        self.check_rules(best)?;
        let ipv6 = best.is_ipv6();
        self.check_marks(ipv6)?;
        if self.topology.groups.len() >= MAX_GROUPS {
            return Err(format!("more than {MAX_GROUPS} groups on this host"));
        }
        self.check_room(paths.iter().map(|path| path.key))?;
        let weight = 1;
        let mut members: Vec<Member> = (paths.into_iter())
            .map(|path| Member {
                path: self.put(path),
                weight,
            })
            .collect();
        // They are in the kernel's order.
        let preferred = members.first().map(|member| member.path);
        members.sort_by_key(|member| member.path);
        self.topology.groups.push(Group {
            kind: Kind::Place,
            table: TABLE_MAIN,
            prefixes: vec![best.prefix],
            members,
            preferred,
            told_by: Default::default(),
        });
        self.topology.metrics.push(best.metric);
        self.adopted.insert(best.prefix, TABLE_MAIN);
        Ok(())
    }
}

/// Whether each of these paths has a device and addresses that no other one has: the address of a
/// packet tells its path then.
fn own_sources(paths: &[&Path]) -> Result<(), String> {
    for (i, path) in paths.iter().enumerate() {
        if path.addresses.is_empty() {
            return Err(format!("{} has no address of its own", path.ifname));
        }
        for other in &paths[..i] {
            if other.key.ifindex == path.key.ifindex {
                return Err(format!("two next hops on {}", path.ifname));
            }
            let common = path.addresses.iter().find(|a| other.addresses.contains(a));
            if let Some(address) = common {
                return Err(format!(
                    "{} and {} have the same address {address}",
                    other.ifname, path.ifname
                ));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
