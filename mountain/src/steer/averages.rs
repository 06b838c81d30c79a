// SPDX-License-Identifier: GPL-2.0-or-later
//! The two averages of a path's load, in exact integer arithmetic.
//!
//! One definition for the BPF program, the kernel patch and this daemon; `mountain/tests/vectors/averages.json`
//! holds inputs and results that all three must reproduce bit for bit.
//!
//! Time is cut into intervals of [`INTERVAL_NS`]. Bytes sent are summed per interval; when an
//! interval has passed,
//!
//! ```text
//! rate           = bytes · (1 s / 10 ms)                          bytes per second
//! ema_load       = (K·rate        + (1024 − K)·ema_load)       / 1024
//! ema_time_delta = (K·|rate − ema_load| + (1024 − K)·ema_time_delta) / 1024
//! ```
//!
//! in unsigned 64-bit integers, each division rounding down, the second line using the *updated*
//! first one. `ema_load` is the smoothed rate and `ema_time_delta` the smoothed distance from it, both
//! in bytes per second. An interval without packets has rate 0. The intervals that passed since
//! the last update are caught up one by one up to [`MAX_CATCH_UP`]; after a longer silence both
//! averages are 0, whatever K is.
//!
//! The rounding down means that an average comes to rest below a constant rate by up to
//! `1023 / K` bytes per second: nothing at the rates of interest.

/// Length of one interval, in nanoseconds.
pub const INTERVAL_NS: u64 = 10_000_000;
/// Intervals per second: what turns bytes per interval into bytes per second.
pub const INTERVALS_PER_S: u64 = 1_000_000_000 / INTERVAL_NS;
/// Most intervals that are caught up one by one; after more, both averages are 0.
pub const MAX_CATCH_UP: u64 = 64;
/// K that replaces the averages by the last interval's values; K = 0 never changes them.
pub const K_ONE: u64 = 1024;
/// Default K: one half, so that the weight of an interval halves every 10 ms.
pub const K_DEFAULT: u64 = 512;

/// Smoothed rate and smoothed deviation of one path, in bytes per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Averages {
    /// Exponential moving average of the rate.
    pub ema_load: u64,
    /// Exponential moving average of the distance between the rate and `ema_load`.
    pub ema_time_delta: u64,
}

impl Averages {
    /// Takes in one finished interval of `rate` bytes per second. A `k` above [`K_ONE`] counts as
    /// [`K_ONE`]. Exact while `rate` and both averages are below 2^53.
    pub fn interval(&mut self, k: u64, rate: u64) {
        let k = k.min(K_ONE);
        self.ema_load = (k * rate + (K_ONE - k) * self.ema_load) / K_ONE;
        let delta = rate.abs_diff(self.ema_load);
        self.ema_time_delta = (k * delta + (K_ONE - k) * self.ema_time_delta) / K_ONE;
    }

