// SPDX-License-Identifier: GPL-2.0-or-later
//! Other people's frames on our devices, and packets about which something is doubtful.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd;
use std::thread;
use std::time::Duration;

use etherparse::PacketBuilder;
use nix::sys::stat::{makedev, mknod, Mode, SFlag};

use super::support::{said, wait_until, Net, Ns, LEAVE, SERVER4};

/// Packets of each kind that are sent, and with which source port.
pub(super) const PACKETS: u64 = 40;
/// From an address that the configuration lets move, whoever sends.
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 30, 0, 77);

/// Lets the daemon of `net` move all it may from u0 to u1: probes die on u0, nothing else does.
pub(super) fn only_u1_is_good(net: &mut Net) -> File {
    let config = tempfile::NamedTempFile::new().unwrap();
    let movable = "[steer]\nmovable_sources = [\"10.30.0.64/26\"]\n";
    fs::write(config.path(), movable).unwrap();
    let file = config.path().display();
    let log = net.start(&format!("up --foreground --config {file}"));
    wait_until("it runs", 6 * LEAVE, || said(&log).contains("running"));
    net.wait_good();
    net.client.wait_settled();
    let server = &net.server;
    server.run("nft add table inet q");
    server.run("nft add chain inet q in { type filter hook prerouting priority -300 ; }");
    server.run("nft add rule inet q in iifname s0 icmp type echo-request drop");
    net.wait_left("u0", false);
    log
}

/// Counts datagrams to ports of the server by the device they come in on.
pub(super) fn count_arrivals(server: &Ns, port: u16) {
    for dev in ["s0", "s1"] {
        server.run(&format!("nft add counter inet q {dev}_{port}"));
        let rule = format!("iifname {dev} udp dport {port} counter name {dev}_{port}");
        server.run(&format!("nft add rule inet q in {rule}"));
    }
}

pub(super) fn arrived(server: &Ns, dev: &str, port: u16) -> u64 {
    let text = server.run(&format!("nft list counter inet q {dev}_{port}"));
    let words: Vec<&str> = text.split_whitespace().collect();
    let at = words.iter().position(|w| *w == "packets").unwrap();
    words[at + 1].parse().unwrap()
}

/// Asserts that what `send` sends to a port of the server came by `dev` alone.
pub(super) fn all_come_by(server: &Ns, dev: &str, port: u16, what: &str, send: impl FnOnce(u16)) {
    count_arrivals(server, port);
    send(port);
    let both = || ["s0", "s1"].map(|d| arrived(server, d, port));
    wait_until(&format!("{what}: all arrive"), 3 * LEAVE, || {
        both().iter().sum::<u64>() >= PACKETS
    });
    let expected = ["s0", "s1"].map(|d| if d == dev { PACKETS } else { 0 });
    assert_eq!(both(), expected, "{what}: by s0 and s1");
}

/// Sends from sockets of a namespace, bound to `source`.
pub(super) fn by_sockets(ns: &Ns, source: Ipv4Addr, port: u16) {
    ns.with(move || {
        for _ in 0..PACKETS {
            let socket = UdpSocket::bind((source, 0)).unwrap();
            socket.send_to(b"x", (SERVER4, port)).unwrap();
            thread::sleep(Duration::from_millis(2));
        }
    });
}

fn mac(ns: &Ns, dev: &str) -> [u8; 6] {
    let text = ns.ip(&format!("-br link show dev {dev}"));
    let mac = text.split_whitespace().nth(2).unwrap();
    let bytes = mac.split(':').map(|b| u8::from_str_radix(b, 16).unwrap());
    bytes.collect::<Vec<_>>().try_into().unwrap()
}

/// A datagram from an address to the server in an Ethernet frame.
fn frame(to: [u8; 6], from: [u8; 6], source: Ipv4Addr, ports: (u16, u16)) -> Vec<u8> {
    let server: Ipv4Addr = SERVER4.parse().unwrap();
    let packet = PacketBuilder::ethernet2(from, to)
        .ipv4(source.octets(), server.octets(), 64)
        .udp(ports.0, ports.1);
    let mut frame = Vec::new();
    packet.write(&mut frame, b"x").unwrap();
    frame
}

/// A packet socket on a device of this thread's namespace.
struct RawSocket {
    socket: socket2::Socket,
    address: libc::sockaddr_ll,
}

impl RawSocket {
    fn on(dev: &str) -> Self {
        let protocol = Some(socket2::Protocol::from(0));
        let socket =
            socket2::Socket::new(socket2::Domain::PACKET, socket2::Type::RAW, protocol).unwrap();
        // SAFETY: all zeros is a valid address.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_ifindex = nix::net::if_::if_nametoindex(dev).unwrap() as i32;
        Self { socket, address }
    }

