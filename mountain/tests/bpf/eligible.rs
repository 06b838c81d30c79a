// SPDX-License-Identifier: GPL-2.0-or-later
//! What the steering program leaves alone although it understands it, through BPF_PROG_RUN: other
//! destinations, other ip rules' packets, what the other path cannot carry, no verdict.
//!
//! As in fixtures.rs a packet that is steered moves from u0 to u1.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use crate::rig::packets::*;
use crate::rig::{alive, all_but, fib_rule, only, rig_groups, settings, with_rig};
use crate::rig::{Ctx, Rig, BOTH, PASS, PLAIN, REDIRECT};
use mountain::bpf::{now_ns, PathMasks as Masks, ProgramPath, Sources, SteerMode};
use mountain::bpf::{ALIVE_NS, MAX_PERMITS};
use mountain::steer::rendezvous::{inv_weight, path_salt};
use mountain::topology::{is_translated_later, FibRule};

/// An ordinary packet of the family of an address.
fn like(address: &str) -> Ip {
    Ip::new(address.contains(':'), UDP, udp(1, 2, 10))
}

fn udp4(sport: u16, dport: u16) -> Ip {
    Ip::v4(UDP, udp(sport, dport, 5))
}

#[test]
fn other_destinations_and_sources_pass() {
    with_rig(settings(), |mut rig| {
        const MOVED: &[&str] = &["flow_new", "redirected"];
        const SPECIAL: &str = "224.0.0.251 239.255.255.250 255.255.255.255 169.254.1.1 127.0.0.1 \
            0.0.0.0 ff02::fb ff0e::1 fe80::1 febf::1 ::1 ::";
        // Just outside of those ranges.
        const ORDINARY: &str = "223.255.255.255 240.0.0.1 169.253.255.255 128.0.0.1 1.0.0.0 \
            fec0::1 fe7f::1 ::2 1::1";
        // Routes of their own, and their neighbours in the address space.
        const ELSEWHERE: &str = "10.9.0.1 10.9.255.255 2001:db8:9::1 2001:db8:9:ffff::1";
        const BESIDE: &str = "10.10.0.0 10.8.255.255 2001:db8:a::1";
        for (to, counted, destinations) in [
            (0, &["pass_dest"][..], SPECIAL),
            (1, MOVED, ORDINARY),
            (0, &[], ELSEWHERE),
            (1, MOVED, BESIDE),
        ] {
            for dst in destinations.split(' ') {
                rig.expect(&like(dst).to(dst).on(0), to, counted);
            }
        }
        // Sources that belong to one uplink, and their neighbours.
        for (to, counted, sources) in [
            (0, &["pass_uplink_bound"][..], "10.0.0.77 2001:db8::77"),
            (1, MOVED, "10.0.0.78 2001:db8::78"),
        ] {
            for src in sources.split(' ') {
                rig.expect(&like(src).from(src).on(0), to, counted);
            }
        }
        // Told to account only.
        rig.steer.set_mode(SteerMode::Pass, 0);
        rig.expect(&udp4(1, 2).on(0), 0, &[]);
    });
}

#[test]
fn what_a_daemon_that_hangs_would_move_passes() {
    with_rig(settings(), |mut rig| {
        let flow = udp4(1, 2).on(0);
        let parts = [(udp(3, 4, 16), 0, true), (vec![9; 24], 24, false)];
        let parts = parts.map(|(l4, at, more)| Ip::v4(UDP, l4).part(at, more, 7).on(0));
        rig.expect(&flow, 1, &["flow_new", "redirected"]);
        rig.steer.say_alive(now_ns() - ALIVE_NS / 2);
        rig.expect(&flow, 1, &["redirected"]);
        rig.expect(&parts[0], 1, &["flow_new", "redirected"]);
        // Flows in the table, new ones, and what follows the first fragment.
        rig.steer.say_alive(now_ns() - ALIVE_NS - 1_000_000_000);
        let new = udp4(5, 6).on(0);
        for packet in [&flow, &new, &parts[1]] {
            rig.expect(packet, 0, &["pass_unattended"]);
        }
        rig.steer.say_alive(now_ns());
        rig.expect(&flow, 1, &["redirected"]);
        rig.expect(&new, 1, &["flow_new", "redirected"]);
    });
}

