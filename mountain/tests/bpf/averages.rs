// SPDX-License-Identifier: GPL-2.0-or-later
//! The two averages as the kernel computes them: bpf/steer/averages.h over mountain/tests/vectors/averages.json,
//! bit for bit, and those of the program of argmax-load over real time.

use std::thread::sleep;
use std::time::Duration;

use crate::rig::packets::*;
use crate::rig::{in_netns, settings, with_rig};
use libbpf_rs::{MapCore, MapFlags, MapHandle, Object, ObjectBuilder, ProgramInput};
use mountain::bpf::{Settings, SteerMode, SteerProgram};
use serde::Deserialize;

/// Compiled by the build script.
const OBJECT: &str = concat!(env!("OUT_DIR"), "/averages_test.bpf.o");
/// Some moment long after boot, at the start of an interval.
const START_NS: u64 = 100_000 * INTERVAL_NS;

const INTERVAL_NS: u64 = 10_000_000;
/// K that replaces the averages by the last interval's values.
const K_ONE: u64 = 1024;

#[derive(Deserialize)]
struct Vectors {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    k: u64,
    /// [bytes, elapsed, ema_load, ema_time_delta]
    steps: Vec<[u64; 4]>,
}

struct Averager {
    object: Object,
    now_ns: u64,
}

impl Averager {
    fn new() -> Self {
        let mut open = ObjectBuilder::default().open_file(OBJECT).expect(OBJECT);
        for mut map in open.maps_mut() {
            map.set_autocreate(true).unwrap();
        }
        let mut averager = Self {
            object: open.load().expect(OBJECT),
            now_ns: START_NS,
        };
        averager.account(0, 0, 0);
        averager
    }

    /// Counts `len` bytes on path 0 at the moment `self.now_ns`, on this CPU.
    fn account(&mut self, len: u32, packets: u32, k: u64) {
        let cpus = libbpf_rs::num_possible_cpus().unwrap() as u32;
        let words = [0, len, packets, cpus, k as u32, 0];
        let mut step = self.now_ns.to_ne_bytes().to_vec();
        step.extend(words.iter().flat_map(|w: &u32| w.to_ne_bytes()));
        let mut programs = self.object.progs_mut();
        let prog = programs.find(|p| p.name() == "account").unwrap();
        let input = ProgramInput {
            context_in: Some(&mut step),
            ..Default::default()
        };
        assert_eq!(prog.test_run(input).unwrap().return_value, 0);
    }

    fn map(&self, suffix: &str) -> MapHandle {
        let mut maps = self.object.maps();
        let map = maps.find(|m| m.name().to_str().unwrap().ends_with(suffix));
        MapHandle::try_from(&map.unwrap_or_else(|| panic!("no map {suffix}"))).unwrap()
    }

    /// Smoothed rate and smoothed deviation of path 0, B/s.
    fn averages(&self) -> [u64; 2] {
        // `averages` is the object's only zero-initialized variable; path 0 comes first:
        // start_ns, total_bytes, ema_load, ema_time_delta.
        let bss = self.map(".bss");
        let bss = bss.lookup(&0u32.to_ne_bytes(), MapFlags::ANY);
        let bss = bss.unwrap().unwrap();
        let word = |i: usize| u64::from_ne_bytes(bss[i * 8..i * 8 + 8].try_into().unwrap());
        [word(2), word(3)]
    }
}

#[test]
fn bpf_reproduces_the_shared_vectors() {
    in_netns(|| {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors/averages.json");
        let text = std::fs::read_to_string(path).expect(path);
        let vectors: Vectors = serde_json::from_str(&text).expect(path);
        let mut steps = 0;
        for case in &vectors.cases {
            let mut a = Averager::new();
            for (i, &[bytes, elapsed, load, delta]) in case.steps.iter().enumerate() {
                let what = format!("{} (K = {}), step {i}", case.name, case.k);
                if elapsed == 0 {
                    // The interval is open: what comes is summed, not averaged. The vectors ask
                    // for it with no packet that would carry over into the next step.
                    a.now_ns += INTERVAL_NS - 1;
                    a.account(0, 1, case.k);
                    a.now_ns -= INTERVAL_NS - 1;
                } else {
                    let len = u32::try_from(bytes).expect("one packet's length");
                    a.account(len, 1, case.k);
                    a.now_ns += elapsed * INTERVAL_NS;
                    a.account(0, 1, case.k);
                }
                assert_eq!(a.averages(), [load, delta], "{what}");
                steps += 1;
            }
        }
        assert!(steps > 1000, "only {steps} steps");
    });
}

