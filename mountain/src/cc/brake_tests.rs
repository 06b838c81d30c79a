// SPDX-License-Identifier: GPL-2.0-or-later
//! Tests of the brake (bpf/brake.h, compiled for this machine): what holds for every sequence of
//! ACKs, and what becomes of flows on a simulated link.

mod bbr;
mod links;
mod pauses;
mod recorded;
mod restless;
mod sim;

use std::ffi::c_int;

use proptest::prelude::*;

use super::types::{mtn_ack, mtn_brake, mtn_brake_params};

unsafe extern "C" {
    static mtn_brake_host_defaults: mtn_brake_params;
    fn mtn_brake_host_init(b: *mut mtn_brake);
    fn mtn_brake_host_ack(b: *mut mtn_brake, p: *const mtn_brake_params, a: *const mtn_ack);
    fn mtn_brake_host_tx_start(
        b: *mut mtn_brake,
        p: *const mtn_brake_params,
        now_us: u64,
        total: u32,
        idle_us: u64,
        app_limited: c_int,
    );
    fn mtn_brake_host_pacing(b: *const mtn_brake, a: *const mtn_ack, rate: u64) -> u64;
    fn mtn_brake_host_cwnd(
        b: *const mtn_brake,
        p: *const mtn_brake_params,
        a: *const mtn_ack,
        own: u32,
    ) -> u32;
    fn mtn_brake_host_own_cwnd(cwnd: u32, own: u32, limited: u32, loss: i32) -> u32;
    fn mtn_brake_host_bps_of_bbr(bw: u32, mss: u32) -> u64;
    fn mtn_brake_host_published_gain(gain: u32, max_bps: u64, bps: u64) -> u32;
}

/// The kernel's own BBR (kernel/patches) brakes by the same text.
#[test]
fn arithmetic_is_the_same_in_the_kernel() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../");
    let ours = std::fs::read_to_string(format!("{root}bpf/brake.h")).unwrap();
    // The kernel's copy has the kernel's licence.
    let ours = ours.replacen(" OR BSD-2-Clause", "", 1);
    let patch = "kernel/patches/6.12/0008-tcp_bbr-delta-brake.patch";
    let patch = std::fs::read_to_string(format!("{root}{patch}")).unwrap();
    let (_, file) = patch
        .split_once("+++ b/net/ipv4/tcp_bbr_brake.h\n@@ ")
        .expect("the patch adds the file");
    let theirs: String = file
        .split_inclusive('\n')
        .skip(1)
        .map_while(|line| line.strip_prefix('+'))
        .collect();
    let another = "the patch has another bpf/brake.h: kernel/scripts/brake puts this one into it";
    assert!(theirs == ours, "{another}");
}

const OFF: u8 = 0;
const HOLD: u8 = 1;
const CUT: u8 = 2;
const RELEASE: u8 = 3;
const MBIT: u64 = 1_000_000;

/// The brake of one flow.
struct Brake {
    b: mtn_brake,
    p: mtn_brake_params,
}

impl Brake {
    fn new() -> Self {
        let mut b = mtn_brake::default();
        // SAFETY: a live structure.
        unsafe { mtn_brake_host_init(&mut b) };
        Brake {
            b,
            // SAFETY: a constant.
            p: unsafe { mtn_brake_host_defaults },
        }
    }

    fn ack(&mut self, a: &mtn_ack) {
        // SAFETY: live structures; the function only reads the latter two.
        unsafe { mtn_brake_host_ack(&mut self.b, &self.p, a) }
    }

    /// Something is sent with nothing in flight, `idle_us` after the ACK `a`.
    fn tx_start(&mut self, a: &mtn_ack, idle_us: u64, app_limited: bool) {
        let now_us = a.now_us + idle_us;
        let app_limited = app_limited.into();
        // SAFETY: live structures; the function only reads the latter.
        unsafe {
            mtn_brake_host_tx_start(&mut self.b, &self.p, now_us, a.total, idle_us, app_limited);
        }
    }

    fn pacing(&self, a: &mtn_ack, rate: u64) -> u64 {
        // SAFETY: as above.
        unsafe { mtn_brake_host_pacing(&self.b, a, rate) }
    }

    fn cwnd(&self, a: &mtn_ack) -> u32 {
        self.cwnd_of(a, 0)
    }

    /// ... where BBR wants `own`.
    fn cwnd_of(&self, a: &mtn_ack, own: u32) -> u32 {
        // SAFETY: as above.
        unsafe { mtn_brake_host_cwnd(&self.b, &self.p, a, own) }
    }

