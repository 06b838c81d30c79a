// SPDX-License-Identifier: GPL-2.0-or-later
//! The far end of UDP probes: `mountain reflect`.
//!
//! Answers each valid request (format: [`super::wire`]) with its kernel receive stamp and the
//! time of sending, from the address and over the device it was reached at, with the request's
//! DSCP. A reply is as long as its request, each source has a rate limit, and replies are never
//! answered, so it is of no use for amplification or loops. It listens where it is told to;
//! the default is loopback only.
//!
//! A client that sends back the cookie of its last reply ([`super::cookie`]) is *known*: its address is not
//! forged. Known clients have a receive queue, a memory and a rate limit of their own, so that a flood of
//! forged requests takes nothing from them.

use std::collections::HashMap;
use std::convert::Infallible;
use std::hash::Hash;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Instant;

use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use tokio::io::unix::AsyncFd;
use tokio::io::Interest;

use super::cookie::Key;
use super::socket;
use super::timestamp::{self, Received};
use super::wire::{self, Reflected};

/// Where it listens unless told otherwise: both loopback addresses, one [`Reflector`] each.
pub const DEFAULT_LISTEN: [SocketAddr; 2] = [
    SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), wire::DEFAULT_PORT),
    SocketAddr::new(IpAddr::V6(Ipv6Addr::LOCALHOST), wire::DEFAULT_PORT),
];

/// Longest request that is answered, bytes of payload: an Ethernet jumbo frame's.
const MAX_PROBE_LEN: usize = 9_000;
/// After so many packets of clients that are not known, the known ones and other tasks get a turn.
const BATCH: usize = 64;
/// And so many of known ones, so that one of them does not keep new ones out.
const KNOWN_BATCH: usize = 4 * BATCH;
/// So many failures of recvmsg in a row mean that the socket is broken.
const MAX_FAILURES: u32 = 100;

/// How much is answered.
#[derive(Clone, Copy, Debug)]
struct AnswerLimits {
    /// Sustained replies per second to one source: an IPv4 address or an IPv6 /64. The default,
    /// 1000, allows 50 paths at 50 ms or one `mountain ping` at 1 ms.
    source_per_s: f64,
    /// Replies per second in total to known clients, and as many to others.
    total_per_s: f64,
    /// Seconds' worth of replies that may come in a burst.
    burst_s: f64,
    /// Sources remembered, known ones and others each.
    sources: usize,
}

impl Default for AnswerLimits {
    fn default() -> Self {
        Self {
            source_per_s: 1_000.0,
            total_per_s: 20_000.0,
            burst_s: 0.2,
            sources: 8_192,
        }
    }
}

/// One listening address.
pub struct Reflector {
    /// For whoever is not known; its index in the group of sockets is 0.
    others: AsyncFd<Socket>,
    known: AsyncFd<Socket>,
    answerer: Answerer,
}

impl Reflector {
    /// Listens on `address`; an IPv6 one, `[::]` included, takes IPv6 only. Call it inside a
    /// tokio runtime.
    ///
    /// # Errors
    /// EADDRINUSE and what else bind(2) says.
    pub fn bind(address: SocketAddr) -> io::Result<Self> {
        let ip = address.ip();
        if ip.is_multicast() || ip == Ipv4Addr::BROADCAST {
            let why = "nobody can answer from a group's address";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        // Sockets that share a port do not notice one that somebody else shares, too.
        drop(listen(address, false)?);
        let others = listen(address, true)?;
        let address = address_of(&others)?;
        let known = listen(address, true)?;
        let key = Key::random();
        // Without it the kernel spreads clients over both: they are told apart all the same.
        if let Err(error) = key.attach(&others, address.is_ipv6()) {
            tracing::warn!("cannot give known clients a queue of their own: {error}");
        }
        Ok(Self {
            others: timestamp::watch(others)?,
            known: timestamp::watch(known)?,
            answerer: Answerer::new(AnswerLimits::default(), key, Instant::now()),
        })
    }

    /// The address it listens on, with the port that was chosen if 0 was asked for.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        address_of(self.others.get_ref())
    }

