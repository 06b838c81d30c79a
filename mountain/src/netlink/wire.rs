// SPDX-License-Identifier: GPL-2.0-or-later
//! Netlink framing: requests, dumps and attributes over one socket.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsFd;

use netlink_packet_core::{
    NetlinkBuffer, NlasIterator, NLA_HEADER_SIZE, NLMSG_DONE, NLMSG_ERROR, NLM_F_ACK, NLM_F_CREATE,
    NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST,
};
use netlink_sys::{protocols::NETLINK_ROUTE, SocketAddr};

/// Length of `struct nlmsghdr`.
const HEADER_LEN: usize = 16;
/// linux/netfilter/nfnetlink.h.
const NFNL_MSG_BATCH_BEGIN: u16 = 0x10;
const NFNL_MSG_BATCH_END: u16 = 0x11;
/// The kernel makes a dump's parts as large as the reader's buffer allows (32 KiB, except for single
/// large objects), and begins a large set of nftables anew for each part.
const DUMP_BUFFER: usize = 1 << 20;

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

    /// Dumps all objects of one kind; `each` gets the message type and its payload. False: the
    /// objects changed meanwhile, so that the dump may lack some.
    pub(crate) fn dump(
        &mut self,
        kind: u16,
        header: &[u8],
        mut each: impl FnMut(u16, &[u8]),
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
                    NLMSG_DONE => {
                        // The kernel reports a dump that failed half way in the end message.
                        return errno(message.payload()).map(|()| consistent);
                    }
                    NLMSG_ERROR => return errno(message.payload()).map(|()| consistent),
                    kind => each(kind, message.payload()),
                }
            }
        }
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
        nix::sys::socket::setsockopt(
            &self.socket.as_fd(),
            nix::sys::socket::sockopt::SndBufForce,
            &room,
        )?;
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
    match payload.first_chunk() {
        Some(code) => match i32::from_ne_bytes(*code) {
            0 => Ok(()),
            code => Err(io::Error::from_raw_os_error(code.saturating_neg())),
        },
        None => Ok(()),
    }
}

/// Appends an attribute, padded to four bytes.
pub(crate) fn push_attribute(message: &mut Vec<u8>, kind: u16, value: &[u8]) {
    message.extend_from_slice(&(4 + value.len() as u16).to_ne_bytes());
    message.extend_from_slice(&kind.to_ne_bytes());
    message.extend_from_slice(value);
    message.resize(message.len().next_multiple_of(4), 0);
}

/// The attributes of a message, found by their kind.
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

    pub(crate) fn u32(&self, kind: u16) -> Option<u32> {
        self.get(kind)?
            .first_chunk()
            .map(|b| u32::from_ne_bytes(*b))
    }

    pub(crate) fn u8(&self, kind: u16) -> Option<u8> {
        self.get(kind)?.first().copied()
    }

    /// Two integers of host byte order: a port range.
    pub(crate) fn u16_pair(&self, kind: u16) -> Option<(u16, u16)> {
        let value: &[u8; 4] = self.get(kind)?.first_chunk()?;
        let [a, b, c, d] = *value;
        Some((u16::from_ne_bytes([a, b]), u16::from_ne_bytes([c, d])))
    }

    /// Two integers of host byte order: a user id range.
    pub(crate) fn u32_pair(&self, kind: u16) -> Option<(u32, u32)> {
        let value = self.get(kind)?;
        let first = value.first_chunk()?;
        let last = value.get(4..)?.first_chunk()?;
        Some((u32::from_ne_bytes(*first), u32::from_ne_bytes(*last)))
    }

    pub(crate) fn ip(&self, kind: u16) -> Option<IpAddr> {
        ip(self.get(kind)?)
    }

    /// A string with or without its final NUL.
    pub(crate) fn string(&self, kind: u16) -> Option<String> {
        let value = self.get(kind)?;
        let end = value.iter().position(|b| *b == 0).unwrap_or(value.len());
        Some(String::from_utf8_lossy(&value[..end]).into_owned())
    }
}

/// An address of 4 or 16 bytes.
pub(crate) fn ip(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => Some(Ipv4Addr::from(*bytes.first_chunk::<4>()?).into()),
        16 => Some(Ipv6Addr::from(*bytes.first_chunk::<16>()?).into()),
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
