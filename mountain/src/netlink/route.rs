// SPDX-License-Identifier: GPL-2.0-or-later
//! Which way the kernel would send: one look-up instead of a dump.

use std::io;
use std::net::IpAddr;

use ipnet::IpNet;
use libc::{RTA_DST, RTA_METRICS, RTA_MULTIPATH, RTA_OIF, RTA_PREFSRC, RTA_SRC, RTA_TABLE};
use libc::{RTM_GETROUTE, RTN_BROADCAST, RTN_LOCAL, RTN_UNICAST, RT_TABLE_LOCAL};
use netlink_sys::protocols::NETLINK_ROUTE;

use super::nexthop::{decode_hop, decode_multipath, NextHop};
use super::own::is_own_rule;
use super::snapshot::{is_cached_route, network};
use super::uapi::{FRA_PRIORITY, FRA_TABLE, RTM_HEADER_LEN};
use super::wire::{self, bytes_at, family, ip_bytes, push_attribute, unless, Attributes, Socket};

/// Where packets to an address leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EgressRoute {
    /// Index of the device.
    pub ifindex: u32,
    /// `None`: the address is on the link itself, or this host's own.
    pub gateway: Option<IpAddr>,
}

/// By which device and gateway the kernel would send to `target`, bound to a device and from `source`
/// where given. Of a multipath route it is one of the next hops.
///
/// # Errors
/// ENETUNREACH and others when there is no route.
pub fn egress_route(
    target: IpAddr,
    ifindex: Option<u32>,
    source: Option<IpAddr>,
) -> io::Result<EgressRoute> {
    let request = request(target, ifindex, source);
    let answer = wire::request(NETLINK_ROUTE, RTM_GETROUTE, 0, &request)?;
    let answer = answer.as_deref().and_then(decode_egress);
    answer.ok_or_else(|| io::Error::other("the kernel's answer names no device"))
}

/// Where packets to an address go, all next hops of the route counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RouteTo {
    /// It is one of this host's own.
    Host,
    /// All hosts of a subnet that this host is in.
    Broadcast,
    /// There is no route, or one that drops, or a multicast route.
    #[default]
    Nowhere,
    /// Another host, by a route.
    Out {
        /// Of a multipath route it is the next hop of one packet.
        first: EgressRoute,
        /// Devices of all next hops, each once; at least that of `first`.
        devices: Vec<u32>,
        /// The address of this host that would be the source.
        source: Option<IpAddr>,
        /// A default route or a half of one, as some VPNs have them. It says nothing about this address.
        default: bool,
    },
}

/// How the kernel would route what this host sends to `target`.
///
/// # Errors
/// When the kernel refuses to say.
pub fn route_to(target: IpAddr) -> io::Result<RouteTo> {
    RouteLookUps::open()?.to(target)
}

/// Look-ups of the calling thread's network namespace, by one socket for all of them.
pub(crate) struct RouteLookUps(Socket);

impl RouteLookUps {
    /// # Errors
    /// When there is no socket to be had.
    pub(crate) fn open() -> io::Result<Self> {
        Socket::open().map(Self)
    }

    /// See [`route_to`].
    ///
    /// # Errors
    /// When the kernel refuses to say.
    pub(crate) fn to(&mut self, target: IpAddr) -> io::Result<RouteTo> {
        look_up(&mut self.0, target)
    }
}

