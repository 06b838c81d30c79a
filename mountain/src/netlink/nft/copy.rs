// SPDX-License-Identifier: GPL-2.0-or-later
//! A copy of a table of family `inet`, which makes it again without nft(8): in a millisecond, where nft takes ten and more.
//!
//! nft(8) has made the table from its text. What the kernel tells of chains, sets and rules is what it takes for new ones,
//! but for handles, counts and the like.
//!
//! Format: linux/netfilter/nf_tables.h.

use std::io;

use netlink_sys::protocols::NETLINK_NETFILTER;

use super::{about, transaction};
use crate::netlink::uapi::{NFNL_SUBSYS_NFTABLES, NFPROTO_INET};
use crate::netlink::wire::{attribute, c_string, netfilter, push_attribute};
use crate::netlink::wire::{Attributes, Socket, NFNL_HEADER_LEN};

/// NFT_MSG_*.
const NEW_TABLE: u16 = message(0);
const DELETE_TABLE: u16 = message(2);
const NEW_CHAIN: u16 = message(3);
const GET_CHAIN: u16 = message(4);
const NEW_RULE: u16 = message(6);
const GET_RULE: u16 = message(7);
const NEW_SET: u16 = message(9);
const GET_SET: u16 = message(10);
const NEW_ELEMENTS: u16 = message(12);
const GET_ELEMENTS: u16 = message(13);
const GET_GENERATION: u16 = message(16);

/// NFTA_CHAIN_*: name, hook, policy, type.
const OF_CHAIN: [u16; 4] = [3, 4, 5, 7];
const CHAIN_HOOK: u16 = 4;
/// NFTA_SET_*: name, flags, types and lengths of key and data, policy, size, timeout, what nft(8) remembers.
const OF_SET: [u16; 10] = [2, 3, 4, 5, 6, 7, 8, 9, 11, 13];
const SET_NAME: u16 = 2;
const SET_FLAGS: u16 = 3;
const SET_ID: u16 = 10;
/// NFT_SET_TIMEOUT: its elements are of the moment.
const WITH_TIMEOUT: u32 = 0x10;
/// NFTA_SET_ELEM_LIST_*: set, elements.
const OF_ELEMENTS: [u16; 2] = [2, 3];
/// NFTA_RULE_*: chain, expressions, what nft(8) remembers.
const OF_RULE: [u16; 3] = [2, 4, 7];

const fn message(number: u16) -> u16 {
    netfilter(NFNL_SUBSYS_NFTABLES, number)
}

/// What makes a table, in place of the one that is there.
pub(crate) struct TableCopy(Vec<(u16, Vec<u8>)>);

impl TableCopy {
    /// Copies a table of the calling thread's network namespace, with what has no timeout of its sets.
    ///
    /// # Errors
    /// When it is not there, or somebody changes the firewall meanwhile.
    pub(crate) fn of(table: &str) -> io::Result<Self> {
        let mut reading = Reading {
            socket: Socket::open_for(NETLINK_NETFILTER)?,
            table,
        };
        let before = reading.generation()?;
        let (mut is_hooked, mut chains) = (false, Vec::new());
        reading.dump(GET_CHAIN, &about(table), |chain| {
            is_hooked |= chain.has(CHAIN_HOOK);
            chains.push((NEW_CHAIN, taken(table, chain, &OF_CHAIN)));
        })?;
        let (mut filled, mut sets) = (Vec::new(), Vec::new());
        reading.dump(GET_SET, &about(table), |set| {
            let mut body = taken(table, set, &OF_SET);
            let id = sets.len() as u32 + 1;
            push_attribute(&mut body, SET_ID, &id.to_be_bytes());
            sets.push((NEW_SET, body));
            if set.be32(SET_FLAGS).unwrap_or(0) & WITH_TIMEOUT == 0 {
                filled.extend(set.string(SET_NAME));
            }
        })?;
        let mut elements = Vec::new();
        for set in filled {
            let asked = [about(table), attribute(SET_NAME, &c_string(&set))].concat();
            reading.dump(GET_ELEMENTS, &asked, |some| {
                elements.push((NEW_ELEMENTS, taken(table, some, &OF_ELEMENTS)));
            })?;
        }
        let mut rules = Vec::new();
        reading.dump(GET_RULE, &about(table), |rule| {
            rules.push((NEW_RULE, taken(table, rule, &OF_RULE)));
        })?;
        if before != reading.generation()? || !is_hooked || rules.is_empty() {
            return Err(changed());
        }
        // Each new one is put before the others of its chain.
        rules.reverse();
        // As nft(8) is told: whatever was there is replaced.
        let tables = [NEW_TABLE, DELETE_TABLE, NEW_TABLE];
        let tables = Vec::from(tables.map(|kind| (kind, about(table))));
        Ok(Self([tables, chains, sets, elements, rules].concat()))
    }

    /// Makes the table in one transaction.
    ///
    /// # Errors
    /// When the kernel refuses: nothing is done then.
    pub(crate) fn make(&self) -> io::Result<()> {
        transaction(&self.0)
    }
}

struct Reading<'a> {
    socket: Socket,
    table: &'a str,
}

impl Reading<'_> {
    /// Changes with each transaction of anybody's.
    fn generation(&mut self) -> io::Result<Option<u32>> {
        let header = [0; NFNL_HEADER_LEN];
        let answer = self.socket.request(GET_GENERATION, 0, &header)?;
        Ok(answer.and_then(|payload| Attributes::after(&payload, NFNL_HEADER_LEN).be32(1)))
    }

    /// Objects of the table.
    fn dump(
        &mut self,
        kind: u16,
        asked: &[u8],
        mut each: impl FnMut(&Attributes<'_>),
    ) -> io::Result<()> {
        let table = self.table;
        let consistent = self.socket.dump(kind, asked, |payload| {
            let attributes = Attributes::after(payload, NFNL_HEADER_LEN);
            let is_inet = payload.first() == Some(&NFPROTO_INET);
            // In each kind of object the first attribute names the table.
            if is_inet && attributes.string(1).as_deref() == Some(table) {
                each(&attributes);
            }
        })?;
        match consistent {
            true => Ok(()),
            false => Err(changed()),
        }
    }
}

fn changed() -> io::Error {
    io::Error::other("the table has changed while it was read")
}

/// A message with these attributes of an object of the table.
fn taken(table: &str, object: &Attributes<'_>, kinds: &[u16]) -> Vec<u8> {
    let mut body = about(table);
    for (kind, value) in object.iter().filter(|(kind, _)| kinds.contains(kind)) {
        push_attribute(&mut body, kind, value);
    }
    body
}
