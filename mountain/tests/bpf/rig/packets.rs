// SPDX-License-Identifier: GPL-2.0-or-later
//! Packets in bytes. Checksums are left 0: neither the program nor BPF_PROG_RUN looks at them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use etherparse::{TcpHeader, UdpHeader};
use mountain::bpf::flows::FlowKey;

pub use crate::support::sums::{ICMP, ICMPV6, TCP, UDP};

/// Link-layer addresses of the gateways behind u0 and u1.
pub const MACS: [[u8; 6]; 2] = [[2, 0, 0, 0, 0, 0x10], [2, 0, 0, 0, 0, 0x11]];

pub const IPIP: u8 = 4;
pub const DCCP: u8 = 33;
pub const GRE: u8 = 47;
pub const ESP: u8 = 50;
pub const SCTP: u8 = 132;
pub const UDPLITE: u8 = 136;

/// IPv6 extension headers.
pub const HOPOPTS: u8 = 0;
pub const ROUTING: u8 = 43;
pub const FRAGMENT: u8 = 44;
pub const DSTOPTS: u8 = 60;

pub const SYN: u8 = 2;
pub const ACK: u8 = 16;

/// A packet to build: `l4` follows the network header (and what stands before it).
#[derive(Clone, Debug)]
pub struct Ip {
    pub src: IpAddr,
    pub dst: IpAddr,
    pub proto: u8,
    /// IPv4 type of service, IPv6 traffic class.
    pub dsfield: u8,
    /// IPv4 options, a multiple of 4 bytes.
    pub options: Vec<u8>,
    /// IPv4 identification.
    pub id: u16,
    /// IPv4 flags and fragment offset.
    pub frag: u16,
    /// IPv6 extension headers: type and bytes from the third on (length is put in).
    pub ext: Vec<(u8, Vec<u8>)>,
    pub l4: Vec<u8>,
}

/// Client to server, both families.
pub const SRC4: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));
pub const DST4: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 1, 2, 3));
pub const SRC6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 2));
pub const DST6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 2, 3));

impl Ip {
    pub fn v4(proto: u8, l4: Vec<u8>) -> Self {
        Self {
            src: SRC4,
            dst: DST4,
            proto,
            dsfield: 0,
            options: vec![],
            id: 0,
            frag: 0,
            ext: vec![],
            l4,
        }
    }

    pub fn v6(proto: u8, l4: Vec<u8>) -> Self {
        Self {
            src: SRC6,
            dst: DST6,
            ..Self::v4(proto, l4)
        }
    }

    /// Of either family.
    pub fn new(v6: bool, proto: u8, l4: Vec<u8>) -> Self {
        if v6 {
            Self::v6(proto, l4)
        } else {
            Self::v4(proto, l4)
        }
    }

    /// The same packet but for a change.
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    pub fn to(self, dst: &str) -> Self {
        self.with(|ip| ip.dst = dst.parse().expect(dst))
    }

    pub fn from(self, src: &str) -> Self {
        self.with(|ip| ip.src = src.parse().expect(src))
    }

    pub fn ext(self, kind: u8, body: &[u8]) -> Self {
        self.with(|ip| ip.ext.push((kind, body.to_vec())))
    }

    /// The key of its flow between these ports.
    pub fn key(&self, sport: u16, dport: u16) -> FlowKey {
        FlowKey {
            source: SocketAddr::new(self.src, sport),
            destination: SocketAddr::new(self.dst, dport),
            proto: self.proto,
        }
    }

    /// Without a link-layer header.
    pub fn l3(&self) -> Vec<u8> {
        match (self.src, self.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                let ihl = 5 + self.options.len() / 4;
                let len = (ihl * 4 + self.l4.len()) as u16;
                let mut p = vec![0x40 | ihl as u8, self.dsfield];
                p.extend(len.to_be_bytes());
                p.extend(self.id.to_be_bytes());
                p.extend(self.frag.to_be_bytes());
                p.extend([64, self.proto, 0, 0]);
                p.extend(src.octets());
                p.extend(dst.octets());
                p.extend(&self.options);
                p.extend(&self.l4);
                p
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                let mut rest = vec![];
                for (i, (_, body)) in self.ext.iter().enumerate() {
                    let next = self.ext.get(i + 1).map_or(self.proto, |e| e.0);
                    rest.push(next);
                    rest.push((body.len() as u8 + 2) / 8 - 1);
                    rest.extend(body);
                }
                rest.extend(&self.l4);
                let mut p = vec![0x60 | self.dsfield >> 4, self.dsfield << 4, 0, 0];
                p.extend((rest.len() as u16).to_be_bytes());
                p.extend([self.ext.first().map_or(self.proto, |e| e.0), 64]);
                p.extend(src.octets());
                p.extend(dst.octets());
                p.extend(rest);
                p
            }
            other => panic!("mixed families: {other:?}"),
        }
    }

    /// A frame to the gateway behind u`dev`.
    pub fn on(&self, dev: usize) -> Vec<u8> {
        let ethertype = if self.src.is_ipv6() { 0x86dd } else { 0x0800 };
        frame(MACS[dev], ethertype, &self.l3())
    }
}

pub fn frame(dst: [u8; 6], ethertype: u16, payload: &[u8]) -> Vec<u8> {
    let mut p = dst.to_vec();
    p.extend([2, 0, 0, 0, 0, 1]);
    p.extend(ethertype.to_be_bytes());
    p.extend(payload);
    p
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
