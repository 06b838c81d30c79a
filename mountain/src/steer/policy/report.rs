// SPDX-License-Identifier: GPL-2.0-or-later
//! What the policy says of itself: decisions with their grounds, outcomes, status.

use super::probes::{Fate, Probe, LEAST_ANSWERS, WINDOW_US};
use super::rule::{JudgedPath, Standing};
use super::{Group, Mode, Path, PathMasks, Policy};
use crate::steer::explain::{
    ms, p95, Cause, Decision, Grounds, Load, Outcome, PathInGroup, Use, JUDGED_AFTER_US, SILENT,
};

/// Probes that a decision names.
const NAMED: usize = 2;
/// Less than this would read as 0.0 Mbit/s.
const LITTLE_BPS: f64 = 50e3;

impl Policy {
    /// A baseline does not go by where a path stands.
    fn is_stopgap(&self, member: &JudgedPath) -> bool {
        self.mode != Mode::MinRtt && member.standing == Standing::Stopgap
    }

    /// Logs what changed for each path.
    pub(super) fn record(&mut self, g: usize, v: PathMasks, now_us: u64) {
        for m in 0..self.groups[g].members.len() {
            let bit = 1 << m;
            let member = &self.groups[g].members[m];
            let to = match (v.latency & bit != 0, v.bulk & bit != 0) {
                (true, _) if self.is_stopgap(member) => Use::LeastBad,
                (true, _) => Use::All,
                (false, true) => Use::BulkOnly,
                (false, false) => Use::Nothing,
            };
            let from = member.used;
            if to == from {
                continue;
            }
            let path = member.path;
            let grounds = self.grounds(g, m, now_us);
            let decision = Decision {
                at_us: now_us,
                path,
                name: self.paths[path].input.name.clone(),
                group: g,
                prefix: None,
                from,
                to,
                why: self.why(g, m, to, &grounds, now_us),
                not_carried_out: None,
                grounds,
                outcome: None,
            };
            self.log.push(decision);
            self.groups[g].members[m].used = to;
        }
    }

    fn grounds(&self, g: usize, m: usize, now_us: u64) -> Grounds {
        let group = &self.groups[g];
        let member = &group.members[m];
        let path = &self.paths[member.path];
        let known = |us: f64| (path.slow.answers > 0).then_some(us);
        let others = group.members.iter().enumerate().filter(|(i, _)| *i != m);
        let answering = others
            .map(|(_, o)| o)
            .filter(|o| o.view.known && o.view.alive);
        let best = answering.min_by(|a, b| a.view.present_us.total_cmp(&b.view.present_us));
        let late = matches!(member.standing, Standing::Out(Cause::Late));
        Grounds {
            cause: match member.standing {
                Standing::Out(cause) => Some(cause),
                _ if !member.view.alive && self.last_tick_us.is_some() => Some(Cause::Lost),
                _ => None,
            },
            present_us: known(member.view.present_us),
            cost_us: known(member.view.cost_us),
            median_us: member.view.median_us,
            best: best.map(|b| self.paths[b.path].input.name.clone()),
            best_present_us: best.map(|b| b.view.present_us),
            best_cost_us: best.map(|b| b.view.cost_us),
            best_median_us: best.map(|b| b.view.median_us),
            threshold_us: group.scale.map(|s| s.d_us),
            loss: path.slow.loss,
            samples: path
                .probes
                .newest()
                .filter(|p| p.fate != Fate::Waiting)
                .count(),
            latest_us: newest(path, now_us),
            patience_us: member.patience_us(now_us),
            onsets: member.onsets(now_us),
            load: late.then(|| match path.load.fills(now_us) {
                true => Load::Own,
                false => Load::Foreign,
            }),
        }
    }

