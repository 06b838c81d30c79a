// SPDX-License-Identifier: GPL-2.0-or-later
//! The rule: leave at once, return with patience that grows with recent relapses.
//!
//! ```text
//! m        = lowest median among the paths in use
//! J        = jitter of the quietest path
//! d        = max(tolerance, 0.4·m, 3·J)            the one threshold (with a stopgap: the highest median for m)
//! r        = max(0.4·tolerance, 0.1·m)             what does not tell paths apart
//! present  = max(fast, late) + configured cost
//! cost     = present + loss / 2 % · max(d, 2·tolerance)
//! K        = onsets, half-life 120 s
//! patience = min(30 s, 1 s · 4^(K−1))
//! ```
//!
//! A path is left at once when its present delay exceeds another's by more than d, after the other's patience when
//! its cost does, and by 0.4 of the losses' part of that one, and at flowlets when its median has exceeded the least one by more than r for the
//! window. It joins when its cost and its median are within r of the least ones for its patience. When
//! no path is left, the one of the lowest cost is a stopgap.
//!
//! All are judged by the standing of the tick before, so that their order does not matter.

use rand::RngExt;

use super::load::FILLS;
use super::pace::IDLE_US;
use super::probes::{Judge, Now, LATE_US, LEAST_ANSWERS, WINDOW_US};
use super::{Mode, PathMasks, Policy, RECENT_US};
use crate::steer::explain::Cause;

/// The threshold is at least this share of the median, by which an overdue probe will be later still, and by which a lossy
/// path has to be worse than another lossy one, ...
const D_SHARE: f64 = 0.4;
/// ... and so many times the jitter.
const D_JITTER: f64 = 3.0;
/// Differences up to this share tell nothing.
pub(crate) const R_SHARE: f64 = 0.1;
/// Losses that weigh as much as the threshold, and as twice the tolerance: 1 % of losses is 5 ms at least.
pub(crate) const LOSS_SHARE: f64 = 0.02;
/// Time in which half of the onsets are forgotten, and half of the highest rate, µs.
pub(crate) const MEMORY_US: f64 = 120e6;
/// Patience after the first onset, µs, ...
const PATIENCE_US: f64 = 1e6;
/// ... by how much it grows with each, ...
const PATIENCE_GROWS: f64 = 4.0;
/// ... and its limit, µs.
const PATIENCE_MOST_US: f64 = 30e6;
/// Random part of patience, so that hosts do not change together.
const PATIENCE_RANDOM: f64 = 0.25;

/// What a group's paths are judged by, in µs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    pub m_us: f64,
    pub d_us: f64,
    pub r_us: f64,
}

/// Where a path stands in a group.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) enum Standing {
    #[default]
    In,
    /// Used as none was left. It may be left for any that is better.
    Stopgap,
    Out(Cause),
}

/// What is known of a member at a tick; delays in µs, with the configured cost.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct View {
    pub alive: bool,
    /// It can be compared with others.
    pub known: bool,
    pub now: Now,
    pub present_us: f64,
    /// ... and the age of its oldest unanswered probe: what can be relied on by those that come.
    pub sure_us: f64,
    pub cost_us: f64,
    pub median_us: f64,
    /// It is later than another path by more than d, ...
    pub late: bool,
    /// ... and than it was itself.
    pub sudden: bool,
}

/// That all paths of a group are used, as a single one does not carry what our latency flows send.
#[derive(Clone, Copy, Debug)]
pub struct Spread {
    /// The member that did not, ...
    crowded: usize,
    since_us: u64,
    /// ... and how late that made it, while it was on trial.
    worst_us: f64,
    until_us: u64,
    /// Another one turned out to be later still: it is not tried again before.
    over: bool,
}

/// A path within a group.
#[derive(Default)]
pub struct JudgedPath {
    pub path: usize,
    pub standing: Standing,
    pub view: View,
    pub(super) onsets: f64,
    pub(super) onsets_at_us: u64,
    /// Since when it has not been late (an onset is one only after as long as between two probes of an idle host); costs too much; been too long; and fit to join.
    pub(super) calm_since_us: Option<u64>,
    pub(super) dear_since_us: Option<u64>,
    pub(super) long_since_us: Option<u64>,
    pub fit_since_us: Option<u64>,
    /// Since when it is good enough for bulk flows: they may have a longer way, but neither losses nor surprises.
    pub(super) steady_since_us: Option<u64>,
    pub(super) random: f64,
    pub used: crate::steer::explain::Use,
}

