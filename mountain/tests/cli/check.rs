// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain check` in network namespaces of its own. Needs root.

use std::net::UdpSocket;

use crate::support::assert_has;
use crate::support::netns::{nets, Net, TWO_HOPS, TWO_HOPS_V6};
use crate::support::tcx::link_passing;
use mountain::bpf::hooks::{DeviceHook, Order};
use mountain::check::{check_into, Item, Level, Report, Running, TryLoad};
use mountain::config::Config;
use mountain::placement::config::{Forward, PlacementConfig};
use mountain::topology::Topology;

/// For all multipath routes of the calling thread's network namespace, without loading anything.
fn check() -> Report {
    check_with(&Config::default(), "mountain up", None)
}

fn check_with(config: &Config, up: &str, try_load: Option<TryLoad<'_>>) -> Report {
    let mut report = Report::default();
    check_into(&mut report, config, up, try_load, Running::Nobody);
    report
}

fn check_in(net: &Net) -> Report {
    net.host.within(async || check())
}

fn items<'a>(report: &'a Report, name: &str) -> Vec<&'a Item> {
    let items = report.items.iter();
    items.filter(|item| item.name == name).collect()
}

/// The one finding under `name` whose text contains `what`.
#[track_caller]
fn item<'a>(report: &'a Report, name: &str, what: &str) -> &'a Item {
    let mut found = items(report, name);
    found.retain(|item| item.what.contains(what));
    assert_eq!(found.len(), 1, "'{what}' under {name} in {report:#?}");
    found[0]
}

#[test]
fn a_host_without_multipath_routes_fails() {
    let net = Net::new(1);
    net.host.ip("route add default via 10.0.0.2");
    let report = check_in(&net);
    assert_eq!(report.worst(), Level::Fail);
    let routes = item(&report, "routes", "no multipath route");
    assert_eq!(routes.level, Level::Fail);
    assert_has(&routes.todo, &["a single uplink", "nexthop via"]);
    assert_eq!(item(&report, "privileges", "all").level, Level::Ok);
    assert_eq!(items(&report, "kernel")[0].level, Level::Ok);
    assert_eq!(items(&report, "BTF")[0].level, Level::Ok);
    assert!(items(&report, "mtu").is_empty());
    // A configuration of an earlier version is pointed out all the same.
    let config = Config {
        hints: vec!["m.toml:1: [start] is called [placement] now".to_owned()],
        ..Config::default()
    };
    let report = net
        .host
        .within(async || check_with(&config, "mountain up", None));
    item(&report, "configuration", "[start]");
}

#[test]
fn a_well_prepared_host_has_nothing_to_do() {
    let net = Net::new(2);
    let host = &net.host;
    host.ip("addr add 192.0.2.1/32 dev lo");
    host.ip("route add default src 192.0.2.1 nexthop via 10.0.0.2 dev u0 nexthop via 10.0.1.2");
    host.sysctl("net/ipv4/fib_multipath_hash_policy", "1");
    for n in 0..2 {
        let gateway = format!("10.0.{n}.2 dev u{n}");
        host.ip(&format!("neigh replace {gateway} lladdr 02:00:00:00:00:01"));
    }
    net.wait_up();
    let (report, with_socket) = host.within(async || {
        let before = check();
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.connect("198.51.100.1:9").unwrap();
        (before, check())
    });
    assert_eq!(report.worst(), Level::Ok, "{report:#?}");
    assert!(report.items.iter().all(|item| item.todo.is_empty()));
    let route = "0.0.0.0/0: u0 via 10.0.0.2 (weight 1), u1 via 10.0.1.2 (weight 1)";
    item(&report, "routes", route);
    item(&report, "new flows", "from 192.0.2.1 and can be moved");
    item(&report, "live flows", "no connected socket");
    let one = "1 connected socket, all of which can be moved";
    item(&with_socket, "live flows", one);
    assert_eq!(items(&report, "rp_filter").len(), 2, "one for each uplink");
}

