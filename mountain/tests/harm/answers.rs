// SPDX-License-Identifier: GPL-2.0-or-later
//! Uplinks that the firewall treats otherwise than the one that the kernel takes: by answers, later packets, addresses, or
//! what it leads elsewhere.

use crate::placement::{
    begun, left, lose_preferred, machine_behind, set, set_of, sockets_of, sources, two_providers,
    up, SOCKETS, U0, U1,
};
use crate::support::{assert_has, config, stdout, wait_until, LEAVE, SERVER4};

/// Sentences of `check`: this host's new flows, those from behind it, and all forwarded ones are left.
const OWN: &str = "new connections are left to the kernel";
const BEHIND: &str = "10.40.0.0/24: the firewall does not let them leave by all";
const NO_MARKS: &str =
    "forwarded connections are left to the kernel: the firewall sets or reads the marks of frames";

/// Tables, and which of these parts `check` says with each.
const CASES: [(&str, &[&str]); 24] = [
    // Only the kernel's uplink may be answered by.
    ("table inet t { chain c { type filter hook forward priority 0; policy drop;\niifname n0 accept\niifname u0 ct state established,related accept\n} }", &[BEHIND]),
    ("table inet t { chain c { type filter hook input priority 0; policy drop;\niifname { lo, n0 } accept\niifname u0 ct state established accept\n} }", &[OWN]),
    ("table inet t { chain c { type filter hook input priority 0; policy drop;\niifname u0 udp sport { 53, 443 } accept\n} }", &[OWN]),
    ("table inet t { chain c { type filter hook prerouting priority raw;\niifname u1 udp dport > 1024 drop\n} }", &[OWN, BEHIND]),
    ("table inet t { chain c { type filter hook prerouting priority raw;\nip daddr 10.30.1.1 drop\n} }", &[OWN, BEHIND]),
    ("table inet t { chain c { type filter hook input priority 0;\nip daddr 10.30.1.1 drop\n} }", &[OWN]),
    ("table inet t { chain c { type filter hook prerouting priority raw;\niifname u1 notrack\n} }", &[OWN, BEHIND]),
    ("table inet t { chain c { type filter hook prerouting priority raw;\niifname u1 ct zone set 2\n} }", &[OWN, BEHIND]),
    ("table netdev t { chain c { type filter hook ingress device u1 priority 0;\nmeta l4proto tcp drop\n} }", &[OWN, BEHIND]),
    // As routers mostly have it.
    ("table inet t { chain i { type filter hook input priority 0; policy drop;\nct state vmap { established : accept, related : accept, invalid : drop }\n\
      iifname { lo, n0 } accept\niifname u0 tcp dport 22 accept\n}\n\
      chain f { type filter hook forward priority 0; policy drop;\nct state established,related accept\niifname n0 accept\n\
      iifname u0 ip daddr 10.40.0.9 tcp dport 80 accept\n} }", &[]),
    ("table inet t { chain i { type filter hook input priority 0;\niifname u0 tcp dport { 22, 80 } drop\niifname u1 ip saddr 192.0.2.9 drop\n} }", &[]),
    // Later packets.
    ("table inet t { chain c { type filter hook forward priority 0;\noifname u1 ct state established drop\n} }", &[BEHIND]),
    // By address instead of device.
    ("table inet t { chain c { type filter hook output priority 0;\nip saddr 10.30.1.1 udp dport != 53 drop\n} }", &[OWN]),
    ("table inet t { chain c { type filter hook postrouting priority 150;\nip saddr != 10.30.0.1 oifname { u0, u1 } drop\n} }", &[OWN, BEHIND]),
    // One address on all uplinks.
    ("table ip t { chain c { type nat hook postrouting priority 99;\nip daddr 8.8.8.8 snat to 10.30.0.1\n} }", &[OWN]),
    ("table ip t { chain c { type nat hook postrouting priority 99;\nip daddr 192.168.0.0/16 snat to 10.30.0.1\n} }", &[]),
    // Elsewhere.
    ("table ip t { chain c { type nat hook output priority -100;\noifname u0 tcp dport 80 redirect to :3128\n} }", &[OWN]),
    ("table ip t { chain c { type nat hook output priority -100;\ntcp dport 80 redirect to :3128\n} }", &[]),
    ("table inet t { chain c { type route hook output priority mangle;\noifname u0 meta mark set 7\n} }", &[OWN]),
    ("table inet t { chain c { type route hook output priority mangle;\nip saddr 10.30.0.1 meta mark set 7\n} }", &[OWN]),
    // At bridges.
    ("table bridge t { chain c { type filter hook prerouting priority 0;\nether type ip meta mark set 7\n} }", &[NO_MARKS]),
    ("table bridge t { chain c { type filter hook prerouting priority 0;\nether type arp drop\n} }", &[]),
    // About protocols that are not placed: keepalived has such a rule for its macvlan.
    ("table ip t { chain c { type filter hook output priority 0;\noifname u1 ip protocol { igmp, vrrp } drop\n} }", &[]),
    ("table ip t { chain c { type filter hook output priority 0;\noifname u1 ip protocol { igmp, udp } drop\n} }", &[OWN]),
];

