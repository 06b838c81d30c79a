// SPDX-License-Identifier: GPL-2.0-or-later
//! Which rules go by marks of packets or connections.

use std::collections::BTreeMap;

use super::expr::{self, Bitwise, Expr, Extension, Lookup, Reg, Source, Statement, Verdict};
use super::residue::Origin;
use super::{
    xt, Chain, EffectKind, Family, FirewallRule, FirewallTable, Hook, Packets, RuleRef, Ruleset,
    Value, HOOKS_OF_IP,
};
use crate::netlink::wire::u32_at;

/// Marks with other bits than a rule expects in them.
#[derive(Clone, Copy, Debug)]
pub struct Strange {
    /// Those bits.
    pub bits: u32,
    /// Whether rules that set a mark and leave these bits as they are count too.
    pub kept: bool,
}

impl Ruleset {
    /// The first rule that packets may meet at one of these hooks and that may do something else where a packet,
    /// or its connection, bears a strange mark.
    pub fn by_mark(&self, packets: Packets, hooks: &[Hook], strange: Strange) -> Option<RuleRef> {
        let goes = |rule: &FirewallRule, table: &FirewallTable| goes_by_mark(rule, table, strange);
        self.first(|family| family.sees(packets), hooks, goes)
    }

    /// The first rule at bridges that reads or sets the mark of a frame, or of its connection.
    pub fn bridge_marks(&self) -> Option<RuleRef> {
        self.first(
            |family| family == Family::Bridge,
            &HOOKS_OF_IP,
            |rule, _| rule.exprs.iter().any(is_of_mark),
        )
    }

    /// The first rule of these families that packets get to from one of these hooks and that is meant.
    fn first(
        &self,
        is_met: impl Fn(Family) -> bool,
        hooks: &[Hook],
        is_meant: impl Fn(&FirewallRule, &FirewallTable) -> bool,
    ) -> Option<RuleRef> {
        let tables = self.tables.iter();
        let met = tables.filter(|((family, _), table)| !table.dormant && is_met(*family));
        for ((family, name), table) in met {
            for (chain_name, chain) in reached(table, hooks) {
                let mut rules = chain.rules.iter();
                if let Some(rule) = rules.find(|rule| is_meant(rule, table)) {
                    let at = Origin {
                        family: *family,
                        table_name: name,
                        table,
                        chain: chain_name,
                        rule: Some(rule),
                    };
                    return Some(at.rule_ref());
                }
            }
        }
        None
    }
}

fn is_of_mark(expr: &Expr) -> bool {
    match expr {
        Expr::Load { source, .. } => is_mark(source),
        Expr::Effect(statement) => {
            statement.kind == EffectKind::Mark || statement.name == "ct mark set"
        }
        Expr::Match(extension) | Expr::Target(extension) => extension.name.contains("mark"),
        Expr::Unknown(_) => true,
        _ => false,
    }
}

/// The chains that packets get to from these hooks.
pub(super) fn reached<'a>(
    table: &'a FirewallTable,
    hooks: &[Hook],
) -> BTreeMap<&'a str, &'a Chain> {
    let mut reached = BTreeMap::new();
    let is_at = |hook: Hook| hooks.contains(&hook);
    let bases = table.chains.iter();
    let bases = bases.filter(|(_, chain)| chain.base.as_ref().is_some_and(|b| is_at(b.hook)));
    let mut open: Vec<&str> = bases.map(|(name, _)| name.as_str()).collect();
    while let Some(name) = open.pop() {
        let Some((name, chain)) = table.chains.get_key_value(name) else {
            continue;
        };
        if reached.insert(name.as_str(), chain).is_none() {
            let exprs = chain.rules.iter().flat_map(|rule| &rule.exprs);
            open.extend(exprs.flat_map(|expr| targets(expr, table)));
        }
    }
    reached
}

