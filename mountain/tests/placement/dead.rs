// SPDX-License-Identifier: GPL-2.0-or-later
//! Two providers with addresses of their own, one of which is silently dead: what becomes of its flows.

use std::thread;
use std::time::{Duration, Instant};

use crate::net::*;
use crate::support::*;

const RESET: &str = "reset_stuck_s = 3\n";

/// Whether an uplink is named whose forwarded connections of IPv4 are to be reset.
fn is_told(net: &Home) -> bool {
    let set = net.home.run("nft list set inet mountain_start stuck4");
    set.contains("elements")
}

/// Of flows that were opened by both uplinks: their errors, apart by uplink, without what is `None`.
fn errors_by_uplink(opened: &[Seen], flows: &mut Flows) -> [Vec<String>; 2] {
    let mut found = [Vec::new(), Vec::new()];
    for (flow, error) in opened.iter().zip(flows.errors()) {
        let uplink = flow.uplink().expect("was answered");
        found[uplink].extend(error);
    }
    found
}

/// Streams of `ns` on the uplink that dies end with `error`, those on the other one and silent ones go on.
fn stuck_streams_are_reset(net: &Home, ns: &Ns, error: &str) {
    net.up();
    let open = |flows: &mut Flows| {
        let both = SERVER.map(|server| flows.open("tcp", EACH, server));
        both.map(|opened| (by_uplink(&opened), opened))
    };
    let (mut silent, mut flows) = (net.flows_in(ns), net.flows_in(ns));
    let resting = open(&mut silent);
    let opened = open(&mut flows);
    for ([first, second], _) in &opened {
        let is_fair = *first >= 8 && *second >= 8;
        assert!(is_fair, "the test proves nothing: {first}, {second}");
    }
    let first = opened[0].0[0] + opened[1].0[0];
    let opened = [&opened[0].1[..], &opened[1].1].concat();
    net.blackhole(1);
    wait_until("what hangs is reset", 6 * LEAVE, || {
        assert_eq!(by_uplink(&flows.ask())[1], 0);
        errors_by_uplink(&opened, &mut flows)[1].len() == opened.len() - first
    });
    let [none, reset] = errors_by_uplink(&opened, &mut flows);
    assert_eq!(none, [""; 0]);
    // Once they are answered: a busy machine may take longer than one look does.
    wait_until("the other uplink's go on", LEAVE, || {
        by_uplink(&flows.ask()) == [first, 0]
    });
    assert!(reset.iter().all(|e| e == error), "{reset:?}");
    // What applications do then works; on a busy machine not each connection is answered in the time that they give.
    wait_until("what begins anew is answered", LEAVE, || {
        let both = open(&mut net.flows_in(ns));
        assert!(both.iter().all(|([_, second], _)| *second == 0));
        both.iter().all(|([first, _], _)| *first == EACH)
    });
    net.no_blackhole();
    wait_until("the uplink is alive", 6 * LEAVE, || {
        (0..2).all(|family| net.path(1, family == 1).judged.state != "dead")
    });
    let resting = [&resting[0].1[..], &resting[1].1].concat();
    if net.lan.is_some() {
        wait_until("nothing is reset any more", LEAVE, || !is_told(net));
    }
    let still = silent.ask();
    assert_eq!(still, resting, "those that were silent meanwhile go on");
    assert_eq!(errors_by_uplink(&resting, &mut silent), [[""; 0], [""; 0]]);
    assert_eq!(net.refused(), 0);
}

#[test]
fn stuck_streams_of_the_host_are_reset() {
    let net = Home::with_config(RESET);
    stuck_streams_are_reset(&net, &net.home, "ECONNABORTED");
    let reset = net.placement().connections_reset;
    assert!(reset >= 16, "{reset}");
}

#[test]
fn stuck_streams_of_the_inner_network_are_reset() {
    let net = Home::with_config(RESET).with_lan();
    stuck_streams_are_reset(&net, net.lan.as_ref().unwrap(), "ECONNRESET");
}

/// They would bear the mark of the other uplink.
#[test]
fn streams_that_a_rule_takes_by_a_living_uplink_are_not_reset() {
    let net = Home::with_config(RESET).with_lan();
    net.table_55();
    net.home.ip("rule add from 192.168.7.0/24 lookup 55");
    net.up();
    let mut flows = net.inner_flows();
    let opened = flows.open("tcp", EACH, SERVER[0]);
    assert_eq!(by_uplink(&opened), [0, EACH]);
    assert_eq!(net.counter("placed_forwarded"), 0);
    net.blackhole(0);
    wait_until("it is told", 3 * LEAVE, || is_told(&net));
    let end = Instant::now() + LEAVE;
    while Instant::now() < end {
        assert_eq!(flows.ask(), opened);
    }
}