fn look_up(socket: &mut Socket, target: IpAddr) -> io::Result<RouteTo> {
    // What the kernel says of no route, and of blackhole, unreachable and prohibit routes.
    const NONE: [i32; 4] = [
        libc::ENETUNREACH,
        libc::EHOSTUNREACH,
        libc::EINVAL,
        libc::EACCES,
    ];
    let mut body = request(target, None, None);
    let Some(answer) = unless(socket.request(RTM_GETROUTE, 0, &body), &NONE)? else {
        return Ok(RouteTo::Nowhere);
    };
    let answer = answer.unwrap_or_default();
    let first = match (answer.get(7), decode_egress(&answer)) {
        (Some(&RTN_LOCAL), _) => return Ok(RouteTo::Host),
        (Some(&RTN_BROADCAST), _) => return Ok(RouteTo::Broadcast),
        (Some(&RTN_UNICAST), Some(first)) => first,
        _ => return Ok(RouteTo::Nowhere),
    };
    // struct rtmsg ends with the flags.
    body[8..RTM_HEADER_LEN].copy_from_slice(&libc::RTM_F_FIB_MATCH.to_ne_bytes());
    let route = socket.request(RTM_GETROUTE, 0, &body)?;
    let length = route.as_ref().map(|route| route.get(1).copied());
    let route = route.unwrap_or_default();
    let hops = Attributes::after(&route, RTM_HEADER_LEN);
    let hops = hops.get(RTA_MULTIPATH).map(decode_multipath);
    let mut devices: Vec<u32> = hops.into_iter().flatten().map(|hop| hop.ifindex).collect();
    devices.push(first.ifindex);
    devices.sort_unstable();
    devices.dedup();
    Ok(RouteTo::Out {
        first,
        devices,
        source: Attributes::after(&answer, RTM_HEADER_LEN).ip(RTA_PREFSRC),
        default: length.is_some_and(|length| length.is_none_or(|length| length <= 1)),
    })
}

/// A next hop behind which there is more than the hosts of its link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WayOn {
    /// Where the route leads.
    pub prefix: IpNet,
    /// Index of the device; 0: the kernel does not say.
    pub ifindex: u32,
}

/// Where routes lead.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ways {
    /// All next hops that lead on: by a gateway, or to more than the link's own subnet or a single host. Where there are
    /// no policy routing rules, no others lead away from this host's links.
    pub on: Vec<WayOn>,
    /// Where a route leads that has an MTU of its own, if one has.
    pub sized: Option<IpNet>,
}

/// So many ways are not read further: a router with the Internet's routes has a million.
pub const MANY_WAYS: usize = 4096;

/// Where the routes of a family lead. Of very many ways on, the first [`MANY_WAYS`] are read.
///
/// # Errors
/// When the kernel refuses the dump.
pub fn ways(ipv6: bool) -> io::Result<Ways> {
    let mut header = [0; RTM_HEADER_LEN];
    header[0] = family(ipv6);
    let mut ways = Ways::default();
    wire::dump_while(NETLINK_ROUTE, RTM_GETROUTE, &header, |payload| {
        let found = decode_ways(payload).unwrap_or_default();
        ways.on.extend(found.on);
        ways.sized = ways.sized.or(found.sized);
        ways.on.len() < MANY_WAYS
    })?;
    Ok(ways)
}

/// Where a route message leads; `None`: it is of another table, leads nowhere, or to addresses of a link only.
fn decode_ways(payload: &[u8]) -> Option<Ways> {
    // `main` and `default`, which every packet asks.
    const TABLES: [u32; 2] = [254, 253];
    // RTPROT_KERNEL, RTPROT_RA and RTPROT_DHCP of linux/rtnetlink.h: without a gateway they are about the link itself.
    const OF_LINK: [u8; 3] = [2, 9, 16];
    const RTAX_MTU: u16 = 2;

    // struct rtmsg: family, dst_len, src_len, tos, table, protocol, scope, type, flags (4)
    let [family, length, _, _, table, protocol, _, kind] = bytes_at(payload, 0)?;
    let found = Attributes::after(payload, RTM_HEADER_LEN);
    let table = found.u32(RTA_TABLE).unwrap_or(table.into());
    if kind != RTN_UNICAST || !TABLES.contains(&table) || is_cached_route(payload) {
        return None;
    }
    let prefix = network(family, found.ip(RTA_DST), length)?;
    if is_link_local(prefix) {
        return None;
    }
    // A default route, or a half of one, is about more, whoever has made it.
    let is_subnet = OF_LINK.contains(&protocol) && length > 1;
    let of_link = is_subnet || length == prefix.max_prefix_len();
    let hops = match found.get(RTA_MULTIPATH) {
        Some(hops) => decode_multipath(hops),
        // Of a nexthop object the kernel may tell no more than the number.
        None => vec![decode_hop(&found, None, 0, 0)],
    };
    let leads_on =
        |hop: &NextHop| hop.gateway.is_some() || hop.encapsulated || hop.ifindex == 0 || !of_link;
    let on = hops.into_iter().filter(leads_on).map(|hop| WayOn {
        prefix,
        ifindex: hop.ifindex,
    });
    let mtu = found.inside(RTA_METRICS).u32(RTAX_MTU);
    Some(Ways {
        on: on.collect(),
        sized: mtu.map(|_| prefix),
    })
}

