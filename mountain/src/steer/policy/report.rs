// SPDX-License-Identifier: GPL-2.0-or-later
//! What the policy says of itself: decisions with their grounds, outcomes, status.

use super::{GroupVerdict, Mode, Policy, BACK_AT, KNOWN};
use crate::steer::ejection::Cause;
use crate::steer::explain::{
    ms, p95, Decision, Grounds, Outcome, PathStatus, Use, JUDGED_AFTER_US,
};
use crate::steer::selfload::Load;
use crate::steer::window::Fate;

impl Policy {
    /// Logs what changed for each path.
    pub(super) fn record(&mut self, g: usize, v: GroupVerdict, now_us: u64) {
        for m in 0..self.groups[g].members.len() {
            let bit = 1 << m;
            let member = &self.groups[g].members[m];
            let to = match (v.latency & bit != 0, v.bulk & bit != 0) {
                (true, _) if self.groups[g].least_bad == Some(m) => Use::LeastBad,
                (true, _) => Use::All,
                (false, true) => Use::BulkOnly,
                (false, false) => Use::Nothing,
            };
            if to == member.used {
                continue;
            }
            let grounds = self.grounds(g, m, now_us);
            let why = self.why(g, m, to, &grounds, now_us);
            let path = member.path;
            self.log.push(Decision {
                at_us: now_us,
                path,
                name: self.paths[path].input.name.clone(),
                group: g,
                from: member.used,
                to,
                why,
                grounds,
                outcome: None,
            });
            self.groups[g].members[m].used = to;
        }
    }

    fn grounds(&self, g: usize, m: usize, now_us: u64) -> Grounds {
        let group = &self.groups[g];
        let member = &group.members[m];
        let path = &self.paths[member.path];
        let best = group.best.map(|b| &self.paths[b]);
        let best_cost = best.and_then(|b| b.cost(&self.weights, 1));
        Grounds {
            cause: match &member.out {
                Some(out) => Some(out.cause),
                None if !self.alive(member.path, now_us) => Some(Cause::Lost),
                None => None,
            },
            cost_us: path.cost(&self.weights, 1),
            best_cost_us: best_cost,
            best: best.map(|b| b.input.name.clone()),
            threshold_us: group.threshold_us,
            band_us: best_cost.map(|c| self.band.width_us(c)),
            p50_us: path.stats.p50_us,
            p95_us: path.stats.p95_us,
            loss: path.stats.loss,
            samples: path.stats.settled,
            latest_us: member.seen.latest_us.clone(),
            beyond: member.seen.beyond.len(),
            hold_us: member.out.as_ref().map(|o| o.hold_us),
            flaps: member.hold.flaps(),
            load: member.load.clone(),
        }
    }

    fn why(&self, g: usize, m: usize, to: Use, gr: &Grounds, now_us: u64) -> String {
        let name = &self.paths[self.groups[g].members[m].path].input.name;
        let silent_us = self.silent_us(g, m, now_us);
        let usable = self.paths[self.groups[g].members[m].path].usable;
        let costs = format!("{}, {}", own_cost(gr), best_cost(gr));
        if self.mode == Mode::MinRtt {
            return format!("min-rtt: median of {name} {}", ms(gr.p50_us));
        }
        let mut text = match (to, gr.cause) {
            (Use::LeastBad, _) => format!(
                "no path is good; {name} is the least bad now (latest {})",
                latest(&gr.latest_us)
            ),
            (Use::All, None) if gr.cost_us.is_some() && gr.best_cost_us.is_some() => {
                format!("{name} is good: {costs}")
            }
            (Use::All, None) => format!("{name} may be used: {costs}"),
            (_, Some(_)) if !usable => format!(
                "{name} is down: {}",
                self.paths[self.groups[g].members[m].path].why_unusable
            ),
            (_, Some(Cause::Link)) => format!("{name} was down and is held"),
            (_, Some(Cause::Lost | Cause::Late | Cause::Cost)) if silent_us.is_some() => format!(
                "{name} has not answered for {}",
                ms(silent_us.unwrap_or(0) as f64)
            ),
            (_, Some(Cause::Lost)) => format!("{name} had stopped answering"),
            (_, Some(Cause::Late)) if gr.beyond == 0 => format!("{name} was late"),
            (_, Some(Cause::Late)) => match (gr.threshold_us, &gr.best) {
                (Some(threshold), Some(best)) => format!(
                    "{} of the latest {} probes of {name} beyond {} (best path {best} plus band): {}",
                    gr.beyond,
                    gr.latest_us.len(),
                    ms(threshold),
                    latest(&gr.latest_us)
                ),
                _ => format!("{name} was left as late; {NO_YARDSTICK} now"),
            },
            (_, Some(Cause::Cost)) => format!(
                "{name} costs too much: {} (p50 {}, p95 {}, loss {:.1}%), {}{}",
                own_cost(gr),
                ms(gr.p50_us),
                ms(gr.p95_us),
                gr.loss * 100.0,
                best_cost(gr),
                gr.band_us.map_or(String::new(), |b| format!(" plus band {}", ms(b)))
            ),
            (_, None) => format!("{name} is not the best of what is left: {costs}"),
        };
        if let (Use::BulkOnly | Use::Nothing, Some(j), None) = (to, &gr.load, silent_us) {
            text += &format!(
                "; {} load: {} ({:.1} of {:.1} Mbit/s)",
                if j.load == Load::Own {
                    "own"
                } else {
                    "foreign"
                },
                j.why,
                j.rate_bps / 1e6,
                j.reference_bps / 1e6
            );
        }
        if to != Use::All {
            text += &self.awaited(g, m, gr, now_us);
        }
        text
    }

