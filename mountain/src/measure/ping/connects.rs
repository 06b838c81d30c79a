// SPDX-License-Identifier: GPL-2.0-or-later
//! Probes that are TCP handshakes: SYN, then SYN and ACK (or a refusal).
//!
//! Each is a connection of its own, reset (SO_LINGER of 0) as soon as it is answered, so that
//! neither host keeps it in TIME_WAIT. The kernel measures the round trip of the handshake
//! itself, as the first sample of the connection's smoothed RTT (TCP_INFO, `tcpi_rtt`, whole µs;
//! `tcp_rtt_estimator` takes the first sample as it is, RFC 6298 section 2.2). Nothing was sent
//! since, so no other sample is in it. A refusal ends the connection without a sample.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::socket::{setsockopt, sockopt};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use super::super::timing::RoundTrip;
use super::log::ProbeLog;
use super::{PingOptions, Probes, Progress};
use crate::host::{descriptors, socket_option};

/// The kernel's first wait for an answer to a SYN, after which it sends another (RFC 6298).
const FIRST_TIMEOUT: Duration = Duration::from_secs(1);
/// A handshake is given up after this; by then the kernel has sent its SYN two or three times.
const GIVE_UP: Duration = Duration::from_millis(2_900);

pub(super) struct Connects {
    address: SocketAddr,
    device: Option<String>,
    source: Option<SocketAddr>,
    ready: Epoll,
    /// Under way, by probe.
    open: BTreeMap<usize, Socket>,
    /// Answered probes of [`Verdict::Unclear`].
    unclear: Vec<usize>,
}

/// What a finished handshake tells.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// By the kernel, ns; `None`: it took no sample.
    Answered(Option<i64>),
    /// By the kernel, ns, and longer than its first wait: either the path takes so long, or the
    /// answer was lost and the far host sent it again. See [`is_long`].
    Unclear(i64),
    /// The first SYN, or its answer, was lost.
    Repeated,
}

/// `again`: how often the SYN was sent again. Then the kernel's sample, if it could take one, is
/// by TCP timestamps (RFC 7323), which tell which SYN was answered: the first, if the sample is
/// longer than all that could have passed since the second. But an answer that was sent again
/// names the first SYN, too, even one that was sent again for the second.
///
/// Before its first wait is over the kernel sends again only when the far host has answered: that one still has an earlier
/// connection from this port (challenge ACK, RFC 5961), which the kernel resets first.
fn judge(user_ns: i64, rtt_us: u32, again: u8) -> Verdict {
    let first_timeout = FIRST_TIMEOUT.as_nanos() as i64;
    let rtt_ns = (rtt_us > 0).then_some(i64::from(rtt_us) * 1000);
    if again == 0 {
        return match rtt_ns {
            // The far host's timer was faster than ours. On a path of this length ours would have
            // sent again first.
            Some(ns) if ns >= first_timeout => Verdict::Repeated,
            _ => Verdict::Answered(rtt_ns),
        };
    }
    // Timestamps are of 1 ms, timers of a tick of up to 10 ms.
    let since_second = user_ns - first_timeout + 20_000_000;
    match rtt_ns {
        _ if since_second < 0 => Verdict::Answered(rtt_ns),
        Some(ns) if ns > since_second => Verdict::Unclear(ns.min(user_ns)),
        _ => Verdict::Repeated,
    }
}

/// Whether a path may take longer than the kernel's first wait, by the slowest of the answers that
/// came within it. A queue that delays by a second is built up past half of it; without any such
/// answer the path is never faster.
fn is_long(slowest_clear_ns: Option<i64>) -> bool {
    slowest_clear_ns.is_none_or(|ns| ns >= FIRST_TIMEOUT.as_nanos() as i64 / 2)
}

