// SPDX-License-Identifier: GPL-2.0-or-later
//! Which paths each class of flows may use: a pure function of the events fed to it.
//!
//! Nothing here reads a clock or touches the system; times are µs of one monotonic clock. The rule:
//! leave at once, return with patience that grows with recent relapses (docs/steering.md).
//!
//! `probes` holds what is measured of a path and the figures over it, `rule` decides by them, `load` knows
//! our own traffic, `pace` how often to probe, `report` says why.

use rand::{rngs::StdRng, SeedableRng};
use serde::Serialize;

use super::explain::Log;
use crate::topology::{PathKey, PathMasks, MAX_GROUP_PATHS};
use load::OurRates;
use pace::{Pace, USUAL_US};
use probes::{Probes, Slow, LATE_US};
use rule::JudgedPath;

mod load;
pub(crate) mod pace;
pub mod probes;
mod report;
mod rule;

/// Differences of delay up to this move nothing, µs.
pub(crate) const TOLERANCE_US: f64 = 5_000.0;
/// What counts as recent, µs: for the largest delay of the flowlet gap, for flows that have come to a path, and
/// for losses that may be a limit's.
const RECENT_US: u64 = 3_000_000;

/// What is known beforehand of a path; its index is the path's id.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PathInput {
    /// As decisions call the path.
    pub name: String,
    /// What it is, whatever it is called. `None`: none of the kernel's, as of one that is gone.
    pub key: Option<PathKey>,
    /// Handicap: the path is used like one that is this much longer, in µs.
    pub cost_us: f64,
    /// What it can carry, in bit/s.
    pub capacity_bps: Option<u64>,
    /// Traffic costs money or power: probed 20 times a second at most.
    pub metered: bool,
    /// Whether its target has answered before, as far as that is known.
    pub answers: bool,
}

/// What happened, in order of time. `seq` numbers a path's probes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event {
    /// A probe left.
    Sent {
        /// Path id.
        path: usize,
        /// Number among the path's probes.
        seq: u64,
        /// When it left.
        at_us: u64,
    },
    /// `delay_us` is what is judged: the forward delay where a reflector tells it apart (smallest
    /// RTT plus forward variation), else the RTT.
    Answered {
        /// Path id.
        path: usize,
        /// The probe that was answered.
        seq: u64,
        /// When the answer came.
        at_us: u64,
        /// Round trip, µs.
        rtt_us: u32,
        /// Delay to judge by, µs.
        delay_us: u32,
    },
    /// A probe could not be sent: counts as lost at once.
    SendFailed {
        /// Path id.
        path: usize,
        /// Number among the path's probes.
        seq: u64,
        /// When it should have left.
        at_us: u64,
    },
    /// Carrier, neighbour or next hop came or went.
    Usable {
        /// Path id.
        path: usize,
        /// When it changed.
        at_us: u64,
        /// Whether the path carries packets from now on.
        usable: bool,
        /// What came or went, for people.
        why: &'static str,
    },
    /// Our own egress rates on the path, about every 100 ms, in bit/s: of all flows, and of latency flows.
    Egress {
        /// Path id.
        path: usize,
        /// End of the time that the rates are over.
        at_us: u64,
        /// Of all flows.
        rate_bps: f64,
        /// Of latency flows alone.
        latency_bps: f64,
    },
    /// New flows that were placed on the path since the last such event; about every 100 ms.
    Placed {
        /// Path id.
        path: usize,
        /// When they were counted.
        at_us: u64,
        /// How many were placed.
        flows: u64,
    },
}

/// What is optimised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// The rule.
    #[default]
    Mountain,
    /// Baseline: the path with the lowest median alone, without hysteresis.
    MinRtt,
}

/// One [`PathMasks`] per group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PolicyVerdict {
    /// By index of the group.
    pub groups: Vec<PathMasks>,
}

/// What the flowlet gap is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct PathDelays {
    /// Largest delay of the last seconds, unanswered probes included; 0 when nothing is known.
    pub recent_max_us: u64,
    /// Smallest delay of those that count; 0 when nothing is known.
    pub min_us: u64,
}

#[derive(Default)]
struct Path {
    input: PathInput,
    probes: Probes,
    slow: Slow,
    slow_at_us: Option<u64>,
    usable: bool,
    why_unusable: &'static str,
    /// Whether a probe was ever answered. A target that never does may drop pings, so its path is not known to be dead.
    answered: bool,
    load: OurRates,
    pace: Pace,
}

