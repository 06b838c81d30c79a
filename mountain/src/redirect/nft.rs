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

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::slice::from_ref;

use anyhow::{Context, Result};
use netlink_sys::protocols::NETLINK_NETFILTER;

use super::{Installed, Proto, Stats, Traffic};
use crate::host::text::count;
use crate::netlink::conntrack::{self, adopt::keep_direct};
use crate::netlink::nft;
use crate::netlink::uapi::NFNL_SUBSYS_NFTABLES;
use crate::netlink::wire::{
    self, attribute, c_string, ip_bytes, nest, netfilter, unless, Attributes, Socket,
    NFNL_HEADER_LEN,
};

pub(super) use recover::found;

/// Name of the table, of family `inet`.
pub(crate) const TABLE: &str = "mountain_redirect";
const SKELETON: &str = include_str!("nft_table.nft");

/// linux/netfilter/nf_tables.h.
const NFT_MSG_NEWSETELEM: u16 = netfilter(NFNL_SUBSYS_NFTABLES, 12);
const NFT_MSG_GETSETELEM: u16 = netfilter(NFNL_SUBSYS_NFTABLES, 13);
/// Also where there is none.
const NFT_MSG_DESTROYSETELEM: u16 = netfilter(NFNL_SUBSYS_NFTABLES, 30);
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
/// Elements of a message: the attribute around them holds less than 64 KiB.
const ELEMENTS: usize = 400;
/// Elements that are asked for by one message: the kernel answers about each, and an ordinary socket holds dozens
/// of answers.
const ASKED: usize = 16;

/// Redirects from now on; all of them or, on failure, none. `others` are the rules of this backend
/// that are there already, and `one` is one of them: they come back where something else has removed or
/// emptied the table.
pub fn install(
    new: &[Installed],
    one: &[Installed],
    others: impl FnOnce() -> Result<Vec<Installed>>,
) -> Result<()> {
    if !is_whole()? || !has(&mut asker()?, one)? {
        let others = others()?;
        make_anew(&others)?;
        if !others.is_empty() {
            eprintln!("mountain: {}", lost(others.len()));
        }
    }
    enter(new)
}

/// Puts rules into the table. TCP connections of sockets here stay as they are.
fn enter(rules: &[Installed]) -> Result<()> {
    let by_tcp = rules.iter().filter(|i| i.rule.proto == Proto::Tcp);
    let by_tcp: HashSet<SocketAddr> = by_tcp.map(|i| i.rule.from).collect();
    if !by_tcp.is_empty() {
        // From here on connection tracking sees new ones itself.
        if let Err(e) = keep_direct(&by_tcp) {
            eprintln!("mountain: {e:#}: connections under way may be redirected in their midst");
        }
    }
    elements(&[NFT_MSG_NEWSETELEM], rules)
}

/// What is said of rules that had to be put back.
pub(super) fn lost(rules: usize) -> String {
    let rules = count(rules, "rule");
    format!("put back {rules} that something had removed from the nftables table {TABLE}")
}

/// Makes the table with these rules, whatever is left of it; not half of it.
fn make_anew(rules: &[Installed]) -> Result<()> {
    if is_there()? {
        nft::delete_table(TABLE).with_context(cannot_change)?;
    }
    nft::run(SKELETON.as_bytes())?;
    super::actions::crash_point("table");
    enter(rules).inspect_err(|_| {
        let _ = nft::delete_table(TABLE);
    })
}

/// Puts the table or single rules back if something has removed them; says how many rules.
pub(crate) fn repair(all: Vec<Installed>) -> Result<usize> {
    let whole = is_whole()?;
    let gone = if whole { missing(&all)? } else { all };
    if gone.is_empty() {
        return Ok(0);
    }
    match whole {
        true => enter(&gone)?,
        false => make_anew(&gone)?,
    }
    // What came by meanwhile went where it was sent, and its flows would go on doing so.
    let rules = gone.iter().map(|i| i.rule.redirected());
    conntrack::forget_direct(&rules.collect::<Vec<_>>())?;
    Ok(gone.len())
}

/// Changes what makes up rules that are there, from `old` to `new`, in one transaction: what is the same stays, also as
/// counters, and so do connections.
pub(super) fn exchange(old: &[Installed], new: &[Installed]) -> Result<()> {
    let sets =
        |rules: &[Installed]| -> HashSet<Element> { rules.iter().flat_map(elements_of).collect() };
    let (old, new) = (sets(old), sets(new));
    let messages = [
        (NFT_MSG_DESTROYSETELEM, old.difference(&new)),
        (NFT_MSG_NEWSETELEM, new.difference(&old)),
    ];
    let messages = messages.map(|(verb, elements)| messages_about(&[verb], elements.cloned()));
    nft::transaction(&messages.concat()).with_context(cannot_change)
}

