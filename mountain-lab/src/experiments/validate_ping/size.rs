// SPDX-License-Identifier: GPL-2.0-or-later
//! What a million samples cost: time and memory of `mountain compare` and `mountain report`, and
//! the size of the page.

use std::fs::File;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Instant;

use anyhow::{ensure, Context, Result};
use mountain::measure::runfile::{RunFile, Samples, SCHEMA};
use mountain_lab::result::{Check, Metric};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;
use serde_json::json;

use crate::driver::{CommonArgs, Session};
use crate::experiments::probing::pool::gaver_lewis;
use crate::experiments::probing::tool::Tool;
use crate::policy_ctl::binary;

const MAX_SECONDS: f64 = 10.0;
const MAX_RSS: f64 = 500e6;
const MAX_PAGE: f64 = 2e6;

/// Repeats and steps.
pub fn extent(args: &CommonArgs) -> (u32, u64) {
    let repeats = args.quick_or(1, 3);
    (repeats, 2 + u64::from(repeats) * 2)
}

/// What a program took.
struct Usage {
    seconds: f64,
    /// Largest resident set, bytes.
    rss: f64,
}

pub fn run(session: &mut Session) -> Result<()> {
    let samples = session.args.quick_or(20_000, 1_000_000);
    let (repeats, _) = extent(&session.args);
    let dir = tempfile::tempdir().context("no folder for files under way")?;
    let dir = dir.path();
    let files = ["a.json", "b.json"].map(|name| dir.join(name));
    for (i, file) in files.iter().enumerate() {
        session.step(&format!("writing {samples} samples"))?;
        synthetic(samples, session.args.seed.wrapping_add(i as u64)).write(file)?;
    }
    let version = Tool::MountainIcmp.version().context("no mountain to run")?;
    let optimised = optimised(&version);
    let profile = if optimised { "release" } else { "dev" };
    let size = json!({ "samples": samples, "profile": profile, "version": version });
    session.result.note("size", size);
    let out = dir.join("report");
    let n = samples as u64 * 2;
    for name in ["compare", "report"] {
        let mut usages = vec![];
        for _ in 0..repeats {
            session.step(&format!("mountain {name}"))?;
            let mut command = Command::new(binary()?);
            command.arg(name).args(&files);
            if name == "report" {
                command.arg("-o").arg(&out);
            }
            usages.push(measured(&mut command, dir)?);
        }
        let of = |value: fn(&Usage) -> f64| usages.iter().map(value).collect::<Vec<f64>>();
        let (seconds, rss) = (of(|u| u.seconds), of(|u| u.rss));
        let policy = format!("mountain {name}");
        let result = &mut session.result;
        result.put_values(&policy, "seconds", "s", &seconds, n);
        result.put_values(&policy, "max_rss_bytes", "bytes", &rss, n);
        // The worst of them: the promise is no median.
        let worst = |values: Vec<f64>| values.into_iter().reduce(f64::max);
        result.checks.push(time(name, worst(seconds), optimised));
        let what = format!("memory of `mountain {name}`, bytes");
        result.at_most(&what, worst(rss), MAX_RSS);
    }
    let page = std::fs::metadata(out.join("index.html"))?.len() as f64;
    let metric = Metric::single("bytes", page, n);
    session.result.put("mountain report", "page_bytes", metric);
    let what = "page of `mountain report`, bytes";
    session.result.at_most(what, Some(page), MAX_PAGE);
    Ok(())
}

/// Whether the program says nothing of being a debug build.
fn optimised(version: &str) -> bool {
    !version.contains("debug build")
}

/// The time of a build that is not optimised says nothing about the promise.
fn time(name: &str, seconds: Option<f64>, optimised: bool) -> Check {
    let (build, seconds) = match optimised {
        true => ("", seconds),
        false => (" (a debug build: not judged)", None),
    };
    let what = format!("time of `mountain {name}`, s{build}");
    Check::at_most(&what, seconds, MAX_SECONDS)
}

