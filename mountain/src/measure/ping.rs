//! One target, measured from end to end: `mountain ping`.
//!
//! Probes leave at a steady pace from one connected socket, which takes kernel timestamps of both
//! ways; an answer is matched to its probe by index and random nonce. Nothing is evaluated under
//! way but for the progress display: the samples are kept and turned into a [`RunFile`].
//!
//! Method: docs/measuring.md.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::fd::AsFd;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{anyhow, bail, ensure, Context, Result};
use nix::poll::{ppoll, PollFd, PollFlags};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::time::TimeSpec;
use socket2::Socket;

use super::environment;
use super::runfile::{RunFile, Samples, SCHEMA};
use super::socket::{self, Kind};
use super::stats::Table;
use super::timestamp::{self, ErrorEvent, Received, Stamping};
use super::timing::Times;
use super::wire::{self, ProbeId};

/// Answers to the last probes are waited for at least this long.
const LINGER: Duration = Duration::from_secs(1);
/// The kernel switches receive stamps on lazily; probes start so long after.
const STAMPS_READY: Duration = Duration::from_millis(100);
/// More answers than this share without kernel stamps make the run one by the user's clock.
const MAX_UNSTAMPED: f64 = 0.01;
/// Room in the socket for when this process is not scheduled: at least so many bytes.
const BUFFER: usize = 4 << 20;
/// Failures of recvmsg in a row after which the socket is given up.
const MAX_FAILURES: u32 = 64;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Address or name.
    pub target: String,
    /// Resolve to IPv4 or IPv6 only.
    pub ipv6: Option<bool>,
    pub count: usize,
    pub interval: Duration,
    /// Payload bytes.
    pub size: usize,
    /// Port of a `mountain reflect`; ICMP echo without.
    pub udp: Option<u16>,
    pub device: Option<String>,
}

/// What is left of a measurement.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub run: RunFile,
    /// Further answers to a probe already answered.
    pub duplicates: u64,
    /// ICMP errors, and packets that could not be sent (they count as lost).
    pub errors: u64,
    /// The last of them, in words.
    pub last_error: Option<String>,
    /// Answers without both kernel stamps.
    pub unstamped: usize,
}

/// One probe; times in ns.
struct Probe {
    nonce: u64,
    sent: Instant,
    sent_real_ns: u64,
    tx_ns: Option<u64>,
    sched_ns: Option<u64>,
    answer: Option<Answer>,
}

struct Answer {
    rtt_ns: i64,
    user_ns: i64,
    directions: Option<(i64, i64)>,
    kernel_stamps: bool,
}

/// A socket that is ready, and what it has measured so far.
pub struct Pinger {
    options: Options,
    address: SocketAddr,
    socket: Socket,
    kind: Kind,
    opened: Instant,
    probes: Vec<Probe>,
    arrival: Vec<u32>,
    /// Probe index that the kernel's packet number 0 stands for.
    first_index: usize,
    devices: BTreeSet<u32>,
    duplicates: u64,
    errors: u64,
    last_error: Option<String>,
    failures: u32,
    slowest_ns: i64,
}

const STAMPING: Stamping = Stamping {
    rx: true,
    tx: true,
    tx_sched: true,
    hardware: false,
};

impl Options {
    /// Says what cannot work.
    fn check(&self) -> Result<()> {
        let (least, most, what) = match self.udp {
            Some(_) => (wire::PROBE_LEN, 9_000, "a UDP probe"),
            None => (wire::MIN_ECHO_LEN - 8, 65_000, "an echo request"),
        };
        ensure!(
            (least..=most).contains(&self.size),
            "--size {}: {what} carries {least} to {most} bytes",
            self.size
        );
        ensure!(self.count > 0, "--count 0: there is nothing to measure");
        ensure!(
            self.interval >= Duration::from_micros(10),
            "--interval {:?}: at least 10us",
            self.interval
        );
        Ok(())
    }

    fn resolve(&self) -> Result<SocketAddr> {
        let port = self.udp.unwrap_or(0);
        let name = self.target.trim_matches(['[', ']']);
        // A link-local address has the device as its scope.
        let scoped = match (name.parse(), &self.device) {
            (Ok(IpAddr::V6(ip)), Some(device)) if ip.is_unicast_link_local() => {
                format!("{name}%{device}")
            }
            _ => name.to_owned(),
        };
        let found: Vec<_> = (scoped.as_str(), port)
            .to_socket_addrs()
            .map_err(|e| anyhow!("cannot resolve {name:?}: {e}"))?
            .collect();
        let wanted = |a: &&SocketAddr| self.ipv6.is_none_or(|v6| a.is_ipv6() == v6);
        found.iter().find(wanted).copied().with_context(|| {
            let family = if self.ipv6 == Some(true) {
                "IPv6"
            } else {
                "IPv4"
            };
            format!("{name:?} has no {family} address")
        })
    }

