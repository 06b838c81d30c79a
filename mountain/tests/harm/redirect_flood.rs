// SPDX-License-Identifier: GPL-2.0-or-later
//! Floods and forged packets against the flows of the BPF redirect backends.
//!
//! A client, a router that redirects and a server, joined by veth.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use etherparse::{PacketBuilder, PacketBuilderStep};
use mountain::redirect::bpf::hooks::{self, programs, DeviceHook, LoadedProgram};
use mountain::redirect::bpf::PROGRAM_PREFIX;
use nix::sched::{setns, CloneFlags};
use rand::RngExt;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use crate::forged::Flood;
use crate::support::tcx::attach_passing_xdp;
use crate::support::Ns;

const BACKENDS: [&str; 4] = ["tcx", "tcx-peer", "xdp", "xdp-redirect"];
/// Where clients are told to go, by family, and where they are sent on to.
const FROM: [&str; 2] = ["10.0.8.17:8080", "[fd08::17]:8080"];
const TO: [&str; 2] = ["10.0.1.2:9000", "[fd01::2]:9000"];
/// Long on any machine.
const LIMIT: Duration = Duration::from_secs(20);
/// Forged first packets: three times what all tables hold, of old and new.
const FLOOD: u32 = 200_000;

struct Net {
    client: Ns,
    router: Ns,
    server: Ns,
}

impl Net {
    fn new() -> Self {
        let net = Self {
            client: Ns::new("c"),
            router: Ns::new("r"),
            server: Ns::new("s"),
        };
        net.router.sysctl("net.ipv4.ip_forward", "1");
        net.router.sysctl("net.ipv6.conf.all.forwarding", "1");
        net.client.wire(
            ("c0", &["10.0.8.18/24", "fd08::18/64"]),
            &net.router,
            ("rc", &["10.0.8.17/24", "fd08::17/64"]),
        );
        net.server.wire(
            ("s0", &["10.0.1.2/24", "fd01::2/64"]),
            &net.router,
            ("rs", &["10.0.1.1/24", "fd01::1/64"]),
        );
        for (ns, v4, v6) in [
            (&net.client, "10.0.8.17", "fd08::17"),
            (&net.server, "10.0.1.1", "fd01::1"),
        ] {
            ns.ip(&format!("route add default via {v4}"));
            ns.ip(&format!("-6 route add default via {v6}"));
        }
        net
    }

    /// Redirects UDP and TCP of both families.
    fn redirect(&self, backend: &str) {
        for v6 in [0, 1] {
            for proto in ["udp", "tcp"] {
                self.redirect_one(backend, proto, v6);
            }
        }
    }

    fn redirect_one(&self, backend: &str, proto: &str, v6: usize) {
        let (from, to) = (FROM[v6], TO[v6]);
        self.router.mountain_ok(&format!(
            "redirect add --proto {proto} --from {from} --to {to} --dev rc --backend {backend} --fix"
        ));
    }

    fn server_udp(&self, to: &str) -> UdpSocket {
        bind_udp(&self.server, to.parse().unwrap())
    }

    fn server_tcp(&self, to: &str) -> TcpListener {
        let to: SocketAddr = to.parse().unwrap();
        self.server.with(move || TcpListener::bind(to).unwrap())
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        let _ = self.router.mountain("redirect del --all");
    }
}

fn client(v6: usize, port: u16) -> SocketAddr {
    let ip: IpAddr = ["10.0.8.18", "fd08::18"][v6].parse().unwrap();
    SocketAddr::new(ip, port)
}

fn bind_udp(ns: &Ns, local: SocketAddr) -> UdpSocket {
    let socket = ns.with(move || UdpSocket::bind(local).unwrap());
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    socket
}

/// A connection from this very port.
fn connect(ns: &Ns, local: SocketAddr, to: &str) -> TcpStream {
    let to: SocketAddr = to.parse().unwrap();
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

/// Sends a packet that nobody's socket has sent: forged as far as this host can tell.
fn forge(ns: &Ns, tcp: bool, src: SocketAddr, dst: &str) {
    let dst: SocketAddr = dst.parse().unwrap();
    let packet = first_packet(ip_of(src.ip(), dst.ip()), tcp, src.port(), dst.port());
    ns.with(move || {
        let raw = Protocol::from(libc::IPPROTO_RAW);
        let socket = Socket::new(Domain::for_address(dst), Type::RAW, Some(raw)).unwrap();
        let to = SockAddr::from(SocketAddr::new(dst.ip(), 0));
        socket.send_to(&packet, &to).unwrap();
    });
}

fn ip_of(src: IpAddr, dst: IpAddr) -> PacketBuilderStep<etherparse::IpHeaders> {
    match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => PacketBuilder::ipv4(src.octets(), dst.octets(), 64),
        (IpAddr::V6(src), IpAddr::V6(dst)) => PacketBuilder::ipv6(src.octets(), dst.octets(), 64),
        _ => unreachable!("one family"),
    }
}

