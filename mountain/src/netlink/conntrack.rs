// SPDX-License-Identifier: GPL-2.0-or-later
//! Connections that the kernel has decided about already (linux/netfilter/nfnetlink_conntrack.h).
//!
//! Where a connection goes is decided with its first packet. One that is under way when its rule goes
//! would go on being redirected, so its entry is deleted: the next packet is decided about anew. Likewise
//! with flows that were placed on an uplink which is dead.

pub mod adopt;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result};
use netlink_packet_core::NLA_F_NESTED;
use netlink_sys::protocols::NETLINK_NETFILTER;

use super::wire::{
    self, attribute, family, ip_bytes, nest, netfilter, push_attribute, unless, Attributes, Socket,
    NFNL_HEADER_LEN,
};
use crate::host::sysctl;

const NFNL_SUBSYS_CTNETLINK: u16 = 1;
const GET: u16 = netfilter(NFNL_SUBSYS_CTNETLINK, 1);
const DELETE: u16 = netfilter(NFNL_SUBSYS_CTNETLINK, 2);
const CTA_TUPLE_ORIG: u16 = 1;
const CTA_TUPLE_REPLY: u16 = 2;
const CTA_STATUS: u16 = 3;
const CTA_PROTOINFO: u16 = 4;
const CTA_PROTOINFO_TCP: u16 = 1;
const CTA_PROTOINFO_TCP_STATE: u16 = 1;
/// From here on nothing more is sent but acknowledgements (enum tcp_conntrack, linux/netfilter/nf_conntrack_tcp.h).
const TCP_CONNTRACK_LAST_ACK: u8 = 6;
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Redirected {
    /// Protocol number of IP.
    pub proto: u8,
    /// Where clients send to.
    pub from: SocketAddr,
    /// Where it goes instead.
    pub to: SocketAddr,
}

/// What of all that is sent from an address reaches its other end from another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Translated {
    /// Only flows that can go on from another address: without a connection, or never answered.
    Flows,
    /// A connection as well, which ends when its address changes.
    Connection,
}

/// One entry, as the kernel tells it.
struct Entry<'a>(Attributes<'a>);

/// The packets of one direction.
struct Tuple {
    proto: Option<u8>,
    source: Option<IpAddr>,
    source_port: Option<u16>,
    destination: Option<IpAddr>,
    destination_port: Option<u16>,
}

/// The addresses of a flow.
pub(crate) struct Ends {
    /// Who has begun it.
    pub source: IpAddr,
    /// To where.
    pub to: IpAddr,
    /// To which port, where it has ports.
    pub port: Option<u16>,
    /// From where it leaves.
    pub from: IpAddr,
}

