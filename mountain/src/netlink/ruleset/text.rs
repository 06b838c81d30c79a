// SPDX-License-Identifier: GPL-2.0-or-later
//! Rules as text for messages, much as nft(8) prints them. Not complete, and not an identity.

use std::collections::BTreeMap;

use super::expr::{self, hex, Bitwise, Expr, Reg, Source, Statement, Verdict};
use super::read::SET_ANONYMOUS;
use super::{xt, Element, FirewallTable};
use crate::netlink::wire;

/// Longest text of a set's elements.
const ELEMENTS_MAX: usize = 60;

/// How a value is written.
#[derive(Clone, Copy, PartialEq)]
enum Form {
    Name,
    /// Integer of host byte order.
    Host,
    Port,
    Address,
    /// An address of which only so many bits are left.
    Prefix(u32),
    Protocol,
    Nfproto,
    State,
    Hex,
}

/// A rule as text.
pub(super) fn rule(rule: &super::FirewallRule, table: &FirewallTable) -> String {
    let mut writer = Writer {
        table,
        registers: BTreeMap::new(),
        words: Vec::new(),
    };
    for (i, expr) in rule.exprs.iter().enumerate() {
        writer.write(expr, rule.exprs.get(i + 1));
    }
    writer.words.join(" ")
}

struct Writer<'a> {
    table: &'a FirewallTable,
    registers: BTreeMap<Reg, (String, Form)>,
    words: Vec<String>,
}

impl Writer<'_> {
    /// One arm for each kind of expression, in the order of [`Expr`]. `next`: the one behind it.
    fn write(&mut self, expr: &Expr, next: Option<&Expr>) {
        match expr {
            Expr::Load { source, dreg, .. } => {
                self.registers.insert(*dreg, source_text(source));
            }
            Expr::Immediate { dreg, data } => {
                let text = value(data, form_of(data, next));
                self.registers.insert(*dreg, (text, Form::Hex));
            }
            Expr::Bitwise {
                sreg, dreg, how, ..
            } => {
                let masked = self.masked(*sreg, how);
                self.registers.insert(*dreg, masked);
            }
            Expr::Range {
                invert,
                sreg,
                from,
                to,
            } => {
                let (name, form) = self.register(*sreg);
                let range = range(*invert, from, to, form);
                self.words.push(format!("{name} {range}"));
            }
            Expr::Lookup(lookup) => {
                let (name, form) = self.register(lookup.sreg);
                let kind = match (lookup.verdict, lookup.dreg) {
                    (true, _) => " vmap",
                    (false, Some(_)) => " map",
                    (false, None) if lookup.invert => " !=",
                    (false, None) => "",
                };
                let set = self.set(&lookup.set, form);
                self.words.push(format!("{name}{kind} {set}"));
                let value = ("the value".to_owned(), Form::Hex);
                self.registers.extend(lookup.dreg.map(|dreg| (dreg, value)));
            }
            Expr::Condition(what) | Expr::Limit(what) => {
                let name = what.split(' ').next().unwrap_or_default();
                let name = if name == "ct" { "ct count" } else { name };
                self.words.push(name.to_owned());
            }
            Expr::Match(found) => match xt::as_exprs(found) {
                Some(exprs) => exprs.iter().for_each(|expr| self.write(expr, None)),
                None => self.words.push(format!("-m {}", found.name)),
            },
            Expr::Target(found) => self.words.push(format!("-j {}", found.name)),
            Expr::Quiet(what) => self.words.push((*what).to_owned()),
            Expr::Effect(statement) => self.words.push(self.effect(statement)),
            Expr::Unknown(name) => self.words.push(format!("[{name}]")),
            Expr::Verdict(verdict) => self.words.push(verdict_text(verdict)),
        }
    }

    /// What there is once a register has been masked.
    fn masked(&self, sreg: Reg, how: &Bitwise) -> (String, Form) {
        let (name, form) = self.register(sreg);
        let Bitwise::MaskXor(mask, xor) = how else {
            return (name, form);
        };
        let is_zero = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
        if is_zero(xor) {
            return match prefix(mask, form) {
                Some(length) => (name, Form::Prefix(length)),
                None => (format!("{name} & {}", value(mask, form)), form),
            };
        }
        if is_zero(mask) {
            return (value(xor, form), form);
        }
        let pairs = || mask.iter().zip(xor);
        // Bits that are cleared only to be set again are left out.
        let (operator, is_whole) = match pairs().all(|(mask, xor)| mask & xor == 0) {
            true => ('|', pairs().all(|(mask, xor)| mask | xor == 0xff)),
            false => ('^', mask.iter().all(|byte| *byte == 0xff)),
        };
        let masked = match is_whole {
            true => name,
            false => format!("{name} & {}", value(mask, form)),
        };
        (format!("{masked} {operator} {}", value(xor, form)), form)
    }

    fn effect(&self, statement: &Statement) -> String {
        let registers = statement.registers.iter();
        let values: Vec<String> = registers.map(|(_, reg)| self.register(*reg).0).collect();
        let text = format!("{} {}", statement.name, values.join(", "));
        text.trim().to_owned()
    }

    fn register(&self, reg: Reg) -> (String, Form) {
        self.registers
            .get(&reg)
            .cloned()
            .unwrap_or_else(|| ("?".to_owned(), Form::Hex))
    }

    fn set(&self, name: &str, form: Form) -> String {
        let set = self.table.sets.get(name);
        let anonymous = set.filter(|set| set.flags & SET_ANONYMOUS != 0);
        let Some(elements) = anonymous.and_then(|set| set.elements.as_ref()) else {
            return format!("@{name}");
        };
        let text = |element: &Element| match &element.key_end {
            // Of names: all that begin like this.
            Some(_) if form == Form::Name => value(wire::text(&element.key).as_bytes(), form),
            Some(to) => format!("{}-{}", value(&element.key, form), value(to, form)),
            None => value(&element.key, form),
        };
        let all: Vec<String> = elements.iter().map(text).collect();
        let mut text = all.join(", ");
        if text.chars().count() > ELEMENTS_MAX {
            text = text.chars().take(ELEMENTS_MAX).collect::<String>() + "...";
        }
        format!("{{ {text} }}")
    }
}

