// SPDX-License-Identifier: GPL-2.0-or-later
//! Figures computed from packets: pure functions over plain data.
//!
//! A percentile is over *answered* packets, so a policy could look better by losing its slow ones;
//! that is why loss and the share of late *or lost* packets always stand beside it.

use std::collections::BTreeMap;

use mountain::measure::stats::P999_FROM;

use super::game::Packet;
use super::stats::percentile;

/// A packet is late when its RTT exceeds the best path's median by more than this.
const LATE_OVER_US: u32 = 50_000;
/// A round trip that any interactive program notices; recordings and replays are judged by it, too.
const VERY_LATE_US: u32 = 200_000;
/// A path counts as left when for this long no packet went there.
pub const CLEAR_NS: u64 = 1_000_000_000;
/// One figure of one run.
#[derive(Debug, Clone, PartialEq)]
pub struct Figure {
    /// Unit: `us`, `ratio`, `count`, `bps`.
    pub unit: &'static str,
    /// The figure.
    pub value: f64,
    /// Number of samples (packets, onsets) behind it.
    pub n: u64,
}

/// Figures by name.
pub type Figures = BTreeMap<String, Figure>;

/// Puts a figure among others.
pub fn put(figures: &mut Figures, name: &str, unit: &'static str, value: f64, n: u64) {
    figures.insert(name.to_owned(), Figure { unit, value, n });
}

/// All per-packet figures of one segment.
///
/// `best_median_us` is the median RTT of the best path (of the oracle, or as emulated); `paths` the
/// number of paths. Names: `rtt_{p50,p95,p99,p999,max}_us`, `pdv_us` (p99 − p50, RFC 5481 with the
/// median as reference), `{forward,backward}_p99_us`, `loss`, `late`, `late_or_lost`, `reordered`,
/// `share_path<i>` (of the packets that arrived), `packets`. Percentiles are absent without any
/// answered packet, shares without any arrival.
pub fn game_figures(packets: &[Packet], best_median_us: f64, paths: usize) -> Figures {
    let mut figures = Figures::new();
    let mut put = |name: &str, unit, value: f64, n: usize| {
        put(&mut figures, name, unit, value, n as u64);
    };
    let sent = packets.len();
    put("packets", "count", sent as f64, sent);
    if sent == 0 {
        return figures;
    }
    let mut rtts: Vec<u32> = packets.iter().filter_map(|p| p.rtt_us).collect();
    let answered = rtts.len();
    if let (Some(p50), Some(p99)) = (percentile(&mut rtts, 0.5), percentile(&mut rtts, 0.99)) {
        put("rtt_p50_us", "us", p50, answered);
        put("rtt_p99_us", "us", p99, answered);
        put("pdv_us", "us", p99 - p50, answered);
        for (name, q) in [("rtt_p95_us", 0.95), ("rtt_max_us", 1.0)] {
            let value = percentile(&mut rtts, q).unwrap_or(f64::NAN);
            put(name, "us", value, answered);
        }
        if answered >= P999_FROM {
            let p999 = percentile(&mut rtts, 0.999).unwrap_or(f64::NAN);
            put("rtt_p999_us", "us", p999, answered);
        }
    }
    type Delay = fn(&Packet) -> Option<u32>;
    let one_way: [(&str, Delay); 2] = [
        ("forward_p99_us", |p| p.forward_us),
        ("backward_p99_us", |p| p.backward_us),
    ];
    for (name, delay) in one_way {
        let mut delays: Vec<u32> = packets.iter().filter_map(delay).collect();
        if let Some(p99) = percentile(&mut delays, 0.99) {
            put(name, "us", p99, delays.len());
        }
    }
    let late_over = best_median_us + f64::from(LATE_OVER_US);
    let late = rtts.iter().filter(|r| f64::from(**r) > late_over).count();
    let lost = sent - answered;
    let slow = rtts.iter().filter(|r| **r > VERY_LATE_US).count();
    for (name, packets) in [
        ("loss", lost),
        ("late", late),
        ("late_or_lost", late + lost),
        ("above_200_ms", slow + lost),
    ] {
        put(name, "ratio", packets as f64 / sent as f64, sent);
    }
    let reordered = packets.iter().filter(|p| p.reordered).count();
    put("reordered", "count", reordered as f64, sent);
    let (shares, arrived) = shares(packets.iter().map(|p| p.path), paths);
    for (path, share) in shares.into_iter().enumerate().filter(|_| arrived > 0) {
        put(&format!("share_path{path}"), "ratio", share, arrived);
    }
    figures
}

