// SPDX-License-Identifier: GPL-2.0-or-later
//! Which servers, and which hosts behind this one, have connections under way: new flows go where those do. Some servers take
//! a session from one address alone (FTP's data connections, web sites).
//!
//! When uplinks begin to be chosen, all that a host behind this one sends stays, for as long as the programs remember a flow.
//! From then on only what it sends to the servers of its connections does: a host is seldom without any.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Instant;

use tracing::{debug, warn};

use super::aside::Aside;
use super::config::SpreadBy;
use super::Placer;
use crate::bpf::placement::{exchange_rest, Peer, PlacementRule, Wants};
use crate::bpf::SteerMode;
use crate::netlink::{self, conntrack};
use crate::topology::is_private;

/// The work of telling the programs of the peers.
#[derive(Default)]
pub(super) struct Peers {
    reading: Aside<BTreeMap<Peer, usize>>,
    /// When to look again.
    again: Option<Instant>,
}

impl Placer {
    /// Has new flows of peers with connections under way stay on the uplinks of these, until they have ended, and a peer's
    /// own choice has been another one for a while (`mtn_stay()` in bpf/placement/choose.h).
    ///
    /// They are read beside the daemon's loop: hundreds of thousands of connections take half a second.
    pub(super) fn go_on_with_peers(&mut self) {
        if self.config.spread == SpreadBy::Destination {
            self.read_peers(Hosts::Told);
        }
    }

    fn read_peers(&mut self, hosts: Hosts) {
        let uplinks = self.uplinks.iter();
        let addresses = uplinks.flat_map(|(&id, uplink)| {
            let of_uplink = uplink.addresses.iter();
            of_uplink.map(move |&address| (address, id))
        });
        let addresses = addresses.collect();
        self.peers.again = None;
        self.peers
            .reading
            .begin_next(move || Ok(peers(&addresses, hosts)));
    }

    /// Tells the programs of the peers, once they are read. To be called several times a second.
    pub(super) fn know_peers(&mut self) {
        let now = Instant::now();
        if let Some(read) = self.peers.reading.ended() {
            if let Err(e) = read.and_then(|peers| self.programs.know_peers(&peers)) {
                warn!(
                    "new connections may leave by another uplink than those under way to a server: {e:#}"
                );
            }
            // Before the programs forget them.
            self.peers.again = Some(now + exchange_rest() * 2 / 3);
        }
        // What a rule gives an uplink of its own is no guide for others.
        let names_path = |rule: &PlacementRule| matches!(rule.wants, Wants::Paths(_));
        let is_useful = self.uplinks.len() > 1 && !self.in_force.iter().any(names_path);
        if self.peers.again.is_some_and(|at| at <= now)
            && is_useful
            && self.mode == SteerMode::Steer
        {
            self.read_peers(Hosts::Free);
        }
    }
}

/// Whether all new flows of a host behind this one follow its connections, or only those to the same servers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hosts {
    Told,
    Free,
}

/// A connection: whose, from which address its other end sees it, and to where.
type Flow = (Peer, IpAddr, (IpAddr, u16));

/// The path of each peer's connections, by the uplinks' addresses. Those that cannot be listed stay unknown.
fn peers(addresses: &BTreeMap<IpAddr, usize>, hosts: Hosts) -> BTreeMap<Peer, usize> {
    let own = netlink::connections().unwrap_or_else(|e| {
        debug!("cannot list the connections of sockets: {e}");
        Vec::new()
    });
    let own = own.into_iter().filter(|one| !one.closing).map(|one| {
        let to = (one.remote.ip(), one.remote.port());
        (Peer::Server(to.0), one.local.ip(), to)
    });
    let forwarded = conntrack::answered_from(&addresses.keys().copied().collect());
    let forwarded = forwarded.unwrap_or_else(|e| {
        debug!("{e:#}");
        Vec::new()
    });
    let forwarded = forwarded.into_iter().flat_map(|flow| {
        let to = (flow.to, flow.port.unwrap_or(0));
        let host = (hosts == Hosts::Told).then_some(Peer::Host(flow.source));
        let peers = host.into_iter().chain([Peer::Pair(flow.source, flow.to)]);
        peers.map(move |peer| (peer, flow.from, to))
    });
    let of_this_host = |peer: &Peer| match peer {
        Peer::Host(from) | Peer::Pair(from, _) => addresses.contains_key(from),
        Peer::Server(_) => false,
    };
    let all = own.chain(forwarded);
    on_one_path(addresses, all.filter(|(peer, ..)| !of_this_host(peer)))
}

/// Of peers all of whose connections are on one path, that one. Of others their own choice decides.
fn on_one_path(
    addresses: &BTreeMap<IpAddr, usize>,
    flows: impl Iterator<Item = Flow>,
) -> BTreeMap<Peer, usize> {
    let mut peers = BTreeMap::new();
    for (peer, from, to) in flows {
        if let Some(&id) = addresses.get(&from).filter(|_| !is_to_provider(to)) {
            let known = peers.entry(peer).or_insert(Some(id));
            *known = known.filter(|known| *known == id);
        }
    }
    let known = peers.into_iter();
    known.filter_map(|(peer, id)| Some((peer, id?))).collect()
}

/// Whether the kernel's uplink has it, whichever is the peer's: `mtn_is_to_provider()` in bpf/placement/choose.h.
fn is_to_provider((address, port): (IpAddr, u16)) -> bool {
    matches!(port, 53 | 123 | 853) || is_private(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_known_by_the_one_path_of_what_is_its_own_choice() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let [first, second] = ["192.0.2.1", "198.51.100.1"].map(ip);
        let addresses = BTreeMap::from([(first, 0), (second, 1)]);
        let [host, other, server] = ["10.0.0.5", "10.0.0.6", "203.0.113.9"].map(ip);
        let known = |flows: &[Flow]| on_one_path(&addresses, flows.iter().copied());
        let (web, dns) = ((server, 443), (server, 53));
        let flows = [
            (Peer::Host(host), second, web),
            (Peer::Host(host), first, dns),
            (Peer::Host(host), first, (ip("192.168.100.1"), 80)),
            (Peer::Host(other), first, dns),
            (Peer::Server(server), ip("192.0.2.99"), web),
        ];
        assert_eq!(known(&flows), BTreeMap::from([(Peer::Host(host), 1)]));
        let by_both = [first, second, first].map(|from| (Peer::Server(server), from, web));
        assert_eq!(known(&by_both), BTreeMap::new());
    }
}
