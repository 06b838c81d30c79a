// SPDX-License-Identifier: GPL-2.0-or-later
//! Which rules take bits off the marks of packets or connections that somebody else has put there.

use super::expr::{self, Expr, Extension, Reg, Source, Statement, Verdict};
use super::marks::{is_mark, reached, Mark};
use super::residue::Origin;
use super::{xt, FirewallRule, Hook, Packets, RuleRef, Ruleset};
use crate::netlink::wire::u32_at;

/// Where forwarded packets have no route yet, ...
const BEFORE_ROUTING: [Hook; 2] = [Hook::Ingress, Hook::Prerouting];
/// ... and where they have.
const AFTER_ROUTING: [Hook; 3] = [Hook::Forward, Hook::Postrouting, Hook::Egress];

/// What a rule does to bits of a mark.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Change {
    /// Sets the packet's mark without them.
    OfPacket,
    /// Sets the connection's without them.
    OfConnection,
    /// Sets the connection's to the packet's, bits and all.
    Saved,
}

impl Ruleset {
    /// The first rule by which a forwarded connection loses `bits` of its mark after its first packet was routed by them,
    /// or some of its packets lose them before they are routed: by something that is not the same for all, such as their
    /// length. Where the first packet loses them before it is routed, all of them go the same way.
    pub fn takes_marks(&self, packets: Packets, bits: u32) -> Option<RuleRef> {
        let first = |hooks: &[Hook], change: Change| {
            self.find(packets, hooks, |rules| {
                let mut rules = rules.iter();
                rules.position(|(_, rule)| changes(rule, bits).contains(&change))
            })
        };
        let lost = [&BEFORE_ROUTING[..], &AFTER_ROUTING[..]]
            .into_iter()
            .find_map(|hooks| first(hooks, Change::OfConnection));
        let saved = || {
            first(&AFTER_ROUTING, Change::OfPacket)?;
            first(&AFTER_ROUTING, Change::Saved)
        };
        lost.or_else(saved).or_else(|| self.apart(packets, bits))
    }

    /// The first rule of a table that sets packets' marks before routing by which packets of one flow differ.
    fn apart(&self, packets: Packets, bits: u32) -> Option<RuleRef> {
        let leads = |expr: &Expr| match expr {
            Expr::Verdict(verdict) => !matches!(verdict, Verdict::Drop | Verdict::Continue),
            Expr::Lookup(lookup) => lookup.verdict,
            _ => false,
        };
        let steers = |rule: &FirewallRule| changes(rule, bits).contains(&Change::OfPacket);
        self.find(packets, &BEFORE_ROUTING, |rules| {
            if !rules.iter().any(|(_, rule)| steers(rule)) {
                return None;
            }
            rules.iter().position(|(_, rule)| {
                !is_of_flow(rule) && (rule.exprs.iter().any(leads) || steers(rule))
            })
        })
    }

    /// The first rule that `pick` picks among those of a table that packets may meet at these hooks, each with its chain.
    fn find(
        &self,
        packets: Packets,
        hooks: &[Hook],
        pick: impl Fn(&[(&str, &FirewallRule)]) -> Option<usize>,
    ) -> Option<RuleRef> {
        let tables = self.tables.iter();
        let mut met = tables.filter(|((family, _), table)| !table.dormant && family.sees(packets));
        met.find_map(|((family, name), table)| {
            let chains = reached(table, hooks).into_iter();
            let rules: Vec<(&str, &FirewallRule)> = chains
                .flat_map(|(chain, found)| found.rules.iter().map(move |rule| (chain, rule)))
                .collect();
            let (chain, rule) = rules[pick(&rules)?];
            let at = Origin {
                family: *family,
                table_name: name,
                table,
                chain,
                rule: Some(rule),
            };
            Some(at.rule_ref())
        })
    }
}

/// A mark in a register, and whether it is the connection's.
#[derive(Clone, Copy)]
struct Loaded {
    mark: Mark,
    is_connections: bool,
}

