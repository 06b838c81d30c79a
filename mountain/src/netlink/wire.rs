// SPDX-License-Identifier: GPL-2.0-or-later
//! Netlink framing: requests, dumps and attributes over one socket.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsFd;

use netlink_packet_core::{
    NetlinkBuffer, NlasIterator, NLA_F_NESTED, NLA_HEADER_SIZE, NLMSG_DONE, NLMSG_ERROR, NLM_F_ACK,
    NLM_F_CREATE, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST,
};
use netlink_sys::{protocols::NETLINK_ROUTE, SocketAddr};
use nix::errno::Errno;
use nix::sys::socket::{setsockopt, sockopt};

pub(crate) const AF_INET: u8 = libc::AF_INET as u8;
pub(crate) const AF_INET6: u8 = libc::AF_INET6 as u8;

/// Number of an address family in messages.
pub(crate) fn family(ipv6: bool) -> u8 {
    match ipv6 {
        true => AF_INET6,
        false => AF_INET,
    }
}

/// Length of `struct nfgenmsg`, the header of Netfilter's messages.
pub(crate) const NFNL_HEADER_LEN: usize = 4;

/// Length of `struct nlmsghdr`.
const HEADER_LEN: usize = 16;
/// linux/netfilter/nfnetlink.h.
const NFNL_MSG_BATCH_BEGIN: u16 = 0x10;
const NFNL_MSG_BATCH_END: u16 = 0x11;
/// The kernel makes a dump's parts as large as the reader's buffer allows (32 KiB, except for single
/// large objects), and begins a large set of nftables anew for each part.
const DUMP_BUFFER: usize = 1 << 20;
/// Room for several thousand events between two reads.
pub(crate) const EVENT_BUFFER: u32 = 1 << 20;

/// A blocking netlink socket, of rtnetlink unless said otherwise, in the namespace of the thread that opened it.
pub(crate) struct Socket {
    socket: netlink_sys::Socket,
    sequence: u32,
}

impl Socket {
    pub(crate) fn open() -> io::Result<Self> {
        Self::open_for(NETLINK_ROUTE)
    }

    /// One of another netlink protocol.
    pub(crate) fn open_for(protocol: isize) -> io::Result<Self> {
        let mut socket = netlink_sys::Socket::new(protocol)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        // Without it, IPv4 route dumps contain cached exceptions and header fields are ignored.
        socket.set_netlink_get_strict_chk(true)?;
        Ok(Self {
            socket,
            sequence: 0,
        })
    }

    /// Dumps all objects of one kind; `each` gets their messages. False: the objects changed meanwhile,
    /// so that the dump may lack some.
    pub(crate) fn dump(
        &mut self,
        kind: u16,
        header: &[u8],
        mut each: impl FnMut(&[u8]),
    ) -> io::Result<bool> {
        self.dump_while(kind, header, |payload| {
            each(payload);
            true
        })
    }

    /// The same until `each` wants no more. The kernel takes no other dump by this socket then.
    fn dump_while(
        &mut self,
        kind: u16,
        header: &[u8],
        mut each: impl FnMut(&[u8]) -> bool,
    ) -> io::Result<bool> {
        self.send(kind, NLM_F_REQUEST | NLM_F_DUMP, header)?;
        let mut consistent = true;
        let mut datagram = Vec::with_capacity(DUMP_BUFFER);
        loop {
            datagram.clear();
            self.socket.recv(&mut datagram, 0)?;
            for message in messages(&datagram) {
                if message.sequence_number() != self.sequence {
                    continue;
                }
                consistent &= message.flags() & NLM_F_DUMP_INTR == 0;
                match message.message_type() {
                    // The kernel reports a dump that failed half way in the end message.
                    NLMSG_DONE | NLMSG_ERROR => {
                        return errno(message.payload()).map(|()| consistent)
                    }
                    _ if !each(message.payload()) => return Ok(consistent),
                    _ => {}
                }
            }
        }
    }

