// SPDX-License-Identifier: GPL-2.0-or-later
//! Reading nftables by nfnetlink, and following it.

use std::collections::BTreeSet;
use std::io;

use netlink_sys::protocols::NETLINK_NETFILTER;

use super::expr::{self, Expr, Source};
use super::sets::in_order;
use super::{
    xt, xtables, Base, Chain, Element, Family, FirewallRule, FirewallTable, Hook, Ruleset,
};
use super::{Set, TableId, Value, HOOKS_OF_IP};
use crate::netlink::uapi::NFNL_SUBSYS_NFTABLES;
use crate::netlink::wire::{
    self, attribute, c_string, messages, netfilter, text, unless, Attributes, Socket,
    NFNL_HEADER_LEN,
};

/// NFT_MSG_* of linux/netfilter/nf_tables.h.
const GET_TABLE: u16 = netfilter(NFNL_SUBSYS_NFTABLES, 1);
const GET_CHAIN: u16 = netfilter(NFNL_SUBSYS_NFTABLES, 4);
const GET_RULE: u16 = netfilter(NFNL_SUBSYS_NFTABLES, 7);
const GET_SET: u16 = netfilter(NFNL_SUBSYS_NFTABLES, 10);
const GET_SET_ELEMENTS: u16 = netfilter(NFNL_SUBSYS_NFTABLES, 13);
const NEW_ELEMENTS: u16 = netfilter(NFNL_SUBSYS_NFTABLES, 12);
const OLD_ELEMENTS: u16 = netfilter(NFNL_SUBSYS_NFTABLES, 14);
const NEW_GENERATION: u16 = netfilter(NFNL_SUBSYS_NFTABLES, 15);
const GET_GENERATION: u16 = netfilter(NFNL_SUBSYS_NFTABLES, 16);
/// linux/netfilter/nfnetlink.h.
const NFNLGRP_NFTABLES: u32 = 7;

/// NFT_SET_*.
pub(super) const SET_ANONYMOUS: u32 = 1;
pub(super) const SET_INTERVAL: u32 = 4;
pub(super) const SET_TIMEOUT: u32 = 0x10;
pub(super) const SET_EVAL: u32 = 0x20;
pub(super) const SET_CONCAT: u32 = 0x80;

/// A ruleset that changes while it is read is read again so often.
const TRIES: usize = 10;

/// Which sets' elements are read. There may be very many in others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Elements {
    /// Those of sets that are looked up with something about a device, of verdict maps and of
    /// anonymous sets: enough where devices are all that is known of a packet.
    ForDevices,
    /// Those of all sets but in the tables of this name: our own may hold very many.
    AllBut(&'static str),
}

impl Ruleset {
    /// Reads nftables and legacy xtables of the calling thread's network namespace. Legacy tables are
    /// asked for only where /proc lists them, because the kernel makes those that it is asked for.
    ///
    /// # Errors
    /// Without CAP_NET_ADMIN, or when the ruleset keeps changing. A kernel that has neither kind of
    /// rules has an empty ruleset.
    pub fn read(elements: Elements) -> io::Result<Self> {
        let mut ruleset = unless(read_nftables(elements), &NO_NFTABLES)?.unwrap_or_default();
        xtables::read(&mut ruleset)?;
        ruleset.look_at_ipsets();
        Ok(ruleset)
    }

    /// Looks whether ipsets are about devices, and returns whether that has changed. A list of sets may get one that is,
    /// and [`Ruleset::stamp`] does not tell.
    pub(crate) fn look_at_ipsets(&mut self) -> bool {
        let by_device = self.uses_ipsets() && xt::ipsets_by_device();
        std::mem::replace(&mut self.ipsets_by_device, by_device) != by_device
    }

    /// What tells readings apart without reading: as long as it is the same, so is the ruleset. `None`
    /// where it has to be read, because legacy tables announce and number nothing.
    ///
    /// # Errors
    /// As [`Ruleset::read`].
    pub fn stamp() -> io::Result<Option<u32>> {
        if xtables::has_legacy()? {
            return Ok(None);
        }
        let numbered = Socket::open_for(NETLINK_NETFILTER).and_then(|mut s| generation(&mut s));
        Ok(unless(numbered, &NO_NFTABLES)?.unwrap_or(Some(0)))
    }

