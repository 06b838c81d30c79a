// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain compare` and `mountain import`: arguments and printing.

use std::fmt::Write;
use std::fs::File;
use std::io::{stdin, BufRead, BufReader};
use std::path::{Path, PathBuf};

use anyhow::{bail, Context, Result};
use clap::error::ErrorKind;
use clap::Args;

use crate::cli::print_answer;
use crate::cli::results::{is_stdout, keep, label};
use crate::host::stdout::plain;
use crate::host::text::count;
use crate::measure::compare::{compare, Against, CompareOptions, Compared, Comparison, Run, Side};
use crate::measure::import::import;
use crate::measure::runfile::{check_rtt, RunFile};
use crate::measure::stats::Unit;
use crate::report::table::{align, Words};

#[derive(Args)]
pub(crate) struct Compare {
    /// Compare these run files, each with the first
    #[arg(required = true, num_args = 1.., value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Compare these runs together with the ones before `--` together
    ///
    /// Several runs on a side show how far equal runs differ; one run a side shows only how far
    /// that run varies. Measure the two sides in turn.
    #[arg(last = true, value_name = "FILE")]
    against: Vec<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Count answers slower than this many ms; several with commas
    ///
    /// Default: three round numbers from 1.5 times the first run's median up.
    #[arg(long, value_name = "MS", value_delimiter = ',', value_parser = milliseconds)]
    over: Vec<f64>,
}

#[derive(Args)]
pub(crate) struct Import {
    /// Read this log of ping(8), JSON of irtt or .flent.gz; `-` is standard input
    file: PathBuf,
    /// Write the run file here; `-` is standard output [default: FILE.run.json]
    #[arg(long, short, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Use this name for the run in comparisons [default: the run file's name]
    #[arg(long, value_parser = label)]
    label: Option<String>,
    /// Take this series from a flent file [default: its ping series, else "Ping (ms) ICMP"]
    #[arg(long)]
    series: Option<String>,
}

/// Parses a delay that a round trip can have.
pub(super) fn milliseconds(text: &str) -> Result<f64, String> {
    match text.trim_end_matches("ms").trim_end().parse::<f64>() {
        Ok(ms) if ms > 0.0 && check_rtt(Some(ms * 1e3)).is_ok() => Ok(ms),
        _ => Err("not a number of ms above 0, at most a day".into()),
    }
}

fn file_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or(path.as_os_str());
    plain(&name.to_string_lossy()).into_owned()
}

impl Compare {
    pub(crate) fn run(self) -> Result<()> {
        let sides = match self.against.is_empty() {
            true if self.files.len() < 2 => {
                let why = "a comparison takes two run files: `mountain compare A.json B.json`\n";
                clap::Error::raw(ErrorKind::TooFewValues, why).exit()
            }
            true => single(&self.files)?,
            false => vec![side("A", &self.files)?, side("B", &self.against)?],
        };
        let options = CompareOptions {
            over_us: self.over.iter().map(|ms| ms * 1e3).collect(),
            ..CompareOptions::default()
        };
        print_answer(&compare(&sides, &options)?, self.json, text)
    }
}

/// A run's label, which could pass for lines of the answer.
fn one_line(run: &RunFile) -> Option<String> {
    Some(run.label.as_ref()?.replace(['\n', '\t'], " "))
}

/// A side for each file.
fn single(files: &[PathBuf]) -> Result<Vec<Side>> {
    let mut sides: Vec<Side> = Vec::new();
    for path in files {
        let run = RunFile::read(path)?;
        let mut name = one_line(&run).unwrap_or_else(|| file_name(path));
        let known = |name: &String| sides.iter().any(|side| side.name == *name);
        if known(&name) {
            name = plain(&path.to_string_lossy()).into_owned();
        }
        // The same file twice.
        while known(&name) {
            name.push('\'');
        }
        let runs = vec![run];
        sides.push(Side { name, runs });
    }
    Ok(sides)
}

/// One side of several files: by their label if they share one.
fn side(name: &str, files: &[PathBuf]) -> Result<Side> {
    let runs = files.iter().map(|path| RunFile::read(path));
    let runs = runs.collect::<Result<Vec<_>>>()?;
    let label = one_line(&runs[0]);
    let shared = runs.iter().all(|run| run.label == runs[0].label);
    Ok(Side {
        name: label.filter(|_| shared).unwrap_or(name.into()),
        runs,
    })
}

impl Import {
    pub(crate) fn run(self) -> Result<()> {
        let name = self.file.display();
        let (content, out): (Box<dyn BufRead>, PathBuf) =
            match (self.file.as_os_str() == "-", &self.out) {
                (true, None) => bail!("give --out a name: what comes from standard input has none"),
                (true, Some(out)) => (Box::new(stdin().lock()), out.clone()),
                (false, out) => {
                    let file =
                        File::open(&self.file).with_context(|| format!("cannot read {name}"))?;
                    let beside = || {
                        let mut out = self.file.clone().into_os_string();
                        out.push(".run.json");
                        out.into()
                    };
                    let out = out.clone().unwrap_or_else(beside);
                    (Box::new(BufReader::new(file)), out)
                }
            };
        let same = |a: &Path, b: &Path| Some(a.canonicalize().ok()? == b.canonicalize().ok()?);
        if same(&self.file, &out) == Some(true) {
            bail!("{name} would be overwritten by what is read from it: give --out another name");
        }
        let command = format!("import of {}", file_name(&self.file));
        let mut run = import(content, &command, self.series.as_deref())
            .with_context(|| format!("cannot import {name}"))?;
        run.label = self.label.clone();
        if is_stdout(&out) {
            return keep(Some(&out), &run);
        }
        run.write(&out)?;
        let answered = run.samples.rtt_us.iter().flatten().count();
        println!(
            "{}: {} probes of {}, {answered} answered",
            out.display(),
            run.samples.len(),
            plain(&run.tool)
        );
        Ok(())
    }
}

