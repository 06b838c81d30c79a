// SPDX-License-Identifier: GPL-2.0-or-later
//! When a path is left, and when it may be used again.
//!
//! A probe is *beyond* when its delay exceeds the threshold (the best path's ordinary delay plus
//! the band), or, unanswered, as soon as its age does. Being beyond is computed from the probes
//! each time, not stored: a late answer that shows a fine delay changes the past by itself.

use rand::{Rng, RngExt};
use serde::Serialize;

use super::window::{Fate, Window};

/// A path must have been good this long before being bad again counts as another flap.
const EPISODE_GAP_US: u64 = 1_000_000;
/// How long a step of the delay is remembered: a path beside a loaded one may be found late only
/// when its own queue has grown on top of the step.
const STEP_US: u64 = 1_500_000;

/// Why a path was left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Cause {
    /// Too many of the latest probes were beyond.
    Late,
    /// Too many probes in a row were lost.
    Lost,
    /// Carrier, neighbour or next hop gone.
    Link,
    /// It costs more than the best path plus the band.
    Cost,
}

/// The latest probes of a path, judged against a threshold.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Evidence {
    /// Newest first: delay, or age while unanswered; `None`: lost.
    pub latest_us: Vec<Option<u64>>,
    /// Numbers of those that are beyond, newest first.
    pub beyond: Vec<u64>,
    /// Whether the newest probe that says anything is beyond: a path is not left for what is over.
    pub newest_beyond: bool,
    /// Rise from the largest of the three probes before the oldest beyond one to that one.
    pub jump_us: u64,
    /// When the oldest beyond one was sent.
    pub onset_us: Option<u64>,
}

/// Judges the `of` latest probes that say anything: with `judge_age`, unanswered ones older than
/// the threshold do.
pub fn evidence(
    w: &Window,
    now_us: u64,
    threshold_us: f64,
    of: usize,
    judge_age: bool,
) -> Evidence {
    let excess = w.excess_us();
    let mut e = Evidence::default();
    let mut before: Vec<u64> = Vec::new();
    let mut first = 0;
    for p in w.newest() {
        let age = now_us.saturating_sub(p.sent_us);
        let (seen, value) = match p.fate {
            Fate::Answered { delay_us, .. } => (Some(u64::from(delay_us)), u64::from(delay_us)),
            Fate::Lost { .. } => (None, age),
            Fate::Pending if judge_age && age.saturating_sub(excess) as f64 > threshold_us => {
                (Some(age), age - excess)
            }
            Fate::Pending => continue,
        };
        if e.latest_us.len() < of {
            e.latest_us.push(seen);
            if seen.is_none() || value as f64 > threshold_us {
                e.newest_beyond |= e.latest_us.len() == 1;
                e.beyond.push(p.seq);
                e.onset_us = Some(p.sent_us);
                first = value;
                before.clear();
                continue;
            }
        } else if before.len() >= 3 || e.beyond.is_empty() {
            break;
        }
        before.push(value);
    }
    before.truncate(3);
    if let Some(max) = before.iter().max() {
        e.jump_us = first.saturating_sub(*max);
    }
    e
}

/// The largest rise that came from one probe to the next and stayed, in the last second and a half:
/// from the largest of three probes in a row to the smallest of the next three.
pub fn step_us(w: &Window, now_us: u64) -> u64 {
    let latest: Vec<u64> = w.between(now_us.saturating_sub(STEP_US), now_us).collect();
    latest
        .windows(6)
        .map(|six| {
            let after = six[..3].iter().min().copied().unwrap_or(0);
            after.saturating_sub(six[3..].iter().max().copied().unwrap_or(u64::MAX))
        })
        .max()
        .unwrap_or(0)
}

/// Hold times that double.
#[derive(Clone, Debug)]
pub struct Hold {
    min_us: u64,
    max_us: u64,
    spread: f64,
    /// Number of doublings; `None` before the first ejection.
    level: Option<u32>,
    last_bad_us: u64,
}

impl Hold {
    /// `spread`: random part added, as a share of the hold.
    pub fn new((min_us, max_us): (u64, u64), spread: f64) -> Self {
        Hold {
            min_us,
            max_us,
            spread,
            level: None,
            last_bad_us: 0,
        }
    }

