// SPDX-License-Identifier: GPL-2.0-or-later
//! What the command line says and does when things are not as they should be.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::Duration;

use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;

use crate::support::*;
use mountain::steer::explain::Use;

/// The program in a folder where everybody may run it.
fn for_everybody() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = dir.path().join("mountain");
    fs::copy(MOUNTAIN, &program).unwrap();
    (dir, program)
}

#[test]
fn without_root_it_says_so() {
    let (_dir, program) = for_everybody();
    for args in [
        "up",
        "down",
        "status",
        "redirect list",
        "redirect del --all",
    ] {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
        command.arg(&program).args(args.split(' '));
        let output = command.output().unwrap();
        assert!(!output.status.success(), "{args:?}");
        assert_has(&stderr(&output), &["needs root"]);
    }
}

/// Root of a container, mostly.
#[test]
fn root_that_may_change_no_network_is_told() {
    let ns = Ns::new("c");
    let without = [
        "--bounding-set=-net_admin",
        "--inh-caps=-net_admin",
        MOUNTAIN,
    ];
    let said = |command: &[&str]| stderr(&ns.output("setpriv", &[&without, command].concat()));
    for command in ["up", "down"] {
        assert_has(&said(&[command]), &["needs CAP_NET_ADMIN", "--cap-add"]);
    }
    assert_has(&said(&["up", "--dry-run"]), &["no multipath route"]);
}

#[test]
fn an_empty_mountain_log_asks_for_nothing() {
    for (log, is_told) in [("", true), ("error", false)] {
        let ns = Ns::new("c");
        let mut up = ns.command("timeout");
        up.args(["1", MOUNTAIN, "up", "--foreground", "--wait"]);
        let output = up.env("MOUNTAIN_LOG", log).output().unwrap();
        let said = stderr(&output);
        assert_eq!(said.contains(" INFO "), is_told, "{log}: {said}");
    }
}

#[test]
fn the_root_of_a_user_namespace_is_told_that_it_is_none() {
    let (_dir, program) = for_everybody();
    let check = [
        "--user",
        "--map-root-user",
        program.to_str().unwrap(),
        "check",
    ];
    let output = Ns::new("c").output("unshare", &check);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_has(&stdout(&output), &["✗ privileges", "user namespace"]);
}

#[test]
fn without_a_multipath_route_it_says_what_is_missing() {
    let ns = Ns::new("c");
    let text = ns.mountain_fails("up", "no multipath route");
    assert_has(&text, &["--wait"]);
    // And nothing is left of the attempt.
    ns.mountain_says("down", "not running");
}

#[test]
fn with_wait_it_adopts_the_route_that_comes_later() {
    let mut net = Net::new();
    net.client.ip("route del 203.0.113.0/24");
    net.client.ip("-6 route del 2001:db8:98::/64");
    let log = net.start("up --foreground --wait");
    wait_said(&log, "waiting for one");
    net.client
        .mountain_says("status", "waiting for a multipath route");
    // A laptop's processor may sleep meanwhile: a timer of 10 ms alone would be 200.
    let wake_ups = net.client.wake_ups(Duration::from_secs(2));
    assert!(wake_ups < 100, "{wake_ups} wake-ups in 2 s");
    net.multipath();
    wait_until("both routes are adopted", LEAVE, || {
        net.client.status().groups.len() == 2
    });
}

#[test]
fn a_second_instance_and_unknown_policies_are_refused_and_the_first_goes_on() {
    let net = Net::new();
    net.up();
    let pid = net.client.pid();
    for args in ["up", "up --foreground"] {
        net.client.mountain_fails(args, "already runs");
        assert_ends_service(net.client.mountain(args));
    }
    for name in ["ecmp", "min-rtt", "argmax-load", "mountain"] {
        net.client.mountain_ok(&format!("policy {name}"));
        assert_eq!(net.client.status().policy.name(), name);
    }
    let text = net.client.mountain_fails("policy fastest", "fastest");
    assert_has(&text, &["argmax-load"]);
    assert_eq!(net.client.status().policy.name(), "mountain");
    assert_eq!(net.client.pid(), pid);
}

