// SPDX-License-Identifier: GPL-2.0-or-later
//! Folders in which nobody but their owner may make, change or remove anything, whatever the umask is.

use std::fs::{self, DirBuilder, Metadata, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::Path;

use nix::unistd::geteuid;

/// Makes a folder that all may read, and those above it. One that is there stays as it is.
pub(crate) fn make_public(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o755).create(path)
}

/// The same, but fails if it is there and somebody else's.
pub(crate) fn make_own(path: &Path) -> io::Result<()> {
    make_public(path)?;
    ensure_own(path)
}

/// Fails where others than root and this user may have put links into a folder, which would lead writing elsewhere. That is
/// so where everybody may make folders in the one above. One that everybody may write to, as a tmpfs without `mode=`, is closed.
pub(crate) fn ensure_own(path: &Path) -> io::Result<()> {
    // It may be a link itself, to a folder of root's.
    for looked_at in [fs::symlink_metadata(path), fs::metadata(path)] {
        let found = match looked_at {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
            found => found?,
        };
        ensure_by_us(path, &found)?;
        if found.is_dir() && found.mode() & 0o022 != 0 {
            ensure_all_by_us(path)?;
            let set = |mode| fs::set_permissions(path, Permissions::from_mode(mode));
            set(found.mode() & 0o755)?;
            // What came meanwhile is found by the next command, too.
            ensure_all_by_us(path).or_else(|e| set(found.mode()).and(Err(e)))?;
        }
    }
    Ok(())
}

fn ensure_all_by_us(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        ensure_by_us(&entry.path(), &entry.metadata()?)?;
    }
    Ok(())
}

fn ensure_by_us(path: &Path, found: &Metadata) -> io::Result<()> {
    if [0, geteuid().as_raw()].contains(&found.uid()) {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "{} belongs to user {}, who may have put links there: remove it",
        path.display(),
        found.uid()
    )))
}

/// Makes a folder for its owner alone, in one that all may read. One that is there stays as it is.
pub(crate) fn make_private(path: &Path) -> io::Result<()> {
    if let Some(above) = path.parent() {
        make_own(above)?;
    }
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Says of a file or folder below /run that it could not be made, why, and what to do.
pub(crate) fn cannot_make(path: &Path, why: io::Error) -> anyhow::Error {
    let advice = match why.kind() {
        ErrorKind::PermissionDenied => ": run as root",
        ErrorKind::ReadOnlyFilesystem => ": /run has to be writable",
        _ => "",
    };
    anyhow::Error::new(why).context(format!("cannot make {}{advice}", path.display()))
}

#[cfg(test)]
mod tests {
    use nix::sched::{unshare, CloneFlags};
    use nix::sys::stat::{umask, Mode};

    use super::*;

    #[test]
    fn nobody_else_may_write_whatever_the_umask_is() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("base");
        let private = base.join("private");
        let wanted = private.clone();
        let making = std::thread::spawn(move || {
            // From here on the umask is this thread's own.
            unshare(CloneFlags::CLONE_FS).unwrap();
            umask(Mode::empty());
            make_private(&wanted)?;
            make_private(&wanted)
        });
        making.join().unwrap().unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&base), mode(&private)), (0o755, 0o700));
    }

    #[test]
    fn who_is_root_is_not_told_to_run_as_root() {
        let said = |error| {
            let path = Path::new("/run/mountain");
            format!(
                "{:#}",
                cannot_make(path, io::Error::from_raw_os_error(error))
            )
        };
        let denied = said(libc::EACCES);
        assert!(
            denied.starts_with("cannot make /run/mountain: run as root: "),
            "{denied}"
        );
        let read_only = said(libc::EROFS);
        let start = "cannot make /run/mountain: /run has to be writable: ";
        assert!(read_only.starts_with(start), "{read_only}");
        let full = said(libc::ENOSPC);
        assert!(
            full.starts_with("cannot make /run/mountain: No space"),
            "{full}"
        );
    }
}
