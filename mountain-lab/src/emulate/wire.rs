// SPDX-License-Identifier: GPL-2.0-or-later
//! veth pairs between the lab's hosts, which nobody else makes, and frames for them.

use std::net::{Ipv4Addr, SocketAddrV4};

use anyhow::Result;
use etherparse::PacketBuilder;

use super::netns::{ip, Netns};
use super::Port;

/// An end of a veth pair: host, device, link-layer address.
pub type End<'a> = (&'a Netns, &'a str, [u8; 6]);

/// A veth pair, up.
pub fn veth(a: End, b: End) -> Result<()> {
    let [near, far] = [a, b].map(|(ns, device, mac)| {
        let (mac, ns) = (mac_text(mac), ns.name());
        format!("{device} address {mac} netns {ns}")
    });
    ip(&format!("link add {near} type veth peer name {far}"))?;
    for (ns, device, _) in [a, b] {
        ns.ip(&format!("link set {device} up"))?;
    }
    Ok(())
}

/// A veth pair with every offload off: the emulator reads frames from an AF_PACKET socket, where GSO
/// packets and unfinished checksums would come through as such.
pub fn plain_veth(a: End, b: End) -> Result<()> {
    veth(a, b)?;
    for (ns, device, _) in [a, b] {
        let off = ["tx", "rx", "sg", "tso", "gso", "gro"].map(|what| [what, "off"]);
        ns.run("ethtool", ["-K", device].into_iter().chain(off.concat()))?;
    }
    Ok(())
}

/// Joins a device of a host to the emulator, whose end is named after it and has this link-layer address.
pub fn to_emulator(emulator: &Netns, host: End, mac: [u8; 6]) -> Result<Port> {
    let (_, device, peer_mac) = host;
    let device = format!("e{device}");
    plain_veth(host, (emulator, &device, mac))?;
    Ok(Port {
        device,
        mac,
        peer_mac,
    })
}

/// A veth pair with an address of one /24 at each end: host, device, address. Neighbours are permanent, so
/// that nothing but the measured traffic is on the wire.
pub fn lan(a: (&Netns, &str, Ipv4Addr), b: (&Netns, &str, Ipv4Addr)) -> Result<()> {
    let [near, far] = [a, b].map(|(ns, device, own)| (ns, device, mac_of(own)));
    veth(near, far)?;
    addresses(a, b)
}

/// The addresses of a [`lan`], where the devices are there and have [`mac_of`] theirs.
pub fn addresses(a: (&Netns, &str, Ipv4Addr), b: (&Netns, &str, Ipv4Addr)) -> Result<()> {
    for ((ns, device, own), (_, _, other)) in [(a, b), (b, a)] {
        let mac = mac_text(mac_of(other));
        ns.ip(&format!("addr add {own}/24 dev {device}"))?;
        ns.ip(&format!("neigh replace {other} lladdr {mac} dev {device}"))?;
    }
    Ok(())
}

/// Link-layer address of the end of a [`lan`] with this address.
pub fn mac_of(addr: Ipv4Addr) -> [u8; 6] {
    let [a, b, c, d] = addr.octets();
    [0x02, 0x4d, a, b, c, d]
}

/// A frame with a UDP packet of zeros from the one end of a [`lan`] to the other, as the kernel would make it.
pub fn udp_frame(
    ends: [Ipv4Addr; 2],
    from: SocketAddrV4,
    to: SocketAddrV4,
    payload: usize,
) -> Vec<u8> {
    let [near, far] = ends.map(mac_of);
    let builder = PacketBuilder::ethernet2(near, far)
        .ipv4(from.ip().octets(), to.ip().octets(), 64)
        .udp(from.port(), to.port());
    let mut frame = Vec::new();
    let written = builder.write(&mut frame, &vec![0; payload]);
    written.expect("a packet of one family, into memory");
    frame
}

pub fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|b| format!("{b:02x}")).join(":")
}
