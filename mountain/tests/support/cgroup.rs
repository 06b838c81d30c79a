// SPDX-License-Identifier: GPL-2.0-or-later
//! Cgroups of version 2 for tests.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use testkit::TestNamespace;

/// A cgroup of this test's own; removed when dropped.
pub struct Cgroup(PathBuf);

impl Cgroup {
    pub fn new(name: &str) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let root = mountain::host::cgroup::root().expect("these tests need cgroups of version 2");
        let path = root.join(format!("mtt-{}-{n}-{name}", std::process::id()));
        fs::create_dir(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        Self(path)
    }

    /// One inside of it.
    pub fn inner(&self) -> Self {
        let path = self.0.join("inner");
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// A program of a namespace that runs in here.
    pub fn command(&self, ns: &TestNamespace, program: &str) -> Command {
        let script = format!(
            "echo $$ > {}/cgroup.procs && exec \"$0\" \"$@\"",
            self.0.display()
        );
        let mut command = ns.command("sh");
        command.args(["-c", &script, program]);
        command
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}
