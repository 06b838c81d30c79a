// SPDX-License-Identifier: GPL-2.0-or-later
//! New flows choose an uplink only where nobody else has chosen already.

use std::collections::BTreeSet;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use mountain::bpf::hooks::{self, DeviceHook, Order};
use testkit::ifindex;

use crate::support::program::load_marking;
use crate::support::{
    assert_has, config, stdout, wait_until, Net, Ns, CLIENT4, HALF, LEAVE, SERVER4,
};

/// Enough that a choice between two uplinks would show.
pub const SOCKETS: usize = 16;
/// The client's address on the uplink that the kernel prefers, and on the other one.
pub const U0: &str = "10.30.0.1";
pub const U1: &str = "10.30.1.1";

/// Two uplinks with addresses of their own, and default routes that differ in metric.
pub fn two_providers() -> Net {
    let net = Net::new();
    net.client.ip("route del 203.0.113.0/24");
    net.client.ip("-6 route del 2001:db8:98::/64");
    for (i, metric) in [(0, 100), (1, 600)] {
        let route = format!("default via 10.30.{i}.2 dev u{i} metric {metric}");
        net.client.ip(&format!("route add {route}"));
    }
    net.client.ip(&format!("addr del {CLIENT4}/32 dev lo"));
    net
}

/// Both providers by one route, among whose next hops the kernel chooses.
pub fn by_one_route(client: &Ns) {
    client.ip("route del default metric 100");
    client.ip("route del default metric 600");
    client.ip("route add default nexthop via 10.30.0.2 dev u0 nexthop via 10.30.1.2 dev u1");
}

/// Has flows to one server spread: it stands for all.
const SPREAD: &str = "[placement]\nspread = \"flow\"\n";

pub fn up(net: &Net) {
    let config = config(SPREAD);
    let path = config.path().display();
    net.client
        .mountain_ok(&format!("up --adopt --config {path}"));
    for device in ["u0", "u1"] {
        net.wait_used(device);
    }
    net.client.wait_settled();
}

/// A socket of the server, at one of its addresses.
pub fn listener(net: &Net, address: &str) -> UdpSocket {
    let at = SocketAddr::new(address.parse().unwrap(), 5353);
    net.server.udp(&at.to_string())
}

/// Sends the server a datagram, whose byte no other one has, and returns where it sees that come from.
pub fn seen(server: &UdpSocket, socket: &UdpSocket, n: u8) -> SocketAddr {
    let to = server.local_addr().unwrap();
    socket.send_to(&[n], to).unwrap();
    let mut word = [0; 1];
    loop {
        let (_, from) = server.recv_from(&mut word).expect("each datagram arrives");
        if word == [n] {
            return from;
        }
    }
}

/// The addresses that the server sees when each of these sockets sends it a datagram.
pub fn sources(net: &Net, sockets: &[UdpSocket]) -> Vec<String> {
    let server = listener(net, SERVER4);
    let source = |(n, socket)| seen(&server, socket, n).ip().to_string();
    (0..).zip(sockets).map(source).collect()
}

/// The addresses that the server sees of new sockets.
pub fn begun(net: &Net) -> BTreeSet<String> {
    set_of(&sources(net, &sockets(net, 0)))
}

pub fn set_of(sources: &[String]) -> BTreeSet<String> {
    sources.iter().cloned().collect()
}

/// Addresses to compare with.
pub fn set(addresses: &[&str]) -> BTreeSet<String> {
    addresses.iter().map(|a| (*a).to_owned()).collect()
}

/// Unbound sockets of the client, made by `user`.
pub fn sockets(net: &Net, user: u32) -> Vec<UdpSocket> {
    net.client.with(move || {
        // SAFETY: changes this thread's file system user alone, whom its sockets belong to.
        unsafe { libc::setfsuid(user) };
        let unbound = || socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::DGRAM, None);
        (0..SOCKETS).map(|_| unbound().unwrap().into()).collect()
    })
}

