//! Whose doing a rise of the delay is: asked when a path is left, and again while it is held
//! (docs/steering.md, "Self-induced delay").

use super::{Episode, Member, Policy};
use crate::steer::ejection::step_us;
use crate::steer::selfload::{Judgement, Load};

/// A jump of the delay is at least this high.
const JUMP_US: f64 = 10_000.0;
/// An *own load* verdict is not reviewed for jumps before this age: its queue is still growing.
const REVIEW_US: u64 = 3_000_000;
/// A *foreign load* verdict may turn into *own load* for this long: less than `force_after_ms`, so
/// that bulk flows are still where they were.
const UNDECIDED_US: u64 = 1_500_000;
/// Flows that may use a path from now on are there after this long: `force_after_ms` and a second
/// until their rate shows.
const ARRIVING_US: u64 = 3_000_000;

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
        let arriving = match member.bulk_since_us {
            Some(t) if now_us < t + ARRIVING_US => {
                let load = |m: &Member| &self.paths[m.path].load;
                let rates = self.groups[g].members.iter().map(load);
                let demand = rates.map(|l| l.mean(now_us.saturating_sub(1_000_000), now_us + 1));
                path.load.arriving(now_us, demand.sum())
            }
            _ => None,
        };
        member.episode.as_ref().map(|e| {
            if let Some(own) = arriving {
                return own;
            }
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
            Some(e) => {
                let arrived = member.bulk_since_us.map_or(0, |t| t + ARRIVING_US);
                now_us.saturating_sub(e.judged_us.max(arrived))
            }
            None => return,
        };
        let jumped = own_for_us >= REVIEW_US && step_us(&path.window, now_us) as f64 >= least;
        if let Some(j) = path.load.review(now_us, own_for_us, jumped) {
            member.load = Some(j);
            member.episode = None;
        }
    }
    /// Ends the reign of a *foreign* verdict over bulk flows before the hold is over: no path is
    /// eligible, this one has been good for the shortest hold, by the threshold it was left for too,
    /// and in all of that time it was clearly better than the paths that bulk flows use have been,
    /// or have been since they turned bad.
    pub(super) fn pardon(&mut self, g: usize, m: usize, now_us: u64) {
        let members = &self.groups[g].members;
        let member = &members[m];
        let least_us = self.cfg.hold_us().0;
        if !member.rested(now_us, least_us) || members.iter().any(|m| m.out.is_none()) {
            return;
        }
        let from = now_us.saturating_sub(least_us);
        let delays = |m: &Member, t| self.paths[m.path].window.between(t, now_us + 1);
        let worst = delays(member, from).max().unwrap_or(u64::MAX) as f64;
        // Beside a queue of our own the delay it was left for may look fine.
        if member.out.as_ref().is_some_and(|o| worst > o.threshold_us) {
            return;
        }
        let bulk = self.verdict.groups.get(g).map_or(0, |v| v.bulk);
        let clear = members.iter().enumerate().all(|(i, other)| {
            // Of one that has just been left, what came before says nothing.
            let turned = other.episode.as_ref().filter(|_| other.bad);
            let since = turned.map_or(from, |e| from.max(e.onset_us));
            let best = delays(other, since).min().unwrap_or(u64::MAX) as f64;
            bulk & (1 << i) == 0 || (i != m && worst + self.band.clear_us(worst) < best)
        });
        if clear {
            self.groups[g].members[m].load = None;
        }
    }
}
