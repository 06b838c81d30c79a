// SPDX-License-Identifier: GPL-2.0-or-later
//! Real sockets between the two hosts of the other tests, with the program attached by hand in the client.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use mountain::bpf::{PathMasks as Masks, ProgramPath, Settings, Steer, SteerMode};
use testkit::TestNamespace;

use super::{ifindex, pin};
use crate::support::{arrivals, Net, Worker, CLIENT4, SERVER4, SERVER6};

/// Service addresses.
pub fn client(v6: bool) -> IpAddr {
    if v6 { "fd98::1" } else { CLIENT4 }.parse().unwrap()
}

pub fn server(v6: bool) -> IpAddr {
    if v6 { SERVER6 } else { SERVER4 }.parse().unwrap()
}

/// Runs a test as the client, which knows its gateways.
pub fn with_server(test: impl FnOnce(&Net) + Send) {
    let net = Net::new();
    for i in 0..2 {
        let mac = format!("02:00:00:00:02:0{i}");
        net.server.ip(&format!("link set s{i} address {mac}"));
        for gateway in [format!("10.30.{i}.2"), format!("fd30:{i}::2")] {
            let known = format!("{gateway} lladdr {mac} dev u{i}");
            net.client
                .ip(&format!("neigh replace {known} nud permanent"));
        }
    }
    net.client.sysctl("net/ipv4/icmp_ratelimit", "0");
    net.client.sysctl("net/ipv6/icmp/ratelimit", "0");
    net.client.with(|| {
        pin();
        test(&net);
    });
}

/// The same by IPv4, then by IPv6.
pub fn for_each_family(test: fn(&Net, bool)) {
    for v6 in [false, true] {
        with_server(|net| test(net, v6));
    }
}

/// Path `id` of [`steer_two`]: 0 and 1 IPv4 by u0 and u1, 2 and 3 IPv6.
pub fn path(id: usize) -> ProgramPath {
    let (i, v6) = (id % 2, id >= 2);
    let gateway = match v6 {
        false => format!("10.30.{i}.2"),
        true => format!("fd30:{i}::2"),
    };
    ProgramPath {
        gateway: gateway.parse().unwrap(),
        mac: Some([2, 0, 0, 0, 2, i as u8]),
        ..super::rig_path(id, ["u0", "u1"].map(ifindex))
    }
}

pub fn masks(steer: &mut Steer, masks: Masks) {
    steer.set_masks(0, masks);
    steer.set_masks(1, masks);
}

/// The program attached to u0 and u1 of this namespace, with all on path 0.
pub fn steer_two(settings: &Settings) -> Steer {
    let mut steer = Steer::load(&Settings {
        only_routed: true,
        ..*settings
    })
    .unwrap();
    for id in 0..4 {
        steer.set_path(id, &path(id)).unwrap();
    }
    let links = ["10.30.0.0/24", "10.30.1.0/24", "fd30:0::/64", "fd30:1::/64"];
    let not_ours = links.map(|prefix| prefix.parse().unwrap());
    let sources = super::all_but(&["10.30.0.1", "10.30.1.1", "fd30:0::1", "fd30:1::1"]);
    steer
        .set_topology(&super::rig_groups(), &not_ours, &[], &sources)
        .unwrap();
    masks(&mut steer, super::only(0));
    steer.set_mode(SteerMode::Steer, 0);
    steer.attach_to(&[ifindex("u0"), ifindex("u1")]).unwrap();
    steer
}

/// A packet as the server saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Source port: the flow.
    pub flow: u16,
    /// The number in its first four bytes.
    pub seq: u32,
    /// It came in by s0 or s1.
    pub dev: usize,
}

/// A server that notes what comes to one UDP port.
pub struct Sink {
    reader: Worker<Vec<Seen>>,
    pub addr: SocketAddr,
}

impl Sink {
    pub fn start(host: &TestNamespace, v6: bool) -> Self {
        let (socket, devs) = host.with(move || {
            let socket = UdpSocket::bind((server(v6), 0)).unwrap();
            let pause = Some(Duration::from_millis(20));
            socket.set_read_timeout(pause).unwrap();
            arrivals::ask_devices(&socket);
            (socket, ["s0", "s1"].map(ifindex))
        });
        let addr = socket.local_addr().unwrap();
        let reader = Worker::start(move |stop| {
            let mut seen = vec![];
            // What is queued when the end is called is still read: it stops at a time-out.
            loop {
                match receive(&socket, &devs) {
                    Some(packet) => seen.push(packet),
                    None if stop.is_set() => return seen,
                    None => {}
                }
            }
        });
        Self { reader, addr }
    }

    /// Everything that has come.
    pub fn finish(self) -> Vec<Seen> {
        self.reader.finish()
    }
}

fn receive(socket: &UdpSocket, devs: &[u32; 2]) -> Option<Seen> {
    let mut buf = [0; 65536];
    let packet = arrivals::receive(socket, &mut buf)?;
    let dev = devs.iter().position(|&dev| dev == packet.ifindex);
    Some(Seen {
        flow: packet.from.port(),
        seq: u32::from_le_bytes(buf[..4].try_into().unwrap()),
        dev: dev.expect("from neither uplink"),
    })
}

/// A client's flow: sends numbered packets.
pub struct Source {
    pub socket: UdpSocket,
    pub port: u16,
    pub sent: u32,
}

impl Source {
    pub fn new(from: IpAddr, to: SocketAddr) -> Self {
        let socket = UdpSocket::bind((from, 0)).unwrap();
        socket.connect(to).unwrap();
        Self {
            port: socket.local_addr().unwrap().port(),
            socket,
            sent: 0,
        }
    }

    /// Sends the next packet, of at least four bytes.
    pub fn send(&mut self, len: usize) {
        let mut packet = self.sent.to_le_bytes().to_vec();
        packet.resize(len.max(4), 0);
        self.socket.send(&packet).unwrap();
        self.sent += 1;
    }
}

/// Asserts that every packet of every source came once and in order; returns, per source, the
/// uplinks by which its packets came.
pub fn all_in_order(sources: &[Source], seen: &[Seen]) -> Vec<Vec<usize>> {
    let of = |s: &Source| {
        let mine: Vec<_> = seen.iter().filter(|p| p.flow == s.port).collect();
        let numbers: Vec<u32> = mine.iter().map(|p| p.seq).collect();
        let want: Vec<u32> = (0..s.sent).collect();
        assert_eq!(numbers, want, "flow {}: lost or out of order", s.port);
        mine.iter().map(|p| p.dev).collect()
    };
    let known: Vec<Vec<usize>> = sources.iter().map(of).collect();
    let sum: usize = known.iter().map(Vec::len).sum();
    assert_eq!(sum, seen.len(), "packets of nobody");
    known
}