    /// What the limit is compared with: it, or the estimate where that is lower.
    fn effective(&self, a: &mtn_ack) -> u64 {
        self.b.bps.min(a.max_bps)
    }
}

/// An ACK of a flow that delivers `bps` with `queue_us`, `step_us` after the one before it.
fn ack(from: &mtn_ack, step_us: u64, bps: u64, queue_us: u32, stretch: f64) -> mtn_ack {
    let rtt_us = from.min_rtt_us + queue_us;
    let packets = |us: u64| (bps * us / 8_000_000 / u64::from(from.mss)).max(1) as u32;
    // At least one packet's time.
    let interval_us = rtt_us.max((u64::from(from.mss) * 8_000_000 / bps) as u32);
    mtn_ack {
        now_us: from.now_us + step_us,
        delivered: packets(interval_us.into()),
        interval_us,
        snd_us: (f64::from(interval_us) / stretch) as u32,
        rcv_us: interval_us,
        rtt_us,
        total: from.total.wrapping_add(packets(step_us)),
        inflight: packets(rtt_us.into()),
        ..*from
    }
}

fn flow(max_bps: u64, min_rtt_us: u32) -> mtn_ack {
    mtn_ack {
        now_us: 1_000_000,
        max_bps,
        min_rtt_us,
        mss: 1448,
        ..Default::default()
    }
}

proptest! {
    /// Whatever the ACKs say: a limit that falls stays at or above the delivery of its slice, and
    /// at or above half of what was in force.
    #[test]
    fn never_below_measured_delivery(
        acks in prop::collection::vec(
            (1u64..20_000, 1u64..200, 0u32..400_000, 0.5f64..4.0, any::<u8>()), 1..400),
        min_rtt_us in 100u32..300_000,
    ) {
        let mut brake = Brake::new();
        let mut a = flow(100 * MBIT, min_rtt_us);
        for (step_us, mbit, queue_us, stretch, bits) in acks {
            a = ack(&a, step_us, mbit * MBIT, queue_us, stretch);
            a.app_limited = u8::from(bits & 0x1f == 0x1f);
            a.suspended = u8::from(bits & 0xe0 == 0xe0);
            a.startup = u8::from(bits & 0x0e == 0x0e);
            let (before, state) = (brake.effective(&a), brake.b.state);
            brake.ack(&a);
            if brake.b.bps < before {
                prop_assert!(brake.b.bps >= brake.b.last_bps.min(before), "{:?}", brake.b);
                prop_assert!(brake.b.bps >= before / 2);
            }
            prop_assert!(brake.cwnd(&a) >= 4);
            prop_assert!(brake.pacing(&a, 1_000_000) >= 1);
            if brake.b.state < CUT {
                prop_assert_eq!(brake.pacing(&a, 1_234_567), 1_234_567);
                prop_assert_eq!(brake.b.bps, u64::MAX, "{} after {}", brake.b.state, state);
            }
        }
    }

    /// However it came to brake: once the queue is gone it lets go.
    #[test]
    fn released_after_the_queue_is_gone(
        acks in prop::collection::vec((1u64..50, 0u32..400_000, 1.0f64..4.0), 20..200),
        min_rtt_us in 1_000u32..300_000,
    ) {
        let mut brake = Brake::new();
        let mut a = flow(50 * MBIT, min_rtt_us);
        let mut inflight = 0;
        for (mbit, queue_us, stretch) in acks {
            a = ack(&a, u64::from(min_rtt_us) / 8, mbit * MBIT, queue_us, stretch);
            brake.ack(&a);
            inflight = inflight.max(a.inflight);
        }
        // What was in flight comes out first, one packet or more with each ACK.
        for _ in 0..400 + inflight {
            a = ack(&a, u64::from(min_rtt_us) / 4, 10 * MBIT, 0, 1.0);
            brake.ack(&a);
        }
        prop_assert_eq!(brake.b.state, OFF, "{:?}", brake.b);
    }

    /// A rate that stays within 10% and a queue as BBR's probing makes it: nothing to do.
    #[test]
    fn constant_rate_never_engages(
        acks in prop::collection::vec((0.9f64..1.0, 0.0f64..0.3, 0.9f64..1.1), 100..500),
        max_mbit in 1u64..10_000,
        min_rtt_us in 100u32..300_000,
    ) {
        let mut brake = Brake::new();
        let mut a = flow(max_mbit * MBIT, min_rtt_us);
        for (share, queue, stretch) in acks {
            let bps = (a.max_bps as f64 * share) as u64;
            let queue_us = (f64::from(min_rtt_us) * queue) as u32;
            a = ack(&a, u64::from(min_rtt_us) / 8 + 500, bps, queue_us, stretch);
            brake.ack(&a);
            prop_assert_eq!(brake.b.engagements, 0, "{:?}", brake.b);
        }
    }

    /// Nothing overflows, whatever the fields hold: limits stay within their bounds.
    #[test]
    fn any_numbers(
        acks in prop::collection::vec(
            (any::<u32>(), any::<u32>(), any::<u32>(), any::<u32>(), any::<u32>(), any::<u64>()),
            1..200),
    ) {
        let mut brake = Brake::new();
        let mut now_us = 1;
        let mut total = 0u32;
        for (x, y, z, v, w, max_bps) in acks {
            now_us += u64::from(x);
            total = total.wrapping_add(y % 1000 + 4);
            let a = mtn_ack {
                now_us, max_bps, delivered: y, interval_us: z, snd_us: v, rcv_us: w,
                rtt_us: x, min_rtt_us: z / 7, total, inflight: v, mss: w % 70_000,
                ..Default::default()
            };
            brake.ack(&a);
            let limited = brake.b.state >= CUT;
            prop_assert!(!limited || (1..=1 << 39).contains(&brake.b.bps), "{:?}", brake.b);
            // Whatever BBR wants.
            prop_assert!(brake.cwnd(&a) >= 4 && brake.cwnd_of(&a, x) >= 4);
            prop_assert!(brake.cwnd_of(&a, u32::MAX) >= brake.cwnd(&a));
            prop_assert!(brake.pacing(&a, 7) >= 1);
        }
    }
}

