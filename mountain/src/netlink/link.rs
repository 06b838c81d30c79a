// SPDX-License-Identifier: GPL-2.0-or-later
//! Devices and their addresses, and how namespaces are numbered.
//!
//! Formats: linux/if_link.h, if_addr.h, net_namespace.h.

use std::io;
use std::net::IpAddr;
use std::os::fd::AsRawFd;

use ipnet::IpNet;
use libc::{IFA_FLAGS, IFA_F_DADFAILED, IFA_F_DEPRECATED, IFA_F_SECONDARY, IFA_F_TENTATIVE};
use libc::{IFLA_ADDRESS, IFLA_GROUP, IFLA_IFNAME, IFLA_INFO_DATA, IFLA_INFO_KIND, IFLA_LINK};
use libc::{IFLA_LINKINFO, IFLA_LINK_NETNSID, IFLA_MASTER, IFLA_MTU, IFLA_QDISC};
use netlink_sys::protocols::NETLINK_ROUTE;

use super::generic::{self, GenericFamily};
use super::kinds::Lower;
use super::wire::{self, bytes_at, push_attribute, u16_at, u32_at, Attributes, AF_INET6};

const IFLA_AF_SPEC: u16 = 26;
const IFLA_INET6_CONF: u16 = 2;
/// Position of a device's MTU among its settings of IPv6 (linux/ipv6.h), in bytes.
const DEVCONF_MTU6: usize = 2 * size_of::<u32>();
const IFLA_VRF_TABLE: u16 = 1;
const IFLA_XDP: u16 = 43;
const IFLA_XDP_DRV_PROG_ID: u16 = 5;
const IFLA_XDP_SKB_PROG_ID: u16 = 6;
const IFLA_XDP_HW_PROG_ID: u16 = 7;
const NETNSA_NSID: u16 = 1;
const NETNSA_FD: u16 = 3;
/// The family of generic netlink that knows devices.
const NETDEV: &str = "netdev";
/// Length of `struct ifinfomsg`, and of `struct ifaddrmsg`.
const LINK_HEADER_LEN: usize = 16;
const ADDRESS_HEADER_LEN: usize = 8;

/// A device as rtnetlink describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Link {
    /// Its index in this namespace.
    pub ifindex: u32,
    /// As ip(8) shows it.
    pub name: String,
    /// Switched on, with a carrier.
    pub up: bool,
    /// Bytes of a packet, network layer.
    pub mtu: u32,
    /// The same of IPv6, which may be less: routers announce one, and `net.ipv6.conf.NAME.mtu` sets it. `None`: no
    /// IPv6 there.
    pub mtu6: Option<u32>,
    /// ARPHRD_*.
    pub arphrd: u16,
    /// Has Ethernet headers (ARPHRD_ETHER).
    pub ethernet: bool,
    /// It is `lo` (ARPHRD_LOOPBACK).
    pub loopback: bool,
    /// Number that ip-link(8) calls `group`.
    pub group: u32,
    /// Index of the bridge, bond or VRF that it is a port of.
    pub master: Option<u32>,
    /// Of a virtual device: `veth`, `bridge`...; `None`: hardware (or loopback).
    pub kind: Option<String>,
    /// The device that a virtual one stands on.
    pub lower: Lower,
    /// Index of the other end of a veth, in the namespace that `peer_namespace` numbers (in this
    /// one: `None`).
    pub peer: Option<u32>,
    /// Id of the namespace that `peer` is in, as this one numbers it (NSID).
    pub peer_namespace: Option<i32>,
    /// Name of the root queueing discipline.
    pub qdisc: Option<String>,
    /// Link-layer address; empty where there is none.
    pub address: Vec<u8>,
    /// A modem's or phone's device ([`super::kinds::is_modem`]). Only looked for where a default route leaves by it.
    pub modem: bool,
    /// Of a ppp device that runs over PPPoE: the device below. Likewise.
    pub pppoe: Option<String>,
    /// Routing table of a VRF device.
    pub vrf_table: Option<u32>,
    /// Where the packets of a tunnel go that names the device below it, or a mark for its routing.
    pub tunnel: Option<Tunnel>,
}

