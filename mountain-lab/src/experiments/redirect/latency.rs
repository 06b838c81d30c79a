// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab redirect latency`: round trips of single packets at a fixed rate.
//!
//! Sender and echo each have a processor and never sleep: what is measured is the way, not how long
//! a scheduler takes to wake somebody. The flows of [`mountain_lab::workload::game`] do sleep.

use std::io::ErrorKind;
use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{anyhow, ensure, Context, Result};
use mountain_lab::result::RunResult;
use mountain_lab::workload::metrics::{put, Figures};
use mountain_lab::workload::stats::percentile;
use mountain_lab::workload::sys::{monotonic_ns, pin};

use super::contender::{self, Contender};
use super::rig::{RouterRig, CLIENT, FIRST_PORT, TO};
use super::segment::{LOAD_CPU, ROUTER_CPU};
use super::{RedirectArgs, Table};
use crate::driver::{Experiment, Session};
use crate::stopped;

const PPS: u64 = 20_000;
const PAYLOAD: usize = 64;
/// After the last one, for those still under way.
const LINGER_NS: u64 = 20_000_000;
/// Of the packets sent.
const DELIVERED: f64 = 0.99;

pub fn run(args: &RedirectArgs, session: &mut Session) -> Result<Table> {
    let ways = super::chosen(&args.rows, &super::plain_ways())?;
    session.result.note("pps", PPS);
    session.result.note("payload_bytes", PAYLOAD);
    let rig = RouterRig::build("")?;
    let echo = rig.server.enter(|| Ok(UdpSocket::bind(TO)?))?;
    echo.set_nonblocking(true)?;
    let mut rows = LatencyRows {
        rig: &rig,
        echo,
        ways,
        packets: PPS * args.common.quick_or(1, 10) / 4,
    };
    session.interleave(&mut rows)?;
    Ok(Box::new(RunResult::table))
}

struct LatencyRows<'a> {
    rig: &'a RouterRig,
    /// Of the server.
    echo: UdpSocket,
    ways: Vec<Contender>,
    /// Sent in a segment.
    packets: u64,
}

impl Experiment for LatencyRows<'_> {
    /// Round trips, ns.
    type Segment = Vec<u32>;

    fn sides(&self) -> Vec<String> {
        self.ways.iter().map(Contender::to_string).collect()
    }

    fn measure(&mut self, _: &Session, side: usize, repeat: u32) -> Result<Vec<u32>> {
        let way = self.ways[side];
        let _guard = contender::answered(self.rig, way)?;
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let echoing = scope.spawn(|| answer(&self.echo, &stop));
            let asked = self.rig.client.enter(|| {
                pin(0, LOAD_CPU)?;
                let port = FIRST_PORT + repeat as u16;
                let socket = UdpSocket::bind((CLIENT, port)).context("a socket of the client")?;
                socket.connect(way.addressed())?;
                // The first packets find neighbours, flows and caches.
                round_trips(&socket, PPS / 20)?;
                round_trips(&socket, self.packets)
            });
            stop.store(true, Ordering::Relaxed);
            echoing.join().map_err(|_| anyhow!("the echo panicked"))??;
            asked
        })
    }

    fn void(&self, _: usize, rtt: &Vec<u32>) -> Option<String> {
        let (n, sent) = (rtt.len(), self.packets);
        let lost = (n as f64) < sent as f64 * DELIVERED;
        lost.then(|| format!("{n} of {sent} packets came back"))
    }

    fn keep(&mut self, result: &mut RunResult, side: usize, repeat: u32, mut rtt: Vec<u32>) {
        let n = rtt.len() as u64;
        let mut figures = Figures::new();
        for (name, q) in [
            ("rtt_p50_us", 0.5),
            ("rtt_p99_us", 0.99),
            ("rtt_p999_us", 0.999),
        ] {
            let value = percentile(&mut rtt, q).unwrap_or(f64::NAN) / 1e3;
            put(&mut figures, name, "us", value, n);
        }
        result.add(&self.ways[side].to_string(), repeat, &figures);
    }
}

/// Sends everything back until told to stop.
fn answer(socket: &UdpSocket, stop: &AtomicBool) -> Result<()> {
    pin(0, ROUTER_CPU)?;
    let mut buffer = [0; 2_048];
    while !stop.load(Ordering::Relaxed) && !stopped() {
        match socket.recv_from(&mut buffer) {
            Ok((n, from)) => drop(socket.send_to(&buffer[..n], from)),
            Err(e) if e.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(e) if e.kind() == ErrorKind::ConnectionRefused => {}
            Err(e) => return Err(e).context("the echo"),
        }
    }
    Ok(())
}

/// Sends packets at the rate; the round trips of those that came back, ns.
fn round_trips(socket: &UdpSocket, packets: u64) -> Result<Vec<u32>> {
    socket.set_nonblocking(true)?;
    let mut rtt = Vec::with_capacity(packets as usize);
    let mut data = [0u8; PAYLOAD];
    let interval = Duration::from_secs(1).as_nanos() as u64 / PPS;
    let start = monotonic_ns();
    let (mut sent, mut last) = (0u64, start);
    loop {
        let now = monotonic_ns();
        if sent < packets && now >= start + sent * interval {
            data[..8].copy_from_slice(&now.to_ne_bytes());
            socket.send(&data).context("sending")?;
            sent += 1;
            last = now;
        }
        let mut back = [0u8; PAYLOAD];
        match socket.recv(&mut back) {
            Ok(_) => {
                let at = u64::from_ne_bytes(back[..8].try_into().expect("8 bytes"));
                // One of the warm-up that comes late is none of these.
                if at >= start {
                    let ns = monotonic_ns().saturating_sub(at);
                    rtt.push(u32::try_from(ns).unwrap_or(u32::MAX));
                }
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(e) => return Err(e).context("receiving"),
        }
        let all = rtt.len() as u64 == packets;
        if all || (sent == packets && now > last + LINGER_NS) {
            return Ok(rtt);
        }
        ensure!(!stopped(), "interrupted");
    }
}
