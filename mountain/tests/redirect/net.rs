// SPDX-License-Identifier: GPL-2.0-or-later
//! A client, a router whose traffic is redirected, and a server.
//!
//! ```text
//!   client 10.0.8.18 c0 ---- rc 10.0.8.17  router  10.0.1.1 rs ---- s0 10.0.1.2  server
//! ```
//!
//! Likewise fd08::/64 and fd01::/64. The server answers on every port it is told to, UDP and TCP,
//! with its own name, a blank and what it got.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream, UdpSocket};
use std::os::unix::fs::MetadataExt;
use std::sync::Mutex;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use mountain::redirect::{CountedRule, Finding, ListedRule};
use serde::de::DeserializeOwned;
use serde::Deserialize;

use crate::support::{Ns, Worker, LEAVE};

/// After this there is no answer.
const NO_ANSWER: Duration = Duration::from_millis(700);

pub struct Net {
    pub client: Ns,
    pub router: Ns,
    pub server: Ns,
    services: Mutex<Vec<Worker<()>>>,
}

impl Net {
    pub fn new() -> Self {
        let net = Self::bare();
        for (ns, v4, v6) in [
            (&net.client, "10.0.8.17", "fd08::17"),
            (&net.server, "10.0.1.1", "fd01::1"),
        ] {
            ns.ip(&format!("route add default via {v4}"));
            ns.ip(&format!("-6 route add default via {v6}"));
        }
        net
    }

    /// Where client and server know no way to each other.
    pub fn bare() -> Self {
        let net = Self {
            client: Ns::new("c"),
            router: Ns::new("r"),
            server: Ns::new("s"),
            services: Mutex::default(),
        };
        net.router.sysctl("net.ipv4.ip_forward", "1");
        net.router.sysctl("net.ipv6.conf.all.forwarding", "1");
        net.join_client();
        let nets = ["10.0.1", "fd01"];
        net.router.join(("rs", 1), &net.server, ("s0", 2), nets);
        net
    }

    /// With a server called `server` at 10.0.1.2:8083.
    pub fn serving() -> Self {
        let net = Self::new();
        net.serve(&net.server, "server", "10.0.1.2:8083");
        net
    }

    /// Joins client and router by c0 and rc.
    pub fn join_client(&self) {
        let nets = ["10.0.8", "fd08"];
        self.client.join(("c0", 18), &self.router, ("rc", 17), nets);
    }

    /// The same with a neighbour of the client, 10.0.8.19, on the other port of a bridge.
    pub fn with_neighbour() -> (Self, Ns) {
        let (net, neighbour) = (Self::new(), Ns::new("n"));
        // Where its module is loaded, bridged packets would come by Netfilter as routed ones do.
        for family in ["iptables", "ip6tables"] {
            let key = format!("/proc/sys/net/bridge/bridge-nf-call-{family}");
            net.router.with(move || drop(std::fs::write(key, "0")));
        }
        net.router.ip("addr flush dev rc");
        net.router.ip("link add br0 type bridge");
        let addresses = &["10.0.8.19/24", "fd08::19/64"];
        neighbour.wire(("n0", addresses), &net.router, ("rn", &[]));
        for port in ["rc", "rn"] {
            net.router.ip(&format!("link set {port} master br0"));
        }
        let addresses = &["10.0.8.17/24", "fd08::17/64"];
        net.router.bring_up("br0", addresses);
        net.serve(&neighbour, "neighbour", "10.0.8.19:9000");
        net.serve(&neighbour, "neighbour", "[fd08::19]:9000");
        (net, neighbour)
    }

    /// `mountain redirect ARGS` on the router; fails the test when it fails.
    pub fn redirect(&self, args: &str) -> String {
        self.router.mountain_ok(&command(args))
    }

    #[track_caller]
    pub fn says(&self, args: &str, part: &str) -> String {
        self.router.mountain_says(&command(args), part)
    }

