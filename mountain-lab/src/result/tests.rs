// SPDX-License-Identifier: GPL-2.0-or-later
use super::*;
use crate::workload::metrics::Figure;

fn figures(p99: f64) -> Figures {
    let figure = |unit, value, n| Figure { unit, value, n };
    Figures::from([
        ("rtt_p99_us".to_owned(), figure("us", p99, 1000)),
        ("loss".to_owned(), figure("ratio", 0.001, 1000)),
    ])
}

fn sample() -> RunResult {
    let mut result = RunResult::new("spiky", "mountain-lab run spiky", 42, 3);
    let p99s = [
        (200_000.0, 40_000.0),
        (100_000.0, 30_000.0),
        (400_000.0, 44_000.0),
    ];
    for (repeat, (ecmp, mountain)) in (0..).zip(p99s) {
        result.add("ecmp", repeat, &figures(ecmp));
        result.add("mountain", repeat, &figures(mountain));
    }
    result
        .emulator
        .insert("error_p99_us".into(), Metric::single("us", 310.0, 900));
    result
        .environment
        .insert("bases".into(), serde_json::json!({"rtt_ms": 20}));
    let reason = "emulator error p99 3.1 ms above 2 ms".to_owned();
    result.void.push(VoidRun {
        policy: "ecmp".into(),
        repeat: 1,
        reason,
    });
    result
}

fn spec(text: &str) -> CheckSpec {
    toml::from_str(text).unwrap()
}

#[test]
fn repeats_are_summed_up() {
    let result = sample();
    let metric = result.metric("mountain", "rtt_p99_us").unwrap();
    assert_eq!(metric.values, [40_000.0, 30_000.0, 44_000.0].map(Some));
    assert_eq!(metric.median, 40_000.0);
    assert_eq!((metric.lo, metric.hi), (30_000.0, 44_000.0));
    assert_eq!(metric.n, 3_000);
    assert_eq!(metric.unit, "us");
}

#[test]
fn round_trip_through_the_file() {
    let mut result = sample();
    result.evaluate(&[spec(
        "policy='mountain'\nmetric='rtt_p99_us'\nop='<='\nlimit=0.25\nreference='ecmp'",
    )]);
    // A missing figure is written as null and read back as such.
    result.evaluate(&[spec(
        "policy='nobody'\nmetric='rtt_p99_us'\nop='<='\nlimit=1",
    )]);
    let dir = tempfile::tempdir().unwrap();
    let path = result.write(&dir.path().join("new/dir")).unwrap();
    assert_eq!(RunResult::read(&path).unwrap(), result);
    let text = std::fs::read_to_string(&path).unwrap();
    for needle in [
        "\"schema\": \"mountain-result/1\"",
        "\"op\": \"<=\"",
        "\"met\": null",
    ] {
        assert!(text.contains(needle), "no {needle} in\n{text}");
    }
    let left = std::fs::read_dir(path.parent().unwrap()).unwrap().count();
    assert_eq!(left, 1, "a temporary file was left behind");
}

#[test]
fn not_a_number_does_not_break_the_file() {
    let mut result = sample();
    result.policies.get_mut("ecmp").unwrap().insert(
        "leave_p95_us".into(),
        Metric::of_repeats("us", vec![], 0, 1),
    );
    let dir = tempfile::tempdir().unwrap();
    let path = result.write(dir.path()).unwrap();
    let read = RunResult::read(&path).unwrap();
    assert!(read.metric("ecmp", "leave_p95_us").unwrap().median.is_nan());
}

#[test]
fn other_schemas_and_strange_members_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = sample().write(dir.path()).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(
        &path,
        text.replace("mountain-result/1", "mountain-result/9"),
    )
    .unwrap();
    let error = format!("{:#}", RunResult::read(&path).unwrap_err());
    assert!(error.contains("mountain-result/9"), "{error}");
    std::fs::write(&path, text.replace("\"seed\"", "\"sead\"")).unwrap();
    let error = format!("{:#}", RunResult::read(&path).unwrap_err());
    assert!(error.contains("sead"), "{error}");
}

#[test]
fn ratio_checks_pair_the_repeats() {
    let mut result = sample();
    let quarter = "policy='mountain'\nmetric='rtt_p99_us'\nop='<='\nlimit=0.25\nreference='ecmp'";
    result.evaluate(&[spec(quarter)]);
    // Ratios 0.2, 0.3, 0.11: their median, and not 40/200 by accident of the same order.
    assert_eq!(result.checks[0].figure, Some(0.2));
    assert_eq!(result.checks[0].met, Some(true));
    assert!(result.missed().is_empty());
}

