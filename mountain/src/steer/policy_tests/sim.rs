// SPDX-License-Identifier: GPL-2.0-or-later
//! Simulated paths and their probes: time advances by ticks, the policy sees what a daemon would
//! feed it, and game packets are compared with the hash's and the oracle's.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::steer::policy::*;
use crate::steer::rendezvous;
use crate::topology::{PathKey, PathMasks};

pub const MS: u64 = 1_000;
pub const S: u64 = 1_000_000;
pub const TICK: u64 = 10 * MS;
pub const FLOWS: u32 = 8;

/// What a simulated path does with a probe or packet sent at a time: (forward delay as judged,
/// RTT), or `None`: lost.
pub type Model<'a> = Box<dyn FnMut(u64) -> Option<(u32, u32)> + 'a>;

pub(crate) struct Sim<'a> {
    pub policy: Policy,
    pub models: Vec<Model<'a>>,
    pub now: u64,
    pub seq: u64,
    pub flight: Vec<(u64, Event)>,
    pub verdicts: Vec<(u64, PolicyVerdict)>,
    /// Whether there is a thin latency flow on each path that is used.
    pub thin: bool,
    /// Whether the events of a tick are told in reverse.
    pub reversed: bool,
    /// When each path was probed last.
    pub probed: Vec<u64>,
    inputs: Vec<PathInput>,
    groups: Vec<Vec<usize>>,
}

impl<'a> Sim<'a> {
    pub fn new(models: Vec<Model<'a>>, seed: u64) -> Self {
        let n = models.len();
        Sim::with(models, vec![(0..n).collect()], seed)
    }

    pub fn with(models: Vec<Model<'a>>, groups: Vec<Vec<usize>>, seed: u64) -> Self {
        let inputs: Vec<PathInput> = (0..models.len()).map(|i| input(&format!("p{i}"))).collect();
        Sim {
            policy: Policy::new(groups.clone(), inputs.clone(), seed),
            models,
            now: S,
            seq: 0,
            flight: Vec::new(),
            verdicts: Vec::new(),
            thin: true,
            reversed: false,
            probed: vec![0; inputs.len()],
            inputs,
            groups,
        }
    }

    pub fn mask(&self) -> PathMasks {
        self.policy.current().groups[0]
    }

    /// Runs to `until`, calling `each` after every tick.
    pub fn run(&mut self, until: u64, mut each: impl FnMut(&mut Self)) {
        while self.now < until {
            self.now += TICK;
            let now = self.now;
            self.deliver();
            for path in 0..self.models.len() {
                // Probes of different paths are not sent at the same moment.
                let interval = self.policy.probe_interval_us(path);
                let phase = path as u64 * TICK;
                if now >= self.probed[path] + interval && now > S + phase {
                    self.send(path);
                }
            }
            if let Some(v) = self.policy.tick(now) {
                self.verdicts.push((now, v));
            }
            if self.thin {
                self.thin_flows();
            }
            each(self);
        }
    }

    /// Tells the policy of all that has come by now.
    pub fn deliver(&mut self) {
        self.flight.sort_by_key(|f| f.0);
        let due = self.flight.partition_point(|f| f.0 <= self.now);
        let mut due: Vec<Event> = self.flight.drain(..due).map(|f| f.1).collect();
        if self.reversed {
            due.reverse();
        }
        due.into_iter().for_each(|e| self.policy.event(e));
    }

    /// Sends a probe by a path; its answer is under way, unless it is lost.
    pub fn send(&mut self, path: usize) {
        let at_us = self.now;
        self.probed[path] = at_us;
        self.seq += 1;
        let seq = self.seq;
        self.policy.event(Event::Sent { path, seq, at_us });
        let model = &mut self.models[path];
        let Some((delay_us, rtt_us)) = model(at_us) else {
            return;
        };
        let at_us = at_us + u64::from(rtt_us);
        let answer = Event::Answered {
            path,
            seq,
            at_us,
            rtt_us,
            delay_us,
        };
        self.flight.push((at_us, answer));
    }

