// SPDX-License-Identifier: GPL-2.0-or-later
//! Whether rules translate connections, and to what.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use super::residue::{
    close, lines, Body, EffectKind, End, Hooked, Origin, Residue, ResidueLine, Step,
};
use super::RuleRef;

impl<'a> Residue<'a> {
    /// The first rule that translates packets to an address or a port to which the other one translates some.
    pub fn same_nat(&self, other: &Residue<'_>) -> Option<RuleRef> {
        let there = translations(&other.chains).into_iter();
        let there: HashSet<&str> = there.map(|(what, _)| what).collect();
        let mut here = translations(&self.chains).into_iter();
        let (_, origin) = here.find(|(what, _)| there.contains(what))?;
        Some(origin.rule_ref())
    }

    /// Only which connections are translated, whatever to: as if they were dropped.
    pub fn translating(&self) -> Self {
        let mut known = HashMap::new();
        let mut chains: Vec<Vec<Rc<ResidueLine<'a>>>> = Vec::new();
        for chain in &self.chains {
            let lines = translating(&chain.body, &mut known).lines.clone();
            // What gets to the end of a chain meets the next one.
            let goes_on = |line: &Rc<ResidueLine<'a>>| line.fate.through || line.fate.back;
            match chains.last_mut() {
                Some(before) if !before.iter().any(goes_on) => before.extend(lines),
                _ => chains.push(lines),
            }
        }
        let close_one = |lines: Vec<Rc<ResidueLine<'a>>>| {
            let first = lines.first()?.origin;
            let policy = || Rc::new(ResidueLine::new(Vec::new(), End::Drop, first));
            let (lines, drops) = close(lines, false, policy);
            (!lines.is_empty()).then(|| Hooked {
                priority: 0,
                drops,
                body: Rc::new(Body::new(lines)),
            })
        };
        Self {
            chains: chains.into_iter().filter_map(close_one).collect(),
        }
    }
}

/// To what addresses and ports connections are translated, at which line. What is masqueraded gets the device's own address.
fn translations<'a, 'b>(chains: &'b [Hooked<'a>]) -> Vec<(&'b str, Origin<'a>)> {
    let of_line = |line: &'b ResidueLine<'a>| {
        let nat = line.steps.iter().filter_map(|step| match step {
            Step::Do(EffectKind::Nat, what) => Some(what.as_str()),
            _ => None,
        });
        nat.map(|what| (what, line.origin))
    };
    lines(chains).into_iter().flat_map(of_line).collect()
}

/// A body in which to translate is to drop, and nothing else is done.
fn translating<'a>(
    body: &Rc<Body<'a>>,
    known: &mut HashMap<*const Body<'a>, Rc<Body<'a>>>,
) -> Rc<Body<'a>> {
    if let Some(done) = known.get(&Rc::as_ptr(body)) {
        return done.clone();
    }
    let is_nat = |step: &Step| matches!(step, Step::Do(kind, _) if kind.is_nat());
    let line = |line: &Rc<ResidueLine<'a>>| {
        let end = match &line.end {
            End::Stop if line.steps.iter().any(is_nat) => End::Drop,
            end => end.with(|body| translating(body, known)),
        };
        let mut steps = line.steps.clone();
        // A step that may end the rule is a condition for the steps behind it.
        steps.retain(|step| match step {
            Step::If(_) => true,
            Step::Do(kind, _) => kind.asks(),
        });
        let decides = !matches!(end, End::Continue);
        decides.then(|| Rc::new(ResidueLine::new(steps, end, line.origin)))
    };
    let done = Rc::new(Body::new(body.lines.iter().filter_map(line).collect()));
    known.insert(Rc::as_ptr(body), done.clone());
    done
}