    fn why(&self, g: usize, m: usize, to: Use, gr: &Grounds, now_us: u64) -> String {
        let member = &self.groups[g].members[m];
        let path = &self.paths[member.path];
        let name = &path.input.name;
        if self.mode == Mode::MinRtt {
            return format!("min-rtt: median of {name} {}", ms(gr.median_us));
        }
        let latest = latest(&gr.latest_us);
        let (silent_us, _) = path.probes.waiting_us(now_us);
        let best = gr.best.as_deref().unwrap_or("any other path");
        let more = |mine: Option<f64>, best: Option<f64>| {
            ms((mine.unwrap_or(0.0) - best.unwrap_or(0.0)).max(0.0))
        };
        let cost_us = path.input.cost_us;
        let with_cost = match cost_us > 0.0 {
            true => format!("with its cost of {} ", ms(cost_us)),
            false => String::new(),
        };
        let average = ms(gr.median_us - cost_us);
        let is_reserve = self.is_reserve(g, m, gr);
        let steady = member
            .steady_since_us
            .filter(|_| path.load.capacity_bps.is_some());
        let is_steady = steady.is_some_and(|t| now_us >= t + WINDOW_US);
        let mut text = match (to, gr.cause) {
            (_, Some(Cause::Late | Cause::Cost | Cause::Long)) if is_reserve => format!(
                "{name} is a reserve: {with_cost}it takes {} more than {best}; {latest}",
                more(gr.cost_us, gr.best_cost_us)
            ),
            (Use::BulkOnly, Some(Cause::Late | Cause::Cost | Cause::Long)) if is_steady => {
                format!("{name} is longer, but takes bulk flows: they fill {best}; {latest}")
            }
            (Use::LeastBad, _) => format!("no path is good; {name} is the least bad now: {latest}"),
            _ if !path.usable => format!("{name} is down: {}", path.why_unusable),
            (Use::All, Some(_)) if matches!(member.standing, Standing::Out(_)) => {
                format!("no path is known to be good: the kernel decides among those that answer, as {name}")
            }
            (_, Some(Cause::Lost)) if silent_us > 0.0 => {
                format!("{name} has not answered for {}", ms(silent_us))
            }
            (_, Some(Cause::Lost)) => format!("{name} had stopped answering; {latest}"),
            (_, Some(Cause::Late)) if member.view.late && gr.present_us.is_none() => {
                format!("left {name}: it had not answered until now; {latest}")
            }
            (_, Some(Cause::Late)) if member.view.late => format!(
                "left {name}: {latest}, {with_cost}{} more than {best}; {name} had averaged {average}",
                more(gr.present_us, gr.best_present_us)
            ),
            (_, Some(Cause::Late)) => format!("{name} was late; {latest}"),
            (_, Some(Cause::Link)) => format!("{name} was down; {latest}"),
            (_, Some(Cause::Cost)) if gr.loss == 0.0 => format!(
                "left {name}: {latest}, {with_cost}{} more than {best}",
                more(gr.cost_us, gr.best_cost_us)
            ),
            (_, Some(Cause::Cost)) => format!(
                "left {name}: with {:.1} % of losses it costs {}, {} more than {best}",
                gr.loss * 100.0,
                ms(gr.cost_us.unwrap_or(0.0)),
                more(gr.cost_us, gr.best_cost_us)
            ),
            (_, Some(Cause::Long)) => format!(
                "left {name}: it has averaged {average} for 10 s, {with_cost}{} more than {best}",
                more(Some(gr.median_us), gr.best_median_us)
            ),
            (_, None) if self.is_unknown(g, now_us) => match path.answered {
                true => format!("{name} is left to the kernel: another path has never answered"),
                false => format!("{name} has never answered: the kernel decides"),
            },
            (_, None) if gr.samples == 0 => format!("{name} may be used: no probe so far"),
            (_, None) if path.slow.answers < LEAST_ANSWERS => {
                format!("{name} may be used: {} answers so far", path.slow.answers)
            }
            (_, None) => format!("{name} is good: {latest}, on average {average}"),
        };
        let load = gr
            .load
            .filter(|_| !(is_reserve || to == Use::BulkOnly && is_steady));
        if let (Use::BulkOnly | Use::Nothing, Some(load)) = (to, load) {
            let rate = format!(
                "{:.1} of {:.1} Mbit/s",
                path.load.rate_bps / 1e6,
                path.load.reference_bps() / 1e6
            );
            text += &match load {
                Load::Own => format!("; own load: our traffic fills it ({rate})"),
                Load::Foreign if path.load.rate_bps < LITTLE_BPS => {
                    "; foreign load: hardly any traffic of ours is on it".to_owned()
                }
                Load::Foreign => format!("; foreign load: our traffic does not fill it ({rate})"),
            };
        }
        if let (Standing::Out(_), Some(_), false) = (member.standing, gr.cause, to == Use::All) {
            text += &self.awaited(m, g, gr, now_us);
        }
        text
    }

