// SPDX-License-Identifier: GPL-2.0-or-later
//! What becomes of flows during a replay: how late their packets are, and how often they move.
//!
//! Every path has as many flows that prefer it, and every other path as many of these as their second
//! choice, as a hash with equal weights does on average. Each sends a packet every 10 ms.

use mountain::measure::stats::quantile_counted;
use serde::{Deserialize, Serialize};

use super::chooser::Chooser;
use super::window::Window;
use crate::scenario::chance::MOST_US;

/// µs between two packets of a flow, and two decisions.
pub const STEP_US: u64 = 10_000;
/// Resolution of delays, µs.
const BIN_US: u32 = 250;
/// Delays whose share above them is reported, ms.
pub const LATE_MS: [u32; 3] = [100, 200, 400];

/// Delays of packets and moves of flows; those of several windows add up.
#[derive(Clone, Debug, Default)]
pub struct Score {
    /// By delay, the last for all from [`MOST_US`] on.
    bins: Vec<u64>,
    /// Packets by path.
    by_path: Vec<u64>,
    packets: u64,
    moves: u64,
    flow_us: u64,
    probes: u64,
    path_us: u64,
}

/// The figures of a score.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct ScoreFigures {
    pub p50_ms: f64,
    pub p95_ms: f64,
    pub p99_ms: f64,
    pub p999_ms: f64,
    /// Shares of packets later than [`LATE_MS`], lost ones included, in percent.
    pub above_percent: [f64; 3],
    pub moves_per_flow_minute: f64,
    pub probes_per_path_second: f64,
    /// Packets sent on each path, in percent.
    #[serde(default)]
    pub share_percent: Vec<f64>,
}

impl Score {
    pub fn add(&mut self, other: &Score) {
        let bins = (&mut self.bins, &other.bins);
        for (all, more) in [bins, (&mut self.by_path, &other.by_path)] {
            all.resize(all.len().max(more.len()), 0);
            all.iter_mut().zip(more).for_each(|(sum, n)| *sum += n);
        }
        self.packets += other.packets;
        self.moves += other.moves;
        self.flow_us += other.flow_us;
        self.probes += other.probes;
        self.path_us += other.path_us;
    }

    fn packet(&mut self, path: usize, delay_us: Option<u32>) {
        let us = delay_us.unwrap_or(MOST_US).min(MOST_US);
        self.bins[(us / BIN_US) as usize] += 1;
        self.by_path[path] += 1;
        self.packets += 1;
    }

    /// The `p` quantile of the packets' delays, in ms; low by [`BIN_US`] at most.
    fn quantile_ms(&self, p: f64) -> f64 {
        let counted = (0u32..).zip(&self.bins);
        let counted = counted.map(|(bin, n)| (f64::from(bin * BIN_US), *n));
        quantile_counted(self.packets, counted, p).unwrap_or(0.0) / 1e3
    }

    /// As the p-quantile of those packets alone that took less than a time, in ms.
    pub fn answered_ms(&self, p: f64, below_ms: u32) -> f64 {
        let below = (below_ms * 1000 / BIN_US) as usize;
        let mut answered = self.clone();
        answered.bins[below..].fill(0);
        answered.packets = answered.bins.iter().sum();
        answered.quantile_ms(p)
    }

    pub fn figures(&self) -> ScoreFigures {
        let packets = self.packets.max(1) as f64;
        let above = |ms: u32| {
            let from = (ms * 1000 / BIN_US) as usize;
            let late: u64 = self.bins[from..].iter().sum();
            100.0 * late as f64 / packets
        };
        let share = |n: &u64| 100.0 * *n as f64 / packets;
        ScoreFigures {
            p50_ms: self.quantile_ms(0.5),
            p95_ms: self.quantile_ms(0.95),
            p99_ms: self.quantile_ms(0.99),
            p999_ms: self.quantile_ms(0.999),
            above_percent: LATE_MS.map(above),
            moves_per_flow_minute: self.moves as f64 * 60e6 / self.flow_us.max(1) as f64,
            probes_per_path_second: self.probes as f64 * 1e6 / self.path_us.max(1) as f64,
            share_percent: self.by_path.iter().map(share).collect(),
        }
    }
}

/// The paths that each flow prefers, best first.
fn preferences(paths: usize) -> Vec<Vec<usize>> {
    let each = (0..paths).flat_map(|first| (1..paths.max(2)).map(move |step| (first, step)));
    each.map(|(first, step)| {
        let others = (0..paths - 1).map(|i| (first + 1 + (step - 1 + i) % (paths - 1)) % paths);
        std::iter::once(first).chain(others).collect()
    })
    .collect()
}

