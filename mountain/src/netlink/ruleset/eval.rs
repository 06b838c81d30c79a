// SPDX-License-Identifier: GPL-2.0-or-later
//! Runs chains with registers whose bytes are known or named unknowns.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::rc::Rc;

use super::expr::{Expr, Extension, Lookup, Source, Statement, Verdict};
use super::facts::Facts;
use super::read::{SET_EVAL, SET_TIMEOUT};
use super::registers::{bitwise, in_range, known, named, render, Byte, Registers};
use super::residue::{ends, is_nothing, joins, leaves, settle, INLINE_MAX, UNREAD};
use super::residue::{Body, EffectKind, End, Hooked, Origin, Residue, ResidueLine, Step};
use super::sets::{condition, may_match, question};
use super::{xt, Base, Chain, Element, Family, Hook, Packets, Place, Ruleset, Set, Value};

/// Deeper jumps than the kernel allows in nftables (NFT_JUMP_STACK_SIZE), or a loop: not evaluated.
const DEPTH_MAX: usize = 64;

impl Ruleset {
    /// What the base chains at a place may still do to a packet of which these facts are known.
    pub fn residue(&self, place: &Place, facts: &Facts) -> Residue<'_> {
        let residue = self.evaluate(place, facts);
        // What rules change on the way is not known after.
        let mut open = facts.clone();
        if residue.writes(&[EffectKind::Mark, EffectKind::Unknown]) {
            open.mark = None;
        }
        if residue.writes(&[EffectKind::Nat, EffectKind::Modify, EffectKind::Unknown]) {
            open.source = None;
            open.destination = None;
            open.source_port = None;
            open.destination_port = None;
        }
        match open == *facts {
            true => residue,
            false => self.evaluate(place, &open),
        }
    }

    fn evaluate(&self, place: &Place, facts: &Facts) -> Residue<'_> {
        let mut run = Run {
            ruleset: self,
            place,
            facts,
            residue: Residue::default(),
            bodies: HashMap::new(),
            running: HashSet::new(),
        };
        for ((family, name), table) in self.tables.iter().filter(|(_, table)| !table.dormant) {
            for (chain_name, chain) in &table.chains {
                let base = chain
                    .base
                    .as_ref()
                    .filter(|base| concerns(*family, base, place, facts));
                if let Some(base) = base {
                    let here = Origin {
                        family: *family,
                        table_name: name,
                        table,
                        chain: chain_name,
                        rule: None,
                    };
                    run.base_chain(here, base);
                }
            }
        }
        // The order of those of one priority is not to be seen.
        run.residue
            .chains
            .sort_by_key(|chain| (chain.priority, chain.body.digest));
        run.residue
    }
}

/// Whether packets at a place meet a base chain.
fn concerns(family: Family, base: &Base, place: &Place, facts: &Facts) -> bool {
    let of_family = match (place.packets, place.hook) {
        (_, Hook::Ingress | Hook::Egress) => matches!(family, Family::Netdev | Family::Inet),
        (Packets::Ipv4, _) => matches!(family, Family::Ip | Family::Inet | Family::LegacyIp),
        (Packets::Ipv6, _) => matches!(family, Family::Ip6 | Family::Inet | Family::LegacyIp6),
    };
    let (first, last) = place.priorities;
    let at_device = match place.hook {
        Hook::Ingress => facts.iif.known(),
        Hook::Egress => facts.oif.known(),
        _ => None,
    };
    let bound = |name: &str| {
        base.devices
            .iter()
            .any(|device| match device.strip_suffix('*') {
                Some(beginning) => name.starts_with(beginning),
                None => device == name,
            })
    };
    of_family
        && base.hook == place.hook
        && (!place.nat || base.kind == "nat")
        && (first..=last).contains(&base.priority)
        && at_device.is_none_or(|device| bound(&device.name))
}

impl Origin<'_> {
    /// A set's full name.
    fn set(&self, name: &str) -> String {
        format!("@{} {} {name}", self.family.name(), self.table_name)
    }
}

struct Run<'a, 'b> {
    ruleset: &'a Ruleset,
    place: &'b Place,
    facts: &'b Facts,
    residue: Residue<'a>,
    bodies: HashMap<(Family, &'a str, &'a str), Rc<Body>>,
    running: HashSet<(Family, &'a str, &'a str)>,
}

/// A rule that is being run.
struct RuleRun<'a> {
    here: Origin<'a>,
    /// So many jumps led here.
    depth: usize,
    registers: Registers,
    steps: Vec<Step>,
}

/// What running an expression leads to.
enum Next {
    On,
    /// The rule does not apply.
    Not,
    End(End),
}

