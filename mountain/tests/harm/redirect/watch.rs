// SPDX-License-Identifier: GPL-2.0-or-later
//! A rule whose backend is automatic is carried by a fast one only while somebody watches the
//! firewall and nothing there could matter.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use socket2::{Domain, Socket, Type};

use mountain::bpf::hooks::{DeviceHook, Order};

use super::net::{ask, ask_in_vain, assert_answers, echo, ethtool, Net};
use crate::support::tcx::{attach_passing_xdp, link_passing, redirect_program};
use crate::support::*;

pub const RULE: &str = "--proto udp --from 10.0.8.17:8080 --to 10.0.1.2:8083";
pub const FROM: &str = "10.0.8.17:8080";
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two looks at a socket.
const PAUSE: Option<Duration> = Some(Duration::from_millis(200));

pub fn watch(net: &Net) -> Guard {
    net.router.start(MOUNTAIN, &["redirect", "watch"])
}

/// A router whose rule is fast while nothing concerns it.
pub fn fast() -> (Net, Guard) {
    let net = Net::serving();
    net.redirect(&format!("add {RULE} --backend auto"));
    let watching = watch(&net);
    wait_for(&net, "tcx-peer");
    (net, watching)
}

/// What carries the rules at the moment.
pub fn carried(net: &Net) -> Vec<String> {
    let list = net.list().into_iter();
    list.map(|rule| rule.carried_by.to_string()).collect()
}

pub fn wait_for(net: &Net, backend: &str) {
    wait_until(&format!("all by {backend}"), PATIENCE, || {
        carried(net).iter().all(|by| by == backend)
    });
}

/// The rule takes what the socket sends to the server, and the answer back.
pub fn assert_served(socket: &UdpSocket) {
    assert_answers(socket, FROM, "server");
}

fn forward_drop(net: &Net, rule: &str) {
    let hook = "filter hook forward priority 0; policy drop";
    net.router.chain("inet guard f", hook, rule);
}

/// Sends and gets back over a connection of [`echo`].
pub fn assert_alive(stream: &mut TcpStream) {
    stream.write_all(b"hello").unwrap();
    let mut got = [0; 5];
    stream.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"hello");
}

/// The target's view of a client: its address and port must stay the same.
fn ask_who(socket: &UdpSocket, to: &str) -> String {
    ask(socket, to, "who").0
}

fn serve_who(ns: &Ns, at: &str) -> Worker<()> {
    let socket = ns.udp(at);
    socket.set_read_timeout(PAUSE).unwrap();
    Worker::start(move |stop| {
        while !stop.is_set() {
            if let Ok((_, from)) = socket.recv_from(&mut [0; 100]) {
                socket.send_to(from.to_string().as_bytes(), from).ok();
            }
        }
    })
}

#[test]
fn a_rule_that_is_deleted_and_added_again_counts_from_zero() {
    let (net, _watching) = fast();
    let socket = net.client.udp("10.0.8.18:0");
    let send = |count: usize| (0..count).for_each(|_| assert_served(&socket));
    send(3);
    let packets = || net.counted(0)[0];
    assert_eq!(packets(), 3);
    // A firewall that may forbid something takes the fast backend off, and it comes back.
    forward_drop(&net, "ip saddr 10.0.0.0/8 accept");
    wait_for(&net, "nft");
    net.router.nft("delete table inet guard");
    wait_for(&net, "tcx-peer");
    assert_eq!(packets(), 3, "a trial of its own does not count");
    net.redirect("del --all");
    net.redirect(&format!("add {RULE} --backend auto"));
    wait_for(&net, "tcx-peer");
    assert_eq!(packets(), 0);
    send(2);
    assert_eq!(packets(), 2);
}

/// Nobody watches: nft, which honours what comes later.
#[test]
fn a_firewall_that_comes_later_is_met_when_nobody_watches() {
    let net = Net::serving();
    net.redirect(&format!("add {RULE} --backend auto"));
    assert_eq!(carried(&net), ["nft"]);
    let socket = net.client.udp("10.0.8.18:0");
    assert_served(&socket);
    forward_drop(&net, "tcp dport 22 accept");
    ask_in_vain(&socket, FROM);
}

