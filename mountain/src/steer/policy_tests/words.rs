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
