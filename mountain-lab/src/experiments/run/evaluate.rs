// SPDX-License-Identifier: GPL-2.0-or-later
//! From what was collected to what is claimed: figures, checks, result file, page.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::process::ExitCode;

use anyhow::{ensure, Result};
use mountain_lab::result::{Metric, RunResult};
use mountain_lab::workload::game::Packet;
use mountain_lab::workload::metrics::{
    flow_moves, game_figures, put, shares, Figure, Figures, Onset,
};
use mountain_lab::workload::stats::median;
use serde_json::Value;

use super::pooled::Pooled;
use super::{least, sessions, PolicySegment, RunArgs};
use crate::driver::Session;
use crate::report::{write_html, DrawnSegment, PlotData};
use crate::scenario::schedule::Schedule;
use crate::scenario::{Bound, ComparedPolicy, EventKind, Replies, Scenario, WorkloadKind};

/// A flow without an answer for this long counts as lost.
const LOST_AFTER_NS: u64 = 2_000_000_000;

/// Kept with every result in which the product ran.
const ONE_DAEMON: &str = "mountain ran on through all segments (only the policy `none` stops it): \
    what it had learnt of the paths, holds and flaps too, in earlier segments, in those of other \
    policies and in void ones, counts in later ones";

/// Turns segments into figures, checks them, writes everything.
pub fn finish(
    args: &RunArgs,
    scenario: &Scenario,
    segments: &[PolicySegment],
    mut session: Session,
) -> Result<ExitCode> {
    let (seed, result) = (args.common.seed, &mut session.result);
    let mut samples = PlotData {
        paths: scenario.paths.iter().map(|p| p.name.clone()).collect(),
        ..PlotData::default()
    };
    let mut pooled = Pooled::default();
    for repeat in 0..scenario.repeats {
        let schedule = Schedule::generate(scenario, seed, repeat);
        let own: Vec<&PolicySegment> = segments.iter().filter(|s| s.repeat == repeat).collect();
        let Some(first) = own.first() else { continue };
        let events = schedule.events.iter().map(|event| (repeat, *event));
        samples.events.extend(events);
        let best = put_bounds(scenario, &schedule, first, result, &mut samples);
        for segment in own {
            let (name, packets) = (segment.policy.name(), measured(segment));
            let mut own = figures(segment, &packets, best, scenario);
            let slow = goodput_beside_slow(segment, &packets, &schedule, scenario);
            own.extend(slow.map(|f| ("goodput_beside_slow".into(), f)));
            if has_sessions(scenario) {
                own.extend(session_figures(segment, &schedule).0);
            }
            result.add(&name, repeat, &own);
            pooled.add(scenario, &schedule, segment, &packets);
            samples.segments.push(drawn(&name, segment, packets));
        }
    }
    pooled.put(result);
    emulator_metrics(result, segments, seed);
    describe(scenario, segments, result)?;
    hold_checks(scenario, result);
    let result = session.judge(&least(args)?);
    let out = args.out();
    let path = result.write(&out)?;
    let page = write_html(&result, &samples, &out)?;
    print!("{}", result.table());
    println!("\nwritten: {} and {}", path.display(), page.display());
    ensure!(
        !segments.is_empty(),
        "every repeat was void: {}. This machine was too busy: end other programs, and run it again",
        result.void[0].reason
    );
    Ok(result.exit_code(args.check))
}

