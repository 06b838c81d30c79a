// SPDX-License-Identifier: GPL-2.0-or-later
//! A client and a server namespace joined by two paths, and traffic between them.
//!
//! ```text
//!   client  u0 10.30.0.1 ---- 10.30.0.2 s0  server
//!           u1 10.30.1.1 ---- 10.30.1.2 s1
//!           lo 10.98.0.1    203.0.113.1 lo
//! ```
//!
//! Likewise fd30:<i>::/64, fd98::1 and 2001:db8:98::1. Everything has a name of its own and goes in `Drop`.

#![allow(dead_code)]

pub mod arrivals;
mod cgroup;
pub mod frames;
pub mod ip;
pub mod netns;
pub mod program;
pub mod stream;
pub mod sums;
pub mod tcx;
mod traffic;
pub mod tun;
mod worker;

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Deref;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use mountain::control::run_dir::RunDir;
use mountain::control::status::{PathStatus, Status};
use nix::sys::resource::{getrlimit, setrlimit, Resource};
use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::NamedTempFile;
use testkit::{ok, own_sysctls, TestNamespace};

#[allow(unused_imports)]
pub use cgroup::Cgroup;
#[allow(unused_imports)]
pub use testkit::{assert_has, Guard};
#[allow(unused_imports)]
pub use traffic::*;
#[allow(unused_imports)]
pub use worker::{Stop, Worker};

pub const MOUNTAIN: &str = env!("CARGO_BIN_EXE_mountain");
pub const SERVER4: &str = "203.0.113.1";
pub const SERVER6: &str = "2001:db8:98::1";
pub const CLIENT4: &str = "10.98.0.1";
/// Arguments of dnsmasq: a DNS server on port 5353 that knows what it is told and nothing of this machine's.
pub const DNSMASQ: &str = "--keep-in-foreground --conf-file=/dev/null --no-resolv --no-hosts \
    --pid-file= --user=root --port=5353";
/// Well over the 300 ms that leaving a dead path may take, and what any start may take: the figure
/// is the lab's to measure, here a busy machine has its time.
pub const LEAVE: Duration = Duration::from_secs(30);

/// A network namespace in which `mountain` runs: it is taken down before the namespace goes.
pub struct Ns(TestNamespace);

impl Deref for Ns {
    type Target = TestNamespace;

    fn deref(&self) -> &TestNamespace {
        &self.0
    }
}

impl Ns {
    pub fn new(role: &str) -> Self {
        Self(TestNamespace::new(role))
    }

    pub fn mountain(&self, args: &str) -> Output {
        let mut command = self.command(MOUNTAIN);
        command.args(args.split_whitespace()).stdin(Stdio::null());
        command.output().unwrap()
    }

    pub fn mountain_ok(&self, args: &str) -> String {
        ok(&format!("mountain {args}"), Ok(self.mountain(args)))
    }

    /// What `mountain` says; `part` is in it.
    #[track_caller]
    pub fn mountain_says(&self, args: &str, part: &str) -> String {
        let said = self.mountain_ok(args);
        let is_said = said.contains(part);
        assert!(is_said, "mountain {args}: no '{part}' in {said}");
        said
    }

    /// What `mountain` says when it fails; `why` is a part of it.
    #[track_caller]
    pub fn mountain_fails(&self, args: &str, why: &str) -> String {
        let output = self.mountain(args);
        assert!(!output.status.success(), "mountain {args} should fail");
        let said = stderr(&output);
        assert!(said.contains(why), "mountain {args}: no '{why}' in {said}");
        said
    }

    /// What the daemon answers to `mountain status`. A busy machine has its time for that.
    pub fn status(&self) -> Status {
        self.with(|| {
            let run_dir = RunDir::of_this_namespace().unwrap();
            let end = Instant::now() + LEAVE;
            loop {
                match run_dir.status() {
                    Ok(status) => return status.expect("mountain runs"),
                    Err(e) => assert!(Instant::now() < end, "{e:#}"),
                }
            }
        })
    }