    /// Whether a path is out as it costs more than the threshold by configuration alone, and is neither lossy nor late by its
    /// own standards.
    fn is_reserve(&self, g: usize, m: usize, gr: &Grounds) -> bool {
        let member = &self.groups[g].members[m];
        let JudgedPath { standing, view, .. } = member;
        let configured_us = self.paths[member.path].input.cost_us;
        let is_well =
            |d_us| configured_us > d_us && !view.sudden && view.cost_us - view.present_us <= d_us;
        let is_out = matches!(standing, Standing::Out(_)) && view.alive;
        is_out && gr.threshold_us.is_some_and(is_well)
    }

    /// What has to come true before a path that was left is used again.
    fn awaited(&self, m: usize, g: usize, gr: &Grounds, now_us: u64) -> String {
        let seconds = |us: u64| us as f64 / 1e6;
        match self.patience_left_us(g, m, now_us) {
            Some(left) => format!(
                "; good again: back in {:.1} s if it stays so",
                seconds(left)
            ),
            None => format!(
                "; back when it has been as good as {} for {:.1} s ({:.1} onsets lately)",
                gr.best.as_deref().unwrap_or("others"),
                seconds(gr.patience_us),
                gr.onsets
            ),
        }
    }

    fn patience_left_us(&self, g: usize, m: usize, now_us: u64) -> Option<u64> {
        let member = &self.groups[g].members[m];
        let out = matches!(member.standing, Standing::Out(_));
        let since = member.fit_since_us.filter(|_| out)?;
        Some((since + member.patience_us(now_us)).saturating_sub(now_us))
    }

    /// The last decisions, oldest first.
    pub fn decisions(&self) -> impl Iterator<Item = &Decision> {
        self.log.iter()
    }

    /// The decisions after a time, oldest first, to add what the policy does not know.
    pub(crate) fn decisions_since(&mut self, at_us: u64) -> impl Iterator<Item = &mut Decision> {
        self.log.since(at_us)
    }

    /// Compares, two seconds after a decision, the path with the others.
    pub(super) fn judge_outcomes(&mut self, now_us: u64) {
        for d in self.log.due(now_us) {
            // The routes may have changed since: the group or the path may be gone.
            let is_in = |group: &&Group| group.members.iter().any(|m| m.path == d.path);
            let Some(group) = self.groups.get(d.group).filter(is_in) else {
                d.outcome = Some(Outcome::default());
                continue;
            };
            let (from, to) = (d.at_us, d.at_us + JUDGED_AFTER_US);
            let after = |path: usize| {
                let path = &self.paths[path];
                // A limit that is tried out takes probes for which the path is not to blame.
                let tries_limit = path.pace.unanswered_us() > 0.0;
                let probes = path.probes.newest();
                let sent = probes.filter(|p| (from..to).contains(&p.sent_us));
                let counted =
                    sent.filter(|p| !tries_limit || matches!(p.fate, Fate::Answered { .. }));
                let p95_us = p95(counted.map(|p| delay_or_age(p, now_us)).collect())?;
                Some(p95_us + path.input.cost_us)
            };
            let path_p95_us = after(d.path);
            let others = group.members.iter().map(|m| m.path);
            let others_p95_us = others
                .filter(|path| *path != d.path && self.paths[*path].usable)
                .filter_map(after)
                .min_by(f64::total_cmp);
            let usable = self.paths[d.path].usable;
            let clear_us = group.scale.map_or(0.0, |s| s.r_us);
            let right = match (path_p95_us, others_p95_us) {
                (Some(p), Some(o)) => {
                    let worse = p > o + clear_us;
                    Some(worse != matches!(d.to, Use::All | Use::LeastBad))
                }
                (None, Some(_)) if !usable => Some(d.to == Use::Nothing),
                _ => None,
            };
            d.outcome = Some(Outcome {
                path_p95_us,
                others_p95_us,
                right,
            });
        }
    }

