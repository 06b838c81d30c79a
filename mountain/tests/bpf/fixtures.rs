// SPDX-License-Identifier: GPL-2.0-or-later
//! What the steering program makes of every kind of packet, through BPF_PROG_RUN.
//!
//! In a fresh [`Rig`] only the paths by u1 are eligible: a packet that is steered and came by u0
//! is redirected to u1; one that is not stays on u0. `Rig::send` checks that no byte changes,
//! that redirect and handover note agree, that the second run passes, and the byte accounts.

use crate::rig::packets::*;
use crate::rig::{
    ejected, fib_rule, not_ours, only, prog_run, rig_groups, settings, with_rig, Ctx, Note, Rig,
    PASS, PLAIN, REDIRECT,
};
use mountain::bpf::flows::{Class, FlowKey};
use mountain::bpf::Sources;
use mountain::topology::FibRule;

/// Packets that are steered, with a name, the key of their flow, and whether they count as of a connection whose
/// beginning the table has not seen.
fn steered() -> Vec<(&'static str, Ip, FlowKey, bool)> {
    let mut list = vec![];
    let mut add = |name, ip: Ip, (sport, dport), midway| {
        let key = ip.key(sport, dport);
        list.push((name, ip, key, midway));
    };
    for v6 in [false, true] {
        let ip = |proto, l4| Ip::new(v6, proto, l4);
        add("UDP", ip(UDP, udp(4000, 53, 20)), (4000, 53), false);
        add("empty UDP", ip(UDP, udp(1, 65535, 0)), (1, 65535), false);
        for proto in [UDPLITE, SCTP, DCCP] {
            add("ports first", ip(proto, udp(7, 8, 30)), (7, 8), false);
        }
        for (name, dport, flags, midway) in [
            ("SYN", 80, SYN, false),
            ("SYN ACK", 5000, SYN | ACK, false),
            ("ACK", 443, ACK, true),
            ("RST", 443, 4, true),
        ] {
            let packet = ip(TCP, tcp(5000, dport, flags, 100));
            add(name, packet, (5000, dport), midway);
        }
        let (proto, request, reply) = if v6 { (ICMPV6, 128, 129) } else { (ICMP, 8, 0) };
        add("echo", ip(proto, icmp(request, 77, b"x")), (77, 0), false);
        add(
            "echo reply",
            ip(proto, icmp(reply, 78, b"")),
            (78, 0),
            false,
        );
        for proto in [GRE, ESP, IPIP, 41, 253] {
            add("tunnel", ip(proto, vec![0x45; 60]), (0, 0), false);
        }
    }
    for words in [1, 4, 10] {
        let ip = Ip::v4(UDP, udp(10, 20, 5)).with(|ip| ip.options = vec![1; words * 4]);
        add("options", ip, (10, 20), false);
    }
    let tcp6 = || Ip::v6(TCP, tcp(1234, 22, SYN, 0));
    let (six, fourteen) = (&[1, 4, 0, 0, 0, 0], &[&[1, 12][..], &[0; 12]].concat());
    let whole = &[0, 0, 1, 2, 3, 4];
    let all = tcp6().ext(HOPOPTS, six).ext(DSTOPTS, six);
    let all = all.ext(ROUTING, fourteen).ext(FRAGMENT, whole);
    for (name, ip) in [
        ("hop-by-hop", tcp6().ext(HOPOPTS, six)),
        ("routing", tcp6().ext(ROUTING, fourteen)),
        ("destination options", tcp6().ext(DSTOPTS, fourteen)),
        ("atomic fragment", tcp6().ext(FRAGMENT, whole)),
        ("all of RFC 8200", all.ext(DSTOPTS, six)),
    ] {
        add(name, ip, (1234, 22), false);
    }
    // More extension headers than any standard asks for: still steered, by addresses.
    let many = (0..7).fold(tcp6(), |ip, _| ip.ext(DSTOPTS, six));
    add("seven extension headers", many, (0, 0), false);
    list.last_mut().unwrap().2.proto = DSTOPTS;
    list
}

