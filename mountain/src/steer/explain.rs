// SPDX-License-Identifier: GPL-2.0-or-later
//! Every decision with its reasons, and afterwards whether it was right.

use std::collections::VecDeque;
use std::fmt;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// Decisions kept.
pub(crate) const KEPT: usize = 1000;
/// How long after a decision its outcome is judged.
pub(crate) const JUDGED_AFTER_US: u64 = 2_000_000;

/// Why a path was left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Cause {
    /// Its probes are later than another path's by more than the threshold.
    Late,
    /// ... and not answered.
    Lost,
    /// Carrier, neighbour or next hop gone.
    Link,
    /// Its losses, with its delay, cost more than another path does.
    Cost,
    /// Its usual delay is longer than another path's.
    Long,
}

/// Whose traffic is on a path that is late.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Load {
    /// Ours fills it.
    Own,
    /// Somebody else's does, or the path is late without load.
    Foreign,
}

/// State of a path that has never answered, ...
pub const SILENT: &str = "silent";
/// ... and what to do.
pub(crate) const SILENT_REMEDY: &str =
    "if it does not answer pings, give it another `probe_target`, and all paths of its route the same one";

/// What a path may be used for within a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Use {
    /// Both classes.
    #[default]
    All,
    /// Bulk flows only: the delay is their own doing.
    BulkOnly,
    /// Nothing, unless every other path is worse.
    Nothing,
    /// Everything although it is not good: the least bad one.
    LeastBad,
}

/// As it is serialized.
impl fmt::Display for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// What a decision rests on; delays in µs.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Grounds {
    /// Why the path is left; `None` while it is in use.
    pub cause: Option<Cause>,
    /// `None` while too little is known.
    pub present_us: Option<f64>,
    /// Present delay with what losses and the handicap cost; `None` while too little is known.
    pub cost_us: Option<f64>,
    /// Usual delay of the path.
    pub median_us: f64,
    /// The path that this one is held against, and its figures.
    pub best: Option<String>,
    /// Present delay of `best`; `None` without one.
    pub best_present_us: Option<f64>,
    /// Cost of `best`; `None` without one.
    pub best_cost_us: Option<f64>,
    /// Usual delay of `best`; `None` without one.
    pub best_median_us: Option<f64>,
    /// The threshold.
    pub threshold_us: Option<f64>,
    /// Share of probes that begin a run of losses.
    pub loss: f64,
    /// Probes in the window that were answered or could not be sent.
    pub samples: usize,
    /// The newest probes that are answered or lost, newest first: delay; `None`: lost.
    pub latest_us: Vec<Option<u64>>,
    /// How long the path must be fit before it is used again.
    pub patience_us: u64,
    /// Onsets that are not forgotten.
    pub onsets: f64,
    /// Whose traffic makes the path late; `None` while it is not left for being late.
    pub load: Option<Load>,
}

/// What the probes showed in the two seconds after a decision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// p95 of the probes on the path and its configured cost, µs; `None` when there were none, or the group is gone.
    pub path_p95_us: Option<f64>,
    /// The lowest such sum of the group's other usable paths, µs.
    pub others_p95_us: Option<f64>,
    /// Leaving was right when the path stayed worse than the others by the band or more, using
    /// it when it did not. `None` when there was nothing to compare.
    pub right: Option<bool>,
}

/// One change of what a path is used for.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Decision {
    /// When it was made, CLOCK_MONOTONIC, µs.
    pub at_us: u64,
    /// Path id.
    pub path: usize,
    /// Of the path, as it was called then.
    pub name: String,
    /// Index of the group that the path was judged in.
    pub group: usize,
    /// First destination of that group, where there are several groups. The policy does not know it.
    pub prefix: Option<IpNet>,
    /// What the path was used for before.
    pub from: Use,
    /// What it is used for since.
    pub to: Use,
    /// The reason, for people.
    pub why: String,
    /// Why the kernel went on deciding when it was made. The policy does not know it.
    pub not_carried_out: Option<String>,
    /// The figures behind `why`.
    pub grounds: Grounds,
    /// `None` until [`JUDGED_AFTER_US`] have passed.
    pub outcome: Option<Outcome>,
}

