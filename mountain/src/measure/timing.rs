// SPDX-License-Identifier: GPL-2.0-or-later
//! From the stamps of one probe to its figures. Pure.

use std::time::Instant;

use super::oneway::OneWay;
use super::probe::Answer;
use super::socket::SendStamps;
use super::timestamp::Received;
use super::wire::Reflected;

/// Kernel RTT may exceed the steady clock's by so much through slewing before it is disbelieved.
const CLOCK_SLACK_NS: i64 = 1_000_000;

/// ns to whole µs, rounded; negative is 0.
fn to_us(ns: i64) -> u32 {
    u32::try_from((ns.max(0) + 500) / 1000).unwrap_or(u32::MAX)
}

/// All stamps of one probe, ns.
pub(super) struct ProbeStamps {
    /// Whole way by the steady clock in user space.
    pub(super) user_ns: i64,
    pub(super) t1_user: u64,
    pub(super) sched: Option<u64>,
    pub(super) t1: Option<u64>,
    pub(super) t4: Option<u64>,
    pub(super) t4_user: u64,
    /// T2 and T3 by the reflector's clock.
    pub(super) reflected: Option<(u64, u64)>,
}

/// The round trip of one probe by the best stamps there are.
pub(super) struct RoundTrip {
    /// Without the time inside the reflector.
    pub(super) rtt_ns: i64,
    /// T2 − T1 and T4 − T3, the unknown clock offset included; with a reflector, and while no
    /// clock was set under way.
    pub(super) directions: Option<(i64, i64)>,
    /// Whether both of our stamps are the kernel's.
    pub(super) kernel_stamps: bool,
}

impl ProbeStamps {
    /// Of a probe and its answer, which was read at `now` by the steady clock and by that of the stamps.
    pub(super) fn of(
        sent: Instant,
        stamps: SendStamps,
        received: &Received,
        reflected: Option<Reflected>,
        now: (Instant, u64),
    ) -> Self {
        Self {
            user_ns: now.0.duration_since(sent).as_nanos() as i64,
            t1_user: stamps.user_ns,
            sched: stamps.sched_ns,
            t1: stamps.tx_ns,
            t4: received.rx_ns,
            t4_user: now.1,
            reflected: reflected.map(|r| (r.received_ns, r.sent_ns)),
        }
    }

    pub(super) fn round_trip(&self) -> RoundTrip {
        let t1 = self.t1.or(self.sched).unwrap_or(self.t1_user);
        let t4 = self.t4.unwrap_or(self.t4_user);
        let whole = t4.wrapping_sub(t1) as i64;
        // Nothing can take longer in the kernel than seen from outside: if it seems so, our
        // clock was set under way.
        let plausible = (0..=self.user_ns.saturating_add(CLOCK_SLACK_NS)).contains(&whole);
        let whole = if plausible { whole } else { self.user_ns };
        let residence = self
            .reflected
            .map(|(t2, t3)| t3.wrapping_sub(t2) as i64)
            .filter(|ns| (0..=whole).contains(ns));
        let directions = match (self.reflected, residence) {
            (Some((t2, t3)), Some(_)) if plausible => {
                Some((t2.wrapping_sub(t1) as i64, t4.wrapping_sub(t3) as i64))
            }
            _ => None,
        };
        RoundTrip {
            rtt_ns: whole - residence.unwrap_or(0),
            directions,
            kernel_stamps: plausible && self.t1.is_some() && self.t4.is_some(),
        }
    }

