// SPDX-License-Identifier: GPL-2.0-or-later
//! A million random packets for each redirection program: what it rewrites is what the packet would
//! be with all checksums computed anew, and everything else stays as it is.

use std::net::SocketAddr;
use std::time::Instant;

use crate::bpf::packets as packets_of;
use crate::bpf::{ifindex, in_netns, PASS, REDIRECT};
use crate::packets::Packet;
use crate::rig::*;
use mountain::redirect::bpf::hooks::{DeviceHook, ProgramRun};
use mountain::redirect::{Backend, Proto, Rule};
use rand::rngs::SmallRng;
use rand::{Rng, RngExt, SeedableRng};

const PACKETS: usize = 1_000_000;
/// Clients have so many ports, so that most packets belong to a flow that is there.
const PORTS: u16 = 64;

fn rules() -> Vec<Rule> {
    let all = |proto| [rule(proto, false, 0), rule(proto, true, 0)];
    [all(Proto::Udp), all(Proto::Tcp)].concat()
}

/// A program, the direction it rewrites and what it does with such packets.
struct Case {
    backend: Backend,
    dev: &'static str,
    hook: DeviceHook,
    reply: bool,
    action: i32,
    /// Lifetime one less, and the Ethernet header of the way out.
    leaves: bool,
    framed: bool,
}

/// A packet of a flow, with whatever may stand around ports and addresses.
fn flow_packet(
    rng: &mut SmallRng,
    case: &Case,
    rules: &[Rule],
) -> (Packet, SocketAddr, SocketAddr) {
    let r = &rules[rng.random_range(0..rules.len())];
    let client = client(r.from.is_ipv6(), 20_000 + rng.random_range(0..PORTS));
    let ((src, dst), new) = match case.reply {
        false => ((client, r.from), (client, r.to)),
        true => ((r.to, client), (r.from, client)),
    };
    let mut p = Packet::new(r.proto.number(), src, dst, rng.random_range(0..40));
    p.macs = match (case.hook, case.reply) {
        (DeviceHook::TcxEgress, _) => [CLIENT, C0],
        (_, true) => [S0, TARGET],
        (_, false) => [C0, CLIENT],
    };
    p.ttl = rng.random_range(2..=255);
    p.ip.dsfield = rng.random();
    // All but ports, UDP's length and TCP's header length.
    let (fixed, l4) = (
        if r.proto == Proto::Tcp { 4..12 } else { 0..0 },
        &mut p.ip.l4,
    );
    rng.fill_bytes(&mut l4[fixed]);
    let rest = if r.proto == Proto::Tcp { 18.. } else { 8.. };
    if l4.len() > rest.start {
        rng.fill_bytes(&mut l4[rest]);
    }
    if r.from.is_ipv6() {
        for kind in [packets_of::HOPOPTS, packets_of::DSTOPTS] {
            if rng.random_ratio(1, 8) {
                let mut body = vec![0; 6 + 8 * rng.random_range(0..3)];
                rng.fill_bytes(&mut body);
                p.ip = p.ip.ext(kind, &body);
            }
        }
    } else if rng.random_ratio(1, 8) {
        p.ip.options = vec![0; 4 * rng.random_range(1..=10)];
        rng.fill_bytes(&mut p.ip.options);
    }
    p.unchecked = r.proto == Proto::Udp && rng.random_ratio(1, 8);
    (p, new.0, new.1)
}

/// Something done to a packet, so that it is another flow's or nobody's.
fn damage(rng: &mut SmallRng, bytes: &mut Vec<u8>) {
    for _ in 0..rng.random_range(1..4) {
        let at = rng.random_range(12..bytes.len().min(80));
        bytes[at] ^= 1 << rng.random_range(0..8);
    }
    if rng.random_ratio(1, 8) {
        let len = rng.random_range(14..=bytes.len());
        bytes.truncate(len);
    }
}

/// The sums that must hold after any rewriting: what was wrong by some amount before is wrong by the
/// same amount afterwards. `None`: not a packet whose sums one can tell.
fn errors(bytes: &[u8]) -> Option<(u16, u16)> {
    let l3 = bytes.get(14..)?;
    let (ip_sum, l4, proto, addresses) = match l3.first()? >> 4 {
        4 => {
            let ihl = usize::from(l3[0] & 15) * 4;
            if ihl < 20 || l3.len() < ihl {
                return None;
            }
            (crate::packets::sum(&l3[..ihl]), ihl, l3[9], &l3[12..20])
        }
        6 if l3.len() >= 40 => (0, 40, l3[6], &l3[8..40]),
        _ => return None,
    };
    (proto == 6 || proto == 17).then(|| {
        let sum = crate::packets::sum(&[addresses, &l3[l4..]].concat());
        (ip_sum % 0xffff, sum % 0xffff)
    })
}

/// IPv4 whose transport checksum is not over what is here.
fn is_fragment(b: &[u8]) -> bool {
    b[14] >> 4 == 4 && (b[20] & 0x3f, b[21]) != (0, 0)
}

/// UDP without a checksum, which stays without one; with IPv6 too (RFC 6935, section 5).
fn is_unchecked(b: &[u8]) -> bool {
    let (proto, l4) = match b[14] >> 4 {
        4 => (b[23], 14 + usize::from(b[14] & 15) * 4),
        _ => (b[20], 14 + 40),
    };
    proto == 17 && b.get(l4 + 6..l4 + 8) == Some(&[0, 0])
}

