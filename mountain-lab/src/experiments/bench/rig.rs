// SPDX-License-Identifier: GPL-2.0-or-later
//! Two hosts joined by two veth pairs, and the steering program set up by hand.
//!
//! The client's route to the service address leads over path 0 only. Whether packets stay or are
//! moved to path 1 is therefore up to the program alone.

use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::OwnedFd;

use anyhow::{ensure, Context, Result};
use mountain::bpf::{
    PathMasks as Masks, ProgramGroup, ProgramPath, Settings, Sources, Steer, SteerMode,
};
use mountain::steer::rendezvous::{inv_weight, path_salt};
use mountain_lab::workload::sys::device_index;

use super::kernel::Constant;
use crate::emulate::netns::Netns;

/// Service addresses, on `lo` of each host, so that flows may take any path.
pub const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 77, 100, 1);
pub const SERVER: Ipv4Addr = Ipv4Addr::new(10, 77, 200, 1);

pub struct SteeredRig {
    pub client: Netns,
    pub server: Netns,
}

/// What the program is told about the two paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathVerdict {
    /// Count, never move.
    Ecmp,
    /// All flows on the path they are on.
    Stay,
    /// All flows on the other one.
    Moved,
    /// Either path, by hash.
    Both,
}

/// Link-layer address of a path's end: 0 the client's, 1 the server's.
fn mac(path: usize, end: u8) -> [u8; 6] {
    [2, 0, 0, 0, path as u8, end]
}

fn text(mac: [u8; 6]) -> String {
    mac.map(|b| format!("{b:02x}")).join(":")
}

impl SteeredRig {
    pub fn build() -> Result<Self> {
        let client = Netns::create("client")?;
        let server = Netns::create("server")?;
        for path in 0..2 {
            let (u, s) = (format!("u{path}"), format!("s{path}"));
            let server_ns = server.path().display().to_string();
            client.ip([
                "link",
                "add",
                &u,
                "address",
                &text(mac(path, 0)),
                "type",
                "veth",
                "peer",
                "name",
                &s,
                "address",
                &text(mac(path, 1)),
                "netns",
                &server_ns,
            ])?;
            for (ns, dev, end, other) in [(&client, &u, 1, 2), (&server, &s, 2, 1)] {
                ns.ip(["addr", "add", &format!("10.77.{path}.{end}/24"), "dev", dev])?;
                ns.ip(["link", "set", dev, "up"])?;
                // Permanent: nothing but the measured traffic on the wire.
                let lladdr = text(mac(path, other - 1));
                let gateway = format!("10.77.{path}.{other}");
                ns.ip(["neigh", "replace", &gateway, "lladdr", &lladdr, "dev", dev])?;
            }
        }
        for (ns, own, far, via, dev) in [
            (&client, CLIENT, SERVER, "10.77.0.2", "u0"),
            (&server, SERVER, CLIENT, "10.77.0.1", "s0"),
        ] {
            ns.ip(["addr", "add", &own.to_string(), "dev", "lo"])?;
            let (own, far) = (own.to_string(), far.to_string());
            ns.ip(["route", "add", &far, "via", via, "dev", dev, "src", &own])?;
            // Packets of path 1 arrive where the route back does not lead.
            ns.sysctl(&[("net/ipv4/conf/all/rp_filter", "0")])?;
        }
        server.sysctl(&[("net/ipv4/conf/s1/rp_filter", "0")])?;
        Ok(SteeredRig { client, server })
    }

    /// Packets that have arrived at the server by each path.
    pub fn arrived(&self) -> Result<[u64; 2]> {
        arrived(&self.server)
    }

    /// Drops everything that arrives at the server, before its network layer, until dropped.
    pub fn sink(&self, drop: &Constant) -> Result<Vec<OwnedFd>> {
        sink(&self.server, drop)
    }
}

/// Packets that have come in by `s0` and `s1` of a namespace.
pub fn arrived(ns: &Netns) -> Result<[u64; 2]> {
    ns.enter(|| {
        let table = std::fs::read_to_string("/proc/thread-self/net/dev")?;
        let packets = |dev: &str| -> Result<u64> {
            let line = table
                .lines()
                .find_map(|l| l.trim().strip_prefix(dev)?.strip_prefix(':'))
                .with_context(|| format!("no device {dev}"))?;
            Ok(line
                .split_whitespace()
                .nth(1)
                .context("no packet counter")?
                .parse()?)
        };
        Ok([packets("s0")?, packets("s1")?])
    })
}