#[test]
fn what_is_no_packet_of_this_path_passes() {
    with_rig(settings(), |rig| {
        let (ip4, ip6) = (like("0.0.0.0"), like("::"));
        let changed = |ip: &Ip, at: usize, to: u8| {
            let mut packet = ip.on(0);
            packet[at] = to;
            packet
        };
        assert_eq!([rig.send_ip(0, &ip4), rig.send_ip(0, &ip6)], [1, 1]);
        // A next hop that is not the group's.
        rig.expect(&changed(&ip4, 5, MACS[0][5] ^ 1), 0, &[]);
        // u1's gateway seen on u0, and the other way round.
        assert_eq!(rig.send(0, &ip4.on(1)), 0);
        assert_eq!(rig.send(1, &ip4.on(0)), 1);
        // Neither IPv4 nor IPv6, tagged, or of a wrong version inside.
        let l3 = ip4.l3();
        let vlan = [&[0, 42, 8, 0], &l3[..]].concat();
        for (ethertype, payload) in [
            (0x8100, &vlan),
            (0x88a8, &vlan),
            (0x0806, &l3),
            (0x8847, &l3),
        ] {
            rig.expect(&frame(MACS[0], ethertype, payload), 0, &[]);
        }
        let versions = [0, 5, 6, 15].map(|version| version << 4 | 5);
        for first in versions.into_iter().chain((0..5).map(|words| 0x40 | words)) {
            rig.expect(&changed(&ip4, 14, first), 0, &["pass_parse"]);
        }
        rig.expect(&changed(&ip6, 14, 0x40), 0, &["pass_parse"]);
        assert_eq!([rig.send_ip(0, &ip4), rig.send_ip(0, &ip6)], [1, 1]);
    });
}

/// An ip rule with another table, over the paths of a [`Rig`].
struct Rule<'a> {
    rig: &'a Rig,
    rule: FibRule,
}

impl<'a> Rule<'a> {
    fn new(rig: &'a mut Rig, change: impl FnOnce(&mut FibRule)) -> Self {
        let other = fib_rule(|r| r.fwmark = Some((0xdead, !0)));
        let rules = [other, fib_rule(change)];
        rig.topology(&rules);
        rig.masks(only(1));
        let [_, rule] = rules;
        Self { rig, rule }
    }

    fn takes(&self, ip: Ip, ctx: Ctx) -> &Self {
        self.sends(ip, ctx, true)
    }

    fn leaves(&self, ip: Ip, ctx: Ctx) -> &Self {
        self.sends(ip, ctx, false)
    }

    fn sends(&self, ip: Ip, ctx: Ctx, taken: bool) -> &Self {
        self.rig.clear_flows();
        let what = format!("{:?}: {ctx:?} {ip:?}", self.rule);
        let counted = self.rig.counted(|| {
            let to = self.rig.send_ctx(0, &ip.on(0), ctx);
            assert_eq!(to, !taken as usize, "{what}");
        });
        assert_eq!(counted.contains(&("pass_fib_rule", 1)), taken, "{what}");
        self
    }
}