    fn open(&self, address: SocketAddr, kind: Kind) -> io::Result<Socket> {
        socket::open(kind, self.device.as_deref(), None, address, STAMPING)
    }
}

impl Pinger {
    /// Resolves the name and opens the socket; what is wrong shows here, before anything is sent.
    pub fn new(options: Options) -> Result<Self> {
        options.check()?;
        if let Some(device) = &options.device {
            nix::net::if_::if_nametoindex(device.as_str())
                .map_err(|_| anyhow!("there is no device {device:?}"))?;
        }
        let address = options.resolve()?;
        let mut kind = match options.udp {
            Some(_) => Kind::Udp,
            None => Kind::IcmpEcho {
                ident: rand::random(),
            },
        };
        let mut opened = options.open(address, kind);
        let errno = |r: &io::Result<Socket>| r.as_ref().err().and_then(io::Error::raw_os_error);
        if options.udp.is_none() && errno(&opened) == Some(libc::EPERM) {
            kind = Kind::Ping;
            opened = options.open(address, kind);
            if matches!(errno(&opened), Some(libc::EACCES | libc::EPERM)) {
                bail!(
                    "no permission to send ICMP echo: run as root, give the program the \
                     capability (setcap cap_net_raw+ep), or allow your group with sysctl \
                     net.ipv4.ping_group_range; UDP probes (--udp PORT) need none of these"
                );
            }
        }
        let socket = opened
            .with_context(|| format!("cannot send to {} ({})", options.target, address.ip()))?;
        if kind == Kind::Ping {
            let local = socket.local_addr()?.as_socket();
            let ident = local.context("a ping socket without an address")?.port();
            ensure!(ident != 0, "the kernel gave the ping socket no identifier");
        }
        // What the limit does not allow is not essential.
        let _ = socket.set_recv_buffer_size(BUFFER);
        Ok(Self {
            options,
            address,
            socket,
            kind,
            opened: Instant::now(),
            probes: Vec::new(),
            arrival: Vec::new(),
            first_index: 0,
            devices: BTreeSet::new(),
            duplicates: 0,
            errors: 0,
            last_error: None,
            failures: 0,
            slowest_ns: 0,
        })
    }

    /// The address that is probed.
    pub fn address(&self) -> IpAddr {
        self.address.ip()
    }

