// SPDX-License-Identifier: GPL-2.0-or-later
//! Default routes by uplinks with addresses of their own: groups whose flows choose when they start.

use super::{is_conditional, is_ipv6, key, Builder};
use crate::netlink::kinds;
use crate::netlink::snapshot::{Preference, Route, TABLE_MAIN, THROW, UNICAST};
use crate::topology::read::Filter;
use crate::topology::rules;
use crate::topology::{
    Group, Kind, Member, Path, Suspended, MAX_GROUPS, MAX_GROUP_PATHS, MAX_PATHS,
};

/// Candidates for a group of uplinks.
#[derive(Default)]
struct Uplinks {
    /// One for each device, the preferred one first.
    paths: Vec<Path>,
    /// Devices of default routes that are none, and why.
    reasons: Vec<(u32, String)>,
}

impl Uplinks {
    fn has(&self, ifindex: u32) -> bool {
        self.paths.iter().any(|path| path.key.ifindex == ifindex)
    }

    /// Whether they can be told apart, and are neither too few nor too many.
    fn check(&self) -> Result<(), String> {
        let reasons = self.reasons.iter().map(|(_, reason)| reason.clone());
        let mut reasons: Vec<String> = reasons.collect();
        own_sources(&self.paths.iter().collect::<Vec<_>>()).map_err(|reason| {
            reasons.push(reason);
            reasons.join("; ")
        })?;
        match self.paths.len() {
            0..=1 => {
                reasons.push("fewer than two uplinks can be used".to_owned());
                Err(reasons.join("; "))
            }
            2..=MAX_GROUP_PATHS => Ok(()),
            n => Err(format!(
                "{n} uplinks, at most {MAX_GROUP_PATHS} are handled"
            )),
        }
    }
}

/// In which order the kernel takes default routes: the lowest first.
fn rank(route: &Route) -> (u32, Preference) {
    (route.metric, route.preference)
}

