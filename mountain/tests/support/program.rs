// SPDX-License-Identifier: GPL-2.0-or-later
//! Small BPF programs, as others load them.

use std::ffi::CStr;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// Loads a program that returns one value for every packet. `attached`: where it may be attached, 0 if its kind says
/// so.
pub fn load(kind: u32, attached: u32, name: &CStr, value: i32) -> OwnedFd {
    // r0 = value; exit
    let code = [u64::from(value as u32) << 32 | 0xb7, 0x95];
    load_code(kind, attached, name, &code)
}

/// Loads a program for tcx that gives every packet the mark 1, and leaves it to the next one.
pub fn load_marking(name: &CStr) -> OwnedFd {
    // *(u32 *)(r1 + 8) = 1, where `mark` is in struct __sk_buff; r0 = TCX_NEXT; exit
    let code = [
        1 << 32 | 8 << 16 | 1 << 8 | 0x62,
        u64::from(u32::MAX) << 32 | 0xb7,
        0x95,
    ];
    load_code(libbpf_sys::BPF_PROG_TYPE_SCHED_CLS, 0, name, &code)
}

fn load_code(kind: u32, attached: u32, name: &CStr, code: &[u64]) -> OwnedFd {
    let opts = libbpf_sys::bpf_prog_load_opts {
        sz: size_of::<libbpf_sys::bpf_prog_load_opts>() as _,
        expected_attach_type: attached,
        ..Default::default()
    };
    // SAFETY: instructions, name, licence and options outlive the call.
    let fd = unsafe {
        libbpf_sys::bpf_prog_load(
            kind,
            name.as_ptr(),
            c"GPL".as_ptr(),
            code.as_ptr().cast(),
            code.len() as _,
            (&raw const opts).cast_mut(),
        )
    };
    assert!(fd >= 0, "loading: {}", io::Error::last_os_error());
    // SAFETY: nobody else owns it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}
