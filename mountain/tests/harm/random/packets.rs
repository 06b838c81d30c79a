// SPDX-License-Identifier: GPL-2.0-or-later
//! What is sent, and how it is told again where it leaves.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use etherparse::{TcpHeader, TcpOptionElement, TcpSlice, UdpHeader};

use super::devices::{Made, Tunnel};
use super::dice::Dice;
use super::host::{self, Host, Kind, CLASSES, INNER, MARKS, TOSES, TUN, USER};
use crate::support::ip::{Ip, FRAGMENT};
use crate::support::sums::{put_check, ICMP, ICMPV6};
pub use crate::support::sums::{TCP, UDP};

/// Of the tunnel whose cipher is none.
const ESP: u8 = 50;
/// Opens each word of a payload; the flow's number follows.
const MAGIC: u16 = 0x4d54;
/// ICMP echo's identifier is this and the flow's number.
const ECHO_ID: u16 = 0x4000;

/// Who sends a flow's packets.
#[derive(Clone, Debug, PartialEq)]
pub enum By {
    /// A socket of this host.
    Socket(OwnSocket),
    /// A host behind this device.
    Forwarded { device: String, source: IpAddr },
    /// An AF_PACKET socket that writes frames for a gateway of this device, from whatever address.
    Frame {
        device: String,
        gateway: IpAddr,
        source: IpAddr,
    },
    /// A socket in the namespace of this guest, bound to this address.
    Guest {
        guest: usize,
        address: Option<IpAddr>,
    },
}

#[derive(Clone, Debug, PartialEq)]
pub struct OwnSocket {
    /// The address that it is bound to, and whether to a port.
    pub address: Option<IpAddr>,
    pub port: bool,
    pub device: Option<String>,
    pub user: u32,
    /// Else each packet names its destination.
    pub connected: bool,
    /// The device that each packet names (IP_PKTINFO).
    pub pktinfo: Option<String>,
    /// The device that the socket names for all of them (IP_UNICAST_IF).
    pub unicast: Option<String>,
}

#[derive(Clone, Debug)]
pub struct Flow {
    pub id: u16,
    pub by: By,
    /// UDP, TCP, or ICMP for echo requests of either family.
    pub proto: u8,
    pub to: SocketAddr,
    pub sport: u16,
    pub tos: u8,
    pub mark: u32,
    /// Bytes of payload.
    pub length: usize,
    /// Whether it is there before Mountain is.
    pub old: bool,
}

impl Flow {
    pub fn ipv6(&self) -> bool {
        self.to.is_ipv6()
    }

    pub fn socket(&self) -> Option<&OwnSocket> {
        match &self.by {
            By::Socket(socket) => Some(socket),
            _ => None,
        }
    }

    /// Whether the kernel chooses its port, and with it a member of a group, anew each time.
    pub fn is_ephemeral(&self) -> bool {
        match &self.by {
            By::Socket(socket) => !socket.port && self.proto != ICMP,
            By::Guest { .. } => true,
            _ => false,
        }
    }

    /// Whether the kernel sends its packets again by itself.
    pub fn repeats(&self) -> bool {
        self.proto == TCP && self.socket().is_some()
    }

    /// Whether the host has chosen a source for the flow, which its peer goes on to see.
    pub fn is_connection(&self) -> bool {
        self.socket()
            .is_none_or(|s| s.connected || s.address.is_some())
    }

    /// Whether Mountain may choose an uplink for it when it starts.
    pub fn is_placeable(&self) -> bool {
        match &self.by {
            // One with an uplink's own address has chosen that uplink.
            By::Socket(socket) => socket.device.is_none() && socket.unicast.is_none(),
            By::Forwarded { .. } => true,
            _ => false,
        }
    }

    pub fn source(&self) -> Option<IpAddr> {
        match &self.by {
            By::Socket(OwnSocket { address, .. }) | By::Guest { address, .. } => *address,
            By::Forwarded { source, .. } | By::Frame { source, .. } => Some(*source),
        }
    }
}

/// The flows that a host's seed gives.
pub fn flows(host: &Host, count: usize) -> Vec<Flow> {
    let mut dice = Dice::new(host.seed ^ 0x666c_6f77);
    (1..=count as u16)
        .map(|id| flow(&mut dice, host, id))
        .collect()
}

