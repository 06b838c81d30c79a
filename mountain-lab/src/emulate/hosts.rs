// SPDX-License-Identifier: GPL-2.0-or-later
//! The lab's hosts: client (or a router before it), server, and the emulator between them, joined
//! by veth pairs. Every device, address and route of an experiment is made here.
//!
//! ```text
//!            u0 ── eu0 │ emulator │ es0 ── s0
//!   client   u1 ── eu1 │  cells   │ es1 ── s1   server
//!            uref ─ euref          esref ─ sref
//! ```
//!
//! Hosts are addressed by a service address on `lo`, so that any path can carry any flow; but a client with
//! two providers by that of its path, or as a router translates it.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::Result;
use mountain::measure::ping::{self, Pinger};

use super::netns::Netns;
use super::wire::{mac_text, plain_veth, to_emulator};
use super::LinkConfig;
use crate::scenario::{IpFamily, NetworkLayout, Replies, Scenario};

/// Name, in device names, of the idle path on which the emulator's own error is measured.
pub const REFERENCE: &str = "ref";
/// Table of the server's routes that answer on path i: `REPLY_TABLE + i`.
const REPLY_TABLE: usize = 100;

/// All hosts of one experiment. Dropping it removes them.
pub struct Hosts {
    pub client: Netns,
    pub server: Netns,
    pub emulator: Netns,
    pub router: Option<Netns>,
    /// Host of the foreign load, which shares a path but not the client.
    pub foreign: Option<Netns>,
    /// What the emulator has to join, in path order, the reference path last.
    pub links: Vec<LinkConfig>,
    family: IpFamily,
    topology: NetworkLayout,
    paths: usize,
}

/// Which end of a path an address belongs to.
#[derive(Clone, Copy)]
enum End {
    Client = 1,
    Server = 2,
    Foreign = 3,
}

impl Hosts {
    /// Makes the hosts that a scenario asks for.
    pub fn build(scenario: &Scenario) -> Result<Self> {
        let made = |needed: bool, role| needed.then(|| Netns::create(role)).transpose();
        let mut hosts = Hosts {
            client: Netns::create("client")?,
            server: Netns::create("server")?,
            emulator: Netns::create("emulator")?,
            router: made(scenario.topology.has_router(), "router")?,
            foreign: made(scenario.foreign_path().is_some(), "foreign")?,
            links: vec![],
            family: scenario.family,
            topology: scenario.topology,
            paths: scenario.paths.len(),
        };
        for ns in hosts.all() {
            ns.sysctl(&[
                ("net/ipv4/fib_multipath_hash_policy", "1"),
                ("net/ipv6/fib_multipath_hash_policy", "1"),
                // Addresses are usable at once; nobody may announce routes.
                ("net/ipv6/conf/default/accept_dad", "0"),
                ("net/ipv6/conf/all/accept_dad", "0"),
                ("net/ipv6/conf/default/accept_ra", "0"),
            ])?;
        }
        // The emulator only copies frames. Its own stack must not take part.
        hosts
            .emulator
            .sysctl(&[("net/ipv6/conf/default/disable_ipv6", "1")])?;
        for i in 0..hosts.paths {
            hosts.add_path(i, &i.to_string())?;
        }
        hosts.add_path(hosts.paths, REFERENCE)?;
        if let Some(path) = scenario.foreign_path() {
            hosts.add_foreign(path)?;
        }
        hosts.add_routes(scenario)?;
        hosts.limit_echoes(scenario)?;
        Ok(hosts)
    }

    fn all(&self) -> impl Iterator<Item = &Netns> {
        [&self.client, &self.server, &self.emulator]
            .into_iter()
            .chain(&self.router)
            .chain(&self.foreign)
    }

    /// The host that chooses among the paths: where the product runs.
    pub fn steering(&self) -> &Netns {
        self.router.as_ref().unwrap_or(&self.client)
    }

    /// Service address of the client, which its flows are bound to.
    pub fn client_addr(&self) -> IpAddr {
        self.pick("10.99.0.1", "fd99::1")
    }

    /// What the client's flows are bound to: nothing, where their address is that of their path.
    pub fn flow_addr(&self) -> IpAddr {
        match self.topology.has_own_addresses() {
            true => self.pick("0.0.0.0", "::"),
            false => self.client_addr(),
        }
    }

    /// Service address of the server, which is not private: what goes there may choose its uplink.
    pub fn server_addr(&self) -> IpAddr {
        self.pick("203.0.113.1", "2001:db8:99::1")
    }

    /// Addresses of the reference path's two ends.
    pub fn reference_addrs(&self) -> (IpAddr, IpAddr) {
        (self.client_gateway(self.paths), self.gateway(self.paths))
    }

    /// Address of the server on path `i`: the path's gateway as the client sees it.
    pub fn gateway(&self, i: usize) -> IpAddr {
        self.link_addr(i, End::Server)
    }

    /// Address of the client (or router) on path `i`: the gateway as the server sees it.
    pub fn client_gateway(&self, i: usize) -> IpAddr {
        self.link_addr(i, End::Client)
    }

