// SPDX-License-Identifier: GPL-2.0-or-later
//! What rules may still do to a packet, in a form that can be compared.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use sha2::{Digest, Sha256};

use super::{text, Family, FirewallRule, FirewallTable, RuleRef};

/// A chain that is jumped to by every packet becomes part of its caller up to this length, rules.
pub(super) const INLINE_MAX: usize = 4096;

/// What a branch has for the values of a map that cannot be read.
pub(super) const UNREAD: &str = "?";

/// What a statement does to a packet, or because of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum EffectKind {
    /// Drops, rejects or steals.
    Drop,
    /// Changes an address or a port.
    Nat,
    /// Sets the packet's mark, by which it may be routed.
    Mark,
    /// Sets something else that only programs and queues read: priority, class, the connection's mark.
    Label,
    /// Hands it to a program.
    Queue,
    /// Changes how the connection is tracked: not at all, zone, helper, timeout.
    Track,
    /// Writes to the packet: a header field, an option, the MSS.
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

/// A statement that a packet may meet.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Effect {
    /// What it does.
    pub kind: EffectKind,
    /// The rule, or the policy, that it belongs to.
    pub rule: RuleRef,
}

/// Something of a rule that could not be decided.
#[derive(Clone, Debug)]
pub(super) enum Step {
    /// The rest applies to some packets.
    If(String),
    Do(EffectKind, String),
}

/// How a rule ends.
#[derive(Clone, Debug)]
pub(super) enum End {
    Continue,
    Accept,
    Drop,
    Return,
    /// By the last step.
    Stop,
    Jump(Rc<Body>),
    Goto(Rc<Body>),
    /// By a verdict map: for each key, where it is not decided.
    Branch(String, Vec<(String, End)>),
}

/// Where a line comes from: the chain that is run, and the rule.
#[derive(Clone, Copy, Debug)]
pub(super) struct Origin<'a> {
    pub family: Family,
    pub table_name: &'a str,
    pub table: &'a FirewallTable,
    pub chain: &'a str,
    /// `None`: the policy.
    pub rule: Option<&'a FirewallRule>,
}

/// What remains of a rule.
#[derive(Clone, Debug)]
pub(super) struct ResidueLine {
    pub steps: Vec<Step>,
    pub end: End,
    pub origin: OriginId,
    pub digest: [u8; 32],
}

/// Index into the origins of a residue.
pub(super) type OriginId = usize;

/// What remains of a chain.
#[derive(Clone, Debug, Default)]
pub(super) struct Body {
    pub lines: Vec<Rc<ResidueLine>>,
    pub digest: [u8; 32],
}

impl ResidueLine {
    pub fn new(steps: Vec<Step>, end: End, origin: OriginId) -> Self {
        let mut hash = Sha256::new();
        for step in &steps {
            match step {
                Step::If(what) => hash.update(format!("if {what}\n")),
                Step::Do(kind, what) => hash.update(format!("do {kind:?} {what}\n")),
            }
        }
        end.hash(&mut hash);
        let digest = hash.finalize().into();
        Self {
            steps,
            end,
            origin,
            digest,
        }
    }

    /// Applies to every packet that comes to it.
    pub(crate) fn is_certain(&self) -> bool {
        self.steps.is_empty()
    }

    /// Does nothing but to decide.
    pub(crate) fn only_decides(&self) -> bool {
        !self.steps.iter().any(|step| matches!(step, Step::Do(..)))
    }
}

impl End {
    fn hash(&self, hash: &mut Sha256) {
        match self {
            Self::Jump(body) => {
                hash.update("jump ");
                hash.update(body.digest);
            }
            Self::Goto(body) => {
                hash.update("goto ");
                hash.update(body.digest);
            }
            Self::Branch(key, branches) => {
                hash.update(format!("branch {key} {}\n", branches.len()));
                for (value, end) in branches {
                    hash.update(format!("{value}: "));
                    end.hash(hash);
                }
            }
            Self::Continue => hash.update("continue"),
            Self::Accept => hash.update("accept"),
            Self::Drop => hash.update("drop"),
            Self::Return => hash.update("return"),
            Self::Stop => hash.update("stop"),
        }
        hash.update("\n");
    }

