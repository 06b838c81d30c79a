// SPDX-License-Identifier: GPL-2.0-or-later
//! TCP leaves a path by itself where packets are lost behind a gateway that answers.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::Duration;

use crate::support::*;

const CONNECTIONS: usize = 40;

/// Within 13 s the kernel looks for another route once, and each connection in two gets one.
const FOUND: Duration = Duration::from_secs(40);

/// Connections of the client to an address of the server's: their ends at either.
fn connected(net: &Net, at: &str) -> (Vec<TcpStream>, Vec<TcpStream>) {
    let listener = net.server.listen(at);
    let connect = |_| (net.client.connect(at), listener.accept().unwrap().0);
    (0..CONNECTIONS).map(connect).unzip()
}

/// How many of the server's ends have heard nothing.
fn unheard(ends: &mut Vec<TcpStream>) -> usize {
    ends.retain_mut(|end| end.read(&mut [0; 8]).is_err());
    ends.len()
}

/// The connections that move need not wait for Mountain to find out what is wrong: it cannot.
fn connections_leave(to: &str, family: &str) {
    let net = Net::steered();
    let at = SocketAddr::new(to.parse().unwrap(), 9000).to_string();
    let (mut clients, mut ends) = connected(&net, &at);
    let hook = "filter hook prerouting priority -300";
    let lost = "iifname s1 meta l4proto tcp drop";
    net.server.chain(&format!("{family} t behind"), hook, lost);
    for end in &ends {
        end.set_nonblocking(true).unwrap();
    }
    for client in &mut clients {
        client.write_all(b"question").unwrap();
    }
    thread::sleep(Duration::from_millis(150));
    let first = unheard(&mut ends);
    assert!(first >= 5, "the control has lost {first}");
    wait_until("some leave", FOUND, || unheard(&mut ends) * 10 <= first * 9);
    assert!(net.counter("move_rehashed") > 0, "by a move");
    let states = [false, true].map(|ipv6| net.client.path_by("u1", ipv6).judged.state);
    assert_eq!(states, ["good"; 2], "its gateway answers");
}

#[test]
fn connections_that_look_for_another_path_find_it() {
    connections_leave(SERVER4, "ip");
}

#[test]
fn connections_that_look_for_another_path_of_ipv6_find_it() {
    connections_leave(SERVER6, "ip6");
}

/// The next hops are firewalls. Each knows only the connections that it has seen begin.
fn between_firewalls() -> Net {
    let net = Net::steered();
    let chain = |i| {
        format!(
            "set known{i} {{ type inet_service; flags dynamic; }}\n\
             chain in{i} {{ type filter hook prerouting priority -300;\n\
             iifname != s{i} return\n\
             tcp flags & (syn | ack) == syn add @known{i} {{ tcp sport }}\n\
             meta l4proto tcp tcp sport != @known{i} counter drop\n}}\n"
        )
    };
    let firewalls = [0, 1].map(chain).concat();
    net.server
        .nft(&format!("table ip firewalls {{\n{firewalls}}}"));
    net
}

/// Where nothing was moved, nobody has to go back: a far end that is away for a while knows its connections.
#[test]
fn connections_that_were_not_moved_stay_where_they_began() {
    let net = between_firewalls();
    let at = format!("{SERVER4}:9000");
    let (mut clients, mut ends) = connected(&net, &at);
    let hook = "filter hook prerouting priority -310";
    net.server.chain("ip t away", hook, "meta l4proto tcp drop");
    for client in &mut clients {
        client.write_all(b"question").unwrap();
    }
    // Four timeouts and more.
    thread::sleep(Duration::from_secs(4));
    net.server.run("nft delete table ip t");
    for end in &ends {
        end.set_nonblocking(true).unwrap();
    }
    wait_until("all are heard", LEAVE, || unheard(&mut ends) == 0);
    assert_eq!(net.counter("move_rehashed"), 0);
}

#[test]
fn connections_without_acknowledgements_on_another_path_go_back() {
    let net = between_firewalls();
    let at = format!("{SERVER4}:9000");
    let (mut clients, mut ends) = connected(&net, &at);
    for end in &ends {
        end.set_nonblocking(true).unwrap();
    }
    let dropped = || net.server.counted("table ip firewalls").iter().sum::<u64>();
    // How many are not heard although all say something.
    let mut say = || {
        for client in &mut clients {
            client.write_all(b"question").unwrap();
        }
        thread::sleep(Duration::from_millis(100));
        let mut unheard = ends.iter_mut().map(|end| end.read(&mut [0; 4096]).is_err());
        unheard.by_ref().filter(|unheard| *unheard).count()
    };
    wait_until("all are heard", LEAVE, || say() == 0);
    assert_eq!(dropped(), 0);
    // It answers every other ping.
    let lost = "iifname s1 icmp type echo-request numgen random mod 2 0 drop";
    (net.server).chain("ip t pings", "filter hook prerouting priority -310", lost);
    wait_until("some have moved and gone back", LEAVE, || {
        say();
        net.counter("move_rehashed") >= 5
    });
    assert!(dropped() > 0);
    wait_until("all are heard again", LEAVE, || say() == 0);
    assert_ne!(net.client.path_by("u1", false).judged.state, "good");
    // They do not try again what has failed.
    let before = dropped();
    for _ in 0..20 {
        say();
    }
    assert!(dropped() < before + 10, "{before} and {}", dropped());
    wait_until("all are still heard", LEAVE, || say() == 0);
}
