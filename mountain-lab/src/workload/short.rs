// SPDX-License-Identifier: GPL-2.0-or-later
//! Many short flows, each with its own source port: how a policy spreads flows over paths.

use std::collections::{HashMap, VecDeque};
use std::io::{IoSliceMut, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use nix::sys::socket::{recvmsg, ControlMessageOwned, MsgFlags};
use serde::{Deserialize, Serialize};
use socket2::{SockRef, Socket, Type};

use super::echo::{EchoServer, Header, HEADER_BYTES, UNKNOWN_PATH};
use super::sniff::Sniffer;
use super::sys;

/// Answers are waited for so long after a UDP flow's last packet.
const LINGER_NS: u64 = 500_000_000;
/// A TCP flow that is not done by then has failed.
const TCP_TIMEOUT: Duration = Duration::from_secs(5);
/// TCP flows are opened by so many threads, each one flow at a time.
const TCP_WORKERS: u64 = 32;

/// TCP or UDP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// `packets` datagrams, each echoed.
    Udp,
    /// A request of `packets` × `payload_bytes`, a small response, close.
    Tcp,
}

/// What to send, from where to where.
#[derive(Debug, Clone)]
pub struct ShortConfig {
    /// Network namespace of the client.
    pub client_ns: PathBuf,
    /// Network namespace of the server.
    pub server_ns: PathBuf,
    /// Source address of all flows.
    pub client_addr: IpAddr,
    /// UDP: source port of the first flow; further ones have the next ones. `None`: the kernel's choice, which
    /// is one of before now and then, and to connection tracking the same flow.
    pub first_client_port: Option<u16>,
    /// Address the flows are sent to.
    pub server_addr: IpAddr,
    /// Port of the server.
    pub port: u16,
    /// TCP or UDP.
    pub proto: Transport,
    /// New flows per second.
    pub flows_per_s: f64,
    /// Packets of a flow.
    pub packets: u32,
    /// Time between a UDP flow's packets.
    pub interval_ms: u64,
    /// Payload of a packet.
    pub payload_bytes: usize,
    /// Devices of the server's namespace; the index in here is the path.
    pub paths: Vec<String>,
}

/// What one flow saw.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ShortFlow {
    /// Its source port.
    pub client_port: u16,
    /// When it was opened, `CLOCK_MONOTONIC`.
    pub opened_ns: u64,
    /// Path of its first packet (TCP: data segment) at the server; `None`: nothing arrived.
    pub path: Option<u8>,
    /// Later packets came by another path.
    pub moved: bool,
    /// UDP: later packets came from another source address.
    pub readdressed: bool,
    /// UDP: time of sending (`CLOCK_MONOTONIC`) and round trip of each packet; `None`: no answer.
    pub rtts: Vec<(u64, Option<u32>)>,
    /// UDP: packets sent. TCP: 1.
    pub sent: u32,
    /// UDP: packets answered. TCP: 1 if the response came.
    pub answered: u32,
    /// TCP: from connect to the end of the response.
    pub completion_us: Option<u32>,
}

/// Running flows. Dropping it ends them.
pub struct Short {
    stop: Arc<AtomicBool>,
    kind: Option<Kind>,
}

enum Kind {
    Udp {
        server: EchoServer,
        client: JoinHandle<Option<Vec<ShortFlow>>>,
        run: u32,
    },
    Tcp {
        sniffer: Sniffer,
        server: JoinHandle<()>,
        clients: Vec<JoinHandle<Option<Vec<ShortFlow>>>>,
    },
}

/// Starts the server, then flows at the given rate.
pub fn start(cfg: ShortConfig) -> Result<Short> {
    ensure!(
        cfg.flows_per_s > 0.0 && cfg.flows_per_s <= 5_000.0,
        "flows_per_s = {}: must be above 0 and at most 5000",
        cfg.flows_per_s
    );
    ensure!(cfg.packets > 0, "packets = 0");
    let enough = if cfg.proto == Transport::Udp {
        HEADER_BYTES
    } else {
        8
    };
    ensure!(
        (enough..=1472).contains(&cfg.payload_bytes),
        "payload_bytes = {}: must be {enough}..=1472",
        cfg.payload_bytes
    );
    let stop = Arc::new(AtomicBool::new(false));
    let kind = match cfg.proto {
        Transport::Udp => start_udp(cfg, &stop),
        Transport::Tcp => start_tcp(&cfg, &stop),
    };
    if kind.is_err() {
        stop.store(true, Ordering::Relaxed);
    }
    Ok(Short {
        kind: Some(kind?),
        stop,
    })
}

