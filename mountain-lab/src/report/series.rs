// SPDX-License-Identifier: GPL-2.0-or-later
//! From packets to what the plots show: pure functions.

use std::ops::Range;

use mountain::report::series;
use mountain_lab::workload::game::Packet;

use super::DrawnSegment;

/// Packets over time in `bins` equal bins of `span`, which counts from the segment's start: how many of each
/// bin went to each path, and at last how many arrived nowhere.
pub fn shares(
    segment: &DrawnSegment,
    span: &Range<u64>,
    bins: usize,
    paths: usize,
) -> Vec<Vec<u32>> {
    let width_ns = series::width(span, bins);
    let mut out = vec![vec![0; paths + 1]; bins];
    for p in &segment.packets {
        let since = p.sent_ns.checked_sub(segment.start_ns + span.start);
        let bin = since.and_then(|ns| out.get_mut((ns / width_ns) as usize));
        if let Some(bin) = bin {
            let path = p.path.map_or(paths, usize::from);
            bin[path.min(paths)] += 1;
        }
    }
    out
}

/// Sorted RTTs (µs) of all segments of `policy`.
pub fn sorted_rtts(segments: &[DrawnSegment], policy: &str) -> Vec<f64> {
    let answered = |p: &Packet| p.rtt_us.map(f64::from);
    let mut rtts: Vec<f64> = segments
        .iter()
        .filter(|s| s.policy == policy)
        .flat_map(|s| s.packets.iter().filter_map(answered))
        .collect();
    rtts.sort_unstable_by(f64::total_cmp);
    rtts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(rtts: &[(u64, Option<u32>, Option<u8>)]) -> DrawnSegment {
        let packets = rtts
            .iter()
            .map(|(ms, rtt_us, path)| Packet {
                sent_ns: 5_000_000_000 + ms * 1_000_000,
                rtt_us: *rtt_us,
                path: *path,
                ..Packet::default()
            })
            .collect();
        DrawnSegment {
            policy: "ecmp".into(),
            repeat: 0,
            start_ns: 5_000_000_000,
            packets,
        }
    }

    #[test]
    fn a_span_that_starts_later_leaves_out_what_was_before() {
        let points: Vec<_> = (0..1000).map(|ms| (ms, Some(20_000), Some(0))).collect();
        let shares = shares(&segment(&points), &(500_000_000..1_000_000_000), 5, 1);
        assert_eq!(shares.iter().map(|bin| bin[0]).sum::<u32>(), 500);
    }

    #[test]
    fn shares_count_arrivals_and_losses() {
        let points = [
            (0, Some(1), Some(0)),
            (1, None, Some(1)),
            (2, None, None),
            (99, Some(1), Some(1)),
        ];
        let bins = shares(&segment(&points), &(0..100_000_000), 2, 2);
        assert_eq!(bins, [[1, 1, 1], [0, 1, 0]]);
    }
}
