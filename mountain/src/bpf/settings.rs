// SPDX-License-Identifier: GPL-2.0-or-later
//! Settings of the steering program: the host's, and the constants of the classes and of moving.

/// Weight of the newest 10 ms in the two load averages, of 1024: half, as in the rule that was first
/// published. Only the `argmax-load` baseline keeps them (docs/steering.md, "The two averages").
const K_FACTOR: u32 = 512;
/// Added to every flowlet gap, µs: the extremes that probes have seen of two paths may be short of those that
/// packets meet by about as much.
const FLOWLET_MARGIN_US: u32 = 1_000;
/// A flow without such a gap leaves a path that it may not use after so long, ms: two of the windows in
/// which a class is settled, so that a sender that is about to pause does.
const FORCE_AFTER_MS: u64 = 2_000;
/// Window over which a flow's class is settled, ms: long against the bursts of a video call's frames.
const CLASS_WINDOW_MS: u64 = 1_000;
/// A flow below this rate over a window is a latency flow, bit/s: a voice call, a game, one small video.
const LATENCY_BELOW_BPS: u64 = 1_500_000;
/// A flow above this rate over a window is a bulk flow, bit/s: twice the former, so that no flow alternates.
const BULK_ABOVE_BPS: u64 = 3_000_000;
/// A TCP flow of full-sized packets above this rate over a window is a bulk flow, bit/s: one of twenty
/// downloads that share 10 Mbit/s has 500,000 (docs/steering.md, "Classes").
const ELASTIC_ABOVE_BPS: u64 = 200_000;

/// Settings of the data plane that hold for all groups.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Of the flow table. Nobody outside may guess it.
    pub hash_seed: u32,
    /// K of the two averages, 0..=1024.
    pub k_factor: u32,
    /// Added to every flowlet gap, in µs.
    pub margin_us: u32,
    /// A bulk flow that offers no flowlet is moved after this long, in ms.
    pub force_after_ms: u64,
    /// Window of the classification, in ms.
    pub window_ms: u64,
    /// A flow below this many bit/s over a window is a latency flow.
    pub latency_below_bps: u64,
    /// A flow above this many bit/s over a window is a bulk flow.
    pub bulk_above_bps: u64,
    /// A TCP flow of full-sized packets above this many bit/s over a window is a bulk flow.
    pub elastic_above_bps: u64,
    /// Flows that the table is for.
    pub flow_entries: u32,
    /// Move only what this host's routing sent to the device (bpf/steer/origin.h). Always true, except for
    /// BPF_PROG_RUN, whose packets nobody routed.
    pub only_routed: bool,
}

impl Settings {
    /// Those of every host, with its own seed and size of the flow table.
    pub fn new(hash_seed: u32, flow_entries: u32) -> Self {
        Settings {
            hash_seed,
            k_factor: K_FACTOR,
            margin_us: FLOWLET_MARGIN_US,
            force_after_ms: FORCE_AFTER_MS,
            window_ms: CLASS_WINDOW_MS,
            latency_below_bps: LATENCY_BELOW_BPS,
            bulk_above_bps: BULK_ABOVE_BPS,
            elastic_above_bps: ELASTIC_ABOVE_BPS,
            flow_entries,
            only_routed: true,
        }
    }
}
