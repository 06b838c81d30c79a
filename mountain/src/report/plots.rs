// SPDX-License-Identifier: GPL-2.0-or-later
//! The plots, as SVG.
//!
//! Colours here are only *names*: a page's style sheet maps each to a light and a dark value by
//! attribute selectors, which win over the attributes plotters writes ([`super::page::styles`]); a
//! file of its own gets the light values ([`super::page::standalone`]).

use std::ops::Range;

use anyhow::{anyhow, Result};
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint};
use plotters::coord::types::RangedCoordf64;
use plotters::coord::Shift;
use plotters::prelude::*;

use super::series::{unbroken, Bin};

pub use plotters::style::RGBColor;

/// Text and axes.
pub const INK: RGBColor = RGBColor(11, 11, 1);
/// Grid lines.
pub(crate) const GRID: RGBColor = RGBColor(11, 11, 2);
/// What got lost.
pub const LOST: RGBColor = RGBColor(11, 11, 3);
/// Shading of spans of time.
pub const SHADES: [RGBColor; 3] = names(14);
/// Parts of a strip: paths, kinds of CPU time.
pub const PARTS: [RGBColor; 6] = names(13);
/// What is compared: policies, runs.
pub const SERIES: [RGBColor; 7] = names(12);

/// The names of one kind of colours.
const fn names<const N: usize>(kind: u8) -> [RGBColor; N] {
    let mut all = [RGBColor(11, kind, 0); N];
    let mut i = 0;
    while i < N {
        all[i] = RGBColor(11, kind, i as u8);
        i += 1;
    }
    all
}

/// Bins of a time-line: about two pixels each on a wide plot.
pub const BINS: usize = 440;

const FONT: u32 = 13;
const STRIP_HEIGHT: u32 = 44;
/// Spans of more than this factor get a logarithmic axis.
pub(crate) const LOG_FROM: f64 = 8.0;

pub(super) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
pub(super) type Chart<'a> = ChartContext<'a, SVGBackend<'a>, Cartesian2d<Axis, Axis>>;
const RTT: &str = "round-trip time, ms";

/// For whom a plot is drawn.
#[derive(Debug, Clone, Copy)]
pub struct Format<'a> {
    /// Pixels.
    pub width: u32,
    /// Title and legend inside of the plot, for a file that stands alone.
    pub header: Option<(&'a str, &'a [(String, RGBColor)])>,
}

impl Format<'_> {
    /// A column of text on a screen or on paper.
    pub const WIDE: Self = Format {
        width: 960,
        header: None,
    };
    /// A phone.
    pub(crate) const NARROW: Self = Format {
        width: 400,
        header: None,
    };

    pub(super) fn left(&self) -> u32 {
        if self.width < 600 {
            52
        } else {
            64
        }
    }

    pub(super) fn labels(&self) -> usize {
        (self.width / 80) as usize
    }
}

/// `#RRGGBB` as plotters writes it.
pub fn hex(colour: RGBColor) -> String {
    format!("#{:02X}{:02X}{:02X}", colour.0, colour.1, colour.2)
}

fn font() -> TextStyle<'static> {
    ("sans-serif", FONT).into_font().color(&INK)
}

/// Draws with `body` below the header, if there is one; `label` is for who cannot see.
pub(super) fn draw(
    format: Format,
    height: u32,
    label: &str,
    body: impl FnOnce(&Area) -> Result<()>,
) -> Result<String> {
    let legend = format.header.map_or(Vec::new(), |(_, entries)| {
        legend_places(entries, format.width)
    });
    let top = format.header.map_or(0, |_| {
        let rows = legend
            .last()
            .map_or(0, |(_, y)| (y / LEGEND_ROW) as u32 + 1);
        34 + rows * LEGEND_ROW as u32
    });
    let mut svg = String::new();
    {
        let size = (format.width, height + top);
        let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        let (header, rest) = root.split_vertically(top);
        if let Some((title, entries)) = format.header {
            let title_font = ("sans-serif", 18).into_font().color(&INK);
            header
                .draw(&Text::new(title, (16, 10), title_font))
                .map_err(text)?;
            for ((name, colour), (x, y)) in entries.iter().zip(&legend) {
                let (x, y) = (*x, y + 34);
                let key = Rectangle::new([(x, y + 1), (x + 16, y + 11)], colour.filled());
                header.draw(&key).map_err(text)?;
                header
                    .draw(&Text::new(name.as_str(), (x + 22, y), font()))
                    .map_err(text)?;
            }
        }
        body(&rest)?;
        root.present().map_err(|e| anyhow!("{e}"))?;
    }
    // Inside HTML the namespace is implied; the size comes from the style sheet.
    let label = super::page::escape(label);
    let svg = svg.replace(super::page::NAMESPACE, "");
    Ok(svg.replacen(
        "<svg ",
        &format!("<svg role=\"img\" aria-label=\"{label}\" "),
        1,
    ))
}

