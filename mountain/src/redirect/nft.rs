// SPDX-License-Identifier: GPL-2.0-or-later
//! The `nft` backend: destination NAT by one nftables table of ours.
//!
//! The table (`nft_table.nft`) is made with the first rule and deleted with the last one. A rule is
//! elements of its maps and sets, put there in one transaction: other rules, their
//! counters and their connections are not touched, and half a rule is never there.
//!
//! nft(8) makes the table; elements come and go and counters are read by nfnetlink
//! (linux/netfilter/nf_tables.h), as nft(8) takes ten milliseconds to start, and seconds to read a set
//! of 65,536 rules.

mod recover;

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result};
use netlink_sys::protocols::NETLINK_NETFILTER;

use super::{Installed, Proto, Snat, Stats, Traffic};
use crate::netlink::conntrack;
use crate::netlink::nft;
use crate::netlink::wire::{ip_bytes, push_attribute, Attributes, Socket};

pub(super) use recover::found;

/// Name of the table, of family `inet`.
pub(crate) const TABLE: &str = "mountain_redirect";
const SKELETON: &str = include_str!("nft_table.nft");

/// linux/netfilter/nfnetlink.h and nf_tables.h.
const NFNL_SUBSYS_NFTABLES: u16 = 10;
const NFT_MSG_GETTABLE: u16 = 1;
const NFT_MSG_DELTABLE: u16 = 2;
const NFT_MSG_NEWSETELEM: u16 = 12;
const NFT_MSG_GETSETELEM: u16 = 13;
const NFT_MSG_DELSETELEM: u16 = 14;
const NFPROTO_INET: u8 = 1;
const NFTA_TABLE_NAME: u16 = 1;
const NFTA_SET_ELEM_LIST_TABLE: u16 = 1;
const NFTA_SET_ELEM_LIST_SET: u16 = 2;
const NFTA_SET_ELEM_LIST_ELEMENTS: u16 = 3;
const NFTA_LIST_ELEM: u16 = 1;
const NFTA_SET_ELEM_KEY: u16 = 1;
const NFTA_SET_ELEM_DATA: u16 = 2;
const NFTA_SET_ELEM_EXPR: u16 = 7;
const NFTA_DATA_VALUE: u16 = 1;
const NFTA_EXPR_DATA: u16 = 2;
const NFTA_COUNTER_BYTES: u16 = 1;
const NFTA_COUNTER_PACKETS: u16 = 2;
const NLA_F_NESTED: u16 = 1 << 15;
/// Elements of a message: the attribute around them holds less than 64 KiB.
const ELEMENTS: usize = 400;
/// Length of `struct nfgenmsg`.
const HEADER_LEN: usize = 4;

/// Redirects from now on; all of them or, on failure, none. `others` are the rules of this backend
/// that are there already: they come back where something else has removed the table.
pub fn install(new: &[Installed], others: impl FnOnce() -> Result<Vec<Installed>>) -> Result<()> {
    if !is_there()? {
        nft::run(SKELETON.as_bytes())?;
        super::actions::crash_point("table");
        let others = others()?;
        if !others.is_empty() {
            eprintln!(
                "mountain: something had removed the nftables table {TABLE}: it is back, with {} rules",
                others.len()
            );
            elements(&[NFT_MSG_NEWSETELEM], &others)?;
        }
    }
    elements(&[NFT_MSG_NEWSETELEM], new)
}

/// Puts the table and its rules back if something has removed it; says whether it had to.
pub(crate) fn repair(all: &[Installed]) -> Result<bool> {
    if all.is_empty() || is_there()? {
        return Ok(false);
    }
    nft::run(SKELETON.as_bytes())?;
    elements(&[NFT_MSG_NEWSETELEM], all)?;
    // What came by meanwhile went where it was sent, and its flows would go on doing so.
    let rules: Vec<_> = all
        .iter()
        .map(|installed| installed.rule.redirected())
        .collect();
    conntrack::forget_direct(&rules)?;
    Ok(true)
}

/// Does not redirect any more, whether these were (all) there or not. `last`: there is no other rule
/// of this backend.
pub fn remove(rules: &[Installed], last: bool) -> Result<()> {
    if !is_there()? {
        return Ok(());
    }
    if last {
        let mut body = vec![NFPROTO_INET, 0, 0, 0];
        push_attribute(&mut body, NFTA_TABLE_NAME, &name(TABLE));
        return commit(&[(kind(NFT_MSG_DELTABLE), body)]);
    }
    // Deleting what is not there fails; adding what is there does not.
    elements(&[NFT_MSG_NEWSETELEM, NFT_MSG_DELSETELEM], rules)
}