    pub(crate) fn bodies(&self) -> Vec<&Rc<Body>> {
        match self {
            Self::Jump(body) | Self::Goto(body) => vec![body],
            Self::Branch(_, branches) => branches.iter().flat_map(|(_, e)| e.bodies()).collect(),
            _ => Vec::new(),
        }
    }

    fn drops(&self) -> bool {
        match self {
            Self::Drop => true,
            Self::Branch(_, branches) => branches.iter().any(|(_, end)| end.drops()),
            _ => false,
        }
    }
}

impl Body {
    pub fn new(lines: Vec<Rc<ResidueLine>>) -> Self {
        let mut hash = Sha256::new();
        lines.iter().for_each(|line| hash.update(line.digest));
        let digest = hash.finalize().into();
        Self { lines, digest }
    }
}

/// What remains of one base chain.
#[derive(Clone, Debug)]
pub(super) struct Hooked {
    pub priority: i32,
    /// Its policy: what becomes of packets that return from it.
    pub drops: bool,
    pub body: Rc<Body>,
}

/// What the base chains at a place may still do to a packet of which some facts are known. Chains
/// that do nothing to it are not in here.
#[derive(Clone, Debug, Default)]
pub struct Residue<'a> {
    pub(super) origins: Vec<Origin<'a>>,
    pub(super) chains: Vec<Hooked>,
}

impl Residue<'_> {
    /// Every statement that the packet may meet, each rule once.
    pub fn effects(&self) -> Vec<Effect> {
        let mut found = Vec::new();
        let mut seen = HashSet::new();
        let mut bodies: Vec<&Rc<Body>> = self.chains.iter().rev().map(|c| &c.body).collect();
        while let Some(body) = bodies.pop() {
            if !seen.insert(Rc::as_ptr(body)) {
                continue;
            }
            for line in &body.lines {
                let mut kinds: Vec<EffectKind> = Vec::new();
                kinds.extend(line.end.drops().then_some(EffectKind::Drop));
                kinds.extend(line.steps.iter().filter_map(|step| match step {
                    Step::Do(kind, _) => Some(*kind),
                    Step::If(_) => None,
                }));
                let rule = |kind| Effect {
                    kind,
                    rule: self.rule(line.origin),
                };
                found.extend(kinds.into_iter().map(rule));
                bodies.extend(line.end.bodies());
            }
        }
        let mut once = HashSet::new();
        found.retain(|e: &Effect| once.insert((e.kind, format!("{}", e.rule))));
        found
    }

    /// The rule, or the policy, that drops what is left of all packets, none of which gets through before. `None`:
    /// some may get through, also by a condition that cannot be evaluated.
    pub fn drops_all(&self) -> Option<RuleRef> {
        let mut known = Fates::new();
        self.chains.iter().find_map(|chain| {
            let fate = fate(&chain.body, &mut known);
            let all = !fate.through && (chain.drops || !fate.back);
            let line = all.then(|| last_line(&chain.body, &mut known))??;
            Some(self.rule(line.origin))
        })
    }

    pub(super) fn writes(&self, kinds: &[EffectKind]) -> bool {
        self.effects()
            .iter()
            .any(|effect| kinds.contains(&effect.kind))
    }

    fn rule(&self, origin: OriginId) -> RuleRef {
        let origin = &self.origins[origin];
        RuleRef {
            family: origin.family,
            table: origin.table_name.to_owned(),
            chain: origin.chain.to_owned(),
            handle: origin.rule.map(|rule| rule.handle),
            text: match origin.rule {
                Some(rule) => text::rule(rule, origin.table),
                None => "drop".to_owned(),
            },
        }
    }

    /// The first rule by which the two differ: one that holds for either alone. `None`: they do the
    /// same to every packet.
    pub fn difference(&self, other: &Residue<'_>) -> Option<RuleRef> {
        let same =
            |a: &Hooked, b: &Hooked| a.priority == b.priority && a.body.digest == b.body.digest;
        let (mut ours, mut theirs) = (
            self.chains.iter().peekable(),
            other.chains.iter().peekable(),
        );
        loop {
            match (ours.peek(), theirs.peek()) {
                (None, None) => return None,
                (Some(a), Some(b)) if same(a, b) => {
                    ours.next();
                    theirs.next();
                }
                (Some(a), Some(b)) if a.priority == b.priority => {
                    return Some(first_difference(self, &a.body, other, &b.body));
                }
                (Some(a), Some(b)) if a.priority > b.priority => {
                    return Some(first(other, &b.body))
                }
                (Some(a), _) => return Some(first(self, &a.body)),
                (None, Some(b)) => return Some(first(other, &b.body)),
            }
        }
    }
}

