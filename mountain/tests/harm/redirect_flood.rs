// SPDX-License-Identifier: GPL-2.0-or-later
//! Floods and forged packets against the flows of the BPF redirect backends.
//!
//! A client, a router that redirects and a server, joined by veth.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use etherparse::PacketBuilder;
use mountain::redirect::bpf::hooks::{self, DeviceHook};
use rand::RngExt;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use crate::forged::Flood;
use crate::frames::mac;
use crate::redirect::net::{add, Net};
use crate::support::tcx::{attach_passing_xdp, redirect_program};
use crate::support::{allow_descriptors, Ns};

const BACKENDS: [&str; 4] = ["tcx", "tcx-peer", "xdp", "xdp-redirect"];
/// Where clients are told to go, by family, and where they are sent on to.
const FROM: [&str; 2] = ["10.0.8.17:8080", "[fd08::17]:8080"];
const TO: [&str; 2] = ["10.0.1.2:9000", "[fd01::2]:9000"];
/// Long on any machine.
const LIMIT: Duration = Duration::from_secs(20);
/// Forged first packets: three times what all tables hold, of old and new.
const FLOOD: u32 = 200_000;
/// Connections or flows that a flood meets.
const FLOWS: u16 = 1000;

fn redirect(net: &Net, backend: &str, proto: &str, v6: usize) {
    let add = add(proto, FROM[v6], TO[v6], backend);
    net.redirect(&format!("{add} --dev rc"));
}

fn client(v6: usize, port: u16) -> String {
    format!("{}:{port}", ["10.0.8.18", "[fd08::18]"][v6])
}

/// A connection from this very port.
pub fn connect(ns: &Ns, local: &str, to: &str) -> TcpStream {
    let [local, to] = [local, to].map(|at| at.parse::<SocketAddr>().unwrap());
    let socket = ns.with(move || {
        let socket = Socket::new(Domain::for_address(local), Type::STREAM, None).unwrap();
        socket.bind(&local.into()).unwrap();
        socket.connect_timeout(&to.into(), LIMIT).unwrap();
        socket
    });
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    socket.set_nonblocking(false).unwrap();
    socket.into()
}

/// Connections from ports 10,000 and up that are redirected, each with its other end.
fn connections(net: &Net) -> Vec<(TcpStream, TcpStream)> {
    let listener = net.server.listen(TO[0]);
    let pair = |n| {
        let near = connect(&net.client, &client(0, 10_000 + n), FROM[0]);
        (near, accept(&listener))
    };
    (0..FLOWS).map(pair).collect()
}

/// Sockets at ports 10,000 and up whose flows are redirected and established.
fn flows(net: &Net, server: &UdpSocket) -> Vec<UdpSocket> {
    let flow = |n| {
        let socket = net.client.udp(&client(0, 10_000 + n));
        for what in ["once", "twice"] {
            ask_udp(&socket, server, FROM[0], &format!("{n}, {what}"));
        }
        socket
    };
    (0..FLOWS).map(flow).collect()
}

/// How many connections do not carry a byte from the server to the client in time.
///
/// The server speaks first: a flow that was pushed out is not put back by its client before.
fn lost(all: &[(TcpStream, TcpStream)], limit: impl Fn() -> Duration) -> usize {
    let is_lost = |(client, server): &&(TcpStream, TcpStream)| {
        let (mut client, mut server): (&TcpStream, &TcpStream) = (client, server);
        client.set_read_timeout(Some(limit())).unwrap();
        server.write_all(b"!").is_err() || client.read_exact(&mut [0]).is_err()
    };
    all.iter().filter(is_lost).count()
}

/// How many flows have no answers in time, or from elsewhere than where they send to.
fn strayed(all: &[UdpSocket], server: &UdpSocket, limit: Duration) -> usize {
    let has_strayed = |socket: &&UdpSocket| {
        socket.set_read_timeout(Some(limit)).unwrap();
        let client = socket.local_addr().unwrap();
        server.send_to(b"news", client).unwrap();
        let got = socket.recv_from(&mut [0; 100]);
        !got.is_ok_and(|(_, from)| from.to_string() == FROM[0])
    };
    all.iter().filter(has_strayed).count()
}

/// Sends a packet that nobody's socket has sent: forged as far as this host can tell.
pub fn forge(ns: &Ns, tcp: bool, src: &str, dst: &str) {
    let [src, dst] = [src, dst].map(|at| at.parse::<SocketAddr>().unwrap());
    let packet = first_packet(tcp, src, dst);
    ns.with(move || {
        let raw = Protocol::from(libc::IPPROTO_RAW);
        let socket = Socket::new(Domain::for_address(dst), Type::RAW, Some(raw)).unwrap();
        let to = SockAddr::from(SocketAddr::new(dst.ip(), 0));
        socket.send_to(&packet, &to).unwrap();
    });
}