/// Whether our table exists.
pub(crate) fn is_there() -> Result<bool> {
    let mut body = vec![NFPROTO_INET, 0, 0, 0];
    push_attribute(&mut body, NFTA_TABLE_NAME, &name(TABLE));
    let answer = Socket::open_for(NETLINK_NETFILTER)
        .and_then(|mut socket| socket.request(kind(NFT_MSG_GETTABLE), 0, &body));
    match answer {
        Ok(_) => Ok(true),
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        Err(e) => Err(e).context("cannot ask the kernel for its nftables tables: run as root"),
    }
}

fn kind(message: u16) -> u16 {
    NFNL_SUBSYS_NFTABLES << 8 | message
}

fn name(text: &str) -> Vec<u8> {
    [text.as_bytes(), &[0]].concat()
}

/// An element of one of the table's sets, as the kernel has it: its parts in network byte order, each
/// padded to four bytes.
struct Element {
    set: String,
    key: Vec<u8>,
    /// What a map has for the key.
    data: Option<Vec<u8>>,
}

/// `iifname` or `oifname`, the protocol, addresses with their ports.
fn concat(dev: Option<&str>, proto: Option<Proto>, ends: &[SocketAddr]) -> Vec<u8> {
    let mut key = Vec::new();
    if let Some(dev) = dev {
        let mut name = [0; libc::IFNAMSIZ];
        name[..dev.len()].copy_from_slice(dev.as_bytes());
        key.extend(name);
    }
    key.extend(proto.iter().flat_map(|proto| [proto.number(), 0, 0, 0]));
    for end in ends {
        key.extend(ip_bytes(end.ip()));
        key.extend(end.port().to_be_bytes());
        key.extend([0; 2]);
    }
    key
}

/// The set that counts a rule's packets, and the key of the rule in it.
fn counted_by(direction: &str, installed: &Installed) -> (String, Vec<u8>) {
    let rule = &installed.rule;
    let (v, proto) = (version(rule.from.ip()), Some(rule.proto));
    match rule.dev.as_deref() {
        Some(dev) => (
            format!("{direction}{v}_dev"),
            concat(Some(dev), proto, &[rule.from]),
        ),
        None => (
            format!("{direction}{v}"),
            concat(None, proto, &[rule.from, rule.to]),
        ),
    }
}

/// The elements that make up a rule.
fn elements_of(installed: &Installed) -> Vec<Element> {
    let Installed { rule, plan, .. } = installed;
    let v = version(rule.from.ip());
    let (dev, proto) = (rule.dev.as_deref(), Some(rule.proto));
    let suffix = if dev.is_some() { "_dev" } else { "" };
    let mut all = vec![Element {
        set: format!("to{v}{suffix}"),
        key: concat(dev, proto, &[rule.from]),
        data: Some(concat(None, None, &[rule.to])),
    }];
    for direction in ["forward", "reply"] {
        let (set, key) = counted_by(direction, installed);
        let data = None;
        all.push(Element { set, key, data });
    }
    if let Some(source) = plan.snat {
        let ends = [rule.from, rule.to];
        let (set, key) = match (rule.snat, &plan.target_dev) {
            // Who comes in by another device than the target's is answered through this host.
            (Snat::Auto, Some(target)) if dev.is_none() => (
                format!("hairpin{v}_{}", rule.proto),
                concat(Some(&target.name), None, &ends),
            ),
            _ => (format!("snat{v}"), concat(None, proto, &ends)),
        };
        let data = Some(ip_bytes(source));
        all.push(Element { set, key, data });
    }
    all
}

fn version(address: IpAddr) -> u8 {
    if address.is_ipv4() {
        4
    } else {
        6
    }
}

/// Does each of these (NFT_MSG_NEWSETELEM, NFT_MSG_DELSETELEM) to all elements of these rules, in one
/// transaction. Starting nft(8) for it would take longer than all the rest of an `add`.
fn elements(verbs: &[u16], rules: &[Installed]) -> Result<()> {
    let mut sets: BTreeMap<String, Vec<Element>> = BTreeMap::new();
    for element in rules.iter().flat_map(elements_of) {
        sets.entry(element.set.clone()).or_default().push(element);
    }
    let mut messages = Vec::new();
    for verb in verbs {
        for (set, elements) in &sets {
            for some in elements.chunks(ELEMENTS) {
                messages.push((kind(*verb), message(set, some)));
            }
        }
    }
    commit(&messages)
}

fn commit(messages: &[(u16, Vec<u8>)]) -> Result<()> {
    Socket::open_for(NETLINK_NETFILTER)
        .and_then(|mut socket| socket.transaction(NFNL_SUBSYS_NFTABLES, messages))
        .with_context(|| format!("cannot change the nftables table {TABLE}"))
}

