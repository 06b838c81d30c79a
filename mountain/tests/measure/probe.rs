// SPDX-License-Identifier: GPL-2.0-or-later
//! Probes over veth pairs between network namespaces. Needs root.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::process::Command;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use mountain::measure::probe::{PathStats, ProbePath, Prober, Target};
use mountain::measure::wire::{self, ProbeId, Reflected};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use crate::probe_net::*;

#[test]
fn icmp_rtt_over_veth_is_short_for_both_families_and_link_local() {
    let net = Net::new();
    net.client(|| async {
        let paths = [
            path(
                "c0",
                Some("192.0.2.1"),
                Target::Icmp("192.0.2.2".parse().unwrap()),
            ),
            path(
                "c0",
                Some("2001:db8::c"),
                Target::Icmp("2001:db8::d".parse().unwrap()),
            ),
            icmp("c0", "fe80::d"),
            path(
                "c1",
                Some("fe80::c"),
                Target::Icmp("fe80::d".parse().unwrap()),
            ),
        ];
        let mut prober = Prober::new(&paths).unwrap();
        for n in 0..paths.len() {
            let answers = exchange(&mut prober, n, 20).await;
            check_quick(&answers);
            assert_eq!(answers[0].hop_limit, Some(64));
            assert!(answers
                .iter()
                .all(|a| a.forward_us.is_none() && a.reflected.is_none()));
            // Every answer is one of a single probe, also where two paths share a target.
            let stats = prober.stats(n);
            assert_eq!((stats.sent, stats.answered, stats.duplicates), (20, 20, 0));
        }
    });
}

#[test]
fn a_receiver_that_sleeps_does_not_inflate_the_rtt() {
    let net = Net::new();
    let reflector = net.reflector("192.0.2.2:0", Duration::ZERO);
    let address = reflector.address.to_string();
    net.client(move || async move {
        let mut prober = Prober::new(&[icmp("c0", "192.0.2.2"), udp("c0", &address)]).unwrap();
        for path in [0, 1] {
            exchange(&mut prober, path, 3).await;
            let mut rtt = Vec::new();
            for seq in 0..5 {
                prober.send(path, seq).unwrap();
                std::thread::sleep(Duration::from_millis(50));
                let answer = answer_within(&mut prober, Duration::from_secs(1))
                    .await
                    .unwrap();
                assert!(answer.user_rtt_us >= 50_000, "{answer:?}");
                rtt.push(answer.rtt_us);
            }
            let rtt = median(rtt);
            // Of 50,000 and more that the process saw.
            assert!(rtt < 25_000, "path {path}: {rtt} µs");
        }
    });
}

/// Two threads that take turns: what one has sent has arrived when the other goes on.
struct Turns(mpsc::Sender<()>, mpsc::Receiver<()>);

impl Turns {
    fn new() -> (Self, Self) {
        let ((there, from), (back, to)) = (mpsc::channel(), mpsc::channel());
        (Self(there, to), Self(back, from))
    }

    /// The other one's turn.
    fn pass(&self) {
        self.0.send(()).expect("the other one still runs");
    }

    /// Waits for this one's turn.
    fn wait(&self) {
        let limit = Duration::from_secs(10);
        self.1.recv_timeout(limit).expect("the other one goes on");
    }
}

/// Sends one probe to a responder that first forges, then answers, then replays.
async fn believes_one_answer(path: ProbePath, turn: Turns) -> PathStats {
    const NOTHING: Duration = Duration::from_millis(200);
    let mut prober = Prober::new(&[path]).unwrap();
    prober.send(0, 5).unwrap();
    turn.wait();
    let early = answer_within(&mut prober, NOTHING).await;
    assert_eq!(early, None, "a forgery was believed: {:?}", prober.stats(0));
    turn.pass();
    let answer = answer_within(&mut prober, Duration::from_secs(5)).await;
    assert_eq!(answer.map(|a| a.seq), Some(5));
    turn.wait();
    let again = answer_within(&mut prober, NOTHING).await;
    turn.pass();
    assert_eq!(again, None, "a replay was believed");
    prober.stats(0).clone()
}