    fn send(&self, frame: &[u8]) {
        // SAFETY: both buffers are live and as long as told.
        let sent = unsafe {
            libc::sendto(
                self.socket.as_raw_fd(),
                frame.as_ptr().cast(),
                frame.len(),
                0,
                (&raw const self.address).cast(),
                size_of_val(&self.address) as u32,
            )
        };
        assert_eq!(sent, frame.len() as isize);
    }
}

/// Sends frames with the device's own source address from a packet socket on u0.
fn by_packet_socket(net: &Net, port: u16) {
    let (to, from) = (mac(&net.server, "s0"), mac(&net.client, "u0"));
    net.client.with(move || {
        let raw = RawSocket::on("u0");
        for n in 0..PACKETS {
            raw.send(&frame(to, from, GUEST, (1000 + n as u16, port)));
            thread::sleep(Duration::from_millis(2));
        }
    });
}

/// Sends frames as a virtual machine behind the macvtap device `tap0` of the client does.
fn by_macvtap(net: &Net, port: u16) {
    let (to, from) = (mac(&net.server, "s0"), mac(&net.client, "tap0"));
    let mut shell = net.client.command("unshare");
    let read = "mount -t sysfs none /sys && cat /sys/class/net/tap0/macvtap/*/dev";
    let number = shell.args(["-m", "sh", "-c", read]).output().unwrap();
    let number = String::from_utf8(number.stdout).unwrap();
    let (major, minor) = number.trim().split_once(':').expect("a character device");
    let folder = tempfile::tempdir().unwrap();
    let node = folder.path().join("tap");
    let device = makedev(major.parse().unwrap(), minor.parse().unwrap());
    mknod(&node, SFlag::S_IFCHR, Mode::S_IRUSR | Mode::S_IWUSR, device).unwrap();
    let both = OpenOptions::new().read(true).write(true).clone();
    let mut tap = both.open(&node).unwrap();
    for n in 0..PACKETS {
        // struct virtio_net_hdr comes first: nothing is offloaded.
        let mut packet = vec![0; 10];
        packet.extend(frame(to, from, GUEST, (2000 + n as u16, port)));
        tap.write_all(&packet).unwrap();
        thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn guests_and_raw_senders_keep_the_uplink_that_they_chose() {
    let mut net = Net::new();
    let _log = only_u1_is_good(&mut net);
    let (client, server) = (&net.client, &net.server);
    let own = "10.98.0.1".parse().unwrap();
    all_come_by(server, "s1", 9001, "the host's own packets", |port| {
        by_sockets(client, own, port);
    });

    let before = net.counter("pass_foreign");
    let guest = Ns::new("g");
    client.ip("link add link u0 name m0 type macvlan mode bridge");
    client.ip(&format!("link set m0 netns {}", guest.name));
    guest.bring_up("m0", &[&format!("{GUEST}/24")]);
    guest.ip("route add default via 10.30.0.2");
    all_come_by(server, "s0", 9002, "a macvlan guest", |port| {
        by_sockets(&guest, GUEST, port);
    });
    guest.ip("link del m0");

    client.ip("link add link u0 name tap0 type macvtap mode bridge");
    client.ip("link set tap0 up");
    let what = "a virtual machine behind macvtap";
    all_come_by(server, "s0", 9003, what, |port| by_macvtap(&net, port));
    client.ip("link del tap0");

    all_come_by(server, "s0", 9004, "a packet socket", |port| {
        by_packet_socket(&net, port);
    });

    // A bridge takes the device in: what its other ports send is not the host's.
    let s0 = server.ip("-br link show dev s0");
    let lladdr = s0.split_whitespace().nth(2).unwrap();
    let neighbour = "10.30.0.2 dev u0 nud permanent lladdr";
    client.ip(&format!("neigh replace {neighbour} {lladdr}"));
    client.wire(("p0", &[]), &guest, ("e0", &[&format!("{GUEST}/24")]));
    client.ip("link add b0 type bridge");
    for dev in ["u0", "p0"] {
        client.ip(&format!("link set {dev} master b0"));
    }
    client.bring_up("b0", &[]);
    guest.ip("route add default via 10.30.0.2");
    all_come_by(server, "s0", 9005, "a bridge's other port", |port| {
        by_sockets(&guest, GUEST, port);
    });
    let what = "the host's own packets at last";
    all_come_by(server, "s1", 9006, what, |port| {
        by_sockets(client, own, port)
    });
    let told = net.counter("pass_foreign") - before;
    assert!(told >= 4 * PACKETS, "{told} packets told as foreign");
}

/// A network behind the client, which forwards for it: e0 10.50.0.2 at lan 10.50.0.1.
fn inner_network(net: &Net) -> Ns {
    let (inner, client) = (Ns::new("i"), &net.client);
    client.forward_for("lan", &inner, "e0", "10.50.0");
    client.sysctl("net.ipv4.conf.all.rp_filter", "0");
    client.sysctl("net.ipv4.conf.lan.rp_filter", "0");
    inner
}

/// Its address.
const INSIDE: Ipv4Addr = Ipv4Addr::new(10, 50, 0, 2);

/// Waits until what the inner network sends moves to u1.
fn wait_inner_moves(net: &Net, inner: &Ns) {
    wait_until("inner flows move", 3 * LEAVE, || {
        let port = 9100 + net.client.status().uptime_s as u16;
        count_arrivals(&net.server, port);
        by_sockets(inner, INSIDE, port);
        arrived(&net.server, "s1", port) == PACKETS
    });
}

#[test]
fn forged_sources_do_not_take_translated_flows_off_their_uplink() {
    let mut net = Net::new();
    let inner = inner_network(&net);
    // What port 9500 and up get from NAT is the address of one uplink, on no device of this host.
    for line in [
        "table ip t",
        "chain ip t out { type nat hook postrouting priority 100 ; }",
        "rule ip t out iifname lan udp dport 9500-9600 snat to 192.0.2.77",
    ] {
        net.client.run(&format!("nft add {line}"));
    }
    // The server knows by which uplink it accepts that address: by the kernel's, u0.
    net.client.ip("route replace 10.98.1.0/24 src 10.98.0.1 \
         nexthop via 10.30.0.2 dev u0 weight 250 nexthop via 10.30.1.2 dev u1 weight 1");
    let _log = only_u1_is_good(&mut net);
    let (client, server) = (&net.client, &net.server);

    // Datagrams with random sources, more than any list of such sources has room for.
    let (to, from) = (mac(client, "lan"), mac(&inner, "e0"));
    inner.with(move || {
        let raw = RawSocket::on("e0");
        for n in 0..6_000u32 {
            let source = Ipv4Addr::from(0x0b00_0000 + n * 7919);
            raw.send(&frame(to, from, source, (1, 9)));
            if n % 20 == 0 {
                thread::sleep(Duration::from_millis(10));
            }
        }
    });
    // What is not translated moves, once its source is known to be of the inner network.
    wait_inner_moves(&net, &inner);
    // What is translated stays where the kernel routed it: nearly all by u0.
    count_arrivals(server, 9500);
    by_sockets(&inner, INSIDE, 9500);
    let by = || ["s0", "s1"].map(|dev| arrived(server, dev, 9500));
    wait_until("all arrive", 3 * LEAVE, || {
        by().iter().sum::<u64>() >= PACKETS
    });
    assert!(by()[0] * 2 > PACKETS, "moved off their uplink: {:?}", by());
}

#[test]
fn packets_that_an_ip_rule_selects_keep_its_uplink() {
    let mut net = Net::new();
    let inner = inner_network(&net);
    let _log = only_u1_is_good(&mut net);
    let (client, server) = (&net.client, &net.server);
    client.ip("route add default via 10.30.0.2 dev u0 table 100");
    // Known as movable before it matters.
    wait_inner_moves(&net, &inner);

    // What no socket has sent is root's to the kernel.
    client.ip("rule add priority 50 iif lan uidrange 0-0 lookup 100");
    client.wait_settled();
    let what = "forwarded, and a rule for root";
    all_come_by(server, "s0", 9201, what, |port| {
        by_sockets(&inner, INSIDE, port)
    });
    client.ip("rule del priority 50");

    // A TOS is compared without the three bits above it.
    client.ip("rule add priority 50 tos 0x10 lookup 100");
    client.wait_settled();
    let with_tos = |tos: u32| {
        move |port: u16| {
            client.with(move || {
                for _ in 0..PACKETS {
                    let socket = UdpSocket::bind(("10.98.0.1", 0)).unwrap();
                    socket2::SockRef::from(&socket).set_tos_v4(tos).unwrap();
                    socket.send_to(b"x", (SERVER4, port)).unwrap();
                    thread::sleep(Duration::from_millis(2));
                }
            });
        }
    };
    let kernel = |tos: &str| client.ip(&format!("route get 10.98.1.1 from 10.98.0.1 tos {tos}"));
    assert!(kernel("0x10").contains("dev u0"), "{}", kernel("0x10"));
    all_come_by(server, "s0", 9202, "TOS 0x10", with_tos(0x10));
    all_come_by(server, "s0", 9203, "TOS 0xb0", with_tos(0xb0));
    all_come_by(server, "s1", 9204, "TOS 0x08", with_tos(0x08));
    client.ip("rule del priority 50");
}