    fn uses_ipsets(&self) -> bool {
        let chains = self.tables.values().flat_map(|table| table.chains.values());
        let mut exprs = chains
            .flat_map(|chain| &chain.rules)
            .flat_map(|rule| &rule.exprs);
        exprs.any(|expr| match expr {
            Expr::Match(found) => found.name == "set",
            Expr::Target(found) => found.name == "SET",
            _ => false,
        })
    }
}

/// Errors by which a kernel says that it has no nftables.
const NO_NFTABLES: [i32; 3] = [libc::EINVAL, libc::EOPNOTSUPP, libc::EPROTONOSUPPORT];

/// Whether something may translate the sources of forwarded packets in the calling thread's network
/// namespace: a chain of type `nat` after routing (iptables of today makes such too), or the older
/// iptables' table.
///
/// # Errors
/// Without CAP_NET_ADMIN, or when the older iptables' tables cannot be listed. A kernel without nftables
/// translates nothing by them.
pub fn translates_sources() -> io::Result<bool> {
    let mut legacy = xtables::legacy_tables()?.into_iter();
    if legacy.any(|names| names.lines().any(|name| name == "nat")) {
        return Ok(true);
    }
    let mut found = false;
    let all = [0; NFNL_HEADER_LEN];
    let dumped = wire::dump(NETLINK_NETFILTER, GET_CHAIN, &all, |payload| {
        let chain = Attributes::after(payload, NFNL_HEADER_LEN);
        let base = family(payload).and_then(|family| base(family, &chain));
        found |= base.is_some_and(|base| base.hook == Hook::Postrouting && base.kind == "nat");
    });
    unless(dumped, &NO_NFTABLES)?;
    Ok(found)
}

fn read_nftables(elements: Elements) -> io::Result<Ruleset> {
    let mut socket = Socket::open_for(NETLINK_NETFILTER)?;
    for _ in 0..TRIES {
        let before = generation(&mut socket)?;
        let mut ruleset = Ruleset::default();
        // ENOENT: a table or set went while it was being read.
        let read = unless(
            read_once(&mut socket, &mut ruleset, elements),
            &[libc::ENOENT],
        )?;
        if read.is_some() && before == generation(&mut socket)? {
            return Ok(ruleset);
        }
    }
    Err(io::Error::other(format!(
        "the ruleset of nftables changed during each of {TRIES} readings"
    )))
}

fn generation(socket: &mut Socket) -> io::Result<Option<u32>> {
    let answer = socket.request(GET_GENERATION, 0, &[0; NFNL_HEADER_LEN])?;
    Ok(answer.and_then(|payload| Attributes::after(&payload, NFNL_HEADER_LEN).be32(1)))
}

/// NFPROTO_*. The others are of packets that are not IP (ARP).
const FAMILIES: [(u8, Family); 5] = [
    (1, Family::Inet),
    (2, Family::Ip),
    (5, Family::Netdev),
    (7, Family::Bridge),
    (10, Family::Ip6),
];

/// That of a message.
fn family(payload: &[u8]) -> Option<Family> {
    let number = payload.first()?;
    let of = FAMILIES.iter().find(|(known, _)| known == number);
    of.map(|(_, family)| *family)
}