    /// Whether a probe of a path was ever answered.
    pub(crate) fn has_answered(&self, path: usize) -> bool {
        self.paths.get(path).is_some_and(|p| p.answered)
    }

    /// State of every path in every group.
    pub fn status(&self, now_us: u64) -> Vec<PathInGroup> {
        let groups = self.groups.iter().enumerate();
        let members = groups.flat_map(|(g, group)| (0..group.members.len()).map(move |m| (g, m)));
        members
            .map(|(g, m)| self.path_status(g, m, now_us))
            .collect()
    }

    /// How many probes a second the target of a path answers at most, where that is known to be too few.
    pub(in crate::steer) fn answer_limit_hz(&self, path: usize) -> Option<f64> {
        let pace = &self.paths[path].pace;
        let is_known = pace.trial.is_none() && pace.limit_us > 0;
        is_known.then(|| 1e6 / pace.limit_us as f64)
    }

    fn path_status(&self, g: usize, m: usize, now_us: u64) -> PathInGroup {
        let member: &JudgedPath = &self.groups[g].members[m];
        let path = &self.paths[member.path];
        let gr = self.grounds(g, m, now_us);
        let delays = path.probes.answers().map(|(_, us)| us as u64).collect();
        let answer_limit_hz = self.answer_limit_hz(member.path);
        let mut reason = self.why(g, m, member.used, &gr, now_us);
        if let Some(hz) = answer_limit_hz {
            reason += &format!("; its target limits answers: probed {hz:.1} times a second");
        }
        PathInGroup {
            path: member.path,
            name: path.input.name.clone(),
            group: g,
            state: match member.standing {
                _ if !member.view.alive && self.last_tick_us.is_some() => "dead",
                Standing::Out(_) if member.fit_since_us.is_some() => "held",
                _ if self.is_reserve(g, m, &gr) => "reserve",
                Standing::Out(_) => "ejected",
                _ if self.is_stopgap(member) => "least bad",
                _ if !path.answered && self.is_unknown(g, now_us) => SILENT,
                _ if path.slow.answers < LEAST_ANSWERS => "unknown",
                _ => "good",
            },
            used_for: member.used,
            cost_us: gr.cost_us,
            p50_us: (path.slow.answers > 0).then_some(path.slow.median_us),
            p95_us: p95(delays),
            loss: gr.loss,
            samples: gr.samples,
            reason,
            patience_left_us: self.patience_left_us(g, m, now_us),
            onsets: gr.onsets,
            answer_limit_hz,
            load: gr.load,
        }
    }
}

/// What the newest probes show that say anything, newest first: delay, or `None` for one that is lost.
fn newest(path: &Path, now_us: u64) -> Vec<Option<u64>> {
    let lost_us = path.probes.lost_age_us(path.slow.median_us);
    let delays = path.probes.newest().filter_map(|p| match p.fate {
        Fate::Answered { delay_us, .. } => Some(Some(u64::from(delay_us))),
        Fate::Failed => Some(None),
        Fate::Waiting => (now_us.saturating_sub(p.sent_us) as f64 > lost_us).then_some(None),
    });
    delays.take(NAMED).collect()
}

fn delay_or_age(p: &Probe, now_us: u64) -> u64 {
    match p.fate {
        Fate::Answered { delay_us, .. } => delay_us.into(),
        _ => now_us.saturating_sub(p.sent_us),
    }
}

/// "its last two probes took 20.1 and 55.0 ms".
fn latest(probes: &[Option<u64>]) -> String {
    let one = |p: &Option<u64>| p.map_or("lost".into(), |us| format!("{:.1} ms", us as f64 / 1e3));
    match probes {
        [] => "no probe was answered".into(),
        [one_us] => format!("its last probe: {}", one(one_us)),
        [newest, before, ..] => format!("its last two probes: {} and {}", one(before), one(newest)),
    }
}
