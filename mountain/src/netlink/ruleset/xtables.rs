// SPDX-License-Identifier: GPL-2.0-or-later
//! Legacy iptables and ip6tables, by their own interface: the whole table as one block
//! (linux/netfilter_ipv4/ip_tables.h, linux/netfilter_ipv6/ip6_tables.h).

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use nix::sys::socket::{socket, AddressFamily, SockFlag, SockProtocol, SockType};

use super::expr::{self, Bitwise, Expr, Extension, Reg, Source, Verdict};
use super::{Base, Family, FirewallRule, FirewallTable, Hook, Ruleset, HOOKS_OF_IP};
use crate::host::socket_option;
use crate::netlink::wire::{text, u16_at, u32_at};

/// IPT_SO_GET_INFO and IPT_SO_GET_ENTRIES; those of IPv6 have the same numbers.
const GET_INFO: libc::c_int = 64;
const GET_ENTRIES: libc::c_int = 65;
const NAME_LEN: usize = 32;
/// `struct ipt_getinfo`: name, valid hooks, entry and underflow of five hooks, entries, size.
const INFO_LEN: usize = NAME_LEN + 4 + 20 + 20 + 4 + 4;
/// The entries begin behind name and size, aligned to 8.
const ENTRIES_AT: usize = NAME_LEN + 8;
/// A table that changes while it is read is read again so often.
const TRIES: usize = 10;

const LISTS: [(Family, &str); 2] = [
    (Family::LegacyIp, "ip_tables_names"),
    (Family::LegacyIp6, "ip6_tables_names"),
];

/// Names of the tables that there are of IPv4 and of IPv6, a line each.
///
/// # Errors
/// When one of the lists cannot be read: the other tells nothing without it.
pub(crate) fn legacy_tables() -> io::Result<[String; 2]> {
    listed_in(Path::new("/proc/thread-self/net"))
}

/// Whether there are any, whose changes nothing announces.
///
/// # Errors
/// As [`legacy_tables`].
pub(crate) fn has_legacy() -> io::Result<bool> {
    Ok(legacy_tables()?.iter().any(|names| !names.is_empty()))
}

fn listed_in(folder: &Path) -> io::Result<[String; 2]> {
    let [ipv4, ipv6] = LISTS.map(|(_, file)| match fs::read_to_string(folder.join(file)) {
        // The kernel has none of these.
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        names => names.map_err(|e| io::Error::new(e.kind(), format!("{file}: {e}"))),
    });
    Ok([ipv4?, ipv6?])
}

/// Adds the tables that the kernel lists, and asks for no others: asking makes a table.
pub(super) fn read(ruleset: &mut Ruleset) -> io::Result<()> {
    for ((family, _), names) in LISTS.iter().zip(legacy_tables()?) {
        for name in names.split_whitespace() {
            let table = read_table(*family, name).map_err(|e| {
                io::Error::new(e.kind(), format!("{} -t {name}: {e}", family.name()))
            })?;
            ruleset.tables.insert((*family, name.to_owned()), table);
        }
    }
    Ok(())
}

fn read_table(family: Family, name: &str) -> io::Result<FirewallTable> {
    let (domain, level) = match family {
        Family::LegacyIp6 => (AddressFamily::Inet6, libc::SOL_IPV6),
        _ => (AddressFamily::Inet, libc::SOL_IP),
    };
    let socket = socket(
        domain,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::Raw,
    )?;
    // SAFETY: the buffers are plain bytes.
    let get = |what, buffer: &mut [u8]| unsafe { socket_option::get(&socket, level, what, buffer) };
    for _ in 0..TRIES {
        let mut info = vec![0; INFO_LEN];
        info[..name.len().min(NAME_LEN - 1)]
            .copy_from_slice(&name.as_bytes()[..name.len().min(NAME_LEN - 1)]);
        get(GET_INFO, &mut info)?;
        let head = Head::new(name, &info);
        let mut block = vec![0; ENTRIES_AT + head.size];
        block[..NAME_LEN].copy_from_slice(&info[..NAME_LEN]);
        block[NAME_LEN..NAME_LEN + 4].copy_from_slice(&(head.size as u32).to_ne_bytes());
        match get(GET_ENTRIES, &mut block) {
            // Its size is another one by now.
            Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => continue,
            got => got?,
        }
        return parse(family, &head, &block[ENTRIES_AT..])
            .ok_or_else(|| io::Error::other("the kernel's table is not understood"));
    }
    Err(io::Error::other(format!(
        "changed during each of {TRIES} readings"
    )))
}

/// What is known of a table besides its entries.
pub(super) struct Head {
    name: String,
    valid: u32,
    entry: [usize; 5],
    underflow: [usize; 5],
    size: usize,
}

impl Head {
    pub(super) fn new(name: &str, info: &[u8]) -> Self {
        let word = |i: usize| u32_at(info, NAME_LEN + i * 4).unwrap_or(0);
        Self {
            name: name.to_owned(),
            valid: word(0),
            entry: std::array::from_fn(|i| word(1 + i) as usize),
            underflow: std::array::from_fn(|i| word(6 + i) as usize),
            size: word(12) as usize,
        }
    }

