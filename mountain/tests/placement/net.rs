// SPDX-License-Identifier: GPL-2.0-or-later
//! A home with two providers.
//!
//! ```text
//!            u0 10.40.0.2 ── r0 10.40.0.1            w 10.50.0.1 ── 10.50.0.2
//!   [lan] ── home                          providers                  server
//!            u1 10.41.0.2 ── r1 10.41.0.1
//! ```
//!
//! Likewise fd40::, fd41::, fd50::. The providers accept nothing but the address that they gave out, and
//! translate it: to the server what comes by u0 is from 10.50.0.10, what comes by u1 from 10.50.0.11.
//! Both default routes of the home are there, with metrics 100 and 600.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use mountain::control::run_dir::RunDir;
use mountain::control::status::PathStatus;
use mountain::placement::PlacementStatus;
use nix::sys::signal::Signal;
use serde::{Deserialize, Deserializer};

use crate::support::{wait_until, Ns, LEAVE};

pub const PORT: u16 = 7100;
pub const SERVER: [&str; 2] = ["10.50.0.2", "fd50::2"];
const FLOWS: &str = include_str!("flows.py");
const SERVE: &str = include_str!("serve.py");

/// What the server sees of a flow by each uplink, of each family.
pub const SEEN: [[&str; 2]; 2] = [["10.50.0.10", "10.50.0.11"], ["fd50::10", "fd50::11"]];
/// The home's address on each uplink.
pub const OWN: [[&str; 2]; 2] = [["10.40.0.2", "10.41.0.2"], ["fd40::2", "fd41::2"]];

