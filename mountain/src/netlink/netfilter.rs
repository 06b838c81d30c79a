// SPDX-License-Identifier: GPL-2.0-or-later
//! Which nftables chains are hooked into the kernel: one dump, where the `nft` program takes ten
//! milliseconds to start.

use std::io;

use netlink_sys::protocols::NETLINK_NETFILTER;

use super::ruleset::legacy_tables;
use super::uapi::NFNL_SUBSYS_NFTABLES;
use super::wire::{self, netfilter, unless, Attributes, NFNL_HEADER_LEN};

/// linux/netfilter/nf_tables.h.
const NFT_MSG_GETCHAIN: u16 = netfilter(NFNL_SUBSYS_NFTABLES, 4);
const NFTA_CHAIN_TABLE: u16 = 1;
const NFTA_CHAIN_HOOK: u16 = 4;
const NFTA_CHAIN_TYPE: u16 = 7;
const NFTA_HOOK_HOOKNUM: u16 = 1;
/// linux/netfilter.h.
const NF_INET_POST_ROUTING: u32 = 4;

/// The tables that hold base chains, in the calling thread's network namespace; one may be named
/// several times.
///
/// # Errors
/// When the kernel has no nftables (EINVAL), and without CAP_NET_ADMIN.
pub fn tables_with_base_chains() -> io::Result<Vec<String>> {
    let mut tables = Vec::new();
    each_chain(|chain| {
        if chain.has(NFTA_CHAIN_HOOK) {
            tables.extend(chain.string(NFTA_CHAIN_TABLE));
        }
    })?;
    Ok(tables)
}

/// Whether something may translate the sources of forwarded packets in the calling thread's network
/// namespace: a chain of type `nat` after routing (iptables of today makes such too), or the older
/// iptables' table.
///
/// # Errors
/// Without CAP_NET_ADMIN, or when the older iptables' tables cannot be listed. A kernel without nftables
/// translates nothing by them.
pub fn translates_sources() -> io::Result<bool> {
    if legacy_tables()?
        .iter()
        .any(|names| names.lines().any(|name| name == "nat"))
    {
        return Ok(true);
    }
    let mut found = false;
    let dumped = each_chain(|chain| {
        let hook = chain.inside(NFTA_CHAIN_HOOK).be32(NFTA_HOOK_HOOKNUM);
        found |= hook == Some(NF_INET_POST_ROUTING)
            && chain.string(NFTA_CHAIN_TYPE).as_deref() == Some("nat");
    });
    unless(dumped, &[libc::EINVAL])?;
    Ok(found)
}

fn each_chain(mut each: impl FnMut(&Attributes<'_>)) -> io::Result<()> {
    // Of all families.
    let header = [0; NFNL_HEADER_LEN];
    wire::dump(NETLINK_NETFILTER, NFT_MSG_GETCHAIN, &header, |payload| {
        each(&Attributes::after(payload, NFNL_HEADER_LEN));
    })?;
    Ok(())
}