impl Link {
    /// Whether no packet comes in by it from elsewhere.
    pub fn receives_nothing(&self) -> bool {
        self.loopback || matches!(self.kind.as_deref(), Some("dummy" | "ifb"))
    }
}

/// A tunnel's ends. The kernel routes what it sends by the device that the tunnel names, and by its mark.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tunnel {
    /// Index of that device; 0: none.
    pub over: u32,
    /// That mark, which is not the packet's own; 0: none.
    pub mark: u32,
    /// This end; `None`: any.
    pub local: Option<IpAddr>,
    /// The other end; `None`: any number of them.
    pub remote: Option<IpAddr>,
}

impl Tunnel {
    fn decode(kind: &str, data: &Attributes<'_>) -> Option<Self> {
        // IFLA_GRE_*, IFLA_IPTUN_*, IFLA_VTI_* (linux/if_tunnel.h), IFLA_VXLAN_* (linux/if_link.h): the device, the mark (of VTI
        // its output key, `vti_tunnel_xmit` in net/ipv4/ip_vti.c), this end, and the other one.
        let (over, mark, local, remote): (u16, Option<u16>, &[u16], &[u16]) = match kind {
            "gre" | "gretap" | "erspan" | "ip6gre" | "ip6gretap" | "ip6erspan" => {
                (1, Some(20), &[6], &[7])
            }
            "ipip" | "sit" | "ip6tnl" => (1, Some(20), &[2], &[3]),
            "vti" | "vti6" => (1, Some(3), &[4], &[5]),
            // Its forwarding table has the other ends.
            "vxlan" => (3, None, &[4, 17], &[]),
            _ => return None,
        };
        let number = |kind: u16| data.u32(kind).unwrap_or(0);
        let (over, mark) = (number(over), mark.map_or(0, number));
        let address = |kinds: &[u16]| {
            let found = kinds.iter().find_map(|kind| data.ip(*kind));
            found.filter(|address| !address.is_unspecified())
        };
        (over != 0 || mark != 0).then(|| Self {
            over,
            mark,
            local: address(local),
            remote: address(remote),
        })
    }
}

impl Link {
    pub(crate) fn is_bridge(&self) -> bool {
        self.kind.as_deref() == Some("bridge")
    }
}

/// The device of an index in the calling thread's namespace.
///
/// # Errors
/// ENODEV when there is none.
pub fn link(ifindex: u32) -> io::Result<Link> {
    let answer = wire::request(NETLINK_ROUTE, libc::RTM_GETLINK, 0, &header_of(ifindex))?;
    let found = answer.as_deref().and_then(decode_link);
    found.ok_or_else(|| io::Error::other("the kernel's answer describes no device"))
}

/// What the device of an index in the calling thread's namespace is called. `None`: there is none.
pub(crate) fn name(ifindex: u32) -> Option<String> {
    link(ifindex).ok().map(|link| link.name)
}

/// All devices of the calling thread's namespace.
///
/// # Errors
/// When the kernel refuses the dump.
pub(crate) fn links() -> io::Result<Vec<Link>> {
    let mut found = Vec::new();
    let all = [0; LINK_HEADER_LEN];
    wire::dump(NETLINK_ROUTE, libc::RTM_GETLINK, &all, |payload| {
        found.extend(decode_link(payload));
    })?;
    Ok(found)
}

/// Every device of the calling thread's namespace that has XDP programs, by its index, with their ids.
///
/// # Errors
/// When the kernel refuses the dump.
pub(crate) fn xdp_programs() -> io::Result<Vec<(u32, Vec<u32>)>> {
    let mut found = Vec::new();
    let all = [0; LINK_HEADER_LEN];
    wire::dump(NETLINK_ROUTE, libc::RTM_GETLINK, &all, |payload| {
        let device = decode_link_head(payload).map(|(ifindex, _)| ifindex);
        found.extend(device.zip(Some(decode_xdp(payload)).filter(|ids| !ids.is_empty())));
    })?;
    Ok(found)
}

