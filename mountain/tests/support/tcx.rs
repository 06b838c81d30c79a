// SPDX-License-Identifier: GPL-2.0-or-later
//! What is attached to devices, which the bpftool of Debian 12 does not show; and something to attach.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, OwnedFd};

use mountain::bpf::hooks::{attach, cut, link, programs, DeviceHook, LoadedProgram, Order};
use mountain::redirect::bpf::PROGRAM_PREFIX;
use testkit::ifindex;

use super::program::load;

/// How many programs are attached to the tcx egress of a device of this thread's namespace.
pub fn programs_on(dev: &str) -> u32 {
    program_ids_on(dev).len() as u32
}

/// The ids of these programs, in the order in which they run.
pub fn program_ids_on(dev: &str) -> Vec<u32> {
    programs(DeviceHook::TcxEgress, ifindex(dev)).unwrap_or_else(|e| panic!("{dev}: {e}"))
}

/// The programs at a hook of a device of this thread's namespace, in the order in which they run.
pub fn loaded(hook: DeviceHook, dev: &str) -> Vec<LoadedProgram> {
    let ids = programs(hook, ifindex(dev)).unwrap_or_else(|e| panic!("{hook:?} of {dev}: {e}"));
    let one = |id| LoadedProgram::by_id(id).unwrap();
    ids.into_iter().map(one).collect()
}

/// The program there that redirects.
pub fn redirect_program(hook: DeviceHook, dev: &str) -> Option<OwnedFd> {
    let mut loaded = loaded(hook, dev).into_iter();
    let ours = loaded.find(|p| p.name.starts_with(PROGRAM_PREFIX));
    ours.map(|p| p.fd)
}

/// Takes off what a process has attached by links of a kind, `tcx` or `cgroup`, as `bpftool link detach` does. Returns
/// how many these were.
pub fn cut_links(pid: i32, kind: &str) -> usize {
    let folder = std::fs::read_dir(format!("/proc/{pid}/fdinfo")).unwrap();
    // Descriptors come and go.
    let infos = folder
        .flatten()
        .filter_map(|fd| std::fs::read_to_string(fd.path()).ok());
    let link = |info: String| -> Option<u32> {
        let value = |key: &str| {
            info.lines()
                .find_map(|line| Some(line.strip_prefix(key)?.trim()))
        };
        let id = value("link_id:")?.parse().ok()?;
        (value("link_type:") == Some(kind)).then_some(id)
    };
    let links: Vec<u32> = infos.filter_map(link).collect();
    links.iter().for_each(|link| cut(*link).unwrap());
    links.len()
}

/// Attaches a program of somebody else's to a tcx hook of a device of this thread's namespace. It passes everything, and
/// goes with the value.
pub fn link_passing(hook: DeviceHook, dev: &str, name: &CStr, order: Order) -> OwnedFd {
    const TCX_NEXT: i32 = -1;
    let program = load(libbpf_sys::BPF_PROG_TYPE_SCHED_CLS, 0, name, TCX_NEXT);
    link(hook, ifindex(dev), program.as_fd(), order).unwrap()
}

/// Attaches an XDP program that passes everything to a device of this thread's namespace; it stays.
pub fn attach_passing_xdp(dev: &str, name: &str) {
    const XDP_PASS: i32 = 2;
    let name = CString::new(name).unwrap();
    let program = load(libbpf_sys::BPF_PROG_TYPE_XDP, 0, &name, XDP_PASS);
    attach(DeviceHook::Xdp, ifindex(dev), program.as_fd()).unwrap();
}
