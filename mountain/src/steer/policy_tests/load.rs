// SPDX-License-Identifier: GPL-2.0-or-later
//! Paths that our own flows fill.

use std::cell::RefCell;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::sim::*;
use crate::steer::explain::{Load, Use};

/// Feeds our own rates on a path (Mbit/s) every 100 ms: of all flows, and of latency flows.
fn egress(s: &mut Sim, path: usize, mbit: f64, latency_mbit: f64) {
    if s.now.is_multiple_of(100 * MS) {
        s.egress(path, mbit * 1e6, latency_mbit * 1e6);
    }
}

/// Two paths whose own rates [`egress`] tells.
fn loaded<'a>(models: [Model<'a>; 2]) -> Sim<'a> {
    let mut sim = Sim::new(models.into(), 1);
    sim.thin = false;
    sim
}

#[test]
fn bulk_stays_with_its_own_queue_and_leaves_a_foreign_one() {
    // From 10 s on a queue of 150 ms grows on path 0 within half a second.
    let queue = |t: u64| (t.saturating_sub(10 * S).min(S / 2) * 3 / 10) as u32;
    for (ours, bulk) in [(true, 0b11), (false, 0b10)] {
        let mut sim = loaded([shaped(1, queue), noisy(2)]);
        sim.run(30 * S, |s| {
            let full = ours && s.now >= 10 * S - 100 * MS;
            egress(s, 0, if full { 29.0 } else { 1.4 }, 0.1);
            if s.now > 11 * S {
                assert_eq!(s.mask().latency, 0b10);
                assert_eq!(s.mask().bulk, bulk, "ours {ours}:\n{}", s.explain());
            }
        });
        let status = sim.policy.status(sim.now);
        let load = if ours { Load::Own } else { Load::Foreign };
        assert_eq!(status[0].load, Some(load), "{status:?}");
        let d = sim.policy.decisions().last().unwrap();
        assert_eq!(d.to, if ours { Use::BulkOnly } else { Use::Nothing });
    }
}

#[test]
fn bulk_leaves_a_late_path_that_no_longer_carries_it() {
    // Both paths are full; one drops to a twentieth, and its queue grows.
    let thin = |t: u64| u32::from(t >= 20 * S) * 400_000;
    let mut sim = loaded([shaped(1, thin), shaped(2, |_| 30_000)]);
    let mut left = None;
    sim.run(30 * S, |s| {
        egress(s, 0, if s.now < 20 * S { 9.5 } else { 0.5 }, 0.1);
        egress(s, 1, 9.5, 0.1);
        if s.mask().bulk == 0b10 {
            left.get_or_insert(s.now);
        }
    });
    let left = left.unwrap_or(u64::MAX);
    let soon = (20 * S..22 * S).contains(&left);
    assert!(soon, "{left}:\n{}", sim.explain());
}

#[test]
fn bulk_that_comes_from_elsewhere_stays_with_the_queue_that_it_makes() {
    // Path 1 becomes thin, and what it carried makes a queue on path 0 before an average shows it.
    let thin = |t: u64| u32::from(t >= 20 * S) * 400_000;
    let queue = |t: u64| u32::from(t >= 20 * S + 300 * MS) * 130_000;
    let mut sim = loaded([shaped(1, queue), shaped(2, thin)]);
    sim.run(30 * S, |s| {
        let (full, moved) = (s.now < 10 * S, s.now >= 20 * S + 200 * MS);
        egress(s, 0, if full || moved { 9.5 } else { 2.0 }, 0.1);
        egress(s, 1, if full { 9.5 } else { 0.5 }, 0.1);
        if moved {
            assert_eq!(s.mask().bulk & 0b01, 0b01, "{}:\n{}", s.now, s.explain());
        }
    });
    assert_eq!(sim.mask().bulk, 0b01, "{}", sim.explain());
}

#[test]
fn bulk_does_not_follow_latency_flows_to_a_stopgap() {
    // What path 1 carried makes a queue on path 0, and path 1 looks good again as it is empty.
    let thin = |t: u64| u32::from((20 * S..22 * S).contains(&t)) * 400_000;
    let queue = |t: u64| u32::from(t >= 20 * S + 300 * MS) * 130_000;
    let mut sim = loaded([shaped(1, queue), shaped(2, thin)]);
    let mut stopgap = 0;
    sim.run(40 * S, |s| {
        egress(s, 0, if s.now < 20 * S { 5.0 } else { 9.5 }, 0.1);
        egress(s, 1, if s.now < 20 * S { 5.0 } else { 0.2 }, 0.1);
        if s.now > 22 * S && s.mask().latency == 0b10 && s.mask().bulk == 0b01 {
            stopgap += 1;
        }
    });
    assert!(stopgap > 0, "{}", sim.explain());
    // Once it has been good for its patience, they share it.
    assert_eq!(sim.mask().bulk, 0b11, "{}", sim.explain());
}

