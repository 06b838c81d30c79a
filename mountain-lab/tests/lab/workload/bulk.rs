// SPDX-License-Identifier: GPL-2.0-or-later
//! Bulk, short and foreign traffic, and the observer of TCP segments.

use std::thread::sleep;
use std::time::{Duration, Instant};

use etherparse::PacketBuilder;
use mountain_lab::workload::bulk::{self, BulkConfig, BulkReport, FlowReport, Pattern};
use mountain_lab::workload::dial::Ends;
use mountain_lab::workload::load::{self, LoadConfig};
use mountain_lab::workload::metrics::{self, Leave, Onset};
use mountain_lab::workload::short::{self, ShortConfig, ShortFlow};
use mountain_lab::workload::sniff;
use mountain_lab::workload::sys;

use super::net::Net;
use crate::frames::PacketSocket;

fn bulk_config(net: &Net, v6: bool, port: u16, pattern: Pattern) -> BulkConfig {
    BulkConfig {
        ends: net.ends(v6, port),
        flows: 4,
        pattern,
        begins: Duration::ZERO,
        congestion: None,
        dscp: None,
        sent: None,
        min_rtt_us: 10_000,
    }
}

fn paced(rate_bps: u64) -> Pattern {
    Pattern::Paced { rate_bps }
}

/// Payload that arrived.
fn bytes(flow: &FlowReport) -> u64 {
    flow.bytes_by_bucket.iter().sum()
}

/// Runs for so long.
fn run(cfg: BulkConfig, ms: u64) -> BulkReport {
    let running = bulk::start(cfg).unwrap();
    sleep(Duration::from_millis(ms));
    running.stop().unwrap()
}

#[test]
fn bulk_that_begins_later_is_connected_and_silent_until_then() {
    let net = Net::new();
    let begins = Duration::from_millis(600);
    let config = || BulkConfig {
        begins,
        ..bulk_config(&net, false, 7009, paced(2_000_000))
    };
    let silent = run(config(), 300);
    assert_eq!(silent.flows.len(), 4);
    assert!(silent
        .flows
        .iter()
        .all(|flow| bytes(flow) == 0 && flow.error.is_none()));
    let report = run(config(), 1_500);
    let until_ns = report.start_ns + begins.as_nanos() as u64;
    assert_eq!(report.goodput_bps(report.start_ns, until_ns), 0.0);
    assert!(report.flows.iter().all(|flow| bytes(flow) > 0));
}

#[test]
fn paced_bulk_keeps_its_rate_and_shows_its_path() {
    let net = Net::new();
    for v6 in [false, true] {
        let began = Instant::now();
        let report = run(bulk_config(&net, v6, 7010, paced(2_000_000)), 2_100);
        // A flow that had to wait for its CPU does not make up for it: it may be slower, never faster.
        let longest = began.elapsed().as_secs_f64();
        assert_eq!(report.flows.len(), 4);
        assert_eq!(report.unobserved, 0);
        for flow in &report.flows {
            assert_eq!(flow.error, None, "port {}", flow.client_port);
            let rate_bps = bytes(flow) as f64 * 8.0 / longest;
            let is_paced = (0.7e6..2.2e6).contains(&rate_bps);
            assert!(is_paced, "v6 {v6}: {rate_bps} bit/s");
            let moves = flow.trace.moves_within(&(0..u64::MAX));
            assert_eq!(moves, 0, "{:?}", flow.trace);
            let visit = flow.trace.visits[0];
            assert!(visit.path.is_some(), "{visit:?}");
            // The observer saw what the program read.
            let read = bytes(flow);
            assert!(visit.bytes >= read, "{visit:?} {read}");
            assert!(visit.bytes < read + 100_000, "{visit:?} {read}");
            assert!(flow.trace.reorderings.is_empty());
        }
        let total = report.goodput_bps(report.start_ns, report.start_ns + 2_000_000_000);
        assert!((2.8e6..9.2e6).contains(&total), "{total}");
    }
}

