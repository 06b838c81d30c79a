// SPDX-License-Identifier: GPL-2.0-or-later
//! One target, measured from end to end: `mountain ping`.
//!
//! Probes leave at a steady pace; nothing is evaluated under way but for the progress display: the
//! samples are kept and turned into a [`RunFile`]. `packets`: ICMP echo and UDP, by kernel or
//! hardware timestamps; `connects`: TCP handshakes; `log`: what they have in common.
//!
//! Method: docs/measuring.md.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{anyhow, bail, ensure, Context, Result};

use super::environment;
use super::hardware::{self, InUse};
use super::runfile::{RunFile, SCHEMA};
use super::socket::with_scope;
use super::wire;
use crate::host::signals::{wait_readable, Asked};
use crate::netlink::{egress_route, link, EgressRoute};

mod connects;
mod log;
mod packets;

use connects::Connects;
pub(crate) use log::Clock;
use log::{ProbeLog, LINGER};
use packets::PingPackets;

/// Answers are waited for so long after the last probe while there is none, as ping(8) does: nothing tells how long the
/// path takes.
const SILENCE: Duration = Duration::from_secs(10);
/// Longer than any that measures; a sum with far more would overflow.
const LONGEST_INTERVAL: Duration = Duration::from_secs(86_400);
/// Shortest one to a reflector: its limit for one source would show as loss.
const REFLECTED_INTERVAL: Duration = Duration::from_millis(1);

/// Told the number of probes sent and, if it is about an answer, its RTT, µs.
type Progress<'a> = dyn FnMut(usize, Option<f64>) + 'a;

/// What to measure.
#[derive(Clone, Debug, Default)]
pub struct PingOptions {
    /// Address or name.
    pub target: String,
    /// Resolve to IPv4 or IPv6 only.
    pub ipv6: Option<bool>,
    /// Probes to send, unless it is interrupted.
    pub count: usize,
    /// Time between two probes.
    pub interval: Duration,
    /// Payload bytes; 0 with `tcp`.
    pub size: usize,
    /// Port of a `mountain reflect`.
    pub udp: Option<u16>,
    /// Port for TCP handshakes. ICMP echo without either.
    pub tcp: Option<u16>,
    /// Device to send by; the kernel chooses without.
    pub device: Option<String>,
    /// Source address; the kernel chooses without.
    pub source: Option<IpAddr>,
    /// The gateway that the probes must take, if not the target itself.
    pub gateway: Option<IpAddr>,
    /// Switch the device's own timestamps on if it has them, for as long as this takes.
    pub hardware: bool,
    /// "off", or the policy that steers in this network namespace; for the run file. `None`: unknown.
    pub steering: Option<String>,
}

/// What is left of a measurement.
#[derive(Clone, Debug)]
pub struct PingOutcome {
    /// As it is saved and compared.
    pub run: RunFile,
    /// Further answers to a probe already answered.
    pub duplicates: u64,
    /// ICMP errors, and probes that could not be sent (they count as lost).
    pub errors: u64,
    /// The last of them, in words.
    pub last_error: Option<String>,
    /// Answers without both kernel stamps.
    pub unstamped: usize,
    /// Whose stamps `rtt_us` is by, and why not the device's; as in the run file's environment.
    pub timestamps: String,
    /// TCP: answers that were refusals.
    pub refused: usize,
    /// TCP: lost probes whose connection was made by a SYN sent again.
    pub repeated: usize,
    /// A signal has asked to end, be it while the last answers were waited for.
    pub asked_to_end: bool,
}

/// How probes are made.
trait Probes {
    /// Waits until the answer to the first probe will be timed.
    fn wait_ready(&self) {}

    /// Sends the next probe.
    fn send(&mut self, log: &mut ProbeLog, progress: &mut Progress);

    /// Takes in the answers that are there.
    fn receive(&mut self, log: &mut ProbeLog, progress: &mut Progress);

    /// Readable when something has come.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Whether nothing more can come.
    fn is_complete(&self, log: &ProbeLog) -> bool {
        log.complete()
    }

    /// What has not come so long after its probe does not count.
    fn longest(&self) -> Duration {
        Duration::MAX
    }

    /// Takes in what can be told in the end only.
    fn finish(&mut self, log: &mut ProbeLog);
}

/// Until when answers are taken in.
#[derive(Clone, Copy)]
enum Until {
    /// The next probe is due.
    Next(Instant),
    /// Nothing is missing any more, or what is missing is lost. The last probe was sent at `since`; see
    /// [`ProbeLog::linger`].
    Answered { since: Instant, silence: Duration },
}

