// SPDX-License-Identifier: GPL-2.0-or-later
//! Neighbour entries of gateways, which Mountain puts back so that packets reach the program.

use std::thread;
use std::time::{Duration, Instant};

use super::support::*;

/// As long as it takes until an entry that has failed twice is put back.
const FAILS_TWICE: Duration = Duration::from_secs(9);

/// In less time an old address is not put back a second time.
const FOUND: Duration = Duration::from_secs(4);

/// A client whose gateway by `u1` is asked often and has stopped to answer.
fn with_silent_gateway(prepare: &str) -> Net {
    let net = Net::new();
    for (name, value) in [
        ("base_reachable_time_ms", "1000"),
        ("delay_first_probe_time", "1"),
    ] {
        net.client
            .sysctl(&format!("net.ipv4.neigh.u1.{name}"), value);
    }
    net.client.run(prepare);
    net.client.mountain_ok("up");
    net.wait_good();
    let hook = "filter hook output priority 0";
    net.server.chain("arp t out", hook, "drop");
    net
}

fn entry(net: &Net) -> String {
    net.client.ip("neigh show 10.30.1.2 dev u1")
}

fn is_unusable(entry: &str) -> bool {
    entry.contains("FAILED") || entry.contains("INCOMPLETE")
}

#[test]
fn a_dead_gateway_that_the_kernel_itself_leaves_gets_no_entry() {
    let net = with_silent_gateway("sysctl -qw net.ipv4.fib_multipath_use_neigh=1");
    wait_until("it has failed", LEAVE, || is_unusable(&entry(&net)));
    let since = Instant::now();
    while since.elapsed() < FAILS_TWICE {
        let text = entry(&net);
        assert!(is_unusable(&text), "the kernel would use it: {text}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// The same while TCP that was moved away confirms the entry. Here it is taken to be reachable for an hour.
#[test]
fn the_kernel_learns_of_a_dead_gateway_that_it_leaves_itself() {
    let net = Net::new();
    net.client
        .sysctl("net.ipv4.neigh.u1.base_reachable_time_ms", "3600000");
    net.client.sysctl("net.ipv4.fib_multipath_use_neigh", "1");
    net.client.mountain_ok("up");
    net.wait_good();
    // One that answers, behind which all is dark, keeps its entry.
    let hook = "filter hook input priority 0";
    net.server.chain("ip t in", hook, "iif s1 drop");
    thread::sleep(FAILS_TWICE);
    let text = entry(&net);
    assert!(!is_unusable(&text), "it answers: {text}");
    net.server.run("nft flush chain ip t in");
    net.wait_good();
    let hook = "filter hook output priority 0";
    net.server.chain("arp t out", hook, "drop");
    net.server.run("nft add rule ip t in iif s1 drop");
    wait_until("it has failed", FAILS_TWICE, || is_unusable(&entry(&net)));
    net.server.run("nft flush chain ip t in");
    net.server.run("nft flush chain arp t out");
    net.wait_used("u1");
}

/// The owner has replaced the router, and flushes what the host knows of it.
#[test]
fn a_gateway_with_another_address_is_found_after_a_flush() {
    let net = Net::new();
    net.client.mountain_ok("up");
    net.wait_good();
    for n in 1..=3 {
        let mac = format!("02:00:00:00:01:0{n}");
        net.server.ip(&format!("link set s1 address {mac}"));
        // `ip` complains when the entry is back before it has finished.
        net.client.try_ip("neigh flush dev u1");
        wait_until("it is found", FOUND, || entry(&net).contains(&mac));
        thread::sleep(FOUND);
    }
}

/// As where a cable is plugged into another network, whose router has the same address.
#[test]
fn another_gateway_is_found_when_the_carrier_is_back() {
    let net = Net::new();
    net.client.mountain_ok("up");
    net.wait_good();
    for n in 1..=2 {
        let mac = format!("02:00:00:00:01:0{n}");
        net.server.ip("link set s1 down");
        let has_lost = || net.client.ip("link show u1").contains("NO-CARRIER");
        wait_until("the kernel notices", LEAVE, has_lost);
        wait_until("it is put back", LEAVE, || entry(&net).contains("lladdr"));
        net.server.ip(&format!("link set s1 address {mac}"));
        net.server.ip("link set s1 up");
        wait_until("it is found", FOUND, || entry(&net).contains(&mac));
        net.wait_used("u1");
    }
}

#[test]
fn an_entry_that_the_kernel_looks_after_stays_so() {
    let net = with_silent_gateway("ip neigh replace 10.30.1.2 dev u1 managed");
    wait_until("it has failed", LEAVE, || is_unusable(&entry(&net)));
    thread::sleep(FAILS_TWICE);
    let text = entry(&net);
    assert_has(&text, &["managed"]);
    net.client.mountain_says("down", "mountain is down");
}

/// The router was broken for a while, and a new one says nothing of itself.
#[test]
fn a_gateway_that_was_replaced_while_it_was_silent_is_found() {
    let net = with_silent_gateway("true");
    wait_until("it has failed", LEAVE, || is_unusable(&entry(&net)));
    thread::sleep(FAILS_TWICE);
    let mac = "02:00:00:00:01:01";
    net.server.ip(&format!("link set s1 address {mac}"));
    net.server.run("nft flush chain arp t out");
    net.server
        .run("nft add rule arp t out arp operation request drop");
    wait_until("it is found", FOUND, || entry(&net).contains(mac));
}

/// The same where the kernel does not doubt the old entry. So it is as long as TCP runs that was moved away: its
/// acknowledgements confirm the gateway that the kernel has for it. Here the entry is taken to be reachable for an hour.
#[test]
fn a_gateway_that_was_replaced_is_found_although_the_kernel_does_not_ask() {
    let net = Net::new();
    let key = "net.ipv4.neigh.u1.base_reachable_time_ms";
    net.client.sysctl(key, "3600000");
    net.client.mountain_ok("up");
    net.wait_good();
    let hook = "filter hook output priority 0";
    net.server.chain("arp t out", hook, "drop");
    let mac = "02:00:00:00:01:01";
    net.server.ip(&format!("link set s1 address {mac}"));
    thread::sleep(Duration::from_secs(5));
    let before = entry(&net);
    assert!(before.contains("REACHABLE"), "{before}");
    assert!(!before.contains(mac), "{before}");
    net.server.run("nft flush chain arp t out");
    net.server
        .run("nft add rule arp t out arp operation request drop");
    wait_until("it is found", FOUND, || entry(&net).contains(mac));
}

/// The same by routes of IPv4 by gateways of IPv6 (RFC 8950): no address of the path's is of the gateway's family.
#[test]
fn a_silent_gateway_of_the_other_family_is_found() {
    let net = Net::new();
    net.client.ip("-6 route del 2001:db8:98::/64");
    net.client.ip("route replace 203.0.113.0/24 src 10.98.0.1 \
         nexthop via inet6 fd30:0::2 dev u0 nexthop via inet6 fd30:1::2 dev u1");
    for (name, value) in [
        ("base_reachable_time_ms", "1000"),
        ("delay_first_probe_time", "1"),
    ] {
        let key = format!("net.ipv6.neigh.u1.{name}");
        net.client.sysctl(&key, value);
    }
    net.client.mountain_ok("up");
    wait_until("both paths are good", LEAVE, || {
        let paths = net.client.status().paths;
        paths.len() == 2 && paths.iter().all(|path| path.judged.state == "good")
    });
    let silent = |what: &str| {
        let rule = format!("icmpv6 type {what} drop");
        let chain = format!("ip6 {} out", what.replace('-', "_"));
        net.server
            .chain(&chain, "filter hook output priority 0", &rule);
    };
    silent("nd-neighbor-solicit");
    silent("nd-neighbor-advert");
    let entry = || net.client.ip("neigh show fd30:1::2 dev u1");
    wait_until("it has failed", LEAVE, || is_unusable(&entry()));
    thread::sleep(FAILS_TWICE);
    let mac = "02:00:00:00:01:01";
    net.server.ip(&format!("link set s1 address {mac}"));
    net.server.run("nft delete table ip6 nd_neighbor_advert");
    wait_until("it is found", FOUND, || entry().contains(mac));
}

/// Of IPv6, a gateway does not learn of it by what the kernel asks without a packet.
#[test]
fn a_gateway_learns_of_another_address_of_this_hosts_device() {
    let net = Net::new();
    net.client.mountain_ok("up");
    net.wait_good();
    for (n, own) in [(1, "10.30.1.1"), (2, "fd30:1::1")] {
        let known = || net.server.ip(&format!("neigh show {own} dev s1"));
        assert_has(&known(), &["lladdr"]);
        let mac = format!("02:00:00:00:02:0{n}");
        net.client.ip(&format!("link set u1 address {mac}"));
        wait_until("the gateway knows it", FOUND, || known().contains(&mac));
        // Of two changes within milliseconds the daemon may see one.
        thread::sleep(Duration::from_secs(1));
    }
}

/// The kernel would ask with an address of another device, which the gateway would look for here from then on.
#[test]
fn a_device_that_has_lost_its_address_asks_with_no_other_ones() {
    let net = Net::new();
    net.client.mountain_ok("up");
    net.wait_good();
    let rule = "iifname s1 arp saddr ip != 10.30.1.0/24 counter";
    (net.server).chain("arp t in", "filter hook input priority 0", rule);
    for _ in 0..3 {
        net.client.ip("addr del 10.30.1.1/24 dev u1");
        thread::sleep(Duration::from_secs(2));
        assert_eq!(net.server.counted("chain arp t in"), [0]);
        net.client.ip("addr add 10.30.1.1/24 dev u1");
        thread::sleep(Duration::from_millis(500));
    }
}
