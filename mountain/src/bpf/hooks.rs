// SPDX-License-Identifier: GPL-2.0-or-later
//! Where programs are attached: XDP, tcx ingress and tcx egress of a device.
//!
//! The programs of redirects whose backend the user named are attached without links, so that no process
//! and no file has to hold them: they stay until they are taken off or the device goes. (Links would
//! have to be pinned, and inside `ip netns exec` the BPF file system goes away with the command.)
//! Others are attached by links and end with the process that holds them.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use libbpf_rs::query::{LinkInfo, LinkInfoIter, LinkTypeInfo};
use libbpf_sys as sys;
use nix::net::if_::if_nameindex;

use crate::netlink;

/// A place for programs on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DeviceHook {
    /// Before the kernel has made a packet of it.
    Xdp,
    /// Before a received packet is routed.
    TcxIngress,
    /// Before a packet is handed to the device.
    TcxEgress,
}

impl DeviceHook {
    /// All of them, in the order in which a packet meets them.
    pub const ALL: [Self; 3] = [Self::Xdp, Self::TcxIngress, Self::TcxEgress];

    fn tcx(self) -> sys::bpf_attach_type {
        match self {
            Self::TcxEgress => sys::BPF_TCX_EGRESS,
            _ => sys::BPF_TCX_INGRESS,
        }
    }
}

/// Most programs at one tcx hook that are looked at; the kernel allows 64 (BPF_MPROG_MAX).
const MAX_AT_HOOK: usize = 64;

/// What a call of libbpf's returns: a number below 0 is an errno.
///
/// # Errors
/// That one.
pub fn result(ret: i32) -> io::Result<()> {
    match ret {
        0.. => Ok(()),
        errno => Err(io::Error::from_raw_os_error(-errno)),
    }
}

/// Why the kernel refuses bpf() to this process, if it does: for want of privilege, or by seccomp or an LSM.
pub(crate) fn refusal() -> Option<io::Error> {
    let mut id = 0;
    // SAFETY: writes the next id to `id`.
    let next = result(unsafe { libbpf_sys::bpf_prog_get_next_id(0, &mut id) });
    next.err()
        .filter(|e| e.raw_os_error() != Some(libc::ENOENT))
}

/// A descriptor that a call has just opened, or why it has not.
///
/// # Errors
/// As [`result`].
pub fn opened(fd: i32) -> io::Result<OwnedFd> {
    result(fd)?;
    // SAFETY: just opened, and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Attaches a program: XDP in the driver and only where there is none yet, tcx before all others.
///
/// # Errors
/// EBUSY or EEXIST where a program of somebody else's is, EOPNOTSUPP of drivers without XDP.
pub fn attach(hook: DeviceHook, ifindex: u32, program: BorrowedFd) -> io::Result<()> {
    let fd = program.as_raw_fd();
    if hook == DeviceHook::Xdp {
        let flags = sys::XDP_FLAGS_DRV_MODE | sys::XDP_FLAGS_UPDATE_IF_NOEXIST;
        // SAFETY: plain numbers; no options.
        return result(unsafe { sys::bpf_xdp_attach(ifindex as i32, fd, flags, ptr::null()) });
    }
    let opts = sys::bpf_prog_attach_opts {
        sz: size_of::<sys::bpf_prog_attach_opts>() as sys::size_t,
        flags: sys::BPF_F_BEFORE,
        ..Default::default()
    };
    // SAFETY: the options outlive the call.
    result(unsafe { sys::bpf_prog_attach_opts(fd, ifindex as i32, hook.tcx(), &opts) })
}

/// Where a program comes among those at a tcx hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Before all that are there.
    First,
    /// Behind them.
    Last,
}

/// Attaches a program for as long as what is returned is open, wherever [`attach`] would.
///
/// # Errors
/// As [`attach`].
pub fn link(
    hook: DeviceHook,
    ifindex: u32,
    program: BorrowedFd,
    order: Order,
) -> io::Result<OwnedFd> {
    let (kind, flags) = match (hook, order) {
        (DeviceHook::Xdp, _) => (sys::BPF_XDP, sys::XDP_FLAGS_DRV_MODE),
        (_, Order::First) => (hook.tcx(), sys::BPF_F_BEFORE),
        (_, Order::Last) => (hook.tcx(), 0),
    };
    link_as(kind, flags, ifindex, program)
}

