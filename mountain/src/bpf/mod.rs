// SPDX-License-Identifier: GPL-2.0-or-later
//! The steering program in the kernel: loading, attaching, configuring, reading.
//!
//! [`Steer`] owns everything: when it is dropped, or its process dies, the kernel detaches the
//! program and packets take the kernel's own choice again.

mod skel {
    #![allow(clippy::all, non_snake_case, non_camel_case_types, dead_code)]
    include!(concat!(env!("OUT_DIR"), "/steer.skel.rs"));
}
pub(crate) mod encode;
pub mod flows;
pub mod foreign;
pub mod hooks;
mod numbers;
pub(crate) mod placement;
mod program;
mod settings;
pub(crate) mod tries;
mod weights;

use std::collections::{btree_map::Entry, BTreeMap};
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr;
use std::sync::LazyLock;
use std::time::Instant;

use anyhow::{anyhow, bail, Context, Result};
use ipnet::IpNet;
use libbpf_rs::btf::{self, Btf};
use libbpf_rs::skel::{OpenSkel, Skel};
use libbpf_rs::{AsRawLibbpf, MapCore, MapFlags, Object, OpenObject};
use nix::time::{clock_getres, clock_gettime, ClockId};
use serde::{Deserialize, Serialize};

use crate::host::socket_option;
pub use crate::topology::PathMasks;
use crate::topology::{FibRule, MAX_GROUPS, MAX_PATHS};
use flows::FlowTable;
use hooks::{DeviceHook, Order};
pub use program::SteerProgram;
pub use settings::Settings;
pub use skel::types;

/// Value of the destination tries for "not ours".
const NOT_OURS: u32 = u32::MAX;

/// Whether flows are moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SteerMode {
    /// Count, never move: the kernel's own choice.
    Pass = types::mtn_mode::MTN_MODE_PASS.0 as isize,
    /// By the rule of the program that runs ([`SteerProgram`]).
    Steer = types::mtn_mode::MTN_MODE_STEER.0 as isize,
}

/// One path as the program needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramPath {
    /// Index of the device that packets leave by.
    pub ifindex: u32,
    /// Network-layer bytes.
    pub mtu: u32,
    /// Carries IPv6; otherwise IPv4.
    pub ipv6: bool,
    /// Where packets go next, which its Ethernet address is looked up for.
    pub gateway: IpAddr,
    /// `None` while the neighbour entry is not usable: nothing is sent there.
    pub mac: Option<[u8; 6]>,
    /// The device has Ethernet headers.
    pub ethernet: bool,
    /// It has a carrier and is switched on; otherwise nothing is sent there.
    pub up: bool,
    /// Of the path in rendezvous hashing.
    pub salt: u32,
    /// Of the argmax-load baseline.
    pub cost_weight: u32,
}

/// A group: path ids and their [`crate::steer::rendezvous::inv_weight`]s, and the prefixes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramGroup {
    /// Path ids, each with its inverse weight.
    pub members: Vec<(usize, u32)>,
    /// Destinations that are reached by any of the members.
    pub prefixes: Vec<IpNet>,
}

/// Packets and bytes sent by a path since the program was loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathTraffic {
    /// How many packets.
    pub packets: u64,
    /// Their bytes, from the network header on.
    pub bytes: u64,
    /// Of latency flows, our own probes apart.
    pub latency_bytes: u64,
}

/// The loaded program with its links.
pub struct Steer {
    // Links before the skeleton: fields drop in order, and the program goes last.
    links: BTreeMap<u32, OwnedFd>,
    /// Behind the links in place of `skel`'s program, over its maps.
    baseline: Option<skel::SteerSkel<'static>>,
    skel: skel::SteerSkel<'static>,
    only_routed: bool,
    /// Of each group, whether it has destinations: one that is held has none.
    steered: Vec<bool>,
    /// When the weight of a group's member last fell, while flows follow that.
    lightened_at: Option<Instant>,
    table: FlowTable,
    dests: tries::Shared,
    sources: tries::Shared,
}

/// Source addresses about which something is known in advance (bpf/steer/sources.h). Of any other, user
/// space is asked.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// Of the uplinks: what bears one of them stays on its path.
    pub uplink_bound: Vec<IpAddr>,
    /// May take any path, unless it is uplink-bound.
    pub movable: Vec<IpNet>,
    /// Other addresses of the host: they may as well, but where somebody behind the uplinks has to translate them.
    pub own: Vec<IpAddr>,
}

