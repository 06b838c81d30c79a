// SPDX-License-Identifier: GPL-2.0-or-later
//! Asking everyone on a link for a neighbour, as the kernel does for one of which it knows nothing.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::num::NonZeroU32;

use etherparse::{ArpHardwareId, ArpOperation, ArpPacket, EtherType, PacketBuilder};
use socket2::{Domain, Protocol, SockAddr, SockAddrStorage, Socket, Type};

/// Neighbour solicitation (RFC 4861 §4.3).
const NEIGHBOR_SOLICITATION: u8 = 135;
/// The option with the sender's link-layer address, and its length in units of eight bytes (RFC 4861 §4.6.1).
const SOURCE_LINK_ADDRESS: [u8; 2] = [1, 1];
/// Any port will do (RFC 863).
const DISCARD: u16 = 9;
/// From another link no packet of neighbour discovery arrives with it (RFC 4861 §7.1.1).
const HOP_LIMIT: u8 = 255;

/// Asks once who has `target` on a device, which has Ethernet headers: by ARP (RFC 826) or neighbour solicitation (RFC 4861 §7.2.2).
/// Whoever hears it learns where the source is, an address of this host: `preferred` if it is of the target's family, else the
/// one that the kernel takes.
///
/// The kernel reads the answer as if it had asked by itself. It has to have an entry of `target`: of IPv4, one that
/// has not changed within the last second (`locktime`, `arp_process` of net/ipv4/arp.c).
///
/// # Errors
/// When the device is gone or down, or has no address of the family; without CAP_NET_RAW, or where packet sockets are refused.
pub(crate) fn solicit(ifindex: u32, target: IpAddr, preferred: Option<IpAddr>) -> io::Result<()> {
    let preferred = preferred.filter(|source| source.is_ipv6() == target.is_ipv6());
    let source = preferred.map_or_else(|| source_to(ifindex, target), Ok)?;
    // Of no protocol, it receives nothing.
    let socket = Socket::new(Domain::PACKET, Type::RAW, Some(Protocol::from(0)))?;
    socket.bind(&of_device(ifindex))?;
    let mac = mac_of_device(socket.local_addr()?);
    let frame = match (target, source) {
        (IpAddr::V4(target), IpAddr::V4(source)) => arp_request(mac, target, source)?,
        (IpAddr::V6(target), IpAddr::V6(source)) => neighbor_solicitation(mac, target, source)?,
        _ => return Err(io::ErrorKind::InvalidInput.into()),
    };
    socket.send(&frame).map(|_| ())
}

/// The source of a packet to a neighbour, for which nothing is sent.
fn source_to(ifindex: u32, target: IpAddr) -> io::Result<IpAddr> {
    let target = match target {
        IpAddr::V4(target) => SocketAddr::from((target, DISCARD)),
        IpAddr::V6(target) => SocketAddrV6::new(target, DISCARD, 0, ifindex).into(),
    };
    let socket = Socket::new(Domain::for_address(target), Type::DGRAM, None)?;
    let device = NonZeroU32::new(ifindex);
    match target {
        SocketAddr::V4(_) => socket.bind_device_by_index_v4(device)?,
        SocketAddr::V6(_) => socket.bind_device_by_index_v6(device)?,
    }
    socket.connect(&target.into())?;
    let local = socket.local_addr()?.as_socket();
    local
        .map(|local| local.ip())
        .ok_or_else(|| io::ErrorKind::AddrNotAvailable.into())
}

fn of_device(ifindex: u32) -> SockAddr {
    let mut storage = SockAddrStorage::zeroed();
    // SAFETY: the storage has room for any address of a socket, and zeros are a valid one of these.
    let link: &mut libc::sockaddr_ll = unsafe { storage.view_as() };
    link.sll_family = libc::AF_PACKET as u16;
    link.sll_ifindex = ifindex as i32;
    let length = size_of::<libc::sockaddr_ll>() as u32;
    // SAFETY: so far it is an address of a packet socket.
    unsafe { SockAddr::new(storage, length) }
}

/// The Ethernet address of the device that a socket is bound to; `local`: the socket's address.
fn mac_of_device(local: SockAddr) -> [u8; 6] {
    let mut storage = local.as_storage();
    // SAFETY: the storage has room for any address of a socket, and this one is of a packet socket.
    let link: &mut libc::sockaddr_ll = unsafe { storage.view_as() };
    let [mac @ .., _, _] = link.sll_addr;
    mac
}

fn arp_request(mac: [u8; 6], target: Ipv4Addr, source: Ipv4Addr) -> io::Result<Vec<u8>> {
    let arp = ArpPacket::new(
        ArpHardwareId::ETHERNET,
        EtherType::IPV4,
        ArpOperation::REQUEST,
        &mac,
        &source.octets(),
        &[0; 6],
        &target.octets(),
    );
    let arp = arp.map_err(io::Error::other)?;
    let frame = PacketBuilder::ethernet2(mac, [0xff; 6]).arp(arp);
    let mut bytes = Vec::with_capacity(frame.size());
    frame.write(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}

fn neighbor_solicitation(mac: [u8; 6], target: Ipv6Addr, source: Ipv6Addr) -> io::Result<Vec<u8>> {
    let last = target.octets();
    // The solicited-node multicast address (RFC 4291 §2.7.1), and where Ethernet has it (RFC 2464 §7).
    let mut group = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00, 0).octets();
    group[13..].copy_from_slice(&last[13..]);
    let to = [0x33, 0x33, group[12], group[13], group[14], group[15]];
    let message = [&last[..], &SOURCE_LINK_ADDRESS, &mac].concat();
    let frame = PacketBuilder::ethernet2(mac, to)
        .ipv6(source.octets(), group, HOP_LIMIT)
        .icmpv6_raw(NEIGHBOR_SOLICITATION, 0, [0; 4]);
    let mut bytes = Vec::with_capacity(frame.size(message.len()));
    frame
        .write(&mut bytes, &message)
        .map_err(io::Error::other)?;
    Ok(bytes)
}
