// SPDX-License-Identifier: GPL-2.0-or-later
//! Figures that need the segments of all repeats together.

use std::collections::{BTreeMap, BTreeSet};

use mountain_lab::result::{Metric, RunResult};
use mountain_lab::workload::game::Packet;
use mountain_lab::workload::metrics::{
    flow_moves, leave_figures, put, time_to_leave, Figures, Leave,
};

use super::evaluate::{changes_new_flows, decisions, has_sessions, onsets};
use super::sessions::{count, count_opened};
use super::PolicySegment;
use crate::scenario::schedule::Schedule;
use crate::scenario::{ComparedPolicy, Scenario, WorkloadKind};

/// A bulk flow should have left a path that turned bad after this long.
const LEAVE_WITHIN_NS: u64 = 3_000_000_000;

/// Figures of all repeats together: one repeat has too few onsets for a 95th percentile.
#[derive(Default)]
pub struct Pooled(BTreeMap<ComparedPolicy, OfPolicy>);

#[derive(Default)]
struct OfPolicy {
    leaves: Vec<Leave>,
    /// With the kind of the flow's workload.
    bulk_leaves: Vec<(&'static str, Leave)>,
    sessions: Figures,
}

impl Pooled {
    pub fn add(
        &mut self,
        scenario: &Scenario,
        schedule: &Schedule,
        segment: &PolicySegment,
        packets: &[Packet],
    ) {
        let of = self.0.entry(segment.policy).or_default();
        if has_sessions(scenario) {
            count_sessions(&mut of.sessions, segment, packets);
        }
        let onsets = onsets(segment, schedule);
        of.leaves
            .extend(onsets.map(|o| time_to_leave(&segment.seen.packets, o)));
        of.bulk_leaves
            .extend(bulk_leave(segment, schedule, scenario));
    }

    pub fn put(&self, result: &mut RunResult) {
        for (policy, of) in &self.0 {
            let mut figures = of.sessions.clone();
            figures.extend(bulk_left_figures(&of.bulk_leaves));
            if !of.leaves.is_empty() {
                figures.extend(leave_figures(&of.leaves));
            }
            for (name, f) in figures {
                let metric = Metric::single(f.unit, f.value, f.n);
                result.put(&policy.name(), &name, metric);
            }
        }
    }
}

/// Shares of bulk flows that left a path in time: of all, and of each kind where there are several. Thin
/// ones go where latency flows go, and rightly.
fn bulk_left_figures(leaves: &[(&'static str, Leave)]) -> Figures {
    let of_kind = |wanted: &str| -> Vec<Leave> {
        let of = leaves.iter().filter(|(kind, _)| *kind == wanted);
        of.map(|(_, leave)| *leave).collect()
    };
    let mut figures = Figures::new();
    let all: Vec<Leave> = leaves.iter().map(|(_, leave)| *leave).collect();
    put_left(&mut figures, "bulk_left_3s", &all);
    for kind in ["greedy", "paced", "requests"] {
        let of = of_kind(kind);
        if of.len() < leaves.len() {
            put_left(&mut figures, &format!("bulk_left_3s_{kind}"), &of);
        }
    }
    figures
}

fn count_sessions(totals: &mut Figures, segment: &PolicySegment, packets: &[Packet]) {
    let span_ns = segment.measured.end - segment.measured.start;
    let choices = decisions(&segment.explain, span_ns, changes_new_flows).unwrap_or(0);
    count_opened(totals, &segment.seen.shorts, &segment.measured);
    count(totals, "choices", choices, choices);
    let long: BTreeSet<u16> = packets.iter().map(|p| p.flow).collect();
    let moves = flow_moves(packets);
    count(totals, "long_flows_moved", moves, long.len() as u64);
}

/// What each TCP flow did at each onset, with the kind of its workload.
fn bulk_leave(
    segment: &PolicySegment,
    schedule: &Schedule,
    scenario: &Scenario,
) -> Vec<(&'static str, Leave)> {
    // In the order of the scenario, as they were started.
    let kinds = scenario.workloads.iter().filter_map(|w| match w.kind {
        WorkloadKind::Bulk if w.rate_mbit.is_some() => Some("paced"),
        WorkloadKind::Bulk => Some("greedy"),
        WorkloadKind::RequestResponse => Some("requests"),
        _ => None,
    });
    let mut leaves = Vec::new();
    for onset in onsets(segment, schedule) {
        for (kind, bulk) in kinds.clone().zip(&segment.seen.bulks) {
            leaves.extend(bulk.flows.iter().map(|f| (kind, f.time_to_leave(onset))));
        }
    }
    leaves
}

/// Share of the flows on a path that turned bad that had left it in time; nothing where none was there.
fn put_left(figures: &mut Figures, name: &str, leaves: &[Leave]) {
    let there = leaves.iter().filter(|l| !matches!(l, Leave::NotThere));
    let there = there.count() as u64;
    let in_time = |l: &&Leave| matches!(l, Leave::Left(ns) if *ns <= LEAVE_WITHIN_NS);
    let left = leaves.iter().filter(in_time).count();
    if there > 0 {
        put(figures, name, "ratio", left as f64 / there as f64, there);
    }
}
