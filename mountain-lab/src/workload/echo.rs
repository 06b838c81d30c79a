// SPDX-License-Identifier: GPL-2.0-or-later
//! The UDP echo server: answers from the address it was reached at and says on which path the
//! datagram came in and how long it stayed here, so that the round-trip time holds no scheduling of
//! the server.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use mountain::host::socket_option;
use mountain::measure::socket::send_from;
use mountain::measure::timestamp;
use socket2::{Domain, Socket, Type};

use super::dial::Ends;
use super::sys;
use super::worker::Worker;

/// First bytes of every datagram of ours; anything else is not answered.
const MAGIC: u32 = 0x6d74_6e31;
/// Path index of a datagram that came in by none of the given devices.
pub const UNKNOWN_PATH: u8 = 255;
/// Bytes of the header below; no payload may be smaller.
pub const HEADER_BYTES: usize = 36;

/// What a datagram carries; the client writes the first four, the server adds the others.
///
/// Big endian: magic u32, run u32, seq u32, flow u16, path u8, flags u8 (bit 0: reordered),
/// residence_ns u64, arrival_ns u64 (`CLOCK_REALTIME`), reserved u32.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Header {
    /// Random number of one run: datagrams of an earlier one are strays.
    pub run: u32,
    /// Flow within the run.
    pub flow: u16,
    /// Number of the datagram within its flow, from 0.
    pub seq: u32,
    /// Index of the ingress device, or [`UNKNOWN_PATH`].
    pub path: u8,
    /// A higher number of this flow had arrived before.
    pub reordered: bool,
    /// From the kernel's receive timestamp to just before the answer was sent.
    pub residence_ns: u64,
    /// The kernel's receive timestamp (`CLOCK_REALTIME`).
    pub arrival_ns: u64,
}

impl Header {
    /// A client's header: the server's members are empty.
    pub fn request(run: u32, flow: u16, seq: u32) -> Self {
        Header {
            run,
            flow,
            seq,
            path: UNKNOWN_PATH,
            ..Header::default()
        }
    }

    /// Writes the header to the start of `buf`, which holds at least [`HEADER_BYTES`].
    pub fn write(&self, buf: &mut [u8]) {
        buf[0..4].copy_from_slice(&MAGIC.to_be_bytes());
        buf[4..8].copy_from_slice(&self.run.to_be_bytes());
        buf[8..12].copy_from_slice(&self.seq.to_be_bytes());
        buf[12..14].copy_from_slice(&self.flow.to_be_bytes());
        buf[14] = self.path;
        buf[15] = u8::from(self.reordered);
        buf[16..24].copy_from_slice(&self.residence_ns.to_be_bytes());
        buf[24..32].copy_from_slice(&self.arrival_ns.to_be_bytes());
        buf[32..36].fill(0);
    }

    /// Reads a header; `None` if the datagram is too short or not ours.
    pub fn read(buf: &[u8]) -> Option<Self> {
        let buf: &[u8; HEADER_BYTES] = buf.first_chunk()?;
        let word = |at: usize| u32::from_be_bytes(buf[at..at + 4].try_into().unwrap());
        let long = |at: usize| u64::from_be_bytes(buf[at..at + 8].try_into().unwrap());
        (word(0) == MAGIC).then(|| Header {
            run: word(4),
            seq: word(8),
            flow: u16::from_be_bytes([buf[12], buf[13]]),
            path: buf[14],
            reordered: buf[15] & 1 != 0,
            residence_ns: long(16),
            arrival_ns: long(24),
        })
    }
}

/// One datagram that reached the server, answered or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival {
    /// The header with the server's members filled in.
    pub header: Header,
    /// Source address and port it came from.
    pub client_addr: IpAddr,
    pub client_port: u16,
}

/// A running echo server. Dropping it ends the thread.
pub struct EchoServer {
    _worker: Worker<()>,
    arrivals: Receiver<Arrival>,
}

