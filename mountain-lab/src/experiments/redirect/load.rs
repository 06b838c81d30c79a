// SPDX-License-Identifier: GPL-2.0-or-later
//! Packets for the router: by sockets of the client, or live frames.
//!
//! The lab's other UDP load ([`mountain_lab::workload::load`]) sleeps between packets and has one
//! flow. This one has a thousand flows, sends in batches and spins: at 100,000 packets a second a sleep is
//! longer than the pause between two batches.

use std::net::{SocketAddrV4, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::Duration;
use std::{io, ptr};

use anyhow::{ensure, Context, Result};
use mountain_lab::workload::sys::monotonic_ns;
use rand::seq::SliceRandom;
use rand::SeedableRng;
use rand_pcg::Pcg64Mcg;

use super::rig::{CLIENT, FIRST_PORT};
use crate::stopped;

/// Flows of the client.
pub const FLOWS: u16 = 1_024;
/// Below saturation of every row, packets per second.
pub const LIVE_PPS: u32 = 200_000;
pub const SOCKET_PPS: u32 = 100_000;
/// Packets of one socket in one sendmmsg(2).
const BURST: usize = 4;

/// Where packets come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LoadSource {
    /// BPF_PROG_RUN with live frames: as from a network card, before the kernel has made a packet.
    Live,
    /// UDP sockets: as from a container on this host.
    Socket,
}

/// What is offered in one segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OfferedLoad {
    pub source: LoadSource,
    /// Of UDP, bytes.
    pub payload: usize,
    /// Packets per second; `None`: as fast as the source goes.
    pub pps: Option<u32>,
    /// Of one call; a segment is as many calls as it takes to be `least` long.
    pub packets: u32,
    pub least: Duration,
}

impl OfferedLoad {
    /// Of half a second at least; much shorter with `quick`.
    pub fn new(source: LoadSource, payload: usize, pps: Option<u32>, quick: bool) -> Self {
        // A call of the generator is at least so long that its set-up does not matter.
        let (packets, millis) = if quick { (16_384, 50) } else { (131_072, 500) };
        OfferedLoad {
            source,
            payload,
            pps,
            packets,
            least: Duration::from_millis(millis),
        }
    }

    /// The one by which backends are judged: small packets as from a card, the same to all.
    pub fn judged(quick: bool) -> Self {
        OfferedLoad::new(LoadSource::Live, 64, Some(LIVE_PPS), quick)
    }

    /// Part of names of metrics.
    pub fn name(&self) -> String {
        let source = crate::name_of(&self.source);
        let regime = if self.pps.is_some() { "fixed" } else { "full" };
        format!("{source}_{}_{regime}", self.payload)
    }
}

/// Ports of the client's flows, in an order that helps no cache.
pub fn ports(seed: u64) -> Vec<u16> {
    let mut ports: Vec<u16> = (FIRST_PORT..FIRST_PORT + FLOWS).collect();
    ports.shuffle(&mut Pcg64Mcg::seed_from_u64(seed));
    ports
}

/// A socket for each flow.
pub struct LoadSenders {
    sockets: Vec<UdpSocket>,
}

impl LoadSenders {
    /// Call in the client's namespace.
    pub fn new(seed: u64) -> Result<Self> {
        let bind = |port| UdpSocket::bind((CLIENT, port)).context("a socket of the client");
        let sockets = ports(seed).into_iter().map(bind).collect::<Result<_>>()?;
        Ok(LoadSenders { sockets })
    }

    pub fn connect(&self, to: SocketAddrV4) -> Result<()> {
        Ok(self.sockets.iter().try_for_each(|s| s.connect(to))?)
    }

    /// Sends so many packets; returns how many the kernel took.
    pub fn send(&self, packets: u32, payload: usize, pps: Option<u32>) -> Result<u64> {
        let mut data = vec![0u8; payload];
        let mut piece = libc::iovec {
            iov_base: data.as_mut_ptr().cast(),
            iov_len: payload,
        };
        // SAFETY: all-zero is a valid mmsghdr: no name, no control data.
        let mut messages: [libc::mmsghdr; BURST] = unsafe { std::mem::zeroed() };
        for message in &mut messages {
            message.msg_hdr.msg_iov = ptr::from_mut(&mut piece);
            message.msg_hdr.msg_iovlen = 1;
        }
        let interval = pps.map_or(0, |pps| BURST as u64 * 1_000_000_000 / u64::from(pps));
        let (mut next, mut sent) = (monotonic_ns(), 0u64);
        let mut sockets = self.sockets.iter().cycle();
        while sent < u64::from(packets) {
            // Late: no burst to catch up, which would be another load.
            next = (next + interval).max(monotonic_ns().saturating_sub(8 * interval));
            while monotonic_ns() < next {
                std::hint::spin_loop();
            }
            let socket = sockets.next().context("no sockets")?;
            let n = BURST.min((u64::from(packets) - sent) as usize);
            // SAFETY: `messages`, the piece and the data that they point to outlive the call.
            let rc =
                unsafe { libc::sendmmsg(socket.as_raw_fd(), messages.as_mut_ptr(), n as u32, 0) };
            match rc {
                n if n > 0 => sent += n as u64,
                _ => {
                    let error = io::Error::last_os_error();
                    // A full ring may be told; that is the load's own limit.
                    let full = [libc::ENOBUFS, libc::EAGAIN];
                    let is_full = error.raw_os_error().is_some_and(|e| full.contains(&e));
                    ensure!(is_full, "sendmmsg: {error}");
                }
            }
            ensure!(!stopped(), "interrupted");
        }
        Ok(sent)
    }
}
