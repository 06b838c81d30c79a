// SPDX-License-Identifier: GPL-2.0-or-later
use super::*;
use crate::scenario::{Direction, EventKind};
use mountain_lab::result::{CheckSpec, Metric, VoidRun};
use mountain_lab::workload::metrics::game_figures;
use testkit::page::{section, stands_alone};

const SECONDS: u64 = 20;
const FLOWS: u64 = 20;
const START_NS: u64 = 77_000_000_000;

/// Packets of 20 flows at 60/s: path 0 has a spike of +150 ms from 5 s to 5.6 s; `steered` packets
/// leave it after 200 ms.
fn packets(steered: bool) -> Vec<Packet> {
    (0..SECONDS * 60 * FLOWS)
        .map(|i| {
            let sent_ns = i * 1_000_000_000 / (60 * FLOWS);
            let flow = i % FLOWS;
            let spike = (5_000_000_000..5_600_000_000).contains(&sent_ns);
            let off = steered && sent_ns > 5_200_000_000;
            let path = if off { 1 } else { (flow % 2) as u8 };
            let noise = (i * 7919 % 4001) as u32;
            let extra = if spike && path == 0 { 150_000 } else { 0 };
            Packet {
                flow: flow as u16,
                seq: (i / FLOWS) as u32,
                sent_ns: START_NS + sent_ns,
                rtt_us: (i % 997 != 0).then_some(18_000 + noise + extra),
                path: Some(path),
                ..Packet::default()
            }
        })
        .collect()
}

fn sample() -> (RunResult, PlotData) {
    let mut result = RunResult::new("spiky <demo>", "mountain-lab run spiky --seed 42", 42, 1);
    let spike = ScheduledEvent {
        path: 0,
        kind: EventKind::Spike,
        direction: Direction::Both,
        start_us: 5_000_000,
        end_us: 5_600_000,
        height_us: 150_000,
        loss: 0.0,
        rate_bps: None,
    };
    let mut samples = PlotData {
        paths: vec!["u0".into(), "u1".into()],
        events: vec![(0, spike)],
        ..PlotData::default()
    };
    for (policy, steered) in [("ecmp", false), ("mountain", true)] {
        let packets = packets(steered);
        result.add(policy, 0, &game_figures(&packets, 20_000.0, 2));
        let policy = policy.to_owned();
        samples.segments.push(DrawnSegment {
            policy,
            repeat: 0,
            start_ns: START_NS,
            packets,
        });
    }
    result
        .emulator
        .insert("error_p99_us".into(), Metric::single("us", 310.0, 900));
    let reason = "emulator error p99 3.1 ms".to_owned();
    result.void.push(VoidRun {
        policy: "ecmp".into(),
        repeat: 1,
        reason,
    });
    result.environment.insert("base_rtt_ms".into(), 20.into());
    let spec = "policy='mountain'\nmetric='rtt_p99_us'\nop='<='\nlimit=0.01\nreference='ecmp'";
    result.evaluate(&[toml::from_str::<CheckSpec>(spec).unwrap()]);
    (result, samples)
}

#[test]
fn page_has_every_section_and_stands_alone() {
    let (result, samples) = sample();
    let dir = tempfile::tempdir().unwrap();
    let path = write_html(&result, &samples, dir.path()).unwrap();
    let html = std::fs::read_to_string(&path).unwrap();
    let all = "verdict table timeline tail cdf histogram emulator environment reproduce";
    for id in all.split(' ') {
        let body = section(&html, id);
        assert!(body.len() > 60, "section {id} is empty: {body}");
        let plot = ["timeline", "tail", "cdf", "histogram"].contains(&id);
        assert_eq!(body.contains("<polyline"), plot, "section {id}");
    }
    stands_alone(&html);
    assert!(html.contains("spiky &lt;demo&gt;") && !html.contains("spiky <demo>"));
    assert!(html.contains("MISSED"), "the missed check is shown");
    assert!(
        html.contains("emulator error p99 3.1 ms"),
        "the void run is shown"
    );
    assert!(html.contains("mountain-lab run spiky --seed 42"));
    assert!(html.contains("spike on u0"), "what is shaded is named");
}

#[test]
fn csv_has_every_packet() {
    let (_, samples) = sample();
    let csv = csv(&samples);
    let lines: Vec<&str> = csv.lines().collect();
    assert_eq!(lines.len(), 1 + 2 * (SECONDS * 60 * FLOWS) as usize);
    let columns = lines[0].split(',').count();
    assert!(lines.iter().all(|l| l.split(',').count() == columns));
    assert_eq!(
        lines[1], "ecmp,0,0,0,0,,,,,0,0,0",
        "the first packet was lost"
    );
    assert_eq!(lines[2], "ecmp,0,1,0,833,21918,,,,1,0,0");
}

#[test]
fn page_without_packets_says_so() {
    let result = RunResult::new("empty", "mountain-lab run empty", 1, 1);
    let dir = tempfile::tempdir().unwrap();
    let path = write_html(&result, &PlotData::default(), dir.path()).unwrap();
    let html = std::fs::read_to_string(path).unwrap();
    assert!(html.contains("No packet was answered"));
    assert!(html.contains("promises no figures"));
}
