// SPDX-License-Identifier: GPL-2.0-or-later
//! A host whose routing is read.

// Each test program uses some of it.
#![allow(dead_code)]

use std::net::IpAddr;

use ipnet::IpNet;
use mountain::topology::{read_topology, Filter};
use mountain::topology::{Member, Topology};

use super::{wait_until, Ns, LEAVE};

/// A runtime for the calling thread.
pub fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
}

impl Ns {
    /// Runs `work` on a thread of its own inside the namespace, with a tokio runtime.
    pub fn within<T: Send>(&self, work: impl AsyncFnOnce() -> T + Send) -> T {
        self.with(|| runtime().block_on(work()))
    }

    /// What is read of the routing state.
    pub fn topology(&self) -> Topology {
        self.filtered(&[])
    }

    /// The same for some routes only.
    pub fn filtered(&self, routes: &[&str]) -> Topology {
        let filter = Filter {
            routes: routes.iter().map(|route| prefix(route)).collect(),
            ..Filter::default()
        };
        self.within(async || read_topology(&filter).await.unwrap())
    }

    pub fn index(&self, ifname: &str) -> u32 {
        self.with(|| testkit::ifindex(ifname))
    }
}

/// A host with uplinks u0.. joined to a far end by veth: 10.0.N.1/24 and fd00:N::1/64, the far
/// end has .2 and ::2.
pub struct Net {
    pub host: Ns,
    pub far: Ns,
}

impl Net {
    pub fn new(uplinks: u32) -> Self {
        let net = Self {
            host: Ns::new("near"),
            far: Ns::new("far"),
        };
        for n in 0..uplinks {
            net.add_uplink(n);
        }
        net
    }

    pub fn add_uplink(&self, n: u32) {
        let (near, far) = (format!("u{n}"), format!("p{n}"));
        let nets = [format!("10.0.{n}"), format!("fd00:{n}")];
        self.host.join((&near, 1), &self.far, (&far, 2), nets);
    }

    /// Waits until the uplinks count as up: the kernel's link watch takes up to a second when
    /// other links changed just before.
    pub fn wait_up(&self) {
        wait_until("the uplinks are up", LEAVE, || {
            let links = self.host.ip("-o link show type veth");
            links.lines().all(|link| link.contains("state UP"))
        });
    }

    /// A multipath default over u0 (weight 1) and u1 (weight 3).
    pub fn with_default() -> Self {
        let net = Self::new(2);
        net.host.ip(&format!("route add default {TWO_HOPS}"));
        net
    }
}

pub const TWO_HOPS: &str = "nexthop via 10.0.0.2 dev u0 nexthop via 10.0.1.2 dev u1 weight 3";
pub const TWO_HOPS_V6: &str =
    "nexthop via fd00:0::2 dev u0 weight 200 nexthop via fd00:1::2 dev u1";

pub fn prefix(text: &str) -> IpNet {
    text.parse().unwrap()
}

pub fn addr(text: &str) -> IpAddr {
    text.parse().unwrap()
}

pub fn nets(texts: &[&str]) -> Vec<IpNet> {
    texts.iter().map(|text| prefix(text)).collect()
}

/// Device, gateway and weight of each member of group `g`.
pub fn hops(topology: &Topology, g: usize) -> String {
    let hop = |member: &Member| {
        let path = &topology.paths[member.path];
        let gateway = path.key.gateway.unwrap();
        format!("{} {gateway} {}", path.ifname, member.weight)
    };
    let hops: Vec<String> = topology.groups[g].members.iter().map(hop).collect();
    hops.join(", ")
}