/// The networks of table `local`, which every packet asks first: addresses and ranges of this host, and those that
/// stand for all hosts of a link.
///
/// # Errors
/// When the kernel refuses the dump.
pub fn local_networks() -> io::Result<Vec<IpNet>> {
    let mut header = [0; RTM_HEADER_LEN];
    // The kernel leaves out other tables: there may be a million routes.
    header[4] = RT_TABLE_LOCAL;
    let mut found = Vec::new();
    Socket::open()?.dump_families(RTM_GETROUTE, header, |payload| {
        found.extend(decode_local(payload));
    })?;
    Ok(found)
}

fn decode_local(payload: &[u8]) -> Option<IpNet> {
    // struct rtmsg: family, dst_len, src_len, tos, table, protocol, scope, type, flags (4)
    let [family, length, _, _, table, _, _, kind] = bytes_at(payload, 0)?;
    let found = Attributes::after(payload, RTM_HEADER_LEN);
    let is_local = table == RT_TABLE_LOCAL && matches!(kind, RTN_LOCAL | RTN_BROADCAST);
    let prefix = network(family, found.ip(RTA_DST), length);
    prefix.filter(|_| is_local)
}

/// Whether all addresses of a network are valid on their link only.
fn is_link_local(net: IpNet) -> bool {
    match net {
        IpNet::V4(net) => net.prefix_len() >= 16 && net.addr().is_link_local(),
        IpNet::V6(net) => net.prefix_len() >= 10 && net.addr().is_unicast_link_local(),
    }
}

/// Whether a family has policy routing rules besides the three that every namespace begins with and Mountain's own.
///
/// # Errors
/// When the kernel refuses the dump.
pub fn policy_rules(ipv6: bool) -> io::Result<bool> {
    const USUAL: [(u32, u32); 3] = [(0, 255), (32766, 254), (32767, 253)];

    let mut header = [0; RTM_HEADER_LEN];
    header[0] = family(ipv6);
    let mut other = false;
    wire::dump(NETLINK_ROUTE, libc::RTM_GETRULE, &header, |payload| {
        let found = Attributes::after(payload, RTM_HEADER_LEN);
        let number = |kind| found.u32(kind).unwrap_or(0);
        let usual = USUAL.contains(&(number(FRA_PRIORITY), number(FRA_TABLE)));
        other |= !usual && !is_own_rule(payload);
    })?;
    Ok(other)
}

fn request(target: IpAddr, ifindex: Option<u32>, source: Option<IpAddr>) -> Vec<u8> {
    let bits = IpNet::from(target).prefix_len();
    // With a source, an IPv6 look-up without a socket takes the device for a mere hint
    // (`ip6_route_output_flags_noref`), which it is not to a socket bound to it.
    let hint = target.is_ipv6() && ifindex.is_some();
    let source = source.filter(|s| s.is_ipv4() == target.is_ipv4() && !hint);
    let mut body = vec![0; RTM_HEADER_LEN];
    body[0] = family(target.is_ipv6());
    body[1] = bits;
    body[2] = if source.is_some() { bits } else { 0 };
    push_attribute(&mut body, RTA_DST, &ip_bytes(target));
    if let Some(source) = source {
        push_attribute(&mut body, RTA_SRC, &ip_bytes(source));
    }
    if let Some(ifindex) = ifindex {
        push_attribute(&mut body, RTA_OIF, &ifindex.to_ne_bytes());
    }
    body
}

