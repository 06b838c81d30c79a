// SPDX-License-Identifier: GPL-2.0-or-later
//! Figures of short game-like flows that cannot change their path: where they started, and what they met.

use std::ops::Range;

use mountain_lab::workload::metrics::{put, Figures};
use mountain_lab::workload::short::ShortFlow;
use mountain_lab::workload::stats::percentile;

use crate::scenario::schedule::{Schedule, ScheduledEvent};

/// A flow that starts so long after a path turned bad should avoid it (the figure for leaving a path).
const KNOWN_AFTER_US: i64 = 300_000;
/// What a packet without an answer counts as.
const LOST_US: u32 = 1_000_000;

/// Figures of the flows opened in the measured part, and those of an oracle that knows of each path what
/// a flow will meet there, and starts each on the one where its slowest packet is fastest.
pub fn figures(
    flows: &[ShortFlow],
    schedule: &Schedule,
    start_ns: u64,
    measured: &Range<u64>,
) -> (Figures, Figures) {
    let flows = opened_in(flows, measured);
    let at_us = |ns: u64| (ns as i64 - start_ns as i64) / 1000;
    let mut own = Figures::new();
    let mut oracle = Figures::new();
    let mut known = (0u64, 0u64);
    let (mut met, mut best) = (Vec::new(), Vec::new());
    for flow in flows {
        let opened_us = at_us(flow.opened_ns);
        let during = |e: &&ScheduledEvent| (e.start_us..e.end_us).contains(&opened_us);
        let Some(event) = schedule.events.iter().find(during) else {
            continue;
        };
        if opened_us >= event.start_us + KNOWN_AFTER_US {
            known.1 += 1;
            // What nobody has seen arrive was on the path that drops.
            let is_off = |path: u8| usize::from(path) != event.path;
            known.0 += u64::from(flow.path.is_some_and(is_off));
        }
        met.extend(flow.rtts.iter().map(|(_, rtt)| rtt.unwrap_or(LOST_US)));
        best.extend(best_path(flow, schedule, &at_us));
    }
    if known.1 > 0 {
        let share = known.0 as f64 / known.1 as f64;
        put(&mut own, "sessions_avoid", "ratio", share, known.1);
    }
    for (figures, mut rtts) in [(&mut own, met), (&mut oracle, best)] {
        let n = rtts.len() as u64;
        let lost = rtts.iter().filter(|rtt| **rtt == LOST_US).count() as f64;
        for (name, q) in [("sessions_rtt_p50_us", 0.5), ("sessions_rtt_p99_us", 0.99)] {
            if let Some(value) = percentile(&mut rtts, q) {
                put(figures, name, "us", value, n);
            }
        }
        if n > 0 {
            put(figures, "sessions_loss", "ratio", lost / n as f64, n);
        }
    }
    (own, oracle)
}

fn opened_in<'a>(flows: &'a [ShortFlow], measured: &Range<u64>) -> Vec<&'a ShortFlow> {
    let opened = flows.iter().filter(|f| measured.contains(&f.opened_ns));
    opened.collect()
}

/// Counts so many more, of so many that there were. It is over all repeats of a policy together: one flow
/// that changed its address is one too many, in whichever repeat it was.
pub fn count(totals: &mut Figures, name: &str, count: u64, of: u64) {
    let (value, n) = totals.get(name).map_or((0.0, 0), |sum| (sum.value, sum.n));
    put(totals, name, "count", value + count as f64, n + of);
}

/// Counts the short flows of a segment that were opened in its measured part.
pub fn count_opened(totals: &mut Figures, flows: &[ShortFlow], measured: &Range<u64>) {
    let flows = opened_in(flows, measured);
    let those = |test: fn(&ShortFlow) -> bool| flows.iter().filter(|f| test(f)).count() as u64;
    let all = flows.len() as u64;
    count(totals, "sessions", all, all);
    count(totals, "sessions_moved", those(|f| f.moved), all);
    let readdressed = those(|f| f.readdressed);
    count(totals, "sessions_readdressed", readdressed, all);
}

/// The round trips of a flow's packets on the path where the slowest is fastest.
fn best_path(flow: &ShortFlow, schedule: &Schedule, at_us: &impl Fn(u64) -> i64) -> Vec<u32> {
    let on = |path: usize| -> Vec<u32> {
        let sent = flow.rtts.iter().map(|(sent_ns, _)| at_us(*sent_ns));
        sent.map(|t| {
            let trip = schedule.drawn_trip((path, path), t, flow.client_port.into());
            trip.map_or(LOST_US, |trip| trip.rtt_us())
        })
        .collect()
    };
    let paths = (0..schedule.paths()).map(on);
    paths
        .min_by_key(|rtts| rtts.iter().copied().max())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::Scenario;

    #[test]
    fn flows_of_a_bad_phase_are_told_from_others() {
        let dark = "[[event]]\nkind='blackhole'\npath='a'\nevery_s=5\nlength_ms=[2000,2000]";
        let scenario = Scenario::two_paths(20, "noise_ms=0\n", dark);
        let schedule = Schedule::generate(&scenario, 1, 0);
        let event = schedule.events[0];
        let start_ns = 1_000_000_000;
        let flow = |after_us: i64, path: Option<u8>| {
            let opened_ns = (start_ns as i64 + (event.start_us + after_us) * 1000) as u64;
            ShortFlow {
                client_port: 1,
                opened_ns,
                path,
                moved: false,
                readdressed: path == Some(1),
                rtts: vec![(opened_ns, path.map(|_| 20_000))],
            }
        };
        let flows = [
            flow(-100_000, Some(0)),  // before it
            flow(100_000, None),      // nobody could know yet
            flow(400_000, Some(1)),   // avoids it
            flow(500_000, None),      // does not
            flow(2_100_000, Some(0)), // after it
        ];
        let (own, oracle) = figures(&flows, &schedule, start_ns, &(0..u64::MAX));
        assert_eq!(own["sessions_avoid"].value, 0.5);
        assert_eq!(own["sessions_avoid"].n, 2);
        assert_eq!(own["sessions_rtt_p99_us"].value, f64::from(LOST_US));
        assert!((own["sessions_loss"].value - 2.0 / 3.0).abs() < 1e-9);
        assert_eq!(oracle["sessions_loss"].value, 0.0);
        assert!(oracle["sessions_rtt_p99_us"].value < 40_000.0);

        // Two repeats, in the first of which nothing happened.
        let mut sums = Figures::new();
        count_opened(&mut sums, &flows[..2], &(0..u64::MAX));
        count_opened(&mut sums, &flows, &(flows[1].opened_ns..u64::MAX));
        for choices in [0, 3] {
            count(&mut sums, "choices", choices, choices);
        }
        let sum = |name: &str| (sums[name].value, sums[name].n);
        assert_eq!(sum("sessions"), (6.0, 6));
        assert_eq!(sum("sessions_readdressed"), (1.0, 6));
        assert_eq!(sum("choices"), (3.0, 3));
    }
}