fn interval(row: &Compared, against: &Against) -> String {
    let Some(d) = against.difference else {
        return "–".into();
    };
    let (scale, places, unit) = match row.unit {
        Unit::Microseconds => (1e-3, 3, " ms"),
        Unit::Percent => (1.0, 2, " %"),
        Unit::Count => (1.0, 1, ""),
    };
    let bound = |v: f64| match v.is_finite() {
        true => format!("{:+.places$}", v * scale),
        false => "?".into(),
    };
    format!(
        "{} … {}{unit}",
        bound(d.interval.low),
        bound(d.interval.high)
    )
}

/// The difference of a run, counted without the first, in words; nothing where it is not judged.
fn difference(row: &Compared, run: usize) -> Vec<String> {
    let Some(against) = row.against_first.get(run) else {
        return Vec::new();
    };
    let mark = if row.compared_by.is_some() { "*" } else { "" };
    let percent = against.percent.map(|p| format!("{p:+.1}%{mark}"));
    vec![
        percent.unwrap_or("–".into()),
        interval(row, against),
        format!("{}{mark}", against.verdict.text()),
    ]
}

/// How the verdicts came about.
fn how(c: &Comparison) -> String {
    let several = c.runs.iter().any(|run| run.runs > 1);
    let first = &c.runs[0].name;
    let size = |run: &Run| format!("{} is {}", run.name, count(run.runs, "run"));
    let has_parts = c.rows.iter().any(|row| row.compared_by.is_some());
    let parts = match several && has_parts {
        true => format!(
            "\n* judged by the mean over parts of {} answers, as runs differ in length.",
            c.segment
        ),
        false => String::new(),
    };
    let how = match (c.paired, several) {
        (true, _) => format!(
            "Judged in {}, B - A of each. Figures are means of the rounds. Counts are sums, \
             their\ndifferences are of one round.",
            count(c.runs[0].runs, "round")
        ),
        (false, true) => format!(
            "{}. Judged by how far the runs of a side differ.\nFigures are means of the runs. \
             Counts are sums, their differences are of one run.",
            c.runs.iter().map(size).collect::<Vec<_>>().join(", ")
        ),
        (false, false) => format!(
            "A difference counts when it exceeds the slow variation within the runs. One run a side \
             cannot\nshow how far equal runs differ: `mountain ab` and `compare A1 A2 -- B1 B2` can.\n\
             * judged by: Min, Max, Max−Min the mean over parts of {} answers; Jitter the mean of \
             the\n  whole run; counts the share of answers, scaled to {first}.",
            c.segment
        ),
    };
    how + &parts
}

/// The table of all columns, then the verdicts, then what else differs.
pub(crate) fn text(c: &Comparison) -> String {
    let mut lines = vec![vec![String::new()]];
    lines[0].extend(c.runs.iter().map(|r| r.name.clone()));
    for row in &c.rows {
        let mut line = vec![row.name.clone()];
        line.extend(row.values.iter().map(|v| row.unit.text(*v)));
        lines.push(line);
    }
    let first = &c.runs[0].name;
    let heads = ["Δ", "95% interval of the difference", ""].map(String::from);
    // With two runs one table holds everything; with more, each gets the like.
    if let [_, _] = &c.runs[..] {
        lines[0].extend(heads);
        for (line, row) in lines[1..].iter_mut().zip(&c.rows) {
            line.extend(difference(row, 0));
        }
    } else {
        lines[0].push(String::new());
        for (i, run) in c.runs.iter().skip(1).enumerate() {
            let mut head = vec![format!("{} against {first}:", run.name), run.name.clone()];
            head.extend(heads.clone());
            lines.extend([Vec::new(), head]);
            lines.extend(c.rows.iter().map(|row| {
                let mut line = vec![row.name.clone(), row.unit.text(row.values[i + 1])];
                line.extend(difference(row, i));
                line
            }));
        }
    }
    let mut text = align(&lines, Words::In(&[0]));
    let _ = writeln!(text, "\n{}", how(c));
    if c.by_user {
        text += "Delays are what programs saw (user space), with the queues of this host.\n";
    }
    text += "\n";
    for headline in &c.headlines {
        let _ = writeln!(text, "Verdict: {}", headline.text);
    }
    if !c.warnings.is_empty() {
        text += "\n";
    }
    for warning in &c.warnings {
        let _ = writeln!(text, "Warning: {}", plain(&warning.text));
    }
    if c.warnings.len() > 1 {
        text +=
            "More than one thing differs: the figures cannot tell which of them is the cause.\n";
    }
    text
}
