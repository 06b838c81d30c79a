// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain cpu`: what it records, and what becomes of its command when it is told to end.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::*;
use mountain::measure::runfile::RunFile;
use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;

#[test]
fn cpu_time_is_recorded_while_a_command_runs() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("cpu.json");
    let cpu = |args: &[&str]| {
        let mut command = Command::new(MOUNTAIN);
        command.args(["cpu", "--interval", "200ms", "--out"]);
        command.arg(&file).args(args).output().unwrap()
    };
    let work =
        "end=$(($(date +%s%N) + 700000000)); while [ $(date +%s%N) -lt $end ]; do :; done; exit 3";
    let output = cpu(&["--", "sh", "-c", work]);
    assert_eq!(output.status.code(), Some(3), "the command's own");
    assert!(stdout(&output).contains("steal"), "{}", stdout(&output));
    let run = RunFile::read(&file).unwrap();
    assert!(run.tool.ends_with(" cpu") && run.samples.is_empty() && !run.interrupted);
    // An interval of 200 ms each, the last one shorter.
    let most = (run.seconds / 0.2) as usize + 1;
    assert!((2..=most).contains(&run.cpu.at_us.len()), "{:?}", run.cpu);
    let mut busy = 0.0;
    for column in &run.cpu.shares {
        assert_eq!(column.len(), run.cpu.at_us.len());
        for shares in column {
            let sum: f32 = shares.iter().sum();
            assert!((sum - 1.0).abs() < 1e-3 || sum == 0.0, "{shares:?}");
            busy += shares[0] + shares[1];
        }
    }
    assert!(busy > 0.5, "{busy}");

    // Where it waits for its CPU it misses an interval: another try then.
    let mut seen = Vec::new();
    let is_whole = || {
        let output = cpu(&["--duration", "500ms"]);
        assert_eq!(output.status.code(), Some(0));
        let at_us = RunFile::read(&file).unwrap().cpu.at_us;
        let is_whole = at_us.len() == 3;
        seen.push(at_us);
        is_whole
    };
    let whole = std::iter::repeat_with(is_whole).take(5).any(|whole| whole);
    assert!(whole, "{seen:?}");
    for (args, why) in [
        (&["--", "/nonexistent/program"][..], "cannot run"),
        (&["--interval", "1ms"], "10ms"),
        (&["--duration", "1000y"], "at most a year"),
        (&["--out", "/"], "not a regular file"),
        (&["--duration", "1s", "--", "true"], "cannot be used with"),
    ] {
        let output = Command::new(MOUNTAIN).arg("cpu").args(args).output();
        let output = output.unwrap();
        assert!(!output.status.success());
        assert!(stderr(&output).contains(why), "{}", stderr(&output));
    }
}

/// Starts `mountain cpu` with a shell command, once that has made its file `ready`.
fn start(dir: &Path, script: &str) -> Guard {
    let ready = dir.join("ready");
    let _ = fs::remove_file(&ready);
    let mut command = Command::new(MOUNTAIN);
    command.args(["cpu", "--interval", "50ms", "--out"]);
    command.arg(dir.join("cpu.json")).args(["--", "sh", "-c"]);
    command.arg(script).current_dir(dir);
    // A suite in the background may have been started with SIGINT ignored, which no shell can undo.
    // SAFETY: signal() is async-signal-safe.
    unsafe {
        command.pre_exec(|| {
            nix::sys::signal::signal(Signal::SIGINT, nix::sys::signal::SigHandler::SigDfl)?;
            Ok(())
        });
    }
    let child = Guard::piped(&mut command);
    wait_for(&ready);
    child
}

/// What a command ended with, and that its measurement was kept.
fn interrupted(child: Guard, dir: &Path) -> (Option<i32>, String) {
    let start = Instant::now();
    let output = child.finish();
    assert!(start.elapsed() < LEAVE, "it hangs");
    let text = stdout(&output);
    assert_has(&text, &["interrupted", "steal"]);
    let run = RunFile::read(&dir.join("cpu.json")).unwrap();
    let at_us = &run.cpu.at_us;
    assert!(run.interrupted && !at_us.is_empty(), "{at_us:?}");
    (output.status.code(), text)
}

/// Processes with this word in their command line; zombies have none.
fn running(word: &str) -> Vec<i32> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|e| e.file_name().to_str()?.parse().ok());
    let with_word = |pid: &i32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(word)
    };
    pids.filter(with_word).collect()
}

/// A time to sleep that no other process sleeps. Whoever sleeps it is ended with the test.
struct Word(String);

fn unique(n: u32) -> Word {
    Word(format!("7{n}{:07}.25", std::process::id()))
}

