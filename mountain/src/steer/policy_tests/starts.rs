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
            if now % TICK == 0 || self.policy.next_late_us().is_some_and(|at| at <= now) {
                self.policy.tick(now);
            }
            if now % (100 * MS) == 0 {
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
        let seq = self.seq;
        let at_us = now;
        self.policy.event(Event::Sent { path, seq, at_us });
        if let Some((delay_us, rtt_us)) = (self.models[path])(now) {
            let at_us = now + u64::from(rtt_us);
            let answer = Event::Answered {
                path,
                seq,
                at_us,
                rtt_us,
                delay_us,
            };
            self.flight.push((at_us, answer));
        }
    }
}

/// 300 ms later from `onset` on.
fn slower_from<'a>(onset: u64, seed: u64) -> Model<'a> {
    shaped(seed, move |t| if t >= onset { 300_000 } else { 0 })
}

#[test]
fn where_many_flows_start_a_slow_path_is_known_within_40_ms() {
    // A probe every 10 ms, the answer missed after 22 + 2 ms, in steps of 1 ms.
    for seed in 0..20u64 {
        let onset = 10 * S + seed * 3_700;
        let models = vec![slower_from(onset, seed), noisy(seed + 1000)];
        let mut host = Host::new(models, 50, seed);
        host.run(12 * S, |host, path| {
            let since = host.now as i64 - onset as i64;
            assert!(path == 1 || since < 40_000, "{since} us after the onset");
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
