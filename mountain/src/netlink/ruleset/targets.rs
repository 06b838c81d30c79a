// SPDX-License-Identifier: GPL-2.0-or-later
//! To which other hosts, and which of their ports, rules send what comes in.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;

use super::expr::{Expr, Extension, Reg, Source, Statement};
use super::residue::{lines, EffectKind, Residue, Step};
use super::{xt, Element, FirewallRule, FirewallTable, Packets, Value};
use crate::netlink::wire::{self, u16_at, u32_at};

/// First and last.
type Ports = (u16, u16);

/// Where connections go whose destination is translated, as far as rules name it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Targets {
    /// Single hosts.
    pub hosts: BTreeSet<IpAddr>,
    /// Their ports, by ranges.
    pub ports: BTreeSet<Ports>,
}

impl Residue<'_> {
    /// Where the destinations of a family's packets are translated to.
    pub fn targets(&self, packets: Packets) -> Targets {
        let does = |step: &Step| matches!(step, Step::Do(EffectKind::Nat, _));
        let mut targets = Targets::default();
        for line in lines(&self.chains) {
            if let Some(rule) = line.origin.rule.filter(|_| line.steps.iter().any(does)) {
                let mut reader = Reader::new(line.origin.table, packets);
                reader.read(rule);
                targets.hosts.extend(reader.hosts);
                targets.ports.extend(reader.ports.unwrap_or_default());
            }
        }
        targets
    }
}

/// What a register holds, as far as destinations depend on it.
enum Held {
    /// The packet's destination port.
    Port,
    /// One of these.
    Constants(Vec<Vec<u8>>),
}

/// What one rule says.
struct Reader<'a> {
    table: &'a FirewallTable,
    /// Length of an address, bytes.
    length: usize,
    held: HashMap<Reg, Held>,
    hosts: Vec<IpAddr>,
    /// Ports that it asks for, or to which it changes these.
    ports: Option<Vec<Ports>>,
}

impl<'a> Reader<'a> {
    fn new(table: &'a FirewallTable, packets: Packets) -> Self {
        let length = match packets {
            Packets::Ipv6 => 16,
            _ => 4,
        };
        Self {
            table,
            length,
            held: HashMap::new(),
            hosts: Vec::new(),
            ports: None,
        }
    }

    fn read(&mut self, rule: &FirewallRule) {
        let exprs = rule.exprs.iter().flat_map(|expr| match expr {
            Expr::Match(found) => xt::as_exprs(found).unwrap_or_default(),
            expr => vec![expr.clone()],
        });
        exprs.for_each(|expr| self.follow(expr));
    }

    fn follow(&mut self, expr: Expr) {
        let is_port =
            |sreg: Reg, held: &HashMap<Reg, Held>| matches!(held.get(&sreg), Some(Held::Port));
        match expr {
            // NFT_PAYLOAD_TRANSPORT_HEADER, of any protocol with ports.
            Expr::Load {
                source: Source::Payload(2, 2, 2),
                dreg,
                ..
            } => drop(self.held.insert(dreg, Held::Port)),
            Expr::Load { dreg, .. } | Expr::Bitwise { dreg, .. } => drop(self.held.remove(&dreg)),
            Expr::Immediate { dreg, data } => {
                self.held.insert(dreg, Held::Constants(vec![data]));
            }
            Expr::Range {
                invert: false,
                sreg,
                from,
                to,
            } if is_port(sreg, &self.held) => self.ask(range(&from, &to).into_iter().collect()),
            Expr::Lookup(lookup) if !lookup.invert => {
                let set = self.table.sets.get(&lookup.set);
                let elements = set
                    .and_then(|set| set.elements.as_deref())
                    .unwrap_or_default();
                if is_port(lookup.sreg, &self.held) {
                    let ports = elements
                        .iter()
                        .filter_map(|e| range(&e.key, e.key_end.as_ref().unwrap_or(&e.key)));
                    self.ask(ports.collect());
                }
                if let Some(dreg) = lookup.dreg {
                    self.hold_values(dreg, elements);
                }
            }
            Expr::Effect(statement) if statement.kind == EffectKind::Nat => self.nat(&statement),
            Expr::Target(found) if found.name == "DNAT" => {
                let said = self.dnat(&found);
                self.hosts.extend(said.and_then(|(host, _)| host));
                if let Some((_, Some(ports))) = said {
                    self.ports = Some(vec![ports]);
                }
            }
            _ => {}
        }
    }

