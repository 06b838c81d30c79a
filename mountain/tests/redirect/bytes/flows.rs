// SPDX-License-Identifier: GPL-2.0-or-later
//! What a flow has besides its addresses: a port of its own at the target, an end of its rule, a log, and
//! whether it is established.

use super::*;

use libbpf_rs::MapCore;
use mountain::redirect::bpf::read_log;
use socket2::{Domain, Socket, Type};

/// The source port that a packet was given.
pub fn port_given(got: &ProgramRun, sent: &Sent) -> u16 {
    let l4 = got.packet.len() - sent.packet.ip.l4.len();
    u16::from_be_bytes([got.packet[l4], got.packet[l4 + 1]])
}

/// Two rules, one target: what one client sends by both from the same port must come back apart.
#[test]
fn rules_that_share_a_target_are_told_apart() {
    each_way(|way| {
        for (id, first) in rules().into_iter().enumerate() {
            let second = rule(first.proto, first.from.is_ipv6(), 1);
            install(10 + id as u32, &second, &way.plan()).unwrap();
            way.check_forward("the first keeps its port", &forward(&first, 40_008));

            let mut sent = forward(&second, 40_008);
            let client = sent.src;
            let (dev, hook, action) = way.forward;
            let got = run_fast(hook, dev, &sent.packet.bytes(), action);
            assert_eq!(got.action, action);
            sent.src.set_port(port_given(&got, &sent));
            assert!((61_000..=65_535).contains(&sent.src.port()), "{}", sent.src);
            way.check_forward("the second gets another", &sent);

            let packet = Packet::new(first.proto.number(), second.to, sent.src, 9);
            let answer = Sent {
                packet: packet.macs(S0, TARGET),
                src: second.from,
                dst: client,
            };
            way.check_reply("to the second", &answer);
            way.check_reply("to the first", &reply(&first, 40_008));
        }
    });
}

#[test]
fn with_source_nat_the_target_sees_this_host() {
    for way in [TCX, TCX_PEER, XDP_AND_ON] {
        in_netns(move || {
            let router = Router::new();
            for (id, r) in (0..).zip(rules()) {
                with_source_nat(way.backend, &router, id, &r);
            }
        });
    }
}

fn with_source_nat(backend: Backend, router: &Router, id: u32, r: &Rule) {
    let own = either(r.from.is_ipv6(), "10.0.1.1", "fd01::1");
    let mut plan = router.plan(backend, Some(own));
    install(id, r, &plan).unwrap();
    let (hook, action) = match backend {
        Backend::XdpRedirect => (DeviceHook::Xdp, XDP_REDIRECT),
        _ => (DeviceHook::TcxIngress, REDIRECT),
    };
    let check = |what: &str, dev, packet: &Packet, want: Packet, reply| {
        let got = run_fast(hook, dev, &packet.bytes(), action);
        let want = want.after(action, reply).bytes();
        expect(&format!("{backend} {r}{what}"), got, action, &want);
    };
    let mut sent = forward(r, 40_009);
    let client = sent.src;
    let first = run_fast(hook, "c0", &sent.packet.bytes(), action);
    sent.src = SocketAddr::new(own, port_given(&first, &sent));
    assert!((61_000..=65_535).contains(&sent.src.port()), "{}", sent.src);
    let want = sent.rewritten().after(action, false).bytes();
    expect(&format!("{backend} {r}"), first, action, &want);

    let answer = Packet::new(r.proto.number(), r.to, sent.src, 9).macs(S0, TARGET);
    let back = answer.rewritten(r.from, client);
    check(", reply", "s0", &answer, back, true);
    if hook == DeviceHook::Xdp {
        // What tcx has done in between (no neighbour was known) leaves nothing wrong.
        let bytes = sent.packet.bytes();
        assert_eq!(run(DeviceHook::TcxIngress, "c0", &bytes).action, REDIRECT);
        std::thread::sleep(std::time::Duration::from_millis(300));
        run(DeviceHook::TcxIngress, "c0", &bytes);
        check(", after tcx", "c0", &sent.packet, sent.rewritten(), false);
    } else {
        let last = sent.packet.ttl(1).bytes();
        assert_eq!(run(hook, "c0", &last).action, 2, "TC_ACT_SHOT");
        assert_eq!(stats(&[id]).unwrap()[0].drops["ttl"], 1);
    }
    plan.backend = Backend::Xdp;
    let refused = install(100, &rule(r.proto, false, 9), &plan).unwrap_err();
    assert!(refused.to_string().contains("source address"), "{refused}");
}

