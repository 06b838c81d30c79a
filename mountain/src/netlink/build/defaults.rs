//! Default routes by uplinks with addresses of their own: groups whose flows choose when they start.

use super::super::snapshot::{Route, UNICAST};
use super::super::Filter;
use super::{is_conditional, is_ipv6, key, Builder, TABLE_MAIN};
use crate::steer::topology::{Group, Kind, Member, Path, MAX_GROUPS, MAX_GROUP_PATHS, MAX_PATHS};

impl Builder<'_> {
    /// Whether sockets that this multipath route sends out get an address of the uplink.
    pub(super) fn kind(&self, route: &Route, members: &[Member]) -> Kind {
        let paths: Vec<&Path> = members
            .iter()
            .map(|member| &self.topology.paths[member.path])
            .collect();
        // Whatever is more specific than a default route is found in the main table before an
        // uplink's own is looked up (`steer::start`).
        let is_default = route.table == TABLE_MAIN && route.prefix.prefix_len() == 0;
        match is_default && route.preferred_source.is_none() && own_sources(&paths).is_ok() {
            true => Kind::StartAndMove,
            false => Kind::Move,
        }
    }

    /// Makes a group of the default routes that differ only in metric, if that was asked for.
    pub(super) fn adopt_by_metric(&mut self, ipv6: bool, filter: &Filter) {
        let snapshot = self.snapshot;
        let mut defaults: Vec<&Route> = snapshot
            .routes
            .iter()
            .filter(|route| {
                route.table == TABLE_MAIN
                    && route.prefix.prefix_len() == 0
                    && is_ipv6(&route.prefix) == ipv6
                    && route.kind == UNICAST
                    && !is_conditional(route)
            })
            .collect();
        defaults.sort_by_key(|route| route.metric);
        let [best, _, ..] = defaults[..] else { return };
        let known = self.adopted.contains_key(&best.prefix);
        if known || !filter.admits(&best.prefix) || defaults.iter().any(|route| route.multipath) {
            return;
        }
        let listed: Vec<String> = defaults
            .iter()
            .filter_map(|route| {
                let link = snapshot.links.get(&route.hops.first()?.ifindex)?;
                Some(format!("{} (metric {})", link.ifname, route.metric))
            })
            .collect();
        let listed = listed.join(", ");
        let adopted = match self.uplinks(&defaults) {
            Ok(_) if !filter.adopt => Err(format!(
                "default routes by {listed} differ only in metric: `mountain up --adopt` lets new flows choose"
            )),
            Ok(paths) => self.adopt_uplinks(best, paths),
            Err(reason) if filter.adopt => Err(format!("default routes by {listed}: {reason}")),
            Err(_) => Ok(()),
        };
        if let Err(reason) = adopted {
            self.skip(best, &reason);
        }
    }

    /// The uplinks of default routes, the preferred one first, one for each device.
    fn uplinks(&self, routes: &[&Route]) -> Result<Vec<Path>, String> {
        let mut paths: Vec<Path> = Vec::new();
        let mut reasons = Vec::new();
        for route in routes {
            let [hop] = &route.hops[..] else { continue };
            let Some(link) = self.snapshot.links.get(&hop.ifindex) else {
                continue;
            };
            let on_device = |path: &Path| path.key.ifindex == hop.ifindex;
            if hop.encapsulated || hop.blackhole || paths.iter().any(on_device) {
                continue;
            }
            if hop.gateway.is_none() {
                reasons.push(format!("{} has no gateway to measure", link.ifname));
                continue;
            }
            let mut path = self.new_path(key(hop, route), link, hop);
            path.preferred_source = route.preferred_source;
            if path.addresses.is_empty() {
                reasons.push(format!("{} has no address of its own", link.ifname));
                continue;
            }
            paths.push(path);
        }
        own_sources(&paths.iter().collect::<Vec<_>>()).map_err(|reason| {
            reasons.push(reason);
            reasons.join("; ")
        })?;
        match paths.len() {
            0..=1 => {
                reasons.push("fewer than two uplinks can be used".to_owned());
                Err(reasons.join("; "))
            }
            2..=MAX_GROUP_PATHS => Ok(paths),
            n => Err(format!(
                "{n} uplinks, at most {MAX_GROUP_PATHS} are handled"
            )),
        }
    }

    fn adopt_uplinks(&mut self, best: &Route, paths: Vec<Path>) -> Result<(), String> {
        self.check_rules(best)?;
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
            kind: Kind::Start,
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

    use super::super::super::nexthop::NextHop;
    use super::super::super::snapshot::{Action, Address, Link, Rule, Snapshot};
    use super::super::build;
    use super::*;
    use crate::steer::topology::Topology;

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
        assert_eq!(topology.groups[0].kind, Kind::Start);
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
        let mut add = |ifindex, master, bridge| {
            let link = Link {
                master,
                bridge,
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
        home.links.get_mut(&3).unwrap().bridge = true;
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
        assert_eq!(topology.groups[0].kind, Kind::StartAndMove);
        assert!(topology.starts());

        home.routes[0].preferred_source = Some(ip("203.0.113.1"));
        let topology = build(&home, &Filter::default());
        assert_eq!(topology.groups[0].kind, Kind::Move);
        assert!(!topology.starts());

        home.routes[0].preferred_source = None;
        home.routes[0].prefix = "10.0.0.0/8".parse().unwrap();
        let topology = build(&home, &Filter::default());
        assert_eq!(topology.groups[0].kind, Kind::Move, "not a default route");
    }
}
