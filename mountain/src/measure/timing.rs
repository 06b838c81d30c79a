// SPDX-License-Identifier: GPL-2.0-or-later
//! From the stamps of one probe to its figures. Pure.

use std::time::Instant;

use super::oneway::OneWay;
use super::probe::Answer;
use super::wire::Reflected;

/// Kernel RTT may exceed the steady clock's by so much through slewing before it is disbelieved.
const CLOCK_SLACK_NS: i64 = 1_000_000;

/// Whether a time by the kernel's clock fits into one by the steady clock: if not, the kernel's was set under way.
fn is_plausible(ns: i64, user_ns: i64) -> bool {
    (0..=user_ns.saturating_add(CLOCK_SLACK_NS)).contains(&ns)
}

/// ns to whole µs, rounded; negative is 0.
fn to_us(ns: i64) -> u32 {
    u32::try_from((ns.max(0) + 500) / 1000).unwrap_or(u32::MAX)
}

/// All stamps of one probe. Those of the kernel are ns since the epoch, by CLOCK_REALTIME.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProbeStamps {
    /// Just before the system call that sent it, by the steady clock.
    pub(super) sent: Instant,
    /// The same by the clock of the kernel's stamps, ns.
    pub(super) sent_ns: u64,
    /// By the kernel, before the queueing discipline, ns.
    pub(super) sched_ns: Option<u64>,
    /// By the kernel, when it gave the packet to the driver, ns.
    pub(super) tx_ns: Option<u64>,
    /// By the card's clock, ns.
    pub(super) tx_hw_ns: Option<u64>,
    /// `None`: not answered yet.
    pub(super) arrival: Option<Arrival>,
}

/// When the first answer came, and what a reflector adds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrival {
    /// When it was read, by the steady clock.
    pub(super) read: Instant,
    /// The same by the clock of the kernel's stamps, ns.
    pub(super) read_ns: u64,
    /// By the kernel, ns.
    pub(super) rx_ns: Option<u64>,
    /// By the card's clock, ns.
    pub(super) rx_hw_ns: Option<u64>,
    pub(super) reflected: Option<Reflected>,
}

/// The round trip of one probe, ns.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RoundTrip {
    /// By the steady clock around the system calls.
    pub(super) user_ns: i64,
    /// By the best stamps of this probe that are the kernel's, else by the steady clock; without the
    /// time inside the reflector.
    pub(super) rtt_ns: i64,
    /// By the device's clock on both ways, if it was not set meanwhile.
    pub(super) hardware_ns: Option<i64>,
    /// T2 − T1 and T4 − T3, the unknown clock offset included; with a reflector, and while no
    /// clock was set under way.
    pub(super) directions: Option<(i64, i64)>,
    /// Whether `rtt_ns` is the kernel's alone.
    pub(super) kernel_stamps: bool,
}

impl RoundTrip {
    /// From a stamp of sending to one of receiving by the same clock, which tells nothing where it was
    /// set under way. `kernel_stamps` is whether it was not.
    fn between(t1: u64, t4: u64, user_ns: i64, reflected: Option<Reflected>) -> Self {
        let whole = t4.wrapping_sub(t1) as i64;
        // Nothing can take longer in the kernel than seen from outside.
        let plausible = is_plausible(whole, user_ns);
        let whole = if plausible { whole } else { user_ns };
        let reflected = reflected.map(|r| (r.received_ns, r.sent_ns));
        let residence = reflected
            .map(|(t2, t3)| t3.wrapping_sub(t2) as i64)
            .filter(|ns| (0..=whole).contains(ns));
        let directions = reflected
            .filter(|_| plausible && residence.is_some())
            .map(|(t2, t3)| (t2.wrapping_sub(t1) as i64, t4.wrapping_sub(t3) as i64));
        RoundTrip {
            user_ns,
            rtt_ns: whole - residence.unwrap_or(0),
            hardware_ns: None,
            directions,
            kernel_stamps: plausible,
        }
    }
}

impl ProbeStamps {
    /// Of a probe that is about to be sent.
    pub(super) fn new(sent: Instant, sent_ns: u64) -> Self {
        Self {
            sent,
            sent_ns,
            sched_ns: None,
            tx_ns: None,
            tx_hw_ns: None,
            arrival: None,
        }
    }

    /// Takes in stamps of the driver, of which software and hardware come apart. A software stamp from
    /// before the system call is of a clock that was set under way.
    pub(super) fn transmitted(&mut self, tx_ns: Option<u64>, tx_hw_ns: Option<u64>) {
        self.tx_ns = tx_ns.filter(|ns| *ns >= self.sent_ns).or(self.tx_ns);
        self.tx_hw_ns = tx_hw_ns.or(self.tx_hw_ns);
    }

