// SPDX-License-Identifier: GPL-2.0-or-later
//! The network namespaces of this host: finding them, and doing something in each.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;

use anyhow::{bail, Context, Result};
use nix::sched::{setns, CloneFlags};
use nix::sys::statfs::{fstatfs, NSFS_MAGIC};

/// A network namespace, which stays as long as the value does.
#[derive(Debug)]
pub struct Namespace {
    /// Keeps it; for setns(2).
    pub file: File,
    /// Its inode, which tells it from all others that exist.
    pub inode: u64,
    /// Where it was found: a bind mount such as `/run/netns/NAME`, or a process's.
    pub path: PathBuf,
}

impl Namespace {
    pub(crate) fn open(path: PathBuf) -> Option<Self> {
        // One whose process or mount has just gone is none.
        let file = File::open(&path).ok()?;
        // `ip netns add` makes an ordinary file before it mounts the namespace there.
        if fstatfs(&file).ok()?.filesystem_type() != NSFS_MAGIC {
            return None;
        }
        let inode = file.metadata().ok()?.ino();
        Some(Self { file, inode, path })
    }

    /// Does something on a thread inside. What it starts stays inside as well.
    ///
    /// # Errors
    /// Without CAP_SYS_ADMIN, and those of `work`.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        within(&self.file, || Ok(work()))
            .with_context(|| format!("cannot enter {}", self.path.display()))?
    }
}

/// Runs `work` on a thread inside a network namespace.
///
/// # Errors
/// Without CAP_SYS_ADMIN, and those of `work`.
pub fn within<T: Send>(namespace: &File, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    thread::scope(|scope| {
        let inside = thread::Builder::new().spawn_scoped(scope, || {
            setns(namespace, CloneFlags::CLONE_NEWNET)?;
            work()
        });
        let inside =
            inside.context("cannot start a thread: is the number of processes limited?")?;
        inside
            .join()
            .unwrap_or_else(|_| bail!("a thread in the namespace panicked"))
    })
}

/// The calling thread's network namespace, by its inode.
///
/// # Errors
/// Without /proc.
pub fn this_namespace() -> Result<u64> {
    let meta = fs::metadata(OWN);
    let meta = meta.context("cannot tell which network namespace this is: is /proc mounted?")?;
    Ok(meta.ino())
}

const OWN: &str = "/proc/thread-self/ns/net";

/// All network namespaces that a process lives in or that are mounted somewhere, each once, the calling
/// thread's own first.
///
/// # Errors
/// When `/proc` cannot be read.
pub fn all() -> Result<Vec<Namespace>> {
    let others = paths().context("cannot list the network namespaces: is /proc mounted?")?;
    let own = [PathBuf::from(OWN)].into_iter();
    Ok(each(own.chain(others)).collect())
}

/// The same in no order. They are opened one after the other, as they are asked for: a host may have more than a process
/// may open files. Without `/proc` there are none.
pub fn named() -> impl Iterator<Item = Namespace> {
    each(paths().into_iter().flatten())
}

/// Where namespaces are. Mounts (those of `ip netns` are in /run/netns, Docker's elsewhere) come before processes: their
/// paths say more.
fn paths() -> io::Result<impl Iterator<Item = PathBuf>> {
    let mounts = fs::read("/proc/thread-self/mountinfo")?;
    let mounts = mounted_in(&String::from_utf8_lossy(&mounts));
    Ok(mounts.into_iter().chain(processes()?))
}

/// The namespaces of these files, each once.
fn each(paths: impl Iterator<Item = PathBuf>) -> impl Iterator<Item = Namespace> {
    let mut known = HashSet::new();
    paths.filter_map(move |path| {
        if told(&path).is_some_and(|inode| known.contains(&inode)) {
            return None;
        }
        Namespace::open(path).filter(|namespace| known.insert(namespace.inode))
    })
}

/// The inode of a process's namespace, which is said without opening it: `net:[4026531840]`.
fn told(path: &Path) -> Option<u64> {
    let link = fs::read_link(path).ok()?;
    let inode = link.to_str()?.strip_prefix("net:[")?.strip_suffix(']')?;
    inode.parse().ok()
}

/// Where each process's namespace is.
fn processes() -> io::Result<impl Iterator<Item = PathBuf>> {
    let entries = fs::read_dir("/proc")?.flatten();
    let processes = entries.filter(|entry| is_number(&entry.file_name()));
    Ok(processes.map(|entry| entry.path().join("ns/net")))
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
        let own = this_namespace().unwrap();
        assert_eq!(found[0].inode, own);
        assert_eq!(found.iter().filter(|n| n.inode == own).count(), 1);
        let named: Vec<Namespace> = named().collect();
        let own: Vec<&Namespace> = named.iter().filter(|n| n.inode == own).collect();
        assert_eq!(own.len(), 1);
        assert_eq!(fs::metadata(&own[0].path).unwrap().ino(), own[0].inode);
    }
}
