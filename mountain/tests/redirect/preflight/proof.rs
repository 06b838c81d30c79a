// SPDX-License-Identifier: GPL-2.0-or-later
//! What is refused does lose packets, and what a fix makes possible does not: the BPF programs run
//! on devices as they are, against the preflight's word, and then as they should be.

use std::net::UdpSocket;
use std::sync::mpsc::{channel, Sender};
use std::time::{Duration, Instant};

use mountain::redirect::{bpf, fixes, Backend, Fix, Installed, Rule};

use super::net::*;
use Backend::{Xdp, XdpRedirect};

const SENT: usize = 40;

/// Answers what comes in, for a while.
fn echo(net: &Net, rule: &Rule, ready: Sender<()>) {
    net.server.within(async || {
        let socket = UdpSocket::bind(rule.to).unwrap();
        ready.send(()).unwrap();
        socket
            .set_read_timeout(Some(Duration::from_millis(1000)))
            .unwrap();
        let mut buffer = [0; 64];
        while let Ok((length, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(&buffer[..length], from);
        }
    });
}

/// How many of [`SENT`] packets come back.
fn answered(net: &Net, rule: &Rule) -> usize {
    std::thread::scope(|scope| {
        let (ready, is_ready) = channel();
        scope.spawn(|| echo(net, rule, ready));
        is_ready.recv().unwrap();
        net.client.within(async || {
            let any = if rule.from.is_ipv4() {
                "0.0.0.0:0"
            } else {
                "[::]:0"
            };
            let socket = UdpSocket::bind(any).unwrap();
            socket.connect(rule.from).unwrap();
            socket
                .set_read_timeout(Some(Duration::from_millis(10)))
                .unwrap();
            let (mut buffer, mut count) = ([0; 64], 0);
            let mut last = Instant::now();
            let mut read = || {
                if socket.recv(&mut buffer).is_ok() {
                    count += 1;
                    last = Instant::now();
                }
                last.elapsed() < Duration::from_millis(500)
            };
            for n in 0..SENT {
                let _ = socket.send(&[n as u8; 32]);
                read();
            }
            while read() {}
            count
        })
    })
}

#[test]
fn refusals_and_fixes_are_right() {
    for (rule, backend) in [
        (ordinary(), Xdp),
        (ordinary(), XdpRedirect),
        (rule("[fd00:8::17]:8080", "[fd00:1::2]:8083"), XdpRedirect),
    ] {
        let net = Net::new();
        net.client.ip("route add default via 10.0.8.17");
        net.server.ip("route add default via 10.0.1.1");
        net.client.ip("-6 route add default via fd00:8::17");
        net.server.ip("-6 route add default via fd00:1::1");
        // What leaves by a veth with unfinished checksums is believed at the other end, right or wrong;
        // a wire would not.
        ethtool(&net.router, "r1", "tx off");
        let found = net.look_and_fix(&rule);
        let plan = possible(&found, backend).plan.clone().unwrap();
        let fixes = plan.fixes.clone();
        let rules = [Installed {
            id: 0,
            rule: rule.clone(),
            plan,
            fixed: true,
        }];
        net.router.within(async || bpf::install(&rules).unwrap());

        // The slow way takes the first packets, and one now and then, to learn where neighbours are.
        let refused = answered(&net, &rule);
        assert!(refused < SENT / 4, "{backend}: {refused} of {SENT}");
        let is =
            |fix: &&Fix, name: &str| matches!(fix, Fix::Feature { feature, .. } if feature == name);
        for half in ["rx-gro", "tx-checksum-ip-generic"] {
            let half: Vec<Fix> = fixes.iter().filter(|f| is(f, half)).cloned().collect();
            if half.len() == fixes.len() {
                continue;
            }
            net.router.within(async || fixes::apply(&half).unwrap());
            let some = answered(&net, &rule);
            assert!(
                some < SENT / 4 || backend == Xdp,
                "{backend}, {half:?}: {some}"
            );
            net.router.within(async || fixes::undo(&half).unwrap());
        }
        net.router.within(async || fixes::apply(&fixes).unwrap());
        assert_eq!(answered(&net, &rule), SENT, "{backend} with {fixes:?}");
        net.router.within(async || bpf::remove(&rules).unwrap());
    }
}
