// SPDX-License-Identifier: GPL-2.0-or-later
//! Probes: when each is due, sending it, and what came back.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use tracing::{info, warn};

use super::topology::configured;
use super::{now_us, Daemon, TICK, TICK_IDLE};
use crate::config::Config;
use crate::measure::probe::{Answer, PathStats, Target};
use crate::netlink::egress_route;
use crate::steer::policy::pace::IDLE_US;
use crate::steer::policy::Event;
use crate::topology::{Group, Path, Topology};

/// A path is called unanswered after this many probes without any answer, ...
const UNANSWERED: u64 = 60;
/// ... and not before this time: a device that was plugged in again may need some seconds.
const UNANSWERED_FOR: Duration = Duration::from_secs(10);

/// How a path's probes to an address leave its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// By this gateway: the kernel's choice among those of the device.
    Gateway(IpAddr),
    /// The address is on the device's own link.
    OnLink,
    /// The path is down, or there is no route.
    Unknown,
}

/// How a path's probes to an address leave. Of a path that is down it is not known: the kernel takes every address for one
/// on the link of a device that is named and has no route to it.
pub(crate) fn way(path: &Path, target: IpAddr) -> Way {
    if !path.up {
        return Way::Unknown;
    }
    match egress_route(target, Some(path.key.ifindex), path.source) {
        Ok(route) => route.gateway.map_or(Way::OnLink, Way::Gateway),
        Err(_) => Way::Unknown,
    }
}

/// Whether a path's probes to an address leave by the path's gateway. Those to another host on the link do not. `way`: see
/// [`way`]. What it does not know counts as no: probes that the program sees all the same then look like traffic, and the
/// host is probed often.
pub(super) fn leaves_by_gateway(
    path: &Path,
    target: IpAddr,
    way: impl Fn(&Path, IpAddr) -> Way,
) -> bool {
    let leaves_by =
        |gateway: IpAddr| gateway == target || way(path, target) == Way::Gateway(gateway);
    path.key.gateway.is_some_and(leaves_by)
}

/// Paths of a topology, by index, that are measured to their gateways although a far target is configured.
///
/// A probe names its device, not its gateway. Where several paths have one device, the kernel sends the probes of all
/// by the first gateway, unless a route to the target leads elsewhere, and the path by another one would be judged by
/// what is measured on that. An address of this host itself says nothing of a path. `way`: see [`way`]. The other paths of
/// the groups are measured as near, so that like is compared with like.
pub(crate) fn measured_near(
    topology: &Topology,
    config: &Config,
    way: impl Fn(&Path, IpAddr) -> Way,
) -> BTreeSet<usize> {
    let paths = &topology.paths;
    let is_astray = |index: &usize| {
        let path = &paths[*index];
        let shares = |other: &Path| {
            let (own, other) = (path.key, other.key);
            (own.ifindex, own.ipv6) == (other.ifindex, other.ipv6) && own != other
        };
        let astray = |(gateway, target): (IpAddr, Target)| {
            paths.iter().any(shares) && way(path, target.ip()) != Way::Gateway(gateway)
        };
        let far = path.key.gateway.zip(far_target(path, config));
        far.is_some_and(astray) || own_target(topology, *index, config).is_some()
    };
    let mut near: BTreeSet<usize> = (0..paths.len()).filter(is_astray).collect();
    loop {
        let known = near.len();
        for group in &topology.groups {
            let members = || group.members.iter().map(|member| member.path);
            if members().any(|path| near.contains(&path)) {
                near.extend(members());
            }
        }
        if near.len() == known {
            near.retain(|index| far_target(&paths[*index], config).is_some());
            return near;
        }
    }
}

/// Where a path's probes go by the configuration, unless that is its gateway.
fn far_target(path: &Path, config: &Config) -> Option<Target> {
    let entry = config.path(&path.ifname, path.key.gateway)?;
    let target = entry.target(path.key.ipv6)?;
    (Some(target.ip()) != path.key.gateway).then_some(target)
}

/// Why the figures of some paths are not what the configuration seems to ask for, or cannot be compared.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Doubt {
    pub what: String,
    pub todo: &'static str,
}

