// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain check`: is this host able, what would be steered, and what stands in the way.
//!
//! Reads only. The one thing it asks of the kernel beyond reading is the route look-up that
//! `connect` of a UDP socket makes, which sends nothing.

mod config;
mod firewall;
mod placement;
mod sockets;

use std::collections::BTreeSet;
use std::fmt::{Display, Write};
use std::fs;

use ipnet::IpNet;
use nix::errno::Errno;
use nix::unistd::{access, AccessFlags};
use serde::Serialize;

use crate::cc;
use crate::config::Config;
use crate::control::status::Status;
use crate::host::stdout::lines;
use crate::host::text::count;
use crate::host::{capabilities, descriptors, kernel, memory, sysctl};
use crate::netlink;
use crate::placement::config::NewFlows;
use crate::placement::has_left;
use crate::steer::explain::{SILENT, SILENT_REMEDY};
use crate::topology::{read_topology_blocking, Filter, Group, Kind, Topology, MAX_FIB_RULES};

/// How a finding is to be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Works, but less well than it could, or only for some traffic.
    Warn,
    /// Steering cannot work like this.
    Fail,
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Item {
    /// What was looked at: `kernel`, `routes`, `rp_filter`...
    pub name: String,
    /// How bad it is.
    pub level: Level,
    /// What was found.
    pub what: String,
    /// What to do about it; empty when there is nothing to do.
    pub todo: String,
}

/// All findings, in the order in which they were looked for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// In the order in which they were looked for.
    pub items: Vec<Item>,
}

impl Report {
    /// The worst level found.
    pub fn worst(&self) -> Level {
        let levels = self.items.iter().map(|item| item.level);
        levels.max().unwrap_or(Level::Ok)
    }

    /// One line for each finding (✓, !, ✗), with what to do below; `colour` for terminals.
    pub(crate) fn text(&self, colour: bool) -> String {
        let mut out = String::new();
        let width = self.items.iter().map(|item| item.name.len()).max();
        let width = width.unwrap_or(0);
        for item in &self.items {
            let (sign, code) = match item.level {
                Level::Ok => ("✓", "32"),
                Level::Warn => ("!", "33"),
                Level::Fail => ("✗", "31"),
            };
            let sign = match colour {
                true => format!("\x1b[{code}m{sign}\x1b[0m"),
                false => sign.to_owned(),
            };
            let _ = writeln!(out, "{sign} {:width$}  {}", item.name, lines(&item.what));
            if !item.todo.is_empty() {
                let _ = writeln!(out, "  {:width$}  → {}", "", lines(&item.todo));
            }
        }
        out
    }

    /// Adds a finding.
    pub(crate) fn push(
        &mut self,
        name: &str,
        level: Level,
        what: impl Display,
        todo: impl Display,
    ) {
        self.items.push(Item {
            name: name.to_owned(),
            level,
            what: what.to_string(),
            todo: todo.to_string(),
        });
    }

    fn ok(&mut self, name: &str, what: impl Display) {
        self.push(name, Level::Ok, what, "");
    }

    fn warn(&mut self, name: &str, what: impl Display, todo: impl Display) {
        self.push(name, Level::Warn, what, todo);
    }

    pub(crate) fn fail(&mut self, name: &str, what: impl Display, todo: impl Display) {
        self.push(name, Level::Fail, what, todo);
    }
}

/// Loads the steering program and attaches it to the topology's devices for a moment, for
/// [`check_into`]; returns what to say when that worked.
pub type TryLoad<'a> = &'a dyn Fn(&Topology) -> anyhow::Result<String>;

