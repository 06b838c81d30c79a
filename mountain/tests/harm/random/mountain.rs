// SPDX-License-Identifier: GPL-2.0-or-later
//! The daemon on a random host.

use std::fs::File;
use std::process::Command;
use std::time::{Duration, Instant};

use mountain::control::run_dir::RunDir;
use mountain::control::status::{PathStatus, Status};
use nix::sys::signal::Signal;

use super::host::{Host, Kind};
use super::rig::Rig;
use super::setting;
use crate::support::{config, said, start_logged, Guard, MOUNTAIN};

/// Any reaction, on a busy machine: s. An emulated one takes longer.
const LIMIT_S: u64 = 120;
/// Paths that are not good by then will not be.
const PATIENCE: Duration = Duration::from_secs(5);
/// Paths differ by losing probes, never by a busy machine's delays.
const CONFIG: &str = "\
[steer]
tolerance_ms = 1000
flow_table_entries = 1024
";

fn limit() -> Duration {
    Duration::from_secs(setting("LIMIT_S", LIMIT_S))
}

pub struct Daemon {
    process: Option<Guard>,
    log: File,
    run_dir: RunDir,
    /// Paths that have been good.
    measured: Vec<usize>,
    _config: tempfile::NamedTempFile,
}

impl Daemon {
    /// In this thread's namespace; `None` where it refuses to run, which harms nobody.
    pub fn start(rig: &mut Rig, host: &Host) -> Option<Self> {
        let config = config(CONFIG);
        // Another machine has it elsewhere.
        let program = std::env::var_os("MOUNTAIN_RANDOM_PROGRAM").unwrap_or(MOUNTAIN.into());
        let mut command = Command::new(program);
        command.args(["up", "--foreground", "--wait", "--config"]);
        command.arg(config.path());
        if host.has(Kind::Adopt) {
            command.arg("--adopt");
        }
        let (process, log) = start_logged(&mut command);
        let mut daemon = Self {
            process: Some(process),
            log,
            run_dir: RunDir::of_this_namespace().unwrap(),
            measured: Vec::new(),
            _config: config,
        };
        let end = Instant::now() + limit();
        while daemon.status().is_none() {
            let process = daemon.process.as_mut().expect("it was started").child();
            if process.try_wait().unwrap().is_some() {
                return None;
            }
            assert!(Instant::now() < end, "no answer: {}", daemon.said());
            rig.pump(Duration::from_millis(30));
        }
        Some(daemon)
    }

    pub fn status(&self) -> Option<Status> {
        self.run_dir.status().ok().flatten()
    }

    /// Answers neighbours until the status is as wanted.
    fn wait(
        &self,
        rig: &mut Rig,
        what: &str,
        limit: Duration,
        wanted: impl Fn(&Status) -> bool,
    ) -> Result<(), String> {
        let end = Instant::now() + limit;
        loop {
            if let Some(status) = self.status() {
                if wanted(&status) {
                    return Ok(());
                }
            }
            if Instant::now() > end {
                let (status, said) = (self.status(), self.said());
                return Err(format!("not within {limit:?}: {what}\n{status:#?}\n{said}"));
            }
            rig.pump(Duration::from_millis(30));
        }
    }

    /// Waits until paths are measured and new flows are steered. Returns whether there is anything to steer.
    pub fn settle(&mut self, rig: &mut Rig) -> bool {
        // A rule or a firewall may be in the way of some path's probes for good.
        let _ = self.wait(rig, "paths are good", PATIENCE, |status| {
            status.paths.iter().all(is_good)
        });
        let Some(status) = self.status() else {
            return false;
        };
        let measured = status.paths.iter().filter(|p| is_good(p));
        self.measured = measured.map(|p| p.id).collect();
        if !status.paths.is_empty() {
            let _ = self.wait(rig, "it is settled", limit(), |status| status.settled);
        }
        !status.groups.is_empty()
    }

    /// Waits until the paths that answer probes are used, and those that are muted are not.
    pub fn wait_for_paths(&self, rig: &mut Rig) {
        let muted = rig.muted.clone();
        let done = self.wait(rig, "paths are as they should be", limit(), |status| {
            let mut paths = status.paths.iter();
            paths.all(|p| !self.measured.contains(&p.id) || muted.contains(&p.device) != is_good(p))
        });
        if let Err(why) = done {
            panic!("{why}");
        }
    }

    pub fn said(&self) -> String {
        said(&self.log)
    }

    /// Ends it, in order if it still runs.
    pub fn stop(&mut self) -> Result<(), String> {
        let mut guard = self.process.take().expect("it runs");
        guard.signal(Signal::SIGTERM);
        let status = guard.child().wait().unwrap();
        match status.success() {
            true => Ok(()),
            false => Err(format!("Mountain ended with {status}")),
        }
    }
}

fn is_good(path: &PathStatus) -> bool {
    path.judged.state == "good"
}
