// SPDX-License-Identifier: GPL-2.0-or-later
//! The plots of the bench: throughput against delay, and the time-lines of the rate steps.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::Result;
use mountain::report::page::standalone;
use mountain::report::plots::{Format, Line, RGBColor, INK, SERIES};
use mountain::report::xy::{xy, Point, Xy};
use mountain_lab::result::{write_atomically, RunResult};
use mountain_lab::workload::stats::median;

use super::cells::{Cell, CellKind, STEP_US};
use super::evaluate::CcSegment;
use super::flows::BUCKET_US;
use super::Cc;

/// Resolution of a time-line's queue.
const QUEUE_STEP_US: u64 = 50_000;
/// No delay below this has a place on a logarithmic axis, ms.
const LEAST_MS: f64 = 0.1;
/// How much of a step's run is shown: before it and after it, µs.
const BEFORE_US: u64 = 2_000_000;
const AFTER_US: u64 = 6_000_000;

/// One run of a step cell.
struct Seen {
    /// Mbit/s in each bucket.
    rate: Vec<f64>,
    /// ms, at each step of time.
    queue: Vec<f64>,
}

/// The step cells, by name and congestion control, over all repeats.
#[derive(Default)]
pub struct Steps(BTreeMap<(String, Cc), Vec<Seen>>);

impl Steps {
    /// Keeps what the time-line needs, where the cell is a rate step.
    pub fn add(&mut self, cell: &Cell, cc: Cc, segment: &CcSegment) {
        if !matches!(cell.kind, CellKind::Step(..)) {
            return;
        }
        let (first, last) = span();
        let rate = (first / BUCKET_US..last / BUCKET_US)
            .map(|bucket| {
                let of = |bytes: &Vec<u64>| bytes.get(bucket as usize).copied().unwrap_or(0);
                let bytes: u64 = segment.flows.iter().map(|f| of(&f.bytes)).sum();
                bytes as f64 * 8.0 / BUCKET_US as f64
            })
            .collect();
        let queue = segment.link.queue_us(first, last);
        let queue = queue
            .chunks((QUEUE_STEP_US / 1_000) as usize)
            .map(|ms| f64::from(ms.iter().copied().max().unwrap_or(0)) / 1e3)
            .collect();
        let key = (cell.name.to_owned(), cc);
        self.0.entry(key).or_default().push(Seen { rate, queue });
    }

    fn of<'a>(&'a self, cell: &'a str) -> impl Iterator<Item = (Cc, &'a Vec<Seen>)> {
        let these = self.0.iter().filter(move |((name, _), _)| name == cell);
        these.map(|((_, cc), seen)| (*cc, seen))
    }
}

fn span() -> (u64, u64) {
    (STEP_US - BEFORE_US, STEP_US + AFTER_US)
}

fn colour(cc: Cc) -> RGBColor {
    let all = [
        Cc::Mountain,
        Cc::Bbr,
        Cc::Published,
        Cc::Cubic,
        Cc::Reno,
        Cc::Wrapped,
    ];
    let at = all.iter().position(|c| *c == cc).unwrap_or(0);
    SERIES[at]
}

fn legend(all: &[Cc]) -> Vec<(String, RGBColor)> {
    all.iter().map(|c| (c.name(), colour(*c))).collect()
}

/// What the legend says of one that has no point or line, because all its repeats are void: without it
/// the plot would look as if nobody had asked for it. `what` it is: its name, before that the cell's.
fn void(what: &str, cc: Cc) -> (String, RGBColor) {
    (format!("void: {what}"), colour(cc))
}

/// The least and the most of some values, if there are any.
fn ends(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    let ends = values.map(|v| (v, v));
    ends.reduce(|(l, m), (v, _)| (l.min(v), m.max(v)))
}

/// Ends of an axis that shows all values, with room.
fn around(values: impl Iterator<Item = f64>) -> Range<f64> {
    let Some((least, most)) = ends(values.filter(|v| v.is_finite())) else {
        return 0.0..1.0;
    };
    let room = ((most - least) * 0.05).max(1e-3);
    (least - room).max(0.0)..most + room
}

/// The 1-sigma ellipse of points: where the square of the distance from their mean, measured in
/// their own covariance, is 1. Fewer than three points have none.
fn ellipse(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let n = points.len() as f64;
    if n < 3.0 {
        return Vec::new();
    }
    let mean = |f: fn(&(f64, f64)) -> f64| points.iter().map(f).sum::<f64>() / n;
    let (mx, my) = (mean(|p| p.0), mean(|p| p.1));
    let (mut xx, mut yy, mut xy) = (0.0, 0.0, 0.0);
    for (x, y) in points {
        xx += (x - mx) * (x - mx) / (n - 1.0);
        yy += (y - my) * (y - my) / (n - 1.0);
        xy += (x - mx) * (y - my) / (n - 1.0);
    }
    // Cholesky's factor of the covariance makes the ellipse of the unit circle.
    let a = xx.sqrt();
    let b = if a > 0.0 { xy / a } else { 0.0 };
    let c = (yy - b * b).max(0.0).sqrt();
    (0..=72)
        .map(|i| {
            let (sin, cos) = (f64::from(i) * std::f64::consts::TAU / 72.0).sin_cos();
            (mx + a * cos, my + b * cos + c * sin)
        })
        .collect()
}