/// State of a path in one group, for `status`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PathInGroup {
    /// Path id.
    pub path: usize,
    /// Of the path, as decisions call it.
    pub name: String,
    /// Index of the group.
    pub group: usize,
    /// `unknown`, `silent` (never answered), `good`, `least bad` (none is good), `ejected` (left), `reserve` (left for
    /// its configured cost alone), `held` (fit again, waiting), `dead`.
    pub state: &'static str,
    /// What flows of this group may use it for.
    pub used_for: Use,
    /// Present delay with what losses and the handicap cost, µs; `None` while too little is known.
    pub cost_us: Option<f64>,
    /// Usual delay, µs; `None` without any answer.
    pub p50_us: Option<f64>,
    /// 95th percentile of the delays in the window, µs; `None` without any answer.
    pub p95_us: Option<f64>,
    /// Share of probes that begin a run of losses, 0 to 1.
    pub loss: f64,
    /// Probes in the window that were answered or could not be sent.
    pub samples: usize,
    /// Why it is used so, for people.
    pub reason: String,
    /// Time left until the path may be used again if it stays fit.
    pub patience_left_us: Option<u64>,
    /// Onsets that are not forgotten.
    pub onsets: f64,
    /// Probes a second, where its target limits answers: less than it answers.
    pub answer_limit_hz: Option<f64>,
    /// Whose traffic makes it late; `None` while it is not left for being late.
    pub load: Option<Load>,
}

/// The last [`KEPT`] decisions.
#[derive(Clone, Debug, Default)]
pub struct Log {
    ring: VecDeque<Decision>,
}

impl Log {
    /// Appends; forgets the oldest when [`KEPT`] are there.
    pub fn push(&mut self, d: Decision) {
        if self.ring.len() == KEPT {
            self.ring.pop_front();
        }
        self.ring.push_back(d);
    }

    /// Oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &Decision> {
        self.ring.iter()
    }

    /// Those after a time, oldest first.
    pub fn since(&mut self, at_us: u64) -> impl Iterator<Item = &mut Decision> {
        let from = self.ring.partition_point(|d| d.at_us <= at_us);
        self.ring.range_mut(from..)
    }

    /// Decisions whose outcome is due.
    pub fn due(&mut self, now_us: u64) -> impl Iterator<Item = &mut Decision> {
        self.ring
            .iter_mut()
            .rev()
            .take_while(move |d| d.at_us + 4 * JUDGED_AFTER_US > now_us)
            .filter(move |d| d.outcome.is_none() && d.at_us + JUDGED_AFTER_US <= now_us)
    }
}

/// A path, and the group that is meant where there are several.
pub(crate) fn in_group(name: &str, prefix: Option<IpNet>) -> String {
    match prefix {
        Some(prefix) => format!("{name} for {prefix}"),
        None => name.to_owned(),
    }
}

/// p95 of unsorted delays, nearest rank.
pub fn p95(mut delays: Vec<u64>) -> Option<f64> {
    delays.sort_unstable();
    let rank = (delays.len() * 95).div_ceil(100);
    delays.get(rank.checked_sub(1)?).map(|d| *d as f64)
}

/// Milliseconds with one decimal, for texts.
pub fn ms(us: f64) -> String {
    format!("{:.1} ms", us / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decision(at_us: u64) -> Decision {
        Decision {
            at_us,
            path: 0,
            name: "a".into(),
            group: 0,
            prefix: None,
            from: Use::All,
            to: Use::Nothing,
            why: String::new(),
            not_carried_out: None,
            grounds: Grounds::default(),
            outcome: None,
        }
    }

    #[test]
    fn keeps_the_last_thousand() {
        let mut log = Log::default();
        (0..1500).for_each(|i| log.push(decision(i)));
        let kept: Vec<u64> = log.iter().map(|d| d.at_us).collect();
        assert_eq!((kept.len(), kept[0], kept[999]), (KEPT, 500, 1499));
    }

    #[test]
    fn decisions_since_a_time_are_those_after_it() {
        let mut log = Log::default();
        for at_us in [1, 2, 2, 5] {
            log.push(decision(at_us));
        }
        let mut times = |since| -> Vec<u64> { log.since(since).map(|d| d.at_us).collect() };
        assert_eq!(times(0), [1, 2, 2, 5]);
        assert_eq!(times(2), [5]);
        assert!(times(5).is_empty());
    }

    #[test]
    fn outcomes_are_due_once_after_two_seconds() {
        let mut log = Log::default();
        log.push(decision(1_000_000));
        assert_eq!(log.due(2_999_999).count(), 0);
        for d in log.due(3_000_000) {
            d.outcome = Some(Outcome {
                path_p95_us: None,
                others_p95_us: None,
                right: None,
            });
        }
        assert_eq!(log.due(3_000_001).count(), 0);
        assert!(log.iter().all(|d| d.outcome.is_some()));
    }

    #[test]
    fn nearest_rank() {
        assert_eq!(p95(vec![]), None);
        assert_eq!(p95(vec![7]), Some(7.0));
        assert_eq!(p95((1..=100).rev().collect()), Some(95.0));
    }
}
