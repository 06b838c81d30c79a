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
    assert_eq!(sees_another_after_an_outage_only(""), 0);
}

#[test]
fn a_rule_without_an_uplink_changes_nothing_about_that() {
    let rule = "[[rule]]\nmatch = { proto = \"tcp\" }\nuse = \"steadiest\"\n";
    assert!(sees_another_after_an_outage_only(rule) > 0);
}

/// How many flows a rule of the configuration was about.
#[track_caller]
fn sees_another_after_an_outage_only(rule: &str) -> u64 {
    let mut by_rule = 0;
    for inner in [false, true] {
        // A home for each: a path that has failed twice before is out of use for longer than its servers wait.
        let net = Home::by_default(rule).with_lan().running();
        net.wait_forwarding();
        net.wait_good();
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
        by_rule += net.counter("by_rule");
    }
    by_rule
}
