// SPDX-License-Identifier: GPL-2.0-or-later
//! Servers that bind a session to the address that they have seen: FTP's data connections, web sites.

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
    sees_another_after_an_outage_only(&Home::by_default("").with_lan().running());
}

#[test]
fn a_rule_without_an_uplink_changes_nothing_about_that() {
    let rule = "[[rule]]\nmatch = { proto = \"tcp\" }\nuse = \"steadiest\"\n";
    let net = Home::by_default(rule).with_lan().running();
    sees_another_after_an_outage_only(&net);
    assert!(net.counter("by_rule") > 0);
}

#[track_caller]
fn sees_another_after_an_outage_only(net: &Home) {
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
