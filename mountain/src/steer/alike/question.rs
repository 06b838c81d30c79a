// SPDX-License-Identifier: GPL-2.0-or-later
//! What is asked of the firewall: about which packets and devices, and in which respect they must not be told apart.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;

use crate::netlink::Link;
use crate::topology::{ByMark, Group, InnerNet, Path, Rewritable, Topology};

/// What is asked of the firewall.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Question {
    /// About IPv6 packets; otherwise IPv4.
    pub ipv6: bool,
    /// Indexes.
    pub devices: BTreeSet<u32>,
    /// In which respect.
    pub about: About,
    /// What must not be changed after routing, as rules of the FIB ask for it. With [`About::Leaving`]: after the uplink is
    /// chosen.
    pub unchanged: BTreeSet<Rewritable>,
    /// The addresses of this host's new flows, each with the index of the device by which they leave.
    pub sources: BTreeSet<(IpAddr, u32)>,
}

/// In which respect the firewall must not tell devices, or marks, apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum About {
    /// All that it does after routing.
    Running,
    /// Only what it does to source addresses: of flows that choose their uplink before they meet the firewall.
    Nat,
    /// Whether it lets packets of this host's new flows through by one device and not by another, gives them the same
    /// address on several, or sends them elsewhere than to the uplink whose address they have.
    Leaving,
    /// The same of packets from networks behind this host, which come in by this device; `None`: by any of several.
    Forwarding(Option<u32>),
    /// Whether it sends this host's new packets elsewhere by the device or the address by which they are about to leave: to a
    /// proxy, or into a VPN.
    Elsewhere {
        /// Whether rules of the FIB go by marks.
        by_mark: bool,
    },
    /// Whether it translates what comes from a network behind this host to anywhere.
    Source(InnerNet),
    /// Whether it forwards to other hosts what others send to an address of the devices.
    Published,
    /// Whether it takes these bits off the marks of forwarded packets or their connections.
    Lost(u32),
    /// What it does before routing to packets that bear marks of ours, where rules of the FIB go by marks.
    Marks {
        /// Those rules.
        by: ByMark,
        /// Packets of this host; otherwise forwarded ones.
        own: bool,
    },
    /// Whether it lets packets that bear marks of ours go on as it does others, to where it does.
    Ours {
        /// The bits of these marks.
        bits: u32,
        /// Packets of this host; otherwise forwarded ones.
        own: bool,
    },
}

impl Question {
    /// About the running flows of a group of a topology.
    pub(crate) fn of(group: &Group, topology: &Topology) -> Self {
        let paths = || group.members.iter().map(|m| &topology.paths[m.path]);
        Self {
            ipv6: paths().any(|path| path.key.ipv6),
            devices: paths().map(|path| path.key.ifindex).collect(),
            about: About::Running,
            unchanged: group.told_by.clone(),
            sources: BTreeSet::new(),
        }
    }

    /// Whether it is also about filters and programs at the egress of its devices. Only running flows that could move
    /// would miss these.
    pub(crate) fn is_of_egress(&self) -> bool {
        self.about == About::Running && self.devices.len() > 1
    }

    /// About the forwarded flows that begin in a group. They meet the whole firewall of their uplink, but where only
    /// the kernel's own choice is translated, they would leave another one untranslated.
    pub(crate) fn of_new(group: &Group, topology: &Topology) -> Self {
        Self {
            about: About::Nat,
            unchanged: BTreeSet::new(),
            ..Self::of(group, topology)
        }
    }

    /// About what leaves of the flows that begin in a group: where the kernel takes one path for all, another one must
    /// not stop what that lets through. `reserves` (indexes of paths) have flows only while the others are dead, and
    /// what they stop would not have arrived.
    pub(crate) fn of_leaving(
        group: &Group,
        topology: &Topology,
        reserves: &BTreeSet<usize>,
    ) -> Option<Self> {
        let members = group.members.iter().map(|member| member.path);
        let shared = members.filter(|path| !reserves.contains(path));
        let paths = shared.chain([group.preferred?]);
        let paths: Vec<&Path> = paths.map(|path| &topology.paths[path]).collect();
        let new = Self::of_new(group, topology);
        Some(Self {
            about: About::Leaving,
            devices: paths.iter().map(|path| path.key.ifindex).collect(),
            sources: addresses_of(&paths),
            unchanged: topology.rerouted_by[usize::from(new.ipv6)].clone(),
            ..new
        })
    }