#[test]
fn datagrams_under_way_keep_their_address_when_mountain_starts() {
    let net = two_providers();
    let old = sockets(&net, 0);
    assert_eq!(sources(&net, &old), [U0; SOCKETS]);
    up(&net);
    let known = "the other end knows them by their address";
    assert_eq!(sources(&net, &old), [U0; SOCKETS], "{known}");
    let new = begun(&net);
    assert!(new.contains(U1), "{new:?}");
    thread::sleep(Duration::from_millis(100));
    assert_eq!(sources(&net, &old), [U0; SOCKETS], "{known}");
}

/// A phone's uplink beside a line: half of all flows would be paid for.
#[test]
fn no_flow_starts_on_a_metered_uplink_while_another_is_good() {
    let net = two_providers();
    let config = config(&format!("{SPREAD}[[path]]\ndev = \"u1\"\nmetered = true\n"));
    let path = config.path().display();
    // Nothing of that would arrive when it is used.
    let rule = "oifname u1 udp dport 9 drop";
    (net.client).chain("inet t c", "filter hook output priority 0", rule);
    net.client
        .mountain_ok(&format!("up --adopt --config {path}"));
    net.wait_used("u0");
    net.client.wait_left("u1", false);
    assert_eq!(begun(&net), set(&[U0]));
    net.lose(0);
    assert_eq!(begun(&net), set(&[U1]));
}

/// NetworkManager adds to the metric of an uplink where it finds no Internet. Its gateway may answer all the same.
#[test]
fn no_flow_starts_on_a_demoted_uplink_while_another_is_alive() {
    let net = two_providers();
    up(&net);
    let client = &net.client;
    let route = |verb: &str, metric: u32| {
        client.ip(&format!(
            "route {verb} default via 10.30.1.2 dev u1 metric {metric}"
        ));
    };
    // As NetworkManager does it: the new one first.
    route("add", 20_600);
    route("del", 600);
    wait_until("u1 is left", LEAVE, || {
        client.path_by("u1", false).judged.state != "good"
    });
    client.mountain_says("status", "NetworkManager finds no Internet");
    assert_eq!(begun(&net), set(&[U0]));
    route("add", 600);
    route("del", 20_600);
    net.wait_used("u1");
    wait_until("u1 is used", LEAVE, || begun(&net).contains(U1));
    route("add", 20_600);
    route("del", 600);
    client.wait_left("u1", false);
    net.lose(0);
    assert_eq!(begun(&net), set(&[U1]));
}

/// The kernel would have sent all by the other one, where the firewall lets them leave.
#[test]
fn no_flow_starts_where_the_firewall_may_stop_it_while_the_kernels_uplink_is_alive() {
    let net = two_providers();
    let client = &net.client;
    // What neither stops a packet nor lets it through is no difference.
    let rules = "oifname u1 meta priority set 1:1\noifname u0 counter\nudp dport 9 drop";
    client.chain("inet t c", "filter hook output priority 0", rules);
    up(&net);
    assert_eq!(left(&net), "");
    let seen = begun(&net);
    assert!(seen.contains(U1), "{seen:?}");
    client.run("nft add rule inet t c oifname u1 udp dport 7 drop");
    wait_until("the rule is noticed", LEAVE, || {
        left(&net).contains("treats u0 and u1 differently, by inet t c")
    });
    assert_eq!(begun(&net), set(&[U0]));
    let counters = client.status().placement.unwrap().counters;
    assert_eq!(counters["pass_firewall"], SOCKETS as u64);
    let said = client.mountain("check --adopt --json");
    assert_has(&stdout(&said), &["treats u0 and u1 differently"]);
    lose_preferred(&net);
    assert_eq!(begun(&net), set(&[U1]), "nothing would arrive there");
}

pub fn lose_preferred(net: &Net) {
    net.lose(0);
    wait_until("the kernel's uplink is dead", LEAVE, || {
        net.client.path_by("u0", false).judged.state == "dead"
    });
}

