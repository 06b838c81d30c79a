// SPDX-License-Identifier: GPL-2.0-or-later
//! The firewall of a random host.

use super::dice::Dice;
use super::host::{any_destination_ports, Host, Kind, INNER, MARKS, TRANSLATED};

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
                    true => format!("snat ip to {TRANSLATED}"),
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

    /// A rule that finds the device in a map, or in a set with a wildcard.
    pub fn add_verdict_map(&mut self, dice: &mut Dice) {
        let n = dice.below(self.uplinks.len());
        let [a, b] = [n, n + 1].map(|n| &self.uplinks[n % self.uplinks.len()].name);
        let ports = match_ports(dice);
        let rule = match dice.below(6) {
            0 => format!("{ports} oifname vmap {{ \"{a}\" : continue, \"{b}\" : drop }}"),
            1 => {
                let both = format!("oifname vmap {{ \"{a}\" : continue, \"{b}\" : continue }}");
                format!("{both} oifname \"{b}\" {ports} drop")
            }
            2 => format!("oifname \"u*\" {ports} ip dscp set 10"),
            3 => format!("oifname @wild {ports} drop"),
            4 => "udp dport vmap { 1000-1999 : jump more, 2000-3999 : continue }".to_owned(),
            _ => format!("oifname vmap {{ \"{a}\" : jump more, \"{b}\" : continue }}"),
        };
        let hook = dice.pick(&["output", "forward", "postrouting"]);
        let more = format!("oifname \"{b}\" {} drop", match_ports(dice));
        self.nft.extend([
            "add table inet v".to_owned(),
            format!(
                "add set inet v wild {{ type ifname; flags interval; elements = {{ \"{b}*\" }}; }}"
            ),
            "add chain inet v more".to_owned(),
            format!("add rule inet v more {more}"),
            format!("add chain inet v out {{ type filter hook {hook} priority 160; }}"),
            format!("add rule inet v out {rule}"),
        ]);
    }

    /// A set of destinations that packets have been seen to, which one device then refuses.
    pub fn add_filled_set(&mut self, dice: &mut Dice) {
        let device = dice.pick(&self.uplinks).name;
        self.nft.extend([
            "add table inet s".to_owned(),
            "add set inet s seen { type ipv4_addr; size 64; flags dynamic; }".to_owned(),
        ]);
        let ports = match_ports(dice);
        for hook in ["output", "prerouting"] {
            self.nft.extend([
                format!("add chain inet s {hook} {{ type filter hook {hook} priority -200; }}"),
                format!("add rule inet s {hook} {ports} add @seen {{ ip daddr }}"),
            ]);
        }
        self.nft.extend([
            "add chain inet s out { type filter hook postrouting priority 170; }".to_owned(),
            format!("add rule inet s out oifname \"{device}\" ip daddr @seen drop"),
        ]);
    }

    /// Copies of small datagrams for a gateway, such as for a probe of the traffic.
    pub fn add_dup(&mut self, dice: &mut Dice) {
        let uplink = dice.pick(&self.uplinks);
        let ipv6 = dice.one_in(2);
        let family = ["ip", "ip6"][usize::from(ipv6)];
        let (device, gateway) = (uplink.name, uplink.gateways[usize::from(ipv6)][0]);
        let what = format!(
            "udp dport {} meta length < 1000",
            any_destination_ports(dice)
        );
        self.nft.extend([
            format!("add table {family} d"),
            format!("add chain {family} d out {{ type filter hook postrouting priority 200; }}"),
            format!("add rule {family} d out {what} dup to {gateway} device \"{device}\""),
        ]);
    }

    /// A zone for all connections, or for what comes from inside, whose replies then belong to no connection.
    pub fn add_zones(&mut self, dice: &mut Dice) {
        self.nft.push("add table inet z".to_owned());
        // Of the inner network alone, answers from elsewhere have to find their connection. A rule that sets
        // the zone of a copy (`dup`) makes the kernel track the copy, too, and give one of both another port.
        let (hooks, zone) = match dice.one_in(3) || self.has(Kind::Dup) {
            true => (
                &["prerouting"][..],
                format!("iifname \"{INNER}\" ct original zone"),
            ),
            false => (&["output", "prerouting"][..], "ct zone".to_owned()),
        };
        for hook in hooks {
            self.nft.extend([
                format!("add chain inet z {hook} {{ type filter hook {hook} priority -300; }}"),
                format!("add rule inet z {hook} {zone} set 7"),
            ]);
        }
    }

    /// Connections past the firewall once they are answered. Rules would then concern their first packets only, so
    /// there are none.
    pub fn add_flowtable(&mut self) {
        if !self.nft.is_empty() {
            return;
        }
        let uplinks = self.uplinks.iter().map(|u| u.name.as_str());
        let devices: Vec<&str> = uplinks.chain([INNER]).collect();
        let devices = devices.join(", ");
        self.nft.extend([
            "add table inet t".to_owned(),
            format!(
                "add flowtable inet t f {{ hook ingress priority 0; devices = {{ {devices} }}; }}"
            ),
            "add chain inet t out { type filter hook forward priority 5; }".to_owned(),
            "add rule inet t out meta l4proto { tcp, udp } flow add @f".to_owned(),
        ]);
    }
}
