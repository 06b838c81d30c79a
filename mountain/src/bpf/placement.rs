// SPDX-License-Identifier: GPL-2.0-or-later
//! The programs that place new flows (bpf/placement/placement.bpf.c): loading, attaching, configuring, reading.
//!
//! [`PlacementPrograms`] owns the attachments: when it is dropped, or its process dies, new flows are the kernel's
//! to place again. The rules and tables that lead flows to their uplinks are not made here.

mod rules;

mod skel {
    #![allow(clippy::all, non_snake_case, non_camel_case_types, dead_code)]
    include!(concat!(env!("OUT_DIR"), "/placement.skel.rs"));
}

use std::collections::{btree_map::Entry, BTreeMap, BTreeSet, HashSet};
use std::fs::File;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{self, Ordering};
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use ipnet::IpNet;
use libbpf_rs::query::LinkTypeInfo;
use libbpf_rs::skel::{OpenSkel, Skel, SkelBuilder};
use libbpf_rs::{Link, MapCore, MapFlags};

use super::hooks::{self, DeviceHook, Order};
use super::{bytes_of, encode, numbers, publish, tries, ProgramGroup, SteerMode};
use crate::host::test_hooks::told;
use crate::host::{descriptors, sysctl};
use crate::topology::{FibRule, PathMasks, MAX_GROUPS, MAX_GROUP_PATHS, MAX_PATHS};
pub(crate) use rules::{PlacementRule, Wants, MAX_RULES};
use skel::types::{self, mtn_forwarded};

/// Most hosts behind this one that are known to have ports forwarded, `MTN_MAX_PUBLISHED`.
pub(crate) const MAX_PUBLISHED: usize = 4096;

/// An exchange of datagrams without a connection that rests for so long may start by another path.
/// RFC 4787, REQ-5, asks NATs to keep a mapping for so long.
const EXCHANGE_REST: Duration = Duration::from_secs(300);

/// First and last of the ports that the kernel gives sockets which ask for none; where it does not tell, all.
fn given_ports() -> (u16, u16) {
    let told = sysctl::text("net/ipv4/ip_local_port_range").unwrap_or_default();
    let mut ports = told.split_whitespace().map_while(|port| port.parse().ok());
    ports.next().zip(ports.next()).unwrap_or((0, u16::MAX))
}

/// [`EXCHANGE_REST`], but in tests, which cannot wait for five minutes.
pub(crate) fn exchange_rest() -> Duration {
    told("MOUNTAIN_EXCHANGE_REST_MS").map_or(EXCHANGE_REST, Duration::from_millis)
}

/// For so long at a time devices are attached to: no tick of the policy is late by that.
const ATTACHING: Duration = Duration::from_millis(40);

/// Settings that hold as long as the programs are loaded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlacementSettings {
    /// Of rendezvous hashing; another one gives other paths to the same flows.
    pub hash_seed: u32,
    /// The bits of packet marks that are ours.
    pub mark_mask: u32,
    /// One path for all of this host to one address, and for all of one behind it.
    pub by_address: bool,
}

/// The address that decides where new flows go, or both, see `mtn_stay()` (bpf/placement/choose.h).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Peer {
    /// From which a host behind this one sends.
    Host(IpAddr),
    /// From which a host behind this one sends, and to which: what is under way between them.
    Pair(IpAddr, IpAddr),
    /// To which this host does.
    Server(IpAddr),
}

/// What marks a path's flows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PathMark {
    /// What the flows' packets are marked with.
    pub mark: u32,
    /// Of the path in rendezvous hashing.
    pub salt: u32,
    /// Source of datagrams; `None` while it is not known.
    pub source: Option<IpAddr>,
    /// Whether new flows may choose it, ...
    pub open: bool,
    /// ... or only while no member of its group that they may choose is alive.
    pub spare: bool,
}