/// It is reloaded in steps, and then it tells the uplinks apart no more.
#[test]
fn what_began_while_the_firewall_told_uplinks_apart_stays_when_it_does_no_more() {
    let net = two_providers();
    let client = &net.client;
    let rule = "oifname u1 udp dport 7 drop";
    client.chain("inet t c", "filter hook output priority 0", rule);
    up(&net);
    let old = sockets(&net, 0);
    assert_eq!(sources(&net, &old), [U0; SOCKETS]);
    client.run("nft flush chain inet t c");
    thread::sleep(Duration::from_secs(1));
    assert_eq!(begun(&net), set(&[U0]), "the rule may come again");
    wait_until("new ones choose again", LEAVE, || begun(&net).contains(U1));
    let known = "the other end knows them by their address";
    assert_eq!(sources(&net, &old), [U0; SOCKETS], "{known}");
    lose_preferred(&net);
    assert_eq!(sources(&net, &old), [U1; SOCKETS], "they would not arrive");
}

/// One that names none says no more than what is usual.
#[test]
fn only_a_rule_that_names_an_uplink_goes_before_a_firewall_that_tells_them_apart() {
    let net = two_providers();
    let client = &net.client;
    let lan = machine_behind(&net);
    for hook in ["output", "forward"] {
        let (chain, hook) = (
            format!("inet t {hook}"),
            format!("filter hook {hook} priority 0"),
        );
        client.chain(&chain, &hook, "oifname u1 udp dport 7 drop");
    }
    let rule = |port, wants| {
        format!("[[rule]]\nmatch = {{ proto = \"udp\", ports = {port} }}\nuse = \"{wants}\"\n")
    };
    let config = config(&(SPREAD.to_owned() + &rule(5353, "steadiest") + &rule(5354, "u1")));
    client.mountain_ok(&format!("up --adopt --config {}", config.path().display()));
    for device in ["u0", "u1"] {
        net.wait_used(device);
    }
    client.wait_settled();
    wait_until("the firewall has been read", LEAVE, || {
        left(&net).contains("10.40.0.0/24: the firewall does not let them leave by all")
    });
    for (port, by) in [(5353, U0), (5354, U1)] {
        let server = net.server.udp(&format!("{SERVER4}:{port}"));
        for sockets in [sockets(&net, 0), sockets_of(&lan)] {
            for (n, socket) in (0..).zip(&sockets) {
                assert_eq!(seen(&server, socket, n).ip().to_string(), by, "to {port}");
            }
        }
    }
}

#[test]
fn a_rule_for_the_user_who_made_a_socket_keeps_its_datagrams() {
    let net = two_providers();
    let client = &net.client;
    client.ip("route add default via 10.30.1.2 dev u1 table 100");
    client.ip("rule add pref 100 uidrange 1000-1000 lookup 100");
    up(&net);
    assert_eq!(sources(&net, &sockets(&net, 1000)), [U1; SOCKETS]);
}

#[test]
fn what_a_rule_selects_by_its_tos_is_not_counted_as_placed() {
    let net = two_providers();
    let client = &net.client;
    client.ip("route add default via 10.30.1.2 dev u1 table 100");
    client.ip("rule add pref 100 tos 0x10 lookup 100");
    up(&net);
    let sockets = sockets(&net, 0);
    for socket in &sockets {
        socket2::SockRef::from(socket).set_tos_v4(0x10).unwrap();
    }
    assert_eq!(sources(&net, &sockets), [U1; SOCKETS]);
    let passed = client.status().placement.unwrap().counters["pass_fib_rule"];
    assert_eq!(passed, SOCKETS as u64);
}

/// Provider-independent or routed addresses: the default route says by `src` that packets leave from one on `lo`.
#[test]
fn datagrams_have_no_source_that_the_kernel_would_not_give_them() {
    let net = two_providers();
    net.client.ip(&format!("addr add {CLIENT4}/32 dev lo"));
    net.client.ip(&format!(
        "route replace default via 10.30.0.2 dev u0 metric 100 src {CLIENT4}"
    ));
    up(&net);
    let seen = begun(&net);
    assert!(seen.is_subset(&set(&[CLIENT4, U1])), "{seen:?}");
    assert!(seen.contains(CLIENT4), "{seen:?}");
}

