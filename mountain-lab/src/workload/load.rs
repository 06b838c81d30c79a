// SPDX-License-Identifier: GPL-2.0-or-later
//! Foreign load: UDP at a steady rate, bound to one device, with a sink at the other end.

use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Serialize;
use socket2::Socket;

use super::dial::Ends;
use super::sys;
use super::worker::Worker;

/// What to send, from where to where.
#[derive(Debug, Clone)]
pub struct LoadConfig {
    /// From where to where.
    pub ends: Ends,
    /// UDP payload bits per second.
    pub rate_bps: u64,
    /// UDP payload of a packet.
    pub packet_bytes: usize,
}

/// What became of the load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct LoadReport {
    /// Packets handed to the kernel.
    pub sent: u64,
    /// Packets the kernel refused.
    pub send_errors: u64,
    /// Packets that reached the sink.
    pub received: u64,
}

/// A running load. Dropping it ends it.
pub struct RunningLoad {
    /// Packets received.
    sink: Worker<u64>,
    /// Packets sent, and refused.
    sender: Worker<(u64, u64)>,
}

/// Starts sink and sender.
pub fn start(cfg: LoadConfig) -> Result<RunningLoad> {
    let (server, netns) = (cfg.ends.server(), cfg.ends.client_ns.clone());
    let open_sink = move || {
        let sink = UdpSocket::bind(server)
            .with_context(|| format!("cannot open the sink on UDP port {}", server.port()))?;
        sink.set_read_timeout(Some(Duration::from_millis(50)))?;
        Ok(sink)
    };
    let sink = Worker::start("load-sink", &cfg.ends.server_ns, open_sink, |sink, stop| {
        let (mut received, mut buf) = (0, [0u8; 65_536]);
        while !stop.load(Ordering::Relaxed) {
            received += u64::from(sink.recv(&mut buf).is_ok());
        }
        received
    })?;
    let (rate_bps, packet_bytes) = (cfg.rate_bps, cfg.packet_bytes);
    let open = move || cfg.ends.dial(0).datagrams(server);
    let sender = Worker::start("load-sender", &netns, open, move |socket, stop| {
        send(&socket, rate_bps, packet_bytes, stop)
    })?;
    Ok(RunningLoad { sink, sender })
}

impl RunningLoad {
    /// Stops the load and reports; what is still queued on the path counts as not received.
    pub fn stop(mut self) -> Result<LoadReport> {
        self.sender.tell();
        self.sink.tell();
        let (sent, send_errors) = self.sender.finish()?;
        Ok(LoadReport {
            sent,
            send_errors,
            received: self.sink.finish()?,
        })
    }
}

/// Packets that the kernel took, and that it refused.
fn send(socket: &Socket, rate_bps: u64, packet_bytes: usize, stop: &AtomicBool) -> (u64, u64) {
    sys::tighten_timer_slack();
    let payload = vec![0u8; packet_bytes];
    let step_ns = packet_bytes as f64 * 8e9 / rate_bps as f64;
    let mut due_ns = sys::monotonic_ns() as f64;
    let (mut sent, mut refused) = (0, 0);
    while !stop.load(Ordering::Relaxed) {
        let now = sys::monotonic_ns() as f64;
        // After a stall of the sender at most 5 ms are caught up: no burst fills the queue.
        due_ns = due_ns.max(now - 5e6);
        while due_ns <= now {
            match socket.send(&payload) {
                Ok(_) => sent += 1,
                Err(_) => refused += 1,
            }
            due_ns += step_ns;
        }
        let pause_ns = (due_ns - sys::monotonic_ns() as f64).clamp(0.0, 50e6);
        std::thread::sleep(Duration::from_nanos(pause_ns as u64));
    }
    (sent, refused)
}
