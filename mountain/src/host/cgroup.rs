// SPDX-License-Identifier: GPL-2.0-or-later
//! Control groups of version 2: where they are mounted, and the numbers that BPF programs know them by.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The root of the cgroups of version 2, as it is mounted here.
///
/// # Errors
/// When it is not.
pub fn root() -> Result<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").context("/proc/self/mounts")?;
    mounted_in(&mounts).context(
        "no cgroup file system of version 2 is mounted: mount -t cgroup2 none /sys/fs/cgroup",
    )
}

fn mounted_in(mounts: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let at = fields.next()?;
        (fields.next()? == "cgroup2").then(|| at.into())
    })
}

/// Id of a cgroup below `root`, and how deep it is.
///
/// # Errors
/// When there is no such cgroup.
pub fn id(root: &Path, cgroup: &Path) -> Result<(u64, u32)> {
    let below = cgroup.strip_prefix(root).unwrap_or(cgroup);
    let below = below.strip_prefix("/").unwrap_or(below);
    let folder = root.join(below);
    // A cgroup's id is the number of its folder.
    let id = fs::metadata(&folder)
        .with_context(|| format!("there is no cgroup {}", folder.display()))?
        .ino();
    Ok((id, below.components().count() as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cgroups_of_version_2_are_found() {
        let hybrid = "sysfs /sys sysfs rw 0 0\ncgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n\
                      cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        assert_eq!(
            mounted_in(hybrid).as_deref(),
            Some(Path::new("/sys/fs/cgroup/unified"))
        );
        assert_eq!(
            mounted_in("cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n"),
            None
        );
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
