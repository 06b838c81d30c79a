// SPDX-License-Identifier: GPL-2.0-or-later
//! How often paths are probed, and gateways that answer only so many probes a second.

use std::cell::{Cell, RefCell};

use rand::rngs::StdRng;
use rand::SeedableRng;

use super::sim::*;
use crate::steer::explain::Use;
use crate::steer::policy::*;

fn interval_ms(sim: &Sim) -> Vec<u64> {
    (0..sim.models.len())
        .map(|path| sim.policy.probe_interval_us(path) / MS)
        .collect()
}

fn quiet(s: &mut Sim, latency_bps: f64) {
    for path in 0..s.models.len() {
        s.egress(path, latency_bps, latency_bps);
    }
}

#[test]
fn probes_follow_the_traffic() {
    let mut sim = Sim::new(vec![noisy(1), noisy(2)], 1);
    sim.thin = false;
    assert_eq!(interval_ms(&sim), [50, 50], "at first");
    sim.run(20 * S, |s| quiet(s, 0.0));
    assert_eq!(interval_ms(&sim), [500, 500], "idle");
    // A first flow starts a burst at once.
    let at_us = sim.now;
    sim.policy.event(Event::Placed {
        path: 1,
        at_us,
        flows: 1,
    });
    assert_eq!(interval_ms(&sim), [50, 10]);
    sim.run(22 * S, |s| quiet(s, 0.0));
    assert_eq!(interval_ms(&sim), [50, 50], "it is silent now");
    sim.run(40 * S, |s| quiet(s, 0.0));
    assert_eq!(interval_ms(&sim), [500, 500]);
}

#[test]
fn metered_paths_are_never_probed_fast() {
    let mut sim = Sim::new(vec![noisy(1), noisy(2)], 1);
    sim.with_metered([true, false]);
    sim.run(5 * S, |s| quiet(s, 1e5));
    assert_eq!(interval_ms(&sim), [50, 10]);
}

/// While its provider is the only one of two.
#[test]
fn a_path_without_another_is_probed_as_on_an_idle_host() {
    let mut sim = Sim::new(vec![noisy(1)], 1);
    sim.run(5 * S, |s| quiet(s, 1e5));
    assert_eq!(interval_ms(&sim), [500]);
    let group = sim.policy.current().groups[0];
    assert_eq!((group.alive, group.latency, group.bulk), (1, 1, 1));
}

/// A modem beside a line: it is there when the line is not, and costs next to nothing until then.
#[test]
fn a_reserve_is_probed_as_on_an_idle_host_until_it_is_needed() {
    let dark = Cell::new(false);
    let mut answers = noisy(2);
    let line: Model = Box::new(|t| answers(t).filter(|_| !dark.get()));
    let mut sim = Sim::new(vec![noisy(1), line], 1);
    sim.with_metered([true, false]);
    sim.with_costs([1e5, 0.0]);
    sim.run(20 * S, |_| {});
    assert_eq!(sim.mask().latency, 0b10);
    assert_eq!(interval_ms(&sim), [500, 10]);
    let why = &sim.policy.decisions().last().unwrap().why;
    assert!(
        why.contains("with its cost of 100.0 ms it takes 1"),
        "{why}"
    );
    dark.set(true);
    sim.run(21 * S, |_| {});
    assert_eq!(sim.mask().latency, 0b01, "{}", sim.explain());
    assert_eq!(interval_ms(&sim)[0], 50);
    dark.set(false);
    sim.run(60 * S, |_| {});
    assert_eq!(sim.mask().latency, 0b10, "{}", sim.explain());
    assert_eq!(interval_ms(&sim), [500, 10]);
}

/// A gateway that answers `hz` probes a second, a fifth of a second's worth at once, and is dark from `dark_us` on.
fn limited<'a>(bucket: &'a RefCell<(f64, u64)>, hz: f64, dark_us: u64, seed: u64) -> Model<'a> {
    let mut answers = saving(bucket, hz, (hz / 5.0).max(1.0), seed);
    Box::new(move |t| match t < dark_us {
        true => answers(t),
        false => None,
    })
}

