// SPDX-License-Identifier: GPL-2.0-or-later
//! IP packets of both families in bytes.

use std::net::IpAddr;

use super::sums::checksum;

/// IPv6's header of a fragment.
pub const FRAGMENT: u8 = 44;

/// A packet to build: `l4` follows the network header (and what stands before it).
#[derive(Clone, Debug)]
pub struct Ip {
    pub src: IpAddr,
    pub dst: IpAddr,
    pub proto: u8,
    /// IPv4 type of service, IPv6 traffic class.
    pub dsfield: u8,
    /// IPv4 time to live, IPv6 hop limit.
    pub ttl: u8,
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

impl Ip {
    pub fn between(src: IpAddr, dst: IpAddr, proto: u8, l4: Vec<u8>) -> Self {
        Self {
            src,
            dst,
            proto,
            dsfield: 0,
            ttl: 64,
            options: vec![],
            id: 0,
            frag: 0,
            ext: vec![],
            l4,
        }
    }

    /// The same packet but for a change.
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    pub fn ext(self, kind: u8, body: &[u8]) -> Self {
        self.with(|ip| ip.ext.push((kind, body.to_vec())))
    }

    /// As a fragment, from byte `at` of its datagram on; `more`: whether more of that follow.
    pub fn part(self, at: u16, more: bool, id: u16) -> Self {
        let more = u16::from(more);
        if self.src.is_ipv6() {
            let body = [at | more, 0, id].map(u16::to_be_bytes).concat();
            return self.ext(FRAGMENT, &body);
        }
        self.with(|ip| (ip.frag, ip.id) = (at >> 3 | more << 13, id))
    }

    /// Without a link-layer header. IPv4's checksum is right; that of `l4` is the caller's.
    pub fn l3(&self) -> Vec<u8> {
        match (self.src, self.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                let ihl = 20 + self.options.len();
                let len = (ihl + self.l4.len()) as u16;
                let mut p = vec![0x40 | (ihl / 4) as u8, self.dsfield];
                p.extend(len.to_be_bytes());
                p.extend(self.id.to_be_bytes());
                p.extend(self.frag.to_be_bytes());
                p.extend([self.ttl, self.proto, 0, 0]);
                p.extend(src.octets());
                p.extend(dst.octets());
                p.extend(&self.options);
                let check = checksum(&p);
                p[10..12].copy_from_slice(&check.to_be_bytes());
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
                p.extend([self.ext.first().map_or(self.proto, |e| e.0), self.ttl]);
                p.extend(src.octets());
                p.extend(dst.octets());
                p.extend(rest);
                p
            }
            other => panic!("mixed families: {other:?}"),
        }
    }
}
