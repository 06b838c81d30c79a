// SPDX-License-Identifier: GPL-2.0-or-later
//! Kernel timestamps of packets (SO_TIMESTAMPING) on UDP, ping and raw sockets.
//!
//! All times are ns since the epoch as the kernel gives them: CLOCK_REALTIME for software stamps,
//! the network card's clock for hardware ones. Receive stamps come with the packet; transmit
//! stamps come on the socket's error queue with a number (OPT_ID) that counts the packets of the
//! socket, from 0, without the packet itself (OPT_TSONLY).
//! Source: Documentation/networking/timestamping.rst of the kernel.

use std::io::{self, IoSliceMut};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{
    recvmsg, setsockopt, sockopt, ControlMessageOwned, MsgFlags, SockaddrStorage, TimestampingFlag,
    Timestamps,
};
use nix::sys::time::TimeSpec;
use socket2::Socket;
use tokio::io::unix::AsyncFd;

/// What to have stamped on a socket; empty: nothing.
pub type Stamping = TimestampingFlag;

/// Stamps received packets as they enter the network stack.
pub const RECEIVED: Stamping = stamping(
    Stamping::empty(),
    libc::SOF_TIMESTAMPING_SOFTWARE | libc::SOF_TIMESTAMPING_RX_SOFTWARE,
);
/// Also stamps sent packets as they are handed to the driver.
pub const BOTH_WAYS: Stamping = stamping(
    RECEIVED,
    libc::SOF_TIMESTAMPING_TX_SOFTWARE
        | libc::SOF_TIMESTAMPING_OPT_ID
        | libc::SOF_TIMESTAMPING_OPT_TSONLY,
);
/// Also stamps sent packets before they enter the queueing discipline; the difference to the other stamp
/// is the time spent in the host's own queue. This is all that the kernel can stamp by itself.
pub(crate) const KERNEL: Stamping = stamping(BOTH_WAYS, libc::SOF_TIMESTAMPING_TX_SCHED);
/// Also asks for the network card's own stamps. They come only where the device offers them and its
/// stamping is switched on.
pub(crate) const HARDWARE: Stamping = stamping(
    KERNEL,
    libc::SOF_TIMESTAMPING_RAW_HARDWARE
        | libc::SOF_TIMESTAMPING_RX_HARDWARE
        | libc::SOF_TIMESTAMPING_TX_HARDWARE
        | libc::SOF_TIMESTAMPING_OPT_TX_SWHW,
);

const fn stamping(less: Stamping, more: libc::c_uint) -> Stamping {
    less.union(Stamping::from_bits_retain(more))
}

/// Switches stamping on (or, if it is empty, off). Going from no transmit stamps to some restarts the
/// socket's packet count at 0.
pub fn set_stamping(socket: &impl AsFd, stamping: Stamping) -> io::Result<()> {
    Ok(setsockopt(socket, sockopt::Timestamping, &stamping)?)
}

/// Waits until received packets are stamped: the kernel switches that on some time after the first
/// socket of the system has asked for it. A socket of our own on loopback tells. Returns false when
/// that does not work, as where loopback is down; then `limit` has passed, which is long enough.
pub(crate) fn wait_until_on(limit: Duration) -> bool {
    let end = Instant::now() + limit;
    let on = ["127.0.0.1:0", "[::1]:0"].iter().any(|address| {
        let Ok(socket) = UdpSocket::bind(address) else {
            return false;
        };
        let own = socket.local_addr().and_then(|own| socket.connect(own));
        if own.and_then(|()| set_stamping(&socket, RECEIVED)).is_err() {
            return false;
        }
        while Instant::now() < end {
            if socket.send(&[0]).is_err() {
                return false;
            }
            // It is there as soon as it is sent, but for a busy machine.
            std::thread::sleep(Duration::from_micros(200));
            while let Ok(received) = receive(&socket, &mut [0; 8]) {
                if received.rx_ns.is_some() {
                    return true;
                }
            }
        }
        false
    });
    if !on {
        std::thread::sleep(end.saturating_duration_since(Instant::now()));
    }
    on
}

/// Asks for what else [`receive`] reports: arrival device and destination address, hop limit and
/// DSCP/ECN byte; and for ICMP errors on the error queue.
pub fn set_details(socket: &impl AsFd, ipv6: bool, icmp_errors: bool) -> io::Result<()> {
    if ipv6 {
        setsockopt(socket, sockopt::Ipv6RecvPacketInfo, &true)?;
        setsockopt(socket, sockopt::Ipv6RecvHopLimit, &true)?;
        setsockopt(socket, sockopt::Ipv6RecvTClass, &true)?;
        setsockopt(socket, sockopt::Ipv6RecvErr, &icmp_errors)?;
    } else {
        setsockopt(socket, sockopt::Ipv4PacketInfo, &true)?;
        setsockopt(socket, sockopt::Ipv4RecvTtl, &true)?;
        setsockopt(socket, sockopt::IpRecvTos, &true)?;
        setsockopt(socket, sockopt::Ipv4RecvErr, &icmp_errors)?;
    }
    Ok(())
}

