// SPDX-License-Identifier: GPL-2.0-or-later
//! The traffic generators between two network namespaces joined by plain veth pairs.

mod bulk;
mod net;

use std::net::UdpSocket;
use std::ops::RangeBounds;
use std::thread::sleep;
use std::time::{Duration, Instant};

use mountain_lab::workload::echo::{EchoServer, Header};
use mountain_lab::workload::game::{self, GameConfig, Health, Packet};
use mountain_lab::workload::sys;
use testkit::median;

use net::Net;

fn assert_all_answered(packets: &[Packet], flows: u16, at_least: usize) {
    assert!(packets.len() >= at_least, "only {} packets", packets.len());
    let lost = packets.iter().find(|p| p.rtt_us.is_none());
    assert!(lost.is_none(), "of {} lost: {lost:?}", packets.len());
    for flow in 0..flows {
        let own = packets.iter().filter(|p| p.flow == flow);
        let mut seqs: Vec<u32> = own.map(|p| p.seq).collect();
        seqs.sort_unstable();
        let is_whole = seqs.iter().copied().eq(0..seqs.len() as u32);
        assert!(is_whole, "flow {flow} has gaps: {seqs:?}");
        assert!(!seqs.is_empty(), "flow {flow} sent nothing");
    }
}

/// Plays for so long: its packets, and how well it kept its plan.
fn play(cfg: GameConfig, ms: u64) -> (Vec<Packet>, Health) {
    let running = game::start(cfg).unwrap();
    sleep(Duration::from_millis(ms));
    running.finish().unwrap()
}

/// What was sent in a time.
fn sent(packets: &[Packet], time_ns: impl RangeBounds<u64>) -> Vec<&Packet> {
    let during = packets.iter().filter(|p| time_ns.contains(&p.sent_ns));
    during.collect()
}

#[test]
fn game_flows_are_answered_with_small_round_trip_times() {
    let net = Net::new();
    for v6 in [false, true] {
        // Packets come by the clock: so long for 2,000 of them.
        let (packets, health) = play(net.game(v6, 7001), 2_000);
        assert_all_answered(&packets, 20, 2_000);
        let rtt = median(packets.iter().map(|p| p.rtt_us.unwrap()).collect());
        assert!(rtt < 5_000, "v6 {v6}: median RTT over veth {rtt} us");
        for p in &packets {
            let (rtt, user) = (p.rtt_us.unwrap(), p.user_rtt_us.unwrap());
            assert!(rtt <= user, "kernel RTT above the program's: {p:?}");
            let sum = p.forward_us.unwrap() + p.backward_us.unwrap();
            assert!(sum.abs_diff(rtt) <= 2, "one way each: {p:?}");
            assert!(!p.reordered, "{p:?}");
        }
        assert_eq!(health.send_errors, 0);
        assert_eq!(health.unstamped, 0, "v6 {v6}: without transmit timestamps");
        assert_eq!(health.sent, packets.len() as u64);
        // Twenty flows over two paths: all on one has a probability of 2e-6.
        for path in [0, 1] {
            let is_used = packets.iter().any(|p| p.path == Some(path));
            assert!(is_used, "v6 {v6}: no flow on {path}");
        }
        let moved = (0..20).any(|flow| {
            let mut paths = packets.iter().filter(|p| p.flow == flow).map(|p| p.path);
            let first = paths.next().unwrap();
            paths.any(|p| p != first)
        });
        assert!(!moved, "a flow changed its path over a static route");
    }
}

#[test]
fn path_index_follows_the_route() {
    let net = Net::new();
    net.route("via 10.77.1.2");
    let running = game::start(net.game(false, 7002)).unwrap();
    sleep(Duration::from_millis(500));
    let moved_ns = sys::monotonic_ns();
    net.route("via 10.77.0.2");
    let settled_ns = sys::monotonic_ns() + 100_000_000;
    sleep(Duration::from_millis(1_200));
    let (packets, _) = running.finish().unwrap();
    assert_all_answered(&packets, 20, 1_000);
    let before = sent(&packets, ..moved_ns);
    assert!(before.len() > 200);
    assert!(before.iter().all(|p| p.path == Some(1)), "before the move");
    let after = sent(&packets, settled_ns..);
    assert!(after.len() > 500);
    assert!(after.iter().all(|p| p.path == Some(0)), "after the move");
}

#[test]
fn bound_flows_keep_their_device_and_dscp_is_set() {
    let net = Net::new();
    let mut cfg = GameConfig {
        rate_hz: 50.0,
        payload_bytes: 160,
        dscp: Some(46),
        ..net.game(false, 7003)
    };
    cfg.ends.bind_dev = Some("c1".into());
    // A bound socket hears only its own device: the answers have to come back there.
    net.server
        .ip("route replace 10.99.0.1 via 10.77.1.1 src 10.99.1.1");
    // Count EF packets at the server; anything else on this port stays at zero.
    net.server.run(
        "nft add table ip t; add chain ip t c { type filter hook input priority 0; }; \
         add rule ip t c udp dport 7003 ip dscp ef counter; \
         add rule ip t c udp dport 7003 ip dscp != ef counter",
    );
    let (packets, _) = play(cfg, 500);
    assert_all_answered(&packets, 20, 300);
    assert!(packets.iter().all(|p| p.path == Some(1)));
    let counts = net.server.counted("table ip t");
    assert_eq!(counts, [packets.len() as u64, 0], "EF, other");
}

