// SPDX-License-Identifier: GPL-2.0-or-later
//! Saturating TCP flows with a congestion control each, and what arrived of them.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{anyhow, Context, Result};
use mountain_lab::workload::sys;
use socket2::{SockRef, Type};

use crate::emulate::netns::Netns;

/// Arrivals are counted in buckets of this length.
pub const BUCKET_US: u64 = 100_000;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const FRAMES_A_SECOND: u64 = 30;
/// How long a blocked read or write takes to notice the order to stop.
const POLL: Duration = Duration::from_millis(50);

/// One flow to start.
#[derive(Clone, Debug, PartialEq)]
pub struct FlowSpec {
    /// Name of its congestion control.
    pub congestion: String,
    /// After the start of the link, µs.
    pub start_us: u64,
    /// To the far port, whose way back may be longer.
    pub far: bool,
    /// It has no more to send than this, bit/s, 30 times a second; `None`: as much as it can.
    pub media_bps: Option<u64>,
}

/// What one flow did.
#[derive(Clone, Debug, Default)]
pub struct CcFlowReport {
    /// Payload that reached the server's program, in buckets of [`BUCKET_US`].
    pub bytes: Vec<u64>,
    pub retransmits: u64,
}

impl CcFlowReport {
    /// Goodput in whole buckets between two times, bit/s.
    pub fn goodput_bps(&self, from_us: u64, until_us: u64) -> f64 {
        let (first, last) = (from_us.div_ceil(BUCKET_US), until_us / BUCKET_US);
        let buckets = self.bytes.iter().skip(first as usize);
        let bytes: u64 = buckets.take((last - first) as usize).sum();
        bytes as f64 * 8e6 / ((last - first) * BUCKET_US) as f64
    }
}

/// The two ends of a flow: what was sent again, and what arrived.
type Ends = (JoinHandle<Result<u64>>, JoinHandle<Result<Vec<u64>>>);

/// Running flows. Dropping them stops them.
pub struct Flows {
    stop: Arc<AtomicBool>,
    flows: Vec<Ends>,
}

impl Flows {
    /// Starts flows from `client` to `to` in `server` (far ones to the
    /// port after it); times count from `start_ns`
    /// (CLOCK_MONOTONIC).
    pub fn start(
        client: &Netns,
        server: &Netns,
        to: SocketAddr,
        specs: &[FlowSpec],
        start_ns: u64,
    ) -> Result<Self> {
        let far = SocketAddr::new(to.ip(), to.port() + 1);
        let [listener, far_listener] = [to, far].map(|to| {
            server.enter(|| {
                let socket = sys::socket_for(to.ip(), Type::STREAM)?;
                socket.set_reuse_address(true)?;
                socket.bind(&to.into())?;
                socket.listen(64)?;
                Ok(TcpListener::from(socket))
            })
        });
        let (listener, far_listener) = (listener?, far_listener?);
        let mut running = Flows {
            stop: Arc::default(),
            flows: Vec::new(),
        };
        for spec in specs {
            let elapsed_us = sys::monotonic_ns().saturating_sub(start_ns) / 1_000;
            std::thread::sleep(Duration::from_micros(
                spec.start_us.saturating_sub(elapsed_us),
            ));
            let (listener, to) = match spec.far {
                true => (&far_listener, far),
                false => (&listener, to),
            };
            let out = client.enter(|| connect(to, &spec.congestion))?;
            let (inward, _) = listener.accept()?;
            let (stop, end) = (running.stop.clone(), running.stop.clone());
            let frame = spec.media_bps.map(|bps| bps / 8 / FRAMES_A_SECOND);
            let send = Builder::new()
                .name("cc-send".into())
                .spawn(move || send(out, frame, &stop))?;
            let receive = Builder::new()
                .name("cc-receive".into())
                .spawn(move || receive(inward, start_ns, &end))?;
            running.flows.push((send, receive));
        }
        Ok(running)
    }

