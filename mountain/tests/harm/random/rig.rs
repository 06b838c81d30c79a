// SPDX-License-Identifier: GPL-2.0-or-later
//! A host in namespaces without names, with the far ends of its devices in the hand of the test.
//!
//! One thread works inside the host: it opens its sockets, injects what comes from others, and is
//! every neighbour: it answers ARP, neighbour solicitations, echo requests to gateways (unless a
//! path is muted) and TCP. All else that leaves is kept. Nothing survives the process.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::time::{Duration, Instant};

use etherparse::icmpv6::NeighborAdvertisementHeader;
use etherparse::{ArpEthIpv4Packet, ArpOperation, ArpPacket, EtherType};
use etherparse::{Icmpv6Type, PacketBuilder, TcpHeader, TcpSlice, UdpHeader};
use netlink_sys::protocols::NETLINK_NETFILTER;
use netlink_sys::{Socket, SocketAddr};
use nix::sched::{sched_getaffinity, sched_setaffinity, setns, unshare, CloneFlags, CpuSet};
use nix::unistd::Pid;

use super::devices::{open_ppp, Tunnel};
use super::host::{neighbour_mac, own_mac, Host, INNER, TUN};
use super::packets::{self, parse, Look, TCP, UDP};
use crate::support::frames::{ethernet, framed, PacketSocket};
use crate::support::ip::Ip;
use crate::support::sums::put_check;
use crate::support::{tun, wait_until};
use testkit::{ifindex, sysctl};

/// Of frames that tell that all before them has arrived: for experiments (IEEE 802).
const FENCE: u16 = 0x88b5;
/// The same of packets in a tunnel (RFC 3692).
const FENCE_PROTO: u8 = 253;

/// Where a packet leaves: the device, the neighbour that the frame is for, and the address that it is from.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Exit {
    pub device: String,
    pub neighbour: Option<[u8; 6]>,
    pub from: Option<[u8; 6]>,
}

/// One packet as it left.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Seen {
    pub exit: Exit,
    pub look: Look,
}

pub struct Rig {
    pub host_ns: File,
    pub guest_ns: Vec<File>,
    /// In the far namespace and in the host.
    far: PacketSocket,
    near: PacketSocket,
    /// A tunnel's far end, and what stands before the packets that are read from it, bytes.
    tun: Option<(File, usize)>,
    /// Index of each far end, and the host's own.
    far_index: HashMap<u32, String>,
    index: HashMap<String, u32>,
    far_of: HashMap<String, u32>,
    fences: HashMap<String, u32>,
    fence: u32,
    /// Devices whose gateways do not answer probes.
    pub muted: Vec<String>,
    /// Flows whose datagrams are answered. TCP always is.
    pub answered: BTreeSet<u16>,
    /// What has left, with the flow's number.
    seen: Vec<(u16, Seen)>,
}

fn namespace() -> io::Result<File> {
    File::open("/proc/thread-self/ns/net")
}

fn new_namespace() -> io::Result<File> {
    unshare(CloneFlags::CLONE_NEWNET)?;
    namespace()
}

pub fn enter(ns: &File) {
    setns(ns, CloneFlags::CLONE_NEWNET).expect("the namespace exists");
}

/// Runs a program in this thread's namespace with lines to read.
pub fn feed(program: &str, arguments: &[&str], lines: &[String]) {
    if !lines.is_empty() {
        let text = lines.join("\n") + "\n";
        testkit::feed(Command::new(program).args(arguments), &text);
    }
}

pub fn ip(lines: &[String]) {
    feed("ip", &["-batch", "-"], lines);
}

/// The kernel tells itself of carriers when it has time to, and has IPv6's flows under way choose their hops anew
/// then: not in the middle of the test.
fn wait_for_carriers() {
    let is_down = |line: &str| {
        let mut words = line.split_whitespace();
        let name = words.next().unwrap_or("").split('@').next().unwrap_or("");
        let ours = name == INNER || name.starts_with('u') && name.len() == 2;
        ours && words.next() != Some("UP")
    };
    wait_until("all have a carrier", Duration::from_secs(60), || {
        !testkit::ip("-br link").lines().any(is_down)
    });
}

