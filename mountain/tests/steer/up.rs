// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain up` end to end: it moves traffic, leaves alone what it must, and undoes everything.

use std::time::Duration;

use crate::support::*;

const FLOWS: usize = 20;

fn leaves_a_black_hole(server: &str) {
    let net = Net::steered();
    let traffic = Traffic::start(&net, server, FLOWS);
    let before = traffic.during(Duration::from_millis(500));
    assert!(
        before.by_path[0] > 0 && before.by_path[1] > 0,
        "both paths are used: {before:?}"
    );
    assert_eq!(before.reordered, 0, "{before:?}");

    net.blackhole(1);
    net.client.wait_left("u1", server.contains(':'));
    let after = traffic.during(Duration::from_millis(500));
    assert_eq!(
        after.by_path[1], 0,
        "nothing comes out of the black hole: {after:?}"
    );
    assert!(
        after.nearly_all_arrived(),
        "and nothing goes into it: {after:?}"
    );
    net.client.mountain_says("explain", "u1");

    net.client.mountain_ok("down");
    let plain = traffic.during(Duration::from_millis(500));
    assert!(plain.many_lost(), "without mountain it is lost: {plain:?}");
}

/// What these tests rest on: loss and overtaking are seen where there are some.
#[test]
fn the_traffic_counts_what_is_lost_and_what_is_overtaken() {
    let net = Net::new();
    let traffic = Traffic::start(&net, SERVER4, FLOWS);
    let whole = traffic.during(Duration::from_millis(300));
    assert_eq!(whole.arrived(), whole.sent, "{whole:?}");
    net.blackhole(1);
    let holed = traffic.during(Duration::from_millis(300));
    assert!(holed.many_lost() && holed.by_path[1] == 0, "{holed:?}");
    assert!(!holed.nearly_all_arrived(), "{holed:?}");
    drop(traffic);
    net.server.no_hole();

    let traffic = Traffic::start(&net, SERVER4, 0);
    net.client.with(|| {
        let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
        for seq in [1, 3, 2, 4, 4, 1] {
            let packet = traffic_packet(0, seq, 0);
            socket.send_to(&packet, (SERVER4, TRAFFIC_PORT)).unwrap();
        }
    });
    let all = traffic.finish();
    assert_eq!((all.arrived(), all.reordered), (6, 2), "{all:?}");
}

#[test]
fn flows_leave_a_black_hole() {
    leaves_a_black_hole(SERVER4);
}

#[test]
fn flows_leave_a_black_hole_by_ipv6() {
    leaves_a_black_hole(SERVER6);
}

#[test]
fn a_healthy_host_sees_no_loss_and_no_reordering() {
    let net = Net::new();
    let traffic = Traffic::start(&net, SERVER4, FLOWS);
    net.steer();
    traffic.during(Duration::from_secs(1));
    net.client.mountain_ok("down");
    let all = traffic.finish();
    assert_eq!(all.arrived(), all.sent, "{all:?}");
    assert_eq!(all.reordered, 0, "{all:?}");
}

#[test]
fn up_then_down_leaves_the_host_as_it_was() {
    let net = Net::new();
    // Resolve what pings resolve, so that neighbours do not differ for that reason.
    for a in ["10.30.0.2", "10.30.1.2", "fd30:0::2", "fd30:1::2"] {
        wait_until("the gateway answers", LEAVE, || {
            net.client.pings(&format!("-c 1 -W 1 {a}"))
        });
    }
    let before = net.client.fingerprint();
    net.up();
    std::thread::sleep(Duration::from_millis(500));
    let during = net.client.fingerprint();
    assert!(during.contains("tcx egress of u1: 1"), "attached: {during}");
    net.client.mountain_ok("down");
    assert_eq!(net.client.fingerprint(), before);
}

#[test]
fn kill_9_leaves_traffic_to_the_kernel_and_the_next_up_takes_over() {
    let net = Net::steered();
    let traffic = Traffic::start(&net, SERVER4, FLOWS);
    let half = Duration::from_millis(500);
    traffic.during(half);
    net.kill_daemon();
    let killed = traffic.during(2 * half);
    assert_eq!(killed.arrived(), killed.sent, "traffic goes on: {killed:?}");
    net.client.mountain_fails("status", "not running");

    // What the kill leaves is the kernel's own choice: it does not see a black hole, and did
    // not before.
    net.steer();
    net.lose(1);
    let steered = traffic.during(half);
    assert!(steered.nearly_all_arrived(), "{steered:?}");
    net.kill_daemon();
    let killed = traffic.during(half);
    assert!(
        killed.many_lost(),
        "still steered after the kill: {killed:?}"
    );
    // A gateway that the new daemon has never heard may drop pings: the kernel decides.
    net.up();
    wait_until("u1 is unknown", Duration::from_secs(60), || {
        let reason = net.path("u1").judged.reason;
        reason.ends_with("has never answered: the kernel decides")
    });
    let unknown = traffic.during(half);
    assert!(unknown.many_lost(), "moved on no evidence: {unknown:?}");
    net.server.no_hole();
    net.wait_good();
    net.blackhole(1);
    net.client.wait_left("u1", false);
    let again = traffic.during(half);
    assert!(again.nearly_all_arrived(), "not taken over: {again:?}");

    // `down` after a kill has nothing to undo, and says so.
    net.kill_daemon();
    assert!(net.client.mountain_ok("down").contains("not running"));
}

