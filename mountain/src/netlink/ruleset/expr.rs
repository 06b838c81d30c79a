// SPDX-License-Identifier: GPL-2.0-or-later
//! The parts that rules are made of, as the kernel executes them.

use super::residue::EffectKind;
use crate::netlink::wire::{Attributes, AF_INET, AF_INET6};

/// Where a register begins, in bytes: 16 of 4 bytes follow each other.
pub(crate) type Reg = usize;

/// Room of all registers, bytes.
pub(crate) const REGISTERS: usize = 64;

/// What a rule, or an element of a verdict map, decides.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    Accept,
    Drop,
    Return,
    Continue,
    Jump(String),
    Goto(String),
    /// Something else that ends the packet's way.
    Other(i32),
}

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// NFT_META_*.
    Meta(u32),
    /// NFT_PAYLOAD_* base, offset and length in bytes.
    Payload(u32, u32, u32),
    /// Anything else that a packet's device does not change, by a name that is its identity.
    Other(String),
    /// Something that the route or the device decides in a way not evaluated here.
    ByDevice(String),
    /// The route's MTU less the headers.
    Mss,
}

/// How bytes are changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Bitwise {
    MaskXor(Vec<u8>, Vec<u8>),
    /// In numbers of so many bytes: to network or host order.
    Swap(usize),
    /// Another one, by a name that is its identity.
    Other(String),
}

/// One part of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Expr {
    Load {
        source: Source,
        dreg: Reg,
        len: usize,
    },
    Immediate {
        dreg: Reg,
        data: Vec<u8>,
    },
    Verdict(Verdict),
    /// Every comparison is one with a range: most hold a single value, or have one end.
    Range {
        invert: bool,
        sreg: Reg,
        from: Vec<u8>,
        to: Vec<u8>,
    },
    Bitwise {
        sreg: Reg,
        dreg: Reg,
        len: usize,
        how: Bitwise,
    },
    Lookup(Lookup),
    /// Holds for some packets.
    Condition(String),
    /// Holds for some packets, by a state of its own: limit, quota...
    Limit(String),
    Match(Extension),
    Target(Extension),
    /// Counts, logs or traces.
    Quiet(&'static str),
    Effect(Statement),
    Unknown(String),
}

impl Expr {
    /// Whether a register holds this value, or another one.
    pub(super) fn equals(sreg: Reg, value: &[u8], invert: bool) -> Self {
        Self::Range {
            invert,
            sreg,
            from: value.to_vec(),
            to: value.to_vec(),
        }
    }
}

/// A look-up in a set; with `dreg` for the value that a map has for it, with `verdict` for the verdict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lookup {
    pub set: String,
    pub sreg: Reg,
    pub dreg: Option<Reg>,
    pub verdict: bool,
    pub invert: bool,
}

/// A match or a target of xtables, with its options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Extension {
    pub name: String,
    pub revision: u32,
    pub info: Vec<u8>,
}

impl Extension {
    /// Equal of those that do the same.
    pub(super) fn identity(&self) -> String {
        format!("{} {} {}", self.name, self.revision, hex(&self.info))
    }
}

/// Something done to a packet or because of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Statement {
    pub kind: EffectKind,
    /// Much as nft(8) calls it.
    pub name: &'static str,
    /// What it is done with, apart from registers: its identity.
    pub fixed: String,
    /// Registers that it reads, by what they mean to it.
    pub registers: Vec<(u16, Reg)>,
    /// The set of the table whose keys are in them.
    pub set: Option<String>,
    /// Packets of the other family pass by: an address of this one is among the registers, in a chain of both (AF_INET,
    /// AF_INET6).
    pub family: Option<u8>,
    /// Ends the packet's way through the chain.
    pub ends: bool,
}

/// Names of statements.
pub(crate) const SET_UPDATE: &str = "set update";
pub(crate) const OBJECT: &str = "object";
pub(crate) const SYNPROXY: &str = "synproxy";
const NAT: &str = "nat";
const TPROXY: &str = "tproxy";

/// NFTA_DYNSET_SREG_DATA: what an element of a map gets.
pub(crate) const NEW_DATA: u16 = 5;

