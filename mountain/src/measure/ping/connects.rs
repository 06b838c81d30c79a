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
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::resource::{getrlimit, setrlimit, Resource};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use super::super::timestamp::set_option;
use super::log::{Answer, Log};
use super::{Options, Progress};

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
    /// Answers that were refusals.
    pub(super) refused: usize,
    /// Probes that were answered only after their SYN had been sent again.
    pub(super) repeated: usize,
}

/// What a finished handshake tells.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// By the kernel, ns; `None`: it took no sample.
    Answered(Option<i64>),
    /// The first SYN, or its answer, was lost.
    Repeated,
}

/// `again`: how often the SYN was sent again. Then the kernel's sample, if it could take one, is
/// by TCP timestamps (RFC 7323), which tell which SYN was answered: the first, if the sample is
/// longer than all that could have passed since the second.
fn judge(user_ns: i64, rtt_us: u32, again: u8) -> Verdict {
    let rtt_ns = (rtt_us > 0).then_some(i64::from(rtt_us) * 1000);
    if again == 0 {
        return Verdict::Answered(rtt_ns);
    }
    // Timestamps are of 1 ms, timers of a tick of up to 10 ms.
    let since_second = user_ns - FIRST_TIMEOUT.as_nanos() as i64 + 20_000_000;
    match rtt_ns {
        Some(ns) if ns > since_second.max(0) => Verdict::Answered(Some(ns.min(user_ns))),
        _ => Verdict::Repeated,
    }
}

impl Connects {
    pub(super) fn open(options: &Options, address: SocketAddr) -> Result<Self> {
        // Up to three seconds of unanswered handshakes are open at a time.
        if let Ok((_, most)) = getrlimit(Resource::RLIMIT_NOFILE) {
            let _ = setrlimit(Resource::RLIMIT_NOFILE, most, most);
        }
        let connects = Self {
            address,
            device: options.device.clone(),
            source: options.source_address(),
            ready: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).context("cannot make an epoll")?,
            open: BTreeMap::new(),
            refused: 0,
            repeated: 0,
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
            set_option(socket, libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, 1)?;
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
    /// Readable when a handshake has ended.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.ready.0.as_fd()
    }

    /// Whether an answer may still come.
    pub(super) fn waiting(&self) -> bool {
        !self.open.is_empty()
    }

    /// Starts the next handshake. One that cannot be started counts as lost.
    pub(super) fn send(&mut self, log: &mut Log) {
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
            log.failed(error);
        }
    }

    fn give_up_old(&mut self, log: &Log) {
        while let Some(first) = self.open.first_entry() {
            if log.probes[*first.key()].sent.elapsed() < GIVE_UP {
                return;
            }
            // Closing takes it out of the epoll, too.
            first.remove();
        }
    }

    /// Takes in the handshakes that have ended.
    pub(super) fn receive(&mut self, log: &mut Log, progress: &mut Progress) {
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

    /// The RTT of an answered handshake, ns.
    fn ended(&mut self, log: &mut Log, at: usize, now: Instant) -> Option<i64> {
        let socket = self.open.remove(&at)?;
        let user_ns = now.duration_since(log.probes[at].sent).as_nanos() as i64;
        let refused = match socket.take_error() {
            Ok(None) => false,
            Ok(Some(e)) if e.raw_os_error() == Some(libc::ECONNREFUSED) => true,
            // A connection that was made, and closed by the far program before we looked.
            Ok(Some(e)) if e.raw_os_error() == Some(libc::ECONNRESET) => false,
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
            Verdict::Repeated => {
                self.repeated += 1;
                return None;
            }
        };
        self.refused += usize::from(refused);
        let rtt_ns = kernel.unwrap_or(user_ns);
        let answer = Answer {
            rtt_ns,
            user_ns,
            kernel_stamps: kernel.is_some(),
            hardware_ns: None,
            directions: None,
        };
        log.answered(at, answer);
        Some(rtt_ns)
    }
}

fn tcp_info(socket: &Socket) -> io::Result<libc::tcp_info> {
    // SAFETY: all-zero is a valid tcp_info.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the kernel writes no more than `length` bytes, all of them plain integers.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut length,
        )
    };
    if rc == 0 {
        Ok(info)
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeated_syn_is_a_loss_unless_the_first_was_answered() {
        let ms = |n: i64| n * 1_000_000;
        let kernel = |n: i64| Verdict::Answered(Some(ms(n)));
        assert_eq!(judge(ms(21), 20_000, 0), kernel(20));
        assert_eq!(judge(ms(21), 0, 0), Verdict::Answered(None), "refused");
        // The second SYN was answered at once: the first one was lost.
        assert_eq!(judge(ms(1_020), 20_000, 1), Verdict::Repeated);
        assert_eq!(judge(ms(1_001), 1_000, 1), Verdict::Repeated);
        assert_eq!(judge(ms(2_300), 300_000, 2), Verdict::Repeated);
        assert_eq!(
            judge(ms(1_020), 0, 1),
            Verdict::Repeated,
            "no timestamps, or refused"
        );
        // The path takes longer than the kernel waits.
        assert_eq!(judge(ms(1_201), 1_200_000, 1), kernel(1_200));
        assert_eq!(judge(ms(2_301), 2_300_000, 2), kernel(2_300));
        let rounded = Verdict::Answered(Some(ms(1_201)));
        assert_eq!(
            judge(ms(1_201), 1_202_000, 1),
            rounded,
            "not above what was seen"
        );
    }
}
