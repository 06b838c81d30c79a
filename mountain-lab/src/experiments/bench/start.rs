// SPDX-License-Identifier: GPL-2.0-or-later
//! What choosing an uplink costs a flow: connect() of a local socket, and each packet of a forwarded
//! connection. All that `mountain up` adds is compared with none of it.
//!
//! ```text
//! inner 192.168.7.2 ── 192.168.7.1 home 10.40.0.2 ── 10.40.0.1 far, with 10.50.0.2
//!                                       10.41.0.2 ── 10.41.0.1
//! ```

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use mountain::bpf::{PathMasks as Masks, ProgramGroup, SteerMode};
use mountain::config::Config;
use mountain::placement::{PlacementPath, Placer};
use mountain::steer::rendezvous::{inv_weight, path_salt};
use mountain::topology::{read_topology_blocking, Filter};
use mountain_lab::result::{Check, LimitKind, Metric};
use mountain_lab::workload::stats::median;
use socket2::{Domain, Socket, Type};

use super::kernel::Constant;
use super::rig;
use super::run_time::{thread_time, Senders, DELIVERED};
use super::CostPlan;
use crate::emulate::cgroup::Cgroup;
use crate::emulate::netns::Netns;
use crate::stopped;

const INNER: Ipv4Addr = Ipv4Addr::new(192, 168, 7, 2);
const FAR: Ipv4Addr = Ipv4Addr::new(10, 50, 0, 2);

/// Limits of the checks.
const MAX_CONNECT_NS: f64 = 5_000.0;
const MAX_FORWARD_NS: f64 = 150.0;

/// A home with two providers, what is behind it, and what is before it.
struct Home {
    inner: Netns,
    home: Netns,
    far: Netns,
}

/// Two homes alike, without and with: the first ip rule of a namespace makes the kernel look routes up in
/// another way there, for good (`fib_has_custom_rules`), so one of them never has any. They are made anew
/// for each pair, as two that were alike would differ all the same by where they lie in memory.
struct Homes([Home; 2]);

impl Homes {
    fn build() -> Result<Self> {
        Ok(Homes([Home::build()?, Home::build()?]))
    }

    fn half(&self, with: bool) -> &Home {
        &self.0[usize::from(with)]
    }
}

impl Home {
    fn build() -> Result<Self> {
        let net = Home {
            inner: Netns::create("inner")?,
            home: Netns::create("home")?,
            far: Netns::create("far")?,
        };
        let Home { inner, home, far } = &net;
        for ns in [inner, home, far] {
            for key in ["all", "default"] {
                ns.sysctl(&[(&format!("net/ipv4/conf/{key}/rp_filter"), "0")])?;
            }
        }
        home.sysctl(&[("net/ipv4/ip_forward", "1")])?;
        join(home, "u0", "10.40.0.2", far, "s0", "10.40.0.1")?;
        join(home, "u1", "10.41.0.2", far, "s1", "10.41.0.1")?;
        join(home, "lan0", "192.168.7.1", inner, "e0", "192.168.7.2")?;
        far.ip(["addr", "add", &FAR.to_string(), "dev", "lo"])?;
        inner.ip(["route", "add", "default", "via", "192.168.7.1"])?;
        for (via, dev, metric) in [("10.40.0.1", "u0", "100"), ("10.41.0.1", "u1", "600")] {
            let route = ["via", via, "dev", dev, "metric", metric];
            home.ip(["route", "add", "default"].into_iter().chain(route))?;
        }
        Ok(net)
    }

    /// Has the home translate the addresses behind it.
    fn translate(&self) -> Result<()> {
        let rules = "table ip mtl { chain post { type nat hook postrouting priority srcnat; \
                     oifname { u0, u1 } masquerade; }; }";
        self.home.run("nft", [rules]).map(drop)
    }

    /// All that places flows, as `mountain up --adopt` sets it up with two good uplinks; call at home.
    fn placing(&self, cgroup: &Cgroup) -> Result<Placer> {
        let filter = Filter {
            adopt: true,
            ..Filter::default()
        };
        let topology = read_topology_blocking(&filter)?;
        ensure!(
            topology.groups.len() == 1 && topology.paths.len() == 2,
            "two uplinks were not found: {:?}",
            topology.skipped
        );
        let group = &topology.groups[0];
        let members = group.members.iter();
        let groups = [ProgramGroup {
            members: members.map(|m| (m.path, inv_weight(m.weight))).collect(),
            prefixes: group.prefixes.clone(),
        }];
        let known = |(index, path): (usize, &mountain::topology::Path)| {
            let name = path.ifname.clone();
            let salt = path_salt(name.as_bytes());
            (index, PlacementPath { index, name, salt })
        };
        let known: BTreeMap<usize, PlacementPath> =
            topology.paths.iter().enumerate().map(known).collect();
        let mut config = Config::default();
        config.placement.cgroup = Some(cgroup.path().to_owned());
        let mut placer = Placer::new(&config.placement, &config.rule)?;
        placer.update(&topology, &groups, &known)?;
        let both = Masks {
            latency: 0b11,
            bulk: 0b11,
            alive: 0b11,
            ejected: 0,
        };
        placer.set_masks(0, both);
        placer.set_mode(SteerMode::Steer);
        Ok(placer)
    }