/// While `redirect watch` runs the rule is fast, the new firewall takes effect, and flows that it
/// permits go on, seen from both ends.
#[test]
fn a_firewall_that_comes_later_is_met_and_permitted_flows_go_on() {
    let net = Net::serving();
    add_flows(&net);
    let watching = watch(&net);
    wait_for(&net, "tcx-peer");
    flows_survive(&net);
    // Rules are forgotten by who carried them, and the counters go on.
    drop(watching);
    net.router.run("nft delete table inet guard");
    let socket = net.client.udp("10.0.8.18:0");
    assert_served(&socket);
}

/// Some 38 new TCP connections a second are more than BPF has source ports for.
#[test]
fn rules_that_rewrite_the_source_stay_with_nft() {
    let (net, _watching) = fast();
    for rule in [
        "--proto tcp --from 10.0.8.17:8081 --to 10.0.1.2:8091 --snat always",
        "--proto tcp --from 10.0.8.17:8082 --to 10.0.8.18:8091",
    ] {
        net.redirect(&format!("add {rule} --backend auto"));
        net.redirect("del --proto udp --from 10.0.8.17:8080");
        net.redirect(&format!("add {RULE} --backend auto"));
        wait_until("the last one is fast", PATIENCE, || {
            carried(&net).iter().any(|by| by == "tcx-peer")
        });
        assert_eq!(carried(&net).iter().filter(|by| *by != "nft").count(), 1);
        net.says(&format!("check {rule}"), "few source ports");
    }
}

/// XDP leaves a rewritten packet to the kernel now and then, which tracks it as a flow to the target.
#[test]
fn flows_keep_their_port_where_the_kernel_has_seen_rewritten_packets() {
    let net = Net::serving();
    let _who = serve_who(&net.server, "10.0.1.2:8090");
    net.redirect("add --proto udp --from 10.0.8.17:8081 --to 10.0.1.2:8090 --backend auto");
    let _watching = watch(&net);
    wait_for(&net, "tcx-peer");
    let socket = net.client.udp("10.0.8.18:0");
    let seen = ask_who(&socket, "10.0.8.17:8081");
    assert_eq!(ask_who(&socket, "10.0.8.17:8081"), seen, "proven now");
    let port = socket.local_addr().unwrap().port().to_string();
    let rewritten = "import socket,struct,sys\n\
        s=socket.socket(socket.AF_INET,socket.SOCK_RAW,socket.IPPROTO_RAW)\n\
        ends=socket.inet_aton('10.0.8.18')+socket.inet_aton('10.0.1.2')\n\
        ip=struct.pack('!BBHHHBBH',0x45,0,29,0,0,64,17,0)+ends\n\
        s.sendto(ip+struct.pack('!HHHH',int(sys.argv[1]),8090,9,0)+b'x',('10.0.1.2',0))";
    let sent = net.router.output("python3", &["-c", rewritten, &port]);
    assert!(sent.status.success(), "{sent:?}");
    socket.recv(&mut [0; 2000]).expect("its answer");
    net.router.chain(
        "inet guard f",
        "filter hook forward priority 0",
        "ip saddr 10.9.9.9 drop",
    );
    wait_for(&net, "nft");
    assert_eq!(ask_who(&socket, "10.0.8.17:8081"), seen);
}

/// A client that uses its port again within two minutes: to connection tracking the earlier connection is there still.
#[test]
fn connections_go_on_where_an_earlier_one_had_their_port() {
    let net = Net::serving();
    net.redirect("add --proto tcp --from 10.0.8.17:8081 --to 10.0.1.2:8091 --backend auto");
    let listener = net.server.listen("10.0.1.2:8091");
    std::thread::spawn(move || {
        let (mut first, _) = listener.accept().unwrap();
        let mut said = [0; 5];
        first.read_exact(&mut said).unwrap();
        first.write_all(&said).unwrap();
        // It closes first: the client may use its port at once.
        drop(first);
        let (second, _) = listener.accept().unwrap();
        let _ = std::io::copy(&mut &second, &mut &second);
    });
    let connect = || {
        net.client.with(|| {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
            socket.set_reuse_address(true).unwrap();
            let [client, from] = ["10.0.8.18:41000", "10.0.8.17:8081"].map(|at| {
                let at: SocketAddr = at.parse().unwrap();
                at.into()
            });
            socket.bind(&client).unwrap();
            socket.connect(&from).unwrap();
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
            TcpStream::from(socket)
        })
    };
    let mut first = connect();
    assert_alive(&mut first);
    assert_eq!(first.read(&mut [0; 1]).unwrap(), 0, "closed");
    drop(first);

    let _watching = watch(&net);
    wait_for(&net, "tcx-peer");
    let mut second = connect();
    assert_alive(&mut second);
    forward_drop(&net, "ct state established accept");
    wait_for(&net, "nft");
    assert_alive(&mut second);
}