/// A run as `mountain ping` would write it: [`gaver_lewis`], 0.1% lost, whole ns.
fn synthetic(count: usize, seed: u64) -> RunFile {
    let mut rng = Pcg64::seed_from_u64(!seed);
    let whole_ns = |us: f64| (us * 1e3).round() / 1e3;
    let mut samples = Samples::default();
    for (i, rtt) in gaver_lewis(count, seed, 0.001).into_iter().enumerate() {
        let own = rng.random_range(20.0..80.0);
        let sent = i as f64 * 1e4 + rng.random_range(0.0..60.0);
        samples.sent_us.push(whole_ns(sent));
        samples.rtt_us.push(rtt.map(whole_ns));
        samples.user_rtt_us.push(rtt.map(|us| whole_ns(us + own)));
    }
    RunFile {
        schema: SCHEMA.into(),
        tool: "synthetic".into(),
        seconds: count as f64 / 100.0,
        interval_us: Some(1e4),
        clock: "kernel".into(),
        samples,
        ..RunFile::default()
    }
}

/// Runs a program to its end; fails with what it said.
///
/// The kernel counts into a child's largest resident set what it was before exec: a copy of this
/// process, which is far smaller than what is measured.
fn measured(command: &mut Command, dir: &Path) -> Result<Usage> {
    let said = dir.join("said");
    let log = File::create(&said)?;
    let started = Instant::now();
    // SAFETY: does nothing. It makes std fork: of a child made by posix_spawn the kernel counts the
    // peak of this process, whose memory it shares until its exec, as its own.
    unsafe { command.pre_exec(|| Ok(())) };
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let child = command.stderr(log).spawn();
    let child = child.with_context(|| format!("{command:?}"))?;
    let (mut status, pid) = (0, child.id() as libc::pid_t);
    // SAFETY: both pointers are to values that outlive the call; rusage is plain numbers. The
    // child is reaped here and `child` is not asked again.
    let (reaped, usage) = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        let reaped = loop {
            let reaped = libc::wait4(pid, &mut status, 0, &mut usage);
            let error = std::io::Error::last_os_error();
            if reaped != -1 || error.kind() != std::io::ErrorKind::Interrupted {
                break reaped;
            }
        };
        (reaped, usage)
    };
    let seconds = started.elapsed().as_secs_f64();
    ensure!(reaped == pid, "wait4: {}", std::io::Error::last_os_error());
    let status = ExitStatus::from_raw(status);
    ensure!(
        status.success(),
        "{command:?}: {status}: {}",
        std::fs::read_to_string(&said).unwrap_or_default().trim()
    );
    Ok(Usage {
        seconds,
        // In KiB, getrusage(2).
        rss: usage.ru_maxrss as f64 * 1024.0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn synthetic_runs_are_seeded_and_readable() {
        let run = synthetic(20_000, 3);
        assert_eq!(run, synthetic(20_000, 3));
        assert_ne!(run.samples, synthetic(20_000, 4).samples);
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("run.json");
        run.write(&file).unwrap();
        assert_eq!(RunFile::read(&file).unwrap().samples.len(), 20_000);
        let lost = run.samples.rtt_us.iter().filter(|r| r.is_none()).count();
        assert!((5..50).contains(&lost), "{lost}");
        let mean = run.samples.rtt_us.iter().flatten().sum::<f64>() / (20_000 - lost) as f64;
        assert!((23_700.0..24_300.0).contains(&mean), "{mean}");
    }

    #[test]
    fn time_and_memory_of_a_program_are_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let shell = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            measured(&mut command, dir.path())
        };
        let usage = shell("sleep 0.3").unwrap();
        assert!((0.3..3.0).contains(&usage.seconds), "{}", usage.seconds);
        let small = usage.rss;
        let large = shell("x=$(head -c 60000000 /dev/zero | tr '\\0' x); :").unwrap();
        assert!(large.rss > small + 50e6, "{} {small}", large.rss);
        let error = shell("echo broken >&2; exit 3").err().unwrap().to_string();
        assert!(error.contains("broken") && error.contains('3'), "{error}");
    }

    #[test]
    fn a_debug_build_is_not_judged_by_its_time() {
        assert!(optimised("mountain 0.1.0"));
        assert!(!optimised("mountain 0.1.0 (debug build)"));
        assert_eq!(time("compare", Some(9.9), true).met, Some(true));
        assert_eq!(time("compare", Some(10.1), true).met, Some(false));
        let debug = time("compare", Some(1.0), false);
        assert!(debug.met.is_none() && debug.name.contains("debug build"));
    }
}
