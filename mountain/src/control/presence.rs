// SPDX-License-Identifier: GPL-2.0-or-later
//! That a daemon runs in a network namespace, for those who do not see its folder: somebody has removed that, or a
//! container shares the host's network and has a `/run` of its own.
//!
//! An empty BPF map whose name has the namespace's number tells it. It goes with the process, however that ends (unless
//! somebody else has the map open), no mount hides it, and it takes CAP_BPF to make one. (Any user may take the name of an
//! abstract Unix socket.) To look for it takes CAP_SYS_ADMIN: without that, only the folder counts.

use std::fmt;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use libbpf_rs::libbpf_sys::bpf_map_create_opts;
use libbpf_rs::query::MapInfoIter;
use libbpf_rs::{MapCore, MapHandle, MapType};
use nix::unistd::Pid;

use crate::host::namespaces::this_namespace;

/// One that takes CAP_BPF, also where others do not (kernel.unprivileged_bpf_disabled=0).
const KIND: MapType = MapType::Queue;
/// How long a program that lists all maps may have one of them open.
const LISTED: Duration = Duration::from_millis(20);

/// This process is seen, until the value goes.
pub(crate) struct Announced(#[expect(dead_code, reason = "held open")] MapHandle);

/// A daemon whose folder is not found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Elsewhere {
    /// `None`: not to be seen from here, as in another container.
    pub process: Option<Pid>,
}

impl fmt::Display for Elsewhere {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.process {
            Some(pid) => write!(
                f,
                "mountain runs in this network namespace as process {pid}, whose folder is not here: it was removed, or \
                 is in another container. `mountain down` ends it"
            ),
            None => f.write_str(
                "mountain runs in this network namespace, in another container: run its own commands there",
            ),
        }
    }
}

impl std::error::Error for Elsewhere {}

/// Whether a daemon has announced itself in the calling thread's network namespace.
pub(crate) fn is_announced() -> bool {
    name().is_ok_and(|name| maps(&name).next().is_some())
}

/// Its process, if it can be seen from here.
pub(crate) fn process() -> Option<Pid> {
    holder(maps(&name().ok()?).next()?)
}

/// Announces this process. `None`: another one is there already.
///
/// # Errors
/// From the kernel, as without the privileges that BPF takes.
pub(crate) fn announce() -> Result<Option<Announced>> {
    let name = name()?;
    let options = bpf_map_create_opts {
        sz: size_of::<bpf_map_create_opts>() as u64,
        ..Default::default()
    };
    let map = MapHandle::create(KIND, Some(&name), 0, 4, 1, &options);
    let map = map.context("cannot make a BPF map")?;
    // Of two that come at the same moment the first one stays: later maps have higher numbers.
    let own = map.info()?.info.id;
    let is_first = maps(&name).all(|id| id >= own);
    Ok(is_first.then_some(Announced(map)))
}

fn name() -> Result<String> {
    Ok(format!("mtn_{}", this_namespace()?))
}

/// Numbers of the maps with this name.
fn maps(name: &str) -> impl Iterator<Item = u32> + '_ {
    let named = MapInfoIter::default().filter(move |map| map.ty == KIND && map.name == *name);
    named.map(|map| map.id)
}

/// The daemon that holds a map, if it can be seen from here.
fn holder(map: u32) -> Option<Pid> {
    let line = format!("map_id:\t{map}");
    let holds = |process: &Path| {
        let open = fs::read_dir(process.join("fdinfo")).into_iter().flatten();
        open.flatten().any(|file| {
            let info = fs::read_to_string(file.path()).unwrap_or_default();
            info.lines().any(|found| found == line)
        })
    };
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let mut numbered = processes.filter_map(|entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        Some((entry.path(), pid))
    });
    let is_ours = |process: &Path| {
        let name = fs::read_to_string(process.join("comm")).unwrap_or_default();
        name.starts_with("mountain") && holds(process) && {
            // Whoever lists the maps opens each for a moment.
            std::thread::sleep(LISTED);
            holds(process)
        }
    };
    let (_, pid) = numbered.find(|(process, _)| is_ours(process))?;
    Some(Pid::from_raw(pid))
}
