// SPDX-License-Identifier: GPL-2.0-or-later
//! Sockets for measuring: ICMP echo and UDP, bound, connected, stamped.

use std::io::{self, IoSlice};
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsRawFd, RawFd};
use std::time::Instant;

use nix::sys::socket::{sendmsg, ControlMessage, MsgFlags, SockaddrStorage};
use socket2::{Domain, Protocol, SockAddr, SockFilter, Socket, Type};
use tokio::io::unix::AsyncFd;

use super::timestamp::{self, Received, Stamping};
use super::timing::ProbeStamps;
use super::wire::{self, ProbeId, Reflected};
use crate::host::socket_option;

/// What is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProbeKind {
    /// Raw ICMP or ICMPv6 that receives echo replies with an identifier of its own only. IPv4 packets
    /// arrive with their IP header, IPv6 ones without.
    IcmpEcho,
    /// ICMP or ICMPv6 echo without privileges (`net.ipv4.ping_group_range`): the kernel chooses
    /// the identifier, which is the port of the local address. Packets arrive without IP header.
    Ping,
    /// A connected or bound UDP socket.
    Udp,
}

/// A link-local address on the device; any other scope could not work on a socket bound to it.
pub(super) fn with_scope(address: SocketAddr, ifindex: u32) -> SocketAddr {
    match address {
        SocketAddr::V6(a) if a.ip().is_unicast_link_local() => {
            SocketAddrV6::new(*a.ip(), a.port(), a.flowinfo(), ifindex).into()
        }
        other => other,
    }
}

/// Answers `to` from the address of this host that it has sent to, with the DSCP of `tos` (the ECN
/// bits stay 0). `ifindex` is the device to leave by; 0 leaves it to the routing.
///
/// # Errors
/// sendmsg(2)'s.
pub fn send_from(
    socket: &Socket,
    packet: &[u8],
    to: SocketAddr,
    (local, ifindex): (IpAddr, u32),
    tos: u8,
) -> io::Result<usize> {
    let dscp = tos & 0xfc;
    let iov = [IoSlice::new(packet)];
    let to = SockaddrStorage::from(to);
    let fd = socket.as_raw_fd();
    let sent = match local {
        IpAddr::V4(v4) => {
            let info = libc::in_pktinfo {
                ipi_ifindex: ifindex as libc::c_int,
                ipi_spec_dst: libc::in_addr {
                    s_addr: u32::from(v4).to_be(),
                },
                ipi_addr: libc::in_addr { s_addr: 0 },
            };
            let control = [
                ControlMessage::Ipv4PacketInfo(&info),
                ControlMessage::Ipv4Tos(&dscp),
            ];
            sendmsg(fd, &iov, &control, MsgFlags::empty(), Some(&to))
        }
        IpAddr::V6(v6) => {
            let info = libc::in6_pktinfo {
                ipi6_addr: libc::in6_addr {
                    s6_addr: v6.octets(),
                },
                ipi6_ifindex: ifindex,
            };
            let class = i32::from(dscp);
            let control = [
                ControlMessage::Ipv6PacketInfo(&info),
                ControlMessage::Ipv6TClass(&class),
            ];
            sendmsg(fd, &iov, &control, MsgFlags::empty(), Some(&to))
        }
    };
    Ok(sent?)
}

/// A socket that sends probes to one target and knows its answers.
pub(super) struct ProbeSocket {
    socket: Socket,
    kind: ProbeKind,
    target: SocketAddr,
    stamping: Stamping,
    /// Identifier of echo requests, in host byte order; 0 for UDP.
    ident: u16,
}