const LEGEND_ROW: i32 = 20;

/// Where each entry begins: rows as wide as the plot. A character is taken for 8 pixels, which is
/// what a wide one needs.
fn legend_places(entries: &[(String, RGBColor)], width: u32) -> Vec<(i32, i32)> {
    let (mut x, mut y) = (16, 0);
    entries
        .iter()
        .map(|(name, _)| {
            let needs = 40 + 8 * name.chars().count() as i32;
            if x > 16 && x + needs > width as i32 {
                (x, y) = (16, y + LEGEND_ROW);
            }
            let place = (x, y);
            x += needs;
            place
        })
        .collect()
}

/// plotters' errors borrow the drawing area; keep their text.
pub(super) fn text<E: std::fmt::Display>(error: E) -> anyhow::Error {
    anyhow!("cannot draw: {error}")
}

/// One line of a distribution plot.
#[derive(Debug, Clone)]
pub struct Line {
    /// One of [`SERIES`].
    pub colour: RGBColor,
    /// Points in plot coordinates.
    pub points: Vec<(f64, f64)>,
}

/// The outline of a histogram: bins of `span_ms`, empty ones at `lowest`.
pub fn steps(bins: &[f64], span_ms: &Range<f64>, lowest: f64) -> Vec<(f64, f64)> {
    let width = (span_ms.end - span_ms.start) / bins.len() as f64;
    let edge = |i: usize| span_ms.start + i as f64 * width;
    bins.iter()
        .enumerate()
        .flat_map(|(i, s)| [edge(i), edge(i + 1)].map(|x| (x, s.max(lowest))))
        .collect()
}

/// What the share axis of a distribution plot shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Share {
    /// Share up to an RTT, 0 to 1.
    Below,
    /// Share above an RTT, logarithmic down to `1/floor`.
    Above {
        /// One sample in so many is the lower end.
        floor: u32,
    },
    /// Share in a bin, logarithmic down to `1/floor`.
    Within {
        /// One sample in so many is the lower end.
        floor: u32,
    },
}

impl Share {
    /// Lower end of a logarithmic axis on which one sample in `floor` is still seen.
    pub fn lowest(floor: u32) -> f64 {
        0.8 / f64::from(floor.max(10))
    }
}

/// A distribution: lines over RTT from `from_ms` to `to_ms`; `what` names what has shares
/// ("packets").
pub fn distribution(
    lines: &[Line],
    share: Share,
    x_ms: Range<f64>,
    what: &str,
    format: Format,
    label: &str,
) -> Result<String> {
    let (y, of_which) = match share {
        Share::Below => (0.0..1.0, " up to it"),
        Share::Above { floor } => (Share::lowest(floor)..1.0, " above it"),
        Share::Within { floor } => (Share::lowest(floor)..1.0, ""),
    };
    let title = format!("share of {what}{of_which}");
    draw(format, 340, label, |root| {
        let axes = [Axis::of(x_ms), Axis::of(y)];
        lines_over(root, lines, axes, [RTT, &title], &percent, format).map(drop)
    })
}

/// An axis of a plot.
pub(super) enum Axis {
    Linear(RangedCoordf64),
    Log(LogCoord<f64>),
}

impl Axis {
    /// Logarithmic if the range is long, or one outlier would flatten the rest.
    pub(super) fn of(range: Range<f64>) -> Self {
        match range.start > 0.0 && range.end / range.start > LOG_FROM {
            true => Axis::Log(range.log_scale().into()),
            false => Axis::linear(range),
        }
    }

    pub(super) fn linear(range: Range<f64>) -> Self {
        Axis::Linear(range.into())
    }
}

impl Ranged for Axis {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        match self {
            Axis::Linear(axis) => axis.map(value, limit),
            Axis::Log(axis) => axis.map(value, limit),
        }
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        match self {
            Axis::Linear(axis) => axis.key_points(hint),
            Axis::Log(axis) => axis.key_points(hint),
        }
    }

    fn range(&self) -> Range<f64> {
        match self {
            Axis::Linear(axis) => axis.range(),
            Axis::Log(axis) => axis.range(),
        }
    }
}

