// SPDX-License-Identifier: GPL-2.0-or-later
//! The kernel's routing state as plain data, decoded attribute by attribute.
//!
//! Formats: linux/rtnetlink.h, if_link.h, if_addr.h, neighbour.h, nexthop.h, fib_rules.h.

mod rules;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::net::IpAddr;

use anyhow::{Context, Result};
use ipnet::IpNet;
use libc::{RTA_DST, RTA_METRICS, RTA_MULTIPATH, RTA_PREF, RTA_PREFSRC};
use libc::{RTA_PRIORITY, RTA_SRC, RTA_TABLE};
use libc::{RTM_GETADDR, RTM_GETLINK, RTM_GETNEIGH, RTM_GETROUTE, RTM_GETRULE};

use super::kinds;
use super::link::{decode_address, decode_link, Address, Link};
use super::neighbour;
use super::nexthop::{self, NextHop, NextHopObject};
use super::own;
use super::uapi::RTM_HEADER_LEN;
use super::wire::{bytes_at, u32_at, unless, Attributes, Socket, AF_INET, AF_INET6};
use super::xfrm;
pub(crate) use rules::decode_rule;

const RTM_GETNEXTHOP: u16 = 106;
const RTA_NH_ID: u16 = 30;

/// The metric of an IPv6 route that was given none (linux/ipv6_route.h).
pub(crate) const IP6_RT_PRIO_USER: u32 = 1024;

pub(crate) const TABLE_MAIN: u32 = libc::RT_TABLE_MAIN as u32;

/// RTPROT_ZEBRA, _BIRD, _BABEL, _OPENR, _BGP, _ISIS, _OSPF, _RIP and _EIGRP of linux/rtnetlink.h.
const DAEMONS: [u8; 9] = [11, 12, 42, 99, 186, 187, 188, 189, 192];

#[derive(Clone, Debug, Default)]
pub(crate) struct Snapshot {
    pub links: BTreeMap<u32, Link>,
    pub addresses: Vec<Address>,
    /// Link-layer addresses of the neighbours that are usable.
    pub neighbours: HashMap<(u32, IpAddr), [u8; 6]>,
    /// Those that gateways had when they were usable last, whether they are now or not. Not of this reading: only
    /// where something remembers earlier ones.
    pub last_macs: HashMap<(u32, IpAddr), [u8; 6]>,
    /// The ports behind which bridges have met Ethernet addresses, by bridge and address. Only read where
    /// a default route leaves by a bridge.
    pub bridged: HashMap<(u32, [u8; 6]), u32>,
    /// Ends of VXLAN devices for which their forwarding tables name a device, after that.
    pub tunnel_ends: BTreeSet<(u32, IpAddr)>,
    pub routes: Vec<Route>,
    /// In the order in which the kernel looks them up.
    pub rules: Vec<FibRule>,
    /// IPsec policies for leaving packets.
    pub policies: BTreeSet<xfrm::Policy>,
}

/// Router preference (RFC 4191), the best first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Preference {
    High,
    #[default]
    Medium,
    Low,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Route {
    pub table: u32,
    pub prefix: IpNet,
    pub source: Option<IpNet>,
    pub tos: u8,
    /// Lower is preferred.
    pub metric: u32,
    /// Router preference of IPv6 (RFC 4191), which decides between equal metrics.
    pub preference: Preference,
    /// The source address that it gives to packets without one.
    pub preferred_source: Option<IpAddr>,
    /// RTA_METRICS, see [`RouteOptions::metrics`].
    pub metrics: Vec<u8>,
    pub kind: u8,
    /// A routing daemon has made it.
    pub dynamic: bool,
    /// Made of several next hops by RTA_MULTIPATH or a nexthop group, even if only one is left.
    pub multipath: bool,
    pub hops: Vec<NextHop>,
}

impl Route {
    pub(crate) fn is_ipv6(&self) -> bool {
        self.prefix.addr().is_ipv6()
    }

    /// What the route says of packets that leave by one of its next hops.
    pub(crate) fn options(&self, hop: &NextHop) -> RouteOptions {
        RouteOptions {
            metric: match self.metric {
                IP6_RT_PRIO_USER if self.is_ipv6() => 0,
                metric => metric,
            },
            metrics: self.metrics.clone(),
            realms: hop.realms,
        }
    }
}

/// What a route says of its packets besides next hop and source. A copy of the route has to say it as well.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct RouteOptions {
    /// Its preference (RTA_PRIORITY), 0 if none was given. Some programs compare the routes of all tables by it, whatever
    /// the rules say, as strongSwan does for the source of its tunnels.
    pub metric: u32,
    /// MTU, congestion control, initial windows and the like, as RTA_METRICS has them: the kernel takes what it tells.
    pub metrics: Vec<u8>,
    /// Realms (RTA_FLOW).
    pub realms: Option<u32>,
}

/// Where a rule leads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Action {
    Table(u32),
    L3mdev,
    Goto(u32),
    #[default]
    Nothing,
    /// Blackhole, unreachable, prohibit.
    Drop,
}

