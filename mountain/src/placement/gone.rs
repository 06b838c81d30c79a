// SPDX-License-Identifier: GPL-2.0-or-later
//! Uplinks whose default route has just gone, and may be back in a moment.
//!
//! Some DHCP clients (udhcpc's script) delete the default route at each renewal and add it again some 20 ms later. Were the
//! uplink's rules and table to go in between, its connections would leave by another uplink, get that one's address, and be
//! reset by their servers.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use tracing::warn;

use super::routing::PlacementPlan;
use super::{uplinks, Placer};
use crate::topology::{Path, Topology};

/// For so long rules and table stay. An uplink that is taken down for good loses its link or its address besides.
const GRACE: Duration = Duration::from_secs(1);

/// What stays for a moment, and what is there afterwards.
#[derive(Default)]
pub(super) struct Gone {
    /// All uplinks at the last look.
    last: Vec<Path>,
    /// Those that are gone, and until when they stay.
    staying: Vec<(Path, Instant)>,
    /// The plan without them.
    after: Option<PlacementPlan>,
}

impl Gone {
    /// Those that stay, now that these are there. None of a family in which no other uplink is left as it was: the kernel may
    /// prefer something else by now, such as a VPN, or a rule of others may be in the way.
    pub(super) fn follow(&mut self, topology: &Topology, present: Vec<Path>) -> Vec<Path> {
        let now = Instant::now();
        let last = std::mem::replace(&mut self.last, present);
        // A device that is made anew has its name, but another index.
        let is_one = |a: &Path, b: &Path| {
            a.key.ipv6 == b.key.ipv6 && (a.key.ifindex == b.key.ifindex || a.ifname == b.ifname)
        };
        let began = last.into_iter().map(|path| (path, now + GRACE));
        let mut staying = std::mem::take(&mut self.staying);
        for (path, until) in began {
            if !staying.iter().any(|(known, _)| is_one(known, &path)) {
                staying.push((path, until));
            }
        }
        staying.retain(|(path, until)| {
            let ipv6 = path.key.ipv6;
            let suspended = || topology.suspended.iter().filter(|s| s.ipv6 == ipv6);
            let is_any_left = topology.places_in(ipv6) || suspended().next().is_some();
            now < *until
                && is_any_left
                && suspended().all(|suspended| suspended.whole)
                && !self.last.iter().any(|present| is_one(present, path))
        });
        if !staying.is_empty() {
            let there = addresses();
            staying.retain_mut(|(path, _)| {
                let is_there = |address: &IpAddr| {
                    let there = there.as_ref();
                    there.is_none_or(|all| all.contains(&(path.ifname.clone(), *address)))
                };
                path.addresses.retain(is_there);
                path.up && !path.addresses.is_empty()
            });
        }
        self.staying = staying;
        self.after = None;
        self.staying.iter().map(|(path, _)| path.clone()).collect()
    }

    /// Takes note of the plan without those that stay.
    pub(super) fn then(&mut self, after: PlacementPlan) {
        self.after = Some(after);
    }
}

impl Placer {
    /// Takes away what has stayed long enough. To be called about every second.
    pub(crate) fn end_grace(&mut self) {
        let now = Instant::now();
        // Its route may be back, as far as is known: the routing is being read, which takes long on a busy machine.
        if self.suspensions.is_paused() || !self.gone.staying.iter().any(|(_, until)| *until <= now)
        {
            return;
        }
        self.gone.staying.clear();
        let Some(after) = self.gone.after.take() else {
            return;
        };
        match uplinks::apply(&after.routing) {
            Ok(_) => self.plan = after,
            Err(e) => warn!("what belongs to an uplink without a route stays: {e:#}"),
        }
    }
}

/// The addresses of devices that are up and have a link, with their names. `None`: they cannot be read.
fn addresses() -> Option<Vec<(String, IpAddr)>> {
    let all = getifaddrs().ok()?;
    let works = InterfaceFlags::IFF_UP | InterfaceFlags::IFF_RUNNING;
    let of_working = all.filter(|one| one.flags.contains(works));
    let addresses = of_working.filter_map(|one| {
        let address = one.address?;
        let ipv4 = address.as_sockaddr_in().map(|a| IpAddr::from(a.ip()));
        let ipv6 = || address.as_sockaddr_in6().map(|a| IpAddr::from(a.ip()));
        Some((one.interface_name, ipv4.or_else(ipv6)?))
    });
    Some(addresses.collect())
}