#[test]
fn obstacles_are_named() {
    let net = Net::with_default();
    let host = &net.host;
    host.ip("route add 198.51.100.0/24 via 10.0.0.2");
    host.ip("route add 10.20.0.0/16 nexthop dev u0 nexthop via 10.0.1.2 dev u1");
    host.ip(&format!("-6 route add default {TWO_HOPS_V6}"));
    host.ip("link set u1 mtu 1280");
    host.sysctl("net/ipv4/conf/u0/rp_filter", "1");
    host.sysctl("net/ipv4/conf/u1/rp_filter", "2");
    let report = host.within(async || {
        // One of an uplink, one of the host itself, one that uses a route that is not ours.
        let socket = |local: &str, remote: &str| {
            let socket = UdpSocket::bind(local).unwrap();
            socket.connect(remote).unwrap();
            socket
        };
        host.ip("addr add 192.0.2.1/32 dev lo");
        let _open = [
            socket("0.0.0.0:0", "203.0.113.1:9"),
            socket("[::]:0", "[2001:db8::1]:9"),
            socket("192.0.2.1:0", "203.0.113.1:9"),
            socket("0.0.0.0:0", "198.51.100.1:9"),
        ];
        check()
    });
    assert_eq!(report.worst(), Level::Warn, "{report:#?}");
    let flows: Vec<_> = items(&report, "new flows");
    assert_eq!(flows.len(), 2, "one for each family");
    for flow in flows {
        assert_eq!(flow.level, Level::Ok);
        let choose = "choose their uplink when they start";
        assert!(flow.what.ends_with(choose), "{flow:?}");
    }
    item(&report, "uplinks", "would be added while mountain runs");
    let one = "1 of 3 connected sockets can be moved (33%)";
    let live = item(&report, "live flows", one);
    assert_eq!(live.level, Level::Warn);
    for family in ["ipv4", "ipv6"] {
        let policy = item(&report, "hash policy", &format!("net.{family}."));
        assert_eq!(policy.level, Level::Warn);
        let todo = format!("`sysctl -w net.{family}.fib_multipath_hash_policy=1`");
        assert!(policy.todo.ends_with(&todo), "{policy:?}");
    }
    item(&report, "rp_filter", "u0: strict");
    item(&report, "rp_filter", "u1: loose");
    assert_eq!(items(&report, "mtu").len(), 2, "both families");
    let skipped = "10.20.0.0/16: next hop on u0 has no gateway";
    item(&report, "skipped", skipped);
    item(&report, "paths", "gateway 10.0.0.2 on u0 is not resolved");
    item(&report, "forwarding", "off");
    host.sysctl("net/ipv4/conf/u0/forwarding", "1");
    item(&check_in(&net), "forwarding", "router");
}

#[test]
fn flows_that_get_an_uplinks_address_and_cannot_choose_are_told() {
    let net = Net::new(2);
    // Only default routes can be chosen from.
    let route = format!("route add 198.51.100.0/24 metric 20 {TWO_HOPS}");
    net.host.ip(&route);
    let report = check_in(&net);
    let flows = item(&report, "new flows", "an address of one uplink");
    assert_eq!(flows.level, Level::Warn);
    // In the place of the one that is there.
    let replaced = "route replace 198.51.100.0/24 metric 20 src ADDRESS nexthop";
    assert_has(&flows.todo, &[replaced]);
    assert!(items(&report, "uplinks").is_empty());
}

#[test]
fn the_configured_mark_mask_is_held_against_the_rules_that_are_there() {
    let net = Net::new(2);
    net.host.ip(&format!("route add default {TWO_HOPS}"));
    net.host.ip("route add default via 10.0.0.2 table 77");
    net.host.ip("rule add fwmark 0x100/0xf00 lookup 77");
    net.host.sysctl("net/ipv4/ip_forward", "1");
    let with = |change: fn(&mut PlacementConfig)| {
        let mut config = Config::default();
        change(&mut config.placement);
        let check = async || check_with(&config, "mountain up", None);
        net.host.within(check)
    };
    let default = with(|_| {});
    assert!(items(&default, "marks").is_empty(), "{default:#?}");
    let same_bits = with(|start| start.mark_mask = 0xff00.try_into().unwrap());
    let apart = "tells packets apart by bits of the mark";
    let marks = item(&same_bits, "skipped", apart);
    assert_eq!(marks.level, Level::Warn);
    let never = with(|start| start.forward = Forward::Never);
    item(&never, "placing", "`forward = \"never\"`");
    let off = with(|start| start.enabled = false);
    item(&off, "uplinks", "`enabled = false`");
    item(&off, "routes", "others are left to the kernel");
    item(&default, "routes", "new flows choose");
    assert!(items(&off, "placing").is_empty(), "{off:#?}");
    // One that compares all bits meets no forwarded packet that bears ours as well.
    net.host.ip("rule add fwmark 0x5 lookup 77");
    let always = with(|start| start.forward = Forward::Always);
    item(&always, "marks", "compares all bits");
    let never = with(|start| start.forward = Forward::Never);
    assert!(items(&never, "marks").is_empty(), "{never:#?}");
}