/// By path its share of what arrived, and how much that is; `None`: it arrived nowhere.
pub fn shares(on: impl Iterator<Item = Option<u8>>, paths: usize) -> (Vec<f64>, usize) {
    let arrived: Vec<u8> = on.flatten().collect();
    let share = |path: usize| {
        let here = arrived.iter().filter(|on| usize::from(**on) == path);
        here.count() as f64 / arrived.len() as f64
    };
    ((0..paths).map(share).collect(), arrived.len())
}

/// A path turning bad.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Onset {
    /// When it turned bad, `CLOCK_MONOTONIC`.
    pub at_ns: u64,
    /// When it became good again (or the segment ended).
    pub until_ns: u64,
    /// Index of the path.
    pub path: u8,
    /// The path swallows packets: one that arrived nowhere after the onset was sent on it.
    pub blackhole: bool,
}

/// What a policy did about an [`Onset`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leave {
    /// No packet was on the path in the second before: nothing to leave, no merit either.
    NotThere,
    /// All packets of the following [`CLEAR_NS`] were off the path, this long after the onset.
    Left(u64),
    /// Packets still went there when the path became good again, this long after the onset; or
    /// too little of the bad time was left to tell.
    Stayed(u64),
}

/// How long after `onset` the packets had left its path. `packets` in any order.
pub fn time_to_leave(packets: &[Packet], onset: Onset) -> Leave {
    let here = |p: &&Packet| p.path == Some(onset.path);
    let before = onset.at_ns.saturating_sub(CLEAR_NS)..onset.at_ns;
    let mut all_here = packets.iter().filter(here);
    if !all_here.any(|p| before.contains(&p.sent_ns)) {
        return Leave::NotThere;
    }
    let bad = onset.at_ns..onset.until_ns;
    let swallowed = |p: &Packet| onset.blackhole && p.path.is_none() && p.rtt_us.is_none();
    let during = packets.iter().filter(|p| bad.contains(&p.sent_ns));
    let on_path = during.filter(|p| here(p) || swallowed(p));
    let mut on_path: Vec<u64> = on_path.map(|p| p.sent_ns).collect();
    on_path.sort_unstable();
    let mut left_ns = onset.at_ns;
    for sent_ns in on_path {
        if sent_ns >= left_ns + CLEAR_NS {
            break;
        }
        left_ns = sent_ns + 1;
    }
    if left_ns + CLEAR_NS <= onset.until_ns {
        Leave::Left(left_ns - onset.at_ns)
    } else {
        Leave::Stayed(onset.until_ns - onset.at_ns)
    }
}

/// `leave_p50_us`, `leave_p95_us`, `leave_max_us` and `stayed` over the onsets of all segments.
///
/// An onset whose path was never left counts with the whole bad time (it is at least that); one at
/// which the policy was elsewhere already does not count.
pub fn leave_figures(leaves: &[Leave]) -> Figures {
    let time_us = |leave: &Leave| match leave {
        Leave::NotThere => None,
        Leave::Left(ns) | Leave::Stayed(ns) => Some((ns / 1_000) as u32),
    };
    let mut times: Vec<u32> = leaves.iter().filter_map(time_us).collect();
    let n = times.len() as u64;
    let has_stayed = |l: &&Leave| matches!(l, Leave::Stayed(_));
    let stayed = leaves.iter().filter(has_stayed).count();
    let mut figures = Figures::new();
    for (name, q) in [
        ("leave_p50_us", 0.5),
        ("leave_p95_us", 0.95),
        ("leave_max_us", 1.0),
    ] {
        if let Some(value) = percentile(&mut times, q) {
            put(&mut figures, name, "us", value, n);
        }
    }
    put(&mut figures, "stayed", "count", stayed as f64, n);
    figures
}

