// SPDX-License-Identifier: GPL-2.0-or-later
//! Sees on which device each TCP segment of a server's port comes in: the kernel does not tell the
//! ingress device of stream data.
//!
//! One packet socket over all devices keeps the order of arrival across them. A classic BPF filter
//! passes the headers of TCP segments to the port and nothing else.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use etherparse::{LaxNetSlice, LaxSlicedPacket, TcpOptionElement, TransportSlice};
use mountain::host::socket_option;
use nix::sys::socket::{recvmsg, ControlMessageOwned, MsgFlags, SockaddrStorage};
use socket2::{Domain, Protocol, SockFilter, Socket, Type};
use std::os::fd::AsRawFd;

use super::echo::paths_by_device;
use super::sequence::{SegmentOrder, SequenceTracker};
use super::sys;
use super::worker::Worker;

/// Bytes kept of each frame: Ethernet, IPv6 and the longest TCP header.
const SNAP_BYTES: u32 = 14 + 40 + 60;

/// An uninterrupted stay of a flow on a path, by its data segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Visit {
    /// Path index; `None`: a device that is no path.
    pub path: Option<u8>,
    /// First data segment, `CLOCK_MONOTONIC`.
    pub first_ns: u64,
    /// Last data segment.
    pub last_ns: u64,
    /// Payload.
    pub bytes: u64,
}

/// A segment that arrived behind one sent later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reordering {
    /// When it arrived, `CLOCK_MONOTONIC`.
    pub at_ns: u64,
    /// It came by another path than the newest segment: the flow's move did this.
    pub across_paths: bool,
}

/// What was seen of one flow.
#[derive(Debug, Clone, Default)]
pub struct FlowTrace {
    /// Stays in order of time. Two paths used at once give many short ones.
    pub visits: Vec<Visit>,
    /// Segments that were overtaken.
    pub reorderings: Vec<Reordering>,
}

impl FlowTrace {
    /// Number of changes from one path to another within a time, `CLOCK_MONOTONIC`.
    pub fn moves_within(&self, time: &Range<u64>) -> usize {
        let later = self.visits.iter().skip(1);
        later.filter(|visit| time.contains(&visit.first_ns)).count()
    }

    fn segment(&mut self, seen: &Seen, path: Option<u8>) {
        match self.visits.last_mut() {
            Some(visit) if visit.path == path => {
                visit.last_ns = seen.at_ns;
                visit.bytes += u64::from(seen.len);
            }
            _ => self.visits.push(Visit {
                path,
                first_ns: seen.at_ns,
                last_ns: seen.at_ns,
                bytes: u64::from(seen.len),
            }),
        }
    }
}

/// Flows by the client's source port.
pub type Traces = HashMap<u16, FlowTrace>;

/// A running observer: what was seen, and the number of frames the socket had no room for. With any of
/// those the traces have gaps.
pub type Sniffer = Worker<(Traces, u64)>;

/// Watches TCP data to `port` in `netns`. `min_rtt_us`: see `SequenceTracker::new`.
pub fn start(netns: &Path, port: u16, paths: &[String], min_rtt_us: u32) -> Result<Sniffer> {
    let paths = paths.to_vec();
    let set_up = move || {
        let socket = open(port).context("cannot open the packet socket")?;
        Ok((socket, paths_by_device(&paths)))
    };
    Worker::start("sniffer", netns, set_up, move |(socket, paths), stop| {
        watch(&socket, &paths, min_rtt_us, stop)
    })
}

