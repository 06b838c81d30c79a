// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain reflect`'s engine over veth pairs between network namespaces. Needs root.

use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mountain::measure::probe::{Prober, Target};
use mountain::measure::timestamp;
use mountain::measure::wire::{self, ProbeId};
use rand::{Rng, RngExt, SeedableRng};

use crate::probe_net::*;
use crate::support::{seed, Worker, LEAVE};

#[test]
fn the_reflector_gives_both_directions_over_both_families() {
    let net = Net::probed();
    for listen in ["10.30.0.2:0", "[fd30::2]:0", "0.0.0.0:0", "[::]:0"] {
        let reflector = net.reflector(listen, Duration::ZERO);
        let ip = ["10.30.0.2", "[fd30::2]"][usize::from(listen.starts_with('['))];
        let address = format!("{ip}:{}", reflector.address.port());
        net.client.within(async move || {
            let mut prober = Prober::new(&[udp("u0", &address)]).unwrap();
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
            // Not the whole way through two processes.
            assert!(forward < 5000 && backward < 5000, "{forward} {backward}");
        });
    }
}

#[test]
fn time_inside_a_slow_reflector_is_taken_off() {
    let net = Net::probed();
    let answer_of_a_slow_one = |_| {
        let reflector = net.reflector("10.30.0.2:0", Duration::from_millis(200));
        let address = reflector.address.to_string();
        net.client.within(async move || {
            let mut prober = Prober::new(&[udp("u0", &address)]).unwrap();
            prober.send(0, 1).unwrap();
            answer_within(&mut prober, LEAVE).await.unwrap()
        })
    };
    // The namespace took a moment to enter, hence not the whole 200 ms. Where it took longer, another try.
    let answer = (0..10)
        .map(answer_of_a_slow_one)
        .find(|answer| answer.user_rtt_us > 100_000)
        .expect("a reflector that is slow");
    assert!(answer.rtt_us < answer.user_rtt_us / 2, "{answer:?}");
}

/// Passes datagrams between the client and `to`, holding each back for a while once that is switched on.
fn relay(
    net: &Net,
    to: SocketAddr,
    [forward, backward]: [Duration; 2],
) -> (SocketAddr, Arc<AtomicBool>, Worker<()>) {
    let slow = Arc::new(AtomicBool::new(false));
    let active = slow.clone();
    let [near, far] = [(); 2].map(|()| net.server.udp("10.30.0.2:0"));
    let address = near.local_addr().unwrap();
    let wait = Some(Duration::from_millis(20));
    near.set_read_timeout(wait).unwrap();
    let worker = Worker::start(move |stop| {
        let mut buffer = [0; 2000];
        let hold = |time| {
            if active.load(Relaxed) {
                std::thread::sleep(time);
            }
        };
        while !stop.is_set() {
            let Ok((len, client)) = near.recv_from(&mut buffer) else {
                continue;
            };
            hold(forward);
            far.send_to(&buffer[..len], to).unwrap();
            let (len, _) = far.recv_from(&mut buffer).unwrap();
            hold(backward);
            near.send_to(&buffer[..len], client).unwrap();
        }
    });
    (address, slow, worker)
}

#[test]
fn a_delay_of_one_direction_shows_in_that_direction() {
    let net = Net::probed();
    let reflector = net.reflector("10.30.0.2:0", Duration::ZERO);
    for (forward, backward) in [(30, 0), (0, 30)] {
        let hold = [forward, backward].map(Duration::from_millis);
        let (address, slow, _relay) = relay(&net, reflector.address, hold);
        net.client.within(async move || {
            let mut prober = Prober::new(&[udp("u0", &address.to_string())]).unwrap();
            exchange(&mut prober, 0, 30).await;
            slow.store(true, Relaxed);
            let answers = exchange(&mut prober, 0, 15).await;
            let got_forward = median(answers.iter().map(|a| a.forward_us.unwrap()).collect());
            let got_backward = median(answers.iter().map(|a| a.backward_us.unwrap()).collect());
            let delay = median(answers.iter().map(|a| a.delay_us).collect());
            // The relay is a process and may be held up, hence no upper limit to what it holds
            // back; what it does not hold back is less, on any machine that runs it at all.
            let shows = |got: u32, want: u64| match want {
                0 => got < 15_000,
                _ => got > 28_000,
            };
            let got = format!("forward {got_forward}, backward {got_backward}, delay {delay} µs");
            assert!(shows(got_forward, forward), "{got}");
            assert!(shows(got_backward, backward), "{got}");
            assert!(shows(delay, forward), "forward only counts: {got}");
        });
    }
}

