// SPDX-License-Identifier: GPL-2.0-or-later
//! Who chooses paths during a replay: the policy, what it replaces, and what bounds it.

use std::collections::BTreeMap;

use anyhow::{bail, ensure, Result};
use mountain::steer::policy::{Event, PathInput, Policy};

use super::window::Window;
use crate::scenario::Bound;

/// A chooser by the name that the command line and results give it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ChooserKind {
    /// Every flow stays on the path that the kernel's hash gives it.
    Hash,
    /// All flows on one path.
    Only(usize),
    /// The best path at each instant, but for what it lacks.
    Oracle(Bound),
    /// Mountain's policy on paths that it may probe so often, in 1/s: [`METERED_HZ`] where they are metered, else
    /// [`MOST_HZ`].
    Mountain { hz: u32 },
}

impl ChooserKind {
    /// What is replayed when nothing is named, as `--policy` would name it.
    pub const DEFAULT: &str = "hash,path0,path1,oracle,late-60,banded-60-30,banded-100-30,mountain";

    /// # Errors
    /// There is no such chooser.
    pub fn parse(text: &str) -> Result<Self> {
        let parts = text.split(|c: char| !c.is_ascii_digit());
        let numbers: Vec<u64> = parts.filter_map(|part| part.parse().ok()).collect();
        let bound = |late_ms: u64, advantage_ms: u64| {
            ChooserKind::Oracle(Bound {
                late_us: late_ms as u32 * 1000,
                advantage_us: advantage_ms as u32 * 1000,
            })
        };
        let word = text.split(['-', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9']);
        Ok(match (word.clone().next(), &numbers[..]) {
            (Some("hash"), []) => ChooserKind::Hash,
            (Some("path"), [index]) if *index < 16 => ChooserKind::Only(*index as usize),
            (Some("oracle"), []) => bound(0, 0),
            (Some("late"), [ms]) if *ms <= 10_000 => bound(*ms, 0),
            (Some("banded"), [ms, advantage]) if *ms <= 10_000 && *advantage <= 10_000 => {
                bound(*ms, *advantage)
            }
            (Some("mountain"), [20]) => ChooserKind::Mountain { hz: METERED_HZ },
            (Some("mountain"), [] | [100]) => ChooserKind::Mountain { hz: MOST_HZ },
            _ => bail!(
                "there is no chooser {text:?}; there are hash, pathN, oracle, late-MS, \
                 banded-MS-ADVANTAGE, mountain, mountain-20, mountain-100"
            ),
        })
    }

    /// # Errors
    /// It is of a path that is not among so many.
    pub fn fit(self, paths: usize) -> Result<()> {
        let is_there = !matches!(self, ChooserKind::Only(index) if index >= paths);
        ensure!(is_there, "there are {paths} paths, from path0 on");
        Ok(())
    }

    /// A fresh one, which knows nothing.
    pub fn chooser(self, paths: usize, seed: u64) -> Chooser {
        let all = ((1u32 << paths) - 1) as u16;
        let fixed = |paths: u16| -> Chooser { Box::new(move |_: u64, _: &Window| (paths, 0)) };
        match self {
            ChooserKind::Hash => fixed(all),
            ChooserKind::Only(index) => fixed(all & 1 << index),
            ChooserKind::Oracle(bound) => {
                let mut chosen = 0;
                Box::new(move |now_us: u64, window: &Window| {
                    let known_us = now_us.saturating_sub(bound.late_us.into());
                    let expected_us = |path: usize| window.paths[path].expected_us(known_us);
                    let all = 0..window.paths.len();
                    let now = bound.choose(Some(chosen), all, expected_us);
                    chosen = now.unwrap_or(chosen);
                    (1u16 << chosen, 0)
                })
            }
            ChooserKind::Mountain { hz } => {
                let mut mountain = Mountain::new(paths, hz, seed);
                Box::new(move |now_us: u64, window: &Window| mountain.step(now_us, window))
            }
        }
    }
}

/// Chooses as time goes on. Told the time, which grows by 10 ms a call, it returns the paths that flows
/// may use, bit by bit (0 leaves them where the hash has them), and how many probes were sent so far.
pub type Chooser = Box<dyn FnMut(u64, &Window) -> (u16, u64)>;

/// How often the policy probes a metered path at most, and another one, in 1/s.
const METERED_HZ: u32 = 20;
const MOST_HZ: u32 = 100;
/// Rate of a thin flow, bit/s.
const THIN_BPS: f64 = 1e5;

/// The product's policy, with probes that meet what the recording holds.
struct Mountain {
    policy: Policy,
    /// Answers under way, by the time of their arrival and their number.
    flight: BTreeMap<(u64, u64), Event>,
    next_us: Vec<u64>,
    seq: u64,
}

impl Mountain {
    fn new(paths: usize, hz: u32, seed: u64) -> Self {
        let inputs = (0..paths).map(|i| PathInput {
            name: format!("path{i}"),
            metered: hz < MOST_HZ,
            ..PathInput::default()
        });
        Mountain {
            policy: Policy::new(vec![(0..paths).collect()], inputs.collect(), seed),
            flight: BTreeMap::new(),
            // Probes of different paths are not sent at the same moment.
            next_us: (0..paths as u64).map(|i| i * 10_000).collect(),
            seq: 0,
        }
    }

    fn step(&mut self, now_us: u64, window: &Window) -> (u16, u64) {
        while let Some(first) = self.flight.first_entry() {
            if first.key().0 > now_us {
                break;
            }
            self.policy.event(first.remove());
        }
        for path in 0..window.paths.len() {
            if now_us < self.next_us[path] {
                continue;
            }
            self.next_us[path] = now_us + self.policy.probe_interval_us(path);
            self.seq += 1;
            let seq = self.seq;
            self.policy.event(Event::Sent {
                path,
                seq,
                at_us: now_us,
            });
            if let Some(rtt_us) = window.paths[path].probe(now_us) {
                let at_us = now_us + u64::from(rtt_us);
                let answer = Event::Answered {
                    path,
                    seq,
                    at_us,
                    rtt_us,
                    delay_us: rtt_us,
                };
                self.flight.insert((at_us, seq), answer);
            }
        }
        self.policy.tick(now_us);
        let used = self.policy.current().groups[0].latency;
        // A thin flow on each path that is used, as the daemon counts it.
        for path in (0..window.paths.len()).filter(|path| used & 1 << path != 0) {
            self.policy.event(Event::Egress {
                path,
                at_us: now_us,
                rate_bps: THIN_BPS,
                latency_bps: THIN_BPS,
            });
        }
        (used, self.seq)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::ComparedPolicy;

    #[test]
    fn names_are_read_and_wrong_ones_refused() {
        for policy in [ComparedPolicy::Late60, ComparedPolicy::Banded100] {
            let kind = ChooserKind::parse(&policy.name()).unwrap();
            assert_eq!(kind, ChooserKind::Oracle(policy.bound().unwrap()));
        }
        assert_eq!(ChooserKind::parse("path1").unwrap(), ChooserKind::Only(1));
        for wrong in ["", "best", "late", "mountain-0", "mountain-50", "path16"] {
            assert!(ChooserKind::parse(wrong).is_err(), "{wrong}");
        }
        let [usual, fast] =
            ["mountain", "mountain-100"].map(|name| ChooserKind::parse(name).unwrap());
        assert_eq!(usual, fast);
        for name in ChooserKind::DEFAULT.split(',') {
            ChooserKind::parse(name).unwrap().fit(2).unwrap();
        }
        assert!(ChooserKind::parse("path2").unwrap().fit(2).is_err());
    }
}
