//! The traffic generators between two network namespaces joined by plain veth pairs.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use mountain_lab::workload::bulk::{self, BulkConfig, Pattern};
use mountain_lab::workload::echo::{EchoServer, Header};
use mountain_lab::workload::game::{self, GameConfig, Packet};
use mountain_lab::workload::load::{self, LoadConfig};
use mountain_lab::workload::metrics::{Leave, Onset};
use mountain_lab::workload::short::{self, Proto, ShortConfig};
use mountain_lab::workload::sniff::Sniffer;
use mountain_lab::workload::sys;

static COUNTER: AtomicU32 = AtomicU32::new(0);

/// A client and a server namespace joined by two veth pairs c0–s0 and c1–s1, removed on drop.
struct Net {
    client: String,
    server: String,
}

impl Net {
    fn new() -> Self {
        assert_eq!(
            unsafe { libc::geteuid() },
            0,
            "this test makes network namespaces: run as root"
        );
        let id = format!(
            "{}-{}",
            std::process::id(),
            COUNTER.fetch_add(1, Ordering::Relaxed)
        );
        let net = Net {
            client: format!("mtw-c-{id}"),
            server: format!("mtw-s-{id}"),
        };
        let (c, s) = (&net.client, &net.server);
        ip(&format!("netns add {c}"));
        ip(&format!("netns add {s}"));
        for ns in [c, s] {
            ip(&format!("-n {ns} link set lo up"));
            // Duplicate address detection would delay the first IPv6 packet by a second or two.
            ns_sysctl(ns, "ipv6/conf/all/accept_dad", "0");
            ns_sysctl(ns, "ipv6/conf/default/accept_dad", "0");
            ns_sysctl(ns, "ipv4/fib_multipath_hash_policy", "1");
            ns_sysctl(ns, "ipv6/fib_multipath_hash_policy", "1");
        }
        for i in 0..2 {
            ip(&format!(
                "-n {c} link add c{i} type veth peer name s{i} netns {s}"
            ));
            for (ns, dev, host) in [(c, format!("c{i}"), 1), (s, format!("s{i}"), 2)] {
                ip(&format!(
                    "-n {ns} address add 10.77.{i}.{host}/24 dev {dev}"
                ));
                ip(&format!(
                    "-n {ns} address add fd77:{i}::{host}/64 dev {dev} nodad"
                ));
                ip(&format!("-n {ns} link set {dev} up"));
            }
        }
        for (ns, host) in [(c, 0), (s, 1)] {
            ip(&format!("-n {ns} address add 10.99.{host}.1/32 dev lo"));
            ip(&format!("-n {ns} address add fd99::{host}:1/128 dev lo"));
        }
        ip(&format!(
            "-n {s} route add 10.99.0.1 src 10.99.1.1 nexthop via 10.77.0.1 nexthop via 10.77.1.1"
        ));
        ip(&format!("-n {s} -6 route add fd99::0:1 src fd99::1:1 nexthop via fd77:0::1 nexthop via fd77:1::1"));
        net.route("nexthop via 10.77.0.2 nexthop via 10.77.1.2");
        ip(&format!("-n {c} -6 route add fd99::1:1 src fd99::0:1 nexthop via fd77:0::2 nexthop via fd77:1::2"));
        net
    }

    /// (Re)places the client's IPv4 route to the server's service address.
    fn route(&self, hops: &str) {
        ip(&format!(
            "-n {} route replace 10.99.1.1 src 10.99.0.1 {hops}",
            self.client
        ));
    }

    fn client_ns(&self) -> PathBuf {
        PathBuf::from(format!("/run/netns/{}", self.client))
    }

    fn server_ns(&self) -> PathBuf {
        PathBuf::from(format!("/run/netns/{}", self.server))
    }

    fn game(&self, v6: bool, port: u16) -> GameConfig {
        let (client_addr, server_addr) = addresses(v6);
        GameConfig {
            client_ns: self.client_ns(),
            server_ns: self.server_ns(),
            client_addr,
            server_addr,
            port,
            flows: 20,
            rate_hz: 60.0,
            payload_bytes: 100,
            dscp: None,
            bind_dev: None,
            paths: vec!["s0".into(), "s1".into()],
        }
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        for ns in [&self.client, &self.server] {
            let _ = Command::new("ip").args(["netns", "del", ns]).status();
        }
    }
}

