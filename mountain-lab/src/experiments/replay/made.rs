// SPDX-License-Identifier: GPL-2.0-or-later
//! Made-up paths to replay: noise, loss, spikes and outages whose size is known.
//!
//! What a packet meets is a function of seed, path and time of sending. So every policy meets the
//! same, a probe meets what it would have met under any policy, and noise is drawn for each packet.

use std::rc::Rc;

use anyhow::{ensure, Context, Result};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, Exp, StandardNormal};

use super::window::{Input, PathTrace, Window};
use crate::scenario::chance::{expected_us, keyed, MOST_US};
use crate::scenario::schedule::Schedule;
use crate::scenario::Scenario;

/// What a name begins with on the command line.
pub const PREFIX: &str = "made:";
/// What can be made; capitals stand for numbers, unless said.
pub const KINDS: [(&str, &str); 10] = [
    (
        "noise-KIND-BASE",
        "two equal paths of BASE ms; each packet draws its own noise: exp3, exp8 (mean in ms), \
         outliers (2 %, 10 to 40 ms), gauss2 (sd in ms), loss1 (1 % lost)",
    ),
    (
        "loss-PERCENT-BASE[-SLOWER]",
        "two paths of BASE ms; the first loses PERCENT, the second is SLOWER ms slower",
    ),
    (
        "scans-S",
        "200 ms of 60 ms more, every S s, on the first path",
    ),
    ("outage-S", "the first path is dark once for S s"),
    ("apart-MS", "the second path is MS ms slower for good"),
    (
        "rare-spikes",
        "every 30 s on average 1 to 4 s of 100 to 400 ms more, on either path",
    ),
    (
        "bad-K-of-N",
        "N paths of 20 ms, K of them with the spikes of scenario spiky",
    ),
    (
        "constant-N",
        "N paths without noise, each 1 ms slower than the one before",
    ),
    (
        "dark-half",
        "a path of 5 ms that is dark for 2 of every 4 s, and two of 60 ms",
    ),
    (
        "SCENARIO",
        "the paths of one of these scenarios: spiky, spiky-short, spiky-both, flap, steady, \
         degrade-30, degrade-300, blackhole",
    ),
];
/// Scenarios whose paths do by themselves what the scenario is about.
const SCENARIOS: [&str; 8] = [
    "spiky",
    "spiky-short",
    "spiky-both",
    "flap",
    "steady",
    "degrade-30",
    "degrade-300",
    "blackhole",
];
const NOISES: [&str; 5] = ["exp3", "exp8", "outliers", "gauss2", "loss1"];
/// Delay of paths where the name does not say it, ms.
const BASE_MS: f64 = 20.0;
/// No noise makes a delay shorter than this, µs.
const LEAST_US: f64 = 100.0;

/// Names for `made:all`: what the project judges its policy by.
pub fn all() -> Vec<String> {
    let mut names: Vec<String> = SCENARIOS.map(str::to_owned).to_vec();
    for noise in NOISES {
        for base in ["0.3", "5", "10", "20", "60", "600"] {
            names.push(format!("noise-{noise}-{base}"));
        }
    }
    for percent in [5, 30] {
        for base in [5, 20, 60, 120, 300, 600] {
            names.push(format!("loss-{percent}-{base}"));
        }
    }
    let others = "loss-20-20-55 scans-5 scans-10 scans-20 scans-30 scans-60 scans-120 outage-1 \
         outage-10 outage-60 apart-3 apart-15 rare-spikes constant-2 constant-3 constant-16 dark-half";
    names.extend(others.split_whitespace().map(str::to_owned));
    for (bad, of) in [(1, 3), (2, 3), (3, 3), (1, 5), (3, 5), (5, 5)] {
        names.push(format!("bad-{bad}-of-{of}"));
    }
    names.extend([1, 8, 15, 16].map(|bad| format!("bad-{bad}-of-16")));
    names
}

/// Noise of one packet.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Noise {
    None,
    /// Plus or minus at most so many µs.
    Uniform(f64),
    /// Mean in µs.
    Exponential(f64),
    /// Standard deviation in µs.
    Gaussian(f64),
    /// One packet of 50 is 10 to 40 ms late.
    Outliers,
}

