// SPDX-License-Identifier: GPL-2.0-or-later
//! The matrix of the bench: links, flows, and what is looked at in each cell.

use std::f64::consts::TAU;
use std::fmt;

use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, Exp, StandardNormal};
use rand_pcg::Pcg64Mcg;

use crate::emulate::bottleneck::{Back, LinkPlan};

const MBIT: f64 = 1e6;
/// Round trip of the empty link, µs.
pub const RTT_US: u32 = 40_000;
/// Before it no figure is taken: the flows have found their rate.
pub const WARM_UP_US: u64 = 3_000_000;
/// When the first flow begins.
pub const START_US: u64 = 100_000;
/// When the rate of a step changes.
pub const STEP_US: u64 = 6_000_000;
/// What a link in an outage still carries, Mbit/s: an emulated rate cannot be nothing.
const OUTAGE_MBIT: f64 = 0.01;

/// A link goes on for so long after a run: longer than the longest outage.
const AFTER_US: f64 = 4e6;

/// What kind of link and traffic.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CellKind {
    /// Mbit/s before and after [`STEP_US`]; a deep queue.
    Step(f64, f64),
    /// Mbit/s, queue in BDP, share of random loss.
    Steady(f64, f64, f64),
    /// Like a mobile link.
    Trace(RateTrace),
    /// The same with a queue of 4 BDP at 12 Mbit/s: what the rate's falls leave in it is lost in part.
    Short(RateTrace),
    /// One flow over it whose ACKs come back together, once in so many ms.
    TraceBursts(RateTrace, u32),
    /// So many flows alike over it.
    TraceAlike(RateTrace, u32),
    /// So many flows alike.
    Alike(u32),
    /// One flow that is there first, and one of this congestion control that comes 2 s later.
    Against(&'static str),
    /// The other way round: this congestion control is there first.
    Late(&'static str),
    /// Two flows alike, the second's round trip so many times as long.
    Ratio(u32),
    /// One flow whose ACKs come back together, once in so many ms.
    Bursts(u32),
    /// One flow that has only so many Mbit/s to send, in frames.
    Media(u32),
}

/// How the rate of a mobile link changes. Made up: their parameters are in
/// docs/experiments/congestion-control.md.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RateTrace {
    /// 4 to 24 Mbit/s and back in 8 s.
    Slow,
    /// Around 12 Mbit/s, another rate within a tenth of a second.
    Fast,
    /// Between 0.5 and 40 Mbit/s, another rate within half a second.
    Deep,
    /// 15 Mbit/s with outages of one to three seconds.
    Outage,
    /// 2 or 30 Mbit/s, each for 0.4 s in the mean.
    TwoStates,
    /// Another rate between 2 and 40 Mbit/s every one to three seconds.
    Walk,
}

/// In words, for `--list`.
impl fmt::Display for CellKind {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        use CellKind::*;
        match self {
            Step(before, after) => {
                write!(f, "{before} Mbit/s, then {after}; a deep queue")
            }
            Steady(mbit, bdps, loss) => {
                write!(f, "{mbit} Mbit/s, a queue of {bdps} BDP")?;
                match *loss > 0.0 {
                    true => write!(f, ", {} % lost at random", loss * 100.0),
                    false => Ok(()),
                }
            }
            Trace(trace) => write!(f, "{trace}; a deep queue"),
            Short(trace) => write!(f, "{trace}; a short queue"),
            TraceBursts(trace, ms) => write!(f, "{}; {}", Trace(*trace), Bursts(*ms)),
            TraceAlike(trace, flows) => {
                write!(f, "{}; {}", Trace(*trace), Alike(*flows))
            }
            Alike(flows) => write!(f, "{flows} flows alike"),
            Against(cc) => write!(f, "one flow, and one of {cc} that comes 2 s later"),
            Late(cc) => write!(f, "one flow that comes 2 s after one of {cc}"),
            Ratio(times) => write!(f, "two flows, one with {times} times the round trip"),
            Bursts(ms) => write!(f, "ACKs come back together, every {ms} ms"),
            Media(mbit) => {
                write!(f, "an application that sends {mbit} Mbit/s, in frames")
            }
        }
    }
}