fn flow(dice: &mut Dice, host: &Host, id: u16) -> Flow {
    let ipv6 = dice.one_in(3);
    // Of a destination's prefix, either half: more specific routes may have the second.
    let n = dice.pick(&[1, 2, 3, 17, 18, if ipv6 { 0x8001 } else { 19 }]);
    let address = match (ipv6, n) {
        (true, 17..=19) => {
            let k = dice.below(host::PREFIXES) as u16;
            Ipv6Addr::new(0x2001, 0xdb8, k, 0x8000, 0, 0, 0, n).into()
        }
        _ => host::destination(dice.below(host::PREFIXES), n, ipv6),
    };
    let by = sender(dice, host, ipv6);
    let proto = match (&by, dice.below(8)) {
        (By::Guest { .. }, _) | (_, 0..=3) => UDP,
        (By::Socket(socket), _) if socket.pktinfo.is_some() || socket.unicast.is_some() => UDP,
        (_, 4..=6) => TCP,
        _ => ICMP,
    };
    // By a ppp device or ESP nothing comes back, nor perhaps past a filter by the way back, and a TCP socket without
    // an answer sends when it likes.
    let one_way = host.tunnel() == Some(Tunnel::Ppp) || host.has(Kind::Esp);
    let one_way = one_way || !ipv6 && host.has(Kind::ReversePath);
    let proto = match (&by, proto) {
        (By::Socket(socket), TCP) if one_way || is_unanswered(host, socket, ipv6) => UDP,
        _ => proto,
    };
    // Mountain's rules have the kernel look up the routes of such sockets anew, as any change of the routing does. They have a
    // source by now, so that it does not insist on their device.
    let is_looked_up = match &by {
        By::Socket(socket) => ipv6 && socket.connected && socket.unicast.is_some(),
        _ => false,
    };
    let large = dice.one_in(6);
    Flow {
        id,
        proto,
        to: SocketAddr::new(address, host::destination_port(dice.below(CLASSES), id)),
        sport: host::source_port(dice.below(CLASSES), id),
        tos: if dice.one_in(3) { dice.pick(&TOSES) } else { 0 },
        mark: if dice.one_in(5) { dice.pick(&MARKS) } else { 0 },
        length: match proto == UDP || proto == TCP && matches!(by, By::Socket(_)) {
            true if large => dice.pick(&[1380, 1460, 3000]),
            _ => 16 + 4 * dice.below(20),
        },
        old: dice.one_in(2) && !is_looked_up,
        by,
    }
}

fn sender(dice: &mut Dice, host: &Host, ipv6: bool) -> By {
    let uplink = |dice: &mut Dice| dice.below(host.uplinks.len());
    match dice.below(12) {
        0..=3 => {
            let (far, public) = (dice.one_in(3), dice.one_in(5));
            let inner = host::inner_address(20 + dice.below(3) as u16, far || public, public, ipv6);
            By::Forwarded {
                device: INNER.into(),
                source: inner,
            }
        }
        4 if host.has(Kind::Transit) => transit(dice, host, ipv6),
        5 if host.has(Kind::Frames) => {
            let i = uplink(dice);
            let uplink = &host.uplinks[i];
            By::Frame {
                device: uplink.name.clone(),
                gateway: dice.pick(&uplink.gateways[usize::from(ipv6)]),
                source: match dice.below(3) {
                    0 => host::uplink_address(i, 1, ipv6),
                    1 => host::uplink_address(i, 70, ipv6),
                    _ => host::service(ipv6),
                },
            }
        }
        6 | 7 if !host.guests.is_empty() => By::Guest {
            guest: dice.below(host.guests.len()),
            address: dice.one_in(2).then(|| match ipv6 {
                false => "10.98.0.77".parse().unwrap(),
                true => "fd98::77".parse().unwrap(),
            }),
        },
        _ => socket(dice, host, ipv6),
    }
}

/// From behind one uplink, or with an uplink's own address from inside.
fn transit(dice: &mut Dice, host: &Host, ipv6: bool) -> By {
    let i = dice.below(host.uplinks.len());
    let source = match dice.below(3) {
        0 => host::uplink_address(i, 60, ipv6),
        1 => host::inner_address(70, true, true, ipv6),
        _ => host::service(ipv6),
    };
    let own = source == host::service(ipv6);
    let inside = dice.one_in(3);
    By::Forwarded {
        device: match own || inside {
            true => INNER.into(),
            false => host.uplinks[i].name.clone(),
        },
        source: match own {
            true => host::inner_address(21, true, false, ipv6),
            false => source,
        },
    }
}

/// Whether it is bound to an ipvlan device without that one's own address: its route may give it another one, and what
/// comes for that is not handed to the ipvlan device, which takes packets by address.
fn is_unanswered(host: &Host, socket: &OwnSocket, ipv6: bool) -> bool {
    let Some(device) = &socket.device else {
        return false;
    };
    let uplinks = host.uplinks.iter().enumerate();
    let mut ipvlans = uplinks.filter(|(_, u)| u.made == Made::Ipvlan && u.name == *device);
    ipvlans.any(|(i, _)| socket.address != Some(host::uplink_address(i, 1, ipv6)))
}