impl Rig {
    /// Builds the host. The thread is inside from then on.
    pub fn new(host: &Host) -> Self {
        // Other threads' children would hold this one's sockets for a moment.
        unshare(CloneFlags::CLONE_FILES).unwrap();
        let far_ns = new_namespace().expect("network namespaces: run this as root");
        sysctl("net/ipv6/conf/default/disable_ipv6", "1");
        sysctl("net/ipv6/conf/all/disable_ipv6", "1");
        let far = PacketSocket::new();
        let guest_ns: Vec<File> = (host.guests.iter())
            .map(|_| {
                let ns = new_namespace().unwrap();
                sysctl("net/ipv6/conf/default/accept_dad", "0");
                ns
            })
            .collect();
        let host_ns = new_namespace().unwrap();
        for (key, value) in [
            ("net/ipv6/conf/default/accept_dad", "0"),
            ("net/ipv6/conf/all/accept_dad", "0"),
            ("net/ipv4/conf/all/rp_filter", "0"),
            ("net/ipv4/conf/default/rp_filter", "0"),
        ] {
            sysctl(key, value);
        }
        for (key, value) in &host.sysctls {
            sysctl(&format!("net/{key}"), value);
        }
        let tun = match host.tunnel() {
            Some(Tunnel::Tun) => Some((tun::attach(TUN), 0)),
            Some(Tunnel::Ppp) => Some((open_ppp(), 2)),
            _ => None,
        };
        let path_of = |ns: &File| format!("/proc/{}/fd/{}", nix::unistd::gettid(), ns.as_raw_fd());
        ip(&host.device_lines(&path_of(&far_ns)));

        enter(&far_ns);
        let mut names: Vec<&str> = (host.uplinks.iter().map(|u| u.name.as_str()))
            .chain([INNER])
            .collect();
        ip(&host.far_lines());
        host.set_keys(1);
        let up: Vec<String> = names.iter().map(|n| format!("link set s-{n} up")).collect();
        ip(&up);
        if host.tunnel().is_some_and(Tunnel::is_carried) {
            names.push(TUN);
        }
        let far_of: HashMap<String, u32> = (names.iter())
            .map(|n| (n.to_string(), ifindex(&format!("s-{n}"))))
            .collect();
        enter(&host_ns);
        host.set_keys(0);
        ip(&host.route_lines());
        ip(&host.ipsec_lines());
        feed("ip", &["-4", "-batch", "-"], &host.rule_lines(false));
        feed("ip", &["-6", "-batch", "-"], &host.rule_lines(true));
        for (n, guest) in guest_ns.iter().enumerate() {
            let [here, inside] = host.guest_lines(n, &path_of(guest));
            ip(&here);
            enter(guest);
            ip(&inside);
            enter(&host_ns);
        }
        feed("nft", &["-f", "-"], &host.nft);
        wait_for_carriers();
        // A carrier that comes resets them.
        for (key, value) in &host.device_sysctls {
            sysctl(&format!("net/{key}"), value);
        }
        Self {
            far,
            near: PacketSocket::new(),
            tun,
            far_index: far_of.iter().map(|(n, i)| (*i, n.clone())).collect(),
            index: names.iter().map(|n| (n.to_string(), ifindex(n))).collect(),
            far_of,
            fences: HashMap::new(),
            fence: 0,
            muted: Vec::new(),
            answered: BTreeSet::new(),
            seen: Vec::new(),
            host_ns,
            guest_ns,
        }
    }

    /// A packet that a neighbour behind a device sends to this host.
    pub fn inject(&self, device: &str, packet: &[u8]) {
        let frame = framed(self.own_mac(device), [6, 0, 0, 0, 0, 1], packet);
        self.far.send(self.far_of[device], &frame);
    }

    /// A frame that this host sends by a device, past its routing.
    pub fn write_frame(&self, device: &str, gateway: IpAddr, packet: &[u8]) {
        let frame = framed(neighbour_mac(gateway), self.own_mac(device), packet);
        self.near.send(self.index[device], &frame);
    }

    fn own_mac(&self, device: &str) -> [u8; 6] {
        match device.strip_prefix('u') {
            Some(n) => own_mac(n.parse().unwrap()),
            None => own_mac(self.index.keys().filter(|n| n.starts_with('u')).count()),
        }
    }

    /// Answers neighbours until then.
    pub fn pump(&mut self, time: Duration) {
        let end = Instant::now() + time;
        loop {
            self.read_all();
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            self.poll(left);
        }
    }

