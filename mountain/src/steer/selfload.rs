// SPDX-License-Identifier: GPL-2.0-or-later
//! Is a path's delay our own doing?
//!
//! When a path turns bad, thin flows leave in any case. Bulk flows should leave only when the
//! cause is foreign: a queue that they fill themselves would follow them to the next path. The
//! judge looks at our own egress rate (about every 100 ms) around the onset:
//!
//! 1. *foreign* when we send less than 0.7 of what the path can carry (the configured capacity,
//!    else the highest mean over 2 s of the last minute), or less than 2 Mbit/s on a path of
//!    unknown capacity: too little to fill a queue;
//! 2. *foreign* when our rate fell below 0.7 of what it was while the delay rose: a rising RTT
//!    starves senders that wait for acknowledgements, and whoever shares the bottleneck takes our
//!    place in it; a queue of our own comes with a rate that stays;
//! 3. *own* when the rate rose by a fifth or more: new load of ours;
//! 4. at a steady high rate: *foreign* when the delay jumped from one probe to the next (a queue
//!    grows no faster than the excess of our rate, and there is none), *own* when it crept up.
//!
//! An *own* verdict is looked at again: it turns *foreign* when our rate has stayed below 0.6 of
//! the reference for a second while the path is still bad, or when the delay jumps again.
//!
//! Limits: a foreign load that builds up slowly under a bulk flow which fills the path anyway
//! looks like the flow's own queue until the flow has lost 40% of its rate; without a configured
//! capacity, constant traffic above 2 Mbit/s counts as filling the path.

use std::collections::VecDeque;

use serde::Serialize;

/// Share of the reference rate from which our traffic can fill the path.
const FILLS: f64 = 0.7;
/// Share of its former value below which our rate counts as fallen.
const FELL: f64 = 0.7;
/// Factor over its former value from which it counts as risen.
const ROSE: f64 = 1.2;
/// Share of the reference below which an *own* verdict is withdrawn.
const WITHDRAW: f64 = 0.6;
/// Without a capacity hint less than this fills nothing.
const FLOOR_BPS: f64 = 2e6;
/// Memory for rates.
const RATES_US: u64 = 10_000_000;
/// Memory for the highest mean rate, in 2 s steps.
const PEAK_STEP_US: u64 = 2_000_000;
const PEAK_STEPS: usize = 30;

/// The ground on which a young *foreign* verdict may still become *own*.
const RATE_ROSE: &str = "our own rate rose with the delay";

/// The ground on which a *foreign* verdict is open to that.
const RATE_LOW: &str = "our own rate is too low to fill the path";

/// Who fills the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Load {
    Own,
    Foreign,
}

/// A verdict with what it rests on.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Judgement {
    pub load: Load,
    pub rate_bps: f64,
    pub reference_bps: f64,
    pub why: &'static str,
}

impl Judgement {
    /// Whether it is our own rate that rose: new load of ours.
    pub fn is_new_load(&self) -> bool {
        self.why == RATE_ROSE
    }

    /// Whether it was our rate alone that spoke for foreign load: it may be on its way up. What
    /// jumped or took our place stays foreign, whatever our rate does afterwards.
    pub fn is_low_rate(&self) -> bool {
        self.why == RATE_LOW
    }
}

/// Our own rates on one path.
#[derive(Clone, Debug, Default)]
pub struct SelfLoad {
    capacity_bps: Option<f64>,
    rates: VecDeque<(u64, f64)>,
    peaks: VecDeque<f64>,
    next_peak_us: u64,
    low_since_us: Option<u64>,
}

impl SelfLoad {
    pub fn new(capacity_bps: Option<u64>) -> Self {
        SelfLoad {
            capacity_bps: capacity_bps.map(|c| c as f64),
            ..Default::default()
        }
    }

    /// Notes our own egress rate on the path.
    pub fn egress(&mut self, at_us: u64, rate_bps: f64) {
        self.rates.push_back((at_us, rate_bps));
        while self.rates.front().is_some_and(|r| r.0 + RATES_US < at_us) {
            self.rates.pop_front();
        }
        if at_us >= self.next_peak_us {
            self.next_peak_us = at_us + PEAK_STEP_US;
            self.peaks
                .push_back(self.mean(at_us.saturating_sub(PEAK_STEP_US), at_us + 1));
            if self.peaks.len() > PEAK_STEPS {
                self.peaks.pop_front();
            }
        }
        let low = self.mean(at_us.saturating_sub(1_000_000), at_us + 1)
            < WITHDRAW * self.reference_bps(at_us);
        self.low_since_us = low.then(|| self.low_since_us.unwrap_or(at_us));
    }

    /// Mean rate in `from_us..to_us`; 0 when nothing is known of that time.
    pub fn mean(&self, from_us: u64, to_us: u64) -> f64 {
        let (sum, n) = self
            .rates
            .iter()
            .filter(|r| (from_us..to_us).contains(&r.0))
            .fold((0.0, 0), |(s, n), r| (s + r.1, n + 1));
        if n == 0 {
            0.0
        } else {
            sum / f64::from(n)
        }
    }

    /// What the path can carry: the hint, else the highest mean over 2 s seen in a minute.
    fn reference_bps(&self, now_us: u64) -> f64 {
        self.capacity_bps.unwrap_or_else(|| {
            let current = self.mean(now_us.saturating_sub(PEAK_STEP_US), now_us + 1);
            self.peaks.iter().copied().fold(current, f64::max)
        })
    }

