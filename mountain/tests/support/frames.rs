// SPDX-License-Identifier: GPL-2.0-or-later
//! Frames past the kernel's routing, from their Ethernet header on.

use std::io;
use std::os::fd::{AsRawFd, RawFd};

use etherparse::{EtherType, Ethernet2Header};
use nix::sys::socket::{recvfrom, setsockopt, sockopt, LinkAddr};
use socket2::{Domain, Protocol, Socket, Type};

/// linux/if_packet.h.
const PACKET_IGNORE_OUTGOING: libc::c_int = 23;

/// A packet socket of this thread's namespace.
pub struct PacketSocket(Socket);

impl PacketSocket {
    /// One that only sends.
    pub fn sender() -> Self {
        Self::open(Type::RAW, 0)
    }

    /// One that also has what comes in by any device; it waits for nothing.
    pub fn new() -> Self {
        let socket = Self::open(Type::RAW.nonblocking(), libc::ETH_P_ALL as u16);
        let on: libc::c_int = 1;
        // SAFETY: the value outlives the call.
        let rc = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_PACKET,
                PACKET_IGNORE_OUTGOING,
                (&raw const on).cast(),
                size_of_val(&on) as u32,
            )
        };
        assert_eq!(rc, 0, "setsockopt: {}", io::Error::last_os_error());
        setsockopt(&socket.0, sockopt::RcvBufForce, &(4 << 20)).unwrap();
        socket
    }

    fn open(kind: Type, protocol: u16) -> Self {
        let protocol = Protocol::from(i32::from(protocol.to_be()));
        let socket = Socket::new(Domain::PACKET, kind, Some(protocol));
        Self(socket.expect("AF_PACKET"))
    }

    /// Sends a frame by a device; returns what the kernel says, -1 or bytes.
    pub fn send(&self, ifindex: u32, frame: &[u8]) -> isize {
        // SAFETY: all-zero is a valid sockaddr_ll; both outlive the call.
        unsafe {
            let mut to: libc::sockaddr_ll = std::mem::zeroed();
            to.sll_family = libc::AF_PACKET as u16;
            to.sll_ifindex = ifindex as i32;
            // The kernel reads it in an Ethernet header. A GRE device without one would send none.
            to.sll_protocol = match frame[0] >> 4 {
                4 => (libc::ETH_P_IP as u16).to_be(),
                6 => (libc::ETH_P_IPV6 as u16).to_be(),
                _ => 0,
            };
            to.sll_halen = 6;
            to.sll_addr[..6].copy_from_slice(&frame[..6]);
            libc::sendto(
                self.as_raw_fd(),
                frame.as_ptr().cast(),
                frame.len(),
                0,
                (&raw const to).cast(),
                size_of_val(&to) as u32,
            )
        }
    }

    /// The next frame that has come in, its length and its device's index.
    pub fn receive(&self, buffer: &mut [u8]) -> Option<(usize, u32)> {
        let (length, from) = recvfrom::<LinkAddr>(self.as_raw_fd(), buffer).ok()?;
        Some((length, from?.ifindex() as u32))
    }
}

impl AsRawFd for PacketSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// A frame with an IP packet.
pub fn framed(to: [u8; 6], from: [u8; 6], packet: &[u8]) -> Vec<u8> {
    let kind = match packet[0] >> 4 {
        4 => EtherType::IPV4,
        _ => EtherType::IPV6,
    };
    ethernet(to, from, kind, packet)
}

pub fn ethernet(to: [u8; 6], from: [u8; 6], kind: EtherType, body: &[u8]) -> Vec<u8> {
    let header = Ethernet2Header {
        source: from,
        destination: to,
        ether_type: kind,
    };
    [&header.to_bytes()[..], body].concat()
}
