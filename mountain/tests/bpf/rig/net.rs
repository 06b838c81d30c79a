// SPDX-License-Identifier: GPL-2.0-or-later
//! Real namespaces and sockets: a client host with two uplinks u0 and u1 to a server host (s0, s1),
//! service addresses on lo, multipath routes both ways in both families. The namespaces have no
//! name: they go away with the process, however it ends.

use std::fs::{self, File};
use std::io::IoSliceMut;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use mountain::bpf::{PathMasks as Masks, ProgramGroup, ProgramPath, Settings, Steer, SteerMode};
use mountain::steer::rendezvous::{inv_weight, path_salt};
use nix::sched::{setns, unshare, CloneFlags};
use nix::sys::socket::{
    recvmsg, setsockopt, sockopt, ControlMessageOwned, MsgFlags, SockaddrStorage,
};

use super::{ifindex, ip};

/// A network namespace without a name.
pub struct Ns(Arc<File>);

impl Ns {
    pub fn new() -> Self {
        let make = || {
            unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace");
            ip("link set lo up");
            File::open("/proc/thread-self/ns/net").unwrap()
        };
        Self(Arc::new(thread::spawn(make).join().unwrap()))
    }

    /// How `ip` can name it.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }

    /// Runs `f` on a new thread in there.
    pub fn spawn<T: Send + 'static>(
        &self,
        f: impl FnOnce() -> T + Send + 'static,
    ) -> JoinHandle<T> {
        let fd = Arc::clone(&self.0);
        thread::spawn(move || {
            setns(fd.as_fd(), CloneFlags::CLONE_NEWNET).unwrap();
            f()
        })
    }

    /// Runs `f` in there and waits for it.
    pub fn run<T: Send + 'static>(&self, f: impl FnOnce() -> T + Send + 'static) -> T {
        self.spawn(f)
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// Sets a sysctl of this thread's namespace.
pub fn sysctl(name: &str, value: &str) {
    let path = format!("/proc/sys/net/{name}");
    fs::write(&path, value).unwrap_or_else(|e| panic!("{path}: {e}"));
}

/// Service addresses.
pub fn client(v6: bool) -> IpAddr {
    if v6 { "fd00:ff::1" } else { "10.255.0.1" }
        .parse()
        .unwrap()
}

pub fn server(v6: bool) -> IpAddr {
    if v6 { "fd00:ff::2" } else { "10.255.0.2" }
        .parse()
        .unwrap()
}

fn mac(end: u8, i: usize) -> String {
    format!("02:00:00:00:{end:02x}:{i:02x}")
}

/// One host's end of the links: `dev`0 and `dev`1, host number `me` facing `peer` on each link.
fn configure(dev: &'static str, me: u8, peer: u8) {
    sysctl("ipv4/conf/all/rp_filter", "0");
    sysctl("ipv4/conf/default/rp_filter", "0");
    sysctl("ipv4/icmp_ratelimit", "0");
    sysctl("ipv6/icmp/ratelimit", "0");
    ip(&format!("addr add 10.255.0.{me}/32 dev lo"));
    ip(&format!("addr add fd00:ff::{me}/128 dev lo nodad"));
    let mut hops = [String::new(), String::new()];
    for i in 0..2 {
        sysctl(&format!("ipv4/conf/{dev}{i}/rp_filter"), "0");
        ip(&format!("link set {dev}{i} address {}", mac(me, i)));
        ip(&format!("addr add 10.0.{i}.{me}/24 dev {dev}{i}"));
        ip(&format!("addr add fd00:{i}::{me}/64 dev {dev}{i} nodad"));
        ip(&format!("link set {dev}{i} up"));
        for gateway in [format!("10.0.{i}.{peer}"), format!("fd00:{i}::{peer}")] {
            ip(&format!(
                "neigh replace {gateway} lladdr {} dev {dev}{i} nud permanent",
                mac(peer, i)
            ));
            hops[gateway.contains(':') as usize] += &format!(" nexthop via {gateway} dev {dev}{i}");
        }
    }
    let [v4, v6] = hops;
    ip(&format!("route add default src 10.255.0.{me}{v4}"));
    ip(&format!("-6 route add default src fd00:ff::{me}{v6}"));
}

/// Makes this thread's namespace the client and returns the server.
pub fn two_hosts() -> Ns {
    let server = Ns::new();
    for i in 0..2 {
        ip(&format!(
            "link add u{i} type veth peer name s{i} netns {}",
            server.path()
        ));
    }
    // Up on both ends before routes are made: they refuse a next hop without carrier.
    server.run(|| ["s0", "s1"].map(|d| ip(&format!("link set {d} up"))));
    configure("u", 1, 2);
    server.run(|| configure("s", 2, 1));
    server
}

/// Path `id` of [`steer_two`]: 0 and 1 IPv4 by u0 and u1, 2 and 3 IPv6.
pub fn path(id: usize) -> ProgramPath {
    let (i, v6) = (id % 2, id >= 2);
    ProgramPath {
        ifindex: ifindex(&format!("u{i}")),
        mtu: 1500,
        ipv6: v6,
        gateway: if v6 {
            format!("fd00:{i}::2")
        } else {
            format!("10.0.{i}.2")
        }
        .parse()
        .unwrap(),
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
    let group = |first, prefix: &str| ProgramGroup {
        members: vec![(first, inv_weight(1)), (first + 1, inv_weight(1))],
        prefixes: vec![prefix.parse().unwrap()],
    };
    let groups = [group(0, "0.0.0.0/0"), group(2, "::/0")];
    let not_ours: Vec<_> = ["10.0.0.0/24", "10.0.1.0/24", "fd00:0::/64", "fd00:1::/64"]
        .iter()
        .map(|p| p.parse().unwrap())
        .collect();
    let sources = super::all_but(&["10.0.0.1", "10.0.1.1", "fd00:0::1", "fd00:1::1"]);
    steer
        .set_topology(&groups, &not_ours, &[], &sources)
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
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Seen>>,
    pub addr: SocketAddr,
}

impl Sink {
    pub fn start(host: &Ns, v6: bool) -> Self {
        let (socket, devs) = host.run(move || {
            let socket = UdpSocket::bind((server(v6), 0)).unwrap();
            socket
                .set_read_timeout(Some(Duration::from_millis(20)))
                .unwrap();
            if v6 {
                setsockopt(&socket, sockopt::Ipv6RecvPacketInfo, &true).unwrap();
            } else {
                setsockopt(&socket, sockopt::Ipv4PacketInfo, &true).unwrap();
            }
            setsockopt(&socket, sockopt::RcvBufForce, &(8 << 20)).unwrap();
            (socket, ["s0", "s1"].map(ifindex))
        });
        let addr = socket.local_addr().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let mut seen = vec![];
            // What is queued when the end is called is still read: it stops at a time-out.
            loop {
                match receive(&socket, &devs) {
                    Some(packet) => seen.push(packet),
                    None if ended.load(Ordering::Relaxed) => return seen,
                    None => {}
                }
            }
        });
        Self { stop, thread, addr }
    }

    /// Everything that has come.
    pub fn finish(self) -> Vec<Seen> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

fn receive(socket: &UdpSocket, devs: &[u32; 2]) -> Option<Seen> {
    let mut buf = [0; 65536];
    let mut space = nix::cmsg_space!(libc::in6_pktinfo);
    let mut iov = [IoSliceMut::new(&mut buf)];
    let msg = recvmsg::<SockaddrStorage>(
        socket.as_raw_fd(),
        &mut iov,
        Some(&mut space),
        MsgFlags::empty(),
    )
    .ok()?;
    let from = msg.address.unwrap();
    let flow = match (from.as_sockaddr_in(), from.as_sockaddr_in6()) {
        (Some(a), _) => a.port(),
        (_, Some(a)) => a.port(),
        _ => panic!("a sender of what family?"),
    };
    let index = msg
        .cmsgs()
        .unwrap()
        .find_map(|c| match c {
            ControlMessageOwned::Ipv4PacketInfo(i) => Some(i.ipi_ifindex as u32),
            ControlMessageOwned::Ipv6PacketInfo(i) => Some(i.ipi6_ifindex),
            _ => None,
        })
        .expect("packet info");
    let dev = devs
        .iter()
        .position(|&d| d == index)
        .expect("from neither uplink");
    let len = msg.bytes;
    Some(Seen {
        flow,
        seq: u32::from_le_bytes(buf[..4].try_into().unwrap()),
        dev,
        len,
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
    assert_eq!(
        known.iter().map(Vec::len).sum::<usize>(),
        seen.len(),
        "packets of nobody"
    );
    known
}

/// (packets, bytes) that a device of this thread's namespace has received.
pub fn received(dev: &str) -> (u64, u64) {
    let text = fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    let line = text
        .lines()
        .find_map(|l| l.trim().strip_prefix(&format!("{dev}:")));
    let mut words = line
        .expect(dev)
        .split_whitespace()
        .map(|w| w.parse().unwrap());
    let bytes = words.next().unwrap();
    (words.next().unwrap(), bytes)
}
