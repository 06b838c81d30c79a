// SPDX-License-Identifier: GPL-2.0-or-later
//! The kernel edition's verdicts: its tests take an hour in QEMU, so here only that they have passed with
//! what is here now (kernel/scripts/verdict).

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::json;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

fn verdict(root: &Path, args: &[&str]) -> Output {
    let mut verdict = Command::new(root.join("kernel/scripts/verdict"));
    verdict.args(args).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn the_kernel_edition_has_passed_as_it_is() {
    let check = verdict(Path::new(ROOT), &["check"]);
    assert!(check.status.success(), "{}", said(&check));
}

/// By the script of the source that they are for, where that has been fetched (kernel/scripts/fetch).
#[test]
fn the_patches_are_as_the_kernel_wants_them() {
    let cache = Path::new(ROOT).join("target/kernel");
    let source = fs::read_dir(&cache).into_iter().flatten().flatten();
    let script = source
        .map(|folder| folder.path().join("scripts/checkpatch.pl"))
        .find(|script| script.exists());
    let Some(script) = script else {
        let cache = cache.display();
        // Not eprintln!(), which nobody sees of a test that passes.
        let text = format!("skipped: no kernel source in {cache}, `make kernel` fetches it");
        let _ = writeln!(std::io::stderr(), "{text}");
        return;
    };
    let mut patches: Vec<_> = fs::read_dir(format!("{ROOT}/kernel/patches/6.12"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    patches.sort();
    assert_eq!(patches.len(), 8);
    for patch in patches {
        // A file in a folder that MAINTAINERS names as a whole needs no entry, which the script cannot tell.
        let mut perl = Command::new("perl");
        perl.arg(&script).args(["--no-tree", "--ignore"]);
        let checked = perl.arg("FILE_PATH_CHANGES").arg(&patch).output();
        let checked = checked.unwrap();
        // Its third kind, "checks", is a matter of taste.
        let text = String::from_utf8_lossy(&checked.stdout);
        assert!(text.contains("total: 0 errors, 0 warnings"), "{text}");
    }
}

/// A checkout with all that the hash is made of.
fn checkout() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for part in ["kernel", "bpf", "scripts", "Cargo.toml"] {
        let copied = Command::new("cp")
            .arg("-r")
            .args([&format!("{ROOT}/{part}"), root.path().to_str().unwrap()])
            .status();
        assert!(copied.unwrap().success());
    }
    let _ = fs::remove_dir_all(root.path().join("kernel/verdicts"));
    root
}

/// Has a run with this result of its one test leave its verdict.
fn leave(root: &Path, run: &str, result: &str) {
    let hash = "set -euo pipefail; . kernel/scripts/lib.sh; content_hash $0";
    let mut bash = Command::new("bash");
    bash.args(["-c", hash, run]).current_dir(root);
    let hash = bash.output().unwrap();
    assert!(hash.status.success(), "{}", said(&hash));
    let content = String::from_utf8(hash.stdout).unwrap();
    let test = json!({"kernel": "patched", "mode": "smp", "name": "00-boot", "result": result});
    let file = root.join("result.json");
    let result = json!({
        "started": "2026-01-01T00:00:00Z", "checks": [],
        "environment": {"content": content.trim(), "source": "6.12.1", "tests": [test]},
    });
    fs::write(&file, result.to_string()).unwrap();
    let written = verdict(root, &["write", run, file.to_str().unwrap()]);
    assert!(written.status.success(), "{}", said(&written));
}

/// Runs, and what else is in the list of what does not pass.
fn excuses(root: &Path, lines: &str) {
    fs::write(root.join("kernel/not-passing"), lines).unwrap();
}

const NOT_RUN: &str = "full * takes too long\nkasan * not built\nkcsan * not built\n";

#[test]
fn verdicts_that_are_missing_stale_or_bad_are_none() {
    let root = checkout();
    let root = root.path();
    let passes = || {
        let check = verdict(root, &["check"]);
        assert!(check.status.success(), "{}", said(&check));
        said(&check)
    };
    let fails = |why: &str| {
        let check = verdict(root, &["check"]);
        assert!(!check.status.success());
        assert!(said(&check).contains(why), "'{why}' in: {}", said(&check));
    };
    excuses(root, NOT_RUN);
    fails("no verdict `quick`: make kernel-test-quick");
    leave(root, "quick", "pass");
    assert!(passes().contains("`kasan` has not been run on what is here: not built"));
    excuses(root, "");
    fails("no verdict `kcsan`: kernel/scripts/test --debug kcsan");
    excuses(root, NOT_RUN);

    // A run that was made counts, whatever is said about runs that were not.
    leave(root, "kasan", "fail");
    fails("in the run `kasan` tests have failed: 00-boot");
    leave(root, "kasan", "skip");
    fails("in the run `kasan` tests have failed: 00-boot");
    excuses(root, &format!("{NOT_RUN}quick 00-boot of another run\n"));
    fails("in the run `kasan` tests have failed: 00-boot");
    excuses(root, &format!("{NOT_RUN}kasan 00-boot no memory\n"));
    assert!(passes().contains("00-boot does not pass in `kasan`: no memory"));
    leave(root, "kasan", "pass");
    excuses(root, NOT_RUN);
    passes();

    // Whatever decides about the tests: here the part that lies outside of kernel/.
    let header = root.join("bpf/brake.h");
    let text = fs::read_to_string(&header).unwrap();
    fs::write(&header, text.replace("15 / 16", "14 / 16")).unwrap();
    fails("the verdict `quick` is stale");
    excuses(root, "full * takes too long\n");
    fails("kernel/scripts/test --debug kasan");
    excuses(root, NOT_RUN);
    fs::write(&header, text).unwrap();
    passes();
    // What decides about one run only.
    leave(root, "kcsan", "pass");
    let expected = root.join("kernel/vm/kcsan-expected");
    fs::write(&expected, "").unwrap();
    assert!(passes().contains("`kcsan` has not been run on what is here"));
    fs::write(root.join("kernel/tests/99-new.sh"), "# mode: smp\n").unwrap();
    fails("the verdict `quick` is stale");
}

/// What kernel/vm/our-races keeps of a log, and what it says about the rest.
fn our_races(functions: Option<&str>, log: &str) -> (String, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    if let Some(functions) = functions {
        fs::write(path("functions"), functions).unwrap();
    }
    fs::write(path("expected"), "# why\nknown_* also_known harmless\n").unwrap();
    fs::write(path("log"), log).unwrap();
    let output = Command::new(format!("{ROOT}/kernel/vm/our-races"))
        .args([path("functions"), path("expected")])
        .stdin(fs::File::open(path("log")).unwrap())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let kept = String::from_utf8_lossy(&output.stdout).into_owned();
    (kept, said(&output))
}

/// A report of KCSAN's, as in the log.
fn race(title: &str, stack: &str) -> String {
    let line = "=".repeat(66);
    let frame = "\n read to 0xffff88800 of 8 bytes by interrupt on cpu 1:\n";
    format!("{line}\nBUG: KCSAN: data-race in {title}\n{frame} {stack}+0x41/0xa0\n{line}\n")
}

#[test]
fn data_races_of_the_unpatched_kernel_are_told_from_ours() {
    let functions = "touched dev_xmit\nadded path_metrics_add\ntouched known_one\n";
    let kept = |title: &str, stack: &str| {
        let report = race(title, stack);
        let log = format!("before\n{report}WARNING: between\n{report}after\n");
        let (log_kept, others) = our_races(Some(functions), &log);
        if log_kept == log {
            assert_eq!(others, "");
            return true;
        }
        // Nothing else goes with it.
        let line = format!("{}\n", "=".repeat(66));
        let rest = format!("before\n{line}WARNING: between\n{line}after\n");
        assert_eq!(log_kept, rest);
        let line = format!("not of the series: BUG: KCSAN: data-race in {title}\n");
        assert_eq!(others, line.repeat(2));
        false
    };
    assert!(!kept("pollwake / schedule_timeout", "dev_xmit"));
    assert!(kept("pollwake / schedule_timeout", "path_metrics_add"));
    assert!(kept("dev_xmit / pollwake", "pollwake"));
    assert!(kept("pollwake / dev_xmit.constprop.0", "pollwake"));
    assert!(kept("dev_xmit", "pollwake"));
    assert!(!kept("dev_xmit2 / pollwake", "pollwake"));
    assert!(!kept("known_one / also_known", "pollwake"));
    assert!(kept("also_known / known_one", "pollwake"));
    assert!(kept(
        "handle / handle",
        "handle+0x41/0xa0 [mountain_redirect] x"
    ));

    // Where it is not known whose they are, and where the log ends in a report.
    let (log_kept, _) = our_races(None, &race("pollwake / pollwake", "pollwake"));
    assert!(log_kept.contains("pollwake"));
    let cut = race("dev_xmit / pollwake", "pollwake");
    let cut = &cut[..cut.len() - 67];
    assert_eq!(our_races(Some(functions), cut).0, cut);
}