    /// Measures until the count is reached and the answers are in, or SIGINT or SIGTERM arrives
    /// (a second one ends the wait for answers under way). `progress` is told the number of
    /// probes sent and each RTT, µs.
    ///
    /// # Errors
    /// Only when nothing was measured.
    pub fn run(mut self, mut progress: impl FnMut(usize, Option<f64>)) -> Result<Outcome> {
        let mut environment = environment::record();
        let mut signals = SigSet::empty();
        signals.add(Signal::SIGINT);
        signals.add(Signal::SIGTERM);
        signals.thread_block()?;
        let ended = SignalFd::with_flags(&signals, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
        std::thread::sleep(STAMPS_READY.saturating_sub(self.opened.elapsed()));

        let (start, started) = (Instant::now(), SystemTime::now());
        let mut interrupted = false;
        let mut next = start;
        while self.probes.len() < self.options.count && !interrupted {
            self.send();
            progress(self.probes.len(), None);
            // After a delay of our own there is no burst to catch up: the far end would see it.
            next = (next + self.options.interval).max(Instant::now());
            interrupted = self.wait_until(next, &ended, &mut progress, false)?;
        }
        let linger = LINGER.max(Duration::from_nanos(self.slowest_ns.max(0) as u64 * 2));
        self.wait_until(Instant::now() + linger, &ended, &mut progress, true)?;
        let seconds = start.elapsed().as_secs_f64();

        for &index in &self.devices {
            let mut name = [0; libc::IFNAMSIZ];
            if let Some(name) = device_name(index, &mut name) {
                environment::record_device(&mut environment, name);
            }
        }
        let (samples, clock, unstamped) = self.samples(start);
        let protocol = if self.options.udp.is_some() {
            "udp"
        } else {
            "icmp"
        };
        let run = RunFile {
            schema: SCHEMA.into(),
            label: None,
            tool: format!("mountain {} {protocol}", env!("CARGO_PKG_VERSION")),
            command: std::env::args().collect::<Vec<_>>().join(" "),
            target: self.options.target.clone(),
            started: humantime::format_rfc3339_millis(started).to_string(),
            seconds,
            interval_us: Some(self.options.interval.as_secs_f64() * 1e6),
            payload_bytes: Some(self.options.size as u32),
            clock: clock.into(),
            interrupted: self.probes.len() < self.options.count,
            samples,
            cpu: Default::default(),
            environment,
        };
        Ok(Outcome {
            run,
            duplicates: self.duplicates,
            errors: self.errors,
            last_error: self.last_error,
            unstamped,
        })
    }

    /// Sends the next probe. One that cannot be sent counts as lost, as for ping(8): traffic
    /// would not have left either.
    fn send(&mut self) {
        self.drain_errors();
        let id = ProbeId {
            nonce: rand::random(),
            index: self.probes.len() as u64,
        };
        let mut packet = vec![0; self.options.size];
        match self.kind {
            Kind::Udp => wire::write_request(&mut packet, id),
            Kind::IcmpEcho { .. } | Kind::Ping => {
                packet.resize(8 + self.options.size, 0);
                // The kernel puts in a ping socket's identifier.
                let ident = self.ident().unwrap_or(0);
                wire::write_echo_request(&mut packet, self.address.is_ipv6(), ident, id);
            }
        }
        // An ICMP error that is still pending would make send fail without sending.
        let _ = self.socket.take_error();
        let (sent_real_ns, sent) = (timestamp::realtime_ns(), Instant::now());
        let result = self.socket.send(&packet);
        self.probes.push(Probe {
            nonce: id.nonce,
            sent,
            sent_real_ns,
            tx_ns: None,
            sched_ns: None,
            answer: None,
        });
        if let Err(error) = result {
            self.errors += 1;
            self.last_error = Some(error.to_string());
            // Whether the failure used up a packet number depends on how far it got.
            self.drain_errors();
            self.first_index = self.probes.len();
            let _ = timestamp::set_stamping(&self.socket, Stamping::default())
                .and_then(|()| timestamp::set_stamping(&self.socket, STAMPING));
        }
    }

    /// Identifier of the echo requests; `None` for UDP.
    fn ident(&self) -> Option<u16> {
        match self.kind {
            Kind::IcmpEcho { ident } => Some(ident),
            Kind::Ping => Some(self.socket.local_addr().ok()?.as_socket()?.port()),
            Kind::Udp => None,
        }
    }

    /// Takes in answers until `deadline`, a signal (returns true) or, with `all`, until nothing
    /// is missing.
    fn wait_until(
        &mut self,
        deadline: Instant,
        ended: &SignalFd,
        progress: &mut impl FnMut(usize, Option<f64>),
        all: bool,
    ) -> Result<bool> {
        loop {
            self.receive(progress);
            if all && self.arrival.len() == self.probes.len() {
                return Ok(false);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let mut fds = [
                PollFd::new(self.socket.as_fd(), PollFlags::POLLIN),
                PollFd::new(ended.as_fd(), PollFlags::POLLIN),
            ];
            match ppoll(&mut fds, Some(TimeSpec::from_duration(left)), None) {
                Ok(0) => return Ok(false),
                Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                Err(e) => return Err(e).context("cannot wait for answers"),
            }
            if ended.read_signal()?.is_some() {
                return Ok(true);
            }
            // An entry on the error queue wakes poll too.
            self.drain_errors();
            if left.is_zero() {
                self.receive(progress);
                return Ok(false);
            }
        }
    }

    fn receive(&mut self, progress: &mut impl FnMut(usize, Option<f64>)) {
        // Room for an IPv4 header with options.
        let mut buffer = vec![0; self.options.size + 128];
        loop {
            match timestamp::receive(&self.socket, &mut buffer) {
                Ok(received) => {
                    self.failures = 0;
                    let (now, now_real_ns) = (Instant::now(), timestamp::realtime_ns());
                    let packet = &buffer[..received.len];
                    if let Some(ns) = self.answer(packet, &received, now, now_real_ns) {
                        progress(self.probes.len(), Some(ns as f64 / 1e3));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // A pending ICMP error: reading it cleared it, its text is on the error queue.
                Err(error) => {
                    self.drain_errors();
                    self.failures += 1;
                    if self.failures >= MAX_FAILURES {
                        self.last_error = Some(error.to_string());
                        return;
                    }
                }
            }
        }
    }

    /// Matches a packet to its probe; the RTT if it is a first answer, ns.
    fn answer(
        &mut self,
        packet: &[u8],
        received: &Received,
        now: Instant,
        now_real_ns: u64,
    ) -> Option<i64> {
        // A raw socket connected after its creation may hold what came before from elsewhere.
        if received.from?.ip() != self.address.ip() {
            return None;
        }
        let ipv6 = self.address.is_ipv6();
        let (id, reflected) = match self.kind {
            Kind::Udp => {
                let (id, reflected) = wire::parse_reply(packet)?;
                (id, Some((reflected.received_ns, reflected.sent_ns)))
            }
            Kind::IcmpEcho { ident } if !ipv6 => {
                let header = usize::from(packet.first()? & 0x0f) * 4;
                let message = packet.get(header..)?;
                (wire::parse_echo_message(false, message, ident)?, None)
            }
            Kind::IcmpEcho { .. } | Kind::Ping => {
                let id = wire::parse_echo_message(ipv6, packet, self.ident()?)?;
                (id, None)
            }
        };
        // The transmit stamp was queued before the packet left, so it is there by now.
        self.drain_errors();
        let at = usize::try_from(id.index).ok()?;
        let probe = self.probes.get_mut(at).filter(|p| p.nonce == id.nonce)?;
        if probe.answer.is_some() {
            self.duplicates += 1;
            return None;
        }
        let times = Times {
            user_ns: now.duration_since(probe.sent).as_nanos() as i64,
            t1_user: probe.sent_real_ns,
            sched: probe.sched_ns,
            t1: probe.tx_ns,
            t4: received.rx_ns,
            t4_user: now_real_ns,
            reflected,
        };
        let trip = times.round_trip();
        probe.answer = Some(Answer {
            rtt_ns: trip.rtt_ns,
            user_ns: times.user_ns,
            directions: trip.directions,
            kernel_stamps: trip.kernel_stamps,
        });
        self.slowest_ns = self.slowest_ns.max(times.user_ns);
        self.arrival.push(at as u32);
        self.devices.extend(received.ifindex);
        Some(trip.rtt_ns)
    }

    /// Takes in transmit stamps and ICMP errors.
    fn drain_errors(&mut self) {
        while let Ok(Some(event)) = timestamp::receive_error(&self.socket) {
            let first = self.first_index;
            match event {
                ErrorEvent::Sent { id, tx_ns, .. } => {
                    if let Some(probe) = self.probes.get_mut(first + id as usize) {
                        probe.tx_ns = tx_ns;
                    }
                }
                ErrorEvent::Scheduled { id, tx_ns } => {
                    if let Some(probe) = self.probes.get_mut(first + id as usize) {
                        probe.sched_ns = Some(tx_ns);
                    }
                }
                ErrorEvent::Unreachable { errno, from } => {
                    self.errors += 1;
                    let what = io::Error::from_raw_os_error(errno);
                    self.last_error = Some(match from {
                        Some(from) => format!("{from} says: {what}"),
                        None => what.to_string(),
                    });
                }
                ErrorEvent::Other => {}
            }
        }
    }

    /// The columns, by which clock `rtt_us` is, and how many answers lack kernel stamps.
    fn samples(&self, start: Instant) -> (Samples, &'static str, usize) {
        let us = |ns: i64| ns as f64 / 1e3;
        let answers = || self.probes.iter().filter_map(|p| p.answer.as_ref());
        let unstamped = answers().filter(|a| !a.kernel_stamps).count();
        // A column of two clocks would show their difference as variation.
        let kernel = unstamped as f64 <= MAX_UNSTAMPED * self.arrival.len() as f64;
        let column = |value: &dyn Fn(&Answer) -> Option<f64>| -> Vec<Option<f64>> {
            let of = |p: &Probe| p.answer.as_ref().and_then(value);
            self.probes.iter().map(of).collect()
        };
        // Relative to the least, in whole ns: the clocks may be years apart.
        let direction = |value: fn((i64, i64)) -> i64| -> Vec<Option<f64>> {
            let of = |a: &Answer| a.directions.map(value);
            let least = answers().filter_map(of).min();
            match (self.options.udp, least) {
                (Some(_), Some(least)) => column(&|a| of(a).map(|ns| us(ns.wrapping_sub(least)))),
                _ => Vec::new(),
            }
        };
        let samples = Samples {
            sent_us: self
                .probes
                .iter()
                .map(|p| us(p.sent.duration_since(start).as_nanos() as i64))
                .collect(),
            rtt_us: column(&|a| Some(us(if kernel { a.rtt_ns } else { a.user_ns }))),
            user_rtt_us: column(&|a| Some(us(a.user_ns))),
            forward_us: direction(|d| d.0),
            backward_us: direction(|d| d.1),
            arrival: if self.arrival.is_sorted() {
                Vec::new()
            } else {
                self.arrival.clone()
            },
        };
        (samples, if kernel { "kernel" } else { "user" }, unstamped)
    }
}

/// The name of a device, by if_indextoname(3).
fn device_name(index: u32, buffer: &mut [u8; libc::IFNAMSIZ]) -> Option<&str> {
    // SAFETY: the buffer has the size that the function asks for.
    let found = unsafe { libc::if_indextoname(index, buffer.as_mut_ptr().cast()) };
    if found.is_null() {
        return None;
    }
    let name = std::ffi::CStr::from_bytes_until_nul(buffer).ok()?;
    name.to_str().ok()
}

/// The tables of `rtt_us` and `user_rtt_us` (if there is such a column), with the same
/// thresholds: the ones given, or chosen by the first.
pub fn tables(samples: &Samples, thresholds_us: &[f64]) -> (Table, Option<Table>) {
    let sent = samples.len() as u64;
    let first = Table::new(sent, &samples.replies(&samples.rtt_us), thresholds_us);
    let same: Vec<f64> = first.over.iter().map(|o| o.threshold_us).collect();
    let user = (!samples.user_rtt_us.is_empty())
        .then(|| Table::new(sent, &samples.replies(&samples.user_rtt_us), &same));
    (first, user)
}

/// How many of the last probes in a row were lost.
pub fn silent_since(samples: &Samples) -> usize {
    samples
        .rtt_us
        .iter()
        .rev()
        .take_while(|r| r.is_none())
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_share_thresholds_and_keep_the_order_of_arrival() {
        let samples = Samples {
            sent_us: vec![0.0, 10.0, 20.0, 30.0],
            rtt_us: vec![Some(1000.0), Some(900.0), Some(5000.0), None],
            user_rtt_us: vec![Some(2000.0), Some(1900.0), Some(6000.0), None],
            arrival: vec![0, 2, 1],
            ..Samples::default()
        };
        let (kernel, user) = tables(&samples, &[]);
        let user = user.unwrap();
        assert_eq!((kernel.sent, kernel.count, kernel.reordered), (4, 3, 1));
        assert_eq!((user.count, user.reordered), (3, 1));
        let thresholds = |t: &Table| t.over.iter().map(|o| o.threshold_us).collect::<Vec<_>>();
        assert_eq!(thresholds(&kernel), thresholds(&user));
        assert_eq!(thresholds(&kernel)[0], 2000.0);
        assert_eq!(thresholds(&tables(&samples, &[7.0]).0), [7.0]);
        assert_eq!(silent_since(&samples), 1);
        let (none, user) = tables(&Samples::default(), &[]);
        assert_eq!((none.delays, user), (None, None));
    }

    #[test]
    fn what_cannot_work_is_said() {
        let options = Options {
            target: "127.0.0.1".into(),
            ipv6: None,
            count: 1,
            interval: Duration::from_millis(10),
            size: 56,
            udp: None,
            device: None,
        };
        options.check().unwrap();
        assert!(options.resolve().unwrap().is_ipv4());
        let refused = |change: fn(&mut Options), why: &str| {
            let mut bad = options.clone();
            change(&mut bad);
            let error = bad
                .check()
                .and_then(|()| bad.resolve().map(drop))
                .unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
        };
        refused(|o| o.count = 0, "--count 0");
        refused(|o| o.size = 8, "16 to 65000");
        refused(|o| (o.size, o.udp) = (40, Some(1)), "48 to 9000");
        refused(|o| o.interval = Duration::ZERO, "10us");
        refused(|o| o.ipv6 = Some(true), "no IPv6 address");
    }
}