    /// What `status` says of the path of a family by a device.
    pub fn path_by(&self, device: &str, ipv6: bool) -> PathStatus {
        let status = self.status();
        let mut paths = status.paths.iter();
        let found = paths.find(|p| p.device == device && p.ipv6 == ipv6);
        let found = found.unwrap_or_else(|| panic!("no path {device} in {status:#?}"));
        found.clone()
    }

    /// Waits until the path by a device is no longer used.
    pub fn wait_left(&self, device: &str, ipv6: bool) {
        wait_until(&format!("{device} is left"), 2 * LEAVE, || {
            let state = self.path_by(device, ipv6).judged.state;
            state != "good" && state != "unknown"
        });
    }

    /// Process id of the daemon.
    pub fn pid(&self) -> i32 {
        self.status().pid as i32
    }

    /// How often the daemon's threads have waited for something within so long.
    pub fn wake_ups(&self, time: Duration) -> u64 {
        let tasks = format!("/proc/{}/task", self.pid());
        let of = |thread: std::fs::DirEntry| {
            // One that has just ended counts no more.
            let status = std::fs::read_to_string(thread.path().join("status")).unwrap_or_default();
            let mut lines = status.lines();
            let count = lines.find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
            count.map_or(0, |count| count.trim().parse::<u64>().unwrap())
        };
        let so_far = || -> u64 { std::fs::read_dir(&tasks).unwrap().flatten().map(of).sum() };
        let before = so_far();
        std::thread::sleep(time);
        so_far().saturating_sub(before)
    }

    /// Where the daemon is asked.
    pub fn control_socket(&self) -> String {
        let inode = std::fs::metadata(self.path()).unwrap().ino();
        format!("/run/mountain/net-{inode}/control.sock")
    }

    /// Ends the daemon by a signal.
    pub fn end_daemon(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid()), signal).unwrap();
        // The lock goes with the last of its threads.
        wait_until("the process is gone", LEAVE, || {
            let is_running = || RunDir::of_this_namespace().unwrap().is_running().unwrap();
            !self.with(is_running)
        });
    }

    /// Has the daemon stand still, as a debugger does, until the value goes.
    pub fn stop_daemon(&self) -> Stopped {
        let pid = Pid::from_raw(self.pid());
        kill(pid, Signal::SIGSTOP).unwrap();
        Stopped(pid)
    }

    /// The link-layer address of a device.
    pub fn mac(&self, device: &str) -> String {
        let text = self.ip(&format!("-br link show dev {device}"));
        text.split_whitespace().nth(2).unwrap().to_owned()
    }

    /// Waits until a port is open, of `tcp` or `udp`.
    pub fn wait_open(&self, proto: &str, port: u16) {
        let line = format!("ss -Hln --{proto} sport = :{port}");
        wait_until(&format!("port {port} is open"), LEAVE, || {
            !self.run(&line).is_empty()
        });
    }

    /// Waits until each change of the routing so far is followed and new flows are steered.
    pub fn wait_settled(&self) {
        wait_until("the routing is followed", 6 * LEAVE, || {
            self.status().settled
        });
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
            out += &own_sysctls(&self.run(line));
        }
        for link in self.ip("-br link").lines() {
            let dev = link.split([' ', '@']).next().unwrap();
            let programs = self.with(|| tcx::programs_on(dev));
            out += &format!("tcx egress of {dev}: {programs}\n");
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

/// A process that stands still.
#[must_use]
pub struct Stopped(Pid);

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = kill(self.0, Signal::SIGCONT);
    }
}

impl Drop for Ns {
    fn drop(&mut self) {
        let _ = self.command(MOUNTAIN).arg("down").output();
    }
}

