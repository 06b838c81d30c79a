// SPDX-License-Identifier: GPL-2.0-or-later
//! From the project's types to the program's (bpf/common/intf.h).

use std::net::IpAddr;

use anyhow::{bail, Result};
use ipnet::IpNet;

use super::{types, ProgramGroup, ProgramPath};
use crate::netlink::wire::family;
use crate::topology::{FibRule, PathMasks, MAX_GROUP_PATHS, MAX_PATHS};

const NO_MEMBER: u8 = types::mtn_member::MTN_NO_MEMBER.0 as u8;

/// An address in four words of network byte order, IPv4 in the first.
pub(crate) fn addr(a: IpAddr) -> [u32; 4] {
    match a {
        IpAddr::V4(a) => [u32::from_ne_bytes(a.octets()), 0, 0, 0],
        IpAddr::V6(a) => {
            let o = a.octets();
            std::array::from_fn(|i| u32::from_ne_bytes(o[i * 4..i * 4 + 4].try_into().unwrap()))
        }
    }
}

/// The address that four words stand for.
pub(crate) fn to_addr(words: [u32; 4], ipv6: bool) -> IpAddr {
    if !ipv6 {
        return IpAddr::V4(words[0].to_ne_bytes().into());
    }
    let mut o = [0; 16];
    for (chunk, word) in o.chunks_mut(4).zip(words) {
        chunk.copy_from_slice(&word.to_ne_bytes());
    }
    IpAddr::V6(o.into())
}

/// A source address as the key of a map.
pub(crate) fn source(a: IpAddr) -> types::mtn_source {
    types::mtn_source {
        addr: addr(a),
        ipv6: a.is_ipv6().into(),
    }
}

/// Key of a trie of the prefix's family.
pub(crate) fn trie_key(prefix: &IpNet) -> Vec<u8> {
    let mut key = u32::from(prefix.prefix_len()).to_ne_bytes().to_vec();
    match prefix {
        IpNet::V4(net) => key.extend(net.network().octets()),
        IpNet::V6(net) => key.extend(net.network().octets()),
    }
    key
}

pub(crate) fn path(p: &ProgramPath) -> types::mtn_path {
    let mut flags = 0;
    // bpf_redirect_neigh() drops what is on its way to a group address, as of a cluster of firewalls.
    let is_group = |mac: [u8; 6]| mac[0] & 1 != 0;
    if p.ethernet && !p.mac.is_some_and(is_group) {
        flags |= types::mtn_path_flags::MTN_PATH_ETHERNET.0;
    }
    if p.mac.is_some() {
        flags |= types::mtn_path_flags::MTN_PATH_NEIGH_VALID.0;
    }
    if !p.up {
        flags |= types::mtn_path_flags::MTN_PATH_DOWN.0;
    }
    types::mtn_path {
        ifindex: p.ifindex,
        mtu: p.mtu,
        salt: p.salt,
        gw_family: family(p.gateway.is_ipv6()).into(),
        gw: addr(p.gateway),
        mac: p.mac.unwrap_or_default(),
        flags: flags as u8,
        ipv6: p.ipv6.into(),
        cost_weight: p.cost_weight,
        ..Default::default()
    }
}

/// The masks of a group as the one word that the programs read at once.
pub(crate) fn masks(masks: PathMasks) -> u64 {
    let PathMasks {
        latency,
        bulk,
        alive,
        ejected,
        full: _,
    } = masks;
    let masks = types::mtn_masks {
        __anon_mtn_masks_1: types::__anon_mtn_masks_1 {
            latency,
            bulk,
            alive,
            ejected,
        },
    };
    // SAFETY: both members of the union are 64 plain bits.
    unsafe { masks.word }
}

pub(crate) fn group(g: &ProgramGroup) -> Result<types::mtn_group> {
    if g.members.len() > MAX_GROUP_PATHS {
        bail!(
            "{} paths in one group, at most {MAX_GROUP_PATHS} are supported",
            g.members.len()
        );
    }
    let mut out = types::mtn_group {
        n_members: g.members.len() as u32,
        member_of: [NO_MEMBER; MAX_PATHS],
        ..Default::default()
    };
    if let Some((path, _)) = g.members.iter().find(|(path, _)| *path >= MAX_PATHS) {
        bail!("path {path} is beyond the {MAX_PATHS} paths of a host");
    }
    for (i, (path, inv_weight)) in g.members.iter().enumerate() {
        out.path[i] = *path as u8;
        out.member_of[*path] = i as u8;
        out.inv_weight[i] = *inv_weight;
    }
    Ok(out)
}

/// A prefix and its mask; of none, what matches everything.
pub fn prefix(p: Option<IpNet>) -> ([u32; 4], [u32; 4]) {
    p.map_or_else(Default::default, |p| (addr(p.network()), addr(p.netmask())))
}

pub(crate) fn fib_rule(s: &FibRule) -> types::mtn_fib_rule {
    let (mark, mark_mask) = s.fwmark.unwrap_or_default();
    let ((src, src_mask), (dst, dst_mask)) = (prefix(s.src), prefix(s.dst));
    let (tos, tos_mask) = s.tos.unwrap_or_default();
    let (uid_first, uid_last) = s.uid.unwrap_or((0, u32::MAX));
    let (sport_first, sport_last) = s.sport.unwrap_or((0, u16::MAX));
    let (dport_first, dport_last) = s.dport.unwrap_or((0, u16::MAX));
    types::mtn_fib_rule {
        mark: mark & mark_mask,
        mark_mask,
        src,
        src_mask,
        dst,
        dst_mask,
        iif: s.iif.unwrap_or(0),
        uid_first,
        uid_last,
        sport_first,
        sport_last,
        dport_first,
        dport_last,
        ipproto: s.ipproto.unwrap_or(0),
        tos,
        tos_mask,
        ipv6: s.ipv6.into(),
        invert: s.invert.into(),
        ..Default::default()
    }
}
