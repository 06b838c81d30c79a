// SPDX-License-Identifier: GPL-2.0-or-later
//! Probes for all paths of a host: ICMP echo, or UDP to a `mountain reflect`.
//!
//! Each path has a socket of its own, bound to the path's device and, where given, source
//! address, so that routing cannot send the probe elsewhere and the BPF program can tell it is
//! ours. RTTs are the difference of two kernel timestamps: how late the process reads an answer
//! does not count. An answer counts only if it comes from the target over the path's device,
//! carries the random nonce of a probe still waiting, and is the first one to that probe.
//!
//! Method and formulas: docs/measuring.md.

use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use anyhow::{bail, Result};
use serde::{Deserialize, Serialize};
use tokio::io::unix::AsyncFd;

use super::in_flight::InFlight;
use super::oneway::OneWay;
use super::socket::{with_scope, ProbeKind, ProbeSocket};
use super::timestamp::{self, Received};
use super::wire::{self, Reflected};

/// After this an answer is no longer waited for.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Failures of recvmsg in a row after which a socket is given up.
const MAX_FAILURES: u32 = 32;
/// After so many packets that answer nothing, and failures, of all paths together, other tasks get a turn: whoever
/// floods a socket must not keep the daemon from following the routes. Tokio lets a task do 128 things in one go, and
/// what is left of them is for those.
const MAX_USELESS: u32 = 64;

/// Where probes go and how; in text `192.0.2.1`, `2001:db8::1` (echo) or `192.0.2.1:8610`,
/// `[2001:db8::1]:8610` (reflector).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Target {
    /// ICMP echo to this address; a link-local one is taken to be on the path's device.
    Icmp(IpAddr),
    /// UDP probes to a `mountain reflect`, which tells the directions apart.
    Reflector(SocketAddr),
}

impl TryFrom<String> for Target {
    type Error = String;

    fn try_from(s: String) -> Result<Self, String> {
        if let Ok(ip) = s.parse() {
            return Ok(Target::Icmp(ip));
        }
        match s.parse::<SocketAddr>() {
            Ok(a) if a.port() != 0 => Ok(Target::Reflector(a)),
            _ => Err(format!("{s:?} is neither an IP address nor address:port")),
        }
    }
}

impl Target {
    /// Whether the target is an IPv6 address.
    pub(crate) fn is_ipv6(self) -> bool {
        self.address(0).is_ipv6()
    }

    /// The address that is named.
    pub(crate) fn ip(self) -> IpAddr {
        self.address(0).ip()
    }

    /// The address probed; a link-local one gets `ifindex` as its scope.
    fn address(self, ifindex: u32) -> SocketAddr {
        match self {
            Target::Icmp(ip) => with_scope(SocketAddr::new(ip, 0), ifindex),
            Target::Reflector(address) => with_scope(address, ifindex),
        }
    }
}

/// One path to probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbePath {
    /// Device that the probes leave and the answers arrive by.
    pub ifname: String,
    /// Its index. Looked up anew by name when the socket has to be opened again, as a device that
    /// was deleted and re-created has another.
    pub ifindex: u32,
    /// Source address; `None` lets the kernel choose.
    pub source: Option<IpAddr>,
    /// Where probes go, and which kind they are.
    pub target: Target,
}

/// A valid answer to one probe.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// Index of the path.
    pub path: usize,
    /// As given to [`Prober::send`].
    pub seq: u64,
    /// Kernel receive stamp − kernel transmit stamp, without the time spent inside the reflector.
    pub rtt_us: u32,
    /// From before the send call until the answer was read, by the steady clock: what an
    /// application feels.
    pub user_rtt_us: u32,
    /// Variation above the minimum of the last minute of the forward direction; reflector only, and `None`
    /// while it cannot be told from the backward one (see [`super::oneway`]).
    pub forward_us: Option<u32>,
    /// Likewise of the backward direction.
    pub backward_us: Option<u32>,
    /// Time the probe waited in the host's own queueing discipline; not part of `rtt_us`.
    pub queue_us: Option<u32>,
    /// The delay to judge the path by: minimum RTT + forward variation where known, else RTT;
    /// plus `queue_us`.
    pub delay_us: u32,
    /// Whether both of our stamps are the kernel's. If not (a driver that does not stamp, or a
    /// clock set under way), `rtt_us` includes the process's own delays.
    pub kernel_stamps: bool,
    /// Hop limit of the answer as it arrived.
    pub hop_limit: Option<u8>,
    /// What the reflector reported.
    pub reflected: Option<Reflected>,
}