    /// The link of a path comes or goes.
    pub fn usable(&mut self, path: usize, usable: bool, why: &'static str) {
        let at_us = self.now;
        self.policy.event(Event::Usable {
            path,
            at_us,
            usable,
            why,
        });
    }

    /// Our own rates on a path: of all flows, and of latency flows.
    pub fn egress(&mut self, path: usize, rate_bps: f64, latency_bps: f64) {
        let at_us = self.now;
        self.policy.event(Event::Egress {
            path,
            at_us,
            rate_bps,
            latency_bps,
        });
    }

    /// Other handicaps, before it runs.
    pub(crate) fn with_costs(&mut self, costs_us: [f64; 2]) {
        let each = self.inputs.iter_mut().zip(costs_us);
        each.for_each(|(input, cost_us)| input.cost_us = cost_us);
        self.read_again();
    }

    pub(crate) fn with_capacities(&mut self, capacities_bps: [Option<u64>; 2]) {
        let each = self.inputs.iter_mut().zip(capacities_bps);
        each.for_each(|(input, capacity_bps)| input.capacity_bps = capacity_bps);
        let (groups, paths) = (self.groups.clone(), self.inputs.clone());
        self.policy = Policy::new(groups, paths, 1);
    }

    pub(crate) fn with_metered(&mut self, metered: [bool; 2]) {
        let each = self.inputs.iter_mut().zip(metered);
        each.for_each(|(input, metered)| input.metered = metered);
        self.read_again();
    }

    /// A reading of the routing that shows the same groups and paths.
    pub(crate) fn read_again(&mut self) {
        self.policy
            .set_topology(self.groups.clone(), self.inputs.clone());
    }

    fn thin_flows(&mut self) {
        let used = self.mask().latency;
        for path in (0..self.models.len()).filter(|path| used & 1 << path != 0) {
            self.egress(path, 1e5, 1e5);
        }
    }

    pub fn explain(&self) -> String {
        let lines: Vec<String> = self
            .policy
            .decisions()
            .map(|d| {
                format!(
                    "{:.2} s {:?} -> {:?}: {}",
                    d.at_us as f64 / 1e6,
                    d.from,
                    d.to,
                    d.why
                )
            })
            .collect();
        lines.join("\n")
    }
}

/// A path of which nothing but its name is known beforehand.
pub fn input(name: &str) -> PathInput {
    // Of each name another one.
    let device = name.bytes().fold(0, |sum, byte| sum << 8 | u32::from(byte));
    PathInput {
        name: name.to_owned(),
        key: Some(PathKey {
            ifindex: device,
            gateway: None,
            ipv6: false,
        }),
        ..PathInput::default()
    }
}

/// 20 ms ± 2 ms.
pub fn noise(rng: &mut StdRng) -> u32 {
    rng.random_range(18_000..=22_000)
}

pub fn same(d: u32) -> Option<(u32, u32)> {
    Some((d, d))
}

pub fn noisy<'a>(seed: u64) -> Model<'a> {
    let mut rng = StdRng::seed_from_u64(seed);
    Box::new(move |_| same(noise(&mut rng)))
}

pub fn constant<'a>(us: u32) -> Model<'a> {
    Box::new(move |_| same(us))
}

/// A constant delay; of the probes sent at a time so many percent are lost.
pub fn lossy<'a>(seed: u64, us: u32, percent: impl Fn(u64) -> u32 + 'a) -> Model<'a> {
    let mut rng = StdRng::seed_from_u64(seed);
    Box::new(move |t| {
        let percent = percent(t);
        let lost = percent > 0 && rng.random_range(0..100) < percent;
        (!lost).then_some((us, us))
    })
}