/// A router that is replaced by one with the same address, twice within a minute. It says nothing of itself.
#[test]
fn a_gateway_that_was_replaced_is_found_soon() {
    let net = two_providers();
    for (name, value) in [
        ("base_reachable_time_ms", "1000"),
        ("delay_first_probe_time", "1"),
    ] {
        let key = format!("net.ipv4.neigh.u1.{name}");
        net.client.sysctl(&key, value);
    }
    let hook = "filter hook output priority 0";
    net.server
        .chain("arp t out", hook, "arp operation request drop");
    up(&net);
    for n in 1..=2 {
        let mac = format!("02:00:00:00:01:0{n}");
        net.server.ip(&format!("link set s1 address {mac}"));
        let entry = || net.client.ip("neigh show 10.30.1.2 dev u1");
        wait_until("it is found", LEAVE, || entry().contains(&mac));
    }
}

/// Has a host translate the addresses of what a rule matches, of a family.
pub fn masquerade(ns: &Ns, family: &str, rule: &str) {
    let (chain, rule) = (format!("{family} n post"), format!("{rule} masquerade"));
    ns.chain(&chain, "nat hook postrouting priority 100", &rule);
}

/// A host that translates, and whose owner marks connections by bits that Mountain uses as well.
#[test]
fn a_connection_mark_of_its_owners_stays_what_it_is() {
    let net = two_providers();
    let (client, lan) = (&net.client, net.inner());
    masquerade(client, "ip", "oifname { u0, u1 }");
    client.nft(
        "table ip own {\n\
         chain pre { type filter hook prerouting priority -160;\n\
         udp dport 7000 ct mark set 0x05000000\n}\n\
         chain post { type filter hook postrouting priority 0;\n\
         udp dport 7001 meta mark != 0 counter\n\
         udp dport 7000 meta mark != 0 counter\n\
         udp dport 7000 ct mark != 0x05000000 counter\n} }",
    );
    up(&net);
    assert_has(
        &left(&net),
        &["sets marks without mountain's bits", "ip own pre"],
    );
    let behind = sockets_of(&lan);
    for port in [7000, 7001] {
        send_all(&behind, port);
    }
    assert_eq!(client.counted("chain ip own post"), [0, 0, 0]);
}

/// A machine on an uplink's own network that has this host for its gateway, as beside a router at home.
#[test]
fn a_connection_in_by_one_uplink_and_out_by_another_goes_on() {
    let net = two_providers();
    let lan = Ns::new("lan");
    let client = &net.client;
    client.forward_for("u2", &lan, "n2", "10.30.2");
    client.ip("route add default via 10.30.2.2 dev u2 metric 700");
    masquerade(client, "ip", "oifname { u0, u1, u2 }");
    up(&net);
    let listener = listener(&net, SERVER4);
    let socket = lan.udp("0.0.0.0:0");
    for n in 0..10 {
        assert_eq!(seen(&listener, &socket, n).ip().to_string(), U0);
    }
}

#[test]
fn an_uplink_whose_address_a_rule_refuses_gets_no_datagrams() {
    let net = two_providers();
    net.client.ip("rule add pref 1000 from 10.30.1.1 prohibit");
    up(&net);
    assert_eq!(begun(&net), set(&[U0]));
    // A rule that leads to the uplink itself is what hosts with two providers mostly have.
    let client = &net.client;
    client.ip("route add default via 10.30.1.2 dev u1 table 101");
    client.ip("rule add pref 1000 from 10.30.1.1 lookup 101");
    client.ip("rule del pref 1000 prohibit");
    wait_until("u1 is chosen again", LEAVE, || begun(&net).contains(U1));
}

