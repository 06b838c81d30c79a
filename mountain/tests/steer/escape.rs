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

/// How many of the server's ends have heard nothing.
fn unheard(ends: &mut Vec<TcpStream>) -> usize {
    ends.retain_mut(|end| end.read(&mut [0; 8]).is_err());
    ends.len()
}

/// The connections that move need not wait for Mountain to find out what is wrong: it cannot.
fn connections_leave(to: &str, family: &str) {
    let net = Net::steered();
    let at = SocketAddr::new(to.parse().unwrap(), 9000).to_string();
    let listener = net.server.listen(&at);
    let connect = |_| (net.client.connect(&at), listener.accept().unwrap().0);
    let (mut clients, mut ends): (Vec<_>, Vec<_>) = (0..CONNECTIONS).map(connect).unzip();
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
