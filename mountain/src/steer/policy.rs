// SPDX-License-Identifier: GPL-2.0-or-later
//! Which paths each class of flows may use: a pure function of the events fed to it.
//!
//! Nothing here reads a clock or touches the system; times are µs of one monotonic clock. The
//! rules and their constants are described in docs/steering.md.

use rand::rngs::StdRng;
use rand::SeedableRng;
use serde::Serialize;

use super::cost::{cost_us, Band, Weights};
use super::ejection::{evidence, Cause, Evidence, Hold, Out};
use super::explain::{Decision, Log, Use};
use super::selfload::{Judgement, SelfLoad};
use super::window::{Stats, Window};
use crate::config::SteerConfig;
use crate::topology::MAX_GROUP_PATHS;

mod blame;
mod choose;
mod probing;
mod report;

/// Probes before which a path is neither good nor bad.
const KNOWN: usize = 5;
/// Probes before which a path is no yardstick for others.
const YARDSTICK: usize = 20;
/// Probes before which its cost is not held against a path.
const COSTED: usize = 20;
/// Without a tick for longer than this our own clock (or scheduling) is in doubt ...
const HICCUP_US: u64 = 100_000;
/// ... and for this long after, ages of unanswered probes say nothing.
const GRACE_US: u64 = 50_000;
/// A path that lost its latest probes is dead when nothing was answered for this long.
const DEAD_US: u64 = 500_000;
/// A path must cost too much for this long: cost is the slow signal, and while a common cause
/// makes all paths dearer they do not all do so at the same tick.
const COSTLY_US: u64 = 500_000;
/// A path that was left comes back only when its cost exceeds the best by at most this share of the
/// band, so that it does not leave again at once.
const BACK_AT: f64 = 0.5;
/// How far back the largest delay counts for the flowlet gap.
const RECENT_US: u64 = 3_000_000;
/// An ejection can be taken back by late answers for this long.
const REFUTABLE_US: u64 = 5_000_000;

/// What is known beforehand of a path; its index is the path's id.
#[derive(Clone, Debug, PartialEq)]
pub struct PathInput {
    pub name: String,
    /// Handicap in µs of cost.
    pub power_cost_us: f64,
    /// What it can carry, in bit/s.
    pub capacity_bps: Option<u64>,
}

/// What happened, in order of time. `seq` numbers a path's probes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event {
    Sent {
        path: usize,
        seq: u64,
        at_us: u64,
    },
    /// `delay_us` is what is judged: the forward delay where a reflector tells it apart (smallest
    /// RTT plus forward variation), else the RTT.
    Answered {
        path: usize,
        seq: u64,
        at_us: u64,
        rtt_us: u32,
        delay_us: u32,
    },
    /// A probe could not be sent: counts as lost at once.
    SendFailed {
        path: usize,
        seq: u64,
        at_us: u64,
    },
    /// Carrier, neighbour or next hop came or went.
    Usable {
        path: usize,
        at_us: u64,
        usable: bool,
        why: &'static str,
    },
    /// Our own egress rate on the path, about every 100 ms, in bit/s.
    Egress {
        path: usize,
        at_us: u64,
        rate_bps: f64,
    },
    /// New flows that were placed on the path since the last such event; about every 100 ms.
    Placed {
        path: usize,
        at_us: u64,
        flows: u64,
    },
}

/// What is optimised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// All of the rules.
    #[default]
    Mountain,
    /// Baseline: the path with the lowest median alone, without hysteresis.
    MinRtt,
}

/// Which of a group's paths each class may use; bit i is the group's i-th path. 0: no path is
/// known good, the kernel decides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GroupVerdict {
    pub latency: u16,
    pub bulk: u16,
    /// Paths that deliver at all; flows leave the others at once.
    pub alive: u16,
    /// Paths whose latest probes were late or lost: latency flows leave them at once, since a late
    /// packet is a lost packet to them. Paths that are merely dear are left without reordering.
    pub ejected: u16,
}

/// One [`GroupVerdict`] per group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Verdict {
    pub groups: Vec<GroupVerdict>,
}

/// What the flowlet gap is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PathDelays {
    /// Largest delay of the last seconds, unanswered probes included; 0 when nothing is known.
    pub recent_max_us: u64,
    /// Smallest delay within the window; 0 when nothing is known.
    pub min_us: u64,
}