/// Median p95 queue (ms) and goodput (% of the link) of each cell in which both were measured.
fn medians(result: &RunResult, cells: &[Cell], cc: Cc) -> Vec<(&'static str, (f64, f64))> {
    let of = |cell: &Cell| {
        let delay = match cell.kind {
            CellKind::Step(..) => "onset_p95_us",
            _ => "queue_p95_us",
        };
        let get = |name: &str| {
            let metric = result.metric(&cc.name(), &format!("{}/{name}", cell.name))?;
            Some(metric.median).filter(|m| m.is_finite())
        };
        let (delay, goodput) = (get(delay)?, get("goodput")?);
        Some((cell.name, ((delay / 1e3).max(LEAST_MS), goodput * 100.0)))
    };
    cells.iter().filter_map(of).collect()
}

/// Throughput against p95 queueing delay: a point for each congestion control and cell, and for
/// each congestion control the 1-sigma ellipse over its cells, taken in the logarithm of the delay.
pub fn throughput_over_delay(result: &RunResult, cells: &[Cell], all: &[Cc]) -> Result<String> {
    let mut plot = Xy {
        x_title: "queueing delay, 95th percentile, ms (of a rate step: in the 2 s after it)".into(),
        y_title: "goodput, % of the link".into(),
        ..Xy::default()
    };
    let mut entries = legend(all);
    for cc in all {
        let points = medians(result, cells, *cc);
        let is_void = |cell: &&Cell| !points.iter().any(|(name, _)| *name == cell.name);
        for cell in cells.iter().filter(is_void) {
            entries.push(void(&format!("{} {}", cell.name, cc.name()), *cc));
        }
        let logs: Vec<_> = points.iter().map(|(_, (x, y))| (x.log10(), *y)).collect();
        let outline = ellipse(&logs).into_iter();
        plot.lines.push(Line {
            colour: colour(*cc),
            points: outline.map(|(x, y)| (10f64.powf(x), y)).collect(),
        });
        plot.points
            .extend(points.into_iter().map(|(name, at)| Point {
                colour: colour(*cc),
                at,
                // One name a cell is enough to read: that of the one looked at.
                name: if *cc == Cc::Mountain {
                    name.into()
                } else {
                    String::new()
                },
            }));
    }
    let on_lines = plot.lines.iter().flat_map(|l| l.points.iter().copied());
    let all_points: Vec<(f64, f64)> = on_lines.chain(plot.points.iter().map(|p| p.at)).collect();
    plot.y = around(all_points.iter().map(|p| p.1));
    let x = ends(all_points.iter().map(|p| p.0));
    plot.x = x.map_or(1.0..10.0, |(least, most)| least * 0.8..most * 1.25);
    let format = Format {
        header: Some((
            "Goodput and delay, medians of each cell; 1-sigma ellipses",
            &entries,
        )),
        ..Format::WIDE
    };
    xy(
        &plot,
        format,
        "Goodput over the 95th percentile of queueing delay",
    )
}

/// The median over repeats of each step of time.
fn middle(repeats: &[&Vec<f64>], from_us: u64, step_us: u64) -> Vec<(f64, f64)> {
    let steps = repeats.iter().map(|r| r.len()).min().unwrap_or(0);
    (0..steps)
        .map(|i| {
            let values: Vec<f64> = repeats.iter().map(|r| r[i]).collect();
            let t = (from_us as f64 + (i as f64 + 0.5) * step_us as f64 - STEP_US as f64) / 1e6;
            (t, median(&values))
        })
        .collect()
}

