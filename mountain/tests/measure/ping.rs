// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain ping` in network namespaces of its own: what it measures, keeps, and says. Needs root.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use crate::ping_ways::{listen, ping, Running};
use crate::support::*;
use mountain::measure::runfile::RunFile;
use nix::sys::signal::Signal;

fn start(ns: &Ns, args: &str) -> Guard {
    Guard::piped(ns.command(MOUNTAIN).args(args.split_whitespace()))
}

/// A reflector on port 9000 that answers.
fn reflector(ns: &Ns) -> Guard {
    let reflect = start(ns, "reflect --listen 127.0.0.1:9000 --listen [::1]:9000");
    wait_until("the reflector answers", LEAVE, || {
        let output = ns.mountain("ping 127.0.0.1 --udp 9000 -c 1");
        output.status.success()
    });
    reflect
}

/// Every column is as long as there were probes, and the kernel saw less than user space; as much where the
/// machine halted and its clock was set meanwhile.
fn check_columns(run: &RunFile, count: usize) {
    let s = &run.samples;
    assert_eq!((s.len(), s.sent_us.len()), (count, count));
    assert_eq!(s.user_rtt_us.len(), count);
    assert!(s.sent_us.is_sorted());
    let mut less = 0;
    for (kernel, user) in s.rtt_us.iter().zip(&s.user_rtt_us) {
        let (kernel, user) = (kernel.unwrap(), user.unwrap());
        assert!(0.0 < kernel && kernel <= user, "{kernel} {user}");
        less += usize::from(kernel < user);
    }
    assert!(less * 10 >= count * 9, "{less} of {count}");
}

#[test]
fn loopback_in_both_families() {
    let ns = Ns::new("p");
    for (target, size) in [("127.0.0.1", 56), ("::1", 1000), ("127.0.0.1", 16)] {
        let args = format!("{target} -c 50 -i 2ms --size {size} --label here");
        let (text, run) = ping(&ns, &args);
        let rows = ["Count", "P99", "mdev", "PDV", "Reordered", "user space"];
        assert_has(&text, &rows);
        check_columns(&run, 50);
        assert_eq!((run.clock.as_str(), run.interrupted), ("kernel", false));
        assert_eq!(run.label.as_deref(), Some("here"));
        assert!(run.tool.starts_with("mountain ") && run.tool.ends_with(" icmp"));
        assert_eq!(run.target, target);
        assert!(run.command.contains("-i 2ms"), "{}", run.command);
        assert_eq!(run.interval_us, Some(2000.0));
        assert_eq!(run.payload_bytes, Some(size));
        assert!(run.started.ends_with('Z') && run.started.contains('T'));
        assert!((0.098..20.0).contains(&run.seconds), "{}", run.seconds);
        assert!(run.samples.forward_us.is_empty() && run.samples.backward_us.is_empty());
        assert_eq!(run.environment["device.lo.qdisc"], "noqueue");
        assert!(run.environment.contains_key("kernel.release"));
        assert_eq!(run.environment["mountain.steering"], "off");
    }
}

#[test]
fn json_has_both_tables_and_given_thresholds() {
    let ns = Ns::new("p");
    let text = ns.mountain_ok("ping localhost -4 -c 20 -i 1ms --threshold 0.0001,5000 --json");
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    for clock in ["rtt", "user"] {
        let table = &value[clock];
        assert_eq!((&table["sent"], &table["count"]), (&20.into(), &20.into()));
        assert_eq!(table["over"][0]["count"], 20);
        assert_eq!(table["over"][1]["count"], 0);
    }
    assert_eq!(value["address"], "127.0.0.1");
}

