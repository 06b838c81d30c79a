// SPDX-License-Identifier: GPL-2.0-or-later
//! The page of a report of run files.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use anyhow::Result;
use serde_json::Value;

use crate::measure::stats::Table;

use super::figures::{answered, cpu_legend, PageSection, Plot};
use super::page::{escape, figure, fill, legend, shortened, styles, table_head, table_row};
use super::run::{PreparedRun, MARKED};

const TEMPLATE: &str = include_str!("run.html");
const NO_ANSWER: &str = "<p>No probe was answered.</p>";

/// The whole page.
pub(crate) fn render(runs: &[PreparedRun], figures: &[Plot]) -> Result<String> {
    let title = match runs {
        [one] => format!("Run {}", one.name),
        many => format!("{} runs side by side", many.len()),
    };
    let targets = distinct(runs.iter().map(|r| &r.file.target));
    let has_cpu = runs.iter().any(|r| !r.file.cpu.is_empty());
    let histograms: Vec<&Plot> = of(figures, PageSection::Histogram).collect();
    let parts: [(&str, String); 16] = [
        ("title", escape(&title)),
        (
            "subtitle",
            escape(&format!(
                "{}mountain {}",
                (targets.iter().filter(|t| !t.is_empty()))
                    .fold(String::new(), |s, t| s + t + " · "),
                env!("CARGO_PKG_VERSION")
            )),
        ),
        ("styles", styles()),
        ("zooms", zoom_rules(histograms.len())),
        ("notes", notes(runs)),
        ("table", table(runs)),
        ("marked", MARKED.to_string()),
        ("cpu_note", cpu_note(runs)),
        (
            "cpu_legend",
            if has_cpu {
                legend(cpu_legend())
            } else {
                String::new()
            },
        ),
        ("timelines", timelines(runs, figures)?),
        (
            "legend",
            legend(answered(runs).map(|r| (r.name.clone(), r.colour))),
        ),
        ("tail", plots(figures, PageSection::Tail)?),
        ("cdf", plots(figures, PageSection::Cdf)?),
        ("histogram", zooms(&histograms)?),
        ("difference", difference(runs)),
        ("runs", circumstances(runs)),
    ];
    Ok(fill(TEMPLATE, &parts))
}

fn of(figures: &[Plot], place: PageSection) -> impl Iterator<Item = &Plot> {
    figures.iter().filter(move |f| f.place == place)
}

/// The figure with links to its files.
fn with_files(plot: &Plot) -> Result<String> {
    let drawn = figure(|format| plot.draw(format))?;
    let file = &plot.file;
    Ok(format!(
        "{drawn}<p class=\"files\"><a href=\"{file}.svg\">SVG</a> · <a href=\"{file}.png\">PNG</a></p>"
    ))
}

fn plots(figures: &[Plot], place: PageSection) -> Result<String> {
    let mut out = String::new();
    for plot in of(figures, place) {
        out += &with_files(plot)?;
    }
    Ok(if out.is_empty() {
        NO_ANSWER.into()
    } else {
        out
    })
}

fn timelines(runs: &[PreparedRun], figures: &[Plot]) -> Result<String> {
    let mut out = String::new();
    for (run, plot) in runs.iter().zip(of(figures, PageSection::Timeline)) {
        let _ = write!(out, "<h3>{}</h3>", escape(&run.name));
        if run.file.samples.is_empty() {
            out += "<p>No probe was sent.</p>";
        } else if run.sorted.is_empty() {
            out += NO_ANSWER;
        } else if run.outliers > 0 {
            let _ = write!(
                out,
                "<p class=\"soft\">{} outlier{}, the largest {:.3} ms.</p>",
                run.outliers,
                if run.outliers == 1 { "" } else { "s" },
                run.sorted[run.sorted.len() - 1] / 1e3
            );
        }
        out += &with_files(plot)?;
    }
    Ok(out)
}

/// The histograms, of which one is shown at a time. Without a script: the choice is a group of
/// radio buttons, and the style sheet shows what belongs to the chosen one. On paper all are shown.
fn zooms(figures: &[&Plot]) -> Result<String> {
    if figures.is_empty() {
        return Ok(NO_ANSWER.into());
    }
    let mut out = String::from("<div class=\"zoom\">");
    for (i, plot) in figures.iter().enumerate() {
        let name = zoom_name(plot);
        let checked = if i == 0 { " checked" } else { "" };
        let _ = write!(
            out,
            "<input type=\"radio\" name=\"zoom\" id=\"zoom{i}\"{checked}><label for=\"zoom{i}\">{}</label>",
            escape(name)
        );
    }
    for plot in figures {
        // On paper nothing else says which one it is. Not a <p>: those are counted, see below.
        let _ = write!(out, "<h3 class=\"paper\">{}</h3>", escape(zoom_name(plot)));
        out += &with_files(plot)?;
    }
    out += "</div>";
    Ok(out)
}

fn zoom_name(plot: &Plot) -> &str {
    plot.title.split(": ").last().unwrap_or_default()
}

/// Counted by type: of the zooms' elements only plots are figures, only links to files paragraphs.
fn zoom_rules(count: usize) -> String {
    let mut out = String::new();
    for i in 0..count {
        let nth = i + 1;
        let _ = writeln!(
            out,
            "#zoom{i}:checked ~ figure:nth-of-type({nth}), #zoom{i}:checked ~ .files:nth-of-type({nth}) \
             {{ display: block; }}"
        );
    }
    out
}