#[test]
fn blackhole_is_loss_and_not_a_stalled_generator() {
    let net = Net::new();
    net.route("via 10.77.0.2");
    let running = game::start(net.game(false, 7004)).unwrap();
    sleep(Duration::from_millis(600));
    let from_ns = sys::monotonic_ns();
    net.server.ip("link set s0 down");
    let from_settled_ns = sys::monotonic_ns();
    sleep(Duration::from_millis(600));
    let (packets, health) = running.finish().unwrap();
    let before = sent(&packets, ..from_ns - 20_000_000);
    assert!(before.len() > 300);
    let lost = before.iter().find(|p| p.rtt_us.is_none());
    assert!(lost.is_none(), "lost before the blackhole: {lost:?}");
    let after = sent(&packets, from_settled_ns..);
    let count = after.len();
    assert!(count > 300, "the generator stopped sending: {count}");
    let seen = |p: &&&Packet| p.rtt_us.is_some() || p.path.is_some();
    let seen = after.iter().find(seen);
    assert!(seen.is_none(), "answered in the dark: {seen:?}");
    let count = packets.len() as u64;
    assert_eq!(health.sent, count, "every packet sent is accounted for");
}

#[test]
fn lost_answers_do_not_hide_the_path() {
    let net = Net::new();
    net.route("via 10.77.1.2");
    net.server.ip("route replace blackhole 10.99.0.1");
    let (packets, _) = play(net.game(false, 7005), 300);
    assert!(packets.len() > 200);
    for p in &packets {
        assert_eq!(p.rtt_us, None, "there is no way back");
        assert_eq!(p.path, Some(1), "the server saw them all on s1");
    }
}

#[test]
fn server_sees_reordering() {
    let net = Net::new();
    let ends = net.ends(false, 7006);
    let server = EchoServer::start(&ends).unwrap();
    // Flow, number, and whether it arrives after a later one.
    let packets = [
        (0, 0, false),
        (0, 2, false),
        (0, 1, true),
        (0, 3, false),
        (1, 0, false),
        (0, 3, false),
    ];
    let echoes = sys::run_in(&net.client_ns(), || {
        let socket = UdpSocket::bind("10.99.0.1:0")?;
        socket.connect(ends.server())?;
        socket.set_read_timeout(Some(Duration::from_secs(30)))?;
        socket.send(b"not one of ours, must stay unanswered")?;
        let mut echoes = Vec::new();
        for (flow, seq, _) in packets {
            let mut buf = [0u8; 100];
            Header::request(7, flow, seq).write(&mut buf);
            socket.send(&buf)?;
            let len = socket.recv(&mut buf)?;
            let echo = Header::read(&buf[..len]).expect("an echo with our header");
            echoes.push((echo.flow, echo.seq, echo.reordered));
        }
        Ok(echoes)
    })
    .unwrap();
    assert_eq!(echoes, packets);
    assert_eq!(server.arrivals().count(), 6, "the stranger is no arrival");
}

#[test]
fn wrong_configurations_are_refused_at_start() {
    let net = Net::new();
    let start = |change: &dyn Fn(&mut GameConfig)| {
        let mut cfg = net.game(false, 7007);
        change(&mut cfg);
        match game::start(cfg) {
            Ok(_) => panic!("started"),
            Err(error) => format!("{error:#}"),
        }
    };
    assert!(start(&|c| c.payload_bytes = 8).contains("payload_bytes = 8"));
    assert!(start(&|c| c.flows = 0).contains("flows = 0"));
    assert!(start(&|c| c.ends.client_ns = "/run/netns/none".into()).contains("/run/netns/none"));
    assert!(start(&|c| c.ends.bind_dev = Some("none".into())).contains("none"));
    assert!(start(&|c| c.ends.client_addr = "10.1.2.3".parse().unwrap()).contains("10.1.2.3"));
    // The port of the failed starts is free again.
    let running = game::start(net.game(false, 7007)).unwrap();
    let began = Instant::now();
    drop(running);
    let took = began.elapsed();
    let limit = Duration::from_millis(900);
    assert!(took < limit, "drop does not wait for stragglers: {took:?}");
}

#[test]
fn refused_packets_are_lost_and_timestamps_stay_aligned() {
    let net = Net::new();
    net.route("via 10.77.0.2");
    let running = game::start(net.game(false, 7008)).unwrap();
    sleep(Duration::from_millis(300));
    // The device's routes vanish with it: sending fails with "network is unreachable".
    let down_ns = sys::monotonic_ns();
    net.client.ip("link set c0 down");
    sleep(Duration::from_millis(300));
    net.client.ip("link set c0 up");
    net.route("via 10.77.0.2");
    sleep(Duration::from_millis(200));
    let up_ns = sys::monotonic_ns();
    sleep(Duration::from_millis(400));
    let (packets, health) = running.finish().unwrap();
    assert!(health.send_errors > 200, "{health:?}");
    assert_eq!(health.sent, packets.len() as u64);
    assert_eq!(health.unstamped, 0, "{health:?}");
    let later = sent(&packets, down_ns..);
    let refused = later.iter().filter(|p| p.rtt_us.is_none()).count();
    assert!(refused as u64 >= health.send_errors, "{refused} {health:?}");
    let after = sent(&packets, up_ns..);
    assert!(after.len() > 300);
    for p in &after {
        let (rtt, forward) = (p.rtt_us.expect("answered again"), p.forward_us.unwrap());
        assert!(forward <= rtt, "{p:?}");
    }
    // Timestamps of other packets would be wrong by a multiple of 16 ms, from then on.
    let rtt = median(after.iter().map(|p| p.rtt_us.unwrap()).collect());
    assert!(rtt < 8_000, "{rtt} us");
}