#[test]
fn bulk_beside_a_full_path_does_not_wait_for_all_of_the_patience() {
    // Three spikes, after which path 1 is good.
    let spikes = |t: u64| u32::from(t < 40 * S && t % (10 * S) > 9 * S) * 200_000;
    for full in [true, false] {
        let mut sim = loaded([noisy(1), shaped(2, spikes)]);
        let (mut rejoined, mut ahead) = (None, 0);
        sim.run(90 * S, |s| {
            egress(s, 0, if full { 9.5 } else { 1.0 }, 0.1);
            egress(s, 1, 0.0, 0.0);
            if s.now < 41 * S {
                return;
            }
            let v = s.mask();
            if v.latency == 0b11 {
                rejoined.get_or_insert(s.now);
            } else if v.bulk != v.latency {
                assert_eq!((v.latency, v.bulk), (0b01, 0b11), "{}", s.explain());
                // Some of those on path 0 belong to path 1.
                assert_eq!(v.full, 0b01, "{}", s.explain());
                assert!(s.now >= 50 * S, "at {} us:\n{}", s.now, s.explain());
                ahead += 1;
            }
        });
        let is_late = rejoined.is_some_and(|t| t > 55 * S);
        assert!(is_late, "{rejoined:?}: {}", sim.explain());
        assert_eq!(ahead > 0, full, "{}", sim.explain());
        assert!(full || sim.mask().full == 0, "{:?}", sim.mask());
    }
}

#[test]
fn bulk_takes_a_longer_path_beside_a_full_one_and_leaves_it_when_it_is_not_needed() {
    let spikes = |t: u64| 10_000 + u32::from(t % (8 * S) > 7 * S) * 40_000;
    let both = [Some(10_000_000), Some(8_000_000)];
    for (name, extra, cost_us, percent, capacities) in [
        ("longer", Some(10_000), 0.0, 0, both),
        ("named as dear", Some(10_000), 10_000.0, 0, both),
        ("lossy", Some(10_000), 0.0, 5, both),
        ("far longer", Some(120_000), 0.0, 0, both),
        ("unsteady", None, 0.0, 0, both),
        (
            "thinner",
            Some(10_000),
            0.0,
            0,
            [Some(10_000_000), Some(2_000_000)],
        ),
        ("unknown", Some(10_000), 0.0, 0, [None; 2]),
        (
            "the other unknown",
            Some(10_000),
            0.0,
            0,
            [Some(10_000_000), None],
        ),
    ] {
        let mut rng = StdRng::seed_from_u64(2);
        let second: Model = Box::new(move |t| {
            let us = 20_000 + extra.unwrap_or_else(|| spikes(t));
            (rng.random_range(0..100) >= percent).then_some((us, us))
        });
        let mut sim = loaded([constant(20_000), second]);
        sim.with_costs([0.0, cost_us]);
        sim.with_capacities(capacities);
        let (mut needed, mut full) = (0, 0);
        sim.run(120 * S, |s| {
            // Path 0 is full until some go by path 1. Later both together would not fill path 0.
            let beside = s.mask().bulk == 0b11;
            let ours = match s.now {
                ..15_000_000 => [0.1, 0.0],
                15_000_000..80_000_000 if beside => [6.0, 3.5],
                15_000_000..80_000_000 => [9.5, 0.0],
                _ => [1.0, 2.5],
            };
            egress(s, 0, ours[0], 0.1);
            egress(s, 1, if name == "thinner" { 0.0 } else { ours[1] }, 0.0);
            if s.now >= 30 * S {
                assert_eq!(s.mask().latency, 0b01, "{name}:\n{}", s.explain());
                needed += u64::from(beside && s.now < 80 * S);
                full += u64::from(beside && s.now < 80 * S && s.mask().full == 0b01);
            }
        });
        let (all, is_it) = ((80 * S - 30 * S) / TICK, name == "longer");
        assert_eq!(
            needed,
            if is_it { all } else { 0 },
            "{name}:\n{}",
            sim.explain()
        );
        assert_eq!(full, 0, "{name}: none of those on path 0 need to leave");
        if name != "unknown" && name != "the other unknown" {
            assert_eq!(sim.mask().bulk, 0b01, "{name}:\n{}", sim.explain());
        }
        let takes = sim.explain().contains("takes bulk flows");
        assert_eq!(takes, is_it, "{name}:\n{}", sim.explain());
    }
}