/// Adds what [`flows_survive`] needs.
fn add_flows(net: &Net) {
    for (proto, from, to) in [
        ("udp", "10.0.8.17:8080", "10.0.1.2:8083"),
        ("udp", "10.0.8.17:8081", "10.0.1.2:8090"),
        ("udp", "[fd08::17]:8081", "[fd01::2]:8090"),
        ("tcp", "10.0.8.17:8081", "10.0.1.2:8091"),
        ("tcp", "[fd08::17]:8081", "[fd01::2]:8091"),
    ] {
        let rule = format!("--proto {proto} --from {from} --to {to}");
        net.redirect(&format!("add {rule} --backend auto"));
    }
}

/// Flows by the rules to :8090 and :8091 live through a firewall that drops all but them, and new ones to
/// :8080 do not.
fn flows_survive(net: &Net) {
    let mut flows = Flows::new(net);
    for (udp, seen) in flows.udp.iter().zip(["10.0.8.18", "fd08::18"]) {
        assert!(udp.who.contains(seen), "{} is not {seen}", udp.who);
    }
    let fresh = net.client.udp("10.0.8.18:0");
    assert_served(&fresh);

    forward_drop(net, "ct state established accept");
    wait_for(net, "nft");
    flows.go_on(|| ());
    ask_in_vain(&net.client.udp("10.0.8.18:0"), FROM);
}

/// A UDP flow, and what the target saw of its client first.
struct UdpFlow {
    socket: UdpSocket,
    from: &'static str,
    who: String,
}

/// Flows by the rules to :8090 and :8091 of [`add_flows`].
struct Flows {
    udp: [UdpFlow; 2],
    tcp: [TcpStream; 2],
    _who: [Worker<()>; 2],
}

impl Flows {
    fn new(net: &Net) -> Self {
        let _who = ["10.0.1.2:8090", "[fd01::2]:8090"].map(|at| serve_who(&net.server, at));
        let ends = [
            ("10.0.8.18:0", "10.0.8.17:8081"),
            ("[fd08::18]:0", "[fd08::17]:8081"),
        ];
        let udp = ends.map(|(client, from)| {
            let socket = net.client.udp(client);
            let who = ask_who(&socket, from);
            UdpFlow { socket, from, who }
        });
        let (tcp4, _) = echo(net, "10.0.8.17:8081", "10.0.1.2:8091");
        let (tcp6, _) = echo(net, "[fd08::17]:8081", "[fd01::2]:8091");
        let mut flows = Self {
            udp,
            tcp: [tcp4, tcp6],
            _who,
        };
        flows.go_on(|| ());
        flows
    }

    /// Each exchanges something, after `before`; none changes its port.
    fn go_on(&mut self, before: impl Fn()) {
        for tcp in &mut self.tcp {
            before();
            assert_alive(tcp);
        }
        for udp in &self.udp {
            before();
            assert_eq!(ask_who(&udp.socket, udp.from), udp.who);
        }
    }
}

/// Whatever ends who watches, the fast backend is gone with it, and packets are redirected by nft.
#[test]
fn a_fast_backend_does_not_outlive_who_watches() {
    for signal in [Signal::SIGKILL, Signal::SIGTERM] {
        let (net, watching) = fast();
        let socket = net.client.udp("10.0.8.18:0");
        assert_served(&socket);
        watching.signal(signal);
        let _ = watching.finish();
        // The kernel lets go of what a process held a little later.
        wait_for(&net, "nft");
        assert_served(&socket);
        forward_drop(&net, "tcp dport 22 accept");
        ask_in_vain(&socket, FROM);
        net.router.run("nft delete table inet guard");
        net.redirect("del --all");
        net.assert_clean();
        let left = net.record().replace("redirect-", "watch-redirect-");
        assert!(!Path::new(&left).exists(), "{left}");
    }
}