#[test]
fn ip_rules_keep_their_packets() {
    with_rig(settings(), |mut rig| {
        let ip = || udp4(1, 2);
        let udp6 = || Ip::v6(UDP, udp(1, 2, 5));
        let tcp4 = |sport| Ip::v4(TCP, tcp(sport, 2, SYN, 0));
        let (base, mark) = (PLAIN, Ctx::mark);
        Rule::new(&mut rig, |r| r.fwmark = Some((0x51, !0)))
            .takes(ip(), mark(0x51))
            .leaves(ip(), base)
            .leaves(ip(), mark(0x151))
            .leaves(udp6(), mark(0x51));
        Rule::new(&mut rig, |r| r.fwmark = Some((0xff01, 0xff)))
            .takes(ip(), mark(0x701))
            .leaves(ip(), mark(0x702));
        // wg-quick: not fwmark 0xca6c table 51820
        let wg_quick = |r: &mut FibRule| (r.fwmark, r.invert) = (Some((0xca6c, !0)), true);
        Rule::new(&mut rig, wg_quick)
            .takes(ip(), base)
            .leaves(ip(), mark(0xca6c))
            .leaves(udp6(), base);
        Rule::new(&mut rig, |r| r.src = Some("10.0.0.0/30".parse().unwrap()))
            .takes(ip(), base)
            .leaves(ip().from("10.0.0.4"), base);
        let source6 = Some("2001:db8::/127".parse().unwrap());
        Rule::new(&mut rig, |r| (r.src, r.ipv6) = (source6, true))
            .takes(udp6().from("2001:db8::1"), base)
            .leaves(udp6(), base)
            .leaves(ip(), base);
        Rule::new(&mut rig, |r| r.dst = Some("10.1.2.0/24".parse().unwrap()))
            .takes(ip(), base)
            .leaves(ip().to("10.1.3.0"), base);
        Rule::new(&mut rig, |r| r.uid = Some((0, 10))).takes(ip(), base);
        Rule::new(&mut rig, |r| r.uid = Some((1, u32::MAX))).leaves(ip(), base);
        let ports = Some((1000, 2000));
        Rule::new(&mut rig, |r| (r.sport, r.ipproto) = (ports, Some(UDP)))
            .leaves(udp4(999, 2), base)
            .takes(udp4(1000, 2), base)
            .takes(udp4(2000, 2), base)
            .leaves(udp4(2001, 2), base)
            .leaves(tcp4(1500), base);
        Rule::new(&mut rig, |r| r.dport = Some((853, 853)))
            .leaves(udp4(853, 854), base)
            .takes(udp4(1, 853), base);
        Rule::new(&mut rig, |r| r.ipproto = Some(TCP))
            .takes(tcp4(1), base)
            .leaves(ip(), base);
        // The kernel compares the DSCP. The two ECN bits are TCP's own affair, and the three bits
        // that once were the precedence do not count.
        let ds = |dsfield| ip().with(|ip| ip.dsfield = dsfield);
        Rule::new(&mut rig, |r| {
            r.tos = mountain::netlink::ds_field(0x10, false)
        })
        .takes(ds(0x10), base)
        .takes(ds(0x12), base)
        .takes(ds(0xb0), base)
        .leaves(ds(0x08), base)
        .leaves(ip(), base);
        Rule::new(&mut rig, |r| r.iif = Some(77))
            .takes(ip(), Ctx::came_by(77))
            .leaves(ip(), Ctx::came_by(78))
            .leaves(ip(), base);
        // To the kernel's rules, what the host itself sends came in by lo.
        Rule::new(&mut rig, |r| r.iif = Some(1))
            .takes(ip(), base)
            .leaves(ip(), Ctx::came_by(78));
        // Gone again, all of them.
        rig.topology(&[]);
        rig.masks(only(1));
        let counted = rig.counted(|| {
            assert_eq!(rig.send_ctx(0, &udp4(1, 853).on(0), mark(0xdead)), 1);
        });
        assert!(counted.contains(&("redirected", 1)));
    });
}

/// IPsec sends what it makes of forwarded packets as this host's own: to the kernel's rules that came in by lo.
#[test]
fn rules_for_the_hosts_own_packets_keep_what_ipsec_makes_of_forwarded_ones() {
    with_rig(settings(), |mut rig| {
        let esp = |source| Ip::v4(ESP, vec![0; 40]).from(source);
        let [own, other] = ["10.1.2.3", "10.1.2.4"];
        let sources = Sources {
            own: vec![own.parse().unwrap()],
            movable: vec!["10.1.2.4/32".parse().unwrap()],
            ..Sources::default()
        };
        let rule = |iif| fib_rule(|r| r.iif = Some(iif));
        for (rules, moved) in [
            (vec![], [1, 1, 1]),
            (vec![rule(1)], [0, 1, 0]),
            (vec![rule(78)], [0, 0, 1]),
        ] {
            let set = rig.steer.set_topology(&rig_groups(), &[], &rules, &sources);
            set.unwrap();
            rig.masks(only(1));
            let by = |source, ctx| {
                rig.clear_flows();
                rig.send_ctx(0, &esp(source).on(0), ctx)
            };
            let came = Ctx::came_by(78);
            assert_eq!(
                [by(own, came), by(other, came), by(own, PLAIN)],
                moved,
                "{rules:?}"
            );
        }
    });
}

