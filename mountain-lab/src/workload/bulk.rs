// SPDX-License-Identifier: GPL-2.0-or-later
//! Bulk TCP flows from the client to the server, with goodput and path over time.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{anyhow, Context, Result};

use super::dial::{within, Dial, Ends};
use super::metrics::{Leave, Onset};
use super::sniff::{self, FlowTrace, Sniffer};
use super::stream::{self, Buckets};
use super::sys;
use super::worker::Worker;

/// What each flow does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
        /// Of a request and of its response.
        bytes: (usize, usize),
        /// Pause after a response.
        think_ms: u64,
    },
}

/// What to send, from where to where.
#[derive(Debug, Clone)]
pub struct BulkConfig {
    /// From where to where.
    pub ends: Ends,
    /// Number of connections.
    pub flows: u32,
    /// What each does.
    pub pattern: Pattern,
    /// So long after they were connected they begin.
    pub begins: Duration,
    /// Congestion control of the client; `None`: the kernel's default.
    pub congestion: Option<String>,
    /// DSCP of the client's packets.
    pub dscp: Option<u8>,
    /// Where the client's segments are seen before any path queues them: a namespace and its devices in the same
    /// order. `None`: at the server, as nothing is queued.
    pub sent: Option<(PathBuf, Vec<String>)>,
    /// Smallest round-trip time of any path; tells reordering from retransmission.
    pub min_rtt_us: u32,
}

/// What one flow did.
#[derive(Debug, Clone, Default)]
pub struct FlowReport {
    /// Its source port.
    pub client_port: u16,
    /// Payload that reached the server's program, in buckets of [`stream::BUCKET_NS`] from the start.
    pub bytes_by_bucket: Vec<u64>,
    /// Paths as the client used them, reordering as seen on the server's devices.
    pub trace: FlowTrace,
    /// Why the connection ended before the order to stop: a lost flow.
    pub error: Option<String>,
}

