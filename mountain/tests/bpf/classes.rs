// SPDX-License-Identifier: GPL-2.0-or-later
//! How the steering program tells latency flows from bulk flows, through BPF_PROG_RUN in real time.

use std::thread::sleep;
use std::time::Duration;

use crate::rig::packets::*;
use crate::rig::{ms, only, patient, settings, with_rig, Ctx, Rig, BOTH, PLAIN};
use mountain::bpf::flows::Class;
use mountain::bpf::PathMasks as Masks;

fn packet(port: u16, payload: usize) -> Vec<u8> {
    Ip::v4(UDP, udp(port, 2, payload)).on(0)
}

/// Runs `test` until the machine was quick enough for it; `None` says that it was not.
fn when_quick_enough(mut test: impl FnMut() -> Option<()>) {
    let quick = (0..200).any(|_| test().is_some());
    assert!(quick, "too slow a machine: halted in each of 200 tries");
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
    with_rig(patient(), |mut rig| {
        // window 50 ms; below 5,000 bytes, above 10,000
        when_quick_enough(|| class_follows_the_rate(&mut rig));
    });
}

/// `n` packets of 1,000 bytes of the only flow.
fn burst(rig: &Rig, n: usize, ctx: Ctx) {
    let fat = packet(1, 1000 - 42);
    for _ in 0..n {
        rig.run(0, &fat, ctx);
        rig.clear_note();
    }
}

/// Windows with `n` packets each that leave the flow in its class.
fn stays(rig: &Rig, class: Class, n: usize, ctx: Ctx) -> Option<()> {
    for _ in 0..3 {
        sleep(ms(65));
        match class {
            // A burst that takes longer is one of a lower rate.
            Class::Bulk => within_a_window(|| burst(rig, n, ctx))?,
            Class::Latency => burst(rig, n, ctx),
        }
        assert_eq!(rig.flow().class, class, "{n} packets a window");
    }
    Some(())
}

fn class_follows_the_rate(rig: &mut Rig) -> Option<()> {
    rig.clear_flows();
    // Latency flows by u0, bulk flows by u1, no gap needed beyond the margin of 1 ms.
    rig.masks(Masks {
        bulk: 0b10,
        ..only(0)
    });
    let fat = packet(1, 1000 - 42);
    let mut seen = vec![];
    let mut by = 0;
    within_a_window(|| {
        for n in [10, 1] {
            burst(rig, n, PLAIN);
            seen.push(rig.flow().class);
        }
        // From the first packet that should leave on, gaps are exact.
        rig.send(0, &fat);
        sleep(ms(3));
        by = rig.send(0, &fat);
    })?;
    assert_eq!(seen, [Class::Latency, Class::Bulk], "10 and 11 packets");
    assert_eq!(by, 1, "a bulk flow belongs on u1");
    // Between the thresholds it stays what it is: 7 packets a window, from either side.
    stays(rig, Class::Bulk, 7, PLAIN)?;
    // A quiet window and one packet to see its end; the first ends the busy window.
    let single = |rig: &Rig| {
        sleep(ms(65));
        let before = coarse();
        burst(rig, 1, PLAIN);
        (before, coarse())
    };
    let (first, second) = (single(rig), single(rig));
    assert_eq!(rig.flow().class, Class::Latency, "quiet");
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
    stays(rig, Class::Latency, 7, PLAIN)?;
    // One GSO packet in a window: not latency, however low the rate.
    sleep(ms(65));
    within_a_window(|| burst(rig, 12, PLAIN))?;
    assert_eq!(rig.flow().class, Class::Bulk);
    stays(rig, Class::Bulk, 1, Ctx::gso(500))?;
    // The last GSO packet ended its window itself.
    sleep(ms(65));
    burst(rig, 1, PLAIN);
    assert_eq!(rig.flow().class, Class::Latency);
    Some(())
}

#[test]
fn packets_that_ask_for_low_latency_get_it() {
    with_rig(patient(), |mut rig| {
        rig.masks(BOTH);
        for v6 in [false, true] {
            // DSCP 32 and up: CS4, AF41, EF, CS6, with ECN bits too; CS3, AF33, default not.
            let high = [0x80, 0x88, 0xb8, 0xc0, 0xe0, 0xb9, 0x83].map(|d| (d, Class::Latency));
            let low = [0x60, 0x78, 0x7f, 0, 3].map(|d| (d, Class::Bulk));
            for (dsfield, class) in high.into_iter().chain(low) {
                let ip = Ip::new(v6, UDP, udp(1, 2, 1300)).with(|ip| ip.dsfield = dsfield);
                when_quick_enough(|| {
                    rig.clear_flows();
                    within_a_window(|| (0..12).for_each(|_| _ = rig.send_ip(0, &ip)))
                });
                assert_eq!(rig.flow().class, class, "{dsfield:#x}");
            }
        }
    });
}

#[test]
fn thin_tcp_flows_of_full_sized_packets_are_bulk() {
    with_rig(settings(), |mut rig| {
        // window 50 ms; elastic above 3,000 bytes
        rig.masks(BOTH);
        let ack = |len| Ip::v4(TCP, tcp(1, 2, ACK, len)).on(0);
        // Packets, how many in a window, and the class then and at a lower rate.
        for (name, p, n, class, after) in [
            ("1,014 bytes by TCP", ack(948), 4, Class::Bulk, Class::Bulk),
            (
                "as many by UDP",
                packet(1, 972),
                4,
                Class::Latency,
                Class::Latency,
            ),
            ("514 by TCP", ack(448), 8, Class::Latency, Class::Latency),
            ("1,014 by TCP", ack(948), 2, Class::Latency, Class::Latency),
        ] {
            let window = |n| {
                for _ in 0..n {
                    rig.run(0, &p, PLAIN);
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
            assert!(settled(class, n), "{n} of {name}");
            for _ in 0..3 {
                sleep(ms(65));
                window(1);
            }
            assert_eq!(rig.flow().class, after, "{n} of {name}, then one a window");
        }
    });
}
