//! Which nftables chains are hooked into the kernel: one dump, where the `nft` program takes ten
//! milliseconds to start.

use std::io;

use netlink_sys::protocols::NETLINK_NETFILTER;

use super::wire::{Attributes, Socket};

/// linux/netfilter/nfnetlink.h, linux/netfilter/nf_tables.h.
const NFNL_SUBSYS_NFTABLES: u16 = 10;
const NFT_MSG_GETCHAIN: u16 = 4;
const NFTA_CHAIN_TABLE: u16 = 1;
const NFTA_CHAIN_HOOK: u16 = 4;
/// Length of `struct nfgenmsg`.
const HEADER_LEN: usize = 4;

/// The tables that hold base chains, in the calling thread's network namespace; one may be named
/// several times.
///
/// # Errors
/// When the kernel has no nftables (EINVAL), and without CAP_NET_ADMIN.
pub fn tables_with_base_chains() -> io::Result<Vec<String>> {
    let mut tables = Vec::new();
    let kind = (NFNL_SUBSYS_NFTABLES << 8) | NFT_MSG_GETCHAIN;
    // Of all families.
    let header = [0; HEADER_LEN];
    Socket::open_for(NETLINK_NETFILTER)?.dump(kind, &header, |_, payload| {
        let chain = Attributes::after(payload, HEADER_LEN);
        if chain.has(NFTA_CHAIN_HOOK) {
            tables.extend(chain.string(NFTA_CHAIN_TABLE));
        }
    })?;
    Ok(tables)
}
