// SPDX-License-Identifier: GPL-2.0-or-later
//! New flows choose their uplink, where a running one cannot change it: two providers, two addresses.
//!
//! [`Placer`] owns all that this needs of the kernel: a routing table for each uplink with the rules
//! that lead there ([`routing`]), the programs that say which (bpf/placement/placement.bpf.c), and the
//! table that keeps forwarded connections where they began ([`nft`]). Its drop takes all of it out.
//! A daemon that was killed, or made way for another one ([`Placer::leave`]), leaves rules, tables and
//! connection marks, by which flows go on where they are; new ones are the kernel's, and so are datagrams
//! of unconnected sockets. The next daemon takes them over, `mountain down` removes them.

mod aside;
pub mod config;
mod dead;
mod destinations;
pub(crate) mod forwarding;
mod gone;
mod held;
mod in_use;
mod left;
pub(crate) mod nft;
mod numbers;
mod open;
mod peers;
mod published;
mod routing;
mod status;
mod suspension;
pub(crate) mod uplinks;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};
use ipnet::IpNet;
use tracing::{debug, info, warn};

use crate::bpf::placement::{PlacementPrograms, PlacementRule, PlacementSettings, Wants};
use crate::bpf::tries::{Entries, Shared};
use crate::bpf::{self, ProgramGroup, SteerMode};
use crate::host::{cgroup, sysctl};
use crate::netlink;
use crate::topology::{Kind, Path, PathMasks, Placed, Topology};
use config::{NewFlows, PlacementConfig, RuleConfig, RuleUse, SpreadBy};
use dead::Dead;
use destinations::destinations;
use forwarding::Forwarding;
use gone::Gone;
use held::Held;
use in_use::InUse;
pub(crate) use left::{but_for, Left};
use numbers::Remembered;
use peers::Peers;
use routing::{describe, plan, PlacementPlan, To};
pub use status::PlacementStatus;
use suspension::Suspensions;

/// A path as the daemon knows it; by path id.
#[derive(Clone, Debug)]
pub struct PlacementPath {
    /// Index into [`Topology::paths`].
    pub index: usize,
    /// As decisions call the path.
    pub name: String,
    /// Of the path in rendezvous hashing.
    pub salt: u32,
}

/// Places the new flows of this network namespace, until it is dropped.
pub struct Placer {
    config: PlacementConfig,
    rules: Vec<RuleConfig>,
    /// Those of the rules that the programs have.
    in_force: Vec<PlacementRule>,
    /// What is said of the others.
    unresolved: Vec<String>,
    known: BTreeMap<usize, PlacementPath>,
    cgroup: PathBuf,
    /// Number of the cgroup that the programs are attached to.
    cgroup_id: Option<u64>,
    programs: PlacementPrograms,
    plan: PlacementPlan,
    /// Paths that take new flows; by path id.
    uplinks: BTreeMap<usize, Uplink>,
    /// Bits of the paths that deliver at all.
    alive: u64,
    /// By group, which members known servers keep.
    in_use: BTreeMap<usize, InUse>,
    dead: Dead,
    /// Destinations that no uplink's default route decides about.
    not_ours: Vec<IpNet>,
    /// Whether rules of others lead some packets another way.
    has_fib_rules: bool,
    /// Networks that the uplinks' addresses are in.
    uplink_nets: Vec<IpNet>,
    mode: SteerMode,
    /// Families of which flows are placed ([IPv4, IPv6]).
    places: [bool; 2],
    forwarding: Forwarding,
    suspensions: Suspensions,
    /// What the firewall leaves to the kernel by its last answer, and since when that is less than before.
    answered: Left,
    answered_less: Option<Instant>,
    /// What it was before, when all of it had been read.
    left_before: Left,
    /// What is left to it, and what was said of that.
    left: Left,
    said_left: Vec<String>,
    /// By family ([IPv4, IPv6]) whether the uplink is alive that the kernel takes for all.
    preferred: [Option<bool>; 2],
    /// Addresses of uplinks that have no rule, as connections from them are translated.
    held: Held,
    /// Uplinks that have just lost their default route.
    gone: Gone,
    peers: Peers,
    /// The numbers of uplinks whose devices may come back.
    remembered: Remembered,
    /// What is said of uplinks that new flows do not choose.
    closed: BTreeSet<String>,
    /// Whether rules and tables outlive it.
    leaves: bool,
}

/// A path that takes new flows.
struct Uplink {
    ifname: String,
    mark: u32,
    ipv6: bool,
    addresses: Vec<IpAddr>,
    /// Whether it may be chosen: it has an address for what is new.
    open: bool,
}

