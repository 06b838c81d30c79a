// SPDX-License-Identifier: GPL-2.0-or-later
//! To which ports of other hosts rules send what comes in.

use std::collections::{BTreeSet, HashMap};

use super::expr::{Expr, Extension, Reg, Source};
use super::residue::{lines, EffectKind, Residue, Step};
use super::{xt, FirewallRule, FirewallTable};
use crate::netlink::wire::{u16_at, u32_at};

/// First and last.
type Ports = (u16, u16);

/// What a register holds, as far as ports depend on it.
enum Held {
    /// The packet's destination port.
    Port,
    Constant(Vec<u8>),
}

impl Residue<'_> {
    /// The ports that connections have once their destination is translated, as far as rules name them.
    pub fn targets(&self) -> BTreeSet<Ports> {
        let does = |step: &Step| matches!(step, Step::Do(EffectKind::Nat, _));
        let all = lines(&self.chains).into_iter();
        all.filter(|line| line.steps.iter().any(does))
            .filter_map(|line| Some((line.origin.rule?, line.origin.table)))
            .flat_map(|(rule, table)| targets_of(rule, table))
            .collect()
    }
}

/// Those that a rule says; else those that it asks for, which stay as they are.
fn targets_of(rule: &FirewallRule, table: &FirewallTable) -> Vec<Ports> {
    let mut held: HashMap<Reg, Held> = HashMap::new();
    let mut asked: Option<Vec<Ports>> = None;
    let exprs = rule.exprs.iter().flat_map(|expr| match expr {
        Expr::Match(found) => xt::as_exprs(found).unwrap_or_default(),
        expr => vec![expr.clone()],
    });
    for expr in exprs {
        match expr {
            // NFT_PAYLOAD_TRANSPORT_HEADER, of any protocol with ports.
            Expr::Load {
                source: Source::Payload(2, 2, 2),
                dreg,
                ..
            } => {
                held.insert(dreg, Held::Port);
            }
            Expr::Load { dreg, .. } | Expr::Bitwise { dreg, .. } => {
                held.remove(&dreg);
            }
            Expr::Immediate { dreg, data } => {
                held.insert(dreg, Held::Constant(data));
            }
            Expr::Range {
                invert: false,
                sreg,
                from,
                to,
            } if matches!(held.get(&sreg), Some(Held::Port)) => {
                asked = Some(both(asked, range(&from, Some(&to)).into_iter().collect()));
            }
            Expr::Lookup(lookup) if !lookup.invert => {
                if let (Some(Held::Port), Some(set)) =
                    (held.get(&lookup.sreg), table.sets.get(&lookup.set))
                {
                    let elements = set.elements.iter().flatten();
                    let in_set = elements.filter_map(|e| range(&e.key, e.key_end.as_deref()));
                    asked = Some(both(asked, in_set.collect()));
                }
                lookup.dreg.map(|dreg| held.remove(&dreg));
            }
            Expr::Effect(statement) if statement.kind == EffectKind::Nat => {
                let constant = |which: u16| {
                    let (_, reg) = statement
                        .registers
                        .iter()
                        .find(|(kind, _)| *kind == which)?;
                    match held.get(reg)? {
                        Held::Constant(data) => Some(data),
                        Held::Port => None,
                    }
                };
                // NFTA_NAT_REG_PROTO_MIN, NFTA_NAT_REG_PROTO_MAX
                if let Some(said) =
                    constant(5).and_then(|from| range(from, constant(6).map(|to| &**to)))
                {
                    return vec![said];
                }
            }
            Expr::Target(found) => {
                if let Some(said) = of_dnat(&found) {
                    return vec![said];
                }
            }
            _ => {}
        }
    }
    asked.unwrap_or_default()
}

/// What meets two conditions; `None` is none. A range of ports is two, one for each of its ends.
fn both(one: Option<Vec<Ports>>, other: Vec<Ports>) -> Vec<Ports> {
    let Some(one) = one else { return other };
    let pairs = one.iter().flat_map(|a| other.iter().map(move |b| (a, b)));
    let common = pairs.map(|(a, b)| (a.0.max(b.0), a.1.min(b.1)));
    common.filter(|(first, last)| first <= last).collect()
}

/// From one port to another one, in network byte order; without an end, one alone.
fn range(from: &[u8], to: Option<&[u8]>) -> Option<Ports> {
    let port = |bytes: &[u8]| Some(u16::from_be_bytes(bytes.try_into().ok()?));
    Some((port(from)?, port(to.unwrap_or(from))?))
}

/// What the target of xtables says, if that is it and says any.
fn of_dnat(found: &Extension) -> Option<Ports> {
    /// NF_NAT_RANGE_PROTO_SPECIFIED of linux/netfilter/nf_nat.h.
    const SAYS_PORTS: u32 = 1 << 1;

    // struct nf_nat_ipv4_multi_range_compat: how many, and of each flags, two addresses and two ports. struct nf_nat_range
    // (2): flags, two addresses of 16 bytes, two ports.
    let (flags, ports) = match (found.name.as_str(), found.revision) {
        ("DNAT", 0) => (4, 16),
        ("DNAT", _) => (0, 36),
        _ => return None,
    };
    let port = |at| u16_at(&found.info, at).map(u16::from_be);
    let says = u32_at(&found.info, flags)? & SAYS_PORTS != 0;
    Some((port(ports)?, port(ports + 2)?)).filter(|_| says)
}
