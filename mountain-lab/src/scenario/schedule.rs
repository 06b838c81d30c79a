// SPDX-License-Identifier: GPL-2.0-or-later
//! What each path does at each moment, drawn from a seed before the run: the emulator replays it,
//! the oracle reads it, and every policy of a repeat meets the same one.
//!
//! Delays are kept on a grid of one millisecond, as they are *felt*: a packet cannot overtake the
//! one before it, so after a spike the delay falls by at most one millisecond per millisecond. This
//! makes the delay of a packet independent of what other traffic there is.

use std::ops::Range;

use rand::RngExt;
use rand_distr::{Distribution, Exp};
use rand_pcg::Pcg64;

use crate::scenario::chance::{expected_us, is_lost};
use crate::scenario::{Direction, EventKind, EventSpec, PathSpec, Scenario};

/// How often the noise is drawn anew.
const NOISE_STEP_MS: usize = 5;
/// No onset this close to the end: whether a path was left shows in the second after it.
const ONSET_MARGIN_US: i64 = 1_500_000;

/// One thing that happens to one path. Times are since the start of the segment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScheduledEvent {
    pub path: usize,
    pub kind: EventKind,
    pub direction: Direction,
    pub start_us: i64,
    pub end_us: i64,
    pub height_us: u32,
    /// Share of the packets that are lost.
    pub loss: f64,
    /// What the path carries meanwhile, if not what it always does.
    pub rate_bps: Option<u64>,
}

impl ScheduledEvent {
    pub fn touches(&self, forward: bool) -> bool {
        match self.direction {
            Direction::Both => true,
            Direction::Forward => forward,
            Direction::Backward => !forward,
        }
    }

    fn covers(&self, t_us: i64) -> bool {
        (self.start_us..self.end_us).contains(&t_us)
    }
}

/// Way of one packet and its answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trip {
    pub forward_us: u32,
    pub backward_us: u32,
}

impl Trip {
    pub fn rtt_us(&self) -> u32 {
        self.forward_us + self.backward_us
    }
}

/// The schedule of one repeat.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    pub events: Vec<ScheduledEvent>,
    /// Per path: felt one-way delay in µs at each millisecond, forward and backward.
    delays: Vec<[Vec<u32>; 2]>,
    base_us: Vec<u32>,
    /// Per path: share of the packets lost from client to server at each millisecond; of a path that
    /// never loses any, nothing.
    losses: Vec<Vec<f32>>,
    /// What chance goes by: the seed and the repeat.
    chance: u64,
}

impl Schedule {
    /// Draws the schedule of a repeat. Same scenario, seed and repeat: same schedule.
    pub fn generate(scenario: &Scenario, seed: u64, repeat: u32) -> Self {
        let length_us = (scenario.segment_seconds() * 1e6) as i64;
        let from_us = u64::from(repeat) * length_us as u64;
        let span_us = from_us..from_us + length_us as u64;
        // One generator per purpose, so that adding an event does not change the noise.
        let rng = |purpose: u64| {
            Pcg64::new(
                u128::from(seed) << 64 | u128::from(repeat),
                u128::from(purpose) << 1 | 1,
            )
        };
        let specs = (1000..).zip(&scenario.events);
        let drawn = specs.flat_map(|(i, spec)| draw(spec, scenario, length_us, &mut rng(i)));
        let mut events: Vec<ScheduledEvent> = drawn.collect();
        events.sort_by_key(|e| (e.start_us, e.path));
        let delays = (0..scenario.paths.len())
            .map(|path| {
                [true, false].map(|forward| {
                    let purpose = path as u64 * 2 + u64::from(forward);
                    let mut rng = rng(purpose);
                    let own = events
                        .iter()
                        .filter(|e| e.path == path && e.touches(forward));
                    felt_delays(&scenario.paths[path], own, span_us.clone(), &mut rng)
                })
            })
            .collect();
        let specs = scenario.paths.iter();
        let base_us = specs.clone().map(|p| (p.delay_ms * 1e3) as u32);
        let losses = specs.map(|spec| losses(spec, span_us.clone()));
        Schedule {
            events,
            delays,
            base_us: base_us.collect(),
            losses: losses.collect(),
            chance: seed ^ u64::from(repeat).rotate_right(32),
        }
    }

    /// One-way delay of a packet that enters the path at `t_us`; before and after the schedule the
    /// configured one without noise.
    pub fn delay_us(&self, path: usize, forward: bool, t_us: i64) -> u32 {
        let grid = &self.delays[path][usize::from(!forward)];
        let at = usize::try_from(t_us.div_euclid(1000)).ok();
        let drawn = at.and_then(|i| grid.get(i).copied());
        drawn.unwrap_or(self.base_us[path])
    }

