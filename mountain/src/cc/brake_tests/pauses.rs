// SPDX-License-Identifier: GPL-2.0-or-later
//! The brake where packets are few: gaps of its own pacing, idleness of the application, lone messages, and BBR's
//! own business meanwhile.

use super::*;

/// One packet in flight at a time, each a second half after the other: slices end all the same.
#[test]
fn gaps_of_its_own_pacing_do_not_hold_the_limit() {
    for rtt_us in [100, 40_000] {
        let (mut brake, mut a) = drop_of(20 * MBIT, MBIT / 10, rtt_us);
        let limit = brake.b.bps;
        for _ in 0..100 {
            brake.tx_start(&a, 500_000, false);
            let total = a.total + 1;
            a = ack(&a, 500_000 + u64::from(rtt_us), 20 * MBIT, 0, 1.0);
            (a.total, a.delivered) = (total, 1);
            brake.ack(&a);
            if brake.b.state != CUT {
                break;
            }
        }
        assert!(brake.b.state == RELEASE || brake.b.state == OFF);
        assert!(brake.b.bps > limit, "{rtt_us}: {:?}", brake.b);
    }
}

#[test]
fn only_idleness_of_the_application_ends_a_brake() {
    let braked = || {
        let (mut brake, a) = drop_of(50 * MBIT, 10 * MBIT, 40_000);
        (brake.b.slack_us, brake.b.unrest) = (5_000, 100);
        (brake, a)
    };
    // A timeout: nothing in flight, and much to send.
    let (mut brake, a) = braked();
    let before = (brake.b.bps, brake.b.slice_start_us);
    brake.tx_start(&a, 3_000_000, false);
    assert_eq!(brake.b.state, CUT);
    assert_eq!((brake.b.bps, brake.b.slice_start_us), before);
    assert_eq!((brake.b.slack_us, brake.b.unrest), (5_000, 100));
    // A short pause of the application.
    brake.tx_start(&a, 900_000, true);
    assert_eq!((brake.b.state, brake.b.slack_us), (CUT, 5_000));
    // A long one: nothing of what was is left.
    brake.tx_start(&a, 1_100_000, true);
    assert_eq!((brake.b.state, brake.b.bps), (OFF, u64::MAX));
    assert_eq!((brake.b.slack_us, brake.b.unrest), (0, 0));
    assert_eq!(brake.b.slice_start_us, a.now_us + 1_100_000);
    // Where nothing is limited a slice has no idle time in it, and a held window ends with it.
    brake.b.state = HOLD;
    brake.tx_start(&a, 2_000, true);
    assert_eq!(brake.b.state, HOLD, "as short as a slice");
    brake.tx_start(&a, 2_001, true);
    let begun = (brake.b.state, brake.b.slice_start_us);
    assert_eq!(begun, (OFF, a.now_us + 2_001));
}

#[test]
fn a_held_window_ends_where_the_brake_stands_back() {
    let mut brake = Brake::new();
    let mut a = flow(50 * MBIT, 40_000);
    brake.ack(&a);
    (brake.b.state, brake.b.hold_cwnd) = (HOLD, 5);
    assert_eq!(brake.cwnd(&a), 5);
    a = ack(&a, 1_000, 50 * MBIT, 0, 1.0);
    a.suspended = 1;
    brake.ack(&a);
    a.suspended = 0;
    assert_eq!((brake.b.state, brake.cwnd(&a)), (OFF, u32::MAX));
    // A limit does not: it counts again afterwards.
    let (mut brake, mut a) = drop_of(50 * MBIT, 10 * MBIT, 40_000);
    let limit = brake.b.bps;
    a.suspended = 1;
    brake.ack(&a);
    assert_eq!((brake.b.state, brake.b.bps), (CUT, limit));
}

/// Such a packet's RTT may be the receiver's waiting, and an ACK of four of them never comes.
#[test]
fn lone_small_messages_do_not_hold_the_limit() {
    let (mut brake, mut a) = drop_of(50 * MBIT, 10 * MBIT, 40_000);
    let message = |a: &mtn_ack, app_limited| {
        let mut next = ack(a, 300_000, 10 * MBIT, 0, 1.0);
        (next.total, next.delivered) = (a.total + 1, 1);
        (next.ack_delayed, next.app_limited) = (1, app_limited);
        next
    };
    let start = brake.b.slice_start_us;
    while a.now_us <= start + 1_000_000 {
        assert_eq!(brake.b.state, CUT, "{} us", a.now_us - start);
        a = message(&a, 1);
        brake.tx_start(&a, 0, true);
        brake.ack(&a);
    }
    assert_eq!((brake.b.state, brake.b.bps), (OFF, u64::MAX));
    // One that has more to send waits for its slice.
    let (mut brake, mut a) = drop_of(50 * MBIT, 10 * MBIT, 40_000);
    for _ in 0..10 {
        a = message(&a, 0);
        brake.ack(&a);
    }
    assert_eq!(brake.b.state, CUT);
}
