//! The plots, as inline SVG.
//!
//! Colours here are only *names*: the page's style sheet maps each to a light and a dark value by
//! attribute selectors, which win over the attributes plotters writes.

use std::ops::Range;

use anyhow::{anyhow, Result};
use plotters::coord::Shift;
use plotters::prelude::*;

use super::series::{self, Bin};
use super::{PathEvent, Segment};

/// Text and axes.
pub const INK: RGBColor = RGBColor(11, 11, 1);
/// Grid lines.
pub const GRID: RGBColor = RGBColor(11, 11, 2);
/// Packets that arrived nowhere.
pub const LOST: RGBColor = RGBColor(11, 11, 3);
/// Shading of events; the first paths only have an own one.
pub const EVENTS: [RGBColor; 3] = [
    RGBColor(11, 14, 0),
    RGBColor(11, 14, 1),
    RGBColor(11, 14, 2),
];
/// Paths in the share strip.
pub const PATHS: [RGBColor; 6] = [
    RGBColor(11, 13, 0),
    RGBColor(11, 13, 1),
    RGBColor(11, 13, 2),
    RGBColor(11, 13, 3),
    RGBColor(11, 13, 4),
    RGBColor(11, 13, 5),
];
/// Policies: ecmp, mountain, oracle, then the others in order of the table.
pub const POLICIES: [RGBColor; 7] = [
    RGBColor(11, 12, 0),
    RGBColor(11, 12, 1),
    RGBColor(11, 12, 2),
    RGBColor(11, 12, 3),
    RGBColor(11, 12, 4),
    RGBColor(11, 12, 5),
    RGBColor(11, 12, 6),
];

const WIDTH: u32 = 960;
const LEFT: u32 = 64;
/// Bins of a time-line: about two pixels each.
const BINS: usize = 440;
const STRIP_BINS: usize = 110;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

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

/// `#RRGGBB` as plotters writes it.
pub fn hex(colour: RGBColor) -> String {
    format!("#{:02X}{:02X}{:02X}", colour.0, colour.1, colour.2)
}

fn draw(height: u32, label: &str, body: impl FnOnce(&Area) -> Result<()>) -> Result<String> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        body(&root)?;
        root.present().map_err(|e| anyhow!("{e}"))?;
    }
    // Inside HTML the namespace is implied; the size comes from the style sheet.
    let label = super::page::escape(label);
    let svg = svg.replace(" xmlns=\"http://www.w3.org/2000/svg\"", "");
    Ok(svg.replacen(
        "<svg ",
        &format!("<svg role=\"img\" aria-label=\"{label}\" "),
        1,
    ))
}

/// plotters' errors borrow the drawing area; keep their text.
fn text<E: std::fmt::Display>(error: E) -> anyhow::Error {
    anyhow!("cannot draw: {error}")
}

/// One line of a distribution plot.
pub struct Line {
    /// Policy.
    pub colour: RGBColor,
    /// Points in plot coordinates.
    pub points: Vec<(f64, f64)>,
}

/// What the axes of a distribution plot show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Share {
    /// Share of packets up to an RTT, 0 to 1.
    Below,
    /// Share of packets above an RTT, logarithmic down to `1/floor`.
    Above {
        /// One packet in so many is the lower end.
        floor: u32,
    },
    /// Share of packets in a bin, logarithmic down to `1/floor`.
    Within {
        /// One packet in so many is the lower end.
        floor: u32,
    },
}

/// A distribution: lines over RTT from `from_ms` to `to_ms`.
pub fn distribution(
    lines: &[Line],
    share: Share,
    (from_ms, to_ms): (f64, f64),
    label: &str,
) -> Result<String> {
    draw(340, label, |root| {
        let mut builder = ChartBuilder::on(root);
        builder
            .margin(8)
            .margin_right(20)
            .x_label_area_size(40)
            .y_label_area_size(LEFT);
        let style = |line: &Line| ShapeStyle::from(line.colour).stroke_width(2);
        let x = from_ms..to_ms;
        // The two coordinate types differ, hence two nearly equal arms.
        match share {
            Share::Below => {
                let mut chart = builder.build_cartesian_2d(x, 0.0..1.0).map_err(text)?;
                mesh(chart.configure_mesh(), "share of packets up to it")?;
                for line in lines {
                    let series = LineSeries::new(line.points.iter().copied(), style(line));
                    chart.draw_series(series).map_err(text)?;
                }
            }
            Share::Above { floor } | Share::Within { floor } => {
                let y = (0.8 / f64::from(floor.max(10))..1.0).log_scale();
                let mut chart = builder.build_cartesian_2d(x, y).map_err(text)?;
                let above = matches!(share, Share::Above { .. });
                let title = if above {
                    "share of packets above it"
                } else {
                    "share of packets"
                };
                mesh(chart.configure_mesh(), title)?;
                for line in lines {
                    let series = LineSeries::new(line.points.iter().copied(), style(line));
                    chart.draw_series(series).map_err(text)?;
                }
            }
        }
        Ok(())
    })
}