#[test]
fn packets_of_every_kind_are_steered() {
    with_rig(settings(), |mut rig| {
        for (name, ip, key, midway) in steered() {
            rig.clear_flows();
            let counted: &[&str] = match midway {
                false => &["flow_new", "redirected"],
                true => &["flow_new", "flow_untracked", "redirected"],
            };
            rig.expect(&ip.on(0), 1, counted);
            let flow = rig.flow();
            assert_eq!(flow.key, key, "{name}");
            let v6 = ip.src.is_ipv6() as usize;
            assert_eq!((flow.group, flow.path), (v6, 1 + 2 * v6), "{name}");
            assert_eq!((flow.class, flow.moves), (Class::Latency, 0), "{name}");
            // The next packet finds the flow; what is on its path already stays there.
            rig.expect(&ip.on(0), 1, &["redirected"]);
            let counted = rig.counted(|| assert_eq!(rig.send_ip(1, &ip), 1, "{name}"));
            assert_eq!(counted, [], "{name}");
            assert_eq!(rig.flow().key, key, "{name}");
        }
        // The same packets, told to stay: the masks decide, not the packets.
        rig.masks(only(0));
        for (name, ip, ..) in steered() {
            rig.clear_flows();
            assert_eq!([rig.send_ip(0, &ip), rig.send_ip(1, &ip)], [0, 0], "{name}");
        }
    });
}

#[test]
fn the_note_tells_the_second_run_which_never_redirects() {
    with_rig(settings(), |mut rig| {
        let packet = Ip::v4(UDP, udp(1, 2, 30)).on(0);
        let note = Note {
            ifindex: rig.ifindex[1],
            len: packet.len() as u32,
            path: 1,
        };
        let first = rig.run(0, &packet, PLAIN);
        assert_eq!((first.action, first.note), (REDIRECT, Some(note)));
        // A stranger in between, on the same CPU: takes the stale note away, and is judged
        // by itself.
        let longer = Ip::v4(UDP, udp(1, 2, 31)).on(0);
        let second = rig.run(0, &longer, PLAIN);
        let fresh = Note {
            len: longer.len() as u32,
            ..note
        };
        assert_eq!((second.action, second.note), (REDIRECT, Some(fresh)));
        rig.clear_note();

        // No note: arriving on u1 again is a first run, and passes since u1 is right.
        assert_eq!(rig.send(1, &Ip::v4(UDP, udp(1, 2, 30)).on(1)), 1);

        assert_eq!(rig.run(0, &packet, PLAIN).action, REDIRECT);
        // The verdict turns round between the two runs: still no loop.
        rig.masks(ejected(0b10, only(0)));
        let mut moved = packet.clone();
        moved[..6].copy_from_slice(&MACS[1]);
        let second = rig.run(1, &moved, PLAIN);
        assert_eq!((second.action, second.note), (PASS, None));
        // As a first run the same packet would go back: the note made the difference.
        assert_eq!(rig.send(1, &moved), 0);
    });
}

#[test]
fn truncated_packets_pass() {
    with_rig(settings(), |rig| {
        let quoted = Ip::v4(UDP, udp(53, 4000, 0)).with(|ip| (ip.src, ip.dst) = (DST4, SRC4));
        let options = Ip::v4(UDP, udp(1, 2, 8)).with(|ip| ip.options = vec![1; 12]);
        let udp6 = || Ip::v6(UDP, udp(1, 2, 8));
        let tcp6 = || Ip::v6(TCP, tcp(1, 2, SYN, 8));
        let later = tcp6()
            .ext(ROUTING, &[0; 14])
            .ext(FRAGMENT, &[0, 0, 0, 0, 0, 9]);
        // Packet and the length from which it is understood.
        for (ip, enough) in [
            (Ip::v4(UDP, udp(1, 2, 8)), 14 + 20 + 4),
            (options, 14 + 32 + 4),
            (Ip::v4(TCP, tcp(1, 2, SYN, 8)), 14 + 20 + 20),
            (Ip::v4(ICMP, icmp(8, 9, b"abc")), 14 + 20 + 8),
            (Ip::v4(ICMP, icmp(3, 0, &quoted.l3())), 14 + 20 + 8),
            (Ip::v4(ESP, vec![0; 20]), 14 + 20),
            (udp6(), 14 + 40 + 4),
            (tcp6(), 14 + 40 + 20),
            (Ip::v6(ICMPV6, icmp(128, 9, b"abc")), 14 + 40 + 8),
            (udp6().ext(HOPOPTS, &[1, 4, 0, 0, 0, 0]), 14 + 48 + 4),
            (later, 14 + 40 + 16 + 8 + 20),
        ] {
            let whole = ip.on(0);
            let header = 14 + if ip.src.is_ipv6() { 40 } else { 20 };
            let mut run = 0;
            for len in 14..=whole.len() {
                let mut out = vec![0; whole.len()];
                let (short, u0) = (&whole[..len], rig.ifindex[0]);
                let one = prog_run(&rig.steer, u0, short, PLAIN, 1, &mut out);
                rig.clear_note();
                rig.clear_flows();
                match one {
                    // The kernel runs no program on less than a network header.
                    Err(e) => assert!(len < header, "{len} of {ip:?}: {e}"),
                    Ok(_) => {
                        run += 1;
                        let (to, counter) = match len < enough {
                            true => (0, "pass_parse"),
                            false => (1, "redirected"),
                        };
                        let what = format!("{len} bytes of {ip:?}");
                        let counted = rig.counted(|| assert_eq!(rig.send(0, short), to, "{what}"));
                        assert!(counted.contains(&(counter, 1)), "{what}: {counted:?}");
                    }
                }
            }
            assert!(run > whole.len() - header, "only {run} lengths were tried");
        }
    });
}

