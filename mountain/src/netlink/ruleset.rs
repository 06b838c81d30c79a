// SPDX-License-Identifier: GPL-2.0-or-later
//! The firewall: reads the rules of nftables and of legacy xtables, and says what they do to a
//! packet of which only some facts are known.
//!
//! # How to use it
//!
//! 1. [`Ruleset::read`] reads both kinds of rules of the calling thread's network namespace
//!    (blocking). [`Elements`] says which sets' elements are wanted.
//! 2. [`Ruleset::residue`] evaluates the base chains at a [`Place`] (family, hook, priorities) with
//!    the [`Facts`] known about the packet filled in and everything else left open. It follows
//!    jumps, gotos, sets and verdict maps. What remains is a [`Residue`], in a canonical form:
//!    names of chains and handles of rules do not count, but for the order of base chains of one priority.
//! 3. Compare: [`Residue::difference`] names the first rule by which two residues differ. Steering
//!    evaluates a hook once per member of a group and moves flows only where nothing differs.
//! 4. Or ask what could matter: [`Residue::effects`] lists every statement that such a packet may
//!    still meet (drop, NAT, mark, unknown...), each with its [`RuleRef`] (family, table, chain,
//!    handle, text). Redirects do so for the hooks that a backend skips:
//!
//!    ```no_run
//!    use mountain::netlink::ruleset::*;
//!    let rules = Ruleset::read(Elements::AllBut("mountain_redirect"))?;
//!    let facts = Facts {
//!        iif: DeviceFact::Known(Box::new(mountain::netlink::link(2)?)),
//!        protocol: Some(17),
//!        destination: Some("192.0.2.1".parse().unwrap()),
//!        destination_port: Some(53),
//!        ..Facts::default()
//!    };
//!    let place = Place::new(Packets::Ipv4, Hook::Prerouting).priorities(..=-200);
//!    for effect in rules.residue(&place, &facts).effects() {
//!        println!("{:?} by {}", effect.kind, effect.rule);
//!    }
//!    # Ok::<(), std::io::Error>(())
//!    ```
//!
//! 5. [`Ruleset::by_mark`] names a rule that goes by marks of packets or connections, [`Ruleset::takes_marks`] one that
//!    takes somebody's bits off them.
//! 6. [`hooks`] lists BPF programs at Netfilter's hooks, which no ruleset shows.
//! 7. [`changed`] tells whether a datagram of the nftables notification group concerns somebody
//!    else's tables; [`notifications`] opens the socket. Legacy xtables notify nobody: compare
//!    rulesets every few seconds.
//!
//! What only counts, logs or traces has no effect. `accept` and `return` are no effects either,
//! but end a chain as they do in the kernel. What cannot be evaluated (an unknown expression, a
//! match that may look at the device in a way not known here) is an effect of kind
//! [`EffectKind::Unknown`] wherever a packet may reach it, and so makes residues differ. Counting
//! on less would let packets around somebody's firewall.
//!
//! # Theory of operation
//!
//! `read` decodes nfnetlink dumps, `xtables` the tables that getsockopt gives. Both become the same
//! rules, lists of `expr::Expr`: legacy rules are written as what nftables would say. `eval` runs
//! them with `registers` in which each byte is either known or a named unknown, asks `sets` what
//! they say about such keys, and `residue` holds and compares what could not be decided. `text` prints rules for messages.
//!
//! Formats: linux/netfilter/nf_tables.h, linux/netfilter_ipv4/ip_tables.h; nft_*.c and xt_*.c.

mod edges;
mod eval;
mod expr;
mod facts;
pub mod hooks;
mod lost;
mod marks;
mod nat;
mod read;
mod registers;
mod residue;
mod sets;
mod targets;
#[cfg(test)]
pub(crate) mod tests;
mod text;
mod xt;
mod xtables;

use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Bound, RangeBounds};

use expr::{Expr, Verdict};

pub use edges::Edges;
pub use facts::{DeviceFact, Facts, MarkFact};
pub use marks::Strange;
pub use read::{changed, notifications, translates_sources, Changed, Elements};
pub use residue::{Effect, EffectKind, Residue};
pub use targets::Targets;
pub(crate) use xtables::{has_legacy, legacy_tables};

/// Where a table comes from, and which packets it sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    /// IPv4.
    Ip,
    /// IPv6.
    Ip6,
    /// IPv4 and IPv6.
    Inet,
    /// Hooks of single devices.
    Netdev,
    /// Frames that go through bridges.
    Bridge,
    /// Legacy iptables, legacy ip6tables.
    LegacyIp,
    /// Of IPv6.
    LegacyIp6,
}

impl Family {
    /// As in `nft list ruleset`; legacy tables by the program that shows them.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ip => "ip",
            Self::Ip6 => "ip6",
            Self::Inet => "inet",
            Self::Netdev => "netdev",
            Self::Bridge => "bridge",
            Self::LegacyIp => "iptables-legacy",
            Self::LegacyIp6 => "ip6tables-legacy",
        }
    }

    fn sees(self, packets: Packets) -> bool {
        match self {
            Self::Inet | Self::Netdev => true,
            // Not evaluated: which of them an IP packet meets depends on the way of its frame.
            Self::Bridge => false,
            Self::Ip | Self::LegacyIp => packets == Packets::Ipv4,
            Self::Ip6 | Self::LegacyIp6 => packets == Packets::Ipv6,
        }
    }
}

/// Points at which Netfilter sees a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Hook {
    /// Of a device, before IP (families netdev and inet).
    Ingress,
    /// Before routing of what comes in.
    Prerouting,
    /// After routing, for this host.
    Input,
    /// After routing, for another host.
    Forward,
    /// From a socket of this host.
    Output,
    /// When a packet is about to leave.
    Postrouting,
    /// Of a device, after IP (family netdev).
    Egress,
}