/// What is to be said of the way in which the paths of a topology are measured. `near`: see [`measured_near`], `way`: see
/// [`way`].
pub(crate) fn doubts(
    topology: &Topology,
    config: &Config,
    near: &BTreeSet<usize>,
    way: impl Fn(&Path, IpAddr) -> Way,
) -> BTreeSet<Doubt> {
    let is_far = |index: usize| {
        let path = &topology.paths[index];
        let target = far_target(path, config).filter(|_| !near.contains(&index));
        match target.map(|target| way(path, target.ip())) {
            Some(Way::Gateway(_)) => Some(true),
            Some(Way::OnLink) | None => Some(false),
            Some(Way::Unknown) => None,
        }
    };
    let are_far: Vec<Option<bool>> = (0..topology.paths.len()).map(is_far).collect();
    let unlike = topology.groups.iter();
    let unlike = unlike.filter_map(|group| unlike_text(group, topology, config, &are_far));
    let unlike = unlike.map(|what| Doubt {
        what,
        todo: "give all paths of the route the same `probe_target`",
    });
    let names = near.iter().map(|&index| config.path_name(topology, index));
    let names: BTreeSet<String> = names.collect();
    let own = near
        .iter()
        .find_map(|&index| own_target(topology, index, config));
    let (why, todo) = match own {
        Some(ip) => (format!("{ip} is this host's own address"), "name a host behind the paths"),
        None => (
            "several paths have one device, and the kernel sends all that goes to a far target by that device to one of \
             their gateways"
                .to_owned(),
            "for a far target, give each path its own and a route: `ip route add TARGET via GATEWAY dev DEVICE`",
        ),
    };
    let near = (!names.is_empty()).then(|| Doubt {
        what: format!(
            "{}: probes go to the gateways, not to `probe_target`: {why}",
            Vec::from_iter(names).join(", ")
        ),
        todo,
    });
    unlike.chain(near).collect()
}

/// Where a path's probes go by the configuration, if that is an address of this host.
pub(super) fn own_target(topology: &Topology, index: usize, config: &Config) -> Option<IpAddr> {
    let target = far_target(&topology.paths[index], config)?.ip();
    let of_path = topology.paths.iter().flat_map(|path| &path.addresses);
    let mut own = of_path
        .chain(&topology.own_sources)
        .chain(&topology.uplink_bound_sources);
    own.any(|own| *own == target).then_some(target)
}

/// The warning for a group some of whose paths are measured far away, and others to their gateways: all flows would leave
/// the longer ways for good. A metered path is a reserve anyway, and not compared, nor is one of which `are_far` does not
/// know. One and the same target is what the warning would ask for.
fn unlike_text(
    group: &Group,
    topology: &Topology,
    config: &Config,
    are_far: &[Option<bool>],
) -> Option<String> {
    let compared = group.members.iter().map(|member| member.path);
    let is_usual = |index: &usize| !configured(topology, *index, config).input.metered;
    let compared = compared.filter(|&index| are_far[index].is_some());
    let compared: Vec<usize> = compared.filter(is_usual).collect();
    let target = |index: usize| far_target(&topology.paths[index], config).map(Target::ip);
    let mut pairs = compared.windows(2);
    let distances_differ = |pair: &[usize]| are_far[pair[0]] != are_far[pair[1]];
    let targets_differ = |pair: &[usize]| target(pair[0]) != target(pair[1]);
    if !pairs.clone().any(distances_differ) || !pairs.any(targets_differ) {
        return None;
    }
    let parts = compared.iter().enumerate().map(|(i, &index)| {
        let verb = if i == 0 { " is measured" } else { "" };
        let target = target(index).map(|target| target.to_string());
        let target = target.unwrap_or_else(|| "its gateway".to_owned());
        format!("{}{verb} to {target}", config.path_name(topology, index))
    });
    let parts = parts.collect::<Vec<_>>().join(", ");
    Some(format!("{parts}: their delays cannot be compared"))
}

/// Why no probe has left so far.
pub(super) fn unsent(target: impl Display, stats: &PathStats) -> String {
    let why = stats.last_error.as_deref().unwrap_or("no reason is known");
    format!("this host sends no probe to {target} ({why}): its firewall drops them")
}

impl Daemon {
    /// When the next probe of `path` is due; in the past for one that was never probed.
    fn probe_due(&self, path: usize) -> Instant {
        let interval = Duration::from_micros(self.policy.probe_interval_us(path));
        let probed_at = self.memory[path].probed_at;
        probed_at.map_or(self.started, |at| at + interval)
    }

    /// When the next probe of any path is due.
    pub(super) fn next_probe(&self) -> Option<Instant> {
        let paths = self.paths.probed().into_iter();
        paths.map(|path| self.probe_due(path)).min()
    }