impl Placer {
    /// Loads the programs; nothing is attached or routed before [`Placer::update`].
    ///
    /// # Errors
    /// When the kernel refuses the programs, or there are no cgroups of version 2.
    pub fn new(config: &PlacementConfig, rules: &[RuleConfig]) -> Result<Self> {
        let cgroup = config.cgroup_folder()?;
        Ok(Self {
            config: config.clone(),
            rules: rules.to_vec(),
            in_force: Vec::new(),
            unresolved: Vec::new(),
            known: BTreeMap::new(),
            cgroup,
            cgroup_id: None,
            programs: PlacementPrograms::load(&settings(config))?,
            plan: PlacementPlan::default(),
            uplinks: BTreeMap::new(),
            alive: 0,
            in_use: BTreeMap::new(),
            dead: Dead::default(),
            not_ours: Vec::new(),
            has_fib_rules: false,
            uplink_nets: Vec::new(),
            mode: SteerMode::Pass,
            places: [false; 2],
            forwarding: Forwarding::default(),
            suspensions: Suspensions::default(),
            answered: Left::default(),
            answered_less: None,
            left_before: Left::default(),
            left: Left::default(),
            said_left: Vec::new(),
            preferred: [None; 2],
            held: Held::default(),
            gone: Gone::default(),
            peers: Peers::default(),
            remembered: Remembered::default(),
            closed: BTreeSet::new(),
            leaves: false,
        })
    }

    /// Makes these the paths and groups that new flows choose from. The masks of a group that is new
    /// are empty: the kernel's choice until [`Placer::set_masks`].
    ///
    /// # Errors
    /// When the kernel refuses a route, rule or attachment.
    pub fn update(
        &mut self,
        topology: &Topology,
        groups: &[ProgramGroup],
        known: &BTreeMap<usize, PlacementPath>,
    ) -> Result<()> {
        // Before the first rule: one that fails is tried again, and rules that come and go would be changes of
        // the routing each time.
        let followed = self.follow_cgroup();
        if self.cgroup_id.is_none() {
            followed?;
        }
        // Tables before marks, so that no mark leads nowhere.
        self.route(topology)?;
        let before = marks_of(&self.uplinks);
        let marks = self.look_at_uplinks(topology, known);
        let are_others = before != marks_of(&self.uplinks);
        self.programs.set_paths(&marks);
        if are_others {
            self.suspensions.looks.clear();
            self.forwarding.has_missed = true;
            self.go_on_with_peers();
        }
        self.dead.retain(|id| marks.contains_key(&id));
        let (groups, not_ours) = destinations(topology, groups);
        // Groups and members may have other numbers now.
        self.in_use.clear();
        self.has_fib_rules = !topology.fib_rules.is_empty();
        self.uplink_nets.clone_from(&topology.uplink_nets);
        self.write_nets();
        self.programs
            .set_topology(&groups, &not_ours, &topology.fib_rules)
            .context("cannot write the routes of new flows to the program's tables")?;
        let is_led = |ipv6| self.uplinks.values().any(|uplink| uplink.ipv6 == ipv6);
        let places = [false, true].map(|ipv6| topology.places_in(ipv6) && is_led(ipv6));
        // The masks of what is new are empty yet: nothing of it is placed meanwhile.
        self.leave_unconnected([0, 1].map(|i| places[i] && !self.places[i]));
        self.places = places;
        self.not_ours = not_ours;
        self.known.clone_from(known);
        self.look_at_rules();
        self.say_suspended(topology);
        self.say_left();
        self.forwarding.follow(topology);
        self.look_at_forwarding();
        Ok(())
    }

    /// Leaves sockets that send datagrams without a connection where the kernel has them: they may be in the
    /// middle of an exchange, whose other end knows them by their address. `which`: families ([IPv4, IPv6]).
    fn leave_unconnected(&self, which: [bool; 2]) {
        if which == [false; 2] {
            return;
        }
        let left = netlink::unconnected()
            .context("cannot list UDP sockets")
            .and_then(|cookies| {
                let of = |ipv6| match which[usize::from(ipv6)] {
                    true => self.programs.leave_unconnected(&cookies, ipv6),
                    false => Ok(()),
                };
                of(false).and(of(true))
            });
        if let Err(e) = left {
            warn!("unconnected flows that are under way may change their address: {e:#}");
        }
    }

