// SPDX-License-Identifier: GPL-2.0-or-later
//! Connections that the kernel has decided about already (linux/netfilter/nfnetlink_conntrack.h).
//!
//! Where a connection goes is decided with its first packet. One that is under way when its rule goes
//! would go on being redirected, so its entry is deleted: the next packet is decided about anew. Likewise
//! with flows that were placed on an uplink which is dead.

pub mod adopt;

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result};
use netlink_sys::protocols::NETLINK_NETFILTER;

use super::wire::{ip, push_attribute, Attributes, Socket};

const NFNL_SUBSYS_CTNETLINK: u16 = 1;
const IPCTNL_MSG_CT_GET: u16 = 1;
const IPCTNL_MSG_CT_DELETE: u16 = 2;
const CTA_TUPLE_ORIG: u16 = 1;
const CTA_TUPLE_REPLY: u16 = 2;
const CTA_STATUS: u16 = 3;
const CTA_MARK: u16 = 8;
const CTA_ID: u16 = 12;
const CTA_ZONE: u16 = 18;
const CTA_MARK_MASK: u16 = 21;
const CTA_FILTER: u16 = 25;
const CTA_FILTER_ORIG_FLAGS: u16 = 1;
const CTA_FILTER_REPLY_FLAGS: u16 = 2;
const CTA_TUPLE_IP: u16 = 1;
const CTA_TUPLE_PROTO: u16 = 2;
const CTA_IP_V4_SRC: u16 = 1;
const CTA_IP_V4_DST: u16 = 2;
const CTA_IP_V6_SRC: u16 = 3;
const CTA_IP_V6_DST: u16 = 4;
const CTA_PROTO_NUM: u16 = 1;
const CTA_PROTO_SRC_PORT: u16 = 2;
const CTA_PROTO_DST_PORT: u16 = 3;
const NLA_F_NESTED: u16 = 1 << 15;
/// Length of `struct nfgenmsg`.
const HEADER_LEN: usize = 4;
/// Which parts of the given tuple count: net/netfilter/nf_internals.h.
const FILTER_IP_SRC: u32 = 1 << 0;
const FILTER_IP_DST: u32 = 1 << 1;
/// By no address: since Linux 5.8 an IPv6 address lets through all entries but its own (`ctnetlink_filter_match_tuple`
/// in nf_conntrack_netlink.c takes 0 of `ipv6_addr_cmp` for a difference).
const FILTER_IPV6: u32 = 0;
const FILTER_PROTO_NUM: u32 = 1 << 3;
const FILTER_DST_PORT: u32 = 1 << 5;
/// There was an answer: linux/netfilter/nf_conntrack_common.h.
const IPS_SEEN_REPLY: u32 = 1 << 1;
/// Protocols whose flows have no connection that ends when their translated address changes.
const CONNECTIONLESS: [libc::c_int; 4] = [
    libc::IPPROTO_UDP,
    libc::IPPROTO_UDPLITE,
    libc::IPPROTO_ICMP,
    libc::IPPROTO_ICMPV6,
];

/// What a redirect does: destinations `from` become `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Redirected {
    /// Protocol number of IP.
    pub proto: u8,
    /// Where clients send to.
    pub from: SocketAddr,
    /// Where it goes instead.
    pub to: SocketAddr,
}

/// One connection.
struct Flow {
    proto: u8,
    /// Where the client sent to.
    from: SocketAddr,
    /// Where the replies come from.
    to: SocketAddr,
    /// What a request to delete it says.
    attributes: Vec<u8>,
}

/// Deletes the entries of connections that these rules redirect; says how many.
///
/// # Errors
/// When the kernel refuses to list or delete.
pub(crate) fn forget_redirected(rules: &[Redirected]) -> Result<usize> {
    forget_to(rules, |flow, rule| flow.to == rule.to)
}

/// Deletes the entries of UDP flows to the rules' addresses that are not redirected, so that running
/// ones are from now on. (A TCP connection would break by it: it ends where it began.)
///
/// # Errors
/// As [`forget_redirected`].
pub(crate) fn forget_direct(rules: &[Redirected]) -> Result<usize> {
    let udp: Vec<Redirected> = rules
        .iter()
        .filter(|r| r.proto == libc::IPPROTO_UDP as u8)
        .copied()
        .collect();
    forget_to(&udp, |flow, rule| flow.to == rule.from)
}

