// SPDX-License-Identifier: GPL-2.0-or-later
//! What is known of a packet before its rules are evaluated.

use std::net::IpAddr;

use ipnet::IpNet;

use super::expr::{self, Source};
use super::{Hook, Packets, Place};
use crate::netlink::link::Link;
use crate::netlink::wire::{ip_bytes, AF_INET, AF_INET6};

/// NF_CT_STATE_BIT(IP_CT_NEW), of IP_CT_ESTABLISHED, and IPS_DST_NAT of linux/netfilter/nf_conntrack_common.h.
const NF_CT_STATE_NEW: u32 = 1 << 3;
const NF_CT_STATE_ESTABLISHED: u32 = 1 << 1;
const IPS_DST_NAT: u8 = 1 << 5;
/// Of linux/rtnetlink.h: the type of the route to another host.
pub(super) const RTN_UNICAST: u32 = 1;

/// The device that a packet came in or leaves by.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceFact {
    /// Any, or none.
    #[default]
    Open,
    /// None: at output no packet has come in by a device.
    Absent,
    /// Exactly this device.
    Known(Box<Link>),
}

impl DeviceFact {
    pub(super) fn known(&self) -> Option<&Link> {
        match self {
            Self::Known(device) => Some(device),
            _ => None,
        }
    }
}

/// What is known of a mark: all of it, or some bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MarkFact {
    /// The known bits.
    value: u32,
    /// Which they are.
    known: u32,
    /// Those of them that stay as they are where rules set marks.
    kept: u32,
}

impl MarkFact {
    /// This mark, until a rule sets another one.
    pub fn of(value: u32) -> Self {
        Self::kept(value, 0)
    }

    /// This mark, of whose bits those in `kept` survive where rules set marks.
    pub fn kept(value: u32, kept: u32) -> Self {
        Self {
            value,
            known: u32::MAX,
            kept,
        }
    }

    /// What is still known once rules may have set it.
    pub(super) fn once_set(self) -> Self {
        let known = self.known & self.kept;
        Self {
            value: self.value & known,
            known,
            ..self
        }
    }

    /// As a rule loads it. A byte of which only some bits are known is open.
    fn bytes(self) -> Vec<Option<u8>> {
        let bytes = self.value.to_ne_bytes().into_iter();
        let known = self.known.to_ne_bytes().into_iter();
        let bytes = bytes.zip(known);
        bytes
            .map(|(byte, known)| (known == 0xff).then_some(byte))
            .collect()
    }
}

/// What is known of a packet; all else is open. Addresses and ports are those that the packet bears
/// at the hook in question.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// The device that it came in by.
    pub iif: DeviceFact,
    /// The device that it leaves by.
    pub oif: DeviceFact,
    /// IPPROTO_*.
    pub protocol: Option<u8>,
    /// The network of the source address in its IP header.
    pub source: Option<IpNet>,
    /// Destination address in its IP header.
    pub destination: Option<IpAddr>,
    /// Source port, of protocols with ports.
    pub source_port: Option<u16>,
    /// Destination port, of protocols with ports.
    pub destination_port: Option<u16>,
    /// Mark of the packet, as it bears it at the hook.
    pub mark: MarkFact,
    /// Mark of its connection.
    pub ct_mark: MarkFact,
    /// It begins a connection, of which nothing is translated yet but, with `translated`, the destination.
    pub begins: bool,
    /// It is a reply of a connection that was let through.
    pub answers: bool,
    /// The destination of its connection is translated.
    pub translated: bool,
    /// Its destination is one other host.
    pub is_unicast: bool,
    /// No IPsec policy takes it as it leaves.
    pub is_plain: bool,
}

impl Facts {
    /// What the kernel would load at a place: each byte, where it is known. `None`: the rule does not apply.
    pub(super) fn load(
        &self,
        source: &Source,
        len: usize,
        place: &Place,
    ) -> Option<Vec<Option<u8>>> {
        let open = vec![None; len];
        Some(match source {
            Source::Meta(expr::META_MARK) => self.mark.bytes(),
            Source::Other(name) if name == "ct mark" => self.ct_mark.bytes(),
            Source::Meta(key) => self.meta(*key, place)?.map_or(open, |mut bytes| {
                bytes.resize(len, 0);
                bytes.into_iter().map(Some).collect()
            }),
            Source::Payload(base, offset, _) => {
                let range = 0..len as u32;
                let bytes = range.map(|i| self.payload(*base, offset.saturating_add(i), place));
                bytes.collect()
            }
            Source::Other(name) if name == "ct state" => self.ct_state().map_or(open, |state| {
                let bytes = state.to_ne_bytes().into_iter();
                bytes.take(len).map(Some).collect()
            }),
            // `fib daddr type`, by what `expr` calls it.
            Source::Other(name) if self.is_unicast && name == "fib 3 0x2" => {
                RTN_UNICAST.to_ne_bytes().map(Some).to_vec()
            }
            Source::Other(name) if self.is_plain && name == "rt ipsec" => vec![Some(0); len],
            // IPS_DST_NAT is one of its low bits, as all others are that only later packets bring about.
            Source::Other(name) if self.begins && name == "ct status" => {
                let low = if cfg!(target_endian = "big") {
                    len - 1
                } else {
                    0
                };
                let translated = if self.translated { IPS_DST_NAT } else { 0 };
                let byte = |i| (i == low).then_some(translated);
                (0..len).map(byte).collect()
            }
            _ => open,
        })
    }

