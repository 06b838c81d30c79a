// SPDX-License-Identifier: GPL-2.0-or-later
//! Bulk TCP flows from the client to the server, with goodput and path over time.

use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use anyhow::{anyhow, ensure, Context, Result};
use serde::{Deserialize, Serialize};

use super::metrics::{Leave, Onset};
use super::sniff::{FlowTrace, Sniffer};
use super::stream::{self, Buckets, Dial};
use super::sys;

pub use super::stream::BUCKET_NS;

const HELLO_BYTES: usize = 12;

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
    let at = SocketAddr::new(cfg.server_addr, cfg.port);
    let listener = sys::run_in(&cfg.server_ns, || stream::listen(at))?;
    listener.set_nonblocking(true)?;
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

fn connect(cfg: &BulkConfig) -> Result<TcpStream> {
    let dial = Dial {
        from: Some(cfg.client_addr),
        device: cfg.bind_dev.as_deref(),
        dscp: cfg.dscp,
        congestion: cfg.congestion.as_deref(),
    };
    let mut stream = dial.connect(SocketAddr::new(cfg.server_addr, cfg.port))?;
    stream.set_nodelay(true)?;
    stream::poll_for_stop(&stream)?;
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

fn serve(mut stream: TcpStream, start_ns: u64, stop: &AtomicBool) -> ServerFlow {
    let client_port = stream.peer_addr().map_or(0, |a| a.port());
    let _ = stream.set_nodelay(true);
    let _ = stream::poll_for_stop(&stream);
    let mut payload = Buckets::new(start_ns);
    let mut hello = Vec::with_capacity(HELLO_BYTES);
    let (mut request, mut response, mut got) = (0u64, 0usize, 0u64);
    let ended = stream::receive(&mut stream, stop, |stream, piece| {
        let part = piece.len().min(HELLO_BYTES - hello.len());
        if part > 0 {
            hello.extend_from_slice(&piece[..part]);
            if hello.len() == HELLO_BYTES {
                request = u64::from(u32::from_be_bytes(hello[4..8].try_into().unwrap()));
                response = u32::from_be_bytes(hello[8..12].try_into().unwrap()) as usize;
            }
        }
        payload.add(piece.len() - part);
        got += (piece.len() - part) as u64;
        while request > 0 && got >= request {
            got -= request;
            stream::send(stream, response, stop)?;
        }
        Ok(())
    });
    ServerFlow {
        client_port,
        buckets: payload.bytes,
        error: ended.err().map(|e| e.to_string()),
    }
}

fn run_client(mut stream: TcpStream, pattern: Pattern, stop: &AtomicBool) -> ClientFlow {
    let mut responses = Vec::new();
    let ended = match pattern {
        Pattern::Saturating => stream::send(&mut stream, usize::MAX, stop),
        Pattern::Paced { rate_bps } => stream::send_paced(&mut stream, rate_bps, 100, stop),
        Pattern::RequestResponse {
            request_bytes,
            response_bytes,
            think_ms,
        } => {
            let sizes = (request_bytes as usize, response_bytes as usize);
            ask(&mut stream, sizes, think_ms, stop, &mut responses)
        }
    };
    let _ = stream::end_by_reset(&stream);
    ClientFlow {
        responses,
        error: ended.err().map(|e| e.to_string()),
    }
}

fn ask(
    stream: &mut TcpStream,
    (request, response): (usize, usize),
    think_ms: u64,
    stop: &AtomicBool,
    responses: &mut Vec<(u64, u32)>,
) -> io::Result<()> {
    while !stop.load(Ordering::Relaxed) {
        let asked_ns = sys::monotonic_ns();
        stream::send(stream, request, stop)?;
        stream::receive_exactly(stream, response, stop)?;
        if stop.load(Ordering::Relaxed) {
            break; // possibly cut short
        }
        responses.push((asked_ns, ((sys::monotonic_ns() - asked_ns) / 1_000) as u32));
        sys::sleep_until(sys::monotonic_ns() + think_ms * 1_000_000);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
