// SPDX-License-Identifier: GPL-2.0-or-later
//! When paths are left, and when they are used again.

use rand::rngs::StdRng;
use rand::SeedableRng;

use super::sim::*;
use crate::steer::policy::*;
use crate::topology::PathMasks;

/// Bit masks of two paths.
const BOTH: u16 = 0b11;
const SECOND: u16 = 0b10;

/// When the first path was left for the second one, µs after `onset`.
fn left_after(sim: &mut Sim, onset: u64, until: u64) -> Option<u64> {
    let mut left = None;
    sim.run(until, |s| {
        if s.now >= onset && s.mask().latency == SECOND {
            left.get_or_insert(s.now - onset);
        }
    });
    left
}

/// Noise; in `bad` so much later, or lost.
fn bad_in<'a>(seed: u64, bad: std::ops::Range<u64>, extra: Option<u32>) -> Model<'a> {
    let mut rng = StdRng::seed_from_u64(seed);
    Box::new(move |t| match (bad.contains(&t), extra) {
        (false, _) => same(noise(&mut rng)),
        (true, Some(extra)) => same(noise(&mut rng) + extra),
        (true, None) => None,
    })
}

/// Changes of the latency mask.
fn changes(sim: &Sim) -> usize {
    let mut masks: Vec<u16> = sim.verdicts.iter().map(|v| v.1.groups[0].latency).collect();
    masks.dedup();
    masks.len()
}

#[test]
fn noise_on_equal_paths_moves_nothing() {
    // Five minutes for some seeds; the first seconds, with their few samples, for many.
    let long = (0..4).map(|s| (s, 301 * S));
    for (seed, until) in long.chain((10..60).map(|s| (s, 5 * S))) {
        let mut sim = Sim::new(vec![noisy(seed * 2), noisy(seed * 2 + 1)], seed);
        sim.run(until, |_| {});
        assert!(sim.verdicts.is_empty(), "seed {seed}:\n{}", sim.explain());
    }
}

#[test]
fn an_onset_is_left_within_100_ms() {
    let mut times = Vec::new();
    for seed in 0..20u64 {
        for extra in [Some(30_000), Some(300_000), None] {
            let onset = 10 * S + seed * 3_700;
            let bad = bad_in(seed, onset..u64::MAX, extra);
            let mut sim = Sim::new(vec![bad, noisy(seed + 1000)], seed);
            let left = left_after(&mut sim, onset, 12 * S);
            times.push(left.unwrap_or_else(|| panic!("seed {seed}: never left")));
            let ejected = sim.mask().ejected;
            let at_once = ejected == 1 || extra.is_none();
            assert!(at_once, "{}", sim.explain());
            assert_eq!(sim.mask().latency, SECOND);
            // Late is not dead; silent is.
            let is_alive = sim.mask().alive & 1 == 1;
            assert_eq!(is_alive, extra.is_some(), "{}", sim.explain());
        }
    }
    times.sort_unstable();
    assert!(times[times.len() * 95 / 100] <= 100 * MS, "{times:?}");
}

#[test]
fn a_path_that_was_bad_from_the_start_is_left_too() {
    let mut sim = Sim::new(vec![shaped(1, |_| 300_000), noisy(2)], 1);
    sim.run(3 * S, |_| {});
    assert_eq!(sim.mask().latency, SECOND, "{}", sim.explain());
}

#[test]
fn one_outlier_moves_nothing() {
    for height in [40_000, 400_000] {
        let one = move |t: u64| u32::from((10 * S..10 * S + 10 * MS).contains(&t)) * height;
        let mut sim = Sim::new(vec![shaped(1, one), noisy(2)], 1);
        sim.run(20 * S, |_| {});
        assert!(sim.verdicts.is_empty(), "{height}:\n{}", sim.explain());
    }
}

#[test]
fn a_path_that_was_bad_once_is_back_within_seconds() {
    for (ms, height) in [
        (1_000, Some(100_000)),
        (10_000, None),
        (60_000, None),
        (20_000, Some(300_000)),
    ] {
        let end = 10 * S + ms * MS;
        let mut sim = Sim::new(vec![bad_in(ms, 10 * S..end, height), noisy(100)], 1);
        sim.run(end, |_| {});
        assert_eq!(sim.mask().latency, SECOND, "{}", sim.explain());
        sim.run(end + 30 * S, |_| {});
        assert_eq!(sim.mask().latency, BOTH, "{ms} ms:\n{}", sim.explain());
        assert_eq!(changes(&sim), 2, "{}", sim.explain());
    }
}

