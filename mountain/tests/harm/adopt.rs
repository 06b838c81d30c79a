// SPDX-License-Identifier: GPL-2.0-or-later
//! `up --adopt`: what it must not do.
//!
//! A home with two providers (tests/placement/net.rs) and a VPN's device whose program counts what enters.

use std::collections::BTreeSet;
use std::io::Read;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use etherparse::{NetSlice, SlicedPacket, TransportSlice};
use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;

use crate::support::{assert_has, stdout, tun, wait_until, Ns, Worker, HALF, LEAVE};

#[path = "../placement/net.rs"]
#[allow(dead_code)]
mod net;

use net::*;

/// Flows of each kind to each server.
const EACH: usize = 12;
/// TCP, connected UDP, datagrams of unconnected sockets.
const KINDS: usize = 3;
/// A second address of the server, of each family.
const OTHER: [&str; 2] = ["198.51.100.3", "2001:db8:50::3"];

/// Begins flows and does not wait for answers.
const POKE: &str = "
import socket, sys
keep = []
for host in sys.argv[2:]:
    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    for kind in ('tcp', 'udp', 'msg'):
        for _ in range(int(sys.argv[1])):
            s = socket.socket(family, socket.SOCK_STREAM if kind == 'tcp' else socket.SOCK_DGRAM)
            s.setblocking(False)
            keep.append(s)
            try:
                if kind != 'msg':
                    s.connect_ex((host, 7100))
                if kind == 'udp':
                    s.send(b'1\\n')
                if kind == 'msg':
                    s.sendto(b'1\\n', (host, 7100))
            except OSError:
                pass
";

fn poke(net: &Home, servers: &[&str]) {
    let mut command = net.placed(&net.home, "python3");
    command.args(["-c", POKE, &EACH.to_string()]).args(servers);
    assert!(command.status().unwrap().success());
}

/// Destination, source, protocol, source port of a flow that entered a tunnel.
type Flow = (IpAddr, IpAddr, u8, u16);

/// A VPN's device with a program behind it that swallows and remembers all; it goes with the value.
struct Tunnel {
    entered: Arc<Mutex<BTreeSet<Flow>>>,
    _program: Worker<()>,
}

impl Tunnel {
    /// `dev`: `tun0` or `tap0`, with addresses 10.9.0.2/24 and fd09::2/64.
    fn open(ns: &Ns, dev: &'static str) -> Self {
        let entered = Arc::<Mutex<BTreeSet<Flow>>>::default();
        let mut file = ns.with(|| tun::attach(dev));
        let remembered = Arc::clone(&entered);
        let program = Worker::start(move |stop| {
            let header = if dev.starts_with("tap") { 14 } else { 0 };
            let mut packet = [0; 2048];
            while !stop.is_set() {
                if tun::readable([&file], 20) == [true] {
                    let length = file.read(&mut packet).unwrap_or(0);
                    let flow = packet[..length].get(header..).and_then(flow_of);
                    remembered.lock().unwrap().extend(flow);
                }
            }
        });
        ns.bring_up(dev, &["10.9.0.2/24", "fd09::2/64"]);
        if dev.starts_with("tap") {
            for gateway in ["10.9.0.1", "fd09::1"] {
                let known = format!("{gateway} lladdr 02:00:00:00:00:09 dev {dev}");
                ns.ip(&format!("neigh add {known} nud permanent"));
            }
        }
        Self {
            entered,
            _program: program,
        }
    }

    /// Flows to a server that have entered.
    fn count(&self, server: &str) -> usize {
        let server: IpAddr = server.parse().unwrap();
        let entered = self.entered.lock().unwrap();
        entered.iter().filter(|(to, ..)| *to == server).count()
    }
}