/// A message about elements of one set.
fn message(set: &str, elements: &[Element]) -> Vec<u8> {
    let nest = |kind: u16, inside: &[u8]| {
        let mut out = Vec::new();
        push_attribute(&mut out, kind | NLA_F_NESTED, inside);
        out
    };
    let value = |kind: u16, value: &[u8]| {
        let mut inside = Vec::new();
        push_attribute(&mut inside, NFTA_DATA_VALUE, value);
        nest(kind, &inside)
    };
    let mut list = Vec::new();
    for element in elements {
        let mut inside = value(NFTA_SET_ELEM_KEY, &element.key);
        if let Some(data) = &element.data {
            inside.extend(value(NFTA_SET_ELEM_DATA, data));
        }
        list.extend(nest(NFTA_LIST_ELEM, &inside));
    }
    let mut body = vec![NFPROTO_INET, 0, 0, 0];
    push_attribute(&mut body, NFTA_SET_ELEM_LIST_TABLE, &name(TABLE));
    push_attribute(&mut body, NFTA_SET_ELEM_LIST_SET, &name(set));
    body.extend(nest(NFTA_SET_ELEM_LIST_ELEMENTS, &list));
    body
}

/// What a rule has done. Packets as Netfilter sees them: received ones after GRO and defragmentation,
/// own ones before segmentation.
pub fn stats(rules: &[Installed]) -> Result<Vec<Stats>> {
    let mut all: HashMap<u32, Stats> = HashMap::new();
    let mut wanted: HashMap<String, HashMap<Vec<u8>, u32>> = HashMap::new();
    for installed in rules {
        all.insert(
            installed.id,
            Stats {
                id: installed.id,
                ..Stats::default()
            },
        );
        for direction in ["forward", "reply"] {
            let (set, key) = counted_by(direction, installed);
            wanted.entry(set).or_default().insert(key, installed.id);
        }
    }
    for (set, keys) in &wanted {
        let forward = set.starts_with("forward");
        counters(set, |key, traffic| {
            let stats = keys.get(key).and_then(|id| all.get_mut(id));
            if let Some(stats) = stats {
                match forward {
                    true => stats.forward = traffic,
                    false => stats.reply = traffic,
                }
            }
        })?;
    }
    let mut all: Vec<Stats> = all.into_values().collect();
    all.sort_by_key(|stats| stats.id);
    Ok(all)
}

/// Reads the counters of a set.
fn counters(set: &str, mut each: impl FnMut(&[u8], Traffic)) -> Result<()> {
    set_elements(set, |element| {
        if let Some((key, traffic)) = counter(element) {
            each(key, traffic);
        }
    })
}

/// Reads the elements of a set.
fn set_elements(set: &str, mut each: impl FnMut(&[u8])) -> Result<()> {
    let mut body = vec![NFPROTO_INET, 0, 0, 0];
    push_attribute(&mut body, NFTA_SET_ELEM_LIST_TABLE, &name(TABLE));
    push_attribute(&mut body, NFTA_SET_ELEM_LIST_SET, &name(set));
    Socket::open_for(NETLINK_NETFILTER)
        .and_then(|mut socket| {
            socket.dump(kind(NFT_MSG_GETSETELEM), &body, |_, payload| {
                let message = Attributes::after(payload, HEADER_LEN);
                let list = message.nested(NFTA_SET_ELEM_LIST_ELEMENTS);
                list.iter().flat_map(Attributes::values).for_each(&mut each);
            })
        })
        .map(|_| ())
        .or_else(|e| match e.raw_os_error() {
            // Somebody has removed the table: `list` says so.
            Some(libc::ENOENT) => Ok(()),
            _ => Err(e),
        })
        .with_context(|| format!("cannot read the set {set} of {TABLE}: run as root"))
}

/// Key and counter of an element.
fn counter(element: &[u8]) -> Option<(&[u8], Traffic)> {
    let element = Attributes::after(element, 0);
    let key = element.nested(NFTA_SET_ELEM_KEY)?.get(NFTA_DATA_VALUE)?;
    let counter = element.nested(NFTA_SET_ELEM_EXPR)?.nested(NFTA_EXPR_DATA)?;
    let number = |kind| Some(u64::from_be_bytes(*counter.get(kind)?.first_chunk()?));
    Some((
        key,
        Traffic {
            packets: number(NFTA_COUNTER_PACKETS)?,
            bytes: number(NFTA_COUNTER_BYTES)?,
        },
    ))
}
