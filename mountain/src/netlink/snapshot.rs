// SPDX-License-Identifier: GPL-2.0-or-later
//! The kernel's routing state as plain data, decoded attribute by attribute.
//!
//! Formats: linux/rtnetlink.h, if_link.h, if_addr.h, neighbour.h, nexthop.h, fib_rules.h.

mod rules;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::net::IpAddr;

use anyhow::{Context, Result};
use ipnet::IpNet;

use super::kinds::{self, Lower};
use super::nexthop::{self, NextHop, NextHopObject};
use super::own;
use super::wire::{self, push_attribute, Attributes, Socket};

const RTM_GETLINK: u16 = 18;
const RTM_GETADDR: u16 = 22;
const RTM_GETROUTE: u16 = 26;
const RTM_NEWNEIGH: u16 = 28;
const RTM_GETNEIGH: u16 = 30;
const RTM_GETRULE: u16 = 34;
const RTM_GETNEXTHOP: u16 = 106;

const AF_INET: u8 = libc::AF_INET as u8;
const AF_INET6: u8 = libc::AF_INET6 as u8;

/// Type of an ordinary route (RTN_UNICAST).
pub(crate) const UNICAST: u8 = 1;
pub(crate) const TABLE_MAIN: u32 = 254;
/// Type of a route that ends the look-up in its table without a result (RTN_THROW).
pub(crate) const THROW: u8 = 9;