fn decode_egress(payload: &[u8]) -> Option<EgressRoute> {
    let found = Attributes::after(payload, RTM_HEADER_LEN);
    let hop = decode_hop(&found, Some(found.u32(RTA_OIF)?), 0, 0);
    Some(EgressRoute {
        ifindex: hop.ifindex,
        gateway: hop.gateway,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use libc::{RTA_GATEWAY, RTA_VIA};

    #[test]
    fn loopback_is_on_its_own_device() {
        for target in ["127.0.0.1", "::1"] {
            let found = egress_route(target.parse().unwrap(), None, None).unwrap();
            assert_eq!((found.ifindex, found.gateway), (1, None));
        }
        let source = Some("::1".parse().unwrap());
        let found = egress_route("127.0.0.2".parse().unwrap(), Some(1), source);
        let device = found.unwrap().ifindex;
        assert_eq!(device, 1, "a source of the other family is not used");
        egress_route("127.0.0.1".parse().unwrap(), Some(u32::MAX >> 1), None).unwrap_err();
    }

    #[test]
    fn ways_on_are_told_from_links() {
        let prefix = |text: &str| text.parse::<IpNet>().unwrap();
        let way = |text: &str, ifindex| WayOn {
            prefix: prefix(text),
            ifindex,
        };
        // Table, protocol, type, and by device 7.
        let route = |net: &str, of: [u8; 3], gateway: Option<[u8; 4]>| {
            let net = prefix(net);
            let mut payload = vec![0; RTM_HEADER_LEN];
            let [table, protocol, kind] = of;
            payload[..8].copy_from_slice(&[2, net.prefix_len(), 0, 0, table, protocol, 0, kind]);
            push_attribute(&mut payload, RTA_DST, &ip_bytes(net.addr()));
            push_attribute(&mut payload, RTA_OIF, &7u32.to_ne_bytes());
            if let Some(gateway) = gateway {
                push_attribute(&mut payload, RTA_GATEWAY, &gateway);
            }
            decode_ways(&payload).unwrap_or_default().on
        };
        let (main, boot) = ([254, 2, 1], [254, 3, 1]);
        let gateway = Some([10, 0, 0, 1]);
        for net in ["0.0.0.0/0", "10.9.0.0/16", "10.9.9.9/32"] {
            assert_eq!(route(net, boot, gateway), [way(net, 7)], "{net}");
        }
        // Into a tunnel, behind which there may be anything.
        assert_eq!(route("10.9.0.0/16", boot, None), [way("10.9.0.0/16", 7)]);
        // The link's own subnet, a host on it, another table, and what leads nowhere.
        assert_eq!(route("10.9.0.0/16", main, None), []);
        assert_eq!(route("10.9.9.9/32", boot, None), []);
        let dhcp = [254, 16, 1];
        assert_eq!(route("10.9.0.0/16", dhcp, None), []);
        assert_eq!(route("0.0.0.0/0", dhcp, None), [way("0.0.0.0/0", 7)]);
        for net in ["169.254.0.0/16", "169.254.169.254/32"] {
            assert_eq!(route(net, boot, gateway), [], "{net}");
        }
        assert!(!is_link_local(prefix("169.0.0.0/8")));
        assert!(is_link_local(prefix("fe80::/64")) && !is_link_local(prefix("fe00::/8")));
        assert_eq!(route("10.9.0.0/16", [100, 3, 1], gateway), []);
        assert_eq!(route("10.9.0.0/16", [254, 3, 6], gateway), []);
        // Several next hops, and a nexthop object that the kernel does not spell out.
        let mut several = vec![2u8, 0, 0, 0, 254, 3, 0, 1, 0, 0, 0, 0];
        let unknown = decode_ways(&several).unwrap();
        assert_eq!(unknown.on, [way("0.0.0.0/0", 0)]);
        assert_eq!(unknown.sized, None);
        // Its initial window, and with that its MTU.
        for (metric, sized) in [(11u16, None), (2, Some(prefix("0.0.0.0/0")))] {
            let mut metrics = Vec::new();
            push_attribute(&mut metrics, metric, &1400u32.to_ne_bytes());
            let mut payload = several.clone();
            push_attribute(&mut payload, RTA_METRICS, &metrics);
            assert_eq!(decode_ways(&payload).unwrap().sized, sized);
        }
        let mut hops = Vec::new();
        for ifindex in [3u32, 4] {
            hops.extend_from_slice(&[16, 0, 0, 0]);
            hops.extend_from_slice(&ifindex.to_ne_bytes());
            push_attribute(&mut hops, RTA_GATEWAY, &[10, 0, 0, 2]);
        }
        push_attribute(&mut several, RTA_MULTIPATH, &hops);
        let ways = decode_ways(&several).unwrap();
        assert_eq!(ways.on, [way("0.0.0.0/0", 3), way("0.0.0.0/0", 4)]);
    }

    #[test]
    fn own_addresses_and_none_are_told_apart() {
        let mut look_ups = RouteLookUps::open().unwrap();
        for (target, expected) in [
            ("127.0.0.2", RouteTo::Host),
            ("::1", RouteTo::Host),
            ("255.255.255.255", RouteTo::Broadcast),
            // Refused, or a multicast route. The next look-up is not disturbed.
            ("224.0.0.9", RouteTo::Nowhere),
            ("127.0.0.3", RouteTo::Host),
        ] {
            let target = target.parse().unwrap();
            assert_eq!(look_ups.to(target).unwrap(), expected, "{target}");
            assert_eq!(route_to(target).unwrap(), expected, "{target}");
        }
    }

    #[test]
    fn networks_of_this_host_are_read() {
        let prefix = |text: &str| text.parse::<IpNet>().unwrap();
        let all = local_networks().unwrap();
        for own in ["127.0.0.0/8", "::1/128"] {
            assert!(all.contains(&prefix(own)), "{own}: {all:?}");
        }
        let mut payload = vec![2, 24, 0, 0, RT_TABLE_LOCAL, 3, 0, RTN_LOCAL, 0, 0, 0, 0];
        push_attribute(&mut payload, RTA_DST, &[203, 0, 113, 0]);
        let range = Some(prefix("203.0.113.0/24"));
        assert_eq!(decode_local(&payload), range);
        payload[7] = RTN_BROADCAST;
        assert_eq!(decode_local(&payload), range);
        payload[7] = RTN_UNICAST;
        assert_eq!(decode_local(&payload), None);
        (payload[4], payload[7]) = (254, RTN_LOCAL);
        assert_eq!(decode_local(&payload), None, "of another table");
    }

    #[test]
    fn gateways_of_both_families_are_read() {
        let gateway: IpAddr = "192.0.2.1".parse().unwrap();
        let mut payload = vec![0; RTM_HEADER_LEN];
        assert_eq!(decode_egress(&payload), None);
        push_attribute(&mut payload, RTA_OIF, &7u32.to_ne_bytes());
        let mut by_via = payload.clone();
        push_attribute(&mut payload, RTA_GATEWAY, &[192, 0, 2, 1]);
        let expected = Some(EgressRoute {
            ifindex: 7,
            gateway: Some(gateway),
        });
        assert_eq!(decode_egress(&payload), expected);
        let other: std::net::Ipv6Addr = "2001:db8::1".parse().unwrap();
        let mut value = (libc::AF_INET6 as u16).to_ne_bytes().to_vec();
        value.extend_from_slice(&other.octets());
        push_attribute(&mut by_via, RTA_VIA, &value);
        assert_eq!(decode_egress(&by_via).unwrap().gateway, Some(other.into()));
    }
}
