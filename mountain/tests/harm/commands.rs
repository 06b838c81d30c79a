// SPDX-License-Identifier: GPL-2.0-or-later
//! Misleading or fragile commands.

use std::os::unix::net::UnixStream;

use nix::sys::resource::{getrlimit, setrlimit, Resource};
use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;

use crate::support::*;

/// The client with two default routes that differ in metric, as those of two providers.
fn two_providers() -> Net {
    let net = Net::new();
    net.client.ip("route del 10.98.1.0/24");
    net.client.ip("-6 route del fd98:1::/64");
    for (i, metric) in [(0, 100), (1, 200)] {
        net.client.ip(&format!(
            "route add default via 10.30.{i}.2 dev u{i} metric {metric}"
        ));
    }
    net
}

#[test]
fn clients_that_only_connect_do_not_end_the_control_socket() {
    let net = Net::new();
    // Fewer descriptors than clients: accepting them all is not possible.
    let limited = net
        .client
        .command("prlimit")
        .args(["--nofile=200", MOUNTAIN, "up"])
        .output();
    assert!(limited.unwrap().status.success());
    let inode = net.client.run("stat -Lc %i /proc/self/ns/net");
    let socket = format!("/run/mountain/net-{}/control.sock", inode.trim());

    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, soft.max(4096).min(hard), hard).unwrap();
    let clients: Vec<_> = (0..1300)
        .map(|_| UnixStream::connect(&socket).unwrap())
        .collect();
    assert_eq!(
        net.client.status()["policy"],
        "mountain",
        "asked beside {} others",
        clients.len()
    );
    drop(clients);
    assert_eq!(net.client.status()["policy"], "mountain");
    assert!(net.client.mountain_ok("down").contains("mountain is down"));
}

#[test]
fn a_terminal_that_hangs_up_leaves_no_rules_behind() {
    let mut net = two_providers();
    let before = net.client.ip("rule");
    let log = net.start("up --foreground --adopt");
    wait_until("it runs", LEAVE, || said(&log).contains("running"));
    assert_ne!(net.client.ip("rule"), before, "uplinks have rules");
    kill(Pid::from_raw(net.pid()), Signal::SIGHUP).unwrap();
    wait_until("its rules are gone", LEAVE, || {
        net.client.ip("rule") == before
    });
    assert!(said(&log).contains("stopping"), "{}", said(&log));
}

#[test]
fn a_status_shows_flows_that_were_placed_and_plain_probes_as_round_trips() {
    let net = two_providers();
    net.client.mountain_ok("up --adopt");
    wait_until("a flow is placed", 3 * LEAVE, || {
        // Nobody has to answer: the choice is taken when the socket connects.
        let _ = net.client.with(|| {
            let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
            socket
                .connect("10.98.1.1:9")
                .and_then(|()| socket.send(b"x"))
        });
        let status = net.client.status();
        status["paths"]
            .as_array()
            .unwrap()
            .iter()
            .any(|p| p["started"].as_u64() > Some(0))
    });
    let text = net.client.mountain_ok("status");
    let title = text
        .lines()
        .find(|line| line.contains("placed"))
        .unwrap_or_else(|| panic!("{text}"));
    let end = title.find("placed").unwrap() + "placed".len();
    let placed = |line: &str| line.get(..end)?.rsplit(' ').next()?.parse::<u64>().ok();
    assert!(text.lines().filter_map(placed).sum::<u64>() > 0, "{text}");
    for path in net.client.status()["paths"].as_array().unwrap() {
        assert_eq!(path["forward_only"], false, "{path:#}");
    }
    assert!(net
        .client
        .mountain_ok("explain --moves")
        .contains("no flow was moved"));
}

#[test]
fn a_daemon_that_waits_for_a_route_says_so() {
    let ns = Ns::new("c");
    ns.mountain_ok("up --wait");
    let text = ns.mountain_ok("status");
    assert!(text.contains("waiting for a multipath route"), "{text}");
}
