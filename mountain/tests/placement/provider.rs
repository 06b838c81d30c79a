// SPDX-License-Identifier: GPL-2.0-or-later
//! Two providers, and what only one of them may have: private networks, DNS servers, a site of this host's. Such flows are left to the kernel,
//! and so is MPTCP.

use std::net::SocketAddr;

use socket2::{Domain, Protocol, Socket, Type};

use crate::net::*;
use crate::support::*;

/// Destinations that the first provider leads to the server, and their ports.
const ITS_OWN: [(&str, u16); 7] = [
    ("192.168.100.1", PORT),
    ("fd98::1", PORT),
    ("64:ff9b::c633:6401", PORT),
    ("64:ff9b:1::c633:6401", PORT),
    (SERVER[0], 53),
    (SERVER[1], 853),
    (SERVER[0], 123),
];
/// Some that look like these.
const OTHERS: [&str; 2] = ["192.169.100.1", "64:ff9b:2::c633:6401"];

/// Has both providers lead all of these to the server: by which a flow came tells where it was placed.
fn lead_there(net: &Home) {
    let mut rules = String::new();
    let served = ITS_OWN.iter().map(|(address, _)| *address);
    for address in served.chain(OTHERS) {
        let (family, server) = match address.contains(':') {
            false => ("ip", SERVER[0]),
            true => ("ip6", SERVER[1]),
        };
        let to = match family {
            "ip" => format!("{server}:{PORT}"),
            _ => format!("[{server}]:{PORT}"),
        };
        rules += &format!("  {family} daddr {address} meta l4proto {{ tcp, udp }} dnat to {to}\n");
    }
    net.providers
        .chain("inet led in", "nat hook prerouting priority dstnat", &rules);
}

/// So many flows of each kind to each of them come by each uplink, forwarded ones too.
#[track_caller]
fn assert_placed(net: &Home, count: usize, by: [usize; 2]) {
    for (address, port) in ITS_OWN {
        for kind in KINDS {
            net.flows()
                .assert_opens_at(kind, count, (address, port), by);
        }
        for kind in ["tcp", "udp"] {
            let mut flows = net.inner_flows();
            flows.assert_opens_at(kind, count, (address, port), by);
        }
    }
}

fn lose_the_kernels_uplink(net: &Home) {
    net.blackhole(0);
    wait_until("the kernel's uplink is dead", LEAVE, || {
        let is_dead = |ipv6: bool| net.path(0, ipv6).judged.state == "dead";
        [false, true].into_iter().all(is_dead)
    });
}

#[test]
fn what_may_be_a_providers_own_is_left_to_the_kernel_while_its_uplink_is_alive() {
    let net = Home::new().with_lan().running();
    lead_there(&net);
    net.wait_forwarding();
    assert_placed(&net, 8, [8, 0]);
    let counted = net.counter("pass_provider");
    assert!(counted >= 7 * 5 * 8, "{counted}");
    let said = net.home.run(&format!("{MOUNTAIN} status"));
    let expected = "left to the kernel: flows to private networks, DNS and time servers";
    assert_has(&said, &[expected]);
    for address in SERVER.into_iter().chain(OTHERS) {
        net.flows().open_by_both(&KINDS, address);
        net.inner_flows().open_by_both(&["tcp", "udp"], address);
    }

    let mut resolver = net.flows();
    resolver.assert_opens_at("msg", 1, ITS_OWN[4], [1, 0]);
    let mut inner_resolver = net.inner_flows();
    inner_resolver.assert_opens_at("udp", 1, ITS_OWN[4], [1, 0]);
    lose_the_kernels_uplink(&net);
    assert_placed(&net, 4, [0, 4]);
    assert_eq!(by_uplink(&resolver.ask()), [0, 1]);
    wait_until("one that asks on leaves", LEAVE, || {
        by_uplink(&inner_resolver.ask()) == [0, 1]
    });
    net.no_blackhole();
    net.wait_good();
    assert_placed(&net, 8, [8, 0]);
    assert_eq!(by_uplink(&resolver.ask()), [1, 0], "a socket that asks on");
    assert_eq!(net.refused(), 0);
}

