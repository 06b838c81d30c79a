// SPDX-License-Identifier: GPL-2.0-or-later
//! What the kernel's routing does to known flows, through BPF_PROG_RUN: where they go on after it has decided alone,
//! and while other routes change.

use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::rig::packets::*;
use crate::rig::{alive, all_but, ms, only, patient, rig_groups, settings, with_rig, Rig, BOTH};
use ipnet::IpNet;
use mountain::bpf::SteerMode;

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
    });
}

#[test]
fn after_a_pause_without_a_verdict_the_kernel_decides() {
    with_rig(patient(), |mut rig| {
        let p = packet(1);
        assert_eq!(rig.send(0, &p), 1);
        rig.masks(alive(0b11, Default::default()));
        pause(&mut rig, &p);
        assert_eq!(rig.send(0, &p), 0);
    });
}

#[test]
fn a_flow_that_was_not_ours_for_a_while_goes_on_where_the_kernel_has_it() {
    with_rig(patient(), |mut rig| {
        let [sends, pauses] = [packet(1), packet(2)];
        assert_eq!([rig.send(0, &sends), rig.send(0, &pauses)], [1, 1]);
        // As where the firewall holds the group.
        let held: IpNet = "10.1.0.0/16".parse().unwrap();
        rig.steer
            .set_topology(&rig_groups(), &[held], &[], &all_but(&[]))
            .unwrap();
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
            assert!(before.elapsed() < Duration::from_secs(5), "never forced");
            sleep(ms(10));
            rig.topology(&[]);
            rig.masks(only(1));
        }
        assert!(before.elapsed() >= ms(100), "{:?}", before.elapsed());
        assert_eq!(rig.stat("move_forced"), 1);
    });
}