/// What may become of the packets that come to a body.
#[derive(Clone, Copy, Default)]
struct Fate {
    /// Some may be accepted, or be handed to what is not known.
    through: bool,
    /// Some may go on where the body was jumped to from.
    back: bool,
}

/// Of bodies that were looked at, by address.
type Fates = HashMap<*const Body, Fate>;

fn fate(body: &Rc<Body>, known: &mut Fates) -> Fate {
    if let Some(fate) = known.get(&Rc::as_ptr(body)) {
        return *fate;
    }
    let mut fate = Fate::default();
    let ends = (body.lines.iter()).all(|line| goes_on(line, &mut fate, known));
    fate.back |= ends;
    known.insert(Rc::as_ptr(body), fate);
    fate
}

/// Whether some packets go past a line; what may become of the others is added to the fate of its body.
fn goes_on(line: &ResidueLine, fate: &mut Fate, known: &mut Fates) -> bool {
    use EffectKind as E;
    let does = |kinds: &[E]| {
        let is_one = |step: &Step| matches!(step, Step::Do(kind, _) if kinds.contains(kind));
        line.steps.iter().any(is_one)
    };
    let by_end = goes_past(&line.end, fate, known);
    let stops = matches!(line.end, End::Stop);
    fate.through |= does(&[E::Unknown, E::Queue, E::Forward]) || (stops && !does(&[E::Drop]));
    by_end || line.steps.iter().any(|step| matches!(step, Step::If(_)))
}

fn goes_past(end: &End, fate: &mut Fate, known: &mut Fates) -> bool {
    match end {
        End::Continue => true,
        End::Drop | End::Stop => false,
        End::Accept => {
            fate.through = true;
            false
        }
        End::Return => {
            fate.back = true;
            false
        }
        End::Jump(body) | End::Goto(body) => {
            let inner = self::fate(body, known);
            fate.through |= inner.through;
            let is_jump = matches!(end, End::Jump(_));
            fate.back |= inner.back && !is_jump;
            inner.back && is_jump
        }
        End::Branch(_, branches) => {
            for (value, end) in branches {
                // A map that cannot be read has any verdicts.
                fate.through |= value == UNREAD;
                goes_past(end, fate, known);
            }
            true
        }
    }
}

/// The line past which no packet of a body goes.
fn last_line<'a>(body: &'a Body, known: &mut Fates) -> Option<&'a ResidueLine> {
    let mut lines = body.lines.iter();
    let last = lines.find(|line| !goes_on(line, &mut Fate::default(), known))?;
    match &last.end {
        End::Jump(inner) | End::Goto(inner) => last_line(inner, known).or(Some(last)),
        _ => Some(last),
    }
}

/// The first rule that does something.
fn first(residue: &Residue<'_>, body: &Body) -> RuleRef {
    let line = body.lines.first().expect("an empty chain is left out");
    inner(residue, line)
}

