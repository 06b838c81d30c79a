//! The `nft` backend: destination NAT by one nftables table of ours.
//!
//! The table (`nft_table.nft`) is made with the first rule and deleted with the last one. A rule is
//! elements of its maps and sets, put there in one transaction by nft(8): other rules, their
//! counters and their connections are not touched, and half a rule is never there.
//!
//! nft(8) reads all of a set of 65,536 rules in seconds; counters are therefore read from the kernel
//! by nfnetlink (linux/netfilter/nf_tables.h).

use std::collections::HashMap;
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::process::{Command, Stdio};

use anyhow::{bail, Context, Result};
use netlink_sys::protocols::NETLINK_NETFILTER;
use serde_json::{json, Value};

use super::{Installed, Proto, Snat, Stats, Traffic};
use crate::netlink::wire::{ip_bytes, push_attribute, Attributes, Socket};

/// Name of the table, of family `inet`.
pub const TABLE: &str = "mountain_redirect";
const SKELETON: &str = include_str!("nft_table.nft");

/// linux/netfilter/nfnetlink.h and nf_tables.h.
const NFNL_SUBSYS_NFTABLES: u16 = 10;
const NFT_MSG_GETTABLE: u16 = 1;
const NFT_MSG_GETSETELEM: u16 = 13;
const NFPROTO_INET: u8 = 1;
const NFTA_TABLE_NAME: u16 = 1;
const NFTA_SET_ELEM_LIST_TABLE: u16 = 1;
const NFTA_SET_ELEM_LIST_SET: u16 = 2;
const NFTA_SET_ELEM_LIST_ELEMENTS: u16 = 3;
const NFTA_SET_ELEM_KEY: u16 = 1;
const NFTA_SET_ELEM_EXPR: u16 = 7;
const NFTA_DATA_VALUE: u16 = 1;
const NFTA_EXPR_DATA: u16 = 2;
const NFTA_COUNTER_BYTES: u16 = 1;
const NFTA_COUNTER_PACKETS: u16 = 2;
/// Length of `struct nfgenmsg`.
const HEADER_LEN: usize = 4;

/// Redirects from now on; all of them or, on failure, none. `others` are the rules of this backend
/// that are there already: they come back where something else has removed the table.
pub fn install(new: &[Installed], others: impl FnOnce() -> Result<Vec<Installed>>) -> Result<()> {
    if !is_there()? {
        nft(&[], SKELETON.as_bytes())?;
        super::actions::step("table");
        let others = others()?;
        if !others.is_empty() {
            eprintln!(
                "mountain: something had removed the nftables table {TABLE}: it is back, with {} rules",
                others.len()
            );
            elements(&["add"], &others)?;
        }
    }
    elements(&["add"], new)
}

/// Puts the table and its rules back if something has removed it; says whether it had to.
pub fn repair(all: &[Installed]) -> Result<bool> {
    if all.is_empty() || is_there()? {
        return Ok(false);
    }
    nft(&[], SKELETON.as_bytes())?;
    elements(&["add"], all)?;
    Ok(true)
}

/// Does not redirect any more, whether these were (all) there or not. `last`: there is no other rule
/// of this backend.
pub fn remove(rules: &[Installed], last: bool) -> Result<()> {
    if !is_there()? {
        return Ok(());
    }
    if last {
        let table = json!({"family": "inet", "name": TABLE});
        return nft(
            &["-j"],
            &document(vec![json!({"delete": {"table": table}})])?,
        );
    }
    // Deleting what is not there fails; adding what is there does not.
    elements(&["add", "delete"], rules)
}

