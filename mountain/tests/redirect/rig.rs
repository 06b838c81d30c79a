// SPDX-License-Identifier: GPL-2.0-or-later
//! A router in a network namespace of the test's own, the redirection programs on its devices, and
//! BPF_PROG_RUN of them.
//!
//! ```text
//! client 10.0.8.18 ... c0 (10.0.8.17)  router  s0 (10.0.1.1) ... target 10.0.1.2
//!        fd08::18         (fd08::17)              (fd01::1)             fd01::2
//! ```

#![allow(dead_code)] // Each test binary uses its own part.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};

use libbpf_rs::{MapCore, MapHandle};
use mountain::redirect::bpf::hooks::{self, DeviceHook, ProgramRun};
use mountain::redirect::{bpf, Backend, Installed, Plan, Proto, Rule, RuleDevice, Snat};
use testkit::{bring_up, sysctl};

use super::bpf::{ifindex, ip, run_program, Ctx, PASS, REDIRECT};
use super::support::tcx::loaded;
pub use super::support::tcx::redirect_program as program;

pub const XDP_PASS: i32 = 2;
pub const XDP_REDIRECT: i32 = 4;

/// Ethernet addresses: of the router's devices, of client and target.
pub const C0: [u8; 6] = [2, 0, 0, 0, 8, 17];
pub const S0: [u8; 6] = [2, 0, 0, 0, 1, 1];
pub const CLIENT: [u8; 6] = [2, 0, 0, 0, 8, 18];
pub const TARGET: [u8; 6] = [2, 0, 0, 0, 1, 2];

fn mac(m: [u8; 6]) -> String {
    m.map(|b| format!("{b:02x}")).join(":")
}

/// The devices of the router. Call it in a new namespace.
pub struct Router {
    pub client: RuleDevice,
    pub target: RuleDevice,
}

impl Router {
    pub fn new() -> Self {
        for (near, far, m, addresses) in [
            ("c0", "c1", C0, ["10.0.8.17/24", "fd08::17/64"]),
            ("s0", "s1", S0, ["10.0.1.1/24", "fd01::1/64"]),
        ] {
            let address = mac(m);
            ip(&format!(
                "link add {near} address {address} type veth peer name {far}"
            ));
            for conf in ["ipv4", "ipv6"] {
                sysctl(&format!("net/{conf}/conf/{near}/forwarding"), "1");
            }
            bring_up(far, &[]);
            bring_up(near, &addresses);
        }
        for (dev, address, m) in [
            ("c0", "10.0.8.18", CLIENT),
            ("c0", "fd08::18", CLIENT),
            ("s0", "10.0.1.2", TARGET),
            ("s0", "fd01::2", TARGET),
        ] {
            let lladdr = mac(m);
            ip(&format!(
                "neigh add {address} lladdr {lladdr} nud permanent dev {dev}"
            ));
        }
        Self::there()
    }

    /// The one that this namespace has.
    pub fn there() -> Self {
        let device = |name: &str| RuleDevice {
            ifindex: ifindex(name),
            name: name.to_owned(),
            peer: true,
        };
        Self {
            client: device("c0"),
            target: device("s0"),
        }
    }

    pub fn plan(&self, backend: Backend, snat: Option<IpAddr>) -> Plan {
        Plan {
            backend,
            client_dev: Some(self.client.clone()),
            target_dev: Some(self.target.clone()),
            snat,
            fixes: vec![],
        }
    }
}

/// `from` and `to` of the rules, with the port counted on by `n`.
pub fn rule(proto: Proto, ipv6: bool, n: u16) -> Rule {
    let from = SocketAddr::new(either(ipv6, "10.0.8.17", "fd08::17"), 8080 + n);
    let to = SocketAddr::new(either(ipv6, "10.0.1.2", "fd01::2"), 8083);
    Rule {
        snat: Snat::Never,
        ..Rule::new(proto, from, to)
    }
}

/// An address of one family.
pub fn either(ipv6: bool, v4: &str, v6: &str) -> IpAddr {
    if ipv6 { v6 } else { v4 }.parse().unwrap()
}

/// Rules for both protocols, both families.
pub fn rules() -> Vec<Rule> {
    let both = |proto| [rule(proto, false, 0), rule(proto, true, 0)];
    [both(Proto::Udp), both(Proto::Tcp)].concat()
}

/// The client, at a port.
pub fn client(ipv6: bool, port: u16) -> SocketAddr {
    SocketAddr::new(either(ipv6, "10.0.8.18", "fd08::18"), port)
}

