// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain down`: end the daemon, and take back what a killed one has left.

use std::time::{Duration, Instant};

use anyhow::{anyhow, bail, Context, Result};
use clap::Args;
use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;

use crate::cli::need_root_with;
use crate::control::presence::{self, Elsewhere};
use crate::control::run_dir::{self, Request, RunDir, Unanswered};
use crate::host::capabilities::CapabilitySet;
use crate::host::{descriptors, namespaces};
use crate::{placement, redirect};

/// How long to wait for the end of the daemon without a message.
const QUIET: Duration = Duration::from_secs(2);
/// How long to wait before a daemon that does not listen yet is asked again.
const AGAIN: Duration = Duration::from_millis(20);
/// How long to wait after that. Each device of a host with hundreds of them takes 10 ms, and more under load: the
/// kernel waits for all packets that are under way (`tcx_entry_sync`, include/net/tcx.h).
const TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Args)]
pub(crate) struct Down {
    /// Stop every daemon and remove what killed ones left, in all network namespaces
    #[arg(long)]
    all_namespaces: bool,
}

/// What there was to take back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    Daemon,
    Left,
    Nothing,
}

impl Down {
    pub(crate) fn run(self) -> Result<()> {
        need_root_with(CapabilitySet::NET_ADMIN)?;
        if self.all_namespaces {
            return everywhere();
        }
        println!(
            "{}",
            match here()? {
                Found::Daemon => "mountain is down; the kernel's own routing decides again",
                Found::Left =>
                    "mountain was not running; the rules and tables that it had left are removed",
                Found::Nothing => "mountain was not running; nothing is attached",
            }
        );
        Ok(())
    }
}

/// How to end a daemon that does not by itself.
fn end_it() -> String {
    match presence::process() {
        Some(pid) => format!("`kill -9 {pid}` ends it; then run `mountain down` again"),
        None => "`pgrep -af 'mountain up'` finds its process; end that by `kill -9`, then run `mountain down` again".into(),
    }
}

/// In the network namespace of the calling thread.
fn here() -> Result<Found> {
    let run_dir = RunDir::of_this_namespace()?;
    let ask = || {
        let answer = run_dir.ask(&Request::Stop);
        answer.map_err(|e| match e.is::<Unanswered>() {
            true => anyhow!("{e}: {}", end_it()),
            false => e,
        })
    };
    // One that was just killed holds its lock until it is gone, and one that has just been started before it listens.
    let (begin, mut was_there) = (Instant::now(), false);
    let mut asked = match ask() {
        Err(e) => match e.downcast()? {
            Elsewhere { process: Some(pid) } => {
                end_elsewhere(pid)?;
                clear_after(&run_dir)?;
                return Ok(Found::Daemon);
            }
            unseen => bail!(unseen),
        },
        asked => asked?,
    };
    while asked.is_none() && run_dir.is_running()? && begin.elapsed() < QUIET + TIMEOUT {
        if !was_there && begin.elapsed() > QUIET {
            eprintln!("mountain: waiting for the daemon, which starts or ends");
            // Or somebody has removed its socket.
            if let Some(pid) = presence::process() {
                let _ = kill(pid, Signal::SIGTERM);
            }
            was_there = true;
        }
        std::thread::sleep(AGAIN);
        asked = ask()?;
    }
    match asked {
        Some(_) if is_gone(&run_dir)? => {
            clear_after(&run_dir)?;
            Ok(Found::Daemon)
        }
        Some(_) => bail!(
            "the daemon did not end within {} s: {}",
            (QUIET + TIMEOUT).as_secs(),
            end_it()
        ),
        None if run_dir.is_running()? => {
            bail!("the daemon runs but does not answer: {}", end_it())
        }
        None => {
            // Nothing is attached without a process; files can be left over, and the rules and tables by
            // which flows go on where they are.
            // All the same where nothing can be written, as when /run is full.
            let lock = match run_dir.lock() {
                Ok(None) => bail!("a daemon has just been started: run `mountain down` again"),
                lock => lock.ok().flatten(),
            };
            let left = placement::clear()?;
            redirect::watch::clear()?;
            if let Some(lock) = lock {
                run_dir.remove(&lock);
            }
            Ok(match (was_there, left) {
                (true, _) => Found::Daemon,
                (false, true) => Found::Left,
                (false, false) => Found::Nothing,
            })
        }
    }
}

/// Ends the daemon whose socket is not found.
fn end_elsewhere(pid: Pid) -> Result<()> {
    // It may have ended meanwhile.
    let _ = kill(pid, Signal::SIGTERM);
    let begin = Instant::now();
    while presence::is_announced() {
        if begin.elapsed() > QUIET + TIMEOUT {
            bail!(
                "the daemon did not end within {} s: {}",
                (QUIET + TIMEOUT).as_secs(),
                end_it()
            );
        }
        std::thread::sleep(AGAIN);
    }
    Ok(())
}

/// Waits for the end of the daemon, and says so if that takes long. Whether it has ended.
fn is_gone(run_dir: &RunDir) -> Result<bool> {
    if run_dir.wait_gone(QUIET)? {
        return Ok(true);
    }
    eprintln!("mountain: waiting for the daemon to take its programs off all devices");
    run_dir.wait_gone(TIMEOUT)
}

/// Takes back what the daemon that has just ended, or was killed, could not, unless another one runs by now.
pub(super) fn clear_after(run_dir: &RunDir) -> Result<()> {
    let Some(lock) = run_dir.lock()? else {
        return Ok(());
    };
    let cleared = placement::clear();
    run_dir.remove(&lock);
    redirect::watch::clear()?;
    let left = "the daemon has ended, but some of its rules or tables are still there: run `mountain down`";
    cleared.map(drop).context(left)
}

/// In each network namespace; one where it fails does not keep it from the others.
fn everywhere() -> Result<()> {
    // All of them are held open meanwhile.
    descriptors::raise_limit();
    let (mut found, mut failed) = (0, Vec::new());
    for namespace in namespaces::all()? {
        let name = namespace.path.display();
        match namespace.within(here) {
            Ok(Found::Nothing) => continue,
            Ok(Found::Daemon) => println!("{name}: mountain is down"),
            Ok(Found::Left) => {
                println!("{name}: what mountain had left is removed (rules, tables)");
            }
            Err(e) => failed.push(format!("{name}: {e:#}")),
        }
        found += 1;
    }
    // Of namespaces that are gone.
    run_dir::remove_stale();
    match (found, &failed[..]) {
        (0, _) => println!("nothing of mountain's is in any network namespace"),
        (_, []) => {}
        (_, failed) => bail!("not everything could be taken back\n{}", failed.join("\n")),
    }
    Ok(())
}
