//! From packets to the few points that a plot can show: pure functions.

use std::ops::Range;

use crate::workload::game::Packet;

use super::Segment;

/// One bin of a time-line.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bin {
    /// Middle of the bin, seconds from the segment's start.
    pub at_s: f64,
    /// Smallest RTT in it, ms.
    pub min_ms: f64,
    /// Median RTT, ms.
    pub mid_ms: f64,
    /// Largest RTT, ms: down-sampling must not hide the very thing measured.
    pub max_ms: f64,
}

/// Rounded up, so that the end of the span falls into the last bin.
fn width(span: &Range<u64>, bins: usize) -> u64 {
    (span.end.saturating_sub(span.start))
        .div_ceil(bins as u64)
        .max(1)
}

/// RTT over time, of the packets that `counts` takes, in `bins` equal bins of `span`, which counts from
/// the segment's start; bins without an answer are left out.
pub fn timeline(
    segment: &Segment,
    span: &Range<u64>,
    bins: usize,
    counts: impl Fn(&Packet) -> bool,
) -> Vec<Bin> {
    let width_ns = width(span, bins);
    let mut rtts: Vec<Vec<u32>> = vec![Vec::new(); bins];
    for p in segment.packets.iter().filter(|p| counts(p)) {
        let Some(at_ns) = p.sent_ns.checked_sub(segment.start_ns + span.start) else {
            continue;
        };
        let bin = (at_ns / width_ns) as usize;
        if let (Some(rtt), true) = (p.rtt_us, bin < bins) {
            rtts[bin].push(rtt);
        }
    }
    let ms = |us: u32| f64::from(us) / 1e3;
    rtts.iter_mut()
        .enumerate()
        .filter(|(_, r)| !r.is_empty())
        .map(|(i, r)| {
            r.sort_unstable();
            Bin {
                at_s: (span.start as f64 + (i as f64 + 0.5) * width_ns as f64) / 1e9,
                min_ms: ms(r[0]),
                mid_ms: ms(r[r.len() / 2]),
                max_ms: ms(r[r.len() - 1]),
            }
        })
        .collect()
}

/// Packets of one bin of a strip: how many went to each path, how many arrived nowhere.
#[derive(Debug, Clone, PartialEq)]
pub struct Shares {
    /// Per path.
    pub arrived: Vec<u32>,
    /// Arrived nowhere.
    pub lost: u32,
}

