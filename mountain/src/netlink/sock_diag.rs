// SPDX-License-Identifier: GPL-2.0-or-later
//! Sockets by `NETLINK_SOCK_DIAG` (sock_diag(7)): TCP's connections; those that wait for answers in vain, and their
//! end; UDP's without a connection.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use netlink_sys::protocols::NETLINK_SOCK_DIAG;

use super::wire::{bytes_at, u32_at, unless, Socket};

/// linux/sock_diag.h.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;
/// Offset and length of `struct inet_diag_sockid` in `struct inet_diag_msg` (linux/inet_diag.h), and of the
/// addresses in it.
const ID: usize = 4;
const ID_LEN: usize = 48;
const SOURCE: usize = ID + 4;
const DESTINATION: usize = SOURCE + 16;
/// enum of include/net/tcp_states.h, as bits: what a program may wait for. What is being closed mostly has
/// none any more.
const CONNECTED: u32 = 1 << TCP_ESTABLISHED
    | 1 << TCP_CLOSE_WAIT
    | 1 << TCP_FIN_WAIT1
    | 1 << TCP_FIN_WAIT2
    | 1 << TCP_LAST_ACK
    | 1 << TCP_CLOSING;
const WAITING: u32 = 1 << TCP_ESTABLISHED | 1 << TCP_SYN_SENT | 1 << TCP_CLOSE_WAIT;
const TCP_ESTABLISHED: u32 = 1;
const TCP_SYN_SENT: u32 = 2;
const TCP_FIN_WAIT1: u32 = 4;
const TCP_FIN_WAIT2: u32 = 5;
const TCP_CLOSE_WAIT: u32 = 8;
const TCP_LAST_ACK: u32 = 9;
const TCP_CLOSING: u32 = 11;
/// Of a UDP socket that is not connected.
const TCP_CLOSE: u32 = 7;
/// Offset of the cookie in `struct inet_diag_sockid`.
const COOKIE: usize = ID + 40;
/// One may be a packet that got lost, also on a path that works.
const RETRANSMITS: u8 = 2;

/// Ends the TCP connections of the calling thread's network namespace that are from one of these
/// addresses, to a destination that is `meant`, and have repeated what they sent (data, a window probe or a
/// keepalive) twice without an answer: the program gets ECONNABORTED, the other end an RST. Returns how many,
/// and what the kernel said of the first one that it did not end.
///
/// # Errors
/// When the kernel does not list its sockets (CONFIG_INET_TCP_DIAG).
pub fn reset_unanswered(
    sources: &BTreeSet<IpAddr>,
    meant: impl Fn(IpAddr) -> bool,
) -> io::Result<(usize, Option<io::Error>)> {
    let mut socket = Socket::open_for(NETLINK_SOCK_DIAG)?;
    let (mut count, mut refused) = (0, None);
    // Sockets of IPv6 also hold connections of IPv4.
    for family in [libc::AF_INET, libc::AF_INET6] {
        let mut found = Vec::new();
        let all = request(family, libc::IPPROTO_TCP, WAITING, [0; ID_LEN]);
        socket.dump(SOCK_DIAG_BY_FAMILY, &all, |message| {
            found.extend(unanswered(message, sources, &meant));
        })?;
        for id in found {
            let this = request(family, libc::IPPROTO_TCP, WAITING, id);
            match unless(socket.request(SOCK_DESTROY, 0, &this), &[libc::ENOENT]) {
                // It may have ended meanwhile.
                Ok(ended) => count += usize::from(ended.is_some()),
                Err(e) => refused = refused.or(Some(e)),
            }
        }
    }
    Ok((count, refused))
}

/// A connection of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// This host's end.
    pub local: SocketAddr,
    /// The other one.
    pub remote: SocketAddr,
    /// One of the two has closed it. Never of UDP's.
    pub closing: bool,
}

/// The TCP connections of the calling thread's network namespace whose handshake is over.
///
/// # Errors
/// When the kernel does not list its sockets (CONFIG_INET_TCP_DIAG).
pub fn tcp_connections() -> io::Result<Vec<Connection>> {
    listed(libc::IPPROTO_TCP, CONNECTED)
}

/// These, and the UDP sockets that are connected.
///
/// # Errors
/// When the kernel does not list its sockets (CONFIG_INET_TCP_DIAG, CONFIG_INET_UDP_DIAG).
pub(crate) fn connections() -> io::Result<Vec<Connection>> {
    let mut all = tcp_connections()?;
    all.extend(listed(libc::IPPROTO_UDP, 1 << TCP_ESTABLISHED)?);
    Ok(all)
}

