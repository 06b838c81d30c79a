// SPDX-License-Identifier: GPL-2.0-or-later
//! Flows that choose when they start and can never leave, probed as the daemon does it.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::sim::*;
use crate::config::SteerConfig;
use crate::steer::policy::*;

/// The daemon's loop in steps of a millisecond, with `rate_hz` new flows on two paths.
struct Host<'a> {
    policy: Policy,
    models: Vec<Model<'a>>,
    now: u64,
    seq: u64,
    probed_at: [u64; 2],
    /// Probes sent on each path.
    probes: [u64; 2],
    flight: Vec<(u64, Event)>,
    placed: [u64; 2],
    rate_hz: u64,
    rng: StdRng,
}

impl<'a> Host<'a> {
    fn new(models: Vec<Model<'a>>, rate_hz: u64, seed: u64) -> Self {
        let path = |i| PathInput {
            name: format!("p{i}"),
            power_cost_us: 0.0,
            capacity_bps: None,
        };
        let paths = (0..2).map(path).collect();
        Host {
            policy: Policy::new(&SteerConfig::default(), vec![vec![0, 1]], paths, seed),
            models,
            now: S,
            seq: 0,
            // Not at the same moment.
            probed_at: [0, S - 23 * MS],
            probes: [0; 2],
            flight: Vec::new(),
            placed: [0; 2],
            rate_hz,
            rng: StdRng::seed_from_u64(seed),
        }
    }

    /// Runs to `until`; `started` is told of each flow the path where it starts.
    fn run(&mut self, until: u64, mut started: impl FnMut(&Self, usize)) {
        while self.now < until {
            self.now += MS;
            let now = self.now;
            self.flight.sort_by_key(|f| f.0);
            while self.flight.first().is_some_and(|f| f.0 <= now) {
                self.policy.event(self.flight.remove(0).1);
            }
            for path in 0..2 {
                self.probe(path);
            }
            if now.is_multiple_of(TICK) || self.policy.next_late_us().is_some_and(|at| at <= now) {
                self.policy.tick(now);
            }
            if now.is_multiple_of(100 * MS) {
                for (path, placed) in self.placed.iter_mut().enumerate() {
                    let flows = std::mem::take(placed);
                    let at_us = now;
                    self.policy.event(Event::Placed { path, at_us, flows });
                }
            }
            if self.rate_hz > 0 && now % (S / self.rate_hz) < MS {
                let path = match self.policy.for_new_flows(0) {
                    0b01 => 0,
                    0b10 => 1,
                    _ => self.rng.random_range(0..2),
                };
                self.placed[path] += 1;
                started(self, path);
            }
        }
    }

    fn probe(&mut self, path: usize) {
        let now = self.now;
        if now < self.probed_at[path] + self.policy.probe_interval_us(path) {
            return;
        }
        self.probed_at[path] = now;
        self.probes[path] += 1;
        self.seq += 1;
        let answer = probe(
            &mut self.policy,
            &mut self.models[path],
            path,
            self.seq,
            now,
        );
        self.flight.extend(answer);
    }
}

/// 300 ms later from `onset` on.
fn slower_from<'a>(onset: u64, seed: u64) -> Model<'a> {
    shaped(seed, move |t| if t >= onset { 300_000 } else { 0 })
}

#[test]
fn where_many_flows_start_a_slow_path_is_known_within_37_ms() {
    // A probe every 10 ms, the answer missed after 22 + 2 ms, in steps of 1 ms.
    for seed in 0..20u64 {
        let onset = 10 * S + seed * 3_700;
        let models = vec![slower_from(onset, seed), noisy(seed + 1000)];
        let mut host = Host::new(models, 1000, seed);
        host.run(12 * S, |host, path| {
            let since = host.now as i64 - onset as i64;
            assert!(path == 1 || since < 37_000, "{since} us after the onset");
        });
    }
}

#[test]
fn probes_follow_the_rate_of_new_flows() {
    for (rate_hz, expected) in [(0, 20), (2, 20), (8, 40), (12, 60), (25, 100), (500, 100)] {
        let mut host = Host::new(vec![noisy(1), noisy(2)], rate_hz, 3);
        host.run(10 * S, |_, _| {});
        let before = host.probes;
        host.run(20 * S, |_, _| {});
        for (after, before) in host.probes.iter().zip(before) {
            let hz = (after - before) / 10;
            assert!(
                (expected * 9 / 10..=expected * 11 / 10).contains(&hz),
                "{rate_hz} flows/s: {hz} probes/s"
            );
        }
        host.rate_hz = 0;
        host.run(30 * S, |_, _| {});
        assert_eq!(host.policy.probe_interval_us(0), 50 * MS, "and again later");
    }
}

