// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab claims` finds a difference that is there, none where there is none, and pretends
//! nothing of claims that nothing tests yet. The tests of claims 3 and 4 are tested in `claims/redirection.rs`
//! and `claims/delta_bbr.rs`, and here only that they can be left out: 4 takes minutes.

use std::process::Command;

use mountain_lab::result::RunResult;
use serde_json::Value;

/// What `claims` printed as JSON, its exit code, and its result.
fn claims(seed: &str) -> (Value, bool, RunResult) {
    let out = tempfile::tempdir().unwrap();
    let run = Command::new(env!("CARGO_BIN_EXE_mountain-lab"))
        .args(["claims", "--quick", "--json", "--only", "1,2,5"])
        .args(["--seed", seed, "--out"])
        .arg(out.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&run.stderr);
    let json = serde_json::from_slice(&run.stdout).unwrap_or_else(|e| panic!("{e}: {said}"));
    let result = RunResult::read(&out.path().join("result.json")).unwrap();
    (json, run.status.success(), result)
}

#[test]
fn controls_hold_and_every_claim_has_a_verdict() {
    assert!(
        nix::unistd::Uid::effective().is_root(),
        "this test needs root: run it with sudo"
    );
    let (mut json, mut success, mut result) = claims("5");
    if json["controls"][1]["holds"] == false {
        // One time in a hundred chance finds a difference between equal paths. Then nothing is shown.
        for claim in json["claims"].as_array().unwrap() {
            assert_eq!(claim["detail"], "the controls failed");
        }
        (json, success, result) = claims("6");
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
    assert!(success);

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
    let run = Command::new(env!("CARGO_BIN_EXE_mountain-lab"))
        .args(["claims", "--only", "4,6"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&run.stderr);
    assert_eq!(run.status.code(), Some(2));
    assert!(said.contains("6 is not in 1..=5"), "{said}");
}
