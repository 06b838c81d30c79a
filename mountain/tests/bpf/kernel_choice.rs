// SPDX-License-Identifier: GPL-2.0-or-later
//! What depends on where the kernel's routing sends a packet, through BPF_PROG_RUN: which path that is, where known
//! flows go on after the kernel has decided alone, and while other routes change.

use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::rig::packets::*;
use crate::rig::{
    alive, all_but, ejected, fib_rule, ms, only, patient, rig_groups, settings, with_rig,
};
use crate::rig::{Ctx, Rig, BOTH, PASS, PLAIN, REDIRECT};
use ipnet::IpNet;
use mountain::bpf::flows::{Move, MoveReason};
use mountain::bpf::{ProgramGroup, Sources, SteerMode};
use mountain::steer::rendezvous::inv_weight;

fn packet(port: u16) -> Vec<u8> {
    Ip::v4(UDP, udp(port, 2, 20)).on(0)
}

/// Leaves all packets to the kernel for longer than a tick of the coarse clock, while this one leaves by u0.
fn pause(rig: &mut Rig, packet: &[u8]) {
    rig.steer.set_mode(SteerMode::Pass, 0);
    assert_eq!(rig.send(0, packet), 0);
    sleep(ms(30));
    rig.steer.set_mode(SteerMode::Steer, 0);
}

#[test]
fn after_a_pause_a_flow_goes_on_where_the_kernel_has_it() {
    with_rig(patient(), |mut rig| {
        let p = packet(1);
        assert_eq!(rig.send(0, &p), 1);
        rig.masks(BOTH);
        // It does not begin, it goes on.
        rig.steer.set_mode(SteerMode::Steer, 2_000);
        assert_eq!(rig.send(0, &p), 1, "the control does not stay");
        pause(&mut rig, &p);
        let counted = rig.counted(|| {
            for _ in 0..3 {
                assert_eq!(rig.send(0, &p), 0, "moved back without a gap");
            }
        });
        assert_eq!((counted, rig.flow().path), (vec![], 0));
        // One that began after it is not taken for one from before.
        rig.clear_flows();
        rig.masks(only(1));
        assert_eq!(rig.send(0, &p), 1);
        rig.masks(BOTH);
        assert_eq!(rig.send(0, &p), 1);
        // Where the kernel's path will not do, the flow does not stay there.
        rig.masks(only(1));
        pause(&mut rig, &p);
        assert_eq!(rig.send(0, &p), 1);
        // Without a verdict the kernel decides.
        rig.clear_flows();
        assert_eq!(rig.send(0, &p), 1);
        rig.masks(alive(0b11, Default::default()));
        pause(&mut rig, &p);
        assert_eq!(rig.send(0, &p), 0, "without a verdict");
    });
}

#[test]
fn a_flow_that_was_not_ours_for_a_while_goes_on_where_the_kernel_has_it() {
    with_rig(patient(), |mut rig| {
        let [sends, pauses] = [packet(1), packet(2)];
        assert_eq!([rig.send(0, &sends), rig.send(0, &pauses)], [1, 1]);
        // As where the firewall holds the group.
        let held: IpNet = "10.1.0.0/16".parse().unwrap();
        rig.regroup(&rig_groups(), &[held], &all_but(&[]));
        rig.masks(BOTH);
        assert_eq!(rig.send(0, &sends), 0);
        rig.topology(&[]);
        rig.masks(BOTH);
        let counted = rig.counted(|| {
            let by = [rig.send(0, &sends), rig.send(0, &pauses)];
            assert_eq!(by, [0, 1], "moved back without a gap");
        });
        assert_eq!(counted, [("redirected", 1)]);
    });
}

#[test]
fn other_routes_do_not_put_off_a_forced_move() {
    with_rig(settings(), |mut rig| {
        // after 100 ms
        let p = packet(1);
        rig.masks(only(0));
        assert_eq!(rig.send(0, &p), 0);
        rig.steer.set_delays(0, 10_000_000, 0); // a gap of 10 s
        let before = Instant::now();
        rig.masks(only(1));
        while rig.send(0, &p) == 0 {
            assert!(before.elapsed() < Duration::from_secs(30), "never forced");
            sleep(ms(10));
            rig.topology(&[]);
            rig.masks(only(1));
        }
        assert!(before.elapsed() >= ms(100), "{:?}", before.elapsed());
        assert_eq!(rig.stat("move_forced"), 1);
    });
}

/// TCP with a flow label, as of a host that this one forwards for.
fn labelled(dev: usize, proto: u8, label: u8) -> Vec<u8> {
    let l4 = if proto == TCP {
        tcp(1, 2, ACK, 20)
    } else {
        udp(1, 2, 20)
    };
    let mut frame = Ip::v6(proto, l4).on(dev);
    frame[17] = label;
    frame
}

