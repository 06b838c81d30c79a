// SPDX-License-Identifier: GPL-2.0-or-later
//! What `status` and `explain` print.

use super::*;
use crate::bpf::flows::{Class, FlowKey};
use crate::control::status::{Judged, MoveStatus};
use crate::measure::probe::PathStats;

#[test]
fn an_outcome_without_probes_is_not_called_unanswered() {
    let text = outcome_text(Some(&Outcome::default()));
    assert!(text.starts_with("undecided: there was nothing"), "{text}");
    let unanswered = Outcome {
        others_p95_us: Some(20e3),
        ..Outcome::default()
    };
    let text = outcome_text(Some(&unanswered));
    assert_eq!(
        text,
        "undecided: p95 after it unanswered, of the others 20.0 ms"
    );
}

#[test]
fn addresses_without_a_rule_are_named() {
    let mut text = String::new();
    push_held_addresses(&mut text, &[]);
    assert_eq!(text, "");
    let held = ["192.0.2.1", "2001:db8::1"].map(|a| a.parse::<IpAddr>().unwrap());
    push_held_addresses(&mut text, &held);
    let expected = "left alone: packets from 192.0.2.1, 2001:db8::1 (translated on another uplink); connections from \
                    outside to there may get no answer until that ends\n";
    assert_eq!(text, expected);
}

/// The cells of a row by their titles.
fn cell(row: &[String], title: &str) -> String {
    let at = head(TITLES).iter().position(|t| t == title).expect(title);
    row[at].clone()
}

#[test]
fn a_row_shows_what_is_known_and_what_holds_in_its_group() {
    let path = PathStatus {
        flows: Some(FlowCounts {
            latency: 2,
            bulk: 1,
        }),
        judged: Judged {
            state: "ejected".into(),
            samples: 100,
            p50_us: Some(20e3),
            loss: 0.001,
            ..Judged::default()
        },
        probes: PathStats {
            answered: 99,
            ..PathStats::default()
        },
        ..PathStatus::default()
    };
    let member = |state: &str| MemberStatus {
        state: state.into(),
        ..MemberStatus::default()
    };
    let row = member_row(&member("good"), &path, false);
    let shown = ["state", "loss", "latency/bulk"].map(|title| cell(&row, title));
    assert_eq!(shown, ["good", "0.1%", "2/1"]);
    // Its lost probes are in no figure, and its group moves no running flow.
    let path = PathStatus {
        flows: None,
        ..path
    };
    let row = member_row(&member("dead"), &path, false);
    let shown = ["state", "loss", "latency/bulk"].map(|title| cell(&row, title));
    assert_eq!(shown, ["dead", "-", "-"]);
    // The device is down: what is there could not be sent.
    let judged = Judged {
        p50_us: None,
        loss: 0.0,
        ..path.judged
    };
    let row = member_row(&member("ejected"), &PathStatus { judged, ..path }, false);
    let shown = ["p50 ms", "loss"].map(|title| cell(&row, title));
    assert_eq!(shown, ["-", "-"]);
}

#[test]
fn a_move_names_paths_that_may_be_gone_by_now() {
    let moved = Move {
        at_ns: 0,
        key: FlowKey {
            source: ([192, 0, 2, 1], 5000).into(),
            destination: ([198, 51, 100, 1], 443).into(),
            proto: 6,
        },
        from: 7,
        to: 1,
        reason: MoveReason::Dead,
        class: Class::Latency,
        gap_us: 0,
        need_us: 0,
    };
    let all = Moves {
        now_ns: 0,
        moves: vec![MoveStatus {
            from_name: "wwan0".into(),
            to_name: "eth0".into(),
            moved,
        }],
    };
    // Both ends of the control socket read it alike.
    let told = serde_json::to_value(&all).unwrap();
    assert_eq!(told["moves"][0]["from"], 7);
    assert_eq!(serde_json::from_value::<Moves>(told).unwrap(), all);
    let text = moves_text(&all);
    assert!(text.contains("wwan0 -> eth0: its path was dead"), "{text}");
}