struct Path {
    input: PathInput,
    /// The probes at the pace of [`Policy::pace_us`], by which the path is judged.
    window: Window,
    /// When the last of these was sent.
    counted_us: Option<u64>,
    /// These and those sent in between while flows start, which only say how the path is now.
    latest: Window,
    /// Flows that start on it, 1/s, as of a time.
    starts_hz: f64,
    starts_at_us: u64,
    stats: Stats,
    dirty: bool,
    stats_at_us: u64,
    usable: bool,
    why_unusable: &'static str,
    last_answer_us: Option<u64>,
    load: SelfLoad,
}

impl Path {
    fn new(cfg: &SteerConfig, input: PathInput) -> Self {
        let window = Window::new(
            cfg.window_us(),
            cfg.half_life_us(),
            u64::from(cfg.lost_min_ms) * 1000,
        );
        Path {
            load: SelfLoad::new(input.capacity_bps),
            input,
            latest: window.clone(),
            window,
            counted_us: None,
            starts_hz: 0.0,
            starts_at_us: 0,
            stats: Stats::default(),
            dirty: false,
            stats_at_us: 0,
            usable: true,
            why_unusable: "",
            last_answer_us: None,
        }
    }

    /// Cost, once there are `least` probes.
    fn cost(&self, w: &Weights, least: usize) -> Option<f64> {
        let s = &self.stats;
        (s.settled >= least && s.answered > 0)
            .then(|| cost_us(w, s.p50_us, s.p95_us, s.loss, self.input.power_cost_us))
    }

    /// Delivers as far as we know.
    fn alive(&self, now_us: u64, lost_in_row: usize) -> bool {
        if !self.usable || (self.stats.answered == 0 && self.stats.lost > 0) {
            return false;
        }
        let silent = self
            .last_answer_us
            .is_none_or(|t| now_us.saturating_sub(t) >= DEAD_US);
        !(silent && self.window.lost_in_row() >= lost_in_row)
    }

    /// Delay a packet sent now would meet as far as we know; `u64::MAX` when we know nothing.
    fn present_us(&self, now_us: u64) -> u64 {
        match self.window.present(now_us) {
            (Some(delay), waiting) => delay.max(waiting),
            (None, _) => u64::MAX,
        }
    }
}

/// One rise of a path's delay.
struct Episode {
    /// When it was noticed.
    began_us: u64,
    /// When it was last said whose doing it is.
    judged_us: u64,
    onset_us: u64,
    /// How much the delay leapt from one probe to the next.
    jump_us: u64,
}

/// A path within a group.
struct Member {
    path: usize,
    out: Option<Out>,
    /// Since when it costs more than the best path plus the band.
    costly_since_us: Option<u64>,
    /// Too many of the latest probes beyond; stays until at most a third as many are.
    bad: bool,
    /// When it was bad last; 0: never.
    bad_until_us: u64,
    /// Its newest probe is beyond.
    late: bool,
    hold: Hold,
    load: Option<Judgement>,
    /// The rise of the delay that `load` is about.
    episode: Option<Episode>,
    seen: Evidence,
    used: Use,
}

struct Group {
    members: Vec<Member>,
    /// The member used while none is eligible.
    least_bad: Option<usize>,
    /// Yardstick of the last evaluation.
    best: Option<usize>,
    threshold_us: Option<f64>,
}

/// The decisions of one host.
pub struct Policy {
    cfg: SteerConfig,
    weights: Weights,
    band: Band,
    paths: Vec<Path>,
    groups: Vec<Group>,
    mode: Mode,
    rng: StdRng,
    verdict: Verdict,
    log: Log,
    last_tick_us: Option<u64>,
    grace_until_us: u64,
}

impl Policy {
    /// `groups`: the path ids of each group, at most [`MAX_GROUP_PATHS`] of them. The same seed
    /// and events give the same decisions.
    pub fn new(
        cfg: &SteerConfig,
        groups: Vec<Vec<usize>>,
        paths: Vec<PathInput>,
        seed: u64,
    ) -> Self {
        let mut policy = Policy {
            weights: cfg.weights(),
            band: cfg.band(),
            cfg: cfg.clone(),
            paths: Vec::new(),
            groups: Vec::new(),
            mode: Mode::Mountain,
            rng: StdRng::seed_from_u64(seed),
            verdict: Verdict::default(),
            log: Log::default(),
            last_tick_us: None,
            grace_until_us: 0,
        };
        policy.set_topology(groups, paths);
        policy
    }

