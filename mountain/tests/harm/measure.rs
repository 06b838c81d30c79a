// SPDX-License-Identifier: GPL-2.0-or-later
//! Measurements and their files.

use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use mountain::measure::runfile::RunFile;
use nix::sys::resource::{setrlimit, Resource};
use nix::sys::signal::{killpg, Signal};
use serde_json::{json, Value};

use crate::support::{
    assert_has, mountain_in, texts, wait_counted, wait_until, Guard, Ns, MOUNTAIN,
};

/// A run file of these round trips, µs.
fn write_run(path: &Path, label: &str, rtts: impl Iterator<Item = f64>) {
    let rtts: Vec<f64> = rtts.collect();
    let run = json!({
        "schema": "mountain-run/1", "label": label, "tool": "t", "command": "c", "target": "x",
        "started": "", "seconds": 1.0, "clock": "user", "environment": {},
        "samples": {
            "sent_us": (0..rtts.len()).map(|i| i as f64 * 1e3).collect::<Vec<_>>(),
            "rtt_us": rtts,
        },
    });
    fs::write(path, run.to_string()).unwrap();
}

/// Round trips of 20 ms that drift: AR(1) with 0.98, from one seed.
fn drifting(seed: u64) -> impl Iterator<Item = f64> {
    let (mut state, mut drift) = (seed * 2 + 1, 0.0);
    let mut uniform = move || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(seed | 1);
        (state >> 33) as f64 / f64::from(1u32 << 31)
    };
    (0..1_200).map(move |_| {
        let noise = (0..12).map(|_| uniform()).sum::<f64>() - 6.0;
        drift = 0.98 * drift + 400.0 * noise;
        20e3 + drift
    })
}

/// Several runs a side are judged by how far they differ among themselves.
#[test]
fn the_difference_between_runs_of_one_side() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    // Each run at a level of its own, as after a route has changed.
    for (i, level) in [0.0, 9e3, 4e3, 8e3, 1e3, 5e3].into_iter().enumerate() {
        let rtts = drifting(i as u64).map(|us| 20e3 + us / 20.0 + level);
        write_run(&dir.join(i.to_string()), "", rtts);
    }
    let (text, error) = texts(&mountain_in(dir, "compare 0 1 2 -- 3 4 5"));
    assert!(text.contains("cannot tell"), "{text}{error}");
    let judged = text.contains("worse") || text.contains("better");
    assert!(!judged, "{text}");
    let (text, _) = texts(&mountain_in(dir, "compare 0 1"));
    assert_has(&text, &["is worse than"]);
}

/// Commands of `ab` that note that they have run.
const A: &str = "sh -c 'echo a >> log'";
const B: &str = "sh -c 'echo b >> log'";

/// Where the commands of `ab` run, and the folder that they write to.
struct Ab {
    ns: Ns,
    dir: tempfile::TempDir,
}

impl Ab {
    fn new() -> Self {
        let (ns, dir) = (Ns::new("ab"), tempfile::tempdir().unwrap());
        Self { ns, dir }
    }

    /// What the commands have noted, in its order.
    fn order(&self) -> String {
        let log = fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
        log.split_whitespace().collect()
    }

    fn forget_order(&self) {
        fs::remove_file(self.dir.path().join("log")).unwrap();
    }

    /// `mountain ab` on loopback.
    fn command(&self, a: &str, b: &str, args: &[&str]) -> Command {
        let mut command = self.ns.command(MOUNTAIN);
        command.args(["ab", "127.0.0.1", "--a", a, "--b", b]);
        command.args(["--settle", "1ms", "-i", "1ms"]).args(args);
        command.current_dir(self.dir.path());
        command
    }

    /// Its exit status and what it prints and says, where A is noted.
    fn run(&self, b: &str, args: &[&str]) -> (Option<i32>, String, String) {
        let output = self.command(A, b, args).output().unwrap();
        let (text, error) = texts(&output);
        (output.status.code(), text, error)
    }
}

