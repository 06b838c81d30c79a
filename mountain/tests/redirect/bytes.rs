// SPDX-License-Identifier: GPL-2.0-or-later
//! bpf/redirect/redirect.bpf.c byte by byte: packets through BPF_PROG_RUN against the same packets made anew
//! with all checksums computed.

mod flows;
mod icmp;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use crate::bpf::packets::{self as packets_of, UDP};
use crate::bpf::{in_netns, ip, PASS, REDIRECT};
use crate::packets::Packet;
use crate::rig::*;
use crate::support::sums;
use mountain::redirect::bpf::hooks::{DeviceHook, ProgramRun};
use mountain::redirect::bpf::stats;
use mountain::redirect::{Backend, Plan, Proto, Rule, Traffic};

/// A packet that comes in, and its addresses as they must become.
#[derive(Clone)]
struct Sent {
    packet: Packet,
    src: SocketAddr,
    dst: SocketAddr,
}

impl Sent {
    fn with(mut self, change: impl FnOnce(&mut Packet)) -> Self {
        change(&mut self.packet);
        self
    }

    fn rewritten(&self) -> Packet {
        self.packet.rewritten(self.src, self.dst)
    }
}

/// What the client sends for a rule.
fn forward(r: &Rule, port: u16) -> Sent {
    let src = client(r.from.is_ipv6(), port);
    let packet = Packet::new(r.proto.number(), src, r.from, 100);
    let (packet, dst) = (packet.macs(C0, CLIENT), r.to);
    Sent { packet, src, dst }
}

/// What the target answers.
fn reply(r: &Rule, port: u16) -> Sent {
    let dst = client(r.from.is_ipv6(), port);
    let packet = Packet::new(r.proto.number(), r.to, dst, 333);
    let (packet, src) = (packet.macs(S0, TARGET), r.from);
    Sent { packet, src, dst }
}

/// What a packet became, with words instead of a wall of bytes when it is not what it should be.
#[track_caller]
fn expect(what: &str, got: ProgramRun, action: i32, bytes: &[u8]) {
    assert_eq!(got.action, action, "{what}: action");
    let got = got.packet;
    if let Some(at) = got.iter().zip(bytes).position(|(a, b)| a != b) {
        panic!("{what}: byte {at} differs\n got {got:02x?}\nwant {bytes:02x?}");
    }
    assert_eq!(got.len(), bytes.len(), "{what}: length");
}

/// [`run`] of a program that sends one look-up in 64 through the kernel: again, where it did.
fn run_fast(hook: DeviceHook, dev: &str, packet: &[u8], action: i32) -> ProgramRun {
    let mut got = run(hook, dev, packet);
    for _ in 0..5 {
        if action != XDP_REDIRECT || got.action != XDP_PASS {
            break;
        }
        got = run(hook, dev, packet);
    }
    got
}

impl Way {
    fn check_forward(&self, what: &str, sent: &Sent) {
        let want = sent.rewritten().after(self.forward.2, false);
        self.check(what, self.forward, &sent.packet, &want);
    }

    fn check_reply(&self, what: &str, sent: &Sent) {
        let want = sent.rewritten().after(self.reply.2, true);
        self.check(&format!("reply, {what}"), self.reply, &sent.packet, &want);
    }

    fn check(&self, what: &str, at: (&str, DeviceHook, i32), packet: &Packet, want: &Packet) {
        let (dev, hook, action) = at;
        let got = run_fast(hook, dev, &packet.bytes(), action);
        let what = format!("{}: {what}", self.backend);
        expect(&what, got, action, &want.bytes());
    }

    /// The packet is left as it is for the next hook.
    fn check_untouched(&self, what: &str, bytes: &[u8]) {
        let (dev, hook, _) = self.forward;
        let what = format!("{} untouched: {what}", self.backend);
        expect(&what, run(hook, dev, bytes), passing(hook), bytes);
    }

    /// The plan in [`each_way`]'s namespace.
    fn plan(&self) -> Plan {
        Router::there().plan(self.backend, None)
    }
}

/// Runs `test` for each way in a namespace of its own with all rules installed.
fn each_way(test: fn(&Way)) {
    for way in [TCX, TCX_PEER, XDP, XDP_AND_ON] {
        in_netns(move || {
            let router = Router::new();
            install_all(&rules(), &router.plan(way.backend, None));
            test(&way);
        });
    }
}

