// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab cc` end to end: one short run, and what it says when it cannot.

use mountain_lab::result::RunResult;
use testkit::assert_has;

use crate::support::{alone, lab, refused, result_of, Run};

/// No congestion control of a run stays behind.
fn nothing_is_left() {
    let all = "/proc/sys/net/ipv4/tcp_available_congestion_control";
    assert!(!std::fs::read_to_string(all).unwrap().contains("mtl"));
}

/// Who has figures of a cell after one repeat. Who has none must be void. A void segment, which may have
/// been tried again with success, was void because the machine was too busy, never for another reason.
fn valid<'a>(result: &RunResult, cell: &str, who: &[&'a str]) -> Vec<&'a str> {
    let mut valid = Vec::new();
    for who in who {
        let prefix = format!("{cell}/");
        let of = result.policies.get(*who);
        let any = of.is_some_and(|m| m.keys().any(|name| name.starts_with(&prefix)));
        let policy = format!("{cell} {who}");
        let mut voids = result.void.iter().filter(|v| v.policy == policy).peekable();
        assert!(any || voids.peek().is_some(), "{policy} is missing");
        for void in voids {
            assert!(void.reason.contains("emulator was late"), "{void:?}");
            assert_eq!(void.repeat, 0);
            eprintln!("the machine was too busy: {void:?}");
        }
        if any {
            valid.push(*who);
        }
    }
    valid
}

#[test]
fn cells_are_listed_and_unknown_ones_refused() {
    let list = lab("cc --list");
    let text = String::from_utf8(list.stdout).unwrap();
    let cells = ["step-50-10", "steady-1-bdp", "two-states", "against-cubic"];
    assert_has(&text, &cells);
    assert_has(&text, &["20 Mbit/s, a queue of 4 BDP, 1 % lost at random"]);
    let why = "no cell nonesuch: `mountain-lab cc --list`";
    assert_has(&refused("cc --cells nonesuch"), &[why]);
}

#[test]
fn a_step_is_braked_for() {
    let _alone = alone();
    let run = result_of("cc --quick --cells step-50-10 --cc mountain,bbr --repeat 1");
    let (result, out, said) = (&run.result, &run.out, &run.said);
    nothing_is_left();
    assert_eq!((result.scenario.as_str(), result.repeats), ("cc", 1));
    assert_eq!(result.checks.len(), 4);
    let valid = valid(result, "step-50-10", &["mountain", "bbr"]);
    let median = |who: &str, what: &str| {
        let name = format!("step-50-10/{what}");
        result.metric(who, &name).unwrap().median
    };
    for who in &valid {
        assert!((0.3..=1.0).contains(&median(who, "goodput")), "{said}");
    }
    if valid.contains(&"mountain") {
        assert!(median("mountain", "brakes") >= 1.0, "{said}");
    }
    // Of each check one side is missing otherwise, and in the plots.
    let measured = result.checks.iter().filter(|c| c.figure.is_some()).count();
    assert_eq!(measured, if valid.len() == 2 { 4 } else { 0 }, "{said}");
    if valid.len() < 2 {
        return;
    }
    // The figures themselves are for the bench; that they go in the right direction is not.
    let after = |who| median(who, "after_p50_us");
    assert!(after("mountain") < after("bbr"), "{said}");
    let plot = |name: &str| std::fs::read_to_string(out.path().join(name)).unwrap();
    let points = plot("throughput-delay.svg");
    assert_eq!(points.matches("<circle").count(), 2, "{points}");
    for name in ["step-50-10-rate.svg", "step-50-10-queue.svg"] {
        let svg = plot(name);
        assert_has(&svg, &["xmlns", "s after the step", "mountain", "bbr"]);
        let lines = svg.matches("<polyline").count();
        assert!(lines >= 2, "{lines} lines: {svg}");
    }
}

#[test]
fn a_longer_way_back_and_bursts_are_emulated() {
    let _alone = alone();
    let cells = "rtt-1-to-8,ack-bursts-30,late-to-cubic";
    let run = result_of(&format!(
        "cc --quick --cells {cells} --controls mountain --repeat 1"
    ));
    let Run { result, said, .. } = &run;
    nothing_is_left();
    // Nothing is promised of the first two.
    assert_eq!(result.checks.len(), 1, "{said}");
    let valid = |cell: &str| !valid(result, cell, &["mountain"]).is_empty();
    let median = |what: &str| result.metric("mountain", what).unwrap().median;
    for (metric, least, most) in [
        ("rtt-1-to-8/far_share", 0.01, 0.99),
        // BBR looks again after 10 s, and then the other's queue is in it; never is it less.
        ("rtt-1-to-8/min_rtt_ms", 40.0, 319.9),
        ("rtt-1-to-8/far_min_rtt_ms", 320.0, 640.0),
        ("ack-bursts-30/goodput", 0.3, 1.0),
        ("late-to-cubic/share", 0.01, 0.99),
    ] {
        if !valid(metric.split('/').next().unwrap()) {
            continue;
        }
        let median = median(metric);
        assert!(
            (least..=most).contains(&median),
            "{metric} {median}: {said}"
        );
    }
}

#[test]
fn cost_has_every_figure() {
    let _alone = alone();
    let run = result_of("cc --cost --quick");
    let Run { result, said, .. } = &run;
    assert_eq!((result.scenario.as_str(), result.repeats), ("cc-cost", 5));
    let metric = |who: &str, what: &str| {
        let found = result.metric(who, what);
        found.unwrap_or_else(|| panic!("{who} {what}: {said}"))
    };
    for who in ["mountain", "wrapped"] {
        let figures = "ack_ns ack_net_ns ack_runs ack_cong_control_ns goodput_bps cpu_ns_per_kb";
        for what in figures.split(' ') {
            let m = metric(who, what);
            assert!(m.median > 0.0 && m.values.len() == 5, "{who} {what}: {m:?}");
        }
        let (all, one) = (metric(who, "ack_ns"), metric(who, "ack_cong_control_ns"));
        assert!(one.median <= all.median, "{said}");
        assert!(metric(who, "ack_ns").n >= 500, "{said}");
    }
    assert!(metric("empty program", "run_ns").median > 0.0);
    assert!(metric("mountain", "cpu_ratio").median > 0.0);
    // Of content only: five pairs show nothing, whatever they are.
    assert_eq!(result.checks.len(), 2);
    assert!(result.checks.iter().all(|c| c.figure.is_some()), "{said}");
    assert!(result.checks.iter().all(|c| c.met.is_none()), "{said}");
    assert!(said.contains("too short to judge: --quick"), "{said}");
    assert!(result
        .environment
        .contains_key("softirqs_in_thread_cpu_time"));
    nothing_is_left();
    refused("cc --cost --cells fast");
}