/// Most sources with a permission to move.
pub const MAX_PERMITS: usize = types::mtn_permits::MTN_MAX_PERMITS.0 as usize;
/// A permission holds for so long, ns.
pub(crate) const PERMIT_NS: u64 = types::mtn_permits::MTN_PERMIT_S.0 as u64 * 1_000_000_000;
/// A daemon that has not said for so long that it follows the host is given up, ns (bpf/common/alive.h).
pub const ALIVE_NS: u64 = types::mtn_alive::MTN_ALIVE_S.0 as u64 * 1_000_000_000;

/// The destinations of groups, each with its group's index, among `not_ours`: for
/// [`tries::Tries::write`].
pub fn destinations(groups: &[ProgramGroup], not_ours: &[IpNet]) -> tries::Entries {
    let mut dests: tries::Entries = not_ours.iter().map(|p| (*p, NOT_OURS)).collect();
    for (i, group) in groups.iter().enumerate() {
        dests.extend(group.prefixes.iter().map(|p| (*p, i as u32)));
    }
    tries::sorted(dests)
}

/// Nanoseconds of CLOCK_MONOTONIC, the clock of `bpf_ktime_get_ns`.
pub fn now_ns() -> u64 {
    clock_ns(ClockId::CLOCK_MONOTONIC)
}

/// The same as of the last tick: the clock of `bpf_ktime_get_coarse_ns`, by which programs judge their age.
pub(crate) fn coarse_ns() -> u64 {
    clock_ns(ClockId::CLOCK_MONOTONIC_COARSE)
}

/// As the kernel has it: a container may be in a time namespace, which shifts the clock (time_namespaces(7)).
fn clock_ns(clock: ClockId) -> u64 {
    static SHIFT_NS: LazyLock<i64> = LazyLock::new(|| {
        let offsets = fs::read_to_string("/proc/self/timens_offsets").unwrap_or_default();
        shift_ns(&offsets).unwrap_or(0)
    });
    let t = clock_gettime(clock).expect("Linux has this clock");
    let shifted = t.tv_sec() as u64 * 1_000_000_000 + t.tv_nsec() as u64;
    shifted.saturating_add_signed(-*SHIFT_NS)
}

/// By how much CLOCK_MONOTONIC is ahead, as `/proc/PID/timens_offsets` says it.
fn shift_ns(offsets: &str) -> Option<i64> {
    let mut clocks = offsets.lines().map(str::split_whitespace);
    let mut monotonic =
        clocks.find_map(|mut words| (words.next()? == "monotonic").then_some(words))?;
    let mut number = || monotonic.next()?.parse::<i64>().ok();
    number()?.checked_mul(1_000_000_000)?.checked_add(number()?)
}

/// Resolution of the coarse clock, ns: the kernel's tick.
fn tick_ns() -> u32 {
    clock_getres(ClockId::CLOCK_MONOTONIC_COARSE)
        .expect("CLOCK_MONOTONIC_COARSE exists on Linux")
        .tv_nsec() as u32
}

impl Steer {
    /// Loads the program into the kernel, attached to nothing.
    pub fn load(settings: &Settings) -> Result<Self> {
        log_libbpf();
        let mut open = program::open(SteerProgram::Steer, settings.only_routed)?;
        let (near_slots, far_slots) = flows::slots(settings.flow_entries);
        let slots = near_slots + far_slots;
        open.maps.flows.set_max_entries(slots)?;
        open.maps.flow_keys.set_max_entries(slots)?;
        let skel = open
            .load()
            .context("the kernel refused the steering program")?;
        foreign::note_own(skel.progs.mountain_steer.as_fd());
        let table = FlowTable::new(&skel.maps.flows, &skel.maps.flow_keys, slots)?;
        let dests = tries::Tries::new(&skel.maps.dest4, &skel.maps.dest6)?;
        let sources = tries::Tries::new(&skel.maps.source4, &skel.maps.source6)?;
        let mut steer = Self {
            links: BTreeMap::new(),
            baseline: None,
            skel,
            only_routed: settings.only_routed,
            steered: Vec::new(),
            lightened_at: None,
            table,
            dests,
            sources,
        };
        let bytes = |bps: u64| bps / 8 * settings.window_ms / 1000;
        let n_cpus = libbpf_rs::num_possible_cpus()? as u32;
        let bss = steer.bss();
        bss.config = types::mtn_config {
            mode: SteerMode::Pass as u32,
            near_slots,
            far_slots,
            hash_seed: settings.hash_seed,
            k_factor: settings.k_factor.min(1024),
            n_cpus,
            margin_us: settings.margin_us,
            tick_ns: tick_ns(),
            force_after_ns: settings.force_after_ms * 1_000_000,
            window_ns: settings.window_ms * 1_000_000,
            latency_below: bytes(settings.latency_below_bps),
            bulk_above: bytes(settings.bulk_above_bps),
            elastic_above: bytes(settings.elastic_above_bps),
            ..Default::default()
        };
        Ok(steer)
    }