/// The provider of an uplink gives out a global address of IPv6 as well.
fn give_global(net: &Home, uplink: usize) {
    let net48 = format!("2001:db8:4{uplink}");
    net.providers
        .ip(&format!("-6 addr add {net48}::1/64 dev r{uplink} nodad"));
    let address = format!("{net48}::2");
    for rule in [
        format!("strict iifname r{uplink} ip6 saddr {address} accept"),
        format!("nat oifname w ip6 saddr {address} snat to 2001:db8:50::1{uplink}"),
    ] {
        net.providers
            .run(&format!("nft insert rule inet providers {rule}"));
    }
    net.home
        .ip(&format!("-6 addr add {address}/64 dev u{uplink} nodad"));
}

#[test]
fn an_uplink_without_a_global_address_gets_no_new_flow_while_another_one_has_one() {
    let net = Home::new().running();
    let open = |kind: &str| by_uplink(&net.flows().open(kind, EACH, SERVER[1]));
    give_global(&net, 0);
    for kind in KINDS {
        wait_until("new flows stay out of it", LEAVE, || {
            open(kind) == [EACH, 0]
        });
    }
    let status = stdout(&net.home.mountain("status"));
    let told =
        "u1: no new flow is placed there while another uplink is alive: it has only unique local";
    assert_has(&status, &[told]);
    let refused = net.refused();
    net.flows().open_by_both(&["tcp"], SERVER[0]);
    // Its router may translate, and no other one is left.
    lose_the_kernels_uplink(&net);
    for kind in KINDS {
        assert_eq!(open(kind), [0, EACH], "{kind}");
    }
    net.no_blackhole();
    net.wait_good();
    assert_eq!(open("tcp"), [EACH, 0]);
    give_global(&net, 1);
    wait_until("both are used", LEAVE, || open("tcp")[1] >= 8);

    // Another network of the first provider's, behind its router: its firewall takes nothing from outside.
    let its = "2001:db8:40:5::1";
    let rule = format!("ip6 daddr {its} dnat to [{}]:{PORT}", SERVER[1]);
    let rule = format!("meta l4proto {{ tcp, udp }} {rule}");
    let hook = "nat hook prerouting priority dstnat";
    net.providers.chain("inet led in", hook, &rule);
    for kind in KINDS {
        net.flows().assert_opens_at(kind, 8, (its, PORT), [8, 0]);
        net.flows().open_by_both(&[kind], SERVER[1]);
    }
    assert_eq!(net.refused(), refused);
}

#[test]
fn a_rule_decides_about_that_too() {
    let rules = "[[rule]]\nmatch = { ports = 53 }\nuse = \"steadiest\"\n\
                 [[rule]]\nmatch = { prefix = \"192.168.0.0/16\" }\nuse = \"u1\"\n";
    let net = Home::with_config(rules).running();
    lead_there(&net);
    for kind in KINDS {
        let opened = net.flows().open_at(kind, EACH, (SERVER[0], 53));
        assert_by_both(&opened);
        let mut flows = net.flows();
        flows.assert_opens_at(kind, 8, (ITS_OWN[0].0, PORT), [0, 8]);
        flows.assert_opens_at(kind, 8, (ITS_OWN[1].0, PORT), [8, 0]);
    }
}

/// Neither is a destination with a route of its own, nor one behind a default route with several next hops.
#[test]
fn other_routes_are_not_concerned() {
    let net = Home::new();
    lead_there(&net);
    let near = ITS_OWN[0].0;
    net.home
        .ip(&format!("route add {near} via 10.41.0.1 dev u1"));
    for family in ["-4", "-6"] {
        net.home.ip(&format!("{family} route flush default"));
    }
    net.home
        .ip("route add default nexthop via 10.40.0.1 dev u0 nexthop via 10.41.0.1 dev u1");
    net.home
        .ip("-6 route add default nexthop via fd40::1 dev u0 nexthop via fd41::1 dev u1");
    net.up();
    let mut flows = net.flows();
    for kind in KINDS {
        flows.assert_opens_at(kind, 8, (near, PORT), [0, 8]);
        for address in &ITS_OWN[1..] {
            assert_by_both(&net.flows().open_at(kind, EACH, *address));
        }
    }
    assert_eq!(net.counter("pass_provider"), 0);
    let said = net.home.run(&format!("{MOUNTAIN} status"));
    assert!(!said.contains("private networks"), "{said}");
}

