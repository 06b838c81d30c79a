// SPDX-License-Identifier: GPL-2.0-or-later
//! The brake over ACKs that BBR's own flows got on emulated links (mountain/tests/vectors/acks): what it would have
//! done. It does not act on them, so a queue stays as long as BBR leaves it there.

use std::io::Read;

use flate2::read::GzDecoder;

use super::*;

/// ACKs of one flow, in the order in which they came.
struct Recorded {
    acks: Vec<mtn_ack>,
}

impl Recorded {
    /// A file's head says the packets' size; then one ACK a line: µs since the one before, BBR's estimate,
    /// packets and µs of the rate sample, µs in which they were sent and acknowledged, RTT, smallest RTT,
    /// packets delivered since the ACK before, in flight, flags.
    fn read(file: &[u8]) -> Self {
        let mut text = String::new();
        GzDecoder::new(file).read_to_string(&mut text).unwrap();
        let mut lines = text.lines().filter(|line| !line.starts_with('#'));
        let mss = lines.next().unwrap().strip_prefix("mss ").unwrap();
        let first = mtn_ack {
            now_us: 1_000_000,
            mss: mss.parse().unwrap(),
            ..Default::default()
        };
        let next = |before: &mut mtn_ack, line: &str| {
            let n: Vec<u64> = line.split(' ').map(|n| n.parse().unwrap()).collect();
            let word = |i: usize| u32::try_from(n[i]).unwrap();
            let flag = |bit: u32| (n[10] >> bit & 1) as u8;
            *before = mtn_ack {
                now_us: before.now_us + n[0],
                max_bps: n[1],
                delivered: word(2),
                interval_us: word(3),
                snd_us: word(4),
                rcv_us: word(5),
                rtt_us: word(6),
                min_rtt_us: word(7),
                total: before.total + word(8),
                inflight: word(9),
                mss: before.mss,
                app_limited: flag(0),
                ack_delayed: flag(1),
                suspended: flag(2),
                startup: flag(3),
            };
            Some(*before)
        };
        let acks = lines.scan(first, next).collect();
        Recorded { acks }
    }

    /// Runs a brake over them. `each` gets the time since the first ACK, the ACK, and the brake before and
    /// after it.
    fn run(&self, mut each: impl FnMut(u64, &mtn_ack, &mtn_brake, &Brake)) -> Brake {
        let mut brake = Brake::new();
        for a in &self.acks {
            let before = brake.b;
            brake.ack(a);
            each(a.now_us - self.acks[0].now_us, a, &before, &brake);
        }
        brake
    }
}

macro_rules! recorded {
    ($name:literal) => {
        Recorded::read(include_bytes!(concat!(
            "../../../tests/vectors/acks/",
            $name,
            ".txt.gz"
        )))
    };
}

/// When the first slow ACK comes in in step-50-10: two packets each 2.4 ms, not each 0.48. The link's rate
/// fell about one round trip before that, and nothing could tell in between.
const FIRST_SLOW_US: u64 = 699_201;

#[test]
fn a_recorded_drop_is_braked_within_a_round_trip_of_the_first_slow_ack_to_what_is_delivered() {
    let mut cut_at = None;
    let mut limits = Vec::new();
    recorded!("step-50-10").run(|at, a, _, brake| {
        if brake.b.state == CUT {
            cut_at.get_or_insert(at);
        }
        // As nothing slows the flow down, its samples last as long as the queue that it makes, and contain
        // the time before the drop until then.
        if (FIRST_SLOW_US + 240_000..FIRST_SLOW_US + 400_000).contains(&at) {
            limits.push(brake.effective(a));
        }
    });
    let cut_at = cut_at.expect("braked");
    let since = cut_at.checked_sub(FIRST_SLOW_US);
    assert!(since.is_some_and(|us| us < 40_000), "{cut_at}");
    for limit in limits {
        // What comes in on the wire is 10 Mbit/s, of which 1448 of 1514 bytes count.
        assert!((8 * MBIT..=11 * MBIT).contains(&limit), "{limit}");
    }
}

#[test]
fn a_recorded_steady_link_is_left_alone() {
    let brake = recorded!("steady-20").run(|_, _, _, _| ());
    assert_eq!(brake.b.engagements, 0, "{:?}", brake.b);
}

/// As `never_below_measured_delivery` has it for made-up ACKs.
#[test]
fn over_recorded_acks_a_limit_stays_at_or_above_what_is_delivered() {
    for (recorded, expected) in [
        (recorded!("step-50-10"), 1),
        (recorded!("steady-20"), 0),
        (recorded!("fast"), 1),
    ] {
        let brake = recorded.run(|at, a, before, brake| {
            let was = before.bps.min(a.max_bps);
            if brake.b.bps < was {
                let is_delivered = brake.b.bps >= brake.b.last_bps.min(was);
                assert!(is_delivered, "{at}: {:?}", brake.b);
                assert!(brake.b.bps >= was / 2, "{at}: {:?}", brake.b);
            }
            assert!(brake.cwnd(a) >= 4);
        });
        assert!(brake.b.engagements >= expected, "{:?}", brake.b);
    }
}
