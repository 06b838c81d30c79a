// SPDX-License-Identifier: GPL-2.0-or-later
//! Flows that choose when they start and can never leave, probed as the daemon does it.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::sim::*;
use crate::steer::policy::*;

/// The daemon's loop in steps of a millisecond, with `rate_hz` new flows on two paths.
struct Host<'a> {
    sim: Sim<'a>,
    placed: [u64; 2],
    rate_hz: u64,
    rng: StdRng,
}

impl<'a> Host<'a> {
    fn new(models: Vec<Model<'a>>, rate_hz: u64, seed: u64) -> Self {
        let mut sim = Sim::new(models, seed);
        // Not at the same moment.
        sim.probed = vec![0, S - 23 * MS];
        Host {
            sim,
            placed: [0; 2],
            rate_hz,
            rng: StdRng::seed_from_u64(seed),
        }
    }

    /// Runs to `until`; `started` is told of each flow the path where it starts.
    fn run(&mut self, until: u64, mut started: impl FnMut(&Self, usize)) {
        while self.sim.now < until {
            self.sim.now += MS;
            let now = self.sim.now;
            self.sim.deliver();
            for path in 0..2 {
                if now >= self.sim.probed[path] + self.sim.policy.probe_interval_us(path) {
                    self.sim.send(path);
                }
            }
            let policy = &mut self.sim.policy;
            if now.is_multiple_of(TICK) || policy.next_late_us().is_some_and(|at| at <= now) {
                policy.tick(now);
            }
            if now.is_multiple_of(100 * MS) {
                for (path, placed) in self.placed.iter_mut().enumerate() {
                    let flows = std::mem::take(placed);
                    let at_us = now;
                    policy.event(Event::Placed { path, at_us, flows });
                }
            }
            if self.rate_hz > 0 && now % (S / self.rate_hz) < MS {
                let path = match policy.for_new_flows(0) {
                    0b01 => 0,
                    0b10 => 1,
                    _ => self.rng.random_range(0..2),
                };
                self.placed[path] += 1;
                started(self, path);
            }
        }
    }
}

/// 300 ms later from `onset` on.
fn slower_from<'a>(onset: u64, seed: u64) -> Model<'a> {
    shaped(seed, move |t| if t >= onset { 300_000 } else { 0 })
}

#[test]
fn where_many_flows_start_a_slow_path_is_known_within_40_ms() {
    // A probe every 10 ms, the answer missed after 20 + 8 ms, in steps of 1 ms.
    for seed in 0..20u64 {
        let onset = 10 * S + seed * 3_700;
        let models = vec![slower_from(onset, seed), noisy(seed + 1000)];
        let mut host = Host::new(models, 1000, seed);
        host.run(12 * S, |host, path| {
            let since = host.sim.now as i64 - onset as i64;
            assert!(path == 1 || since < 40_000, "{since} us after the onset");
        });
    }
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
        let during = |p: &&(usize, u64, u64)| (p.1..p.2).contains(&host.sim.now);
        if let Some(phase) = phases.iter().find(during).filter(|_| host.sim.now >= from) {
            all += 1;
            caught += u64::from(phase.0 == path);
        }
    });
    (caught, all)
}

#[test]
fn few_flows_are_caught_on_a_path_that_turns_bad() {
    // A phase has 81 flows, and one starts in the 38 ms until it is known: 1.2% are caught, where all are on
    // the path that turns bad.
    let (caught, all) = caught(1, 60 * S, 300 * S);
    let share = caught as f64 / all as f64;
    assert!(share < 0.02, "{caught} of {all}: {share:.4}");
}

#[test]
fn new_flows_stay_out_of_a_path_from_its_first_late_probe_on() {
    for seed in 0..10u64 {
        let onset = 10 * S + seed * 3_700;
        let late = shaped(seed, move |t| u32::from(t >= onset) * 300_000);
        let mut sim = Sim::new(vec![late, noisy(seed + 1000)], seed);
        let (mut avoided, mut left) = (None, None);
        sim.run(12 * S, |s| {
            let new = s.policy.for_new_flows(0);
            match s.now {
                now if now < 5 * S => {}
                now if now < onset => assert_eq!(new, 0b11, "no probe was late"),
                now if new == 0b10 => _ = avoided.get_or_insert(now),
                _ => assert_eq!(avoided, None, "and stay out"),
            }
            if s.now >= onset && s.mask().latency == 0b10 {
                left.get_or_insert(s.now);
            }
        });
        let (avoided, left) = (avoided.unwrap() - onset, left.unwrap() - onset);
        let soon = avoided <= 100 * MS && avoided <= left;
        assert!(soon, "{avoided}, {left} us");
    }
}