/// What a hostile responder does with each request.
#[test]
fn forged_replayed_and_foreign_udp_replies_are_ignored() {
    let net = Net::new();
    net.server.ip("addr add 192.0.2.3/25 dev s0");
    let (ready, wait) = mpsc::channel();
    let (server, client) = Turns::new();
    let thread = net.server.spawn(move || {
        let turn = server;
        let socket = UdpSocket::bind("192.0.2.2:0").unwrap();
        let other_port = UdpSocket::bind("192.0.2.2:0").unwrap();
        let port = socket.local_addr().unwrap().port();
        let other_address = UdpSocket::bind(("192.0.2.3", port)).unwrap();
        // Same address and port as the target, but leaving by the other link.
        let other_device = Socket::new(Domain::IPV4, Type::DGRAM, None).unwrap();
        socket
            .set_read_timeout(Some(Duration::from_secs(3)))
            .unwrap();
        ready.send(socket.local_addr().unwrap()).unwrap();
        let mut buffer = [0; 2000];
        let (len, client) = socket.recv_from(&mut buffer).unwrap();
        let id = wire::parse_request(&buffer[..len]).unwrap();
        let reflected = Reflected {
            received_ns: 1,
            sent_ns: 2,
            count: 1,
            hop_limit: None,
            tos: 0,
        };
        let reply = |id: ProbeId| {
            let mut packet = [0; wire::PROBE_LEN];
            wire::write_request(&mut packet, id, 0);
            wire::make_reply(&mut packet, reflected, 0);
            packet
        };
        // Forgeries first: none of them may use up the probe.
        let ProbeId { nonce, index } = id;
        for forged in [
            ProbeId {
                nonce: nonce ^ 1,
                index,
            },
            ProbeId {
                nonce,
                index: index + 1,
            },
            ProbeId {
                nonce,
                index: u64::MAX,
            },
            ProbeId { nonce: 0, index: 0 },
        ] {
            socket.send_to(&reply(forged), client).unwrap();
        }
        socket.send_to(&buffer[..len], client).unwrap(); // the request itself
        socket
            .send_to(&reply(id)[..wire::PROBE_LEN - 1], client)
            .unwrap();
        socket.send_to(&[], client).unwrap();
        socket.send_to(&[0xff; 1400], client).unwrap();
        other_port.send_to(&reply(id), client).unwrap();
        other_address.send_to(&reply(id), client).unwrap();
        drop(socket);
        other_device.bind_device(Some(b"s1")).unwrap();
        other_device
            .bind(&SockAddr::from(SocketAddr::from(([192, 0, 2, 2], port))))
            .unwrap();
        other_device.send_to(&reply(id), &client.into()).unwrap();
        drop(other_device);
        turn.pass();
        turn.wait();
        let socket = UdpSocket::bind(("192.0.2.2", port)).unwrap();
        // Now the true one, three times.
        for _ in 0..3 {
            socket.send_to(&reply(id), client).unwrap();
        }
        turn.pass();
        turn.wait();
    });
    let address: SocketAddr = wait.recv().unwrap();
    // The forged reply over s1 must reach the client's network stack at all.
    net.server.ip(&format!(
        "neigh replace 192.0.2.1 lladdr {} dev s1",
        mac(&net, "c1")
    ));
    net.client(move || async move {
        let stats = believes_one_answer(udp("c0", &address.to_string()), client).await;
        assert_eq!((stats.answered, stats.duplicates), (1, 2), "{stats:?}");
        // Eight forgeries from the right address and port, two replays.
        assert_eq!(stats.ignored, 8 + 2, "{stats:?}");
    });
    finish(thread);
}

fn mac(net: &Net, dev: &str) -> String {
    let out = Command::new("ip")
        .args(["-n", &net.client.name, "-br", "link", "show", dev])
        .output();
    let text = String::from_utf8(out.unwrap().stdout).unwrap();
    text.split_whitespace().nth(2).unwrap().into()
}