#[test]
fn probes_in_between_do_not_count_against_a_path() {
    // Four late probes in a row, of which one is at the pace at which a path is judged.
    let spike = |t: u64| {
        let is_late = t >= 10 * S && t % S < 40 * MS;
        if is_late {
            200_000
        } else {
            0
        }
    };
    let mut host = Host::new(vec![shaped(1, spike), noisy(2)], 50, 4);
    let mut avoided = 0;
    host.run(20 * S, |host, _| {
        assert_eq!(host.policy.current().groups[0].latency, 0b11);
        avoided += u32::from(host.policy.for_new_flows(0) == 0b10);
    });
    assert!(avoided > 0, "but new flows stay out of it meanwhile");
}

/// (path, start, end) of phases in which one path and the other in turn is 300 ms slower, as scenario
/// `two-isp` has them.
fn phases(seed: u64, until: u64) -> Vec<(usize, u64, u64)> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut all = Vec::new();
    let mut t = 10 * S;
    while t < until {
        let end = t + rng.random_range(2_500..4_000) * MS;
        all.push((all.len() % 2, t, end));
        t = end + rng.random_range(2_500..7_500) * MS + rng.random_range(0..MS);
    }
    all
}

/// Of the flows that start in a bad phase from `from` on, those that start on the bad path, and all.
fn caught(seed: u64, from: u64, until: u64) -> (u64, u64) {
    let phases = phases(seed, until);
    let extra = |path: usize, t: u64| {
        let late = |p: &(usize, u64, u64)| match t {
            t if t < p.1 || p.0 != path => 0,
            t if t < p.2 => 300_000,
            // First in, first out.
            t => 300_000u64.saturating_sub(t - p.2),
        };
        phases.iter().map(late).max().unwrap_or(0) as u32
    };
    let models: Vec<Model> = vec![
        shaped(seed, |t| extra(0, t)),
        shaped(seed + 1000, |t| extra(1, t)),
    ];
    let mut host = Host::new(models, 25, seed);
    let (mut caught, mut all) = (0, 0);
    host.run(until, |host, path| {
        let during = |p: &&(usize, u64, u64)| (p.1..p.2).contains(&host.now);
        if let Some(phase) = phases.iter().find(during).filter(|_| host.now >= from) {
            all += 1;
            caught += u64::from(phase.0 == path);
        }
    });
    (caught, all)
}

#[test]
fn few_flows_are_caught_on_a_path_that_turns_bad() {
    // After a minute both paths are held most of the time. A phase has 81 flows, and 0.75 of one start in the
    // 30 ms until it is known: all on one path, and that the next to turn bad, 0.9% would be caught; on both,
    // half as many.
    let (caught, all) = caught(1, 60 * S, 300 * S);
    let share = caught as f64 / all as f64;
    assert!(share < 0.007, "{caught} of {all}: {share:.4}");
}

#[test]
fn new_flows_share_paths_while_none_is_eligible_unless_one_is_dear() {
    for loses in [false, true] {
        // Both have a bad name by now and are good since; the second one may lose every tenth probe besides.
        let spike = |path: u64, t: u64| {
            let is_late = t < 30 * S && t / S % 4 == path * 2 && t % S < 400 * MS;
            if is_late {
                200_000
            } else {
                0
            }
        };
        let mut rng = StdRng::seed_from_u64(2);
        let mut second = shaped(3, |t| spike(1, t));
        let second: Model = Box::new(move |t| {
            let answer = second(t);
            answer.filter(|_| !loses || !rng.random_ratio(1, 10))
        });
        let mut host = Host::new(vec![shaped(4, |t| spike(0, t)), second], 25, 5);
        let mut on = [0u32; 2];
        host.run(41 * S, |host, path| {
            if host.now >= 31 * S {
                on[path] += 1;
                let latency = host.policy.current().groups[0].latency;
                assert_eq!(latency.count_ones(), 1, "the least bad one");
            }
        });
        let share = f64::from(on[1]) / f64::from(on[0] + on[1]);
        match loses {
            false => assert!((0.4..0.6).contains(&share), "{on:?}"),
            true => assert!(share < 0.25, "{on:?}"),
        }
    }
}