    /// The hooks that the table has chains at, with their numbers and the names of the chains.
    fn hooks(&self) -> impl Iterator<Item = (usize, Hook, String)> + '_ {
        let of_chains = HOOKS_OF_IP.into_iter().take(self.entry.len()).enumerate();
        let valid = of_chains.filter(move |(i, _)| self.valid & (1 << *i) != 0);
        valid.map(|(i, hook)| (i, hook, hook.name().to_uppercase()))
    }
}

/// A length or an offset.
fn length_at(bytes: &[u8], at: usize) -> Option<usize> {
    u16_at(bytes, at).map(usize::from)
}

/// Priority of a table's base chains (NF_IP_PRI_*).
fn priority(table: &str, hook: Hook) -> i32 {
    match table {
        "raw" => -300,
        "mangle" => -150,
        "nat" if matches!(hook, Hook::Prerouting | Hook::Output) => -100,
        "nat" => 100,
        "security" => 50,
        _ => 0,
    }
}

/// Where an entry is, and what it is.
struct Entry<'a> {
    at: usize,
    bytes: &'a [u8],
    target_at: usize,
    target: Extension,
}

/// A match or a target: `struct xt_entry_match`.
fn extension(bytes: &[u8]) -> Option<Extension> {
    let size = length_at(bytes, 0)?;
    Some(Extension {
        name: text(bytes.get(2..31)?),
        revision: u32::from(*bytes.get(31)?),
        info: bytes.get(32..size)?.to_vec(),
    })
}

/// The chains of a table's block of entries. `None`: it is not as expected.
pub(super) fn parse(family: Family, head: &Head, block: &[u8]) -> Option<FirewallTable> {
    let ip_len = if family == Family::LegacyIp6 { 136 } else { 84 };
    let mut entries = Vec::new();
    let mut at = 0;
    while at < block.len() {
        let target_at = length_at(block, at + ip_len + 4)?;
        let next = length_at(block, at + ip_len + 6)?;
        let bytes = block.get(at..at.checked_add(next).filter(|_| next > 0)?)?;
        entries.push(Entry {
            at,
            bytes,
            target_at,
            target: extension(bytes.get(target_at..)?)?,
        });
        at += next;
    }
    // A chain begins at a hook's entry, or behind its name in a target ERROR.
    let of_hooks = head.hooks().map(|(i, _, name)| (head.entry[i], name));
    let mut starts: BTreeMap<usize, String> = of_hooks.collect();
    for entry in &entries {
        if entry.target.name == "ERROR" {
            starts.insert(entry.at + entry.bytes.len(), text(&entry.target.info));
        }
    }
    let mut table = FirewallTable::default();
    let mut chain = String::new();
    for entry in &entries {
        if let Some(name) = starts.get(&entry.at) {
            chain.clone_from(name);
            table.chains.entry(chain.clone()).or_default();
        }
        if entry.target.name == "ERROR" {
            continue;
        }
        let exprs = rule(family, entry, &starts)?;
        let rules = &mut table.chains.entry(chain.clone()).or_default().rules;
        rules.push(FirewallRule {
            handle: rules.len() as u64 + 1,
            exprs,
        });
    }
    for (i, hook, name) in head.hooks() {
        let policy = entries.iter().find(|entry| entry.at == head.underflow[i])?;
        let chain = table.chains.get_mut(&name)?;
        // The policy is the last rule.
        chain.rules.pop();
        chain.base = Some(Base {
            hook,
            priority: priority(&head.name, hook),
            kind: head.name.clone(),
            devices: Vec::new(),
            drops: u32_at(&policy.target.info, 0)?.cast_signed() == -1,
        });
    }
    Some(table)
}

fn rule(family: Family, entry: &Entry<'_>, starts: &BTreeMap<usize, String>) -> Option<Vec<Expr>> {
    let mut exprs = Vec::new();
    let ipv6 = family == Family::LegacyIp6;
    let gotos = conditions(entry.bytes, ipv6, &mut exprs)?;
    let mut at = if ipv6 { 168 } else { 112 };
    while at < entry.target_at {
        let size = length_at(entry.bytes, at)?;
        exprs.push(Expr::Match(extension(entry.bytes.get(at..)?)?));
        at += Some(size).filter(|size| *size > 0)?;
    }
    if !entry.target.name.is_empty() {
        exprs.push(Expr::Target(entry.target.clone()));
        return Some(exprs);
    }
    let verdict = u32_at(&entry.target.info, 0)?.cast_signed();
    exprs.push(Expr::Verdict(match verdict {
        // -NF_ACCEPT - 1, -NF_DROP - 1, XT_RETURN.
        -2 => Verdict::Accept,
        -1 => Verdict::Drop,
        -5 => Verdict::Return,
        verdict if verdict < 0 => Verdict::Other(verdict),
        next if next as usize == entry.at + entry.bytes.len() => Verdict::Continue,
        to => {
            let chain = starts.get(&(to as usize))?.clone();
            match gotos {
                true => Verdict::Goto(chain),
                false => Verdict::Jump(chain),
            }
        }
    }));
    Some(exprs)
}

