// SPDX-License-Identifier: GPL-2.0-or-later
//! What the kernel says of its network, read and followed by netlink.
//!
//! `wire` speaks the netlink framing. `snapshot` decodes the few attributes of routing that are needed
//! into plain data, `nexthop` those of next hops. [`Monitor`] reports changes: make it first and read
//! second, so that no change falls between. `route` looks one route up, `link` reads one device,
//! `netfilter` lists tables, `ruleset` reads nftables rules, `conntrack` lists connections, `sock_diag`
//! sockets, and `generic` finds families of generic netlink, of which `path_metrics` is one. `own`
//! tells the routes and rules that Mountain itself has made.
//!
//! Attributes are picked one by one instead of decoding whole messages with `netlink-packet-route`.
//! There one attribute of a newer kernel, or an encapsulation inside a multipath next hop, makes the
//! whole message unreadable. A route that is missing here would be a route whose traffic is moved by
//! mistake.

pub mod conntrack;
pub(crate) mod generic;
pub(crate) mod kinds;
mod link;
mod monitor;
mod netfilter;
pub(crate) mod nexthop;
pub mod nft;
pub(crate) mod own;
mod path_metrics;
mod qdisc;
mod route;
pub mod ruleset;
pub(crate) mod snapshot;
mod sock_diag;
pub(crate) mod wire;
mod xfrm;

use std::net::IpAddr;

use anyhow::{Context, Result};

pub use link::{addresses, link, namespace_id, neighbour_usable, Link};
pub use monitor::{Change, Monitor};
pub use netfilter::{tables_with_base_chains, translates_sources};
pub use path_metrics::PathMetrics;
pub use qdisc::{qdiscs, Qdiscs};
pub use route::{egress_route, policy_rules, route_to, EgressRoute, RouteTo};
pub use snapshot::ds_field;
pub use sock_diag::{reset_unanswered, unconnected};
pub use xfrm::offloading_devices;

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

/// Puts the last known Ethernet address of a gateway back as an ordinary stale entry, which the
/// kernel verifies in use and collects when it goes unused.
///
/// A packet that the kernel routed to a gateway without a usable entry waits in the entry's queue
/// and never reaches the device's egress, where it could be steered to a path that works. Sockets
/// cache their route, so no routing setting helps these.
///
/// # Errors
/// When the device is gone, or without CAP_NET_ADMIN.
pub(crate) async fn keep_neighbour(ifindex: u32, gateway: IpAddr, mac: [u8; 6]) -> Result<()> {
    wire::Socket::open()
        .and_then(|mut socket| snapshot::keep_neighbour(&mut socket, ifindex, gateway, mac))
        .with_context(|| format!("cannot keep the entry of {gateway} on device {ifindex}"))
}
