// SPDX-License-Identifier: GPL-2.0-or-later
//! What is known of one path: its newest probes, and figures over them.
//!
//! Nothing is remembered but the probes, so a late answer changes the past by itself, and the order in
//! which events arrive does not matter. A probe weighs as much as the time since the one before it: a path
//! that is probed more often for a while is not judged by that while alone.

use std::collections::VecDeque;

use super::pace::{FAST_US, IDLE_US};

/// How far back probes count, µs. Of a path that is probed seldom, [`LEAST_ANSWERS`] count, however old.
pub(crate) const WINDOW_US: u64 = 10_000_000;
/// Answers from which on a path can be compared with others.
pub(crate) const LEAST_ANSWERS: usize = 20;
/// Most probes of one path: [`WINDOW_US`] of the fastest pace.
const MOST_PROBES: usize = (WINDOW_US / FAST_US) as usize;
/// Time in which the weight of a probe halves in the mean, µs.
const MEAN_US: f64 = 1e6;
/// ... in the share of losses, µs.
const LOSS_US: f64 = 4e6;
/// A packet that is this late is as good as lost, µs: a lost probe is older than this, ...
pub(crate) const LATE_US: u64 = 100_000;
/// ... and than so many times the usual delay.
const LOST_TIMES: f64 = 1.5;
/// Standard deviations that count besides the mean.
const SPREAD: f64 = 0.5;

/// What became of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Not answered so far. Lost, from some age on.
    Waiting,
    /// `delay_us` is what is judged; the rest of the RTT is the way back.
    Answered {
        /// Round trip, µs.
        rtt_us: u32,
        /// Delay to judge by, µs.
        delay_us: u32,
    },
    /// It could not be sent.
    Failed,
}

/// One probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    /// Number among the path's probes.
    pub seq: u64,
    /// When it left, µs.
    pub sent_us: u64,
    /// What is known of it so far.
    pub fate: Fate,
    /// Time since the one before it, µs: its weight.
    gap_us: u64,
}

/// Figures that change slowly, in µs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Slow {
    /// How many answers the figures rest on.
    pub answers: usize,
    /// Usual delay.
    pub median_us: f64,
    /// Mean difference between successive answers (after RFC 3550, 6.4.1).
    pub jitter_us: f64,
    /// Share of probes that begin a run of losses, the newest such run apart: a single one says nothing.
    pub loss: f64,
}

/// How late a path is right now, in µs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Now {
    /// Mean of the delays, and a part of their standard deviation.
    pub fast_us: f64,
    /// The second worst of what the newest probes say.
    pub late_us: f64,
    /// Since when a second probe has been waiting for its answer: how long the path has been dark.
    pub dark_us: f64,
    /// Age of the probe that has been waiting longest.
    pub waiting_us: f64,
}

/// What became of some probes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tally {
    /// Probes that were counted.
    pub sent: usize,
    /// Those without an answer so far.
    pub lost: usize,
    /// Runs of losses after an answer.
    pub runs: usize,
    /// When the oldest of them was sent.
    pub since_us: u64,
}

/// Probes of one path in order of sending.
#[derive(Clone, Debug, Default)]
pub struct Probes {
    probes: VecDeque<Probe>,
}

impl Probes {
    /// Notes a probe that was sent. Sequence numbers are only compared.
    pub fn sent(&mut self, seq: u64, at_us: u64) {
        // The order is that of sending, even when events arrive a little out of it.
        let newer = self.probes.iter().rev().take_while(|p| p.sent_us > at_us);
        let at = self.probes.len() - newer.count();
        let before = at.checked_sub(1).map(|i| self.probes[i].sent_us);
        let gap_us = before.map_or(IDLE_US, |t| (at_us - t).min(IDLE_US));
        let probe = Probe {
            seq,
            sent_us: at_us,
            fate: Fate::Waiting,
            gap_us,
        };
        self.probes.insert(at, probe);
        if self.probes.len() > MOST_PROBES {
            self.probes.pop_front();
        }
    }

    /// Notes an answer; false for one that is unknown or was answered already.
    pub fn answered(&mut self, seq: u64, rtt_us: u32, delay_us: u32) -> bool {
        match self.probes.iter_mut().rev().find(|p| p.seq == seq) {
            Some(p) if !matches!(p.fate, Fate::Answered { .. }) => {
                p.fate = Fate::Answered { rtt_us, delay_us };
                true
            }
            _ => false,
        }
    }

    /// Notes that a probe could not be sent, whether or not [`Probes::sent`] was told of it.
    pub fn failed(&mut self, seq: u64, at_us: u64) {
        if !self.probes.iter().any(|p| p.seq == seq) {
            self.sent(seq, at_us);
        }
        if let Some(p) = self.probes.iter_mut().rev().find(|p| p.seq == seq) {
            p.fate = Fate::Failed;
        }
    }

    /// Forgets everything: what was measured before a link went down says nothing after it.
    pub fn clear(&mut self) {
        self.probes.clear();
    }

