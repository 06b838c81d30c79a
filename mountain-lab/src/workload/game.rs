// SPDX-License-Identifier: GPL-2.0-or-later
//! Game-like traffic: many thin UDP flows with a steady packet rate, each echoed by the server.
//!
//! Round-trip times come from the kernel's software timestamps at both ends of the client's stack,
//! less the residence time the server states; a scheduling hiccup of this process is no jitter of the
//! path. The same generator with 50 packets/s of 160 bytes and DSCP 46 (EF, RFC 3246) is VoIP-like.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use anyhow::{ensure, Context, Result};
use mountain::measure::timestamp::{self, ErrorEvent, Stamping};
use serde::Serialize;
use socket2::Socket;

use super::dial::{within, Dial, Ends};
use super::echo::{EchoServer, Header, HEADER_BYTES, UNKNOWN_PATH};
use super::plan::SendSchedule;
use super::sys;
use super::worker::Worker;

/// An answer that comes later than this counts as lost.
const LINGER_NS: u64 = 1_000_000_000;

/// What to send, from where to where.
#[derive(Debug, Clone)]
pub struct GameConfig {
    /// From where to where.
    pub ends: Ends,
    /// Number of flows, each with its own socket and source port.
    pub flows: u32,
    /// Packets per second and flow.
    pub rate_hz: f64,
    /// UDP payload, at least [`HEADER_BYTES`].
    pub payload_bytes: usize,
    /// DSCP of the client's packets.
    pub dscp: Option<u8>,
}

/// What became of one packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Packet {
    /// Flow, from 0.
    pub flow: u16,
    /// Number within the flow, from 0 and without gaps.
    pub seq: u32,
    /// When it was sent, `CLOCK_MONOTONIC`.
    pub sent_ns: u64,
    /// Round-trip time by kernel timestamps without the server's residence; `None`: lost.
    pub rtt_us: Option<u32>,
    /// Round-trip time as the sending program saw it, the server's residence included.
    pub user_rtt_us: Option<u32>,
    /// Ingress path at the server; `None`: it did not arrive there (or by a device not listed).
    pub path: Option<u8>,
    /// A packet of this flow with a higher number reached the server before.
    pub reordered: bool,
    /// One-way delay to the server by kernel timestamps.
    pub forward_us: Option<u32>,
    /// One-way delay of the answer by kernel timestamps.
    pub backward_us: Option<u32>,
    /// How much later than planned the generator sent it.
    pub late_us: u32,
}

/// How well the generator itself kept its plan.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Health {
    /// Packets handed to the kernel or refused by it.
    pub sent: u64,
    /// Packets the kernel refused to send; they count as lost.
    pub send_errors: u64,
    /// Sending times that passed while the generator was stalled; never counted as packets.
    pub skipped: u64,
    /// Packets sent more than 1 ms late.
    pub late: u64,
    /// The worst lateness.
    pub late_max_us: u64,
    /// Answered packets without a kernel transmit timestamp: the clock before `send` stood in.
    pub unstamped: u64,
    /// Whether real-time priority was permitted.
    pub realtime: bool,
}

/// Running flows.
pub struct RunningGame {
    server: EchoServer,
    /// Told to stop it sends no more, and ends when the last packet is settled.
    client: Worker<(Vec<Packet>, Health)>,
    /// It ends now.
    abort: Arc<AtomicBool>,
    run: u32,
}

/// Starts the server, then the flows. Any error of either is returned and nothing runs.
pub fn start(cfg: GameConfig) -> Result<RunningGame> {
    within("flows", cfg.flows, 1..=20_000)?;
    let hz = cfg.rate_hz;
    ensure!(hz > 0.0, "rate_hz = {hz}: must be above 0");
    within("payload_bytes", cfg.payload_bytes, HEADER_BYTES..=1472)?;
    let server = EchoServer::start(&cfg.ends)?;
    let run = rand::random();
    let abort = Arc::new(AtomicBool::new(false));
    let netns = cfg.ends.client_ns.clone();
    let ended = Arc::clone(&abort);
    let set_up = move || Client::open(&cfg, run);
    let client = Worker::start("game-client", &netns, set_up, move |client, stop| {
        client.run(stop, &ended)
    })?;
    Ok(RunningGame {
        server,
        client,
        abort,
        run,
    })
}

