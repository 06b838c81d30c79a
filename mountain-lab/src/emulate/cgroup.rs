// SPDX-License-Identifier: GPL-2.0-or-later
//! A cgroup of its own for a run: the product's programs that place new flows are attached there, and
//! nobody else's sockets meet them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use mountain::host::cgroup;

use super::netns::{orphans, PREFIX};

/// This process is in it until it is dropped, which removes it.
pub struct Cgroup {
    path: PathBuf,
    before: PathBuf,
}

impl Cgroup {
    /// Makes the cgroup `mtl-<pid>` and moves this process there.
    ///
    /// # Errors
    /// Where no cgroups of version 2 are mounted, or without root.
    pub fn join() -> Result<Self> {
        let root = cgroup::root()?;
        let own = fs::read_to_string("/proc/self/cgroup").context("/proc/self/cgroup")?;
        let before = root.join(own_cgroup(&own).trim_start_matches('/'));
        let path = root.join(format!("{PREFIX}{}", std::process::id()));
        fs::create_dir(&path).with_context(|| path.display().to_string())?;
        let cgroup = Self { path, before };
        enter(&cgroup.path)?;
        Ok(cgroup)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A cgroup with processes cannot be removed; there is nobody to tell.
        let _ = enter(&self.before);
        let _ = fs::remove_dir(&self.path);
    }
}

/// Removes the cgroups that lab processes left behind that were killed. Returns their folders.
pub fn clean() -> Result<Vec<String>> {
    // Where none are mounted there is nothing to remove.
    cgroup::root().map_or(Ok(vec![]), |root| clean_below(&root))
}

fn clean_below(root: &Path) -> Result<Vec<String>> {
    let folders = orphans(root)?.into_iter().map(|name| root.join(name));
    let removed = folders.map(|folder| {
        let shown = folder.display().to_string();
        fs::remove_dir(&folder).with_context(|| shown.clone())?;
        Ok(shown)
    });
    removed.collect()
}

fn enter(cgroup: &Path) -> Result<()> {
    let file = cgroup.join("cgroup.procs");
    fs::write(&file, std::process::id().to_string()).with_context(|| file.display().to_string())
}

/// The line of version 2 in /proc/self/cgroup: `0::/path`.
fn own_cgroup(text: &str) -> &str {
    let mut lines = text.lines();
    lines
        .find_map(|line| line.strip_prefix("0::"))
        .unwrap_or("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_killed_processes_left_is_removed_and_nothing_else() {
        let root = tempfile::tempdir().unwrap();
        let mut gone = std::process::Command::new("true").spawn().unwrap();
        gone.wait().unwrap();
        let [left, own, other] = [
            format!("mtl-{}", gone.id()),
            format!("mtl-{}", std::process::id()),
            "user.slice".to_owned(),
        ]
        .map(|name| root.path().join(name));
        for folder in [&left, &own, &other] {
            fs::create_dir(folder).unwrap();
        }
        let removed = clean_below(root.path()).unwrap();
        assert_eq!(removed, [left.display().to_string()]);
        assert!(!left.exists() && own.exists() && other.exists());
    }

    #[test]
    fn the_line_of_version_2_counts() {
        assert_eq!(own_cgroup("4:cpu:/a\n0::/user.slice/b\n"), "/user.slice/b");
        assert_eq!(own_cgroup("4:cpu:/a\n"), "/");
    }
}
