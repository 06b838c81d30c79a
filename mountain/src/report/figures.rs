// SPDX-License-Identifier: GPL-2.0-or-later
//! The figures of a report, ready to be drawn in any format.

use std::ops::Range;

use anyhow::Result;

use crate::measure::runfile::Cpu;
use crate::measure::stats::quantile;

use super::plots::{
    self, distribution, steps, Format, Line, RGBColor, Share, Strip, Timeline, BINS, LOG_FROM,
    LOST, PARTS,
};
use super::run::PreparedRun;
use super::series;

type Points = Vec<(f64, f64)>;
/// Draws a plot; the text is a label for who cannot see.
type Draw = dyn Fn(Format, &str) -> Result<String>;

const HISTOGRAM_BINS: usize = 100;
/// Steps of a strip: about four pixels each.
const STEPS: usize = 220;
/// More strips than this would only be scrolled past.
const CPUS: usize = 8;
/// The same where more than two runs are drawn.
const CPUS_OF_MANY: usize = 3;
/// A step with one loss in 1,000 still has to be seen.
const LEAST_LOSS: f64 = 0.15;
/// The kinds of CPU time, in the run file's order, without idle.
const KINDS: [&str; 5] = ["user", "system", "softirq", "irq", "steal"];

/// The section of the page that a figure belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PageSection {
    Timeline,
    Tail,
    Cdf,
    /// Each zoom is a figure of its own.
    Histogram,
}

/// One plot.
pub(crate) struct Plot {
    pub place: PageSection,
    /// Name of its files, without the ending.
    pub file: String,
    /// The heading in a file of its own, and of its part of the page.
    pub title: String,
    /// In a file of its own.
    legend: Vec<(String, RGBColor)>,
    content: Box<Draw>,
}

impl Plot {
    /// The plot for the page.
    pub(crate) fn draw(&self, format: Format) -> Result<String> {
        (self.content)(format, &self.title)
    }

    /// The plot for a file of its own, with title and legend.
    pub(crate) fn alone(&self) -> Result<String> {
        let format = Format {
            header: Some((&self.title, &self.legend)),
            ..Format::WIDE
        };
        self.draw(format)
    }
}

/// The kinds of CPU time with their colours.
pub(crate) fn cpu_legend() -> impl Iterator<Item = (String, RGBColor)> {
    KINDS.iter().map(|k| (*k).to_owned()).zip(PARTS)
}

/// The runs that have a distribution.
pub(crate) fn answered<'a>(
    runs: &'a [PreparedRun<'a>],
) -> impl Iterator<Item = &'a PreparedRun<'a>> {
    runs.iter().filter(|r| !r.sorted.is_empty())
}

/// All figures of a report; without any answer there are only the time-lines.
pub(crate) fn all(runs: &[PreparedRun]) -> Vec<Plot> {
    let extremes = extremes_ms(runs);
    let mut figures = timelines(runs, &extremes);
    if let Some(extremes) = extremes {
        figures.extend(distributions(runs, &extremes));
    }
    figures
}

/// Smallest and largest RTT of all runs.
fn extremes_ms(runs: &[PreparedRun]) -> Option<Range<f64>> {
    let ends = |r: &PreparedRun| (r.sorted[0] / 1e3, r.sorted[r.sorted.len() - 1] / 1e3);
    let wider = |(a, b): (f64, f64), (c, d): (f64, f64)| (a.min(c), b.max(d));
    let (min, max) = answered(runs).map(ends).reduce(wider)?;
    Some(min..max)
}

/// A range with a little room around it that is never empty.
fn room(range: Range<f64>) -> Range<f64> {
    let margin = (range.end - range.start) * 0.02 + range.end.abs() * 1e-3 + 1e-6;
    let start = (range.start - margin).max(if range.start >= 0.0 {
        range.start * 0.9
    } else {
        f64::MIN
    });
    start..range.end + margin
}

