// SPDX-License-Identifier: GPL-2.0-or-later
//! What the tests of the steering program share: a private network namespace with two devices, the
//! program loaded over hand-written paths, and BPF_PROG_RUN with its outcome.
#![allow(dead_code)] // Each test binary uses its own part.

pub mod net;
pub mod packets;

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

use ipnet::IpNet;
use libbpf_rs::{MapCore, MapFlags, MapHandle};
use mountain::bpf::flows::{Flow, MoveLog};
use mountain::bpf::{
    PathMasks as Masks, ProgramGroup, ProgramPath, Settings, Sources, Steer, SteerMode,
};
use mountain::redirect::bpf::hooks::LoadedProgram;
use mountain::steer::rendezvous::inv_weight;
use mountain::topology::FibRule;
use packets::{Ip, MACS};
use testkit::TestNamespace;
pub use testkit::{ifindex, ip};

/// TC_ACT_UNSPEC: the packet goes on as if the program were not there.
pub const PASS: i32 = -1;
/// TC_ACT_REDIRECT
pub const REDIRECT: i32 = 7;

/// Runs `test` on a thread of its own in a new network namespace, which goes away after it. The thread stays on one
/// CPU, as a packet's two runs of the program do.
pub fn in_netns(test: impl FnOnce() + Send) {
    TestNamespace::new("bpf").with(|| {
        pin();
        test();
    });
}

/// Keeps this thread on one CPU. Tests that run beside each other, each in its own process, do not share one.
pub fn pin() {
    let this = nix::unistd::Pid::from_raw(0);
    let all = nix::sched::sched_getaffinity(this).unwrap();
    let cpus: Vec<usize> = (0..nix::sched::CpuSet::count())
        .filter(|&c| all.is_set(c).unwrap())
        .collect();
    let mut one = nix::sched::CpuSet::new();
    one.set(cpus[std::process::id() as usize % cpus.len()])
        .unwrap();
    nix::sched::sched_setaffinity(this, &one).unwrap();
}

/// [`in_netns`] with a [`Rig`].
pub fn with_rig(settings: Settings, test: impl FnOnce(Rig) + Send) {
    in_netns(|| test(Rig::new(&settings)));
}

/// Settings with a window so short that tests need not wait long.
pub fn settings() -> Settings {
    Settings {
        hash_seed: 0x5eed,
        k_factor: 512,
        margin_us: 1000,
        force_after_ms: 100,
        window_ms: 50,
        latency_below_bps: 800_000, // 5,000 bytes in a window
        bulk_above_bps: 1_600_000,  // 10,000 bytes in a window
        elastic_above_bps: 480_000, // 3,000 bytes in a window
        flow_entries: 65536,
        only_routed: false,
    }
}

/// [`settings`] without forced moves.
pub fn patient() -> Settings {
    Settings {
        force_after_ms: 3_600_000,
        ..settings()
    }
}

pub const fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// Bit mask fields of a `__sk_buff` that BPF_PROG_RUN takes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ctx {
    pub mark: u32,
    pub ingress_ifindex: u32,
    pub gso_segs: u32,
    pub gso_size: u32,
}

/// Nothing special.
pub const PLAIN: Ctx = Ctx {
    mark: 0,
    ingress_ifindex: 0,
    gso_segs: 0,
    gso_size: 0,
};

impl Ctx {
    pub fn mark(mark: u32) -> Self {
        Self { mark, ..PLAIN }
    }

    pub fn came_by(ingress_ifindex: u32) -> Self {
        Self {
            ingress_ifindex,
            ..PLAIN
        }
    }

    /// Two segments of that size.
    pub fn gso(gso_size: u32) -> Self {
        Self {
            gso_segs: 2,
            gso_size,
            ..PLAIN
        }
    }

    /// The bytes of the structure, on the device `ifindex`; offsets from <linux/bpf.h>.
    fn bytes(&self, ifindex: u32) -> [u8; 192] {
        let mut b = [0; 192];
        let mut put = |at: usize, v: u32| b[at..at + 4].copy_from_slice(&v.to_ne_bytes());
        put(8, self.mark);
        put(36, self.ingress_ifindex);
        put(40, ifindex);
        put(164, self.gso_segs);
        put(176, self.gso_size);
        b
    }
}

/// `mtn_handover` of bpf/common/intf.h: what the first run tells the second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Note {
    pub ifindex: u32,
    pub len: u32,
    pub path: u32,
}

/// What one run of the program did with a packet.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub action: i32,
    /// `None` when the note is empty.
    pub note: Option<Note>,
    /// Nanoseconds, when the run was repeated: of one run.
    pub duration_ns: u32,
}