    /// When the policy looks at the clock again.
    pub(super) fn next_tick(&self) -> Instant {
        let is_seldom = |path| self.policy.probe_interval_us(path) >= IDLE_US;
        let is_idle = self.paths.probed().into_iter().all(is_seldom);
        self.ticked_at + if is_idle { TICK_IDLE } else { TICK }
    }

    /// When a path turns late that new flows may choose by now, unless its probe is answered before.
    pub(super) fn next_late(&self) -> Option<Instant> {
        self.placer.as_ref()?;
        let in_us = self.policy.next_late_us()?.saturating_sub(now_us());
        Some(Instant::now() + Duration::from_micros(in_us))
    }

    pub(super) fn send_probes(&mut self) {
        let now = Instant::now();
        for path in self.paths.probed() {
            if self.probe_due(path) <= now {
                // Not made up for when late: a burst of probes measures itself.
                self.memory[path].probed_at = Some(now);
                self.send_probe(path);
            }
        }
    }

    fn send_probe(&mut self, path: usize) {
        let seq = self.seq;
        self.seq += 1;
        let at_us = now_us();
        if self.has_no_carrier(path) {
            // It would be lost, and leave a gateway that the kernel asks for again only a second later.
            self.policy.event(Event::SendFailed { path, seq, at_us });
            return;
        }
        match self.prober.send(path, seq) {
            Ok(()) => {
                self.probes_seen += u64::from(self.paths.are_probes_seen(path));
                if let Some(path) = self.paths.path(path).filter(|path| !path.ethernet) {
                    self.headerless.probed(path.key.ifindex, at_us);
                }
                self.policy.event(Event::Sent { path, seq, at_us });
            }
            Err(e) => {
                tracing::debug!(path = self.paths.name(path), "probe not sent: {e}");
                self.policy.event(Event::SendFailed { path, seq, at_us });
            }
        }
    }

    pub(super) fn answered(&mut self, a: &Answer) {
        self.memory[a.path].answered_at = Some(Instant::now());
        self.policy.event(Event::Answered {
            path: a.path,
            seq: a.seq,
            at_us: now_us(),
            rtt_us: a.rtt_us,
            delay_us: a.delay_us,
        });
    }