impl FlowReport {
    /// How long after `onset` the flow's data had left the path.
    ///
    /// Unlike game packets a bulk flow may pause, so the last data segment on the path before it
    /// became good again counts, and a flow that pauses until then has left.
    pub fn time_to_leave(&self, onset: Onset) -> Leave {
        let visits = &self.trace.visits;
        let here = || visits.iter().filter(|v| v.path == Some(onset.path));
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
#[derive(Debug, Clone)]
pub struct BulkReport {
    /// Time 0 of the buckets, `CLOCK_MONOTONIC`.
    pub start_ns: u64,
    /// In the order in which they were connected.
    pub flows: Vec<FlowReport>,
    /// Frames the observer missed; with any, paths and reordering are incomplete.
    pub unobserved: u64,
}

impl BulkReport {
    /// Goodput of all flows together in whole buckets within `[from_ns, until_ns)`, bit/s.
    pub fn goodput_bps(&self, from_ns: u64, until_ns: u64) -> f64 {
        let [from_ns, until_ns] = [from_ns, until_ns].map(|ns| ns.saturating_sub(self.start_ns));
        let flows = self.flows.iter().map(|f| &f.bytes_by_bucket);
        flows
            .map(|bytes| stream::goodput_bps(bytes, from_ns, until_ns))
            .sum()
    }
}

/// Running flows.
pub struct Bulk {
    start_ns: u64,
    sniffer: Sniffer,
    sent: Option<Sniffer>,
    /// What it is told the clients are told, too.
    acceptor: Worker<Vec<FlowReport>>,
    /// By source port; why a flow ended early.
    clients: Vec<(u16, JoinHandle<Option<String>>)>,
}

/// Starts observer and server, connects all flows and lets them run. Any error stops everything.
pub fn start(cfg: BulkConfig) -> Result<Bulk> {
    within("flows", cfg.flows, 1..=2_000)?;
    let requests = match cfg.pattern {
        Pattern::RequestResponse { bytes, .. } => Some(bytes),
        _ => None,
    };
    let (ends, min_rtt_us) = (&cfg.ends, cfg.min_rtt_us);
    let sniffer = sniff::start(&ends.server_ns, ends.port, &ends.paths, min_rtt_us)?;
    let sent = cfg.sent.as_ref();
    let sent = sent.map(|(ns, paths)| sniff::start(ns, ends.port, paths, min_rtt_us));
    let (at, start_ns) = (ends.server(), sys::monotonic_ns());
    let listen = move || {
        let listener = stream::listen(at)?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    let accept = move |listener: TcpListener, stop: &Arc<AtomicBool>| {
        accept(&listener, start_ns, requests, stop)
    };
    let mut bulk = Bulk {
        start_ns,
        sniffer,
        sent: sent.transpose()?,
        acceptor: Worker::start("bulk-accept", &ends.server_ns, listen, accept)?,
        clients: vec![],
    };
    // On an error `bulk` is dropped, which stops what runs already.
    let streams = sys::run_in(&ends.client_ns, || {
        (0..cfg.flows)
            .map(|n| connect(&cfg).with_context(|| format!("cannot connect flow {n}")))
            .collect::<Result<Vec<_>>>()
    })?;
    for stream in streams {
        let port = stream.local_addr()?.port();
        let (stop, pattern, begins) = (bulk.acceptor.order(), cfg.pattern, cfg.begins);
        let thread = Builder::new()
            .name("bulk-client".into())
            .spawn(move || run_client(stream, begins, pattern, &stop))?;
        bulk.clients.push((port, thread));
    }
    Ok(bulk)
}

impl Bulk {
    /// Stops all flows (by reset, so that no queue of theirs outlives them) and reports.
    pub fn stop(mut self) -> Result<BulkReport> {
        self.acceptor.tell();
        let panicked = || anyhow!("a bulk thread panicked");
        let clients: Vec<(u16, Option<String>)> = std::mem::take(&mut self.clients)
            .into_iter()
            .map(|(port, thread)| Ok((port, thread.join().map_err(|_| panicked())?)))
            .collect::<Result<_>>()?;
        let mut servers = self.acceptor.finish()?;
        let (mut traces, mut unobserved) = self.sniffer.finish()?;
        // A flow has left a path when it sends nothing more there. What it has sent may queue for seconds.
        if let Some(sniffer) = &mut self.sent {
            let (sent, missed) = sniffer.finish()?;
            unobserved += missed;
            for (port, trace) in sent {
                let received = traces.entry(port).or_default();
                received.visits = trace.visits;
            }
        }
        let flows = clients
            .into_iter()
            .map(|(client_port, error)| {
                let at = servers.iter().position(|s| s.client_port == client_port);
                let server = at.map(|at| servers.swap_remove(at)).unwrap_or_default();
                FlowReport {
                    client_port,
                    trace: traces.remove(&client_port).unwrap_or_default(),
                    error: error.or(server.error),
                    ..server
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
        self.acceptor.tell();
        for (_, thread) in self.clients.drain(..) {
            let _ = thread.join();
        }
    }
}

fn connect(cfg: &BulkConfig) -> Result<TcpStream> {
    let dial = Dial {
        dscp: cfg.dscp,
        congestion: cfg.congestion.as_deref(),
        ..cfg.ends.dial(0)
    };
    let stream = dial.connect(cfg.ends.server())?;
    stream.set_nodelay(true)?;
    stream::poll_for_stop(&stream)?;
    Ok(stream)
}

fn accept(
    listener: &TcpListener,
    start_ns: u64,
    requests: Option<(usize, usize)>,
    stop: &Arc<AtomicBool>,
) -> Vec<FlowReport> {
    let mut threads: Vec<JoinHandle<FlowReport>> = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        match listener.accept() {
            Ok((stream, _)) => {
                let stop = Arc::clone(stop);
                let serve = move || serve(stream, start_ns, requests, &stop);
                if let Ok(thread) = Builder::new().name("bulk-server".into()).spawn(serve) {
                    threads.push(thread);
                }
            }
            Err(_) => std::thread::sleep(Duration::from_millis(2)),
        }
    }
    threads.into_iter().filter_map(|t| t.join().ok()).collect()
}

/// Counts what arrives, and answers each request.
fn serve(
    mut stream: TcpStream,
    start_ns: u64,
    requests: Option<(usize, usize)>,
    stop: &AtomicBool,
) -> FlowReport {
    let client_port = stream.peer_addr().map_or(0, |a| a.port());
    let _ = stream.set_nodelay(true);
    let _ = stream::poll_for_stop(&stream);
    let mut payload = Buckets::new(start_ns);
    let mut got = 0;
    let ended = stream::receive(&mut stream, stop, |stream, piece| {
        payload.add(piece.len());
        let Some((request, response)) = requests else {
            return Ok(());
        };
        got += piece.len();
        while got >= request {
            got -= request;
            stream::send(stream, response, stop)?;
        }
        Ok(())
    });
    FlowReport {
        client_port,
        bytes_by_bucket: payload.bytes,
        error: ended.err().map(|e| e.to_string()),
        ..FlowReport::default()
    }
}

/// Why it ended before the order to stop.
fn run_client(
    mut stream: TcpStream,
    begins: Duration,
    pattern: Pattern,
    stop: &AtomicBool,
) -> Option<String> {
    let begin = Instant::now() + begins;
    while Instant::now() < begin && !stop.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(2));
    }
    let ended = match pattern {
        Pattern::Saturating => stream::send(&mut stream, usize::MAX, stop),
        Pattern::Paced { rate_bps } => stream::send_paced(&mut stream, rate_bps, 100, stop),
        Pattern::RequestResponse { bytes, think_ms } => ask(&mut stream, bytes, think_ms, stop),
    };
    let _ = stream::end_by_reset(&stream);
    ended.err().map(|e| e.to_string())
}

fn ask(
    stream: &mut TcpStream,
    (request, response): (usize, usize),
    think_ms: u64,
    stop: &AtomicBool,
) -> io::Result<()> {
    while !stop.load(Ordering::Relaxed) {
        stream::send(stream, request, stop)?;
        stream::receive_exactly(stream, response, stop)?;
        sys::sleep_until(sys::monotonic_ns() + think_ms * 1_000_000);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
