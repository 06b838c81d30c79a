// SPDX-License-Identifier: GPL-2.0-or-later
//! Whether new flows may leave by each uplink, go on there and be answered: what the firewall lets through by the one that
//! the kernel takes.

use std::collections::BTreeMap;

use libc::{IPPROTO_TCP, IPPROTO_UDP};

use super::translated::{anywhere, kinds, placed, same_nat};
use super::About;
use super::{facts, unlike, Difference, Firewall, Question, ANYWHERE, ANY_PORT, SOURCES_MAX};
use crate::netlink::ruleset::{
    Chains, DeviceFact, EffectKind, Facts, Hook, MarkFact, Packets, Place, Residue,
};
use crate::netlink::Link;

/// NF_IP_PRI_NAT_SRC and NF_IP_PRI_NAT_DST (linux/netfilter_ipv4.h), of IPv6, too: the priorities of NAT.
const SRCNAT: i32 = 100;
const DSTNAT: i32 = -100;

impl Firewall {
    /// The first rule that lets packets of new flows through by one device and not by another: the first ones and later
    /// ones from hook `first` on, and what answers them. They have come in by `from`.
    pub(super) fn leaving(
        &self,
        question: &Question,
        first: Hook,
        from: &DeviceFact,
    ) -> Option<Difference> {
        if self.ruleset.is_empty() {
            return None;
        }
        let Some(devices) = self.devices_of(question) else {
            return Some(Difference::reading());
        };
        let packets = Packets::of(question.ipv6);
        let is_own = matches!(question.about, About::Leaving);
        let out = |begins: bool, protocol: Option<u8>, device: &Link| {
            // Behind NAT what is forwarded has an address of the uplink, too.
            let places = [
                Place::new(packets, first),
                Place::new(packets, Hook::Postrouting).priorities(..=SRCNAT),
                Place::new(packets, Hook::Postrouting).priorities(SRCNAT + 1..),
                Place::new(packets, Hook::Egress),
            ];
            let sources = [is_own, is_own, true, true];
            let residues = places.into_iter().zip(sources).map(|(place, is_known)| {
                let own = question.only_source_of(device).filter(|_| is_known);
                let facts = Facts {
                    iif: from.clone(),
                    protocol,
                    source: own.map(Into::into),
                    begins,
                    answers: !begins,
                    ..facts(place.hook, device)
                };
                self.ruleset.residue(&place.chains(Chains::ButNat), &facts)
            });
            // Together: one hook may drop by a mark that another one has set.
            Residue::in_turn(residues).verdicts()
        };
        if let [only] = &devices[..] {
            let answers = |p| self.answers(question, from, p, only).drops_all();
            let stopped = out(true, None, only).drops_all();
            let rule =
                stopped.or_else(|| [IPPROTO_UDP, IPPROTO_TCP].into_iter().find_map(answers))?;
            let name = &only.name;
            return Some(Difference::by(
                &rule,
                format!("the firewall lets nothing out by {name}, or no answer in, by {rule}"),
            ));
        }
        let unlike_in = |begins, protocol| unlike(&devices, |device| out(begins, protocol, device));
        [true, false]
            .into_iter()
            .find_map(|begins| {
                // A rule may be about others alone, as keepalived's about IGMP by its macvlan.
                let placed = || placed(question.ipv6).map(Some).into_iter();
                unlike_in(begins, None)
                    .and_then(|_| placed().find_map(|protocol| unlike_in(begins, protocol)))
            })
            .or_else(|| self.answered(question, from, &devices))
            .or_else(|| is_own.then(|| self.with_one_address(question)).flatten())
    }

    /// The first rule that lets answers in by one device and not by another, or finds them in no connection.
    fn answered(
        &self,
        question: &Question,
        to: &DeviceFact,
        devices: &[&Link],
    ) -> Option<Difference> {
        [IPPROTO_UDP, IPPROTO_TCP].into_iter().find_map(|protocol| {
            let answers = |device: &&Link| {
                let residue = self.answers(question, to, protocol, device);
                (device.ifindex, residue)
            };
            let known: BTreeMap<u32, Residue<'_>> = devices.iter().map(answers).collect();
            unlike(devices, |device| known[&device.ifindex].verdicts())
                .or_else(|| unlike(devices, |device| known[&device.ifindex].tracking()))
        })
    }

