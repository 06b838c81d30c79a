// SPDX-License-Identifier: GPL-2.0-or-later
//! Tests of settling (bpf/cc/settle.h, compiled for this machine).

use proptest::prelude::*;

use super::types::{mtn_ack, mtn_settle};

unsafe extern "C" {
    fn mtn_settle_host_ack(s: *mut mtn_settle, a: *const mtn_ack);
    fn mtn_settle_host_tx_start(s: *mut mtn_settle, idle_us: u64);
    fn mtn_settle_host_cwnd(s: *const mtn_settle, a: *const mtn_ack) -> u32;
}

const BEFORE: u8 = 0;
const LOOKING: u8 = 1;
const DONE: u8 = 2;
const NO_LIMIT: u32 = u32::MAX;

/// One flow, an ACK at a time.
struct Flow {
    s: mtn_settle,
    a: mtn_ack,
}

impl Flow {
    fn new(min_rtt_us: u32, inflight: u32) -> Self {
        Flow {
            s: mtn_settle::default(),
            a: mtn_ack {
                min_rtt_us,
                inflight,
                mss: 1448,
                ..Default::default()
            },
        }
    }

    /// What the window is limited to.
    fn limit(&self) -> u32 {
        // SAFETY: live structures, which the function only reads.
        unsafe { mtn_settle_host_cwnd(&self.s, &self.a) }
    }

    /// `packets` more are acknowledged, after `rtt_us`; in flight is what the window has allowed. Returns
    /// what it is limited to then.
    fn ack(&mut self, packets: u32, rtt_us: u32) -> u32 {
        self.a.inflight = self.a.inflight.min(self.limit());
        self.a.total = self.a.total.wrapping_add(packets);
        self.a.rtt_us = rtt_us;
        // SAFETY: live structures; the function only reads the latter.
        unsafe { mtn_settle_host_ack(&mut self.s, &self.a) };
        self.limit()
    }

    /// Something is sent with nothing in flight, after the application had nothing for `idle_us`.
    fn tx_start(&mut self, idle_us: u64) {
        // SAFETY: a live structure.
        unsafe { mtn_settle_host_tx_start(&mut self.s, idle_us) }
    }

    /// All that was in flight is acknowledged.
    fn round(&mut self, rtt_us: u32) -> u32 {
        self.ack(self.a.inflight, rtt_us)
    }
}

#[test]
fn a_flow_that_is_alone_makes_room_for_one_round_trip() {
    let mut f = Flow::new(40_000, 66);
    f.a.startup = 1;
    assert_eq!((f.ack(66, 60_000), f.s.state), (NO_LIMIT, BEFORE));
    (f.a.startup, f.a.suspended) = (0, 1);
    assert_eq!((f.ack(66, 60_000), f.s.state), (NO_LIMIT, BEFORE));
    f.a.suspended = 0;
    assert_eq!((f.ack(1, 41_000), f.s.state), (33, LOOKING));
    // Of this round trip all was sent before.
    assert_eq!(f.round(41_000), 33);
    assert_eq!((f.ack(33, 40_000), f.s.state), (NO_LIMIT, DONE));
    // Never again, whatever comes.
    f.a.startup = 1;
    assert_eq!(f.ack(66, 400_000), NO_LIMIT);
    f.a.startup = 0;
    for rtt_us in [400_000, 300_000, 40_000, 10_000] {
        assert_eq!((f.ack(66, rtt_us), f.s.state), (NO_LIMIT, DONE));
    }
}

#[test]
fn it_stands_back_while_bbr_drains_or_probes() {
    let mut f = Flow::new(40_000, 66);
    assert_eq!(f.ack(1, 41_000), 33);
    f.a.suspended = 1;
    assert_eq!((f.ack(66, 41_000), f.s.rounds), (NO_LIMIT, 0));
    f.a.suspended = 0;
    assert_eq!(f.ack(1, 41_000), 33);
}

