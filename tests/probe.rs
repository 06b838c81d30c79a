//! Probes and reflector over veth pairs between network namespaces. Needs root.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{mpsc, Arc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mountain::measure::probe::{Answer, ProbePath, Prober, Target};
use mountain::measure::reflect::{Limits, Reflector};
use mountain::measure::wire::{self, ProbeId, Reflected};
use rand::{Rng, RngExt, SeedableRng};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

/// Two namespaces, "client" and "server", joined by two veth pairs: c0–s0 (192.0.2.0/25,
/// 2001:db8:0::/64, fe80::c, fe80::d) and c1–s1 (192.0.2.128/25).
struct Net {
    client: String,
    server: String,
}

impl Net {
    fn new() -> Self {
        assert!(
            nix::unistd::geteuid().is_root(),
            "this test makes namespaces: run it as root"
        );
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let id = format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed));
        let net = Net {
            client: format!("mtp-c{id}"),
            server: format!("mtp-s{id}"),
        };
        let (c, s) = (&net.client, &net.server);
        ip(&format!("netns add {c}"));
        ip(&format!("netns add {s}"));
        ip(&format!("-n {c} link set lo up"));
        ip(&format!("-n {s} link set lo up"));
        net.link(0);
        net.link(1);
        net
    }

    fn link(&self, n: u32) {
        let (c, s) = (&self.client, &self.server);
        ip(&format!(
            "-n {c} link add c{n} type veth peer name s{n} netns {s}"
        ));
        let (host_c, host_s) = (1 + n * 128, 2 + n * 128);
        for (ns, dev, host, local) in [(c, 'c', host_c, 'c'), (s, 's', host_s, 'd')] {
            ip(&format!("-n {ns} link set {dev}{n} addrgenmode none"));
            ip(&format!("-n {ns} link set {dev}{n} up"));
            ip(&format!("-n {ns} addr add 192.0.2.{host}/25 dev {dev}{n}"));
            ip(&format!(
                "-n {ns} addr add 2001:db8:0:{n}::{local}/64 dev {dev}{n} nodad"
            ));
            ip(&format!(
                "-n {ns} addr add fe80::{local}/64 dev {dev}{n} nodad"
            ));
        }
    }

    /// Runs `job` on a thread of its own inside a namespace.
    fn spawn<T: Send + 'static>(
        name: &str,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> JoinHandle<T> {
        let file = std::fs::File::open(format!("/run/netns/{name}")).unwrap();
        std::thread::spawn(move || {
            nix::sched::setns(file.as_fd(), nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
            job()
        })
    }

    /// Runs an async `job` in the client's namespace and hands on its panic.
    fn client<T, F>(&self, job: impl FnOnce() -> F + Send + 'static) -> T
    where
        T: Send + 'static,
        F: std::future::Future<Output = T>,
    {
        finish(Self::spawn(&self.client, || runtime().block_on(job())))
    }

    /// A reflector in the server's namespace that runs until the value is dropped.
    fn reflector(&self, listen: &str, start_late: Duration) -> RunningReflector {
        let listen: SocketAddr = listen.parse().unwrap();
        let (ready, wait) = mpsc::channel();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let thread = Self::spawn(&self.server, move || {
            runtime().block_on(async {
                let mut reflector = Reflector::bind(listen, Limits::default()).unwrap();
                ready
                    .send((reflector.local_addr().unwrap(), reflector.stats()))
                    .unwrap();
                std::thread::sleep(start_late);
                tokio::select! {
                    end = reflector.run() => panic!("the reflector ended: {end:?}"),
                    _ = stopped => {}
                }
            })
        });
        let (address, stats) = wait.recv().unwrap();
        RunningReflector {
            address,
            stats,
            stop: Some(stop),
            thread: Some(thread),
        }
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        for ns in [&self.client, &self.server] {
            let _ = Command::new("ip").args(["netns", "del", ns]).status();
        }
    }
}

struct RunningReflector {
    address: SocketAddr,
    stats: Arc<mountain::measure::reflect::ReflectStats>,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for RunningReflector {
    fn drop(&mut self) {
        let _ = self.stop.take().unwrap().send(());
        let result = self.thread.take().unwrap().join();
        assert!(
            result.is_ok() || std::thread::panicking(),
            "the reflector panicked"
        );
    }
}

fn ip(args: &str) {
    let out = Command::new("ip")
        .args(args.split_whitespace())
        .output()
        .unwrap();
    assert!(
        out.status.success(),
        "ip {args}: {}",
        String::from_utf8_lossy(&out.stderr)
    );
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
}

fn finish<T>(thread: JoinHandle<T>) -> T {
    thread
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn path(dev: &str, source: Option<&str>, target: Target) -> ProbePath {
    // The index is filled in when the socket is opened.
    let source = source.map(|s| s.parse().unwrap());
    ProbePath {
        ifname: dev.into(),
        ifindex: 0,
        source,
        target,
    }
}

fn icmp(dev: &str, target: &str) -> ProbePath {
    path(dev, None, Target::Icmp(target.parse().unwrap()))
}

fn udp(dev: &str, target: &str) -> ProbePath {
    path(dev, None, Target::Reflector(target.parse().unwrap()))
}

async fn answer_within(prober: &mut Prober, limit: Duration) -> Option<Answer> {
    tokio::time::timeout(limit, prober.recv()).await.ok()
}

/// Sends `count` probes 5 ms apart, each after the last was answered.
async fn exchange(prober: &mut Prober, path: usize, count: u64) -> Vec<Answer> {
    let mut answers = Vec::new();
    for seq in 0..count {
        prober.send(path, 1000 + seq).unwrap();
        let answer = answer_within(prober, Duration::from_secs(2)).await;
        let answer = answer.unwrap_or_else(|| panic!("no answer: {:?}", prober.stats(path)));
        assert_eq!((answer.path, answer.seq), (path, 1000 + seq));
        answers.push(answer);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    answers
}

fn median(mut values: Vec<u32>) -> u32 {
    values.sort_unstable();
    values[values.len() / 2]
}

fn check_quick(answers: &[Answer]) {
    let rtt = median(answers.iter().map(|a| a.rtt_us).collect());
    let user = median(answers.iter().map(|a| a.user_rtt_us).collect());
    assert!(rtt > 0 && rtt < 1000, "kernel RTT {rtt} µs");
    assert!(
        user >= rtt,
        "user RTT {user} µs below the kernel's {rtt} µs"
    );
    for answer in answers {
        assert!(answer.kernel_stamps, "{answer:?}");
        assert!(answer.user_rtt_us >= answer.rtt_us, "{answer:?}");
        assert!(answer.queue_us.is_some(), "{answer:?}");
    }
}

#[test]
fn icmp_rtt_over_veth_is_below_a_millisecond_for_both_families_and_link_local() {
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
            assert!(rtt < 5_000, "path {path}: {rtt} µs");
        }
    });
}

#[test]
fn the_reflector_gives_both_directions_over_both_families() {
    let net = Net::new();
    for listen in ["192.0.2.2:0", "[2001:db8::d]:0", "0.0.0.0:0", "[::]:0"] {
        let reflector = net.reflector(listen, Duration::ZERO);
        let ip = if listen.starts_with('[') {
            "[2001:db8::d]"
        } else {
            "192.0.2.2"
        };
        let address = format!("{ip}:{}", reflector.address.port());
        net.client(move || async move {
            let mut prober = Prober::new(&[udp("c0", &address)]).unwrap();
            let answers = exchange(&mut prober, 0, 20).await;
            check_quick(&answers);
            for (n, answer) in answers.iter().enumerate() {
                let reflected = answer.reflected.unwrap();
                assert_eq!(reflected.count, n as u32 + 1);
                assert_eq!((reflected.hop_limit, reflected.tos), (Some(64), 0));
                assert!(reflected.sent_ns >= reflected.received_ns);
            }
            let forward = median(answers.iter().map(|a| a.forward_us.unwrap()).collect());
            let backward = median(answers.iter().map(|a| a.backward_us.unwrap()).collect());
            assert!(forward < 1000 && backward < 1000, "{forward} {backward}");
            assert!(prober.one_way(0).min_rtt_us().unwrap() < 1000);
        });
        let answered = reflector.stats.answered.load(Relaxed);
        assert!(
            (19..=20).contains(&answered),
            "the last may not be counted yet: {answered}"
        );
    }
}

#[test]
fn time_inside_a_slow_reflector_is_taken_off() {
    let net = Net::new();
    let reflector = net.reflector("192.0.2.2:0", Duration::from_millis(200));
    let address = reflector.address.to_string();
    net.client(move || async move {
        let mut prober = Prober::new(&[udp("c0", &address)]).unwrap();
        prober.send(0, 1).unwrap();
        let answer = answer_within(&mut prober, Duration::from_secs(2))
            .await
            .unwrap();
        // The namespace took a moment to enter, hence not the whole 200 ms.
        assert!(answer.user_rtt_us > 100_000, "{answer:?}");
        assert!(answer.rtt_us < 10_000, "{answer:?}");
    });
}

/// Passes datagrams between the client and `to`, holding each back for a while.
fn relay(
    net: &Net,
    to: SocketAddr,
    forward: Duration,
    backward: Duration,
) -> (SocketAddr, Arc<AtomicBool>, JoinHandle<()>) {
    let slow = Arc::new(AtomicBool::new(false));
    let active = slow.clone();
    let (ready, wait) = mpsc::channel();
    let thread = Net::spawn(&net.server, move || {
        let near = UdpSocket::bind("192.0.2.2:0").unwrap();
        let far = UdpSocket::bind("192.0.2.2:0").unwrap();
        near.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
        far.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
        ready.send(near.local_addr().unwrap()).unwrap();
        let mut buffer = [0; 2000];
        // Ends when the client has been silent for two seconds.
        while let Ok((len, client)) = near.recv_from(&mut buffer) {
            let hold = |time| {
                if active.load(Relaxed) {
                    std::thread::sleep(time);
                }
            };
            hold(forward);
            far.send_to(&buffer[..len], to).unwrap();
            let (len, _) = far.recv_from(&mut buffer).unwrap();
            hold(backward);
            near.send_to(&buffer[..len], client).unwrap();
        }
    });
    (wait.recv().unwrap(), slow, thread)
}

#[test]
fn a_delay_of_one_direction_shows_in_that_direction() {
    let net = Net::new();
    let reflector = net.reflector("192.0.2.2:0", Duration::ZERO);
    for (forward, backward) in [(30, 0), (0, 30)] {
        let ms = Duration::from_millis;
        let (address, slow, thread) = relay(&net, reflector.address, ms(forward), ms(backward));
        net.client(move || async move {
            let mut prober = Prober::new(&[udp("c0", &address.to_string())]).unwrap();
            exchange(&mut prober, 0, 30).await;
            slow.store(true, Relaxed);
            let answers = exchange(&mut prober, 0, 15).await;
            let got_forward = median(answers.iter().map(|a| a.forward_us.unwrap()).collect());
            let got_backward = median(answers.iter().map(|a| a.backward_us.unwrap()).collect());
            let delay = median(answers.iter().map(|a| a.delay_us).collect());
            let near = |got: u32, want: u64| (f64::from(got) - want as f64 * 1e3).abs() < 5e3;
            assert!(
                near(got_forward, forward),
                "forward {got_forward} µs, not {forward} ms"
            );
            assert!(
                near(got_backward, backward),
                "backward {got_backward} µs, not {backward} ms"
            );
            assert!(near(delay, forward), "delay {delay} µs counts forward only");
        });
        finish(thread);
    }
}

/// What a hostile responder does with each request.
#[test]
fn forged_replayed_and_foreign_udp_replies_are_ignored() {
    let net = Net::new();
    ip(&format!("-n {} addr add 192.0.2.3/25 dev s0", net.server));
    let (ready, wait) = mpsc::channel();
    let thread = Net::spawn(&net.server, move || {
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
            wire::write_request(&mut packet, id);
            wire::make_reply(&mut packet, reflected);
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
        std::thread::sleep(Duration::from_millis(300));
        let socket = UdpSocket::bind(("192.0.2.2", port)).unwrap();
        // Now the true one, three times.
        for _ in 0..3 {
            socket.send_to(&reply(id), client).unwrap();
        }
        std::thread::sleep(Duration::from_millis(300));
    });
    let address: SocketAddr = wait.recv().unwrap();
    // The forged reply over s1 must reach the client's network stack at all.
    ip(&format!(
        "-n {} neigh replace 192.0.2.1 lladdr {} dev s1",
        net.server,
        mac(&net, "c1")
    ));
    net.client(move || async move {
        let mut prober = Prober::new(&[udp("c0", &address.to_string())]).unwrap();
        prober.send(0, 5).unwrap();
        let early = answer_within(&mut prober, Duration::from_millis(200)).await;
        assert_eq!(early, None, "a forgery was believed");
        let answer = answer_within(&mut prober, Duration::from_secs(2))
            .await
            .unwrap();
        assert_eq!(answer.seq, 5);
        let again = answer_within(&mut prober, Duration::from_millis(200)).await;
        assert_eq!(again, None, "a replay was believed");
        let stats = prober.stats(0);
        assert_eq!((stats.answered, stats.duplicates), (1, 2), "{stats:?}");
        // Eight forgeries from the right address and port, two replays.
        assert_eq!(stats.ignored, 8 + 2, "{stats:?}");
    });
    finish(thread);
}

fn mac(net: &Net, dev: &str) -> String {
    let out = Command::new("ip")
        .args(["-n", &net.client, "-br", "link", "show", dev])
        .output();
    let text = String::from_utf8(out.unwrap().stdout).unwrap();
    text.split_whitespace().nth(2).unwrap().into()
}

/// Answers echo requests itself, in place of the kernel: first wrongly in every way, then right
/// and twice.
#[test]
fn forged_replayed_and_foreign_echo_replies_are_ignored() {
    let net = Net::new();
    ip(&format!("-n {} addr add 192.0.2.3/25 dev s0", net.server));
    sysctl(&net.server, "net.ipv4.icmp_echo_ignore_all=1");
    let (ready, wait) = mpsc::channel();
    let thread = Net::spawn(&net.server, move || {
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
        std::thread::sleep(Duration::from_millis(300));
        for _ in 0..2 {
            socket.send_to(&reply(&[]), &client).unwrap();
        }
        std::thread::sleep(Duration::from_millis(300));
    });
    wait.recv().unwrap();
    net.client(|| async {
        let mut prober = Prober::new(&[icmp("c0", "192.0.2.2")]).unwrap();
        prober.send(0, 5).unwrap();
        let early = answer_within(&mut prober, Duration::from_millis(200)).await;
        assert_eq!(early, None, "a forgery was believed: {:?}", prober.stats(0));
        let answer = answer_within(&mut prober, Duration::from_secs(2))
            .await
            .unwrap();
        assert_eq!(answer.seq, 5);
        let again = answer_within(&mut prober, Duration::from_millis(200)).await;
        assert_eq!(again, None, "a replay was believed");
        let stats = prober.stats(0);
        assert_eq!(
            (stats.answered, stats.duplicates, stats.ignored),
            (1, 1, 8),
            "{stats:?}"
        );
    });
    finish(thread);
}

fn sysctl(ns: &str, setting: &str) {
    let out = Command::new("ip")
        .args(["netns", "exec", ns, "sysctl", "-qw", setting])
        .output();
    let out = out.unwrap();
    assert!(
        out.status.success(),
        "{setting}: {}",
        String::from_utf8_lossy(&out.stderr)
    );
}

#[test]
fn a_lost_probe_has_no_answer_and_the_next_one_is_right() {
    let net = Net::new();
    let server = net.server.clone();
    net.client(move || async move {
        let mut prober = Prober::new(&[icmp("c0", "192.0.2.2")]).unwrap();
        check_quick(&exchange(&mut prober, 0, 5).await);
        sysctl(&server, "net.ipv4.icmp_echo_ignore_all=1");
        prober.send(0, 77).unwrap();
        assert_eq!(
            answer_within(&mut prober, Duration::from_millis(300)).await,
            None
        );
        sysctl(&server, "net.ipv4.icmp_echo_ignore_all=0");
        check_quick(&exchange(&mut prober, 0, 5).await);
        assert_eq!(prober.stats(0).sent, 11);
        assert_eq!(prober.stats(0).answered, 10);
    });
}

#[test]
fn a_deleted_device_is_an_error_and_its_return_is_used() {
    let net = Net::new();
    let (client, server) = (net.client.clone(), net.server.clone());
    let net = Arc::new(net);
    let again = net.clone();
    net.client(move || async move {
        let paths = [
            icmp("c0", "192.0.2.2"),
            udp("c0", "192.0.2.2:9"),
            icmp("c0", "fe80::d"),
        ];
        let mut prober = Prober::new(&paths).unwrap();
        exchange(&mut prober, 0, 3).await;
        exchange(&mut prober, 2, 3).await;
        ip(&format!("-n {client} link set c0 down"));
        for path in 0..3 {
            prober.send(path, 1).expect_err("a device that is down");
        }
        ip(&format!("-n {client} link del c0"));
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
        ip(&format!("-n {client} link add type veth"));
        again.link(0);
        let _ = server;
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
    sysctl(&net.server, "net.ipv4.ip_forward=1");
    ip(&format!(
        "-n {} route add 203.0.113.0/24 via 192.0.2.2",
        net.client
    ));
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
fn junk_does_not_disturb_the_reflector_and_replies_are_never_longer() {
    let net = Net::new();
    let reflector = net.reflector("0.0.0.0:0", Duration::ZERO);
    let address = SocketAddr::from(([192, 0, 2, 2], reflector.address.port()));
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let requests = finish(Net::spawn(&net.client, move || {
        let mut rng = rand::rngs::StdRng::seed_from_u64(seed);
        let socket = UdpSocket::bind("192.0.2.1:0").unwrap();
        socket
            .set_read_timeout(Some(Duration::from_millis(500)))
            .unwrap();
        for _ in 0..100 {
            let mut junk = vec![0; rng.random_range(0..3000)];
            rng.fill_bytes(&mut junk);
            if rng.random_bool(0.5) && junk.len() > 6 {
                // Looks right as far as the kind, which is not a request's.
                junk[..5].copy_from_slice(b"MNTP\x01");
                junk[5] = rng.random_range(2..=255);
            }
            socket.send_to(&junk, address).unwrap();
        }
        let mut requests = 0;
        for len in [48, 49, 100, 1400, 1472, 8000] {
            let mut packet = vec![0; len];
            wire::write_request(
                &mut packet,
                ProbeId {
                    nonce: 7,
                    index: len as u64,
                },
            );
            socket.send_to(&packet, address).unwrap();
            requests += 1;
            let mut buffer = [0; 10_000];
            let (got, from) = socket
                .recv_from(&mut buffer)
                .expect("an answer, not to junk");
            assert_eq!((got, from), (len, address));
            let (id, reflected) = wire::parse_reply(&buffer[..got]).unwrap();
            assert_eq!(id.index, len as u64);
            assert_eq!(reflected.count, requests);
        }
        u64::from(requests)
    }));
    assert_eq!(reflector.stats.junk.load(Relaxed), 100);
    // The last one is counted just after it is sent.
    let start = Instant::now();
    while reflector.stats.answered.load(Relaxed) != requests {
        assert!(
            start.elapsed() < Duration::from_secs(1),
            "{:?}",
            reflector.stats
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn replies_come_from_the_address_and_device_that_were_asked() {
    let net = Net::new();
    ip(&format!("-n {} addr add 192.0.2.3/25 dev s0", net.server));
    ip(&format!(
        "-n {} addr add 198.51.100.9/32 dev lo",
        net.server
    ));
    ip(&format!(
        "-n {} route add 198.51.100.9 via 192.0.2.130 dev c1",
        net.client
    ));
    let reflector = net.reflector("0.0.0.0:0", Duration::ZERO);
    let port = reflector.address.port();
    net.client(move || async move {
        // The second address of a device; and the same far address over the second device, from
        // the first one's address, for which the server's own route would be s0.
        let to = |ip: &str| Target::Reflector(format!("{ip}:{port}").parse().unwrap());
        let paths = [
            path("c0", None, to("192.0.2.3")),
            path("c1", Some("192.0.2.129"), to("198.51.100.9")),
        ];
        let mut prober = Prober::new(&paths).unwrap();
        for n in 0..2 {
            check_quick(&exchange(&mut prober, n, 5).await);
        }
    });
}

#[test]
fn the_default_reflector_listens_on_loopback_only() {
    let listen = mountain::measure::reflect::DEFAULT_LISTEN;
    assert!(listen.iter().all(|a| a.ip().is_loopback()), "{listen:?}");
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
        let cpu = thread_cpu() - cpu_before;
        assert!(answered + 8 >= sent, "{answered} of {sent}");
        assert_eq!(
            prober.stats(0).ignored,
            prober.stats(0).answered * 3,
            "siblings' answers"
        );
        cpu.as_secs_f64() / start.elapsed().as_secs_f64()
    });
    println!("{:.2}% of a CPU", share * 100.0);
    assert!(share < 0.05, "{share}");
}

fn thread_cpu() -> Duration {
    let time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap();
    time.into()
}