/// The chart with its axes (x, y), which are named `titles`, and lines, for more to be drawn on.
pub(super) fn lines_over<'a>(
    root: &Area<'a>,
    lines: &[Line],
    [x, y]: [Axis; 2],
    titles: [&str; 2],
    y_label: &dyn Fn(&f64) -> String,
    format: Format,
) -> Result<Chart<'a>> {
    let mut chart = ChartBuilder::on(root)
        .margin(8)
        .margin_right(20)
        .x_label_area_size(40)
        .y_label_area_size(format.left())
        .build_cartesian_2d(x, y)
        .map_err(text)?;
    chart
        .configure_mesh()
        .x_desc(titles[0])
        .y_desc(titles[1])
        .x_labels(format.labels())
        .y_labels(6)
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(INK)
        .label_style(font())
        .axis_desc_style(font())
        .x_label_formatter(&plain)
        .y_label_formatter(y_label)
        .draw()
        .map_err(text)?;
    for line in lines {
        let style = ShapeStyle::from(line.colour).stroke_width(2);
        let series = LineSeries::new(line.points.iter().copied(), style);
        chart.draw_series(series).map_err(text)?;
    }
    Ok(chart)
}

/// A number without superfluous decimals: 20, 0.5.
pub(super) fn plain(value: &f64) -> String {
    format!("{}", (value * 1e3).round() / 1e3)
}

fn percent(share: &f64) -> String {
    // Powers of ten down to one in a million without noise such as 0.09999.
    let text = format!("{:.4}", share * 100.0);
    format!("{}%", text.trim_end_matches('0').trim_end_matches('.'))
}

/// Shares over the time of a time-line, below it.
#[derive(Debug, Clone)]
pub struct Strip {
    /// Short: it stands at the left.
    pub name: String,
    /// Colours of the parts, from below.
    pub colours: Vec<RGBColor>,
    /// Equal steps of time; each with a share, 0 to 1, for each part.
    pub columns: Vec<Vec<f64>>,
}

/// RTT over time.
#[derive(Debug, Clone, Default)]
pub struct Timeline {
    /// The time axis, s.
    pub span_s: Range<f64>,
    /// The RTT axis, ms; logarithmic if it begins above 0 and is long.
    pub range_ms: Range<f64>,
    /// Spans of time that are shaded.
    pub shades: Vec<(Range<f64>, RGBColor)>,
    /// Smallest to largest.
    pub band: Vec<Bin>,
    /// Their medians are drawn.
    pub lines: Vec<(RGBColor, Vec<Bin>)>,
    /// Single samples (s, ms) with a mark of their own.
    pub marks: Vec<(f64, f64)>,
    /// Below.
    pub strips: Vec<Strip>,
}

/// Lines (median of a bin), a band from the smallest to the largest, marks, shades, and strips below.
pub fn timeline(plot: &Timeline, format: Format, label: &str) -> Result<String> {
    let height = 206 + STRIP_HEIGHT * plot.strips.len() as u32;
    draw(format, height, label, |root| {
        let (upper, mut below) = root.split_vertically(206);
        over_time(plot, &upper, format)?;
        for shares in &plot.strips {
            let (area, rest) = below.split_vertically(STRIP_HEIGHT);
            strip(shares, &area, format)?;
            below = rest;
        }
        Ok(())
    })
}

fn over_time(plot: &Timeline, area: &Area, format: Format) -> Result<()> {
    let Range {
        start: from_s,
        end: until_s,
    } = plot.span_s;
    let range = &plot.range_ms;
    let mut chart = ChartBuilder::on(area)
        .margin_top(8)
        .margin_right(20)
        .x_label_area_size(22)
        .y_label_area_size(format.left())
        .build_cartesian_2d(from_s..until_s, Axis::of(range.clone()))
        .map_err(text)?;
    let shades = plot.shades.iter().map(|(span, colour)| {
        // One of a few milliseconds still has to be seen.
        let least = span.start + (until_s - from_s) / 900.0;
        let until = span.end.max(least).min(until_s);
        let from = span.start.max(from_s);
        Rectangle::new([(from, range.start), (until, range.end)], colour.filled())
    });
    chart.draw_series(shades).map_err(text)?;
    chart
        .configure_mesh()
        .y_desc("RTT, ms")
        .x_labels(format.labels())
        .y_labels(5)
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(INK)
        .label_style(font())
        .axis_desc_style(font())
        .x_label_formatter(&|s| format!("{} s", plain(s)))
        .y_label_formatter(&plain)
        .draw()
        .map_err(text)?;
    let gap_s = (until_s - from_s) * 3.0 / BINS as f64;
    let inside = |ms: f64| ms.clamp(range.start, range.end);
    for run in unbroken(&plot.band, gap_s) {
        let top = run.iter().map(|b| (b.at_s, inside(b.max_ms)));
        let bottom = run.iter().rev().map(|b| (b.at_s, inside(b.min_ms)));
        let band: Vec<(f64, f64)> = top.chain(bottom).collect();
        let polygon = Polygon::new(band.clone(), INK.mix(0.15).filled());
        chart.draw_series(std::iter::once(polygon)).map_err(text)?;
        // A band of no height (one sample a bin) would be invisible without an outline.
        let outline = PathElement::new(band, INK.mix(0.35).stroke_width(1));
        chart.draw_series(std::iter::once(outline)).map_err(text)?;
    }
    for (colour, bins) in &plot.lines {
        for run in unbroken(bins, gap_s) {
            let middle = run.iter().map(|b| (b.at_s, inside(b.mid_ms)));
            chart
                .draw_series(LineSeries::new(middle, colour.stroke_width(2)))
                .map_err(text)?;
        }
    }
    let marks = plot
        .marks
        .iter()
        .map(|&(s, ms)| Circle::new((s, inside(ms)), 4, LOST.stroke_width(2)));
    chart.draw_series(marks).map_err(text)?;
    Ok(())
}

