// SPDX-License-Identifier: GPL-2.0-or-later
//! What a path costs, and which costs count as equal.

use serde::{Deserialize, Serialize};

/// What the user wants of the network; presets of [`Weights`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Objective {
    /// Steadiness: a path costs what its slowest 5% of packets take.
    #[default]
    Jitter,
    /// Low delay of the ordinary packet; spread counts a quarter.
    Latency,
    /// Few losses; delay counts as it does for `latency`.
    Throughput,
    /// Cheap paths: power cost counts tenfold.
    Power,
}

/// Weights of the terms of [`cost_us`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Weights {
    /// Of p95 − p50; 0..=1. Above 1 a *higher* median would make a path cheaper.
    pub jitter: f64,
    /// Microseconds that total loss would cost; 1% loss costs a hundredth of it.
    pub loss_us: f64,
    /// Of the path's configured power cost.
    pub power: f64,
}

impl Objective {
    pub fn weights(self) -> Weights {
        let (jitter, loss_us, power) = match self {
            Objective::Jitter => (1.0, 500_000.0, 1.0),
            Objective::Latency => (0.25, 500_000.0, 1.0),
            Objective::Throughput => (0.25, 2_000_000.0, 1.0),
            Objective::Power => (0.5, 500_000.0, 10.0),
        };
        Weights {
            jitter,
            loss_us,
            power,
        }
    }
}

/// Cost of a path in µs: `p50 + jitter·(p95 − p50) + loss_us·loss + power·power_cost`.
///
/// With the weights in range it never falls when a quantile, the loss or the power cost rises.
/// `p95_us` below `p50_us` counts as equal to it.
pub fn cost_us(w: &Weights, p50_us: f64, p95_us: f64, loss: f64, power_cost_us: f64) -> f64 {
    p50_us + w.jitter * (p95_us - p50_us).max(0.0) + w.loss_us * loss + w.power * power_cost_us
}

/// Differences that do not count: the larger of a fixed time and a share of the best.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Band {
    pub floor_us: f64,
    pub percent: f64,
}

impl Band {
    /// Width of the band above `best_us`.
    pub fn width_us(&self, best_us: f64) -> f64 {
        self.floor_us.max(best_us * self.percent / 100.0)
    }

    /// Least advantage for which it is worth moving between paths that are both bad, judged by
    /// a single probe of each: twice the band.
    pub fn clear_us(&self, best_us: f64) -> f64 {
        2.0 * self.width_us(best_us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn jitter_objective_costs_p95() {
        let w = Objective::Jitter.weights();
        assert_eq!(cost_us(&w, 20_000.0, 32_000.0, 0.0, 0.0), 32_000.0);
        assert_eq!(cost_us(&w, 20_000.0, 32_000.0, 0.01, 7.0), 37_007.0);
        let w = Objective::Latency.weights();
        assert_eq!(cost_us(&w, 20_000.0, 32_000.0, 0.0, 0.0), 23_000.0);
    }

    #[test]
    fn band_is_the_larger_of_the_two() {
        let b = Band {
            floor_us: 2000.0,
            percent: 10.0,
        };
        assert_eq!(b.width_us(5_000.0), 2_000.0);
        assert_eq!(b.width_us(50_000.0), 5_000.0);
    }

    proptest! {
        #[test]
        fn cost_is_monotone_in_each_input(
            objective in prop::sample::select(vec![
                Objective::Jitter, Objective::Latency, Objective::Throughput, Objective::Power]),
            v in prop::array::uniform4(0.0f64..1e6),
            more in prop::array::uniform4(0.0f64..1e6),
        ) {
            let w = objective.weights();
            prop_assert!((0.0..=1.0).contains(&w.jitter));
            let f = |x: [f64; 4]| cost_us(&w, x[0], x[1], x[2] / 1e6, x[3]);
            for i in 0..4 {
                let mut higher = v;
                higher[i] += more[i];
                // Sums of this size carry rounding errors below a nanosecond.
                prop_assert!(f(higher) >= f(v) - 1e-3, "input {} of {:?} -> {:?}", i, v, higher);
            }
        }
    }
}