/// Has the tokio runtime watch a socket.
pub(super) fn watch(socket: Socket) -> io::Result<AsyncFd<Socket>> {
    // SAFETY: a `Socket` owns its descriptor and always returns the same one; it is closed only
    // when the `AsyncFd`, which then owns it, has deregistered it.
    unsafe { AsyncFd::register(socket) }.map_err(io::Error::from)
}

/// CLOCK_REALTIME in ns since the epoch: the clock of the software stamps.
pub fn realtime_ns() -> u64 {
    let now = std::time::SystemTime::now();
    // Before 1970 every stamp is meaningless anyway; 0 keeps the callers' plausibility checks.
    now.duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |d| d.as_nanos() as u64)
}

/// A received packet's metadata; the payload is in the caller's buffer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Received {
    /// Bytes in the buffer.
    pub len: usize,
    /// The packet was longer than the buffer.
    pub truncated: bool,
    /// Sender; the port is 0 on raw sockets.
    pub from: Option<SocketAddr>,
    /// Software receive stamp, ns since the epoch.
    pub rx_ns: Option<u64>,
    /// Hardware receive stamp, ns of the card's clock.
    pub rx_hw_ns: Option<u64>,
    /// Device it arrived on.
    pub ifindex: Option<u32>,
    /// Address in its destination field.
    pub destination: Option<IpAddr>,
    /// Our own address to answer from (differs from `destination` for broadcast).
    pub local: Option<IpAddr>,
    /// TTL or hop limit as it arrived.
    pub hop_limit: Option<u8>,
    /// TOS or traffic class byte as it arrived.
    pub tos: Option<u8>,
}

/// Receives one packet with its stamps, without blocking. Errors are recvmsg(2)'s;
/// `WouldBlock` when there is none.
pub fn receive(fd: &impl AsRawFd, buffer: &mut [u8]) -> io::Result<Received> {
    receive_with(fd, buffer, MsgFlags::MSG_DONTWAIT)
}

/// Receives one packet with its stamps, and waits for it if the socket is one that blocks. Errors are
/// recvmsg(2)'s; `WouldBlock` also when the socket's time-out has passed.
pub fn receive_blocking(fd: &impl AsRawFd, buffer: &mut [u8]) -> io::Result<Received> {
    receive_with(fd, buffer, MsgFlags::empty())
}

fn receive_with(fd: &impl AsRawFd, buffer: &mut [u8], flags: MsgFlags) -> io::Result<Received> {
    let mut control = Control([0; 512]);
    let mut iov = [IoSliceMut::new(buffer)];
    let control = Some(&mut control.0[..]);
    let message = recvmsg::<SockaddrStorage>(fd.as_raw_fd(), &mut iov, control, flags)?;
    let mut received = Received {
        len: message.bytes,
        truncated: message.flags.contains(MsgFlags::MSG_TRUNC),
        from: message.address.as_ref().and_then(socket_addr),
        ..Received::default()
    };
    for cmsg in message.cmsgs()? {
        match cmsg {
            ControlMessageOwned::ScmTimestampsns(stamps) => {
                (received.rx_ns, received.rx_hw_ns) = split(&stamps);
            }
            ControlMessageOwned::Ipv4PacketInfo(info) => {
                received.ifindex = Some(info.ipi_ifindex as u32);
                received.destination = Some(IpAddr::V4(u32::from_be(info.ipi_addr.s_addr).into()));
                received.local = Some(IpAddr::V4(u32::from_be(info.ipi_spec_dst.s_addr).into()));
            }
            ControlMessageOwned::Ipv6PacketInfo(info) => {
                let address = Ipv6Addr::from(info.ipi6_addr.s6_addr);
                received.ifindex = Some(info.ipi6_ifindex);
                received.destination = Some(address.into());
                received.local = (!address.is_multicast()).then_some(address.into());
            }
            ControlMessageOwned::Ipv4Ttl(v) | ControlMessageOwned::Ipv6HopLimit(v) => {
                received.hop_limit = u8::try_from(v).ok();
            }
            ControlMessageOwned::Ipv4Tos(v) => received.tos = Some(v),
            ControlMessageOwned::Ipv6TClass(v) => received.tos = u8::try_from(v).ok(),
            _ => {}
        }
    }
    Ok(received)
}

