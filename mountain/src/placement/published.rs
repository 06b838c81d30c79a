// SPDX-License-Identifier: GPL-2.0-or-later
//! Hosts behind this one that others reach by an address of this one, and what they send themselves.
//!
//! The firewall forwards ports of the uplink that the kernel takes (DNAT). Games' servers, telephones, BitTorrent, and what
//! keeps a name's address up to date (dynamic DNS) tell others the address that they are seen with. It has to be that one.

use std::collections::BTreeSet;
use std::net::IpAddr;

use crate::host::text::count;
use crate::steer::alike::Difference;

/// So many hosts are named.
const SHOWN: usize = 5;

/// What is reached from outside by the uplink that the kernel takes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Published {
    /// Those that rules name.
    pub hosts: BTreeSet<IpAddr>,
    /// By family ([IPv4, IPv6]): rules forward datagrams to others besides.
    pub others: [bool; 2],
}

impl Published {
    /// Adds what the firewall forwards of a family.
    pub(crate) fn add(&mut self, ipv6: bool, forwards: Difference) {
        let others = &mut self.others[usize::from(ipv6)];
        match forwards.targets {
            Some(targets) => {
                *others |= targets.others;
                self.hosts.extend(targets.hosts);
            }
            None => *others = true,
        }
    }

    /// Whose flows take the uplink that the kernel takes, in words; without any, nothing.
    pub(crate) fn told(&self) -> String {
        let hosts = self.hosts.iter().map(ToString::to_string);
        let mut told: Vec<String> = hosts.take(SHOWN).collect();
        if let Some(more) = self.hosts.len().checked_sub(SHOWN + 1) {
            told.push(count(more + 1, "other host"));
        }
        match told.is_empty() {
            true => String::new(),
            false => format!(
                "; those from {} by the uplink that the kernel takes while that is alive, as the firewall forwards ports \
                 of it to them",
                told.join(", ")
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_hosts_some_are_named() {
        let told = |count: u8| {
            let published = Published {
                hosts: (1..=count)
                    .map(|n| IpAddr::from([192, 168, 7, n]))
                    .collect(),
                others: [true; 2],
            };
            let told = published.told();
            let (hosts, _) = told.split_once(" by the uplink").unwrap_or_default();
            hosts.to_owned()
        };
        assert_eq!(told(0), "");
        assert_eq!(told(2), "; those from 192.168.7.1, 192.168.7.2");
        let [five, six] = [5, 6].map(told);
        assert!(five.ends_with("192.168.7.5"), "{five}");
        assert_eq!(six, format!("{five}, 1 other host"));
        assert_eq!(told(200), format!("{five}, 195 other hosts"));
    }
}
