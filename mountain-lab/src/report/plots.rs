// SPDX-License-Identifier: GPL-2.0-or-later
//! The plots that only the lab has: colours of policies, and time-lines of flows over paths.

use std::ops::Range;

use mountain::report::plots::{
    RGBColor, Strip, Timeline, BINS, LOST, PARTS as PATHS, SERIES as POLICIES, SHADES as EVENTS,
};
use mountain::report::series::{self, Bin};
use mountain_lab::workload::game::Packet;

use super::{DrawnSegment, PlotData};

const STRIP_BINS: usize = 110;

/// The colour of `policy` among `all` (in table order).
pub fn policy_colour(policy: &str, all: &[String]) -> RGBColor {
    let fixed = ["ecmp", "mountain", "oracle"];
    if let Some(i) = fixed.iter().position(|f| *f == policy) {
        return POLICIES[i];
    }
    let others = all.iter().filter(|p| !fixed.contains(&p.as_str()));
    let i = others.into_iter().position(|p| p == policy).unwrap_or(0);
    POLICIES[fixed.len() + i % (POLICIES.len() - fixed.len())]
}

/// The time-line of a policy in a repeat: RTT (lines: median of a bin per path, band: smallest to largest) up to
/// `max_ms`, events shaded, and a strip with the share of each path below. `span`: ns from the segment's start.
pub fn timeline(
    samples: &PlotData,
    segment: &DrawnSegment,
    colour: RGBColor,
    span: &Range<u64>,
    max_ms: f64,
) -> Timeline {
    let paths = samples.paths.len();
    let span_s = span.start as f64 / 1e9..span.end as f64 / 1e9;
    let own = samples.events.iter().filter(|(r, _)| *r == segment.repeat);
    let shades = own.map(|(_, event)| {
        let seconds = event.start_us as f64 / 1e6..event.end_us as f64 / 1e6;
        (seconds, EVENTS[event.path % EVENTS.len()])
    });
    let seen = |(at, _): &(Range<f64>, _)| at.start < span_s.end && at.end >= span_s.start;
    // One line a path: the median over two paths of which one is slow would be either.
    let lines = lines(segment, colour, paths).into_iter();
    let lines = lines.map(|(path, colour)| (colour, bins(segment, span, |p| p.path == path)));
    let strip = shares(segment, span, STRIP_BINS, paths);
    let columns = strip.iter().map(|bin| {
        let total = f64::from(bin.iter().sum::<u32>().max(1));
        bin.iter().map(|count| f64::from(*count) / total).collect()
    });
    let colours = PATHS.iter().cycle().take(paths);
    Timeline {
        range_ms: 0.0..max_ms,
        shades: shades.filter(seen).collect(),
        band: bins(segment, span, |_| true),
        lines: lines.collect(),
        marks: Vec::new(),
        strips: vec![Strip {
            name: "paths".into(),
            colours: colours.chain(std::iter::once(&LOST)).copied().collect(),
            columns: columns.collect(),
        }],
        span_s,
    }
}

/// Packets over time in `bins` equal bins of `span`, which counts from the segment's start: how many of each
/// bin went to each path, and at last how many arrived nowhere.
fn shares(segment: &DrawnSegment, span: &Range<u64>, bins: usize, paths: usize) -> Vec<Vec<u32>> {
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

/// RTTs over time of the packets that `counts` takes.
fn bins(segment: &DrawnSegment, span: &Range<u64>, counts: impl Fn(&Packet) -> bool) -> Vec<Bin> {
    let samples = segment.packets.iter().filter_map(|p| {
        let at_ns = p.sent_ns.checked_sub(segment.start_ns)?;
        let rtt_us = p.rtt_us.filter(|_| counts(p))?;
        Some((at_ns, f64::from(rtt_us)))
    });
    series::timeline(samples, span, BINS)
}

/// The paths that the answered packets took, with their colours; the policy's for an unknown path.
fn lines(segment: &DrawnSegment, colour: RGBColor, paths: usize) -> Vec<(Option<u8>, RGBColor)> {
    let answered = || segment.packets.iter().filter(|p| p.rtt_us.is_some());
    std::iter::once((None, colour))
        .chain((0..paths).map(|i| (Some(i as u8), PATHS[i % PATHS.len()])))
        .filter(|(path, _)| answered().any(|p| p.path == *path))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use mountain::report::plots::hex;

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

    #[test]
    fn policies_keep_their_colour_whatever_else_ran() {
        let few = ["ecmp".to_string(), "mountain".to_string()];
        let many = ["none", "ecmp", "min-rtt", "mountain", "oracle"].map(String::from);
        assert_eq!(
            policy_colour("mountain", &few),
            policy_colour("mountain", &many)
        );
        let mut colours: Vec<String> = many.iter().map(|p| hex(policy_colour(p, &many))).collect();
        colours.sort();
        colours.dedup();
        assert_eq!(colours.len(), many.len());
    }
}
