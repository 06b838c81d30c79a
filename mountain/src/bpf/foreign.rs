// SPDX-License-Identifier: GPL-2.0-or-later
//! Other people's BPF programs that judge packets by the device that they leave by: at Netfilter's
//! hooks and at the egress of cgroups. The kernel announces neither, nor those at the tcx egress of devices.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use anyhow::Result;
use libbpf_rs::query::{LinkInfo, LinkTypeInfo};
use tracing::debug;

use super::hooks::{self, DeviceHook, LoadedProgram};
use crate::host::atomic_file;
use crate::host::cgroup;
use crate::host::namespaces::this_namespace;

/// systemd's filter by address, which looks at no device (src/core/bpf-firewall.c).
const BY_ADDRESS: &str = "sd_fw_egress";
/// Programs at one cgroup whose names are asked for.
const NAMED_MAX: usize = 64;

/// A program at the egress of a cgroup.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CgroupProgram {
    /// Where the cgroup is below the root.
    pub cgroup: PathBuf,
    pub name: String,
}

/// Links of BPF programs at Netfilter's hooks, in all network namespaces: protocol family
/// (NFPROTO_*) and hook (NF_INET_*).
///
/// # Errors
/// Without CAP_SYS_ADMIN, where the kernel knows such links.
pub fn netfilter_links() -> io::Result<Vec<(u32, u32)>> {
    // Links of all kinds by id, as of the last look. A link stays where it is, and the kernel does not use ids again
    // before two billion others, so only new links are asked where they are: our own may be hundreds.
    static KNOWN: Mutex<BTreeMap<u32, Option<(u32, u32)>>> = Mutex::new(BTreeMap::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let (mut links, mut id) = (BTreeMap::new(), 0);
    loop {
        // SAFETY: writes the next id to `id`.
        let next = hooks::result(unsafe { libbpf_sys::bpf_link_get_next_id(id, &mut id) });
        match next {
            Ok(()) => {}
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => break,
            Err(_) if !has_netfilter_links() => return Ok(Vec::new()),
            Err(e) => return Err(e),
        }
        let place = match known.get(&id) {
            Some(place) => *place,
            None => match hooks::link_by_id(id) {
                Ok(link) => netfilter_place(link.as_fd()),
                // It is gone by now, or not ready yet.
                Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::EAGAIN)) => continue,
                Err(e) => return Err(e),
            },
        };
        links.insert(id, place);
    }
    *known = links;
    Ok(known.values().flatten().copied().collect())
}

/// Where at Netfilter a link's program is; `None`: elsewhere. Of other kinds of links the kernel may fail to say where
/// they are.
fn netfilter_place(link: BorrowedFd) -> Option<(u32, u32)> {
    match LinkInfo::from_fd(link).ok()?.info {
        LinkTypeInfo::Netfilter(at) => Some((at.protocol_family, at.hooknum)),
        _ => None,
    }
}

/// Whether the kernel can attach programs to Netfilter (CONFIG_NETFILTER_BPF_LINK).
fn has_netfilter_links() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    *HAS.get_or_init(|| {
        let symbols = fs::read_to_string("/proc/kallsyms");
        symbols.map_or(true, |symbols| symbols.contains("bpf_nf_link_attach"))
    })
}

/// Programs at the egress of cgroups that may look at the device of a packet, for people: our programs ask the kernel
/// (bpf/common/egress_programs.h). Without a file system of cgroups there are none to be seen, nor below a cgroup that is
/// closed to this process, nor without CAP_SYS_ADMIN, which names take: most of them are systemd's filter by address.
///
/// # Errors
/// When the kernel does not say what is attached.
pub(crate) fn cgroup_egress() -> Result<Vec<CgroupProgram>> {
    let Ok(root) = cgroup::root() else {
        return Ok(Vec::new());
    };
    let mut found = Vec::new();
    cgroup::look_through(&root, |cgroup, below| {
        // Those above the root that is to be seen here count as its own.
        let flags = match below == Path::new("/") {
            true => libbpf_sys::BPF_F_QUERY_EFFECTIVE,
            false => 0,
        };
        look_at(cgroup, below, flags, &mut found)
    })?;
    found.sort();
    Ok(found)
}

fn look_at(
    cgroup: &File,
    below: &Path,
    flags: u32,
    found: &mut Vec<CgroupProgram>,
) -> io::Result<()> {
    let mut ids = [0u32; NAMED_MAX];
    let mut count = NAMED_MAX as u32;
    // SAFETY: a live descriptor, and room for as many ids as is told.
    let queried = unsafe {
        libbpf_sys::bpf_prog_query(
            cgroup.as_raw_fd(),
            libbpf_sys::BPF_CGROUP_INET_EGRESS,
            flags,
            std::ptr::null_mut(),
            ids.as_mut_ptr(),
            &mut count,
        )
    };
    if queried != 0 {
        let error = io::Error::last_os_error();
        return match error.raw_os_error() {
            // The kernel has no programs at cgroups.
            Some(libc::EINVAL | libc::EOPNOTSUPP) => Ok(()),
            // More than there is room for: their names do not matter.
            Some(libc::ENOSPC) => {
                found.push(program(below, format!("more than {NAMED_MAX} programs")));
                Ok(())
            }
            _ => Err(error),
        };
    }
    for id in &ids[..(count as usize).min(NAMED_MAX)] {
        let name = name(*id);
        if !name.is_empty() && name != BY_ADDRESS {
            found.push(program(below, name));
        }
    }
    Ok(())
}