impl Noise {
    fn draw(self, rng: &mut StdRng) -> f64 {
        match self {
            Noise::None => 0.0,
            Noise::Uniform(most) => rng.random_range(-most..=most),
            Noise::Exponential(mean) => {
                let exp = Exp::new(1.0 / mean).expect("a positive mean");
                exp.sample(rng)
            }
            Noise::Gaussian(sd) => {
                let normal: f64 = StandardNormal.sample(rng);
                normal * sd
            }
            Noise::Outliers => match rng.random_bool(0.02) {
                true => rng.random_range(10e3..=40e3),
                false => 0.0,
            },
        }
    }
}

/// A time during which a path is slower, or dark.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Event {
    from_us: u64,
    until_us: u64,
    /// `None`: everything is lost.
    extra_us: Option<u32>,
}

/// One path.
#[derive(Clone, Debug, PartialEq)]
pub struct MadePath {
    base_us: f64,
    noise: Noise,
    /// Share of packets that are lost, besides events.
    loss: f64,
    /// In order of time; they do not overlap.
    events: Vec<Event>,
    seed: u64,
    index: u64,
}

impl MadePath {
    fn new(base_ms: f64) -> Self {
        let base_us = base_ms * 1e3;
        MadePath {
            base_us,
            noise: Noise::Uniform((base_us / 20.0).min(1000.0)),
            loss: 0.0,
            events: Vec::new(),
            seed: 0,
            index: 0,
        }
    }

    /// Delay without noise; `None`: dark.
    fn level_us(&self, at_us: u64) -> Option<f64> {
        let next = self.events.partition_point(|e| e.until_us <= at_us);
        match self.events.get(next).filter(|e| e.from_us <= at_us) {
            Some(event) => event.extra_us.map(|extra| self.base_us + f64::from(extra)),
            None => Some(self.base_us),
        }
    }

    /// What the `kind`-th sort of packet sent at a time meets; `None`: it is lost.
    pub fn draw(&self, at_us: u64, kind: u64) -> Option<u32> {
        let level = self.level_us(at_us)?;
        let mut rng = keyed([self.seed, self.index, at_us, kind]);
        if rng.random_bool(self.loss) {
            return None;
        }
        Some((level + self.noise.draw(&mut rng)).max(LEAST_US) as u32)
    }

    /// What who knows the path expects: a lost packet counts as the latest that is told apart.
    pub fn expected_us(&self, at_us: u64) -> u32 {
        let level = self.level_us(at_us).unwrap_or(f64::from(MOST_US));
        expected_us(level, self.loss)
    }
}

/// Makes `windows` windows of `length_us`. The same seed, the same paths.
///
/// # Errors
/// There is no such name.
pub fn make(name: &str, windows: u64, length_us: u64, seed: u64) -> Result<Input> {
    let one = |window: u64| match SCENARIOS.contains(&name) {
        true => scheduled(name, length_us, seed, window),
        false => {
            // Windows differ; so do the draws of their packets.
            let seed = StdRng::seed_from_u64(seed.wrapping_add(window)).random();
            let mut rng = StdRng::seed_from_u64(seed);
            let mut paths = paths(name, length_us, &mut rng)?;
            for (index, path) in (0..).zip(&mut paths) {
                (path.seed, path.index) = (seed, index);
            }
            Ok(paths.into_iter().map(PathTrace::Made).collect())
        }
    };
    let windows: Vec<Window> = (0..windows)
        .map(|window| {
            let paths = one(window)?;
            Ok(Window { length_us, paths })
        })
        .collect::<Result<_>>()
        .with_context(|| format!("{PREFIX}{name}"))?;
    let paths = windows.first().map_or(0, |w| w.paths.len());
    Ok(Input {
        name: format!("{PREFIX}{name}"),
        paths: (0..paths).map(|i| format!("path{i}")).collect(),
        windows,
    })
}

fn scheduled(name: &str, length_us: u64, seed: u64, window: u64) -> Result<Vec<PathTrace>> {
    let mut scenario = Scenario::find(name)?;
    scenario.seconds = length_us as f64 / 1e6;
    scenario.discard_seconds = 0.0;
    let schedule = Rc::new(Schedule::generate(&scenario, seed, window as u32));
    let traces = (0..schedule.paths()).map(|path| PathTrace::Scheduled(schedule.clone(), path));
    Ok(traces.collect())
}