fn verdict_text(verdict: &Verdict) -> String {
    match verdict {
        Verdict::Accept => "accept".into(),
        Verdict::Drop => "drop".into(),
        Verdict::Return => "return".into(),
        Verdict::Continue => "continue".into(),
        Verdict::Jump(chain) => format!("jump {chain}"),
        Verdict::Goto(chain) => format!("goto {chain}"),
        Verdict::Other(code) => format!("verdict {code}"),
    }
}

fn source_text(source: &Source) -> (String, Form) {
    let (name, form) = match source {
        Source::Meta(key) => match *key {
            expr::META_MARK => ("meta mark", Form::Host),
            expr::META_IIF => ("iif", Form::Host),
            expr::META_OIF => ("oif", Form::Host),
            expr::META_IIFNAME => ("iifname", Form::Name),
            expr::META_OIFNAME => ("oifname", Form::Name),
            expr::META_IIFTYPE => ("iiftype", Form::Host),
            expr::META_OIFTYPE => ("oiftype", Form::Host),
            expr::META_IIFGROUP => ("iifgroup", Form::Host),
            expr::META_OIFGROUP => ("oifgroup", Form::Host),
            expr::META_IIFKIND => ("meta iifkind", Form::Name),
            expr::META_OIFKIND => ("meta oifkind", Form::Name),
            expr::META_NFPROTO => ("meta nfproto", Form::Nfproto),
            expr::META_L4PROTO => ("meta l4proto", Form::Protocol),
            10 => ("meta skuid", Form::Host),
            11 => ("meta skgid", Form::Host),
            19 => ("meta pkttype", Form::Hex),
            23 => ("meta cgroup", Form::Host),
            other => return (format!("meta {other}"), Form::Hex),
        },
        Source::Payload(1, 12, 4) => ("ip saddr", Form::Address),
        Source::Payload(1, 16, 4) => ("ip daddr", Form::Address),
        // iptables compares the bytes that a prefix has; nft(8), too.
        Source::Payload(1, 12, bytes @ 1..=3) => ("ip saddr", Form::Prefix(8 * bytes)),
        Source::Payload(1, 16, bytes @ 1..=3) => ("ip daddr", Form::Prefix(8 * bytes)),
        Source::Payload(1, 8, bytes @ 5..=15) => ("ip6 saddr", Form::Prefix(8 * bytes)),
        Source::Payload(1, 24, bytes @ 5..=15) => ("ip6 daddr", Form::Prefix(8 * bytes)),
        Source::Payload(1, 9, 1) => ("ip protocol", Form::Protocol),
        Source::Payload(1, 6, 1) => ("ip6 nexthdr", Form::Protocol),
        Source::Payload(1, 8, 16) => ("ip6 saddr", Form::Address),
        Source::Payload(1, 24, 16) => ("ip6 daddr", Form::Address),
        Source::Payload(2, 0, 2) => ("sport", Form::Port),
        Source::Payload(2, 2, 2) => ("dport", Form::Port),
        Source::Payload(base, offset, len) => {
            let base = ["ll", "nh", "th", "ih"].get(*base as usize).unwrap_or(&"?");
            return (format!("@{base},{},{}", offset * 8, len * 8), Form::Hex);
        }
        Source::Other(name) if name == "ct state" => ("ct state", Form::State),
        Source::Other(name) if name == "ct mark" => ("ct mark", Form::Host),
        Source::Other(name) | Source::ByDevice(name) => {
            let words: Vec<&str> = name.split(' ').take(2).collect();
            return (words.join(" "), Form::Hex);
        }
        Source::Mss => ("rt mtu", Form::Host),
    };
    (name.to_owned(), form)
}