/// The program over four paths: 0 and 1 are IPv4 by u0 and u1, 2 and 3 the same for IPv6; group 0
/// is the IPv4 default route over 0 and 1, group 1 the IPv6 one over 2 and 3. 10.9.0.0/16 and
/// 2001:db8:9::/48 have routes of their own ("not ours"), 10.0.0.77 and 2001:db8::77 are pinned.
pub struct Rig {
    pub steer: Steer,
    pub ifindex: [u32; 2],
    pub handover: MapHandle,
    pub moves: MoveLog,
}

/// The paths of a [`Rig`].
pub fn rig_path(id: usize, ifindex: [u32; 2]) -> ProgramPath {
    ProgramPath {
        ifindex: ifindex[id % 2],
        mtu: 1500,
        ipv6: id >= 2,
        gateway: if id >= 2 {
            format!("fe80::{}", id % 2 + 1).parse().unwrap()
        } else {
            format!("10.0.{id}.1").parse().unwrap()
        },
        mac: Some(MACS[id % 2]),
        ethernet: true,
        up: true,
        salt: mountain::steer::rendezvous::path_salt(&[id as u8]),
        cost_weight: 100,
    }
}

pub fn not_ours() -> Vec<IpNet> {
    ["10.9.0.0/16", "2001:db8:9::/48"]
        .map(|p| p.parse().unwrap())
        .to_vec()
}

pub fn rig_groups() -> Vec<ProgramGroup> {
    let group = |first: usize, prefix: &str| ProgramGroup {
        members: vec![(first, inv_weight(1)), (first + 1, inv_weight(1))],
        prefixes: vec![prefix.parse().unwrap()],
    };
    vec![group(0, "0.0.0.0/0"), group(2, "::/0")]
}

/// An ip rule for all of IPv4, but for a change.
pub fn fib_rule(change: impl FnOnce(&mut FibRule)) -> FibRule {
    let mut rule = FibRule::default();
    change(&mut rule);
    rule
}

/// All sources may move, but for these.
pub fn all_but(pinned: &[&str]) -> Sources {
    Sources {
        uplink_bound: pinned.iter().map(|a| a.parse().unwrap()).collect(),
        movable: ["0.0.0.0/0", "::/0"].map(|p| p.parse().unwrap()).to_vec(),
        own: Vec::new(),
    }
}

/// All of two members for everything.
pub const BOTH: Masks = Masks {
    latency: 0b11,
    bulk: 0b11,
    alive: 0b11,
    ejected: 0,
    full: 0,
};

/// One member only, the other alive but not eligible.
pub const fn only(member: u16) -> Masks {
    Masks {
        latency: 1 << member,
        bulk: 1 << member,
        alive: 0b11,
        ejected: 0,
        full: 0,
    }
}

/// The same masks but for the members that are alive.
pub const fn alive(alive: u16, masks: Masks) -> Masks {
    Masks { alive, ..masks }
}

/// The same masks but for the members that are ejected.
pub const fn ejected(ejected: u16, masks: Masks) -> Masks {
    Masks { ejected, ..masks }
}

impl Rig {
    /// Makes the devices and loads the program; only path 1 (and 3) is eligible, so that what
    /// is ours and came by u0 is redirected.
    pub fn new(settings: &Settings) -> Self {
        for i in 0..2 {
            ip(&format!("link add u{i} type veth peer name s{i}"));
            ip(&format!("link set u{i} up"));
            ip(&format!("link set s{i} up"));
        }
        let ifindex = [ifindex("u0"), ifindex("u1")];
        let mut steer = Steer::load(settings).unwrap();
        for id in 0..4 {
            steer.set_path(id, &rig_path(id, ifindex)).unwrap();
        }
        let handover = map_of(&steer, "handover");
        let moves = MoveLog::new(steer.move_map()).unwrap();
        let mut rig = Self {
            steer,
            ifindex,
            handover,
            moves,
        };
        rig.topology(&[]);
        rig.masks(only(1));
        rig.steer.set_mode(SteerMode::Steer, 0);
        rig
    }

    pub fn topology(&mut self, fib_rules: &[FibRule]) {
        let pinned = ["10.0.0.77", "2001:db8::77"];
        self.steer
            .set_topology(&rig_groups(), &not_ours(), fib_rules, &all_but(&pinned))
            .unwrap();
    }

