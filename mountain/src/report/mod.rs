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

use std::path::{Path, PathBuf};

use anyhow::{ensure, Context, Result};

use crate::measure::runfile::RunFile;

use figures::Figure;
use run::Run;

/// Name of the page in the report's folder.
pub const PAGE_NAME: &str = "index.html";

/// Makes the report of `runs` (each with the name of its file, for those without a label) in `dir`:
/// the page, and each plot as SVG and PNG beside it. Returns the page's path.
pub fn write(runs: &[(String, RunFile)], dir: &Path) -> Result<PathBuf> {
    ensure!(!runs.is_empty(), "there is no run to report");
    let runs = Run::all(runs);
    let figures = figures::all(&runs);
    std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    for figure in &figures {
        write_plot(figure, &runs, dir)?;
    }
    // Last, so that whoever sees it sees all of the report.
    let page = dir.join(PAGE_NAME);
    save(&page, html::render(&runs, &figures)?.as_bytes())?;
    Ok(page)
}

fn write_plot(figure: &Figure, runs: &[Run], dir: &Path) -> Result<()> {
    let svg = page::standalone(&figure.alone(runs)?);
    save(&dir.join(format!("{}.svg", figure.file)), svg.as_bytes())?;
    let png = raster::png(&svg)?;
    save(&dir.join(format!("{}.png", figure.file)), &png)
}

fn save(path: &Path, content: &[u8]) -> Result<()> {
    std::fs::write(path, content).with_context(|| format!("cannot write {}", path.display()))
}
