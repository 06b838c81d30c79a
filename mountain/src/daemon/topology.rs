// SPDX-License-Identifier: GPL-2.0-or-later
//! From what netlink reads to what policy, prober and BPF program work on.

mod said;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ipnet::IpNet;
use tracing::{info, warn};

use super::ids::PathIds;
use super::probing::{doubts, leaves_by_gateway, measured_near, own_target, way, Doubt};
use super::{Daemon, NotPlacing, ADOPT_MS, NO_LINK, PLACE_AGAIN, PLACE_SELDOM};
use crate::bpf::{ProgramGroup, ProgramPath, Sources};
use crate::config::Config;
use crate::host::sysctl;
use crate::measure::probe::{ProbePath, Target};
use crate::netlink;
use crate::placement::{self, Placer};
use crate::steer::alike::Difference;
use crate::steer::config::{DEMOTED_COST_MS, METERED_COST_MS};
use crate::steer::policy::PathInput;
use crate::steer::rendezvous::{inv_weight, path_salt};
use crate::topology::{Kind, Member, Path, PathMasks, Topology};
pub(super) use said::no_groups;

/// The paths in use, by id, and the topology they come from.
#[derive(Default)]
pub(crate) struct Paths {
    ids: PathIds,
    /// Path id of each entry of `topology.paths`; `None` beyond the supported number.
    id_of: Vec<Option<usize>>,
    by_id: BTreeMap<usize, ConfiguredPath>,
    topology: Topology,
    masks: Vec<Option<PathMasks>>,
    /// Of each group, why its flows are not moved.
    held: Vec<Option<Difference>>,
    /// Warnings about how the paths are measured.
    doubts: BTreeSet<Doubt>,
    /// What the log last said of each group.
    told: Vec<String>,
    /// Devices that carry out IPsec by themselves, so that packets are plain here; `None`: any may.
    offloading: Option<BTreeSet<u32>>,
}

/// Cost factor of the published rule (policy `argmax-load`, a baseline).
const ARGMAX_COST_WEIGHT: u32 = 100;

/// For how long a path without routes is known to answer: while BGP gives a next hop up and takes it again, its session
/// takes some seconds. After longer, another host may have the gateway's address, and drop pings.
const STILL_ANSWERS: Duration = Duration::from_secs(60);

/// Where probes go that are never sent.
const NOBODY: Target = Target::Icmp(IpAddr::V4(Ipv4Addr::LOCALHOST));

/// A path with what the configuration says about it.
pub(super) struct ConfiguredPath {
    path: Path,
    /// What the policy is told.
    pub(super) input: PathInput,
    target: Option<Target>,
    /// See [`leaves_by_gateway`].
    probed_by_gateway: bool,
}

impl Paths {
    /// Of each group, why its running flows are not moved although its routes would allow it.
    pub(crate) fn held(&self) -> &[Option<Difference>] {
        &self.held
    }

    /// Says of each group why its flows are not moved; from the next [`Daemon::write_routes`] on.
    pub(crate) fn hold(&mut self, held: Vec<Option<Difference>>) {
        self.held = held;
        self.masks.fill(None);
    }

    pub(crate) fn any(&self) -> bool {
        !self.by_id.is_empty()
    }

    pub(crate) fn ids(&self) -> Vec<usize> {
        self.by_id.keys().copied().collect()
    }

    /// Ids of the paths that can be probed. Of one whose device has lost its address the kernel would ask for the gateway with an
    /// address of another device.
    pub(crate) fn probed(&self) -> Vec<usize> {
        let has_source = |path: &Path| path.key.ipv6 || path.up || !path.addresses.is_empty();
        self.matching(|known| known.target.is_some() && has_source(&known.path))
    }

    /// Whether the program counts a path's probes: it knows the path's packets by the gateway's link-layer address.
    pub(super) fn are_probes_seen(&self, id: usize) -> bool {
        let is_seen = |k: &ConfiguredPath| {
            k.path.ethernet && k.path.gateway_mac.is_some() && k.probed_by_gateway
        };
        self.by_id.get(&id).is_some_and(is_seen)
    }

    /// Indexes of the paths' devices, each once.
    pub(crate) fn devices(&self) -> Vec<u32> {
        let mut devices: Vec<u32> = self.by_id.values().map(|k| k.path.key.ifindex).collect();
        devices.sort();
        devices.dedup();
        devices
    }