/// What went on on one path since it was set. `mountain status` has what is not skipped.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathStats {
    /// Probes that left.
    pub sent: u64,
    /// Answers to distinct probes.
    pub answered: u64,
    /// Probes that this host's firewall has refused (EPERM) since the last one that left.
    #[serde(skip)]
    pub refused: u64,
    /// Packets that answer none of our waiting probes: foreign, forged, replayed, too late.
    pub ignored: u64,
    /// Whether the last answer told the directions apart, so that the path is judged
    /// by the forward one alone. Only a reflector's answers can.
    #[serde(skip)]
    pub forward_only: bool,
    /// Last failure, in words: an ICMP error, one of this host (unresolved neighbour), or of opening the socket
    /// or sending. `None`: none so far.
    pub last_error: Option<String>,
}

/// Sends probes and collects answers, for all paths of the host, without blocking.
///
/// Make and use it inside a tokio runtime with I/O enabled. A path whose socket cannot be opened
/// (device missing, no route) is no error at first: each [`Prober::send`] tries again and says
/// what is wrong.
pub struct Prober {
    paths: Vec<Endpoint>,
    /// Path to be asked first for an answer, so that none starves.
    turn: usize,
    /// Zero of the steady clock for the one-way filter.
    epoch: Instant,
}

impl Prober {
    /// Opens a socket for each path.
    ///
    /// # Errors
    /// Those of [`Prober::set_path`].
    pub fn new(paths: &[ProbePath]) -> Result<Self> {
        let mut prober = Self {
            paths: Vec::new(),
            turn: 0,
            epoch: Instant::now(),
        };
        for path in paths {
            prober.set_path(prober.paths.len(), path.clone())?;
        }
        Ok(prober)
    }

    /// Replaces path `index`, or appends one if `index` is their number. Probes of the old one
    /// are forgotten.
    ///
    /// # Errors
    /// Where probes cannot work at all: without the right to open raw sockets, or between addresses of
    /// different families.
    ///
    /// # Panics
    /// If `index` is beyond that.
    pub fn set_path(&mut self, index: usize, path: ProbePath) -> Result<()> {
        let target = path.target.address(0).ip();
        if let Some(source) = path.source.filter(|s| s.is_ipv4() != target.is_ipv4()) {
            bail!(
                "path {index} ({}): source {source} and target {target} are of different families",
                path.ifname
            );
        }
        let mut endpoint = Endpoint::new(path);
        if let Err(error) = endpoint.open() {
            // Not EACCES: that is connect(2)'s word for a `prohibit` route.
            if error.raw_os_error() == Some(libc::EPERM) {
                bail!("ICMP probes need raw sockets: run as root or with CAP_NET_RAW");
            }
        }
        if index == self.paths.len() {
            self.paths.push(endpoint);
        } else {
            self.paths[index] = endpoint;
        }
        Ok(())
    }

    /// Sends a probe on a path; `seq` comes back in its [`Answer`].
    ///
    /// # Errors
    /// What opening the socket or send(2) failed with, such as ENODEV for a device that is gone
    /// or ENETUNREACH without a route. The next call tries again.
    pub fn send(&mut self, path: usize, seq: u64) -> io::Result<()> {
        let endpoint = self.paths.get_mut(path).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("there is no path {path}"),
            )
        })?;
        let sent = endpoint.send(seq);
        match &sent {
            Ok(()) => endpoint.stats.refused = 0,
            Err(e) if e.raw_os_error() == Some(libc::EPERM) => endpoint.stats.refused += 1,
            Err(_) => {}
        }
        sent.inspect_err(|error| endpoint.stats.last_error = Some(error.to_string()))
    }

    /// Waits for the next valid answer on any path. Cancel-safe: nothing is lost when the future
    /// is dropped. Never returns while no probe is answered.
    pub async fn recv(&mut self) -> Answer {
        poll_fn(|cx| self.poll_recv(cx)).await
    }

    fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Answer> {
        let (turn, count) = (self.turn, self.paths.len());
        let mut useless = MAX_USELESS;
        for path in (turn..turn + count).map(|n| n % count) {
            let polled = self.paths[path].poll_answer(cx, self.epoch, &mut useless);
            if polled.is_ready() || useless == 0 {
                // The next one comes first, whatever else waits at this one.
                self.turn = (path + 1) % count;
            }
            if let Poll::Ready(answer) = polled {
                return Poll::Ready(Answer { path, ..answer });
            }
            if useless == 0 {
                cx.waker().wake_by_ref();
                break;
            }
        }
        Poll::Pending
    }

    /// Counters of a path; of one that could not be set, none.
    pub fn stats(&self, path: usize) -> PathStats {
        let known = self.paths.get(path);
        known.map(|e| e.stats.clone()).unwrap_or_default()
    }

    /// The paths, as set.
    pub(crate) fn paths(&self) -> impl ExactSizeIterator<Item = &ProbePath> {
        self.paths.iter().map(|e| &e.path)
    }
}

struct Endpoint {
    path: ProbePath,
    open: Option<AsyncFd<ProbeSocket>>,
    in_flight: InFlight,
    one_way: OneWay,
    stats: PathStats,
}

