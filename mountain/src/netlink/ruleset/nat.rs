// SPDX-License-Identifier: GPL-2.0-or-later
//! Whether rules translate connections, and to what.

use std::collections::HashMap;
use std::rc::Rc;

use super::residue::{close, lines, Body, EffectKind, End, Hooked, Residue, ResidueLine, Step};
use super::RuleRef;

impl<'a> Residue<'a> {
    /// To what addresses and ports packets are translated, in words, and by which rule. What is masqueraded gets the
    /// device's own address, and does not count.
    pub fn translations(&self) -> Vec<(&str, RuleRef)> {
        let all = lines(&self.chains).into_iter();
        let steps = all.flat_map(|line| line.steps.iter().map(|step| (step, line.origin)));
        let nat = steps.filter_map(|(step, origin)| match step {
            Step::Do(EffectKind::Nat, what) => Some((what.as_str(), origin.rule_ref())),
            _ => None,
        });
        nat.collect()
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