    fn bss(&mut self) -> &mut types::bss {
        self.skel
            .maps
            .bss_data
            .as_deref_mut()
            .expect("the object has a .bss")
    }

    fn bss_ref(&self) -> &types::bss {
        self.skel
            .maps
            .bss_data
            .as_deref()
            .expect("the object has a .bss")
    }

    /// Attaches to the tcx egress of exactly these devices, also where another one has the index of one that is gone.
    pub fn attach_to(&mut self, ifindexes: &[u32]) -> Result<()> {
        self.links
            .retain(|at, link| ifindexes.contains(at) && hooks::is_at(link.as_fd(), *at));
        let skel = self.baseline.as_ref().unwrap_or(&self.skel);
        let program = skel.progs.mountain_steer.as_fd();
        for &ifindex in ifindexes {
            if let Entry::Vacant(place) = self.links.entry(ifindex) {
                let link = hooks::link(DeviceHook::TcxEgress, ifindex, program, Order::Last)
                    .with_context(|| {
                        let device = hooks::device_text(ifindex);
                        format!("cannot attach to the egress (tcx) of {device}")
                    })?;
                place.insert(link);
            }
        }
        Ok(())
    }

    /// Takes the program off a device that is gone, which may be in another network namespace now.
    pub fn forget(&mut self, ifindex: u32) {
        self.links.remove(&ifindex);
    }

    /// Switches the mode. Flows that are first seen in the `grace_ms` after it stay where the
    /// kernel has them, since their last packet is unknown. When steering begins, so do known ones.
    pub fn set_mode(&mut self, mode: SteerMode, grace_ms: u64) {
        let config = &mut self.bss().config;
        // The program's clock lags by up to a tick: now would be in its future.
        let until_ns = match grace_ms {
            0 => 0,
            ms => now_ns() + ms * 1_000_000,
        };
        publish(&mut config.grace_until_ns, until_ns);
        if mode == SteerMode::Steer && config.mode != mode as u32 {
            // Of the clock that stamps flows: a flow that begins now has begun since.
            let since_ns = clock_ns(ClockId::CLOCK_MONOTONIC_COARSE);
            publish(&mut config.steered_since_ns, since_ns);
        }
        publish(&mut config.mode, mode as u32);
    }

    /// From now on the program leaves all packets to the kernel when `now_ns` is [`ALIVE_NS`] ago.
    pub fn say_alive(&mut self, now_ns: u64) {
        publish(&mut self.bss().config.alive_ns, now_ns);
    }

    /// Whether flows that are first seen now stay where the kernel has them: see [`Steer::set_mode`].
    pub(crate) fn is_in_grace(&self) -> bool {
        /// How far the program's clock may lag: more than a tick.
        const TICK_NS: u64 = 10_000_000;
        now_ns() < self.bss_ref().config.grace_until_ns + TICK_NS
    }

    /// Writes a path. Ids are stable: an id is not reused for another next hop.
    pub fn set_path(&mut self, id: usize, path: &ProgramPath) -> Result<()> {
        if id >= MAX_PATHS {
            bail!("path {id} is beyond the {MAX_PATHS} paths of a host");
        }
        let bss = self.bss();
        let mut new = encode::path(path);
        let old = &mut bss.paths[id];
        (new.delay_max_us, new.delay_min_us) = (old.delay_max_us, old.delay_min_us);
        if path.mac.is_none() {
            // The flag first: no run may see the flag with a half-written address.
            publish(&mut old.flags, new.flags);
        }
        *old = new;
        bss.config.n_paths = bss.config.n_paths.max(id as u32 + 1);
        Ok(())
    }

