// SPDX-License-Identifier: GPL-2.0-or-later
//! Routes of a random host.

use std::fmt::Write;
use std::net::IpAddr;

use super::host::MAIN;

#[derive(Clone, Debug, PartialEq)]
pub struct Hop {
    pub device: String,
    pub gateway: Option<IpAddr>,
    pub weight: u32,
}

#[derive(Clone, Debug)]
pub struct Route {
    pub ipv6: bool,
    pub prefix: String,
    pub table: u32,
    pub metric: u32,
    pub kind: &'static str,
    pub tos: u8,
    pub source: Option<IpAddr>,
    /// The only sources that it is for, of IPv6.
    pub from: Option<String>,
    /// What else is said of its packets: `mtu 1380`.
    pub metrics: &'static str,
    pub hops: Vec<Hop>,
    /// Whether its gateways need no look-up: the kernel makes it by whatever rules there are.
    pub onlink: bool,
    /// The number of the nexthop group that it uses, whose members have the numbers after it.
    pub nexthop: Option<u32>,
    /// Whether that group is a resilient one.
    pub resilient: bool,
}

impl Route {
    pub fn new(prefix: String, table: u32, metric: u32, hops: Vec<Hop>) -> Self {
        Self {
            ipv6: prefix.contains(':'),
            prefix,
            table,
            metric,
            kind: "unicast",
            tos: 0,
            source: None,
            from: None,
            metrics: "",
            hops,
            onlink: false,
            nexthop: None,
            resilient: false,
        }
    }

    pub fn is_multipath(&self) -> bool {
        self.hops.len() > 1
    }

    pub fn is_default(&self) -> bool {
        let any = self.prefix.ends_with("/0") && self.from.is_none() && self.tos == 0;
        any && self.table == MAIN
    }

    /// What tells it from others.
    pub fn key(&self) -> String {
        let mut key = self.prefix.clone();
        if let Some(from) = &self.from {
            write!(key, " from {from}").unwrap();
        }
        write!(key, " table {}", self.table).unwrap();
        if self.metric > 0 {
            write!(key, " metric {}", self.metric).unwrap();
        }
        if self.tos > 0 {
            write!(key, " tos {:#x}", self.tos).unwrap();
        }
        key
    }

    pub fn delete(&self) -> String {
        match self.kind {
            "unicast" => format!("route del {}", self.key()),
            kind => format!("route del {kind} {}", self.key()),
        }
    }

    /// By one of its hops alone, or by all.
    pub fn add(&self, only: Option<usize>) -> String {
        let mut line = format!("route add {} {}", self.kind, self.key());
        if let Some(source) = self.source {
            write!(line, " src {source}").unwrap();
        }
        if !self.metrics.is_empty() {
            write!(line, " {}", self.metrics).unwrap();
        }
        match (self.nexthop, only, &self.hops[..]) {
            (Some(id), None, _) => write!(line, " nhid {id}").unwrap(),
            (Some(id), Some(n), _) => write!(line, " nhid {}", id + 1 + n as u32).unwrap(),
            (None, Some(n), [..]) => line += &self.by(n),
            (None, None, [_]) => line += &self.by(0),
            (None, None, hops) => {
                for (n, hop) in hops.iter().enumerate() {
                    write!(line, " nexthop{} weight {}", self.by(n), hop.weight).unwrap();
                }
            }
        }
        line
    }

    fn by(&self, n: usize) -> String {
        self.by_hop(&self.hops[n]) + if self.onlink { " onlink" } else { "" }
    }

    pub fn nexthops(&self) -> Vec<String> {
        let Some(id) = self.nexthop else {
            return Vec::new();
        };
        let numbered = self.hops.iter().zip(id + 1..);
        let mut lines: Vec<String> = numbered
            .clone()
            .map(|(hop, n)| format!("nexthop add id {n}{}", self.by_hop(hop)))
            .collect();
        let members: Vec<String> = numbered
            .map(|(hop, n)| format!("{n},{}", hop.weight))
            .collect();
        let kind = match self.resilient {
            true => " type resilient buckets 32",
            false => "",
        };
        let members = members.join("/");
        lines.push(format!("nexthop add id {id} group {members}{kind}"));
        lines
    }

    fn by_hop(&self, hop: &Hop) -> String {
        let device = &hop.device;
        match hop.gateway {
            Some(gateway) if gateway.is_ipv6() != self.ipv6 => {
                format!(" via inet6 {gateway} dev {device}")
            }
            Some(gateway) => format!(" via {gateway} dev {device}"),
            None => format!(" dev {device}"),
        }
    }
}
