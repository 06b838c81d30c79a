//! `mountain-lab cc` end to end: one short run, and what it says when it cannot.

use std::process::{Command, Output};

use mountain_lab::result::RunResult;

fn lab(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_mountain-lab"))
        .arg("cc")
        .args(args)
        .output()
        .unwrap()
}

#[test]
fn cells_are_listed_and_unknown_ones_refused() {
    let list = lab(&["--list"]);
    let text = String::from_utf8(list.stdout).unwrap();
    for name in ["step-50-10", "steady-1-bdp", "two-states", "against-cubic"] {
        assert!(text.contains(name), "{text}");
    }
    let wrong = lab(&["--cells", "nonesuch"]);
    assert_eq!(wrong.status.code(), Some(2));
    let error = String::from_utf8(wrong.stderr).unwrap();
    assert!(
        error.contains("no cell nonesuch: `mountain-lab cc --list`"),
        "{error}"
    );
}

#[test]
fn a_step_is_braked_for() {
    let out = tempfile::tempdir().unwrap();
    let dir = out.path().display().to_string();
    let args = "--quick --cells step-50-10 --cc mountain,bbr --repeat 1 --out";
    let mut args: Vec<&str> = args.split(' ').collect();
    args.push(&dir);
    let run = lab(&args);
    let said = String::from_utf8_lossy(&run.stdout);
    let error = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{said}{error}");
    let result = RunResult::read(&out.path().join("result.json")).unwrap();
    if !result.void.is_empty() {
        eprintln!("the machine was too busy: {:?}", result.void);
        return;
    }
    let median = |who: &str, what: &str| {
        let name = format!("step-50-10/{what}");
        result.metric(who, &name).unwrap().median
    };
    assert!(median("mountain", "brakes") >= 1.0, "{said}");
    for who in ["mountain", "bbr"] {
        assert!((0.3..=1.0).contains(&median(who, "goodput")), "{said}");
    }
    // The figures themselves are for the bench; that they go in the right direction is not.
    let after = |who| median(who, "after_p50_us");
    assert!(after("mountain") < after("bbr"), "{said}");
    assert_eq!(result.checks.len(), 4);
    // Nothing stays behind.
    let all = "/proc/sys/net/ipv4/tcp_available_congestion_control";
    assert!(!std::fs::read_to_string(all).unwrap().contains("mtl"));
}
