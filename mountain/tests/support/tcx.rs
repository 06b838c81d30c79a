// SPDX-License-Identifier: GPL-2.0-or-later
//! What is attached to devices, which the bpftool of Debian 12 does not show; and something to attach.

/// How many programs are attached to the tcx egress of a device of this thread's namespace.
pub fn programs_on(dev: &str) -> u32 {
    program_ids_on(dev).len() as u32
}

/// The ids of these programs, in the order in which they run.
pub fn program_ids_on(dev: &str) -> Vec<u32> {
    let ifindex = nix::net::if_::if_nametoindex(dev).unwrap_or_else(|e| panic!("{dev}: {e}"));
    let mut ids = vec![0u32; 64];
    let mut opts = libbpf_sys::bpf_prog_query_opts {
        sz: size_of::<libbpf_sys::bpf_prog_query_opts>() as libbpf_sys::size_t,
        prog_ids: ids.as_mut_ptr(),
        ..Default::default()
    };
    opts.__bindgen_anon_1.count = ids.len() as u32;
    // SAFETY: there is room for as many ids as the options say; both outlive the call.
    let ret = unsafe {
        libbpf_sys::bpf_prog_query_opts(ifindex as i32, libbpf_sys::BPF_TCX_EGRESS, &mut opts)
    };
    assert_eq!(ret, 0, "BPF_PROG_QUERY of {dev}");
    // SAFETY: the kernel filled it in.
    ids.truncate(unsafe { opts.__bindgen_anon_1.count } as usize);
    ids
}

/// Attaches an XDP program that passes everything to a device of this thread's namespace.
pub fn attach_passing_xdp(dev: &str, name: &str) {
    let ifindex = nix::net::if_::if_nametoindex(dev).unwrap_or_else(|e| panic!("{dev}: {e}"));
    // mov r0, XDP_PASS; exit
    let pass: [u64; 2] = [0x0000_0002_0000_00b7, 0x95];
    let name = std::ffi::CString::new(name).unwrap();
    // SAFETY: the instructions and strings live through the calls; the program stays attached when its
    // descriptor is closed.
    unsafe {
        let program = libbpf_sys::bpf_prog_load(
            libbpf_sys::BPF_PROG_TYPE_XDP,
            name.as_ptr(),
            c"GPL".as_ptr(),
            pass.as_ptr().cast(),
            pass.len() as libbpf_sys::size_t,
            std::ptr::null_mut(),
        );
        assert!(program >= 0, "{program}");
        let attached = libbpf_sys::bpf_xdp_attach(ifindex as i32, program, 0, std::ptr::null());
        assert_eq!(attached, 0);
        libc::close(program);
    }
}
