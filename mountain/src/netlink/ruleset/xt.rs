// SPDX-License-Identifier: GPL-2.0-or-later
//! What is known of the matches and targets of xtables, whether a legacy rule or iptables-nft uses
//! them.

use netlink_sys::protocols::NETLINK_NETFILTER;

use super::expr::{self, Expr, Extension, Source};
use super::facts::{Facts, RTN_UNICAST};
use super::residue::EffectKind;
use super::xtables::{compare, SCRATCH};
use crate::netlink::wire::{
    self, attribute, netfilter, u16_at, u32_at, Attributes, NFNL_HEADER_LEN,
};

/// How a match is dealt with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum MatchKind {
    /// Holds always.
    Always,
    /// Asks the packet.
    Packet,
    /// Asks the packet, and a state of the rule's own.
    Limit,
    /// Asks the packet, and remembers it.
    Remembers,
    /// May ask the device or the route.
    Device,
}

pub(super) fn classify(found: &Extension, ipsets_by_device: bool) -> MatchKind {
    const ADDRTYPE_IFACE_OUT: u8 = 8;
    let info = &found.info;
    match found.name.as_str() {
        "comment" => MatchKind::Always,
        "recent" => MatchKind::Remembers,
        "connlimit" | "limit" | "quota" | "statistic" => MatchKind::Limit,
        "addrtype" if found.revision == 0 => MatchKind::Packet,
        "addrtype" => match u32_at(info, 4).is_some_and(|f| f & u32::from(ADDRTYPE_IFACE_OUT) == 0)
        {
            true => MatchKind::Packet,
            false => MatchKind::Device,
        },
        "set" if !ipsets_by_device => MatchKind::Packet,
        // They look at nothing that the device or the route decides (net/netfilter/xt_*.c, ipt_*.c, ip6t_*.c).
        "ah" | "cgroup" | "cluster" | "connbytes" | "connlabel" | "connmark" | "conntrack"
        | "cpu" | "dccp" | "dscp" | "dst" | "ecn" | "esp" | "eui64" | "frag" | "hashlimit"
        | "hbh" | "helper" | "hl" | "icmp" | "icmp6" | "ipcomp" | "iprange" | "ipv6header"
        | "l2tp" | "length" | "mac" | "mark" | "mh" | "multiport" | "nfacct" | "osf" | "owner"
        | "physdev" | "pkttype" | "policy" | "rateest" | "rpfilter" | "rt" | "sctp" | "socket"
        | "srh" | "state" | "string" | "tcp" | "tcpmss" | "time" | "tos" | "ttl" | "u32"
        | "udp" | "udplite" => MatchKind::Packet,
        _ => MatchKind::Device,
    }
}

/// A match in the words of nftables, where it can be said so.
pub(super) fn as_exprs(found: &Extension) -> Option<Vec<Expr>> {
    let info = &found.info;
    match (found.name.as_str(), found.revision) {
        // Two pairs of ports, and for tcp an option, flags and their mask: none of these.
        ("tcp", 0) => match *info.get(8..12)? {
            [0, 0, _, inverted] if inverted & !3 == 0 => ports(info, inverted),
            _ => None,
        },
        ("udp", 0) => ports(info, *info.get(8)?),
        ("mark", 1) => by_mark(info, Source::Meta(expr::META_MARK)),
        ("connmark", 1) => by_mark(info, Source::Other("ct mark".to_owned())),
        ("devgroup", 0) => devgroup(info),
        _ => None,
    }
}