    /// The table of destinations and what it holds after [`Placer::update`], which may be written
    /// ahead while new flows choose nothing.
    pub(crate) fn destinations(
        &self,
        topology: &Topology,
        groups: &[ProgramGroup],
    ) -> (Shared, Entries) {
        let (groups, not_ours) = destinations(topology, groups);
        let wanted = bpf::destinations(&groups, &not_ours);
        (self.programs.dests(), wanted)
    }

    /// Whether anything is adopted at the moment.
    pub(crate) fn is_idle(&self) -> bool {
        self.plan == PlacementPlan::default()
    }

    /// Has rules and tables of the uplinks follow a topology. Puts back what others have removed of them, and rules
    /// behind those that others have added.
    ///
    /// [`Placer::update`] does it as well, but comes late in what a reading leads to, and may never be reached.
    /// Rules and tables that stay as they were lead running flows to a gateway that is gone, or past a VPN.
    ///
    /// # Errors
    /// When the kernel refuses, or there are more uplinks than marks.
    pub(crate) fn route(&mut self, topology: &Topology) -> Result<()> {
        let (known, numbers) = if self.is_idle() {
            let there = uplinks::there()?;
            let numbers = there.numbers();
            (there, numbers)
        } else {
            (self.plan.routing.clone(), self.plan.numbers.clone())
        };
        self.hold_snated(topology, &known);
        let held = self.held.addresses();
        let (mask, present) = (self.config.mark_mask, routing::uplink_paths(topology));
        let gone = self.gone.follow(topology, present);
        let uplinks = routing::all_paths(topology, &gone);
        let numbers = self.remembered.and(numbers, &uplinks);
        let plan_with = |gone: &[Path]| plan((topology, gone), mask, &held, &numbers);
        let plan = plan_with(&gone)?;
        if !gone.is_empty() {
            self.gone.then(plan_with(&[])?);
        }
        let changed =
            uplinks::apply(&plan.routing).context("cannot set up the uplinks' routing")?;
        if changed && plan.routing == self.plan.routing {
            info!(
                "others have changed routing rules or tables of the uplinks, or added a rule of the same \
                 priority: put back, behind all rules of others"
            );
        }
        // What is in the kernel, whatever fails from here on.
        self.remembered.note(&plan.numbers, &uplinks);
        self.plan = plan;
        self.forget_translated();
        Ok(())
    }

    /// Looks up again what may have come or gone without an event: cgroups, and whether this host forwards and
    /// translates. To be called now and then.
    pub(crate) fn look_around(&mut self) {
        self.follow_answered();
        if self.is_idle() {
            return self.look_at_forwarding();
        }
        self.look_at_rules();
        // One that is gone for the moment has no processes.
        if let Err(e) = self.follow_cgroup() {
            debug!("{e:#}");
        }
        self.look_at_forwarding();
    }

    /// Attaches to the cgroup; anew where another one has taken its place, or somebody has taken the programs off.
    fn follow_cgroup(&mut self) -> Result<()> {
        let id = fs::metadata(&self.cgroup)
            .with_context(|| format!("cannot open the cgroup {}", self.cgroup.display()))?
            .ino();
        let is_known = self.cgroup_id == Some(id);
        if is_known && !self.programs.is_taken_off() {
            return Ok(());
        }
        if is_known {
            // For what has begun meanwhile the kernel has chosen.
            self.leave_unconnected(self.places);
        }
        self.programs.attach_cgroup(&self.cgroup)?;
        self.cgroup_id = Some(id);
        if is_known {
            warn!(
                "somebody had taken the programs that place new flows off {}: they are attached again",
                self.cgroup.display()
            );
        }
        Ok(())
    }

    /// Looks up the names of paths and cgroups in the rules. A rule whose path or cgroup is not there is left
    /// out, and said.
    fn look_at_rules(&mut self) {
        let (mut rules, mut unresolved) = (Vec::new(), Vec::new());
        for (i, rule) in self.rules.iter().enumerate() {
            match self.bpf_rule(rule) {
                Ok(rule) => rules.push(rule),
                Err(e) => unresolved.push(format!("rule {} is not in force: {e:#}", i + 1)),
            }
        }
        for said in unresolved.iter().filter(|s| !self.unresolved.contains(s)) {
            warn!("{said}");
        }
        self.unresolved = unresolved;
        if self.in_force != rules {
            self.programs.set_rules(&rules);
            self.in_force = rules;
        }
    }

