// SPDX-License-Identifier: GPL-2.0-or-later
//! What becomes of a flow on a simulated link whose rate changes.

use super::sim::{BrakeSim, SimLink, SimTrace};
use super::*;

fn link<const N: usize>(rates: [(f64, f64); N], rtt: f64, queue: f64) -> SimLink {
    let rates = rates.to_vec();
    SimLink { rates, rtt, queue }
}

/// Ten seconds of a flow that is braked, and of one that is not.
fn with_and_without(link: SimLink) -> (SimTrace, SimTrace) {
    let braked = BrakeSim::new(link.clone(), Some(Brake::new())).run(10.0);
    (braked, BrakeSim::new(link, None).run(10.0))
}

#[test]
fn a_step_down_drains_and_a_steady_link_is_left_alone() {
    let link = link([(0.0, 50e6), (5.0, 10e6)], 0.04, 3e6);
    let (braked, plain) = with_and_without(link);
    assert_eq!(braked.engagements_before(5.0), 0);
    assert!(braked.engagements_before(5.3) >= 1);
    // The first slow packet is acknowledged a round trip after the step: two slices, and the ACKs of one
    // of them are not all slow.
    let held = braked.first_limited(5.0) - 5.04;
    assert!(held < 3.0 * 0.04 / 8.0, "{held} s");
    // Of the 2 s after the step a fourth is what was in flight; then the release must not fill it again.
    let queue = braked.queue(5.0, 7.0, 0.5);
    assert!(queue < 0.02, "{queue} s");
    let after = |s: &SimTrace| (s.queue(7.5, 10.0, 0.95), s.goodput(5.5, 10.0));
    let ((q, goodput), (plain_q, plain_goodput)) = (after(&braked), after(&plain));
    assert!(q < 0.15 * plain_q, "{q} s against {plain_q} s");
    let is_full = goodput > 0.95 * plain_goodput;
    assert!(is_full, "{goodput} against {plain_goodput}");
}

/// Three packets are one BDP here: the fourth of the smallest window is in the queue, and is nobody else's.
#[test]
fn a_window_of_few_packets_is_no_queue_of_others() {
    for (from, to, rtt) in [(20e6, 2e6, 0.02), (10e6, 1e6, 0.02)] {
        let link = link([(0.0, from), (5.0, to)], rtt, 1e6);
        let (braked, plain) = with_and_without(link);
        let (a, b) = (braked.queue(7.5, 10.0, 0.95), plain.queue(7.5, 10.0, 0.95));
        assert!(a < 0.2 * b, "{from} to {to}: {a} s against {b} s");
        let (a, b) = (braked.goodput(7.5, 10.0), plain.goodput(7.5, 10.0));
        assert!(a > 0.95 * b, "{from} to {to}: {a} against {b}");
    }
}

#[test]
fn a_step_up_is_found_as_fast_as_without() {
    let link = link([(0.0, 10e6), (5.0, 40e6)], 0.04, 3e6);
    let (braked, plain) = with_and_without(link);
    let (a, b) = (braked.goodput(5.0, 10.0), plain.goodput(5.0, 10.0));
    assert!(a > 0.97 * b, "{a} against {b}");
}

#[test]
fn after_a_fade_the_rate_is_back_within_a_second() {
    let link = link([(0.0, 40e6), (4.0, 4e6), (6.0, 40e6)], 0.04, 3e6);
    let braked = BrakeSim::new(link, Some(Brake::new())).run(9.0);
    let share = braked.goodput(7.0, 9.0) / 40e6;
    assert!(share > 0.85, "{share}");
}

/// A fade so deep that the gaps of the brake's own pacing are longer than the round trip: afterwards
/// every packet is sent with nothing in flight.
#[test]
fn after_a_fade_to_almost_nothing_the_rate_is_back() {
    let mut shares = vec![];
    for rtt in [0.04, 100e-6] {
        for fade in [4.0, 8.0] {
            let link = link([(0.0, 20e6), (3.0, 100e3), (3.0 + fade, 20e6)], rtt, 60e3);
            let braked = BrakeSim::new(link, Some(Brake::new())).run(13.0 + fade);
            assert!(braked.engagements_before(3.0 + fade) >= 1, "{rtt} {fade}");
            let share = braked.goodput(8.0 + fade, 13.0 + fade) / 20e6;
            shares.push((rtt, fade, share));
        }
    }
    assert!(shares.iter().all(|s| s.2 > 0.85), "{shares:?}");
}

/// A fade is over where BBR's estimate has risen by an eighth from its lowest, and there was no queue since.
#[test]
fn the_end_of_a_fade_is_a_rise_without_a_queue() {
    let released_at = |queue_at: Option<u64>| {
        let (mut brake, mut a) = braked_to(50 * MBIT, 5 * MBIT, 40_000);
        brake.b.state = OFF;
        brake.b.bps = u64::MAX;
        a.max_bps = 10 * MBIT;
        for percent in 0..40 {
            a.max_bps = 10 * MBIT + percent * MBIT / 10;
            let queue_us = if queue_at == Some(percent) { 8_000 } else { 0 };
            a = ack(&a, 10_000, a.max_bps, queue_us, 1.0);
            brake.ack(&a);
            if brake.b.state == RELEASE {
                return percent;
            }
            assert_eq!(brake.b.state, OFF);
        }
        panic!("{:?}", brake.b);
    };
    assert_eq!(released_at(None), 13);
    assert_eq!(released_at(Some(9)), 23);
}

/// ... and then it is over: once more only after a further rise.
#[test]
fn the_end_of_a_fade_is_seen_once() {
    let (mut brake, mut a) = braked_to(50 * MBIT, 5 * MBIT, 40_000);
    brake.b.state = OFF;
    brake.b.bps = u64::MAX;
    a.max_bps = 10 * MBIT;
    let (mut releases, mut most, mut before) = (0, 0, OFF);
    for i in 0..400 {
        if i == 10 {
            a.max_bps = 12 * MBIT;
        }
        a = ack(&a, 10_000, a.max_bps, 0, 1.0);
        brake.ack(&a);
        if brake.b.state == RELEASE {
            releases += u32::from(before == OFF);
            most = most.max(brake.b.bps);
        }
        before = brake.b.state;
    }
    assert_eq!((releases, brake.b.state), (1, OFF));
    // The estimate when the brake engaged is 50.
    assert!(most > 40 * MBIT, "{most}");
}