/// A program's name, which is empty where it cannot be read.
pub(crate) fn in_brackets(name: &str) -> String {
    match name {
        "" => "(its name takes CAP_SYS_ADMIN to read)".to_owned(),
        name => format!("({name})"),
    }
}

fn program(below: &Path, name: String) -> CgroupProgram {
    CgroupProgram {
        cgroup: below.to_owned(),
        name,
    }
}

/// The name of the program with an id; empty where the kernel does not say.
fn name(id: u32) -> String {
    LoadedProgram::by_id(id).map_or(String::new(), |program| program.name)
}

/// What the names of Mountain's own programs begin with.
const OWN: [&str; 2] = ["mtn_", "mountain"];
/// Numbers of the steering programs of this process, which may lack the privilege to read names.
static OWN_IDS: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

fn is_own(name: &str) -> bool {
    OWN.iter().any(|own| name.starts_with(own))
}

/// Notes that a program is this process's own.
pub(super) fn note_own(program: BorrowedFd) {
    if let Ok(id) = hooks::program_id(program) {
        let mut ids = OWN_IDS.lock().unwrap_or_else(PoisonError::into_inner);
        ids.insert(id);
    }
}

/// A file that names programs of Mountain's at tcx egress by their ids, one a line, for processes that lack the
/// privilege to read names. The kernel does not use ids again before two billion others.
const NOTES: &str = "programs";

/// Notes that a program is Mountain's, in a folder that is there for as long as it may be attached.
pub(crate) fn note_in(folder: &Path, program: BorrowedFd) {
    match hooks::program_id(program) {
        Ok(id) => note(folder, BTreeSet::from([id])),
        Err(e) => debug!("a program's id: {e}"),
    }
}

/// The same for the steering programs of this process.
pub(crate) fn note_own_in(folder: &Path) {
    let ids = OWN_IDS.lock().unwrap_or_else(PoisonError::into_inner);
    note(folder, ids.clone());
}

/// A failure costs only those who cannot read names.
fn note(folder: &Path, new: BTreeSet<u32>) {
    let path = folder.join(NOTES);
    let mut ids = noted(&path);
    if new.is_subset(&ids) {
        return;
    }
    ids.extend(new);
    ids.retain(|&id| !is_gone(id));
    let written = atomic_file::write(&path, false, |out| {
        ids.iter().try_for_each(|id| writeln!(out, "{id}"))
    });
    if let Err(e) = written {
        debug!("cannot write {}: {e}", path.display());
    }
}

fn noted(path: &Path) -> BTreeSet<u32> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().filter_map(|id| id.parse().ok()).collect()
}

/// Whether this network namespace's daemon, or its redirects, have noted a program: see `control::run_dir` and
/// `redirect::store`.
fn is_noted(id: u32) -> bool {
    let folders = this_namespace().map(|inode| {
        ["net", "redirect"].map(|of| PathBuf::from(format!("/run/mountain/{of}-{inode}")))
    });
    folders.is_ok_and(|folders| folders.iter().any(|f| noted(&f.join(NOTES)).contains(&id)))
}

fn is_gone(id: u32) -> bool {
    let program = LoadedProgram::by_id(id);
    program.is_err_and(|e| e.raw_os_error() == Some(libc::ENOENT))
}

/// Somebody else's program at the tcx egress of a device, by its name, which is empty where the kernel does not say.
///
/// # Errors
/// When the kernel does not tell what is attached.
pub fn egress_program(ifindex: u32) -> io::Result<Option<String>> {
    match hooks::programs(DeviceHook::TcxEgress, ifindex) {
        Ok(ids) => Ok(ids.into_iter().find_map(others_name)),
        // The device is gone, nothing is attached, or the kernel has no such hook.
        Err(e)
            if matches!(
                e.raw_os_error(),
                Some(libc::ENODEV | libc::ENOENT | libc::EINVAL)
            ) =>
        {
            Ok(None)
        }
        Err(e) => Err(io::Error::new(e.kind(), format!("programs at tcx: {e}"))),
    }
}

/// The name of a program, unless it is ours or was taken off meanwhile.
fn others_name(id: u32) -> Option<String> {
    match LoadedProgram::by_id(id) {
        Ok(program) => (!is_own(&program.name)).then_some(program.name),
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => None,
        Err(_) => {
            let ids = OWN_IDS.lock().unwrap_or_else(PoisonError::into_inner);
            (!ids.contains(&id) && !is_noted(id)).then(String::new)
        }
    }
}

/// Names of others' programs at a hook of a device, in the order in which they were loaded.
pub(crate) fn programs_at(hook: DeviceHook, ifindex: u32) -> io::Result<Vec<String>> {
    let mut ids = hooks::programs(hook, ifindex)?;
    ids.sort_unstable();
    let programs = ids.into_iter().map(LoadedProgram::by_id);
    // One that was taken off meanwhile is not there.
    let names = programs.flatten().map(|program| program.name);
    Ok(names.filter(|name| !is_own(name)).collect())
}