/// One that answers up to `most` at once, after a while in which it was asked for less.
fn saving<'a>(bucket: &'a RefCell<(f64, u64)>, hz: f64, most: f64, seed: u64) -> Model<'a> {
    let mut rng = StdRng::seed_from_u64(seed);
    Box::new(move |t| {
        let mut bucket = bucket.borrow_mut();
        let passed = t.saturating_sub(bucket.1) as f64 / 1e6;
        bucket.0 = (bucket.0 + passed * hz).min(most);
        bucket.1 = t;
        if bucket.0 < 1.0 {
            return None;
        }
        bucket.0 -= 1.0;
        same(noise(&mut rng))
    })
}

#[test]
fn a_limit_of_answers_is_no_blame() {
    for hz in [1.0, 5.0, 15.0, 50.0] {
        for both in [false, true] {
            let buckets = [RefCell::new((1.0, 0)), RefCell::new((1.0, 0))];
            let other = match both {
                true => limited(&buckets[1], hz, u64::MAX, 7),
                false => noisy(2),
            };
            let mut sim = Sim::new(vec![limited(&buckets[0], hz, u64::MAX, 1), other], 1);
            sim.run(S + 30 * S, |_| {});
            let status = sim.policy.status(sim.now);
            let limits: Vec<_> = status.iter().map(|p| p.answer_limit_hz).collect();
            let is_near = limits[0].is_some_and(|l| l <= hz && l >= hz / 3.0);
            assert!(is_near, "{hz}: {limits:?}\n{}", sim.explain());
            assert_eq!(limits[1].is_some(), both, "{hz}: {limits:?}");
            for path in &status {
                let is_told = path.reason.contains("; its target limits answers: probed ");
                assert_eq!(is_told, path.answer_limit_hz.is_some(), "{}", path.reason);
            }
            sim.run(90 * S, |_| {});
            let before = sim.verdicts.len();
            sim.run(300 * S, |_| {});
            let what = format!("{hz}, both {both}:\n{}", sim.explain());
            assert_eq!(sim.verdicts.len(), before, "never again: {what}");
            assert_eq!(sim.mask().latency, 0b11, "{what}");
        }
    }
}

#[test]
fn a_limited_gateway_whose_path_goes_dark_is_left() {
    for hz in [1.0, 15.0] {
        let bucket = RefCell::new((1.0, 0));
        let dark = 120 * S;
        let mut sim = Sim::new(vec![limited(&bucket, hz, dark, 1), noisy(2)], 1);
        sim.run(dark, |_| {});
        assert_eq!(sim.mask().latency, 0b11, "{hz}:\n{}", sim.explain());
        sim.run(dark + 6 * S, |_| {});
        assert_eq!(sim.mask().latency, 0b10, "{hz}:\n{}", sim.explain());
    }
}

#[test]
fn random_loss_is_no_limit() {
    for seed in 0..10 {
        let onset = 20 * S;
        let lossy = lossy(seed, 20_000, |t| u32::from(t >= onset) * 30);
        let mut sim = Sim::new(vec![lossy, noisy(2)], seed);
        let mut used = 0;
        sim.run(120 * S, |s| {
            used += u64::from(s.now > onset && s.mask().latency & 1 == 1) * TICK
        });
        assert!(used <= 6 * S, "seed {seed}: {used} us:\n{}", sim.explain());
    }
}

/// As in a moving car. What was taken for a limit must not make the prober slow.
#[test]
fn losses_that_end_while_probes_are_slower_are_a_limit_for_a_moment_only() {
    let mut found = 0;
    for seed in 0..20 {
        let end = (22 + seed % 4) * S;
        let bad = 20 * S..end;
        let lossy = lossy(seed, 20_000, |t| u32::from(bad.contains(&t)) * 60);
        let mut sim = Sim::new(vec![lossy, noisy(2)], seed);
        let mut limited_us = 0;
        sim.run(240 * S, |s| {
            let limit_us = TICK * u64::from(limit_hz(s).is_some());
            limited_us += limit_us;
            found += limit_us;
        });
        assert!(limited_us <= S, "seed {seed}: {limited_us} us");
        assert_eq!(limit_hz(&sim), None, "seed {seed}");
        assert!(interval_ms(&sim)[0] <= 50, "seed {seed}");
    }
    assert!(found > 0, "the test proves nothing");
}

