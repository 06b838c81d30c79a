// SPDX-License-Identifier: GPL-2.0-or-later
//! Probes over veth pairs between network namespaces. Needs root.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use mountain::measure::probe::{Answer, PathStats, ProbePath, Prober};
use mountain::measure::wire::{self, ProbeId, Reflected};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use crate::probe_net::*;
use crate::support::sums::checksum;

/// A busy machine, too, gets an answer sooner.
const PATIENCE: Duration = Duration::from_secs(30);

/// A UDP or raw ICMP socket of the server at one of its addresses.
fn bound(kind: Type, address: &str, device: Option<&str>) -> Socket {
    let address: SocketAddr = address.parse().unwrap();
    let proto = (kind == Type::RAW).then_some(Protocol::ICMPV4);
    let socket = Socket::new(Domain::IPV4, kind, proto).unwrap();
    socket.bind_device(device.map(str::as_bytes)).unwrap();
    socket.bind(&address.into()).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

/// The next packet that a socket gets, and from whom.
fn received(socket: &Socket) -> (Vec<u8>, SockAddr) {
    let mut buffer = Vec::with_capacity(2000);
    let (len, from) = socket.recv_from(buffer.spare_capacity_mut()).unwrap();
    // SAFETY: recv_from has filled that many bytes.
    unsafe { buffer.set_len(len) };
    (buffer, from)
}

#[test]
fn icmp_rtt_over_veth_is_short_for_both_families_and_link_local() {
    let net = Net::probed();
    net.client.within(async || {
        let paths = [
            icmp_from("10.30.0.1", "u0", "10.30.0.2"),
            icmp_from("fd30::1", "u0", "fd30::2"),
            icmp("u0", "fe80::d"),
            icmp_from("fe80::c", "u1", "fe80::d"),
        ];
        let mut prober = Prober::new(&paths).unwrap();
        for n in 0..paths.len() {
            let answers = exchange(&mut prober, n, 20).await;
            check_quick(&answers);
            assert_eq!(answers[0].hop_limit, Some(64));
            let plain = |a: &Answer| a.forward_us.is_none() && a.reflected.is_none();
            assert!(answers.iter().all(plain), "{answers:?}");
            // Every answer is one of a single probe, also where two paths share a target.
            let stats = prober.stats(n);
            assert_eq!((stats.sent, stats.answered), (20, 20));
        }
    });
}

#[test]
fn a_receiver_that_sleeps_does_not_inflate_the_rtt() {
    let net = Net::probed();
    let reflector = net.reflector("10.30.0.2:0", Duration::ZERO);
    let address = reflector.address.to_string();
    net.client.within(async move || {
        let mut prober = Prober::new(&[icmp("u0", "10.30.0.2"), udp("u0", &address)]).unwrap();
        for path in [0, 1] {
            exchange(&mut prober, path, 3).await;
            let mut rtt = Vec::new();
            for seq in 0..5 {
                prober.send(path, seq).unwrap();
                std::thread::sleep(Duration::from_millis(50));
                let answer = answer_within(&mut prober, PATIENCE).await.unwrap();
                assert!(answer.user_rtt_us >= 50_000, "{answer:?}");
                rtt.push(answer.rtt_us);
            }
            let rtt = median(rtt);
            // Of 50,000 and more that the process saw.
            assert!(rtt < 25_000, "path {path}: {rtt} µs");
        }
    });
}

/// Sends one probe; `forge` and then `answer` do what a responder does with it. Of the packets of the latter the first is
/// right, and others are replays.
async fn believes_one_answer<T>(
    path: ProbePath,
    forge: impl FnOnce() -> T,
    answer: impl FnOnce(T),
) -> PathStats {
    const NOTHING: Duration = Duration::from_millis(200);
    let mut prober = Prober::new(&[path]).unwrap();
    prober.send(0, 5).unwrap();
    let known = forge();
    let early = answer_within(&mut prober, NOTHING).await;
    assert_eq!(early, None, "a forgery was believed: {:?}", prober.stats(0));
    answer(known);
    let first = answer_within(&mut prober, PATIENCE).await;
    assert_eq!(first.map(|a| a.seq), Some(5));
    let again = answer_within(&mut prober, NOTHING).await;
    assert_eq!(again, None, "a replay was believed");
    prober.stats(0).clone()
}

/// What a hostile responder does with each request.
#[test]
fn forged_replayed_and_foreign_udp_replies_are_ignored() {
    let net = Net::probed();
    net.server.ip("addr add 10.30.0.3/24 dev s0");
    let at = |address: &str, device| {
        let bound = || bound(Type::DGRAM, address, device);
        net.server.with(bound)
    };
    let socket = at("10.30.0.2:0", None);
    let address = socket.local_addr().unwrap().as_socket().unwrap();
    let forge = || {
        let (request, client) = received(&socket);
        let id = wire::parse_request(&request).unwrap();
        let reflected = Reflected {
            received_ns: 1,
            sent_ns: 2,
            count: 1,
            hop_limit: None,
            tos: 0,
        };
        let reply = |nonce, index| {
            let mut packet = [0; wire::PROBE_LEN];
            wire::write_request(&mut packet, ProbeId { nonce, index }, 0);
            wire::make_reply(&mut packet, reflected, 0);
            packet
        };
        // Forgeries first: none of them may use up the probe.
        let ProbeId { nonce, index } = id;
        let right = reply(nonce, index);
        for forged in [
            &reply(nonce ^ 1, index)[..],
            &reply(nonce, index + 1),
            &reply(nonce, u64::MAX),
            &reply(0, 0),
            &request,
            &right[..wire::PROBE_LEN - 1],
            &[],
            &[0xff; 1400],
        ] {
            socket.send_to(forged, &client).unwrap();
        }
        drop(socket);
        // From another port and address, and from the right ones by the other link.
        let port = address.port();
        for (source, device) in [
            ("10.30.0.2:0".to_owned(), None),
            (format!("10.30.0.3:{port}"), None),
            (address.to_string(), Some("s1")),
        ] {
            at(&source, device).send_to(&right, &client).unwrap();
        }
        (right, client)
    };
    // Now the true one, three times.
    let answer = |(right, client): ([u8; wire::PROBE_LEN], SockAddr)| {
        let socket = at(&address.to_string(), None);
        for _ in 0..3 {
            socket.send_to(&right, &client).unwrap();
        }
    };
    // The forged reply over s1 must reach the client's network stack at all.
    let mac = net.client.mac("u1");
    let neighbour = format!("10.30.0.1 lladdr {mac} dev s1");
    net.server.ip(&format!("neigh replace {neighbour}"));
    net.client.within(async move || {
        let path = udp("u0", &address.to_string());
        let stats = believes_one_answer(path, forge, answer).await;
        // Eight forgeries from the right address and port, two replays.
        assert_eq!((stats.answered, stats.ignored), (1, 8 + 2), "{stats:?}");
    });
}

/// Answers echo requests itself, in place of the kernel: first wrongly in every way, then right
/// and twice.
#[test]
fn forged_replayed_and_foreign_echo_replies_are_ignored() {
    let net = Net::probed();
    net.server.ip("addr add 10.30.0.3/24 dev s0");
    net.server.sysctl("net.ipv4.icmp_echo_ignore_all", "1");
    let raw = |address| net.server.with(|| bound(Type::RAW, address, None));
    let (socket, foreign) = (raw("10.30.0.2:0"), raw("10.30.0.3:0"));
    let forge = || {
        let (request, client) = received(&socket);
        // The request with a byte changed, as a reply with a right checksum.
        let reply = |at: usize, flip: u8| {
            let mut packet = request[20..].to_vec();
            packet[0] = 0;
            packet[at] ^= flip;
            packet[2..4].fill(0);
            let sum = checksum(&packet);
            packet[2..4].copy_from_slice(&sum.to_be_bytes());
            packet
        };
        for at in [5, 7, 15, 23, 1] {
            socket.send_to(&reply(at, 1), &client).unwrap();
        }
        let right = reply(0, 0);
        let mut bad_sum = right.clone();
        bad_sum[2] ^= 0x55;
        socket.send_to(&bad_sum, &client).unwrap();
        socket.send_to(&right[..20], &client).unwrap();
        foreign.send_to(&right, &client).unwrap();
        (right, client)
    };
    let answer = |(right, client): (Vec<u8>, SockAddr)| {
        for _ in 0..2 {
            socket.send_to(&right, &client).unwrap();
        }
    };
    net.client.within(async move || {
        let path = icmp("u0", "10.30.0.2");
        let stats = believes_one_answer(path, forge, answer).await;
        assert_eq!((stats.answered, stats.ignored), (1, 7), "{stats:?}");
    });
}

/// Whoever sends packets as fast as they are read keeps the daemon's loop from nothing else.
#[test]
fn packets_that_answer_nothing_do_not_come_before_all_else() {
    // Fits into the socket, and is more than one turn takes.
    const FLOOD: u64 = 150;
    let net = Net::probed();
    let socket = net.server.with(|| bound(Type::DGRAM, "10.30.0.2:0", None));
    let address = socket.local_addr().unwrap().as_socket().unwrap();
    net.client.within(async move || {
        let mut prober = Prober::new(&[udp("u0", &address.to_string())]).unwrap();
        prober.send(0, 5).unwrap();
        let (mut packet, client) = received(&socket);
        for _ in 0..FLOOD {
            socket.send_to(&[0; 8], &client).unwrap();
        }
        wire::make_reply(&mut packet, Reflected::default(), 0);
        socket.send_to(&packet, &client).unwrap();
        // All are there, and the runtime knows.
        tokio::time::sleep(Duration::from_millis(200)).await;
        let (sender, mut other) = tokio::sync::mpsc::channel(1);
        sender.send(()).await.unwrap();
        tokio::select! {
            biased;
            answer = prober.recv() => panic!("before all else: {answer:?}"),
            event = other.recv() => assert_eq!(event, Some(())),
        }
        let ignored = prober.stats(0).ignored;
        assert!((1..FLOOD / 2).contains(&ignored), "{ignored} at once");
        let answer = answer_within(&mut prober, PATIENCE).await;
        assert_eq!(answer.map(|answer| answer.seq), Some(5));
        assert_eq!(prober.stats(0).ignored, FLOOD);
    });
}

#[test]
fn a_lost_probe_has_no_answer_and_all_others_have_theirs() {
    let net = Net::probed();
    let net = &net;
    net.client.within(async move || {
        let mut prober = Prober::new(&[icmp("u0", "10.30.0.2")]).unwrap();
        check_quick(&exchange(&mut prober, 0, 5).await);
        net.server.sysctl("net.ipv4.icmp_echo_ignore_all", "1");
        prober.send(0, 77).unwrap();
        let lost = answer_within(&mut prober, Duration::from_millis(300)).await;
        assert_eq!(lost, None);
        net.server.sysctl("net.ipv4.icmp_echo_ignore_all", "0");
        check_quick(&exchange(&mut prober, 0, 5).await);
        assert_eq!(prober.stats(0).sent, 11);
        assert_eq!(prober.stats(0).answered, 10);
        assert_eq!(prober.stats(9), PathStats::default(), "there is none");
        // Nor is one lost by dropping a receive that waits.
        let mut got = Vec::new();
        for seq in 0..50 {
            prober.send(0, seq).unwrap();
            // A time limit of the order of the RTT: sometimes it strikes first.
            got.extend(answer_within(&mut prober, Duration::from_micros(50)).await);
        }
        while got.len() < 50 {
            let next = answer_within(&mut prober, PATIENCE).await;
            got.push(next.unwrap_or_else(|| panic!("lost after {}", got.len())));
        }
        let seqs: Vec<_> = got.iter().map(|a| a.seq).collect();
        assert_eq!(seqs, (0..50).collect::<Vec<_>>());
    });
}

#[test]
fn a_device_that_is_missing_or_deleted_is_an_error_and_its_return_is_used() {
    let net = Net::probed();
    let net = &net;
    net.client.within(async move || {
        let paths = [icmp("nosuch", "10.30.0.2"), icmp("u0", "10.30.0.2")];
        let mut prober = Prober::new(&paths).unwrap();
        let error = prober.send(0, 0).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENODEV), "{error}");
        // No reason to give up the others.
        exchange(&mut prober, 1, 3).await;
        let error = prober.send(2, 0).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        let mixed = icmp_from("10.30.0.1", "u0", "fe80::d");
        let error = prober.set_path(1, mixed).unwrap_err().to_string();
        let says = error.contains("u0") && error.contains("families");
        assert!(says, "{error}");
        drop(prober);

        let paths = [
            icmp("u0", "10.30.0.2"),
            udp("u0", "10.30.0.2:9"),
            icmp("u0", "fe80::d"),
        ];
        let mut prober = Prober::new(&paths).unwrap();
        exchange(&mut prober, 0, 3).await;
        exchange(&mut prober, 2, 3).await;
        net.client.ip("link set u0 down");
        for path in 0..3 {
            prober.send(path, 1).expect_err("a device that is down");
        }
        net.client.ip("link del u0");
        for path in 0..3 {
            for seq in 0..3 {
                let error = prober.send(path, seq).expect_err("a device that is gone");
                assert!(error.raw_os_error().is_some(), "{error}");
            }
            assert!(prober.stats(path).last_error.is_some());
        }
        let late = answer_within(&mut prober, Duration::from_millis(100)).await;
        assert_eq!(late, None);
        // Another index this time.
        net.client.ip("link add type veth");
        net.join(0);
        net.link_local(0);
        check_quick(&exchange(&mut prober, 0, 5).await);
        check_quick(&exchange(&mut prober, 2, 5).await);
    });
}