fn reg(attributes: &Attributes<'_>, kind: u16) -> Option<Reg> {
    register(attributes.be32(kind)?)
}

/// NFT_REG_1.. are of 16 bytes, NFT_REG32_00.. of 4; NFT_REG_VERDICT is none of them.
fn register(number: u32) -> Option<Reg> {
    match number as usize {
        n @ 1..=4 => Some((n - 1) * 16),
        n @ 8..=23 => Some((n - 8) * 4),
        _ => None,
    }
}

fn data(attributes: &Attributes<'_>, kind: u16) -> Option<Vec<u8>> {
    const NFTA_DATA_VALUE: u16 = 1;
    let nested = attributes.nested(kind)?;
    nested.get(NFTA_DATA_VALUE).map(<[u8]>::to_vec)
}

/// The verdict in an NFTA_*_DATA attribute, if it is one.
pub(super) fn verdict(attributes: &Attributes<'_>, kind: u16) -> Option<Verdict> {
    const NFTA_DATA_VERDICT: u16 = 2;
    const NFTA_VERDICT_CODE: u16 = 1;
    const NFTA_VERDICT_CHAIN: u16 = 2;
    let nested = attributes.nested(kind)?.nested(NFTA_DATA_VERDICT)?;
    let code = nested.be32(NFTA_VERDICT_CODE)?.cast_signed();
    let chain = nested.string(NFTA_VERDICT_CHAIN);
    Some(match (code, chain) {
        (-1, _) => Verdict::Continue,
        (-3, Some(chain)) => Verdict::Jump(chain),
        (-4, Some(chain)) => Verdict::Goto(chain),
        (-5, _) => Verdict::Return,
        (1, _) => Verdict::Accept,
        (code, _) if code & 0xff == 0 => Verdict::Drop,
        (code, _) => Verdict::Other(code),
    })
}