/// What the oracle and the policies' bounds would have made of a repeat. Returns the oracle's median, µs.
fn put_bounds(
    scenario: &Scenario,
    schedule: &Schedule,
    first: &PolicySegment,
    result: &mut RunResult,
    samples: &mut PlotData,
) -> f64 {
    let (repeat, paths) = (first.repeat, scenario.paths.len());
    let bounded = |bound| {
        let packets = measured(first);
        bound_packets(packets, first.start_ns, schedule, scenario.replies, bound)
    };
    let oracle = bounded(Bound::default());
    let rtts = oracle.iter().filter_map(|p| p.rtt_us).map(f64::from);
    let best = median(&rtts.collect::<Vec<f64>>());
    let mut best_figures = game_figures(&oracle, best, paths);
    if has_sessions(scenario) {
        best_figures.extend(session_figures(first, schedule).1);
    }
    result.add("oracle", repeat, &best_figures);
    samples.segments.push(drawn("oracle", first, oracle));
    for policy in &scenario.policies {
        let Some(bound) = policy.bound() else {
            continue;
        };
        let packets = bounded(bound);
        let mut bound_figures = game_figures(&packets, best, paths);
        bound_figures.extend(moves(&packets, &first.measured));
        result.add(&policy.name(), repeat, &bound_figures);
        samples.segments.push(drawn(&policy.name(), first, packets));
    }
    best
}

/// What a policy that knows the paths would have had, but for what it lacks: the same sending times,
/// all on the path that it holds best.
fn bound_packets(
    mut packets: Vec<Packet>,
    start_ns: u64,
    schedule: &Schedule,
    replies: Replies,
    bound: Bound,
) -> Vec<Packet> {
    let paths = schedule.paths();
    let is_way = |(out, back): &(usize, usize)| match replies {
        Replies::SamePath => back == out,
        Replies::OtherPath => *back == (out + 1) % paths,
        Replies::Free => true,
    };
    let all = (0..paths).flat_map(|out| (0..paths).map(move |back| (out, back)));
    let ways: Vec<(usize, usize)> = all.filter(is_way).collect();
    packets.sort_by_key(|p| p.sent_ns);
    let mut chosen = None;
    for p in &mut packets {
        let t_us = (p.sent_ns as i64 - start_ns as i64) / 1000;
        let known_us = t_us - i64::from(bound.late_us);
        let expected_us = |way| schedule.expected_us(way, known_us);
        chosen = bound.choose(chosen, ways.iter().copied(), expected_us);
        let Some(way) = chosen else { continue };
        let trip = schedule.drawn_trip(way, t_us, p.flow.into());
        *p = Packet {
            flow: p.flow,
            seq: p.seq,
            sent_ns: p.sent_ns,
            rtt_us: trip.map(|t| t.rtt_us()),
            forward_us: trip.map(|t| t.forward_us),
            backward_us: trip.map(|t| t.backward_us),
            path: trip.map(|_| way.0 as u8),
            ..Packet::default()
        };
    }
    packets
}

/// Compares the promised figures with the measured ones. A check of a policy that the user has left out says so.
pub(super) fn hold_checks(scenario: &Scenario, result: &mut RunResult) {
    result.evaluate(&scenario.checks);
    for (check, spec) in result.checks.iter_mut().zip(&scenario.checks) {
        let mut needed = [Some(&spec.policy), spec.reference.as_ref()].into_iter();
        let absent = needed.find_map(|policy| policy.filter(|p| !scenario.compares(p)));
        check.not_run = absent.map(|policy| format!("--policies leaves out {policy}"));
    }
}

/// What was run, into the result's environment.
fn describe(scenario: &Scenario, segments: &[PolicySegment], result: &mut RunResult) -> Result<()> {
    result.note("scenario", serde_json::to_value(scenario)?);
    if segments.iter().any(|s| s.policy != ComparedPolicy::None) {
        result.note("notes", [ONE_DAEMON]);
    }
    let details = segments.iter().map(|s| {
        serde_json::json!({
            "repeat": s.repeat, "policy": s.policy.name(), "generator": s.seen.health,
            "emulator": s.error, "cpu_busy": s.cpu_busy, "product_cores": s.product_cores,
            "status": s.status, "explain": s.explain, "foreign": s.seen.loads,
        })
    });
    result.note("segments", details.collect::<Value>());
    Ok(())
}

pub(super) fn has_sessions(scenario: &Scenario) -> bool {
    let mut workloads = scenario.workloads.iter();
    workloads.any(|w| w.kind == WorkloadKind::Sessions)
}

/// Figures of the flows that choose when they start, and the oracle's.
fn session_figures(segment: &PolicySegment, schedule: &Schedule) -> (Figures, Figures) {
    sessions::figures(
        &segment.seen.shorts,
        schedule,
        segment.start_ns,
        &segment.measured,
    )
}

