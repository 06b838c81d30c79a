// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain reflect` under a flood of forged requests.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use etherparse::PacketBuilder;
use mountain::measure::reflect::Reflector;
use mountain::measure::wire::{self, ProbeId, PROBE_LEN};
use rand::RngExt;

use crate::forged::Flood;

#[path = "../measure/probe_net.rs"]
mod net;

use net::*;

const REFLECTOR: &str = "10.30.0.2:8629";
/// Between an honest client's probes.
const INTERVAL: Duration = Duration::from_millis(50);
const PROBES: u64 = 60;
/// Forged requests: more sources than the reflector remembers.
const FORGED: usize = 32_768;
/// For the answers to come, on any machine.
const LIMIT: Duration = Duration::from_secs(20);

/// Two hosts, and the reflector of one of them.
fn rig() -> (Net, RunningReflector) {
    let net = Net::probed();
    // Forged sources are somewhere behind the client.
    net.server.ip("route add default via 10.30.0.1");
    let reflector = net.reflector(REFLECTOR, Duration::ZERO);
    let taken = net.server.within(async || bind().is_err());
    assert!(taken, "two reflectors on one port");
    (net, reflector)
}

#[test]
fn a_group_that_could_never_answer_is_refused() {
    for address in ["224.0.0.1:0", "255.255.255.255:0", "[ff02::1]:0"] {
        let e = Reflector::bind(address.parse().unwrap()).err().unwrap();
        assert_eq!(e.kind(), std::io::ErrorKind::InvalidInput, "{address}: {e}");
    }
}

fn bind() -> std::io::Result<Reflector> {
    Reflector::bind(REFLECTOR.parse().unwrap())
}

/// Requests from random sources, from their network header on; every other one has a made-up cookie.
fn forged() -> Vec<Vec<u8>> {
    let mut rng = rand::rng();
    let port = REFLECTOR.parse::<SocketAddr>().unwrap().port();
    let one = |n: usize| {
        let mut request = [0; PROBE_LEN];
        let cookie = if n.is_multiple_of(2) { 0 } else { rng.random() };
        wire::write_request(&mut request, ProbeId { nonce: 1, index: 1 }, cookie);
        let source = Ipv4Addr::from_bits(rng.random_range(0x0b00_0000..0x0c00_0000));
        let builder = PacketBuilder::ipv4(source.octets(), [10, 30, 0, 2], 64);
        let mut packet = Vec::new();
        builder.udp(9, port).write(&mut packet, &request).unwrap();
        packet
    };
    (0..FORGED).map(one).collect()
}

/// A client of ours, or an earlier one, which knows nothing of cookies.
struct Client {
    socket: UdpSocket,
    cookie: u32,
    answered: u64,
}

impl Client {
    fn new(net: &Net) -> Self {
        let socket = net.client.udp("10.30.0.1:0");
        socket.connect(REFLECTOR).unwrap();
        Self {
            socket,
            cookie: 0,
            answered: 0,
        }
    }

    fn probe(&mut self, index: u64) {
        let mut packet = [0; PROBE_LEN];
        wire::write_request(&mut packet, ProbeId { nonce: 7, index }, self.cookie);
        self.socket.send(&packet).unwrap();
    }

    /// Of so many probes, one in each interval, 95% are answered.
    fn assert_answered(&mut self, count: u64) {
        let enough = (count * 95).div_ceil(100);
        self.answered = 0;
        for n in 0..count {
            let next = Instant::now() + INTERVAL;
            self.probe(n);
            self.receive(u64::MAX, INTERVAL);
            thread::sleep(next.saturating_duration_since(Instant::now()));
        }
        self.receive(enough, LIMIT);
        let answered = self.answered;
        assert!(answered >= enough, "{answered} of {count}");
    }

    /// Takes in answers until there are `wanted`, or none comes for `limit`.
    fn receive(&mut self, wanted: u64, limit: Duration) {
        let end = Instant::now() + limit;
        while self.answered < wanted {
            let rest = end.saturating_duration_since(Instant::now());
            let rest = Some(rest.max(Duration::from_millis(1)));
            self.socket.set_read_timeout(rest).unwrap();
            let mut packet = [0; 100];
            match self.socket.recv(&mut packet) {
                Ok(n) => {
                    assert!(wire::parse_reply(&packet[..n]).is_some());
                    self.cookie = wire::cookie(&packet);
                    self.answered += 1;
                }
                Err(_) if Instant::now() >= end => return,
                Err(_) => {}
            }
        }
    }
}

#[test]
fn forged_requests_starve_no_honest_client() {
    let (net, _reflector) = rig();
    let mut known = Client::new(&net);
    known.probe(0);
    known.receive(1, LIMIT);
    assert_ne!(known.cookie, 0, "a reply brings a cookie");
    let flood = Flood::start(&net.client, REFLECTOR.parse().unwrap(), forged());
    let (sent, began) = (flood.sent(), Instant::now());
    known.assert_answered(PROBES);
    let rate = (flood.sent() - sent) as f64 / began.elapsed().as_secs_f64();
    println!("answered under {rate:.0} forged requests a second");

    // Whoever comes in the middle of it becomes known as soon as one probe is answered.
    let mut late = Client::new(&net);
    let end = Instant::now() + LIMIT;
    while late.cookie == 0 {
        assert!(Instant::now() < end, "a new client is not answered once");
        late.probe(0);
        late.receive(1, INTERVAL);
    }
    late.receive(u64::MAX, 4 * INTERVAL);
    late.assert_answered(PROBES / 3);
}

/// Those that send no cookie, as all did before there were any.
#[test]
fn clients_without_cookies_are_answered_as_before() {
    let (net, _reflector) = rig();
    let mut earlier = Client::new(&net);
    for n in 0..20 {
        earlier.cookie = 0;
        earlier.probe(n);
        earlier.receive(n + 1, LIMIT);
    }
    assert_eq!(earlier.answered, 20);
}