    /// Says once when a path's probes stay unanswered altogether, and when that is over.
    pub(super) fn say_unanswered(&mut self) {
        for path in self.paths.probed() {
            let stats = self.prober.stats(path);
            let memory = &mut self.memory[path];
            if stats.answered > 0 {
                memory.unanswered_since = None;
            }
            let since = *memory.unanswered_since.get_or_insert_with(Instant::now);
            let silent = stats.answered == 0
                && stats.sent + stats.refused >= UNANSWERED
                && since.elapsed() >= UNANSWERED_FOR;
            // One that is probed elsewhere now has not answered by that.
            let is_over = stats.answered > 0;
            if silent != memory.said_unanswered && (silent || is_over) {
                memory.said_unanswered = silent;
                let name = self.paths.name(path);
                let target = self.paths.target_text(path);
                if silent && stats.sent == 0 {
                    warn!("path {name}: {}", unsent(target, &stats));
                } else if silent {
                    warn!(
                        "path {name}: none of {} probes to {target} was answered: the kernel decides wherever it is one \
                         of the paths; if this one does not answer pings, set another `probe_target` for all paths of \
                         its route",
                        stats.sent
                    );
                } else {
                    info!("path {name}: {target} answers now");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::{Kind, Member};

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn way_by(gateway: Option<IpAddr>) -> Way {
        gateway.map_or(Way::OnLink, Way::Gateway)
    }

    /// The way of the first path; the others' is by their gateways.
    fn of_first(path: &Path, way: Way) -> Way {
        match path.key.ifindex {
            1 => way,
            _ => way_by(path.key.gateway),
        }
    }

    fn group(paths: &[usize]) -> Group {
        let member = |&path: &usize| Member { path, weight: 1 };
        Group {
            kind: Kind::Move,
            table: 254,
            prefixes: vec!["0.0.0.0/0".parse().unwrap()],
            members: paths.iter().map(member).collect(),
            preferred: None,
            told_by: Default::default(),
        }
    }

    fn of(paths: Vec<Path>) -> Topology {
        Topology {
            paths,
            ..Topology::default()
        }
    }

    #[test]
    fn what_costs_money_is_a_reserve_unless_the_configuration_says_otherwise() {
        let cost_us = |modem: bool, entry: &str| {
            let text = format!("[[path]]\ndev = \"u3\"\n{entry}");
            let config = Config::parse(&text, std::path::Path::new("t")).unwrap();
            let path = Path {
                modem,
                ..Path::plain(3, "192.0.2.1")
            };
            configured(&of(vec![path]), 0, &config).input.cost_us
        };
        assert_eq!(cost_us(false, ""), 0.0);
        assert_eq!(cost_us(true, ""), 1e5);
        assert_eq!(cost_us(false, "metered = true"), 1e5);
        assert_eq!(cost_us(true, "cost = 0"), 0.0);
        assert_eq!(cost_us(true, "metered = false"), 0.0);
        assert_eq!(cost_us(false, "metered = true\ncost = 5"), 5e3);
        // However little it costs, it leads nowhere.
        let config = Config::parse(
            "[[path]]\ndev = \"u3\"\ncost = 0\n",
            std::path::Path::new("t"),
        );
        let demoted = Path {
            demoted: true,
            ..Path::plain(3, "192.0.2.1")
        };
        let demoted = configured(&of(vec![demoted]), 0, &config.unwrap());
        assert_eq!(demoted.input.cost_us, 1e7);
    }

    #[test]
    fn the_way_of_a_path_that_is_down_is_not_known() {
        let loopback = Path {
            up: false,
            ..Path::plain(1, "192.0.2.1")
        };
        assert_eq!(way(&loopback, ip("127.0.0.1")), Way::Unknown);
        let up = Path::plain(1, "192.0.2.1");
        assert_eq!(way(&up, ip("127.0.0.1")), Way::OnLink);
        let gone = Path::plain(u32::MAX >> 1, "192.0.2.1");
        assert_eq!(way(&gone, ip("127.0.0.1")), Way::Unknown);
    }

    /// Two routers on one LAN, and another uplink.
    fn lan() -> Topology {
        Topology {
            paths: vec![
                Path::plain(1, "192.0.2.1"),
                Path::plain(1, "192.0.2.2"),
                Path::plain(2, "198.51.100.1"),
                Path::plain(3, "198.51.100.9"),
            ],
            groups: vec![group(&[0, 1, 2]), group(&[3])],
            ..Topology::default()
        }
    }

    fn config(targets: &[(&str, &str)]) -> Config {
        let entry = |(dev, target): &(&str, &str)| {
            format!("[[path]]\ndev = \"{dev}\"\nprobe_target = \"{target}\"\n")
        };
        let text: String = targets.iter().map(entry).collect();
        Config::parse(&text, std::path::Path::new("test.toml")).unwrap()
    }

    #[test]
    fn the_program_sees_only_probes_that_leave_by_the_gateway() {
        let one = Path::plain(1, "192.0.2.1");
        let by = |gateway: Option<&str>, target| {
            let gateway = gateway.map(ip);
            leaves_by_gateway(&one, ip(target), |_, _| way_by(gateway))
        };
        // The gateway itself, which is on the link, and what it forwards.
        assert!(by(None, "192.0.2.1"));
        assert!(by(Some("192.0.2.1"), "203.0.113.7"));
        // Another host on the link, and what another router there forwards.
        assert!(!by(None, "192.0.2.77"));
        assert!(!by(Some("192.0.2.9"), "203.0.113.7"));
        // Of a path without a gateway no packet is known.
        let mut direct = Path::plain(1, "192.0.2.1");
        direct.key.gateway = None;
        let on_link = |_: &Path, _| Way::OnLink;
        assert!(!leaves_by_gateway(&direct, ip("192.0.2.77"), on_link));
    }

    #[test]
    fn a_path_is_not_judged_by_probes_that_another_gateway_forwards() {
        let far = [
            ("u1", "203.0.113.7"),
            ("u2", "203.0.113.8"),
            ("u3", "203.0.113.9"),
        ];
        let by_first = |_: &Path, _| Way::Gateway(ip("192.0.2.1"));
        let near = measured_near(&lan(), &config(&far), by_first);
        let whole = BTreeSet::from([0, 1, 2]);
        assert_eq!(near, whole, "the whole group, and no other");
        let near = measured_near(&lan(), &config(&far[1..]), by_first);
        assert_eq!(near, BTreeSet::new());
        // Each has a route of its own to the target.
        let by_own = |path: &Path, _| way_by(path.key.gateway);
        let near = measured_near(&lan(), &config(&far), by_own);
        assert_eq!(near, BTreeSet::new());
        // A gateway is reached directly.
        let gateway = config(&[("u1", "192.0.2.1")]);
        let near = measured_near(&lan(), &gateway, |_, _| Way::OnLink);
        assert_eq!(near, BTreeSet::from([1]));
    }

    /// The doubts about two uplinks of a route, in words.
    fn doubted(entries: &str, modem: bool, way: fn(&Path, IpAddr) -> Way) -> Vec<String> {
        let second = Path {
            modem,
            ..Path::plain(2, "198.51.100.1")
        };
        let topology = Topology {
            paths: vec![Path::plain(1, "192.0.2.1"), second],
            groups: vec![group(&[0, 1])],
            ..Topology::default()
        };
        let config = Config::parse(entries, std::path::Path::new("test.toml")).unwrap();
        let near = measured_near(&topology, &config, way);
        let doubts = doubts(&topology, &config, &near, way);
        doubts.into_iter().map(|doubt| doubt.what).collect()
    }

    #[test]
    fn paths_of_a_route_that_are_measured_over_unlike_distances_are_told() {
        let by_own = |path: &Path, _: IpAddr| way_by(path.key.gateway);
        let first = "[[path]]\ndev = \"u1\"\nprobe_target = \"203.0.113.7\"\n";
        let told =
            "u1 is measured to 203.0.113.7, u2 to its gateway: their delays cannot be compared";
        assert_eq!(doubted(first, false, by_own), [told]);
        let none = Vec::<String>::new();
        assert_eq!(doubted("", false, by_own), none);
        // On the uplink's own link it is as near as a gateway.
        assert_eq!(doubted(first, false, |_, _| Way::OnLink), none);
        let second = "[[path]]\ndev = \"u2\"\nprobe_target = \"203.0.113.7\"\n";
        let both = format!("{first}{second}");
        assert_eq!(doubted(&both, false, by_own), none);
        // One of them is down, or on the link of the one and far from the other.
        let first_is_down = |path: &Path, _: IpAddr| of_first(path, Way::Unknown);
        let first_is_on_link = |path: &Path, _: IpAddr| of_first(path, Way::OnLink);
        assert_eq!(doubted(&both, false, first_is_down), none);
        assert_eq!(doubted(first, false, first_is_down), none);
        assert_eq!(doubted(&both, false, first_is_on_link), none);
        // A reserve costs more than any way is long.
        assert_eq!(doubted(first, true, by_own), none);
        let usual = format!("{first}[[path]]\ndev = \"u2\"\nmetered = false\n");
        assert_eq!(doubted(&usual, true, by_own), [told]);
    }

    #[test]
    fn paths_that_are_all_measured_near_are_told_for_that_alone() {
        let far = config(&[("u1", "203.0.113.7")]);
        let by_first = |_: &Path, _| Way::Gateway(ip("192.0.2.1"));
        let near = measured_near(&lan(), &far, by_first);
        let doubts = doubts(&lan(), &far, &near, by_first);
        let what: Vec<&str> = doubts.iter().map(|doubt| doubt.what.as_str()).collect();
        let [near] = what[..] else {
            panic!("{what:?}");
        };
        let expected = "u1 via 192.0.2.1, u1 via 192.0.2.2: probes go to the gateways, not to `probe_target`: several";
        testkit::assert_has(near, &[expected]);
    }

    #[test]
    fn this_hosts_own_address_is_no_probe_target() {
        let by_own = |path: &Path, _: IpAddr| way_by(path.key.gateway);
        let second = Path {
            addresses: vec![ip("198.51.100.7")],
            ..Path::plain(2, "198.51.100.1")
        };
        let topology = Topology {
            groups: vec![group(&[0, 1])],
            ..of(vec![Path::plain(1, "192.0.2.1"), second])
        };
        let config = config(&[("u1", "198.51.100.7"), ("u2", "198.51.100.8")]);
        let near = measured_near(&topology, &config, by_own);
        assert_eq!(near, BTreeSet::from([0, 1]), "like is compared with like");
        let doubts = doubts(&topology, &config, &near, by_own);
        let what: Vec<&str> = doubts.iter().map(|doubt| doubt.what.as_str()).collect();
        let expected = "u1, u2: probes go to the gateways, not to `probe_target`: 198.51.100.7 is this host's own address";
        assert_eq!(what, [expected]);
    }
}