/// XDP hands over what it knows no neighbour for. If connection tracking saw these packets, it would take the flows for
/// the client's own to the target, and nft could not take them over.
#[test]
fn flows_by_xdp_go_on_when_who_watches_is_killed() {
    let net = Net::serving();
    for (ns, device) in [(&net.client, "c0"), (&net.server, "s0")] {
        ethtool(ns, device, "tx off gro on");
    }
    add_flows(&net);
    let mut watching = watch(&net);
    wait_for(&net, "xdp-redirect");
    let mut flows = Flows::new(&net);
    // Then those that nft has had.
    for _ in 0..2 {
        for _ in 0..3 {
            flows.go_on(|| {
                // A looked-up route is kept for 250 ms.
                std::thread::sleep(Duration::from_millis(300));
                net.router.ip("neigh flush dev rs");
            });
        }
        watching.signal(Signal::SIGKILL);
        let _ = watching.finish();
        wait_for(&net, "nft");
        flows.go_on(|| ());
        watching = watch(&net);
        wait_for(&net, "xdp-redirect");
        flows.go_on(|| ());
    }
}

/// As by Ctrl-Z, a debugger, or the cgroup freezer.
#[test]
fn a_firewall_is_met_while_the_process_that_watches_stands_still() {
    let (net, watching) = fast();
    let socket = net.client.udp("10.0.8.18:0");
    assert_served(&socket);
    watching.signal(Signal::SIGSTOP);
    forward_drop(&net, "tcp dport 22 accept");
    wait_until("it is not watched", PATIENCE, || carried(&net) == ["nft"]);
    ask_in_vain(&socket, FROM);
    net.router.run("nft delete table inet guard");
    assert_served(&socket);
    watching.signal(Signal::SIGCONT);
    assert_served(&socket);
    wait_for(&net, "tcx-peer");
    assert_served(&socket);
    forward_drop(&net, "tcp dport 22 accept");
    wait_for(&net, "nft");
    ask_in_vain(&socket, FROM);
}

/// `del` takes effect at once, and a rule that names a BPF backend takes the place of the fast one.
#[test]
fn commands_go_on_while_somebody_watches() {
    let (net, _watching) = fast();
    net.serve(&net.server, "other", "10.0.1.2:8084");
    let socket = net.client.udp("10.0.8.18:0");
    assert_served(&socket);
    net.redirect("del --all");
    ask_in_vain(&socket, FROM);
    net.assert_clean();
    net.redirect(&format!("add {RULE} --backend auto"));
    wait_for(&net, "tcx-peer");
    net.redirect("add --proto udp --from 10.0.8.17:8081 --to 10.0.1.2:8084 --backend tcx-peer");
    assert_eq!(carried(&net), ["nft", "tcx-peer"]);
    assert_served(&socket);
    assert_answers(&socket, "10.0.8.17:8081", "other");
}

/// What may concern the packets takes the fast backend off while it is there.
#[test]
fn what_may_concern_the_packets_is_not_gone_around() {
    let (net, _watching) = fast();
    let socket = net.client.udp("10.0.8.18:0");
    assert_served(&socket);
    // A program that somebody else attaches.
    let attach = || link_passing(DeviceHook::TcxIngress, "rc", c"guard", Order::Last);
    let guard = net.router.with(attach);
    wait_for(&net, "nft");
    drop(guard);
    let text = net.redirect("check --proto udp --from 10.0.8.17:1 --to 10.0.1.2:1");
    assert!(!text.contains("guard"), "{text}");
    wait_for(&net, "tcx-peer");
    // A rule about routes is one about who is served.
    net.router.ip("rule add from 10.0.8.18 prohibit pref 100");
    wait_for(&net, "nft");
    ask_in_vain(&socket, FROM);
    net.router.ip("rule del pref 100");
    wait_for(&net, "tcx-peer");
    assert_served(&socket);
    // A table is nobody's but the user's, whatever it is called.
    let hook = "filter hook forward priority 0; policy drop";
    net.router
        .chain("inet mountain_guard f", hook, "tcp dport 22 accept");
    wait_for(&net, "nft");
    ask_in_vain(&net.client.udp("10.0.8.18:0"), FROM);
    net.router.nft("delete table inet mountain_guard");
    wait_for(&net, "tcx-peer");
    // Behind a program in the target's namespace tcx-peer would put packets.
    net.server.with(|| attach_passing_xdp("s0", "guard"));
    wait_for(&net, "nft");
    net.says(&format!("check {RULE}"), "the XDP program at s0");
}