/// Plays a window to a chooser. The first `warm_up_us` are played, but not scored.
pub fn play(window: &Window, mut chooser: Chooser, warm_up_us: u64) -> Score {
    let paths = window.paths.len();
    let mut score = Score {
        bins: vec![0; (MOST_US / BIN_US + 1) as usize],
        by_path: vec![0; paths],
        ..Score::default()
    };
    let flows = preferences(paths);
    // Where each flow is; what a hash would choose at first.
    let mut at: Vec<usize> = flows.iter().map(|order| order[0]).collect();
    let mut probes_before = 0;
    for now_us in (0..window.length_us).step_by(STEP_US as usize) {
        let (allowed, probes) = chooser(now_us, window);
        score.probes = probes;
        let scored = now_us >= warm_up_us;
        if !scored {
            probes_before = probes;
        }
        let delays: Vec<Option<u32>> = window.paths.iter().map(|p| p.packet(now_us)).collect();
        for (order, at) in flows.iter().zip(&mut at) {
            let wanted = order.iter().find(|path| allowed & 1 << **path != 0);
            let wanted = *wanted.unwrap_or(&order[0]);
            if scored {
                score.moves += u64::from(*at != wanted);
                score.packet(wanted, delays[wanted]);
            }
            *at = wanted;
        }
    }
    let scored_us = window.length_us.saturating_sub(warm_up_us);
    score.flow_us = scored_us * flows.len() as u64;
    score.path_us = scored_us * paths as u64;
    score.probes -= probes_before;
    score
}

#[cfg(test)]
mod tests {
    use super::super::chooser::ChooserKind;
    use super::super::window::Input;
    use super::*;
    use crate::recording::{Recording, Stalls};

    /// Two paths of 20 and 30 ms; the first one is at 300 ms from 10 to 12 s.
    fn spike() -> Window {
        let mut text = "window,t_ms,path,rtt_ms\n".to_owned();
        for t in (0..20_000).step_by(10) {
            let a = if (10_000..12_000).contains(&t) {
                300
            } else {
                20
            };
            text += &format!("0,{t},a,{a}\n0,{t},b,30\n");
        }
        let recording = Recording::parse("spike", &text).unwrap();
        Input::recorded(recording, Stalls::Hold).windows.remove(0)
    }

    fn figures(name: &str) -> ScoreFigures {
        let kind = ChooserKind::parse(name).unwrap();
        play(&spike(), kind.chooser(2, 1), 5_000_000).figures()
    }

    #[test]
    fn what_nobody_can_beat_bounds_what_anybody_does() {
        let oracle = figures("oracle");
        assert_eq!((oracle.p50_ms, oracle.p99_ms), (20.0, 30.0));
        assert_eq!(oracle.above_percent, [0.0; 3]);
        // There and back, in 15 s.
        assert!(
            (oracle.moves_per_flow_minute - 8.0).abs() < 0.1,
            "{oracle:?}"
        );

        let hash = figures("hash");
        let late = 50.0 * 2.0 / 15.0;
        assert!((hash.above_percent[1] - late).abs() < 0.1, "{hash:?}");
        assert_eq!(hash.moves_per_flow_minute, 0.0);

        // Late by 100 ms, and by nothing more.
        let banded = figures("banded-100-30");
        assert!(
            (banded.above_percent[1] - 10.0 / 15.0).abs() < 0.1,
            "{banded:?}"
        );
        // 10 ms are not worth a move back.
        assert!(banded.moves_per_flow_minute < oracle.moves_per_flow_minute);
    }

    #[test]
    fn flows_of_a_path_that_is_left_spread_evenly_over_the_others() {
        let flows = preferences(4);
        assert_eq!(flows.len(), 12);
        for order in &flows {
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, [0, 1, 2, 3], "{order:?}");
        }
        let second_of_0: Vec<usize> = flows[..3].iter().map(|order| order[1]).collect();
        assert_eq!(second_of_0, [1, 2, 3]);
        assert_eq!(preferences(2), [[0, 1], [1, 0]]);
        let hash = figures("hash");
        assert_eq!(hash.share_percent, [50.0, 50.0]);
        assert_eq!(figures("path1").share_percent, [0.0, 100.0]);
    }

    #[test]
    fn the_policy_leaves_a_spike() {
        let mountain = figures("mountain-20");
        assert!(mountain.above_percent[1] < figures("hash").above_percent[1] / 2.0);
        assert!(mountain.moves_per_flow_minute > 0.0);
        // As many as it was told to, or more while it is in doubt.
        assert!(mountain.probes_per_path_second >= 19.9, "{mountain:?}");
        assert_eq!(
            figures("mountain-20"),
            mountain,
            "the same seed, the same choices"
        );
    }
}
