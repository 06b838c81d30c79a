// SPDX-License-Identifier: GPL-2.0-or-later
//! What is attached to devices, which the bpftool of Debian 12 does not show; and something to attach.

use std::ffi::CString;
use std::os::fd::AsFd;

use mountain::redirect::bpf::hooks::{attach, programs, DeviceHook};
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

/// Attaches an XDP program that passes everything to a device of this thread's namespace; it stays.
pub fn attach_passing_xdp(dev: &str, name: &str) {
    const XDP_PASS: i32 = 2;
    let name = CString::new(name).unwrap();
    let program = load(libbpf_sys::BPF_PROG_TYPE_XDP, 0, &name, XDP_PASS);
    attach(DeviceHook::Xdp, ifindex(dev), program.as_fd()).unwrap();
}