/// Whether connection tracking has entries of flows that this rule redirects.
///
/// # Errors
/// When the kernel refuses to list them.
pub(crate) fn has_redirected(rule: &Redirected) -> Result<bool> {
    if is_empty() {
        return Ok(false);
    }
    let ipv6 = rule.from.is_ipv6();
    let mut found = false;
    Socket::open_for(NETLINK_NETFILTER)
        .and_then(|mut socket| {
            let request = request(ipv6, Some((rule.proto, rule.from)));
            socket.dump(kind(IPCTNL_MSG_CT_GET), &request, |_, payload| {
                found |= flow(payload).is_some_and(|flow| {
                    (flow.proto, flow.from, flow.to) == (rule.proto, rule.from, rule.to)
                });
            })
        })
        .context("cannot list the kernel's connection tracking")?;
    Ok(found)
}

/// Deletes entries of what is sent to where these rules redirect from, if `wanted`.
fn forget_to(rules: &[Redirected], wanted: impl Fn(&Flow, &Redirected) -> bool) -> Result<usize> {
    let mut by_from: HashMap<(u8, SocketAddr), Vec<&Redirected>> = HashMap::new();
    for rule in rules {
        let key = (rule.proto, rule.from);
        by_from.entry(key).or_default().push(rule);
    }
    let wanted = |flow: &Flow| {
        let rules = by_from.get(&(flow.proto, flow.from));
        rules.is_some_and(|rules| rules.iter().any(|rule| wanted(flow, rule)))
    };
    // Each look goes through all of the kernel's table, of all namespaces.
    if rules.is_empty() || is_empty() {
        return Ok(0);
    }
    match rules {
        [rule] => forget_flows(rule.from.is_ipv6(), Some((rule.proto, rule.from)), wanted),
        _ => [false, true]
            .into_iter()
            .filter(|ipv6| rules.iter().any(|rule| rule.from.is_ipv6() == *ipv6))
            .map(|ipv6| forget_flows(ipv6, None, wanted))
            .sum(),
    }
}

/// Whether this namespace surely has no entry.
fn is_empty() -> bool {
    let count = std::fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_count");
    count.is_ok_and(|count| count.trim() == "0")
}

fn forget_flows(
    ipv6: bool,
    only: Option<(u8, SocketAddr)>,
    wanted: impl Fn(&Flow) -> bool,
) -> Result<usize> {
    // A filter that a kernel does not know is ignored: all entries are looked at then.
    forget(ipv6, &request(ipv6, only), |payload| {
        let flow = flow(payload).filter(&wanted)?;
        Some(flow.attributes)
    })
}

/// Deletes the entries, of one family and with a mark within a mask, of flows that can go on from another
/// address: those without a connection, and what was never answered. Says how many.
///
/// # Errors
/// When the kernel refuses to list or delete.
pub(crate) fn forget_marked(ipv6: bool, mark: u32, mask: u32) -> Result<usize> {
    let mut request = header(ipv6);
    push_attribute(&mut request, CTA_MARK, &mark.to_be_bytes());
    push_attribute(&mut request, CTA_MARK_MASK, &mask.to_be_bytes());
    forget(ipv6, &request, |payload| {
        let entry = Attributes::after(payload, HEADER_LEN);
        is_stuck(&entry, mark, mask).then(|| name(&entry))
    })
}

fn is_stuck(entry: &Attributes, mark: u32, mask: u32) -> bool {
    let number = |kind| -> Option<u32> {
        let bytes = *entry.get(kind)?.first_chunk::<4>()?;
        Some(u32::from_be_bytes(bytes))
    };
    let proto = || {
        let original = entry.nested(CTA_TUPLE_ORIG)?;
        original.nested(CTA_TUPLE_PROTO)?.u8(CTA_PROTO_NUM)
    };
    let has_connection = || proto().is_none_or(|p| !CONNECTIONLESS.contains(&p.into()));
    let is_answered = || number(CTA_STATUS).is_none_or(|status| status & IPS_SEEN_REPLY != 0);
    number(CTA_MARK).is_some_and(|found| found & mask == mark)
        && !(has_connection() && is_answered())
}

