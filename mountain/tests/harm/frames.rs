// SPDX-License-Identifier: GPL-2.0-or-later
//! Other people's frames on our devices, and packets about which something is doubtful.

use std::fs::File;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::thread;
use std::time::Duration;

use etherparse::PacketBuilder;
use nix::sys::stat::{makedev, mknod, Mode, SFlag};
use socket2::{Domain, Socket, Type};

use super::support::frames::PacketSocket;
use super::support::{assert_has, stdout, wait_until, Net, Ns, LEAVE, SERVER4};

/// Packets of each kind that are sent, and with which source port.
pub(super) const PACKETS: u64 = 40;
/// From an address that the configuration lets move, whoever sends.
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 30, 0, 77);

/// Lets the daemon of `net` move all it may from u0 to u1: probes die on u0, nothing else does.
pub(super) fn only_u1_is_good(net: &mut Net) -> File {
    let log = net.start_configured("[steer]\nmovable_sources = [\"10.30.0.64/26\"]\n");
    net.wait_good();
    net.client.wait_settled();
    let hook = "filter hook prerouting priority -300";
    let rule = "iifname s0 icmp type echo-request drop";
    net.server.chain("inet q in", hook, rule);
    net.client.wait_left("u0", false);
    log
}

/// Counts datagrams to ports of the server by the device they come in on.
pub(super) fn count_arrivals(server: &Ns, port: u16) {
    for dev in ["s0", "s1"] {
        server.nft(&format!(
            "add counter inet q {dev}_{port}\n\
             add rule inet q in iifname {dev} udp dport {port} counter name {dev}_{port}"
        ));
    }
}

pub(super) fn arrived(server: &Ns, dev: &str, port: u16) -> u64 {
    server.counted(&format!("counter inet q {dev}_{port}"))[0]
}

/// By which devices what `send` sends to a port of the server came, s0 and s1; all of it does.
pub(super) fn come_by(server: &Ns, port: u16, what: &str, send: impl FnOnce(u16)) -> [u64; 2] {
    count_arrivals(server, port);
    send(port);
    let both = || ["s0", "s1"].map(|dev| arrived(server, dev, port));
    wait_until(&format!("{what}: all arrive"), 3 * LEAVE, || {
        both().iter().sum::<u64>() >= PACKETS
    });
    both()
}

/// Asserts that what `send` sends to a port of the server came by `dev` alone.
pub(super) fn all_come_by(server: &Ns, dev: &str, port: u16, what: &str, send: impl FnOnce(u16)) {
    let expected = ["s0", "s1"].map(|d| if d == dev { PACKETS } else { 0 });
    let by = come_by(server, port, what, send);
    assert_eq!(by, expected, "{what}: by s0 and s1");
}

/// Sends to a port of the server from sockets of a namespace, bound to `source`.
pub(super) fn by_sockets(ns: &Ns, source: Ipv4Addr) -> impl Fn(u16) + '_ {
    by_sockets_to(ns, source, SERVER4, 0)
}

/// The same to any address, with a TOS.
pub(super) fn by_sockets_to<'a>(
    ns: &'a Ns,
    source: Ipv4Addr,
    to: &'a str,
    tos: u32,
) -> impl Fn(u16) + 'a {
    let send = move |port: u16| {
        for _ in 0..PACKETS {
            let socket = UdpSocket::bind((source, 0)).unwrap();
            socket2::SockRef::from(&socket).set_tos_v4(tos).unwrap();
            socket.send_to(b"x", (to, port)).unwrap();
            thread::sleep(Duration::from_millis(2));
        }
    };
    move |port| ns.with(|| send(port))
}