/// ACKs of a drop from `from` to `to` bit/s at the given RTT, until the brake has engaged.
fn drop_of(from: u64, to: u64, rtt_us: u32) -> (Brake, mtn_ack) {
    let mut brake = Brake::new();
    let mut a = flow(from, rtt_us);
    if from < MBIT {
        // Small packets: a full one would take hours.
        a.mss = 64;
    }
    for i in 0..100u32 {
        let (slice_us, queue_us) = ((rtt_us / 4).max(2_000), (rtt_us / 4).max(1_000));
        a = ack(&a, slice_us.into(), to, queue_us * (i + 1), 1.5);
        a.total = a.total.wrapping_add(4);
        brake.ack(&a);
        if brake.b.state == CUT {
            return (brake, a);
        }
    }
    panic!("no engagement: {:?}", brake.b);
}

/// ... and then for as long as it takes the limit, which at most halves in a slice, to be `to`.
fn braked_to(from: u64, to: u64, rtt_us: u32) -> (Brake, mtn_ack) {
    let (mut brake, mut a) = drop_of(from, to, rtt_us);
    for _ in 0..5 {
        a = ack(&a, u64::from(rtt_us / 4), to, 2 * rtt_us, 1.5);
        brake.ack(&a);
    }
    assert_eq!(brake.b.state, CUT);
    assert!(brake.b.bps <= to, "{:?}", brake.b);
    (brake, a)
}

#[test]
fn from_one_bit_to_400_gigabits_per_second() {
    for (from, to) in [
        (400_000 * MBIT, 250_000 * MBIT),
        (400_000 * MBIT, MBIT),
        (10_000, 1_000),
        (8, 1),
    ] {
        let (brake, a) = drop_of(from, to, 40_000);
        let bps = brake.b.bps;
        assert!((from / 2..from).contains(&bps), "{from} to {to}: {bps}");
        let pace = brake.pacing(&a, from / 8 + 1);
        assert!(pace >= 1 && pace <= from / 8 + 1, "{from} to {to}: {pace}");
        let bdp = brake.b.bps * 40_000 / 8_000_000 / u64::from(a.mss);
        let cwnd = u64::from(brake.cwnd(&a));
        assert!((bdp.max(4)..=bdp.max(4) + 1).contains(&cwnd), "{cwnd}");
    }
}

#[test]
fn a_suspended_brake_limits_nothing() {
    let (brake, mut a) = drop_of(50 * MBIT, 10 * MBIT, 40_000);
    assert!(brake.pacing(&a, 50 * MBIT / 8) < 50 * MBIT / 8);
    a.suspended = 1;
    assert_eq!(brake.pacing(&a, 50 * MBIT / 8), 50 * MBIT / 8);
    assert_eq!(brake.cwnd(&a), u32::MAX);
}

