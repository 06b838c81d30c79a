// SPDX-License-Identifier: GPL-2.0-or-later
//! What choosing an uplink costs a flow: connect() of a local socket, and each packet of a forwarded
//! connection. All that `mountain up` adds is compared with none of it.
//!
//! ```text
//! inner 192.168.7.2 ── 192.168.7.1 home 10.40.0.2 ── 10.40.0.1 far, with 198.51.100.2
//!                                       10.41.0.2 ── 10.41.0.1
//! ```

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use anyhow::{ensure, Result};
use mountain::bpf::{PathMasks as Masks, ProgramGroup, SteerMode};
use mountain::config::Config;
use mountain::placement::config::SpreadBy;
use mountain::placement::{PlacementPath, Placer};
use mountain::steer::rendezvous::{inv_weight, path_salt};
use mountain::topology::{read_topology_blocking, Filter};
use mountain_lab::result::RunResult;
use mountain_lab::workload::stats::median;
use socket2::{Domain, Socket, Type};

use super::run_time::Senders;
use super::{less, repeats, rig, segment, warm_up};
use crate::driver::{CommonArgs, Session};
use crate::emulate::cgroup::Cgroup;
use crate::emulate::netns::Netns;
use crate::emulate::wire::lan;

const INNER: Ipv4Addr = Ipv4Addr::new(192, 168, 7, 2);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(192, 168, 7, 1);
const FAR: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 2);

/// Limits of the checks.
const MAX_CONNECT_NS: f64 = 5_000.0;
const MAX_FORWARD_NS: f64 = 150.0;

/// A home with two providers, what is behind it, and what is before it.
///
/// Two homes alike, without and with: the first ip rule of a namespace makes the kernel look routes up in
/// another way there, for good (`fib_has_custom_rules`), so one of them never has any. They are made anew
/// for each pair, as two that were alike would differ all the same by where they lie in memory.
struct Home {
    inner: Netns,
    home: Netns,
    far: Netns,
}

impl Home {
    fn build() -> Result<Self> {
        let net = Home {
            inner: Netns::create("inner")?,
            home: Netns::create("home")?,
            far: Netns::create("far")?,
        };
        let Home { inner, home, far } = &net;
        home.sysctl(&[("net/ipv4/ip_forward", "1")])?;
        for (own, theirs, net, metric) in [("u0", "s0", 40, 100), ("u1", "s1", 41, 600)] {
            let [via, addr] = [1, 2].map(|host| Ipv4Addr::new(10, net, 0, host));
            lan((home, own, addr), (far, theirs, via))?;
            let route = format!("default via {via} dev {own} metric {metric}");
            home.ip(&format!("route add {route}"))?;
        }
        lan((home, "lan0", GATEWAY), (inner, "e0", INNER))?;
        far.ip(&format!("addr add {FAR} dev lo"))?;
        inner.ip(&format!("route add default via {GATEWAY}"))?;
        Ok(net)
    }

    /// Has the home translate the addresses behind it.
    fn translate(&self) -> Result<()> {
        let rules = "table ip mtl { chain post { type nat hook postrouting priority srcnat; \
                     oifname { u0, u1 } masquerade; }; }";
        self.home.nft(rules)
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
        config.placement.spread = SpreadBy::Flow;
        let mut placer = Placer::new(&config.placement, &config.rule)?;
        placer.update(&topology, &groups, &known)?;
        let both = Masks {
            latency: 0b11,
            bulk: 0b11,
            alive: 0b11,
            ..Masks::default()
        };
        placer.set_masks(0, both, both.latency);
        placer.set_mode(SteerMode::Steer);
        Ok(placer)
    }
}

/// Sockets whose connect() is timed. Of UDP no packet is sent; with TCP, to a listener of the same machine,
/// the handshake is in it.
pub const SOCKETS: [(&str, Type); 2] = [("udp", Type::DGRAM), ("tcp", Type::STREAM)];

/// Each of them.
pub fn connects(session: &mut Session) -> Result<()> {
    let mut sockets = SOCKETS.into_iter();
    sockets.try_for_each(|kind| connects_of(session, kind))
}

/// ns of connect(), the median of each segment, in the order A B B A.
fn connects_of(session: &mut Session, (name, kind): (&str, Type)) -> Result<()> {
    let args = &session.args;
    let cgroup = Cgroup::join()?;
    let mut seen = Vec::new();
    let what = format!("connect() of {name}");
    for i in 0..repeats(args) {
        let homes = [Home::build()?, Home::build()?];
        let listen = |net: &Home| net.far.enter(|| Ok(TcpListener::bind((FAR, 0))?));
        let listeners = [listen(&homes[0])?, listen(&homes[1])?];
        for listener in &listeners {
            listener.set_nonblocking(true)?;
        }
        seen.push(session.round(&what, &HALVES, i, |half| {
            let (net, listener) = (&homes[half], &listeners[half]);
            net.home
                .enter(|| time_placed(args, kind, net, &cgroup, listener, half == 1))
        })?);
    }
    let what = format!("ns that {what} takes longer");
    let (result, column) = (&mut session.result, format!("connect_{name}"));
    put(result, &seen, &column, &what, MAX_CONNECT_NS);
    Ok(())
}

