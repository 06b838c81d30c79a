// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain ping` by TCP, over the paths of a running `mountain up`, and whose timestamps it
//! takes. Needs root.

use std::process::Output;
use std::time::Duration;

use crate::support::*;
use mountain::measure::runfile::RunFile;
use nix::sys::signal::Signal;
use socket2::SockRef;

/// A ping under way that writes a run file.
pub struct Running {
    pub child: Guard,
    dir: tempfile::TempDir,
}

impl Running {
    pub fn start(ns: &Ns, args: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut command = ns.command(MOUNTAIN);
        command.arg("ping").args(args.split_whitespace());
        command.arg("--out").arg(dir.path().join("run.json"));
        let child = Guard::piped(&mut command);
        Self { child, dir }
    }

    pub fn signal(&self, signal: Signal) {
        self.child.signal(signal);
    }

    /// What it prints; it must succeed.
    pub fn finish(self) -> (String, RunFile) {
        let (output, run) = self.end();
        assert!(output.status.success(), "{}", stderr(&output));
        (stdout(&output), run)
    }

    fn end(self) -> (Output, RunFile) {
        let output = self.child.finish();
        let run = RunFile::read(&self.dir.path().join("run.json"));
        let run = run.unwrap_or_else(|e| panic!("{e:#}: {}", stderr(&output)));
        let left = std::fs::read_dir(self.dir.path()).unwrap().count();
        assert_eq!(left, 1, "nothing else is written");
        (output, run)
    }
}

pub fn ping(ns: &Ns, args: &str) -> (String, RunFile) {
    Running::start(ns, args).finish()
}

/// Accepts connections, and resets them at once, for as long as the test runs.
pub fn listen(ns: &Ns, address: &str) {
    let listener = ns.listen(address);
    std::thread::spawn(move || {
        // One that was reset while it waited is an error of its own.
        for connection in listener.incoming().flatten() {
            let _ = SockRef::from(&connection).set_linger(Some(Duration::ZERO));
        }
    });
}

#[test]
fn handshakes_in_both_families_leave_nothing_behind() {
    let ns = Ns::new("t");
    listen(&ns, "[::]:7777");
    for target in ["127.0.0.1", "::1"] {
        let (text, run) = ping(&ns, &format!("{target} --tcp 7777 -c 60 -i 2ms"));
        assert_has(&text, &["TCP handshakes with port 7777", "its own measure"]);
        assert!(!text.contains("refus") && !text.contains("again"), "{text}");
        assert!(run.tool.ends_with(" tcp"), "{}", run.tool);
        assert_eq!((run.clock.as_str(), run.payload_bytes), ("kernel", Some(0)));
        assert_eq!(run.environment["tcp.answers"], "accepted");
        assert_eq!(run.environment["device.lo.qdisc"], "noqueue");
        let s = &run.samples;
        assert_eq!((s.rtt_us.len(), s.user_rtt_us.len()), (60, 60));
        for (kernel, user) in s.rtt_us.iter().zip(&s.user_rtt_us) {
            let (kernel, user) = (kernel.unwrap(), user.unwrap());
            assert!(0.0 < kernel && kernel < user, "{kernel} {user}");
            assert_eq!(kernel.fract(), 0.0, "whole µs");
        }
        let pace = (s.sent_us[59] - s.sent_us[0]) / 59.0;
        assert!((1_900.0..20_000.0).contains(&pace), "{pace}");
    }
    let left = ns.run("ss -Htan state all exclude listening");
    assert_eq!(left.trim(), "", "connections were left");
}

#[test]
fn a_refusal_is_an_answer_and_is_called_one() {
    let ns = Ns::new("t");
    let (text, run) = ping(&ns, "127.0.0.1 --tcp 7777 -c 20 -i 2ms");
    let told = ["20 of the answers were refusals", "does not time refused"];
    assert_has(&text, &told);
    assert_eq!(run.environment["tcp.answers"], "refused");
    assert_eq!(run.clock, "user");
    assert!(run.samples.rtt_us.iter().all(Option::is_some));
    assert_eq!(run.samples.rtt_us, run.samples.user_rtt_us);
    let text = ns.mountain_ok("ping ::1 --tcp 7777 -c 5 -i 2ms --json");
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(value["refused"], 5);
    assert_eq!(value["repeated"], 0);
    assert_eq!(value["clock"], "user");
}

