// SPDX-License-Identifier: GPL-2.0-or-later
//! Many short UDP flows, each with its own source port: how a policy spreads flows over paths.
//!
//! A flow's answers are read when it ends, by their kernel receive stamps: [`super::game`], whose flows
//! last, has a transmit stamp for each packet as well, and reads as it goes.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use mountain::measure::timestamp;
use socket2::Socket;

use super::dial::{within, Ends};
use super::echo::{EchoServer, Header, HEADER_BYTES, UNKNOWN_PATH};
use super::sys;
use super::worker::Worker;

/// Answers are waited for so long after a flow's last packet.
const LINGER_NS: u64 = 500_000_000;

/// What to send, from where to where.
#[derive(Debug, Clone)]
pub struct ShortConfig {
    /// From where to where.
    pub ends: Ends,
    /// Source port of the first flow; further ones have the next ones. `None`: the kernel's choice, which
    /// is one of before now and then, and to connection tracking the same flow.
    pub first_client_port: Option<u16>,
    /// New flows per second.
    pub flows_per_s: f64,
    /// Packets of a flow.
    pub packets: u32,
    /// Time between a flow's packets.
    pub interval_ms: u64,
    /// Payload of a packet.
    pub payload_bytes: usize,
}

/// What one flow saw.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ShortFlow {
    /// Its source port.
    pub client_port: u16,
    /// When it was opened, `CLOCK_MONOTONIC`.
    pub opened_ns: u64,
    /// Path of its first packet at the server; `None`: nothing arrived.
    pub path: Option<u8>,
    /// Later packets came by another path.
    pub moved: bool,
    /// Later packets came from another source address.
    pub readdressed: bool,
    /// Time of sending (`CLOCK_MONOTONIC`) and round trip of each packet; `None`: no answer.
    pub rtts: Vec<(u64, Option<u32>)>,
}

/// Running flows. Dropping it ends them.
pub struct Short {
    server: EchoServer,
    client: Worker<Vec<ShortFlow>>,
    run: u32,
}

/// Starts the server, then flows at the given rate.
pub fn start(cfg: ShortConfig) -> Result<Short> {
    within("payload_bytes", cfg.payload_bytes, HEADER_BYTES..=1472)?;
    let server = EchoServer::start(&cfg.ends)?;
    let run: u32 = rand::random();
    let netns = cfg.ends.client_ns.clone();
    // A first socket shows at once what is wrong with the addresses.
    let set_up = move || {
        open_flow(&cfg, 0).context("cannot open a flow")?;
        Ok(cfg)
    };
    let client = Worker::start("short-udp", &netns, set_up, move |cfg, stop| {
        run_flows(&cfg, run, stop)
    })?;
    Ok(Short {
        server,
        client,
        run,
    })
}

impl Short {
    /// Opens no more flows, waits for the last to end and returns all, by time of opening.
    pub fn stop(mut self) -> Result<Vec<ShortFlow>> {
        let mut flows = self.client.finish()?;
        add_paths(&mut flows, &self.server, self.run);
        flows.sort_by_key(|f| f.opened_ns);
        Ok(flows)
    }
}

struct OpenFlow {
    socket: Socket,
    number: u16,
    record: ShortFlow,
    next_ns: u64,
}

/// The socket of the flow of this number.
fn open_flow(cfg: &ShortConfig, number: u16) -> Result<Socket> {
    let port = cfg.first_client_port.map_or(0, |first| {
        // As many as there are from it on, then again.
        first + (u32::from(number) % (u32::from(u16::MAX - first) + 1)) as u16
    });
    let socket = cfg.ends.dial(port).datagrams(cfg.ends.server())?;
    socket.set_nonblocking(true)?;
    timestamp::set_stamping(&socket, timestamp::RECEIVED)?;
    Ok(socket)
}