    /// Takes in the stamp from before the queueing discipline; likewise.
    pub(super) fn scheduled(&mut self, sched_ns: u64) {
        if sched_ns >= self.sent_ns {
            self.sched_ns = Some(sched_ns);
        }
    }

    /// By the best stamps there are; `None` without an answer.
    pub(super) fn round_trip(&self) -> Option<RoundTrip> {
        let arrival = self.arrival.as_ref()?;
        let user_ns = arrival.read.duration_since(self.sent).as_nanos() as i64;
        let between = |t1, t4| RoundTrip::between(t1, t4, user_ns, arrival.reflected);
        let t1 = self.tx_ns.or(self.sched_ns).unwrap_or(self.sent_ns);
        let trip = between(t1, arrival.rx_ns.unwrap_or(arrival.read_ns));
        let hardware = self.tx_hw_ns.zip(arrival.rx_hw_ns);
        let hardware = hardware.map(|(t1, t4)| between(t1, t4));
        Some(RoundTrip {
            kernel_stamps: trip.kernel_stamps && self.tx_ns.is_some() && arrival.rx_ns.is_some(),
            hardware_ns: hardware.filter(|h| h.kernel_stamps).map(|h| h.rtt_ns),
            ..trip
        })
    }

    /// The times of an answer: RTT, queue and variation; feeds `one_way`, whose clock `at_ns` is.
    /// `None` without an answer.
    pub(super) fn evaluate(&self, at_ns: u64, one_way: &mut OneWay) -> Option<Answer> {
        let round_trip = self.round_trip()?;
        let rtt_us = to_us(round_trip.rtt_ns);
        let variation = round_trip
            .directions
            .and_then(|(forward, backward)| one_way.push(at_ns, forward, backward));
        let queue_us = self
            .tx_ns
            .zip(self.sched_ns)
            .map(|(tx, sched)| tx.wrapping_sub(sched) as i64)
            .filter(|ns| is_plausible(*ns, round_trip.user_ns))
            .map(to_us);
        // Minimum and variation are of different moments, so their sum can exceed this RTT.
        let delay = variation
            .zip(one_way.min_rtt_us())
            .map_or(rtt_us, |(v, min)| {
                min.saturating_add(v.forward_us).min(rtt_us)
            });
        Some(Answer {
            rtt_us,
            user_rtt_us: to_us(round_trip.user_ns),
            forward_us: variation.map(|v| v.forward_us),
            backward_us: variation.map(|v| v.backward_us),
            queue_us,
            delay_us: delay.saturating_add(queue_us.unwrap_or(0)),
            kernel_stamps: round_trip.kernel_stamps,
            reflected: self.arrival?.reflected,
            ..Answer::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// Answered after so long by the steady clock.
    fn times(user_ns: u64, rx_ns: Option<u64>, reflected: Option<(u64, u64)>) -> ProbeStamps {
        let sent = Instant::now();
        let reflected = reflected.map(|(received_ns, sent_ns)| Reflected {
            received_ns,
            sent_ns,
            ..Reflected::default()
        });
        ProbeStamps {
            sent,
            sent_ns: 1_000_000_000,
            sched_ns: Some(1_000_100_000),
            tx_ns: Some(1_002_100_000),
            tx_hw_ns: None,
            arrival: Some(Arrival {
                read: sent + Duration::from_nanos(user_ns),
                read_ns: 1_000_000_000 + user_ns,
                rx_ns,
                rx_hw_ns: None,
                reflected,
            }),
        }
    }

    const USER_NS: u64 = 30_000_000;
    const RX_NS: Option<u64> = Some(1_022_100_000);

    #[test]
    fn stamps_from_before_the_send_are_not_taken() {
        let mut stamps = ProbeStamps::new(Instant::now(), 100);
        stamps.transmitted(Some(99), Some(1));
        stamps.scheduled(99);
        assert_eq!((stamps.tx_ns, stamps.tx_hw_ns), (None, Some(1)));
        assert_eq!(stamps.sched_ns, None);
        stamps.transmitted(Some(100), None);
        assert_eq!((stamps.tx_ns, stamps.tx_hw_ns), (Some(100), Some(1)));
    }

    #[test]
    fn rtt_is_between_kernel_stamps_and_delay_adds_the_own_queue() {
        let got = times(USER_NS, RX_NS, None).evaluate(0, &mut OneWay::new());
        let expected = Answer {
            rtt_us: 20_000,
            user_rtt_us: 30_000,
            queue_us: Some(2_000),
            delay_us: 22_000,
            kernel_stamps: true,
            ..Answer::default()
        };
        assert_eq!(got, Some(expected));
        let unanswered = ProbeStamps::new(Instant::now(), 0);
        assert_eq!(unanswered.evaluate(0, &mut OneWay::new()), None);
    }

    #[test]
    fn residence_is_taken_off_and_directions_told_apart() {
        let mut filter = OneWay::new();
        let offset = 5_000_000_000_000;
        let t2 = 1_012_100_000 + offset;
        let quiet = times(USER_NS, RX_NS, Some((t2, t2 + 4_000_000)));
        let got = quiet.evaluate(0, &mut filter).unwrap();
        let figures = (got.rtt_us, got.forward_us, got.backward_us);
        assert_eq!(figures, (16_000, Some(0), Some(0)));
        let late = t2 + 300_000_000;
        let slow = times(330_000_000, Some(1_318_100_000), Some((late, late)));
        let got = slow.evaluate(50_000_000, &mut filter).unwrap();
        assert_eq!(got.rtt_us, 316_000);
        assert_eq!((got.forward_us, got.backward_us), (Some(300_000), Some(0)));
        assert_eq!(got.delay_us, 318_000);
    }

    #[test]
    fn a_clock_set_under_way_falls_back_to_the_steady_clock() {
        for rx_ns in [900_000_000, 9_000_000_000] {
            let times = times(USER_NS, Some(rx_ns), None);
            let got = times.evaluate(0, &mut OneWay::new()).unwrap();
            assert_eq!((got.rtt_us, got.kernel_stamps), (30_000, false));
        }
    }

    #[test]
    fn a_clock_set_while_a_probe_was_queued_is_no_queue() {
        let hour = 3_600_000_000_000;
        let mut times = times(USER_NS, RX_NS.map(|ns| ns + hour), None);
        times.tx_ns = times.tx_ns.map(|ns| ns + hour);
        let got = times.evaluate(0, &mut OneWay::new()).unwrap();
        let figures = (got.rtt_us, got.queue_us, got.delay_us);
        assert_eq!(figures, (20_000, None, 20_000));
    }

    #[test]
    fn without_a_driver_stamp_the_next_best_one_is_used() {
        let mut times = times(USER_NS, RX_NS, None);
        times.tx_ns = None;
        let got = times.evaluate(0, &mut OneWay::new()).unwrap();
        let figures = (got.rtt_us, got.queue_us, got.kernel_stamps);
        assert_eq!(figures, (22_000, None, false));
        times.sched_ns = None;
        let got = times.evaluate(0, &mut OneWay::new()).unwrap();
        let figures = (got.rtt_us, got.delay_us, got.kernel_stamps);
        assert_eq!(figures, (22_100, 22_100, false));
    }

    #[test]
    fn a_reflector_with_nonsense_stamps_costs_only_the_directions() {
        for reflected in [(u64::MAX, 0), (0, u64::MAX), (7, 1)] {
            let times = times(USER_NS, RX_NS, Some(reflected));
            let got = times.evaluate(0, &mut OneWay::new()).unwrap();
            let is_whole = reflected != (u64::MAX, 0) || got.rtt_us == 20_000;
            assert!(is_whole, "{got:?}");
            assert!(got.rtt_us <= 20_000 && got.delay_us <= 22_000, "{got:?}");
        }
    }

    #[test]
    fn the_device_s_clock_counts_only_on_both_ways_and_when_plausible() {
        let trip = |tx_hw_ns, rx_hw_ns, reflected| {
            let mut times = times(2_000_000, RX_NS, reflected);
            times.tx_hw_ns = tx_hw_ns;
            times.arrival.as_mut().unwrap().rx_hw_ns = rx_hw_ns;
            times.round_trip().unwrap().hardware_ns
        };
        assert_eq!(trip(Some(7_000), Some(907_000), None), Some(900_000));
        // Less the time inside the reflector, by a clock of its own.
        let inside = Some((5, 100_005));
        assert_eq!(trip(Some(7_000), Some(907_000), inside), Some(800_000));
        assert_eq!(trip(None, Some(907_000), None), None);
        assert_eq!(trip(Some(7_000), None, None), None);
        assert_eq!(trip(Some(7_000), Some(6_000), None), None, "set back");
        let ahead = trip(Some(7_000), Some(9_000_000_000), None);
        assert_eq!(ahead, None, "set ahead");
    }
}
