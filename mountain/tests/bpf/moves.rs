// SPDX-License-Identifier: GPL-2.0-or-later
//! Which path the steering program gives a flow, when it moves one, and what it counts, through
//! BPF_PROG_RUN in real time. Every check takes the time that really passed into account.

use std::net::IpAddr;
use std::ops::Range;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::rig::packets::*;
use crate::rig::{
    alive, all_but, ejected, ms, only, patient, rig_groups, settings, with_rig, Rig, BOTH, PASS,
    PLAIN, REDIRECT,
};
use crate::support::seed;
use mountain::bpf::flows::{Class, FlowKey, Move, MoveReason};
use mountain::bpf::{PathMasks as Masks, ProgramGroup, SteerMode, SteerProgram};
use mountain::measure::wire::DEFAULT_PORT;
use mountain::steer::rendezvous::{self, choose, inv_weight, path_salt};
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};

fn flow(port: u16) -> Ip {
    Ip::v4(UDP, udp(port, 2, 20))
}

fn packet(port: u16, payload: usize) -> Vec<u8> {
    Ip::v4(UDP, udp(port, 2, payload)).on(0)
}

/// The flow's hash as the program computes it, which [`choose`] takes.
fn flow_hash(key: &FlowKey) -> u32 {
    let mut bytes = [0; 40];
    for (part, address) in [(0, key.source.ip()), (16, key.destination.ip())] {
        match address {
            IpAddr::V4(a) => bytes[part..part + 4].copy_from_slice(&a.octets()),
            IpAddr::V6(a) => bytes[part..part + 16].copy_from_slice(&a.octets()),
        }
    }
    bytes[32..34].copy_from_slice(&key.source.port().to_be_bytes());
    bytes[34..36].copy_from_slice(&key.destination.port().to_be_bytes());
    bytes[36..38].copy_from_slice(&[key.proto, key.source.is_ipv6().into()]);
    let word = |i: usize| u32::from_ne_bytes(bytes[4 * i..4 * i + 4].try_into().unwrap());
    rendezvous::flow_hash(&std::array::from_fn(word), settings().hash_seed)
}

/// A source port whose flow hashes to `member` of two in the rig's IPv4 group.
fn port_of(member: usize) -> u16 {
    let salts = [path_salt(&[0]), path_salt(&[1])];
    (1000..)
        .find(|&port| {
            let hash = flow_hash(&flow(port).key(port, 2));
            choose(hash, &salts, &[inv_weight(1); 2], 0b11) == Some(member)
        })
        .unwrap()
}

/// A group of random members.
struct RandomGroup {
    v6: bool,
    members: Vec<(usize, u32)>,
    salts: Vec<u32>,
    mask: u16,
}

impl RandomGroup {
    /// If `full`, of full size without exceptions and with weights that do not differ too much, so that every
    /// member is tried.
    fn new(rng: &mut StdRng, full: bool) -> Self {
        let (least, lightest) = if full { (16, 128) } else { (1, 1) };
        let (n, v6) = (rng.random_range(least..=16), rng.random());
        let weight = |rng: &mut StdRng| inv_weight(rng.random_range(lightest..=256));
        let all = ((1u32 << n) - 1) as u16;
        let some = rng.random::<u16>() & all;
        Self {
            v6,
            members: (0..n)
                .map(|i| (10 + i + 20 * v6 as usize, weight(rng)))
                .collect(),
            salts: (0..n).map(|_| rng.random()).collect(),
            mask: if some == 0 || full { all } else { some },
        }
    }

    /// The gateway of member `i`.
    fn mac(i: usize) -> [u8; 6] {
        [2, 0, 0, 0, 9, i as u8]
    }

    /// Has the program steer this group alone.
    fn load(&self, rig: &mut Rig) {
        for (i, (id, _)) in self.members.iter().enumerate() {
            rig.set_path(*id, i % 2, |path| {
                path.ipv6 = self.v6;
                path.mac = Some(Self::mac(i));
                path.salt = self.salts[i];
            });
        }
        let prefix = if self.v6 { "::/0" } else { "0.0.0.0/0" };
        let group = ProgramGroup {
            members: self.members.clone(),
            prefixes: vec![prefix.parse().unwrap()],
        };
        rig.regroup(&[group], &[], &all_but(&[]));
        let masks = Masks {
            latency: self.mask,
            ..Masks::default()
        };
        rig.steer
            .set_masks(0, alive(u16::MAX >> (16 - self.members.len()), masks));
    }