    /// Other groups and paths from now on. A path keeps what was measured when its id and name are
    /// the same as before, and its standing in a group when it was in one.
    pub fn set_topology(&mut self, groups: Vec<Vec<usize>>, paths: Vec<PathInput>) {
        let mut known: Vec<Option<Path>> = self.paths.drain(..).map(Some).collect();
        self.paths = paths
            .into_iter()
            .enumerate()
            .map(
                |(id, input)| match known.get_mut(id).and_then(Option::take) {
                    Some(path) if path.input == input => path,
                    _ => Path::new(&self.cfg, input),
                },
            )
            .collect();
        let mut members: Vec<Member> = std::mem::take(&mut self.groups)
            .into_iter()
            .flat_map(|g| g.members)
            .collect();
        let hold = Hold::new(self.cfg.hold_us(), self.cfg.hold_spread_percent / 100.0);
        self.groups = groups
            .into_iter()
            .map(|ids| Group {
                members: ids
                    .into_iter()
                    .take(MAX_GROUP_PATHS)
                    .map(|path| match members.iter().position(|m| m.path == path) {
                        Some(at) => members.swap_remove(at),
                        None => Member {
                            path,
                            out: None,
                            costly_since_us: None,
                            bad: false,
                            bad_until_us: 0,
                            late: false,
                            hold: hold.clone(),
                            load: None,
                            episode: None,
                            seen: Evidence::default(),
                            used: Use::All,
                        },
                    })
                    .collect(),
                least_bad: None,
                best: None,
                threshold_us: None,
            })
            .collect();
        let all = |g: &Group| ((1u32 << g.members.len()) - 1) as u16;
        self.verdict.groups = self
            .groups
            .iter()
            .map(|g| GroupVerdict {
                latency: all(g),
                bulk: all(g),
                alive: all(g),
                ejected: 0,
            })
            .collect();
    }

    /// Takes in what happened. Events of unknown paths are ignored.
    pub fn event(&mut self, e: Event) {
        let (Event::Sent { path, .. }
        | Event::Answered { path, .. }
        | Event::SendFailed { path, .. }
        | Event::Usable { path, .. }
        | Event::Egress { path, .. }
        | Event::Placed { path, .. }) = e;
        let (pace, interval) = (self.pace_us(path), self.probe_interval_us(path));
        let Some(p) = self.paths.get_mut(path) else {
            return;
        };
        // Those that are sent in between do not count: three late ones are to say as much as ever.
        let counts = |p: &Path, at_us: u64| {
            p.counted_us
                .is_none_or(|last| at_us + interval / 2 >= last + pace)
        };
        match e {
            Event::Sent { seq, at_us, .. } => {
                p.latest.sent(seq, at_us);
                if counts(p, at_us) {
                    p.counted_us = Some(at_us);
                    p.window.sent(seq, at_us);
                }
                return;
            }
            Event::Answered {
                seq,
                at_us,
                rtt_us,
                delay_us,
                ..
            } => {
                if p.latest.answered(seq, rtt_us, delay_us) {
                    p.last_answer_us = Some(p.last_answer_us.map_or(at_us, |t| t.max(at_us)));
                }
                if !p.window.answered(seq, rtt_us, delay_us) {
                    return;
                }
            }
            Event::SendFailed { seq, at_us, .. } => {
                p.latest.failed(seq, at_us);
                if p.window.get(seq).is_none() && !counts(p, at_us) {
                    return;
                }
                p.counted_us = Some(at_us);
                p.window.failed(seq, at_us);
            }
            Event::Usable { usable, why, .. } => {
                if p.usable && !usable {
                    // What was measured before says nothing of what comes back.
                    p.window.clear();
                    p.latest.clear();
                    p.last_answer_us = None;
                }
                p.usable = usable;
                p.why_unusable = why;
            }
            Event::Egress {
                at_us, rate_bps, ..
            } => {
                p.load.egress(at_us, rate_bps);
                return;
            }
            Event::Placed { at_us, flows, .. } => {
                p.started(at_us, flows);
                return;
            }
        }
        p.dirty = true;
    }

    /// Decides as of `now_us`. Call it at least every 10 ms and after each batch of events;
    /// returns the verdict when it changed.
    pub fn tick(&mut self, now_us: u64) -> Option<Verdict> {
        if self
            .last_tick_us
            .is_some_and(|t| now_us.saturating_sub(t) > HICCUP_US)
        {
            self.grace_until_us = now_us + GRACE_US;
        }
        self.last_tick_us = Some(now_us);
        let judge_age = now_us >= self.grace_until_us;
        for p in &mut self.paths {
            p.latest.expire(now_us, false);
            // Weights change by a thirtieth in 100 ms: no need to sort at each tick.
            if p.window.expire(now_us, judge_age) || p.dirty || now_us >= p.stats_at_us + 100_000 {
                p.stats = p.window.stats(now_us);
                p.stats_at_us = now_us;
                p.dirty = false;
            }
        }
        let mut verdict = Verdict {
            groups: Vec::with_capacity(self.groups.len()),
        };
        for g in 0..self.groups.len() {
            self.measure(g, now_us, judge_age);
            for m in 0..self.groups[g].members.len() {
                self.transition(g, m, now_us);
            }
            let v = self.choose(g, now_us);
            self.record(g, v, now_us);
            verdict.groups.push(v);
        }
        self.judge_outcomes(now_us);
        if verdict == self.verdict {
            return None;
        }
        self.verdict = verdict.clone();
        Some(verdict)
    }

