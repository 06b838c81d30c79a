// SPDX-License-Identifier: GPL-2.0-or-later
//! Network namespaces of the lab: made with `ip netns`, named after the process that made them,
//! removed when their value is dropped and by [`clean`] when that process is gone.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{ensure, Context, Result};
use mountain::host::program;
use mountain_lab::workload::sys::{device_index, run_in};

/// All namespaces of the lab start with this: `mtl-<pid>-<n>-<role>`.
pub const PREFIX: &str = "mtl-";
const RUN_DIR: &str = "/run/netns";

/// A namespace that this process made.
#[derive(Debug)]
pub struct Netns {
    name: String,
}

impl Netns {
    /// Makes the namespace `mtl-<pid>-<n>-<role>` and brings its `lo` up. Needs root.
    pub fn create(role: &str) -> Result<Self> {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        ensure!(
            nix::unistd::Uid::effective().is_root(),
            "network namespaces need root: use sudo"
        );
        let n = COUNTER.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}{}-{n}-{role}", std::process::id());
        ip(&format!("netns add {name}"))?;
        let ns = Netns { name };
        ns.ip("link set lo up")?;
        // Packets may come in where no route back leads.
        ns.sysctl(&[
            ("net/ipv4/conf/all/rp_filter", "0"),
            ("net/ipv4/conf/default/rp_filter", "0"),
        ])?;
        Ok(ns)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The file that setns(2) takes.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(RUN_DIR).join(&self.name)
    }

    /// `ip -n THIS ARGS`, the arguments split at blanks; fails with what `ip` said.
    pub fn ip(&self, args: &str) -> Result<()> {
        ip(&format!("-n {} {args}", self.name))
    }

    /// A command that will run inside. Not `ip netns exec`, which also gives it a private mount
    /// namespace, in which the BPF file system and cgroups are others. It dies with this process.
    pub fn command<S: AsRef<OsStr>>(&self, program: S) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--net={}", self.path().display()))
            .arg("--")
            .arg(program);
        die_with_parent(&mut command);
        command
    }

    /// Runs a program inside to its end; fails with what it said.
    pub fn run<I, S>(&self, program: &str, args: I) -> Result<()>
    where
        I: IntoIterator<Item = S>,
        S: AsRef<OsStr>,
    {
        // nsenter would only say that there is no such file.
        program::find(program)?;
        finished(self.command(program).args(args))
    }

    /// Loads rules of nft.
    pub fn nft(&self, rules: &str) -> Result<()> {
        let file = tempfile::NamedTempFile::new()?;
        fs::write(file.path(), rules)?;
        self.run("nft", [OsStr::new("-f"), file.path().as_os_str()])
    }

    /// Runs `f` inside, on a thread of its own (setns changes the calling thread).
    pub fn enter<T: Send>(&self, f: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        run_in(&self.path(), f)
    }

    /// Index of one of its devices.
    pub fn index(&self, device: &str) -> Result<u32> {
        let index = self.enter(|| Ok(device_index(device)))?;
        ensure!(index > 0, "no device {device} in {}", self.name);
        Ok(index)
    }

    /// Packets that one of its devices has received.
    pub fn received(&self, device: &str) -> Result<u64> {
        self.enter(|| {
            let table = fs::read_to_string("/proc/thread-self/net/dev")?;
            let mut lines = table.lines();
            let line = lines.find_map(|l| l.trim().strip_prefix(device)?.strip_prefix(':'));
            let line = line.with_context(|| format!("no device {device}"))?;
            let packets = line.split_whitespace().nth(1);
            Ok(packets.context("no packet counter")?.parse()?)
        })
    }

    /// Writes sysctls of the namespace: (path below /proc/sys, value).
    pub fn sysctl(&self, settings: &[(&str, &str)]) -> Result<()> {
        self.enter(|| {
            for (key, value) in settings {
                let path = format!("/proc/sys/{key}");
                fs::write(&path, value).with_context(|| format!("{path} = {value}"))?;
            }
            Ok(())
        })
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        // Its devices go with it. Nothing useful can be done when this fails; `clean` will retry.
        let _ = ip(&format!("netns del {}", self.name));
    }
}

