// SPDX-License-Identifier: GPL-2.0-or-later
//! The addresses of this host, which the programs have to know: the kernel drops packets that come in from one.
//!
//! What goes around the kernel's forwarding would deliver them.

use std::collections::HashSet;

use anyhow::{Context, Result};
use ipnet::IpNet;
use libbpf_rs::{MapCore, MapFlags};

use super::loaded::LoadedObject;
use super::{bytes_of, types, words};
use crate::netlink;

/// Bits of the family, which stand before the address.
const FAMILY_BITS: u32 = u32::BITS;

/// Has the programs know the addresses of now: those of devices, and what else table `local` names.
///
/// # Errors
/// When the kernel refuses to list or enter them; there are more than fit.
pub(super) fn tell(loaded: &LoadedObject) -> Result<()> {
    let addresses = netlink::addresses().context("cannot list the addresses")?;
    let addresses = addresses.into_iter().map(|(_, ip)| IpNet::from(ip));
    let networks = netlink::local_networks().context("cannot list the routes of table local")?;
    let keys = addresses
        .chain(networks)
        .map(|net| bytes_of(&key(&net)).to_vec());
    let mut new: HashSet<Vec<u8>> = keys.collect();
    let map = loaded.map("own_addresses")?;
    let there: Vec<Vec<u8>> = map.keys().collect();
    for known in there {
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

fn key(net: &IpNet) -> types::mtn_rd_own {
    types::mtn_rd_own {
        prefix_len: FAMILY_BITS + u32::from(net.prefix_len()),
        ipv6: u32::from(net.network().is_ipv6()),
        addr: words(net.network()),
    }
}