    /// Another topology, without ip rules.
    pub fn regroup(&mut self, groups: &[ProgramGroup], not_ours: &[IpNet], sources: &Sources) {
        let set = self.steer.set_topology(groups, not_ours, &[], sources);
        set.unwrap();
    }

    /// Writes path `id`, which is as path `like` is at first but for a change.
    pub fn set_path(&mut self, id: usize, like: usize, change: impl FnOnce(&mut ProgramPath)) {
        let mut path = rig_path(like, self.ifindex);
        change(&mut path);
        self.steer.set_path(id, &path).unwrap();
    }

    /// Writes the masks of both groups.
    pub fn masks(&mut self, masks: Masks) {
        self.steer.set_masks(0, masks);
        self.steer.set_masks(1, masks);
    }

    /// Runs the program once on `packet` as leaving by u`dev`. Panics if a byte has changed.
    pub fn run(&self, dev: usize, packet: &[u8], ctx: Ctx) -> Outcome {
        let mut out = vec![0; packet.len() + 64];
        self.run_into(dev, packet, ctx, 1, &mut out)
    }

    /// [`Rig::run`] with a buffer to reuse, `repeat` times.
    pub fn run_into(
        &self,
        dev: usize,
        packet: &[u8],
        ctx: Ctx,
        repeat: u32,
        out: &mut [u8],
    ) -> Outcome {
        let run = prog_run(&self.steer, self.ifindex[dev], packet, ctx, repeat, out)
            .unwrap_or_else(|e| panic!("BPF_PROG_RUN of {} bytes: {e}", packet.len()));
        let (action, len, duration_ns) = run;
        let is_same = len == packet.len() && out[..len] == *packet;
        assert!(is_same, "the packet changed: {packet:02x?}");
        Outcome {
            action,
            note: self.note(),
            duration_ns,
        }
    }

    /// The handover note on this CPU.
    pub fn note(&self) -> Option<Note> {
        let notes = self
            .handover
            .lookup_percpu(&0u32.to_ne_bytes(), MapFlags::ANY)
            .unwrap();
        let word = |b: &[u8], i: usize| u32::from_ne_bytes(b[i * 4..i * 4 + 4].try_into().unwrap());
        notes
            .unwrap()
            .iter()
            .map(|b| Note {
                ifindex: word(b, 0),
                len: word(b, 1),
                path: word(b, 2),
            })
            .find(|n| n.ifindex != 0)
    }

    /// Forgets a note that no second run took, e.g. because the packet was dropped.
    pub fn clear_note(&self) {
        let cpus = libbpf_rs::num_possible_cpus().unwrap();
        let zero = vec![vec![0; 12]; cpus];
        self.handover
            .update_percpu(&0u32.to_ne_bytes(), &zero, MapFlags::ANY)
            .unwrap();
    }

    /// Sends a packet that leaves by u`dev`, with the second run if it was redirected; returns
    /// the device it really leaves by. Checks what must hold for any packet: redirect and note
    /// agree, the second run passes and takes the note, the path is charged once.
    pub fn send_ctx(&self, dev: usize, packet: &[u8], ctx: Ctx) -> usize {
        let before: Vec<u64> = (0..4)
            .map(|p| self.steer.traffic(p).unwrap().bytes)
            .collect();
        let first = self.run(dev, packet, ctx);
        let to = match (first.action, first.note) {
            (PASS, None) => dev,
            (REDIRECT, Some(note)) => {
                let to = self
                    .ifindex
                    .iter()
                    .position(|&i| i == note.ifindex)
                    .expect("a path");
                assert_ne!(to, dev, "redirected to where it came from");
                assert_eq!(note.len as usize, packet.len());
                assert_eq!(note.path as usize % 2, to);
                let mut moved = packet.to_vec();
                moved[..6].copy_from_slice(&MACS[to]);
                let second = self.run(to, &moved, ctx);
                assert_eq!((second.action, second.note), (PASS, None), "second run");
                to
            }
            other => panic!("action and note disagree: {other:?}"),
        };
        let charged: Vec<u64> = (0..4)
            .map(|p| self.steer.traffic(p).unwrap().bytes - before[p])
            .collect();
        let sum: u64 = charged.iter().sum();
        let known = MACS[dev] == packet[..6] && matches!(packet[12..14], [8, 0] | [0x86, 0xdd]);
        let want = if known { packet.len() as u64 } else { 0 };
        assert_eq!(sum, want, "bytes charged, by path: {charged:?}");
        let by_it = charged[to] + charged[to + 2];
        assert_eq!(by_it, want, "charged to another path: {charged:?}");
        to
    }