fn socket(dice: &mut Dice, host: &Host, ipv6: bool) -> By {
    let i = dice.below(host.uplinks.len());
    let translated = host.has(Kind::Adopt) && host.has(Kind::Nat);
    let address = match dice.below(6) {
        0 => Some(host::service(ipv6)),
        1 if !translated || host.has(Kind::TranslatedSockets) => {
            Some(host::uplink_address(i, 1, ipv6))
        }
        _ => None,
    };
    let name = match host.has_tun() && dice.one_in(3) {
        true => TUN.to_owned(),
        false => host.uplinks[i].name.clone(),
    };
    let connected = dice.one_in(2);
    let by_packet = !connected && dice.one_in(4) && host.has(Kind::PacketInfo);
    // Over nexthop objects, IPv6 takes another device than the socket's now and then.
    let by_any = ipv6 && host.has_objects();
    let mut own = OwnSocket {
        address,
        // Else its outcome is not known enough to be held against others.
        port: address.is_some() || by_packet || dice.one_in(2),
        device: (dice.one_in(8) && !by_any).then(|| name.clone()),
        user: if dice.one_in(5) { USER } else { 0 },
        connected,
        pktinfo: by_packet.then(|| name.clone()),
        unicast: None,
    };
    if host.has(Kind::LocalRange) && dice.one_in(3) {
        own.address = Some(host::range_address(1 + dice.below(3) as u16, ipv6));
        own.port = true;
    }
    if host.has(Kind::UnicastIf) && !by_any && !by_packet && dice.one_in(3) {
        own.device = None;
        own.unicast = Some(name);
        own.port = true;
    }
    By::Socket(own)
}

/// The bytes behind the IP header, without a checksum for echo requests of IPv4's pseudo header.
fn transport(flow: &Flow, source: IpAddr, first: bool, sequence: u32) -> (u8, Vec<u8>) {
    let payload = payload(flow.id, flow.length);
    let (sport, dport) = (flow.sport, flow.to.port());
    let (proto, mut bytes) = match flow.proto {
        UDP => {
            let header = UdpHeader {
                source_port: sport,
                destination_port: dport,
                length: (8 + payload.len()) as u16,
                checksum: 0,
            };
            (UDP, [&header.to_bytes()[..], &payload].concat())
        }
        TCP => {
            let mut header = TcpHeader::new(sport, dport, sequence, 0x4000);
            (header.syn, header.ack) = (first, !first);
            header.acknowledgment_number = if first { 0 } else { 1001 };
            let options = if first { [2, 4, 5, 180] } else { [1; 4] };
            header.set_options_raw(&options).unwrap();
            let payload = if first { &[][..] } else { &payload };
            (TCP, [&header.to_bytes()[..], payload].concat())
        }
        _ => {
            let (proto, kind) = [(ICMP, 8), (ICMPV6, 128)][usize::from(flow.ipv6())];
            let id = (ECHO_ID + flow.id).to_be_bytes();
            let header = [kind, 0, 0, 0, id[0], id[1], 0, 1];
            (proto, [&header, &payload[..]].concat())
        }
    };
    put_check(source, flow.to.ip(), proto, &mut bytes);
    (proto, bytes)
}

pub fn payload(id: u16, length: usize) -> Vec<u8> {
    let word = [MAGIC.to_be_bytes(), id.to_be_bytes()].concat();
    word.iter().copied().cycle().take(length / 4 * 4).collect()
}

/// An echo request as a socket of type RAW wants it; the kernel fills in ICMPv6's checksum.
pub fn echo(flow: &Flow) -> Vec<u8> {
    transport(flow, host::unspecified(flow.ipv6()), true, 0).1
}

/// A flow's packet as IP packets of at most `mtu` bytes.
pub fn packets(flow: &Flow, mtu: usize, first: bool, sequence: u32) -> Vec<Vec<u8>> {
    let source = flow.source().expect("what is injected has one");
    let (proto, bytes) = transport(flow, source, first, sequence);
    let header = if flow.ipv6() { 40 } else { 20 };
    if header + bytes.len() <= mtu {
        return vec![ip(flow, source, proto, &bytes, None)];
    }
    let part = (mtu - header - 8) / 8 * 8;
    let parts = bytes.chunks(part).zip((0..).step_by(part));
    let packet = |(chunk, at): (&[u8], usize)| {
        let more = at + part < bytes.len();
        ip(flow, source, proto, chunk, Some((at as u16, more)))
    };
    parts.map(packet).collect()
}