    /// Dumps the objects of IPv4 and then those of IPv6 by a header whose first byte is the family. A
    /// kernel without a family (or without policy rules) refuses that: nothing is there to read.
    pub(crate) fn dump_families(
        &mut self,
        kind: u16,
        mut header: [u8; 12],
        mut each: impl FnMut(&[u8]),
    ) -> io::Result<bool> {
        const ABSENT: [i32; 3] = [libc::EOPNOTSUPP, libc::EAFNOSUPPORT, libc::ENOENT];
        let mut consistent = true;
        for family in [AF_INET, AF_INET6] {
            header[0] = family;
            let dumped = self.dump(kind, &header, &mut each);
            consistent &= unless(dumped, &ABSENT)?.unwrap_or_else(|| {
                tracing::debug!(family, "the kernel has no such routing state");
                true
            });
        }
        Ok(consistent)
    }

    /// Sends one request and returns the payload of the object in the answer, if there is one.
    pub(crate) fn request(
        &mut self,
        kind: u16,
        flags: u16,
        body: &[u8],
    ) -> io::Result<Option<Vec<u8>>> {
        self.send(kind, NLM_F_REQUEST | NLM_F_ACK | flags, body)?;
        let mut answer = None;
        loop {
            let (datagram, _) = self.socket.recv_from_full()?;
            for message in messages(&datagram) {
                if message.sequence_number() != self.sequence {
                    continue;
                }
                if message.message_type() == NLMSG_ERROR {
                    return errno(message.payload()).map(|()| answer);
                }
                answer = Some(message.payload().to_vec());
            }
        }
    }

    /// Has one part of nfnetlink carry out all of these messages, or none.
    pub(crate) fn transaction(
        &mut self,
        subsystem: u16,
        messages: &[(u16, Vec<u8>)],
    ) -> io::Result<()> {
        let [high, low] = subsystem.to_be_bytes();
        let edge = [0, 0, high, low];
        let mut batch = Vec::new();
        self.push(&mut batch, NFNL_MSG_BATCH_BEGIN, NLM_F_REQUEST, &edge);
        let flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE;
        for (kind, body) in messages {
            self.push(&mut batch, *kind, flags, body);
        }
        self.push(&mut batch, NFNL_MSG_BATCH_END, NLM_F_REQUEST, &edge);
        let room = batch.len().next_multiple_of(4096) * 2;
        match setsockopt(&self.socket.as_fd(), sockopt::SndBufForce, &room) {
            // Root of a user namespace, as in a container, gets as much as net.core.wmem_max allows.
            Err(Errno::EPERM) => setsockopt(&self.socket.as_fd(), sockopt::SndBuf, &room)?,
            done => done?,
        }
        self.socket.send(&batch, 0)?;
        let mut answered = 0;
        while answered < messages.len() {
            let (datagram, _) = self.socket.recv_from_full()?;
            for message in self::messages(&datagram) {
                if message.message_type() == NLMSG_ERROR {
                    errno(message.payload())?;
                    answered += 1;
                }
            }
        }
        Ok(())
    }

    fn push(&mut self, batch: &mut Vec<u8>, kind: u16, flags: u16, body: &[u8]) {
        self.sequence += 1;
        let mut message = ((HEADER_LEN + body.len()) as u32).to_ne_bytes().to_vec();
        message.extend(kind.to_ne_bytes());
        message.extend(flags.to_ne_bytes());
        message.extend(self.sequence.to_ne_bytes());
        message.extend(0u32.to_ne_bytes());
        message.extend(body);
        message.resize(message.len().next_multiple_of(4), 0);
        batch.extend(message);
    }

    fn send(&mut self, kind: u16, flags: u16, body: &[u8]) -> io::Result<()> {
        let mut message = Vec::with_capacity(HEADER_LEN + body.len());
        self.push(&mut message, kind, flags, body);
        self.socket.send(&message, 0).map(|_| ())
    }
}

/// Dumps by a socket of its own, see [`Socket::dump`].
pub(crate) fn dump(
    protocol: isize,
    kind: u16,
    header: &[u8],
    each: impl FnMut(&[u8]),
) -> io::Result<bool> {
    Socket::open_for(protocol)?.dump(kind, header, each)
}

/// The same until `each` wants no more.
pub(crate) fn dump_while(
    protocol: isize,
    kind: u16,
    header: &[u8],
    each: impl FnMut(&[u8]) -> bool,
) -> io::Result<bool> {
    Socket::open_for(protocol)?.dump_while(kind, header, each)
}

/// Asks by a socket of its own, see [`Socket::request`].
pub(crate) fn request(
    protocol: isize,
    kind: u16,
    flags: u16,
    body: &[u8],
) -> io::Result<Option<Vec<u8>>> {
    Socket::open_for(protocol)?.request(kind, flags, body)
}

