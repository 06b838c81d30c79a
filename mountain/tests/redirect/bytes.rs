// SPDX-License-Identifier: GPL-2.0-or-later
//! bpf/redirect/redirect.bpf.c byte by byte: packets through BPF_PROG_RUN against the same packets made anew
//! with all checksums computed.

mod icmp;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use crate::bpf::packets::{self as packets_of, UDP};
use crate::bpf::{in_netns, ip, PASS, REDIRECT};
use crate::packets::Packet;
use crate::rig::*;
use libbpf_rs::MapCore;
use mountain::redirect::bpf::hooks::{DeviceHook, ProgramRun};
use mountain::redirect::bpf::{read_log, stats};
use mountain::redirect::{Backend, Plan, Proto, Rule, RuleDevice, Traffic};
use socket2::{Domain, Socket, Type};

/// All rules of these tests: both protocols, both families.
fn rules() -> Vec<Rule> {
    let both = |proto| [rule(proto, false, 0), rule(proto, true, 0)];
    [both(Proto::Udp), both(Proto::Tcp)].concat()
}

/// One packet each way for a rule: as it comes, and its addresses as they must become.
fn forward(r: &Rule, port: u16) -> (Packet, SocketAddr, SocketAddr) {
    let client = client(r.from.is_ipv6(), port);
    let packet = Packet::new(r.proto.number(), client, r.from, 100);
    (packet.macs(C0, CLIENT), client, r.to)
}

fn reply(r: &Rule, port: u16) -> (Packet, SocketAddr, SocketAddr) {
    let client = client(r.from.is_ipv6(), port);
    let packet = Packet::new(r.proto.number(), r.to, client, 333);
    (packet.macs(S0, TARGET), r.from, client)
}