/// Nobody is left who could tell when the uplink is back: so resetting ends soon.
#[test]
fn resetting_ends_when_the_daemon_is_killed() {
    let net = Home::with_config(RESET).with_lan().running();
    let mut flows = net.inner_flows();
    let opened = flows.open_by_both(&["tcp"], SERVER[0]);
    net.blackhole(1);
    wait_until("it is told", 3 * LEAVE, || is_told(&net));
    net.kill_daemon();
    // The kernel ends it after 5 s.
    wait_until("it is forgotten", LEAVE, || !is_told(&net));
    net.no_blackhole();
    assert_eq!(flows.ask(), opened);
}

#[test]
fn without_the_setting_datagrams_leave_a_dead_uplink_and_no_stream_is_reset() {
    let net = Home::new().with_lan().running();
    let (mut home, mut inner) = (net.flows(), net.inner_flows());
    let before = [&mut home, &mut inner].map(|flows| flows.open_by_both(&["tcp"], SERVER[0]));
    let mut datagrams = net.inner_flows();
    datagrams.open_by_both(&["udp"], SERVER[0]);
    net.blackhole(1);
    let dead = Instant::now();
    wait_until("all datagrams are answered", 3 * LEAVE, || {
        let all_answered = by_uplink(&datagrams.ask()) == [EACH, 0];
        home.ask();
        inner.ask();
        all_answered && dead.elapsed() > Duration::from_secs(6)
    });
    for (flows, opened) in [&mut home, &mut inner].into_iter().zip(&before) {
        assert_eq!(errors_by_uplink(opened, flows), [[""; 0], [""; 0]]);
    }
    let table = net.home.run("nft list table inet mountain_start");
    assert!(!table.contains("reject"), "{table}");
    // A stream has an address to keep.
    net.no_blackhole();
    wait_until("streams go on", 3 * LEAVE, || inner.ask() == before[1]);
    assert_eq!(net.refused(), 0);
}

#[test]
fn datagrams_that_are_older_than_mountain_leave_a_dead_uplink() {
    let net = Home::new().with_lan();
    let mut flows = net.inner_flows();
    flows.assert_opens("udp", 8, SERVER[0], [8, 0]);
    let mut streams = net.inner_flows();
    streams.assert_opens("tcp", 1, SERVER[0], [1, 0]);
    net.up();
    net.wait_forwarding();
    assert_eq!(by_uplink(&flows.ask()), [8, 0]);
    net.blackhole(0);
    wait_until("all are answered", 3 * LEAVE, || {
        by_uplink(&flows.ask()) == [0, 8]
    });
    net.no_blackhole();
    wait_until("the stream goes on", 3 * LEAVE, || {
        by_uplink(&streams.ask()) == [1, 0]
    });
}

/// A port forward whose packets get the inner address, as by a rule `oifname lan0 masquerade`: the server inside answers to
/// that, and nobody else translates it back.
#[test]
fn a_flow_that_came_in_by_a_dead_uplink_waits_for_it() {
    let net = Home::new().with_lan();
    let forward = "iifname u1 udp dport 8080 dnat ip to 192.168.7.2:7100";
    net.home.chain(
        "inet in pre",
        "nat hook prerouting priority dstnat",
        forward,
    );
    let translate = "oifname lan0 masquerade";
    net.home.chain(
        "inet in post",
        "nat hook postrouting priority srcnat",
        translate,
    );
    net.up();
    net.server.ip("route add 10.41.0.0/24 via 198.51.100.1");
    let _serving = serve(net.lan.as_ref().unwrap(), PORT);
    let mut outside = net.flows_in(&net.server);
    let seen = outside.open_at("udp", 1, ("10.41.0.2", 8080));
    assert_eq!(seen[0].server.as_deref(), Some("192.168.7.1"));
    let mut inner = net.inner_flows();
    inner.open_by_both(&["udp"], SERVER[0]);
    net.blackhole(1);
    wait_until("those that can have left", 3 * LEAVE, || {
        by_uplink(&inner.ask()) == [EACH, 0]
    });
    let known = net.home.run("cat /proc/net/nf_conntrack");
    assert_has(&known, &["src=198.51.100.2 dst=10.41.0.2"]);
    net.no_blackhole();
    wait_until("it goes on", 3 * LEAVE, || outside.ask() == seen);
}

