// SPDX-License-Identifier: GPL-2.0-or-later
use super::super::sniff::Visit;
use super::super::stream::BUCKET_NS;
use super::*;

fn flow(visits: &[(u8, u64, u64)]) -> FlowReport {
    let visits = visits
        .iter()
        .map(|(path, first_ns, last_ns)| Visit {
            path: Some(*path),
            first_ns: *first_ns,
            last_ns: *last_ns,
            bytes: 1,
        })
        .collect();
    FlowReport {
        client_port: 1,
        bytes_by_bucket: vec![100; 25],
        trace: FlowTrace {
            visits,
            ..FlowTrace::default()
        },
        error: None,
    }
}

#[test]
fn time_to_leave_by_the_last_segment_on_the_path() {
    const S: u64 = 1_000_000_000;
    let onset = Onset {
        at_ns: 10 * S,
        until_ns: 20 * S,
        path: 1,
        blackhole: false,
    };
    let moved = flow(&[(1, 0, 12 * S), (0, 12 * S + 1, 30 * S)]);
    assert_eq!(moved.time_to_leave(onset), Leave::Left(2 * S));
    assert_eq!(moved.trace.moves_within(&(0..u64::MAX)), 1);
    let back = flow(&[(1, 0, 12 * S), (0, 12 * S + 1, 14 * S), (1, 15 * S, 16 * S)]);
    assert_eq!(
        back.time_to_leave(onset),
        Leave::Left(6 * S),
        "a return counts"
    );
    let stayed = flow(&[(1, 0, 30 * S)]);
    assert_eq!(stayed.time_to_leave(onset), Leave::Stayed(10 * S));
    let elsewhere = flow(&[(1, 0, 5 * S), (0, 6 * S, 30 * S)]);
    assert_eq!(elsewhere.time_to_leave(onset), Leave::NotThere);
    let at_once = flow(&[(1, 0, 10 * S - 1), (0, 10 * S, 30 * S)]);
    assert_eq!(at_once.time_to_leave(onset), Leave::Left(0));
}

#[test]
fn goodput_counts_whole_buckets() {
    let report = BulkReport {
        start_ns: 500,
        flows: vec![flow(&[]), flow(&[])],
        unobserved: 0,
    };
    // 2 flows x 100 bytes per 0.1 s = 16 kbit/s.
    assert_eq!(report.goodput_bps(500, 500 + 10 * BUCKET_NS), 16_000.0);
    assert_eq!(report.goodput_bps(501, 499 + 10 * BUCKET_NS), 16_000.0);
    assert!(report.goodput_bps(500, 501).is_nan(), "no whole bucket");
}
