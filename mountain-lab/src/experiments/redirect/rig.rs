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

use anyhow::Result;

use crate::emulate::netns::{run, Netns};
use crate::emulate::wire::{lan, mac_of, udp_frame};

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
            ])?;
        }
        rig.router.sysctl(&[("net/ipv4/ip_forward", "1")])?;
        let RouterRig { client, server, .. } = &rig;
        let (near, far) = (&rig.near, &rig.far);
        lan(
            (client, rig.client_dev, CLIENT),
            (&rig.router, near, ROUTER),
        )?;
        lan(
            (&rig.router, far, ROUTER_FAR),
            (server, &rig.server_dev, SERVER),
        )?;
        for (ns, dev) in rig.devices() {
            ns.run("ethtool", ["-K", dev, "gro", "on"])?;
        }
        client.ip(&format!("route add default via {ROUTER}"))?;
        server.ip(&format!("route add default via {ROUTER_FAR}"))?;
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
        self.router.received(&self.near)
    }

    /// Ethernet, IPv4 and UDP headers of a packet of the client to `to`, checksums and all, for a
    /// payload of zeros.
    pub fn headers(&self, from_port: u16, to: SocketAddrV4, payload: usize) -> [u8; 42] {
        let from = SocketAddrV4::new(CLIENT, from_port);
        let frame = udp_frame([CLIENT, ROUTER], from, to, payload);
        frame[..42].try_into().expect("42 bytes of headers")
    }

    /// Destination and source addresses of a frame from the router to the server.
    pub fn to_server(&self) -> [u8; 12] {
        let mut both = [0; 12];
        both[..6].copy_from_slice(&mac_of(SERVER));
        both[6..].copy_from_slice(&mac_of(ROUTER_FAR));
        both
    }
}