pub(super) fn mac(ns: &Ns, dev: &str) -> [u8; 6] {
    let text = ns.mac(dev);
    let mut bytes = text.split(':').map(|b| u8::from_str_radix(b, 16).unwrap());
    [(); 6].map(|()| bytes.next().unwrap())
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
fn raw_sender(dev: &str) -> impl Fn(&[u8]) {
    let (raw, index) = (PacketSocket::sender(), testkit::ifindex(dev));
    move |frame| assert_eq!(raw.send(index, frame), frame.len() as isize)
}

/// Has frames sent to the server, from ports 1000 and up of the guest's address and a device of the client.
fn send_frames(net: &Net, dev: &str, port: u16, mut send: impl FnMut(&[u8])) {
    let (to, from) = (mac(&net.server, "s0"), mac(&net.client, dev));
    for n in 0..PACKETS as u16 {
        send(&frame(to, from, GUEST, (1000 + n, port)));
        thread::sleep(Duration::from_millis(2));
    }
}

/// Sends frames with the device's own source address from a packet socket on u0.
fn by_packet_socket(net: &Net, port: u16) {
    let send = net.client.with(|| raw_sender("u0"));
    send_frames(net, "u0", port, send);
}

/// Sends frames as a virtual machine behind the macvtap device `tap0` of the client does.
fn by_macvtap(net: &Net, port: u16) {
    let read = "mount -t sysfs none /sys && cat /sys/class/net/tap0/macvtap/*/dev";
    let number = stdout(&net.client.output("unshare", &["-m", "sh", "-c", read]));
    let (major, minor) = number.trim().split_once(':').expect("a character device");
    let folder = tempfile::tempdir().unwrap();
    let node = folder.path().join("tap");
    let device = makedev(major.parse().unwrap(), minor.parse().unwrap());
    mknod(&node, SFlag::S_IFCHR, Mode::S_IRUSR | Mode::S_IWUSR, device).unwrap();
    let mut tap = File::options().read(true).write(true).open(&node).unwrap();
    // struct virtio_net_hdr comes first: nothing is offloaded.
    send_frames(net, "tap0", port, |frame| {
        tap.write_all(&[&[0; 10][..], frame].concat()).unwrap();
    });
}

/// The kernel answers a SYN by a cookie when there are too many, and then knows no socket of the connection.
#[test]
fn answers_with_cookies_leave_by_the_device_of_their_listener() {
    let mut net = Net::new();
    net.client.sysctl("net.ipv4.tcp_syncookies", "2");
    let _log = only_u1_is_good(&mut net);
    let (client, server) = (&net.client, &net.server);
    let own: Ipv4Addr = "10.98.0.1".parse().unwrap();
    let control = by_sockets(client, own);
    all_come_by(server, "s1", 9001, "the host's own packets", &control);
    let listener = client.with(|| {
        let listener = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        listener.bind_device(Some(b"u0")).unwrap();
        let address: SocketAddr = (own, 9002).into();
        listener.bind(&address.into()).unwrap();
        listener.listen(PACKETS as i32).unwrap();
        listener
    });
    server.ip(&format!("route replace {own}/32 via 10.30.0.1 dev s0"));
    for dev in ["s0", "s1"] {
        server.nft(&format!(
            "add counter inet q {dev}_ack\n\
             add rule inet q in iifname {dev} tcp flags & (syn | ack) == syn | ack counter name {dev}_ack"
        ));
    }
    // From an address to which the multipath route leads.
    let connect = |_| {
        let stream = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        let from: SocketAddr = (SERVER4.parse::<Ipv4Addr>().unwrap(), 0).into();
        stream.bind(&from.into()).unwrap();
        stream
            .connect(&SocketAddr::from((own, 9002)).into())
            .unwrap();
        stream
    };
    let streams: Vec<Socket> = server.with(|| (0..PACKETS).map(connect).collect());
    let by = ["s0", "s1"].map(|dev| server.counted(&format!("counter inet q {dev}_ack"))[0]);
    assert_eq!(by, [streams.len() as u64, 0]);
    drop(listener);
}

#[test]
fn guests_and_raw_senders_keep_the_uplink_that_they_chose() {
    let mut net = Net::new();
    let _log = only_u1_is_good(&mut net);
    let (client, server) = (&net.client, &net.server);
    let own = by_sockets(client, "10.98.0.1".parse().unwrap());
    all_come_by(server, "s1", 9001, "the host's own packets", &own);

    let before = net.counter("pass_foreign");
    let guest = Ns::new("g");
    client.ip("link add link u0 name m0 type macvlan mode bridge");
    client.ip(&format!("link set m0 netns {}", guest.name));
    guest.bring_up("m0", &[&format!("{GUEST}/24")]);
    guest.ip("route add default via 10.30.0.2");
    let guests = by_sockets(&guest, GUEST);
    all_come_by(server, "s0", 9002, "a macvlan guest", &guests);
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
    let neighbour = format!("10.30.0.2 dev u0 lladdr {}", server.mac("s0"));
    client.ip(&format!("neigh replace {neighbour} nud permanent"));
    client.wire(("p0", &[]), &guest, ("e0", &[&format!("{GUEST}/24")]));
    client.ip("link add b0 type bridge");
    for dev in ["u0", "p0"] {
        client.ip(&format!("link set {dev} master b0"));
    }
    client.bring_up("b0", &[]);
    guest.ip("route add default via 10.30.0.2");
    all_come_by(server, "s0", 9005, "a bridge's other port", guests);
    all_come_by(server, "s1", 9006, "the host's own packets at last", own);
    let told = net.counter("pass_foreign") - before;
    assert!(told >= 4 * PACKETS, "{told} packets told as foreign");
}

/// The address of [`Net::inner`].
const INSIDE: Ipv4Addr = Ipv4Addr::new(10, 50, 0, 2);

/// Waits until what the inner network sends moves to u1.
fn wait_inner_moves(net: &Net, inner: &Ns) {
    wait_until("inner flows move", 3 * LEAVE, || {
        let port = 9100 + net.client.status().uptime_s as u16;
        count_arrivals(&net.server, port);
        by_sockets(inner, INSIDE)(port);
        arrived(&net.server, "s1", port) == PACKETS
    });
}

#[test]
fn forged_sources_do_not_take_translated_flows_off_their_uplink() {
    let mut net = Net::new();
    let inner = net.inner();
    // What port 9500 and up get from NAT is the address of one uplink, on no device of this host.
    let hook = "nat hook postrouting priority 100";
    let rule = "iifname lan udp dport 9500-9600 snat to 192.0.2.77";
    net.client.chain("ip t out", hook, rule);
    // The server knows by which uplink it accepts that address: by the kernel's, u0.
    net.client.ip("route replace 203.0.113.0/24 src 10.98.0.1 \
         nexthop via 10.30.0.2 dev u0 weight 250 nexthop via 10.30.1.2 dev u1 weight 1");
    let _log = only_u1_is_good(&mut net);
    let (client, server) = (&net.client, &net.server);

    // Datagrams with random sources, more than any list of such sources has room for.
    let (to, from) = (mac(client, "lan"), mac(&inner, "e0"));
    inner.with(move || {
        let send = raw_sender("e0");
        for n in 0..6_000u32 {
            let source = Ipv4Addr::from(0x0b00_0000 + n * 7919);
            send(&frame(to, from, source, (1, 9)));
            if n % 20 == 0 {
                thread::sleep(Duration::from_millis(10));
            }
        }
    });
    // What is not translated moves, once its source is known to be of the inner network.
    wait_inner_moves(&net, &inner);
    // What is translated stays where the kernel routed it: nearly all by u0.
    let by = come_by(server, 9500, "translated", by_sockets(&inner, INSIDE));
    assert!(by[0] * 2 > PACKETS, "moved off their uplink: {by:?}");
}

#[test]
fn packets_that_an_ip_rule_selects_keep_its_uplink() {
    let mut net = Net::new();
    let inner = net.inner();
    let _log = only_u1_is_good(&mut net);
    let (client, server) = (&net.client, &net.server);
    client.ip("route add default via 10.30.0.2 dev u0 table 100");
    // Known as movable before it matters.
    wait_inner_moves(&net, &inner);

    // What no socket has sent is root's to the kernel.
    client.ip("rule add priority 50 iif lan uidrange 0-0 lookup 100");
    client.wait_settled();
    let what = "forwarded, and a rule for root";
    all_come_by(server, "s0", 9201, what, by_sockets(&inner, INSIDE));
    client.ip("rule del priority 50");

    // A TOS is compared without the three bits above it.
    client.ip("rule add priority 50 tos 0x10 lookup 100");
    client.wait_settled();
    let own = Ipv4Addr::new(10, 98, 0, 1);
    let with_tos = |tos| by_sockets_to(client, own, SERVER4, tos);
    let kernel = client.ip("route get 203.0.113.1 from 10.98.0.1 tos 0x10");
    assert_has(&kernel, &["dev u0"]);
    all_come_by(server, "s0", 9202, "TOS 0x10", with_tos(0x10));
    all_come_by(server, "s0", 9203, "TOS 0xb0", with_tos(0xb0));
    all_come_by(server, "s1", 9204, "TOS 0x08", with_tos(0x08));
    client.ip("rule del priority 50");
}