    /// What connection tracking calls it: a bit of NF_CT_STATE_BIT. `None`: open.
    pub(super) fn ct_state(&self) -> Option<u32> {
        match (self.begins, self.answers) {
            (true, _) => Some(NF_CT_STATE_NEW),
            (false, true) => Some(NF_CT_STATE_ESTABLISHED),
            (false, false) => None,
        }
    }

    /// The outer `None`: the rule does not apply; the inner one: not known.
    fn meta(&self, key: u32, place: &Place) -> Option<Option<Vec<u8>>> {
        let of_device =
            |fact: &DeviceFact, value: fn(&Link) -> Vec<u8>, none: Option<Vec<u8>>| match fact {
                DeviceFact::Open => Some(None),
                DeviceFact::Absent => none.map(Some),
                DeviceFact::Known(device) => Some(Some(value(device))),
            };
        // A device that is not there has index 0 and no name; a rule about its type, group or kind
        // does not apply (nft_meta.c).
        let index = |device: &Link| device.ifindex.to_ne_bytes().to_vec();
        let name = |device: &Link| device.name.clone().into_bytes();
        let arphrd = |device: &Link| device.arphrd.to_ne_bytes().to_vec();
        let group = |device: &Link| device.group.to_ne_bytes().to_vec();
        // Hardware has none.
        let kind = |fact: &DeviceFact| match fact {
            DeviceFact::Open => Some(None),
            DeviceFact::Absent => None,
            DeviceFact::Known(device) => device.kind.clone().map(|kind| Some(kind.into_bytes())),
        };
        let at_device = matches!(place.hook, Hook::Ingress | Hook::Egress);
        match key {
            expr::META_IIF => of_device(&self.iif, index, Some(vec![0; 4])),
            expr::META_OIF => of_device(&self.oif, index, Some(vec![0; 4])),
            expr::META_IIFNAME => of_device(&self.iif, name, Some(Vec::new())),
            expr::META_OIFNAME => of_device(&self.oif, name, Some(Vec::new())),
            expr::META_IIFTYPE => of_device(&self.iif, arphrd, None),
            expr::META_OIFTYPE => of_device(&self.oif, arphrd, None),
            expr::META_IIFGROUP => of_device(&self.iif, group, None),
            expr::META_OIFGROUP => of_device(&self.oif, group, None),
            expr::META_IIFKIND => kind(&self.iif),
            expr::META_OIFKIND => kind(&self.oif),
            expr::META_L4PROTO => Some(self.protocol.map(|protocol| vec![protocol])),
            expr::META_NFPROTO if at_device => Some(None),
            expr::META_NFPROTO => Some(Some(match place.packets {
                Packets::Ipv4 => vec![AF_INET],
                Packets::Ipv6 => vec![AF_INET6],
            })),
            expr::META_PROTOCOL => Some(Some(match place.packets {
                Packets::Ipv4 => 0x0800u16.to_be_bytes().to_vec(),
                Packets::Ipv6 => 0x86ddu16.to_be_bytes().to_vec(),
            })),
            _ => Some(None),
        }
    }

    fn payload(&self, base: u32, offset: u32, place: &Place) -> Option<u8> {
        const NETWORK: u32 = 1;
        const TRANSPORT: u32 = 2;
        let (source_at, destination_at, length) = match place.packets {
            Packets::Ipv4 => (12, 16, 4),
            Packets::Ipv6 => (8, 24, 16),
        };
        let address = |net: Option<IpNet>, at: u32| {
            let net = net?;
            let bytes = ip_bytes(net.addr());
            let byte = offset - at;
            let is_known = (byte + 1) * 8 <= u32::from(net.prefix_len());
            (bytes.len() == length as usize && is_known).then_some(())?;
            bytes.get(byte as usize).copied()
        };
        let port = |port: Option<u16>, byte: u32| Some(port?.to_be_bytes()[byte as usize]);
        match base {
            NETWORK if place.packets == Packets::Ipv4 && offset == 9 => self.protocol,
            NETWORK if (source_at..source_at + length).contains(&offset) => {
                address(self.source, source_at)
            }
            NETWORK if (destination_at..destination_at + length).contains(&offset) => {
                address(self.destination.map(IpNet::from), destination_at)
            }
            TRANSPORT if offset < 2 => port(self.source_port, offset),
            TRANSPORT if offset < 4 => port(self.destination_port, offset - 2),
            _ => None,
        }
    }
}
