// SPDX-License-Identifier: GPL-2.0-or-later
//! Which servers, and which hosts behind this one, have connections under way when uplinks begin to be chosen: new flows go
//! where those do. Some servers take a session from one address alone (FTP's data connections, web sites).

use std::collections::BTreeMap;
use std::net::IpAddr;

use tracing::{debug, warn};

use super::config::SpreadBy;
use super::Placer;
use crate::bpf::placement::Peer;
use crate::netlink::{self, conntrack};
use crate::topology::is_private;

impl Placer {
    /// Has new flows of peers with connections under way stay on the uplinks of these, until a peer's own choice has been
    /// another one for a while (`mtn_stay()` in bpf/placement/choose.h).
    ///
    /// They are read beside the daemon's loop: hundreds of thousands of connections take half a second.
    pub(super) fn go_on_with_peers(&mut self) {
        if self.config.spread != SpreadBy::Destination {
            return;
        }
        let uplinks = self.uplinks.iter();
        let addresses = uplinks.flat_map(|(&id, uplink)| {
            let of_uplink = uplink.addresses.iter();
            of_uplink.map(move |&address| (address, id))
        });
        let addresses = addresses.collect();
        self.reading_peers.begin_next(move || Ok(peers(&addresses)));
    }

    /// Tells the programs of the peers, once they are read. To be called several times a second.
    pub(super) fn know_peers(&mut self) {
        let Some(read) = self.reading_peers.ended() else {
            return;
        };
        if let Err(e) = read.and_then(|peers| self.programs.know_peers(&peers)) {
            warn!(
                "new connections may leave by another uplink than those under way to a server: {e:#}"
            );
        }
    }
}

/// The path by which each has its connections, by the uplinks' addresses. None with some by another path: its own choice
/// decides then.
fn peers(addresses: &BTreeMap<IpAddr, usize>) -> BTreeMap<Peer, usize> {
    let mut peers = BTreeMap::new();
    let mut note = |peer, from, to: (IpAddr, u16)| {
        if let Some(&id) = addresses.get(&from).filter(|_| !is_to_provider(to)) {
            let known = peers.entry(peer).or_insert(Some(id));
            *known = known.filter(|known| *known == id);
        }
    };
    // Those that cannot be listed stay unknown.
    let own = netlink::connections().unwrap_or_else(|e| {
        debug!("cannot list the connections of sockets: {e}");
        Vec::new()
    });
    for one in own {
        let to = (one.remote.ip(), one.remote.port());
        note(Peer::Server(to.0), one.local.ip(), to);
    }
    let forwarded = conntrack::answered_from(&addresses.keys().copied().collect());
    let forwarded = forwarded.unwrap_or_else(|e| {
        debug!("{e:#}");
        Vec::new()
    });
    for flow in forwarded {
        if !addresses.contains_key(&flow.source) {
            let to = (flow.to, flow.port.unwrap_or(0));
            note(Peer::Host(flow.source), flow.from, to);
        }
    }
    let known = peers.into_iter();
    known.filter_map(|(peer, id)| Some((peer, id?))).collect()
}

/// Whether the kernel's uplink has it, whichever is the peer's: `mtn_is_to_provider()` in bpf/placement/choose.h.
fn is_to_provider((address, port): (IpAddr, u16)) -> bool {
    matches!(port, 53 | 123 | 853) || is_private(address)
}