/// Half of what the limit would take is missing by chance, but not by a single outage.
#[test]
fn an_outage_while_a_limit_is_tried_out_is_none() {
    let bucket = RefCell::new((1.0, 0));
    let (mut at_first, mut then) = (limited(&bucket, 5.0, u64::MAX, 1), noisy(3));
    // No limit any more, and 200 ms of each second are lost.
    let model: Model = Box::new(move |t| match t {
        _ if t < 40 * S => at_first(t),
        _ if t % S < 200 * MS => None,
        _ => then(t),
    });
    let mut sim = Sim::new(vec![model, noisy(2)], 1);
    sim.run(40 * S, |_| {});
    assert!(limit_hz(&sim).is_some(), "{}", sim.explain());
    let mut slow_us = 0;
    sim.run(240 * S, |s| {
        slow_us += TICK * u64::from(interval_ms(s)[0] > 50)
    });
    assert!(slow_us <= 60 * S, "{slow_us} us");
}

fn limit_hz(sim: &Sim) -> Option<f64> {
    sim.policy.answer_limit_hz(0)
}

/// What is missing then is the limit's doing only up to the newest answer.
#[test]
fn a_path_that_goes_dark_while_a_limit_is_tried_out_stays_left() {
    let (bucket, dark_us) = (RefCell::new((1.0, 0)), Cell::new(u64::MAX));
    let (mut answers, dark) = (limited(&bucket, 1.0, u64::MAX, 1), &dark_us);
    let model: Model = Box::new(move |t| match t < dark.get() {
        true => answers(t),
        false => None,
    });
    let mut sim = Sim::new(vec![model, noisy(2)], 1);
    sim.run(60 * S, |_| {});
    wait_for_limit(&mut sim, true);
    wait_for_limit(&mut sim, false);
    assert_eq!(sim.mask().latency, 0b11, "{}", sim.explain());
    dark_us.set(sim.now + 100 * MS);
    let left_us = dark_us.get() + 2_500 * MS;
    let mut used = 0;
    sim.run(left_us + 20 * S, |s| {
        used += u64::from(s.now > left_us && s.mask().latency & 1 == 1) * TICK
    });
    assert_eq!(used, 0, "{}", sim.explain());
}

/// Until a limit is known and not tried out, or is so no more.
fn wait_for_limit(sim: &mut Sim, is_known: bool) {
    while limit_hz(sim).is_some() != is_known {
        assert!(sim.now < 200 * S, "{}", sim.explain());
        sim.run(sim.now + TICK, |_| {});
    }
}

/// It is used again as soon as the limit is found, and so while that is tried out.
#[test]
fn the_use_of_a_path_with_a_limit_is_not_judged_by_what_the_limit_takes() {
    let bucket = RefCell::new((1.0, 0));
    let mut sim = Sim::new(vec![limited(&bucket, 5.0, u64::MAX, 1), noisy(2)], 1);
    sim.run(30 * S, |_| {});
    let decisions = sim.policy.decisions();
    let again = decisions.filter(|d| d.path == 0 && d.to == Use::All);
    let used = again.last().expect("it is used again");
    let is_known = used.at_us > 4 * S;
    assert!(is_known, "before its limit is: {}", sim.explain());
    let right = used.outcome.and_then(|outcome| outcome.right);
    assert_eq!(right, Some(true), "{:?}: {}", used.outcome, sim.explain());
}

/// It answers one probe a second, and a third of these answers is lost: too few to ask in another way what that is.
#[test]
fn losses_beside_a_limit_are_not_forgotten_when_it_is_tried_out() {
    let bucket = RefCell::new((1.0, 0));
    let mut answers = limited(&bucket, 1.0, u64::MAX, 1);
    let mut answered = 0;
    let model: Model = Box::new(move |t| {
        let answer = answers(t)?;
        answered += u32::from(t > 60 * S);
        (answered % 3 != 1).then_some(answer)
    });
    let mut sim = Sim::new(vec![model, noisy(2)], 1);
    sim.run(60 * S, |_| {});
    assert_eq!(sim.mask().latency, 0b11, "{}", sim.explain());
    sim.run(80 * S, |_| {});
    let (mut used, mut tried_out) = (0, 0);
    sim.run(300 * S, |s| {
        used += u64::from(s.mask().latency & 1 == 1) * TICK;
        tried_out += u64::from(limit_hz(s).is_none()) * TICK;
    });
    assert!(tried_out > 0, "the test proves nothing");
    assert_eq!(used, 0, "{}", sim.explain());
}