impl<'a> Run<'a, '_> {
    fn base_chain(&mut self, here: Origin<'a>, base: &Base) {
        let body = self.body(here, here.chain, 0);
        let mut lines = body.lines.clone();
        // A last rule for all that are left is a policy, unless some of them return past it to another one.
        let past = lines.iter().any(|line| leaves(&line.end));
        let is_last = |drops: bool| base.drops == drops || !past;
        let mut policy = None;
        let mut drops = base.drops;
        match lines.last() {
            Some(last) if last.is_certain() && matches!(last.end, End::Drop) && is_last(true) => {
                drops = true;
                policy = lines.pop();
            }
            Some(last)
                if last.is_certain() && matches!(last.end, End::Accept) && is_last(false) =>
            {
                drops = false;
                lines.pop();
            }
            _ => {}
        }
        let mut lines = settle(lines, drops);
        if drops {
            lines.push(policy.unwrap_or_else(|| {
                let origin = self.origin(here, None);
                Rc::new(ResidueLine::new(Vec::new(), End::Drop, origin))
            }));
        }
        if !lines.is_empty() {
            let body = Rc::new(Body::new(lines));
            self.residue.chains.push(Hooked {
                priority: base.priority,
                drops: base.drops,
                body,
            });
        }
    }

    fn origin(&mut self, here: Origin<'a>, rule: Option<&'a super::FirewallRule>) -> usize {
        self.residue.origins.push(Origin { rule, ..here });
        self.residue.origins.len() - 1
    }

    fn body(&mut self, here: Origin<'a>, name: &str, depth: usize) -> Rc<Body> {
        let Some((name, chain)) = here.table.chains.get_key_value(name) else {
            return self.not_evaluated(here, "a chain that is not there");
        };
        let key = (here.family, here.table_name, name.as_str());
        if let Some(body) = self.bodies.get(&key) {
            return body.clone();
        }
        if depth > DEPTH_MAX || !self.running.insert(key) {
            return self.not_evaluated(here, "jumps too deep");
        }
        let body = self.run_chain(
            Origin {
                chain: name,
                ..here
            },
            chain,
            depth,
        );
        self.running.remove(&key);
        self.bodies.insert(key, body.clone());
        body
    }

    fn not_evaluated(&mut self, here: Origin<'a>, why: &str) -> Rc<Body> {
        let origin = self.origin(here, None);
        let step = Step::Do(EffectKind::Unknown, self.by_device(why));
        Rc::new(Body::new(vec![Rc::new(ResidueLine::new(
            vec![step],
            End::Continue,
            origin,
        ))]))
    }

    fn run_chain(&mut self, here: Origin<'a>, chain: &'a Chain, depth: usize) -> Rc<Body> {
        let mut lines: Vec<Rc<ResidueLine>> = Vec::new();
        for rule in &chain.rules {
            let Some((steps, end)) = self.run_rule(here, &rule.exprs, depth) else {
                continue;
            };
            let mut end = end;
            if steps.is_empty() {
                end = match end {
                    // Every packet that gets here goes there: as if it stood here.
                    End::Jump(body) if joins(&lines, &body) => {
                        lines.extend(body.lines.iter().cloned());
                        match lines.last().is_some_and(|last| ends(last)) {
                            true => break,
                            false => continue,
                        }
                    }
                    End::Goto(body) if lines.len() + body.lines.len() <= INLINE_MAX => {
                        lines.extend(body.lines.iter().cloned());
                        break;
                    }
                    End::Return => break,
                    end => end,
                };
            }
            let origin = self.origin(here, Some(rule));
            lines.push(Rc::new(ResidueLine::new(steps, end, origin)));
            if lines.last().is_some_and(|last| ends(last)) {
                break;
            }
        }
        // To return at the end is no decision.
        while lines
            .last()
            .is_some_and(|l| l.only_decides() && matches!(l.end, End::Return))
        {
            lines.pop();
        }
        Rc::new(Body::new(lines))
    }

    /// What remains of a rule; `None` when it does nothing to such a packet.
    fn run_rule(
        &mut self,
        here: Origin<'a>,
        exprs: &[Expr],
        depth: usize,
    ) -> Option<(Vec<Step>, End)> {
        let mut run = RuleRun {
            here,
            depth,
            registers: Registers::new(),
            steps: Vec::new(),
        };
        let mut end = End::Continue;
        for expr in exprs {
            match self.run(&mut run, expr) {
                Next::On => {}
                Next::Not => break,
                Next::End(at) => {
                    end = at;
                    break;
                }
            }
        }
        let mut steps = run.steps;
        if is_nothing(&end) {
            end = End::Continue;
            let last = steps
                .iter()
                .rposition(|step| matches!(step, Step::Do(..)))?;
            steps.truncate(last + 1);
        }
        Some((steps, end))
    }

    /// One arm for each kind of expression; that makes it long.
    fn run(&mut self, run: &mut RuleRun<'a>, expr: &Expr) -> Next {
        let registers = &mut run.registers;
        match expr {
            Expr::Quiet(_) => {}
            Expr::Load { source, dreg, len } => match self.load(source, *len) {
                Some(bytes) => registers.write(*dreg, bytes),
                None => return Next::Not,
            },
            Expr::Immediate { dreg, data } => {
                registers.write(*dreg, data.iter().copied().map(Byte::Known).collect());
            }
            Expr::Bitwise {
                sreg,
                dreg,
                len,
                how,
            } => {
                let bytes = bitwise(&registers.read(*sreg, *len), how);
                registers.write(*dreg, bytes);
            }
            Expr::Range {
                invert,
                sreg,
                from,
                to,
            } => {
                let bytes = registers.read(*sreg, from.len());
                match in_range(&bytes, from, to) {
                    Ok(holds) if holds == *invert => return Next::Not,
                    Ok(_) => {}
                    Err(what) => run.steps.push(asked(*invert, &what)),
                }
            }
            Expr::Lookup(lookup) => return self.look_up(run, lookup),
            Expr::Condition(what) => run.steps.push(Step::If(what.clone())),
            Expr::Match(found) => return self.run_match(run, found),
            Expr::Target(found) => {
                let (kind, ends) = xt::target(found);
                let mut what = format!("target {}", found.identity());
                if xt::asks_mtu(found) {
                    what += &self.mtu();
                }
                if kind == Some(EffectKind::Unknown) {
                    what = self.by_device(&what);
                }
                run.steps.extend(kind.map(|kind| Step::Do(kind, what)));
                match (found.name.as_str(), ends) {
                    ("ACCEPT", _) => return Next::End(End::Accept),
                    ("RETURN", _) => return Next::End(End::Return),
                    (_, true) => return Next::End(End::Stop),
                    _ => {}
                }
            }
            Expr::Effect(statement) => {
                let step = self.statement(run.here, statement, &run.registers);
                run.steps.push(step);
                if statement.ends {
                    return Next::End(End::Stop);
                }
            }
            Expr::Unknown(name) => {
                let what = self.by_device(name);
                run.steps.push(Step::Do(EffectKind::Unknown, what));
            }
            Expr::Verdict(verdict) => {
                return Next::End(self.end(run.here, verdict, run.depth));
            }
        }
        Next::On
    }

    fn end(&mut self, here: Origin<'a>, verdict: &Verdict, depth: usize) -> End {
        match verdict {
            Verdict::Accept => End::Accept,
            Verdict::Drop | Verdict::Other(_) => End::Drop,
            Verdict::Return => End::Return,
            Verdict::Continue => End::Continue,
            Verdict::Jump(chain) => End::Jump(self.body(here, chain, depth + 1)),
            Verdict::Goto(chain) => match self.body(here, chain, depth + 1) {
                body if body.lines.is_empty() => End::Return,
                body => End::Goto(body),
            },
        }
    }

    fn load(&self, source: &Source, len: usize) -> Option<Vec<Byte>> {
        let name = match source {
            Source::Meta(key) => format!("meta {key}"),
            // The header that the kernel has written for the device and its gateway.
            Source::Payload(0, ..) if self.place.hook == Hook::Egress => {
                self.by_device("link header")
            }
            Source::Payload(base, ..) => format!("payload {base}"),
            Source::Other(name) => name.clone(),
            Source::ByDevice(name) => self.by_device(name),
            Source::Mss => format!("mss{}", self.mtu()),
        };
        let shift = match source {
            Source::Payload(_, offset, _) => *offset as usize,
            _ => 0,
        };
        let open = named(&name, len).into_iter().map(|byte| match byte {
            Byte::Open(name, i) => Byte::Open(name, i + shift),
            byte => byte,
        });
        let both = self
            .facts
            .load(source, len, self.place)?
            .into_iter()
            .zip(open);
        let bytes = both.map(|(known, open)| known.map_or(open, Byte::Known));
        Some(bytes.collect())
    }

    /// A name for what the device of the packet may decide.
    fn by_device(&self, name: &str) -> String {
        match self.facts.oif.known() {
            Some(device) => format!("{name} on {}", device.name),
            None => name.to_owned(),
        }
    }

    fn mtu(&self) -> String {
        let device = self.facts.oif.known();
        device.map_or(String::new(), |device| format!(" of {}", device.mtu))
    }

    fn statement(&self, here: Origin<'_>, statement: &Statement, registers: &Registers) -> Step {
        let mut what = format!("{} {}", statement.name, statement.fixed);
        for (meaning, reg) in &statement.registers {
            let _ = write!(what, " {meaning}:{}", render(&registers.read_written(*reg)));
        }
        // Sets and objects are those of the table.
        let of_table = ["set update", "object", "flow add", "synproxy"];
        if of_table.contains(&statement.name) {
            let _ = write!(what, " in {} {}", here.family.name(), here.table_name);
        }
        Step::Do(statement.kind, what)
    }

    fn run_match(&mut self, run: &mut RuleRun<'a>, found: &Extension) -> Next {
        if let Some(exprs) = xt::as_exprs(found) {
            for expr in &exprs {
                match self.run(run, expr) {
                    Next::On => {}
                    other => return other,
                }
            }
            return Next::On;
        }
        match xt::by_state(found, self.facts) {
            Some(true) => return Next::On,
            Some(false) => return Next::Not,
            None => {}
        }
        let what = format!("match {}", found.identity());
        match xt::classify(found, self.ruleset.ipsets_by_device) {
            xt::MatchKind::Always => {}
            xt::MatchKind::Packet => run.steps.push(Step::If(what)),
            xt::MatchKind::Remembers => run.steps.push(Step::Do(EffectKind::Remember, what)),
            xt::MatchKind::Device => run.steps.push(Step::If(self.by_device(&what))),
        }
        Next::On
    }

    fn look_up(&mut self, run: &mut RuleRun<'a>, lookup: &Lookup) -> Next {
        let here = run.here;
        let Some(set) = here.table.sets.get(&lookup.set) else {
            let what = self.by_device("a set that is not there");
            run.steps.push(Step::Do(EffectKind::Unknown, what));
            return Next::On;
        };
        let key = run.registers.read(lookup.sreg, set.key_len);
        // Where elements come and go with packets or time, what is in there is not known.
        let changes = set.flags & (SET_EVAL | SET_TIMEOUT) != 0;
        let has_known = key.iter().any(|byte| matches!(byte, Byte::Known(_)));
        let elements = may_match(set, &key).filter(|_| !(changes && has_known));
        let what = question(&here.set(&lookup.set), set, &key, elements.as_deref());
        if lookup.verdict {
            let Some(elements) = elements else {
                let what = self.by_device(&format!("verdict map {}", lookup.set));
                return Next::End(End::Branch(what, vec![(UNREAD.to_owned(), End::Drop)]));
            };
            return self.branch(here, set, &key, &elements, run.depth);
        }
        let found = match (&elements, known(&key)) {
            (Some(elements), Some(_)) => Some(elements.first()),
            (Some(elements), None) if elements.is_empty() && !changes => Some(None),
            _ => None,
        };
        match found {
            Some(found) if found.is_some() == lookup.invert => return Next::Not,
            Some(Some(element)) => {
                if let (Some(dreg), Value::Data(data)) = (lookup.dreg, &element.value) {
                    run.registers
                        .write(dreg, data.iter().copied().map(Byte::Known).collect());
                }
            }
            Some(None) => {}
            None => {
                if let Some(dreg) = lookup.dreg {
                    // As long as it may be: comparisons read what they compare.
                    let value = named(&format!("value of {what}"), 16);
                    run.registers.write(dreg, value);
                }
                run.steps.push(asked(lookup.invert, &what));
            }
        }
        Next::On
    }

    fn branch(
        &mut self,
        here: Origin<'a>,
        set: &Set,
        key: &[Byte],
        elements: &[&Element],
        depth: usize,
    ) -> Next {
        let mut branches = Vec::new();
        let is_known = known(key).is_some();
        let has_catch_all = elements.last().is_some_and(|last| last.is_catch_all());
        for element in elements {
            let end = match &element.value {
                Value::Verdict(verdict) => self.end(here, verdict, depth),
                _ => End::Continue,
            };
            if is_known {
                return Next::End(end);
            }
            // Nothing is what is done to those that are not in the map, too.
            if !is_nothing(&end) || has_catch_all {
                branches.push((condition(set, key, element), end));
            }
        }
        if branches.iter().all(|(_, end)| is_nothing(end)) {
            return Next::Not;
        }
        Next::End(End::Branch(render(key), branches))
    }
}

/// What cannot be decided.
fn asked(invert: bool, what: &str) -> Step {
    let not = if invert { "not " } else { "" };
    Step::If(format!("{not}{what}"))
}