fn ip(flow: &Flow, source: IpAddr, proto: u8, l4: &[u8], part: Option<(u16, bool)>) -> Vec<u8> {
    let whole = Ip::between(source, flow.to.ip(), proto, l4.to_vec());
    let whole = whole.with(|ip| (ip.dsfield, ip.id) = (flow.tos, flow.id));
    match part {
        Some((at, more)) => whole.part(at, more, flow.id).l3(),
        None => whole.l3(),
    }
}

/// How a packet looks where it leaves, without what differs from packet to packet by itself.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Look {
    pub source: IpAddr,
    /// 0 where the kernel chooses one each time.
    pub sport: u16,
    pub to: IpAddr,
    pub proto: u8,
    /// Of ICMP.
    pub kind: Option<(u8, u8)>,
    pub tos: u8,
    pub hops: u8,
    /// Offset of a fragment, and whether more follow.
    pub part: Option<(u16, bool)>,
    /// What a SYN says.
    pub mss: Option<u16>,
    /// Whether it is what a forwarded packet was answered.
    pub is_answer: bool,
    /// How many the same have left with it, before it.
    pub copies: u8,
}

impl Look {
    fn new(source: IpAddr, to: IpAddr, proto: u8, tos: u8, hops: u8) -> Self {
        Self {
            source,
            sport: 0,
            to,
            proto,
            kind: None,
            tos,
            hops,
            part: None,
            mss: None,
            is_answer: false,
            copies: 0,
        }
    }
}

/// An IP packet taken apart.
pub struct Parsed<'a> {
    pub look: Look,
    pub l4: &'a [u8],
    /// The flow, if it is one of ours.
    pub flow: Option<u16>,
}

fn word(bytes: &[u8], at: usize) -> u16 {
    match bytes.get(at..at + 2) {
        Some(b) => u16::from_be_bytes([b[0], b[1]]),
        None => 0,
    }
}

pub fn parse(packet: &[u8]) -> Option<Parsed<'_>> {
    let (mut look, l4) = match packet.first()? >> 4 {
        4 if packet.len() >= 20 => {
            let header = usize::from(packet[0] & 15) * 4;
            let part = word(packet, 6) & 0x3fff;
            let end = packet.len().min(word(packet, 2).into());
            let address = |at: usize| IpAddr::from(*packet[at..].first_chunk::<4>().unwrap());
            let look = Look {
                part: (part > 0).then_some(((part & 0x1fff) * 8, part & 0x2000 > 0)),
                ..Look::new(address(12), address(16), packet[9], packet[1], packet[8])
            };
            (look, packet.get(header..end)?)
        }
        6 if packet.len() >= 40 => {
            let address = |at: usize| IpAddr::from(*packet[at..].first_chunk::<16>().unwrap());
            let tos = (word(packet, 0) >> 4) as u8;
            let mut look = Look::new(address(8), address(24), packet[6], tos, packet[7]);
            let mut l4 = packet.get(40..)?;
            if look.proto == FRAGMENT {
                let part = word(l4, 2);
                look.part = Some((part & 0xfff8, part & 1 > 0));
                look.proto = *l4.first()?;
                l4 = l4.get(8..)?;
            }
            (look, l4)
        }
        _ => return None,
    };
    let first = look.part.is_none_or(|(offset, _)| offset == 0);
    let marked = || (word(l4, 0) == MAGIC).then(|| word(l4, 2));
    let flow = match look.proto {
        _ if !first => marked(),
        UDP | TCP => {
            if look.proto == TCP {
                let tcp = TcpSlice::from_slice(l4).ok()?;
                // A reset is an answer that nobody asked for.
                if tcp.rst() {
                    return None;
                }
                look.mss = tcp.options_iterator().flatten().find_map(|o| match o {
                    TcpOptionElement::MaximumSegmentSize(mss) if tcp.syn() => Some(mss),
                    _ => None,
                });
            }
            look.sport = word(l4, 0);
            let served = 1000..1000 * (1 + CLASSES as u16);
            let number = |port: u16| served.contains(&port).then_some(port % 1000);
            let (sent, answered) = (number(word(l4, 2)), number(look.sport));
            look.is_answer = sent.is_none() && answered.is_some();
            sent.or(answered)
        }
        // Not encrypted: behind the index and the sequence number is the packet itself.
        ESP => parse(l4.get(8..)?)?.flow,
        ICMP | ICMPV6 => {
            let kind = *l4.first()?;
            look.kind = Some((kind, *l4.get(1)?));
            // The kernel limits its errors by more than a namespace can set: they are not compared.
            let echo = [8, 0, 128, 129].contains(&kind) && word(l4, 8) == MAGIC;
            echo.then(|| word(l4, 4) & 0xfff)
        }
        _ => None,
    };
    Some(Parsed { look, l4, flow })
}
