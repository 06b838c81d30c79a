// SPDX-License-Identifier: GPL-2.0-or-later
//! Real sockets over veth with the steering program attached by hand: what moves, what stays, and
//! that nothing is lost, reordered or left behind.

use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::thread::sleep;
use std::time::Duration;

use crate::rig::net::*;
use crate::rig::{ejected, ifindex, ms, only, patient};
use crate::support::arrivals::received;
use crate::support::stream::{send, sink, wait_acknowledged};
use crate::support::tcx::{program_ids_on, programs_on};
use mountain::bpf::{PathMasks as Masks, ProgramPath, Settings, Steer, SteerProgram};
use nix::sys::socket::{setsockopt, sockopt};
use testkit::TestNamespace;

/// Path 0 is left at once.
const EJECTED_0: Masks = ejected(0b01, only(1));

/// Flows from the client to a sink.
fn sources(n: usize, v6: bool, sink: &Sink) -> Vec<Source> {
    (0..n).map(|_| Source::new(client(v6), sink.addr)).collect()
}

/// Ends a flowlet: the margin of 1 ms, and seven ticks of 10 ms that the packet before may have been
/// stamped early.
const FLOWLET: Duration = ms(75);

/// Each source sends a packet every `pause`, `rounds` times.
fn pace(sources: &mut [Source], rounds: usize, pause: Duration) {
    for _ in 0..rounds {
        for s in sources.iter_mut() {
            s.send(100);
        }
        sleep(pause);
    }
}

#[test]
fn udp_moves_without_loss_or_reordering() {
    for_each_family(|net, v6| {
        let sink = Sink::start(&net.server, v6);
        let mut steer = steer_two(&patient());
        let mut sources = sources(16, v6, &sink);
        for member in [0, 1, 0, 1] {
            masks(&mut steer, only(member));
            sleep(FLOWLET);
            pace(&mut sources, 50, ms(3));
        }
        drop(steer);
        let by = all_in_order(&sources, &sink.finish());
        let want: Vec<usize> = (0..200).map(|i| i / 50 % 2).collect();
        for (devs, source) in by.iter().zip(&sources) {
            assert_eq!(*devs, want, "flow {} (IPv6: {v6})", source.port);
        }
    });
}

/// Sends a stream and compares what the receiver got; `during` is called again and again with the connection and
/// the bytes sent so far.
fn stream(host: &TestNamespace, v6: bool, total: u64, mut during: impl FnMut(&TcpStream, u64)) {
    let listener = host.with(move || TcpListener::bind((server(v6), 0)).unwrap());
    let addr = listener.local_addr().unwrap();
    let domain = socket2::Domain::for_address(addr);
    let socket = socket2::Socket::new(domain, socket2::Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::new(client(v6), 0).into()).unwrap();
    socket.connect(&addr.into()).unwrap();
    let conn: TcpStream = socket.into();
    let all = sink(listener.accept().unwrap().0);
    let mut reordering = 0;
    send(&conn, total, |sent| {
        during(&conn, sent);
        reordering = tcp_info(&conn).tcpi_reordering;
    });
    assert_eq!(all.join().unwrap(), total);
    // Segments are sent again now and then on a busy machine, steered or not; but this only grows
    // beyond its initial value when the sender saw one segment overtake another.
    assert_eq!(reordering, 3, "segments were reordered");
}

fn tcp_info(conn: &TcpStream) -> libc::tcp_info {
    // SAFETY: a structure of integers, which the kernel fills in up to the length given.
    unsafe {
        let mut info: libc::tcp_info = std::mem::zeroed();
        let mut len = size_of_val(&info) as libc::socklen_t;
        let (fd, ptr) = (conn.as_raw_fd(), (&raw mut info).cast());
        let ret = libc::getsockopt(fd, libc::SOL_TCP, libc::TCP_INFO, ptr, &mut len);
        assert_eq!(ret, 0);
        info
    }
}