    /// About [`About::Elsewhere`], of all members of a group. The reserves count, too: what a rule leads into a VPN must not
    /// leave by them.
    pub(crate) fn of_elsewhere(group: &Group, topology: &Topology) -> Self {
        let members = group.members.iter().map(|member| member.path);
        let paths: Vec<&Path> = members.map(|path| &topology.paths[path]).collect();
        let new = Self::of_new(group, topology);
        Self {
            about: About::Elsewhere {
                by_mark: topology.by_mark[usize::from(new.ipv6)].is_some(),
            },
            sources: addresses_of(&paths),
            ..new
        }
    }

    /// The addresses of this host's new flows that leave by a device.
    pub(super) fn sources_of(&self, device: &Link) -> impl Iterator<Item = IpAddr> + '_ {
        let index = device.ifindex;
        let of_device = move |(_, by): &&(IpAddr, u32)| *by == index;
        (self.sources.iter().filter(of_device)).map(|(source, _)| *source)
    }

    /// That address, where each device has a single one. Rules by address compare no known one with one that is open.
    pub(super) fn only_source_of(&self, device: &Link) -> Option<IpAddr> {
        let devices: BTreeSet<u32> = self.sources.iter().map(|(_, by)| *by).collect();
        let is_single = devices.len() == self.sources.len();
        self.sources_of(device).next().filter(|_| is_single)
    }

    /// About the networks behind this host whose flows begin in a group: whether they are translated, and whether their
    /// packets leave by all uplinks ([`Question::of_leaving`]).
    pub(crate) fn of_nets(
        group: &Group,
        topology: &Topology,
        reserves: &BTreeSet<usize>,
    ) -> Vec<NetQuestions> {
        let new = Self::of_new(group, topology);
        let leaving = Self::of_leaving(group, topology, reserves);
        let nets = topology.inner_nets.iter();
        let nets = nets.filter(|inner| inner.net.addr().is_ipv6() == new.ipv6);
        let ask = |question: &Self, about| Self {
            about,
            unchanged: BTreeSet::new(),
            ..question.clone()
        };
        nets.map(|inner| NetQuestions {
            net: inner.net,
            source: ask(&new, About::Source(*inner)),
            leaving: (leaving.as_ref())
                .map(|question| ask(question, About::Forwarding(inner.device))),
        })
        .collect()
    }

    /// About what comes in by the uplink that the kernel takes for all that begins in a group.
    pub(crate) fn of_published(group: &Group, topology: &Topology) -> Option<Self> {
        let preferred = &topology.paths[group.preferred?];
        let device = preferred.key.ifindex;
        Some(Self {
            about: About::Published,
            devices: BTreeSet::from([device]),
            sources: preferred.addresses.iter().map(|a| (*a, device)).collect(),
            ..Self::of_new(group, topology)
        })
    }

    /// About the marks by which the forwarded flows that begin in a group keep their path.
    pub(crate) fn of_lost(group: &Group, topology: &Topology) -> Self {
        Self {
            about: About::Lost(topology.our_bits),
            devices: BTreeSet::new(),
            ..Self::of_new(group, topology)
        }
    }

    /// About the marks of the flows that begin in a group: of this host's `own`, or of forwarded ones. Where no
    /// rule of the FIB goes by marks, nobody needs to be asked.
    pub(crate) fn of_marks(group: &Group, topology: &Topology, own: bool) -> Option<Self> {
        let question = Self::of_new(group, topology);
        let by = topology.by_mark[usize::from(question.ipv6)]?;
        Some(Self {
            about: About::Marks { by, own },
            devices: BTreeSet::new(),
            ..question
        })
    }

    /// Whether the marks of the flows that begin in a group, of this host's `own` or of forwarded ones, get them through
    /// the firewall, or stop them there.
    pub(crate) fn of_ours(group: &Group, topology: &Topology, own: bool) -> Self {
        let bits = topology.our_bits;
        Self {
            about: About::Ours { bits, own },
            devices: BTreeSet::new(),
            ..Self::of_new(group, topology)
        }
    }
}

/// The addresses of paths, each with the index of its device.
fn addresses_of(paths: &[&Path]) -> BTreeSet<(IpAddr, u32)> {
    let of_path = |path: &&Path| {
        let device = path.key.ifindex;
        let addresses = path.addresses.iter().copied();
        addresses
            .map(move |address| (address, device))
            .collect::<Vec<_>>()
    };
    paths.iter().flat_map(of_path).collect()
}

/// What is asked about a network behind this host.
pub(crate) struct NetQuestions {
    /// The network.
    pub net: IpNet,
    /// [`About::Source`].
    pub source: Question,
    /// [`About::Forwarding`].
    pub leaving: Option<Question>,
}