#[test]
fn udp_probes_tell_the_directions() {
    let ns = Ns::new("p");
    let reflect = reflector(&ns);
    for target in ["127.0.0.1", "::1"] {
        let (text, run) = ping(&ns, &format!("{target} --udp 9000 -c 50 -i 2ms"));
        assert!(text.contains("UDP probes to port 9000"), "{text}");
        check_columns(&run, 50);
        assert!(run.tool.ends_with(" udp"));
        for column in [&run.samples.forward_us, &run.samples.backward_us] {
            assert_eq!(column.len(), 50);
            let least = column.iter().flatten().copied().reduce(f64::min);
            assert_eq!(least, Some(0.0), "relative to the least");
        }
    }
    reflect.signal(Signal::SIGTERM);
    reflect.finish();
    let output = ns.mountain("ping 127.0.0.1 --udp 9000 -c 5");
    assert_eq!(output.status.code(), Some(1));
    assert!(stdout(&output).contains("refused"), "{}", stdout(&output));
    let hint = "does not answer: run `mountain reflect --listen ADDRESS:9000` there";
    assert!(stderr(&output).contains(hint), "{}", stderr(&output));
}

#[test]
fn without_ipv6_the_reflector_answers_on_the_other_loopback_address() {
    let ns = Ns::new("p");
    ns.sysctl("net.ipv6.conf.all.disable_ipv6", "1");
    // Only the default does without.
    ns.mountain_fails("reflect --listen [::1]:9000", "cannot listen on [::1]");
    let _reflect = start(&ns, "reflect");
    wait_until("the reflector answers", LEAVE, || {
        let output = ns.mountain("ping 127.0.0.1 --udp 8629 -c 1");
        output.status.success()
    });
}

#[test]
fn what_cannot_be_measured_is_said() {
    let ns = Ns::new("p");
    let fails = |args: &str, why: &str| ns.mountain_fails(&format!("ping {args}"), why);
    fails("no-such-host.invalid", "cannot resolve");
    fails("::1 -4", "no IPv4 address");
    fails("0 -c 3", "say 127.0.0.1");
    fails("192.0.2.1", "unreachable");
    fails("127.0.0.1 --dev nodev0", "no device");
    fails("127.0.0.1 --size 3", "16 to 65000");
    fails("127.0.0.1 --interval 0s", "at least");
    fails("127.0.0.1 --interval 580000000000y", "at most a day");
    fails("127.0.0.1 --interval 50y", "at most a day");
    fails("127.0.0.1 --udp 9000 -i 500us", "at least 1ms with --udp");
    fails("127.0.0.1 --threshold inf", "above 0");
    fails("127.0.0.1 --threshold 1e308", "at most a day");
    fails("127.0.0.1 --threshold 0", "above 0");
    fails("127.0.0.1 --out /nonexistent/run.json", "cannot write");
    let settle = "ab 127.0.0.1 --a true --b true --settle 580000000000y";
    ns.mountain_fails(settle, "--settle: at most a year");
    // And what the defaults are.
    assert_has(&ns.mountain_ok("ping --help"), &["1200", "10ms"]);
}

#[test]
fn without_privileges_it_says_which_or_uses_the_sysctl() {
    let ns = Ns::new("p");
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = dir.path().join("mountain");
    fs::copy(MOUNTAIN, &program).unwrap();
    let ping = |target: &str| {
        let mut setpriv = ns.command("setpriv");
        setpriv.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
        setpriv.arg(&program).args(["ping", target, "-c", "20"]);
        setpriv.args(["-i", "2ms", "--json"]).output().unwrap()
    };
    let allow = |range: &str| {
        let setting = format!("net.ipv4.ping_group_range={range}");
        let status = ns.command("sysctl").args(["-qw", &setting]).status();
        assert!(status.unwrap().success());
    };
    allow("1 0");
    let output = ping("127.0.0.1");
    assert!(!output.status.success());
    let needed = ["cap_net_raw", "net.ipv4.ping_group_range"];
    assert_has(&stderr(&output), &needed);
    allow("0 2147483647");
    for target in ["127.0.0.1", "::1"] {
        let output = ping(target);
        assert!(output.status.success(), "{}", stderr(&output));
        let value: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
        assert_eq!(value["rtt"]["count"], 20, "{value}");
        assert_eq!(value["clock"], "kernel");
    }
}