    /// What it says when it fails; `why` is a part of it.
    #[track_caller]
    pub fn refuses(&self, args: &str, why: &str) -> String {
        self.router.mountain_fails(&command(args), why)
    }

    /// `redirect restore`, while no file names a rule, brings one back.
    #[track_caller]
    pub fn restores_one(&self) {
        let none = tempfile::NamedTempFile::new().unwrap();
        let restore = format!("restore --config {}", none.path().display());
        self.says(&restore, "brought back 1 rule");
    }

    /// `redirect add` by a backend, with `--fix`.
    pub fn add(&self, proto: &str, from: &str, to: &str, backend: &str) {
        self.redirect(&add(proto, from, to, backend));
    }

    /// What it says with `--json`.
    pub fn json<T: DeserializeOwned>(&self, args: &str) -> T {
        serde_json::from_str(&self.redirect(&format!("{args} --json"))).expect("JSON")
    }

    pub fn list(&self) -> Vec<ListedRule> {
        self.json::<Rules<ListedRule>>("list").rules
    }

    pub fn stats(&self) -> Vec<CountedRule> {
        self.json::<Rules<CountedRule>>("stats").rules
    }

    /// What `check` finds of the backends, the fastest first.
    pub fn check(&self, rule: &str) -> Vec<Finding> {
        self.json::<Findings>(&format!("check {rule}")).findings
    }

    /// A new UDP flow of the client to 10.0.8.17:8080 is answered from there by the server of that name.
    #[track_caller]
    pub fn reaches(&self, name: &str) {
        assert_answers(&self.client.udp("10.0.8.18:0"), "10.0.8.17:8080", name);
    }

    /// How many rules there are.
    pub fn rules(&self) -> usize {
        self.list().len()
    }

    /// Nothing of ours is left in the router, and nothing of it on record.
    pub fn assert_clean(&self) {
        assert_eq!(self.router.run("nft list tables"), "");
        let dir = self.record();
        assert!(!std::path::Path::new(&dir).exists(), "{dir}");
    }

    /// The folder of the router's rules.
    pub fn record(&self) -> String {
        let metadata = || std::fs::metadata("/proc/thread-self/ns/net").unwrap();
        let inode = self.router.with(metadata).ino();
        format!("/run/mountain/redirect-{inode}")
    }

    /// Packets and bytes of a rule, there and back.
    pub fn counted(&self, id: usize) -> [u64; 4] {
        let stats = self.stats().remove(id).stats;
        assert_eq!(stats.id as usize, id);
        let (there, back) = (stats.forward, stats.reply);
        [there.packets, there.bytes, back.packets, back.bytes]
    }

    /// Answers at an address of a namespace until the test ends.
    pub fn serve(&self, ns: &Ns, name: &'static str, address: &str) {
        let (udp, tcp) = (ns.udp(address), ns.listen(address));
        let pause = Some(Duration::from_millis(20));
        udp.set_read_timeout(pause).unwrap();
        tcp.set_nonblocking(true).unwrap();
        let datagrams = Worker::start(move |stop| {
            let mut buffer = [0; 2000];
            while !stop.is_set() {
                if let Ok((n, from)) = udp.recv_from(&mut buffer) {
                    let answer = [name.as_bytes(), b" ", &buffer[..n]].concat();
                    let _ = udp.send_to(&answer, from);
                }
            }
        });
        let streams = Worker::start(move |stop| {
            while !stop.is_set() {
                match tcp.accept() {
                    Ok((stream, _)) => drop(answer(stream, name)),
                    Err(_) => thread::sleep(Duration::from_millis(5)),
                }
            }
        });
        let mut services = self.services.lock().unwrap();
        services.extend([datagrams, streams]);
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        self.services.get_mut().unwrap().clear();
        let _ = self.router.mountain("redirect del --all");
    }
}

#[derive(Deserialize)]
struct Rules<T> {
    rules: Vec<T>,
}

