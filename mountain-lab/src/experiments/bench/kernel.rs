// SPDX-License-Identifier: GPL-2.0-or-later
//! What the bench needs of bpf(2): run-time statistics, BPF_PROG_RUN and programs of two
//! instructions.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;

use anyhow::{Context, Result};
use mountain::bpf::hooks::{self, opened, DeviceHook};

/// TC_ACT_UNSPEC: on to the next program, then the device.
pub const PASS: i32 = -1;
/// TC_ACT_SHOT: dropped.
pub const DROP: i32 = 2;
/// TC_ACT_REDIRECT: sent by another device.
pub const REDIRECT: i32 = 7;

/// While it lives the kernel times every run of every BPF program (BPF_STATS_RUN_TIME).
pub struct RunTimeStats(#[allow(dead_code)] OwnedFd);

impl RunTimeStats {
    /// Fails without CAP_SYS_ADMIN.
    pub fn enable() -> Result<Self> {
        // SAFETY: takes one integer.
        let fd = unsafe { libbpf_sys::bpf_enable_stats(libbpf_sys::BPF_STATS_RUN_TIME) };
        Ok(Self(opened(fd).context("BPF_ENABLE_STATS")?))
    }
}

/// Time and number of a program's runs while [`RunTimeStats`] were enabled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Runs {
    pub ns: u64,
    pub count: u64,
}

impl Runs {
    /// `run_time_ns` and `run_cnt` of `bpf_prog_info`, since the program was loaded.
    pub fn of(program: BorrowedFd) -> Result<Self> {
        let mut info = libbpf_sys::bpf_prog_info::default();
        let mut len = size_of_val(&info) as u32;
        // SAFETY: `info` is as long as `len` says; its pointers are null, so nothing is copied out.
        let rc = unsafe {
            libbpf_sys::bpf_prog_get_info_by_fd(program.as_raw_fd(), &mut info, &mut len)
        };
        hooks::result(rc).context("BPF_OBJ_GET_INFO_BY_FD")?;
        Ok(Self {
            ns: info.run_time_ns,
            count: info.run_cnt,
        })
    }

    /// What came after `earlier`.
    pub fn since(self, earlier: Self) -> Self {
        Self {
            ns: self.ns - earlier.ns,
            count: self.count - earlier.count,
        }
    }

    /// Mean, ns.
    pub fn mean_ns(self) -> f64 {
        self.ns as f64 / self.count as f64
    }
}

/// A tcx program that returns a constant: the reference for what statistics themselves cost, and
/// the cheapest sink.
pub struct Constant(OwnedFd);

impl Constant {
    pub fn load(action: i32) -> Result<Self> {
        let instruction = |code: u32, imm: i32| libbpf_sys::bpf_insn {
            code: code as u8,
            imm,
            ..Default::default()
        };
        let code = [
            // r0 = action; exit
            instruction(
                libbpf_sys::BPF_ALU64 | libbpf_sys::BPF_MOV | libbpf_sys::BPF_K,
                action,
            ),
            instruction(libbpf_sys::BPF_JMP | libbpf_sys::BPF_EXIT, 0),
        ];
        // SAFETY: pointers and lengths describe `code`; the strings end in NUL.
        let fd = unsafe {
            libbpf_sys::bpf_prog_load(
                libbpf_sys::BPF_PROG_TYPE_SCHED_CLS,
                c"constant".as_ptr(),
                c"GPL".as_ptr(),
                code.as_ptr(),
                code.len() as libbpf_sys::size_t,
                ptr::null_mut(),
            )
        };
        Ok(Self(
            opened(fd).context("loading a program of two instructions")?,
        ))
    }
}

/// Attaches a program to a device of this thread's namespace until the link is dropped.
pub fn attach(program: BorrowedFd, ifindex: u32, point: u32, flags: u32) -> Result<OwnedFd> {
    let link = hooks::link_as(point, flags, ifindex, program);
    link.with_context(|| format!("attaching to device {ifindex}"))
}

impl AsFd for Constant {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Runs a tcx program `repeat` times on a packet that leaves by `ifindex` of this thread's
/// namespace (BPF_PROG_RUN). Returns the last action and the kernel's mean time per run, ns.
pub fn prog_run(
    program: BorrowedFd,
    packet: &[u8],
    ifindex: u32,
    repeat: i32,
) -> Result<(i32, u32)> {
    let run = hooks::run(DeviceHook::TcxEgress, ifindex, &program, packet, repeat);
    let run = run.context("BPF_PROG_RUN")?;
    Ok((run.action, run.duration_ns))
}