/// BBR grows its window by what each ACK acknowledges: it must not begin at the limit.
#[test]
fn bbr_goes_on_from_its_own_window() {
    let own_cwnd = |cwnd, own, limited, loss| {
        // SAFETY: numbers only.
        unsafe { mtn_brake_host_own_cwnd(cwnd, own, limited, loss) }
    };
    assert_eq!(own_cwnd(20, 100, 20, 0), 100);
    assert_eq!(own_cwnd(100, 100, 100, 0), 100, "was not limited");
    assert_eq!(own_cwnd(10, 100, 20, 0), 10, "changed by others");
    assert_eq!(own_cwnd(20, 100, 20, 1), 20, "after a timeout");
    assert_eq!(own_cwnd(10, 0, 0, 0), 10, "before the first ACK");
}

#[test]
fn an_application_that_sends_little_is_no_drop() {
    let mut brake = Brake::new();
    let mut a = flow(50 * MBIT, 40_000);
    for _ in 0..200 {
        a = ack(&a, 10_000, MBIT, 15_000, 1.0);
        a.app_limited = 1;
        brake.ack(&a);
    }
    assert_eq!(brake.b.engagements, 0);
    // The path that stretches its packets and queues them is one.
    for _ in 0..5 {
        a = ack(&a, 10_000, MBIT, 45_000, 1.5);
        a.app_limited = 1;
        brake.ack(&a);
    }
    assert_eq!((brake.b.engagements, brake.b.state), (1, CUT));
}

#[test]
fn a_queue_of_others_is_left_to_them() {
    let (mut brake, mut a) = drop_of(50 * MBIT, 10 * MBIT, 40_000);
    for _ in 0..60 {
        a = ack(&a, 10_000, 10 * MBIT, 200_000, 1.0);
        a.inflight = brake.cwnd(&a).min(40);
        brake.ack(&a);
        if brake.b.state == OFF {
            break;
        }
    }
    let b = &brake.b;
    assert_eq!((b.state, b.abandoned), (OFF, 1), "{b:?}");
    assert!(brake.b.hold_off > 0 && brake.b.hold_off_next == 128);
}

/// A queue above the one that counts as none (5 ms of 40) and below the one that is surely others'
/// (10 ms): the window fits, nothing moves, and yet there has to be a way on.
#[test]
fn a_small_queue_that_stays_does_not_hold_the_cut() {
    let (mut brake, mut a) = drop_of(50 * MBIT, 10 * MBIT, 40_000);
    let mut states = vec![];
    for i in 0..400 {
        a = ack(&a, 10_000, 10 * MBIT, 7_000, 1.0);
        a.inflight = a.inflight.min(brake.cwnd(&a));
        // As BBR does, which forgets the rate of before after ten round trips.
        if i > 50 {
            a.max_bps = 10 * MBIT;
        }
        brake.ack(&a);
        if states.last() != Some(&brake.b.state) {
            states.push(brake.b.state);
        }
        // The estimate is still that of before: to let BBR go on would fill the queue again.
        assert!(i > 50 || brake.b.state >= CUT, "{i}: {:?}", brake.b);
    }
    assert_eq!(states[..2], [CUT, RELEASE], "{states:?}");
    assert_eq!(brake.b.state, OFF, "{states:?} {:?}", brake.b);
    assert_eq!(brake.b.engagements, 1);
}

/// The same queue made by others while the release grows: what is delivered counts, not the wish.
#[test]
fn a_release_that_never_finds_the_queue_gone_ends() {
    let (mut brake, mut a) = braked_to(50 * MBIT, 10 * MBIT, 40_000);
    for _ in 0..100 {
        a = ack(&a, 10_000, 10 * MBIT, 0, 1.0);
        brake.ack(&a);
        if brake.b.state == RELEASE {
            break;
        }
    }
    assert_eq!(brake.b.state, RELEASE, "{:?}", brake.b);
    // Samples that are always a little above the limit, as small windows make them.
    for _ in 0..400 {
        let bps = brake.effective(&a) / 8 * 9;
        a = ack(&a, 10_000, bps.min(12 * MBIT), 7_000, 1.0);
        a.inflight = a.inflight.min(brake.cwnd(&a));
        a.max_bps = 12 * MBIT;
        brake.ack(&a);
    }
    assert_eq!(brake.b.state, OFF, "{:?}", brake.b);
}

/// ACKs at 10 Mbit/s while the queue of a fade drains, then at 50: the brake does not wait for the
/// samples, which span the queue, nor for the queue to be gone. One slice of them is not enough.
#[test]
fn a_path_that_is_back_ends_the_cut_at_once() {
    let (mut brake, mut a) = drop_of(50 * MBIT, 10 * MBIT, 40_000);
    let mut slice = |bps: u64| {
        let total = a.total + (bps / 100 / 8 / 1448) as u32;
        a = ack(&a, 10_000, 10 * MBIT, 200_000, 1.0);
        (a.total, a.inflight) = (total, 200);
        brake.ack(&a);
        (brake.b.state, brake.b.bps)
    };
    for _ in 0..10 {
        assert_eq!(slice(10 * MBIT).0, CUT);
    }
    assert_eq!(slice(50 * MBIT).0, CUT);
    assert_eq!(slice(10 * MBIT).0, CUT);
    assert_eq!(slice(50 * MBIT).0, CUT);
    let (state, bps) = slice(45 * MBIT);
    assert_eq!(state, RELEASE);
    assert!((40 * MBIT..=45 * MBIT).contains(&bps), "{bps}");
}

