// SPDX-License-Identifier: GPL-2.0-or-later
//! Variation of each direction's delay, measured between two clocks that nobody has synchronised.
//!
//! With T1..T4 as in docs/measuring.md, the forward difference T2 − T1 is the forward delay plus
//! the unknown clock offset, the backward one T4 − T3 the backward delay minus it. What exceeds
//! the smallest difference seen lately is queueing (RFC 5481's PDV); the offset cancels. Because
//! clocks also drift, the "smallest" is a line under the points (the lower envelope of Moon,
//! Skelly and Towsley, "Estimation and removal of clock skew from network delay measurements",
//! INFOCOM 1999; Paxson, "On calibrating measurements of packet transit times", SIGMETRICS 1998),
//! here one line per direction with slopes +s and −s, since both see the same drift s.
//!
//! Pure: times come from the caller.

use std::collections::VecDeque;

/// How long a minimum is remembered, ns. Long enough to outlast standing queues, short enough
/// that drift is a straight line and a changed route becomes the new normal.
const WINDOW_NS: u64 = 60_000_000_000;
const BUCKET_NS: u64 = 1_000_000_000;
/// Below this span of time the minima's noise gives a worse slope than assuming none.
const MIN_SPAN_NS: f64 = 10e9;
/// Largest drift believed in, ns/ns: twice what the kernel's clock discipline may slew.
const MAX_SLOPE: f64 = 1e-3;
/// Opposite jumps of the two directions beyond this look like a clock that was set, ns.
const STEP_NS: f64 = 2e6;
/// So many such samples in a row make it certain.
const STEP_SAMPLES: u32 = 3;

/// Excess over the minimum, per direction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Variation {
    /// From us to the reflector, µs.
    pub forward_us: u32,
    /// From the reflector back, µs.
    pub backward_us: u32,
}

/// What drift adds to the differences of the forward and of the backward direction.
const SIGNS: [f64; 2] = [1.0, -1.0];

#[derive(Clone, Copy, Debug)]
struct Sample {
    /// ns since the first sample.
    at: f64,
    /// Forward and backward differences relative to the first sample's, ns.
    differences: [f64; 2],
}

/// The lowest points of one second.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    index: u64,
    /// (time, difference) of the lowest point per direction.
    lowest: [(f64, f64); 2],
    /// Smallest forward + backward, ns, absolute.
    rtt: f64,
}

/// Samples in a row that look as if a clock was set.
#[derive(Clone, Copy, Debug)]
struct Suspects {
    count: u32,
    /// The one with the least RTT: the least queueing, so the clearest view of the step.
    best: Sample,
}

/// Filter state for one path.
#[derive(Clone, Debug, Default)]
pub(crate) struct OneWay {
    /// Time and differences of the first sample; all else is relative to it, for precision.
    origin: Option<(u64, i64, i64)>,
    buckets: VecDeque<Bucket>,
    /// Drift of the far clock against ours, ns/ns.
    slope: f64,
    /// Lines' heights at time 0.
    floor: [f64; 2],
    suspects: Option<Suspects>,
    /// How often one of the clocks was seen to be set.
    steps: u64,
}

impl OneWay {
    /// Knows nothing of either direction until it has been fed.
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Takes one sample: `at_ns` on any steady local clock, `forward_ns` = T2 − T1, `backward_ns`
    /// = T4 − T3. Samples come in order of time.
    ///
    /// `None` when the directions cannot be told apart at the moment, which is while one of the
    /// clocks may just have been set: then one direction falls below its minimum as the other
    /// rises. When three such samples in a row have come and one of them shows an RTT close to
    /// the minimum, so that its jumps can only be the step, the minima are moved by it.
    pub(crate) fn push(
        &mut self,
        at_ns: u64,
        forward_ns: i64,
        backward_ns: i64,
    ) -> Option<Variation> {
        let (t0, f0, b0) = *self.origin.get_or_insert((at_ns, forward_ns, backward_ns));
        let sample = Sample {
            at: at_ns.saturating_sub(t0) as f64,
            differences: [
                forward_ns.wrapping_sub(f0) as f64,
                backward_ns.wrapping_sub(b0) as f64,
            ],
        };
        self.expire(sample.at);
        if self.buckets.is_empty() {
            self.suspects = None;
            self.insert(sample);
            return Some(self.excess_us(sample));
        }
        let [forward, backward] = self.excess(sample);
        let opposite = (forward > STEP_NS && backward < -STEP_NS)
            || (backward > STEP_NS && forward < -STEP_NS);
        // A step leaves the RTT alone: it cannot undercut the smallest one.
        if !opposite || forward + backward < -STEP_NS {
            self.suspects = None;
            self.insert(sample);
            return Some(self.excess_us(sample));
        }
        let suspects = match self.suspects {
            Some(Suspects { count, best }) if (self.excess(best)[0] > 0.0) == (forward > 0.0) => {
                let best = if self.excess_rtt(best) < self.excess_rtt(sample) {
                    best
                } else {
                    sample
                };
                Suspects {
                    count: count + 1,
                    best,
                }
            }
            _ => Suspects {
                count: 1,
                best: sample,
            },
        };
        self.suspects = Some(suspects);
        if suspects.count < STEP_SAMPLES || self.excess_rtt(suspects.best) > STEP_NS {
            return None;
        }
        self.shift(suspects.best);
        Some(self.excess_us(sample))
    }