/// An ip rule. A packet that matches one before a group's table is looked up was not routed by the
/// group's route, so it is left alone. An unset field matches everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FibRule {
    /// In a topology: table of the groups that the rule takes packets from; those of other tables are not
    /// concerned. Where the rule leads is not told there.
    pub table: u32,
    /// Lower ones are asked first.
    pub priority: u32,
    /// `not ...`: applies to what the fields do *not* match.
    pub invert: bool,
    /// (mark, mask)
    pub fwmark: Option<(u32, u32)>,
    /// Source address.
    pub src: Option<IpNet>,
    /// Destination address.
    pub dst: Option<IpNet>,
    /// Device the packet came in by; 1 (`lo`) for packets of local sockets, `u32::MAX` if it does not exist.
    pub iif: Option<u32>,
    /// First and last uid.
    pub uid: Option<(u32, u32)>,
    /// IP protocol number.
    pub ipproto: Option<u8>,
    /// First and last source port.
    pub sport: Option<(u16, u16)>,
    /// First and last destination port.
    pub dport: Option<(u16, u16)>,
    /// (DS field, mask), see [`crate::netlink::ds_field`].
    pub tos: Option<(u8, u8)>,
    /// About IPv6 packets; otherwise IPv4.
    pub ipv6: bool,
    /// Names a device to leave by.
    pub oif: bool,
    /// Has a condition that cannot be followed, such as a tunnel id.
    pub opaque: bool,
    /// Where it leads.
    pub action: Action,
    /// Routes not longer than this are ignored (`suppress_prefixlength`).
    pub suppress_length: Option<u32>,
    /// Routes over devices of a group are ignored (`suppress_ifgroup`).
    pub suppress_group: bool,
}

/// Reads everything. The flag is false when something changed during a dump.
pub(crate) fn read(socket: &mut Socket) -> Result<(Snapshot, bool)> {
    let mut snapshot = Snapshot::default();
    let mut consistent = true;
    let mut indexes = HashMap::new();

    consistent &= socket
        .dump(RTM_GETLINK, &[0; 16], |payload| {
            if let Some(link) = decode_link(payload) {
                indexes.insert(link.name.clone(), link.ifindex);
                snapshot.links.insert(link.ifindex, link);
            }
        })
        .context("cannot list the network devices")?;
    consistent &= socket
        .dump(RTM_GETADDR, &[0; 8], |payload| {
            snapshot.addresses.extend(decode_address(payload));
        })
        .context("cannot list the addresses")?;
    consistent &= socket
        .dump(RTM_GETNEIGH, &[0; RTM_HEADER_LEN], |payload| {
            let found = neighbour::decode(payload);
            let usable = found.and_then(|n| Some(((n.ifindex, n.address), n.usable_mac()?)));
            snapshot.neighbours.extend(usable);
        })
        .context("cannot list the neighbours")?;

    let mut objects = HashMap::new();
    let dumped = socket.dump(RTM_GETNEXTHOP, &[0; 8], |payload| {
        objects.extend(nexthop::decode_object(payload));
    });
    // Kernels built without nexthop objects have none to list.
    let dumped = unless(dumped, &[libc::EOPNOTSUPP]).context("cannot list the nexthop objects")?;
    consistent &= dumped.unwrap_or(true);

    let any = [0; RTM_HEADER_LEN];
    consistent &= socket
        .dump_families(RTM_GETROUTE, any, |payload| {
            // What mountain itself has added says nothing about the host.
            if !own::is_own_route(payload) {
                snapshot.routes.extend(decode_route(payload, &objects));
            }
        })
        .context("cannot list the routes")?;
    consistent &= socket
        .dump_families(RTM_GETRULE, any, |payload| {
            if !own::is_own_rule(payload) {
                snapshot.rules.extend(decode_rule(payload, &indexes));
            }
        })
        .context("cannot list the routing rules")?;
    snapshot.rules.sort_by_key(|rule| rule.priority);
    // Without the permission nothing is steered either.
    let policies = unless(xfrm::policies(), &[libc::EPERM]);
    snapshot.policies = policies
        .context("cannot list the IPsec policies")?
        .unwrap_or_default();
    look_closer(&mut snapshot, socket)?;
    Ok((snapshot, consistent))
}

/// A number that tells all routing rules but Mountain's own from others.
///
/// # Errors
/// When the kernel refuses a dump.
pub(crate) fn rules_hash() -> io::Result<u64> {
    let (mut socket, mut hasher) = (Socket::open()?, DefaultHasher::new());
    socket.dump_families(RTM_GETRULE, [0; RTM_HEADER_LEN], |payload| {
        if !own::is_own_rule(payload) {
            payload.hash(&mut hasher);
        }
    })?;
    Ok(hasher.finish())
}