    fn poll(&self, time: Duration) {
        let poll_in = |fd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        let mut fds = vec![poll_in(self.far.as_raw_fd())];
        fds.extend(self.tun.as_ref().map(|(t, _)| poll_in(t.as_raw_fd())));
        let ms = time.as_millis().clamp(1, 1000) as i32;
        // SAFETY: the descriptors are open and the array is as long as it says.
        unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as u64, ms) };
    }

    /// What has left since the last time, all of it.
    pub fn collect(&mut self) -> Vec<(u16, Seen)> {
        // What is forwarded may still have to be when the first ones arrive, and so may what it is answered.
        for _ in 0..3 {
            self.wait_for_fences();
        }
        std::mem::take(&mut self.seen)
    }

    /// Leaves out what comes late, but for what TCP sends again by itself.
    pub fn forget_late(&mut self) {
        self.read_all();
        let is_again = |seen: &Seen| seen.look.proto == TCP && !seen.look.is_answer;
        self.seen.retain(|(_, seen)| is_again(seen));
    }

    fn wait_for_fences(&mut self) {
        self.fence += 1;
        let end = Instant::now() + Duration::from_secs(60);
        let mut sent = None::<Instant>;
        while (self.index.keys()).any(|n| self.fences.get(n) != Some(&self.fence)) {
            assert!(Instant::now() < end, "a fence is lost: {:?}", self.fences);
            // Again where it was lost: a device that has just come up drops what it is given for a while.
            if sent.is_none_or(|at| at.elapsed() > Duration::from_millis(500)) {
                self.send_fences();
                sent = Some(Instant::now());
            }
            self.poll(Duration::from_millis(10));
            self.read_all();
        }
        self.read_all();
    }

    /// By each device whose last one has not arrived.
    fn send_fences(&self) {
        for (name, &index) in &self.index {
            if self.fences.get(name) == Some(&self.fence) {
                continue;
            }
            let number = self.fence.to_be_bytes();
            if name == TUN {
                let [from, to] = ["10.50.0.1", "10.50.0.2"].map(|a| a.parse().unwrap());
                let packet = Ip::between(from, to, FENCE_PROTO, number.to_vec()).l3();
                self.near.send(index, &packet);
                continue;
            }
            let from = self.own_mac(name);
            let mut frame = ethernet([0xff; 6], from, EtherType(FENCE), &number);
            frame.resize(60, 0);
            self.near.send(index, &frame);
        }
    }

    fn read_all(&mut self) {
        let mut buffer = [0; 65_536];
        while let Some((length, index)) = self.far.receive(&mut buffer) {
            let frame = &buffer[..length];
            match self.far_index.get(&index).cloned() {
                Some(name) if name == TUN => self.tunnelled(frame),
                Some(name) if length >= 14 => self.frame(&name, frame),
                _ => {}
            }
        }
        while let Some((mut file, before)) = self.tun.as_ref().map(|(file, n)| (file, *n)) {
            let length = match tun::readable([file], 0) {
                [true] => file.read(&mut buffer).unwrap_or(0),
                _ => 0,
            };
            if length == 0 {
                break;
            }
            self.tunnelled(&buffer[before.min(length)..length]);
        }
    }

    /// A packet that has left by the tunnel.
    fn tunnelled(&mut self, packet: &[u8]) {
        match *packet {
            [0x45, _, _, _, _, _, _, _, _, FENCE_PROTO, ..] if packet.len() == 24 => {
                let n = u32::from_be_bytes(*packet[20..].first_chunk().unwrap());
                self.fences.insert(TUN.to_owned(), n);
            }
            [] => {}
            _ => self.packet(TUN, None, packet),
        }
    }

    fn frame(&mut self, device: &str, frame: &[u8]) {
        let to: [u8; 6] = *frame.first_chunk().unwrap();
        let from: [u8; 6] = *frame[6..].first_chunk().unwrap();
        let body = &frame[14..];
        match u16::from_be_bytes([frame[12], frame[13]]) {
            FENCE => {
                let n = u32::from_be_bytes(*body.first_chunk().unwrap());
                self.fences.insert(device.to_owned(), n);
            }
            0x0806 => self.arp(device, body),
            0x0800 => self.packet(device, Some((to, from)), body),
            0x86dd if body.len() > 63 && body[6] == 58 && body[40] == 135 => {
                self.solicited(device, from, body);
            }
            0x86dd => self.packet(device, Some((to, from)), body),
            _ => {}
        }
    }

    fn arp(&self, device: &str, body: &[u8]) {
        let request = ArpPacket::from_slice(body).ok();
        let request = request.and_then(|arp| arp.try_eth_ipv4().ok());
        let asks = |arp: &ArpEthIpv4Packet| {
            arp.operation == ArpOperation::REQUEST && arp.sender_ipv4 != arp.target_ipv4
        };
        let Some(request) = request.filter(asks) else {
            return;
        };
        let mac = neighbour_mac(request.target_ipv4.into());
        let reply = ArpEthIpv4Packet {
            operation: ArpOperation::REPLY,
            sender_mac: mac,
            sender_ipv4: request.target_ipv4,
            target_mac: request.sender_mac,
            target_ipv4: request.sender_ipv4,
        };
        let frame = ethernet(request.sender_mac, mac, EtherType::ARP, &reply.to_bytes());
        self.far.send(self.far_of[device], &frame);
    }

    fn solicited(&self, device: &str, from: [u8; 6], body: &[u8]) {
        let target: [u8; 16] = *body[48..].first_chunk().unwrap();
        let source: [u8; 16] = *body[8..].first_chunk().unwrap();
        if source == [0; 16] {
            return;
        }
        let mac = neighbour_mac(target.into());
        let advert = NeighborAdvertisementHeader {
            router: false,
            solicited: true,
            r#override: true,
        };
        // With the option that has the target's link-layer address.
        let options = [&target[..], &[2, 1], &mac].concat();
        let mut packet = Vec::new();
        PacketBuilder::ipv6(target, source, 255)
            .icmpv6(Icmpv6Type::NeighborAdvertisement(advert))
            .write(&mut packet, &options)
            .unwrap();
        self.far
            .send(self.far_of[device], &framed(from, mac, &packet));
    }

    /// A packet that has left by a device, in a frame to and from these addresses.
    fn packet(&mut self, device: &str, macs: Option<([u8; 6], [u8; 6])>, packet: &[u8]) {
        let Some(parsed) = parse(packet) else { return };
        let Some(flow) = parsed.flow else {
            let probe = matches!(parsed.look.kind, Some((8 | 128, _)));
            if probe && !self.muted.iter().any(|m| m == device) {
                self.answer(device, macs, &parsed);
            }
            return;
        };
        let exit = Exit {
            device: device.to_owned(),
            neighbour: macs.map(|(to, _)| to),
            from: macs.map(|(_, from)| from),
        };
        let look = parsed.look.clone();
        let (is_answer, is_whole) = (look.is_answer, look.part.is_none());
        self.seen.push((flow, Seen { exit, look }));
        if device == INNER || is_answer {
            return;
        }
        match parsed.look.proto {
            TCP => self.accept(device, macs, &parsed),
            UDP if is_whole && self.answered.contains(&flow) => {
                self.answer_datagram(device, macs, &parsed, flow);
            }
            _ => {}
        }
    }

    /// An echo reply.
    fn answer(&self, device: &str, macs: Option<([u8; 6], [u8; 6])>, request: &packets::Parsed) {
        let mut l4 = request.l4.to_vec();
        l4[0] = if request.look.proto == 58 { 129 } else { 0 };
        self.reply(device, macs, &request.look, l4);
    }

    /// What a server answers to a SYN or to data.
    fn accept(&self, device: &str, macs: Option<([u8; 6], [u8; 6])>, request: &packets::Parsed) {
        let Ok(tcp) = TcpSlice::from_slice(request.l4) else {
            return;
        };
        let data = tcp.payload().len() as u32;
        if tcp.fin() || tcp.rst() || !tcp.syn() && data == 0 {
            return;
        }
        let (sequence, advance) = match tcp.syn() {
            true => (1000, 1),
            false => (tcp.acknowledgment_number(), data),
        };
        let (own, peer) = (tcp.destination_port(), tcp.source_port());
        let mut reply = TcpHeader::new(own, peer, sequence, 0x4000);
        (reply.syn, reply.ack) = (tcp.syn(), true);
        if tcp.syn() {
            // Segments as large as any device's.
            reply.set_options_raw(&[2, 4, 5, 180]).unwrap();
        }
        reply.acknowledgment_number = tcp.sequence_number().wrapping_add(advance);
        self.reply(device, macs, &request.look, reply.to_bytes().to_vec());
    }

    /// What a server answers to a datagram.
    fn answer_datagram(
        &self,
        device: &str,
        macs: Option<([u8; 6], [u8; 6])>,
        request: &packets::Parsed,
        flow: u16,
    ) {
        let Some((ports, _)) = request.l4.split_first_chunk::<4>() else {
            return;
        };
        let payload = packets::payload(flow, 16);
        let reply = UdpHeader {
            source_port: u16::from_be_bytes([ports[2], ports[3]]),
            destination_port: u16::from_be_bytes([ports[0], ports[1]]),
            length: (8 + payload.len()) as u16,
            checksum: 0,
        };
        let l4 = [&reply.to_bytes()[..], &payload].concat();
        self.reply(device, macs, &request.look, l4);
    }

    /// Sends `l4` with its checksum the way back.
    fn reply(&self, device: &str, macs: Option<([u8; 6], [u8; 6])>, to: &Look, mut l4: Vec<u8>) {
        put_check(to.to, to.source, to.proto, &mut l4);
        let packet = Ip::between(to.to, to.source, to.proto, l4).l3();
        match macs {
            Some((mine, host)) => {
                let frame = framed(host, mine, &packet);
                self.far.send(self.far_of[device], &frame);
            }
            None => match (&self.tun, self.far_of.get(device)) {
                (Some((tun, 0)), _) => {
                    let _ = (&mut &*tun).write(&packet);
                }
                // A ppp device takes nothing without a line.
                (Some(_), _) | (None, None) => {}
                (None, Some(index)) => _ = self.far.send(*index, &packet),
            },
        }
    }

    /// Runs `work` in a guest's namespace.
    pub fn in_guest<T>(&self, guest: usize, work: impl FnOnce() -> T) -> T {
        enter(&self.guest_ns[guest]);
        let done = work();
        enter(&self.host_ns);
        done
    }
}