impl Path {
    fn new(input: PathInput) -> Self {
        Path {
            load: OurRates::new(input.capacity_bps),
            answered: input.answers,
            input,
            usable: true,
            ..Path::default()
        }
    }

    /// Whether a probe has waited for its answer for twice the pace of an idle host.
    fn waits_long(&self, now_us: u64) -> bool {
        self.probes.waiting_us(now_us).1 > (pace::IDLE_US + pace::IDLE_US) as f64
    }
}

#[derive(Default)]
struct Group {
    members: Vec<JudgedPath>,
    scale: Option<rule::Scale>,
    /// When a path was left last.
    left_us: Option<u64>,
    /// When our flows last wanted more than the paths in use carry.
    needed_us: Option<u64>,
    spread: Option<rule::Spread>,
}

impl Group {
    fn is_of(&self, ids: &[usize]) -> bool {
        let members = self.members.iter().map(|m| m.path);
        members.eq(ids.iter().copied().take(MAX_GROUP_PATHS))
    }
}

/// The decisions of one host.
pub struct Policy {
    paths: Vec<Path>,
    groups: Vec<Group>,
    mode: Mode,
    /// Least of the threshold, µs.
    tolerance_us: f64,
    rng: StdRng,
    verdict: PolicyVerdict,
    log: Log,
    last_tick_us: Option<u64>,
    grace_until_us: u64,
}

impl Policy {
    /// `groups`: the path ids of each group, at most [`MAX_GROUP_PATHS`] of them. The same seed
    /// and events give the same decisions.
    pub fn new(groups: Vec<Vec<usize>>, paths: Vec<PathInput>, seed: u64) -> Self {
        let mut policy = Policy {
            paths: Vec::new(),
            groups: Vec::new(),
            mode: Mode::Mountain,
            tolerance_us: TOLERANCE_US,
            rng: StdRng::seed_from_u64(seed),
            verdict: PolicyVerdict::default(),
            log: Log::default(),
            last_tick_us: None,
            grace_until_us: 0,
        };
        policy.set_topology(groups, paths);
        policy
    }

    /// Differences of delay up to `us` move nothing, instead of up to [`TOLERANCE_US`].
    pub(crate) fn with_tolerance(mut self, us: f64) -> Self {
        self.tolerance_us = us;
        self
    }

    /// Other groups and paths from now on. A path keeps what was measured when its id is the same as before, and so is its
    /// name (its gateway was replaced) or its key (its device has got another gateway besides). It keeps its standing in a
    /// group when it was in one. A group of the same paths goes on.
    pub fn set_topology(&mut self, groups: Vec<Vec<usize>>, paths: Vec<PathInput>) {
        let mut known: Vec<Option<Path>> = self.paths.drain(..).map(Some).collect();
        let kept = |(id, it): (usize, PathInput)| match known.get_mut(id).and_then(Option::take) {
            Some(p) if p.input.name == it.name || p.input.key == it.key => Path { input: it, ..p },
            _ => Path::new(it),
        };
        self.paths = paths.into_iter().enumerate().map(kept).collect();
        let mut before = std::mem::take(&mut self.groups);
        let same = |ids: &Vec<usize>| {
            let at = before.iter().position(|g| g.is_of(ids))?;
            Some(before.remove(at))
        };
        let same: Vec<Option<Group>> = groups.iter().map(same).collect();
        let mut members: Vec<JudgedPath> = before.into_iter().flat_map(|g| g.members).collect();
        let mut member = |path| match members.iter().position(|m| m.path == path) {
            Some(at) => members.swap_remove(at),
            None => JudgedPath {
                path,
                ..JudgedPath::default()
            },
        };
        let mut new = |ids: Vec<usize>| {
            let members = ids.into_iter().take(MAX_GROUP_PATHS);
            Group {
                members: members.map(&mut member).collect(),
                ..Group::default()
            }
        };
        let each = groups.into_iter().zip(same);
        let each = each.map(|(ids, same)| same.unwrap_or_else(|| new(ids)));
        self.groups = each.collect();
        let all = |g: &Group| ((1u32 << g.members.len()) - 1) as u16;
        let verdict = |g: &Group| PathMasks {
            latency: all(g),
            bulk: all(g),
            alive: all(g),
            ..PathMasks::default()
        };
        self.verdict.groups = self.groups.iter().map(verdict).collect();
    }

    /// A path's target is another one than it was taken for: it has answered only if there are answers of it.
    pub(crate) fn forget_answered(&mut self, path: usize) {
        self.paths[path].answered = self.paths[path].slow.answers > 0;
    }

