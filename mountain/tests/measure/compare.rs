// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain import` and `mountain compare` from logs to a verdict.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::support::{assert_has, mountain_in, texts, MOUNTAIN};
use mountain::measure::compare::Comparison;
use mountain::measure::runfile::RunFile;
use mountain::measure::verdict::RowVerdict;

fn ok(dir: &Path, args: &str) -> String {
    let output = mountain_in(dir, args);
    let (out, err) = texts(&output);
    assert!(output.status.success(), "{args}: {err}");
    assert_eq!(err, "");
    out
}

fn fails(dir: &Path, args: &str, why: &str) {
    let output = mountain_in(dir, args);
    let (out, err) = texts(&output);
    assert_eq!(output.status.code(), Some(1), "{args}: {out}{err}");
    let said = err.starts_with("mountain: ") && err.contains(why);
    assert!(said, "{args}: {err}");
    assert_eq!(out, "");
}

/// A log of ping(8) of `n` probes around `ms`, each hundredth lost.
fn log(n: usize, ms: f64) -> String {
    let mut log = String::from("PING 192.0.2.7 (192.0.2.7) 56(84) bytes of data.\n");
    let mut answered = 0;
    for seq in (1..=n).filter(|seq| seq % 100 != 7) {
        // The golden ratio spreads evenly, without a generator.
        let ms = ms + (seq as f64 * 0.618_034).fract();
        log += &format!("64 bytes from 192.0.2.7: icmp_seq={seq} ttl=64 time={ms:.3} ms\n");
        answered += 1;
    }
    log + &format!(
        "\n--- 192.0.2.7 ping statistics ---\n\
         {n} packets transmitted, {answered} received, 1% packet loss, time {}ms\n",
        (n - 1) * 10
    )
}

#[test]
fn from_two_logs_to_a_verdict() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for (name, ms) in [("a", 20.0), ("b", 22.0), ("c", 20.0)] {
        fs::write(dir.join(format!("{name}.log")), log(2000, ms)).unwrap();
    }
    let text = ok(dir, "import a.log");
    let made = "a.log.run.json: 2000 probes of ping(8), 1980 answered\n";
    assert_eq!(text, made);
    ok(dir, "import b.log -o b.json --label patched");
    ok(dir, "import c.log -o c.json");

    let text = ok(dir, "compare a.log.run.json b.json");
    let verdict = "Verdict: patched is worse than a.log.run.json (Median, P99)";
    let missing = "Warning: environment: not recorded";
    assert_has(&text, &[verdict, missing]);
    let row = |name| text.lines().find(|l| l.starts_with(name)).unwrap();
    let (median, loss) = (row("Median"), row("Loss"));
    assert_has(median, &["20.499", "+9.8%"]);
    assert!(median.ends_with("worse"), "{median}");
    assert_has(loss, &["1.00 %"]);
    assert!(loss.ends_with("cannot tell"), "{loss}");

    let text = ok(dir, "compare b.json a.log.run.json c.json");
    for run in ["a.log.run.json", "c.json"] {
        let verdict = format!("Verdict: {run} is better than patched");
        assert!(text.contains(&verdict), "{text}");
        // Each head stands over its column.
        let title = format!("{run} against patched:");
        let mut table = text.lines().skip_while(|l| !l.starts_with(&title));
        let (head, median) = (table.next(), table.find(|l| l.starts_with("Median")));
        let end_of = |line: Option<&str>, what: &str| {
            let (before, _) = line.unwrap().split_once(what)?;
            Some((before.to_owned() + what).chars().count())
        };
        let (delta, percent) = (end_of(head, "Δ"), end_of(median, "%"));
        assert!(delta.is_some() && delta == percent, "{text}");
    }

    let text = ok(dir, "compare a.log.run.json c.json -- b.json");
    let per_run = "Counts are sums, their differences are of one run.";
    assert_has(&text, &["A is 2 runs, patched is 1 run. ", per_run]);

    let text = ok(dir, "compare a.log.run.json c.json --json --over 20.5");
    let json: Comparison = serde_json::from_str(&text).unwrap();
    assert_eq!(json.schema, "mountain-compare/2");
    assert_eq!(json.runs[1].name, "c.json");
    let (median, over) = (&json.rows[3], &json.rows[15]);
    assert_eq!((&*median.name, &*over.name), ("Median", "> 20.5 ms"));
    assert_eq!(median.against_first[0].verdict, RowVerdict::CannotTell);
    let headline = &json.headlines[0];
    assert_eq!((headline.better, headline.tests.len()), (false, 3));
    assert_eq!(json.warnings[0].what, "environment");
}