/// As for IPsec in transport mode between two hosts: by another uplink's address the packets would leave in the clear.
#[test]
fn no_new_flow_evades_an_ipsec_policy_by_another_source() {
    let net = two_providers();
    up(&net);
    let client = &net.client;
    let policy = |to: &str| {
        client.ip(&format!(
            "xfrm policy add src {U0}/32 dst {to} dir out action block"
        ));
    };
    let refused = || {
        let sent = |socket: &UdpSocket| socket.send_to(&[0], (SERVER4, 9)).is_ok();
        sockets(&net, 0).iter().filter(|s| !sent(s)).count()
    };
    policy("198.51.100.0/24");
    thread::sleep(LEAVE / 4);
    assert!(begun(&net).contains(U1), "it is about others");
    for to in [format!("{SERVER4}/32"), "0.0.0.0/0".into()] {
        assert!(refused() < SOCKETS);
        policy(&to);
        wait_until("it is heeded", LEAVE, || refused() == SOCKETS);
        for _ in 0..4 {
            assert_eq!(refused(), SOCKETS, "{to}");
        }
        client.ip(&format!("xfrm policy delete src {U0}/32 dst {to} dir out"));
        wait_until("new flows choose again", LEAVE, || begun(&net).contains(U1));
    }
    // It goes by itself.
    let limited = "dst 0.0.0.0/0 dir out action block limit time-hard 2";
    client.ip(&format!("xfrm policy add src {U0}/32 {limited}"));
    wait_until("it is heeded", LEAVE, || refused() == SOCKETS);
    wait_until("it is gone", 2 * LEAVE, || refused() < SOCKETS);
    wait_until("its end is heeded", LEAVE, || begun(&net).contains(U1));
    // What no policy is about.
    let suspended = || client.status().placement.expect("placing").suspended;
    client.ip("xfrm policy setdefault in accept fwd accept out block");
    wait_until("the default is heeded", LEAVE, || !suspended().is_empty());
    client.ip("xfrm policy setdefault in accept fwd accept out accept");
    wait_until("its end is", LEAVE, || suspended().is_empty());
}

#[test]
fn new_flows_avoid_a_dead_uplink_although_the_firewall_holds_running_ones() {
    let net = two_providers();
    let client = &net.client;
    by_one_route(client);
    let rule = "oifname u1 udp dport 9 drop";
    client.chain("inet t c", "filter hook output priority 0", rule);
    up(&net);
    let held = client.status().groups.remove(0).held.expect("a difference");
    assert!(held.what.contains("inet t c"), "{held:?}");
    net.lose(1);
    assert_eq!(begun(&net), set(&[U0]));
}

/// A VPN for what the firewall marks, and counters behind it: of what leaves by the VPN, and by the uplinks.
fn vpn_by_marks(net: &Net, rules: &str) -> Ns {
    let (client, vpn) = (&net.client, Ns::new("vpn"));
    client.wire(("tv", &["10.60.0.1/24"]), &vpn, ("vt", &["10.60.0.2/24"]));
    client.ip("route add default via 10.60.0.2 dev tv table 100");
    client.ip("rule add fwmark 1/0xff lookup 100");
    client.nft(rules);
    let counters = "udp dport 7000 oifname tv counter\nudp dport 7000 oifname != tv counter";
    let hook = "filter hook postrouting priority 300";
    client.chain("ip c post", hook, counters);
    vpn
}

/// Sends each socket's datagrams to a port of the server, by connect().
fn send_all(sockets: &[UdpSocket], port: u16) {
    for socket in sockets {
        socket.connect((SERVER4, port)).unwrap();
        for _ in 0..3 {
            let _ = socket.send(b"x");
            thread::sleep(Duration::from_millis(2));
        }
    }
}

/// What these sockets send leaves by the VPN of [`vpn_by_marks`], all of it and nothing else.
fn assert_by_vpn(net: &Net, sockets: &[UdpSocket]) {
    const ALL: u64 = 3 * SOCKETS as u64;
    send_all(sockets, 7000);
    let counted = || net.client.counted("chain ip c post");
    // What is forwarded may have to wait for a processor.
    wait_until("all have left", LEAVE, || {
        counted().iter().sum::<u64>() >= ALL
    });
    assert_eq!(counted(), [ALL, 0], "by the VPN and not");
}