/// Passes the first [`SNAP_BYTES`] of unfragmented TCP segments to `port`, IPv4 or IPv6, on
/// Ethernet frames.
fn filter(port: u16) -> [SockFilter; 16] {
    let load_half = (libc::BPF_LD | libc::BPF_H | libc::BPF_ABS) as u16;
    let load_byte = (libc::BPF_LD | libc::BPF_B | libc::BPF_ABS) as u16;
    let load_indexed = (libc::BPF_LD | libc::BPF_H | libc::BPF_IND) as u16;
    let header_length = (libc::BPF_LDX | libc::BPF_B | libc::BPF_MSH) as u16;
    let equal = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    let any_bit = (libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K) as u16;
    let ret = (libc::BPF_RET | libc::BPF_K) as u16;
    let port = u32::from(port);
    [
        SockFilter::new(load_half, 0, 0, 12),
        SockFilter::new(equal, 0, 7, 0x0800), // else to 9
        SockFilter::new(load_byte, 0, 0, 23),
        SockFilter::new(equal, 0, 11, 6), // TCP, else to 15
        SockFilter::new(load_half, 0, 0, 20),
        SockFilter::new(any_bit, 9, 0, 0x1fff), // a later fragment: to 15
        SockFilter::new(header_length, 0, 0, 14),
        SockFilter::new(load_indexed, 0, 0, 16),
        SockFilter::new(equal, 5, 6, port),   // to 14 or 15
        SockFilter::new(equal, 0, 5, 0x86dd), // else to 15
        SockFilter::new(load_byte, 0, 0, 20),
        SockFilter::new(equal, 0, 3, 6), // TCP, else to 15
        SockFilter::new(load_half, 0, 0, 56),
        SockFilter::new(equal, 0, 1, port), // to 14 or 15
        SockFilter::new(ret, 0, 0, SNAP_BYTES),
        SockFilter::new(ret, 0, 0, 0),
    ]
}

fn open(port: u16) -> Result<Socket> {
    // Protocol 0 receives nothing until bound: no frame slips in before the filter is there.
    let socket = Socket::new(Domain::PACKET, Type::RAW, Some(Protocol::from(0)))?;
    socket.attach_filter(&filter(port))?;
    socket_option::set(&socket, libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, 1)
        .context("PACKET_IGNORE_OUTGOING")?;
    socket_option::set(&socket, libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 1)?;
    let _ = socket_option::set(&socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, 32 << 20);
    socket.set_read_timeout(Some(Duration::from_millis(50)))?;
    let address = libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: (libc::ETH_P_ALL as u16).to_be(),
        sll_ifindex: 0,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    // SAFETY: the pointer and length describe `address`, which outlives the call.
    let rc = unsafe {
        libc::bind(
            socket.as_raw_fd(),
            std::ptr::from_ref(&address).cast(),
            size_of_val(&address) as libc::socklen_t,
        )
    };
    if rc != 0 {
        return Err(io::Error::last_os_error()).context("bind");
    }
    Ok(socket)
}

/// A data segment as read from the wire.
struct Seen {
    at_ns: u64,
    client_port: u16,
    seq: u32,
    len: u32,
    stamp: Option<u32>,
}

struct FlowState {
    tracker: SequenceTracker,
    newest_path: Option<u8>,
    trace: FlowTrace,
}

fn watch(
    socket: &Socket,
    paths: &HashMap<u32, u8>,
    min_rtt_us: u32,
    stop: &AtomicBool,
) -> (Traces, u64) {
    let mut flows: HashMap<u16, FlowState> = HashMap::new();
    // Timestamps are wall-clock time; a step of that clock would only shift them.
    let offset_ns = sys::realtime_ns() - sys::monotonic_ns();
    let mut buf = [0u8; SNAP_BYTES as usize];
    let mut control = nix::cmsg_space!(nix::sys::time::TimeSpec);
    // After the order to stop, what is queued is still read, up to the first pause.
    loop {
        let Some((len, device, at_ns)) = receive(socket, &mut buf, &mut control) else {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            continue;
        };
        let at_ns = at_ns.saturating_sub(offset_ns);
        let Some(seen) = parse(&buf[..len], at_ns).filter(|s| s.len > 0) else {
            continue;
        };
        let path = paths.get(&device).copied();
        let flow = flows.entry(seen.client_port).or_insert_with(|| FlowState {
            tracker: SequenceTracker::new(min_rtt_us),
            newest_path: path,
            trace: FlowTrace::default(),
        });
        match flow.tracker.segment(at_ns, seen.seq, seen.len, seen.stamp) {
            SegmentOrder::InOrder => flow.newest_path = path,
            SegmentOrder::Retransmitted => {}
            SegmentOrder::Reordered => flow.trace.reorderings.push(Reordering {
                at_ns,
                across_paths: path != flow.newest_path,
            }),
        }
        flow.trace.segment(&seen, path);
    }
    let traces = flows.into_iter().map(|(port, flow)| (port, flow.trace));
    (traces.collect(), dropped(socket))
}