    /// Takes in `elapsed` finished intervals, the first of which carried `bytes` and the others
    /// none. Nothing happens for `elapsed` = 0 (the interval is still open: keep summing).
    pub fn advance(&mut self, k: u64, bytes: u64, elapsed: u64) {
        if elapsed > MAX_CATCH_UP {
            *self = Averages::default();
            return;
        }
        for i in 0..elapsed {
            self.interval(k, if i == 0 { bytes * INTERVALS_PER_S } else { 0 });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Vectors {
        about: String,
        interval_ns: u64,
        max_catch_up: u64,
        cases: Vec<Case>,
    }

    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Case {
        name: String,
        k: u64,
        /// [bytes, elapsed, ema_load, ema_time_delta] after each step, starting from 0, 0.
        steps: Vec<[u64; 4]>,
    }

    fn vectors() -> Vectors {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors/averages.json");
        serde_json::from_str(&std::fs::read_to_string(path).expect(path)).expect(path)
    }

    #[test]
    fn reproduces_the_shared_vectors() {
        let v = vectors();
        assert!(v.about.contains("ema_load"));
        assert_eq!((v.interval_ns, v.max_catch_up), (INTERVAL_NS, MAX_CATCH_UP));
        for k in [0, 1, 512, 1023, 1024] {
            assert!(
                v.cases.iter().filter(|c| c.k == k).count() >= 3,
                "too few cases for K = {k}"
            );
        }
        for elapsed in [0, 1, 2, 63, 64, 65] {
            assert!(
                v.cases
                    .iter()
                    .flat_map(|c| &c.steps)
                    .any(|s| s[1] == elapsed),
                "no step with a gap of {elapsed}"
            );
        }
        for case in &v.cases {
            let mut a = Averages::default();
            for (i, &[bytes, elapsed, load, delta]) in case.steps.iter().enumerate() {
                a.advance(case.k, bytes, elapsed);
                let want = Averages {
                    ema_load: load,
                    ema_time_delta: delta,
                };
                assert_eq!(a, want, "{} (K = {}), step {i}", case.name, case.k);
            }
        }
    }

    /// The file that `patch` adds as `path`.
    fn added_file(patch: &str, path: &str) -> String {
        let header = format!("\n+++ b/{path}\n");
        let start = patch.find(&header).expect("the patch adds the file") + header.len();
        patch[start..]
            .lines()
            .skip(1) // @@
            .take_while(|line| line.starts_with('+'))
            .map(|line| format!("{}\n", &line[1..]))
            .collect()
    }

    #[test]
    fn bpf_and_the_kernel_patch_share_one_text() {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
        let patch =
            format!("{root}/kernel/patches/6.12/0001-net-dst-per-path-transmit-metrics.patch");
        let patch = std::fs::read_to_string(&patch).expect(&patch);
        let bpf = std::fs::read_to_string(format!("{root}/bpf/steer/path_average.h")).unwrap();
        assert!(bpf.contains("ema_time_delta = path_avg_ema("));
        // The kernel's copy has the kernel's licence.
        let bpf = bpf.replacen(" OR BSD-2-Clause", "", 1);
        assert_eq!(added_file(&patch, "include/net/path_average.h"), bpf);
    }

    #[test]
    fn worked_by_hand() {
        // 1000 bytes in 10 ms are 100,000 B/s. K = 512: load 50,000, distance 50,000, half 25,000.
        let mut a = Averages::default();
        a.advance(512, 1000, 1);
        assert_eq!(
            a,
            Averages {
                ema_load: 50_000,
                ema_time_delta: 25_000
            }
        );
        // One empty interval: load 25,000, distance 25,000, (25,000 + 25,000) / 2.
        a.advance(512, 0, 1);
        assert_eq!(
            a,
            Averages {
                ema_load: 25_000,
                ema_time_delta: 25_000
            }
        );
    }

    #[test]
    fn a_gap_equals_its_empty_intervals_until_the_limit() {
        let start = Averages {
            ema_load: 3_000_000,
            ema_time_delta: 1_000_000,
        };
        let (mut at_once, mut one_by_one) = (start, start);
        at_once.advance(100, 12_345, MAX_CATCH_UP);
        one_by_one.advance(100, 12_345, 1);
        for _ in 1..MAX_CATCH_UP {
            one_by_one.advance(100, 0, 1);
        }
        assert_eq!(at_once, one_by_one);
        assert!(
            at_once.ema_load > 0,
            "the limit test below would prove nothing"
        );
        let mut past = start;
        past.advance(100, 12_345, MAX_CATCH_UP + 1);
        assert_eq!(past, Averages::default());
    }

    #[test]
    fn an_open_interval_changes_nothing_and_k_is_capped() {
        let mut a = Averages {
            ema_load: 7,
            ema_time_delta: 3,
        };
        a.advance(512, 999, 0);
        assert_eq!(
            a,
            Averages {
                ema_load: 7,
                ema_time_delta: 3
            }
        );
        a.interval(5000, 42);
        assert_eq!(
            a,
            Averages {
                ema_load: 42,
                ema_time_delta: 0
            }
        );
    }
}