impl Connects {
    pub(super) fn open(options: &PingOptions, address: SocketAddr) -> Result<Self> {
        // Up to three seconds of unanswered handshakes are open at a time.
        descriptors::raise_limit();
        let connects = Self {
            address,
            device: options.device.clone(),
            source: options.source_address(),
            ready: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).context("cannot make an epoll")?,
            open: BTreeMap::new(),
            unclear: Vec::new(),
        };
        // What cannot work shows here and not as losses.
        connects
            .try_route()
            .with_context(|| format!("cannot send to {} ({})", options.target, address.ip()))?;
        Ok(connects)
    }

    /// Whether there is a route: connecting by UDP looks it up and sends nothing.
    fn try_route(&self) -> io::Result<()> {
        let domain = Domain::for_address(self.address);
        let udp = Socket::new(domain, Type::DGRAM, Some(Protocol::UDP))?;
        self.bind(&udp)?;
        udp.connect(&SockAddr::from(self.address))
    }

    fn bind(&self, socket: &Socket) -> io::Result<()> {
        if let Some(device) = &self.device {
            socket.bind_device(Some(device.as_bytes()))?;
        }
        if let Some(source) = self.source {
            // The port is chosen by connect, which knows that only the pair must be free.
            setsockopt(socket, sockopt::IpBindAddressNoPort, &true)?;
            socket.bind(&SockAddr::from(source))?;
        }
        Ok(())
    }

    fn socket(&self) -> io::Result<Socket> {
        let domain = Domain::for_address(self.address);
        let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
        socket.set_nonblocking(true)?;
        socket.set_linger(Some(Duration::ZERO))?;
        self.bind(&socket)?;
        Ok(socket)
    }

    fn give_up_old(&mut self, log: &ProbeLog) {
        while let Some(first) = self.open.first_entry() {
            if log.probes[*first.key()].sent.elapsed() < GIVE_UP {
                return;
            }
            // Closing takes it out of the epoll, too.
            first.remove();
        }
    }

    /// The RTT of an answered handshake, ns.
    fn ended(&mut self, log: &mut ProbeLog, at: usize, now: Instant) -> Option<i64> {
        let socket = self.open.remove(&at)?;
        let user_ns = now.duration_since(log.probes[at].sent).as_nanos() as i64;
        let refused = match socket.take_error() {
            Ok(None) => false,
            Ok(Some(e)) if e.raw_os_error() == Some(libc::ECONNREFUSED) => true,
            Ok(Some(e)) if was_made(&e) => false,
            Ok(Some(e)) | Err(e) => {
                log.failed(e);
                return None;
            }
        };
        let info = tcp_info(&socket)
            .map_err(|e| log.failed(format!("TCP_INFO: {e}")))
            .ok()?;
        let again = u8::try_from(info.tcpi_total_retrans).unwrap_or(u8::MAX);
        let kernel = match judge(user_ns, info.tcpi_rtt, again) {
            Verdict::Answered(kernel) => kernel,
            Verdict::Unclear(ns) => {
                self.unclear.push(at);
                Some(ns)
            }
            Verdict::Repeated => {
                log.repeated += 1;
                return None;
            }
        };
        log.refused += usize::from(refused);
        let rtt_ns = kernel.unwrap_or(user_ns);
        let answer = RoundTrip {
            rtt_ns,
            user_ns,
            kernel_stamps: kernel.is_some(),
            ..RoundTrip::default()
        };
        log.answered(at, answer);
        Some(rtt_ns)
    }
}

impl Probes for Connects {
    /// Readable when a handshake has ended.
    fn fd(&self) -> BorrowedFd<'_> {
        self.ready.0.as_fd()
    }

    fn is_complete(&self, _: &ProbeLog) -> bool {
        self.open.is_empty()
    }

    /// As under way: a run's last handshakes are not given longer than the others.
    fn longest(&self) -> Duration {
        GIVE_UP
    }

    /// Starts the next handshake. One that cannot be started counts as lost.
    fn send(&mut self, log: &mut ProbeLog, progress: &mut Progress) {
        // After a delay of our own there may be answers among what looks too old.
        self.receive(log, progress);
        self.give_up_old(log);
        let at = log.probes.len();
        let socket = self.socket();
        log.sent(Instant::now());
        let started = socket.and_then(|socket| {
            log.probes[at].sent = Instant::now();
            match socket.connect(&SockAddr::from(self.address)) {
                Err(e) if e.raw_os_error() != Some(libc::EINPROGRESS) => return Err(e),
                // Even what is connected already is reported by epoll.
                Ok(()) | Err(_) => {}
            }
            let wanted = EpollFlags::EPOLLOUT | EpollFlags::EPOLLONESHOT;
            self.ready
                .add(&socket, EpollEvent::new(wanted, at as u64))?;
            self.open.insert(at, socket);
            Ok(())
        });
        if let Err(error) = started {
            log.not_sent(error);
        }
    }

    /// Takes in the handshakes that have ended.
    fn receive(&mut self, log: &mut ProbeLog, progress: &mut Progress) {
        let mut events = [EpollEvent::empty(); 64];
        while let Ok(n @ 1..) = self.ready.wait(&mut events, EpollTimeout::ZERO) {
            let now = Instant::now();
            for event in &events[..n] {
                if let Some(ns) = self.ended(log, event.data() as usize, now) {
                    progress(log.probes.len(), Some(ns as f64 / 1e3));
                }
            }
        }
    }

    /// Decides about the unclear answers, by all the others.
    fn finish(&mut self, log: &mut ProbeLog) {
        let mut unclear = std::mem::take(&mut self.unclear);
        unclear.sort_unstable();
        let clear = log.probes.iter().enumerate();
        let clear = clear.filter(|(at, _)| unclear.binary_search(at).is_err());
        let clear = clear.filter_map(|(_, p)| p.answer.as_ref());
        let slowest = clear.filter(|a| a.kernel_stamps).map(|a| a.rtt_ns);
        if !is_long(slowest.max()) {
            log.repeated += unclear.len();
            unclear.into_iter().for_each(|at| log.take_back(at));
        }
    }
}

