// SPDX-License-Identifier: GPL-2.0-or-later
//! One packet each way through a rule that has just been installed, before it counts as added.
//!
//! The packets go through the programs as they are attached, with the rules, routes and neighbours
//! of now, by BPF_PROG_RUN: nothing is sent, so no target sees a packet from nobody. What comes out
//! must be, byte by byte, what etherparse makes of the addresses that it must have.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{bail, ensure, Context, Result};
use etherparse::{PacketBuilder, SlicedPacket, TransportSlice};
use libbpf_rs::MapCore;

use super::super::{Installed, Proto};
use super::hooks::{self, DeviceHook};
use super::{bytes_of, types, words, AttachedProgram, LoadedObject, Prog, FLOWS};
use crate::netlink::{route_to, RouteTo};

/// Addresses that are nobody's (RFC 5737, RFC 3849). The second where the first is this host's nevertheless.
const NOBODY4: [Ipv4Addr; 2] = [Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(198, 51, 100, 1)];
const NOBODY6: [Ipv6Addr; 2] = [
    Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1),
    Ipv6Addr::new(0x2001, 0xdb8, 0xffff, 0, 0, 0, 0, 1),
];
/// Discard (RFC 863): no client has it.
const CLIENT_PORT: u16 = 9;
const STRANGER: [u8; 6] = [2, 0, 0, 0, 0, 1];
const PAYLOAD: &[u8] = b"mountain";

/// # Errors
/// When a packet is not rewritten, or not as it must be.
pub fn verify(
    loaded: &LoadedObject,
    there: &[AttachedProgram],
    installed: &Installed,
    value: &types::mtn_rd_rule,
) -> Result<()> {
    let Installed { rule, plan, .. } = installed;
    let client_dev = super::client_of(plan)?;
    let (client, answered) = client(rule.from.ip(), client_dev.ifindex);
    let mut ways = Vec::new();
    if let Some(device) = &plan.target_dev {
        ways.extend([(DeviceHook::Xdp, device), (DeviceHook::TcxIngress, device)]);
    }
    ways.push((DeviceHook::TcxEgress, client_dev));

    let mut new_src = client;
    let result = (|| {
        let packet = build(
            rule.proto,
            client,
            rule.from,
            value.client_mac,
            STRANGER,
            64,
        );
        let hooks = [
            (DeviceHook::Xdp, client_dev),
            (DeviceHook::TcxIngress, client_dev),
        ];
        let out = run(there, &hooks, &packet)?;
        new_src = source(&out)?;
        let src_ip = plan.snat.unwrap_or(client.ip());
        ensure!(
            new_src.ip() == src_ip && (plan.snat.is_some() || new_src == client),
            "its source became {new_src}"
        );
        expect(rule.proto, &out, new_src, rule.to).context("on its way to the target")?;

        if !answered {
            return Ok(());
        }
        // What the target would answer; the host itself answers by the client's device.
        let to = match &plan.target_dev {
            Some(_) => value.target_mac,
            None => STRANGER,
        };
        let packet = build(rule.proto, rule.to, new_src, to, STRANGER, 64);
        let out = run(there, &ways, &packet).context("on its way back")?;
        expect(rule.proto, &out, rule.from, client).context("on its way back")
    })();
    forget(loaded, rule.proto, client, rule.from);
    forget(loaded, rule.proto, rule.to, new_src);
    result.with_context(|| {
        format!(
            "a test packet was not redirected as it should be by {} ({rule})",
            plan.backend
        )
    })
}

/// Who the packets are from, and whether this host would send to there by the device that clients
/// come in by, as replies need it: a neighbour of the address that they send to, or nobody.
fn client(from: IpAddr, device: u32) -> (SocketAddr, bool) {
    let (near, nobody): (IpAddr, [IpAddr; 2]) = match from {
        IpAddr::V4(a) => (
            Ipv4Addr::from_bits(a.to_bits() ^ 1).into(),
            NOBODY4.map(IpAddr::from),
        ),
        IpAddr::V6(a) => (
            Ipv6Addr::from_bits(a.to_bits() ^ 1).into(),
            NOBODY6.map(IpAddr::from),
        ),
    };
    // Nothing is redirected from an address of this host.
    let is_own = |ip: IpAddr| matches!(route_to(ip), Ok(RouteTo::Host));
    let nobody = nobody[usize::from(is_own(nobody[0]))];
    let goes_there = |ip: &IpAddr| {
        let route = route_to(*ip);
        matches!(route, Ok(RouteTo::Out { first, default: false, .. }) if first.ifindex == device)
    };
    let found = [near, nobody].into_iter().find(goes_there);
    let client = SocketAddr::new(found.unwrap_or(nobody), CLIENT_PORT);
    (client, found.is_some())
}

