// SPDX-License-Identifier: GPL-2.0-or-later
//! Bulk flows that fill both paths, as in scenario `moves`: windows, queues, losses.

use std::cell::RefCell;
use std::collections::VecDeque;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::sim::*;
use crate::steer::policy::*;

const SEGMENT: f64 = 1448.0;
/// What each path carries in a tick (10 Mbit/s), and its queue, in bytes.
const PER_TICK: f64 = 12_500.0;
const QUEUE: f64 = 150e3;
const BULK: usize = 40;
/// Without a pause, a flow is moved when its path has been barred for so long.
const FORCED: u64 = 2 * S;
/// Delay of the foreign queue or detour, in µs.
const HEIGHT: u32 = 100_000;

/// Of TCP: bytes it may have and has under way.
struct Flow {
    path: usize,
    window: f64,
    in_flight: f64,
    /// Until then a loss is of the round trip that shrank the window already, µs.
    calm_until: u64,
}

/// Two paths full of window-limited flows, and thin ones that follow the latency mask.
struct Filled {
    rng: StdRng,
    flows: Vec<Flow>,
    /// Bytes queued, by flow (`BULK`: thin ones), in order.
    queue: [VecDeque<(usize, f64)>; 2],
    queued: [f64; 2],
    /// Acknowledgements on their way: when, flow, bytes.
    acks: VecDeque<(u64, usize, f64)>,
    barred_since: [Option<u64>; 2],
    thin: usize,
    sent: [f64; 2],
    delivered: f64,
    moves: usize,
    /// (path, from, until)
    onsets: Vec<(usize, u64, u64)>,
}

impl Filled {
    fn new(seed: u64, onsets: Vec<(usize, u64, u64)>) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let flows = (0..BULK).map(|_| Flow {
            path: rng.random_range(0..2),
            window: 4.0 * SEGMENT,
            in_flight: 0.0,
            calm_until: 0,
        });
        Filled {
            flows: flows.collect(),
            rng,
            queue: Default::default(),
            queued: [0.0; 2],
            acks: VecDeque::new(),
            barred_since: [None; 2],
            thin: 0,
            sent: [0.0; 2],
            delivered: 0.0,
            moves: 0,
            onsets,
        }
    }

    /// What a probe sent now meets beyond 20 ms, µs.
    fn extra(&self, path: usize, t: u64) -> u32 {
        (self.queued[path] / PER_TICK * TICK as f64) as u32 + self.foreign(path, t)
    }

    fn foreign(&self, path: usize, t: u64) -> u32 {
        let hit = |e: &(usize, u64, u64)| e.0 == path && (e.1..e.2).contains(&t);
        HEIGHT * u32::from(self.onsets.iter().any(hit))
    }

    fn there(&self, path: usize) -> Vec<usize> {
        (0..BULK).filter(|f| self.flows[*f].path == path).collect()
    }

    fn enqueue(&mut self, path: usize, flow: usize, bytes: f64, now: u64) {
        self.sent[path] += bytes;
        let room = (QUEUE - self.queued[path]).max(0.0);
        if bytes > room && flow < BULK {
            let f = &mut self.flows[flow];
            if now >= f.calm_until {
                f.window = (0.7 * f.window).max(SEGMENT);
                f.calm_until = now + 150 * MS;
            }
            // What was dropped is noticed a round trip later.
            self.acks.push_back((now + 150 * MS, flow, room - bytes));
        }
        if room > 0.0 {
            let taken = bytes.min(room);
            self.queued[path] += taken;
            self.queue[path].push_back((flow, taken));
        }
    }

    fn tick(&mut self, v: GroupVerdict, now: u64) {
        for path in 0..2 {
            let barred = v.bulk != 0 && v.bulk >> path & 1 == 0;
            self.barred_since[path] = barred.then(|| self.barred_since[path].unwrap_or(now));
        }
        for f in &mut self.flows {
            let forced = self.barred_since[f.path].is_some_and(|t| now >= t + FORCED);
            if forced && v.bulk >> (1 - f.path) & 1 == 1 {
                f.path = 1 - f.path;
                self.moves += 1;
            }
        }
        // Thin flows: 3 Mbit/s, on both paths or the one that they may use.
        let stay = v.latency >> self.thin & 1 == 1 || v.ejected >> self.thin & 1 == 0;
        let on: &[usize] = match v.latency {
            3 => &[0, 1],
            _ if stay => &[self.thin],
            1 => &[0],
            _ => &[1],
        };
        self.thin = on[0];
        for &path in on {
            self.enqueue(path, BULK, 3_750.0 / on.len() as f64, now);
        }
        let mut due = vec![];
        self.acks.retain(|a| {
            let is = a.0 <= now;
            if is {
                due.push(*a);
            }
            !is
        });
        for (_, flow, bytes) in due.iter().filter(|d| d.1 < BULK) {
            let f = &mut self.flows[*flow];
            f.in_flight = (f.in_flight - bytes.abs()).max(0.0);
            if *bytes > 0.0 {
                f.window += SEGMENT * bytes / f.window;
            }
        }
        let first = self.rng.random_range(0..BULK);
        for flow in (0..BULK).map(|i| (i + first) % BULK) {
            let f = &mut self.flows[flow];
            let bytes = f.window - f.in_flight;
            if bytes >= SEGMENT {
                f.in_flight += bytes;
                let path = f.path;
                self.enqueue(path, flow, bytes, now);
            }
        }
        for path in 0..2 {
            let way = 20 * MS + u64::from(self.foreign(path, now));
            let mut left = PER_TICK;
            while left > 0.0 {
                let Some((flow, bytes)) = self.queue[path].front_mut() else {
                    break;
                };
                let taken = bytes.min(left);
                left -= taken;
                *bytes -= taken;
                self.queued[path] = (self.queued[path] - taken).max(0.0);
                self.delivered += taken;
                self.acks.push_back((now + way, *flow, taken));
                if *bytes <= 0.0 {
                    self.queue[path].pop_front();
                }
            }
        }
    }
}

