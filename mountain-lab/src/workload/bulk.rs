// SPDX-License-Identifier: GPL-2.0-or-later
//! Bulk TCP flows from the client to the server, with goodput and path over time.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use anyhow::{anyhow, ensure, Context, Result};
use serde::{Deserialize, Serialize};
use socket2::{SockRef, Socket, Type};

use super::metrics::{Leave, Onset};
use super::sniff::{FlowTrace, Sniffer};
use super::sys;

/// Goodput is counted in buckets of this length.
pub const BUCKET_NS: u64 = 100_000_000;
const HELLO_BYTES: usize = 12;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a blocked read or write takes to notice the order to stop.
const POLL: Duration = Duration::from_millis(50);

/// What each flow does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Pattern {
    /// As fast as the congestion control lets it.
    Saturating,
    /// At this rate: a chunk every 10 ms, nothing caught up after a stall.
    Paced {
        /// Payload bits per second.
        rate_bps: u64,
    },
    /// Request, response, pause, again.
    RequestResponse {
        /// Client to server.
        request_bytes: u32,
        /// Server to client.
        response_bytes: u32,
        /// Pause after a response.
        think_ms: u64,
    },
}

/// What to send, from where to where.
#[derive(Debug, Clone)]
pub struct BulkConfig {
    /// Network namespace of the client, which sends the data.
    pub client_ns: PathBuf,
    /// Network namespace of the server.
    pub server_ns: PathBuf,
    /// Source address of all flows.
    pub client_addr: IpAddr,
    /// Address the flows are sent to.
    pub server_addr: IpAddr,
    /// TCP port of the server.
    pub port: u16,
    /// Number of connections.
    pub flows: u32,
    /// What each does.
    pub pattern: Pattern,
    /// Congestion control of the client; `None`: the kernel's default.
    pub congestion: Option<String>,
    /// DSCP of the client's packets.
    pub dscp: Option<u8>,
    /// Device the client's sockets are bound to.
    pub bind_dev: Option<String>,
    /// Devices of the server's namespace; the index in here is the path.
    pub paths: Vec<String>,
    /// Where the client's segments are seen before any path queues them: a namespace and its devices in the same
    /// order. `None`: at the server, as nothing is queued.
    pub sent: Option<(PathBuf, Vec<String>)>,
    /// Smallest round-trip time of any path; tells reordering from retransmission.
    pub min_rtt_us: u32,
}

/// What one flow did.
#[derive(Debug, Clone, Serialize)]
pub struct FlowReport {
    /// Flow, from 0.
    pub flow: u16,
    /// Its source port.
    pub client_port: u16,
    /// Payload that reached the server's program, in buckets of [`BUCKET_NS`] from the start.
    pub bytes_by_bucket: Vec<u64>,
    /// Request/response: when each request was sent (`CLOCK_MONOTONIC`) and how long it took, µs.
    pub responses: Vec<(u64, u32)>,
    /// Paths as the client used them, reordering as seen on the server's devices.
    pub trace: FlowTrace,
    /// Why the connection ended before the order to stop: a lost flow.
    pub error: Option<String>,
}

impl FlowReport {
    /// Payload bytes in all.
    pub fn bytes(&self) -> u64 {
        self.bytes_by_bucket.iter().sum()
    }

    /// How long after `onset` the flow's data had left the path.
    ///
    /// Unlike game packets a bulk flow may pause, so the last data segment on the path before it
    /// became good again counts, and a flow that pauses until then has left.
    pub fn time_to_leave(&self, onset: Onset) -> Leave {
        let here = || {
            self.trace
                .visits
                .iter()
                .filter(|v| v.path == Some(onset.path))
        };
        let recently = onset.at_ns.saturating_sub(super::metrics::CLEAR_NS);
        if !here().any(|v| v.first_ns < onset.at_ns && v.last_ns >= recently) {
            return Leave::NotThere;
        }
        let bad =
            |v: &&super::sniff::Visit| v.first_ns < onset.until_ns && v.last_ns >= onset.at_ns;
        match here().filter(bad).map(|v| v.last_ns).max() {
            None => Leave::Left(0),
            Some(last) if last >= onset.until_ns => Leave::Stayed(onset.until_ns - onset.at_ns),
            Some(last) => Leave::Left(last - onset.at_ns),
        }
    }
}

