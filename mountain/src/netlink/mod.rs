// SPDX-License-Identifier: GPL-2.0-or-later
//! What the kernel says of its network, read and followed by netlink.
//!
//! `wire` speaks the netlink framing. `snapshot` decodes the few attributes of routing that are needed
//! into plain data, `nexthop` those of next hops. [`Monitor`] reports changes: make it first and read
//! second, so that no change falls between. `route` looks one route up, `link` reads devices and
//! addresses, `neighbour` neighbours, `netfilter` lists tables, `ruleset` reads nftables rules,
//! `conntrack` lists connections, `sock_diag` sockets, and `generic` finds families of generic netlink,
//! of which `path_metrics` is one. `own` tells the routes and rules that Mountain itself has made.
//!
//! Attributes are picked one by one instead of decoding whole messages with `netlink-packet-route`.
//! There one attribute of a newer kernel, or an encapsulation inside a multipath next hop, makes the
//! whole message unreadable. A route that is missing here would be a route whose traffic is moved by
//! mistake.

pub mod conntrack;
pub(crate) mod generic;
pub(crate) mod kinds;
pub(crate) mod link;
mod monitor;
mod neighbour;
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
pub(crate) mod uapi;
pub(crate) mod wire;
mod xfrm;

pub use link::{addresses, link, namespace_id, Link};
pub use monitor::{Change, Monitor};
pub(crate) use neighbour::keep_neighbour;
pub use neighbour::{neighbour_usable, resolve_neighbour};
pub use netfilter::{tables_with_base_chains, translates_sources};
pub use path_metrics::PathMetrics;
pub use qdisc::{qdiscs, Qdiscs};
pub use route::{egress_route, policy_rules, route_to, EgressRoute, RouteTo};
pub use snapshot::ds_field;
pub use sock_diag::{reset_unanswered, unconnected};
pub use xfrm::offloading_devices;
