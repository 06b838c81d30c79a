// SPDX-License-Identifier: GPL-2.0-or-later
//! To which other hosts rules send what comes in.

use std::collections::BTreeSet;
use std::net::IpAddr;

use super::expr::{Expr, Extension, Reg, Statement};
use super::residue::{lines, EffectKind, Residue, Step};
use super::{FirewallRule, FirewallTable, Packets, Value};
use crate::netlink::wire::{self, u32_at};

/// Where connections go whose destination is translated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Targets {
    /// Those that rules name one by one, also in a map.
    pub hosts: BTreeSet<IpAddr>,
    /// There are others, which cannot be told.
    pub others: bool,
}

impl Residue<'_> {
    /// Where the destinations of a family's packets are translated to.
    pub fn targets(&self, packets: Packets) -> Targets {
        let mut targets = Targets::default();
        for line in lines(&self.chains) {
            let does = |kind| {
                let mut steps = line.steps.iter();
                steps.any(|step| matches!(step, Step::Do(done, _) if *done == kind))
            };
            targets.others |= does(EffectKind::Unknown);
            if let Some(rule) = line.origin.rule.filter(|_| does(EffectKind::Nat)) {
                let mut reader = Reader {
                    table: line.origin.table,
                    length: if packets == Packets::Ipv6 { 16 } else { 4 },
                    held: Vec::new(),
                    targets: &mut targets,
                };
                reader.read(rule);
            }
        }
        targets
    }
}

/// Follows what one rule does to a connection's destination.
struct Reader<'a> {
    table: &'a FirewallTable,
    /// Of an address, bytes.
    length: usize,
    /// What registers hold from there on, if that is constant: one of these.
    held: Vec<(Reg, Vec<Vec<u8>>)>,
    targets: &'a mut Targets,
}

impl Reader<'_> {
    fn read(&mut self, rule: &FirewallRule) {
        for expr in &rule.exprs {
            match expr {
                Expr::Load { dreg, len, .. } | Expr::Bitwise { dreg, len, .. } => {
                    self.lose(*dreg, *len);
                }
                Expr::Immediate { dreg, data } => self.hold(*dreg, vec![data.clone()]),
                Expr::Lookup(lookup) => {
                    if let Some(dreg) = lookup.dreg {
                        self.hold(dreg, self.values(&lookup.set));
                    }
                }
                Expr::Effect(statement) if statement.kind == EffectKind::Nat => {
                    self.nat(statement);
                }
                Expr::Target(found) => self.target(found),
                // Whatever that has written.
                Expr::Unknown(_) => self.held.clear(),
                _ => {}
            }
        }
    }

    /// What a map has for its keys.
    fn values(&self, map: &str) -> Vec<Vec<u8>> {
        let elements = self
            .table
            .sets
            .get(map)
            .and_then(|set| set.elements.as_ref());
        let data = elements
            .into_iter()
            .flatten()
            .map(|element| match &element.value {
                Value::Data(data) => Some(data.clone()),
                _ => None,
            });
        data.collect::<Option<_>>().unwrap_or_default()
    }

    fn hold(&mut self, at: Reg, values: Vec<Vec<u8>>) {
        let length = values.iter().map(Vec::len).max().unwrap_or(0);
        self.lose(at, length);
        if !values.is_empty() {
            self.held.push((at, values));
        }
    }

    fn lose(&mut self, at: Reg, length: usize) {
        let is_apart = |from: Reg, values: &[Vec<u8>]| {
            let to = from + values.iter().map(Vec::len).max().unwrap_or(0);
            to <= at || at + length <= from
        };
        self.held.retain(|(from, values)| is_apart(*from, values));
    }

    /// The addresses that may be there.
    fn addresses(&self, at: Reg) -> Option<Vec<IpAddr>> {
        let address = |from: Reg, value: &[u8]| {
            let begin = at.checked_sub(from)?;
            wire::ip(value.get(begin..begin + self.length)?)
        };
        self.held.iter().find_map(|(from, values)| {
            let addresses = values.iter().map(|value| address(*from, value));
            addresses.collect()
        })
    }

    fn nat(&mut self, statement: &Statement) {
        let register = |which: u16| {
            let mut registers = statement.registers.iter();
            registers.find_map(|(kind, reg)| (*kind == which).then_some(*reg))
        };
        // NFTA_NAT_REG_ADDR_MIN, NFTA_NAT_REG_ADDR_MAX. Without them only the port is another one.
        let (Some(first), last) = (register(3), register(4)) else {
            return;
        };
        let last = last.unwrap_or(first);
        match (self.addresses(first), self.addresses(last)) {
            // More than one is a range.
            (Some(firsts), Some(lasts)) if firsts == lasts => self.targets.hosts.extend(firsts),
            _ => self.targets.others = true,
        }
    }

    /// What a target of xtables says.
    fn target(&mut self, found: &Extension) {
        /// NF_NAT_RANGE_MAP_IPS of linux/netfilter/nf_nat.h.
        const SAYS_HOSTS: u32 = 1 << 0;

        // struct nf_nat_ipv4_multi_range_compat: how many, and of each flags and two addresses. struct nf_nat_range (2):
        // flags, two addresses of 16 bytes.
        let (flags, room) = match (found.name.as_str(), found.revision) {
            ("DNAT", 0) => (4, 4),
            ("DNAT", _) => (0, 16),
            ("NETMAP", _) => {
                self.targets.others = true;
                return;
            }
            _ => return,
        };
        let info = &found.info;
        let host = |at| wire::ip(info.get(at..at + self.length)?);
        match (u32_at(info, flags), host(flags + 4), host(flags + 4 + room)) {
            (Some(says), ..) if says & SAYS_HOSTS == 0 => {}
            (Some(_), Some(first), Some(last)) if first == last => {
                self.targets.hosts.insert(first);
            }
            _ => self.targets.others = true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As iptables of before 2018 sends it for IPv4, and as all others do.
    #[test]
    fn a_target_of_either_revision_names_its_host() {
        let info = |revision: u32, says: u32, hosts: [[u8; 4]; 2]| {
            let mut info = Vec::new();
            if revision == 0 {
                info.extend(1u32.to_ne_bytes());
            }
            info.extend(says.to_ne_bytes());
            for host in hosts {
                info.extend(host);
                info.resize(info.len() + if revision == 0 { 0 } else { 12 }, 0);
            }
            info.extend([0x1f, 0x90, 0x1f, 0x90]);
            Extension {
                name: "DNAT".to_owned(),
                revision,
                info,
            }
        };
        let table = FirewallTable::default();
        let targets = |found: Extension| {
            let mut targets = Targets::default();
            let mut reader = Reader {
                table: &table,
                length: 4,
                held: Vec::new(),
                targets: &mut targets,
            };
            reader.target(&found);
            (Vec::from_iter(targets.hosts), targets.others)
        };
        let (one, two) = ([192, 0, 2, 2], [192, 0, 2, 3]);
        for revision in [0, 1, 2] {
            let named = targets(info(revision, 3, [one, one]));
            assert_eq!(named, (vec![IpAddr::from(one)], false), "{revision}");
            let range = targets(info(revision, 1, [one, two]));
            assert_eq!(range, (Vec::new(), true), "{revision}");
            let ports = targets(info(revision, 2, [one, one]));
            assert_eq!(ports, (Vec::new(), false), "{revision}");
        }
    }
}
