// SPDX-License-Identifier: GPL-2.0-or-later
//! Single devices, their addresses and neighbours, and how namespaces are numbered: what the
//! redirect's preflight asks about a few devices, instead of a dump of everything.

use std::io;
use std::net::IpAddr;
use std::os::fd::AsRawFd;

use super::snapshot::{decode_link_head, decode_neighbour, neighbour_message};
use super::wire::{push_attribute, Attributes, Socket};

/// linux/rtnetlink.h, linux/if_link.h, linux/net_namespace.h, linux/if_addr.h.
const RTM_GETLINK: u16 = 18;
const RTM_GETADDR: u16 = 22;
const RTM_GETNEIGH: u16 = 30;
const RTM_GETNSID: u16 = 90;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_LINK: u16 = 5;
const IFLA_QDISC: u16 = 6;
const IFLA_MASTER: u16 = 10;
const IFLA_LINKINFO: u16 = 18;
const IFLA_LINK_NETNSID: u16 = 37;
const IFLA_INFO_KIND: u16 = 1;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const NETNSA_NSID: u16 = 1;
const NETNSA_FD: u16 = 3;

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
    /// Has Ethernet headers (ARPHRD_ETHER).
    pub ethernet: bool,
    /// It is `lo` (ARPHRD_LOOPBACK).
    pub loopback: bool,
    /// Index of the bridge, bond or VRF that it is a port of.
    pub master: Option<u32>,
    /// Of a virtual device: `veth`, `bridge`...; `None`: hardware (or loopback).
    pub kind: Option<String>,
    /// Index of the other end of a veth, in the namespace that `peer_namespace` numbers (in this
    /// one: `None`).
    pub peer: Option<u32>,
    /// Id of the namespace that `peer` is in, as this one numbers it (NSID).
    pub peer_namespace: Option<i32>,
    /// Name of the root queueing discipline.
    pub qdisc: Option<String>,
}

/// The device of an index in the calling thread's namespace.
///
/// # Errors
/// ENODEV when there is none.
pub fn link(ifindex: u32) -> io::Result<Link> {
    let mut body = vec![0; 16];
    body[4..8].copy_from_slice(&ifindex.to_ne_bytes());
    let answer = Socket::open()?.request(RTM_GETLINK, 0, &body)?;
    let found = answer.as_deref().and_then(decode);
    found.ok_or_else(|| io::Error::other("the kernel's answer describes no device"))
}

fn decode(payload: &[u8]) -> Option<Link> {
    let head = decode_link_head(payload)?;
    let device_type = u16::from_ne_bytes(*payload.get(2..)?.first_chunk()?);
    let attributes = Attributes::after(payload, 16);
    let info = attributes.get(IFLA_LINKINFO);
    let signed = |kind| attributes.u32(kind).map(u32::cast_signed);
    Some(Link {
        ifindex: head.ifindex,
        name: attributes.string(IFLA_IFNAME)?,
        up: head.up,
        mtu: attributes.u32(IFLA_MTU)?,
        ethernet: device_type == libc::ARPHRD_ETHER,
        loopback: device_type == libc::ARPHRD_LOOPBACK,
        master: attributes.u32(IFLA_MASTER),
        kind: info.and_then(|info| Attributes::after(info, 0).string(IFLA_INFO_KIND)),
        peer: attributes.u32(IFLA_LINK),
        peer_namespace: signed(IFLA_LINK_NETNSID).filter(|id| *id >= 0),
        qdisc: attributes.string(IFLA_QDISC),
    })
}

/// Every address of the calling thread's namespace, with the index of its device.
///
/// # Errors
/// When the kernel refuses the dump.
pub fn addresses() -> io::Result<Vec<(u32, IpAddr)>> {
    let mut found = Vec::new();
    Socket::open()?.dump(RTM_GETADDR, &[0; 8], |_, payload| {
        // struct ifaddrmsg: family, prefix length, flags, scope, index (4)
        let attributes = Attributes::after(payload, 8);
        let address = attributes
            .ip(IFA_LOCAL)
            .or_else(|| attributes.ip(IFA_ADDRESS));
        let index = payload.get(4..).and_then(<[u8]>::first_chunk);
        if let (Some(address), Some(index)) = (address, index) {
            found.push((u32::from_ne_bytes(*index), address));
        }
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
    push_attribute(
        &mut body,
        NETNSA_FD,
        &namespace.as_raw_fd().cast_unsigned().to_ne_bytes(),
    );
    let answer = Socket::open()?
        .request(RTM_GETNSID, 0, &body)?
        .unwrap_or_default();
    let id = Attributes::after(&answer, 4).u32(NETNSA_NSID);
    Ok(id.map(u32::cast_signed).filter(|id| *id >= 0))
}

/// Whether the kernel knows where a neighbour is at the moment.
///
/// # Errors
/// When the kernel refuses to say.
pub fn neighbour_usable(ifindex: u32, address: IpAddr) -> io::Result<bool> {
    let asked = neighbour_message(ifindex, address, 0, 0);
    match Socket::open()?.request(RTM_GETNEIGH, 0, &asked) {
        Ok(answer) => Ok(answer
            .as_deref()
            .and_then(decode_neighbour)
            .is_some_and(|entry| entry.usable())),
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_described() {
        let lo = link(1).unwrap();
        assert_eq!(
            (lo.ifindex, &*lo.name, lo.loopback, lo.ethernet),
            (1, "lo", true, false)
        );
        assert_eq!((lo.kind, lo.peer, lo.master), (None, None, None));
        assert_eq!(
            link(u32::MAX >> 1).unwrap_err().raw_os_error(),
            Some(libc::ENODEV)
        );
        let all = addresses().unwrap();
        assert!(all.contains(&(1, "127.0.0.1".parse().unwrap())), "{all:?}");
        assert!(!neighbour_usable(1, "192.0.2.1".parse().unwrap()).unwrap());
    }

    #[test]
    fn only_namespaces_have_numbers() {
        let file = std::fs::File::open("/proc/self/status").unwrap();
        namespace_id(&file).unwrap_err();
    }
}