/// What all flows did.
#[derive(Debug, Clone, Serialize)]
pub struct BulkReport {
    /// Time 0 of the buckets, `CLOCK_MONOTONIC`.
    pub start_ns: u64,
    /// By flow number.
    pub flows: Vec<FlowReport>,
    /// Frames the observer missed; with any, paths and reordering are incomplete.
    pub unobserved: u64,
}

impl BulkReport {
    /// Goodput of all flows together in whole buckets within `[from_ns, until_ns)`, bit/s.
    pub fn goodput_bps(&self, from_ns: u64, until_ns: u64) -> f64 {
        let first = from_ns.saturating_sub(self.start_ns).div_ceil(BUCKET_NS) as usize;
        let last = (until_ns.saturating_sub(self.start_ns) / BUCKET_NS) as usize;
        if last <= first {
            return f64::NAN;
        }
        let bytes: u64 = self
            .flows
            .iter()
            .flat_map(|f| f.bytes_by_bucket.iter().take(last).skip(first))
            .sum();
        bytes as f64 * 8e9 / ((last - first) as f64 * BUCKET_NS as f64)
    }

    /// Goodput per second and flow, bit/s: `[flow][second]`. The last, partial second is left out.
    pub fn goodput_by_second(&self) -> Vec<Vec<f64>> {
        let per_second = (1_000_000_000 / BUCKET_NS) as usize;
        let seconds = |f: &FlowReport| -> Vec<f64> {
            let chunks = f.bytes_by_bucket.chunks_exact(per_second);
            chunks.map(|c| c.iter().sum::<u64>() as f64 * 8.0).collect()
        };
        self.flows.iter().map(seconds).collect()
    }

    /// Segments that were overtaken because their flow changed its path.
    pub fn reordered_by_moves(&self) -> usize {
        let across = |f: &FlowReport| {
            f.trace
                .reorderings
                .iter()
                .filter(|r| r.across_paths)
                .count()
        };
        self.flows.iter().map(across).sum()
    }
}

struct ServerFlow {
    client_port: u16,
    buckets: Vec<u64>,
    error: Option<String>,
}

struct ClientFlow {
    responses: Vec<(u64, u32)>,
    error: Option<String>,
}

/// Running flows.
pub struct Bulk {
    start_ns: u64,
    stop: Arc<AtomicBool>,
    sniffer: Option<Sniffer>,
    sent: Option<Sniffer>,
    acceptor: Option<JoinHandle<Vec<ServerFlow>>>,
    clients: Vec<(u16, JoinHandle<ClientFlow>)>,
}

