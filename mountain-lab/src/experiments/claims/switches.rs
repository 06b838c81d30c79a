// SPDX-License-Identifier: GPL-2.0-or-later
//! What the kernel patches are switched by: sysctls, as they were again when the measuring ends.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use mountain::measure::runfile::RunFile;
use mountain_lab::workload::sys::run_in;

use super::plan;
use crate::driver::Session;
use crate::emulate::netns::Netns;
use crate::experiments::probing::ab::{interleaved, Blocks};

/// Some sysctls, of one network namespace or of this process's. Dropping it puts them back.
pub struct Switches {
    /// File of the namespace.
    ns: Option<PathBuf>,
    /// Path and former value.
    were: Vec<(PathBuf, String)>,
}

/// `net.ipv4.path_metrics` as a file.
pub fn path(name: &str) -> PathBuf {
    PathBuf::from("/proc/sys").join(name.replace('.', "/"))
}

impl Switches {
    /// `ns`: where they are looked up; those that exist once for all take `None`.
    pub fn hold(ns: Option<&Netns>, names: &[&str]) -> Result<Self> {
        let files = names.iter().map(|name| path(name)).collect();
        Self::hold_files(ns.map(Netns::path), files)
    }

    fn hold_files(ns: Option<PathBuf>, files: Vec<PathBuf>) -> Result<Self> {
        let read = |file: PathBuf| {
            let was = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
            Ok((file, was))
        };
        let were = within(ns.as_deref(), || files.into_iter().map(read).collect())?;
        Ok(Switches { ns, were })
    }

    /// Writes their values, in the order of their names.
    pub fn set(&self, values: &[&str]) -> Result<()> {
        within(self.ns.as_deref(), || {
            for ((file, _), value) in self.were.iter().zip(values) {
                fs::write(file, value).with_context(|| format!("{} = {value}", file.display()))?;
            }
            Ok(())
        })
    }
}

impl Drop for Switches {
    fn drop(&mut self) {
        let were: Vec<&str> = self.were.iter().map(|(_, was)| was.trim_end()).collect();
        if let Err(error) = self.set(&were) {
            eprintln!("not as it was: {error:#}");
        }
    }
}

fn within<T: Send>(ns: Option<&Path>, f: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    match ns {
        Some(ns) => run_in(ns, f),
        None => f(),
    }
}

/// An A/B of pings: `off`, then `on`, and so forth. `name` is what sides are called in the result.
pub fn off_on(
    session: &mut Session,
    name: &str,
    switches: &Switches,
    values: [&[&str]; 2],
    mut measure: impl FnMut() -> Result<RunFile>,
) -> Result<Blocks> {
    let rounds = plan(session);
    let names = ["off", "on"].map(|side| format!("{name}, {side}"));
    let blocks = interleaved(session, "pings", names, rounds, |side, _| {
        switches.set(values[side])?;
        measure()
    })?;
    Ok(blocks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_files() {
        let file = path("net.ipv4.path_metrics");
        assert_eq!(file, PathBuf::from("/proc/sys/net/ipv4/path_metrics"));
    }

    #[test]
    fn they_are_as_they_were_on_every_way_out() {
        let dir = tempfile::tempdir().unwrap();
        let files = ["one", "two"].map(|name| dir.path().join(name));
        let values = || files.each_ref().map(|f| fs::read_to_string(f).unwrap());
        for file in &files {
            fs::write(file, "4\n").unwrap();
        }
        let failing = || -> Result<()> {
            let switches = Switches::hold_files(None, files.to_vec())?;
            switches.set(&["1", "2"])?;
            assert_eq!(values(), ["1", "2"]);
            anyhow::bail!("on the way")
        };
        failing().unwrap_err();
        assert_eq!(values(), ["4", "4"]);
        let panics = std::panic::catch_unwind(|| {
            let switches = Switches::hold_files(None, files.to_vec()).unwrap();
            switches.set(&["1", "2"]).unwrap();
            panic!("on the way");
        });
        assert!(panics.is_err());
        assert_eq!(values(), ["4", "4"]);
    }

    #[test]
    fn each_side_is_set_up_before_its_blocks() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("switch");
        fs::write(&file, "4").unwrap();
        let switches = Switches::hold_files(None, vec![file.clone()]).unwrap();
        let mut seen = String::new();
        let mut session = super::super::tests::session();
        let blocks = off_on(&mut session, "x", &switches, [&["0"], &["1"]], || {
            seen += &fs::read_to_string(&file).unwrap();
            Ok(RunFile::default())
        });
        assert_eq!(seen, "0110".repeat(4));
        assert_eq!(blocks.unwrap().names, ["x, off", "x, on"]);
    }

    #[test]
    fn one_that_is_not_there_is_named() {
        let error = Switches::hold(None, &["net.ipv4.nonesuch"]).err().unwrap();
        let error = format!("{error:#}");
        assert!(error.contains("/proc/sys/net/ipv4/nonesuch"), "{error}");
    }

    #[test]
    fn those_of_a_namespace_are_not_ours() {
        let ns = Netns::create("switches").unwrap();
        let name = "net.ipv4.ip_default_ttl";
        let here = fs::read_to_string(path(name)).unwrap();
        let there = || ns.enter(|| Ok(fs::read_to_string(path(name))?)).unwrap();
        let before = there();
        let switches = Switches::hold(Some(&ns), &[name]).unwrap();
        switches.set(&["17"]).unwrap();
        assert_eq!(there(), "17\n");
        assert_eq!(fs::read_to_string(path(name)).unwrap(), here);
        drop(switches);
        assert_eq!(there(), before);
    }
}