#[test]
fn bad_input_is_named_and_nothing_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let whole = log(50, 1.0);
    let cut = &whole[..whole.len() / 2];
    let bad = [
        ("empty", "", "the file is empty"),
        ("cut", cut, "the l"),
        ("foreign", "date,rtt\n1,2\n", "neither a log of ping(8)"),
        ("other.json", "{\"results\": 1}", "neither irtt's"),
        ("cut.json", "{\"round_trips\": [", "is truncated"),
        ("packed.gz", "\u{1f}x", "neither"),
    ];
    for (name, content, why) in &bad {
        fs::write(dir.join(name), content).unwrap();
        let import = format!("import {name} -o out.json");
        fails(dir, &import, why);
        fails(dir, &import, name);
    }
    fails(dir, "import none -o out.json", "cannot read none");
    fs::write(dir.join("whole"), &whole).unwrap();
    fails(dir, "import whole -o whole", "overwritten");
    fails(dir, "import whole -o no/out.json", "cannot write no/out");
    let files = fs::read_dir(dir).unwrap().count();
    assert_eq!(files, bad.len() + 1, "nothing else is there");
    assert_eq!(fs::read_to_string(dir.join("whole")).unwrap(), whole);
    // More than there is memory for.
    let sparse = fs::File::create(dir.join("sparse")).unwrap();
    sparse.set_len(1 << 40).unwrap();
    fails(dir, "import sparse -o out.json", "larger than 256 MiB");

    let printed: RunFile = serde_json::from_str(&ok(dir, "import whole -o -")).unwrap();
    assert!(!dir.join("-").exists());
    ok(dir, "import whole -o whole.json");
    assert_eq!(RunFile::read(&dir.join("whole.json")).unwrap(), printed);
    fails(dir, "compare whole.json whole", "mountain import");
    fails(dir, "compare whole.json none", "cannot read none");
    let output = mountain_in(dir, "compare whole.json");
    assert_eq!(output.status.code(), Some(2), "a usage error");
    let text = ok(dir, "compare whole.json whole.json");
    assert!(text.contains("too few samples for P99"), "{text}");
}

#[test]
fn without_a_reader_it_ends_quietly_as_others_do() {
    use std::os::unix::process::ExitStatusExt;
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a.log"), log(500, 20.0)).unwrap();
    ok(dir.path(), "import a.log -o a.json");
    for args in [
        &["compare", "a.json", "a.json"][..],
        &["completions", "bash"],
    ] {
        let mut command = Command::new(MOUNTAIN);
        command.args(args).current_dir(dir.path());
        command.stderr(std::process::Stdio::piped());
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = command.stdout(writer).spawn().unwrap();
        let output = output.wait_with_output().unwrap();
        assert_eq!(texts(&output).1, "", "{args:?}");
        assert_eq!(output.status.signal(), Some(libc::SIGPIPE), "{args:?}");
        // What cannot be written for another reason is no secret.
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let output = command.stdout(full).spawn().unwrap();
        let output = output.wait_with_output().unwrap();
        let (_, err) = texts(&output);
        assert!(err.contains("cannot write to standard output"), "{err}");
        assert_eq!(output.status.code(), Some(1));
    }
}
