// SPDX-License-Identifier: GPL-2.0-or-later
//! Packets in bytes. Checksums of transports are left 0: neither the program nor BPF_PROG_RUN looks at them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use etherparse::{EtherType, TcpHeader, UdpHeader};
use mountain::bpf::flows::FlowKey;

use crate::support::frames::{ethernet, framed};
pub use crate::support::ip::{Ip, FRAGMENT};
pub use crate::support::sums::{ICMP, ICMPV6, TCP, UDP};

/// Link-layer addresses of the gateways behind u0 and u1.
pub const MACS: [[u8; 6]; 2] = [[2, 0, 0, 0, 0, 0x10], [2, 0, 0, 0, 0, 0x11]];

/// Of the device that they leave by.
const HERE: [u8; 6] = [2, 0, 0, 0, 0, 1];

pub const IPIP: u8 = 4;
pub const DCCP: u8 = 33;
pub const GRE: u8 = 47;
pub const ESP: u8 = 50;
pub const SCTP: u8 = 132;
pub const UDPLITE: u8 = 136;

/// IPv6 extension headers.
pub const HOPOPTS: u8 = 0;
pub const ROUTING: u8 = 43;
pub const DSTOPTS: u8 = 60;

pub const SYN: u8 = 2;
pub const ACK: u8 = 16;

/// Client to server, both families.
pub const SRC4: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));
pub const DST4: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 1, 2, 3));
pub const SRC6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 2));
pub const DST6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 2, 3));

impl Ip {
    pub fn v4(proto: u8, l4: Vec<u8>) -> Self {
        Self::between(SRC4, DST4, proto, l4)
    }

    pub fn v6(proto: u8, l4: Vec<u8>) -> Self {
        Self::between(SRC6, DST6, proto, l4)
    }

    /// Of either family.
    pub fn new(v6: bool, proto: u8, l4: Vec<u8>) -> Self {
        if v6 {
            Self::v6(proto, l4)
        } else {
            Self::v4(proto, l4)
        }
    }

    pub fn to(self, dst: &str) -> Self {
        self.with(|ip| ip.dst = dst.parse().expect(dst))
    }

    pub fn from(self, src: &str) -> Self {
        self.with(|ip| ip.src = src.parse().expect(src))
    }

    /// The key of its flow between these ports.
    pub fn key(&self, sport: u16, dport: u16) -> FlowKey {
        FlowKey {
            source: SocketAddr::new(self.src, sport),
            destination: SocketAddr::new(self.dst, dport),
            proto: self.proto,
        }
    }

    /// A frame to the gateway behind u`dev`.
    pub fn on(&self, dev: usize) -> Vec<u8> {
        framed(MACS[dev], HERE, &self.l3())
    }
}

pub fn frame(dst: [u8; 6], ethertype: u16, payload: &[u8]) -> Vec<u8> {
    ethernet(dst, HERE, EtherType(ethertype), payload)
}

/// UDP header and `len` bytes.
pub fn udp(sport: u16, dport: u16, len: usize) -> Vec<u8> {
    let header = UdpHeader {
        source_port: sport,
        destination_port: dport,
        length: len as u16 + 8,
        checksum: 0,
    };
    let mut p = header.to_bytes().to_vec();
    p.resize(8 + len, 0xa5);
    p
}

/// TCP header with 12 bytes of options (as with timestamps) and `len` bytes.
pub fn tcp(sport: u16, dport: u16, flags: u8, len: usize) -> Vec<u8> {
    let mut header = TcpHeader::new(sport, dport, 1, 0xffff);
    let timestamps = [1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 1];
    header.set_options_raw(&timestamps).unwrap();
    header.acknowledgment_number = 1;
    let mut p = header.to_bytes().to_vec();
    p[13] = flags;
    p.resize(32 + len, 0x5a);
    p
}

/// ICMP (either family): type, then the identifier of an echo.
pub fn icmp(kind: u8, id: u16, rest: &[u8]) -> Vec<u8> {
    let mut p = vec![kind, 0, 0, 0];
    p.extend(id.to_be_bytes());
    p.extend([0, 1]);
    p.extend(rest);
    p
}
