// SPDX-License-Identifier: GPL-2.0-or-later
//! Files that are written as a whole or not at all: whoever reads one sees the old or the new.

use std::fs::{File, Metadata, Permissions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

/// Whether an open file is still the one at a path: nobody has removed it, or put another in its place.
pub(crate) fn is_at(file: &File, path: &Path) -> bool {
    let number = |metadata: Metadata| (metadata.dev(), metadata.ino());
    let (open, named) = (file.metadata().map(number), path.metadata().map(number));
    open.is_ok_and(|open| named.is_ok_and(|named| open == named))
}

/// Whether a file can be put at `path`. Devices and pipes stay. So do entries of /dev and /proc, which are the whole
/// machine's: /dev/stdout leads to a file where output is redirected.
///
/// # Errors
/// Why not.
pub fn check(path: &Path) -> io::Result<()> {
    let folder = folder(path).canonicalize()?;
    let is_machines = folder == Path::new("/dev") || folder.starts_with("/proc");
    match is_machines || path.metadata().is_ok_and(|m| !m.is_file()) {
        true => Err(io::Error::other("not a regular file")),
        false => Ok(()),
    }
}

/// The folder of the file at `path`.
pub(crate) fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Writes a file beside `path` under a name that nobody can foresee, and puts it in its place. A
/// link there is replaced, not followed; what is no file, as /dev/null, stays. `lasting`: it is on
/// disk when this returns. What `kill -9` interrupts leaves a file named `.NAME.` and six letters.
pub fn write(
    path: &Path,
    lasting: bool,
    content: impl FnOnce(&mut BufWriter<&File>) -> io::Result<()>,
) -> io::Result<()> {
    let no_name = || io::Error::new(io::ErrorKind::InvalidInput, "a file name is missing");
    check(path)?;
    let mut prefix = std::ffi::OsString::from(".");
    prefix.push(path.file_name().ok_or_else(no_name)?);
    prefix.push(".");
    // As any new file; the library's own default is that nobody else may read it.
    let file = tempfile::Builder::new()
        .prefix(&prefix)
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(folder(path))?;
    let mut out = BufWriter::new(file.as_file());
    content(&mut out)?;
    out.flush()?;
    drop(out);
    if lasting {
        file.as_file().sync_all()?;
    }
    file.persist(path)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::fd::AsRawFd;

    #[test]
    fn a_file_is_replaced_as_a_whole_and_no_link_is_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (path, far) = (dir.path().join("a.json"), dir.path().join("far"));
        fs::write(&far, "far").unwrap();
        std::os::unix::fs::symlink(&far, &path).unwrap();
        // The name that an earlier version would have written through.
        let old = dir.path().join(format!(".a.json.{}", std::process::id()));
        std::os::unix::fs::symlink(&far, &old).unwrap();
        write(&path, true, |out| out.write_all(b"new")).unwrap();
        assert!(fs::symlink_metadata(&path).unwrap().is_file());
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::read(&far).unwrap(), b"far");
        // Who may read any other new file may read this one.
        let plain = dir.path().join("plain");
        File::create(&plain).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(&path), mode(&plain));

        let failed = write(&path, false, |out| {
            out.write_all(b"half")?;
            Err(io::Error::other("no more"))
        });
        assert_eq!(failed.unwrap_err().to_string(), "no more");
        let device = dir.path().join("pipe");
        nix::unistd::mkfifo(&device, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let failed = write(&device, false, |_| Ok(())).unwrap_err();
        testkit::assert_has(&failed.to_string(), &["not a regular file"]);
        // Of output that goes to a file, /dev/stdout leads to a regular one.
        let of_machine = format!("/proc/self/fd/{}", File::open(&path).unwrap().as_raw_fd());
        for of_machine in [Path::new(&of_machine), Path::new("/dev/new")] {
            let failed = check(of_machine).unwrap_err();
            testkit::assert_has(&failed.to_string(), &["not a regular file"]);
        }
        fs::remove_file(&device).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        let files = fs::read_dir(dir.path()).unwrap().count();
        assert_eq!(files, 4, "nothing is left");
    }
}
