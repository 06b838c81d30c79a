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
use written::{Written, LIST_NAME, PAGE_NAME};

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
    // Before all that has to be drawn.
    earlier.check(PAGE_NAME, dir)?;
    let page = html::render(&runs, &figures)?.into_bytes();
    let mut files = vec![(PAGE_NAME.to_owned(), page)];
    for figure in &figures {
        let svg = page::standalone(&figure.alone()?);
        let png = raster::png(&svg)?;
        files.push((format!("{}.svg", figure.file), svg.into_bytes()));
        files.push((format!("{}.png", figure.file), png));
    }
    for (name, content) in &files {
        earlier.check(name, dir)?;
        written.add(name, content);
    }
    std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let list = dir.join(LIST_NAME);
    save(&list, &earlier.and(&written).text()?)?;
    // The page after its plots, so that whoever sees it sees all of the report.
    for (name, content) in files.iter().rev() {
        save(&dir.join(name), content)?;
    }
    earlier.remove_unless_in(&written, dir)?;
    save(&list, &written.text()?)?;
    Ok(dir.join(PAGE_NAME))
}

fn save(path: &Path, content: &[u8]) -> Result<()> {
    // What is removed because of the list must not come back without it.
    let list = path.ends_with(LIST_NAME);
    atomic_file::write(path, list, |out| out.write_all(content))
        .with_context(|| format!("cannot write {}", path.display()))
}