/// Does not redirect any more, whether these were (all) there or not. `last`: there is no other rule
/// of this backend.
pub fn remove(rules: &[Installed], last: bool) -> Result<()> {
    if !is_there()? {
        return Ok(());
    }
    if last {
        return nft::delete_table(TABLE).with_context(cannot_change);
    }
    // By their keys: a killed command may have left other sources.
    elements(&[NFT_MSG_DESTROYSETELEM], rules)
}

/// Whether our table exists.
pub(crate) fn is_there() -> Result<bool> {
    nft::has_table(TABLE).context(CANNOT_ASK)
}

/// Those of `rules` that are not in force.
pub(super) fn gone(rules: Vec<Installed>) -> Result<Vec<Installed>> {
    match is_whole()? {
        true => missing(&rules),
        false => Ok(rules),
    }
}

/// Whether the table has all of its nft rules, without which it redirects nothing. (`nft flush table` leaves the sets
/// as they are.)
fn is_whole() -> Result<bool> {
    Ok(nft::count_rules(TABLE).context(CANNOT_ASK)? >= skeleton_rules())
}

/// Those of `rules` that the sets of the table lack.
fn missing(rules: &[Installed]) -> Result<Vec<Installed>> {
    let (mut asker, mut missing) = (asker()?, Vec::new());
    for some in rules.chunks(ASKED) {
        if has(&mut asker, some)? {
            continue;
        }
        for one in some {
            if !has(&mut asker, from_ref(one))? {
                missing.push(one.clone());
            }
        }
    }
    Ok(missing)
}

fn asker() -> Result<Socket> {
    Socket::open_for(NETLINK_NETFILTER).context(CANNOT_ASK)
}