/// A socket that hears of the events of multicast groups. Where the kernel allows no large buffer, losses
/// are noticed.
pub(crate) fn subscribe(protocol: isize, groups: &[u32]) -> io::Result<netlink_sys::Socket> {
    let mut socket = netlink_sys::Socket::new(protocol)?;
    let _ = socket.set_rx_buf_sz(EVENT_BUFFER);
    socket.bind(&SocketAddr::new(0, group_mask(groups)))?;
    Ok(socket)
}

/// Multicast groups, which the kernel numbers from 1, as bits.
pub(crate) fn group_mask(groups: &[u32]) -> u32 {
    groups.iter().fold(0, |mask, group| mask | 1 << (group - 1))
}

/// `None` where the kernel's answer is one of these errors: what was asked for is not there.
pub(crate) fn unless<T>(done: io::Result<T>, absent: &[i32]) -> io::Result<Option<T>> {
    match done {
        Err(e) if e.raw_os_error().is_some_and(|code| absent.contains(&code)) => Ok(None),
        done => done.map(Some),
    }
}

/// The type of a message to a part of Netfilter.
pub(crate) const fn netfilter(subsystem: u16, message: u16) -> u16 {
    subsystem << 8 | message
}

/// The messages of one datagram; stops at the first malformed one.
pub(crate) fn messages(datagram: &[u8]) -> impl Iterator<Item = NetlinkBuffer<&[u8]>> {
    let mut rest = datagram;
    std::iter::from_fn(move || {
        let message = NetlinkBuffer::new_checked(rest).ok()?;
        let aligned = (message.length() as usize).next_multiple_of(4);
        rest = rest.get(aligned..).unwrap_or(&[]);
        Some(message)
    })
}

/// The negative errno that opens an error or end message; 0 and an absent one are success.
fn errno(payload: &[u8]) -> io::Result<()> {
    match bytes_at(payload, 0).map_or(0, i32::from_ne_bytes) {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code.saturating_neg())),
    }
}

/// Appends an attribute, padded to four bytes.
pub(crate) fn push_attribute(message: &mut Vec<u8>, kind: u16, value: &[u8]) {
    message.extend_from_slice(&(4 + value.len() as u16).to_ne_bytes());
    message.extend_from_slice(&kind.to_ne_bytes());
    message.extend_from_slice(value);
    message.resize(message.len().next_multiple_of(4), 0);
}

/// An attribute, padded to four bytes.
pub(crate) fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    push_attribute(&mut out, kind, value);
    out
}

/// An attribute that holds others.
pub(crate) fn nest(kind: u16, inside: &[Vec<u8>]) -> Vec<u8> {
    attribute(kind | NLA_F_NESTED, &inside.concat())
}

/// A string with its final NUL.
pub(crate) fn c_string(text: &str) -> Vec<u8> {
    [text.as_bytes(), b"\0"].concat()
}

/// The text before the first NUL.
pub(crate) fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// Bytes from a place on.
pub(crate) fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

/// An integer of host byte order.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes_at(bytes, at).map(u32::from_ne_bytes)
}

/// An integer of host byte order.
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes_at(bytes, at).map(u16::from_ne_bytes)
}

/// The attributes of a message, found by their kind.
#[derive(Default)]
pub(crate) struct Attributes<'a>(Vec<(u16, &'a [u8])>);

impl<'a> Attributes<'a> {
    /// The attributes that follow a header of `skip` bytes.
    pub(crate) fn after(payload: &'a [u8], skip: usize) -> Self {
        let bytes = payload.get(skip..).unwrap_or(&[]);
        Self(
            NlasIterator::new(bytes)
                .map_while(Result::ok)
                .map(|attribute| {
                    let (kind, length) = (attribute.kind(), usize::from(attribute.length()));
                    (kind, &attribute.into_inner()[NLA_HEADER_SIZE..length])
                })
                .collect(),
        )
    }