    /// What has to come true before a path that was left is used again: it must stay good for the
    /// hold, and its cost must have come down.
    fn awaited(&self, g: usize, m: usize, gr: &Grounds, now_us: u64) -> String {
        let Some(out) = &self.groups[g].members[m].out else {
            return String::new();
        };
        let seconds = |us: u64| us as f64 / 1e6;
        let flap = format!("(flap {})", gr.flaps);
        let limit_us = self
            .yardstick(g, now_us)
            .map(|(best, band)| best + BACK_AT * band);
        let dear = limit_us
            .zip(gr.cost_us)
            .filter(|(limit, cost)| cost > limit);
        let cost = dear.map(|(limit, cost)| {
            format!("its cost has to fall from {} to {}", ms(cost), ms(limit))
        });
        match (out.remaining_us(now_us), cost) {
            (None, _) => format!(
                "; back when it has been good for {:.1} s and its cost is near the best {flap}",
                seconds(out.hold_us)
            ),
            (Some(0), Some(cost)) => format!("; good again, but {cost} {flap}"),
            (Some(left), Some(cost)) => format!(
                "; good again: back in {:.1} s at the earliest, {cost} {flap}",
                seconds(left)
            ),
            (Some(left), None) => format!(
                "; good again: back in {:.1} s if it stays so {flap}",
                seconds(left)
            ),
        }
    }

    /// How long a path has been silent, if nothing but silence speaks against it: the probes that
    /// are too late have no answer. Whose load delays a path says nothing about such a one.
    fn silent_us(&self, g: usize, m: usize, now_us: u64) -> Option<u64> {
        let member = &self.groups[g].members[m];
        let window = &self.paths[member.path].window;
        let unanswered = |seq: &u64| {
            let fate = window.get(*seq).map(|probe| probe.fate);
            !matches!(fate, Some(Fate::Answered { .. }))
        };
        let beyond = &member.seen.beyond;
        let silent = !beyond.is_empty() && beyond.iter().all(unanswered);
        let since = window.waiting_since().filter(|_| silent)?;
        Some(now_us.saturating_sub(since))
    }

    /// Compares, two seconds after a decision, the path with the others.
    pub(super) fn judge_outcomes(&mut self, now_us: u64) {
        for d in self.log.due(now_us) {
            let (from, to) = (d.at_us, d.at_us + JUDGED_AFTER_US);
            let after = |path: usize| p95(self.paths[path].window.between(from, to).collect());
            let path_p95_us = after(d.path);
            let others_p95_us = self.groups[d.group]
                .members
                .iter()
                .filter(|m| m.path != d.path && self.paths[m.path].usable)
                .filter_map(|m| after(m.path))
                .min_by(f64::total_cmp);
            let usable = self.paths[d.path].usable;
            let right = match (path_p95_us, others_p95_us) {
                (Some(p), Some(o)) => {
                    let worse = p > o + self.band.width_us(o);
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

    /// State of every path in every group.
    pub fn status(&self, now_us: u64) -> Vec<PathStatus> {
        let mut all = Vec::new();
        for (g, group) in self.groups.iter().enumerate() {
            for (m, member) in group.members.iter().enumerate() {
                let path = &self.paths[member.path];
                let gr = self.grounds(g, m, now_us);
                let state = match &member.out {
                    _ if !self.alive(member.path, now_us) => "dead",
                    Some(out) if out.good_since_us.is_some() => "held",
                    Some(_) => "ejected",
                    None if path.stats.settled < KNOWN => "unknown",
                    None => "good",
                };
                all.push(PathStatus {
                    path: member.path,
                    name: path.input.name.clone(),
                    group: g,
                    state,
                    used_for: member.used,
                    cost_us: gr.cost_us,
                    p50_us: gr.p50_us,
                    p95_us: gr.p95_us,
                    loss: gr.loss,
                    samples: gr.samples,
                    reason: self.why(g, m, member.used, &gr, now_us),
                    hold_remaining_us: member.out.as_ref().and_then(|o| o.remaining_us(now_us)),
                    flaps: gr.flaps,
                    load: match self.silent_us(g, m, now_us) {
                        Some(_) => None,
                        None => member.load.as_ref().map(|l| l.load),
                    },
                });
            }
        }
        all
    }
}

const NO_YARDSTICK: &str = "no path has 20 probes to compare with";

/// The path's cost, or why none is known.
fn own_cost(gr: &Grounds) -> String {
    match (gr.cost_us, gr.samples) {
        (Some(us), _) => format!("cost {}", ms(us)),
        (None, 0) => "cost not known yet (no probe so far)".into(),
        (None, n) => format!("cost not known (none of {n} probes answered)"),
    }
}

fn best_cost(gr: &Grounds) -> String {
    gr.best_cost_us
        .map_or(NO_YARDSTICK.into(), |us| format!("best {}", ms(us)))
}

/// "20.1, 55.0, lost ms", newest first.
fn latest(probes: &[Option<u64>]) -> String {
    if probes.is_empty() {
        return "no probe".into();
    }
    let texts: Vec<String> = probes
        .iter()
        .map(|p| p.map_or("lost".into(), |us| format!("{:.1}", us as f64 / 1000.0)))
        .collect();
    format!("{} ms", texts.join(", "))
}
