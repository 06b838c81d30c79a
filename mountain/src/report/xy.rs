// SPDX-License-Identifier: GPL-2.0-or-later
//! One quantity over another, as lines and points: what has no time-line or distribution of its own.

use std::ops::Range;

use anyhow::Result;
use plotters::prelude::*;

use super::plots::{draw, lines_over, plain, text, Axis, Format, Line, RGBColor};

/// Height, pixels.
const HEIGHT: u32 = 380;

/// A point with a mark of its own.
#[derive(Debug, Clone)]
pub struct Point {
    /// Of the mark and the name.
    pub colour: RGBColor,
    /// Its place, x and y.
    pub at: (f64, f64),
    /// Stands beside it; may be empty.
    pub name: String,
}

/// What is drawn.
#[derive(Debug, Clone, Default)]
pub struct Xy {
    /// Stands below the x axis.
    pub x_title: String,
    /// Stands beside the y axis.
    pub y_title: String,
    /// Logarithmic if it begins above 0 and is long.
    pub x: Range<f64>,
    /// Always linear.
    pub y: Range<f64>,
    /// Drawn in this order.
    pub lines: Vec<Line>,
    /// Drawn above the lines.
    pub points: Vec<Point>,
}

/// The plot; `label` is for who cannot see.
pub fn xy(plot: &Xy, format: Format, label: &str) -> Result<String> {
    draw(format, HEIGHT, label, |root| {
        let axes = [Axis::of(plot.x.clone()), Axis::linear(plot.y.clone())];
        let titles = [plot.x_title.as_str(), &plot.y_title];
        let mut chart = lines_over(root, &plot.lines, axes, titles, &plain, format)?;
        let marks = plot
            .points
            .iter()
            .map(|p| Circle::new(p.at, 4, p.colour.filled()));
        chart.draw_series(marks).map_err(text)?;
        let named = plot.points.iter().filter(|p| !p.name.is_empty());
        let names = named.map(|p| {
            EmptyElement::at(p.at)
                + Text::new(
                    p.name.clone(),
                    (6, -14),
                    ("sans-serif", 10).into_font().color(&p.colour),
                )
        });
        chart.draw_series(names).map_err(text)?;
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::super::plots::{hex, SERIES};
    use super::*;

    #[test]
    fn lines_points_and_titles_are_there() {
        let mut plot = Xy {
            x_title: "delay, ms".into(),
            y_title: "share, %".into(),
            x: 1.0..100.0,
            y: 0.0..100.0,
            lines: vec![Line {
                colour: SERIES[0],
                points: vec![(1.0, 5.0), (10.0, 50.0)],
            }],
            points: vec![Point {
                colour: SERIES[1],
                at: (10.0, 50.0),
                name: "cell".into(),
            }],
        };
        let svg = xy(&plot, Format::WIDE, "what it shows").unwrap();
        for part in [
            "delay, ms",
            "share, %",
            "what it shows",
            "cell",
            &hex(SERIES[0]),
            "<circle",
        ] {
            assert!(svg.contains(part), "{part}: {svg}");
        }
        // Ten is in the middle of a logarithmic axis, and near the start of an equal one.
        let at = |svg: &str| -> f64 {
            let circle = svg.split("<circle cx=\"").nth(1).unwrap();
            circle.split('"').next().unwrap().parse().unwrap()
        };
        let middle = at(&svg);
        plot.x = 0.0..100.0;
        let svg = xy(&plot, Format::WIDE, "").unwrap();
        assert!(at(&svg) < middle / 2.0, "{} {middle}", at(&svg));
        plot.lines.clear();
        assert!(!xy(&plot, Format::WIDE, "")
            .unwrap()
            .contains(&hex(SERIES[0])));
    }
}