impl ProbeSocket {
    /// A non-blocking socket, bound to `device` and `source` where given and connected to `target`,
    /// with kernel timestamps, details ([`timestamp::set_details`]) and ICMP errors switched on.
    ///
    /// # Errors
    /// EPERM for ICMP without CAP_NET_RAW, EACCES for ping sockets outside of the allowed groups;
    /// ENODEV for a missing device; EADDRNOTAVAIL for a `source` that the host does not have;
    /// ENETUNREACH and others when there is no route.
    pub(super) fn open(
        kind: ProbeKind,
        device: Option<&str>,
        source: Option<SocketAddr>,
        target: SocketAddr,
        stamping: Stamping,
    ) -> io::Result<Self> {
        let ipv6 = target.is_ipv6();
        let (kind_of_socket, protocol) = match (kind, ipv6) {
            (ProbeKind::IcmpEcho, true) => (Type::RAW, Protocol::ICMPV6),
            (ProbeKind::IcmpEcho, false) => (Type::RAW, Protocol::ICMPV4),
            (ProbeKind::Ping, true) => (Type::DGRAM, Protocol::ICMPV6),
            (ProbeKind::Ping, false) => (Type::DGRAM, Protocol::ICMPV4),
            (ProbeKind::Udp, _) => (Type::DGRAM, Protocol::UDP),
        };
        let socket = Socket::new(Domain::for_address(target), kind_of_socket, Some(protocol))?;
        let mut ident = 0;
        if kind == ProbeKind::IcmpEcho {
            ident = rand::random();
            only_echo_replies(&socket, ipv6, ident)?;
        }
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
        if kind == ProbeKind::Ping {
            ident = socket
                .local_addr()?
                .as_socket()
                .map_or(0, |local| local.port());
            if ident == 0 {
                let none = "the kernel gave the ping socket no identifier";
                return Err(io::Error::other(none));
            }
        }
        Ok(Self {
            socket,
            kind,
            target,
            stamping,
            ident,
        })
    }

    /// Has the tokio runtime watch it.
    pub(super) fn watched(self) -> io::Result<AsyncFd<Self>> {
        // SAFETY: it owns its socket and with it the descriptor, which never changes and is closed only
        // when the `AsyncFd`, which then owns it, has deregistered it.
        unsafe { AsyncFd::register(self) }.map_err(io::Error::from)
    }

    /// The socket itself.
    pub(super) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Sends a probe of `size` bytes of payload; `cookie`: see [`wire::write_request`]. The stamps
    /// that it returns beside the outcome are from just before the system call.
    pub(super) fn send(
        &self,
        id: ProbeId,
        size: usize,
        cookie: u32,
    ) -> (ProbeStamps, io::Result<usize>) {
        let mut packet = vec![0; size];
        match self.kind {
            ProbeKind::Udp => wire::write_request(&mut packet, id, cookie),
            ProbeKind::IcmpEcho | ProbeKind::Ping => {
                packet.resize(8 + size, 0);
                // The kernel puts in a ping socket's identifier.
                wire::write_echo_request(&mut packet, self.target.is_ipv6(), self.ident, id);
            }
        }
        // An ICMP error that is still pending would make send fail without sending.
        let _ = self.socket.take_error();
        let (sent_ns, sent) = (timestamp::realtime_ns(), Instant::now());
        let outcome = self.socket.send(&packet);
        (ProbeStamps::new(sent, sent_ns), outcome)
    }

    /// Has the kernel count packets from 0 again. Whether a failed send has used a number up depends on
    /// how far it got and on the kernel's version.
    pub(super) fn restart_count(&self) -> io::Result<()> {
        timestamp::set_stamping(&self.socket, Stamping::empty())?;
        timestamp::set_stamping(&self.socket, self.stamping)
    }

    /// The probe that a packet answers, and what a reflector adds.
    pub(super) fn answered(
        &self,
        packet: &[u8],
        received: &Received,
    ) -> Option<(ProbeId, Option<Reflected>)> {
        let from = received.from?;
        // A raw socket connected after its creation may hold what came before from elsewhere.
        if from.ip() != self.target.ip() {
            return None;
        }
        let ipv6 = self.target.is_ipv6();
        match self.kind {
            ProbeKind::Udp => {
                let (id, reflected) = wire::parse_reply(packet)?;
                (from.port() == self.target.port()).then_some((id, Some(reflected)))
            }
            ProbeKind::IcmpEcho => Some((wire::parse_echo_reply(ipv6, packet, self.ident)?, None)),
            ProbeKind::Ping => Some((wire::parse_echo_message(ipv6, packet, self.ident)?, None)),
        }
    }
}

impl AsRawFd for ProbeSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

/// Every raw socket gets a copy of every ICMP message; those to other programs' pings need not wake us.
fn only_echo_replies(socket: &Socket, ipv6: bool, ident: u16) -> io::Result<()> {
    if ipv6 {
        let mut blocked = [u32::MAX; 8];
        blocked[ECHO_REPLY_V6 / 32] &= !(1 << (ECHO_REPLY_V6 % 32));
        socket_option::set(socket, libc::IPPROTO_ICMPV6, ICMP_FILTER, blocked)?;
    } else {
        let blocked = !(1u32 << ECHO_REPLY_V4);
        socket_option::set(socket, libc::SOL_RAW, ICMP_FILTER, blocked)?;
    }
    socket.attach_filter(&ident_filter(ipv6, ident))
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
