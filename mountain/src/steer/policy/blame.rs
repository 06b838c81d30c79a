// SPDX-License-Identifier: GPL-2.0-or-later
//! Whose doing a rise of the delay is: asked when a path is left, and again while it is held
//! (docs/steering.md, "Self-induced delay").

use super::{Episode, Policy};
use crate::steer::ejection::step_us;
use crate::steer::selfload::{Judgement, Load};

/// A jump of the delay is at least this high.
const JUMP_US: f64 = 10_000.0;
/// An *own load* verdict is not reviewed for jumps before this age: its queue is still growing.
const REVIEW_US: u64 = 3_000_000;
/// A *foreign load* verdict may turn into *own load* for this long: less than `force_after_ms`, so
/// that bulk flows are still where they were.
const UNDECIDED_US: u64 = 1_500_000;

impl Policy {
    /// A member's delay has risen: finds out whose doing that is.
    pub(super) fn blame(&mut self, g: usize, m: usize, now_us: u64) {
        let member = &mut self.groups[g].members[m];
        let onset_us = member.seen.onset_us;
        member.episode = Some(Episode {
            began_us: now_us,
            judged_us: now_us,
            onset_us: onset_us.unwrap_or(now_us.saturating_sub(1_000_000)),
            jump_us: member.seen.jump_us,
        });
        let judged = self.judged(g, m, now_us);
        self.groups[g].members[m].load = judged;
    }

    /// Whether the rise is so young that our own rate may still be on its way up: a flow that
    /// starts fills the queue before a rate over 100 ms shows it.
    pub(super) fn undecided(&self, g: usize, m: usize, now_us: u64) -> bool {
        let member = &self.groups[g].members[m];
        let young = |e: &Episode| now_us < e.began_us + UNDECIDED_US;
        let open = |j: &Judgement| j.load == Load::Foreign && j.is_low_rate();
        member.episode.as_ref().is_some_and(young) && member.load.as_ref().is_some_and(open)
    }

    pub(super) fn own_load(&self, g: usize, m: usize) -> bool {
        let load = &self.groups[g].members[m].load;
        load.as_ref().is_some_and(|l| l.load == Load::Own)
    }

    /// Whose doing the member's rise is, as far as can be said now.
    pub(super) fn judged(&self, g: usize, m: usize, now_us: u64) -> Option<Judgement> {
        let member = &self.groups[g].members[m];
        let path = &self.paths[member.path];
        let jump = (2.0 * self.band.width_us(path.stats.p50_us)).max(JUMP_US);
        member.episode.as_ref().map(|e| {
            let jumped = e.jump_us.max(step_us(&path.window, now_us)) as f64 >= jump;
            path.load.judge(now_us, e.onset_us, jumped)
        })
    }

    /// Looks again at a path whose delay was taken for our own doing.
    pub(super) fn review(&mut self, g: usize, m: usize, now_us: u64) {
        let member = &mut self.groups[g].members[m];
        let path = &self.paths[member.path];
        let least = (self.band.clear_us(path.stats.p50_us)).max(2.0 * JUMP_US);
        let own_for_us = match &member.episode {
            Some(e) => now_us - e.judged_us,
            None => return,
        };
        let jumped = own_for_us >= REVIEW_US && step_us(&path.window, now_us) as f64 >= least;
        if let Some(j) = path.load.review(now_us, own_for_us, jumped) {
            member.load = Some(j);
            member.episode = None;
        }
    }
}