/// Whether the table names the targets of all these rules. What else makes up a rule comes and goes with that.
fn has(asker: &mut Socket, rules: &[Installed]) -> Result<bool> {
    let mut keys: BTreeMap<String, Vec<Element>> = BTreeMap::new();
    for rule in rules {
        let target = target_of(rule);
        let key = Element {
            data: None,
            ..target
        };
        keys.entry(key.set.clone()).or_default().push(key);
    }
    for (set, keys) in &keys {
        let found = asker.request(NFT_MSG_GETSETELEM, 0, &message(set, keys));
        let found = unless(found, &[libc::ENOENT]).context(CANNOT_ASK)?;
        if found.is_none() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// How many nft rules the table is made with: the lines of its chains.
fn skeleton_rules() -> usize {
    let (mut rules, mut in_chain) = (0, false);
    for line in SKELETON.lines().map(str::trim) {
        match line.split_whitespace().next() {
            Some("chain") => in_chain = true,
            Some("}") => in_chain = false,
            None | Some("type" | "#") => {}
            Some(_) => rules += usize::from(in_chain),
        }
    }
    rules
}

const CANNOT_ASK: &str = "cannot ask the kernel for its nftables tables: run as root";

/// An element of one of the table's sets, as the kernel has it: its parts in network byte order, each
/// padded to four bytes.
#[derive(Clone, PartialEq, Eq, Hash)]
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

/// The element by which a rule's packets get their target.
fn target_of(installed: &Installed) -> Element {
    let rule = &installed.rule;
    let suffix = if rule.dev.is_some() { "_dev" } else { "" };
    Element {
        set: format!("to{}{suffix}", version(rule.from.ip())),
        key: concat(rule.dev.as_deref(), Some(rule.proto), &[rule.from]),
        data: Some(concat(None, None, &[rule.to])),
    }
}

/// The elements that make up a rule.
fn elements_of(installed: &Installed) -> Vec<Element> {
    let Installed { rule, plan, .. } = installed;
    let v = version(rule.from.ip());
    let (dev, proto) = (rule.dev.as_deref(), Some(rule.proto));
    let mut all = vec![target_of(installed)];
    for direction in ["forward", "reply"] {
        let (set, key) = counted_by(direction, installed);
        let data = None;
        all.push(Element { set, key, data });
    }
    if let Some(source) = plan.snat {
        let ends = [rule.from, rule.to];
        // Of a rule with a device, its own clients. Of another, those on the target's side, or everybody.
        let (set, key) = match dev.or(installed.hairpin()) {
            Some(dev) => (
                format!("by_dev{v}_{}", rule.proto),
                concat(Some(dev), None, &ends),
            ),
            None => (format!("snat{v}"), concat(None, proto, &ends)),
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
    if rules.is_empty() {
        return Ok(());
    }
    let messages = messages_about(verbs, rules.iter().flat_map(elements_of));
    nft::transaction(&messages).with_context(cannot_change)
}

/// What does each of these to all elements.
fn messages_about(verbs: &[u16], elements: impl Iterator<Item = Element>) -> Vec<(u16, Vec<u8>)> {
    let mut sets: BTreeMap<String, Vec<Element>> = BTreeMap::new();
    for element in elements {
        sets.entry(element.set.clone()).or_default().push(element);
    }
    let mut messages = Vec::new();
    for verb in verbs {
        for (set, elements) in &sets {
            for some in elements.chunks(ELEMENTS) {
                messages.push((*verb, message(set, some)));
            }
        }
    }
    messages
}

fn cannot_change() -> String {
    format!("cannot change the nftables table {TABLE}")
}

/// What begins a message about a set's elements.
fn about(set: &str) -> Vec<u8> {
    let mut body = nft::about(TABLE);
    body.extend(attribute(NFTA_SET_ELEM_LIST_SET, &c_string(set)));
    body
}

/// A message about elements of one set.
fn message(set: &str, elements: &[Element]) -> Vec<u8> {
    let value = |kind: u16, value: &[u8]| nest(kind, &[attribute(NFTA_DATA_VALUE, value)]);
    let list = elements.iter().map(|element| {
        let mut inside = vec![value(NFTA_SET_ELEM_KEY, &element.key)];
        let data = element.data.as_ref();
        inside.extend(data.map(|data| value(NFTA_SET_ELEM_DATA, data)));
        nest(NFTA_LIST_ELEM, &inside)
    });
    let mut body = about(set);
    body.extend(nest(NFTA_SET_ELEM_LIST_ELEMENTS, &list.collect::<Vec<_>>()));
    body
}

/// What rules have done, of those that are in the table. Packets as Netfilter sees them: received ones after GRO
/// and defragmentation, own ones before segmentation.
pub fn stats(rules: &[Installed]) -> Result<Vec<Stats>> {
    let mut all: HashMap<u32, Stats> = HashMap::new();
    let mut wanted: HashMap<String, HashMap<Vec<u8>, u32>> = HashMap::new();
    for installed in rules {
        for direction in ["forward", "reply"] {
            let (set, key) = counted_by(direction, installed);
            wanted.entry(set).or_default().insert(key, installed.id);
        }
    }
    for (set, keys) in &wanted {
        let forward = set.starts_with("forward");
        set_elements(set, |element| {
            let Some((key, traffic)) = counter(element) else {
                return;
            };
            if let Some(&id) = keys.get(key) {
                let stats = all.entry(id).or_insert_with(|| Stats::of(id));
                match forward {
                    true => stats.forward = traffic,
                    false => stats.reply = traffic,
                }
            }
        })?;
    }
    Ok(all.into_values().collect())
}

/// Reads the elements of a set; of a table that somebody has removed, none: `list` says so.
fn set_elements(set: &str, mut each: impl FnMut(&[u8])) -> Result<()> {
    let read = wire::dump(
        NETLINK_NETFILTER,
        NFT_MSG_GETSETELEM,
        &about(set),
        |payload| {
            let message = Attributes::after(payload, NFNL_HEADER_LEN);
            let list = message.inside(NFTA_SET_ELEM_LIST_ELEMENTS);
            list.values().for_each(&mut each);
        },
    );
    unless(read, &[libc::ENOENT])
        .map(drop)
        .with_context(|| format!("cannot read the set {set} of {TABLE}: run as root"))
}

/// Key and counter of an element.
fn counter(element: &[u8]) -> Option<(&[u8], Traffic)> {
    let element = Attributes::after(element, 0);
    let key = element.inside(NFTA_SET_ELEM_KEY).get(NFTA_DATA_VALUE)?;
    let counter = element.inside(NFTA_SET_ELEM_EXPR).inside(NFTA_EXPR_DATA);
    Some((
        key,
        Traffic {
            packets: counter.be64(NFTA_COUNTER_PACKETS)?,
            bytes: counter.be64(NFTA_COUNTER_BYTES)?,
        },
    ))
}