/// One entry of a socket's error queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ErrorEvent {
    /// A sent packet was handed to the driver. `id` counts the socket's packets from 0, modulo
    /// 2^32.
    Sent {
        /// Number of the packet.
        id: u32,
        /// Software stamp, ns since the epoch.
        tx_ns: Option<u64>,
        /// Hardware stamp, ns of the card's clock.
        tx_hw_ns: Option<u64>,
    },
    /// A sent packet reached the queueing discipline.
    Scheduled {
        /// Number of the packet, as in `Sent`.
        id: u32,
        /// When it got there, ns since the epoch.
        tx_ns: u64,
    },
    /// An ICMP error, or a local one such as an unresolved neighbour, as an errno value.
    Unreachable {
        /// What the error means, as errno(3) has it.
        errno: i32,
        /// Who reported it; `None`: this host.
        from: Option<IpAddr>,
    },
    /// Something that was not asked for (zero-copy completions, TCP acknowledgements, ...).
    Other,
}

/// Takes one entry off the error queue; `None` when it is empty.
pub fn receive_error(fd: &impl AsRawFd) -> io::Result<Option<ErrorEvent>> {
    // ICMP errors carry the offending packet; only its length matters here.
    let mut sink = [0u8; 64];
    let mut control = Control([0; 512]);
    let mut iov = [IoSliceMut::new(&mut sink)];
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_ERRQUEUE;
    let control = Some(&mut control.0[..]);
    let message = match recvmsg::<SockaddrStorage>(fd.as_raw_fd(), &mut iov, control, flags) {
        Err(Errno::EAGAIN) => return Ok(None),
        message => message?,
    };
    let mut stamps = (None, None);
    let mut failure = None;
    for cmsg in message.cmsgs()? {
        match cmsg {
            ControlMessageOwned::ScmTimestampsns(s) => stamps = split(&s),
            ControlMessageOwned::Ipv4RecvErr(error, from) => {
                let from = from.map(|a| IpAddr::V4(u32::from_be(a.sin_addr.s_addr).into()));
                failure = Some((error, from));
            }
            ControlMessageOwned::Ipv6RecvErr(error, from) => {
                let from = from.map(|a| IpAddr::V6(a.sin6_addr.s6_addr.into()));
                failure = Some((error, from));
            }
            _ => {}
        }
    }
    let Some((error, from)) = failure else {
        return Ok(Some(ErrorEvent::Other));
    };
    Ok(Some(match error.ee_origin {
        libc::SO_EE_ORIGIN_TIMESTAMPING => match (error.ee_info, stamps) {
            (SCM_TSTAMP_SND, (tx_ns, tx_hw_ns)) => ErrorEvent::Sent {
                id: error.ee_data,
                tx_ns,
                tx_hw_ns,
            },
            (SCM_TSTAMP_SCHED, (Some(tx_ns), _)) => ErrorEvent::Scheduled {
                id: error.ee_data,
                tx_ns,
            },
            _ => ErrorEvent::Other,
        },
        libc::SO_EE_ORIGIN_LOCAL => ErrorEvent::Unreachable {
            errno: error.ee_errno as i32,
            from: None,
        },
        libc::SO_EE_ORIGIN_ICMP | libc::SO_EE_ORIGIN_ICMP6 => ErrorEvent::Unreachable {
            errno: error.ee_errno as i32,
            from: from.filter(|a| !a.is_unspecified()),
        },
        _ => ErrorEvent::Other,
    }))
}

// linux/errqueue.h; the libc crate does not have them.
const SCM_TSTAMP_SND: u32 = 0;
const SCM_TSTAMP_SCHED: u32 = 1;

/// Room for all control messages that [`set_stamping`] and [`set_details`] can switch on (about
/// 200 bytes), aligned as the headers in it must be.
#[repr(align(8))]
struct Control([u8; 512]);

/// (software, hardware) stamp; the kernel leaves the absent one zero.
fn split(stamps: &Timestamps) -> (Option<u64>, Option<u64>) {
    let ns = |t: &TimeSpec| {
        let ns = t.tv_sec() as u64 * 1_000_000_000 + t.tv_nsec() as u64;
        (ns != 0).then_some(ns)
    };
    (ns(&stamps.system), ns(&stamps.hw_raw))
}

