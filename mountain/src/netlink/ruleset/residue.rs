// SPDX-License-Identifier: GPL-2.0-or-later
//! What rules may still do to a packet, in a form that can be compared.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::rc::Rc;

use sha2::{Digest, Sha256};

use super::expr::hex;
use super::facts::Facts;
use super::{marks, text, Family, FirewallRule, FirewallTable, RuleRef};

/// What a statement does to a packet, or because of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum EffectKind {
    /// Drops, rejects or steals.
    Drop,
    /// Changes an address or a port of a connection.
    Nat,
    /// Changes the destination of a connection to this host.
    Redirect,
    /// Changes the source of a connection to an address of the device that it leaves by.
    Masquerade,
    /// Sets the packet's mark, by which it may be routed.
    Mark,
    /// Sets something else that only programs and queues read: priority, class, the connection's mark.
    Label,
    /// Hands it to a program.
    Queue,
    /// Changes how the connection is tracked: not at all, zone, helper, timeout.
    Track,
    /// Writes an address or a port to the packet, of which connection tracking does not know.
    Address,
    /// Writes to the packet: another header field, an option, the MSS.
    Modify,
    /// Sends a copy of it elsewhere.
    Copy,
    /// Sends it another way: to another device, a socket, a flow table.
    Forward,
    /// Adds it to a set.
    Remember,
    /// Uses up a named limit or quota, or sets another named object.
    Object,
    /// Cannot be evaluated, and so may do anything.
    Unknown,
}

impl EffectKind {
    /// Whether it may keep a packet from going on to where it was sent.
    fn stops(self) -> bool {
        matches!(
            self,
            Self::Drop | Self::Queue | Self::Forward | Self::Unknown
        ) || self.is_nat()
    }

    /// Whether it translates connections.
    pub fn is_nat(self) -> bool {
        matches!(self, Self::Nat | Self::Redirect | Self::Masquerade)
    }

    /// Whether all that do this end the packet's way through the chain.
    pub(super) fn ends(self) -> bool {
        self.is_nat() || matches!(self, Self::Queue | Self::Drop)
    }

    /// Whether a rule that does this may end there for some packets, as by a condition: what is not known may be one,
    /// an element is not there or not added, a limit is used up, a header or a socket is missing.
    pub(super) fn asks(self) -> bool {
        matches!(
            self,
            Self::Address
                | Self::Modify
                | Self::Forward
                | Self::Remember
                | Self::Object
                | Self::Unknown
        )
    }
}

/// A statement that a packet may meet.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Effect {
    /// What it does.
    pub kind: EffectKind,
    /// The rule, or the policy, that it belongs to.
    pub rule: RuleRef,
}

/// Something of a rule that could not be decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The rest applies to some packets.
    If(String),
    Do(EffectKind, String),
}

/// How a rule ends.
#[derive(Clone, Debug)]
pub(super) enum End<'a> {
    Continue,
    Accept,
    Drop,
    Return,
    /// By the last step.
    Stop,
    Jump(Rc<Body<'a>>),
    Goto(Rc<Body<'a>>),
}

/// Where a line comes from: the chain that is run, and the rule.
#[derive(Clone, Copy)]
pub(super) struct Origin<'a> {
    pub family: Family,
    pub table_name: &'a str,
    pub table: &'a FirewallTable,
    pub chain: &'a str,
    /// `None`: the policy.
    pub rule: Option<&'a FirewallRule>,
}

/// What may become of the packets that come to a line, or to a body.
#[derive(Clone, Copy, Default)]
pub(super) struct Fate {
    /// Some may be accepted, or be handed to what is not known.
    pub through: bool,
    /// Some may go on where the body was jumped to from.
    pub back: bool,
    /// Some may go on with the next line.
    pub past: bool,
}

/// What remains of a rule; of one with a verdict map, for some of its keys.
pub(super) struct ResidueLine<'a> {
    pub steps: Vec<Step>,
    pub end: End<'a>,
    pub origin: Origin<'a>,
    pub fate: Fate,
    digest: [u8; 32],
}