    /// Forgets the probes without an answer that were sent since a time; not those that were sent before `dark_us`
    /// without an answer since: the path is dark.
    pub(crate) fn forget_lost(&mut self, from_us: u64, dark_us: u64) {
        let dark = self.answers().next().map_or(0, |(p, _)| p.sent_us)..dark_us;
        let kept = |p: &Probe| dark.contains(&p.sent_us) || matches!(p.fate, Fate::Answered { .. });
        self.probes.retain(|p| p.sent_us < from_us || kept(p));
    }

    /// Drops what no longer counts.
    pub(crate) fn expire(&mut self, now_us: u64) {
        let old = |p: &&Probe| p.sent_us + WINDOW_US < now_us;
        let mut old = self.probes.iter().take_while(old).count();
        // At least so many answers are left; and what no answer came to cannot wait for more for ever.
        let least = LEAST_ANSWERS.min(self.probes.len());
        while old > 0 && self.answers_from(old) < least {
            old -= 1;
        }
        self.probes.drain(..old);
    }

    fn answers_from(&self, index: usize) -> usize {
        let answered = |p: &&Probe| matches!(p.fate, Fate::Answered { .. });
        self.probes
            .range(index..)
            .filter(answered)
            .take(LEAST_ANSWERS)
            .count()
    }

    /// Newest first.
    pub fn newest(&self) -> impl Iterator<Item = &Probe> {
        self.probes.iter().rev()
    }

    /// The probe of this number, while it counts.
    pub fn get(&self, seq: u64) -> Option<&Probe> {
        self.newest().find(|p| p.seq == seq)
    }

    /// Answered probes, newest first, and their delays.
    pub fn answers(&self) -> impl Iterator<Item = (&Probe, f64)> {
        self.newest().filter_map(|p| match p.fate {
            Fate::Answered { delay_us, .. } => Some((p, f64::from(delay_us))),
            _ => None,
        })
    }

    /// The largest delay of the reverse route (RTT less delay) of the newest answers, µs: a probe may be that much older than its delay.
    pub(crate) fn reverse_delay_us(&self) -> f64 {
        let backs = self.newest().filter_map(|p| match p.fate {
            Fate::Answered { rtt_us, delay_us } => Some(rtt_us.saturating_sub(delay_us)),
            _ => None,
        });
        f64::from(backs.take(LEAST_ANSWERS).max().unwrap_or(0))
    }

    /// Ages less the reverse delay of the unanswered probes since the newest answer, oldest first, µs.
    pub(crate) fn waiting_us(&self, now_us: u64) -> (f64, f64) {
        let back = self.reverse_delay_us();
        let (mut oldest, mut second) = (0.0, 0.0);
        for p in self.newest() {
            let age = match p.fate {
                Fate::Answered { .. } => break,
                Fate::Waiting => now_us.saturating_sub(p.sent_us) as f64,
                Fate::Failed => (LATE_US as f64).max(now_us.saturating_sub(p.sent_us) as f64),
            };
            second = oldest;
            oldest = (age - back).max(0.0);
        }
        (oldest, second)
    }

    /// Age from which on an unanswered probe is lost, µs, where `usual_us` is usual.
    pub(crate) fn lost_age_us(&self, usual_us: f64) -> f64 {
        (LATE_US as f64).max(LOST_TIMES * usual_us) + self.reverse_delay_us()
    }

    /// The slow figures. `least_us`: the median of the group's best path.
    /// Losses before `blameless_until_us` do not count.
    pub fn slow(&self, now_us: u64, least_us: f64, blameless_until_us: u64) -> Slow {
        let mut delays: Vec<(f64, f64)> = Vec::with_capacity(self.probes.len());
        let mut jitter = Mean::default();
        let mut later: Option<f64> = None;
        for (p, delay) in self.answers() {
            delays.push((delay, p.gap_us as f64));
            if let Some(later) = later {
                jitter.add(
                    (later - delay).abs(),
                    p.gap_us as f64 * fading(p, now_us, WINDOW_US as f64),
                );
            }
            later = Some(delay);
        }
        let median_us = median(&mut delays);
        Slow {
            answers: delays.len(),
            median_us,
            jitter_us: jitter.mean(),
            loss: self.loss(
                now_us,
                self.lost_age_us(median_us.max(least_us)),
                blameless_until_us,
            ),
        }
    }

    fn loss(&self, now_us: u64, lost_age_us: f64, from_us: u64) -> f64 {
        let (mut all, mut lost, mut newest) = (0.0, 0.0, 0.0);
        let mut in_run = false;
        for p in self.probes.iter().filter(|p| p.sent_us >= from_us) {
            let is_lost = match p.fate {
                Fate::Answered { .. } => false,
                Fate::Failed => true,
                Fate::Waiting if now_us.saturating_sub(p.sent_us) as f64 >= lost_age_us => true,
                Fate::Waiting => continue,
            };
            let weight = p.gap_us as f64 * fading(p, now_us, LOSS_US);
            all += weight;
            if is_lost && !in_run {
                lost += newest;
                newest = weight;
            }
            in_run = is_lost;
        }
        if all > 0.0 {
            lost / all
        } else {
            0.0
        }
    }