/// What became of the bulk flows at each onset: (those on the path, those that had left after 3 s).
struct Outcome {
    left: Vec<(usize, usize)>,
    moves: usize,
    mbit: f64,
    explain: String,
}

fn run(seed: u64, onsets: Vec<(usize, u64, u64)>, until: u64) -> Outcome {
    let filled = RefCell::new(Filled::new(seed, onsets.clone()));
    let mut sim = Sim::new(
        vec![
            shaped(seed, |t| filled.borrow().extra(0, t)),
            shaped(seed + 1, |t| filled.borrow().extra(1, t)),
        ],
        seed,
    );
    let mut there: Vec<Vec<usize>> = vec![vec![]; onsets.len()];
    let mut left = vec![0; onsets.len()];
    sim.run(until, |s| {
        filled.borrow_mut().tick(s.mask(), s.now);
        for path in 0..2 {
            if s.now.is_multiple_of(100 * MS) {
                let bytes = std::mem::take(&mut filled.borrow_mut().sent[path]);
                s.policy.event(Event::Egress {
                    path,
                    at_us: s.now,
                    rate_bps: bytes * 80.0,
                });
            }
        }
        let f = filled.borrow();
        for (i, o) in onsets.iter().enumerate() {
            if (o.1..o.1 + TICK).contains(&s.now) {
                there[i] = f.there(o.0);
            }
            if (o.1 + 3 * S..o.1 + 3 * S + TICK).contains(&s.now) {
                left[i] = there[i].iter().filter(|n| f.flows[**n].path != o.0).count();
            }
        }
    });
    let explain = sim.explain();
    drop(sim);
    let f = filled.into_inner();
    Outcome {
        left: there.iter().map(Vec::len).zip(left).collect(),
        moves: f.moves,
        mbit: f.delivered * 8.0 / (until - S) as f64,
        explain,
    }
}

#[test]
fn bulk_flows_leave_again_and_again_without_going_back_and_forth() {
    let (mut there, mut left) = (0, 0);
    for seed in 0..2u64 {
        let mut rng = StdRng::seed_from_u64(seed + 77);
        let mut onsets = vec![];
        let mut t = 25 * S;
        while t < 140 * S {
            t += rng.random_range(0..4 * S);
            onsets.push((rng.random_range(0..2), t, t + 8 * S));
            t += 8 * S + rng.random_range(10 * S..30 * S);
        }
        let n = onsets.len();
        let o = run(seed, onsets, 150 * S);
        there += o.left.iter().map(|l| l.0).sum::<usize>();
        left += o.left.iter().map(|l| l.1).sum::<usize>();
        // Each onset moves every flow once at most.
        assert!(o.moves <= n * BULK, "{} moves:\n{}", o.moves, o.explain);
        assert!(o.mbit >= 11.0, "{}", o.mbit);
    }
    assert!(there > 100 && left * 10 >= there * 9, "{left} of {there}");
}

/// Feeds our own egress rates (Mbit/s) of both paths.
fn egress(s: &mut Sim, mbit: [f64; 2]) {
    for (path, mbit) in mbit.into_iter().enumerate() {
        if s.now.is_multiple_of(100 * MS) {
            s.policy.event(Event::Egress {
                path,
                at_us: s.now,
                rate_bps: mbit * 1e6,
            });
        }
    }
}

/// Path 1 has been bad again and again and is held for 24 s at least, 11 s of which it has been good
/// when path 0, full of our flows, turns bad.
const ONSET: u64 = 31 * S;

fn held_before(t: u64) -> u32 {
    let bad = (10 * S..20 * S).contains(&t) && (t / S).is_multiple_of(3);
    HEIGHT * u32::from(bad || (10 * S..11 * S).contains(&t))
}

#[test]
fn a_jump_stays_foreign_when_flows_come_back_for_a_moment() {
    // Rates as in a measured run; presumably thin flows came along for 0.1 s.
    let jump = |t: u64| HEIGHT * u32::from(t >= ONSET);
    let mut sim = Sim::new(vec![shaped(1, jump), shaped(2, held_before)], 1);
    sim.run(ONSET + 8 * S, |s| {
        let on_0 = match s.now {
            t if t < ONSET + 200 * MS => 10.0,
            t if t < ONSET + 600 * MS => 14.3,
            t if t < ONSET + 2 * S => 10.0,
            _ => 0.3,
        };
        egress(s, [on_0, 10.3 - on_0]);
        if s.now > ONSET + 200 * MS {
            assert_eq!(s.mask().bulk, 0b10, "{}", s.explain());
        }
    });
}