/// Makes the kernel kill the child when the thread that spawned it ends, and keeps the terminal's
/// Ctrl-C from it: the lab stops its children itself, in order.
pub fn die_with_parent(command: &mut Command) {
    command.process_group(0);
    // SAFETY: prctl is async-signal-safe and touches only the new process.
    unsafe {
        command.pre_exec(|| {
            nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)?;
            Ok(())
        });
    }
}

/// `ip ARGS`, the arguments split at blanks; fails with what `ip` said.
pub fn ip(args: &str) -> Result<()> {
    run("ip", args.split_whitespace())
}

/// A program under way. Dropping it kills it.
pub struct Running(pub Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a program to its end; fails with its arguments and what it said.
pub fn run(program: &str, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Result<()> {
    finished(Command::new(program).args(args))
}

fn finished(command: &mut Command) -> Result<()> {
    let shown = format!("{command:?}").replace('"', "");
    program::find(command.get_program())?;
    output(command, &shown).map(drop)
}

/// The same of a program that is there, with its output; `shown`: what it is called in errors.
pub fn output(command: &mut Command, shown: &str) -> Result<Output> {
    let out = command.stdin(Stdio::null()).output();
    let out = out.with_context(|| format!("cannot start {shown}"))?;
    let (status, said) = (out.status, String::from_utf8_lossy(&out.stderr));
    ensure!(status.success(), "{shown}: {status}: {}", said.trim());
    Ok(out)
}

/// Names in a folder that are of lab processes which are gone.
pub(super) fn orphans(folder: &Path) -> Result<Vec<String>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(vec![]),
        Err(e) => return Err(e).with_context(|| folder.display().to_string()),
    };
    let mut names: Vec<String> = entries
        .filter_map(|e| e.ok()?.file_name().into_string().ok())
        .filter(|name| owner(name).is_some_and(|pid| !is_alive(pid)))
        .collect();
    names.sort();
    Ok(names)
}

/// Removes the namespaces that lab processes left behind that were killed. Returns the names.
pub fn clean() -> Result<Vec<String>> {
    let names = orphans(Path::new(RUN_DIR))?;
    for name in &names {
        ip(&format!("netns del {name}"))?;
    }
    Ok(names)
}

fn owner(name: &str) -> Option<u32> {
    name.strip_prefix(PREFIX)?.split('-').next()?.parse().ok()
}

/// Whether the process still runs and is one of ours: a pid may since belong to another program.
fn is_alive(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| {
        // The binary, and the test binaries that use this module.
        ["mountain", "lab-"].iter().any(|p| comm.starts_with(p))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owner_is_read_from_the_name() {
        assert_eq!(owner("mtl-123-0-client"), Some(123));
        assert_eq!(owner("mtl-x-0-client"), None);
        assert_eq!(owner("other-123-0"), None);
        assert_eq!(owner("mtl-123"), Some(123), "a cgroup");
    }

    #[test]
    fn a_namespace_disappears_with_its_value() {
        let ns = Netns::create("drop").unwrap();
        let path = ns.path();
        assert!(path.exists());
        ns.sysctl(&[("net/ipv4/ip_forward", "1")]).unwrap();
        let forwards = "test $(cat /proc/sys/net/ipv4/ip_forward) = 1";
        ns.run("sh", ["-c", forwards]).unwrap();
        let error = ns.ip("link set nonesuch up").unwrap_err().to_string();
        assert!(error.contains("nonesuch"), "{error}");
        assert!(
            !orphans(Path::new(RUN_DIR))
                .unwrap()
                .contains(&ns.name().to_string()),
            "its process is alive"
        );
        drop(ns);
        assert!(!path.exists());
    }
}