/// A SYN or a datagram, from the network header on.
fn first_packet(tcp: bool, src: SocketAddr, dst: SocketAddr) -> Vec<u8> {
    let ip = match (src.ip(), dst.ip()) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => PacketBuilder::ipv4(src.octets(), dst.octets(), 64),
        (IpAddr::V6(src), IpAddr::V6(dst)) => PacketBuilder::ipv6(src.octets(), dst.octets(), 64),
        _ => unreachable!("one family"),
    };
    let mut packet = Vec::new();
    if tcp {
        let step = ip.tcp(src.port(), dst.port(), 1, 1024).syn();
        step.write(&mut packet, &[]).unwrap();
    } else {
        let step = ip.udp(src.port(), dst.port());
        step.write(&mut packet, b"forged").unwrap();
    }
    packet
}

/// A first packet to [`FROM`] from a random address and port.
fn forged(tcp: bool) -> Vec<u8> {
    let mut rng = rand::rng();
    let src = Ipv4Addr::from_bits(rng.random_range(0x0b00_0000..0x0c00_0000));
    let port = rng.random_range(1024..=u16::MAX);
    let src = SocketAddr::new(src.into(), port);
    first_packet(tcp, src, FROM[0].parse().unwrap())
}

/// The direct client asks; the answer must come from the one that it asked.
fn ask_udp(client: &UdpSocket, server: &UdpSocket, to: &str, what: &str) {
    client.send_to(what.as_bytes(), to).unwrap();
    let mut buffer = [0; 100];
    let asked = loop {
        let (n, from) = server.recv_from(&mut buffer).expect("the server is asked");
        if &buffer[..n] == what.as_bytes() {
            break from;
        }
    };
    server.send_to(what.as_bytes(), asked).unwrap();
    let (n, from) = client.recv_from(&mut buffer).expect("an answer");
    assert_eq!(&buffer[..n], what.as_bytes());
    assert_eq!(from.to_string(), to, "who answers: {what}");
}

pub fn ask_tcp(client: &mut TcpStream, server: &mut TcpStream, what: &str) {
    let mut buffer = [0; 1];
    client.write_all(b"?").unwrap();
    let asked = server.read_exact(&mut buffer);
    asked.unwrap_or_else(|e| panic!("{what}, to the server: {e}"));
    server.write_all(b"!").unwrap();
    let answered = client.read_exact(&mut buffer);
    answered.unwrap_or_else(|e| panic!("{what}, back: {e}"));
}