/// A SYN or a datagram, from the network header on.
fn first_packet(
    ip: PacketBuilderStep<etherparse::IpHeaders>,
    tcp: bool,
    sport: u16,
    dport: u16,
) -> Vec<u8> {
    let mut packet = Vec::new();
    if tcp {
        let step = ip.tcp(sport, dport, 1, 1024).syn();
        step.write(&mut packet, &[]).unwrap();
    } else {
        ip.udp(sport, dport).write(&mut packet, b"forged").unwrap();
    }
    packet
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

fn ask_tcp(client: &mut TcpStream, server: &mut TcpStream, what: &str) {
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
        net.redirect(backend);
        for v6 in [0, 1] {
            let (from, to) = (FROM[v6], TO[v6]);
            let what = |text: &str| format!("{backend}, {to}, {text}");
            let server = net.server_udp(to);
            // The direct flow is first.
            let direct = bind_udp(&net.client, client(v6, 5001));
            ask_udp(&direct, &server, to, &what("before the forged packet"));
            forge(&net.client, false, client(v6, 5001), from);
            for _ in 0..3 {
                ask_udp(&direct, &server, to, &what("after the forged packet"));
            }
            // The forged one is.
            let direct = bind_udp(&net.client, client(v6, 5002));
            forge(&net.client, false, client(v6, 5002), from);
            for _ in 0..3 {
                ask_udp(&direct, &server, to, &what("after one that was first"));
            }

            let listener = net.server_tcp(to);
            let mut direct = connect(&net.client, client(v6, 5003), to);
            let mut accepted = accept(&listener);
            ask_tcp(&mut direct, &mut accepted, &what("before the forged SYN"));
            forge(&net.client, true, client(v6, 5003), from);
            for _ in 0..3 {
                ask_tcp(&mut direct, &mut accepted, &what("after the forged SYN"));
            }
            forge(&net.client, true, client(v6, 5004), from);
            let mut direct = connect(&net.client, client(v6, 5004), to);
            let mut accepted = accept(&listener);
            ask_tcp(
                &mut direct,
                &mut accepted,
                &what("after a SYN that was first"),
            );

            // And what is redirected is redirected, from the same port as well.
            let redirected = bind_udp(&net.client, client(v6, 5005));
            ask_udp(&redirected, &server, from, &what("redirected"));
            ask_udp(&redirected, &server, to, &what("both at once"));
            ask_udp(&redirected, &server, from, &what("redirected again"));
            ask_udp(&redirected, &server, to, &what("both again"));
        }
    }
}

/// First packets from random addresses, through the program that sees a client's packets first.
fn flood(net: &Net, tcp: bool) {
    let router = File::open(net.router.path()).unwrap();
    let run = move || {
        setns(&router, CloneFlags::CLONE_NEWNET).unwrap();
        let device = nix::net::if_::if_nametoindex("rc").unwrap();
        let (hook, program) = first_program(device);
        let mut rng = rand::rng();
        let dst: SocketAddr = FROM[0].parse().unwrap();
        let mut macs = vec![0; 12];
        macs[..6].copy_from_slice(&mac("rc"));
        for _ in 0..FLOOD {
            let src = Ipv4Addr::from_bits(rng.random_range(0x0b00_0000..0x0c00_0000));
            let ip = ip_of(src.into(), dst.ip());
            let mut packet = macs.clone();
            packet.extend([8, 0]);
            packet.extend(first_packet(
                ip,
                tcp,
                rng.random_range(1024..=u16::MAX),
                dst.port(),
            ));
            hooks::run(hook, device, &program, &packet, 1).unwrap();
        }
    };
    std::thread::spawn(run).join().unwrap();
}

