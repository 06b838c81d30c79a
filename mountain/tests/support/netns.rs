// SPDX-License-Identifier: GPL-2.0-or-later
//! Network namespaces for tests, removed with the value that made them. Needs root.

// Each test program uses some of it.
#![allow(dead_code)]

use std::net::IpAddr;
use std::ops::Deref;
use std::process::Command;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use mountain::topology::{read_topology, Filter};
use mountain::topology::{Member, Topology};

/// A network namespace whose routing is read.
pub struct Namespace(testkit::TestNamespace);

impl Deref for Namespace {
    type Target = testkit::TestNamespace;

    fn deref(&self) -> &testkit::TestNamespace {
        &self.0
    }
}

impl Namespace {
    pub fn new() -> Self {
        Self(testkit::TestNamespace::new("nl"))
    }

    /// Runs `work` on a thread of its own inside the namespace, with a tokio runtime.
    pub fn within<T: Send>(&self, work: impl AsyncFnOnce() -> T + Send) -> T {
        self.with(|| {
            tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap()
                .block_on(work())
        })
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
        self.within(async || nix::net::if_::if_nametoindex(ifname).unwrap())
    }
}

pub fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(
        output.status.success(),
        "{program} {}: {}",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// A host with uplinks u0.. joined to a far end by veth: 10.0.N.1/24 and fd00:N::1/64, the far
/// end has .2 and ::2.
pub struct Net {
    pub host: Namespace,
    pub far: Namespace,
}

impl Net {
    pub fn new(uplinks: u32) -> Self {
        let net = Self {
            host: Namespace::new(),
            far: Namespace::new(),
        };
        for n in 0..uplinks {
            net.add_uplink(n);
        }
        net
    }

    pub fn add_uplink(&self, n: u32) {
        self.host
            .link(&format!("u{n}"), &self.far, &format!("p{n}"));
        for (side, device, host) in [(&self.far, "p", 2), (&self.host, "u", 1)] {
            let [v4, v6] = [
                format!("10.0.{n}.{host}/24"),
                format!("fd00:{n}::{host}/64"),
            ];
            side.bring_up(&format!("{device}{n}"), &[&v4, &v6]);
        }
    }

    /// Waits until the uplinks count as up: the kernel's link watch takes up to a second when
    /// other links changed just before.
    pub fn wait_up(&self) {
        let deadline = Instant::now() + Duration::from_secs(5);
        loop {
            let output = Command::new("ip")
                .args(["-n", &self.host.name, "-o", "link", "show", "type", "veth"])
                .output()
                .unwrap();
            let links = String::from_utf8(output.stdout).unwrap();
            if links.lines().all(|link| link.contains("state UP")) {
                return;
            }
            assert!(Instant::now() < deadline, "{links}");
            std::thread::sleep(Duration::from_millis(20));
        }
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
