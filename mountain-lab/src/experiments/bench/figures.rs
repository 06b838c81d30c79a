// SPDX-License-Identifier: GPL-2.0-or-later
//! Figures and checks of `mountain-lab cost`, from what was measured.

use std::collections::BTreeMap;

use mountain_lab::result::{Check, LimitKind, Metric, RunResult};
use mountain_lab::workload::stats::{bootstrap_median, median};
use serde_json::json;

use super::run_time::{RunTimes, TimedRun, UplinkPrograms, SEGMENTS};
use super::table::{Eviction, SizeTimes};
use super::tcp::{Pair, With};
use super::{CostFigures, CostPlan};

/// Limits of the checks.
const MAX_RUN_NS: f64 = 150.0;
const MIN_TCP_RATIO: f64 = 0.97;
const MAX_ZIPF_RATIO: f64 = 2.0;

/// Puts figures and checks into the result.
pub fn fill(result: &mut RunResult, measured: &CostFigures, plan: &CostPlan) {
    let mut report = Report {
        result,
        checks: vec![],
        seed: plan.seed,
    };
    if let Some(times) = &measured.times {
        report.runs(times);
    }
    report.packets(&measured.packets);
    report.repeated(&measured.repeated, plan.prog_runs as u64);
    for (with, pairs) in &measured.tcp {
        report.tcp(*with, pairs);
    }
    if let Some(times) = &measured.sizes {
        report.sizes(times, plan.entries as u64);
    }
    for eviction in &measured.evictions {
        report.eviction(eviction);
    }
    report.start(&measured.start);
    let evictions = json!(measured.evictions);
    report
        .result
        .environment
        .insert("eviction".into(), evictions);
    report.result.checks = report.checks;
}

struct Report<'a> {
    result: &'a mut RunResult,
    checks: Vec<Check>,
    seed: u64,
}

