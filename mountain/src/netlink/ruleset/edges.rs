// SPDX-License-Identifier: GPL-2.0-or-later
//! At which addresses and ports rules begin or cease to apply.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::ops::Range;

use super::registers::Byte;
use super::sets::compared;
use super::{Element, Packets, Set};

/// The first and the last value of each range of addresses, ports and protocols that rules ask for, and those right outside of it. Between
/// two of them rules do the same. Only of fields that are not known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Edges {
    /// Of source addresses.
    pub sources: BTreeSet<IpAddr>,
    /// Of destination addresses.
    pub destinations: BTreeSet<IpAddr>,
    /// Of source ports.
    pub source_ports: BTreeSet<u16>,
    /// Of destination ports.
    pub destination_ports: BTreeSet<u16>,
    /// Of protocols.
    pub protocols: BTreeSet<u8>,
    /// Marks of packets that rules ask for.
    pub marks: BTreeSet<u32>,
    /// Marks of connections.
    pub ct_marks: BTreeSet<u32>,
    /// Rules also ask in a way that has no edges: by a mask that is no prefix.
    pub untold: bool,
}

impl Edges {
    /// Adds those of others.
    pub fn extend(&mut self, others: Self) {
        self.sources.extend(others.sources);
        self.destinations.extend(others.destinations);
        self.source_ports.extend(others.source_ports);
        self.destination_ports.extend(others.destination_ports);
        self.protocols.extend(others.protocols);
        self.marks.extend(others.marks);
        self.ct_marks.extend(others.ct_marks);
        self.untold |= others.untold;
    }

    /// Bytes of a packet are compared with a range.
    pub(super) fn add(&mut self, packets: Packets, bytes: &[Byte], from: &[u8], to: &[u8]) {
        let untold = Cell::new(self.untold);
        let around = |base, field: Range<usize>| {
            let Some(found) = ends(bytes, base, field, from, to) else {
                return Vec::new();
            };
            untold.set(untold.get() || !found.is_prefix);
            around(found)
        };
        let (source, destination) = match packets {
            Packets::Ipv4 => (12..16, 16..20),
            Packets::Ipv6 => (8..24, 24..40),
        };
        let addresses = |field| {
            let numbers = around(NETWORK, field).into_iter();
            numbers.filter_map(|number| match packets {
                Packets::Ipv4 => Some(IpAddr::V4(u32::try_from(number).ok()?.into())),
                Packets::Ipv6 => Some(IpAddr::V6(number.into())),
            })
        };
        let ports = |field| {
            let numbers = around(TRANSPORT, field).into_iter();
            numbers.filter_map(|number| u16::try_from(number).ok())
        };
        self.sources.extend(addresses(source));
        self.destinations.extend(addresses(destination));
        let protocols = around(PROTOCOL, 0..1).into_iter().chain(match packets {
            Packets::Ipv4 => around(NETWORK, 9..10),
            Packets::Ipv6 => Vec::new(),
        });
        let protocols = protocols.filter_map(|number| u8::try_from(number).ok());
        self.protocols.extend(protocols);
        self.source_ports.extend(ports(0..2));
        self.destination_ports.extend(ports(2..4));
        let mark = |base| {
            let mark = ends(bytes, base, 0..4, from, to)?.least;
            let bytes = u32::try_from(mark).ok()?.to_be_bytes();
            // A range of them is one in network byte order.
            (from == to).then(|| u32::from_ne_bytes(bytes))
        };
        self.marks.extend(mark(MARK));
        self.ct_marks.extend(mark(CT_MARK));
        self.untold = untold.get();
    }

    /// They are looked up in a set.
    pub(super) fn look_up(
        &mut self,
        packets: Packets,
        set: &Set,
        key: &[Byte],
        elements: &[&Element],
    ) {
        let ranges = elements.iter().filter(|element| !element.is_catch_all());
        let ranges = ranges.flat_map(|element| compared(set, key, element));
        ranges.for_each(|(key, from, to)| self.add(packets, key, from, to));
    }
}

/// NFT_PAYLOAD_NETWORK_HEADER, NFT_PAYLOAD_TRANSPORT_HEADER, NFT_META_L4PROTO, NFT_META_MARK and NFT_CT_MARK, as bytes of
/// them are named.
const NETWORK: &str = "payload 1";
const TRANSPORT: &str = "payload 2";
const PROTOCOL: &str = "meta 16";
const MARK: &str = "meta 3";
const CT_MARK: &str = "ct mark";

/// The numbers in a field with which bytes are within a range.
struct Ends {
    least: u128,
    most: u128,
    /// All between these are.
    is_prefix: bool,
}

/// Those in a field of a header, in bytes of that, with which `bytes` are within a range. `None`: they are not of that field.
fn ends(bytes: &[Byte], base: &str, field: Range<usize>, from: &[u8], to: &[u8]) -> Option<Ends> {
    let open = |byte: &Byte| {
        let (name, at, bits) = byte.open()?;
        (name == base && field.contains(&at)).then(|| (at - field.start, bits))
    };
    let mut all = bytes.iter().enumerate();
    let (first, at) = all.find_map(|(i, byte)| Some((i, open(byte)?.0)))?;
    let begin = first.checked_sub(at)?;
    let (mut least, mut most, mut unasked) = (0, 0, 0);
    for i in 0..field.len() {
        let asked = match bytes.get(begin + i) {
            // Such as the beginning of an address of a known network.
            Some(byte) if i < at && byte.is_known() => 0xff,
            Some(byte) => open(byte)
                .filter(|(at, _)| *at == i)
                .map_or(0, |(_, bits)| bits),
            None => 0,
        };
        let value = |of: &[u8]| of.get(begin + i).copied().unwrap_or(0) & asked;
        least = least << 8 | u128::from(value(from));
        most = most << 8 | u128::from(value(to) | !asked);
        unasked = unasked << 8 | u128::from(!asked);
    }
    Some(Ends {
        least,
        most,
        is_prefix: unasked & unasked.wrapping_add(1) == 0,
    })
}

/// The ends of a range, and the numbers outside of it.
fn around(ends: Ends) -> Vec<u128> {
    let outside = [ends.least.checked_sub(1), ends.most.checked_add(1)];
    let all = outside.into_iter().flatten().chain([ends.least, ends.most]);
    all.collect()
}