    /// Packets that have arrived at the far end by each uplink.
    fn arrived(&self) -> Result<[u64; 2]> {
        rig::arrived(&self.far)
    }
}

/// A veth pair with an address at each end, neighbours permanent: nothing but the measured traffic on
/// the wire.
fn join(a: &Netns, a_dev: &str, a_ip: &str, b: &Netns, b_dev: &str, b_ip: &str) -> Result<()> {
    let b_path = b.path().display().to_string();
    let peer = ["peer", "name", b_dev, "netns", &b_path];
    let add = ["link", "add", a_dev, "type", "veth"];
    a.ip(add.into_iter().chain(peer))?;
    let mac = |ns: &Netns, dev: &str| -> Result<String> {
        let text = ns.ip(["-o", "link", "show", "dev", dev])?;
        let mut words = text.split_whitespace();
        words.find(|word| *word == "link/ether");
        Ok(words.next().context("no link-layer address")?.to_owned())
    };
    let (a_mac, b_mac) = (mac(a, a_dev)?, mac(b, b_dev)?);
    for (ns, dev, own, other, lladdr) in [
        (a, a_dev, a_ip, b_ip, &b_mac),
        (b, b_dev, b_ip, a_ip, &a_mac),
    ] {
        ns.ip(["addr", "add", &format!("{own}/24"), "dev", dev])?;
        ns.ip(["link", "set", dev, "up"])?;
        ns.ip(["neigh", "replace", other, "lladdr", lladdr, "dev", dev])?;
    }
    Ok(())
}

/// What was compared with none of it, once for each pair: ns without and with.
pub type Pairs = Vec<(f64, f64)>;

/// Kinds of sockets whose connect() is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ConnectKind {
    /// No packet is sent.
    Udp,
    /// To a listener of the same machine: the handshake is in it.
    Tcp,
}

impl ConnectKind {
    pub const ALL: [Self; 2] = [Self::Udp, Self::Tcp];

    fn name(self) -> &'static str {
        match self {
            Self::Udp => "udp",
            Self::Tcp => "tcp",
        }
    }
}

/// ns of connect(), the median of each segment, in the order A B B A.
pub fn connects(plan: &CostPlan, kind: ConnectKind) -> Result<Pairs> {
    let cgroup = Cgroup::join()?;
    let mut seen = Pairs::new();
    for i in 0..plan.pairs {
        let homes = Homes::build()?;
        let listen = |net: &Home| net.far.enter(|| Ok(TcpListener::bind((FAR, 0))?));
        let listeners = [listen(homes.half(false))?, listen(homes.half(true))?];
        for listener in &listeners {
            listener.set_nonblocking(true)?;
        }
        let measure = |with| {
            let net = homes.half(with);
            let listener = &listeners[usize::from(with)];
            net.home
                .enter(|| time_placed(plan, kind, net, &cgroup, listener, with))
        };
        seen.push(in_turn(i, measure)?);
    }
    Ok(seen)
}

/// Median time of one connect(), ns, at home; with: each is placed.
fn time_placed(
    plan: &CostPlan,
    kind: ConnectKind,
    net: &Home,
    cgroup: &Cgroup,
    listener: &TcpListener,
    with: bool,
) -> Result<f64> {
    let placer = with.then(|| net.placing(cgroup)).transpose()?;
    let placed = |s: &Placer| s.placed(0) + s.placed(1);
    let before = placer.as_ref().map(placed);
    time_connects(kind, plan.connects / 10, listener)?;
    let ns = time_connects(kind, plan.connects, listener)?;
    if let (Some(placer), Some(before)) = (&placer, before) {
        let placed = placed(placer) - before;
        ensure!(
            placed >= u64::from(plan.connects),
            "{placed} of {} connections were placed: not the cost of that",
            plan.connects
        );
    }
    Ok(ns)
}

/// Median time of one connect(), ns.
fn time_connects(kind: ConnectKind, count: u32, listener: &TcpListener) -> Result<f64> {
    let to = SocketAddr::new(IpAddr::V4(FAR), listener.local_addr()?.port()).into();
    let socket_type = match kind {
        ConnectKind::Udp => Type::DGRAM,
        ConnectKind::Tcp => Type::STREAM,
    };
    let mut times = Vec::with_capacity(count as usize);
    for _ in 0..count {
        let socket = Socket::new(Domain::IPV4, socket_type, None)?;
        let start = Instant::now();
        socket.connect(&to)?;
        times.push(start.elapsed().as_nanos() as f64);
        if kind == ConnectKind::Tcp {
            // Reset, and taken off the queue: no port waits and nothing fills up.
            socket.set_linger(Some(Duration::ZERO))?;
            drop(socket);
            while listener.accept().is_ok() {}
        }
    }
    Ok(median(&times))
}

