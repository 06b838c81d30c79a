//! Fills the page's template.

use std::fmt::Write as _;

use anyhow::Result;
use plotters::style::RGBColor;

use crate::result::{cell_parts, row_label, RunResult};

use super::plots::{self, hex, Line, Share, Timeline};
use super::{series, PathEvent, Samples, Segment};

const TEMPLATE: &str = include_str!("template.html");
type Points = Vec<(f64, f64)>;

const HISTOGRAM_BINS: usize = 100;

/// Each colour name of the plots with its value on light and on dark ground. Policies and paths are
/// told apart by people with any colour vision (after Okabe and Ito).
fn palette() -> Vec<(RGBColor, &'static str, &'static str)> {
    let mut colours = vec![
        (plots::INK, "#1d2329", "#e4e8ec"),
        (plots::GRID, "#e6eaed", "#2a3138"),
        (plots::LOST, "#b3261e", "#ff6b5e"),
    ];
    let events = [
        ("#f6e3d3", "#44301f"),
        ("#dde6f6", "#233450"),
        ("#e6f0dc", "#2b3b1f"),
    ];
    let paths = [
        ("#a8662a", "#d9a06a"),
        ("#3f74b5", "#7ba9e6"),
        ("#5f8f2e", "#9cc56a"),
        ("#a06fb0", "#bd8ccd"),
        ("#8d8d8d", "#a8a8a8"),
        ("#4aa3a3", "#63c4c4"),
    ];
    let policies = [
        ("#d55e00", "#ff8a3d"),
        ("#0068a8", "#56b4f5"),
        ("#6b7680", "#98a4af"),
        ("#00855f", "#2fce9d"),
        ("#b0528c", "#ea8fc4"),
        ("#a07d00", "#e6c14a"),
        ("#5b4bb5", "#a99bff"),
    ];
    let pairs = |names: &[RGBColor], values: &[(&'static str, &'static str)]| {
        names
            .iter()
            .zip(values)
            .map(|(n, (l, d))| (*n, *l, *d))
            .collect::<Vec<_>>()
    };
    colours.extend(pairs(&plots::EVENTS, &events));
    colours.extend(pairs(&plots::PATHS, &paths));
    colours.extend(pairs(&plots::POLICIES, &policies));
    colours
}

/// The whole page.
pub fn render(result: &RunResult, samples: &Samples) -> Result<String> {
    let columns = result.columns();
    // In the order of the table; a policy without figures (all void) is not drawn.
    let drawn: Vec<String> = columns
        .iter()
        .filter(|p| {
            samples
                .segments
                .iter()
                .any(|s| s.policy == **p && !s.packets.is_empty())
        })
        .cloned()
        .collect();
    let (light, dark, rules) = styles();
    let legend = legend(
        drawn
            .iter()
            .map(|p| (p.clone(), plots::policy_colour(p, &columns))),
    );
    let (tail, cdf, histogram) = distributions(samples, &drawn, &columns)?;
    let (timelines, note) = timelines(samples, &drawn, &columns)?;
    let subtitle = format!(
        "{} · {} repeat{} · seed {} · mountain {}{}",
        result.started,
        result.repeats,
        if result.repeats == 1 { "" } else { "s" },
        result.seed,
        result.version,
        result
            .git
            .as_ref()
            .map(|g| format!(" ({g})"))
            .unwrap_or_default()
    );
    let parts: [(&str, String); 18] = [
        ("title", escape(&format!("Scenario {}", result.scenario))),
        ("subtitle", escape(&subtitle)),
        ("light", light),
        ("dark", dark),
        ("rules", rules),
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

/// Replaces each `{{name}}`; what was filled in is not looked at again.
fn fill(template: &str, parts: &[(&str, String)]) -> String {
    let mut pieces = template.split("{{");
    let mut out = pieces.next().unwrap_or("").to_owned();
    for piece in pieces {
        let (name, rest) = piece.split_once("}}").unwrap_or(("", piece));
        if let Some((_, value)) = parts.iter().find(|(n, _)| *n == name) {
            out.push_str(value);
        }
        out.push_str(rest);
    }
    out
}

/// Text for HTML content and attributes.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c => out.push(c),
        }
    }
    out
}