/// Where the ports would be, the kernel compares an ICMP type for some senders and nothing for others.
#[test]
fn rules_by_port_keep_packets_that_have_none() {
    with_rig(settings(), |mut rig| {
        let ping = || Ip::v4(ICMP, icmp(8, 7, &[]));
        // To the kernel the echo request of a ping socket has the destination port 0x0800, which is 2048.
        let ports = Some((2000, 2999));
        Rule::new(&mut rig, |r| r.dport = ports)
            .takes(ping(), PLAIN)
            .takes(Ip::v4(GRE, vec![0; 8]), PLAIN)
            .leaves(udp4(7, 3000), PLAIN)
            .leaves(Ip::v6(ICMPV6, icmp(128, 7, &[])), PLAIN);
        let not_by_7 = |r: &mut FibRule| (r.sport, r.invert) = (Some((7, 7)), true);
        Rule::new(&mut rig, not_by_7)
            .takes(ping(), PLAIN)
            .leaves(udp4(7, 3000), PLAIN);
        let of_udp = |r: &mut FibRule| (r.dport, r.ipproto) = (ports, Some(UDP));
        Rule::new(&mut rig, of_udp).leaves(ping(), PLAIN);
    });
}

const HOP_BY_HOP: u8 = 0;
/// Extension headers before one of TCP (RFC 8200, 4.3): with a jumbo payload's length (RFC 2675), with PadN.
const JUMBO: [u8; 8] = [TCP, 0, 0xc2, 4, 0, 2, 0, 0];
const PADDING: [u8; 8] = [TCP, 0, 1, 4, 0, 0, 0, 0];

#[test]
fn packets_that_do_not_fit_the_other_path_pass() {
    with_rig(settings(), |mut rig| {
        // A flow remembers its largest packet: each MTU is tried with flows of its own.
        let try_all = |rig: &Rig, mtu: usize| {
            let port = mtu as u16;
            for (n, to) in [(mtu - 1, 1), (mtu, 1), (mtu + 1, 0)] {
                let packet = Ip::v4(UDP, udp(port, 2, n - 28));
                let counted = rig.counted(|| assert_eq!(rig.send_ip(0, &packet), to, "{n}/{mtu}"));
                let passed = counted.contains(&("pass_mtu", 1));
                assert_eq!(passed, to == 0, "{n}/{mtu}: {counted:?}");
            }
            // A GSO packet's segments count, with their headers. UDP may be a tunnel, whose inner
            // headers come on top.
            let syn = || tcp(port, 2, SYN, 2 * mtu);
            for (ip, headers, fits) in [
                (Ip::v4(TCP, syn()), 20 + 32, 1),
                (
                    Ip::v4(UDP, udp(port, 4, 2 * mtu)),
                    20 + 8,
                    (mtu == 1500) as usize,
                ),
                (Ip::v6(TCP, syn()), 40 + 32, 1),
                // BIG TCP's header with the length is taken off before the segments are made.
                (
                    Ip::v6(
                        HOP_BY_HOP,
                        [JUMBO.to_vec(), tcp(port, 5, SYN, 2 * mtu)].concat(),
                    ),
                    40 + 32,
                    1,
                ),
                (
                    Ip::v6(
                        HOP_BY_HOP,
                        [PADDING.to_vec(), tcp(port, 6, SYN, 2 * mtu)].concat(),
                    ),
                    40 + 8 + 32,
                    1,
                ),
            ] {
                let size = (mtu - headers) as u32;
                let by = [size, size + 1].map(|size| rig.send_ctx(0, &ip.on(0), Ctx::gso(size)));
                assert_eq!(by, [fits, 0], "gso {size}/{mtu}");
            }
        };
        try_all(&rig, 1500);
        for id in [1, 3] {
            rig.set_path(id, id, |path| path.mtu = 1280);
        }
        try_all(&rig, 1280);
        // Headers inside a tunnel are not looked at: its GSO packets move only to an MTU
        // that is no smaller than the one they are on.
        let tunnel = |proto| Ip::v4(proto, vec![0; 2500]).on(0);
        assert_eq!(rig.send_ctx(0, &tunnel(GRE), Ctx::gso(1000)), 0);
        rig.set_path(1, 1, |_| ());
        assert_eq!(rig.send_ctx(0, &tunnel(ESP), Ctx::gso(1000)), 1);
    });
}