    pub(crate) fn name(&self, id: usize) -> &str {
        self.by_id.get(&id).map_or("?", |k| &k.input.name)
    }

    pub(crate) fn target_text(&self, id: usize) -> String {
        match self.by_id.get(&id).and_then(|k| k.target) {
            Some(Target::Icmp(ip)) => ip.to_string(),
            Some(Target::Reflector(addr)) => format!("{addr} (reflector)"),
            None => "nothing".into(),
        }
    }

    pub(crate) fn path(&self, id: usize) -> Option<&Path> {
        self.by_id.get(&id).map(|k| &k.path)
    }

    pub(crate) fn topology(&self) -> &Topology {
        &self.topology
    }

    fn paths(&self) -> BTreeMap<usize, Path> {
        let paths = self.by_id.iter();
        paths.map(|(id, known)| (*id, known.path.clone())).collect()
    }

    /// The path id of an entry of [`Topology::paths`].
    pub(crate) fn id(&self, index: usize) -> Option<usize> {
        self.id_of.get(index).copied().flatten()
    }

    /// Whether a path has another MTU by now. Nothing announces one of IPv6.
    pub(super) fn has_other_mtu(&self) -> bool {
        let paths = self.by_id.values().map(|known| &known.path);
        let mut ipv6 = paths.filter(|path| path.key.ipv6);
        ipv6.any(|path| {
            let mtu = sysctl::number(&format!("net/ipv6/conf/{}/mtu", path.ifname));
            mtu.is_some_and(|mtu| mtu != path.mtu)
        })
    }

    pub(crate) fn on_device(&self, ifindex: u32) -> Vec<usize> {
        self.matching(|known| known.path.key.ifindex == ifindex)
    }

    pub(crate) fn by_gateway(&self, ifindex: u32, addr: IpAddr) -> Vec<usize> {
        self.matching(|known| {
            let key = known.path.key;
            key.ifindex == ifindex && key.gateway == Some(addr)
        })
    }

    fn matching(&self, test: impl Fn(&ConfiguredPath) -> bool) -> Vec<usize> {
        self.by_id
            .iter()
            .filter(|(_, known)| test(known))
            .map(|(id, _)| *id)
            .collect()
    }

    pub(crate) fn gateway(&self, id: usize) -> Option<(u32, IpAddr)> {
        let key = self.path(id)?.key;
        Some((key.ifindex, key.gateway?))
    }

    /// Notes a gateway's address; returns whether that changed anything.
    pub(crate) fn set_mac(&mut self, id: usize, mac: [u8; 6]) -> bool {
        match self.by_id.get_mut(&id) {
            Some(k) if k.path.gateway_mac != Some(mac) => {
                k.path.gateway_mac = Some(mac);
                true
            }
            _ => false,
        }
    }

    /// Paths whose gateway had no usable neighbour entry at the last reading, of those that need
    /// one: packets to a device without Ethernet headers bear no address.
    pub(crate) fn without_entry(&self) -> Vec<usize> {
        let topology = &self.topology;
        (0..topology.paths.len())
            .filter(|&i| topology.paths[i].ethernet && topology.paths[i].gateway_mac.is_none())
            .filter_map(|i| self.id(i))
            .collect()
    }

    /// Which devices carry out IPsec by themselves from now on (`None`: any may); returns those for which that is
    /// new.
    pub(crate) fn set_offloading(&mut self, devices: Option<BTreeSet<u32>>) -> Vec<u32> {
        let before = std::mem::replace(&mut self.offloading, devices);
        match (before, &self.offloading) {
            (Some(before), Some(now)) => before.symmetric_difference(now).copied().collect(),
            (None, None) => Vec::new(),
            _ => self.devices(),
        }
    }

    fn may_offload(&self, device: u32) -> bool {
        let devices = self.offloading.as_ref();
        devices.is_none_or(|devices| devices.contains(&device))
    }

