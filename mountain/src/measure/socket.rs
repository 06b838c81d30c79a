//! Sockets for measuring: ICMP echo and UDP, bound, connected, stamped.

use std::io;
use std::net::SocketAddr;

use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use super::timestamp::{self, Stamping};

/// What is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Raw ICMP or ICMPv6 that receives echo replies only. IPv4 packets arrive with their IP
    /// header, IPv6 ones without.
    IcmpEcho,
    Udp,
}

/// A non-blocking socket, bound to `device` and `source` where given and connected to `target`,
/// with kernel timestamps, details ([`timestamp::set_details`]) and ICMP errors switched on.
///
/// # Errors
/// EPERM for ICMP without CAP_NET_RAW; ENODEV for a missing device; EADDRNOTAVAIL for a `source`
/// that the host does not have; ENETUNREACH and others when there is no route.
pub fn open(
    kind: Kind,
    device: Option<&str>,
    source: Option<SocketAddr>,
    target: SocketAddr,
    stamping: Stamping,
) -> io::Result<Socket> {
    let ipv6 = target.is_ipv6();
    let domain = Domain::for_address(target);
    let socket = match kind {
        Kind::IcmpEcho => {
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
            socket
        }
        Kind::Udp => Socket::new(domain, Type::DGRAM, Some(Protocol::UDP))?,
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

/// linux/icmp.h and linux/icmpv6.h: 1 on both levels; a bit set blocks the type.
const ICMP_FILTER: libc::c_int = 1;
const ECHO_REPLY_V4: usize = 0;
const ECHO_REPLY_V6: usize = 129;