/// What remains of a chain.
pub(super) struct Body<'a> {
    pub lines: Vec<Rc<ResidueLine<'a>>>,
    pub digest: [u8; 32],
    fate: Fate,
}

/// What identifies it: the same of those that do the same.
impl fmt::Debug for Body<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.digest))
    }
}

impl Origin<'_> {
    /// The same for one rule, or for one policy.
    fn address(&self) -> *const () {
        let policy = self.chain.as_ptr().cast();
        self.rule
            .map_or(policy, |rule| std::ptr::from_ref(rule).cast())
    }

    pub fn rule_ref(&self) -> RuleRef {
        RuleRef {
            family: self.family,
            table: self.table_name.to_owned(),
            chain: self.chain.to_owned(),
            handle: self.rule.map(|rule| rule.handle),
            text: match self.rule {
                Some(rule) => text::rule(rule, self.table),
                None => "drop".to_owned(),
            },
        }
    }
}

impl<'a> ResidueLine<'a> {
    pub fn new(steps: Vec<Step>, end: End<'a>, origin: Origin<'a>) -> Self {
        use EffectKind as E;
        let does = |kinds: &[E]| {
            let is_one = |step: &Step| matches!(step, Step::Do(kind, _) if kinds.contains(kind));
            steps.iter().any(is_one)
        };
        let by_end = end.fate();
        let is_stopped = matches!(end, End::Stop) && !does(&[E::Drop]);
        let asks = steps.iter().any(|step| match step {
            Step::If(_) => true,
            Step::Do(kind, _) => kind.asks(),
        });
        let fate = Fate {
            through: by_end.through || is_stopped || does(&[E::Unknown, E::Queue, E::Forward]),
            back: by_end.back,
            past: by_end.past || asks,
        };
        let digest = Sha256::digest(format!("{steps:?} {end:?}")).into();
        Self {
            steps,
            end,
            origin,
            fate,
            digest,
        }
    }

    /// Does nothing but to decide.
    pub(crate) fn only_decides(&self) -> bool {
        !self.steps.iter().any(|step| matches!(step, Step::Do(..)))
    }

    /// The body whose lines can stand in place of this one: every packet that gets here goes there, and what returns
    /// from there returns from here, too, or nothing does.
    pub(crate) fn stands_for(&self) -> Option<&Rc<Body<'a>>> {
        match &self.end {
            _ if !self.steps.is_empty() => None,
            End::Goto(body) => Some(body),
            End::Jump(body) => Some(body).filter(|b| !b.lines.iter().any(|line| line.fate.back)),
            _ => None,
        }
    }
}

impl<'a> End<'a> {
    /// The same end, leading to another body in place of its own. An empty one is left out.
    pub fn with(&self, change: impl FnOnce(&Rc<Body<'a>>) -> Rc<Body<'a>>) -> Self {
        match self {
            Self::Jump(body) => match change(body) {
                body if body.lines.is_empty() => Self::Continue,
                body => Self::Jump(body),
            },
            Self::Goto(body) => match change(body) {
                body if body.lines.is_empty() => Self::Return,
                body => Self::Goto(body),
            },
            end => end.clone(),
        }
    }

    fn fate(&self) -> Fate {
        let (through, back, past) = match self {
            Self::Continue => (false, false, true),
            Self::Drop | Self::Stop => (false, false, false),
            Self::Accept => (true, false, false),
            Self::Return => (false, true, false),
            Self::Jump(body) => (body.fate.through, false, body.fate.back),
            Self::Goto(body) => (body.fate.through, body.fate.back, false),
        };
        Fate {
            through,
            back,
            past,
        }
    }
}

impl<'a> Body<'a> {
    pub fn new(lines: Vec<Rc<ResidueLine<'a>>>) -> Self {
        let mut fate = Fate::default();
        let is_left_at_the_end = lines.iter().all(|line| {
            fate.through |= line.fate.through;
            fate.back |= line.fate.back;
            line.fate.past
        });
        fate.back |= is_left_at_the_end;
        let digests: Vec<u8> = lines.iter().flat_map(|line| line.digest).collect();
        Self {
            digest: Sha256::digest(digests).into(),
            lines,
            fate,
        }
    }
}

/// What remains of one base chain.
#[derive(Clone, Debug)]
pub(super) struct Hooked<'a> {
    pub priority: i32,
    /// What becomes of packets that return from it.
    pub drops: bool,
    pub body: Rc<Body<'a>>,
}