    /// Has paths match no packet any more that are not among these: one that is gone would hide another by the same
    /// device and link-layer address.
    pub(crate) fn keep_paths(&mut self, is_there: impl Fn(usize) -> bool) {
        let bss = self.bss();
        let known = bss.config.n_paths as usize;
        for (id, path) in bss.paths.iter_mut().enumerate().take(known) {
            if !is_there(id) {
                publish(&mut path.flags, 0);
            }
        }
    }

    /// Writes what bounds the flowlet gap: a path's recent maximum and its minimum delay, in µs.
    pub fn set_delays(&mut self, id: usize, max_us: u32, min_us: u32) {
        if let Some(path) = self.bss().paths.get_mut(id) {
            (path.delay_max_us, path.delay_min_us) = (max_us, min_us);
        }
    }

    /// Replaces groups, their destinations, what is not ours, known sources and ip rules.
    /// The masks start empty (the kernel decides) until [`Steer::set_masks`].
    pub fn set_topology(
        &mut self,
        groups: &[ProgramGroup],
        not_ours: &[IpNet],
        fib_rules: &[FibRule],
        sources: &Sources,
    ) -> Result<()> {
        if groups.len() > MAX_GROUPS {
            bail!(
                "{} groups of paths, at most {MAX_GROUPS} are supported",
                groups.len()
            );
        }
        let fib_rules = fib_rules.iter().map(encode::fib_rule).collect::<Vec<_>>();
        let fib_rules_max = self.bss_ref().fib_rules.len();
        if fib_rules.len() > fib_rules_max {
            bail!(
                "{} ip rules to look out for, at most {fib_rules_max} are supported",
                fib_rules.len()
            );
        }
        let is_steered = |group: &ProgramGroup| !group.prefixes.is_empty();
        let steered = groups.iter().map(is_steered).collect();
        let before = std::mem::replace(&mut self.steered, steered);
        let mut lightened = false;
        let bss = self.bss();
        for i in 0..MAX_GROUPS {
            bss.group_masks[i].word = 0;
        }
        for (i, group) in groups.iter().enumerate() {
            let (mut new, old) = (encode::group(group)?, &mut bss.groups[i]);
            // What other routes do does not put off that flows are forced to leave. After a hold it begins anew.
            let same_paths = (new.n_members, new.path) == (old.n_members, old.path);
            if same_paths {
                let fell = weights::lighter(&old.inv_weight, &new.inv_weight);
                lightened |= fell != 0;
                new.lighter = old.lighter | fell;
            }
            if same_paths && before.get(i) == Some(&is_steered(group)) {
                new.leave_since_ns = old.leave_since_ns;
            }
            *old = new;
        }
        for gone in &mut bss.groups[groups.len()..] {
            gone.leave_since_ns = Default::default();
        }
        bss.fib_rules[..fib_rules.len()].copy_from_slice(&fib_rules);
        bss.config.n_fib_rules = fib_rules.len() as u32;
        if lightened {
            self.lightened_at = Some(Instant::now());
        }

        tries::lock(&self.dests).write(destinations(groups, not_ours))?;
        let (stays, moves, own) = (
            types::mtn_source_kind::MTN_SOURCE_STAYS.0,
            types::mtn_source_kind::MTN_SOURCE_MOVES.0,
            types::mtn_source_kind::MTN_SOURCE_OWN.0,
        );
        let is_movable = |a: &&IpAddr| sources.movable.iter().any(|p| p.contains(*a));
        let owned = sources.own.iter().filter(|a| !is_movable(a));
        let owned = owned.map(|a| (IpNet::from(*a), own));
        let bound = (sources.uplink_bound.iter()).map(|a| (IpNet::from(*a), stays));
        let movable = sources.movable.iter().map(|p| (p.trunc(), moves));
        let known = movable.chain(owned).chain(bound);
        tries::lock(&self.sources).write(tries::sorted(known.collect()))?;
        let config = &mut self.bss().config;
        let next = config.generation.wrapping_add(1);
        publish(&mut config.generation, next);
        Ok(())
    }

    /// The tables of destinations, which may be written ahead of [`Steer::set_topology`] where that
    /// takes long. Flows must not be steered meanwhile.
    pub(crate) fn dests(&self) -> tries::Shared {
        self.dests.clone()
    }