    /// Doublings in force.
    pub fn flaps(&self) -> u32 {
        self.level.map_or(0, |l| l + 1)
    }

    /// Doublings in force at `now_us`, less what good behaviour has taken back: 0 for a path
    /// without a bad name.
    pub fn flaps_at(&self, now_us: u64) -> u32 {
        let forgotten = now_us.saturating_sub(self.last_bad_us) / self.max_us.max(1);
        self.flaps()
            .saturating_sub(u32::try_from(forgotten).unwrap_or(u32::MAX))
    }

    /// Notes that the path is bad: good behaviour counts from here.
    pub fn bad(&mut self, now_us: u64) {
        self.last_bad_us = now_us;
    }

    /// The hold of a flap at `now_us`, without the random part: doubled, and halved for each
    /// longest hold that went by well.
    pub fn flap(&mut self, now_us: u64) -> u64 {
        let forgotten = now_us.saturating_sub(self.last_bad_us) / self.max_us.max(1);
        let most = (self.max_us as f64 / self.min_us.max(1) as f64)
            .log2()
            .ceil()
            .max(0.0) as u32;
        let level = match self.level {
            None => 0,
            Some(l) => (l + 1).saturating_sub(u32::try_from(forgotten).unwrap_or(u32::MAX)),
        };
        self.level = Some(level.min(most));
        self.bad(now_us);
        self.min_us
            .saturating_mul(1 << level.min(most))
            .min(self.max_us)
    }

    /// `hold_us` with the random part.
    pub fn spread(&self, hold_us: u64, rng: &mut impl Rng) -> u64 {
        hold_us + (hold_us as f64 * self.spread * rng.random::<f64>()) as u64
    }
}

/// A path that was left.
#[derive(Clone, Debug)]
pub struct Out {
    pub cause: Cause,
    pub since_us: u64,
    pub hold_us: u64,
    /// Since when it has been good again.
    pub good_since_us: Option<u64>,
    /// The probes that spoke against it, the threshold then, and the hold before: what it takes
    /// to take the ejection back.
    pub against: Vec<u64>,
    pub threshold_us: f64,
    pub hold_before: Hold,
}

impl Out {
    /// Notes whether the path is good or bad now; a new bad episode counts as a flap.
    pub fn observe(&mut self, now_us: u64, good: bool, hold: &mut Hold, rng: &mut impl Rng) {
        if good {
            self.good_since_us.get_or_insert(now_us);
            return;
        }
        if self
            .good_since_us
            .take()
            .is_some_and(|t| now_us >= t + EPISODE_GAP_US)
        {
            let next = hold.flap(now_us);
            self.hold_us = hold.spread(next, rng);
        }
        hold.bad(now_us);
    }

    /// How long the path must stay good yet; `None` while it is bad.
    pub fn remaining_us(&self, now_us: u64) -> Option<u64> {
        self.good_since_us
            .map(|t| (t + self.hold_us).saturating_sub(now_us))
    }