/// The packets of the measured part.
fn measured(segment: &PolicySegment) -> Vec<Packet> {
    let inside = |p: &&Packet| segment.measured.contains(&p.sent_ns);
    let packets = segment.seen.packets.iter();
    packets.filter(inside).copied().collect()
}

fn drawn(policy: &str, segment: &PolicySegment, packets: Vec<Packet>) -> DrawnSegment {
    DrawnSegment {
        policy: policy.into(),
        repeat: segment.repeat,
        start_ns: segment.start_ns,
        packets,
    }
}

fn figures(
    segment: &PolicySegment,
    packets: &[Packet],
    best_median_us: f64,
    scenario: &Scenario,
) -> Figures {
    let mut figures = game_figures(packets, best_median_us, scenario.paths.len());
    figures.extend(moves(packets, &segment.measured));
    let mut put = |name: &str, unit, value, n| put(&mut figures, name, unit, value, n);
    let (lost, flows) = flows_lost(packets, &segment.measured);
    put("flows_lost", "count", lost as f64, flows);
    let span_ns = segment.measured.end - segment.measured.start;
    if let Some(bits) = game_payload_bits(scenario) {
        let answered = packets.iter().filter(|p| p.rtt_us.is_some()).count();
        let goodput = answered as f64 * bits / (span_ns as f64 / 1e9);
        put("game_goodput_bps", "bps", goodput, packets.len() as u64);
    }
    if let Some(cores) = segment.product_cores {
        put("product_cpu", "ratio", cores, 1);
    }
    if let Some(n) = decisions(&segment.explain, span_ns, |_| true) {
        put("switches", "count", n as f64, n);
    }
    bulk_figures(segment, scenario.paths.len(), &mut put);
    figures
}

