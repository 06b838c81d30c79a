// SPDX-License-Identifier: GPL-2.0-or-later
//! What can be steered: paths, groups and what must be left alone. All features share these words.
//!
//! [`read_topology`] condenses the kernel's routing state, which `netlink` reads, into a [`Topology`]:
//! `rules` walks the FIB rules as the kernel does, `build` decides what is a group, what is left
//! alone and why. Both are pure functions. `steer::policy` decides over the result and `bpf` writes
//! it to the maps.

mod build;
mod global;
mod memory;
mod read;
mod rules;

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

pub use crate::netlink::snapshot::{FibRule, RouteOptions};
pub use global::is_translated_later;
pub(crate) use global::{is_global, is_private};
pub(crate) use memory::{Memory, Placed};
pub(crate) use read::read_on_blocking;
pub use read::{read_topology, read_topology_blocking, Filter};

/// Most paths in one group; the BPF program's loops and bit masks are sized by it.
pub(crate) const MAX_GROUP_PATHS: usize = 16;
/// Most paths on one host, over all groups and both families.
pub(crate) const MAX_PATHS: usize = 64;
/// Most groups on one host.
pub(crate) const MAX_GROUPS: usize = 64;
/// MTN_MAX_FIB_RULES of bpf/common/intf.h.
pub(crate) const MAX_FIB_RULES: usize = 64;
/// Most destinations of [`Topology::kept`]: VPN servers are few.
pub(crate) const MAX_KEPT: usize = 64;

/// Of several destinations, how many are named to people.
const DESTINATIONS_TOLD: usize = 3;
/// Why new flows choose no uplink where the default route is of another table.
pub(crate) const NOT_IN_MAIN: &str = "it is not in the main table";

/// Destinations in words: the first ones, and how many more there are. A group may have a full routing table of them.
pub(crate) fn destinations_told(prefixes: &[IpNet]) -> String {
    let told = prefixes.iter().take(DESTINATIONS_TOLD);
    let told: Vec<String> = told.map(IpNet::to_string).collect();
    let told = told.join(", ");
    match prefixes.len().saturating_sub(DESTINATIONS_TOLD) {
        0 => told,
        more => format!("{told} and {more} more"),
    }
}

/// What identifies a path: a next hop of the kernel's routing table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PathKey {
    /// Index of the device the next hop leaves by.
    pub ifindex: u32,
    /// Gateway, or `None` for a next hop that is on the link itself. May be of the other family
    /// than the route (RFC 5549: IPv4 over an IPv6 next hop).
    pub gateway: Option<IpAddr>,
    /// Family of the routes that use it: true for IPv6.
    pub ipv6: bool,
}

/// One path: a (device, gateway) pair that at least one multipath route offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Path {
    /// What tells it from all other paths.
    pub key: PathKey,
    /// Name of the device, e.g. `eth0`.
    pub ifname: String,
    /// Source of our probes: a global address on the device of the path's family, preferably one
    /// on the gateway's subnet; a link-local one where there is no other.
    pub source: Option<IpAddr>,
    /// MTU of the device for the path's family, in bytes of the network layer.
    pub mtu: u32,
    /// Whether frames on the device carry Ethernet headers (ARPHRD_ETHER). Others cannot be
    /// redirected to or from (field: `bpf_redirect_neigh` drops silently there).
    pub ethernet: bool,
    /// A modem's device: its traffic costs money.
    pub modem: bool,
    /// Its default route stands behind the others' as where NetworkManager finds no Internet.
    pub demoted: bool,
    /// Device administratively up with carrier, and the next hop neither dead nor linkdown.
    pub up: bool,
    /// Global addresses on the device, of the path's family, in order: what packets bear that belong
    /// to this path.
    pub addresses: Vec<IpAddr>,
    /// Those of them that may be the source of something new: neither deprecated, tentative nor duplicate.
    pub fresh: Vec<IpAddr>,
    /// Those of the addresses whose packets a routing rule of others takes elsewhere, with the rule's priority.
    pub taken: Vec<(IpAddr, u32)>,
    /// The source that the path's own default route prefers, where it names one.
    pub preferred_source: Option<IpAddr>,
    /// What that route says besides.
    pub options: RouteOptions,
    /// Link-layer address of the gateway while the kernel's neighbour entry is usable
    /// (REACHABLE, STALE, DELAY, PROBE, PERMANENT, NOARP); `None` otherwise.
    pub gateway_mac: Option<[u8; 6]>,
}

#[cfg(test)]
impl Path {
    /// A path by a gateway on the Ethernet device `uINDEX`, which is up and has no address.
    pub(crate) fn plain(ifindex: u32, gateway: &str) -> Self {
        let gateway: IpAddr = gateway.parse().unwrap();
        let key = PathKey {
            ifindex,
            gateway: Some(gateway),
            ipv6: gateway.is_ipv6(),
        };
        Self {
            key,
            ifname: format!("u{ifindex}"),
            source: None,
            mtu: 1500,
            ethernet: true,
            modem: false,
            demoted: false,
            up: true,
            addresses: Vec::new(),
            fresh: Vec::new(),
            taken: Vec::new(),
            preferred_source: None,
            options: RouteOptions::default(),
            gateway_mac: None,
        }
    }
}