#[test]
fn both_directions_are_rewritten() {
    each_way(|way| {
        for r in rules() {
            // Twice: the packet that makes the flow, and one that finds it.
            for _ in 0..2 {
                way.check_forward(&r.to_string(), &forward(&r, 40_000));
                way.check_reply(&r.to_string(), &reply(&r, 40_000));
            }
        }
        let counted = stats(&[0, 1, 2, 3]).unwrap();
        // Network layer: header, transport header (TCP with options), payload.
        for (s, len) in counted.iter().zip([28, 48, 52, 72]) {
            let want = [100, 333].map(|payload| Traffic {
                packets: 2,
                bytes: 2 * (len + payload),
            });
            assert_eq!([s.forward, s.reply], want, "{} {s:?}", way.backend);
            assert_eq!(s.drops, BTreeMap::new());
        }
    });
}

#[test]
fn odd_packets_of_a_flow_are_rewritten_as_well() {
    each_way(|way| {
        for r in rules() {
            let plain = forward(&r, 40_001);
            let with_options = |sent: Sent| {
                sent.with(|p| match r.from.is_ipv6() {
                    true => p.ip.ext.push((packets_of::HOPOPTS, vec![1, 4, 0, 0, 0, 0])),
                    false => p.ip.options = vec![1; 40],
                })
            };
            let padding = [&[1, 12][..], &[0; 12]].concat();
            let for_the_last = |sent: Sent| {
                sent.with(|p| {
                    p.ip.dsfield = 0xb8;
                    if r.from.is_ipv6() {
                        p.ip.ext.push((packets_of::DSTOPTS, padding.clone()));
                    }
                })
            };
            way.check_forward(&format!("{r}, odd"), &for_the_last(plain.clone()));
            // What is for every hop is for the kernel to look at: a source route, for example.
            let odd = for_the_last(with_options(plain.clone()));
            let by_kernel = matches!(way.backend, Backend::TcxPeer | Backend::XdpRedirect);
            let by = if by_kernel { &TCX } else { way };
            if way.backend == Backend::XdpRedirect {
                way.check_untouched(&format!("{r}, options"), &odd.packet.bytes());
            }
            by.check_forward(&format!("{r}, options"), &odd);
            if by_kernel {
                let answer = with_options(reply(&r, 40_001));
                let (bytes, (dev, hook, _)) = (answer.packet.bytes(), way.reply);
                let what = format!("{} {r}: reply, options", way.backend);
                expect(&what, run(hook, dev, &bytes), passing(hook), &bytes);
            }

            let udp = r.proto == Proto::Udp;
            let empty = plain.clone().with(|p| {
                p.ip.l4.truncate(if udp { 8 } else { 32 });
                if udp {
                    p.ip.l4[4..6].copy_from_slice(&8u16.to_be_bytes());
                }
            });
            way.check_forward(&format!("{r}, no payload"), &empty);

            if udp {
                let unchecked = plain.with(|p| p.unchecked = true);
                way.check_forward(&format!("{r}, no checksum"), &unchecked);
            }
        }
    });
}

/// UDP whose checksum becomes 0 by the new addresses, which must be sent as 0xffff.
#[test]
fn a_computed_zero_is_no_missing_checksum() {
    each_way(|way| {
        for r in rules().into_iter().filter(|r| r.proto == Proto::Udp) {
            let mut sent = forward(&r, 40_002);
            let mut found = 0;
            for word in 0..=0xffffu16 {
                sent.packet.ip.l4[8..10].copy_from_slice(&word.to_be_bytes());
                let new = sent.rewritten().ip;
                if sums::l4_check(new.src, new.dst, UDP, &new.l4) == 0xffff {
                    way.check_forward(&format!("{r}, becomes zero"), &sent);
                    found += 1;
                }
            }
            assert!(found > 0);
        }
    });
}

/// A fragment of a datagram that begins as `first`.
fn fragment(first: &Sent, at: u16, more: bool, id: u16) -> Sent {
    first.clone().with(|p| {
        p.unchecked = true;
        if at > 0 {
            p.ip.l4 = vec![7; 64];
        }
        p.ip = p.ip.clone().part(at << 3, more, id);
    })
}