fn installed(id: u32, rule: &Rule, plan: &Plan) -> Installed {
    Installed {
        id,
        rule: rule.clone(),
        plan: plan.clone(),
        fixed: true,
        fix: None,
    }
}

pub fn install(id: u32, rule: &Rule, plan: &Plan) -> anyhow::Result<()> {
    bpf::install(&[installed(id, rule, plan)])
}

pub fn remove(id: u32, rule: &Rule, plan: &Plan) -> anyhow::Result<()> {
    bpf::remove(&[installed(id, rule, plan)])
}

/// Adds the rules, with ids from 0 on.
pub fn install_all(rules: &[Rule], plan: &Plan) {
    let all = (0..).zip(rules).map(|(id, rule)| installed(id, rule, plan));
    bpf::install(&all.collect::<Vec<_>>()).unwrap();
}

/// A device, a hook of it, and the action of a program there.
pub type At = (&'static str, DeviceHook, i32);

/// Which program does it, and what becomes of the packet.
pub struct Way {
    pub backend: Backend,
    /// Device, hook and action in each direction.
    pub forward: At,
    pub reply: At,
}

const fn way(backend: Backend, forward: At, reply: At) -> Way {
    Way {
        backend,
        forward,
        reply,
    }
}

pub const TCX: Way = way(
    Backend::Tcx,
    ("c0", DeviceHook::TcxIngress, PASS),
    ("c0", DeviceHook::TcxEgress, PASS),
);
pub const TCX_PEER: Way = way(
    Backend::TcxPeer,
    ("c0", DeviceHook::TcxIngress, REDIRECT),
    ("s0", DeviceHook::TcxIngress, REDIRECT),
);
pub const XDP: Way = way(
    Backend::Xdp,
    ("c0", DeviceHook::Xdp, XDP_PASS),
    ("c0", DeviceHook::TcxEgress, PASS),
);
pub const XDP_AND_ON: Way = way(
    Backend::XdpRedirect,
    ("c0", DeviceHook::Xdp, XDP_REDIRECT),
    ("s0", DeviceHook::Xdp, XDP_REDIRECT),
);
/// What [`XDP_AND_ON`] leaves and the kernel has nothing to say to.
pub const AFTER_XDP: Way = way(
    Backend::XdpRedirect,
    ("c0", DeviceHook::TcxIngress, REDIRECT),
    ("s0", DeviceHook::TcxIngress, REDIRECT),
);

/// The action by which a packet goes on as if there were no program at the hook.
pub fn passing(hook: DeviceHook) -> i32 {
    match hook {
        DeviceHook::Xdp => XDP_PASS,
        _ => PASS,
    }
}

/// One BPF_PROG_RUN of the program at a hook.
pub fn run(hook: DeviceHook, dev: &str, packet: &[u8]) -> ProgramRun {
    let program = program(hook, dev).unwrap_or_else(|| panic!("no program at {hook:?} of {dev}"));
    hooks::run(hook, ifindex(dev), &program, packet, 1)
        .unwrap_or_else(|e| panic!("BPF_PROG_RUN of {} bytes at {hook:?}: {e}", packet.len()))
}

/// One BPF_PROG_RUN at the tcx ingress of a GSO packet, whose segments have so many bytes without their headers.
pub fn run_gso(dev: &str, packet: &[u8], gso_size: u32) -> ProgramRun {
    let program = program(DeviceHook::TcxIngress, dev).expect("no program at the ingress");
    let mut out = vec![0; packet.len() + 64];
    let ctx = Ctx::gso(gso_size);
    let run = run_program(program.as_fd(), ifindex(dev), packet, ctx, 1, &mut out);
    let (action, len, duration_ns) = run.expect("BPF_PROG_RUN");
    out.truncate(len);
    ProgramRun {
        action,
        packet: out,
        duration_ns,
    }
}

/// [`run`] without looking the program up; `None` when BPF_PROG_RUN does not take the packet.
pub fn try_run(
    program: &OwnedFd,
    hook: DeviceHook,
    device: u32,
    packet: &[u8],
) -> Option<ProgramRun> {
    match hooks::run(hook, device, program, packet, 1) {
        Ok(outcome) => Some(outcome),
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => None,
        Err(e) => panic!("BPF_PROG_RUN: {e}"),
    }
}

/// A map of the programs on the client's device.
pub fn map_named(name: &str) -> MapHandle {
    let programs = DeviceHook::ALL.map(|hook| loaded(hook, "c0"));
    let maps = programs.iter().flatten().flat_map(|p| &p.maps);
    let mut maps = maps.map(|id| MapHandle::from_map_id(*id).unwrap());
    maps.find(|m| m.name().to_str() == Some(name)).unwrap()
}