/// Drops everything that comes in by `s0` and `s1` of a namespace until dropped.
pub fn sink(ns: &Netns, drop: &Constant) -> Result<Vec<OwnedFd>> {
    ns.enter(|| {
        ["s0", "s1"]
            .iter()
            .map(|dev| drop.at_ingress(device_index(dev)))
            .collect()
    })
}

/// Indices of `u0` and `u1`; call in the client's namespace.
pub fn uplinks() -> Result<[u32; 2]> {
    let found = [device_index("u0"), device_index("u1")];
    ensure!(
        found.iter().all(|i| *i > 0),
        "no u0 or u1 in this namespace"
    );
    Ok(found)
}

/// The program, loaded and told about both paths, attached to nothing. Call in the client's
/// namespace. `only_routed`: as for a host; false for packets made for BPF_PROG_RUN.
pub fn steer(flow_entries: u32, only_routed: bool) -> Result<Steer> {
    let mut steer = Steer::load(&Settings {
        only_routed,
        ..Settings::new(0x5eed, flow_entries)
    })?;
    for (id, ifindex) in uplinks()?.into_iter().enumerate() {
        steer.set_path(
            id,
            &ProgramPath {
                ifindex,
                mtu: 1500,
                ipv6: false,
                gateway: IpAddr::V4(Ipv4Addr::new(10, 77, id as u8, 2)),
                mac: Some(mac(id, 1)),
                ethernet: true,
                salt: path_salt(format!("u{id}").as_bytes()),
                cost_weight: 1,
            },
        )?;
    }
    let group = ProgramGroup {
        members: vec![(0, inv_weight(1)), (1, inv_weight(1))],
        prefixes: vec![format!("{SERVER}/32").parse()?],
    };
    steer.set_topology(
        &[group],
        &[],
        &[],
        &Sources {
            uplink_bound: vec![IpAddr::V4(Ipv4Addr::new(10, 77, 0, 1))],
            movable: vec!["0.0.0.0/0".parse()?],
        },
    )?;
    set(&mut steer, PathVerdict::Ecmp);
    Ok(steer)
}

/// Tells the program where flows may go. What may not be used is ejected, so that flows of an
/// earlier verdict leave with their next packet.
pub fn set(steer: &mut Steer, verdict: PathVerdict) {
    let may = match verdict {
        PathVerdict::Stay => 0b01,
        PathVerdict::Moved => 0b10,
        PathVerdict::Ecmp | PathVerdict::Both => 0b11,
    };
    steer.set_masks(
        0,
        Masks {
            latency: may,
            bulk: may,
            alive: 0b11,
            ejected: 0b11 & !may,
        },
    );
    steer.set_mode(
        if verdict == PathVerdict::Ecmp {
            SteerMode::Pass
        } else {
            SteerMode::Steer
        },
        0,
    );
}

/// A UDP packet as it leaves by path 0: Ethernet, IPv4, UDP, 18 bytes.
pub fn packet(source: Ipv4Addr, port: u16) -> Vec<u8> {
    let mut p = vec![];
    p.extend(mac(0, 1));
    p.extend(mac(0, 0));
    p.extend([8, 0]);
    // No checksums: nobody on the way looks at them, and the packet never arrives anywhere.
    p.extend([0x45, 0, 0, 46, 0, 0, 0x40, 0, 64, 17, 0, 0]);
    p.extend(source.octets());
    p.extend(SERVER.octets());
    p.extend(port.to_be_bytes());
    p.extend(9u16.to_be_bytes());
    p.extend([0, 26, 0, 0]);
    p.extend([0; 18]);
    p
}

/// Gives a packet made by [`packet`] the source address and port of flow `i`, unique below 2^30.
pub fn become_flow(packet: &mut [u8], i: u32) {
    let source = u32::from(Ipv4Addr::new(10, 128, 0, 0)) + (i >> 15);
    packet[26..30].copy_from_slice(&source.to_be_bytes());
    packet[34..36].copy_from_slice(&(0x8000u16 | (i & 0x7fff) as u16).to_be_bytes());
}
