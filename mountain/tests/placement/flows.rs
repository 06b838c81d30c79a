// SPDX-License-Identifier: GPL-2.0-or-later
//! Two providers with addresses of their own: new flows choose their uplink, and keep it.

use crate::net::*;
use crate::support::*;
use nix::sys::signal::Signal;

/// Opens flows of all kinds of one family; all are answered, and their addresses fit.
fn open_all(flows: &mut Flows, ipv6: bool) -> Vec<Seen> {
    let family = usize::from(ipv6);
    let mut all = Vec::new();
    for kind in KINDS {
        let opened = flows.open(kind, EACH, SERVER[family]);
        assert_eq!(opened.len(), EACH);
        for flow in &opened {
            let uplink = flow.uplink().expect(kind);
            if kind != "msg" {
                assert_eq!(flow.own, OWN[family][uplink], "{kind}");
            }
        }
        all.extend(opened);
    }
    all
}

fn new_flows_avoid_a_black_hole(ipv6: bool) {
    let net = Home::new().running();
    let mut old = net.flows();
    let before = open_all(&mut old, ipv6);
    for opened in before.chunks(EACH) {
        assert_by_both(opened);
    }

    net.blackhole(1);
    let mut new = net.flows();
    let after = open_all(&mut new, ipv6);
    assert_eq!(by_uplink(&after), [3 * EACH, 0], "new flows stay out of it");
    let held = old.ask();
    for (was, is) in before.iter().zip(&held) {
        match was.uplink() {
            Some(0) => assert_eq!(is, was, "flows on the other uplink go on"),
            _ => assert!(is.server.is_none() || is.uplink() == Some(0), "{is:?}"),
        }
    }
    // Streams and connected sockets have an address to keep, and keep it.
    net.no_blackhole();
    wait_until("all have gone on as they were", 3 * LEAVE, || {
        let back = old.ask();
        for (was, is) in before.iter().zip(&back).take(2 * EACH) {
            // A stream that waits for its next retransmission is not there yet.
            let same = is.server.is_none() || is == was;
            assert!(same, "{was:?} has become {is:?}");
        }
        back[..2 * EACH] == before[..2 * EACH]
    });
    assert_eq!(net.refused(), 0, "left with another uplink's address");
    assert!(net.counter("placed_connect") >= 4 * EACH as u64);
    assert!(net.counter("placed_unconnected") >= 2 * EACH as u64);
    net.home.mountain_says("explain", "u1");
}

#[test]
fn new_flows_stay_out_of_a_black_hole() {
    new_flows_avoid_a_black_hole(false);
}

#[test]
fn new_flows_stay_out_of_a_black_hole_by_ipv6() {
    new_flows_avoid_a_black_hole(true);
}

#[test]
fn without_mountain_all_go_by_the_preferred_route() {
    let net = Home::new();
    let mut flows = net.flows();
    assert_eq!(by_uplink(&open_all(&mut flows, false)), [3 * EACH, 0]);
    assert_eq!(by_uplink(&open_all(&mut flows, true)), [3 * EACH, 0]);
    // And the providers are as strict as they are said to be.
    let bound = flows.open_with("udp", 1, SERVER[0], "bind=10.41.0.2");
    assert_eq!(bound[0].server, None);
    assert!(net.refused() > 0);
}