    pub(crate) fn path_config(&self, id: usize) -> Option<ProgramPath> {
        let k = self.by_id.get(&id)?;
        let p = &k.path;
        Some(ProgramPath {
            ifindex: p.key.ifindex,
            mtu: p.mtu,
            ipv6: p.key.ipv6,
            gateway: p.key.gateway?,
            mac: p.gateway_mac,
            ethernet: self.topology.can_redirect(p) && !self.may_offload(p.key.ifindex),
            up: p.up,
            salt: path_salt(format!("{} via {:?}", p.ifname, p.key.gateway).as_bytes()),
            cost_weight: ARGMAX_COST_WEIGHT,
        })
    }

    /// Of the path that the kernel takes for all of a group, some of whose members are alive: whether it is IPv6's, and
    /// alive.
    pub(crate) fn preferred(&self, group: usize, alive: u16) -> Option<(bool, bool)> {
        let group = self.topology.groups.get(group)?;
        let is_it = |member: &Member| Some(member.path) == group.preferred;
        let at = group.members.iter().position(is_it)?;
        let ipv6 = self.topology.paths[group.members[at].path].key.ipv6;
        Some((ipv6, alive >> at & 1 == 1))
    }

    /// Which members of a group are reserves.
    pub(crate) fn reserves_of(&self, group: usize, config: &Config) -> u16 {
        let members = self.topology.groups.get(group).into_iter();
        let members = members.flat_map(|group| group.members.iter().enumerate());
        members
            .filter(|(_, member)| is_reserve(&self.topology.paths[member.path], config))
            .fold(0, |mask, (i, _)| mask | 1 << i)
    }

    /// Remembers the masks of a group; returns whether they differ from the last ones.
    pub(crate) fn masks_changed(&mut self, group: usize, masks: PathMasks) -> bool {
        match self.masks.get_mut(group) {
            Some(known) if *known != Some(masks) => {
                *known = Some(masks);
                true
            }
            _ => false,
        }
    }

    fn replace(&mut self, topology: Topology, config: &Config) {
        let keys: Vec<_> = topology.paths.iter().map(|p| p.key).collect();
        self.id_of = self.ids.assign(&keys);
        let before = std::mem::take(&mut self.by_id);
        let near = measured_near(&topology, config, way);
        self.doubts = doubts(&topology, config, &near, way);
        for (index, (path, id)) in topology.paths.iter().zip(&self.id_of).enumerate() {
            let Some(id) = *id else { continue };
            let mut known = configured(&topology, index, config);
            if near.contains(&index) {
                let own = own_target(&topology, index, config);
                let target = known.target.filter(|_| own.is_none());
                known.target = path.key.gateway.map(Target::Icmp).or(target);
            }
            let target = known.target.map(Target::ip);
            known.probed_by_gateway = target.is_some_and(|ip| leaves_by_gateway(path, ip, way));
            // A gateway keeps its last address while its entry is gone, see `neighbour_lost`.
            let last = before.get(&id).filter(|b| b.path.key == path.key);
            known.path.gateway_mac = path.gateway_mac.or(last.and_then(|l| l.path.gateway_mac));
            known.input.answers = last.is_some_and(|l| l.input.answers);
            self.by_id.insert(id, known);
        }
        self.masks = vec![None; topology.groups.len()];
        self.topology = topology;
    }

    /// The paths as those need them who place new flows.
    fn known(&self) -> BTreeMap<usize, placement::PlacementPath> {
        let known = |index: usize| {
            let id = self.id(index)?;
            let salt = self.path_config(id)?.salt;
            let name = self.name(id).to_owned();
            Some((id, placement::PlacementPath { index, name, salt }))
        };
        (0..self.topology.paths.len()).filter_map(known).collect()
    }

    /// Path ids and weights of each group, without paths that got no id. The prefixes are those whose
    /// running flows move.
    pub(super) fn groups(&self) -> Vec<ProgramGroup> {
        let groups = self.topology.groups.iter();
        let groups = groups.zip(moved(&self.topology, &self.held));
        groups
            .map(|(g, prefixes)| ProgramGroup {
                members: g
                    .members
                    .iter()
                    .filter_map(|m| Some((self.id(m.path)?, inv_weight(m.weight))))
                    .collect(),
                prefixes,
            })
            .collect()
    }
}

/// Of each group of a topology the destinations whose running flows move. `held`: of each group, why its flows do not.
pub(super) fn moved(topology: &Topology, held: &[Option<Difference>]) -> Vec<Vec<IpNet>> {
    let groups = topology.groups.iter().enumerate();
    let moved = groups.map(|(i, group)| match group.kind.moves() && !is_held(held, i) {
        true => group.prefixes.clone(),
        false => Vec::new(),
    });
    moved.collect()
}

