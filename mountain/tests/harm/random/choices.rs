// SPDX-License-Identifier: GPL-2.0-or-later
//! What the kernel may choose among on a random host, and how to make each its only choice.

use super::host::{Host, Kind, MAIN, TUN};
use super::routes::Route;

impl Host {
    /// Default routes that differ only in metric: members if the kernel's own choice is one.
    pub fn find_adoptable(&self, ipv6: bool) -> Vec<usize> {
        let mut defaults: Vec<usize> = (0..self.routes.len())
            .filter(|&i| self.routes[i].ipv6 == ipv6 && self.routes[i].is_default())
            .collect();
        defaults.sort_by_key(|&i| self.routes[i].metric);
        let plain = |i: &usize| matches!(&self.routes[*i].hops[..], [hop] if hop.device != TUN);
        match defaults.first().is_some_and(plain) && self.has(Kind::Adopt) {
            true => defaults.into_iter().filter(plain).collect(),
            false => Vec::new(),
        }
    }

    /// Whether new flows of a family may choose an uplink, and its firewall with it.
    pub fn places(&self, ipv6: bool) -> bool {
        let own_default = |r: &Route| r.is_multipath() && r.is_default() && r.source.is_none();
        !self.adoptable[usize::from(ipv6)].is_empty()
            || self.routes.iter().any(|r| r.ipv6 == ipv6 && own_default(r))
    }

    /// Most members of one group; 1: there is none.
    fn members(&self) -> usize {
        let multipath = self.routes.iter().map(|r| r.hops.len());
        let adopted = self.adoptable.iter().map(Vec::len);
        multipath.chain(adopted).max().unwrap_or(0).max(1)
    }

    /// How many variants show all that the kernel may do: a source may be looked up in one table and the way in another.
    pub fn variants(&self) -> usize {
        match self.rules.is_empty() {
            true => self.members(),
            false => self.members() * self.members(),
        }
    }

    /// The commands that make one member of each group the kernel's only choice, and those that undo it.
    pub fn variant(&self, j: usize) -> (Vec<String>, Vec<String>) {
        let (mut there, mut back) = (Vec::new(), Vec::new());
        for route in self.routes.iter().filter(|r| r.is_multipath()) {
            let nth = if route.table == MAIN {
                j
            } else {
                j / self.members() + j
            };
            there.push(route.delete());
            there.push(route.add(Some(nth % route.hops.len())));
            back.push(route.delete());
            back.push(route.add(None));
        }
        for family in &self.adoptable {
            let Some(&best) = family.first() else {
                continue;
            };
            let chosen = &self.routes[family[j % family.len()]];
            let mut preferred = chosen.clone();
            preferred.metric = self.routes[best].metric - 1;
            there.push(preferred.add(None));
            back.push(preferred.delete());
        }
        (there, back)
    }
}
