// SPDX-License-Identifier: GPL-2.0-or-later
//! Two network namespaces joined by plain veth pairs.

use std::net::IpAddr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use mountain_lab::workload::game::GameConfig;

static COUNTER: AtomicU32 = AtomicU32::new(0);

/// A client and a server namespace joined by two veth pairs c0–s0 and c1–s1, removed on drop.
pub struct Net {
    pub client: String,
    pub server: String,
}

impl Net {
    pub fn new() -> Self {
        assert_eq!(
            unsafe { libc::geteuid() },
            0,
            "this test makes network namespaces: run as root"
        );
        let id = format!(
            "{}-{}",
            std::process::id(),
            COUNTER.fetch_add(1, Ordering::Relaxed)
        );
        let net = Net {
            client: format!("mtw-c-{id}"),
            server: format!("mtw-s-{id}"),
        };
        let (c, s) = (&net.client, &net.server);
        ip(&format!("netns add {c}"));
        ip(&format!("netns add {s}"));
        for ns in [c, s] {
            ip(&format!("-n {ns} link set lo up"));
            // Duplicate address detection would delay the first IPv6 packet by a second or two.
            ns_sysctl(ns, "ipv6/conf/all/accept_dad", "0");
            ns_sysctl(ns, "ipv6/conf/default/accept_dad", "0");
            ns_sysctl(ns, "ipv4/fib_multipath_hash_policy", "1");
            ns_sysctl(ns, "ipv6/fib_multipath_hash_policy", "1");
        }
        for i in 0..2 {
            ip(&format!(
                "-n {c} link add c{i} type veth peer name s{i} netns {s}"
            ));
            for (ns, dev, host) in [(c, format!("c{i}"), 1), (s, format!("s{i}"), 2)] {
                ip(&format!(
                    "-n {ns} address add 10.77.{i}.{host}/24 dev {dev}"
                ));
                ip(&format!(
                    "-n {ns} address add fd77:{i}::{host}/64 dev {dev} nodad"
                ));
                ip(&format!("-n {ns} link set {dev} up"));
            }
        }
        for (ns, host) in [(c, 0), (s, 1)] {
            ip(&format!("-n {ns} address add 10.99.{host}.1/32 dev lo"));
            ip(&format!(
                "-n {ns} address add fd99::{host}:1/128 dev lo nodad"
            ));
        }
        ip(&format!(
            "-n {s} route add 10.99.0.1 src 10.99.1.1 nexthop via 10.77.0.1 nexthop via 10.77.1.1"
        ));
        ip(&format!("-n {s} -6 route add fd99::0:1 src fd99::1:1 nexthop via fd77:0::1 nexthop via fd77:1::1"));
        net.route("nexthop via 10.77.0.2 nexthop via 10.77.1.2");
        ip(&format!("-n {c} -6 route add fd99::1:1 src fd99::0:1 nexthop via fd77:0::2 nexthop via fd77:1::2"));
        net
    }

    /// (Re)places the client's IPv4 route to the server's service address.
    pub fn route(&self, hops: &str) {
        ip(&format!(
            "-n {} route replace 10.99.1.1 src 10.99.0.1 {hops}",
            self.client
        ));
    }

    pub fn client_ns(&self) -> PathBuf {
        PathBuf::from(format!("/run/netns/{}", self.client))
    }

    pub fn server_ns(&self) -> PathBuf {
        PathBuf::from(format!("/run/netns/{}", self.server))
    }

    pub fn game(&self, v6: bool, port: u16) -> GameConfig {
        let (client_addr, server_addr) = addresses(v6);
        GameConfig {
            client_ns: self.client_ns(),
            server_ns: self.server_ns(),
            client_addr,
            server_addr,
            port,
            flows: 20,
            rate_hz: 60.0,
            payload_bytes: 100,
            dscp: None,
            bind_dev: None,
            paths: vec!["s0".into(), "s1".into()],
        }
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        for ns in [&self.client, &self.server] {
            let _ = Command::new("ip").args(["netns", "del", ns]).status();
        }
    }
}

pub fn addresses(v6: bool) -> (IpAddr, IpAddr) {
    if v6 {
        ("fd99::0:1".parse().unwrap(), "fd99::1:1".parse().unwrap())
    } else {
        ("10.99.0.1".parse().unwrap(), "10.99.1.1".parse().unwrap())
    }
}

pub fn ip(args: &str) {
    let output = Command::new("ip")
        .args(args.split(' '))
        .output()
        .expect("ip");
    assert!(
        output.status.success(),
        "ip {args}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Writes a sysctl of the namespace `ns`; /proc/sys/net shows that of the reading process.
pub fn ns_sysctl(ns: &str, key: &str, value: &str) {
    let ns = format!("--net=/run/netns/{ns}");
    let write = format!("echo {value} > /proc/sys/net/{key}");
    let status = Command::new("nsenter")
        .args([&ns, "sh", "-c", &write])
        .status()
        .expect("nsenter");
    assert!(status.success(), "{key} = {value}");
}
