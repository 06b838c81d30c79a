// SPDX-License-Identifier: GPL-2.0-or-later
//! Running nft(8).

use std::io::{self, Write};
use std::process::{Command, Stdio};

use anyhow::{bail, Context, Result};

use crate::host::program::Missing;

/// Has nft(8) carry out a file as one transaction.
///
/// # Errors
/// When nft is not installed, or what it says when it refuses: nothing is done then.
pub fn run(file: &[u8]) -> Result<()> {
    let mut child = Command::new("nft")
        .args(["-f", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => Missing::new("nft").into(),
            _ => anyhow::anyhow!("cannot run nft: {e}"),
        })?;
    // nft reads all of it before it says anything.
    let written = child.stdin.take().expect("it is piped").write_all(file);
    let output = child.wait_with_output().context("nft")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let said: Vec<&str> = said.split_whitespace().collect();
        bail!("nft refused: {}", said.join(" "));
    }
    written.context("cannot write to nft")
}