#[derive(Deserialize)]
struct Findings {
    findings: Vec<Finding>,
}

/// A rule in a configuration file.
pub fn configured(port: u16) -> String {
    let from = format!("proto = \"udp\"\nfrom = \"10.0.8.17:{port}\"");
    format!("[[redirect]]\n{from}\nto = \"10.0.1.2:{port}\"\n")
}

/// All backends that packets can go by here.
pub const BACKENDS: [&str; 5] = ["nft", "tcx", "tcx-peer", "xdp", "xdp-redirect"];

/// The arguments of [`Net::add`].
pub fn add(proto: &str, from: &str, to: &str, backend: &str) -> String {
    format!("add --proto {proto} --from {from} --to {to} --backend {backend} --fix")
}

/// `redirect ARGS`, where a rule that names no backend is one of nft: `auto` depends on the devices.
pub fn command(args: &str) -> String {
    match args.starts_with("add ") && !args.contains("--backend") {
        true => format!("redirect {args} --backend nft"),
        false => format!("redirect {args}"),
    }
}

fn answer(mut stream: TcpStream, name: &str) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(LEAVE))?;
    let mut got = Vec::new();
    stream.read_to_end(&mut got)?;
    stream.write_all(&[name.as_bytes(), b" ", &got].concat())
}

/// Sets features of a device, as ethtool(8) names them.
pub fn ethtool(ns: &Ns, dev: &str, features: &str) {
    ns.run(&format!("ethtool -K {dev} {features}"));
}

pub fn features(ns: &Ns, dev: &str) -> String {
    ns.run(&format!("ethtool -k {dev}"))
}

/// Sends, and returns the answer and whom it is from.
pub fn ask(socket: &UdpSocket, to: &str, text: &str) -> (String, String) {
    socket.send_to(text.as_bytes(), to).unwrap();
    let mut buffer = [0; 2000];
    let (n, from) = socket.recv_from(&mut buffer).expect("an answer");
    let answer = String::from_utf8_lossy(&buffer[..n]).into_owned();
    (answer, from.to_string())
}

/// Sends to an address and gets the answer of the one named, from that same address.
#[track_caller]
pub fn assert_answers(socket: &UdpSocket, to: &str, name: &str) {
    let answer = ask(socket, to, "hello");
    assert_eq!(answer, (format!("{name} hello"), to.to_owned()));
}

/// Sends; there must be no answer but perhaps an ICMP error.
pub fn ask_in_vain(socket: &UdpSocket, to: &str) {
    socket.set_read_timeout(Some(NO_ANSWER)).unwrap();
    socket.send_to(b"anyone?", to).unwrap();
    let mut buffer = [0; 2000];
    let got = socket.recv_from(&mut buffer);
    assert!(got.is_err(), "{got:?}");
    socket.set_read_timeout(Some(LEAVE)).unwrap();
}

/// A TCP connection from a namespace: what is answered.
pub fn ask_tcp(ns: &Ns, to: &str, text: &str) -> io::Result<String> {
    let mut stream = ns.try_connect(to)?;
    assert_eq!(stream.peer_addr()?.to_string(), to);
    stream.write_all(text.as_bytes())?;
    stream.shutdown(Shutdown::Write)?;
    let mut got = String::new();
    stream.read_to_string(&mut got)?;
    Ok(got)
}

/// A TCP connection of the client to a server at `to` that sends back what it gets; the thread comes to the
/// client as the server has seen it.
pub fn echo(net: &Net, from: &str, to: &str) -> (TcpStream, JoinHandle<SocketAddr>) {
    let listener = net.server.listen(to);
    let server = thread::spawn(move || {
        let (stream, peer) = listener.accept().unwrap();
        // What does not come back is missed at the other end.
        let _ = io::copy(&mut &stream, &mut &stream);
        peer
    });
    (net.client.connect(from), server)
}