    /// The times of an answer: RTT, queue and variation; feeds `one_way`, whose clock `at_ns` is.
    pub(super) fn evaluate(&self, at_ns: u64, one_way: &mut OneWay) -> Answer {
        let round_trip = self.round_trip();
        let rtt_us = to_us(round_trip.rtt_ns);
        let variation = round_trip
            .directions
            .and_then(|(forward, backward)| one_way.push(at_ns, forward, backward));
        let queue_us = self
            .t1
            .zip(self.sched)
            .map(|(t1, s)| to_us(t1.wrapping_sub(s) as i64));
        // Minimum and variation are of different moments, so their sum can exceed this RTT.
        let delay = variation
            .zip(one_way.min_rtt_us())
            .map_or(rtt_us, |(v, min)| {
                min.saturating_add(v.forward_us).min(rtt_us)
            });
        Answer {
            rtt_us,
            user_rtt_us: to_us(self.user_ns),
            forward_us: variation.map(|v| v.forward_us),
            backward_us: variation.map(|v| v.backward_us),
            queue_us,
            delay_us: delay.saturating_add(queue_us.unwrap_or(0)),
            kernel_stamps: round_trip.kernel_stamps,
            ..Answer::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times() -> ProbeStamps {
        ProbeStamps {
            user_ns: 30_000_000,
            t1_user: 1_000_000_000,
            sched: Some(1_000_100_000),
            t1: Some(1_002_100_000),
            t4: Some(1_022_100_000),
            t4_user: 1_030_000_000,
            reflected: None,
        }
    }

    #[test]
    fn rtt_is_between_kernel_stamps_and_delay_adds_the_own_queue() {
        let got = times().evaluate(0, &mut OneWay::new());
        assert_eq!(
            got,
            Answer {
                rtt_us: 20_000,
                user_rtt_us: 30_000,
                queue_us: Some(2_000),
                delay_us: 22_000,
                kernel_stamps: true,
                ..Answer::default()
            }
        );
    }

    #[test]
    fn residence_is_taken_off_and_directions_told_apart() {
        let mut filter = OneWay::new();
        let offset = 5_000_000_000_000;
        let t2 = 1_012_100_000 + offset;
        let quiet = ProbeStamps {
            reflected: Some((t2, t2 + 4_000_000)),
            ..times()
        };
        let got = quiet.evaluate(0, &mut filter);
        assert_eq!(
            (got.rtt_us, got.forward_us, got.backward_us),
            (16_000, Some(0), Some(0))
        );
        let slow = ProbeStamps {
            reflected: Some((t2 + 300_000_000, t2 + 300_000_000)),
            t4: Some(1_318_100_000),
            user_ns: 330_000_000,
            ..times()
        };
        let got = slow.evaluate(50_000_000, &mut filter);
        assert_eq!(got.rtt_us, 316_000);
        assert_eq!((got.forward_us, got.backward_us), (Some(300_000), Some(0)));
        assert_eq!(got.delay_us, 318_000);
    }

    #[test]
    fn a_clock_set_under_way_falls_back_to_the_steady_clock() {
        for t4 in [900_000_000, 9_000_000_000] {
            let got = ProbeStamps {
                t4: Some(t4),
                ..times()
            }
            .evaluate(0, &mut OneWay::new());
            assert_eq!((got.rtt_us, got.kernel_stamps), (30_000, false));
        }
    }

    #[test]
    fn without_a_driver_stamp_the_next_best_one_is_used() {
        let got = ProbeStamps {
            t1: None,
            ..times()
        }
        .evaluate(0, &mut OneWay::new());
        assert_eq!(
            (got.rtt_us, got.queue_us, got.kernel_stamps),
            (22_000, None, false)
        );
        let got = ProbeStamps {
            t1: None,
            sched: None,
            ..times()
        }
        .evaluate(0, &mut OneWay::new());
        assert_eq!(
            (got.rtt_us, got.delay_us, got.kernel_stamps),
            (22_100, 22_100, false)
        );
    }

    #[test]
    fn a_reflector_with_nonsense_stamps_costs_only_the_directions() {
        for reflected in [(u64::MAX, 0), (0, u64::MAX), (7, 1)] {
            let times = ProbeStamps {
                reflected: Some(reflected),
                ..times()
            };
            let got = times.evaluate(0, &mut OneWay::new());
            let rtt = if reflected == (u64::MAX, 0) {
                20_000
            } else {
                got.rtt_us
            };
            assert_eq!(got.rtt_us, rtt);
            assert!(got.rtt_us <= 20_000 && got.delay_us <= 22_000, "{got:?}");
        }
    }
}