/// The fragments of one datagram, on u0: the first with ports and more to come, then a later one.
fn fragments(v6: bool, id: u16, sport: u16) -> [Ip; 2] {
    let parts = [(udp(sport, 2, 16), 0, true), (vec![9; 24], 24, false)];
    parts.map(|(l4, at, more)| Ip::new(v6, UDP, l4).part(at, more, id))
}

#[test]
fn fragments_follow_the_first() {
    with_rig(settings(), |mut rig| {
        for v6 in [false, true] {
            rig.masks(only(1));
            let [first, later] = fragments(v6, 100, 1);
            assert_eq!(rig.send_ip(0, &later), 0, "moved without its first");
            assert_eq!(rig.flows().len(), 0, "a later fragment made a flow");
            assert_eq!(rig.send_ip(0, &first), 1);
            assert_eq!(rig.flow().key, first.key(1, 2));
            assert_eq!(rig.send_ip(0, &later), 1, "did not follow");
            // The last one of three, and one that the kernel sent by u1.
            assert_eq!(rig.send_ip(0, &later), 1);
            assert_eq!(rig.send_ip(1, &later), 1);
            assert_eq!(rig.flows().len(), 1, "a later fragment made a flow");

            // Another datagram's id, and the same id between other addresses.
            assert_eq!(rig.send_ip(0, &fragments(v6, 101, 1)[1]), 0);
            let from = if v6 { "2001:db8::3" } else { "10.0.0.3" };
            assert_eq!(rig.send_ip(0, &later.clone().from(from)), 0);

            // They follow back as well; and stay together while the flow itself moves on.
            rig.masks(ejected(0b10, only(0)));
            assert_eq!(rig.send_ip(1, &later), 1, "torn from its datagram");
            let [first, later] = fragments(v6, 102, 1);
            assert_eq!(rig.send_ip(1, &first), 0);
            assert_eq!(rig.send_ip(1, &later), 0);
            rig.clear_flows();
        }
        // IPv4 ids are per protocol (RFC 791).
        rig.masks(only(1));
        let [first, later] = fragments(false, 200, 1);
        assert_eq!(rig.send_ip(0, &first), 1);
        assert_eq!(rig.send_ip(0, &later.with(|ip| ip.proto = TCP)), 0);
        // The first fragment of what is not ours leaves nothing to follow.
        let [first, later] = fragments(false, 201, 1).map(|f| f.to("10.9.0.1"));
        assert_eq!(rig.send_ip(0, &first), 0);
        assert_eq!(rig.send_ip(0, &later), 0);
    });
}

#[test]
fn fragments_follow_nothing_that_no_longer_holds() {
    with_rig(settings(), |mut rig| {
        // Only named sources and permitted ones move.
        let sources = Sources::default();
        let steered = |rig: &mut Rig, rules: &[FibRule]| {
            rig.steer
                .set_topology(&rig_groups(), &not_ours(), rules, &sources)
                .unwrap();
            rig.masks(only(1));
        };
        for v6 in [false, true] {
            let [first, later] = fragments(v6, 300, 1);
            let follows = |rig: &Rig, mark| rig.send_ctx(0, &later.on(0), Ctx::mark(mark)) == 1;
            let begin = |rig: &mut Rig| {
                rig.steer.permit(first.src, 0).unwrap();
                assert_eq!(rig.send_ip(0, &first), 1);
                assert!(follows(rig, 0));
            };
            steered(&mut rig, &[]);
            begin(&mut rig);
            rig.steer.forbid(first.src);
            assert!(!follows(&rig, 0), "its source has to stay by now");

            begin(&mut rig);
            steered(&mut rig, &[]);
            assert!(!follows(&rig, 0), "the paths are others by now");

            let rule = fib_rule(|r| (r.fwmark, r.ipv6) = (Some((0x51, !0)), v6));
            steered(&mut rig, &[rule]);
            begin(&mut rig);
            assert!(!follows(&rig, 0x51), "an ip rule sent it here");

            // Identifications come again. A later fragment has no ports for a rule to know it by.
            let by_port = fib_rule(|r| (r.dport, r.ipv6) = (Some((99, 99)), v6));
            steered(&mut rig, &[by_port]);
            begin(&mut rig);
            let other = first.clone().with(|ip| ip.l4 = udp(1, 99, 16));
            assert_eq!(rig.send_ip(0, &other), 0, "the rule keeps its first");
            assert!(!follows(&rig, 0), "torn from its datagram");
            begin(&mut rig);
        }
    });
}