/// The chains that an expression may lead to.
fn targets<'a>(expr: &'a Expr, table: &'a FirewallTable) -> Vec<&'a str> {
    let target = |verdict: &'a Verdict| match verdict {
        Verdict::Jump(chain) | Verdict::Goto(chain) => Some(chain.as_str()),
        _ => None,
    };
    match expr {
        Expr::Verdict(verdict) => target(verdict).into_iter().collect(),
        Expr::Lookup(lookup) if lookup.verdict => {
            let set = table.sets.get(&lookup.set);
            let Some(elements) = set.and_then(|set| set.elements.as_ref()) else {
                // To any.
                return table.chains.keys().map(String::as_str).collect();
            };
            let verdicts = elements.iter().filter_map(|element| match &element.value {
                Value::Verdict(verdict) => target(verdict),
                _ => None,
            });
            verdicts.collect()
        }
        _ => Vec::new(),
    }
}

/// A mark, or a part of one, in a register.
#[derive(Clone, Copy)]
pub(super) struct Mark {
    pub at: Reg,
    pub len: usize,
    /// The bits that are still those of the mark.
    pub bits: u32,
    /// Whether others were set.
    is_changed: bool,
}

impl Mark {
    pub(super) fn whole(at: Reg, len: usize) -> Self {
        Self {
            at,
            len,
            bits: u32::MAX,
            is_changed: false,
        }
    }

    /// What is left of it, in another register, when it has been changed.
    pub(super) fn changed(self, at: Reg, len: usize, how: &Bitwise) -> Self {
        let (bits, is_changed) = match how {
            Bitwise::MaskXor(mask, xor) if len == 4 => {
                let mask = u32_at(mask, 0).unwrap_or(u32::MAX);
                let sets = xor.iter().any(|byte| *byte != 0);
                (self.bits & mask, self.is_changed || sets)
            }
            Bitwise::Swap(_) => (self.bits, self.is_changed),
            _ => (self.bits, true),
        };
        Self {
            at,
            len,
            bits,
            is_changed,
        }
    }
}

/// The marks in the registers of a rule that is being looked at.
struct Marks<'a> {
    table: &'a FirewallTable,
    strange: Strange,
    loaded: Vec<Mark>,
}

/// Whether what a rule does depends on the mark of the packet, or of its connection.
pub(super) fn asks(rule: &FirewallRule, table: &FirewallTable) -> bool {
    let any = Strange {
        bits: u32::MAX,
        kept: false,
    };
    goes_by_mark(rule, table, any)
}

fn goes_by_mark(rule: &FirewallRule, table: &FirewallTable, strange: Strange) -> bool {
    let mut marks = Marks {
        table,
        strange,
        loaded: Vec::new(),
    };
    rule.exprs.iter().any(|expr| marks.matter(expr))
}