fn mac(device: &str) -> [u8; 6] {
    let all = nix::ifaddrs::getifaddrs().unwrap();
    all.filter(|a| a.interface_name == device)
        .find_map(|a| a.address?.as_link_addr()?.addr())
        .unwrap()
}

fn first_program(device: u32) -> (DeviceHook, OwnedFd) {
    let ours = |hook| {
        let ids = programs(hook, device).unwrap();
        let mut all = ids.into_iter().map(|id| LoadedProgram::by_id(id).unwrap());
        let program = all.find(|p| p.name.starts_with(PROGRAM_PREFIX))?;
        Some((hook, program.fd))
    };
    [DeviceHook::Xdp, DeviceHook::TcxIngress]
        .into_iter()
        .find_map(ours)
        .unwrap()
}

/// The server speaks first afterwards: a flow that was pushed out is not put back by its client before.
#[test]
fn a_syn_flood_ends_no_established_connection() {
    const CONNECTIONS: usize = 1000;
    allow_files(4 * CONNECTIONS as u64);
    let net = Net::new();
    net.redirect_one("xdp-redirect", "tcp", 0);
    let listener = net.server_tcp(TO[0]);
    let mut all: Vec<_> = (0..CONNECTIONS)
        .map(|n| {
            let stream = connect(&net.client, client(0, 10_000 + n as u16), FROM[0]);
            (stream, accept(&listener))
        })
        .collect();
    for (client, server) in &mut all {
        ask_tcp(client, server, "before the flood");
    }
    flood(&net, true);
    let (mut buffer, deadline) = ([0; 1], Instant::now() + LIMIT);
    let is_lost = |(client, server): &mut (TcpStream, TcpStream)| {
        // A little for each, even when the first ones have used the time up.
        let rest = deadline.saturating_duration_since(Instant::now());
        let limit = rest.max(Duration::from_millis(1));
        client.set_read_timeout(Some(limit)).unwrap();
        server.write_all(b"!").is_err() || client.read_exact(&mut buffer).is_err()
    };
    let lost = all.iter_mut().map(is_lost).filter(|lost| *lost).count();
    assert_eq!(lost, 0, "connections of {CONNECTIONS} that were lost");
    for (client, server) in &mut all {
        client.set_read_timeout(Some(LIMIT)).unwrap();
        ask_tcp(client, server, "after the flood");
    }
}

#[test]
fn a_udp_flood_takes_no_established_flow_its_answers() {
    const FLOWS: usize = 1000;
    allow_files(4 * FLOWS as u64);
    let net = Net::new();
    net.redirect_one("tcx", "udp", 0);
    let server = net.server_udp(TO[0]);
    let all: Vec<_> = (0..FLOWS)
        .map(|n| {
            let socket = bind_udp(&net.client, client(0, 10_000 + n as u16));
            ask_udp(&socket, &server, FROM[0], &format!("{n}, once"));
            ask_udp(&socket, &server, FROM[0], &format!("{n}, twice"));
            socket
        })
        .collect();
    flood(&net, false);
    let mut buffer = [0; 100];
    let lost = all
        .iter()
        .filter(|socket| {
            server
                .send_to(b"news", socket.local_addr().unwrap())
                .unwrap();
            let (_, from) = socket.recv_from(&mut buffer).unwrap();
            from.to_string() != FROM[0]
        })
        .count();
    assert_eq!(
        lost, 0,
        "flows of {FLOWS} whose answers come from elsewhere"
    );
}

fn allow_files(count: u64) {
    use nix::sys::resource::{getrlimit, setrlimit, Resource};
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    if soft < count {
        setrlimit(Resource::RLIMIT_NOFILE, count, hard.max(count)).unwrap();
    }
}

/// One run of the measurement below.
struct UnderFlood {
    mbit_s: f64,
    /// Connections that are lost, or flows whose answers come from elsewhere.
    lost: usize,
    forged_s: f64,
}

const CONNECTIONS: u16 = 1000;
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
    allow_files(4 * u64::from(CONNECTIONS));
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
                 lost {lost} of {REPEATS} x {CONNECTIONS}, {forged:.0} forged packets a second",
                median / nft,
                least / nft,
                most / nft,
            );
        }
    }
}