/// The far host sends its answers again after 1 s, as this one sends its SYNs.
#[test]
fn what_was_sent_again_is_a_loss_and_not_an_answer_of_a_second() {
    let ns = Ns::new("t");
    listen(&ns, "127.0.0.1:7777");
    // Of SYN-ACKs six seconds, so that some probes are left when the rule is gone, however slow that is.
    for (lost_are, probes) in [("", 100), ("tcp flags & (syn|ack) == (syn|ack)", 300)] {
        ns.hole(lost_are);
        let running = Running::start(&ns, &format!("127.0.0.1 --tcp 7777 -c {probes} -i 20ms"));
        wait_counted(&ns, "TcpActiveOpens", 20);
        ns.no_hole();
        let (text, run) = running.finish();
        assert!(text.contains("had been sent again"), "{text}");
        let rtts = &run.samples.rtt_us;
        let lost = rtts.iter().take_while(|r| r.is_none()).count();
        assert!((5..probes - 10).contains(&lost), "{lost_are}: {lost}");
        assert!(rtts[lost..].iter().all(Option::is_some), "{rtts:?}");
        for column in [rtts, &run.samples.user_rtt_us] {
            let slowest = column.iter().flatten().copied().fold(0.0, f64::max);
            assert!(slowest < 900e3, "{lost_are}: repeated: {slowest}");
        }
        assert_eq!(run.clock, "kernel");
    }
}

#[test]
fn without_an_answer_it_says_so() {
    let ns = Ns::new("t");
    let fails = |args: &str, why: &str| ns.mountain_fails(&format!("ping {args}"), why);
    fails("192.0.2.1 --tcp 80", "unreachable");
    fails("127.0.0.1 --tcp 0", "choose a port from 1 to 65535");
    fails("127.0.0.1 --tcp 80 --udp 80", "cannot be used with");
    fails("127.0.0.1 --tcp 80 --size 100", "cannot be used with");
    ns.hole("");
    let (output, run) = Running::start(&ns, "127.0.0.1 --tcp 80 -c 200 -i 1ms").end();
    assert_eq!(output.status.code(), Some(1));
    assert!(stdout(&output).contains("100.00 %"), "{}", stdout(&output));
    assert!(stderr(&output).contains("does not answer"));
    assert_eq!(run.samples.rtt_us, [None; 200]);
    assert!(run.seconds < 20.0, "{}", run.seconds);
    assert!(!run.environment.contains_key("tcp.answers"));
}

fn range(column: &[Option<f64>]) -> (f64, f64) {
    let answered = || column.iter().flatten().copied();
    let least = answered().fold(f64::MAX, f64::min);
    (least, answered().fold(0.0, f64::max))
}

#[test]
fn the_kernel_s_measure_is_the_path_s_delay_whatever_this_process_does() {
    let ns = Ns::new("t");
    let far = crate::tun::FarHost::start(&ns, Duration::from_millis(40));
    let running = Running::start(&ns, "10.40.0.2 --tcp 80 -c 100 -i 10ms");
    wait_counted(&ns, "TcpActiveOpens", 20);
    running.signal(Signal::SIGSTOP);
    // The time itself is the point: answers wait so long for the process.
    std::thread::sleep(Duration::from_millis(1000));
    running.signal(Signal::SIGCONT);
    let (_, run) = running.finish();
    let s = &run.samples;
    assert!(s.rtt_us.iter().all(Option::is_some), "{:?}", s.rtt_us);
    let (kernel, user) = (range(&s.rtt_us), range(&s.user_rtt_us));
    assert!(kernel.0 >= 40e3 && user.0 >= 40e3, "{kernel:?} {user:?}");
    assert!(user.1 > 900e3, "it was stopped: {user:?}");
    assert!(kernel.1 < user.1 / 2.0, "{kernel:?} {user:?}");
    assert_eq!(run.clock, "kernel");

    // Longer than the kernel waits before it sends a SYN again: slow, not lost.
    far.set_delay(Duration::from_millis(1_200));
    let (text, run) = ping(&ns, "10.40.0.2 --tcp 80 -c 10 -i 250ms");
    assert!(!text.contains("again"), "{text}");
    let s = &run.samples;
    let answered = s.rtt_us.iter().flatten().count();
    assert!(answered >= 9, "{:?}", s.rtt_us);
    let (kernel, user) = (range(&s.rtt_us), range(&s.user_rtt_us));
    let no_less = kernel.0 >= 1_199e3 && user.0 >= 1_200e3;
    assert!(no_less, "{kernel:?} {user:?}");
    assert!(kernel.1 <= user.1, "{kernel:?} {user:?}");

    // Also where the last probe is sent before the first answer comes.
    let (_, run) = ping(&ns, "10.40.0.2 --tcp 80 -c 3 -i 10ms");
    let answered = run.samples.rtt_us.iter().flatten().count();
    assert!(answered >= 2, "{:?}", run.samples.rtt_us);
}

