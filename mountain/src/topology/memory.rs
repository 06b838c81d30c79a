// SPDX-License-Identifier: GPL-2.0-or-later
//! What a reading no longer shows, and an earlier one did: behind which ports of bridges gateways are, and whether
//! flows chose their uplink, so that there may be some that run on it.
//!
//! A bridge is a wire as long as its gateway is behind one. When that uplink dies, the kernel forgets both the
//! gateway's address and the port, so that the uplink would look like something unknown, a tunnel even, in the one
//! moment in which the others are needed. So what was met last counts until something newer is known.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::IpAddr;

use super::{Path, Topology};
use crate::netlink::link::Link;
use crate::netlink::snapshot::{Snapshot, TABLE_MAIN};

type Mac = [u8; 6];
/// A device and a gateway's address.
type Gateway = (u32, IpAddr);

/// From so many gateways on, only those of the present are remembered: who is on an uplink's link may make up more.
const GATEWAYS_MAX: usize = 256;

/// By family ([IPv4, IPv6]) the devices of uplinks that flows have chosen, and that still are some or lead to
/// [`Topology::kept`]; `None`: no flow has chosen any.
pub(crate) type Placed = [Option<BTreeSet<u32>>; 2];

/// What is remembered from one reading to the next.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    /// Link-layer addresses of gateways.
    macs: HashMap<Gateway, Mac>,
    /// The ports behind which bridges have met those, by bridge.
    ports: HashMap<(u32, Mac), u32>,
    /// What flows have chosen, by families of which none has lost all uplinks since.
    pub(super) placed: Placed,
}

impl Memory {
    /// Of a daemon that goes on where an earlier one has left off. `placed`: what flows of its time have chosen.
    pub(crate) fn going_on(placed: Placed) -> Self {
        Self {
            placed,
            ..Self::default()
        }
    }

    /// Takes note of what a reading shows, and adds what it does not show to it.
    pub(super) fn complete(&mut self, snapshot: &mut Snapshot) {
        if !snapshot.links.values().any(Link::is_bridge) {
            self.macs.clear();
            self.ports.clear();
            return;
        }
        let gateways = gateways(snapshot);
        self.learn(snapshot, &gateways);
        self.forget(snapshot, &gateways);
        for gateway in gateways {
            let last = self.macs.get(&gateway).map(|mac| (gateway, *mac));
            snapshot.last_macs.extend(last);
        }
        for (at, port) in &self.ports {
            snapshot.bridged.entry(*at).or_insert(*port);
        }
    }

    /// Takes note of what a reading has led to.
    pub(super) fn adopted(&mut self, topology: &Topology) {
        let before = std::mem::take(&mut self.placed);
        self.placed = [false, true].map(|ipv6| {
            let device = |path: &Path| path.key.ifindex;
            let before = before[usize::from(ipv6)].as_ref();
            let places = topology.places_in(ipv6);
            let rests = topology.suspended.iter().any(|s| s.ipv6 == ipv6);
            if !(places || rests && before.is_some()) {
                return None;
            }
            let groups = topology.groups.iter().filter(|group| group.kind.places());
            let members = groups.flat_map(|group| &group.members);
            let chosen = members.map(|member| &topology.paths[member.path]);
            let chosen = chosen.filter(|path| path.key.ipv6 == ipv6).map(device);
            let resting = topology.suspended.iter().filter(|s| s.ipv6 == ipv6);
            let resting = resting.flat_map(|s| &s.paths).map(device);
            let kept = topology.kept.iter().filter(|k| k.host.is_ipv6() == ipv6);
            let kept = kept.map(|kept| kept.ifindex);
            let known = |device: &u32| before.is_some_and(|before| before.contains(device));
            Some(chosen.chain(resting.chain(kept).filter(known)).collect())
        });
    }

    fn learn(&mut self, snapshot: &Snapshot, gateways: &BTreeSet<Gateway>) {
        for gateway in gateways {
            let known = snapshot.neighbours.get(gateway);
            self.macs.extend(known.map(|mac| (*gateway, *mac)));
        }
        let macs = self.all_macs();
        let bridged = snapshot.bridged.iter();
        let met = bridged.filter(|((_, mac), _)| macs.contains(mac));
        self.ports.extend(met.map(|(at, port)| (*at, *port)));
    }

    /// Forgets devices that are gone, and ports that are none of their bridge's any more.
    fn forget(&mut self, snapshot: &Snapshot, gateways: &BTreeSet<Gateway>) {
        let links = &snapshot.links;
        let is_many = self.macs.len() > GATEWAYS_MAX;
        self.macs.retain(|gateway, _| {
            links.contains_key(&gateway.0) && (!is_many || gateways.contains(gateway))
        });
        let macs = self.all_macs();
        self.ports.retain(|(bridge, mac), port| {
            let link = links.get(&*port);
            macs.contains(mac) && link.is_some_and(|link| link.master == Some(*bridge))
        });
    }

    fn all_macs(&self) -> HashSet<Mac> {
        self.macs.values().copied().collect()
    }
}

/// Those of the main table's default routes.
fn gateways(snapshot: &Snapshot) -> BTreeSet<Gateway> {
    let routes = snapshot.routes.iter();
    let defaults =
        routes.filter(|route| route.table == TABLE_MAIN && route.prefix.prefix_len() == 0);
    let hops = defaults.flat_map(|route| &route.hops);
    hops.filter_map(|hop| Some((hop.ifindex, hop.gateway?)))
        .collect()
}

#[cfg(test)]
mod tests;
