// SPDX-License-Identifier: GPL-2.0-or-later
//! How the steering program tells latency flows from bulk flows, through BPF_PROG_RUN in real time.

use std::thread::sleep;
use std::time::Duration;

use crate::rig::packets::*;
use crate::rig::{in_netns, ms, patient, settings, Ctx, Rig, BOTH};
use mountain::bpf::flows::Class;
use mountain::bpf::PathMasks as Masks;

fn packet(port: u16, payload: usize) -> Vec<u8> {
    Ip::v4(UDP, udp(port, 2, payload)).on(0)
}

/// Runs `test` until the machine was quick enough for it; `None` says that it was not.
fn when_quick_enough(mut test: impl FnMut() -> Option<()>) {
    let quick = (0..50).any(|_| test().is_some());
    assert!(quick, "too slow a machine: halted in each of 50 tries");
}

/// The clock that the program stamps by. It lags by a tick, at times more.
fn coarse() -> Duration {
    let clock = nix::time::ClockId::CLOCK_MONOTONIC_COARSE;
    nix::time::clock_gettime(clock).unwrap().into()
}

/// What `f` does within one window of the classification (50 ms), if it was.
fn within_a_window(f: impl FnOnce()) -> Option<()> {
    let start = coarse();
    f();
    (coarse() - start < ms(45)).then_some(())
}

#[test]
fn the_class_follows_the_rate() {
    in_netns(|| {
        let mut rig = Rig::new(&patient()); // window 50 ms; below 5,000 bytes, above 10,000
        when_quick_enough(|| class_follows_the_rate(&mut rig));
    });
}

fn class_follows_the_rate(rig: &mut Rig) -> Option<()> {
    let class = |rig: &Rig| rig.flow().class;
    rig.clear_flows();
    // Latency flows by u0, bulk flows by u1, no gap needed beyond the margin of 1 ms.
    rig.masks(Masks {
        latency: 0b01,
        bulk: 0b10,
        alive: 0b11,
        ejected: 0,
    });
    let fat = packet(1, 1000 - 42); // 1,000 bytes
    let burst = |rig: &Rig, n: usize, ctx: Ctx| {
        for _ in 0..n {
            rig.run(0, &fat, ctx);
            rig.clear_note();
        }
    };
    let plain = Ctx::default();
    let mut seen = vec![];
    let mut by = 0;
    within_a_window(|| {
        burst(rig, 10, plain);
        seen.push(class(rig));
        burst(rig, 1, plain);
        seen.push(class(rig));
        // From the first packet that should leave on, gaps are exact.
        rig.send(0, &fat);
        sleep(ms(3));
        by = rig.send(0, &fat);
    })?;
    assert_eq!(seen, [Class::Latency, Class::Bulk], "10 and 11 packets");
    assert_eq!(by, 1, "a bulk flow belongs on u1");
    // Between the thresholds it stays what it is: 7 packets a window, from either side.
    for _ in 0..3 {
        sleep(ms(65));
        within_a_window(|| burst(rig, 7, plain))?;
        assert_eq!(class(rig), Class::Bulk, "hysteresis");
    }
    // A quiet window and one packet to see its end; the first ends the busy window.
    let single = |rig: &Rig| {
        sleep(ms(65));
        let before = coarse();
        burst(rig, 1, plain);
        (before, coarse())
    };
    let (first, second) = (single(rig), single(rig));
    assert_eq!(class(rig), Class::Latency, "quiet");
    let rate = f64::from(rig.flow().rate_bps);
    let [longest, shortest] = [second.1 - first.0, second.0 - first.1].map(|t| t.as_secs_f64());
    assert!(
        (8000.0 / longest - 10.0..=8000.0 / shortest + 10.0).contains(&rate),
        "1,000 bytes in {shortest} to {longest} s, not {rate} bit/s"
    );
    // The first packet that should leave may not know its gap.
    rig.send(0, &fat);
    sleep(ms(5));
    assert_eq!(rig.send(0, &fat), 0, "a latency flow belongs on u0");
    for _ in 0..3 {
        sleep(ms(65));
        burst(rig, 7, plain);
        assert_eq!(class(rig), Class::Latency, "hysteresis");
    }
    // One GSO packet in a window: not latency, however low the rate.
    sleep(ms(65));
    within_a_window(|| burst(rig, 12, plain))?;
    assert_eq!(class(rig), Class::Bulk);
    let gso = Ctx {
        gso_segs: 2,
        gso_size: 500,
        ..plain
    };
    for _ in 0..3 {
        sleep(ms(65));
        burst(rig, 1, gso);
        assert_eq!(class(rig), Class::Bulk, "sends GSO packets");
    }
    // The last GSO packet ended its window itself.
    sleep(ms(65));
    burst(rig, 1, plain);
    assert_eq!(class(rig), Class::Latency);
    Some(())
}

