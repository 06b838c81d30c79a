// SPDX-License-Identifier: GPL-2.0-or-later
//! Where a running daemon is found: its folder, lock and control socket.
//!
//! Everything is per network namespace, by its inode: `/run` is shared between namespaces, routes
//! are not. The lock is the kernel's (flock), so it never outlives the process, however that ends.

use std::error::Error;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail, Context, Result};
use nix::fcntl::{Flock, FlockArg};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use socket2::{Domain, SockAddr, Socket, Type};

use super::presence::{self, Elsewhere};
use super::status::Status;
use crate::host::atomic_file::is_at;
use crate::host::delay;
use crate::host::folder;
use crate::host::lock::holder;
use crate::host::namespaces::this_namespace;
use crate::steer::PolicyKind;

/// Parent of the folders, one per network namespace.
const BASE: &str = "/run/mountain";
/// How long a client waits for each step of the daemon's: that it takes the connection, and that it answers.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// A folder without a lock that is as old belongs to a start that has failed.
const ABANDONED: Duration = Duration::from_secs(60);
/// How long others who look whether a daemon runs, or clear up after one, may hold its lock.
const LOOKED_AT: Duration = Duration::from_millis(200);
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
        /// What decides from now on.
        name: PolicyKind,
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

/// Why a daemon does not start: this network namespace has one.
#[derive(Debug)]
pub(crate) struct AlreadyRuns(Option<Elsewhere>);

impl fmt::Display for AlreadyRuns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(elsewhere) => write!(f, "not started: {elsewhere}"),
            None => f.write_str(
                "mountain already runs in this network namespace: `mountain status` shows it, `mountain down` stops it",
            ),
        }
    }
}

impl Error for AlreadyRuns {}

/// A daemon runs, and has neither answered nor closed the connection in time.
#[derive(Debug)]
pub(crate) struct Unanswered;

impl fmt::Display for Unanswered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "mountain runs in this network namespace but did not answer within {} s (is it stopped, or does it hang?)",
            ANSWER_TIMEOUT.as_secs()
        )
    }
}

impl Error for Unanswered {}

/// The folder of this network namespace's daemon.
#[derive(Clone, Debug)]
pub struct RunDir(PathBuf);

