// SPDX-License-Identifier: GPL-2.0-or-later
//! UDP packets with the device that they came in by.

use std::io::IoSliceMut;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;

use nix::sys::socket::{
    recvmsg, setsockopt, sockopt, ControlMessageOwned, MsgFlags, SockaddrStorage,
};

/// A packet that came in.
pub struct Arrival {
    pub from: SocketAddr,
    pub ifindex: u32,
    pub len: usize,
}

/// Has the kernel tell the devices, and keep seconds of traffic: a reader that waits for its CPU loses nothing.
pub fn ask_devices(socket: &UdpSocket) {
    match socket.local_addr().unwrap().is_ipv6() {
        true => setsockopt(socket, sockopt::Ipv6RecvPacketInfo, &true).unwrap(),
        false => setsockopt(socket, sockopt::Ipv4PacketInfo, &true).unwrap(),
    }
    setsockopt(socket, sockopt::RcvBufForce, &(8 << 20)).unwrap();
}

/// The next packet; `None` when it does not come in time.
pub fn receive(socket: &UdpSocket, buffer: &mut [u8]) -> Option<Arrival> {
    let mut space = nix::cmsg_space!(libc::in6_pktinfo);
    let mut iov = [IoSliceMut::new(buffer)];
    let (fd, flags) = (socket.as_raw_fd(), MsgFlags::empty());
    let message = recvmsg::<SockaddrStorage>(fd, &mut iov, Some(&mut space), flags).ok()?;
    let from = message.address.unwrap();
    let from = match (from.as_sockaddr_in(), from.as_sockaddr_in6()) {
        (Some(v4), _) => SocketAddr::V4((*v4).into()),
        (_, Some(v6)) => SocketAddr::V6((*v6).into()),
        _ => panic!("a sender of what family?"),
    };
    let mut info = message.cmsgs().unwrap();
    let ifindex = info.find_map(|c| match c {
        ControlMessageOwned::Ipv4PacketInfo(i) => Some(i.ipi_ifindex as u32),
        ControlMessageOwned::Ipv6PacketInfo(i) => Some(i.ipi6_ifindex),
        _ => None,
    });
    Some(Arrival {
        from,
        ifindex: ifindex.expect("the device it came by"),
        len: message.bytes,
    })
}
