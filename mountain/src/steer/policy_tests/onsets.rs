// SPDX-License-Identifier: GPL-2.0-or-later
//! How long game flows stay on a path that turns bad, again and again.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::sim::*;

/// (path, start, end), in µs: as the lab draws them for `every_s = every`, `length_ms = [2500, 4000]`.
fn onsets(seed: u64, until: u64, every: u64) -> Vec<(usize, u64, u64)> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut all = Vec::new();
    let mut t = 5 * S + rng.random_range(0..every);
    while t + 1500 * MS < until {
        let end = t + rng.random_range(2500 * MS..4000 * MS);
        all.push((rng.random_range(0..2), t, end));
        t = end + rng.random_range(every / 2..every * 3 / 2);
    }
    all
}

/// Per onset of `height` µs the time in µs until flows are off the path for a second; `None` when none
/// was there in the second before.
fn times_to_leave(seed: u64, until: u64, every: u64, height: u32) -> Vec<Option<u64>> {
    let events = onsets(seed, until, every);
    let at = |path: usize, t: u64| {
        let hit = |e: &&(usize, u64, u64)| e.0 == path && (e.1..e.2).contains(&t);
        let back = |e: &&(usize, u64, u64)| e.0 == path && (e.2..e.2 + S).contains(&t);
        match (events.iter().find(hit), events.iter().find(back)) {
            (Some(_), _) => height,
            // First in, first out.
            (None, Some(e)) => height.saturating_sub((t - e.2) as u32),
            _ => 0,
        }
    };
    let mut sim = Sim::new(
        vec![
            shaped(seed, |t| at(0, t)),
            shaped(seed + 1000, |t| at(1, t)),
        ],
        seed,
    );
    // When flows were on each path, by tick.
    let mut there: [Vec<u64>; 2] = [vec![], vec![]];
    let mut on = 3u16;
    sim.run(until, |s| {
        let v = s.mask();
        // A flow leaves with its next packet when the path is ejected, else not for long.
        on = v.latency | (on & !v.ejected & v.alive);
        for (path, there) in there.iter_mut().enumerate() {
            if on >> path & 1 == 1 {
                there.push(s.now);
            }
        }
    });
    let result = events.iter().map(|&(path, start, end)| {
        let there = &there[path];
        let before = there.iter().any(|t| (start - S..start).contains(t));
        before.then(|| {
            let mut left = start;
            for &t in there.iter().filter(|t| (start..end).contains(t)) {
                if t >= left + S {
                    break;
                }
                left = t + TICK;
            }
            left - start
        })
    });
    result.collect()
}

/// A path that was bad a few seconds ago is no worse a refuge for it: what it did then once kept
/// flows on the other one, which had just turned bad, for half a second.
#[test]
fn the_other_paths_last_onset_does_not_delay_leaving() {
    let mut times = Vec::new();
    for (seed, height) in [(4, 30_000), (0, 300_000), (4, 300_000), (6, 300_000)] {
        times.extend(
            times_to_leave(seed, 105 * S, 5 * S, height)
                .into_iter()
                .flatten(),
        );
    }
    assert!(times.len() >= 20, "{} onsets counted", times.len());
    times.sort_unstable();
    assert!(times[times.len() / 2] <= 60 * MS, "{times:?}");
    assert!(times.last() <= Some(&(200 * MS)), "{times:?}");
}
