// SPDX-License-Identifier: GPL-2.0-or-later
//! A host as `ip` and `nft` commands: what builds it, and what a failure prints.

use std::fmt::Write;
use std::net::IpAddr;

use super::devices::{Made, Tunnel};
use super::host::*;

/// Gives a device an address in a subnet of its own, loopback one that stands alone.
fn add(address: IpAddr, device: &str) -> String {
    let (nodad, bits) = match (address, device) {
        (IpAddr::V4(_), "lo") => ("", 32),
        (IpAddr::V4(_), _) => ("", 24),
        (IpAddr::V6(_), "lo") => (" nodad", 128),
        (IpAddr::V6(_), _) => (" nodad", 64),
    };
    format!("addr add {address}/{bits} dev {device}{nodad}")
}

impl Host {
    /// `ip` commands for the devices, without their far ends' namespace.
    pub fn device_lines(&self, far: &str) -> Vec<String> {
        let mut lines = vec!["link set lo up".to_owned()];
        lines.extend(self.link_lines(far));
        for (i, uplink) in self.uplinks.iter().enumerate() {
            lines.extend([false, true].map(|v6| add(uplink_address(i, 1, v6), &uplink.name)));
            lines.push(format!("link set {} up", uplink.name));
        }
        for ipv6 in [false, true] {
            lines.push(add(inner_address(1, false, false, ipv6), INNER));
            lines.push(add(service(ipv6), "lo"));
        }
        if self.has(Kind::LocalRange) {
            let local = |range: &str| format!("route add local {range} dev lo table 255");
            lines.extend([RANGE4, RANGE6].map(local));
        }
        lines.push(format!("link set {INNER} up"));
        lines.extend(self.neighbour_lines());
        if self.has_tun() {
            lines.extend(["10.50.0.1", "fd50::1"].map(|a| add(a.parse().unwrap(), TUN)));
            lines.push(format!("link set {TUN} up"));
        }
        lines
    }

    /// Neighbours that are known already.
    fn neighbour_lines(&self) -> Vec<String> {
        let mut known: Vec<(&str, IpAddr)> = Vec::new();
        for (i, uplink) in self.uplinks.iter().enumerate() {
            let name = uplink.name.as_str();
            known.extend(uplink.gateways.iter().flatten().map(|g| (name, *g)));
            known.extend([60, 70].map(|n| (name, uplink_address(i, n, false))));
            known.extend([60, 70].map(|n| (name, uplink_address(i, n, true))));
        }
        for ipv6 in [false, true] {
            let inner = [9, 20, 21, 22].map(|n| inner_address(n, false, false, ipv6));
            known.extend(inner.map(|a| (INNER, a)));
        }
        let line = |(dev, address): (&str, IpAddr)| {
            let mac = mac_text(neighbour_mac(address));
            format!("neigh add {address} lladdr {mac} dev {dev} nud stale")
        };
        known.into_iter().map(line).collect()
    }