#[test]
fn other_programs_and_devices_without_headers_are_named() {
    let net = Net::new(1);
    let host = &net.host;
    host.ip("tuntap add t0 mode tun");
    host.ip("addr add 10.0.9.1/24 dev t0");
    host.ip("link set t0 up");
    host.ip("route add default nexthop via 10.0.0.2 dev u0 nexthop via 10.0.9.2 dev t0");
    let report = check_in(&net);
    item(&report, "paths", "t0 has no Ethernet headers");
    item(&report, "paths", "t0 is down or has no carrier");
    item(&report, "firewall", "treats all devices alike");

    let with_program = host.within(async || {
        let _link = link_passing(DeviceHook::TcxEgress, "u0", c"stranger", Order::Last);
        check()
    });
    let found = item(&with_program, "firewall", "tcx egress of u0 (stranger)");
    assert_eq!(found.level, Level::Warn);
    // Gone with its link.
    item(&check_in(&net), "firewall", "treats all devices alike");
}

/// What `rp_filter` findings rest on: with the strict filter, packets from a source that the
/// multipath route leads to are accepted from either uplink, others only from their own.
#[test]
fn the_strict_filter_accepts_every_path_of_a_multipath_route() {
    let net = Net::with_default();
    let (host, far) = (&net.host, &net.far);
    host.sysctl("net/ipv4/conf/all/rp_filter", "1");
    host.ip("addr add 192.0.2.1/32 dev lo");
    host.ip("route add 198.51.100.0/24 via 10.0.0.2");
    for source in ["203.0.113.1", "198.51.100.1"] {
        far.ip(&format!("addr add {source}/32 dev lo"));
    }
    // The last row is the one that the filter drops; what comes after it shows that it was.
    let (theirs, own) = ("203.0.113.1", "198.51.100.1");
    let sent = [(0, theirs), (1, theirs), (0, own), (1, own), (0, theirs)];
    let receiver = host.udp("192.0.2.1:7000");
    for (n, (uplink, source)) in sent.iter().enumerate() {
        far.ip(&format!("route replace 192.0.2.1/32 via 10.0.{uplink}.1"));
        let sender = far.udp(&format!("{source}:0"));
        sender.send_to(&[n as u8], "192.0.2.1:7000").unwrap();
    }
    let mut received = Vec::new();
    while received.last() != Some(&4) {
        let mut byte = [0];
        let got = receiver.recv(&mut byte);
        assert!(got.is_ok(), "after {received:?}: {got:?}");
        received.push(byte[0]);
    }
    received.sort();
    assert_eq!(received, [0, 1, 2, 4]);
}

#[test]
fn the_attempt_to_load_is_reported_and_the_filter_used() {
    let net = Net::with_default();
    let (good, bad, none) = net.host.within(async || {
        let (config, up) = (Config::default(), "mountain up");
        let load = |topology: &Topology| Ok(format!("loaded for {} paths", topology.paths.len()));
        let good = check_with(&config, up, Some(&load));
        let bad = check_with(&config, up, Some(&|_| anyhow::bail!("verifier says no")));
        let mut narrow = Config::default();
        narrow.steer.routes = nets(&["10.0.0.0/8"]);
        (good, bad, check_with(&narrow, up, None))
    });
    let loaded = item(&good, "program", "loaded for 2 paths");
    assert_eq!(loaded.level, Level::Ok);
    let refused = item(&bad, "program", "verifier says no");
    assert_eq!(refused.level, Level::Fail);
    assert_has(&refused.todo, &["MOUNTAIN_LOG=debug"]);
    assert_eq!(none.worst(), Level::Fail);
    let skipped = "0.0.0.0/0: not among the routes asked for";
    item(&none, "skipped", skipped);
}