/// Connections about packets that only the kernel places (of sockets with a port of their own, and of GRE), and those whose
/// peers know one address.
#[test]
fn signalling_goes_where_the_kernel_has_the_packets_that_it_is_about() {
    let net = Home::new().with_lan().running();
    lead_there(&net);
    net.wait_forwarding();
    for port in [25, 179, 554, 1720, 1723, 5060, 5061] {
        for server in SERVER {
            net.flows()
                .assert_opens_at("tcp", 8, (server, port), [8, 0]);
        }
    }
    assert_eq!(net.counter("pass_signalling"), 7 * 2 * 8);
    // As mtr and hping3 ask for the source of their raw packets, and others for this host's address.
    for port in [1, 9, 80, 10_002, 11_111, 65_530] {
        for server in SERVER {
            let (mut flows, to) = (net.flows(), (server, port));
            flows.assert_opens_at("udp", 8, to, [8, 0]);
            assert_by_both(&flows.open_at("tcp", EACH, to));
        }
    }
    // Other forwarded datagrams are placed as the signalling is, whichever port they are from.
    let forwarded = |port| net.inner_flows().open_at("tcp", EACH, (SERVER[0], port));
    assert_eq!(by_uplink(&forwarded(1723)), [EACH, 0]);
    // The other end of a tunnel knows one address: of ipip, 6in4, GRE, ESP.
    for protocol in [4, 41, 47, 50] {
        let sent = sent_by_uplink(&net, protocol, protocol);
        assert_eq!(sent, [EACH as u64, 0], "{protocol}");
    }
    assert_eq!(udp_lite_by_uplink(&net), [2 * EACH as u64, 0]);
    // Nor does anybody take mail from an address that its domain does not name.
    assert_eq!(by_uplink(&forwarded(25)), [EACH, 0]);
    assert_by_both(&forwarded(5060));
    assert_by_both(&net.flows().open_at("udp", EACH, (SERVER[0], 1723)));
    lose_the_kernels_uplink(&net);
    net.flows()
        .assert_opens_at("tcp", 8, (SERVER[0], 5060), [0, 8]);
    for protocol in [47, 50] {
        let sent = sent_by_uplink(&net, protocol, 100 + protocol);
        assert_eq!(sent, [0, EACH as u64], "{protocol}");
    }
}

/// Packets of a protocol that leave by each uplink while this sends some.
fn counted_by_uplink(net: &Home, protocol: u8, send: impl FnOnce()) -> [u64; 2] {
    // Not at home, where nothing is placed while a new ruleset is read.
    let counts = [0, 1].map(|i| format!("meta l4proto {protocol} iifname r{i} counter"));
    let at = "filter hook prerouting priority -350";
    (net.providers).chain("inet sent in", at, &counts.join("\n"));
    send();
    let counted = net.providers.counted("chain inet sent in");
    net.providers.run("nft delete table inet sent");
    counted.try_into().unwrap()
}

/// The same of UDP-Lite from this host, by connected sockets and others.
fn udp_lite_by_uplink(net: &Home) -> [u64; 2] {
    let program = format!(
        "from socket import *
for n in range({EACH}):
    to = ('192.0.2.%d' % (n + 1), {PORT})
    lite = [socket(AF_INET, SOCK_DGRAM, 136) for _ in range(2)]
    lite[0].connect(to)
    lite[0].send(b'lite')
    lite[1].sendto(b'lite', to)
"
    );
    counted_by_uplink(net, 136, || {
        let mut python = net.placed(&net.home, "python3");
        assert!(python.args(["-c", &program]).status().unwrap().success());
    })
}

/// The same of some from the network behind, to as many addresses from this one on.
fn sent_by_uplink(net: &Home, protocol: u8, first: u8) -> [u64; 2] {
    let send = || {
        let protocol = Protocol::from(i32::from(protocol));
        let socket = Socket::new(Domain::IPV4, Type::RAW, Some(protocol)).unwrap();
        for n in 0..EACH as u8 {
            let to = SocketAddr::from(([192, 0, 2, first + n], 0));
            // Of GRE: with a key.
            let packet = [0x30, 1, 0x88, 0x0b, 0, 0, 0, n];
            socket.send_to(&packet, &to.into()).unwrap();
        }
    };
    counted_by_uplink(net, protocol, || net.lan.as_ref().unwrap().with(send))
}