impl Entry<'_> {
    fn tuple(&self, kind: u16) -> Tuple {
        let tuple = self.0.inside(kind);
        let (ips, proto) = (tuple.inside(CTA_TUPLE_IP), tuple.inside(CTA_TUPLE_PROTO));
        Tuple {
            proto: proto.u8(CTA_PROTO_NUM),
            source: ips.ip(CTA_IP_V4_SRC).or_else(|| ips.ip(CTA_IP_V6_SRC)),
            source_port: proto.be16(CTA_PROTO_SRC_PORT),
            destination: ips.ip(CTA_IP_V4_DST).or_else(|| ips.ip(CTA_IP_V6_DST)),
            destination_port: proto.be16(CTA_PROTO_DST_PORT),
        }
    }

    /// What it does with packets to where the client sent them: the replies come from `to`.
    fn redirected(&self) -> Option<Redirected> {
        let (original, reply) = (self.tuple(CTA_TUPLE_ORIG), self.tuple(CTA_TUPLE_REPLY));
        Some(Redirected {
            proto: original.proto?,
            from: (original.destination?, original.destination_port?).into(),
            to: (reply.source?, reply.source_port?).into(),
        })
    }

    /// Where its connection is from, if that reaches its other end from another address.
    fn translated(&self) -> Option<IpAddr> {
        let source = self.tuple(CTA_TUPLE_ORIG).source?;
        (self.tuple(CTA_TUPLE_REPLY).destination != Some(source)).then_some(source)
    }

    /// Whether it bears this mark. `is_there`: whether a flow with these addresses leaves there.
    fn is_marked(&self, mark: u32, mask: u32, is_there: impl Fn(&Ends) -> bool) -> bool {
        let marked = self.0.be32(CTA_MARK);
        self.ends().is_some_and(|ends| is_there(&ends))
            && marked.is_some_and(|found| found & mask == mark)
    }

    /// The same of a flow that can go on from another address.
    fn is_stuck(&self, mark: u32, mask: u32, is_there: impl Fn(&Ends) -> bool) -> bool {
        self.is_marked(mark, mask, is_there) && self.can_go_on()
    }

    /// From and to where a host sends its packets that has begun this TCP connection, or to which it was translated.
    fn tcp_of_inner(&self, is_inner: impl Fn(IpAddr) -> bool) -> Option<(SocketAddr, SocketAddr)> {
        let sent = [CTA_TUPLE_ORIG, CTA_TUPLE_REPLY].map(|kind| self.tuple(kind));
        let from_inner = |tuple: &Tuple| tuple.source.is_some_and(&is_inner);
        let tuple = sent.into_iter().find(from_inner)?;
        let is_tcp = tuple.proto == Some(libc::IPPROTO_TCP as u8);
        let source = (tuple.source?, tuple.source_port?);
        let to = (tuple.destination?, tuple.destination_port?);
        is_tcp.then(|| (source.into(), to.into()))
    }

    fn ends(&self) -> Option<Ends> {
        let (original, reply) = (self.tuple(CTA_TUPLE_ORIG), self.tuple(CTA_TUPLE_REPLY));
        Some(Ends {
            source: original.source?,
            to: original.destination?,
            port: original.destination_port,
            from: reply.destination?,
        })
    }

    /// Whether its flow can go on from another address: it has no connection, or was never answered.
    fn can_go_on(&self) -> bool {
        !(self.has_connection() && self.is_answered())
    }

    fn has_connection(&self) -> bool {
        let proto = self.tuple(CTA_TUPLE_ORIG).proto;
        proto.is_none_or(|p| !CONNECTIONLESS.contains(&p.into()))
    }

    /// Whether neither end sees another address than the other one has.
    fn is_plain(&self) -> bool {
        let (original, reply) = (self.tuple(CTA_TUPLE_ORIG), self.tuple(CTA_TUPLE_REPLY));
        original.source == reply.destination && original.destination == reply.source
    }

    fn is_answered(&self) -> bool {
        let status = self.0.be32(CTA_STATUS);
        status.is_none_or(|status| status & IPS_SEEN_REPLY != 0)
    }

    /// Whether both ends of a TCP connection have closed it.
    fn is_over(&self) -> bool {
        let tcp = self.0.inside(CTA_PROTOINFO).inside(CTA_PROTOINFO_TCP);
        let state = tcp.u8(CTA_PROTOINFO_TCP_STATE);
        state.is_some_and(|state| state >= TCP_CONNTRACK_LAST_ACK)
    }

    /// What is translated by it, and from where.
    fn translates(&self) -> Option<(IpAddr, Translated)> {
        let what = match self.can_go_on() {
            true => Translated::Flows,
            false => Translated::Connection,
        };
        Some((self.translated()?, what))
    }

    /// What names it, to delete this one and no other.
    fn name(&self) -> Vec<u8> {
        let mut attributes = Vec::new();
        for (kind, nested) in [(CTA_TUPLE_ORIG, NLA_F_NESTED), (CTA_ID, 0), (CTA_ZONE, 0)] {
            if let Some(value) = self.0.get(kind) {
                push_attribute(&mut attributes, kind | nested, value);
            }
        }
        attributes
    }
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
    let addresses: HashSet<SocketAddr> = udp.iter().map(|rule| rule.from).collect();
    let begun_here = |entry: &Entry| {
        let original = entry.tuple(CTA_TUPLE_ORIG);
        let source = original.source.zip(original.source_port);
        original.proto == Some(libc::IPPROTO_UDP as u8)
            && source.is_some_and(|source| addresses.contains(&source.into()))
    };
    let to_them = forget_to(&udp, |flow, rule| flow.to == rule.from)?;
    // Also where the server has sent first: its clients' packets are answers, which no rule takes.
    let begun = |ipv6| match addresses.iter().any(|a| a.is_ipv6() == ipv6) && !is_empty() {
        true => forget(ipv6, &to(ipv6, None), begun_here),
        false => Ok(0),
    };
    Ok(to_them + begun(false)? + begun(true)?)
}