/// Nothing announces here that the client is behind a bridge of its own namespace by now. What tcx-peer puts at the
/// bridge's port is lost there.
#[test]
fn clients_that_move_behind_a_bridge_get_answers() {
    let (net, _watching) = fast();
    // What follows a new program has been looked at by then.
    std::thread::sleep(Duration::from_secs(1));
    net.client.ip("addr flush dev c0");
    net.client.ip("link add br0 type bridge");
    net.client.ip("link set c0 master br0");
    net.client.bring_up("br0", &["10.0.8.18/24"]);
    let socket = net.client.udp("10.0.8.18:0");
    socket.set_read_timeout(PAUSE).unwrap();
    wait_until("there are answers", PATIENCE, || {
        socket.send_to(b"x", "10.0.8.17:8080").unwrap();
        socket.recv(&mut [0; 100]).is_ok()
    });
    wait_for(&net, "tcx-peer");
    socket.set_read_timeout(Some(LEAVE)).unwrap();
    for _ in 0..10 {
        assert_eq!(ask(&socket, "10.0.8.17:8080", "x").0, "server x");
    }
}

/// Nothing announces here what changes in the target's namespace.
#[test]
fn a_target_that_loses_its_address_is_noticed() {
    let (net, _watching) = fast();
    // What follows a new program has been looked at by then.
    std::thread::sleep(Duration::from_secs(1));
    net.server.ip("addr del 10.0.1.2/24 dev s0");
    wait_for(&net, "nft");
}

/// The programs of a device that moves to another namespace go with it, and would redirect there.
#[test]
fn a_device_that_moves_away_takes_no_program_along() {
    let (net, watching) = fast();
    let there = Ns::new("m");
    // Both at once: no other device tells of the rule then.
    watching.signal(Signal::SIGSTOP);
    for device in ["rc", "rs"] {
        net.router
            .ip(&format!("link set {device} netns {}", there.name));
    }
    watching.signal(Signal::SIGCONT);
    let is_at = |hook| {
        ["rc", "rs"]
            .iter()
            .any(|at| redirect_program(hook, at).is_some())
    };
    wait_until("no program is there", PATIENCE, || {
        !there.with(|| DeviceHook::ALL.into_iter().any(is_at))
    });
}

/// tcx-peer would go on where the kernel no longer forwards. Since Linux 6.17 a setting decides that on which no route
/// hangs, so that nothing else tells of it.
#[test]
fn devices_that_no_longer_forward_ipv6_are_noticed() {
    let net = Net::serving();
    let setting = Path::new("/proc/sys/net/ipv6/conf/all/force_forwarding");
    if !net.router.with(|| setting.exists()) {
        return;
    }
    for (of, value) in [
        ("all.forwarding", "0"),
        ("all.force_forwarding", "1"),
        ("rc.forwarding", "1"),
        ("rs.forwarding", "1"),
    ] {
        net.router.sysctl(&format!("net.ipv6.conf.{of}"), value);
    }
    net.redirect("add --proto udp --from [fd08::17]:1 --to [fd01::2]:1 --backend auto");
    let _watching = watch(&net);
    let force = |value| {
        net.router
            .sysctl("net.ipv6.conf.all.force_forwarding", value)
    };
    let mut took = Vec::new();
    let mut is_noticed_soon = || {
        force("1");
        wait_for(&net, "tcx-peer");
        // What follows a new program has been looked at by then.
        std::thread::sleep(Duration::from_secs(1));
        let began = Instant::now();
        force("0");
        wait_for(&net, "nft");
        took.push(began.elapsed());
        // Sooner than far ends are looked at again, which is 5 s after the last look.
        began.elapsed() < Duration::from_secs(3)
    };
    // A busy machine has more than one try.
    let soon = (0..3).any(|_| is_noticed_soon());
    assert!(soon, "only when far ends are looked at: {took:?}");
}