fn strip(shares: &Strip, area: &Area, format: Format) -> Result<()> {
    let mut chart = ChartBuilder::on(area)
        .margin_top(4)
        .margin_bottom(6)
        .margin_right(20)
        .set_label_area_size(LabelAreaPosition::Left, format.left())
        .build_cartesian_2d(0.0..shares.columns.len().max(1) as f64, 0.0..1.0)
        .map_err(text)?;
    // A rectangle for each share would make the page many times as large. So each part is drawn down
    // to the ground, the highest first, and those below cover the rest of it.
    for (part, colour) in shares.colours.iter().enumerate().rev() {
        let top = |column: &Vec<f64>| column.iter().take(part + 1).sum::<f64>();
        let is_there = |column: &Vec<f64>| column.get(part).is_some_and(|share| *share > 0.0);
        let filled: Vec<f64> = shares
            .columns
            .iter()
            .map(|c| if is_there(c) { top(c) } else { 0.0 })
            .collect();
        for (from, outline) in outlines(&filled) {
            let until = outline.last().map_or(from, |(x, _)| *x);
            let mut corners = vec![(from, 0.0)];
            corners.extend(outline);
            corners.push((until, 0.0));
            let polygon = Polygon::new(corners, colour.filled());
            chart.draw_series(std::iter::once(polygon)).map_err(text)?;
        }
    }
    // Where empty, the strip would not be seen.
    let base = PathElement::new(
        vec![(0.0, 0.0), (shares.columns.len() as f64, 0.0)],
        GRID.stroke_width(1),
    );
    chart.draw_series(std::iter::once(base)).map_err(text)?;
    let at = (if format.width < 600 { 4 } else { 14 }, 14);
    area.draw(&Text::new(shares.name.as_str(), at, font()))
        .map_err(text)
}

type Outline = Vec<(f64, f64)>;

/// The stepped lines over each run of steps above 0, with where it begins.
fn outlines(tops: &[f64]) -> Vec<(f64, Outline)> {
    let mut runs: Vec<(f64, Outline)> = Vec::new();
    for (i, &top) in tops.iter().enumerate().filter(|(_, top)| **top > 0.0) {
        let (left, right) = (i as f64, i as f64 + 1.0);
        match runs.last_mut().map(|(_, points)| points) {
            Some(points) if points.last().is_some_and(|(x, _)| *x == left) => {
                let level = points.last_mut().expect("not empty");
                if level.1 == top {
                    level.0 = right;
                } else {
                    points.extend([(left, top), (right, top)]);
                }
            }
            _ => runs.push((left, vec![(left, top), (right, top)])),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outlines_follow_the_steps_and_leave_out_nothing() {
        let drawn = outlines(&[0.0, 0.5, 0.5, 0.2, 0.0, 1.0]);
        let first = vec![(1.0, 0.5), (3.0, 0.5), (3.0, 0.2), (4.0, 0.2)];
        let second = vec![(5.0, 1.0), (6.0, 1.0)];
        assert_eq!(drawn, [(1.0, first), (5.0, second)]);
        assert!(outlines(&[0.0]).is_empty());
    }

    #[test]
    fn percentages_are_plain() {
        let shown = [1.0, 0.1, 0.01, 0.0001, 0.000001].map(|s| percent(&s));
        assert_eq!(shown, ["100%", "10%", "1%", "0.01%", "0.0001%"]);
    }

    #[test]
    fn a_long_legend_takes_several_rows() {
        let entry = |n: usize| ("x".repeat(n), INK);
        let places = legend_places(&[entry(10), entry(10), entry(100), entry(1)], 300);
        assert_eq!(places, [(16, 0), (136, 0), (16, 20), (16, 40)]);
    }
}