/// Deletes entries of what is sent to where these rules redirect from, if `wanted`.
fn forget_to(
    rules: &[Redirected],
    wanted: impl Fn(&Redirected, &Redirected) -> bool,
) -> Result<usize> {
    let mut by_from: HashMap<(u8, SocketAddr), Vec<&Redirected>> = HashMap::new();
    for rule in rules {
        let key = (rule.proto, rule.from);
        by_from.entry(key).or_default().push(rule);
    }
    let wanted = |entry: &Entry| {
        entry.redirected().is_some_and(|flow| {
            let rules = by_from.get(&(flow.proto, flow.from));
            rules.is_some_and(|rules| rules.iter().any(|rule| wanted(&flow, rule)))
        })
    };
    if is_empty() {
        return Ok(0);
    }
    let looks = looks(rules).into_iter();
    looks
        .map(|(ipv6, request)| forget(ipv6, &request, wanted))
        .sum()
}

/// Requests, one for each family, for the entries of packets to the addresses that these rules redirect. Each one goes through
/// the kernel's whole table, of all namespaces. A filter that a kernel does not know is ignored: all entries are looked at then.
fn looks<'a>(rules: impl IntoIterator<Item = &'a Redirected> + Clone) -> Vec<(bool, Vec<u8>)> {
    let look = |ipv6| {
        let rules = rules.clone().into_iter();
        let mut of = rules.filter(|rule| rule.from.is_ipv6() == ipv6);
        let only = match (of.next()?, of.next()) {
            (one, None) => Some((one.proto, one.from)),
            _ => None,
        };
        Some((ipv6, to(ipv6, only)))
    };
    [false, true].into_iter().filter_map(look).collect()
}

/// Whether this namespace surely has no entry.
fn is_empty() -> bool {
    sysctl::number("net/netfilter/nf_conntrack_count") == Some(0)
}

/// Which flows are to begin anew, perhaps from another address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Forgotten {
    /// Connections that were never answered: what begins them is sent again.
    Begun,
    /// Those that can go on so: without a connection, or never answered.
    GoOn,
    /// All: others are lost where they are.
    All,
}

/// Deletes the entries of such flows, of one family and with a mark within a mask, if `is_there` says that one with this
/// source, which leaves from this address, is one of those that are meant. Says how many.
///
/// # Errors
/// When the kernel refuses to list or delete.
pub(crate) fn forget_marked(
    ipv6: bool,
    mark: u32,
    mask: u32,
    which: Forgotten,
    is_there: impl Fn(&Ends) -> bool,
) -> Result<usize> {
    forget(ipv6, &marked(ipv6, mark, mask), |entry| match which {
        Forgotten::Begun => entry.has_connection() && entry.is_stuck(mark, mask, &is_there),
        Forgotten::GoOn => entry.is_stuck(mark, mask, &is_there),
        Forgotten::All => entry.is_marked(mark, mask, &is_there),
    })
}

/// From and to where inner hosts send their packets of TCP connections that were answered, of one family and with a mark
/// within a mask.
///
/// # Errors
/// When the kernel refuses to list its connections.
pub(crate) fn tcp_marked(
    ipv6: bool,
    mark: u32,
    mask: u32,
    is_inner: impl Fn(IpAddr) -> bool,
) -> Result<Vec<(SocketAddr, SocketAddr)>> {
    let mut found = Vec::new();
    list(&marked(ipv6, mark, mask), |entry| {
        let tcp = entry.tcp_of_inner(&is_inner);
        let is_it = || entry.is_answered() && entry.is_marked(mark, mask, |_| true);
        found.extend(tcp.filter(|_| is_it()));
    })?;
    Ok(found)
}

/// Flows that were answered and are not over, whose other end sees them at one of these addresses.
///
/// # Errors
/// When the kernel refuses to list its connections.
pub(crate) fn answered_from(addresses: &BTreeSet<IpAddr>) -> Result<Vec<Ends>> {
    let mut found = Vec::new();
    for (_, request) in requests_for(addresses, seen_at) {
        list(&request, |entry| {
            if entry.is_answered() && !entry.is_over() {
                let ends = entry.ends();
                found.extend(ends.filter(|ends| addresses.contains(&ends.from)));
            }
        })?;
    }
    Ok(found)
}