impl EchoServer {
    /// Starts the server at the far one of the ends, on all addresses of the family.
    pub fn start(ends: &Ends) -> Result<Self> {
        let (tx, arrivals) = mpsc::channel();
        let (addr, port, paths) = (ends.server_addr, ends.port, ends.paths.clone());
        let set_up = move || {
            let socket = open(addr, port)
                .with_context(|| format!("cannot open the echo server on UDP port {port}"))?;
            Ok((socket, paths_by_device(&paths)))
        };
        let serve = move |(socket, paths): (Socket, HashMap<u32, u8>), stop: &Arc<AtomicBool>| {
            serve(&socket, &paths, stop, &tx);
        };
        let worker = Worker::start("echo-server", &ends.server_ns, set_up, serve)?;
        Ok(EchoServer {
            _worker: worker,
            arrivals,
        })
    }

    /// The datagrams that arrived since the last call.
    pub fn arrivals(&self) -> impl Iterator<Item = Arrival> + '_ {
        self.arrivals.try_iter()
    }
}

/// Paths by the indices of their devices, which have to be in the calling thread's namespace by now.
pub fn paths_by_device(names: &[String]) -> HashMap<u32, u8> {
    let indices = names.iter().map(|name| sys::device_index(name));
    indices.zip(0..).collect()
}

fn open(addr: IpAddr, port: u16) -> Result<Socket> {
    let any: IpAddr = if addr.is_ipv4() {
        Ipv4Addr::UNSPECIFIED.into()
    } else {
        Ipv6Addr::UNSPECIFIED.into()
    };
    let at = SocketAddr::new(any, port);
    let socket = Socket::new(Domain::for_address(at), Type::DGRAM, None)?;
    if any.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    timestamp::set_details(&socket, any.is_ipv6(), false)?;
    timestamp::set_stamping(&socket, timestamp::RECEIVED)?;
    // A full buffer here would look like loss on the path; FORCE ignores rmem_max (needs root).
    let _ = socket_option::set(&socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, 8 << 20);
    socket.bind(&at.into())?;
    socket.set_read_timeout(Some(Duration::from_millis(50)))?;
    Ok(socket)
}

fn serve(socket: &Socket, paths: &HashMap<u32, u8>, stop: &AtomicBool, arrivals: &Sender<Arrival>) {
    sys::raise_priority();
    let mut highest: HashMap<(u32, u16), u32> = HashMap::new();
    let mut buf = [0u8; 2048];
    while !stop.load(Ordering::Relaxed) {
        let Ok(datagram) = timestamp::receive_blocking(socket, &mut buf) else {
            continue;
        };
        let payload = &mut buf[..datagram.len];
        let (Some(mut header), Some(from), Some(local)) =
            (Header::read(payload), datagram.from, datagram.local)
        else {
            continue;
        };
        let seen = highest
            .entry((header.run, header.flow))
            .or_insert(header.seq);
        header.reordered = header.seq < *seen;
        *seen = header.seq.max(*seen);
        let path = datagram.ifindex.and_then(|index| paths.get(&index));
        header.path = path.copied().unwrap_or(UNKNOWN_PATH);
        header.arrival_ns = datagram.rx_ns.unwrap_or_else(sys::realtime_ns);
        header.residence_ns = sys::realtime_ns().saturating_sub(header.arrival_ns);
        header.write(payload);
        // The routing of this namespace chooses the way back. An answer that cannot be sent (no route
        // back) is a lost packet for the client to count.
        let _ = send_from(socket, payload, from, (local, 0), 0);
        let _ = arrivals.send(Arrival {
            header,
            client_addr: from.ip(),
            client_port: from.port(),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_survives_the_wire_and_strangers_are_refused() {
        let header = Header {
            run: 0xdead_beef,
            flow: 513,
            seq: 70_000,
            path: 1,
            reordered: true,
            residence_ns: 12_345,
            arrival_ns: 1_700_000_000_123_456_789,
        };
        let mut buf = [0u8; 64];
        header.write(&mut buf);
        assert_eq!(Header::read(&buf), Some(header));
        assert_eq!(Header::read(&buf[..HEADER_BYTES - 1]), None, "too short");
        buf[0] ^= 1;
        assert_eq!(Header::read(&buf), None, "wrong magic");
    }
}