/// Finds out what only the devices of default routes are asked for.
fn look_closer(snapshot: &mut Snapshot, socket: &mut Socket) -> Result<()> {
    let defaults = snapshot
        .routes
        .iter()
        .filter(|route| route.table == TABLE_MAIN && route.prefix.prefix_len() == 0);
    let devices: BTreeSet<u32> = defaults
        .flat_map(|route| route.hops.iter().map(|hop| hop.ifindex))
        .collect();
    for ifindex in &devices {
        let Some(link) = snapshot.links.get_mut(ifindex) else {
            continue;
        };
        match link.kind.as_deref() {
            Some("wwan") => link.modem = true,
            Some("ppp") => link.pppoe = kinds::device_below(&link.name),
            None => link.modem = kinds::is_modem(link),
            _ => {}
        }
    }
    // A VLAN's bridge counts as well: the gateway's address is on the VLAN's device.
    let has_bridges = snapshot.links.values().any(Link::is_bridge) && !devices.is_empty();
    let is_vxlan = |link: &Link| link.kind.as_deref() == Some("vxlan");
    if has_bridges || snapshot.links.values().any(is_vxlan) {
        let mut header = [0; RTM_HEADER_LEN];
        header[0] = libc::AF_BRIDGE as u8;
        let dumped = socket.dump(RTM_GETNEIGH, &header, |payload| {
            snapshot.bridged.extend(neighbour::decode_bridged(payload));
            snapshot
                .tunnel_ends
                .extend(neighbour::decode_forwarding(payload));
        });
        // Changes while it is read matter no more than those right after.
        unless(dumped, &[libc::EOPNOTSUPP]).context("cannot list what bridges have learned")?;
    }
    Ok(())
}

/// Whether a route message is about a cached exception (such as a learned path MTU), not a route.
pub(crate) fn is_cached_route(payload: &[u8]) -> bool {
    u32_at(payload, 8).is_some_and(|flags| flags & libc::RTM_F_CLONED != 0)
}

/// Whether a route message is about a default route, in any table.
pub(crate) fn is_default_route(payload: &[u8]) -> bool {
    // struct rtmsg begins with the family and the length of the prefix.
    payload.get(1) == Some(&0)
}

/// A route from its message; `None`: of another family, cached, or broken. `objects`: the nexthop objects. The hops of one that
/// is not among them are in the message as well, but where `net.ipv4.nexthop_compat_mode` is off.
pub(crate) fn decode_route(payload: &[u8], objects: &HashMap<u32, NextHopObject>) -> Option<Route> {
    // struct rtmsg: family, dst_len, src_len, tos, table, protocol, scope, type, flags (4)
    let [family, dst_length, src_length, tos, table, protocol, _, kind] = bytes_at(payload, 0)?;
    if !matches!(family, AF_INET | AF_INET6) || is_cached_route(payload) {
        return None;
    }
    let attributes = Attributes::after(payload, RTM_HEADER_LEN);
    let object = attributes.u32(RTA_NH_ID);
    let (multipath, hops) = if let Some(known) = object.and_then(|id| nexthop::resolve(id, objects))
    {
        known
    } else if let Some(hops) = attributes.get(RTA_MULTIPATH) {
        (true, nexthop::decode_multipath(hops))
    } else {
        let flags = u32_at(payload, 8)?;
        (
            false,
            vec![nexthop::decode_hop(&attributes, None, 0, flags)],
        )
    };
    Some(Route {
        table: attributes.u32(RTA_TABLE).unwrap_or(table.into()),
        prefix: network(family, attributes.ip(RTA_DST), dst_length)?,
        source: match src_length {
            0 => None,
            length => network(family, attributes.ip(RTA_SRC), length),
        },
        tos,
        metric: attributes.u32(RTA_PRIORITY).unwrap_or(0),
        // ICMPV6_ROUTER_PREF_*
        preference: match attributes.u8(RTA_PREF) {
            Some(1) => Preference::High,
            Some(3) => Preference::Low,
            _ => Preference::Medium,
        },
        preferred_source: attributes.ip(RTA_PREFSRC),
        metrics: attributes
            .get(RTA_METRICS)
            .map(<[u8]>::to_vec)
            .unwrap_or_default(),
        kind,
        dynamic: DAEMONS.contains(&protocol),
        multipath,
        hops,
    })
}

pub(super) fn network(family: u8, address: Option<IpAddr>, length: u8) -> Option<IpNet> {
    let address = address.unwrap_or(if family == AF_INET6 {
        std::net::Ipv6Addr::UNSPECIFIED.into()
    } else {
        std::net::Ipv4Addr::UNSPECIFIED.into()
    });
    IpNet::new(address, length).ok().map(|net| net.trunc())
}

/// What a TOS of a rule or route is compared with. Of IPv4 packets that is the DS field without its
/// upper three bits, in all kernels (`INET_DSCP_LEGACY_TOS_MASK`); of IPv6 ones all but the ECN bits.
pub fn ds_field(tos: u8, ipv6: bool) -> Option<(u8, u8)> {
    let mask = if ipv6 { 0xfc } else { 0x1c };
    (tos != 0).then_some((tos, mask))
}