#[test]
fn a_path_of_the_daemon_is_measured_by_its_name() {
    let net = Net::new();
    let client = &net.client;
    client.mountain_fails("ping 203.0.113.1 --path dsl", "not running");
    // Two gateways on one device.
    net.server.ip("addr add 10.30.1.3/24 dev s1");
    client.ip("route add 10.97.0.0/24 nexthop via 10.30.1.2 dev u1 nexthop via 10.30.1.3 dev u1");
    let file = config(
        "[[path]]\ndev = \"u0\"\nname = \"dsl\"\n\
         [[path]]\ndev = \"u1\"\nname = \"lte\"\n\
         [[path]]\ndev = \"u1\"\ngateway = \"10.30.1.3\"\nname = \"lte2\"\n",
    );
    client.mountain_ok(&format!("up --config {}", file.path().display()));
    listen(&net.server, "[::]:7777");
    for (args, target) in [
        ("-c 20", SERVER4),
        ("-c 20", SERVER6),
        ("-c 20 --tcp 7777", SERVER4),
        ("-c 20 --tcp 7777", SERVER6),
    ] {
        let (_, run) = ping(&net.client, &format!("{target} {args} -i 2ms --path dsl"));
        assert!(run.samples.rtt_us.iter().all(Option::is_some));
        assert_eq!(run.environment["path"], "dsl");
        assert!(run.environment.contains_key("device.u0.qdisc"));
        assert!(!run.environment.contains_key("device.u1.qdisc"));
    }
    let fails = |args: &str, why: &str| net.client.mountain_fails(&format!("ping {args}"), why);
    let known = "no path \"x\"; mountain knows dsl, lte, lte2";
    fails("203.0.113.1 --path x", known);
    fails("203.0.113.1 --path dsl --dev u0", "cannot be used with");
    // The routes by u1 leave it to a hash which gateway is taken; the gateways themselves do not.
    fails("203.0.113.1 --path lte", "share u1");
    fails("10.97.0.1 --path lte2", "share u1");
    ping(&net.client, "10.30.1.3 -c 5 -i 2ms --path lte2");
    ping(&net.client, &format!("{SERVER6} -c 5 -i 2ms --path lte"));
    // A neighbour is not behind the gateway, and what has no such route cannot be.
    fails("10.30.0.77 --path dsl", "on the link of u0");
    net.client
        .ip("route add 203.0.113.1/32 via 10.30.0.9 dev u0");
    let other = "by 10.30.0.9, not by the path's gateway 10.30.0.2";
    fails("203.0.113.1 --path dsl", other);
    net.client
        .ip("route del 203.0.113.1/32 via 10.30.0.9 dev u0");
    net.client.ip("-6 rule add to 2001:db8:98::7 unreachable");
    let silent = "does not say how it sends to 2001:db8:98::7 over u0";
    fails("2001:db8:98::7 --path dsl", silent);

    // Both halves of an A/B go over the path, too.
    let ab = |args: &str| format!("ab {args} --a true --b true --settle 0s -c 2 -i 2ms");
    (net.client).mountain_fails(&ab("203.0.113.1 --path x"), known);
    for (path, device, other) in [("dsl", "u0", "u1"), ("lte", "u1", "u0")] {
        let args = ab(&format!("{SERVER6} --path {path} -o -"));
        let measured: serde_json::Value =
            serde_json::from_str(&net.client.mountain_ok(&args)).unwrap();
        for side in 0..2 {
            let environment = &measured["runs"][side][0]["environment"];
            let knows = |device: &str| !environment[format!("device.{device}.qdisc")].is_null();
            assert!(knows(device) && !knows(other), "{path}: {environment}");
        }
    }

    // Of a silent path only its own probes are lost.
    net.blackhole(0);
    let output = net
        .client
        .mountain("ping 203.0.113.1 -c 5 -i 2ms --path dsl");
    assert_eq!(output.status.code(), Some(1), "{}", stdout(&output));
    ping(&net.client, &format!("{SERVER6} -c 5 -i 2ms --path lte"));
}

/// Both devices lead to such an address.
#[test]
fn a_link_local_target_is_measured_over_its_device() {
    let net = Net::probed();
    listen(&net.server, "[::]:7777");
    for i in [0, 1] {
        let (_, run) = ping(&net.client, &format!("fe80::d%u{i} --tcp 7777 -c 5 -i 2ms"));
        for device in [0, 1] {
            let of_device = format!("device.u{device}.qdisc");
            let is_known = run.environment.contains_key(&of_device);
            assert_eq!(is_known, device == i, "u{i}: {of_device}");
        }
    }
    let ab = "ab fe80::d%u1 --a true --b true --settle 1ms -c 20 -i 1ms --json";
    let value: serde_json::Value = serde_json::from_str(&net.client.mountain_ok(ab)).unwrap();
    assert_eq!(value["rounds"], 8, "{value}");
}

#[test]
fn whose_timestamps_they_are_is_said() {
    let net = Net::new();
    for args in ["--dev u0", "--dev u0 --hardware", ""] {
        let (text, run) = ping(&net.client, &format!("10.30.0.2 -c 20 -i 2ms {args}"));
        let why = "software (u0 offers no hardware timestamps)";
        assert!(text.contains(&format!("timestamps: {why}")), "{text}");
        assert_eq!(run.clock, "kernel");
        assert_eq!(run.environment["timestamps"], why);
    }
    // The device is asked where there is no loopback, too; and stamps are waited for.
    net.client.ip("link set lo down");
    let (_, run) = ping(&net.client, "10.30.0.2 -c 20 -i 2ms");
    assert!(run.environment.contains_key("device.u0.offload.gro"));
    assert_eq!(run.clock, "kernel");
    net.client
        .mountain_fails("ping 10.30.0.2 --hardware", "--dev or --path");
}