/// A release looks after each raise, a round trip later, whether there is a queue.
#[test]
fn a_release_raises_once_a_round_trip_and_looks() {
    let (mut brake, mut a) = braked_to(50 * MBIT, 10 * MBIT, 40_000);
    let mut limits = vec![];
    for i in 0..100 {
        // The path carries 10 Mbit/s: more than that and the queue grows, a round trip later.
        let queue_us = match limits.len() {
            0..9 => 0,
            _ => 20_000,
        };
        a = ack(&a, 10_000, 10 * MBIT, queue_us, 1.0);
        brake.ack(&a);
        if brake.b.state == RELEASE {
            limits.push(brake.b.bps);
        } else if !limits.is_empty() {
            break;
        }
        assert!(i < 99, "{limits:?}");
    }
    // 40 ms are four slices, and what was sent since must fill one.
    let raises = limits.windows(2).filter(|w| w[1] > w[0]).count();
    assert!((1..=2).contains(&raises), "{limits:?}");
    let (first, last) = (limits[0], *limits.last().unwrap());
    assert!(first <= 20 * MBIT && last <= 40 * MBIT, "{limits:?}");
    assert_eq!(brake.b.state, CUT);
    assert!(brake.b.bps <= 20 * MBIT, "{:?}", brake.b);
}

/// Begun again, a release that has reached BBR's estimate would fill the queue and drain it until BBR probes the RTT.
#[test]
fn a_release_that_finds_a_queue_at_the_estimate_is_over() {
    let (mut brake, mut a) = braked_to(50 * MBIT, 10 * MBIT, 40_000);
    // In which BBR has forgotten what the path carried before.
    a.max_bps = 12 * MBIT;
    for _ in 0..20 {
        let mut next = ack(&a, 10_000, 9 * MBIT, 0, 1.0);
        let raised = brake.b.state == RELEASE && brake.b.bps > a.max_bps;
        if raised && next.total.wrapping_sub(brake.b.round_end) < 1 << 31 {
            next = ack(&a, 10_000, 9 * MBIT, 20_000, 1.0);
        }
        a = next;
        brake.ack(&a);
        if a.rtt_us > 40_000 {
            break;
        }
    }
    let b = &brake.b;
    assert_eq!((b.state, b.bps, b.drain), (CUT, 12 * MBIT, 1), "{b:?}");
    a = ack(&a, 10_000, 9 * MBIT, 0, 1.0);
    brake.ack(&a);
    assert_eq!(brake.b.state, OFF);
}

/// On a path of 20 us the hosts' delays are the longer part: a window of one BDP would be 4 packets.
#[test]
fn windows_of_short_paths_last_for_a_millisecond() {
    let (brake, a) = drop_of(1_000 * MBIT, 600 * MBIT, 20);
    let cwnd = u64::from(brake.cwnd(&a));
    let of_a_ms = brake.b.bps / 8_000 / u64::from(a.mss);
    assert!((of_a_ms..=of_a_ms + 1).contains(&cwnd), "{cwnd} {of_a_ms}");
    assert!(of_a_ms > 40);
}

/// Rate samples span a round trip and its queue; that ACKs come slower is seen in a slice.
#[test]
fn slow_acks_hold_the_window_before_the_rate_samples_tell() {
    // Two packets an ACK: what 50 Mbit/s take for them, and four times as long.
    for (step_us, state) in [(463, OFF), (4 * 463, HOLD)] {
        let mut brake = Brake::new();
        let mut a = flow(50 * MBIT, 40_000);
        for i in 0..40 {
            let total = a.total + 2;
            a = ack(&a, step_us, 50 * MBIT, 4_000 + 200 * i, 1.0);
            a.total = total;
            brake.ack(&a);
            if brake.b.state != OFF {
                break;
            }
        }
        assert_eq!(brake.b.state, state, "{step_us} us: {:?}", brake.b);
        assert_eq!(brake.b.engagements, 0);
        if state == HOLD {
            assert_eq!(brake.cwnd(&a), a.inflight);
        }
    }
}