    /// `ip` commands for the routes.
    pub fn route_lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for ipv6 in [false, true] {
            let via = inner_address(9, false, false, ipv6);
            for public in [false, true] {
                let net = inner_address(0, true, public, ipv6);
                let bits = if ipv6 { 64 } else { 24 };
                let table = self.inner_table();
                lines.push(format!(
                    "route add {net}/{bits} via {via} dev {INNER} table {table}"
                ));
            }
        }
        for route in &self.routes {
            lines.extend(route.nexthops());
            lines.push(route.add(None));
        }
        lines
    }

    pub fn rule_lines(&self, ipv6: bool) -> Vec<String> {
        let of_family = self.rules.iter().filter(|(v6, _)| *v6 == ipv6);
        of_family.map(|(_, line)| line.clone()).collect()
    }

    /// `ip` commands for a guest, in the host (before it moves to `guest`) and in the guest.
    pub fn guest_lines(&self, n: usize, guest: &str) -> [Vec<String>; 2] {
        let on = &self.guests[n];
        let i = self.uplinks.iter().position(|u| u.name == *on).unwrap();
        let ipvlan = self.has(Kind::IpvlanGuest) && self.uplinks[i].made != Made::Bridge;
        let kind = match ipvlan {
            true if self.seed.is_multiple_of(2) => "ipvlan mode l3",
            true => "ipvlan mode l2",
            false => "macvlan mode bridge",
        };
        let host = match self.uplinks[i].made {
            Made::Bridge => vec![
                format!("link add g{n} type veth peer name m{n} netns {guest}"),
                format!("link set g{n} master {on}"),
                format!("link set g{n} up"),
            ],
            _ => vec![format!("link add m{n} link {on} netns {guest} type {kind}")],
        };
        let mut inside = vec!["link set lo up".to_owned()];
        let device = format!("m{n}");
        inside.extend([false, true].map(|v6| add(uplink_address(i, 50, v6), &device)));
        inside.extend(["10.98.0.77", "fd98::77"].map(|a| add(a.parse().unwrap(), "lo")));
        inside.push(format!("link set m{n} up"));
        for ipv6 in [false, true] {
            let via = self.uplinks[i].gateways[usize::from(ipv6)][0];
            let mac = mac_text(neighbour_mac(via));
            // In mode l3 there is no ARP, so a neighbour that has to be confirmed fails after 8 s.
            let state = match kind {
                "ipvlan mode l3" => "permanent",
                _ => "stale",
            };
            inside.push(format!("neigh add {via} lladdr {mac} dev m{n} nud {state}"));
            inside.push(format!("route add {} via {via} dev m{n}", everywhere(ipv6)));
        }
        [host, inside]
    }

    /// The host as a shell script. Its devices' far ends are in the namespace `far`.
    pub fn script(&self) -> String {
        let mut text = format!("#!/bin/sh -ex\n# seed {}: {:?}\n", self.seed, self.kinds);
        text += "ip netns add far; ip netns add host\n";
        text += "ip netns exec host sysctl -q net.ipv6.conf.default.accept_dad=0\n";
        for (key, value) in &self.sysctls {
            let key = key.replace('/', ".");
            writeln!(text, "ip netns exec host sysctl -q net.{key}=\"{value}\"").unwrap();
        }
        if self.tunnel() == Some(Tunnel::Tun) {
            writeln!(text, "ip -n host tuntap add {TUN} mode tun").unwrap();
        }
        let mut batch = |ns: &str, family: &str, lines: Vec<String>| {
            if !lines.is_empty() {
                let lines = lines.join("\n");
                writeln!(text, "ip -n {ns} {family}-batch - <<EOF\n{lines}\nEOF").unwrap();
            }
        };
        batch("host", "", self.device_lines("far"));
        let names = self.uplinks.iter().map(|u| u.name.as_str()).chain([INNER]);
        let up = names.map(|n| format!("link set s-{n} up"));
        batch("far", "", self.far_lines());
        batch("far", "", up.collect());
        batch("host", "", self.route_lines());
        batch("host", "", self.ipsec_lines());
        batch("host", "-4 ", self.rule_lines(false));
        batch("host", "-6 ", self.rule_lines(true));
        for n in 0..self.guests.len() {
            let [host, inside] = self.guest_lines(n, "guest");
            batch("host", "", host);
            batch("guest", "", inside);
        }
        if !self.nft.is_empty() {
            let rules = self.nft.join("\n");
            writeln!(text, "ip netns exec host nft -f - <<EOF\n{rules}\nEOF").unwrap();
        }
        for (key, value) in &self.device_sysctls {
            let key = key.replace('/', ".");
            writeln!(text, "ip netns exec host sysctl -q net.{key}=\"{value}\"").unwrap();
        }
        let adopt = ["", " --adopt"][usize::from(self.has(Kind::Adopt))];
        writeln!(text, "# ip netns exec host mountain up --wait{adopt}").unwrap();
        text
    }
}
