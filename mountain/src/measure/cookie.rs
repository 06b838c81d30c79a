// SPDX-License-Identifier: GPL-2.0-or-later
//! Cookies of the reflector: a client that sends its cookie back gets the reflector's answers at its
//! address, so the address is not forged.
//!
//! A cookie is HalfSipHash-2-4 (J.-P. Aumasson and D. J. Bernstein, 2012, with 32-bit words) of the source
//! address under a key of the process. IPv6 counts the /64 only, as the rate limits do. The same hash is a
//! classic BPF program: with it the kernel puts the packets of known clients into a queue of their
//! own, which a flood of forged sources cannot fill.

use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;

use libc::{sock_filter, sock_fprog};
use nix::sys::socket::{setsockopt, sockopt};

use super::wire;

/// Where the kernel's filters find the network header: linux/filter.h.
const SKF_NET_OFF: u32 = -0x10_0000_i32 as u32;
/// Of the source address in an IPv4 and in an IPv6 header.
const SOURCE4: u32 = 12;
const SOURCE6: u32 = 8;
/// Words of a filter's scratch memory beside the four of the hash's state.
const SPARE: u32 = 4;
const COOKIE: u32 = 5;

/// What cookies are made with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Key([u32; 2]);

impl Key {
    pub(super) fn random() -> Self {
        Self(rand::random())
    }

    /// The cookie of a source, never 0.
    pub(super) fn cookie(self, source: IpAddr) -> u32 {
        let hash = match source {
            IpAddr::V4(a) => hash(self.0, &[a.to_bits()]),
            IpAddr::V6(a) => hash(self.0, &[96u32, 64].map(|at| (a.to_bits() >> at) as u32)),
        };
        hash.max(1)
    }

    /// Has the kernel put packets with a right cookie into the second of the sockets that share a port by
    /// SO_REUSEPORT, and all others into the first.
    pub(super) fn attach(self, socket: &impl AsFd, ipv6: bool) -> io::Result<()> {
        let mut code = self.program(ipv6);
        let program = sock_fprog {
            len: code.len() as libc::c_ushort,
            filter: code.as_mut_ptr(),
        };
        // What it points to outlives the call.
        Ok(setsockopt(socket, sockopt::AttachReusePortCbpf, &program)?)
    }

    /// The filter sees the payload at offset 0. A load beyond its end returns 0.
    fn program(self, ipv6: bool) -> Vec<sock_filter> {
        let mut p = Program::default();
        let source: &[u32] = match ipv6 {
            false => &[SOURCE4],
            true => &[SOURCE6, SOURCE6 + 4],
        };
        p.op(
            libc::BPF_LD | libc::BPF_W | libc::BPF_ABS,
            wire::COOKIE_AT as u32,
        );
        p.jump_equal(libc::BPF_K, 0, 0, 1);
        p.op(libc::BPF_RET | libc::BPF_K, 0);
        p.op(libc::BPF_ST, COOKIE);
        for (i, word) in initial(self.0).into_iter().enumerate() {
            p.op(libc::BPF_LD | libc::BPF_IMM, word);
            p.op(libc::BPF_ST, i as u32);
        }
        for at in source {
            let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
            p.block(|p| p.op(load, SKF_NET_OFF + at));
        }
        let last = last_block(source.len());
        p.block(|p| p.op(libc::BPF_LD | libc::BPF_IMM, last));
        p.op(libc::BPF_LD | libc::BPF_MEM, 2);
        p.op(libc::BPF_ALU | libc::BPF_XOR | libc::BPF_K, 0xff);
        p.op(libc::BPF_ST, 2);
        (0..4).for_each(|_| p.round());
        p.alu(libc::BPF_XOR, 1, 3);
        p.op(libc::BPF_LDX | libc::BPF_MEM, COOKIE);
        p.jump_equal(libc::BPF_X, 0, 0, 1);
        p.op(libc::BPF_RET | libc::BPF_K, 1);
        p.op(libc::BPF_RET | libc::BPF_K, 0);
        p.0
    }
}

/// The state v0 to v3 under a key.
fn initial([k0, k1]: [u32; 2]) -> [u32; 4] {
    [k0, k1, 0x6c79_6765 ^ k0, 0x7465_6462 ^ k1]
}

/// What follows whole words: their length in bytes, in the uppermost byte.
fn last_block(words: usize) -> u32 {
    (words as u32 * 4) << 24
}

/// HalfSipHash-2-4 of whole words, 32 bits.
fn hash(key: [u32; 2], words: &[u32]) -> u32 {
    let mut v = initial(key);
    for word in words.iter().copied().chain([last_block(words.len())]) {
        v[3] ^= word;
        (0..2).for_each(|_| round(&mut v));
        v[0] ^= word;
    }
    v[2] ^= 0xff;
    (0..4).for_each(|_| round(&mut v));
    v[1] ^ v[3]
}

/// One step of a round: `v[i] += v[j]`, `v[j] = rotate(v[j]) ^ v[i]`, `v[i]` rotated where it says so.
struct Step(usize, usize, u32, u32);

const ROUND: [Step; 4] = [
    Step(0, 1, 5, 16),
    Step(2, 3, 8, 0),
    Step(0, 3, 7, 0),
    Step(2, 1, 13, 16),
];

fn round(v: &mut [u32; 4]) {
    for Step(i, j, of_j, of_i) in ROUND {
        v[i] = v[i].wrapping_add(v[j]);
        v[j] = v[j].rotate_left(of_j) ^ v[i];
        v[i] = v[i].rotate_left(of_i);
    }
}