fn distributions(runs: &[PreparedRun], extremes: &Range<f64>) -> Vec<Plot> {
    let n = answered(runs).map(|r| r.sorted.len()).max().unwrap_or(1) as u32;
    let lines = |points: &dyn Fn(&[f64]) -> Points| -> Vec<Line> {
        answered(runs)
            .map(|r| Line {
                colour: r.colour,
                points: points(&r.sorted),
            })
            .collect()
    };
    // Over all runs: the lowest and the highest of a quantile, ms.
    let at = |p: f64| {
        let all = || answered(runs).filter_map(move |r| quantile(&r.sorted, p));
        let (low, high) = (
            all().fold(f64::MAX, f64::min),
            all().fold(f64::MIN, f64::max),
        );
        (low / 1e3, high / 1e3)
    };
    let figure = |place, file: &str, title: &str, lines: Vec<Line>, share, x_ms: Range<f64>| Plot {
        place,
        file: file.into(),
        title: title.into(),
        legend: answered(runs).map(|r| (r.name.clone(), r.colour)).collect(),
        content: Box::new(move |format, label| {
            distribution(&lines, share, x_ms.clone(), "probes", format, label)
        }),
    };
    let zooms = [
        ("histogram", "Histogram: everything", extremes.clone()),
        (
            "histogram-body",
            "Histogram: P1 to P99",
            at(0.01).0..at(0.99).1,
        ),
        (
            "histogram-tail",
            "Histogram: from P99 on",
            at(0.99).0..extremes.end,
        ),
    ];
    let mut figures = vec![
        figure(
            PageSection::Tail,
            "tail",
            "Tail: share of probes slower than…",
            lines(&|r| series::tail(r, 220)),
            Share::Above { floor: n },
            room(extremes.clone()),
        ),
        figure(
            PageSection::Cdf,
            "cdf",
            "Cumulative distribution, up to P99.5",
            lines(&|r| series::cdf(r, 400)),
            Share::Below,
            room(extremes.start..at(0.995).1),
        ),
    ];
    figures.extend(zooms.map(|(file, title, span)| {
        let span = room(span);
        let stepped = |r: &[f64]| {
            let bins = series::histogram(r, &span, HISTOGRAM_BINS);
            steps(&bins, &span, Share::lowest(n))
        };
        let lines = lines(&stepped);
        figure(
            PageSection::Histogram,
            file,
            title,
            lines,
            Share::Within { floor: n },
            span.clone(),
        )
    }));
    figures
}

/// One time-line a run, all with the same axes.
fn timelines(runs: &[PreparedRun], extremes: &Option<Range<f64>>) -> Vec<Plot> {
    let until_s = runs
        .iter()
        .map(PreparedRun::until_s)
        .fold(0.0, f64::max)
        .max(1e-3);
    let range_ms = match extremes {
        // The variation is what is looked for: from 0 on only if it is not pressed flat thereby.
        Some(e) if e.start > 0.0 && (e.start > e.end * 0.3 || e.start * LOG_FROM < e.end) => {
            room(e.clone())
        }
        Some(e) => e.start.min(0.0)..room(e.clone()).end,
        None => 0.0..1.0,
    };
    let span_ns = 0..(until_s * 1e9) as u64 + 1;
    let timeline = |(i, run): (usize, &PreparedRun)| {
        let samples = &run.file.samples;
        let rtts = samples.sent_us.iter().zip(&samples.rtt_us);
        let rtts = rtts.filter_map(|(at_us, rtt)| rtt.map(|rtt| ((at_us * 1e3) as u64, rtt)));
        let mut strips = vec![Strip {
            name: "lost".into(),
            colours: vec![LOST],
            columns: losses(run, &span_ns),
        }];
        let most = if runs.len() > 2 { CPUS_OF_MANY } else { CPUS };
        strips.extend(cpus(&run.file.cpu, until_s * 1e6, most));
        let mut legend = vec![(run.name.clone(), run.colour)];
        legend.push(("lost; outliers ringed".into(), LOST));
        if strips.len() > 1 {
            legend.extend(cpu_legend());
        }
        let bins = series::timeline(rtts, &span_ns, BINS);
        let timeline = Timeline {
            span_s: 0.0..until_s,
            range_ms: range_ms.clone(),
            shades: Vec::new(),
            lines: vec![(run.colour, bins.clone())],
            band: bins,
            marks: run.marks.clone(),
            strips,
        };
        Plot {
            place: PageSection::Timeline,
            file: format!("timeline-{}", i + 1),
            title: format!("Round-trip time over time: {}", run.name),
            legend,
            content: Box::new(move |format, label| plots::timeline(&timeline, format, label)),
        }
    };
    runs.iter().enumerate().map(timeline).collect()
}

/// Share of lost probes in each step.
fn losses(run: &PreparedRun, span_ns: &Range<u64>) -> Vec<Vec<f64>> {
    let width_ns = series::width(span_ns, STEPS);
    let mut counts = vec![(0u32, 0u32); STEPS];
    let samples = &run.file.samples;
    for (at_us, rtt) in samples.sent_us.iter().zip(&samples.rtt_us) {
        let step = ((at_us * 1e3) as u64 / width_ns) as usize;
        if let Some((lost, sent)) = counts.get_mut(step) {
            *sent += 1;
            *lost += u32::from(rtt.is_none());
        }
    }
    let share = |(lost, sent): (u32, u32)| match lost {
        0 => 0.0,
        _ => (f64::from(lost) / f64::from(sent)).max(LEAST_LOSS),
    };
    counts.into_iter().map(|c| vec![share(c)]).collect()
}

fn busy(shares: &[f32; 6]) -> f32 {
    shares[..KINDS.len()].iter().sum()
}