    /// Takes in what happened. Events of unknown paths are ignored.
    pub fn event(&mut self, e: Event) {
        let (Event::Sent { path, .. }
        | Event::Answered { path, .. }
        | Event::SendFailed { path, .. }
        | Event::Usable { path, .. }
        | Event::Egress { path, .. }
        | Event::Placed { path, .. }) = e;
        let Some(p) = self.paths.get_mut(path) else {
            return;
        };
        match e {
            Event::Sent { seq, at_us, .. } => p.probes.sent(seq, at_us),
            Event::Answered {
                seq,
                rtt_us,
                delay_us,
                ..
            } => {
                p.probes.answered(seq, rtt_us, delay_us);
                p.answered = true;
            }
            Event::SendFailed { seq, at_us, .. } => p.probes.failed(seq, at_us),
            Event::Usable { usable, why, .. } => {
                if p.usable != usable {
                    // What was measured before says nothing of what comes back.
                    p.probes.clear();
                    p.slow = Slow::default();
                }
                p.usable = usable;
                p.why_unusable = why;
            }
            Event::Egress {
                at_us,
                rate_bps,
                latency_bps,
                ..
            } => p.load.egress(at_us, rate_bps, latency_bps),
            Event::Placed { at_us, flows, .. } if flows > 0 => p.load.started(at_us),
            Event::Placed { .. } => {}
        }
    }

    /// Decides as of `now_us`. Call it at least every 10 ms, more seldom only while no path is probed more often than
    /// on an idle host, and after each batch of events; returns the verdict when it changed.
    pub fn tick(&mut self, now_us: u64) -> Option<PolicyVerdict> {
        let since = self.last_tick_us.replace(now_us);
        // After a pause as long as makes a packet late, answers wait in our socket: for the time between two probes
        // ages say nothing.
        if since.is_some_and(|t| now_us.saturating_sub(t) > LATE_US) {
            self.grace_until_us = now_us + USUAL_US;
        }
        for path in 0..self.paths.len() {
            self.look(path, now_us);
        }
        let all = 0..self.groups.len();
        let groups = all.map(|g| self.decide(g, now_us)).collect();
        let verdict = PolicyVerdict { groups };
        self.judge_outcomes(now_us);
        if verdict == self.verdict {
            return None;
        }
        self.verdict = verdict.clone();
        Some(verdict)
    }

    /// Takes a path's slow figures, when it is time.
    fn look(&mut self, path: usize, now_us: u64) {
        let is_in = |g: &&Group| g.members.iter().any(|m| m.path == path);
        let scales = self.groups.iter().filter(is_in).filter_map(|g| g.scale);
        let least_us = scales.map(|scale| scale.m_us).fold(0.0, f64::max);
        let p = &mut self.paths[path];
        if p.slow_at_us.is_some_and(|t| now_us < t + LATE_US) {
            return;
        }
        p.slow_at_us = Some(now_us);
        p.probes.expire(now_us);
        // What is missing while a limit is tried out is judged when that is over. What was lost before stays lost.
        let loss = (p.pace.unanswered_us() > 0.0).then_some(p.slow.loss);
        p.slow = p.probes.slow(now_us, least_us, p.pace.blameless_until_us);
        p.slow.loss = loss.unwrap_or(p.slow.loss);
        if p.look_for_limit(now_us) {
            p.pace.blameless_until_us = now_us;
            let members = self.groups.iter_mut().flat_map(|g| &mut g.members);
            let these = members.filter(|m| m.path == path);
            these.for_each(JudgedPath::forgive);
        }
    }

    /// The verdict of the last tick; before the first one everything is left to the kernel's choice among all paths.
    pub fn current(&self) -> &PolicyVerdict {
        &self.verdict
    }

    /// Switches between the product and the baseline; takes effect at the next tick.
    pub fn set_mode(&mut self, mode: Mode) {
        self.mode = mode;
    }

    /// Delays of each path, for the flowlet gap.
    pub(crate) fn path_delays(&self, now_us: u64) -> Vec<PathDelays> {
        let delays = |p: &Path| {
            let recent_us = now_us.saturating_sub(RECENT_US);
            let (most, least) = p.probes.extremes_us(recent_us, now_us);
            PathDelays {
                recent_max_us: most as u64,
                min_us: least.unwrap_or(0.0) as u64,
            }
        };
        self.paths.iter().map(delays).collect()
    }
}
