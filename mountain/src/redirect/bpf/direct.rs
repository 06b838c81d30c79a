// SPDX-License-Identifier: GPL-2.0-or-later
//! Clients that speak to a rule's target themselves, through this host.
//!
//! Their packets look like those of redirected flows, so the programs keep flows for them, too. A rule
//! of its own in the programs' table names them: it redirects the target's address and port to
//! themselves. There is one for each target and client device, beside the rules that use it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use anyhow::{Context, Result};
use libbpf_rs::{MapCore, MapFlags};

use super::loaded::{entries, LoadedObject};
use super::{backend_number, bytes_of, end, read_from, types};
use super::{Backend, TableFlow, DIRECT, REPLY, SNAT};

/// Which hook of the client's device sees direct packets first.
const TCX: u8 = backend_number(Backend::Tcx);
const XDP: u8 = backend_number(Backend::Xdp);
/// Id of no rule.
const NO_RULE: u32 = u32::MAX;

type Rules = BTreeMap<Vec<u8>, types::mtn_rd_rule>;
/// An address with its port, and a protocol.
pub(super) type DirectTarget = (SocketAddr, u8);

pub(super) fn is_direct(rule: &types::mtn_rd_rule) -> bool {
    rule.flags & DIRECT != 0
}

/// The entry for the direct flows to a rule's target; `None` where the target sees this host, not its
/// clients.
fn beside(
    key: &types::mtn_rd_rule_key,
    rule: &types::mtn_rd_rule,
) -> Option<(types::mtn_rd_rule_key, types::mtn_rd_rule)> {
    if rule.flags & SNAT != 0 || is_direct(rule) {
        return None;
    }
    let key = types::mtn_rd_rule_key {
        addr: rule.to,
        port: rule.to_port,
        ..*key
    };
    let direct = types::mtn_rd_rule {
        id: NO_RULE,
        backend: if rule.backend < XDP { TCX } else { XDP },
        flags: DIRECT,
        target_veth: 0,
        client_veth: 0,
        ..*rule
    };
    Some((key, direct))
}

/// Enters what a new rule needs. XDP sees packets before tcx does: where one rule of several to a
/// target has it, it is for direct packets, too.
pub(super) fn add(
    loaded: &LoadedObject,
    key: &types::mtn_rd_rule_key,
    rule: &types::mtn_rd_rule,
) -> Result<()> {
    let Some((key, direct)) = beside(key, rule) else {
        return Ok(());
    };
    let rules = loaded.map("rules")?;
    let there = rules.lookup(bytes_of(&key), MapFlags::ANY)?;
    if there.is_some_and(|v| read_from::<types::mtn_rd_rule>(&v).backend >= direct.backend) {
        return Ok(());
    }
    rules
        .update(bytes_of(&key), bytes_of(&direct), MapFlags::ANY)
        .context("cannot enter the rule's target into the redirection program")
}

/// Makes the entries those that the rules need. Returns the targets that none needs any more.
pub(super) fn sweep(loaded: &LoadedObject) -> Result<BTreeSet<DirectTarget>> {
    let rules = loaded.map("rules")?;
    let (mut wanted, mut there) = (Rules::new(), Rules::new());
    for (key, value) in entries(rules)? {
        let rule: types::mtn_rd_rule = read_from(&value);
        if is_direct(&rule) {
            there.insert(key, rule);
        } else if let Some((key, direct)) = beside(&read_from(&key), &rule) {
            let entry = wanted.entry(bytes_of(&key).to_vec()).or_insert(direct);
            entry.backend = entry.backend.max(direct.backend);
        }
    }
    let mut gone = BTreeSet::new();
    for (key, rule) in &there {
        match wanted.get(key) {
            None => {
                let of: types::mtn_rd_rule_key = read_from(key);
                let to = end(rule.to, rule.to_port, of.ipv6 != 0);
                gone.insert((to, of.proto));
                let _ = rules.delete(key);
            }
            Some(direct) if direct.backend != rule.backend => {
                rules.update(key, bytes_of(direct), MapFlags::ANY)?;
            }
            Some(_) => {}
        }
    }
    Ok(gone)
}

/// Whether a flow is a direct one to one of these targets.
pub(super) fn is_to(flow: &TableFlow, targets: &BTreeSet<DirectTarget>) -> bool {
    let [source, destination] = flow.after;
    let target = match flow.f.flags & REPLY {
        0 => destination,
        _ => source,
    };
    flow.f.flags & DIRECT != 0 && targets.contains(&(target, flow.proto))
}
