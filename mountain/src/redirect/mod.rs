// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain redirect`: UDP and TCP traffic to one address:port goes to another one.
//!
//! Theory of operation. A [`Rule`] says what; [`preflight`] looks at the devices that are involved
//! and decides, for each [`Backend`], whether it would be correct there, and with what [`Plan`];
//! [`nft`], [`bpf`] and [`module`] carry a plan out and take it back; [`store`] remembers what is installed in
//! this network namespace, so that `list` and `del` find it, and undoes what a killed command has
//! left half done. What moves packets lives in the kernel only (an nftables table of ours, programs
//! attached to devices): rules outlive the command.
//!
//! A rule whose backend is chosen automatically is always carried out by nft, which honours whatever
//! firewall this host has or gets. [`watch`] puts a faster backend on top of it while it watches the
//! firewall ([`bpf::fast`]); that one ends with the process.

pub mod actions;
pub mod bpf;
pub(crate) mod config;
pub mod fixes;
mod module;
pub(crate) mod nft;
pub mod preflight;
mod recover;
pub(crate) mod store;
pub(crate) mod validate;
pub(crate) mod watch;

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use crate::netlink::conntrack::Redirected;

/// Most rules of one network namespace, all backends together.
pub const MAX_RULES: usize = 65_536;

/// Writes what stands for a value on the command line.
fn display(value: &impl clap::ValueEnum, f: &mut fmt::Formatter) -> fmt::Result {
    let value = value.to_possible_value().ok_or(fmt::Error)?;
    f.write_str(value.get_name())
}

/// A transport protocol that can be redirected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
// The names say it all, and `--help` would show comments on them.
#[allow(missing_docs)]
pub enum Proto {
    Udp,
    Tcp,
}

impl Proto {
    /// Its number in IP headers.
    pub fn number(self) -> u8 {
        match self {
            Self::Udp => libc::IPPROTO_UDP as u8,
            Self::Tcp => libc::IPPROTO_TCP as u8,
        }
    }
}

impl fmt::Display for Proto {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        display(self, f)
    }
}

/// What moves the packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Backend {
    /// Destination NAT by nftables, with connection tracking: slowest, and right everywhere.
    Nft,
    /// BPF at tcx: rewritten at ingress, routed and filtered by the kernel, replies rewritten at
    /// egress.
    Tcx,
    /// BPF at tcx: rewritten and handed straight into the network namespace behind a veth.
    TcxPeer,
    /// BPF at XDP: rewritten before the kernel has made a packet of it, then routed by the kernel;
    /// replies as with tcx.
    Xdp,
    /// BPF at XDP: rewritten and sent on to the other device at once.
    XdpRedirect,
    /// The kernel module mountain_redirect (kernel/module): rewritten at Netfilter's hooks, without
    /// connection tracking.
    Module,
}

impl Backend {
    /// All of them, the fastest first, and last the module, which is never chosen. Records in the store name a backend
    /// by its place here.
    pub const ALL: [Self; 6] = [
        Self::XdpRedirect,
        Self::TcxPeer,
        Self::Xdp,
        Self::Tcx,
        Self::Nft,
        Self::Module,
    ];

    /// It is made of the programs of bpf/redirect/redirect.bpf.c.
    pub(crate) fn is_bpf(self) -> bool {
        !matches!(self, Self::Nft | Self::Module)
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        display(self, f)
    }
}

/// Whether the source address is rewritten too, so that replies come back through this host.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "kebab-case")]
pub enum Snat {
    /// If the target is behind the device that clients come in by (a hairpin). It would answer them
    /// directly, from an address that they never spoke to.
    #[default]
    Auto,
    /// For every client.
    Always,
    /// For none. The target's replies have to come back through this host by routing.
    Never,
}

/// What a user asks for.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Rule {
    /// Protocol of the packets that it takes.
    pub proto: Proto,
    /// Where clients send to.
    pub from: SocketAddr,
    /// Where their packets go; of the same family.
    pub to: SocketAddr,
    /// The device that clients come in by; `None`: nft takes all, the others the device that holds
    /// the address of `from`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dev: Option<String>,
    /// For which clients the source address is rewritten.
    #[serde(default)]
    pub snat: Snat,
    /// Log lines a second, at most; `None`: no log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<u32>,
}

impl Rule {
    /// For clients that come in by whatever device; all else is as by default.
    pub fn new(proto: Proto, from: SocketAddr, to: SocketAddr) -> Self {
        Self {
            proto,
            from,
            to,
            dev: None,
            snat: Snat::default(),
            log: None,
        }
    }

    /// What connection tracking shows of its flows.
    pub fn redirected(&self) -> Redirected {
        Redirected {
            proto: self.proto.number(),
            from: self.from,
            to: self.to,
        }
    }

    /// Two rules with the same key would redirect the same packets.
    pub fn key(&self) -> (Proto, SocketAddr, Option<&str>) {
        (self.proto, self.from, self.dev.as_deref())
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} {} => {}", self.proto, self.from, self.to)?;
        match &self.dev {
            Some(dev) => write!(f, " in by {dev}"),
            None => Ok(()),
        }
    }
}

/// A device of this network namespace.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RuleDevice {
    /// Its index. A device that was deleted and made again has another.
    pub ifindex: u32,
    /// As ip(8) shows it.
    pub name: String,
    /// It is a veth whose far end is in another network namespace and no port of a bridge:
    /// `bpf_redirect_peer()` works.
    #[serde(default)]
    pub peer: bool,
}

