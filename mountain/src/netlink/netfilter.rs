// SPDX-License-Identifier: GPL-2.0-or-later
//! Which nftables chains are hooked into the kernel: one dump, where the `nft` program takes ten
//! milliseconds to start.

use std::fs;
use std::io;

use netlink_sys::protocols::NETLINK_NETFILTER;

use super::wire::{Attributes, Socket};

/// linux/netfilter/nfnetlink.h, linux/netfilter/nf_tables.h.
const NFNL_SUBSYS_NFTABLES: u16 = 10;
const NFT_MSG_GETCHAIN: u16 = 4;
const NFTA_CHAIN_TABLE: u16 = 1;
const NFTA_CHAIN_HOOK: u16 = 4;
const NFTA_CHAIN_TYPE: u16 = 7;
const NFTA_HOOK_HOOKNUM: u16 = 1;
/// linux/netfilter.h.
const NF_INET_POST_ROUTING: u32 = 4;
/// Length of `struct nfgenmsg`.
const HEADER_LEN: usize = 4;

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
/// Without CAP_NET_ADMIN. A kernel without nftables translates nothing by them.
pub fn translates_sources() -> io::Result<bool> {
    let legacy = ["ip_tables_names", "ip6_tables_names"].iter().any(|file| {
        let names = fs::read_to_string(format!("/proc/thread-self/net/{file}"));
        names.is_ok_and(|names| names.lines().any(|name| name == "nat"))
    });
    if legacy {
        return Ok(true);
    }
    let mut found = false;
    let dumped = each_chain(|chain| {
        let hook = chain.nested(NFTA_CHAIN_HOOK);
        let hook = hook.and_then(|hook| hook.get(NFTA_HOOK_HOOKNUM)?.first_chunk().copied());
        found |= hook.map(u32::from_be_bytes) == Some(NF_INET_POST_ROUTING)
            && chain.string(NFTA_CHAIN_TYPE).as_deref() == Some("nat");
    });
    match dumped {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => Ok(false),
        other => other.map(|()| found),
    }
}

fn each_chain(mut each: impl FnMut(&Attributes<'_>)) -> io::Result<()> {
    let kind = (NFNL_SUBSYS_NFTABLES << 8) | NFT_MSG_GETCHAIN;
    // Of all families.
    let header = [0; HEADER_LEN];
    Socket::open_for(NETLINK_NETFILTER)?.dump(kind, &header, |_, payload| {
        each(&Attributes::after(payload, HEADER_LEN));
    })?;
    Ok(())
}