/// The two hosts.
pub struct Net {
    // They end before what they leave is taken down.
    processes: Vec<Guard>,
    pub client: Ns,
    pub server: Ns,
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
        net.client.ip("addr add fd98:0::1/128 dev lo nodad");
        net.server.ip("addr add 203.0.113.1/32 dev lo");
        net.server.ip("addr add 2001:db8:98::1/128 dev lo nodad");
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
        c.link(&format!("u{i}"), s, &format!("s{i}"));
        self.addresses(i);
    }

    /// Gives the ends of path `i` their addresses.
    pub fn addresses(&self, i: u32) {
        let (c, s) = (&self.client, &self.server);
        for (ns, dev, n) in [(c, "u", 1), (s, "s", 2)] {
            let [v4, v6] = [format!("10.30.{i}.{n}/24"), format!("fd30:{i}::{n}/64")];
            ns.bring_up(&format!("{dev}{i}"), &[&v4, &v6]);
        }
        s.sysctl(&format!("net.ipv4.conf.s{i}.rp_filter"), "0");
        s.sysctl("net.ipv4.conf.all.rp_filter", "0");
    }

    /// The client's multipath routes to the server, both families.
    pub fn multipath(&self) {
        self.client.ip("route replace 203.0.113.0/24 src 10.98.0.1 \
             nexthop via 10.30.0.2 dev u0 nexthop via 10.30.1.2 dev u1");
        self.client
            .ip("-6 route replace 2001:db8:98::/64 src fd98:0::1 \
             nexthop via fd30:0::2 dev u0 nexthop via fd30:1::2 dev u1");
    }

    /// A network behind the client, which forwards for it: e0 10.50.0.2 at lan 10.50.0.1.
    pub fn inner(&self) -> Ns {
        let (inner, client) = (Ns::new("i"), &self.client);
        client.forward_for("lan", &inner, "e0", "10.50.0");
        client.sysctl("net.ipv4.conf.all.rp_filter", "0");
        client.sysctl("net.ipv4.conf.lan.rp_filter", "0");
        inner
    }

    pub fn up(&self) {
        self.client.mountain_ok("up");
    }

    /// The two hosts with `mountain` up, all paths good, and new flows no longer left alone.
    pub fn steered() -> Self {
        let net = Self::new();
        net.steer();
        net
    }

    /// See [`Net::steered`].
    pub fn steer(&self) {
        self.up();
        self.wait_good();
        self.client.wait_settled();
    }

    /// What `status` says of the IPv4 path by a device.
    pub fn path(&self, device: &str) -> PathStatus {
        self.client.path_by(device, false)
    }

    /// Waits until all paths, of both families, are good.
    pub fn wait_good(&self) {
        wait_until("all paths are good", 2 * LEAVE, || {
            let paths = self.client.status().paths;
            paths.len() == 4 && paths.iter().all(|p| p.judged.state == "good")
        });
    }

    /// Waits until the IPv4 path by a device is used.
    pub fn wait_used(&self, device: &str) {
        wait_until(&format!("{device} is used"), 3 * LEAVE, || {
            self.path(device).judged.state == "good"
        });
    }

    /// Drops everything that arrives at the server by path `i`: a silent black hole, until its `no_hole`.
    pub fn blackhole(&self, i: u32) {
        self.server.hole(&format!("iifname s{i}"));
    }

    /// The same, and waits until the client has left the path.
    pub fn lose(&self, i: u32) {
        self.blackhole(i);
        self.client.wait_left(&format!("u{i}"), false);
    }

    /// A counter of the client's steering program.
    pub fn counter(&self, name: &str) -> u64 {
        self.client.status().counters.expect("a program is loaded")[name]
    }

    /// Ends the client's daemon by SIGKILL.
    pub fn kill_daemon(&self) {
        self.client.end_daemon(Signal::SIGKILL);
    }

    /// Starts `mountain` in the client with its messages collected.
    pub fn start(&mut self, args: &str) -> File {
        let path = std::env::var("PATH").unwrap_or_default();
        self.start_with(args, &path)
    }

    /// The same with another search path.
    pub fn start_with(&mut self, args: &str, path: &str) -> File {
        let mut command = self.client.command(MOUNTAIN);
        command.args(args.split_whitespace()).env("PATH", path);
        let (child, log) = start_logged(&mut command);
        self.processes.push(child);
        log
    }

    /// Starts the daemon in the client with a configuration, and waits until it runs.
    pub fn start_configured(&mut self, text: &str) -> File {
        let config = config(text);
        let path = config.path().display();
        let log = self.start(&format!("up --foreground --config {path}"));
        wait_said(&log, "running");
        log
    }
}