impl JudgedPath {
    pub(crate) fn in_use(&self) -> bool {
        !matches!(self.standing, Standing::Out(_))
    }

    /// Onsets that are not forgotten.
    pub fn onsets(&self, now_us: u64) -> f64 {
        let passed_us = now_us.saturating_sub(self.onsets_at_us) as f64;
        self.onsets * (-passed_us / MEMORY_US).exp2()
    }

    /// Forgets onsets that were not the path's doing.
    pub(crate) fn forgive(&mut self) {
        self.onsets = 0.0;
    }

    fn onset(&mut self, now_us: u64) {
        self.onsets = self.onsets(now_us) + 1.0;
        self.onsets_at_us = now_us;
    }

    /// How long the path must be fit before it is used again, µs.
    pub(crate) fn patience_us(&self, now_us: u64) -> u64 {
        let grown = PATIENCE_US * PATIENCE_GROWS.powf(self.onsets(now_us) - 1.0);
        (grown.min(PATIENCE_MOST_US) * (1.0 + self.random)) as u64
    }
}

/// Since when something holds that holds now or does not.
fn since(before: Option<u64>, holds: bool, now_us: u64) -> Option<u64> {
    holds.then(|| before.unwrap_or(now_us))
}

fn lasts(since_us: Option<u64>, for_us: u64, now_us: u64) -> bool {
    since_us.is_some_and(|t| now_us >= t + for_us)
}

fn least(values: impl Iterator<Item = f64>) -> Option<f64> {
    values.min_by(f64::total_cmp)
}

impl Policy {
    /// Decides for one group.
    pub(super) fn decide(&mut self, g: usize, now_us: u64) -> PathMasks {
        self.groups[g].scale = self.scale(g);
        self.view(g, now_us);
        if self.mode == Mode::MinRtt {
            let v = self.lowest_median(g);
            self.record(g, v, now_us);
            return v;
        }
        if let Some(scale) = self.groups[g].scale {
            self.count_onsets(g, now_us);
            self.spread(g, &scale, now_us);
            self.stand(g, scale, now_us);
        }
        let need_bps = self.need(g, now_us);
        let mut v = self.masks(g, need_bps, now_us);
        if self.is_unknown(g, now_us) {
            (v.latency, v.bulk, v.ejected, v.full) = (0, 0, 0, 0);
        } else {
            self.record(g, v, now_us);
        }
        v
    }

    /// Whether a path has never answered though its link and next hop are there. It may carry packets all the same, and
    /// be the one that the kernel prefers: the kernel decides for the group.
    pub(in crate::steer) fn is_unknown(&self, g: usize, now_us: u64) -> bool {
        let mut paths = self.groups[g].members.iter().map(|m| &self.paths[m.path]);
        paths.any(|path| path.usable && !path.answered && path.waits_long(now_us))
    }

    /// `None` while no path in use has enough answers.
    fn scale(&self, g: usize) -> Option<Scale> {
        let members = self.groups[g].members.iter();
        let known = |m: &&JudgedPath| self.paths[m.path].slow.answers >= LEAST_ANSWERS;
        let slow = |m: &JudgedPath| self.paths[m.path].slow;
        let used = members.clone().filter(|m| m.in_use()).filter(known);
        let m_us = least(used.map(|m| slow(m).median_us))?;
        let jitter_us = least(members.clone().filter(known).map(|m| slow(m).jitter_us))?;
        // Two stopgaps that our flows make late in turn are not judged by the one that is empty just now.
        let stopgap = members.clone().any(|m| m.standing == Standing::Stopgap);
        let alive = members.filter(known).filter(|m| stopgap && m.view.alive);
        let long_us = alive.map(|m| slow(m).median_us).fold(m_us, f64::max);
        let d_us = self.tolerance_us.max(D_SHARE * long_us);
        Some(Scale {
            m_us,
            d_us: d_us.max(D_JITTER * jitter_us),
            r_us: (D_SHARE * self.tolerance_us).max(R_SHARE * m_us),
        })
    }

