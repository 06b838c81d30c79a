// SPDX-License-Identifier: GPL-2.0-or-later
//! Packets with the checksums they should have, computed over all of them.

#![allow(dead_code)] // Each test binary uses its own part.

use std::net::{IpAddr, SocketAddr};

use super::bpf::packets::{Ip, ICMP, ICMPV6, SYN, TCP, UDP};

/// One's complement sum of big-endian words; an odd byte counts as the high half of one.
pub fn sum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|w| match *w {
        [a, b] => u64::from(u16::from_be_bytes([a, b])),
        [a] => u64::from(a) << 8,
        _ => 0,
    });
    let mut sum: u64 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// Where the checksum stands in a transport header.
pub fn check_at(proto: u8) -> usize {
    match proto {
        TCP => 16,
        ICMP | ICMPV6 => 2,
        _ => 6,
    }
}

fn pseudo(src: IpAddr, dst: IpAddr, proto: u8, len: usize) -> Vec<u8> {
    let mut p = vec![];
    for address in [src, dst] {
        match address {
            IpAddr::V4(a) => p.extend(a.octets()),
            IpAddr::V6(a) => p.extend(a.octets()),
        }
    }
    p.extend((len as u32).to_be_bytes());
    p.extend([0, 0, 0, proto]);
    p
}

/// The transport checksum of `l4`, whose own field does not count (RFC 768, RFC 9293).
pub fn l4_check(src: IpAddr, dst: IpAddr, proto: u8, l4: &[u8]) -> u16 {
    // ICMP for IPv4 sums only itself (RFC 792).
    let mut all = match proto {
        ICMP => vec![],
        _ => pseudo(src, dst, proto, l4.len()),
    };
    let head = all.len();
    all.extend(l4);
    all[head + check_at(proto)..][..2].fill(0);
    match !sum(&all) {
        0 if proto == UDP => 0xffff,
        check => check,
    }
}

/// A packet whose transport header is `l4` with ports and checksum put in.
#[derive(Clone, Debug)]
pub struct Packet {
    pub ip: Ip,
    pub ttl: u8,
    /// Ethernet destination and source.
    pub macs: [[u8; 6]; 2],
    /// UDP without a checksum.
    pub unchecked: bool,
}

impl Packet {
    pub fn new(proto: u8, src: SocketAddr, dst: SocketAddr, payload: usize) -> Self {
        let l4 = if proto == TCP {
            // SYN: other segments begin no flow.
            super::bpf::packets::tcp(src.port(), dst.port(), SYN, payload)
        } else {
            super::bpf::packets::udp(src.port(), dst.port(), payload)
        };
        let mut ip = Ip::new(src.is_ipv6(), proto, l4);
        ip.src = src.ip();
        ip.dst = dst.ip();
        Self {
            ip,
            ttl: 64,
            macs: [super::rig::C0, super::rig::CLIENT],
            unchecked: false,
        }
    }

    /// What it becomes: other addresses and ports, everything else as it is.
    pub fn rewritten(&self, src: SocketAddr, dst: SocketAddr) -> Self {
        let mut new = self.clone();
        new.ip.src = src.ip();
        new.ip.dst = dst.ip();
        if self.has_ports() {
            new.ip.l4[..2].copy_from_slice(&src.port().to_be_bytes());
            new.ip.l4[2..4].copy_from_slice(&dst.port().to_be_bytes());
        }
        new
    }

    /// Later fragments have none.
    fn has_ports(&self) -> bool {
        let later4 = self.ip.frag & 0x1fff != 0;
        let later6 =
            |(kind, body): &(u8, Vec<u8>)| *kind == 44 && (body[0] != 0 || body[1] & 0xf8 != 0);
        !later4 && !self.ip.ext.iter().any(later6)
    }

    pub fn ttl(mut self, ttl: u8) -> Self {
        self.ttl = ttl;
        self
    }

    pub fn macs(mut self, to: [u8; 6], from: [u8; 6]) -> Self {
        self.macs = [to, from];
        self
    }

    /// With all checksums.
    pub fn bytes(&self) -> Vec<u8> {
        let mut ip = self.ip.clone();
        // A fragment's checksum is over all of the datagram: the test says what it is.
        let fragment = ip.frag & 0x3fff != 0 || ip.ext.iter().any(|e| e.0 == 44);
        if !self.unchecked && !fragment {
            let check = l4_check(ip.src, ip.dst, ip.proto, &ip.l4);
            ip.l4[check_at(ip.proto)..][..2].copy_from_slice(&check.to_be_bytes());
        }
        let mut l3 = ip.l3();
        if ip.src.is_ipv6() {
            l3[7] = self.ttl;
        } else {
            l3[8] = self.ttl;
            let ihl = usize::from(l3[0] & 15) * 4;
            let check = !sum(&l3[..ihl]);
            l3[10..12].copy_from_slice(&check.to_be_bytes());
        }
        let mut frame = self.macs.concat();
        frame.extend(if ip.src.is_ipv6() {
            [0x86, 0xdd]
        } else {
            [8, 0]
        });
        frame.extend(l3);
        frame
    }
}
