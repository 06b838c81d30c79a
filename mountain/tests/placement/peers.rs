// SPDX-License-Identifier: GPL-2.0-or-later
//! Servers that bind a session to the address that they have seen: FTP's data connections, web sites.

use std::time::Duration;

use crate::net::*;
use crate::support::*;

/// Which uplink all of these have.
#[track_caller]
fn uplink_of(opened: &[Seen]) -> usize {
    let by = by_uplink(opened);
    assert!(by.contains(&opened.len()), "{by:?}: {opened:?}");
    by.iter().position(|&n| n > 0).unwrap()
}

#[test]
fn a_server_sees_another_address_after_an_outage_and_not_after_a_late_probe() {
    let net = Home::by_default("").with_lan().running();
    net.wait_forwarding();
    net.wait_good();
    for inner in [false, true] {
        let open = || {
            let mut flows = match inner {
                false => net.flows(),
                true => net.inner_flows(),
            };
            let opened = flows.open("tcp", 4, SERVER[0]);
            uplink_of(&opened)
        };
        let is_good = |i: usize| net.path(i, false).judged.state == "good";
        let first = open();
        net.blackhole(first);
        net.no_blackhole();
        assert!(!is_good(first), "the test proves nothing");
        let mut looks = 0;
        while !is_good(first) {
            assert_eq!(open(), first, "inner: {inner}");
            looks += 1;
        }
        assert!(looks > 0, "the test proves nothing");
        assert_eq!(open(), first);

        net.blackhole(first);
        wait_until("it is dead", LEAVE, || {
            net.path(first, false).judged.state == "dead"
        });
        assert_eq!(open(), 1 - first, "inner: {inner}");
        net.no_blackhole();
        net.wait_good();
        for _ in 0..4 {
            assert_eq!(
                open(),
                1 - first,
                "inner: {inner}, it does not go back at once"
            );
        }
    }
}

/// As `dead::nothing_starts_before_it_answers`, but no flow has begun while it was away.
#[test]
fn a_server_is_not_looked_for_on_an_uplink_that_is_back_before_that_answers() {
    let net = Home::by_default("").running();
    let first = uplink_of(&net.flows().open("tcp", 4, SERVER[0]));
    net.home.ip(&format!("link set u{first} down"));
    let hook = "filter hook prerouting priority -310";
    let rule = format!("iifname r{first} drop");
    net.providers.chain("inet hole in", hook, &rule);
    std::thread::sleep(Duration::from_millis(300));
    net.home.ip(&format!("link set u{first} up"));
    net.default_route(first as u32, false);
    let lost = (0..20).filter(|_| by_uplink(&net.flows().open("tcp", 4, SERVER[0]))[1 - first] < 4);
    let lost = lost.count();
    // The kernel's own is taken until the other one has answered.
    assert!(lost <= [2, 0][first], "{lost} of 20");
}