impl RunningGame {
    /// Stops sending and waits for stragglers (up to 1 s). Returns all packets, in the order they were sent within
    /// each flow, and how well the generator kept its plan.
    pub fn finish(mut self) -> Result<(Vec<Packet>, Health)> {
        let (mut packets, health) = self.client.finish()?;
        let arrivals = self.server.arrivals().map(|a| a.header);
        let arrived: HashMap<(u16, u32), Header> = arrivals
            .filter(|header| header.run == self.run)
            .map(|header| ((header.flow, header.seq), header))
            .collect();
        for packet in packets.iter_mut().filter(|p| p.rtt_us.is_none()) {
            // The answer may be lost while the packet itself arrived: the server knows.
            if let Some(header) = arrived.get(&(packet.flow, packet.seq)) {
                packet.path = Some(header.path).filter(|p| *p != UNKNOWN_PATH);
                packet.reordered = header.reordered;
            }
        }
        Ok((packets, health))
    }
}

impl Drop for RunningGame {
    fn drop(&mut self) {
        self.abort.store(true, Ordering::Relaxed);
    }
}

struct Reply {
    user_ns: u64,
    kernel_ns: u64,
    header: Header,
}

struct Slot {
    sent_ns: u64,
    /// `CLOCK_REALTIME` before `send`, replaced by the kernel's transmit timestamp.
    transmit_ns: u64,
    stamped: bool,
    late_us: u32,
    reply: Option<Reply>,
}

struct Flow {
    socket: Socket,
    /// Packets not settled yet; the first has the number `first`.
    slots: VecDeque<Slot>,
    first: u32,
    /// Number of the packet whose transmit timestamp has id 0.
    id_base: u32,
}

impl Flow {
    fn next_seq(&self) -> u32 {
        self.first + self.slots.len() as u32
    }

    fn slot(&mut self, seq: u32) -> Option<&mut Slot> {
        self.slots.get_mut(seq.checked_sub(self.first)? as usize)
    }
}

struct Client {
    flows: Vec<Flow>,
    run: u32,
    payload: Vec<u8>,
    rate_hz: f64,
    health: Health,
}

impl Client {
    fn open(cfg: &GameConfig, run: u32) -> Result<Self> {
        let flows = (0..cfg.flows)
            .map(|n| {
                let socket = open_flow(cfg).with_context(|| format!("cannot open flow {n}"))?;
                Ok(Flow {
                    socket,
                    slots: VecDeque::new(),
                    first: 0,
                    id_base: 0,
                })
            })
            .collect::<Result<_>>()?;
        let payload = vec![0; cfg.payload_bytes];
        Ok(Client {
            flows,
            run,
            payload,
            rate_hz: cfg.rate_hz,
            health: Health::default(),
        })
    }

    fn run(mut self, stop: &AtomicBool, abort: &AtomicBool) -> (Vec<Packet>, Health) {
        let mut settled = Vec::new();
        self.health.realtime = sys::raise_priority();
        sys::tighten_timer_slack();
        let mut fds: Vec<libc::pollfd> = self
            .flows
            .iter()
            .map(|f| libc::pollfd {
                fd: f.socket.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            })
            .collect();
        let mut plan = SendSchedule::new(
            sys::monotonic_ns() + 1_000_000,
            self.flows.len(),
            self.rate_hz,
        );
        while !abort.load(Ordering::Relaxed) {
            let stopping = stop.load(Ordering::Relaxed);
            let mut now = sys::monotonic_ns();
            while let Some(due) = (!stopping).then(|| plan.due(now)).flatten() {
                self.health.skipped += due.skipped;
                self.send(due.flow, (due.late_ns / 1_000) as u32);
                now = sys::monotonic_ns();
            }
            self.settle(now, &mut settled);
            if stopping && self.flows.iter().all(|f| f.slots.is_empty()) {
                break;
            }
            let at_most = now + 20_000_000;
            let wake = if stopping {
                at_most
            } else {
                plan.next_ns().min(at_most)
            };
            sys::wait(&mut fds, wake.saturating_sub(sys::monotonic_ns()));
            for (flow, fd) in self.flows.iter_mut().zip(&fds) {
                if fd.revents & libc::POLLERR != 0 {
                    read_timestamps(flow);
                }
                if fd.revents != 0 {
                    read_replies(flow, self.run);
                }
            }
        }
        (settled, self.health)
    }

    fn send(&mut self, index: usize, late_us: u32) {
        let (flow, health) = (&mut self.flows[index], &mut self.health);
        let seq = flow.next_seq();
        Header::request(self.run, index as u16, seq).write(&mut self.payload);
        let slot = Slot {
            sent_ns: sys::monotonic_ns(),
            transmit_ns: sys::realtime_ns(),
            stamped: false,
            late_us,
            reply: None,
        };
        flow.slots.push_back(slot);
        // A pending ICMP error is reported instead of sending; the second attempt sends.
        let send = || flow.socket.send(&self.payload);
        let sent = send().or_else(|_| send());
        if sent.is_err() {
            health.send_errors += 1;
            // Whether a failed send consumed a timestamp id depends on where it failed: collect
            // what is there, then count anew from the next packet.
            read_timestamps(flow);
            flow.id_base = flow.next_seq();
            let _ = timestamp::set_stamping(&flow.socket, Stamping::empty())
                .and_then(|()| timestamp::set_stamping(&flow.socket, timestamp::BOTH_WAYS));
        }
        health.sent += 1;
        health.late_max_us = health.late_max_us.max(late_us.into());
        health.late += u64::from(late_us > 1_000);
    }

