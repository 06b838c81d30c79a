// SPDX-License-Identifier: GPL-2.0-or-later
//! BPF programs that judge packets by their device, where no ruleset shows them.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use mountain::control::status::CgroupStatus;

use crate::support::{wait_until, Net, Ns, Traffic, LEAVE, SERVER4};

/// `return 1`: accept, or pass.
const ACCEPT: [u64; 2] = [0x0000_0001_0000_00b7, 0x95];

fn load(kind: u32, attached: u32, name: &std::ffi::CStr) -> OwnedFd {
    let opts = libbpf_sys::bpf_prog_load_opts {
        sz: size_of::<libbpf_sys::bpf_prog_load_opts>() as _,
        expected_attach_type: attached,
        ..Default::default()
    };
    // SAFETY: two instructions and a licence that live on.
    let fd = unsafe {
        libbpf_sys::bpf_prog_load(
            kind,
            name.as_ptr(),
            c"GPL".as_ptr(),
            ACCEPT.as_ptr().cast(),
            ACCEPT.len() as _,
            (&raw const opts).cast_mut(),
        )
    };
    assert!(fd >= 0, "loading: {}", std::io::Error::last_os_error());
    // SAFETY: nobody else owns it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// At a hook before routing: a kernel that keeps no list of what is hooked in shows the links of all
/// namespaces together, and the daemons of other tests must not mind this one.
#[test]
fn a_bpf_program_at_netfilter_is_seen() {
    let ns = Ns::new("judge");
    let at_input = || {
        let links = mountain::bpf::foreign::netfilter_links().unwrap();
        links.contains(&(libc::AF_INET6 as u32, 1))
    };
    assert!(!at_input());
    let _link = ns.with(|| {
        let program = load(
            libbpf_sys::BPF_PROG_TYPE_NETFILTER,
            libbpf_sys::BPF_NETFILTER,
            c"judge",
        );
        let mut opts = libbpf_sys::bpf_link_create_opts {
            sz: size_of::<libbpf_sys::bpf_link_create_opts>() as _,
            ..Default::default()
        };
        opts.__bindgen_anon_1.netfilter.pf = libc::AF_INET6 as u32;
        opts.__bindgen_anon_1.netfilter.hooknum = 1;
        opts.__bindgen_anon_1.netfilter.priority = -50;
        // SAFETY: a live program and options.
        let fd = unsafe {
            libbpf_sys::bpf_link_create(program.as_raw_fd(), 0, libbpf_sys::BPF_NETFILTER, &opts)
        };
        assert!(fd >= 0, "attaching: {}", std::io::Error::last_os_error());
        // SAFETY: nobody else owns it.
        unsafe { OwnedFd::from_raw_fd(fd) }
    });
    assert!(at_input());
}

/// A cgroup of this test's own, with this process's thread in none of it.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new() -> Self {
        let root = mountain::host::cgroup::root().expect("cgroups of version 2");
        let path = root.join(format!("mtt-{}-judge", std::process::id()));
        std::fs::create_dir_all(path.join("inner")).unwrap();
        Self(path)
    }

    fn attach(&self, name: &std::ffi::CStr) {
        let program = load(
            libbpf_sys::BPF_PROG_TYPE_CGROUP_SKB,
            libbpf_sys::BPF_CGROUP_INET_EGRESS,
            name,
        );
        let folder = File::open(&self.0).unwrap();
        // SAFETY: live descriptors.
        let attached = unsafe {
            libbpf_sys::bpf_prog_attach(
                program.as_raw_fd(),
                folder.as_raw_fd(),
                libbpf_sys::BPF_CGROUP_INET_EGRESS,
                libbpf_sys::BPF_F_ALLOW_MULTI,
            )
        };
        assert_eq!(
            attached,
            0,
            "attaching: {}",
            std::io::Error::last_os_error()
        );
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(self.0.join("inner"));
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// RestrictNetworkInterfaces= of systemd, above all.
#[test]
fn sockets_below_a_cgroup_with_an_egress_program_stay() {
    let cgroup = Cgroup::new();
    let net = Net::steered();
    cgroup.attach(c"sd_fw_egress");
    let held = || net.client.status().held_cgroups;
    let ours = format!("mtt-{}-judge", std::process::id());
    let is_ours = |c: &CgroupStatus| c.cgroup.to_string_lossy().contains(&ours);
    // Datagrams of a program below the cgroup, from many ports, and where they come in.
    let counted = |by: &str| {
        let list = net.server.run("nft list table inet count");
        let line = list.lines().find(|line| line.contains(by)).unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        let at = words.iter().position(|word| *word == "packets").unwrap();
        words[at + 1].parse::<u64>().unwrap()
    };
    super::nft(
        &net.server,
        "table inet count { chain c { type filter hook prerouting priority -310;\n\
         iifname s0 udp dport 9999 counter\niifname s1 udp dport 9999 counter\n} }",
    );
    let send = || {
        let script = format!(
            "echo $$ > {}/inner/cgroup.procs; for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16; do \
             echo x > /dev/udp/{SERVER4}/9999; done",
            cgroup.0.display()
        );
        let status = net
            .client
            .command("bash")
            .args(["-c", &script])
            .status()
            .unwrap();
        assert!(status.success());
    };
    net.blackhole(0);
    net.wait_left("u0", false);
    let traffic = Traffic::start(&net, SERVER4, 20);
    let before = counted("s0");
    send();
    assert_eq!(
        counted("s0"),
        before,
        "all are moved to u1: the filter by address is harmless"
    );
    assert!(counted("s1") > 0);
    cgroup.attach(c"judge");
    wait_until("the program is noticed", 2 * LEAVE, || {
        held().iter().any(is_ours)
    });
    let status = net.client.mountain_ok("status");
    assert!(
        status.contains("-judge: a BPF program at its egress (judge)"),
        "{status}"
    );
    send();
    assert!(
        counted("s0") > before,
        "they stay where the kernel sends them"
    );
    // Others are moved as before.
    let counts = traffic.during(Duration::from_millis(300));
    assert_eq!(counts.by_path[0], 0, "{counts:?}");
    assert!(counts.nearly_all_arrived(), "{counts:?}");
}