/// Values of the colours on light and dark ground, and the rules that put them into the plots.
fn styles() -> (String, String, String) {
    let (mut light, mut dark, mut rules) = (String::new(), String::new(), String::new());
    for (colour, on_light, on_dark) in palette() {
        let name = hex(colour);
        let variable = format!("--c{}", &name[1..]);
        let _ = write!(light, "{variable}: {on_light}; ");
        let _ = write!(dark, "{variable}: {on_dark}; ");
        let _ = writeln!(
            rules,
            "svg [fill=\"{name}\"] {{ fill: var({variable}); }} \
             svg [stroke=\"{name}\"] {{ stroke: var({variable}); }}"
        );
    }
    (light, dark, rules)
}

fn legend(entries: impl Iterator<Item = (String, RGBColor)>) -> String {
    let mut out = String::from("<ul class=\"legend\">");
    for (name, colour) in entries {
        let variable = &hex(colour)[1..];
        let _ = write!(
            out,
            "<li><i style=\"background: var(--c{variable})\"></i>{}</li>",
            escape(&name)
        );
    }
    out.push_str("</ul>");
    out
}

fn path_legend(samples: &Samples) -> String {
    let mut kinds: Vec<(u8, &str)> = samples
        .events
        .iter()
        .map(|e| (e.path, e.kind.as_str()))
        .collect();
    kinds.sort_unstable();
    kinds.dedup();
    let path_name = |i: u8| {
        samples
            .paths
            .get(usize::from(i))
            .cloned()
            .unwrap_or(format!("path {i}"))
    };
    let paths = samples
        .paths
        .iter()
        .zip(plots::PATHS.iter().cycle())
        .map(|(name, colour)| (format!("packets on {name}"), *colour));
    let events = kinds.iter().map(|(path, kind)| {
        let colour = plots::EVENTS[usize::from(*path) % plots::EVENTS.len()];
        (format!("{kind} on {}", path_name(*path)), colour)
    });
    let lost = std::iter::once(("arrived nowhere".to_owned(), plots::LOST));
    legend(paths.chain(lost).chain(events))
}

fn table(result: &RunResult, columns: &[String]) -> String {
    let mut out = String::from("<table><thead><tr><th></th>");
    for policy in columns {
        let _ = write!(out, "<th scope=\"col\">{}</th>", escape(policy));
    }
    out.push_str("</tr></thead><tbody>");
    for name in result.rows() {
        let _ = write!(
            out,
            "<tr><th scope=\"row\">{}</th>",
            escape(&row_label(&name))
        );
        for policy in columns {
            match result.metric(policy, &name) {
                Some(metric) => {
                    let (figure, detail) = cell_parts(metric);
                    let _ = write!(
                        out,
                        "<td><strong>{}</strong><small>{}</small></td>",
                        escape(&figure),
                        escape(&detail)
                    );
                }
                None => out.push_str("<td>–</td>"),
            }
        }
        out.push_str("</tr>");
    }
    out.push_str("</tbody></table>");
    out
}

fn checks(result: &RunResult) -> String {
    if result.checks.is_empty() {
        return "<p>This run promises no figures.</p>".to_owned();
    }
    let mut out = String::from("<ul>");
    for check in &result.checks {
        let class = if check.met == Some(true) {
            "met"
        } else {
            "missed"
        };
        let _ = write!(
            out,
            "<li class=\"{class}\">{}</li>",
            escape(&check.to_string())
        );
    }
    out.push_str("</ul>");
    out
}

fn emulator(result: &RunResult) -> String {
    if result.emulator.is_empty() {
        return "<p>No emulator figures were recorded.</p>".to_owned();
    }
    let mut out = String::from("<table><tbody>");
    for (name, metric) in &result.emulator {
        let (figure, detail) = cell_parts(metric);
        let _ = write!(
            out,
            "<tr><th scope=\"row\">{}</th><td><strong>{}</strong><small>{}</small></td></tr>",
            escape(&row_label(name)),
            escape(&figure),
            escape(&detail)
        );
    }
    out.push_str("</tbody></table>");
    out
}

