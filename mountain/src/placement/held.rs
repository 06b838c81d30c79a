// SPDX-License-Identifier: GPL-2.0-or-later
//! Addresses of uplinks that get no rule for the time being.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use tracing::{info, warn};

use super::aside::Aside;
use super::routing::{uplink_addresses, Routing};
use super::Placer;
use crate::netlink::conntrack::{self, Translated};
use crate::topology::Topology;

/// So long an address that has come back waits for translated flows without a connection. Short exchanges have ended by
/// then: the kernel forgets a datagram without an answer as fast. Who connects to the address still tries.
const FLOWS_WAIT: Duration = Duration::from_secs(30);

/// The addresses without a rule, and those that get it back.
#[derive(Default)]
pub(super) struct Held {
    /// Those without a rule, as something from there is translated; each with the time when that was found.
    since: BTreeMap<IpAddr, Instant>,
    /// Those that have had their rule. What is translated from there since has lost its own uplink's address once,
    /// and goes on.
    had_rule: BTreeSet<IpAddr>,
    /// Those that get their rule although flows from there are translated.
    returning: BTreeSet<IpAddr>,
    /// Whether all of IPv6 are: its first rule would have every socket choose again among the next hops of the kernel's
    /// route, and those that are translated would come by another one.
    all_ipv6: bool,
    /// Finds out which of them are translated yet, and says which these were.
    looking: Aside<(BTreeSet<IpAddr>, BTreeMap<IpAddr, Translated>)>,
}

impl Held {
    pub(super) fn addresses(&self) -> BTreeSet<IpAddr> {
        self.since.keys().copied().collect()
    }

    /// Those of which nothing is known yet among the addresses without a rule.
    fn unknown_of(&mut self, new: &BTreeSet<IpAddr>) -> BTreeSet<IpAddr> {
        self.since.retain(|address, _| new.contains(address));
        self.returning.retain(|address| new.contains(address));
        self.all_ipv6 &= self.since.keys().any(IpAddr::is_ipv6);
        &(new - &self.addresses()) - &self.returning
    }

    fn hold(&mut self, address: IpAddr, now: Instant) {
        self.since.entry(address).or_insert(now);
    }

    /// Lets go of addresses from which nothing is translated any more, and of those that have waited long enough for
    /// flows without a connection. Says which.
    fn release(
        &mut self,
        translated: &BTreeMap<IpAddr, Translated>,
        now: Instant,
    ) -> BTreeSet<IpAddr> {
        let before = self.addresses();
        let is_waited_for = self.all_ipv6 && translated.keys().any(IpAddr::is_ipv6);
        for address in &before {
            if address.is_ipv6() && is_waited_for {
                continue;
            }
            let waited = now.duration_since(self.since[address]);
            let is_over = self.had_rule.contains(address) && waited >= FLOWS_WAIT;
            match translated.get(address) {
                Some(Translated::Connection) => continue,
                Some(Translated::Flows) if !is_over => continue,
                Some(Translated::Flows) => {
                    self.returning.insert(*address);
                }
                None => {}
            }
            self.since.remove(address);
        }
        &before - &self.addresses()
    }
}

impl Placer {
    /// Finds out which addresses of uplinks get no rule. A connection from such an address that the kernel sends by
    /// another uplink, translated, would go on by its own one, with an address that its other end does not
    /// know. An address that has its rule, among those `known`, keeps it: what is from there goes by it.
    pub(super) fn hold_snated(&mut self, topology: &Topology, known: &Routing) {
        let new = &uplink_addresses(topology) - &known.addresses();
        let unknown = self.held.unknown_of(&new);
        let now = Instant::now();
        for address in snated_among(unknown).into_keys() {
            info!(
                "packets from {address} go where the kernel sends them: a connection from there is translated, and \
                 the uplink's own rule would break it. Connections to it from outside may get no answer"
            );
            self.held.hold(address, now);
        }
        let is_first = !known.rules.iter().any(|rule| rule.ipv6);
        let may_break = is_first && topology.chooses_by_hash(true);
        if may_break && !self.held.all_ipv6 && self.held.since.keys().any(IpAddr::is_ipv6) {
            info!(
                "new flows of IPv6 go where the kernel sends them as long as that is so: with a routing rule, the \
                 kernel would choose anew among the next hops for those that run"
            );
            self.held.all_ipv6 = true;
        }
        if self.held.all_ipv6 {
            let all = new.iter().filter(|address| address.is_ipv6());
            all.for_each(|address| self.held.hold(*address, now));
        }
    }