    /// The first packet of a random flow, and its key.
    fn random_flow(&self, rng: &mut StdRng) -> (Ip, FlowKey) {
        let (mut sport, dport) = (rng.random(), rng.random());
        if rng.random_ratio(1, 16) {
            sport = DEFAULT_PORT;
        }
        let (proto, l4) = match rng.random() {
            true => (UDP, udp(sport, dport, 3)),
            false => (TCP, tcp(sport, dport, SYN, 0)),
        };
        let ip = Ip::new(self.v6, proto, l4).with(|ip| {
            ip.src = match self.v6 {
                false => (rng.next_u32() | 1).to_be_bytes().into(),
                true => rng.random::<[u8; 16]>().into(),
            }
        });
        let key = ip.key(sport, dport);
        (ip, key)
    }
}

#[test]
fn new_flows_go_where_rendezvous_says() {
    let seed = seed();
    with_rig(settings(), move |mut rig| {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut chosen = [0u32; 16];
        for round in 0..50 {
            let group = RandomGroup::new(&mut rng, round < 8);
            group.load(&mut rig);
            let weights: Vec<u32> = group.members.iter().map(|m| m.1).collect();
            for _ in 0..200 {
                let (ip, key) = group.random_flow(&mut rng);
                let want = choose(flow_hash(&key), &group.salts, &weights, group.mask).unwrap();
                // It comes by a member's device and gateway, like any packet of this group.
                let here = rng.random_range(0..weights.len());
                let mut p = ip.on(0);
                p[..6].copy_from_slice(&RandomGroup::mac(here));
                let outcome = rig.run(here % 2, &p, PLAIN);
                let got = (outcome.action, outcome.note.map(|note| note.path as usize));
                // A reflector answers on the path that it was asked by.
                let stays = ip.proto == UDP && key.source.port() == DEFAULT_PORT;
                let expected = match stays || want == here {
                    true => (PASS, None),
                    false => (REDIRECT, Some(group.members[want].0)),
                };
                assert_eq!(got, expected, "{key:?} mask {:b}", group.mask);
                rig.clear_note();
                chosen[want] += !stays as u32;
            }
        }
        let all_tried = chosen.iter().all(|&n| n > 5);
        assert!(all_tried, "{chosen:?}");
    });
}

#[test]
fn a_gap_is_told_by_the_exact_clock_alone() {
    with_rig(patient(), |mut rig| {
        // the margin is 1 ms
        let (p, by_u1) = (packet(1, 20), flow(1).on(1));
        for _ in 0..5 {
            rig.clear_flows();
            rig.masks(only(0));
            for _ in 0..3 {
                rig.send(0, &p);
            }
            // Stamped by a clock that may be ticks behind: 3 ms tell nothing, unless we were halted.
            let before = Instant::now();
            rig.masks(only(1));
            sleep(ms(3));
            let to = rig.send(0, &p);
            assert!(to == 0 || before.elapsed() > ms(28), "a coarse gap");
            // That packet was stamped exactly.
            sleep(ms(3));
            assert_eq!(rig.send(0, &p), 1, "an exact gap");
            // On a path that it may use, coarse again, also in the tick of an exact stamp.
            rig.send(1, &by_u1);
            let before = Instant::now();
            rig.masks(only(0));
            sleep(ms(3));
            let to = rig.send(1, &by_u1);
            assert!(to == 1 || before.elapsed() > ms(28), "a coarse gap again");
        }
    });
}

/// The only move since the log was read last, from path 0 to path 1.
#[track_caller]
fn only_move(rig: &Rig, reason: MoveReason) -> Move {
    let mut log = rig.moves.drain().unwrap();
    assert_eq!(log.len(), 1, "{log:?}");
    let one = log.remove(0);
    assert_eq!((one.from, one.to, one.reason), (0, 1, reason));
    one
}