    /// Address of the foreign load's host on the path that it shares.
    pub fn foreign_addr(&self, path: usize) -> IpAddr {
        self.link_addr(path, End::Foreign)
    }

    /// Names of devices in path order: `s` of the server, `eu` of the emulator on the client's side.
    pub fn devices(&self, prefix: &str) -> Vec<String> {
        (0..self.paths).map(|i| format!("{prefix}{i}")).collect()
    }

    /// The one of two that is for this family.
    fn either<T>(&self, v4: T, v6: T) -> T {
        match self.family {
            IpFamily::Ipv4 => v4,
            IpFamily::Ipv6 => v6,
        }
    }

    fn pick(&self, v4: &str, v6: &str) -> IpAddr {
        let text = self.either(v4, v6);
        text.parse().expect("a literal address")
    }

    fn link_addr(&self, i: usize, end: End) -> IpAddr {
        let end = end as u8;
        self.pick(&format!("10.20.{i}.{end}"), &format!("fd20:{i:x}::{end}"))
    }

    /// For `ip`.
    fn flag(&self) -> &'static str {
        self.either("-4", "-6")
    }

    fn host_bits(&self) -> u8 {
        self.either(32, 128)
    }

    fn add_path(&mut self, i: usize, tag: &str) -> Result<()> {
        let (u, s) = (format!("u{tag}"), format!("s{tag}"));
        let mac = |end: u8| [0x02, 0x4d, 0, 0, i as u8, end];
        let link = LinkConfig {
            client: to_emulator(&self.emulator, (self.steering(), &u, mac(1)), mac(2))?,
            server: to_emulator(&self.emulator, (&self.server, &s, mac(4)), mac(3))?,
            foreign: None,
        };
        let (near, far) = (self.client_gateway(i), self.gateway(i));
        self.address(self.steering(), &u, near)?;
        self.address(&self.server, &s, far)?;
        // The emulator carries no broadcast or multicast, so nobody can ask for an address.
        self.neighbour(self.steering(), &u, far, mac(4))?;
        self.neighbour(&self.server, &s, near, mac(1))?;
        self.links.push(link);
        Ok(())
    }

    fn add_foreign(&mut self, path: usize) -> Result<()> {
        let foreign = self.foreign.as_ref();
        let foreign = foreign.expect("made when a scenario has foreign load");
        let mac = |end: u8| [0x02, 0x4d, 0, 1, path as u8, end];
        let port = to_emulator(&self.emulator, (foreign, "f0", mac(1)), mac(2))?;
        self.address(foreign, "f0", self.link_addr(path, End::Foreign))?;
        let server = [0x02, 0x4d, 0, 0, path as u8, 4];
        self.neighbour(foreign, "f0", self.gateway(path), server)?;
        self.links[path].foreign = Some(port);
        Ok(())
    }

    fn add_routes(&self, scenario: &Scenario) -> Result<()> {
        let (client, server) = (self.client_addr(), self.server_addr());
        if !self.topology.has_own_addresses() {
            self.address(&self.client, "lo", client)?;
        }
        self.address(&self.server, "lo", server)?;
        if let Some(router) = &self.router {
            self.join_router(router, client)?;
        }

        if self.topology.has_own_addresses() {
            return self.add_uplinks();
        }
        let source = match &self.router {
            None => format!("src {client}"),
            Some(_) => String::new(),
        };
        let hops = self.next_hops("u", |i| self.gateway(i));
        self.route(self.steering(), &format!("default {source} {hops}"))?;
        let hops = self.next_hops("s", |i| self.client_gateway(i));
        self.route(&self.server, &format!("default src {server} {hops}"))?;
        match scenario.replies {
            Replies::Free => Ok(()),
            Replies::SamePath => self.pin_replies(client, |i| i),
            Replies::OtherPath => self.pin_replies(client, |i| (i + 1) % self.paths),
        }
    }

    /// Default routes as DHCP makes them, the first path's preferred; a router translates. The server
    /// knows the way back to each path's address, which is on the link.
    fn add_uplinks(&self) -> Result<()> {
        for i in 0..self.paths {
            let (gateway, metric) = (self.gateway(i), 100 * (i + 1));
            let route = format!("default via {gateway} dev u{i} metric {metric}");
            self.route(self.steering(), &route)?;
        }
        let Some(router) = &self.router else {
            return Ok(());
        };
        let mut rules = String::from(
            "table inet mtl {\n chain post {\n  type nat hook postrouting priority 100;\n",
        );
        for i in 0..self.paths {
            rules += &format!("  oifname \"u{i}\" masquerade\n");
        }
        rules += " }\n}\n";
        router.nft(&rules)
    }

    fn next_hops(&self, prefix: &str, gateway: impl Fn(usize) -> IpAddr) -> String {
        let hop = |i| format!("nexthop via {} dev {prefix}{i} ", gateway(i));
        (0..self.paths).map(hop).collect()
    }

    fn route(&self, ns: &Netns, route: &str) -> Result<()> {
        ns.ip(&format!("{} route add {route}", self.flag()))
    }

    /// The server answers each packet on the path that the flow's last packet came by (or, for
    /// `asym`, on another): conntrack remembers it, a mark selects the path's table.
    fn pin_replies(&self, client: IpAddr, reply_path: impl Fn(usize) -> usize) -> Result<()> {
        let mut rules = String::from(
            "table inet mtl {\n chain in {\n  type filter hook prerouting priority -150;\n",
        );
        for i in 0..self.paths {
            rules += &format!("  iifname \"s{i}\" ct mark set {}\n", reply_path(i) + 1);
            let (flag, mark, table) = (self.flag(), i + 1, REPLY_TABLE + i);
            // Only what goes to the client's service address: probes between a path's own
            // addresses have to stay on that path.
            let rule = format!("{flag} rule add to {client} fwmark {mark} table {table}");
            self.server.ip(&rule)?;
            let gateway = self.client_gateway(i);
            let route = format!("default via {gateway} dev s{i} table {table}");
            self.route(&self.server, &route)?;
        }
        rules += " }\n chain out {\n  type route hook output priority -150;\n  ct mark != 0 meta mark set ct mark\n }\n}\n";
        self.server.nft(&rules)
    }

    /// Gateways that answer so many pings a second, as a token bucket with a burst of five does.
    fn limit_echoes(&self, scenario: &Scenario) -> Result<()> {
        let mut rules = String::new();
        for (i, path) in scenario.paths.iter().enumerate() {
            let Some(limit) = path.echo_limit else {
                continue;
            };
            for request in ["icmp type echo-request", "icmpv6 type echo-request"] {
                rules += &format!(
                    "  iifname \"s{i}\" {request} limit rate over {limit}/second burst 5 packets drop\n"
                );
            }
        }
        if rules.is_empty() {
            return Ok(());
        }
        let chain = "table inet mtl-echo {\n chain in {\n  type filter hook input priority 0;\n";
        self.server.nft(&format!("{chain}{rules} }}\n}}\n"))
    }

    fn join_router(&self, router: &Netns, client: IpAddr) -> Result<()> {
        let c = self.pick("10.30.0.2", "fd30::2");
        let r = self.pick("10.30.0.1", "fd30::1");
        let mac = |end: u8| [0x02, 0x4d, 0, 2, 0, end];
        plain_veth((&self.client, "eth0", mac(1)), (router, "lan0", mac(2)))?;
        self.address(&self.client, "eth0", c)?;
        self.address(router, "lan0", r)?;
        router.sysctl(&[
            ("net/ipv4/ip_forward", "1"),
            ("net/ipv6/conf/all/forwarding", "1"),
        ])?;
        let bits = self.host_bits();
        self.route(router, &format!("{client}/{bits} via {c} dev lan0"))?;
        let source = match self.topology.has_own_addresses() {
            true => String::new(),
            false => format!("src {client}"),
        };
        self.route(&self.client, &format!("default via {r} dev eth0 {source}"))
    }

    /// An address of a link, or on `lo` one of a host. Usable at once: without `nodad` also loopback's are
    /// tentative until a kernel thread gets to them.
    fn address(&self, ns: &Netns, device: &str, addr: IpAddr) -> Result<()> {
        let bits = match device {
            "lo" => self.host_bits(),
            _ => self.either(24, 64),
        };
        let (flag, nodad) = (self.flag(), self.either("", "nodad"));
        let add = format!("{flag} address add {addr}/{bits} dev {device} {nodad}");
        ns.ip(&add)
    }

    fn neighbour(&self, ns: &Netns, device: &str, addr: IpAddr, mac: [u8; 6]) -> Result<()> {
        let (flag, mac) = (self.flag(), mac_text(mac));
        let neighbour = format!("{addr} lladdr {mac} dev {device} nud permanent");
        ns.ip(&format!("{flag} neigh replace {neighbour}"))
    }

    /// Sends one ping and says whether it was answered within a second.
    ///
    /// # Errors
    /// When it could not be sent, which says more than a missing answer.
    pub fn ping(&self, ns: &Netns, device: &str, to: IpAddr) -> Result<bool> {
        let options = ping::PingOptions {
            target: to.to_string(),
            count: 1,
            interval: Duration::from_secs(1),
            size: 56,
            device: Some(device.to_owned()),
            ..ping::PingOptions::default()
        };
        let outcome = ns.enter(|| Pinger::new(options)?.run(|_, _| ()))?;
        Ok(outcome.run.samples.rtt_us.iter().any(Option::is_some))
    }

    /// Waits until every path answers; fails with the name of the one that does not.
    pub fn wait_until_joined(&self) -> Result<()> {
        let reference = format!("u{REFERENCE}");
        for (i, device) in self.devices("u").iter().chain([&reference]).enumerate() {
            let mut tries = 0..5;
            while !self.ping(self.steering(), device, self.gateway(i))? {
                anyhow::ensure!(
                    tries.next().is_some(),
                    "emulated path {device} does not answer a ping"
                );
                std::thread::sleep(Duration::from_millis(100));
            }
        }
        Ok(())
    }
}
