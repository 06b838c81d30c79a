// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain report`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;

use crate::measure::runfile::RunFile;
use crate::report;

#[derive(Args)]
pub(crate) struct Report {
    /// Draw these run files of `mountain ping --out`, `mountain cpu --out` or `mountain import`
    #[arg(required = true, value_name = "RUN.json")]
    runs: Vec<PathBuf>,
    /// Write the page and the plots to this folder
    #[arg(long, short, value_name = "DIR")]
    output: PathBuf,
}

impl Report {
    pub(crate) fn run(&self) -> Result<()> {
        let read = |path: &PathBuf| -> Result<(String, RunFile)> {
            let name = path.file_stem().unwrap_or(path.as_os_str());
            Ok((name.to_string_lossy().into_owned(), RunFile::read(path)?))
        };
        let runs = self.runs.iter().map(read).collect::<Result<Vec<_>>>()?;
        println!("{}", report::write(&runs, &self.output)?.display());
        Ok(())
    }
}
