// SPDX-License-Identifier: GPL-2.0-or-later
//! What is attached to devices, which the bpftool of Debian 12 does not show.

/// How many programs are attached to the tcx egress of a device of this thread's namespace.
pub fn programs_on(dev: &str) -> u32 {
    let ifindex = nix::net::if_::if_nametoindex(dev).unwrap_or_else(|e| panic!("{dev}: {e}"));
    let mut opts = libbpf_sys::bpf_prog_query_opts {
        sz: size_of::<libbpf_sys::bpf_prog_query_opts>() as libbpf_sys::size_t,
        ..Default::default()
    };
    // SAFETY: asks for the count only; the options outlive the call.
    let ret = unsafe {
        libbpf_sys::bpf_prog_query_opts(ifindex as i32, libbpf_sys::BPF_TCX_EGRESS, &mut opts)
    };
    assert_eq!(ret, 0, "BPF_PROG_QUERY of {dev}");
    // SAFETY: the kernel filled it in.
    unsafe { opts.__bindgen_anon_1.count }
}