#[test]
fn a_target_that_stops_answering_loses_nothing() {
    let ns = Ns::new("p");
    let running = Running::start(&ns, "127.0.0.1 -c 400 -i 10ms");
    wait_counted(&ns, "IcmpOutEchoReps", 20);
    ns.hole("");
    let (text, run) = running.finish();
    assert!(text.contains("stopped answering"), "{text}");
    assert_eq!((run.samples.len(), run.interrupted), (400, false));
    let answered = run.samples.rtt_us.iter().flatten().count();
    assert!((20..400).contains(&answered), "{answered}");
    assert!(run.samples.rtt_us[answered..].iter().all(Option::is_none));

    let output = ns.mountain("ping 127.0.0.1 -c 5");
    assert_eq!(output.status.code(), Some(1), "nothing answers any more");
    assert!(stdout(&output).contains("100.00 %"), "{}", stdout(&output));
    assert!(stderr(&output).contains("does not answer"));
}

#[test]
fn ctrl_c_keeps_what_was_measured() {
    let ns = Ns::new("p");
    listen(&ns, "127.0.0.1:7777");
    for (way, counter, count, signal) in [
        ("", "IcmpOutEchoReps", 20, Signal::SIGINT),
        ("", "IcmpOutEchoReps", 20, Signal::SIGTERM),
        // Slow enough for the listener's queue of 128 while its thread waits for a processor.
        ("--tcp 7777 -i 10ms", "TcpActiveOpens", 100, Signal::SIGINT),
    ] {
        let running = Running::start(&ns, &format!("127.0.0.1 -c 100000 {way}"));
        wait_counted(&ns, counter, count);
        running.signal(signal);
        let (text, run) = running.finish();
        assert_has(&text, &["Median", "interrupted"]);
        assert!(run.interrupted && run.clock == "kernel");
        // Of handshakes some may be under way.
        let least = if way.is_empty() { 20 } else { 51 };
        assert!((least..100_000).contains(&run.samples.len()));
        check_columns(&run, run.samples.len());
    }
    let left = ns.run("ss -Htan state all exclude listening");
    assert_eq!(left.trim(), "", "connections were left");
}

#[test]
fn neither_a_late_reflector_nor_a_late_process_is_taken_for_the_path() {
    let ns = Ns::new("p");
    let reflect = reflector(&ns);
    let running = Running::start(&ns, "127.0.0.1 --udp 9000 -c 250 -i 20ms");
    for process in [&reflect, &running.child] {
        wait_counted(&ns, "UdpInDatagrams", 20);
        process.signal(Signal::SIGSTOP);
        // Longer than a virtual machine halts (0.56 s was seen), with fewer requests than the reflector's burst.
        std::thread::sleep(Duration::from_secs(2));
        process.signal(Signal::SIGCONT);
    }
    let (_, run) = running.finish();
    reflect.signal(Signal::SIGTERM);
    reflect.finish();
    check_columns(&run, 250);
    let max = |c: &[Option<f64>]| c.iter().flatten().copied().fold(0.0, f64::max);
    let (kernel, user) = (max(&run.samples.rtt_us), max(&run.samples.user_rtt_us));
    assert!(user > 1.9e6, "{user}");
    assert!(kernel < user / 2.0, "{kernel} {user}");
    let sent = &run.samples.sent_us;
    let gap = |i: &usize| sent[i + 1] - sent[*i];
    let pause = (0..sent.len() - 1).max_by(|a, b| gap(a).total_cmp(&gap(b)));
    let pause = pause.unwrap();
    assert!(gap(&pause) > 1.9e6, "it was stopped");
    // About a hundred sends were missed; made up for at once, they would take no time at all.
    let after = &sent[pause + 1..];
    let n = after.len().min(41);
    let took = after[n - 1] - after[0];
    assert!(took > (n - 1) as f64 * 10e3, "a burst after the pause");
}

