// SPDX-License-Identifier: GPL-2.0-or-later
//! Placing begins, or goes on, while exchanges are under way: these stay where the kernel has sent them.

use crate::net::*;

/// As with another policy for a while: what runs when placing begins again goes on, and nothing follows a mark before.
#[test]
fn what_begins_while_nothing_is_placed_is_the_kernels() {
    let net = Home::new().running();
    let (mut marked, mut exchanges) = (net.flows(), net.flows());
    marked.open_by_both(&["udp"], SERVER[0]);
    net.home.mountain_ok("policy ecmp");
    assert_eq!(by_uplink(&marked.again(SERVER[0])), [EACH, 0]);
    let opened = exchanges.open("msg", EACH, SERVER[0]);
    assert_eq!(by_uplink(&opened), [EACH, 0]);
    net.home.mountain_ok("policy mountain");
    assert!(net.flows().open_by_both(&["udp"], SERVER[0]).len() >= EACH);
    assert_eq!(exchanges.ask(), opened);
}

/// Its uplinks of IPv6 come later, as those that routers advertise.
#[test]
fn exchanges_of_a_family_that_is_placed_later_go_on() {
    let net = Home::new();
    let default = |change: &str| {
        net.home.ip(&format!(
            "-6 route {change} default via fd41::1 dev u1 metric 600"
        ));
    };
    default("del");
    net.start();
    net.home.wait_settled();
    let mut exchanges = net.flows();
    let opened = exchanges.open("msg", EACH, SERVER[1]);
    assert_eq!(by_uplink(&opened), [EACH, 0]);
    default("add");
    net.wait_good();
    assert!(net.flows().open_by_both(&["udp"], SERVER[1]).len() >= EACH);
    assert_eq!(exchanges.ask(), opened);
}