/// The same with what the kernel calls the hook, and its flags.
///
/// # Errors
/// As [`attach`].
pub fn link_as(kind: u32, flags: u32, ifindex: u32, program: BorrowedFd) -> io::Result<OwnedFd> {
    let opts = sys::bpf_link_create_opts {
        sz: size_of::<sys::bpf_link_create_opts>() as sys::size_t,
        flags,
        ..Default::default()
    };
    // SAFETY: the options outlive the call.
    opened(unsafe { sys::bpf_link_create(program.as_raw_fd(), ifindex as i32, kind, &opts) })
}

/// The links by which programs are at devices, of all network namespaces, by the ids of program and
/// device.
pub fn links() -> HashMap<(u32, u32), u32> {
    let device = |info: &LinkTypeInfo| match info {
        LinkTypeInfo::Xdp(at) => Some(at.ifindex),
        LinkTypeInfo::Tcx(at) => Some(at.ifindex),
        _ => None,
    };
    LinkInfoIter::default()
        .filter_map(|link| Some(((link.prog_id, device(&link.info)?), link.id)))
        .collect()
}

/// What messages call a device.
pub(crate) fn device_text(ifindex: u32) -> String {
    netlink::link::name(ifindex).unwrap_or_else(|| format!("device {ifindex}"))
}

/// Whether a tcx link is at the device of an index. A link outlives its device, and another device may have the index by
/// now.
pub(super) fn is_at(link: BorrowedFd, ifindex: u32) -> bool {
    match LinkInfo::from_fd(link).map(|link| link.info) {
        Ok(LinkTypeInfo::Tcx(at)) => at.ifindex == ifindex,
        // Nothing says that it is not.
        _ => true,
    }
}

/// The link that the kernel lists by a number.
pub(super) fn link_by_id(id: u32) -> io::Result<OwnedFd> {
    // SAFETY: a plain number.
    opened(unsafe { sys::bpf_link_get_fd_by_id(id) })
}

/// Takes the program of a link off, whoever holds the link.
///
/// # Errors
/// ENOENT when the link is gone.
pub fn cut(link: u32) -> io::Result<()> {
    let fd = link_by_id(link)?;
    // SAFETY: an open descriptor.
    result(unsafe { sys::bpf_link_detach(fd.as_raw_fd()) })
}

/// Takes a program off, unless another one is in its place.
///
/// # Errors
/// ENOENT where it is not attached, ENODEV when the device is gone.
pub fn detach(hook: DeviceHook, ifindex: u32, program: BorrowedFd) -> io::Result<()> {
    let fd = program.as_raw_fd();
    if hook == DeviceHook::Xdp {
        let opts = sys::bpf_xdp_attach_opts {
            sz: size_of::<sys::bpf_xdp_attach_opts>() as sys::size_t,
            old_prog_fd: fd,
            ..Default::default()
        };
        let flags = sys::XDP_FLAGS_DRV_MODE | sys::XDP_FLAGS_REPLACE;
        // SAFETY: the options outlive the call.
        return result(unsafe { sys::bpf_xdp_detach(ifindex as i32, flags, &opts) });
    }
    // SAFETY: no options.
    result(unsafe { sys::bpf_prog_detach_opts(fd, ifindex as i32, hook.tcx(), ptr::null()) })
}

/// Ids of the programs at a hook.
///
/// # Errors
/// ENODEV when the device is gone.
pub fn programs(hook: DeviceHook, ifindex: u32) -> io::Result<Vec<u32>> {
    if hook == DeviceHook::Xdp {
        // libbpf's look-up has the kernel describe all devices each time.
        return netlink::xdp_programs_of(ifindex);
    }
    let mut ids = vec![0; MAX_AT_HOOK];
    let mut opts = sys::bpf_prog_query_opts {
        sz: size_of::<sys::bpf_prog_query_opts>() as sys::size_t,
        prog_ids: ids.as_mut_ptr(),
        ..Default::default()
    };
    opts.__bindgen_anon_1.count = MAX_AT_HOOK as u32;
    // SAFETY: `ids` has room for as many as it says, and outlives the call.
    result(unsafe { sys::bpf_prog_query_opts(ifindex as i32, hook.tcx(), &mut opts) })?;
    // SAFETY: the kernel filled it in.
    ids.truncate(unsafe { opts.__bindgen_anon_1.count } as usize);
    Ok(ids)
}