    /// Whether an address may have its rule by now, as no connection from there is translated any more, or only flows
    /// that have had their time: [`Placer::update`] is due. It is found out beside the daemon's loop: hundreds of thousands
    /// of connections take half a second.
    #[must_use]
    pub(crate) fn may_release(&mut self) -> bool {
        let looked = self.held.looking.ended();
        let held = self.held.addresses();
        if !held.is_empty() && !self.held.looking.is_busy() {
            let which = held.clone();
            let look = move || Ok((which.clone(), snated_among(which)));
            self.held.looking.begin(look);
        }
        let translated = match looked {
            Some(Ok((which, translated))) if which == held => translated,
            // Others are held by now, or there was no room for a thread: the next look tells.
            _ => return false,
        };
        let released = self.held.release(&translated, Instant::now());
        for address in &released {
            info!("packets from {address} leave by its own uplink from now on");
        }
        !released.is_empty()
    }

    /// Has flows that are still translated go on from their own address, now that it has its rule. As long as their
    /// entries are there, they would leave by their own uplink with another one's address.
    pub(super) fn forget_translated(&mut self) {
        let ruled = self.plan.routing.addresses();
        let returned = &std::mem::take(&mut self.held.returning) & &ruled;
        self.held.had_rule.extend(ruled);
        if returned.is_empty() {
            return;
        }
        match conntrack::forget_translated(&returned) {
            Ok(0) => {}
            Ok(n) => info!("{n} flows that were translated go on from their uplink's own address"),
            Err(e) => warn!("{e:#}"),
        }
    }
}

/// Those of some addresses from which something is translated; where that cannot be told, all.
fn snated_among(addresses: BTreeSet<IpAddr>) -> BTreeMap<IpAddr, Translated> {
    match conntrack::snated_among(&addresses) {
        Ok(snated) => snated,
        Err(e) => {
            warn!(
                "cannot tell whether connections from the uplinks' addresses are translated: {e:#}"
            );
            let all = addresses.into_iter();
            all.map(|address| (address, Translated::Connection))
                .collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_came_back_waits_for_flows_only_so_long() {
        let [back, new] = [1u8, 2].map(|n| IpAddr::from([192, 0, 2, n]));
        let both = BTreeSet::from([back, new]);
        let start = Instant::now();
        let mut held = Held {
            since: both.iter().map(|address| (*address, start)).collect(),
            had_rule: BTreeSet::from([back]),
            ..Held::default()
        };
        let all = |what: Translated| -> BTreeMap<IpAddr, Translated> {
            both.iter().map(|address| (*address, what)).collect()
        };
        let none = BTreeSet::new();
        let mut release = |what: Translated, at: Instant| held.release(&all(what), at);
        let late = start + FLOWS_WAIT;
        assert_eq!(release(Translated::Flows, start), none);
        assert_eq!(
            release(Translated::Connection, late),
            none,
            "it would break"
        );
        // A flow that the kernel sent so before there was a rule goes on.
        assert_eq!(release(Translated::Flows, late), BTreeSet::from([back]));
        // Its flows are known, and do not hold it again before it has its rule.
        assert_eq!(held.unknown_of(&both), none);
        assert_eq!(held.returning, BTreeSet::from([back]));
        assert_eq!(held.release(&BTreeMap::new(), late), BTreeSet::from([new]));
        assert_eq!(held.unknown_of(&both), BTreeSet::from([new]));
        // The uplink may go before that.
        assert_eq!(held.unknown_of(&none), none);
        assert_eq!(held.unknown_of(&both), both);
    }

    #[test]
    fn all_of_ipv6_wait_for_the_last_translated_one() {
        let [one, other] = [1u16, 2].map(|n| IpAddr::from([0x2001, 0xdb8, n, 0, 0, 0, 0, 1]));
        let ipv4 = IpAddr::from([192, 0, 2, 1]);
        let start = Instant::now();
        let mut held = Held {
            since: [one, other, ipv4].map(|address| (address, start)).into(),
            all_ipv6: true,
            ..Held::default()
        };
        let translated = BTreeMap::from([(other, Translated::Connection)]);
        assert_eq!(held.release(&translated, start), BTreeSet::from([ipv4]));
        let both = BTreeSet::from([one, other]);
        assert_eq!(held.release(&BTreeMap::new(), start), both);
        assert_eq!(held.unknown_of(&both), both, "they are asked about again");
        assert!(!held.all_ipv6);
    }
}