    fn bpf_rule(&self, rule: &RuleConfig) -> Result<PlacementRule> {
        let m = &rule.matches;
        m.ensure_possible()?;
        let wants = match &rule.wants {
            RuleUse::Steadiest => Wants::Steadiest,
            RuleUse::Bulk => Wants::Bulk,
            RuleUse::Path(name) => {
                let named = self
                    .known
                    .iter()
                    .filter(|(_, path)| config::means(name, &path.name));
                let paths = named.fold(0, |bits, (id, _)| bits | 1u64 << id);
                anyhow::ensure!(paths != 0, "there is no path {name} at the moment");
                Wants::Paths(paths)
            }
        };
        let port = |n: u32| u16::try_from(n).unwrap_or(u16::MAX);
        Ok(PlacementRule {
            proto: m.proto.map(|proto| proto.0),
            ports: m.ports.map(|ports| (port(ports.0), port(ports.1))),
            dscp: m.dscp,
            cgroup: match &m.cgroup {
                Some(cgroup) => Some(cgroup::id(&cgroup::root()?, cgroup)?),
                None => None,
            },
            uid: m.uid.map(|uid| (uid.0, uid.1)),
            mark: m.mark.map(|mark| (mark.0, mark.1)),
            prefix: m.prefix,
            wants,
        })
    }

    /// Writes the verdict about a group. `in_use`: the members whose known servers stay for a while when they are not
    /// any more ([`InUse`]).
    pub fn set_masks(&mut self, group: usize, masks: PathMasks, in_use: u16) {
        let members = self.in_use.entry(group).or_default();
        let ejected = members.ejected(in_use, masks.alive, Instant::now());
        let masks = PathMasks { ejected, ..masks };
        self.programs.set_masks(group, masks);
        let (before, alive) = (self.alive, self.programs.alive());
        for &id in self.uplinks.keys() {
            let bit = |bits: u64| bits >> id & 1 == 1;
            self.dead.saw(id, bit(before), bit(alive));
        }
        self.alive = alive;
    }

    /// Who decides; only the daemon's verdict places flows.
    pub fn set_mode(&mut self, mode: SteerMode) {
        let begins = mode == SteerMode::Steer && self.mode != mode;
        if begins {
            // What begins before all are known is the kernel's.
            self.programs.set_paused(true);
        }
        self.programs.set_mode(mode);
        self.mode = mode;
        if begins {
            self.leave_unconnected(self.places);
            self.set_paused();
        }
    }

    /// From now on nothing is placed when `now_ns` is [`bpf::ALIVE_NS`] ago.
    pub(crate) fn say_alive(&mut self, now_ns: u64) {
        self.programs.say_alive(now_ns);
    }

    /// Takes what was attached off a device that is gone.
    pub(crate) fn forget(&mut self, ifindex: u32) {
        self.programs.forget(ifindex);
    }

    /// Places nothing any more, but leaves rules, tables and marks, by which flows go on where they are.
    pub(crate) fn leave(mut self) {
        self.leaves = true;
    }

    /// Flows that were placed on a path.
    pub fn placed(&self, path: usize) -> u64 {
        self.programs.placed(path)
    }
}

impl Drop for Placer {
    fn drop(&mut self) {
        // Marks first: what is marked needs its table. Nobody is left to tell a failure but the log.
        self.programs.detach();
        self.forwarding.wait();
        self.forwarding.forgetting.wait();
        self.dead.leaving.wait();
        if self.leaves {
            return;
        }
        // The table may be an earlier run's, which this one has not touched.
        if let Err(e) = clear() {
            warn!("{e:#}; `mountain down` tries again");
        }
    }
}

/// The same until the next boot: a restart of Mountain changes no server's uplink.
fn hash_seed() -> u32 {
    let id = sysctl::text("kernel/random/boot_id").unwrap_or_default();
    let id = u128::from_str_radix(&id.trim().replace('-', ""), 16);
    let fold = |id: u128| (id ^ id >> 32 ^ id >> 64 ^ id >> 96) as u32;
    id.map_or_else(|_| rand::random(), fold)
}

fn settings(config: &PlacementConfig) -> PlacementSettings {
    PlacementSettings {
        hash_seed: hash_seed(),
        mark_mask: config.mark_mask.bits(),
        by_address: config.spread == SpreadBy::Destination,
    }
}

/// Loads the programs as `config` says and lets go of them: whether this kernel takes them. Changes
/// nothing else.
///
/// # Errors
/// What the kernel said.
pub(crate) fn try_load(config: &PlacementConfig) -> Result<()> {
    PlacementPrograms::load(&settings(config)).map(drop)
}