fn listed(proto: libc::c_int, states: u32) -> io::Result<Vec<Connection>> {
    let mut socket = Socket::open_for(NETLINK_SOCK_DIAG)?;
    let mut found = Vec::new();
    for family in [libc::AF_INET, libc::AF_INET6] {
        let all = request(family, proto, states, [0; ID_LEN]);
        socket.dump(SOCK_DIAG_BY_FAMILY, &all, |message| {
            let end = |address_at, port_at| {
                let port = u16::from_be_bytes(bytes_at::<2>(message, port_at)?);
                Some(SocketAddr::new(address(message, address_at)?, port))
            };
            let ends = end(SOURCE, ID).zip(end(DESTINATION, ID + 2));
            found.extend(ends.map(|(local, remote)| Connection {
                local,
                remote,
                closing: message.get(1) != Some(&(TCP_ESTABLISHED as u8)),
            }));
        })?;
    }
    Ok(found)
}

/// Cookies of the UDP sockets of the calling thread's network namespace that are not connected.
///
/// # Errors
/// When the kernel does not list its sockets (CONFIG_INET_UDP_DIAG).
pub fn unconnected() -> io::Result<Vec<u64>> {
    let mut socket = Socket::open_for(NETLINK_SOCK_DIAG)?;
    let mut cookies = Vec::new();
    for family in [libc::AF_INET, libc::AF_INET6] {
        let all = request(family, libc::IPPROTO_UDP, 1 << TCP_CLOSE, [0; ID_LEN]);
        socket.dump(SOCK_DIAG_BY_FAMILY, &all, |message| {
            let word = |at| u32_at(message, at).map(u64::from);
            let halves = word(COOKIE).zip(word(COOKIE + 4));
            cookies.extend(halves.map(|(low, high)| high << 32 | low));
        })?;
    }
    Ok(cookies)
}

/// `struct inet_diag_req_v2`.
fn request(family: libc::c_int, proto: libc::c_int, states: u32, id: [u8; ID_LEN]) -> Vec<u8> {
    let mut body = vec![family as u8, proto as u8, 0, 0];
    body.extend(states.to_ne_bytes());
    body.extend(id);
    body
}

/// The id of the socket that a `struct inet_diag_msg` tells of, if that is one to be reset.
fn unanswered(
    message: &[u8],
    sources: &BTreeSet<IpAddr>,
    meant: impl Fn(IpAddr) -> bool,
) -> Option<[u8; ID_LEN]> {
    let &retransmits = message.get(3)?;
    let (source, destination) = (address(message, SOURCE)?, address(message, DESTINATION)?);
    let id = bytes_at(message, ID)?;
    let is_stuck = retransmits >= RETRANSMITS && sources.contains(&source) && meant(destination);
    is_stuck.then_some(id)
}

/// An address of a `struct inet_diag_msg`.
fn address(message: &[u8], offset: usize) -> Option<IpAddr> {
    Some(match i32::from(*message.first()?) {
        libc::AF_INET => Ipv4Addr::from(bytes_at::<4>(message, offset)?).into(),
        _ => Ipv6Addr::from(bytes_at::<16>(message, offset)?).to_canonical(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(family: libc::c_int, retransmits: u8, source: &[u8]) -> Vec<u8> {
        let mut message = vec![family as u8, 1, 1, retransmits, 0x1f, 0x90, 0, 80];
        message.extend(source);
        message.resize(DESTINATION, 0);
        message.extend([192, 0, 2, 1]);
        message.resize(72, 0);
        message
    }

    #[test]
    fn only_what_repeats_itself_from_these_addresses() {
        let sources: BTreeSet<IpAddr> = ["10.0.0.2", "fd00::2"]
            .iter()
            .map(|text| text.parse().unwrap())
            .collect();
        let v4: Ipv4Addr = "10.0.0.2".parse().unwrap();
        let v6: Ipv6Addr = "fd00::2".parse().unwrap();
        let found = |m: &[u8]| unanswered(m, &sources, |_| true);
        let stuck = message(libc::AF_INET, 2, &v4.octets());
        assert_eq!(found(&stuck).unwrap()[..], stuck[4..52]);
        let far: IpAddr = "192.0.2.1".parse().unwrap();
        assert_eq!(unanswered(&stuck, &sources, |to| to != far), None);
        assert_eq!(found(&message(libc::AF_INET, 1, &v4.octets())), None);
        assert_eq!(found(&message(libc::AF_INET, 2, &[10, 0, 0, 3])), None);
        assert!(found(&message(libc::AF_INET6, 2, &v6.octets())).is_some());
        let mapped = v4.to_ipv6_mapped().octets();
        assert!(found(&message(libc::AF_INET6, 2, &mapped)).is_some());
        assert_eq!(found(&stuck[..40]), None, "cut off");
    }
}