#[test]
fn tcp_moves_at_full_size() {
    for_each_family(|net, v6| {
        let mut steer = steer_two(&patient());
        let count = || net.server.with(|| ["s0", "s1"].map(received));
        const TOTAL: u64 = 96 << 20;
        let (mut part, mut at) = (0, vec![count()]);
        stream(&net.server, v6, TOTAL, |conn, sent| {
            if sent * 4 / TOTAL > part {
                part = sent * 4 / TOTAL;
                wait_acknowledged(conn);
                sleep(FLOWLET);
                at.push(count());
                masks(&mut steer, only(part as u16 % 2));
            }
        });
        let devs: Vec<[(u64, u64); 2]> = at
            .windows(2)
            .map(|w| [0, 1].map(|d| (w[1][d].0 - w[0][d].0, w[1][d].1 - w[0][d].1)))
            .collect();
        assert_eq!(devs.len(), 4);
        for (part, dev) in devs.iter().enumerate() {
            let ((packets, bytes), (_, other)) = (dev[part % 2], dev[1 - part % 2]);
            assert!(bytes > 20 << 20, "part {part}: {dev:?}");
            assert!(other < 1 << 20, "part {part} is on both: {dev:?}");
            // Super-packets cross a veth whole: they were moved whole, too.
            assert!(bytes / packets > 5000, "{part}: in small packets: {dev:?}");
        }
        let flows = steer.flows().dump(0);
        assert!(flows.iter().any(|f| f.moves >= 3), "{flows:?}");
        assert_eq!(steer.stats().unwrap()["pass_mtu"], 0);
    });
}

#[test]
fn device_bound_sockets_stay() {
    for_each_family(|net, v6| {
        let sink = Sink::start(&net.server, v6);
        let mut steer = steer_two(&patient());
        let mut sources = sources(3, v6, &sink);
        for (s, dev) in sources.iter().zip(["u0", "u1"]) {
            setsockopt(&s.socket, sockopt::BindToDevice, &dev.into()).unwrap();
        }
        pace(&mut sources, 10, ms(3));
        sleep(FLOWLET);
        masks(&mut steer, only(1));
        pace(&mut sources, 10, ms(3));
        let by = all_in_order(&sources, &sink.finish());
        assert_eq!(by[0], [0; 20], "bound to u0");
        assert_eq!(by[1], [1; 20], "bound to u1");
        assert_eq!(by[2], [[0; 10], [1; 10]].concat(), "the control moves");
        assert_eq!(steer.stats().unwrap()["pass_bound"], 40);
    });
}