/// One path of a group with its route weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Index into [`Topology::paths`].
    pub path: usize,
    /// Route weight, 1..=256 (the kernel stores it minus one).
    pub weight: u16,
}

/// What can be chosen for the flows of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// All paths carry the same source addresses: running flows move.
    #[default]
    Move,
    /// The next hops of one multipath route give sockets addresses of their own: new flows choose
    /// their path; those that have an address of the host itself move as well.
    PlaceAndMove,
    /// Several default routes, one preferred by its metric: new flows choose their path.
    Place,
}

impl Kind {
    /// Whether running flows may be moved between the paths.
    pub fn moves(self) -> bool {
        self != Self::Place
    }

    /// Whether new flows are placed: they get a path before their source address is chosen.
    pub fn places(self) -> bool {
        self != Self::Move
    }
}

/// What a group's paths may be used for, one bit for each member in order. No bit in a mask of a
/// class: no path is known good, and the kernel decides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathMasks {
    /// Eligible for latency flows.
    pub latency: u16,
    /// Eligible for bulk flows.
    pub bulk: u16,
    /// Deliver at all; flows leave the others at once.
    pub alive: u16,
    /// Their newest probes were late or lost: latency flows leave them at once. A path that is merely
    /// more costly is left without reordering. Of an eligible one, those leave whose hash gives them to another.
    pub ejected: u16,
    /// Our bulk flows fill them while another one has room: those leave, without reordering, whose hash gives them to
    /// another.
    #[serde(default)]
    pub full: u16,
}

/// Prefixes that share one set of next hops in one table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Whether running flows move, new ones are placed, or both.
    pub kind: Kind,
    /// Routing table (254 is `main`).
    pub table: u32,
    /// Destination prefixes of the multipath routes that have exactly these members.
    pub prefixes: Vec<IpNet>,
    /// At most [`MAX_GROUP_PATHS`]; sorted by path index.
    pub members: Vec<Member>,
    /// The path, by index, that the kernel takes for all: of [`Kind::Place`].
    pub preferred: Option<usize>,
    /// What rules and other routes ask for that may send packets out by one of the members. Where the
    /// firewall changes it after routing, such a packet looks like one of the group.
    pub told_by: BTreeSet<Rewritable>,
}

/// A condition of FIB rules, or of routes, that the firewall may change once the packet is routed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Rewritable {
    /// The packet's mark.
    Mark,
    /// Its DS field.
    Tos,
    /// Its addresses and ports. The program knows what NAT has made of them, but not what else has.
    Address,
}

/// Uplinks of one family whose adoption rests, as the kernel prefers another way for new flows: a VPN's. Or one is
/// left of them, or what it prefers is an uplink that lacks its address. Or these come after a multipath route, whose
/// next hops new flows choose from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Suspended {
    /// Of IPv6; otherwise of IPv4.
    pub ipv6: bool,
    /// Those that could be adopted but for that.
    pub paths: Vec<Path>,
    /// What the kernel prefers.
    pub why: String,
    /// All rules and tables of theirs stay, as they lead nothing out of what the kernel prefers. Another uplink is gone
    /// or incomplete for the moment: what runs on these goes on. Or a routing rule before ours takes the packets away:
    /// what still meets ours is what the kernel itself sends out by the default routes.
    pub whole: bool,
}

/// A single destination that the kernel sends out by the gateway of an uplink, whatever the default route
/// is: as a VPN's server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Kept {
    /// The destination.
    pub host: IpAddr,
    /// The uplink's device.
    pub ifindex: u32,
}

