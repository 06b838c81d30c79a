// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab claims` finds a difference that is there, none where there is none, and pretends
//! nothing of claims that nothing tests yet. The tests of claims 3 and 4 are tested in `claims/redirection.rs`
//! and `claims/delta_bbr.rs`, and here only that they can be left out: 4 takes minutes.

use mountain_lab::result::RunResult;
use serde_json::Value;

use crate::support::{refused, result_of};

/// What `claims` printed as JSON, and its result. It succeeds even if a control fails.
fn claims(seed: &str) -> (Value, RunResult) {
    let run = result_of(&format!("claims --quick --json --only 1,2,5 --seed {seed}"));
    let json = serde_json::from_slice(&run.output.stdout);
    (
        json.unwrap_or_else(|e| panic!("{e}: {}", run.said)),
        run.result,
    )
}

#[test]
fn controls_hold_and_every_claim_has_a_verdict() {
    let (mut json, mut result) = claims("5");
    if json["controls"][1]["holds"] == false {
        // One time in a hundred chance finds a difference between equal paths. Then nothing is shown.
        for claim in json["claims"].as_array().unwrap() {
            assert_eq!(claim["detail"], "the controls failed");
        }
        (json, result) = claims("6");
    }

    let control = |i: usize| &json["controls"][i];
    let rows = |i: usize, which: &str| control(i)["judgement"][which].as_array().unwrap().clone();
    assert!(rows(0, "worse").contains(&"Median".into()), "{json:#}");
    assert!(rows(0, "better").is_empty() && control(0)["holds"] == true);
    let row = |i: usize, name: &str| {
        let rows = control(i)["judgement"]["compared"]["rows"].as_array();
        let row = rows.unwrap().iter().find(|r| r["name"] == name);
        row.unwrap()["against_first"][0]["difference"].clone()
    };
    let shift = row(0, "Median")["estimate"].as_f64().unwrap();
    assert!((1_500.0..2_500.0).contains(&shift), "{shift}");
    assert!(rows(1, "worse").is_empty() && rows(1, "better").is_empty());
    assert_eq!(control(1)["holds"], true);

    let claims = json["claims"].as_array().unwrap();
    let numbers: Vec<_> = claims
        .iter()
        .map(|c| c["number"].as_u64().unwrap())
        .collect();
    assert_eq!(numbers, [1, 2, 5]);
    for claim in claims {
        assert_eq!(claim["verdict"], "not shown", "{claim}");
        let why = claim["detail"].as_str().unwrap();
        // No kernel that these tests run on has the patches.
        assert!(why.contains("this kernel has not got net."), "{why}");
    }
    assert_eq!(result.environment["claims"], json["claims"]);
    assert!(
        result.command.contains(" --only 1,2,5 "),
        "{}",
        result.command
    );
    assert_eq!(result.checks.len(), 2);
    assert!(result.checks.iter().all(|c| c.figure == Some(1.0)));
    // Nor does a run with --quick fail when a control does.
    assert!(result.checks.iter().all(|c| c.too_short));
    let slower = result.metric("path +2 ms", "rtt_p50_us").unwrap();
    assert_eq!(slower.values.len(), 8);
}

#[test]
fn there_are_five_claims_to_choose_from() {
    let said = refused("claims --only 4,6");
    assert!(said.contains("6 is not in 1..=5"), "{said}");
}
