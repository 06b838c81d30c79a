// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab trace`: recordings of paths from logs of other programs.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{ensure, Context, Result};
use mountain_lab::result::write_atomically;

use crate::recording::{import, read_text};

#[derive(clap::Args)]
pub struct TraceArgs {
    #[command(subcommand)]
    command: TraceCommand,
}

#[derive(clap::Subcommand)]
enum TraceCommand {
    /// Make a recording from logs of `ping -D` or irtt (-o FILE), one path each
    Import(ImportArgs),
}

#[derive(clap::Args)]
struct ImportArgs {
    /// Logs, one for each path; the path is named after the file unless a name stands before it
    #[arg(required = true, value_name = "[NAME=]FILE")]
    logs: Vec<String>,
    /// Write the recording to this file, gzipped if its name ends in .gz [default: standard output]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// # Errors
/// A log is not understood, or the recording cannot be written.
pub fn trace(args: &TraceArgs) -> Result<ExitCode> {
    let TraceCommand::Import(args) = &args.command;
    let mut logs: Vec<(String, Vec<import::RecordedProbe>)> = Vec::new();
    for log in &args.logs {
        let (name, file) = named(log)?;
        ensure!(
            logs.iter().all(|(other, _)| *other != name),
            "two paths are named {name:?}: put NAME= before a file"
        );
        let probes = import::probes(&read_text(&file)?);
        logs.push((name, probes.with_context(|| file.display().to_string())?));
    }
    let csv = import::csv(&logs);
    match &args.out {
        None => print!("{csv}"),
        Some(out) if out.extension().is_some_and(|e| e == "gz") => {
            let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
            packed.write_all(csv.as_bytes())?;
            write_atomically(out, &packed.finish()?)?;
        }
        Some(out) => write_atomically(out, csv.as_bytes())?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Name of the path and its file.
fn named(log: &str) -> Result<(String, PathBuf)> {
    let (name, file) = match log.split_once('=') {
        Some((name, file)) => (name.to_owned(), PathBuf::from(file)),
        None => {
            let file = PathBuf::from(log);
            let name = file.file_name().unwrap_or_default().to_string_lossy();
            (name.split('.').next().unwrap_or("").to_owned(), file)
        }
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
    ensure!(
        !name.is_empty() && name.chars().all(plain),
        "{name:?} cannot name a path: use letters, digits, - and _, as NAME={}",
        file.display()
    );
    Ok((name, file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_named_after_its_file_or_as_said() {
        let name = |log: &str| named(log).map(|(name, _)| name);
        assert_eq!(name("logs/wan0.json.gz").unwrap(), "wan0");
        assert_eq!(name("lte=logs/a b.log").unwrap(), "lte");
        assert!(name("logs/a b.log").is_err());
        assert!(name("a,b=x.log").is_err());
    }
}