impl fmt::Display for RateTrace {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            RateTrace::Slow => "4 to 24 Mbit/s and back in 8 s",
            RateTrace::Fast => "around 12 Mbit/s, another rate within a tenth of a second",
            RateTrace::Deep => "0.5 to 40 Mbit/s, another rate within half a second",
            RateTrace::Outage => "15 Mbit/s with outages of one to three seconds",
            RateTrace::TwoStates => "2 or 30 Mbit/s, each for 0.4 s in the mean",
            RateTrace::Walk => "2 to 40 Mbit/s, another rate every one to three seconds",
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cell {
    pub name: &'static str,
    pub kind: CellKind,
    /// Part of `--quick`.
    pub quick: bool,
}

/// Every cell, in the order of the table.
pub const CELLS: [Cell; 31] = {
    use CellKind::*;
    use RateTrace::*;
    const fn cell(name: &'static str, kind: CellKind, quick: bool) -> Cell {
        Cell { name, kind, quick }
    }
    [
        cell("step-50-10", Step(50.0, 10.0), true),
        cell("step-40-8", Step(40.0, 8.0), false),
        cell("step-10-50", Step(10.0, 50.0), true),
        cell("steady-quarter-bdp", Steady(20.0, 0.25, 0.0), false),
        cell("steady-1-bdp", Steady(20.0, 1.0, 0.0), true),
        cell("steady-4-bdp", Steady(20.0, 4.0, 0.0), true),
        cell("steady-16-bdp", Steady(20.0, 16.0, 0.0), false),
        cell("slow", Trace(Slow), true),
        cell("fast", Trace(Fast), true),
        cell("deep", Trace(Deep), true),
        cell("outage", Trace(Outage), true),
        cell("two-states", Trace(TwoStates), true),
        cell("walk", Trace(Walk), true),
        cell("deep-short", Short(Deep), false),
        cell("two-states-short", Short(TwoStates), false),
        cell("deep-bursts-10", TraceBursts(Deep, 10), false),
        cell("deep-flows-4", TraceAlike(Deep, 4), false),
        cell("flows-2", Alike(2), false),
        cell("flows-4", Alike(4), true),
        cell("flows-16", Alike(16), false),
        cell("against-cubic", Against("cubic"), true),
        cell("against-bbr", Against("bbr"), true),
        cell("late-to-cubic", Late("cubic"), false),
        cell("late-to-bbr", Late("bbr"), false),
        cell("rtt-1-to-2", Ratio(2), false),
        cell("rtt-1-to-8", Ratio(8), false),
        cell("ack-bursts-10", Bursts(10), false),
        cell("ack-bursts-30", Bursts(30), false),
        cell("media-4", Media(4), false),
        cell("loss-1", Steady(20.0, 4.0, 0.01), true),
        cell("loss-2", Steady(20.0, 4.0, 0.02), false),
    ]
};

impl Cell {
    pub fn find(name: &str) -> Option<Cell> {
        CELLS.into_iter().find(|c| c.name == name)
    }

    /// Length of a run, µs.
    pub fn length_us(&self, quick: bool) -> u64 {
        match (self.kind, quick) {
            (CellKind::Step(..), _) => 12_000_000,
            (_, true) => 13_000_000,
            (_, false) => 33_000_000,
        }
    }