/// What a rule does to these bits.
fn changes(rule: &FirewallRule, bits: u32) -> Vec<Change> {
    let mut loaded: Vec<Loaded> = Vec::new();
    let mut changes = Vec::new();
    let put = |loaded: &mut Vec<Loaded>, at: Reg, len: usize, new: Option<Loaded>| {
        loaded.retain(|l| l.mark.at + l.mark.len <= at || at + len <= l.mark.at);
        loaded.extend(new);
    };
    for expr in &rule.exprs {
        match expr {
            Expr::Load { source, dreg, len } => {
                let new = is_mark(source).then(|| Loaded {
                    mark: Mark::whole(*dreg, *len),
                    is_connections: matches!(source, Source::Other(_)),
                });
                put(&mut loaded, *dreg, *len, new);
            }
            Expr::Immediate { dreg, data } => put(&mut loaded, *dreg, data.len(), None),
            Expr::Bitwise {
                sreg,
                dreg,
                len,
                how,
            } => {
                let from = loaded.iter().find(|l| l.mark.at == *sreg);
                let new = from.map(|from| Loaded {
                    mark: from.mark.changed(*dreg, *len, how),
                    ..*from
                });
                put(&mut loaded, *dreg, *len, new);
            }
            Expr::Lookup(lookup) => {
                if let Some(dreg) = lookup.dreg.filter(|_| !lookup.verdict) {
                    put(&mut loaded, dreg, 4, None);
                }
            }
            Expr::Target(found) => changes.extend(of_target(found, bits)),
            Expr::Effect(statement) => {
                let from = |l: &&Loaded| statement.registers.iter().any(|(_, r)| *r == l.mark.at);
                let kept = loaded
                    .iter()
                    .find(from)
                    .filter(|l| l.mark.bits & bits == bits);
                changes.extend(of_statement(statement, kept.map(|l| l.is_connections)));
            }
            _ => {}
        }
    }
    changes
}

/// `kept`: the bits are set as they were, in the connection's mark or in the packet's.
fn of_statement(statement: &Statement, kept: Option<bool>) -> Option<Change> {
    match (statement.name, kept) {
        ("meta mark set", None) => Some(Change::OfPacket),
        ("ct mark set", None) => Some(Change::OfConnection),
        ("ct mark set", Some(false)) => Some(Change::Saved),
        _ => None,
    }
}

fn of_target(found: &Extension, bits: u32) -> Option<Change> {
    const SET: u8 = 0;
    let word = |at: usize| u32_at(&found.info, at).unwrap_or(u32::MAX);
    match (found.name.as_str(), found.revision) {
        // struct xt_mark_tginfo2: mark, mask.
        ("MARK", 2) => (word(4) & bits != 0).then_some(Change::OfPacket),
        ("MARK", _) => Some(Change::OfPacket),
        // struct xt_connmark_tginfo1: mark, and the masks of the connection's and of the packet's.
        ("CONNMARK", _) => match xt::connmark_mode(found) {
            Some(xt::CONNMARK_RESTORE) => {
                let lost = word(8) & bits != 0 && word(4) & bits != bits;
                lost.then_some(Change::OfPacket)
            }
            Some(mode) if word(4) & bits != 0 => match mode != SET && word(8) & bits == bits {
                true => Some(Change::Saved),
                false => Some(Change::OfConnection),
            },
            Some(_) => None,
            None => Some(Change::OfConnection),
        },
        _ => None,
    }
}

/// Whether all that a rule asks for is the same for all packets of a flow in one direction.
fn is_of_flow(rule: &FirewallRule) -> bool {
    const NETWORK: u32 = 1;
    const TRANSPORT: u32 = 2;
    let is_of_flow = |source: &Source| match source {
        Source::Meta(key) => matches!(
            *key,
            expr::META_PROTOCOL
                | expr::META_NFPROTO
                | expr::META_L4PROTO
                | expr::META_IIF
                | expr::META_IIFNAME
                | expr::META_IIFTYPE
                | expr::META_IIFGROUP
                | expr::META_IIFKIND
                // That of later packets is the connection's.
                | expr::META_MARK
        ),
        // Protocol and addresses of either family, or the beginning of an address; ports.
        Source::Payload(NETWORK, offset, len) => match offset {
            6 | 9 => *len == 1,
            8 => *len >= 4,
            12..=39 => true,
            _ => false,
        },
        Source::Payload(TRANSPORT, offset, len) => offset + len <= 4,
        Source::Other(name) if name.contains("addr") || name.contains("proto-") => true,
        _ => is_mark(source),
    };
    rule.exprs.iter().all(|expr| match expr {
        Expr::Load { source, .. } => is_of_flow(source),
        Expr::Match(found) => is_match_of_flow(found),
        Expr::Condition(_) | Expr::Limit(_) | Expr::Unknown(_) => false,
        _ => true,
    })
}

/// The ports of `tcp` are asked without its flags: struct xt_tcp has their masks behind the ports and the option.
fn is_match_of_flow(found: &Extension) -> bool {
    match found.name.as_str() {
        "tcp" => found
            .info
            .get(8..11)
            .is_some_and(|asked| *asked == [0, 0, 0]),
        "udp" | "multiport" | "iprange" | "mac" | "comment" | "set" | "mark" | "connmark" => true,
        _ => false,
    }
}