#[test]
fn junk_does_not_disturb_the_reflector_and_replies_are_never_longer() {
    let net = Net::probed();
    let reflector = net.reflector("0.0.0.0:0", Duration::ZERO);
    let address = SocketAddr::from(([10, 30, 0, 2], reflector.address.port()));
    let seed = seed();
    let socket = net.client.udp("10.30.0.1:0");
    net.client.with(move || {
        let mut rng = rand::rngs::StdRng::seed_from_u64(seed);
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
            let (nonce, index) = (7, len as u64);
            wire::write_request(&mut packet, ProbeId { nonce, index }, 0);
            socket.send_to(&packet, address).unwrap();
            requests += 1;
            let mut buffer = [0; 10_000];
            let answer = socket.recv_from(&mut buffer);
            let (got, from) = answer.expect("an answer, not to junk");
            assert_eq!((got, from), (len, address));
            let (id, reflected) = wire::parse_reply(&buffer[..got]).unwrap();
            assert_eq!(id.index, len as u64);
            assert_eq!(reflected.count, requests, "junk is not counted");
        }
    });
}

#[test]
fn replies_come_from_the_address_and_device_that_were_asked() {
    let net = Net::probed();
    net.server.ip("addr add 10.30.0.3/24 dev s0");
    net.server.ip("addr add 198.51.100.9/32 dev lo");
    net.client.ip("route add 198.51.100.9 via 10.30.1.2 dev u1");
    let reflector = net.reflector("0.0.0.0:0", Duration::ZERO);
    let port = reflector.address.port();
    net.client.within(async move || {
        // The second address of a device; and the same far address over the second device, from
        // the first one's address, for which the server's own route would be s0.
        let to = |ip: &str| Target::Reflector(format!("{ip}:{port}").parse().unwrap());
        let paths = [
            path("u0", None, to("10.30.0.3")),
            path("u1", Some("10.30.1.1"), to("198.51.100.9")),
        ];
        let mut prober = Prober::new(&paths).unwrap();
        for n in 0..2 {
            check_quick(&exchange(&mut prober, n, 5).await);
        }
    });
}

#[test]
fn the_dscp_is_reported_and_returned_without_ecn() {
    let net = Net::probed();
    for (listen, ipv6) in [("10.30.0.2:0", false), ("[fd30::2]:0", true)] {
        let reflector = net.reflector(listen, Duration::ZERO);
        let address = reflector.address;
        net.client.with(move || {
            let any = if ipv6 { "[::]:0" } else { "0.0.0.0:0" };
            let socket = socket2::Socket::from(UdpSocket::bind(any).unwrap());
            timestamp::set_details(&socket, ipv6, false).unwrap();
            // EF with ECT(0).
            if ipv6 {
                socket.set_tclass_v6(0xba).unwrap();
            } else {
                socket.set_tos_v4(0xba).unwrap();
            }
            let mut packet = [0; wire::PROBE_LEN];
            wire::write_request(&mut packet, ProbeId { nonce: 1, index: 1 }, 0);
            socket.send_to(&packet, &address.into()).unwrap();
            let start = Instant::now();
            let received = loop {
                match timestamp::receive(&socket, &mut packet) {
                    Ok(received) => break received,
                    Err(e) => assert!(start.elapsed() < LEAVE, "{e}"),
                }
                std::thread::sleep(Duration::from_millis(5));
            };
            assert_eq!(wire::parse_reply(&packet).unwrap().1.tos, 0xba);
            assert_eq!(received.tos, Some(0xb8));
        });
    }
}
