// SPDX-License-Identifier: GPL-2.0-or-later
//! Two providers, one of which is lost for the moment: what runs by the other one goes on.

use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::net::*;
use crate::support::*;

/// Moves the first uplink to a bridge that a guest is on, too.
fn bridge(net: &Home) {
    for command in [
        "link add br0 type bridge",
        "link set u0 master br0",
        "link set tap0 master br0",
        "link set tap0 up",
        "addr flush dev u0",
        "link set br0 up",
        "addr add 10.40.0.2/24 dev br0",
        "-6 addr add fd40::2/64 dev br0 nodad",
        "route replace default via 10.40.0.1 dev br0 metric 100",
        "-6 route replace default via fd40::1 dev br0 metric 100",
    ] {
        net.home.ip(command);
    }
    for gateway in ["10.40.0.1", "fd40::1"] {
        wait_until("the gateway answers", LEAVE, || {
            net.home.pings(&format!("-c 1 -W 1 {gateway}"))
        });
    }
}

/// The kernel would ask for it again a second after that, although the link is back at once.
#[test]
fn nobody_is_asked_for_on_a_link_without_a_carrier() {
    let net = Home::by_default("").running();
    for i in 0..2 {
        net.providers.ip(&format!("link set r{i} down"));
        let shown = |what: &str| net.home.ip(&format!("{what} show dev u{i}"));
        wait_until("it has no carrier", LEAVE, || {
            shown("link").contains("NO-CARRIER")
        });
        // What was sent before Mountain was told may have left some.
        thread::sleep(Duration::from_secs(1));
        net.home.ip(&format!("neigh flush dev u{i}"));
        thread::sleep(Duration::from_secs(4));
        assert_eq!(shown("neigh"), "");
    }
}

/// As the cable is out, the bridge forgets behind which port the gateway is; it has a carrier by its guest.
#[test]
fn an_uplink_by_a_bridge_that_dies_is_one_still() {
    let net = Home::new();
    let _guest = net.home.with(|| tun::attach("tap0"));
    bridge(&net);
    net.up();
    let mut flows = net.flows();
    let opened = flows.open_by_both(&["tcp"], SERVER[0]);
    net.home.ip("link set u0 down");
    // It fails where Mountain puts entries back while it flushes.
    net.home.try_ip("neigh flush dev br0");
    for _ in 0..2 {
        // Read again, whatever was read when.
        net.home.ip("route add 192.0.2.0/24 dev u1");
        net.home.ip("route del 192.0.2.0/24 dev u1");
        net.home.wait_settled();
        assert_eq!(net.placement().suspended, []);
        let seen = flows.ask();
        for (was, is) in opened.iter().zip(&seen) {
            assert!(was.uplink() == Some(0) || is == was, "{was:?}: {is:?}");
        }
    }
    wait_until("new ones stay out of it", LEAVE, || {
        let mut new = net.flows();
        by_uplink(&new.open("tcp", 8, SERVER[0])) == [0, 8]
    });
    net.home.ip("link set u0 up");
    net.wait_good();
    wait_until("all go on", 3 * LEAVE, || flows.ask() == opened);
    assert_eq!(net.refused(), 0);
}

const BY_U1: &str = "[[rule]]\nmatch = { proto = \"tcp\" }\nuse = \"u1\"\n";

/// The first uplink's default routes go, and only its rules with them.
fn lose_first(net: &Home) {
    for family in ["-4", "-6"] {
        net.home.ip(&format!("{family} route del default dev u0"));
    }
    wait_until("the first one's rules are gone", LEAVE, || {
        !net.home.ip("rule").contains("from 10.40.0.2")
    });
    net.home.wait_settled();
    assert_second_stays(net);
}

#[track_caller]
fn assert_second_stays(net: &Home) {
    let rules = net.home.ip("rule");
    assert_has(&rules, &["from 10.41.0.2 lookup 197", "fwmark 0x"]);
}

/// The first uplink's default routes come back while the flows go on sending.
fn first_comes_back(net: &Home, flows: &mut Flows, opened: &[Seen]) {
    thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let started = Instant::now();
            while started.elapsed() < Duration::from_secs(2) {
                assert_eq!(flows.ask(), opened);
            }
        });
        thread::sleep(Duration::from_millis(200));
        net.default_routes(0);
        asking.join().unwrap();
    });
    net.wait_good();
}