#[test]
fn an_unreachable_target_is_said_and_sending_goes_on() {
    let net = Net::probed();
    // The server is also a router without a route.
    net.server.sysctl("net.ipv4.ip_forward", "1");
    net.client.ip("route add 198.51.100.0/24 via 10.30.0.2");
    net.client.within(async || {
        // A closed port, no route behind the gateway, a neighbour that does not exist, and one
        // that answers.
        let paths = [
            udp("u0", "10.30.0.2:9"),
            icmp("u0", "198.51.100.1"),
            icmp("u0", "10.30.0.99"),
            icmp("u0", "10.30.0.2"),
        ];
        let mut prober = Prober::new(&paths).unwrap();
        for seq in 0..10 {
            for path in 0..paths.len() {
                prober.send(path, seq).unwrap();
            }
            let answer = answer_within(&mut prober, PATIENCE).await;
            assert_eq!(answer.map(|a| (a.path, a.seq)), Some((3, seq)));
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        for (path, what) in [(0, "refused"), (1, "unreachable")] {
            let stats = prober.stats(path);
            let text = stats.last_error.as_deref().unwrap();
            assert!(text.contains("10.30.0.2") && text.contains(what), "{text}");
        }
        for path in 0..3 {
            let stats = prober.stats(path);
            assert_eq!((stats.sent, stats.answered), (10, 0));
        }
        assert_eq!(prober.stats(3).last_error, None);
    });
}

#[test]
fn the_hosts_own_queue_is_told_apart_and_a_full_one_breaks_nothing() {
    let net = Net::probed();
    let tbf = "tbf rate 1mbit burst 2000 limit 20000";
    net.client.run(&format!("tc qdisc add dev u0 root {tbf}"));
    let reflector = net.reflector("10.30.0.2:0", Duration::ZERO);
    let address = reflector.address.to_string();
    net.client.within(async move || {
        let mut prober = Prober::new(&[icmp("u0", "10.30.0.2"), udp("u0", &address)]).unwrap();
        let filler = UdpSocket::bind("10.30.0.1:0").unwrap();
        for path in [0, 1] {
            check_quick(&exchange(&mut prober, path, 5).await);
            // 10 kB at 1 Mbit/s: 80 ms of queue, less what drains before the probe is sent.
            let start = Instant::now();
            for _ in 0..7 {
                filler.send_to(&[0; 1400], "10.30.0.2:9").unwrap();
            }
            prober.send(path, 1).unwrap();
            let drained_us = start.elapsed().as_micros() as u32;
            let answer = answer_within(&mut prober, PATIENCE).await.unwrap();
            let queue_us = answer.queue_us.unwrap();
            assert!(queue_us + drained_us >= 40_000, "{answer:?} {drained_us}");
            assert!(queue_us < 1_000_000, "{answer:?}");
            assert!(answer.rtt_us < 20_000, "{answer:?}");
            assert!(answer.delay_us >= queue_us, "{answer:?}");

            // Full: the send fails, after it has used up a packet number or not.
            for _ in 0..30 {
                let _ = filler.send_to(&[0; 1400], "10.30.0.2:9");
            }
            for _ in 0..40 {
                let _ = filler.send_to(&[0; 10], "10.30.0.2:9");
            }
            let error = (0..30).find_map(|seq| prober.send(path, seq).err());
            assert_eq!(error.expect("no room").raw_os_error(), Some(libc::ENOBUFS));
            let quiet = Duration::from_millis(300);
            while answer_within(&mut prober, quiet).await.is_some() {}
            // The right stamps again: a wrong one would show as RTT or queue of other probes.
            let answers = exchange(&mut prober, path, 8).await;
            check_quick(&answers);
            let queue = median(answers.iter().map(|a| a.queue_us.unwrap()).collect());
            assert!(queue < 10_000, "{answers:?}");
        }
    });
}

#[test]
fn eight_paths_at_twenty_probes_a_second_cost_little_cpu() {
    let net = Net::probed();
    let reflector = net.reflector("0.0.0.0:0", Duration::ZERO);
    let address = format!("10.30.0.2:{}", reflector.address.port());
    let share = net.client.within(async move || {
        let two = [icmp("u0", "10.30.0.2"), udp("u0", &address)];
        let paths: Vec<_> = (0..8).map(|n| two[n % 2].clone()).collect();
        let mut prober = Prober::new(&paths).unwrap();
        let mut tick = tokio::time::interval(Duration::from_millis(50));
        let (start, mut sent, mut answered) = (Instant::now(), 0u64, 0u64);
        let cpu_before = thread_cpu();
        while start.elapsed() < Duration::from_secs(3) {
            tokio::select! {
                _ = tick.tick() => for path in 0..8 {
                    prober.send(path, sent).unwrap();
                    sent += 1;
                },
                _ = prober.recv() => answered += 1,
            }
        }
        let (cpu, took) = (thread_cpu() - cpu_before, start.elapsed());
        // Those of the last ticks.
        while answered < sent {
            let last = answer_within(&mut prober, PATIENCE).await;
            assert!(last.is_some(), "{answered} of {sent}");
            answered += 1;
        }
        // Answers to the three siblings with the same target are filtered out in the kernel; by
        // chance, two in 65,536, two paths may share an identifier.
        let stats = prober.stats(0);
        assert!(stats.ignored <= stats.answered, "{stats:?}");
        cpu.as_secs_f64() / took.as_secs_f64()
    });
    println!("{:.2}% of a CPU", share * 100.0);
    assert!(share < 0.05, "{share}");
}

fn thread_cpu() -> Duration {
    let time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap();
    time.into()
}

#[test]
fn without_the_capability_the_error_names_it() {
    let net = Net::probed();
    let error = net.client.within(async || {
        // The bare system call, so that only this thread loses its privileges.
        // SAFETY: changes credentials only.
        let rc = unsafe { libc::syscall(libc::SYS_setresuid, -1, 65534, -1) };
        assert_eq!(rc, 0);
        Prober::new(&[icmp("u0", "10.30.0.2")]).err()
    });
    let text = error.expect("no raw sockets for nobody").to_string();
    assert!(text.contains("CAP_NET_RAW"), "{text}");
}
