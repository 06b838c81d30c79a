// SPDX-License-Identifier: GPL-2.0-or-later
//! The plots that only the lab has: colours of policies, and time-lines of flows over paths.

use std::ops::Range;

use anyhow::Result;
use mountain::report::plots::{
    self, Format, RGBColor, Strip, BINS, LOST, PARTS as PATHS, SERIES as POLICIES, SHADES as EVENTS,
};
use mountain::report::series::{self, Bin};

use crate::workload::game::Packet;

use super::series::shares;
use super::{DrawnSegment, PathEvent};

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

/// The time-line of one policy in one repeat.
pub struct RepeatTimeline<'a> {
    /// Its packets.
    pub segment: &'a DrawnSegment,
    /// Colour of the policy.
    pub colour: RGBColor,
    /// What happened to the paths in this repeat.
    pub events: &'a [PathEvent],
    /// The time axis, from the segment's start, ns.
    pub span: Range<u64>,
    /// Upper end of the RTT axis, the same for all policies.
    pub max_ms: f64,
    /// Number of paths.
    pub paths: usize,
}

/// RTT over time (lines: median of a bin per path, band: smallest to largest), events shaded, and a strip
/// with the share of each path below.
pub fn timeline(plot: &RepeatTimeline, format: Format, label: &str) -> Result<String> {
    let seconds = |ns: u64| ns as f64 / 1e9;
    let shades = plot
        .events
        .iter()
        .filter(|e| e.from_ns < plot.span.end && e.until_ns >= plot.span.start)
        .map(|event| {
            let colour = EVENTS[usize::from(event.path) % EVENTS.len()];
            (seconds(event.from_ns)..seconds(event.until_ns), colour)
        });
    // One line a path: the median over two paths of which one is slow would be either.
    let lines = lines(plot)
        .into_iter()
        .map(|(path, colour)| (colour, bins(plot, |p| p.path == path)));
    let strip = shares(plot.segment, &plot.span, STRIP_BINS, plot.paths);
    let columns = strip.iter().map(|bin| {
        let total = f64::from(bin.iter().sum::<u32>().max(1));
        bin.iter().map(|count| f64::from(*count) / total).collect()
    });
    let colours = PATHS.iter().cycle().take(plot.paths);
    let drawn = plots::Timeline {
        span_s: seconds(plot.span.start)..seconds(plot.span.end),
        range_ms: 0.0..plot.max_ms,
        shades: shades.collect(),
        band: bins(plot, |_| true),
        lines: lines.collect(),
        marks: Vec::new(),
        strips: vec![Strip {
            name: "paths".into(),
            colours: colours.chain(std::iter::once(&LOST)).copied().collect(),
            columns: columns.collect(),
        }],
    };
    plots::timeline(&drawn, format, label)
}

/// RTTs over time of the packets that `counts` takes.
fn bins(plot: &RepeatTimeline, counts: impl Fn(&Packet) -> bool) -> Vec<Bin> {
    let start_ns = plot.segment.start_ns;
    let samples = plot.segment.packets.iter().filter_map(|p| {
        let at_ns = p.sent_ns.checked_sub(start_ns)?;
        let rtt_us = p.rtt_us.filter(|_| counts(p))?;
        Some((at_ns, f64::from(rtt_us)))
    });
    series::timeline(samples, &plot.span, BINS)
}

/// The paths that the answered packets took, with their colours; the policy's for an unknown path.
fn lines(plot: &RepeatTimeline) -> Vec<(Option<u8>, RGBColor)> {
    let answered = || plot.segment.packets.iter().filter(|p| p.rtt_us.is_some());
    std::iter::once((None, plot.colour))
        .chain((0..plot.paths).map(|i| (Some(i as u8), PATHS[i % PATHS.len()])))
        .filter(|(path, _)| answered().any(|p| p.path == *path))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_keep_their_colour_whatever_else_ran() {
        let few = ["ecmp".to_string(), "mountain".to_string()];
        let many = ["none", "ecmp", "min-rtt", "mountain", "oracle"].map(String::from);
        assert_eq!(
            policy_colour("mountain", &few),
            policy_colour("mountain", &many)
        );
        let mut colours: Vec<String> = many
            .iter()
            .map(|p| plots::hex(policy_colour(p, &many)))
            .collect();
        colours.sort();
        colours.dedup();
        assert_eq!(colours.len(), many.len());
    }
}