    /// Takes a look at each member.
    fn view(&mut self, g: usize, now_us: u64) {
        let scale = self.groups[g].scale;
        for i in 0..self.groups[g].members.len() {
            let member = &self.groups[g].members[i];
            let path = &self.paths[member.path];
            // Groups share paths, and few differ in scale: probes are gone through once for each. Those before are done.
            let same = self.groups[..g].iter().rev().filter(|h| h.scale == scale);
            let mut same = same.flat_map(|h| &h.members);
            let seen = same.find(|m| m.path == member.path);
            let slow = &path.slow;
            let scale = scale.unwrap_or(Scale {
                m_us: slow.median_us,
                d_us: f64::INFINITY,
                r_us: 0.0,
            });
            let judge = Judge {
                cap_us: scale.m_us + LATE_US as f64,
                median_us: slow.median_us,
                d_us: scale.d_us,
                overdue_us: D_SHARE * scale.m_us,
                unanswered_us: self.unanswered_us(path, now_us),
            };
            let now = seen.map_or_else(|| path.probes.now(now_us, &judge), |m| m.view.now);
            let limit_us = slow.median_us + IDLE_US as f64;
            let is_dead = member.view.known && !member.view.alive;
            let dark = match slow.answers {
                0 => path.answered && path.waits_long(now_us),
                // Until it answers, also while our own clock is in doubt.
                _ if is_dead => path.probes.waiting_us(now_us).1 > limit_us,
                _ => now.dark_us > limit_us,
            };
            let present_us = now.fast_us.max(now.late_us) + path.input.cost_us;
            let least_us = self.tolerance_us + self.tolerance_us;
            let loss_us = least_us.max(scale.d_us) * slow.loss / LOSS_SHARE;
            self.groups[g].members[i].view = View {
                alive: path.usable && !dark,
                known: path.usable && slow.answers >= LEAST_ANSWERS,
                now,
                present_us,
                sure_us: present_us.max(now.waiting_us + path.input.cost_us),
                cost_us: present_us + if slow.loss > 0.0 { loss_us } else { 0.0 },
                median_us: slow.median_us + path.input.cost_us,
                late: false,
                sudden: present_us > slow.median_us + path.input.cost_us + scale.d_us,
            };
        }
        let Some(scale) = scale else { return };
        let late: Vec<bool> = (0..self.groups[g].members.len())
            .map(|i| self.is_late(g, i, &scale))
            .collect();
        (self.groups[g].members.iter_mut().zip(late)).for_each(|(m, late)| m.view.late = late);
    }

    /// Up to which age a probe without an answer says nothing, µs: whatever its age while our own clock is in doubt.
    fn unanswered_us(&self, path: &super::Path, now_us: u64) -> f64 {
        let in_doubt = now_us < self.grace_until_us;
        [path.pace.unanswered_us(), f64::INFINITY][usize::from(in_doubt)]
    }

    /// Whether a path is later now than another by more than d. One that is out is an alternative to a stopgap,
    /// and to a path that has just become late: a path that is steady is not left for each bright moment of a
    /// shorter one that is dark half of the time.
    fn is_late(&self, g: usize, i: usize, scale: &Scale) -> bool {
        let members = &self.groups[g].members;
        let me = &members[i];
        let open = me.view.sudden || me.standing != Standing::In;
        let others = members
            .iter()
            .enumerate()
            .filter(|(j, m)| *j != i && m.view.known && m.view.alive && (m.in_use() || open));
        // When all turn late at once, the cause is common, and leaving one of them helps nobody.
        let best = least(others.map(|(_, m)| m.view.sure_us.max(m.view.cost_us)));
        best.is_some_and(|best| me.view.present_us > best + scale.d_us)
    }

    fn count_onsets(&mut self, g: usize, now_us: u64) {
        for m in &mut self.groups[g].members {
            let (late, usable) = (m.view.late && m.view.sudden, self.paths[m.path].usable);
            if late && lasts(m.calm_since_us, IDLE_US, now_us) {
                m.onset(now_us);
            }
            m.calm_since_us = since(m.calm_since_us, !late && usable, now_us);
        }
    }

