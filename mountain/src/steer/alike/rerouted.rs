// SPDX-License-Identifier: GPL-2.0-or-later
//! Whether the kernel routes this host's new packets again once they have the address of an uplink.
//!
//! It does so behind OUTPUT where a rule has changed their mark or their DS field, or the address that they go to
//! (ip_route_me_harder). Their source address stays that of the uplink which was chosen before. By another one, whose
//! gateway knows other addresses, nobody would answer.

use super::{facts, Difference, Firewall, Question, ANYWHERE, SOURCES_MAX};
use crate::netlink::ruleset::{
    Chains, DeviceFact, Effect, EffectKind, Facts, Hook, Packets, Place,
};
use crate::netlink::Link;
use crate::topology::Rewritable;

impl Firewall {
    /// The first rule by which packets of this host's new flows may leave by another uplink than the one whose address
    /// they have, and keep that address.
    pub(super) fn rerouting(&self, question: &Question) -> Option<Difference> {
        let devices = self.devices_of(question)?;
        let changes = devices
            .iter()
            .flat_map(|device| self.changes(question, device));
        let changes: Vec<(Effect, &str)> = changes.collect();
        let is_harmless = |translated| {
            let mut devices = devices.iter();
            devices.all(|device| self.translates(question, device, translated))
        };
        // Most firewalls have no such rule.
        let of_kind = |nat| {
            changes
                .iter()
                .find(|(effect, _)| effect.kind.is_nat() == nat)
        };
        let harmful = |nat| of_kind(nat).filter(|_| !is_harmless(nat));
        let (effect, what) = harmful(false).or_else(|| harmful(true))?;
        let rule = effect.rule.to_string();
        let what = format!(
            "the firewall may change the {what} of this host's packets once an uplink is chosen, and with it the \
             uplink, but not their source address, by {rule} (unless it translates sources on every uplink)"
        );
        Some(Difference::by(&rule, what))
    }

    /// What it may change of packets that are about to leave by a device, so that the kernel routes them again.
    fn changes(&self, question: &Question, device: &Link) -> Vec<(Effect, &'static str)> {
        use EffectKind as E;
        let packet = |destination| Facts {
            destination,
            begins: true,
            is_unicast: true,
            ..facts(Hook::Output, device)
        };
        // Single addresses are translated for services of the host's own networks, as Kubernetes does.
        let anywhere = Some(ANYWHERE[usize::from(question.ipv6)]);
        let unchanged = &question.unchanged;
        let what = |kind, by_nat: bool| match kind {
            // Not a redirect to this host itself: any address of its own will do there.
            E::Nat | E::Address | E::Unknown => Some("destination"),
            // Behind NAT only another destination has the kernel route a packet again.
            _ if by_nat => None,
            E::Mark if unchanged.contains(&Rewritable::Mark) => Some("mark"),
            E::Modify if unchanged.contains(&Rewritable::Tos) => Some("TOS"),
            _ => None,
        };
        let effects = [(Chains::Rerouting, None), (Chains::Nat, anywhere)];
        let effects = effects.into_iter().flat_map(|(chains, destination)| {
            let place = Place::new(Packets::of(question.ipv6), Hook::Output).chains(chains);
            let effects = self.ruleset.residue(&place, &packet(destination)).effects();
            effects.into_iter().filter_map(move |effect| {
                let what = what(effect.kind, chains == Chains::Nat)?;
                Some((effect, what))
            })
        });
        effects.collect()
    }

    /// Whether all packets get another address that leave by a device with that of another uplink, whatever else the
    /// firewall has changed of them, with their destination `translated` or not.
    fn translates(&self, question: &Question, device: &Link, translated: bool) -> bool {
        let place = Place::new(Packets::of(question.ipv6), Hook::Postrouting).chains(Chains::Nat);
        let others = question
            .sources
            .iter()
            .filter(|(_, by)| *by != device.ifindex);
        others.take(SOURCES_MAX).all(|(source, _)| {
            let facts = Facts {
                iif: DeviceFact::Absent,
                source: Some((*source).into()),
                begins: true,
                translated,
                is_unicast: true,
                ..facts(place.hook, device)
            };
            let translating = self.ruleset.residue(&place, &facts).translating();
            translating.drops_all().is_some()
        })
    }
}