    /// Whether late answers have taken away what spoke against the path: fewer than `count` of
    /// those probes still do, and at least one no longer does.
    pub fn refuted(&self, w: &Window, count: usize) -> bool {
        let fine = self
            .against
            .iter()
            .filter(|seq| match w.get(**seq).map(|p| p.fate) {
                Some(Fate::Answered { delay_us, .. }) => f64::from(delay_us) <= self.threshold_us,
                _ => false,
            })
            .count();
        fine > 0 && self.against.len() - fine < count.min(self.against.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::StdRng;
    use rand::SeedableRng;

    const S: u64 = 1_000_000;

    fn hold() -> Hold {
        Hold::new((3 * S, 60 * S), 0.0)
    }

    #[test]
    fn holds_double_to_the_longest_and_are_forgotten() {
        let mut h = hold();
        let mut now = 100 * S;
        let holds: Vec<u64> = (0..7)
            .map(|_| {
                now += 5 * S;
                h.flap(now) / S
            })
            .collect();
        assert_eq!(holds, [3, 6, 12, 24, 48, 60, 60]);
        assert_eq!(
            h.flap(now + 61 * S) / S,
            60,
            "one minute takes back the doubling"
        );
        let mut h2 = h.clone();
        assert_eq!(
            h.flap(now + 61 * S + 190 * S) / S,
            24,
            "three minutes take three"
        );
        assert_eq!(h2.flap(now + 61 * S + 3600 * S) / S, 3, "an hour, all");
    }

    #[test]
    fn a_new_bad_episode_while_held_is_a_flap_and_a_blink_is_not() {
        let mut rng = StdRng::seed_from_u64(1);
        let mut h = hold();
        let mut out = Out {
            cause: Cause::Late,
            since_us: 0,
            hold_us: h.flap(0),
            good_since_us: None,
            against: vec![],
            threshold_us: 0.0,
            hold_before: hold(),
        };
        out.observe(S, true, &mut h, &mut rng);
        assert_eq!(out.remaining_us(2 * S), Some(2 * S));
        out.observe(S + S / 2, false, &mut h, &mut rng);
        assert_eq!(
            (out.remaining_us(2 * S), out.hold_us),
            (None, 3 * S),
            "good for half a second"
        );
        out.observe(2 * S, true, &mut h, &mut rng);
        out.observe(4 * S, false, &mut h, &mut rng);
        assert_eq!(out.hold_us, 6 * S);
    }

    #[test]
    fn random_part_stays_within_its_share() {
        let mut rng = StdRng::seed_from_u64(2);
        let h = Hold::new((3 * S, 60 * S), 0.25);
        let all: Vec<u64> = (0..1000).map(|_| h.spread(4 * S, &mut rng)).collect();
        assert!(all.iter().all(|d| (4 * S..=5 * S).contains(d)));
        assert!(
            all.iter().min() < Some(&(4 * S + S / 20))
                && all.iter().max() > Some(&(5 * S - S / 20))
        );
    }

    fn window(delays: &[u32]) -> (Window, u64) {
        let mut w = Window::new(10 * S, 2 * S, 60_000);
        for (i, d) in delays.iter().enumerate() {
            w.sent(i as u64, i as u64 * 50_000);
            w.answered(i as u64, *d, *d);
        }
        (w, delays.len() as u64 * 50_000)
    }

    #[test]
    fn evidence_counts_answers_ages_and_losses() {
        let (mut w, now) = window(&[20_000; 10]);
        w.sent(100, now);
        w.sent(101, now + 50_000);
        w.failed(102, now + 51_000);
        let at = now + 60_000;
        let e = evidence(&w, at, 24_000.0, 6, true);
        assert_eq!(e.beyond, [102, 100], "the second is only 10 ms old");
        assert_eq!(&e.latest_us[..3], [None, Some(60_000), Some(20_000)]);
        assert_eq!((e.onset_us, e.jump_us), (Some(now), 40_000));
        assert!(e.newest_beyond);
        assert!(
            !evidence(&window(&[20_000, 90_000, 20_000]).0, at, 24_000.0, 6, true).newest_beyond
        );
        assert_eq!(
            evidence(&w, at, 24_000.0, 6, false).beyond,
            [102],
            "ages in doubt"
        );
        w.answered(100, 61_000, 21_000);
        assert_eq!(
            evidence(&w, at, 24_000.0, 6, true).beyond,
            [102],
            "late, but fine"
        );
    }

    #[test]
    fn a_ramp_is_no_jump() {
        let ramp: Vec<u32> = (0..12).map(|i| 20_000 + i * 1000).collect();
        let (w, now) = window(&ramp);
        let e = evidence(&w, now, 28_500.0, 6, true);
        assert_eq!((e.beyond.len(), e.jump_us), (3, 1000));
        assert_eq!(step_us(&w, now), 1000);
        let (w, now) = window(&[
            20_000, 21_000, 22_000, 20_000, 21_000, 52_000, 50_000, 51_000,
        ]);
        let e = evidence(&w, now, 28_500.0, 6, true);
        assert_eq!((e.beyond.len(), e.jump_us), (3, 30_000));
        assert_eq!(step_us(&w, now), 28_000);
    }
}