/// A neighbour is nobody that the provider leads to; and while the kernel decides, what begins anew might
/// begin on the dead uplink again.
#[test]
fn neighbours_are_left_alone_and_everybody_while_the_kernel_decides() {
    const NEAR: &str = "10.41.0.1";
    let net = Home::with_config(RESET);
    let _serving = serve(&net.providers, 7101);
    net.up();
    wait_until("the neighbour answers", LEAVE, || {
        let seen = net.flows().open_at("tcp", 1, (NEAR, 7101));
        seen[0].server.is_some()
    });
    net.home.mountain_ok("policy ecmp");
    let (mut near, mut far) = (net.flows(), net.flows());
    assert!(near.open_at("tcp", 1, (NEAR, 7101))[0].server.is_some());
    let opened = far.open_with("tcp", EACH, SERVER[0], "bind=10.41.0.2");
    assert_eq!(by_uplink(&opened), [0, EACH]);
    net.blackhole(1);
    for _ in 0..6 {
        assert_eq!(far.ask()[0].server, None, "a black hole");
        near.ask();
    }
    assert_eq!(far.errors(), vec![None; EACH]);
    net.home.mountain_ok("policy mountain");
    wait_until("those to the far server are reset", 3 * LEAVE, || {
        near.ask();
        far.ask();
        far.errors().iter().all(Option::is_some)
    });
    assert_eq!(near.errors(), [None]);
    net.no_blackhole();
    wait_until("the neighbour answers again", 3 * LEAVE, || {
        near.ask()[0].server.is_some()
    });
}

/// Its routes may come back long before its gateway answers: a modem that trains, DHCP with an old lease. `first`: how
/// many of so many exchanges of four new flows may be lost until the other one has answered.
fn nothing_starts_before_it_answers(i: usize, first: usize) {
    let net = Home::new().running();
    let mut flows = net.flows();
    net.home.ip(&format!("link set u{i} down"));
    let hook = "filter hook prerouting priority -310";
    let rule = format!("iifname r{i} drop");
    net.providers.chain("inet hole in", hook, &rule);
    std::thread::sleep(Duration::from_millis(300));
    net.home.ip(&format!("link set u{i} up"));
    net.default_route(i as u32, false);
    let lost = (0..40).filter(|_| {
        let by = by_uplink(&flows.open("tcp", 4, SERVER[0]));
        assert_eq!(by[i], 0);
        std::thread::sleep(Duration::from_millis(25));
        by[1 - i] < 4
    });
    let lost = lost.count();
    assert!(lost <= first, "{lost} of 40");
    net.no_blackhole();
    wait_until("it is used again", 2 * LEAVE, || {
        by_uplink(&flows.open("tcp", 8, SERVER[0]))[i] > 0
    });
}

#[test]
fn nothing_starts_on_an_uplink_that_is_back_before_it_answers() {
    nothing_starts_before_it_answers(1, 0);
}

/// The kernel takes it until the other one has answered.
#[test]
fn next_to_nothing_starts_on_the_kernels_uplink_that_is_back_before_it_answers() {
    nothing_starts_before_it_answers(0, 2);
}

/// An inner host that hears that its server cannot be reached gives its connection up.
#[test]
fn what_begins_as_an_uplink_loses_its_link_is_answered_by_the_other_one() {
    let net = Home::new().with_lan().running();
    let mut flows = net.inner_flows();
    // It is silent before it is seen to be dead: probes are answered.
    let hook = "filter hook prerouting priority -310";
    let silent = format!("iifname r1 tcp dport {PORT} drop");
    net.providers.chain("inet hole in", hook, &silent);
    thread::scope(|scope| {
        let opening = scope.spawn(|| flows.open("tcp", EACH, SERVER[0]));
        thread::sleep(Duration::from_millis(400));
        net.providers.ip("link set r1 down");
        opening.join().unwrap();
    });
    wait_until("all are answered", LEAVE, || {
        by_uplink(&flows.ask()) == [EACH, 0]
    });
    assert!(flows.errors().iter().all(Option::is_none));
    assert_eq!(net.refused(), 0);
}