#[test]
fn bulk_follows_a_route_change_and_outlives_it() {
    let net = Net::new();
    net.route("via 10.77.0.2");
    let mut cfg = bulk_config(&net, false, 7011, paced(1_000_000));
    cfg.congestion = Some("reno".into());
    let running = bulk::start(cfg).unwrap();
    sleep(Duration::from_millis(700));
    let moved_ns = sys::monotonic_ns();
    net.route("via 10.77.1.2");
    let took_ns = sys::monotonic_ns() - moved_ns;
    sleep(Duration::from_millis(1_200));
    let report = running.stop().unwrap();
    let until_ns = moved_ns + 1_100_000_000;
    let onset = Onset {
        at_ns: moved_ns,
        until_ns,
        path: 0,
        blackhole: false,
    };
    for flow in &report.flows {
        assert_eq!(flow.error, None);
        let paths: Vec<_> = flow.trace.visits.iter().map(|v| v.path).collect();
        assert_eq!(paths, [Some(0), Some(1)]);
        match flow.time_to_leave(onset) {
            Leave::Left(ns) => assert!(ns < took_ns + 200_000_000, "left after {ns} ns"),
            other => panic!("{other:?}"),
        }
        let other = Onset { path: 1, ..onset };
        assert_eq!(flow.time_to_leave(other), Leave::NotThere);
    }
}

#[test]
fn saturating_flows_share_and_requests_are_answered() {
    let net = Net::new();
    let report = run(bulk_config(&net, false, 7012, Pattern::Saturating), 600);
    for flow in &report.flows {
        let bytes = bytes(flow);
        assert!(
            bytes > 1_000_000,
            "port {}: {bytes} bytes",
            flow.client_port
        );
        assert_eq!(flow.error, None);
    }
    let pattern = Pattern::RequestResponse {
        bytes: (20_000, 1_000),
        think_ms: 10,
    };
    let report = run(bulk_config(&net, false, 7012, pattern), 800);
    for flow in &report.flows {
        // Each but the last was answered: the next one waits for that.
        let n = bytes(flow) / 20_000;
        assert!(n > 8, "only {n} requests in 0.8 s");
        assert_eq!(flow.error, None);
    }
}

#[test]
fn lost_flows_and_wrong_bulk_configurations_are_told() {
    let net = Net::new();
    let cfg = bulk_config(&net, false, 7013, paced(1_000_000));
    let running = bulk::start(cfg.clone()).unwrap();
    sleep(Duration::from_millis(200));
    // Every further segment is answered by a reset.
    net.server.run(
        "nft add table ip t; add chain ip t c { type filter hook input priority 0; }; \
         add rule ip t c tcp dport 7013 reject with tcp reset",
    );
    sleep(Duration::from_millis(300));
    let report = running.stop().unwrap();
    assert!(report.flows.iter().all(|f| f.error.is_some()), "{report:?}");
    // Neither flows nor the listener are left, and nothing connects through the rule.
    let error = format!("{:#}", bulk::start(cfg.clone()).err().expect("started"));
    assert!(error.contains("cannot connect flow 0"), "{error}");
    let strange = BulkConfig {
        ends: net.ends(false, 7014),
        congestion: Some("nonesuch".into()),
        ..cfg
    };
    let error = format!("{:#}", bulk::start(strange).err().expect("started"));
    assert!(error.contains("nonesuch"), "{error}");
}

#[test]
fn observer_sees_reordering_but_no_retransmission_as_such() {
    let net = Net::new();
    // netem and the like are not needed: raw frames say exactly what arrives when.
    let paths = ["s0".to_string(), "s1".to_string()];
    let mut sniffer = sniff::start(&net.server_ns(), 7015, &paths, 20_000).unwrap();
    sys::run_in(&net.client_ns(), || {
        // (device, sequence number, sender's timestamp, pause before in ms)
        let segments = [
            ("c0", 1000, 1, 0),
            ("c0", 1100, 2, 0),
            ("c1", 1300, 4, 0),   // moved to the other path and overtook
            ("c0", 1200, 3, 5),   // the overtaken one
            ("c1", 1500, 6, 0),   // 1400 got lost
            ("c1", 1400, 40, 40), // and is sent again
        ];
        for (device, seq, stamp, pause_ms) in segments {
            sleep(Duration::from_millis(pause_ms));
            send_frame(device, &tcp_frame(40_001, 7015, seq, stamp, 100));
        }
        send_frame("c0", &tcp_frame(40_002, 7016, 1, 1, 100)); // another port
        Ok(())
    })
    .unwrap();
    sleep(Duration::from_millis(100));
    let (traces, unobserved) = sniffer.finish().unwrap();
    assert_eq!(unobserved, 0);
    assert_eq!(traces.len(), 1, "{traces:?}");
    let trace = &traces[&40_001];
    let reordered: Vec<bool> = trace.reorderings.iter().map(|r| r.across_paths).collect();
    assert_eq!(reordered, [true], "{trace:?}");
    let visits: Vec<_> = trace.visits.iter().map(|v| (v.path, v.bytes)).collect();
    let expected = [
        (Some(0), 200),
        (Some(1), 100),
        (Some(0), 100),
        (Some(1), 200),
    ];
    assert_eq!(visits, expected);
    assert_eq!(trace.moves_within(&(0..u64::MAX)), 3);
}

