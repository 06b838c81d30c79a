// SPDX-License-Identifier: GPL-2.0-or-later
//! Paths whose rate keeps falling far and coming back: what the brake leaves in the queue there, how little more than
//! one BDP it has in flight, and how fast it takes up what comes back.

use super::*;

/// The slack, µs, after a drop to `to` Mbit/s and its end, at 40 ms: `before` it, `unrest` slices in which that
/// counts as soon, and `gap_us` without an ACK.
fn slack_after(to: u64, before: u32, unrest: u32, gap_us: u64) -> u32 {
    let mut brake = Brake::new();
    (brake.b.slack_us, brake.b.unrest) = (before, unrest);
    brake.b.goal_until_us = 60_000_000;
    let mut a = flow(50 * MBIT, 40_000);
    for i in 1..100 {
        let gap_us = if i == 2 { gap_us } else { 0 };
        a = ack(&a, 10_000 + gap_us, to * MBIT, 20_000 * i, 1.5);
        brake.ack(&a);
        if brake.b.state == CUT {
            break;
        }
    }
    assert_eq!(brake.b.state, CUT);
    for _ in 0..100 {
        a = ack(&a, 10_000, to * MBIT, 0, 1.0);
        brake.ack(&a);
        // With half of it left the release is over at once.
        if brake.b.state != CUT {
            assert_eq!(brake.b.abandoned, 0);
            return brake.b.slack_us;
        }
    }
    panic!("no release: {:?}", brake.b);
}

#[test]
fn a_queue_is_left_where_the_rate_falls_far_and_soon_again() {
    assert_eq!(slack_after(10, 0, 100, 0), 10_000);
    assert_eq!(slack_after(10, 10_000, 100, 0), 20_000);
    assert_eq!(slack_after(10, 38_000, 100, 0), 40_000, "at most");
    assert_eq!(slack_after(35, 10_000, 100, 0), 10_000, "not far");
    assert_eq!(slack_after(10, 0, 0, 0), 0, "for the first time");
    assert_eq!(slack_after(10, 0, 100, 300_000), 10_000);
    assert_eq!(slack_after(10, 0, 100, 2_000_000), 0, "an outage");
}

/// Where a queue turns out to be others', what was learnt of the path is not the path's.
#[test]
fn a_brake_in_vain_is_not_restless() {
    let (mut brake, mut a) = drop_of(50 * MBIT, 10 * MBIT, 40_000);
    (brake.b.slack_us, brake.b.unrest) = (20_000, 200);
    for _ in 0..100 {
        a = ack(&a, 10_000, 10 * MBIT, 200_000, 1.0);
        a.inflight = brake.cwnd(&a).min(40);
        brake.ack(&a);
    }
    assert_eq!((brake.b.state, brake.b.abandoned), (OFF, 1));
    assert_eq!((brake.b.slack_us, brake.b.unrest), (0, 0));
}

/// Who sends so little that no slice is complete does not stay restless: ten seconds after the last brake it is over.
#[test]
fn restlessness_is_forgotten_by_the_clock_too() {
    let (mut brake, mut a) = unlimited(20_000);
    brake.b.goal_until_us = a.now_us + 30_000;
    for _ in 0..3 {
        a = ack(&a, 10_000, 50 * MBIT, 0, 1.0);
        brake.ack(&a);
    }
    assert_eq!(brake.b.slack_us, 20_000);
    a = ack(&a, 10_000, 50 * MBIT, 0, 1.0);
    brake.ack(&a);
    assert_eq!((brake.b.slack_us, brake.b.unrest), (0, 0));
}

/// A flow that has `slack_us` of slack and is not braked: 50 Mbit/s, 40 ms, 173 packets.
fn unlimited(slack_us: u32) -> (Brake, mtn_ack) {
    let mut brake = Brake::new();
    (brake.b.slack_us, brake.b.unrest) = (slack_us, 200);
    brake.b.goal_until_us = 60_000_000;
    let a = flow(50 * MBIT, 40_000);
    (brake, ack(&a, 10_000, 50 * MBIT, 0, 1.0))
}