/// What the base chains at a place may still do to a packet of which some facts are known. Chains
/// that do nothing to it are not in here.
#[derive(Clone, Debug)]
pub struct Residue<'a> {
    pub(super) chains: Vec<Hooked<'a>>,
}

impl Hooked<'_> {
    fn does(&self, is_meant: impl Fn(EffectKind) -> bool) -> bool {
        let statements = statements(std::slice::from_ref(self));
        statements.iter().any(|(kind, _)| is_meant(*kind))
    }

    /// Whether what a rule does depends on a mark.
    fn asks_mark(&self) -> bool {
        let lines = lines(std::slice::from_ref(self));
        let mut origins = lines.iter().map(|line| line.origin);
        origins.any(|at| at.rule.is_some_and(|rule| marks::asks(rule, at.table)))
    }
}

/// Every line of these chains, those of a chain that several rules jump to once.
pub(super) fn lines<'a, 'b>(chains: &'b [Hooked<'a>]) -> Vec<&'b ResidueLine<'a>> {
    let mut found = Vec::new();
    let mut seen = HashSet::new();
    let mut bodies: Vec<&Rc<Body<'a>>> = chains.iter().rev().map(|c| &c.body).collect();
    while let Some(body) = bodies.pop() {
        if !seen.insert(Rc::as_ptr(body)) {
            continue;
        }
        for line in &body.lines {
            found.push(&**line);
            if let End::Jump(body) | End::Goto(body) = &line.end {
                bodies.push(body);
            }
        }
    }
    found
}

/// What is done at which line.
fn statements<'a>(chains: &[Hooked<'a>]) -> Vec<(EffectKind, Origin<'a>)> {
    let mut found = Vec::new();
    for line in lines(chains) {
        let drops = matches!(line.end, End::Drop).then_some(EffectKind::Drop);
        let does = line.steps.iter().filter_map(|step| match step {
            Step::Do(kind, _) => Some(*kind),
            Step::If(_) => None,
        });
        let kinds = drops.into_iter().chain(does);
        found.extend(kinds.map(|kind| (kind, line.origin)));
    }
    found
}

impl<'a> Residue<'a> {
    /// What a packet meets at one place after another.
    pub fn in_turn(residues: impl IntoIterator<Item = Self>) -> Self {
        let chains = residues.into_iter().flat_map(|residue| residue.chains);
        Self {
            chains: chains.collect(),
        }
    }

    /// Every statement that the packet may meet, each rule once.
    pub fn effects(&self) -> Vec<Effect> {
        let mut once = HashSet::new();
        let mut found = statements(&self.chains);
        // Before their texts are made: a rule with a large map has very many lines, and a long text.
        found.retain(|(kind, origin)| once.insert((*kind, origin.address())));
        let effect = |(kind, origin): (EffectKind, Origin<'_>)| Effect {
            kind,
            rule: origin.rule_ref(),
        };
        found.into_iter().map(effect).collect()
    }

    /// The rule, or the policy, that drops what is left of all packets, none of which gets through before. `None`:
    /// some may get through, also by a condition that cannot be evaluated.
    pub fn drops_all(&self) -> Option<RuleRef> {
        self.chains.iter().find_map(|chain| {
            let fate = chain.body.fate;
            let all = !fate.through && (chain.drops || !fate.back);
            let line = all.then(|| last_line(&chain.body))??;
            Some(line.origin.rule_ref())
        })
    }