/// Answers echo requests itself, in place of the kernel: first wrongly in every way, then right
/// and twice.
#[test]
fn forged_replayed_and_foreign_echo_replies_are_ignored() {
    let net = Net::new();
    net.server.ip("addr add 192.0.2.3/25 dev s0");
    net.server.sysctl("net.ipv4.icmp_echo_ignore_all", "1");
    let (ready, wait) = mpsc::channel();
    let (server, client) = Turns::new();
    let thread = net.server.spawn(move || {
        let turn = server;
        let raw = |source: &str| {
            let socket = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::ICMPV4)).unwrap();
            let source: IpAddr = source.parse().unwrap();
            socket
                .bind(&SockAddr::from(SocketAddr::new(source, 0)))
                .unwrap();
            socket
        };
        let (socket, foreign) = (raw("192.0.2.2"), raw("192.0.2.3"));
        socket
            .set_read_timeout(Some(Duration::from_secs(3)))
            .unwrap();
        ready.send(()).unwrap();
        let mut buffer = [std::mem::MaybeUninit::uninit(); 2000];
        let (len, _) = socket.recv_from(&mut buffer).unwrap();
        // SAFETY: recv_from has filled that many bytes.
        let request: Vec<u8> = buffer[20..len]
            .iter()
            .map(|b| unsafe { b.assume_init() })
            .collect();
        let client = SockAddr::from(SocketAddr::from((Ipv4Addr::new(192, 0, 2, 1), 0)));
        // The request with bytes changed, as a reply with a right checksum.
        let reply = |change: &[(usize, u8)]| {
            let mut packet = request.clone();
            packet[0] = 0;
            for &(at, flip) in change {
                packet[at] ^= flip;
            }
            packet[2..4].fill(0);
            let sum = packet.chunks(2).fold(0u32, |sum, pair| {
                sum + u32::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)]))
            });
            let sum = (sum & 0xffff) + (sum >> 16);
            let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
            packet[2..4].copy_from_slice(&sum.to_be_bytes());
            packet
        };
        for change in [(5, 1), (7, 1), (15, 1), (23, 1), (1, 1)] {
            socket.send_to(&reply(&[change]), &client).unwrap();
        }
        let mut bad_sum = reply(&[]);
        bad_sum[2] ^= 0x55;
        socket.send_to(&bad_sum, &client).unwrap();
        socket.send_to(&reply(&[])[..20], &client).unwrap();
        foreign.send_to(&reply(&[]), &client).unwrap();
        turn.pass();
        turn.wait();
        for _ in 0..2 {
            socket.send_to(&reply(&[]), &client).unwrap();
        }
        turn.pass();
        turn.wait();
    });
    wait.recv().unwrap();
    net.client(move || async move {
        let stats = believes_one_answer(icmp("c0", "192.0.2.2"), client).await;
        assert_eq!(
            (stats.answered, stats.duplicates, stats.ignored),
            (1, 1, 7),
            "{stats:?}"
        );
    });
    finish(thread);
}

#[test]
fn a_lost_probe_has_no_answer_and_the_next_one_is_right() {
    let net = Net::new();
    let net = &net;
    net.client(move || async move {
        let mut prober = Prober::new(&[icmp("c0", "192.0.2.2")]).unwrap();
        check_quick(&exchange(&mut prober, 0, 5).await);
        net.server.sysctl("net.ipv4.icmp_echo_ignore_all", "1");
        prober.send(0, 77).unwrap();
        assert_eq!(
            answer_within(&mut prober, Duration::from_millis(300)).await,
            None
        );
        net.server.sysctl("net.ipv4.icmp_echo_ignore_all", "0");
        check_quick(&exchange(&mut prober, 0, 5).await);
        assert_eq!(prober.stats(0).sent, 11);
        assert_eq!(prober.stats(0).answered, 10);
    });
}