/// Of both uplinks' addresses: flows from different ones may have the same port.
fn flow_of(packet: &[u8]) -> Option<Flow> {
    let packet = SlicedPacket::from_ip(packet).ok()?;
    let [from, to]: [IpAddr; 2] = match packet.net? {
        NetSlice::Ipv4(v4) => {
            let ip = v4.header();
            [ip.source_addr().into(), ip.destination_addr().into()]
        }
        NetSlice::Ipv6(v6) => {
            let ip = v6.header();
            [ip.source_addr().into(), ip.destination_addr().into()]
        }
        NetSlice::Arp(_) => return None,
    };
    let (protocol, port) = match packet.transport? {
        TransportSlice::Tcp(tcp) => (6, tcp.source_port()),
        TransportSlice::Udp(udp) => (17, udp.source_port()),
        _ => return None,
    };
    Some((to, from, protocol, port))
}

/// Counts what reaches the providers for the server's service.
fn count_leaks(net: &Home) {
    let hook = "filter hook prerouting priority -320";
    let all = "iifname { r0, r1 } meta l4proto { tcp, udp }";
    let rule = format!("{all} th dport {PORT} counter");
    net.providers.chain("inet leaks in", hook, &rule);
}

/// Packets that have left by an uplink since [`count_leaks`].
fn leaks(net: &Home) -> u64 {
    net.providers.counted("chain inet leaks in")[0]
}

/// Whether new flows of IPv4 and IPv6 are left to the kernel, as `status` has it.
fn suspended(net: &Home) -> [bool; 2] {
    let list = net.placement().suspended;
    [false, true].map(|ipv6| list.iter().any(|s| s.ipv6 == ipv6))
}

fn wait_suspended(net: &Home, expected: [bool; 2]) {
    wait_until(&format!("suspended: {expected:?}"), LEAVE, || {
        suspended(net) == expected
    });
}

/// All flows to these servers that begin now enter the tunnel, and none leaves by an uplink.
fn assert_in_tunnel(net: &Home, tunnel: &Tunnel, servers: &[&str], what: &str) {
    let before = leaks(net);
    poke(net, servers);
    for server in servers {
        wait_until(&format!("{what}: all to {server} are in it"), LEAVE, || {
            tunnel.count(server) >= KINDS * EACH
        });
    }
    assert_eq!(leaks(net), before, "{what}: packets left around the VPN");
}

/// None of the flows that begin now leaves by an uplink.
fn assert_no_leak(net: &Home, what: &str) {
    let before = leaks(net);
    poke(net, &SERVER);
    assert_eq!(leaks(net), before, "{what}");
}

const FAMILIES: [&str; 2] = ["-4", "-6"];

/// A VPN as one of the usual programs sets it up.
struct Vpn {
    name: &'static str,
    dev: &'static str,
    /// ip(8), in each family; `GATEWAY` and `OWN` stand for the tunnel's addresses.
    commands: &'static str,
    /// What undoes those that do not go with the device.
    undo: &'static str,
    /// Whether nothing is adopted meanwhile. Routes to halves of the Internet leave the default routes as they are.
    suspends: bool,
}

const fn vpn(name: &'static str, dev: &'static str, commands: &'static str) -> Vpn {
    Vpn {
        name,
        dev,
        commands,
        undo: "",
        suspends: true,
    }
}

const BY_GATEWAY: &str = "route add default via GATEWAY dev DEV metric 50";
/// As NetworkManager does it.
const WITH_SOURCE: &str = "route add default via GATEWAY dev DEV proto static src OWN metric 50";
const WG_QUICK: &str = "route add default dev tun0 table 51820
    rule add not fwmark 51820 table 51820
    rule add table main suppress_prefixlength 0";
const HALVES: &str = "route add HALF0 dev tun0\nroute add HALF1 dev tun0";

const VPNS: [Vpn; 6] = [
    vpn("a tun", "tun0", "route add default dev tun0 metric 50"),
    vpn("a tun with a gateway", "tun0", BY_GATEWAY),
    vpn("a tap with a gateway", "tap0", BY_GATEWAY),
    vpn("a gateway and a source", "tun0", WITH_SOURCE),
    Vpn {
        undo: "rule del not fwmark 51820 table 51820
            rule del table main suppress_prefixlength 0",
        ..vpn("wg-quick's rules and table", "tun0", WG_QUICK)
    },
    Vpn {
        suspends: false,
        ..vpn("halves of the Internet", "tun0", HALVES)
    },
];