    /// Moves packets to `settled` that were sent [`LINGER_NS`] ago, answered or not.
    fn settle(&mut self, now: u64, settled: &mut Vec<Packet>) {
        let is_old = |slot: &Slot| slot.sent_ns + LINGER_NS <= now;
        for (index, flow) in self.flows.iter_mut().enumerate() {
            while flow.slots.front().is_some_and(is_old) {
                // A slot that old gets its last chance: its answer may be in the socket already.
                if flow.slots.front().is_some_and(|s| s.reply.is_none()) {
                    read_timestamps(flow);
                    read_replies(flow, self.run);
                }
                let Some(slot) = flow.slots.pop_front() else {
                    break;
                };
                if slot.reply.is_some() && !slot.stamped {
                    self.health.unstamped += 1;
                }
                settled.push(packet_of(index as u16, flow.first, &slot));
                flow.first += 1;
            }
        }
    }
}

fn packet_of(flow: u16, seq: u32, slot: &Slot) -> Packet {
    let mut packet = Packet {
        flow,
        seq,
        sent_ns: slot.sent_ns,
        late_us: slot.late_us,
        ..Packet::default()
    };
    if let Some(reply) = &slot.reply {
        let (kernel_ns, header) = (reply.kernel_ns, &reply.header);
        let user = reply.user_ns.saturating_sub(slot.sent_ns);
        let residence = header.residence_ns;
        let us = |later: u64, earlier| Some((later.checked_sub(earlier)? / 1_000) as u32);
        // A step of the wall clock between the stamps makes nonsense of them; the monotonic pair
        // remains.
        let kernel = kernel_ns
            .checked_sub(slot.transmit_ns)
            .and_then(|t| t.checked_sub(residence))
            .filter(|t| *t <= user)
            .unwrap_or(user.saturating_sub(residence));
        packet.rtt_us = Some((kernel / 1_000) as u32);
        packet.user_rtt_us = Some((user / 1_000) as u32);
        packet.forward_us = us(header.arrival_ns, slot.transmit_ns);
        packet.backward_us = us(kernel_ns, header.arrival_ns + residence);
        packet.path = Some(header.path).filter(|p| *p != UNKNOWN_PATH);
        packet.reordered = header.reordered;
    }
    packet
}

fn open_flow(cfg: &GameConfig) -> Result<Socket> {
    let dial = Dial {
        dscp: cfg.dscp,
        ..cfg.ends.dial(0)
    };
    let socket = dial.datagrams(cfg.ends.server())?;
    socket.set_nonblocking(true)?;
    timestamp::set_stamping(&socket, timestamp::BOTH_WAYS)?;
    Ok(socket)
}

/// Takes all transmit timestamps from the socket's error queue.
fn read_timestamps(flow: &mut Flow) {
    while let Ok(Some(event)) = timestamp::receive_error(&flow.socket) {
        if let ErrorEvent::Sent {
            id,
            tx_ns: Some(ns),
            ..
        } = event
        {
            let seq = flow.id_base.wrapping_add(id);
            if let Some(slot) = flow.slot(seq) {
                slot.transmit_ns = ns;
                slot.stamped = true;
            }
        }
    }
}

/// Takes all answers from the socket.
fn read_replies(flow: &mut Flow, run: u32) {
    let mut errors = 0;
    while errors < 16 {
        let mut buf = [0u8; 2048];
        let received = match timestamp::receive(&flow.socket, &mut buf) {
            Ok(received) => received,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
            // A queued ICMP error: the packet concerned stays unanswered. Reading it clears it.
            Err(_) => {
                errors += 1;
                continue;
            }
        };
        let user_ns = sys::monotonic_ns();
        let Some(header) = Header::read(&buf[..received.len]).filter(|h| h.run == run) else {
            continue;
        };
        let kernel_ns = received.rx_ns.unwrap_or_else(sys::realtime_ns);
        if let Some(slot) = flow.slot(header.seq) {
            // The first answer counts, a duplicate does not improve or worsen it.
            slot.reply.get_or_insert(Reply {
                user_ns,
                kernel_ns,
                header,
            });
        }
    }
}