#[test]
fn flows_move_in_a_gap_and_not_inside_it() {
    with_rig(patient(), |mut rig| {
        let p = packet(1, 20);
        rig.masks(only(0));
        rig.send(0, &p);
        rig.steer.set_delays(0, 80_000, 20_000);
        rig.steer.set_delays(1, 90_000, 10_000);
        let need = Duration::from_micros(80_000 - 10_000 + 1000);
        rig.masks(only(1));
        let (mut stayed, mut moved) = (0, 0);
        let pauses = [0, 0, 5, 0, 20, 40, 60, 5, 30, 80].into_iter().cycle();
        for (n, pause) in pauses.enumerate() {
            // On a machine that is halted now and then it may take more than one round.
            if n >= 10 && stayed >= 3 && moved >= 1 || n >= 100 {
                break;
            }
            let before_previous = Instant::now();
            assert_eq!(rig.send(0, &p), 0, "left {pause} ms before its gap");
            let after_previous = Instant::now();
            sleep(ms(pause));
            let shortest = after_previous.elapsed();
            let to = rig.send(0, &p);
            let longest = before_previous.elapsed();
            if longest < need {
                assert_eq!(to, 0, "moved within {longest:?}");
                stayed += 1;
            } else if shortest >= need {
                assert_eq!(to, 1, "not moved after {shortest:?}");
                moved += 1;
                let m = only_move(&rig, MoveReason::Flowlet);
                assert_eq!((m.class, m.need_us), (Class::Latency, 71_000));
                assert_eq!(m.key, rig.flow().key);
                let gap = Duration::from_micros(m.gap_us);
                assert!((shortest..=longest).contains(&gap), "{m:?}");
                assert_eq!(rig.flow().moves, 1);
            }
            if to == 1 {
                // Back at once, to try again: the path it came to is dead for a moment.
                rig.masks(alive(0b01, only(0)));
                assert_eq!(rig.send(0, &p), 0);
                rig.clear_flows();
                rig.masks(only(0));
                rig.send(0, &p);
                rig.moves.drain().unwrap();
                rig.masks(only(1));
            }
        }
        let enough = stayed >= 3 && moved >= 1;
        assert!(enough, "{stayed} stayed, {moved} moved: too slow a machine");
        assert_eq!(rig.stat("move_forced"), 0);
    });
}

#[test]
fn without_a_gap_a_move_is_forced_in_the_end() {
    with_rig(settings(), |mut rig| {
        // after 100 ms
        let p = packet(1, 20);
        rig.masks(only(0));
        rig.send(0, &p);
        rig.steer.set_delays(0, 10_000_000, 0); // a gap of 10 s
        rig.masks(BOTH);
        sleep(ms(120));
        rig.send(0, &p);
        assert_eq!(rig.flow().moves, 0, "moved though it may stay");
        let before = Instant::now();
        rig.masks(only(1));
        let after = Instant::now();
        // Verdicts that do not change anything do not put it off.
        let moved = loop {
            let (soonest, to) = (after.elapsed(), rig.send(0, &p));
            if to == 1 {
                break before.elapsed();
            }
            assert!(soonest < ms(100), "still there after {soonest:?}");
            rig.masks(only(1));
            sleep(ms(2));
        };
        assert!(moved >= ms(100), "forced after {moved:?}");
        let forced = only_move(&rig, MoveReason::Forced);
        assert_eq!(forced.need_us, 10_001_000);
        assert_eq!(rig.stat("move_forced"), 1);
    });
}

#[test]
fn bad_paths_are_left_at_once() {
    with_rig(patient(), |mut rig| {
        rig.steer.set_delays(0, 10_000_000, 0);
        rig.steer.set_delays(1, 10_000_000, 0);
        let (thin, fat) = (packet(1, 20), packet(2, 1200));
        let both = |rig: &Rig| [rig.send(0, &thin), rig.send(0, &fat)];
        rig.masks(only(0));
        rig.send(0, &thin);
        for _ in 0..9 {
            rig.send(0, &fat);
        }
        // Ejected: the latency flow goes, the bulk flow waits for its gap.
        rig.masks(ejected(0b01, only(1)));
        assert_eq!(both(&rig), [1, 0]);
        // Dead: both.
        rig.masks(alive(0b10, only(1)));
        assert_eq!(both(&rig), [1, 1]);
        let log = rig.moves.drain().unwrap();
        let brief = log.iter().map(|m| (m.reason, m.class, m.from, m.to));
        let want = [
            (MoveReason::Ejected, Class::Latency, 0, 1),
            (MoveReason::Dead, Class::Bulk, 0, 1),
        ];
        assert!(brief.eq(want), "{log:?}");
        assert_eq!((rig.stat("move_ejected"), rig.stat("move_dead")), (1, 1));
        // Nothing alive at all: it stays where it is, and does not jump about.
        rig.masks(alive(0, BOTH));
        assert_eq!(both(&rig), [1, 1]);
        rig.masks(Masks::default());
        assert_eq!(both(&rig), [1, 1]);
        assert_eq!(rig.moves.drain().unwrap().len(), 0);
    });
}