    /// Answers until the future is dropped.
    ///
    /// # Errors
    /// Only if a socket itself keeps failing.
    pub async fn run(&mut self) -> io::Result<Infallible> {
        let mut buffer = vec![0; MAX_PROBE_LEN];
        let mut failures = 0;
        loop {
            tokio::select! {
                ready = self.known.readable() => ready?.retain_ready(),
                ready = self.others.readable() => ready?.retain_ready(),
            }
            for (fd, batch) in [(&self.known, KNOWN_BATCH), (&self.others, BATCH)] {
                for _ in 0..batch {
                    match fd.try_io(Interest::READABLE, |socket| {
                        timestamp::receive(socket, &mut buffer)
                    }) {
                        Ok(received) => {
                            failures = 0;
                            self.answerer.handle(fd.get_ref(), &mut buffer, &received);
                        }
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                        Err(error) => {
                            failures += 1;
                            if failures > MAX_FAILURES {
                                return Err(error);
                            }
                        }
                    }
                }
            }
            tokio::task::yield_now().await;
        }
    }
}

fn address_of(socket: &Socket) -> io::Result<SocketAddr> {
    let address = socket.local_addr()?.as_socket();
    address.ok_or_else(|| io::Error::other("not an IP socket"))
}

/// A socket on `address`, alone or beside others that share the port.
fn listen(address: SocketAddr, shared: bool) -> io::Result<Socket> {
    let ipv6 = address.is_ipv6();
    let domain = Domain::for_address(address);
    let socket = Socket::new(domain, Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_nonblocking(true)?;
    socket.set_reuse_port(shared)?;
    if ipv6 {
        socket.set_only_v6(true)?;
    }
    timestamp::set_details(&socket, ipv6, false)?;
    timestamp::set_stamping(&socket, timestamp::RECEIVED)?;
    socket.bind(&SockAddr::from(address))?;
    Ok(socket)
}

/// Everything but the sockets.
struct Answerer {
    limits: AnswerLimits,
    key: Key,
    known: Clients,
    others: Clients,
}

/// Clients that are known, or those that are not.
struct Clients {
    total: Bucket,
    sources: Recent<IpAddr, Bucket>,
    counts: Recent<SocketAddr, u32>,
}

impl Clients {
    fn new(capacity: usize, now: Instant) -> Self {
        Self {
            total: Bucket::new(now),
            sources: Recent::new(capacity),
            counts: Recent::new(capacity),
        }
    }
}

/// What is answered: whom, from which address, over which device.
#[derive(Debug, PartialEq)]
struct Accepted {
    from: SocketAddr,
    /// Own address, and index of the device.
    by: (IpAddr, u32),
    cookie: u32,
    is_known: bool,
}

impl Answerer {
    fn new(limits: AnswerLimits, key: Key, now: Instant) -> Self {
        Self {
            limits,
            key,
            known: Clients::new(limits.sources, now),
            others: Clients::new(limits.sources, now),
        }
    }

    fn handle(&mut self, socket: &Socket, buffer: &mut [u8], received: &Received) {
        let Some(accepted) = self.accept(buffer, received, Instant::now()) else {
            return;
        };
        let packet = &mut buffer[..received.len];
        let count = self.count(&accepted);
        let sent_ns = timestamp::realtime_ns();
        let reflected = Reflected {
            // The very first packets may come without a stamp.
            received_ns: received.rx_ns.unwrap_or(sent_ns),
            sent_ns,
            count,
            hop_limit: received.hop_limit,
            tos: received.tos.unwrap_or(0),
        };
        wire::make_reply(packet, reflected, accepted.cookie);
        // What the kernel does not send is lost, as it could be on the way.
        let _ = socket::send_from(socket, packet, accepted.from, accepted.by, reflected.tos);
    }

    /// Requests of this client so far, this one included, from before it was known, too.
    fn count(&mut self, accepted: &Accepted) -> u32 {
        let Self { known, others, .. } = self;
        let from = accepted.from;
        let count = match accepted.is_known {
            true => (known.counts).entry(from, || others.counts.take(&from).unwrap_or(0)),
            false => others.counts.entry(from, || 0),
        };
        *count = count.wrapping_add(1);
        *count
    }

    /// Whether to answer, and whom.
    fn accept(&mut self, buffer: &[u8], received: &Received, now: Instant) -> Option<Accepted> {
        let packet = &buffer[..received.len];
        let addresses = received.from.zip(received.local.zip(received.ifindex));
        // A truncated request cannot be answered at its own length; one to a broadcast or
        // multicast address would make many answer one.
        let valid = !received.truncated
            && received.destination == received.local
            && wire::parse_request(packet).is_some();
        let (from, by) = addresses.filter(|(from, _)| valid && from.port() != 0)?;
        let limits = self.limits;
        let cookie = self.key.cookie(from.ip());
        let is_known = wire::cookie(packet) == cookie;
        let clients = match is_known {
            true => &mut self.known,
            false => &mut self.others,
        };
        let source = clients
            .sources
            .entry(source_key(from.ip()), || Bucket::new(now));
        // The source's own limit first: one greedy source must not use up the total.
        let within_limits = source.take(now, limits.source_per_s, limits.burst_s)
            && clients.total.take(now, limits.total_per_s, limits.burst_s);
        within_limits.then_some(Accepted {
            from,
            by,
            cookie,
            is_known,
        })
    }
}

/// An IPv6 host can use any address of its /64, so that is one source.
fn source_key(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(_) => ip,
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64).into(),
    }
}

