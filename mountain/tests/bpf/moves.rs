// SPDX-License-Identifier: GPL-2.0-or-later
//! Which path the steering program gives a flow, when it moves one, and what it counts, through
//! BPF_PROG_RUN in real time. Every check takes the time that really passed into account.

use std::net::{IpAddr, SocketAddr};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::rig::packets::*;
use crate::rig::{
    all_but, in_netns, ms, only, patient, rig_groups, rig_path, settings, Ctx, Rig, BOTH, PASS,
    REDIRECT,
};
use mountain::bpf::flows::{Class, FlowKey, MoveReason};
use mountain::bpf::{PathMasks as Masks, ProgramGroup, ProgramPath, SteerMode, SteerProgram};
use mountain::measure::wire::DEFAULT_PORT;
use mountain::steer::rendezvous::{self, choose, inv_weight, path_salt};
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};

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
            let key = FlowKey {
                source: SocketAddr::new(SRC4, port),
                destination: SocketAddr::new(DST4, 2),
                proto: UDP,
            };
            let hash = flow_hash(&key);
            choose(hash, &salts, &[inv_weight(1); 2], 0b11) == Some(member)
        })
        .unwrap()
}

#[test]
fn new_flows_go_where_rendezvous_says() {
    let seed: u64 = rand::random();
    println!("seed {seed}");
    in_netns(move || {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut rig = Rig::new(&settings());
        let mut chosen = [0u32; 16];
        for round in 0..50 {
            // At first groups of full size without exceptions and with weights that do not differ
            // too much, so that every member is tried.
            let full = round < 8;
            let lightest = if full { 128 } else { 1 };
            let n = if full {
                16
            } else {
                rng.random_range(1..=16usize)
            };
            let v6: bool = rng.random();
            let members: Vec<(usize, u32)> = (0..n)
                .map(|i| {
                    (
                        10 + i + 20 * v6 as usize,
                        inv_weight(rng.random_range(lightest..=256)),
                    )
                })
                .collect();
            let salts: Vec<u32> = members.iter().map(|_| rng.random()).collect();
            let mac = |i: usize| [2, 0, 0, 0, 9, i as u8];
            for (i, (id, _)) in members.iter().enumerate() {
                let path = ProgramPath {
                    ipv6: v6,
                    mac: Some(mac(i)),
                    salt: salts[i],
                    ..rig_path(i % 2, rig.ifindex)
                };
                rig.steer.set_path(*id, &path).unwrap();
            }
            let inv: Vec<u32> = members.iter().map(|m| m.1).collect();
            let prefix = if v6 { "::/0" } else { "0.0.0.0/0" };
            let group = ProgramGroup {
                members,
                prefixes: vec![prefix.parse().unwrap()],
            };
            rig.steer
                .set_topology(std::slice::from_ref(&group), &[], &[], &all_but(&[]))
                .unwrap();
            let all = ((1u32 << n) - 1) as u16;
            let mut mask = rng.random::<u16>() & all;
            if mask == 0 || full {
                mask = all;
            }
            rig.steer.set_masks(
                0,
                Masks {
                    latency: mask,
                    bulk: 0,
                    alive: all,
                    ejected: 0,
                },
            );
            for _ in 0..200 {
                let (mut sport, dport) = (rng.random::<u16>(), rng.random::<u16>());
                if rng.random_ratio(1, 16) {
                    sport = DEFAULT_PORT;
                }
                let mut ip = if rng.random() {
                    Ip::new(v6, UDP, udp(sport, dport, 3))
                } else {
                    Ip::new(v6, TCP, tcp(sport, dport, SYN, 0))
                };
                ip.src = match ip.src {
                    IpAddr::V4(_) => IpAddr::from((rng.next_u32() | 1).to_be_bytes()),
                    IpAddr::V6(_) => IpAddr::from(rng.random::<[u8; 16]>()),
                };
                let key = FlowKey {
                    source: SocketAddr::new(ip.src, sport),
                    destination: SocketAddr::new(ip.dst, dport),
                    proto: ip.proto,
                };
                let want = choose(flow_hash(&key), &salts, &inv, mask).unwrap();
                // It comes by a member's device and gateway, like any packet of this group.
                let here = rng.random_range(0..n);
                let mut p = ip.on(0);
                p[..6].copy_from_slice(&mac(here));
                let outcome = rig.run(here % 2, &p, Ctx::default());
                // A reflector answers on the path that it was asked by.
                if ip.proto == UDP && sport == DEFAULT_PORT {
                    assert_eq!((outcome.action, outcome.note), (PASS, None), "{key:?}");
                    continue;
                }
                match outcome.note {
                    None => {
                        assert_eq!(
                            (outcome.action, want),
                            (PASS, here),
                            "{key:?} mask {mask:b}"
                        )
                    }
                    Some(note) => {
                        let id = group.members[want].0;
                        let got = (outcome.action, note.path as usize);
                        assert_eq!(got, (REDIRECT, id), "{key:?} mask {mask:b}");
                    }
                }
                rig.clear_note();
                chosen[want] += 1;
            }
        }
        assert!(
            chosen.iter().all(|&n| n > 5),
            "not all members were tried: {chosen:?}"
        );
    });
}