/// Everything the steering needs to know of the kernel's routing, at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    /// Each (device, gateway) pair once; groups name them by index.
    pub paths: Vec<Path>,
    /// Sets of next hops that flows can be steered among.
    pub groups: Vec<Group>,
    /// Of each group the metric of its first prefix's route; of default routes that differ in it, the lowest.
    pub metrics: Vec<u32>,
    /// Routes of the groups' tables, and of tables looked up before them (`local`), that are not
    /// multipath ones of ours and lie inside a group's prefix, and, where some flows choose when they start, what
    /// IPsec policies are about: a destination in one of them is not
    /// ours unless a group's prefix is more specific still. Sorted; entries that another one
    /// already covers are left out.
    pub not_ours: Vec<IpNet>,
    /// ip rules that come before the groups' tables are looked up, without those that only
    /// choose `local` or the group's own table.
    pub fib_rules: Vec<FibRule>,
    /// Addresses on the paths' devices, or in the network of some of these: packets from them belong to one uplink and stay.
    pub uplink_bound_sources: Vec<IpAddr>,
    /// The host's other addresses: packets from them may take any path.
    pub own_sources: Vec<IpAddr>,
    /// Devices of paths that are ipvlans and stand on another path's device. They share its link-layer address.
    pub ipvlans: BTreeSet<u32>,
    /// Multipath routes found but not adopted, each with the reason, for `mountain check`.
    pub skipped: Vec<String>,
    /// Uplinks that new flows would choose from, or chose from before, and do not for the time being.
    pub suspended: Vec<Suspended>,
    /// A default route was not adopted that may be when its bridge has met the gateway. Nothing tells of that.
    pub unlearned: bool,
    /// Where flows choose when they start, or chose before: destinations to which those that did keep their uplink.
    /// In order, at most [`MAX_KEPT`].
    pub kept: Vec<Kept>,
    /// Where some flows choose when they start: devices by which forwarded packets may come from
    /// within, those with Ethernet headers that are no path's; of a bridge its ports.
    pub inner_devices: Vec<u32>,
    /// Ethernet addresses of these bridges. Frames to other addresses are passed on.
    pub inner_bridges: BTreeSet<[u8; 6]>,
    /// Networks that the uplinks' addresses are in. A forwarded packet from there is right on that uplink only, and so is what
    /// a local route brings here.
    pub uplink_nets: Vec<IpNet>,
    /// Likewise: private networks behind this host, from which forwarded packets come, those on a link first. Those of
    /// few addresses are told together.
    pub inner_nets: Vec<InnerNet>,
    /// Likewise: priorities for ip rules of our own, by family ([IPv4, IPv6]): right before the look-up of the
    /// main table, after every rule that others have put there.
    pub rule_priorities: [u32; 2],
    /// Likewise, by family: rules of others that go by marks of packets.
    pub by_mark: [Option<ByMark>; 2],
    /// Likewise, by family: what rules of others ask for that the firewall may change at output, so that a packet of this
    /// host leaves by another path.
    pub rerouted_by: [BTreeSet<Rewritable>; 2],
    /// Likewise: the bits of the marks that placed flows bear.
    pub our_bits: u32,
    /// Likewise: the marks that they compare, with their masks, which would be others with our bits in them.
    pub whole_marks: [BTreeSet<(u32, u32)>; 2],
}

/// A network behind this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct InnerNet {
    /// Its addresses.
    pub net: IpNet,
    /// The device by which the main table leads there; `None`: there are several.
    pub device: Option<u32>,
}

/// Rules of others that packets meet before the main table, and that lead elsewhere by the packets' marks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByMark {
    /// Priority of the first one.
    pub priority: u32,
    /// The bits that they compare.
    pub compared: u32,
    /// The bits of the marks that placed flows bear.
    pub ours: u32,
}

impl Topology {
    /// Whether packets can be redirected to and from a path. What is redirected to an ipvlan comes by the device below,
    /// looks as if it had been routed there, and would be redirected again and again.
    pub(crate) fn can_redirect(&self, path: &Path) -> bool {
        path.ethernet && !self.ipvlans.contains(&path.key.ifindex)
    }

    /// Whether some group's new flows choose their path.
    pub fn places(&self) -> bool {
        self.groups.iter().any(|group| group.kind.places())
    }

    /// Likewise of one family.
    pub(crate) fn places_in(&self, ipv6: bool) -> bool {
        let mut placing = self.groups.iter().filter(|group| group.kind.places());
        placing.any(|group| group.prefixes.iter().any(|p| p.addr().is_ipv6() == ipv6))
    }

    /// Whether the kernel chooses among next hops by a hash for what this host sends to a group of a family, and the
    /// address that a flow gets depends on that.
    pub(crate) fn chooses_by_hash(&self, ipv6: bool) -> bool {
        let mut groups = self.groups.iter();
        groups.any(|group| {
            group.kind == Kind::PlaceAndMove
                && group.prefixes.iter().any(|p| p.addr().is_ipv6() == ipv6)
        })
    }

    /// Families whose new flows are left to the kernel for the time being: not of uplinks that rest beside a group.
    pub(crate) fn left_to_kernel(&self) -> impl Iterator<Item = &Suspended> {
        let suspended = self.suspended.iter();
        suspended.filter(move |suspended| !self.places_in(suspended.ipv6))
    }

    /// Whether flows choose their path when they start, or have chosen it before that was suspended.
    pub(crate) fn has_placed(&self) -> bool {
        self.places() || !self.suspended.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_destinations_the_first_ones_are_named() {
        let nets = |n: u8| -> Vec<IpNet> {
            let net = |i| IpNet::from(IpAddr::from([10, i, 0, 0]));
            (0..n).map(net).collect()
        };
        assert_eq!(destinations_told(&nets(1)), "10.0.0.0/32");
        let three = "10.0.0.0/32, 10.1.0.0/32, 10.2.0.0/32";
        assert_eq!(destinations_told(&nets(3)), three);
        assert_eq!(
            destinations_told(&nets(200)),
            format!("{three} and 197 more")
        );
    }
}