/// A strip for each CPU; for many, their mean and those that were busiest at some moment.
fn cpus(cpu: &Cpu, until_us: f64, most: usize) -> Vec<Strip> {
    if cpu.is_empty() {
        return Vec::new();
    }
    let strip = |name: String, shares: &[[f32; 6]]| Strip {
        name,
        colours: PARTS[..KINDS.len()].to_vec(),
        columns: busiest(&cpu.at_us, shares, until_us),
    };
    let mut shown: Vec<usize> = (0..cpu.shares.len()).collect();
    let mut strips = Vec::new();
    if shown.len() > most {
        let peak = |i: &usize| cpu.shares[*i].iter().map(busy).fold(0.0, f32::max);
        shown.sort_by(|a, b| peak(b).total_cmp(&peak(a)));
        shown.truncate(most);
        shown.sort_unstable();
        let mean = |t: usize| {
            let mut sum = [0f32; 6];
            for shares in cpu.shares.iter().filter_map(|s| s.get(t)) {
                sum.iter_mut().zip(shares).for_each(|(s, v)| *s += v);
            }
            sum.map(|s| s / cpu.shares.len() as f32)
        };
        let all: Vec<[f32; 6]> = (0..cpu.at_us.len()).map(mean).collect();
        strips.push(strip("CPUs".into(), &all));
    }
    strips.extend(
        shown
            .into_iter()
            .map(|i| strip(format!("CPU {}", cpu.number(i)), &cpu.shares[i])),
    );
    strips
}

/// In each step of the time axis the busiest of the intervals that reach into it.
fn busiest(ends_us: &[f64], shares: &[[f32; 6]], until_us: f64) -> Vec<Vec<f64>> {
    let n = ends_us.len().min(shares.len());
    let ends_us = &ends_us[..n];
    let width_us = until_us / STEPS as f64;
    let column = |step: usize| {
        let (from, until) = (step as f64 * width_us, (step + 1) as f64 * width_us);
        let first = ends_us.partition_point(|&end| end <= from);
        (first..n)
            .take_while(|&i| i == 0 || ends_us[i - 1] < until)
            .map(|i| &shares[i])
            .max_by(|a, b| busy(a).total_cmp(&busy(b)))
            .map_or_else(Vec::new, |s| {
                s[..KINDS.len()].iter().map(|v| f64::from(*v)).collect()
            })
    };
    (0..STEPS).map(column).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_shows_its_busiest_interval() {
        let mut shares = vec![[0.1, 0.0, 0.0, 0.0, 0.0, 0.9]; 2_200];
        shares[1_003] = [0.2, 0.3, 0.4, 0.1, 0.0, 0.0];
        let ends: Vec<f64> = (1..=2_200).map(|i| f64::from(i) * 1e6).collect();
        let columns = busiest(&ends, &shares, 2_200e6);
        assert_eq!(columns.len(), STEPS);
        let sums: Vec<f64> = columns.iter().map(|c| c.iter().sum()).collect();
        assert!((sums[100] - 1.0).abs() < 1e-6 && (sums[101] - 0.1).abs() < 1e-6);
        // Intervals longer than a step fill several; after the last there is nothing.
        let columns = busiest(&[5e6, 10e6], &shares[1_003..1_005], 20e6);
        assert!((columns[54].iter().sum::<f64>() - 1.0).abs() < 1e-6);
        assert!((columns[56].iter().sum::<f64>() - 0.1).abs() < 1e-6);
        assert!(columns[111].is_empty());
    }

    #[test]
    fn of_many_cpus_the_busiest_are_shown() {
        let idle = vec![[0.0, 0.0, 0.0, 0.0, 0.0, 1.0]];
        let mut cpu = Cpu {
            accounting: "tick".into(),
            at_us: vec![1e6],
            shares: vec![idle; 32],
            numbers: (0..32).map(|i| 2 * i).collect(),
        };
        cpu.shares[17][0] = [0.0, 0.0, 0.9, 0.0, 0.0, 0.1];
        let strips = cpus(&cpu, 1e6, CPUS);
        let names: Vec<&str> = strips.iter().map(|s| s.name.as_str()).collect();
        assert_eq!(names.len(), CPUS + 1);
        assert!(names[0] == "CPUs" && names.contains(&"CPU 34"), "{names:?}");
        // A CPU without figures (a file by another program) draws nothing.
        cpu.shares = vec![Vec::new()];
        cpu.numbers.clear();
        let strips = cpus(&cpu, 1e6, CPUS);
        assert!(strips[0].name == "CPU 0" && strips[0].columns.iter().all(Vec::is_empty));
        assert!(cpus(&Cpu::default(), 1e6, CPUS).is_empty());
    }

    #[test]
    fn axes_are_never_empty() {
        for range in [0.0..0.0, 5.0..5.0, -1.0..-1.0, 0.2..900.0] {
            let wide = room(range.clone());
            let is_wider = wide.start <= range.start && wide.end > range.end;
            assert!(is_wider, "{wide:?}");
            assert!(range.start < 0.0 || wide.start >= 0.0, "{wide:?}");
        }
        assert!(room(0.2..900.0).start > 0.0, "fit for a logarithm");
    }
}