/// The loaded programs with their links.
pub(crate) struct PlacementPrograms {
    // Links before the skeleton: fields drop in order, and the programs go last.
    sockets: Vec<Link>,
    devices: BTreeMap<u32, OwnedFd>,
    /// Devices that have been attached to. Nobody sees what begins by one that is not at the moment.
    watched: BTreeSet<u32>,
    /// Whether connections were forgotten, and not yet remembered anew.
    has_forgotten: bool,
    skel: skel::PlacementSkel<'static>,
    groups: Vec<Vec<usize>>,
    /// Bits of the paths that new flows may choose, and of the spare ones.
    open: u64,
    spare: u64,
    dests: tries::Shared,
}

impl PlacementPrograms {
    /// Loads the programs for the calling thread's network namespace, attached to nothing.
    pub(crate) fn load(settings: &PlacementSettings) -> Result<Self> {
        super::log_libbpf();
        let open = skel::PlacementSkelBuilder::default()
            .open(super::object())
            .context("cannot open the BPF object of new flows")?;
        let skel = open
            .load()
            .context("the kernel refused the programs that place new flows")?;
        let dests = tries::Tries::new(&skel.maps.dest4, &skel.maps.dest6)?;
        let mut programs = Self {
            sockets: Vec::new(),
            devices: BTreeMap::new(),
            watched: BTreeSet::new(),
            has_forgotten: false,
            skel,
            groups: Vec::new(),
            open: 0,
            spare: 0,
            dests,
        };
        let netns_cookie =
            super::namespace_cookie().context("cannot tell which network namespace this is")?;
        programs.bss().config = types::mtn_placement_config {
            netns_cookie,
            idle_ns: exchange_rest().as_nanos() as u64,
            mode: SteerMode::Pass as u32,
            hash_seed: settings.hash_seed,
            mark_mask: settings.mark_mask,
            by_address: settings.by_address.into(),
            ..Default::default()
        };
        Ok(programs)
    }

    fn bss(&mut self) -> &mut types::bss {
        self.skel
            .maps
            .bss_data
            .as_deref_mut()
            .expect("the object has a .bss")
    }

    /// Places the flows of the sockets of a cgroup, and of those below it.
    pub(crate) fn attach_cgroup(&mut self, cgroup: &Path) -> Result<()> {
        let folder = File::open(cgroup)
            .with_context(|| format!("cannot open the cgroup {}", cgroup.display()))?;
        let progs = &self.skel.progs;
        let programs = [
            &progs.mountain_con4,
            &progs.mountain_con6,
            &progs.mountain_msg4,
            &progs.mountain_msg6,
        ];
        let mut links = Vec::new();
        for program in programs {
            let link = program.attach_cgroup(folder.as_raw_fd());
            links.push(link.with_context(|| {
                format!(
                    "cannot attach to {}: is it a cgroup of version 2?",
                    cgroup.display()
                )
            })?);
        }
        self.sockets = links;
        Ok(())
    }

    /// Whether somebody has taken a program off the cgroup. Nothing tells of that.
    pub(crate) fn is_taken_off(&self) -> bool {
        let is_off = |link: &Link| match link.info().map(|link| link.info) {
            Ok(LinkTypeInfo::Cgroup(at)) => at.cgroup_id == 0,
            // Nothing says that it is.
            _ => false,
        };
        self.sockets.iter().any(is_off)
    }