    /// Smallest RTT of the window, µs.
    pub(crate) fn min_rtt_us(&self) -> Option<u32> {
        let min = self.buckets.iter().map(|b| b.rtt).reduce(f64::min)?;
        Some((min / 1e3).round() as u32)
    }

    fn expire(&mut self, now: f64) {
        while self
            .buckets
            .front()
            .is_some_and(|b| now - (b.index * BUCKET_NS) as f64 > (WINDOW_NS + BUCKET_NS) as f64)
        {
            self.buckets.pop_front();
        }
        self.lower();
    }

    /// Height over the two lines, ns.
    fn excess(&self, s: Sample) -> [f64; 2] {
        [0, 1].map(|d| s.differences[d] - SIGNS[d] * self.slope * s.at - self.floor[d])
    }

    fn excess_rtt(&self, s: Sample) -> f64 {
        self.excess(s).iter().sum()
    }

    fn excess_us(&self, s: Sample) -> Variation {
        let us = |ns: f64| (ns / 1e3).round().clamp(0.0, f64::from(u32::MAX)) as u32;
        let [forward_us, backward_us] = self.excess(s).map(us);
        Variation {
            forward_us,
            backward_us,
        }
    }

    fn insert(&mut self, s: Sample) {
        let index = s.at as u64 / BUCKET_NS;
        let (_, f0, b0) = self.origin.expect("set by push");
        let [forward, backward] = s.differences;
        let rtt = forward + backward + (f0 as f64 + b0 as f64);
        let points = s.differences.map(|difference| (s.at, difference));
        let slope = self.slope;
        match self.buckets.back_mut().filter(|b| b.index >= index) {
            Some(bucket) => {
                for (d, sign) in SIGNS.into_iter().enumerate() {
                    let height = |(at, v): (f64, f64)| v - sign * slope * at;
                    if height(points[d]) < height(bucket.lowest[d]) {
                        bucket.lowest[d] = points[d];
                    }
                }
                bucket.rtt = bucket.rtt.min(rtt);
            }
            None => {
                self.fit();
                self.buckets.push_back(Bucket {
                    index,
                    lowest: points,
                    rtt,
                });
            }
        }
        self.lower();
    }

    /// Both lines' heights for a slope: as high as they go with no point below.
    fn floors(&self, slope: f64) -> [f64; 2] {
        [0, 1].map(|d| {
            let lowest = self.buckets.iter().map(|bucket| bucket.lowest[d]);
            let heights = lowest.map(|(at, v)| v - SIGNS[d] * slope * at);
            heights.fold(f64::INFINITY, f64::min)
        })
    }

    fn lower(&mut self) {
        self.floor = self.floors(self.slope);
    }

    /// Chooses the slope whose two lines lie highest together, which is the least sum of
    /// distances to the points: s cancels in the sum because both directions are measured at the
    /// same times. A lasting change of one direction does not tilt it, as the other direction's
    /// line would have to sink by more. Concave and piecewise linear in s: ternary search.
    fn fit(&mut self) {
        let (Some(first), Some(last)) = (self.buckets.front(), self.buckets.back()) else {
            return;
        };
        if last.lowest[0].0 - first.lowest[0].0 < MIN_SPAN_NS {
            return;
        }
        let height = |s: f64| self.floors(s).iter().sum::<f64>();
        let (mut low, mut high) = (-MAX_SLOPE, MAX_SLOPE);
        // (2/3)^45 of the range is 1e-5 ppm.
        for _ in 0..45 {
            let (a, b) = (low + (high - low) / 3.0, high - (high - low) / 3.0);
            if height(a) < height(b) {
                low = a;
            } else {
                high = b;
            }
        }
        self.slope = (low + high) / 2.0;
    }

