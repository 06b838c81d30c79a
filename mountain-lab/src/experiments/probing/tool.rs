// SPDX-License-Identifier: GPL-2.0-or-later
//! Programs that measure round trips, each run as a user would for one block of probes, and read
//! through the same importers as `mountain import`.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use mountain::measure::import::import;
use mountain::measure::runfile::RunFile;
use nix::sched::{sched_setaffinity, CpuSet};
use nix::unistd::Pid;
use std::os::unix::process::CommandExt;

use crate::emulate::netns::{Netns, Running};
use crate::policy_ctl::{binary, REFLECT_PORT};

/// UDP port of irtt's server, its default.
const IRTT_PORT: u16 = 2112;
/// Bytes of the UDP probes; irtt's own headers take up to 68 of them.
const UDP_BYTES: &str = "96";
/// Payload bytes of the ICMP probes: ping(8)'s default.
const ICMP_BYTES: &str = "56";

/// A program that measures round trips.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tool {
    MountainIcmp,
    Ping,
    MountainUdp,
    Irtt,
}

/// Probes sent without a break.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    pub count: usize,
    pub interval: Duration,
    /// The only processor on which the program may run.
    pub cpu: Option<usize>,
}

impl Block {
    /// So many probes at the usual distance, on any processor.
    pub fn of(count: usize) -> Self {
        Block {
            count,
            interval: Duration::from_millis(10),
            cpu: None,
        }
    }

    /// The time it takes to send it.
    pub fn seconds(&self) -> f64 {
        self.count as f64 * self.interval.as_secs_f64()
    }
}

impl Tool {
    /// Its name in results.
    pub fn name(self) -> &'static str {
        match self {
            Tool::MountainIcmp => "mountain icmp",
            Tool::Ping => "ping(8)",
            Tool::MountainUdp => "mountain udp",
            Tool::Irtt => "irtt",
        }
    }

    fn program(self) -> Result<PathBuf> {
        match self {
            Tool::MountainIcmp | Tool::MountainUdp => binary(),
            Tool::Ping => Ok("ping".into()),
            Tool::Irtt => Ok("irtt".into()),
        }
    }

    /// What the installed program says of its version; `None` if it is not installed.
    pub fn version(self) -> Option<String> {
        let mut command = Command::new(self.program().ok()?);
        command.arg(match self {
            Tool::MountainIcmp | Tool::MountainUdp => "--version",
            Tool::Ping => "-V",
            Tool::Irtt => "version",
        });
        let said = command.stdin(Stdio::null()).output().ok()?;
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        said.lines().next().map(|line| line.trim().to_owned())
    }

    /// Measures one block from `ns`. UDP probes need their far end: `mountain reflect` or [`irtt_server`].
    pub fn measure(self, ns: &Netns, to: IpAddr, block: &Block) -> Result<RunFile> {
        let dir = tempfile::tempdir().context("no folder for files under way")?;
        let file = dir.path().join("block.json");
        let (count, to) = (block.count.to_string(), to.to_string());
        let interval = humantime::format_duration(block.interval)
            .to_string()
            .replace(' ', "");
        let mut command = ns.command(self.program()?);
        match self {
            Tool::MountainIcmp | Tool::MountainUdp => {
                command.args(["ping", &to, "--count", &count, "--interval", &interval]);
                command.arg("--out").arg(&file);
                if self == Tool::MountainUdp {
                    command.args(["--size", UDP_BYTES, "--udp", &REFLECT_PORT.to_string()]);
                } else {
                    command.args(["--size", ICMP_BYTES]);
                }
            }
            Tool::Ping => {
                let seconds = block.interval.as_secs_f64().to_string();
                command.args(["-n", "-D", "-W", "1", "-s", ICMP_BYTES, "-c", &count]);
                command.args(["-i", &seconds, &to]);
            }
            Tool::Irtt => {
                let duration = format!("{}ns", (block.seconds() * 1e9).round());
                let at = SocketAddr::new(to.parse()?, IRTT_PORT).to_string();
                command.args(["client", "-Q", "-i", &interval, "-d", &duration]);
                command.args(["-l", UDP_BYTES, "--wait=3x1s", "-o"]);
                command.arg(&file).arg(at);
            }
        }
        // ping(8) prints fractions by the locale.
        command.env("LC_ALL", "C").stdin(Stdio::null());
        if let Some(cpu) = block.cpu {
            pin(&mut command, cpu)?;
        }
        let shown = self.name();
        let out = command
            .output()
            .with_context(|| format!("cannot start {shown}"))?;
        let (status, said) = (out.status, String::from_utf8_lossy(&out.stderr));
        // irtt's whole help may follow.
        let said = said.lines().next().unwrap_or("");
        // All of them tell by their exit code when nothing was answered.
        ensure!(status.success(), "{shown}: {status}: {said}");
        match self {
            Tool::MountainIcmp | Tool::MountainUdp => RunFile::read(&file),
            Tool::Ping => import(out.stdout.as_slice(), shown, None).context(shown),
            Tool::Irtt => import(std::fs::read(&file)?.as_slice(), shown, None).context(shown),
        }
    }
}

/// Makes the program run on this processor only.
pub fn pin(command: &mut Command, cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu)?;
    // SAFETY: one system call on the new process, without allocation.
    unsafe {
        command.pre_exec(move || Ok(sched_setaffinity(Pid::from_raw(0), &set)?));
    }
    Ok(())
}

/// irtt's far end: listens on `addr` of `ns`, without a limit on how often probes may come.
pub fn irtt_server(ns: &Netns, addr: IpAddr) -> Result<Running> {
    let listen = SocketAddr::new(addr, IRTT_PORT).to_string();
    let mut command = ns.command("irtt");
    command.args(["server", "-i", "0", "-b", &listen]);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let child = command.stderr(Stdio::null()).spawn();
    let mut server = Running(child.context("cannot start irtt")?);
    std::thread::sleep(Duration::from_millis(300));
    ensure!(
        server.0.try_wait()?.is_none(),
        "`irtt server` ended at once: is {listen} taken?"
    );
    Ok(server)
}