/// What a packet became, with words instead of a wall of bytes when it is not what it should be.
#[track_caller]
fn expect(what: &str, got: ProgramRun, action: i32, bytes: &[u8]) {
    assert_eq!(got.action, action, "{what}: action");
    if let Some(at) = got.packet.iter().zip(bytes).position(|(a, b)| a != b) {
        panic!(
            "{what}: byte {at} differs\n got {:02x?}\nwant {bytes:02x?}",
            got.packet
        );
    }
    assert_eq!(got.packet.len(), bytes.len(), "{what}: length");
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

/// Which program does it, and what becomes of the packet.
struct Way {
    backend: Backend,
    /// Device and hook of the forward and of the reply direction; `None`: the other hooks do that.
    forward: (&'static str, DeviceHook, i32),
    reply: (&'static str, DeviceHook, i32),
    /// The packet leaves here: lifetime one less, Ethernet header of the way out.
    leaves: [bool; 2],
    framed: bool,
}

const WAYS: [Way; 4] = [
    Way {
        backend: Backend::Tcx,
        forward: ("c0", DeviceHook::TcxIngress, PASS),
        reply: ("c0", DeviceHook::TcxEgress, PASS),
        leaves: [false, false],
        framed: false,
    },
    Way {
        backend: Backend::TcxPeer,
        forward: ("c0", DeviceHook::TcxIngress, REDIRECT),
        reply: ("s0", DeviceHook::TcxIngress, REDIRECT),
        leaves: [true, true],
        framed: false,
    },
    Way {
        backend: Backend::Xdp,
        forward: ("c0", DeviceHook::Xdp, XDP_PASS),
        reply: ("c0", DeviceHook::TcxEgress, PASS),
        leaves: [false, false],
        framed: false,
    },
    Way {
        backend: Backend::XdpRedirect,
        forward: ("c0", DeviceHook::Xdp, XDP_REDIRECT),
        reply: ("s0", DeviceHook::Xdp, XDP_REDIRECT),
        leaves: [true, true],
        framed: true,
    },
];

impl Way {
    fn check_forward(&self, what: &str, packet: &Packet, src: SocketAddr, dst: SocketAddr) {
        let (dev, hook, action) = self.forward;
        let mut want = packet.rewritten(src, dst);
        if self.leaves[0] {
            want.ttl -= 1;
        }
        if self.framed {
            want = want.macs(TARGET, S0);
        }
        let what = format!("{} forward: {what}", self.backend);
        expect(
            &what,
            run_fast(hook, dev, &packet.bytes(), action),
            action,
            &want.bytes(),
        );
    }

    fn check_reply(&self, what: &str, packet: &Packet, src: SocketAddr, dst: SocketAddr) {
        let (dev, hook, action) = self.reply;
        let mut want = packet.rewritten(src, dst);
        if self.leaves[1] {
            want.ttl -= 1;
        }
        if self.framed {
            want = want.macs(CLIENT, C0);
        }
        let what = format!("{} reply: {what}", self.backend);
        expect(
            &what,
            run_fast(hook, dev, &packet.bytes(), action),
            action,
            &want.bytes(),
        );
    }

    /// The packet is left as it is for the next hook.
    fn check_untouched(&self, what: &str, bytes: &[u8]) {
        let (dev, hook, _) = self.forward;
        let pass = if hook == DeviceHook::Xdp {
            XDP_PASS
        } else {
            PASS
        };
        let what = format!("{} untouched: {what}", self.backend);
        expect(&what, run(hook, dev, bytes), pass, bytes);
    }
}

/// Runs `test` for each way in a namespace of its own with all rules installed.
fn each_way(test: fn(&Way)) {
    for way in &WAYS {
        in_netns(move || {
            let router = Router::new();
            install_all(&rules(), &router.plan(way.backend, None));
            test(way);
        });
    }
}

#[test]
fn both_directions_are_rewritten() {
    each_way(|way| {
        for r in rules() {
            // Twice: the packet that makes the flow, and one that finds it.
            for _ in 0..2 {
                let (packet, src, dst) = forward(&r, 40_000);
                way.check_forward(&r.to_string(), &packet, src, dst);
                let (packet, src, dst) = reply(&r, 40_000);
                way.check_reply(&r.to_string(), &packet, src, dst);
            }
        }
        let counted = stats(&[0, 1, 2, 3]).unwrap();
        // Network layer: header, transport header (TCP with options), payload.
        for (s, len) in counted.iter().zip([28, 48, 52, 72]) {
            let traffic = |packets, bytes| Traffic { packets, bytes };
            assert_eq!(
                s.forward,
                traffic(2, 2 * (len + 100)),
                "{} {s:?}",
                way.backend
            );
            assert_eq!(
                s.reply,
                traffic(2, 2 * (len + 333)),
                "{} {s:?}",
                way.backend
            );
            assert_eq!(s.drops, BTreeMap::new());
        }
    });
}

#[test]
fn odd_packets_of_a_flow_are_rewritten_as_well() {
    each_way(|way| {
        for r in rules() {
            let (plain, src, dst) = forward(&r, 40_001);
            let ipv6 = r.from.is_ipv6();
            let mut odd = plain.clone();
            if ipv6 {
                odd.ip = odd.ip.ext(packets_of::HOPOPTS, &[1, 4, 0, 0, 0, 0]);
                odd.ip = odd.ip.ext(
                    packets_of::DSTOPTS,
                    &[1, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
                );
            } else {
                odd.ip.options = vec![1; 40];
            }
            odd.ip.dsfield = 0xb8;
            way.check_forward(&format!("{r}, options"), &odd, src, dst);

            let mut empty = plain.clone();
            empty
                .ip
                .l4
                .truncate(if r.proto == Proto::Tcp { 32 } else { 8 });
            if r.proto == Proto::Udp {
                empty.ip.l4[4..6].copy_from_slice(&8u16.to_be_bytes());
            }
            way.check_forward(&format!("{r}, no payload"), &empty, src, dst);

            if r.proto == Proto::Udp {
                let mut unchecked = plain.clone();
                unchecked.unchecked = true;
                way.check_forward(&format!("{r}, no checksum"), &unchecked, src, dst);
            }
        }
    });
}

/// UDP whose checksum becomes 0 by the new addresses, which must be sent as 0xffff.
#[test]
fn a_computed_zero_is_no_missing_checksum() {
    each_way(|way| {
        for r in rules().into_iter().filter(|r| r.proto == Proto::Udp) {
            let (mut packet, src, dst) = forward(&r, 40_002);
            let mut found = 0;
            for word in 0..=0xffffu16 {
                packet.ip.l4[8..10].copy_from_slice(&word.to_be_bytes());
                let new = packet.rewritten(src, dst);
                if crate::packets::l4_check(src.ip(), dst.ip(), UDP, &new.ip.l4) == 0xffff {
                    way.check_forward(&format!("{r}, becomes zero"), &packet, src, dst);
                    found += 1;
                }
            }
            assert!(found > 0);
        }
    });
}

#[test]
fn fragments_follow_the_first_one() {
    each_way(|way| {
        for r in rules() {
            let (first, src, dst) = forward(&r, 40_003);
            let ipv6 = r.from.is_ipv6();
            let make = |at: u16, more: bool, id: u16| {
                let mut p = first.clone();
                p.unchecked = true;
                if at > 0 {
                    p.ip.l4 = vec![7; 64];
                }
                if ipv6 {
                    let field = (at << 3 | u16::from(more)).to_be_bytes();
                    let id = u32::from(id).to_be_bytes();
                    p.ip =
                        p.ip.ext(packets_of::FRAGMENT, &[&field[..], &id[..]].concat());
                } else {
                    p.ip.frag = at | u16::from(more) << 13;
                    p.ip.id = id;
                }
                p
            };
            // The checksum of a datagram that nobody has the rest of: any will do, and what the
            // addresses change it by is the same as with a whole packet.
            let mut head = make(0, true, 77);
            let at = crate::packets::check_at(head.ip.proto);
            let whole = first.bytes();
            let l4 = whole.len() - first.ip.l4.len();
            head.ip.l4[at..at + 2].copy_from_slice(&whole[l4 + at..l4 + at + 2]);
            let mut new = head.rewritten(src, dst);
            let after = first.rewritten(src, dst).bytes();
            new.ip.l4[at..at + 2].copy_from_slice(&after[l4 + at..l4 + at + 2]);
            if way.leaves[0] {
                new.ttl -= 1;
            }
            if way.framed {
                new = new.macs(TARGET, S0);
            }
            let (dev, hook, action) = way.forward;
            // Not seen: left alone.
            way.check_untouched(&format!("{r}, orphan"), &make(13, true, 78).bytes());
            let what = format!("{} {r}, first fragment", way.backend);
            expect(
                &what,
                run_fast(hook, dev, &head.bytes(), action),
                action,
                &new.bytes(),
            );
            way.check_forward(&format!("{r}, middle"), &make(13, true, 77), src, dst);
            way.check_forward(&format!("{r}, last"), &make(26, false, 77), src, dst);
        }
    });
}

#[test]
fn what_is_not_named_stays_as_it_is() {
    each_way(|way| {
        for r in rules() {
            let (packet, ..) = forward(&r, 40_004);
            let mut other = packet.clone();
            other.ip.l4[2..4].copy_from_slice(&8082u16.to_be_bytes());
            way.check_untouched("another port", &other.bytes());
            let mut other = packet.clone();
            other.ip.dst = if r.from.is_ipv6() {
                "fd08::16"
            } else {
                "10.0.8.16"
            }
            .parse()
            .unwrap();
            way.check_untouched("another address", &other.bytes());
            let mut other = packet.clone();
            other.ip.proto = 132;
            other.unchecked = true;
            way.check_untouched("another protocol", &other.bytes());
            let bytes = packet.bytes();
            let mut vlan = bytes.clone();
            vlan.splice(12..12, [0x81, 0, 0, 42]);
            if way.forward.1 == DeviceHook::Xdp {
                way.check_untouched("VLAN", &vlan);
            }
            // To another host: a device may be promiscuous. Where XDP only rewrites, the kernel drops it.
            if way.backend != Backend::Xdp {
                let other = packet.clone().macs([2; 6], CLIENT);
                way.check_untouched("another host", &other.bytes());
            }
            let mut broken = bytes.clone();
            broken[14] = broken[14] & 0xf0 | 4;
            if !r.from.is_ipv6() {
                way.check_untouched("header too short", &broken);
            }
            // Within the fixed part of a header. BPF_PROG_RUN takes no such packets for tcx.
            let l4 = bytes.len() - packet.ip.l4.len();
            let fixed = if r.proto == Proto::Tcp { 20 } else { 8 };
            for len in if way.forward.1 == DeviceHook::Xdp {
                14..l4 + fixed
            } else {
                0..0
            } {
                way.check_untouched("cut off", &bytes[..len]);
            }
        }
    });
}

/// What XDP cannot do right goes on untouched, and tcx does it.
#[test]
fn the_slow_way_takes_over() {
    in_netns(|| {
        let router = Router::new();
        install_all(&rules(), &router.plan(Backend::XdpRedirect, None));
        let (xdp, tcx) = (&WAYS[3], &WAYS[0]);
        for r in rules() {
            let (packet, src, dst) = forward(&r, 40_005);
            let last = packet.clone().ttl(1);
            xdp.check_untouched("lifetime over", &last.bytes());
            tcx.check_forward("lifetime over", &last, src, dst);
            let (answer, ..) = reply(&r, 40_005);
            let bytes = answer.clone().ttl(1).bytes();
            expect(
                "reply, lifetime over",
                run(DeviceHook::Xdp, "s0", &bytes),
                XDP_PASS,
                &bytes,
            );
        }
        ip("link set s0 mtu 1300");
        for r in rules() {
            let (mut packet, src, dst) = forward(&r, 40_006);
            packet.ip.l4.resize(1400, 1);
            xdp.check_untouched("too big", &packet.bytes());
            tcx.check_forward("too big", &packet, src, dst);
        }
        ip("neigh del 10.0.1.2 dev s0");
        ip("neigh del fd01::2 dev s0");
        for r in rules() {
            let (packet, src, dst) = forward(&r, 40_007);
            xdp.check_untouched("no neighbour", &packet.bytes());
            tcx.check_forward("no neighbour", &packet, src, dst);
        }
    });
}

/// Two rules, one target: what one client sends by both from the same port must come back apart.
#[test]
fn rules_that_share_a_target_are_told_apart() {
    each_way(|way| {
        for (id, first) in rules().into_iter().enumerate() {
            let proto = first.proto;
            let second = rule(proto, first.from.is_ipv6(), 1);
            install(10 + id as u32, &second, &in_kernel_plan(way.backend)).unwrap();
            let (packet, src, dst) = forward(&first, 40_008);
            way.check_forward("the first keeps its port", &packet, src, dst);

            let (packet, client, _) = forward(&second, 40_008);
            let (dev, hook, action) = way.forward;
            let got = run_fast(hook, dev, &packet.bytes(), action);
            assert_eq!(got.action, action);
            let l4 = got.packet.len() - packet.ip.l4.len();
            let port = u16::from_be_bytes([got.packet[l4], got.packet[l4 + 1]]);
            assert!((61_000..=65_535).contains(&port), "port {port}");
            let new_src = SocketAddr::new(client.ip(), port);
            way.check_forward("the second gets another", &packet, new_src, second.to);

            let answer = Packet::new(proto.number(), second.to, new_src, 9).macs(S0, TARGET);
            way.check_reply("to the second", &answer, second.from, client);
            let (answer, src, dst) = reply(&first, 40_008);
            way.check_reply("to the first", &answer, src, dst);
        }
    });
}

/// The plan of [`each_way`]'s namespace.
fn in_kernel_plan(backend: Backend) -> Plan {
    let device = |name: &str| RuleDevice {
        ifindex: crate::bpf::ifindex(name),
        name: name.to_owned(),
        peer: true,
    };
    Plan {
        backend,
        client_dev: Some(device("c0")),
        target_dev: Some(device("s0")),
        snat: None,
        fixes: vec![],
    }
}

#[test]
fn with_source_nat_the_target_sees_this_host() {
    for backend in [Backend::Tcx, Backend::TcxPeer, Backend::XdpRedirect] {
        in_netns(move || {
            let router = Router::new();
            for (id, r) in rules().into_iter().enumerate() {
                let own = if r.from.is_ipv6() {
                    "fd01::1"
                } else {
                    "10.0.1.1"
                }
                .parse()
                .unwrap();
                let mut plan = router.plan(backend, Some(own));
                install(id as u32, &r, &plan).unwrap();
                let hook = match backend {
                    Backend::XdpRedirect => DeviceHook::Xdp,
                    _ => DeviceHook::TcxIngress,
                };
                let action = if hook == DeviceHook::Xdp {
                    XDP_REDIRECT
                } else {
                    REDIRECT
                };
                let (packet, client, _) = forward(&r, 40_009);
                let got = run_fast(hook, "c0", &packet.bytes(), action);
                let l4 = got.packet.len() - packet.ip.l4.len();
                let port = u16::from_be_bytes([got.packet[l4], got.packet[l4 + 1]]);
                assert!((61_000..=65_535).contains(&port), "port {port}");
                let new_src = SocketAddr::new(own, port);
                let mut want = packet.rewritten(new_src, r.to).ttl(63);
                if hook == DeviceHook::Xdp {
                    want = want.macs(TARGET, S0);
                }
                expect(&format!("{backend} {r}"), got, action, &want.bytes());

                let answer = Packet::new(r.proto.number(), r.to, new_src, 9).macs(S0, TARGET);
                let mut want = answer.rewritten(r.from, client).ttl(63);
                if hook == DeviceHook::Xdp {
                    want = want.macs(CLIENT, C0);
                }
                let got = run_fast(hook, "s0", &answer.bytes(), action);
                expect(&format!("{backend} {r}, reply"), got, action, &want.bytes());
                if hook == DeviceHook::Xdp {
                    // What tcx has done in between (no neighbour was known) leaves nothing wrong.
                    let through_tcx = run(DeviceHook::TcxIngress, "c0", &packet.bytes());
                    assert_eq!(through_tcx.action, REDIRECT);
                    std::thread::sleep(std::time::Duration::from_millis(300));
                    run(DeviceHook::TcxIngress, "c0", &packet.bytes());
                    let got = run_fast(hook, "c0", &packet.bytes(), action);
                    let want = packet.rewritten(new_src, r.to).ttl(63).macs(TARGET, S0);
                    expect(
                        &format!("{backend} {r}, after tcx"),
                        got,
                        action,
                        &want.bytes(),
                    );
                }
                if hook == DeviceHook::TcxIngress {
                    let last = packet.ttl(1);
                    assert_eq!(run(hook, "c0", &last.bytes()).action, 2, "TC_ACT_SHOT");
                    assert_eq!(stats(&[id as u32]).unwrap()[0].drops["ttl"], 1);
                }
                plan.backend = Backend::Xdp;
                let refused = install(100, &rule(r.proto, false, 9), &plan).unwrap_err();
                assert!(refused.to_string().contains("source address"), "{refused}");
            }
        });
    }
}

#[test]
fn a_rule_that_is_gone_redirects_nothing_and_leaves_nothing() {
    each_way(|way| {
        let plan = in_kernel_plan(way.backend);
        for (id, r) in rules().into_iter().enumerate() {
            let (packet, src, dst) = forward(&r, 40_010);
            way.check_forward("before", &packet, src, dst);
            let again = install(99, &r, &plan).unwrap_err();
            assert!(again.to_string().contains("another rule"), "{again:#}");
            remove(id as u32, &r, &plan).unwrap();
            if id < 3 {
                way.check_untouched("after", &packet.bytes());
            }
        }
        for dev in ["c0", "s0"] {
            for hook in DeviceHook::ALL {
                assert!(program(hook, dev).is_none(), "{hook:?} of {dev}");
            }
        }
        assert_eq!(stats(&[0]).unwrap(), vec![]);
    });
}

#[test]
fn the_log_has_a_line_for_a_packet_and_no_more_than_asked_for() {
    in_netns(|| {
        let router = Router::new();
        let plan = router.plan(Backend::Tcx, None);
        let mut r = rule(Proto::Udp, false, 0);
        r.log = Some(2);
        install(7, &r, &plan).unwrap();
        install(8, &rule(Proto::Tcp, true, 0), &plan).unwrap();
        let (packet, ..) = forward(&r, 10_004);
        let (answer, ..) = reply(&r, 10_004);
        // In one second of the clock that the program reads.
        while mountain::bpf::now_ns() % 1_000_000_000 > 500_000_000 {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        run(DeviceHook::TcxIngress, "c0", &packet.bytes());
        run(DeviceHook::TcxEgress, "c0", &answer.bytes());
        run(DeviceHook::TcxIngress, "c0", &packet.bytes());
        let (quiet, ..) = forward(&rule(Proto::Tcp, true, 0), 10_004);
        run(DeviceHook::TcxIngress, "c0", &quiet.bytes());
        let mut lines = vec![];
        read_log(true, |line| {
            lines.push(line.to_owned());
            lines.len() < 2
        })
        .unwrap();
        assert_eq!(
            lines,
            [
                "FORWARD UDP 10.0.8.18:10004 > 10.0.8.17:8080 => 10.0.1.2:8083",
                "REPLY UDP 10.0.1.2:8083 > 10.0.8.18:10004 => 10.0.8.17:8080",
            ]
        );
        // There is no third: the reader ends with the rules.
        remove(7, &r, &plan).unwrap();
        remove(8, &rule(Proto::Tcp, true, 0), &plan).unwrap();
        assert!(read_log(false, |line| panic!("{line}")).is_err());
    });
}

/// A connection begins with its SYN. One that was under way before the rule stays where it is, but half
/// of a redirected one that was lost is found again.
#[test]
fn tcp_connections_under_way_stay_where_they_are() {
    each_way(|way| {
        for r in rules().into_iter().filter(|r| r.proto == Proto::Tcp) {
            let (syn, src, dst) = forward(&r, 40_020);
            let later = with_flags(&syn, packets_of::ACK);
            let ours = connecting(r.from, src);
            way.check_untouched("under way", &later.bytes());
            drop(ours);
            let syn_ack = with_flags(&syn, packets_of::SYN | packets_of::ACK);
            way.check_untouched(
                "the second packet of one that the client accepts",
                &syn_ack.bytes(),
            );
            way.check_forward("a new one", &syn, src, dst);
            way.check_forward("its next packet", &later, src, dst);
            let map = if r.from.is_ipv6() { "half6" } else { "half4" };
            let flows = map_named(map);
            let forward_key: Vec<Vec<u8>> = flows
                .keys()
                .filter(|k| {
                    k.ends_with(&[6, 0, 0, 0])
                        && k[..].windows(2).any(|w| w == 8080u16.to_be_bytes())
                })
                .collect();
            assert!(!forward_key.is_empty());
            for key in forward_key {
                flows.delete(&key).unwrap();
            }
            way.check_forward("with this half lost", &later, src, dst);
        }
    });
}

/// A flow that was lost is made again from the midst of it, unless it may be somebody else's: a socket's
/// of this host, or one that passes through it.
#[test]
fn a_lost_connection_is_taken_up_again_where_it_can_be_no_other() {
    each_way(|way| {
        let plan = in_kernel_plan(way.backend);
        for (id, r) in rules().into_iter().enumerate() {
            if r.proto != Proto::Tcp {
                continue;
            }
            let (syn, src, dst) = forward(&r, 40_021);
            let later = with_flags(&syn, packets_of::ACK);
            let rst = with_flags(&syn, packets_of::ACK | 4);
            way.check_untouched("an RST", &rst.bytes());
            way.check_forward("sent to this host", &later, src, dst);
            let (answer, src, dst) = reply(&r, 40_021);
            let answer = with_flags(&answer, packets_of::ACK);
            way.check_reply("sent to this host", &answer, src, dst);

            let mut through = r.clone();
            let other = if r.from.is_ipv6() {
                "fd08::99"
            } else {
                "10.0.8.99"
            };
            through.from.set_ip(other.parse().unwrap());
            install(10 + id as u32, &through, &plan).unwrap();
            let (syn, src, dst) = forward(&through, 40_022);
            let later = with_flags(&syn, packets_of::ACK);
            way.check_untouched("sent through this host", &later.bytes());
            way.check_forward("sent through this host, a new one", &syn, src, dst);
        }
    });
}

/// A flow is established when the client has answered the target, and not before.
#[test]
fn what_nobody_has_answered_is_not_established() {
    each_way(|way| {
        for r in rules() {
            let (first, src, dst) = forward(&r, 40_023);
            let (answer, back_src, back_dst) = reply(&r, 40_023);
            let table = if r.from.is_ipv6() { "flows6" } else { "flows4" };
            let flows = map_named(table);
            let of_proto = || flows.keys().filter(|k| k[k.len() - 4] == r.proto.number());
            let (later, answer, forged) = if r.proto == Proto::Tcp {
                let answer = with_flags(&answer, packets_of::SYN | packets_of::ACK);
                let answer = with_numbers(&answer, 7000, 1);
                let ack = with_flags(&first, packets_of::ACK);
                let ack = |n| with_numbers(&ack, 1, n);
                (ack(7001), answer, vec![ack(7000), ack(7002), first.clone()])
            } else {
                (first.clone(), answer, vec![])
            };
            let what = r.to_string();
            for _ in 0..3 {
                way.check_forward(&what, &first, src, dst);
                assert_eq!(of_proto().count(), 0, "{} {r}: no answer", way.backend);
            }
            way.check_reply(&what, &answer, back_src, back_dst);
            for forged in forged {
                way.check_forward(&what, &forged, src, dst);
                assert_eq!(of_proto().count(), 0, "{} {r}: forged", way.backend);
            }
            way.check_forward(&what, &later, src, dst);
            assert_eq!(
                of_proto().count(),
                2,
                "{} {r}: both directions",
                way.backend
            );
            way.check_forward(&what, &later, src, dst);
            way.check_reply(&what, &answer, back_src, back_dst);
        }
    });
}

fn with_flags(packet: &Packet, flags: u8) -> Packet {
    let mut packet = packet.clone();
    packet.ip.l4[13] = flags;
    packet
}

fn with_numbers(packet: &Packet, seq: u32, ack: u32) -> Packet {
    let mut packet = packet.clone();
    packet.ip.l4[4..8].copy_from_slice(&seq.to_be_bytes());
    packet.ip.l4[8..12].copy_from_slice(&ack.to_be_bytes());
    packet
}

/// A socket of this host that has a connection from `local` to `remote`, begun at least.
fn connecting(local: SocketAddr, remote: SocketAddr) -> Socket {
    let socket = Socket::new(Domain::for_address(local), Type::STREAM, None).unwrap();
    socket.set_nonblocking(true).unwrap();
    socket.set_reuse_address(true).unwrap();
    socket.bind(&local.into()).unwrap();
    let refused = socket.connect(&remote.into()).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EINPROGRESS));
    socket
}
