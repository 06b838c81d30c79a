// SPDX-License-Identifier: GPL-2.0-or-later
//! The firewall of a random host.

use super::dice::Dice;
use super::host::{any_destination_ports, Host, Kind, MARKS};

/// Rules with the chain that each is in.
type Rules = Vec<(&'static str, String)>;

fn match_ports(dice: &mut Dice) -> String {
    let ports = any_destination_ports(dice);
    let proto = dice.pick(&["udp", "tcp"]);
    format!("{proto} dport {ports}")
}

impl Host {
    pub fn add_nft(&mut self, dice: &mut Dice) {
        let mut rules = Rules::new();
        if self.has(Kind::NftByDevice) {
            self.rules_by_device(dice, &mut rules);
        }
        if self.has(Kind::NftMark) {
            self.marks(dice, &mut rules);
        }
        if self.has(Kind::Nat) {
            self.nat(dice, &mut rules);
        }
        let hooks = [
            ("output", "type filter hook output priority 0"),
            ("forward", "type filter hook forward priority 0"),
            ("postrouting", "type filter hook postrouting priority 150"),
            ("mark_out", "type route hook output priority -150"),
            ("mark_in", "type filter hook prerouting priority -150"),
            ("nat", "type nat hook postrouting priority 100"),
        ];
        for (chain, hook) in hooks {
            let of_chain: Vec<_> = rules.iter().filter(|(c, _)| *c == chain).collect();
            if of_chain.is_empty() {
                continue;
            }
            self.nft
                .push(format!("add chain inet f {chain} {{ {hook}; }}"));
            for (_, rule) in of_chain {
                self.nft.push(format!("add rule inet f {chain} {rule}"));
            }
        }
        if !self.nft.is_empty() {
            self.nft.insert(0, "add table inet f".into());
        }
        if self.has(Kind::NftEgress) {
            let device = dice.pick(&self.uplinks).name;
            let what = match_ports(dice);
            let action = dice.pick(&["drop", "ip dscp set 20", "ip6 dscp set 20", "counter"]);
            self.nft.extend([
                "add table netdev e".to_owned(),
                format!("add chain netdev e out {{ type filter hook egress device {device} priority 0; }}"),
                format!("add rule netdev e out {what} {action}"),
            ]);
        }
    }

    /// Rules for packets that leave by a device.
    fn rules_by_device(&self, dice: &mut Dice, rules: &mut Rules) {
        for _ in 0..1 + dice.below(2) {
            let device = dice.pick(&self.uplinks).name;
            let chain = dice.pick(&["output", "forward", "postrouting"]);
            let action = dice.pick(&["drop", "ip dscp set 10", "ip6 dscp set 10", "reject"]);
            let action = match (chain, action) {
                ("postrouting", "reject") => "drop",
                (_, action) => action,
            };
            let what = match_ports(dice);
            rules.push((chain, format!("oifname \"{device}\" {what} {action}")));
        }
        // A rule that treats all alike, or only counts.
        let device = dice.pick(&self.uplinks).name;
        rules.push(("output", format!("oifname \"{device}\" counter")));
    }

    /// Rules that mark packets.
    fn marks(&self, dice: &mut Dice, rules: &mut Rules) {
        for chain in ["mark_out", "mark_in"] {
            let mark = dice.pick(&MARKS[1..]);
            let what = match_ports(dice);
            rules.push((chain, format!("{what} meta mark set {mark:#x}")));
        }
        if dice.one_in(2) {
            rules.push(("postrouting", "meta mark set 0".into()));
        }
    }

    /// Source NAT, perhaps not alike on all uplinks.
    fn nat(&self, dice: &mut Dice, rules: &mut Rules) {
        let source = dice.pick(&["", "ip saddr 10.40.0.0/15 "]);
        let snat = dice.one_in(4);
        let alike = dice.one_in(2);
        for uplink in &self.uplinks {
            if alike || dice.one_in(2) {
                let action = match snat {
                    true => "snat ip to 192.0.2.77".to_owned(),
                    false => "masquerade".to_owned(),
                };
                let name = &uplink.name;
                rules.push(("nat", format!("oifname \"{name}\" {source}{action}")));
            }
        }
        // NAT of one family tracks the connections of that one only, Mountain's table those of both: the kernel
        // then knows the ports of datagrams in fragments, and hashes by them.
        rules.push(("mark_in", "ct state invalid counter".into()));
    }
}