impl Endpoint {
    fn new(path: ProbePath) -> Self {
        Self {
            path,
            open: None,
            // Not from 0 on, so that an index alone tells nothing about an earlier run.
            in_flight: InFlight::new(u64::from(rand::random::<u32>())),
            one_way: OneWay::new(),
            stats: PathStats::default(),
        }
    }

    fn open(&mut self) -> io::Result<()> {
        if self.open.is_none() {
            self.path.ifindex = nix::net::if_::if_nametoindex(self.path.ifname.as_str())?;
            self.open = Some(open_socket(&self.path)?.watched()?);
            self.in_flight.restart_count();
        }
        Ok(())
    }

    fn send(&mut self, seq: u64) -> io::Result<()> {
        self.in_flight.expire(ANSWER_TIMEOUT);
        self.open()?;
        self.drain();
        let socket = self.open.as_ref().expect("just opened").get_ref();
        let (_, sent) = self.in_flight.send(socket, seq, wire::PROBE_LEN);
        match &sent {
            Ok(()) => self.stats.sent += 1,
            Err(error) => self.after_failed_send(error),
        }
        sent
    }

    /// A socket that may be bound to a device or address that is gone is given up.
    fn after_failed_send(&mut self, error: &io::Error) {
        let passing = matches!(
            error.raw_os_error(),
            Some(
                libc::EAGAIN
                    | libc::ENOBUFS
                    | libc::ECONNREFUSED
                    | libc::EHOSTUNREACH
                    | libc::ENETDOWN
                    | libc::EPERM
            )
        );
        self.in_flight.restart_count();
        let open = self.open.as_ref().filter(|_| passing);
        if open.is_none_or(|open| open.get_ref().restart_count().is_err()) {
            self.open = None;
        }
    }

    /// Takes in transmit stamps and ICMP errors.
    fn drain(&mut self) {
        if let Some(open) = &self.open {
            let failed = |why| self.stats.last_error = Some(why);
            self.in_flight.drain(open.get_ref(), failed);
        }
    }

    /// The next answer. Each packet that is none, and each failure, takes one off `useless`; at 0 it waits.
    fn poll_answer(
        &mut self,
        cx: &mut Context<'_>,
        epoch: Instant,
        useless: &mut u32,
    ) -> Poll<Answer> {
        let mut failures = 0;
        while *useless > 0 {
            let Some(open) = &self.open else {
                return Poll::Pending;
            };
            let mut guard = match open.poll_read_ready(cx) {
                Poll::Ready(Ok(guard)) => guard,
                // An error means that the runtime is shutting down: nobody waits any more.
                Poll::Ready(Err(_)) | Poll::Pending => return Poll::Pending,
            };
            let mut buffer = [0; 256];
            let received = match timestamp::receive(open.get_ref(), &mut buffer) {
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    guard.clear_ready();
                    continue;
                }
                // A pending ICMP error; reading it has cleared it, and its text is on the error
                // queue. Whatever keeps failing is a broken socket: the next send opens another.
                Err(error) => {
                    drop(guard);
                    self.drain();
                    *useless -= 1;
                    failures += 1;
                    if failures >= MAX_FAILURES {
                        self.stats.last_error = Some(error.to_string());
                        self.open = None;
                    }
                    continue;
                }
            };
            drop(guard);
            match self.answer(&buffer[..received.len], &received, epoch) {
                Some(answer) => return Poll::Ready(answer),
                None => {
                    self.stats.ignored += 1;
                    *useless -= 1;
                }
            }
        }
        Poll::Pending
    }

    /// Checks a packet and makes an answer of it, all but the path's index.
    fn answer(&mut self, packet: &[u8], received: &Received, epoch: Instant) -> Option<Answer> {
        if received.ifindex.is_some_and(|i| i != self.path.ifindex) {
            return None;
        }
        let socket = self.open.as_ref()?.get_ref();
        let stats = &mut self.stats;
        let failed = |why| stats.last_error = Some(why);
        let (probe, is_first) = (self.in_flight).answered(socket, packet, received, failed)?;
        if !is_first {
            return None;
        }
        stats.answered += 1;
        let at_ns = probe.stamps.sent.duration_since(epoch).as_nanos() as u64;
        let answer = probe.stamps.evaluate(at_ns, &mut self.one_way)?;
        stats.forward_only = answer.forward_us.is_some();
        Some(Answer {
            seq: probe.seq,
            hop_limit: received.hop_limit,
            ..answer
        })
    }
}

/// A socket for the path as it is now.
fn open_socket(path: &ProbePath) -> io::Result<ProbeSocket> {
    let kind = match path.target {
        Target::Icmp(_) => ProbeKind::IcmpEcho,
        Target::Reflector(_) => ProbeKind::Udp,
    };
    let source = path
        .source
        .map(|s| with_scope(SocketAddr::new(s, 0), path.ifindex));
    let target = path.target.address(path.ifindex);
    ProbeSocket::open(kind, Some(&path.ifname), source, target, timestamp::KERNEL)
}