/// Both look for a daemon before there is one.
#[test]
fn of_two_that_start_at_the_same_moment_one_is_told_that_the_other_runs() {
    let net = Net::new();
    let start = || Guard::piped(net.client.command(MOUNTAIN).arg("up"));
    let outputs = [start(), start()].map(Guard::finish);
    let (won, lost): (Vec<_>, Vec<_>) = outputs.iter().partition(|o| o.status.success());
    let ([won], [lost]) = (&won[..], &lost[..]) else {
        panic!("{outputs:#?}");
    };
    assert_has(&stdout(won), &["u0", "runs in the background"]);
    assert_eq!(lost.status.code(), Some(75), "{}", stderr(lost));
    assert_has(&stderr(lost), &["already runs"]);
    assert_eq!(net.client.status().groups.len(), 2, "the other goes on");
    let path = net.client.control_socket().replace("control.sock", "log");
    let log = || fs::read_to_string(&path).unwrap();
    let all = ["group 0:", "group 1:", "running; "];
    assert_has(&log(), &all);
    assert!(!log().contains("already runs"), "{}", log());
    // A new daemon does not add to the log of a killed one.
    net.client.end_daemon(Signal::SIGKILL);
    net.client.mountain_ok("up");
    assert_has(&log(), &all);
    assert_eq!(log().matches("running; ").count(), 1, "{}", log());
}

#[test]
fn a_bad_configuration_is_named_by_file_line_and_key() {
    let ns = Ns::new("c");
    let file = config("[steer]\n\ncost_weight = 4096\n");
    let name = file.path().display();
    let said = ns.mountain_fails(&format!("up --config {name}"), &format!("{name}:3:"));
    assert_has(&said, &["cost_weight"]);
    let said = ns.mountain_fails("up --config /nonexistent.toml", "/nonexistent.toml");
    assert_eq!(said.matches("No such file").count(), 1, "{said}");
    let check = ns.mountain(&format!("check --json --config {name}"));
    assert_eq!(check.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&check.stdout).unwrap();
    let items = report["items"].as_array().unwrap();
    let is_named = |item: &&Value| item["name"] == "configuration" && item["level"] == "fail";
    let found = items.iter().find(is_named).expect("what is wrong");
    assert_has(found["what"].as_str().unwrap(), &["cost_weight"]);
    let foreground = format!("up --foreground --config {name}");
    assert_ends_service(ns.mountain(&foreground));
    assert_ends_service(ns.mountain("up --no-such-option"));
    // This may be otherwise at the next try.
    let other = ns.mountain("up --foreground").status.code();
    assert_eq!(other, Some(1));
}