/// How often flows changed their path: over all flows, from one arrived packet to the next sent.
pub fn flow_moves(packets: &[Packet]) -> u64 {
    let mut arrived: Vec<&Packet> = packets.iter().filter(|p| p.path.is_some()).collect();
    arrived.sort_unstable_by_key(|p| (p.flow, p.seq));
    let has_moved = |w: &&[&Packet]| w[0].flow == w[1].flow && w[0].path != w[1].path;
    arrived.windows(2).filter(has_moved).count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn packet(seq: u32, sent_ms: u64, rtt_us: Option<u32>, path: Option<u8>) -> Packet {
        Packet {
            seq,
            sent_ns: sent_ms * MS,
            rtt_us,
            path,
            ..Packet::default()
        }
    }

    fn value(figures: &Figures, name: &str) -> f64 {
        figures
            .get(name)
            .unwrap_or_else(|| panic!("no {name} in {figures:?}"))
            .value
    }

    #[test]
    fn figures_of_known_packets() {
        let mut packets: Vec<Packet> = (0..100)
            .map(|i| packet(i, u64::from(i), Some(20_000 + i), Some(0)))
            .collect();
        packets[10].rtt_us = Some(70_001); // 50 ms above the best path's median is not late yet
        packets[11].rtt_us = Some(70_000);
        packets[12] = Packet {
            rtt_us: None,
            path: None,
            ..packets[12]
        };
        packets[13] = Packet {
            rtt_us: None,
            path: Some(1),
            reordered: true,
            ..packets[13]
        };
        let figures = game_figures(&packets, 20_000.0, 2);
        assert_eq!(value(&figures, "packets"), 100.0);
        assert_eq!(value(&figures, "rtt_max_us"), 70_001.0);
        assert_eq!(value(&figures, "late"), 0.01);
        assert_eq!(value(&figures, "loss"), 0.02);
        assert_eq!(value(&figures, "late_or_lost"), 0.03);
        assert_eq!(value(&figures, "reordered"), 1.0);
        assert_eq!(value(&figures, "share_path0"), 98.0 / 99.0);
        assert_eq!(value(&figures, "share_path1"), 1.0 / 99.0);
        // Between 70,000 and 70,001 of 98 values, at place 96.03.
        let p99 = &figures["rtt_p99_us"];
        assert_eq!((p99.unit, p99.n), ("us", 98));
        assert!((p99.value - 70_000.03).abs() < 1e-6, "{p99:?}");
        let pdv = value(&figures, "rtt_p99_us") - value(&figures, "rtt_p50_us");
        assert_eq!(value(&figures, "pdv_us"), pdv);
        assert!(
            !figures.contains_key("rtt_p999_us"),
            "too few packets for p99.9"
        );
    }

    #[test]
    fn nothing_answered_gives_loss_and_no_percentile() {
        let figures = game_figures(&[packet(0, 0, None, None)], 20_000.0, 2);
        assert_eq!(value(&figures, "loss"), 1.0);
        assert!(!figures.contains_key("rtt_p99_us"), "{figures:?}");
        assert!(!figures.contains_key("share_path0"), "{figures:?}");
        assert_eq!(game_figures(&[], 0.0, 2).len(), 1, "only packets = 0");
    }

    #[test]
    fn p999_from_20_000_packets() {
        let packets: Vec<Packet> = (0..20_000)
            .map(|i| packet(i, u64::from(i), Some(i + 1), Some(0)))
            .collect();
        let p999 = value(&game_figures(&packets, 0.0, 1), "rtt_p999_us");
        assert!((p999 - 19_980.001).abs() < 1e-6, "{p999}");
        assert!(!game_figures(&packets[1..], 0.0, 1).contains_key("rtt_p999_us"));
    }

    /// What they did about path 1, which is bad from 10 s to 14 s.
    fn leave(packets: &[Packet], blackhole: bool) -> Leave {
        let onset = Onset {
            at_ns: 10_000 * MS,
            until_ns: 14_000 * MS,
            path: 1,
            blackhole,
        };
        time_to_leave(packets, onset)
    }

    /// A packet every 10 ms from 9 s to 15 s, on path 1 until `move_ms`, later on path 0.
    fn moving(move_ms: u64) -> Vec<Packet> {
        let one = |i: u32| {
            let ms = u64::from(i) * 10;
            packet(i, ms, Some(1), Some(u8::from(ms < move_ms)))
        };
        (900..1500).map(one).collect()
    }

    #[test]
    fn time_until_the_last_packet_on_the_bad_path() {
        // The last packet there is sent at 10.19 s.
        assert_eq!(leave(&moving(10_200), false), Leave::Left(190 * MS + 1));
        assert_eq!(leave(&moving(9_000), false), Leave::NotThere);
        assert_eq!(leave(&moving(20_000), false), Leave::Stayed(4_000 * MS));
        // Left 0.5 s before the end of the bad time: a whole clear second cannot be shown.
        assert_eq!(leave(&moving(13_500), false), Leave::Stayed(4_000 * MS));
    }

    #[test]
    fn one_straggler_within_a_second_defers_leaving_a_later_return_does_not() {
        let mut packets = moving(10_200);
        packets.push(packet(0, 10_900, Some(1), Some(1)));
        assert_eq!(leave(&packets, false), Leave::Left(900 * MS + 1));
        let mut packets = moving(10_200);
        packets.push(packet(0, 11_300, Some(1), Some(1)));
        assert_eq!(leave(&packets, false), Leave::Left(190 * MS + 1));
    }

    #[test]
    fn packets_that_vanish_were_in_the_blackhole() {
        let mut packets = moving(10_200);
        for p in packets
            .iter_mut()
            .filter(|p| (10_000 * MS..10_300 * MS).contains(&p.sent_ns))
        {
            (p.rtt_us, p.path) = (None, None);
        }
        assert_eq!(leave(&packets, true), Leave::Left(290 * MS + 1));
        let other_cause = leave(&packets, false);
        assert_eq!(other_cause, Leave::Left(0));
    }

    #[test]
    fn leave_figures_pool_onsets() {
        let mut leaves = vec![Leave::Left(100 * MS); 18];
        leaves.extend([
            Leave::Left(250 * MS),
            Leave::Stayed(4_000 * MS),
            Leave::NotThere,
        ]);
        let figures = leave_figures(&leaves);
        // Of 20 at place 18.05: a twentieth of the way from 250 ms to 4 s.
        let p95 = &figures["leave_p95_us"];
        assert_eq!((p95.unit, p95.n), ("us", 20));
        assert!((p95.value - 437_500.0).abs() < 1e-6, "{p95:?}");
        assert_eq!(value(&figures, "leave_p50_us"), 100_000.0);
        assert_eq!(value(&figures, "leave_max_us"), 4_000_000.0);
        assert_eq!(value(&figures, "stayed"), 1.0);
        assert!(!leave_figures(&[Leave::NotThere]).contains_key("leave_p95_us"));
    }

    #[test]
    fn moves_are_counted_per_flow() {
        let mut packets = moving(10_200);
        assert_eq!(flow_moves(&packets), 1);
        packets.extend(moving(9_000).into_iter().map(|p| Packet { flow: 1, ..p }));
        assert_eq!(
            flow_moves(&packets),
            1,
            "two flows on different paths are no move"
        );
    }
}
