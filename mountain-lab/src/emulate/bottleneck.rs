// SPDX-License-Identifier: GPL-2.0-or-later
//! A bottleneck: a rate that changes over time, a drop-tail queue before it, random loss behind it.
//!
//! Pure: it is told when packets arrive and says when they leave, so that an emulator that is late
//! still decides as it should have.

use std::collections::VecDeque;

use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use serde::{Deserialize, Serialize};

/// What a link does over time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LinkPlan {
    /// From (µs after the start) and rate (bit/s); the first is from 0, times rise.
    pub rates: Vec<(u64, u64)>,
    /// Round trip without any queue.
    pub rtt_us: u32,
    /// Bytes that may wait.
    pub queue_bytes: u64,
    /// Share of packets lost at random, 0 to 1.
    pub loss: f64,
    /// Of the random loss.
    pub seed: u64,
    /// What is particular to the way back.
    pub back: Back,
}

/// The way of the ACKs, beyond half the round trip.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Back {
    /// ACKs leave together, once in so long, µs; 0: each by itself. As on Wi-Fi and mobile links.
    pub burst_us: u32,
    /// Of flows to another than the first port: so much longer, µs.
    pub far_us: u32,
}

impl Back {
    /// When a packet leaves that would at `t_us` if nothing were particular.
    pub fn leaves_us(&self, t_us: f64, far: bool) -> f64 {
        let t_us = t_us + if far { f64::from(self.far_us) } else { 0.0 };
        match self.burst_us {
            0 => t_us,
            burst => (t_us / f64::from(burst)).ceil() * f64::from(burst),
        }
    }
}

impl LinkPlan {
    /// Rate at `t_us` and the time at which it changes next.
    pub fn rate_at(&self, t_us: f64) -> (f64, f64) {
        let next = self.rates.partition_point(|(from, _)| *from as f64 <= t_us);
        let rate = self.rates[next.max(1) - 1].1 as f64;
        let until = self.rates.get(next).map_or(f64::INFINITY, |r| r.0 as f64);
        (rate, until)
    }

    /// When `bytes` have been sent that begin at `t_us`.
    fn sent_at(&self, mut t_us: f64, bytes: u64) -> f64 {
        let mut bits = bytes as f64 * 8.0;
        loop {
            let (rate, until) = self.rate_at(t_us);
            let takes = bits / rate * 1e6;
            if t_us + takes <= until {
                return t_us + takes;
            }
            bits -= (until - t_us) * rate / 1e6;
            t_us = until;
        }
    }

    /// Bits that the link can carry between two times, µs.
    pub fn capacity_bits(&self, from_us: u64, until_us: u64) -> f64 {
        let (mut t, end, mut bits) = (from_us as f64, until_us as f64, 0.0);
        while t < end {
            let (rate, until) = self.rate_at(t);
            let next = until.min(end);
            bits += rate * (next - t) / 1e6;
            t = next;
        }
        bits
    }
}

/// The queue as it stands.
pub struct Bottleneck {
    plan: LinkPlan,
    rng: Pcg64Mcg,
    /// Departure (µs) and bytes of what waits or is being sent.
    waiting: VecDeque<(f64, u64)>,
    backlog: u64,
    free_at: f64,
}

/// What became of a packet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fate {
    /// Leaves at this time, µs.
    Leaves(f64),
    /// The queue was full.
    Dropped,
    /// Left at this time, but was lost behind the queue.
    Lost(f64),
}

impl Bottleneck {
    pub fn new(plan: LinkPlan) -> Self {
        Bottleneck {
            rng: Pcg64Mcg::seed_from_u64(plan.seed),
            plan,
            waiting: VecDeque::new(),
            backlog: 0,
            free_at: 0.0,
        }
    }

    /// A packet of `bytes` arrives at `t_us`, not before the one before it.
    pub fn arrive(&mut self, t_us: f64, bytes: u64) -> Fate {
        while self.waiting.front().is_some_and(|(at, _)| *at <= t_us) {
            let gone = self.waiting.pop_front().expect("looked at above");
            self.backlog -= gone.1;
        }
        if self.backlog + bytes > self.plan.queue_bytes {
            return Fate::Dropped;
        }
        self.free_at = self.plan.sent_at(self.free_at.max(t_us), bytes);
        self.waiting.push_back((self.free_at, bytes));
        self.backlog += bytes;
        match self.plan.loss > 0.0 && self.rng.random_bool(self.plan.loss) {
            true => Fate::Lost(self.free_at),
            false => Fate::Leaves(self.free_at),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(rates: &[(u64, u64)], queue_bytes: u64) -> LinkPlan {
        LinkPlan {
            rates: rates.to_vec(),
            rtt_us: 40_000,
            queue_bytes,
            loss: 0.0,
            seed: 1,
            back: Back::default(),
        }
    }

    #[test]
    fn packets_leave_at_the_rate_of_the_moment() {
        // 8 Mbit/s is a byte a µs; 10 ms later a tenth of it.
        let mut b = Bottleneck::new(plan(&[(0, 8_000_000), (10_000, 800_000)], 10_000));
        assert_eq!(b.arrive(1_000.0, 1_000), Fate::Leaves(2_000.0));
        assert_eq!(b.arrive(1_000.0, 1_000), Fate::Leaves(3_000.0));
        assert_eq!(b.arrive(20_000.0, 1_000), Fate::Leaves(30_000.0));
        // Half before the change, half after it.
        let mut b = Bottleneck::new(plan(&[(0, 8_000_000), (10_000, 800_000)], 10_000));
        assert_eq!(b.arrive(9_500.0, 1_000), Fate::Leaves(15_000.0));
    }

    #[test]
    fn a_full_queue_drops_until_there_is_room() {
        let mut b = Bottleneck::new(plan(&[(0, 8_000_000)], 2_000));
        assert_eq!(b.arrive(0.0, 1_000), Fate::Leaves(1_000.0));
        assert_eq!(b.arrive(0.0, 1_000), Fate::Leaves(2_000.0));
        assert_eq!(b.arrive(0.0, 1_000), Fate::Dropped);
        assert_eq!(b.arrive(1_000.0, 1_000), Fate::Leaves(3_000.0));
    }

    #[test]
    fn the_way_back_may_be_longer_and_in_bursts() {
        let plain = Back::default();
        assert_eq!(plain.leaves_us(1_234.5, true), 1_234.5);
        let back = Back {
            burst_us: 10_000,
            far_us: 5_000,
        };
        assert_eq!(back.leaves_us(12_000.0, false), 20_000.0);
        assert_eq!(back.leaves_us(16_000.0, true), 30_000.0);
        assert_eq!(back.leaves_us(20_000.0, false), 20_000.0);
    }

    #[test]
    fn capacity_is_the_integral_of_the_rate() {
        let p = plan(&[(0, 8_000_000), (10_000, 800_000)], 1);
        assert_eq!(p.capacity_bits(0, 10_000), 80_000.0);
        assert_eq!(p.capacity_bits(5_000, 20_000), 48_000.0);
    }

    #[test]
    fn random_loss_is_seeded_and_as_rare_as_asked_for() {
        let mut p = plan(&[(0, 8_000_000_000)], u64::MAX);
        p.loss = 0.01;
        let lost = |p: &LinkPlan| {
            let mut b = Bottleneck::new(p.clone());
            let fates = (0..10_000).map(|i| b.arrive(f64::from(i) * 10.0, 1_000));
            fates.filter(|f| matches!(f, Fate::Lost(_))).count()
        };
        assert!((70..130).contains(&lost(&p)), "{}", lost(&p));
        assert_eq!(lost(&p), lost(&p));
    }
}