#[test]
fn the_setting_that_was_in_force_before_an_ab() {
    let ab = Ab::new();
    let args = ["-c", "40", "--json", "--out", "ab.json"];
    let kept = || {
        let file = fs::read(ab.dir.path().join("ab.json")).unwrap();
        let kept: Value = serde_json::from_slice(&file).unwrap();
        kept["runs"][1].as_array().unwrap().len()
    };
    let (code, text, error) = ab.run(B, &args);
    assert_eq!(code, Some(0), "{text}{error}");
    assert_eq!(ab.order(), "abba".repeat(4), "A is in force at the end");
    let json: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["rounds"], 8);
    let rows = json["comparison"]["rows"].as_array().unwrap();
    assert!(rows.iter().any(|row| row["name"] == "Median"));
    assert_eq!(kept(), 8);

    // A command that fails stops it, and A is brought back.
    ab.forget_order();
    let (code, _, error) = ab.run("sh -c 'echo b >> log; exit 3'", &["-c", "20"]);
    assert_eq!(code, Some(1));
    assert_has(&error, &["exit status 3", "A is in force again"]);
    assert_eq!(ab.order(), "aba");

    // In the third round: the two before are judged and kept.
    ab.forget_order();
    let thrice = "sh -c 'echo b >> log; test $(grep -c b log) -lt 3'";
    let (code, text, error) = ab.run(thrice, &args);
    assert_eq!(code, Some(1), "{error}");
    assert_has(&error, &["A is in force again"]);
    let json: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}{error}"));
    assert_eq!(json["rounds"], 2);
    assert_eq!(json["interrupted"], true);
    assert_eq!(kept(), 2);

    // A signal in a half of A, and while the command of B runs.
    let interrupted = |b, count, at| {
        ab.forget_order();
        let guard = Guard::start(&mut ab.command(A, b, &["-c", count]));
        wait_until(at, Duration::from_secs(60), || ab.order() == at);
        guard.signal(Signal::SIGTERM);
        let output = guard.finish();
        assert_eq!(output.status.code(), Some(130), "{:?}", texts(&output));
    };
    interrupted(B, "20000", "a");
    // Again, if the signal came before the command was seen to end.
    assert!(["a", "aa"].contains(&ab.order().as_str()), "{}", ab.order());
    interrupted("sh -c 'echo b >> log; sleep 60'", "5", "ab");
    assert_eq!(ab.order(), "aba", "A is in force again");
}

#[test]
fn a_failed_ab_whose_file_cannot_be_written_either() {
    let ab = Ab::new();
    let gone = ab.dir.path().join("gone");
    fs::create_dir(&gone).unwrap();
    let out = gone.join("ab.json");
    let second = format!(
        "sh -c 'echo b >> log; test $(grep -c b log) -lt 2 || {{ rm -r {}; exit 3; }}'",
        gone.display()
    );
    let mut command = ab.command(A, &second, &["-c", "5", "--out", out.to_str().unwrap()]);
    let output = command.env("TMPDIR", ab.dir.path()).output().unwrap();
    let (_, error) = texts(&output);
    assert_eq!(output.status.code(), Some(1), "{error}");
    let told = ["exit status 3", "A is in force again", "is kept in"];
    assert_has(&error, &told);
}

/// It waits for the last answers of each half.
#[test]
fn an_ab_without_any_answer_ends_after_a_round() {
    let ab = Ab::new();
    ab.ns.hole("");
    let (code, text, error) = ab.run(B, &["-c", "3"]);
    assert_eq!(code, Some(1), "{text}");
    assert_has(&error, &["does not answer"]);
    assert_eq!(ab.order(), "aba");
}

