// SPDX-License-Identifier: GPL-2.0-or-later
//! How often paths are probed.
//!
//! Fast where a latency flow has just sent, as the first late probe is the news; slower on other paths, and
//! slowest on an idle host. Never faster than a gateway answers.

use super::probes::{Tally, LEAST_ANSWERS, WINDOW_US};
use super::rule::{LOSS_SHARE, R_SHARE};
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
/// the same mean a limit, an answered share that stays the same means loss.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pace {
    /// Shortest time between two probes, µs: that of a trial, or by a limit that is known; 0: none.
    limit_us: u64,
    trial: Option<Trial>,
    /// Losses before this are of a limit, µs.
    pub blameless_until_us: u64,
    /// No other trial before this, µs.
    not_before_us: u64,
}

#[derive(Clone, Copy, Debug)]
struct Trial {
    since_us: u64,
    probes: usize,
    /// Lost so far.
    share: f64,
    /// The limit before.
    limit_us: u64,
}

impl Path {
    /// Looks whether answers are limited; whether that has just been found.
    pub(super) fn look_for_limit(&mut self, now_us: u64) -> bool {
        let settled_us = now_us.saturating_sub(self.probes.lost_age_us(self.slow.median_us) as u64);
        if let Some(trial) = self.pace.trial {
            let Tally { sent, lost, .. } = self.probes.tally(trial.since_us, settled_us, |_| true);
            if sent < trial.probes {
                return false;
            }
            self.pace.trial = None;
            self.pace.not_before_us = now_us + WINDOW_US;
            // Next to none of the losses that it would be.
            let is_limit = lost as f64 <= R_SHARE * trial.share * sent as f64;
            match is_limit {
                true => self.pace.blameless_until_us = now_us,
                false => self.pace.limit_us = trial.limit_us,
            }
            return is_limit;
        }
        // Long enough for several runs of losses: a single outage is none of a limit's.
        let sampled_us = now_us.saturating_sub(RECENT_US);
        let more = |t: &Tally| t.sent < LEAST_ANSWERS || t.runs < RUNS || t.since_us > sampled_us;
        let found = self
            .probes
            .tally(self.pace.blameless_until_us, settled_us, more);
        let share = found.lost as f64 / found.sent.max(1) as f64;
        let long = found.sent >= LEAST_ANSWERS && found.since_us <= sampled_us;
        let asks = long && found.runs >= RUNS && share > LOSS_SHARE;
        if !asks || now_us < self.pace.not_before_us {
            return false;
        }
        let span_us = (settled_us - found.since_us) as f64;
        let answered = (found.sent - found.lost) as f64;
        self.pace.trial = Some(Trial {
            since_us: now_us + 1,
            probes: (LUCK.ln() / (1.0 - share).ln()).ceil() as usize,
            share,
            limit_us: self.pace.limit_us,
        });
        self.pace.limit_us = (span_us / (SLOWER * answered)) as u64;
        false
    }

    /// Probes a second that the target is asked, where its answers are limited.
    pub(super) fn answer_limit_hz(&self) -> Option<f64> {
        let known = self.pace.limit_us > 0 && self.pace.trial.is_none();
        known.then(|| 1e6 / self.pace.limit_us as f64)
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
        let young = p.probes.newest().take(LEAST_ANSWERS).count() < LEAST_ANSWERS;
        let wanted = match p.load.has_latency(now_us.saturating_sub(JUST_US)) {
            true if !p.input.metered => FAST_US,
            _ if idle && !young => IDLE_US,
            _ => USUAL_US,
        };
        wanted.max(p.pace.limit_us)
    }
}