fn read_once(socket: &mut Socket, ruleset: &mut Ruleset, elements: Elements) -> io::Result<()> {
    let tables = &mut ruleset.tables;
    let mut consistent = true;
    let mut dump = |message, each: &mut dyn FnMut(TableId, &Attributes<'_>)| -> io::Result<()> {
        consistent &= socket.dump(message, &[0; NFNL_HEADER_LEN], |payload| {
            let attributes = Attributes::after(payload, NFNL_HEADER_LEN);
            if let (Some(family), Some(table)) = (family(payload), attributes.string(1)) {
                each((family, table), &attributes);
            }
        })?;
        Ok(())
    };
    dump(GET_TABLE, &mut |id, a| {
        tables.entry(id).or_default().dormant = a.be32(2).unwrap_or(0) & 1 != 0;
    })?;
    dump(GET_CHAIN, &mut |id, a| {
        let Some(name) = a.string(3) else { return };
        let chain = Chain {
            base: base(id.0, a),
            rules: Vec::new(),
        };
        tables.entry(id).or_default().chains.insert(name, chain);
    })?;
    dump(GET_SET, &mut |id, a| {
        if let (Some(name), Some(set)) = (a.string(2), set(a)) {
            tables.entry(id).or_default().sets.insert(name, set);
        }
    })?;
    dump(GET_RULE, &mut |id, a| {
        let Some(chain) = a.string(2) else { return };
        let table = tables.entry(id).or_default();
        table.chains.entry(chain).or_default().rules.push(rule(a));
    })?;
    read_elements(socket, ruleset, elements)?;
    // The generations are compared besides, which notices what happens between the dumps.
    match consistent {
        true => Ok(()),
        false => Err(io::Error::from_raw_os_error(libc::ENOENT)),
    }
}

fn read_elements(socket: &mut Socket, ruleset: &mut Ruleset, elements: Elements) -> io::Result<()> {
    for ((family, name), table) in &mut ruleset.tables {
        mark_updated(table);
        let wanted = match elements {
            Elements::AllBut(own) if name == own => BTreeSet::new(),
            Elements::AllBut(_) => table.sets.keys().cloned().collect(),
            Elements::ForDevices => {
                let rules = table.chains.values().flat_map(|chain| &chain.rules);
                rules.flat_map(sets_of_devices).collect::<BTreeSet<_>>()
            }
        };
        for (set_name, set) in &mut table.sets {
            if !wanted.contains(set_name) && set.flags & SET_ANONYMOUS == 0 {
                continue;
            }
            let number = FAMILIES.iter().find(|(_, known)| known == family);
            let mut request = vec![number.map_or(0, |(number, _)| *number), 0, 0, 0];
            request.extend(attribute(1, &c_string(name)));
            request.extend(attribute(2, &c_string(set_name)));
            let mut found = Vec::new();
            let consistent = socket.dump(GET_SET_ELEMENTS, &request, |payload| {
                let list = Attributes::after(payload, NFNL_HEADER_LEN).inside(3);
                let elements = list.values().map(|value| Attributes::after(value, 0));
                found.extend(elements.map(|attributes| element(&attributes)));
            })?;
            if !consistent {
                return Err(io::Error::from_raw_os_error(libc::ENOENT));
            }
            set.elements = Some(in_order(set, found));
        }
    }
    Ok(())
}

/// Packets add elements to sets without a flag that says so, too, and nothing announces it.
pub(super) fn mark_updated(table: &mut FirewallTable) {
    let rules = table.chains.values().flat_map(|chain| &chain.rules);
    for expr in rules.flat_map(|rule| &rule.exprs) {
        let name = match expr {
            Expr::Effect(update) if update.name == expr::SET_UPDATE => update.set.as_ref(),
            _ => None,
        };
        let Some(name) = name else { continue };
        if let Some(set) = table.sets.get_mut(name) {
            set.flags |= SET_EVAL;
        }
    }
}

/// Sets that a rule looks up with something that may be about a device, and verdict maps.
fn sets_of_devices(rule: &FirewallRule) -> Vec<String> {
    let by_device = rule.exprs.iter().any(|expr| match expr {
        Expr::Load {
            source: Source::Meta(key),
            ..
        } => matches!(
            *key,
            expr::META_IIF
                ..=expr::META_OIFTYPE
                    | expr::META_IIFGROUP
                    | expr::META_OIFGROUP
                    | expr::META_IIFKIND
                    | expr::META_OIFKIND
        ),
        Expr::Immediate { .. } => true,
        _ => false,
    });
    let sets = rule.exprs.iter().filter_map(|expr| match expr {
        Expr::Lookup(lookup) if by_device || lookup.verdict => Some(lookup.set.clone()),
        _ => None,
    });
    sets.collect()
}