/// A half whose probes have all been sent, and wait for their answers.
#[test]
fn who_ends_an_ab_between_two_halves() {
    let ab = Ab::new();
    ab.ns.hole("");
    let guard = Guard::start(&mut ab.command(A, B, &["-c", "1"]));
    wait_counted(&ab.ns, "IcmpOutMsgs", 1);
    guard.signal(Signal::SIGINT);
    let output = guard.finish();
    assert_eq!(output.status.code(), Some(130), "{:?}", texts(&output));
}

/// A terminal's Ctrl-C asks everything in its foreground, and the command that puts A back must not hear of it.
#[test]
fn a_second_ctrl_c_leaves_alone_what_puts_a_back() {
    let ab = Ab::new();
    let slow = "sh -c 'echo a >> log; sleep 2; echo A >> log'";
    let mut command = ab.command(slow, B, &["-c", "2000"]);
    let guard = Guard::start(command.process_group(0));
    for at in ["aAb", "aAba"] {
        wait_until(at, Duration::from_secs(60), || ab.order() == at);
        killpg(guard.pid(), Signal::SIGINT).unwrap();
    }
    let output = guard.finish();
    assert_eq!(output.status.code(), Some(130), "{:?}", texts(&output));
    assert_eq!(ab.order(), "aAbaA");
}

/// A daemon that a command starts could not be ended otherwise.
#[test]
fn no_signal_is_blocked_in_the_commands_of_ab() {
    let ab = Ab::new();
    let blocked = "grep SigBlk /proc/self/status";
    let output = ab.command(blocked, blocked, &["-c", "5"]).output();
    let (_, said) = texts(&output.unwrap());
    let masks: Vec<&str> = said.lines().filter(|l| l.starts_with("SigBlk")).collect();
    let free = format!("SigBlk:\t{:016}", 0);
    let all_free = masks.len() >= 16 && masks.iter().all(|m| *m == free);
    assert!(all_free, "{said}");
}

#[test]
fn what_ab_would_not_do_as_a_shell() {
    let ab = Ab::new();
    for (b, why) in [
        ("no-such-program x", "there is no program no-such-program"),
        ("echo 'x", "a quote is not closed"),
        ("", "there is no command"),
    ] {
        let (_, _, error) = ab.run(b, &[]);
        assert_has(&error, &["--b", why]);
    }
    assert_eq!(ab.order(), "", "nothing has run before");
}

/// A label that a terminal would obey.
#[test]
fn the_terminal_of_who_reads_a_foreign_file() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let label = "\u{1b}]0;owned\u{7}\u{9b}2J\rgood\u{202e}\nforged";
    write_run(&dir.join("a"), label, drifting(1));
    let file = dir.join("a");
    let text = fs::read_to_string(&file).unwrap();
    let target = format!("\"target\":{}", json!(label));
    fs::write(&file, text.replace("\"target\":\"x\"", &target)).unwrap();
    write_run(&dir.join("b"), "b", drifting(2));
    for args in [
        "compare a b",
        "compare b a --json",
        "report a b -o page",
        "compare b a\u{1b}[2J",
    ] {
        let output = mountain_in(dir, args);
        let (out, error) = texts(&output);
        let obeyed = |c: char| (c.is_control() && c != '\n') || c == '\u{202e}';
        assert!(!out.contains(obeyed) && !error.contains(obeyed), "{args:?}");
        assert!(!out.lines().any(|line| line.starts_with("forged")), "{out}");
        let is_there = !args.contains('[');
        assert_eq!(output.status.success(), is_there, "{args:?}: {error}");
    }
    let page = fs::read_to_string(dir.join("page/index.html")).unwrap();
    assert!(page.contains("\\u001b]0;owned") && !page.contains('\u{1b}'));
    assert!(dir.join("page/cdf.png").exists());
}

/// Runs with at most so much address space.
fn limited(dir: &Path, bytes: u64, args: &[&str]) -> Output {
    let mut command = Command::new(MOUNTAIN);
    command.current_dir(dir).args(args);
    // SAFETY: one system call, which is async-signal-safe.
    unsafe {
        command.pre_exec(move || Ok(setrlimit(Resource::RLIMIT_AS, bytes, bytes)?));
    }
    command.output().unwrap()
}

