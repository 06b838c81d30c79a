// SPDX-License-Identifier: GPL-2.0-or-later
//! Fills the page's template.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::iter::once;
use std::ops::Range;

use anyhow::Result;
use mountain::measure::stats::ascending;
use mountain::report::page::{
    escape, figure, fill, legend, shortened, styles, table_head, table_row,
};
use mountain::report::plots::{self as draw, Line, RGBColor, Share};
use mountain::report::series;
use mountain_lab::result::{cell_parts, row_label, Metric, RunResult};

use super::{plots, DrawnSegment, PlotData};

const TEMPLATE: &str = include_str!("template.html");
type Points = Vec<(f64, f64)>;

const HISTOGRAM_BINS: usize = 100;

/// The whole page.
pub fn render(result: &RunResult, samples: &PlotData) -> Result<String> {
    let columns = result.columns();
    // In the order of the table; a policy without figures (all void) is not drawn.
    let is_drawn = |policy: &&String| {
        let mut segments = samples.segments.iter();
        segments.any(|s| s.policy == **policy && !s.packets.is_empty())
    };
    let drawn: Vec<String> = columns.iter().filter(is_drawn).cloned().collect();
    let coloured = |p: &String| (p.clone(), plots::policy_colour(p, &columns));
    let legend = legend(drawn.iter().map(coloured));
    let (tail, cdf, histogram) = distributions(samples, &drawn, &columns)?;
    let (timelines, note) = timelines(samples, &drawn, &columns)?;
    let s = if result.repeats == 1 { "" } else { "s" };
    let git = result.git.as_ref();
    let git = git.map_or(String::new(), |g| format!(" ({g})"));
    let subtitle = format!(
        "{} · {} repeat{s} · seed {} · mountain {}{git}",
        result.started, result.repeats, result.seed, result.version
    );
    let parts: [(&str, String); 16] = [
        ("title", escape(&format!("Scenario {}", result.scenario))),
        ("subtitle", escape(&subtitle)),
        ("styles", styles()),
        ("checks", checks(result)),
        ("table", table(result, &columns)),
        ("timeline_note", escape(&note)),
        ("path_legend", path_legend(samples)),
        ("timelines", timelines),
        ("legend", legend),
        ("tail", tail),
        ("cdf", cdf),
        ("histogram", histogram),
        ("emulator", emulator(result)),
        ("void", void(result)),
        ("environment", environment(result)),
        ("command", escape(&result.command)),
    ];
    Ok(fill(TEMPLATE, &parts))
}

fn path_legend(samples: &PlotData) -> String {
    let kinds = samples.events.iter();
    let kinds = kinds.map(|(_, e)| (e.path, crate::name_of(&e.kind)));
    let kinds = kinds.collect::<BTreeSet<_>>().into_iter();
    let named = samples.paths.iter().zip(draw::PARTS.iter().cycle());
    let paths = named.map(|(name, colour)| (format!("packets on {name}"), *colour));
    let events = kinds.map(|(path, kind)| {
        let colour = draw::SHADES[path % draw::SHADES.len()];
        (format!("{kind} on {}", samples.paths[path]), colour)
    });
    let lost = once(("arrived nowhere".to_owned(), draw::LOST));
    legend(paths.chain(lost).chain(events))
}

fn table(result: &RunResult, columns: &[String]) -> String {
    let head = table_head(columns.iter().map(|policy| escape(policy)));
    let rows = result.rows().into_iter().map(|name| {
        let of = |policy: &String| result.metric(policy, &name);
        let cells = columns.iter().map(|policy| match of(policy) {
            Some(metric) => cell(metric),
            None => "<td>–</td>".to_owned(),
        });
        table_row("", &row_label(&name), cells)
    });
    head + &body(rows)
}

/// A table after its head.
fn body(rows: impl Iterator<Item = String>) -> String {
    rows.collect::<String>() + "</tbody></table>"
}

fn cell(metric: &Metric) -> String {
    let (figure, detail) = cell_parts(metric);
    let (figure, detail) = (escape(&figure), escape(&detail));
    format!("<td><strong>{figure}</strong><small>{detail}</small></td>")
}

