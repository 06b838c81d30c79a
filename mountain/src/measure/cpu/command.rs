// SPDX-License-Identifier: GPL-2.0-or-later
//! A command that runs beside a measurement, and what becomes of it when the measurement is told
//! to end: it is told so, too, and nothing of it is left behind.
//!
//! Its own children would outlive it. So this process is their reaper of last resort
//! (PR_SET_CHILD_SUBREAPER): who loses its parent becomes our child, and can be found.

use std::collections::BTreeSet;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::libc::signalfd_siginfo;
use nix::sys::signal::{kill, SigSet, Signal};
use nix::sys::signalfd::SignalFd;
use nix::sys::wait::{waitid, waitpid, Id, WaitPidFlag};
use nix::unistd::Pid;

use crate::host::signals::{asks_to_end, told, wait_readable};

/// Time for the command and what it left to end by themselves.
const GRACE: Duration = Duration::from_secs(2);
/// After this, what even SIGKILL did not end is left.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often to look for those that have ended, and for orphans.
const LOOK: Duration = Duration::from_millis(20);
/// Signals closer than this are one request to end.
const ONE_REQUEST: Duration = Duration::from_millis(300);

fn wanted() -> SigSet {
    let mut wanted = asks_to_end();
    wanted.add(Signal::SIGCHLD);
    wanted
}

/// The signals that end us, and that of a child's end, by a descriptor.
pub(super) fn signals() -> Result<SignalFd> {
    told(&wanted())
}

/// Waits for a signal, at most so long.
pub(super) fn wait(signals: &SignalFd, limit: Duration) -> Result<()> {
    wait_readable(&[signals.as_fd()], limit).context("cannot wait")?;
    Ok(())
}

pub(super) struct RunningCommand {
    child: Child,
    /// How many requests to end have come, and when the last one did.
    told: u32,
    told_at: Option<Instant>,
    /// Children that this process had before, from the program that it replaced.
    others: BTreeSet<Pid>,
}

impl RunningCommand {
    /// To be called after [`signals`], so that no signal ends us and leaves the command.
    pub(super) fn start(command: &mut Command) -> Result<Self> {
        let others: BTreeSet<Pid> = children().collect();
        if others.is_empty() {
            // Else whom those lose would become our child, too.
            nix::sys::prctl::set_child_subreaper(true)?;
        }
        // SAFETY: changes the mask by one system call, which is async-signal-safe.
        unsafe {
            command.pre_exec(|| Ok(wanted().thread_unblock()?));
        }
        let child = command.spawn();
        let child = child.with_context(|| format!("cannot run {:?}", command.get_program()))?;
        Ok(Self {
            child,
            told: 0,
            told_at: None,
            others,
        })
    }

    pub(super) fn try_wait(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// Passes a signal on; the second one kills.
    pub(super) fn tell(&mut self, signal: &signalfd_siginfo) {
        // timeout(1) tells its child and then the whole group: that is one request.
        let again = self.told_at.is_some_and(|t| t.elapsed() < ONE_REQUEST);
        if again {
            return;
        }
        self.told_at = Some(Instant::now());
        self.told += 1;
        // What the terminal sent has reached the command as well: it is in the same group.
        let from_terminal = signal.ssi_code == libc::SI_KERNEL;
        let signal = match (self.told, Signal::try_from(signal.ssi_signo as i32)) {
            (1, Ok(signal)) if !from_terminal => signal,
            (1, _) => return,
            _ => Signal::SIGKILL,
        };
        // Not reaped yet, so the number is still its own.
        let _ = kill(Pid::from_raw(self.child.id() as i32), signal);
    }

    /// Takes in orphans that have ended: whoever waits for their end looks whether they are there.
    pub(super) fn reap_orphans(&self) {
        let ended = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        while let Some(pid) = waitid(Id::All, ended).ok().and_then(|s| s.pid()) {
            if pid.as_raw() as u32 == self.child.id() {
                return;
            }
            let _ = waitpid(pid, Some(WaitPidFlag::WNOHANG));
        }
    }

    /// Ends the command, if it still runs, and what it started, and nothing else. They are asked first, and killed
    /// 2 s later. Returns whether all have ended.
    pub(super) fn end(mut self) -> bool {
        let pid = Pid::from_raw(self.child.id() as i32);
        let start = Instant::now();
        let mut told = BTreeSet::new();
        while start.elapsed() < PATIENCE {
            // Until it is reaped its number is its own, and known even where /proc cannot be read.
            let runs = !matches!(self.child.try_wait(), Ok(Some(_)));
            self.reap_orphans();
            let left = children().filter(|p| !self.others.contains(p));
            let left: BTreeSet<Pid> = left.chain(runs.then_some(pid)).collect();
            if left.is_empty() {
                return true;
            }
            for pid in left {
                if start.elapsed() >= GRACE || self.told > 1 {
                    let _ = kill(pid, Signal::SIGKILL);
                } else if told.insert(pid) {
                    let _ = kill(pid, Signal::SIGTERM);
                }
            }
            std::thread::sleep(LOOK);
        }
        false
    }
}

/// The children of this process.
fn children() -> impl Iterator<Item = Pid> {
    let own = std::process::id();
    let parent = move |pid: i32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        parent(&stat)
    };
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter_map(|e| e.file_name().to_str()?.parse().ok())
        .filter(move |&pid| parent(pid) == Some(own))
        .map(Pid::from_raw)
}

/// The parent in proc_pid_stat(5): the second field after the name, which may hold anything.
fn parent(stat: &str) -> Option<u32> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parent_is_found_behind_any_name() {
        assert_eq!(parent("12 (sh) S 7 12 12 0"), Some(7));
        assert_eq!(parent("12 (a) S 9 (b)) R 8 12"), Some(8));
        assert_eq!(parent("12 (sh"), None);
    }

    #[test]
    fn a_child_is_among_the_children() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = Pid::from_raw(child.id() as i32);
        assert!(children().any(|p| p == pid));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(children().all(|p| p != pid));
    }
}
