// SPDX-License-Identifier: GPL-2.0-or-later
//! Runs chains with registers whose bytes are known or named unknowns.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::ops::ControlFlow::{self, Break, Continue};
use std::ops::RangeBounds;
use std::rc::Rc;

use super::edges::Edges;
use super::expr::{self, Expr, Extension, Lookup, Source, Statement, Verdict};
use super::facts::Facts;
use super::read::{SET_EVAL, SET_TIMEOUT};
use super::registers::{bitwise, in_range, known, named, render, Byte, Registers};
use super::residue::{close, Body, EffectKind, End, Hooked, Origin, Residue, ResidueLine, Step};
use super::sets::{condition, may_match, question};
use super::{marks, xt, Base, Chain, Chains, Element, Family, FirewallRule, Hook, Packets, Place};
use super::{Ruleset, Set, Value};
use crate::netlink::wire::{AF_INET, AF_INET6};

/// Deeper jumps than the kernel allows in nftables (NFT_JUMP_STACK_SIZE), or a loop: not evaluated.
const DEPTH_MAX: usize = 64;

/// A chain that is jumped to by every packet becomes part of its caller up to this length, rules.
const INLINE_MAX: usize = 4096;

impl Ruleset {
    /// What the base chains at a place may still do to a packet of which these facts are known.
    pub fn residue(&self, place: &Place, facts: &Facts) -> Residue<'_> {
        self.evaluate(place, facts, None)
    }

    /// At which addresses and ports these rules begin or cease to apply to such a packet.
    pub fn edges(&self, place: &Place, facts: &Facts) -> Edges {
        let mut edges = Edges::default();
        self.evaluate(place, facts, Some(&mut edges));
        edges
    }

    fn evaluate(&self, place: &Place, facts: &Facts, mut edges: Option<&mut Edges>) -> Residue<'_> {
        use EffectKind as E;
        let residue = self.evaluate_once(place, facts, edges.as_deref_mut());
        // What rules change on the way is not known after.
        let mut open = residue.left_of(facts);
        // A connection is translated once: no rule of NAT meets the address that another one has given it.
        let writes = [E::Address, E::Modify, E::Unknown];
        if place.chains == Chains::Nat && !residue.does(&writes) {
            open = Facts {
                mark: open.mark,
                ct_mark: open.ct_mark,
                ..facts.clone()
            };
        }
        match open == *facts {
            true => residue,
            false => self.evaluate_once(place, &open, edges),
        }
    }

    fn evaluate_once(
        &self,
        place: &Place,
        facts: &Facts,
        edges: Option<&mut Edges>,
    ) -> Residue<'_> {
        let mut run = Run {
            ruleset: self,
            place,
            facts,
            chains: Vec::new(),
            bodies: HashMap::new(),
            running: HashSet::new(),
            edges,
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
        let mut chains = run.chains;
        // In which order the kernel has those of one priority is not to be seen, but it is one for all devices. So they
        // stay in the order of their names: one may ask for what another one sets.
        chains.sort_by_key(|chain| chain.priority);
        Residue { chains }
    }
}

/// Whether packets at a place meet a base chain.
fn concerns(family: Family, base: &Base, place: &Place, facts: &Facts) -> bool {
    let of_kind = match place.chains {
        Chains::All => true,
        Chains::Nat => base.kind == "nat",
        Chains::ButNat => base.kind != "nat",
        Chains::Rerouting => reroutes(base),
        Chains::ButRerouting => !reroutes(base),
    };
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
    family.sees(place.packets)
        && base.hook == place.hook
        && of_kind
        && place.priorities.contains(&base.priority)
        && at_device.is_none_or(|device| bound(&device.name))
}

/// Whether the kernel routes what a chain has changed again.
fn reroutes(base: &Base) -> bool {
    base.hook == Hook::Output && matches!(&*base.kind, "route" | "mangle")
}

impl Origin<'_> {
    /// A set's full name.
    fn set(&self, name: &str) -> String {
        format!("@{} {} {name}", self.family.name(), self.table_name)
    }

    /// A limit with a state of the rule's own: an equal one of another rule counts other packets.
    fn own(&self, limit: &str) -> String {
        let (family, table, chain) = (self.family.name(), self.table_name, self.chain);
        let rule = self.rule.map_or(0, |rule| rule.handle);
        format!("{limit} of {family} {table} {chain} {rule}")
    }
}

struct Run<'a, 'b> {
    ruleset: &'a Ruleset,
    place: &'b Place,
    facts: &'b Facts,
    chains: Vec<Hooked<'a>>,
    bodies: HashMap<(Family, &'a str, &'a str), Rc<Body<'a>>>,
    /// Those that jumps led through.
    running: HashSet<(Family, &'a str, &'a str)>,
    /// Where they are wanted.
    edges: Option<&'b mut Edges>,
}

