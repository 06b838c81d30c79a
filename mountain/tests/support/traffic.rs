// SPDX-License-Identifier: GPL-2.0-or-later
//! Traffic between the hosts, and what becomes of it.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::socket::{setsockopt, sockopt};

use super::{arrivals, wait_until, Net, Ns, Stop, Worker, LEAVE};

/// Sockets of a namespace; all wait for what they read as long as a busy machine may take.
impl Ns {
    /// A UDP socket at an address and port.
    pub fn udp(&self, local: &str) -> UdpSocket {
        let local: SocketAddr = local.parse().expect(local);
        let socket = self.with(move || UdpSocket::bind(local).unwrap());
        socket.set_read_timeout(Some(LEAVE)).unwrap();
        socket
    }

    pub fn listen(&self, local: &str) -> TcpListener {
        let local: SocketAddr = local.parse().expect(local);
        self.with(move || TcpListener::bind(local).unwrap())
    }

    /// A TCP connection, if there is one.
    pub fn try_connect(&self, to: &str) -> io::Result<TcpStream> {
        let to: SocketAddr = to.parse().expect(to);
        let stream = self.with(move || TcpStream::connect_timeout(&to, LEAVE))?;
        stream.set_read_timeout(Some(LEAVE))?;
        Ok(stream)
    }

    pub fn connect(&self, to: &str) -> TcpStream {
        self.try_connect(to).unwrap_or_else(|e| panic!("{to}: {e}"))
    }
}

/// Long enough for a verdict on [`Traffic`].
pub const HALF: Duration = Duration::from_millis(500);

/// What became of the packets of [`Traffic`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub sent: u32,
    /// Arrived at the server, by path.
    pub by_path: [u32; 2],
    /// Arrived after a later packet of the same flow.
    pub reordered: u32,
}

impl Counts {
    pub fn arrived(&self) -> u32 {
        self.by_path.iter().sum()
    }

    /// No more was lost than a single flow that is a moment late to move accounts for.
    pub fn nearly_all_arrived(&self) -> bool {
        self.sent > 0 && self.arrived() * 20 >= self.sent * 19
    }

    /// So much was lost that whole flows must have stayed in a black hole.
    pub fn many_lost(&self) -> bool {
        self.arrived() * 10 < self.sent * 9
    }

    /// Some arrived by either path.
    pub fn by_both(&self) -> bool {
        self.by_path.iter().all(|n| *n > 0)
    }

    /// Everything arrived.
    #[track_caller]
    pub fn assert_whole(self, what: &str) -> Self {
        assert_eq!(self.arrived(), self.sent, "{what}: {self:?}");
        self
    }

    /// Everything arrived, and in order.
    #[track_caller]
    pub fn assert_in_order(self, what: &str) -> Self {
        assert_eq!(self.reordered, 0, "{what}: {self:?}");
        self.assert_whole(what)
    }

    /// See [`Self::nearly_all_arrived`].
    #[track_caller]
    pub fn assert_arrived(self, what: &str) -> Self {
        assert!(self.nearly_all_arrived(), "{what}: {self:?}");
        self
    }

    /// Nearly all arrived, and by one path alone.
    #[track_caller]
    pub fn assert_by(self, path: usize, what: &str) -> Self {
        assert_eq!(self.by_path[1 - path], 0, "{what}: {self:?}");
        self.assert_arrived(what)
    }

    /// See [`Self::many_lost`].
    #[track_caller]
    pub fn assert_lost(self, what: &str) -> Self {
        assert!(self.many_lost(), "{what}: {self:?}");
        self
    }
}

/// What the threads of [`Traffic`] share.
#[derive(Default)]
struct Shared {
    /// The phase that is asked for, and the one that the sender is in.
    wanted: AtomicU32,
    entered: AtomicU32,
    /// How often the receiver has looked for a packet.
    looks: AtomicU32,
    phases: Mutex<Vec<Counts>>,
}

impl Shared {
    /// Has the counts of a phase changed, which may be a new one.
    fn count(&self, phase: usize, change: impl FnOnce(&mut Counts)) {
        let mut phases = self.phases.lock().unwrap();
        if phases.len() <= phase {
            phases.resize(phase + 1, Counts::default());
        }
        change(&mut phases[phase]);
    }

    fn counts(&self, phase: usize) -> Counts {
        let phases = self.phases.lock().unwrap();
        phases.get(phase).copied().unwrap_or_default()
    }
}

/// UDP flows from the client to the server, one packet of each every 5 ms; the server counts by
/// the device they came in on. Each packet carries the number of the phase it was sent in and is
/// counted there, however late it is read: a busy machine does not shift the counts.
pub struct Traffic {
    shared: Arc<Shared>,
    // In this order they end.
    _send: Worker<()>,
    _receive: Worker<()>,
}

/// Where [`Traffic`] goes.
pub const TRAFFIC_PORT: u16 = 7000;

impl Traffic {
    pub fn start(net: &Net, server: &str, flows: usize) -> Self {
        Self::between(&net.client, &net.server, server, flows, None)
    }

