// SPDX-License-Identifier: GPL-2.0-or-later
//! What the kernel's routing tables say, read and followed by rtnetlink.
//!
//! [`read_topology`] dumps routes, nexthop objects, rules, links, addresses and neighbours of the
//! caller's network namespace and condenses them into a [`Topology`]; [`Monitor`] reports what
//! changes afterwards. Make the monitor first and read second, so that no change falls between.
//!
//! Theory of operation. `wire` speaks the netlink framing, `snapshot` decodes the few attributes
//! needed into plain data (`nexthop`: those of next hops; `route`: one look-up; `link`: one device; `netfilter`: tables; `generic`: families of generic netlink, `path_metrics` one of them; `uplinks`: the rules and routes that mountain itself adds; `sock_diag`: sockets), `rules` walks the policy rules as the kernel does, and `build` decides
//! what is a group, what is left alone and why. The last two are pure functions. Attributes are
//! picked one by one instead of decoding whole messages with `netlink-packet-route`, because there
//! one attribute of a newer kernel, or an encapsulation inside a multipath next hop, makes the
//! whole message unreadable, and a route that is silently missing here would be a route whose
//! traffic is moved by mistake.

mod build;
pub(crate) mod generic;
mod kinds;
mod link;
mod monitor;
mod netfilter;
mod nexthop;
mod path_metrics;
mod qdisc;
mod route;
mod rules;
pub mod ruleset;
mod snapshot;
mod sock_diag;
pub mod uplinks;
pub(crate) mod wire;
mod xfrm;

use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ipnet::IpNet;

use crate::topology::Topology;

pub use link::{addresses, link, namespace_id, neighbour_usable, Link};
pub use monitor::{Change, Monitor};
pub use netfilter::{tables_with_base_chains, translates_sources};
pub use path_metrics::PathMetrics;
pub use qdisc::{qdiscs, Qdiscs};
pub use route::{look_up, policy_rules, route_to, Way, WayOut};
pub use sock_diag::{reset_unanswered, unconnected};
pub use xfrm::offloading_devices;

/// Which routes to adopt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Adopt only routes whose prefix equals or lies in one of these; empty: all.
    pub routes: Vec<IpNet>,
    /// Make a group of default routes that differ only in metric, too.
    pub adopt: bool,
    /// Devices that are uplinks even if they look like tunnels: those that the configuration names.
    pub named: Vec<String>,
    /// The bits of packet marks by which new flows will find their uplink; 0: none.
    pub mark_mask: u32,
}

impl Filter {
    fn admits(&self, prefix: &IpNet) -> bool {
        self.routes.is_empty() || self.routes.iter().any(|wanted| wanted.contains(prefix))
    }
}

/// A dump that changed while it was read is read again for so long; then it is taken as it is (the
/// monitor reports the change anyway).
const CONSISTENT_WITHIN: Duration = Duration::from_millis(20);
/// From so many routes on, the memory of a reading is given back to the kernel.
const MANY_ROUTES: usize = 50_000;

/// Reads the routing state of the calling thread's network namespace.
///
/// Blocks for the time of seven kernel dumps: about a millisecond on an ordinary host, a second or
/// more with a full Internet routing table.
///
/// # Errors
/// When the kernel refuses a netlink socket or a dump. Reading needs no privileges.
pub fn read_topology_blocking(filter: &Filter) -> Result<Topology> {
    let mut socket = wire::Socket::open().context("cannot open an rtnetlink socket")?;
    let started = Instant::now();
    loop {
        let (snapshot, consistent) = snapshot::read(&mut socket)?;
        if !consistent && started.elapsed() < CONSISTENT_WITHIN {
            continue;
        }
        let topology = build::build(&snapshot, filter);
        let many = snapshot.routes.len() > MANY_ROUTES;
        drop(snapshot);
        if many {
            // SAFETY: has no preconditions. The allocator would keep it for a thread that has ended.
            unsafe { libc::malloc_trim(0) };
        }
        return Ok(topology);
    }
}

/// Like [`read_topology_blocking`], on tokio's pool for blocking work so that the caller's other
/// tasks go on. The pool's threads live in the namespace of the thread that started them.
///
/// # Errors
/// As [`read_topology_blocking`].
pub async fn read_topology(filter: &Filter) -> Result<Topology> {
    let filter = filter.clone();
    tokio::task::spawn_blocking(move || read_topology_blocking(&filter))
        .await
        .context("reading the routing state was interrupted")?
}

/// Asks the kernel to resolve `gateway` on the device now, or to check that it still answers, as if
/// a packet were to be sent to it. The entry made is an ordinary one that the kernel collects when
/// it goes unused; entries an administrator made permanent are left alone.
///
/// # Errors
/// When the device does not exist or has no neighbours, or without CAP_NET_ADMIN.
pub async fn resolve_neighbour(ifindex: u32, gateway: IpAddr) -> Result<()> {
    // One request answered from kernel memory: not worth a thread of its own.
    wire::Socket::open()
        .and_then(|mut socket| snapshot::use_neighbour(&mut socket, ifindex, gateway))
        .with_context(|| format!("cannot resolve {gateway} on device {ifindex}"))
}

/// Where the kernel would send a packet to some address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WayBack {
    /// It is one of this host's own.
    Host,
    /// Out by the device of this index.
    Device(u32),
    /// To all hosts of a subnet that this host is in.
    Broadcast,
    /// There is no route, or one that drops.
    Nowhere,
}

/// Asks the kernel how it routes packets to `address`: the way back of what comes from there.
///
/// # Errors
/// When the kernel refuses to say.
pub fn way_back(address: IpAddr) -> Result<WayBack> {
    wire::Socket::open()
        .and_then(|mut socket| snapshot::way_back(&mut socket, address))
        .with_context(|| format!("cannot look up the route to {address}"))
}

/// Puts the last known Ethernet address of a gateway back as an ordinary stale entry, which the
/// kernel verifies in use and collects when it goes unused.
///
/// A packet that the kernel routed to a gateway without a usable entry waits in the entry's queue
/// and never reaches the device's egress, where it could be steered to a path that works. Sockets
/// cache their route, so no routing setting helps these.
///
/// # Errors
/// When the device is gone, or without CAP_NET_ADMIN.
pub async fn keep_neighbour(ifindex: u32, gateway: IpAddr, mac: [u8; 6]) -> Result<()> {
    wire::Socket::open()
        .and_then(|mut socket| snapshot::keep_neighbour(&mut socket, ifindex, gateway, mac))
        .with_context(|| format!("cannot keep the entry of {gateway} on device {ifindex}"))
}