/// What a systemd unit sets an option to.
fn unit_option(unit: &str, key: &str) -> String {
    let file = format!("{}/../packaging/{unit}", env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(file).unwrap();
    let mut options = text.lines().filter_map(|line| line.split_once('='));
    let found = options.find(|(name, _)| *name == key);
    found.unwrap_or_else(|| panic!("{unit}: no {key}")).1.into()
}

/// systemd does not try again what would come to the same.
#[track_caller]
fn assert_ends_service(output: Output) {
    assert_ends("mountain", &output);
}

#[track_caller]
fn assert_ends(service: &str, output: &Output) {
    let codes = unit_option(&format!("{service}.service"), "RestartPreventExitStatus");
    let code = output.status.code().unwrap().to_string();
    let is_named = codes.split(' ').any(|named| named == code);
    assert!(is_named, "{code}: {}", stderr(output));
}

#[test]
fn options_that_make_no_sense_are_refused_with_what_is_missing() {
    let said = |args: &[&str]| {
        // One that is not refused might go on for ever.
        let command = [&["10", MOUNTAIN], args].concat();
        let output = Command::new("timeout").args(command).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        stderr(&output)
    };
    let del = said(&["redirect", "del", "--all-namespaces"]);
    assert_has(&del, &["required", "\n  --all\n"]);
    assert!(!del.contains("\n  --proto"), "{del}");
    // It would read no file.
    let watch = said(&["redirect", "watch", "--config", "/nonexistent"]);
    assert_has(&watch, &["required", "\n  --restore\n"]);
    // None of many decisions would look like none at all.
    assert_has(&said(&["explain", "-n", "0"]), &["0 is not in 1.."]);
}

#[test]
fn help_that_cannot_be_written_fails_unless_nobody_reads_it() {
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let mut help = Command::new(MOUNTAIN);
    let output = help.arg("--help").stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_has(&stderr(&output), &["cannot write", "No space left"]);
    let (read, write) = std::io::pipe().unwrap();
    drop(read);
    let mut help = Command::new(MOUNTAIN);
    let output = help.arg("--help").stdout(write).output().unwrap();
    assert_eq!(
        (output.status.code(), stderr(&output).as_str()),
        (Some(0), "")
    );
}

/// As with a file in /etc/default that sets no address, or one with a typing error.
#[test]
fn a_reflector_without_an_address_is_not_started_again() {
    for address in ["", "192.0.2.1", "192.0.2.256:8629"] {
        let mut command = Command::new(MOUNTAIN);
        let output = command.args(["reflect", "--listen", address]).output();
        assert_ends("mountain-reflect", &output.unwrap());
    }
}

/// `su` without `-` keeps the PATH of the user, in which /usr/sbin is missing.
#[test]
fn programs_of_the_system_are_found_without_their_folders_in_path() {
    let mut command = Command::new(MOUNTAIN);
    command.args(["ab", "127.0.0.1", "--a", "tc -V", "--b", "no-such-program"]);
    let output = command.env("PATH", "/nonexistent").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    // Not tc, which is asked for first.
    assert_has(&stderr(&output), &["there is no program no-such-program"]);
}

/// By the rule of systemd.service(5): the delays grow exponentially, in so many steps.
#[test]
fn systemd_overcomes_a_short_fault_and_tries_what_lasts_ever_less_often() {
    for unit in [
        "mountain.service",
        "mountain-redirect.service",
        "mountain-reflect.service",
    ] {
        let number = |key: &str| unit_option(unit, key).parse::<f64>().unwrap();
        let (first, longest) = (number("RestartSec"), number("RestartMaxDelaySec"));
        let (limit, span) = (number("StartLimitBurst"), number("StartLimitIntervalSec"));
        let steps = number("RestartSteps");
        let delay = |n: f64| first * (longest / first).powf((n / steps).min(1.0));
        let after = |tries: u32| (0..tries).map(|n| delay(n.into())).sum::<f64>();
        assert!(after(3) <= 40.0, "{unit}: three take {} s", after(3));
        assert!(delay(10.0) >= 60.0, "{unit}: too often for what lasts");
        // A systemd that knows of steps never gives up, even if a try takes no time.
        let within = (0..).take_while(|&tries| after(tries) <= span).count();
        assert!((within as f64) < limit, "{unit}: given up after {within}");
        // Another one does, even if a try takes 3 s, but not at once.
        let is_given_up = limit * (first + 3.0) < span;
        assert!(is_given_up, "{unit}: every {first} s for ever");
        assert!(limit * first >= 30.0, "{unit}: given up at once");
    }
}

/// `systemctl start` returns then.
#[test]
fn systemd_is_told_when_it_runs() {
    let net = Net::new();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    let mut up = net.client.command(MOUNTAIN);
    up.args(["up", "--foreground"]).env("NOTIFY_SOCKET", &path);
    let (_up, log) = start_logged(&mut up);
    socket.set_read_timeout(Some(6 * LEAVE)).unwrap();
    let mut told = [0; 64];
    let length = socket.recv(&mut told);
    let length = length.unwrap_or_else(|e| panic!("{e}: {}", said(&log)));
    assert_eq!(told[..length], *b"READY=1");
    assert_eq!(net.client.status().groups.len(), 2);
    net.client.mountain_ok("down");
}

#[test]
fn a_device_that_no_route_uses_is_pointed_out() {
    let mut net = Net::new();
    let log = net.start_configured("[[path]]\ndev = \"nope0\"\n");
    wait_said(&log, "nope0");
    assert_eq!(net.client.status().paths.len(), 4, "and the rest works");
}

/// The targets of probes that begin so.
fn targets(net: &Net, prefix: &str) -> Vec<String> {
    let paths = net.client.status().paths.into_iter();
    let mut targets: Vec<String> = paths.map(|p| p.probe_target).collect();
    targets.retain(|target| target.starts_with(prefix));
    targets.sort();
    targets
}

/// The kernel would send the probes of both by the first.
#[test]
fn two_gateways_on_one_device_are_each_measured() {
    let mut net = Net::new();
    net.server.ip("addr add 10.30.0.3/24 dev s0");
    net.client.ip("route replace 203.0.113.0/24 src 10.98.0.1 \
         nexthop via 10.30.0.2 dev u0 nexthop via 10.30.0.3 dev u0");
    let config = "[[path]]\ndev = \"u0\"\nprobe_target = \"203.0.113.1\"\n";
    let log = net.start_configured(config);
    wait_said(
        &log,
        "u0 via 10.30.0.2, u0 via 10.30.0.3: probes go to the gateways",
    );
    assert_eq!(targets(&net, "10.30.0."), ["10.30.0.2", "10.30.0.3"]);
    net.client.mountain_ok("down");
    // Each by its own.
    net.client.ip("route add 192.0.2.8 via 10.30.0.2 dev u0");
    net.client.ip("route add 192.0.2.9 via 10.30.0.3 dev u0");
    let entry = |last: u32| {
        let gateway = format!("10.30.0.{}", last - 6);
        let to = format!("192.0.2.{last}");
        format!("[[path]]\ndev = \"u0\"\ngateway = \"{gateway}\"\nprobe_target = \"{to}\"\n")
    };
    let _log = net.start_configured(&(entry(8) + &entry(9)));
    assert_eq!(targets(&net, "192.0.2.").len(), 2);
}

/// All flows would leave the one with the longer way.
#[test]
fn a_far_target_for_one_path_of_a_route_is_doubted() {
    let mut net = Net::new();
    let config = "[[path]]\ndev = \"u0\"\nprobe_target = \"203.0.113.1\"\n";
    let log = net.start_configured(config);
    wait_said(&log, "u0 is measured to 203.0.113.1, u1 to its gateway");
    wait_said(&log, "give all paths of the route the same `probe_target`");
}

#[test]
fn unreachable_probe_targets_are_said_and_routing_goes_on() {
    let mut net = Net::new();
    // Addresses behind the gateways that nobody has.
    let log = net.start_configured(
        "[[path]]\ndev = \"u0\"\nprobe_target = \"203.0.113.200\"\n\
         [[path]]\ndev = \"u1\"\nprobe_target = \"203.0.113.201\"\n",
    );
    let traffic = Traffic::start(&net, SERVER4, 20);
    for target in ["203.0.113.200", "203.0.113.201"] {
        wait_said(&log, &format!("to {target} was answered"));
    }
    // These may all be on one path now: the one that was given up last.
    traffic.finish().assert_whole("running flows");
    let traffic = Traffic::start(&net, SERVER4, 20);
    let counts = traffic.during(HALF).assert_whole("new flows");
    assert!(counts.by_both(), "by the kernel's own choice: {counts:?}");
}

#[test]
fn a_dry_run_decides_and_attaches_nothing() {
    let mut net = Net::new();
    let log = net.start("up --dry-run");
    wait_said(&log, "running");
    let status = net.client.status();
    assert!(status.dry_run);
    // No program is loaded.
    assert!(status.counters.is_none(), "{status:#?}");
    net.wait_good();
    net.blackhole(1);
    wait_until("the decision is taken", LEAVE, || {
        net.client.mountain_ok("explain").contains("u1")
    });
    let traffic = Traffic::start(&net, SERVER4, 20);
    traffic.during(HALF).assert_lost("but nothing is moved");
}

#[test]
fn a_status_right_after_the_start_says_that_measuring_has_just_begun() {
    let net = Net::new();
    // On a busy machine it may be over before it can be said.
    let is_said = || {
        let text = net.client.mountain_ok("up");
        assert!(!text.contains("unknown"), "{text}");
        net.client.mountain_ok("down");
        text.contains("measuring has just begun")
    };
    assert!((0..5).any(|_| is_said()), "not once of five times");

    net.up();
    let status = net.client.status();
    // New flows are left alone for two seconds.
    assert!(!status.settled || status.uptime_s >= 2.0, "{status:#?}");
    net.client.wait_settled();
    let said = || net.client.mountain_ok("status");
    wait_until("it is over", LEAVE, || !said().contains("just begun"));
    wait_until("it is good", LEAVE, || said().contains("u0 is good: "));
}

#[test]
fn route_narrows_what_is_adopted() {
    let net = Net::new();
    net.client.mountain_ok("up --route 203.0.0.0/16");
    let groups = net.client.status().groups;
    assert_eq!(groups.len(), 1, "{groups:#?}");
    assert_eq!(groups[0].prefixes[0].to_string(), "203.0.113.0/24");
    net.client.mountain_ok("down");
    net.client
        .mountain_fails("up --route 10.77.0.0/16", "no multipath route");
}

#[test]
fn a_namespace_that_loses_its_name_does_not_hold_the_daemon() {
    let net = Net::new();
    net.up();
    let pid = Pid::from_raw(net.client.pid());
    testkit::ip(&format!("netns del {}", net.client.name));
    std::thread::sleep(Duration::from_millis(300));
    kill(pid, Signal::SIGTERM).expect("it still runs");
    wait_until("it ends", LEAVE, || kill(pid, None).is_err());
}

#[test]
fn reflect_listens_on_loopback_only_unless_asked_and_ends_at_sigterm() {
    let ns = Ns::new("r");
    let (child, log) = start_logged(ns.command(MOUNTAIN).arg("reflect"));
    wait_until("it listens", LEAVE, || {
        said(&log).matches("answering probes").count() == 2
    });
    let listening = ns.run("ss -Hlun");
    for line in listening.lines() {
        let own = line.contains("127.0.0.1:") || line.contains("[::1]:");
        assert!(own, "{listening}");
    }
    // Two sockets for each address: one for known clients, one for others.
    let addresses: BTreeSet<&str> = listening.lines().collect();
    assert_eq!(addresses.len(), 2, "{listening}");
    child.signal(Signal::SIGTERM);
    assert!(child.finish().status.success());
}

#[test]
fn a_path_of_several_groups_is_judged_in_each() {
    let mut net = Net::new();
    net.join(2);
    net.client.ip("route add 10.97.0.0/24 src 10.98.0.1 \
             nexthop via 10.30.0.2 dev u0 nexthop via 10.30.2.2 dev u2");
    let cost = |dev: &str, ms: u32| format!("[[path]]\ndev = \"{dev}\"\ncost = {ms}\n");
    let _log = net.start_configured(&(cost("u0", 20) + &cost("u2", 50)));
    let state = |prefix: &str, device: &str| {
        let status = net.client.status();
        let mut groups = status.groups.iter();
        let group = groups.find(|g| g.prefixes[0].to_string() == prefix);
        let path = net.client.path_by(device, false).id;
        let mut members = group.expect(prefix).members.iter();
        let member = members.find(|m| m.path == path).expect(device);
        (member.state.clone(), member.used_for)
    };
    let left = ("reserve".to_owned(), Use::Nothing);
    wait_until("each group leaves its dearer path", 2 * LEAVE, || {
        state("203.0.113.0/24", "u0") == left && state("10.97.0.0/24", "u2") == left
    });
    assert_eq!(state("10.97.0.0/24", "u0"), ("good".into(), Use::All));
    let status = net.client.mountain_ok("status");
    let (_, second) = status.split_once("10.97.0.0/24").expect("the group");
    let second = second.split("\n\n").next().unwrap();
    assert_has(
        second,
        &[
            "  u0    good",
            "  u2    reserve",
            "u2 is a reserve: with its cost of 50.0 ms it takes 30.",
        ],
    );
    let decisions = [
        "u0 for 203.0.113.0/24: all -> nothing",
        "u2 for 10.97.0.0/24: all -> nothing",
    ];
    assert_has(&net.client.mountain_ok("explain"), &decisions);
}

/// The names of an object's members, in their order in the alphabet.
fn keys(value: &Value) -> String {
    let object = value.as_object().unwrap_or_else(|| panic!("{value}"));
    let names: Vec<&str> = object.keys().map(String::as_str).collect();
    names.join(" ")
}

/// Scripts rely on them; all other tests use the types.
#[test]
fn the_keys_of_status_are_these() {
    let net = Net::new();
    net.up();
    net.wait_good();
    let text = net.client.mountain_ok("status --json");
    let status: Value = serde_json::from_str(&text).unwrap();
    let (group, path) = (&status["groups"][0], &status["paths"][0]);
    for (object, expected) in [
        (&status, STATUS),
        (group, GROUP),
        (&group["members"][0], MEMBER),
        (&group["verdict"], "alive bulk ejected full latency"),
        (&path["probes"], "answered ignored last_error sent"),
        (&path["flows"], "bulk latency"),
        (&path["traffic"], "bytes latency_bytes packets"),
    ] {
        assert_eq!(keys(object), expected);
    }
    for key in PATH.split_whitespace() {
        assert!(path.get(key).is_some(), "no {key} in {path}");
    }
    assert_eq!(status["policy"], "mountain");
    assert_eq!(group["kind"], "move");
    assert_eq!(path["state"], "good");
}

const STATUS: &str =
    "adopts counters dry_run groups held_cgroups kernel_told paths pid placement policy \
    settled skipped suspended translated_sources uptime_s version";
const GROUP: &str = "held kind members prefixes table verdict";
const MEMBER: &str = "cost_us path reason state used_for weight";
/// The policy adds others.
const PATH: &str =
    "cost_us device forward_only gateway gateway_resolved id ipv6 loss name p50_us p95_us placed \
    probe_target rate_bps reason samples source state up";