/// Starts observer and server, connects all flows and lets them run. Any error stops everything.
pub fn start(cfg: BulkConfig) -> Result<Bulk> {
    ensure!(
        cfg.flows > 0 && cfg.flows <= 2_000,
        "flows = {}: must be 1..=2000",
        cfg.flows
    );
    if let Pattern::Paced { rate_bps } = cfg.pattern {
        ensure!(
            rate_bps >= 8_000,
            "rate_bps = {rate_bps}: must be at least 8000"
        );
    }
    if let Pattern::RequestResponse {
        request_bytes,
        response_bytes,
        ..
    } = cfg.pattern
    {
        ensure!(
            request_bytes > 0 && response_bytes > 0,
            "requests and responses have bytes"
        );
    }
    let sniffer = Sniffer::start(&cfg.server_ns, cfg.port, &cfg.paths, cfg.min_rtt_us)?;
    let sent = cfg.sent.as_ref();
    let sent = sent.map(|(ns, paths)| Sniffer::start(ns, cfg.port, paths, cfg.min_rtt_us));
    let listener = sys::run_in(&cfg.server_ns, || listen(cfg.server_addr, cfg.port))
        .with_context(|| format!("cannot listen on TCP port {}", cfg.port))?;
    let stop = Arc::new(AtomicBool::new(false));
    let start_ns = sys::monotonic_ns();
    let acceptor = Builder::new().name("bulk-accept".into()).spawn({
        let stop = Arc::clone(&stop);
        move || accept(&listener, start_ns, &stop)
    })?;
    let mut bulk = Bulk {
        start_ns,
        stop,
        sniffer: Some(sniffer),
        sent: sent.transpose()?,
        acceptor: Some(acceptor),
        clients: vec![],
    };
    // On an error `bulk` is dropped, which stops what runs already.
    let streams = sys::run_in(&cfg.client_ns, || {
        (0..cfg.flows)
            .map(|n| connect(&cfg).with_context(|| format!("cannot connect flow {n}")))
            .collect::<Result<Vec<_>>>()
    })?;
    for stream in streams {
        let port = stream.local_addr()?.port();
        let (stop, pattern) = (Arc::clone(&bulk.stop), cfg.pattern);
        let thread = Builder::new()
            .name("bulk-client".into())
            .spawn(move || run_client(stream, pattern, &stop))?;
        bulk.clients.push((port, thread));
    }
    Ok(bulk)
}

impl Bulk {
    /// Stops all flows (by reset, so that no queue of theirs outlives them) and reports.
    pub fn stop(mut self) -> Result<BulkReport> {
        self.stop.store(true, Ordering::Relaxed);
        let panicked = || anyhow!("a bulk thread panicked");
        let clients: Vec<(u16, ClientFlow)> = std::mem::take(&mut self.clients)
            .into_iter()
            .map(|(port, thread)| Ok((port, thread.join().map_err(|_| panicked())?)))
            .collect::<Result<_>>()?;
        let servers = match self.acceptor.take() {
            Some(thread) => thread.join().map_err(|_| panicked())?,
            None => Vec::new(),
        };
        let (mut traces, mut unobserved) = match self.sniffer.take() {
            Some(sniffer) => sniffer.stop()?,
            None => Default::default(),
        };
        // A flow has left a path when it sends nothing more there. What it has sent may queue for seconds.
        if let Some(sniffer) = self.sent.take() {
            let (sent, missed) = sniffer.stop()?;
            unobserved += missed;
            for (port, trace) in sent {
                let received = traces.entry(port).or_default();
                received.visits = trace.visits;
                received.last_on_path = trace.last_on_path;
            }
        }
        let flows = clients
            .into_iter()
            .enumerate()
            .map(|(flow, (client_port, client))| {
                let server = servers.iter().find(|s| s.client_port == client_port);
                FlowReport {
                    flow: flow as u16,
                    client_port,
                    bytes_by_bucket: server.map(|s| s.buckets.clone()).unwrap_or_default(),
                    responses: client.responses,
                    trace: traces.remove(&client_port).unwrap_or_default(),
                    error: client
                        .error
                        .or_else(|| server.and_then(|s| s.error.clone())),
                }
            })
            .collect();
        Ok(BulkReport {
            start_ns: self.start_ns,
            flows,
            unobserved,
        })
    }
}

impl Drop for Bulk {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for (_, thread) in self.clients.drain(..) {
            let _ = thread.join();
        }
        if let Some(thread) = self.acceptor.take() {
            let _ = thread.join();
        }
    }
}

