// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain up` in the background: the daemon is this program again, with a session of its own.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use nix::sys::signal::{kill, killpg, SigSet, Signal};
use nix::unistd::Pid;

use super::{down, log, status, ALREADY_RUNS};
use crate::control::run_dir::RunDir;
use crate::control::status::Status;
use crate::host::signals::{Asked, Ended};
use crate::host::{atomic_file, folder};

/// How long `up` waits for the daemon to answer.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// How long it waits without a message.
const QUIET: Duration = Duration::from_secs(2);
/// How long a daemon that did not may take to end by itself.
const GIVE_UP_TIMEOUT: Duration = Duration::from_secs(5);

/// Starts this program again with its arguments, as the daemon, and waits until it answers or ends.
pub(super) fn run(config: Option<&Path>) -> Result<()> {
    if let Some(file) = config.filter(|file| !is_lasting(file)) {
        bail!(
            "--config {}: the daemon reads it itself, so this has to be a file, or use --foreground",
            file.display()
        );
    }
    let run_dir = RunDir::of_this_namespace()?;
    if run_dir.is_running()? || run_dir.elsewhere()?.is_some() {
        bail!(run_dir.already_runs());
    }
    folder::make_private(run_dir.path()).map_err(|e| folder::cannot_make(run_dir.path(), e))?;
    let log = log::open(&run_dir.log()).context("cannot write the log")?;
    // Kept open: the daemon removes its folder when it fails.
    let mut said = File::open(run_dir.log())?;
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(["up", "--foreground"])
        .args(std::env::args_os().skip(2))
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    let signals = SigSet::thread_get_mask()?;
    // SAFETY: all are async-signal-safe and have no other effect on this process.
    unsafe {
        command.pre_exec(move || {
            // What is blocked here below would be for the daemon, too.
            signals.thread_set_mask()?;
            nix::unistd::setsid()?;
            // The caller's own, such as a lock of flock(1) or a pipe that somebody reads to its end. What is needed
            // until the daemon has been executed stays open until then.
            let (last, flags) = (libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC);
            libc::syscall(libc::SYS_close_range, 3, last, flags);
            Ok(())
        });
    }
    // The daemon has a session of its own, and gets no Ctrl-C.
    let asked = Asked::to_end()?;
    let child = command.spawn().context("cannot start the daemon")?;
    let status = wait_ready(child, &run_dir, &mut said, &asked)?;
    print!("{}", status::status_text(&status));
    println!(
        "\nmountain runs in the background; log: {}",
        run_dir.log().display()
    );
    Ok(())
}

/// Whether this is a file for the daemon, too. A pipe has been read by now, and standard input is another one there.
fn is_lasting(file: &Path) -> bool {
    let mut at = file.to_owned();
    // As many links as the kernel follows (path_resolution(7)).
    for _ in 0..40 {
        let (Ok(folder), Some(name)) = (atomic_file::folder(&at).canonicalize(), at.file_name())
        else {
            return false;
        };
        // What a process has open.
        if folder.starts_with("/proc") {
            return false;
        }
        match fs::read_link(folder.join(name)) {
            Ok(target) => at = folder.join(target),
            Err(_) => {
                let is_file = at.metadata().is_ok_and(|metadata| metadata.is_file());
                return is_file || folder.join(name) == Path::new("/dev/null");
            }
        }
    }
    false
}

/// Waits until the daemon that is `child` answers, or ends. Another one, which was started at the same moment, may
/// answer in its place: `child` finds the lock taken then, and ends.
fn wait_ready(
    mut child: Child,
    run_dir: &RunDir,
    said: &mut File,
    asked: &Asked,
) -> Result<Status> {
    let (begin, mut quiet) = (Instant::now(), true);
    let end = begin + START_TIMEOUT;
    loop {
        let status = run_dir.status_quietly().ok().flatten();
        // It may have been asked for while the daemon had no time to answer.
        if asked.has_come()? {
            give_up(&mut child, run_dir)?;
            bail!(Ended);
        }
        if let Some(status) = status.filter(|status| status.pid == child.id()) {
            return Ok(status);
        }
        if let Some(ended) = child.try_wait()? {
            if ended.code() == Some(ALREADY_RUNS.into()) {
                bail!(run_dir.already_runs());
            }
            bail!("{}", why_ended(said, ended)?);
        }
        if Instant::now() > end {
            let cleared = give_up(&mut child, run_dir);
            let text = all_said(said).unwrap_or_default();
            let last = last_line(&text).unwrap_or("nothing");
            let mut text = format!(
                "the daemon did not get ready within {} s and was ended: `mountain up --foreground` shows what takes so \
                 long. It said last: {}",
                START_TIMEOUT.as_secs(),
                last
            );
            if let Err(e) = cleared {
                text += &format!("\n{e:#}");
            }
            bail!("{text}");
        }
        if quiet && begin.elapsed() > QUIET {
            eprintln!("mountain: waiting for the daemon to read the host's routes and firewall");
            quiet = false;
        }
        if asked.comes_within(Duration::from_millis(20))? {
            give_up(&mut child, run_dir)?;
            bail!(Ended);
        }
    }
}

/// Why the daemon has ended before it was ready: its error, or where it has said none, as after `mountain down`, how.
fn why_ended(said: &mut File, ended: ExitStatus) -> Result<String> {
    let text = all_said(said)?;
    Ok(match (text.rsplit_once("mountain: "), last_line(&text)) {
        (Some((_, error)), _) => error.to_owned(),
        (None, None) => format!("the daemon has ended before it was ready ({ended})"),
        (None, Some(last)) => {
            format!("the daemon has ended before it was ready ({ended}). It said last: {last}")
        }
    })
}

/// The last line that says something: below its message, a panic has one about backtraces.
fn last_line(text: &str) -> Option<&str> {
    let mut lines = text.lines().rev();
    lines.find(|line| !line.starts_with("note: run with `RUST_BACKTRACE"))
}

/// What the daemon has said.
fn all_said(said: &mut File) -> Result<String> {
    let mut text = String::new();
    said.seek(SeekFrom::Start(0))?;
    said.read_to_string(&mut text)?;
    Ok(text.trim_end().to_owned())
}

/// Ends a daemon that does not get ready. On SIGTERM it takes back what it has added; if it hangs, it is killed, and
/// that is done here.
fn give_up(child: &mut Child, run_dir: &RunDir) -> Result<()> {
    let end = Instant::now() + GIVE_UP_TIMEOUT;
    let pid = Pid::from_raw(child.id().cast_signed());
    // One that has just ended by itself is not there any more.
    let _ = kill(pid, Signal::SIGTERM);
    while child.try_wait()?.is_none() {
        if Instant::now() > end {
            // With the programs that it has started: an nft that ends later would still add its table.
            let _ = killpg(pid, Signal::SIGKILL);
            child.wait()?;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    down::clear_after(run_dir)
}