/// What a host is set to: its rules, routes and firewall, in this thread's namespace.
pub fn settings() -> String {
    let rules = ["-4 rule", "-6 rule"].map(testkit::ip);
    let routes = [
        "-4 route show table all",
        "-6 route show table all",
        "nexthop",
    ]
    .map(testkit::ip);
    // Without what packets change: counters, elements of sets.
    let nft = Command::new("nft")
        .args(["-s", "-t", "list", "ruleset"])
        .output();
    rules.concat() + &routes.concat() + &testkit::ok("nft list ruleset", nft)
}

/// Keeps this thread on one CPU, so that what it sends stays in order on its way through the kernel.
pub struct Pinned(CpuSet);

impl Pinned {
    pub fn new() -> Self {
        let this = Pid::from_raw(0);
        let before = sched_getaffinity(this).expect("a thread has CPUs");
        let mut one = CpuSet::new();
        // SAFETY: a plain system call.
        let cpu = unsafe { libc::sched_getcpu() };
        one.set(cpu as usize).expect("a CPU's number");
        // It may have moved meanwhile to one that it may not use; then it stays free.
        let _ = sched_setaffinity(this, &one);
        Self(before)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = sched_setaffinity(Pid::from_raw(0), &self.0);
    }
}

/// Forgets all connections that Netfilter tracks in this namespace.
pub fn flush_conntrack() {
    // nfgenmsg of IPCTNL_MSG_CT_DELETE for all families, without a tuple: all of them.
    let mut message = 20u32.to_ne_bytes().to_vec();
    message.extend((1u16 << 8 | 2).to_ne_bytes());
    message.extend((libc::NLM_F_REQUEST as u16 | libc::NLM_F_ACK as u16).to_ne_bytes());
    message.extend([0; 12]);
    let socket = Socket::new(NETLINK_NETFILTER).expect("netlink");
    socket.send_to(&message, &SocketAddr::new(0, 0), 0).unwrap();
    let (answer, _) = socket.recv_from_full().unwrap();
    let code = i32::from_ne_bytes(*answer[16..].first_chunk().unwrap());
    assert_eq!(code, 0, "conntrack flush");
}
