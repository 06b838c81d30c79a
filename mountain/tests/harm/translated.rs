// SPDX-License-Identifier: GPL-2.0-or-later
//! What NAT has given another address, or has not, leaves where that address is right.

use std::collections::BTreeSet;
use std::net::{IpAddr, TcpStream, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use super::placement::{listener, masquerade, seen, set, sockets, two_providers, up, U0, U1};
use super::random::rig::flush_conntrack;
use super::redirect_flood::ask_tcp;
use crate::support::*;

/// Enough that a choice between two uplinks would show.
const FLOWS: u8 = 16;

/// A socket with u1's address, which the kernel sends by u0, translated, goes on so when Mountain starts.
fn goes_on(net: &Net, server: &str, local: &str, translated: &str) -> (UdpSocket, UdpSocket) {
    let (server, socket) = (listener(net, server), net.client.udp(local));
    let before = seen(&server, &socket, 0);
    assert_eq!(before.ip().to_string(), translated);
    up(net);
    for n in 1..6 {
        assert_eq!(seen(&server, &socket, n), before, "after the start");
    }
    (server, socket)
}

#[test]
fn a_running_connection_that_is_translated_goes_on() {
    let net = two_providers();
    masquerade(&net.client, "ip", "oifname { u0, u1 }");
    let (server, socket) = goes_on(&net, SERVER4, "10.30.1.1:0", U0);
    let held = || net.client.status().placement.unwrap().held_addresses;
    assert_eq!(held(), [IpAddr::from([10, 30, 1, 1])]);
    // Datagrams cannot be led to u1 without its rule, connections can.
    for (n, new) in (0..).zip(sockets(&net, 0)) {
        assert_eq!(seen(&server, &new, n).ip().to_string(), U0);
    }
    let connected = |n| {
        let new = sockets(&net, 0).remove(0);
        new.connect((SERVER4, 5353)).unwrap();
        new.send(&[n]).unwrap();
        let (_, from) = server.recv_from(&mut [0; 1]).expect("it arrives");
        from.ip().to_string()
    };
    let sources: BTreeSet<String> = (0..FLOWS).map(connected).collect();
    assert!(sources.contains(U1), "{sources:?}");
    // Its end gives the address its rule.
    drop(socket);
    wait_until("10.30.1.1 has its rule", 3 * LEAVE, || {
        net.client.with(flush_conntrack);
        held().is_empty() && net.client.ip("rule").contains("from 10.30.1.1")
    });
}

#[test]
fn a_running_connection_over_ipv6_that_is_translated_goes_on() {
    let net = two_providers();
    for (i, metric) in [(0, 100), (1, 600)] {
        let line = format!("-6 route add default via fd30:{i}::2 dev u{i} metric {metric}");
        net.client.ip(&line);
    }
    net.client.ip("-6 addr del fd98:0::1/128 dev lo");
    masquerade(&net.client, "ip6", "oifname { u0, u1 }");
    goes_on(&net, SERVER6, "[fd30:1::1]:0", "fd30::1");
}

/// The kernel chooses anew for each socket once IPv6 has a rule; what it has given the address of one next hop would
/// come, translated, by the other one.
#[test]
fn connections_by_a_multipath_route_of_ipv6_go_on_while_something_is_translated() {
    let net = two_providers();
    let client = &net.client;
    client.ip("-6 addr del fd98:0::1/128 dev lo");
    client.ip("-6 route add default nexthop via fd30:0::2 dev u0 nexthop via fd30:1::2 dev u1");
    masquerade(client, "ip6", "oifname { u0, u1 }");
    let server = listener(&net, SERVER6);
    let mut sockets = (0..FLOWS).map(|_| client.udp("[fd30:1::1]:0"));
    let is_translated = |s: &UdpSocket| seen(&server, s, 0).ip().to_string() == "fd30::1";
    let translated = sockets.find(is_translated).expect("one is by u0");
    let at = net.server.listen(&format!("[{SERVER6}]:5354"));
    let connect = || {
        let stream = client.connect(&at.local_addr().unwrap().to_string());
        (stream, at.accept().unwrap().0)
    };
    let mut streams: Vec<(TcpStream, TcpStream)> = (0..FLOWS).map(|_| connect()).collect();
    up(&net);
    let exchanges: Vec<UdpSocket> = (0..FLOWS).map(|_| client.udp("[::]:0")).collect();
    let seen_all = |n| -> Vec<_> { exchanges.iter().map(|s| seen(&server, s, n)).collect() };
    let before = seen_all(1);
    let held = || client.status().placement.unwrap().held_addresses;
    assert_eq!(
        held(),
        ["fd30::1", "fd30:1::1"].map(|a| a.parse::<IpAddr>().unwrap())
    );
    for (near, far) in &mut streams {
        ask_tcp(near, far, "a running connection");
    }
    let rules = || client.ip("-6 rule");
    assert!(!rules().contains("fd30"), "{}", rules());
    // Of IPv4 nothing is held.
    assert!(client.ip("rule").contains("from 10.30.1.1"));
    drop(translated);
    wait_until("IPv6 has its rules", 3 * LEAVE, || {
        client.with(flush_conntrack);
        held().is_empty() && rules().contains("from fd30:1::1")
    });
    for (near, far) in &mut streams {
        ask_tcp(near, far, "a running connection");
    }
    net.client.wait_settled();
    assert_eq!(seen_all(2), before);
}

/// The other uplink translates it while its own one has no route, and no datagram is the last one.
#[test]
fn a_flow_without_a_connection_holds_an_address_that_came_back_for_a_while() {
    let net = two_providers();
    let client = &net.client;
    // Not masqueraded: the kernel itself ends such an entry where its packets leave by another device.
    let rule = format!("oifname u0 snat to {U0}");
    client.chain("ip n post", "nat hook postrouting priority 100", &rule);
    up(&net);
    client.ip("route del default dev u1");
    let has_rule = || client.ip("rule").contains("from 10.30.1.1");
    wait_until("its rule is gone", LEAVE, || !has_rule());
    let (server, socket) = (listener(&net, SERVER4), client.udp("10.30.1.1:0"));
    assert_eq!(seen(&server, &socket, 0).ip().to_string(), U0);
    client.ip("route add default via 10.30.1.2 dev u1 metric 600");
    let held = || client.status().placement.unwrap().held_addresses;
    wait_until("it is held", LEAVE, || {
        assert_eq!(seen(&server, &socket, 1).ip().to_string(), U0);
        held() == [IpAddr::from([10, 30, 1, 1])]
    });
    let began = Instant::now();
    client.mountain_says("status", "left alone: packets from 10.30.1.1");
    server.set_read_timeout(Some(HALF)).unwrap();
    wait_until("it goes on from its own address", 2 * LEAVE, || {
        socket.send_to(&[2], server.local_addr().unwrap()).unwrap();
        let received = server.recv_from(&mut [0; 1]);
        received.is_ok_and(|(_, from)| from.ip().to_string() == U1)
    });
    assert!(began.elapsed() > Duration::from_secs(20), "{began:?}");
    assert!(held().is_empty() && has_rule());
}

/// Addresses that the server sees of flows that begin behind the client now.
fn begun(server: &UdpSocket, lan: &Ns, address: &str) -> BTreeSet<String> {
    let begin = |n| {
        let socket = lan.udp(&format!("{address}:0"));
        seen(server, &socket, n).ip().to_string()
    };
    (0..FLOWS).map(begin).collect()
}

/// Flows from these addresses behind the client are not translated, and none of them leaves by u1.
fn assert_kept(net: &Net, server: &UdpSocket, lan: &Ns, addresses: &[&str]) {
    let rule = format!("ip saddr {{ {} }} iifname s1 counter", addresses.join(", "));
    net.server
        .chain("ip t c", "filter hook prerouting priority 0", &rule);
    for address in addresses {
        assert_eq!(begun(server, lan, address), set(&[address]));
    }
    assert_eq!(net.server.counted("chain ip t c"), [0], "{addresses:?}");
}

#[test]
fn forwarded_flows_leave_no_uplink_untranslated() {
    let net = two_providers();
    let (server, lan) = (listener(&net, SERVER4), net.inner());
    lan.bring_up("lo", &["10.30.0.60/32"]);
    masquerade(&net.client, "ip", "oifname u0");
    up(&net);
    assert_eq!(begun(&server, &lan, "10.50.0.2"), set(&[U0]));
    // Where both translate, new flows choose, and from then on nothing leaves untranslated either.
    net.client.run("nft delete table ip n");
    let inner = "ip saddr 10.50.0.0/15 oifname { u0, u1 }";
    masquerade(&net.client, "ip", inner);
    wait_until("forwarded flows choose", 3 * LEAVE, || {
        begun(&server, &lan, "10.50.0.2") == set(&[U0, U1])
    });
    // What has an uplink's own address, and is not translated, is right there only.
    assert_kept(&net, &server, &lan, &["10.30.0.60"]);
}

/// As a router behind one of the uplinks does it for a network that is routed here, beside containers of this host.
#[test]
fn flows_that_nobody_here_translates_are_left_to_the_kernel() {
    let net = two_providers();
    let (server, lan) = (listener(&net, SERVER4), net.inner());
    lan.bring_up("lo", &["10.41.0.2/32", "10.42.0.2/32"]);
    net.client.ip("route add 10.41.0.0/24 via 10.50.0.2");
    net.client.ip("route add 10.42.0.2 via 10.50.0.2");
    // Flows from behind a tunnel are not met, however many networks there are.
    net.client.ip("tuntap add t0 mode tun");
    net.client.ip("link set t0 up");
    let tunnelled = (0..70).map(|n| format!("route add 10.0.{n}.0/24 dev t0"));
    net.client.ip_batch(tunnelled);
    // As Docker writes it.
    let containers = "ip saddr 10.41.0.0/24 oifname != lan";
    masquerade(&net.client, "ip", containers);
    // Of ways back into the network, of another one's, and of single ports.
    for rule in [
        "ip saddr 10.50.0.0/24 ip daddr 10.50.0.2 tcp dport 443 masquerade",
        "ct status dnat masquerade",
        "iifname d9 masquerade",
        "ip saddr 10.50.0.0/24 tcp dport 25 masquerade",
    ] {
        net.client.run(&format!("nft add rule ip n post {rule}"));
    }
    up(&net);
    assert_eq!(begun(&server, &lan, "10.41.0.2"), set(&[U0, U1]));
    assert_kept(&net, &server, &lan, &["10.50.0.2", "10.42.0.2"]);
    let said = ["from 10.42.0.0/24, 10.50.0.0/24: the firewall does not translate all of them"];
    assert_has(&net.client.status().placement.unwrap().left[0], &said);
    assert_has(&stdout(&net.client.mountain("check --adopt")), &said);
}

/// Has a rule lead packets to the server by u0 alone.
fn lead_by_u0(net: &Net, rule: &str) {
    let route = "route add 203.0.113.0/24 via 10.30.0.2 dev u0 src 10.98.0.1 table 100";
    net.client.ip(route);
    let rule = format!("rule add priority 100 {rule} lookup 100");
    net.client.ip(&rule);
}

/// The traffic, which a rule leads, does not leave by u1 when u0 loses all of it.
#[track_caller]
fn assert_led(net: &Net, traffic: &Traffic) {
    let by_u0 = || {
        let counts = traffic.during(HALF);
        counts.by_path[1] == 0 && counts.nearly_all_arrived()
    };
    wait_until("the rule leads all by u0", LEAVE, by_u0);
    net.lose(0);
    let counts = traffic.during(HALF);
    assert!(counts.sent > 0);
    assert_eq!(counts.by_path[1], 0, "{counts:?}");
}

/// The rule has seen the source before NAT. The new one is an address of the client on no uplink, which may move.
#[test]
fn flows_that_a_rule_leads_by_their_source_stay_once_it_is_translated() {
    let net = Net::new();
    let (client, lan) = (&net.client, net.inner());
    lan.bring_up("lo", &["10.51.0.2/32"]);
    client.ip("addr add 10.98.0.7/32 dev lo");
    lead_by_u0(&net, "from 10.50.0.0/24");
    // Not our probes.
    let rule = "oifname { u0, u1 } ip saddr 10.50.0.0/15 snat to 10.98.0.7";
    client.chain("ip n post", "nat hook postrouting priority 100", rule);
    net.steer();
    let from = |source| Traffic::between(&lan, &net.server, SERVER4, 20, Some(source));
    let led = from("10.50.0.2");
    assert_led(&net, &led);
    drop(led);
    let free = from("10.51.0.2");
    wait_until("sources that no rule leads move", 2 * LEAVE, || {
        free.during(HALF).nearly_all_arrived()
    });
}

/// The rule has seen the source of an answer before NAT gives it the address that was asked.
#[test]
fn answers_that_a_rule_leads_by_their_source_stay_once_it_is_translated() {
    let net = Net::new();
    let (client, lan) = (&net.client, net.inner());
    lead_by_u0(&net, "from 10.50.0.0/24");
    let rule = "ip daddr 10.98.0.1 udp dport 7100 dnat to 10.50.0.2:7200";
    client.chain("ip n pre", "nat hook prerouting priority -100", rule);
    net.steer();
    let (asks, answers) = (net.server.udp("203.0.113.1:0"), lan.udp("10.50.0.2:7200"));
    asks.connect("10.98.0.1:7100").unwrap();
    asks.send(&[1]).unwrap();
    let (_, asker) = answers.recv_from(&mut [0; 1]).expect("it is asked");
    let is_answered = || {
        answers.send_to(&[2], asker).unwrap();
        asks.recv(&mut [0; 1]).is_ok()
    };
    assert!(is_answered());
    net.lose(0);
    asks.set_read_timeout(Some(HALF)).unwrap();
    assert!(!is_answered(), "by u1");
}

/// The kernel routes what a socket sends again where DNAT changes its address, not where it changes its port alone.
#[test]
fn flows_that_a_rule_leads_by_their_port_stay_once_it_is_translated() {
    let net = Net::new();
    lead_by_u0(&net, "ipproto udp dport 7000");
    let there = "ip daddr 203.0.113.1 udp dport 7000 dnat to :7001";
    (net.client).chain("ip n out", "nat hook output priority -100", there);
    let back = "ip daddr 203.0.113.1 udp dport 7001 dnat to :7000";
    (net.server).chain("ip n pre", "nat hook prerouting priority -100", back);
    net.steer();
    assert_led(&net, &Traffic::start(&net, SERVER4, 20));
}

/// By way of a VPN's halves of the Internet every address seems to be behind the tunnel.
#[test]
fn translated_flows_stay_although_a_tunnel_has_all_the_internet() {
    let net = Net::new();
    let client = &net.client;
    client.wire(("d0", &[]), client, ("d1", &[]));
    client.ip("route add 0.0.0.0/1 dev d0");
    client.ip("route add 128.0.0.0/1 dev d0");
    let rule = "oifname { u0, u1 } udp dport 7000 snat to 192.0.2.77";
    client.chain("ip n post", "nat hook postrouting priority 100", rule);
    net.steer();
    let traffic = Traffic::start(&net, SERVER4, 20);
    wait_until("their source is judged", LEAVE, || {
        !client.status().translated_sources.is_empty()
    });
    net.lose(0);
    thread::sleep(HALF);
    traffic.during(HALF).assert_lost("translated flows stay");
}

/// Addresses of a network that a provider has given, by a local route instead of one by one: they are right on its uplink
/// alone. Those of a network of the host's own may move.
#[test]
fn a_source_that_a_local_route_brings_here_stays_in_its_uplinks_network() {
    const PORTS: [u16; 2] = [7301, 7302];
    let net = Net::new();
    let sources = [
        ("10.30.0.64/26", "10.30.0.70:0"),
        ("192.0.2.64/26", "192.0.2.70:0"),
    ];
    let rules = PORTS.map(|port| format!("iifname s1 udp dport {port} counter\n"));
    let hook = "filter hook prerouting priority -300";
    net.server.chain("inet q in", hook, &rules.concat());
    let mut sockets = Vec::new();
    for ((network, source), port) in sources.into_iter().zip(PORTS) {
        net.client.ip(&format!("route add local {network} dev lo"));
        for _ in 0..FLOWS {
            let socket = net.client.udp(source);
            socket.connect((SERVER4, port)).unwrap();
            sockets.push(socket);
        }
    }
    net.client.mountain_ok("up");
    net.wait_good();
    let send = |rounds| {
        for _ in 0..rounds {
            sockets.iter().for_each(|s| drop(s.send(b"x")));
            thread::sleep(Duration::from_millis(20));
        }
    };
    let by_u1 = || {
        let counted = || net.server.counted("chain inet q in");
        let before = counted();
        send(20);
        thread::sleep(HALF);
        let after = counted();
        [after[0] - before[0], after[1] - before[1]]
    };
    // Until the sources are judged.
    send(150);
    let all = 20 * u64::from(FLOWS);
    let healthy = by_u1();
    assert!(healthy[0] < all, "the test proves nothing: {healthy:?}");
    net.blackhole(0);
    wait_until("those that may leave have left", LEAVE, || {
        by_u1()[1] == all
    });
    let stayed = by_u1()[0];
    assert!(
        stayed <= healthy[0],
        "the others stay: {stayed}, {healthy:?}"
    );
}
