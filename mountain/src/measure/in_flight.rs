// SPDX-License-Identifier: GPL-2.0-or-later
//! Probes that are on their way: when each was sent, and which of them a packet answers.

use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};

use super::socket::ProbeSocket;
use super::timestamp::{self, ErrorEvent, Received};
use super::timing::{Arrival, ProbeStamps};
use super::wire::{self, ProbeId};

/// Most probes of one path that are waited for at a time.
const MAX_WAITING: usize = 16_384;
/// Entries of the error queue that are read at a time: anybody may send ICMP errors, and as fast as they are read. A
/// probe makes two, and each probe and answer has them read.
const MAX_DRAINED: usize = 128;

/// A probe that has left.
pub(super) struct SentProbe {
    /// As given to [`InFlight::send`].
    pub(super) seq: u64,
    nonce: u64,
    pub(super) stamps: ProbeStamps,
}

/// The probes to one target, in the order sent. They outlast the socket, which may have to be opened again.
pub(super) struct InFlight {
    /// Entry n has the index `front + n`.
    probes: VecDeque<SentProbe>,
    front: u64,
    /// Index of the probe that the kernel's packet number 0 stands for.
    first: u64,
    /// Of the reflector's last reply.
    cookie: u32,
}

impl InFlight {
    /// The first probe will have the index `front`.
    pub(super) fn new(front: u64) -> Self {
        Self {
            probes: VecDeque::new(),
            front,
            first: front,
            cookie: 0,
        }
    }

    fn next_index(&self) -> u64 {
        self.front + self.probes.len() as u64
    }

    /// From the next probe on the kernel counts packets anew: on a new socket, and after
    /// [`ProbeSocket::restart_count`].
    pub(super) fn restart_count(&mut self) {
        self.first = self.next_index();
    }

    /// Sends a probe of `size` bytes of payload, which is `seq` to the caller. Also returns when, just
    /// before the system call.
    pub(super) fn send(
        &mut self,
        socket: &ProbeSocket,
        seq: u64,
        size: usize,
    ) -> (Instant, io::Result<()>) {
        let id = ProbeId {
            nonce: rand::random(),
            index: self.next_index(),
        };
        let (stamps, sent) = socket.send(id, size, self.cookie);
        let probe = SentProbe {
            seq,
            nonce: id.nonce,
            stamps,
        };
        (stamps.sent, sent.map(|_| self.probes.push_back(probe)))
    }

    /// Forgets probes that were sent longer ago than `timeout`, or are too many.
    pub(super) fn expire(&mut self, timeout: Duration) {
        while self
            .probes
            .front()
            .is_some_and(|p| self.probes.len() >= MAX_WAITING || p.stamps.sent.elapsed() > timeout)
        {
            self.probes.pop_front();
            self.front += 1;
        }
    }

    /// Takes in transmit stamps, [`MAX_DRAINED`] at most. `failed` is told of ICMP errors and local ones, in words.
    pub(super) fn drain(&mut self, socket: &ProbeSocket, mut failed: impl FnMut(String)) {
        for _ in 0..MAX_DRAINED {
            let Ok(Some(event)) = timestamp::receive_error(socket) else {
                return;
            };
            match event {
                ErrorEvent::Sent {
                    id,
                    tx_ns,
                    tx_hw_ns,
                } => {
                    if let Some(probe) = self.by_number(id) {
                        probe.stamps.transmitted(tx_ns, tx_hw_ns);
                    }
                }
                ErrorEvent::Scheduled { id, tx_ns } => {
                    if let Some(probe) = self.by_number(id) {
                        probe.stamps.scheduled(tx_ns);
                    }
                }
                ErrorEvent::Unreachable { errno, from } => {
                    let what = io::Error::from_raw_os_error(errno);
                    failed(match from {
                        Some(from) => format!("{from} says: {what}"),
                        None => what.to_string(),
                    });
                }
                ErrorEvent::Other => {}
            }
        }
    }