/// Deletes the entries of flows that are not translated, and were never answered, if `is_there` says that one with these ends
/// is one of those that are meant. Says how many.
///
/// # Errors
/// When the kernel refuses to list or delete.
pub(crate) fn forget_untranslated(is_there: impl Fn(&Ends) -> bool) -> Result<usize> {
    let is_it = |entry: &Entry| {
        let is_plain = entry.is_plain() && !entry.is_answered();
        is_plain && entry.ends().is_some_and(|ends| is_there(&ends))
    };
    if is_empty() {
        return Ok(0);
    }
    Ok(forget(false, &header(false), is_it)? + forget(true, &header(true), is_it)?)
}

/// Deletes the entries without any mark of flows that can go on from another address, whose other end sees them at one of
/// these. Says how many.
///
/// # Errors
/// When the kernel refuses to list or delete.
pub(crate) fn forget_unmarked(
    addresses: &[IpAddr],
    is_there: impl Fn(&Ends) -> bool,
) -> Result<usize> {
    let seen_there = |entry: &Entry| {
        let is_it = |flow: &Ends| addresses.contains(&flow.from) && is_there(flow);
        entry.is_stuck(0, u32::MAX, is_it)
    };
    let request = |address: &IpAddr| {
        let mut request = seen_at(*address);
        push_attribute(&mut request, CTA_MARK, &0_u32.to_be_bytes());
        push_attribute(&mut request, CTA_MARK_MASK, &u32::MAX.to_be_bytes());
        (address.is_ipv6(), request)
    };
    // All of IPv6 have the same one.
    let requests: BTreeSet<_> = addresses.iter().map(request).collect();
    let requests = requests.into_iter();
    requests
        .map(|(ipv6, request)| forget(ipv6, &request, seen_there))
        .sum()
}

/// Those of these addresses from which something is under way whose other end sees another address, and what
/// that is.
///
/// # Errors
/// When the kernel refuses to list its connections.
pub(crate) fn snated_among(addresses: &BTreeSet<IpAddr>) -> Result<BTreeMap<IpAddr, Translated>> {
    let mut found = BTreeMap::new();
    for (_, request) in requests_for(addresses, from) {
        list(&request, |entry| {
            let Some((from, what)) = entry.translates() else {
                return;
            };
            if addresses.contains(&from) {
                let known = found.entry(from).or_insert(what);
                *known = what.max(*known);
            }
        })?;
    }
    Ok(found)
}

/// Deletes the entries by which flows from these addresses are translated that can go on from another address. Says
/// how many.
///
/// # Errors
/// When the kernel refuses to list or delete.
pub(crate) fn forget_translated(addresses: &BTreeSet<IpAddr>) -> Result<usize> {
    if is_empty() {
        return Ok(0);
    }
    let wanted = |entry: &Entry| {
        let translated = entry.translates();
        translated
            .is_some_and(|(from, what)| what == Translated::Flows && addresses.contains(&from))
    };
    let requests = requests_for(addresses, from).into_iter();
    requests
        .map(|(ipv6, request)| forget(ipv6, &request, wanted))
        .sum()
}

/// So many addresses have requests of their own. For each of them the kernel walks its whole table, which takes 10 ms of an
/// empty one of 262,144 buckets. With more it is asked for all entries once.
const APART_MAX: usize = 8;

/// Requests for the entries that are about these addresses; where they are many, or of IPv6, for all entries. Each with
/// whether it is about IPv6. `about`: that for the entries of one.
fn requests_for(
    addresses: &BTreeSet<IpAddr>,
    about: fn(IpAddr) -> Vec<u8>,
) -> BTreeSet<(bool, Vec<u8>)> {
    let apart = addresses.iter().filter(|a| a.is_ipv4()).count() <= APART_MAX;
    let addresses = addresses.iter().copied();
    let request = |address| match apart {
        true => about(address),
        false => header(address.is_ipv6()),
    };
    addresses.map(|a| (a.is_ipv6(), request(a))).collect()
}

/// Lists the entries that a request asks for.
fn list(request: &[u8], mut each: impl FnMut(&Entry)) -> Result<()> {
    if is_empty() {
        return Ok(());
    }
    wire::dump(NETLINK_NETFILTER, GET, request, |payload| {
        each(&Entry(Attributes::after(payload, NFNL_HEADER_LEN)));
    })
    .context("cannot list the kernel's connection tracking")?;
    Ok(())
}