fn paths(name: &str, length_us: u64, rng: &mut StdRng) -> Result<Vec<MadePath>> {
    let parts: Vec<&str> = name.split('-').collect();
    let two = |base_ms: f64| [MadePath::new(base_ms), MadePath::new(base_ms)];
    Ok(match parts[..] {
        ["noise", kind, base] => {
            let mut paths = two(number(base, 0.2..=2000.0)?);
            for path in &mut paths {
                (path.noise, path.loss) = noise(kind)?;
            }
            paths.into()
        }
        ["loss", percent, base] => loss(percent, base, "0")?,
        ["loss", percent, base, slower] => loss(percent, base, slower)?,
        ["scans", every] => {
            let every_us = number(every, 1.0..=600.0)? * 1e6;
            let mut paths = two(BASE_MS);
            paths[0].events = repeated(length_us, every_us as u64, 200_000, Some(60_000));
            paths.into()
        }
        ["outage", seconds] => {
            let long_us = (number(seconds, 0.1..=600.0)? * 1e6) as u64;
            let mut paths = two(BASE_MS);
            let from_us = length_us.saturating_sub(long_us) / 2;
            paths[0].events = vec![Event {
                from_us,
                until_us: from_us + long_us,
                extra_us: None,
            }];
            paths.into()
        }
        ["apart", ms] => {
            let slower = BASE_MS + number(ms, 0.1..=1000.0)?;
            vec![MadePath::new(BASE_MS), MadePath::new(slower)]
        }
        ["rare", "spikes"] => {
            let mut paths = two(BASE_MS);
            // Each path half as often as both together.
            for path in &mut paths {
                path.events = spikes(length_us, 60.0, [1.0, 4.0], [100.0, 400.0], rng);
            }
            paths.into()
        }
        ["bad", bad, "of", of] => {
            let of = number(of, 2.0..=16.0)? as usize;
            let bad = number(bad, 0.0..=of as f64)? as usize;
            let mut paths = vec![MadePath::new(BASE_MS); of];
            for path in paths.iter_mut().take(bad) {
                path.events = spikes(length_us, 3.0, [0.1, 0.6], [40.0, 200.0], rng);
            }
            paths
        }
        ["constant", of] => {
            let of = number(of, 2.0..=16.0)? as usize;
            let quiet = |i| MadePath {
                noise: Noise::None,
                ..MadePath::new(BASE_MS + f64::from(i))
            };
            (0..of as u32).map(quiet).collect()
        }
        ["dark", "half"] => {
            let mut dark = MadePath::new(5.0);
            dark.events = repeated(length_us, 4_000_000, 2_000_000, None);
            let [second, third] = two(60.0);
            vec![dark, second, third]
        }
        _ => anyhow::bail!("no such made-up input; {PREFIX}list shows them"),
    })
}

/// Noise and loss by name.
fn noise(kind: &str) -> Result<(Noise, f64)> {
    Ok(match kind {
        "exp3" => (Noise::Exponential(3000.0), 0.0),
        "exp8" => (Noise::Exponential(8000.0), 0.0),
        "gauss2" => (Noise::Gaussian(2000.0), 0.0),
        "outliers" => (Noise::Outliers, 0.0),
        "loss1" => (Noise::None, 0.01),
        _ => anyhow::bail!("no noise {kind:?}; there are {}", NOISES.join(", ")),
    })
}

fn loss(percent: &str, base: &str, slower: &str) -> Result<Vec<MadePath>> {
    let base = number(base, 0.2..=2000.0)?;
    let mut lossy = MadePath::new(base);
    lossy.loss = number(percent, 0.0..=100.0)? / 100.0;
    let clean = MadePath::new(base + number(slower, 0.0..=1000.0)?);
    Ok(vec![lossy, clean])
}

fn number(text: &str, range: std::ops::RangeInclusive<f64>) -> Result<f64> {
    let value = text.parse().with_context(|| format!("{text:?}"))?;
    let (least, most) = (range.start(), range.end());
    ensure!(range.contains(&value), "{text} is not in {least} to {most}");
    Ok(value)
}

/// The same event at the same distance again and again, from start to start.
fn repeated(length_us: u64, every_us: u64, long_us: u64, extra_us: Option<u32>) -> Vec<Event> {
    let starts = (every_us..length_us).step_by(every_us as usize);
    let event = |from_us| Event {
        from_us,
        until_us: from_us + long_us,
        extra_us,
    };
    starts.map(event).collect()
}

