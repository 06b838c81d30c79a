// SPDX-License-Identifier: GPL-2.0-or-later
//! Foreign load: UDP at a steady rate, bound to one device, with a sink at the other end.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use serde::Serialize;
use socket2::{Socket, Type};

use super::sys;

/// What to send, from where to where.
#[derive(Debug, Clone)]
pub struct LoadConfig {
    /// Network namespace that sends.
    pub client_ns: PathBuf,
    /// Network namespace that receives.
    pub server_ns: PathBuf,
    /// Source address.
    pub client_addr: IpAddr,
    /// Destination address.
    pub server_addr: IpAddr,
    /// UDP port of the sink.
    pub port: u16,
    /// UDP payload bits per second.
    pub rate_bps: u64,
    /// UDP payload of a packet.
    pub packet_bytes: usize,
    /// Device the sender is bound to.
    pub bind_dev: Option<String>,
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

#[derive(Default)]
struct Counters {
    stop: AtomicBool,
    sent: AtomicU64,
    send_errors: AtomicU64,
    received: AtomicU64,
}

/// A running load. Dropping it ends it.
pub struct RunningLoad {
    counters: Arc<Counters>,
    threads: Vec<JoinHandle<Option<()>>>,
}

/// Starts sink and sender.
pub fn start(cfg: LoadConfig) -> Result<RunningLoad> {
    ensure!(
        cfg.packet_bytes > 0 && cfg.packet_bytes <= 65_000,
        "packet_bytes out of range"
    );
    ensure!(cfg.rate_bps > 0, "rate_bps = 0");
    let mut load = RunningLoad {
        counters: Arc::default(),
        threads: Vec::new(),
    };
    let sink_addr = SocketAddr::new(cfg.server_addr, cfg.port);
    load.threads.push(sys::spawn_in(
        "load-sink",
        &cfg.server_ns,
        move || {
            let sink = UdpSocket::bind(sink_addr).with_context(|| {
                format!("cannot open the sink on UDP port {}", sink_addr.port())
            })?;
            sink.set_read_timeout(Some(Duration::from_millis(50)))?;
            Ok(sink)
        },
        {
            let counters = Arc::clone(&load.counters);
            move |sink: UdpSocket| {
                let mut buf = [0u8; 65_536];
                while !counters.stop.load(Ordering::Relaxed) {
                    if sink.recv(&mut buf).is_ok() {
                        counters.received.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
        },
    )?);
    let netns = cfg.client_ns.clone();
    let counters = Arc::clone(&load.counters);
    let (rate_bps, packet_bytes) = (cfg.rate_bps, cfg.packet_bytes);
    load.threads.push(sys::spawn_in(
        "load-sender",
        &netns,
        move || open(&cfg),
        move |socket| send(&socket, rate_bps, packet_bytes, &counters),
    )?);
    Ok(load)
}

impl RunningLoad {
    /// Stops the load and reports; what is still queued on the path counts as not received.
    pub fn stop(mut self) -> Result<LoadReport> {
        self.counters.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            sys::join(thread)?;
        }
        Ok(LoadReport {
            sent: self.counters.sent.load(Ordering::Relaxed),
            send_errors: self.counters.send_errors.load(Ordering::Relaxed),
            received: self.counters.received.load(Ordering::Relaxed),
        })
    }
}

impl Drop for RunningLoad {
    fn drop(&mut self) {
        self.counters.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn open(cfg: &LoadConfig) -> Result<Socket> {
    let socket = sys::socket_for(cfg.client_addr, Type::DGRAM)?;
    if let Some(device) = &cfg.bind_dev {
        socket
            .bind_device(Some(device.as_bytes()))
            .with_context(|| format!("cannot bind to device {device}"))?;
    }
    socket
        .bind(&SocketAddr::new(cfg.client_addr, 0).into())
        .with_context(|| format!("cannot bind to {}", cfg.client_addr))?;
    socket.connect(&SocketAddr::new(cfg.server_addr, cfg.port).into())?;
    Ok(socket)
}

fn send(socket: &Socket, rate_bps: u64, packet_bytes: usize, counters: &Counters) {
    sys::tighten_timer_slack();
    let payload = vec![0u8; packet_bytes];
    let step_ns = packet_bytes as f64 * 8e9 / rate_bps as f64;
    let mut due_ns = sys::monotonic_ns() as f64;
    while !counters.stop.load(Ordering::Relaxed) {
        let now = sys::monotonic_ns() as f64;
        // After a stall of the sender at most 5 ms are caught up: no burst fills the queue.
        due_ns = due_ns.max(now - 5e6);
        while due_ns <= now {
            let counter = match socket.send(&payload) {
                Ok(_) => &counters.sent,
                Err(_) => &counters.send_errors,
            };
            counter.fetch_add(1, Ordering::Relaxed);
            due_ns += step_ns;
        }
        let pause_ns = (due_ns - sys::monotonic_ns() as f64).clamp(0.0, 50e6);
        std::thread::sleep(Duration::from_nanos(pause_ns as u64));
    }
}