/// As udhcpc does at each renewal.
#[test]
fn connections_go_on_when_a_default_route_is_made_anew() {
    let net = Home::new().with_lan().running();
    net.wait_forwarding();
    let (mut own, mut inner) = (net.flows(), net.inner_flows());
    let opened = [&mut own, &mut inner].map(|flows| flows.open_by_both(&["tcp", "udp"], SERVER[0]));
    for i in 0..2 {
        for _ in 0..2 {
            thread::scope(|scope| {
                let asking = scope.spawn(|| {
                    let started = Instant::now();
                    while started.elapsed() < Duration::from_millis(1500) {
                        let now = [&mut own, &mut inner].map(Flows::ask);
                        assert_eq!(now, opened, "u{i}");
                    }
                });
                thread::sleep(Duration::from_millis(100));
                net.home.ip(&format!("route del default dev u{i}"));
                thread::sleep(Duration::from_millis(60));
                net.default_route(i, false);
                asking.join().unwrap();
            });
        }
    }
    assert_eq!(net.refused(), 0);
    // For good.
    net.home.ip("route del default dev u1");
    wait_until("its rules are gone", LEAVE, || {
        !net.home.ip("rule").contains("from 10.41.0.2")
    });
}

/// As of a modem that is plugged in again. What is masqueraded, Linux forgets with the address.
#[test]
fn forwarded_connections_go_on_when_an_uplinks_device_is_made_anew() {
    let net = Home::new().with_lan();
    net.home.run("nft flush chain inet home post");
    for i in 0..2 {
        let rule = format!("oifname u{i} snat ip to 10.4{i}.0.2");
        net.home.run(&format!("nft add rule inet home post {rule}"));
    }
    net.up();
    net.wait_forwarding();
    let mut flows = net.inner_flows();
    let opened = flows.open_by_both(&["tcp", "udp"], SERVER[0]);
    for i in [1, 0] {
        net.home.ip(&format!("link del u{i}"));
        thread::sleep(Duration::from_millis(1500));
        net.join(i);
        net.wait_good();
        assert_eq!(flows.ask(), opened, "u{i}");
    }
    assert_eq!(net.refused(), 0);
}

/// As by `systemctl restart`, for a new configuration or version.
#[test]
fn forwarded_connections_go_on_when_mountain_restarts_while_the_other_uplink_is_away() {
    let net = Home::with_config(BY_U1).with_lan().running();
    let mut flows = net.flows_in(net.lan.as_ref().unwrap());
    flows.assert_opens("tcp", EACH, SERVER[0], [0, EACH]);
    let opened = flows.ask();
    lose_first(&net);
    net.home.end_daemon(Signal::SIGUSR1);
    net.start_with("--wait");
    assert_second_stays(&net);
    assert!(net.has_table());
    // Before the other uplink is back, the firewall is loaded anew.
    let rules = net.home.run("nft list table inet home");
    net.home.nft(&format!("flush ruleset\n{rules}"));
    wait_until("the table is back", LEAVE, || net.has_table());
    first_comes_back(&net, &mut flows, &opened);
    assert_eq!(flows.ask(), opened);
    assert_eq!(net.refused(), 0);
}

/// A short outage of the line that the kernel prefers, as DHCP sees it. What runs on the other one goes on sending
/// while the route comes back, and the kernel would send it by that one at once.
#[test]
fn forwarded_connections_go_on_when_the_other_uplink_comes_back() {
    let net = Home::with_config(BY_U1).with_lan().running();
    let mut flows = net.inner_flows();
    flows.assert_opens("tcp", EACH, SERVER[0], [0, EACH]);
    let mut opened = flows.ask();
    for _ in 0..2 {
        lose_first(&net);
        let said = "group 0: 0.0.0.0/0 (table main), the only uplink at the moment";
        net.home.mountain_says("status", said);
        assert_eq!(flows.ask(), opened);
        // What begins now has no other uplink either, and stays.
        opened.extend(flows.open("tcp", 2, SERVER[0]));
        opened.extend(flows.open("udp", 2, SERVER[0]));
        assert_eq!(by_uplink(&opened), [0, opened.len()]);
        first_comes_back(&net, &mut flows, &opened);
    }
    assert_eq!(flows.ask(), opened);
    assert_eq!(net.refused(), 0);
    // With its address go its rules.
    for device in ["u0", "u1"] {
        net.home.ip(&format!("addr flush dev {device}"));
    }
    wait_until("nothing is left", LEAVE, || {
        !net.home.ip("rule").contains("lookup 197")
    });
}
