// SPDX-License-Identifier: GPL-2.0-or-later
//! Facts in, findings out: no look at the host from here on. `devices`: what they do to packets;
//! `host`: what the kernel and its firewall do.

mod devices;
mod host;

use std::net::{IpAddr, Ipv6Addr};

use crate::host::kernel;
use crate::netlink::RouteTo;
use crate::redirect::{self as types, Backend, Finding, Fix, Plan, Rule, Snat};

use super::facts::{Client, DeviceFacts, Far, HostFacts};

/// Source ports of packets whose source is rewritten.
const SNAT_PORTS: (u16, u16) = (61_000, 65_535);

/// One finding for each backend, fastest first; last the module, which is never chosen.
pub fn decide(rule: &Rule, facts: &HostFacts, fix: bool, in_force: &[Fix]) -> Vec<Finding> {
    let decide = |backend| {
        let mut case = Case {
            backend,
            rule,
            facts,
            fix,
            in_force,
            snat: None,
            fixes: Vec::new(),
            refused: Vec::new(),
            todo: Vec::new(),
            notes: Vec::new(),
            by_name_only: false,
        };
        case.look();
        case.finding()
    };
    Backend::ALL.into_iter().map(decide).collect()
}

/// A setting as a backend needs it.
struct Setting {
    /// It is so already.
    met: bool,
    /// Makes it so.
    fix: Fix,
    /// The command that does the same.
    by_hand: String,
}

/// One backend for one rule.
struct Case<'a> {
    backend: Backend,
    rule: &'a Rule,
    facts: &'a HostFacts,
    fix: bool,
    in_force: &'a [Fix],
    snat: Option<IpAddr>,
    fixes: Vec<Fix>,
    refused: Vec<String>,
    todo: Vec<String>,
    notes: Vec<String>,
    by_name_only: bool,
}