#[test]
fn sockets_that_chose_their_uplink_stay() {
    let net = Net::steered();
    net.lose(1);
    // The black hole is real for who insists on it.
    for bind in ["%u1", "10.30.1.1"] {
        if bind == "10.30.1.1" {
            // An uplink-bound source may be hashed to either path: send it by u1 with a host route.
            net.client
                .ip("rule add from 10.30.1.1 lookup 77 priority 100");
            net.client
                .ip("route add default via 10.30.1.2 dev u1 table 77");
        }
        let (client, server) = (&net.client, &net.server);
        let traffic = Traffic::between(client, server, SERVER4, 4, Some(bind));
        let counts = traffic.during(Duration::from_millis(400));
        assert!(counts.sent > 100, "{counts:?}");
        assert_eq!(
            counts.arrived(),
            0,
            "{bind} stays on its uplink: {counts:?}"
        );
    }
    // Others do not.
    let traffic = Traffic::start(&net, SERVER4, 4);
    let counts = traffic.during(Duration::from_millis(400));
    assert!(counts.nearly_all_arrived(), "{counts:?}");
}

#[test]
fn an_fwmark_rule_and_a_more_specific_route_keep_their_packets() {
    let net = Net::new();
    net.server.ip("addr add 10.98.1.77/32 dev lo");
    for line in [
        "rule add fwmark 0xca6c lookup 88 priority 90",
        "route add default via 10.30.1.2 dev u1 table 88",
        "route add 10.98.1.64/26 via 10.30.1.2 dev u1 src 10.98.0.1",
    ] {
        net.client.ip(line);
    }
    net.up();
    net.wait_good();
    net.lose(1);
    let ping = |args| net.client.pings(&format!("-c 3 -i 0.1 -W 1 {args}"));
    let marked = ping("-m 51820 10.98.1.1");
    assert!(!marked, "marked packets stay on u1, into the black hole");
    assert!(!ping("10.98.1.77"), "the more specific route stays on u1");
    assert!(ping(SERVER4), "others do not");
}

/// The path that the kernel chooses for pings to an address of the server.
fn path_of_pings(net: &Net, server: &str) -> usize {
    let received = |i: usize| {
        let device = format!("s{i}");
        net.server.with(|| arrivals::received(&device).0)
    };
    let before = [0, 1].map(received);
    net.client.run(&format!("ping -c 20 -i 0.01 -W 1 {server}"));
    let grown = [0, 1].map(|i| received(i) - before[i]);
    assert!(grown[0].abs_diff(grown[1]) >= 15, "on one path: {grown:?}");
    usize::from(grown[1] > grown[0])
}

#[test]
fn large_packets_keep_working_when_the_other_path_is_smaller() {
    let net = Net::new();
    // The server's packets all come by the first path, and would not fit if that were the small one.
    let (large, small) = (0, 1);
    let server = (1..=20)
        .map(|n| format!("10.98.1.{n}"))
        .find(|server| {
            net.server.ip(&format!("addr replace {server}/32 dev lo"));
            path_of_pings(&net, server) == large
        })
        .expect("one of 20 addresses by the first path");
    net.client.ip(&format!("link set u{small} mtu 1280"));
    let ping = |args: &str| {
        let args = format!("-c 20 -i 0.05 -W 1 {args} {server}");
        let args: Vec<&str> = args.split_whitespace().collect();
        let text = stdout(&net.client.output("ping", &args));
        let received = text.split(" packets transmitted, ").nth(1);
        let received = received.and_then(|t| t.split(' ').next()?.parse::<u32>().ok());
        received.unwrap_or_else(|| panic!("{text}"))
    };
    net.steer();
    assert_eq!(ping("-M do -s 1372"), 20);
    assert_eq!(ping("-M do -s 1300"), 20);

    // The larger path turns bad: small packets leave it, large ones have nowhere else to go.
    net.lose(large as u32);
    assert!(ping("-s 56") >= 19, "small ones arrive by the other path");
    assert_eq!(ping("-M do -s 1372"), 0, "it is a black hole");
    net.server.no_hole();
    // It works again, and is still held: large packets pass by it as the kernel sent them.
    assert_ne!(net.path(&format!("u{large}")).judged.state, "good");
    assert_eq!(ping("-M do -s 1372"), 20);
}

