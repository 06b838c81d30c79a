// SPDX-License-Identifier: GPL-2.0-or-later
//! Sockets for measuring: ICMP echo and UDP, bound, connected, stamped.

use std::io;
use std::net::SocketAddr;

use socket2::{Domain, Protocol, SockAddr, SockFilter, Socket, Type};

use super::timestamp::{self, Stamping};

/// What is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeKind {
    /// Raw ICMP or ICMPv6 that receives echo replies with this identifier only. IPv4 packets
    /// arrive with their IP header, IPv6 ones without.
    IcmpEcho {
        /// Identifier of the echo requests, in host byte order.
        ident: u16,
    },
    /// ICMP or ICMPv6 echo without privileges (`net.ipv4.ping_group_range`): the kernel chooses
    /// the identifier, which is the port of the local address. Packets arrive without IP header.
    Ping,
    /// A connected or bound UDP socket.
    Udp,
}

/// A non-blocking socket, bound to `device` and `source` where given and connected to `target`,
/// with kernel timestamps, details ([`timestamp::set_details`]) and ICMP errors switched on.
///
/// # Errors
/// EPERM for ICMP without CAP_NET_RAW, EACCES for ping sockets outside of the allowed groups; ENODEV for a missing device; EADDRNOTAVAIL for a `source`
/// that the host does not have; ENETUNREACH and others when there is no route.
pub fn open(
    kind: ProbeKind,
    device: Option<&str>,
    source: Option<SocketAddr>,
    target: SocketAddr,
    stamping: Stamping,
) -> io::Result<Socket> {
    let ipv6 = target.is_ipv6();
    let domain = Domain::for_address(target);
    let socket = match kind {
        ProbeKind::IcmpEcho { ident } => {
            let protocol = if ipv6 {
                Protocol::ICMPV6
            } else {
                Protocol::ICMPV4
            };
            let socket = Socket::new(domain, Type::RAW, Some(protocol))?;
            let filtered = if ipv6 {
                let mut blocked = [u32::MAX; 8];
                blocked[ECHO_REPLY_V6 / 32] &= !(1 << (ECHO_REPLY_V6 % 32));
                timestamp::set_option(&socket, libc::IPPROTO_ICMPV6, ICMP_FILTER, blocked)
            } else {
                let blocked = !(1u32 << ECHO_REPLY_V4);
                timestamp::set_option(&socket, libc::SOL_RAW, ICMP_FILTER, blocked)
            };
            filtered?;
            // Every raw socket gets a copy of every reply; those to other programs' pings need
            // not wake us.
            socket.attach_filter(&ident_filter(ipv6, ident))?;
            socket
        }
        ProbeKind::Ping => {
            let protocol = if ipv6 {
                Protocol::ICMPV6
            } else {
                Protocol::ICMPV4
            };
            Socket::new(domain, Type::DGRAM, Some(protocol))?
        }
        ProbeKind::Udp => Socket::new(domain, Type::DGRAM, Some(Protocol::UDP))?,
    };
    socket.set_nonblocking(true)?;
    if let Some(device) = device {
        socket.bind_device(Some(device.as_bytes()))?;
    }
    timestamp::set_details(&socket, ipv6, true)?;
    timestamp::set_stamping(&socket, stamping)?;
    if let Some(source) = source {
        socket.bind(&SockAddr::from(source))?;
    }
    // Connected, the kernel drops what comes from elsewhere and reports ICMP errors.
    socket.connect(&SockAddr::from(target))?;
    Ok(socket)
}

/// Classic BPF: accept if the ICMP header's identifier is `ident`.
fn ident_filter(ipv6: bool, ident: u16) -> Vec<SockFilter> {
    let op = |code: u32, jt, jf, k| SockFilter::new(code as u16, jt, jf, k);
    let load = if ipv6 {
        vec![op(libc::BPF_LD | libc::BPF_H | libc::BPF_ABS, 0, 0, 4)]
    } else {
        // X = length of the IP header.
        vec![
            op(libc::BPF_LDX | libc::BPF_B | libc::BPF_MSH, 0, 0, 0),
            op(libc::BPF_LD | libc::BPF_H | libc::BPF_IND, 0, 0, 4),
        ]
    };
    let decide = [
        op(
            libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
            0,
            1,
            ident.into(),
        ),
        op(libc::BPF_RET | libc::BPF_K, 0, 0, u32::MAX),
        op(libc::BPF_RET | libc::BPF_K, 0, 0, 0),
    ];
    load.into_iter().chain(decide).collect()
}

/// linux/icmp.h and linux/icmpv6.h: 1 on both levels; a bit set blocks the type.
const ICMP_FILTER: libc::c_int = 1;
const ECHO_REPLY_V4: usize = 0;
const ECHO_REPLY_V6: usize = 129;
