// SPDX-License-Identifier: GPL-2.0-or-later
//! What the tests of probes and reflector share: two namespaces, and threads inside them.

#![allow(dead_code)] // Each test binary uses its part.

use std::net::SocketAddr;
use std::sync::mpsc;
use std::time::Duration;

use crate::support::netns::runtime;
pub use crate::support::Net;
use crate::support::{Worker, LEAVE};
use mountain::measure::probe::{Answer, ProbePath, Prober, Target};
use mountain::measure::reflect::Reflector;
pub use testkit::median;

impl Net {
    /// With link-local addresses that are known: fe80::c of the client and fe80::d of the server.
    pub fn probed() -> Self {
        let net = Self::new();
        net.link_local(0);
        net.link_local(1);
        net
    }

    pub fn link_local(&self, i: u32) {
        for (ns, end, dev) in [(&self.client, "c", "u"), (&self.server, "d", "s")] {
            ns.bring_up(&format!("{dev}{i}"), &[&format!("fe80::{end}/64")]);
        }
    }

    /// A reflector in the server's namespace that runs until the value is dropped.
    pub fn reflector(&self, listen: &str, start_late: Duration) -> RunningReflector {
        let listen: SocketAddr = listen.parse().unwrap();
        let (ready, wait) = mpsc::channel();
        let worker = Worker::inside(&self.server, move |stop| {
            runtime().block_on(async {
                let mut reflector = Reflector::bind(listen).unwrap();
                ready.send(reflector.local_addr().unwrap()).unwrap();
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
        RunningReflector {
            address: wait.recv().unwrap(),
            _worker: worker,
        }
    }
}

pub struct RunningReflector {
    pub address: SocketAddr,
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
        let answer = answer_within(prober, LEAVE).await;
        let answer = answer.unwrap_or_else(|| panic!("no answer: {:?}", prober.stats(path)));
        assert_eq!((answer.path, answer.seq), (path, 1000 + seq));
        let pause_ms = if answer.kernel_stamps { 5 } else { 100 };
        answers.push(answer);
        tokio::time::sleep(Duration::from_millis(pause_ms)).await;
    }
    answers
}

pub fn check_quick(answers: &[Answer]) {
    let rtt = median(answers.iter().map(|a| a.rtt_us).collect());
    let user = median(answers.iter().map(|a| a.user_rtt_us).collect());
    // A veth takes some ten µs; a machine that is busy or was halted, more.
    assert!(rtt > 0 && rtt < 5000, "kernel RTT {rtt} µs");
    assert!(user >= rtt, "user RTT {user} µs, the kernel's {rtt} µs");
    // The kernel switches receive stamps on lazily: the first packets may come without.
    for answer in answers.iter().skip(3) {
        assert!(answer.kernel_stamps, "{answer:?}");
        assert!(answer.user_rtt_us >= answer.rtt_us, "{answer:?}");
        assert!(answer.queue_us.is_some(), "{answer:?}");
    }
}