/// A classic BPF program that keeps the state in scratch words 0 to 3.
#[derive(Default)]
struct Program(Vec<sock_filter>);

impl Program {
    fn op(&mut self, code: u32, k: u32) {
        self.0.push(sock_filter {
            code: code as u16,
            jt: 0,
            jf: 0,
            k,
        });
    }

    fn jump_equal(&mut self, with: u32, k: u32, jt: u8, jf: u8) {
        self.0.push(sock_filter {
            code: (libc::BPF_JMP | libc::BPF_JEQ | with) as u16,
            jt,
            jf,
            k,
        });
    }

    /// Word `i` becomes word `i` `with` word `j`, and so does the accumulator.
    fn alu(&mut self, with: u32, i: usize, j: usize) {
        self.op(libc::BPF_LD | libc::BPF_MEM, i as u32);
        self.op(libc::BPF_LDX | libc::BPF_MEM, j as u32);
        self.op(libc::BPF_ALU | with | libc::BPF_X, 0);
        self.op(libc::BPF_ST, i as u32);
    }

    fn rotate(&mut self, i: usize, by: u32) {
        if by == 0 {
            return;
        }
        self.op(libc::BPF_LD | libc::BPF_MEM, i as u32);
        self.op(libc::BPF_ALU | libc::BPF_LSH | libc::BPF_K, by);
        self.op(libc::BPF_ST, SPARE);
        self.op(libc::BPF_LD | libc::BPF_MEM, i as u32);
        self.op(libc::BPF_ALU | libc::BPF_RSH | libc::BPF_K, 32 - by);
        self.op(libc::BPF_LDX | libc::BPF_MEM, SPARE);
        self.op(libc::BPF_ALU | libc::BPF_OR | libc::BPF_X, 0);
        self.op(libc::BPF_ST, i as u32);
    }

    fn round(&mut self) {
        for Step(i, j, of_j, of_i) in ROUND {
            self.alu(libc::BPF_ADD, i, j);
            self.rotate(j, of_j);
            self.alu(libc::BPF_XOR, j, i);
            self.rotate(i, of_i);
        }
    }

    /// Mixes in the word that `load` puts into the accumulator.
    fn block(&mut self, load: impl Fn(&mut Self)) {
        for (at, is_first) in [(3, true), (0, false)] {
            load(self);
            self.op(libc::BPF_LDX | libc::BPF_MEM, at);
            self.op(libc::BPF_ALU | libc::BPF_XOR | libc::BPF_X, 0);
            self.op(libc::BPF_ST, at);
            if is_first {
                (0..2).for_each(|_| self.round());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::time::Duration;

    use socket2::{Domain, Socket, Type};

    use super::*;

    /// From the reference implementation: key 00 01 .. 07, messages 00 01 ..
    #[test]
    fn hash_matches_the_reference() {
        let key = [0x0302_0100, 0x0706_0504];
        for (words, expected) in [
            (&[][..], [0xa9, 0x35, 0x9f, 0x5b]),
            (&[0x0302_0100], [0x2a, 0x6e, 0x46, 0x89]),
        ] {
            assert_eq!(hash(key, words), u32::from_le_bytes(expected), "{words:x?}");
        }
    }

    #[test]
    fn a_cookie_is_of_one_source_and_key() {
        let key = Key([1, 2]);
        let of = |ip: &str| key.cookie(ip.parse().unwrap());
        assert_eq!(of("192.0.2.1"), of("192.0.2.1"));
        assert_ne!(of("192.0.2.1"), of("192.0.2.2"));
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:2"), "the same /64");
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        let other = Key([1, 3]).cookie("192.0.2.1".parse().unwrap());
        assert_ne!(of("192.0.2.1"), other);
    }

    /// The kernel's own interpreter (or compiler) comes to the same.
    #[test]
    fn the_kernel_tells_known_clients_apart() {
        for ip in ["127.0.0.1", "::1"] {
            let ip: IpAddr = ip.parse().unwrap();
            for _ in 0..20 {
                let key = Key::random();
                let bind = |port: u16| {
                    let at = std::net::SocketAddr::new(ip, port);
                    let socket = Socket::new(Domain::for_address(at), Type::DGRAM, None).unwrap();
                    socket.set_reuse_port(true).unwrap();
                    socket.bind(&at.into()).unwrap();
                    socket
                        .set_read_timeout(Some(Duration::from_secs(5)))
                        .unwrap();
                    UdpSocket::from(socket)
                };
                let others = bind(0);
                let known = bind(others.local_addr().unwrap().port());
                key.attach(&others, ip.is_ipv6()).unwrap();
                let right = key.cookie(ip);
                let client = UdpSocket::bind((ip, 0)).unwrap();
                for (cookie, socket) in [
                    (right, &known),
                    (0, &others),
                    (right ^ 1, &others),
                    (
                        right.swap_bytes(),
                        if right == right.swap_bytes() {
                            &known
                        } else {
                            &others
                        },
                    ),
                ] {
                    let mut packet = [0; wire::PROBE_LEN];
                    packet[wire::COOKIE_AT..][..4].copy_from_slice(&cookie.to_be_bytes());
                    client
                        .send_to(&packet, others.local_addr().unwrap())
                        .unwrap();
                    let (n, _) = socket.recv_from(&mut packet).unwrap();
                    assert_eq!(n, wire::PROBE_LEN);
                }
                client
                    .send_to(&[0; 5], others.local_addr().unwrap())
                    .unwrap();
                assert_eq!(others.recv(&mut [0; 9]).unwrap(), 5, "too short");
            }
        }
    }
}
