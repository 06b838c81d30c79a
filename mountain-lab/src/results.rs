// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab results`: prints the committed results as one page, docs/results.md.
//!
//! The page is generated, and a test holds it against the files (`documented.rs`). Another one holds tables of
//! README and docs against the file that each names in a comment above it:
//!
//! ```text
//! <!-- figures: docs/results/FILE METRIC COLUMN... -->
//! ```
//!
//! The rows of the table are then the columns named, in order: figure, interval, repeats.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{ensure, Context, Result};
use mountain::report::table::{head, row};
use mountain_lab::result::{RunResult, SCHEMA};

use crate::experiments::replay::Report;

#[derive(clap::Args)]
pub struct ResultsArgs {
    /// Read the result files below this folder
    #[arg(value_name = "DIR", default_value = "docs/results")]
    dir: PathBuf,
}

/// `mountain-lab results`.
pub fn results(args: &ResultsArgs) -> Result<ExitCode> {
    print!("{}", page(&args.dir)?);
    Ok(ExitCode::SUCCESS)
}

/// The page about all files below a folder.
pub fn page(dir: &Path) -> Result<String> {
    ensure!(
        dir.is_dir(),
        "there is no folder {}: run this in the source tree, or name the folder of the result files",
        std::path::absolute(dir)?.display()
    );
    let mut out = String::from(
        "# Results\n\n\
         Generated from the files in [results](results) by `mountain-lab results > docs/results.md`.\n\
         A cell is the median of the repeats, its 95% interval, and the number of samples behind it.\n\
         Of `mountain-lab replay` the interval is over windows. The page of each subject says what its\n\
         figures mean.\n",
    );
    for file in files(dir)? {
        let name = file.strip_prefix(dir)?.display().to_string();
        let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        let _ = write!(out, "\n## {name}\n\n");
        let of_run = text.contains(&format!("\"{SCHEMA}\""));
        out += &match of_run {
            true => run(&name, &RunResult::read(&file)?),
            false => {
                let replayed = serde_json::from_str(&text);
                let replayed = replayed.with_context(|| {
                    let file = file.display();
                    format!("{file}: neither a result ({SCHEMA}) nor one of `mountain-lab replay`")
                })?;
                replay(&name, &replayed)
            }
        };
    }
    Ok(out)
}

/// The JSON files below a folder, by name.
fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).with_context(|| dir.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(files(&path)?);
        } else if path.extension().is_some_and(|e| e == "json") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

fn run(name: &str, result: &RunResult) -> String {
    let commit = result.git.as_deref().unwrap_or("not recorded");
    let kernel = result.kernel.split(' ').next().unwrap_or_default();
    let about = [
        ("file", format!("[{name}](results/{name})")),
        ("command", format!("`{}`", result.command)),
        ("commit", format!("{commit}, version {}", result.version)),
        ("machine", format!("{}, Linux {kernel}", result.cpu)),
        ("started", result.started.clone()),
        (
            "repeats",
            format!("{}, void segments: {}", result.repeats, result.void.len()),
        ),
    ];
    let about = about.map(|(what, value)| row([&what, &value]));
    let mut out = markdown(&[&[row([&"", &""])], &about[..]].concat());
    out.push('\n');
    out += &markdown(&result.cells());
    if !result.checks.is_empty() {
        out.push('\n');
    }
    for check in &result.checks {
        let _ = writeln!(out, "- {check}");
    }
    out
}

fn replay(name: &str, replay: &Report) -> String {
    let mut out = format!(
        "[{name}](results/{name}): `mountain-lab replay`, version {}, {} half of the recordings, seed \
         {}. The figures depend on no machine.\n",
        replay.version,
        crate::name_of(&replay.half),
        replay.seed
    );
    for table in &replay.tables {
        let _ = write!(
            out,
            "\n{}: {} windows, {:.0} s scored\n\n",
            table.recording, table.windows, table.scored_seconds
        );
        let titles = "|p99, ms|above 200 ms, %|moves per flow and minute";
        let mut rows = vec![head(titles)];
        for chooser in &table.rows {
            rows.push(row([
                &chooser.policy,
                &chooser.p99(),
                &chooser.above_200(),
                &format!("{:.1}", chooser.figures.moves_per_flow_minute),
            ]));
        }
        out += &markdown(&rows);
    }
    out
}

