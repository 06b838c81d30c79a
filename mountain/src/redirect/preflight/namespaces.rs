// SPDX-License-Identifier: GPL-2.0-or-later
//! Finding a network namespace that a veth leads to, or that a fix is recorded for.

use std::collections::HashSet;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use nix::sys::statfs::{fstatfs, NSFS_MAGIC};

/// A network namespace, open.
#[derive(Debug)]
pub struct OpenNamespace {
    /// Inode of its file in nsfs, which identifies it until it ends.
    pub inode: u64,
    /// What nsenter(1) takes: a name below /run/netns if there is one, else a process's.
    pub path: PathBuf,
    /// Keeps it alive; for setns(2).
    pub file: File,
}

/// The first namespace that is wanted, of all that a name or a process leads to. Each is opened
/// once, and only one at a time is: a host may have more processes than a process may open files.
pub fn find(mut wanted: impl FnMut(&OpenNamespace) -> bool) -> Option<OpenNamespace> {
    let mut seen = HashSet::new();
    let entries = |folder| fs::read_dir(folder).into_iter().flatten().flatten();
    let named = entries("/run/netns").map(|e| e.path());
    let processes = entries("/proc")
        .filter(|e| e.file_name().to_string_lossy().parse::<u32>().is_ok())
        .map(|e| e.path().join("ns/net"));
    for path in named.chain(processes) {
        // Of a process it is said without opening: `net:[4026531840]`.
        let told = fs::read_link(&path).ok().and_then(|link| {
            let text = link.to_string_lossy().into_owned();
            text.strip_prefix("net:[")?.strip_suffix(']')?.parse().ok()
        });
        if told.is_some_and(|inode: u64| seen.contains(&inode)) {
            continue;
        }
        let Some(found) = open(path) else { continue };
        if seen.insert(found.inode) && wanted(&found) {
            return Some(found);
        }
    }
    None
}

fn open(path: PathBuf) -> Option<OpenNamespace> {
    let file = File::open(&path).ok()?;
    // `ip netns add` makes an ordinary file before it mounts the namespace there.
    if fstatfs(&file).ok()?.filesystem_type() != NSFS_MAGIC {
        return None;
    }
    Some(OpenNamespace {
        inode: file.metadata().ok()?.ino(),
        path,
        file,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cc::scope::this_namespace;

    #[test]
    fn each_is_looked_at_once() {
        let mut inodes = Vec::new();
        assert!(find(|found| {
            inodes.push(found.inode);
            false
        })
        .is_none());
        let here = this_namespace().unwrap();
        assert_eq!(inodes.iter().filter(|i| **i == here).count(), 1);
        let found = find(|found| found.inode == here).unwrap();
        assert_eq!(fs::metadata(&found.path).unwrap().ino(), here);
    }
}
