// SPDX-License-Identifier: GPL-2.0-or-later
//! Servers that bind a session to the address that they have seen: FTP's data connections, web sites.

use std::ops::RangeInclusive;
use std::thread::sleep;
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

/// Servers, and hosts behind this one, that have connections under way when uplinks begin to be chosen: what is new goes where
/// those do, as FTP's data connections.
#[test]
fn peers_with_connections_under_way_keep_their_uplink() {
    // For 300 s. Those that stay are told again and again.
    const REST: Duration = Duration::from_secs(3);
    let net = Home::by_default("").with_lan();
    net.with_peers(11..=34);
    let (mut own, mut inner) = (net.flows(), net.inner_flows());
    let to = |peer: u8| format!("192.0.2.{peer}");
    let by = |peer: u8| format!("bind=192.168.7.{peer}");
    for peer in 11..=22 {
        let kind = ["tcp", "udp"][usize::from(peer % 2)];
        assert_eq!(by_uplink(&own.open(kind, 1, &to(peer))), [1, 0]);
        let opened = inner.open_with(kind, 1, SERVER[0], &by(peer));
        assert_eq!(by_uplink(&opened), [1, 0]);
    }
    net.start_with_env("MOUNTAIN_EXCHANGE_REST_MS", &REST.as_millis().to_string());
    net.wait_good();
    net.wait_forwarding();
    let to_own = |peers: RangeInclusive<u8>| {
        let opened = peers.map(|peer| net.flows().open("tcp", 1, &to(peer)));
        by_uplink(&opened.flatten().collect::<Vec<_>>())
    };
    let of_inner = |peers: RangeInclusive<u8>| {
        let opened = peers.map(|peer| {
            let mut flows = net.inner_flows();
            flows.open_with("tcp", 1, "192.0.2.1", &by(peer))
        });
        by_uplink(&opened.flatten().collect::<Vec<_>>())
    };
    sleep(2 * REST);
    assert_eq!((to_own(11..=22), of_inner(11..=22)), ([12, 0], [12, 0]));
    for others in [to_own(23..=34), of_inner(23..=34)] {
        assert!(others.iter().all(|n| *n > 0), "{others:?}");
    }
    drop(own);
    wait_until(
        "servers whose connections have ended are free",
        4 * REST,
        || {
            sleep(REST + HALF);
            to_own(11..=22).iter().all(|n| *n > 0)
        },
    );
    assert_eq!(of_inner(11..=22), [12, 0]);
}