    /// Both this and what was asked before: a range of ports may be two comparisons, one for each of its ends.
    fn ask(&mut self, ports: Vec<Ports>) {
        self.ports = Some(match self.ports.take() {
            None => ports,
            Some(before) => {
                let pairs = before
                    .iter()
                    .flat_map(|a| ports.iter().map(move |b| (a, b)));
                let common = pairs.map(|(a, b)| (a.0.max(b.0), a.1.min(b.1)));
                common.filter(|(first, last)| first <= last).collect()
            }
        });
    }

    /// What a map has for its keys: an address, or one and a port behind it.
    fn hold_values(&mut self, dreg: Reg, elements: &[Element]) {
        let (mut addresses, mut ports) = (Vec::new(), Vec::new());
        for element in elements {
            if let Value::Data(data) = &element.value {
                addresses.extend(data.get(..self.length).map(<[u8]>::to_vec));
                ports.extend(data.get(self.length..self.length + 2).map(<[u8]>::to_vec));
            }
        }
        self.held.insert(dreg, Held::Constants(addresses));
        self.held.insert(dreg + self.length, Held::Constants(ports));
    }

    fn nat(&mut self, statement: &Statement) {
        // NFTA_NAT_REG_ADDR_MIN, ..._ADDR_MAX, ..._PROTO_MIN, ..._PROTO_MAX
        let [hosts, last_host, ports, last_port] = [3, 4, 5, 6].map(|which: u16| {
            let (_, reg) = statement
                .registers
                .iter()
                .find(|(kind, _)| *kind == which)?;
            match self.held.get(reg)? {
                Held::Constants(data) => Some((*reg, data)),
                Held::Port => None,
            }
        });
        if let Some((_, hosts)) =
            hosts.filter(|hosts| last_host.is_none_or(|last| last.0 == hosts.0))
        {
            self.hosts
                .extend(hosts.iter().filter_map(|host| wire::ip(host)));
        }
        if let Some((_, ports)) = ports {
            let last = last_port.map_or(ports, |(_, last)| last);
            let both = ports.iter().zip(last);
            let said = both.filter_map(|(from, to)| range(from, to));
            self.ports = Some(said.collect());
        }
    }

    /// The host and the ports that the target of xtables says, each if it says any, or one.
    fn dnat(&self, found: &Extension) -> Option<(Option<IpAddr>, Option<Ports>)> {
        /// NF_NAT_RANGE_MAP_IPS, NF_NAT_RANGE_PROTO_SPECIFIED of linux/netfilter/nf_nat.h.
        const SAYS_HOSTS: u32 = 1 << 0;
        const SAYS_PORTS: u32 = 1 << 1;

        // struct nf_nat_ipv4_multi_range_compat: how many, and of each flags, two addresses and two ports. struct
        // nf_nat_range (2): flags, two addresses of 16 bytes, two ports.
        let (flags, room) = match found.revision {
            0 => (4, 4),
            _ => (0, 16),
        };
        let info = &found.info;
        let says = u32_at(info, flags)?;
        let (first, last) = (flags + 4, flags + 4 + room);
        let host = |at| wire::ip(info.get(at..at + self.length)?);
        let port = |at| u16_at(info, at).map(u16::from_be);
        let ports = Some((port(last + room)?, port(last + room + 2)?));
        let is_one = host(first) == host(last);
        Some((
            host(first).filter(|_| says & SAYS_HOSTS != 0 && is_one),
            ports.filter(|_| says & SAYS_PORTS != 0),
        ))
    }
}

/// From one port to another one, in network byte order.
fn range(from: &[u8], to: &[u8]) -> Option<Ports> {
    let port = |bytes: &[u8]| Some(u16::from_be_bytes(bytes.try_into().ok()?));
    Some((port(from)?, port(to)?))
}
