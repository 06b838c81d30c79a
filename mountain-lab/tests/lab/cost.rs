// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab cost` measures what it says and writes it. Content only: timing is the bench's.

use crate::support::{refused, result_of};

#[test]
fn quick_cost_has_every_figure() {
    let result = result_of("cost --quick").result;
    assert_eq!(result.scenario, "cost");
    for (policy, metrics) in [
        ("empty program", "run_ns prog_run_ns"),
        ("ecmp", "run_ns"),
        ("none", "packet_ns connect_udp_ns connect_tcp_ns forward_ns"),
        ("placing", "connect_udp_ns connect_tcp_ns forward_ns"),
        ("moved", "packet_ns first_run_ns both_runs_ns tcp_ratio"),
        ("stay", "run_ns net_run_ns prog_run_ns tcp_ratio"),
        ("stay", "table_small_ns table_zipf_ns table_uniform_ns"),
    ] {
        for metric in metrics.split(' ') {
            let m = result.metric(policy, metric).expect(metric);
            let ordered = m.median > 0.0 && m.lo <= m.median && m.median <= m.hi;
            assert!(ordered && m.n >= 5, "{policy} {metric}: {m:?}");
        }
    }
    // Differences of two noisy figures: may be anything, but not absent.
    for (policy, metric) in [
        ("moved", "second_run_ns"),
        ("stay", "packet_added_ns"),
        ("placing", "connect_udp_added_ns"),
        ("placing", "connect_tcp_added_ns"),
        ("placing", "forward_added_ns"),
    ] {
        let difference = result.metric(policy, metric);
        assert!(
            difference.is_some_and(|m| m.median.is_finite()),
            "{policy} {metric}"
        );
    }
    assert_eq!(result.checks.len(), 13, "{:#?}", result.checks);
    assert!(
        result.checks.iter().all(|c| c.figure.is_some()),
        "{:#?}",
        result.checks
    );

    // What was counted, not timed: these hold on any machine.
    let evictions = result.environment["eviction"].as_array().unwrap();
    let get = |i: usize, name: &str| evictions[i][name].as_u64().unwrap();
    assert_eq!(evictions.len(), 3);
    for i in 0..2 {
        assert_eq!(get(i, "changed"), 0, "{evictions:#?}");
        let share = get(i, "on_path_1") as f64 / get(i, "live") as f64;
        assert!(
            (0.45..0.55).contains(&share),
            "both paths in use: {evictions:#?}"
        );
    }
    assert_eq!(get(2, "on_path_1"), get(2, "live"), "{evictions:#?}");
    assert!(
        get(1, "evicted") > get(1, "live") / 10,
        "overfull, so eviction happens: {evictions:#?}"
    );
}

#[test]
fn unknown_part_is_refused() {
    assert!(refused("cost --only nonesuch").contains("nonesuch"));
}