fn socket_addr(address: &SockaddrStorage) -> Option<SocketAddr> {
    if let Some(v4) = address.as_sockaddr_in() {
        return Some(SocketAddrV4::new(v4.ip(), v4.port()).into());
    }
    let v6 = address.as_sockaddr_in6()?;
    Some(SocketAddrV6::new(v6.ip(), v6.port(), v6.flowinfo(), v6.scope_id()).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (UdpSocket, UdpSocket) {
        let a = UdpSocket::bind("127.0.0.1:0").unwrap();
        let b = UdpSocket::bind("127.0.0.1:0").unwrap();
        a.connect(b.local_addr().unwrap()).unwrap();
        (a, b)
    }

    /// What comes in a moment, also on a machine that has other things to do.
    fn soon<T>(mut get: impl FnMut() -> Option<T>) -> T {
        for _ in 0..2_000 {
            if let Some(value) = get() {
                return value;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("not within ten seconds");
    }

    #[test]
    fn what_comes_after_the_wait_is_stamped() {
        let (a, b) = pair();
        set_stamping(&b, HARDWARE).unwrap();
        assert!(wait_until_on(Duration::from_secs(10)));
        a.send(b"x").unwrap();
        assert!(soon(|| receive(&b, &mut [0; 16]).ok()).rx_ns.is_some());
        let begun = Instant::now();
        assert!(!wait_until_on(Duration::ZERO), "no time to find out");
        assert!(begun.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn both_stamps_are_between_the_user_clocks_and_in_order() {
        let (a, b) = pair();
        set_stamping(&a, HARDWARE).unwrap();
        set_stamping(&b, HARDWARE).unwrap();
        set_details(&b, false, true).unwrap();
        // The first packets after switching on may have no stamp: the kernel's switch is lazy, and
        // stays on while somebody uses it.
        let (other, stamped) = pair();
        set_stamping(&stamped, HARDWARE).unwrap();
        soon(|| {
            other.send(b"x").unwrap();
            receive(&stamped, &mut [0; 16]).ok()?.rx_ns
        });
        let before = realtime_ns();
        a.send(b"x").unwrap();
        a.send(b"yz").unwrap();
        let after = realtime_ns();
        let mut buffer = [0; 16];
        let first = soon(|| receive(&b, &mut buffer).ok());
        assert_eq!((first.len, first.from), (1, Some(a.local_addr().unwrap())));
        assert_eq!(first.destination, Some("127.0.0.1".parse().unwrap()));
        assert_eq!(first.ifindex, Some(1));
        assert_eq!((first.hop_limit, first.tos), (Some(64), Some(0)));
        assert!(!first.truncated);
        let rx = first.rx_ns.unwrap();
        assert!(before <= rx && rx <= after, "{before} {rx} {after}");
        let events: Vec<_> = (0..4)
            .map(|_| soon(|| receive_error(&a).unwrap()))
            .collect();
        let sent: Vec<(u32, u64)> = events
            .iter()
            .filter_map(|e| match e {
                ErrorEvent::Sent { id, tx_ns, .. } => Some((*id, tx_ns.unwrap())),
                _ => None,
            })
            .collect();
        let keys: Vec<_> = sent.iter().map(|s| s.0).collect();
        assert_eq!(keys, [0, 1], "{events:?}");
        let scheduled = events
            .iter()
            .filter(|e| matches!(e, ErrorEvent::Scheduled { .. }))
            .count();
        assert_eq!(scheduled, 2, "{events:?}");
        let is_between = before <= sent[0].1 && sent[0].1 <= rx;
        assert!(is_between, "{before} {sent:?} {rx}");
    }

    #[test]
    fn without_stamping_there_are_none() {
        let (a, b) = pair();
        a.send(b"x").unwrap();
        let got = soon(|| receive(&b, &mut [0; 16]).ok());
        assert_eq!((got.rx_ns, got.rx_hw_ns, got.ifindex), (None, None, None));
        assert_eq!(receive_error(&a).unwrap(), None);
        let empty = receive(&b, &mut [0; 16]).unwrap_err();
        assert_eq!(empty.kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn switching_off_and_on_restarts_the_count() {
        let (a, b) = pair();
        set_stamping(&a, HARDWARE).unwrap();
        // Each packet has two events, scheduled and sent.
        let next_two = || [(); 2].map(|_| soon(|| receive_error(&a).unwrap()));
        a.send(b"x").unwrap();
        next_two();
        set_stamping(&a, Stamping::empty()).unwrap();
        a.send(b"x").unwrap();
        set_stamping(&a, HARDWARE).unwrap();
        a.send(b"x").unwrap();
        let ids = next_two().map(|event| match event {
            ErrorEvent::Sent { id, .. } => Some(id),
            _ => None,
        });
        assert_eq!(ids, [None, Some(0)]);
        assert_eq!(receive_error(&a).unwrap(), None);
        drop(b);
    }

    #[test]
    fn a_closed_port_is_reported() {
        let (a, b) = pair();
        set_details(&a, false, true).unwrap();
        drop(b);
        a.send(b"x").unwrap();
        let event = soon(|| receive_error(&a).unwrap());
        let from = Some("127.0.0.1".parse().unwrap());
        let errno = libc::ECONNREFUSED;
        assert_eq!(event, ErrorEvent::Unreachable { errno, from });
    }

    #[test]
    fn a_long_packet_is_truncated_not_overrun() {
        let (a, b) = pair();
        a.send(&[7; 100]).unwrap();
        let mut buffer = [0; 16];
        let got = soon(|| receive(&b, &mut buffer).ok());
        assert_eq!((got.len, got.truncated), (16, true));
    }
}
