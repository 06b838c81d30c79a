// SPDX-License-Identifier: GPL-2.0-or-later
//! A million random packets for each redirection program: what it rewrites is what the packet would
//! be with all checksums computed anew, and everything else stays as it is.

use std::net::SocketAddr;

use crate::bpf::packets as packets_of;
use crate::bpf::{ifindex, in_netns, PASS, REDIRECT};
use crate::packets::Packet;
use crate::rig::*;
use crate::support::seed;
use crate::support::sums::checksum;
use mountain::redirect::bpf::hooks::{DeviceHook, ProgramRun};
use mountain::redirect::{Proto, Rule};
use rand::rngs::SmallRng;
use rand::{Rng, RngExt, SeedableRng};

const PACKETS: usize = 1_000_000;
/// Clients have so many ports, so that most packets belong to a flow that is there.
const PORTS: u16 = 64;

/// Makes the flows, where clients come in.
fn make_flows(rules: &[Rule]) {
    for hook in [DeviceHook::TcxIngress, DeviceHook::Xdp] {
        let Some(program) = program(hook, "c0") else {
            continue;
        };
        let all = rules
            .iter()
            .flat_map(|r| (0..PORTS).map(move |port| (r, port)));
        for (r, port) in all {
            let client = client(r.from.is_ipv6(), 20_000 + port);
            let bytes = Packet::new(r.proto.number(), client, r.from, 0).bytes();
            try_run(&program, hook, ifindex("c0"), &bytes);
        }
    }
}

/// A packet of a flow, with whatever may stand around ports and addresses.
fn flow_packet(
    rng: &mut SmallRng,
    hook: DeviceHook,
    reply: bool,
    rules: &[Rule],
) -> (Packet, SocketAddr, SocketAddr) {
    let r = &rules[rng.random_range(0..rules.len())];
    let client = client(r.from.is_ipv6(), 20_000 + rng.random_range(0..PORTS));
    let ((src, dst), new) = match reply {
        false => ((client, r.from), (client, r.to)),
        true => ((r.to, client), (r.from, client)),
    };
    let mut p = Packet::new(r.proto.number(), src, dst, rng.random_range(0..40));
    p.macs = match (hook, reply) {
        (DeviceHook::TcxEgress, _) => [CLIENT, C0],
        (_, true) => [S0, TARGET],
        (_, false) => [C0, CLIENT],
    };
    p.ip.ttl = rng.random_range(2..=255);
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
            (checksum(&l3[..ihl]), ihl, l3[9], &l3[12..20])
        }
        6 if l3.len() >= 40 => (0, 40, l3[6], &l3[8..40]),
        _ => return None,
    };
    (proto == 6 || proto == 17).then(|| {
        let sum = checksum(&[addresses, &l3[l4..]].concat());
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

/// What became of the packets of a case.
#[derive(Debug, Default)]
struct Tally {
    rewritten: usize,
    untouched: usize,
    /// Not taken by BPF_PROG_RUN, which wants whole headers at tcx.
    refused: usize,
}

impl Tally {
    /// A packet that was damaged, and what the program made of it.
    fn damaged(&mut self, (_, hook, action): At, bytes: &[u8], got: Option<ProgramRun>) {
        let Some(got) = got else {
            self.refused += 1;
            return;
        };
        if got.packet == bytes {
            self.untouched += 1;
            return;
        }
        let ttl = bytes[if bytes[14] >> 4 == 4 { 22 } else { 21 }];
        let options = match bytes[14] >> 4 {
            4 => bytes[14] > 0x45,
            _ => bytes[20] == packets_of::HOPOPTS,
        };
        let is_for_kernel = (ttl <= 1 || options) && got.action == passing(hook);
        let right = got.action == action || is_for_kernel;
        assert!(right, "action {} on {bytes:02x?}", got.action);
        assert_eq!(got.packet.len(), bytes.len());
        if !is_fragment(bytes) && !is_unchecked(bytes) {
            assert_eq!(errors(&got.packet), errors(bytes), "{bytes:02x?}");
        }
    }

    /// A packet of a flow, and what the program made of it.
    fn whole(&mut self, (_, hook, action): At, bytes: &[u8], want: &Packet, got: ProgramRun) {
        let out = got.packet;
        // One look-up in 64 goes through the kernel, or back to it for another reason.
        if got.action == passing(hook) && action == XDP_REDIRECT {
            assert_eq!(out, bytes, "passed, but changed");
            self.untouched += 1;
            return;
        }
        assert_eq!(got.action, action, "{bytes:02x?}");
        let want = want.bytes();
        assert!(
            out == want,
            "\n in  {bytes:02x?}\n out {out:02x?}\nwant {want:02x?}"
        );
        self.rewritten += 1;
    }
}

fn run_case(way: &'static Way, reply: bool, seed: u64) {
    let at = if reply { way.reply } else { way.forward };
    in_netns(move || {
        let (dev, hook, action) = at;
        let mut rng = SmallRng::seed_from_u64(seed);
        let router = Router::new();
        let rules = rules();
        install_all(&rules, &router.plan(way.backend, None));
        make_flows(&rules);
        let program = program(hook, dev).unwrap();
        let device = ifindex(dev);
        let mut tally = Tally::default();
        for _ in 0..PACKETS {
            let (packet, src, dst) = flow_packet(&mut rng, hook, reply, &rules);
            let mut bytes = packet.bytes();
            let damaged = rng.random_ratio(1, 4);
            if damaged {
                damage(&mut rng, &mut bytes);
            }
            let got = try_run(&program, hook, device, &bytes);
            if damaged {
                tally.damaged(at, &bytes, got);
            } else {
                // Options are for the kernel to look at: it routes what has them. At XDP nothing is done then.
                let for_every_hop = packet.ip.ext.iter().any(|e| e.0 == packets_of::HOPOPTS);
                let options = for_every_hop || !packet.ip.options.is_empty();
                let is_for_kernel = options && action == REDIRECT;
                let (action, want) = match (is_for_kernel, reply) {
                    (false, _) => (action, packet.rewritten(src, dst).after(action, reply)),
                    (true, false) => (PASS, packet.rewritten(src, dst)),
                    (true, true) => (PASS, packet),
                };
                let got = got.expect("a whole packet");
                tally.whole((dev, hook, action), &bytes, &want, got);
            }
        }
        println!("{} {hook:?}: {tally:?}", way.backend);
        assert!(tally.rewritten > PACKETS / 2 && tally.untouched > PACKETS / 100);
    });
}

/// A test of its own for each, so that they run side by side.
macro_rules! cases {
    ($($name:ident: $way:ident, $reply:expr;)*) => {
        $(#[test]
        fn $name() {
            run_case(&$way, $reply, seed());
        })*
    };
}

cases! {
    tcx_forward: TCX, false;
    tcx_reply: TCX, true;
    tcx_peer_forward: TCX_PEER, false;
    tcx_peer_reply: TCX_PEER, true;
    xdp_forward: XDP, false;
    xdp_redirect_forward: XDP_AND_ON, false;
    xdp_redirect_reply: XDP_AND_ON, true;
}