#[test]
fn patience_grows_with_relapses_and_bounds_the_moves() {
    // Wi-Fi scans: 200 ms of 60 ms more.
    for every in [5, 10, 20, 30, 60, 120] {
        let scan = move |t: u64| u32::from(t % (every * S) < 200 * MS) * 60_000;
        let mut sim = Sim::new(vec![shaped(1, scan), noisy(2)], 1);
        sim.run(600 * S, |_| {});
        // Half of the flows move at each change.
        let moves = changes(&sim) as f64 / 2.0 / 10.0;
        assert!(moves <= 2.0, "every {every} s: {moves}:\n{}", sim.explain());
    }
}

#[test]
fn loss_is_left_at_every_delay() {
    for base_ms in [5, 20, 60, 120, 300, 600] {
        for (percent, within) in [(5, 5 * S), (30, 2 * S)] {
            let mut times: Vec<u64> = (0..9)
                .map(|seed| {
                    let onset = 30 * S;
                    let lossy = lossy(seed, base_ms * 1000, |t| u32::from(t >= onset) * percent);
                    let mut sim = Sim::new(vec![lossy, constant(base_ms * 1000)], seed);
                    left_after(&mut sim, onset, 60 * S).unwrap_or(u64::MAX)
                })
                .collect();
            times.sort_unstable();
            assert!(times[4] <= within, "{percent} % at {base_ms} ms: {times:?}");
        }
    }
}

#[test]
fn heavy_loss_never_beats_a_clean_path_that_is_55_ms_slower() {
    for base_ms in [5_u32, 20, 60, 300] {
        let us = base_ms * 1000;
        let lossy = lossy(base_ms.into(), us, |_| 20);
        let mut sim = Sim::new(vec![lossy, constant(us + 55_000)], 1);
        let mut on_lossy = 0;
        sim.run(120 * S, |s| {
            on_lossy += u32::from(s.now > 30 * S && s.mask().latency & 1 == 1);
        });
        assert_eq!(on_lossy, 0, "at {base_ms} ms:\n{}", sim.explain());
    }
}

#[test]
fn a_stable_difference_is_left_at_flowlets_whatever_came_before() {
    for (base, longer) in [
        (5_000, 3_000),
        (20_000, 3_000),
        (60_000, 8_000),
        (300_000, 40_000),
    ] {
        for began in [0, 1] {
            // Once with the longer one in use alone.
            let mut sim = Sim::new(vec![constant(base), constant(base + longer)], 1);
            if began == 1 {
                sim.usable(0, false, "no carrier");
                sim.run(5 * S, |_| {});
                sim.usable(0, true, "");
            }
            let mut ejected = 0;
            sim.run(45 * S, |s| ejected |= s.mask().ejected);
            let what = format!("{base} + {longer}:\n{}", sim.explain());
            assert_eq!(sim.mask().latency, 1, "{what}");
            assert_eq!(ejected, 0, "without haste");
        }
    }
}

#[test]
fn differences_that_tell_nothing_keep_both() {
    for (base, longer) in [(5_000, 1_500), (60_000, 5_000), (300_000, 25_000)] {
        let mut sim = Sim::new(vec![constant(base), constant(base + longer)], 1);
        sim.run(60 * S, |_| {});
        assert!(sim.verdicts.is_empty(), "{base}:\n{}", sim.explain());
    }
}

#[test]
fn a_short_path_that_is_dark_half_of_the_time_does_not_set_the_scale() {
    let dark: Model = Box::new(|t| (t % (4 * S) < 2 * S).then_some((5_000, 5_000)));
    let mut sim = Sim::new(vec![dark, constant(60_000), constant(60_000)], 1);
    sim.run(240 * S, |_| {});
    let late = sim.verdicts.iter().filter(|v| v.0 > 60 * S);
    let used: Vec<u16> = late.map(|v| v.1.groups[0].latency).collect();
    assert!(used.windows(2).all(|w| w[0] == w[1]), "{}", sim.explain());
}

#[test]
fn cost_moves_the_choice_away() {
    let run = |cost_us: f64| {
        let mut sim = Sim::new(vec![noisy(1), noisy(2)], 1);
        sim.with_costs([cost_us, 0.0]);
        sim.run(30 * S, |_| {});
        sim.mask().latency
    };
    assert_eq!([0.0, 1_000.0, 10_000.0].map(run), [BOTH, BOTH, SECOND]);
    // But a dear path is used where the cheap one is worse than that.
    let mut sim = Sim::new(vec![noisy(1), shaped(2, |_| 50_000)], 1);
    sim.with_costs([10_000.0, 0.0]);
    sim.run(30 * S, |_| {});
    assert_eq!(sim.mask().latency, 1, "{}", sim.explain());
}

