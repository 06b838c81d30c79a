// SPDX-License-Identifier: GPL-2.0-or-later
//! Sockets that name the device that their packets leave by, without being bound to it.

use std::net::UdpSocket;
use std::os::fd::AsRawFd;
use std::thread;
use std::time::Duration;

use crate::support::{arrivals, wait_until, Net, CLIENT4, LEAVE, SERVER4};

/// linux/in.h.
const IP_UNICAST_IF: libc::c_int = 50;

fn set(socket: &UdpSocket, name: libc::c_int, value: u32) {
    // SAFETY: the value outlives the call.
    let rc = unsafe {
        let size = size_of::<u32>() as u32;
        let value = (&raw const value).cast();
        libc::setsockopt(socket.as_raw_fd(), libc::IPPROTO_IP, name, value, size)
    };
    assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
}

/// A server that has asked by which device requests come in, and answers by that one.
fn answers_by(index: u32) -> impl FnMut() {
    let socket = UdpSocket::bind((CLIENT4, 5454)).unwrap();
    set(&socket, libc::IP_PKTINFO, 1);
    let to = format!("{SERVER4}:5353").parse().unwrap();
    move || arrivals::send_by(&socket, b"answer", to, index).unwrap()
}

/// A client whose packets all leave by a device.
fn sends_by(index: u32) -> impl FnMut() {
    let socket = UdpSocket::bind((CLIENT4, 5455)).unwrap();
    set(&socket, IP_UNICAST_IF, index.to_be());
    move || {
        socket.send_to(b"request", (SERVER4, 5353)).unwrap();
    }
}

/// A client that wants to know what address it is sent to, as QUIC's libraries do: it names no device.
fn asks_for_its_address() -> impl FnMut() {
    let socket = UdpSocket::bind((CLIENT4, 0)).unwrap();
    set(&socket, libc::IP_PKTINFO, 1);
    move || {
        socket.send_to(b"request", (SERVER4, 5353)).unwrap();
    }
}

#[test]
fn packets_of_sockets_that_name_a_device_leave_by_it() {
    let net = Net::steered();
    let ports = ["5454", "5455", "32768-60999"];
    let counters = ports
        .map(|p| [0, 1].map(|i| format!("iifname s{i} udp dport 5353 udp sport {p} counter\n")));
    let hook = "filter hook prerouting priority -310";
    let counters = counters.concat().concat();
    net.server.chain("ip t c", hook, &counters);
    // Packets of each source port that have reached the server, by path.
    let arrived = || -> Vec<[u64; 2]> {
        let counted = net.server.counted("chain ip t c");
        counted.chunks(2).map(|by| [by[0], by[1]]).collect()
    };
    let send = |rounds: u32| {
        net.client.with(move || {
            let index = testkit::ifindex("u0");
            let (mut server, mut client) = (answers_by(index), sends_by(index));
            let mut others: Vec<_> = (0..8).map(|_| asks_for_its_address()).collect();
            for _ in 0..rounds {
                server();
                client();
                others.iter_mut().for_each(|send| send());
                thread::sleep(Duration::from_millis(20));
            }
        });
    };
    send(3);
    assert_eq!(arrived()[..2], [[3, 0]; 2], "what the kernel does");
    net.lose(0);
    send(10);
    let now = arrived();
    assert_eq!(now[..2], [[13, 0]; 2], "moved away from their device");
    // Those who name none are moved.
    wait_until("the others are moved", LEAVE, || {
        send(1);
        let others = arrived()[2];
        others[0] == now[2][0] && others[1] > 80
    });
}