/// Noise plus what `extra` adds at a time.
pub(crate) fn shaped<'a>(seed: u64, extra: impl Fn(u64) -> u32 + 'a) -> Model<'a> {
    let mut rng = StdRng::seed_from_u64(seed);
    Box::new(move |t| same(noise(&mut rng) + extra(t)))
}

/// Spikes: (start, end, height), Poisson with the mean gap, uniform lengths and heights.
pub fn spikes(seed: u64, until: u64, length: std::ops::Range<u64>) -> Vec<(u64, u64, u32)> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut all = Vec::new();
    let mut t = 0u64;
    while t < until {
        t += (-(1.0 - rng.random::<f64>()).ln() * 3e6) as u64;
        let end = t + rng.random_range(length.clone());
        all.push((t, end, rng.random_range(40_000..=200_000)));
        t = end;
    }
    all
}

pub fn height(spikes: &[(u64, u64, u32)], t: u64) -> u32 {
    let spike = spikes.iter().find(|s| (s.0..s.1).contains(&t));
    spike.map_or(0, |s| s.2)
}

pub fn p99(mut d: Vec<u32>) -> f64 {
    d.sort_unstable();
    f64::from(d[(d.len() * 99).div_ceil(100) - 1])
}

/// What a reply tells is at least so old.
pub(crate) const NEWS: u64 = 20 * MS;

/// Delays of game packets: [mountain, ecmp, oracle, the oracle that learns a round trip late]. The
/// last one bounds what anybody can do who has to wait for a reply, or for its absence.
pub fn spiky(a: &[(u64, u64, u32)], b: &[(u64, u64, u32)], seed: u64, until: u64) -> [Vec<u32>; 4] {
    let models = [(seed, a), (seed + 1, b)];
    let models = models.map(|(seed, spikes)| shaped(seed, move |t| height(spikes, t)));
    let mut sim = Sim::new(models.into(), seed);
    let mut rng = StdRng::seed_from_u64(seed + 2);
    let salts = [rendezvous::path_salt(b"a"), rendezvous::path_salt(b"b")];
    let inv = [rendezvous::inv_weight(1); 2];
    let (mut ours, mut ecmp, mut oracle, mut informed) = (vec![], vec![], vec![], vec![]);
    sim.run(until, |s| {
        if s.now < 6 * S {
            return;
        }
        let delays = [a, b].map(|spikes| noise(&mut rng) + height(spikes, s.now));
        for flow in 0..FLOWS {
            let hash = rendezvous::fmix32(flow);
            let take = |m| rendezvous::choose(hash, &salts, &inv, m);
            ours.push(delays[take(s.mask().latency).expect("a path is chosen")]);
            ecmp.push(delays[take(3).unwrap()]);
        }
        oracle.push(*delays.iter().min().unwrap());
        let known = s.now - NEWS;
        informed.push(delays[usize::from(height(b, known) < height(a, known))]);
    });
    drop(sim);
    [ours, ecmp, oracle, informed]
}

/// Runs several seeds and pools their packets, as p99 of a single run rests on few spikes: for
/// those of [`spiky`], p99 and the share of packets that are 30 ms late or more.
pub fn pooled(length: std::ops::Range<u64>, both: bool) -> [(f64, f64); 4] {
    let mut all = [vec![], vec![], vec![], vec![]];
    let until = 100 * S;
    for seed in [101, 202, 303, 404] {
        let a = spikes(seed, until, length.clone());
        let until_b = if both { until } else { 0 };
        let b = spikes(seed + 50, until_b, length.clone());
        for (all, these) in all.iter_mut().zip(spiky(&a, &b, seed, until)) {
            all.extend(these);
        }
    }
    let figures = all.map(|d| {
        let late = d.iter().filter(|d| **d > 50_000).count() as f64 / d.len() as f64;
        (p99(d), late)
    });
    println!("both {both}, {length:?}: mountain, ecmp, oracle, late oracle {figures:?}");
    figures
}
