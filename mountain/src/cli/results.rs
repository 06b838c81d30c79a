// SPDX-License-Identifier: GPL-2.0-or-later
//! Where a measurement's file goes: checked before it starts, and not lost when it cannot be
//! written in the end.

use std::path::Path;

use anyhow::{bail, Context, Result};
use nix::unistd::{access, AccessFlags};

use crate::measure::runfile::check_label;

/// Reads `--label`: what is too long would be refused in the file.
pub fn label(text: &str) -> Result<String> {
    check_label(text)?;
    Ok(text.to_owned())
}

/// Standard output instead of a file.
pub(crate) fn is_stdout(out: &Path) -> bool {
    out == Path::new("-")
}

/// Says before a long measurement that its file cannot be written.
pub(crate) fn check_writable(out: &Path) -> Result<()> {
    if is_stdout(out) {
        return Ok(());
    }
    if out.metadata().is_ok_and(|m| !m.is_file()) {
        bail!("--out {}: is a folder or a device, no file", out.display());
    }
    let dir = match out.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    };
    access(dir, AccessFlags::W_OK)
        .with_context(|| format!("--out: cannot write into {}", dir.display()))
}

/// Writes what was measured by `write`; where that fails, into the folder for temporary files.
///
/// # Errors
/// Even if it could be kept: the error names where it is.
pub fn save(out: &Path, write: impl Fn(&Path) -> Result<()>) -> Result<()> {
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