#[test]
fn a_reader_that_is_gone_changes_nothing_but_what_is_printed() {
    let ns = Ns::new("p");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("run.json");
    let ping = |target: &str| {
        let args = format!("ping {target} -c 20 -i 1ms --out {}", file.display());
        start(&ns, &args).finish_unread()
    };
    let output = ping("127.0.0.1");
    assert_eq!(stderr(&output), "");
    assert_eq!(output.status.code(), Some(0));
    check_columns(&RunFile::read(&file).unwrap(), 20);
    ns.hole("");
    let output = ping("127.0.0.1");
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("does not answer"));
    assert_eq!(RunFile::read(&file).unwrap().samples.rtt_us, [None; 20]);
}

#[test]
fn after_the_last_answer_nothing_is_waited_for() {
    let ns = Ns::new("p");
    for way in ["", "--tcp 7777"] {
        let mut took = Vec::new();
        let is_quick = || {
            let begun = Instant::now();
            let (_, run) = ping(&ns, &format!("127.0.0.1 -c 1 -i 1h {way}"));
            assert!(begun.elapsed() < LEAVE);
            assert_eq!((run.samples.rtt_us.len(), run.interrupted), (1, false));
            took.push(run.seconds);
            run.seconds < 0.9
        };
        // A busy machine has more than one try.
        let quick = std::iter::repeat_with(is_quick).take(5).any(|quick| quick);
        assert!(quick, "{took:?}");
    }
    // What was lost is waited for, but not for an interval.
    ns.hole("");
    let output = ns.mountain("ping 127.0.0.1 -c 1 -i 1h");
    assert_eq!(output.status.code(), Some(1));
}

/// Where the first uplink goes, as for ping(8), or comes back.
#[test]
fn a_ping_goes_on_by_another_uplink() {
    let (ns, far) = (Ns::new("p"), Ns::new("q"));
    for n in [0, 1] {
        ns.wire(
            (&format!("u{n}"), &[&format!("10.9{n}.0.1/24")]),
            &far,
            (&format!("d{n}"), &[&format!("10.9{n}.0.2/24")]),
        );
        ns.ip(&format!("route add default via 10.9{n}.0.2 metric {n}1"));
    }
    far.ip("addr add 10.99.0.1/32 dev lo");
    let running = Running::start(&ns, "10.99.0.1 -c 150 -i 20ms");
    std::thread::sleep(Duration::from_millis(600));
    ns.ip("link set u0 down");
    ns.ip("addr flush dev u0");
    let (text, run) = running.finish();
    let rtts = &run.samples.rtt_us;
    let lost = rtts.iter().filter(|rtt| rtt.is_none()).count();
    assert!(lost < 15, "{lost} lost: {text}");
    assert!(rtts[149].is_some(), "the last one: {text}");
    assert!(!text.contains("stopped answering"), "{text}");
}

#[test]
fn directions_and_other_families_are_told() {
    let ns = Ns::new("p");
    let _reflector = reflector(&ns);
    let args = "127.0.0.1 --udp 9000 -c 100 -i 2ms";
    let (text, run) = ping(&ns, args);
    assert_has(
        &text,
        &["forward: median", "backward: median", "above the least"],
    );
    assert!(run.samples.directions().unwrap().forward.p99_us < 1e5);
    let text = ns.mountain_ok(&format!("ping {args} --json"));
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert!(
        value["directions"]["backward"]["p99_us"].is_number(),
        "{text}"
    );
    // By a name it is kept which address that was.
    let (_, run) = ping(&ns, "localhost -4 -c 5 -i 1ms");
    assert_eq!(run.environment["address"], "127.0.0.1");
    ns.mountain_fails("ping fe80::1 -c 1", "fe80::1%eth0 or by --dev");
}

/// Standard output is the run file's, whatever the command prints.
#[test]
fn a_recorded_command_does_not_print_into_the_run_file() {
    let ns = Ns::new("p");
    let mut cpu = ns.command(MOUNTAIN);
    cpu.args([
        "cpu",
        "--out",
        "-",
        "--interval",
        "100ms",
        "--",
        "sh",
        "-c",
        "echo hello; sleep 0.3",
    ]);
    let output = cpu.output().unwrap();
    let run: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(run["schema"], "mountain-run/1");
    assert_has(&stderr(&output), &["hello"]);
}