    /// The probe that is the kernel's packet of this number. The number wraps at 2^32: of the indices that
    /// end alike, it is the one that is here.
    fn by_number(&mut self, id: u32) -> Option<&mut SentProbe> {
        let index = (self.first as u32).wrapping_add(id);
        let at = index.wrapping_sub(self.front as u32);
        self.probes.get_mut(at as usize)
    }

    /// The probe that a packet answers, which has just been read, and whether the packet is the first to do
    /// so. `failed`: see [`InFlight::drain`].
    pub(super) fn answered(
        &mut self,
        socket: &ProbeSocket,
        packet: &[u8],
        received: &Received,
        failed: impl FnMut(String),
    ) -> Option<(&SentProbe, bool)> {
        let (read, read_ns) = (Instant::now(), timestamp::realtime_ns());
        let (id, reflected) = socket.answered(packet, received)?;
        // The transmit stamp was queued before the packet left, so it is there by now.
        self.drain(socket, failed);
        let at = usize::try_from(id.index.checked_sub(self.front)?).ok()?;
        let probe = self.probes.get_mut(at).filter(|p| p.nonce == id.nonce)?;
        let is_first = probe.stamps.arrival.is_none();
        if is_first {
            if reflected.is_some() {
                self.cookie = wire::cookie(packet);
            }
            probe.stamps.arrival = Some(Arrival {
                read,
                read_ns,
                rx_ns: received.rx_ns,
                rx_hw_ns: received.rx_hw_ns,
                reflected,
            });
        }
        Some((probe, is_first))
    }

    /// Those that are not forgotten.
    pub(super) fn probes(&self) -> impl Iterator<Item = &SentProbe> {
        self.probes.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::super::socket::ProbeKind;
    use super::*;

    #[test]
    fn a_full_error_queue_is_not_read_in_one_go() {
        let target = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let (at, stamping) = (target.local_addr().unwrap(), timestamp::KERNEL);
        let socket = ProbeSocket::open(ProbeKind::Udp, None, None, at, stamping).unwrap();
        let mut in_flight = InFlight::new(0);
        // Each has two stamps, and there is room for some 200.
        for seq in 0..MAX_DRAINED as u64 {
            in_flight.send(&socket, seq, wire::PROBE_LEN).1.unwrap();
        }
        let any_left = || timestamp::receive_error(&socket).unwrap().is_some();
        in_flight.drain(&socket, |why| panic!("{why}"));
        assert!(any_left(), "as much as anybody can send was read");
        in_flight.drain(&socket, |why| panic!("{why}"));
        assert!(!any_left());
    }

    #[test]
    fn packet_numbers_find_their_probe_across_the_wrap() {
        let target = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let (at, stamping) = (target.local_addr().unwrap(), timestamp::BOTH_WAYS);
        let socket = ProbeSocket::open(ProbeKind::Udp, None, None, at, stamping).unwrap();
        let mut in_flight = InFlight::new(u64::from(u32::MAX) - 1);
        for seq in 0..4 {
            in_flight.send(&socket, seq, wire::PROBE_LEN).1.unwrap();
        }
        // All but the first are waited for.
        in_flight.probes.pop_front();
        in_flight.front += 1;
        let end = Instant::now() + Duration::from_secs(10);
        while !in_flight.probes().all(|p| p.stamps.tx_ns.is_some()) {
            assert!(Instant::now() < end, "not all were stamped");
            in_flight.drain(&socket, |why| panic!("{why}"));
        }
        // Each has left before the next was sent.
        let times = in_flight
            .probes()
            .map(|p| (p.stamps.sent_ns, p.stamps.tx_ns.unwrap()));
        let times: Vec<u64> = times.flat_map(|(sent, tx)| [sent, tx]).collect();
        assert!(times.is_sorted(), "{times:?}");
    }
}
