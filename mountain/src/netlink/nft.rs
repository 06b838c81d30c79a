// SPDX-License-Identifier: GPL-2.0-or-later
//! Running nft(8), and tables of family `inet` by name without it: it takes ten milliseconds to start.

mod copy;

use std::io::{self, Write};
use std::process::{Command, Stdio};

use anyhow::{bail, Context, Result};
use netlink_sys::protocols::NETLINK_NETFILTER;

use super::uapi::{NFNL_SUBSYS_NFTABLES, NFPROTO_INET};
use super::wire::{self, attribute, c_string, netfilter, unless};
use super::wire::{Attributes, Socket, NFNL_HEADER_LEN};
use crate::host::program::Missing;
pub(crate) use copy::TableCopy;

/// linux/netfilter/nf_tables.h.
const NFT_MSG_GETTABLE: u16 = netfilter(NFNL_SUBSYS_NFTABLES, 1);
const NFT_MSG_DELTABLE: u16 = netfilter(NFNL_SUBSYS_NFTABLES, 2);
const NFT_MSG_GETRULE: u16 = netfilter(NFNL_SUBSYS_NFTABLES, 7);
const NFTA_TABLE_NAME: u16 = 1;
const NFTA_TABLE_HANDLE: u16 = 4;
/// Rules that change while they are counted are counted again so often.
const TRIES: usize = 10;

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
    let output = child.wait_with_output().context("cannot wait for nft")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let said: Vec<&str> = said.split_whitespace().collect();
        bail!("nft refused: {}", said.join(" "));
    }
    written.context("cannot write to nft")
}

/// What begins every message about a table, its sets and their elements.
pub(crate) fn about(table: &str) -> Vec<u8> {
    let mut body = vec![NFPROTO_INET, 0, 0, 0];
    body.extend(attribute(NFTA_TABLE_NAME, &c_string(table)));
    body
}

/// Whether there is a table of this name.
pub(crate) fn has_table(name: &str) -> io::Result<bool> {
    Ok(table_handle(name)?.is_some())
}

/// The kernel's number of the table of this name, if there is one. Another table in its place has another number.
pub(crate) fn table_handle(name: &str) -> io::Result<Option<u64>> {
    let found = wire::request(NETLINK_NETFILTER, NFT_MSG_GETTABLE, 0, &about(name));
    let handle = |payload: Vec<u8>| {
        let attributes = Attributes::after(&payload, NFNL_HEADER_LEN);
        attributes.be64(NFTA_TABLE_HANDLE)
    };
    let found = unless(found, &[libc::ENOENT])?;
    Ok(found.map(|payload| payload.and_then(handle).unwrap_or(0)))
}

/// How many rules a table has, in all of its chains; none where it is not there.
pub(crate) fn count_rules(table: &str) -> io::Result<usize> {
    for _ in 0..TRIES {
        let mut count = 0;
        let body = about(table);
        let whole = wire::dump(NETLINK_NETFILTER, NFT_MSG_GETRULE, &body, |_| count += 1)?;
        if whole {
            return Ok(count);
        }
    }
    Err(io::Error::other(format!(
        "the ruleset of nftables changed during each of {TRIES} readings"
    )))
}

/// Deletes a table.
pub(crate) fn delete_table(name: &str) -> io::Result<()> {
    transaction(&[(NFT_MSG_DELTABLE, about(name))])
}

/// Has nftables carry out all of these messages, or none.
pub(crate) fn transaction(messages: &[(u16, Vec<u8>)]) -> io::Result<()> {
    Socket::open_for(NETLINK_NETFILTER)?.transaction(NFNL_SUBSYS_NFTABLES, messages)
}
