//! A client and a server namespace joined by two paths, and traffic between them.
//!
//! ```text
//!   client  u0 10.30.0.1 ---- 10.30.0.2 s0  server
//!           u1 10.30.1.1 ---- 10.30.1.2 s1
//!           lo 10.98.0.1      10.98.1.1 lo
//! ```
//!
//! Likewise fd30:<i>::/64 and fd98:<0|1>::1. Everything has a name of its own and goes in `Drop`.

#![allow(dead_code)]

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::sched::{setns, CloneFlags};
use serde_json::Value;

pub const MOUNTAIN: &str = env!("CARGO_BIN_EXE_mountain");
pub const SERVER4: &str = "10.98.1.1";
pub const SERVER6: &str = "fd98:1::1";
pub const CLIENT4: &str = "10.98.0.1";
/// Well over the 300 ms that leaving a dead path may take, and what any start may take: the figure
/// is the lab's to measure, here a busy machine has its time.
pub const LEAVE: Duration = Duration::from_secs(10);

static COUNT: AtomicU32 = AtomicU32::new(0);

fn ok(what: &str, output: io::Result<Output>) -> String {
    let output = output.unwrap_or_else(|e| panic!("{what}: {e}"));
    assert!(
        output.status.success(),
        "{what}: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A network namespace, removed when dropped.
pub struct Ns {
    pub name: String,
}

impl Ns {
    pub fn new(role: &str) -> Self {
        assert!(
            nix::unistd::geteuid().is_root(),
            "these tests make network namespaces: run them as root"
        );
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("mtt-{}-{n}-{role}", std::process::id());
        ok(
            "ip netns add",
            Command::new("ip").args(["netns", "add", &name]).output(),
        );
        let ns = Self { name };
        ns.ip("link set lo up");
        // Duplicate address detection would hold IPv6 back for a second or two.
        ns.sysctl("net.ipv6.conf.default.accept_dad", "0");
        ns
    }

    pub fn path(&self) -> String {
        format!("/run/netns/{}", self.name)
    }

    /// Runs `ip` in the namespace; the arguments are split at blanks.
    pub fn ip(&self, args: &str) -> String {
        let output = Command::new("ip")
            .args(["-n", &self.name])
            .args(args.split_whitespace())
            .output();
        ok(&format!("ip {args}"), output)
    }

    pub fn try_ip(&self, args: &str) -> bool {
        let output = Command::new("ip")
            .args(["-n", &self.name])
            .args(args.split_whitespace())
            .output();
        output.is_ok_and(|o| o.status.success())
    }

    /// A command in the namespace (not in a mount namespace of its own, as `ip netns exec` makes).
    pub fn command(&self, program: &str) -> Command {
        let mut c = Command::new("nsenter");
        c.arg(format!("--net={}", self.path())).arg(program);
        c
    }

    pub fn run(&self, line: &str) -> String {
        let mut words = line.split_whitespace();
        let output = self.command(words.next().unwrap()).args(words).output();
        ok(line, output)
    }

    pub fn sysctl(&self, key: &str, value: &str) {
        self.run(&format!("sysctl -qw {key}={value}"));
    }

    /// Runs `f` on a thread inside the namespace.
    pub fn spawn<T: Send + 'static>(
        &self,
        f: impl FnOnce() -> T + Send + 'static,
    ) -> JoinHandle<T> {
        let file = File::open(self.path()).expect("the namespace exists");
        thread::spawn(move || {
            setns(&file, CloneFlags::CLONE_NEWNET).expect("setns");
            f()
        })
    }

    pub fn with<T: Send + 'static>(&self, f: impl FnOnce() -> T + Send + 'static) -> T {
        self.spawn(f).join().expect("no panic inside the namespace")
    }

    pub fn mountain(&self, args: &str) -> Output {
        self.command(MOUNTAIN)
            .args(args.split_whitespace())
            .stdin(Stdio::null())
            .output()
            .unwrap()
    }

    pub fn mountain_ok(&self, args: &str) -> String {
        ok(&format!("mountain {args}"), Ok(self.mountain(args)))
    }

    /// What `mountain` says when it fails.
    pub fn mountain_fails(&self, args: &str) -> String {
        let output = self.mountain(args);
        assert!(!output.status.success(), "mountain {args} should fail");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    pub fn status(&self) -> Value {
        serde_json::from_str(&self.mountain_ok("status --json")).expect("status is JSON")
    }

    /// Everything that `up` and `down` must leave as it was.
    pub fn fingerprint(&self) -> String {
        let mut out = String::new();
        for args in [
            "-4 route show table all",
            "-6 route show table all",
            "rule",
            "-6 rule",
            "nexthop",
            "-d link",
        ] {
            out += &self.ip(args);
        }
        for line in ["tc qdisc", "bpftool net show", "sysctl -a --pattern ^net"] {
            out += &self.run(line);
        }
        // Neighbours without their states, and without link-local ones (the far end's kernel asks
        // from such an address now and then): these change by themselves.
        for line in self.ip("neigh").lines().filter(|l| !l.starts_with("fe80:")) {
            out += line.split(" lladdr").next().unwrap_or(line);
            out.push('\n');
        }
        out
    }
}

impl Drop for Ns {
    fn drop(&mut self) {
        let _ = self.command(MOUNTAIN).arg("down").output();
        let _ = Command::new("ip")
            .args(["netns", "del", &self.name])
            .output();
    }
}

/// The two hosts.
pub struct Net {
    pub client: Ns,
    pub server: Ns,
    processes: Vec<Child>,
}

impl Net {
    pub fn new() -> Self {
        let net = Self {
            client: Ns::new("c"),
            server: Ns::new("s"),
            processes: Vec::new(),
        };
        for i in 0..2 {
            net.join(i);
        }
        net.client.ip("addr add 10.98.0.1/32 dev lo");
        net.client.ip("addr add fd98:0::1/128 dev lo");
        net.server.ip("addr add 10.98.1.1/32 dev lo");
        net.server.ip("addr add fd98:1::1/128 dev lo");
        net.client.sysctl("net.ipv4.fib_multipath_hash_policy", "1");
        net.client.sysctl("net.ipv6.fib_multipath_hash_policy", "1");
        net.multipath();
        net.server.ip("route add 10.98.0.0/24 via 10.30.0.1");
        net.server.ip("-6 route add fd98:0::/64 via fd30:0::1");
        net
    }

    /// Joins the hosts by path `i`.
    pub fn join(&self, i: u32) {
        let (c, s) = (&self.client, &self.server);
        c.ip(&format!(
            "link add u{i} type veth peer name s{i} netns {}",
            s.name
        ));
        self.addresses(i);
    }

    /// Gives the ends of path `i` their addresses.
    pub fn addresses(&self, i: u32) {
        let (c, s) = (&self.client, &self.server);
        for (ns, dev, n) in [(c, "u", 1), (s, "s", 2)] {
            ns.ip(&format!("addr add 10.30.{i}.{n}/24 dev {dev}{i}"));
            ns.ip(&format!("addr add fd30:{i}::{n}/64 dev {dev}{i} nodad"));
            ns.ip(&format!("link set {dev}{i} up"));
        }
        s.sysctl(&format!("net.ipv4.conf.s{i}.rp_filter"), "0");
        s.sysctl("net.ipv4.conf.all.rp_filter", "0");
    }

    /// The client's multipath routes to the server, both families.
    pub fn multipath(&self) {
        self.client.ip("route replace 10.98.1.0/24 src 10.98.0.1 \
             nexthop via 10.30.0.2 dev u0 nexthop via 10.30.1.2 dev u1");
        self.client.ip("-6 route replace fd98:1::/64 src fd98:0::1 \
             nexthop via fd30:0::2 dev u0 nexthop via fd30:1::2 dev u1");
    }

    pub fn up(&self) {
        self.client.mountain_ok("up");
    }

    /// Drops everything that arrives at the server by path `i`: a silent black hole.
    pub fn blackhole(&self, i: u32) {
        self.server.run("nft add table inet hole");
        self.server
            .run("nft add chain inet hole in { type filter hook prerouting priority -300 ; }");
        self.server
            .run(&format!("nft add rule inet hole in iifname s{i} drop"));
    }

    pub fn no_blackhole(&self) {
        self.server.run("nft delete table inet hole");
    }

    /// Process id of the client's daemon.
    pub fn pid(&self) -> i32 {
        self.client.status()["pid"].as_i64().unwrap() as i32
    }

    /// Ends the client's daemon by SIGKILL.
    pub fn kill_daemon(&self) {
        let pid = nix::unistd::Pid::from_raw(self.pid());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
        wait_until("the process is gone", LEAVE, || {
            !self.client.mountain("status").status.success()
        });
    }

    /// Starts `mountain` in the client with its messages collected.
    pub fn start(&mut self, args: &str) -> File {
        let file = tempfile::tempfile().unwrap();
        let child = self
            .client
            .command(MOUNTAIN)
            .args(args.split_whitespace())
            .stdin(Stdio::null())
            .stdout(file.try_clone().unwrap())
            .stderr(file.try_clone().unwrap())
            .spawn()
            .unwrap();
        self.processes.push(child);
        file
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        for p in &mut self.processes {
            let _ = p.kill();
            let _ = p.wait();
        }
    }
}

/// All that a process started with [`Net::start`] has said so far.
pub fn said(mut log: &File) -> String {
    let mut text = String::new();
    log.seek(SeekFrom::Start(0)).unwrap();
    log.read_to_string(&mut text).unwrap();
    text
}

/// Waits until `test` holds; panics after `limit`.
pub fn wait_until(what: &str, limit: Duration, mut test: impl FnMut() -> bool) {
    let end = Instant::now() + limit;
    while !test() {
        assert!(Instant::now() < end, "not within {limit:?}: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// What became of the packets of [`Traffic`].
#[derive(Clone, Debug, Default)]
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
}

/// The counters of one phase, see [`Traffic`].
#[derive(Default)]
struct Phase {
    sent: AtomicU32,
    by_path: [AtomicU32; 2],
    reordered: AtomicU32,
}

impl Phase {
    fn counts(&self) -> Counts {
        let get = |n: &AtomicU32| n.load(Ordering::SeqCst);
        Counts {
            sent: get(&self.sent),
            by_path: [get(&self.by_path[0]), get(&self.by_path[1])],
            reordered: get(&self.reordered),
        }
    }
}

/// What the threads of [`Traffic`] share.
#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    /// The phase that is asked for, and the one that the sender is in.
    wanted: AtomicU32,
    entered: AtomicU32,
    phases: [Phase; 32],
}

/// UDP flows from the client to the server, one packet of each every 5 ms; the server counts by
/// the device they came in on. Each packet carries the number of the phase it was sent in and is
/// counted there, however late it is read: a busy machine does not shift the counts.
pub struct Traffic {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// Where [`Traffic`] goes.
pub const TRAFFIC_PORT: u16 = 7000;

impl Traffic {
    pub fn start(net: &Net, server: &str, flows: usize) -> Self {
        Self::start_from(net, server, flows, None)
    }

    /// Flows whose sockets are bound to `source` (an address) or, with `%`, to a device.
    pub fn start_from(net: &Net, server: &str, flows: usize, bind: Option<&str>) -> Self {
        Self::between(&net.client, &net.server, server, flows, bind)
    }

    /// Flows from another host than the client, which forwards them.
    pub fn between(from: &Ns, to: &Ns, server: &str, flows: usize, bind: Option<&str>) -> Self {
        let shared = Arc::<Shared>::default();
        let server: IpAddr = server.parse().unwrap();
        let (ready_tx, ready) = std::sync::mpsc::channel();
        let receive = {
            let shared = Arc::clone(&shared);
            to.spawn(move || {
                let socket = UdpSocket::bind((server, TRAFFIC_PORT)).expect("bind the server");
                ready_tx.send(()).unwrap();
                receive(&socket, &shared);
            })
        };
        ready
            .recv_timeout(Duration::from_secs(5))
            .expect("the server listens");
        let bind = bind.map(String::from);
        let send = {
            let shared = Arc::clone(&shared);
            from.spawn(move || send(server, flows, bind.as_deref(), &shared))
        };
        Self {
            shared,
            threads: vec![receive, send],
        }
    }

    /// Begins another phase; returns its number once the sender is in it.
    fn enter(&self) -> usize {
        let phase = self.shared.wanted.fetch_add(1, Ordering::SeqCst) + 1;
        wait_until("the sender goes on", Duration::from_secs(5), || {
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
        let (mut last, mut since) = (0, Instant::now());
        loop {
            let counts = self.shared.phases[phase].counts();
            if counts.arrived() != last {
                (last, since) = (counts.arrived(), Instant::now());
            }
            if counts.arrived() >= counts.sent || since.elapsed() > QUIET {
                return counts;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends the traffic and returns everything.
    pub fn finish(mut self) -> Counts {
        self.end();
        let mut all = Counts::default();
        for phase in self.shared.phases.iter().map(Phase::counts) {
            all.sent += phase.sent;
            all.reordered += phase.reordered;
            for (sum, n) in all.by_path.iter_mut().zip(phase.by_path) {
                *sum += n;
            }
        }
        all
    }

    fn end(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for t in self.threads.drain(..).rev() {
            let ended = t.join();
            assert!(ended.is_ok() || thread::panicking(), "a traffic thread");
        }
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        self.end();
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

fn send(server: IpAddr, flows: usize, bind: Option<&str>, shared: &Shared) {
    let any = if server.is_ipv6() { "::" } else { "0.0.0.0" };
    let sockets: Vec<UdpSocket> = (0..flows)
        .map(|_| {
            let source = bind.filter(|b| !b.contains('%')).unwrap_or(any);
            let s = UdpSocket::bind((source.parse::<IpAddr>().unwrap(), 0)).expect("bind");
            if let Some(dev) = bind.and_then(|b| b.strip_prefix('%')) {
                nix::sys::socket::setsockopt(
                    &s,
                    nix::sys::socket::sockopt::BindToDevice,
                    &std::ffi::OsString::from(dev),
                )
                .expect("SO_BINDTODEVICE");
            }
            s.connect((server, TRAFFIC_PORT))
                .expect("a route to the server");
            s
        })
        .collect();
    let mut seq = 0u32;
    let mut next = Instant::now();
    while !shared.stop.load(Ordering::SeqCst) {
        let phase = shared.wanted.load(Ordering::SeqCst);
        shared.entered.store(phase, Ordering::SeqCst);
        for (flow, s) in sockets.iter().enumerate() {
            if s.send(&traffic_packet(flow as u32, seq, phase)).is_ok() {
                let sent = &shared.phases[phase as usize].sent;
                sent.fetch_add(1, Ordering::SeqCst);
            }
        }
        seq += 1;
        next += Duration::from_millis(5);
        thread::sleep(next.saturating_duration_since(Instant::now()));
    }
}

fn receive(socket: &UdpSocket, shared: &Shared) {
    use nix::sys::socket::{
        recvmsg, setsockopt, sockopt, ControlMessageOwned, MsgFlags, SockaddrStorage,
    };
    socket
        .set_read_timeout(Some(Duration::from_millis(20)))
        .unwrap();
    // Seconds of traffic: a reader that waits for its CPU loses nothing.
    setsockopt(socket, sockopt::RcvBufForce, &(8 << 20)).unwrap();
    let v6 = socket.local_addr().unwrap().is_ipv6();
    if v6 {
        setsockopt(socket, sockopt::Ipv6RecvPacketInfo, &true).unwrap();
    } else {
        setsockopt(socket, sockopt::Ipv4PacketInfo, &true).unwrap();
    }
    let devices: Vec<i32> = (0..2)
        .map(|i| nix::net::if_::if_nametoindex(format!("s{i}").as_str()).unwrap_or(0) as i32)
        .collect();
    let mut last: Vec<u32> = Vec::new();
    let mut quiet = 0;
    while quiet < 3 {
        let mut buffer = [0; 128];
        let mut iov = [io::IoSliceMut::new(&mut buffer)];
        let mut space = nix::cmsg_space!(libc::in6_pktinfo);
        let Ok(message) = recvmsg::<SockaddrStorage>(
            socket.as_raw_fd(),
            &mut iov,
            Some(&mut space),
            MsgFlags::empty(),
        ) else {
            quiet = if shared.stop.load(Ordering::SeqCst) {
                quiet + 1
            } else {
                0
            };
            continue;
        };
        let ifindex = message
            .cmsgs()
            .unwrap()
            .find_map(|c| match c {
                ControlMessageOwned::Ipv4PacketInfo(p) => Some(p.ipi_ifindex),
                ControlMessageOwned::Ipv6PacketInfo(p) => Some(p.ipi6_ifindex as i32),
                _ => None,
            })
            .unwrap_or(0);
        let word = |at: usize| u32::from_be_bytes(buffer[at..at + 4].try_into().unwrap());
        let (flow, seq) = (word(0) as usize, word(4));
        let phase = &shared.phases[word(8) as usize];
        // Devices made anew have another index: whatever is not s0 is s1 then.
        let path = usize::from(devices[0] != ifindex);
        phase.by_path[path].fetch_add(1, Ordering::SeqCst);
        if last.len() <= flow {
            last.resize(flow + 1, 0);
        }
        if seq < last[flow] {
            phase.reordered.fetch_add(1, Ordering::SeqCst);
        }
        last[flow] = last[flow].max(seq);
    }
}

/// Address with port of a text.
pub fn socket_addr(ip: &str, port: u16) -> SocketAddr {
    SocketAddr::new(ip.parse().unwrap(), port)
}
