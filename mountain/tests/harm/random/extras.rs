// SPDX-License-Identifier: GPL-2.0-or-later
//! Features of a random host that are drawn last, so that all else is as the seed gave it before there were any.

use super::devices::Made;
use super::dice::Dice;
use super::host::{
    everywhere, prefix, service, uplink_address, Host, Kind, Policy, MAIN, PREFIXES,
};
use super::routes::{Hop, Route};

impl Host {
    pub fn add_extras(&mut self, dice: &mut Dice) {
        type Extra = (Kind, fn(&mut Host, &mut Dice));
        // Those that change routes come after those that make them; the flowtable looks at all of the firewall.
        let all: [Extra; 13] = [
            (Kind::LocalRange, Self::allow_range),
            (Kind::Mtu6, Self::add_mtu6),
            (Kind::ReversePath, Self::add_reverse_path),
            (Kind::RuleForms, Self::add_rule_forms),
            (Kind::SourceRoutes, Self::add_source_routes),
            (Kind::Resilient, Self::add_resilient),
            (Kind::ViaInet6, Self::add_via_inet6),
            (Kind::Metrics, Self::add_metrics),
            (Kind::Bridge, Self::add_bridge),
            (Kind::VerdictMap, Self::add_verdict_map),
            (Kind::FilledSet, Self::add_filled_set),
            (Kind::Dup, Self::add_dup),
            (Kind::Zones, Self::add_zones),
        ];
        for (kind, add) in all {
            if self.has(kind) {
                add(self, dice);
            }
        }
        if self.has(Kind::Flowtable) {
            self.add_flowtable();
        }
    }

    /// Lets sockets be bound to a range that is local as a whole; IPv4 always does.
    fn allow_range(&mut self, _: &mut Dice) {
        let nonlocal = ("ipv6/ip_nonlocal_bind".to_owned(), "1".to_owned());
        self.sysctls.push(nonlocal);
    }

    fn add_reverse_path(&mut self, dice: &mut Dice) {
        let value = dice.pick(&["1", "2"]).to_owned();
        let key = "ipv4/conf/all/rp_filter".to_owned();
        self.sysctls.push((key, value));
    }

    pub fn add_policies(&mut self, dice: &mut Dice) {
        for _ in 0..1 + dice.below(3) {
            let ipv6 = dice.one_in(2);
            let i = dice.below(self.uplinks.len());
            let length = if ipv6 { 64 } else { 24 };
            let own = format!("{}/{length}", uplink_address(i, 0, ipv6));
            let device = dice.one_in(4).then(|| self.uplinks[i].name.clone());
            let to = match dice.one_in(6) {
                true => everywhere(ipv6),
                false => prefix(dice.below(PREFIXES), ipv6),
            };
            let from = match &device {
                Some(name) => format!("{} dev {name}", everywhere(ipv6)),
                None => own,
            };
            self.policies.push(Policy {
                about: to.parse().unwrap(),
                device,
                // That replaces one like it.
                line: format!("xfrm policy update src {from} dst {to} dir out action block"),
            });
        }
    }

    fn add_mtu6(&mut self, dice: &mut Dice) {
        let name = dice.pick(&self.uplinks).name;
        let key = format!("ipv6/conf/{name}/mtu");
        self.device_sysctls.push((key, "1380".to_owned()));
    }

    /// Default routes for what has an uplink's address, and a prefix for what has the service's.
    fn add_source_routes(&mut self, dice: &mut Dice) {
        for (i, uplink) in self.uplinks.clone().into_iter().enumerate() {
            if dice.one_in(3) {
                continue;
            }
            let hop = Hop {
                gateway: Some(uplink.gateways[1][0]),
                device: uplink.name,
                weight: 1,
            };
            let mut route = Route::new(everywhere(true), MAIN, 100, vec![hop]);
            route.from = Some(format!("{}/64", uplink_address(i, 0, true)));
            self.routes.push(route);
        }
        let to = prefix(dice.below(PREFIXES), true);
        let mut route = match dice.one_in(2) {
            true => self.multipath(dice, to, MAIN, 300),
            false => {
                let hop = self.hop(dice, true);
                Route::new(to, MAIN, 300, vec![hop])
            }
        };
        route.from = Some(format!("{}/128", service(true)));
        // The kernel takes none with a source.
        route.nexthop = None;
        self.routes.push(route);
        if !self.rules.is_empty() {
            self.set_onlink();
        }
    }

    /// Of multipath routes, some become resilient.
    fn add_resilient(&mut self, dice: &mut Dice) {
        for (n, route) in (0..).zip(&mut self.routes) {
            if route.is_multipath() && route.from.is_none() && !dice.one_in(3) {
                route.nexthop = route.nexthop.or(Some(5000 + 10 * n));
                route.resilient = true;
            }
        }
    }

    /// Some of IPv4's gateways are known by their IPv6 address.
    fn add_via_inet6(&mut self, dice: &mut Dice) {
        let uplinks = self.uplinks.clone();
        let hops = self.routes.iter_mut().filter(|route| !route.ipv6);
        for hop in hops.flat_map(|route| &mut route.hops) {
            let uplink = uplinks.iter().find(|u| u.name == hop.device);
            let Some(uplink) = uplink.filter(|_| dice.one_in(2)) else {
                continue;
            };
            // Each its own: two hops by one device have two gateways.
            let mut by_ipv4 = uplink.gateways[0].iter();
            let by_ipv4 = by_ipv4.position(|g| Some(*g) == hop.gateway);
            hop.gateway = by_ipv4.map(|n| uplink.gateways[1][n]).or(hop.gateway);
        }
    }

    fn add_metrics(&mut self, dice: &mut Dice) {
        let uplinks: Vec<String> = self.uplinks.iter().map(|u| u.name.clone()).collect();
        for route in self.routes.iter_mut().filter(|r| !r.hops.is_empty()) {
            let source = match &route.hops[..] {
                // As DHCP clients do.
                [hop] => uplinks.iter().position(|name| *name == hop.device),
                _ => None,
            };
            match (dice.below(8), source) {
                (0, _) => route.metrics = "mtu 1380",
                (1, _) => route.metrics = "mtu lock 1380",
                (2, _) => route.metrics = "advmss 1000",
                (3, _) => route.metrics = "initcwnd 20",
                (4, Some(i)) => route.source = Some(uplink_address(i, 1, route.ipv6)),
                _ => {}
            }
        }
    }

    fn add_bridge(&mut self, dice: &mut Dice) {
        let (guests, uplinks) = (&mut self.guests, &mut self.uplinks);
        let mut plain: Vec<_> = (uplinks.iter_mut())
            .filter(|u| u.made == Made::Veth && !guests.contains(&u.name))
            .collect();
        if !plain.is_empty() {
            let uplink = plain.swap_remove(dice.below(plain.len()));
            uplink.made = Made::Bridge;
            guests.push(uplink.name.clone());
        }
    }
}
