// SPDX-License-Identifier: GPL-2.0-or-later
//! Which servers, and which hosts behind this one, have connections under way when uplinks begin to be chosen: new flows go
//! where those do. Some servers take a session from one address alone (FTP's data connections, web sites).

use std::collections::BTreeMap;
use std::net::IpAddr;

use anyhow::{Context, Result};
use tracing::warn;

use super::config::SpreadBy;
use super::Placer;
use crate::bpf::placement::Peer;
use crate::netlink::{self, conntrack};

impl Placer {
    /// Has new flows of peers with connections under way stay on the uplinks of these, until a peer's own choice has been
    /// another one for a while (`mtn_stay()` in bpf/placement/choose.h).
    pub(super) fn go_on_with_peers(&self) {
        if self.config.spread != SpreadBy::Destination {
            return;
        }
        let known = self
            .peers()
            .and_then(|peers| self.programs.know_peers(&peers));
        if let Err(e) = known {
            warn!(
                "servers with connections under way may see another address of this network: {e:#}"
            );
        }
    }

    /// The path by which each has its connections.
    fn peers(&self) -> Result<BTreeMap<Peer, usize>> {
        let uplinks = self.uplinks.iter();
        let addresses = uplinks.flat_map(|(&id, uplink)| {
            let of_uplink = uplink.addresses.iter();
            of_uplink.map(move |&address| (address, id))
        });
        let addresses: BTreeMap<IpAddr, usize> = addresses.collect();
        let mut peers = BTreeMap::new();
        let mut note = |peer, address| {
            if let Some(&id) = addresses.get(&address) {
                peers.entry(peer).or_insert(id);
            }
        };
        let own = netlink::connections().context("cannot list the connections of sockets")?;
        for one in own {
            note(Peer::Server(one.remote.ip()), one.local.ip());
        }
        for flow in conntrack::answered_from(addresses.keys())? {
            if !addresses.contains_key(&flow.source) {
                note(Peer::Host(flow.source), flow.from);
            }
        }
        Ok(peers)
    }
}