fn listen(addr: IpAddr, port: u16) -> Result<TcpListener> {
    let socket = sys::socket_for(addr, Type::STREAM)?;
    socket.set_reuse_address(true)?;
    socket.bind(&SocketAddr::new(addr, port).into())?;
    socket.listen(1024)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

fn connect(cfg: &BulkConfig) -> Result<TcpStream> {
    let socket: Socket = sys::socket_for(cfg.client_addr, Type::STREAM)?;
    if let Some(device) = &cfg.bind_dev {
        socket
            .bind_device(Some(device.as_bytes()))
            .with_context(|| format!("cannot bind to device {device}"))?;
    }
    if let Some(dscp) = cfg.dscp {
        sys::set_dscp(&socket, cfg.client_addr, dscp)?;
    }
    if let Some(name) = &cfg.congestion {
        socket
            .set_tcp_congestion(name.as_bytes())
            .with_context(|| format!("congestion control {name} is not available"))?;
    }
    socket.bind(&SocketAddr::new(cfg.client_addr, 0).into())?;
    socket.connect_timeout(
        &SocketAddr::new(cfg.server_addr, cfg.port).into(),
        CONNECT_TIMEOUT,
    )?;
    socket.set_tcp_nodelay(true)?;
    socket.set_write_timeout(Some(POLL))?;
    socket.set_read_timeout(Some(POLL))?;
    let mut stream: TcpStream = socket.into();
    let (request, response) = match cfg.pattern {
        Pattern::RequestResponse {
            request_bytes,
            response_bytes,
            ..
        } => (request_bytes, response_bytes),
        _ => (0, 0),
    };
    let mut hello = [0u8; HELLO_BYTES];
    hello[0..4].copy_from_slice(b"mtlb");
    hello[4..8].copy_from_slice(&request.to_be_bytes());
    hello[8..12].copy_from_slice(&response.to_be_bytes());
    stream.write_all(&hello)?;
    Ok(stream)
}

fn accept(listener: &TcpListener, start_ns: u64, stop: &Arc<AtomicBool>) -> Vec<ServerFlow> {
    let mut threads: Vec<JoinHandle<ServerFlow>> = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        match listener.accept() {
            Ok((stream, _)) => {
                let stop = Arc::clone(stop);
                let serve = move || serve(stream, start_ns, &stop);
                if let Ok(thread) = Builder::new().name("bulk-server".into()).spawn(serve) {
                    threads.push(thread);
                }
            }
            Err(_) => std::thread::sleep(Duration::from_millis(2)),
        }
    }
    threads.into_iter().filter_map(|t| t.join().ok()).collect()
}

/// Outcome of a read or write that may time out.
enum Io {
    Bytes(usize),
    Again,
    Ended(String),
}

fn outcome(result: std::io::Result<usize>) -> Io {
    match result {
        Ok(0) => Io::Ended("closed by the other end".into()),
        Ok(n) => Io::Bytes(n),
        Err(e) => match e.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => Io::Again,
            _ => Io::Ended(e.to_string()),
        },
    }
}

fn serve(mut stream: TcpStream, start_ns: u64, stop: &AtomicBool) -> ServerFlow {
    let client_port = stream.peer_addr().map_or(0, |a| a.port());
    let mut flow = ServerFlow {
        client_port,
        buckets: Vec::new(),
        error: None,
    };
    let _ = stream.set_nodelay(true);
    // Accepted sockets inherit neither the non-blocking mode nor the time-outs.
    let _ = stream.set_nonblocking(false);
    let _ = stream.set_read_timeout(Some(POLL));
    let _ = stream.set_write_timeout(Some(POLL));
    let mut hello = Vec::with_capacity(HELLO_BYTES);
    let mut buf = vec![0u8; 256 << 10];
    let (mut request, mut response, mut got) = (0u64, 0usize, 0u64);
    while !stop.load(Ordering::Relaxed) {
        let mut n = match outcome(stream.read(&mut buf)) {
            Io::Bytes(n) => n,
            Io::Again => continue,
            Io::Ended(why) => {
                flow.error = (!stop.load(Ordering::Relaxed)).then_some(why);
                break;
            }
        };
        if hello.len() < HELLO_BYTES {
            let part = n.min(HELLO_BYTES - hello.len());
            hello.extend_from_slice(&buf[..part]);
            n -= part;
            if hello.len() == HELLO_BYTES {
                request = u64::from(u32::from_be_bytes(hello[4..8].try_into().unwrap()));
                response = u32::from_be_bytes(hello[8..12].try_into().unwrap()) as usize;
            }
        }
        let bucket = ((sys::monotonic_ns() - start_ns) / BUCKET_NS) as usize;
        if flow.buckets.len() <= bucket {
            flow.buckets.resize(bucket + 1, 0);
        }
        flow.buckets[bucket] += n as u64;
        got += n as u64;
        while request > 0 && got >= request {
            got -= request;
            if let Err(why) = write_all(&mut stream, response, stop) {
                flow.error = (!stop.load(Ordering::Relaxed)).then_some(why);
                return flow;
            }
        }
    }
    flow
}