/// Goodput, share of the bytes per path, and reordering of the TCP flows; share of short flows.
fn bulk_figures(
    segment: &PolicySegment,
    paths: usize,
    put: &mut impl FnMut(&str, &'static str, f64, u64),
) {
    let seen = &segment.seen;
    let flows = || seen.bulks.iter().flat_map(|b| &b.flows);
    let n = flows().count() as u64;
    if let Some(goodput) = seen.goodput_bps(&segment.measured) {
        put("goodput_bps", "bps", goodput, n);
        let failed = flows().filter(|f| f.error.is_some()).count();
        put("bulk_failed", "count", failed as f64, n);
        let unobserved: u64 = seen.bulks.iter().map(|b| b.unobserved).sum();
        put("bulk_unobserved", "count", unobserved as f64, n);
        let bytes_on = |path: Option<u8>| -> u64 {
            let visits = flows().flat_map(|f| &f.trace.visits);
            let counted = visits.filter(|v| v.last_ns >= segment.measured.start);
            let counted = counted.filter(|v| path.is_none() || v.path == path);
            counted.map(|v| v.bytes).sum()
        };
        let all = bytes_on(None);
        for path in 0..paths {
            let share = bytes_on(Some(path as u8)) as f64 / all.max(1) as f64;
            put(&format!("bulk_share_path{path}"), "ratio", share, n);
        }
        let moves = flows().map(|f| f.trace.moves_within(&segment.measured));
        put("bulk_moves", "count", moves.sum::<usize>() as f64, n);
        let (unforced, forced) = reordered_by_kind(segment);
        put("bulk_reordered", "count", (unforced + forced) as f64, n);
        if segment.moves.is_array() {
            put("bulk_reordered_unforced", "count", unforced as f64, n);
            put("bulk_reordered_forced", "count", forced as f64, n);
        }
    }
    let shorts = seen.shorts.iter();
    let shorts = shorts.filter(|f| segment.measured.contains(&f.opened_ns));
    let (shares, n) = shares(shorts.map(|f| f.path), paths);
    if n > 0 {
        let n = n as u64;
        for (path, share) in shares.into_iter().enumerate() {
            put(&format!("short_share_path{path}"), "ratio", share, n);
        }
    }
}

/// Segments overtaken by a move of their flow: those within a second after a move that did not wait
/// for a pause in the flow (`mountain explain --moves`), and all others.
fn reordered_by_kind(segment: &PolicySegment) -> (u64, u64) {
    let forced = |m: &Value| -> Option<(u16, u64)> {
        let is_forced = !m["reason"].as_str()?.eq_ignore_ascii_case("flowlet");
        let port = m["key"]["source"].as_str()?.rsplit(':').next()?;
        is_forced.then_some((port.parse().ok()?, m["at_ns"].as_u64()?))
    };
    let moves = segment.moves.as_array().map_or(&[][..], Vec::as_slice);
    let forced: Vec<(u16, u64)> = moves.iter().filter_map(forced).collect();
    let (mut unforced_count, mut forced_count) = (0, 0);
    for flow in segment.seen.bulks.iter().flat_map(|b| &b.flows) {
        let moved = flow.trace.reorderings.iter().filter(|r| r.across_paths);
        for r in moved.filter(|r| segment.measured.contains(&r.at_ns)) {
            let near = |at: u64| (at..at + 1_000_000_000).contains(&r.at_ns);
            let is_it = |&(port, at): &(u16, u64)| port == flow.client_port && near(at);
            match forced.iter().any(is_it) {
                true => forced_count += 1,
                false => unforced_count += 1,
            }
        }
    }
    (unforced_count, forced_count)
}

/// Flows that had no answer for [`LOST_AFTER_NS`] or more, and how many flows there were.
fn flows_lost(packets: &[Packet], measured: &Range<u64>) -> (u64, u64) {
    let mut answered: BTreeMap<u16, Vec<u64>> = BTreeMap::new();
    for p in packets {
        let times = answered
            .entry(p.flow)
            .or_insert_with(|| vec![measured.start]);
        if p.rtt_us.is_some() {
            times.push(p.sent_ns);
        }
    }
    let flows = answered.len() as u64;
    let silent = answered.into_values().filter(|times| {
        let mut times = times.clone();
        times.push(measured.end);
        times.sort_unstable();
        times.windows(2).any(|w| w[1] - w[0] >= LOST_AFTER_NS)
    });
    (silent.count() as u64, flows)
}

/// Decisions of this kind that the product has made about its paths in the last `span_ns`, from
/// `explain --json`.
pub(super) fn decisions(explain: &Value, span_ns: u64, is_one: fn(&Value) -> bool) -> Option<u64> {
    let now_us = explain["now_us"].as_f64()?;
    let since_us = now_us - span_ns as f64 / 1e3;
    let decisions = explain["decisions"].as_array()?;
    let is_recent = |d: &Value| d["at_us"].as_f64().is_some_and(|t| t >= since_us);
    let recent = decisions.iter().filter(|d| is_recent(d) && is_one(d));
    Some(recent.count() as u64)
}

/// Whether a decision changes which paths new flows choose from: they are of the latency class.
pub(super) fn changes_new_flows(decision: &Value) -> bool {
    let may = |when: &str| matches!(decision[when].as_str(), Some("all" | "least-bad"));
    may("from") != may("to")
}

/// Headers of a UDP datagram over IPv4 (RFC 791, RFC 768), which a path's rate counts.
const UDP_HEADERS_BITS: f64 = 28.0 * 8.0;

/// Payload of a game packet, if all workloads agree.
fn game_payload_bits(scenario: &Scenario) -> Option<f64> {
    let mut games = scenario.workloads.iter();
    let first = games.find(|w| w.kind == WorkloadKind::Game)?.payload_bytes;
    let alike = games.all(|w| w.kind != WorkloadKind::Game || w.payload_bytes == first);
    alike.then_some(first as f64 * 8.0)
}

/// Goodput of all TCP flows while a path was slow, over what the other paths carry besides the latency flows
/// that are on them.
fn goodput_beside_slow(
    segment: &PolicySegment,
    packets: &[Packet],
    schedule: &Schedule,
    scenario: &Scenario,
) -> Option<Figure> {
    let packet_bits = match packets {
        [] => 0.0,
        _ => game_payload_bits(scenario)? + UDP_HEADERS_BITS,
    };
    let at_ns = |us: i64| segment.start_ns + us.max(0) as u64 * 1000;
    let slow = schedule.events.iter().filter(|e| e.kind == EventKind::Slow);
    let (mut bits, mut carried, mut n) = (0.0, 0.0, 0);
    for event in slow {
        let from_ns = at_ns(event.start_us).max(segment.measured.start);
        let until_ns = at_ns(event.end_us).min(segment.measured.end);
        let span = from_ns..until_ns;
        let span_s = until_ns.saturating_sub(from_ns) as f64 / 1e9;
        let Some(goodput) = segment.seen.goodput_bps(&span).filter(|g| g.is_finite()) else {
            continue;
        };
        let others = scenario.paths.iter().enumerate();
        let others = others.filter(|(i, _)| *i != event.path);
        let rate_bps: f64 = others.map(|(_, p)| p.rate_mbit * 1e6).sum();
        let is_beside = |p: &&Packet| {
            span.contains(&p.sent_ns) && p.path.is_some_and(|path| usize::from(path) != event.path)
        };
        let beside = packets.iter().filter(is_beside).count() as f64;
        bits += goodput * span_s;
        carried += rate_bps * span_s - beside * packet_bits;
        n += 1;
    }
    (n > 0).then_some(Figure {
        unit: "ratio",
        value: bits / carried,
        n,
    })
}

/// How often flows changed their path.
fn moves(packets: &[Packet], measured: &Range<u64>) -> Figures {
    let count = flow_moves(packets) as f64;
    let flows: BTreeSet<u16> = packets.iter().map(|p| p.flow).collect();
    let minutes = (measured.end - measured.start) as f64 / 60e9;
    let mut figures = Figures::new();
    put(&mut figures, "moves", "count", count, packets.len() as u64);
    if !flows.is_empty() {
        let n = flows.len() as u64;
        let rate = count / (n as f64 * minutes);
        put(&mut figures, "moves_per_flow_minute", "count", rate, n);
    }
    figures
}

pub(super) fn onsets<'a>(
    segment: &'a PolicySegment,
    schedule: &'a Schedule,
) -> impl Iterator<Item = Onset> + 'a {
    let at = |t_us: i64| (segment.start_ns as i64 + t_us * 1000) as u64;
    schedule.onsets().map(move |e| Onset {
        at_ns: at(e.start_us),
        until_ns: at(e.end_us).min(segment.measured.end),
        path: e.path as u8,
        blackhole: e.loss >= 1.0,
    })
}