/// Checks what `up`, the command line that would start steering here, is about: the calling thread's
/// network namespace with this configuration; and whether the program can be loaded if `try_load` is
/// given. Adds to what `report` already holds.
pub fn check_into(
    report: &mut Report,
    config: &Config,
    up: &str,
    try_load: Option<TryLoad<'_>>,
    running: Running<'_>,
) {
    check_privileges(report);
    if !matches!(running, Running::Says(_)) {
        check_files(report);
    }
    if matches!(running, Running::Nobody) {
        check_left(report);
    }
    let running = match running {
        Running::Says(status) => Some(status),
        Running::Nobody | Running::Unknown => None,
    };
    check_run(report);
    check_switches(report);
    check_kernel(report);
    for hint in &config.hints {
        report.warn("configuration", hint, "");
    }
    let filter = config.filter();
    let topology = match read_topology_blocking(&filter) {
        Ok(topology) => topology,
        Err(error) => {
            let todo = "see whether `ip route show table all` works here";
            report.fail("routes", format!("cannot be read: {error:#}"), todo);
            check_cc(report);
            return;
        }
    };
    let tried = try_load.map(|try_load| try_load(&topology));
    let fails = matches!(tried, Some(Err(_)));
    if let Some(tried) = tried {
        check_program(report, tried);
    }
    if fails {
        let what = "`mountain cc enable` has to load a program, too";
        report.warn("cc", what, "mend the failure above first");
    } else {
        check_cc(report);
    }
    let new_flows = config.placement.new_flows();
    check_routes(report, &topology, new_flows, up);
    if topology.groups.is_empty() {
        say_no_route(report, &filter, up);
        config::check_redirects(report, config);
        return;
    }
    config::check(report, &topology, config);
    check_paths(report, &topology);
    if let Some(status) = running {
        check_silent(report, status);
    }
    placement::check(report, &topology, config, up, running);
    firewall::check(report, &topology, running, new_flows);
    check_sysctls(report, &topology, config.placement.enabled);
    sockets::check_new(report, &topology, config);
    sockets::check_live(report, &topology, config);
}

fn check_privileges(report: &mut Report) {
    if capabilities::are_of_a_namespace() {
        report.fail(
            "privileges",
            "this is a user namespace: the kernel loads no BPF programs from there",
            "run Mountain on the host, or in a container without a user namespace (a privileged one)",
        );
        return;
    }
    match capabilities::missing().as_slice() {
        [] => report.ok("privileges", "all that are needed"),
        missing => report.fail(
            "privileges",
            format!("missing: {}", missing.join(", ")),
            "run as root (sudo)",
        ),
    }
}

/// The daemon has about 70 open with two uplinks, most of them BPF maps, and one more for each other device.
fn check_files(report: &mut Report) {
    const NEEDED: u64 = 128;

    if let Some(most) = descriptors::most().filter(|most| *most < NEEDED) {
        report.fail(
            "files",
            format!("a process may have {most} open at a time here; steering needs {NEEDED}"),
            descriptors::HOW,
        );
    }
}

/// The daemon of this network namespace.
pub enum Running<'a> {
    /// This is what it says.
    Says(&'a Status),
    /// There is none.
    Nobody,
    /// It does not answer, or may not be asked.
    Unknown,
}

/// Rules and tables without a daemon, which nobody keeps up.
fn check_left(report: &mut Report) {
    if has_left() {
        report.warn(
            "left behind",
            "an earlier run's routing rules or nftables table are here, or a saved ruleset has brought them back",
            "`mountain down` removes them; `mountain up` goes on with them",
        );
    }
}

/// As in a service with `ProcSubset=pid`, or a mount namespace without /proc.
fn check_switches(report: &mut Report) {
    if let Err(error) = sysctl::can_be_read() {
        report.fail(
            "/proc/sys",
            format!("{error:#}"),
            "mount /proc; in a service, do without `ProcSubset=pid`",
        );
    }
}

/// The daemon's folder is made below it.
fn check_run(report: &mut Report) {
    if access("/run", AccessFlags::W_OK) == Err(Errno::EROFS) {
        report.fail(
            "/run",
            "it is read-only, and the daemon has its lock, socket and log there",
            "in a container, mount a tmpfs there; on a host, find out why /run is read-only",
        );
    }
}

fn check_kernel(report: &mut Report) {
    let release = sysctl::text("kernel/osrelease").unwrap_or_default();
    let release = release.trim();
    let (major, minor) = kernel::OLDEST;
    match kernel::version(release) {
        Some(version) if version >= kernel::OLDEST => report.ok("kernel", release),
        Some(_) => report.fail(
            "kernel",
            format!("{release} is older than {major}.{minor} and has no tcx hook"),
            kernel::how_to_get_newer(
                &fs::read_to_string("/etc/os-release").unwrap_or_default(),
                std::env::consts::ARCH,
            ),
        ),
        None => report.warn(
            "kernel",
            format!("version '{release}' is not understood"),
            format!("make sure that it is {major}.{minor} or newer"),
        ),
    }
    if fs::metadata("/sys/kernel/btf/vmlinux").is_ok() {
        report.ok("BTF", "the kernel describes its types");
    } else {
        report.fail(
            "BTF",
            "/sys/kernel/btf/vmlinux is missing",
            "use a kernel with CONFIG_DEBUG_INFO_BTF=y, and mount /sys",
        );
    }
}