/// Median time of one connect(), ns, at home; with: each is placed.
fn time_placed(
    args: &CommonArgs,
    kind: Type,
    net: &Home,
    cgroup: &Cgroup,
    listener: &TcpListener,
    with: bool,
) -> Result<f64> {
    let connects = args.quick_or(500, 5_000);
    let placer = with.then(|| net.placing(cgroup)).transpose()?;
    let placed = |s: &Placer| s.placed(0) + s.placed(1);
    let before = placer.as_ref().map(placed);
    time_connects(kind, connects / 10, listener)?;
    let ns = time_connects(kind, connects, listener)?;
    if let (Some(placer), Some(before)) = (&placer, before) {
        let placed = placed(placer) - before;
        ensure!(
            placed >= u64::from(connects),
            "{placed} of {connects} connections were placed: not the cost of that"
        );
    }
    Ok(ns)
}

/// Median time of one connect(), ns.
fn time_connects(kind: Type, count: u32, listener: &TcpListener) -> Result<f64> {
    let to = SocketAddr::from((FAR, listener.local_addr()?.port())).into();
    let mut times = Vec::with_capacity(count as usize);
    for _ in 0..count {
        let socket = Socket::new(Domain::IPV4, kind, None)?;
        let start = Instant::now();
        socket.connect(&to)?;
        times.push(start.elapsed().as_nanos() as f64);
        if kind == Type::STREAM {
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
pub fn forwarded(session: &mut Session) -> Result<()> {
    let args = &session.args;
    let cgroup = Cgroup::join()?;
    let mut seen = Vec::new();
    for i in 0..repeats(args) {
        let homes = [Home::build()?, Home::build()?];
        let mut sinks = Vec::new();
        let mut senders = Vec::new();
        for net in &homes {
            net.translate()?;
            sinks.push(rig::sink(&net.far)?);
            let seed = args.seed + u64::from(i);
            senders.push(net.inner.enter(|| Senders::new(INNER, FAR, seed))?);
        }
        for round in i..i + FORWARD_ROUNDS {
            let what = "time per forwarded packet";
            seen.push(session.round(what, &HALVES, round, |half| {
                let (net, senders) = (&homes[half], &senders[half]);
                net.home
                    .enter(|| time_forwarded(args, net, &cgroup, senders, half == 1))
            })?);
        }
    }
    let what = "ns that a forwarded packet takes longer";
    let result = &mut session.result;
    put(result, &seen, "forward", what, MAX_FORWARD_NS);
    Ok(())
}

/// Processor time of one packet, ns; call at home.
fn time_forwarded(
    args: &CommonArgs,
    net: &Home,
    cgroup: &Cgroup,
    senders: &Senders,
    with: bool,
) -> Result<f64> {
    let _starter = with.then(|| net.placing(cgroup)).transpose()?;
    senders.send(warm_up(args) / FORWARD_ROUNDS)?;
    let sent = senders.timed(&net.far, segment(args) / FORWARD_ROUNDS)?;
    let (packets, all) = (sent.packets, sent.arrived.iter().sum::<u64>());
    ensure!(
        sent.is_delivered(all),
        "{packets} packets sent, {all} arrived: not a cost but a loss"
    );
    let by_second = sent.arrived[1] as f64 / all as f64;
    ensure!(
        (by_second > 0.25) == with && by_second < 0.75,
        "{by_second:.2} of the packets by the second uplink: not what was to be measured"
    );
    Ok(sent.packet_ns())
}

/// Differences of a few per cent want many neighbouring pairs.
pub const FORWARD_ROUNDS: u32 = 4;

const HALVES: [&str; 2] = ["without", "with"];

/// The figures, and the check of the added cost; of pairs of ns without and with.
fn put(result: &mut RunResult, pairs: &[Vec<f64>], column: &str, what: &str, limit: f64) {
    let half = |half: usize| -> Vec<f64> { pairs.iter().map(|pair| pair[half]).collect() };
    let (without, with, n) = (half(0), half(1), pairs.len() as u64);
    let name = format!("{column}_ns");
    result.put_values("none", &name, "ns", &without, n);
    result.put_values("placing", &name, "ns", &with, n);
    let (name, added) = (format!("{column}_added_ns"), less(&with, &without));
    let added = result.put_values("placing", &name, "ns", &added, n);
    let name = format!("{what} [{:.0}-{:.0}] n={n}", added.lo, added.hi);
    let median = added.median;
    result.at_most(&name, Some(median), limit);
}