/// Those of these addresses from which a connection is under way whose other end sees another
/// address: something translates it.
///
/// # Errors
/// When the kernel refuses to list its connections.
pub fn snated_among(addresses: &BTreeSet<IpAddr>) -> Result<BTreeSet<IpAddr>> {
    let mut found = BTreeSet::new();
    if is_empty() {
        return Ok(found);
    }
    for address in addresses {
        let mut is_found = false;
        Socket::open_for(NETLINK_NETFILTER)
            .and_then(|mut socket| {
                socket.dump(kind(IPCTNL_MSG_CT_GET), &from(*address), |_, payload| {
                    is_found |= is_translated(payload, *address);
                })
            })
            .context("cannot list the kernel's connection tracking")?;
        found.extend(is_found.then_some(*address));
    }
    Ok(found)
}

/// Whether an entry is of a connection from this address that reaches its other end from another one.
fn is_translated(payload: &[u8], source: IpAddr) -> bool {
    let entry = Attributes::after(payload, HEADER_LEN);
    let address = |tuple, kinds: [u16; 2]| {
        let tuple = entry.nested(tuple)?;
        let ips = tuple.nested(CTA_TUPLE_IP)?;
        ip(kinds.iter().find_map(|kind| ips.get(*kind))?)
    };
    address(CTA_TUPLE_ORIG, [CTA_IP_V4_SRC, CTA_IP_V6_SRC]) == Some(source)
        && address(CTA_TUPLE_REPLY, [CTA_IP_V4_DST, CTA_IP_V6_DST]) != Some(source)
}