    /// Leaves datagrams of these sockets, by cookie, to the kernel until they rest: those of a family, but for exchanges that
    /// these programs have placed.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(crate) fn leave_unconnected(&self, cookies: &[u64], ipv6: bool) -> Result<()> {
        let flow = types::mtn_unconnected {
            last_ns: super::now_ns(),
            path: MAX_PATHS as u32,
            ..Default::default()
        };
        for &cookie in cookies {
            let key = types::mtn_unconnected_key {
                cookie,
                ipv6: ipv6.into(),
                ..Default::default()
            };
            let map = &self.skel.maps.unconnected;
            let put = map.update(bytes_of(&key), bytes_of(&flow), MapFlags::ANY);
            put.context("cannot write the exchanges under way to the program's table")?;
        }
        Ok(())
    }

    /// Whether an exchange, `struct mtn_unconnected`, has not rested yet.
    fn is_fresh(&self, exchange: &[u8], now_ns: u64) -> bool {
        let bss = self.skel.maps.bss_data.as_deref();
        let idle_ns = bss.expect("the object has a .bss").config.idle_ns;
        let last_ns = exchange.first_chunk().map(|at| u64::from_ne_bytes(*at));
        last_ns.is_some_and(|at| now_ns.saturating_sub(at) < idle_ns)
    }

    /// Tells the paths of the connections that peers have, unless flows of theirs were placed elsewhere lately.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(crate) fn know_peers(&self, peers: &BTreeMap<Peer, usize>) -> Result<()> {
        let bss = self.skel.maps.bss_data.as_deref();
        let bss = bss.expect("the object has a .bss");
        let now = super::now_ns();
        // Room for those that come. A busy server's clients come last, to which it sends nothing by itself.
        let most = self.skel.maps.peers.max_entries() as usize / 2;
        for (peer, &path) in peers.iter().take(most) {
            let mut key = types::mtn_flow_key::default();
            let (from, to) = match *peer {
                Peer::Server(to) => (None, Some(to)),
                Peer::Host(from) => (Some(from), None),
                Peer::Pair(from, to) => (Some(from), Some(to)),
            };
            key.saddr = from.map_or_else(Default::default, encode::addr);
            key.daddr = to.map_or_else(Default::default, encode::addr);
            key.ipv6 = from.or(to).is_some_and(|address| address.is_ipv6()).into();
            let known = self.skel.maps.peers.lookup(bytes_of(&key), MapFlags::ANY)?;
            let flow = types::mtn_unconnected {
                last_ns: now,
                path: path as u32,
                mark: bss.paths[path].mark,
            };
            let is_same =
                |known: &[u8]| known[size_of::<u64>()..] == bytes_of(&flow)[size_of::<u64>()..];
            if known.is_some_and(|known| !is_same(&known) && self.is_fresh(&known, now)) {
                continue;
            }
            let put = (self.skel.maps.peers).update(bytes_of(&key), bytes_of(&flow), MapFlags::ANY);
            put.context("cannot write the connections under way to the program's table")?;
        }
        Ok(())
    }

    /// Tells the addresses of the bridges to whose ports the programs are attached: frames to others are passed on.
    ///
    /// # Errors
    /// When there are too many.
    pub(crate) fn set_bridges(&mut self, addresses: &BTreeSet<[u8; 6]>) -> Result<()> {
        let number = |&[a, b, c, d, e, f]: &[u8; 6]| u64::from_ne_bytes([a, b, c, d, e, f, 0, 0]);
        let numbers = addresses.iter().map(number).collect();
        numbers::write(&self.skel.maps.bridges, &numbers).context("too many bridges")
    }

    /// Places connections that come in by the devices of [`PlacementPrograms::attach_to`].
    pub(crate) fn place_forwarded(&mut self) {
        self.set_forwarded(mtn_forwarded::MTN_FORWARDED_PLACED);
    }

    /// Places no new ones of these. Connections that were placed keep their marks.
    pub(crate) fn keep_forwarded(&mut self) {
        self.set_forwarded(mtn_forwarded::MTN_FORWARDED_KNOWN);
    }

    fn set_forwarded(&mut self, to: mtn_forwarded) {
        // Nobody has seen which ones began.
        if self.bss().config.forwarded == mtn_forwarded::MTN_FORWARDED_LEFT.0 {
            self.forget_connections();
        }
        publish(&mut self.bss().config.forwarded, to.0);
    }

    /// Gives this mark to further packets of TCP connections, by from and to where they are sent, that began earlier.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(crate) fn remember(&mut self, tcp: &[(SocketAddr, SocketAddr)], mark: u32) -> Result<()> {
        let known = types::mtn_connection {
            // It may still be a SYN that is sent again.
            syn_ns: super::now_ns(),
            mark,
            epoch: self.bss().config.epoch,
        };
        for (source, to) in tcp {
            let key = types::mtn_flow_key {
                saddr: encode::addr(source.ip()),
                daddr: encode::addr(to.ip()),
                sport: source.port().to_be(),
                dport: to.port().to_be(),
                proto: libc::IPPROTO_TCP as u8,
                ipv6: source.is_ipv6().into(),
                ..Default::default()
            };
            let map = &self.skel.maps.connections;
            map.update(bytes_of(&key), bytes_of(&known), MapFlags::ANY)
                .context("cannot write earlier connections to the program's table")?;
        }
        Ok(())
    }

    /// Has no further packet get the mark that its connection's SYN has had, but where Netfilter keeps it, until they are
    /// remembered anew ([`PlacementPrograms::remember`]).
    pub(crate) fn forget_connections(&mut self) {
        let epoch = &mut self.bss().config.epoch;
        let next = epoch.wrapping_add(1);
        publish(epoch, next);
        self.has_forgotten = true;
    }

    /// Whether any were forgotten since this was asked last.
    pub(crate) fn has_forgotten(&mut self) -> bool {
        std::mem::take(&mut self.has_forgotten)
    }

    /// Places no new one for a moment, if any are placed.
    pub(crate) fn pause_forwarded(&mut self) {
        if self.bss().config.forwarded == mtn_forwarded::MTN_FORWARDED_PLACED.0 {
            self.keep_forwarded();
        }
    }

    /// Marks none of these.
    pub(crate) fn leave_forwarded(&mut self) {
        let left = mtn_forwarded::MTN_FORWARDED_LEFT.0;
        publish(&mut self.bss().config.forwarded, left);
    }

    /// Attaches to exactly these devices, by which forwarded connections come in; to be called again until it returns true:
    /// the kernel takes some 10 ms for each, and the daemon has more to do. One that cannot be attached to, as it
    /// has just been deleted, does not keep the others from it. None is attached to where they would take more than
    /// half of the descriptors: without any the daemon could ask the kernel nothing, and answer nobody.
    ///
    /// # Errors
    /// When there are too many devices, or the kernel refuses.
    pub(crate) fn attach_to(&mut self, ifindexes: &[u32]) -> Result<bool> {
        let begin = Instant::now();
        let is_late = || begin.elapsed() > ATTACHING;
        let most = descriptors::limit().map_or(usize::MAX, |limit| limit / 2);
        if ifindexes.len() > most {
            self.leave_forwarded();
            self.devices.retain(|_, _| is_late());
            bail!(
                "{} inner devices, at most {most} may be attached to: allow more open files, by LimitNOFILE= in the \
                 unit or `ulimit -n`",
                ifindexes.len()
            );
        }
        let wanted: HashSet<u32> = ifindexes.iter().copied().collect();
        self.devices.retain(|at, link| {
            is_late() || (wanted.contains(at) && hooks::is_at(link.as_fd(), *at))
        });
        let program = self.skel.progs.mountain_lan.as_fd();
        let (mut done, mut was_off) = (Ok(true), false);
        for &ifindex in ifindexes {
            if is_late() {
                done = done.and(Ok(false));
                break;
            }
            if let Entry::Vacant(place) = self.devices.entry(ifindex) {
                match hooks::link(DeviceHook::TcxIngress, ifindex, program, Order::Last) {
                    Ok(link) => {
                        place.insert(link);
                        was_off |= !self.watched.insert(ifindex);
                    }
                    // It has just been deleted: the kernel tells of that.
                    Err(e) if e.raw_os_error() == Some(libc::ENODEV) => {}
                    Err(e) => {
                        done = Err(e).with_context(|| {
                            let device = hooks::device_text(ifindex);
                            format!("cannot attach to the ingress (tcx) of {device}")
                        });
                    }
                }
            }
        }
        if was_off {
            self.forget_connections();
        }
        done.map(|all| all && !is_late())
    }

    /// Places nothing any more.
    pub(crate) fn detach(&mut self) {
        self.leave_forwarded();
        self.sockets.clear();
        self.devices.clear();
    }

    /// The tables of destinations, see [`super::Steer::dests`].
    pub(crate) fn dests(&self) -> tries::Shared {
        self.dests.clone()
    }

    /// Takes the program off a device that is gone, which may be in another network namespace now.
    pub(crate) fn forget(&mut self, ifindex: u32) {
        self.devices.remove(&ifindex);
        self.watched.remove(&ifindex);
    }

    /// Devices whose new connections are placed.
    pub(crate) fn attached(&self) -> Vec<u32> {
        self.devices.keys().copied().collect()
    }

    /// Whether flows are placed.
    pub(crate) fn set_mode(&mut self, mode: SteerMode) {
        publish(&mut self.bss().config.mode, mode as u32);
    }

    /// As [`super::Steer::say_alive`].
    pub(crate) fn say_alive(&mut self, now_ns: u64) {
        publish(&mut self.bss().config.alive_ns, now_ns);
    }

    /// Leaves this host's new flows of these families ([IPv4, IPv6]) to the kernel, but where a rule names their path, and
    /// unless the path is dead that the kernel takes ([`PlacementPrograms::set_preferred`]).
    pub(crate) fn set_left(&mut self, left: [bool; 2]) {
        publish(&mut self.bss().config.left, families(left));
    }

    /// Has forwarded flows of these hosts, at most [`MAX_PUBLISHED`], go by the path that the kernel takes: the firewall
    /// forwards ports of it to them. `others`: by family ([IPv4, IPv6]), to hosts that are not known, too.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(crate) fn set_published(
        &mut self,
        hosts: &BTreeSet<IpAddr>,
        others: [bool; 2],
    ) -> Result<()> {
        let keys = hosts
            .iter()
            .map(|host| bytes_of(&encode::source(*host)).to_vec());
        let written = numbers::write_keys(&self.skel.maps.published, &keys.collect())
            .context("cannot write down to whom ports are forwarded");
        // Whoever is not in the table: known as the others are.
        let others = others.map(|others| others || written.is_err());
        let config = &mut self.bss().config;
        publish(&mut config.publishes, families(others));
        publish(&mut config.n_published, hosts.len() as u32);
        self.forget_recent();
        written
    }

    /// Tells of each family whether the path is alive that the kernel takes; `None`: it takes several.
    pub(crate) fn set_preferred(&mut self, alive: [Option<bool>; 2]) {
        let config = &mut self.bss().config;
        publish(
            &mut config.preferred_dead,
            families(alive.map(|it| it == Some(false))),
        );
        publish(
            &mut config.preferred_known,
            families(alive.map(|it| it.is_some())),
        );
        self.forget_recent();
    }

    /// Whether new flows are left to the kernel for the moment. Exchanges in progress keep their address.
    pub(crate) fn set_paused(&mut self, paused: bool) {
        publish(&mut self.bss().config.paused, paused.into());
    }

    /// Writes what marks each path, by id; the others are no paths any more.
    pub(crate) fn set_paths(&mut self, marks: &BTreeMap<usize, PathMark>) {
        let bits = |test: fn(&PathMark) -> bool| {
            let these = marks.iter().filter(|(_, path)| test(path));
            these.fold(0, |bits, (id, _)| bits | 1u64 << (id % MAX_PATHS))
        };
        (self.open, self.spare) = (bits(|path| path.open), bits(|path| path.spare));
        let bss = self.bss();
        for (id, path) in bss.paths.iter_mut().enumerate() {
            let (mark, salt, addr) = marks.get(&id).map_or_else(Default::default, |m| {
                (
                    m.mark,
                    m.salt,
                    m.source.map(encode::addr).unwrap_or_default(),
                )
            });
            if (path.mark, path.salt, path.addr) == (mark, salt, addr) {
                continue;
            }
            // An address is several words: while it is written there is no such path.
            publish(&mut path.mark, 0);
            atomic::fence(Ordering::SeqCst);
            (path.salt, path.addr) = (salt, addr);
            atomic::fence(Ordering::SeqCst);
            publish(&mut path.mark, mark);
        }
    }

    /// Replaces groups, their destinations, and ip rules that come before ours. Of a group with `prefixes` new flows
    /// to these are placed. The masks of groups with other members start empty.
    pub(crate) fn set_topology(
        &mut self,
        groups: &[ProgramGroup],
        not_ours: &[IpNet],
        fib_rules: &[FibRule],
    ) -> Result<()> {
        if groups.len() > MAX_GROUPS {
            bail!(
                "{} groups, at most {MAX_GROUPS} are supported",
                groups.len()
            );
        }
        let before = std::mem::take(&mut self.groups);
        let bss = self.bss();
        if fib_rules.len() > bss.fib_rules.len() {
            bail!(
                "{} ip rules, at most {} are supported",
                fib_rules.len(),
                bss.fib_rules.len()
            );
        }
        let members: Vec<Vec<usize>> = groups
            .iter()
            .map(|group| group.members.iter().map(|(path, _)| *path).collect())
            .collect();
        // What is known of paths that stay holds on: an exchange must not lose its path for a moment.
        for (i, mask) in bss.group_masks.iter_mut().enumerate() {
            if before.get(i) != members.get(i) {
                mask.word = 0;
            }
        }
        let bits = members.iter().flatten();
        bss.alive_paths &= bits.fold(0, |bits, path| bits | 1u64 << (path % MAX_PATHS));
        for (i, group) in groups.iter().enumerate() {
            bss.groups[i] = same(encode::group(group)?);
        }
        let given = given_ports();
        for (i, fib_rule) in fib_rules.iter().enumerate() {
            let asked = fib_rule.sport;
            let may_be_given = asked.is_some_and(|(a, b)| a <= given.1 && given.0 <= b);
            bss.fib_rules[i] = types::mtn_fib_rule {
                auto_sport: may_be_given.into(),
                ..same(encode::fib_rule(fib_rule))
            };
        }
        bss.config.n_fib_rules = fib_rules.len() as u32;
        bss.config.fib_rules_need_dscp = fib_rules.iter().any(|rule| rule.tos.is_some()).into();
        self.groups = members;
        tries::lock(&self.dests).write(super::destinations(groups, not_ours))?;
        self.forget_recent();
        Ok(())
    }

    /// Replaces the networks whose forwarded flows are left to the kernel, as they are right on one uplink only: those
    /// that the uplinks' addresses are in, and those that nobody here translates. Those from the networks `unless` only
    /// where no rule names their path, and while the path lives that the kernel takes.
    pub(crate) fn set_nets(&mut self, nets: &[IpNet], unless: &[IpNet]) {
        let bss = self.bss();
        // More than there is room for, as also while they are written: the programs place no forwarded flow.
        publish(&mut bss.config.n_left_nets, u32::MAX);
        atomic::fence(Ordering::SeqCst);
        let nets = nets.iter().map(|net| (net, false));
        let nets = nets.chain(unless.iter().map(|net| (net, true)));
        for (slot, (net, unless)) in bss.left_nets.iter_mut().zip(nets.clone()) {
            let (addr, mask) = encode::prefix(Some(*net));
            *slot = types::mtn_left_net {
                addr,
                mask,
                ipv6: net.addr().is_ipv6().into(),
                unless: unless.into(),
            };
        }
        atomic::fence(Ordering::SeqCst);
        publish(&mut bss.config.n_left_nets, nets.count() as u32);
        self.forget_recent();
    }

    /// Has every forwarded flow be placed anew. To be called when all is written that they are placed by.
    fn forget_recent(&mut self) {
        let generation = &mut self.bss().config.generation;
        // 0 in the low 16 bits is what unused slots have.
        let next = *generation as u16 % u16::MAX + 1;
        publish(generation, next.into());
    }

    /// Replaces the user's rules, of which there are [`MAX_RULES`] at most.
    pub(crate) fn set_rules(&mut self, rules: &[PlacementRule]) {
        let config = &mut self.bss().config;
        // No run may see more rules than are written.
        config.n_rules = 0;
        config.rules_need_dscp = rules.iter().any(|rule| rule.dscp.is_some()).into();
        for (i, rule) in rules.iter().enumerate() {
            self.bss().rules[i] = rules::encode(rule);
        }
        self.bss().config.n_rules = rules.len() as u32;
        self.forget_recent();
    }

    /// Writes the verdict about a group.
    pub(crate) fn set_masks(&mut self, group: usize, masks: PathMasks) {
        let Some(members) = self.groups.get(group).cloned() else {
            return;
        };
        // What is on a closed path stays there, as long as it is alive.
        let (mut open, mut spare, mut alive) = (0, 0, self.alive());
        for (i, path) in members.iter().enumerate().take(MAX_GROUP_PATHS) {
            let bit = 1u64 << (path % MAX_PATHS);
            open |= u16::from(self.open & bit != 0) << i;
            spare |= u16::from(self.spare & bit != 0) << i;
            match masks.alive >> i & 1 {
                1 => alive |= bit,
                _ => alive &= !bit,
            }
        }
        let all = open | spare;
        let open = match masks.alive & open {
            0 => all,
            _ => open,
        };
        let word = encode::masks(PathMasks {
            latency: masks.latency & open,
            bulk: masks.bulk & open,
            // A rule that names a spare one has it used.
            alive: masks.alive & all,
            ejected: masks.ejected | all & !open,
            ..masks
        });
        let bss = self.bss();
        // SAFETY: the members of the union are 64 plain bits.
        publish(unsafe { &mut bss.group_masks[group].word }, word);
        publish(&mut bss.alive_paths, alive);
    }

    /// Bits of the ids of paths that deliver at all, by the verdicts written.
    pub(crate) fn alive(&self) -> u64 {
        let bss = self.skel.maps.bss_data.as_deref();
        bss.map_or(0, |bss| bss.alive_paths)
    }

    /// Flows that were placed on a path.
    pub(crate) fn placed(&self, path: usize) -> u64 {
        let bss = self.skel.maps.bss_data.as_deref();
        bss.and_then(|bss| bss.placed.get(path).copied())
            .unwrap_or(0)
    }

    /// The programs' counters by name.
    pub(crate) fn stats(&self) -> Result<BTreeMap<String, u64>> {
        let (object, map) = (self.skel.object(), &self.skel.maps.stats);
        super::counters(object, map, "mtn_placement_stat", "MTN_PLACE_")
    }
}

/// A bit for each family: 1 is IPv4's, 2 is IPv6's.
fn families([ipv4, ipv6]: [bool; 2]) -> u32 {
    u32::from(ipv4) | u32::from(ipv6) << 1
}

/// A struct of the other object's skeleton as this one's: one C struct, from one header.
fn same<A: Copy, B: Copy>(value: A) -> B {
    const { assert!(size_of::<A>() == size_of::<B>()) };
    // SAFETY: of one size, and integers only, of which any bytes are a valid value.
    unsafe { std::mem::transmute_copy(&value) }
}