fn void(result: &RunResult) -> String {
    if result.void.is_empty() {
        return "<p>No run was void.</p>".to_owned();
    }
    let mut out = String::from("<ul>");
    for v in &result.void {
        let line = format!("{}, repeat {}: {}", v.policy, v.repeat, v.reason);
        let _ = write!(out, "<li class=\"missed\">{}</li>", escape(&line));
    }
    out.push_str("</ul>");
    out
}

fn environment(result: &RunResult) -> String {
    let mut rows = vec![
        ("kernel".to_owned(), result.kernel.clone()),
        ("cpu".to_owned(), result.cpu.clone()),
    ];
    rows.extend(result.environment.iter().map(|(name, value)| {
        (
            name.clone(),
            value
                .as_str()
                .map_or_else(|| value.to_string(), str::to_owned),
        )
    }));
    let mut out = String::from("<table><tbody>");
    for (name, value) in rows {
        let _ = write!(
            out,
            "<tr><th scope=\"row\">{}</th><td class=\"wrap\">{}</td></tr>",
            escape(&name),
            shortened(&value)
        );
    }
    out.push_str("</tbody></table>");
    out
}

/// A long value folded up, and cut where result.json is the better place to read it.
fn shortened(value: &str) -> String {
    const FOLD: usize = 200;
    const CUT: usize = 4_000;
    if value.chars().count() <= FOLD {
        return escape(value);
    }
    let start: String = value.chars().take(80).collect();
    let body: String = value.chars().take(CUT).collect();
    let more = if body.len() < value.len() {
        " … (all of it in result.json)"
    } else {
        ""
    };
    format!(
        "<details><summary>{} …</summary>{}{more}</details>",
        escape(&start),
        escape(&body)
    )
}

fn distributions(
    samples: &Samples,
    drawn: &[String],
    columns: &[String],
) -> Result<(String, String, String)> {
    let sorted: Vec<(RGBColor, Vec<u32>)> = drawn
        .iter()
        .map(|p| {
            (
                plots::policy_colour(p, columns),
                series::sorted_rtts(&samples.segments, p),
            )
        })
        .filter(|(_, rtts)| !rtts.is_empty())
        .collect();
    if sorted.is_empty() {
        let none = "<p>No packet was answered.</p>".to_owned();
        return Ok((none.clone(), none.clone(), none));
    }
    let lines = |points: &dyn Fn(&[u32]) -> Points| -> Vec<Line> {
        sorted
            .iter()
            .map(|(colour, r)| Line {
                colour: *colour,
                points: points(r),
            })
            .collect()
    };
    let ms = |us: Option<u32>| f64::from(us.unwrap_or(1).max(1)) / 1e3;
    let max_ms = ms(sorted.iter().filter_map(|(_, r)| r.last()).max().copied());
    let min_ms = ms(sorted.iter().filter_map(|(_, r)| r.first()).min().copied());
    // One outlier must not squeeze the body into a line: the CDF ends at the worst p99.5.
    let body_ms = ms(sorted
        .iter()
        .map(|(_, r)| r[(r.len() - 1) * 995 / 1000])
        .max());
    let n = sorted.iter().map(|(_, r)| r.len()).max().unwrap_or(1) as u32;
    let from = (min_ms * 0.9).floor();
    let tail = plots::distribution(
        &lines(&|r| series::tail(r, 220)),
        Share::Above { floor: n },
        (from, max_ms * 1.02),
        "Share of packets above a round-trip time, logarithmic, a line per policy",
    )?;
    let cdf = plots::distribution(
        &lines(&|r| series::cdf(r, 300)),
        Share::Below,
        (from, body_ms * 1.02),
        "Cumulative distribution of round-trip times, a line per policy",
    )?;
    let bin_ms = max_ms * 1.001 / HISTOGRAM_BINS as f64;
    let steps = |r: &[u32]| -> Vec<(f64, f64)> {
        let bins = series::histogram(r, bin_ms * HISTOGRAM_BINS as f64, HISTOGRAM_BINS);
        let floor = 0.8 / f64::from(n.max(10));
        let corner = |i: usize, s: f64| [(i as f64 * bin_ms, s), ((i + 1) as f64 * bin_ms, s)];
        bins.iter()
            .enumerate()
            .flat_map(|(i, s)| corner(i, s.max(floor)))
            .collect()
    };
    let histogram = plots::distribution(
        &lines(&steps),
        Share::Within { floor: n },
        (0.0, bin_ms * HISTOGRAM_BINS as f64),
        "Histogram of round-trip times, a stepped line per policy",
    )?;
    Ok((tail, cdf, histogram))
}

