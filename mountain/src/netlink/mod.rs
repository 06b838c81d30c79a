// SPDX-License-Identifier: GPL-2.0-or-later
//! What the kernel says of its network, read and followed by netlink.
//!
//! `wire` speaks the netlink framing. `snapshot` decodes the few attributes of routing that are needed
//! into plain data, `nexthop` those of next hops. [`Monitor`] reports changes: make it first and read
//! second, so that no change falls between. `route` looks one route up, `link` reads devices and
//! addresses, `neighbour` neighbours, `ruleset` reads nftables rules, `conntrack` lists connections,
//! `sock_diag` sockets, and `generic` finds families of generic netlink, of which `path_metrics` is
//! one. `sent` reads how much a device has sent. `own` tells the routes and rules that Mountain
//! itself has made.
//!
//! Attributes are picked one by one instead of decoding whole messages with `netlink-packet-route`.
//! There one attribute of a newer kernel, or an encapsulation inside a multipath next hop, makes the
//! whole message unreadable. A route that is missing here would be a route whose traffic is moved by
//! mistake.

pub(crate) mod conntrack;
pub(crate) mod generic;
pub(crate) mod kinds;
pub(crate) mod link;
mod monitor;
mod neighbour;
pub(crate) mod nexthop;
pub(crate) mod nft;
pub(crate) mod own;
mod path_metrics;
mod qdisc;
mod route;
pub mod ruleset;
mod sent;
pub(crate) mod snapshot;
mod sock_diag;
pub(crate) mod uapi;
pub(crate) mod wire;
pub(crate) mod xfrm;

pub(crate) use link::{
    addresses, addresses_of, has_carrier, namespace_id, passing_addresses, xdp_features,
    xdp_programs, xdp_programs_of,
};
pub use link::{link, Link};
pub use monitor::{Change, Monitor};
pub use neighbour::resolve_neighbour;
pub(crate) use neighbour::{
    forget_neighbour, has_neighbour, keep_neighbour, neighbour_usable, verify_neighbour,
};
pub(crate) use path_metrics::PathMetrics;
pub(crate) use qdisc::{filtered_at_egress, qdisc_kinds, qdiscs, QdiscKinds, Qdiscs};
pub(crate) use route::{egress_route, local_networks, policy_rules, route_to, ways};
pub(crate) use route::{EgressRoute, RouteLookUps, RouteTo, WayOn, Ways, MANY_WAYS};
pub use ruleset::translates_sources;
pub(crate) use sent::SentPackets;
pub use snapshot::ds_field;
pub(crate) use snapshot::rules_hash;
pub(crate) use sock_diag::{connections, reset_unanswered, unconnected};
pub(crate) use xfrm::{has_ipsec_policies, offloading_devices, policy_devices};