/// Writes `bytes` zero bytes; an order to stop ends it early without an error.
fn write_all(stream: &mut TcpStream, mut bytes: usize, stop: &AtomicBool) -> Result<(), String> {
    static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
    while bytes > 0 && !stop.load(Ordering::Relaxed) {
        match outcome(stream.write(&ZEROS[..bytes.min(ZEROS.len())])) {
            Io::Bytes(n) => bytes -= n,
            Io::Again => {}
            Io::Ended(why) => return Err(why),
        }
    }
    Ok(())
}

fn read_all(stream: &mut TcpStream, mut bytes: usize, stop: &AtomicBool) -> Result<(), String> {
    let mut buf = [0u8; 16 << 10];
    while bytes > 0 && !stop.load(Ordering::Relaxed) {
        let len = buf.len();
        match outcome(stream.read(&mut buf[..bytes.min(len)])) {
            Io::Bytes(n) => bytes -= n,
            Io::Again => {}
            Io::Ended(why) => return Err(why),
        }
    }
    Ok(())
}

fn run_client(mut stream: TcpStream, pattern: Pattern, stop: &AtomicBool) -> ClientFlow {
    let mut flow = ClientFlow {
        responses: Vec::new(),
        error: None,
    };
    let result = match pattern {
        Pattern::Saturating => write_all(&mut stream, usize::MAX, stop),
        Pattern::Paced { rate_bps } => paced(&mut stream, rate_bps, stop),
        Pattern::RequestResponse {
            request_bytes,
            response_bytes,
            think_ms,
        } => {
            let sizes = (request_bytes as usize, response_bytes as usize);
            ask(&mut stream, sizes, think_ms, stop, &mut flow.responses)
        }
    };
    // Whichever end stops first resets the connection under the other one.
    flow.error = result.err().filter(|_| !stop.load(Ordering::Relaxed));
    // Closing must not leave a send buffer draining into what is measured next.
    let _ = SockRef::from(&stream).set_linger(Some(Duration::ZERO));
    flow
}

fn paced(stream: &mut TcpStream, rate_bps: u64, stop: &AtomicBool) -> Result<(), String> {
    const TICK_NS: u64 = 10_000_000;
    let mut due_ns = sys::monotonic_ns();
    // Bits times ticks per second, carried over so that no rate is rounded away.
    let mut credit = 0u64;
    while !stop.load(Ordering::Relaxed) {
        credit += rate_bps;
        let chunk = credit / 800;
        credit %= 800;
        write_all(stream, chunk as usize, stop)?;
        due_ns = (due_ns + TICK_NS).max(sys::monotonic_ns().saturating_sub(TICK_NS));
        sleep_until(due_ns);
    }
    Ok(())
}

fn ask(
    stream: &mut TcpStream,
    (request, response): (usize, usize),
    think_ms: u64,
    stop: &AtomicBool,
    responses: &mut Vec<(u64, u32)>,
) -> Result<(), String> {
    while !stop.load(Ordering::Relaxed) {
        let asked_ns = sys::monotonic_ns();
        write_all(stream, request, stop)?;
        read_all(stream, response, stop)?;
        if stop.load(Ordering::Relaxed) {
            break; // possibly cut short
        }
        responses.push((asked_ns, ((sys::monotonic_ns() - asked_ns) / 1_000) as u32));
        sleep_until(sys::monotonic_ns() + think_ms * 1_000_000);
    }
    Ok(())
}

fn sleep_until(due_ns: u64) {
    std::thread::sleep(Duration::from_nanos(
        due_ns.saturating_sub(sys::monotonic_ns()),
    ));
}

#[cfg(test)]
mod tests;