fn emulator_metrics(result: &mut RunResult, segments: &[PolicySegment], seed: u64) {
    type Get = fn(&PolicySegment) -> f64;
    let all: [(&str, &str, Get); 6] = [
        ("error_p50_us", "us", |s| s.error.p50_us.into()),
        ("error_p99_us", "us", |s| s.error.p99_us.into()),
        ("error_max_us", "us", |s| s.error.max_us.into()),
        ("loss", "ratio", |s| s.error.loss),
        ("cpu", "ratio", |s| s.error.cores),
        ("machine_busy", "ratio", |s| s.cpu_busy),
    ];
    let n = segments.iter().map(|s| s.error.n as u64).sum();
    for (name, unit, get) in all {
        let values = segments.iter().map(|s| Some(get(s))).collect();
        let metric = Metric::of_repeats(unit, values, n, seed);
        result.emulator.insert(name.into(), metric);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_flow_is_lost_when_it_is_silent_for_two_seconds() {
        let packet = |flow, s: f64, answered: bool| Packet {
            flow,
            sent_ns: (s * 1e9) as u64,
            rtt_us: answered.then_some(20_000),
            ..Packet::default()
        };
        // Flow 0: answered all the time. Flow 1: silent from 1 s on. Flow 2: a gap of 1.5 s.
        let packets: Vec<Packet> = (0..10)
            .flat_map(|i| {
                let s = f64::from(i) * 0.5;
                [
                    packet(0, s, true),
                    packet(1, s, s <= 1.0),
                    packet(2, s, s != 2.0 && s != 2.5),
                ]
            })
            .collect();
        assert_eq!(flows_lost(&packets, &(0..5_000_000_000)), (1, 3));
    }

    /// What a policy's bound, without one the oracle, makes of a packet every 10 ms.
    fn bounded(schedule: &Schedule, policy: Option<ComparedPolicy>) -> Vec<Packet> {
        let bound = policy.and_then(ComparedPolicy::bound).unwrap_or_default();
        let sent = (0..2500u64).map(|i| Packet {
            sent_ns: i * 10_000_000,
            ..Packet::default()
        });
        bound_packets(sent.collect(), 0, schedule, Replies::SamePath, bound)
    }

    #[test]
    fn bounds_lose_what_a_lossy_path_loses_until_they_know() {
        let loss =
            "[[event]]\nkind='loss'\npath='a'\nevery_s=5\nlength_ms=[2000,2000]\nloss_percent=30";
        let schedule = Schedule::generate(&Scenario::two_paths(20, "noise_ms=0\n", loss), 1, 0);
        let lost = |policy: Option<ComparedPolicy>| {
            let packets = bounded(&schedule, policy);
            packets.iter().filter(|p| p.rtt_us.is_none()).count()
        };
        assert_eq!(lost(None), 0);
        // Half of ten round trips, until it is known; then b is as good, and stays.
        let late = lost(Some(ComparedPolicy::Banded100));
        assert!((1..=10).contains(&late), "{late}");
    }

    #[test]
    fn bounds_learn_late_and_move_for_an_advantage_alone() {
        let scenario = |ms: u32| {
            let degrade = format!(
                "[[event]]\nkind='degrade'\npath='a'\nevery_s=5\nlength_ms=[2000,2000]\n\
                 height_ms=[{ms},{ms}]"
            );
            Scenario::two_paths(20, "noise_ms=0\n", &degrade)
        };
        // Packets that were late although the other path was not, by onset, and moves.
        let play = |ms: u32, policy: Option<ComparedPolicy>| {
            let schedule = Schedule::generate(&scenario(ms), 1, 0);
            let packets = bounded(&schedule, policy);
            let late = packets.iter().filter(|p| p.rtt_us != Some(20_000)).count();
            let onsets = schedule.onsets().count();
            assert!(onsets >= 2);
            (
                late as f64 / onsets as f64,
                flow_moves(&packets) as f64 / onsets as f64,
            )
        };
        let (late, moved) = play(100, None);
        assert!(late == 0.0 && moved <= 1.0, "{late} {moved}");
        // 60 and 100 ms of packets of the first onset; then b is as good, and stays.
        let (late_60, _) = play(100, Some(ComparedPolicy::Banded60));
        let (late_100, _) = play(100, Some(ComparedPolicy::Banded100));
        assert!(late_60 > 1.0 && late_60 < late_100, "{late_60} {late_100}");
        // 20 ms are no advantage.
        let (late, moved) = play(20, Some(ComparedPolicy::Banded60));
        assert!(late > 190.0 && moved == 0.0, "{late} {moved}");
        assert!(play(20, Some(ComparedPolicy::Late60)).0 < 10.0);
    }

    #[test]
    fn only_decisions_of_the_measured_part_count_as_switches() {
        let explain = json!({ "now_us": 10e6, "decisions": [
            { "at_us": 1e6, "from": "all", "to": "nothing" },
            { "at_us": 6e6, "from": "nothing", "to": "bulk-only" },
            { "at_us": 9e6, "from": "bulk-only", "to": "all" } ] });
        let last = |is_one| decisions(&explain, 5_000_000_000, is_one);
        assert_eq!(last(|_| true), Some(2));
        assert_eq!(last(changes_new_flows), Some(1));
        assert_eq!(decisions(&Value::Null, 5_000_000_000, |_| true), None);
    }
}
