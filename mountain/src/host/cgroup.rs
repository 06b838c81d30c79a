// SPDX-License-Identifier: GPL-2.0-or-later
//! Control groups of version 2: where they are mounted, the numbers that BPF programs know them by, and looking through
//! all of them.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::iter;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::sys::statfs::{statfs, CGROUP2_SUPER_MAGIC};

use super::stdout::plain;

/// The root of the cgroups of version 2. Where it is not mounted here, as under `ip netns exec` and in a chroot, it is
/// that of process 1, or of the nearest process that has started this one: root in a sandbox may not look at process 1.
/// Mounting it once more would set its options, such as `nsdelegate`, anew for the whole machine.
///
/// # Errors
/// When none of them has it mounted.
pub fn root() -> Result<PathBuf> {
    let parents = iter::successors(parent("self"), |process| parent(process));
    let processes = ["thread-self", "1"].map(str::to_owned).into_iter();
    let mut mounts = processes.chain(parents).flat_map(|process| {
        let mounts = fs::read_to_string(format!("/proc/{process}/mounts"));
        let root = match process.as_str() {
            "thread-self" => "/".into(),
            _ => format!("/proc/{process}/root"),
        };
        mounted_in(&mounts.unwrap_or_default(), Path::new(&root))
    });
    mounts.find(|at| is_one(at)).context(
        "no cgroup file system of version 2 is mounted: mount -t cgroup2 none /sys/fs/cgroup",
    )
}

/// The process that has started another one, by number; `None` where it is of another namespace.
fn parent(process: &str) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
    Some(parent.trim().to_owned()).filter(|parent| parent != "0")
}

/// Where `mounts`, seen from `root`, says that it is mounted.
fn mounted_in(mounts: &str, root: &Path) -> Vec<PathBuf> {
    let mounted = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let at = fields.next()?.trim_start_matches('/');
        (fields.next()? == "cgroup2").then(|| root.join(at))
    });
    mounted.collect()
}

/// The folder of a cgroup: an absolute path, or a name below `root`. `/a/b` may be such a name, too.
pub fn folder(root: &Path, cgroup: &Path) -> PathBuf {
    let below = root.join(below(root, cgroup));
    match cgroup.is_absolute() && (cgroup.exists() || !below.exists()) {
        true => cgroup.to_owned(),
        false => below,
    }
}

/// Whether a folder is a cgroup of version 2.
pub(crate) fn is_one(folder: &Path) -> bool {
    statfs(folder).is_ok_and(|fs| fs.filesystem_type() == CGROUP2_SUPER_MAGIC)
}

/// A cgroup's name below `root`.
fn below<'a>(root: &Path, cgroup: &'a Path) -> &'a Path {
    let below = cgroup.strip_prefix(root).unwrap_or(cgroup);
    below.strip_prefix("/").unwrap_or(below)
}

/// Id of a cgroup below `root`, and how deep it is.
///
/// # Errors
/// When there is no such cgroup.
pub fn id(root: &Path, cgroup: &Path) -> Result<(u64, u32)> {
    let below = below(root, cgroup);
    let folder = root.join(below);
    // A cgroup's id is the number of its folder.
    let id = fs::metadata(&folder)
        .with_context(|| format!("there is no cgroup {}", folder.display()))?
        .ino();
    Ok((id, below.components().count() as u32))
}

/// Has `visit` told of a cgroup and of all below it, each with its path below `root`.
///
/// Where systemd has handed a part of the tree to a user, that user makes cgroups with paths that are too long to open:
/// paths do not matter here. Those that root without CAP_DAC_READ_SEARCH may not read are left out.
///
/// # Errors
/// The first of `visit`, or what cannot be read.
pub(crate) fn look_through(
    root: &Path,
    mut visit: impl FnMut(&File, &Path) -> io::Result<()>,
) -> Result<()> {
    let mut below = PathBuf::from("/");
    let first = File::open(root).with_context(|| about(root))?;
    unless_gone(visit(&first, &below), &below)?;
    let mut open = vec![Folder::read(first).with_context(|| about(root))?];
    while let Some(folder) = open.last_mut() {
        let Some(name) = folder.left.next() else {
            open.pop();
            below.pop();
            continue;
        };
        let path = by_number(&folder.file).join(&name);
        below.push(name);
        let next = match File::open(&path) {
            Ok(file) => {
                unless_gone(visit(&file, &below), &below)?;
                Folder::read(file)
            }
            Err(e) => Err(e),
        };
        match next {
            Ok(next) => open.push(next),
            Err(e) if is_gone(&e) || e.kind() == io::ErrorKind::PermissionDenied => {
                below.pop();
            }
            Err(e) => return Err(e).with_context(|| about(&below)),
        }
    }
    Ok(())
}

/// A cgroup whose children are being looked at.
struct Folder {
    file: File,
    /// Names of those that are still to come.
    left: std::vec::IntoIter<OsString>,
}

impl Folder {
    fn read(file: File) -> io::Result<Self> {
        let mut names = Vec::new();
        // A cgroup has many files, and mostly no others below it: then it has two links (kernfs_refresh_inode).
        if file.metadata()?.nlink() != 2 {
            for entry in fs::read_dir(by_number(&file))? {
                let entry = entry?;
                if entry.file_type()?.is_dir() {
                    names.push(entry.file_name());
                }
            }
        }
        let left = names.into_iter();
        Ok(Self { file, left })
    }
}

/// A path that leads to an open folder, and is short however deep that is.
fn by_number(folder: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd()))
}