#[test]
fn tcp_whose_sender_looks_for_another_path_leaves_its_own() {
    with_rig(patient(), |mut rig| {
        rig.masks(BOTH);
        let send = |rig: &Rig, dev, label| rig.send(dev, &labelled(dev, TCP, label));
        let first = send(&rig, 0, 1);
        // The routes may have changed, or the label alone.
        assert_eq!(send(&rig, 1, 1), first);
        assert_eq!(send(&rig, 1, 2), first);
        assert_eq!(rig.moves.drain().unwrap(), []);
        for (label, to) in [(3, 1 - first), (4, first), (5, 1 - first)] {
            assert_eq!(send(&rig, 0, label), to, "at label {label}");
            assert_eq!(send(&rig, 0, label), to, "after label {label}");
            // Not with each packet, though the sender may give each a label.
            assert_eq!(send(&rig, 1, label + 100), to, "soon after label {label}");
            sleep(ms(120));
        }
        let moved = rig.moves.drain().unwrap();
        let rehashed = |m: &Move| m.reason == MoveReason::Rehashed;
        assert!(moved.len() == 3 && moved.iter().all(rehashed), "{moved:?}");
        assert_eq!(rig.stat("move_rehashed"), 3);
        // Its hash gives it to the path that it has fled. It does not go back there from a crowded one.
        rig.masks(ejected(0b11, BOTH));
        assert_eq!(send(&rig, 1, 105), 1 - first);
        // Where the other path will not do, it stays.
        rig.masks(only(1 - first as u16));
        assert_eq!(send(&rig, 0, 6), 1 - first);
        assert_eq!(send(&rig, 1, 6), 1 - first);
        // Where the kernel has it after a pause, it stays: the sender has found another path by itself.
        sleep(ms(120));
        rig.masks(BOTH);
        pause(&mut rig, &labelled(0, TCP, 7));
        assert_eq!(send(&rig, 0, 7), 0);
        // The label of other protocols tells nothing.
        let send = |dev, label| rig.send(dev, &labelled(dev, UDP, label));
        assert_eq!(send(0, 1), send(1, 2));
        assert_eq!(rig.moves.drain().unwrap(), []);
    });
}

/// As two addresses of one router are, in different routes.
#[test]
fn next_hops_that_are_the_same_on_the_wire_are_told_apart_by_the_route() {
    with_rig(patient(), |mut rig| {
        for id in [4, 5] {
            let gateway = format!("10.0.{}.254", id % 2).parse().unwrap();
            rig.set_path(id, id % 2, |path| path.gateway = gateway);
        }
        let mut groups = rig_groups();
        groups.push(ProgramGroup {
            members: vec![(4, inv_weight(1)), (5, inv_weight(1))],
            prefixes: vec!["10.99.0.0/16".parse().unwrap()],
        });
        rig.regroup(&groups, &[], &all_but(&[]));
        rig.masks(only(1));
        let p = Ip::v4(UDP, udp(1, 2, 20)).to("10.99.0.1").on(0);
        let run = |rig: &Rig| {
            let outcome = rig.run(0, &p, PLAIN);
            rig.clear_note();
            (outcome.action, outcome.note.map(|note| note.path))
        };
        rig.steer.set_masks(2, only(1));
        // A new flow, then a known one.
        assert_eq!([run(&rig), run(&rig)], [(REDIRECT, Some(5)); 2]);
        assert_eq!((rig.flow().group, rig.flow().path), (2, 5));
        rig.clear_flows();
        rig.steer.set_masks(2, only(0));
        assert_eq!([run(&rig), run(&rig)], [(PASS, None); 2]);
        assert_eq!(rig.flow().path, 4);
        let charged = [0, 4].map(|path| rig.steer.traffic(path).unwrap().packets);
        assert_eq!(charged, [0, 2]);
        assert_eq!(rig.send(0, &packet(1)), 1, "by the first route");
    });
}

/// A flow table translates what is in no connection: what a rule has seen of it nobody knows.
#[test]
fn where_there_are_rules_forwarded_packets_from_an_own_address_stay() {
    with_rig(settings(), |mut rig| {
        let sources = Sources {
            own: vec!["192.0.2.5".parse().unwrap()],
            ..Sources::default()
        };
        let rules = [fib_rule(|r| r.fwmark = Some((0xdead, !0)))];
        let packet = Ip::v4(UDP, udp(1, 2, 20)).from("192.0.2.5").on(0);
        let (none, some, forwarded) = (&rules[..0], &rules[..], Ctx::came_by(77));
        for (rules, ctx, to) in [(none, forwarded, 1), (some, PLAIN, 1), (some, forwarded, 0)] {
            let set = (rig.steer).set_topology(&rig_groups(), &[], rules, &sources);
            set.unwrap();
            rig.masks(only(1));
            rig.clear_flows();
            let what = format!("{rules:?}, {ctx:?}");
            assert_eq!(rig.send_ctx(0, &packet, ctx), to, "{what}");
        }
    });
}
