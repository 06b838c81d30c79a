// SPDX-License-Identifier: GPL-2.0-or-later
//! What the steering program leaves alone although it understands it, through BPF_PROG_RUN: other
//! destinations, other ip rules' packets, what the other path cannot carry, no verdict.
//!
//! As in fixtures.rs a packet that is steered moves from u0 to u1.

use crate::rig::packets::*;
use crate::rig::{in_netns, only, rig_groups, rig_path, settings, Ctx, Rig, BOTH};
use mountain::bpf::{PathMasks as Masks, Sources, SteerMode, MAX_PERMITS};
use mountain::topology::FibRule;

#[test]
fn what_is_not_ours_passes() {
    in_netns(|| {
        let mut rig = Rig::new(&settings());
        let ip4 = || Ip::v4(UDP, udp(1, 2, 10));
        let ip6 = || Ip::v6(UDP, udp(1, 2, 10));
        let control = |rig: &Rig, what: &str| {
            assert_eq!(
                rig.send(0, &ip4().on(0)),
                1,
                "{what}: the control does not move"
            );
            assert_eq!(
                rig.send(0, &ip6().on(0)),
                1,
                "{what}: the control does not move"
            );
        };
        control(&rig, "start");
        let dest = [
            "224.0.0.251",
            "239.255.255.250",
            "255.255.255.255",
            "169.254.1.1",
            "127.0.0.1",
            "0.0.0.0",
            "ff02::fb",
            "ff0e::1",
            "fe80::1",
            "febf::1",
            "::1",
            "::",
        ];
        let with = |dst: &str| {
            if dst.contains(':') {
                ip6().to(dst)
            } else {
                ip4().to(dst)
            }
        };
        for dst in dest {
            let counted = rig.counted(|| assert_eq!(rig.send(0, &with(dst).on(0)), 0, "{dst}"));
            assert_eq!(counted, [("pass_dest", 1)], "{dst}");
        }
        // Just outside of those ranges.
        for dst in [
            "223.255.255.255",
            "240.0.0.1",
            "169.253.255.255",
            "128.0.0.1",
            "1.0.0.0",
            "fec0::1",
            "fe7f::1",
            "::2",
            "1::1",
        ] {
            assert_eq!(rig.send(0, &with(dst).on(0)), 1, "{dst}");
        }
        // Routes of their own, and their neighbours in the address space.
        for (dst, to) in [
            ("10.9.0.1", 0),
            ("10.9.255.255", 0),
            ("10.10.0.0", 1),
            ("10.8.255.255", 1),
            ("2001:db8:9::1", 0),
            ("2001:db8:9:ffff::1", 0),
            ("2001:db8:a::1", 1),
        ] {
            let counted = rig.counted(|| assert_eq!(rig.send(0, &with(dst).on(0)), to, "{dst}"));
            assert_eq!(counted.is_empty(), to == 0, "{dst}: {counted:?}");
        }
        // Sources that belong to one uplink, and their neighbours.
        for (ip, to) in [
            (ip4().from("10.0.0.77"), 0),
            (ip4().from("10.0.0.78"), 1),
            (ip6().from("2001:db8::77"), 0),
            (ip6().from("2001:db8::78"), 1),
        ] {
            let counted = rig.counted(|| assert_eq!(rig.send(0, &ip.on(0)), to, "{}", ip.src));
            assert_eq!(
                counted.contains(&("pass_uplink_bound", 1)),
                to == 0,
                "{counted:?}"
            );
        }
        // A next hop that is not the group's.
        let mut other = ip4().on(0);
        other[5] ^= 1;
        assert_eq!(rig.counted(|| assert_eq!(rig.send(0, &other), 0)), []);
        // u1's gateway seen on u0, and the other way round.
        assert_eq!(rig.send(0, &ip4().on(1)), 0);
        assert_eq!(rig.send(1, &ip4().on(0)), 1);
        // Neither IPv4 nor IPv6, tagged, or of a wrong version inside.
        let l3 = ip4().l3();
        let mut vlan = vec![0, 42, 8, 0];
        vlan.extend(&l3);
        for (ethertype, payload) in [
            (0x8100, &vlan[..]),
            (0x88a8, &vlan),
            (0x0806, &l3),
            (0x8847, &l3),
        ] {
            let packet = frame(MACS[0], ethertype, payload);
            let counted = rig.counted(|| assert_eq!(rig.send(0, &packet), 0));
            assert_eq!(counted, [], "{ethertype:#x}");
        }
        for version in [0u8, 5, 6, 15] {
            let mut packet = ip4().on(0);
            packet[14] = version << 4 | 5;
            let counted = rig.counted(|| assert_eq!(rig.send(0, &packet), 0));
            assert_eq!(counted, [("pass_parse", 1)], "version {version}");
        }
        for ihl in 0u8..5 {
            let mut packet = ip4().on(0);
            packet[14] = 0x40 | ihl;
            let counted = rig.counted(|| assert_eq!(rig.send(0, &packet), 0));
            assert_eq!(counted, [("pass_parse", 1)], "header of {ihl} words");
        }
        let mut packet = ip6().on(0);
        packet[14] = 0x40;
        assert_eq!(
            rig.counted(|| assert_eq!(rig.send(0, &packet), 0)),
            [("pass_parse", 1)]
        );
        control(&rig, "end");
        // Told to account only.
        rig.steer.set_mode(SteerMode::Pass, 0);
        assert_eq!(rig.counted(|| assert_eq!(rig.send(0, &ip4().on(0)), 0)), []);
    });
}