/// What a reader must know before the figures.
fn notes(runs: &[PreparedRun]) -> String {
    let mut out = String::new();
    for run in runs {
        let samples = &run.file.samples;
        let mut note = |text: &str| {
            let name = escape(&run.name);
            let _ = write!(out, "<p class=\"missed\">{name}: {text}</p>");
        };
        if samples.is_empty() {
            note("no probe was sent.");
        } else if run.sorted.is_empty() {
            note("no probe was answered (100% loss).");
        }
        if run.file.interrupted {
            note("ended before its count was reached.");
        }
    }
    let clocks = distinct(runs.iter().map(|r| &r.file.clock));
    if clocks.len() > 1 {
        let _ = write!(
            out,
            "<p class=\"missed\">The times were not taken alike: {}.</p>",
            escape(&clocks.join(", "))
        );
    }
    out
}

/// The rows, a column a run, and one for what user space saw where the run tells.
fn table(runs: &[PreparedRun]) -> String {
    let mut columns: Vec<(String, &Table)> = Vec::new();
    for run in runs {
        columns.push((escape(&run.name), &run.table));
        if let Some(user) = &run.user {
            let name = escape(&run.name);
            columns.push((
                format!("{name} <small class=\"soft\">user space</small>"),
                user,
            ));
        }
    }
    let rows: Vec<_> = columns.iter().map(|(_, t)| t.rows()).collect();
    let mut out = table_head(columns.iter().map(|(name, _)| name.clone()));
    for (i, first) in rows[0].iter().enumerate() {
        let cells = rows.iter().map(|column| format!("<td>{}</td>", column[i]));
        out += &table_row("", &first.name, cells);
    }
    out + "</tbody></table>"
}

/// A cell with a text of any length.
fn long_cell(text: &str) -> String {
    format!(
        "<td class=\"wrap\">{}</td>",
        shortened(text, "the run file")
    )
}

/// Each of them once, in their order.
fn distinct<'a>(texts: impl Iterator<Item = &'a String>) -> Vec<&'a str> {
    let texts: BTreeSet<&str> = texts.map(String::as_str).collect();
    texts.into_iter().collect()
}

fn names<'a>(runs: &'a [PreparedRun]) -> impl Iterator<Item = String> + 'a {
    runs.iter().map(|r| escape(&r.name))
}

fn cpu_note(runs: &[PreparedRun]) -> String {
    let recorded = runs.iter().map(|r| &r.file.cpu).filter(|c| !c.is_empty());
    let how = distinct(recorded.map(|cpu| &cpu.accounting));
    if how.is_empty() {
        return String::new();
    }
    escape(&format!(
        "Strips of the CPUs: shares of time, each step as in its busiest interval; the kernel accounts by {}.",
        how.join(", ")
    ))
}

fn shown(value: Option<&Value>) -> String {
    match value {
        None => "–".into(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

/// The environments held against each other: first what differs, then, folded up, what is equal.
fn difference(runs: &[PreparedRun]) -> String {
    let keys: BTreeSet<&String> = runs
        .iter()
        .flat_map(|r| r.file.environment.keys())
        .collect();
    let value = |run: &PreparedRun, key: &String| shown(run.file.environment.get(key));
    let (equal, different): (Vec<&String>, Vec<&String>) = keys.into_iter().partition(|&key| {
        runs.iter()
            .all(|r| r.file.environment.get(key) == runs[0].file.environment.get(key))
    });
    let mut out = match (runs.len(), different.len(), equal.len()) {
        (_, 0, 0) => return "<p>No environment was recorded.</p>".into(),
        (1, ..) => "<p>There is one run only.</p>".into(),
        (_, 0, n) => format!("<p class=\"met\">Nothing: all {n} recorded circumstances agree.</p>"),
        (_, n, equal) => format!(
            "<p>{n} recorded circumstance{} differ{}, {equal} agree. Any of them can be the cause of a difference.</p>",
            if n == 1 { "" } else { "s" },
            if n == 1 { "s" } else { "" }
        ),
    };
    if !different.is_empty() {
        let head = table_head(names(runs));
        let _ = write!(out, "<div class=\"scroll names\">{head}");
        for key in different {
            let cells = runs.iter().map(|run| long_cell(&value(run, key)));
            out += &table_row(" class=\"differs\"", key, cells);
        }
        out += "</tbody></table></div>";
    }
    if !equal.is_empty() {
        let title = if runs.len() == 1 {
            "The environment"
        } else {
            "What agrees"
        };
        let _ = write!(
            out,
            "<details><summary>{title}</summary><div class=\"scroll names\"><table><tbody>"
        );
        for key in equal {
            let cell = long_cell(&value(&runs[0], key));
            out += &table_row("", key, std::iter::once(cell));
        }
        out += "</tbody></table></div></details>";
    }
    out
}

/// How each run was made.
fn circumstances(runs: &[PreparedRun]) -> String {
    let optional = |v: Option<String>| v.unwrap_or_else(|| "–".into());
    type Cell<'a> = &'a dyn Fn(&PreparedRun) -> String;
    let rows: [(&str, Cell); 8] = [
        ("target", &|r| r.file.target.clone()),
        ("tool", &|r| r.file.tool.clone()),
        ("command", &|r| r.file.command.clone()),
        ("started", &|r| r.file.started.clone()),
        ("took", &|r| format!("{:.1} s", r.file.seconds)),
        ("interval", &|r| {
            optional(r.file.interval_us.map(|us| format!("{} ms", us / 1e3)))
        }),
        ("payload", &|r| {
            optional(r.file.payload_bytes.map(|n| format!("{n} bytes")))
        }),
        ("clock", &|r| r.file.clock.clone()),
    ];
    let mut out = table_head(names(runs));
    for (name, text) in rows {
        let cells = runs.iter().map(|run| long_cell(&text(run)));
        out += &table_row("", name, cells);
    }
    out + "</tbody></table>"
}