/// Everything ready to send, and what has been measured so far.
pub struct Pinger {
    options: PingOptions,
    address: SocketAddr,
    probes: Box<dyn Probes + Send>,
    log: ProbeLog,
    /// How the kernel said that it would send.
    way: Option<EgressRoute>,
    /// SIGINT, SIGTERM, SIGHUP and SIGQUIT: blocked before anything is switched on that must be switched back.
    ended: Asked,
    /// Why the device's own stamps are not used, or what keeps them on.
    hardware: Result<InUse, String>,
}

impl PingOptions {
    /// Says what cannot work.
    fn check(&self) -> Result<()> {
        let (least, most, what) = match (self.udp, self.tcp) {
            (Some(_), Some(_)) => bail!("a probe is either of UDP or of TCP"),
            (Some(_), None) => (wire::PROBE_LEN, 9_000, "a UDP probe"),
            (None, Some(_)) => (0, 0, "a TCP handshake"),
            (None, None) => (wire::MIN_ECHO_LEN - 8, 65_000, "an echo request"),
        };
        ensure!(
            (least..=most).contains(&self.size),
            "--size {}: {what} carries {least} to {most} bytes",
            self.size
        );
        ensure!(
            !self.hardware || self.device.is_some(),
            "--hardware changes a device: say which with --dev or --path"
        );
        ensure!(
            self.tcp != Some(0),
            "--tcp 0: choose a port from 1 to 65535"
        );
        ensure!(
            self.udp != Some(0),
            "--udp 0: choose a port from 1 to 65535"
        );
        ensure!(self.count > 0, "--count 0: there is nothing to measure");
        ensure!(
            (Duration::from_micros(10)..=LONGEST_INTERVAL).contains(&self.interval),
            "--interval {:?}: at least 10us, at most a day",
            self.interval
        );
        ensure!(
            self.udp.is_none() || self.interval >= REFLECTED_INTERVAL,
            "--interval {:?}: `mountain reflect` answers 1,000 probes a second of one source, so at least 1ms with --udp",
            self.interval
        );
        Ok(())
    }

    fn resolve(&self) -> Result<SocketAddr> {
        let port = self.udp.or(self.tcp).unwrap_or(0);
        let name = name_of(&self.target);
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
        let address = found.iter().find(wanted).copied().with_context(|| {
            let family = ["IPv4", "IPv6"][usize::from(self.ipv6 == Some(true))];
            format!("{name:?} has no {family} address")
        })?;
        // The kernel would send to this host, and answers come from the loopback address. Who blocks names by DNS
        // answers so, too, which is nothing to measure.
        let own = match address.ip() {
            IpAddr::V4(_) => "127.0.0.1",
            IpAddr::V6(_) => "::1",
        };
        ensure!(
            !is_link_local(address.ip()) || scope(address).is_some(),
            "{name} is valid on one link only: say on which, as {name}%eth0 or by --dev"
        );
        ensure!(
            !address.ip().is_unspecified(),
            "{name:?} means {}, which is no host's address: to measure this host itself, say {own}",
            address.ip()
        );
        Ok(address)
    }

    /// The source to bind to; a link-local one is on the device.
    fn source_address(&self) -> Option<SocketAddr> {
        let device = self.device.as_deref();
        let ifindex = device.and_then(|name| nix::net::if_::if_nametoindex(name).ok());
        let source = SocketAddr::new(self.source?, 0);
        Some(with_scope(source, ifindex.unwrap_or(0)))
    }

    /// Makes the device's stamps ready; why not, in words.
    fn hardware(&self, way: Option<EgressRoute>) -> Result<(u32, InUse), String> {
        let way = way.ok_or("the device is not known")?;
        let name = link::name(way.ifindex).ok_or("the device is not known")?;
        let in_use = hardware::prepare(&name, self.hardware)?;
        if self.device.is_none() {
            // Which device an unbound socket sends by can change under way.
            return Err(format!("for those of {name}, say --dev {name}"));
        }
        Ok((way.ifindex, in_use))
    }
}

