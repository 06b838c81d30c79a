// SPDX-License-Identifier: GPL-2.0-or-later
//! Whether the firewall treats the devices of a group alike.
//!
//! A moved packet has passed OUTPUT, FORWARD and POSTROUTING for the device that the kernel chose, and
//! that device's egress hook. It meets none of them for the device that it really leaves by. So flows
//! move only where every rule at these hooks does the same for all devices of the group. What only
//! counts, logs or traces is no difference; what cannot be evaluated is one.
//!
//! Filters of traffic control and programs at tcx are not evaluated at all: with one at the egress of a device of a
//! group, its flows do not move.
//!
//! Besides, the steering program asks the packet which FIB rule has routed it. A mark or a TOS that the firewall has
//! changed since would give the wrong answer, so flows do not move where such rules matter. The same holds for an address
//! or a port that something else than NAT has changed: the program knows of NAT. What a flow table sends on bears no mark
//! and no TOS that the firewall would have set before routing.
//!
//! Of new flows it is asked whether their marks change what the firewall does before routing, whether it
//! translates their sources, whether it lets the same packets leave by all uplinks, and their answers come in (`leaving`),
//! and whether it has the kernel route them again (`rerouted`). Programs at its hooks and filters of traffic control are not
//! evaluated for those.

mod leaving;
mod marks;
mod question;
mod rerouted;
mod translated;

pub(crate) use question::{About, Question};

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use libc::IPPROTO_UDP;
use serde::{Deserialize, Serialize};

use crate::netlink::ruleset::{
    Chains, DeviceFact, Effect, EffectKind, Facts, Hook, Packets, Place, Residue, Ruleset, Targets,
};
use crate::netlink::Link;
use crate::topology::Rewritable;

/// Everything that judges packets after routing, at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Firewall {
    /// All tables of nftables and of legacy iptables.
    pub ruleset: Ruleset,
    /// Every device that rules can ask about.
    pub devices: Vec<Link>,
    /// Where a BPF program sees packets, of IPv4 and of IPv6.
    pub bpf: [Option<Hook>; 2],
    /// By device, of those that were asked about: what others have at its egress, in words. The steering program sends a
    /// packet on before it meets that of the kernel's device, and into that of the device which it chooses.
    pub egress: BTreeMap<u32, String>,
}

/// Why flows are not moved between the devices of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    /// For people.
    pub what: String,
    /// The rule, where it is one.
    pub rule: Option<String>,
    /// Of [`About::Published`]: to whom, if that is known. `others` are those to whom datagrams are forwarded.
    #[serde(skip)]
    pub targets: Option<Targets>,
}

impl Difference {
    /// Why there is no answer yet: nothing has been read so far, or a device has come or gone since. It takes milliseconds,
    /// and is not worth a message.
    pub(crate) fn reading() -> Self {
        Self::new("the firewall is being read")
    }

    /// Whether there is only no answer yet.
    pub(crate) fn is_reading(&self) -> bool {
        *self == Self::reading()
    }

    /// One that no rule is the reason of.
    pub(crate) fn new(what: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            rule: None,
            targets: None,
        }
    }

    /// One that this rule is the reason of.
    fn by(rule: &impl fmt::Display, what: impl Into<String>) -> Self {
        Self {
            rule: Some(rule.to_string()),
            ..Self::new(what)
        }
    }
}

