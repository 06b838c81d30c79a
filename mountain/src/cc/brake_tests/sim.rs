// SPDX-License-Identifier: GPL-2.0-or-later
//! A packet-level simulation of one flow: a sender that models the path as BBRv1 does in PROBE_BW,
//! rate samples as tcp_rate.c takes them, and a drop-free link whose rate changes.

use std::collections::VecDeque;

use super::{mtn_ack, Brake, OFF};

const MSS: u32 = 1448;
const BITS: f64 = MSS as f64 * 8.0;

#[derive(Clone)]
pub struct SimLink {
    /// From (s) and rate (bit/s).
    pub rates: Vec<(f64, f64)>,
    /// s, without a queue.
    pub rtt: f64,
    /// Bytes.
    pub queue: f64,
}

impl SimLink {
    fn rate(&self, t: f64) -> f64 {
        let past = self.rates.iter().rev().find(|r| r.0 <= t);
        past.unwrap_or(&self.rates[0]).1
    }
}

struct Packet {
    sent: f64,
    acked: f64,
    /// Of the flow when it was sent: packets delivered, when, and the window's first send time.
    delivered: u32,
    delivered_at: f64,
    first_sent: f64,
}

/// What the simulation has seen.
#[derive(Default)]
pub struct SimTrace {
    /// ACK time, queueing delay and engagements so far.
    acks: Vec<(f64, f64, u32)>,
    /// When there was a limit, on the rate or only on the window.
    limited: Vec<f64>,
}

impl SimTrace {
    pub(crate) fn engagements_before(&self, t: f64) -> u32 {
        self.acks
            .iter()
            .filter(|a| a.0 < t)
            .map(|a| a.2)
            .max()
            .unwrap_or(0)
    }

    /// When the brake first limited anything, from `t` on.
    pub(crate) fn first_limited(&self, t: f64) -> f64 {
        let mut after = self.limited.iter().filter(|at| **at >= t);
        after.next().copied().unwrap_or(f64::INFINITY)
    }

    /// Quantile of the queueing delay, s.
    pub fn queue(&self, from: f64, until: f64, q: f64) -> f64 {
        let within = self.acks.iter().filter(|a| (from..until).contains(&a.0));
        let mut delays: Vec<f64> = within.map(|a| a.1).collect();
        delays.sort_by(f64::total_cmp);
        delays[((delays.len() - 1) as f64 * q) as usize]
    }

    pub fn goodput(&self, from: f64, until: f64) -> f64 {
        let n = self
            .acks
            .iter()
            .filter(|a| (from..until).contains(&a.0))
            .count();
        n as f64 * BITS / (until - from)
    }
}

pub(crate) struct BrakeSim {
    link: SimLink,
    brake: Option<Brake>,
    inflight: VecDeque<Packet>,
    delivered: u32,
    delivered_at: f64,
    first_sent: f64,
    /// Delivery rates of the last ten round trips, for the maximum: (round, bit/s).
    rates: VecDeque<(u32, f64)>,
    round: u32,
    round_end: u32,
    phase_start: f64,
    phase: usize,
    last_ack: mtn_ack,
}

impl BrakeSim {
    pub fn new(link: SimLink, brake: Option<Brake>) -> Self {
        let first = link.rates[0].1;
        BrakeSim {
            link,
            brake,
            inflight: VecDeque::new(),
            delivered: 0,
            delivered_at: 0.0,
            first_sent: 0.0,
            rates: VecDeque::from([(0, first)]),
            round: 0,
            round_end: 0,
            phase_start: 0.0,
            phase: 2,
            last_ack: mtn_ack::default(),
        }
    }

    fn max_bps(&self) -> f64 {
        self.rates.iter().map(|r| r.1).fold(0.0, f64::max)
    }

    /// BBR's window: what it allows itself besides is for TSO, in the kernel.
    fn own_cwnd(&self) -> u32 {
        (2.0 * self.max_bps() * self.link.rtt / BITS) as u32 + 3
    }

    pub fn run(mut self, seconds: f64) -> SimTrace {
        let mut seen = SimTrace::default();
        let (mut t, mut free_at) = (0.0, 0.0f64);
        let mut limits = (self.max_bps(), u32::MAX);
        while t < seconds {
            // The next packet goes when pacing and window allow; until then ACKs come in.
            let cwnd = self.own_cwnd().min(limits.1).max(4);
            while self.inflight.front().is_some_and(|p| p.acked <= t)
                || self.inflight.len() as u32 >= cwnd
            {
                let packet = self.inflight.pop_front().expect("looked at above");
                t = t.max(packet.acked);
                limits = self.acked(&packet, &mut seen);
            }
            let begins = free_at.max(t);
            if (begins - t) * self.link.rate(t) / 8.0 < self.link.queue {
                free_at = begins + BITS / self.link.rate(begins);
                if self.inflight.is_empty() {
                    if let Some(brake) = &mut self.brake {
                        // There is always something to send.
                        let idle_us = ((t - self.delivered_at) * 1e6) as u64;
                        brake.tx_start(&self.last_ack, idle_us, false);
                    }
                    (self.first_sent, self.delivered_at) = (t, t);
                }
                self.inflight.push_back(Packet {
                    sent: t,
                    acked: free_at + self.link.rtt,
                    delivered: self.delivered,
                    delivered_at: self.delivered_at,
                    first_sent: self.first_sent,
                });
            }
            t += BITS / limits.0;
        }
        seen
    }

    /// Takes an ACK in; pacing rate (bit/s) and largest window from now on.
    fn acked(&mut self, p: &Packet, seen: &mut SimTrace) -> (f64, u32) {
        let now = p.acked;
        self.delivered += 1;
        self.delivered_at = now;
        self.first_sent = p.sent;
        let (snd, rcv) = (p.sent - p.first_sent, now - p.delivered_at);
        let interval = snd.max(rcv);
        let count = self.delivered - p.delivered;
        if self.delivered > self.round_end {
            self.round += 1;
            self.round_end = self.delivered + self.inflight.len() as u32;
        }
        if interval > 0.0 {
            self.rates
                .push_back((self.round, f64::from(count) * BITS / interval));
        }
        while self.rates.front().is_some_and(|r| r.0 + 10 < self.round) {
            self.rates.pop_front();
        }
        if now - self.phase_start > self.link.rtt {
            self.phase = (self.phase + 1) % 8;
            self.phase_start = now;
        }
        let gain = [1.25, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0][self.phase];
        let max = self.max_bps();
        let us = |s: f64| (s * 1e6) as u32;
        let a = mtn_ack {
            now_us: 1 + (now * 1e6) as u64,
            max_bps: max as u64,
            delivered: count,
            interval_us: us(interval),
            snd_us: us(snd),
            rcv_us: us(rcv),
            rtt_us: us(now - p.sent),
            min_rtt_us: us(self.link.rtt),
            total: self.delivered,
            inflight: self.inflight.len() as u32,
            mss: MSS,
            ..Default::default()
        };
        self.last_ack = a;
        let rate = (max * gain * 0.99 / 8.0) as u64;
        let own = self.own_cwnd();
        let (rate, cwnd, brakes) = match &mut self.brake {
            Some(brake) => {
                brake.ack(&a);
                if brake.b.state != OFF {
                    seen.limited.push(now);
                }
                (
                    brake.pacing(&a, rate),
                    brake.cwnd_of(&a, own),
                    brake.b.engagements,
                )
            }
            None => (rate, u32::MAX, 0),
        };
        seen.acks.push((now, now - p.sent - self.link.rtt, brakes));
        (rate as f64 * 8.0, cwnd)
    }
}