    /// Uses all paths that are not late for a while, where one that others' flows have just come to is late for that:
    /// leaving together and returning together would go on for ever. First that one goes on alone for a moment: how
    /// late it becomes is what the others are worth. It ends where one of them turns out to be worse.
    fn spread(&mut self, g: usize, scale: &Scale, now_us: u64) {
        let group = &mut self.groups[g];
        let spread = group.spread.filter(|s| now_us < s.until_us);
        let left = group.left_us.is_some_and(|t| now_us < t + RECENT_US);
        let is_crowded = |m: &JudgedPath| m.in_use() && self.paths[m.path].load.is_crowded(now_us);
        let crowded = |m: &JudgedPath| m.view.sudden && is_crowded(m);
        let found = || group.members.iter().position(crowded).filter(|_| left);
        let until_us = now_us + PATIENCE_MOST_US as u64;
        let new = |crowded| Spread {
            crowded,
            since_us: now_us,
            worst_us: 0.0,
            until_us,
            over: false,
        };
        group.spread = spread.or_else(|| found().map(new));
        let Some(s) = &mut group.spread else { return };
        if group.members.iter().any(is_crowded) {
            s.until_us = until_us;
        }
        if now_us < s.since_us + IDLE_US {
            let crowded_us = group.members.get(s.crowded).map(|m| m.view.present_us);
            s.worst_us = s.worst_us.max(crowded_us.unwrap_or(0.0));
            return;
        }
        let worst_us = s.worst_us + scale.d_us;
        let worse = |m: &JudgedPath| {
            let worse = m.in_use() && m.view.present_us > worst_us;
            worse && lasts(m.dear_since_us, IDLE_US, now_us)
        };
        // Once all are back by their own patience, it is tried again.
        let all_back = group.members.iter().all(|m| m.in_use() || !m.view.alive);
        s.over = s.over && !all_back || group.members.iter().any(worse);
        if !s.over {
            let out = group.members.iter_mut().filter(|m| !m.in_use());
            let fit = out.filter(|m| m.view.alive && m.view.known && !m.view.late);
            fit.for_each(|m| m.standing = Standing::In);
        }
    }

    /// Whether a member is left for nothing as long as it is alive: it has never answered, flows are spread, or it is
    /// crowded and nothing else is as good.
    fn is_held(&self, g: usize, i: usize, now_us: u64) -> bool {
        let path = &self.paths[self.groups[g].members[i].path];
        let crowded = |s: Spread| s.crowded == i && path.load.is_crowded(now_us);
        let spread = self.groups[g].spread;
        !path.answered || spread.is_some_and(|s| !s.over || crowded(s))
    }

    /// Lets paths leave and join.
    fn stand(&mut self, g: usize, scale: Scale, now_us: u64) {
        let next: Vec<Standing> = (0..self.groups[g].members.len())
            .map(|i| self.next(g, i, &scale, now_us))
            .collect();
        for (i, next) in next.into_iter().enumerate() {
            let random = self.rng.random::<f64>() * PATIENCE_RANDOM;
            let m = &mut self.groups[g].members[i];
            if m.in_use() && matches!(next, Standing::Out(_)) {
                m.random = random;
                m.fit_since_us = None;
                self.groups[g].left_us = Some(now_us);
            }
            self.groups[g].members[i].standing = next;
        }
        let members = &mut self.groups[g].members;
        if members.iter().any(|m| m.in_use() && m.view.alive) {
            return;
        }
        // As long as none answers, the kernel decides; a path that was used goes on being so with it.
        let answering = members.iter_mut().filter(|m| m.view.alive && m.view.known);
        let best = answering.min_by(|a, b| a.view.cost_us.total_cmp(&b.view.cost_us));
        if let Some(best) = best {
            best.standing = Standing::Stopgap;
        }
    }

