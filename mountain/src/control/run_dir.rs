// SPDX-License-Identifier: GPL-2.0-or-later
//! Where a running daemon is found: its folder, lock and control socket.
//!
//! Everything is per network namespace, by its inode: `/run` is shared between namespaces, routes
//! are not. The lock is the kernel's (flock), so it never outlives the process, however that ends.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail, Context, Result};
use nix::fcntl::{Flock, FlockArg};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::status::{Decisions, Moves, Status};
use crate::host::namespaces::this_namespace;
use crate::steer::PolicyKind;

/// Parent of the folders, one per network namespace.
const BASE: &str = "/run/mountain";
/// How long a client waits for the daemon's answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a daemon that closed a connection may take to be gone, if that was its end.
const ENDING: Duration = Duration::from_millis(500);
const UNANSWERED: &str = "mountain runs in this network namespace but did not answer: try again";

/// What a client asks for; one line of JSON.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(tag = "cmd", rename_all = "kebab-case")]
pub(crate) enum Request {
    /// The whole state: [`super::status::Status`].
    Status,
    /// The last `last` decisions.
    Explain {
        /// At most so many, the newest ones.
        last: usize,
    },
    /// Switch to another policy.
    Policy {
        /// As in mountain.toml: `mountain`, `min-rtt`, ...
        name: String,
    },
    /// The last `last` moves of single flows.
    Moves {
        /// At most so many, the newest ones.
        last: usize,
    },
    /// Detach everything and end.
    Stop,
}

/// What the daemon answers; one line of JSON.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Response {
    /// What was asked for, as JSON; null if that is nothing.
    Ok(Value),
    /// Why it could not be done, for people.
    Error(String),
}

/// The folder of this network namespace's daemon.
#[derive(Clone, Debug)]
pub struct RunDir(PathBuf);

impl RunDir {
    /// Of the namespace that the calling thread is in.
    pub fn of_this_namespace() -> Result<Self> {
        Ok(Self(
            Path::new(BASE).join(format!("net-{}", this_namespace()?)),
        ))
    }

    /// Where all files of this namespace's daemon are.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// The Unix socket that the daemon answers at.
    pub(crate) fn socket(&self) -> PathBuf {
        self.0.join("control.sock")
    }

    /// What a daemon in the background writes to.
    pub(crate) fn log(&self) -> PathBuf {
        self.0.join("log")
    }

    /// Takes the lock that only one daemon of a namespace can hold; `None` when another has it.
    pub(crate) fn lock(&self) -> Result<Option<Flock<File>>> {
        fs::create_dir_all(&self.0)
            .with_context(|| format!("cannot make {}: run as root", self.0.display()))?;
        fs::set_permissions(&self.0, fs::Permissions::from_mode(0o700))?;
        let path = self.0.join("lock");
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(&path)
            .with_context(|| format!("cannot open {}: run as root", path.display()))?;
        try_lock(file)
    }

    /// Whether a daemon runs in this namespace. Makes nothing: one that ends removes its folder.
    pub fn is_running(&self) -> Result<bool> {
        let path = self.0.join("lock");
        match File::options().write(true).open(&path) {
            Ok(file) => Ok(try_lock(file)?.is_none()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(e).with_context(|| format!("cannot open {}", path.display())),
        }
    }

    /// Removes the folder; for the holder of the lock, or to clear up after one that was killed.
    pub(crate) fn remove(&self) {
        let _ = fs::remove_dir_all(&self.0);
    }

    /// The daemon's status. `None` when there is none.
    ///
    /// # Errors
    /// As [`RunDir::ask`].
    pub fn status(&self) -> Result<Option<Status>> {
        self.ask_for(&Request::Status)
    }

    /// The last `last` decisions. `None` when there is no daemon.
    ///
    /// # Errors
    /// As [`RunDir::ask`].
    pub(crate) fn decisions(&self, last: usize) -> Result<Option<Decisions>> {
        self.ask_for(&Request::Explain { last })
    }

    /// The last `last` moves of single flows. `None` when there is no daemon.
    ///
    /// # Errors
    /// As [`RunDir::ask`].
    pub(crate) fn moves(&self, last: usize) -> Result<Option<Moves>> {
        self.ask_for(&Request::Moves { last })
    }

    /// Switches to another policy. `None` when there is no daemon.
    ///
    /// # Errors
    /// As [`RunDir::ask`].
    pub(crate) fn switch(&self, name: PolicyKind) -> Result<Option<Value>> {
        let name = name.to_string();
        self.ask(&Request::Policy { name })
    }

    fn ask_for<T: DeserializeOwned>(&self, request: &Request) -> Result<Option<T>> {
        match self.ask(request)? {
            None => Ok(None),
            Some(value) => serde_json::from_value(value)
                .map(Some)
                .context("the daemon's answer is not understood: is it of another version?"),
        }
    }

    /// Asks the daemon. `None` when there is none.
    ///
    /// # Errors
    /// What the daemon answered, or that it runs and does not answer.
    pub(crate) fn ask(&self, request: &Request) -> Result<Option<Value>> {
        let mut stream = match UnixStream::connect(self.socket()) {
            Ok(stream) => stream,
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                bail!("only root may talk to the daemon: try again with sudo")
            }
            // A socket file without a listener is left over from a daemon that was killed.
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
                ) =>
            {
                return Ok(None)
            }
            Err(e) => return Err(e).context(UNANSWERED),
        };
        stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        let mut line = serde_json::to_string(request)?;
        line.push('\n');
        // A connection that was closed already shows in the answer.
        let _ = stream.write_all(line.as_bytes());
        let mut answer = String::new();
        match BufReader::new(stream).read_line(&mut answer) {
            // It ended in between, or made way for the next of too many clients.
            Ok(0) if self.wait_gone(ENDING)? => return Ok(None),
            Ok(0) => bail!(UNANSWERED),
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset && self.wait_gone(ENDING)? => {
                return Ok(None)
            }
            other => other.context(UNANSWERED)?,
        };
        match serde_json::from_str(&answer).context("the daemon's answer is not understood")? {
            Response::Ok(value) => Ok(Some(value)),
            Response::Error(text) => Err(anyhow!(text)),
        }
    }

    /// Waits until no daemon holds the lock. Returns whether that came true.
    pub(crate) fn wait_gone(&self, limit: Duration) -> Result<bool> {
        let end = Instant::now() + limit;
        while self.is_running()? {
            if Instant::now() > end {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(true)
    }
}

/// Removes the folders of daemons that no longer run, of namespaces that are gone too.
pub(crate) fn remove_stale() {
    let folders = fs::read_dir(BASE).into_iter().flatten().flatten();
    let is_daemons = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.starts_with("net-"))
    };
    let run_dirs = folders.map(|entry| entry.path()).filter(is_daemons);
    for run_dir in run_dirs.map(RunDir) {
        if let Ok(false) = run_dir.is_running() {
            run_dir.remove();
        }
    }
}

/// The lock on an open file; `None` when another process has it.
fn try_lock(file: File) -> Result<Option<Flock<File>>> {
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, e)) => Err(e).context("cannot lock"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_is_told_by_its_lock_and_asking_makes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = RunDir(dir.path().join("net-1"));
        assert!(!run_dir.is_running().unwrap());
        assert!(!run_dir.path().exists());

        let held = run_dir.lock().unwrap().unwrap();
        assert!(run_dir.is_running().unwrap());
        // What `down` meets when the daemon has just removed its folder.
        run_dir.remove();
        assert!(!run_dir.is_running().unwrap());
        assert!(!run_dir.path().exists());
        drop(held);
    }
}
