// SPDX-License-Identifier: GPL-2.0-or-later
//! Addresses of uplinks that get no rule for the time being.

use std::collections::BTreeSet;
use std::net::IpAddr;

use anyhow::Result;
use tracing::{info, warn};

use super::routing::plan;
use super::{uplinks, Placer};
use crate::netlink::conntrack;
use crate::topology::Topology;

impl Placer {
    /// Finds out which addresses of uplinks get no rule. A connection from such an address that the kernel sends by
    /// another uplink, translated, would go on by its own one, with an address that its other end does not
    /// know. An address that has its rule keeps it: what is from there goes by it.
    pub(super) fn hold_snated(&mut self, topology: &Topology) -> Result<()> {
        let wanted = plan(topology, self.config.mark_mask, &BTreeSet::new())?.routing;
        let known = match self.is_idle() {
            true => uplinks::there()?,
            false => self.plan.routing.clone(),
        };
        let wanted = wanted.addresses();
        let new: BTreeSet<IpAddr> = wanted.difference(&known.addresses()).copied().collect();
        self.held.retain(|address| new.contains(address));
        let unknown = new.difference(&self.held).copied().collect();
        let found = snated_among(unknown);
        for address in &found {
            info!(
                "packets from {address} go where the kernel sends them: a connection from there is translated, and \
                 the uplink's own rule would break it"
            );
        }
        self.held.extend(found);
        Ok(())
    }

    /// Whether an address may have its rule by now, as no connection from there is translated any more:
    /// [`Placer::update`] is due.
    #[must_use]
    pub(crate) fn may_release(&mut self) -> bool {
        if self.held.is_empty() {
            return false;
        }
        let still = snated_among(self.held.clone());
        let is_less = still != self.held;
        for address in self.held.difference(&still) {
            info!("packets from {address} leave by its own uplink from now on");
        }
        self.held = still;
        is_less
    }
}

/// Those of some addresses from which connections are translated; all where that cannot be told.
fn snated_among(addresses: BTreeSet<IpAddr>) -> BTreeSet<IpAddr> {
    match conntrack::snated_among(&addresses) {
        Ok(snated) => snated,
        Err(e) => {
            warn!(
                "cannot tell whether connections from the uplinks' addresses are translated: {e:#}"
            );
            addresses
        }
    }
}
