// SPDX-License-Identifier: GPL-2.0-or-later
//! Reading nftables by nfnetlink, and following it.

use std::collections::BTreeSet;
use std::io;

use netlink_sys::protocols::NETLINK_NETFILTER;
use netlink_sys::SocketAddr;

use super::expr::{self, Expr, Source};
use super::{xt, xtables, Base, Chain, Element, Family, Hook, Rule, Ruleset, Set, TableId, Value};
use crate::netlink::wire::{messages, push_attribute, Attributes, Socket};

/// linux/netfilter/nfnetlink.h, nf_tables.h.
const SUBSYSTEM: u16 = 10;
const GET_TABLE: u16 = 1;
const GET_CHAIN: u16 = 4;
const GET_RULE: u16 = 7;
const GET_SET: u16 = 10;
const GET_SET_ELEMENTS: u16 = 13;
const NEW_GENERATION: u16 = 15;
const GET_GENERATION: u16 = 16;
const GROUP_NFTABLES: u32 = 7;
/// Length of `struct nfgenmsg`.
const HEADER: usize = 4;

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
    /// Those of all sets.
    All,
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
        let mut ruleset = match read_nftables(elements) {
            Err(e) if no_nftables(&e) => Self::default(),
            read => read?,
        };
        xtables::read(&mut ruleset)?;
        ruleset.ipsets_by_device = ruleset.uses_ipsets() && xt::ipsets_by_device();
        Ok(ruleset)
    }

    /// What tells readings apart without reading: as long as it is the same, so is the ruleset. `None`
    /// where it has to be read, because legacy tables announce and number nothing.
    ///
    /// # Errors
    /// As [`Ruleset::read`].
    pub fn stamp() -> io::Result<Option<u32>> {
        if xtables::are_there()? {
            return Ok(None);
        }
        let numbered = Socket::open_for(NETLINK_NETFILTER).and_then(|mut s| generation(&mut s));
        match numbered {
            Err(e) if no_nftables(&e) => Ok(Some(0)),
            number => Ok(be32(number?.as_deref())),
        }
    }

    fn uses_ipsets(&self) -> bool {
        let chains = self.tables.values().flat_map(|table| table.chains.values());
        let mut exprs = chains
            .flat_map(|chain| &chain.rules)
            .flat_map(|rule| &rule.exprs);
        exprs.any(|expr| matches!(expr, Expr::Match { name, .. } if name == "set"))
    }
}

/// Whether an error says that the kernel has no nftables.
fn no_nftables(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EINVAL | libc::EOPNOTSUPP | libc::EPROTONOSUPPORT)
    )
}

fn read_nftables(elements: Elements) -> io::Result<Ruleset> {
    let mut socket = Socket::open_for(NETLINK_NETFILTER)?;
    for _ in 0..TRIES {
        let before = generation(&mut socket)?;
        let mut ruleset = Ruleset::default();
        match read_once(&mut socket, &mut ruleset, elements) {
            // A table or set went while it was being read.
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => continue,
            read => read?,
        }
        if before == generation(&mut socket)? {
            return Ok(ruleset);
        }
    }
    Err(io::Error::other(format!(
        "the ruleset of nftables changed during each of {TRIES} readings"
    )))
}

fn generation(socket: &mut Socket) -> io::Result<Option<Vec<u8>>> {
    let answer = socket.request(kind(GET_GENERATION), 0, &[0; HEADER])?;
    Ok(answer.and_then(|payload| Some(Attributes::after(&payload, HEADER).get(1)?.to_vec())))
}

fn kind(message: u16) -> u16 {
    SUBSYSTEM << 8 | message
}

fn family(number: u8) -> Option<Family> {
    Some(match number {
        1 => Family::Inet,
        2 => Family::Ip,
        3 => Family::Arp,
        5 => Family::Netdev,
        7 => Family::Bridge,
        10 => Family::Ip6,
        _ => return None,
    })
}

fn number(family: Family) -> u8 {
    match family {
        Family::Inet => 1,
        Family::Ip | Family::LegacyIp => 2,
        Family::Arp => 3,
        Family::Netdev => 5,
        Family::Bridge => 7,
        Family::Ip6 | Family::LegacyIp6 => 10,
    }
}

