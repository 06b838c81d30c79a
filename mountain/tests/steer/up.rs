// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain up` end to end: it moves traffic, leaves alone what it must, and undoes everything.

use std::io::Read;
use std::net::SocketAddrV6;
use std::time::Duration;

use crate::support::*;

const FLOWS: usize = 20;

/// What these tests rest on: loss and overtaking are seen where there are some.
#[test]
fn the_traffic_counts_what_is_lost_and_what_is_overtaken() {
    let net = Net::new();
    let traffic = Traffic::start(&net, SERVER4, FLOWS);
    traffic.during(HALF).assert_whole("without a black hole");
    net.blackhole(1);
    let holed = traffic.during(HALF).assert_lost("in the black hole");
    assert_eq!(holed.by_path[1], 0, "{holed:?}");
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
fn flows_of_both_families_leave_a_black_hole() {
    let net = Net::steered();
    let families = [SERVER4, SERVER6].map(|to| (to, Traffic::start(&net, to, FLOWS)));
    for (to, traffic) in &families {
        let before = traffic.during(HALF);
        assert!(before.by_both(), "both paths to {to}: {before:?}");
        assert_eq!(before.reordered, 0, "to {to}: {before:?}");
    }
    net.blackhole(1);
    for ((to, traffic), ipv6) in families.iter().zip([false, true]) {
        net.client.wait_left("u1", ipv6);
        let what = format!("all to {to} leave the black hole");
        traffic.during(HALF).assert_by(0, &what);
    }
    net.client.mountain_says("explain", "u1");

    net.client.mountain_ok("down");
    for (to, traffic) in &families {
        let what = format!("to {to} without mountain");
        traffic.during(HALF).assert_lost(&what);
    }
}

#[test]
fn a_healthy_host_sees_no_loss_and_no_reordering() {
    let net = Net::new();
    let traffic = Traffic::start(&net, SERVER4, FLOWS);
    net.steer();
    traffic.during(2 * HALF);
    net.client.mountain_ok("down");
    traffic.finish().assert_in_order("from up to down");
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
    std::thread::sleep(HALF);
    assert_has(&net.client.fingerprint(), &["tcx egress of u1: 1"]);
    net.client.mountain_ok("down");
    assert_eq!(net.client.fingerprint(), before);
}

/// Such as the lock of a script that starts it.
#[test]
fn the_daemon_keeps_no_file_of_its_callers_open() {
    let net = Net::new();
    let lock = std::env::temp_dir().join(format!("mtt-lock-{}", std::process::id()));
    let up = format!("flock {} {MOUNTAIN} up", lock.display());
    net.client.run(&up);
    net.client.run(&format!("flock -n {} true", lock.display()));
    net.client.mountain_ok("down");
    std::fs::remove_file(&lock).unwrap();
}

#[test]
fn kill_9_leaves_traffic_to_the_kernel_and_the_next_up_takes_over() {
    let net = Net::steered();
    let traffic = Traffic::start(&net, SERVER4, FLOWS);
    traffic.during(HALF);
    net.kill_daemon();
    traffic.during(2 * HALF).assert_whole("traffic goes on");
    net.client.mountain_fails("status", "not running");

    // What the kill leaves is the kernel's own choice: it does not see a black hole, and did
    // not before.
    net.steer();
    net.lose(1);
    traffic.during(HALF).assert_arrived("it is steered again");
    net.kill_daemon();
    traffic.during(HALF).assert_lost("not after the kill");
    // A gateway that the new daemon has never heard may drop pings: the kernel decides.
    net.up();
    wait_until("u1 is unknown", Duration::from_secs(60), || {
        let reason = net.path("u1").judged.reason;
        reason.ends_with("has never answered: the kernel decides")
    });
    traffic.during(HALF).assert_lost("not moved on no evidence");
    for command in ["status", "check"] {
        net.client.mountain_says(
            command,
            "if it does not answer pings, give it another `probe_target`",
        );
    }
    net.server.no_hole();
    net.wait_good();
    net.lose(1);
    traffic.during(HALF).assert_arrived("it takes over");

    // `down` after a kill has nothing to undo, and says so.
    net.kill_daemon();
    net.client.mountain_says("down", "not running");
}

#[test]
fn sockets_that_chose_their_uplink_stay() {
    let net = Net::steered();
    net.lose(1);
    let (client, server) = (&net.client, &net.server);
    // The black hole is real for who insists on it.
    let assert_stays = |bind| {
        let traffic = Traffic::between(client, server, SERVER4, 4, Some(bind));
        let counts = traffic.during(HALF);
        assert!(counts.sent > 100, "{counts:?}");
        assert_eq!(counts.arrived(), 0, "{bind} stays on u1: {counts:?}");
    };
    assert_stays("%u1");
    // An uplink-bound source may be hashed to either path: send it by u1 with a host route.
    client.ip("rule add from 10.30.1.1 lookup 77 priority 100");
    client.ip("route add default via 10.30.1.2 dev u1 table 77");
    assert_stays("10.30.1.1");
    let traffic = Traffic::start(&net, SERVER4, 4);
    traffic.during(HALF).assert_arrived("others do not stay");
}

#[test]
fn an_fwmark_rule_and_a_more_specific_route_keep_their_packets() {
    let net = Net::new();
    net.server.ip("addr add 203.0.113.77/32 dev lo");
    for line in [
        "rule add fwmark 0xca6c lookup 88 priority 90",
        "route add default via 10.30.1.2 dev u1 table 88",
        "route add 203.0.113.64/26 via 10.30.1.2 dev u1 src 10.98.0.1",
    ] {
        net.client.ip(line);
    }
    net.up();
    net.wait_good();
    net.lose(1);
    let ping = |args| net.client.pings(&format!("-c 3 -i 0.1 -W 1 {args}"));
    let marked = ping("-m 51820 203.0.113.1");
    assert!(!marked, "marked packets stay on u1, into the black hole");
    assert!(!ping("203.0.113.77"), "the more specific route stays on u1");
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

/// An address of the server that pings leave for by path `i`. `prefix`: its first part.
fn server_by(net: &Net, i: usize, prefix: &str) -> String {
    let bits = if prefix.contains(':') { 128 } else { 32 };
    let mut servers = (1..=20).map(|n| format!("{prefix}{n}"));
    let server = servers.find(|server| {
        net.server
            .ip(&format!("addr replace {server}/{bits} dev lo"));
        path_of_pings(net, server) == i
    });
    server.expect("one of 20 addresses by the path")
}

/// How many of 20 pings are answered.
fn answered(net: &Net, args: &str, server: &str) -> u32 {
    let args = format!("-c 20 -i 0.05 -W 1 {args} {server}");
    let args: Vec<&str> = args.split_whitespace().collect();
    let text = stdout(&net.client.output("ping", &args));
    let received = text.split(" packets transmitted, ").nth(1);
    let received = received.and_then(|t| t.split(' ').next()?.parse::<u32>().ok());
    received.unwrap_or_else(|| panic!("{text}"))
}

#[test]
fn large_packets_keep_working_when_the_other_path_is_smaller() {
    let net = Net::new();
    // The server's packets all come by the first path, and would not fit if that were the small one.
    let (large, small) = (0, 1);
    let server = server_by(&net, large, "203.0.113.");
    net.client.ip(&format!("link set u{small} mtu 1280"));
    let ping = |args: &str| answered(&net, args, &server);
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
fn a_smaller_mtu_of_ipv6_is_followed_though_nothing_announces_it() {
    let net = Net::new();
    let server = server_by(&net, 0, "2001:db8:98::");
    let ping = |args: &str| answered(&net, args, &server);
    net.steer();
    net.lose(0);
    net.client.wait_left("u0", true);
    assert!(ping("-M do -s 1372") >= 19, "moved to the other path");
    net.client.sysctl("net.ipv6.conf.u1.mtu", "1280");
    wait_until("large packets stay in the black hole", LEAVE, || {
        ping("-M do -s 1372") == 0
    });
    assert!(ping("-s 56") >= 19, "small ones are moved");
}

#[test]
fn neither_a_neighbour_flush_nor_a_gateway_without_arp_stops_traffic() {
    let net = Net::steered();
    let mut seen = Vec::new();
    let mut survives_flushes = || {
        let traffic = Traffic::start(&net, SERVER4, FLOWS);
        for _ in 0..5 {
            std::thread::sleep(Duration::from_millis(200));
            // `ip` complains when entries are back before it has finished: mountain puts them back.
            net.client.try_ip("neigh flush dev u0");
            net.client.try_ip("neigh flush dev u1");
        }
        std::thread::sleep(Duration::from_millis(300));
        let all = traffic.finish();
        let states = ["u0", "u1"].map(|dev| net.path(dev).judged.state);
        // What was redirected between the flush and our hearing of it is lost: a packet or two a flush.
        let is_whole = all.arrived() + 5 * 4 >= all.sent && states == ["good"; 2];
        seen.push((all, states));
        is_whole
    };
    // On a busy machine we may hear of it late: another try then, once the paths are good.
    let whole = (0..3).any(|_| {
        net.wait_good();
        survives_flushes()
    });
    assert!(whole, "{seen:?}");

    let traffic = Traffic::start(&net, SERVER4, FLOWS);
    std::thread::sleep(Duration::from_millis(300));
    // Dead for good: neither packets nor ARP, and the entry is flushed as if it had timed out.
    net.server.ip("link set s1 arp off");
    net.blackhole(1);
    net.client.try_ip("neigh flush dev u1");
    net.client.wait_left("u1", false);
    std::thread::sleep(Duration::from_secs(1));
    traffic.during(2 * HALF).assert_by(0, "no flow is lost");
    net.client.mountain_ok("down");
    traffic.during(HALF).assert_lost("without mountain");
}

/// As FRR does it before maintenance.
#[test]
fn a_path_is_drained_by_its_weight() {
    let net = Net::steered();
    let traffic = Traffic::start(&net, SERVER4, FLOWS);
    let before = traffic.during(HALF);
    assert!(before.by_both(), "{before:?}");
    net.client.ip("route replace 203.0.113.0/24 src 10.98.0.1 \
         nexthop via 10.30.0.2 dev u0 weight 255 nexthop via 10.30.1.2 dev u1 weight 1");
    let mut seen = Vec::new();
    wait_until("nearly all leave", LEAVE, || {
        seen.push(traffic.during(HALF).assert_arrived("meanwhile"));
        let last = seen[seen.len() - 1];
        last.by_path[1] * 20 <= last.sent
    });
    assert!(seen.iter().all(|counts| counts.reordered == 0), "{seen:?}");
    assert!(net.counter("move_flowlet") > 0, "in pauses");
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
        .ip("route replace 203.0.113.0/24 src 10.98.0.1 via 10.30.0.2 dev u0");
    traffic.during(HALF).assert_by(0, "u0 alone");
    net.join(1);
    net.multipath();
    net.wait_good();
    drop(traffic);
    net.client.wait_settled();
    let traffic = Traffic::start(&net, SERVER4, FLOWS);
    net.lose(1);
    traffic.during(HALF).assert_arrived("it is steered again");
}

#[test]
fn a_link_flap_moves_traffic_away_and_back() {
    let net = Net::steered();
    let traffic = Traffic::start(&net, SERVER4, FLOWS);
    let before = traffic.during(HALF);
    assert!(before.by_path[1] > 0, "{before:?}");
    net.server.ip("link set s1 down");
    net.client.wait_left("u1", false);
    traffic.during(HALF).assert_by(0, "while u1 is down");
    net.server.ip("link set s1 up");
    net.wait_used("u1");
    traffic.during(HALF).assert_arrived("u1 is up again");
    let paths = net.client.status().paths;
    assert_eq!(paths.len(), 4, "and no path is left over");
    net.client.mountain_ok("down");
    net.server.ip("link set s1 down");
    traffic.during(HALF).assert_lost("without mountain");
}

/// Leaves one next hop of IPv4 and none of IPv6, as while BGP gives up a next hop and takes it again.
fn without_multipath(net: &Net) {
    net.client
        .ip("route replace 203.0.113.0/24 src 10.98.0.1 via 10.30.0.2 dev u0");
    net.client.ip("-6 route del 2001:db8:98::/64");
    wait_until("nothing is steered", LEAVE, || {
        net.client.status().paths.is_empty()
    });
}

/// Another host may have the gateway's address by now.
#[test]
fn a_path_that_was_silent_is_not_known_to_answer_after_a_flap() {
    let net = Net::steered();
    without_multipath(&net);
    net.server.ip("link set s1 address 02:00:00:00:77:01");
    net.server.hole("iifname s1 icmp type echo-request");
    net.client.try_ip("neigh flush dev u1");
    let is_silent = || {
        let paths = net.client.status().paths;
        let mut u1 = paths.iter().filter(|p| p.device == "u1" && !p.ipv6);
        u1.any(|p| {
            p.judged
                .reason
                .ends_with("has never answered: the kernel decides")
        })
    };
    for stay in ["first", "second"] {
        net.multipath();
        wait_until(
            &format!("u1 is silent in its {stay} stay"),
            LEAVE,
            is_silent,
        );
        without_multipath(&net);
    }
}

#[test]
fn a_path_that_is_dead_when_its_routes_come_back_is_left() {
    let net = Net::steered();
    without_multipath(&net);
    net.blackhole(1);
    net.multipath();
    wait_until("u1 is dead", LEAVE, || {
        let paths = net.client.status().paths;
        let is_dead = |device: &str, state: &str| device == "u1" && state == "dead";
        paths.iter().any(|p| is_dead(&p.device, &p.judged.state))
    });
    let traffic = Traffic::start(&net, SERVER4, FLOWS);
    traffic.during(HALF).assert_by(0, "it answered before");
}

/// By IPv4 alone, of which the kernel sends nothing by itself that the program would see.
#[test]
fn an_idle_host_is_probed_seldom_until_something_is_sent() {
    let net = Net::new();
    net.client.ip("-6 route del 2001:db8:98::/64");
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
    // A laptop's processor may sleep in between: the timer that runs otherwise would be 200.
    let wake_ups = net.client.wake_ups(Duration::from_secs(2));
    assert!(wake_ups < 150, "{wake_ups} wake-ups in 2 s");
    let traffic = Traffic::start(&net, SERVER4, 1);
    wait_until("it is probed often", LEAVE, || in_two_seconds() > 24);
    drop(traffic);
    wait_until("it is idle again", 2 * LEAVE, || in_two_seconds() <= 12);
    // An uplink without Ethernet headers that has never counted a packet may count none.
    net.client.ip("tuntap add t0 mode tun");
    net.client.sysctl("net.ipv6.conf.t0.disable_ipv6", "1");
    net.client.bring_up("t0", &["10.30.9.1/24"]);
    net.client
        .ip("route add 10.97.0.0/16 nexthop via 10.30.0.2 dev u0 \
         nexthop via 10.30.9.2 dev t0");
    wait_until("it may be busy", LEAVE, || in_two_seconds() > 24);
    // With a program that reads, it counts what it sends.
    let _modem = Worker::inside(&net.client, |stop| {
        let mut modem = tun::attach("t0");
        while !stop.is_set() {
            if tun::readable([&modem], 20) == [true] {
                let _ = modem.read(&mut [0; 2048]);
            }
        }
    });
    wait_until("only probes leave", 3 * LEAVE, || in_two_seconds() <= 12);
    let socket = net.client.udp("10.30.9.1:0");
    wait_until("something leaves by the tunnel", LEAVE, || {
        socket.send_to(b"x", "10.30.9.2:9").unwrap();
        in_two_seconds() > 24
    });
    wait_until("only probes leave again", 3 * LEAVE, || {
        in_two_seconds() <= 12
    });
}

/// As neighbour discovery sends, which must not make an idle host look busy.
#[test]
fn packets_to_a_gateway_itself_count_as_those_of_the_link() {
    let net = Net::steered();
    net.server.ip("-6 addr add fe80::d/64 dev s0 nodad");
    let u0 = net.client.with(|| testkit::ifindex("u0"));
    let gateway = SocketAddrV6::new("fe80::d".parse().unwrap(), 9, 0, u0);
    let socket = net.client.udp("[::]:0");
    let before = net.counter("pass_dest");
    wait_until("they are counted", LEAVE, || {
        socket.send_to(b"x", gateway).unwrap();
        net.counter("pass_dest") >= before + 10
    });
}
