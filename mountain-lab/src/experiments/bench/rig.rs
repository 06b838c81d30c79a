// SPDX-License-Identifier: GPL-2.0-or-later
//! Two hosts joined by two veth pairs, and the steering program set up by hand.
//!
//! The client's route to the service address leads over path 0 only. Whether packets stay or are
//! moved to path 1 is therefore up to the program alone.

use std::net::{IpAddr, Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsFd, OwnedFd};

use anyhow::{ensure, Result};
use mountain::bpf::{
    PathMasks as Masks, ProgramGroup, ProgramPath, Settings, Sources, Steer, SteerMode,
};
use mountain::steer::rendezvous::{inv_weight, path_salt};
use mountain_lab::workload::sys::device_index;

use super::kernel::{attach, Constant, Runs, DROP, PASS};
use crate::emulate::netns::Netns;
use crate::emulate::wire::{lan, mac_of, udp_frame};

/// Service addresses, on `lo` of each host, so that flows may take any path.
pub const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 77, 100, 1);
pub const SERVER: Ipv4Addr = Ipv4Addr::new(10, 77, 200, 1);

pub struct SteeredRig {
    pub client: Netns,
    pub server: Netns,
}

/// The programs on the uplinks, and their settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Setup {
    Nothing,
    /// A program of two instructions: what statistics, and a hook in use, cost by themselves.
    Empty,
    /// The program counts, and never moves.
    Ecmp,
    /// All flows stay on the path they are on.
    Stay,
    /// As [`Setup::Moved`], the program on the first device only: the first of a moved packet's two runs.
    FirstRun,
    /// All flows go to the other path.
    Moved,
    /// Either path, by hash.
    Both,
}

impl Setup {
    /// What it is called in the result.
    pub fn policy(self) -> &'static str {
        match self {
            Self::Nothing => "none",
            Self::Empty => "empty program",
            Self::Ecmp => "ecmp",
            Self::Stay => "stay",
            Self::FirstRun | Self::Moved => "moved",
            Self::Both => "both",
        }
    }

    /// The path by which packets arrive.
    pub fn path(self) -> usize {
        usize::from(matches!(self, Self::FirstRun | Self::Moved))
    }
}

/// Address of a path's end: 1 the client's, 2 the server's.
fn address(path: usize, end: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, path as u8, end)
}

impl SteeredRig {
    pub fn build() -> Result<Self> {
        let client = Netns::create("client")?;
        let server = Netns::create("server")?;
        for path in 0..2 {
            let [near, far] = [1, 2].map(|end| address(path, end));
            lan(
                (&client, &format!("u{path}"), near),
                (&server, &format!("s{path}"), far),
            )?;
        }
        for (ns, own, far, via, dev) in [
            (&client, CLIENT, SERVER, address(0, 2), "u0"),
            (&server, SERVER, CLIENT, address(0, 1), "s0"),
        ] {
            ns.ip(&format!("addr add {own} dev lo"))?;
            ns.ip(&format!("route add {far} via {via} dev {dev} src {own}"))?;
        }
        Ok(SteeredRig { client, server })
    }
}

/// Packets that have come in by `s0` and `s1` of a namespace.
pub fn arrived(ns: &Netns) -> Result<[u64; 2]> {
    Ok([ns.received("s0")?, ns.received("s1")?])
}

/// Drops everything that comes in by `s0` and `s1` of a namespace, before its network layer, until dropped.
pub fn sink(ns: &Netns) -> Result<Vec<OwnedFd>> {
    let (drop, point) = (Constant::load(DROP)?, libbpf_sys::BPF_TCX_INGRESS);
    let attach = |dev: &&str| attach(drop.as_fd(), device_index(dev), point, 0);
    ns.enter(|| ["s0", "s1"].iter().map(attach).collect())
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

/// The uplinks with what is attached to them.
pub struct Uplinks {
    devices: [u32; 2],
    steer: Steer,
    empty: Constant,
    /// Of the empty program.
    links: Vec<OwnedFd>,
}

impl Uplinks {
    /// With nothing attached; call in the client's namespace.
    pub fn new() -> Result<Self> {
        Ok(Uplinks {
            devices: uplinks()?,
            steer: steer(65_536, true)?,
            empty: Constant::load(PASS)?,
            links: vec![],
        })
    }

    pub fn set_up(&mut self, setup: Setup) -> Result<()> {
        self.links.clear();
        let attached: &[u32] = match setup {
            Setup::Nothing | Setup::Empty => &[],
            Setup::FirstRun => &self.devices[..1],
            _ => &self.devices[..],
        };
        self.steer.attach_to(attached)?;
        if setup == Setup::Empty {
            for device in self.devices {
                let (empty, point) = (self.empty.as_fd(), libbpf_sys::BPF_TCX_EGRESS);
                self.links.push(attach(empty, device, point, 0)?);
            }
        }
        set(&mut self.steer, setup);
        Ok(())
    }

    /// Runs so far of the program that this has run.
    pub fn runs(&self, setup: Setup) -> Result<Runs> {
        Runs::of(match setup {
            Setup::Empty => self.empty.as_fd(),
            _ => self.steer.program().as_fd(),
        })
    }
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
                gateway: address(id, 2).into(),
                mac: Some(mac_of(address(id, 2))),
                ethernet: true,
                up: true,
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
            uplink_bound: vec![IpAddr::V4(address(0, 1))],
            movable: vec!["0.0.0.0/0".parse()?],
            own: Vec::new(),
        },
    )?;
    set(&mut steer, Setup::Ecmp);
    Ok(steer)
}

/// Tells the program where flows may go. What may not be used is ejected, so that flows of an
/// earlier verdict leave with their next packet.
pub fn set(steer: &mut Steer, setup: Setup) {
    let may = match setup {
        Setup::Stay => 0b01,
        Setup::FirstRun | Setup::Moved => 0b10,
        _ => 0b11,
    };
    steer.set_masks(
        0,
        Masks {
            latency: may,
            bulk: may,
            alive: 0b11,
            ejected: 0b11 & !may,
            ..Masks::default()
        },
    );
    let mode = match setup {
        Setup::Nothing | Setup::Empty | Setup::Ecmp => SteerMode::Pass,
        _ => SteerMode::Steer,
    };
    steer.set_mode(mode, 0);
}

/// A UDP packet as it leaves by path 0: Ethernet, IPv4, UDP, 18 bytes.
pub fn packet(port: u16) -> Vec<u8> {
    let [from, to] = [(CLIENT, port), (SERVER, 9)].map(|(ip, port)| SocketAddrV4::new(ip, port));
    udp_frame([address(0, 1), address(0, 2)], from, to, 18)
}

/// Gives a packet made by [`packet`] the source address and port of flow `i`, unique below 2^30. Its checksums
/// are wrong then: nobody on the way looks at them, and it never arrives anywhere.
pub fn become_flow(packet: &mut [u8], i: u32) {
    let source = u32::from(Ipv4Addr::new(10, 128, 0, 0)) + (i >> 15);
    packet[26..30].copy_from_slice(&source.to_be_bytes());
    packet[34..36].copy_from_slice(&(0x8000u16 | (i & 0x7fff) as u16).to_be_bytes());
}