/// Ids of the XDP programs of a device.
///
/// # Errors
/// ENODEV when there is none.
pub(crate) fn xdp_programs_of(ifindex: u32) -> io::Result<Vec<u32>> {
    let answer = wire::request(NETLINK_ROUTE, libc::RTM_GETLINK, 0, &header_of(ifindex))?;
    Ok(answer.as_deref().map(decode_xdp).unwrap_or_default())
}

/// What a device can do with XDP, as the bits NETDEV_XDP_ACT_* of linux/netdev.h. None on kernels that do not tell.
///
/// # Errors
/// ENODEV when there is no such device.
pub(crate) fn xdp_features(ifindex: u32) -> io::Result<u64> {
    const NETDEV_CMD_DEV_GET: u8 = 1;
    const NETDEV_A_DEV_IFINDEX: u16 = 1;
    const NETDEV_A_DEV_XDP_FEATURES: u16 = 3;
    let Some(mut family) = GenericFamily::open(NETDEV)? else {
        return Ok(0);
    };
    let mut question = generic::body(NETDEV_CMD_DEV_GET, 1);
    push_attribute(&mut question, NETDEV_A_DEV_IFINDEX, &ifindex.to_ne_bytes());
    let answer = family.ask(&question)?;
    let features = Attributes::after(&answer, generic::HEADER_LEN).u64(NETDEV_A_DEV_XDP_FEATURES);
    Ok(features.unwrap_or(0))
}

/// One for each mode in which there is a program: in the driver, for sockets' buffers, in the hardware.
fn decode_xdp(payload: &[u8]) -> Vec<u32> {
    let xdp = Attributes::after(payload, LINK_HEADER_LEN).inside(IFLA_XDP);
    let modes = [
        IFLA_XDP_DRV_PROG_ID,
        IFLA_XDP_SKB_PROG_ID,
        IFLA_XDP_HW_PROG_ID,
    ];
    modes.into_iter().filter_map(|mode| xdp.u32(mode)).collect()
}

/// Whether a device is up and has a carrier.
///
/// # Errors
/// ENODEV when there is none.
pub(crate) fn has_carrier(ifindex: u32) -> io::Result<bool> {
    let answer = wire::request(NETLINK_ROUTE, libc::RTM_GETLINK, 0, &header_of(ifindex))?;
    let head = answer.as_deref().and_then(decode_link_head);
    Ok(head.is_some_and(|(_, up)| up))
}

/// `struct ifinfomsg` that asks for a device.
fn header_of(ifindex: u32) -> [u8; LINK_HEADER_LEN] {
    let mut body = [0; LINK_HEADER_LEN];
    body[4..8].copy_from_slice(&ifindex.to_ne_bytes());
    body
}

/// Index of a device, and whether it is up, of a link message: what events need.
pub(super) fn decode_link_head(payload: &[u8]) -> Option<(u32, bool)> {
    // struct ifinfomsg: family, pad, type (2), index (4), flags (4), change (4). Bridges report
    // their ports with their own family; those are no news about the device.
    if *payload.first()? != libc::AF_UNSPEC as u8 {
        return None;
    }
    const UP: u32 = libc::IFF_UP as u32 | libc::IFF_RUNNING as u32 | libc::IFF_LOWER_UP as u32;
    Some((u32_at(payload, 4)?, u32_at(payload, 8)? & UP == UP))
}

