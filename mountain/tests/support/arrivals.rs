// SPDX-License-Identifier: GPL-2.0-or-later
//! UDP packets with the device that they came in by, or leave by.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;

use nix::sys::socket::{recvmsg, sendmsg, setsockopt, sockopt};
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, SockaddrStorage};

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

/// Sends a packet that names the device to leave by, by its index.
pub fn send_by(socket: &impl AsRawFd, data: &[u8], to: SocketAddr, ifindex: u32) -> io::Result<()> {
    let to = SockaddrStorage::from(to);
    // SAFETY: all-zero is valid for both.
    let (mut info4, mut info6): (libc::in_pktinfo, libc::in6_pktinfo) =
        unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    info4.ipi_ifindex = ifindex as i32;
    info6.ipi6_ifindex = ifindex;
    let message = match to.as_sockaddr_in6() {
        Some(_) => ControlMessage::Ipv6PacketInfo(&info6),
        None => ControlMessage::Ipv4PacketInfo(&info4),
    };
    let (fd, slice) = (socket.as_raw_fd(), [IoSlice::new(data)]);
    sendmsg(fd, &slice, &[message], MsgFlags::empty(), Some(&to))?;
    Ok(())
}

/// (packets, bytes) that a device of this thread's namespace has received.
pub fn received(dev: &str) -> (u64, u64) {
    let text = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    let prefix = format!("{dev}:");
    let line = text.lines().find_map(|l| l.trim().strip_prefix(&prefix));
    let words: Vec<&str> = line.expect(dev).split_whitespace().collect();
    (words[1].parse().unwrap(), words[0].parse().unwrap())
}