/// A step cell over time, medians over the repeats: goodput with the link's rate, and the queue. `all`
/// are those that were asked for: who was never seen is void.
pub fn step_over_time(steps: &Steps, cell: &Cell, all: &[Cc]) -> Result<[String; 2]> {
    let (first, last) = span();
    let seconds = |t_us: u64| (t_us as f64 - STEP_US as f64) / 1e6;
    let (mut rate, mut queue) = (Vec::new(), Vec::new());
    let mut drawn = Vec::new();
    for (cc, seen) in steps.of(cell.name) {
        let (rates, queues): (Vec<_>, Vec<_>) = seen.iter().map(|s| (&s.rate, &s.queue)).unzip();
        let colour = colour(cc);
        rate.push(Line {
            colour,
            points: middle(&rates, first, BUCKET_US),
        });
        queue.push(Line {
            colour,
            points: middle(&queues, first, QUEUE_STEP_US),
        });
        drawn.push(cc);
    }
    if let (CellKind::Step(before, after), false) = (cell.kind, drawn.is_empty()) {
        let corners = [
            (first, before),
            (STEP_US, before),
            (STEP_US, after),
            (last, after),
        ];
        rate.push(Line {
            colour: INK,
            points: corners.map(|(t, mbit)| (seconds(t), mbit)).into(),
        });
    }
    let draw = |lines: Vec<Line>, y_title: &str, link: bool| {
        let top = around(lines.iter().flat_map(|l| l.points.iter().map(|p| p.1))).end;
        let plot = Xy {
            x_title: "s after the step".into(),
            y_title: y_title.into(),
            x: seconds(first)..seconds(last),
            y: 0.0..top,
            lines,
            points: Vec::new(),
        };
        let mut entries = legend(&drawn);
        if link {
            entries.push(("link".into(), INK));
        }
        let missing = all.iter().filter(|cc| !drawn.contains(cc));
        entries.extend(missing.map(|cc| void(&cc.name(), *cc)));
        let title = format!("{}: {y_title}, medians over the repeats", cell.name);
        let format = Format {
            header: Some((&title, &entries)),
            ..Format::WIDE
        };
        xy(&plot, format, &title)
    };
    Ok([
        draw(rate, "goodput, Mbit/s", true)?,
        draw(queue, "queueing delay, ms", false)?,
    ])
}

/// Writes all plots of a run; their paths.
pub fn write(
    out: &Path,
    result: &RunResult,
    cells: &[Cell],
    all: &[Cc],
    steps: &Steps,
) -> Result<Vec<PathBuf>> {
    let mut written = Vec::new();
    let mut file = |name: String, svg: &str| -> Result<()> {
        let path = out.join(name);
        write_atomically(&path, standalone(svg).as_bytes())?;
        written.push(path);
        Ok(())
    };
    let svg = throughput_over_delay(result, cells, all)?;
    file("throughput-delay.svg".into(), &svg)?;
    let is_step = |cell: &&Cell| matches!(cell.kind, CellKind::Step(..));
    for cell in cells.iter().filter(is_step) {
        let [rate, queue] = step_over_time(steps, cell, all)?;
        file(format!("{}-rate.svg", cell.name), &rate)?;
        file(format!("{}-queue.svg", cell.name), &queue)?;
    }
    Ok(written)
}

#[cfg(test)]
mod tests {
    use mountain::report::plots::hex;
    use mountain_lab::workload::metrics::{put, Figures};

    use super::super::flows::CcFlowReport;
    use super::*;
    use crate::emulate::link::LinkReport;

    fn figures(cell: &str, delay_us: f64, goodput: f64) -> Figures {
        let delay = match cell.starts_with("step") {
            true => "onset_p95_us",
            false => "queue_p95_us",
        };
        let mut all = Figures::new();
        put(&mut all, &format!("{cell}/{delay}"), "us", delay_us, 1);
        put(&mut all, &format!("{cell}/goodput"), "ratio", goodput, 1);
        all
    }

    fn cells() -> Vec<Cell> {
        let names = ["step-50-10", "slow", "fast", "deep"];
        names.map(|n| Cell::find(n).unwrap()).into()
    }

    #[test]
    fn an_ellipse_goes_around_its_points() {
        let square = [(0.0, 0.0), (2.0, 0.0), (0.0, 2.0), (2.0, 2.0)];
        let outline = ellipse(&square);
        // Their deviation is sqrt(4/3) each way, without correlation: a circle.
        for (x, y) in outline {
            let radius = ((x - 1.0).powi(2) + (y - 1.0).powi(2)).sqrt();
            assert!((radius - (4f64 / 3.0).sqrt()).abs() < 1e-9);
        }
        assert!(ellipse(&square[..2]).is_empty());
        // All on a line: as flat as one.
        let line = ellipse(&[(0.0, 0.0), (1.0, 2.0), (2.0, 4.0)]);
        assert!(line.iter().all(|(x, y)| (y - 2.0 * x).abs() < 1e-9));
    }