/// An ICMP error from `ip`'s destination's side about a packet of the flow that comes in.
fn error(flow: &Ip, kind: u8, quoted_l4: usize) -> Ip {
    // The packet that came in: addresses and ports swapped.
    let quoted = flow.clone().with(|ip| {
        (ip.src, ip.dst) = (flow.dst, flow.src);
        ip.l4[..4].rotate_left(2);
        ip.l4.truncate(quoted_l4);
    });
    let v6 = flow.src.is_ipv6();
    let proto = if v6 { ICMPV6 } else { ICMP };
    Ip::new(v6, proto, icmp(kind, 0, &quoted.l3()))
}

#[test]
fn icmp_errors_follow_the_flow_they_are_about() {
    with_rig(settings(), |mut rig| {
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
                assert_eq!(rig.send_ip(0, &flow), 1);
                // From now on new flows stay on u0; the flow has had no gap and stays on u1.
                rig.masks(only(0));
                rig.steer.set_delays(1 + 2 * v6 as usize, 10_000_000, 0);
                for &kind in kinds {
                    assert_eq!(rig.send_ip(0, &error(&flow, kind, 8)), 1, "type {kind}");
                }
                assert_eq!(rig.flows().len(), 1, "an error made a flow");
                assert_eq!(rig.flow().moves, 0);
                // Control: not an error, too little quoted, about another flow.
                let request = icmp(if v6 { 128 } else { 13 }, 0, &[]);
                let stranger = flow.clone().with(|ip| ip.l4 = udp(42, 50, 9));
                let stays = [
                    error(&flow, 3, 8).with(|ip| ip.l4 = request),
                    error(&flow, kinds[0], 3),
                    error(&stranger, kinds[0], 8),
                ];
                for ip in stays {
                    assert_eq!([rig.send_ip(0, &ip), rig.send_ip(1, &ip)], [0, 0], "{ip:?}");
                }
            }
        }
    });
}

#[test]
fn icmp_errors_are_judged_by_their_own_header() {
    with_rig(settings(), |mut rig| {
        for v6 in [false, true] {
            let flow = Ip::new(v6, UDP, udp(40, 50, 9));
            let about = |flow: &Ip| error(flow, if v6 { 1 } else { 3 }, 8);
            let [pinned, router, other] = match v6 {
                false => ["10.0.0.77", "10.0.0.99", "10.5.5.5"],
                true => ["2001:db8::77", "2001:db8::99", "2001:db8:5::5"],
            };
            rig.topology(&[]);
            rig.masks(only(1));
            assert_eq!(rig.send_ip(0, &flow), 1);
            assert_eq!(rig.send_ip(0, &about(&flow)), 1, "the control stays");
            // A router on the way answers from another address: that is fine.
            assert_eq!(rig.send_ip(0, &about(&flow).from(router)), 1);
            // ... unless that address belongs to the uplink.
            rig.expect(&about(&flow).from(pinned).on(0), 0, &["pass_uplink_bound"]);
            // Quoting a flow with somebody else than the one the error goes to is a forgery.
            rig.masks(only(0));
            rig.steer.set_delays(1 + 2 * v6 as usize, 10_000_000, 0);
            assert_eq!(rig.send_ip(0, &about(&flow)), 1, "the control stays");
            assert_eq!(rig.send_ip(0, &about(&flow).to(other)), 0);
            // Rules and special destinations look at the packet, not at what it quotes.
            let rule = |proto| fib_rule(|r| (r.ipproto, r.ipv6) = (Some(proto), v6));
            for (proto, by) in [(if v6 { ICMPV6 } else { ICMP }, [0, 1]), (UDP, [1, 0])] {
                rig.topology(&[rule(proto)]);
                rig.masks(only(1));
                let got = [rig.send_ip(0, &about(&flow)), rig.send_ip(0, &flow)];
                assert_eq!(got, by, "a rule for protocol {proto}");
            }
            // An error about a TCP connection is no sign of an evicted flow.
            let tcp = Ip::new(v6, TCP, tcp(1, 2, ACK, 0));
            rig.expect(&about(&tcp).on(0), 1, &["redirected"]);
        }
    });
}