/// A cgroup of version 2 for the processes whose flows are placed; removed when dropped.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let root = mountain::host::cgroup::root().expect("these tests need cgroups of version 2");
        let path = root.join(format!("mtt-isp-{}-{n}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

pub struct Home {
    pub home: Ns,
    pub providers: Ns,
    pub server: Ns,
    pub lan: Option<Ns>,
    config: tempfile::NamedTempFile,
    serving: Child,
    cgroup: Cgroup,
}

impl Home {
    pub fn new() -> Self {
        Self::with_config("")
    }

    /// `more`: further lines of the configuration.
    pub fn with_config(more: &str) -> Self {
        let (home, providers, server) = (Ns::new("h"), Ns::new("p"), Ns::new("s"));
        let cgroup = Cgroup::new();
        for ns in [&home, &providers] {
            ns.sysctl("net.ipv4.conf.all.rp_filter", "0");
            ns.sysctl("net.ipv4.conf.default.rp_filter", "0");
        }
        providers.sysctl("net.ipv4.ip_forward", "1");
        providers.sysctl("net.ipv6.conf.all.forwarding", "1");
        let exits = "10.50.0.1/24 10.50.0.10/24 10.50.0.11/24 fd50::1/64 fd50::10/64 fd50::11/64";
        let exits: Vec<&str> = exits.split(' ').collect();
        let end: (_, &[&str]) = ("w", &["10.50.0.2/24", "fd50::2/64"]);
        providers.wire(("w", &exits), &server, end);
        let group = cgroup.0.display();
        let config = format!("[start]\ncgroup = \"{group}\"\nadopt = true\n{more}");
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), config).unwrap();
        let mut serving = server
            .command("python3")
            .args(["-u", "-c", SERVE, &PORT.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut ready = String::new();
        let out = serving.stdout.take().unwrap();
        BufReader::new(out).read_line(&mut ready).unwrap();
        assert_eq!(ready, "ready\n");
        let net = Self {
            home,
            providers,
            server,
            lan: None,
            config: file,
            serving,
            cgroup,
        };
        net.translate();
        for i in 0..2 {
            net.join(i);
        }
        // Resolve what pings resolve, so that neighbours do not differ for that reason.
        for i in 0..2 {
            for gateway in [format!("10.4{i}.0.1"), format!("fd4{i}::1")] {
                wait_until("the gateway answers", LEAVE, || {
                    let ping = ["-c", "1", "-W", "1", &gateway];
                    let output = net.home.command("ping").args(ping).output().unwrap();
                    output.status.success()
                });
            }
        }
        net
    }

    fn join(&self, i: u32) {
        let [own, gateway] =
            [2, 1].map(|n| [format!("10.4{i}.0.{n}/24"), format!("fd4{i}::{n}/64")]);
        self.home.wire(
            (&format!("u{i}"), &own.each_ref().map(String::as_str)),
            &self.providers,
            (&format!("r{i}"), &gateway.each_ref().map(String::as_str)),
        );
        self.default_routes(i);
    }

    /// The default routes by an uplink, as DHCP and router advertisements make them.
    pub fn default_routes(&self, i: u32) {
        let metric = [100, 600][i as usize];
        for (family, gateway) in [("-4", format!("10.4{i}.0.1")), ("-6", format!("fd4{i}::1"))] {
            let route = format!("default via {gateway} dev u{i} metric {metric}");
            self.home.ip(&format!("{family} route replace {route}"));
        }
    }

    fn translate(&self) {
        let each = |rules: &str| [0, 1].map(|i| rules.replace('I', &i.to_string())).concat();
        let strict = each(
            "  iifname rI ip saddr != { 0.0.0.0, 10.4I.0.2 } counter drop\n  \
               iifname rI ip6 saddr != { ::, fd4I::2, fe80::/10 } counter drop\n",
        );
        let nat = each(
            "  oifname w ip saddr 10.4I.0.2 snat to 10.50.0.1I\n  \
               oifname w ip6 saddr fd4I::2 snat to fd50::1I\n",
        );
        let rules = format!(
            "table inet providers {{\n chain strict {{\n  \
             type filter hook prerouting priority -300;\n{strict} }}\n chain nat {{\n  \
             type nat hook postrouting priority srcnat;\n{nat} }}\n}}\n"
        );
        nft(&self.providers, &rules);
    }

    /// Packets that a provider has refused as they were from an address that it did not give out.
    pub fn refused(&self) -> u64 {
        let text = self.providers.run("nft list chain inet providers strict");
        let packets = text.split("packets ").skip(1);
        packets
            .map(|rest| rest.split(' ').next().unwrap().parse::<u64>().unwrap())
            .sum()
    }

    /// A network behind the home, which translates its addresses on both uplinks.
    pub fn with_lan(mut self) -> Self {
        let lan = Ns::new("l");
        self.home.forward_for("lan0", &lan, "e0", "192.168.7");
        self.home.bring_up("lan0", &["fd77::1/64"]);
        lan.bring_up("e0", &["fd77::2/64"]);
        lan.ip("-6 route add default via fd77::1");
        self.home.sysctl("net.ipv6.conf.all.forwarding", "1");
        nft(
            &self.home,
            "table inet home {\n chain post {\n  type nat hook postrouting priority srcnat;\n  \
             oifname { u0, u1 } masquerade\n }\n chain pre {\n  type nat hook prerouting priority dstnat;\n  \
             iifname { u0, u1 } tcp dport 8080 dnat ip to 192.168.7.2:7100\n }\n}\n",
        );
        self.lan = Some(lan);
        self
    }

    /// `mountain up`, and all paths measured.
    pub fn up(&self) {
        self.start();
        self.wait_good();
    }

    pub fn wait_good(&self) {
        wait_until("all paths are good", 2 * LEAVE, || {
            let paths = self.home.status().paths;
            let measured = |p: &PathStatus| p.judged.state == "good" && p.judged.samples >= 20;
            paths.len() == 4 && paths.iter().all(measured)
        });
    }

    pub fn start(&self) {
        self.start_with("");
    }

    /// `mountain up` with further arguments.
    pub fn start_with(&self, more: &str) {
        let config = self.config.path().display();
        let up = format!("up --config {config} {more}");
        self.home.mountain_ok(&up);
    }

    /// Drops all that comes by an uplink, silently.
    pub fn blackhole(&self, i: usize) {
        let hook = "type filter hook prerouting priority -310";
        let hole = format!("table inet hole {{ chain in {{ {hook}; iifname r{i} drop; }}\n}}\n");
        nft(&self.providers, &hole);
        for ipv6 in [false, true] {
            wait_until(&format!("u{i} is left"), 2 * LEAVE, || {
                let state = self.path(i, ipv6).judged.state;
                state != "good" && state != "unknown"
            });
        }
    }

    pub fn no_blackhole(&self) {
        self.providers.run("nft delete table inet hole");
    }

    pub fn path(&self, i: usize, ipv6: bool) -> PathStatus {
        let mut paths = self.home.status().paths.into_iter();
        let device = format!("u{i}");
        let found = paths.find(|p| p.device == device && p.ipv6 == ipv6);
        found.unwrap_or_else(|| panic!("no path {device}"))
    }

    /// What `status` says of placement.
    pub fn placement(&self) -> PlacementStatus {
        self.home.status().placement.expect("placement")
    }

    /// A counter of the programs that place flows.
    pub fn counter(&self, name: &str) -> u64 {
        self.placement().counters[name]
    }

    pub fn kill_daemon(&self) {
        self.end_daemon(Signal::SIGKILL);
    }

    pub fn end_daemon(&self, signal: Signal) {
        let pid = self.home.status().pid;
        let pid = nix::unistd::Pid::from_raw(pid as i32);
        nix::sys::signal::kill(pid, signal).unwrap();
        // The lock goes with the last of its threads.
        wait_until("the process is gone", LEAVE, || {
            let is_running = || RunDir::of_this_namespace().unwrap().is_running().unwrap();
            !self.home.with(is_running)
        });
    }

    /// Has another cgroup take the place of that whose sockets are placed.
    pub fn renew_cgroup(&self) {
        std::fs::remove_dir(&self.cgroup.0).unwrap();
        std::fs::create_dir(&self.cgroup.0).unwrap();
    }

    /// A process at home whose flows are placed.
    pub fn flows(&self) -> Flows {
        self.flows_in(&self.home)
    }

    /// A program in any namespace, in the cgroup whose sockets are placed.
    pub fn placed(&self, ns: &Ns, program: &str) -> Command {
        let cgroup = self.cgroup.0.display();
        let script = format!("echo $$ > {cgroup}/cgroup.procs && exec \"$0\" \"$@\"");
        let mut command = ns.command("sh");
        command.args(["-c", &script, program]);
        command
    }

    /// The same in any namespace.
    pub fn flows_in(&self, ns: &Ns) -> Flows {
        let mut python = self.placed(ns, "python3");
        python.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = python.args(["-u", "-c", FLOWS]).spawn().unwrap();
        Flows {
            input: child.stdin.take().unwrap(),
            output: BufReader::new(child.stdout.take().unwrap()),
            child,
        }
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        let _ = self.serving.kill();
        let _ = self.serving.wait();
        // The daemon must be gone before its cgroup can be.
        let _ = self.home.mountain("down");
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub fn nft(ns: &Ns, rules: &str) {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), rules).unwrap();
    ns.run(&format!("nft -f {}", file.path().display()));
}

/// A process that holds flows open.
pub struct Flows {
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    child: Child,
}

/// A flow as its own end and the server see it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Seen {
    /// Empty when the socket is gone.
    #[serde(deserialize_with = "or_empty")]
    pub own: String,
    /// `None`: the server did not answer.
    pub server: Option<String>,
}

fn or_empty<'de, D: Deserializer<'de>>(value: D) -> Result<String, D::Error> {
    Ok(Option::deserialize(value)?.unwrap_or_default())
}

impl Seen {
    /// The uplink that the server saw it come by.
    pub fn uplink(&self) -> Option<usize> {
        let server = self.server.as_deref()?;
        let mut families = SEEN.iter();
        let found = families.find_map(|family| family.iter().position(|s| *s == server));
        Some(found.unwrap_or_else(|| panic!("{server} is no uplink's")))
    }
}

impl Flows {
    fn tell(&mut self, line: &str) -> Vec<Seen> {
        writeln!(self.input, "{line}").unwrap();
        let mut answer = String::new();
        self.output.read_line(&mut answer).unwrap();
        serde_json::from_str(&answer).expect("an answer of flows.py")
    }

    /// Opens flows to the server and asks over them; `kind` is `tcp`, `udp` or `msg` (not connected).
    pub fn open(&mut self, kind: &str, count: usize, server: &str) -> Vec<Seen> {
        self.open_with(kind, count, server, "")
    }

    pub fn open_with(
        &mut self,
        kind: &str,
        count: usize,
        server: &str,
        options: &str,
    ) -> Vec<Seen> {
        self.tell(&format!("open {kind} {count} {server} {PORT} {options}"))
    }

    pub fn open_at(&mut self, kind: &str, server: &str, port: u16) -> Vec<Seen> {
        self.tell(&format!("open {kind} 1 {server} {port}"))
    }

    /// Asks over all open flows.
    pub fn ask(&mut self) -> Vec<Seen> {
        self.tell("ask")
    }

    /// The errors by which flows have ended, by name.
    pub fn errors(&mut self) -> Vec<Option<String>> {
        let flows = self.tell("errors");
        flows.into_iter().map(|flow| flow.server).collect()
    }

    /// Connects all datagram flows anew after dissolving them.
    pub fn again(&mut self, server: &str) -> Vec<Seen> {
        self.tell(&format!("again {server} {PORT}"))
    }

    pub fn close(&mut self) {
        self.tell("close");
    }
}

impl Drop for Flows {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How many of the flows the server saw come by each uplink.
pub fn by_uplink(flows: &[Seen]) -> [usize; 2] {
    let mut counts = [0; 2];
    for uplink in flows.iter().filter_map(Seen::uplink) {
        counts[uplink] += 1;
    }
    counts
}