/// A number without superfluous decimals: 20, 0.5.
fn plain(value: &f64) -> String {
    format!("{}", (value * 1e3).round() / 1e3)
}

fn percent(share: &f64) -> String {
    // Powers of ten down to one in a million without noise such as 0.09999.
    let text = format!("{:.4}", share * 100.0);
    format!("{}%", text.trim_end_matches('0').trim_end_matches('.'))
}

fn mesh<X, Y>(
    mut mesh: plotters::chart::MeshStyle<'_, '_, X, Y, SVGBackend<'_>>,
    y_title: &str,
) -> Result<()>
where
    X: Ranged<ValueType = f64> + plotters::coord::ranged1d::ValueFormatter<f64>,
    Y: Ranged<ValueType = f64> + plotters::coord::ranged1d::ValueFormatter<f64>,
{
    mesh.x_desc("round-trip time, ms")
        .y_desc(y_title)
        .x_labels(12)
        .y_labels(6)
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(INK)
        .label_style(("sans-serif", 13).into_font().color(&INK))
        .axis_desc_style(("sans-serif", 13).into_font().color(&INK))
        .x_label_formatter(&plain)
        .y_label_formatter(&percent)
        .draw()
        .map_err(text)
}

/// The time-line of one policy in one repeat.
pub struct Timeline<'a> {
    /// Its packets.
    pub segment: &'a Segment,
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
pub fn timeline(plot: &Timeline, label: &str) -> Result<String> {
    draw(250, label, |root| {
        let (from_s, until_s) = (plot.span.start as f64 / 1e9, plot.span.end as f64 / 1e9);
        let (upper, lower) = root.split_vertically(206);
        let mut chart = ChartBuilder::on(&upper)
            .margin_top(8)
            .margin_right(20)
            .x_label_area_size(22)
            .y_label_area_size(LEFT)
            .build_cartesian_2d(from_s..until_s, 0.0..plot.max_ms)
            .map_err(text)?;
        let shade = |event: &PathEvent| {
            let colour = EVENTS[usize::from(event.path) % EVENTS.len()];
            let (from, until) = (event.from_ns as f64 / 1e9, event.until_ns as f64 / 1e9);
            // A spike of a few milliseconds still has to be seen.
            let until = until.max(from + (until_s - from_s) / 900.0).min(until_s);
            let from = from.max(from_s);
            Rectangle::new([(from, 0.0), (until, plot.max_ms)], colour.filled())
        };
        let visible = plot
            .events
            .iter()
            .filter(|e| e.from_ns < plot.span.end && e.until_ns >= plot.span.start);
        chart.draw_series(visible.map(shade)).map_err(text)?;
        chart
            .configure_mesh()
            .y_desc("RTT, ms")
            .x_labels(12)
            .y_labels(5)
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .axis_style(INK)
            .label_style(("sans-serif", 13).into_font().color(&INK))
            .axis_desc_style(("sans-serif", 13).into_font().color(&INK))
            .x_label_formatter(&|s| format!("{s} s"))
            .y_label_formatter(&plain)
            .draw()
            .map_err(text)?;
        let gap_s = (until_s - from_s) * 3.0 / BINS as f64;
        let bins = series::timeline(plot.segment, &plot.span, BINS, |_| true);
        for run in unbroken(&bins, gap_s) {
            let top = run.iter().map(|b| (b.at_s, b.max_ms.min(plot.max_ms)));
            let bottom = run
                .iter()
                .rev()
                .map(|b| (b.at_s, b.min_ms.min(plot.max_ms)));
            let band: Vec<(f64, f64)> = top.chain(bottom).collect();
            let polygon = Polygon::new(band.clone(), INK.mix(0.15).filled());
            chart.draw_series(std::iter::once(polygon)).map_err(text)?;
            // A band of no height (one packet a bin) would be invisible without an outline.
            let outline = PathElement::new(band, INK.mix(0.35).stroke_width(1));
            chart.draw_series(std::iter::once(outline)).map_err(text)?;
        }
        // One line a path: the median over two paths of which one is slow would be either.
        for (path, colour) in lines(plot) {
            let bins = series::timeline(plot.segment, &plot.span, BINS, |p| p.path == path);
            for run in unbroken(&bins, gap_s) {
                let middle = run.iter().map(|b| (b.at_s, b.mid_ms.min(plot.max_ms)));
                chart
                    .draw_series(LineSeries::new(middle, colour.stroke_width(2)))
                    .map_err(text)?;
            }
        }
        strip(plot, &lower)
    })
}