    pub(crate) fn get(&self, kind: u16) -> Option<&'a [u8]> {
        self.0
            .iter()
            .find(|(found, _)| *found == kind)
            .map(|(_, value)| *value)
    }

    /// The attributes inside another one.
    pub(crate) fn nested(&self, kind: u16) -> Option<Self> {
        self.get(kind).map(|value| Self::after(value, 0))
    }

    /// Likewise; none where it is not there.
    pub(crate) fn inside(&self, kind: u16) -> Self {
        self.nested(kind).unwrap_or_default()
    }

    /// The values of all, whatever their kind.
    pub(crate) fn values(&self) -> impl Iterator<Item = &'a [u8]> + use<'_, 'a> {
        self.0.iter().map(|(_, value)| *value)
    }

    /// All, in their order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u16, &'a [u8])> + use<'_, 'a> {
        self.0.iter().copied()
    }

    pub(crate) fn has(&self, kind: u16) -> bool {
        self.get(kind).is_some()
    }

    /// The highest kind there is: beyond the known ones, something is not understood.
    pub(crate) fn highest(&self) -> u16 {
        self.0.iter().map(|(kind, _)| *kind).max().unwrap_or(0)
    }

    fn bytes<const N: usize>(&self, kind: u16) -> Option<[u8; N]> {
        bytes_at(self.get(kind)?, 0)
    }

    pub(crate) fn u32(&self, kind: u16) -> Option<u32> {
        self.bytes(kind).map(u32::from_ne_bytes)
    }

    pub(crate) fn u16(&self, kind: u16) -> Option<u16> {
        self.bytes(kind).map(u16::from_ne_bytes)
    }

    pub(crate) fn u64(&self, kind: u16) -> Option<u64> {
        self.bytes(kind).map(u64::from_ne_bytes)
    }

    /// Those of network byte order.
    pub(crate) fn be16(&self, kind: u16) -> Option<u16> {
        self.bytes(kind).map(u16::from_be_bytes)
    }

    pub(crate) fn be32(&self, kind: u16) -> Option<u32> {
        self.bytes(kind).map(u32::from_be_bytes)
    }

    pub(crate) fn be64(&self, kind: u16) -> Option<u64> {
        self.bytes(kind).map(u64::from_be_bytes)
    }

    pub(crate) fn u8(&self, kind: u16) -> Option<u8> {
        self.get(kind)?.first().copied()
    }

    /// Two integers of host byte order: a port range.
    pub(crate) fn u16_pair(&self, kind: u16) -> Option<(u16, u16)> {
        let value = self.get(kind)?;
        Some((u16_at(value, 0)?, u16_at(value, 2)?))
    }

    /// Two integers of host byte order: a user id range.
    pub(crate) fn u32_pair(&self, kind: u16) -> Option<(u32, u32)> {
        let value = self.get(kind)?;
        Some((u32_at(value, 0)?, u32_at(value, 4)?))
    }

    pub(crate) fn ip(&self, kind: u16) -> Option<IpAddr> {
        ip(self.get(kind)?)
    }

    /// A string with or without its final NUL.
    pub(crate) fn string(&self, kind: u16) -> Option<String> {
        self.get(kind).map(text)
    }
}

/// An address of 4 or 16 bytes.
pub(crate) fn ip(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => bytes_at::<4>(bytes, 0).map(|v4| Ipv4Addr::from(v4).into()),
        16 => bytes_at::<16>(bytes, 0).map(|v6| Ipv6Addr::from(v6).into()),
        _ => None,
    }
}

/// The bytes of an address as netlink carries them.
pub(crate) fn ip_bytes(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_found_and_malformed_ones_end_the_list() {
        let mut message = vec![9; 8];
        push_attribute(&mut message, 3, b"eth0\0");
        push_attribute(&mut message, 5, &7u32.to_ne_bytes());
        message.extend_from_slice(&[200, 0, 6, 0]); // claims 200 bytes, has none
        let attributes = Attributes::after(&message, 8);
        assert_eq!(attributes.string(3).as_deref(), Some("eth0"));
        assert_eq!(attributes.u32(5), Some(7));
        assert!(!attributes.has(6));
        assert_eq!(attributes.ip(3), None, "five bytes are no address");
    }

    #[test]
    fn truncated_datagrams_end_without_panic() {
        let mut message = 20u32.to_ne_bytes().to_vec();
        message.extend_from_slice(&[0; 16]);
        assert_eq!(messages(&message).count(), 1);
        for length in 0..message.len() {
            assert_eq!(messages(&message[..length]).count(), 0, "{length} bytes");
        }
    }

    #[test]
    fn errors_of_the_kernel_are_errors() {
        assert!(errno(&0i32.to_ne_bytes()).is_ok());
        let error = errno(&(-libc::ENODEV).to_ne_bytes()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENODEV));
    }
}
