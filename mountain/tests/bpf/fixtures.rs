// SPDX-License-Identifier: GPL-2.0-or-later
//! What the steering program makes of every kind of packet, through BPF_PROG_RUN.
//!
//! In a fresh [`Rig`] only the paths by u1 are eligible: a packet that is steered and came by u0
//! is redirected to u1; one that is not stays on u0. `Rig::send` checks that no byte changes,
//! that redirect and handover note agree, that the second run passes, and the byte accounts.

use std::net::SocketAddr;

use crate::rig::packets::*;
use crate::rig::{in_netns, not_ours, only, rig_groups, settings, Ctx, Note, Rig, PASS, REDIRECT};
use mountain::bpf::flows::{Class, FlowKey};
use mountain::bpf::{PathMasks as Masks, Sources};
use mountain::topology::FibRule;

fn key(ip: &Ip, sport: u16, dport: u16, proto: u8) -> FlowKey {
    FlowKey {
        source: SocketAddr::new(ip.src, sport),
        destination: SocketAddr::new(ip.dst, dport),
        proto,
    }
}

/// Packets that are steered: name, packet, key of the flow, whether it counts as new to the table
/// in the middle of a connection.
fn steered() -> Vec<(String, Ip, FlowKey, bool)> {
    let mut list = vec![];
    for v6 in [false, true] {
        let mut add = |name: &str, ip: Ip, sport, dport, proto, midway| {
            let k = key(&ip, sport, dport, proto);
            list.push((
                format!("{name}, IPv{}", if v6 { 6 } else { 4 }),
                ip,
                k,
                midway,
            ));
        };
        let (icmp_proto, request, reply) = if v6 { (ICMPV6, 128, 129) } else { (ICMP, 8, 0) };
        let ip = |proto, l4| Ip::new(v6, proto, l4);
        add("UDP", ip(UDP, udp(4000, 53, 20)), 4000, 53, UDP, false);
        add(
            "UDP without payload",
            ip(UDP, udp(1, 65535, 0)),
            1,
            65535,
            UDP,
            false,
        );
        for proto in [UDPLITE, SCTP, DCCP] {
            add("ports first", ip(proto, udp(7, 8, 30)), 7, 8, proto, false);
        }
        add("SYN", ip(TCP, tcp(5000, 80, SYN, 0)), 5000, 80, TCP, false);
        add(
            "SYN ACK",
            ip(TCP, tcp(80, 5000, SYN | ACK, 0)),
            80,
            5000,
            TCP,
            false,
        );
        add(
            "ACK",
            ip(TCP, tcp(5001, 443, ACK, 100)),
            5001,
            443,
            TCP,
            true,
        );
        add("RST", ip(TCP, tcp(5002, 443, 4, 0)), 5002, 443, TCP, true);
        add(
            "echo",
            ip(icmp_proto, icmp(request, 77, b"x")),
            77u16,
            0,
            icmp_proto,
            false,
        );
        add(
            "echo reply",
            ip(icmp_proto, icmp(reply, 78, b"")),
            78,
            0,
            icmp_proto,
            false,
        );
        for proto in [GRE, ESP, IPIP, 41, 253] {
            add("tunnel", ip(proto, vec![0x45; 60]), 0, 0, proto, false);
        }
    }
    for words in [1, 4, 10] {
        let ip = Ip {
            options: vec![1; words * 4],
            ..Ip::v4(UDP, udp(10, 20, 5))
        };
        list.push((
            format!("{words} words of options"),
            ip.clone(),
            key(&ip, 10, 20, UDP),
            false,
        ));
    }
    let tcp6 = || Ip::v6(TCP, tcp(1234, 22, SYN, 0));
    let (six, fourteen) = (
        &[1, 4, 0, 0, 0, 0],
        &[1, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    );
    for (name, ip) in [
        ("hop-by-hop", tcp6().ext(HOPOPTS, six)),
        ("routing", tcp6().ext(ROUTING, fourteen)),
        ("destination options", tcp6().ext(DSTOPTS, fourteen)),
        ("atomic fragment", tcp6().ext(FRAGMENT, &[0, 0, 1, 2, 3, 4])),
        (
            "all of RFC 8200",
            tcp6()
                .ext(HOPOPTS, six)
                .ext(DSTOPTS, six)
                .ext(ROUTING, fourteen)
                .ext(FRAGMENT, &[0, 0, 1, 2, 3, 4])
                .ext(DSTOPTS, six),
        ),
    ] {
        let k = key(&ip, 1234, 22, TCP);
        list.push((format!("{name}, IPv6"), ip, k, false));
    }
    // More extension headers than any standard asks for: still steered, by addresses.
    let many = (0..7).fold(tcp6(), |ip, _| ip.ext(DSTOPTS, six));
    list.push((
        "seven extension headers".into(),
        many.clone(),
        key(&many, 0, 0, DSTOPTS),
        false,
    ));
    list
}

#[test]
fn packets_of_every_kind_are_steered() {
    in_netns(|| {
        let mut rig = Rig::new(&settings());
        for (name, ip, key, midway) in steered() {
            rig.clear_flows();
            let counted = rig.counted(|| {
                assert_eq!(rig.send(0, &ip.on(0)), 1, "{name}: not moved");
            });
            let mut want = vec![("flow_new", 1), ("redirected", 1)];
            if midway {
                want.insert(1, ("flow_untracked", 1));
            }
            assert_eq!(counted, want, "{name}");
            let flow = rig.flow();
            assert_eq!(flow.key, key, "{name}");
            let v6 = ip.src.is_ipv6() as usize;
            assert_eq!((flow.group, flow.path), (v6, 1 + 2 * v6), "{name}");
            assert_eq!((flow.class, flow.moves), (Class::Latency, 0), "{name}");
            // The next packet finds the flow; what is on its path already stays there.
            let counted = rig.counted(|| {
                assert_eq!(rig.send(0, &ip.on(0)), 1, "{name}");
                assert_eq!(rig.send(1, &ip.on(1)), 1, "{name}");
            });
            assert_eq!(counted, [("redirected", 1)], "{name}");
            assert_eq!(rig.flow().key, key, "{name}");
        }
        // The same packets, told to stay: the masks decide, not the packets.
        rig.masks(only(0));
        for (name, ip, _, _) in steered() {
            rig.clear_flows();
            assert_eq!(
                rig.send(0, &ip.on(0)),
                0,
                "{name}: moved though u0 is the path"
            );
            assert_eq!(rig.send(1, &ip.on(1)), 0, "{name}: not moved back");
        }
    });
}

#[test]
fn the_note_tells_the_second_run() {
    in_netns(|| {
        let rig = Rig::new(&settings());
        let packet = Ip::v4(UDP, udp(1, 2, 30)).on(0);
        let note = Note {
            ifindex: rig.ifindex[1],
            len: packet.len() as u32,
            path: 1,
        };
        let first = rig.run(0, &packet, Ctx::default());
        assert_eq!((first.action, first.note), (REDIRECT, Some(note)));
        // A stranger in between, on the same CPU: takes the stale note away, and is judged
        // by itself.
        let longer = Ip::v4(UDP, udp(1, 2, 31)).on(0);
        let second = rig.run(0, &longer, Ctx::default());
        let fresh = Note {
            len: longer.len() as u32,
            ..note
        };
        assert_eq!((second.action, second.note), (REDIRECT, Some(fresh)));
        rig.clear_note();

        // No note: arriving on u1 again is a first run, and passes since u1 is right.
        assert_eq!(rig.send(1, &Ip::v4(UDP, udp(1, 2, 30)).on(1)), 1);
    });
}

#[test]
fn a_second_run_never_redirects() {
    in_netns(|| {
        let mut rig = Rig::new(&settings());
        let packet = Ip::v4(UDP, udp(1, 2, 30)).on(0);
        assert_eq!(rig.run(0, &packet, Ctx::default()).action, REDIRECT);
        // The verdict turns round between the two runs: still no loop.
        rig.masks(Masks {
            ejected: 0b10,
            ..only(0)
        });
        let mut moved = packet.clone();
        moved[..6].copy_from_slice(&MACS[1]);
        let second = rig.run(1, &moved, Ctx::default());
        assert_eq!((second.action, second.note), (PASS, None));
        // As a first run the same packet would go back: the note made the difference.
        assert_eq!(rig.send(1, &moved), 0);
    });
}

#[test]
fn truncated_packets_pass() {
    in_netns(|| {
        let rig = Rig::new(&settings());
        let quoted = Ip {
            src: DST4,
            dst: SRC4,
            ..Ip::v4(UDP, udp(53, 4000, 0))
        }
        .l3();
        // Packet and the length from which it is understood.
        for (ip, enough) in [
            (Ip::v4(UDP, udp(1, 2, 8)), 14 + 20 + 4),
            (
                Ip {
                    options: vec![1; 12],
                    ..Ip::v4(UDP, udp(1, 2, 8))
                },
                14 + 32 + 4,
            ),
            (Ip::v4(TCP, tcp(1, 2, SYN, 8)), 14 + 20 + 20),
            (Ip::v4(ICMP, icmp(8, 9, b"abc")), 14 + 20 + 8),
            (Ip::v4(ICMP, icmp(3, 0, &quoted)), 14 + 20 + 8),
            (Ip::v4(ESP, vec![0; 20]), 14 + 20),
            (Ip::v6(UDP, udp(1, 2, 8)), 14 + 40 + 4),
            (Ip::v6(TCP, tcp(1, 2, SYN, 8)), 14 + 40 + 20),
            (Ip::v6(ICMPV6, icmp(128, 9, b"abc")), 14 + 40 + 8),
            (
                Ip::v6(UDP, udp(1, 2, 8)).ext(HOPOPTS, &[1, 4, 0, 0, 0, 0]),
                14 + 48 + 4,
            ),
            (
                Ip::v6(TCP, tcp(1, 2, SYN, 8))
                    .ext(ROUTING, &[0; 14])
                    .ext(FRAGMENT, &[0, 0, 0, 0, 0, 9]),
                14 + 40 + 16 + 8 + 20,
            ),
        ] {
            let whole = ip.on(0);
            let header = 14 + if ip.src.is_ipv6() { 40 } else { 20 };
            let mut run = 0;
            for len in 14..=whole.len() {
                rig.clear_flows();
                let mut out = vec![0; whole.len()];
                let one = crate::rig::prog_run(
                    &rig.steer,
                    rig.ifindex[0],
                    &whole[..len],
                    Ctx::default(),
                    1,
                    &mut out,
                );
                rig.clear_note();
                match one {
                    // The kernel runs no program on less than a network header.
                    Err(e) => assert!(len < header, "{len} of {ip:?}: {e}"),
                    Ok(_) => {
                        run += 1;
                        let counted = rig.counted(|| {
                            let to = rig.send(0, &whole[..len]);
                            assert_eq!(to, (len >= enough) as usize, "{len} bytes of {ip:?}");
                        });
                        let want = if len < enough {
                            "pass_parse"
                        } else {
                            "redirected"
                        };
                        assert!(counted.contains(&(want, 1)), "{len} of {ip:?}: {counted:?}");
                    }
                }
            }
            assert!(run > whole.len() - header, "only {run} lengths were tried");
        }
    });
}

/// The fragments of one datagram, on u0: the first with ports and more to come, then a later one.
fn fragments(v6: bool, id: u16, sport: u16) -> [Ip; 2] {
    let body = || udp(sport, 2, 16);
    if v6 {
        let id = [0xab, 0xcd, (id >> 8) as u8, id as u8];
        let ext = |off: u16| [&off.to_be_bytes()[..], &id].concat();
        [
            Ip::v6(UDP, body()).ext(FRAGMENT, &ext(1)),
            Ip::v6(UDP, vec![9; 24]).ext(FRAGMENT, &ext(24)),
        ]
    } else {
        [
            Ip {
                id,
                frag: 0x2000,
                ..Ip::v4(UDP, body())
            },
            Ip {
                id,
                frag: 3,
                ..Ip::v4(UDP, vec![9; 24])
            },
        ]
    }
}

#[test]
fn fragments_follow_the_first() {
    in_netns(|| {
        let mut rig = Rig::new(&settings());
        for v6 in [false, true] {
            rig.masks(only(1));
            let [first, later] = fragments(v6, 100, 1);
            assert_eq!(
                rig.send(0, &later.on(0)),
                0,
                "a later fragment without its first moved"
            );
            assert_eq!(rig.flows().len(), 0, "a later fragment made a flow");
            assert_eq!(rig.send(0, &first.on(0)), 1);
            assert_eq!(rig.flow().key, key(&first, 1, 2, UDP));
            assert_eq!(rig.send(0, &later.on(0)), 1, "did not follow");
            // The last one of three, and one that the kernel sent by u1.
            assert_eq!(rig.send(0, &later.on(0)), 1);
            assert_eq!(rig.send(1, &later.on(1)), 1);
            assert_eq!(rig.flows().len(), 1, "a later fragment made a flow");

            // Another datagram's id, and the same id between other addresses.
            assert_eq!(rig.send(0, &fragments(v6, 101, 1)[1].on(0)), 0);
            let from = if v6 { "2001:db8::3" } else { "10.0.0.3" };
            assert_eq!(rig.send(0, &later.clone().from(from).on(0)), 0);

            // They follow back as well; and stay together while the flow itself moves on.
            rig.masks(Masks {
                ejected: 0b10,
                ..only(0)
            });
            assert_eq!(rig.send(1, &later.on(1)), 1, "torn from its datagram");
            let [first, later] = fragments(v6, 102, 1);
            assert_eq!(rig.send(1, &first.on(1)), 0);
            assert_eq!(rig.send(1, &later.on(1)), 0);
            rig.clear_flows();
        }
        // IPv4 ids are per protocol (RFC 791).
        rig.masks(only(1));
        let [first, later] = fragments(false, 200, 1);
        assert_eq!(rig.send(0, &first.on(0)), 1);
        assert_eq!(
            rig.send(
                0,
                &Ip {
                    proto: TCP,
                    ..later
                }
                .on(0)
            ),
            0
        );
        // The first fragment of what is not ours leaves nothing to follow.
        let [first, later] = fragments(false, 201, 1).map(|f| f.to("10.9.0.1"));
        assert_eq!(rig.send(0, &first.on(0)), 0);
        assert_eq!(rig.send(0, &later.on(0)), 0);
    });
}

#[test]
fn fragments_follow_nothing_that_no_longer_holds() {
    in_netns(|| {
        let mut rig = Rig::new(&settings());
        // Only named sources and permitted ones move.
        let sources = Sources::default();
        let steered = |rig: &mut Rig| {
            rig.steer
                .set_topology(&rig_groups(), &not_ours(), &[], &sources)
                .unwrap();
            rig.masks(only(1));
        };
        for v6 in [false, true] {
            let [first, later] = fragments(v6, 300, 1);
            let follows = |rig: &Rig, mark: u32| {
                let ctx = Ctx {
                    mark,
                    ..Ctx::default()
                };
                rig.send_ctx(0, &later.on(0), ctx) == 1
            };
            let begin = |rig: &mut Rig| {
                rig.steer.permit(first.src, 0).unwrap();
                assert_eq!(rig.send(0, &first.on(0)), 1);
                assert!(follows(rig, 0));
            };
            steered(&mut rig);
            begin(&mut rig);
            rig.steer.forbid(first.src);
            assert!(!follows(&rig, 0), "its source has to stay by now");

            begin(&mut rig);
            steered(&mut rig);
            assert!(!follows(&rig, 0), "the paths are others by now");

            let rule = FibRule {
                fwmark: Some((0x51, !0)),
                ipv6: v6,
                ..FibRule::default()
            };
            rig.steer
                .set_topology(&rig_groups(), &not_ours(), &[rule], &sources)
                .unwrap();
            rig.masks(only(1));
            begin(&mut rig);
            assert!(!follows(&rig, 0x51), "an ip rule sent it here");
        }
    });
}

/// An ICMP error from `ip`'s destination's side about a packet of the flow that comes in.
fn error(flow: &Ip, kind: u8, quoted_l4: usize) -> Ip {
    let v6 = flow.src.is_ipv6();
    let mut l4 = flow.l4.clone();
    // The packet that came in: addresses and ports swapped.
    l4[..4].rotate_left(2);
    l4.truncate(quoted_l4);
    let quoted = Ip {
        src: flow.dst,
        dst: flow.src,
        l4,
        ..flow.clone()
    }
    .l3();
    let proto = if v6 { ICMPV6 } else { ICMP };
    Ip {
        proto,
        l4: icmp(kind, 0, &quoted),
        ext: vec![],
        options: vec![],
        frag: 0,
        ..flow.clone()
    }
}

#[test]
fn icmp_errors_follow_the_flow_they_are_about() {
    in_netns(|| {
        let mut rig = Rig::new(&settings());
        for v6 in [false, true] {
            let kinds: &[u8] = if v6 {
                &[1, 2, 3, 4]
            } else {
                &[3, 4, 5, 11, 12]
            };
            for flow in [
                Ip::new(v6, UDP, udp(40, 50, 9)),
                Ip::new(v6, TCP, tcp(41, 51, SYN, 0)),
            ] {
                rig.clear_flows();
                rig.masks(only(1));
                assert_eq!(rig.send(0, &flow.on(0)), 1);
                // From now on new flows stay on u0; the flow has had no gap and stays on u1.
                rig.masks(Masks {
                    ejected: 0,
                    ..only(0)
                });
                rig.steer.set_delays(1 + 2 * v6 as usize, 10_000_000, 0);
                for &kind in kinds {
                    assert_eq!(rig.send(0, &error(&flow, kind, 8).on(0)), 1, "type {kind}");
                }
                assert_eq!(rig.flows().len(), 1, "an error made a flow");
                assert_eq!(rig.flow().moves, 0);
                // Control: not an error, too little quoted, about another flow.
                let stays = [
                    Ip {
                        l4: icmp(if v6 { 128 } else { 13 }, 0, &[]),
                        ..error(&flow, 3, 8)
                    },
                    error(&flow, kinds[0], 3),
                    error(
                        &Ip {
                            l4: udp(42, 50, 9),
                            ..flow.clone()
                        },
                        kinds[0],
                        8,
                    ),
                ];
                for ip in stays {
                    assert_eq!(rig.send(0, &ip.on(0)), 0, "{ip:?}");
                    assert_eq!(rig.send(1, &ip.on(1)), 0, "{ip:?}");
                }
            }
        }
    });
}

#[test]
fn icmp_errors_are_judged_by_their_own_header() {
    in_netns(|| {
        let mut rig = Rig::new(&settings());
        for v6 in [false, true] {
            let flow = Ip::new(v6, UDP, udp(40, 50, 9));
            let kind = if v6 { 1 } else { 3 };
            let (pinned, other) = if v6 {
                ("2001:db8::77", "2001:db8:5::5")
            } else {
                ("10.0.0.77", "10.5.5.5")
            };
            rig.topology(&[]);
            rig.masks(only(1));
            assert_eq!(rig.send(0, &flow.on(0)), 1);
            assert_eq!(
                rig.send(0, &error(&flow, kind, 8).on(0)),
                1,
                "the control stays"
            );
            // A router on the way answers from another address: that is fine.
            let source = if v6 { "2001:db8::99" } else { "10.0.0.99" };
            assert_eq!(rig.send(0, &error(&flow, kind, 8).from(source).on(0)), 1);
            // ... unless that address belongs to the uplink.
            let counted = rig.counted(|| {
                assert_eq!(rig.send(0, &error(&flow, kind, 8).from(pinned).on(0)), 0);
            });
            assert_eq!(counted, [("pass_uplink_bound", 1)]);
            // Quoting a flow with somebody else than the one the error goes to is a forgery.
            rig.masks(only(0));
            rig.steer.set_delays(1 + 2 * v6 as usize, 10_000_000, 0);
            assert_eq!(
                rig.send(0, &error(&flow, kind, 8).on(0)),
                1,
                "the control stays"
            );
            assert_eq!(rig.send(0, &error(&flow, kind, 8).to(other).on(0)), 0);
            // Rules and special destinations look at the packet, not at what it quotes.
            let rule = |ipproto| FibRule {
                ipproto: Some(ipproto),
                ipv6: v6,
                ..Default::default()
            };
            rig.topology(&[rule(if v6 { ICMPV6 } else { ICMP })]);
            rig.masks(only(1));
            assert_eq!(
                rig.send(0, &error(&flow, kind, 8).on(0)),
                0,
                "a rule for ICMP"
            );
            assert_eq!(rig.send(0, &flow.on(0)), 1, "a rule for ICMP");
            rig.topology(&[rule(UDP)]);
            rig.masks(only(1));
            assert_eq!(
                rig.send(0, &error(&flow, kind, 8).on(0)),
                1,
                "a rule for UDP"
            );
            // An error about a TCP connection is no sign of an evicted flow.
            let tcp = Ip::new(v6, TCP, tcp(1, 2, ACK, 0));
            let counted = rig.counted(|| assert_eq!(rig.send(0, &error(&tcp, kind, 8).on(0)), 1));
            assert_eq!(counted, [("redirected", 1)]);
        }
    });
}