/// A list of items, each with its class.
fn list(items: impl Iterator<Item = (&'static str, String)>) -> String {
    let item = |(class, text): (&str, String)| {
        let text = escape(&text);
        format!("<li class=\"{class}\">{text}</li>")
    };
    format!("<ul>{}</ul>", items.map(item).collect::<String>())
}

fn checks(result: &RunResult) -> String {
    if result.checks.is_empty() {
        return "<p>This run promises no figures.</p>".to_owned();
    }
    let items = result.checks.iter().map(|check| {
        let class = match check.met {
            _ if check.is_open() => "open",
            Some(true) => "met",
            _ => "missed",
        };
        (class, check.to_string())
    });
    let why = escape(&result.shortness());
    format!("{}<p>{why}</p>", list(items))
}

fn emulator(result: &RunResult) -> String {
    if result.emulator.is_empty() {
        return "<p>No emulator figures were recorded.</p>".to_owned();
    }
    let rows = result.emulator.iter();
    let rows = rows.map(|(name, metric)| table_row("", &row_label(name), once(cell(metric))));
    format!("<table><tbody>{}", body(rows))
}

fn void(result: &RunResult) -> String {
    if result.void.is_empty() {
        return "<p>No run was void.</p>".to_owned();
    }
    let lines = result.void.iter().map(|v| {
        let line = format!("{}, repeat {}: {}", v.policy, v.repeat, v.reason);
        ("missed", line)
    });
    list(lines)
}

fn environment(result: &RunResult) -> String {
    let machine = [("kernel", &result.kernel), ("cpu", &result.cpu)];
    let machine = machine.map(|(name, value)| (name.to_owned(), value.clone()));
    let others = result.environment.iter().map(|(name, value)| {
        let text = value.as_str().map(str::to_owned);
        (name.clone(), text.unwrap_or_else(|| value.to_string()))
    });
    let rows = machine.into_iter().chain(others).map(|(name, value)| {
        let value = shortened(&value, "result.json");
        table_row("", &name, once(format!("<td class=\"wrap\">{value}</td>")))
    });
    format!("<table><tbody>{}", body(rows))
}

fn distributions(
    samples: &PlotData,
    drawn: &[String],
    columns: &[String],
) -> Result<(String, String, String)> {
    let rtts = |policy: &String| {
        let own = samples.segments.iter().filter(|s| s.policy == *policy);
        let packets = own.flat_map(|s| &s.packets);
        let rtts = ascending(packets.filter_map(|p| p.rtt_us.map(f64::from)));
        (!rtts.is_empty()).then(|| (plots::policy_colour(policy, columns), rtts))
    };
    let sorted: Vec<(RGBColor, Vec<f64>)> = drawn.iter().filter_map(rtts).collect();
    if sorted.is_empty() {
        let none = "<p>No packet was answered.</p>".to_owned();
        return Ok((none.clone(), none.clone(), none));
    }
    let lines = |points: &dyn Fn(&[f64]) -> Points| -> Vec<Line> {
        let line = |(colour, r): &(RGBColor, Vec<f64>)| Line {
            colour: *colour,
            points: points(r),
        };
        sorted.iter().map(line).collect()
    };
    let ms = |us: f64| us.max(1.0) / 1e3;
    let slowest = sorted.iter().map(|(_, r)| r[r.len() - 1]);
    let max_ms = ms(slowest.fold(0.0, f64::max));
    let min_ms = ms(sorted.iter().map(|(_, r)| r[0]).fold(f64::MAX, f64::min));
    // One outlier must not squeeze the body into a line: the CDF ends at the worst p99.5.
    let p995 = sorted.iter().map(|(_, r)| r[(r.len() - 1) * 995 / 1000]);
    let body_ms = ms(p995.fold(0.0, f64::max));
    let n = sorted.iter().map(|(_, r)| r.len()).max().unwrap_or(1) as u32;
    let from = (min_ms * 0.9).floor();
    let plot = |points: &dyn Fn(&[f64]) -> Points, share, x_ms: Range<f64>, label| {
        figure(|format| {
            let lines = lines(points);
            draw::distribution(&lines, share, x_ms.clone(), "packets", format, label)
        })
    };
    let tail = plot(
        &|r| series::tail(r, 220),
        Share::Above { floor: n },
        from..max_ms * 1.02,
        "Share of packets above a round-trip time, logarithmic, a line per policy",
    )?;
    let cdf = plot(
        &|r| series::cdf(r, 300),
        Share::Below,
        from..body_ms * 1.02,
        "Cumulative distribution of round-trip times, a line per policy",
    )?;
    let span_ms = 0.0..max_ms * 1.001;
    let steps = |r: &[f64]| {
        let bins = series::histogram(r, &span_ms, HISTOGRAM_BINS);
        draw::steps(&bins, &span_ms, Share::lowest(n))
    };
    let histogram = plot(
        &steps,
        Share::Within { floor: n },
        span_ms.clone(),
        "Histogram of round-trip times, a stepped line per policy",
    )?;
    Ok((tail, cdf, histogram))
}

/// The time-lines of the repeat that most policies took part in, and a note saying which.
fn timelines(samples: &PlotData, drawn: &[String], columns: &[String]) -> Result<(String, String)> {
    let repeats = samples.segments.iter().map(|s| s.repeat);
    let parts = |r: u32| {
        let with = |s: &&DrawnSegment| s.repeat == r && !s.packets.is_empty();
        samples.segments.iter().filter(with).count()
    };
    let Some(repeat) = repeats.max_by_key(|r| (parts(*r), std::cmp::Reverse(*r))) else {
        return Ok((String::new(), "No packets were recorded.".to_owned()));
    };
    let of_policy = |p: &String| {
        let mut all = samples.segments.iter();
        all.find(|s| s.policy == *p && s.repeat == repeat)
    };
    let segments: Vec<&DrawnSegment> = drawn.iter().filter_map(of_policy).collect();
    let packets = || {
        let each = segments.iter();
        each.flat_map(|s| s.packets.iter().map(move |p| (s, p)))
    };
    let times = || packets().map(|(s, p)| p.sent_ns.saturating_sub(s.start_ns));
    let from_ns = times().min().unwrap_or(0);
    let until_ns = times().max().unwrap_or(0).max(from_ns + 1);
    let slowest = packets().filter_map(|(_, p)| p.rtt_us).max();
    let max_us = slowest.unwrap_or(1_000);
    let (span, max_ms) = (from_ns..until_ns, f64::from(max_us) / 1e3 * 1.05);
    let mut out = String::new();
    for segment in segments {
        let colour = plots::policy_colour(&segment.policy, columns);
        let plot = plots::timeline(samples, segment, colour, &span, max_ms);
        let name = escape(&segment.policy);
        let label = format!("Round-trip time over time, {}", segment.policy);
        let plot = figure(|format| draw::timeline(&plot, format, &label))?;
        let _ = write!(out, "<h3>{name}</h3>{plot}");
    }
    let note = format!(
        "Repeat {repeat}. Lines: median of the packets on each path; band: fastest to slowest packet; gaps: nothing \
         was answered. Shaded: what the emulator did to a path. Strip: share of packets per path."
    );
    Ok((out, note))
}