/// A token bucket whose rate is passed in, so that it is two words.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    /// Tokens used up, at time `at`; 0 is full.
    used: f64,
    at: Instant,
}

impl Bucket {
    fn new(now: Instant) -> Self {
        Self { used: 0.0, at: now }
    }

    /// Takes a token if there is one.
    fn take(&mut self, now: Instant, per_s: f64, burst_s: f64) -> bool {
        let refill = now.saturating_duration_since(self.at).as_secs_f64() * per_s;
        self.used = (self.used - refill).max(0.0);
        self.at = now;
        let free = self.used + 1.0 <= (per_s * burst_s).max(1.0);
        self.used += f64::from(u8::from(free));
        free
    }
}

/// A map that remembers between `capacity`/2 and `capacity` most recently used keys, in constant
/// time: when the young half is full it becomes the old half, whose entries are forgotten unless
/// used again. Forged sources can thus neither fill the memory nor lock anyone out.
struct Recent<K, V> {
    young: HashMap<K, V>,
    old: HashMap<K, V>,
    capacity: usize,
}

impl<K: Hash + Eq, V> Recent<K, V> {
    fn new(capacity: usize) -> Self {
        Self {
            young: HashMap::new(),
            old: HashMap::new(),
            capacity,
        }
    }

    fn entry(&mut self, key: K, new: impl FnOnce() -> V) -> &mut V {
        if self.young.len() >= (self.capacity / 2).max(1) && !self.young.contains_key(&key) {
            self.old = std::mem::take(&mut self.young);
        }
        let old = &mut self.old;
        match self.young.entry(key) {
            std::collections::hash_map::Entry::Occupied(found) => found.into_mut(),
            std::collections::hash_map::Entry::Vacant(place) => {
                let value = old.remove(place.key()).unwrap_or_else(new);
                place.insert(value)
            }
        }
    }