impl Vpn {
    fn tell(&self, net: &Home, families: &[usize], commands: &str) {
        for &family in families {
            for command in commands.lines() {
                let command = command
                    .replace("GATEWAY", ["10.9.0.1", "fd09::1"][family])
                    .replace("OWN", ["10.9.0.2", "fd09::2"][family])
                    .replace("HALF0", ["0.0.0.0/1", "::/1"][family])
                    .replace("HALF1", ["128.0.0.0/1", "8000::/1"][family])
                    .replace("DEV", self.dev);
                net.home.ip(&format!("{} {command}", FAMILIES[family]));
            }
        }
    }

    fn up(&self, net: &Home) -> Tunnel {
        let tunnel = Tunnel::open(&net.home, self.dev);
        self.tell(net, &[0, 1], self.commands);
        tunnel
    }

    fn down(&self, net: &Home, tunnel: Tunnel) {
        drop(tunnel);
        self.tell(net, &[0, 1], self.undo);
    }
}

#[test]
fn new_flows_stay_in_a_vpn_that_comes_up_later() {
    let net = Home::new().running();
    count_leaks(&net);
    for vpn in &VPNS {
        let tunnel = vpn.up(&net);
        if vpn.suspends {
            wait_suspended(&net, [true; 2]);
        }
        assert_in_tunnel(&net, &tunnel, &SERVER, vpn.name);
        vpn.down(&net, tunnel);
        wait_suspended(&net, [false; 2]);
    }
    // It is over: new flows choose again.
    net.wait_good();
    let opened = net.flows().open("udp", 40, SERVER[0]);
    let [a, b] = by_uplink(&opened);
    assert!(a > 0 && b > 0, "by both uplinks: {a} and {b}");
    assert_eq!(net.refused(), 0);
}

#[test]
fn a_vpn_that_is_there_first_is_not_left() {
    let net = Home::new();
    count_leaks(&net);
    for vpn in [&VPNS[0], &VPNS[4]] {
        let tunnel = vpn.up(&net);
        let left = "new flows are left to it";
        net.home.mountain_fails("up --adopt", left);
        let check = stdout(&net.home.mountain("check --adopt"));
        assert_has(&check, &["nothing to steer"]);
        net.start_with("--wait");
        assert_in_tunnel(&net, &tunnel, &SERVER, vpn.name);
        net.home.mountain_ok("down");
        vpn.down(&net, tunnel);
    }
}

#[test]
fn a_vpn_of_one_family_leaves_the_other_one_alone() {
    let net = Home::new().running();
    count_leaks(&net);
    for family in [0, 1] {
        let tunnel = Tunnel::open(&net.home, "tun0");
        VPNS[0].tell(&net, &[family], VPNS[0].commands);
        wait_suspended(&net, [family == 0, family == 1]);
        let what = FAMILIES[family];
        assert_in_tunnel(&net, &tunnel, &[SERVER[family]], what);
        // On a busy machine an uplink is late for a moment, and new flows avoid it.
        wait_until("the other family uses both", LEAVE, || {
            let opened = net.flows().open("udp", 40, SERVER[1 - family]);
            by_uplink(&opened).iter().all(|n| *n > 0)
        });
        drop(tunnel);
        wait_suspended(&net, [false; 2]);
        net.wait_good();
    }
}