impl Hook {
    /// As nft(8) has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ingress => "ingress",
            Self::Prerouting => "prerouting",
            Self::Input => "input",
            Self::Forward => "forward",
            Self::Output => "output",
            Self::Postrouting => "postrouting",
            Self::Egress => "egress",
        }
    }
}

/// Those of families with IP, in the order of their numbers (NF_INET_*).
const HOOKS_OF_IP: [Hook; 6] = [
    Hook::Prerouting,
    Hook::Input,
    Hook::Forward,
    Hook::Output,
    Hook::Postrouting,
    Hook::Ingress,
];

/// Packets of one protocol, as they pass the hooks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packets {
    /// At the hooks of IPv4.
    Ipv4,
    /// At the hooks of IPv6.
    Ipv6,
}

impl Packets {
    /// Those of IP.
    pub fn of(ipv6: bool) -> Self {
        match ipv6 {
            false => Self::Ipv4,
            true => Self::Ipv6,
        }
    }
}

/// Kinds of base chains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chains {
    /// All.
    All,
    /// Those that translate addresses.
    Nat,
    /// All others.
    ButNat,
    /// Those after which the kernel routes a packet of this host again, where they have changed it
    /// (nft_chain_route.c, iptable_mangle.c).
    Rerouting,
    /// All but those.
    ButRerouting,
}

/// Which base chains are evaluated.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// The packets that chains see.
    pub packets: Packets,
    /// Where they see them.
    pub hook: Hook,
    /// Their priorities.
    pub priorities: (Bound<i32>, Bound<i32>),
    /// Of which kind they are.
    pub chains: Chains,
}

impl Place {
    /// All base chains at a hook.
    pub fn new(packets: Packets, hook: Hook) -> Self {
        Self {
            packets,
            hook,
            priorities: (Bound::Unbounded, Bound::Unbounded),
            chains: Chains::All,
        }
    }

    /// Only those of this kind.
    #[must_use]
    pub fn chains(mut self, chains: Chains) -> Self {
        self.chains = chains;
        self
    }

    /// Only those of these priorities.
    #[must_use]
    pub fn priorities(mut self, range: impl RangeBounds<i32>) -> Self {
        self.priorities = (range.start_bound().cloned(), range.end_bound().cloned());
        self
    }
}

/// A table's identity.
pub(crate) type TableId = (Family, String);

/// Everything that Netfilter is told to do, at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ruleset {
    pub(crate) tables: BTreeMap<TableId, FirewallTable>,
    /// Kernel's sets of xtables (`ipset`) may look at devices, or cannot be read.
    pub(crate) ipsets_by_device: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FirewallTable {
    /// Its base chains are not hooked in.
    pub dormant: bool,
    pub chains: BTreeMap<String, Chain>,
    pub sets: BTreeMap<String, Set>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Chain {
    pub base: Option<Base>,
    pub rules: Vec<FirewallRule>,
}

/// How a chain is hooked in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Base {
    pub hook: Hook,
    pub priority: i32,
    /// `filter`, `nat`, `route`.
    pub kind: String,
    /// Names of devices; of those that end in `*`, the beginning.
    pub devices: Vec<String>,
    /// The packet is dropped where no rule decides.
    pub drops: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FirewallRule {
    /// As in `nft --handle list`; of legacy chains, its number as in `iptables -L --line-numbers`.
    pub handle: u64,
    pub exprs: Vec<Expr>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Set {
    /// NFT_SET_*.
    pub flags: u32,
    pub key_len: usize,
    /// Of what a map has for a key, bytes.
    pub data_len: usize,
    /// Lengths of the parts of a concatenated key, bytes.
    pub fields: Vec<usize>,
    /// `None`: not read.
    pub elements: Option<Vec<Element>>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Element {
    pub key: Vec<u8>,
    /// Of a concatenation of ranges.
    pub key_end: Option<Vec<u8>>,
    /// NFT_SET_ELEM_*.
    pub flags: u32,
    pub value: Value,
    /// Limits and quotas of its own.
    pub limits: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Value {
    #[default]
    None,
    Data(Vec<u8>),
    Verdict(Verdict),
}

/// A rule, or a base chain's policy, as messages name it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RuleRef {
    /// Of its table.
    pub family: Family,
    /// The table that its chain is in.
    pub table: String,
    /// The chain that it is in.
    pub chain: String,
    /// `None`: the base chain's policy.
    pub handle: Option<u64>,
    /// The rule itself, much as `nft` prints it.
    pub text: String,
}

impl fmt::Display for RuleRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { table, chain, .. } = self;
        let family = self.family.name();
        match (self.handle, self.family) {
            (None, _) => write!(f, "the policy of chain {family} {table} {chain}"),
            (Some(number), Family::LegacyIp | Family::LegacyIp6) => {
                write!(f, "{family} -t {table} {chain}, rule {number}")
            }
            (Some(handle), _) => write!(f, "{family} {table} {chain} handle {handle}"),
        }?;
        write!(f, ": {}", self.text)
    }
}

impl Ruleset {
    /// Leaves out tables of these names, of whatever family: our own.
    #[must_use]
    pub(crate) fn without_tables(mut self, names: &[&str]) -> Self {
        self.tables
            .retain(|(_, name), _| !names.contains(&name.as_str()));
        self
    }

    /// Whether no chain is hooked in anywhere.
    pub fn is_empty(&self) -> bool {
        let mut chains = self.tables.values().flat_map(|table| table.chains.values());
        !chains.any(|chain| chain.base.is_some())
    }
}
