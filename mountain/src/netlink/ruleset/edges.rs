// SPDX-License-Identifier: GPL-2.0-or-later
//! At which addresses and ports rules begin or cease to apply.

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
    }

    /// Bytes of a packet are compared with a range.
    pub(super) fn add(&mut self, packets: Packets, bytes: &[Byte], from: &[u8], to: &[u8]) {
        let around = |base, field| ends(bytes, base, field, from, to).map_or_else(Vec::new, around);
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
            let (mark, _) = ends(bytes, base, 0..4, from, to)?;
            let bytes = u32::try_from(mark).ok()?.to_be_bytes();
            // A range of them is one in network byte order.
            (from == to).then(|| u32::from_ne_bytes(bytes))
        };
        self.marks.extend(mark(MARK));
        self.ct_marks.extend(mark(CT_MARK));
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

/// The least and the greatest number in a field of a header, in bytes of that, with which `bytes` are within a range. `None`:
/// they are not of that field.
fn ends(
    bytes: &[Byte],
    base: &str,
    field: Range<usize>,
    from: &[u8],
    to: &[u8],
) -> Option<(u128, u128)> {
    let open = |byte: &Byte| {
        let (name, at, bits) = byte.open()?;
        (name == base && field.contains(&at)).then(|| (at - field.start, bits))
    };
    let mut all = bytes.iter().enumerate();
    let (first, at) = all.find_map(|(i, byte)| Some((i, open(byte)?.0)))?;
    let begin = first.checked_sub(at)?;
    let (mut least, mut most) = (0, 0);
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
    }
    Some((least, most))
}

/// The ends of a range, and the numbers outside of it.
fn around((least, most): (u128, u128)) -> Vec<u128> {
    let outside = [least.checked_sub(1), most.checked_add(1)];
    let all = outside.into_iter().flatten().chain([least, most]);
    all.collect()
}