pub(super) fn decode_link(payload: &[u8]) -> Option<Link> {
    let (ifindex, up) = decode_link_head(payload)?;
    let arphrd = u16_at(payload, 2)?;
    let attributes = Attributes::after(payload, LINK_HEADER_LEN);
    let info = attributes.inside(IFLA_LINKINFO);
    let kind = info.string(IFLA_INFO_KIND);
    let peer = attributes.u32(IFLA_LINK);
    let peer_namespace = attributes.u32(IFLA_LINK_NETNSID).map(u32::cast_signed);
    Some(Link {
        ifindex,
        name: attributes.string(IFLA_IFNAME)?,
        up,
        mtu: attributes.u32(IFLA_MTU)?,
        mtu6: attributes
            .inside(IFLA_AF_SPEC)
            .inside(AF_INET6.into())
            .get(IFLA_INET6_CONF)
            .and_then(|settings| u32_at(settings, DEVCONF_MTU6)),
        arphrd,
        ethernet: arphrd == libc::ARPHRD_ETHER,
        loopback: arphrd == libc::ARPHRD_LOOPBACK,
        group: attributes.u32(IFLA_GROUP).unwrap_or(0),
        master: attributes.u32(IFLA_MASTER),
        lower: match (peer, attributes.has(IFLA_LINK_NETNSID)) {
            (Some(_), true) => Lower::Elsewhere,
            // What stands on nothing names itself, or 0.
            (Some(lower), false) if lower != 0 && lower != ifindex => Lower::Here(lower),
            _ => Lower::None,
        },
        peer,
        peer_namespace: peer_namespace.filter(|id| *id >= 0),
        qdisc: attributes.string(IFLA_QDISC),
        address: attributes.get(IFLA_ADDRESS).unwrap_or_default().to_vec(),
        modem: false,
        pppoe: None,
        vrf_table: match kind.as_deref() {
            Some("vrf") => info.inside(IFLA_INFO_DATA).u32(IFLA_VRF_TABLE),
            _ => None,
        },
        tunnel: (kind.as_deref())
            .and_then(|kind| Tunnel::decode(kind, &info.inside(IFLA_INFO_DATA))),
        kind,
    })
}

/// An address of a device.
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

pub(super) fn decode_address(payload: &[u8]) -> Option<Address> {
    const NOT_FRESH: u32 = IFA_F_DADFAILED | IFA_F_DEPRECATED | IFA_F_TENTATIVE;
    // IFA_F_SECONDARY is "temporary" for IPv6.
    const SECOND_CHOICE: u32 = IFA_F_SECONDARY | NOT_FRESH;

    // struct ifaddrmsg: family, prefix length, flags, scope, index (4)
    let [_, prefix_length, flags, scope] = bytes_at(payload, 0)?;
    let attributes = Attributes::after(payload, ADDRESS_HEADER_LEN);
    let on_link = attributes.ip(libc::IFA_ADDRESS);
    let flags = attributes.u32(IFA_FLAGS).unwrap_or(flags.into());
    Some(Address {
        ifindex: u32_at(payload, 4)?,
        address: attributes.ip(libc::IFA_LOCAL).or(on_link)?,
        subnet: on_link.and_then(|ip| IpNet::new(ip, prefix_length).ok().map(|net| net.trunc())),
        global: scope == libc::RT_SCOPE_UNIVERSE,
        second_choice: flags & SECOND_CHOICE != 0,
        fresh: flags & NOT_FRESH == 0,
    })
}

/// Every address of the calling thread's namespace, with the index of its device.
///
/// # Errors
/// When the kernel refuses the dump.
pub fn addresses() -> io::Result<Vec<(u32, IpAddr)>> {
    let all = all_addresses()?.into_iter();
    Ok(all.map(|a| (a.ifindex, a.address)).collect())
}

/// Addresses of IPv6 that are no lasting source: temporary, deprecated, not yet or not at all this host's own.
///
/// # Errors
/// When the kernel refuses the dump.
pub fn passing_addresses() -> io::Result<Vec<IpAddr>> {
    let all = all_addresses()?.into_iter();
    let passing = all.filter(|a| a.address.is_ipv6() && a.second_choice);
    Ok(passing.map(|a| a.address).collect())
}

/// The addresses of a device.
///
/// # Errors
/// When the kernel refuses the dump.
pub(crate) fn addresses_of(ifindex: u32) -> io::Result<Vec<IpAddr>> {
    let all = all_addresses()?.into_iter();
    let of_device = all.filter(|address| address.ifindex == ifindex);
    Ok(of_device.map(|address| address.address).collect())
}