#[test]
fn a_rule_that_is_gone_redirects_nothing_and_leaves_nothing() {
    each_way(|way| {
        for (id, r) in (0..).zip(rules()) {
            let sent = forward(&r, 40_010);
            way.check_forward("before", &sent);
            let again = install(99, &r, &way.plan()).unwrap_err();
            assert!(again.to_string().contains("another rule"), "{again:#}");
            remove(id, &r, &way.plan()).unwrap();
            if id < 3 {
                way.check_untouched("after", &sent.packet.bytes());
            }
        }
        for dev in ["c0", "s0"] {
            for hook in DeviceHook::ALL {
                assert!(program(hook, dev).is_none(), "{hook:?} of {dev}");
            }
        }
        assert_eq!(stats(&[0]).unwrap(), vec![]);
    });
}

#[test]
fn the_log_has_a_line_for_a_packet_and_no_more_than_asked_for() {
    in_netns(|| {
        let router = Router::new();
        let plan = router.plan(Backend::Tcx, None);
        let (mut r, silent) = (rule(Proto::Udp, false, 0), rule(Proto::Tcp, true, 0));
        r.log = Some(2);
        install(7, &r, &plan).unwrap();
        install(8, &silent, &plan).unwrap();
        // In one second of the clock that the program reads.
        while mountain::bpf::now_ns() % 1_000_000_000 > 500_000_000 {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        for (hook, sent) in [
            (DeviceHook::TcxIngress, forward(&r, 10_004)),
            (DeviceHook::TcxEgress, reply(&r, 10_004)),
            (DeviceHook::TcxIngress, forward(&r, 10_004)),
            (DeviceHook::TcxIngress, forward(&silent, 10_004)),
        ] {
            run(hook, "c0", &sent.packet.bytes());
        }
        let mut lines = vec![];
        read_log(true, |line| {
            lines.push(line.to_owned());
            lines.len() < 2
        })
        .unwrap();
        let want = [
            "FORWARD UDP 10.0.8.18:10004 > 10.0.8.17:8080 => 10.0.1.2:8083",
            "REPLY UDP 10.0.1.2:8083 > 10.0.8.18:10004 => 10.0.8.17:8080",
        ];
        assert_eq!(lines, want);
        // There is no third: the reader ends with the rules.
        remove(7, &r, &plan).unwrap();
        remove(8, &silent, &plan).unwrap();
        assert!(read_log(false, |line| panic!("{line}")).is_err());
    });
}

/// A connection begins with its SYN. One that was under way before the rule stays where it is, but half
/// of a redirected one that was lost is found again.
#[test]
fn tcp_connections_under_way_stay_where_they_are() {
    each_way(|way| {
        for r in rules().into_iter().filter(|r| r.proto == Proto::Tcp) {
            let syn = forward(&r, 40_020);
            let later = with_flags(&syn, packets_of::ACK);
            let ours = connecting(r.from, syn.src);
            way.check_untouched("under way", &later.packet.bytes());
            drop(ours);
            let syn_ack = with_flags(&syn, packets_of::SYN | packets_of::ACK);
            way.check_untouched("a SYN ACK of the client", &syn_ack.packet.bytes());
            way.check_forward("a new one", &syn);
            way.check_forward("its next packet", &later);
            let half = map_named(if r.from.is_ipv6() { "half6" } else { "half4" });
            let port = 8080u16.to_be_bytes();
            let forward =
                |k: &Vec<u8>| k.ends_with(&[6, 0, 0, 0]) && k.windows(2).any(|word| word == port);
            let keys: Vec<Vec<u8>> = half.keys().filter(forward).collect();
            assert!(!keys.is_empty());
            for key in keys {
                half.delete(&key).unwrap();
            }
            way.check_forward("with this half lost", &later);
        }
    });
}

/// A flow that was lost is made again from the midst of it, unless it may be somebody else's: a socket's
/// of this host, or one that passes through it.
#[test]
fn a_lost_connection_is_taken_up_again_where_it_can_be_no_other() {
    each_way(|way| {
        let tcp = |(_, r): &(u32, Rule)| r.proto == Proto::Tcp;
        for (id, r) in (10..).zip(rules()).filter(tcp) {
            let syn = forward(&r, 40_021);
            let rst = with_flags(&syn, packets_of::ACK | 4);
            way.check_untouched("an RST", &rst.packet.bytes());
            let later = with_flags(&syn, packets_of::ACK);
            way.check_forward("sent to this host", &later);
            let answer = with_flags(&reply(&r, 40_021), packets_of::ACK);
            way.check_reply("sent to this host", &answer);

            let mut through = r.clone();
            let other = either(r.from.is_ipv6(), "10.0.8.99", "fd08::99");
            through.from.set_ip(other);
            install(id, &through, &way.plan()).unwrap();
            let syn = forward(&through, 40_022);
            let later = with_flags(&syn, packets_of::ACK);
            way.check_untouched("sent through this host", &later.packet.bytes());
            way.check_forward("sent through this host, a new one", &syn);
        }
    });
}

/// A flow is established when the client has answered the target, and not before.
#[test]
fn what_nobody_has_answered_is_not_established() {
    each_way(|way| {
        for r in rules() {
            let (first, mut answer) = (forward(&r, 40_023), reply(&r, 40_023));
            let flows = map_named(if r.from.is_ipv6() { "flows6" } else { "flows4" });
            let of_proto = |k: &Vec<u8>| k[k.len() - 4] == r.proto.number();
            let count = || flows.keys().filter(of_proto).count();
            let what = format!("{} {r}", way.backend);
            let (mut later, mut forged) = (first.clone(), vec![]);
            if r.proto == Proto::Tcp {
                let syn_ack = with_flags(&answer, packets_of::SYN | packets_of::ACK);
                answer = with_numbers(&syn_ack, 7000, 1);
                let ack = |n| with_numbers(&with_flags(&first, packets_of::ACK), 1, n);
                later = ack(7001);
                // The SYN-ACK carries 333 bytes.
                forged = vec![ack(7000), ack(7002 + 333), first.clone()];
            }
            for _ in 0..3 {
                way.check_forward(&what, &first);
                assert_eq!(count(), 0, "{what}: no answer");
            }
            way.check_reply(&what, &answer);
            for forged in forged {
                way.check_forward(&what, &forged);
                assert_eq!(count(), 0, "{what}: forged");
            }
            way.check_forward(&what, &later);
            assert_eq!(count(), 2, "{what}: both directions");
            way.check_forward(&what, &later);
            way.check_reply(&what, &answer);
        }
    });
}

/// A target that has taken data with the SYN (TCP Fast Open) may send before the client has answered, and the first ACK
/// that comes may be one of that.
#[test]
fn what_a_target_sends_early_is_acknowledged_too() {
    each_way(|way| {
        for r in rules().into_iter().filter(|r| r.proto == Proto::Tcp) {
            let flows = map_named(if r.from.is_ipv6() { "flows6" } else { "flows4" });
            let of_tcp = |k: &Vec<u8>| k[k.len() - 4] == r.proto.number();
            let count = || flows.keys().filter(of_tcp).count();
            let what = format!("{} {r}", way.backend);
            let answer = reply(&r, 40_024);
            let syn = forward(&r, 40_024);
            let ack = |n| with_numbers(&with_flags(&syn, packets_of::ACK), 1, n);
            let syn_ack = with_flags(&answer, packets_of::SYN | packets_of::ACK)
                .with(|p| p.ip.l4.truncate(p.ip.l4.len() - 333));
            let early = |n| with_numbers(&with_flags(&answer, packets_of::ACK), n, 101);
            way.check_forward(&what, &syn);
            way.check_reply(&what, &with_numbers(&syn_ack, 7000, 101));
            for n in [7001 + 333, 7001, 7001 + 333] {
                way.check_reply(&what, &early(n));
            }
            for forged in [7000, 7002 + 2 * 333] {
                way.check_forward(&what, &ack(forged));
                assert_eq!(count(), 0, "{what}: forged");
            }
            way.check_forward(&what, &ack(7001 + 333));
            assert_eq!(count(), 2, "{what}: both directions");
        }
    });
}

fn with_flags(sent: &Sent, flags: u8) -> Sent {
    sent.clone().with(|p| p.ip.l4[13] = flags)
}

fn with_numbers(sent: &Sent, seq: u32, ack: u32) -> Sent {
    sent.clone().with(|p| {
        p.ip.l4[4..8].copy_from_slice(&seq.to_be_bytes());
        p.ip.l4[8..12].copy_from_slice(&ack.to_be_bytes());
    })
}

/// A socket of this host that has a connection from `local` to `remote`, begun at least.
fn connecting(local: SocketAddr, remote: SocketAddr) -> Socket {
    let socket = Socket::new(Domain::for_address(local), Type::STREAM, None).unwrap();
    socket.set_nonblocking(true).unwrap();
    socket.set_reuse_address(true).unwrap();
    socket.bind(&local.into()).unwrap();
    let refused = socket.connect(&remote.into()).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EINPROGRESS));
    socket
}
