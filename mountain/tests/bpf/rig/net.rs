// SPDX-License-Identifier: GPL-2.0-or-later
//! Real namespaces and sockets: a client host with two uplinks u0 and u1 to a server host (s0, s1),
//! service addresses on lo, multipath routes both ways in both families. The client has no name: it
//! goes away with the process, however it ends.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use mountain::bpf::{PathMasks as Masks, ProgramPath, Settings, Steer, SteerMode};
use mountain::steer::rendezvous::path_salt;
use testkit::{sysctl, TestNamespace};

use super::{bring_up, ifindex, in_netns, ip};
use crate::support::{arrivals, Worker};

/// Service addresses.
pub fn client(v6: bool) -> IpAddr {
    let address = if v6 { "fd00:ff::1" } else { "10.255.0.1" };
    address.parse().unwrap()
}

pub fn server(v6: bool) -> IpAddr {
    let address = if v6 { "fd00:ff::2" } else { "10.255.0.2" };
    address.parse().unwrap()
}

fn mac(end: u8, i: usize) -> String {
    format!("02:00:00:00:{end:02x}:{i:02x}")
}

/// One host's end of the links: `dev`0 and `dev`1, host number `me` facing `peer` on each link.
fn configure(dev: &'static str, me: u8, peer: u8) {
    sysctl("net/ipv4/conf/all/rp_filter", "0");
    sysctl("net/ipv4/conf/default/rp_filter", "0");
    sysctl("net/ipv4/icmp_ratelimit", "0");
    sysctl("net/ipv6/icmp/ratelimit", "0");
    ip(&format!("addr add 10.255.0.{me}/32 dev lo"));
    ip(&format!("addr add fd00:ff::{me}/128 dev lo nodad"));
    let mut hops = [String::new(), String::new()];
    for i in 0..2 {
        sysctl(&format!("net/ipv4/conf/{dev}{i}/rp_filter"), "0");
        ip(&format!("link set {dev}{i} address {}", mac(me, i)));
        let own = [format!("10.0.{i}.{me}/24"), format!("fd00:{i}::{me}/64")];
        bring_up(&format!("{dev}{i}"), &own.each_ref().map(|a| &**a));
        for gateway in [format!("10.0.{i}.{peer}"), format!("fd00:{i}::{peer}")] {
            let known = format!("{gateway} lladdr {} dev {dev}{i}", mac(peer, i));
            ip(&format!("neigh replace {known} nud permanent"));
            hops[gateway.contains(':') as usize] += &format!(" nexthop via {gateway} dev {dev}{i}");
        }
    }
    let [v4, v6] = hops;
    ip(&format!("route add default src 10.255.0.{me}{v4}"));
    ip(&format!("-6 route add default src fd00:ff::{me}{v6}"));
}

/// Makes this thread's namespace the client and returns the server.
fn two_hosts() -> TestNamespace {
    let server = TestNamespace::new("s");
    let far = &server.name;
    for i in 0..2 {
        ip(&format!(
            "link add u{i} type veth peer name s{i} netns {far}"
        ));
        // Up on both ends before routes are made: they refuse a next hop without carrier.
        server.ip(&format!("link set s{i} up"));
    }
    configure("u", 1, 2);
    server.with(|| configure("s", 2, 1));
    server
}

/// Runs a test as the client, with the server.
pub fn with_server(test: impl FnOnce(TestNamespace) + Send + 'static) {
    in_netns(|| test(two_hosts()));
}

/// The same by IPv4, then by IPv6.
pub fn for_each_family(test: fn(TestNamespace, bool)) {
    for v6 in [false, true] {
        with_server(move |host| test(host, v6));
    }
}

/// Path `id` of [`steer_two`]: 0 and 1 IPv4 by u0 and u1, 2 and 3 IPv6.
pub fn path(id: usize) -> ProgramPath {
    let (i, v6) = (id % 2, id >= 2);
    let gateway = match v6 {
        false => format!("10.0.{i}.2"),
        true => format!("fd00:{i}::2"),
    };
    ProgramPath {
        ifindex: ifindex(&format!("u{i}")),
        mtu: 1500,
        ipv6: v6,
        gateway: gateway.parse().unwrap(),
        mac: Some([2, 0, 0, 0, 2, i as u8]),
        ethernet: true,
        salt: path_salt(&[id as u8]),
        cost_weight: 100,
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
    let links = ["10.0.0.0/24", "10.0.1.0/24", "fd00:0::/64", "fd00:1::/64"];
    let not_ours = links.map(|prefix| prefix.parse().unwrap());
    let sources = super::all_but(&["10.0.0.1", "10.0.1.1", "fd00:0::1", "fd00:1::1"]);
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
    pub len: usize,
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
        len: packet.len,
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