fn receive(socket: &Socket, buf: &mut [u8], control: &mut [u8]) -> Option<(usize, u32, u64)> {
    let mut iov = [io::IoSliceMut::new(buf)];
    let fd = socket.as_raw_fd();
    let message =
        recvmsg::<SockaddrStorage>(fd, &mut iov, Some(control), MsgFlags::empty()).ok()?;
    let device = message.address.as_ref()?.as_link_addr()?.ifindex() as u32;
    let at_ns = message.cmsgs().ok()?.find_map(|item| match item {
        ControlMessageOwned::ScmTimestampns(t) => {
            Some(t.tv_sec() as u64 * 1_000_000_000 + t.tv_nsec() as u64)
        }
        _ => None,
    });
    Some((
        message.bytes,
        device,
        at_ns.unwrap_or_else(sys::realtime_ns),
    ))
}

/// Frames that found the socket's buffer full.
fn dropped(socket: &Socket) -> u64 {
    let mut stats = libc::tpacket_stats {
        tp_packets: 0,
        tp_drops: 0,
    };
    let (level, name) = (libc::SOL_PACKET, libc::PACKET_STATISTICS);
    // SAFETY: these are integers, which may hold any bytes.
    match unsafe { socket_option::get(socket, level, name, &mut stats) } {
        Ok(()) => stats.tp_drops.into(),
        Err(_) => 0,
    }
}

/// Reads an Ethernet frame that passed the filter; `None` if it is too short for its headers.
fn parse(frame: &[u8], at_ns: u64) -> Option<Seen> {
    // The payload of IP has been cut off.
    let packet = LaxSlicedPacket::from_ethernet(frame).ok()?;
    let Some(TransportSlice::Tcp(tcp)) = packet.transport else {
        return None;
    };
    let segment = match packet.net? {
        LaxNetSlice::Ipv4(ip) => {
            let (header, all) = (ip.header().slice().len(), ip.header().total_len());
            usize::from(all).saturating_sub(header)
        }
        LaxNetSlice::Ipv6(ip) => ip.header().payload_length().into(),
        LaxNetSlice::Arp(_) => return None,
    };
    let stamp = |option| match option {
        TcpOptionElement::Timestamp(sent, _) => Some(sent),
        _ => None,
    };
    Some(Seen {
        at_ns,
        client_port: tcp.source_port(),
        seq: tcp.sequence_number(),
        // A length of 0 (a segment above 64 kB before segmentation) cannot be read: no data.
        len: segment.saturating_sub(tcp.header_slice().len()) as u32,
        stamp: tcp.options_iterator().flatten().find_map(stamp),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use etherparse::PacketBuilder;

    /// The headers of a segment.
    fn frame_v4(options: &[u8], payload: usize) -> Vec<u8> {
        let builder = PacketBuilder::ethernet2([0; 6], [0; 6])
            .ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64)
            .tcp(40_000, 80, 0x0102_0304, 0)
            .options_raw(options)
            .unwrap();
        let mut frame = Vec::new();
        builder.write(&mut frame, &vec![0; payload]).unwrap();
        frame.truncate(frame.len() - payload);
        frame
    }

    #[test]
    fn segments_are_read_from_their_headers_alone() {
        let options = [1, 1, 8, 10, 0, 0, 1, 2, 0, 0, 0, 0];
        let seen = parse(&frame_v4(&options, 1448), 9).unwrap();
        assert_eq!(
            (seen.client_port, seen.seq, seen.len),
            (40_000, 0x0102_0304, 1448)
        );
        assert_eq!(seen.stamp, Some(258));
        assert_eq!(
            parse(&frame_v4(&[], 0), 9).unwrap().len,
            0,
            "a bare acknowledgement"
        );
        let frame = frame_v4(&options, 1448);
        for len in 0..frame.len() - options.len() {
            assert!(parse(&frame[..len], 9).is_none(), "cut to {len}");
        }
    }

    #[test]
    fn stamps_are_found_among_other_options() {
        let stamp = |options: &[u8]| parse(&frame_v4(options, 1), 9).unwrap().stamp;
        let mss = [2, 4, 5, 180, 8, 10, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0];
        assert_eq!(stamp(&mss), Some(3));
        assert_eq!(stamp(&[3, 0, 7, 8]), None, "malformed");
        let after_the_end = [0, 8, 10, 1, 1, 1, 1, 1, 1, 1, 1, 1];
        assert_eq!(stamp(&after_the_end), None);
    }
}
