// SPDX-License-Identifier: GPL-2.0-or-later
//! What is refused does lose packets, and what a fix makes possible does not: the BPF programs run
//! on devices as they are, against the preflight's word, and then as they should be.

use std::time::{Duration, Instant};

use mountain::redirect::{bpf, fixes, Backend, Fix, Installed, Rule};

use super::net::*;
use crate::support::LEAVE;
use Backend::{Xdp, XdpRedirect};

const SENT: usize = 40;

/// When packets do not come back, for so long none does.
const QUIET: Duration = Duration::from_millis(500);

/// How many of [`SENT`] packets come back, until there is none for so long.
fn answered(net: &Net, rule: &Rule, quiet: Duration) -> usize {
    let socket = net.client.udp(match rule.from.is_ipv4() {
        true => "0.0.0.0:0",
        false => "[::]:0",
    });
    socket.connect(rule.from).unwrap();
    let wait = Some(Duration::from_millis(10));
    socket.set_read_timeout(wait).unwrap();
    let (mut buffer, mut count, mut last) = ([0; 64], 0, Instant::now());
    let mut read = || {
        if socket.recv(&mut buffer).is_ok() {
            (count, last) = (count + 1, Instant::now());
        }
        count < SENT && last.elapsed() < quiet
    };
    for n in 0..SENT {
        let _ = socket.send(&[n as u8; 32]);
        read();
    }
    while read() {}
    count
}

#[test]
fn refusals_and_fixes_are_right() {
    for (rule, backend) in [
        (ordinary(), Xdp),
        (ordinary(), XdpRedirect),
        (rule("[fd08::17]:8080", "[fd01::2]:8083"), XdpRedirect),
    ] {
        let net = Net::new();
        // What leaves by a veth with unfinished checksums is believed at the other end, right or wrong;
        // a wire would not.
        ethtool(&net.router, "rs", "tx off");
        net.serve(&net.server, "s", &rule.to.to_string());
        let found = net.look_and_fix(&rule);
        let plan = found.plan(backend).clone();
        let fixes = plan.fixes.clone();
        let rules = [Installed {
            id: 0,
            rule: rule.clone(),
            plan,
            fixed: true,
            fix: None,
        }];
        net.router.within(async || bpf::install(&rules).unwrap());

        // The slow way takes the first packets, and one now and then, to learn where neighbours are.
        let refused = answered(&net, &rule, QUIET);
        assert!(refused < SENT / 4, "{backend}: {refused} of {SENT}");
        let is =
            |fix: &&Fix, name: &str| matches!(fix, Fix::Feature { feature, .. } if feature == name);
        for half in ["rx-gro", "tx-checksum-ip-generic"] {
            let half: Vec<Fix> = fixes.iter().filter(|f| is(f, half)).cloned().collect();
            if half.len() == fixes.len() {
                continue;
            }
            net.router.within(async || fixes::apply(&half).unwrap());
            let some = answered(&net, &rule, QUIET);
            let is_lost = some < SENT / 4 || backend == Xdp;
            assert!(is_lost, "{backend}, {half:?}: {some}");
            net.router.within(async || fixes::undo(&half).unwrap());
        }
        net.router.within(async || fixes::apply(&fixes).unwrap());
        let all = answered(&net, &rule, LEAVE);
        assert_eq!(all, SENT, "{backend} with {fixes:?}");
        net.router.within(async || bpf::remove(&rules).unwrap());
    }
}