/// Whether a match of connection tracking, of the kind of destination or of IPsec policies is met by a packet. `None`: it
/// asks for something else, or that is not known.
pub(super) fn by_facts(found: &Extension, facts: &Facts) -> Option<bool> {
    /// XT_CONNTRACK_STATE, and what tells iptables to show it as the match `state`.
    const STATE: u16 = 1;
    const ALIAS: u16 = 1 << 13;
    /// XT_CONNTRACK_STATE_SNAT, XT_CONNTRACK_STATE_DNAT. The other bits are those of NF_CT_STATE_BIT.
    const SNAT: u16 = 1 << 6;
    const DNAT: u16 = 1 << 7;
    /// XT_ADDRTYPE_UNICAST, XT_ADDRTYPE_INVERT_DEST.
    const UNICAST: u16 = 1 << RTN_UNICAST;
    const INVERTED: u32 = 1 << 1;
    /// The size of struct xt_policy_elem; XT_POLICY_MATCH_OUT, XT_POLICY_MATCH_NONE.
    const POLICY_LEN: usize = 76;
    const POLICY_OUT: u16 = 1 << 1;
    const POLICY_NONE: u16 = 1 << 2;
    let info = &found.info;
    // struct xt_addrtype_info_v1: types of sources, of destinations, and flags, which name no device here.
    if (found.name.as_str(), found.revision) == ("addrtype", 1) && facts.is_unicast {
        let (sources, flags) = (u16_at(info, 0)?, u32_at(info, 4)?);
        let is_met = u16_at(info, 2)? & UNICAST != 0;
        return (sources == 0 && flags & !INVERTED == 0)
            .then_some(is_met != (flags & INVERTED != 0));
    }
    // struct xt_policy_info: its flags are behind XT_POLICY_MAX_ELEM policies.
    if (found.name.as_str(), found.revision) == ("policy", 0) && facts.is_plain {
        let flags = u16_at(info, 4 * POLICY_LEN)?;
        return (flags & POLICY_OUT != 0).then_some(flags & POLICY_NONE != 0);
    }
    let state = facts.ct_state()?;
    match (found.name.as_str(), found.revision) {
        // struct xt_state_info.
        ("state", 0) => Some(u32_at(info, 0)? & state != 0),
        // struct xt_conntrack_mtinfo2, 3: what is asked, what of it is inverted, and the states, behind addresses,
        // times and ports.
        ("conntrack", 2 | 3) if u16_at(info, 146)? & !ALIAS == STATE => {
            let asked = u16_at(info, 150)?;
            let dnat = if facts.translated { DNAT } else { 0 };
            let is_met = asked & (u16::try_from(state).ok()? | dnat) != 0;
            // The source of an answered connection may be translated, too.
            if facts.answers && !is_met && asked & SNAT != 0 {
                return None;
            }
            let inverted = u16_at(info, 148)? & STATE != 0;
            Some(is_met != inverted)
        }
        _ => None,
    }
}

fn ports(info: &[u8], inverted: u8) -> Option<Vec<Expr>> {
    let port = |i: usize| u16_at(info, i * 2);
    let mut exprs = Vec::new();
    for (side, offset) in [(0, 0), (1, 2)] {
        let (from, to) = (port(side * 2)?, port(side * 2 + 1)?);
        let invert = inverted & (1 << side) != 0;
        if (from, to) == (0, u16::MAX) && !invert {
            continue;
        }
        exprs.extend([
            Expr::Load {
                source: Source::Payload(2, offset, 2),
                dreg: SCRATCH,
                len: 2,
            },
            Expr::Range {
                invert,
                sreg: SCRATCH,
                from: from.to_be_bytes().to_vec(),
                to: to.to_be_bytes().to_vec(),
            },
        ]);
    }
    Some(exprs)
}

/// struct xt_mark_mtinfo1, xt_connmark_mtinfo1: mark, mask, whether it is inverted.
fn by_mark(info: &[u8], mark: Source) -> Option<Vec<Expr>> {
    let inverted = *info.get(8)? != 0;
    Some(masked(mark, u32_at(info, 0)?, u32_at(info, 4)?, inverted))
}

fn masked(source: Source, value: u32, mask: u32, invert: bool) -> Vec<Expr> {
    let (value, mask) = (value.to_ne_bytes(), mask.to_ne_bytes());
    compare(source, &mask, &value, invert)
}