/// What a connection has that was made and ended by the far program before we looked: by a reset,
/// or by an end (FIN) and then a reset.
fn was_made(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ECONNRESET | libc::EPIPE))
}

fn tcp_info(socket: &Socket) -> io::Result<libc::tcp_info> {
    // SAFETY: all-zero is a valid tcp_info.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    // SAFETY: all of it are plain integers.
    unsafe { socket_option::get(socket, libc::IPPROTO_TCP, libc::TCP_INFO, &mut info) }?;
    Ok(info)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeated_syn_is_a_loss_unless_the_first_was_answered() {
        let ms = |n: i64| n * 1_000_000;
        let kernel = |n: i64| Verdict::Answered(Some(ms(n)));
        let unclear = |n: i64| Verdict::Unclear(ms(n));
        assert_eq!(judge(ms(21), 20_000, 0), kernel(20));
        assert_eq!(judge(ms(21), 0, 0), Verdict::Answered(None), "refused");
        // After a challenge ACK, with and without a sample.
        assert_eq!(judge(ms(50), 20_000, 1), kernel(20));
        assert_eq!(judge(ms(900), 0, 2), Verdict::Answered(None));
        // The second SYN was answered at once: the first one was lost.
        assert_eq!(judge(ms(1_020), 20_000, 1), Verdict::Repeated);
        assert_eq!(judge(ms(1_001), 1_000, 1), Verdict::Repeated);
        assert_eq!(judge(ms(2_300), 300_000, 2), Verdict::Repeated);
        let judged = judge(ms(1_020), 0, 1);
        assert_eq!(judged, Verdict::Repeated, "no timestamps, or refused");
        // The path takes longer than the kernel waits.
        assert_eq!(judge(ms(1_201), 1_200_000, 1), unclear(1_200));
        assert_eq!(judge(ms(2_301), 2_300_000, 2), unclear(2_300));
        let judged = judge(ms(1_201), 1_202_000, 1);
        assert_eq!(judged, unclear(1_201), "not above what was seen");
        // Only the answer was lost, and the far host sent it again before we did.
        assert_eq!(judge(ms(1_021), 1_020_000, 0), Verdict::Repeated);
        assert_eq!(judge(ms(1_001), 1_000_000, 0), Verdict::Repeated);
        assert_eq!(judge(ms(1_000), 999_000, 0), kernel(999));
        let late = judge(ms(5_000), 20_000, 0);
        assert_eq!(late, kernel(20), "only this process was late");
        assert_eq!(judge(ms(5_000), 0, 0), Verdict::Answered(None));
    }

    fn connects(address: &str) -> Connects {
        let options = PingOptions {
            target: "127.0.0.1".into(),
            tcp: Some(1),
            ..PingOptions::default()
        };
        Connects::open(&options, address.parse().unwrap()).unwrap()
    }

    #[test]
    fn an_unclear_answer_is_believed_only_of_a_long_path() {
        let run = |clear_ms: &[i64]| {
            let (mut connects, mut log) = (connects("127.0.0.1:1"), ProbeLog::default());
            let mut add = |ms: i64| {
                let answer = RoundTrip {
                    rtt_ns: ms * 1_000_000,
                    user_ns: ms * 1_000_000,
                    kernel_stamps: true,
                    ..RoundTrip::default()
                };
                log.sent(Instant::now());
                log.answered(log.probes.len() - 1, answer);
            };
            clear_ms.iter().copied().for_each(&mut add);
            add(1_020);
            connects.unclear = vec![clear_ms.len()];
            connects.finish(&mut log);
            let answers = log.probes.iter().filter(|p| p.answer.is_some()).count();
            (answers, log.repeated, log.complete())
        };
        assert_eq!(run(&[20, 30]), (2, 1, false));
        assert_eq!(run(&[20, 700]), (3, 0, true), "a long queue");
        assert_eq!(run(&[]), (1, 0, true), "never shorter");
    }

    #[test]
    fn a_connection_that_has_ended_was_made() {
        let error = io::Error::from_raw_os_error;
        assert!(was_made(&error(libc::ECONNRESET)) && was_made(&error(libc::EPIPE)));
        assert!(!was_made(&error(libc::ECONNREFUSED)) && !was_made(&error(libc::EHOSTUNREACH)));
    }

    #[test]
    fn what_waits_to_be_seen_is_not_given_up() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut connects = connects(&listener.local_addr().unwrap().to_string());
        let (mut log, mut progress) = (ProbeLog::default(), |_: usize, _: Option<f64>| {});
        connects.send(&mut log, &mut progress);
        // Connected, and this process then did nothing for long.
        log.probes[0].sent = Instant::now().checked_sub(2 * GIVE_UP).unwrap();
        connects.send(&mut log, &mut progress);
        assert!(log.probes[0].answer.is_some());
    }
}