fn all_addresses() -> io::Result<Vec<Address>> {
    let mut found = Vec::new();
    let all = [0; ADDRESS_HEADER_LEN];
    wire::dump(NETLINK_ROUTE, libc::RTM_GETADDR, &all, |payload| {
        found.extend(decode_address(payload));
    })?;
    Ok(found)
}

/// The number by which the calling thread's namespace knows another one; `None`: by none.
///
/// # Errors
/// When `namespace` is not a network namespace.
pub fn namespace_id(namespace: &impl AsRawFd) -> io::Result<Option<i32>> {
    // struct rtgenmsg is one byte, padded.
    let mut body = vec![0; 4];
    let fd = namespace.as_raw_fd().cast_unsigned();
    push_attribute(&mut body, NETNSA_FD, &fd.to_ne_bytes());
    let answer = wire::request(NETLINK_ROUTE, libc::RTM_GETNSID, 0, &body)?.unwrap_or_default();
    let id = Attributes::after(&answer, 4).u32(NETNSA_NSID);
    Ok(id.map(u32::cast_signed).filter(|id| *id >= 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_described() {
        let lo = link(1).unwrap();
        assert_eq!((lo.ifindex, &*lo.name), (1, "lo"));
        assert!(lo.loopback && !lo.ethernet);
        assert_eq!((lo.kind, lo.peer, lo.master), (None, None, None));
        let error = link(u32::MAX >> 1).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENODEV));
        let all = addresses().unwrap();
        assert!(all.contains(&(1, "127.0.0.1".parse().unwrap())), "{all:?}");
    }

    #[test]
    fn tunnels_tell_their_ends_and_the_device_that_they_name() {
        let [here, there] = [[192, 0, 2, 1], [192, 0, 2, 2]];
        let tunnel = |kind, list: &[(u16, [u8; 4])]| {
            let mut data = Vec::new();
            list.iter()
                .for_each(|(kind, value)| push_attribute(&mut data, *kind, value));
            Tunnel::decode(kind, &Attributes::after(&data, 0))
        };
        let two = 2u32.to_ne_bytes();
        let expected = |remote: Option<IpAddr>| {
            Some(Tunnel {
                over: 2,
                mark: 0,
                local: Some(here.into()),
                remote,
            })
        };
        let marked = Tunnel {
            over: 0,
            mark: 5,
            local: Some(here.into()),
            remote: Some(there.into()),
        };
        let five = 5u32.to_ne_bytes();
        for (kind, local, remote, mark) in
            [("ip6gre", 6, 7, 20), ("ipip", 2, 3, 20), ("vti", 4, 5, 3)]
        {
            let list = [(local, here), (remote, there), (mark, five)];
            assert_eq!(tunnel(kind, &list), Some(marked.clone()), "{kind}");
        }
        let gre = [(1, two), (6, here), (7, there)];
        assert_eq!(tunnel("gre", &gre), expected(Some(there.into())));
        let to_any = [(1, two), (2, here), (3, [0; 4])];
        assert_eq!(tunnel("ipip", &to_any), expected(None));
        let vxlan = [(2, there), (3, two), (4, here)];
        assert_eq!(tunnel("vxlan", &vxlan), expected(None));
        assert_eq!(tunnel("gre", &[(1, [0; 4]), (7, there)]), None, "no device");
        assert_eq!(tunnel("vlan", &gre), None);
    }

    #[test]
    fn xdp_of_one_device_is_told_by_its_index() {
        // It has no driver, so nothing is native there.
        assert_eq!(xdp_features(1).unwrap(), 0);
        let gone = u32::MAX >> 1;
        let error = xdp_programs_of(gone).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENODEV));
        if GenericFamily::open(NETDEV).unwrap().is_some() {
            let error = xdp_features(gone).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::ENODEV));
        }
    }

    #[test]
    fn only_namespaces_have_numbers() {
        let file = std::fs::File::open("/proc/self/status").unwrap();
        namespace_id(&file).unwrap_err();
    }
}