/// Deletes the entries among those asked for by `request` that are `wanted`.
fn forget(ipv6: bool, request: &[u8], wanted: impl Fn(&Entry) -> bool) -> Result<usize> {
    let flows = || -> std::io::Result<usize> {
        let mut socket = Socket::open_for(NETLINK_NETFILTER)?;
        let mut found = Vec::new();
        socket.dump(GET, request, |payload| {
            let entry = Entry(Attributes::after(payload, NFNL_HEADER_LEN));
            found.extend(wanted(&entry).then(|| entry.name()));
        })?;
        let mut count = 0;
        for name in found {
            let deleted = socket.request(DELETE, 0, &[header(ipv6), name].concat());
            // It may have ended meanwhile.
            count += usize::from(unless(deleted, &[libc::ENOENT])?.is_some());
        }
        Ok(count)
    };
    flows().context("cannot delete entries of the kernel's connection tracking")
}

fn header(ipv6: bool) -> Vec<u8> {
    vec![family(ipv6), 0, 0, 0]
}

/// Asks for the entries with a mark within a mask.
fn marked(ipv6: bool, mark: u32, mask: u32) -> Vec<u8> {
    let mut body = header(ipv6);
    push_attribute(&mut body, CTA_MARK, &mark.to_be_bytes());
    push_attribute(&mut body, CTA_MARK_MASK, &mask.to_be_bytes());
    body
}

/// Asks for all entries of a family, or only for those to an address; of IPv6, for those to its port.
fn to(ipv6: bool, only: Option<(u8, SocketAddr)>) -> Vec<u8> {
    let mut body = header(ipv6);
    let Some((proto, to)) = only else { return body };
    let proto = [
        attribute(CTA_PROTO_NUM, &[proto]),
        attribute(CTA_PROTO_DST_PORT, &to.port().to_be_bytes()),
    ];
    body.extend(tuple(CTA_TUPLE_ORIG, &[destination(to.ip())], &proto));
    let address = if ipv6 { FILTER_IPV6 } else { FILTER_IP_DST };
    body.extend(filter(address | FILTER_PROTO_NUM | FILTER_DST_PORT, 0));
    body
}

/// Asks for the entries of what is sent from an IPv4 address; of IPv6, for all.
fn from(address: IpAddr) -> Vec<u8> {
    let mut body = header(address.is_ipv6());
    if address.is_ipv4() {
        let ip = nest(CTA_TUPLE_IP, &[source(address)]);
        body.extend(nest(CTA_TUPLE_ORIG, &[ip]));
        body.extend(filter(FILTER_IP_SRC, 0));
    }
    body
}

/// The same for the entries whose answers go to an address.
fn seen_at(address: IpAddr) -> Vec<u8> {
    let mut body = header(address.is_ipv6());
    if address.is_ipv4() {
        let ip = nest(CTA_TUPLE_IP, &[destination(address)]);
        body.extend(nest(CTA_TUPLE_REPLY, &[ip]));
        body.extend(filter(0, FILTER_IP_DST));
    }
    body
}

fn tuple(kind: u16, ips: &[Vec<u8>], proto: &[Vec<u8>]) -> Vec<u8> {
    let parts = [nest(CTA_TUPLE_IP, ips), nest(CTA_TUPLE_PROTO, proto)];
    nest(kind, &parts)
}

fn source(address: IpAddr) -> Vec<u8> {
    ip_attribute([CTA_IP_V4_SRC, CTA_IP_V6_SRC], address)
}

fn destination(address: IpAddr) -> Vec<u8> {
    ip_attribute([CTA_IP_V4_DST, CTA_IP_V6_DST], address)
}

/// An address by the first kind, or one of IPv6 by the second.
fn ip_attribute(kinds: [u16; 2], address: IpAddr) -> Vec<u8> {
    attribute(kinds[usize::from(address.is_ipv6())], &ip_bytes(address))
}