fn first_difference(a: &Residue<'_>, ours: &Body, b: &Residue<'_>, theirs: &Body) -> RuleRef {
    let pairs = ours.lines.iter().zip(&theirs.lines);
    let at = pairs.take_while(|(a, b)| a.digest == b.digest).count();
    match (ours.lines.get(at), theirs.lines.get(at)) {
        (Some(line), Some(their)) => {
            // Two ways to chains that differ: what differs in there says more.
            if let (End::Jump(x) | End::Goto(x), End::Jump(y) | End::Goto(y)) =
                (&line.end, &their.end)
            {
                let all = |line: &ResidueLine| format!("{:?}", line.steps);
                if all(line) == all(their) && x.digest != y.digest {
                    return first_difference(a, x, b, y);
                }
            }
            // The one that the other side has not got at all.
            match theirs.lines[at..]
                .iter()
                .any(|other| other.digest == line.digest)
            {
                true => inner(b, their),
                false => inner(a, line),
            }
        }
        (Some(line), None) => inner(a, line),
        (None, Some(line)) => inner(b, line),
        (None, None) => unreachable!("bodies of different digests differ"),
    }
}

/// A rule, or the first one that it leads to.
fn inner(residue: &Residue<'_>, line: &ResidueLine) -> RuleRef {
    match &line.end {
        End::Jump(body) | End::Goto(body) if line.only_decides() && !body.lines.is_empty() => {
            first(residue, body)
        }
        _ => residue.rule(line.origin),
    }
}

/// Whether a jumped-to body can stand in place of the jump: nothing in it returns from it.
pub(super) fn joins(lines: &[Rc<ResidueLine>], body: &Body) -> bool {
    lines.len() + body.lines.len() <= INLINE_MAX && !body.lines.iter().any(|l| leaves(&l.end))
}

/// Whether packets may leave a body by an end for where it was jumped to from.
pub(super) fn leaves(end: &End) -> bool {
    match end {
        End::Return | End::Goto(_) => true,
        End::Branch(_, branches) => (branches.iter())
            .any(|(value, end)| value == UNREAD || matches!(end, End::Return | End::Goto(_))),
        _ => false,
    }
}

/// Whether no packet gets past a line.
pub(super) fn ends(line: &ResidueLine) -> bool {
    let certain = !line.steps.iter().any(|step| matches!(step, Step::If(_)));
    certain && matches!(line.end, End::Accept | End::Drop | End::Goto(_) | End::Stop)
}

/// Whether going on is all that an end does.
pub(super) fn is_nothing(end: &End) -> bool {
    match end {
        End::Continue => true,
        End::Jump(body) => body.lines.is_empty(),
        _ => false,
    }
}

/// Leaves out, from the end, what decides as the policy does.
pub(super) fn settle(mut lines: Vec<Rc<ResidueLine>>, drops: bool) -> Vec<Rc<ResidueLine>> {
    fn as_policy(end: &End, drops: bool) -> bool {
        match end {
            End::Continue | End::Return => true,
            End::Accept => !drops,
            End::Drop => drops,
            End::Branch(_, branches) => {
                (branches.iter()).all(|(value, end)| value != UNREAD && as_policy(end, drops))
            }
            End::Jump(body) | End::Goto(body) => body.lines.is_empty(),
            End::Stop => false,
        }
    }
    while let Some(last) = lines.last().filter(|last| last.only_decides()) {
        let end: fn(Rc<Body>) -> End = match &last.end {
            End::Jump(_) => End::Jump,
            End::Goto(_) => End::Goto,
            end if as_policy(end, drops) => {
                lines.pop();
                continue;
            }
            _ => break,
        };
        let body = last.end.bodies()[0];
        let settled = settle(body.lines.clone(), drops);
        if settled.is_empty() {
            lines.pop();
            continue;
        }
        if settled.len() < body.lines.len() {
            let end = end(Rc::new(Body::new(settled)));
            let line = ResidueLine::new(last.steps.clone(), end, last.origin);
            lines.pop();
            lines.push(Rc::new(line));
        }
        break;
    }
    lines
}
