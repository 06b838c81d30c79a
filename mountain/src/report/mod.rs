//! Reports: pages that need no network, plots as SVG and PNG.
//!
//! [`write`] makes the report of run files (`mountain report`). The lab's reports are made from the
//! same parts:
//! - [`series`]: from samples to the points of a plot,
//! - [`plots`]: plots as SVG, [`raster`]: as PNG,
//! - [`page`]: style sheet, colours, templates.

mod figures;
mod html;
pub mod page;
pub mod plots;
pub mod raster;
mod run;
pub mod series;
mod written;
pub mod xy;

use std::path::{Path, PathBuf};

use anyhow::{ensure, Context, Result};

use crate::measure::runfile::RunFile;

use figures::Figure;
use run::Run;
use written::{Written, LIST_NAME};

/// Name of the page in the report's folder.
pub const PAGE_NAME: &str = "index.html";

/// Makes the report of `runs` (each with the name of its file, for those without a label) in `dir`:
/// the page, and each plot as SVG and PNG beside it. Plots that an earlier report left there are
/// removed. Returns the page's path.
pub fn write(runs: &[(String, RunFile)], dir: &Path) -> Result<PathBuf> {
    ensure!(!runs.is_empty(), "there is no run to report");
    let runs = Run::all(runs);
    let figures = figures::all(&runs);
    std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let (earlier, mut written) = (Written::read(dir), Written::none());
    for figure in &figures {
        write_plot(figure, &runs, dir, &mut written)?;
    }
    // After its plots, so that whoever sees it sees all of the report.
    let page = dir.join(PAGE_NAME);
    save(&page, html::render(&runs, &figures)?.as_bytes())?;
    earlier.remove_unless_in(&written, dir)?;
    save(&dir.join(LIST_NAME), &written.text()?)?;
    Ok(page)
}

fn write_plot(figure: &Figure, runs: &[Run], dir: &Path, written: &mut Written) -> Result<()> {
    let svg = page::standalone(&figure.alone(runs)?);
    let png = raster::png(&svg)?;
    for (kind, content) in [("svg", svg.as_bytes()), ("png", &png[..])] {
        let name = format!("{}.{kind}", figure.file);
        save(&dir.join(&name), content)?;
        written.add(&name, content);
    }
    Ok(())
}

fn save(path: &Path, content: &[u8]) -> Result<()> {
    std::fs::write(path, content).with_context(|| format!("cannot write {}", path.display()))
}