/// All that `down` has to leave as it was. How many connections are tracked changes by itself.
fn fingerprint(net: &Home) -> String {
    let text = net.home.fingerprint();
    let ours = |line: &&str| !line.contains("nf_conntrack_count");
    let lines = text.lines().filter(ours);
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn up_then_down_leaves_the_host_as_it_was() {
    let net = Home::new().with_lan();
    let before = fingerprint(&net);
    net.up();
    let rules = net.home.ip("rule");
    assert_has(&rules, &["from 10.41.0.2 lookup 197", "fwmark 0x"]);
    assert!(net.has_table());
    net.home.mountain_ok("down");
    assert_eq!(fingerprint(&net), before);
    assert!(!net.home.run("nft list tables").contains("mountain"));

    // The table is an earlier run's, and the one that ends has had no use for it.
    net.up();
    net.kill_daemon();
    net.home.sysctl("net.ipv4.conf.u1.rp_filter", "1");
    net.up();
    assert!(!net.placement().forwarding);
    assert!(net.has_table(), "flows go on by it");
    net.home.mountain_ok("down");
    assert!(!net.home.run("nft list tables").contains("mountain"));

    // A ruleset that was saved while Mountain ran brings it back.
    net.home.run("nft add table inet mountain_start");
    let hint = "`mountain down` removes what an earlier run has left";
    net.home.mountain_fails("status", hint);
    let check = || stdout(&net.home.mountain("check --adopt")).contains("left behind");
    assert!(check());
    net.home.mountain_ok("down");
    assert!(!net.home.run("nft list tables").contains("mountain"));
    assert!(!check());
    let said = net.home.mountain_fails("status", "not running");
    assert!(!said.contains(hint), "{said}");
}

#[test]
fn kill_9_breaks_no_connection_and_the_next_up_takes_over() {
    let net = Home::new();
    let before = fingerprint(&net);
    net.up();
    let mut flows = net.flows();
    let opened = open_all(&mut flows, false);
    let [_, second] = by_uplink(&opened);
    assert!(second > 0, "the test proves nothing");
    net.kill_daemon();
    let after = flows.ask();
    assert_eq!(after[..2 * EACH], opened[..2 * EACH], "connections go on");
    // Datagrams without one have a source that is chosen for each, by the kernel from now on.
    assert_eq!(by_uplink(&after[2 * EACH..]), [EACH, 0]);
    // New ones are the kernel's.
    let mut new = net.flows();
    assert_eq!(by_uplink(&open_all(&mut new, false)), [3 * EACH, 0]);

    net.up();
    assert_eq!(flows.ask()[..2 * EACH], opened[..2 * EACH]);
    let [_, second] = by_uplink(&open_all(&mut new, false));
    assert!(second > 0, "placed again");
    net.kill_daemon();
    net.home.mountain_fails(
        "status",
        "`mountain down` removes what an earlier run has left",
    );
    net.home.mountain_says("down", "are removed");
    assert_eq!(fingerprint(&net), before);
    assert_eq!(net.refused(), 0);
}

/// The kernel takes an uplink's own route away with its link, and nobody puts it back.
#[test]
fn an_uplink_that_comes_back_after_kill_9_is_the_kernels() {
    let net = Home::new().running();
    net.kill_daemon();
    let routes = net.home.run("ip route show default dev u0");
    net.home.ip("link set u0 down");
    net.home.ip("link set u0 up");
    net.home.ip("addr replace 10.40.0.2/24 dev u0");
    net.home
        .ip(&format!("route replace {} dev u0", routes.trim()));
    net.flows().assert_opens("tcp", EACH, SERVER[0], [EACH, 0]);
    net.home.mountain_says("down", "are removed");
}

#[test]
fn sockets_that_have_chosen_stay_with_their_choice() {
    let net = Home::new().running();
    let mut named = net.flows();
    let options = [(SERVER[0], "out"), (SERVER[1], "out"), (SERVER[1], "info")];
    for (server, option) in options {
        for kind in ["udp", "msg"] {
            for (device, expected) in [("u0", [16, 0]), ("u1", [0, 16])] {
                let choice = format!("{option}={device}");
                let opened = named.open_with(kind, 16, server, &choice);
                assert_eq!(by_uplink(&opened), expected, "{server}: {kind} {choice}");
            }
        }
    }
    // For each datagram by itself: of devices, and of marks by which a routing rule goes.
    for server in SERVER {
        for (device, expected) in [("u0", [16, 0]), ("u1", [0, 16])] {
            let opened = named.open_with("msg", 16, server, &format!("each-info={device}"));
            assert_eq!(by_uplink(&opened), expected, "{server}: {device}");
        }
        let marked = named.open_with("msg", 16, server, "each-mark=0x77");
        assert_eq!(
            by_uplink(&marked),
            [16, 0],
            "{server}: by the kernel's uplink"
        );
    }
    // Nor do those of other namespaces.
    let near = net.flows_in(&net.server).open("udp", 4, "198.51.100.1");
    assert!(near.iter().all(|f| f.own == "198.51.100.2"), "{near:?}");
    assert_eq!(net.counter("placed_connect"), 0, "none of these was placed");
    net.blackhole(0);
    let mut flows = net.flows();
    // All others go by u1 now.
    flows.assert_opens("tcp", 8, SERVER[0], [0, 8]);
    for (choice, kinds) in [
        ("bind=10.40.0.2", &KINDS[..]),
        ("dev=u0", &KINDS),
        // As resolvers do that ask each link's servers by that link.
        ("out=u0", &["udp", "msg"]),
    ] {
        for kind in kinds {
            let bound = flows.open_with(kind, 2, SERVER[0], choice);
            let silent = bound.iter().all(|f| f.server.is_none());
            assert!(silent, "{kind} {choice}: {bound:?}");
        }
    }
    // A mark of the owner's, and a port that others may have been told, leave it to the kernel too.
    let marked = flows.open_with("tcp", 2, SERVER[0], "mark=0x77");
    assert!(marked.iter().all(|f| f.server.is_none()), "{marked:?}");
    for kind in ["udp", "msg"] {
        let known = flows.open_with(kind, 1, SERVER[0], "bind=0.0.0.0/4500");
        assert_eq!(known[0].server, None, "{kind}: {known:?}");
        flows.close();
    }
    // A port of a stream's is its own business.
    let stream = flows.open_with("tcp", 1, SERVER[0], "bind=0.0.0.0/4501");
    assert_eq!(stream[0].uplink(), Some(1));
    net.no_blackhole();
    // Its address leads out by its uplink.
    let bound = flows.open_with("tcp", 2, SERVER[0], "bind=10.41.0.2");
    assert_eq!(by_uplink(&bound), [0, 2]);
    // Which address is a temporary one, only the kernel knows.
    net.wait_good();
    let temporary = net.flows().open_with("msg", EACH, SERVER[1], "prefer=1");
    assert_eq!(by_uplink(&temporary), [EACH, 0]);
    assert_by_both(&net.flows().open_with("udp", EACH, SERVER[1], "prefer=1"));
    assert_eq!(net.refused(), 0);
}

#[test]
fn a_socket_that_is_connected_anew_chooses_anew() {
    let net = Home::new().running();
    let mut flows = net.flows();
    let opened = flows.open("udp", EACH, SERVER[0]);
    let [first, second] = by_uplink(&opened);
    assert!(first > 0 && second > 0);
    // To a neighbour on u0, as getaddrinfo() does when it sorts addresses: the kernel's own source.
    let near = flows.again("10.40.0.1");
    assert!(near.iter().all(|f| f.own == OWN[0][0]), "{near:?}");
    let local = flows.again("127.0.0.1");
    assert!(local.iter().all(|f| f.own == "127.0.0.1"), "{local:?}");
    net.blackhole(1);
    let again = flows.again(SERVER[0]);
    assert_eq!(by_uplink(&again), [EACH, 0]);
}

/// A destination that both providers lead to the server.
const ANOTHER: &str = "192.0.2.9";

fn lead_another_there(net: &Home) {
    let rule = format!("ip daddr {ANOTHER} dnat to {}", SERVER[0]);
    net.providers
        .chain("inet led in", "nat hook prerouting priority dstnat", &rule);
}

/// As of who finds a peer by a server, and is then connected to the peer: that was told the first address.
#[test]
fn a_socket_that_has_sent_keeps_its_address_when_it_is_connected() {
    let net = Home::new().running();
    lead_another_there(&net);
    let mut flows = net.flows();
    let opened = flows.open_by_both(&["msg"], SERVER[0]);
    let connected = flows.again(ANOTHER);
    let uplinks = |flows: &[Seen]| flows.iter().map(Seen::uplink).collect::<Vec<_>>();
    assert_eq!(uplinks(&connected), uplinks(&opened));
    let expected = connected.iter().map(|flow| OWN[0][flow.uplink().unwrap()]);
    assert!(
        connected.iter().map(|f| &*f.own).eq(expected),
        "{connected:?}"
    );
}

/// The first datagram after that is routed by the mark of the connection, the others are not.
#[test]
fn a_socket_that_is_dissolved_has_one_address() {
    let net = Home::new().running();
    lead_another_there(&net);
    let mut flows = net.flows();
    let opened = flows.open_by_both(&["udp"], SERVER[0]);
    let uplinks = |flows: &[Seen]| flows.iter().map(Seen::uplink).collect::<Vec<_>>();
    assert_eq!(uplinks(&flows.loose(ANOTHER)), uplinks(&opened));
    assert_eq!(uplinks(&flows.ask()), uplinks(&opened));
    assert_eq!(net.counter("placed_unconnected"), EACH as u64);
}

#[test]
fn datagrams_keep_their_address_when_the_gateway_changes() {
    let net = Home::new().running();
    let mut flows = net.flows();
    let opened = flows.open_by_both(&["msg"], SERVER[0]);
    for (i, metric) in [(0, 100), (1, 600)] {
        net.providers
            .ip(&format!("addr add 10.4{i}.0.3/24 dev r{i}"));
        let gateway = format!("10.4{i}.0.3");
        net.home.ip(&format!(
            "route replace default via {gateway} dev u{i} metric {metric}"
        ));
        wait_until("the new gateway is known", LEAVE, || {
            assert_eq!(flows.ask(), opened);
            let paths = net.home.status().paths;
            paths
                .iter()
                .any(|path| path.gateway.map(|ip| ip.to_string()) == Some(gateway.clone()))
        });
        net.wait_good();
        assert_eq!(flows.ask(), opened);
    }
}

#[test]
fn a_socket_that_is_bound_after_it_was_connected_has_no_mark_of_ours() {
    let net = Home::new().running();
    let mut flows = net.flows();
    flows.open_by_both(&["udp"], SERVER[0]);
    // By a mark of this uplink nothing can be reached now, whatever device the socket is bound to.
    net.providers.ip("link set r1 down");
    wait_until("the uplink's table says so", LEAVE, || {
        let routes = net.home.ip("-4 route show table all");
        routes.contains("unreachable default")
    });
    let bound = flows.again_with(SERVER[0], "dev=u0");
    assert_eq!(by_uplink(&bound), [EACH, 0], "{bound:?}");
}

#[test]
fn an_uplink_with_another_lease_is_followed() {
    let net = Home::new().running();
    net.home.ip("addr del 10.41.0.2/24 dev u1");
    wait_until("the rule is gone", LEAVE, || {
        !net.home.ip("rule").contains("10.41.0.2")
    });
    // No lease: no route either, and so no choice.
    let mut flows = net.flows();
    flows.assert_opens("tcp", 8, SERVER[0], [8, 0]);
    net.home.ip("addr add 10.41.0.2/24 dev u1");
    net.default_routes(1);
    wait_until("the rule is back", LEAVE, || {
        net.home.ip("rule").contains("10.41.0.2")
    });
    wait_until("both are used again", 3 * LEAVE, || {
        by_uplink(&flows.open("tcp", 16, SERVER[0]))[1] > 0
    });
    // Who removes our rules finds them back.
    let sorted = || {
        let rules = net.home.ip("rule");
        let mut lines: Vec<String> = rules.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    let rules = sorted();
    let count = rules.len();
    for _ in 0..3 {
        net.home.try_ip("rule del priority 32765");
    }
    wait_until("they are back", LEAVE, || sorted() == rules);
    let rules_now = net.home.ip("rule");
    let mut first = rules_now.lines().filter(|rule| rule.starts_with("32765:"));
    assert!(first.next().unwrap().contains("suppress_prefixlength 0"));
    // Where an address comes in addition, it stands before the marks.
    net.home.ip("addr add 10.41.0.9/24 dev u1");
    wait_until("it has a rule", LEAVE, || {
        net.home.ip("rule").contains("from 10.41.0.9")
    });
    wait_until("in the right place, and each is there once", LEAVE, || {
        let rules = net.home.ip("rule");
        let at = |part: &str| rules.rfind(part).unwrap();
        at("from 10.41.0.9") < rules.find("fwmark").unwrap() && sorted().len() == count + 1
    });
}

#[test]
fn forwarded_connections_choose_and_stay() {
    let net = Home::new().with_lan().running();
    let lan = net.lan.as_ref().unwrap();
    let mut old = net.flows_in(lan);
    for server in SERVER {
        let opened = old.open_by_both(&["tcp", "udp"], server);
        assert_eq!(old.ask(), opened, "and stay");
        net.kill_daemon();
        assert_eq!(old.ask(), opened, "when the daemon is killed");
        net.up();
        assert_eq!(old.ask(), opened, "when there is another one");
        old.close();
    }
    net.blackhole(1);
    // From other addresses: a datagram from a port that an earlier flow had is that flow to connection
    // tracking, and one in ten runs has such a one.
    let mut new = net.flows_in(lan);
    for (server, own) in SERVER.iter().zip(["192.168.7.3", "fd77::3"]) {
        lan.ip(&format!("addr add {own} dev e0 nodad"));
        for kind in KINDS {
            let flows = new.open_with(kind, EACH, server, &format!("bind={own}"));
            assert_eq!(by_uplink(&flows), [EACH, 0], "{kind}");
        }
    }
    net.no_blackhole();
    assert_eq!(net.refused(), 0);
}

#[test]
fn while_the_daemon_stands_still_new_flows_are_the_kernels_to_place() {
    let net = Home::new().running();
    let mut flows = net.flows();
    let opened = flows.open_by_both(&["tcp"], SERVER[0]);
    let stopped = net.home.stop_daemon();
    let chosen = || by_uplink(&net.flows().open("tcp", EACH, SERVER[0]));
    wait_until("all take the kernel's uplink", LEAVE, || {
        chosen() == [EACH, 0]
    });
    assert_eq!(flows.ask(), opened, "those that run stay");
    drop(stopped);
    wait_until("they choose again", LEAVE, || chosen()[1] > 0);
    assert_eq!(flows.ask(), opened, "those that run stay");
    assert!(net.counter("pass_unattended") > 0);
    assert_eq!(net.refused(), 0);
}

/// A strict filter looks the way back up without the mark.
#[test]
fn forwarded_connections_are_left_while_an_uplink_filters_strictly() {
    let net = Home::new().with_lan();
    let filter = |value: &str| net.home.sysctl("net.ipv4.conf.u1.rp_filter", value);
    filter("1");
    net.up();
    let mut flows = net.inner_flows();
    flows.assert_opens("tcp", EACH, SERVER[0], [EACH, 0]);
    let left = || net.placement().left.join("\n");
    let reason = "forwarded connections are left to the kernel: u1 filters strictly";
    assert!(left().starts_with(reason), "{}", left());
    net.home.mountain_says("status", reason);
    let checked = stdout(&net.home.mountain("check --adopt"));
    assert_has(&checked, &[reason]);
    // The host's own have an address that leads back.
    net.flows().open_by_both(&["tcp"], SERVER[0]);
    filter("2");
    net.wait_forwarding();
    flows.open_by_both(&["tcp"], SERVER[0]);
    assert_eq!(left(), "");
    // The kernel's own uplink may filter.
    net.home.sysctl("net.ipv4.conf.u0.rp_filter", "1");
    // That is looked at every 5 s.
    std::thread::sleep(std::time::Duration::from_secs(6));
    flows.open_by_both(&["tcp"], SERVER[0]);
    assert_eq!(left(), "");
}

/// As where a package's installation loads the files of sysctl(8) anew.
#[test]
fn forwarded_flows_leave_an_uplink_that_begins_to_filter_strictly() {
    let net = Home::new().with_lan().running();
    net.wait_forwarding();
    let mut flows = net.inner_flows();
    let opened = flows.open_by_both(&["udp", "tcp"], SERVER[0]);
    let lost = by_uplink(&opened[EACH..])[1];
    net.home.sysctl("net.ipv4.conf.u1.rp_filter", "1");
    // Connections cannot: the server resets them, and they do not hang.
    wait_until("they go on by the other uplink", LEAVE, || {
        let udp = by_uplink(&flows.ask()[..EACH]);
        let ended = flows.errors()[EACH..].iter().flatten().count();
        udp == [EACH, 0] && ended == lost
    });
}

#[test]
fn a_forwarded_flow_is_placed_once() {
    // No path is late, however busy the machine is: flows would be placed again, though their connections stay.
    let net = Home::with_config("[steer]\ntolerance_ms = 1000\n")
        .with_lan()
        .running();
    let mut flows = net.inner_flows();
    for server in SERVER {
        flows.open("udp", EACH, server);
    }
    let placed = net.counter("placed_forwarded");
    assert!(placed >= 2 * EACH as u64, "{placed}");
    flows.ask();
    let others = net.counter("placed_forwarded") - placed;
    // Two flows of one slot take turns in it: that many pairs there never are.
    assert!(others <= EACH as u64 / 4, "{others} of {}", 2 * EACH);
}

/// Forwarded packets get a mark of the owner's, and leave with the same in these bits.
fn forwarded_with_a_mark(set: &str, mark: &str, bits: &str, check: fn(&[Seen])) {
    let net = Home::new().with_lan();
    let hook = "filter hook prerouting priority raw";
    let set = format!("iifname lan0 meta mark set {set}");
    net.home.chain("inet owner put", hook, &set);
    let is = |what| format!("iifname lan0 meta mark and {bits} {what} {mark} counter\n");
    let hook = "filter hook forward priority filter";
    let kept_and_lost = is("==") + &is("!=");
    net.home.chain("inet owner left", hook, &kept_and_lost);
    net.up();
    let mut flows = net.inner_flows();
    for kind in ["tcp", "udp"] {
        check(&flows.open(kind, EACH, SERVER[0]));
    }
    flows.ask();
    let counted = net.home.counted("chain inet owner left");
    assert!(counted[0] > 0 && counted[1] == 0, "{mark}: {counted:?}");
    assert_eq!(net.refused(), 0);
}

/// Those by which a router shapes or counts.
#[test]
fn forwarded_packets_keep_all_bits_of_the_owners_mark() {
    forwarded_with_a_mark("meta mark or 0x7", "0x7", "0x00ffffff", assert_by_both);
}

/// One that has bits of ours says by which way, whatever it names.
#[test]
fn forwarded_packets_with_a_mark_in_our_bits_are_the_owners() {
    let mark = "0x05000001";
    forwarded_with_a_mark(mark, mark, "0xffffffff", |opened| {
        assert_eq!(by_uplink(opened), [EACH, 0], "the kernel's way");
    });
}

/// Datagrams that nobody has answered yet, as of a meter or a camera that only sends.
#[test]
fn one_way_datagrams_that_began_before_keep_their_uplink() {
    let net = Home::new().with_lan();
    let mute = format!("iifname w udp sport {PORT} drop");
    let hook = "filter hook prerouting priority -310";
    net.providers.chain("inet mute in", hook, &mute);
    let mut flows = net.inner_flows();
    for server in SERVER {
        let opened = flows.open("udp", EACH, server);
        assert_eq!(by_uplink(&opened), [0, 0], "one way");
    }
    net.up();
    flows.ask();
    assert_eq!(net.refused(), 0, "none was moved");
    net.providers.run("nft delete table inet mute");
    assert_eq!(by_uplink(&flows.ask()), [2 * EACH, 0]);
}

/// As where providers give fixed addresses.
#[test]
fn forwarded_connections_choose_where_each_uplink_has_an_address_of_its_own() {
    let net = Home::new().with_lan();
    net.home.run("nft flush chain inet home post");
    for rule in [
        "oifname u0 snat ip to 10.40.0.2",
        "oifname u1 snat ip to 10.41.0.2",
        "oifname { u0, u1 } masquerade",
    ] {
        net.home.run(&format!("nft add rule inet home post {rule}"));
    }
    net.up();
    net.wait_forwarding();
    for server in SERVER {
        net.inner_flows().open_by_both(&["tcp", "udp"], server);
    }
    assert_eq!(net.refused(), 0);
}

/// As where a provider has to know a mail server, or a telephone, by a further address of one uplink.
#[test]
fn what_the_firewall_gives_one_address_on_both_uplinks_is_left_to_the_kernel() {
    for (rule, is_left) in [
        (
            "meta l4proto { tcp, udp } th dport 7100 snat ip to 10.40.0.2",
            true,
        ),
        ("oifname u0 snat ip to 10.40.0.2", false),
        ("ip saddr 192.168.7.0/24 snat ip to 10.40.0.2", false),
        ("ip daddr 198.51.100.99 snat ip to 10.40.0.2", false),
    ] {
        let net = Home::new();
        let hook = "nat hook postrouting priority srcnat - 1";
        net.home.chain("inet owner post", hook, rule);
        net.up();
        let left = net.placement().left.join("\n");
        if is_left {
            let opened = net.flows().open("tcp", EACH, SERVER[0]);
            assert_eq!(by_uplink(&opened), [EACH, 0], "{rule}");
            assert_has(
                &left,
                &["the same address on several uplinks", "inet owner post"],
            );
            net.flows().open_by_both(&["tcp", "udp"], SERVER[1]);
            assert_eq!(net.refused(), 0, "{rule}");
        } else {
            assert!(!left.contains("same address"), "{rule}: {left}");
        }
    }
}

/// What `systemctl restart` does: SIGUSR1, then another one.
#[test]
fn a_restart_keeps_forwarded_connections() {
    let net = Home::new().with_lan().running();
    let mut flows = net.inner_flows();
    let opened = flows.open_by_both(&["tcp", "udp"], SERVER[0]);
    net.home.end_daemon(Signal::SIGUSR1);
    assert_eq!(flows.ask(), opened, "while there is none");
    net.up();
    assert_eq!(flows.ask(), opened, "when there is another one");
    assert_eq!(net.refused(), 0);
    // As `systemctl stop` does.
    net.home.end_daemon(Signal::SIGTERM);
    for rules in [net.home.ip("rule"), net.home.ip("-6 rule")] {
        assert!(!rules.contains("lookup 197"), "{rules}");
    }
    assert!(!net.home.run("nft list tables").contains("mountain"));
}

#[test]
fn connections_from_outside_are_answered_by_the_uplink_that_they_came_by() {
    let net = Home::new().with_lan().running();
    let lan = net.lan.as_ref().unwrap();
    let _serving = serve(lan, PORT);
    let forward = "iifname { u0, u1 } tcp dport 8080 dnat ip to 192.168.7.2:7100";
    let at = "nat hook prerouting priority dstnat";
    net.home.chain("inet forward pre", at, forward);
    net.server.ip("route add 10.41.0.0/24 via 198.51.100.1");
    net.server.ip("route add 10.40.0.0/24 via 198.51.100.1");
    let mut outside = net.flows_in(&net.server);
    let mut answered = Vec::new();
    for address in OWN[0] {
        wait_until("the server on the inner network answers", LEAVE, || {
            let seen = outside.open_at("tcp", 1, (address, 8080));
            answered.push(seen[0].server.clone());
            seen[0].server.as_deref() == Some("198.51.100.2")
        });
    }
    let all = outside.ask();
    let answers = all.iter().filter(|f| f.server.is_some()).count();
    assert!(answers >= 2, "{all:?}");
    assert_eq!(net.refused(), 0, "{answered:?}");
}

#[test]
fn rules_say_which_path() {
    let net = Home::with_config(
        "[[rule]]\nmatch = { proto = \"tcp\", ports = 7100, prefix = \"198.51.100.0/24\" }\nuse = \"u1\"\n\
         [[rule]]\nmatch = { uid = 0, proto = \"udp\" }\nuse = \"nonesuch\"\n",
    ).running();
    let mut flows = net.flows();
    flows.assert_opens("tcp", 16, SERVER[0], [0, 16]);
    assert_eq!(net.counter("by_rule"), 16);
    let [a, b] = by_uplink(&flows.open("tcp", EACH, SERVER[1]));
    assert!(a > 0 && b > 0, "not of this prefix: {a} and {b}");
    // A rule for a path that is not there is not in force.
    let [a, b] = by_uplink(&flows.open("udp", EACH, SERVER[0]));
    assert!(a > 0 && b > 0, "{a} and {b}");
    assert_eq!(net.counter("by_rule"), 16);
    // A dead path is not insisted on; one that is merely bad is.
    net.blackhole(1);
    wait_until("it is dead", LEAVE, || {
        net.path(1, false).judged.state == "dead"
    });
    flows.assert_opens("tcp", 16, SERVER[0], [16, 0]);
}

#[test]
fn check_and_dry_run_tell_what_would_be_done() {
    let net = Home::new();
    let before = fingerprint(&net);
    let plain = stdout(&net.home.mountain("check"));
    assert_has(&plain, &["`mountain up --adopt` lets new flows choose"]);
    let adopting = [
        "0.0.0.0/0: u0 via 10.40.0.1 (weight 1), u1 via 10.41.0.1 (weight 1); new flows choose",
        "to ::/0 they choose their uplink when they start",
        "routes and rules of their own would be added",
        "those that place new flows load",
    ];
    assert_has(&net.home.mountain_ok("check --adopt"), &adopting);
    let mut up = net.home.command(MOUNTAIN);
    let (up, log) = start_logged(up.args(["up", "--dry-run", "--adopt"]));
    for added in [
        "would add: ip route add default via 10.41.0.1 dev u1 metric 600 table 197",
        "would add: ip rule add priority 32765 from 10.41.0.2 lookup 197",
        "would add: ip -6 rule add priority 32765 from all uidrange 0-4294967294 lookup main suppress_prefixlength 0",
    ] {
        wait_said(&log, added);
    }
    up.signal(Signal::SIGTERM);
    assert!(up.finish().status.success(), "{}", said(&log));
    assert_eq!(fingerprint(&net), before);
    net.home.mountain_fails("up", "--adopt");
}
