// SPDX-License-Identifier: GPL-2.0-or-later
//! What holds whatever happens.

use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::sim::*;
use crate::steer::policy::*;

/// CPU time of a tick over groups of the same eight paths at the fastest pace, µs; the least of many.
fn tick_costs_us(groups: usize) -> f64 {
    let models = (0..8).map(|_| constant(20_000)).collect();
    let mut sim = Sim::with(models, vec![(0..8).collect(); groups], 1);
    for _ in 0..1_000 {
        sim.now += TICK;
        (0..8).for_each(|path| sim.send(path));
        sim.deliver();
    }
    sim.now += 20 * MS;
    sim.deliver();
    let cpu_us = || {
        let clock = nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID;
        let t = nix::time::clock_gettime(clock).unwrap();
        t.tv_sec() as f64 * 1e6 + t.tv_nsec() as f64 / 1e3
    };
    let ticks = (0..50).map(|_| {
        sim.now += MS;
        let before = cpu_us();
        sim.policy.tick(sim.now);
        cpu_us() - before
    });
    ticks.min_by(f64::total_cmp).unwrap()
}

/// As on a router whose routes use the same uplinks in many ways.
#[test]
fn groups_that_share_paths_cost_less_than_one_each() {
    let (one, many) = (tick_costs_us(1), tick_costs_us(32));
    assert!(many < 12.0 * one, "{one:.0} µs for one, {many:.0} for 32");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    /// Any mixture of delays, losses and link events: a living path is always chosen, and never one that
    /// has become silent; a mask is empty only when nothing lives, or as long as one has never answered.
    #[test]
    fn one_path_is_always_chosen_and_never_a_silent_one(
        seed: u64,
        paths in 2usize..=16,
        silent in 0usize..5,
        stretches in prop::collection::vec((0u32..300_000, 0u32..100_000, 0u32..=100, 1u64..4), 2..10),
    ) {
        let models = (0..paths).map(|i| {
            let mut rng = StdRng::seed_from_u64(seed ^ i as u64);
            let stretches = stretches.clone();
            let model: Model = Box::new(move |t| {
                let (base, jitter, loss, len) = stretches[(t / S + i as u64) as usize % stretches.len()];
                let loss = if (t / S).is_multiple_of(len) { loss } else { 0 };
                let lost = i == silent && t >= 2 * S || rng.random_range(0..100) < loss;
                (!lost).then(|| 1_000 + base + rng.random_range(0..=jitter)).and_then(same)
            });
            model
        }).collect();
        let mut sim = Sim::new(models, seed);
        let mut rng = StdRng::seed_from_u64(seed);
        sim.run(25 * S, |s| {
            let v = s.mask();
            assert_eq!(v.latency & !v.alive, 0);
            assert_eq!(v.bulk & !v.alive, 0);
            let status = s.policy.status(s.now);
            let empty = v.alive == 0 || s.policy.is_unknown(0, s.now);
            assert!((v.latency == 0) == empty && (v.bulk == 0) == empty, "{v:?}");
            let settled = s.now >= 6 * S;
            if settled && silent < paths && status[silent].samples > 0 {
                assert_eq!(v.alive >> silent & 1, 0, "{v:?}");
            }
            // Last: the masks above are of the tick before this event.
            if rng.random_range(0..500) == 0 {
                let (path, usable) = (rng.random_range(0..paths), rng.random());
                s.policy.event(Event::Usable { path, at_us: s.now, usable, why: "test" });
            }
        });
    }

    /// Paths of any constant delays: after the first seconds nothing changes any more.
    #[test]
    fn constant_input_settles(
        delays in prop::collection::vec(200u32..600_000, 2..=16),
        seed: u64,
    ) {
        let mut sim = Sim::new(delays.iter().map(|us| constant(*us)).collect(), seed);
        sim.run(120 * S, |_| {});
        let late: Vec<_> = sim.verdicts.iter().filter(|v| v.0 > 60 * S).collect();
        prop_assert!(late.is_empty(), "{}", sim.explain());
        let shortest = *delays.iter().min().unwrap();
        for (i, us) in delays.iter().enumerate() {
            let used = sim.mask().latency >> i & 1 == 1;
            let apart = us - shortest;
            let tells_nothing = 2_000.max(shortest / 10);
            prop_assert_eq!(used, apart <= tells_nothing, "{}: {:?}\n{}", i, delays, sim.explain());
        }
    }

    /// The events of a tick may come in any order.
    #[test]
    fn the_order_of_events_within_a_tick_does_not_matter(seed in 0u64..1000) {
        let run = |reverse: bool| {
            let a = spikes(seed, 30 * S, 100 * MS..600 * MS);
            let mut sim = Sim::new(vec![shaped(seed, |t| height(&a, t)), noisy(seed + 1)], seed);
            sim.reversed = reverse;
            sim.run(30 * S, |_| {});
            sim.verdicts.clone()
        };
        prop_assert_eq!(run(false), run(true));
    }

    /// The same events and seed give the same decisions.
    #[test]
    fn decisions_are_reproducible(seed in 0u64..1000) {
        let run = || {
            let a = spikes(seed, 30 * S, 100 * MS..600 * MS);
            let mut sim = Sim::new(vec![shaped(seed, |t| height(&a, t)), noisy(seed + 1)], seed);
            sim.run(30 * S, |_| {});
            sim.explain()
        };
        prop_assert_eq!(run(), run());
    }
}