/// Destinations that are left to the kernel: also those of groups that are held, which may lie within
/// those of others.
pub(super) fn left(topology: &Topology, held: &[Option<Difference>]) -> Vec<IpNet> {
    let groups = topology.groups.iter().enumerate();
    let held = groups.filter(|(i, group)| group.kind.moves() && is_held(held, *i));
    let held = held.flat_map(|(_, group)| &group.prefixes);
    topology.not_ours.iter().chain(held).copied().collect()
}

fn is_held(held: &[Option<Difference>], group: usize) -> bool {
    held.get(group).is_some_and(Option::is_some)
}

/// Whether a path's traffic costs money: then it is a reserve.
fn is_metered(path: &Path, config: &Config) -> bool {
    let entry = config.path(&path.ifname, path.key.gateway);
    entry.and_then(|e| e.metered).unwrap_or(path.modem)
}

/// Whether a path has flows only while all others are dead, or far worse.
fn is_reserve(path: &Path, config: &Config) -> bool {
    path.demoted || is_metered(path, config)
}

/// The paths, by index, that are used while the others are dead.
pub(crate) fn reserves(topology: &Topology, config: &Config) -> BTreeSet<usize> {
    let paths = topology.paths.iter().enumerate();
    let reserves = paths.filter(|(_, path)| is_reserve(path, config));
    reserves.map(|(index, _)| index).collect()
}

pub(super) fn configured(topology: &Topology, index: usize, config: &Config) -> ConfiguredPath {
    let path = &topology.paths[index];
    let entry = config.path(&path.ifname, path.key.gateway);
    let metered = is_metered(path, config);
    // The kernel would send nothing there while another one is up, or half of all: paid for without need.
    let usual_ms = if metered { METERED_COST_MS } else { 0.0 };
    let cost_ms = entry.and_then(|e| e.cost).unwrap_or(usual_ms) * config.steer.cost_weight;
    ConfiguredPath {
        path: path.clone(),
        input: PathInput {
            name: config.path_name(topology, index),
            key: Some(path.key),
            capacity_bps: entry.and_then(|e| e.capacity_bps()),
            cost_us: 1e3
                * match path.demoted {
                    true => DEMOTED_COST_MS,
                    false => cost_ms,
                },
            metered,
            answers: false,
        },
        target: entry
            .and_then(|e| e.target(path.key.ipv6))
            .or(path.key.gateway.map(Target::Icmp)),
        probed_by_gateway: false,
    }
}

impl Daemon {
    /// Makes a reading of the kernel's routing what is steered from now on.
    pub(super) fn adopt(&mut self, topology: Topology) -> Result<()> {
        let same_routing = self.has_adopted
            && self.paths.topology.groups == topology.groups
            && keys(&self.paths.topology) == keys(&topology);
        let unchanged = self.paths.topology == topology;
        if unchanged && self.has_adopted && self.failed_at.is_none() {
            return Ok(());
        }
        self.has_adopted = true;
        let known_reasons = self.paths.topology.skipped.clone();
        let same_reasons = known_reasons == topology.skipped;
        let first = !self.paths.any();
        let doubts = self.paths.doubts.clone();
        let told = self.paths.told.clone();
        let paths_before = self.paths.paths();
        self.paths.replace(topology, &self.config);
        for new in self.paths.doubts.difference(&doubts) {
            warn!("{}: {}", new.what, new.todo);
        }
        if !same_routing || (self.paths.topology.groups.is_empty() && !same_reasons) {
            self.say_groups();
        }
        self.say_skipped(&known_reasons);
        let mut before = self.paths.held().to_vec();
        self.ask_firewall();
        if !same_routing || first {
            // The log repeats the reason, except for a group that did not change.
            for (i, was) in before.iter_mut().enumerate() {
                let same_group = told.get(i) == self.paths.told.get(i);
                if !same_group || self.paths.held().get(i) != Some(&*was) {
                    *was = None;
                }
            }
        }
        self.say_held(&before);
        self.say_held_cgroups();

        let groups = self.paths.groups();
        let n_ids = self.paths.ids().last().map_or(0, |id| id + 1);
        self.point_prober(n_ids)?;
        self.remember(paths_before);
        let inputs = (0..n_ids).map(|id| self.path_input(id)).collect();
        self.policy.set_topology(
            groups
                .iter()
                .map(|g| g.members.iter().map(|(id, _)| *id).collect())
                .collect(),
            inputs,
        );

        let mode = self.mode();
        if let Some(steer) = &mut self.steer {
            steer.keep_paths(|id| self.paths.by_id.contains_key(&id));
            for id in self.paths.by_id.keys().copied().collect::<Vec<_>>() {
                if let Some(config) = self.paths.path_config(id) {
                    steer.set_path(id, &config)?;
                }
            }
        }
        self.write_routes()?;
        if let Some(steer) = &mut self.steer {
            if !same_routing {
                steer.set_mode(mode, ADOPT_MS);
            }
            steer.attach_to(&self.paths.devices())?;
        }
        self.update_placer(&groups)?;
        for id in self.paths.ids() {
            let up = self.paths.path(id).is_some_and(|p| p.up);
            if !up || !first {
                self.usable(id, up, self.why_down(id));
            }
        }
        self.forget_unresolved();
        self.tick();
        Ok(())
    }

