// SPDX-License-Identifier: GPL-2.0-or-later
//! BPF hash tables that hold numbers and nothing else: a program asks whether one is there.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use libbpf_rs::{MapCore, MapFlags};

use super::read_from;

/// Makes these all that a program knows.
///
/// # Errors
/// When there are more than there is room for.
pub(super) fn write(table: &impl MapCore, numbers: &BTreeSet<u64>) -> Result<()> {
    // First, as there may be no room for the old and the new ones together. Those in both stay.
    let is_stale = |key: &Vec<u8>| !numbers.contains(&read_from::<u64>(key));
    let stale: Vec<Vec<u8>> = table.keys().filter(is_stale).collect();
    for key in &stale {
        table.delete(key)?;
    }
    for number in numbers {
        table
            .update(&number.to_ne_bytes(), &[1], MapFlags::ANY)
            .context("a BPF table is full")?;
    }
    Ok(())
}
