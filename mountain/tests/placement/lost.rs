// SPDX-License-Identifier: GPL-2.0-or-later
//! Two providers, one of which is lost for the moment: what runs by the other one goes on.

use crate::net::*;
use crate::support::*;

const EACH: usize = 40;

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

/// As the cable is out, the bridge forgets behind which port the gateway is; it has a carrier by its guest.
#[test]
fn an_uplink_by_a_bridge_that_dies_is_one_still() {
    let net = Home::new();
    let _guest = net.home.with(|| tun::attach("tap0"));
    bridge(&net);
    net.up();
    let mut flows = net.flows();
    let opened = flows.open("tcp", EACH, SERVER[0]);
    assert_by_both(&opened);
    net.home.ip("link set u0 down");
    net.home.ip("neigh flush dev br0");
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