    /// Why a path that is down is so. Without an address in the gateway's network, the kernel drops the next hop or calls it
    /// dead while the link is up.
    fn why_down(&self, id: usize) -> &'static str {
        let path = self.paths.path(id).filter(|path| !path.up);
        match path.map(|path| netlink::link(path.key.ifindex)) {
            Some(Ok(link)) if link.up => "the kernel takes its next hop for dead",
            _ => NO_LINK,
        }
    }

    /// Makes up for events that were lost, or that a reading which shows the same as the one before has made
    /// void: of devices that were away meanwhile.
    pub(super) fn catch_up(&mut self) -> Result<()> {
        if let Some(steer) = &mut self.steer {
            steer.attach_to(&self.paths.devices())?;
        }
        for id in self.paths.ids() {
            if let Some(up) = self.paths.path(id).map(|path| path.up) {
                self.usable(id, up, self.why_down(id));
            }
        }
        Ok(())
    }

    /// Writes groups and destinations to the kernel's tables.
    pub(super) fn write_routes(&mut self) -> Result<()> {
        let Some(steer) = &mut self.steer else {
            return Ok(());
        };
        let t = &self.paths.topology;
        let sources = Sources {
            uplink_bound: t.uplink_bound_sources.clone(),
            movable: self.config.steer.movable_sources.clone(),
            own: t.own_sources.clone(),
        };
        let (groups, not_ours) = (self.paths.groups(), left(t, self.paths.held()));
        steer
            .set_topology(&groups, &not_ours, &t.fib_rules, &sources)
            .context("cannot write the routes to the program's tables")
    }

    /// Has new flows choose among the groups that are there now.
    pub(super) fn update_placer(&mut self, groups: &[ProgramGroup]) -> Result<()> {
        let topology = &self.paths.topology;
        let wanted =
            topology.has_placed() && self.config.placement.enabled && !self.options.dry_run;
        let failed = self.not_placing.as_ref();
        let is_not_due = failed.is_some_and(|failed| failed.at.elapsed() < failed.wait);
        if self.placer.is_none() && (!wanted || is_not_due) {
            return Ok(());
        }
        let known = self.paths.known();
        let left = self
            .firewall
            .left(topology, &reserves(topology, &self.config));
        let is_outdated = self.firewall.is_outdated();
        if let Some(placer) = &mut self.placer {
            placer.leave_new(left);
            placer.wait_for_firewall(is_outdated);
            return placer.update(topology, groups, &known);
        }
        let mode = self.placing_mode();
        let made = Placer::new(&self.config.placement, &self.config.rule).and_then(|mut placer| {
            placer.set_mode(mode);
            placer.leave_new(left);
            placer.wait_for_firewall(is_outdated);
            placer.update(topology, groups, &known)?;
            Ok(placer)
        });
        match made {
            Ok(placer) => {
                self.placer = Some(placer);
                if self.not_placing.take().is_some() {
                    info!("new flows choose their path from now on");
                }
            }
            // Where flows can be moved as well, that goes on without: a kernel may lack cgroups.
            Err(e)
                if topology.left_to_kernel().next().is_none()
                    && topology.groups.iter().all(|g| g.kind != Kind::Place) =>
            {
                let (why, before) = (format!("{e:#}"), self.not_placing.take());
                if before.as_ref().is_none_or(|before| before.why != why) {
                    warn!("new flows do not choose their path: {why}");
                }
                // It may last: a kernel that refuses the programs does so for good.
                let longer = before.map(|before| before.wait * 2);
                self.not_placing = Some(NotPlacing {
                    at: Instant::now(),
                    wait: longer.map_or(PLACE_AGAIN, |wait| wait.min(PLACE_SELDOM)),
                    why,
                });
            }
            Err(e) => return Err(e),
        }
        Ok(())
    }

    /// Has new flows choose, where that has failed while running ones are moved: what was missing may be there by now.
    pub(super) fn try_to_place(&mut self) {
        if self.not_placing.is_some() && self.suspended.is_none() && self.reader.is_settled() {
            let groups = self.paths.groups();
            if let Err(e) = self.update_placer(&groups) {
                self.cannot_follow(&e);
            }
        }
    }

    /// Removes what a daemon that was killed has left and that this one has no use for.
    pub(super) fn take_over(&mut self) -> Result<()> {
        if self.placer.is_none() && !self.options.dry_run && placement::clear()? {
            info!("removed the rules and tables that an earlier run has left");
        }
        Ok(())
    }

    fn path_input(&self, id: usize) -> PathInput {
        match self.paths.by_id.get(&id) {
            Some(k) => k.input.clone(),
            None => PathInput {
                name: format!("(gone {id})"),
                ..PathInput::default()
            },
        }
    }

    /// Notes which paths have lost their routes, and which of those that are back are known to answer: they may be dead
    /// by now, and would count as paths that never answered. `before`: the paths until now.
    fn remember(&mut self, before: BTreeMap<usize, Path>) {
        let back = |id: &usize| !before.contains_key(id);
        for id in self.paths.ids().into_iter().filter(back) {
            let Some((at, last)) = self.memory[id].gone.take() else {
                continue;
            };
            // With its link the gateway's entry has gone, and is mostly not there yet.
            let is_it = |path: &Path| {
                let is_other = path.gateway_mac.is_some() && path.gateway_mac != last.gateway_mac;
                path.key == last.key && !is_other
            };
            let known = self.paths.path(id).is_some_and(is_it) && at.elapsed() < STILL_ANSWERS;
            // Not from another address, nor by another target.
            let answers = known && self.prober.stats(id).answered > 0;
            let is_seen = self.paths.path(id).is_some_and(|p| p.gateway_mac.is_some());
            self.memory[id].last_mac = last.gateway_mac.filter(|_| answers && !is_seen);
            self.paths
                .by_id
                .entry(id)
                .and_modify(|k| k.input.answers = answers);
        }
        for (id, path) in before {
            if self.paths.path(id).is_none() {
                let answered = self.policy.has_answered(id);
                self.memory[id].gone = answered.then(|| (Instant::now(), path));
            }
        }
    }

    /// Points the prober at the paths; those that did not change keep their sockets.
    fn point_prober(&mut self, n_ids: usize) -> Result<()> {
        for id in 0..n_ids {
            let known = self.prober.paths().nth(id).cloned();
            let wanted = self.paths.by_id.get(&id).map(|k| ProbePath {
                ifname: k.path.ifname.clone(),
                ifindex: k.path.key.ifindex,
                source: k
                    .path
                    .source
                    .filter(|s| k.target.is_some_and(|t| t.is_ipv6() == s.is_ipv6())),
                target: k.target.unwrap_or(NOBODY),
            });
            // A hole in the ids: something must stand there, and is never sent to.
            let idle = || ProbePath {
                ifname: "lo".into(),
                ifindex: 1,
                source: None,
                target: NOBODY,
            };
            let wanted = wanted.or_else(|| known.is_none().then(idle));
            if let Some(wanted) = wanted.filter(|wanted| known.as_ref() != Some(wanted)) {
                self.prober.set_path(id, wanted)?;
            }
        }
        Ok(())
    }
}

fn keys(t: &Topology) -> Vec<crate::topology::PathKey> {
    t.paths.iter().map(|p| p.key).collect()
}