    fn next(&mut self, g: usize, i: usize, scale: &Scale, now_us: u64) -> Standing {
        let members = &self.groups[g].members;
        let me = &members[i];
        let others = members.iter().enumerate().filter(|(j, _)| *j != i);
        let others = others.map(|(_, m)| m);
        let answering = others.filter(|m| m.view.known && m.view.alive);
        let cheapest = answering
            .clone()
            .min_by(|a, b| a.view.cost_us.total_cmp(&b.view.cost_us));
        let least_cost = cheapest.map_or(f64::INFINITY, |m| m.view.cost_us);
        let shortest = least(answering.filter(|m| m.in_use()).map(|m| m.view.median_us));
        let shortest = shortest.unwrap_or(f64::INFINITY);
        let patience_us = cheapest.map_or(0, |m| m.patience_us(now_us));
        let v = me.view;
        let lost_us = cheapest.map_or(0.0, |m| m.view.cost_us - m.view.present_us);
        let dear = v.cost_us > least_cost + scale.d_us + D_SHARE * lost_us;
        let dear = since(me.dear_since_us, dear, now_us);
        let long = v.known && v.median_us > shortest + scale.r_us;
        let long = since(me.long_since_us, long, now_us);
        let answers = v.known && v.alive;
        let close = v.cost_us <= least_cost + scale.r_us && v.median_us <= shortest + scale.r_us;
        let fit = since(me.fit_since_us, answers && !v.late && close, now_us);
        let path = &self.paths[me.path];
        let near = path.input.cost_us == 0.0 && v.median_us <= shortest + LATE_US as f64;
        let sound = !v.sudden && v.cost_us - v.present_us <= scale.d_us;
        let steady = since(me.steady_since_us, answers && near && sound, now_us);
        let held = self.is_held(g, i, now_us);
        let left = match me.standing {
            _ if !path.usable => Some(Cause::Link),
            Standing::Out(cause) => Some(cause),
            _ if held && v.alive => None,
            _ if v.late && v.now.dark_us > v.now.fast_us => Some(Cause::Lost),
            _ if v.late => Some(Cause::Late),
            _ if lasts(dear, patience_us, now_us) => Some(Cause::Cost),
            _ if lasts(long, WINDOW_US, now_us) => Some(Cause::Long),
            _ => None,
        };
        let joins = lasts(fit, me.patience_us(now_us), now_us);
        let next = match (me.standing, left) {
            (Standing::Out(_) | Standing::Stopgap, _) if joins && path.usable => Standing::In,
            (_, Some(cause)) => Standing::Out(cause),
            (standing, None) => standing,
        };
        let m = &mut self.groups[g].members[i];
        (m.dear_since_us, m.long_since_us) = (dear, long);
        (m.fit_since_us, m.steady_since_us) = (fit, steady);
        next
    }

    /// What one of the paths in use carries at most, bit/s, while our flows want more than they do, and for the window
    /// after that. Only by configured capacities: a constant rate looks as if it filled a path of unknown capacity.
    fn need(&mut self, g: usize, now_us: u64) -> Option<f64> {
        let (paths, group) = (&self.paths, &mut self.groups[g]);
        let load = |m: &JudgedPath| &paths[m.path].load;
        let used = group.members.iter().filter(|m| m.in_use() && m.view.alive);
        let each: Vec<f64> = used.map(|m| load(m).capacity_bps).collect::<Option<_>>()?;
        let ours_bps: f64 = group.members.iter().map(|m| load(m).rate_bps).sum();
        if ours_bps >= FILLS * each.iter().sum::<f64>() {
            group.needed_us = Some(now_us);
        }
        group.needed_us.filter(|t| now_us < t + WINDOW_US)?;
        each.into_iter().reduce(f64::max)
    }

    fn masks(&self, g: usize, need_bps: Option<f64>, now_us: u64) -> PathMasks {
        let mut v = PathMasks::default();
        let (mut filled, mut joined, mut longer) = (0, 0, 0);
        let spread = self.groups[g].spread.is_some_and(|s| !s.over);
        for (i, m) in self.groups[g].members.iter().enumerate() {
            if !m.view.alive {
                continue;
            }
            let bit = |is: bool| u16::from(is) << i;
            v.alive |= bit(true);
            let load = &self.paths[m.path].load;
            v.latency |= bit(m.in_use());
            let is_good = m.standing == Standing::In || lasts(m.fit_since_us, WINDOW_US, now_us);
            joined |= bit(is_good);
            // On one that is thinner as well, a single flow would fare worse.
            let carries = |bps| load.capacity_bps.is_some_and(|own| own >= FILLS * bps);
            let is_needed = need_bps.is_some_and(carries);
            longer |= bit(is_needed && lasts(m.steady_since_us, WINDOW_US, now_us));
            filled |= bit(load.fills(now_us));
            // More flows have come to one that is crowded than it carries: each goes where its hash has it.
            let is_left = matches!(m.standing, Standing::Out(Cause::Late | Cause::Lost));
            v.ejected |= bit(spread && m.in_use() || is_left);
        }
        if v.latency == 0 {
            // Too little is known of those that answer: the kernel's choice among them.
            (v.latency, v.ejected) = (v.alive, 0);
        }
        // A stopgap is one for latency flows. It may carry little, and bulk flows have what they want elsewhere.
        // But beside a full path they do not wait for all of another's patience: a relapse costs them little. Nor do
        // they mind a longer way.
        v.bulk = longer | [v.latency, joined | filled][usize::from(filled != 0)];
        if v.bulk & !filled != 0 {
            // They may all have begun on one of them, while another was out.
            v.full = v.bulk & filled;
        }
        v
    }

