// SPDX-License-Identifier: GPL-2.0-or-later
//! How often paths are probed, and what the newest probe says to flows that can never change their path.

use super::{Group, GroupVerdict, Member, Mode, Path, Policy};
use crate::steer::ejection::Cause;

/// Probes follow one another this much faster while no path is good, as a single one decides, and at most
/// so while many flows start.
const FASTER: u64 = 5;
/// So many probes are sent for each flow that starts: between an onset and the next probe there is a quarter of
/// a flow at most, until they are [`FASTER`].
const PROBES_PER_START: f64 = 4.0;
/// Time over which the rate of new flows is averaged.
const STARTS_US: f64 = 1e6;

impl Path {
    /// Takes in how many flows have started since the last time.
    pub(super) fn started(&mut self, at_us: u64, flows: u64) {
        let passed_us = at_us.saturating_sub(self.starts_at_us) as f64;
        if self.starts_at_us != 0 && passed_us > 0.0 {
            let hz = flows as f64 * 1e6 / passed_us;
            self.starts_hz += (hz - self.starts_hz) * (passed_us / STARTS_US).min(1.0);
        }
        self.starts_at_us = at_us;
    }

    /// Whether its newest probe is beyond a limit.
    pub(super) fn is_late(&self, now_us: u64, limit_us: f64, judge_age: bool) -> bool {
        let (delay, waiting) = self.latest.present(now_us);
        delay.is_some_and(|us| us as f64 > limit_us) || (judge_age && waiting as f64 > limit_us)
    }

    /// When the probe that is waited for longest has been so for a limit.
    fn late_from_us(&self, limit_us: f64) -> Option<u64> {
        let sent_us = self.latest.waiting_since()?;
        Some(sent_us + self.latest.excess_us() + limit_us as u64 + 1)
    }
}

impl Policy {
    /// Which of a group's paths flows that start now may use: those of the latency class, without the ones
    /// whose newest probe is beyond. Such a flow has nothing to lose elsewhere and can never leave, so one
    /// late probe is enough. While no path is eligible they share all that are good at present: the least
    /// bad one is kept for those that would have to move. Where none is left, any that delivers and has no
    /// late probe; else all of the class.
    pub fn for_new_flows(&self, g: usize) -> u16 {
        let Some((verdict, group)) = self.verdict.groups.get(g).zip(self.groups.get(g)) else {
            return 0;
        };
        if self.mode == Mode::MinRtt || verdict.latency == 0 {
            return verdict.latency;
        }
        let those = |test: &dyn Fn(&Member) -> bool| {
            let members = group.members.iter().enumerate();
            members.fold(0, |bits, (i, m)| bits | u16::from(test(m)) << i)
        };
        let in_time = verdict.alive & those(&|m| !m.late);
        // What makes a path dear at any moment: loss, or that it was left for its cost.
        let fair = those(&|m| {
            let is_dear = m.out.as_ref().is_some_and(|out| out.cause == Cause::Cost);
            !m.bad && !is_dear && self.paths[m.path].stats.loss == 0.0
        });
        let usual = match group.least_bad {
            Some(_) => fair,
            None => verdict.latency,
        };
        let choices = [usual, verdict.latency, verdict.alive];
        let mut choices = choices.into_iter().map(|paths| paths & in_time);
        let found = choices.find(|paths| *paths != 0);
        found.unwrap_or(verdict.latency)
    }

    /// When a path turns late, unless its probe is answered before: the next moment at which
    /// [`Policy::for_new_flows`] may change. Of those that the last tick has not seen.
    pub fn next_late_us(&self) -> Option<u64> {
        let seen_us = self.last_tick_us?;
        let late_from = |g: &Group| {
            let limit_us = g.threshold_us?;
            let members = g.members.iter();
            let each = members.filter_map(|m| self.paths[m.path].late_from_us(limit_us));
            each.filter(|at_us| *at_us > seen_us).min()
        };
        self.groups.iter().filter_map(late_from).min()
    }

    /// How often to probe a path now: at the pace at which it is judged, more often while flows start that
    /// could never leave a path that has just turned bad.
    pub fn probe_interval_us(&self, path: usize) -> u64 {
        let pace = self.pace_us(path);
        let members = |g: &&Group| g.members.iter().any(|m| m.path == path);
        let starts_hz = |g: &Group| -> f64 {
            let each = g.members.iter().map(|m| self.paths[m.path].starts_hz);
            each.sum()
        };
        let hz = self.groups.iter().filter(members).map(starts_hz);
        let wanted = PROBES_PER_START * hz.fold(0.0, f64::max) * pace as f64 / 1e6;
        // Whole parts of the pace, so that every so many of them it is kept.
        pace / (wanted.ceil() as u64).clamp(1, pace / self.fastest_us())
    }

    /// How often a path is judged by a probe now: the configured interval, a fifth of it (at least 10 ms)
    /// while at most one of a group's paths is eligible and that one has flapped lately, when a
    /// single probe decides.
    pub(super) fn pace_us(&self, path: usize) -> u64 {
        let now_us = self.last_tick_us.unwrap_or(0);
        let hurry = |(g, v): (&Group, &GroupVerdict)| {
            (g.least_bad.is_some() || self.lone(g, *v, now_us).is_some())
                && g.members.len() > 1
                && g.members.iter().any(|m| m.path == path)
        };
        match self.groups.iter().zip(&self.verdict.groups).any(hurry) {
            true => self.fastest_us(),
            false => self.configured_us(),
        }
    }

    fn configured_us(&self) -> u64 {
        u64::from(self.cfg.probe_interval_ms) * 1000
    }

    fn fastest_us(&self) -> u64 {
        let configured = self.configured_us();
        (configured / FASTER).max(10_000).min(configured)
    }
}