    /// Number of paths.
    pub fn paths(&self) -> usize {
        self.delays.len()
    }

    /// Share of the packets that enter the path at `t_us` that are dropped.
    pub fn loss(&self, path: usize, forward: bool, t_us: i64) -> f64 {
        let here =
            (self.events.iter()).filter(|e| e.path == path && e.touches(forward) && e.covers(t_us));
        let at = usize::try_from(t_us.div_euclid(1000)).ok();
        let own = at
            .filter(|_| forward)
            .and_then(|i| self.losses[path].get(i))
            .map_or(0.0, |share| f64::from(*share));
        // Lost by any cause.
        1.0 - here.map(|e| 1.0 - e.loss).product::<f64>() * (1.0 - own)
    }

    /// Whether every packet that enters the path at `t_us` is dropped.
    fn drops(&self, path: usize, forward: bool, t_us: i64) -> bool {
        self.loss(path, forward, t_us) >= 1.0
    }

    /// One-way delays of a packet sent at `t_us` on path `out` and answered on `back`, without
    /// queueing; `None` when it would be dropped.
    pub fn trip(&self, out: usize, back: usize, t_us: i64) -> Option<Trip> {
        let forward_us = self.delay_us(out, true, t_us);
        let t_back = t_us + i64::from(forward_us);
        if self.drops(out, true, t_us) || self.drops(back, false, t_back) {
            return None;
        }
        Some(Trip {
            forward_us,
            backward_us: self.delay_us(back, false, t_back),
        })
    }

    /// Share of the round trips, begun at `t_us`, that are lost: out and back, by one path each.
    fn trip_loss(&self, (out, back): (usize, usize), t_us: i64) -> f64 {
        let t_back = t_us + i64::from(self.delay_us(out, true, t_us));
        1.0 - (1.0 - self.loss(out, true, t_us)) * (1.0 - self.loss(back, false, t_back))
    }

    /// As [`Self::trip`], and some are lost where a share is: by time, path and `key` always the same.
    pub fn drawn_trip(&self, way: (usize, usize), t_us: i64, key: u64) -> Option<Trip> {
        let way_key = (way.0 as u64) << 32 | way.1 as u64;
        let key = [key, t_us.cast_unsigned(), way_key, self.chance];
        let trip = self.trip(way.0, way.1, t_us)?;
        (!is_lost(key, self.trip_loss(way, t_us))).then_some(trip)
    }

    /// What who knows the paths expects of a round trip, µs. A lost one is later than any other.
    pub fn expected_us(&self, way: (usize, usize), t_us: i64) -> u32 {
        match self.trip(way.0, way.1, t_us) {
            Some(trip) => expected_us(f64::from(trip.rtt_us()), self.trip_loss(way, t_us)),
            None => u32::MAX,
        }
    }

    /// Events whose path has to be left, in time order.
    pub fn onsets(&self) -> impl Iterator<Item = &ScheduledEvent> {
        self.events.iter().filter(|e| e.kind != EventKind::Spike)
    }
}

fn draw(
    spec: &EventSpec,
    scenario: &Scenario,
    length_us: i64,
    rng: &mut Pcg64,
) -> Vec<ScheduledEvent> {
    let every_us = spec.every_s * 1e6;
    let mut events = vec![];
    let mut t = match spec.kind {
        EventKind::Spike => exponential(every_us, rng),
        // The first onset falls anywhere in the first interval of the measured part.
        _ => (scenario.discard_seconds * 1e6 + rng.random_range(0.0..=every_us)) as i64,
    };
    let paths = scenario.paths.len();
    let mut turn = match spec.path.as_str() {
        "alternate" => Some(rng.random_range(0..paths)),
        _ => None,
    };
    loop {
        let length = (between(spec.length_ms, rng) * 1e3) as i64;
        let path = match (scenario.path_index(&spec.path), &mut turn) {
            (Some(path), _) => path,
            (None, Some(next)) => std::mem::replace(next, (*next + 1) % paths),
            (None, None) => rng.random_range(0..paths),
        };
        let height_us = (between(spec.height_ms, rng) * 1e3) as u32;
        let margin = if spec.kind == EventKind::Spike {
            0
        } else {
            ONSET_MARGIN_US
        };
        if t + margin >= length_us {
            return events;
        }
        let (kind, direction) = (spec.kind, spec.direction);
        events.push(ScheduledEvent {
            path,
            kind,
            direction,
            start_us: t,
            end_us: t + length,
            height_us,
            loss: match kind {
                EventKind::Blackhole => 1.0,
                _ => spec.loss_percent.unwrap_or(0.0) / 100.0,
            },
            rate_bps: spec.rate_mbit.map(|mbit| (mbit * 1e6) as u64),
        });
        t += match spec.kind {
            EventKind::Spike => exponential(every_us, rng),
            _ => length + (every_us * rng.random_range(0.5..=1.5)) as i64,
        };
    }
}