/// Two next hops of one route: the kernel has one address for one server, of all kinds (of IPv4).
#[test]
fn where_the_kernel_takes_several_signalling_and_what_it_is_about_have_one_address() {
    let net = Home::by_default("");
    let to = format!("{}:{PORT}", SERVER[0]);
    let rule = format!("ip daddr 192.0.2.0/24 meta l4proto {{ tcp, udp }} dnat to {to}");
    net.providers
        .chain("inet led in", "nat hook prerouting priority dstnat", &rule);
    net.home.ip("route flush default");
    net.home
        .ip("route add default nexthop via 10.40.0.1 dev u0 nexthop via 10.41.0.1 dev u1");
    net.up();
    let mut by = [0; 2];
    for n in 11..=30 {
        let server = format!("192.0.2.{n}");
        let media =
            net.flows()
                .open_with("udp", 1, &server, &format!("bind=0.0.0.0/{}", 20_000 + n));
        let signalling = net.flows().open_at("tcp", 1, (&server, 5060));
        let uplinks = [media, signalling].map(|flows| by_uplink(&flows));
        assert_eq!(uplinks[0], uplinks[1], "{server}");
        by[uplinks[0][1]] += 1;
    }
    assert!(by.iter().all(|n| *n > 0), "{by:?}");
    assert_eq!(net.counter("pass_signalling"), 20);
    net.blackhole(0);
    wait_until("an uplink is dead", LEAVE, || {
        net.path(0, false).judged.state == "dead"
    });
    for n in 11..=30 {
        let server = format!("192.0.2.{n}");
        net.flows()
            .assert_opens_at("tcp", 1, (&server, 5060), [0, 1]);
    }
}

/// As of who connects to several from one port, through the NAT of others.
#[test]
fn connections_from_a_port_of_their_own_are_the_kernels() {
    let net = Home::new().running();
    let from = |first: u32| {
        let (mut flows, mut opened) = (net.flows(), Vec::new());
        let mut open = |port: u32| {
            for (kind, server, any) in [("tcp", 0, "0.0.0.0"), ("tcp", 1, "::")] {
                let bind = format!("bind={any}/{}", port + 100 * server as u32);
                opened.extend(flows.open_with(kind, 1, SERVER[server], &bind));
            }
        };
        (first..first + 10).for_each(&mut open);
        by_uplink(&opened)
    };
    assert_eq!(from(41_000), [20, 0]);
    assert_eq!(net.counter("pass_port"), 20);
    lose_the_kernels_uplink(&net);
    assert_eq!(from(42_000), [0, 20]);
}

/// A game's server is listed with the address that its heartbeats come from.
#[test]
fn hosts_to_which_ports_are_forwarded_send_from_these_by_the_kernels_uplink() {
    let net = Home::new().with_lan().running();
    net.wait_forwarding();
    let from = |first: u32, server: usize| {
        let (mut flows, mut opened) = (net.inner_flows(), Vec::new());
        for port in first..first + EACH as u32 {
            let bind = format!("bind={}/{port}", ["0.0.0.0", "::"][server]);
            opened.extend(flows.open_with("udp", 1, SERVER[server], &bind));
        }
        opened
    };
    assert_by_both(&from(27_000, 0));
    let forward = "iifname u0 udp dport 27015 dnat ip to 192.168.7.100-192.168.7.200";
    net.home.chain(
        "inet games pre",
        "nat hook prerouting priority dstnat",
        forward,
    );
    // A port that was used before has its connection still.
    let mut fresh = (10_000..26_000).step_by(EACH);
    wait_until("the rule is met", LEAVE, || {
        by_uplink(&from(fresh.next().unwrap(), 0)) == [EACH, 0]
    });
    assert_by_both(&from(27_000, 1));
    assert_by_both(&from(40_000, 0));
    lose_the_kernels_uplink(&net);
    assert_eq!(by_uplink(&from(28_000, 0)), [0, EACH]);
    net.no_blackhole();
    net.wait_good();
    // Of a host that is named all datagrams count, wherever they are from, and of others none.
    for (host, expected) in [("192.168.7.2", Some([EACH, 0])), ("192.168.7.3", None)] {
        let forward = format!("iifname u0 udp dport 27015 dnat ip to {host}");
        net.home.run("nft delete table inet games");
        net.home.chain(
            "inet games pre",
            "nat hook prerouting priority dstnat",
            &forward,
        );
        let mut fresh = (40_000..60_000).step_by(EACH);
        wait_until("the rule is met", LEAVE, || {
            let by = by_uplink(&from(fresh.next().unwrap(), 0));
            expected.map_or(by[0] > 0 && by[1] > 0, |expected| by == expected)
        });
    }
    assert_by_both(&from(29_000, 0));
}

