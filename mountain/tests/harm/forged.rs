// SPDX-License-Identifier: GPL-2.0-or-later
//! A flood of packets that were made beforehand, by a raw socket: sources are whatever they say.

use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, Socket, Type};

use crate::support::{wait_until, Ns, Worker};

/// Packets of one system call.
const BATCH: usize = 64;
/// For a flood to begin, on any machine.
const LIMIT: Duration = Duration::from_secs(20);

/// Goes on until the value is dropped.
pub struct Flood {
    sent: Arc<AtomicU64>,
    _sender: Worker<()>,
}

impl Flood {
    /// Sends these IPv4 packets from a namespace, in turn, as fast as it goes. Returns once there is a flood.
    pub fn start(ns: &Ns, to: SocketAddr, packets: Vec<Vec<u8>>) -> Self {
        Self::at_most(ns, to, packets, f64::INFINITY)
    }

    /// The same at a rate, packets a second, or what the sender reaches of it.
    pub fn at_most(ns: &Ns, to: SocketAddr, mut packets: Vec<Vec<u8>>, rate: f64) -> Self {
        packets.truncate(packets.len() / BATCH * BATCH);
        let sent = Arc::<AtomicU64>::default();
        let counted = Arc::clone(&sent);
        let sender = Worker::inside(ns, move |stop| {
            let raw = Protocol::from(libc::IPPROTO_RAW);
            let socket = Socket::new(Domain::IPV4, Type::RAW, Some(raw)).unwrap();
            socket.connect(&to.into()).unwrap();
            let mut parts: Vec<_> = packets
                .iter_mut()
                .map(|packet| libc::iovec {
                    iov_base: packet.as_mut_ptr().cast(),
                    iov_len: packet.len(),
                })
                .collect();
            let mut messages: Vec<_> = parts
                .iter_mut()
                .map(|part| {
                    // SAFETY: plain numbers and pointers, for which 0 means none.
                    let mut message: libc::mmsghdr = unsafe { std::mem::zeroed() };
                    message.msg_hdr.msg_iov = part;
                    message.msg_hdr.msg_iovlen = 1;
                    message
                })
                .collect();
            let mut due = Instant::now();
            while !stop.is_set() {
                for batch in messages.chunks_mut(BATCH) {
                    // SAFETY: the messages, and the packets that they point to, outlive the call.
                    let n = unsafe {
                        let (first, count) = (batch.as_mut_ptr(), BATCH as libc::c_uint);
                        libc::sendmmsg(socket.as_raw_fd(), first, count, 0)
                    };
                    counted.fetch_add(n.max(0) as u64, Relaxed);
                    // What was missed is not made up for by a burst.
                    due = Instant::now().max(due + Duration::from_secs_f64(BATCH as f64 / rate));
                    thread::sleep(due.saturating_duration_since(Instant::now()));
                    if stop.is_set() {
                        break;
                    }
                }
            }
        });
        let flood = Self {
            sent,
            _sender: sender,
        };
        wait_until("there is a flood", LIMIT, || flood.sent() >= 20_000);
        flood
    }

    /// Packets so far.
    pub fn sent(&self) -> u64 {
        self.sent.load(Relaxed)
    }
}