    /// The verdict of the last tick; before the first one everything is left to the kernel's
    /// choice among all paths.
    pub fn current(&self) -> &Verdict {
        &self.verdict
    }

    /// The last decisions, oldest first.
    pub fn decisions(&self) -> impl Iterator<Item = &Decision> {
        self.log.iter()
    }

    /// Switches between the product and the baseline; takes effect at the next tick.
    pub fn set_objective(&mut self, mode: Mode, _now_us: u64) {
        self.mode = mode;
        for g in &mut self.groups {
            g.least_bad = None;
        }
    }

    /// Delays of each path, for the flowlet gap.
    pub fn path_delays(&self, now_us: u64) -> Vec<PathDelays> {
        self.paths
            .iter()
            .map(|p| {
                let (max, _) = p
                    .window
                    .max_between(now_us.saturating_sub(RECENT_US), now_us + 1);
                let (_, waiting) = p.window.present(now_us);
                PathDelays {
                    recent_max_us: max.max(waiting),
                    min_us: p.window.min_us().unwrap_or(0),
                }
            })
            .collect()
    }

    fn alive(&self, path: usize, now_us: u64) -> bool {
        self.paths[path].alive(now_us, self.cfg.lost_in_row)
    }

    /// Finds the group's yardstick and judges every member's latest probes by it.
    fn measure(&mut self, g: usize, now_us: u64, judge_age: bool) {
        let best = self.best(g, now_us, YARDSTICK);
        let group = &mut self.groups[g];
        group.best = best.map(|b| group.members[b].path);
        group.threshold_us = group.best.map(|b| {
            let ordinary = self.paths[b].stats.ordinary_us();
            ordinary + self.band.width_us(ordinary)
        });
        let (count, of) = (self.cfg.beyond_count, self.cfg.beyond_of);
        for m in &mut group.members {
            let p = &self.paths[m.path];
            let limit = group.threshold_us.unwrap_or(f64::INFINITY);
            m.seen = evidence(&p.window, now_us, limit, of, judge_age);
            m.late = p.is_late(now_us, limit, judge_age);
            let beyond = m.seen.beyond.len();
            let known = p.stats.settled >= KNOWN;
            m.bad = known
                && (beyond >= count
                    || (m.bad && beyond > count / 3)
                    || p.window.lost_in_row() >= self.cfg.lost_in_row);
            if m.bad {
                m.bad_until_us = now_us;
            }
        }
    }

    /// The cheapest member among those in use, else among all that live.
    fn best(&self, g: usize, now_us: u64, least: usize) -> Option<usize> {
        let members = &self.groups[g].members;
        let cheapest = |out: bool| {
            (0..members.len())
                .filter(|m| members[*m].out.is_some() == out)
                .filter(|m| self.alive(members[*m].path, now_us))
                .filter_map(|m| Some((m, self.paths[members[m].path].cost(&self.weights, least)?)))
                .min_by(|a, b| a.1.total_cmp(&b.1))
                .map(|(m, _)| m)
        };
        cheapest(false).or_else(|| cheapest(true))
    }

    /// Whether another member is clearly better at this moment. When all are late at once the
    /// cause is common (or ourselves), and leaving one of them helps nobody: a path that has just
    /// been bad itself must have been better for its latest three probes.
    fn better_exists(&self, g: usize, m: usize, now_us: u64) -> bool {
        let group = &self.groups[g];
        let limit = group.threshold_us.unwrap_or(f64::INFINITY);
        let latest = |m: &Member| -> Vec<f64> {
            let three = m.seen.latest_us.iter().take(3);
            three
                .map(|l| l.map_or(f64::INFINITY, |us| us as f64))
                .collect()
        };
        let mut mine = latest(&group.members[m]);
        mine.sort_by(f64::total_cmp);
        let median = mine.get(mine.len() / 2).copied().unwrap_or(0.0);
        group.members.iter().enumerate().any(|(i, other)| {
            let (Some(delay), waiting) = self.paths[other.path].window.present(now_us) else {
                return false;
            };
            let delay = delay as f64;
            let worst = latest(other).into_iter().fold(delay, f64::max);
            i != m
                && self.alive(other.path, now_us)
                && waiting as f64 <= limit.max(delay)
                && ((delay <= limit && !other.bad) || worst + self.band.clear_us(worst) < median)
        })
    }