/// The VPN's own connection began on the second uplink; then its client adds a route to its server by the
/// gateway that the kernel prefers, and the default route.
#[test]
fn a_vpns_own_connection_goes_on_and_other_flows_enter_it() {
    let net = Home::new();
    for family in [0, 1] {
        // Not to be the source of answers to the first one.
        let more = ["", "preferred_lft 0"][family];
        let (family, other) = (FAMILIES[family], OTHER[family]);
        net.server
            .ip(&format!("{family} addr add {other} dev w {more}"));
    }
    net.up();
    let (mut outer, mut others) = (net.flows(), net.flows());
    let mut before = Vec::new();
    for family in [0, 1] {
        for kind in ["tcp", "udp"] {
            before.extend(outer.open(kind, 20, SERVER[family]));
        }
        others.open("tcp", 20, OTHER[family]);
    }
    let [first, second] = by_uplink(&before);
    assert!(first > 0 && second > 0, "the test proves nothing");
    assert_eq!(first + second, before.len(), "all are answered");
    let both_before = others.ask();
    let is_answered = |flow: &Seen| flow.server.is_some();
    assert!(both_before.iter().all(is_answered), "{both_before:?}");

    let tunnel = Tunnel::open(&net.home, "tun0");
    net.home.ip("route add 198.51.100.2 via 10.40.0.1 dev u0");
    net.home
        .ip("-6 route add 2001:db8:50::2 via fd40::1 dev u0");
    let kept = |family: &&str| {
        let rules = net.home.ip(&format!("{family} rule"));
        let mut rules = rules.lines();
        rules.any(|rule| rule.contains("fwmark") && rule.contains("suppress_prefixlength 0"))
    };
    wait_until("the uplinks' marks come first", LEAVE, || {
        FAMILIES.iter().all(kept)
    });
    // While the default is still the kernel's.
    assert_eq!(outer.ask(), before);
    VPNS[0].tell(&net, &[0, 1], VPNS[0].commands);
    wait_suspended(&net, [true; 2]);
    assert_eq!(outer.ask(), before, "the VPN's own connections");
    // As OpenVPN's `redirect-gateway` without `def1` does. The next reading knows of it only by the one before.
    let default = |what: &str| {
        for (family, gateway) in FAMILIES.iter().zip(["10.40.0.1", "fd40::1"]) {
            let route = format!("{family} route {what} default via {gateway} dev u0 metric 100");
            net.home.ip(&route);
        }
    };
    default("del");
    for other in ["203.0.113.0/24", "203.0.113.128/25"] {
        net.home.ip(&format!("route add {other} dev tun0"));
        thread::sleep(HALF);
        let now = outer.ask();
        assert_eq!(
            now, before,
            "the VPN's own connections, without u0's default"
        );
    }
    net.home.end_daemon(Signal::SIGUSR1);
    net.start_with("--wait");
    wait_suspended(&net, [true; 2]);
    thread::sleep(HALF);
    assert_eq!(
        outer.ask(),
        before,
        "the VPN's own connections, by another daemon"
    );
    default("add");
    let gone = others.ask();
    assert!(gone.iter().all(|f| f.server.is_none()), "{gone:?}");
    let end = Instant::now() + LEAVE;
    while OTHER.iter().any(|server| tunnel.count(server) < 20) {
        if Instant::now() > end {
            let entered = OTHER.map(|server| tunnel.count(server));
            let sockets = net.home.run("ss -tanoi");
            let errors = others.errors();
            panic!("20 of each to the tunnel: {entered:?}, {errors:?}\n{sockets}");
        }
        // A busy machine may lose packets, and TCP repeats them late.
        others.ask();
    }
    let errors = others.errors();
    assert!(errors.iter().all(Option::is_none), "{errors:?}");
    assert_eq!(net.refused(), 0, "no packet had another uplink's address");
    drop(tunnel);
    wait_suspended(&net, [false; 2]);
    wait_until("all are where they were", 3 * LEAVE, || {
        others.ask() == both_before
    });
    assert_eq!(outer.ask(), before);
}