/// Latency flows of a constant rate each on two paths with a queue: how the masks move them, and what comes through.
struct Crowd {
    /// Mbit/s of each flow, and of each path.
    flow: f64,
    paths: [f64; 2],
    /// Where each flow is.
    at: [usize; 40],
    /// So many belong to path 0 by their hash.
    split: usize,
    queued_kb: [f64; 2],
    moves: usize,
    dropped_kb: f64,
}

impl Crowd {
    fn new(flow: f64, split: usize) -> Self {
        Crowd {
            flow,
            paths: [10.0; 2],
            at: std::array::from_fn(|flow| usize::from(flow >= split)),
            split,
            queued_kb: [0.0; 2],
            moves: 0,
            dropped_kb: 0.0,
        }
    }

    fn delay_us(&self, path: usize) -> u32 {
        (self.queued_kb[path] * 8e3 / self.paths[path]) as u32
    }

    /// Lets the flows send for a tick, and the policy know.
    fn tick(&mut self, s: &mut Sim) {
        let mask = s.mask();
        for (flow, at) in self.at.iter_mut().enumerate() {
            let [here, there] = [1 << *at, 1 << (1 - *at)];
            let home = usize::from(flow >= self.split) != *at && mask.latency & here > 0;
            let moves = mask.latency & there > 0 && mask.ejected & here > 0;
            if moves && (home || mask.latency & here == 0) {
                *at = 1 - *at;
                self.moves += 1;
            }
        }
        for path in 0..2 {
            let flows = self.at.iter().filter(|at| **at == path).count();
            let offered = self.flow * flows as f64;
            let queued = self.queued_kb[path] + (offered - self.paths[path]) * TICK as f64 / 8e3;
            self.queued_kb[path] = queued.clamp(0.0, 200.0);
            self.dropped_kb += queued.max(200.0) - 200.0;
            egress(s, path, offered.max(0.01), offered);
        }
    }
}

/// A path of 20 ms and the queue of [`Crowd`].
fn queueing<'a>(crowd: &'a RefCell<Crowd>, path: usize, spike: std::ops::Range<u64>) -> Model<'a> {
    Box::new(move |t| {
        let spike = u32::from(spike.contains(&t)) * 100_000;
        same(20_000 + crowd.borrow().delay_us(path) + spike)
    })
}

#[test]
fn latency_flows_that_need_both_paths_do_not_leave_and_return_together() {
    // Also while other routes come and go.
    for other_routes in [false, true] {
        // 16 Mbit/s, of which one path alone carries 10.
        let crowd = RefCell::new(Crowd::new(0.4, 21));
        let spikes = [20 * S..20 * S + 300 * MS, 0..0];
        let [a, b] = [0, 1].map(|i| queueing(&crowd, i, spikes[i].clone()));
        let mut sim = loaded([a, b]);
        sim.run(200 * S, |s| {
            crowd.borrow_mut().tick(s);
            if other_routes && s.now.is_multiple_of(S / 2) {
                s.read_again();
            }
        });
        let (moves, dropped) = (crowd.borrow().moves, crowd.borrow().dropped_kb);
        assert!(moves >= 20, "the spike is left:\n{}", sim.explain());
        // Each flow twice a minute at most; 1 % of what they send.
        assert!(moves <= 40 * 2 * 3, "{moves}:\n{}", sim.explain());
        let few = dropped <= 0.01 * 200.0 * 2e3;
        assert!(few, "{dropped}:\n{}", sim.explain());
    }
}

#[test]
fn latency_flows_leave_a_path_that_has_become_thin_although_they_fill_the_other() {
    // 12 Mbit/s on 10: still far better than a path of 0.5.
    let crowd = RefCell::new(Crowd::new(0.3, 21));
    let [a, b] = [0, 1].map(|i| queueing(&crowd, i, 0..0));
    let mut sim = loaded([a, b]);
    let mut on_thin = 0;
    sim.run(80 * S, |s| {
        let mut crowd = crowd.borrow_mut();
        crowd.paths[1] = if s.now < 20 * S { 10.0 } else { 0.5 };
        crowd.tick(s);
        if s.now > 23 * S {
            on_thin += crowd.at.iter().filter(|at| **at == 1).count();
        }
    });
    // Half a second of trying it now and then.
    let share = on_thin as f64 / (57.0 * 100.0 * 40.0);
    assert!(share <= 0.1, "{share}:\n{}", sim.explain());
}

