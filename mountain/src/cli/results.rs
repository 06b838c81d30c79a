// SPDX-License-Identifier: GPL-2.0-or-later
//! Where a measurement's file goes: checked before it starts, and not lost when it cannot be
//! written in the end.

use std::io::{ErrorKind, IsTerminal};
use std::path::Path;

use anyhow::{bail, Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use nix::unistd::{access, AccessFlags};
use serde::Serialize;

use crate::host::atomic_file;
use crate::measure::runfile::{check_label, write_json};

/// Reads `--label`: what is too long would be refused in the file.
pub(crate) fn label(text: &str) -> Result<String> {
    check_label(text)?;
    Ok(text.to_owned())
}

/// A progress bar, on a terminal only.
pub(crate) fn progress(probes: usize, template: &str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template(template).expect("a valid template");
    ProgressBar::new(probes as u64).with_style(style)
}

/// Standard output instead of a file.
pub(crate) fn is_stdout(out: &Path) -> bool {
    [Path::new("-"), Path::new("/dev/stdout")].contains(&out)
}

/// Says before a long measurement that its file cannot be written.
pub(crate) fn check_writable(out: Option<&Path>) -> Result<()> {
    let Some(out) = out.filter(|out| !is_stdout(out)) else {
        return Ok(());
    };
    match atomic_file::check(out) {
        Err(e) if e.kind() != ErrorKind::NotFound => bail!("--out {}: {e}", out.display()),
        _ => {}
    }
    let dir = atomic_file::folder(out);
    access(dir, AccessFlags::W_OK)
        .with_context(|| format!("--out: cannot write into {}", dir.display()))
}

/// Writes what was measured where `--out` says: to standard output (`-`) or a file; where that fails, into
/// the folder for temporary files.
///
/// # Errors
/// Even if it could be kept: the error names where it is.
pub(crate) fn keep(out: Option<&Path>, measured: &impl Serialize) -> Result<()> {
    let Some(out) = out else { return Ok(()) };
    if is_stdout(out) {
        println!("{}", serde_json::to_string(measured)?);
        return Ok(());
    }
    let write = |path: &Path| write_json(path, measured);
    let Err(error) = write(out) else {
        return Ok(());
    };
    let elsewhere = || -> Result<_> {
        let file = tempfile::Builder::new()
            .prefix("mountain-")
            .suffix(".json")
            .tempfile()?;
        let path = file.into_temp_path();
        write(&path)?;
        Ok(path.keep()?)
    };
    match elsewhere() {
        Ok(path) => bail!(
            "{error:#}. The measurement is kept in {}: move it from there",
            path.display()
        ),
        Err(too) => bail!("{error:#}. Nor could it be kept elsewhere: {too:#}"),
    }
}