#[test]
fn ip_rules_keep_their_packets() {
    let base = FibRule::default;
    let udp4 = |sport, dport| Ip::v4(UDP, udp(sport, dport, 5));
    let ctx = |mark| Ctx {
        mark,
        ..Ctx::default()
    };
    // FibRule, then packets with mark and whether the rule (of another table) takes them.
    type Case = (&'static str, FibRule, Vec<(Ip, Ctx, bool)>);
    let cases: Vec<Case> = vec![
        (
            "mark",
            FibRule {
                fwmark: Some((0x51, !0)),
                ..base()
            },
            vec![
                (udp4(1, 2), ctx(0x51), true),
                (udp4(1, 2), ctx(0), false),
                (udp4(1, 2), ctx(0x151), false),
                (Ip::v6(UDP, udp(1, 2, 5)), ctx(0x51), false),
            ],
        ),
        (
            "mark with mask",
            FibRule {
                fwmark: Some((0xff01, 0xff)),
                ..base()
            },
            vec![
                (udp4(1, 2), ctx(0x701), true),
                (udp4(1, 2), ctx(0x702), false),
            ],
        ),
        (
            // wg-quick: not fwmark 0xca6c table 51820
            "not mark",
            FibRule {
                fwmark: Some((0xca6c, !0)),
                invert: true,
                ..base()
            },
            vec![
                (udp4(1, 2), ctx(0), true),
                (udp4(1, 2), ctx(0xca6c), false),
                (Ip::v6(UDP, udp(1, 2, 5)), ctx(0), false),
            ],
        ),
        (
            "source",
            FibRule {
                src: Some("10.0.0.0/30".parse().unwrap()),
                ..base()
            },
            vec![
                (udp4(1, 2), ctx(0), true),
                (udp4(1, 2).from("10.0.0.4"), ctx(0), false),
            ],
        ),
        (
            "IPv6 source",
            FibRule {
                src: Some("2001:db8::/127".parse().unwrap()),
                ipv6: true,
                ..base()
            },
            vec![
                (Ip::v6(UDP, udp(1, 2, 5)).from("2001:db8::1"), ctx(0), true),
                (Ip::v6(UDP, udp(1, 2, 5)), ctx(0), false),
                (udp4(1, 2), ctx(0), false),
            ],
        ),
        (
            "destination",
            FibRule {
                dst: Some("10.1.2.0/24".parse().unwrap()),
                ..base()
            },
            vec![
                (udp4(1, 2), ctx(0), true),
                (udp4(1, 2).to("10.1.3.0"), ctx(0), false),
            ],
        ),
        (
            "uid",
            FibRule {
                uid: Some((0, 10)),
                ..base()
            },
            vec![(udp4(1, 2), ctx(0), true)],
        ),
        (
            "uid of others",
            FibRule {
                uid: Some((1, u32::MAX)),
                ..base()
            },
            vec![(udp4(1, 2), ctx(0), false)],
        ),
        (
            "source ports",
            FibRule {
                sport: Some((1000, 2000)),
                ipproto: Some(UDP),
                ..base()
            },
            vec![
                (udp4(999, 2), ctx(0), false),
                (udp4(1000, 2), ctx(0), true),
                (udp4(2000, 2), ctx(0), true),
                (udp4(2001, 2), ctx(0), false),
                (Ip::v4(TCP, tcp(1500, 2, SYN, 0)), ctx(0), false),
            ],
        ),
        (
            "destination port",
            FibRule {
                dport: Some((853, 853)),
                ..base()
            },
            vec![
                (udp4(853, 854), ctx(0), false),
                (udp4(1, 853), ctx(0), true),
            ],
        ),
        (
            "protocol",
            FibRule {
                ipproto: Some(TCP),
                ..base()
            },
            vec![
                (Ip::v4(TCP, tcp(1, 2, SYN, 0)), ctx(0), true),
                (udp4(1, 2), ctx(0), false),
            ],
        ),
        (
            // The kernel compares the DSCP; the two ECN bits are TCP's own affair.
            "type of service",
            FibRule {
                tos: mountain::netlink::ds_field(0x10, false),
                ..base()
            },
            vec![
                (
                    Ip {
                        dsfield: 0x10,
                        ..udp4(1, 2)
                    },
                    ctx(0),
                    true,
                ),
                (
                    Ip {
                        dsfield: 0x12,
                        ..udp4(1, 2)
                    },
                    ctx(0),
                    true,
                ),
                (
                    // The three bits that once were the precedence do not count.
                    Ip {
                        dsfield: 0xb0,
                        ..udp4(1, 2)
                    },
                    ctx(0),
                    true,
                ),
                (
                    Ip {
                        dsfield: 0x08,
                        ..udp4(1, 2)
                    },
                    ctx(0),
                    false,
                ),
                (udp4(1, 2), ctx(0), false),
            ],
        ),
        (
            "ingress device",
            FibRule {
                iif: Some(77),
                ..base()
            },
            vec![
                (
                    udp4(1, 2),
                    Ctx {
                        ingress_ifindex: 77,
                        ..ctx(0)
                    },
                    true,
                ),
                (
                    udp4(1, 2),
                    Ctx {
                        ingress_ifindex: 78,
                        ..ctx(0)
                    },
                    false,
                ),
                (udp4(1, 2), ctx(0), false),
            ],
        ),
        (
            // To the kernel's rules, what the host itself sends came in by lo.
            "iif lo",
            FibRule {
                iif: Some(1),
                ..base()
            },
            vec![
                (udp4(1, 2), ctx(0), true),
                (
                    udp4(1, 2),
                    Ctx {
                        ingress_ifindex: 78,
                        ..ctx(0)
                    },
                    false,
                ),
            ],
        ),
    ];
    in_netns(move || {
        let mut rig = Rig::new(&settings());
        for (name, fib_rule, packets) in cases {
            rig.topology(&[
                FibRule {
                    fwmark: Some((0xdead, !0)),
                    ..base()
                },
                fib_rule,
            ]);
            rig.masks(only(1));
            for (ip, ctx, taken) in packets {
                rig.clear_flows();
                let counted = rig.counted(|| {
                    let to = rig.send_ctx(0, &ip.on(0), ctx);
                    assert_eq!(to, !taken as usize, "{name}: {ctx:?} {ip:?}");
                });
                assert_eq!(counted.contains(&("pass_fib_rule", 1)), taken, "{name}");
            }
        }
        // Gone again, all of them.
        rig.topology(&[]);
        rig.masks(only(1));
        let counted = rig.counted(|| {
            assert_eq!(
                rig.send_ctx(0, &Ip::v4(UDP, udp(1, 853, 5)).on(0), ctx(0xdead)),
                1
            );
        });
        assert!(counted.contains(&("redirected", 1)));
    });
}

#[test]
fn packets_that_do_not_fit_the_other_path_pass() {
    in_netns(|| {
        let mut rig = Rig::new(&settings());
        // A flow remembers its largest packet: each MTU is tried with flows of its own.
        let len = |n: usize, mtu: usize| Ip::v4(UDP, udp(mtu as u16, 2, n - 28)).on(0);
        let gso = |gso_size| Ctx {
            gso_segs: 2,
            gso_size,
            ..Ctx::default()
        };
        let try_all = |rig: &Rig, mtu: usize| {
            for (n, to) in [(mtu - 1, 1), (mtu, 1), (mtu + 1, 0)] {
                let counted =
                    rig.counted(|| assert_eq!(rig.send(0, &len(n, mtu)), to, "{n}/{mtu}"));
                assert_eq!(
                    counted.contains(&("pass_mtu", 1)),
                    to == 0,
                    "{n}/{mtu}: {counted:?}"
                );
            }
            // A GSO packet's segments count, with 20 + 32 (TCP) or 20 + 8 (UDP) of headers.
            let tcp = Ip::v4(TCP, tcp(mtu as u16, 2, SYN, 2 * mtu)).on(0);
            let udp = Ip::v4(UDP, udp(mtu as u16, 4, 2 * mtu)).on(0);
            for (packet, headers) in [(&tcp, 52), (&udp, 28)] {
                let fits = (mtu - headers) as u32;
                // UDP may be a tunnel, whose inner headers come on top.
                let to = (headers == 52 || mtu == 1500) as usize;
                assert_eq!(rig.send_ctx(0, packet, gso(fits)), to, "gso {fits}/{mtu}");
                assert_eq!(
                    rig.send_ctx(0, packet, gso(fits + 1)),
                    0,
                    "gso {}/{mtu}",
                    fits + 1
                );
            }
            let tcp6 = Ip::v6(TCP, crate::rig::packets::tcp(mtu as u16, 2, SYN, 2 * mtu)).on(0);
            assert_eq!(rig.send_ctx(0, &tcp6, gso(mtu as u32 - 72)), 1);
            assert_eq!(rig.send_ctx(0, &tcp6, gso(mtu as u32 - 71)), 0);
        };
        try_all(&rig, 1500);
        for id in [1, 3] {
            let path = mountain::bpf::ProgramPath {
                mtu: 1280,
                ..rig_path(id, rig.ifindex)
            };
            rig.steer.set_path(id, &path).unwrap();
        }
        try_all(&rig, 1280);
        // Headers inside a tunnel are not looked at: its GSO packets move only to an MTU
        // that is no smaller than the one they are on.
        let tunnel = Ip::v4(GRE, vec![0; 2500]).on(0);
        assert_eq!(rig.send_ctx(0, &tunnel, gso(1000)), 0);
        rig.steer.set_path(1, &rig_path(1, rig.ifindex)).unwrap();
        let other = Ip::v4(ESP, vec![0; 2500]).on(0);
        assert_eq!(rig.send_ctx(0, &other, gso(1000)), 1);
    });
}

#[test]
fn paths_that_cannot_take_the_packet_get_none() {
    in_netns(|| {
        let mut rig = Rig::new(&settings());
        let packet = Ip::v4(UDP, udp(1, 2, 30)).on(0);
        let good = rig_path(1, rig.ifindex);
        for (name, path) in [
            (
                "neighbour",
                mountain::bpf::ProgramPath {
                    mac: None,
                    ..good.clone()
                },
            ),
            (
                "not Ethernet",
                mountain::bpf::ProgramPath {
                    ethernet: false,
                    ..good.clone()
                },
            ),
        ] {
            assert_eq!(rig.send(0, &packet), 1, "{name}: the control does not move");
            rig.steer.set_path(1, &path).unwrap();
            let counted = rig.counted(|| assert_eq!(rig.send(0, &packet), 0, "{name}"));
            assert_eq!(counted, [("pass_neigh", 1)], "{name}");
            rig.steer.set_path(1, &good).unwrap();
            assert_eq!(rig.send(0, &packet), 1, "{name}: not again");
        }
        // From a device without Ethernet headers nothing moves either.
        let from = mountain::bpf::ProgramPath {
            ethernet: false,
            ..rig_path(0, rig.ifindex)
        };
        rig.steer.set_path(0, &from).unwrap();
        assert_eq!(rig.send(0, &packet), 0);
    });
}

#[test]
fn no_verdict_no_steering() {
    in_netns(|| {
        let mut rig = Rig::new(&settings());
        let packet = |port| Ip::v4(UDP, udp(port, 2, 30));
        rig.masks(Masks::default());
        for port in 0..50 {
            let counted = rig.counted(|| assert_eq!(rig.send(0, &packet(port).on(0)), 0));
            assert!(counted.contains(&("pass_no_path", 1)), "{counted:?}");
            assert_eq!(rig.send(1, &packet(port + 100).on(1)), 1);
        }
        // Eligible, but none of them alive: the same.
        rig.clear_flows();
        rig.masks(Masks { alive: 0, ..BOTH });
        for port in 0..50 {
            assert_eq!(rig.send(0, &packet(port).on(0)), 0, "sent to a dead path");
            assert_eq!(
                rig.send(1, &packet(port + 100).on(1)),
                1,
                "sent to a dead path"
            );
        }
        // Only the living one of two eligible.
        rig.clear_flows();
        rig.masks(Masks {
            alive: 0b10,
            ..BOTH
        });
        for port in 0..50 {
            assert_eq!(rig.send(0, &packet(port).on(0)), 1, "stays on a dead path");
        }
    });
}

#[test]
fn a_source_moves_once_it_is_known_to_be_movable() {
    in_netns(|| {
        let mut rig = Rig::new(&settings());
        let groups = rig_groups();
        let none = Sources::default();
        rig.steer.set_topology(&groups, &[], &[], &none).unwrap();
        rig.masks(only(1));
        let now = mountain::bpf::now_ns;
        // Of IPv4 and IPv6 addresses whose bytes are the same, each stands for itself.
        for v6 in [false, true] {
            let packet = |port| {
                let mut ip = Ip::new(v6, UDP, udp(port, 2, 30));
                ip.src = match v6 {
                    false => "10.1.2.3".parse().unwrap(),
                    true => "a01:203::".parse().unwrap(),
                };
                (ip.src, ip.on(0))
            };
            let (source, first) = packet(1);
            let counted = rig.counted(|| assert_eq!(rig.send(0, &first), 0, "not known"));
            assert_eq!(counted, [("pass_source", 1)]);
            assert_eq!(rig.send(0, &first), 0);
            assert_eq!(rig.steer.asked(), [source], "asked about once");
            assert!(rig.steer.asked().is_empty());
            assert!(rig.flows().is_empty(), "{:?}", rig.flows());

            // Where the path will do, flows of one that was just let off stay for a while.
            rig.masks(BOTH);
            rig.steer.permit(source, now()).unwrap();
            let counted = rig.counted(|| assert_eq!(rig.send(0, &first), 0));
            assert_eq!(counted, [("flow_adopted", 1), ("flow_new", 1)]);
            rig.masks(only(1));
            rig.steer.permit(source, 0).unwrap();
            assert_eq!(rig.send(0, &packet(2).1), 1);
            assert!(rig.steer.asked().is_empty());

            rig.steer.forbid(source);
            rig.clear_flows();
            assert_eq!(rig.send(0, &packet(2).1), 0);
            assert_eq!(rig.steer.asked(), [source]);
        }
    });
}

#[test]
fn forged_sources_cost_others_their_moves_but_never_their_uplink() {
    in_netns(|| {
        let mut rig = Rig::new(&settings());
        let (groups, none) = (rig_groups(), Sources::default());
        rig.steer.set_topology(&groups, &[], &[], &none).unwrap();
        rig.masks(only(1));
        let from = |n: u32| {
            let mut ip = Ip::v4(UDP, udp(1, 2, 30));
            ip.src = std::net::Ipv4Addr::from(0x0b00_0000 + n).into();
            ip.on(0)
        };
        for n in 0..3_000 {
            assert_eq!(rig.send(0, &from(n)), 0, "source {n}");
        }
        assert_eq!(rig.steer.asked().len(), 256, "bounded");
        // As many permissions as there may be, and one more.
        let source = |n: u32| std::net::Ipv4Addr::from(0x0b00_0000 + n).into();
        for n in 0..MAX_PERMITS as u32 {
            rig.steer.permit(source(n), 0).unwrap();
        }
        assert!(rig.steer.permit(source(MAX_PERMITS as u32), 0).is_err());
        assert_eq!(rig.send(0, &from(0)), 1);
        assert_eq!(rig.send(0, &from(MAX_PERMITS as u32)), 0);
    });
}