/// A configuration file.
pub fn config(text: &str) -> NamedTempFile {
    let file = NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    file
}

/// What a command printed.
pub fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// What it said besides.
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Both.
pub fn texts(output: &Output) -> (String, String) {
    (stdout(output), stderr(output))
}

/// Runs `mountain` in a folder; the arguments are split at blanks.
pub fn mountain_in(dir: &Path, args: &str) -> Output {
    let mut command = Command::new(MOUNTAIN);
    command.current_dir(dir).args(args.split(' '));
    command.output().unwrap()
}

/// Sets the limit of descriptors of a process; returns what it was. The hard limit stays, so that the other can be
/// raised again.
pub fn limit_descriptors(pid: i32, most: u64) -> u64 {
    let prlimit = |limit: &str| {
        let pid = pid.to_string();
        let args = ["--noheadings", "--output=SOFT", "--pid", &pid, limit];
        ok("prlimit", Command::new("prlimit").args(args).output())
    };
    let before = prlimit("--nofile").trim().parse().unwrap();
    prlimit(&format!("--nofile={most}:"));
    before
}

/// Lets this process have so many descriptors, at least.
pub fn allow_descriptors(count: u64) {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    if soft < count {
        setrlimit(Resource::RLIMIT_NOFILE, count, hard.max(count)).unwrap();
    }
}

/// The seed of a random test, which `MOUNTAIN_TEST_SEED` repeats.
pub fn seed() -> u64 {
    let given = std::env::var("MOUNTAIN_TEST_SEED");
    let seed = given.map_or_else(|_| rand::random(), |s| s.parse().unwrap());
    println!("seed {seed} (MOUNTAIN_TEST_SEED={seed} repeats it)");
    seed
}

/// Starts a program, and collects what it says.
pub fn start_logged(command: &mut Command) -> (Guard, File) {
    // What is read meanwhile moves no writer's place.
    let log = tempfile::Builder::new().append(true).tempfile();
    let log = log.unwrap().into_file();
    let [out, err] = [(); 2].map(|()| log.try_clone().unwrap());
    let started = command.stdin(Stdio::null()).stdout(out).stderr(err).spawn();
    (Guard::new(started.unwrap()), log)
}

/// All that a process started with [`start_logged`] has said so far.
pub fn said(mut log: &File) -> String {
    let mut text = String::new();
    log.seek(SeekFrom::Start(0)).unwrap();
    log.read_to_string(&mut text).unwrap();
    text
}

/// Waits until a process started with [`start_logged`] has said something.
pub fn wait_said(log: &File, part: &str) {
    wait_until(part, 6 * LEAVE, || said(log).contains(part));
}

/// A counter of a namespace by table and field, such as `UdpInDatagrams` and `Udp6InDatagrams`.
pub fn snmp(ns: &Ns, counter: &str) -> u64 {
    let all: Value = serde_json::from_str(&ns.run("nstat -aszj")).unwrap();
    all["kernel"][counter].as_u64().expect(counter)
}

/// Waits until a counter of [`snmp`] has grown by `count`: what it counts is under way then, however long it took to
/// start.
pub fn wait_counted(ns: &Ns, counter: &str, count: u64) {
    let value = || snmp(ns, counter);
    let before = value();
    wait_until("it is under way", 2 * LEAVE, || value() >= before + count);
}

/// Waits until `test` holds; panics after `limit`.
pub fn wait_until(what: &str, limit: Duration, mut test: impl FnMut() -> bool) {
    let end = Instant::now() + limit;
    while !test() {
        assert!(Instant::now() < end, "not within {limit:?}: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}