    /// Lets flows from a source take any path for [`PERMIT_NS`]: those that begin from `since_ns`
    /// (CLOCK_MONOTONIC) on and were not seen in the two seconds after it.
    ///
    /// # Errors
    /// When [`MAX_PERMITS`] sources have a permission.
    pub fn permit(&mut self, source: IpAddr, since_ns: u64) -> Result<()> {
        let permit = types::mtn_permit {
            since_ns,
            confirmed_ns: now_ns(),
        };
        let key = encode::source(source);
        self.skel
            .maps
            .permits
            .update(bytes_of(&key), bytes_of(&permit), MapFlags::ANY)
            .context("the table of sources that may move is full")
    }

    /// Takes a permission back. Flows in the table go on as they are until they are forgotten
    /// ([`FlowTable::forget`]).
    pub fn forbid(&mut self, source: IpAddr) {
        // It may never have been given.
        let key = encode::source(source);
        let _ = self.skel.maps.permits.delete(bytes_of(&key));
    }

    /// Takes out the sources that have asked for a permission since the last call.
    pub fn asked(&self) -> Vec<IpAddr> {
        let asked = &self.skel.maps.asked;
        let keys: Vec<Vec<u8>> = asked.keys().collect();
        for key in &keys {
            // Nobody else deletes.
            let _ = asked.delete(key);
        }
        let sources = keys.iter().map(|key| read_from::<types::mtn_source>(key));
        sources
            .map(|s| encode::to_addr(s.addr, s.ipv6 != 0))
            .collect()
    }

    /// Writes the verdict about a group. Members that a class has to leave are stamped with now:
    /// the time from which a forced move counts.
    pub fn set_masks(&mut self, group: usize, masks: PathMasks) {
        let now = now_ns();
        let bss = self.bss();
        let g = &mut bss.groups[group];
        g.full = masks.full;
        let stays = [masks.latency, masks.bulk & !masks.full];
        for (stays, since_ns) in stays.into_iter().zip(&mut g.leave_since_ns) {
            for (i, since_ns) in since_ns.iter_mut().enumerate() {
                match (stays & (1 << i) == 0, *since_ns) {
                    (true, 0) => *since_ns = now,
                    (false, _) => *since_ns = 0,
                    _ => {}
                }
            }
        }
        // SAFETY: the members of the union are 64 plain bits.
        let word = unsafe { &mut bss.group_masks[group].word };
        publish(word, encode::masks(masks));
    }

    /// Has flows stay again where weights have fallen some time ago.
    pub(crate) fn settle_weights(&mut self) {
        if self
            .lightened_at
            .is_some_and(|at| at.elapsed() >= weights::FOLLOWED)
        {
            self.lightened_at = None;
            self.bss()
                .groups
                .iter_mut()
                .for_each(|group| group.lighter = 0);
        }
    }

    /// Traffic sent by a path, summed over the CPUs.
    pub fn traffic(&self, path: usize) -> Result<PathTraffic> {
        let key = (path as u32).to_ne_bytes();
        let cpus = self
            .skel
            .maps
            .traffic
            .lookup_percpu(&key, MapFlags::ANY)?
            .ok_or_else(|| anyhow!("path {path} has no counters"))?;
        let mut sum = PathTraffic::default();
        for cpu in &cpus {
            let one: types::mtn_traffic = read_from(cpu);
            sum.packets += one.packets;
            sum.bytes += one.bytes;
            sum.latency_bytes += one.latency_bytes;
        }
        Ok(sum)
    }

    /// Packets on the paths so far to hosts on their links, as of neighbour discovery.
    pub(crate) fn packets_to_link(&self) -> Result<u64> {
        let key = types::mtn_stat::MTN_STAT_PASS_DEST.0.to_ne_bytes();
        let sum = sum_of_cpus(&self.skel.maps.stats, &key)?;
        Ok(sum.unwrap_or_default())
    }

    /// The two averages of a path, (ema_load, ema_time_delta) in B/s, as of its last packet. `None` unless
    /// [`SteerProgram::ArgmaxLoad`] runs, which keeps them.
    pub fn averages(&self, path: usize) -> Option<(u64, u64)> {
        self.baseline.as_ref()?;
        let a = self.bss_ref().averages[path];
        Some((a.ema_load, a.ema_time_delta))
    }

