// SPDX-License-Identifier: GPL-2.0-or-later
//! Signals that are read from a descriptor instead of ending the process.

use std::error::Error;
use std::fmt;
use std::fs;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::poll::{ppoll, PollFd, PollFlags};
use nix::sys::signal::{signal, SigHandler, SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::time::TimeSpec;

/// What asks to end, but for what was ignored from the start (`nohup`, `&` in a script).
pub(crate) fn asks_to_end() -> SigSet {
    use Signal::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
    let asks = [SIGINT, SIGTERM, SIGHUP, SIGQUIT].into_iter();
    asks.filter(|s| !is_ignored(*s)).collect()
}

/// What asks a daemon to end. Where it has no terminal, it ignores SIGHUP: to daemons that means to read their
/// configuration anew.
pub(crate) fn asks_daemon_to_end() -> SigSet {
    if !has_terminal() {
        ignore(Signal::SIGHUP);
    }
    // A log that may not grow (`ulimit -f`) cannot be written, and no more.
    ignore(Signal::SIGXFSZ);
    asks_to_end()
}

fn ignore(what: Signal) {
    // SAFETY: no function of ours is called for it.
    let _ = unsafe { signal(what, SigHandler::SigIgn) };
}

/// Whether this process has a controlling terminal (`tty_nr`, proc_pid_stat(5)).
fn has_terminal() -> bool {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name, in brackets, may hold anything.
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    after_name.split_whitespace().nth(4) != Some("0")
}

fn is_ignored(signal: Signal) -> bool {
    // SAFETY: reads the disposition into a value that outlives the call.
    unsafe {
        let mut now: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal as i32, std::ptr::null(), &mut now) == 0
            && now.sa_sigaction == libc::SIG_IGN
    }
}

/// From now on these signals do nothing by themselves: the descriptor, which does not block, tells them.
///
/// # Errors
/// The system's.
pub(crate) fn told(signals: &SigSet) -> Result<SignalFd> {
    signals.thread_block()?;
    let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
    Ok(SignalFd::with_flags(signals, flags)?)
}

/// Waits until one of these can be read or a signal interrupts, at most so long. Returns whether that came
/// true.
///
/// # Errors
/// The system's.
pub(crate) fn wait_readable(fds: &[BorrowedFd], limit: Duration) -> nix::Result<bool> {
    let fds = fds.iter().map(|fd| PollFd::new(*fd, PollFlags::POLLIN));
    let mut fds: Vec<PollFd> = fds.collect();
    match ppoll(&mut fds, Some(TimeSpec::from_duration(limit)), None) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::EINTR) => Ok(true),
        Err(e) => Err(e),
    }
}

/// The signals that ask to end, kept from ending this process.
pub(crate) struct Asked(SignalFd);

/// Who asks to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asker {
    /// The terminal, for Ctrl-C: it asks everything in its foreground.
    Terminal,
    /// A process, such as kill(1): it asks this one.
    Process,
}

/// A signal asked to end: an error, so that `?` leaves whatever is under way.
#[derive(Debug)]
pub(crate) struct Ended;

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("interrupted")
    }
}

impl Error for Ended {}

impl Asked {
    /// From now on a signal ends nothing by itself.
    pub(crate) fn to_end() -> Result<Self> {
        told(&asks_to_end()).map(Self)
    }

    /// Whether a signal has asked since this was called last.
    pub(crate) fn has_come(&self) -> Result<bool> {
        Ok(self.next()?.is_some())
    }

    fn next(&self) -> Result<Option<Asker>> {
        let told = self.0.read_signal()?;
        Ok(told.map(|signal| match signal.ssi_code {
            libc::SI_KERNEL => Asker::Terminal,
            _ => Asker::Process,
        }))
    }

    /// Waits so long.
    ///
    /// # Errors
    /// [`Ended`] once a signal asks to end.
    pub(crate) fn wait(&self, time: Duration) -> Result<()> {
        match self.comes_within(time)? {
            true => Err(Ended.into()),
            false => Ok(()),
        }
    }

    /// Waits so long, or until a signal asks to end. Returns whether one has.
    pub(crate) fn comes_within(&self, time: Duration) -> Result<bool> {
        Ok(self.who_within(time)?.is_some())
    }

    /// The same, and returns who has asked.
    pub(crate) fn who_within(&self, time: Duration) -> Result<Option<Asker>> {
        let until = Instant::now() + time;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let who = self.next()?;
            if who.is_some() || left.is_zero() {
                return Ok(who);
            }
            wait_readable(&[self.as_fd()], left).context("cannot wait")?;
        }
    }
}

impl AsFd for Asked {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