#[test]
fn an_uplink_that_the_firewall_treats_otherwise_is_found() {
    let net = two_providers();
    let _lan = machine_behind(&net);
    let client = &net.client;
    client.ip("link add br0 type bridge");
    client.ip("rule add fwmark 7/0xff lookup 100");
    for (table, expected) in CASES {
        client.nft(table);
        let said = stdout(&client.mountain("check --adopt"));
        let found = [OWN, BEHIND, NO_MARKS].into_iter();
        let found: Vec<&str> = found.filter(|what| said.contains(what)).collect();
        assert_eq!(found, expected, "{table}\n{said}");
        let name = table.split_whitespace().nth(1).unwrap();
        client.run(&format!("nft delete table {name} t"));
    }
}

/// What the kernel prefers is in the table of that rule, such as a VPN.
#[test]
fn where_a_rule_takes_the_kernels_address_nothing_is_placed() {
    let net = two_providers();
    let lan = machine_behind(&net);
    net.client
        .ip("route add default via 10.30.1.2 dev u1 table 100");
    net.client.ip("rule add from 10.30.0.1 lookup 100");
    up(&net);
    let said = "new flows are left to the kernel: the routing rule of priority";
    net.client.mountain_says("status", said);
    assert_eq!(begun(&net), set(&[U0]));
    assert_eq!(sources(&net, &sockets_of(&lan)), [U0; SOCKETS]);
}

#[test]
fn an_uplink_that_does_not_forward_has_no_forwarded_flows() {
    let net = two_providers();
    let _lan = machine_behind(&net);
    let said = || stdout(&net.client.mountain("check --adopt"));
    let why = "forwarded connections are left to the kernel: u1 does not forward";
    assert!(!said().contains(why));
    net.client.sysctl("net.ipv4.conf.u1.forwarding", "0");
    let remedy = "`sysctl -w net.ipv4.conf.u1.forwarding=1`";
    assert_has(&said(), &[why, remedy]);
}