/// With a nexthop object go its IPv4 routes, of which nothing else tells.
#[test]
fn a_nexthop_object_that_is_deleted_is_noticed() {
    let net = Net::serving();
    net.router.ip("nexthop add id 1 dev rs");
    net.router.ip("route add 10.0.1.2/32 nhid 1");
    net.router.ip("route del 10.0.1.0/24 dev rs");
    net.redirect(&format!("add {RULE} --backend auto"));
    let _watching = watch(&net);
    wait_for(&net, "tcx-peer");
    // What follows a new program has been looked at by then.
    std::thread::sleep(Duration::from_secs(1));
    net.router.ip("nexthop del id 1");
    // Sooner than far ends are looked at again.
    wait_until("by nft", Duration::from_secs(3), || {
        carried(&net) == ["nft"]
    });
}

/// The client has another address, 10.9.9.9, which it is reached at by a way of its own.
fn second_way(net: &Net) {
    let nets = ["10.0.7", "fd07"];
    net.client.join(("c1", 2), &net.router, ("rd", 1), nets);
    net.client.ip("addr add 10.9.9.9/32 dev lo");
    // Where it comes in nobody answers for that address, or tells of it.
    net.client.sysctl("net/ipv4/conf/c0/arp_ignore", "1");
    net.client.sysctl("net/ipv4/conf/c0/arp_announce", "2");
    for (ns, dev) in [(&net.client, "c1"), (&net.router, "rc")] {
        for of in ["all", dev] {
            ns.sysctl(&format!("net/ipv4/conf/{of}/rp_filter"), "0");
        }
    }
    net.router.ip("route add 10.9.9.9/32 via 10.0.7.2 dev rd");
}

/// Filters of another device, and the errors that come back by it, are for those whom no program redirects.
#[test]
fn replies_that_may_leave_by_another_device_are_left_to_nft() {
    let (net, _watching) = fast();
    second_way(&net);
    wait_for(&net, "nft");
    let socket = net.client.udp("10.9.9.9:0");
    assert_served(&socket);
    let hook = "filter hook forward priority 0";
    net.router.chain("inet guard f", hook, "oifname rd drop");
    ask_in_vain(&socket, FROM);
    // Without the route the filter alone is a reason: any client may have an address of that link.
    net.router.ip("route del 10.9.9.9/32");
    let why = "tcx-peer skips a rule of the firewall";
    net.says(&format!("check {RULE}"), why);
    net.router.nft("delete table inet guard");
    wait_for(&net, "tcx-peer");
}

/// The way back to a client need not be the way that it came in by.
#[test]
fn replies_leave_translated_by_the_route_to_the_client() {
    for backend in ["tcx-peer", "xdp-redirect", "nft"] {
        let net = Net::serving();
        second_way(&net);
        net.redirect(&format!("add {RULE} --backend {backend} --fix"));
        assert_eq!(carried(&net), [backend]);
        let socket = net.client.udp("10.9.9.9:0");
        for _ in 0..100 {
            assert_served(&socket);
        }
    }
}

/// An automatic choice is no choice that a file could keep.
#[test]
fn a_restored_rule_does_not_keep_going_around_the_firewall() {
    let net = Net::new();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("m.toml");
    let config = format!("--config {}", file.display());
    let old = "[[redirect]]\nproto = \"udp\"\nfrom = \"10.0.8.17:1\"\nto = \"10.0.1.2:1\"\n\
               backend = \"tcx-peer\"\n";
    std::fs::write(&file, old).unwrap();
    let said = net.router.mountain(&format!("redirect restore {config}"));
    let said = stderr(&said);
    assert_eq!(said.matches("backend_fixed").count(), 1, "{said}");
    assert_eq!(carried(&net), ["nft"]);
    let watching = watch(&net);
    wait_for(&net, "tcx-peer");
    net.redirect(&format!("save {config}"));
    drop(watching);
    let saved = std::fs::read_to_string(&file).unwrap();
    assert!(!saved.contains("backend"), "{saved}");
    // What the user wants is kept.
    net.redirect("add --proto udp --from 10.0.8.17:2 --to 10.0.1.2:2 --backend tcx-peer");
    net.redirect(&format!("save {config}"));
    let saved = std::fs::read_to_string(&file).unwrap();
    let fixed = "backend = \"tcx-peer\"\nbackend_fixed = true";
    assert!(saved.contains(fixed), "{saved}");
    net.redirect("del --all");
    net.redirect(&format!("restore {config}"));
    assert_eq!(carried(&net), ["nft", "tcx-peer"]);
}