#[test]
fn a_gap_is_told_by_the_exact_clock_alone() {
    in_netns(|| {
        let mut rig = Rig::new(&patient()); // the margin is 1 ms
        let (p, by_u1) = (packet(1, 20), Ip::v4(UDP, udp(1, 2, 20)).on(1));
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

#[test]
fn flows_move_in_a_gap_and_not_inside_it() {
    in_netns(|| {
        let mut rig = Rig::new(&patient());
        let p = packet(1, 20);
        rig.masks(only(0));
        rig.send(0, &p);
        rig.steer.set_delays(0, 80_000, 20_000);
        rig.steer.set_delays(1, 90_000, 10_000);
        let need = Duration::from_micros(80_000 - 10_000 + 1000);
        rig.masks(only(1));
        let (mut stayed, mut moved) = (0, 0);
        for (n, pause) in [0, 0, 5, 0, 20, 40, 60, 5, 30, 80]
            .into_iter()
            .cycle()
            .enumerate()
        {
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
                let log = rig.moves.drain().unwrap();
                assert_eq!(log.len(), 1, "{log:?}");
                let m = &log[0];
                assert_eq!((m.from, m.to, m.reason), (0, 1, MoveReason::Flowlet));
                assert_eq!((m.class, m.need_us), (Class::Latency, 71_000));
                assert_eq!(m.key, rig.flow().key);
                assert!(
                    (shortest..=longest).contains(&Duration::from_micros(m.gap_us)),
                    "{m:?}"
                );
                assert_eq!(rig.flow().moves, 1);
            }
            if to == 1 {
                // Back at once, to try again: the path it came to is dead for a moment.
                rig.masks(Masks {
                    alive: 0b01,
                    ..only(0)
                });
                assert_eq!(rig.send(0, &p), 0);
                rig.clear_flows();
                rig.masks(only(0));
                rig.send(0, &p);
                rig.moves.drain().unwrap();
                rig.masks(only(1));
            }
        }
        assert!(
            stayed >= 3 && moved >= 1,
            "{stayed} stayed, {moved} moved: too slow a machine"
        );
        assert_eq!(rig.stat("move_forced"), 0);
    });
}

#[test]
fn without_a_gap_a_move_is_forced_in_the_end() {
    in_netns(|| {
        let mut rig = Rig::new(&settings()); // after 100 ms
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
        let log = rig.moves.drain().unwrap();
        assert_eq!(log.len(), 1);
        assert_eq!(
            (log[0].reason, log[0].need_us),
            (MoveReason::Forced, 10_001_000)
        );
        assert_eq!(rig.stat("move_forced"), 1);
    });
}

#[test]
fn bad_paths_are_left_at_once() {
    in_netns(|| {
        let mut rig = Rig::new(&patient());
        rig.steer.set_delays(0, 10_000_000, 0);
        rig.steer.set_delays(1, 10_000_000, 0);
        let (thin, fat) = (packet(1, 20), packet(2, 1200));
        rig.masks(only(0));
        rig.send(0, &thin);
        for _ in 0..9 {
            rig.send(0, &fat);
        }
        // Ejected: the latency flow goes, the bulk flow waits for its gap.
        rig.masks(Masks {
            ejected: 0b01,
            ..only(1)
        });
        assert_eq!((rig.send(0, &thin), rig.send(0, &fat)), (1, 0));
        // Dead: both.
        rig.masks(Masks {
            alive: 0b10,
            ..only(1)
        });
        assert_eq!((rig.send(0, &thin), rig.send(0, &fat)), (1, 1));
        let log = rig.moves.drain().unwrap();
        let brief: Vec<_> = log
            .iter()
            .map(|m| (m.reason, m.class, m.from, m.to))
            .collect();
        let want = [
            (MoveReason::Ejected, Class::Latency, 0, 1),
            (MoveReason::Dead, Class::Bulk, 0, 1),
        ];
        assert_eq!(brief, want);
        assert_eq!((rig.stat("move_ejected"), rig.stat("move_dead")), (1, 1));
        // Nothing alive at all: it stays where it is, and does not jump about.
        rig.masks(Masks { alive: 0, ..BOTH });
        assert_eq!((rig.send(0, &thin), rig.send(0, &fat)), (1, 1));
        rig.masks(Masks::default());
        assert_eq!((rig.send(0, &thin), rig.send(0, &fat)), (1, 1));
        assert_eq!(rig.moves.drain().unwrap().len(), 0);
    });
}

#[test]
fn a_crowded_path_is_left_by_the_flows_that_belong_elsewhere() {
    in_netns(|| {
        let mut rig = Rig::new(&patient());
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
        rig.masks(Masks {
            ejected: 0b11,
            ..BOTH
        });
        for _ in 0..2 {
            assert_eq!(send(&mut rig), [0, 1]);
        }
        let log = rig.moves.drain().unwrap();
        assert_eq!(log.len(), 1, "{log:?}");
        assert_eq!(
            (log[0].reason, log[0].from, log[0].to),
            (MoveReason::Ejected, 0, 1)
        );
    });
}

#[test]
fn flows_first_seen_in_the_grace_time_stay() {
    in_netns(|| {
        let mut rig = Rig::new(&patient());
        let ack = |port| Ip::v4(TCP, tcp(port, 2, ACK, 30));
        rig.masks(BOTH);
        rig.steer.set_mode(SteerMode::Steer, 3_600_000);
        let counted = rig.counted(|| {
            for port in 0..40 {
                assert_eq!(
                    rig.send(port as usize % 2, &ack(port).on(port as usize % 2)),
                    port as usize % 2
                );
            }
        });
        assert_eq!(counted, [("flow_adopted", 40), ("flow_new", 40)]);
        // Not eligible where they are: moved with the first packet, not adopted.
        rig.masks(only(1));
        let counted = rig.counted(|| assert_eq!(rig.send(0, &ack(100).on(0)), 1));
        assert_eq!(counted, [("flow_new", 1), ("redirected", 1)]);
        // The grace time over, the known ones stay and unknown ones go where the hash says.
        rig.masks(BOTH);
        rig.steer.set_mode(SteerMode::Steer, 0);
        let counted = rig.counted(|| {
            for port in 0..40 {
                assert_eq!(rig.send(0, &ack(port).on(0)), port as usize % 2);
            }
        });
        assert_eq!(counted, [("redirected", 20)]);
        let mut by = [0; 2];
        let counted = rig.counted(|| {
            for port in 200..240 {
                by[rig.send(0, &ack(port).on(0))] += 1;
            }
        });
        assert!(by[0] > 5 && by[1] > 5, "{by:?}");
        let want = [
            ("flow_new", 40),
            ("flow_untracked", 40),
            ("redirected", by[1]),
        ];
        assert_eq!(counted, want);
    });
}

#[test]
fn flows_keep_surviving_paths_when_the_topology_changes() {
    in_netns(|| {
        let mut rig = Rig::new(&patient());
        let port = port_of(0);
        let p = packet(port, 20);
        let fresh = packet(port, 20);
        rig.masks(only(1));
        assert_eq!(rig.send(0, &p), 1);
        rig.masks(BOTH);
        assert_eq!(rig.send(0, &p), 1, "no reason to move back");
        // Control: as a new flow it would be on path 0.
        rig.clear_flows();
        assert_eq!(rig.send(0, &fresh), 0);
        rig.clear_flows();
        rig.masks(only(1));
        assert_eq!(rig.send(0, &p), 1);

        // The same again, written anew: stays, also while there is no verdict yet.
        rig.topology(&[]);
        assert_eq!(rig.send(0, &p), 1, "without a verdict");
        rig.masks(BOTH);
        assert_eq!(rig.send(0, &p), 1, "with the verdict");
        assert_eq!(rig.send(1, &Ip::v4(UDP, udp(port, 2, 20)).on(1)), 1);

        // Members in another order, in another group.
        let mut groups = rig_groups();
        groups[0].members.reverse();
        groups.reverse();
        rig.steer
            .set_topology(&groups, &[], &[], &all_but(&[]))
            .unwrap();
        rig.masks(BOTH);
        assert_eq!(rig.send(0, &p), 1, "reordered");
        assert_eq!(rig.flow().group, 1);

        // Its path is gone from the group.
        let mut groups = rig_groups();
        groups[0].members.truncate(1);
        rig.steer
            .set_topology(&groups, &[], &[], &all_but(&[]))
            .unwrap();
        rig.masks(Masks {
            latency: 1,
            bulk: 1,
            alive: 1,
            ejected: 0,
        });
        assert_eq!(rig.send(0, &p), 0, "on a path that is gone");
        assert_eq!(rig.flow().path, 0);

        // Not ours any more.
        rig.masks(only(1));
        rig.steer
            .set_topology(
                &rig_groups(),
                &["10.1.0.0/16".parse().unwrap()],
                &[],
                &all_but(&[]),
            )
            .unwrap();
        rig.masks(only(1));
        assert_eq!(rig.counted(|| assert_eq!(rig.send(0, &p), 0)), []);
        // And ours again.
        rig.topology(&[]);
        rig.masks(Masks {
            alive: 0b10,
            ..only(1)
        });
        assert_eq!(rig.send(0, &p), 1);
    });
}

#[test]
fn argmax_takes_the_highest_load_times_cost() {
    in_netns(|| {
        let mut rig = Rig::new(&settings());
        // Nothing known of any path: the first wins, whatever the hash says.
        rig.masks(BOTH);
        rig.steer.run(SteerProgram::ArgmaxLoad).unwrap();
        for port in 1..30 {
            assert_eq!(rig.send(0, &packet(port, 20)), 0);
            assert_eq!(rig.send(1, &Ip::v4(UDP, udp(100 + port, 2, 20)).on(1)), 0);
        }
        // Load both, the second thrice as much; the packet after a pause merges what came.
        rig.steer.set_mode(SteerMode::Pass, 0);
        for round in 0..2 {
            for _ in 0..if round == 0 { 10 } else { 1 } {
                rig.send(0, &packet(1, 400));
                rig.send(1, &Ip::v4(UDP, udp(2, 2, 1200)).on(1));
            }
            sleep(ms(11));
        }
        let score = |rig: &Rig, path: usize, cost: u64| {
            let (load, delta) = rig.steer.averages(path).unwrap();
            (load + delta) * cost
        };
        rig.steer.set_mode(SteerMode::Steer, 0);
        assert!(score(&rig, 1, 1) > score(&rig, 0, 1) && score(&rig, 0, 1) > 0);
        for port in 30..60 {
            assert_eq!(
                rig.run(0, &packet(port, 20), Ctx::default()).action,
                REDIRECT
            );
            rig.clear_note();
        }
        // A cost that turns it round.
        let path = ProgramPath {
            cost_weight: 100_000,
            ..rig_path(0, rig.ifindex)
        };
        rig.steer.set_path(0, &path).unwrap();
        assert!(score(&rig, 0, 100_000) > score(&rig, 1, 100));
        for port in 60..90 {
            assert_eq!(rig.run(0, &packet(port, 20), Ctx::default()).action, PASS);
        }
        // Not by a path that is not alive.
        rig.masks(Masks {
            alive: 0b10,
            ..BOTH
        });
        for port in 90..120 {
            assert_eq!(
                rig.run(0, &packet(port, 20), Ctx::default()).action,
                REDIRECT
            );
            rig.clear_note();
        }
    });
}

/// Informal figures: `cargo test -p mountain --test bpf moves::cost -- --nocapture`.
#[test]
fn cost_of_a_known_flow() {
    in_netns(|| {
        let mut rig = Rig::new(&settings());
        let p = packet(1, 100);
        rig.masks(only(0));
        rig.send(0, &p);
        let mut out = vec![0; 256];
        let runs: Vec<u32> = (0..9)
            .map(|_| {
                rig.run_into(0, &p, Ctx::default(), 100_000, &mut out)
                    .duration_ns
            })
            .collect();
        println!("ns per run of a known flow that stays: {runs:?}");
        let info = crate::rig::prog_info(&rig.steer, &mut [0; 32]);
        println!(
            "instructions the verifier went through: {}",
            info.verified_insns
        );
        assert!(info.verified_insns < 100_000, "the limit is 1,000,000");
        assert_eq!(rig.flows().len(), 1);
    });
}