/// A Markdown table; the first row is its head.
fn markdown(rows: &[Vec<String>]) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let Some((head, rest)) = rows.split_first() else {
        return String::new();
    };
    let rule = format!("|{}\n", "---|".repeat(head.len()));
    line(head) + &rule + &rest.iter().map(|cells| line(cells)).collect::<String>()
}

#[cfg(test)]
mod tests {
    use mountain_lab::result::{cell_parts, interval_text, Metric};

    use super::*;
    use crate::documented::{root, texts};

    #[test]
    fn a_folder_that_is_not_there_is_named() {
        let error = page(Path::new("/nonexistent")).unwrap_err().to_string();
        assert!(
            error.starts_with("there is no folder /nonexistent: "),
            "{error}"
        );
    }

    #[test]
    fn no_result_has_fewer_than_five_repeats() {
        for file in files(&root().join("docs/results")).unwrap() {
            let text = fs::read_to_string(&file).unwrap();
            if text.contains(SCHEMA) {
                let repeats = RunResult::read(&file).unwrap().repeats;
                assert!(repeats >= 5, "{}: {repeats}", file.display());
            }
        }
    }

    /// How a metric stands in a table of README and docs: figure, interval, repeats.
    fn cited(metric: &Metric) -> (String, String) {
        let (figure, _) = cell_parts(metric);
        let interval = interval_text(metric).unwrap_or_default();
        let repeats = metric.values.iter().flatten().count();
        (
            format!("{figure} {interval}").trim_end().to_owned(),
            repeats.to_string(),
        )
    }

    /// What is wrong with the tables of a text that name a file of results.
    fn wrong(text: &str) -> Vec<String> {
        let mut wrong = Vec::new();
        let mut lines = text.lines();
        while let Some(line) = lines.next() {
            let Some(words) = line.strip_prefix("<!-- figures: ") else {
                continue;
            };
            let words: Vec<&str> = words.trim_end_matches(" -->").split(' ').collect();
            let [file, metric, columns @ ..] = &words[..] else {
                wrong.push(format!("no file and metric: {line}"));
                continue;
            };
            let result = RunResult::read(&root().join(file)).unwrap();
            let table = lines.by_ref().skip_while(|line| line.is_empty());
            let table: Vec<&str> = table.take_while(|line| line.starts_with('|')).collect();
            if table.len() != columns.len() + 2 {
                wrong.push(format!("{} rows of a table below: {line}", table.len()));
            }
            for (column, row) in columns.iter().zip(table.iter().skip(2)) {
                let Some(metric) = result.metric(column, metric) else {
                    wrong.push(format!("{file} has no {metric} of {column}"));
                    continue;
                };
                let (figure, repeats) = cited(metric);
                let cells: Vec<&str> = row.split('|').map(str::trim).collect();
                if !cells.contains(&figure.as_str()) || !cells.contains(&repeats.as_str()) {
                    wrong.push(format!(
                        "{file}: {figure}, n = {repeats}; the text has {row}"
                    ));
                }
            }
        }
        wrong
    }

    #[test]
    fn figures_of_readme_and_docs_are_those_of_their_files() {
        let mut marked = 0;
        for (file, text) in texts() {
            marked += text.matches("<!-- figures: ").count();
            let wrong = wrong(&text);
            assert!(wrong.is_empty(), "{file}: {wrong:#?}");
        }
        assert!(marked >= 2, "README has its two tables");
    }

    #[test]
    fn a_figure_that_differs_is_found() {
        let readme = fs::read_to_string(root().join("README.md")).unwrap();
        assert!(readme.contains("21.9 ms ["));
        assert_eq!(wrong(&readme.replace("21.9 ms [", "20.9 ms [")).len(), 1);
        let mark = "<!-- figures: docs/results/spiky.json rtt_p99_us ecmp mountain oracle -->\n";
        assert_eq!(wrong(&format!("{mark}no table")).len(), 1);
    }
}