/// What keeps the address of a name up to date, or a service's list, asks a server for it by TCP.
#[test]
fn hosts_to_which_ports_are_forwarded_have_the_address_by_which_they_are_reached() {
    let net = Home::by_default("").with_lan().running();
    net.wait_forwarding();
    let lan = net.lan.as_ref().unwrap();
    let hosts = 11..=22;
    for host in hosts.clone() {
        lan.ip(&format!("addr add 192.168.7.{host}/24 dev e0"));
    }
    let second = |kind: &'static str| {
        let by_second = |host: &i32| {
            let mut flows = net.inner_flows();
            let opened = flows.open_with(kind, 1, SERVER[0], &format!("bind=192.168.7.{host}"));
            by_uplink(&opened) == [0, 1]
        };
        hosts.clone().filter(by_second).collect::<Vec<i32>>()
    };
    let before = second("tcp");
    assert!((2..12).contains(&before.len()), "{before:?}");
    let (published, others) = before.split_at(1);
    let forward = format!(
        "iifname u0 tcp dport 443 dnat ip to 192.168.7.{}",
        published[0]
    );
    net.home.chain(
        "inet games pre",
        "nat hook prerouting priority dstnat",
        &forward,
    );
    wait_until("the rule is met", LEAVE, || second("tcp") == others);
    assert_eq!(second("udp"), others);
    let left = net.home.status().placement.unwrap().left.join("\n");
    let named = format!("those from 192.168.7.{} by the uplink", published[0]);
    assert_has(&left, &[&named]);
    lose_the_kernels_uplink(&net);
    assert_eq!(second("tcp").len(), hosts.clone().count());
}

#[test]
fn mptcp_starts_where_the_kernel_has_it() {
    let net = Home::new().running();
    for server in SERVER {
        net.flows().assert_opens("mptcp", EACH, server, [EACH, 0]);
    }
    assert_eq!(net.counter("pass_mptcp"), 2 * EACH as u64);
    net.flows().open_by_both(&["tcp"], SERVER[0]);
    lose_the_kernels_uplink(&net);
    net.flows().assert_opens("mptcp", 8, SERVER[0], [0, 8]);
}

/// The uplink of each of twelve peers: all of its flows take it, of any kind.
#[track_caller]
fn uplinks_of(flows_with: &dyn Fn(u8, &str) -> Vec<Seen>) -> Vec<usize> {
    let uplink = |peer: u8| {
        let opened = KINDS.map(|kind| by_uplink(&flows_with(peer, kind)));
        let uplink = usize::from(opened[0][0] == 0);
        assert_eq!(opened, [[[3, 0], [0, 3]][uplink]; 3], "{peer}");
        uplink
    };
    (11..=22).map(uplink).collect()
}

/// All that this host sends to one server comes from one address: some servers want that. All that a host behind it sends to
/// any does: others find it by the address that one server has seen (STUN, RFC 8489).
#[test]
fn one_server_and_one_inner_host_have_one_uplink() {
    let net = Home::by_default("").with_lan().running();
    net.wait_forwarding();
    net.with_peers(11..=22);
    let own = |peer: u8, kind: &str| net.flows().open(kind, 3, &format!("192.0.2.{peer}"));
    let inner = |peer: u8, kind: &str| {
        let (mut flows, bind) = (net.inner_flows(), format!("bind=192.168.7.{peer}"));
        let servers = ["192.0.2.1", "192.0.2.2", "192.0.2.3"];
        let opened = servers.map(|server| flows.open_with(kind, 1, server, &bind));
        opened.concat()
    };
    let all = || [uplinks_of(&own), uplinks_of(&inner)];
    let before = all();
    for uplinks in &before {
        let second = uplinks.iter().sum::<usize>();
        assert!((1..12).contains(&second), "peers differ: {uplinks:?}");
    }
    net.home.mountain_ok("down");
    net.up();
    net.wait_forwarding();
    assert_eq!(all(), before, "a restart changes nobody's uplink");
}