/// A rule that is being run.
struct RuleRun<'a> {
    here: Origin<'a>,
    registers: Registers,
    steps: Vec<Step>,
    /// By verdict maps whose keys are not known.
    branches: Vec<Branch<'a>>,
    edges: Edges,
}

/// How a rule ends for some keys of a verdict map.
struct Branch<'a> {
    /// How many of the rule's steps come before the map.
    after: usize,
    key: String,
    end: End<'a>,
}

/// Whether the rule goes on behind an expression, or how it ends. One that does not apply ends as one that does nothing.
type Next<'a> = ControlFlow<End<'a>>;

impl<'a> Run<'a, '_> {
    fn base_chain(&mut self, here: Origin<'a>, base: &Base) {
        let lines = self.body(here, here.chain).lines.clone();
        let policy = || Rc::new(ResidueLine::new(Vec::new(), End::Drop, here));
        let (lines, drops) = close(lines, base.drops, policy);
        if !lines.is_empty() {
            self.chains.push(Hooked {
                priority: base.priority,
                drops,
                body: Rc::new(Body::new(lines)),
            });
        }
    }

    fn body(&mut self, here: Origin<'a>, name: &str) -> Rc<Body<'a>> {
        let Some((name, chain)) = here.table.chains.get_key_value(name) else {
            return self.not_evaluated(here, "a chain that is not there");
        };
        let key = (here.family, here.table_name, name.as_str());
        if let Some(body) = self.bodies.get(&key) {
            return body.clone();
        }
        if self.running.len() > DEPTH_MAX || !self.running.insert(key) {
            return self.not_evaluated(here, "jumps too deep");
        }
        let here = Origin {
            chain: name,
            ..here
        };
        let body = Rc::new(self.run_chain(here, chain));
        self.running.remove(&key);
        self.bodies.insert(key, body.clone());
        body
    }

    fn not_evaluated(&self, here: Origin<'a>, why: &str) -> Rc<Body<'a>> {
        let step = Step::Do(EffectKind::Unknown, self.by_device(why));
        let line = ResidueLine::new(vec![step], End::Continue, here);
        Rc::new(Body::new(vec![Rc::new(line)]))
    }

    fn run_chain(&mut self, here: Origin<'a>, chain: &'a Chain) -> Body<'a> {
        let mut lines: Vec<Rc<ResidueLine<'a>>> = Vec::new();
        'rules: for rule in &chain.rules {
            for line in self.run_rule(here, rule) {
                let goes_on = line.fate.past;
                let body = line.stands_for();
                match body.filter(|body| lines.len() + body.lines.len() <= INLINE_MAX) {
                    Some(body) => lines.extend(body.lines.iter().cloned()),
                    None => lines.push(Rc::new(line)),
                }
                if !goes_on {
                    break 'rules;
                }
            }
        }
        // To return at the end is no decision.
        let is_return =
            |last: &mut Rc<ResidueLine>| last.only_decides() && matches!(last.end, End::Return);
        while lines.pop_if(is_return).is_some() {}
        Body::new(lines)
    }

    /// What remains of a rule: nothing when it does nothing to such a packet, several lines of one with a verdict map.
    fn run_rule(&mut self, here: Origin<'a>, rule: &'a FirewallRule) -> Vec<ResidueLine<'a>> {
        let here = Origin {
            rule: Some(rule),
            ..here
        };
        let mut run = RuleRun {
            here,
            registers: Registers::new(),
            steps: Vec::new(),
            branches: Vec::new(),
            edges: Edges::default(),
        };
        let mut exprs = rule.exprs.iter();
        let ran = exprs.try_for_each(|expr| self.run(&mut run, expr));
        let end = ran.break_value().unwrap_or(End::Continue);
        // The kernel asks once. Lines ask again, for what the rule or a chain that comes back may have changed.
        let does = run.steps.iter().any(|step| matches!(step, Step::Do(..)));
        let comes_back = |branch: &Branch<'a>| matches!(branch.end, End::Jump(_));
        let count = run.branches.len();
        let once = does
            || matches!(end, End::Jump(_))
            || (count > 1 && run.branches.iter().any(comes_back));
        let branch = |Branch { after, key, end }: Branch<'a>| {
            let key = match once {
                true => format!("once, of {count}: {key}"),
                false => key,
            };
            let before = run.steps[..after].iter();
            let asked = before.filter(|step| matches!(step, Step::If(_)));
            let steps = asked.cloned().chain([Step::If(key)]);
            ResidueLine::new(steps.collect(), end, here)
        };
        let branches: Vec<ResidueLine<'a>> = run.branches.into_iter().map(branch).collect();
        let mut steps = run.steps;
        let mut lines = Vec::new();
        if matches!(end, End::Continue) {
            let last = steps.iter().rposition(|s| matches!(s, Step::Do(..)));
            steps.truncate(last.map_or(0, |last| last + 1));
        }
        if !matches!(end, End::Continue) || !steps.is_empty() {
            lines.push(ResidueLine::new(steps, end, here));
        }
        lines.extend(branches);
        if let (Some(edges), false) = (&mut self.edges, lines.is_empty()) {
            edges.extend(run.edges);
        }
        lines
    }

    /// One arm for each kind of expression; that makes it long.
    fn run(&mut self, run: &mut RuleRun<'a>, expr: &Expr) -> Next<'a> {
        let registers = &mut run.registers;
        match expr {
            Expr::Quiet(_) => {}
            Expr::Load { source, dreg, len } => match self.load(source, *len) {
                Some(bytes) => registers.write(*dreg, bytes),
                None => return Break(End::Continue),
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
                    Ok(holds) if holds == *invert => return Break(End::Continue),
                    Ok(_) => {}
                    Err(what) => {
                        if self.edges.is_some() {
                            run.edges.add(self.place.packets, &bytes, from, to);
                        }
                        run.steps.push(asked(*invert, &what));
                    }
                }
            }
            Expr::Lookup(lookup) => return self.look_up(run, lookup),
            Expr::Condition(what) => run.steps.push(Step::If(what.clone())),
            Expr::Limit(what) => run.steps.push(Step::If(run.here.own(what))),
            Expr::Match(found) => return self.run_match(run, found),
            Expr::Target(found) => {
                let kind = xt::target(found);
                let mut what = format!("target {}", found.identity());
                if xt::asks_mtu(found) {
                    what += &self.mtu();
                }
                let asks_device = match kind {
                    Some(EffectKind::Unknown | EffectKind::Queue) => true,
                    _ => found.name == "SET" && self.ruleset.ipsets_by_device,
                };
                if asks_device {
                    what = self.by_device(&what);
                }
                run.steps.extend(kind.map(|kind| Step::Do(kind, what)));
                match (found.name.as_str(), kind) {
                    ("ACCEPT", _) => return Break(End::Accept),
                    ("RETURN", _) => return Break(End::Return),
                    ("TPROXY", _) => return Break(End::Stop),
                    (_, Some(kind)) if kind.ends() => return Break(End::Stop),
                    _ => {}
                }
            }
            Expr::Effect(statement) if self.passes_by(statement) => {
                // The kernel ends the rule here (nft_tproxy_eval), and goes on where it translates (nft_nat_inet_eval).
                if statement.kind == EffectKind::Forward {
                    return Break(End::Continue);
                }
            }
            Expr::Effect(statement) => {
                let step = self.statement(run.here, statement, &run.registers);
                run.steps.push(step);
                if statement.ends {
                    return Break(End::Stop);
                }
            }
            Expr::Unknown(name) => {
                let what = self.by_device(name);
                run.steps.push(Step::Do(EffectKind::Unknown, what));
            }
            Expr::Verdict(Verdict::Continue) => {}
            Expr::Verdict(verdict) => return Break(self.end(run.here, verdict)),
        }
        Continue(())
    }

    fn end(&mut self, here: Origin<'a>, verdict: &Verdict) -> End<'a> {
        match verdict {
            Verdict::Accept => End::Accept,
            Verdict::Drop => End::Drop,
            Verdict::Other(code) => End::Goto(self.not_evaluated(here, &format!("verdict {code}"))),
            Verdict::Return => End::Return,
            Verdict::Continue => End::Continue,
            Verdict::Jump(chain) => match self.body(here, chain) {
                body if body.lines.is_empty() => End::Continue,
                body => End::Jump(body),
            },
            Verdict::Goto(chain) => match self.body(here, chain) {
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
        let name: Rc<str> = name.into();
        let is_mark = marks::is_mark(source);
        let loaded = self.facts.load(source, len, self.place)?.into_iter();
        let bytes = loaded.enumerate().map(|(i, known)| match known {
            Some(byte) if is_mark => Byte::Named(byte, name.clone(), i + shift),
            Some(byte) => Byte::Known(byte),
            None => Byte::Open(name.clone(), i + shift),
        });
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

    /// Whether a statement of a chain of both families is about the other one's packets.
    fn passes_by(&self, statement: &Statement) -> bool {
        let family = match self.place.packets {
            Packets::Ipv4 => AF_INET,
            Packets::Ipv6 => AF_INET6,
        };
        statement.family.is_some_and(|only| only != family)
    }

    fn statement(&self, here: Origin<'_>, statement: &Statement, registers: &Registers) -> Step {
        let mut what = format!("{} {}", statement.name, statement.fixed);
        let set = statement.set.as_ref();
        let set = set.and_then(|name| here.table.sets.get(name));
        for (meaning, reg) in &statement.registers {
            // The parts of a concatenation are written one by one.
            let value = match set {
                Some(set) if *meaning == expr::NEW_DATA => registers.read(*reg, set.data_len),
                Some(set) => registers.read(*reg, set.key_len),
                None => registers.read_written(*reg),
            };
            let _ = write!(what, " {meaning}:{}", render(&value));
        }
        // Sets and objects are those of the table.
        let of_table = [expr::SET_UPDATE, expr::OBJECT, "flow add", expr::SYNPROXY];
        if of_table.contains(&statement.name) {
            let _ = write!(what, " in {} {}", here.family.name(), here.table_name);
        }
        // The program at the queue is told the device.
        if statement.kind == EffectKind::Queue {
            what = self.by_device(&what);
        }
        Step::Do(statement.kind, what)
    }

    fn run_match(&mut self, run: &mut RuleRun<'a>, found: &Extension) -> Next<'a> {
        if let Some(exprs) = xt::as_exprs(found) {
            return exprs.iter().try_for_each(|expr| self.run(run, expr));
        }
        match xt::by_facts(found, self.facts) {
            Some(true) => return Continue(()),
            Some(false) => return Break(End::Continue),
            None => {}
        }
        let what = format!("match {}", found.identity());
        match xt::classify(found, self.ruleset.ipsets_by_device) {
            xt::MatchKind::Always => {}
            xt::MatchKind::Packet => run.steps.push(Step::If(what)),
            xt::MatchKind::Limit => run.steps.push(Step::If(run.here.own(&what))),
            xt::MatchKind::Remembers => run.steps.push(Step::Do(EffectKind::Remember, what)),
            xt::MatchKind::Device => run.steps.push(Step::If(self.by_device(&what))),
        }
        Continue(())
    }

    fn look_up(&mut self, run: &mut RuleRun<'a>, lookup: &Lookup) -> Next<'a> {
        let here = run.here;
        let Some(set) = here.table.sets.get(&lookup.set) else {
            let what = self.by_device("a set that is not there");
            run.steps.push(Step::Do(EffectKind::Unknown, what));
            return Continue(());
        };
        let key = run.registers.read(lookup.sreg, set.key_len);
        // Where elements come and go with packets or time, what is in there is not known.
        let changes = set.flags & (SET_EVAL | SET_TIMEOUT) != 0;
        let has_known = key.iter().any(Byte::is_known);
        let elements = may_match(set, &key).filter(|_| !(changes && has_known));
        let what = question(&here.set(&lookup.set), set, &key, elements.as_deref());
        if let (Some(_), Some(elements)) = (&self.edges, &elements) {
            run.edges.look_up(self.place.packets, set, &key, elements);
        }
        if lookup.verdict {
            let Some(elements) = elements else {
                let what = self.by_device(&format!("verdict map {}", lookup.set));
                run.steps.push(Step::Do(EffectKind::Unknown, what));
                return Continue(());
            };
            return self.branch(run, set, &key, &elements, &what);
        }
        let found = match (&elements, known(&key)) {
            (Some(elements), Some(_)) => Some(elements.first()),
            (Some(elements), None) if elements.is_empty() && !changes => Some(None),
            _ => None,
        };
        match found {
            Some(found) if found.is_some() == lookup.invert => return Break(End::Continue),
            Some(Some(element)) => {
                run.steps.extend(element.asks().map(Step::If));
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
        Continue(())
    }

    /// By a verdict map: as one rule for each of its elements that a key may be in. The rest of the rule applies to what
    /// continues.
    fn branch(
        &mut self,
        run: &mut RuleRun<'a>,
        set: &Set,
        key: &[Byte],
        elements: &[&Element],
        question: &str,
    ) -> Next<'a> {
        let is_known = known(key).is_some();
        let after = run.steps.len();
        let mut goes_on = false;
        for element in elements {
            let (continues, end) = match &element.value {
                Value::Verdict(verdict) if *verdict != Verdict::Continue => {
                    (false, self.end(run.here, verdict))
                }
                _ => (true, End::Continue),
            };
            if is_known {
                run.steps.extend(element.asks().map(Step::If));
                return if continues { Continue(()) } else { Break(end) };
            }
            goes_on |= continues;
            let key = match element.is_catch_all() {
                true => format!("{} of {question}", condition(set, key, element)),
                false => condition(set, key, element),
            };
            // Packets of the others, and those that come back from a chain that does nothing, go to the next rule.
            if !matches!(end, End::Continue) {
                run.branches.push(Branch { after, key, end });
            }
        }
        if !goes_on {
            return Break(End::Continue);
        }
        run.steps.push(Step::If(format!("continues by {question}")));
        Continue(())
    }
}

/// What cannot be decided.
fn asked(invert: bool, what: &str) -> Step {
    let not = if invert { "not " } else { "" };
    Step::If(format!("{not}{what}"))
}
