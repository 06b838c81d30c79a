// SPDX-License-Identifier: GPL-2.0-or-later
//! Hosts behind this one that others reach by an address of this one, and what they send themselves.
//!
//! The firewall forwards ports of the uplink that the kernel takes (DNAT). Games' servers, telephones, BitTorrent, and what
//! keeps a name's address up to date (dynamic DNS) tell others the address that they are seen with. It has to be that one.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;

use crate::steer::alike::{Difference, PORTS_OF_SERVERS};

/// So many networks may stand for the hosts.
const NETS_MAX: usize = 16;

/// What is reached from outside by the uplink that the kernel takes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Published {
    /// By family ([IPv4, IPv6]), ports of UDP: ranges.
    pub ports: [BTreeSet<(u16, u16)>; 2],
    hosts: BTreeSet<IpAddr>,
}

impl Published {
    /// Adds what the firewall forwards of a family.
    pub(crate) fn add(&mut self, ipv6: bool, forwards: Difference) {
        let ports = &mut self.ports[usize::from(ipv6)];
        match forwards.targets {
            Some(targets) => {
                ports.extend(targets.ports);
                self.hosts.extend(targets.hosts);
            }
            None => drop(ports.insert(PORTS_OF_SERVERS)),
        }
    }

    /// This and what was before.
    pub(crate) fn and(&self, before: &Self) -> Self {
        Self {
            ports: [0, 1].map(|ipv6| &self.ports[ipv6] | &before.ports[ipv6]),
            hosts: &self.hosts | &before.hosts,
        }
    }

    /// The hosts. Where there are many, networks that hold them, and others.
    pub(crate) fn nets(&self) -> Vec<IpNet> {
        // Of IPv4 and of IPv6; the last ones hold all.
        let lengths = [(32, 128), (24, 64), (16, 48), (0, 0)];
        let nets = lengths.map(|(ipv4, ipv6)| {
            let net = |host: &IpAddr| {
                let length = if host.is_ipv6() { ipv6 } else { ipv4 };
                IpNet::new(*host, length).map(|net| net.trunc()).ok()
            };
            BTreeSet::from_iter(self.hosts.iter().filter_map(net))
        });
        let few = nets.into_iter().find(|nets| nets.len() <= NETS_MAX);
        Vec::from_iter(few.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_hosts_are_one_network() {
        let nets = |hosts: &[&str]| {
            let published = Published {
                hosts: hosts.iter().map(|host| host.parse().unwrap()).collect(),
                ..Published::default()
            };
            let nets = published.nets().into_iter();
            nets.map(|net| net.to_string()).collect::<Vec<_>>()
        };
        let two = ["192.168.7.2", "fd07::2"];
        assert_eq!(nets(&two), ["192.168.7.2/32", "fd07::2/128"]);
        let many: Vec<String> = (0..20).map(|n| format!("192.168.7.{n}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).chain(two).collect();
        assert_eq!(nets(&many), ["192.168.7.0/24", "fd07::/64"]);
        let far: Vec<String> = (0..20).map(|n| format!("{n}.0.0.1")).collect();
        let far: Vec<&str> = far.iter().map(String::as_str).collect();
        assert_eq!(nets(&far), ["0.0.0.0/0"]);
        assert!(nets(&[]).is_empty());
    }
}