#[test]
fn a_void_repeat_is_left_out_of_the_pairs() {
    let mut result = RunResult::new("spiky", "mountain-lab run spiky", 42, 3);
    result.add("ecmp", 0, &figures(100.0));
    result.add("ecmp", 2, &figures(1_000.0));
    result.add("mountain", 0, &figures(50.0));
    result.add("mountain", 1, &figures(1.0));
    result.add("mountain", 2, &figures(500.0));
    let values = &result.metric("ecmp", "rtt_p99_us").unwrap().values;
    assert_eq!(values[..], [Some(100.0), None, Some(1_000.0)]);
    let half = "policy='mountain'\nmetric='rtt_p99_us'\nop='<='\nlimit=1\nreference='ecmp'";
    result.evaluate(&[spec(half)]);
    assert_eq!(result.checks[0].figure, Some(0.5));
}

#[test]
fn with_fewer_than_half_of_the_repeats_nothing_was_measured() {
    let plain = "policy='mountain'\nmetric='rtt_p99_us'\nop='<='\nlimit=1000000";
    let ratio = format!("{plain}\nreference='ecmp'");
    // What becomes of both when of `asked` repeats these are not void.
    let met = |asked, ecmp: &[u32], mountain: &[u32]| {
        let mut result = RunResult::new("spiky", "mountain-lab run spiky", 42, asked);
        for (policy, repeats) in [("ecmp", ecmp), ("mountain", mountain)] {
            for repeat in repeats {
                result.add(policy, *repeat, &figures(100.0));
            }
        }
        result.evaluate(&[spec(plain), spec(&ratio)]);
        assert!(result
            .checks
            .iter()
            .all(|c| c.figure.is_some() == c.met.is_some()));
        [result.checks[0].met, result.checks[1].met]
    };
    let all: Vec<u32> = (0..10).collect();
    assert_eq!(met(10, &all, &all), [Some(true); 2]);
    assert_eq!(met(10, &all, &all[..5]), [Some(true); 2]);
    assert_eq!(met(10, &all, &all[..4]), [None; 2]);
    assert_eq!(met(10, &all, &all[9..]), [None; 2], "the others came first");
    // Of five and six there is one in which neither was void.
    assert_eq!(met(10, &all[..5], &all[4..]), [Some(true), None]);
    assert_eq!(met(1, &[0], &[0]), [Some(true); 2], "as was asked for");
    assert_eq!(met(3, &[0], &[0]), [None; 2]);

    // Onsets of all repeats together: one figure, however many repeats there were.
    let mut result = sample();
    let leave = Metric::single("us", 200_000.0, 7);
    let metrics = result.policies.get_mut("mountain").unwrap();
    metrics.insert("leave_p95_us".into(), leave);
    let leave = "policy='mountain'\nmetric='leave_p95_us'\nop='<='\nlimit=300000";
    result.evaluate(&[spec(leave)]);
    assert_eq!(result.checks[0].met, Some(true));
}

/// The check of `loss` of mountain against `limit` when repeats, the first of `asked`, have these values.
fn loss_check(asked: u32, values: &[f64], limit: &str) -> Check {
    let mut result = RunResult::new("steady", "mountain-lab run steady", 42, asked);
    for (repeat, value) in (0..).zip(values) {
        let (unit, value, n) = ("ratio", *value, 1);
        let figure = Figure { unit, value, n };
        let figures = Figures::from([("loss".to_owned(), figure)]);
        result.add("mountain", repeat, &figures);
    }
    result.evaluate(&[spec(&format!(
        "policy='mountain'\nmetric='loss'\nop='<='\nlimit={limit}"
    ))]);
    result.checks.remove(0)
}

#[test]
fn a_promise_of_none_is_held_against_the_worst_repeat() {
    let check = |values: &[f64]| loss_check(3, values, "0");
    let missed = check(&[0.0, 3.0, 0.0]);
    assert_eq!((missed.figure, missed.met), (Some(3.0), Some(false)));
    assert_eq!(missed.name, "loss of mountain, most of any repeat");
    assert_eq!(check(&[0.0, 0.0, 0.0]).met, Some(true));
    assert_eq!(check(&[0.0]).met, None, "two of three are void");
    assert_eq!(check(&[1.0]).met, Some(false), "but it was seen");
    assert_eq!(check(&[]).met, None);
    // Any other limit goes by the median.
    let median = loss_check(3, &[0.0, 3.0, 0.0], "0.5");
    assert_eq!((median.figure, median.met), (Some(0.0), Some(true)));
}

