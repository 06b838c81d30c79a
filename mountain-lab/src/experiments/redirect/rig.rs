// SPDX-License-Identifier: GPL-2.0-or-later
//! Client, router and server in a row, as in the classic comparison of redirections:
//!
//! ```text
//!   client                    router                       server
//!   10.0.8.18  mtc ──── mtr<n>  10.0.8.17
//!                               10.0.1.1  mtp<n> ──── mts<n>  10.0.1.2
//! ```
//!
//! The router's devices and the server's have names of their own, `<n>` from this process: their NAPI
//! threads are found by them. GRO is on everywhere, which gives every end of a veth NAPI whatever is
//! attached to it: so all that is compared takes its packets the same way. All else is as a veth is by
//! default; a backend that needs more has it done by `--fix`.

use std::net::{Ipv4Addr, SocketAddrV4};

use anyhow::{ensure, Context, Result};
use mountain_lab::workload::sys::device_index;

use crate::emulate::hosts::mac_text;
use crate::emulate::netns::{run, Netns};

pub const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 0, 8, 18);
/// Of the router, where clients are.
pub const ROUTER: Ipv4Addr = Ipv4Addr::new(10, 0, 8, 17);
/// Of the router, where the server is.
const ROUTER_FAR: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 1);
pub const SERVER: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 2);
/// Where clients send to, and where that goes.
pub const FROM: SocketAddrV4 = SocketAddrV4::new(ROUTER, 8080);
pub const TO: SocketAddrV4 = SocketAddrV4::new(SERVER, 8083);
/// First port of the client's.
pub const FIRST_PORT: u16 = 10_000;

/// Link-layer addresses in the order of the path: client, router's two, server.
const MACS: [[u8; 6]; 4] = [
    [2, 0x4d, 8, 0, 0, 18],
    [2, 0x4d, 8, 0, 0, 17],
    [2, 0x4d, 1, 0, 0, 1],
    [2, 0x4d, 1, 0, 0, 2],
];

pub struct RouterRig {
    pub client: Netns,
    pub router: Netns,
    pub server: Netns,
    /// The client's device.
    pub client_dev: &'static str,
    /// The router's, towards the client and towards the server.
    pub near: String,
    pub far: String,
    /// The server's.
    pub server_dev: String,
}

impl RouterRig {
    /// `tag` tells rigs of the same time apart.
    pub fn build(tag: &str) -> Result<Self> {
        let n = format!("{}{tag}", std::process::id());
        let rig = RouterRig {
            client: Netns::create("client")?,
            router: Netns::create("router")?,
            server: Netns::create("server")?,
            client_dev: "mtc",
            near: format!("mtr{n}"),
            far: format!("mtp{n}"),
            server_dev: format!("mts{n}"),
        };
        for ns in [&rig.client, &rig.router, &rig.server] {
            ns.sysctl(&[
                // Nothing but the measured traffic on the wire.
                ("net/ipv6/conf/all/disable_ipv6", "1"),
                ("net/ipv6/conf/default/disable_ipv6", "1"),
                ("net/ipv4/conf/all/rp_filter", "0"),
                ("net/ipv4/conf/default/rp_filter", "0"),
            ])?;
        }
        rig.router.sysctl(&[("net/ipv4/ip_forward", "1")])?;
        let joined = [
            (
                (&rig.client, rig.client_dev),
                (&rig.router, rig.near.as_str()),
            ),
            ((&rig.router, &rig.far), (&rig.server, &rig.server_dev)),
        ];
        for (i, ((a, dev_a), (b, dev_b))) in joined.into_iter().enumerate() {
            let macs = [MACS[i * 2], MACS[i * 2 + 1]].map(mac_text);
            let end =
                |dev, mac, ns: &Netns| [dev, "address", mac, "netns", ns.name()].map(str::to_owned);
            let mut add = vec!["link".to_owned(), "add".into()];
            add.extend(end(dev_a, &macs[0], a));
            add.extend(["type", "veth", "peer", "name"].map(str::to_owned));
            add.extend(end(dev_b, &macs[1], b));
            run("ip", add)?;
        }
        let ends = [
            (&rig.client, rig.client_dev, CLIENT, ROUTER, MACS[1]),
            (&rig.router, &rig.near, ROUTER, CLIENT, MACS[0]),
            (&rig.router, &rig.far, ROUTER_FAR, SERVER, MACS[3]),
            (&rig.server, &rig.server_dev, SERVER, ROUTER_FAR, MACS[2]),
        ];
        for (ns, dev, own, other, mac) in ends {
            ns.ip(["addr", "add", &format!("{own}/24"), "dev", dev])?;
            ns.ip(["link", "set", dev, "up"])?;
            let (other, mac) = (other.to_string(), mac_text(mac));
            ns.ip(["neigh", "replace", &other, "lladdr", &mac, "dev", dev])?;
            ns.run("ethtool", ["-K", dev, "gro", "on"])?;
        }
        let (near, far) = (ROUTER.to_string(), ROUTER_FAR.to_string());
        rig.client.ip(["route", "add", "default", "via", &near])?;
        rig.server.ip(["route", "add", "default", "via", &far])?;
        Ok(rig)
    }

