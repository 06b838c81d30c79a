// SPDX-License-Identifier: GPL-2.0-or-later
//! A home with two providers.
//!
//! ```text
//!            u0 10.40.0.2 ── r0 10.40.0.1            w 198.51.100.1 ── 198.51.100.2
//!   [lan] ── home                          providers                  server
//!            u1 10.41.0.2 ── r1 10.41.0.1
//! ```
//!
//! Likewise fd40::, fd41::, 2001:db8:50::. The providers accept nothing but the address that they gave out, and
//! translate it: to the server what comes by u0 is from 198.51.100.10, what comes by u1 from 198.51.100.11.
//! Both default routes of the home are there, with metrics 100 and 600.

use std::io::{BufRead, BufReader, Write};
use std::ops::RangeInclusive;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use mountain::control::status::PathStatus;
use mountain::placement::PlacementStatus;
use nix::sys::signal::Signal;
use serde::{Deserialize, Deserializer};
use tempfile::NamedTempFile;

use crate::support::{config, wait_until, Cgroup, Guard, Ns, LEAVE, MOUNTAIN};

pub const PORT: u16 = 7100;
/// Flows of a kind, of which both uplinks have some if they choose.
pub const EACH: usize = 40;
/// What [`Flows::open`] opens.
pub const KINDS: [&str; 3] = ["tcp", "udp", "msg"];
pub const SERVER: [&str; 2] = ["198.51.100.2", "2001:db8:50::2"];
const FLOWS: &str = include_str!("flows.py");

/// What the server sees of a flow by each uplink, of each family.
pub const SEEN: [[&str; 2]; 2] = [
    ["198.51.100.10", "198.51.100.11"],
    ["2001:db8:50::10", "2001:db8:50::11"],
];
/// The home's address on each uplink.
pub const OWN: [[&str; 2]; 2] = [["10.40.0.2", "10.41.0.2"], ["fd40::2", "fd41::2"]];

pub struct Home {
    pub home: Ns,
    pub providers: Ns,
    pub server: Ns,
    pub lan: Option<Ns>,
    config: NamedTempFile,
    _serving: Guard,
    cgroup: Cgroup,
}

impl Home {
    pub fn new() -> Self {
        Self::with_config("")
    }

    /// `more`: further lines of the configuration, those of `[placement]` first. Flows to one server spread.
    pub fn with_config(more: &str) -> Self {
        Self::by_default(&format!("spread = \"flow\"\n{more}"))
    }