/// Where programs are on the devices of the calling thread's network namespace, with their ids: first XDP's, then
/// those at tcx.
///
/// # Errors
/// When the devices cannot be listed.
pub fn everywhere() -> io::Result<Vec<(DeviceHook, u32, u32)>> {
    let mut all = Vec::new();
    for (ifindex, ids) in netlink::xdp_programs()? {
        all.extend(ids.into_iter().map(|id| (DeviceHook::Xdp, ifindex, id)));
    }
    for device in &if_nameindex()? {
        for hook in [DeviceHook::TcxIngress, DeviceHook::TcxEgress] {
            let ifindex = device.index();
            // Devices come and go.
            let ids = programs(hook, ifindex).unwrap_or_default();
            all.extend(ids.into_iter().map(|id| (hook, ifindex, id)));
        }
    }
    Ok(all)
}

/// The number by which the kernel lists a program.
pub(super) fn program_id(program: BorrowedFd) -> io::Result<u32> {
    let mut info = sys::bpf_prog_info::default();
    let mut len = size_of_val(&info) as u32;
    // SAFETY: `info` is as long as it says.
    result(unsafe { sys::bpf_prog_get_info_by_fd(program.as_raw_fd(), &mut info, &mut len) })?;
    Ok(info.id)
}

/// A program that is in the kernel.
#[derive(Debug)]
pub struct LoadedProgram {
    /// Keeps it loaded.
    pub fd: OwnedFd,
    /// As the kernel has it: 15 characters.
    pub name: String,
    /// Ids of its maps.
    pub maps: Vec<u32>,
}

impl LoadedProgram {
    /// # Errors
    /// ENOENT when it is gone, EPERM.
    pub fn by_id(id: u32) -> io::Result<Self> {
        // SAFETY: a plain number.
        let fd = opened(unsafe { sys::bpf_prog_get_fd_by_id(id) })?;
        let mut maps = vec![0; 64];
        let mut info = sys::bpf_prog_info {
            nr_map_ids: maps.len() as u32,
            map_ids: maps.as_mut_ptr() as u64,
            ..Default::default()
        };
        let mut len = size_of_val(&info) as u32;
        // SAFETY: `info` is as long as it says and points to as many ids as it says.
        result(unsafe { sys::bpf_prog_get_info_by_fd(fd.as_raw_fd(), &mut info, &mut len) })?;
        maps.truncate(info.nr_map_ids as usize);
        let name = info.name.iter().take_while(|&&c| c != 0);
        Ok(Self {
            fd,
            name: name.map(|&c| c as u8 as char).collect(),
            maps,
        })
    }
}

/// What a program made of a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramRun {
    /// XDP_* or TC_ACT_*.
    pub action: i32,
    /// What is left of the packet, from its Ethernet header on.
    pub packet: Vec<u8>,
    /// Of one run.
    pub duration_ns: u32,
}

/// Runs a program on a packet, from its Ethernet header on, as if it were at a hook of a device:
/// BPF_PROG_RUN. Nothing is sent.
///
/// # Errors
/// EINVAL for what the kernel does not take: at tcx a packet without whole network headers, at XDP a
/// device that no XDP program is attached to.
pub fn run(
    hook: DeviceHook,
    ifindex: u32,
    program: &impl AsFd,
    packet: &[u8],
    repeat: i32,
) -> io::Result<ProgramRun> {
    let mut out = vec![0; packet.len() + 64];
    // struct __sk_buff with its ifindex; struct xdp_md with its data_end and ingress_ifindex.
    let mut ctx = [0u8; 192];
    let mut put = |at: usize, v: u32| ctx[at..at + 4].copy_from_slice(&v.to_ne_bytes());
    let ctx_len = match hook {
        DeviceHook::Xdp => {
            put(4, packet.len() as u32);
            put(12, ifindex);
            24
        }
        _ => {
            put(40, ifindex);
            192
        }
    };
    let mut opts = sys::bpf_test_run_opts {
        sz: size_of::<sys::bpf_test_run_opts>() as sys::size_t,
        data_in: packet.as_ptr().cast(),
        data_size_in: packet.len() as u32,
        data_out: out.as_mut_ptr().cast(),
        data_size_out: out.len() as u32,
        ctx_in: ctx.as_ptr().cast(),
        ctx_size_in: ctx_len,
        repeat,
        ..Default::default()
    };
    let fd = program.as_fd().as_raw_fd();
    // SAFETY: all buffers are as long as the options say and outlive the call.
    result(unsafe { sys::bpf_prog_test_run_opts(fd, &mut opts) })?;
    out.truncate(opts.data_size_out as usize);
    Ok(ProgramRun {
        action: opts.retval as i32,
        packet: out,
        duration_ns: opts.duration,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_called_by_its_name_if_it_is_there() {
        assert_eq!(device_text(1), "lo");
        assert_eq!(device_text(2_147_483_647), "device 2147483647");
    }
}