/// The paths that the answered packets took, with their colours; the policy's for an unknown path.
fn lines(plot: &Timeline) -> Vec<(Option<u8>, RGBColor)> {
    let answered = || plot.segment.packets.iter().filter(|p| p.rtt_us.is_some());
    std::iter::once((None, plot.colour))
        .chain((0..plot.paths).map(|i| (Some(i as u8), PATHS[i % PATHS.len()])))
        .filter(|(path, _)| answered().any(|p| p.path == *path))
        .collect()
}

/// Splits where more than `gap_s` passed without an answer: a line across would invent data.
fn unbroken(bins: &[Bin], gap_s: f64) -> Vec<&[Bin]> {
    let mut runs = Vec::new();
    let mut start = 0;
    for i in 1..=bins.len() {
        if i == bins.len() || bins[i].at_s - bins[i - 1].at_s > gap_s {
            runs.push(&bins[start..i]);
            start = i;
        }
    }
    runs.retain(|run| !run.is_empty());
    runs
}

fn strip(plot: &Timeline, area: &Area) -> Result<()> {
    let mut chart = ChartBuilder::on(area)
        .margin_top(4)
        .margin_bottom(6)
        .margin_right(20)
        .set_label_area_size(LabelAreaPosition::Left, LEFT)
        .build_cartesian_2d(0.0..STRIP_BINS as f64, 0.0..1.0)
        .map_err(text)?;
    let bins = series::shares(plot.segment, &plot.span, STRIP_BINS, plot.paths);
    let mut boxes = Vec::new();
    for (i, bin) in bins.iter().enumerate() {
        let total = f64::from(bin.arrived.iter().sum::<u32>() + bin.lost);
        let colours = PATHS
            .iter()
            .cycle()
            .take(plot.paths)
            .chain(std::iter::once(&LOST));
        let mut from = 0.0;
        for (count, colour) in bin
            .arrived
            .iter()
            .chain(std::iter::once(&bin.lost))
            .zip(colours)
        {
            let until = from + f64::from(*count) / total;
            if *count > 0 {
                let corners = [(i as f64, from), (i as f64 + 1.0, until)];
                boxes.push(Rectangle::new(corners, colour.filled()));
            }
            from = until;
        }
    }
    chart.draw_series(boxes).map_err(text)?;
    area.draw(&Text::new(
        "paths",
        (14, 14),
        ("sans-serif", 13).into_font().color(&INK),
    ))
    .map_err(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_break_where_nothing_was_answered() {
        let bin = |at_s| Bin {
            at_s,
            min_ms: 1.0,
            mid_ms: 1.0,
            max_ms: 1.0,
        };
        let bins = [bin(0.0), bin(0.1), bin(0.2), bin(1.5), bin(1.6)];
        let runs: Vec<usize> = unbroken(&bins, 0.3).iter().map(|r| r.len()).collect();
        assert_eq!(runs, [3, 2]);
        assert!(unbroken(&[], 0.3).is_empty());
    }

    #[test]
    fn percentages_are_plain() {
        let shown = [1.0, 0.1, 0.01, 0.0001, 0.000001].map(|s| percent(&s));
        assert_eq!(shown, ["100%", "10%", "1%", "0.01%", "0.0001%"]);
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