impl Pinger {
    /// Resolves the name and opens the sockets; what is wrong shows here, before anything is sent.
    pub fn new(options: PingOptions) -> Result<Self> {
        options.check()?;
        let index = |device: &String| {
            let found = nix::net::if_::if_nametoindex(device.as_str());
            found.map_err(|_| anyhow!("there is no device {device:?}"))
        };
        let ifindex = options.device.as_ref().map(index).transpose()?;
        let address = options.resolve()?;
        let way = egress_route(address.ip(), ifindex.or(scope(address)), options.source);
        if let Some(gateway) = options.gateway {
            let way = way.as_ref().map_err(|e| {
                let device = options.device.as_deref().unwrap_or("its device");
                anyhow!(
                    "the kernel does not say how it sends to {} over {device}, so whether by the \
                     path's gateway {gateway} is not known: {e}",
                    address.ip()
                )
            })?;
            check_gateway(&options, address.ip(), gateway, *way)?;
        }
        // Without a route, opening the socket says what is wrong.
        let way = way.ok();
        let ended = Asked::to_end()?;
        let (probes, hardware): (Box<dyn Probes + Send>, _) = if options.tcp.is_some() {
            let connects = Connects::open(&options, address)?;
            let none = "TCP handshakes get no hardware timestamps".into();
            (Box::new(connects), Err(none))
        } else {
            let (clock, hardware) = match options.hardware(way) {
                Ok((ifindex, in_use)) => (Some(ifindex), Ok(in_use)),
                Err(why) => (None, Err(why)),
            };
            let packets = PingPackets::open(&options, address, clock)?;
            (Box::new(packets), hardware)
        };
        Ok(Self {
            options,
            address,
            probes,
            log: ProbeLog::default(),
            way,
            ended,
            hardware,
        })
    }

    /// The address that is probed.
    pub(crate) fn address(&self) -> IpAddr {
        self.address.ip()
    }

    /// The same as a target, without a name to be looked up.
    pub(crate) fn numeric_target(&self) -> String {
        numeric(self.address)
    }

    /// Measures until the count is reached and the answers are in, or SIGINT or SIGTERM arrives
    /// (a second one ends the wait for answers under way). `progress` is told the number of
    /// probes sent and each RTT, µs.
    ///
    /// # Errors
    /// Only when nothing was measured.
    pub fn run(mut self, mut progress: impl FnMut(usize, Option<f64>)) -> Result<PingOutcome> {
        let environment = environment::record(self.options.steering.as_deref());
        self.probes.wait_ready();

        let (start, started) = (Instant::now(), SystemTime::now());
        let mut interrupted = false;
        let mut next = start;
        while self.log.probes.len() < self.options.count && !interrupted {
            self.probes.send(&mut self.log, &mut progress);
            progress(self.log.probes.len(), None);
            if self.log.probes.len() == self.options.count {
                break;
            }
            // After a delay of our own there is no burst to catch up: the far end would see it.
            next = (next + self.options.interval).max(Instant::now());
            interrupted = self.wait_until(Until::Next(next), &mut progress)?;
        }
        // Who has asked to end does not wait for a target that may be dead.
        let silence = if interrupted { LINGER } else { SILENCE };
        let since = Instant::now();
        let asked = self.wait_until(Until::Answered { since, silence }, &mut progress)?;
        let seconds = start.elapsed().as_secs_f64();
        let outcome = self.finish(environment, start, started, seconds)?;
        Ok(PingOutcome {
            asked_to_end: interrupted || asked,
            ..outcome
        })
    }

    fn finish(
        mut self,
        mut environment: environment::Environment,
        start: Instant,
        started: SystemTime,
        seconds: f64,
    ) -> Result<PingOutcome> {
        self.probes.finish(&mut self.log);
        if self.options.tcp.is_some() {
            // A connection does not tell which device its answers come by.
            self.log.devices.extend(self.way.map(|w| w.ifindex));
        }
        let log = &self.log;
        for name in log.devices.iter().filter_map(|&i| link::name(i)) {
            environment::record_device(&mut environment, &name);
        }
        let (clock, unstamped) = log.clock();
        let samples = log.samples(start, clock);
        let answered = samples.rtt_us.iter().flatten().count();
        let timestamps = match (&self.hardware, clock) {
            (_, Clock::Hardware) => "hardware".into(),
            (Err(why), _) => format!("software ({why})"),
            (Ok(_), _) => "software (answers without hardware timestamps on both ways)".into(),
        };
        environment.insert("timestamps".into(), timestamps.as_str().into());
        if name_of(&self.options.target).parse::<IpAddr>().is_err() {
            // A name may mean another host the next time.
            let address = self.address.ip().to_string();
            environment.insert("address".into(), address.into());
        }
        if self.options.tcp.is_some() && answered > 0 {
            let answers = match log.refused {
                0 => "accepted",
                n if n == answered => "refused",
                _ => "accepted and refused",
            };
            environment.insert("tcp.answers".into(), answers.into());
        }
        let protocol = match (self.options.udp, self.options.tcp) {
            (Some(_), _) => "udp",
            (_, Some(_)) => "tcp",
            _ => "icmp",
        };
        let run = RunFile {
            schema: SCHEMA.into(),
            label: None,
            tool: format!("mountain {} {protocol}", env!("CARGO_PKG_VERSION")),
            command: environment::command_line(),
            target: self.options.target.clone(),
            started: humantime::format_rfc3339_millis(started).to_string(),
            seconds,
            interval_us: Some(self.options.interval.as_secs_f64() * 1e6),
            payload_bytes: Some(self.options.size as u32),
            clock: clock.name().into(),
            interrupted: log.probes.len() < self.options.count,
            samples,
            cpu: Default::default(),
            environment,
        };
        Ok(PingOutcome {
            run,
            duplicates: log.duplicates,
            errors: log.errors,
            last_error: log.last_error.clone(),
            unstamped,
            timestamps,
            refused: log.refused,
            repeated: log.repeated,
            asked_to_end: false,
        })
    }