#[test]
fn paths_that_cannot_take_the_packet_get_none() {
    with_rig(settings(), |mut rig| {
        let packet = Ip::v4(UDP, udp(1, 2, 30)).on(0);
        let changes: [fn(&mut ProgramPath); 3] = [
            |path| path.mac = None,
            |path| path.ethernet = false,
            |path| path.mac = Some(GROUP),
        ];
        for change in changes {
            assert_eq!(rig.send(0, &packet), 1, "the control does not move");
            rig.set_path(1, 1, change);
            rig.expect(&packet, 0, &["pass_neigh"]);
            // Meanwhile it is on the kernel's path, which it leaves in a gap.
            rig.set_path(1, 1, |_| ());
            std::thread::sleep(Duration::from_millis(3));
            assert_eq!(rig.send(0, &packet), 1, "not again");
        }
        // From a device without Ethernet headers nothing moves either.
        rig.set_path(0, 0, |path| path.ethernet = false);
        assert_eq!(rig.send(0, &packet), 0);
    });
}

/// Ethernet address of a cluster of firewalls or servers that all take what is sent to it.
const GROUP: [u8; 6] = [3, 0xbf, 0, 0, 0, 0x10];

/// bpf_redirect_neigh() drops frames that are to a group.
#[test]
fn nothing_moves_away_from_a_gateway_with_a_group_address() {
    with_rig(settings(), |mut rig| {
        let mut one = GROUP;
        one[0] = 2;
        for (mac, moves) in [(one, true), (GROUP, false)] {
            rig.set_path(0, 0, |path| path.mac = Some(mac));
            let packet = frame(mac, 0x0800, &udp4(1, 2).l3());
            let outcome = rig.run(0, &packet, PLAIN);
            let expected = if moves { REDIRECT } else { PASS };
            assert_eq!((outcome.action, outcome.note.is_some()), (expected, moves));
            rig.clear_note();
            rig.clear_flows();
        }
        // What leaves by it is counted all the same.
        assert!(rig.steer.traffic(0).unwrap().packets > 0);
    });
}

/// A tunnel, or a gateway that is not resolved, beside a path that is good.
#[test]
fn no_flow_is_given_to_a_path_that_nothing_can_be_sent_to() {
    with_rig(settings(), |mut rig| {
        rig.set_path(5, 1, |path| {
            path.mac = Some([2, 0, 0, 0, 9, 9]);
            path.salt = path_salt(&[5]);
        });
        let mut groups = rig_groups();
        groups[0].members.push((5, inv_weight(1)));
        rig.regroup(&groups, &[], &all_but(&[]));
        // The first path is dead.
        let use_only = |rig: &mut Rig, members| {
            let masks = Masks {
                latency: members,
                bulk: members,
                alive: 0b110,
                ..Masks::default()
            };
            rig.steer.set_masks(0, masks);
        };
        let to = |rig: &Rig, port| {
            let note = rig.run(0, &udp4(port, 2).on(0), PLAIN).note;
            rig.clear_note();
            note.map(|note| note.path)
        };
        use_only(&mut rig, 0b010);
        (0..20).for_each(|port| assert_eq!(to(&rig, port), Some(1)));
        rig.set_path(1, 1, |path| path.mac = None);
        use_only(&mut rig, 0b110);
        // Those that were on it, and new ones.
        (0..40).for_each(|port| assert_eq!(to(&rig, port), Some(5)));
        assert!(rig.flows().iter().all(|flow| flow.path == 5));
    });
}

