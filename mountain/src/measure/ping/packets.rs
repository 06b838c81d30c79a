// SPDX-License-Identifier: GPL-2.0-or-later
//! Probes that are packets of their own: ICMP echo, UDP to a `mountain reflect`.
//!
//! They leave from one connected socket, which takes stamps of both ways; an answer is matched to
//! its probe by index and random nonce.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};

use super::super::socket::{ProbeEvent, ProbeKind, ProbeSocket, SendStamps};
use super::super::timestamp::{self, Received, Stamping};
use super::super::timing::ProbeStamps;
use super::super::wire::{self, ProbeId};
use super::log::{LoggedAnswer, ProbeLog};
use super::{PingOptions, Probes, Progress};

/// The kernel switches receive stamps on lazily. Where nothing tells whether it has, probes start so
/// long after.
const STAMPS_READY: Duration = Duration::from_millis(100);
/// Room in the socket for when this process is not scheduled: at least so many bytes.
const BUFFER: usize = 4 << 20;
/// Failures of recvmsg in a row after which the socket is given up.
const MAX_FAILURES: u32 = 64;

/// What is known of a probe beside what the log has, ns.
struct Sent {
    nonce: u64,
    stamps: SendStamps,
    /// When the answer came, by the device's clock.
    rx_hw_ns: Option<u64>,
    /// T2 and T3 by the reflector's clock.
    reflected: Option<(u64, u64)>,
}

pub(super) struct PingPackets {
    socket: ProbeSocket,
    size: usize,
    /// The device whose clock stamps, if one does.
    hardware: Option<u32>,
    sent: Vec<Sent>,
    /// Of the reflector's last reply.
    cookie: u32,
    failures: u32,
}

impl PingPackets {
    /// `hardware`: index of the device, which the probes are bound to, that has its stamps on.
    pub(super) fn open(
        options: &PingOptions,
        address: SocketAddr,
        hardware: Option<u32>,
    ) -> Result<Self> {
        let stamping = Stamping {
            hardware: hardware.is_some(),
            ..Stamping::KERNEL
        };
        let open = |kind| {
            let device = options.device.as_deref();
            ProbeSocket::open(kind, device, options.source_address(), address, stamping, 0)
        };
        let kind = match options.udp {
            Some(_) => ProbeKind::Udp,
            None => ProbeKind::IcmpEcho {
                ident: rand::random(),
            },
        };
        let mut opened = open(kind);
        let errno =
            |r: &io::Result<ProbeSocket>| r.as_ref().err().and_then(io::Error::raw_os_error);
        if options.udp.is_none() && errno(&opened) == Some(libc::EPERM) {
            opened = open(ProbeKind::Ping);
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
        // What the limit does not allow is not essential.
        let _ = socket.socket().set_recv_buffer_size(BUFFER);
        Ok(Self {
            socket,
            size: options.size,
            hardware,
            sent: Vec::new(),
            cookie: 0,
            failures: 0,
        })
    }

    /// Matches a packet to its probe; the RTT if it is a first answer, ns.
    fn answer(
        &mut self,
        log: &mut ProbeLog,
        packet: &[u8],
        received: &Received,
        now: (Instant, u64),
    ) -> Option<i64> {
        let (id, reflected) = self.socket.answered(packet, received)?;
        // The transmit stamp was queued before the packet left, so it is there by now.
        self.drain_errors(log);
        let at = usize::try_from(id.index).ok()?;
        let probe = self.sent.get_mut(at).filter(|p| p.nonce == id.nonce)?;
        if log.probes[at].answer.is_some() {
            log.duplicates += 1;
            return None;
        }
        if reflected.is_some() {
            self.cookie = wire::cookie(packet);
        }
        // By another device means by another clock.
        probe.rx_hw_ns = (received.rx_hw_ns).filter(|_| received.ifindex == self.hardware);
        let sent = log.probes[at].sent;
        let times = ProbeStamps::of(sent, probe.stamps, received, reflected, now);
        probe.reflected = times.reflected;
        let trip = times.round_trip();
        let answer = LoggedAnswer {
            rtt_ns: trip.rtt_ns,
            user_ns: times.user_ns,
            kernel_stamps: trip.kernel_stamps,
            hardware_ns: None,
            directions: trip.directions,
        };
        log.answered(at, answer);
        log.devices.extend(received.ifindex);
        Some(trip.rtt_ns)
    }

    /// Takes in transmit stamps and ICMP errors.
    fn drain_errors(&mut self, log: &mut ProbeLog) {
        while let Some(event) = self.socket.event(0) {
            match event {
                ProbeEvent::Stamped(index, stamps) => {
                    if let Some(probe) = self.sent.get_mut(index) {
                        probe.stamps.add(stamps);
                    }
                }
                ProbeEvent::Failed(why) => log.failed(why),
            }
        }
    }
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
        self.drain_errors(log);
        let id = ProbeId {
            nonce: rand::random(),
            index: self.sent.len() as u64,
        };
        let (at, stamps, result) = self.socket.send(id, self.size, self.cookie);
        log.sent(at);
        self.sent.push(Sent {
            nonce: id.nonce,
            stamps,
            rx_hw_ns: None,
            reflected: None,
        });
        if let Err(error) = result {
            log.not_sent(error);
            self.drain_errors(log);
            let _ = self.socket.restart_count(self.sent.len() as u64);
        }
    }