/// Steering does without: what is missing is a warning.
fn check_cc(report: &mut Report) {
    match cc::kernel::lacking() {
        None if cc::kernel::is_to_be_loaded() => report.ok(
            "cc",
            "`mountain cc enable` can work here, if the module tcp_bbr can be loaded (not tried)",
        ),
        None => report.ok("cc", "`mountain cc enable` can work here"),
        Some((what, todo)) => report.warn("cc", what, todo),
    }
}

fn check_program(report: &mut Report, tried: anyhow::Result<String>) {
    let error = match tried {
        Ok(what) => return report.ok("program", what),
        Err(error) => error,
    };
    let error = format!("{error:#}");
    let todo = match (memory::remedy(&error), report.worst()) {
        (Some(remedy), _) => remedy,
        (None, Level::Fail) => "mend the failures above first",
        _ => "`MOUNTAIN_LOG=debug mountain up --foreground` shows what the kernel said of it",
    };
    report.fail("program", format!("cannot be loaded: {error}"), todo);
}

fn check_routes(report: &mut Report, topology: &Topology, new: NewFlows, up: &str) {
    for group in &topology.groups {
        report.ok("routes", describe(group, topology, new));
    }
    let (others, rules) = (topology.not_ours.len(), topology.fib_rules.len());
    if rules > MAX_FIB_RULES {
        report.fail(
            "rules",
            format!("{rules} routing rules come before these routes, at most {MAX_FIB_RULES} are supported: `{up}` does not start"),
            "have fewer (`ip rule`): one with a prefix or a mark with a mask may stand for many",
        );
    }
    let of_rules = (rules > 0).then(|| format!("of {}", count(rules, "routing rule")));
    let to_others = (others > 0).then(|| {
        let to = count(others, "destination");
        format!("to {to} with routes, tunnels or IPsec policies of their own")
    });
    let left: Vec<String> = [of_rules, to_others].into_iter().flatten().collect();
    if !topology.groups.is_empty() && !left.is_empty() {
        report.ok("left alone", format!("traffic {}", left.join(", and ")));
    }
    // `say_no_route` repeats this one as the reason why nothing is steered.
    let suspended = topology.suspended.first();
    let said = suspended.filter(|_| topology.groups.is_empty());
    let is_said = |reason: &&String| said.is_some_and(|s| reason.ends_with(&s.why));
    for reason in topology.skipped.iter().filter(|r| !is_said(r)) {
        report.warn("skipped", reason, "");
    }
}

/// Says that there is nothing to steer, and which command changes that.
fn say_no_route(report: &mut Report, filter: &Filter, up: &str) {
    let adopting = Filter {
        adopt: true,
        ..filter.clone()
    };
    let others = read_topology_blocking(&adopting).unwrap_or_default();
    let Some(group) = others.groups.first() else {
        if let Some(suspended) = others.suspended.first() {
            report.fail(
                "routes",
                format!("nothing to steer: {}", suspended.why),
                "nothing is wrong if that is a VPN; if it is an uplink of yours, name its device: `[[path]]` with \
                 `dev = \"DEVICE\"` in /etc/mountain/mountain.toml",
            );
            return;
        }
        let skipped = match others.skipped.is_empty() {
            true => "",
            false => "what is skipped above may be the reason. Else, ",
        };
        let remedy = match (filter.limits(), filter.adopt) {
            (Some(limits), _) => format!("{skipped}{limits}"),
            (None, true) => format!(
                "{skipped}with a single uplink there is nothing to choose. Give each of two a default route with a metric of its \
                 own: `ip route add default via GATEWAY dev DEVICE metric N`"
            ),
            (None, false) => format!(
                "{skipped}with a single uplink there is nothing to choose. With two, make one route of both: `ip route \
                 replace default nexthop via GATEWAY1 dev DEVICE1 nexthop via GATEWAY2 dev DEVICE2`, with your gateways \
                 and devices. For IPv6: `ip -6 route replace default metric N nexthop ...`, with a lower metric than \
                 those of the default routes that are there"
            ),
        };
        let what = match filter.adopt {
            true => "no multipath route that can be steered, nor two default routes that differ in metric",
            false => "no multipath route that can be steered",
        };
        report.fail("routes", what, remedy);
        return;
    };
    report.fail(
        "routes",
        format!(
            "no multipath route that can be steered, but default routes that differ only in metric: {}",
            describe(group, &others, NewFlows::Choose)
        ),
        format!(
            "`{up} --adopt` lets new flows choose among them; or make one route of them: `{}`",
            route_command(&others, 0, "")
        ),
    );
}