impl Case<'_> {
    fn finding(self) -> Finding {
        let device = |device: &DeviceFacts| types::RuleDevice {
            ifindex: device.link.ifindex,
            name: device.link.name.clone(),
            peer: matches!(&device.far, Far::End(end) if !end.here && end.link.master.is_none()),
        };
        let plan = Plan {
            backend: self.backend,
            client_dev: self
                .facts
                .client_device()
                .filter(|_| self.backend.is_bpf() || self.rule.dev.is_some())
                .map(device),
            target_dev: self.facts.target_device().map(device),
            snat: self.snat,
            fixes: self.fixes,
        };
        let possible = self.refused.is_empty();
        Finding {
            backend: self.backend,
            plan: possible.then_some(plan),
            refused: self.refused,
            todo: self.todo,
            by_name_only: possible && self.by_name_only,
            notes: self.notes,
        }
    }

    fn refuse(&mut self, why: impl Into<String>, todo: impl Into<String>) {
        let (why, todo) = (why.into(), todo.into());
        if !self.refused.contains(&why) {
            self.refused.push(why);
        }
        if !todo.is_empty() && !self.todo.contains(&todo) {
            self.todo.push(todo);
        }
    }

    fn note(&mut self, what: impl Into<String>) {
        let what = what.into();
        if !self.notes.contains(&what) {
            self.notes.push(what);
        }
    }

    /// It is not chosen where nobody asks for it.
    fn only_by_name(&mut self, why: &str) {
        self.by_name_only = true;
        self.note(format!(
            "{why}, so that only nft is chosen unless it is named"
        ));
    }

    fn skips(&mut self, what: &str) {
        self.only_by_name(&format!("{} skips {what}", self.backend));
    }

    /// A setting must be so. `why`: what is wrong where it is not.
    fn need(&mut self, setting: Setting, why: impl Into<String>) {
        let Setting { met, fix, by_hand } = setting;
        if met {
            let same = |other: &&Fix| other.same(&fix);
            if let Some(theirs) = self.in_force.iter().find(same) {
                self.add(theirs.clone());
            }
        } else if self.fix {
            self.note(format!("--fix: {by_hand}"));
            self.add(fix);
        } else {
            self.refuse(why, format!("{by_hand} (--fix does it)"));
        }
    }

    fn add(&mut self, fix: Fix) {
        if !self.fixes.contains(&fix) {
            self.fixes.push(fix);
        }
    }

    /// Goes around the kernel's forwarding. What gets another source by BPF is redirected, never
    /// passed.
    fn bypasses(&self) -> bool {
        let by_bpf = self.backend.is_bpf() && self.snat.is_some();
        by_bpf || matches!(self.backend, Backend::TcxPeer | Backend::XdpRedirect)
    }

    fn look(&mut self) {
        self.link_local();
        if let (Client::Missing(name), true) = (&self.facts.client, self.refused.is_empty()) {
            let todo = "list the devices: ip link";
            self.refuse(format!("there is no device {name}"), todo);
        }
        if self.refused.is_empty() {
            self.target();
        }
        if !self.refused.is_empty() {
            // All else would only repeat that.
            return;
        }
        self.source();
        match self.backend {
            Backend::Nft => self.nft(),
            Backend::Module => self.module(),
            _ => self.bpf(),
        }
        if let RouteTo::Out { .. } = self.facts.route {
            self.forwarding();
        }
        self.firewall();
        self.others();
        self.notes_on_ways();
    }

    /// Rules of other addresses that stand for no one host are refused before (`validate`). Clients may send to such an
    /// address, as to the metadata service of a cloud.
    fn link_local(&mut self) {
        let to = self.rule.to.ip();
        if matches!(to, IpAddr::V4(v4) if v4.is_link_local()) {
            self.refuse(
                format!("{to} is valid on one link only, and no router sends packets there"),
                "let the server listen on another address",
            );
        }
    }

    fn target(&mut self) {
        let to = self.rule.to.ip();
        let local = matches!(self.facts.route, RouteTo::Host);
        if matches!(self.facts.route, RouteTo::Nowhere | RouteTo::Broadcast) {
            self.refuse(
                format!("this host has no route to {to}"),
                format!("ip route add {to} via ROUTER"),
            );
        } else if self.rule.from.ip().is_loopback() && !to.is_loopback() {
            self.refuse(
                format!(
                    "only this host itself sends to {}, from a loopback address, and replies from {to} \
                     would not come back to that",
                    self.rule.from.ip()
                ),
                "redirect another address of this host",
            );
        } else if to.is_loopback() && !self.rule.from.ip().is_loopback() {
            match (self.backend, to) {
                (Backend::Nft, IpAddr::V4(_)) => self.route_localnet(),
                (_, IpAddr::V6(_)) => self.refuse(
                    format!("the kernel takes packets for {to} from this host only"),
                    "let the server listen on another address of this host",
                ),
                _ => self.refuse(
                    format!("a rewritten packet to the loopback address {to} would be dropped as a martian"),
                    "let the server listen on another address of this host, or use nft",
                ),
            }
        } else if local && self.bypasses() {
            self.refuse(
                format!("{to} is on this host: there is no device to send on"),
                "use xdp, tcx or nft",
            );
        }
    }

    fn route_localnet(&mut self) {
        let Some(client) = self.facts.client_device() else {
            return self.refuse(
                "a loopback target needs to know by which device clients come in",
                "name the device clients come in by: --dev",
            );
        };
        if client.link.loopback {
            return;
        }
        let name = &client.link.name;
        if let Some(other) = self.facts.no_localnet.first() {
            // Clients of those would lose what they had.
            self.refuse(
                format!(
                    "without a device it also takes what comes in by {other}, which drops what goes to a loopback address"
                ),
                format!("name the device clients come in by: --dev {name}"),
            );
        }
        self.note(format!(
            "route_localnet lets hosts behind {name} reach everything that listens on 127.0.0.0/8"
        ));
        let now = u32::from(client.sysctls.route_localnet);
        self.need(
            conf("ipv4", name, "route_localnet", Some(now)),
            format!("{name} drops what goes to a loopback address (route_localnet = 0)"),
        );
    }

    /// Whether the source address is rewritten too.
    fn source(&mut self) {
        let rule = self.rule;
        let RouteTo::Out {
            first,
            devices,
            source,
            ..
        } = &self.facts.route
        else {
            if rule.snat == Snat::Always {
                self.note("the target is on this host: the source address stays as it is");
            }
            return;
        };
        let client = self.facts.client_device();
        let hairpin = client.is_some_and(|c| devices.contains(&c.link.ifindex));
        let device = self.facts.device(first.ifindex);
        let own = || {
            let addresses = device.into_iter().flat_map(|d| &d.addresses).copied();
            let mut usable = addresses.filter(|a| a.is_ipv4() == rule.to.is_ipv4());
            usable.find(|a| !matches!(a, IpAddr::V6(v6) if v6.is_unicast_link_local()))
        };
        let source = &source.map(|source| lasting(source, device));
        let name = device.map_or("it", |d| &d.link.name);
        match rule.snat {
            // Clients come in by any device, and nft tells those apart that come in by the target's.
            Snat::Auto if self.backend == Backend::Nft && rule.dev.is_none() => {
                self.snat = source.or_else(own);
                if let (Some(address), true) = (self.snat, hairpin) {
                    self.note(format!(
                        "packets to {} of clients that come in by {name} get the source {address}",
                        rule.to
                    ));
                }
                return;
            }
            Snat::Auto if !hairpin => return,
            Snat::Never => {
                if hairpin {
                    self.note(format!(
                        "{} is reached by the device that clients come in by, and --snat is never: \
                         replies reach clients only if {0} sends them through this host",
                        rule.to.ip()
                    ));
                }
                return;
            }
            Snat::Auto | Snat::Always => {}
        }
        self.rewrite_source(source.or_else(own), name, devices.len());
    }

    /// The source address has to be `address`, of the device `name`; `None`: it has none. The target is
    /// reached by so many devices.
    fn rewrite_source(&mut self, address: Option<IpAddr>, name: &str, devices: usize) {
        if self.backend == Backend::Module {
            return self.refuse(
                "the source address has to be rewritten, and the module keeps no flows by which to put \
                 it back in replies",
                "use tcx or nft; or --snat never, where replies come back through this host anyway",
            );
        }
        let Some(address) = address else {
            return self.refuse(
                format!("the source address has to be rewritten, and {name} has none to offer"),
                format!("ip addr add ADDRESS dev {name}"),
            );
        };
        self.snat = Some(address);
        self.note(format!(
            "packets to {} get the source {address}",
            self.rule.to
        ));
        if self.backend == Backend::Nft {
            return;
        }
        self.only_by_name("a target has few source ports for rewritten clients");
        if matches!(self.backend, Backend::Xdp | Backend::TcxPeer) {
            self.refuse(
                format!(
                    "the source address has to be rewritten, and {} cannot: the kernel drops packets \
                     that come in from an address of its own",
                    self.backend
                ),
                "use xdp-redirect, tcx or nft; or --snat never, where replies come back through this \
                 host anyway",
            );
        }
        if devices > 1 {
            self.refuse(
                "the source address has to be rewritten, and the route to the target has several \
                 devices, of which only one would be served",
                "use nft, or give the target a route of its own",
            );
        }
        let ours = |(first, last): &(u16, u16)| *first <= SNAT_PORTS.1 && *last >= SNAT_PORTS.0;
        if let Some((first, last)) = self.facts.host.local_ports.filter(ours) {
            self.note(format!(
                "sockets of this host take ports {first} to {last}, rewritten packets {} to {}: \
                 sysctl -w net.ipv4.ip_local_port_range='{first} {}' keeps them apart",
                SNAT_PORTS.0,
                SNAT_PORTS.1,
                SNAT_PORTS.0 - 1
            ));
        }
    }

    fn nft(&mut self) {
        if !self.facts.nft {
            self.refuse("nft is not installed", "apt install nftables");
        }
        let Some(client) = self.facts.client_device() else {
            return;
        };
        if self.rule.dev.is_none() {
            return;
        }
        if client.link.loopback {
            self.refuse(
                format!("no client comes in by {}", client.link.name),
                "leave --dev out: then what this host itself sends is redirected, too",
            );
        }
        // Of a VRF's port nftables sees the port's name first.
        match &client.master {
            Some((kind, master)) if kind != "vrf" => self.refuse(
                format!(
                    "{} is a port of {master}, by which nftables sees its packets come in",
                    client.link.name
                ),
                format!("name that: --dev {master}"),
            ),
            _ => {}
        }
    }

    fn module(&mut self) {
        if !self.facts.module {
            self.refuse(
                "the kernel module mountain_redirect is not loaded",
                "modprobe mountain_redirect; kernel.md of the documentation says how to build it",
            );
        }
        if self.rule.from.ip().is_loopback() {
            return self.refuse(
                format!(
                    "only this host itself sends to {}, and only nft redirects that",
                    self.rule.from.ip()
                ),
                "use nft",
            );
        }
        self.by_name_only = true;
        self.note(format!(
            "whoever speaks to {} directly, through this host, gets answers from {}, too: the module \
             keeps no flows",
            self.rule.to, self.rule.from
        ));
        self.note("ICMP errors about redirected flows are not translated");
        self.note(format!(
            "what this host itself sends to {} is not redirected",
            self.rule.from
        ));
    }

    fn bpf(&mut self) {
        self.kernel();
        let from = self.rule.from.ip();
        if from.is_loopback() {
            return self.refuse(
                format!("only this host itself sends to {from}, and only nft redirects that"),
                "use nft",
            );
        }
        let Some(client) = self.facts.client_device() else {
            return self.refuse(
                format!("no device by which clients come in holds {from}"),
                "name the device clients come in by: --dev",
            );
        };
        let name = &client.link.name;
        if client.link.receives_nothing() {
            return self.refuse(
                format!("no client comes in by {name}"),
                "name the device clients come in by: --dev",
            );
        }
        self.note(format!(
            "only what comes in by {name} is redirected, not what this host itself sends to {}",
            self.rule.from
        ));
        if !self.facts.from_here {
            self.note(format!(
                "{from} is not an address of this host: clients have to be routed through it"
            ));
        }
        let target = self.facts.target_device();
        for device in [Some(client), target].into_iter().flatten() {
            self.port(device);
            if !device.link.up {
                self.note(format!("{} is down or has no carrier", device.link.name));
            }
            if !device.tcx.is_empty() && !self.bypasses() {
                self.note(format!(
                    "other BPF programs at tcx on {}: {}; they see packets as this rule has rewritten them",
                    device.link.name,
                    device.tcx.join(", ")
                ));
            }
        }
        // The programs parse from the Ethernet header on; what is only routed out needs none.
        let direct = self.bypasses() || self.snat.is_some();
        let devices = [Some(client), target.filter(|_| direct)];
        let headerless = devices.into_iter().flatten().find(|d| !d.link.ethernet);
        if let Some(device) = headerless {
            return self.refuse(
                format!(
                    "{} has no Ethernet headers: packets redirected from or to it are lost",
                    device.link.name
                ),
                "use nft",
            );
        }
        if let (Some(target), true) = (target, self.snat.is_some()) {
            self.one_size(client, target);
        }
        match (self.backend, target) {
            (Backend::Xdp, _) => self.receives_by_xdp(client),
            (Backend::XdpRedirect, Some(target)) => self.xdp_redirect(client, target),
            (Backend::TcxPeer, Some(target)) => self.tcx_peer(client, target),
            _ => {}
        }
    }

    fn kernel(&mut self) {
        let (major, minor) = kernel::OLDEST;
        match self.facts.kernel {
            Some(version) if version >= kernel::OLDEST => {}
            Some((a, b)) => self.refuse(
                format!("the kernel ({a}.{b}) is older than {major}.{minor} and has no tcx hook"),
                "install a newer kernel, or use nft",
            ),
            None => self.note(format!(
                "the kernel's version is not understood; tcx needs {major}.{minor}"
            )),
        }
        if let Some(why) = &self.facts.host.bpf_refused {
            self.refuse(
                format!("this process may not use bpf(): {why}"),
                "run as root, not in a container or unit that forbids it; or use nft",
            );
        }
        if !self.facts.btf {
            self.refuse(
                "/sys/kernel/btf/vmlinux is missing",
                "use a kernel with CONFIG_DEBUG_INFO_BTF=y, and mount /sys; or use nft",
            );
        }
    }

    /// Devices that are ports of another one.
    fn port(&mut self, device: &DeviceFacts) {
        let Some((kind, master)) = &device.master else {
            return;
        };
        let name = &device.link.name;
        let kind = if kind.is_empty() { "device" } else { kind };
        self.refuse(
            format!(
                "{name} is a port of the {kind} {master}, which routes and answers in its place"
            ),
            match kind {
                "vrf" => "use nft".to_owned(),
                _ => format!("name the {kind}: --dev {master}, or use nft"),
            },
        );
    }
}

