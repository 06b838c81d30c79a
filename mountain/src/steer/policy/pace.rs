// SPDX-License-Identifier: GPL-2.0-or-later
//! How often paths are probed.
//!
//! Fast where a latency flow has just sent, as the first late probe is the news; slower on other paths, and
//! slowest on an idle host. Never faster than a gateway answers.

use super::probes::{Tally, LEAST_ANSWERS, WINDOW_US};
use super::rule::{LOSS_SHARE, MEMORY_US, R_SHARE};
use super::{Path, Policy, RECENT_US};

/// Time between two probes where latency flows send, µs, ...
pub(crate) const FAST_US: u64 = 10_000;
/// ... on other paths while anything is sent, and on metered ones, ...
pub(crate) const USUAL_US: u64 = 50_000;
/// ... and on an idle host: a probe weighs as this much time at most.
pub(crate) const IDLE_US: u64 = 500_000;
/// A latency flow has just sent, µs.
const JUST_US: u64 = 1_000_000;

/// Runs of losses from which on it is asked whether answers are limited.
const RUNS: usize = 4;
/// Share of the answers so far that is asked for then.
const SLOWER: f64 = 0.7;
/// Chance that so many probes are all answered by luck.
const LUCK: f64 = 1e-4;

/// What limits the probes of a path. Many gateways answer only so many pings a second, for which a path is not
/// to be blamed. So when probes go missing, they are sent more slowly for a while: answers a second that stay
/// the same mean a limit, an answered share that stays the same means loss. Losses may also have ended just then, as
/// those of a moving car do. So what has been found is tried out: for a moment probes are as fast as without a limit, and
/// at least half of what it would take must be missing. That is done at once, and again by and by.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pace {
    /// Shortest time between two probes, µs: that of a trial, or by a limit that is known; 0: none.
    pub limit_us: u64,
    pub trial: Option<Trial>,
    /// Losses before this are of a limit, µs.
    pub blameless_until_us: u64,
    /// No other trial before this, µs, ...
    not_before_us: u64,
    /// ... which is so long after the last one.
    wait_us: u64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Trial {
    since_us: u64,
    until_us: u64,
    /// So many probes tell the share from none.
    probes: f64,
    /// Share of losses so far, or that the limit which is tried out would take.
    share: f64,
    /// The limit before.
    limit_us: u64,
}

impl Pace {
    /// Time between the answers of a limit that is tried out, µs. A probe that waits for no longer says nothing. 0: none is
    /// tried out.
    pub fn unanswered_us(&self) -> f64 {
        let tried = self.trial.filter(|_| self.limit_us == 0);
        tried.map_or(0.0, |trial| trial.limit_us as f64)
    }
}

impl Path {
    /// Looks whether answers are limited; whether that has just been found.
    pub(super) fn look_for_limit(&mut self, now_us: u64) -> bool {
        let settled_us = now_us.saturating_sub(self.probes.lost_age_us(self.slow.median_us) as u64);
        if let Some(trial) = self.pace.trial {
            let Tally { sent, lost, .. } = self.probes.tally(trial.since_us, settled_us, |_| true);
            // Half of what the limit would take, or next to nothing of what was lost before.
            let tried_us = self.pace.unanswered_us();
            let tries_limit = tried_us > 0.0;
            let span_us = settled_us.saturating_sub(trial.since_us) as f64;
            let few = match tries_limit {
                true => (lost + lost) as f64 <= sent as f64 - span_us / (SLOWER * tried_us),
                false => lost as f64 <= R_SHARE * trial.share * trial.probes.max(sent as f64),
            };
            if (few || tries_limit) && (sent == 0 || settled_us < trial.until_us) {
                return false;
            }
            let is_limit = few != tries_limit;
            if !few {
                self.pace.limit_us = trial.limit_us;
            }
            if is_limit {
                self.probes
                    .forget_lost(trial.since_us, settled_us.saturating_sub(tried_us as u64));
            }
            // One that has just been found is tried out at once, and then less and less often.
            let longer_us = self.pace.wait_us + self.pace.wait_us;
            self.pace.wait_us = match (is_limit, few) {
                (true, true) => 0,
                (true, false) => longer_us.clamp(WINDOW_US, MEMORY_US as u64),
                (false, _) => WINDOW_US,
            };
            (self.pace.trial, self.pace.not_before_us) = (None, now_us + self.pace.wait_us);
            return is_limit && few;
        }
        let next = self.limit_to_try(now_us, settled_us);
        let due = now_us >= self.pace.not_before_us;
        if let Some((limit_us, share, length_us)) = next.filter(|_| due) {
            let probes = (LUCK.ln() / (1.0 - share).ln()).ceil();
            self.pace.trial = Some(Trial {
                since_us: now_us + 1,
                until_us: now_us + length_us.max(probes * limit_us) as u64,
                probes,
                share,
                limit_us: std::mem::replace(&mut self.pace.limit_us, limit_us as u64),
            });
        }
        false
    }