#[test]
fn packets_that_ask_for_low_latency_get_it() {
    in_netns(|| {
        let mut rig = Rig::new(&patient());
        rig.masks(BOTH);
        for v6 in [false, true] {
            // DSCP 32 and up: CS4, AF41, EF, CS6, with ECN bits too; CS3, AF33, default not.
            let dscp = [
                0x80, 0x88, 0xb8, 0xc0, 0xe0, 0xb9, 0x83, 0x60, 0x78, 0x7f, 0, 3,
            ];
            for (dsfield, class) in dscp.map(|d: u8| {
                (
                    d,
                    if d >= 0x80 {
                        Class::Latency
                    } else {
                        Class::Bulk
                    },
                )
            }) {
                let p = Ip {
                    dsfield,
                    ..Ip::new(v6, UDP, udp(1, 2, 1300))
                }
                .on(0);
                when_quick_enough(|| {
                    rig.clear_flows();
                    within_a_window(|| (0..12).for_each(|_| _ = rig.send(0, &p)))
                });
                assert_eq!(rig.flow().class, class, "{dsfield:#x}");
            }
        }
    });
}

#[test]
fn thin_tcp_flows_of_full_sized_packets_are_bulk() {
    in_netns(|| {
        let mut rig = Rig::new(&settings()); // window 50 ms; elastic above 3,000 bytes
        rig.masks(BOTH);
        let plain = Ctx::default();
        // (protocol, packets of a window, their payload, class then, class at a lower rate)
        for (name, l4, n, class, after) in [
            (
                "four of 1,014 bytes by TCP",
                tcp(1, 2, 0x10, 948),
                4,
                Class::Bulk,
                Class::Bulk,
            ),
            (
                "as many by UDP",
                udp(1, 2, 972),
                4,
                Class::Latency,
                Class::Latency,
            ),
            (
                "eight of 514 by TCP",
                tcp(1, 2, 0x10, 448),
                8,
                Class::Latency,
                Class::Latency,
            ),
            (
                "two of 1,014 by TCP",
                tcp(1, 2, 0x10, 948),
                2,
                Class::Latency,
                Class::Latency,
            ),
        ] {
            let proto = if name.contains("UDP") { UDP } else { TCP };
            let p = Ip::v4(proto, l4).on(0);
            let window = |n| {
                for _ in 0..n {
                    rig.run(0, &p, plain);
                    rig.clear_note();
                }
            };
            // A window ends with the first packet after it, which counts to it; one that took
            // twice as long by a halt of the machine says nothing, so some are tried.
            rig.clear_flows();
            let settled = |class, n: usize| {
                (0..20).any(|_| {
                    window(n - 1);
                    sleep(ms(65));
                    window(1);
                    rig.flow().class == class
                })
            };
            assert!(settled(class, n), "{name}");
            for _ in 0..3 {
                sleep(ms(65));
                window(1);
            }
            assert_eq!(rig.flow().class, after, "{name}, then one a window");
        }
    });
}
