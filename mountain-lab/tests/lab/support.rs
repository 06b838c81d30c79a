// SPDX-License-Identifier: GPL-2.0-or-later
//! Runs of the program, and what they leave.

use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use mountain_lab::result::RunResult;

pub const LAB: &str = env!("CARGO_BIN_EXE_mountain-lab");

/// A run of a command that writes a result to a folder of its own.
pub struct Run {
    pub result: RunResult,
    pub out: tempfile::TempDir,
    /// Standard output and standard error.
    pub said: String,
    pub output: Output,
    pub pid: u32,
}

pub fn need_root() {
    assert!(
        nix::unistd::Uid::effective().is_root(),
        "this test needs root: run it with sudo"
    );
}

/// One lab at a time: each of them measures, and all of them together would only measure the CPU.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `mountain-lab` with arguments that are split at blanks.
pub fn lab(args: &str) -> Output {
    Command::new(LAB).args(args.split(' ')).output().unwrap()
}

/// The result of `mountain-lab` with arguments that are split at blanks; it has to succeed.
pub fn result_of(args: &str) -> Run {
    need_root();
    let out = tempfile::tempdir().unwrap();
    let mut command = Command::new(LAB);
    command.args(args.split(' ')).arg("--out").arg(out.path());
    let (output, pid) = finished(&mut command);
    let said = text(&output);
    assert!(output.status.success(), "{said}");
    Run {
        result: RunResult::read(&out.path().join("result.json")).unwrap(),
        out,
        said,
        output,
        pid,
    }
}

/// What a command left, and its process's number.
pub fn finished(command: &mut Command) -> (Output, u32) {
    command.stdin(Stdio::null());
    let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    let pid = child.id();
    (child.wait_with_output().unwrap(), pid)
}

/// What the program says when it refuses these arguments.
pub fn refused(args: &str) -> String {
    let output = lab(args);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    said
}

pub fn text(output: &Output) -> String {
    let both = [&output.stdout, &output.stderr];
    both.map(|bytes| String::from_utf8_lossy(bytes)).concat()
}

/// Namespaces that a lab process made.
pub fn namespaces(pid: u32) -> Vec<String> {
    let prefix = format!("mtl-{pid}-");
    let Ok(entries) = std::fs::read_dir("/run/netns") else {
        return vec![];
    };
    let names = entries.filter_map(|e| e.ok()?.file_name().into_string().ok());
    names.filter(|n| n.starts_with(&prefix)).collect()
}