/// Rules of NAT for the network behind, and whether they translate all that it sends to the Internet.
const TRANSLATIONS: [(&str, bool); 37] = [
    ("oifname { u0, u1 } masquerade", true),
    ("oifname { u0, u1 } meta l4proto { tcp, udp } masquerade", false),
    // Some hosts.
    ("ip saddr 10.40.0.60-10.40.0.69 accept\noifname { u0, u1 } masquerade", false),
    ("ip saddr 10.40.0.64/26 accept\noifname { u0, u1 } masquerade", false),
    ("oifname { u0, u1 } ip saddr != 10.40.0.77 masquerade", false),
    ("oifname { u0, u1 } ip saddr { 10.40.0.0-10.40.0.59, 10.40.0.70-10.40.0.255 } masquerade", false),
    ("oifname { u0, u1 } ip saddr { 10.40.0.0-10.40.0.59, 10.40.0.60-10.40.0.255 } masquerade", true),
    ("ip saddr vmap { 10.40.0.8 : accept }\noifname { u0, u1 } masquerade", false),
    ("ip saddr 10.40.0.1 accept\noifname { u0, u1 } masquerade", false),
    ("ip saddr 10.40.0.1 snat to 10.30.0.1\noifname { u0, u1 } masquerade", false),
    ("ip saddr & 0.0.0.3 == 0.0.0.1 snat to 10.30.0.1\noifname { u0, u1 } masquerade", false),
    ("ip saddr { 10.41.0.0/24, 10.40.1.0/24 } accept\noifname { u0, u1 } masquerade", true),
    // Some destinations.
    ("ip daddr 8.8.0.0/16 accept\noifname { u0, u1 } masquerade", false),
    ("oifname { u0, u1 } ip daddr != { 8.8.0.0/16, 10.0.0.0/8 } masquerade", false),
    ("ip daddr { 10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16, 224.0.0.0/4 } accept\noifname { u0, u1 } masquerade", true),
    ("ip daddr 8.8.8.8 snat to 10.30.0.1\noifname { u0, u1 } masquerade", false),
    ("ip daddr 8.8.8.8 oifname u0 snat to 10.30.0.1\noifname { u0, u1 } masquerade", true),
    // Some ports.
    ("udp dport { 500, 4500 } accept\noifname { u0, u1 } masquerade", false),
    ("oifname { u0, u1 } tcp sport 1024-65535 masquerade\noifname { u0, u1 } meta l4proto != tcp masquerade", false),
    // Some hosts to some ports of some servers.
    ("ip saddr . ip daddr . tcp dport { 10.40.0.7 . 8.8.8.8 . 443 } accept\noifname { u0, u1 } masquerade", false),
    ("ip saddr 10.40.0.7 ip daddr 10.40.0.7 tcp dport 443 accept\noifname { u0, u1 } masquerade", true),
    // By mark, as of a firewall, and of Kubernetes.
    ("meta mark & 0xff == 7 accept\noifname { u0, u1 } masquerade", false),
    ("ct mark 7 accept\noifname { u0, u1 } masquerade", false),
    ("meta mark & 0x4000 == 0x4000 masquerade", false),
    ("meta mark & 0x4000 == 0x4000 masquerade\noifname { u0, u1 } masquerade", true),
    // By protocol.
    ("oifname { u0, u1 } ip protocol != udp masquerade", false),
    ("ip protocol { gre, esp } accept\noifname { u0, u1 } masquerade", true),
    ("meta l4proto sctp snat to 10.30.0.1\noifname { u0, u1 } masquerade", false),
    ("meta mark 1 snat to 10.30.0.1\nmeta mark 2 snat to 10.30.1.1\noifname { u0, u1 } masquerade", true),
    // What an IPsec policy takes goes by no route.
    ("rt ipsec exists accept\noifname { u0, u1 } masquerade", true),
    ("oifname { u0, u1 } rt ipsec missing masquerade", true),
    ("fib daddr type local accept\noifname { u0, u1 } masquerade", true),
    // What cannot be told.
    ("ip dscp ef accept\noifname { u0, u1 } masquerade", false),
    ("icmp type echo-request accept\noifname { u0, u1 } masquerade", false),
    ("ip saddr & 0.0.0.3 == 0.0.0.1 accept\noifname { u0, u1 } masquerade", false),
    ("ip daddr & 0.0.0.3 == 0.0.0.1 masquerade\noifname { u0, u1 } masquerade", true),
    ("ip dscp ef limit rate 5/second counter\noifname { u0, u1 } masquerade", true),
];

#[test]
fn a_network_of_which_something_is_not_translated_is_left() {
    let net = two_providers();
    let _lan = machine_behind(&net);
    for (rules, expected) in TRANSLATIONS {
        net.client.run("nft delete table ip n");
        (net.client).chain("ip n post", "nat hook postrouting priority 100", rules);
        let said = stdout(&net.client.mountain("check --adopt"));
        let left = "10.40.0.0/24: the firewall does not translate all of them";
        let placed = "forwarded connections choose their uplink too, from 1 inner device\n";
        assert_eq!(said.contains(placed), expected, "{rules}\n{said}");
        assert_eq!(!said.contains(left), expected, "{rules}\n{said}");
    }
}

/// Rules of iptables, before one that masquerades, and whether all is translated then.
const BY_IPTABLES: [(&str, bool); 6] = [
    ("-m policy --dir out --pol ipsec -j ACCEPT", true),
    ("-m policy --dir out --pol none -j ACCEPT", false),
    ("-p tcp -m multiport --dports 80,443 -j ACCEPT", false),
    ("-p tcp -m multiport --dports 80,443 -j MASQUERADE", true),
    (
        "-m iprange --src-range 10.40.0.60-10.40.0.69 -j ACCEPT",
        false,
    ),
    ("-m dscp --dscp 46 -j ACCEPT", false),
];