    /// Whether a statement that the packet may meet does one of these.
    pub fn does(&self, kinds: &[EffectKind]) -> bool {
        let statements = statements(&self.chains);
        statements.iter().any(|(kind, _)| kinds.contains(kind))
    }

    /// What is still known of a packet that has met all this.
    pub fn left_of(&self, facts: &Facts) -> Facts {
        use EffectKind as E;
        let mut left = facts.clone();
        if self.does(&[E::Mark, E::Unknown]) {
            left.mark = left.mark.once_set();
        }
        if self.does(&[E::Label, E::Unknown]) {
            left.ct_mark = left.ct_mark.once_set();
        }
        let writes = [E::Address, E::Modify, E::Unknown];
        if self.does(&writes) || self.does(&[E::Nat, E::Redirect, E::Masquerade]) {
            left.is_unicast = false;
            left.source = None;
            left.destination = None;
            left.source_port = None;
            left.destination_port = None;
        }
        left
    }

    /// Only what may keep a packet from going where it was sent, and what decides about that: also the marks that a chain
    /// sets, where a later one goes by marks.
    pub fn verdicts(&self) -> Self {
        let mut known = HashMap::new();
        let chains = self.chains.iter().map(|chain| {
            let body = deciding(&chain.body, &mut known);
            let lines = match chain.drops {
                true => body.lines.clone(),
                false => settle(body.lines.clone(), false),
            };
            Hooked {
                body: Rc::new(Body::new(lines)),
                ..chain.clone()
            }
        });
        let chains: Vec<Hooked<'a>> = chains.collect();
        let (mut kept, mut are_marks_asked) = (Vec::new(), false);
        for chain in chains.into_iter().rev() {
            let stops = chain.does(EffectKind::stops);
            if stops || (are_marks_asked && chain.does(|kind| kind == EffectKind::Mark)) {
                are_marks_asked |= chain.asks_mark();
                kept.push(chain);
            }
        }
        kept.reverse();
        Self { chains: kept }
    }

    /// Only the chains that change how connections are tracked.
    pub fn tracking(&self) -> Self {
        let tracks = |chain: &&Hooked<'a>| chain.does(|kind| kind == EffectKind::Track);
        let chains = self.chains.iter().filter(tracks).cloned();
        Self {
            chains: chains.collect(),
        }
    }

    /// The first rule by which the two differ: one that holds for either alone. `None`: they do the
    /// same to every packet.
    pub fn difference(&self, other: &Residue<'_>) -> Option<RuleRef> {
        let (ours, theirs) = (self.whole(), other.whole());
        (ours.digest != theirs.digest).then(|| first_difference(&ours, &theirs))
    }

    /// All chains as one that jumps to each.
    fn whole(&self) -> Body<'a> {
        let jump = |chain: &Hooked<'a>| {
            let priority = vec![Step::If(format!("priority {}", chain.priority))];
            let first = chain.body.lines[0].origin;
            let end = End::Jump(chain.body.clone());
            Rc::new(ResidueLine::new(priority, end, first))
        };
        Body::new(self.chains.iter().map(jump).collect())
    }
}

/// The line past which no packet of a body goes.
fn last_line<'a, 'b>(body: &'b Body<'a>) -> Option<&'b ResidueLine<'a>> {
    let last = body.lines.iter().find(|line| !line.fate.past)?;
    match &last.end {
        End::Jump(inner) | End::Goto(inner) => last_line(inner).or(Some(last)),
        _ => Some(last),
    }
}

