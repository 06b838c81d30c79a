// SPDX-License-Identifier: GPL-2.0-or-later
//! The network namespaces of this host: finding them, and doing something in each.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::thread;

use anyhow::{Context, Result};
use nix::sched::{setns, CloneFlags};

/// A network namespace, which stays as long as the value does.
pub struct Namespace {
    file: File,
    /// Its inode, which tells it from all others that exist.
    pub inode: u64,
    /// Where it was found: a bind mount such as `/run/netns/NAME`, or a process's.
    pub path: PathBuf,
}

impl Namespace {
    fn open(path: PathBuf) -> Option<Self> {
        // One whose process or mount has just gone is none.
        let file = File::open(&path).ok()?;
        let inode = file.metadata().ok()?.ino();
        Some(Self { file, inode, path })
    }

    /// Does something on a thread inside. What it starts stays inside as well.
    ///
    /// # Errors
    /// Without CAP_SYS_ADMIN, and those of `work`.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        thread::scope(|scope| {
            let inside = scope.spawn(|| {
                setns(&self.file, CloneFlags::CLONE_NEWNET)
                    .with_context(|| format!("cannot enter {}", self.path.display()))?;
                work()
            });
            inside
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

/// All network namespaces that a process lives in or that are mounted somewhere, each once, the calling
/// thread's own first.
///
/// # Errors
/// When `/proc` cannot be read.
pub fn all() -> Result<Vec<Namespace>> {
    let mounts = fs::read_to_string("/proc/thread-self/mountinfo").context("is /proc mounted?")?;
    let processes = fs::read_dir("/proc").context("cannot list the processes")?;
    let processes = processes
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.file_name().is_some_and(is_number))
        .map(|path| path.join("ns/net"));
    // Mounts before processes: their paths say more.
    let paths = [PathBuf::from("/proc/thread-self/ns/net")]
        .into_iter()
        .chain(mounted_in(&mounts))
        .chain(processes);
    let mut known = BTreeSet::new();
    let found = paths
        .filter_map(Namespace::open)
        .filter(|namespace| known.insert(namespace.inode));
    Ok(found.collect())
}

fn is_number(name: &std::ffi::OsStr) -> bool {
    name.to_str()
        .is_some_and(|name| name.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Where network namespaces are mounted, by a `mountinfo` of proc(5).
fn mounted_in(mounts: &str) -> Vec<PathBuf> {
    let mounted = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(3);
        let (root, at) = (fields.next()?, fields.next()?);
        root.starts_with("net:[").then(|| unescape(at).into())
    });
    mounted.collect()
}

/// Blanks and the like stand as three octal digits behind a backslash.
fn unescape(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let digits = part.get(..3).unwrap_or_default();
        match u8::from_str_radix(digits, 8) {
            Ok(byte) if byte.is_ascii() => {
                out.push(byte.into());
                out += &part[3..];
            }
            _ => {
                out.push('\\');
                out += part;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounted_namespaces_are_found_whatever_their_names() {
        let mounts = "\
24 1 0:22 / /proc rw,relatime shared:5 - proc proc rw
90 25 0:4 net:[4026532290] /run/netns/blue rw shared:40 - nsfs nsfs rw
91 25 0:4 mnt:[4026532300] /run/snapd/ns/x.mnt rw - nsfs nsfs rw
92 25 0:4 net:[4026532291] /run/netns/a\\040b rw shared:41 - nsfs nsfs rw
";
        let expected = ["/run/netns/blue", "/run/netns/a b"].map(PathBuf::from);
        assert_eq!(mounted_in(mounts), expected);
        assert_eq!(unescape("a\\134b\\9"), "a\\b\\9");
    }

    #[test]
    fn the_own_namespace_comes_first_and_once() {
        let found = all().unwrap();
        let own = fs::metadata("/proc/thread-self/ns/net").unwrap().ino();
        assert_eq!(found[0].inode, own);
        assert_eq!(found.iter().filter(|n| n.inode == own).count(), 1);
    }
}
