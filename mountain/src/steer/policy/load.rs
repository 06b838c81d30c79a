// SPDX-License-Identifier: GPL-2.0-or-later
//! Our own traffic on a path: whether it fills the path, and whether there is any.
//!
//! A queue that our own bulk flows make would follow them to the next path, so they stay with it; and what
//! they want is throughput, which a path that still carries its full rate gives them however late it is.
//! They leave a late path that no longer does: somebody else has taken our share, or it has become thin.

use super::rule::MEMORY_US;

/// Time in which the weight of a rate falls to 1/e, and for which one that filled the path counts, µs.
const RATE_US: f64 = 1e6;
/// Share of what a path can carry from which our traffic fills it.
pub(super) const FILLS: f64 = 0.7;
/// On a path of unknown capacity less than this fills nothing, bit/s.
const FLOOR_BPS: f64 = 2e6;

/// Our own rates on one path, in bit/s.
#[derive(Clone, Debug, Default)]
pub struct OurRates {
    pub(super) capacity_bps: Option<f64>,
    at_us: Option<u64>,
    pub rate_bps: f64,
    pub latency_bps: f64,
    peak_bps: f64,
    /// When our traffic last filled the path.
    filled_at_us: Option<u64>,
    /// When latency flows last sent, or started, and when anything did.
    latency_at_us: Option<u64>,
    any_at_us: Option<u64>,
}

impl OurRates {
    pub fn new(capacity_bps: Option<u64>) -> Self {
        OurRates {
            capacity_bps: capacity_bps.map(|c| c as f64),
            ..Default::default()
        }
    }

    /// Notes our rates since the last such event.
    pub fn egress(&mut self, at_us: u64, rate_bps: f64, latency_bps: f64) {
        let passed_us = self.at_us.map_or(0, |t| at_us.saturating_sub(t)) as f64;
        self.at_us = Some(at_us);
        let new = 1.0 - (-passed_us / RATE_US).exp();
        self.rate_bps += (rate_bps - self.rate_bps) * new;
        self.latency_bps += (latency_bps - self.latency_bps) * new;
        let faded = self.peak_bps * (-passed_us / MEMORY_US).exp2();
        self.peak_bps = faded.max(self.rate_bps);
        let known = self.capacity_bps.is_some() || rate_bps >= FLOOR_BPS;
        if known && rate_bps >= FILLS * self.reference_bps() {
            self.filled_at_us = Some(at_us);
        }
        if rate_bps > 0.0 {
            self.any_at_us = Some(at_us);
        }
        if latency_bps > 0.0 {
            self.latency_at_us = Some(at_us);
        }
    }

    /// Notes flows that have started.
    pub fn started(&mut self, at_us: u64) {
        self.latency_at_us = Some(at_us);
        self.any_at_us = Some(at_us);
    }

    /// What the path can carry, as far as known.
    pub(crate) fn reference_bps(&self) -> f64 {
        self.capacity_bps.unwrap_or(self.peak_bps)
    }

    /// Whether our traffic has filled the path within the last second, for however short: flows that have come
    /// from elsewhere make a queue before an average shows them, and after losses of many they pause together.
    pub fn fills(&self, now_us: u64) -> bool {
        self.filled_at_us
            .is_some_and(|t| now_us.saturating_sub(t) as f64 <= RATE_US)
    }

    /// Whether it has filled the path within the last second, and is mostly that of latency flows.
    pub(crate) fn is_crowded(&self, now_us: u64) -> bool {
        self.fills(now_us) && self.latency_bps + self.latency_bps > self.rate_bps
    }

    /// Whether traffic is counted at all.
    pub(crate) fn is_counted(&self) -> bool {
        self.at_us.is_some() || self.any_at_us.is_some()
    }

    /// Whether latency flows have sent or started since `from_us`.
    pub(crate) fn has_latency(&self, from_us: u64) -> bool {
        self.latency_at_us.is_some_and(|t| t >= from_us)
    }

    /// Whether anything has.
    pub(crate) fn has_any(&self, from_us: u64) -> bool {
        self.any_at_us.is_some_and(|t| t >= from_us)
    }
}
