// SPDX-License-Identifier: GPL-2.0-or-later
//! From the standing of each path to the masks of a group.

use super::{Group, GroupVerdict, Member, Mode, Policy};
use crate::steer::ejection::Cause;
use crate::steer::selfload::Load;

/// Probes from which a path's ordinary delay is told.
const TELLING: usize = 6;

impl Policy {
    /// Masks of one group.
    pub(super) fn choose(&mut self, g: usize, now_us: u64) -> GroupVerdict {
        let mut v = GroupVerdict::default();
        let (mut own, mut foreign, mut fair, mut ejected) = (0u16, 0u16, 0u16, 0u16);
        for (i, m) in self.groups[g].members.iter().enumerate() {
            if !self.alive(m.path, now_us) {
                continue;
            }
            let bit = 1 << i;
            v.alive |= bit;
            if m.out.is_none() {
                v.latency |= bit;
            }
            match m.load.as_ref().map(|l| l.load) {
                Some(Load::Own) => own |= bit,
                Some(Load::Foreign) => foreign |= bit,
                None => {}
            }
            if !m.bad {
                fair |= bit;
            }
            if m.bad
                || m.out
                    .as_ref()
                    .is_some_and(|o| matches!(o.cause, Cause::Late | Cause::Lost))
            {
                ejected |= bit;
            }
        }
        if self.mode == Mode::MinRtt {
            return self.lowest_median(g, v.alive);
        }
        v.bulk = v.latency | own;
        let doubtful = self.doubtful(g, v, now_us);
        let choice = match v.latency != 0 && !doubtful {
            true => None,
            false => self.least_bad(g, v.alive, now_us),
        };
        let bit = choice.map_or(0, |c| 1 << c);
        // A doubtful path that is still the best of the moment stays what it is: eligible.
        if v.latency != 0 && (!doubtful || bit == v.latency) {
            v.ejected = ejected & !v.latency;
            self.groups[g].least_bad = None;
            return v;
        }
        self.groups[g].least_bad = choice;
        v.latency = bit;
        // The least bad path is the one that is early now: waiting for a flowlet on another would
        // outlast the advantage. Not so where the queue is our own: flows in haste would take it along.
        v.ejected = v.alive & !bit & !own;
        if !doubtful {
            // Beside a queue of our own, which grows as others leave, a foreign delay soon looks
            // fair; but bulk flows would only carry the queue there and back.
            v.bulk |= fair & !foreign;
        }
        if v.bulk == 0 {
            v.bulk = if !doubtful && fair != 0 { fair } else { bit };
        }
        v
    }

    /// Whether the only eligible path has a bad name and is late right now. Then it is treated
    /// like the others: the best one of the moment is used until this one is on time again.
    fn doubtful(&self, g: usize, v: GroupVerdict, now_us: u64) -> bool {
        let Some(m) = self.lone(&self.groups[g], v, now_us) else {
            return false;
        };
        let present = self.paths[self.groups[g].members[m].path].present_us(now_us);
        present as f64 > self.groups[g].threshold_us.unwrap_or(f64::INFINITY)
    }

    /// The only eligible member, when others live and it has flapped not long ago.
    pub(super) fn lone(&self, group: &Group, v: GroupVerdict, now_us: u64) -> Option<usize> {
        let m = v.latency.trailing_zeros() as usize;
        (v.latency.count_ones() == 1
            && v.alive != v.latency
            && group.members[m].hold.flaps_at(now_us) > 0)
            .then_some(m)
    }

    fn lowest_median(&self, g: usize, alive: u16) -> GroupVerdict {
        let members = &self.groups[g].members;
        let mask = (0..members.len())
            .filter(|i| alive & (1 << i) != 0)
            .filter(|i| self.paths[members[*i].path].stats.answered > 0)
            .min_by(|a, b| {
                let p50 = |i: usize| self.paths[members[i].path].stats.p50_us;
                p50(*a).total_cmp(&p50(*b))
            })
            .map_or(alive, |i| 1 << i);
        GroupVerdict {
            latency: mask,
            bulk: mask,
            alive,
            ejected: 0,
        }
    }

    /// With no eligible path: the one that is best at this moment, left only for a clear
    /// advantage. A single probe decides, as every path here has a bad name already and waiting
    /// for three would cost more than a needless move.
    fn least_bad(&self, g: usize, alive: u16, now_us: u64) -> Option<usize> {
        let members = &self.groups[g].members;
        let path = |i: usize| &self.paths[members[i].path];
        let candidates = || (0..members.len()).filter(|i| alive & (1 << i) != 0);
        let lowest = candidates().min_by_key(|i| path(*i).present_us(now_us))?;
        let low = path(lowest).present_us(now_us) as f64;
        let (median, ordinary) = self.usual_us(&members[lowest], now_us);
        let usual = (ordinary - median).max(0.0);
        let near = low + self.band.clear_us(low).max(usual + self.band.width_us(low));
        let close = |i: &usize| path(*i).present_us(now_us) as f64 <= near;
        match self.groups[g].least_bad {
            Some(current) if candidates().any(|i| i == current) && close(&current) => Some(current),
            _ => candidates().filter(close).min_by(|a, b| {
                let cost = |i: usize| path(i).cost(&self.weights, 1).unwrap_or(f64::INFINITY);
                cost(*a).total_cmp(&cost(*b))
            }),
        }
    }

    /// Median and ordinary delay of a path, without what it did while it was bad, where that is in
    /// the window: by that, no path would look worse than one that was bad until now.
    pub(super) fn usual_us(&self, member: &Member, now_us: u64) -> (f64, f64) {
        let path = &self.paths[member.path];
        let since = member.bad_until_us;
        let all = (path.stats.p50_us, path.stats.ordinary_us());
        if since + self.cfg.window_us() <= now_us || member.bad {
            return all;
        }
        let mut good: Vec<u64> = path.window.between(since, now_us + 1).collect();
        if good.len() < TELLING {
            return all;
        }
        good.sort_unstable();
        let at = |percent: usize| good[good.len() * percent / 100] as f64;
        (at(50), all.1.min(at(95)))
    }
}