#[test]
fn a_crowded_path_is_left_by_the_flows_that_belong_elsewhere() {
    with_rig(patient(), |mut rig| {
        rig.steer.set_delays(0, 10_000_000, 0);
        rig.steer.set_delays(1, 10_000_000, 0);
        let ports = [port_of(0), port_of(1)];
        let send = |rig: &mut Rig| ports.map(|port| rig.send(0, &packet(port, 20)));
        rig.masks(only(0));
        assert_eq!(send(&mut rig), [0, 0]);
        // Eligible again, path 1 gets none of them back without a gap, ...
        rig.masks(BOTH);
        assert_eq!(send(&mut rig), [0, 0]);
        // ... but where path 0 is crowded, the one that the hash gives to path 1.
        rig.masks(ejected(0b11, BOTH));
        for _ in 0..2 {
            assert_eq!(send(&mut rig), [0, 1]);
        }
        only_move(&rig, MoveReason::Ejected);
    });
}

#[test]
fn a_full_path_is_left_in_a_gap_by_the_bulk_flows_that_belong_elsewhere() {
    with_rig(patient(), |mut rig| {
        rig.steer.set_delays(0, 80_000, 20_000);
        rig.steer.set_delays(1, 90_000, 10_000);
        let ports = [port_of(0), port_of(1)];
        for (payload, wanted) in [(20, [0, 0]), (1200, [0, 1])] {
            rig.clear_flows();
            let send = |rig: &mut Rig| ports.map(|port| rig.send(0, &packet(port, payload)));
            rig.masks(only(0));
            for _ in 0..10 {
                assert_eq!(send(&mut rig), [0, 0]);
            }
            rig.masks(BOTH);
            sleep(ms(100));
            assert_eq!(send(&mut rig), [0, 0], "it may stay");
            rig.masks(Masks { full: 0b01, ..BOTH });
            send(&mut rig);
            let before = Instant::now();
            let at_once = send(&mut rig);
            assert!(at_once == [0, 0] || before.elapsed() > ms(71), "in no gap");
            sleep(ms(100));
            assert_eq!(send(&mut rig), wanted, "{payload} bytes");
        }
        let log = rig.moves.drain().unwrap();
        let mut reasons = log.iter().map(|m| m.reason);
        assert!(reasons.all(|r| r == MoveReason::Flowlet), "{log:?}");
    });
}

#[test]
fn what_latency_flows_had_to_leave_before_forces_no_bulk_flow() {
    with_rig(settings(), |mut rig| {
        // after 100 ms
        let p = packet(1, 1200);
        rig.masks(only(0));
        for _ in 0..10 {
            rig.send(0, &p);
        }
        rig.steer.set_delays(0, 10_000_000, 0); // a gap of 10 s
        rig.masks(Masks {
            latency: 0b10,
            ..BOTH
        });
        sleep(ms(120));
        let before = Instant::now();
        rig.masks(only(1));
        let to = rig.send(0, &p);
        assert!(to == 0 || before.elapsed() >= ms(100), "forced at once");
        sleep(ms(120));
        assert_eq!(rig.send(0, &p), 1, "forced in the end");
        assert_eq!(rig.stat("move_forced"), 1);
    });
}

#[test]
fn flows_first_seen_in_the_grace_time_stay() {
    with_rig(patient(), |mut rig| {
        let ack = |port| Ip::v4(TCP, tcp(port, 2, ACK, 30));
        rig.masks(BOTH);
        rig.steer.set_mode(SteerMode::Steer, 3_600_000);
        let counted = rig.counted(|| {
            for port in 0..40 {
                let dev = port as usize % 2;
                assert_eq!(rig.send_ip(dev, &ack(port)), dev);
            }
        });
        assert_eq!(counted, [("flow_adopted", 40), ("flow_new", 40)]);
        // Not eligible where they are: moved with the first packet, not adopted.
        rig.masks(only(1));
        rig.expect(&ack(100).on(0), 1, &["flow_new", "redirected"]);
        // The grace time over, the known ones stay and unknown ones go where the hash says.
        rig.masks(BOTH);
        rig.steer.set_mode(SteerMode::Steer, 0);
        let counted = rig.counted(|| {
            for port in 0..40 {
                assert_eq!(rig.send_ip(0, &ack(port)), port as usize % 2);
            }
        });
        assert_eq!(counted, [("redirected", 20)]);
        let mut by = [0; 2];
        let counted = rig.counted(|| {
            for port in 200..240 {
                by[rig.send_ip(0, &ack(port))] += 1;
            }
        });
        assert!(by[0] > 5 && by[1] > 5, "{by:?}");
        let new = [("flow_new", 40), ("flow_untracked", 40)];
        assert_eq!(counted, [&new[..], &[("redirected", by[1])]].concat());
    });
}

