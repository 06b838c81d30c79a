// SPDX-License-Identifier: GPL-2.0-or-later
//! Two providers: programs as people use them.

use std::fs;
use std::process::{Command, Output};

use crate::net::*;
use crate::support::*;
use serde_json::Value;

/// Output of a program at home whose sockets are placed.
fn run(net: &Home, program: &str, args: &[&str]) -> Output {
    let output = net.placed(&net.home, program).args(args).output();
    output.unwrap_or_else(|e| panic!("{program}: {e}; scripts/setup --test installs it"))
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// How many of the answers, each an address that the server saw, are of each uplink.
fn count(answers: &[String]) -> [usize; 2] {
    let on = |uplink: usize| {
        let of_uplink = |a: &&String| SEEN.iter().any(|family| *a == family[uplink]);
        answers.iter().filter(of_uplink).count()
    };
    [on(0), on(1)]
}

#[test]
fn curl() {
    const TIMES: usize = 20;
    let net = Home::new();
    let args = ["-c", include_str!("http.py"), "7180"];
    let _server = net.server.start("python3", &args);
    net.server.wait_open("tcp", 7180);
    net.up();
    let get = |url: &str, more: &[&str]| -> Option<String> {
        let args = [&["-sS", "-g", "-m", "20", url], more].concat();
        let output = run(&net, "curl", &args);
        output.status.success().then(|| text(&output))
    };
    for url in ["http://198.51.100.2:7180/", "http://[2001:db8:50::2]:7180/"] {
        let answers: Vec<String> = (0..TIMES).filter_map(|_| get(url, &[])).collect();
        let [a, b] = count(&answers);
        assert_eq!(a + b, TIMES, "{url}: {answers:?}");
        assert!(a > 0 && b > 0, "{url}: {a} and {b}");
    }
    net.blackhole(0);
    for url in ["http://198.51.100.2:7180/", "http://[2001:db8:50::2]:7180/"] {
        let answers: Vec<String> = (0..TIMES).filter_map(|_| get(url, &[])).collect();
        assert_eq!(count(&answers), [0, TIMES], "{url}: {answers:?}");
        // What names an uplink stays with it.
        assert_eq!(get(url, &["-m", "2", "--interface", "u0"]), None);
        let by_u1 = get(url, &["--interface", "u1"]).map(|a| count(&[a]));
        assert_eq!(by_u1, Some([0, 1]));
    }
    let args = ["-m", "2", "--interface", "10.40.0.2"];
    assert_eq!(get("http://198.51.100.2:7180/", &args), None);
    assert_eq!(net.refused(), 0);
}

/// A DNS server that knows one name; its log.
fn dns_server(ns: &Ns, mut command: Command) -> (Guard, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let log = format!("--log-facility={}/log", folder.path().display());
    let server = Guard::start(command.args(DNSMASQ.split(' ')).args([
        "--log-queries",
        &log,
        "--address=/steady.test/192.0.2.7",
    ]));
    ns.wait_open("udp", 5353);
    (server, folder)
}

const DIG: &str = "-p 5353 +short +tries=1 +time=20 steady.test";

#[test]
fn dns_questions_and_answers() {
    const TIMES: usize = 20;
    let net = Home::new();
    let (_server, folder) = dns_server(&net.server, net.server.command("dnsmasq"));
    net.up();
    let ask = |server: &str| {
        let args = format!("@{server} {DIG}");
        let output = run(&net, "dig", &args.split(' ').collect::<Vec<_>>());
        // dig takes no answer from another address than the one it asked.
        assert_eq!(text(&output), "192.0.2.7", "{output:?}");
    };
    let asked_by = || -> Vec<String> {
        let log = fs::read_to_string(folder.path().join("log")).unwrap();
        let lines = log.lines().filter(|line| line.contains("query["));
        let from = |line: &str| line.rsplit(' ').next().unwrap().to_owned();
        lines.map(from).collect()
    };
    for server in SERVER {
        for _ in 0..TIMES {
            ask(server);
        }
    }
    let [a, b] = count(&asked_by());
    assert_eq!(a + b, 2 * TIMES);
    assert!(a > 0 && b > 0, "{a} and {b}");
    net.blackhole(1);
    for server in SERVER {
        for _ in 0..TIMES {
            ask(server);
        }
    }
    let [_, after] = count(&asked_by());
    assert_eq!(after, b, "no question by the dead uplink");
    assert_eq!(net.refused(), 0);
}

#[test]
fn a_server_at_home_answers_from_the_address_that_was_asked() {
    let net = Home::new();
    // Placed like any other program, and bound to no address.
    let _server = dns_server(&net.home, net.placed(&net.home, "dnsmasq"));
    net.up();
    for n in 0..2 {
        let server = &net.server;
        server.ip(&format!("route add 10.4{n}.0.0/24 via 198.51.100.1"));
        server.ip(&format!("-6 route add fd4{n}::/64 via 2001:db8:50::1"));
    }
    for address in OWN.iter().flatten() {
        for how in ["+notcp", "+tcp"] {
            let args = format!("@{address} {how} {DIG}");
            let args: Vec<&str> = args.split(' ').collect();
            let output = net.server.output("dig", &args);
            assert_eq!(text(&output), "192.0.2.7", "{address} {how}: {output:?}");
        }
    }
    assert_eq!(net.refused(), 0);
}

#[test]
fn iperf3_in_both_directions() {
    let net = Home::new();
    let _server = net.server.start("iperf3", &["-s", "-p", "7201"]);
    net.server.wait_open("tcp", 7201);
    net.up();
    for server in SERVER {
        for direction in ["--no-delay", "-R"] {
            let iperf = |more: &[&str]| -> Value {
                let args = ["-J", "-c", server, "-p", "7201", "-P", "4", direction];
                let output = run(&net, "iperf3", &[&args, more].concat());
                assert!(output.status.success(), "{more:?}: {}", text(&output));
                serde_json::from_slice(&output.stdout).unwrap()
            };
            // Not an amount: it counts what has arrived when the last byte is handed to the kernel.
            let tcp = iperf(&["-t", "1"]);
            let bytes = tcp["end"]["sum_received"]["bytes"].as_u64().unwrap();
            assert!(bytes >= 1_000_000, "{server} {direction}: {bytes} bytes");
            // From addresses of the home, each by its own uplink (or it would have been refused).
            for stream in tcp["start"]["connected"].as_array().unwrap() {
                let own = stream["local_host"].as_str().unwrap();
                assert!(OWN.iter().flatten().any(|a| *a == own), "{stream}");
            }
            let udp = iperf(&["-u", "-b", "5M", "-t", "1", "-l", "1200"]);
            let sum = &udp["end"]["sum"];
            let packets = sum["packets"].as_i64().unwrap();
            let lost = sum["lost_packets"].as_i64().unwrap();
            let few_lost = packets > 500 && lost < packets / 10;
            assert!(few_lost, "{server} {direction}: {lost} of {packets}");
        }
    }
    assert_eq!(net.refused(), 0);
}

#[test]
fn ping_measures_the_uplink_that_it_is_told() {
    let net = Home::new().running();
    net.blackhole(1);
    for (i, is_answered) in [(0, true), (1, false)] {
        let device = format!("u{i}");
        for (by, server) in [
            (device.as_str(), SERVER[0]),
            (OWN[0][i], SERVER[0]),
            (device.as_str(), SERVER[1]),
            (OWN[1][i], SERVER[1]),
        ] {
            let ping = ["-c", "3", "-i", "0.2", "-W", "1", "-I", by, server];
            let output = run(&net, "ping", &ping);
            let said = text(&output);
            let expected = ["0 received", "3 received"][usize::from(is_answered)];
            assert!(said.contains(expected), "{by}: {said}");
        }
    }
    assert_eq!(net.refused(), 0);
}

#[test]
fn containers_behind_a_bridge() {
    let net = Home::new();
    let container = Ns::new("c");
    for command in [
        "link add br0 type bridge",
        "addr add 172.18.0.1/16 dev br0",
        "link set br0 up",
    ] {
        net.home.ip(command);
    }
    let end: (_, &[&str]) = ("eth0", &["172.18.0.2/16"]);
    net.home.wire(("port0", &[]), &container, end);
    net.home.ip("link set port0 master br0");
    container.ip("route add default via 172.18.0.1");
    net.home.sysctl("net.ipv4.ip_forward", "1");
    // As Docker's: one address for all that leaves the bridge.
    let hook = "nat hook postrouting priority srcnat";
    let rule = "oifname != br0 ip saddr 172.18.0.0/16 masquerade";
    net.home.chain("ip nat POSTROUTING", hook, rule);
    net.up();
    let mut flows = net.flows_in(&container);
    let opened = flows.open_by_both(&["tcp", "udp"], SERVER[0]);
    assert_eq!(flows.ask(), opened, "and stay");
    net.blackhole(0);
    let mut new = net.flows_in(&container);
    new.assert_all_open(EACH, SERVER[0], [0, EACH]);
    assert_eq!(net.refused(), 0);
}
