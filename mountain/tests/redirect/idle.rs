// SPDX-License-Identifier: GPL-2.0-or-later
//! Flows of the BPF backends end after an idle time, which is short here, and let go of what they had.

use std::net::{IpAddr, SocketAddr};
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use crate::bpf::packets::{ACK, SYN, TCP, UDP};
use crate::bpf::{in_netns, PASS, REDIRECT};
use crate::packets::Packet;
use crate::rig::*;
use libbpf_rs::MapCore;
use mountain::redirect::bpf::hooks::DeviceHook;
use mountain::redirect::bpf::stats;
use mountain::redirect::{Backend, Proto};

const IDLE: Duration = Duration::from_millis(1500);
const TWICE: Duration = Duration::from_millis(3000);
const FIN: u8 = 1;
const RST: u8 = 4;

const IDLE_MS: &str = "MOUNTAIN_REDIRECT_IDLE_MS";

/// Runs `test`, whose name in this program is `name`, in a process of its own: the idle time is of a
/// whole process, and the other tests here need the usual one.
fn with_short_idle(name: &str, test: impl FnOnce() + Send + 'static) {
    if std::env::var_os(IDLE_MS).is_some() {
        return in_netns(test);
    }
    let mut ran = Command::new(std::env::current_exe().unwrap());
    ran.args(["--exact", name, "--nocapture"]);
    ran.env(IDLE_MS, IDLE.as_millis().to_string());
    let ran = ran.output().unwrap();
    let said = String::from_utf8_lossy(&ran.stdout) + String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success() && said.contains("1 passed"), "{said}");
}

/// There are 4,536 ports for the flows to one target with a source of ours: many more flows than that,
/// one after another, must all get one.
#[test]
fn ports_of_flows_that_are_over_are_used_again() {
    with_short_idle("idle::ports_of_flows_that_are_over_are_used_again", || {
        let router = Router::new();
        let own: IpAddr = "10.0.1.1".parse().unwrap();
        let rule = rule(Proto::Udp, false, 0);
        install(0, &rule, &router.plan(Backend::Tcx, Some(own))).unwrap();
        let program = program(DeviceHook::TcxIngress, "c0").unwrap();
        let device = router.client.ifindex;
        for round in 0..5u16 {
            for n in 0..1500 {
                let client = client(false, 10_000 + round * 1500 + n);
                let packet = Packet::new(UDP, client, rule.from, 10).macs(C0, CLIENT);
                let got =
                    try_run(&program, DeviceHook::TcxIngress, device, &packet.bytes()).unwrap();
                assert_eq!(got.action, REDIRECT, "round {round}, flow {n}");
            }
            sleep(TWICE);
        }
        assert!(stats(&[0]).unwrap()[0].drops.is_empty());
    });
}

/// No timer ends flows: those that are established look after others that are idle.
#[test]
fn established_flows_that_are_over_make_room() {
    const FLOWS: u16 = 1000;
    with_short_idle("idle::established_flows_that_are_over_make_room", || {
        let router = Router::new();
        let rule = rule(Proto::Udp, false, 0);
        install(0, &rule, &router.plan(Backend::Tcx, None)).unwrap();
        let device = router.client.ifindex;
        let [comes, goes] = [DeviceHook::TcxIngress, DeviceHook::TcxEgress].map(|hook| {
            let program = program(hook, "c0").unwrap();
            move |packet: &Packet| _ = try_run(&program, hook, device, &packet.bytes()).unwrap()
        });
        // The first of them must not be idle before the last ones come: looked up once, the programs are quick.
        let establish = |base: u16| {
            for n in 0..FLOWS {
                let client = client(false, base + n);
                let there = Packet::new(UDP, client, rule.from, 10).macs(C0, CLIENT);
                let back = Packet::new(UDP, rule.to, client, 10).macs(S0, TARGET);
                comes(&there);
                goes(&back);
                comes(&there);
            }
        };
        let established = || map_named("flows4").keys().count();
        establish(10_000);
        assert_eq!(established(), 2 * usize::from(FLOWS));
        sleep(TWICE);
        establish(20_000);
        assert_eq!(established(), 2 * usize::from(FLOWS), "the first are gone");
    });
}

/// What comes back on a flow that is over is somebody else's: left alone. While it goes on, it is not.
#[test]
fn what_comes_back_after_the_end_is_left_alone() {
    with_short_idle("idle::what_comes_back_after_the_end_is_left_alone", || {
        let router = Router::new();
        let (udp, tcp) = (rule(Proto::Udp, false, 0), rule(Proto::Tcp, true, 0));
        let plan = router.plan(Backend::Tcx, None);
        install_all(&[udp.clone(), tcp.clone()], &plan);
        let packet = |proto: u8, src: SocketAddr, dst: SocketAddr, flags: u8| {
            let mut packet = Packet::new(proto, src, dst, 10);
            if proto == TCP {
                packet.ip.l4[13] = flags;
                // Each side begins with 1, and has sent no more than its SYN.
                packet.ip.l4[8..12].copy_from_slice(&2u32.to_be_bytes());
            }
            packet.bytes()
        };
        let changed = |hook: DeviceHook, bytes: &[u8]| {
            let got = run(hook, "c0", bytes);
            assert_eq!(got.action, PASS);
            got.packet != bytes
        };
        let comes = |bytes: Vec<u8>| changed(DeviceHook::TcxIngress, &bytes);
        let goes = |bytes: Vec<u8>| changed(DeviceHook::TcxEgress, &bytes);
        let (c4, c6) = (client(false, 7), client(true, 7));
        assert!(comes(packet(UDP, c4, udp.from, 0)));
        let connect = || {
            assert!(comes(packet(TCP, c6, tcp.from, SYN)));
            assert!(goes(packet(TCP, tcp.to, c6, SYN | ACK)));
            assert!(comes(packet(TCP, c6, tcp.from, ACK)));
        };
        connect();
        // Packets of one direction keep the other: three times half the idle time.
        for _ in 0..3 {
            sleep(IDLE / 2 + Duration::from_millis(300));
            assert!(comes(packet(UDP, c4, udp.from, 0)));
        }
        assert!(goes(packet(UDP, udp.to, c4, 0)));
        sleep(TWICE);
        assert!(!goes(packet(UDP, udp.to, c4, 0)), "the UDP flow is over");
        // A connection without packets goes on for days, and for a little while after a FIN.
        assert!(goes(packet(TCP, tcp.to, c6, ACK)));
        assert!(goes(packet(TCP, tcp.to, c6, ACK | FIN)));
        assert!(comes(packet(TCP, c6, tcp.from, ACK)));
        sleep(TWICE);
        assert!(!goes(packet(TCP, tcp.to, c6, ACK)), "closed");
        // A new one from the same port.
        connect();
        // An RST that was forged: the target goes on.
        assert!(comes(packet(TCP, c6, tcp.from, RST)));
        assert!(goes(packet(TCP, tcp.to, c6, ACK)));
        sleep(TWICE);
        assert!(goes(packet(TCP, tcp.to, c6, ACK)), "no FIN, no end");
    });
}