impl Builder<'_> {
    /// Whether sockets that this multipath route sends out get an address of the uplink.
    pub(super) fn kind(&self, route: &Route, members: &[Member]) -> Kind {
        let paths: Vec<&Path> = members
            .iter()
            .map(|member| &self.topology.paths[member.path])
            .collect();
        // Whatever is more specific than a default route is found in the main table before an
        // uplink's own is looked up (`placement::routing`).
        let is_default = route.table == TABLE_MAIN && route.prefix.prefix_len() == 0;
        let starts = is_default
            && route.preferred_source.is_none()
            && own_sources(&paths).is_ok()
            && self.check_throws(is_ipv6(&route.prefix)).is_ok();
        match starts {
            true => Kind::PlaceAndMove,
            false => Kind::Move,
        }
    }

    /// Refuses a main table with `throw` routes. What they throw goes on to the rules behind the main table, and an
    /// uplink's own table, which stands before those, would catch it.
    fn check_throws(&self, ipv6: bool) -> Result<(), String> {
        let throws = |route: &&Route| {
            route.table == TABLE_MAIN && route.kind == THROW && is_ipv6(&route.prefix) == ipv6
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
            route.table == TABLE_MAIN
                && route.prefix.prefix_len() == 0
                && is_ipv6(&route.prefix) == ipv6
        });
        let (conditional, mut defaults): (Vec<&Route>, Vec<&Route>) =
            defaults.partition(|route| is_conditional(route));
        defaults.sort_by_key(|route| rank(route));
        let [best, _, ..] = defaults[..] else { return };
        if self.adopted.contains_key(&best.prefix) || !filter.admits(&best.prefix) {
            return;
        }
        let uplinks = self.uplinks(&defaults, filter);
        let preferred = self.check_preferred(&defaults, &conditional, &uplinks);
        // Those are for `adopt`, which says why it did not take them.
        if defaults.iter().any(|route| route.multipath) {
            if let Err(why) = preferred {
                self.suspend(ipv6, uplinks.paths, why, false);
            }
            return;
        }
        let diverted = rules::diversion(snapshot, ipv6);
        let told = uplinks.check().and_then(|()| self.check_throws(ipv6));
        let adopted = match (told, preferred, diverted) {
            (Ok(()), Ok(()), None) if !filter.adopt => Err(format!(
                "default routes by {} differ only in metric: `mountain up --adopt` lets new flows choose",
                self.listed(&defaults)
            )),
            _ if !filter.adopt => Ok(()),
            (_, Err(why), _) => {
                self.suspend(ipv6, uplinks.paths, why.clone(), false);
                Err(why)
            }
            (Ok(()), Ok(()), Some(rule)) => {
                let why = format!(
                    "the routing rule of priority {} takes unmarked packets elsewhere: new flows are left to it",
                    rule.priority
                );
                self.suspend(ipv6, uplinks.paths, why.clone(), true);
                Err(why)
            }
            (Ok(()), Ok(()), None) => self.adopt_uplinks(best, uplinks.paths, filter),
            (Err(why), ..) => {
                Err(format!("default routes by {}: {why}", self.listed(&defaults)))
            }
        };
        if let Err(reason) = adopted {
            self.skip(best, &reason);
        }
    }

    fn listed(&self, routes: &[&Route]) -> String {
        let listed = routes.iter().filter_map(|route| {
            let link = self.snapshot.links.get(&route.hops.first()?.ifindex)?;
            Some(format!("{} (metric {})", link.ifname, route.metric))
        });
        listed.collect::<Vec<_>>().join(", ")
    }

    /// The uplinks of default routes, the preferred one first, one for each device; and why others are none.
    fn uplinks(&self, routes: &[&Route], filter: &Filter) -> Uplinks {
        let mut uplinks = Uplinks::default();
        let unicast = routes.iter().filter(|route| route.kind == UNICAST);
        for (route, hop) in unicast.flat_map(|r| r.hops.iter().map(move |hop| (*r, hop))) {
            let Some(link) = self.snapshot.links.get(&hop.ifindex) else {
                continue;
            };
            let name = &link.ifname;
            if hop.encapsulated || hop.blackhole || uplinks.has(hop.ifindex) {
                continue;
            }
            let wire = match filter.named.contains(name) {
                true => Ok(()),
                false => kinds::is_wire(self.snapshot, hop.ifindex, hop.gateway),
            };
            if let Err(why) = wire {
                uplinks.reasons.push((hop.ifindex, why));
                continue;
            }
            if hop.gateway.is_none() {
                let why = format!("{name} has no gateway to measure");
                uplinks.reasons.push((hop.ifindex, why));
                continue;
            }
            let mut path = self.new_path(key(hop, route), link, hop);
            path.preferred_source = route.preferred_source;
            if path.addresses.is_empty() {
                let why = format!("{name} has no address of its own");
                uplinks.reasons.push((hop.ifindex, why));
                continue;
            }
            uplinks.paths.push(path);
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
    ) -> Result<(), String> {
        let best = defaults.first().map(|route| rank(route));
        let ties = defaults.iter().filter(|route| Some(rank(route)) == best);
        for route in ties {
            self.check_ours(route, uplinks).map_err(|(by, why)| {
                let metric = route.metric;
                format!(
                    "the kernel prefers the default route {by} (metric {metric}){why}: new flows are left to it"
                )
            })?;
        }
        for route in conditional {
            let of = match route.source {
                Some(source) => format!("from {source}"),
                None => {
                    return Err(format!(
                        "a default route is only for TOS {:#04x}",
                        route.tos
                    ))
                }
            };
            self.check_ours(route, uplinks)
                .map_err(|(by, why)| format!("packets {of} have a default route {by}{why}"))?;
        }
        Ok(())
    }

    /// Whether all of a route's next hops are on devices of uplinks; else where it leads, and what that is.
    fn check_ours(&self, route: &Route, uplinks: &Uplinks) -> Result<(), (String, String)> {
        if route.kind != UNICAST || route.hops.is_empty() {
            return Err(("that drops".to_owned(), String::new()));
        }
        for hop in &route.hops {
            let link = self.snapshot.links.get(&hop.ifindex);
            let name = link.map_or("a device that is gone", |link| &link.ifname);
            if hop.encapsulated || hop.blackhole {
                let why = ", which encapsulates or drops".to_owned();
                return Err((format!("by {name}"), why));
            }
            if !uplinks.has(hop.ifindex) {
                let mut reasons = uplinks.reasons.iter();
                let reason = reasons.find(|(ifindex, _)| *ifindex == hop.ifindex);
                let why = reason.map_or(String::new(), |(_, why)| format!(", and {why}"));
                return Err((format!("by {name}"), why));
            }
        }
        Ok(())
    }

    /// Remembers uplinks of which flows may be in progress that new flows do not choose from at the moment.
    fn suspend(&mut self, ipv6: bool, paths: Vec<Path>, why: String, by_rule: bool) {
        if !paths.is_empty() {
            self.topology.suspended.push(Suspended {
                ipv6,
                paths,
                why,
                by_rule,
            });
        }
    }

    fn adopt_uplinks(
        &mut self,
        best: &Route,
        paths: Vec<Path>,
        filter: &Filter,
    ) -> Result<(), String> {
        self.check_rules(best)?;
        let ipv6 = is_ipv6(&best.prefix);
        if let Some(rule) = rules::marked_apart(self.snapshot, ipv6, filter.mark_mask) {
            return Err(format!(
                "the routing rule of priority {} tells packets apart by bits of the mark that new flows would \
                 bear: set other ones, `mark_mask` in [placement]",
                rule.priority
            ));
        }
        if self.topology.groups.len() >= MAX_GROUPS {
            return Err(format!("more than {MAX_GROUPS} groups on this host"));
        }
        let new = paths
            .iter()
            .filter(|path| !self.path_index.contains_key(&path.key));
        if self.topology.paths.len() + new.count() > MAX_PATHS {
            return Err(format!("more than {MAX_PATHS} paths on this host"));
        }
        let mut members = Vec::new();
        for path in paths {
            let index = match self.path_index.get(&path.key) {
                Some(&index) => {
                    self.topology.paths[index] = path;
                    index
                }
                None => {
                    self.path_index.insert(path.key, self.topology.paths.len());
                    self.topology.paths.push(path);
                    self.topology.paths.len() - 1
                }
            };
            members.push(Member {
                path: index,
                weight: 1,
            });
        }
        members.sort_by_key(|member| member.path);
        self.topology.groups.push(Group {
            kind: Kind::Place,
            table: TABLE_MAIN,
            prefixes: vec![best.prefix],
            members,
        });
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
mod tests {
    use std::net::IpAddr;

    use super::super::build;
    use super::*;
    use crate::netlink::nexthop::NextHop;
    use crate::netlink::snapshot::{Action, Address, Link, Rule, Snapshot};
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
            source: None,
            tos: 0,
            metric,
            preference: Preference::Medium,
            preferred_source: None,
            kind: UNICAST,
            multipath: false,
            hops: vec![NextHop {
                ifindex,
                gateway: Some(ip(gateway)),
                weight: 1,
                ..NextHop::default()
            }],
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
            ifname: name.into(),
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
            rules: vec![Rule {
                priority: 32766,
                action: Action::Table(TABLE_MAIN),
                ..Rule::default()
            }],
            ..Snapshot::default()
        }
    }

    fn adopted(snapshot: &Snapshot) -> Topology {
        let filter = Filter {
            adopt: true,
            ..Filter::default()
        };
        build(snapshot, &filter)
    }

    fn devices(topology: &Topology, group: usize) -> Vec<&str> {
        let members = topology.groups[group].members.iter();
        members.map(|m| &*topology.paths[m.path].ifname).collect()
    }

    #[test]
    fn routes_that_differ_in_metric_are_a_group_when_asked_for() {
        let mut home = home();
        home.routes[1].preferred_source = Some(ip("192.0.2.10"));
        let topology = adopted(&home);
        assert_eq!(topology.groups.len(), 1, "{:?}", topology.skipped);
        assert_eq!(topology.groups[0].kind, Kind::Place);
        assert_eq!(
            devices(&topology, 0),
            ["fibre", "lte"],
            "the preferred first"
        );
        assert!(topology.groups[0].members.iter().all(|m| m.weight == 1));
        assert_eq!(topology.paths[0].preferred_source, Some(ip("192.0.2.10")));
        assert_eq!(topology.paths[1].preferred_source, None);
        assert_eq!(topology.paths[1].addresses, [ip("198.51.100.7")]);
        assert_eq!(topology.rule_priorities, [32765, 32765]);
        assert_eq!(topology.skipped, Vec::<String>::new());

        let not = build(&home, &Filter::default());
        assert_eq!(not.groups, []);
        assert_eq!(
            not.skipped,
            ["0.0.0.0/0 metric 100: default routes by fibre (metric 100), lte (metric 600) differ \
              only in metric: `mountain up --adopt` lets new flows choose"]
        );
    }

    #[test]
    fn an_uplink_without_an_address_is_left_out_of_three() {
        let mut home = home();
        let third = home.links[&3].clone();
        home.links.insert(4, third);
        home.routes.push(default_by(4, "203.0.113.1", 700));
        assert_eq!(devices(&adopted(&home), 0), ["fibre", "lte"]);
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
        home.links.get_mut(&3).unwrap().kind = Some("bridge".to_owned());
        let mut inner = adopted(&home).inner_devices;
        inner.sort_unstable();
        assert_eq!(inner, [4, 6, 7]);
    }

    #[test]
    fn what_cannot_be_told_apart_is_not_adopted() {
        let refused = |change: &dyn Fn(&mut Snapshot), why: &str| {
            let mut home = home();
            change(&mut home);
            let topology = adopted(&home);
            assert_eq!(topology.groups, [], "{why}");
            let said = topology.skipped.join("\n");
            assert!(said.contains(why), "{said:?} does not say {why:?}");
        };
        refused(
            &|home| home.addresses[1].address = ip("192.0.2.10"),
            "fibre and lte have the same address 192.0.2.10",
        );
        refused(
            &|home| {
                home.addresses.pop();
            },
            "lte has no address of its own",
        );
        refused(
            &|home| home.routes[0].hops[0].gateway = None,
            "lte has no gateway to measure; fewer than two uplinks",
        );
        refused(
            &|home| home.routes[0].hops[0].ifindex = 2,
            "fewer than two uplinks",
        );
        let throw = Route {
            prefix: "198.51.100.0/24".parse().unwrap(),
            kind: THROW,
            hops: Vec::new(),
            ..default_by(2, "192.0.2.1", 0)
        };
        refused(
            &|home| home.routes.push(throw.clone()),
            "throw route to 198.51.100.0/24",
        );
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
            ifname: "vpn".into(),
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
        assert!(!suspended.by_rule);
        let paths = suspended.paths.iter().map(|path| path.ifname.clone());
        (paths.collect(), suspended.why.clone())
    }

    #[test]
    fn a_better_default_route_by_a_tunnel_suspends_all() {
        let (paths, why) = suspended(&with_vpn("tun", 50));
        assert_eq!(paths, ["fibre", "lte"]);
        assert_eq!(
            why,
            "the kernel prefers the default route by vpn (metric 50), and vpn counts as a tunnel (tun): \
             new flows are left to it"
        );
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
        let filter = Filter {
            adopt: true,
            named: vec!["vpn".into()],
            ..Filter::default()
        };
        let named = build(&with_vpn("tun", 50), &filter);
        assert_eq!(devices(&named, 0), ["vpn", "fibre", "lte"]);
        // Who did not ask for it is told nothing.
        let unasked = build(&with_vpn("tun", 50), &Filter::default());
        assert_eq!((unasked.skipped.len(), unasked.suspended.len()), (0, 0));
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
        assert_eq!(
            devices(&adopted(&home(Preference::Low)), 0),
            ["fibre", "lte"]
        );
    }

    #[test]
    fn a_kill_switch_or_a_default_for_some_packets_suspends_all() {
        let mut home = with_vpn("tun", 700);
        home.routes[2].kind = 7; // RTN_UNREACHABLE
        assert_eq!(adopted(&home).groups.len(), 1, "behind the uplinks");
        home.routes[2].metric = 50;
        let (_, why) = suspended(&home);
        assert!(
            why.contains("default route that drops (metric 50)"),
            "{why}"
        );

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
        let with_rule = |rule: Rule, metric| {
            let mut home = with_vpn("tun", metric);
            home.routes[2].table = 51820;
            home.rules.insert(0, rule);
            home
        };
        let wg_quick = Rule {
            priority: 32764,
            action: Action::Table(51820),
            fwmark: Some((51820, u32::MAX)),
            invert: true,
            ..Rule::default()
        };
        let topology = adopted(&with_rule(wg_quick.clone(), 0));
        assert_eq!(topology.groups, []);
        let suspended = &topology.suspended[0];
        assert!(suspended.by_rule, "what still meets ours is the VPN's own");
        assert!(suspended.why.contains("rule of priority 32764"));
        let harmless = [
            // Of one user, of one network, of marked packets; and with nothing behind it.
            Rule {
                uid: Some((1000, 1000)),
                ..wg_quick.clone()
            },
            Rule {
                src: Some("10.0.0.0/8".parse().unwrap()),
                invert: false,
                fwmark: None,
                ..wg_quick.clone()
            },
            Rule {
                invert: false,
                ..wg_quick.clone()
            },
            Rule {
                action: Action::Table(7),
                ..wg_quick.clone()
            },
            Rule {
                suppress_length: Some(0),
                ..wg_quick.clone()
            },
        ];
        for rule in harmless {
            let topology = adopted(&with_rule(rule.clone(), 0));
            assert_eq!(topology.groups.len(), 1, "{rule:?}: {:?}", topology.skipped);
        }
        let drops = Rule {
            action: Action::Drop,
            ..wg_quick.clone()
        };
        assert_eq!(adopted(&with_rule(drops, 0)).suspended.len(), 1);

        let filter = Filter {
            adopt: true,
            mark_mask: 0xff00_0000,
            ..Filter::default()
        };
        for (mark, theirs, forbids) in [
            (0, u32::MAX, true), // the unmarked ones only
            (0x0200_0000, 0xff00_0000, true),
            (51820, u32::MAX, false),
            (1, 0xff, false),
        ] {
            let rule = Rule {
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

    #[test]
    fn families_are_adopted_apart_and_router_advertisements_may_share_a_metric() {
        let mut home = home();
        home.routes.push(default_by(2, "fe80::1", 1024));
        home.routes.push(default_by(3, "fe80::2", 1024));
        for (ifindex, text) in [(2, "2001:db8:1::5"), (3, "2001:db8:2::5"), (2, "fe80::5")] {
            home.addresses.push(address(ifindex, text));
        }
        home.rules.push(Rule {
            ipv6: true,
            priority: 32766,
            action: Action::Table(TABLE_MAIN),
            ..Rule::default()
        });
        let topology = adopted(&home);
        assert_eq!(topology.groups.len(), 2, "{:?}", topology.skipped);
        assert_eq!(devices(&topology, 1), ["fibre", "lte"]);
        let six = topology.groups[1].members[0].path;
        assert_eq!(topology.paths[six].addresses, [ip("2001:db8:1::5")]);
    }

    /// A multipath default, with sources of the uplinks or one for all.
    #[test]
    fn an_uplink_whose_only_address_is_going_keeps_it_but_is_not_fresh() {
        let mut home = home();
        home.addresses[1].fresh = false;
        let fresh = |home: &Snapshot| {
            let paths = adopted(home).paths;
            let fresh = paths.iter().map(|p| (p.addresses.len(), p.fresh));
            fresh.collect::<Vec<_>>()
        };
        assert_eq!(fresh(&home), [(1, true), (1, false)]);
        home.addresses.push(address(3, "198.51.100.8"));
        assert_eq!(fresh(&home), [(1, true), (2, true)]);
    }

    #[test]
    fn a_multipath_default_chooses_at_the_start_where_sources_differ() {
        let mut home = home();
        let hop = home.routes.remove(0).hops.remove(0);
        home.routes[0].hops.push(hop);
        home.routes[0].multipath = true;
        let topology = build(&home, &Filter::default());
        assert_eq!(topology.groups[0].kind, Kind::PlaceAndMove);
        assert!(topology.places());

        home.routes[0].preferred_source = Some(ip("203.0.113.1"));
        let topology = build(&home, &Filter::default());
        assert_eq!(topology.groups[0].kind, Kind::Move);
        assert!(!topology.places());

        home.routes[0].preferred_source = None;
        home.routes[0].prefix = "10.0.0.0/8".parse().unwrap();
        let topology = build(&home, &Filter::default());
        assert_eq!(topology.groups[0].kind, Kind::Move, "not a default route");
    }
}
