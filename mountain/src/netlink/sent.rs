// SPDX-License-Identifier: GPL-2.0-or-later
//! How many packets a device has sent (linux/if_link.h, `struct if_stats_msg`).

use std::io;

use super::wire::{bytes_at, Attributes, Socket};

/// linux/rtnetlink.h, and linux/if_link.h, where the filter's bit of an attribute is one below its number.
const RTM_GETSTATS: u16 = 94;
const IFLA_STATS_LINK_64: u16 = 1;
const ONLY_LINK_64: u32 = 1 << (IFLA_STATS_LINK_64 - 1);
/// Length of `struct if_stats_msg`: family, padding (3), index (4), filter (4).
const HEADER_LEN: usize = 12;
/// Place of `tx_packets` in `struct rtnl_link_stats64`: behind `rx_packets`.
const TX_PACKETS: usize = 8;

/// Asks devices of one network namespace for it, by a socket that stays open.
pub(crate) struct SentPackets(Socket);

impl SentPackets {
    /// In the calling thread's network namespace.
    ///
    /// # Errors
    /// When there is no netlink socket to be had.
    pub(crate) fn open() -> io::Result<Self> {
        Socket::open().map(Self)
    }

    /// Packets that a device has sent since it was made, as far as its driver counts them.
    ///
    /// # Errors
    /// ENODEV when there is none.
    pub(crate) fn of(&mut self, ifindex: u32) -> io::Result<u64> {
        let mut body = [0; HEADER_LEN];
        body[4..8].copy_from_slice(&ifindex.to_ne_bytes());
        body[8..].copy_from_slice(&ONLY_LINK_64.to_ne_bytes());
        let answer = self.0.request(RTM_GETSTATS, 0, &body)?;
        let sent = answer.as_deref().and_then(decode);
        sent.ok_or_else(|| io::Error::other("the kernel's answer has no counters"))
    }
}

fn decode(payload: &[u8]) -> Option<u64> {
    let counters = Attributes::after(payload, HEADER_LEN).get(IFLA_STATS_LINK_64)?;
    bytes_at(counters, TX_PACKETS).map(u64::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::super::wire::push_attribute;
    use super::*;

    #[test]
    fn what_loopback_sends_is_counted() {
        let mut sent = SentPackets::open().unwrap();
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = socket.local_addr().unwrap();
        let before = sent.of(1).unwrap();
        for _ in 0..5 {
            socket.send_to(b"x", to).unwrap();
        }
        assert!(sent.of(1).unwrap() >= before + 5);
        let none = sent.of(u32::MAX >> 1).unwrap_err();
        assert_eq!(none.raw_os_error(), Some(libc::ENODEV));
        sent.of(1).unwrap();
    }

    #[test]
    fn the_second_counter_is_that_of_sent_packets() {
        let mut message = vec![0; HEADER_LEN];
        let counters = [7u64, 8, 9].map(u64::to_ne_bytes).concat();
        push_attribute(&mut message, IFLA_STATS_LINK_64, &counters);
        assert_eq!(decode(&message), Some(8));
        assert_eq!(decode(&message[..HEADER_LEN]), None);
    }
}