    /// What answers may meet that come in by a device: of anybody, from any port.
    fn answers(
        &self,
        question: &Question,
        to: &DeviceFact,
        protocol: i32,
        device: &Link,
    ) -> Residue<'_> {
        let is_own = matches!(question.about, About::Leaving);
        let last = if is_own { Hook::Input } else { Hook::Forward };
        let packets = Packets::of(question.ipv6);
        // Before NAT the answers to what is forwarded go to an address of the uplink, too.
        let places = [
            Place::new(packets, Hook::Ingress),
            Place::new(packets, Hook::Prerouting).priorities(..DSTNAT),
            Place::new(packets, Hook::Prerouting).priorities(DSTNAT..),
            Place::new(packets, last),
        ];
        let destinations = [true, true, is_own, is_own];
        let residues = places
            .into_iter()
            .zip(destinations)
            .map(|(place, is_known)| {
                let own = question.only_source_of(device).filter(|_| is_known);
                let facts = Facts {
                    iif: DeviceFact::Known(Box::new(device.clone())),
                    oif: match place.hook {
                        Hook::Forward => to.clone(),
                        Hook::Input => DeviceFact::Absent,
                        _ => DeviceFact::Open,
                    },
                    protocol: u8::try_from(protocol).ok(),
                    source: Some(ANYWHERE[usize::from(question.ipv6)].into()),
                    destination: own,
                    destination_port: Some(ANY_PORT),
                    answers: true,
                    ..Facts::default()
                };
                self.ruleset.residue(&place.chains(Chains::ButNat), &facts)
            });
        Residue::in_turn(residues)
    }

    /// The first rule that sends this host's new packets elsewhere which are about to leave by one device or with one address,
    /// and not those by another: to a proxy (NAT at output), or into a VPN by a mark that a rule of the FIB asks for
    /// (`by_mark`).
    pub(super) fn sent_elsewhere(&self, question: &Question, by_mark: bool) -> Option<Difference> {
        if self.ruleset.is_empty() {
            return None;
        }
        let Some(devices) = self.devices_of(question) else {
            return Some(Difference::reading());
        };
        let residues = |chains| {
            let place = Place::new(Packets::of(question.ipv6), Hook::Output).chains(chains);
            let of_device = |device: &&Link| {
                let sources = question.sources_of(device).take(SOURCES_MAX);
                let facts = facts(Hook::Output, device);
                let residues = sources.map(|source| {
                    let facts = Facts {
                        source: Some(source.into()),
                        begins: true,
                        ..facts.clone()
                    };
                    self.ruleset.residue(&place, &facts)
                });
                residues.collect::<Vec<_>>()
            };
            devices.iter().flat_map(of_device).collect::<Vec<_>>()
        };
        let unlike = |residues: Vec<Residue<'_>>| {
            let (first, others) = residues.split_first()?;
            others.iter().find_map(|other| first.difference(other))
        };
        let proxied = residues(Chains::Nat)
            .iter()
            .map(Residue::translating)
            .collect();
        let rule = unlike(proxied).or_else(|| {
            let marked = residues(Chains::Rerouting);
            let is_marked = marked.iter().any(|r| r.does(&[EffectKind::Mark]));
            (by_mark && is_marked).then(|| unlike(marked)).flatten()
        })?;
        Some(Difference::by(
            &rule,
            format!(
                "the firewall leads this host's packets elsewhere by the device or the address that they leave by, by {rule}"
            ),
        ))
    }

    /// The first rule that gives this host's new flows the same address on several uplinks. On all but one it is a foreign
    /// one.
    fn with_one_address(&self, question: &Question) -> Option<Difference> {
        let nat = Place::new(Packets::of(question.ipv6), Hook::Postrouting).chains(Chains::Nat);
        let devices = self.devices_of(question)?;
        let mut residues = Vec::new();
        for (i, device) in devices.iter().enumerate() {
            let sources = question.sources_of(device).take(SOURCES_MAX);
            for (n, source) in sources.enumerate() {
                let all = Facts {
                    iif: DeviceFact::Absent,
                    source: Some(source.into()),
                    begins: true,
                    ..facts(nat.hook, device)
                };
                let edges = |kind: &Facts| self.ruleset.edges(&nat, kind);
                let mut asked = vec![anywhere(&all)];
                // Single destinations for one of its addresses, as each takes many looks.
                if n == 0 {
                    let kinds = kinds(all, edges).unwrap_or_default().into_iter();
                    asked.extend(kinds.filter(|kind| kind.mark == MarkFact::of(0)));
                }
                let residue = |kind: &Facts| (i, self.ruleset.residue(&nat, kind));
                residues.extend(asked.iter().map(residue));
            }
        }
        same_nat(
            residues.iter().map(|(i, residue)| (*i, residue)),
            "this host's packets",
        )
    }
}