    /// The devices with the host that each is in, along the path.
    fn devices(&self) -> [(&Netns, &str); 4] {
        [
            (&self.client, self.client_dev),
            (&self.router, &self.near),
            (&self.router, &self.far),
            (&self.server, &self.server_dev),
        ]
    }

    /// Gives every device NAPI threads, so that the router's work can be told from the others'.
    pub fn thread_napi(&self) -> Result<()> {
        for (ns, dev) in self.devices() {
            // sysfs shows the devices of the namespace it was mounted in: `ip netns exec` mounts it.
            // Without TSO every packet takes the way through NAPI: else those of the kernel's own do
            // not, but for devices with XDP.
            ns.run("ethtool", ["-K", dev, "tso", "off"])?;
            let mut write = format!("cd /sys/class/net/{dev} && echo 1 > threaded");
            if dev == self.server_dev {
                // The server looks for packets every 50 µs (10 ms more after the last one), as behind a
                // card that holds its interrupts back: or waking it up, packet by packet, would be a
                // large part of the router's work.
                write += " && echo 50000 > gro_flush_timeout && echo 200 > napi_defer_hard_irqs";
            }
            run("ip", ["netns", "exec", ns.name(), "sh", "-c", &write])?;
        }
        Ok(())
    }

    /// Packets that the router has taken in from the client's side.
    pub fn taken(&self) -> Result<u64> {
        self.router.enter(|| {
            let table = std::fs::read_to_string("/proc/thread-self/net/dev")?;
            let line = table
                .lines()
                .find_map(|l| l.trim().strip_prefix(&self.near)?.strip_prefix(':'))
                .with_context(|| format!("no device {}", self.near))?;
            let packets = line.split_whitespace().nth(1);
            Ok(packets.context("no packet counter")?.parse()?)
        })
    }

    /// Index of a device in a host.
    pub fn index(&self, ns: &Netns, dev: &str) -> Result<u32> {
        let index = ns.enter(|| Ok(device_index(dev)))?;
        ensure!(index > 0, "no device {dev} in {}", ns.name());
        Ok(index)
    }

    /// Ethernet, IPv4 and UDP headers of a packet of the client to `to`, checksums and all, for a
    /// payload of zeros.
    pub fn headers(&self, from_port: u16, to: SocketAddrV4, payload: usize) -> [u8; 42] {
        let mut h = [0; 42];
        h[..6].copy_from_slice(&MACS[1]);
        h[6..12].copy_from_slice(&MACS[0]);
        h[12..14].copy_from_slice(&[8, 0]);
        let (udp_len, ip_len) = (payload as u16 + 8, payload as u16 + 28);
        h[14] = 0x45;
        h[16..18].copy_from_slice(&ip_len.to_be_bytes());
        h[20] = 0x40; // don't fragment
        h[22..24].copy_from_slice(&[64, 17]);
        h[26..30].copy_from_slice(&CLIENT.octets());
        h[30..34].copy_from_slice(&to.ip().octets());
        let sum = !folded(&h[14..34], 0);
        h[24..26].copy_from_slice(&sum.to_be_bytes());
        h[34..36].copy_from_slice(&from_port.to_be_bytes());
        h[36..38].copy_from_slice(&to.port().to_be_bytes());
        h[38..40].copy_from_slice(&udp_len.to_be_bytes());
        // Pseudo-header: addresses, protocol, length.
        let pseudo = u32::from(folded(&h[26..34], 17)) + u32::from(udp_len);
        let sum = match !folded(&h[34..42], pseudo) {
            0 => 0xffff,
            sum => sum,
        };
        h[40..42].copy_from_slice(&sum.to_be_bytes());
        h
    }

    /// Destination and source addresses of a frame from the router to the server.
    pub fn to_server(&self) -> [u8; 12] {
        let mut both = [0; 12];
        both[..6].copy_from_slice(&MACS[3]);
        both[6..].copy_from_slice(&MACS[2]);
        both
    }
}

/// The Internet checksum (RFC 1071) of big-endian words, not inverted.
fn folded(bytes: &[u8], start: u32) -> u16 {
    let mut sum = start;
    for pair in bytes.chunks(2) {
        sum += u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |b| u32::from(*b));
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}
