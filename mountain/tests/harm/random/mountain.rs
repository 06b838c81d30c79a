// SPDX-License-Identifier: GPL-2.0-or-later
//! The daemon on a random host.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use mountain::control::run_dir::{Request, RunDir};
use nix::sys::signal::Signal;
use serde_json::Value;

use super::host::{Host, Kind};
use super::rig::Rig;
use super::setting;
use crate::support::{Guard, MOUNTAIN};

/// Any reaction, on a busy machine: s. An emulated one takes longer.
const LIMIT_S: u64 = 120;
/// Paths that are not good by then will not be.
const PATIENCE: Duration = Duration::from_secs(5);
/// Flows first seen sooner after attaching stay where the kernel has them.
const GRACE: Duration = Duration::from_millis(2300);

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
    measured: Vec<Value>,
    _config: tempfile::NamedTempFile,
}

impl Daemon {
    /// In this thread's namespace; `None` where it refuses to run, which harms nobody.
    pub fn start(rig: &mut Rig, host: &Host) -> Option<Self> {
        let mut config = tempfile::NamedTempFile::new().unwrap();
        config.write_all(CONFIG.as_bytes()).unwrap();
        let log = tempfile::tempfile().unwrap();
        // Another machine has it elsewhere.
        let program = std::env::var_os("MOUNTAIN_RANDOM_PROGRAM").unwrap_or(MOUNTAIN.into());
        let mut command = Command::new(program);
        command.args(["up", "--foreground", "--wait", "--config"]);
        command.arg(config.path());
        if host.has(Kind::Adopt) {
            command.arg("--adopt");
        }
        let child = command
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log.try_clone().unwrap())
            .spawn()
            .unwrap();
        let mut daemon = Self {
            process: Some(Guard::new(child)),
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

    pub fn status(&self) -> Option<Value> {
        self.run_dir.ask(&Request::Status).ok().flatten()
    }

    /// Answers neighbours until the status is as wanted.
    fn wait(
        &self,
        rig: &mut Rig,
        what: &str,
        limit: Duration,
        wanted: impl Fn(&Value) -> bool,
    ) -> Result<Value, String> {
        let end = Instant::now() + limit;
        loop {
            if let Some(status) = self.status() {
                if wanted(&status) {
                    return Ok(status);
                }
            }
            if Instant::now() > end {
                let status = self.status().unwrap_or_default();
                let said = self.said();
                return Err(format!("not within {limit:?}: {what}\n{status:#}\n{said}"));
            }
            rig.pump(Duration::from_millis(30));
        }
    }

    /// Waits until paths are measured and new flows are steered. Returns the status.
    pub fn settle(&mut self, rig: &mut Rig) -> Value {
        // A rule or a firewall may be in the way of some path's probes for good.
        let good = |p: &Value| p["state"] == "good";
        let _ = self.wait(rig, "paths are good", PATIENCE, |status| {
            paths(status).iter().all(good)
        });
        let status = self.status().unwrap_or_default();
        let measured = paths(&status).into_iter().filter(good);
        self.measured = measured.map(|p| p["id"].clone()).collect();
        if !paths(&status).is_empty() {
            rig.pump(GRACE);
        }
        status
    }

    /// Waits until the paths that answer probes are used, and those that are muted are not.
    pub fn wait_for_paths(&self, rig: &mut Rig) {
        let muted = rig.muted.clone();
        let done = self.wait(rig, "paths are as they should be", limit(), |status| {
            let paths = paths(status).into_iter();
            let mut paths = paths.filter(|p| self.measured.contains(&p["id"]));
            paths.all(|p| {
                let silent = muted.iter().any(|m| p["device"] == **m);
                silent != (p["state"] == "good")
            })
        });
        if let Err(why) = done {
            panic!("{why}");
        }
    }

    pub fn said(&self) -> String {
        let mut text = String::new();
        let mut log = &self.log;
        log.seek(SeekFrom::Start(0)).unwrap();
        log.read_to_string(&mut text).unwrap();
        text
    }

    /// Ends it in order.
    pub fn stop(mut self) {
        let mut guard = self.process.take().expect("it runs");
        guard.signal(Signal::SIGTERM);
        guard.child().wait().unwrap();
    }
}

pub fn paths(status: &Value) -> Vec<Value> {
    status["paths"].as_array().cloned().unwrap_or_default()
}
