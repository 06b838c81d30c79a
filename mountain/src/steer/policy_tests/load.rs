// SPDX-License-Identifier: GPL-2.0-or-later
//! Paths that our own flows fill.

use super::sim::*;
use crate::steer::explain::{Load, Use};
use crate::steer::policy::*;

/// Feeds our own rates on a path (Mbit/s) every 100 ms: of all flows, and of latency flows.
fn egress(s: &mut Sim, path: usize, mbit: f64, latency_mbit: f64) {
    if s.now.is_multiple_of(100 * MS) {
        s.policy.event(Event::Egress {
            path,
            at_us: s.now,
            rate_bps: mbit * 1e6,
            latency_bps: latency_mbit * 1e6,
        });
    }
}

#[test]
fn bulk_stays_with_its_own_queue_and_leaves_a_foreign_one() {
    // From 10 s on a queue of 150 ms grows on path 0 within half a second.
    let queue = |t: u64| (t.saturating_sub(10 * S).min(S / 2) * 3 / 10) as u32;
    for (ours, bulk) in [(true, 0b11), (false, 0b10)] {
        let mut sim = Sim::new(vec![shaped(1, queue), noisy(2)], 1);
        sim.thin = false;
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
    let mut sim = Sim::new(vec![shaped(1, thin), shaped(2, |_| 30_000)], 1);
    sim.thin = false;
    let mut left = None;
    sim.run(30 * S, |s| {
        egress(s, 0, if s.now < 20 * S { 9.5 } else { 0.5 }, 0.1);
        egress(s, 1, 9.5, 0.1);
        if s.mask().bulk == 0b10 {
            left.get_or_insert(s.now);
        }
    });
    let left = left.unwrap_or(u64::MAX);
    assert!(
        (20 * S..22 * S).contains(&left),
        "{left}:\n{}",
        sim.explain()
    );
}

/// 40 latency flows of 0.4 Mbit/s on two paths of 10: one alone would be late for them.
#[test]
fn latency_flows_that_need_both_paths_do_not_leave_and_return_together() {
    use std::cell::Cell;
    let offered = Cell::new([8.0, 8.0]);
    let queue = [Cell::new(0.0f64), Cell::new(0.0f64)];
    let model = |path: usize| -> Model {
        let (queue, offered) = (&queue, &offered);
        Box::new(move |t| {
            let spike = u32::from(path == 0 && (20 * S..20 * S + 300 * MS).contains(&t)) * 100_000;
            let _ = offered;
            same(20_000 + queue[path].get() as u32 + spike)
        })
    };
    let mut sim = Sim::new(vec![model(0), model(1)], 1);
    sim.thin = false;
    let mut changes = 0;
    let mut last = 3;
    sim.run(200 * S, |s| {
        let mask = s.mask().latency;
        let share = match mask {
            0b01 => [16.0, 0.0],
            0b10 => [0.0, 16.0],
            _ => [8.0, 8.0],
        };
        offered.set(share);
        for path in 0..2 {
            // What exceeds 10 Mbit/s queues up, 200 ms of it at most.
            let grown = queue[path].get() + (share[path] - 10.0) / 10.0 * TICK as f64;
            queue[path].set(grown.clamp(0.0, 200e3));
            let sent = f64::min(share[path], 10.0);
            egress(s, path, sent.max(0.01), sent);
        }
        changes += usize::from(mask != last);
        last = mask;
    });
    assert!(changes >= 1, "the spike is left:\n{}", sim.explain());
    // In three minutes.
    assert!(changes <= 12, "{changes}:\n{}", sim.explain());
}