impl Marks<'_> {
    /// Whether what an expression does depends on the strange bits.
    fn matter(&mut self, expr: &Expr) -> bool {
        match expr {
            Expr::Load { source, dreg, len } => {
                let bits = if is_mark(source) { u32::MAX } else { 0 };
                self.put(*dreg, *len, bits, false);
                false
            }
            Expr::Immediate { dreg, data } => {
                self.put(*dreg, data.len(), 0, false);
                false
            }
            Expr::Bitwise {
                sreg,
                dreg,
                len,
                how,
            } => {
                let found = self.found(*sreg, *len).next();
                let left = found.map(|mark| match mark.at == *sreg {
                    true => mark.changed(*dreg, *len, how),
                    // A part of it.
                    false => mark.changed(*dreg, 0, how),
                });
                let left = left.map_or((0, false), |mark| (mark.bits, mark.is_changed));
                self.put(*dreg, *len, left.0, left.1);
                false
            }
            Expr::Range { sreg, from, .. } => self.is_strange(*sreg, from.len()),
            Expr::Lookup(lookup) => self.is_looked_up(lookup),
            Expr::Match(found) => asked(found) & self.strange.bits != 0,
            Expr::Target(found) => self.strange.kept && kept(found) & self.strange.bits != 0,
            Expr::Effect(statement) => self.is_used(statement),
            // It may use what is in the registers: `meta mark or ct mark` above all.
            Expr::Unknown(_) => self.is_strange(0, expr::REGISTERS),
            Expr::Condition(_) | Expr::Limit(_) | Expr::Quiet(_) | Expr::Verdict(_) => false,
        }
    }

    fn put(&mut self, at: Reg, len: usize, bits: u32, is_changed: bool) {
        self.loaded
            .retain(|mark| mark.at + mark.len <= at || at + len <= mark.at);
        if bits != 0 {
            self.loaded.push(Mark {
                at,
                len,
                bits,
                is_changed,
            });
        }
    }

    fn found(&self, at: Reg, len: usize) -> impl Iterator<Item = &Mark> {
        let marks = self.loaded.iter();
        marks.filter(move |mark| mark.at < at + len && at < mark.at + mark.len)
    }

    fn is_strange(&self, at: Reg, len: usize) -> bool {
        let bits = self.strange.bits;
        self.found(at, len).any(|mark| mark.bits & bits != 0)
    }

    fn is_looked_up(&mut self, lookup: &Lookup) -> bool {
        let set = self.table.sets.get(&lookup.set);
        let len = set.map_or(expr::REGISTERS, |set| set.key_len);
        let is_strange = self.is_strange(lookup.sreg, len);
        if let Some(dreg) = lookup.dreg.filter(|_| !lookup.verdict) {
            self.put(dreg, 4, 0, false);
        }
        is_strange
    }

    /// A mark that is only copied, from the packet to its connection and back, stays what it is.
    fn is_used(&self, statement: &Statement) -> bool {
        let sets_mark = matches!(statement.name, "meta mark set" | "ct mark set");
        let registers = statement.registers.iter();
        let mut used = registers.flat_map(|(_, reg)| self.found(*reg, 4));
        used.any(|mark| {
            let matters = !sets_mark || self.strange.kept && mark.is_changed;
            matters && mark.bits & self.strange.bits != 0
        })
    }
}

/// `ct mark`, `ct original mark`; not `ct secmark`.
pub(super) fn is_mark(source: &Source) -> bool {
    match source {
        Source::Meta(key) => *key == expr::META_MARK,
        Source::Other(name) => name.starts_with("ct ") && name.ends_with(" mark"),
        _ => false,
    }
}

/// The bits of marks that a match of xtables may ask for.
fn asked(found: &Extension) -> u32 {
    match (found.name.as_str(), found.revision) {
        // struct xt_mark_mtinfo1, xt_connmark_mtinfo1: mark, mask.
        ("mark" | "connmark", 1) => u32_at(&found.info, 4).unwrap_or(u32::MAX),
        ("mark" | "connmark" | "bpf", _) => u32::MAX,
        _ => 0,
    }
}

/// The bits of marks that a target of xtables leaves as they are while it sets others.
fn kept(found: &Extension) -> u32 {
    const CONNMARK_SET: u8 = 0;
    let word = |at: usize| u32_at(&found.info, at).unwrap_or(u32::MAX);
    let sets = |value: u32, mask: u32| if value == 0 { 0 } else { !mask };
    match (found.name.as_str(), found.revision) {
        // struct xt_mark_tginfo2: mark, mask.
        ("MARK", 2) => sets(word(0), word(4)),
        // The mark, and the masks of the connection's and of the packet's.
        ("CONNMARK", _) => match xt::connmark_mode(found) {
            Some(CONNMARK_SET) => sets(word(0), word(4)),
            Some(xt::CONNMARK_RESTORE) => !word(8),
            Some(_) => !word(4),
            None => u32::MAX,
        },
        // struct xt_tproxy_target_info: mask, mark.
        ("TPROXY", _) => sets(word(4), word(0)),
        ("MARK", _) => u32::MAX,
        _ => 0,
    }
}