/// An address of the same subnet in the place of a temporary one (RFC 8981), which the kernel prefers for
/// connections of its own.
fn lasting(source: IpAddr, device: Option<&DeviceFacts>) -> IpAddr {
    let IpAddr::V6(v6) = source else {
        return source;
    };
    let subnet = |address: &Ipv6Addr| address.octets()[..8] == v6.octets()[..8];
    let Some(device) = device.filter(|d| d.passing.contains(&source)) else {
        return source;
    };
    let is_near = |address: &IpAddr| matches!(address, IpAddr::V6(a) if subnet(a));
    let mut lasting = device
        .addresses
        .iter()
        .filter(|a| !device.passing.contains(a));
    lasting.find(|a| is_near(a)).copied().unwrap_or(source)
}

/// A switch of the kernel, on.
fn sysctl(path: &str, now: Option<u32>) -> Setting {
    // sysctl(8) takes slashes where a name may hold dots.
    let key = match path.contains('.') {
        false => path.replace('/', "."),
        true => path.to_owned(),
    };
    Setting {
        met: now == Some(1),
        fix: Fix::Sysctl {
            path: path.to_owned(),
            before: now.unwrap_or(0).to_string(),
            value: "1".to_owned(),
        },
        by_hand: format!("sysctl -w {key}=1"),
    }
}

fn conf(family: &str, device: &str, name: &str, now: Option<u32>) -> Setting {
    sysctl(&format!("net/{family}/conf/{device}/{name}"), now)
}