/// Bulk flows fill path 0. Requests as fast as they are answered fill the path of the latency flows. Queues that begin
/// as `queued_us` grow to `most_us`, which is told on which paths there are latency flows (1 or 0). `spikes`: start (s)
/// and length (ms), by path. `check` is told how often the latency flows changed their paths.
fn fill_what_they_come_to(
    queued_us: [f64; 2],
    spikes: [&[(u64, u64)]; 2],
    until: u64,
    most_us: impl Fn([f64; 2]) -> [f64; 2],
    check: impl FnOnce(&Sim, usize),
) {
    let queued_us = RefCell::new(queued_us);
    let path = |i: usize| -> Model {
        let (queued, spikes) = (&queued_us, spikes[i]);
        Box::new(move |t| {
            let is_in = |(s, ms): &(u64, u64)| (s * S..s * S + ms * MS).contains(&t);
            let spike = u32::from(spikes.iter().any(is_in)) * 100_000;
            same(20_000 + queued.borrow()[i] as u32 + spike)
        })
    };
    let mut sim = loaded([path(0), path(1)]);
    let (mut changes, mut before) = (0, 0b11);
    sim.run(until, |s| {
        let v = s.mask();
        let on = [0, 1].map(|i| f64::from(v.latency >> i & 1));
        egress(s, 0, 9.5, on[0]);
        egress(s, 1, 9.5 * on[1], 9.0 * on[1]);
        // It grows within half a second, and drains as fast.
        for (queued_us, most_us) in queued_us.borrow_mut().iter_mut().zip(most_us(on)) {
            *queued_us += (most_us - *queued_us).clamp(-3e3, 3e3);
        }
        changes += usize::from(v.latency != before);
        before = v.latency;
    });
    check(&sim, changes);
}

#[test]
fn latency_flows_that_fill_whatever_they_come_to_do_not_go_back_and_forth() {
    // Path 1 has relapsed and is tried no more when path 0 has a spike.
    let spikes: [&[_]; 2] = [&[(40, 300)], &[(20, 1000), (24, 1000), (32, 1000)]];
    // They add to what the bulk flows have made.
    let most_us = |on: [f64; 2]| [115e3 + 25e3 * on[0] * (1.0 - on[1]), 130e3 * on[1]];
    fill_what_they_come_to([115e3; 2], spikes, 120 * S, most_us, |sim, changes| {
        assert!(changes >= 1, "the spike is left:\n{}", sim.explain());
        assert!(changes <= 12, "{changes} changes:\n{}", sim.explain());
    });
}

#[test]
fn two_stopgaps_that_our_flows_make_late_in_turn_do_not_alternate() {
    // Both have relapsed, and each is the less bad one while they are on the other.
    let relapses = [(20, 1000), (24, 1000), (28, 1000), (32, 1000)];
    let most_us = |on: [f64; 2]| [75e3 + 45e3 * on[0], 110e3 * on[1]];
    let spikes: [&[_]; 2] = [&[(40, 3000)], &relapses];
    fill_what_they_come_to([75e3, 0.0], spikes, 100 * S, most_us, |sim, changes| {
        assert!(changes <= 6, "{changes} changes:\n{}", sim.explain());
        let onsets = sim.policy.status(sim.now)[1].onsets;
        assert!(onsets < 4.0, "{onsets}:\n{}", sim.explain());
    });
}

#[test]
fn latency_flows_that_their_hash_spreads_badly_stay() {
    // One path has 10.3 or 10.4 Mbit/s by hash, of which it carries 10. One alone would have 16 or 17.
    for (flow, split) in [(0.43, 24), (0.4, 26)] {
        let crowd = RefCell::new(Crowd::new(flow, split));
        let [a, b] = [0, 1].map(|i| queueing(&crowd, i, 0..0));
        let mut sim = loaded([a, b]);
        sim.run(120 * S, |s| crowd.borrow_mut().tick(s));
        let (moves, dropped) = (crowd.borrow().moves, crowd.borrow().dropped_kb);
        let overflow = flow * split as f64 - 10.0;
        let unavoidable = overflow / 8.0 * 120e3;
        assert!(moves <= 40 * 2, "{moves}:\n{}", sim.explain());
        // Half a second on one path costs up to 7 Mbit/s.
        let dropped = dropped - unavoidable;
        assert!(dropped <= 1e3, "{dropped}:\n{}", sim.explain());
    }
}