/// The time-lines of the repeat that most policies took part in, and a note saying which.
fn timelines(samples: &Samples, drawn: &[String], columns: &[String]) -> Result<(String, String)> {
    let repeats = samples.segments.iter().map(|s| s.repeat);
    let parts = |r: u32| {
        let with = |s: &&Segment| s.repeat == r && !s.packets.is_empty();
        samples.segments.iter().filter(with).count()
    };
    let Some(repeat) = repeats.max_by_key(|r| (parts(*r), std::cmp::Reverse(*r))) else {
        return Ok((String::new(), "No packets were recorded.".to_owned()));
    };
    let segments: Vec<&Segment> = drawn
        .iter()
        .filter_map(|p| {
            samples
                .segments
                .iter()
                .find(|s| s.policy == *p && s.repeat == repeat)
        })
        .collect();
    let events: Vec<PathEvent> = samples
        .events
        .iter()
        .filter(|e| e.repeat == repeat)
        .cloned()
        .collect();
    let packets = || {
        segments
            .iter()
            .flat_map(|s| s.packets.iter().map(move |p| (s, p)))
    };
    let times = || packets().map(|(s, p)| p.sent_ns.saturating_sub(s.start_ns));
    let from_ns = times().min().unwrap_or(0);
    let until_ns = times().max().unwrap_or(0).max(from_ns + 1);
    let max_us = packets()
        .filter_map(|(_, p)| p.rtt_us)
        .max()
        .unwrap_or(1_000);
    let mut out = String::new();
    for segment in segments {
        let plot = Timeline {
            segment,
            colour: plots::policy_colour(&segment.policy, columns),
            events: &events,
            span: from_ns..until_ns,
            max_ms: f64::from(max_us) / 1e3 * 1.05,
            paths: samples.paths.len(),
        };
        let name = escape(&segment.policy);
        let svg = plots::timeline(&plot, &format!("Round-trip time over time, {name}"))?;
        let _ = write!(out, "<h3>{name}</h3><figure>{svg}</figure>");
    }
    let note = format!(
        "Repeat {repeat}. Lines: median of the packets on each path; band: fastest to slowest packet; gaps: nothing \
         was answered. Shaded: what the emulator did to a path. Strip: share of packets per path."
    );
    Ok((out, note))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filled_text_is_not_filled_again() {
        let parts = [("a", "{{b}}".to_owned()), ("b", "no".to_owned())];
        assert_eq!(fill("<{{a}}|{{b}}|{{unknown}}>", &parts), "<{{b}}|no|>");
    }

    #[test]
    fn long_values_are_folded_and_cut() {
        assert_eq!(shortened("<20>"), "&lt;20&gt;");
        let folded = shortened(&"ä".repeat(300));
        assert!(folded.starts_with("<details>") && !folded.contains("result.json"));
        let cut = shortened(&"ä".repeat(100_000));
        assert!(cut.contains("result.json") && cut.len() < 10_000);
    }

    #[test]
    fn markup_is_escaped() {
        assert_eq!(escape("<b a=\"1\">&"), "&lt;b a=&quot;1&quot;&gt;&amp;");
    }
}
