// SPDX-License-Identifier: GPL-2.0-or-later
//! Folders in which nobody but their owner may make, change or remove anything, whatever the umask is.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

/// Makes a folder that all may read, and those above it. One that is there stays as it is.
pub(crate) fn make_public(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o755).create(path)
}

/// Makes a folder for its owner alone, in one that all may read. One that is there stays as it is.
pub(crate) fn make_private(path: &Path) -> io::Result<()> {
    if let Some(above) = path.parent() {
        make_public(above)?;
    }
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

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
}