#[test]
fn no_verdict_no_steering() {
    with_rig(settings(), |mut rig| {
        let send = |rig: &Rig, dev: usize, port| rig.send_ip(dev, &Ip::v4(UDP, udp(port, 2, 30)));
        rig.masks(Masks::default());
        for port in 0..50 {
            let counted = rig.counted(|| assert_eq!(send(&rig, 0, port), 0));
            assert!(counted.contains(&("pass_no_path", 1)), "{counted:?}");
            assert_eq!(send(&rig, 1, port + 100), 1);
        }
        // Eligible, but none of them alive: the same.
        rig.clear_flows();
        rig.masks(alive(0, BOTH));
        for port in 0..50 {
            let by = [send(&rig, 0, port), send(&rig, 1, port + 100)];
            assert_eq!(by, [0, 1], "sent to a dead path");
        }
        // Only the living one of two eligible.
        rig.clear_flows();
        rig.masks(alive(0b10, BOTH));
        for port in 0..50 {
            assert_eq!(send(&rig, 0, port), 1, "stays on a dead path");
        }
    });
}

/// As where a path of the group has never answered.
#[test]
fn where_the_kernel_decides_no_flow_stays_on_a_dead_path() {
    with_rig(settings(), |mut rig| {
        let packet = Ip::v4(UDP, udp(1, 2, 30)).on(0);
        assert_eq!(rig.send(0, &packet), 1);
        rig.masks(alive(0b11, Masks::default()));
        assert_eq!(rig.send(0, &packet), 1, "left a path that is alive");
        rig.masks(alive(0b01, Masks::default()));
        let counted = rig.counted(|| assert_eq!(rig.send(0, &packet), 0, "stays on a dead path"));
        assert_eq!(counted, [("move_dead", 1)]);
        // That is where it is from now on, also when the other one lives again.
        rig.masks(alive(0b11, Masks::default()));
        rig.expect(&packet, 0, &[]);
    });
}

#[test]
fn nothing_is_sent_to_a_device_that_is_down() {
    with_rig(settings(), |mut rig| {
        let packet = Ip::v4(UDP, udp(1, 2, 30)).on(0);
        assert_eq!(rig.send(0, &packet), 1);
        // No path is alive, or a change of the routes is being written.
        rig.masks(Masks::default());
        assert_eq!(rig.send(0, &packet), 1, "the control does not move");
        rig.set_path(1, 1, |path| path.up = false);
        assert_eq!(rig.send(0, &packet), 0);
        // Flows are not sent there, and leave it all the same.
        rig.set_path(1, 1, |_| ());
        rig.set_path(0, 0, |path| path.up = false);
        rig.masks(alive(0b10, only(1)));
        assert_eq!(rig.send(0, &packet), 1);
    });
}

/// [`Rig`] with no source that is known to be movable.
fn with_closed_rig(test: fn(Rig)) {
    with_rig(settings(), move |mut rig| {
        rig.regroup(&rig_groups(), &[], &Sources::default());
        rig.masks(only(1));
        test(rig);
    });
}

#[test]
fn a_source_moves_once_it_is_known_to_be_movable() {
    with_closed_rig(|mut rig| {
        // Of IPv4 and IPv6 addresses whose bytes are the same, each stands for itself.
        for address in ["10.1.2.3", "a01:203::"] {
            let v6 = address.contains(':');
            let packet = |port| Ip::new(v6, UDP, udp(port, 2, 30)).from(address).on(0);
            let (source, first): (IpAddr, _) = (address.parse().unwrap(), packet(1));
            rig.expect(&first, 0, &["pass_source"]);
            assert_eq!(rig.send(0, &first), 0);
            assert_eq!(rig.steer.asked(), [source], "asked about once");
            assert!(rig.steer.asked().is_empty());
            assert!(rig.flows().is_empty(), "{:?}", rig.flows());

            // Where the path will do, flows of one that was just let off stay for a while.
            rig.masks(BOTH);
            rig.steer.permit(source, now_ns()).unwrap();
            rig.expect(&first, 0, &["flow_adopted", "flow_new"]);
            rig.masks(only(1));
            rig.steer.permit(source, 0).unwrap();
            assert_eq!(rig.send(0, &packet(2)), 1);
            assert!(rig.steer.asked().is_empty());

            rig.steer.forbid(source);
            rig.clear_flows();
            assert_eq!(rig.send(0, &packet(2)), 0);
            assert_eq!(rig.steer.asked(), [source]);
        }
    });
}