impl Firewall {
    /// The first difference that the firewall makes between the devices.
    pub(crate) fn difference(&self, question: &Question) -> Option<Difference> {
        match question.about {
            About::Marks { by, own } => return self.marks(question.ipv6, by, own),
            About::Ours { bits, own } => return self.ours(question.ipv6, bits, own),
            About::Lost(ours) => return self.lost(question.ipv6, ours),
            About::Published => return self.published(question),
            _ => {}
        }
        // One that is left alone is asked about what it may not do whatever the others may.
        let is_absolute = matches!(
            question.about,
            About::Leaving | About::Forwarding(_) | About::Source(_)
        );
        if question.devices.len() < 2 && !is_absolute {
            return None;
        }
        match question.about {
            About::Elsewhere { by_mark } => return self.sent_elsewhere(question, by_mark),
            About::Leaving => {
                let leaving = self.leaving(question, Hook::Output, &DeviceFact::Absent);
                return leaving.or_else(|| self.rerouting(question));
            }
            About::Forwarding(device) => {
                return match self.inner_device(device) {
                    Some(from) => self.leaving(question, Hook::Forward, &from),
                    None => Some(Difference::reading()),
                }
            }
            _ => {}
        }
        // A program at these hooks cannot translate.
        let by_nat = question.about != About::Running;
        if let Some(hook) = self.bpf[usize::from(question.ipv6)].filter(|_| !by_nat) {
            return Some(Difference::new(format!(
                "a BPF program at Netfilter's {} hook may judge packets by their device",
                hook.name()
            )));
        }
        // That of the first device that has anything.
        let mut devices = question.devices.iter().filter(|_| !by_nat);
        if let Some(what) = devices.find_map(|index| self.egress.get(index)) {
            return Some(Difference::new(format!(
                "{what} may judge packets by their device"
            )));
        }
        let source = match question.about {
            About::Source(inner) => Some(inner),
            _ => None,
        };
        if self.ruleset.is_empty() && source.is_none() {
            return None;
        }
        let Some(devices) = self.devices_of(question) else {
            return Some(Difference::reading());
        };
        let place = |hook: Hook| Place::new(Packets::of(question.ipv6), hook);
        if by_nat {
            let nat = place(Hook::Postrouting).chains(Chains::Nat);
            let Some(inner) = source else {
                return unlike(&devices, |device| {
                    let residue = self.ruleset.residue(&nat, &facts(nat.hook, device));
                    residue.translating()
                });
            };
            let Some(from) = self.inner_device(inner.device) else {
                return Some(Difference::reading());
            };
            return self.untranslated(inner.net, &from, &nat, &devices);
        }
        AFTER_ROUTING
            .into_iter()
            .find_map(|hook| at_place(&self.ruleset, place(hook), &devices))
            .or_else(|| self.rewriting(question, devices.first()?))
    }

    fn device(&self, index: u32) -> Option<&Link> {
        self.devices.iter().find(|device| device.ifindex == index)
    }

    /// Those that a question names; `None` when one of them is gone.
    fn devices_of(&self, question: &Question) -> Option<Vec<&Link>> {
        let devices = question.devices.iter();
        devices.map(|index| self.device(*index)).collect()
    }

    /// By what packets from within come in, as a network or a question names it; `None` when that is gone.
    fn inner_device(&self, device: Option<u32>) -> Option<DeviceFact> {
        match device {
            Some(index) => Some(DeviceFact::Known(Box::new(self.device(index)?.clone()))),
            None => Some(DeviceFact::Open),
        }
    }

    /// The first rule that forwards to another host (DNAT) what comes in by one of these devices for an address of theirs,
    /// and all such hosts. A rule that forwards no datagrams counts only where it names the host.
    fn published(&self, question: &Question) -> Option<Difference> {
        if self.ruleset.is_empty() {
            return None;
        }
        let Some(devices) = self.devices_of(question) else {
            return Some(Difference::reading());
        };
        let packets = Packets::of(question.ipv6);
        let nat = Place::new(packets, Hook::Prerouting).chains(Chains::Nat);
        let found = |protocol: Option<u8>| {
            let residues = devices.iter().flat_map(|device| {
                let mut known = Vec::from_iter(question.sources_of(device).map(Some));
                if known.is_empty() || known.len() > SOURCES_MAX {
                    known = vec![None];
                }
                known.into_iter().map(|destination| {
                    let facts = Facts {
                        iif: DeviceFact::Known(Box::new((*device).clone())),
                        protocol,
                        destination,
                        begins: true,
                        ..Facts::default()
                    };
                    self.ruleset.residue(&nat, &facts)
                })
            });
            let residues = Vec::from_iter(residues);
            let forwards =
                |effect: &Effect| matches!(effect.kind, EffectKind::Nat | EffectKind::Unknown);
            let rule = residues.iter().flat_map(Residue::effects).find(forwards);
            let mut targets = Targets::default();
            for more in residues.iter().map(|residue| residue.targets(packets)) {
                targets.hosts.extend(more.hosts);
                targets.others |= more.others;
            }
            rule.map(|effect| (effect.rule, targets))
        };
        let (rule, mut targets) = found(None)?;
        let of_udp = found(u8::try_from(IPPROTO_UDP).ok());
        targets.others = of_udp.is_some_and(|(_, targets)| targets.others);
        (targets != Targets::default()).then(|| Difference {
            targets: Some(targets),
            ..Difference::by(
                &rule,
                format!("the firewall forwards to other hosts, by {rule}"),
            )
        })
    }