/// A range as nft(8) compares with it.
fn range(invert: bool, from: &[u8], to: &[u8], form: Form) -> String {
    let is_all = |bytes: &[u8], one: u8| bytes.iter().all(|byte| *byte == one);
    let not = if invert { "!= " } else { "" };
    match invert {
        _ if from == to => format!("{not}{}", value(from, form)),
        false if is_all(to, 0xff) => format!(">= {}", value(from, form)),
        true if is_all(to, 0xff) => format!("< {}", value(from, form)),
        false if is_all(from, 0) => format!("<= {}", value(to, form)),
        true if is_all(from, 0) => format!("> {}", value(to, form)),
        _ => format!("{not}{}-{}", value(from, form), value(to, form)),
    }
}

/// How a constant is written that the next expression uses.
fn form_of(data: &[u8], next: Option<&Expr>) -> Form {
    let sets_mark =
        matches!(next, Some(Expr::Effect(statement)) if statement.name.ends_with("mark set"));
    match data.len() {
        _ if sets_mark => Form::Host,
        4 | 16 => Form::Address,
        2 => Form::Port,
        _ => Form::Hex,
    }
}

/// The length of a prefix that a mask is.
fn prefix(mask: &[u8], form: Form) -> Option<u32> {
    let ones: u32 = mask.iter().map(|byte| byte.leading_ones()).sum();
    let all: u32 = mask.iter().map(|byte| byte.count_ones()).sum();
    (form == Form::Address && ones == all).then_some(ones)
}