    /// How late the path is. A delay counts as `cap_us` at most. Ages count unless our own clock is in doubt.
    /// `d_us`, `overdue_us`: a second probe that has been waiting for so long beyond the median will take
    /// that much longer yet.
    pub fn now(&self, now_us: u64, judge: &Judge) -> Now {
        let mut delays = Mean::default();
        for (p, delay) in self.answers() {
            let fading = fading(p, now_us, MEAN_US);
            delays.add(delay.min(judge.cap_us), p.gap_us as f64 * fading);
        }
        let mut newest = self.answers().map(|(_, delay)| delay);
        let (l1, l2) = (newest.next().unwrap_or(0.0), newest.next().unwrap_or(0.0));
        // Two probes in a row are lost by chance now and then, which the next one shows: its answer is waited for.
        let (oldest, second) = self.waiting_us(now_us);
        let [oldest, second] = [oldest, second].map(|us| (us - judge.unanswered_us).max(0.0));
        let overdue = second > judge.median_us + FAST_US as f64;
        let (a1, a2) = (oldest, if overdue { second } else { 0.0 });
        let mut late_us = l1.min(l2).max(l1.min(a1)).max(a2);
        if a2 > judge.median_us + judge.d_us {
            late_us = late_us.max(a2 + judge.overdue_us);
        }
        Now {
            fast_us: delays.mean() + SPREAD * delays.deviation(),
            late_us,
            dark_us: second,
            waiting_us: oldest,
        }
    }

    /// Counts the probes sent from `from_us` to `until_us`, newest first, as long as `more` says so.
    pub fn tally(&self, from_us: u64, until_us: u64, more: impl Fn(&Tally) -> bool) -> Tally {
        let mut tally = Tally {
            since_us: until_us,
            ..Tally::default()
        };
        let mut later_lost = false;
        let these = self.newest().skip_while(|p| p.sent_us >= until_us);
        for p in these.take_while(|p| p.sent_us >= from_us) {
            if !more(&tally) {
                break;
            }
            let lost = !matches!(p.fate, Fate::Answered { .. });
            tally.sent += 1;
            tally.lost += usize::from(lost);
            // Backwards, a run of losses begins after an answer that is older.
            tally.runs += usize::from(later_lost && !lost);
            tally.since_us = p.sent_us;
            later_lost = lost;
        }
        tally
    }

    /// Largest delay or age of the probes sent since `from_us`, and the smallest delay of all, µs.
    pub(crate) fn extremes_us(&self, from_us: u64, now_us: u64) -> (f64, Option<f64>) {
        let recent = self.answers().take_while(|(p, _)| p.sent_us >= from_us);
        let largest = recent.map(|(_, delay)| delay).fold(0.0, f64::max);
        let least = self
            .answers()
            .map(|(_, delay)| delay)
            .min_by(f64::total_cmp);
        (largest.max(self.waiting_us(now_us).0), least)
    }
}

/// What [`Probes::now`] goes by, in µs.
#[derive(Clone, Copy, Debug)]
pub struct Judge {
    /// Delays count as this at most.
    pub cap_us: f64,
    /// Usual delay of the path.
    pub median_us: f64,
    /// The threshold: a wait so far beyond the median counts more than its age.
    pub d_us: f64,
    /// How much longer such a probe will take yet.
    pub overdue_us: f64,
    /// Ages of waiting probes up to this say nothing.
    pub unanswered_us: f64,
}

fn fading(p: &Probe, now_us: u64, half_life_us: f64) -> f64 {
    (-(now_us.saturating_sub(p.sent_us) as f64) / half_life_us).exp2()
}

/// A weighted mean and standard deviation.
#[derive(Default)]
struct Mean {
    weight: f64,
    sum: f64,
    squares: f64,
}

impl Mean {
    fn add(&mut self, value: f64, weight: f64) {
        self.weight += weight;
        self.sum += weight * value;
        self.squares += weight * value * value;
    }

    fn mean(&self) -> f64 {
        if self.weight > 0.0 {
            self.sum / self.weight
        } else {
            0.0
        }
    }

    fn deviation(&self) -> f64 {
        if self.weight > 0.0 {
            (self.squares / self.weight - self.mean() * self.mean())
                .max(0.0)
                .sqrt()
        } else {
            0.0
        }
    }
}

/// The smallest value up to which half of the weight lies; 0 of nothing.
fn median(weighted: &mut [(f64, f64)]) -> f64 {
    weighted.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    let total: f64 = weighted.iter().map(|v| v.1).sum();
    let mut sum = 0.0;
    let half = |v: &&(f64, f64)| {
        sum += v.1;
        sum + sum >= total
    };
    weighted.iter().find(half).map_or(0.0, |v| v.0)
}