/// Path shares over time in `bins` equal bins of `span`, which counts from the segment's start.
pub fn shares(segment: &Segment, span: &Range<u64>, bins: usize, paths: usize) -> Vec<Shares> {
    let width_ns = width(span, bins);
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
pub fn sorted_rtts(segments: &[Segment], policy: &str) -> Vec<u32> {
    let answered = |p: &Packet| p.rtt_us;
    let mut rtts: Vec<u32> = segments
        .iter()
        .filter(|s| s.policy == policy)
        .flat_map(|s| s.packets.iter().filter_map(answered))
        .collect();
    rtts.sort_unstable();
    rtts
}

/// Points (RTT ms, share of packets *above* it) of the complementary distribution.
///
/// Ranks are spaced evenly in the logarithm of the tail's share, so that the last one in 10,000 is
/// drawn as finely as the middle; the largest value is always a point.
pub fn tail(sorted: &[u32], points: usize) -> Vec<(f64, f64)> {
    let n = sorted.len();
    if n == 0 {
        return Vec::new();
    }
    let mut ranks: Vec<usize> = (0..=points)
        .map(|i| {
            let above = (n as f64).powf(1.0 - i as f64 / points as f64);
            n - (above.round() as usize).clamp(1, n)
        })
        // The body (above one half) falls between the first two of these ranks.
        .chain((0..=points / 2).map(|i| (n - 1) * i / points))
        .collect();
    ranks.sort_unstable();
    ranks.dedup();
    ranks
        .iter()
        .map(|r| (f64::from(sorted[*r]) / 1e3, (n - r) as f64 / n as f64))
        .collect()
}

/// Points (RTT ms, share of packets up to it) of the distribution.
pub fn cdf(sorted: &[u32], points: usize) -> Vec<(f64, f64)> {
    let n = sorted.len();
    if n == 0 {
        return Vec::new();
    }
    let mut ranks: Vec<usize> = (0..=points).map(|i| (n - 1) * i / points).collect();
    ranks.dedup();
    ranks
        .iter()
        .map(|r| (f64::from(sorted[*r]) / 1e3, (r + 1) as f64 / n as f64))
        .collect()
}

/// Share of packets in each of `bins` equal bins of 0 to `max_ms`; larger ones are in the last.
pub fn histogram(sorted: &[u32], max_ms: f64, bins: usize) -> Vec<f64> {
    let mut counts = vec![0u32; bins];
    for rtt in sorted {
        let bin = (f64::from(*rtt) / 1e3 / max_ms * bins as f64) as usize;
        counts[bin.min(bins - 1)] += 1;
    }
    counts
        .iter()
        .map(|c| f64::from(*c) / sorted.len().max(1) as f64)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(rtts: &[(u64, Option<u32>, Option<u8>)]) -> Segment {
        let packets = rtts
            .iter()
            .map(|(ms, rtt_us, path)| Packet {
                sent_ns: 5_000_000_000 + ms * 1_000_000,
                rtt_us: *rtt_us,
                path: *path,
                ..Packet::default()
            })
            .collect();
        Segment {
            policy: "ecmp".into(),
            repeat: 0,
            start_ns: 5_000_000_000,
            packets,
        }
    }

    #[test]
    fn timeline_keeps_the_extremes() {
        let mut points: Vec<_> = (0..1000).map(|ms| (ms, Some(20_000), Some(0))).collect();
        points[550].1 = Some(240_000);
        points[551].1 = Some(1_000);
        let bins = timeline(&segment(&points), &(0..1_000_000_000), 10, |_| true);
        assert_eq!(bins.len(), 10);
        let worst = Bin {
            at_s: 0.55,
            min_ms: 1.0,
            mid_ms: 20.0,
            max_ms: 240.0,
        };
        assert_eq!(bins[5], worst);
        assert_eq!(bins[4].max_ms, 20.0);
        let other = timeline(&segment(&points), &(0..1_000_000_000), 10, |p| {
            p.path == Some(1)
        });
        assert!(other.is_empty());
    }

    #[test]
    fn a_span_that_starts_later_leaves_out_what_was_before() {
        let points: Vec<_> = (0..1000).map(|ms| (ms, Some(20_000), Some(0))).collect();
        let bins = timeline(&segment(&points), &(500_000_000..1_000_000_000), 5, |_| {
            true
        });
        assert_eq!((bins.len(), bins[0].at_s), (5, 0.55));
        let shares = shares(&segment(&points), &(500_000_000..1_000_000_000), 5, 1);
        assert_eq!(shares.iter().map(|s| s.arrived[0]).sum::<u32>(), 500);
    }

    #[test]
    fn bins_without_answers_are_gaps() {
        let bins = timeline(
            &segment(&[(50, Some(9), None), (250, None, None)]),
            &(0..300_000_000),
            3,
            |_| true,
        );
        assert_eq!(bins.len(), 1);
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

    #[test]
    fn tail_reaches_the_largest_value_and_falls() {
        let sorted: Vec<u32> = (1..=10_000).collect();
        let points = tail(&sorted, 200);
        assert_eq!(points[0], (0.001, 1.0));
        assert_eq!(*points.last().unwrap(), (10.0, 0.0001));
        assert!(points
            .windows(2)
            .all(|w| w[0].0 <= w[1].0 && w[0].1 > w[1].1));
        assert!(points.len() < 400);
        assert!(tail(&[], 10).is_empty());
        assert_eq!(tail(&[7_000], 10), [(7.0, 1.0)]);
    }

    #[test]
    fn cdf_ends_at_one() {
        let sorted: Vec<u32> = (1..=1_000).collect();
        let points = cdf(&sorted, 100);
        assert_eq!(*points.last().unwrap(), (1.0, 1.0));
        assert_eq!(points[0], (0.001, 0.001));
        assert!(cdf(&[], 100).is_empty());
    }

    #[test]
    fn histogram_sums_to_one_with_the_overflow_in_the_last_bin() {
        let bins = histogram(&[1_000, 1_500, 9_000, 900_000], 10.0, 10);
        assert_eq!(bins[1], 0.5);
        assert_eq!(bins[9], 0.5);
        assert_eq!(bins.iter().sum::<f64>(), 1.0);
    }
}
