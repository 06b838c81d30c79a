// SPDX-License-Identifier: GPL-2.0-or-later
//! From packets to what the plots show: pure functions.

use std::ops::Range;

use mountain::report::series;

use crate::workload::game::Packet;

use super::DrawnSegment;

/// Packets of one bin of a strip: how many went to each path, how many arrived nowhere.
#[derive(Debug, Clone, PartialEq)]
pub struct Shares {
    /// Per path.
    pub arrived: Vec<u32>,
    /// Arrived nowhere.
    pub lost: u32,
}

/// Path shares over time in `bins` equal bins of `span`, which counts from the segment's start.
pub fn shares(segment: &DrawnSegment, span: &Range<u64>, bins: usize, paths: usize) -> Vec<Shares> {
    let width_ns = series::width(span, bins);
    let mut out = vec![
        Shares {
            arrived: vec![0; paths],
            lost: 0
        };
        bins
    ];
    for p in &segment.packets {
        let Some(at_ns) = p.sent_ns.checked_sub(segment.start_ns + span.start) else {
            continue;
        };
        let bin = (at_ns / width_ns) as usize;
        let Some(bin) = out.get_mut(bin) else {
            continue;
        };
        match p
            .path
            .and_then(|path| bin.arrived.get_mut(usize::from(path)))
        {
            Some(count) => *count += 1,
            None => bin.lost += 1,
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
        assert_eq!(shares.iter().map(|s| s.arrived[0]).sum::<u32>(), 500);
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
        assert_eq!(
            bins[0],
            Shares {
                arrived: vec![1, 1],
                lost: 1
            }
        );
        assert_eq!(
            bins[1],
            Shares {
                arrived: vec![0, 1],
                lost: 0
            }
        );
    }
}
