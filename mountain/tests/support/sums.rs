// SPDX-License-Identifier: GPL-2.0-or-later
//! Checksums as they should be, computed over all of a packet.

use std::net::IpAddr;

use etherparse::checksum::Sum16BitWords;

pub const ICMP: u8 = 1;
pub const TCP: u8 = 6;
pub const UDP: u8 = 17;
pub const ICMPV6: u8 = 58;

/// One's complement of the sum of big-endian words (RFC 1071).
pub fn checksum(bytes: &[u8]) -> u16 {
    let sum = Sum16BitWords::new().add_slice(bytes);
    sum.ones_complement().to_be()
}

/// Where the checksum stands in a transport header.
pub fn check_at(proto: u8) -> usize {
    match proto {
        TCP => 16,
        ICMP | ICMPV6 => 2,
        _ => 6,
    }
}

/// The transport checksum of `l4`, whose own field does not count (RFC 768, RFC 9293).
pub fn l4_check(src: IpAddr, dst: IpAddr, proto: u8, l4: &[u8]) -> u16 {
    let mut sum = Sum16BitWords::new();
    // ICMP for IPv4 sums only itself (RFC 792).
    if proto != ICMP {
        for address in [src, dst] {
            sum = match address {
                IpAddr::V4(a) => sum.add_4bytes(a.octets()),
                IpAddr::V6(a) => sum.add_16bytes(a.octets()),
            };
        }
        sum = sum.add_4bytes((l4.len() as u32).to_be_bytes());
        sum = sum.add_2bytes([0, proto]);
    }
    let (before, field) = l4.split_at(check_at(proto));
    let sum = sum.add_slice(before).add_slice(&field[2..]);
    match proto {
        UDP => sum.to_ones_complement_with_no_zero().to_be(),
        _ => sum.ones_complement().to_be(),
    }
}

/// Puts the checksum into `l4`.
pub fn put_check(src: IpAddr, dst: IpAddr, proto: u8, l4: &mut [u8]) {
    let check = l4_check(src, dst, proto, l4);
    l4[check_at(proto)..][..2].copy_from_slice(&check.to_be_bytes());
}