/// An Ethernet frame with an IPv4 TCP segment of `len` zero bytes and a timestamp option.
fn tcp_frame(from: u16, to: u16, seq: u32, stamp: u32, len: usize) -> Vec<u8> {
    let mut options = vec![1, 1, 8, 10];
    options.extend(stamp.to_be_bytes());
    options.extend([0; 4]);
    // To everyone: the receiving stack drops it, observers see it.
    let builder = PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], [0xff; 6])
        .ipv4([10, 99, 0, 1], [10, 99, 1, 1], 64)
        .tcp(from, to, seq, 0xff00)
        .ack(1)
        .options_raw(&options)
        .unwrap();
    let mut frame = Vec::new();
    builder.write(&mut frame, &vec![0; len]).unwrap();
    frame
}

fn send_frame(device: &str, frame: &[u8]) {
    let sent = PacketSocket::sender().send(sys::device_index(device), frame);
    let error = std::io::Error::last_os_error();
    assert_eq!(sent, frame.len() as isize, "{error}");
}

#[test]
fn foreign_load_fills_one_device_at_its_rate() {
    let net = Net::new();
    let bytes = |dev: &str| -> u64 {
        sys::run_in(&net.client_ns(), || {
            // /proc/net is that of the thread's namespace, /sys that of the mount's.
            let table = std::fs::read_to_string("/proc/thread-self/net/dev")?;
            let mut lines = table.lines().map(str::trim_start);
            let line = lines.find(|line| line.starts_with(dev)).unwrap();
            Ok(line.split_whitespace().nth(9).unwrap().parse()?)
        })
        .unwrap()
    };
    let cfg = LoadConfig {
        ends: Ends {
            client_addr: "10.77.1.1".parse().unwrap(),
            server_addr: "10.77.1.2".parse().unwrap(),
            bind_dev: Some("c1".into()),
            ..net.ends(false, 7020)
        },
        rate_bps: 8_000_000,
        packet_bytes: 1_000,
    };
    let before = (bytes("c0"), bytes("c1"));
    let began = Instant::now();
    let running = load::start(cfg).unwrap();
    // Packets come by the clock: so long for 1,000 of them.
    sleep(Duration::from_secs(1));
    let report = running.stop().unwrap();
    // 1,000 packets a second; what was missed for want of a CPU is not made up for.
    let most = (began.elapsed().as_secs_f64() * 1_050.0) as u64;
    assert!((250..most).contains(&report.sent), "{report:?} of {most}");
    assert!(report.received + 5 >= report.sent, "{report:?}");
    assert_eq!(report.send_errors, 0);
    assert!(bytes("c1") - before.1 >= report.sent * 1_000);
    assert!(bytes("c0") - before.0 < 10_000);
}

#[test]
fn many_short_flows_spread_and_name_their_path() {
    let net = Net::new();
    let many = ShortConfig {
        ends: net.ends(false, 7021),
        first_client_port: Some(20_000),
        flows_per_s: 1_000.0,
        packets: 3,
        interval_ms: 20,
        payload_bytes: 100,
    };
    let one = ShortConfig {
        ends: net.ends(false, 7023),
        first_client_port: None,
        flows_per_s: 100.0,
        ..many.clone()
    };
    let run = |cfg: ShortConfig, ms: u64| {
        let running = short::start(cfg).unwrap();
        sleep(Duration::from_millis(ms));
        running.stop().unwrap()
    };
    let flows = run(many, 1_300);
    assert!(flows.len() >= 400, "{} flows", flows.len());
    let mut ports = flows.iter().map(|flow| flow.client_port).zip(20_000..);
    assert!(ports.all(|(is, next)| is == next), "one after the other");
    for flow in &flows {
        let answered = flow.rtts.iter().filter(|(_, rtt)| rtt.is_some());
        assert_eq!((flow.rtts.len(), answered.count()), (3, 3), "{flow:?}");
        assert!(flow.path.is_some() && !flow.moved, "{flow:?}");
    }
    let shares = |flows: &[ShortFlow]| metrics::shares(flows.iter().map(|f| f.path), 2).0;
    let both = shares(&flows);
    // Five standard deviations of a fair coin at 400 flows are 13 points.
    assert!((0.3..0.7).contains(&both[0]), "{both:?}");
    assert!((both[0] + both[1] - 1.0).abs() < 1e-9);
    // All on one path when there is one route.
    net.route("via 10.77.1.2");
    assert_eq!(shares(&run(one, 300)), [0.0, 1.0]);
}