fn value(bytes: &[u8], form: Form) -> String {
    let number = |bytes: &[u8]| bytes.iter().fold(0u64, |n, byte| n << 8 | u64::from(*byte));
    let host = |bytes: &[u8]| match cfg!(target_endian = "big") {
        true => number(bytes),
        false => number(&bytes.iter().rev().copied().collect::<Vec<u8>>()),
    };
    match form {
        Form::Name => {
            let name = wire::text(bytes);
            // Shorter than a register and without an end: the beginning of names.
            match !bytes.contains(&0) && bytes.len() < 16 {
                true => format!("\"{name}*\""),
                false => format!("\"{name}\""),
            }
        }
        Form::Host if bytes.len() <= 8 => match host(bytes) {
            n if n > 0xffff => format!("{n:#x}"),
            n => n.to_string(),
        },
        Form::Port if bytes.len() == 2 => number(bytes).to_string(),
        Form::Prefix(length) => {
            let mut whole = bytes.to_vec();
            whole.resize(if bytes.len() > 4 { 16 } else { 4 }, 0);
            format!("{}/{length}", value(&whole, Form::Address))
        }
        Form::Address => wire::ip(bytes).map_or_else(|| hex(bytes), |ip| ip.to_string()),
        Form::Protocol => match bytes {
            [1] => "icmp".into(),
            [6] => "tcp".into(),
            [17] => "udp".into(),
            [58] => "ipv6-icmp".into(),
            [other] => other.to_string(),
            _ => hex(bytes),
        },
        Form::Nfproto => match bytes {
            [2] => "ipv4".into(),
            [10] => "ipv6".into(),
            _ => hex(bytes),
        },
        Form::State if bytes.len() == 4 => {
            let names = ["invalid", "established", "related", "new"];
            let bits = host(bytes);
            let set = (0..names.len()).filter(|i| bits & (1 << *i) != 0);
            match set.map(|i| names[i]).collect::<Vec<_>>() {
                none if none.is_empty() => bits.to_string(),
                set => set.join(","),
            }
        }
        _ => format!("0x{}", hex(bytes)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::ruleset::{EffectKind, FirewallRule};

    fn told(exprs: Vec<Expr>) -> String {
        let set = Expr::Effect(Statement {
            kind: EffectKind::Mark,
            name: "meta mark set",
            fixed: String::new(),
            registers: vec![(3, 0)],
            set: None,
            family: None,
            ends: false,
        });
        let rule = FirewallRule {
            handle: 1,
            exprs: [exprs, vec![set]].concat(),
        };
        super::rule(&rule, &FirewallTable::default())
    }

    #[test]
    fn an_address_is_told_by_its_prefix() {
        for (at, bytes, expected) in [
            (12, &[10, 8, 9][..], "ip saddr 10.8.9.0/24"),
            (16, &[10, 8][..], "ip daddr 10.8.0.0/16"),
            (12, &[10, 8, 9, 1][..], "ip saddr 10.8.9.1"),
            (
                8,
                &[0xfd, 0, 0, 0, 0, 0, 0, 7][..],
                "ip6 saddr fd00:0:0:7::/64",
            ),
        ] {
            let load = Expr::Load {
                source: Source::Payload(1, at, bytes.len() as u32),
                dreg: 0,
                len: bytes.len(),
            };
            let compare = Expr::equals(0, bytes, false);
            let rule = FirewallRule {
                handle: 1,
                exprs: vec![load, compare],
            };
            assert_eq!(super::rule(&rule, &FirewallTable::default()), expected);
        }
    }

    #[test]
    fn a_mark_is_told_as_it_is_set() {
        for (mask, xor, expected) in [
            (!1, 1, "meta mark | 1"),
            (!0, 1, "meta mark ^ 1"),
            (0xff, 0, "meta mark & 255"),
            (0, 5, "5"),
            (0xffff_ff00, 5, "meta mark & 0xffffff00 | 5"),
            (0xff, 5, "meta mark & 255 ^ 5"),
            (!15, 31, "meta mark & 0xfffffff0 ^ 31"),
        ] {
            let [mask, xor] = [mask, xor].map(|word: u32| word.to_ne_bytes().to_vec());
            let load = Expr::Load {
                source: Source::Meta(expr::META_MARK),
                dreg: 0,
                len: 4,
            };
            let bitwise = Expr::Bitwise {
                sreg: 0,
                dreg: 0,
                len: 4,
                how: Bitwise::MaskXor(mask, xor),
            };
            let expected = format!("meta mark set {expected}");
            assert_eq!(told(vec![load, bitwise]), expected);
        }
        let constant = Expr::Immediate {
            dreg: 0,
            data: 7u32.to_ne_bytes().to_vec(),
        };
        assert_eq!(told(vec![constant]), "meta mark set 7");
    }
}