/// A Poisson process of spikes that do not overlap; ranges of length in s and height in ms.
fn spikes(
    length_us: u64,
    every_s: f64,
    length_s: [f64; 2],
    height_ms: [f64; 2],
    rng: &mut StdRng,
) -> Vec<Event> {
    let gap = Exp::new(1.0 / every_s).expect("a positive mean");
    let mut events = Vec::new();
    let mut now_us = 0;
    while now_us < length_us {
        let from_us = now_us + (gap.sample(rng) * 1e6) as u64;
        let long_us = rng.random_range(length_s[0]..=length_s[1]) * 1e6;
        let extra_us = rng.random_range(height_ms[0]..=height_ms[1]) * 1e3;
        now_us = from_us + long_us as u64;
        events.push(Event {
            from_us,
            until_us: now_us,
            extra_us: Some(extra_us as u32),
        });
    }
    events
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(name: &str) -> Window {
        make(name, 1, 200_000_000, 7).unwrap().windows.remove(0)
    }

    /// Mean and share lost of many packets on a path.
    fn packets(name: &str, path: usize) -> (f64, f64) {
        let window = made(name);
        let all: Vec<Option<u32>> = (0..20_000)
            .map(|i| window.paths[path].packet(i * 10_000))
            .collect();
        let answered: Vec<f64> = all.iter().flatten().map(|us| f64::from(*us)).collect();
        let lost = (all.len() - answered.len()) as f64 / all.len() as f64;
        (answered.iter().sum::<f64>() / answered.len() as f64, lost)
    }

    #[test]
    fn every_listed_input_can_be_made() {
        for name in all() {
            let window = make(&name, 1, 1_000_000, 1).unwrap().windows.remove(0);
            assert!((2..=16).contains(&window.paths.len()), "{name}");
        }
        for wrong in [
            "",
            "noise-exp3",
            "noise-odd-20",
            "loss-5-x",
            "bad-4-of-3",
            "bad-1-of-17",
        ] {
            assert!(make(wrong, 1, 1_000_000, 1).is_err(), "{wrong}");
        }
    }

    #[test]
    fn noise_is_drawn_for_each_packet_and_has_the_size_of_its_name() {
        let window = made("noise-exp3-20");
        let [a, b] = &window.paths[..] else { panic!() };
        assert_eq!(
            a.packet(5_000),
            a.packet(5_000),
            "the same for every policy"
        );
        assert_ne!(a.packet(5_000), a.packet(15_000));
        assert_ne!(a.packet(5_000), b.packet(5_000));
        assert_ne!(a.packet(5_000), a.probe(5_000), "a packet is no probe");
        let (mean, lost) = packets("noise-exp3-20", 0);
        assert!((mean - 23_000.0).abs() < 100.0 && lost == 0.0, "{mean}");
        let (mean, lost) = packets("noise-loss1-0.3", 1);
        assert!((mean - 300.0).abs() < 1.0, "{mean}");
        assert!((lost - 0.01).abs() < 0.003, "{lost}");
        let (mean, _) = packets("noise-outliers-20", 0);
        assert!((mean - 20_500.0).abs() < 100.0, "{mean}");
    }

    #[test]
    fn loss_outages_and_spikes_are_where_the_name_says() {
        assert!((packets("loss-30-60", 0).1 - 0.3).abs() < 0.02);
        assert_eq!(packets("loss-30-60", 1).1, 0.0);
        assert!((packets("outage-60", 0).1 - 0.3).abs() < 0.01);
        assert!((packets("dark-half", 0).1 - 0.5).abs() < 0.02);
        let late = |name: &str, path: usize| {
            let window = made(name);
            let packets = (0..20_000).map(|i| window.paths[path].packet(i * 10_000));
            packets.flatten().filter(|us| *us > 55_000).count() as f64 / 20_000.0
        };
        assert!((late("scans-10", 0) - 0.02).abs() < 0.002);
        assert_eq!(late("scans-10", 1), 0.0);
        assert!(late("bad-1-of-3", 0) > 0.05 && late("bad-1-of-3", 2) == 0.0);
        assert!(late("spiky", 0) > 0.05 && late("spiky", 1) == 0.0);
        let known = made("loss-20-20-55");
        assert!(known.paths[0].expected_us(0) > known.paths[1].expected_us(0));
    }
}