/// Processor time of a forwarded packet, ns, from the sender's system call to the far end's ingress,
/// in the order A B B A. The home translates, with and without.
pub fn forwarded(plan: &CostPlan) -> Result<Pairs> {
    let cgroup = Cgroup::join()?;
    let drop = Constant::load(super::kernel::DROP)?;
    let mut seen = Pairs::new();
    for i in 0..plan.pairs {
        let homes = Homes::build()?;
        let mut sinks = Vec::new();
        let mut senders = Vec::new();
        for net in &homes.0 {
            net.translate()?;
            sinks.push(rig::sink(&net.far, &drop)?);
            let seed = plan.seed + u64::from(i);
            senders.push(net.inner.enter(|| Senders::new(INNER, FAR, seed))?);
        }
        for round in 0..FORWARD_ROUNDS {
            let measure = |with| {
                let net = homes.half(with);
                let senders = &senders[usize::from(with)];
                net.home
                    .enter(|| time_forwarded(plan, net, &cgroup, senders, with))
            };
            seen.push(in_turn(i + round, measure)?);
        }
    }
    Ok(seen)
}

/// Processor time of one packet, ns; call at home.
fn time_forwarded(
    plan: &CostPlan,
    net: &Home,
    cgroup: &Cgroup,
    senders: &Senders,
    with: bool,
) -> Result<f64> {
    let _starter = with.then(|| net.placing(cgroup)).transpose()?;
    senders.send(plan.warm_up / FORWARD_ROUNDS)?;
    let (before, cpu) = (net.arrived()?, thread_time()?);
    let sent = senders.send(plan.segment / FORWARD_ROUNDS)?;
    let cpu = thread_time()? - cpu;
    let arrived = net.arrived()?;
    let got = [0, 1].map(|uplink| arrived[uplink] - before[uplink]);
    let all = got[0] + got[1];
    ensure!(
        all as f64 >= sent as f64 * DELIVERED,
        "{sent} packets sent, {all} arrived: not a cost but a loss"
    );
    let by_second = got[1] as f64 / all as f64;
    ensure!(
        (by_second > 0.25) == with && by_second < 0.75,
        "{by_second:.2} of the packets by the second uplink: not what was to be measured"
    );
    Ok(cpu.as_nanos() as f64 / sent as f64)
}

/// Differences of a few per cent want many neighbouring pairs.
const FORWARD_ROUNDS: u32 = 4;

/// Measures pair `i`, without and with; each comes first in every other pair.
fn in_turn(i: u32, mut measure: impl FnMut(bool) -> Result<f64>) -> Result<(f64, f64)> {
    ensure!(!stopped(), "interrupted");
    let with_first = i % 2 == 1;
    let (first, second) = (measure(with_first)?, measure(!with_first)?);
    Ok(match with_first {
        false => (first, second),
        true => (second, first),
    })
}

/// What was measured, before it is put into a result.
#[derive(Default)]
pub struct PlacementTimes {
    pub connects: BTreeMap<ConnectKind, Pairs>,
    pub forwarded: Pairs,
}

impl PlacementTimes {
    /// Figures by policy and name, and the checks.
    pub fn report(&self, put: &mut impl FnMut(&str, &str, Metric), seed: u64) -> Vec<Check> {
        let mut checks = Vec::new();
        let mut pairs = |column: &str, pairs: &Pairs, n: u64, what: &str, limit: f64| {
            let mut of = |policy: &str, name: &str, value: &dyn Fn(&(f64, f64)) -> f64| {
                let values: Vec<f64> = pairs.iter().map(value).collect();
                let repeats = values.iter().copied().map(Some).collect();
                let metric = Metric::of_repeats("ns", repeats, n, seed);
                put(policy, name, metric.clone());
                metric
            };
            of("none", &format!("{column}_ns"), &|(without, _)| *without);
            of("placing", &format!("{column}_ns"), &|(_, with)| *with);
            let added = of("placing", &format!("{column}_added_ns"), &|(a, b)| b - a);
            let name = format!("{what} [{:.0}-{:.0}] n={}", added.lo, added.hi, pairs.len());
            checks.push(Check::new(
                &name,
                Some(added.median),
                LimitKind::AtMost,
                limit,
                None,
            ));
        };
        for (kind, measured) in &self.connects {
            let what = format!("ns that connect() of {} takes longer", kind.name());
            let column = format!("connect_{}", kind.name());
            let n = measured.len() as u64;
            pairs(&column, measured, n, &what, MAX_CONNECT_NS);
        }
        if !self.forwarded.is_empty() {
            let n = self.forwarded.len() as u64;
            let what = "ns that a forwarded packet takes longer";
            pairs("forward", &self.forwarded, n, what, MAX_FORWARD_NS);
        }
        checks
    }
}