/// The packet after the first program that changes it.
fn run(
    there: &[AttachedProgram],
    hooks: &[(DeviceHook, &super::RuleDevice)],
    packet: &[u8],
) -> Result<Vec<u8>> {
    for (hook, device) in hooks {
        let at = |a: &&AttachedProgram| a.ifindex == device.ifindex && a.prog.hook() == *hook;
        let Some(attached) = there.iter().filter(|a| a.prog != Prog::Icmp).find(at) else {
            continue;
        };
        let out = hooks::run(*hook, device.ifindex, &attached.program.fd, packet, 1)
            .with_context(|| format!("cannot try the program at {hook:?} of {}", device.name))?;
        if out.packet != packet {
            return Ok(out.packet);
        }
    }
    bail!("no program rewrote it")
}

fn build(
    proto: Proto,
    src: SocketAddr,
    dst: SocketAddr,
    to_mac: [u8; 6],
    from_mac: [u8; 6],
    ttl: u8,
) -> Vec<u8> {
    let builder = PacketBuilder::ethernet2(from_mac, to_mac);
    let builder = match (src.ip(), dst.ip()) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => builder.ipv4(src.octets(), dst.octets(), ttl),
        (IpAddr::V6(src), IpAddr::V6(dst)) => builder.ipv6(src.octets(), dst.octets(), ttl),
        _ => unreachable!("both ends of a rule are of one family"),
    };
    let mut packet = Vec::new();
    match proto {
        Proto::Udp => builder
            .udp(src.port(), dst.port())
            .write(&mut packet, PAYLOAD),
        Proto::Tcp => builder
            .tcp(src.port(), dst.port(), 1, 1024)
            .syn()
            .write(&mut packet, PAYLOAD),
    }
    .expect("a short packet of one family, into memory");
    packet
}

fn source(packet: &[u8]) -> Result<SocketAddr> {
    let parsed = SlicedPacket::from_ethernet(packet).context("what came out is no packet")?;
    let ip = match &parsed.net {
        Some(etherparse::NetSlice::Ipv4(ip)) => IpAddr::from(ip.header().source()),
        Some(etherparse::NetSlice::Ipv6(ip)) => IpAddr::from(ip.header().source()),
        _ => bail!("what came out is no IP packet"),
    };
    let port = match &parsed.transport {
        Some(TransportSlice::Udp(udp)) => udp.source_port(),
        Some(TransportSlice::Tcp(tcp)) => tcp.source_port(),
        _ => bail!("what came out is another protocol"),
    };
    Ok(SocketAddr::new(ip, port))
}

/// Everything but link-layer addresses and lifetime, which depend on the way, must be as made anew.
fn expect(proto: Proto, out: &[u8], src: SocketAddr, dst: SocketAddr) -> Result<()> {
    let mac = |at: usize| -> [u8; 6] { out[at..at + 6].try_into().expect("6 bytes") };
    ensure!(out.len() > 14 + 22, "it was cut off");
    let ttl = out[if src.is_ipv6() { 14 + 7 } else { 14 + 8 }];
    ensure!(ttl == 64 || ttl == 63, "its lifetime became {ttl}");
    let want = build(proto, src, dst, mac(0), mac(6), ttl);
    ensure!(
        out == want,
        "it should be from {src} to {dst}, with right checksums: {want:02x?}, and is {out:02x?}"
    );
    Ok(())
}

fn forget(loaded: &LoadedObject, proto: Proto, src: SocketAddr, dst: SocketAddr) {
    let (saddr, daddr) = (words(src.ip()), words(dst.ip()));
    let (sport, dport) = (src.port().to_be(), dst.port().to_be());
    let key4 = types::mtn_rd_key4 {
        saddr: saddr[0],
        daddr: daddr[0],
        sport,
        dport,
        proto: proto.number(),
        ..Default::default()
    };
    let key6 = types::mtn_rd_key6 {
        saddr,
        daddr,
        sport,
        dport,
        proto: proto.number(),
        ..Default::default()
    };
    let (tables, key) = match src.is_ipv6() {
        false => (FLOWS[0], bytes_of(&key4)),
        true => (FLOWS[1], bytes_of(&key6)),
    };
    for table in tables {
        // Not there when the test failed early.
        let _ = loaded.map(table).map(|map| map.delete(key));
    }
}
