// SPDX-License-Identifier: GPL-2.0-or-later
//! Cgroups with programs of others at their egress, as the programs know them (bpf/common/held_cgroups.h).

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use libbpf_rs::{MapCore, MapFlags};

use super::read_from;

/// Makes these ids all that a program knows.
///
/// # Errors
/// When there are more than 4096.
pub(super) fn write(held: &impl MapCore, ids: &BTreeSet<u64>) -> Result<()> {
    let write = || -> Result<()> {
        // First, as there may be no room for the old and the new ones together. Those in both stay.
        let is_stale = |key: &Vec<u8>| !ids.contains(&read_from::<u64>(key));
        let stale: Vec<Vec<u8>> = held.keys().filter(is_stale).collect();
        for key in &stale {
            held.delete(key)?;
        }
        for id in ids {
            held.update(&id.to_ne_bytes(), &[1], MapFlags::ANY)
                .context("a BPF table is full")?;
        }
        Ok(())
    };
    write().context("too many cgroups with programs")
}