#[test]
fn intervals_are_cut_where_they_should_be() {
    in_netns(|| {
        let mut a = Averager::new();
        let k = K_ONE;
        // Up to the last nanosecond packets belong to the first interval.
        for at in [0, 1, INTERVAL_NS - 1] {
            a.now_ns = START_NS + at;
            a.account(100, 1, k);
            assert_eq!(a.averages(), [0, 0]);
        }
        a.now_ns = START_NS + INTERVAL_NS;
        a.account(7, 1, k);
        assert_eq!(a.averages()[0], 300 * 100);
        // Late by three quarters of an interval: the cuts stay where they were.
        a.now_ns = START_NS + 2 * INTERVAL_NS + INTERVAL_NS * 3 / 4;
        a.account(5, 1, k);
        assert_eq!(a.averages()[0], 7 * 100);
        a.now_ns = START_NS + 3 * INTERVAL_NS;
        a.account(0, 1, k);
        assert_eq!(a.averages()[0], 5 * 100);
        // A clock that seems to run backwards (another CPU's reading) changes nothing.
        a.now_ns = START_NS;
        a.account(9, 1, k);
        assert_eq!(a.averages()[0], 5 * 100);
    });
}

#[test]
fn bytes_of_all_cpus_are_merged() {
    in_netns(|| {
        let all = std::thread::available_parallelism().unwrap().get();
        let mut a = Averager::new();
        let mut used = 0;
        for cpu in 0..all {
            let mut one = nix::sched::CpuSet::new();
            one.set(cpu).unwrap();
            if nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &one).is_ok() {
                a.account(1000 << cpu, 1, K_ONE);
                used += 1000 << cpu;
            }
        }
        a.now_ns += INTERVAL_NS;
        a.account(0, 1, K_ONE);
        assert_eq!(a.averages()[0], used * 100);
    });
}

#[test]
fn the_program_feeds_them_what_leaves_by_a_path() {
    let settings = Settings {
        k_factor: 1024,
        ..settings()
    };
    with_rig(settings, |mut rig| {
        assert_eq!(rig.steer.averages(0), None, "only the baseline keeps them");
        rig.steer.run(SteerProgram::ArgmaxLoad).unwrap();
        rig.steer.set_mode(SteerMode::Pass, 0);
        let packet = Ip::v4(UDP, udp(1, 2, 958)).on(0);
        assert_eq!(packet.len(), 1000);
        // Ends whatever interval is under way; the path has been silent for long.
        rig.send(0, &packet);
        assert_eq!(rig.steer.averages(0), Some((0, 0)));
        sleep(Duration::from_millis(1000));
        for _ in 0..5 {
            rig.send(0, &packet);
        }
        // The second, silent, is more than 64 intervals: 0 again, and the five (or fewer, if an
        // interval ended among them) are what the next packet finds.
        sleep(Duration::from_millis(12));
        rig.send(0, &packet);
        let traffic = rig.steer.traffic(0).unwrap();
        assert_eq!((traffic.packets, traffic.bytes), (7, 7000));
        let (load, delta) = rig.steer.averages(0).unwrap();
        assert!(load <= 500_000 && load % 100_000 == 0, "{load}");
        assert_eq!(delta, 0, "K = 1 leaves no distance");
        assert_eq!(rig.steer.averages(1), Some((0, 0)));
    });
}

/// The file that `patch` adds as `path`.
fn added_file(patch: &str, path: &str) -> String {
    let header = format!("\n+++ b/{path}\n");
    let start = patch.find(&header).expect("the patch adds the file") + header.len();
    patch[start..]
        .lines()
        .skip(1) // @@
        .take_while(|line| line.starts_with('+'))
        .map(|line| format!("{}\n", &line[1..]))
        .collect()
}

#[test]
fn bpf_and_the_kernel_patch_share_one_text() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let patch = format!("{root}/kernel/patches/6.12/0001-net-dst-per-path-transmit-metrics.patch");
    let patch = std::fs::read_to_string(&patch).expect(&patch);
    let bpf = std::fs::read_to_string(format!("{root}/bpf/steer/path_average.h")).unwrap();
    assert!(bpf.contains("ema_time_delta = path_avg_ema("));
    // The kernel's copy has the kernel's licence.
    let bpf = bpf.replacen(" OR BSD-2-Clause", "", 1);
    assert_eq!(added_file(&patch, "include/net/path_average.h"), bpf);
}
