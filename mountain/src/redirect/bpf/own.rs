// SPDX-License-Identifier: GPL-2.0-or-later
//! The addresses of this host, which the programs have to know: the kernel drops packets that come in from one.
//!
//! What goes around the kernel's forwarding would deliver them.

use std::collections::HashSet;
use std::net::IpAddr;

use anyhow::{Context, Result};
use libbpf_rs::{MapCore, MapFlags};

use super::loaded::{entries, LoadedObject};
use super::{bytes_of, types, words};
use crate::netlink;

/// Has the programs know the addresses of now.
///
/// # Errors
/// When the kernel refuses to list or enter them; there are more than fit.
pub(super) fn tell(loaded: &LoadedObject) -> Result<()> {
    let all = netlink::addresses().context("cannot list the addresses")?;
    let key = |ip: &IpAddr| types::mtn_rd_own {
        addr: words(*ip),
        ipv6: u32::from(ip.is_ipv6()),
    };
    let keys = all.iter().map(|(_, ip)| bytes_of(&key(ip)).to_vec());
    let mut new: HashSet<Vec<u8>> = keys.collect();
    let map = loaded.map("own_addresses")?;
    for (known, _) in entries(map)? {
        if !new.remove(&known) {
            // Another command may have been faster.
            let _ = map.delete(&known);
        }
    }
    for key in new {
        map.update(&key, bytes_of(&1u32), MapFlags::ANY)
            .context("cannot enter an address of this host into the redirection program")?;
    }
    Ok(())
}