#[test]
fn what_is_not_a_number_was_not_measured() {
    let metric = Metric::of_repeats("us", vec![Some(1.0), Some(f64::NAN), Some(2.0)], 3, 1);
    assert_eq!(metric.values, [Some(1.0), None, Some(2.0)]);
    assert_eq!((metric.median, metric.lo, metric.hi), (1.5, 1.0, 2.0));
    let check = loss_check(3, &[0.1, f64::NAN, f64::NAN], "1");
    assert_eq!(check.met, None, "one of three is less than half");
    assert_eq!(loss_check(3, &[1.0, 2.0, f64::NAN], "1").figure, Some(1.5));

    // Nor is the ratio of nothing to nothing: of the two others it is 1 and 3.
    let mut result = RunResult::new("loss-30", "", 42, 3);
    for (repeat, loss) in (0..).zip([[0.0, 0.0], [0.2, 0.2], [0.3, 0.1]]) {
        for (policy, value) in ["mountain", "ecmp"].into_iter().zip(loss) {
            let (unit, n) = ("ratio", 1);
            let figure = Figure { unit, value, n };
            let figures = Figures::from([("loss".to_owned(), figure)]);
            result.add(policy, repeat, &figures);
        }
    }
    result.evaluate(&[spec(
        "policy='mountain'\nmetric='loss'\nop='>='\nlimit=2.5\nreference='ecmp'",
    )]);
    let figure = result.checks[0].figure.unwrap();
    assert!((figure - 2.0).abs() < 1e-9, "{figure}");
}

#[test]
fn a_run_that_is_too_short_misses_nothing() {
    assert_eq!(too_short(false, &[("repeats", 5.0, 5.0)]), None);
    let least = [("repeats", 5.0, 5.0), ("seconds", 12.5, 30.0)];
    let why = too_short(false, &least).unwrap();
    assert_eq!(why, "12.5 of 30 seconds");
    assert_eq!(too_short(true, &least).unwrap(), "--quick");

    let mut result = sample();
    result.evaluate(&[spec("policy='mountain'\nmetric='loss'\nop='>='\nlimit=0.5")]);
    result.judge(None);
    assert_eq!(result.missed()[0].met, Some(false));
    result.judge(Some(why));
    let check = &result.checks[0];
    assert!(check.met.is_none() && result.missed().is_empty());
    assert!(
        check
            .to_string()
            .ends_with(", limit >= 0.500: too short to judge"),
        "{check}"
    );
    assert!(result
        .table()
        .ends_with("\ntoo short to judge: 12.5 of 30 seconds\n"));
    // In the file, too; files from before do not say it.
    let text = serde_json::to_string(&result).unwrap();
    assert!(text.contains(r#""met":null,"too_short":true"#), "{text}");
    assert_eq!(serde_json::from_str::<RunResult>(&text).unwrap(), result);
}

#[test]
fn a_missed_figure_is_named() {
    let mut result = sample();
    result.evaluate(&[
        spec("name='p99 against ecmp'\npolicy='mountain'\nmetric='rtt_p99_us'\nop='<='\nlimit=0.1\nreference='ecmp'"),
        spec("policy='mountain'\nmetric='loss'\nop='<='\nlimit=0.001"),
        spec("policy='mountain'\nmetric='loss'\nop='>='\nlimit=0.5"),
        spec("policy='mountain'\nmetric='leave_p95_us'\nop='<='\nlimit=300000"),
    ]);
    let missed = result.missed();
    let names: Vec<&str> = missed.iter().map(|c| c.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "p99 against ecmp",
            "loss of mountain",
            "leave_p95_us of mountain"
        ]
    );
    assert_eq!(missed[2].met, None, "never measured is not met");
    let shown = missed[0].to_string();
    assert_eq!(
        shown,
        "p99 against ecmp: 0.200 x ecmp, limit <= 0.100: MISSED"
    );
    assert!(result.table().contains(&shown));
}

#[test]
fn malformed_check_names_the_key() {
    let error = toml::from_str::<CheckSpec>("policy='a'\nmetric='b'\nop='<'\nlimit=1").unwrap_err();
    assert!(error.to_string().contains("op"), "{error}");
    let error = toml::from_str::<CheckSpec>("policy='a'\nmetric='b'\nop='<='\nlimt=1").unwrap_err();
    assert!(error.to_string().contains("limt"), "{error}");
}

#[test]
fn table_shows_policies_side_by_side() {
    let table = sample().table();
    let header = table.lines().find(|l| l.contains("ecmp")).unwrap();
    let row = table.lines().find(|l| l.starts_with("rtt p99")).unwrap();
    let column = header.find("mountain").unwrap();
    assert_eq!(&row[column..], "40 ms [30-44] n=3000", "{table}");
    assert!(row.contains("200 ms [100-400] n=3000"), "{table}");
    assert!(table.contains("loss"), "{table}");
    assert!(table.contains("0.100 % n=3000"), "{table}");
    assert!(
        table.contains("void: ecmp repeat 1: emulator error"),
        "{table}"
    );
    assert!(table.contains("0.310 ms n=900"), "{table}");
}

#[test]
fn numbers_have_three_digits() {
    let shown = [0.0, 1234.5, 12.345, 0.01234, 40.0, -2.712, f64::NAN].map(number);
    assert_eq!(shown, ["0", "1234", "12.3", "0.0123", "40", "-2.71", "?"]);
}
