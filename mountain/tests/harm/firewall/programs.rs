// SPDX-License-Identifier: GPL-2.0-or-later
//! BPF programs that judge packets by their device, where no ruleset shows them.

use std::ffi::CStr;
use std::fs::File;
use std::net::TcpStream;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::Command;

use mountain::bpf::foreign::egress_program;
use mountain::bpf::hooks::{DeviceHook, Order};
use mountain::bpf::{Settings, Steer};
use mountain::control::status::CgroupStatus;
use testkit::ifindex;

use super::{all_moved, wait_free, wait_held};
use crate::placement::{two_providers, up};
use crate::support::program::load;
use crate::support::tcx::{link_passing, programs_on};
use crate::support::*;

/// Accept, or pass.
const ACCEPT: i32 = 1;

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
    let link = ns.with(|| {
        let program = load(
            libbpf_sys::BPF_PROG_TYPE_NETFILTER,
            libbpf_sys::BPF_NETFILTER,
            c"judge",
            ACCEPT,
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
    for _ in 0..2 {
        assert!(at_input(), "also where it is known from the last look");
    }
    drop(link);
    assert!(!at_input());
}

/// Attaches a program to what leaves the sockets of a cgroup.
fn attach(cgroup: &Cgroup, name: &CStr) {
    let egress = libbpf_sys::BPF_CGROUP_INET_EGRESS;
    let program = load(libbpf_sys::BPF_PROG_TYPE_CGROUP_SKB, egress, name, ACCEPT);
    let folder = File::open(cgroup.path()).unwrap();
    let (program, folder) = (program.as_raw_fd(), folder.as_raw_fd());
    // SAFETY: live descriptors.
    let attached = unsafe {
        libbpf_sys::bpf_prog_attach(program, folder, egress, libbpf_sys::BPF_F_ALLOW_MULTI)
    };
    let error = std::io::Error::last_os_error();
    assert_eq!(attached, 0, "attaching: {error}");
}

/// RestrictNetworkInterfaces= of systemd, above all.
#[test]
fn sockets_below_a_cgroup_with_an_egress_program_stay() {
    let cgroup = Cgroup::new("judge");
    let inner = cgroup.inner();
    let net = Net::steered();
    attach(&cgroup, c"sd_fw_egress");
    let held = || net.client.status().held_cgroups;
    let is_ours = |c: &CgroupStatus| c.cgroup.ends_with(cgroup.path().file_name().unwrap());
    // Datagrams of a program below the cgroup, from many ports, and where they come in.
    let hook = "filter hook prerouting priority -310";
    let rules = "iifname s0 udp dport 9999 counter\niifname s1 udp dport 9999 counter";
    net.server.chain("inet count c", hook, rules);
    let counted = || net.server.counted("chain inet count c");
    let send = || {
        let script = format!("for i in {{1..16}}; do echo x > /dev/udp/{SERVER4}/9999; done");
        let mut bash = inner.command(&net.client, "bash");
        assert!(bash.args(["-c", &script]).status().unwrap().success());
    };
    net.lose(0);
    let traffic = Traffic::start(&net, SERVER4, 20);
    let before = counted();
    send();
    let now = counted();
    let moved = now[0] == before[0] && now[1] > 0;
    assert!(moved, "the filter by address is harmless: {now:?}");
    attach(&cgroup, c"judge");
    send();
    let stay = counted()[0] > before[0];
    assert!(stay, "they stay where the kernel sends them at once");
    wait_until("the program is named", 2 * LEAVE, || {
        held().iter().any(is_ours)
    });
    net.client.mountain_says("status", "(judge)");
    traffic.during(HALF).assert_by(1, "others are moved");
}

/// A first answer of its own is not its socket's yet.
#[test]
fn answers_of_a_server_below_such_a_cgroup_stay() {
    let cgroup = Cgroup::new("judge");
    let net = Net::steered();
    attach(&cgroup, c"judge");
    let script = "import socket\ns = socket.create_server(('10.98.0.1', 7777))\ns.accept()";
    let mut python = cgroup.command(&net.client, "python3");
    let _listener = Guard::new(python.args(["-c", script]).spawn().unwrap());
    net.client.wait_open("tcp", 7777);
    // Nothing but those answers leaves.
    net.server.hole("tcp sport 7777");
    net.server
        .ip("route replace 10.98.0.0/24 via 10.30.0.1 src 203.0.113.1");
    let before = net.counter("pass_cgroup");
    let to = "10.98.0.1:7777".parse().unwrap();
    let heard = net
        .server
        .with(|| TcpStream::connect_timeout(&to, HALF).is_ok());
    assert!(!heard);
    assert!(net.counter("pass_cgroup") > before);
}

/// Such a program may let packets leave by the uplink alone that the kernel prefers.
#[test]
fn no_flow_of_a_cgroup_with_an_egress_program_is_placed() {
    let cgroup = Cgroup::new("judge");
    let net = two_providers();
    attach(&cgroup, c"judge");
    let checked = |with: &str| stdout(&net.client.mountain(&format!("check {with}")));
    assert_has(&checked("--adopt"), &["-judge", "(judge)"]);
    up(&net);
    assert_has(&checked(""), &["-judge", "(judge)"]);
    let hook = "filter hook prerouting priority -310";
    let rules = "iifname s0 udp dport 9999 counter\niifname s1 udp dport 9999 counter";
    net.server.chain("inet count c", hook, rules);
    let counted = || net.server.counted("chain inet count c");
    // By connect().
    let script = format!("for i in {{1..16}}; do echo x > /dev/udp/{SERVER4}/9999; done");
    let send = |mut bash: Command| {
        assert!(bash.args(["-c", &script]).status().unwrap().success());
    };
    send(cgroup.inner().command(&net.client, "bash"));
    assert_eq!(counted(), [16, 0]);
    // Those of a service that has just begun, too.
    let new = Cgroup::new("new");
    attach(&new, c"sd_restrictif_e");
    send(new.command(&net.client, "bash"));
    assert_eq!(counted(), [32, 0]);
    let passed = || net.client.status().placement.unwrap().counters["pass_cgroup"];
    assert_eq!(passed(), 32);
    // systemd's filter by address looks at no device.
    let filtered = Cgroup::new("filtered");
    attach(&filtered, c"sd_fw_egress");
    send(filtered.command(&net.client, "bash"));
    assert_eq!(passed(), 32);
    send(net.client.command("bash"));
    let both = counted();
    assert!(both[1] > 0, "others are placed: {both:?}");
}

/// That hides what is mounted below /sys.
#[test]
fn programs_at_cgroups_are_seen_under_ip_netns_exec() {
    let cgroup = Cgroup::new("judge");
    let net = Net::new();
    attach(&cgroup, c"judge");
    let within = |script: &str| {
        let mut check = Command::new("unshare");
        check.args(["--pid", "--fork", "--mount-proc", "sh", "-c", script]);
        check.args([&net.client.name, MOUNTAIN]);
        stdout(&check.output().unwrap())
    };
    let by_process_1 = within(r#"ip netns exec "$0" "$1" check; exit"#);
    assert_has(&by_process_1, &["-judge", "(judge)"]);
    // In a sandbox, process 1 may have more capabilities than root.
    let less = "setpriv --bounding-set -sys_ptrace,-sys_boot sh -c";
    let inner = r#"! ls /proc/1/root && ip netns exec "$0" "$1" check; exit"#;
    let by_a_parent = within(&format!(r#"{less} '{inner}' "$0" "$1"; exit"#));
    assert_has(&by_a_parent, &["-judge", "(judge)"]);
}

/// A program called `guard` that passes every packet that leaves by a device of this thread's namespace.
fn guard(device: &str) -> OwnedFd {
    link_passing(DeviceHook::TcxEgress, device, c"guard", Order::Last)
}

/// A moved packet would meet those of the device that it really leaves by alone. These do nothing: what they may do
/// is not looked at.
#[test]
fn what_others_have_at_the_egress_of_an_uplink_is_not_gone_around() {
    let net = Net::steered();
    net.lose(0);
    let traffic = Traffic::start(&net, SERVER4, 20);
    let wait_moved = || wait_until("flows are moved to u1", LEAVE, || all_moved(&traffic));
    let wait_back = || wait_until("they go back", LEAVE, || !all_moved(&traffic));
    wait_moved();
    net.client.run("tc qdisc add dev u1 clsact");
    net.client
        .run("tc filter add dev u1 egress protocol ip u32 match ip dport 7000 0xffff flowid 1:1");
    let filters = "tc filters at the egress of u1";
    wait_held(&net, filters);
    wait_back();
    assert_has(&stdout(&net.client.mountain("check")), &[filters]);
    net.client.run("tc filter del dev u1 egress");
    wait_free(&net);
    wait_moved();
    let guarding = net.client.with(|| guard("u1"));
    wait_held(&net, "a BPF program at the tcx egress of u1 (guard)");
    wait_back();
    drop(guarding);
    wait_free(&net);
    wait_moved();
}

/// As in the systemd unit.
#[test]
fn without_the_privilege_to_read_names_our_own_program_is_known() {
    let net = Net::new();
    net.client.with(|| {
        let u0 = ifindex("u0");
        let mut steer = Steer::load(&Settings::new(1, 1000)).unwrap();
        steer.attach_to(&[u0]).unwrap();
        let guarding = guard("u0");
        assert_eq!(egress_program(u0).unwrap().as_deref(), Some("guard"));
        give_up_sys_admin();
        assert_eq!(egress_program(u0).unwrap().as_deref(), Some(""));
        drop(guarding);
        assert_eq!(egress_program(u0).unwrap(), None);
    });
}

/// So are those of a daemon, by `mountain check`.
#[test]
fn without_the_privilege_to_read_names_a_daemons_program_is_known() {
    let net = Net::steered();
    net.client.with(|| {
        assert_eq!(programs_on("u0"), 1);
        give_up_sys_admin();
        assert_eq!(egress_program(ifindex("u0")).unwrap(), None);
    });
}

/// Takes CAP_SYS_ADMIN from the calling thread.
pub fn give_up_sys_admin() {
    /// _LINUX_CAPABILITY_VERSION_3, and the calling thread.
    const HEADER: [u32; 2] = [0x2008_0522, 0];
    const SYS_ADMIN: u32 = 1 << 21;
    // Effective, permitted and inheritable, of the first 32 capabilities and of the others.
    let mut sets = [0u32; 6];
    // SAFETY: the header and room for six words.
    let got = unsafe { libc::syscall(libc::SYS_capget, HEADER.as_ptr(), sets.as_mut_ptr()) };
    assert_eq!(got, 0, "{}", std::io::Error::last_os_error());
    sets[0] &= !SYS_ADMIN;
    // SAFETY: the same.
    let set = unsafe { libc::syscall(libc::SYS_capset, HEADER.as_ptr(), sets.as_ptr()) };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}