impl RunDir {
    /// Of the namespace that the calling thread is in.
    ///
    /// # Errors
    /// Where others may have put links there.
    pub fn of_this_namespace() -> Result<Self> {
        let base = Path::new(BASE);
        folder::ensure_own(base)?;
        Ok(Self(base.join(format!("net-{}", this_namespace()?))))
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

    /// The log of a daemon in the background, where this process is that one: its standard error leads there.
    pub(crate) fn own_log(&self) -> Option<File> {
        let stderr = io::stderr().as_fd().try_clone_to_owned().ok()?;
        Some(File::from(stderr)).filter(|file| is_at(file, &self.log()))
    }

    /// Empties the log that a killed daemon may have left; for the holder of the lock. Whoever does not get the lock must
    /// leave the log alone: another daemon writes to it.
    pub(crate) fn begin_own_log(&self) -> io::Result<()> {
        self.own_log().map_or(Ok(()), |log| log.set_len(0))
    }

    /// Takes the lock that only one daemon of a namespace can hold; `None` when another has it.
    pub(crate) fn lock(&self) -> Result<Option<Flock<File>>> {
        let end = Instant::now() + LOOKED_AT;
        loop {
            match self.try_to_lock() {
                Ok(Some(lock)) if !presence::is_announced() => return Ok(Some(lock)),
                // The folder is ours, and that daemon's is another one.
                Ok(Some(lock)) if Instant::now() >= end => {
                    self.remove(&lock);
                    return Ok(None);
                }
                Ok(Some(_)) => {}
                // Who clears up has removed the folder under our hands, or another one has made it.
                Err(e)
                    if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::AlreadyExists)
                        && Instant::now() < end => {}
                Ok(None) if Instant::now() < end => {}
                failed => return failed.map_err(|e| folder::cannot_make(&self.0, e)),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn try_to_lock(&self) -> io::Result<Option<Flock<File>>> {
        folder::make_private(&self.0)?;
        fs::set_permissions(&self.0, fs::Permissions::from_mode(0o700))?;
        let path = self.0.join("lock");
        let mut options = File::options();
        options.create(true).truncate(false).write(true).mode(0o600);
        let lock = try_lock(options.open(&path)?)?;
        Ok(lock.filter(|lock| is_at(lock, &path)))
    }

    /// Whether a daemon runs in this namespace. Makes nothing: one that ends removes its folder.
    pub fn is_running(&self) -> Result<bool> {
        let path = self.0.join("lock");
        match File::options().write(true).open(&path) {
            Ok(file) => Ok(try_lock(file)?.is_none()),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(false),
            Err(e) => Err(e).with_context(|| format!("cannot open {}", path.display())),
        }
    }

    /// The daemon of this namespace, where it is not the one of this folder. One that starts or ends may look so for a
    /// moment.
    pub(crate) fn elsewhere(&self) -> Result<Option<Elsewhere>> {
        let end = Instant::now() + ENDING;
        while presence::is_announced() && !self.is_running()? {
            if Instant::now() > end {
                let process = presence::process();
                return Ok(Some(Elsewhere { process }));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(None)
    }

    /// Why no other daemon starts.
    pub(crate) fn already_runs(&self) -> AlreadyRuns {
        AlreadyRuns(self.elsewhere().ok().flatten())
    }

    /// Removes the folder, if its lock is this one. Another daemon may have made it anew after somebody removed ours.
    pub(crate) fn remove(&self, lock: &Flock<File>) {
        if is_at(lock, &self.0.join("lock")) {
            self.remove_folder();
        }
    }

    fn remove_folder(&self) {
        // In one step: the next daemon may make its own as soon as the lock is gone.
        let aside = self
            .0
            .with_extension(format!("gone-{}", std::process::id()));
        if fs::rename(&self.0, &aside).is_ok() {
            let _ = fs::remove_dir_all(aside);
        }
    }

    /// Removes the folder of a daemon that was killed. One that is being started is left alone: it holds the
    /// lock, or will make it in a moment. (Over the folder of a killed one it makes another, and only its log is lost.)
    pub(crate) fn remove_stale(&self) {
        let path = self.0.join("lock");
        let made = fs::metadata(&self.0).and_then(|folder| folder.modified());
        let is_old = made.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > ABANDONED));
        match File::options().write(true).open(&path) {
            Ok(file) => {
                let lock = try_lock(file).ok().flatten();
                if let Some(lock) = lock {
                    self.remove(&lock);
                }
            }
            Err(_) if is_old => self.remove_folder(),
            Err(_) => {}
        }
    }

    /// The daemon's status. `None` when there is none.
    pub fn status(&self) -> Result<Option<Status>> {
        self.ask_for(&Request::Status)
    }

    /// The same without a word while the daemon does not answer.
    pub(crate) fn status_quietly(&self) -> Result<Option<Status>> {
        let status = self.ask_quietly(&Request::Status)?;
        status
            .map(|value| Ok(serde_json::from_value(value)?))
            .transpose()
    }

    /// As [`RunDir::ask`], with the answer as what it is.
    pub(crate) fn ask_for<T: DeserializeOwned>(&self, request: &Request) -> Result<Option<T>> {
        let Some(value) = self.ask(request)? else {
            return Ok(None);
        };
        let answer = serde_json::from_value(value).with_context(|| self.of_another_version())?;
        Ok(Some(answer))
    }

    /// Why an answer is not understood, and what to do: as after an upgrade, which leaves the daemon running.
    fn of_another_version(&self) -> String {
        // That much every status has.
        let status = self.ask(&Request::Status).ok().flatten();
        let theirs = status.as_ref().and_then(|s| s.get("version")?.as_str());
        let ours = env!("CARGO_PKG_VERSION");
        let theirs = match theirs {
            Some(theirs) if theirs == ours => format!("another build of {ours}"),
            Some(theirs) => theirs.to_owned(),
            None => "another version".to_owned(),
        };
        format!(
            "mountain {theirs} runs, which this command of mountain {ours} does not understand: run \
             `systemctl restart mountain`, or `mountain down` and `mountain up` if it was started by hand"
        )
    }

    /// Connects to the daemon. The kernel waits no longer for a place among those that it has not accepted yet than for
    /// sending. Of a daemon that stands still all places are taken in the end, by clients that have given up.
    fn connect(&self) -> io::Result<UnixStream> {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        socket.set_write_timeout(Some(ANSWER_TIMEOUT))?;
        socket.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        socket.connect(&SockAddr::unix(self.socket())?)?;
        Ok(socket.into())
    }

    /// Asks the daemon. `None` when there is none.
    ///
    /// # Errors
    /// What the daemon answered, that it runs and does not answer ([`Unanswered`], where it is silent), or that it runs
    /// [`Elsewhere`].
    pub(crate) fn ask(&self, request: &Request) -> Result<Option<Value>> {
        let lock = self.0.join("lock");
        let _waiting = delay::say(move || format!("{} to answer", holder(&lock)));
        self.ask_quietly(request)
    }

    fn ask_quietly(&self, request: &Request) -> Result<Option<Value>> {
        let mut stream = match self.connect() {
            Ok(stream) => stream,
            Err(e) => match e.kind() {
                ErrorKind::PermissionDenied => {
                    bail!("only root may talk to the daemon: try again with sudo")
                }
                // A socket file without a listener is left over from a daemon that was killed.
                ErrorKind::NotFound | ErrorKind::ConnectionRefused => {
                    return self.elsewhere()?.map_or(Ok(None), |seen| Err(seen.into()))
                }
                ErrorKind::WouldBlock => bail!(Unanswered),
                _ => return Err(e).context(UNANSWERED),
            },
        };
        let mut line = serde_json::to_string(request)?;
        line.push('\n');
        // A connection that was closed already shows in the answer.
        let _ = stream.write_all(line.as_bytes());
        let mut answer = String::new();
        match BufReader::new(stream).read_line(&mut answer) {
            // It ended in between, or made way for the next of too many clients.
            Ok(0) if self.wait_gone(ENDING)? => return Ok(None),
            Ok(0) => bail!(UNANSWERED),
            Err(e) if e.kind() == ErrorKind::ConnectionReset && self.wait_gone(ENDING)? => {
                return Ok(None)
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => bail!(Unanswered),
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
        run_dir.remove_stale();
    }
}

/// The lock on an open file; `None` when another process has it.
fn try_lock(file: File) -> io::Result<Option<Flock<File>>> {
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, e)) => Err(e.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::control::status::Decisions;

    #[test]
    fn a_daemon_of_another_version_is_named_with_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = RunDir(dir.path().to_owned());
        let listener = UnixListener::bind(run_dir.socket()).unwrap();
        // Each command asks twice: for what it wants, and for the version.
        let daemon = std::thread::spawn(move || {
            for stream in listener.incoming().take(4) {
                let mut stream = stream.unwrap();
                let mut line = String::new();
                BufReader::new(&stream).read_line(&mut line).unwrap();
                let answer = b"{\"ok\":{\"version\":\"0.0.0-older\"}}\n";
                stream.write_all(answer).unwrap();
            }
        });
        let decisions = run_dir.ask_for::<Decisions>(&Request::Explain { last: 1 });
        for asked in [run_dir.status().map(drop), decisions.map(drop)] {
            let said = format!("{:#}", asked.unwrap_err());
            for part in [
                "mountain 0.0.0-older runs",
                env!("CARGO_PKG_VERSION"),
                "systemctl restart mountain",
                "missing field",
            ] {
                assert!(said.contains(part), "no '{part}' in {said}");
            }
        }
        daemon.join().unwrap();
    }

    #[test]
    fn a_daemon_that_stands_still_keeps_no_command_waiting() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = RunDir(dir.path().to_owned());
        let listener = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        let address = SockAddr::unix(run_dir.socket()).unwrap();
        listener.bind(&address).unwrap();
        listener.listen(0).unwrap();
        let since = Instant::now();
        // One gets a place and no answer, the others not even that.
        std::thread::scope(|scope| {
            let ask = || run_dir.ask(&Request::Status).unwrap_err();
            for client in [(); 3].map(|()| scope.spawn(ask)) {
                let said = client.join().unwrap();
                assert!(said.is::<Unanswered>(), "{said:#}");
                assert!(!format!("{said:#}").contains("os error"), "{said:#}");
            }
        });
        let took = since.elapsed();
        assert!(took < 3 * ANSWER_TIMEOUT, "{took:?}");
    }

    #[test]
    fn a_daemon_is_told_by_its_lock_and_asking_makes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = RunDir(dir.path().join("net-1"));
        assert!(!run_dir.is_running().unwrap());
        assert!(!run_dir.path().exists());

        let held = run_dir.lock().unwrap().unwrap();
        assert!(run_dir.is_running().unwrap());
        // What `down` meets when the daemon has just removed its folder.
        run_dir.remove(&held);
        assert!(!run_dir.is_running().unwrap());
        assert!(!run_dir.path().exists());
        // Somebody else's stays.
        let _other = run_dir.lock().unwrap().unwrap();
        run_dir.remove(&held);
        assert!(run_dir.is_running().unwrap());
    }

    #[test]
    fn who_clears_up_takes_no_folder_away_from_a_daemon() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = RunDir(dir.path().join("net-1"));
        let started = std::sync::atomic::AtomicBool::new(true);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while started.load(std::sync::atomic::Ordering::Relaxed) {
                    run_dir.remove_stale();
                }
            });
            let stays = |_| {
                let held = run_dir.lock().ok().flatten();
                let written = fs::write(run_dir.log(), "x").is_ok();
                std::thread::yield_now();
                let stays = run_dir.is_running().unwrap_or(false) && run_dir.log().exists();
                // Dropped here, as by kill -9.
                held.is_some() && written && stays
            };
            let all_stay = (0..500).all(stays);
            started.store(false, std::sync::atomic::Ordering::Relaxed);
            assert!(all_stay);
        });
        run_dir.remove_stale();
        assert!(!run_dir.path().exists());
    }
}