impl Drop for Word {
    fn drop(&mut self) {
        for pid in running(&self.0) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

#[test]
fn nothing_of_an_interrupted_command_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let word = unique(1);
    // Three generations, one of them in a session of its own; one does not listen.
    let script = format!(
        "sleep {0} & setsid sh -c 'sleep {0} & sleep {0}' & \
         sh -c 'trap \"\" TERM; touch ready; sleep {0}; sleep {0}'; exit 3",
        word.0
    );
    for (signal, code) in [(Signal::SIGTERM, 143), (Signal::SIGHUP, 129)] {
        let child = start(dir.path(), &script);
        wait_until("all run", LEAVE, || running(&word.0).len() >= 5);
        child.signal(signal);
        let (ended, _) = interrupted(child, dir.path());
        assert_eq!(ended, Some(code));
        assert_eq!(running(&word.0), Vec::<i32>::new());
    }
}

#[test]
fn a_command_ends_in_its_own_way_and_a_second_signal_kills() {
    let dir = tempfile::tempdir().unwrap();
    let script =
        "trap 'sleep 0.3; echo bye; exit 7' INT; touch ready; while :; do sleep 0.05; done";
    let child = start(dir.path(), script);
    child.signal(Signal::SIGINT);
    let (ended, text) = interrupted(child, dir.path());
    assert_eq!(ended, Some(7));
    assert!(text.contains("bye"), "{text}");

    let script = "trap '' TERM INT; touch ready; while :; do sleep 0.05; done";
    let child = start(dir.path(), script);
    child.signal(Signal::SIGTERM);
    std::thread::sleep(Duration::from_millis(500));
    let pid = child.pid().as_raw();
    let waits = running(&dir.path().display().to_string()).contains(&pid);
    assert!(waits, "it has ended");
    child.signal(Signal::SIGTERM);
    assert_eq!(interrupted(child, dir.path()).0, Some(137));
}

#[test]
fn what_a_command_leaves_by_itself_is_its_own_business() {
    let dir = tempfile::tempdir().unwrap();
    let word = unique(2);
    let script = format!("sleep {} >/dev/null 2>&1 & touch ready; exit 4", word.0);
    let output = start(dir.path(), &script).finish();
    assert_eq!(output.status.code(), Some(4), "{}", stderr(&output));
    assert!(!stdout(&output).contains("interrupted"));
    let left = running(&word.0);
    assert_eq!(left.len(), 1);
    let output = Command::new(MOUNTAIN)
        .args(["cpu", "--", "sh", "-c", "kill -9 $$"])
        .output();
    let code = output.unwrap().status.code();
    assert_eq!(code, Some(137), "as a shell says it");
}

#[test]
fn what_ran_before_is_not_the_command_s() {
    let dir = tempfile::tempdir().unwrap();
    let word = unique(3);
    let file = dir.path().join("cpu.json");
    // The shell becomes mountain and keeps its child.
    let script = format!(
        "sleep {0} >/dev/null 2>&1 & exec {MOUNTAIN} cpu --interval 50ms --out {1} -- sleep {0}",
        word.0,
        file.display()
    );
    let child = Guard::piped(Command::new("sh").args(["-c", &script]));
    // The measurement has its signals before its command.
    wait_until("both run, and the measurement", LEAVE, || {
        running(&word.0).len() == 3
    });
    child.signal(Signal::SIGTERM);
    assert_eq!(interrupted(child, dir.path()).0, Some(143));
    let left = running(&word.0);
    assert_eq!(left.len(), 1);
}

fn wait_for(file: &Path) {
    wait_until(&format!("{} is there", file.display()), LEAVE, || {
        file.exists()
    });
}

const UNTIL_LET_GO: &str = "touch ready; while [ ! -e go ]; do sleep 0.02; done; exit 5";

/// Has [`UNTIL_LET_GO`] end, and returns what was recorded.
fn let_go(child: Guard, dir: &Path) -> RunFile {
    fs::write(dir.join("go"), "").unwrap();
    let output = child.finish();
    let ended = (stderr(&output), output.status.code());
    assert_eq!(ended, (String::new(), Some(5)));
    RunFile::read(&dir.join("cpu.json")).unwrap()
}

#[test]
fn a_recording_goes_on_where_no_file_can_be_opened() {
    let dir = tempfile::tempdir().unwrap();
    let child = start(dir.path(), UNTIL_LET_GO);
    // Not 0: then it could not even wait for what it has open.
    let before = limit_descriptors(child.pid().as_raw(), 1);
    std::thread::sleep(Duration::from_millis(600));
    limit_descriptors(child.pid().as_raw(), before);
    let run = let_go(child, dir.path());
    assert!(run.cpu.at_us.len() >= 3, "{:?}", run.cpu.at_us);
}

#[test]
fn a_recording_that_fails_ends_the_command_and_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let word = unique(4);
    let script = format!(
        ": {}; trap 'touch asked' TERM; touch ready; while :; do sleep 0.05; done",
        word.0
    );
    let child = start(dir.path(), &script);
    // A few intervals, and then it cannot wait any more.
    std::thread::sleep(Duration::from_millis(300));
    let before = limit_descriptors(child.pid().as_raw(), 0);
    wait_for(&dir.path().join("asked"));
    limit_descriptors(child.pid().as_raw(), before);
    let output = child.finish();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let ended = "the command has been ended";
    let parts = ["the recording failed", ended, "cannot wait"];
    assert_has(&stderr(&output), &parts);
    assert!(running(&word.0).is_empty());
    let run = RunFile::read(&dir.path().join("cpu.json")).unwrap();
    assert!(!run.cpu.at_us.is_empty() && run.seconds > 0.0);
    assert!(stdout(&output).contains("steal"), "{}", stdout(&output));
}

#[test]
fn a_reader_that_is_gone_changes_neither_file_nor_exit_code() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = start(dir.path(), UNTIL_LET_GO);
    // Before there can be anything to print.
    drop(child.child().stdout.take());
    let run = let_go(child, dir.path());
    assert_eq!(run.cpu.numbers.len(), run.cpu.shares.len());
    let stat = fs::read_to_string("/proc/stat").unwrap();
    for number in run.cpu.numbers {
        assert!(stat.contains(&format!("\ncpu{number} ")), "{number}");
    }
}