impl Short {
    /// Opens no more flows, waits for the last to end and returns all, by time of opening.
    pub fn stop(mut self) -> Result<Vec<ShortFlow>> {
        self.stop.store(true, Ordering::Relaxed);
        let mut flows = match self.kind.take() {
            Some(Kind::Udp {
                server,
                client,
                run,
            }) => {
                let mut flows = sys::join(client)?;
                add_udp_paths(&mut flows, &server, run);
                flows
            }
            Some(Kind::Tcp {
                sniffer,
                server,
                clients,
            }) => {
                let mut flows = Vec::new();
                for client in clients {
                    flows.extend(sys::join(client)?);
                }
                let _ = server.join();
                let (traces, _) = sniffer.stop()?;
                for flow in &mut flows {
                    // Ports are used again after a while: the visit that began within this flow.
                    let visits = traces
                        .get(&flow.client_port)
                        .into_iter()
                        .flat_map(|t| &t.visits);
                    let mut paths = visits
                        .filter(|v| v.last_ns >= flow.opened_ns)
                        .map(|v| v.path);
                    flow.path = paths.next().flatten();
                    flow.moved = paths.next().is_some();
                }
                flows
            }
            None => Vec::new(),
        };
        flows.sort_by_key(|f| f.opened_ns);
        Ok(flows)
    }
}

