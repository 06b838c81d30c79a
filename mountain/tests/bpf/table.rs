// SPDX-License-Identifier: GPL-2.0-or-later
//! The flow table (bpf/steer/flow_table.h), through BPF_PROG_RUN: who is in it, and who has to go.

use std::collections::HashSet;
use std::net::IpAddr;
use std::thread::sleep;
use std::time::Duration;

use crate::rig::packets::*;
use crate::rig::{settings, with_rig, Rig, BOTH};
use mountain::bpf::flows::FlowKey;
use mountain::bpf::Settings;

/// Longer than any kernel's tick, by which the program stamps.
const TICK: Duration = Duration::from_millis(11);

fn with_table(flow_entries: u32, test: fn(Rig)) {
    let settings = Settings {
        flow_entries,
        ..settings()
    };
    with_rig(settings, move |mut rig| {
        rig.masks(BOTH);
        test(rig);
    });
}

/// The packet of flow `i`, of either family, and its key.
fn flow(i: u32) -> (Vec<u8>, FlowKey) {
    let (sport, v6) = (1 + (i >> 1) as u16, i % 2 == 1);
    let ip = Ip::new(v6, UDP, udp(sport, 2, 10));
    (ip.on(0), ip.key(sport, 2))
}

fn keys(rig: &Rig) -> HashSet<FlowKey> {
    rig.flows().iter().map(|f| f.key).collect()
}

#[test]
fn three_quarters_of_the_configured_flows_have_room() {
    with_table(4096, |rig| {
        let flows: Vec<_> = (0..3072).map(flow).collect();
        let paths = || -> Vec<usize> { flows.iter().map(|(p, _)| rig.send(0, p)).collect() };
        let first = paths();
        assert!(first.contains(&0) && first.contains(&1));
        assert_eq!((rig.stat("flow_new"), rig.stat("flow_evicted")), (3072, 0));
        let want: HashSet<FlowKey> = flows.iter().map(|(_, key)| *key).collect();
        assert_eq!(want.len(), 3072);
        assert_eq!(keys(&rig), want);
        for f in rig.flows() {
            let i = flows.iter().position(|(_, key)| *key == f.key).unwrap();
            assert_eq!((f.path % 2, f.group), (first[i], i % 2), "{:?}", f.key);
        }
        // All are known now.
        assert_eq!(rig.counted(|| assert_eq!(paths(), first)).len(), 1);
        assert_eq!(rig.stat("flow_new"), 3072);
    });
}

#[test]
fn the_least_recently_used_flow_goes_first() {
    with_table(1, |rig| {
        let (kept, kept_key) = flow(0);
        rig.send(0, &kept);
        for i in 1..=100 {
            let (packet, key) = flow(i);
            rig.send(0, &packet);
            assert!(keys(&rig).contains(&key), "a new flow has no entry");
            sleep(TICK);
            rig.send(0, &kept);
            assert!(keys(&rig).contains(&kept_key), "a flow in use was evicted");
        }
        let new = rig.stat("flow_new");
        assert_eq!(new, 101, "the flow in use was taken for a new one");
        let present = rig.flows().len() as u64;
        assert!(present <= 32, "{present} flows in 32 slots");
        assert_eq!(rig.stat("flow_evicted"), new - present);
    });
}

#[test]
fn a_forgotten_flow_starts_anew_and_evicts_nobody() {
    with_table(64, |rig| {
        let flows: Vec<_> = (0..40).map(flow).collect();
        let send = |which: &dyn Fn(usize) -> bool| {
            for (_, (packet, _)) in flows.iter().enumerate().filter(|(i, _)| which(*i)) {
                rig.send(0, packet);
            }
        };
        send(&|_| true);
        let source: IpAddr = flows[0].1.source.ip();
        rig.steer.flows().forget(|key| key.source.ip() == source);
        let left: HashSet<FlowKey> = flows.iter().skip(1).step_by(2).map(|f| f.1).collect();
        assert_eq!(keys(&rig), left, "those of IPv4 are gone");
        // The others are found behind the slots that became free.
        send(&|i| i % 2 == 1);
        assert_eq!(rig.stat("flow_new"), 40);
        send(&|i| i % 2 == 0);
        assert_eq!((rig.stat("flow_new"), rig.stat("flow_evicted")), (60, 0));
        assert_eq!(keys(&rig).len(), 40);
    });
}

#[test]
fn every_field_of_the_key_tells_flows_apart() {
    with_table(64, |rig| {
        for v6 in [false, true] {
            let base = || Ip::new(v6, UDP, udp(5, 6, 10));
            let mut other_source = base();
            other_source.src = match other_source.src {
                IpAddr::V4(a) => IpAddr::from((u32::from(a) ^ 1).to_be_bytes()),
                IpAddr::V6(a) => IpAddr::from((u128::from(a) ^ 1 << 64).to_be_bytes()),
            };
            let other_dest = base().to(if v6 { "2001:db8:1::77" } else { "10.1.0.77" });
            let packets = [
                base(),
                other_source,
                other_dest,
                Ip::new(v6, UDP, udp(7, 6, 10)),
                Ip::new(v6, UDP, udp(5, 8, 10)),
                Ip::new(v6, TCP, tcp(5, 6, SYN, 0)),
            ];
            let before = rig.stat("flow_new");
            for (i, packet) in packets.iter().enumerate() {
                rig.send_ip(0, packet);
                rig.send_ip(0, packet);
                assert_eq!(rig.stat("flow_new") - before, i as u64 + 1, "IPv6: {v6}");
            }
        }
        assert_eq!(keys(&rig).len(), 12);
    });
}
