// SPDX-License-Identifier: GPL-2.0-or-later
//! Locks of files (flock(2)), which end with the process that holds them.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::Result;
use nix::fcntl::{Flock, FlockArg};

use super::delay;

/// Locks the file at `path`, in the order in which processes ask for it.
///
/// # Errors
/// When the kernel refuses.
pub(crate) fn wait_for(file: File, path: &Path) -> Result<Flock<File>> {
    let told = path.to_owned();
    let waiting =
        delay::say(move || format!("{}, which has locked {}", holder(&told), told.display()));
    let locked = Flock::lock(file, FlockArg::LockExclusive);
    drop(waiting);
    locked.map_err(|(_, e)| anyhow::anyhow!("cannot lock {}: {e}", path.display()))
}

/// Names the process that has locked a file, by /proc/locks.
pub(crate) fn holder(path: &Path) -> String {
    let Ok(meta) = path.metadata() else {
        return "another process".to_owned();
    };
    let (major, minor) = (
        nix::sys::stat::major(meta.dev()),
        nix::sys::stat::minor(meta.dev()),
    );
    let at = format!("{major:02x}:{minor:02x}:{}", meta.ino());
    let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
    let pid = locks.lines().find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let is_it = words.get(1) == Some(&"FLOCK") && words.get(5) == Some(&at.as_str());
        is_it.then(|| words[4].to_owned())
    });
    match pid {
        Some(pid) => {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            format!("process {pid} ({})", name.trim().escape_default())
        }
        None => "another process".to_owned(),
    }
}
