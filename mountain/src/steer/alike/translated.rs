// SPDX-License-Identifier: GPL-2.0-or-later
//! Whether connections are translated, and to addresses of their own on each uplink.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;

use super::{facts, Difference, Firewall, ANYWHERE, ANY_PORT};
use crate::netlink::ruleset::{DeviceFact, Edges, Facts, MarkFact, Place, Residue};
use crate::netlink::Link;
use crate::topology::is_global;

/// IPPROTO_* (linux/in.h, linux/in6.h).
const UDP: u8 = 17;
const TCP: u8 = 6;
const ICMP: u8 = 1;
const ICMPV6: u8 = 58;

/// The protocols that are placed.
pub(super) fn placed(ipv6: bool) -> [u8; 3] {
    [UDP, TCP, [ICMP, ICMPV6][usize::from(ipv6)]]
}

/// So many kinds of connections of a network are asked about: each takes a look through the rules of NAT.
const KINDS_MAX: usize = 256;

impl Firewall {
    /// The first device by which connections from a network, which come in by `from`, begin untranslated, or translated to
    /// another one's address. All to the Internet have to be translated, and none to one address by several.
    pub(super) fn untranslated(
        &self,
        net: IpNet,
        from: &DeviceFact,
        nat: &Place,
        devices: &[&Link],
    ) -> Option<Difference> {
        let by = |device: &Link, kind: &Facts| Facts {
            oif: facts(nat.hook, device).oif,
            ..kind.clone()
        };
        let edges = |kind: &Facts| {
            let mut edges = Edges::default();
            let all = devices.iter().map(|device| by(device, kind));
            all.for_each(|facts| edges.extend(self.ruleset.edges(nat, &facts)));
            edges
        };
        let all = Facts {
            iif: from.clone(),
            source: Some(net),
            begins: true,
            // To this host itself, and by IPsec, goes nothing that is placed.
            is_unicast: true,
            is_plain: true,
            ..Facts::default()
        };
        let residues = |kind: &Facts| {
            let residue = |device: &&Link| self.ruleset.residue(nat, &by(device, kind));
            devices.iter().map(residue).collect::<Vec<_>>()
        };
        let packets = format!("packets from {net}");
        // Also by what cannot be told.
        let is_translated = |residue: &Residue<'_>| residue.translating().drops_all().is_some();
        let same = |residues: &[Residue<'_>]| same_nat(residues.iter().enumerate(), &packets);
        let whole = residues(&all);
        if whole.iter().all(is_translated) && same(&whole).is_none() {
            return None;
        }
        let kinds = kinds(all.clone(), edges).unwrap_or_else(|| usual(net, &all));
        // With all hosts, ports and protocols at once, also what asks for them in a way that has no edges counts.
        same(&residues(&anywhere(&all))).or_else(|| {
            kinds.iter().find_map(|kind| {
                let residues = residues(kind);
                if let Some(i) = residues.iter().position(|residue| !is_translated(residue)) {
                    return Some(Difference::new(format!(
                        "the firewall does not translate all {packets} that leave by {}",
                        devices[i].name
                    )));
                }
                // By mark, somebody has chosen the address.
                let is_unmarked = [kind.mark, kind.ct_mark] == [MarkFact::of(0); 2];
                is_unmarked.then(|| same(&residues)).flatten()
            })
        })
    }
}

/// The same connections, but unmarked and to anywhere.
pub(super) fn anywhere(all: &Facts) -> Facts {
    let ipv6 = all.source.is_some_and(|source| source.addr().is_ipv6());
    Facts {
        destination: Some(ANYWHERE[usize::from(ipv6)]),
        ..unmarked(all.clone())
    }
}

/// The kinds that are asked about where rules tell too many apart.
fn usual(net: IpNet, all: &Facts) -> Vec<Facts> {
    let hosts = with(&anywhere(all), ends(net), |kind, host| {
        kind.source = Some(host.into())
    });
    let protocols = hosts.iter().flat_map(|kind| {
        with(kind, placed(net.addr().is_ipv6()), |kind, protocol| {
            kind.protocol = Some(protocol)
        })
    });
    let ports = protocols.map(|mut kind| {
        if matches!(kind.protocol, Some(UDP | TCP)) {
            kind.source_port = Some(ANY_PORT);
            kind.destination_port = Some(ANY_PORT);
        }
        kind
    });
    ports.collect()
}

/// One connection of each kind that rules tell apart, of all to the Internet from a source. What no rule asks for stays open,
/// but for marks. `None`: there are too many.
pub(super) fn kinds(all: Facts, edges: impl Fn(&Facts) -> Edges) -> Option<Vec<Facts>> {
    let (mut open, mut kinds) = (vec![all], Vec::new());
    while let Some(kind) = open.pop() {
        match split(&kind, edges(&kind)) {
            Some(parts) => open.extend(parts),
            None => kinds.push(unmarked(kind)),
        }
        if open.len() + kinds.len() > KINDS_MAX {
            return None;
        }
    }
    Some(kinds)
}

/// Without the marks that are open: of ranges of marks there are no edges.
fn unmarked(mut kind: Facts) -> Facts {
    for mark in [&mut kind.mark, &mut kind.ct_mark] {
        if *mark == MarkFact::default() {
            *mark = MarkFact::of(0);
        }
    }
    kind
}

/// One connection of each kind that edges of a field tell apart: the first that is open and that rules ask for. `None`: there is
/// none, or not all that rules ask for has edges.
fn split(kind: &Facts, edges: Edges) -> Option<Vec<Facts>> {
    if edges.untold {
        return None;
    }
    let source = kind.source?;
    let ipv6 = source.addr().is_ipv6();
    let by_mark = kind.mark == MarkFact::default() && !edges.marks.is_empty();
    let by_ct_mark = kind.ct_mark == MarkFact::default() && !edges.ct_marks.is_empty();
    let has_ports = matches!(kind.protocol, None | Some(UDP | TCP));
    let parts = if source.prefix_len() < source.max_prefix_len() && !edges.sources.is_empty() {
        let hosts = edges
            .sources
            .into_iter()
            .filter(|host| is_host(source, *host));
        let hosts = BTreeSet::from_iter(hosts.chain(ends(source)));
        with(kind, hosts, |kind, host| kind.source = Some(host.into()))
    } else if kind.destination.is_none() && !edges.destinations.is_empty() {
        let hosts = edges.destinations.into_iter().filter(|to| is_global(*to));
        let hosts = BTreeSet::from_iter(hosts.chain([ANYWHERE[usize::from(ipv6)]]));
        with(kind, hosts, |kind, host| kind.destination = Some(host))
    } else if kind.protocol.is_none() && !edges.protocols.is_empty() {
        with(kind, placed(ipv6), |kind, protocol| {
            kind.protocol = Some(protocol)
        })
    } else if by_mark {
        with(kind, and(edges.marks, 0), |kind, mark| {
            kind.mark = MarkFact::of(mark)
        })
    } else if by_ct_mark {
        with(kind, and(edges.ct_marks, 0), |kind, mark| {
            kind.ct_mark = MarkFact::of(mark)
        })
    } else if has_ports && kind.source_port.is_none() && !edges.source_ports.is_empty() {
        let ports = and(edges.source_ports, ANY_PORT);
        with(kind, ports, |kind, port| kind.source_port = Some(port))
    } else if has_ports && kind.destination_port.is_none() && !edges.destination_ports.is_empty() {
        let ports = and(edges.destination_ports, ANY_PORT);
        with(kind, ports, |kind, port| kind.destination_port = Some(port))
    } else {
        return None;
    };
    Some(parts)
}

fn and<T: Ord>(mut values: BTreeSet<T>, another: T) -> BTreeSet<T> {
    values.insert(another);
    values
}

fn with<T>(
    kind: &Facts,
    values: impl IntoIterator<Item = T>,
    set: fn(&mut Facts, T),
) -> Vec<Facts> {
    let values = values.into_iter();
    let parts = values.map(|value| {
        let mut part = kind.clone();
        set(&mut part, value);
        part
    });
    parts.collect()
}

/// Whether a network may have a host with this address.
fn is_host(net: IpNet, address: IpAddr) -> bool {
    let is_other = net.addr().is_ipv6() || net.prefix_len() > 30;
    net.contains(&address) && (is_other || ![net.network(), net.broadcast()].contains(&address))
}

/// Two addresses of hosts of a network, from either end.
fn ends(net: IpNet) -> [IpAddr; 2] {
    match (net.network(), net.broadcast()) {
        // The first host is mostly the router itself.
        (IpAddr::V4(first), IpAddr::V4(last)) if net.prefix_len() <= 29 => {
            [u32::from(first) + 2, u32::from(last) - 1].map(|n| Ipv4Addr::from(n).into())
        }
        (first, last) => [first, last],
    }
}

/// The first rule that gives `packets` the same address on several devices, by residues of each, by its number.
pub(super) fn same_nat<'a, 'b: 'a>(
    residues: impl Iterator<Item = (usize, &'a Residue<'b>)>,
    packets: &str,
) -> Option<Difference> {
    let mut all = residues.flat_map(|(device, residue)| {
        let translations = residue.translations().into_iter();
        translations.map(move |(what, rule)| (what, device, rule))
    });
    let mut known: HashMap<&str, usize> = HashMap::new();
    let (.., rule) =
        all.find(|(what, device, _)| *known.entry(what).or_insert(*device) != *device)?;
    Some(Difference::by(
        &rule,
        format!("the firewall gives {packets} the same address on several uplinks, by {rule}"),
    ))
}