#[test]
fn flows_that_begin_before_a_vpn_is_noticed_are_told() {
    let net = Home::new();
    // Before the daemon, so that it has nothing to read again when it is stopped.
    let tunnel = Tunnel::open(&net.home, "tun0");
    net.up();
    let pid = Pid::from_raw(net.home.pid());
    kill(pid, Signal::SIGSTOP).unwrap();
    VPNS[0].tell(&net, &[0], VPNS[0].commands);
    let mut flows = net.flows();
    let opened = flows.open("udp", EACH, SERVER[0]);
    kill(pid, Signal::SIGCONT).unwrap();
    assert_eq!(by_uplink(&opened).iter().sum::<usize>(), EACH);
    wait_suspended(&net, [true, false]);
    let told = &net.placement().suspended[0];
    assert_eq!(told.began_between, EACH as u64, "{told:?}");
    let suspended = "suspended: IPv4: the kernel prefers";
    net.home.mountain_says("status", suspended);
    flows.ask();
    // They follow the kernel's way.
    assert_eq!(tunnel.count(SERVER[0]), EACH);
}

#[test]
fn a_kill_switch_holds() {
    let net = Home::new().running();
    count_leaks(&net);
    for kind in ["unreachable", "blackhole", "prohibit"] {
        let tell = |verb: &str| {
            for family in FAMILIES {
                net.home
                    .ip(&format!("{family} route {verb} {kind} default metric 50"));
            }
        };
        tell("add");
        wait_suspended(&net, [true; 2]);
        assert_no_leak(&net, kind);
        tell("del");
        wait_suspended(&net, [false; 2]);
    }
    // One of the firewall's, and the VPN goes down.
    let rule = "oifname != { lo, tun0 } meta l4proto { tcp, udp } drop";
    let hook = "filter hook output priority 0";
    net.home.chain("inet kill out", hook, rule);
    let tunnel = VPNS[0].up(&net);
    wait_suspended(&net, [true; 2]);
    assert_in_tunnel(&net, &tunnel, &SERVER, "with a kill switch");
    drop(tunnel);
    wait_suspended(&net, [false; 2]);
    assert_no_leak(&net, "the VPN is down");
}

/// More rules of IPv6 than there is room for: nothing is steered. Rules and tables must follow all the same.
#[test]
fn the_uplinks_routing_is_followed_while_nothing_is_steered() {
    let net = Home::new().running();
    net.home
        .ip("-6 route add default via fd41::1 dev u1 table 55");
    let rules = |verb: &str| {
        for n in 1..=65 {
            let rule = format!("pref {} from fd99::{n:x} lookup 55", 1000 + n);
            net.home.ip(&format!("-6 rule {verb} {rule}"));
        }
    };
    let is_suspended = || net.home.status().suspended.is_some();
    rules("add");
    wait_until("nothing is steered", LEAVE, is_suspended);
    let own_tables = || net.home.ip("-4 route show table all proto 77");
    let own_rules = || net.home.ip("-4 rule");
    assert!(own_tables().contains("via 10.40.0.1 dev u0"));

    // Another router, and the old one.
    for last in [9, 1] {
        let hop = format!("via 10.40.0.{last} dev u0");
        net.home
            .ip(&format!("route change default {hop} metric 100"));
        let what = format!("the uplink's table has its gateway {hop}");
        wait_until(&what, LEAVE, || own_tables().contains(&hop));
    }

    // A VPN: what has an uplink's address or mark enters it as well.
    let tunnel = Tunnel::open(&net.home, "tun0");
    VPNS[0].tell(&net, &[0], VPNS[0].commands);
    wait_until("the uplinks' rules are gone", LEAVE, || {
        !own_rules().contains("from 10.40.0.2") && !own_rules().contains("fwmark")
    });
    assert!(is_suspended(), "the test proves nothing");
    drop(tunnel);
    wait_until("and there again", LEAVE, || {
        own_rules().contains("from 10.40.0.2")
    });
    rules("del");
    wait_until("steering goes on", LEAVE, || !is_suspended());
    net.wait_good();
    assert_by_both(&net.flows().open("udp", 40, SERVER[0]));
    assert_eq!(net.refused(), 0);
}