#[test]
fn fragments_follow_the_first_one() {
    each_way(|way| {
        for r in rules() {
            let whole = forward(&r, 40_003);
            // The checksum of a datagram that nobody has the rest of: any will do, and what the
            // addresses change it by is the same as with a whole packet.
            let at = sums::check_at(r.proto.number());
            let checked_as = |packet: &mut Packet, whole: &Packet| {
                let bytes = whole.bytes();
                let field = bytes.len() - whole.ip.l4.len() + at;
                packet.ip.l4[at..at + 2].copy_from_slice(&bytes[field..field + 2]);
            };
            let head = fragment(&whole, 0, true, 77).with(|p| checked_as(p, &whole.packet));
            let new = head.rewritten().with(|p| checked_as(p, &whole.rewritten()));
            // Not seen: left alone.
            let orphan = fragment(&whole, 13, true, 78).packet.bytes();
            way.check_untouched(&format!("{r}, orphan"), &orphan);
            // Connection tracking gathers fragments: all of a datagram or none go by XDP.
            let by = match way.backend {
                Backend::XdpRedirect => &AFTER_XDP,
                _ => way,
            };
            if way.backend == Backend::XdpRedirect {
                way.check_untouched(&format!("{r}, first fragment"), &head.packet.bytes());
            }
            let new = new.after(by.forward.2, false);
            let what = format!("{r}, first fragment");
            by.check(&what, by.forward, &head.packet, &new);
            for (name, at, more) in [("middle", 13, true), ("last", 26, false)] {
                let later = fragment(&whole, at, more, 77);
                if way.backend == Backend::XdpRedirect {
                    way.check_untouched(&format!("{r}, {name}"), &later.packet.bytes());
                }
                by.check_forward(&format!("{r}, {name}"), &later);
            }
            // Identifications come again: the rest of a datagram that no rule names is left alone.
            let other = fragment(&whole, 0, true, 77).with(|p| p.set_port(8082));
            way.check_untouched(&format!("{r}, another first"), &other.packet.bytes());
            let rest = fragment(&whole, 13, true, 77).packet.bytes();
            way.check_untouched(&format!("{r}, the rest of that"), &rest);
        }
    });
}

#[test]
fn what_is_not_named_stays_as_it_is() {
    each_way(|way| {
        for r in rules() {
            let packet = forward(&r, 40_004).packet;
            let v6 = r.from.is_ipv6();
            let other = either(v6, "10.0.8.16", "fd08::16");
            let xdp = way.forward.1 == DeviceHook::Xdp;
            let untouched = |what, change: &dyn Fn(&mut Packet)| {
                way.check_untouched(what, &packet.clone().with(change).bytes());
            };
            untouched("another port", &|p| p.set_port(8082));
            untouched("another address", &|p| p.ip.dst = other);
            untouched("another protocol", &|p| {
                (p.ip.proto, p.unchecked) = (132, true)
            });
            // To another host: a device may be promiscuous. Where XDP only rewrites, the kernel drops it.
            if way.backend != Backend::Xdp {
                untouched("another host", &|p| p.macs = [[2; 6], CLIENT]);
            }
            let bytes = packet.bytes();
            if !v6 {
                let mut broken = bytes.clone();
                broken[14] = broken[14] & 0xf0 | 4;
                way.check_untouched("header too short", &broken);
            }
            // BPF_PROG_RUN takes no such packets for tcx.
            if xdp {
                let mut vlan = bytes.clone();
                vlan.splice(12..12, [0x81, 0, 0, 42]);
                way.check_untouched("VLAN", &vlan);
                // Within the fixed part of a header.
                let l4 = bytes.len() - packet.ip.l4.len();
                let fixed = if r.proto == Proto::Tcp { 20 } else { 8 };
                for len in 14..l4 + fixed {
                    way.check_untouched("cut off", &bytes[..len]);
                }
            }
        }
    });
}

/// The kernel forwards nothing from these, so what goes around it must not either.
#[test]
fn what_comes_from_this_host_or_nobody_is_left_to_the_kernel() {
    each_way(|way| {
        let around = matches!(way.backend, Backend::TcxPeer | Backend::XdpRedirect);
        for r in rules() {
            let sources = match r.from.is_ipv6() {
                true => "fd01::1 fd08::17 :: ::1 fe80::7 ff02::1",
                false => {
                    "10.0.1.1 10.0.8.17 10.0.8.255 0.0.0.9 127.0.0.2 224.0.0.1 255.255.255.255"
                }
            };
            for source in sources.split(' ') {
                let port = 40_012;
                let src = SocketAddr::new(source.parse().unwrap(), port);
                let mut sent = forward(&r, port).with(|p| p.ip.src = src.ip());
                sent.src = src;
                match around {
                    true => way.check_untouched(source, &sent.packet.bytes()),
                    // The kernel looks at them itself.
                    false => way.check_forward(source, &sent),
                }
            }
            way.check_forward("a client", &forward(&r, 40_012));
        }
    });
}