/// struct xt_devgroup_info: flags, then group and mask of either side.
fn devgroup(info: &[u8]) -> Option<Vec<Expr>> {
    let flags = u32_at(info, 0)?;
    let mut exprs = Vec::new();
    for (key, at, side) in [(expr::META_IIFGROUP, 4, 0), (expr::META_OIFGROUP, 12, 2)] {
        if flags & (1 << side) != 0 {
            let invert = flags & (2 << side) != 0;
            exprs.extend(masked(
                Source::Meta(key),
                u32_at(info, at)?,
                u32_at(info, at + 4)?,
                invert,
            ));
        }
    }
    Some(exprs)
}

/// Marks the packet by its connection.
pub(super) const CONNMARK_RESTORE: u8 = 2;

/// What CONNMARK does. `None`: not known.
pub(super) fn connmark_mode(found: &Extension) -> Option<u8> {
    let at = match found.revision {
        // struct xt_connmark_tginfo1: marks and masks of 4 bytes each, then the mode.
        1 => 12,
        // struct xt_connmark_tginfo2: where to and by how many bits a mark is shifted comes before it.
        2 if found.info.get(13) == Some(&0) => 14,
        _ => return None,
    };
    found.info.get(at).copied()
}

/// What a target does to a packet, if anything.
pub(super) fn target(found: &Extension) -> Option<EffectKind> {
    use EffectKind as E;
    Some(match found.name.as_str() {
        "LOG" | "NFLOG" | "ULOG" | "TRACE" | "AUDIT" | "RATEEST" | "LED" => return None,
        "ACCEPT" | "RETURN" => return None,
        "DROP" | "REJECT" | "SYNPROXY" => E::Drop,
        "MASQUERADE" => E::Masquerade,
        "SNAT" | "DNAT" | "NETMAP" => E::Nat,
        "REDIRECT" => E::Redirect,
        "NFQUEUE" | "QUEUE" => E::Queue,
        "MARK" | "HMARK" => E::Mark,
        "CONNMARK" => match connmark_mode(found) {
            Some(mode) if mode != CONNMARK_RESTORE => E::Label,
            _ => E::Mark,
        },
        "CLASSIFY" | "SECMARK" | "CONNSECMARK" => E::Label,
        "CT" | "NOTRACK" => E::Track,
        "TPROXY" => E::Forward,
        "TEE" => E::Copy,
        "SET" => E::Remember,
        "DNPT" | "SNPT" => E::Address,
        "TCPMSS" | "TCPOPTSTRIP" | "TTL" | "HL" | "DSCP" | "TOS" | "ECN" | "CHECKSUM" => E::Modify,
        _ => E::Unknown,
    })
}

/// Targets by which the route's MTU becomes part of the packet.
pub(super) fn asks_mtu(found: &Extension) -> bool {
    // XT_TCPMSS_CLAMP_PMTU
    found.name == "TCPMSS" && u16_at(&found.info, 0) == Some(u16::MAX)
}

/// Whether some set of the kernel's ipset is about devices, or whether there are such is not known.
pub(super) fn ipsets_by_device() -> bool {
    /// NFNL_SUBSYS_IPSET, IPSET_CMD_LIST.
    const LIST: u16 = netfilter(6, 7);
    const ATTR_PROTOCOL: u16 = 1;
    const ATTR_TYPENAME: u16 = 3;
    const ATTR_FLAGS: u16 = 6;
    const FLAG_LIST_HEADER: u32 = 1 << 2;
    let mut found = false;
    let request = [
        vec![0; NFNL_HEADER_LEN],
        attribute(ATTR_PROTOCOL, &[6]),
        attribute(ATTR_FLAGS, &FLAG_LIST_HEADER.to_be_bytes()),
    ];
    let listed = wire::dump(NETLINK_NETFILTER, LIST, &request.concat(), |payload| {
        let kind = Attributes::after(payload, NFNL_HEADER_LEN).string(ATTR_TYPENAME);
        found |= kind.is_some_and(|kind| kind.contains("iface"));
    });
    found || listed.is_err()
}