/// As when NetworkManager finds that an uplink has no Internet.
#[test]
fn a_path_whose_cost_changes_keeps_what_was_measured() {
    let mut sim = Sim::new(vec![noisy(1), noisy(2)], 1);
    sim.run(5 * S, |_| {});
    assert_eq!(sim.mask().latency, BOTH);
    sim.with_costs([0.0, 1e7]);
    sim.policy.tick(sim.now);
    let samples = sim.policy.status(sim.now)[1].samples;
    assert!(samples >= 20, "{samples}");
    sim.run(7 * S, |_| {});
    assert_eq!(sim.mask().latency, 1);
}

#[test]
fn a_slow_way_back_is_no_lateness() {
    // The way back is 200 ms longer from the start, or turns so.
    for onset in [0, 10 * S] {
        let mut rng = StdRng::seed_from_u64(1);
        let back: Model = Box::new(move |t| {
            let d = noise(&mut rng);
            Some((d, if t >= onset { d + 200_000 } else { d }))
        });
        let mut sim = Sim::new(vec![back, noisy(2)], 1);
        let mut away = 0;
        sim.run(60 * S, |s| {
            away += u64::from(s.mask().latency != BOTH) * TICK
        });
        assert_eq!(sim.mask().latency, BOTH, "{}", sim.explain());
        assert!(away < 2 * S, "{away} us away:\n{}", sim.explain());
    }
}

#[test]
fn a_hiccup_of_our_own_moves_nothing() {
    for stall in [150 * MS, 500 * MS, 3 * S] {
        let mut sim = Sim::new(vec![noisy(1), noisy(2)], 1);
        sim.run(10 * S, |_| {});
        // Neither ticks nor probes; answers wait in the socket.
        sim.now = (sim.now + stall) / (50 * MS) * (50 * MS);
        sim.run(20 * S, |_| {});
        assert!(sim.verdicts.is_empty(), "{stall}:\n{}", sim.explain());
    }
}

#[test]
fn a_common_cause_moves_next_to_nothing() {
    // Every answer is up to 300 ms late on all paths: stuck in a queue that they share. As the queue ends one path
    // may be seen to be on time a probe before the other.
    let mut moved = 0;
    for seed in 0..5 {
        let late = |t: u64| match (10 * S..10 * S + 300 * MS).contains(&t) {
            true => (10 * S + 300 * MS - t) as u32,
            false => 0,
        };
        let mut sim = Sim::new(vec![shaped(seed, late), shaped(seed + 100, late)], seed);
        sim.run(20 * S, |_| {});
        moved += changes(&sim);
        assert_eq!(sim.mask().latency, BOTH, "seed {seed}:\n{}", sim.explain());
    }
    assert!(moved <= 2, "{moved}");
}

#[test]
fn all_paths_dark_leaves_it_to_the_kernel_and_back_at_once() {
    let gone = |seed| bad_in(seed, 10 * S..15 * S, None);
    let mut sim = Sim::new(vec![gone(1), gone(2)], 1);
    sim.run(12 * S, |_| {});
    assert_eq!(sim.mask(), PathMasks::default());
    sim.run(15 * S + 200 * MS, |_| {});
    assert_ne!(sim.mask().latency, 0, "{}", sim.explain());
}

#[test]
fn link_down_is_left_at_the_next_tick_and_back_after_enough_answers() {
    let mut sim = Sim::new(vec![noisy(1), noisy(2)], 1);
    sim.run(10 * S, |_| {});
    sim.usable(0, false, "no carrier");
    let v = sim.policy.tick(sim.now + MS).expect("changed").groups[0];
    assert_eq!((v.latency, v.bulk, v.alive, v.ejected), (2, 2, 2, 0));
    assert!(sim.explain().contains("no carrier"), "{}", sim.explain());
    sim.run(12 * S, |_| {});
    sim.usable(0, true, "");
    sim.run(12 * S + 500 * MS, |_| {});
    assert_eq!(sim.mask().latency, SECOND, "nothing is known of it yet");
    sim.run(18 * S, |_| {});
    assert_eq!(sim.mask().latency, BOTH, "{}", sim.explain());
}

/// What was known before our own clock was in doubt holds until something answers.
#[test]
fn a_pause_of_ours_brings_no_dead_path_back() {
    let mut steady = noisy(1);
    let dies = Box::new(move |t| (t < 10 * S).then(|| steady(t)).flatten());
    let mut sim = Sim::new(vec![dies, noisy(2)], 1);
    sim.run(13 * S, |_| {});
    assert_eq!(sim.mask().alive, SECOND);
    sim.now += 500 * MS;
    sim.policy.tick(sim.now);
    assert_eq!(sim.mask().alive, SECOND, "{}", sim.explain());
}

