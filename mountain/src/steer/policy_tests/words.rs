// SPDX-License-Identifier: GPL-2.0-or-later
//! What decisions say where little is known.

use super::sim::*;
use crate::steer::policy::*;

fn reasons(sim: &Sim) -> Vec<String> {
    let status = sim.policy.status(sim.now);
    status.into_iter().map(|p| p.reason).collect()
}

#[test]
fn a_cost_that_is_not_known_is_explained() {
    let mut sim = Sim::new(vec![noisy(1), noisy(2)], 1);
    let none = "p0 may be used: cost not known yet (no probe so far), no path has 20 probes to compare with";
    assert_eq!(reasons(&sim)[0], none);
    sim.run(S + 500 * MS, |_| {});
    let few = &reasons(&sim)[0];
    assert!(few.starts_with("p0 may be used: cost 2"), "{few}");
    assert!(
        few.ends_with("no path has 20 probes to compare with"),
        "{few}"
    );
    sim.run(5 * S, |_| {});
    let good = &reasons(&sim)[0];
    assert!(
        good.starts_with("p0 is good: cost 2") && good.contains(", best 2"),
        "{good}"
    );
}

#[test]
fn a_silent_path_says_that_nothing_was_answered() {
    let mut sim = Sim::new(vec![Box::new(|_| None), noisy(2)], 1);
    sim.run(5 * S, |_| {});
    let all = reasons(&sim).join("\n") + &sim.explain();
    assert!(!all.contains("unknown"), "{all}");
    // Back from a link that was down, nothing is known of either path.
    for (path, usable) in [(1, false), (1, true)] {
        let at_us = sim.now;
        sim.policy.event(Event::Usable {
            path,
            at_us,
            usable,
            why: "no carrier",
        });
        sim.policy.tick(sim.now + MS);
    }
    sim.run(5 * S + 500 * MS, |_| {});
    let all = reasons(&sim).join("\n") + &sim.explain();
    assert!(
        !all.contains("unknown") && !all.contains("latest  ms"),
        "{all}"
    );
}

#[test]
fn silence_is_not_called_a_load_of_others() {
    let mut sim = Sim::new(
        vec![
            Box::new(|t| (t < 10 * S).then_some((20_000, 20_000))),
            noisy(2),
        ],
        1,
    );
    sim.run(12 * S, |_| {});
    let status = sim.policy.status(sim.now).remove(0);
    assert!(
        status.reason.contains("p0 has not answered for "),
        "{status:?}"
    );
    assert_eq!(status.load, None);
    let all = status.reason + &sim.explain();
    assert!(!all.contains("load"), "{all}");
}

#[test]
fn a_path_that_was_left_says_what_it_waits_for() {
    let late = |t| {
        Some(if (10 * S..14 * S).contains(&t) {
            (120_000, 120_000)
        } else {
            (20_000, 20_000)
        })
    };
    let mut sim = Sim::new(vec![Box::new(late), noisy(2)], 1);
    sim.run(13 * S, |_| {});
    let bad = &reasons(&sim)[0];
    assert!(bad.contains("; back when it has been good for "), "{bad}");
    let mut said = Vec::new();
    while sim.now < 40 * S && sim.mask().latency & 1 == 0 {
        sim.run(sim.now + 100 * MS, |_| {});
        said.push(reasons(&sim)[0].clone());
    }
    let first = |what: &str| {
        let found = said.iter().position(|text| text.contains(what));
        found.unwrap_or_else(|| panic!("{what}: {said:#?}"))
    };
    // The hold ends before the spike is forgotten; no text promises a time that passes.
    assert!(
        first("at the earliest, its cost has to fall from") < first("good again, but its cost")
    );
    assert!(
        said.last()
            .is_some_and(|text| text.starts_with("p0 is good")),
        "{said:#?}"
    );
}

#[test]
fn a_path_that_was_late_and_lost_its_link_says_that_it_is_down() {
    let silent = |t| (t < 10 * S).then_some((20_000, 20_000));
    let mut sim = Sim::new(vec![Box::new(silent), noisy(2)], 1);
    sim.run(11 * S, |_| {});
    sim.policy.event(Event::Usable {
        path: 0,
        at_us: sim.now,
        usable: false,
        why: "carrier",
    });
    sim.run(11 * S + 500 * MS, |_| {});
    let reason = &reasons(&sim)[0];
    assert!(reason.starts_with("p0 is down: carrier"), "{reason}");
}