#[test]
fn a_deleted_device_is_an_error_and_its_return_is_used() {
    let net = Net::new();
    let net = &net;
    net.client(move || async move {
        let paths = [
            icmp("c0", "192.0.2.2"),
            udp("c0", "192.0.2.2:9"),
            icmp("c0", "fe80::d"),
        ];
        let mut prober = Prober::new(&paths).unwrap();
        exchange(&mut prober, 0, 3).await;
        exchange(&mut prober, 2, 3).await;
        net.client.ip("link set c0 down");
        for path in 0..3 {
            prober.send(path, 1).expect_err("a device that is down");
        }
        net.client.ip("link del c0");
        for path in 0..3 {
            for seq in 0..3 {
                let error = prober.send(path, seq).expect_err("a device that is gone");
                assert!(error.raw_os_error().is_some(), "{error}");
            }
            assert_eq!(prober.stats(path).send_errors, 4);
            assert!(prober.stats(path).last_error.is_some());
        }
        assert_eq!(
            answer_within(&mut prober, Duration::from_millis(100)).await,
            None
        );
        // Another index this time.
        net.client.ip("link add type veth");
        net.link(0);
        check_quick(&exchange(&mut prober, 0, 5).await);
        check_quick(&exchange(&mut prober, 2, 5).await);
    });
}

#[test]
fn a_missing_device_is_no_reason_to_give_up_the_others() {
    let net = Net::new();
    net.client(|| async {
        let paths = [icmp("nosuch", "192.0.2.2"), icmp("c0", "192.0.2.2")];
        let mut prober = Prober::new(&paths).unwrap();
        let error = prober.send(0, 0).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENODEV), "{error}");
        exchange(&mut prober, 1, 3).await;
        let error = prober.send(2, 0).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        let mixed = path(
            "c0",
            Some("192.0.2.1"),
            Target::Icmp("fe80::d".parse().unwrap()),
        );
        let error = prober.set_path(1, mixed).unwrap_err().to_string();
        assert!(
            error.contains("c0") && error.contains("families"),
            "{error}"
        );
    });
}

