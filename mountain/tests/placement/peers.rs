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

/// Opens connections to servers of these numbers, or from hosts behind this one that have them.
struct Openers<'a>(&'a Home);

impl Openers<'_> {
    fn to_own(&self, peers: RangeInclusive<u8>) -> [usize; 2] {
        let opened = peers.map(|peer| self.0.flows().open("tcp", 1, &server(peer)));
        by_uplink(&opened.flatten().collect::<Vec<_>>())
    }

    fn of_inner(&self, peers: RangeInclusive<u8>, to: &str) -> [usize; 2] {
        let opened = peers.map(|peer| {
            let mut flows = self.0.inner_flows();
            flows.open_with("tcp", 1, to, &inner_host(peer))
        });
        by_uplink(&opened.flatten().collect::<Vec<_>>())
    }
}

fn server(peer: u8) -> String {
    format!("192.0.2.{peer}")
}

fn inner_host(peer: u8) -> String {
    format!("bind=192.168.7.{peer}")
}

/// A home with connections to a dozen servers, and of a dozen hosts behind it, all by the first uplink; of these kinds in turn.
fn with_connections(net: &Home, kinds: [&str; 2]) -> [Flows; 2] {
    net.with_peers(11..=34);
    let (mut own, mut inner) = (net.flows(), net.inner_flows());
    for peer in 11..=22 {
        let kind = kinds[usize::from(peer % 2)];
        assert_eq!(by_uplink(&own.open(kind, 1, &server(peer))), [1, 0]);
        let opened = inner.open_with(kind, 1, SERVER[0], &inner_host(peer));
        assert_eq!(by_uplink(&opened), [1, 0]);
    }
    [own, inner]
}

fn are_spread(by: [usize; 2]) -> bool {
    by.iter().all(|n| *n > 0)
}

/// Servers, and hosts behind this one, that have connections under way when uplinks begin to be chosen: what is new goes where
/// those do, as FTP's data connections.
#[test]
fn peers_with_connections_under_way_keep_their_uplink() {
    let net = Home::by_default("").with_lan();
    let _flows = with_connections(&net, ["tcp", "udp"]);
    net.up();
    net.wait_forwarding();
    let open = Openers(&net);
    let by = [open.to_own(11..=22), open.of_inner(11..=22, "192.0.2.1")];
    assert_eq!(by, [[12, 0], [12, 0]]);
    let others = [open.to_own(23..=34), open.of_inner(23..=34, "192.0.2.1")];
    assert!(others.into_iter().all(are_spread), "{others:?}");
}

/// The servers do so as long as these last: those of a host behind this one for that host, which is free otherwise.
#[test]
fn servers_keep_their_uplink_as_long_as_their_connections_last() {
    // For 300 s.
    const REST: Duration = Duration::from_secs(6);
    let net = Home::by_default("").with_lan();
    let [own, _inner] = with_connections(&net, ["tcp"; 2]);
    net.start_with_env("MOUNTAIN_EXCHANGE_REST_MS", &REST.as_millis().to_string());
    net.wait_good();
    net.wait_forwarding();
    sleep(2 * REST);
    let open = Openers(&net);
    let by = [open.to_own(11..=22), open.of_inner(11..=22, SERVER[0])];
    assert_eq!(by, [[12, 0], [12, 0]]);
    let elsewhere = open.of_inner(11..=22, "192.0.2.1");
    assert!(are_spread(elsewhere), "{elsewhere:?}");
    drop(own);
    wait_until(
        "servers whose connections have ended are free",
        4 * REST,
        || {
            sleep(REST + HALF);
            are_spread(open.to_own(11..=22))
        },
    );
    assert_eq!(open.of_inner(11..=22, SERVER[0]), [12, 0]);
}