    /// The program's counters by name.
    pub fn stats(&self) -> Result<BTreeMap<String, u64>> {
        let skel = self.skel.object();
        counters(skel, &self.skel.maps.stats, "mtn_stat", "MTN_STAT_")
    }

    /// The table of flows.
    pub fn flows(&self) -> &FlowTable {
        &self.table
    }

    /// The ring buffer of moves, for [`flows::MoveLog`].
    pub fn move_map(&self) -> &impl MapCore {
        &self.skel.maps.moves
    }
}

/// Writes a field of live mapped memory that a program reads meanwhile.
fn publish<T>(place: &mut T, value: T) {
    // SAFETY: what is borrowed so is valid for writes and aligned.
    unsafe { ptr::write_volatile(place, value) };
}

/// A counter that each CPU has of its own, summed; `None`: there is none.
pub(crate) fn sum_of_cpus(map: &impl MapCore, key: &[u8]) -> Result<Option<u64>> {
    let cpus = map.lookup_percpu(key, MapFlags::ANY)?;
    Ok(cpus.map(|cpus| cpus.iter().map(|cpu| read_from::<u64>(cpu)).sum()))
}

/// The bytes of a structure of a program's.
pub(crate) fn bytes_of<T: Copy>(value: &T) -> &[u8] {
    // SAFETY: the generated types are plain numbers with their padding spelled out.
    unsafe { std::slice::from_raw_parts(ptr::from_ref(value).cast(), size_of::<T>()) }
}

/// A structure of a program's, which the bytes begin with.
///
/// # Panics
/// When there are too few bytes.
pub(crate) fn read_from<T: Copy>(bytes: &[u8]) -> T {
    assert!(bytes.len() >= size_of::<T>());
    // SAFETY: as many bytes as the type has; the generated types are plain numbers.
    unsafe { bytes.as_ptr().cast::<T>().read_unaligned() }
}

/// A per-CPU array of counters, summed, by the names of the enumeration `of` without their prefix. The
/// enumeration is read from the object's type information.
fn counters(
    object: &Object,
    map: &impl MapCore,
    of: &str,
    prefix: &str,
) -> Result<BTreeMap<String, u64>> {
    // SAFETY: the object lives as long as its borrow.
    let object = unsafe { object.as_libbpf_object().as_ref() };
    let btf = Btf::from_bpf_object(object)?.context("the BPF object has no type information")?;
    let names: btf::types::Enum = btf.type_by_name(of).context("the object has no counters")?;
    let mut counters = BTreeMap::new();
    for member in names.iter() {
        let name = member.name.unwrap_or_default().to_string_lossy();
        let name = name.trim_start_matches(prefix).to_lowercase();
        // The last one is their number.
        if let Some(sum) = sum_of_cpus(map, &(member.value as u32).to_ne_bytes())? {
            counters.insert(name, sum);
        }
    }
    Ok(counters)
}

/// Sends libbpf's messages, the verifier's log among them, to ours. They are long and for developers:
/// MOUNTAIN_LOG=debug shows them.
pub fn log_libbpf() {
    libbpf_rs::set_print(Some((libbpf_rs::PrintLevel::Debug, |_, text| {
        tracing::debug!(target: "libbpf", "{}", text.trim_end());
    })));
}

/// A place for an opened object, for the life of the process: the skeleton borrows it.
pub fn object() -> &'static mut MaybeUninit<OpenObject> {
    Box::leak(Box::new(MaybeUninit::uninit()))
}

/// A number that only the calling thread's network namespace has and has had since the machine started.
pub(crate) fn namespace_cookie() -> io::Result<u64> {
    let socket = std::net::UdpSocket::bind("0.0.0.0:0")?;
    let mut cookie = 0u64;
    // SAFETY: a plain integer. Since 5.14.
    unsafe {
        socket_option::get(
            &socket,
            libc::SOL_SOCKET,
            libc::SO_NETNS_COOKIE,
            &mut cookie,
        )
    }?;
    Ok(cookie)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shift_of_a_time_namespace_is_read() {
        let of = |seconds| format!("monotonic   {seconds}   500\nboottime   7   0\n");
        assert_eq!(shift_ns(&of("100")), Some(100_000_000_500));
        assert_eq!(shift_ns(&of("-2")), Some(-1_999_999_500));
        assert_eq!(shift_ns("boottime 7 0\n"), None);
        assert_eq!(shift_ns(""), None);
    }
}