/// A machine behind the client, 10.40.0.2, which is translated.
pub fn machine_behind(net: &Net) -> Ns {
    let lan = Ns::new("lan");
    net.client.forward_for("n0", &lan, "n1", "10.40.0");
    masquerade(&net.client, "ip", "oifname { u0, u1, tv }");
    lan
}

/// Sockets of another machine with ports that none of this test's had: connection tracking remembers those, and a flow
/// from one of them goes on where that went.
pub fn sockets_of(ns: &Ns) -> Vec<UdpSocket> {
    static PORTS: AtomicU16 = AtomicU16::new(20_000);
    let socket = |_| ns.udp(&format!("0.0.0.0:{}", PORTS.fetch_add(1, Relaxed)));
    (0..SOCKETS).map(socket).collect()
}

/// What the daemon leaves to the kernel.
pub fn left(net: &Net) -> String {
    net.client.status().placement.unwrap().left.join("\n")
}

/// As where one uplink is in another zone of the firewall than the network behind this host may go to.
#[test]
fn no_forwarded_flow_starts_where_the_firewall_may_stop_it() {
    let net = two_providers();
    let lan = machine_behind(&net);
    let client = &net.client;
    // Nothing comes from there that would be placed.
    let rule = "iifname u0 oifname u1 drop";
    client.chain("inet t c", "filter hook forward priority 0", rule);
    up(&net);
    assert_eq!(left(&net), "");
    wait_until("they are placed", LEAVE, || {
        set_of(&sources(&net, &sockets_of(&lan))).contains(U1)
    });
    client.run("nft add rule inet t c iifname n0 oifname u1 udp dport 9 drop");
    wait_until("the rule is noticed", LEAVE, || {
        left(&net).contains("10.40.0.0/24: the firewall does not let them leave by all")
    });
    let old = sockets_of(&lan);
    assert_eq!(sources(&net, &old), [U0; SOCKETS]);
    assert!(client.status().placement.unwrap().counters["pass_firewall"] >= SOCKETS as u64);
    let own = begun(&net);
    assert!(own.contains(U1), "{own:?}");
    lose_preferred(&net);
    assert_eq!(sources(&net, &sockets_of(&lan)), [U1; SOCKETS]);
    let server = listener(&net, SERVER4);
    server.set_nonblocking(true).unwrap();
    wait_until("what is under way leaves", LEAVE, || {
        old[0].send_to(&[0], server.local_addr().unwrap()).unwrap();
        thread::sleep(HALF);
        let came = server.recv_from(&mut [0]);
        came.is_ok_and(|(_, from)| from.ip().to_string() == U1)
    });
}

/// As in the books: what has a mark already is done with.
const FOR_ONE_MACHINE: &str =
    "table ip mangle { chain pre { type filter hook prerouting priority mangle;\n\
    meta mark set ct mark\n\
    meta mark != 0 accept\n\
    ip saddr 10.40.0.2 meta mark set 1\n\
    ct mark set meta mark\n} }";

#[test]
fn a_machine_that_the_firewall_marks_for_a_vpn_stays_in_it() {
    let net = two_providers();
    let lan = machine_behind(&net);
    let _vpn = vpn_by_marks(&net, FOR_ONE_MACHINE);
    up(&net);
    let said = left(&net);
    assert!(said.starts_with("forwarded connections are left"), "{said}");
    assert_has(&said, &["ip mangle pre handle"]);
    assert_by_vpn(&net, &sockets_of(&lan));
    // Marks at prerouting are nothing to this host's own.
    let seen = begun(&net);
    assert!(seen.contains(U1), "{seen:?}");
    let checked = stdout(&net.client.mountain("check --adopt"));
    let told = "forwarded connections are left to the kernel";
    assert_has(&checked, &[told]);
    // With a mask Mountain's marks are none.
    let masked = FOR_ONE_MACHINE.replace("meta mark !=", "meta mark & 0xff !=");
    net.client.nft(&format!("delete table ip mangle\n{masked}"));
    wait_until("it is masked", LEAVE, || left(&net).is_empty());
}

