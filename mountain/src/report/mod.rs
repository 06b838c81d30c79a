// SPDX-License-Identifier: GPL-2.0-or-later
//! Reports: pages that need no network, plots as SVG and PNG.
//!
//! [`write()`] makes the report of run files (`mountain report`). The lab's reports are made from the
//! same parts:
//! - [`series`]: from samples to the points of a plot,
//! - [`plots`]: plots as SVG, [`raster`]: as PNG,
//! - [`page`]: style sheet, colours, templates.
//!
//! [`table`] lays text out in columns, for every command.

mod figures;
mod html;
pub mod page;
pub mod plots;
pub mod raster;
mod run;
pub mod series;
pub mod table;
mod written;
pub mod xy;

use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{ensure, Context, Result};

use crate::host::atomic_file;
use crate::measure::runfile::RunFile;

use run::PreparedRun;
use written::{Written, LIST_NAME};

/// Name of the page in the report's folder.
const PAGE_NAME: &str = "index.html";

/// Makes the report of `runs` (each with the name of its file, for those without a label) in `dir`:
/// the page, and each plot as SVG and PNG beside it. Plots that an earlier report left there are
/// removed. Returns the page's path.
///
/// # Errors
/// Among others if a page or a plot is in the way that no report has written; then nothing is
/// changed.
pub(crate) fn write(runs: &[(String, RunFile)], dir: &Path) -> Result<PathBuf> {
    ensure!(!runs.is_empty(), "there is no run to report");
    let runs = PreparedRun::all(runs);
    let figures = figures::all(&runs);
    let (earlier, mut written) = (Written::read(dir), Written::none());
    let page = dir.join(PAGE_NAME);
    earlier.check_page(&page)?;
    let mut plots = Vec::new();
    for figure in &figures {
        let svg = page::standalone(&figure.alone()?);
        let png = raster::png(&svg)?;
        for (kind, content) in [("svg", svg.into_bytes()), ("png", png)] {
            let name = format!("{}.{kind}", figure.file);
            earlier.check_plot(&name, dir)?;
            written.add(&name, &content);
            plots.push((name, content));
        }
    }
    let content = html::render(&runs, &figures)?.into_bytes();
    written.add_page(&content);
    std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let list = dir.join(LIST_NAME);
    save(&list, &earlier.and(&written).text()?)?;
    for (name, content) in &plots {
        save(&dir.join(name), content)?;
    }
    // After its plots, so that whoever sees it sees all of the report.
    save(&page, &content)?;
    earlier.remove_unless_in(&written, dir)?;
    save(&list, &written.text()?)?;
    Ok(page)
}

fn save(path: &Path, content: &[u8]) -> Result<()> {
    // What is removed because of the list must not come back without it.
    let list = path.ends_with(LIST_NAME);
    atomic_file::write(path, list, |out| out.write_all(content))
        .with_context(|| format!("cannot write {}", path.display()))
}