    /// Takes in what has arrived.
    fn receive(&mut self, log: &mut ProbeLog, progress: &mut Progress) {
        self.drain_errors(log);
        // Room for an IPv4 header with options.
        let mut buffer = vec![0; self.size + 128];
        loop {
            match timestamp::receive(&self.socket, &mut buffer) {
                Ok(received) => {
                    self.failures = 0;
                    let now = (Instant::now(), timestamp::realtime_ns());
                    let packet = &buffer[..received.len];
                    if let Some(ns) = self.answer(log, packet, &received, now) {
                        progress(log.probes.len(), Some(ns as f64 / 1e3));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // A pending ICMP error: reading it cleared it, its text is on the error queue.
                Err(error) => {
                    self.drain_errors(log);
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
    fn finish(&mut self, log: &mut ProbeLog) -> (usize, usize) {
        self.drain_errors(log);
        for (sent, probe) in self.sent.iter().zip(&mut log.probes) {
            if let Some(answer) = &mut probe.answer {
                answer.hardware_ns = sent.by_hardware(answer.user_ns);
            }
        }
        (0, 0)
    }
}

impl Sent {
    /// The round trip by the device's clock, if it stamped both ways and was not set meanwhile.
    fn by_hardware(&self, user_ns: i64) -> Option<i64> {
        let times = ProbeStamps {
            user_ns,
            t1_user: 0,
            sched: None,
            t1: Some(self.stamps.tx_hw_ns?),
            t4: Some(self.rx_hw_ns?),
            t4_user: 0,
            reflected: self.reflected,
        };
        let trip = times.round_trip();
        trip.kernel_stamps.then_some(trip.rtt_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_s_clock_counts_only_on_both_ways_and_when_plausible() {
        let sent = |tx_hw_ns, rx_hw_ns, reflected| Sent {
            nonce: 0,
            stamps: SendStamps {
                tx_hw_ns,
                ..SendStamps::default()
            },
            rx_hw_ns,
            reflected,
        };
        let trip = |tx, rx, reflected| sent(tx, rx, reflected).by_hardware(2_000_000);
        assert_eq!(trip(Some(7_000), Some(907_000), None), Some(900_000));
        // Less the time inside the reflector, by a clock of its own.
        let inside = Some((5, 100_005));
        assert_eq!(trip(Some(7_000), Some(907_000), inside), Some(800_000));
        assert_eq!(trip(None, Some(907_000), None), None);
        assert_eq!(trip(Some(7_000), None, None), None);
        assert_eq!(trip(Some(7_000), Some(6_000), None), None, "set back");
        assert_eq!(
            trip(Some(7_000), Some(9_000_000_000), None),
            None,
            "set ahead"
        );
    }
}