/// Attributes as text, in the order of their kinds, without those in `but`.
fn identity(attributes: &Attributes<'_>, but: &[u16]) -> String {
    let mut all: Vec<String> = attributes
        .iter()
        .filter(|(kind, _)| !but.contains(kind))
        .map(|(kind, value)| format!("{kind}={}", hex(value)))
        .collect();
    all.sort();
    all.join(" ")
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Decodes one expression of a rule or an element.
pub(super) fn decode(expr: &Attributes<'_>) -> Expr {
    let name = expr.string(1).unwrap_or_default();
    parse(&name, &expr.inside(2))
}

/// Anything that is not understood becomes [`Expr::Unknown`].
pub(super) fn parse(name: &str, a: &Attributes<'_>) -> Expr {
    known(name, a).unwrap_or_else(|| Expr::Unknown(name.to_owned()))
}

fn known(name: &str, a: &Attributes<'_>) -> Option<Expr> {
    use EffectKind as E;
    Some(match name {
        "meta" => meta(a)?,
        "payload" => payload(a)?,
        "ct" => ct(a)?,
        "fib" => fib(a)?,
        "rt" => rt(a)?,
        "immediate" => immediate(a)?,
        "cmp" => cmp(a)?,
        "range" => range(a)?,
        "bitwise" => bitwise(a)?,
        "byteorder" => byteorder(a)?,
        "lookup" => lookup(a)?,
        "exthdr" => exthdr(a)?,
        // What a packet's device does not change, by the attribute that names the register.
        "xfrm" | "osf" | "numgen" => other(name, a, 1)?,
        "socket" | "tunnel" => other(name, a, 2)?,
        // Of a register (jhash, 1), what is in it would have to be known.
        "hash" if !a.has(1) => other(name, a, 2)?,
        "limit" => Expr::Limit(format!("limit {}", identity(a, &[]))),
        // Without how much of it is used up.
        "quota" => Expr::Limit(format!("quota {}", identity(a, &[3, 4]))),
        "connlimit" => Expr::Limit(format!("ct count {}", identity(a, &[]))),
        "counter" => Expr::Quiet("counter"),
        "log" => Expr::Quiet("log"),
        "last" => Expr::Quiet("last"),
        // NFT_OBJECT_COUNTER
        "objref" if a.be32(1) == Some(1) => Expr::Quiet("counter"),
        "objref" => statement(E::Object, OBJECT, a, &[3]),
        "match" | "target" => compat(name, a)?,
        "nat" => statement(E::Nat, NAT, a, &[3, 4, 5, 6]),
        "masq" => statement(E::Masquerade, "masquerade", a, &[2, 3]),
        "redir" => statement(E::Redirect, "redirect", a, &[1, 2]),
        "tproxy" => statement(E::Forward, TPROXY, a, &[2, 3]),
        "dup" => statement(E::Copy, "dup", a, &[1, 2]),
        "fwd" => statement(E::Forward, "fwd", a, &[1, 2]),
        "queue" => statement(E::Queue, "queue", a, &[4]),
        "dynset" => statement(E::Remember, SET_UPDATE, a, &[4, NEW_DATA]),
        "reject" => statement(E::Drop, "reject", a, &[]),
        "synproxy" => statement(E::Drop, SYNPROXY, a, &[]),
        "notrack" => statement(E::Track, "notrack", a, &[]),
        "flow_offload" => statement(E::Forward, "flow add", a, &[]),
        _ => return None,
    })
}

/// A statement that reads the registers which attributes of these kinds name.
fn statement(kind: EffectKind, name: &'static str, a: &Attributes<'_>, registers: &[u16]) -> Expr {
    let of = |kind: &u16| Some((*kind, reg(a, *kind)?));
    let set = match name {
        SET_UPDATE => a.string(1),
        OBJECT => a.string(4),
        _ => None,
    };
    // NFTA_NAT_FAMILY and NFTA_TPROXY_FAMILY; NFPROTO_INET is both.
    let family = match name {
        NAT => a.be32(2),
        TPROXY => a.be32(1),
        _ => None,
    };
    let family = family.and_then(|family| u8::try_from(family).ok());
    Expr::Effect(Statement {
        kind,
        name,
        fixed: identity(a, registers),
        registers: registers.iter().filter_map(of).collect(),
        set,
        family: family.filter(|family| [AF_INET, AF_INET6].contains(family)),
        // Synproxy passes by what is not TCP.
        ends: (kind.ends() && name != SYNPROXY) || name == "fwd",
    })
}

pub(crate) const META_PROTOCOL: u32 = 1;
pub(crate) const META_MARK: u32 = 3;
pub(crate) const META_IIF: u32 = 4;
pub(crate) const META_OIF: u32 = 5;
pub(crate) const META_IIFNAME: u32 = 6;
pub(crate) const META_OIFNAME: u32 = 7;
pub(crate) const META_IIFTYPE: u32 = 8;
pub(crate) const META_OIFTYPE: u32 = 9;
const META_NFTRACE: u32 = 12;
pub(crate) const META_NFPROTO: u32 = 15;
pub(crate) const META_L4PROTO: u32 = 16;
pub(crate) const META_IIFGROUP: u32 = 21;
pub(crate) const META_OIFGROUP: u32 = 22;
pub(crate) const META_IIFKIND: u32 = 26;
pub(crate) const META_OIFKIND: u32 = 27;

fn meta(a: &Attributes<'_>) -> Option<Expr> {
    let (dreg, key) = (reg(a, 1), a.be32(2)?);
    if reg(a, 3).is_some() {
        return Some(match key {
            META_NFTRACE => Expr::Quiet("trace"),
            META_MARK => statement(EffectKind::Mark, "meta mark set", a, &[3]),
            _ => statement(EffectKind::Label, "meta set", a, &[3]),
        });
    }
    // Lengths as the kernel fills them (nft_meta_get_init). 33 and 34: VRF and other masters of the device that
    // a packet came in by.
    let len = match key {
        META_NFPROTO | META_L4PROTO | 19 | 25 | 31 | 35 => 1,
        META_PROTOCOL | META_IIFTYPE | META_OIFTYPE | 28 | 29 => 2,
        0 | 2 | 3..=5 | 10 | 11 | 13 | 14 | 20 | 21..=24 | 32 | 33 => 4,
        30 => 8,
        META_IIFNAME | META_OIFNAME | META_IIFKIND | META_OIFKIND | 17 | 18 | 34 => 16,
        _ => return None,
    };
    let source = match key {
        // The realm comes with the route.
        13 => Source::ByDevice("meta rtclassid".to_owned()),
        _ => Source::Meta(key),
    };
    Some(Expr::Load {
        source,
        dreg: dreg?,
        len,
    })
}

fn payload(a: &Attributes<'_>) -> Option<Expr> {
    let (base, offset, len) = (a.be32(2)?, a.be32(3)?, a.be32(4)?);
    if reg(a, 5).is_some() {
        let kind = match holds_address(base, offset, len) {
            true => EffectKind::Address,
            false => EffectKind::Modify,
        };
        return Some(statement(kind, "payload set", a, &[5]));
    }
    Some(Expr::Load {
        source: Source::Payload(base, offset, len),
        dreg: reg(a, 1)?,
        len: len as usize,
    })
}

/// Whether bytes of a header are those of an address, of IPv4 or IPv6, or of a port. IPv6 addresses begin at 8, where
/// IPv4 has its TTL, which is written alone.
fn holds_address(base: u32, offset: u32, len: u32) -> bool {
    const NETWORK: u32 = 1;
    const TRANSPORT: u32 = 2;
    match base {
        NETWORK => offset < 40 && offset.saturating_add(len) > 12,
        TRANSPORT => offset < 4,
        _ => false,
    }
}

const CT_MARK: u32 = 3;

fn ct(a: &Attributes<'_>) -> Option<Expr> {
    let (key, direction) = (a.be32(2)?, a.u8(3));
    if reg(a, 4).is_some() {
        return Some(match key {
            CT_MARK => statement(EffectKind::Label, "ct mark set", a, &[4]),
            _ => statement(EffectKind::Track, "ct set", a, &[4]),
        });
    }
    let direction = match direction {
        Some(0) => " original",
        Some(_) => " reply",
        None => "",
    };
    // nft_ct_get_init; addresses depend on the table's family.
    let (name, len) = match key {
        0 => ("state", 4),
        1 => ("direction", 1),
        2 => ("status", 4),
        CT_MARK => ("mark", 4),
        4 => ("secmark", 4),
        5 => ("expiration", 4),
        6 => ("helper", 16),
        7 => ("l3proto", 1),
        8 | 9 => (["saddr", "daddr"][key as usize - 8], 16),
        10 => ("protocol", 1),
        11 | 12 => (["proto-src", "proto-dst"][key as usize - 11], 2),
        13 => ("label", 16),
        14..=16 => (["packets", "bytes", "avgpkt"][key as usize - 14], 8),
        17 => ("zone", 2),
        18 => ("event", 4),
        19 | 20 => (["ip saddr", "ip daddr"][key as usize - 19], 4),
        21 | 22 => (["ip6 saddr", "ip6 daddr"][key as usize - 21], 16),
        23 => ("id", 4),
        _ => return None,
    };
    Some(Expr::Load {
        source: Source::Other(format!("ct{direction} {name}")),
        dreg: reg(a, 1)?,
        len,
    })
}

fn fib(a: &Attributes<'_>) -> Option<Expr> {
    const BY_OIF: u32 = 1 << 4;
    const PRESENT: u32 = 1 << 5;
    let (dreg, result, flags) = (reg(a, 1)?, a.be32(2)?, a.be32(3)?);
    let len = match result {
        2 if flags & PRESENT == 0 => 16,
        1 | 3 => 4,
        _ => 1,
    };
    let name = format!("fib {result} {flags:#x}");
    let source = match flags & BY_OIF {
        0 => Source::Other(name),
        _ => Source::ByDevice(name),
    };
    Some(Expr::Load { source, dreg, len })
}

fn rt(a: &Attributes<'_>) -> Option<Expr> {
    let (dreg, key) = (reg(a, 1)?, a.be32(2)?);
    let (source, len) = match key {
        0 => (Source::ByDevice("rt classid".to_owned()), 4),
        1 => (Source::ByDevice("rt ip nexthop".to_owned()), 4),
        2 => (Source::ByDevice("rt ip6 nexthop".to_owned()), 16),
        3 => (Source::Mss, 2),
        4 => (Source::Other("rt ipsec".to_owned()), 1),
        _ => return None,
    };
    Some(Expr::Load { source, dreg, len })
}

fn exthdr(a: &Attributes<'_>) -> Option<Expr> {
    if reg(a, 7).is_some() || reg(a, 1).is_none() {
        // An option is set (7), or taken off.
        return Some(statement(EffectKind::Modify, "option set", a, &[7]));
    }
    let present = a.be32(5).unwrap_or(0) & 1 != 0;
    let len = if present { 1 } else { a.be32(4)? as usize };
    Some(Expr::Load {
        source: Source::Other(format!("exthdr {}", identity(a, &[1]))),
        dreg: reg(a, 1)?,
        len,
    })
}

fn other(name: &str, a: &Attributes<'_>, dreg: u16) -> Option<Expr> {
    Some(Expr::Load {
        source: Source::Other(format!("{name} {}", identity(a, &[dreg]))),
        dreg: reg(a, dreg)?,
        len: 16,
    })
}

fn immediate(a: &Attributes<'_>) -> Option<Expr> {
    if a.be32(1)? == 0 {
        return verdict(a, 2).map(Expr::Verdict);
    }
    Some(Expr::Immediate {
        dreg: reg(a, 1)?,
        data: data(a, 2)?,
    })
}

fn cmp(a: &Attributes<'_>) -> Option<Expr> {
    let (sreg, data) = (reg(a, 1)?, data(a, 3)?);
    let (least, most) = (vec![0; data.len()], vec![0xff; data.len()]);
    // NFT_CMP_EQ, NEQ, LT, LTE, GT, GTE.
    let (invert, from, to) = match a.be32(2)? {
        0 => return Some(Expr::equals(sreg, &data, false)),
        1 => return Some(Expr::equals(sreg, &data, true)),
        2 => (true, data, most),
        3 => (false, least, data),
        4 => (true, least, data),
        5 => (false, data, most),
        _ => return None,
    };
    Some(Expr::Range {
        invert,
        sreg,
        from,
        to,
    })
}

fn range(a: &Attributes<'_>) -> Option<Expr> {
    let invert = match a.be32(2)? {
        0 => false,
        1 => true,
        _ => return None,
    };
    let (from, to) = (data(a, 3)?, data(a, 4)?);
    (from.len() == to.len()).then_some(())?;
    Some(Expr::Range {
        invert,
        sreg: reg(a, 1)?,
        from,
        to,
    })
}

fn bitwise(a: &Attributes<'_>) -> Option<Expr> {
    // 8: a second register, which newer kernels know.
    if a.has(8) {
        return None;
    }
    let len = a.be32(3)? as usize;
    let how = match a.be32(6).unwrap_or(0) {
        0 => {
            let (mask, xor) = (data(a, 4)?, data(a, 5)?);
            (mask.len() == len && xor.len() == len).then_some(())?;
            Bitwise::MaskXor(mask, xor)
        }
        _ => Bitwise::Other(identity(a, &[1, 2])),
    };
    Some(Expr::Bitwise {
        sreg: reg(a, 1)?,
        dreg: reg(a, 2)?,
        len,
        how,
    })
}

fn byteorder(a: &Attributes<'_>) -> Option<Expr> {
    let (len, size) = (a.be32(4)? as usize, a.be32(5)? as usize);
    matches!(size, 2 | 4 | 8).then_some(())?;
    Some(Expr::Bitwise {
        sreg: reg(a, 1)?,
        dreg: reg(a, 2)?,
        len,
        how: Bitwise::Swap(size),
    })
}

fn lookup(a: &Attributes<'_>) -> Option<Expr> {
    Some(Expr::Lookup(Lookup {
        set: a.string(1)?,
        sreg: reg(a, 2)?,
        dreg: reg(a, 3),
        verdict: a.has(3) && a.be32(3) == Some(0),
        invert: a.be32(5).unwrap_or(0) & 1 != 0,
    }))
}

fn compat(name: &str, a: &Attributes<'_>) -> Option<Expr> {
    let extension = Extension {
        name: a.string(1)?,
        revision: a.be32(2)?,
        info: a.get(3).unwrap_or_default().to_vec(),
    };
    Some(match name {
        "match" => Expr::Match(extension),
        _ => Expr::Target(extension),
    })
}