/// A setting of a device that a backend needs, and what it was before.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Fix {
    /// An offload feature of a device, which may be the far end of a veth in another network
    /// namespace.
    Feature {
        /// Inode of the network namespace of the device.
        namespace: u64,
        /// The device whose feature is set.
        device: RuleDevice,
        /// One bit by the kernel's name, which `ethtool -K` takes too: `tx-checksum-ip-generic`,
        /// `rx-gro`.
        feature: String,
        /// What it is set to.
        on: bool,
    },
    /// A sysctl, by its path below /proc/sys, e.g. `net/ipv4/ip_forward`.
    Sysctl {
        /// Below /proc/sys.
        path: String,
        /// What it was, to be put back.
        before: String,
        /// What it is set to.
        value: String,
    },
}

/// How a rule is carried out on this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// What moves the packets.
    pub backend: Backend,
    /// The device that clients come in by; always there for BPF backends.
    pub client_dev: Option<RuleDevice>,
    /// The device that the target is reached by; `None`: the target is on this host.
    pub target_dev: Option<RuleDevice>,
    /// The source address that packets to the target get, of this host; `None`: the client's stays.
    pub snat: Option<IpAddr>,
    /// What has to be changed first, by `--fix` only; undone by `del` of the last rule that needs it.
    #[serde(default)]
    pub fixes: Vec<Fix>,
}

/// A rule in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Installed {
    /// Number of the rule, 0..[`MAX_RULES`]: smallest free one. Statistics are kept by it.
    pub id: u32,
    /// As the user asked for it.
    pub rule: Rule,
    /// How it is carried out.
    pub plan: Plan,
    /// The user named the backend. Otherwise the plan is by nft, and `redirect watch` may put a
    /// faster backend on top of it for as long as it runs.
    #[serde(default)]
    pub fixed: bool,
    /// The user gave `--fix`. Its plan may hold fixes without it: those that it shares with other rules. (`None`: of an
    /// earlier version, which did not say.)
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fix: Option<bool>,
}

impl Installed {
    /// Whether settings may be changed for it.
    pub(crate) fn may_fix(&self) -> bool {
        self.fix.unwrap_or(!self.plan.fixes.is_empty())
    }

    /// The device whose clients alone get another source: those on the target's side (a hairpin).
    pub(crate) fn hairpin(&self) -> Option<&str> {
        match (self.rule.snat, self.plan.backend, &self.plan.target_dev) {
            (Snat::Auto, Backend::Nft, Some(target)) if self.rule.dev.is_none() => {
                Some(&target.name)
            }
            _ => None,
        }
    }
}

#[cfg(test)]
impl Installed {
    /// For tests: UDP by nft, to 192.0.2.9:99, and nothing special.
    pub(crate) fn plain(id: u32, from: &str) -> Self {
        let to = "192.0.2.9:99".parse().unwrap();
        let plan = Plan {
            backend: Backend::Nft,
            client_dev: None,
            target_dev: None,
            snat: None,
            fixes: Vec::new(),
        };
        Self {
            id,
            rule: Rule::new(Proto::Udp, from.parse().unwrap(), to),
            plan,
            fixed: false,
            fix: Some(false),
        }
    }
}

/// A rule as `redirect list --json` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedRule {
    /// The rule.
    #[serde(flatten)]
    pub installed: Installed,
    /// Nothing else has removed what carries it out.
    pub active: bool,
    /// What moves its packets at the moment.
    pub carried_by: Backend,
    /// Why it may never redirect anything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub never_because_of: Option<String>,
    /// What becomes of its packets, as its device is gone or called otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strayed: Option<String>,
}

/// A rule as `redirect stats --json` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CountedRule {
    /// What it has done.
    #[serde(flatten)]
    pub stats: Stats,
    /// As the user asked for it.
    pub rule: Rule,
    /// Of the rule's plan.
    pub backend: Backend,
    /// Nothing else has removed what carries it out, and with it what was counted.
    pub active: bool,
}

/// Packets and bytes (network layer) in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// How many packets.
    pub packets: u64,
    /// Their bytes, from the network header on.
    pub bytes: u64,
}

/// What a rule has done since it was added.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// The rule's [`Installed::id`].
    pub id: u32,
    /// From clients to the target.
    pub forward: Traffic,
    /// From the target to clients.
    pub reply: Traffic,
    /// Packets that were not redirected although the rule names them, by reason.
    pub drops: std::collections::BTreeMap<String, u64>,
}

impl Stats {
    /// Of a rule that has done nothing.
    pub(crate) fn of(id: u32) -> Self {
        Self {
            id,
            ..Self::default()
        }
    }
}

/// What [`preflight`] found about one backend.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// The one that was looked at.
    pub backend: Backend,
    /// How it would be done; `None` when it is refused.
    pub plan: Option<Plan>,
    /// Why it is refused: it would lose or corrupt packets, or cannot work here.
    pub refused: Vec<String>,
    /// What would make it possible; `--fix` does it where the plan's `fixes` name it.
    pub todo: Vec<String>,
    /// It is possible, and only when asked for by name: `auto` must not choose it, as it goes around
    /// something that this host relies on; a note says what.
    pub by_name_only: bool,
    /// What one should know when it is used.
    pub notes: Vec<String>,
}