#[test]
fn an_unreachable_target_is_said_and_sending_goes_on() {
    let net = Net::new();
    // The server is also a router without a route.
    net.server.sysctl("net.ipv4.ip_forward", "1");
    net.client.ip("route add 203.0.113.0/24 via 192.0.2.2");
    net.client(|| async {
        // A closed port, no route behind the gateway, a neighbour that does not exist, and one
        // that answers.
        let paths = [
            udp("c0", "192.0.2.2:9"),
            icmp("c0", "203.0.113.1"),
            icmp("c0", "192.0.2.99"),
            icmp("c0", "192.0.2.2"),
        ];
        let mut prober = Prober::new(&paths).unwrap();
        for seq in 0..10 {
            for path in 0..paths.len() {
                prober.send(path, seq).unwrap();
            }
            let answer = answer_within(&mut prober, Duration::from_secs(1)).await;
            assert_eq!(answer.map(|a| (a.path, a.seq)), Some((3, seq)));
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        for (path, what) in [(0, "refused"), (1, "unreachable")] {
            let stats = prober.stats(path);
            assert!(stats.unreachable > 0, "{stats:?}");
            let text = stats.last_error.as_deref().unwrap();
            assert!(text.contains("192.0.2.2") && text.contains(what), "{text}");
        }
        for path in 0..3 {
            assert_eq!(
                (prober.stats(path).sent, prober.stats(path).answered),
                (10, 0)
            );
        }
        assert_eq!(prober.stats(3).unreachable, 0);
    });
}

#[test]
fn the_hosts_own_queue_is_told_apart_and_a_full_one_breaks_nothing() {
    let net = Net::new();
    let tbf = "qdisc add dev c0 root tbf rate 1mbit burst 2000 limit 20000";
    let out = Command::new("tc")
        .args(["-n", &net.client.name])
        .args(tbf.split(' '))
        .output()
        .unwrap();
    assert!(
        out.status.success(),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
    let reflector = net.reflector("192.0.2.2:0", Duration::ZERO);
    let address = reflector.address.to_string();
    net.client(move || async move {
        let mut prober = Prober::new(&[icmp("c0", "192.0.2.2"), udp("c0", &address)]).unwrap();
        let filler = UdpSocket::bind("192.0.2.1:0").unwrap();
        for path in [0, 1] {
            check_quick(&exchange(&mut prober, path, 5).await);
            // 10 kB at 1 Mbit/s: 80 ms of queue, less what drains before the probe is sent.
            let start = Instant::now();
            for _ in 0..7 {
                filler.send_to(&[0; 1400], "192.0.2.2:9").unwrap();
            }
            prober.send(path, 1).unwrap();
            let drained_us = start.elapsed().as_micros() as u32;
            let answer = answer_within(&mut prober, Duration::from_secs(1))
                .await
                .unwrap();
            let queue_us = answer.queue_us.unwrap();
            assert!(queue_us + drained_us >= 40_000, "{answer:?} {drained_us}");
            assert!(queue_us < 1_000_000, "{answer:?}");
            assert!(answer.rtt_us < 20_000, "{answer:?}");
            assert!(answer.delay_us >= queue_us, "{answer:?}");

            // Full: the send fails, after it has used up a packet number or not.
            for _ in 0..30 {
                let _ = filler.send_to(&[0; 1400], "192.0.2.2:9");
            }
            for _ in 0..40 {
                let _ = filler.send_to(&[0; 10], "192.0.2.2:9");
            }
            let error = (0..30).find_map(|seq| prober.send(path, seq).err());
            assert_eq!(error.expect("no room").raw_os_error(), Some(libc::ENOBUFS));
            while answer_within(&mut prober, Duration::from_millis(300))
                .await
                .is_some()
            {}
            // The right stamps again: a wrong one would show as RTT or queue of other probes.
            let answers = exchange(&mut prober, path, 8).await;
            check_quick(&answers);
            let queue = median(answers.iter().map(|a| a.queue_us.unwrap()).collect());
            assert!(queue < 10_000, "{answers:?}");
        }
    });
}

#[test]
fn dropping_a_waiting_receive_loses_no_answer() {
    let net = Net::new();
    net.client(|| async {
        let mut prober = Prober::new(&[icmp("c0", "192.0.2.2")]).unwrap();
        exchange(&mut prober, 0, 2).await;
        let mut got = Vec::new();
        for seq in 0..50 {
            prober.send(0, seq).unwrap();
            // A time limit of the order of the RTT: sometimes it strikes first.
            got.extend(answer_within(&mut prober, Duration::from_micros(50)).await);
        }
        while got.len() < 50 {
            let next = answer_within(&mut prober, Duration::from_secs(1)).await;
            got.push(next.unwrap_or_else(|| panic!("lost after {}", got.len())));
        }
        let seqs: Vec<_> = got.iter().map(|a| a.seq).collect();
        assert_eq!(seqs, (0..50).collect::<Vec<_>>());
    });
}

#[test]
fn eight_paths_at_twenty_probes_a_second_cost_little_cpu() {
    let net = Net::new();
    let reflector = net.reflector("0.0.0.0:0", Duration::ZERO);
    let address = format!("192.0.2.2:{}", reflector.address.port());
    let share = net.client(move || async move {
        let paths: Vec<_> = (0..8)
            .map(|n| {
                if n % 2 == 0 {
                    icmp("c0", "192.0.2.2")
                } else {
                    udp("c0", &address)
                }
            })
            .collect();
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
            let last = answer_within(&mut prober, Duration::from_secs(2)).await;
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
    let net = Net::new();
    let error = finish(net.client.spawn(|| {
        // The bare system call, so that only this thread loses its privileges.
        // SAFETY: changes credentials only.
        let rc = unsafe { libc::syscall(libc::SYS_setresuid, -1, 65534, -1) };
        assert_eq!(rc, 0);
        runtime().block_on(async { Prober::new(&[icmp("c0", "192.0.2.2")]).err() })
    }));
    let text = error.expect("no raw sockets for nobody").to_string();
    assert!(text.contains("CAP_NET_RAW"), "{text}");
}