/// Private to public and the like, by both families; what is configured moves.
#[test]
fn what_somebody_else_translates_stays() {
    with_rig(settings(), |mut rig| {
        for (source, to, stays) in [
            ("10.1.2.3", "8.8.8.8", true),
            ("192.168.1.2", "1.1.1.1", true),
            ("100.64.0.9", "223.255.255.1", true),
            ("10.1.2.3", "172.31.255.1", false),
            ("10.1.2.3", "203.0.113.7", false),
            ("172.32.0.1", "8.8.8.8", false),
            ("192.0.0.1", "8.8.8.8", true),
            ("192.0.2.1", "8.8.8.8", false),
            ("fd00::9", "2606:4700::1", true),
            ("fd00::9", "64:ff9b::808:808", true),
            ("fd00::9", "fd01::1", false),
            ("2a00::9", "2606:4700::1", false),
            ("2001:db8::9", "2606:4700::1", false),
            ("fd00::9", "2001:db8:1::1", false),
            ("fd00::9", "3fff::1", false),
        ] {
            let case = format!("{source} to {to}");
            let packet = like(source).from(source);
            let [source, to] = [source, to].map(|a| a.parse::<IpAddr>().unwrap());
            assert_eq!(is_translated_later(source, to), stays, "{case}");
            let packet = packet.with(|ip| ip.dst = to).on(0);
            let moves = |rig: &mut Rig, sources: &Sources| {
                rig.regroup(&rig_groups(), &[], sources);
                rig.masks(only(1));
                rig.clear_flows();
                rig.send(0, &packet) == 1
            };
            let mut sources = Sources::default();
            sources.own.push(source);
            assert_eq!(moves(&mut rig, &sources), !stays, "own: {case}");
            sources.movable.push(source.into());
            assert!(moves(&mut rig, &sources), "configured: {case}");
            rig.steer.permit(source, 0).unwrap();
            let moved = moves(&mut rig, &Sources::default());
            assert_eq!(moved, !stays, "permitted: {case}");
        }
    });
}

/// One that goes on for longer than a permission lasts would be the kernel's after the next change of the topology.
#[test]
fn a_flow_in_use_asks_for_its_source_again() {
    with_closed_rig(|mut rig| {
        let packet = Ip::v4(UDP, udp(1, 2, 30)).from("10.1.2.3").on(0);
        let source: IpAddr = "10.1.2.3".parse().unwrap();
        rig.steer.permit(source, 0).unwrap();
        assert_eq!(rig.send(0, &packet), 1);
        assert!(rig.steer.asked().is_empty());
        // As when it has aged.
        rig.steer.forbid(source);
        // Longer than a window.
        std::thread::sleep(Duration::from_millis(2 * settings().window_ms));
        assert_eq!(rig.send(0, &packet), 1);
        assert_eq!(rig.steer.asked(), [source]);
    });
}

#[test]
fn forged_sources_cost_others_their_moves_but_never_their_uplink() {
    with_closed_rig(|mut rig| {
        let source = |n: u32| IpAddr::from(Ipv4Addr::from(0x0b00_0000 + n));
        let send = |rig: &Rig, n| {
            rig.send_ip(0, &Ip::v4(UDP, udp(1, 2, 30)).with(|ip| ip.src = source(n)))
        };
        for n in 0..3_000 {
            assert_eq!(send(&rig, n), 0, "source {n}");
        }
        assert_eq!(rig.steer.asked().len(), 256, "bounded");
        // As many permissions as there may be, and one more.
        let most = MAX_PERMITS as u32;
        for n in 0..most {
            rig.steer.permit(source(n), 0).unwrap();
        }
        assert!(rig.steer.permit(source(most), 0).is_err());
        assert_eq!([send(&rig, 0), send(&rig, most)], [1, 0]);
    });
}