    /// Who made the delay that began to rise at `onset_us`; `jumped` when it did so from one
    /// probe to the next.
    pub fn judge(&self, now_us: u64, onset_us: u64, jumped: bool) -> Judgement {
        // Newest two or three reports, and the second and a half before the onset.
        let rate = self.mean(now_us.saturating_sub(250_000), now_us + 1);
        let before = self.mean(
            onset_us.saturating_sub(3_000_000),
            onset_us.saturating_sub(1_000_000),
        );
        let around = self.mean(onset_us.saturating_sub(1_000_000), onset_us);
        let reference = self.reference_bps(now_us);
        let floor = if self.capacity_bps.is_some() {
            0.0
        } else {
            FLOOR_BPS
        };
        let (load, why) = if rate.max(around) < FILLS * reference || rate.max(around) < floor {
            (Load::Foreign, RATE_LOW)
        } else if rate < FELL * around {
            (Load::Foreign, "our own rate fell while the delay rose")
        } else if rate.max(around) >= ROSE * before {
            (Load::Own, RATE_ROSE)
        } else if jumped {
            (Load::Foreign, "the delay jumped at a steady rate of ours")
        } else {
            (Load::Own, "our own rate fills the path")
        };
        Judgement {
            load,
            rate_bps: rate,
            reference_bps: reference,
            why,
        }
    }

    /// Whether an *own* verdict of `own_for_us` ago still holds; `jumped` when the delay leapt since.
    pub fn review(&self, now_us: u64, own_for_us: u64, jumped: bool) -> Option<Judgement> {
        let rate = self.mean(now_us.saturating_sub(1_000_000), now_us + 1);
        let low_for_us = self.low_since_us.map_or(0, |t| now_us - t).min(own_for_us);
        let why = if low_for_us >= 1_000_000 {
            "our own rate fell and the delay stayed"
        } else if jumped {
            "the delay jumped beyond what our own load had made"
        } else {
            return None;
        };
        let reference_bps = self.reference_bps(now_us);
        Some(Judgement {
            load: Load::Foreign,
            rate_bps: rate,
            reference_bps,
            why,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000;

    /// Feeds a rate (Mbit/s) every 100 ms from `from` to `to`.
    fn feed(s: &mut SelfLoad, from: u64, to: u64, mbit: f64) {
        for t in (from..to).step_by(100_000) {
            s.egress(t, mbit * 1e6);
        }
    }

    #[test]
    fn a_bulk_flow_that_starts_is_our_own() {
        for hint in [None, Some(30_000_000)] {
            let mut s = SelfLoad::new(hint);
            feed(&mut s, 0, 10 * S, 1.5);
            feed(&mut s, 10 * S, 11 * S, 30.0);
            let j = s.judge(11 * S, 10 * S + 500_000, true);
            assert_eq!(j.load, Load::Own, "{j:?}");
        }
    }

    #[test]
    fn a_queue_that_creeps_up_at_full_rate_is_our_own_and_a_jump_is_not() {
        let mut s = SelfLoad::new(None);
        feed(&mut s, 0, 20 * S, 29.0);
        assert_eq!(s.judge(20 * S, 20 * S - 150_000, false).load, Load::Own);
        assert_eq!(s.judge(20 * S, 20 * S - 150_000, true).load, Load::Foreign);
    }

    #[test]
    fn little_traffic_of_ours_means_foreign_load() {
        for hint in [None, Some(30_000_000)] {
            let mut s = SelfLoad::new(hint);
            feed(&mut s, 0, 20 * S, 1.5);
            assert_eq!(s.judge(20 * S, 20 * S - 150_000, false).load, Load::Foreign);
        }
        assert_eq!(
            SelfLoad::new(None).judge(S, S, false).load,
            Load::Foreign,
            "no rates known"
        );
    }

    #[test]
    fn a_rate_that_falls_as_the_delay_rises_means_foreign_load() {
        let mut s = SelfLoad::new(None);
        feed(&mut s, 0, 10 * S, 29.0);
        feed(&mut s, 10 * S, 10 * S + 300_000, 8.0);
        let j = s.judge(10 * S + 250_000, 10 * S, false);
        assert_eq!(
            (j.load, j.why),
            (Load::Foreign, "our own rate fell while the delay rose")
        );
    }

    #[test]
    fn own_turns_foreign_when_our_share_is_taken() {
        let mut s = SelfLoad::new(None);
        feed(&mut s, 0, 10 * S, 29.0);
        assert_eq!(s.review(10 * S, S, false), None);
        feed(&mut s, 10 * S, 14 * S, 12.0);
        assert_eq!(
            s.review(10 * S + 900_000, 2 * S, false),
            None,
            "not before a second of it"
        );
        assert_eq!(
            s.review(14 * S, S / 2, false),
            None,
            "nor what was before the verdict"
        );
        assert_eq!(
            s.review(14 * S, 5 * S, false).map(|j| j.load),
            Some(Load::Foreign)
        );
        let mut steady = SelfLoad::new(None);
        feed(&mut steady, 0, 14 * S, 29.0);
        assert_eq!(steady.review(14 * S, 5 * S, false), None);
        assert_eq!(
            steady.review(14 * S, 5 * S, true).map(|j| j.load),
            Some(Load::Foreign)
        );
    }
}