/// The ip(8) command that makes one multipath route of the group with this index; `options` stand before the next hops.
fn route_command(topology: &Topology, group: usize, options: &str) -> String {
    let (group, metric) = (&topology.groups[group], topology.metrics[group]);
    let family = if is_ipv6(group) { " -6" } else { "" };
    let prefix = match group.prefixes.first() {
        Some(prefix) if prefix.prefix_len() > 0 => prefix.to_string(),
        _ => "default".to_owned(),
    };
    let mut command = format!("ip{family} route replace {prefix}");
    if group.table != 254 {
        command += &format!(" table {}", group.table);
    }
    // Default routes that differ in it stay, and so does their order to a VPN's: the new one stands right before them.
    // Where none is named, IPv6 takes 1024.
    let metric = match group.kind {
        Kind::Place => metric.saturating_sub(1).max(u32::from(is_ipv6(group))),
        Kind::Move | Kind::PlaceAndMove => metric,
    };
    if metric > 0 {
        command += &format!(" metric {metric}");
    }
    command += options;
    for member in &group.members {
        let path = &topology.paths[member.path];
        command += " nexthop";
        if let Some(gateway) = path.key.gateway {
            let other = if gateway.is_ipv6() && !path.key.ipv6 {
                " inet6"
            } else {
                ""
            };
            command += &format!(" via{other} {gateway}");
        }
        command += &format!(" dev {} weight {}", path.ifname, member.weight);
    }
    command
}

/// A group in words: prefixes and next hops with weights.
fn describe(group: &Group, topology: &Topology, new: NewFlows) -> String {
    const SHOWN: usize = 3;
    let mut prefixes: Vec<String> = group.prefixes.iter().map(IpNet::to_string).collect();
    if prefixes.len() > SHOWN {
        let rest = prefixes.split_off(SHOWN).len();
        prefixes.push(format!("{rest} more"));
    }
    let hops: Vec<String> = group
        .members
        .iter()
        .map(|member| {
            let path = &topology.paths[member.path];
            let gateway = path.key.gateway.map(|g| g.to_string()).unwrap_or_default();
            format!("{} via {gateway} (weight {})", path.ifname, member.weight)
        })
        .collect();
    let table = match group.table {
        254 => String::new(),
        other => format!(" in table {other}"),
    };
    let kind = match group.kind.places() {
        true => format!(
            "; {}",
            crate::placement::kind_text(group.kind, group.members.len(), new)
        ),
        false => String::new(),
    };
    format!("{}{table}: {}{kind}", prefixes.join(", "), hops.join(", "))
}

/// Paths that have not answered the daemon so far.
fn check_silent(report: &mut Report, status: &Status) {
    for path in status
        .paths
        .iter()
        .filter(|path| path.judged.state == SILENT)
    {
        let name = &path.judged.name;
        report.warn(
            "paths",
            format!(
                "{name} has never answered a probe (to {}): the kernel decides for its route",
                path.probe_target
            ),
            SILENT_REMEDY,
        );
    }
}

fn check_paths(report: &mut Report, topology: &Topology) {
    // Only root is told.
    let offloading = netlink::offloading_devices().unwrap_or_default();
    for path in &topology.paths {
        let gateway = path.key.gateway.map(|g| g.to_string()).unwrap_or_default();
        let name = &path.ifname;
        if !path.ethernet {
            report.warn(
                "paths",
                format!(
                    "{name} has no Ethernet headers: running flows cannot be moved to or from it"
                ),
                "",
            );
        }
        if offloading.contains(&path.key.ifindex) {
            report.warn(
                "paths",
                format!(
                    "{name} carries out IPsec by itself (packet offload): running flows cannot \
                     be moved to or from it"
                ),
                "",
            );
        }
        if !path.up {
            report.warn("paths", format!("{name} is down or has no carrier"), "");
        } else if path.ethernet && path.gateway_mac.is_none() {
            report.warn(
                "paths",
                format!("gateway {gateway} on {name} is not resolved at the moment"),
                format!("see whether it answers: `ping -c 3 -I {name} {gateway}`"),
            );
        }
        if path.source.is_none() {
            report.warn(
                "paths",
                format!("{name} has no address to probe {gateway} from"),
                format!("give {name} an address of its own"),
            );
        }
    }
    for group in &topology.groups {
        let paths = || group.members.iter().map(|m| &topology.paths[m.path]);
        let smallest = paths().min_by_key(|path| path.mtu);
        let largest = paths().max_by_key(|path| path.mtu);
        if let (Some(small), Some(large)) = (smallest, largest) {
            if small.mtu != large.mtu {
                report.warn(
                    "mtu",
                    format!(
                        "{} carries {} bytes, {} only {}: larger packets are not moved there",
                        large.ifname, large.mtu, small.ifname, small.mtu
                    ),
                    "",
                );
            }
        }
    }
}