    /// The first rule that changes, after routing, what FIB rules ask for. Devices are treated alike by now, so
    /// one of them tells.
    fn rewriting(&self, question: &Question, device: &Link) -> Option<Difference> {
        use EffectKind as E;
        question.unchanged.iter().find_map(|field| {
            let (kinds, what) = match field {
                Rewritable::Mark => ([E::Mark, E::Forward], "mark"),
                Rewritable::Tos => ([E::Modify, E::Forward], "TOS"),
                Rewritable::Address => ([E::Address; 2], "address or port"),
            };
            let mut effects = AFTER_ROUTING.into_iter().flat_map(|hook| {
                let place = Place::new(Packets::of(question.ipv6), hook);
                let place = place.chains(Chains::ButRerouting);
                let residue = self.ruleset.residue(&place, &facts(hook, device));
                residue.effects()
            });
            let changes = |kind| kinds.contains(&kind) || kind == E::Unknown;
            let rule = effects.find(|e| changes(e.kind))?.rule;
            Some(Difference::by(
                &rule,
                format!(
                    "rules of the FIB route by {what}, also by {}, and the firewall may change it \
                     after that, or send packets on without it, by {rule}",
                    device.name
                ),
            ))
        })
    }
}

/// So many addresses of an uplink are asked about: a server may have hundreds, and each takes a look through all rules.
const SOURCES_MAX: usize = 32;

/// A host of the Internet that no rule is about (a root name server), IPv4 and IPv6, and such a port.
const ANYWHERE: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(198, 41, 0, 4)),
    IpAddr::V6(Ipv6Addr::new(0x2001, 0x503, 0xba3e, 0, 0, 0, 2, 0x30)),
];
const ANY_PORT: u16 = 40_404;

/// The hooks that a packet meets once the kernel has chosen its device.
const AFTER_ROUTING: [Hook; 4] = [Hook::Output, Hook::Forward, Hook::Postrouting, Hook::Egress];

fn facts(hook: Hook, device: &Link) -> Facts {
    Facts {
        iif: match hook {
            Hook::Output => DeviceFact::Absent,
            _ => DeviceFact::Open,
        },
        oif: DeviceFact::Known(Box::new(device.clone())),
        ..Facts::default()
    }
}

fn at_place(ruleset: &Ruleset, place: Place, devices: &[&Link]) -> Option<Difference> {
    unlike(devices, |device| {
        ruleset.residue(&place, &facts(place.hook, device))
    })
}

