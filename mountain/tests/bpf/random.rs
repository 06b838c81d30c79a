// SPDX-License-Identifier: GPL-2.0-or-later
//! A million random packets: whatever comes, the program changes no byte, crashes nothing and
//! does nothing but pass or redirect.

use crate::rig::packets::*;
use crate::rig::{
    alive, fib_rule, only, prog_run, settings, with_rig, Ctx, BOTH, PASS, PLAIN, REDIRECT,
};
use crate::support::seed;
use mountain::bpf::PathMasks as Masks;
use rand::rngs::SmallRng;
use rand::{Rng, RngExt, SeedableRng};

const PACKETS: usize = 1_000_000;

/// Valid packets to start from.
fn seeds() -> Vec<Vec<u8>> {
    let mut all = vec![];
    for v6 in [false, true] {
        for (proto, l4) in [
            (UDP, udp(1, 2, 40)),
            (TCP, tcp(3, 4, ACK, 60)),
            (TCP, tcp(5, 6, SYN, 0)),
            (GRE, vec![0; 80]),
            (ICMP, icmp(8, 7, b"echo")),
            (ICMPV6, icmp(128, 7, b"echo")),
        ] {
            all.push(Ip::new(v6, proto, l4).on(0));
        }
        let quoted = Ip::new(v6, UDP, udp(2, 1, 8));
        let quoted = quoted.with(|ip| (ip.src, ip.dst) = (ip.dst, ip.src));
        let (proto, kind) = if v6 { (ICMPV6, 1) } else { (ICMP, 3) };
        all.push(Ip::new(v6, proto, icmp(kind, 0, &quoted.l3())).on(0));
    }
    let v4 = || Ip::v4(UDP, udp(1, 2, 40));
    all.push(v4().with(|ip| ip.options = vec![1; 40]).on(0));
    all.extend([0x2000, 7].map(|frag| v4().with(|ip| (ip.id, ip.frag) = (5, frag)).on(0)));
    let v6 = || Ip::v6(UDP, udp(1, 2, 40));
    let headers = v6().ext(HOPOPTS, &[0; 6]).ext(DSTOPTS, &[0; 14]);
    all.push(headers.ext(ROUTING, &[0; 22]).on(0));
    all.push(v6().ext(FRAGMENT, &[0, 1, 0, 0, 0, 9]).on(0));
    all.push(v6().ext(FRAGMENT, &[1, 0, 0, 0, 0, 9]).on(0));
    all.push(frame(MACS[0], 0x8100, &[0, 42, 8, 0, 0x45, 0, 0, 0]));
    all
}

/// A packet of the kinds above, a little or much damaged, or noise.
fn random_packet(rng: &mut SmallRng, seeds: &[Vec<u8>], p: &mut Vec<u8>) {
    p.clear();
    if rng.random_ratio(1, 8) {
        // Noise, half of it behind a link-layer header that gets it to the parser.
        p.resize(rng.random_range(14..1600), 0);
        rng.fill_bytes(p);
        if rng.random() {
            let start = &seeds[rng.random_range(0..seeds.len())];
            p[..14].copy_from_slice(&start[..14]);
        }
        return;
    }
    p.extend(&seeds[rng.random_range(0..seeds.len())]);
    for _ in 0..rng.random_range(0..6) {
        // Mostly the headers, less often the link layer, which ends the matter at once.
        let from = if rng.random_ratio(1, 16) { 0 } else { 14 };
        let at = rng.random_range(from..p.len().min(from + 80));
        p[at] = match rng.random_range(0..4) {
            0 => rng.random(),
            1 => p[at] ^ 1 << rng.random_range(0..8),
            2 => 0,
            _ => 255,
        };
    }
    match rng.random_range(0..8) {
        0 => p.truncate(rng.random_range(14..=p.len())),
        1 => {
            let more = rng.random_range(0..1500);
            p.resize(p.len() + more, 0x77);
        }
        _ => {}
    }
}

#[test]
fn no_random_packet_is_changed() {
    let seed = seed();
    with_rig(settings(), move |mut rig| {
        let mut rng = SmallRng::seed_from_u64(seed);
        let seeds = seeds();
        let (mut packet, mut out) = (Vec::new(), vec![0; 4096]);
        let (mut passed, mut redirected, mut refused) = (0, 0, 0);
        let rule = fib_rule(|r| r.sport = Some((100, 200)));
        let masks = [only(0), only(1), BOTH, alive(0b10, BOTH), Masks::default()];
        let mut tried = 0;
        while passed + redirected < PACKETS {
            if tried % 10_000 == 0 {
                // Another verdict, rules or none.
                let rules = [rule.clone()];
                rig.topology(&rules[..rng.random_range(0..2)]);
                rig.masks(masks[rng.random_range(0..masks.len())]);
            }
            tried += 1;
            random_packet(&mut rng, &seeds, &mut packet);
            let mut ctx = PLAIN;
            if rng.random_ratio(1, 8) {
                ctx = Ctx {
                    mark: rng.random(),
                    ingress_ifindex: rng.random_range(0..4),
                    gso_segs: rng.random_range(0..64),
                    gso_size: rng.random_range(0..65536),
                };
            }
            let dev = rng.random_range(0..2);
            let what = || format!("packet {tried} of seed {seed}: {packet:02x?}");
            match prog_run(&rig.steer, rig.ifindex[dev], &packet, ctx, 1, &mut out) {
                Ok((action, len, _)) => {
                    let same = len == packet.len() && out[..len] == packet[..];
                    assert!(same, "{} was changed", what());
                    match action {
                        PASS => passed += 1,
                        REDIRECT => redirected += 1,
                        _ => panic!("{}: action {action}", what()),
                    }
                }
                Err(e) => {
                    assert!(packet.len() < 14 + 40, "{}: {e}", what());
                    refused += 1;
                }
            }
        }
        println!("{passed} passed, {redirected} redirected, {refused} too short to run");
        let stats = rig.steer.stats().unwrap();
        println!("{stats:?}");
        // The packets reached what they were meant to try.
        let names = "redirected flow_new flow_untracked \
            pass_parse pass_dest pass_mtu pass_fib_rule pass_no_path";
        for name in names.split_whitespace() {
            assert!(stats[name] > 100, "{name}: {}", stats[name]);
        }
        assert!(redirected > PACKETS / 50 && passed > PACKETS / 50);
        // And the program works as before.
        rig.topology(&[]);
        rig.masks(only(1));
        rig.clear_flows();
        rig.clear_note();
        assert_eq!(rig.send_ip(0, &Ip::v4(UDP, udp(1, 2, 3))), 1);
    });
}