impl Drop for Short {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Share of the flows that began on each path, among those of which anything arrived.
pub fn shares(flows: &[ShortFlow], paths: usize) -> Vec<f64> {
    let arrived = flows.iter().filter(|f| f.path.is_some()).count();
    let on = |path: usize| flows.iter().filter(|f| f.path == Some(path as u8)).count();
    (0..paths)
        .map(|path| on(path) as f64 / arrived as f64)
        .collect()
}

struct OpenFlow {
    socket: Socket,
    number: u16,
    record: ShortFlow,
    next_ns: u64,
}

fn start_udp(cfg: ShortConfig, stop: &Arc<AtomicBool>) -> Result<Kind> {
    let server = EchoServer::start(&cfg.server_ns, cfg.server_addr, cfg.port, &cfg.paths)?;
    let run: u32 = rand::random();
    let netns = cfg.client_ns.clone();
    let first_cfg = cfg.clone();
    let client = sys::spawn_in(
        "short-udp",
        &netns,
        // A first socket shows at once what is wrong with the addresses.
        move || {
            open_udp(&first_cfg, 0)
                .context("cannot open a flow")
                .map(drop)
        },
        {
            let stop = Arc::clone(stop);
            move |()| run_udp(&cfg, run, &stop)
        },
    )?;
    Ok(Kind::Udp {
        server,
        client,
        run,
    })
}

/// The socket of the flow of this number.
fn open_udp(cfg: &ShortConfig, number: u16) -> Result<Socket> {
    let socket = sys::socket_for(cfg.client_addr, Type::DGRAM)?;
    socket.set_nonblocking(true)?;
    sys::set_int_option(&socket, libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 1)?;
    let port = cfg.first_client_port.map_or(0, |first| {
        // As many as there are from it on, then again.
        first + (u32::from(number) % (u32::from(u16::MAX - first) + 1)) as u16
    });
    socket.bind(&SocketAddr::new(cfg.client_addr, port).into())?;
    socket.connect(&SocketAddr::new(cfg.server_addr, cfg.port).into())?;
    Ok(socket)
}

fn run_udp(cfg: &ShortConfig, run: u32, stop: &AtomicBool) -> Vec<ShortFlow> {
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
            let Ok(socket) = open_udp(cfg, this) else {
                continue;
            };
            let local = socket.local_addr().ok().and_then(|a| a.as_socket());
            let record = ShortFlow {
                client_port: local.map_or(0, |a| a.port()),
                opened_ns: now,
                path: None,
                moved: false,
                readdressed: false,
                rtts: Vec::new(),
                sent: 0,
                answered: 0,
                completion_us: None,
            };
            open.push_back(OpenFlow {
                socket,
                number: this,
                record,
                next_ns: now,
            });
        }
        for flow in open.iter_mut() {
            if flow.record.sent < cfg.packets && flow.next_ns <= now {
                Header::request(run, flow.number, flow.record.sent).write(&mut payload);
                flow.record.rtts.push((sys::monotonic_ns(), None));
                let _ = flow.socket.send(&payload);
                flow.record.sent += 1;
                flow.next_ns += interval_ns;
            }
        }
        let lifetime_ns = interval_ns * u64::from(cfg.packets) + LINGER_NS;
        while open
            .front()
            .is_some_and(|f| f.record.opened_ns + lifetime_ns <= now)
        {
            done.extend(open.pop_front().map(close_udp));
        }
        if stopping && open.is_empty() {
            return done;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Counts and times the answers that wait in the socket, by the kernel's receive timestamps.
fn close_udp(flow: OpenFlow) -> ShortFlow {
    let OpenFlow {
        socket, mut record, ..
    } = flow;
    let offset_ns = sys::realtime_ns() - sys::monotonic_ns();
    let mut buf = [0u8; 2048];
    let mut control = nix::cmsg_space!(nix::sys::time::TimeSpec);
    while let Some((len, at_ns)) = receive(&socket, &mut buf, &mut control) {
        let Some(header) = Header::read(&buf[..len]) else {
            continue;
        };
        let Some((sent_ns, rtt)) = record.rtts.get_mut(header.seq as usize) else {
            continue;
        };
        record.answered += 1;
        let took = at_ns.saturating_sub(offset_ns + *sent_ns + header.residence_ns);
        rtt.get_or_insert((took / 1000) as u32);
    }
    record
}

/// Length and time (`CLOCK_REALTIME`) of a datagram that waits in the socket.
fn receive(socket: &Socket, buf: &mut [u8], control: &mut [u8]) -> Option<(usize, u64)> {
    let mut iov = [IoSliceMut::new(buf)];
    let fd = socket.as_raw_fd();
    let message = recvmsg::<()>(fd, &mut iov, Some(control), MsgFlags::empty()).ok()?;
    let at_ns = message.cmsgs().ok()?.find_map(|item| match item {
        ControlMessageOwned::ScmTimestampns(t) => {
            Some(t.tv_sec() as u64 * 1_000_000_000 + t.tv_nsec() as u64)
        }
        _ => None,
    });
    Some((message.bytes, at_ns.unwrap_or_else(sys::realtime_ns)))
}

fn add_udp_paths(flows: &mut [ShortFlow], server: &EchoServer, run: u32) {
    // Ports come back after the range is used up; a flow's datagrams arrive after it was opened.
    let offset_ns = sys::realtime_ns() - sys::monotonic_ns();
    let mut by_port: HashMap<u16, Vec<(u64, u8, IpAddr)>> = HashMap::new();
    for arrival in server.arrivals().filter(|a| a.header.run == run) {
        let at_ns = arrival.header.arrival_ns.saturating_sub(offset_ns);
        by_port.entry(arrival.client_port).or_default().push((
            at_ns,
            arrival.header.path,
            arrival.client_addr,
        ));
    }
    let mut ends: HashMap<u16, u64> = HashMap::new();
    flows.sort_by_key(|f| std::cmp::Reverse(f.opened_ns));
    for flow in flows {
        // The next flow of this port, if any, was looked at just before.
        let until = ends
            .insert(flow.client_port, flow.opened_ns)
            .unwrap_or(u64::MAX);
        let mut seen =
            by_port
                .get(&flow.client_port)
                .into_iter()
                .flatten()
                .filter(|(at_ns, path, _)| {
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

fn start_tcp(cfg: &ShortConfig, stop: &Arc<AtomicBool>) -> Result<Kind> {
    let sniffer = Sniffer::start(&cfg.server_ns, cfg.port, &cfg.paths, 1_000)?;
    let request = cfg.payload_bytes * cfg.packets as usize;
    let listener = sys::run_in(&cfg.server_ns, || {
        let socket = sys::socket_for(cfg.server_addr, Type::STREAM)?;
        socket.set_reuse_address(true)?;
        socket.bind(&SocketAddr::new(cfg.server_addr, cfg.port).into())?;
        socket.listen(1024)?;
        socket.set_nonblocking(true)?;
        Ok(TcpListener::from(socket))
    })
    .with_context(|| format!("cannot listen on TCP port {}", cfg.port))?;
    let turns = Arc::new(AtomicU64::new(0));
    let start_ns = sys::monotonic_ns();
    let mut clients = Vec::new();
    for _ in 0..TCP_WORKERS {
        let (cfg, stop, turns) = (cfg.clone(), Arc::clone(stop), Arc::clone(&turns));
        let netns = cfg.client_ns.clone();
        let work = move |()| {
            let mut flows = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                let turn = turns.fetch_add(1, Ordering::Relaxed);
                let due_ns = start_ns + (turn as f64 * 1e9 / cfg.flows_per_s) as u64;
                while sys::monotonic_ns() < due_ns && !stop.load(Ordering::Relaxed) {
                    let left_ns = due_ns.saturating_sub(sys::monotonic_ns());
                    std::thread::sleep(Duration::from_nanos(left_ns.min(20_000_000)));
                }
                if !stop.load(Ordering::Relaxed) {
                    flows.push(one_tcp_flow(&cfg, request));
                }
            }
            flows
        };
        clients.push(sys::spawn_in("short-tcp", &netns, || Ok(()), work)?);
    }
    let server = Builder::new().name("short-accept".into()).spawn({
        let stop = Arc::clone(stop);
        move || serve_tcp(&listener, request, &stop)
    })?;
    Ok(Kind::Tcp {
        sniffer,
        server,
        clients,
    })
}

fn one_tcp_flow(cfg: &ShortConfig, request: usize) -> ShortFlow {
    let mut flow = ShortFlow {
        client_port: 0,
        opened_ns: sys::monotonic_ns(),
        path: None,
        moved: false,
        readdressed: false,
        rtts: Vec::new(),
        sent: 1,
        answered: 0,
        completion_us: None,
    };
    let mut run = || -> Result<()> {
        let socket = sys::socket_for(cfg.client_addr, Type::STREAM)?;
        socket.bind(&SocketAddr::new(cfg.client_addr, 0).into())?;
        let to = SocketAddr::new(cfg.server_addr, cfg.port);
        socket.connect_timeout(&to.into(), TCP_TIMEOUT)?;
        flow.client_port = socket
            .local_addr()?
            .as_socket()
            .context("no address of its own")?
            .port();
        socket.set_read_timeout(Some(TCP_TIMEOUT))?;
        socket.set_write_timeout(Some(TCP_TIMEOUT))?;
        let mut stream = TcpStream::from(socket);
        stream.write_all(&vec![0u8; request])?;
        let mut response = [0u8; 8];
        stream.read_exact(&mut response)?;
        // Without TIME-WAIT the ports last for longer runs.
        SockRef::from(&stream).set_linger(Some(Duration::ZERO))?;
        Ok(())
    };
    if run().is_ok() {
        flow.answered = 1;
        flow.completion_us = Some(((sys::monotonic_ns() - flow.opened_ns) / 1_000) as u32);
    }
    flow
}

/// Answers each request with 8 bytes. Ends when told to and no worker can be waiting any more.
fn serve_tcp(listener: &TcpListener, request: usize, stop: &AtomicBool) {
    let mut waiting: Vec<(TcpStream, usize)> = Vec::new();
    let mut buf = vec![0u8; 64 << 10];
    let mut stopped_ns = None;
    loop {
        while let Ok((stream, _)) = listener.accept() {
            if stream.set_nonblocking(true).is_ok() {
                waiting.push((stream, request));
            }
        }
        waiting.retain_mut(|(stream, left)| match stream.read(&mut buf) {
            Ok(0) => false,
            Ok(n) => {
                *left = left.saturating_sub(n);
                if *left == 0 {
                    // Eight bytes always fit into an empty send buffer; the client closes.
                    return stream.write(&[0u8; 8]).is_ok();
                }
                true
            }
            Err(e) => e.kind() == std::io::ErrorKind::WouldBlock,
        });
        if stop.load(Ordering::Relaxed) {
            let now = sys::monotonic_ns();
            let since = *stopped_ns.get_or_insert(now);
            // A client whose reset got lost would be waited for in vain.
            let given_up = now - since > 2 * TCP_TIMEOUT.as_nanos() as u64;
            if given_up || (waiting.is_empty() && now - since > 200_000_000) {
                return;
            }
        }
        std::thread::sleep(Duration::from_micros(500));
    }
}