/// Removes what a daemon that was killed has left in this network namespace. Says whether there was
/// anything.
///
/// # Errors
/// When the kernel refuses.
pub(crate) fn clear() -> Result<bool> {
    // Each, whatever becomes of the other.
    let (table, routing) = (nft::remove(), uplinks::remove_all());
    Ok(table? | routing?)
}

/// The families of which an earlier run has left rules, by which flows go on where they are, and the devices to which
/// its tables lead, or the main table those single destinations that these have ([`Topology::kept`]).
///
/// # Errors
/// When the kernel refuses to list them.
pub(crate) fn left_behind(config: &PlacementConfig) -> Result<Placed> {
    if !config.enabled {
        return Ok(Placed::default());
    }
    let there = uplinks::there()?;
    Ok([false, true].map(|ipv6| {
        let has_rules = there.rules.iter().any(|rule| rule.ipv6 == ipv6);
        let routes = there.routes.iter().filter(|route| route.ipv6 == ipv6);
        let devices = routes.flat_map(|route| {
            let own = match route.to {
                To::Gateway { ifindex, .. } => Some(ifindex),
                To::Unreachable => None,
            };
            let main = route
                .host
                .and_then(|host| netlink::egress_route(host, None, None).ok());
            own.into_iter().chain(main.map(|main| main.ifindex))
        });
        has_rules.then(|| devices.collect())
    }))
}

/// Whether an earlier run has left rules or its nftables table, or a saved ruleset has brought that back.
pub(crate) fn has_left() -> bool {
    let rules = left_behind(&PlacementConfig::default());
    rules.is_ok_and(|left| left.iter().any(Option::is_some)) || nft::is_there().unwrap_or(false)
}

/// What `up` would add to the kernel's routing, in the words of ip(8); nothing where no group's flows
/// choose when they start.
///
/// # Errors
/// When there are more uplinks than marks.
pub(crate) fn preview(topology: &Topology, config: &PlacementConfig) -> Result<Vec<String>> {
    if !config.enabled {
        return Ok(Vec::new());
    }
    let plan = plan(
        (topology, &[]),
        config.mark_mask,
        &BTreeSet::new(),
        &BTreeMap::new(),
    )?;
    let device = |ifindex: u32| {
        let mut paths = topology.paths.iter();
        let found = paths.find(|path| path.key.ifindex == ifindex);
        found.map_or(ifindex.to_string(), |path| path.ifname.clone())
    };
    Ok(describe(&plan.routing, device))
}

/// The mark of each uplink, by path id.
fn marks_of(uplinks: &BTreeMap<usize, Uplink>) -> Vec<(usize, u32)> {
    uplinks.iter().map(|(id, u)| (*id, u.mark)).collect()
}

/// The source address that the kernel gives to what leaves by a device: its own rules decide, RFC 6724
/// and temporary addresses included. Sends nothing.
fn source_by(ifname: &str, ipv6: bool) -> Option<IpAddr> {
    // Of documentation (RFC 5737, RFC 3849): a default route leads there.
    let (any, far): (IpAddr, IpAddr) = match ipv6 {
        false => (
            Ipv4Addr::UNSPECIFIED.into(),
            Ipv4Addr::new(203, 0, 113, 1).into(),
        ),
        true => (
            Ipv6Addr::UNSPECIFIED.into(),
            Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into(),
        ),
    };
    let socket = socket2::Socket::from(UdpSocket::bind(SocketAddr::new(any, 0)).ok()?);
    socket.bind_device(Some(ifname.as_bytes())).ok()?;
    let socket = UdpSocket::from(socket);
    socket.connect((far, 9)).ok()?;
    let source = socket.local_addr().ok()?.ip();
    (!source.is_unspecified()).then_some(source)
}

/// How a kind of group of so many paths reads.
pub(crate) fn kind_text(kind: Kind, paths: usize, new: NewFlows) -> &'static str {
    match (kind, new) {
        (Kind::Move, _) => "running flows move",
        (Kind::PlaceAndMove, NewFlows::Choose) => {
            "new flows choose, those without an uplink's address move"
        }
        (Kind::PlaceAndMove, NewFlows::Left) => {
            "flows without an uplink's address move, others are left to the kernel"
        }
        (Kind::Place, NewFlows::Choose) if paths == 1 => "the only uplink at the moment",
        (Kind::Place, NewFlows::Choose) => "new flows choose",
        (Kind::Place, NewFlows::Left) => "flows are left to the kernel",
    }
}

#[cfg(test)]
mod tests;