/// A body without what neither stops a packet nor decides whether something does.
fn deciding<'a>(
    body: &Rc<Body<'a>>,
    known: &mut HashMap<*const Body<'a>, Rc<Body<'a>>>,
) -> Rc<Body<'a>> {
    if let Some(done) = known.get(&Rc::as_ptr(body)) {
        return done.clone();
    }
    let mut lines = Vec::new();
    for line in &body.lines {
        let mut steps = line.steps.clone();
        let goes_on = matches!(line.end, End::Continue);
        // Later rules may ask for a mark. What a step may end the rule by is a condition of what comes behind it.
        steps.retain(|step| match step {
            Step::If(_) => true,
            Step::Do(kind, _) => {
                kind.stops() || *kind == EffectKind::Mark || kind.asks() && !goes_on
            }
        });
        let does = steps.iter().any(|step| matches!(step, Step::Do(..)));
        let end = match &line.end {
            // Its last step lets the packet through.
            End::Stop if !does => End::Accept,
            end => end.with(|body| deciding(body, known)),
        };
        if does || !matches!(end, End::Continue) {
            lines.push(Rc::new(ResidueLine::new(steps, end, line.origin)));
        }
    }
    let done = Rc::new(Body::new(lines));
    known.insert(Rc::as_ptr(body), done.clone());
    done
}

fn first_difference(ours: &Body<'_>, theirs: &Body<'_>) -> RuleRef {
    let pairs = ours.lines.iter().zip(&theirs.lines);
    let at = pairs.take_while(|(a, b)| a.digest == b.digest).count();
    match (ours.lines.get(at), theirs.lines.get(at)) {
        (Some(line), Some(their)) => {
            // Two ways to chains that differ: what differs in there says more.
            if let (End::Jump(x) | End::Goto(x), End::Jump(y) | End::Goto(y)) =
                (&line.end, &their.end)
            {
                if line.steps == their.steps && x.digest != y.digest {
                    return first_difference(x, y);
                }
            }
            // The one that the other side has not got at all.
            let mut others = theirs.lines[at..].iter();
            match others.any(|other| other.digest == line.digest) {
                true => inner(their),
                false => inner(line),
            }
        }
        (Some(line), None) => inner(line),
        (None, Some(line)) => inner(line),
        (None, None) => unreachable!("bodies of different digests differ"),
    }
}

/// A rule, or the first one that it leads to.
fn inner(line: &ResidueLine<'_>) -> RuleRef {
    match &line.end {
        End::Jump(body) | End::Goto(body) if line.only_decides() => inner(&body.lines[0]),
        _ => line.origin.rule_ref(),
    }
}

/// The lines of a base chain, and whether it drops what returns from it. Then `policy`, or the rule that stands for it, is
/// the last line.
pub(super) fn close<'a>(
    mut lines: Vec<Rc<ResidueLine<'a>>>,
    drops: bool,
    policy: impl FnOnce() -> Rc<ResidueLine<'a>>,
) -> (Vec<Rc<ResidueLine<'a>>>, bool) {
    // A last rule for all that are left is a policy, unless some of them return past it to another one.
    let returns = lines.iter().any(|line| line.fate.back);
    let last = lines.pop_if(|last| match (&last.end, last.steps.is_empty()) {
        (End::Drop, true) => drops || !returns,
        (End::Accept, true) => !drops || !returns,
        _ => false,
    });
    let drops = (last.as_ref()).map_or(drops, |line| matches!(line.end, End::Drop));
    let mut lines = settle(lines, drops);
    if drops {
        lines.push(last.unwrap_or_else(policy));
    }
    (lines, drops)
}

/// Leaves out, from the end, what decides as the policy does.
fn settle(mut lines: Vec<Rc<ResidueLine<'_>>>, drops: bool) -> Vec<Rc<ResidueLine<'_>>> {
    while let Some(last) = lines.pop_if(|last| last.only_decides()) {
        let rest = match &last.end {
            End::Continue | End::Return => continue,
            End::Accept if !drops => continue,
            End::Drop if drops => continue,
            End::Jump(body) | End::Goto(body) => settle(body.lines.clone(), drops),
            End::Accept | End::Drop | End::Stop => {
                lines.push(last);
                break;
            }
        };
        if !rest.is_empty() {
            let body = Rc::new(Body::new(rest));
            let end = match &last.end {
                End::Goto(_) => End::Goto(body),
                _ => End::Jump(body),
            };
            let line = ResidueLine::new(last.steps.clone(), end, last.origin);
            lines.push(Rc::new(line));
            break;
        }
    }
    lines
}