fn base(family: Family, chain: &Attributes<'_>) -> Option<Base> {
    let hook = chain.nested(4)?;
    let number = hook.be32(1)?;
    let at = match family {
        Family::Netdev => *[Hook::Ingress, Hook::Egress].get(number as usize)?,
        _ => *HOOKS_OF_IP.get(number as usize)?,
    };
    const DEVICE_PREFIX: u16 = 2;
    let mut devices: Vec<String> = hook.string(3).into_iter().collect();
    if let Some(list) = hook.nested(4) {
        devices.extend(list.iter().map(|(kind, name)| match kind {
            DEVICE_PREFIX => format!("{}*", text(name)),
            _ => text(name),
        }));
    }
    devices.sort();
    devices.dedup();
    Some(Base {
        hook: at,
        priority: hook.be32(2).map_or(0, u32::cast_signed),
        kind: chain.string(7).unwrap_or_default(),
        devices,
        drops: chain.be32(5) == Some(0),
    })
}

fn rule(a: &Attributes<'_>) -> FirewallRule {
    let list = a.inside(4);
    let exprs = list
        .values()
        .map(|value| expr::decode(&Attributes::after(value, 0)));
    FirewallRule {
        handle: a.be64(3).unwrap_or(0),
        exprs: exprs.collect(),
    }
}

fn set(a: &Attributes<'_>) -> Option<Set> {
    let concat = a.inside(9).inside(2);
    let field = |value| Attributes::after(value, 0).be32(1).map(|len| len as usize);
    Some(Set {
        flags: a.be32(3).unwrap_or(0),
        key_len: a.be32(5)? as usize,
        data_len: a.be32(7).unwrap_or(0) as usize,
        fields: concat.values().filter_map(field).collect(),
        elements: None,
    })
}

pub(super) fn element(a: &Attributes<'_>) -> Element {
    let data = |kind| Some(a.nested(kind)?.get(1)?.to_vec());
    let value = match (expr::verdict(a, 2), data(2)) {
        (Some(verdict), _) => Value::Verdict(verdict),
        (None, Some(data)) => Value::Data(data),
        (None, None) => Value::None,
    };
    // One, or a list.
    let one = a.nested(7).into_iter();
    let list = a.inside(11);
    let more = list.values().map(|value| Attributes::after(value, 0));
    let exprs = one.chain(more).map(|expr| expr::decode(&expr));
    let limits = exprs.filter_map(|expr| match expr {
        Expr::Quiet(_) => None,
        Expr::Limit(what) => Some(what),
        other => Some(format!("{other:?}")),
    });
    Element {
        limits: limits.collect(),
        key: data(1).unwrap_or_default(),
        key_end: data(10),
        flags: a.be32(3).unwrap_or(0),
        value,
    }
}

/// A socket on which the kernel announces changes of nftables, in the calling thread's network
/// namespace. Datagrams from it are for [`changed`]; an error of reading (ENOBUFS above all) means
/// that some were lost, which counts as a change.
///
/// # Errors
/// When the kernel has no nfnetlink, or without CAP_NET_ADMIN.
pub fn notifications() -> io::Result<netlink_sys::Socket> {
    wire::subscribe(NETLINK_NETFILTER, &[NFNLGRP_NFTABLES])
}

/// What a change of nftables is about; the more, the greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Changed {
    /// Tables of ours only.
    Ours,
    /// Elements of others' sets and maps. They come and go all day, by `fail2ban` or a resolver.
    Elements,
    /// Others' rules, chains, sets or tables.
    Rules,
}

/// What a datagram of [`notifications`] is about, where tables of these names are ours.
pub fn changed(datagram: &[u8], own_tables: &[&str]) -> Changed {
    let about = messages(datagram).map(|message| {
        let kind = message.message_type();
        // Every transaction ends with the number of the new generation.
        if kind == NEW_GENERATION {
            return Changed::Ours;
        }
        let table = Attributes::after(message.payload(), NFNL_HEADER_LEN).string(1);
        match table.is_some_and(|table| own_tables.contains(&table.as_str())) {
            true => Changed::Ours,
            false if [NEW_ELEMENTS, OLD_ELEMENTS].contains(&kind) => Changed::Elements,
            false => Changed::Rules,
        }
    });
    about.max().unwrap_or(Changed::Ours)
}