#[test]
fn on_a_restless_path_little_more_than_a_bdp_is_in_flight() {
    let bdp = 173;
    let (brake, a) = unlimited(0);
    assert_eq!(brake.cwnd_of(&a, 2 * bdp), u32::MAX, "calm");
    let (mut brake, mut a) = unlimited(10_000);
    assert_eq!(brake.cwnd_of(&a, 2 * bdp), bdp + bdp / 4);
    // What BBR adds to its two BDP (346) for ACKs that come late.
    assert_eq!(brake.cwnd_of(&a, 2 * bdp + 40), bdp + bdp / 4 + 40);
    a.startup = 1;
    assert_eq!(brake.cwnd_of(&a, 2 * bdp), u32::MAX, "its own window");
    a.startup = 0;

    // The same of the limit in a release, and the slack by what was carried when it began: 10 Mbit/s.
    brake.b.state = RELEASE;
    (brake.b.bps, brake.b.release_bps) = (100 * MBIT, 10 * MBIT);
    let (bdp, slack) = (346, 9);
    assert_eq!(brake.cwnd_of(&a, 0), bdp + bdp / 4 + slack);
    brake.b.slack_us = 0;
    assert_eq!(brake.cwnd_of(&a, 0), 691, "calm: two BDP of the limit");
}

/// Braked to 10 Mbit/s with the queue of a fade: what one slice of ACKs at `mbit` makes of it.
fn after_a_slice(slack_us: u32, mbit: u64) -> (u8, u64) {
    let (mut brake, mut a) = braked_to(50 * MBIT, 10 * MBIT, 40_000);
    (brake.b.slack_us, brake.b.bps) = (slack_us, 10 * MBIT);
    for rate in [10 * MBIT, mbit * MBIT] {
        let total = a.total + (rate / 100 / 8 / 1448) as u32;
        a = ack(&a, 10_000, 10 * MBIT, 200_000, 1.0);
        (a.total, a.inflight) = (total, 200);
        brake.ack(&a);
    }
    (brake.b.state, brake.b.bps)
}

#[test]
fn a_restless_path_that_is_back_by_far_needs_one_slice() {
    assert_eq!(after_a_slice(0, 50).0, CUT, "calm: two");
    assert_eq!(after_a_slice(10_000, 30).0, CUT, "not by far");
    let (state, bps) = after_a_slice(10_000, 50);
    assert_eq!(state, RELEASE);
    // Three quarters of it, less what does not fill a packet.
    assert!((36 * MBIT..=38 * MBIT).contains(&bps), "{bps}");
}

/// How long it takes, µs, and in how many raises, from 10 Mbit/s to 50 without a queue.
fn back(slack_us: u32) -> (u64, usize) {
    let (mut brake, mut a) = braked_to(50 * MBIT, 10 * MBIT, 40_000);
    brake.b.slack_us = slack_us;
    // The queue drains.
    a = ack(&a, 10_000, 10 * MBIT, 0, 1.0);
    brake.ack(&a);
    let (began, mut raises, mut limit) = (a.now_us, 0, brake.b.bps);
    while brake.b.state == RELEASE {
        a = ack(&a, 5_000, 9 * MBIT, 0, 1.0);
        a.max_bps = 10 * MBIT;
        brake.ack(&a);
        raises += usize::from(brake.b.bps > limit);
        limit = brake.b.bps;
        assert!(a.now_us < began + 10_000_000, "{:?}", brake.b);
    }
    (a.now_us - began, raises)
}

#[test]
fn a_restless_path_is_taken_up_twice_as_fast() {
    let (calm, restless) = (back(0), back(10_000));
    assert!(2 * restless.1 <= calm.1 + 1, "{restless:?} {calm:?}");
    assert!(3 * restless.0 < 2 * calm.0, "{restless:?} {calm:?}");
}

/// In a release an eighth of a round trip is a slice, a quarter where the path is calm.
#[test]
fn a_release_on_a_restless_path_looks_twice_as_often() {
    for (slack_us, slices) in [(0, 10), (10_000, 20)] {
        let (mut brake, mut a) = unlimited(slack_us);
        brake.b.state = RELEASE;
        (brake.b.bps, brake.b.goal_bps) = (20 * MBIT, 1_000 * MBIT);
        brake.b.slice_start_us = a.now_us;
        let (mut starts, mut last) = (0, a.now_us);
        for _ in 0..100 {
            a = ack(&a, 1_000, 20 * MBIT, 0, 1.0);
            a.total += 3;
            brake.ack(&a);
            starts += usize::from(brake.b.slice_start_us != last);
            last = brake.b.slice_start_us;
        }
        assert_eq!(starts, slices, "{slack_us}");
    }
}