    /// [`Rig::send_ctx`] with nothing special in the socket buffer.
    pub fn send(&self, dev: usize, packet: &[u8]) -> usize {
        self.send_ctx(dev, packet, PLAIN)
    }

    /// [`Rig::send`] of a packet to the gateway behind u`dev`.
    pub fn send_ip(&self, dev: usize, ip: &Ip) -> usize {
        self.send(dev, &ip.on(dev))
    }

    /// Sends a packet that leaves by u0: it goes by u`to`, and each of these counters goes up by one.
    #[track_caller]
    pub fn expect(&self, packet: &[u8], to: usize, counters: &[&str]) {
        let mut by = 0;
        let counted = self.counted(|| by = self.send(0, packet));
        let want: Vec<_> = counters.iter().map(|name| (*name, 1)).collect();
        assert_eq!((by, counted), (to, want), "{packet:02x?}");
    }

    pub fn flows(&self) -> Vec<Flow> {
        self.steer.flows().dump(0)
    }

    /// Forgets all flows.
    pub fn clear_flows(&self) {
        self.steer.flows().forget(|_| true);
    }

    /// The only flow there is.
    pub fn flow(&self) -> Flow {
        let flows = self.flows();
        assert_eq!(flows.len(), 1, "{flows:?}");
        flows[0].clone()
    }

    pub fn stat(&self, name: &str) -> u64 {
        self.steer.stats().unwrap()[name]
    }

    /// Counters that went up while `f` ran, and by how much.
    pub fn counted(&self, f: impl FnOnce()) -> Vec<(&'static str, u64)> {
        let before = self.steer.stats().unwrap();
        f();
        let after = self.steer.stats().unwrap();
        after
            .into_iter()
            .map(|(name, n)| (n - before[&name], name))
            .filter(|(n, _)| *n > 0)
            // As long as the test runs, which is short.
            .map(|(n, name)| (&*name.leak(), n))
            .collect()
    }
}

/// One BPF_PROG_RUN: (action, length of the output, ns per run).
pub fn prog_run(
    steer: &Steer,
    ifindex: u32,
    packet: &[u8],
    ctx: Ctx,
    repeat: u32,
    out: &mut [u8],
) -> std::io::Result<(i32, usize, u32)> {
    run_program(steer.program().as_fd(), ifindex, packet, ctx, repeat, out)
}

/// The same of any program for tcx.
pub fn run_program(
    program: BorrowedFd<'_>,
    ifindex: u32,
    packet: &[u8],
    ctx: Ctx,
    repeat: u32,
    out: &mut [u8],
) -> std::io::Result<(i32, usize, u32)> {
    let ctx = ctx.bytes(ifindex);
    let mut opts = libbpf_sys::bpf_test_run_opts {
        sz: size_of::<libbpf_sys::bpf_test_run_opts>() as libbpf_sys::size_t,
        data_in: packet.as_ptr().cast(),
        data_size_in: packet.len() as u32,
        data_out: out.as_mut_ptr().cast(),
        data_size_out: out.len() as u32,
        ctx_in: ctx.as_ptr().cast(),
        ctx_size_in: ctx.len() as u32,
        repeat: repeat as i32,
        ..Default::default()
    };
    // SAFETY: all buffers are as long as the options say and outlive the call.
    let ret = unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_raw_fd(), &mut opts) };
    if ret != 0 {
        return Err(std::io::Error::from_raw_os_error(-ret));
    }
    let len = opts.data_size_out as usize;
    Ok((opts.retval as i32, len, opts.duration))
}

/// What the kernel knows of the program: `bpf_prog_info`.
pub fn prog_info(steer: &Steer) -> libbpf_sys::bpf_prog_info {
    let mut info = libbpf_sys::bpf_prog_info::default();
    let mut len = size_of_val(&info) as u32;
    let fd = steer.program().as_fd().as_raw_fd();
    // SAFETY: `info` outlives the call and is as long as told.
    let ret = unsafe { libbpf_sys::bpf_prog_get_info_by_fd(fd, &mut info, &mut len) };
    assert_eq!(ret, 0, "bpf_prog_get_info_by_fd");
    info
}

/// A map of the program that [`Steer`] does not show, by name.
pub fn map_of(steer: &Steer, name: &str) -> MapHandle {
    let program = LoadedProgram::by_id(prog_info(steer).id).unwrap();
    let maps = program.maps.into_iter();
    maps.map(|id| MapHandle::from_map_id(id).unwrap())
        .find(|m| m.name() == name)
        .unwrap_or_else(|| panic!("the program has no map {name}"))
}
