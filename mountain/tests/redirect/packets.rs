// SPDX-License-Identifier: GPL-2.0-or-later
//! Packets with the checksums they should have, computed over all of them.

#![allow(dead_code)] // Each test binary uses its own part.

use std::net::SocketAddr;

use super::bpf::packets::{tcp, udp, Ip, FRAGMENT, SYN, TCP};
use super::bpf::PASS;
use super::rig::{C0, CLIENT, S0, TARGET, XDP_PASS, XDP_REDIRECT};
use super::support::frames::framed;
use super::support::sums::put_check;

/// A packet whose transport header is `l4` with ports and checksum put in.
#[derive(Clone, Debug)]
pub struct Packet {
    pub ip: Ip,
    /// Ethernet destination and source.
    pub macs: [[u8; 6]; 2],
    /// UDP without a checksum.
    pub unchecked: bool,
}

impl Packet {
    pub fn new(proto: u8, src: SocketAddr, dst: SocketAddr, payload: usize) -> Self {
        let l4 = if proto == TCP {
            // SYN: other segments begin no flow.
            tcp(src.port(), dst.port(), SYN, payload)
        } else {
            udp(src.port(), dst.port(), payload)
        };
        Self {
            ip: Ip::between(src.ip(), dst.ip(), proto, l4),
            macs: [C0, CLIENT],
            unchecked: false,
        }
    }

    /// What it becomes: other addresses and ports, everything else as it is.
    pub fn rewritten(&self, src: SocketAddr, dst: SocketAddr) -> Self {
        let mut new = self.clone();
        (new.ip.src, new.ip.dst) = (src.ip(), dst.ip());
        if self.has_ports() {
            new.ip.l4[..2].copy_from_slice(&src.port().to_be_bytes());
            new.ip.l4[2..4].copy_from_slice(&dst.port().to_be_bytes());
        }
        new
    }

    /// What a program's `action` makes of it besides: one that sends it on takes one from its lifetime, and
    /// with XDP gives it the Ethernet header of the way out.
    pub fn after(mut self, action: i32, reply: bool) -> Self {
        if ![PASS, XDP_PASS].contains(&action) {
            self.ip.ttl -= 1;
        }
        match (action, reply) {
            (XDP_REDIRECT, false) => self.macs(TARGET, S0),
            (XDP_REDIRECT, true) => self.macs(CLIENT, C0),
            _ => self,
        }
    }

    /// The same packet but for a change.
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// Later fragments have none.
    fn has_ports(&self) -> bool {
        let later4 = self.ip.frag & 0x1fff != 0;
        let later6 = |(kind, body): &(u8, Vec<u8>)| {
            *kind == FRAGMENT && (body[0] != 0 || body[1] & 0xf8 != 0)
        };
        !later4 && !self.ip.ext.iter().any(later6)
    }

    /// The transport's destination port is another.
    pub fn set_port(&mut self, port: u16) {
        self.ip.l4[2..4].copy_from_slice(&port.to_be_bytes());
    }

    pub fn ttl(mut self, ttl: u8) -> Self {
        self.ip.ttl = ttl;
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
        let fragment = ip.frag & 0x3fff != 0 || ip.ext.iter().any(|e| e.0 == FRAGMENT);
        if !self.unchecked && !fragment {
            put_check(ip.src, ip.dst, ip.proto, &mut ip.l4);
        }
        let [to, from] = self.macs;
        framed(to, from, &ip.l3())
    }
}