/// The kernel's own choice among next hops: it counts for multipath routes only, and there for the
/// flows that do not choose their path when they start.
fn check_hash_policy(report: &mut Report, topology: &Topology, placing: bool) {
    for (ipv6, family) in [(false, "ipv4"), (true, "ipv6")] {
        let groups = || {
            let groups = topology.groups.iter();
            groups.filter(move |group| is_ipv6(group) == ipv6 && group.kind.moves())
        };
        if groups().next().is_none() {
            continue;
        }
        let who = match placing && groups().all(|group| group.kind.places()) {
            true => "flows that mountain does not place start on one path for each pair of hosts",
            false => "all flows between two hosts start on one path",
        };
        let key = format!("net.{family}.fib_multipath_hash_policy");
        match sysctl::number(&format!("net/{family}/fib_multipath_hash_policy")) {
            Some(0) => report.warn(
                "hash policy",
                format!("{key} = 0: {who}"),
                format!("spread them by port: `sysctl -w {key}=1`"),
            ),
            Some(value) => report.ok("hash policy", format!("{key} = {value}")),
            None => report.warn("hash policy", format!("{key} cannot be read"), ""),
        }
    }
}

fn check_sysctls(report: &mut Report, topology: &Topology, placing: bool) {
    check_hash_policy(report, topology, placing);
    let ipv4_groups: Vec<&Group> = topology.groups.iter().filter(|g| !is_ipv6(g)).collect();
    // Where default routes differ in metric, `placement` judges the filter.
    let some_move = topology.groups.iter().any(|group| group.kind.moves());
    if some_move && !ipv4_groups.is_empty() {
        let main_table = ipv4_groups.iter().all(|group| group.table == 254);
        let devices = topology.paths.iter().map(|p| (p.key.ifindex, &p.ifname));
        for (_, ifname) in BTreeSet::from_iter(devices) {
            check_rp_filter(report, ifname, main_table);
        }
    }
    let forwarding = match sysctl::forwards() {
        true => "this host is a router: forwarded flows are steered too",
        false => "off: flows of this host's own sockets are steered",
    };
    report.ok("forwarding", forwarding);
}

/// The larger of the value for all devices and the device's own counts. A strict filter takes a
/// packet when any next hop of the route back to its source leaves by the device it came in by
/// (`fib_info_nh_uses_dev`), so it does not harm multipath routes as such.
fn check_rp_filter(report: &mut Report, ifname: &str, main_table: bool) {
    match sysctl::largest4(ifname, "rp_filter") {
        Some(1) if !main_table => report.warn(
            "rp_filter",
            format!("{ifname}: strict, and the multipath route is not in the main table: replies may be dropped"),
            // Dots in a device's name are written as slashes there.
            format!("`sysctl -w net.ipv4.conf.{}.rp_filter=2`", ifname.replace('.', "/")),
        ),
        Some(1) => report.ok(
            "rp_filter",
            format!("{ifname}: strict; replies are accepted on every path of their multipath route"),
        ),
        Some(2) => report.ok("rp_filter", format!("{ifname}: loose")),
        _ => report.ok("rp_filter", format!("{ifname}: off")),
    }
}

fn is_ipv6(group: &Group) -> bool {
    matches!(group.prefixes.first(), Some(IpNet::V6(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printing() {
        let mut report = Report::default();
        report.ok("kernel", "6.12");
        report.warn("mtu", "differs", "look");
        assert_eq!(report.worst(), Level::Warn);
        let text = "✓ kernel  6.12\n! mtu     differs\n          → look\n";
        assert_eq!(report.text(false), text);
        let coloured = report.text(true);
        assert!(coloured.starts_with("\x1b[32m✓\x1b[0m kernel"));
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["items"][1]["level"], "warn");
        assert_eq!(json["items"][1]["todo"], "look");
    }
}