#[test]
fn a_neighbour_flush_under_traffic_does_not_stop_it() {
    let net = Net::steered();
    let traffic = Traffic::start(&net, SERVER4, FLOWS);
    for _ in 0..5 {
        std::thread::sleep(Duration::from_millis(200));
        // `ip` complains when entries are back before it has finished: mountain puts them back.
        net.client.try_ip("neigh flush dev u0");
        net.client.try_ip("neigh flush dev u1");
    }
    std::thread::sleep(Duration::from_millis(300));
    let all = traffic.finish();
    // What was redirected between the flush and our hearing of it is lost: a packet or two a flush.
    assert!(all.arrived() + 5 * 4 >= all.sent, "{all:?}");
    assert_eq!(net.path("u0").judged.state, "good");
    assert_eq!(net.path("u1").judged.state, "good");
}

#[test]
fn a_gateway_that_stops_answering_arp_loses_no_flow() {
    let net = Net::steered();
    let traffic = Traffic::start(&net, SERVER4, FLOWS);
    std::thread::sleep(Duration::from_millis(300));
    // Dead for good: neither packets nor ARP, and the entry is flushed as if it had timed out.
    net.server.ip("link set s1 arp off");
    net.blackhole(1);
    net.client.try_ip("neigh flush dev u1");
    net.client.wait_left("u1", false);
    std::thread::sleep(Duration::from_secs(1));
    let after = traffic.during(Duration::from_secs(1));
    assert!(after.nearly_all_arrived(), "{after:?}");
    assert_eq!(after.by_path[1], 0, "{after:?}");
    net.client.mountain_ok("down");
    let plain = traffic.during(Duration::from_millis(500));
    assert!(plain.many_lost(), "without mountain they are: {plain:?}");
}

#[test]
fn a_device_that_is_deleted_and_made_again_is_adopted_again() {
    let net = Net::new();
    net.up();
    net.wait_good();
    let traffic = Traffic::start(&net, SERVER4, FLOWS);
    net.client.ip("link del u1");
    wait_until("it is noticed", LEAVE, || {
        let paths = net.client.status().paths;
        paths.iter().all(|p| p.device != "u1")
    });
    // The kernel drops an IPv4 multipath route with the first of its devices that is deleted.
    net.client
        .ip("route replace 10.98.1.0/24 src 10.98.0.1 via 10.30.0.2 dev u0");
    let alone = traffic.during(Duration::from_millis(500));
    assert_eq!(alone.arrived(), alone.by_path[0], "{alone:?}");
    assert!(alone.nearly_all_arrived(), "{alone:?}");
    net.join(1);
    net.multipath();
    net.wait_good();
    drop(traffic);
    net.client.wait_settled();
    let traffic = Traffic::start(&net, SERVER4, FLOWS);
    net.lose(1);
    let after = traffic.during(Duration::from_millis(500));
    assert!(after.nearly_all_arrived(), "not steered again: {after:?}");
}

#[test]
fn a_link_flap_moves_traffic_away_and_back() {
    let net = Net::steered();
    let traffic = Traffic::start(&net, SERVER4, FLOWS);
    let before = traffic.during(Duration::from_millis(300));
    assert!(before.by_path[1] > 0, "{before:?}");
    net.server.ip("link set s1 down");
    net.client.wait_left("u1", false);
    let down = traffic.during(Duration::from_millis(500));
    assert_eq!(down.by_path[1], 0, "{down:?}");
    assert!(down.nearly_all_arrived(), "{down:?}");
    net.server.ip("link set s1 up");
    net.wait_used("u1");
    let up = traffic.during(Duration::from_millis(500));
    assert!(up.nearly_all_arrived(), "{up:?}");
    assert!(
        net.client.status().paths.len() == 4,
        "and no path is left over"
    );
    net.client.mountain_ok("down");
    net.server.ip("link set s1 down");
    let plain = traffic.during(Duration::from_millis(500));
    assert!(plain.many_lost(), "without mountain it is lost: {plain:?}");
}

/// By IPv4 alone, of which the kernel sends nothing by itself that the program would see.
#[test]
fn an_idle_host_is_probed_seldom_until_something_is_sent() {
    let net = Net::new();
    net.client.ip("-6 route del fd98:1::/64");
    net.up();
    net.wait_used("u0");
    net.wait_used("u1");
    let in_two_seconds = || {
        let sent = || net.path("u0").probes.sent + net.path("u1").probes.sent;
        let before = sent();
        std::thread::sleep(Duration::from_secs(2));
        sent() - before
    };
    // Two a second each; 20 of them otherwise.
    wait_until("it is probed seldom", 2 * LEAVE, || in_two_seconds() <= 12);
    let _traffic = Traffic::start(&net, SERVER4, 1);
    wait_until("it is probed often", LEAVE, || in_two_seconds() > 24);
}
