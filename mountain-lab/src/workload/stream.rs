// SPDX-License-Identifier: GPL-2.0-or-later
//! TCP streams: how every workload over TCP connects, sends and receives.
//!
//! Both ends poll for the order to stop. What a stream meets after that order is no error: whichever
//! end stops first resets the connection under the other one.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use anyhow::{anyhow, Context, Result};
use mountain::host::socket_option;
use socket2::{Domain, SockRef, Socket, Type};

use super::sys;

/// Payload is counted in buckets of this length.
pub const BUCKET_NS: u64 = 100_000_000;
/// How long a blocked read or write takes to notice the order to stop.
const POLL: Duration = Duration::from_millis(50);
/// A [`Saturated`] connection that stands still for so long is broken.
const STALL: Duration = Duration::from_secs(5);
/// What a [`Saturated`] connection writes and reads at once, bytes.
const CHUNK: usize = 256 << 10;

/// A listening socket; connections wait until they are accepted.
pub fn listen(at: SocketAddr) -> Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(at), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    let bound = socket.bind(&at.into()).and_then(|()| socket.listen(1024));
    bound.with_context(|| format!("cannot listen on TCP port {}", at.port()))?;
    Ok(socket.into())
}

/// Has reads and writes of a stream notice the order to stop. Accepted streams inherit neither the
/// non-blocking mode nor the time-outs.
pub fn poll_for_stop(stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(POLL))?;
    stream.set_write_timeout(Some(POLL))
}

/// Has the end of the stream be a reset: nothing of its send buffer is left to drain into what is
/// measured next.
pub fn end_by_reset(stream: &TcpStream) -> io::Result<()> {
    SockRef::from(stream).set_linger(Some(Duration::ZERO))
}

/// What a read or write did; `None`: it timed out or failed after the order to stop.
fn outcome(result: io::Result<usize>, stop: &AtomicBool) -> io::Result<Option<usize>> {
    let error = match result {
        Ok(0) => io::Error::new(ErrorKind::UnexpectedEof, "closed by the other end"),
        Ok(n) => return Ok(Some(n)),
        Err(e) => match e.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => {
                return Ok(None)
            }
            _ => e,
        },
    };
    match stop.load(Ordering::Relaxed) {
        true => Ok(None),
        false => Err(error),
    }
}

/// Writes so many bytes, or until it is told to stop. `usize::MAX`: as fast as it goes.
pub fn send(stream: &mut TcpStream, mut bytes: usize, stop: &AtomicBool) -> io::Result<()> {
    static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
    while bytes > 0 && !stop.load(Ordering::Relaxed) {
        let written = stream.write(&ZEROS[..bytes.min(ZEROS.len())]);
        bytes -= outcome(written, stop)?.unwrap_or(0);
    }
    Ok(())
}

/// Writes at a rate, `per_s` times a second, until it is told to stop. After a stall nothing is caught up.
pub fn send_paced(
    stream: &mut TcpStream,
    rate_bps: u64,
    per_s: u64,
    stop: &AtomicBool,
) -> io::Result<()> {
    let tick_ns = 1_000_000_000 / per_s;
    let mut due_ns = sys::monotonic_ns();
    // Bits times ticks per second, carried over so that no rate is rounded away.
    let mut credit = 0u64;
    while !stop.load(Ordering::Relaxed) {
        credit += rate_bps;
        let chunk = credit / (8 * per_s);
        credit %= 8 * per_s;
        send(stream, chunk as usize, stop)?;
        due_ns = (due_ns + tick_ns).max(sys::monotonic_ns().saturating_sub(tick_ns));
        sys::sleep_until(due_ns);
    }
    Ok(())
}