/// Says which parts of the given tuples count.
fn filter(original: u32, reply: u32) -> Vec<u8> {
    let flags = [
        (CTA_FILTER_ORIG_FLAGS, original),
        (CTA_FILTER_REPLY_FLAGS, reply),
    ];
    let flags = flags.map(|(kind, flags)| attribute(kind, &flags.to_ne_bytes()));
    nest(CTA_FILTER, &flags)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIENT: &str = "10.0.0.1";
    const SERVER: &str = "198.51.100.1";
    const SEEN: &str = "192.0.2.1";

    /// Of a flow of `CLIENT`'s whose other end sees `SEEN`.
    fn entry(proto: libc::c_int, mark: u32, status: u32) -> Vec<u8> {
        let number = attribute(CTA_PROTO_NUM, &[proto as u8]);
        let mut entry = tuple(
            CTA_TUPLE_ORIG,
            &[
                source(CLIENT.parse().unwrap()),
                destination(SERVER.parse().unwrap()),
            ],
            &[number],
        );
        let seen = destination(SEEN.parse().unwrap());
        entry.extend(tuple(CTA_TUPLE_REPLY, &[seen], &[]));
        push_attribute(&mut entry, CTA_STATUS, &status.to_be_bytes());
        push_attribute(&mut entry, CTA_MARK, &mark.to_be_bytes());
        entry
    }

    #[test]
    fn connections_of_many_addresses_are_found_by_few_requests() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let requests = |a: &str, b: &str| requests_for(&BTreeSet::from([ip(a), ip(b)]), from).len();
        assert_eq!(requests("2001:db8::1", "2001:db8::2"), 1);
        // The kernel picks the entries of one address.
        assert_eq!(requests("10.0.0.1", "10.0.0.2"), 2);
        assert_eq!(requests("10.0.0.1", "2001:db8::1"), 2);
        let many = (1..=9).map(|n| IpAddr::from([10, 0, 0, n]));
        assert_eq!(requests_for(&many.collect(), from).len(), 1);
        for (client, seen, expected) in [
            ("2001:db8::1", "2001:db8::9", Some("2001:db8::1")),
            ("2001:db8::1", "2001:db8::1", None),
            ("10.0.0.1", "192.0.2.1", Some("10.0.0.1")),
            ("10.0.0.1", "10.0.0.1", None),
        ] {
            let original = tuple(CTA_TUPLE_ORIG, &[source(ip(client))], &[]);
            let reply = tuple(CTA_TUPLE_REPLY, &[destination(ip(seen))], &[]);
            let bytes = [original, reply].concat();
            let entry = Entry(Attributes::after(&bytes, 0));
            assert_eq!(entry.translated(), expected.map(ip), "seen from {seen}");
        }
        assert_eq!(Entry(Attributes::after(&[], 0)).translated(), None);
    }

    #[test]
    fn a_connection_is_told_from_what_can_go_on_from_another_address() {
        let client: IpAddr = "10.0.0.1".parse().unwrap();
        let entry = |proto: libc::c_int, status: u32, seen: &str| {
            let number = attribute(CTA_PROTO_NUM, &[proto as u8]);
            let mut entry = tuple(CTA_TUPLE_ORIG, &[source(client)], &[number]);
            let seen = destination(seen.parse().unwrap());
            entry.extend(tuple(CTA_TUPLE_REPLY, &[seen], &[]));
            push_attribute(&mut entry, CTA_STATUS, &status.to_be_bytes());
            entry
        };
        let translates = |bytes: &[u8]| Entry(Attributes::after(bytes, 0)).translates();
        for (proto, status, expected) in [
            (libc::IPPROTO_UDP, IPS_SEEN_REPLY, Translated::Flows),
            (libc::IPPROTO_TCP, IPS_SEEN_REPLY, Translated::Connection),
            (libc::IPPROTO_TCP, 0, Translated::Flows),
        ] {
            let found = translates(&entry(proto, status, "192.0.2.1"));
            assert_eq!(
                found,
                Some((client, expected)),
                "protocol {proto}, {status}"
            );
        }
        let own = entry(libc::IPPROTO_TCP, IPS_SEEN_REPLY, "10.0.0.1");
        assert_eq!(translates(&own), None);
        assert!(Translated::Connection > Translated::Flows);
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
            let entry = Entry(Attributes::after(&bytes, 0));
            let stuck = entry.is_stuck(MARK, 0xff00_0000, |ends| {
                let ends = [ends.source, ends.from].map(|address| address.to_string());
                ends == [CLIENT, SEEN]
            });
            assert_eq!(stuck, expected, "protocol {proto}, mark {mark:#x}");
            assert!(!entry.is_stuck(MARK, 0xff00_0000, |_| false));
        }
    }
}