fn run_case(case: &'static Case, seed: u64) {
    in_netns(move || {
        let start = Instant::now();
        let mut rng = SmallRng::seed_from_u64(seed);
        let router = Router::new();
        let rules = rules();
        install_all(&rules, &router.plan(case.backend, None));
        let program = program(case.hook, case.dev).unwrap();
        let device = ifindex(case.dev);
        let pass = if case.hook == DeviceHook::Xdp {
            XDP_PASS
        } else {
            PASS
        };
        // Flows are made where clients come in.
        let forward = [DeviceHook::TcxIngress, DeviceHook::Xdp]
            .map(|hook| (hook, crate::rig::program(hook, "c0")));
        for r in &rules {
            for port in 0..PORTS {
                let client = client(r.from.is_ipv6(), 20_000 + port);
                let bytes = Packet::new(r.proto.number(), client, r.from, 0).bytes();
                for (hook, program) in &forward {
                    if let Some(program) = program {
                        try_run(program, *hook, ifindex("c0"), &bytes);
                    }
                }
            }
        }
        let (mut rewritten, mut untouched, mut refused) = (0, 0, 0);
        for n in 0..PACKETS {
            let (packet, src, dst) = flow_packet(&mut rng, case, &rules);
            let mut bytes = packet.bytes();
            if rng.random_ratio(1, 4) {
                damage(&mut rng, &mut bytes);
                let Some(ProgramRun {
                    action,
                    packet: out,
                    ..
                }) = try_run(&program, case.hook, device, &bytes)
                else {
                    // BPF_PROG_RUN wants whole headers at tcx.
                    refused += 1;
                    continue;
                };
                if out == bytes {
                    untouched += 1;
                    continue;
                }
                let ttl = if bytes[14] >> 4 == 4 {
                    bytes[22]
                } else {
                    bytes[21]
                };
                let answered_by_kernel = ttl <= 1 && action == pass;
                assert!(
                    action == case.action || answered_by_kernel,
                    "packet {n}: {bytes:02x?}"
                );
                assert_eq!(out.len(), bytes.len());
                if !is_fragment(&bytes) && !is_unchecked(&bytes) {
                    assert_eq!(errors(&out), errors(&bytes), "packet {n}: {bytes:02x?}");
                }
                continue;
            }
            let mut want = packet.rewritten(src, dst);
            if case.leaves {
                want.ttl -= 1;
            }
            if case.framed {
                want.macs = if case.reply {
                    [CLIENT, C0]
                } else {
                    [TARGET, S0]
                };
            }
            let ProgramRun {
                action,
                packet: out,
                ..
            } = try_run(&program, case.hook, device, &bytes).expect("a whole packet");
            // One look-up in 64 goes through the kernel, or back to it for another reason.
            if action == pass && case.action == XDP_REDIRECT {
                assert_eq!(out, bytes, "packet {n} was passed, but changed");
                untouched += 1;
                continue;
            }
            assert_eq!(action, case.action, "packet {n}: {bytes:02x?}");
            assert!(
                out == want.bytes(),
                "packet {n}:\n in  {bytes:02x?}\n out {out:02x?}\nwant {:02x?}",
                want.bytes()
            );
            rewritten += 1;
        }
        println!(
            "{} {:?}: {rewritten} rewritten as they should, {untouched} untouched, {refused} not \
             taken by BPF_PROG_RUN, {:?}",
            case.backend,
            case.hook,
            start.elapsed()
        );
        assert!(rewritten > PACKETS / 2 && untouched > PACKETS / 100);
    });
}

const fn case(
    backend: Backend,
    dev: &'static str,
    hook: DeviceHook,
    reply: bool,
    action: i32,
) -> Case {
    Case {
        backend,
        dev,
        hook,
        reply,
        action,
        leaves: action != PASS && action != XDP_PASS,
        framed: action == XDP_REDIRECT,
    }
}

/// A test of its own for each, so that they run side by side.
macro_rules! cases {
    ($($name:ident: $case:expr;)*) => {
        $(#[test]
        fn $name() {
            static CASE: Case = $case;
            let seed: u64 = std::env::var("MOUNTAIN_TEST_SEED")
                .map_or_else(|_| rand::random(), |s| s.parse().unwrap());
            println!("seed {seed} (MOUNTAIN_TEST_SEED={seed} repeats it)");
            run_case(&CASE, seed);
        })*
    };
}

cases! {
    tcx_forward: case(Backend::Tcx, "c0", DeviceHook::TcxIngress, false, PASS);
    tcx_reply: case(Backend::Tcx, "c0", DeviceHook::TcxEgress, true, PASS);
    tcx_peer_forward: case(Backend::TcxPeer, "c0", DeviceHook::TcxIngress, false, REDIRECT);
    tcx_peer_reply: case(Backend::TcxPeer, "s0", DeviceHook::TcxIngress, true, REDIRECT);
    xdp_forward: case(Backend::Xdp, "c0", DeviceHook::Xdp, false, XDP_PASS);
    xdp_redirect_forward: case(Backend::XdpRedirect, "c0", DeviceHook::Xdp, false, XDP_REDIRECT);
    xdp_redirect_reply: case(Backend::XdpRedirect, "s0", DeviceHook::Xdp, true, XDP_REDIRECT);
}