#[test]
fn spikes_on_one_path_are_avoided() {
    for seed in [11, 22] {
        let a = spikes(seed, 90 * S, 100 * MS..600 * MS);
        let r = spiky(&a, &[], seed, 90 * S);
        let [ours, ecmp, oracle, _] = r.map(p99);
        assert!(ours <= ecmp / 4.0, "seed {seed}: {ours} ecmp {ecmp}");
        assert!(ours <= 1.25 * oracle, "seed {seed}: {ours} oracle {oracle}");
    }
}

#[test]
fn spikes_on_both_paths() {
    // Each path spikes 10% of the time, so both do 1% of it: the oracle's own p99 stands on the
    // edge between none and half of the heights, and the share of late packets says more.
    let [ours, ecmp, oracle, informed] = pooled(100 * MS..600 * MS, true);
    assert!(ours.0 <= 0.85 * ecmp.0, "{ours:?} ecmp {ecmp:?}");
    let is_nearer = ours.1 - oracle.1 <= 0.25 * (ecmp.1 - oracle.1);
    assert!(is_nearer, "{ours:?} {ecmp:?} {oracle:?}");
    // Late news costs something, and nobody who waits for replies does better.
    assert!(oracle.1 < informed.1 && informed.1 < ours.1, "{informed:?}");
}

#[test]
fn short_spikes_make_nothing_worse() {
    for both in [false, true] {
        let [ours, ecmp, ..] = pooled(20 * MS..100 * MS, both);
        let no_worse = ours.0 <= ecmp.0 && ours.1 <= ecmp.1;
        assert!(no_worse, "both {both}: {ours:?} ecmp {ecmp:?}");
    }
}

#[test]
fn min_rtt_takes_the_lowest_median_alone() {
    let mut sim = Sim::new(vec![shaped(1, |_| 1_000), noisy(2)], 1);
    sim.policy.set_mode(Mode::MinRtt);
    sim.run(10 * S, |_| {});
    let v = sim.mask();
    assert_eq!((v.latency, v.bulk, v.alive, v.ejected), (2, 2, 3, 0));
    sim.policy.set_mode(Mode::Mountain);
    sim.run(11 * S, |_| {});
    assert_eq!(sim.mask().latency, BOTH);
}

#[test]
fn a_target_that_never_answers_leaves_the_choice_to_the_kernel() {
    let answers = |t: u64| (30 * S..40 * S).contains(&t) || t >= 50 * S;
    let silent: Model = Box::new(move |t| answers(t).then_some((20_000, 20_000)));
    let mut sim = Sim::new(vec![silent, noisy(2)], 1);
    sim.run(29 * S, |s| {
        let v = s.mask();
        assert_eq!(v.alive, 0b11, "it may drop pings");
        assert!(s.now < 3 * S || v.latency | v.bulk == 0, "{v:?}");
        assert!(s.now < 3 * S || s.policy.for_new_flows(0) == 0);
    });
    let status = sim.policy.status(sim.now);
    let never = "p0 has never answered: the kernel decides";
    assert_eq!(status[0].reason, never);
    assert_eq!(sim.explain(), "", "nothing was decided");
    // Once it has, it is a path like others, also when it is silent from the link's return on.
    sim.run(35 * S, |_| {});
    assert_eq!(sim.mask().latency, 0b11, "{}", sim.explain());
    sim.run(40 * S, |_| {});
    for usable in [false, true] {
        sim.usable(0, usable, "carrier");
    }
    sim.run(45 * S, |_| {});
    let v = sim.mask();
    assert_eq!((v.latency, v.alive), (0b10, 0b10), "{}", sim.explain());
}

/// Both are bad, and by which more is chance.
#[test]
fn two_lossy_paths_are_not_changed_for_each_other_all_the_time() {
    for base_ms in [20_u32, 60] {
        for percents in [[5, 5], [10, 10], [10, 12], [20, 20], [30, 30]] {
            let mut moves: Vec<f64> = (0..5u64)
                .map(|seed| {
                    let path =
                        |i: usize| lossy(2 * seed + i as u64, base_ms * 1000, move |_| percents[i]);
                    let mut sim = Sim::new(vec![path(0), path(1)], seed);
                    sim.run(600 * S, |_| {});
                    changes(&sim) as f64 / 10.0
                })
                .collect();
            moves.sort_by(f64::total_cmp);
            assert!(moves[2] <= 1.0, "{percents:?} at {base_ms} ms: {moves:?}");
        }
    }
}