fn under_flood(backend: &str, proto: &str, forged_s: f64) -> UnderFlood {
    const FORGED: usize = 262_144;
    let net = Net::new();
    net.client.run("ethtool -K c0 tso off gso off");
    net.redirect_one(backend.split(' ').next().unwrap(), proto, 0);
    if backend == "nft behind XDP" {
        net.router.with(|| attach_passing_xdp("rc", "passes_all"));
    }
    let dst: SocketAddr = FROM[0].parse().unwrap();
    let mut rng = rand::rng();
    let mut one = || {
        let src = Ipv4Addr::from_bits(rng.random_range(0x0b00_0000..0x0c00_0000));
        let ip = ip_of(src.into(), dst.ip());
        first_packet(
            ip,
            proto == "tcp",
            rng.random_range(1024..=u16::MAX),
            dst.port(),
        )
    };
    let packets = (0..FORGED).map(|_| one()).collect();
    let flood =
        |net: &Net| (forged_s > 0.0).then(|| Flood::at_most(&net.client, dst, packets, forged_s));
    if proto == "tcp" {
        tcp_under_flood(&net, flood)
    } else {
        udp_under_flood(&net, flood)
    }
}

/// What one connection carries while others say nothing, and who of those still gets an answer.
fn tcp_under_flood(net: &Net, flood: impl FnOnce(&Net) -> Option<Flood>) -> UnderFlood {
    let listener = net.server_tcp(TO[0]);
    let mut all: Vec<_> = (0..CONNECTIONS)
        .map(|n| {
            let stream = connect(&net.client, client(0, 10_000 + n), FROM[0]);
            (stream, accept(&listener))
        })
        .collect();
    let (mut bulk, mut sink) = all.pop().unwrap();
    let flood = flood(net);
    let sent = || flood.as_ref().map_or(0, Flood::sent);
    let (before, started) = (sent(), Instant::now());
    let end = started + FLOOD_TIME;
    let source =
        std::thread::spawn(
            move || {
                while Instant::now() < end && bulk.write_all(&[0; 65_536]).is_ok() {}
            },
        );
    let mut buffer = vec![0; 65_536];
    let mut bytes = 0;
    while let Ok(n @ 1..) = sink.read(&mut buffer) {
        bytes += n;
    }
    source.join().unwrap();
    let forged_s = (sent() - before) as f64 / started.elapsed().as_secs_f64();
    let mut is_lost = |(client, server): &mut (TcpStream, TcpStream)| {
        let limit = Duration::from_secs(2);
        client.set_read_timeout(Some(limit)).unwrap();
        server.write_all(b"!").is_err() || client.read_exact(&mut buffer[..1]).is_err()
    };
    let lost = all
        .iter_mut()
        .map(&mut is_lost)
        .filter(|lost| *lost)
        .count();
    in_flood_time(bytes, lost, forged_s)
}

fn in_flood_time(bytes: usize, lost: usize, forged_s: f64) -> UnderFlood {
    UnderFlood {
        mbit_s: bytes as f64 * 8.0 / 1e6 / FLOOD_TIME.as_secs_f64(),
        lost,
        forged_s,
    }
}

/// What arrives of one flow while others say nothing, and whose answers come from elsewhere.
fn udp_under_flood(net: &Net, flood: impl FnOnce(&Net) -> Option<Flood>) -> UnderFlood {
    let server = net.server_udp(TO[0]);
    let all: Vec<_> = (0..CONNECTIONS)
        .map(|n| {
            let socket = bind_udp(&net.client, client(0, 10_000 + n));
            for what in ["once", "twice"] {
                ask_udp(&socket, &server, FROM[0], &format!("{n}, {what}"));
            }
            socket
        })
        .collect();
    let flood = flood(net);
    let sent = || flood.as_ref().map_or(0, Flood::sent);
    let (before, started) = (sent(), Instant::now());
    let end = started + FLOOD_TIME;
    let bulk = all[0].try_clone().unwrap();
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
    let forged_s = (sent() - before) as f64 / started.elapsed().as_secs_f64();
    drop(flood);
    let is_lost = |socket: &&UdpSocket| {
        let limit = Duration::from_secs(2);
        socket.set_read_timeout(Some(limit)).unwrap();
        server
            .send_to(b"news", socket.local_addr().unwrap())
            .unwrap();
        let got = socket.recv_from(&mut [0; 100]);
        !got.is_ok_and(|(_, from)| from.to_string() == FROM[0])
    };
    let lost = all.iter().filter(is_lost).count();
    in_flood_time(bytes, lost, forged_s)
}
