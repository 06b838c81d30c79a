// SPDX-License-Identifier: GPL-2.0-or-later
//! What the tests of probes and reflector share: two namespaces, and threads inside them.

#![allow(dead_code)] // Each test binary uses its part.

use std::net::SocketAddr;
use std::sync::{mpsc, Arc};
use std::time::Duration;

use crate::support::netns::runtime;
use crate::support::{Ns, Worker};
use mountain::measure::probe::{Answer, ProbePath, Prober, Target};
use mountain::measure::reflect::{AnswerLimits, ReflectStats, Reflector};

/// Two namespaces, "client" and "server", joined by two veth pairs: c0–s0 (192.0.2.0/25,
/// 2001:db8:0::/64, fe80::c, fe80::d) and c1–s1 (192.0.2.128/25).
pub struct Net {
    pub client: Ns,
    pub server: Ns,
}

impl Net {
    pub fn new() -> Self {
        let net = Net {
            client: Ns::new("pc"),
            server: Ns::new("ps"),
        };
        net.link(0);
        net.link(1);
        net
    }

    pub fn link(&self, n: u32) {
        let (c, s) = (&self.client, &self.server);
        c.link(&format!("c{n}"), s, &format!("s{n}"));
        let (host_c, host_s) = (1 + n * 128, 2 + n * 128);
        for (ns, dev, host, local) in [(c, 'c', host_c, 'c'), (s, 's', host_s, 'd')] {
            let dev = format!("{dev}{n}");
            ns.ip(&format!("link set {dev} addrgenmode none"));
            let v6 = format!("2001:db8:0:{n}::{local}/64");
            let v4 = format!("192.0.2.{host}/25");
            ns.bring_up(&dev, &[&v4, &v6, &format!("fe80::{local}/64")]);
        }
    }

    /// A reflector in the server's namespace that runs until the value is dropped.
    pub fn reflector(&self, listen: &str, start_late: Duration) -> RunningReflector {
        let listen: SocketAddr = listen.parse().unwrap();
        let (ready, wait) = mpsc::channel();
        let worker = Worker::inside(&self.server, move |stop| {
            runtime().block_on(async {
                let mut reflector = Reflector::bind(listen, AnswerLimits::default()).unwrap();
                ready
                    .send((reflector.local_addr().unwrap(), reflector.stats()))
                    .unwrap();
                std::thread::sleep(start_late);
                let stopped = async {
                    while !stop.is_set() {
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                };
                tokio::select! {
                    end = reflector.run() => panic!("the reflector ended: {end:?}"),
                    () = stopped => {}
                }
            })
        });
        let (address, stats) = wait.recv().unwrap();
        RunningReflector {
            address,
            stats,
            _worker: worker,
        }
    }
}

pub struct RunningReflector {
    pub address: SocketAddr,
    pub stats: Arc<ReflectStats>,
    _worker: Worker<()>,
}

pub fn path(dev: &str, source: Option<&str>, target: Target) -> ProbePath {
    // The index is filled in when the socket is opened.
    let source = source.map(|s| s.parse().unwrap());
    ProbePath {
        ifname: dev.into(),
        ifindex: 0,
        source,
        target,
    }
}

pub fn icmp(dev: &str, target: &str) -> ProbePath {
    path(dev, None, Target::Icmp(target.parse().unwrap()))
}

pub fn icmp_from(source: &str, dev: &str, target: &str) -> ProbePath {
    path(dev, Some(source), Target::Icmp(target.parse().unwrap()))
}

pub fn udp(dev: &str, target: &str) -> ProbePath {
    path(dev, None, Target::Reflector(target.parse().unwrap()))
}

pub async fn answer_within(prober: &mut Prober, limit: Duration) -> Option<Answer> {
    tokio::time::timeout(limit, prober.recv()).await.ok()
}

/// Sends `count` probes 5 ms apart, each after the last was answered. The kernel has a worker switch
/// receive stamps on, which may have to wait for a processor: 100 ms apart until then.
pub async fn exchange(prober: &mut Prober, path: usize, count: u64) -> Vec<Answer> {
    let mut answers = Vec::new();
    for seq in 0..count {
        prober.send(path, 1000 + seq).unwrap();
        let answer = answer_within(prober, Duration::from_secs(2)).await;
        let answer = answer.unwrap_or_else(|| panic!("no answer: {:?}", prober.stats(path)));
        assert_eq!((answer.path, answer.seq), (path, 1000 + seq));
        let pause_ms = if answer.kernel_stamps { 5 } else { 100 };
        answers.push(answer);
        tokio::time::sleep(Duration::from_millis(pause_ms)).await;
    }
    answers
}

pub fn median(mut values: Vec<u32>) -> u32 {
    values.sort_unstable();
    values[values.len() / 2]
}

pub fn check_quick(answers: &[Answer]) {
    let rtt = median(answers.iter().map(|a| a.rtt_us).collect());
    let user = median(answers.iter().map(|a| a.user_rtt_us).collect());
    // A veth takes some ten µs; a machine that is busy or was halted, more.
    assert!(rtt > 0 && rtt < 5000, "kernel RTT {rtt} µs");
    assert!(
        user >= rtt,
        "user RTT {user} µs below the kernel's {rtt} µs"
    );
    // The kernel switches receive stamps on lazily: the first packets may come without.
    for answer in answers.iter().skip(3) {
        assert!(answer.kernel_stamps, "{answer:?}");
        assert!(answer.user_rtt_us >= answer.rtt_us, "{answer:?}");
        assert!(answer.queue_us.is_some(), "{answer:?}");
    }
}