    /// Stops all flows and reports, in the order in which they were given.
    pub fn finish(mut self) -> Result<Vec<CcFlowReport>> {
        self.stop.store(true, Ordering::Relaxed);
        let panicked = |_| anyhow!("a thread of a flow panicked");
        let join = |(send, receive): Ends| {
            Ok(CcFlowReport {
                retransmits: send.join().map_err(panicked)??,
                bytes: receive.join().map_err(panicked)??,
            })
        };
        std::mem::take(&mut self.flows)
            .into_iter()
            .map(join)
            .collect()
    }
}

impl Drop for Flows {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for (send, receive) in self.flows.drain(..) {
            let _ = (send.join(), receive.join());
        }
    }
}

fn connect(to: SocketAddr, congestion: &str) -> Result<TcpStream> {
    let socket = sys::socket_for(to.ip(), Type::STREAM)?;
    socket
        .set_tcp_congestion(congestion.as_bytes())
        .with_context(|| format!("congestion control {congestion} is not available"))?;
    socket.connect_timeout(&to.into(), CONNECT_TIMEOUT)?;
    Ok(socket.into())
}

fn again(e: &std::io::Error) -> bool {
    let kinds = [
        ErrorKind::WouldBlock,
        ErrorKind::TimedOut,
        ErrorKind::Interrupted,
    ];
    kinds.contains(&e.kind())
}

/// Sends until told to stop, frames of so many bytes or all that it can; the segments sent again.
fn send(mut stream: TcpStream, frame: Option<u64>, stop: &AtomicBool) -> Result<u64> {
    stream.set_write_timeout(Some(POLL))?;
    let chunk = vec![0u8; frame.unwrap_or(64 << 10) as usize];
    let mut next = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        if frame.is_some() {
            next += Duration::from_micros(1_000_000 / FRAMES_A_SECOND);
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
        }
        match stream.write(&chunk) {
            Ok(_) => {}
            Err(e) if again(&e) => {}
            // The order to stop may reach the other end first.
            Err(_) if stop.load(Ordering::Relaxed) => break,
            Err(e) => return Err(e).context("a flow was lost"),
        }
    }
    let retransmits = total_retransmits(&stream)?;
    // By reset: nothing of it may be in the queue of the next segment.
    SockRef::from(&stream).set_linger(Some(Duration::ZERO))?;
    Ok(retransmits)
}

fn receive(mut stream: TcpStream, start_ns: u64, stop: &AtomicBool) -> Result<Vec<u64>> {
    stream.set_read_timeout(Some(POLL))?;
    let mut buffer = vec![0u8; 256 << 10];
    let mut buckets = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let n = match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => n,
            Err(e) if again(&e) => continue,
            Err(_) if stop.load(Ordering::Relaxed) => break,
            Err(e) => return Err(e).context("a flow was lost"),
        };
        let t_us = sys::monotonic_ns().saturating_sub(start_ns) / 1_000;
        let bucket = (t_us / BUCKET_US) as usize;
        if buckets.len() <= bucket {
            buckets.resize(bucket + 1, 0);
        }
        buckets[bucket] += n as u64;
    }
    Ok(buckets)
}

fn total_retransmits(stream: &TcpStream) -> Result<u64> {
    // SAFETY: all zeros is a valid value of this structure of integers.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut len = size_of_val(&info) as libc::socklen_t;
    // SAFETY: pointer and length describe `info`.
    let rc = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            std::ptr::from_mut(&mut info).cast(),
            &mut len,
        )
    };
    match rc {
        0 => Ok(info.tcpi_total_retrans.into()),
        _ => Err(std::io::Error::last_os_error()).context("TCP_INFO"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goodput_counts_whole_buckets() {
        let report = CcFlowReport {
            bytes: vec![100, 200, 300, 400],
            retransmits: 0,
        };
        assert_eq!(report.goodput_bps(100_000, 300_000), 500.0 * 8.0 / 0.2);
        assert_eq!(report.goodput_bps(50_000, 250_000), 200.0 * 8.0 / 0.1);
        assert_eq!(report.goodput_bps(400_000, 800_000), 0.0);
    }
}