    /// The cost that members are held against, and the difference from it that counts, both in µs.
    fn yardstick(&self, g: usize, now_us: u64) -> Option<(f64, f64)> {
        let best = self.best(g, now_us, COSTED)?;
        let best = &self.paths[self.groups[g].members[best].path];
        let cost = best.cost(&self.weights, COSTED)?;
        // Where the best path itself has a tail, tails of that size do not tell paths apart.
        let tail = best.stats.p95_us - best.stats.ordinary_us();
        Some((cost, self.band.width_us(cost).max(tail)))
    }

    /// Lets one path leave or come back.
    fn transition(&mut self, g: usize, m: usize, now_us: u64) {
        let yardstick = self.yardstick(g, now_us);
        let better = self.better_exists(g, m, now_us);
        let member = &self.groups[g].members[m];
        let path = &self.paths[member.path];
        let alive = path.alive(now_us, self.cfg.lost_in_row);
        let over = match (path.cost(&self.weights, COSTED), yardstick) {
            (Some(cost), Some((best, band))) => (cost - best) / band.max(1.0),
            _ => 0.0,
        };
        let bad = member.bad;
        let lost = path.window.lost_in_row() >= self.cfg.lost_in_row;
        let late = member.seen.beyond.len() >= self.cfg.beyond_count;
        let now_bad = bad && member.seen.newest_beyond && (late || lost) && better;
        let since = (over > 1.0).then(|| member.costly_since_us.unwrap_or(now_us));
        let costly = since.is_some_and(|t| now_us >= t + COSTLY_US);
        let cause = if !path.usable {
            Some(Cause::Link)
        } else if now_bad && lost {
            Some(Cause::Lost)
        } else if now_bad {
            Some(Cause::Late)
        } else if costly {
            Some(Cause::Cost)
        } else {
            None
        };
        let known = path.stats.settled >= KNOWN && path.stats.answered > 0;
        self.groups[g].members[m].costly_since_us = since;
        match (self.groups[g].members[m].out.is_some(), cause) {
            (false, Some(cause)) => self.leave(g, m, cause, now_us),
            (false, None) => {
                if bad {
                    self.groups[g].members[m].hold.bad(now_us);
                }
            }
            (true, _) => {
                let count = self.cfg.beyond_count;
                let member = &mut self.groups[g].members[m];
                let Some(out) = member.out.as_mut() else {
                    return;
                };
                let window = &self.paths[member.path].window;
                if now_us < out.since_us + REFUTABLE_US
                    && !bad
                    && alive
                    && out.refuted(window, count)
                {
                    member.hold = out.hold_before.clone();
                    member.out = None;
                    member.load = None;
                    return;
                }
                // Bad again after it had recovered: whose doing it is this time is open.
                let relapsed = bad && out.good_since_us.is_some();
                out.observe(
                    now_us,
                    alive && known && !bad,
                    &mut member.hold,
                    &mut self.rng,
                );
                let back = out.remaining_us(now_us) == Some(0) && over <= BACK_AT;
                if back {
                    member.out = None;
                    member.load = None;
                } else if relapsed {
                    self.blame(g, m, now_us);
                } else if bad && self.undecided(g, m, now_us) {
                    let judged = self.judged(g, m, now_us);
                    if let Some(own) = judged.filter(Judgement::is_new_load) {
                        let member = &mut self.groups[g].members[m];
                        member.load = Some(own);
                        member.episode.iter_mut().for_each(|e| e.judged_us = now_us);
                    }
                } else if bad && self.own_load(g, m) {
                    self.review(g, m, now_us);
                }
            }
        }
    }

    fn leave(&mut self, g: usize, m: usize, cause: Cause, now_us: u64) {
        let threshold_us = self.groups[g].threshold_us.unwrap_or(f64::INFINITY);
        let member = &mut self.groups[g].members[m];
        let hold_before = member.hold.clone();
        let hold = member.hold.flap(now_us);
        let against = match cause {
            Cause::Late | Cause::Lost => member.seen.beyond.clone(),
            Cause::Link | Cause::Cost => Vec::new(),
        };
        member.out = Some(Out {
            cause,
            since_us: now_us,
            hold_us: member.hold.spread(hold, &mut self.rng),
            good_since_us: None,
            against,
            threshold_us,
            hold_before,
        });
        match cause {
            Cause::Link | Cause::Lost => member.load = None,
            Cause::Late | Cause::Cost => self.blame(g, m, now_us),
        }
    }
}