#[test]
fn flows_keep_surviving_paths_when_the_topology_changes() {
    with_rig(patient(), |mut rig| {
        let port = port_of(0);
        let p = packet(port, 20);
        let all = all_but(&[]);
        rig.masks(only(1));
        assert_eq!(rig.send(0, &p), 1);
        rig.masks(BOTH);
        assert_eq!(rig.send(0, &p), 1, "no reason to move back");
        // Control: as a new flow it would be on path 0.
        rig.clear_flows();
        assert_eq!(rig.send(0, &p), 0);
        rig.clear_flows();
        rig.masks(only(1));
        assert_eq!(rig.send(0, &p), 1);

        // The same again, written anew: stays, also while there is no verdict yet.
        rig.topology(&[]);
        assert_eq!(rig.send(0, &p), 1, "without a verdict");
        rig.masks(BOTH);
        assert_eq!(rig.send(0, &p), 1, "with the verdict");
        assert_eq!(rig.send_ip(1, &flow(port)), 1);

        // Members in another order, in another group.
        let mut groups = rig_groups();
        groups[0].members.reverse();
        groups.reverse();
        rig.regroup(&groups, &[], &all);
        rig.masks(BOTH);
        assert_eq!(rig.send(0, &p), 1, "reordered");
        assert_eq!(rig.flow().group, 1);

        // Its path is gone from the group.
        let mut groups = rig_groups();
        groups[0].members.truncate(1);
        rig.regroup(&groups, &[], &all);
        rig.masks(alive(1, only(0)));
        assert_eq!(rig.send(0, &p), 0, "on a path that is gone");
        assert_eq!(rig.flow().path, 0);

        // Not ours any more.
        rig.masks(only(1));
        rig.regroup(&rig_groups(), &["10.1.0.0/16".parse().unwrap()], &all);
        rig.masks(only(1));
        rig.expect(&p, 0, &[]);
        // And ours again.
        rig.topology(&[]);
        rig.masks(alive(0b10, only(1)));
        assert_eq!(rig.send(0, &p), 1);
    });
}

#[test]
fn argmax_takes_the_highest_load_times_cost() {
    with_rig(settings(), |mut rig| {
        // Nothing known of any path: the first wins, whatever the hash says.
        rig.masks(BOTH);
        rig.steer.run(SteerProgram::ArgmaxLoad).unwrap();
        for port in 1..30 {
            assert_eq!(rig.send(0, &packet(port, 20)), 0);
            assert_eq!(rig.send_ip(1, &flow(100 + port)), 0);
        }
        // Load both, the second thrice as much; the packet after a pause merges what came.
        rig.steer.set_mode(SteerMode::Pass, 0);
        for round in 0..2 {
            for _ in 0..if round == 0 { 10 } else { 1 } {
                rig.send(0, &packet(1, 400));
                rig.send_ip(1, &Ip::v4(UDP, udp(2, 2, 1200)));
            }
            sleep(ms(11));
        }
        let score = |rig: &Rig, path: usize, cost: u64| {
            let (load, delta) = rig.steer.averages(path).unwrap();
            (load + delta) * cost
        };
        let actions = |rig: &Rig, ports: Range<u16>| -> Vec<i32> {
            let action = |port| {
                let outcome = rig.run(0, &packet(port, 20), PLAIN);
                rig.clear_note();
                outcome.action
            };
            ports.map(action).collect()
        };
        rig.steer.set_mode(SteerMode::Steer, 0);
        assert!(score(&rig, 1, 1) > score(&rig, 0, 1) && score(&rig, 0, 1) > 0);
        assert_eq!(actions(&rig, 30..60), [REDIRECT; 30]);
        // A cost that turns it round.
        rig.set_path(0, 0, |path| path.cost_weight = 100_000);
        assert!(score(&rig, 0, 100_000) > score(&rig, 1, 100));
        assert_eq!(actions(&rig, 60..90), [PASS; 30]);
        // Not by a path that is not alive.
        rig.masks(alive(0b10, BOTH));
        assert_eq!(actions(&rig, 90..120), [REDIRECT; 30]);
    });
}

/// Informal figures: `cargo test -p mountain --test bpf moves::cost -- --nocapture`.
#[test]
fn cost_of_a_known_flow() {
    with_rig(settings(), |mut rig| {
        let p = packet(1, 100);
        rig.masks(only(0));
        rig.send(0, &p);
        let mut out = vec![0; 256];
        let runs = [(); 9].map(|()| rig.run_into(0, &p, PLAIN, 100_000, &mut out).duration_ns);
        println!("ns per run of a known flow that stays: {runs:?}");
        let walked = crate::rig::prog_info(&rig.steer).verified_insns;
        println!("instructions the verifier went through: {walked}");
        assert!(walked < 300_000, "the limit is 1,000,000");
        assert_eq!(rig.flows().len(), 1);
    });
}