fn run_flows(cfg: &ShortConfig, run: u32, stop: &AtomicBool) -> Vec<ShortFlow> {
    sys::raise_priority();
    sys::tighten_timer_slack();
    let interval_ns = cfg.interval_ms * 1_000_000;
    let step_ns = (1e9 / cfg.flows_per_s) as u64;
    let mut payload = vec![0u8; cfg.payload_bytes];
    let mut done = Vec::new();
    // By time of opening, hence also by time of ending: all flows last equally long.
    let mut open: VecDeque<OpenFlow> = VecDeque::new();
    let mut next_open_ns = sys::monotonic_ns();
    let mut number = 0u16;
    loop {
        let now = sys::monotonic_ns();
        let stopping = stop.load(Ordering::Relaxed);
        next_open_ns = next_open_ns.max(now.saturating_sub(100_000_000));
        while !stopping && next_open_ns <= now {
            next_open_ns += step_ns;
            let this = number;
            number = number.wrapping_add(1);
            let Ok(socket) = open_flow(cfg, this) else {
                continue;
            };
            let local = socket.local_addr().ok().and_then(|a| a.as_socket());
            let record = ShortFlow {
                client_port: local.map_or(0, |a| a.port()),
                opened_ns: now,
                ..ShortFlow::default()
            };
            open.push_back(OpenFlow {
                socket,
                number: this,
                record,
                next_ns: now,
            });
        }
        for flow in open.iter_mut() {
            let sent = flow.record.rtts.len() as u32;
            if sent < cfg.packets && flow.next_ns <= now {
                Header::request(run, flow.number, sent).write(&mut payload);
                flow.record.rtts.push((sys::monotonic_ns(), None));
                let _ = flow.socket.send(&payload);
                flow.next_ns += interval_ns;
            }
        }
        let lifetime_ns = interval_ns * u64::from(cfg.packets) + LINGER_NS;
        let is_over = |flow: &OpenFlow| flow.record.opened_ns + lifetime_ns <= now;
        while open.front().is_some_and(is_over) {
            done.extend(open.pop_front().map(close_flow));
        }
        if stopping && open.is_empty() {
            return done;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Times the answers that wait in the socket, by the kernel's receive timestamps.
fn close_flow(flow: OpenFlow) -> ShortFlow {
    let OpenFlow {
        socket, mut record, ..
    } = flow;
    let offset_ns = sys::realtime_ns() - sys::monotonic_ns();
    let mut buf = [0u8; 2048];
    while let Ok(received) = timestamp::receive(&socket, &mut buf) {
        let at_ns = received.rx_ns.unwrap_or_else(sys::realtime_ns);
        let Some(header) = Header::read(&buf[..received.len]) else {
            continue;
        };
        let Some((sent_ns, rtt)) = record.rtts.get_mut(header.seq as usize) else {
            continue;
        };
        let took = at_ns.saturating_sub(offset_ns + *sent_ns + header.residence_ns);
        rtt.get_or_insert((took / 1000) as u32);
    }
    record
}

fn add_paths(flows: &mut [ShortFlow], server: &EchoServer, run: u32) {
    // Ports come back after the range is used up; a flow's datagrams arrive after it was opened.
    let offset_ns = sys::realtime_ns() - sys::monotonic_ns();
    let mut by_port: HashMap<u16, Vec<(u64, u8, IpAddr)>> = HashMap::new();
    for arrival in server.arrivals().filter(|a| a.header.run == run) {
        let at_ns = arrival.header.arrival_ns.saturating_sub(offset_ns);
        let seen = (at_ns, arrival.header.path, arrival.client_addr);
        by_port.entry(arrival.client_port).or_default().push(seen);
    }
    let mut ends: HashMap<u16, u64> = HashMap::new();
    flows.sort_by_key(|f| std::cmp::Reverse(f.opened_ns));
    for flow in flows {
        // The next flow of this port, if any, was looked at just before.
        let until = ends
            .insert(flow.client_port, flow.opened_ns)
            .unwrap_or(u64::MAX);
        let of_port = by_port.get(&flow.client_port).into_iter().flatten();
        let mut seen = of_port.filter(|(at_ns, path, _)| {
            (flow.opened_ns..until).contains(at_ns) && *path != UNKNOWN_PATH
        });
        let Some((_, first, address)) = seen.next() else {
            continue;
        };
        flow.path = Some(*first);
        for (_, path, from) in seen {
            flow.moved |= path != first;
            flow.readdressed |= from != address;
        }
    }
}