/// Whether our table exists.
pub fn is_there() -> Result<bool> {
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

/// An element of one of the table's sets.
struct Element {
    set: String,
    /// What nft takes as the element.
    value: Value,
}

/// `iifname` or `oifname`, the protocol, addresses with their ports: as nft writes a key.
fn concat(dev: Option<&str>, proto: Option<Proto>, ends: &[SocketAddr]) -> Value {
    let mut parts: Vec<Value> = Vec::new();
    parts.extend(dev.map(Value::from));
    parts.extend(proto.map(|proto| proto.to_string().into()));
    for end in ends {
        parts.push(end.ip().to_string().into());
        parts.push(end.port().into());
    }
    json!({ "concat": parts })
}

/// The elements that make up a rule.
fn elements_of(installed: &Installed) -> Vec<Element> {
    let Installed { rule, plan, .. } = installed;
    let v = version(rule.from.ip());
    let (dev, proto) = (rule.dev.as_deref(), Some(rule.proto));
    let target = json!({"concat": [rule.to.ip().to_string(), rule.to.port()]});
    let suffix = if dev.is_some() { "_dev" } else { "" };
    let mut all = vec![Element {
        set: format!("to{v}{suffix}"),
        value: json!([concat(dev, proto, &[rule.from]), target]),
    }];
    for direction in ["forward", "reply"] {
        all.push(Element {
            set: format!("{direction}{v}{suffix}"),
            value: match dev {
                Some(_) => concat(dev, proto, &[rule.from]),
                None => concat(None, proto, &[rule.from, rule.to]),
            },
        });
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
        all.push(Element {
            set,
            value: json!([key, source.to_string()]),
        });
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

/// Does each of `verbs` to all elements of these rules, in one transaction.
fn elements(verbs: &[&str], rules: &[Installed]) -> Result<()> {
    let mut sets: HashMap<String, Vec<Value>> = HashMap::new();
    for element in rules.iter().flat_map(elements_of) {
        sets.entry(element.set).or_default().push(element.value);
    }
    let mut commands = Vec::new();
    for verb in verbs {
        for (set, elements) in &sets {
            let element = json!({"family": "inet", "table": TABLE, "name": set, "elem": elements});
            commands.push(json!({ *verb: {"element": element} }));
        }
    }
    nft(&["-j"], &document(commands)?)
}

fn document(commands: Vec<Value>) -> Result<Vec<u8>> {
    Ok(serde_json::to_vec(&json!({ "nftables": commands }))?)
}

/// Has nft(8) carry out a file as one transaction.
fn nft(options: &[&str], file: &[u8]) -> Result<()> {
    let mut child = Command::new("nft")
        .args(options)
        .args(["-f", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => anyhow::anyhow!(
                "the program nft is not there: install it (Debian: apt install nftables)"
            ),
            _ => anyhow::anyhow!("cannot run nft: {e}"),
        })?;
    // nft reads all of it before it says anything.
    let written = child.stdin.take().expect("it is piped").write_all(file);
    let output = child.wait_with_output().context("nft")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let said: Vec<&str> = said.split_whitespace().collect();
        bail!("nft refused: {}", said.join(" "));
    }
    written.context("cannot write to nft")
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

/// The set that counts a rule's packets, and the key of the rule as the kernel has it: its parts in
/// network byte order, each padded to four bytes.
fn counted_by(direction: &str, installed: &Installed) -> (String, Vec<u8>) {
    let rule = &installed.rule;
    let suffix = if rule.dev.is_some() { "_dev" } else { "" };
    let mut key = Vec::new();
    if let Some(dev) = &rule.dev {
        let mut name = [0; libc::IFNAMSIZ];
        name[..dev.len()].copy_from_slice(dev.as_bytes());
        key.extend(name);
    }
    key.extend([rule.proto.number(), 0, 0, 0]);
    let mut end = |at: SocketAddr| {
        key.extend(ip_bytes(at.ip()));
        key.extend(at.port().to_be_bytes());
        key.extend([0; 2]);
    };
    end(rule.from);
    if rule.dev.is_none() {
        end(rule.to);
    }
    let v = version(rule.from.ip());
    (format!("{direction}{v}{suffix}"), key)
}

/// Reads the counters of a set.
fn counters(set: &str, mut each: impl FnMut(&[u8], Traffic)) -> Result<()> {
    let mut body = vec![NFPROTO_INET, 0, 0, 0];
    push_attribute(&mut body, NFTA_SET_ELEM_LIST_TABLE, &name(TABLE));
    push_attribute(&mut body, NFTA_SET_ELEM_LIST_SET, &name(set));
    Socket::open_for(NETLINK_NETFILTER)
        .and_then(|mut socket| {
            socket.dump(kind(NFT_MSG_GETSETELEM), &body, |_, payload| {
                let message = Attributes::after(payload, HEADER_LEN);
                let list = message.nested(NFTA_SET_ELEM_LIST_ELEMENTS);
                for element in list.iter().flat_map(Attributes::values) {
                    if let Some((key, traffic)) = counter(element) {
                        each(key, traffic);
                    }
                }
            })
        })
        .map(|_| ())
        .or_else(|e| match e.raw_os_error() {
            // Somebody has removed the table: `list` says so.
            Some(libc::ENOENT) => Ok(()),
            _ => Err(e),
        })
        .with_context(|| format!("cannot read the counters of {TABLE}: run as root"))
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