    /// Flows from any host, whose sockets are bound to `bind` (an address) or, with `%`, to a device.
    pub fn between(from: &Ns, to: &Ns, server: &str, flows: usize, bind: Option<&str>) -> Self {
        let shared = Arc::<Shared>::default();
        let server = SocketAddr::new(server.parse().unwrap(), TRAFFIC_PORT);
        let (socket, s0) = to.with(|| {
            let socket = UdpSocket::bind(server).expect("bind the server");
            arrivals::ask_devices(&socket);
            // Devices made anew have another index: whatever is not s0 is s1 then.
            (socket, nix::net::if_::if_nametoindex("s0").unwrap_or(0))
        });
        let counted = Arc::clone(&shared);
        let receive = Worker::start(move |stop| receive(&socket, s0, &counted, stop));
        let source = |_| source(server, bind);
        let sockets: Vec<UdpSocket> = from.with(|| (0..flows).map(source).collect());
        let counted = Arc::clone(&shared);
        let send = Worker::start(move |stop| send(&sockets, &counted, stop));
        Self {
            shared,
            _send: send,
            _receive: receive,
        }
    }

    /// Begins another phase; returns its number once the sender is in it.
    fn enter(&self) -> usize {
        let phase = self.shared.wanted.fetch_add(1, Ordering::SeqCst) + 1;
        wait_until("the sender goes on", LEAVE, || {
            self.shared.entered.load(Ordering::SeqCst) >= phase
        });
        phase as usize
    }

    /// What becomes of the packets sent from now on for `d`.
    pub fn during(&self, d: Duration) -> Counts {
        const QUIET: Duration = Duration::from_millis(300);
        let phase = self.enter();
        thread::sleep(d);
        self.enter();
        let looks = || self.shared.looks.load(Ordering::SeqCst);
        let (mut last, mut since, mut looked) = (0, Instant::now(), looks());
        loop {
            let counts = self.shared.counts(phase);
            if counts.arrived() != last {
                (last, since, looked) = (counts.arrived(), Instant::now(), looks());
            }
            // A receiver that waits for its CPU says nothing about the packets.
            let is_over = since.elapsed() > QUIET && looks() >= looked + 3;
            if counts.arrived() >= counts.sent || is_over {
                return counts;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends the traffic and returns everything.
    pub fn finish(self) -> Counts {
        let shared = Arc::clone(&self.shared);
        drop(self);
        let mut all = Counts::default();
        for phase in shared.phases.lock().unwrap().iter() {
            all.sent += phase.sent;
            all.reordered += phase.reordered;
            for (sum, n) in all.by_path.iter_mut().zip(phase.by_path) {
                *sum += n;
            }
        }
        all
    }
}

/// A packet of [`Traffic`]: number of the flow, of the packet, of the phase.
pub fn traffic_packet(flow: u32, seq: u32, phase: u32) -> [u8; 64] {
    let mut packet = [0; 64];
    for (bytes, word) in packet.chunks_mut(4).zip([flow, seq, phase]) {
        bytes.copy_from_slice(&word.to_be_bytes());
    }
    packet
}

/// The socket of a flow, in this thread's namespace.
fn source(server: SocketAddr, bind: Option<&str>) -> UdpSocket {
    let any = if server.is_ipv6() { "::" } else { "0.0.0.0" };
    let address = bind.filter(|b| !b.contains('%')).unwrap_or(any);
    let local: IpAddr = address.parse().unwrap();
    let socket = UdpSocket::bind((local, 0)).expect("bind");
    if let Some(device) = bind.and_then(|b| b.strip_prefix('%')) {
        setsockopt(&socket, sockopt::BindToDevice, &device.into()).expect("SO_BINDTODEVICE");
    }
    socket.connect(server).expect("a route to the server");
    socket
}

fn send(sockets: &[UdpSocket], shared: &Shared, stop: &Stop) {
    let mut seq = 0u32;
    let mut next = Instant::now();
    while !stop.is_set() {
        let phase = shared.wanted.load(Ordering::SeqCst);
        shared.entered.store(phase, Ordering::SeqCst);
        for (flow, s) in sockets.iter().enumerate() {
            if s.send(&traffic_packet(flow as u32, seq, phase)).is_ok() {
                shared.count(phase as usize, |counts| counts.sent += 1);
            }
        }
        seq += 1;
        next += Duration::from_millis(5);
        thread::sleep(next.saturating_duration_since(Instant::now()));
    }
}

fn receive(socket: &UdpSocket, s0: u32, shared: &Shared, stop: &Stop) {
    let pause = Some(Duration::from_millis(20));
    socket.set_read_timeout(pause).unwrap();
    let mut last: Vec<u32> = Vec::new();
    let mut quiet = 0;
    while quiet < 3 {
        let mut buffer = [0; 128];
        shared.looks.fetch_add(1, Ordering::SeqCst);
        let Some(packet) = arrivals::receive(socket, &mut buffer) else {
            quiet = if stop.is_set() { quiet + 1 } else { 0 };
            continue;
        };
        let word = |at: usize| u32::from_be_bytes(buffer[at..at + 4].try_into().unwrap());
        let (flow, seq) = (word(0) as usize, word(4));
        if last.len() <= flow {
            last.resize(flow + 1, 0);
        }
        let is_late = seq < last[flow];
        shared.count(word(8) as usize, |counts| {
            counts.by_path[usize::from(packet.ifindex != s0)] += 1;
            counts.reordered += u32::from(is_late);
        });
        last[flow] = last[flow].max(seq);
    }
}