#[derive(Clone, Debug, Default)]
pub(crate) struct Snapshot {
    pub links: BTreeMap<u32, Link>,
    pub addresses: Vec<Address>,
    /// Link-layer addresses of the neighbours that are usable.
    pub neighbours: HashMap<(u32, IpAddr), [u8; 6]>,
    /// The ports behind which bridges have met Ethernet addresses, by bridge and address. Only read where
    /// a default route leaves by a bridge.
    pub bridged: HashMap<(u32, [u8; 6]), u32>,
    pub routes: Vec<Route>,
    /// In the order in which the kernel looks them up.
    pub rules: Vec<Rule>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Link {
    pub ifname: String,
    pub up: bool,
    pub mtu: u32,
    pub ethernet: bool,
    /// Device this one is a port of.
    pub master: Option<u32>,
    /// Link kind of a virtual device: `vlan`, `tun`...; `None`: hardware.
    pub kind: Option<String>,
    pub lower: Lower,
    /// Link-layer address; empty where there is none.
    pub address: Vec<u8>,
    /// A modem's device (`DEVTYPE=wwan`), a ppp device that runs over PPPoE. Only looked for where a
    /// default route leaves by it.
    pub wwan: bool,
    pub pppoe: bool,
    /// Routing table of a VRF device.
    pub vrf_table: Option<u32>,
}

impl Link {
    pub(crate) fn is_bridge(&self) -> bool {
        self.kind.as_deref() == Some("bridge")
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Address {
    pub ifindex: u32,
    pub address: IpAddr,
    /// Prefix of the link the address is on (of the peer on point-to-point links).
    pub subnet: Option<IpNet>,
    pub global: bool,
    /// Not to be used as a source while there is another: secondary (IPv4), temporary,
    /// deprecated, tentative or duplicate (IPv6).
    pub second_choice: bool,
    /// Not deprecated, tentative or duplicate (IPv6): something new may use it as its source.
    pub fresh: bool,
}

/// Router preference (RFC 4191), the best first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Preference {
    High,
    #[default]
    Medium,
    Low,
}

#[derive(Clone, Debug)]
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
    pub kind: u8,
    /// Made of several next hops by RTA_MULTIPATH or a nexthop group, even if only one is left.
    pub multipath: bool,
    pub hops: Vec<NextHop>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Action {
    Table(u32),
    L3mdev,
    Goto(u32),
    #[default]
    Nothing,
    /// Blackhole, unreachable, prohibit.
    Drop,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Rule {
    pub ipv6: bool,
    pub priority: u32,
    pub action: Action,
    pub invert: bool,
    /// Routes not longer than this are ignored (`suppress_prefixlength`).
    pub suppress_length: Option<u32>,
    /// Routes over devices of a group are ignored (`suppress_ifgroup`).
    pub suppress_group: bool,
    pub fwmark: Option<(u32, u32)>,
    pub src: Option<IpNet>,
    pub dst: Option<IpNet>,
    /// Index of the device packets came in by, 1 for local ones; `u32::MAX` if it does not exist.
    pub iif: Option<u32>,
    pub oif: bool,
    pub uid: Option<(u32, u32)>,
    pub ipproto: Option<u8>,
    pub sport: Option<(u16, u16)>,
    pub dport: Option<(u16, u16)>,
    /// (DS field, mask)
    pub tos: Option<(u8, u8)>,
    /// Has a condition that cannot be followed, such as a tunnel id.
    pub opaque: bool,
}

/// Reads everything. The flag is false when something changed during a dump.
pub(crate) fn read(socket: &mut Socket) -> Result<(Snapshot, bool)> {
    let mut snapshot = Snapshot::default();
    let mut consistent = true;
    let mut indexes = HashMap::new();

    consistent &= socket
        .dump(RTM_GETLINK, &[0; 16], |_, payload| {
            if let Some((ifindex, link)) = decode_link(payload) {
                indexes.insert(link.ifname.clone(), ifindex);
                snapshot.links.insert(ifindex, link);
            }
        })
        .context("cannot list the network devices")?;
    consistent &= socket
        .dump(RTM_GETADDR, &[0; 8], |_, payload| {
            snapshot.addresses.extend(decode_address(payload));
        })
        .context("cannot list the addresses")?;
    consistent &= socket
        .dump(RTM_GETNEIGH, &[0; 12], |_, payload| {
            if let Some(neighbour) = decode_neighbour(payload) {
                if let Some(mac) = neighbour.usable_mac() {
                    snapshot
                        .neighbours
                        .insert((neighbour.ifindex, neighbour.address), mac);
                }
            }
        })
        .context("cannot list the neighbours")?;

    let mut objects = HashMap::new();
    let dumped = socket.dump(RTM_GETNEXTHOP, &[0; 8], |_, payload| {
        objects.extend(nexthop::decode_object(payload));
    });
    consistent &= match dumped {
        // Kernels built without nexthop objects have none to list.
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => true,
        other => other.context("cannot list the nexthop objects")?,
    };

    for family in [AF_INET, AF_INET6] {
        let mut header = [0; 12];
        header[0] = family;
        consistent &= absent_family(
            family,
            socket.dump(RTM_GETROUTE, &header, |_, payload| {
                // What mountain itself has added says nothing about the host.
                if !own::is_own_route(payload) {
                    snapshot.routes.extend(decode_route(payload, &objects));
                }
            }),
        )
        .context("cannot list the routes")?;
        consistent &= absent_family(
            family,
            socket.dump(RTM_GETRULE, &header, |_, payload| {
                if !own::is_own_rule(payload) {
                    snapshot.rules.extend(rules::decode_rule(payload, &indexes));
                }
            }),
        )
        .context("cannot list the routing rules")?;
    }
    snapshot.rules.sort_by_key(|rule| rule.priority);
    look_closer(&mut snapshot, socket)?;
    Ok((snapshot, consistent))
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
            Some("wwan") => link.wwan = true,
            Some("ppp") => link.pppoe = kinds::is_pppoe(&link.ifname),
            None => {
                link.wwan = kinds::has_wwan_type(&link.ifname, *ifindex, &link.address);
            }
            _ => {}
        }
    }
    // A VLAN's bridge counts as well: the gateway's address is on the VLAN's device.
    if snapshot.links.values().any(Link::is_bridge) && !devices.is_empty() {
        let mut header = [0; 12];
        header[0] = libc::AF_BRIDGE as u8;
        let dumped = socket.dump(RTM_GETNEIGH, &header, |_, payload| {
            snapshot.bridged.extend(decode_bridged(payload));
        });
        match dumped {
            // Changes while it is read matter no more than those right after.
            Ok(_) => {}
            Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
            Err(e) => return Err(e).context("cannot list what bridges have learned"),
        }
    }
    Ok(())
}

/// An entry of a bridge's forwarding table: bridge, address and port.
fn decode_bridged(payload: &[u8]) -> Option<((u32, [u8; 6]), u32)> {
    const NDA_MASTER: u16 = 9;
    const NUD_PERMANENT: u16 = 0x80;

    let state = u16::from_ne_bytes(*payload.get(8..)?.first_chunk()?);
    // Those are the ports' own addresses.
    if i32::from(*payload.first()?) != libc::AF_BRIDGE || state & NUD_PERMANENT != 0 {
        return None;
    }
    let attributes = Attributes::after(payload, 12);
    let address = attributes.get(NDA_LLADDR)?.try_into().ok()?;
    let bridge = attributes.u32(NDA_MASTER)?;
    Some(((bridge, address), u32_at(payload, 4)?))
}

/// A kernel without IPv6 (or without policy rules) refuses the dump: nothing is there to read.
fn absent_family(family: u8, dumped: io::Result<bool>) -> io::Result<bool> {
    match dumped {
        Err(error)
            if matches!(
                error.raw_os_error(),
                Some(libc::EOPNOTSUPP | libc::EAFNOSUPPORT)
            ) =>
        {
            tracing::debug!(family, "the kernel has no such routing state");
            Ok(true)
        }
        other => other,
    }
}

/// Message family, device index and flags of a link message: what events need.
pub(crate) struct LinkHead {
    pub ifindex: u32,
    pub up: bool,
}

pub(crate) fn decode_link_head(payload: &[u8]) -> Option<LinkHead> {
    // struct ifinfomsg: family, pad, type (2), index (4), flags (4), change (4). Bridges report
    // their ports with their own family; those are no news about the device.
    if *payload.first()? != libc::AF_UNSPEC as u8 {
        return None;
    }
    let flags = u32_at(payload, 8)?;
    const UP: u32 = libc::IFF_UP as u32 | libc::IFF_RUNNING as u32 | libc::IFF_LOWER_UP as u32;
    Some(LinkHead {
        ifindex: u32_at(payload, 4)?,
        up: flags & UP == UP,
    })
}

pub(crate) fn decode_link(payload: &[u8]) -> Option<(u32, Link)> {
    const IFLA_ADDRESS: u16 = 1;
    const IFLA_IFNAME: u16 = 3;
    const IFLA_MTU: u16 = 4;
    const IFLA_LINK: u16 = 5;
    const IFLA_MASTER: u16 = 10;
    const IFLA_LINKINFO: u16 = 18;
    const IFLA_LINK_NETNSID: u16 = 37;
    const IFLA_INFO_KIND: u16 = 1;
    const IFLA_INFO_DATA: u16 = 2;
    const IFLA_VRF_TABLE: u16 = 1;

    let head = decode_link_head(payload)?;
    let attributes = Attributes::after(payload, 16);
    let device_type = u16::from_ne_bytes(*payload.get(2..)?.first_chunk()?);
    let info = attributes.get(IFLA_LINKINFO);
    let info = info.map(|info| Attributes::after(info, 0));
    let kind = info.as_ref().and_then(|info| info.string(IFLA_INFO_KIND));
    let vrf_table = match kind.as_deref() {
        Some("vrf") => info
            .and_then(|info| Attributes::after(info.get(IFLA_INFO_DATA)?, 0).u32(IFLA_VRF_TABLE)),
        _ => None,
    };
    Some((
        head.ifindex,
        Link {
            ifname: attributes.string(IFLA_IFNAME)?,
            up: head.up,
            mtu: attributes.u32(IFLA_MTU)?,
            ethernet: device_type == libc::ARPHRD_ETHER,
            master: attributes.u32(IFLA_MASTER),
            kind,
            lower: match (attributes.u32(IFLA_LINK), attributes.has(IFLA_LINK_NETNSID)) {
                (Some(_), true) => Lower::Elsewhere,
                // What stands on nothing names itself, or 0.
                (Some(lower), false) if lower != 0 && lower != head.ifindex => Lower::Here(lower),
                _ => Lower::None,
            },
            address: attributes.get(IFLA_ADDRESS).unwrap_or_default().to_vec(),
            wwan: false,
            pppoe: false,
            vrf_table,
        },
    ))
}

fn decode_address(payload: &[u8]) -> Option<Address> {
    const IFA_ADDRESS: u16 = 1;
    const IFA_LOCAL: u16 = 2;
    const IFA_FLAGS: u16 = 8;
    // IFA_F_SECONDARY (temporary for IPv6), DADFAILED, DEPRECATED, TENTATIVE.
    const SECOND_CHOICE: u32 = 0x01 | NOT_FRESH;
    const NOT_FRESH: u32 = 0x08 | 0x20 | 0x40;

    // struct ifaddrmsg: family, prefix length, flags, scope, index (4)
    let &[_, prefix_length, flags, scope] = payload.first_chunk()?;
    let attributes = Attributes::after(payload, 8);
    let on_link = attributes.ip(IFA_ADDRESS);
    let flags = attributes.u32(IFA_FLAGS).unwrap_or(flags.into());
    Some(Address {
        ifindex: u32_at(payload, 4)?,
        address: attributes.ip(IFA_LOCAL).or(on_link)?,
        subnet: on_link.and_then(|ip| IpNet::new(ip, prefix_length).ok().map(|net| net.trunc())),
        global: scope == libc::RT_SCOPE_UNIVERSE,
        second_choice: flags & SECOND_CHOICE != 0,
        fresh: flags & NOT_FRESH == 0,
    })
}

/// A unicast neighbour entry of IPv4 or IPv6.
pub(crate) struct Neighbour {
    pub ifindex: u32,
    pub address: IpAddr,
    state: u16,
    mac: Option<[u8; 6]>,
}

const NUD_REACHABLE: u16 = 0x02;
const NUD_STALE: u16 = 0x04;
const NUD_DELAY: u16 = 0x08;
const NUD_PROBE: u16 = 0x10;
const NUD_NOARP: u16 = 0x40;
const NUD_PERMANENT: u16 = 0x80;
const NUD_USABLE: u16 =
    NUD_REACHABLE | NUD_STALE | NUD_DELAY | NUD_PROBE | NUD_NOARP | NUD_PERMANENT;
const NDA_DST: u16 = 1;

impl Neighbour {
    pub(crate) fn usable(&self) -> bool {
        self.state & NUD_USABLE != 0
    }

