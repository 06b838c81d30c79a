// SPDX-License-Identifier: GPL-2.0-or-later
//! Where marks of Mountain's and the firewall's rules get in each other's way.

use super::{Difference, Firewall};
use crate::netlink::ruleset::{
    DeviceFact, Facts, Hook, MarkFact, Packets, Place, Residue, Strange,
};
use crate::netlink::Link;
use crate::topology::ByMark;

impl Firewall {
    /// The first rule before routing to which marks of ours are strange, as it gives packets marks of its own: these
    /// packets would not get the mark by which a rule of the FIB leads them elsewhere, into a VPN above all.
    pub(super) fn marks(&self, ipv6: bool, by: ByMark, own: bool) -> Option<Difference> {
        let hooks: &[Hook] = match own {
            true => &[Hook::Output],
            false => &[Hook::Ingress, Hook::Prerouting],
        };
        let strange = Strange {
            bits: by.ours,
            kept: by.compared & by.ours != 0,
        };
        let rule = (self.ruleset).by_mark(Packets::of(ipv6), hooks, strange)?;
        let what = format!(
            "the routing rule of priority {} goes by packet marks, and the firewall reads mountain's bits ({:#x}) \
             as part of such a mark, by {rule}: have it read other bits only, as by a mask (MARK/{:#x})",
            by.priority, by.ours, !by.ours
        );
        Some(Difference::by(&rule, what))
    }

    /// The first rule that does something to packets, or because of them, where they bear a mark of ours, and not where
    /// they bear none, or the other way round. It may also sort them into classes, count or write to them.
    ///
    /// Frames bear them before they meet the rules of their bridge, which are not evaluated.
    pub(super) fn ours(&self, ipv6: bool, bits: u32, own: bool) -> Option<Difference> {
        if let (false, true) = (own, self.devices.iter().any(Link::is_bridge)) {
            if let Some(rule) = self.ruleset.bridge_marks() {
                let what =
                    format!("the firewall sets or reads the marks of frames at bridges, by {rule}");
                return Some(Difference::by(&rule, what));
            }
        }
        let hooks: &[Hook] = match own {
            true => &[Hook::Output, Hook::Postrouting, Hook::Egress],
            false => &[
                Hook::Ingress,
                Hook::Prerouting,
                Hook::Forward,
                Hook::Postrouting,
                Hook::Egress,
            ],
        };
        let iif = match own {
            true => DeviceFact::Absent,
            false => DeviceFact::Open,
        };
        // Where no rule goes by these bits, nothing has to be evaluated. So it is on most hosts.
        let ours = Strange { bits, kept: false };
        self.ruleset.by_mark(Packets::of(ipv6), hooks, ours)?;
        let with = |mark: u32| {
            let mut facts = Facts {
                iif: iif.clone(),
                mark: MarkFact::of(mark),
                // Forwarded connections have it, too. Where rules take it off they are left for that ([`Firewall::lost`]).
                ct_mark: match own {
                    true => MarkFact::of(0),
                    false => MarkFact::kept(mark, bits),
                },
                begins: true,
                ..Facts::default()
            };
            let residues = hooks.iter().map(|hook| {
                let place = Place::new(Packets::of(ipv6), *hook);
                let residue = self.ruleset.residue(&place, &facts);
                facts.ct_mark = residue.left_of(&facts).ct_mark;
                residue
            });
            Residue::in_turn(residues)
        };
        let without = with(0);
        let mut each = (0..u32::BITS).map(|n| 1 << n).filter(|bit| bits & bit != 0);
        let rule = each.find_map(|bit| without.difference(&with(bit)))?;
        let what = format!(
            "the firewall treats packets otherwise if mountain's bits ({bits:#x}) are in their mark or their \
             connection's, by {rule}: have it read other bits only, as by a mask (MARK/{:#x})",
            !bits
        );
        Some(Difference::by(&rule, what))
    }

    /// The first rule that takes marks of ours off forwarded packets or their connections. They would go on by another
    /// uplink, with an address that is not its.
    pub(super) fn lost(&self, ipv6: bool, ours: u32) -> Option<Difference> {
        let rule = self.ruleset.takes_marks(Packets::of(ipv6), ours)?;
        let what = format!(
            "the firewall sets marks without mountain's bits ({ours:#x}), by {rule}: have it set other bits only, as \
             by a mask (MARK/{:#x})",
            !ours
        );
        Some(Difference::by(&rule, what))
    }
}