/// Names the device for all packets of a socket, by the socket option IPV6_PKTINFO.
fn name_device(socket: &UdpSocket, dev: &str) {
    // SAFETY: all-zero is a valid address and index.
    let mut info: libc::in6_pktinfo = unsafe { std::mem::zeroed() };
    info.ipi6_ifindex = ifindex(dev);
    let (level, len) = (libc::IPPROTO_IPV6, size_of_val(&info) as libc::socklen_t);
    let (fd, value) = (socket.as_raw_fd(), (&raw const info).cast());
    // SAFETY: the value outlives the call and is as long as told.
    let ret = unsafe { libc::setsockopt(fd, level, libc::IPV6_PKTINFO, value, len) };
    assert_eq!(ret, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn sockets_with_a_device_for_all_packets_stay() {
    with_server(|net| {
        let sink = Sink::start(&net.server, true);
        let mut steer = steer_two(&patient());
        // The kernel keeps to the device where the socket has no source.
        let mut sources = [Some("u0"), Some("u1"), None].map(|dev| {
            let socket = UdpSocket::bind(("::", 0)).unwrap();
            if let Some(dev) = dev {
                name_device(&socket, dev);
            }
            Source {
                port: socket.local_addr().unwrap().port(),
                socket,
                sent: 0,
            }
        });
        let mut pace = || {
            for _ in 0..10 {
                for s in &mut sources {
                    let packet = s.sent.to_le_bytes();
                    s.socket.send_to(&packet, sink.addr).unwrap();
                    s.sent += 1;
                }
                sleep(ms(3));
            }
        };
        pace();
        sleep(FLOWLET);
        masks(&mut steer, only(1));
        pace();
        let by = all_in_order(&sources, &sink.finish());
        assert_eq!(by[0], [0; 20], "u0's");
        assert_eq!(by[1], [1; 20], "u1's");
        assert_eq!(by[2], [[0; 10], [1; 10]].concat(), "the control moves");
        assert_eq!(steer.stats().unwrap()["pass_bound"], 40);
    });
}

/// As after events that were lost, so that nothing has said it.
#[test]
fn a_device_made_again_with_the_same_index_has_the_program() {
    let ns = TestNamespace::new("again");
    ns.with(|| {
        let mut steer = Steer::load(&patient()).unwrap();
        for _ in 0..2 {
            ns.ip("link add again0 index 77 type veth peer name again1");
            steer.attach_to(&[77]).unwrap();
            steer.attach_to(&[77]).unwrap();
            assert_eq!(programs_on("again0"), 1);
            ns.ip("link del again0");
        }
    });
}

/// Two uplinks on one wire lead to one router.
#[test]
fn what_comes_from_a_device_above_is_counted_there_alone() {
    with_server(|net| {
        let sink = Sink::start(&net.server, false);
        let mut steer = steer_two(&patient());
        let counted = |steer: &Steer| [0, 4].map(|id| steer.traffic(id).unwrap().packets);
        let address = &["10.30.0.9/24"];
        let known = "neigh replace 10.30.0.2 lladdr 02:00:00:00:02:00 nud permanent dev";
        for (name, kind) in [("v0", "vlan id 20"), ("m0", "macvlan mode bridge")] {
            let link = format!("link add link u0 name {name} type {kind}");
            if !net.client.try_ip(&link) {
                eprintln!("skipped: this kernel has no {kind}");
                continue;
            }
            net.client.bring_up(name, address);
            net.client.ip(&format!("{known} {name}"));
            let route = format!("203.0.113.0/24 via 10.30.0.2 dev {name} metric 500");
            net.client.ip(&format!("route append {route}"));
            let above = ProgramPath {
                ifindex: ifindex(name),
                ..path(0)
            };
            steer.set_path(4, &above).unwrap();
            let devices = ["u0", "u1", name].map(ifindex);
            steer.attach_to(&devices).unwrap();
            for (dev, want) in [("u0", [10, 0]), (name, [0, 10])] {
                let before = counted(&steer);
                let source = Source::new(client(false), sink.addr);
                setsockopt(&source.socket, sockopt::BindToDevice, &dev.into()).unwrap();
                pace(&mut [source], 10, ms(3));
                let after = counted(&steer);
                assert_eq!(
                    [0, 1].map(|i| after[i] - before[i]),
                    want,
                    "{kind}: by {dev}"
                );
            }
        }
        // A guest's device may well have the index of one of ours.
        steer.attach_to(&["u0", "u1"].map(ifindex)).unwrap();
        let guest = TestNamespace::new("guest");
        net.client.ip(&format!("link set m0 netns {}", guest.name));
        guest.bring_up("m0", address);
        guest.ip(&format!("{known} m0"));
        guest.ip("route add default via 10.30.0.2");
        let before = counted(&steer);
        let mut guests = guest.with(|| [Source::new("10.30.0.9".parse().unwrap(), sink.addr)]);
        pace(&mut guests, 10, ms(3));
        let after = counted(&steer);
        assert_eq!([0, 1].map(|i| after[i] - before[i]), [10, 0], "a guest's");
    });
}

#[test]
fn dropping_it_leaves_nothing() {
    with_server(|net| {
        let sink = Sink::start(&net.server, false);
        let mut sources = sources(8, false, &sink);
        pace(&mut sources, 5, ms(2));
        let mut steer = steer_two(&patient());
        assert_eq!(["u0", "u1"].map(programs_on), [1, 1]);
        masks(&mut steer, EJECTED_0);
        pace(&mut sources, 5, ms(2));
        steer.attach_to(&[ifindex("u1")]).unwrap();
        assert_eq!(["u0", "u1"].map(programs_on), [0, 1]);
        // A device that comes later has the program that runs.
        steer.run(SteerProgram::ArgmaxLoad).unwrap();
        steer.attach_to(&[ifindex("u0"), ifindex("u1")]).unwrap();
        assert_eq!(["u0", "u1"].map(programs_on), [1, 1]);
        assert_eq!(program_ids_on("u1"), program_ids_on("u0"));
        steer.run(SteerProgram::Steer).unwrap();
        pace(&mut sources, 5, ms(2));
        drop(steer);
        assert_eq!(["u0", "u1"].map(programs_on), [0, 0]);
        sleep(ms(5));
        pace(&mut sources, 5, ms(2));
        let by = all_in_order(&sources, &sink.finish());
        for devs in by {
            // The kernel's own choice for a flow is one, before as after.
            assert_eq!(devs[..5], devs[15..], "not as it was before");
            assert_eq!(devs[10..15], [1; 5]);
        }
    });
}

#[test]
fn forwarded_traffic_moves() {
    for_each_family(|net, v6| {
        let inside = TestNamespace::new("inside");
        let nets = ["10.2.0", "fd00:2"];
        net.client.join(("lan", 1), &inside, ("eth0", 2), nets);
        net.client.sysctl("net/ipv4/ip_forward", "1");
        net.client.sysctl("net/ipv6/conf/all/forwarding", "1");
        inside.ip("route add default via 10.2.0.1");
        inside.ip("-6 route add default via fd00:2::1");
        let from = if v6 { "fd00:2::2" } else { "10.2.0.2" };
        let sink = Sink::start(&net.server, v6);
        let mut steer = steer_two(&patient());
        let source = |_| Source::new(from.parse().unwrap(), sink.addr);
        let mut sources: Vec<Source> = inside.with(|| (0..16).map(source).collect());
        for member in [0, 1, 0] {
            masks(&mut steer, only(member));
            sleep(FLOWLET);
            pace(&mut sources, 20, ms(3));
        }
        let by = all_in_order(&sources, &sink.finish());
        let want: Vec<usize> = (0..60).map(|i| i / 20 % 2).collect();
        for devs in by {
            assert_eq!(devs, want, "IPv6: {v6}");
        }
    });
}

#[test]
fn port_unreachable_travels_with_the_flow() {
    for_each_family(|net, v6| {
        let mut steer = steer_two(&Settings {
            margin_us: 10_000_000,
            ..patient()
        });
        for member in [0, 1, 0, 1] {
            masks(&mut steer, only(member));
            let bind = || UdpSocket::bind((server(v6), 0)).unwrap();
            let peer = net.server.with(bind);
            let mut source = Source::new(client(v6), peer.local_addr().unwrap());
            source.send(10);
            peer.set_read_timeout(Some(Duration::from_secs(30)))
                .unwrap();
            let (_, from) = peer.recv_from(&mut [0; 16]).unwrap();
            peer.connect(from).unwrap();
            drop(source);
            // New flows would go by the other path now; this one had no gap.
            masks(&mut steer, only(1 - member));
            let count = || net.server.with(|| ["s0", "s1"].map(|d| received(d).0));
            let before = count();
            for _ in 0..5 {
                peer.send(b"anyone?").unwrap();
                let answer = peer.recv(&mut [0; 16]).unwrap_err();
                assert_eq!(answer.kind(), std::io::ErrorKind::ConnectionRefused);
            }
            let after = count();
            let came = [0, 1].map(|d| after[d] - before[d]);
            let (right, wrong) = (came[member as usize], came[1 - member as usize]);
            let is_right = right >= 5 && wrong < 5;
            assert!(is_right, "IPv6 {v6}, member {member}: {came:?}");
        }
    });
}