fn exponential(mean_us: f64, rng: &mut Pcg64) -> i64 {
    let exp = Exp::new(1.0 / mean_us).expect("a positive mean, by validation");
    exp.sample(rng) as i64
}

fn between(range: [f64; 2], rng: &mut Pcg64) -> f64 {
    rng.random_range(range[0]..=range[1])
}

/// `span_us`: since the begin of the first repeat.
fn felt_delays<'a>(
    spec: &PathSpec,
    events: impl Iterator<Item = &'a ScheduledEvent> + Clone,
    span_us: Range<u64>,
    rng: &mut Pcg64,
) -> Vec<u32> {
    let (base, noise) = (spec.delay_ms * 1e3, spec.noise_ms * 1e3);
    let mut shift = 0.0;
    let mut felt: Vec<u32> = Vec::with_capacity(((span_us.end - span_us.start) / 1000) as usize);
    for (i, at_us) in span_us.clone().step_by(1000).enumerate() {
        if i % NOISE_STEP_MS == 0 {
            shift = rng.random_range(-noise..=noise);
        }
        let t_us = (at_us - span_us.start) as i64;
        let now = events.clone().filter(|e| e.covers(t_us));
        let extra = now.map(|e| e.height_us).max().unwrap_or(0);
        let own = match &spec.playback {
            Some(playback) => playback.at(at_us).0 / 2,
            None => (base + shift) as u32,
        };
        // First in, first out: not before the packet of a millisecond ago.
        let earliest = felt.last().map_or(0, |last| last.saturating_sub(1000));
        felt.push((own + extra).max(earliest));
    }
    felt
}

