// SPDX-License-Identifier: GPL-2.0-or-later
//! The lock of the store: one command at a time, and nobody but root.

use std::fs::{DirBuilder, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use crate::host::atomic_file::is_at;
use crate::host::folder;
use crate::host::lock::holder;

/// How long a command waits for others to finish.
pub const WAIT: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(10);

/// Locks the folder, if there is one.
///
/// # Errors
/// Who holds the lock, when it is not free within `wait`.
pub fn lock(dir: &Path, wait: Duration) -> Result<Option<Flock<File>>> {
    let until = Instant::now() + wait;
    loop {
        // Neither waits for a writer, as of a FIFO, nor is led elsewhere.
        let flags = libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let file = match File::options().read(true).custom_flags(flags).open(dir) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) if e.kind() == io::ErrorKind::NotADirectory => {
                bail!(
                    "{} is not a folder, as it has to be: remove it",
                    dir.display()
                )
            }
            Err(e) => return Err(e).with_context(|| format!("cannot open {}", dir.display())),
        };
        // Who can open it can lock it. Earlier versions made it for all to read.
        if file.metadata().is_ok_and(|m| m.mode() & 0o077 != 0) {
            let closed = file.set_permissions(Permissions::from_mode(0o700));
            closed.with_context(|| format!("cannot close {} to others", dir.display()))?;
        }
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            // Who held it may have removed the folder meanwhile, and others made one anew.
            Ok(locked) if is_at(&locked, dir) => return Ok(Some(locked)),
            Ok(_) | Err((_, Errno::EWOULDBLOCK)) => {}
            Err((_, e)) => bail!("cannot lock {}: {e}", dir.display()),
        }
        ensure!(
            Instant::now() < until,
            "{} has been locked for {} s by {}: wait until that has ended, or end it, and try again",
            dir.display(),
            wait.as_secs_f32(),
            holder(dir)
        );
        thread::sleep(POLL);
    }
}

/// Locks the folder, and makes it if it is not there.
///
/// # Errors
/// As [`lock`].
pub(crate) fn make_locked(dir: &Path, wait: Duration) -> Result<Flock<File>> {
    loop {
        if let Some(base) = dir.parent() {
            folder::make_own(base).map_err(|e| folder::cannot_make(base, e))?;
        }
        match DirBuilder::new().mode(0o700).create(dir) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                return Err(folder::cannot_make(dir, e));
            }
            _ => {}
        }
        if let Some(lock) = lock(dir, wait)? {
            return Ok(lock);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;

    #[test]
    fn what_is_no_folder_keeps_nobody_waiting() {
        let base = tempfile::tempdir().unwrap();
        let (fifo, link) = (base.path().join("fifo"), base.path().join("link"));
        mkfifo(&fifo, Mode::S_IRWXU).unwrap();
        symlink("/nonexistent/x", &link).unwrap();
        for path in [fifo, link] {
            let locked = lock(&path, WAIT).map(drop);
            for said in [locked, make_locked(&path, WAIT).map(drop)] {
                let said = format!("{:#}", said.unwrap_err());
                assert!(
                    said.ends_with("is not a folder, as it has to be: remove it"),
                    "{said}"
                );
            }
        }
    }
}