    /// A clock was set: moves the remembered points by the step that `best` shows.
    fn shift(&mut self, best: Sample) {
        let [forward, backward] = self.excess(best);
        let step = (forward - backward) / 2.0;
        for bucket in &mut self.buckets {
            (0..2).for_each(|d| bucket.lowest[d].1 += SIGNS[d] * step);
        }
        self.steps += 1;
        self.suspects = None;
        self.insert(best);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A path between two clocks: base delays, noise, drift and offset of the far clock.
    struct Link {
        filter: OneWay,
        noise: u64,
        now_ns: u64,
        drift_ppm: f64,
        offset_ns: f64,
        noise_ms: f64,
    }

    impl Link {
        fn new(drift_ppm: f64, noise_ms: f64) -> Self {
            Self {
                filter: OneWay::new(),
                noise: 0x9e37_79b9_7f4a_7c15,
                now_ns: 5_000_000_000,
                drift_ppm,
                offset_ns: -7.3e17,
                noise_ms,
            }
        }

        fn noise(&mut self) -> f64 {
            // xorshift64: fixed seed, so that the test is the same every time.
            self.noise ^= self.noise << 13;
            self.noise ^= self.noise >> 7;
            self.noise ^= self.noise << 17;
            (self.noise >> 11) as f64 / (1u64 << 53) as f64 * self.noise_ms * 1e6
        }

        /// One probe 50 ms after the last, with extra delays in ms.
        fn probe(&mut self, forward_ms: f64, backward_ms: f64) -> Option<(f64, f64)> {
            self.now_ns += 50_000_000;
            let clock = self.offset_ns + self.now_ns as f64 * self.drift_ppm * 1e-6;
            let f = 12e6 + forward_ms * 1e6 + self.noise();
            let b = 8e6 + backward_ms * 1e6 + self.noise();
            let v = self
                .filter
                .push(self.now_ns, (f + clock) as i64, (b - clock) as i64)?;
            Some((
                f64::from(v.forward_us) / 1e3,
                f64::from(v.backward_us) / 1e3,
            ))
        }

        fn drift_ppm(&self) -> f64 {
            self.filter.slope * 1e6
        }

        fn quiet(&mut self, seconds: usize) {
            for _ in 0..seconds * 20 {
                self.probe(0.0, 0.0);
            }
        }
    }

    #[track_caller]
    fn near(got: Option<(f64, f64)>, want: (f64, f64), tolerance: f64) {
        let (f, b) = got.expect("a variation");
        let is_near = (f - want.0).abs() <= tolerance && (b - want.1).abs() <= tolerance;
        assert!(is_near, "{:?} not {want:?} ± {tolerance}", (f, b));
    }

    #[test]
    fn each_direction_sees_only_its_own_delay() {
        for (f, b) in [(300.0, 0.0), (0.0, 300.0), (40.0, 25.0), (0.0, 0.0)] {
            let mut link = Link::new(0.0, 0.2);
            link.quiet(5);
            for _ in 0..200 {
                near(link.probe(f, b), (f, b), 0.45);
            }
            assert_eq!(link.filter.steps, 0);
            let min = link.filter.min_rtt_us().unwrap();
            assert!((20_000..20_100).contains(&min), "{min}");
        }
    }

    #[test]
    fn drift_is_removed_even_during_a_lasting_change() {
        for ppm in [50.0, -50.0, 200.0] {
            let mut link = Link::new(ppm, 0.2);
            link.quiet(60);
            assert!((link.drift_ppm() - ppm).abs() < 8.0, "{}", link.drift_ppm());
            // Without removal 50 ppm would be 3 ms over the window.
            near(link.probe(0.0, 0.0), (0.0, 0.0), 0.6);
            for _ in 0..40 * 20 {
                near(link.probe(300.0, 0.0), (300.0, 0.0), 1.0);
            }
            near(link.probe(0.0, 0.0), (0.0, 0.0), 1.0);
            near(link.probe(0.0, 80.0), (0.0, 80.0), 1.0);
            assert_eq!(link.filter.steps, 0);
        }
    }

    #[test]
    fn after_the_window_a_longer_route_is_the_new_normal() {
        let mut link = Link::new(20.0, 0.2);
        link.quiet(30);
        for _ in 0..65 * 20 {
            link.probe(30.0, 0.0);
        }
        near(link.probe(30.0, 0.0), (0.0, 0.0), 1.0);
        let min = link.filter.min_rtt_us().unwrap();
        assert!((50_000..50_200).contains(&min), "{min}");
    }

    #[test]
    fn a_clock_that_is_set_costs_three_samples() {
        for step_ms in [10.0, -10.0, 3.6e6, -3.6e6] {
            let mut link = Link::new(50.0, 0.2);
            link.quiet(20);
            link.offset_ns += step_ms * 1e6;
            assert_eq!([link.probe(0.0, 0.0), link.probe(0.0, 0.0)], [None, None]);
            near(link.probe(0.0, 0.0), (0.0, 0.0), 1.0);
            near(link.probe(40.0, 0.0), (40.0, 0.0), 1.0);
            near(link.probe(0.0, 25.0), (0.0, 25.0), 1.0);
            assert_eq!(link.filter.steps, 1);
            link.quiet(20);
            assert!((link.drift_ppm() - 50.0).abs() < 15.0);
        }
    }

    #[test]
    fn during_a_spike_a_step_stays_undecided_as_it_could_be_either_direction() {
        for step_ms in [3.6e6, -3.6e6] {
            let mut link = Link::new(50.0, 0.2);
            link.quiet(20);
            link.offset_ns += step_ms * 1e6;
            for _ in 0..10 {
                assert_eq!(link.probe(40.0, 0.0), None);
            }
            near(link.probe(0.0, 0.0), (0.0, 0.0), 1.0);
            near(link.probe(40.0, 0.0), (40.0, 0.0), 1.0);
            assert_eq!(link.filter.steps, 1);
        }
    }

    #[test]
    fn a_step_under_a_lasting_queue_is_forgotten_with_the_window() {
        let mut link = Link::new(0.0, 0.2);
        link.quiet(20);
        link.offset_ns += 3.6e12;
        for _ in 0..62 * 20 {
            link.probe(40.0, 0.0);
        }
        near(link.probe(40.0, 0.0), (0.0, 0.0), 1.0);
    }

    #[test]
    fn a_step_smaller_than_the_spike_it_hides_behind_shows_when_the_spike_ends() {
        let mut link = Link::new(0.0, 0.2);
        link.quiet(20);
        link.offset_ns -= 10e6;
        // +40 forward with the clock set back 10 looks exactly like +30 forward, +10 backward.
        near(link.probe(40.0, 0.0), (30.0, 10.0), 1.0);
        assert_eq!([link.probe(0.0, 0.0), link.probe(0.0, 0.0)], [None, None]);
        near(link.probe(0.0, 0.0), (0.0, 0.0), 1.0);
        near(link.probe(40.0, 0.0), (40.0, 0.0), 1.0);
        assert_eq!(link.filter.steps, 1);
    }

    #[test]
    fn a_new_minimum_is_not_a_step() {
        let mut link = Link::new(0.0, 0.2);
        // Begins in a standing queue that then drains in both directions, one after the other.
        for _ in 0..100 {
            link.probe(50.0, 30.0);
        }
        near(link.probe(0.0, 30.0), (0.0, 0.0), 0.5);
        near(link.probe(50.0, 30.0), (50.0, 0.0), 0.5);
        near(link.probe(0.0, 0.0), (0.0, 0.0), 0.5);
        near(link.probe(50.0, 30.0), (50.0, 30.0), 0.5);
        assert_eq!(link.filter.steps, 0);
    }

    #[test]
    fn noise_of_milliseconds_and_spikes_make_no_steps() {
        let mut link = Link::new(-30.0, 4.0);
        let mut undecided = 0;
        for n in 0..20 * 300 {
            let spike = if n % 97 < 6 { 120.0 } else { 0.0 };
            undecided += usize::from(link.probe(spike, 0.0).is_none());
        }
        assert_eq!(link.filter.steps, 0);
        assert!(undecided < 10, "{undecided}");
        let drift = link.drift_ppm();
        assert!((drift + 30.0).abs() < 40.0, "{drift}");
    }

    #[test]
    fn extreme_stamps_do_not_panic() {
        let mut filter = OneWay::new();
        for (t, f, b) in [
            (0, i64::MAX, i64::MIN),
            (1, i64::MIN, i64::MAX),
            (u64::MAX, 0, 0),
            (0, i64::MAX, i64::MAX),
            (5, i64::MIN, i64::MIN),
        ] {
            filter.push(t, f, b);
        }
    }

    proptest::proptest! {
        #[test]
        fn whatever_comes_the_excess_is_finite_and_the_lowest_is_none(
            samples in proptest::collection::vec((0u64..2_000, -500i64..500, -500i64..500), 1..300),
        ) {
            let mut filter = OneWay::new();
            let mut at_ns = 0;
            for (gap_ms, f_ms, b_ms) in samples {
                at_ns += gap_ms * 1_000_000;
                let got = filter.push(at_ns, f_ms * 1_000_000, b_ms * 1_000_000);
                // A difference of at most 1 s, plus the largest drift over the window.
                let most = 1_000_000 + 130_000;
                if let Some(v) = got {
                    assert!(v.forward_us <= most && v.backward_us <= most, "{v:?}");
                }
                assert!(filter.slope.abs() * 1e6 <= 1_000.0);
            }
        }
    }
}