/// The first rule by which what remains for the first device differs from what does for another one.
fn unlike<'a>(devices: &[&Link], residue: impl Fn(&Link) -> Residue<'a>) -> Option<Difference> {
    let (first, others) = devices.split_first()?;
    let reference = residue(first);
    others.iter().find_map(|other| {
        let rule = reference.difference(&residue(other))?;
        let (one, other) = (&first.name, &other.name);
        Some(Difference::by(
            &rule,
            format!("the firewall treats {one} and {other} differently, by {rule}"),
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::ruleset::tests::effects::with_effect;
    use crate::topology::{Group, InnerNet, Kind, Member, Path, Topology};
    use std::collections::BTreeSet;

    fn question(ipv6: bool, devices: &[u32]) -> Question {
        Question {
            ipv6,
            devices: devices.iter().copied().collect(),
            about: About::Running,
            unchanged: BTreeSet::new(),
            sources: BTreeSet::new(),
        }
    }

    fn devices() -> Vec<Link> {
        let device = |ifindex| Link {
            ifindex,
            ..Link::default()
        };
        Vec::from([1, 2].map(device))
    }

    #[test]
    fn programs_at_netfilter_are_a_difference_for_their_family() {
        let firewall = Firewall {
            bpf: [Some(Hook::Postrouting), None],
            ..Firewall::default()
        };
        let difference = firewall.difference(&question(false, &[1, 2])).unwrap();
        assert!(difference.what.contains("Netfilter's postrouting hook"));
        assert_eq!(difference.rule, None);
        assert_eq!(firewall.difference(&question(true, &[1, 2])), None);
        let one_device = firewall.difference(&question(false, &[1]));
        assert_eq!(one_device, None, "two gateways on one device");
    }

    #[test]
    fn what_rules_of_the_fib_ask_for_may_not_change_after_routing() {
        use EffectKind as E;
        use Rewritable as R;
        let holds = |asked, kind| {
            let firewall = Firewall {
                ruleset: with_effect(kind),
                devices: devices(),
                ..Firewall::default()
            };
            let question = Question {
                unchanged: BTreeSet::from([asked]),
                ..question(false, &[1, 2])
            };
            firewall.difference(&question).is_some()
        };
        for (asked, kind, expected) in [
            (R::Mark, E::Mark, true),
            (R::Mark, E::Modify, false),
            (R::Tos, E::Modify, true),
            (R::Tos, E::Address, false),
            (R::Address, E::Address, true),
            // An MSS that is clamped.
            (R::Address, E::Modify, false),
            // The steering program asks connection tracking.
            (R::Address, E::Nat, false),
            // A flow table.
            (R::Mark, E::Forward, true),
            (R::Tos, E::Forward, true),
            (R::Address, E::Forward, false),
        ] {
            assert_eq!(holds(asked, kind), expected, "{asked:?}, {kind:?}");
        }
    }

    #[test]
    fn whether_packets_of_many_networks_leave_is_asked_once_for_each_device() {
        let net = |(n, device): (u8, u32)| InnerNet {
            net: format!("192.168.{n}.0/24").parse().unwrap(),
            device: Some(device),
        };
        let topology = Topology {
            paths: vec![Path::plain(1, "192.0.2.1"), Path::plain(2, "198.51.100.1")],
            inner_nets: Vec::from([(1, 3), (2, 3), (3, 4)].map(net)),
            ..Topology::default()
        };
        let group = Group {
            kind: Kind::Place,
            table: 254,
            prefixes: Vec::new(),
            members: Vec::from([0, 1].map(|path| Member { path, weight: 1 })),
            preferred: Some(0),
            told_by: BTreeSet::new(),
        };
        let asked = Question::of_nets(&group, &topology, &BTreeSet::new());
        assert_eq!(asked.len(), 3);
        let leaving: BTreeSet<Question> = asked.into_iter().filter_map(|q| q.leaving).collect();
        let about: Vec<About> = leaving.iter().map(|question| question.about).collect();
        let expected = [3, 4].map(|device| About::Forwarding(Some(device)));
        assert_eq!(about, expected);
    }

    #[test]
    fn about_a_device_that_was_not_read_there_is_no_answer_yet() {
        let firewall = Firewall {
            ruleset: with_effect(EffectKind::Drop),
            devices: devices(),
            ..Firewall::default()
        };
        let inner = InnerNet {
            net: "192.168.1.0/24".parse().unwrap(),
            device: Some(3),
        };
        let is_reading = |devices: &[u32], about| {
            let question = Question {
                about,
                ..question(false, devices)
            };
            let difference = firewall.difference(&question);
            difference.is_some_and(|why| why.is_reading())
        };
        for about in [About::Running, About::Nat, About::Leaving] {
            assert!(!is_reading(&[1, 2], about), "{about:?}");
            assert!(is_reading(&[1, 4], about), "{about:?}");
        }
        for about in [About::Source(inner), About::Forwarding(inner.device)] {
            assert!(is_reading(&[1, 2], about), "{about:?}");
        }
    }

    #[test]
    fn what_others_have_at_the_egress_of_a_device_is_a_difference() {
        let firewall = Firewall {
            egress: BTreeMap::from([(2, "tc filters".to_owned())]),
            ..Firewall::default()
        };
        for ipv6 in [false, true] {
            let difference = firewall.difference(&question(ipv6, &[1, 2])).unwrap();
            assert!(difference.what.starts_with("tc filters"), "{difference:?}");
        }
        assert_eq!(firewall.difference(&question(false, &[1, 3])), None);
        let one_device = firewall.difference(&question(false, &[2]));
        assert_eq!(one_device, None, "two gateways on one device");
        let new = Question {
            about: About::Nat,
            ..question(false, &[1, 2])
        };
        let chosen_before = "new flows meet the egress of the device that they leave by";
        assert_eq!(firewall.difference(&new), None, "{chosen_before}");
    }
}