    /// The link, the same for everybody in a repeat.
    pub fn plan(&self, seed: u64, length_us: u64) -> LinkPlan {
        use CellKind::*;
        let mut rng = Pcg64Mcg::seed_from_u64(seed);
        let bdp = |mbit: f64| mbit * MBIT / 8.0 * f64::from(RTT_US) / 1e6;
        let bits = |mbit: f64| (mbit * MBIT) as u64;
        let (rates, queue_bytes, loss) = match self.kind {
            // 2,000 packets, as deep as the buffers of mobile networks.
            Step(a, b) => (vec![(0, bits(a)), (STEP_US, bits(b))], 3e6, 0.0),
            Steady(mbit, bdps, loss) => {
                let queue = (bdp(mbit) * bdps).max(6_000.0);
                (vec![(0, bits(mbit))], queue, loss)
            }
            Trace(trace) | TraceBursts(trace, _) | TraceAlike(trace, _) => {
                (trace.rates(length_us, &mut rng), 3e6, 0.0)
            }
            Short(trace) => {
                let rates = trace.rates(length_us, &mut rng);
                (rates, 4.0 * bdp(12.0), 0.0)
            }
            Alike(_) | Against(_) | Late(_) | Ratio(_) | Bursts(_) | Media(_) => {
                (vec![(0, bits(20.0))], 4.0 * bdp(20.0), 0.0)
            }
        };
        let mut back = Back::default();
        match self.kind {
            Ratio(times) => back.far_us = (times - 1) * RTT_US,
            Bursts(ms) | TraceBursts(_, ms) => back.burst_us = ms * 1_000,
            _ => {}
        }
        LinkPlan {
            rates,
            rtt_us: RTT_US,
            queue_bytes: queue_bytes as u64,
            loss,
            seed,
            back,
        }
    }
}

impl RateTrace {
    fn rates(self, length_us: u64, rng: &mut Pcg64Mcg) -> Vec<(u64, u64)> {
        // What waits at the end of a run is known by what comes then: an outage ends as all others do.
        let end = length_us as f64 + AFTER_US;
        // An AR(1) process of variance 1, `memory` µs long, looked at every 20 ms.
        let mut level: f64 = rng.sample(StandardNormal);
        let mut drift = |memory: f64, rng: &mut Pcg64Mcg| {
            let keep = (-20_000.0 / memory).exp();
            let noise: f64 = rng.sample(StandardNormal);
            level = keep * level + (1.0 - keep * keep).sqrt() * noise;
            level
        };
        let phase = match self {
            RateTrace::Slow => rng.random_range(0.0..TAU),
            _ => 0.0,
        };
        let mut outage = match self {
            RateTrace::Outage => 4e6..4e6 + rng.random_range(1e6..3e6),
            _ => 0.0..0.0,
        };
        let stays = Exp::new(1.0 / 400_000.0).expect("a rate above 0");
        let (mut rates, mut t, mut fast) = (Vec::new(), 0.0, false);
        while t < end {
            let mut holds = 20_000.0;
            let mbit = match self {
                // Around the geometric mean of 4 and 24.
                RateTrace::Slow => 96f64.sqrt() * 6f64.powf((phase + t / 8e6 * TAU).sin() / 2.0),
                RateTrace::Fast => (12.0 * (0.6 * drift(100_000.0, rng)).exp()).clamp(0.5, 40.0),
                RateTrace::Deep => (8.0 * (1.1 * drift(500_000.0, rng)).exp()).clamp(0.5, 40.0),
                RateTrace::Outage => {
                    if t >= outage.end {
                        let from = t + rng.random_range(2e6..5e6);
                        outage = from..from + rng.random_range(1e6..3e6);
                    }
                    let mbit = 15.0 * (0.2 * drift(500_000.0, rng)).exp();
                    if outage.contains(&t) {
                        OUTAGE_MBIT
                    } else {
                        mbit
                    }
                }
                RateTrace::TwoStates => {
                    fast = !fast;
                    holds = f64::max(stays.sample(rng), 20_000.0);
                    if fast {
                        30.0
                    } else {
                        2.0
                    }
                }
                RateTrace::Walk => {
                    let mbit = 2.0 * 20f64.powf(rng.random_range(0.0..1.0));
                    holds = rng.random_range(1e6..3e6);
                    mbit
                }
            };
            rates.push((t as u64, (mbit * MBIT) as u64));
            t += holds;
        }
        rates
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traces_are_seeded_and_within_their_bounds() {
        for cell in CELLS {
            let plan = cell.plan(7, 30_000_000);
            assert_eq!(plan, cell.plan(7, 30_000_000), "{}", cell.name);
            assert_eq!(plan.rates[0].0, 0, "{}", cell.name);
            assert!(plan.rates.is_sorted_by_key(|r| r.0), "{}", cell.name);
            let (low, high) = match cell.kind {
                CellKind::Trace(RateTrace::Outage) => (10_000, 40_000_000),
                _ => (500_000, 50_000_000),
            };
            for (_, rate) in &plan.rates {
                assert!((low..=high).contains(rate), "{}: {rate}", cell.name);
            }
            if let CellKind::Trace(_) | CellKind::Short(_) | CellKind::TraceAlike(..) = cell.kind {
                assert_ne!(plan.rates, cell.plan(8, 30_000_000).rates, "{}", cell.name);
            }
        }
    }

    #[test]
    fn an_outage_at_the_end_of_a_run_ends() {
        let cell = Cell::find("outage").unwrap();
        let end = 13_000_000;
        for seed in 0..100 {
            let rates = cell.plan(seed, end).rates;
            let mut after = rates
                .iter()
                .filter(|(t, _)| (end..end + 3_100_000).contains(t));
            assert!(after.any(|(_, bps)| *bps > 1_000_000), "seed {seed}");
        }
    }

    #[test]
    fn names_are_unique() {
        for cell in CELLS {
            assert_eq!(Cell::find(cell.name), Some(cell));
        }
        assert_eq!(Cell::find("nonesuch"), None);
    }
}