/// What was done with a cgroup, which may have been removed meanwhile.
fn unless_gone(done: io::Result<()>, cgroup: &Path) -> Result<()> {
    match done {
        Err(e) if is_gone(&e) => Ok(()),
        done => done.with_context(|| about(cgroup)),
    }
}

/// Whether a cgroup was removed meanwhile.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
}

/// Users give cgroups names of any characters.
fn about(cgroup: &Path) -> String {
    format!("cgroup {}", plain(&cgroup.display().to_string()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{chown, PermissionsExt};

    use nix::unistd::{geteuid, setfsuid, Uid};

    use super::*;

    #[test]
    fn cgroups_deeper_than_a_path_is_long_are_looked_at() {
        let root = tempfile::tempdir().unwrap();
        let name = "n".repeat(250);
        let mut deepest = File::open(root.path()).unwrap();
        for _ in 0..20 {
            let next = by_number(&deepest).join(&name);
            fs::create_dir(&next).unwrap();
            deepest = File::open(&next).unwrap();
        }
        let mut seen = Vec::new();
        let looked = look_through(root.path(), |cgroup, below| {
            seen.push((below.components().count() - 1, cgroup.metadata()?.ino()));
            Ok(())
        });
        looked.unwrap();
        assert_eq!(seen.len(), 21);
        let last = (20, deepest.metadata().unwrap().ino());
        assert_eq!(seen.last(), Some(&last));
    }

    #[test]
    fn cgroups_that_are_closed_hide_no_others() {
        // Nobody else can make what belongs to others.
        if !geteuid().is_root() {
            return;
        }
        const USER: u32 = 65_533;
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        let set_mode = |path: &str, mode| {
            fs::set_permissions(at(path), fs::Permissions::from_mode(mode)).unwrap();
        };
        for path in ["ours/open", "ours/closed", "theirs/a", "theirs/b/c"] {
            fs::create_dir_all(at(path)).unwrap();
        }
        for path in ["theirs", "theirs/a", "theirs/b", "theirs/b/c"] {
            chown(at(path), Some(USER), Some(USER)).unwrap();
        }
        // Whatever the umask is.
        for path in ["", "ours", "ours/open", "theirs", "theirs/b"] {
            set_mode(path, 0o755);
        }
        for path in ["ours/closed", "theirs/a", "theirs/b/c"] {
            set_mode(path, 0);
        }
        let folder = File::open(root.path()).unwrap();
        let looking = std::thread::spawn(move || {
            // For files this thread alone is somebody else now, without root's capabilities.
            setfsuid(Uid::from_raw(USER - 1));
            let mut opened = Vec::new();
            let looked = look_through(&by_number(&folder), |_, below| {
                opened.push(below.to_str().unwrap().to_owned());
                Ok(())
            });
            looked.map(|()| opened)
        });
        let mut opened = looking.join().unwrap().unwrap();
        opened.sort();
        let open = ["/", "/ours", "/ours/open", "/theirs", "/theirs/b"];
        assert_eq!(opened, open);
    }

    #[test]
    fn what_goes_meanwhile_is_left_out_and_other_failures_are_told() {
        let root = tempfile::tempdir().unwrap();
        for name in ["gone\n", "here"] {
            fs::create_dir(root.path().join(name)).unwrap();
        }
        let mut seen = Vec::new();
        let gone = look_through(root.path(), |_, below| {
            seen.push(below.to_owned());
            match below.ends_with("gone\n") {
                true => Err(io::ErrorKind::NotFound.into()),
                false => Ok(()),
            }
        });
        gone.unwrap();
        assert_eq!(seen.len(), 3);
        let failed = look_through(root.path(), |_, below| match below.ends_with("gone\n") {
            true => Err(io::Error::from_raw_os_error(libc::EPERM)),
            false => Ok(()),
        });
        let said = format!("{:#}", failed.unwrap_err());
        assert!(said.starts_with("cgroup /gone\\u000a: "), "{said}");
    }

    #[test]
    fn the_cgroups_of_version_2_are_found() {
        let hybrid = "sysfs /sys sysfs rw 0 0\ncgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n\
                      cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        let mounted = |mounts, root| mounted_in(mounts, Path::new(root));
        let unified = ["/sys/fs/cgroup/unified"].map(PathBuf::from);
        assert_eq!(mounted(hybrid, "/"), unified);
        let of_init = ["/proc/1/root/sys/fs/cgroup/unified"].map(PathBuf::from);
        assert_eq!(mounted(hybrid, "/proc/1/root"), of_init);
        let v1 = "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n";
        assert!(mounted(v1, "/").is_empty());
    }

    #[test]
    fn a_cgroup_is_named_by_its_folder_or_below_the_root() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("a/b")).unwrap();
        let expected = root.path().join("a/b");
        for name in [Path::new("a/b"), Path::new("/a/b"), expected.as_path()] {
            assert_eq!(folder(root.path(), name), expected);
        }
        let elsewhere = tempfile::tempdir().unwrap();
        assert_eq!(folder(root.path(), elsewhere.path()), elsewhere.path());
        assert_eq!(folder(root.path(), Path::new("c")), root.path().join("c"));
    }

    #[test]
    fn cgroups_have_a_number_and_a_depth() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("a/b")).unwrap();
        let ino = |path: &str| fs::metadata(root.path().join(path)).unwrap().ino();
        let id = |path: &Path| super::id(root.path(), path).unwrap();
        assert_eq!(id(Path::new("a/b")), (ino("a/b"), 2));
        assert_eq!(id(Path::new("/a")), (ino("a"), 1));
        assert_eq!(id(&root.path().join("a/b")), (ino("a/b"), 2));
        let error = super::id(root.path(), Path::new("c"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("there is no cgroup"), "{error}");
    }
}