    fn take(&mut self, key: &K) -> Option<V> {
        self.young.remove(key).or_else(|| self.old.remove(key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::wire::{ProbeId, PROBE_LEN};
    use std::time::Duration;

    fn request() -> [u8; PROBE_LEN] {
        request_with(0)
    }

    fn request_with(cookie: u32) -> [u8; PROBE_LEN] {
        let mut packet = [0; PROBE_LEN];
        wire::write_request(&mut packet, ProbeId { nonce: 1, index: 2 }, cookie);
        packet
    }

    fn received(from: &str) -> Received {
        let local = Some("192.0.2.1".parse().unwrap());
        Received {
            len: PROBE_LEN,
            from: Some(from.parse().unwrap()),
            ifindex: Some(3),
            destination: local,
            local,
            ..Received::default()
        }
    }

    #[test]
    fn a_source_is_limited_and_others_are_not() {
        let now = Instant::now();
        let limits = AnswerLimits {
            source_per_s: 100.0,
            burst_s: 0.1,
            ..AnswerLimits::default()
        };
        let mut answerer = Answerer::new(limits, Key::random(), now);
        let mut accepted = |from: &str, at_ms: u64| {
            let at = now + Duration::from_millis(at_ms);
            usize::from(answerer.accept(&request(), &received(from), at).is_some())
        };
        let burst: usize = (0..50)
            .map(|n| accepted(&format!("198.51.100.1:{}", 1000 + n), 0))
            .sum();
        assert_eq!(burst, 10, "the limit is per address, whatever the port");
        assert_eq!(accepted("198.51.100.2:1000", 0), 1);
        let second: usize = (0..1000)
            .map(|ms| accepted("198.51.100.1:1000", 1 + ms))
            .sum();
        assert!((99..=101).contains(&second), "{second}");
        let v6: usize = (0..50)
            .map(|n| accepted(&format!("[2001:db8::{n:x}]:5"), 2000))
            .sum();
        assert_eq!(v6, 10, "a /64 is one source");
        assert_eq!(accepted("[2001:db8:0:1::1]:5", 2000), 1);
    }

    #[test]
    fn the_total_is_limited() {
        let now = Instant::now();
        let limits = AnswerLimits {
            total_per_s: 50.0,
            burst_s: 0.1,
            ..AnswerLimits::default()
        };
        let mut answerer = Answerer::new(limits, Key::random(), now);
        let got = (0..200)
            .filter(|n| {
                let from = received(&format!("198.51.100.{n}:9"));
                answerer.accept(&request(), &from, now).is_some()
            })
            .count();
        assert_eq!(got, 5);
    }

    /// A hundred thousand forged sources in the time of one honest probe, with and without made-up cookies.
    #[test]
    fn forged_sources_take_nothing_from_known_clients() {
        let now = Instant::now();
        let mut answerer = Answerer::new(AnswerLimits::default(), Key::random(), now);
        let honest = received("198.51.100.1:7");
        let first = answerer.accept(&request(), &honest, now).unwrap();
        assert!(!first.is_known);
        assert_eq!(answerer.count(&first), 1);
        for probe in 0..5 {
            let at = now + Duration::from_millis(50 * (probe + 1));
            for n in 0..100_000u32 {
                let from = received(&format!("10.{}.{}.{}:9", n >> 16, n >> 8 & 255, n & 255));
                let forged = request_with(n % 2 * n);
                let accepted = answerer.accept(&forged, &from, at);
                let Some(accepted) = accepted else { continue };
                assert!(!accepted.is_known);
                answerer.count(&accepted);
            }
            let known = answerer.accept(&request_with(first.cookie), &honest, at);
            let known = known.expect("a known client is answered");
            assert!(known.is_known);
            assert_eq!(u64::from(answerer.count(&known)), probe + 2);
        }
        let elsewhere = received("198.51.100.2:7");
        let theirs = request_with(first.cookie);
        assert_ne!(first.cookie, 0);
        let later = now + Duration::from_secs(10);
        let other = answerer.accept(&theirs, &elsewhere, later).unwrap();
        assert!(!other.is_known, "another's cookie");
    }

    #[test]
    fn a_client_that_becomes_known_is_counted_on() {
        let now = Instant::now();
        let mut answerer = Answerer::new(AnswerLimits::default(), Key::random(), now);
        let from = received("198.51.100.1:7");
        let first = answerer.accept(&request(), &from, now).unwrap();
        assert_eq!(answerer.count(&first), 1);
        let second = answerer.accept(&request_with(first.cookie), &from, now);
        assert_eq!(answerer.count(&second.unwrap()), 2);
    }

    #[test]
    fn junk_is_not_answered() {
        let now = Instant::now();
        let mut answerer = Answerer::new(AnswerLimits::default(), Key::random(), now);
        let good = received("198.51.100.1:7");
        let but = |change: fn(&mut Received)| {
            let mut received = good.clone();
            change(&mut received);
            received
        };
        let broadcast = but(|r| r.destination = Some("192.0.2.255".parse().unwrap()));
        let short = but(|r| r.len -= 1);
        let truncated = but(|r| r.truncated = true);
        let port_0 = received("198.51.100.1:0");
        for bad in [&broadcast, &short, &truncated, &port_0] {
            assert_eq!(answerer.accept(&request(), bad, now), None);
        }
        let mut reply = request();
        reply[5] = 2;
        let answered = answerer.accept(&reply, &good, now);
        assert_eq!(answered, None, "replies are never answered");
        assert!(answerer.accept(&request(), &good, now).is_some());
    }

    #[test]
    fn memory_is_bounded_and_recent_keys_stay() {
        let mut map = Recent::new(100);
        for n in 0..10_000u32 {
            *map.entry(n, || 0) += 1;
            *map.entry(u32::MAX, || 0) += 1;
            assert!(map.young.len() + map.old.len() <= 100);
        }
        assert_eq!(*map.entry(u32::MAX, || 0), 10_000, "in use all the time");
        assert_eq!(*map.entry(1, || 0), 0, "forgotten");
    }
}
