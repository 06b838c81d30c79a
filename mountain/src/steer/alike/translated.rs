// SPDX-License-Identifier: GPL-2.0-or-later
//! Whether connections are translated, and to addresses of their own on each uplink.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;
use libc::{IPPROTO_ICMP, IPPROTO_ICMPV6, IPPROTO_TCP, IPPROTO_UDP};

use super::{facts, Difference, Firewall, ANYWHERE, ANY_PORT};
use crate::netlink::ruleset::{DeviceFact, Edges, EffectKind, Facts, MarkFact, Place, Residue};
use crate::netlink::Link;
use crate::topology::is_global;

/// So many kinds of connections of a network are asked about, by protocol: each takes a look through the rules of NAT.
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
        let icmp = if net.addr().is_ipv6() {
            IPPROTO_ICMPV6
        } else {
            IPPROTO_ICMP
        };
        let untranslated = |kind: &Facts| {
            let residue = |device: &&Link| self.ruleset.residue(nat, &by(device, kind));
            let residues: Vec<Residue<'_>> = devices.iter().map(residue).collect();
            let is_translated = |residue: &Residue<'_>| residue.does(&TRANSLATIONS);
            match residues.iter().position(|residue| !is_translated(residue)) {
                Some(i) => Some(Difference::new(format!(
                    "the firewall does not translate all packets from {net} that leave by {}",
                    devices[i].name
                ))),
                None => same_nat(residues.iter().enumerate(), &format!("packets from {net}")),
            }
        };
        [IPPROTO_UDP, IPPROTO_TCP, icmp]
            .into_iter()
            .find_map(|protocol| {
                let all = Facts {
                    iif: from.clone(),
                    protocol: u8::try_from(protocol).ok(),
                    source: Some(net),
                    begins: true,
                    ..Facts::default()
                };
                let splits = match protocol == icmp {
                    true => &SPLITS[..WITHOUT_PORTS],
                    false => &SPLITS[..],
                };
                match kinds(all, splits, edges) {
                    Some(kinds) => kinds.iter().find_map(untranslated),
                    None => Some(Difference::new(format!(
                    "the firewall has more rules about packets from {net} than can be asked about"
                ))),
                }
            })
    }
}

const TRANSLATIONS: [EffectKind; 3] = [
    EffectKind::Nat,
    EffectKind::Redirect,
    EffectKind::Masquerade,
];

/// One connection of each kind that rules tell apart, of all to the Internet. `None`: there are too many.
pub(super) fn kinds(
    all: Facts,
    splits: &[Split],
    edges: impl Fn(&Facts) -> Edges,
) -> Option<Vec<Facts>> {
    let mut kinds = vec![all];
    for split in splits {
        let parts = kinds.iter().flat_map(|kind| split(kind, edges(kind)));
        kinds = parts.take(KINDS_MAX + 1).collect();
    }
    (kinds.len() <= KINDS_MAX).then_some(kinds)
}

/// One connection of each kind that edges of one field tell apart.
type Split = fn(&Facts, Edges) -> Vec<Facts>;

const SPLITS: [Split; 6] = [
    by_source,
    by_destination,
    by_mark,
    by_ct_mark,
    by_source_port,
    by_destination_port,
];
/// How many of them are not by port.
const WITHOUT_PORTS: usize = 4;

fn by_source(kind: &Facts, edges: Edges) -> Vec<Facts> {
    let Some([first, last]) = kind.source.map(ends) else {
        return vec![kind.clone()];
    };
    let hosts = edges.sources.range(first..=last).copied();
    let hosts: BTreeSet<IpAddr> = hosts.chain([first, last]).collect();
    with(kind, hosts, |kind, host| kind.source = Some(host.into()))
}

/// Of a kind whose source is known.
pub(super) fn by_destination(kind: &Facts, mut edges: Edges) -> Vec<Facts> {
    let ipv6 = kind.source.is_some_and(|source| source.addr().is_ipv6());
    edges.destinations.retain(|to| is_global(*to));
    edges.destinations.insert(ANYWHERE[usize::from(ipv6)]);
    with(kind, edges.destinations, |kind, to| {
        kind.destination = Some(to)
    })
}

fn by_mark(kind: &Facts, mut edges: Edges) -> Vec<Facts> {
    edges.marks.insert(0);
    with(kind, edges.marks, |kind, mark| {
        kind.mark = MarkFact::of(mark)
    })
}

fn by_ct_mark(kind: &Facts, mut edges: Edges) -> Vec<Facts> {
    edges.ct_marks.insert(0);
    with(kind, edges.ct_marks, |kind, mark| {
        kind.ct_mark = MarkFact::of(mark)
    })
}

fn by_source_port(kind: &Facts, mut edges: Edges) -> Vec<Facts> {
    edges.source_ports.insert(ANY_PORT);
    with(kind, edges.source_ports, |kind, port| {
        kind.source_port = Some(port)
    })
}

fn by_destination_port(kind: &Facts, mut edges: Edges) -> Vec<Facts> {
    edges.destination_ports.insert(ANY_PORT);
    with(kind, edges.destination_ports, |kind, port| {
        kind.destination_port = Some(port)
    })
}

fn with<T>(kind: &Facts, values: BTreeSet<T>, set: fn(&mut Facts, T)) -> Vec<Facts> {
    let values = values.into_iter();
    let parts = values.map(|value| {
        let mut part = kind.clone();
        set(&mut part, value);
        part
    });
    parts.collect()
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