/// A program of somebody else sets it, and a rule compares all bits of it.
#[test]
fn what_comes_in_with_a_mark_keeps_it_as_it_is() {
    let net = two_providers();
    let (client, lan) = (&net.client, machine_behind(&net));
    let _vpn = vpn_by_marks(&net, "");
    client.ip("rule del fwmark 1/0xff lookup 100");
    client.ip("rule add fwmark 1 lookup 100");
    up(&net);
    assert_eq!(left(&net), "");
    let _marks = client.with(|| {
        let (program, device) = (load_marking(c"marks"), ifindex("n0"));
        let program = program.as_fd();
        hooks::link(DeviceHook::TcxIngress, device, program, Order::First).unwrap()
    });
    assert_by_vpn(&net, &sockets_of(&lan));
    let passed = |why: &str| client.status().placement.unwrap().counters[why];
    assert!(passed("pass_fib_rule") > 0, "the test proves nothing");
    // Also where no rule of the FIB is seen to go by it.
    client.ip("rule del fwmark 1 lookup 100");
    client.wait_settled();
    send_all(&sockets_of(&lan), 7000);
    wait_until("it is seen", LEAVE, || passed("pass_marked") > 0);
    assert_eq!(passed("placed_forwarded"), 0);
}

#[test]
fn a_user_whom_the_firewall_marks_for_a_vpn_stays_in_it() {
    let net = two_providers();
    let rules = "table ip mangle { chain out { type route hook output priority mangle;\n\
                 meta mark 0 meta skuid 1000 meta mark set 1\n} }";
    let _vpn = vpn_by_marks(&net, rules);
    up(&net);
    let said = left(&net);
    assert!(said.starts_with("new connections are left"), "{said}");
    assert_has(&said, &["ip mangle out handle"]);
    assert_by_vpn(&net, &sockets(&net, 1000));
    assert_eq!(begun(&net), set(&[U0]));
    net.client.run("nft delete table ip mangle");
    wait_until("nothing is left", LEAVE, || left(&net).is_empty());
    let seen = begun(&net);
    assert!(seen.contains(U1), "{seen:?}");
}

/// Guests of this host's that are on one network of its, and speak with each other. With br_netfilter, as Docker has it,
/// connection tracking would keep a mark, and take the connection for one that hangs on an uplink.
#[test]
fn what_a_bridge_passes_on_is_not_placed() {
    let net = two_providers();
    let client = &net.client;
    masquerade(client, "ip", "oifname { u0, u1 }");
    client.ip("link add br0 type bridge");
    client.ip("addr add 10.40.0.1/24 dev br0");
    client.ip("link set br0 up");
    let guests = [2, 3].map(|n| {
        let guest = Ns::new("guest");
        let end = format!("10.40.0.{n}/24");
        client.wire((&format!("p{n}"), &[]), &guest, ("eth0", &[&end]));
        client.ip(&format!("link set p{n} master br0"));
        guest.ip("route add default via 10.40.0.1");
        guest
    });
    client.sysctl("net.ipv4.ip_forward", "1");
    up(&net);
    assert_eq!(left(&net), "");
    let placed = || client.status().placement.unwrap().counters["placed_forwarded"];
    let seen = set_of(&sources(&net, &sockets_of(&guests[0])));
    assert_eq!(seen, set(&[U0, U1]), "for the bridge's address");
    let before = placed();
    assert!(before >= SOCKETS as u64, "{before}");
    // As to a network that this guest has, too: the other one is its way there.
    guests[1].ip(&format!("addr add {SERVER4}/32 dev lo"));
    guests[0].ip(&format!("route add {SERVER4}/32 via 10.40.0.3"));
    let other = guests[1].udp(&format!("{SERVER4}:5353"));
    for (n, socket) in (0..).zip(sockets_of(&guests[0])) {
        assert_eq!(self::seen(&other, &socket, n).ip().to_string(), "10.40.0.2");
    }
    assert_eq!(placed(), before);
}
