// SPDX-License-Identifier: GPL-2.0-or-later
//! What decisions say.

use super::sim::*;
use crate::steer::explain::{Outcome, Use, JUDGED_AFTER_US};

fn reasons(sim: &Sim) -> Vec<String> {
    let status = sim.policy.status(sim.now);
    status.into_iter().map(|p| p.reason).collect()
}

#[test]
fn every_decision_is_explained_and_judged() {
    let bad = shaped(1, |t| u32::from((10 * S..15 * S).contains(&t)) * 100_000);
    let mut sim = Sim::new(vec![bad, noisy(2)], 1);
    sim.run(60 * S, |_| {});
    let all: Vec<_> = sim.policy.decisions().collect();
    assert_eq!(all.len(), 2, "{}", sim.explain());
    assert_eq!((all[0].from, all[0].to), (Use::All, Use::Nothing));
    let why = &all[0].why;
    let silent = why.contains("p0 has not answered for ");
    assert!(silent || why.starts_with("left p0: its last"), "{why}");
    let (back, start) = (&all[1].why, "p0 is good: its last two probes: ");
    assert!(back.starts_with(start), "{back}");
    let mut right = all.iter().map(|d| d.outcome.and_then(|o| o.right));
    assert!(right.all(|right| right == Some(true)), "{all:?}");
    let json = serde_json::to_value(all[0]).unwrap();
    assert_eq!(json["to"], "nothing");
}

#[test]
fn lateness_is_told_in_the_rules_own_terms() {
    // Too little for an overdue probe to tell it before its answer does.
    let bad = |t| same(if t >= 10 * S { 30_000 } else { 20_000 });
    let mut sim = Sim::new(vec![Box::new(bad), constant(20_000)], 1);
    sim.run(12 * S, |_| {});
    let said = sim.explain();
    let wanted = "left p0: its last two probes: 30.0 ms and 30.0 ms, 10.0 ms more than p1; p0 had averaged 20.0 ms";
    assert!(said.contains(wanted), "{said}");
}

#[test]
fn little_knowledge_is_told() {
    let mut sim = Sim::new(vec![noisy(1), noisy(2)], 1);
    assert_eq!(reasons(&sim)[0], "p0 may be used: no probe so far");
    sim.run(S + 300 * MS, |_| {});
    let reason = &reasons(&sim)[0];
    assert!(reason.ends_with(" answers so far"), "{reason}");
    sim.run(5 * S, |_| {});
    let reason = &reasons(&sim)[0];
    assert!(reason.starts_with("p0 is good: its last two"), "{reason}");
}

#[test]
fn silence_is_not_called_a_load_of_others() {
    let silent: Model = Box::new(|t| (t < 10 * S).then_some((20_000, 20_000)));
    let mut sim = Sim::new(vec![silent, noisy(2)], 1);
    sim.run(12 * S, |_| {});
    let status = sim.policy.status(sim.now).remove(0);
    testkit::assert_has(&status.reason, &["p0 has not answered for "]);
    assert_eq!((status.load, status.state), (None, "dead"));
    assert!(!sim.explain().contains("load"), "{}", sim.explain());
}

#[test]
fn a_probe_that_is_lost_is_told() {
    let once = |t: u64| (!(12 * S..12 * S + 50 * MS).contains(&t)).then_some((20_000, 20_000));
    let mut sim = Sim::new(vec![Box::new(once), noisy(2)], 1);
    sim.thin = false;
    let mut said = Vec::new();
    sim.run(13 * S, |s| said.push(reasons(s)[0].clone()));
    let wanted = "p0 is good: its last two probes: lost and 20.0 ms";
    let is_told = said.iter().any(|text| text.starts_with(wanted));
    assert!(is_told, "{said:#?}");
}

#[test]
fn a_path_that_was_left_says_what_it_waits_for() {
    let late = |t| same(20_000 + u32::from((10 * S..14 * S).contains(&t)) * 100_000);
    let mut sim = Sim::new(vec![Box::new(late), noisy(2)], 1);
    sim.run(13 * S, |_| {});
    let bad = &reasons(&sim)[0];
    testkit::assert_has(bad, &["; back when it has been as good as p1 for "]);
    let mut said = Vec::new();
    while sim.now < 40 * S && sim.mask().latency & 1 == 0 {
        sim.run(sim.now + 100 * MS, |_| {});
        said.push(reasons(&sim)[0].clone());
    }
    let mut texts = said.iter();
    let is_told = texts.any(|text| text.contains("; good again: back in "));
    assert!(is_told, "{said:#?}");
    let last = said.last().unwrap();
    assert!(last.starts_with("p0 is good"), "{said:#?}");
}

#[test]
fn a_path_that_lost_its_link_says_that_it_is_down() {
    let silent: Model = Box::new(|t| (t < 10 * S).then_some((20_000, 20_000)));
    let mut sim = Sim::new(vec![silent, noisy(2)], 1);
    sim.run(11 * S, |_| {});
    sim.usable(0, false, "carrier");
    sim.run(11 * S + 500 * MS, |_| {});
    let reason = &reasons(&sim)[0];
    assert!(reason.starts_with("p0 is down: carrier"), "{reason}");
}

#[test]
fn a_path_that_is_left_for_its_cost_is_judged_with_it() {
    let mut sim = Sim::new(vec![noisy(1), noisy(2)], 1);
    sim.with_costs([0.0, 100e3]);
    sim.run(8 * S, |_| {});
    let mut decisions = sim.policy.decisions();
    let left = decisions.find(|d| (d.path, d.to) == (1, Use::Nothing));
    let outcome = left.and_then(|d| d.outcome).expect("left, and due");
    assert_eq!(outcome.right, Some(true), "{}", sim.explain());
    let (dear, other) = (outcome.path_p95_us, outcome.others_p95_us);
    let more = dear.zip(other).map(|(dear, other)| dear - other);
    assert!(
        more.is_some_and(|us| (90e3..110e3).contains(&us)),
        "{outcome:?}"
    );
}

/// Two paths, of which the second has just lost its link.
fn unplugged<'a>() -> Sim<'a> {
    let mut sim = Sim::new(vec![noisy(1), noisy(2)], 1);
    sim.run(5 * S, |_| {});
    sim.usable(1, false, "device deleted");
    sim.policy.tick(sim.now);
    let left = sim.policy.decisions().find(|d| d.path == 1);
    assert_eq!(left.map(|d| d.to), Some(Use::Nothing));
    sim
}

/// What is said of the decision about the second path, once that is due.
fn outcome(sim: &mut Sim) -> Outcome {
    sim.now += JUDGED_AFTER_US + TICK;
    sim.policy.tick(sim.now);
    let decision = sim.policy.decisions().find(|d| d.path == 1);
    decision.and_then(|d| d.outcome).expect("due")
}

#[test]
fn a_decision_whose_group_is_gone_is_not_judged() {
    let mut sim = unplugged();
    sim.policy.set_topology(vec![], vec![]);
    assert_eq!(outcome(&mut sim), Outcome::default());
}

#[test]
fn a_decision_is_not_judged_by_the_paths_of_another_group() {
    let mut sim = unplugged();
    let inputs = ["p0", "gone", "p2"].map(input).to_vec();
    sim.policy.set_topology(vec![vec![0, 2]], inputs);
    assert_eq!(outcome(&mut sim), Outcome::default());
}