impl Report<'_> {
    /// One value a repeat; `n` are the events behind them.
    fn put(&mut self, policy: &str, name: &str, unit: &str, values: &[f64], n: u64) {
        let repeats = values.iter().copied().map(Some).collect();
        let metric = Metric::of_repeats(unit, repeats, n, self.seed);
        put(self.result, policy, name, metric);
    }

    fn limit(&mut self, name: &str, figure: f64, op: LimitKind, limit: f64) {
        let check = Check::new(name, Some(figure), op, limit, None);
        self.checks.push(check);
    }

    fn runs(&mut self, times: &RunTimes) {
        for segment in SEGMENTS {
            let (ns, n) = &times[&segment];
            self.put(policy(segment), column(segment), "ns", ns, *n);
        }
        // What a run costs when nobody measures it: less what an empty program shows.
        let empty = &times[&TimedRun::Empty].0;
        for segment in [TimedRun::Ecmp, TimedRun::Stay, TimedRun::FirstRun] {
            let (ns, n) = &times[&segment];
            let name = format!("net_{}", column(segment));
            self.put(policy(segment), &name, "ns", &less(ns, empty), *n);
        }
        let (first, moved) = (&times[&TimedRun::FirstRun], &times[&TimedRun::Moved]);
        // Of the same repeat: both saw the same machine.
        let second = less(&moved.0, &first.0);
        self.put("moved", "second_run_ns", "ns", &second, moved.1);
        let at = |s: TimedRun| median(&times[&s].0);
        for (what, ns) in [
            ("ns per run, ecmp mode", at(TimedRun::Ecmp)),
            ("ns per run, packet stays", at(TimedRun::Stay)),
            ("ns of a moved packet's first run", median(&first.0)),
            ("ns of a moved packet's second run", median(&second)),
        ] {
            self.limit(what, ns, LimitKind::AtMost, MAX_RUN_NS);
        }
    }

    fn packets(&mut self, packets: &BTreeMap<UplinkPrograms, Vec<f64>>) {
        for (attached, ns) in packets {
            let name = match attached {
                UplinkPrograms::Nothing => "none",
                UplinkPrograms::Ecmp => "ecmp",
                UplinkPrograms::Stay => "stay",
                UplinkPrograms::Moved => "moved",
            };
            let n = ns.len() as u64;
            self.put(name, "packet_ns", "ns", ns, n);
            if *attached != UplinkPrograms::Nothing {
                let added = less(ns, &packets[&UplinkPrograms::Nothing]);
                self.put(name, "packet_added_ns", "ns", &added, n);
            }
        }
    }

    fn repeated(&mut self, repeated: &BTreeMap<TimedRun, Vec<f64>>, runs: u64) {
        for (segment, ns) in repeated {
            let name = match segment {
                TimedRun::FirstRun => "prog_run_first_ns",
                _ => "prog_run_ns",
            };
            self.put(policy(*segment), name, "ns", ns, runs * ns.len() as u64);
        }
    }

    fn tcp(&mut self, with: With, pairs: &[Pair]) {
        let each = |f: fn(&Pair) -> f64| pairs.iter().map(f).collect::<Vec<_>>();
        let n = pairs.len() as u64;
        let ratio = each(|p| p.with_bps / p.without_bps);
        let name = with.name();
        let without = format!("tcp_{}_pairs_bps", name.replace(' ', "_"));
        self.put("none", &without, "bps", &each(|p| p.without_bps), n);
        self.put(name, "tcp_goodput_bps", "bps", &each(|p| p.with_bps), n);
        self.put(name, "tcp_ratio", "x", &ratio, n);
        // The control has no limit.
        if with != With::Empty {
            let (lo, hi) = bootstrap_median(&ratio, self.seed);
            let name =
                format!("TCP throughput with / without, flow {name} [{lo:.3}-{hi:.3}] n={n}");
            self.limit(&name, median(&ratio), LimitKind::AtLeast, MIN_TCP_RATIO);
        }
    }

    fn sizes(&mut self, times: &SizeTimes, entries: u64) {
        let n = times.batch * times.small.len() as u64;
        for (name, ns) in [
            ("small", &times.small),
            ("zipf", &times.zipf),
            ("uniform", &times.uniform),
        ] {
            self.put("stay", &format!("table_{name}_ns"), "ns", ns, n);
        }
        let ratio = median(&times.zipf) / median(&times.small);
        let name = format!("ns per run, Zipf over {entries} flows / 1000 flows");
        self.limit(&name, ratio, LimitKind::AtMost, MAX_ZIPF_RATIO);
    }

    fn eviction(&mut self, seen: &Eviction) {
        let held = match seen.held {
            true => ", held off their hash's choice",
            false => "",
        };
        let name = format!(
            "live flows on another path, {} live in a table for {}{held}",
            seen.live, seen.entries
        );
        self.limit(&name, seen.changed as f64, LimitKind::AtMost, 0.0);
    }

    fn start(&mut self, measured: &super::start::PlacementTimes) {
        let result = &mut *self.result;
        let mut put = |policy: &str, name: &str, metric| put(result, policy, name, metric);
        let checks = measured.report(&mut put, self.seed);
        self.checks.extend(checks);
    }
}

fn put(result: &mut RunResult, policy: &str, name: &str, metric: Metric) {
    let metrics = result.policies.entry(policy.into()).or_default();
    metrics.insert(name.into(), metric);
}

/// Differences of what belongs together.
fn less(these: &[f64], those: &[f64]) -> Vec<f64> {
    these
        .iter()
        .zip(those)
        .map(|(this, that)| this - that)
        .collect()
}

/// What a segment is called in the result.
fn policy(segment: TimedRun) -> &'static str {
    match segment {
        TimedRun::Empty => "empty program",
        TimedRun::Ecmp => "ecmp",
        TimedRun::Stay => "stay",
        TimedRun::FirstRun | TimedRun::Moved => "moved",
    }
}

fn column(segment: TimedRun) -> &'static str {
    match segment {
        TimedRun::FirstRun => "first_run_ns",
        TimedRun::Moved => "both_runs_ns",
        _ => "run_ns",
    }
}