/// What XDP cannot do right goes on untouched, and tcx does it.
#[test]
fn the_slow_way_takes_over() {
    in_netns(|| {
        let router = Router::new();
        install_all(&rules(), &router.plan(Backend::XdpRedirect, None));
        let takes_over = |what, port, change: fn(&mut Packet)| {
            for r in rules() {
                let sent = forward(&r, port).with(change);
                XDP_AND_ON.check_untouched(what, &sent.packet.bytes());
                TCX.check_forward(what, &sent);
            }
        };
        takes_over("lifetime over", 40_005, |p| p.ip.ttl = 1);
        // Not by way of connection tracking, which has not seen the other packets.
        for r in rules() {
            AFTER_XDP.check_reply(&r.to_string(), &reply(&r, 40_005));
        }
        for r in rules() {
            let last = reply(&r, 40_005).packet.ttl(1).bytes();
            let got = run(DeviceHook::Xdp, "s0", &last);
            expect("reply, lifetime over", got, XDP_PASS, &last);
        }
        // IPv6 may have an MTU of its own.
        std::fs::write("/proc/sys/net/ipv6/conf/s0/mtu", "1400").unwrap();
        for r in rules().iter().filter(|r| r.from.is_ipv6()) {
            let sent = forward(r, 40_006).with(|p| p.ip.l4.resize(1400, 1));
            XDP_AND_ON.check_untouched("too big for IPv6", &sent.packet.bytes());
            TCX.check_forward("too big for IPv6", &sent);
        }
        ip("link set s0 mtu 1300");
        takes_over("too big", 40_006, |p| p.ip.l4.resize(1400, 1));
        ip("neigh del 10.0.1.2 dev s0");
        ip("neigh del fd01::2 dev s0");
        for r in rules() {
            let sent = forward(&r, 40_007);
            XDP_AND_ON.check_untouched("no neighbour", &sent.packet.bytes());
            AFTER_XDP.check_forward("no neighbour", &sent);
        }
    });
}

/// Replies that are sent on by BPF: the kernel has to tell the sender of segments that are too large.
#[test]
fn replies_whose_segments_do_not_fit_are_left_to_the_kernel() {
    in_netns(|| {
        let router = Router::new();
        install_all(&rules(), &router.plan(Backend::TcxPeer, None));
        for r in rules().into_iter().filter(|r| r.proto == Proto::Tcp) {
            TCX_PEER.check_forward(&r.to_string(), &forward(&r, 40_012));
            let answer = reply(&r, 40_012).with(|p| p.ip.l4.resize(2600, 1));
            let want = answer.rewritten().after(REDIRECT, true).bytes();
            let bytes = answer.packet.bytes();
            let headers = if r.from.is_ipv6() { 72 } else { 52 };
            let fits = 1500 - headers;
            // Before the route of the flow is known, and when it is.
            for gso_size in [fits + 1, fits, fits + 1] {
                let what = format!("{r}, segments of {gso_size}");
                let got = run_gso("s0", &bytes, gso_size);
                match gso_size > fits {
                    true => expect(&what, got, PASS, &bytes),
                    false => expect(&what, got, REDIRECT, &want),
                }
            }
            if r.from.is_ipv6() {
                let as_big = |packet: Packet| {
                    let jumbo = (packets_of::HOPOPTS, vec![0xc2, 4, 0, 1, 0, 0]);
                    let mut bytes = packet.with(|p| p.ip.ext.push(jumbo)).bytes();
                    bytes[18..20].fill(0);
                    bytes
                };
                let got = run_gso("s0", &as_big(answer.packet.clone()), 1200);
                let want = as_big(answer.rewritten().after(REDIRECT, true));
                expect(&format!("{r}, BIG TCP"), got, REDIRECT, &want);
            }
        }
    });
}