    pub(crate) fn usable_mac(&self) -> Option<[u8; 6]> {
        self.mac.filter(|_| self.usable())
    }
}

pub(crate) fn decode_neighbour(payload: &[u8]) -> Option<Neighbour> {
    const NTF_PROXY: u8 = 0x08;

    // struct ndmsg: family, pad (3), index (4), state (2), flags, type
    let family = *payload.first()?;
    if !matches!(family, AF_INET | AF_INET6) || payload.get(10)? & NTF_PROXY != 0 {
        return None;
    }
    let attributes = Attributes::after(payload, 12);
    let address = attributes
        .ip(NDA_DST)
        .filter(|address| !address.is_multicast())?;
    Some(Neighbour {
        ifindex: u32_at(payload, 4)?,
        address,
        state: u16::from_ne_bytes(*payload.get(8..)?.first_chunk()?),
        mac: attributes
            .get(NDA_LLADDR)
            .and_then(|address| address.try_into().ok()),
    })
}

const NDA_LLADDR: u16 = 2;
const NLM_F_REPLACE: u16 = 0x100;
const NLM_F_CREATE: u16 = 0x400;

/// An ndmsg about one neighbour.
pub(crate) fn neighbour_message(ifindex: u32, address: IpAddr, state: u16, flags: u8) -> Vec<u8> {
    let family = if address.is_ipv6() { AF_INET6 } else { AF_INET };
    let mut body = vec![family, 0, 0, 0];
    body.extend_from_slice(&ifindex.to_ne_bytes());
    body.extend_from_slice(&state.to_ne_bytes());
    body.extend_from_slice(&[flags, 0]);
    push_attribute(&mut body, NDA_DST, &wire::ip_bytes(address));
    body
}

/// Makes the kernel resolve or confirm a neighbour, see [`super::resolve_neighbour`].
pub(crate) fn use_neighbour(socket: &mut Socket, ifindex: u32, address: IpAddr) -> io::Result<()> {
    const NTF_USE: u8 = 0x01;

    // NTF_USE takes the permanence away from an entry that an administrator made: look first.
    match socket.request(RTM_GETNEIGH, 0, &neighbour_message(ifindex, address, 0, 0)) {
        Ok(Some(found)) => {
            let fixed = decode_neighbour(&found)
                .is_some_and(|entry| entry.state & (NUD_PERMANENT | NUD_NOARP) != 0);
            if fixed {
                return Ok(());
            }
        }
        Ok(None) => {}
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
        Err(error) => return Err(error),
    }
    let message = neighbour_message(ifindex, address, 0, NTF_USE);
    socket
        .request(RTM_NEWNEIGH, NLM_F_CREATE, &message)
        .map(|_| ())
}

/// Puts a neighbour's last known address back as a stale entry, see [`super::keep_neighbour`].
pub(crate) fn keep_neighbour(
    socket: &mut Socket,
    ifindex: u32,
    address: IpAddr,
    mac: [u8; 6],
) -> io::Result<()> {
    let mut message = neighbour_message(ifindex, address, NUD_STALE, 0);
    push_attribute(&mut message, NDA_LLADDR, &mac);
    socket
        .request(RTM_NEWNEIGH, NLM_F_CREATE | NLM_F_REPLACE, &message)
        .map(|_| ())
}

/// Whether a route message is about a cached exception (such as a learned path MTU), not a route.
pub(crate) fn is_cached_route(payload: &[u8]) -> bool {
    const RTM_F_CLONED: u32 = 0x200;
    u32_at(payload, 8).is_some_and(|flags| flags & RTM_F_CLONED != 0)
}

/// Whether a route message is about a default route, in any table.
pub(crate) fn is_default_route(payload: &[u8]) -> bool {
    // struct rtmsg begins with the family and the length of the prefix.
    payload.get(1) == Some(&0)
}

fn decode_route(payload: &[u8], objects: &HashMap<u32, NextHopObject>) -> Option<Route> {
    const RTA_DST: u16 = 1;
    const RTA_SRC: u16 = 2;
    const RTA_PRIORITY: u16 = 6;
    const RTA_PREFSRC: u16 = 7;
    const RTA_MULTIPATH: u16 = 9;
    const RTA_TABLE: u16 = 15;
    const RTA_PREF: u16 = 20;
    const RTA_NH_ID: u16 = 30;

    // struct rtmsg: family, dst_len, src_len, tos, table, protocol, scope, type, flags (4)
    let &[family, dst_length, src_length, tos, table, _, _, kind] = payload.first_chunk()?;
    if !matches!(family, AF_INET | AF_INET6) || is_cached_route(payload) {
        return None;
    }
    let attributes = Attributes::after(payload, 12);
    let (multipath, hops) = if let Some(id) = attributes.u32(RTA_NH_ID) {
        nexthop::resolve(id, objects)
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
        kind,
        multipath,
        hops,
    })
}

fn network(family: u8, address: Option<IpAddr>, length: u8) -> Option<IpNet> {
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

pub(crate) fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    bytes
        .get(offset..)?
        .first_chunk()
        .map(|b| u32::from_ne_bytes(*b))
}