/// Reads until it is told to stop. `arrived` is called with each piece and answers it if it wants to.
pub fn receive(
    stream: &mut TcpStream,
    stop: &AtomicBool,
    mut arrived: impl FnMut(&mut TcpStream, &[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut buffer = vec![0u8; 256 << 10];
    while !stop.load(Ordering::Relaxed) {
        if let Some(n) = outcome(stream.read(&mut buffer), stop)? {
            arrived(stream, &buffer[..n])?;
        }
    }
    Ok(())
}

/// Reads so many bytes, or until it is told to stop.
pub fn receive_exactly(
    stream: &mut TcpStream,
    mut bytes: usize,
    stop: &AtomicBool,
) -> io::Result<()> {
    let mut buffer = [0u8; 16 << 10];
    while bytes > 0 && !stop.load(Ordering::Relaxed) {
        let most = bytes.min(buffer.len());
        bytes -= outcome(stream.read(&mut buffer[..most]), stop)?.unwrap_or(0);
    }
    Ok(())
}

/// Payload over time, in buckets of [`BUCKET_NS`].
#[derive(Clone, Debug)]
pub struct Buckets {
    start_ns: u64,
    /// From the start on.
    pub bytes: Vec<u64>,
}

impl Buckets {
    /// Counts from `start_ns` (CLOCK_MONOTONIC).
    pub fn new(start_ns: u64) -> Self {
        let bytes = Vec::new();
        Buckets { start_ns, bytes }
    }

    /// So many bytes have arrived now.
    pub fn add(&mut self, bytes: usize) {
        let bucket = (sys::monotonic_ns().saturating_sub(self.start_ns) / BUCKET_NS) as usize;
        if self.bytes.len() <= bucket {
            self.bytes.resize(bucket + 1, 0);
        }
        self.bytes[bucket] += bytes as u64;
    }
}

/// Goodput in whole buckets of [`BUCKET_NS`] between two times, ns since the first began, bit/s. NaN without any.
pub fn goodput_bps(buckets: &[u64], from_ns: u64, until_ns: u64) -> f64 {
    let (first, last) = (from_ns.div_ceil(BUCKET_NS), until_ns / BUCKET_NS);
    if last <= first {
        return f64::NAN;
    }
    let whole = buckets.iter().take(last as usize).skip(first as usize);
    whole.sum::<u64>() as f64 * 8e9 / ((last - first) * BUCKET_NS) as f64
}

/// Segments that a stream has sent again.
pub fn retransmits(stream: &TcpStream) -> Result<u64> {
    // SAFETY: all zeros is a valid value of this structure of integers.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    // SAFETY: it may hold any bytes.
    unsafe { socket_option::get(stream, libc::IPPROTO_TCP, libc::TCP_INFO, &mut info) }
        .context("TCP_INFO")?;
    Ok(info.tcpi_total_retrans.into())
}

/// A saturating connection by which processor time is measured. Its ends block instead of polling
/// and write large chunks, so that the program itself costs as little as it can. Sender and receiver
/// have processors of their own where there are two: the scheduler's choice would be the larger part
/// of the spread.
pub struct Saturated {
    received: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    ends: [JoinHandle<Result<Duration>>; 2],
}

impl Saturated {
    /// Starts to send from one end of a connection to the other.
    pub fn start(mut out: TcpStream, mut inward: TcpStream) -> Result<Self> {
        inward.set_read_timeout(Some(STALL))?;
        out.set_write_timeout(Some(STALL))?;
        let (received, stop) = <(Arc<AtomicU64>, Arc<AtomicBool>)>::default();
        let counter = received.clone();
        let reader = Builder::new().spawn(move || {
            let _ = sys::pin(0, 1);
            let mut buffer = vec![0; CHUNK];
            loop {
                let read = inward.read(&mut buffer);
                match read.context("the receiver saw nothing for 5 s")? {
                    0 => return sys::thread_time(),
                    n => counter.fetch_add(n as u64, Ordering::Relaxed),
                };
            }
        })?;
        let end = stop.clone();
        let writer = Builder::new().spawn(move || {
            let _ = sys::pin(0, 0);
            let buffer = vec![0; CHUNK];
            while !end.load(Ordering::Relaxed) {
                let written = out.write_all(&buffer);
                written.context("the sender stalled for 5 s")?;
            }
            out.shutdown(std::net::Shutdown::Write)?;
            sys::thread_time()
        })?;
        Ok(Saturated {
            received,
            stop,
            ends: [writer, reader],
        })
    }

    /// Bytes that have arrived so far.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Ends it: all bytes that arrived, and the CPU time of both ends' threads.
    pub fn finish(self) -> Result<(u64, Duration)> {
        self.stop.store(true, Ordering::Relaxed);
        let mut cpu = Duration::ZERO;
        for end in self.ends {
            let panicked = |_| anyhow!("a thread of the connection panicked");
            cpu += end.join().map_err(panicked)??;
        }
        Ok((self.received.load(Ordering::Relaxed), cpu))
    }
}
