// SPDX-License-Identifier: GPL-2.0-or-later
//! Two network namespaces joined by plain veth pairs.

use std::net::IpAddr;
use std::path::PathBuf;

use mountain_lab::workload::dial::Ends;
use mountain_lab::workload::game::GameConfig;
use testkit::TestNamespace;

/// A client and a server namespace joined by two veth pairs c0–s0 and c1–s1, removed on drop.
pub struct Net {
    pub client: TestNamespace,
    pub server: TestNamespace,
}

impl Net {
    pub fn new() -> Self {
        let net = Net {
            client: TestNamespace::new("wc"),
            server: TestNamespace::new("ws"),
        };
        let (c, s) = (&net.client, &net.server);
        for ns in [c, s] {
            ns.sysctl("net/ipv4/fib_multipath_hash_policy", "1");
            ns.sysctl("net/ipv6/fib_multipath_hash_policy", "1");
        }
        for i in 0..2 {
            let (near, far) = (format!("c{i}"), format!("s{i}"));
            let nets = [format!("10.77.{i}"), format!("fd77:{i}")];
            c.join((&near, 1), s, (&far, 2), nets);
        }
        for (ns, host) in [(c, 0), (s, 1)] {
            ns.ip(&format!("address add 10.99.{host}.1/32 dev lo"));
            ns.ip(&format!("address add fd99::{host}:1/128 dev lo nodad"));
        }
        s.ip("route add 10.99.0.1 src 10.99.1.1 nexthop via 10.77.0.1 nexthop via 10.77.1.1");
        s.ip("-6 route add fd99::0:1 src fd99::1:1 nexthop via fd77:0::1 nexthop via fd77:1::1");
        net.route("nexthop via 10.77.0.2 nexthop via 10.77.1.2");
        c.ip("-6 route add fd99::1:1 src fd99::0:1 nexthop via fd77:0::2 nexthop via fd77:1::2");
        net
    }

    /// (Re)places the client's IPv4 route to the server's service address.
    pub fn route(&self, hops: &str) {
        self.client
            .ip(&format!("route replace 10.99.1.1 src 10.99.0.1 {hops}"));
    }

    pub fn client_ns(&self) -> PathBuf {
        PathBuf::from(self.client.path())
    }

    pub fn server_ns(&self) -> PathBuf {
        PathBuf::from(self.server.path())
    }

    /// Between the service addresses.
    pub fn ends(&self, v6: bool, port: u16) -> Ends {
        let addr = |v4_text: &str, v6_text: &str| -> IpAddr {
            let text = if v6 { v6_text } else { v4_text };
            text.parse().unwrap()
        };
        Ends {
            client_ns: self.client_ns(),
            server_ns: self.server_ns(),
            client_addr: addr("10.99.0.1", "fd99::0:1"),
            server_addr: addr("10.99.1.1", "fd99::1:1"),
            port,
            bind_dev: None,
            paths: vec!["s0".into(), "s1".into()],
        }
    }

    pub fn game(&self, v6: bool, port: u16) -> GameConfig {
        GameConfig {
            ends: self.ends(v6, port),
            flows: 20,
            rate_hz: 60.0,
            payload_bytes: 100,
            dscp: None,
        }
    }
}