/// Deletes the entries among those asked for by `request` of which `wanted` says how to name them.
fn forget(ipv6: bool, request: &[u8], wanted: impl Fn(&[u8]) -> Option<Vec<u8>>) -> Result<usize> {
    let flows = || -> std::io::Result<usize> {
        let mut socket = Socket::open_for(NETLINK_NETFILTER)?;
        let mut found = Vec::new();
        socket.dump(kind(IPCTNL_MSG_CT_GET), request, |_, payload| {
            found.extend(wanted(payload));
        })?;
        let mut count = 0;
        for attributes in found {
            let body = [header(ipv6), attributes].concat();
            match socket.request(kind(IPCTNL_MSG_CT_DELETE), 0, &body) {
                Ok(_) => count += 1,
                // It has ended meanwhile.
                Err(e) if e.raw_os_error() == Some(libc::ENOENT) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(count)
    };
    flows().context("cannot delete entries of the kernel's connection tracking")
}

fn kind(message: u16) -> u16 {
    NFNL_SUBSYS_CTNETLINK << 8 | message
}

fn header(ipv6: bool) -> Vec<u8> {
    let family = if ipv6 { libc::AF_INET6 } else { libc::AF_INET };
    vec![family as u8, 0, 0, 0]
}

/// Asks for all entries of a family, or only for those to an address; of IPv6, for those to its port.
fn request(ipv6: bool, only: Option<(u8, SocketAddr)>) -> Vec<u8> {
    let mut body = header(ipv6);
    let Some((proto, to)) = only else { return body };
    let (ip, flag) = match to.ip() {
        IpAddr::V4(a) => (plain(CTA_IP_V4_DST, &a.octets()), FILTER_IP_DST),
        IpAddr::V6(a) => (plain(CTA_IP_V6_DST, &a.octets()), FILTER_IPV6),
    };
    let number = plain(CTA_PROTO_NUM, &[proto]);
    let port = plain(CTA_PROTO_DST_PORT, &to.port().to_be_bytes());
    body.extend(nest(
        CTA_TUPLE_ORIG,
        &[
            &nest(CTA_TUPLE_IP, &[&ip]),
            &nest(CTA_TUPLE_PROTO, &[&number, &port]),
        ],
    ));
    body.extend(filter(flag | FILTER_PROTO_NUM | FILTER_DST_PORT));
    body
}

/// Asks for the entries of what is sent from an IPv4 address; of IPv6, for all.
fn from(source: IpAddr) -> Vec<u8> {
    let mut body = header(source.is_ipv6());
    let IpAddr::V4(source) = source else {
        return body;
    };
    let ip = plain(CTA_IP_V4_SRC, &source.octets());
    body.extend(nest(CTA_TUPLE_ORIG, &[&nest(CTA_TUPLE_IP, &[&ip])]));
    body.extend(filter(FILTER_IP_SRC));
    body
}

/// Says which parts of the given original tuple count.
fn filter(flags: u32) -> Vec<u8> {
    nest(
        CTA_FILTER,
        &[
            &plain(CTA_FILTER_ORIG_FLAGS, &flags.to_ne_bytes()),
            &plain(CTA_FILTER_REPLY_FLAGS, &0u32.to_ne_bytes()),
        ],
    )
}

fn nest(kind: u16, inside: &[&[u8]]) -> Vec<u8> {
    plain(kind | NLA_F_NESTED, &inside.concat())
}

fn plain(kind: u16, value: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    push_attribute(&mut out, kind, value);
    out
}

fn flow(payload: &[u8]) -> Option<Flow> {
    let entry = Attributes::after(payload, HEADER_LEN);
    let original = entry.nested(CTA_TUPLE_ORIG)?;
    let reply = entry.nested(CTA_TUPLE_REPLY)?;
    Some(Flow {
        proto: original.nested(CTA_TUPLE_PROTO)?.u8(CTA_PROTO_NUM)?,
        from: end(
            &original,
            [CTA_IP_V4_DST, CTA_IP_V6_DST],
            CTA_PROTO_DST_PORT,
        )?,
        to: end(&reply, [CTA_IP_V4_SRC, CTA_IP_V6_SRC], CTA_PROTO_SRC_PORT)?,
        attributes: name(&entry),
    })
}

/// What names an entry, to delete this one and no other.
fn name(entry: &Attributes) -> Vec<u8> {
    let mut attributes = Vec::new();
    for kind in [CTA_TUPLE_ORIG, CTA_ID, CTA_ZONE] {
        if let Some(value) = entry.get(kind) {
            let nested = if kind == CTA_TUPLE_ORIG {
                NLA_F_NESTED
            } else {
                0
            };
            push_attribute(&mut attributes, kind | nested, value);
        }
    }
    attributes
}

/// One end of a tuple.
fn end(tuple: &Attributes, addresses: [u16; 2], port: u16) -> Option<SocketAddr> {
    let ips = tuple.nested(CTA_TUPLE_IP)?;
    let address = ip(addresses.iter().find_map(|kind| ips.get(*kind))?)?;
    let proto = tuple.nested(CTA_TUPLE_PROTO)?;
    let port = u16::from_be_bytes(*proto.get(port)?.first_chunk()?);
    Some(SocketAddr::new(address, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(proto: libc::c_int, mark: u32, status: u32) -> Vec<u8> {
        let mut tuple = Vec::new();
        let mut number = Vec::new();
        push_attribute(&mut number, CTA_PROTO_NUM, &[proto as u8]);
        push_attribute(&mut tuple, CTA_TUPLE_PROTO | NLA_F_NESTED, &number);
        let mut entry = Vec::new();
        push_attribute(&mut entry, CTA_TUPLE_ORIG | NLA_F_NESTED, &tuple);
        push_attribute(&mut entry, CTA_STATUS, &status.to_be_bytes());
        push_attribute(&mut entry, CTA_MARK, &mark.to_be_bytes());
        entry
    }

    #[test]
    fn what_can_go_on_elsewhere_is_stuck_on_a_dead_uplink() {
        const MARK: u32 = 0x0300_0000;
        for (proto, mark, status, expected) in [
            (libc::IPPROTO_UDP, MARK | 7, IPS_SEEN_REPLY, true),
            (libc::IPPROTO_ICMPV6, MARK, IPS_SEEN_REPLY, true),
            (libc::IPPROTO_TCP, MARK, 0, true),
            (libc::IPPROTO_TCP, MARK, IPS_SEEN_REPLY, false),
            (libc::IPPROTO_UDP, 0x0200_0000, 0, false),
            (libc::IPPROTO_UDP, 0, 0, false),
        ] {
            let bytes = entry(proto, mark, status);
            let entry = Attributes::after(&bytes, 0);
            let stuck = is_stuck(&entry, MARK, 0xff00_0000);
            assert_eq!(stuck, expected, "protocol {proto}, mark {mark:#x}");
        }
    }
}