#[test]
fn it_begins_with_a_full_flight_and_idleness_ends_it() {
    let mut f = Flow::new(40_000, 7);
    f.a.app_limited = 1;
    assert_eq!((f.ack(3, 41_000), f.s.state), (NO_LIMIT, BEFORE));
    f.tx_start(2_000_000);
    assert_eq!(f.s.state, BEFORE);
    (f.a.app_limited, f.a.inflight) = (0, 66);
    assert_eq!((f.ack(1, 41_000), f.s.state), (33, LOOKING));
    f.tx_start(1_000_000);
    assert_eq!((f.limit(), f.s.state), (33, LOOKING), "a short pause");
    f.tx_start(1_000_001);
    assert_eq!((f.limit(), f.s.state), (NO_LIMIT, DONE));
}

#[test]
fn acks_that_the_receiver_held_back_say_nothing() {
    let mut f = Flow::new(40_000, 66);
    f.a.ack_delayed = 1;
    f.ack(1, 80_000);
    assert_eq!((f.ack(66, 80_000), f.s.rounds), (33, 0));
    f.a.ack_delayed = 0;
    assert_eq!((f.ack(1, 40_000), f.s.rounds), (33, 1));
}

#[test]
fn it_lasts_eight_round_trips_at_most() {
    let mut f = Flow::new(1 << 20, 4_000);
    assert_eq!(f.ack(1, 1 << 20), 2_000);
    for round in 1..8 {
        assert_eq!(f.round(1 << (20 - round)), 2_000 >> round, "{round}");
    }
    assert_eq!((f.round(1 << 12), f.s.state), (NO_LIMIT, DONE));
}

/// `n` flows of `own` packets each on a path of `rtt_us` that carries `bdp` of them; the first
/// `settling` settle, the others keep their windows. Returns the shortest RTT that anybody saw.
fn together(n: usize, settling: usize, own: u32, bdp: u32, rtt_us: u32) -> u32 {
    let rtt_of = |inflight: u32| rtt_us * inflight.max(bdp) / bdp;
    let full = rtt_of(n as u32 * own);
    let mut flows: Vec<Flow> = (0..n).map(|_| Flow::new(full, own)).collect();
    let mut lowest = full;
    for _ in 0..20 {
        let rtt = rtt_of(flows.iter().map(|f| f.a.inflight).sum());
        lowest = lowest.min(rtt);
        for f in &mut flows[..settling] {
            let limit = f.round(rtt).min(own);
            // BBR fills its window again.
            f.a.inflight = if f.s.state == DONE { own } else { limit };
        }
    }
    assert!(flows[..settling].iter().all(|f| f.s.state == DONE));
    lowest
}

#[test]
fn flows_that_settle_together_see_the_empty_path() {
    // Four flows, and three BDP of queue.
    assert_eq!(together(4, 4, 66, 66, 40_000), 40_000);
    // One alone makes only its own room: then the queue is the others'.
    let alone = together(4, 1, 66, 66, 40_000);
    assert!((120_000..160_000).contains(&alone), "{alone}");
}

proptest! {
    /// Whatever the ACKs say: it ends within its number of round trips, and the window never falls
    /// below four packets nor grows while it lasts.
    #[test]
    fn it_ends(
        acks in prop::collection::vec((1u32..500, 0u32..1_000_000, any::<u8>()), 100..400),
        min_rtt_us in 1u32..1_000_000,
        inflight in 0u32..100_000,
        total in any::<u32>(),
    ) {
        let mut f = Flow::new(min_rtt_us, inflight);
        f.a.total = total;
        let mut last = NO_LIMIT;
        for (packets, rtt_us, bits) in acks {
            f.a.suspended = u8::from(bits & 7 == 7);
            f.a.inflight = inflight.min(last);
            let limit = f.ack(packets, rtt_us);
            prop_assert!(limit >= 4);
            if f.s.state == LOOKING && f.a.suspended == 0 {
                prop_assert!(limit <= last);
                last = limit;
            }
        }
        f.a.suspended = 0;
        for _ in 0..8 {
            f.round(min_rtt_us);
        }
        prop_assert_eq!(f.s.state, DONE);
        prop_assert_eq!(f.ack(1, min_rtt_us), NO_LIMIT);
    }
}