    #[test]
    fn every_control_and_cell_has_its_point() {
        let cells = cells();
        let mut result = RunResult::new("cc", "", 1, 1);
        for (i, cell) in cells.iter().enumerate() {
            let i = i as f64;
            result.add(
                "mountain",
                0,
                &figures(cell.name, 1e4 + 1e4 * i, 0.9 + i / 100.0),
            );
            result.add("bbr", 0, &figures(cell.name, 1e5 + 1e4 * i, 0.95));
        }
        result.add("cubic", 0, &figures("slow", 1e5, 0.9));
        let all = [Cc::Mountain, Cc::Bbr, Cc::Cubic, Cc::Reno];
        let svg = throughput_over_delay(&result, &cells, &all).unwrap();
        assert_eq!(svg.matches("<circle").count(), 9, "{svg}");
        let lines = |cc| {
            let line = format!("stroke=\"{}\"", hex(colour(cc)));
            let lines = svg.split("<polyline").skip(1);
            lines
                .filter(|l| l.split('>').next().unwrap().contains(&line))
                .count()
        };
        assert_eq!((lines(Cc::Mountain), lines(Cc::Bbr)), (1, 1), "{svg}");
        assert_eq!(lines(Cc::Reno), 0, "it was not measured: {svg}");
        for cell in ["step-50-10", "slow", "fast", "deep"] {
            let told = |cc: &str| svg.contains(&format!("void: {cell} {cc}"));
            assert!(told("reno"), "{cell}: {svg}");
            assert_eq!(told("cubic"), cell != "slow", "{cell}: {svg}");
        }
        assert_eq!(svg.matches("void: ").count(), 4 + 3, "{svg}");
        for name in ["slow", "step-50-10", "mountain", "reno", "goodput"] {
            assert!(svg.contains(name), "{name}: {svg}");
        }
    }

    #[test]
    fn a_step_has_a_line_for_each_control_and_one_for_the_link() {
        let cells = cells();
        let mut steps = Steps::default();
        let segment = |cell: &Cell, mbit: u64| {
            let flow = CcFlowReport {
                bytes: vec![mbit * BUCKET_US / 8; 120],
                retransmits: 0,
            };
            let link = LinkReport {
                packets: vec![(0, 6_000_000)],
                ..Default::default()
            };
            CcSegment {
                plan: cell.plan(1, 12_000_000),
                length_us: 12_000_000,
                flows: vec![flow],
                link,
                ..CcSegment::default()
            }
        };
        for (cc, mbit) in [(Cc::Mountain, 9), (Cc::Bbr, 8), (Cc::Bbr, 10)] {
            steps.add(&cells[0], cc, &segment(&cells[0], mbit));
            steps.add(&cells[1], cc, &segment(&cells[1], mbit));
        }
        assert_eq!(steps.of("slow").count(), 0, "it is no step");
        let bbr = steps.of("step-50-10").find(|(cc, _)| *cc == Cc::Bbr);
        let rates: Vec<&Vec<f64>> = bbr.unwrap().1.iter().map(|s| &s.rate).collect();
        let line = middle(&rates, STEP_US, BUCKET_US);
        assert_eq!(line[0], (0.05, 9.0), "the median of the repeats");

        let dir = tempfile::tempdir().unwrap();
        let result = RunResult::new("cc", "", 1, 1);
        let written = write(
            dir.path(),
            &result,
            &cells,
            &[Cc::Mountain, Cc::Bbr],
            &steps,
        )
        .unwrap();
        let names: Vec<_> = written.iter().map(|p| p.file_name().unwrap()).collect();
        let expected = [
            "throughput-delay.svg",
            "step-50-10-rate.svg",
            "step-50-10-queue.svg",
        ];
        assert_eq!(names, expected);
        let all = [Cc::Mountain, Cc::Bbr, Cc::Cubic];
        let [rate, queue] = step_over_time(&steps, &cells[0], &all).unwrap();
        let drawn = |svg: &str, colour| {
            let stroke = format!("stroke=\"{}\" stroke-width=\"2\"", hex(colour));
            svg.matches(&stroke).count()
        };
        for cc in [Cc::Mountain, Cc::Bbr] {
            assert_eq!(
                (drawn(&rate, colour(cc)), drawn(&queue, colour(cc))),
                (1, 1),
                "{rate}"
            );
        }
        assert_eq!((drawn(&rate, INK), drawn(&queue, INK)), (1, 0), "{rate}");
        assert!(queue.contains("queueing delay, ms") && rate.contains("goodput, Mbit/s"));
        for svg in [&rate, &queue] {
            assert!(svg.contains("void: cubic"), "asked for, never seen: {svg}");
            assert_eq!(svg.matches("void: ").count(), 1, "{svg}");
        }
        // Nobody was seen: all that can be said is that.
        let [rate, queue] = step_over_time(&Steps::default(), &cells[0], &all).unwrap();
        for svg in [&rate, &queue] {
            assert_eq!(svg.matches("void: ").count(), 3, "{svg}");
        }
    }
}