/// It is probed 20 times a second at most, which such a limit all but lets through, at first or for good.
#[test]
fn a_metered_path_is_not_taken_for_unlimited_time_and_again() {
    for (hz, most, bucket) in [(18.0, 3.6, (1.0, 0)), (12.0, 18.0, (0.0, S))] {
        let bucket = RefCell::new(bucket);
        let mut sim = Sim::new(vec![saving(&bucket, hz, most, 1), noisy(2)], 1);
        sim.with_metered([true, false]);
        sim.run(90 * S, |_| {});
        assert!(limit_hz(&sim).is_some(), "{hz}: {}", sim.explain());
        let before = sim.verdicts.len();
        sim.run(600 * S, |_| {});
        assert_eq!(sim.verdicts.len(), before, "{hz}: {}", sim.explain());
        assert_eq!(sim.mask().latency, 0b11, "{hz}: {}", sim.explain());
    }
}

#[test]
fn a_limit_is_tried_out_where_probes_are_fast_enough_to_tell() {
    for (hz, tells) in [(5.0, true), (15.0, false)] {
        let bucket = RefCell::new((1.0, 0));
        let (mut at_first, mut then) = (limited(&bucket, hz, u64::MAX, 1), noisy(3));
        let model: Model = Box::new(move |t| match t < 60 * S {
            true => at_first(t),
            false => then(t),
        });
        let mut sim = Sim::new(vec![model, noisy(2)], 1);
        sim.run(60 * S, |_| {});
        assert!(limit_hz(&sim).is_some(), "{}", sim.explain());
        // All is sent by the other one: 20 times a second at most.
        sim.thin = false;
        sim.run(200 * S, |s| s.egress(1, 1e5, 1e5));
        assert_eq!(limit_hz(&sim).is_none(), tells, "{hz}: {}", sim.explain());
        // A single packet asks for more.
        quiet(&mut sim, 1e5);
        sim.run(205 * S, |_| {});
        assert_eq!(limit_hz(&sim), None);
        assert_eq!(interval_ms(&sim), [50, 50]);
    }
}

#[test]
fn a_path_that_goes_dark_while_its_limit_is_tried_out_is_left() {
    for hz in [5.0, 15.0, 50.0] {
        let (bucket, dark) = (RefCell::new((1.0, 0)), Cell::new(u64::MAX));
        let mut answers = limited(&bucket, hz, u64::MAX, 1);
        let model: Model = Box::new(|t| answers(t).filter(|_| t < dark.get()));
        let mut sim = Sim::new(vec![model, noisy(2)], 1);
        let (mut found, mut left) = (false, None);
        sim.run(120 * S, |s| {
            found |= s.now > 25 * S && limit_hz(s).is_some();
            if found && dark.get() == u64::MAX && limit_hz(s).is_none() {
                dark.set(s.now + 100 * MS);
            }
            if s.now > dark.get() && s.mask().latency == 0b10 {
                left.get_or_insert(s.now - dark.get());
            }
        });
        assert!(left.is_some_and(|us| us <= S), "{hz}: {left:?}");
    }
}

/// Outages that last longer than between the answers of any limit, and end while it is asked.
#[test]
fn a_path_that_loses_nearly_all_is_not_probed_ever_less() {
    let mut next = 20 * S;
    let lossy: Model = Box::new(move |t| {
        let lost = (20 * S..50 * S).contains(&t) && t < next;
        next = if lost || t < 20 * S { next } else { t + 6 * S };
        (!lost).then_some((20_000, 20_000))
    });
    let mut sim = Sim::new(vec![lossy, noisy(2)], 1);
    let mut slowest = 0;
    sim.run(100 * S, |s| slowest = slowest.max(interval_ms(s)[0]));
    assert!(slowest <= 50, "{slowest} ms");
    assert_eq!(limit_hz(&sim), None);
}
