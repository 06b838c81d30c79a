// SPDX-License-Identifier: GPL-2.0-or-later
//! A far host that accepts every TCP connection after a set delay: a tun device with a thread
//! behind it, as these kernels need not have netem.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use etherparse::{NetSlice, PacketBuilder, SlicedPacket, TcpOptionElement, TransportSlice};

use crate::support::{tun, Ns, Stop, Worker};

/// Stops with the value.
pub struct FarHost {
    delay_us: Arc<AtomicU64>,
    _program: Worker<()>,
}

impl FarHost {
    /// Behind device `far` of the namespace, which gets 10.40.0.1/24.
    pub fn start(ns: &Ns, delay: Duration) -> Self {
        ns.ip("tuntap add dev far mode tun");
        ns.bring_up("far", &["10.40.0.1/24"]);
        let delay_us = Arc::<AtomicU64>::default();
        let shared = Arc::clone(&delay_us);
        let far = Self {
            delay_us,
            _program: Worker::inside(ns, move |stop| answer(&shared, stop)),
        };
        far.set_delay(delay);
        far
    }

    pub fn set_delay(&self, delay: Duration) {
        let us = delay.as_micros() as u64;
        self.delay_us.store(us, Ordering::SeqCst);
    }
}

fn answer(delay_us: &AtomicU64, stop: &Stop) {
    let mut tun = tun::attach("far");
    let mut due: VecDeque<(Instant, Vec<u8>)> = VecDeque::new();
    let mut packet = [0; 2048];
    while !stop.is_set() {
        let wait = match due.front() {
            Some((at, _)) => at.saturating_duration_since(Instant::now()),
            None => Duration::from_millis(50),
        };
        // Whole ms only; the last part is waited for by turning round.
        if tun::readable([&tun], wait.as_millis().min(50) as u8) == [true] {
            let length = tun.read(&mut packet).expect("reads the device");
            if let Some(reply) = accept(&packet[..length]) {
                let delay = Duration::from_micros(delay_us.load(Ordering::SeqCst));
                due.push_back((Instant::now() + delay, reply));
            }
        }
        while due.front().is_some_and(|(at, _)| *at <= Instant::now()) {
            let (_, reply) = due.pop_front().expect("just seen");
            // The device may be going away.
            let _ = tun.write_all(&reply);
        }
    }
}

/// SYN and ACK to a SYN over IPv4, with its time echoed if it has one.
fn accept(packet: &[u8]) -> Option<Vec<u8>> {
    let packet = SlicedPacket::from_ip(packet).ok()?;
    let (Some(NetSlice::Ipv4(ip)), Some(TransportSlice::Tcp(tcp))) = (packet.net, packet.transport)
    else {
        return None;
    };
    if !tcp.syn() || tcp.ack() || tcp.rst() || tcp.fin() {
        return None;
    }
    let time = tcp.options_iterator().flatten().find_map(|o| match o {
        TcpOptionElement::Timestamp(time, _) => Some(TcpOptionElement::Timestamp(1, time)),
        _ => None,
    });
    let (source, destination) = (ip.header().source(), ip.header().destination());
    let reply = PacketBuilder::ipv4(destination, source, 64)
        .tcp(tcp.destination_port(), tcp.source_port(), 7, 60_000)
        .syn()
        .ack(tcp.sequence_number().wrapping_add(1))
        .options(time.as_slice())
        .expect("one option has room");
    let mut bytes = Vec::new();
    reply.write(&mut bytes, &[]).expect("a reply");
    Some(bytes)
}