fn read_once(socket: &mut Socket, ruleset: &mut Ruleset, elements: Elements) -> io::Result<()> {
    let tables = &mut ruleset.tables;
    let mut consistent = true;
    let mut dump = |message, each: &mut dyn FnMut(TableId, &Attributes<'_>)| -> io::Result<()> {
        consistent &= socket.dump(kind(message), &[0; HEADER], |_, payload| {
            let attributes = Attributes::after(payload, HEADER);
            let family = payload.first().copied().and_then(family);
            if let (Some(family), Some(table)) = (family, attributes.string(1)) {
                each((family, table), &attributes);
            }
        })?;
        Ok(())
    };
    dump(GET_TABLE, &mut |id, a| {
        let flags = a
            .get(2)
            .and_then(<[u8]>::first_chunk)
            .map_or(0, |b| u32::from_be_bytes(*b));
        tables.entry(id).or_default().dormant = flags & 1 != 0;
    })?;
    dump(GET_CHAIN, &mut |id, a| {
        let Some(name) = a.string(3) else { return };
        let base = base(id.0, a);
        let table = tables.entry(id).or_default();
        table.chains.insert(
            name,
            Chain {
                base,
                rules: Vec::new(),
            },
        );
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
        let wanted = match elements {
            Elements::AllBut(own) if name == own => BTreeSet::new(),
            Elements::All | Elements::AllBut(_) => table.sets.keys().cloned().collect(),
            Elements::ForDevices => {
                let rules = table.chains.values().flat_map(|chain| &chain.rules);
                rules.flat_map(sets_of_devices).collect::<BTreeSet<_>>()
            }
        };
        for (set_name, set) in &mut table.sets {
            if !wanted.contains(set_name) && set.flags & SET_ANONYMOUS == 0 {
                continue;
            }
            let mut request = vec![number(*family), 0, 0, 0];
            push_attribute(&mut request, 1, &[name.as_bytes(), b"\0"].concat());
            push_attribute(&mut request, 2, &[set_name.as_bytes(), b"\0"].concat());
            let mut found = Vec::new();
            let consistent = socket.dump(kind(GET_SET_ELEMENTS), &request, |_, payload| {
                let list = Attributes::after(payload, HEADER).nested(3);
                let values = list.iter().flat_map(Attributes::values);
                found.extend(values.map(|value| element(&Attributes::after(value, 0))));
            })?;
            if !consistent {
                return Err(io::Error::from_raw_os_error(libc::ENOENT));
            }
            found.sort();
            set.elements = Some(found);
        }
    }
    Ok(())
}

/// Sets that a rule looks up with something that may be about a device, and verdict maps.
fn sets_of_devices(rule: &Rule) -> Vec<String> {
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
        Expr::Lookup { set, verdict, .. } if by_device || *verdict => Some(set.clone()),
        _ => None,
    });
    sets.collect()
}

fn be32(bytes: Option<&[u8]>) -> Option<u32> {
    bytes?.first_chunk().map(|b| u32::from_be_bytes(*b))
}

fn base(family: Family, chain: &Attributes<'_>) -> Option<Base> {
    let hook = chain.nested(4)?;
    let number = be32(hook.get(1))?;
    let hook_of_ip = [
        Hook::Prerouting,
        Hook::Input,
        Hook::Forward,
        Hook::Output,
        Hook::Postrouting,
        Hook::Ingress,
    ];
    let at = match family {
        Family::Netdev => *[Hook::Ingress, Hook::Egress].get(number as usize)?,
        Family::Arp => *[Hook::Input, Hook::Output, Hook::Forward].get(number as usize)?,
        _ => *hook_of_ip.get(number as usize)?,
    };
    const DEVICE_PREFIX: u16 = 2;
    let mut devices: Vec<String> = hook.string(3).into_iter().collect();
    if let Some(list) = hook.nested(4) {
        devices.extend(list.iter().map(|(kind, name)| {
            let end = name.iter().position(|b| *b == 0).unwrap_or(name.len());
            let name = String::from_utf8_lossy(&name[..end]);
            match kind {
                DEVICE_PREFIX => format!("{name}*"),
                _ => name.into_owned(),
            }
        }));
    }
    devices.sort();
    devices.dedup();
    Some(Base {
        hook: at,
        priority: be32(hook.get(2)).map_or(0, u32::cast_signed),
        kind: chain.string(7).unwrap_or_default(),
        devices,
        drops: be32(chain.get(5)) == Some(0),
    })
}

fn rule(a: &Attributes<'_>) -> Rule {
    let handle = a
        .get(3)
        .and_then(|b| b.first_chunk())
        .map_or(0, |b| u64::from_be_bytes(*b));
    let list = a.nested(4);
    let exprs = list.iter().flat_map(Attributes::values).map(|value| {
        let expr = Attributes::after(value, 0);
        let name = expr.string(1).unwrap_or_default();
        let data = expr.nested(2).unwrap_or_else(|| Attributes::after(&[], 0));
        expr::parse(&name, &data)
    });
    Rule {
        handle,
        exprs: exprs.collect(),
    }
}

fn set(a: &Attributes<'_>) -> Option<Set> {
    let concat = a.nested(9).and_then(|description| description.nested(2));
    let fields = concat.iter().flat_map(Attributes::values);
    let field = |value| be32(Attributes::after(value, 0).get(1)).map(|len| len as usize);
    Some(Set {
        flags: be32(a.get(3)).unwrap_or(0),
        key_len: be32(a.get(5))? as usize,
        fields: fields.filter_map(field).collect(),
        elements: None,
    })
}

fn element(a: &Attributes<'_>) -> Element {
    let data = |kind| Some(a.nested(kind)?.get(1)?.to_vec());
    let value = match (expr::verdict(a, 2), data(2)) {
        (Some(verdict), _) => Value::Verdict(verdict),
        (None, Some(data)) => Value::Data(data),
        (None, None) => Value::None,
    };
    Element {
        key: data(1).unwrap_or_default(),
        key_end: data(10),
        flags: be32(a.get(3)).unwrap_or(0),
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
    let mut socket = netlink_sys::Socket::new(NETLINK_NETFILTER)?;
    // Where the kernel allows no more, losses are noticed.
    let _ = socket.set_rx_buf_sz(1u32 << 20);
    socket.bind(&SocketAddr::new(0, 1 << (GROUP_NFTABLES - 1)))?;
    Ok(socket)
}

/// Whether a datagram of [`notifications`] is about a table that has none of these names.
pub fn changed(datagram: &[u8], own_tables: &[&str]) -> bool {
    messages(datagram).any(|message| {
        // Every transaction ends with the number of the new generation.
        if message.message_type() == kind(NEW_GENERATION) {
            return false;
        }
        let table = Attributes::after(message.payload(), HEADER).string(1);
        table.is_none_or(|table| !own_tables.contains(&table.as_str()))
    })
}