    /// The same, but flows go where they do by default.
    pub fn by_default(more: &str) -> Self {
        let (home, providers, server) = (Ns::new("h"), Ns::new("p"), Ns::new("s"));
        let cgroup = Cgroup::new("placed");
        for ns in [&home, &providers] {
            ns.sysctl("net.ipv4.conf.all.rp_filter", "0");
            ns.sysctl("net.ipv4.conf.default.rp_filter", "0");
        }
        providers.sysctl("net.ipv4.ip_forward", "1");
        providers.sysctl("net.ipv6.conf.all.forwarding", "1");
        let exits = "198.51.100.1/24 198.51.100.10/24 198.51.100.11/24 2001:db8:50::1/64 2001:db8:50::10/64 2001:db8:50::11/64";
        let exits: Vec<&str> = exits.split(' ').collect();
        let end: (_, &[&str]) = ("w", &["198.51.100.2/24", "2001:db8:50::2/64"]);
        providers.wire(("w", &exits), &server, end);
        let group = cgroup.path().display();
        let config = config(&format!(
            "[placement]\ncgroup = \"{group}\"\nadopt = true\n{more}"
        ));
        let serving = serve(&server, PORT);
        let net = Self {
            home,
            providers,
            server,
            lan: None,
            config,
            _serving: serving,
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
                    net.home.pings(&format!("-c 1 -W 1 {gateway}"))
                });
            }
        }
        net
    }

    /// Makes an uplink.
    pub fn join(&self, i: u32) {
        let (near, far) = (format!("u{i}"), format!("r{i}"));
        let nets = [format!("10.4{i}.0"), format!("fd4{i}")];
        self.home.join((&near, 2), &self.providers, (&far, 1), nets);
        self.default_routes(i);
    }

    /// The default routes by an uplink, as DHCP and router advertisements make them.
    pub fn default_routes(&self, i: u32) {
        for ipv6 in [false, true] {
            self.default_route(i, ipv6);
        }
    }

    /// That of one family.
    pub fn default_route(&self, i: u32, ipv6: bool) {
        let metric = [100, 600][i as usize];
        let (family, gateway) = match ipv6 {
            false => ("-4", format!("10.4{i}.0.1")),
            true => ("-6", format!("fd4{i}::1")),
        };
        let route = format!("default via {gateway} dev u{i} metric {metric}");
        self.home.ip(&format!("{family} route replace {route}"));
    }

    fn translate(&self) {
        let each = |rules: &str| [0, 1].map(|i| rules.replace('I', &i.to_string())).concat();
        let strict = each(
            "  iifname rI ip saddr != { 0.0.0.0, 10.4I.0.2 } counter drop\n  \
               iifname rI ip6 saddr != { ::, fd4I::2, fe80::/10 } counter drop\n",
        );
        let nat = each(
            "  oifname w ip saddr 10.4I.0.2 snat to 198.51.100.1I\n  \
               oifname w ip6 saddr fd4I::2 snat to 2001:db8:50::1I\n",
        );
        let rules = format!(
            "table inet providers {{\n chain strict {{\n  \
             type filter hook prerouting priority -300;\n{strict} }}\n chain nat {{\n  \
             type nat hook postrouting priority srcnat;\n{nat} }}\n}}\n"
        );
        self.providers.nft(&rules);
    }

    /// Packets that a provider has refused as they were from an address that it did not give out.
    pub fn refused(&self) -> u64 {
        let counted = self.providers.counted("chain inet providers strict");
        counted.iter().sum()
    }

    /// A network behind the home, which translates its addresses on both uplinks.
    pub fn with_lan(mut self) -> Self {
        let lan = Ns::new("l");
        self.home.forward_for("lan0", &lan, "e0", "192.168.7");
        self.home.bring_up("lan0", &["fd77::1/64"]);
        lan.bring_up("e0", &["fd77::2/64"]);
        lan.ip("-6 route add default via fd77::1");
        self.home.sysctl("net.ipv6.conf.all.forwarding", "1");
        self.home.nft(
            "table inet home {\n chain post {\n  type nat hook postrouting priority srcnat;\n  \
             oifname { u0, u1 } masquerade\n }\n}\n",
        );
        self.lan = Some(lan);
        self
    }

    /// Leads 192.0.2.0/24 to the server, and has hosts of these numbers behind the home.
    pub fn with_peers(&self, hosts: RangeInclusive<u8>) {
        let rule = format!("ip daddr 192.0.2.0/24 dnat to {}", SERVER[0]);
        let at = "nat hook prerouting priority dstnat";
        self.providers.chain("inet led in", at, &rule);
        let lan = self.lan.as_ref().expect("a network behind it");
        for host in hosts {
            lan.ip(&format!("addr add 192.168.7.{host}/24 dev e0"));
        }
    }

    /// With `mountain` up, and all paths measured.
    pub fn running(self) -> Self {
        self.up();
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

    /// `mountain up` with this in its environment.
    pub fn start_with_env(&self, variable: &str, value: &str) {
        let mut up = self.home.command(MOUNTAIN);
        up.args(["up", "--config"]).arg(self.config.path());
        let output = up.env(variable, value).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }

    /// Drops all that comes by an uplink, silently.
    pub fn blackhole(&self, i: usize) {
        let hook = "filter hook prerouting priority -310";
        let rule = format!("iifname r{i} drop");
        self.providers.chain("inet hole in", hook, &rule);
        for ipv6 in [false, true] {
            self.home.wait_left(&format!("u{i}"), ipv6);
        }
    }

    pub fn no_blackhole(&self) {
        self.providers.no_hole();
    }

    pub fn path(&self, i: usize, ipv6: bool) -> PathStatus {
        self.home.path_by(&format!("u{i}"), ipv6)
    }

    /// What `status` says of placement.
    pub fn placement(&self) -> PlacementStatus {
        self.home.status().placement.expect("placement")
    }

    /// A counter of the programs that place flows.
    pub fn counter(&self, name: &str) -> u64 {
        self.placement().counters[name]
    }

    /// Whether there is the table that keeps forwarded connections where they began.
    pub fn has_table(&self) -> bool {
        self.home.run("nft list tables").contains("mountain_start")
    }

    pub fn wait_forwarding(&self) {
        wait_until("forwarded connections are placed", 3 * LEAVE, || {
            self.placement().forwarding
        });
    }

    /// Another table of the user's, which leads out by the second uplink.
    pub fn table_55(&self) {
        let route = "route add default via 10.41.0.1 dev u1 table 55";
        self.home.ip(route);
    }

    pub fn kill_daemon(&self) {
        self.home.end_daemon(Signal::SIGKILL);
    }

    /// Has another cgroup take the place of that whose sockets are placed.
    pub fn renew_cgroup(&self) {
        std::fs::remove_dir(self.cgroup.path()).unwrap();
        std::fs::create_dir(self.cgroup.path()).unwrap();
    }

    /// A process at home whose flows are placed.
    pub fn flows(&self) -> Flows {
        self.flows_in(&self.home)
    }

    /// The same on the network behind the home.
    pub fn inner_flows(&self) -> Flows {
        self.flows_in(self.lan.as_ref().expect("with a network behind it"))
    }

    /// A program in any namespace, in the cgroup whose sockets are placed.
    pub fn placed(&self, ns: &Ns, program: &str) -> Command {
        self.cgroup.command(ns, program)
    }

    /// The same in any namespace.
    pub fn flows_in(&self, ns: &Ns) -> Flows {
        let mut python = self.placed(ns, "python3");
        python.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = python.args(["-u", "-c", FLOWS]).spawn().unwrap();
        Flows {
            input: child.stdin.take().unwrap(),
            output: BufReader::new(child.stdout.take().unwrap()),
            _child: Guard::new(child),
        }
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        // The daemon must be gone before its cgroup can be.
        let _ = self.home.mountain("down");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A server that answers with what it sees of a flow, by TCP and UDP.
pub fn serve(ns: &Ns, port: u16) -> Guard {
    let mut command = ns.command("python3");
    command.args(["-u", "-c", include_str!("serve.py"), &port.to_string()]);
    let mut serving = Guard::piped(&mut command);
    let out = serving.child().stdout.take().unwrap();
    let mut ready = String::new();
    BufReader::new(out).read_line(&mut ready).unwrap();
    assert_eq!(ready, "ready\n");
    serving
}

/// A process that holds flows open.
pub struct Flows {
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    _child: Guard,
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

    /// Opens flows to the server and asks over them; `kind` is `tcp`, `mptcp`, `udp` or `msg` (not connected).
    pub fn open(&mut self, kind: &str, count: usize, server: &str) -> Vec<Seen> {
        self.open_with(kind, count, server, "")
    }

    /// Opens flows as [`Self::open`]: so many are answered by each uplink.
    #[track_caller]
    pub fn assert_opens(&mut self, kind: &str, count: usize, server: &str, by: [usize; 2]) {
        self.assert_opens_at(kind, count, (server, PORT), by);
    }

    /// The same to another port.
    #[track_caller]
    pub fn assert_opens_at(&mut self, kind: &str, count: usize, to: (&str, u16), by: [usize; 2]) {
        let opened = self.open_at(kind, count, to);
        assert_eq!(by_uplink(&opened), by, "{kind} to {to:?}: {opened:?}");
    }

    /// The same of all kinds.
    #[track_caller]
    pub fn assert_all_open(&mut self, count: usize, server: &str, by: [usize; 2]) {
        for kind in KINDS {
            self.assert_opens(kind, count, server, by);
        }
    }

    /// [`EACH`] flows of these kinds; those of each kind are answered by both uplinks.
    #[track_caller]
    pub fn open_by_both(&mut self, kinds: &[&str], server: &str) -> Vec<Seen> {
        let mut all = Vec::new();
        for kind in kinds {
            let opened = self.open(kind, EACH, server);
            assert_by_both(&opened);
            all.extend(opened);
        }
        all
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

    pub fn open_at(&mut self, kind: &str, count: usize, to: (&str, u16)) -> Vec<Seen> {
        self.tell(&format!("open {kind} {count} {} {}", to.0, to.1))
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
        self.again_with(server, "")
    }

    /// The same with options, which are set in between.
    pub fn again_with(&mut self, server: &str, options: &str) -> Vec<Seen> {
        self.tell(&format!("again {server} {PORT} {options}"))
    }

    /// Dissolves all connected datagram flows, and asks without a connection.
    pub fn loose(&mut self, server: &str) -> Vec<Seen> {
        self.tell(&format!("loose {server} {PORT}"))
    }

    pub fn close(&mut self) {
        self.tell("close");
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

/// Forty flows and more that choose are all answered, by both uplinks.
#[track_caller]
pub fn assert_by_both(flows: &[Seen]) {
    let [a, b] = by_uplink(flows);
    assert_eq!(a + b, flows.len(), "not all are answered: {flows:?}");
    // Of 40 fair coins fewer than 5 of a side come once in five million times. There are hundreds of such looks in a run,
    // and on a busy machine an uplink whose probe is late gets nothing for a moment.
    assert!(a >= 5 && b >= 5, "{a} and {b}: {flows:?}");
}