/// As [`Schedule::losses`]; `span_us`: since the begin of the first repeat.
fn losses(spec: &PathSpec, span_us: Range<u64>) -> Vec<f32> {
    let fixed = spec.loss_percent / 100.0;
    if fixed == 0.0 && spec.playback.is_none() {
        return Vec::new();
    }
    let at = |at_us| match &spec.playback {
        // Lost by either cause.
        Some(playback) => (1.0 - (1.0 - playback.at(at_us).1) * (1.0 - fixed)) as f32,
        None => fixed as f32,
    };
    span_us.step_by(1000).map(at).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scenario(events: &str) -> Scenario {
        Scenario::two_paths(60, "", events)
    }

    const SPIKES: &str =
        "[[event]]\nkind='spike'\npath='a'\nevery_s=3\nlength_ms=[100,600]\nheight_ms=[40,200]\n";

    #[test]
    fn the_seed_and_the_repeat_decide_everything() {
        let s = scenario(SPIKES);
        let first = Schedule::generate(&s, 7, 0);
        assert_eq!(first, Schedule::generate(&s, 7, 0));
        assert_ne!(first.events, Schedule::generate(&s, 7, 1).events);
        assert_ne!(first.events, Schedule::generate(&s, 8, 0).events);
        // Noise stays when an event is added.
        let quiet = Schedule::generate(&scenario(""), 7, 0);
        assert_eq!(quiet.delays[1], first.delays[1]);
    }

    #[test]
    fn noise_keeps_the_rtt_within_two_milliseconds() {
        let q = Schedule::generate(&scenario(""), 1, 0);
        let rtts: Vec<u32> = (0..65_000)
            .map(|ms| q.trip(0, 0, ms * 1000).unwrap().rtt_us())
            .collect();
        let (min, max) = (*rtts.iter().min().unwrap(), *rtts.iter().max().unwrap());
        assert!((18_000..18_400).contains(&min), "{min}");
        assert!((21_600..=22_000).contains(&max), "{max}");
        assert_eq!(q.trip(0, 0, -1_000_000).unwrap().rtt_us(), 20_000);
        assert_eq!(q.trip(0, 0, 100_000_000).unwrap().rtt_us(), 20_000);
    }

    #[test]
    fn spikes_have_the_asked_rate_and_size_and_only_their_direction() {
        let s = scenario(SPIKES);
        let mut count = 0;
        for repeat in 0..50 {
            for e in Schedule::generate(&s, 3, repeat).events {
                count += 1;
                assert!(
                    (100_000..=600_000).contains(&(e.end_us - e.start_us)),
                    "{e:?}"
                );
                assert!((40_000..=200_000).contains(&e.height_us), "{e:?}");
                assert_eq!(e.path, 0);
            }
        }
        // 50 × 65 s, one every 3 s: 1083 expected, standard deviation 33.
        assert!((950..1220).contains(&count), "{count}");
        let q = Schedule::generate(&s, 3, 0);
        let t = q.events[0].start_us + 1000;
        assert!(q.delay_us(0, true, t) > 48_000);
        assert!(q.delay_us(0, false, t) < 11_001);
        assert!(q.delay_us(1, true, t) < 11_001);
    }

    #[test]
    fn packets_never_overtake_and_the_other_path_has_no_spike() {
        let q = Schedule::generate(&scenario(SPIKES), 5, 0);
        for ms in 1..60_000i64 {
            let leave = |ms: i64| ms * 1000 + i64::from(q.delay_us(0, true, ms * 1000));
            assert!(leave(ms) >= leave(ms - 1), "at {ms} ms");
            let other = q.trip(1, 1, ms * 1000).unwrap().rtt_us();
            assert!(other <= 22_000, "{other} at {ms} ms");
        }
    }

    #[test]
    fn a_recording_goes_on_from_repeat_to_repeat_and_loses_on_the_way_out() {
        let dir = tempfile::tempdir().unwrap();
        // Segments are 65 s long.
        let text = "t_s,rtt_ms\n0,30\n10,\n20,30\n70,90\n100,90\n";
        std::fs::write(dir.path().join("a.csv"), text).unwrap();
        let mut s = scenario("");
        s.folder = dir.path().to_owned();
        s.paths[0].trace = Some("a.csv".into());
        s.read_traces().unwrap();
        let [first, second] = [0, 1].map(|repeat| Schedule::generate(&s, 1, repeat));
        let rtt = |q: &Schedule, s: i64| q.trip(0, 0, s * 1_000_000).map(|t| t.rtt_us());
        assert_eq!(rtt(&first, 1), Some(30_000));
        assert_eq!(rtt(&first, 15), None);
        assert!(first.drops(0, true, 15_000_000) && !first.drops(0, false, 15_000_000));
        assert_eq!(rtt(&second, 1), Some(30_000), "second 66");
        assert_eq!(rtt(&second, 6), Some(90_000), "second 71");
        assert_eq!(rtt(&second, 36), Some(30_000), "from the begin again");
        assert!(
            first.trip(1, 1, 0).unwrap().rtt_us() > 17_000,
            "the other one is as it was"
        );
    }

    #[test]
    fn alternate_takes_the_paths_in_turn_from_either_on() {
        let s = scenario(
            "[[event]]\nkind='degrade'\npath='alternate'\nevery_s=5\n\
             length_ms=[2500,4000]\nheight_ms=[300,300]\n",
        );
        let mut first = [0; 2];
        for repeat in 0..20 {
            let q = Schedule::generate(&s, 1, repeat);
            let paths: Vec<usize> = q.onsets().map(|e| e.path).collect();
            assert!(paths.len() >= 5, "{paths:?}");
            assert!(paths.windows(2).all(|w| w[0] != w[1]), "{paths:?}");
            first[paths[0]] += 1;
        }
        assert!(first[0] >= 4 && first[1] >= 4, "{first:?}");
    }

    #[test]
    fn blackholes_drop_and_the_other_path_does_not() {
        let s = scenario(
            "[[event]]\nkind='blackhole'\npath='random'\nevery_s=5\nlength_ms=[2000,2000]\n",
        );
        let q = Schedule::generate(&s, 11, 0);
        let onsets: Vec<_> = q.onsets().collect();
        assert!(onsets.len() >= 5, "{onsets:?}");
        for e in onsets {
            assert!(q.drops(e.path, true, e.start_us) && !q.drops(e.path, true, e.end_us));
            assert_eq!(q.trip(e.path, e.path, e.start_us), None);
            assert!(!q.drops(1 - e.path, true, e.start_us));
            assert!(q.trip(1 - e.path, 1 - e.path, e.start_us).is_some());
        }
    }

    #[test]
    fn a_loss_event_loses_its_share_and_so_does_the_path() {
        let events = |path: &str| {
            let event = "[[event]]\nkind='loss'\npath='b'\nevery_s=5\nlength_ms=[2000,2000]\nloss_percent=30\n";
            let s = scenario(&format!("{path}{event}"));
            Schedule::generate(&s, 11, 0)
        };
        let q = events("");
        let onset = q.onsets().next().expect("one in a minute");
        let at = |path, forward, t_us| (q.loss(path, forward, t_us) * 1e3).round();
        assert_eq!(at(1, true, onset.start_us), 300.0);
        let others = [
            (1, false, onset.start_us),
            (0, true, onset.start_us),
            (1, true, onset.end_us),
        ];
        for (path, forward, t_us) in others {
            assert_eq!(at(path, forward, t_us), 0.0, "{path} {forward} {t_us}");
        }
        // A packet comes through when neither loses it: 0.7 · 0.9.
        let q = events("loss_percent=10\n");
        let onset = q.onsets().next().expect("one in a minute");
        assert_eq!((q.loss(1, true, onset.start_us) * 1e3).round(), 370.0);
    }
}