    /// Takes in answers until then, or until a signal (returns true).
    fn wait_until(&mut self, until: Until, progress: &mut Progress) -> Result<bool> {
        loop {
            self.probes.receive(&mut self.log, progress);
            let deadline = match until {
                Until::Next(at) => at,
                Until::Answered { .. } if self.probes.is_complete(&self.log) => return Ok(false),
                // An answer that has just come may have shown that the path takes longer, or less long.
                Until::Answered { since, silence } => {
                    since + self.log.linger(silence).min(self.probes.longest())
                }
            };
            let left = deadline.saturating_duration_since(Instant::now());
            let fds = [self.probes.fd(), self.ended.as_fd()];
            if !wait_readable(&fds, left).context("cannot wait for answers")? {
                return Ok(false);
            }
            if self.ended.has_come()? {
                return Ok(true);
            }
            if left.is_zero() {
                self.probes.receive(&mut self.log, progress);
                return Ok(false);
            }
        }
    }
}

/// A path is a device and a gateway, and a socket can be bound to the device alone: whether its
/// packets take the gateway is the routing table's choice.
fn check_gateway(
    options: &PingOptions,
    target: IpAddr,
    gateway: IpAddr,
    way: EgressRoute,
) -> Result<()> {
    if target == gateway || way.gateway == Some(gateway) {
        return Ok(());
    }
    let device = options.device.as_deref().unwrap_or("its device");
    match way.gateway {
        Some(other) => bail!(
            "over {device} the kernel sends to {target} by {other}, not by the path's gateway \
             {gateway}: a route to {target} via {gateway} is missing"
        ),
        None => bail!(
            "{target} is on the link of {device} itself: packets to it do not take the path's \
             gateway {gateway}"
        ),
    }
}

/// A target without the brackets that an address of IPv6 may have.
fn name_of(target: &str) -> &str {
    target.trim_matches(['[', ']'])
}

fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

/// The device that a link-local address is on.
fn scope(address: SocketAddr) -> Option<u32> {
    match address {
        SocketAddr::V6(a) => Some(a.scope_id()).filter(|id| *id != 0),
        SocketAddr::V4(_) => None,
    }
}

/// An address as a target, with its device where it is link-local.
fn numeric(address: SocketAddr) -> String {
    match scope(address) {
        Some(device) => format!("{}%{device}", address.ip()),
        None => address.ip().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_local_target_keeps_its_device() {
        for (target, device) in [
            ("fe80::1%lo", Some(1)),
            ("[::1]", None),
            ("127.0.0.1", None),
        ] {
            let mut options = PingOptions {
                target: target.into(),
                ..PingOptions::default()
            };
            let address = options.resolve().unwrap();
            assert_eq!(scope(address), device, "{target}");
            options.target = numeric(address);
            assert_eq!(options.resolve().unwrap(), address, "{target}");
        }
    }

    #[test]
    fn what_cannot_work_is_said() {
        let options = PingOptions {
            target: "127.0.0.1".into(),
            ipv6: None,
            count: 1,
            interval: Duration::from_millis(10),
            size: 56,
            ..PingOptions::default()
        };
        options.check().unwrap();
        assert!(options.resolve().unwrap().is_ipv4());
        let refused = |change: fn(&mut PingOptions), why: &str| {
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
        refused(|o| o.tcp = Some(1), "0 to 0");
        refused(|o| o.hardware = true, "--dev or --path");
        refused(|o| (o.size, o.tcp) = (0, Some(0)), "--tcp 0: choose");
        refused(|o| o.udp = Some(0), "--udp 0: choose");
        refused(|o| (o.udp, o.tcp) = (Some(1), Some(1)), "either");
        refused(|o| o.interval = Duration::ZERO, "10us");
        refused(|o| o.interval = Duration::MAX, "at most a day");
        refused(|o| o.ipv6 = Some(true), "no IPv6 address");
        refused(|o| o.target = "0".into(), "means 0.0.0.0");
        refused(|o| o.target = "0.0.0.0".into(), "say 127.0.0.1");
        refused(|o| o.target = "::".into(), "say ::1");
    }
}