    fn lowest_median(&self, g: usize) -> PathMasks {
        let members = self.groups[g].members.iter().enumerate();
        let alive = members.clone().filter(|(_, m)| m.view.alive);
        let mask = alive.clone().fold(0, |bits, (i, _)| bits | 1 << i);
        let known = alive.filter(|(_, m)| self.paths[m.path].slow.answers > 0);
        let lowest = known.min_by(|a, b| a.1.view.median_us.total_cmp(&b.1.view.median_us));
        let bits = lowest.map_or(mask, |(i, _)| 1 << i);
        PathMasks {
            latency: bits,
            bulk: bits,
            alive: mask,
            ..PathMasks::default()
        }
    }

    /// Which of a group's paths flows that start now may use: those in use whose newest probe is in time.
    /// Such a flow has nothing to lose elsewhere and can never leave, so one late probe is enough.
    /// Where none is left, any that delivers in time; else all in use. While too little is known of any, those that have
    /// answered since they are here.
    pub(crate) fn for_new_flows(&self, g: usize) -> u16 {
        let Some((v, group)) = self.verdict.groups.get(g).zip(self.groups.get(g)) else {
            return 0;
        };
        let bits = |test: &dyn Fn(&JudgedPath, &super::Path) -> bool| {
            let found = group.members.iter().map(|m| test(m, &self.paths[m.path]));
            found.rev().fold(0, |bits, is| bits << 1 | u16::from(is))
        };
        let (Some(now_us), Some(scale)) = (self.last_tick_us, group.scale) else {
            let heard = v.alive & bits(&|_, path| path.slow.answers > 0);
            return match v.alive & !heard & bits(&|_, path| !path.answered) {
                // Where nothing has answered, the kernel decides, unless what it takes may be known to be dead.
                0 if heard == 0 && bits(&|_, path| path.usable) & !v.alive != 0 => v.latency,
                0 => heard,
                // It may be the kernel's, and drop pings.
                _ => 0,
            };
        };
        if self.mode == Mode::MinRtt || self.is_unknown(g, now_us) {
            return v.latency;
        }
        let in_time = bits(&|_, path| {
            let limit_us = limit_us(&scale, path.slow.median_us);
            let newest = path.probes.answers().next().map_or(f64::INFINITY, |a| a.1);
            let waiting_us = path.probes.waiting_us(now_us).0;
            newest <= limit_us && waiting_us - self.unanswered_us(path, now_us) <= limit_us
        });
        // While none is good, they share all that are fit: the stopgap is kept for flows that would have to move.
        let fit = bits(&|m, _| m.fit_since_us.is_some());
        let fit = fit * u16::from(bits(&|m, _| m.standing == Standing::Stopgap) != 0);
        let choices = [(v.latency | fit) & in_time, v.alive & in_time];
        choices.into_iter().find(|c| *c != 0).unwrap_or(v.latency)
    }

    /// When a path turns late, unless its probe is answered before: the next moment at which
    /// [`Policy::for_new_flows`] may change. Of those that the last tick has not seen.
    pub(crate) fn next_late_us(&self) -> Option<u64> {
        let seen_us = self.last_tick_us?;
        let late_from = |g: &super::Group| {
            let scale = g.scale?;
            let each = g.members.iter().filter_map(|m| {
                let path = &self.paths[m.path];
                let answered = path.probes.answers().next()?.0.sent_us;
                let waiting = path.probes.newest().take_while(|p| p.sent_us > answered);
                let limit_us =
                    limit_us(&scale, path.slow.median_us) + path.probes.reverse_delay_us();
                Some(waiting.last()?.sent_us + limit_us as u64 + 1)
            });
            each.filter(|at_us| *at_us > seen_us).min()
        };
        self.groups.iter().filter_map(late_from).min()
    }
}

/// From which delay on a path is late to a flow that starts, µs.
fn limit_us(scale: &Scale, median_us: f64) -> f64 {
    scale.m_us.max(median_us.min(scale.m_us + scale.r_us)) + scale.d_us
}
