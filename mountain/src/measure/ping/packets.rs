// SPDX-License-Identifier: GPL-2.0-or-later
//! Probes that are packets of their own: ICMP echo, UDP to a `mountain reflect`.
//!
//! They leave from one connected socket, which takes stamps of both ways; an answer is matched to
//! its probe by index and random nonce.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use anyhow::{bail, Context, Result};

use super::super::in_flight::InFlight;
use super::super::socket::{ProbeKind, ProbeSocket};
use super::super::timestamp::{self, Received};
use super::log::ProbeLog;
use super::{PingOptions, Probes, Progress};

/// The kernel switches receive stamps on lazily. Where nothing tells whether it has, probes start so
/// long after.
const STAMPS_READY: Duration = Duration::from_millis(100);
/// Room in the socket for when this process is not scheduled: at least so many bytes.
const BUFFER: usize = 4 << 20;
/// Failures of recvmsg in a row after which the socket is given up.
const MAX_FAILURES: u32 = 64;

/// What sending fails with when the address or device of a socket is gone.
const GONE: [i32; 5] = [
    libc::ENETUNREACH,
    libc::EADDRNOTAVAIL,
    libc::ENODEV,
    libc::ENXIO,
    libc::EINVAL,
];

pub(super) struct PingPackets {
    options: PingOptions,
    address: SocketAddr,
    kind: ProbeKind,
    socket: ProbeSocket,
    /// By the index in the log.
    in_flight: InFlight,
    size: usize,
    /// The device whose clock stamps, if one does.
    hardware: Option<u32>,
    failures: u32,
}

impl PingPackets {
    /// `hardware`: index of the device, which the probes are bound to, that has its stamps on.
    pub(super) fn open(
        options: &PingOptions,
        address: SocketAddr,
        hardware: Option<u32>,
    ) -> Result<Self> {
        let mut kind = match options.udp {
            Some(_) => ProbeKind::Udp,
            None => ProbeKind::IcmpEcho,
        };
        let mut opened = socket(options, address, kind, hardware);
        let errno =
            |r: &io::Result<ProbeSocket>| r.as_ref().err().and_then(io::Error::raw_os_error);
        if options.udp.is_none() && errno(&opened) == Some(libc::EPERM) {
            kind = ProbeKind::Ping;
            opened = socket(options, address, kind, hardware);
            if matches!(errno(&opened), Some(libc::EACCES | libc::EPERM)) {
                bail!(
                    "no permission to send ICMP echo: run as root, give the program the \
                     capability (setcap cap_net_raw+ep), or allow your group with sysctl \
                     net.ipv4.ping_group_range; UDP and TCP probes (--udp PORT, --tcp PORT) need \
                     none of these"
                );
            }
        }
        let socket = opened
            .with_context(|| format!("cannot send to {} ({})", options.target, address.ip()))?;
        Ok(Self {
            options: options.clone(),
            address,
            kind,
            socket,
            in_flight: InFlight::new(0),
            size: options.size,
            hardware,
            failures: 0,
        })
    }

    /// Matches a packet to its probe; the RTT if it is a first answer, ns.
    fn answer(&mut self, log: &mut ProbeLog, packet: &[u8], received: &Received) -> Option<i64> {
        let failed = |why| log.failed(why);
        let (probe, is_first) =
            (self.in_flight).answered(&self.socket, packet, received, failed)?;
        if !is_first {
            log.duplicates += 1;
            return None;
        }
        let trip = probe.stamps.round_trip()?;
        log.answered(probe.seq as usize, trip);
        log.devices.extend(received.ifindex);
        Some(trip.rtt_ns)
    }

    /// Takes in transmit stamps and ICMP errors.
    fn drain(&mut self, log: &mut ProbeLog) {
        self.in_flight.drain(&self.socket, |why| log.failed(why));
    }
}

/// `hardware`: as for [`PingPackets::open`].
fn socket(
    options: &PingOptions,
    address: SocketAddr,
    kind: ProbeKind,
    hardware: Option<u32>,
) -> io::Result<ProbeSocket> {
    let stamping = match hardware {
        Some(_) => timestamp::HARDWARE,
        None => timestamp::KERNEL,
    };
    let device = options.device.as_deref();
    let opened = ProbeSocket::open(kind, device, options.source_address(), address, stamping)?;
    // What the limit does not allow is not essential.
    let _ = opened.socket().set_recv_buffer_size(BUFFER);
    Ok(opened)
}

impl Probes for PingPackets {
    fn wait_ready(&self) {
        timestamp::wait_until_on(STAMPS_READY);
    }

    /// An entry on the error queue wakes it, too.
    fn fd(&self) -> BorrowedFd<'_> {
        self.socket.socket().as_fd()
    }

    /// Sends the next probe. One that cannot be sent counts as lost, as for ping(8): traffic
    /// would not have left either.
    fn send(&mut self, log: &mut ProbeLog, _: &mut Progress) {
        self.drain(log);
        let seq = log.probes.len() as u64;
        let (at, result) = self.in_flight.send(&self.socket, seq, self.size);
        log.sent(at);
        if let Err(error) = result {
            let gone = error.raw_os_error().is_some_and(|e| GONE.contains(&e));
            log.not_sent(error);
            self.drain(log);
            if gone {
                // Another device, or this one anew, may lead there: as for ping(8), whose socket has no address.
                let again = socket(&self.options, self.address, self.kind, self.hardware);
                if let Ok(again) = again {
                    self.socket = again;
                }
            }
            self.in_flight.restart_count();
            let _ = self.socket.restart_count();
        }
    }

    /// Takes in what has arrived.
    fn receive(&mut self, log: &mut ProbeLog, progress: &mut Progress) {
        self.drain(log);
        // Room for an IPv4 header with options, and for what a box on the way may have added: of a packet that is cut the
        // checksum is wrong.
        let mut buffer = vec![0; self.size + 2048];
        loop {
            match timestamp::receive(&self.socket, &mut buffer) {
                Ok(mut received) => {
                    self.failures = 0;
                    if received.ifindex != self.hardware {
                        // By another device means by another clock.
                        received.rx_hw_ns = None;
                    }
                    if let Some(ns) = self.answer(log, &buffer[..received.len], &received) {
                        progress(log.probes.len(), Some(ns as f64 / 1e3));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // A pending ICMP error: reading it cleared it, its text is on the error queue.
                Err(error) => {
                    self.drain(log);
                    self.failures += 1;
                    if self.failures >= MAX_FAILURES {
                        log.last_error = Some(error.to_string());
                        return;
                    }
                }
            }
        }
    }

    /// Puts in the round trips by the device's clock, whose transmit stamps may come later than
    /// the answers.
    fn finish(&mut self, log: &mut ProbeLog) {
        self.drain(log);
        for probe in self.in_flight.probes() {
            if let Some(answer) = &mut log.probes[probe.seq as usize].answer {
                answer.hardware_ns = probe.stamps.round_trip().and_then(|trip| trip.hardware_ns);
            }
        }
    }
}