#[test]
fn the_same_by_iptables() {
    let net = two_providers();
    let _lan = machine_behind(&net);
    net.client.run("nft delete table ip n");
    for (rule, expected) in BY_IPTABLES {
        for rule in [rule, "-j MASQUERADE"] {
            let rule = format!("iptables-nft -t nat -A POSTROUTING {rule}");
            net.client.run(&rule);
        }
        let said = stdout(&net.client.mountain("check --adopt"));
        let left = "10.40.0.0/24: the firewall does not translate all of them";
        assert_eq!(!said.contains(left), expected, "{rule}\n{said}");
        net.client.run("iptables-nft -t nat -F");
    }
}

/// Rules may be about any of them, and one that is about a private one is no difference.
#[test]
fn an_uplink_with_several_addresses_is_asked_about_all() {
    let net = two_providers();
    let client = &net.client;
    client.ip("rule add fwmark 7/0xff lookup 100");
    for device in ["u0", "u1"] {
        client.ip(&format!("addr add 10.29.0.9/32 dev {device}"));
        for (rule, is_left) in [
            ("type route hook output priority mangle;\nip saddr 10.30.0.1 meta mark set 7", true),
            ("type filter hook output priority 0;\noifname { u0, u1 } ip saddr 10.29.0.0/16 drop", false),
        ] {
            client.nft(&format!("table inet t {{ chain c {{ {rule}\n}} }}"));
            let said = stdout(&client.mountain("check --adopt"));
            assert_eq!(said.contains(OWN), is_left, "{device}: {rule}\n{said}");
            client.run("nft delete table inet t");
        }
        client.ip(&format!("addr del 10.29.0.9/32 dev {device}"));
    }
}

/// What begins while it is the only one is bound to it, and nobody would hear an answer.
#[test]
fn an_uplink_that_is_left_alone_keeps_no_flow_whose_answers_may_not_come_in() {
    let net = two_providers();
    let lan = machine_behind(&net);
    net.client.nft(CASES[0].0);
    up(&net);
    let is_alone = || {
        net.client
            .status()
            .paths
            .iter()
            .filter(|path| !path.ipv6)
            .count()
            == 1
    };
    net.client.ip("route del default dev u0");
    wait_until("it is alone", LEAVE, is_alone);
    wait_until("that is said", LEAVE, || left(&net).contains(BEHIND));
    let begun = sockets_of(&lan);
    assert_eq!(
        set_of(&sources(&net, &begun)),
        set(&[U1]),
        "the kernel's way"
    );
    net.client
        .ip("route add default via 10.30.0.2 dev u0 metric 100");
    wait_until("both are there", LEAVE, || !is_alone());
    // NAT drops the first packet that leaves by another device, and forgets the flow.
    for socket in &begun {
        socket.send_to(&[u8::MAX], (SERVER4, 5353)).unwrap();
    }
    assert_eq!(
        set_of(&sources(&net, &begun)),
        set(&[U0]),
        "as without Mountain"
    );
}

/// As on a router whose owner has given its one provider's device a rule, and later got another provider.
#[test]
fn no_flow_starts_where_its_answers_may_not_come_in() {
    let net = two_providers();
    let lan = machine_behind(&net);
    net.client.nft(CASES[0].0);
    net.client.nft(
        &CASES[1]
            .0
            .replace("inet t", "inet i")
            .replace("policy drop;", "policy drop;\nmeta l4proto icmp accept"),
    );
    up(&net);
    assert_eq!(sources(&net, &sockets_of(&lan)), [U0; SOCKETS]);
    assert_eq!(begun(&net), set(&[U0]));
    // What rules let through by the other one alone would not have arrived before either.
    lose_preferred(&net);
    assert_eq!(set_of(&sources(&net, &sockets_of(&lan))), set(&[U1]));
}

/// A kill switch holds while the uplink is dead, too.
#[test]
fn what_a_device_is_marked_for_stays_out_of_the_other_uplink() {
    let net = two_providers();
    let client = &net.client;
    client.ip("rule add fwmark 7/0xff unreachable");
    client.nft(CASES[18].0);
    let reserve = config("[[path]]\ndev = \"u1\"\nmetered = true\n");
    let up = format!("up --adopt --config {}", reserve.path().display());
    client.mountain_ok(&up);
    net.wait_used("u0");
    wait_until("the rule is read", LEAVE, || {
        left(&net).contains("by inet t c")
    });
    let refused = || {
        let sockets = crate::placement::sockets(&net, 0);
        let sent = |socket: &&std::net::UdpSocket| socket.send_to(&[0], (SERVER4, 9)).is_ok();
        sockets.iter().filter(sent).count() == 0
    };
    assert!(refused());
    lose_preferred(&net);
    assert!(refused(), "{}", left(&net));
}