/// Register for what conditions and matches load: the last of the old ones, which iptables-nft does not use.
pub(super) const SCRATCH: Reg = 48;

/// Whether what comes from `source`, as far as the mask covers it, is `value`.
pub(super) fn compare(source: Source, mask: &[u8], value: &[u8], invert: bool) -> Vec<Expr> {
    let len = value.len();
    let mut exprs = vec![Expr::Load {
        source,
        dreg: SCRATCH,
        len,
    }];
    if mask.iter().any(|byte| *byte != 0xff) {
        exprs.push(Expr::Bitwise {
            sreg: SCRATCH,
            dreg: SCRATCH,
            len,
            how: Bitwise::MaskXor(mask.to_vec(), vec![0; len]),
        });
    }
    exprs.push(Expr::equals(SCRATCH, value, invert));
    exprs
}

const INVERT_IIF: u8 = 0x01;
const INVERT_OIF: u8 = 0x02;
const INVERT_TOS: u8 = 0x04;
const INVERT_SOURCE: u8 = 0x08;
const INVERT_DESTINATION: u8 = 0x10;
const INVERT_FRAGMENT: u8 = 0x20;
const INVERT_PROTOCOL: u8 = 0x40;

/// What an entry asks before its matches; true for a goto.
fn conditions(b: &[u8], ipv6: bool, exprs: &mut Vec<Expr>) -> Option<bool> {
    // `struct ipt_ip` and `struct ip6t_ip6`: source and destination, then their masks; names and masks of both
    // devices, 16 bytes each; the protocol, of IPv6 the TOS, flags and inverting flags.
    let len = if ipv6 { 16 } else { 4 };
    let protocol_at = 4 * len + 4 * 16;
    let flags_at = protocol_at + if ipv6 { 3 } else { 2 };
    let address = |i: usize| b.get(i * len..(i + 1) * len);
    let name = |i: usize| b.get(4 * len + i * 16..4 * len + (i + 1) * 16);
    let (flags, inverted) = (*b.get(flags_at)?, *b.get(flags_at + 1)?);
    let places = if ipv6 { [8, 24] } else { [12, 16] };
    for (i, flag) in [INVERT_SOURCE, INVERT_DESTINATION].into_iter().enumerate() {
        let (value, mask, invert) = (address(i)?, address(i + 2)?, inverted & flag != 0);
        if invert || mask.iter().any(|byte| *byte != 0) {
            let source = Source::Payload(1, places[i], len as u32);
            exprs.extend(compare(source, mask, value, invert));
        }
    }
    let sides = [
        (expr::META_IIFNAME, INVERT_IIF),
        (expr::META_OIFNAME, INVERT_OIF),
    ];
    for (i, (key, flag)) in sides.into_iter().enumerate() {
        let (name, mask, invert) = (name(i)?, name(i + 2)?, inverted & flag != 0);
        // The beginning of a name, or all of it with its end.
        let asked = mask.iter().take_while(|byte| **byte != 0).count();
        if invert || asked > 0 {
            exprs.push(Expr::Load {
                source: Source::Meta(key),
                dreg: SCRATCH,
                len: name.len(),
            });
            exprs.push(Expr::equals(SCRATCH, &name[..asked], invert));
        }
    }
    let protocol = u16_at(b, protocol_at)? as u8;
    if protocol != 0 && (!ipv6 || flags & 1 != 0) {
        let source = Source::Meta(expr::META_L4PROTO);
        let invert = inverted & INVERT_PROTOCOL != 0;
        exprs.extend(compare(source, &[0xff], &[protocol], invert));
    }
    let (condition, goto) = match ipv6 {
        false => {
            let text = format!("fragment {}", inverted & INVERT_FRAGMENT == 0);
            ((flags & 1 != 0).then_some(text), 2)
        }
        true => {
            let tos = b.get(protocol_at + 2)?;
            let text = format!("tos {tos} {}", inverted & INVERT_TOS == 0);
            ((flags & 2 != 0).then_some(text), 4)
        }
    };
    exprs.extend(condition.map(Expr::Condition));
    Some(flags & goto != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_list_that_cannot_be_read_is_not_taken_for_empty() {
        let folder = tempfile::tempdir().unwrap();
        let list = |file: &str| folder.path().join(file);
        assert_eq!(listed_in(folder.path()).unwrap(), ["", ""]);
        fs::write(list("ip_tables_names"), "nat\n").unwrap();
        assert_eq!(listed_in(folder.path()).unwrap(), ["nat\n", ""]);
        fs::create_dir(list("ip6_tables_names")).unwrap();
        let error = listed_in(folder.path()).unwrap_err().to_string();
        assert!(error.starts_with("ip6_tables_names: "), "{error}");
    }
}