#[test]
fn the_memory_of_who_imports_a_small_file() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let values = "{\"results\": [";
    let ping = "PING x (x) 56(84) bytes of data.\n";
    let too_many = "more than 512 MiB of values";
    for (name, head, piece, mib, why) in [
        ("values.gz", values, "0,", 20, too_many),
        ("maps.gz", values, "{\"a\":0},", 8, too_many),
        ("log.gz", ping, "\n", 257, "the log is larger than"),
    ] {
        let packed = |text: &str| {
            let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            gz.write_all(text.as_bytes()).unwrap();
            gz.finish().unwrap()
        };
        // A packed file may have several members.
        let mut file = packed(head);
        file.extend(packed(&piece.repeat((1 << 20) / piece.len())).repeat(mib));
        assert!(file.len() < 3 << 20, "{}", file.len());
        fs::write(dir.join(name), file).unwrap();
        let output = limited(dir, 1_200 << 20, &["import", name, "-o", "out.json"]);
        let (_, error) = texts(&output);
        assert_eq!(output.status.code(), Some(1), "{name}: {error}");
        assert!(error.contains(why), "{name}: {error}");
    }
}

#[test]
fn a_measurement_whose_file_has_a_name_that_is_no_utf_8() {
    let (ns, dir) = (Ns::new("utf"), tempfile::tempdir().unwrap());
    let path = dir.path().join(OsString::from_vec(b"r\xff.json".to_vec()));
    let mut command = ns.command(MOUNTAIN);
    command.args(["ping", "127.0.0.1", "-c", "5", "-i", "1ms", "-o"]);
    let output = command.arg(&path).output().unwrap();
    assert!(output.status.success(), "{:?}", texts(&output));
    let run: RunFile = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    assert_eq!(run.samples.rtt_us.len(), 5);
    let cpu = dir.path().join(OsString::from_vec(b"c\xff.json".to_vec()));
    let mut command = Command::new(MOUNTAIN);
    command.args(["cpu", "--interval", "10ms", "-o"]).arg(&cpu);
    let output = command.args(["--", "sleep", "0.1"]).output().unwrap();
    let written = output.status.success() && cpu.exists();
    assert!(written, "{:?}", texts(&output));
}

/// The disk is full in the end.
#[test]
fn a_finished_measurement_that_cannot_be_written() {
    let (ns, dir) = (Ns::new("full"), tempfile::tempdir().unwrap());
    let (full, kept) = (dir.path().join("full"), dir.path().join("kept"));
    fs::create_dir(&full).unwrap();
    fs::create_dir(&kept).unwrap();
    // `ip netns exec` has mounts of its own.
    let script = format!(
        "mount -t tmpfs -o size=4k none {0} && exec {MOUNTAIN} ping 127.0.0.1 -c 500 -i 1ms -o {0}/run.json",
        full.display()
    );
    let mut command = Command::new("ip");
    command.args(["netns", "exec", &ns.name, "sh", "-c", &script]);
    let output = command.env("TMPDIR", &kept).output().unwrap();
    let (out, error) = texts(&output);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(out.contains("Median"), "the table is printed: {out}");
    assert_has(&error, &["full/run.json", "is kept in"]);
    let path = error.split("is kept in ").nth(1).unwrap();
    let path = path.split(": ").next().unwrap();
    let run: RunFile = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    assert_eq!(run.samples.rtt_us.len(), 500);

    // To standard output, it is a run file and nothing else.
    let args = "ping 127.0.0.1 -c 5 -i 1ms --out -";
    let run: RunFile = serde_json::from_str(&ns.mountain_ok(args)).unwrap();
    assert_eq!(run.schema, "mountain-run/1");
}