/// `nft flush ruleset`, with which most reloads of a firewall begin, takes our table too.
#[test]
fn a_reloaded_firewall_does_not_end_redirects() {
    let (net, _watching) = fast();
    forward_drop(&net, "ip saddr 10.0.0.0/8 accept");
    wait_for(&net, "nft");
    // One flow all along: it must not get stuck with where it went in between.
    let socket = net.client.udp("10.0.8.18:0");
    assert_served(&socket);
    net.router.run("nft flush ruleset");
    socket.set_read_timeout(PAUSE).unwrap();
    wait_until("the rule is put back", PATIENCE, || {
        socket.send_to(b"again", "10.0.8.17:8080").unwrap();
        let mut buffer = [0; 100];
        matches!(socket.recv(&mut buffer), Ok(n) if &buffer[..n] == b"server again")
    });
    let tables = net.router.run("nft list tables");
    assert!(tables.contains("mountain_redirect"), "{tables}");
}

/// The kernel closes what a killed process had open from the highest descriptor down (see `order` of redirect/bpf/fast.rs).
/// What translates the answers is to end last, whichever device was there first.
#[test]
fn what_takes_clients_packets_in_ends_first_when_who_watches_is_killed() {
    let (net, watching) = fast();
    let more = Ns::new("m");
    net.router.link("rm", &more, "m0");
    net.router.bring_up("rm", &["10.0.3.1/24"]);
    more.bring_up("m0", &["10.0.3.2/24"]);
    let both_ways = [("rc", "rs"), ("rc", "rs"), ("rs", "rc")];
    for (i, (clients, targets)) in both_ways.into_iter().enumerate() {
        if i == 1 {
            // One that comes later, and leads to another device, changes nothing.
            net.redirect("add --proto udp --from 10.0.8.17:8999 --to 10.0.3.2:8999 --backend auto");
            wait_for(&net, "tcx-peer");
        }
        if i == 2 {
            net.redirect("del --all");
            net.redirect("add --proto udp --from 10.0.1.1:8081 --to 10.0.8.18:8081 --backend auto");
            wait_for(&net, "tcx-peer");
        }
        let index = |device: &str| net.router.ip(&format!("-o link show {device}"));
        let index = |device| index(device).split(':').next().unwrap().to_owned();
        let links = ingress_links(watching.pid());
        let of = |device| {
            let found = links.iter().filter(|(_, at)| *at == index(device));
            found.map(|(fd, _)| *fd).collect::<Vec<u32>>()
        };
        let [clients, targets] = [of(clients), of(targets)];
        assert!(!clients.is_empty() && !targets.is_empty(), "{links:?}");
        assert!(clients.iter().min() > targets.iter().max(), "{links:?}");
    }
}

/// Descriptors of a process that are links to a device's ingress, and the devices' indexes.
fn ingress_links(pid: nix::unistd::Pid) -> Vec<(u32, String)> {
    let folder = format!("/proc/{pid}/fdinfo");
    let files = std::fs::read_dir(folder).unwrap().flatten();
    let link = |file: std::fs::DirEntry| {
        let info = std::fs::read_to_string(file.path()).ok()?;
        let value = |key| info.lines().find_map(|line| line.strip_prefix(key));
        let is_ingress = value("attach_type:").is_some_and(|kind| kind.contains("ingress"));
        let fd = file.file_name().to_str()?.parse().ok()?;
        let device = value("ifindex:").filter(|_| is_ingress)?;
        Some((fd, device.trim().to_owned()))
    };
    files.filter_map(link).collect()
}