fn addresses(v6: bool) -> (IpAddr, IpAddr) {
    if v6 {
        ("fd99::0:1".parse().unwrap(), "fd99::1:1".parse().unwrap())
    } else {
        ("10.99.0.1".parse().unwrap(), "10.99.1.1".parse().unwrap())
    }
}

fn ip(args: &str) {
    let output = Command::new("ip")
        .args(args.split(' '))
        .output()
        .expect("ip");
    assert!(
        output.status.success(),
        "ip {args}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Writes a sysctl of the namespace `ns`; /proc/sys/net shows that of the reading process.
fn ns_sysctl(ns: &str, key: &str, value: &str) {
    let ns = format!("--net=/run/netns/{ns}");
    let write = format!("echo {value} > /proc/sys/net/{key}");
    let status = Command::new("nsenter")
        .args([&ns, "sh", "-c", &write])
        .status()
        .expect("nsenter");
    assert!(status.success(), "{key} = {value}");
}

fn median(mut values: Vec<u32>) -> u32 {
    values.sort_unstable();
    values[values.len() / 2]
}

fn assert_all_answered(packets: &[Packet], flows: u16, at_least: usize) {
    assert!(packets.len() >= at_least, "only {} packets", packets.len());
    let lost: Vec<_> = packets.iter().filter(|p| p.rtt_us.is_none()).collect();
    assert!(
        lost.is_empty(),
        "{} of {} lost, first {:?}",
        lost.len(),
        packets.len(),
        lost[0]
    );
    for flow in 0..flows {
        let mut seqs: Vec<u32> = packets
            .iter()
            .filter(|p| p.flow == flow)
            .map(|p| p.seq)
            .collect();
        seqs.sort_unstable();
        assert!(
            seqs.iter().copied().eq(0..seqs.len() as u32),
            "flow {flow} has gaps: {seqs:?}"
        );
        assert!(!seqs.is_empty(), "flow {flow} sent nothing");
    }
}

#[test]
fn game_flows_are_answered_with_small_round_trip_times() {
    let net = Net::new();
    for v6 in [false, true] {
        let running = game::start(net.game(v6, 7001)).unwrap();
        sleep(Duration::from_secs(2));
        let (packets, health) = running.finish().unwrap();
        assert_all_answered(&packets, 20, 2_000);
        let rtt = median(packets.iter().map(|p| p.rtt_us.unwrap()).collect());
        assert!(rtt < 1_000, "v6 {v6}: median RTT over veth {rtt} us");
        for p in &packets {
            let (rtt, user) = (p.rtt_us.unwrap(), p.user_rtt_us.unwrap());
            assert!(rtt <= user, "kernel RTT above the program's: {p:?}");
            let sum = p.forward_us.unwrap() + p.backward_us.unwrap();
            assert!(
                sum.abs_diff(rtt) <= 2,
                "one-way delays do not add up: {p:?}"
            );
            assert!(!p.reordered, "{p:?}");
        }
        assert_eq!(health.send_errors, 0);
        assert_eq!(
            health.unstamped, 0,
            "v6 {v6}: kernel transmit timestamps are missing"
        );
        assert_eq!(health.sent, packets.len() as u64);
        // Twenty flows over two paths: all on one has a probability of 2e-6.
        for path in [0, 1] {
            assert!(
                packets.iter().any(|p| p.path == Some(path)),
                "v6 {v6}: no flow on {path}"
            );
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
    let mut running = game::start(net.game(false, 7002)).unwrap();
    sleep(Duration::from_millis(500));
    let moved_ns = sys::monotonic_ns();
    net.route("via 10.77.0.2");
    let settled_ns = sys::monotonic_ns() + 100_000_000;
    sleep(Duration::from_millis(1_200));
    let early = running.drain();
    assert!(
        early.iter().any(|p| p.sent_ns < moved_ns),
        "drain gave nothing from the first phase"
    );
    let mut packets = early;
    packets.extend(running.stop().unwrap());
    assert_all_answered(&packets, 20, 1_000);
    let before = packets.iter().filter(|p| p.sent_ns < moved_ns);
    assert!(before.clone().count() > 200);
    assert!(before.clone().all(|p| p.path == Some(1)), "before the move");
    let after = packets.iter().filter(|p| p.sent_ns > settled_ns);
    assert!(after.clone().count() > 500);
    assert!(after.clone().all(|p| p.path == Some(0)), "after the move");
}

#[test]
fn bound_flows_keep_their_device_and_dscp_is_set() {
    let net = Net::new();
    let cfg = GameConfig {
        bind_dev: Some("c1".into()),
        ..net.game(false, 7003)
    }
    .voip();
    assert_eq!((cfg.rate_hz, cfg.payload_bytes), (50.0, 160));
    // A bound socket hears only its own device: the answers have to come back there.
    ip(&format!(
        "-n {} route replace 10.99.0.1 via 10.77.1.1 src 10.99.1.1",
        net.server
    ));
    // Count EF packets at the server; anything else on this port stays at zero.
    let rules = "add table ip t; add chain ip t c { type filter hook input priority 0; }; \
                 add rule ip t c udp dport 7003 ip dscp ef counter; \
                 add rule ip t c udp dport 7003 ip dscp != ef counter";
    let ns = format!("--net=/run/netns/{}", net.server);
    let nft = Command::new("nsenter")
        .args([&ns, "nft", rules])
        .status()
        .unwrap();
    assert!(nft.success());
    let running = game::start(cfg).unwrap();
    sleep(Duration::from_millis(500));
    let packets = running.stop().unwrap();
    assert_all_answered(&packets, 20, 300);
    assert!(packets.iter().all(|p| p.path == Some(1)));
    let list = Command::new("nsenter")
        .args([&ns, "nft", "list", "table", "ip", "t"])
        .output();
    let list = String::from_utf8(list.unwrap().stdout).unwrap();
    let counts: Vec<u64> = list
        .lines()
        .filter_map(|l| l.split("packets ").nth(1)?.split(' ').next()?.parse().ok())
        .collect();
    assert_eq!(counts, [packets.len() as u64, 0], "EF, other\n{list}");
}

#[test]
fn blackhole_is_loss_and_not_a_stalled_generator() {
    let net = Net::new();
    net.route("via 10.77.0.2");
    let running = game::start(net.game(false, 7004)).unwrap();
    sleep(Duration::from_millis(600));
    let from_ns = sys::monotonic_ns();
    ip(&format!("-n {} link set s0 down", net.server));
    let from_settled_ns = sys::monotonic_ns();
    sleep(Duration::from_millis(600));
    let (packets, health) = running.finish().unwrap();
    let before: Vec<_> = packets
        .iter()
        .filter(|p| p.sent_ns + 20_000_000 < from_ns)
        .collect();
    assert!(before.len() > 300);
    assert!(
        before.iter().all(|p| p.rtt_us.is_some()),
        "lost before the blackhole"
    );
    let after: Vec<_> = packets
        .iter()
        .filter(|p| p.sent_ns > from_settled_ns)
        .collect();
    assert!(
        after.len() > 300,
        "the generator stopped sending: {}",
        after.len()
    );
    assert!(
        after.iter().all(|p| p.rtt_us.is_none() && p.path.is_none()),
        "answered in the dark"
    );
    assert_eq!(
        health.sent,
        packets.len() as u64,
        "every packet sent is accounted for"
    );
}

#[test]
fn lost_answers_do_not_hide_the_path() {
    let net = Net::new();
    net.route("via 10.77.1.2");
    ip(&format!(
        "-n {} route replace blackhole 10.99.0.1",
        net.server
    ));
    let running = game::start(net.game(false, 7005)).unwrap();
    sleep(Duration::from_millis(300));
    let packets = running.stop().unwrap();
    assert!(packets.len() > 200);
    assert!(
        packets.iter().all(|p| p.rtt_us.is_none()),
        "there is no way back"
    );
    assert!(
        packets.iter().all(|p| p.path == Some(1)),
        "the server saw them all on s1"
    );
}

#[test]
fn server_sees_reordering() {
    let net = Net::new();
    let paths = ["s0".to_string(), "s1".to_string()];
    let (_, server_addr) = addresses(false);
    let server = EchoServer::start(&net.server_ns(), server_addr, 7006, &paths).unwrap();
    let echoes = sys::run_in(&net.client_ns(), || {
        let socket = UdpSocket::bind("10.99.0.1:0")?;
        socket.connect(SocketAddr::new(server_addr, 7006))?;
        socket.set_read_timeout(Some(Duration::from_secs(2)))?;
        socket.send(b"not one of ours, must stay unanswered")?;
        let mut echoes = Vec::new();
        for (flow, seq) in [(0, 0), (0, 2), (0, 1), (0, 3), (1, 0), (0, 3)] {
            let mut buf = [0u8; 100];
            Header::request(7, flow, seq).write(&mut buf);
            socket.send(&buf)?;
            let len = socket.recv(&mut buf)?;
            echoes.push(Header::read(&buf[..len]).expect("an echo with our header"));
        }
        Ok(echoes)
    })
    .unwrap();
    let reordered: Vec<_> = echoes
        .iter()
        .map(|h| (h.flow, h.seq, h.reordered))
        .collect();
    let expected = [
        (0, 0, false),
        (0, 2, false),
        (0, 1, true),
        (0, 3, false),
        (1, 0, false),
        (0, 3, false),
    ];
    assert_eq!(reordered, expected);
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
    assert!(start(&|c| c.client_ns = "/run/netns/none".into()).contains("/run/netns/none"));
    assert!(start(&|c| c.bind_dev = Some("none".into())).contains("none"));
    assert!(start(&|c| c.client_addr = "10.1.2.3".parse().unwrap()).contains("10.1.2.3"));
    // The port of the failed starts is free again.
    let began = Instant::now();
    drop(game::start(net.game(false, 7007)).unwrap());
    assert!(
        began.elapsed() < Duration::from_millis(900),
        "drop does not wait for stragglers"
    );
}

fn bulk_config(net: &Net, v6: bool, port: u16, pattern: Pattern) -> BulkConfig {
    let (client_addr, server_addr) = addresses(v6);
    BulkConfig {
        client_ns: net.client_ns(),
        server_ns: net.server_ns(),
        client_addr,
        server_addr,
        port,
        flows: 4,
        pattern,
        congestion: None,
        dscp: None,
        bind_dev: None,
        paths: vec!["s0".into(), "s1".into()],
        min_rtt_us: 10_000,
    }
}

#[test]
fn paced_bulk_keeps_its_rate_and_shows_its_path() {
    let net = Net::new();
    for v6 in [false, true] {
        let pattern = Pattern::Paced {
            rate_bps: 2_000_000,
        };
        let running = bulk::start(bulk_config(&net, v6, 7010, pattern)).unwrap();
        sleep(Duration::from_millis(2_100));
        let report = running.stop().unwrap();
        assert_eq!(report.flows.len(), 4);
        assert_eq!(report.unobserved, 0);
        for flow in &report.flows {
            assert_eq!(flow.error, None, "flow {}", flow.flow);
            let rate_bps = flow.bytes() as f64 * 8.0 / 2.1;
            assert!(
                (1.7e6..2.3e6).contains(&rate_bps),
                "v6 {v6}: {rate_bps} bit/s"
            );
            assert_eq!(flow.trace.moves(), 0, "{:?}", flow.trace);
            let visit = flow.trace.visits[0];
            assert!(visit.path.is_some(), "{visit:?}");
            // The observer saw what the program read (and the greeting of 12 bytes).
            assert!(
                visit.bytes >= flow.bytes() + 12,
                "{visit:?} {}",
                flow.bytes()
            );
            assert!(
                visit.bytes < flow.bytes() + 12 + 100_000,
                "{visit:?} {}",
                flow.bytes()
            );
            assert!(flow.trace.reorderings.is_empty());
        }
        let seconds = report.goodput_by_second();
        assert!(seconds.iter().all(|s| s.len() >= 2), "{seconds:?}");
        let total = report.goodput_bps(report.start_ns, report.start_ns + 2_000_000_000);
        assert!((6.8e6..9.2e6).contains(&total), "{total}");
    }
}

#[test]
fn bulk_follows_a_route_change_and_outlives_it() {
    let net = Net::new();
    net.route("via 10.77.0.2");
    let mut cfg = bulk_config(
        &net,
        false,
        7011,
        Pattern::Paced {
            rate_bps: 1_000_000,
        },
    );
    cfg.congestion = Some("reno".into());
    let running = bulk::start(cfg).unwrap();
    sleep(Duration::from_millis(700));
    let moved_ns = sys::monotonic_ns();
    net.route("via 10.77.1.2");
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
            Leave::Left(ns) => assert!(ns < 200_000_000, "left after {ns} ns"),
            other => panic!("{other:?}"),
        }
        let other = Onset { path: 1, ..onset };
        assert_eq!(flow.time_to_leave(other), Leave::NotThere);
    }
}

#[test]
fn saturating_flows_share_and_requests_are_answered() {
    let net = Net::new();
    let running = bulk::start(bulk_config(&net, false, 7012, Pattern::Saturating)).unwrap();
    sleep(Duration::from_millis(600));
    let report = running.stop().unwrap();
    for flow in &report.flows {
        assert!(
            flow.bytes() > 1_000_000,
            "flow {}: {} bytes",
            flow.flow,
            flow.bytes()
        );
        assert_eq!(flow.error, None);
    }
    let pattern = Pattern::RequestResponse {
        request_bytes: 20_000,
        response_bytes: 1_000,
        think_ms: 10,
    };
    let running = bulk::start(bulk_config(&net, false, 7012, pattern)).unwrap();
    sleep(Duration::from_millis(800));
    let report = running.stop().unwrap();
    for flow in &report.flows {
        let n = flow.responses.len() as u64;
        assert!(n >= 20, "only {n} responses in 0.8 s");
        assert!(
            (n * 20_000..=(n + 1) * 20_000).contains(&flow.bytes()),
            "{n} {}",
            flow.bytes()
        );
        assert!(
            flow.responses.iter().all(|(_, us)| *us < 200_000),
            "{:?}",
            flow.responses
        );
        assert_eq!(flow.error, None);
    }
}

#[test]
fn lost_flows_and_wrong_bulk_configurations_are_told() {
    let net = Net::new();
    let cfg = bulk_config(
        &net,
        false,
        7013,
        Pattern::Paced {
            rate_bps: 1_000_000,
        },
    );
    let running = bulk::start(cfg.clone()).unwrap();
    sleep(Duration::from_millis(200));
    // Every further segment is answered by a reset.
    let ns = format!("--net=/run/netns/{}", net.server);
    let rules = "add table ip t; add chain ip t c { type filter hook input priority 0; }; \
                 add rule ip t c tcp dport 7013 reject with tcp reset";
    assert!(Command::new("nsenter")
        .args([&ns, "nft", rules])
        .status()
        .unwrap()
        .success());
    sleep(Duration::from_millis(300));
    let report = running.stop().unwrap();
    assert!(report.flows.iter().all(|f| f.error.is_some()), "{report:?}");
    // Neither flows nor the listener are left, and nothing connects through the rule.
    let error = format!("{:#}", bulk::start(cfg.clone()).err().expect("started"));
    assert!(error.contains("cannot connect flow 0"), "{error}");
    let strange = BulkConfig {
        congestion: Some("nonesuch".into()),
        port: 7014,
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
    let sniffer = Sniffer::start(&net.server_ns(), 7015, &paths, 20_000).unwrap();
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
    let (traces, unobserved) = sniffer.stop().unwrap();
    assert_eq!(unobserved, 0);
    assert_eq!(traces.len(), 1, "{traces:?}");
    let trace = &traces[&40_001];
    let reordered: Vec<bool> = trace.reorderings.iter().map(|r| r.across_paths).collect();
    assert_eq!(reordered, [true], "{trace:?}");
    assert_eq!(trace.retransmitted, 1);
    let visits: Vec<_> = trace
        .visits
        .iter()
        .map(|v| (v.path, v.segments, v.bytes))
        .collect();
    let expected = [
        (Some(0), 2, 200),
        (Some(1), 1, 100),
        (Some(0), 1, 100),
        (Some(1), 2, 200),
    ];
    assert_eq!(visits, expected);
    assert_eq!(trace.moves(), 3);
}

/// An Ethernet frame with an IPv4 TCP segment of `len` zero bytes and a timestamp option.
fn tcp_frame(from: u16, to: u16, seq: u32, stamp: u32, len: usize) -> Vec<u8> {
    let mut frame = vec![0xff; 6]; // to everyone: the receiving stack drops it, observers see it
    frame.extend([2, 0, 0, 0, 0, 1, 0x08, 0x00]);
    let total = (20 + 32 + len) as u16;
    frame.extend([0x45, 0]);
    frame.extend(total.to_be_bytes());
    frame.extend([0, 0, 0x40, 0, 64, 6, 0, 0, 10, 99, 0, 1, 10, 99, 1, 1]);
    frame.extend(from.to_be_bytes());
    frame.extend(to.to_be_bytes());
    frame.extend(seq.to_be_bytes());
    frame.extend([
        0,
        0,
        0,
        1,
        8 << 4,
        0x10,
        0xff,
        0xff,
        0,
        0,
        0,
        0,
        1,
        1,
        8,
        10,
    ]);
    frame.extend(stamp.to_be_bytes());
    frame.extend([0; 4]);
    frame.resize(frame.len() + len, 0);
    frame
}

fn send_frame(device: &str, frame: &[u8]) {
    let socket = socket2::Socket::new(socket2::Domain::PACKET, socket2::Type::RAW, None).unwrap();
    let address = libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: 0x0800u16.to_be(),
        sll_ifindex: sys::device_index(device) as i32,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 6,
        sll_addr: [0; 8],
    };
    let sent = unsafe {
        libc::sendto(
            std::os::fd::AsRawFd::as_raw_fd(&socket),
            frame.as_ptr().cast(),
            frame.len(),
            0,
            std::ptr::from_ref(&address).cast(),
            size_of_val(&address) as u32,
        )
    };
    assert_eq!(
        sent,
        frame.len() as isize,
        "{}",
        std::io::Error::last_os_error()
    );
}

#[test]
fn foreign_load_fills_one_device_at_its_rate() {
    let net = Net::new();
    let bytes = |dev: &str| -> u64 {
        sys::run_in(&net.client_ns(), || {
            // /proc/net is that of the thread's namespace, /sys that of the mount's.
            let table = std::fs::read_to_string("/proc/thread-self/net/dev")?;
            let line = table
                .lines()
                .find(|l| l.trim_start().starts_with(dev))
                .unwrap();
            Ok(line.split_whitespace().nth(9).unwrap().parse()?)
        })
        .unwrap()
    };
    let cfg = LoadConfig {
        client_ns: net.client_ns(),
        server_ns: net.server_ns(),
        client_addr: "10.77.1.1".parse().unwrap(),
        server_addr: "10.77.1.2".parse().unwrap(),
        port: 7020,
        rate_bps: 8_000_000,
        packet_bytes: 1_000,
        bind_dev: Some("c1".into()),
    };
    let before = (bytes("c0"), bytes("c1"));
    let running = load::start(cfg).unwrap();
    sleep(Duration::from_secs(1));
    let report = running.stop().unwrap();
    assert!((850..1_150).contains(&report.sent), "{report:?}");
    assert!(report.received + 5 >= report.sent, "{report:?}");
    assert_eq!(report.send_errors, 0);
    assert!(bytes("c1") - before.1 > 850_000);
    assert!(bytes("c0") - before.0 < 10_000);
}

#[test]
fn many_short_flows_spread_and_name_their_path() {
    let net = Net::new();
    let (client_addr, server_addr) = addresses(false);
    let udp = ShortConfig {
        client_ns: net.client_ns(),
        server_ns: net.server_ns(),
        client_addr,
        server_addr,
        port: 7021,
        proto: Proto::Udp,
        flows_per_s: 1_000.0,
        packets: 3,
        interval_ms: 20,
        payload_bytes: 100,
        paths: vec!["s0".into(), "s1".into()],
    };
    let tcp = ShortConfig {
        proto: Proto::Tcp,
        port: 7022,
        flows_per_s: 400.0,
        ..udp.clone()
    };
    for (cfg, at_least) in [(udp, 1_000), (tcp, 250)] {
        let proto = cfg.proto;
        let running = short::start(cfg).unwrap();
        sleep(Duration::from_millis(1_300));
        let flows = running.stop().unwrap();
        assert!(flows.len() >= at_least, "{proto:?}: {} flows", flows.len());
        let expected = if proto == Proto::Udp { 3 } else { 1 };
        for flow in &flows {
            assert_eq!(
                (flow.sent, flow.answered),
                (expected, expected),
                "{proto:?} {flow:?}"
            );
            assert!(flow.path.is_some() && !flow.moved, "{proto:?} {flow:?}");
        }
        let shares = short::shares(&flows, 2);
        // Five standard deviations of a fair coin at 250 flows are 16 points.
        assert!((0.34..0.66).contains(&shares[0]), "{proto:?}: {shares:?}");
        assert!((shares[0] + shares[1] - 1.0).abs() < 1e-9);
    }
    // All on one path when there is one route.
    net.route("via 10.77.1.2");
    let one = ShortConfig {
        client_ns: net.client_ns(),
        server_ns: net.server_ns(),
        client_addr,
        server_addr,
        port: 7023,
        proto: Proto::Tcp,
        flows_per_s: 100.0,
        packets: 3,
        interval_ms: 20,
        payload_bytes: 100,
        paths: vec!["s0".into(), "s1".into()],
    };
    let running = short::start(one).unwrap();
    sleep(Duration::from_millis(300));
    assert_eq!(short::shares(&running.stop().unwrap(), 2), [0.0, 1.0]);
}