/// The next connection that is completed by the client of that address.
fn accept(listener: &TcpListener) -> TcpStream {
    let (stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream
}

#[test]
fn one_forged_packet_does_not_end_a_direct_connection() {
    for backend in BACKENDS {
        let net = Net::new();
        for v6 in [0, 1] {
            let (from, to) = (FROM[v6], TO[v6]);
            for proto in ["udp", "tcp"] {
                redirect(&net, backend, proto, v6);
            }
            let what = |text: &str| format!("{backend}, {to}, {text}");
            let server = net.server.udp(to);
            let forge = |tcp, port| forge(&net.client, tcp, &client(v6, port), from);
            // The direct flow is first, then the forged packet is.
            for (port, direct_first) in [(5001, true), (5002, false)] {
                let direct = net.client.udp(&client(v6, port));
                if direct_first {
                    ask_udp(&direct, &server, to, &what("before the forged packet"));
                }
                forge(false, port);
                for _ in 0..3 {
                    let what = what("after the forged packet");
                    ask_udp(&direct, &server, to, &format!("{what} at {port}"));
                }
            }

            let listener = net.server.listen(to);
            let open = |port| {
                let direct = connect(&net.client, &client(v6, port), to);
                (direct, accept(&listener))
            };
            let (mut direct, mut accepted) = open(5003);
            ask_tcp(&mut direct, &mut accepted, &what("before the forged SYN"));
            forge(true, 5003);
            for _ in 0..3 {
                ask_tcp(&mut direct, &mut accepted, &what("after the forged SYN"));
            }
            forge(true, 5004);
            let (mut direct, mut accepted) = open(5004);
            ask_tcp(&mut direct, &mut accepted, &what("after a first SYN"));

            // And what is redirected is redirected, from the same port as well.
            let redirected = net.client.udp(&client(v6, 5005));
            ask_udp(&redirected, &server, from, &what("redirected"));
            ask_udp(&redirected, &server, to, &what("both at once"));
            ask_udp(&redirected, &server, from, &what("redirected again"));
            ask_udp(&redirected, &server, to, &what("both again"));
        }
    }
}

/// First packets from random addresses, through the program that sees a client's packets first.
fn flood(net: &Net, tcp: bool) {
    let to = mac(&net.router, "rc");
    net.router.with(|| {
        let device = testkit::ifindex("rc");
        let at = |hook| Some((hook, redirect_program(hook, "rc")?));
        let first = at(DeviceHook::Xdp).or_else(|| at(DeviceHook::TcxIngress));
        let (hook, program) = first.expect("a program of the redirect");
        for _ in 0..FLOOD {
            let packet = [&to[..], &[0; 6], &[8, 0], &forged(tcp)].concat();
            hooks::run(hook, device, &program, &packet, 1).unwrap();
        }
    });
}

#[test]
fn a_syn_flood_ends_no_established_connection() {
    allow_descriptors(4 * u64::from(FLOWS));
    let net = Net::new();
    redirect(&net, "xdp-redirect", "tcp", 0);
    let mut all = connections(&net);
    for (client, server) in &mut all {
        ask_tcp(client, server, "before the flood");
    }
    flood(&net, true);
    let deadline = Instant::now() + LIMIT;
    // A little for each, even when the first ones have used the time up.
    let rest = || deadline.saturating_duration_since(Instant::now());
    let lost = lost(&all, || rest().max(Duration::from_millis(1)));
    assert_eq!(lost, 0, "connections of {FLOWS} that were lost");
    for (client, server) in &mut all {
        client.set_read_timeout(Some(LIMIT)).unwrap();
        ask_tcp(client, server, "after the flood");
    }
}

/// Ports for rewritten sources are few: forged flows must not hold them all.
#[test]
fn a_flood_keeps_no_client_from_a_rule_that_rewrites_sources() {
    let net = Net::new();
    for tcp in [false, true] {
        let proto = ["udp", "tcp"][usize::from(tcp)];
        let add = add(proto, FROM[0], TO[0], "tcx");
        net.redirect(&format!("{add} --dev rc --snat always"));
    }
    let server = net.server.udp(TO[0]);
    let listener = net.server.listen(TO[0]);
    let established = net.client.udp(&client(0, 5000));
    for what in ["once", "twice"] {
        ask_udp(&established, &server, FROM[0], what);
    }
    for tcp in [false, true] {
        flood(&net, tcp);
    }
    for n in 0..20 {
        let new = net.client.udp(&client(0, 6000 + n));
        ask_udp(&new, &server, FROM[0], &format!("new, {n}"));
        let mut new = connect(&net.client, &client(0, 6000 + n), FROM[0]);
        ask_tcp(&mut new, &mut accept(&listener), &format!("new, {n}"));
    }
    ask_udp(&established, &server, FROM[0], "after the flood");
}

#[test]
fn a_udp_flood_takes_no_established_flow_its_answers() {
    allow_descriptors(4 * u64::from(FLOWS));
    let net = Net::new();
    redirect(&net, "tcx", "udp", 0);
    let server = net.server.udp(TO[0]);
    let all = flows(&net, &server);
    flood(&net, false);
    let strayed = strayed(&all, &server, LIMIT);
    assert_eq!(strayed, 0, "flows of {FLOWS} without answers of their own");
}

/// One run of the measurement below.
struct UnderFlood {
    mbit_s: f64,
    /// Connections that are lost, or flows whose answers come from elsewhere.
    lost: usize,
    forged_s: f64,
}

const FLOOD_TIME: Duration = Duration::from_secs(5);

/// A measurement, not a test: what a flood of forged first packets leaves of the traffic through each backend.
/// Run it with nothing else running, in a release build:
/// `cargo test --release -p mountain --test harm -- --ignored --nocapture goodput_under_a_flood`
///
/// The flood has one rate, which the generator reaches beside every backend. The client's packets are as a
/// wire carries them, without segmentation offload, which XDP does not know. A veth under XDP queues 256
/// packets and then drops, and holds its sender back no more; so nft is measured behind an XDP program that
/// passes everything, too.
#[test]
#[ignore = "a measurement, which takes ten minutes of a quiet machine"]
fn goodput_under_a_flood() {
    const FORGED_S: f64 = 80_000.0;
    const REPEATS: usize = 5;
    const ALL: [&str; 6] = [
        "nft",
        "nft behind XDP",
        "tcx",
        "tcx-peer",
        "xdp",
        "xdp-redirect",
    ];
    allow_descriptors(4 * u64::from(FLOWS));
    for (proto, rate) in [("tcp", 0.0), ("tcp", FORGED_S), ("udp", FORGED_S)] {
        let mut runs: [Vec<UnderFlood>; ALL.len()] = std::array::from_fn(|_| Vec::new());
        for _ in 0..REPEATS {
            for (backend, runs) in ALL.iter().zip(&mut runs) {
                runs.push(under_flood(backend, proto, rate));
            }
        }
        let spread = |runs: &[UnderFlood], figure: fn(&UnderFlood) -> f64| {
            let mut all: Vec<_> = runs.iter().map(figure).collect();
            all.sort_by(f64::total_cmp);
            (all[REPEATS / 2], all[0], all[REPEATS - 1])
        };
        for (backend, of_this) in ALL.iter().zip(&runs) {
            let compared = usize::from(backend.starts_with("xdp"));
            let nft = spread(&runs[compared], |r| r.mbit_s).0;
            let (median, least, most) = spread(of_this, |r| r.mbit_s);
            let (forged, ..) = spread(of_this, |r| r.forged_s);
            let lost: usize = of_this.iter().map(|r| r.lost).sum();
            println!(
                "{proto} {backend}: {median:.0} Mbit/s [{least:.0}-{most:.0}], {:.2} x nft [{:.2}-{:.2}], \
                 lost {lost} of {REPEATS} x {FLOWS}, {forged:.0} forged packets a second",
                median / nft,
                least / nft,
                most / nft,
            );
        }
    }
}

/// What one connection or flow carries while others say nothing, and who of those still gets an answer.
fn under_flood(backend: &str, proto: &str, forged_s: f64) -> UnderFlood {
    const FORGED: usize = 262_144;
    let net = Net::new();
    net.client.run("ethtool -K c0 tso off gso off");
    redirect(&net, backend.split(' ').next().unwrap(), proto, 0);
    if backend == "nft behind XDP" {
        net.router.with(|| attach_passing_xdp("rc", "passes_all"));
    }
    let tcp = proto == "tcp";
    let dst: SocketAddr = FROM[0].parse().unwrap();
    let packets = (0..FORGED).map(|_| forged(tcp)).collect();
    let server = net.server.udp(TO[0]);
    let (mut streams, datagrams) = match tcp {
        true => (connections(&net), vec![]),
        false => (vec![], flows(&net, &server)),
    };
    let flood = (forged_s > 0.0).then(|| Flood::at_most(&net.client, dst, packets, forged_s));
    let sent = || flood.as_ref().map_or(0, Flood::sent);
    let (before, started) = (sent(), Instant::now());
    let end = started + FLOOD_TIME;
    let bytes = match streams.pop() {
        Some((near, far)) => stream_bytes(near, far, end),
        None => datagram_bytes(&datagrams[0], &server, end),
    };
    let forged_s = (sent() - before) as f64 / started.elapsed().as_secs_f64();
    let limit = Duration::from_secs(2);
    // Connections live in the flood, flows have answers of their own after it.
    let lost = match tcp {
        true => lost(&streams, || limit),
        false => {
            drop(flood);
            strayed(&datagrams, &server, limit)
        }
    };
    UnderFlood {
        mbit_s: bytes as f64 * 8.0 / 1e6 / FLOOD_TIME.as_secs_f64(),
        lost,
        forged_s,
    }
}

/// What a connection carries until then.
fn stream_bytes(mut bulk: TcpStream, mut sink: TcpStream, end: Instant) -> usize {
    let send = move || while Instant::now() < end && bulk.write_all(&[0; 65_536]).is_ok() {};
    let source = std::thread::spawn(send);
    let mut buffer = vec![0; 65_536];
    let mut bytes = 0;
    while let Ok(n @ 1..) = sink.read(&mut buffer) {
        bytes += n;
    }
    source.join().unwrap();
    bytes
}

/// What arrives of a flow that sends until then.
fn datagram_bytes(bulk: &UdpSocket, server: &UdpSocket, end: Instant) -> usize {
    let bulk = bulk.try_clone().unwrap();
    let source = std::thread::spawn(move || {
        // 12,000 packets a second: less than any backend forwards.
        while Instant::now() < end {
            for _ in 0..12 {
                let _ = bulk.send_to(&[0; 1200], FROM[0]);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    let (mut bytes, mut buffer) = (0, [0; 2048]);
    let limit = Duration::from_millis(200);
    server.set_read_timeout(Some(limit)).unwrap();
    while Instant::now() < end + Duration::from_millis(500) {
        if let Ok((1200, _)) = server.recv_from(&mut buffer) {
            bytes += 1200;
        }
    }
    source.join().unwrap();
    bytes
}
