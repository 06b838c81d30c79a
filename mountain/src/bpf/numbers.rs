// SPDX-License-Identifier: GPL-2.0-or-later
//! BPF hash tables that hold keys and nothing else: a program asks whether one is there.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use libbpf_rs::{MapCore, MapFlags};

/// Makes these numbers all that a program knows.
///
/// # Errors
/// As [`write_keys`].
pub(super) fn write(table: &impl MapCore, numbers: &BTreeSet<u64>) -> Result<()> {
    let keys = numbers.iter().map(|number| number.to_ne_bytes().to_vec());
    write_keys(table, &keys.collect())
}

/// Makes these keys all that a program knows.
///
/// # Errors
/// When there are more than there is room for.
pub(super) fn write_keys(table: &impl MapCore, keys: &BTreeSet<Vec<u8>>) -> Result<()> {
    // First, as there may be no room for the old and the new ones together. Those in both stay.
    let stale: Vec<Vec<u8>> = table.keys().filter(|key| !keys.contains(key)).collect();
    for key in &stale {
        table.delete(key)?;
    }
    for key in keys {
        table
            .update(key, &[1], MapFlags::ANY)
            .context("a BPF table is full")?;
    }
    Ok(())
}