    /// The time between probes that is to be tried, the share of losses that it tells apart, and how long that takes.
    fn limit_to_try(&self, now_us: u64, settled_us: u64) -> Option<(f64, f64, f64)> {
        let asks = self.load.has_latency(now_us.saturating_sub(JUST_US));
        // Of what is sent as fast as it may be, a limit as was found would take so much. Where that is little, for longer:
        // a gateway that has answered less for a while may make up for that at first.
        let fast_us = [FAST_US, USUAL_US][usize::from(self.input.metered || !asks)];
        let taken = 1.0 - fast_us as f64 / (SLOWER * self.pace.limit_us as f64);
        let known = self.pace.limit_us > 0 && taken > 1.0 - SLOWER;
        let again = known.then_some((0.0, taken, RECENT_US as f64 / taken));
        // Long enough for several runs of losses: a single outage is none of a limit's.
        let sampled_us = now_us.saturating_sub(RECENT_US);
        let more = |t: &Tally| t.sent < LEAST_ANSWERS || t.runs < RUNS || t.since_us > sampled_us;
        // But recent ones: outages of a minute are none either, and between so few answers a path would be dead for long.
        let recent_us = now_us.saturating_sub(WINDOW_US + RECENT_US);
        let from_us = recent_us.max(self.pace.blameless_until_us);
        let found = self.probes.tally(from_us, settled_us, more);
        let share = found.lost as f64 / found.sent.max(1) as f64;
        let span_us = settled_us.saturating_sub(found.since_us) as f64;
        let limit_us = span_us / (SLOWER * (found.sent - found.lost) as f64);
        // So long that such runs would not stay away by luck either.
        let length_us = -LUCK.ln() * span_us / found.runs as f64;
        let lossy = !more(&found) && share > LOSS_SHARE;
        lossy.then_some((limit_us, share, length_us)).or(again)
    }
}

impl Policy {
    /// How often to probe a path now, µs.
    pub fn probe_interval_us(&self, path: usize) -> u64 {
        let Some(p) = self.paths.get(path) else {
            return IDLE_US;
        };
        let now_us = self.last_tick_us.unwrap_or(0);
        let counted = self.paths.iter().any(|p| p.load.is_counted());
        let rest_us = now_us.saturating_sub(WINDOW_US);
        let idle = counted && !self.paths.iter().any(|p| p.load.has_any(rest_us));
        // Where there is nothing to choose, the state of the only one is no news.
        let mut chosen = self.groups.iter().filter(|g| g.members.len() > 1);
        let alone = !chosen.any(|g| g.members.iter().any(|m| m.path == path));
        let young = p.probes.newest().take(LEAST_ANSWERS).count() < LEAST_ANSWERS;
        // Nobody pays for probes of a reserve.
        let spare = p.input.metered && p.input.cost_us > 0.0 && !p.load.has_latency(rest_us);
        (p.pace.limit_us).max(match p.load.has_latency(now_us.saturating_sub(JUST_US)) {
            true if !p.input.metered && !alone => FAST_US,
            _ if (idle || spare || alone) && !young => IDLE_US,
            _ => USUAL_US,
        })
    }
}
