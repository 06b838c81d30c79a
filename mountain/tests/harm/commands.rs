// SPDX-License-Identifier: GPL-2.0-or-later
//! Misleading or fragile commands.

mod docs;

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;

use mountain::control::run_dir::RunDir;

use super::placement::{by_one_route, two_providers};
use crate::support::*;

#[test]
fn clients_that_only_connect_do_not_end_the_control_socket() {
    let net = Net::new();
    // Fewer descriptors than clients: accepting them all is not possible.
    let args = ["--nofile=200", MOUNTAIN, "up"];
    let limited = net.client.output("prlimit", &args);
    assert!(limited.status.success());
    let socket = net.client.control_socket();
    allow_descriptors(4096);
    let connect = |_| UnixStream::connect(&socket).unwrap();
    let clients: Vec<_> = (0..1300).map(connect).collect();
    let policy = net.client.status().policy;
    assert_eq!(policy.name(), "mountain", "beside {} others", clients.len());
    drop(clients);
    assert_eq!(net.client.status().policy.name(), "mountain");
    net.client.mountain_says("down", "mountain is down");
}

#[test]
fn a_low_limit_of_open_files_is_named_with_what_raises_it() {
    let net = Net::new();
    let few = |command: &str| {
        net.client
            .output("prlimit", &["--nofile=48", MOUNTAIN, command])
    };
    let up = stderr(&few("up"));
    assert_has(
        &up,
        &["Too many open files", "may have 48 files open", "ulimit -n"],
    );
    assert_eq!(up.matches("may have 48").count(), 1, "{up}");
    let check = few("check");
    assert!(!check.status.success());
    assert_has(
        &stdout(&check),
        &["✗ files", "a process may have 48 open", "ulimit -n"],
    );
    net.client.mountain_says("down", "was not running");
    // What it may raise itself is enough.
    let raised = net
        .client
        .output("prlimit", &["--nofile=24:4096", MOUNTAIN, "check"]);
    assert_eq!(stdout(&raised).matches("files").count(), 0);
}

/// That hangs up, or at which somebody presses Ctrl-\.
#[test]
fn a_terminal_that_ends_it_leaves_no_rules_behind() {
    let net = two_providers();
    let before = net.client.ip("rule");
    // Of bsdutils, which Debian always has: it gives the command a terminal.
    let command = format!("{MOUNTAIN} up --foreground --adopt");
    for signal in [Signal::SIGHUP, Signal::SIGQUIT] {
        let _terminal = net.client.start("script", &["-qfc", &command, "/dev/null"]);
        wait_until("uplinks have rules", 6 * LEAVE, || {
            net.client.ip("rule") != before
        });
        kill(Pid::from_raw(net.client.pid()), signal).unwrap();
        wait_until("its rules are gone", 6 * LEAVE, || {
            net.client.ip("rule") == before
        });
    }
}

/// As with `ulimit -f`.
#[test]
fn a_log_that_may_not_grow_ends_no_daemon() {
    let net = two_providers();
    let mut limited = net.client.command("prlimit");
    limited.args(["--fsize=200", MOUNTAIN, "up", "--foreground", "--adopt"]);
    let (_daemon, log) = start_logged(&mut limited);
    wait_until("the log is full", 6 * LEAVE, || {
        log.metadata().unwrap().len() == 200
    });
    wait_until("it runs", 6 * LEAVE, || {
        net.client.mountain("status").status.success()
    });
}

/// Tools send SIGHUP to daemons to have them read their configuration anew.
#[test]
fn a_daemon_in_the_background_goes_on_at_sighup() {
    let net = two_providers();
    let said = net.client.mountain_ok("up --adopt");
    let (_, file) = said.split_once("in the background; log: ").unwrap();
    let log = || std::fs::read_to_string(file.trim()).unwrap();
    let (pid, rules) = (net.client.pid(), net.client.ip("rule"));
    kill(Pid::from_raw(pid), Signal::SIGHUP).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!((net.client.pid(), net.client.ip("rule")), (pid, rules));
    kill(Pid::from_raw(pid), Signal::SIGTERM).unwrap();
    wait_until("it ends", LEAVE, || log().contains("SIGTERM asks to stop"));
}

#[test]
fn a_status_shows_flows_that_were_placed_and_plain_probes_as_round_trips() {
    let net = two_providers();
    net.client.mountain_ok("up --adopt");
    wait_until("a flow is placed", 6 * LEAVE, || {
        // Nobody has to answer: the choice is taken when the socket connects.
        let _ = net.client.with(|| {
            let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
            let connected = socket.connect("203.0.113.1:9000");
            connected.and_then(|()| socket.send(b"x"))
        });
        let paths = net.client.status().paths;
        paths.iter().any(|p| p.placed > Some(0))
    });
    let text = net.client.mountain_ok("status");
    let title = text.lines().find(|line| line.contains("placed"));
    let title = title.unwrap_or_else(|| panic!("{text}"));
    let end = title.find("placed").unwrap() + "placed".len();
    let placed = |line: &str| line.get(..end)?.rsplit(' ').next()?.parse::<u64>().ok();
    assert!(text.lines().filter_map(placed).sum::<u64>() > 0, "{text}");
    for path in net.client.status().paths {
        assert!(!path.forward_only, "{path:#?}");
        assert_eq!(path.flows, None, "no flow is moved: {path:#?}");
    }
    net.client
        .mountain_says("explain --moves", "no flow was moved");
}

/// A folder with an nft of the test's own, the search path by which it is found, and the arguments of `up` that have it
/// called.
fn with_nft(script: &str) -> (tempfile::TempDir, String, String) {
    let folder = tempfile::tempdir().unwrap();
    let [nft, config] = ["nft", "m.toml"].map(|name| folder.path().join(name));
    fs::write(&nft, script).unwrap();
    fs::set_permissions(&nft, Permissions::from_mode(0o755)).unwrap();
    fs::write(&config, "[start]\nforward = \"always\"\n").unwrap();
    let path = format!("{}:{}", folder.path().display(), env!("PATH"));
    let args = format!("up --adopt --config {}", config.display());
    (folder, path, args)
}

#[test]
fn probes_go_on_while_nft_takes_its_time() {
    let mut net = two_providers();
    net.client.sysctl("net.ipv4.ip_forward", "1");
    let (folder, path, args) = with_nft(concat!(
        "#!/bin/sh\nd=${0%/*}\nif [ -e $d/slow ]; then touch $d/runs\n",
        "while [ -e $d/slow ]; do sleep 0.1; done; rm $d/runs; fi\n",
        "PATH=",
        env!("PATH"),
        " exec nft \"$@\"\n"
    ));
    let [slow, runs] = ["slow", "runs"].map(|name| folder.path().join(name));
    let log = net.start_with(&format!("{args} --foreground"), &path);
    wait_said(&log, "running");
    let table = || net.client.run("nft list tables").contains("mountain_start");
    assert!(table(), "{}", said(&log));

    // Another uplink, for which there is no table to be made again.
    net.client.ip("link set u1 down");
    net.client.ip("link set u1 name u7");
    let paths = || net.client.status().paths.len();
    wait_until("it is gone", LEAVE, || paths() == 1);
    fs::write(&slow, "").unwrap();
    net.client.ip("link set u7 up");
    net.client
        .ip("route add default via 10.30.1.2 dev u7 metric 200");
    wait_until("nft is called", 6 * LEAVE, || runs.exists());
    wait_until("the uplink is back", LEAVE, || paths() == 2);
    let sent = || net.path("u0").probes.sent;
    let before = sent();
    wait_until("probes go on", LEAVE, || sent() > before + 2);
    assert!(runs.exists(), "the daemon waited for nft");
    fs::remove_file(&slow).unwrap();
    wait_until("the table is back", 6 * LEAVE, table);
}

/// Here it waits for nft, and cannot hear that it is to end.
#[test]
fn a_start_that_takes_too_long_is_taken_back() {
    let net = two_providers();
    net.client.sysctl("net.ipv4.ip_forward", "1");
    let (_folder, path, args) = with_nft("#!/bin/sh\nexec sleep 120\n");
    let added = || {
        let routing = ["rule", "-6 rule", "route show table all"].map(|what| net.client.ip(what));
        routing.concat() + &net.client.run("nft list tables")
    };
    let before = added();
    let mut command = net.client.command(MOUNTAIN);
    command.args(args.split(' ')).env("PATH", path);
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(!output.status.success());
    let text = stderr(&output);
    let expected = ["did not get ready", "`mountain up --foreground`"];
    assert_has(&text, &expected);
    assert_eq!(added(), before);
    net.client.mountain_says("down", "nothing is attached");
}

/// Ctrl-C reaches only what waits: the daemon has a session of its own.
#[test]
fn a_start_that_is_interrupted_is_taken_back() {
    let net = two_providers();
    net.client.sysctl("net.ipv4.ip_forward", "1");
    let (_folder, path, args) = with_nft("#!/bin/sh\nexec sleep 120\n");
    let mut command = net.client.command(MOUNTAIN);
    command.args(args.split(' ')).env("PATH", path);
    let up = Guard::piped(&mut command);
    // Its rules are there, and it waits for nft.
    let rules = || net.client.ip("rule").contains("proto 77");
    wait_until("the daemon has begun", 3 * LEAVE, rules);
    up.signal(Signal::SIGINT);
    let output = up.finish();
    assert!(!output.status.success());
    assert_has(&stderr(&output), &["interrupted"]);
    assert!(!rules(), "{}", net.client.ip("rule"));
    net.client.mountain_says("down", "nothing is attached");
}

/// As the service manager of another system does.
#[test]
fn a_daemon_in_the_background_ends_by_sigterm() {
    let net = two_providers();
    net.client.mountain_ok("up --adopt");
    let pid = i32::try_from(net.client.status().pid).unwrap();
    kill(Pid::from_raw(pid), Signal::SIGTERM).unwrap();
    wait_until("it is gone", LEAVE, || {
        !net.client.ip("rule").contains("proto 77")
    });
    net.client.mountain_says("down", "nothing is attached");
}

/// systemd does not try again, and what the last run has left would follow no gateway and no VPN any more.
#[test]
fn a_start_with_a_wrong_configuration_leaves_nothing_of_the_last_run() {
    let net = two_providers();
    let rules = || net.client.ip("rule").contains("proto 77");
    let daemon = net
        .client
        .start(MOUNTAIN, &["up", "--foreground", "--adopt"]);
    wait_until("it runs", LEAVE, || {
        net.client.mountain("status").status.success()
    });
    assert!(rules());
    daemon.signal(Signal::SIGKILL);
    let _ = daemon.finish();
    assert!(rules(), "flows go on by them until the next start");
    let file = config("[steer]\ntolerence_ms = 10\n");
    let wrong = format!("up --foreground --config {}", file.path().display());
    // A dry run changes nothing.
    net.client.mountain(&format!("{wrong} --dry-run"));
    assert!(rules());
    assert_eq!(net.client.mountain(&wrong).status.code(), Some(78));
    assert!(!rules(), "{}", net.client.ip("rule"));
}

/// What stands between backquotes in a text.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

#[test]
fn a_check_of_two_providers_offers_what_works_as_printed() {
    let mut net = two_providers();
    let check = net.client.mountain("check");
    assert_eq!(check.status.code(), Some(1));
    let text = stdout(&check);
    let arguments = |hint: &str| hint.strip_prefix("mountain ").unwrap().to_owned();
    let hints = quoted(text.lines().find(|line| line.contains("→")).expect(&text));
    assert_eq!(hints[0], "mountain up --adopt", "{text}");
    net.client.mountain_ok(&arguments(hints[0]));
    net.client.mountain_ok("down");

    let adopting = net.client.mountain_ok("check --adopt");
    let hashed = adopting.contains("hash policy");
    assert!(!hashed, "no hash chooses among metrics: {adopting}");
    let mut looks = quoted(&adopting).into_iter();
    let look = looks.find(|hint| hint.ends_with("--dry-run")).unwrap();
    let log = net.start(&arguments(look));
    wait_said(&log, "would add: ");
    net.client.mountain_ok("down");
    wait_said(&log, "nothing was attached");

    net.client.run(hints[1]);
    let text = net.client.mountain_ok("check");
    assert_has(&text, &["u0 via 10.30.0.2", "u1 via 10.30.1.2"]);
}

/// Without a metric IPv6 would take 1024, and the kernel go on with what is there.
#[test]
fn the_route_that_a_check_offers_for_ipv6_is_the_one_that_the_kernel_takes() {
    let net = two_providers();
    for (i, metric) in [(0, 100), (1, 600)] {
        net.client.ip(&format!("route del default metric {metric}"));
        let route = format!("default via fd30:{i}::2 dev u{i} metric {metric}");
        net.client.ip(&format!("-6 route add {route}"));
    }
    let check = stdout(&net.client.mountain("check"));
    let hints = quoted(check.lines().find(|line| line.contains("→")).expect(&check));
    net.client.run(hints[1]);
    let hops = "::/0: u0 via fd30::2 (weight 1), u1 via fd30:1::2 (weight 1)";
    net.client.mountain_says("check", hops);
    let devices = (1..40).map(|n| net.client.ip(&format!("-6 route get 2001:db8::{n}")));
    let devices: Vec<String> = devices.collect();
    for device in ["dev u0", "dev u1"] {
        let is_used = devices.iter().any(|route| route.contains(device));
        assert!(is_used, "{device}: {devices:?}");
    }
}

#[test]
fn a_check_reads_the_configuration_as_up_would() {
    let net = two_providers();
    // What is configured, what is said to it, and whether that alone makes the check fail.
    for (text, told, fails) in [
        ("[[path]]\ndev = \"nope0\"\n", "path 1 (nope0)", false),
        (
            "[[path]]\ndev = \"u0\"\nprobe_target = \"203.0.113.1\"\n",
            "u0 is measured to 203.0.113.1, u1 to its gateway",
            false,
        ),
        (
            "[[path]]\ndev = \"u0\"\nname = \"dsl\"\n[[rule]]\nmatch = {}\nuse = \"nosuch\"\n",
            "rule 1 is not in force: there is no path nosuch; known are dsl, u1",
            false,
        ),
        (
            "[[rule]]\nmatch = { proto = 47, ports = 1723 }\nuse = \"bulk\"\n",
            "rule 1 is not in force: protocol 47 has no ports",
            false,
        ),
        (
            "[start]\ncgroup = \"/sys/fs/cgroup/nosuch\"\n",
            "there is no cgroup /sys/fs/cgroup/nosuch",
            true,
        ),
        (
            "[steer]\nroutes = [\"10.0.0.0/8\"]\n[[redirect]]\nproto = \"udp\"\nfrom = \"10.30.0.1:1\"\nto = \"10.30.0.2:1\"\nlog = 10\n",
            "only routes within 10.0.0.0/8 count",
            true,
        ),
        (
            "[steer]\nroutes = [\"10.0.0.0/8\"]\n[[redirect]]\nproto = \"udp\"\nfrom = \"10.30.0.1:1\"\nto = \"10.30.0.2:1\"\nlog = 10\n",
            "only the BPF backends log",
            true,
        ),
    ] {
        let file = config(text);
        let line = format!("check --adopt --config {}", file.path().display());
        let output = net.client.mountain(&line);
        assert_has(&stdout(&output), &[told]);
        assert!(!(fails && output.status.success()), "{text}: {output:?}");
    }
}

/// Running ones are moved meanwhile.
#[test]
fn new_flows_choose_once_their_cgroup_is_there() {
    let net = two_providers();
    let client = &net.client;
    by_one_route(client);
    let cgroup = Cgroup::new("later");
    let inner = cgroup.path().join("inner");
    let file = config(&format!("[placement]\ncgroup = {inner:?}\n"));
    client.mountain_ok(&format!("up --config {}", file.path().display()));
    let places = || client.status().placement.is_some();
    assert!(!places());
    let _inner = cgroup.inner();
    wait_until("it is tried again", 2 * LEAVE, places);
}

#[test]
fn a_check_calls_nothing_left_behind_while_a_daemon_does_not_answer() {
    let net = two_providers();
    net.client.mountain_ok("up --adopt");
    let check = || stdout(&net.client.mountain("check --adopt"));
    let there = "routes and rules of their own are there while mountain runs";
    assert_has(&check(), &[there]);
    let pid = Pid::from_raw(net.client.pid());
    kill(pid, Signal::SIGSTOP).unwrap();
    let output = net.client.mountain("check --adopt");
    kill(pid, Signal::SIGCONT).unwrap();
    let silent = stdout(&output);
    assert!(!silent.contains("left behind"), "{silent}");
    let waiting = format!("waiting for process {pid} (mountain) to answer");
    assert_has(&stderr(&output), &[&waiting]);
    net.client.end_daemon(Signal::SIGKILL);
    assert_has(&check(), &["left behind"]);
    net.client.mountain_ok("down");
}

#[test]
fn what_stands_for_more_than_it_says_is_refused() {
    let net = Net::new();
    for (from, to) in [
        ("10.30.0.255:80", "203.0.113.1:80"),
        ("10.30.0.1:80", "10.30.1.255:80"),
    ] {
        let rule = format!("--proto udp --from {from} --to {to}");
        for command in ["redirect add", "redirect check"] {
            net.client
                .mountain_fails(&format!("{command} {rule}"), "is the broadcast address");
        }
    }
    for command in [
        "up --route 203.0.113.1/16",
        "cc enable --route 203.0.113.1/16",
    ] {
        net.client.mountain_fails(command, "write 203.0.0.0/16");
    }
}

#[test]
fn times_are_seconds_as_for_ping_and_dash_is_standard_input() {
    let net = Net::new();
    net.client.mountain_ok("ping -c 3 -i 0.02 10.30.0.2");
    net.client.mountain_ok("cpu --interval 0.1 --duration 0.2");
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run.json");
    let log = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/fixtures/ping-losses.log"
    );
    let mut import = Command::new(MOUNTAIN);
    import.args(["import", "-", "--out"]).arg(&out);
    import.stdin(File::open(log).unwrap());
    assert!(import.status().unwrap().success() && out.exists());
}

/// The daemon reads the file itself: from a pipe it would get nothing, and take the defaults.
#[test]
fn a_configuration_that_only_the_command_can_read_is_refused() {
    let net = Net::new();
    let by_pipe = format!("echo '[[path]]' | {MOUNTAIN} up --config /dev/stdin");
    let valid = by_pipe.replace("[[path]]", "[steer]");
    for (line, why) in [
        (&valid, "has to be a file, or use --foreground"),
        (&by_pipe, "missing field `dev`"),
        (
            &format!("{MOUNTAIN} up --config /dev/zero"),
            "more than 64 MiB",
        ),
    ] {
        let output = net.client.output("sh", &["-c", line]);
        assert!(!output.status.success(), "{line}");
        assert_has(&stderr(&output), &[why]);
    }
    net.client.mountain_says("down", "was not running");
}

#[test]
fn a_daemon_that_is_just_being_started_is_ended() {
    let net = Net::new();
    for pause_ms in [0, 5, 50] {
        let child = net
            .client
            .command(MOUNTAIN)
            .args(["up", "--foreground"])
            .spawn();
        let mut child = child.unwrap();
        thread::sleep(Duration::from_millis(pause_ms));
        let is_running = || {
            let run_dir = net.client.with(|| RunDir::of_this_namespace().unwrap());
            run_dir.is_running().unwrap()
        };
        wait_until("it has its lock", LEAVE, is_running);
        net.client.mountain_says("down", "mountain is down");
        assert!(child.wait().unwrap().success());
    }
    // It has its lock before it listens.
    net.client.mountain_ok("up");
    let socket = net.client.control_socket();
    let away = format!("{socket}.away");
    fs::rename(&socket, &away).unwrap();
    let (begin, mut down) = (Instant::now(), net.client.command(MOUNTAIN));
    let mut down = down.arg("down").spawn().unwrap();
    thread::sleep(Duration::from_millis(500));
    assert!(down.try_wait().unwrap().is_none(), "it waits");
    fs::rename(&away, &socket).unwrap();
    assert!(down.wait().unwrap().success());
    assert!(begin.elapsed() < LEAVE, "it has asked again");
    net.client.mountain_says("down", "was not running");
}

#[test]
fn a_log_that_cannot_be_written_ends_no_daemon() {
    let net = Net::new();
    let mut command = net.client.command(MOUNTAIN);
    let full = File::options().write(true).open("/dev/full").unwrap();
    let command = command.args(["up", "--foreground"]).stderr(full);
    let mut daemon = command.spawn().unwrap();
    let answers = || net.client.output(MOUNTAIN, &["status"]).status.success();
    wait_until("it answers", LEAVE, answers);
    net.client.mountain_ok("policy ecmp");
    net.client.mountain_says("down", "mountain is down");
    assert!(daemon.wait().unwrap().success());
}

#[test]
fn probes_that_this_host_does_not_send_are_not_called_lost() {
    let mut net = Net::new();
    let hook = "filter hook output priority 0";
    net.client
        .chain("ip guard o", hook, "ip protocol icmp drop");
    let log = net.start("up --foreground");
    let why = "its firewall drops them";
    wait_said(&log, why);
    let said = net.client.mountain_says("status", "silent");
    assert_has(
        &said,
        &[
            "this host sends no probe to",
            "Operation not permitted",
            why,
        ],
    );
    let mut rows = said.lines().filter(|line| line.contains("silent"));
    assert!(rows.all(|row| !row.contains(" 0.0 ")), "{said}");
    net.client.run("nft delete table ip guard");
    wait_until("its paths are good", LEAVE, || {
        net.client
            .status()
            .paths
            .iter()
            .all(|path| path.judged.state == "good")
    });
}

#[test]
fn values_that_can_be_chosen_are_listed() {
    let wrong = "--proto udp --from 192.0.2.1:1 --to 192.0.2.2:1 --backend x";
    for (args, values) in [
        ("policy --help", &["min-rtt", "argmax-load"][..]),
        ("redirect add --help", &["xdp-redirect", "module"]),
        ("redirect check --help", &["module"]),
        (&format!("redirect check {wrong}"), &["module"]),
    ] {
        let mut command = Command::new(MOUNTAIN);
        let output = command.args(args.split(' ')).output().unwrap();
        assert_has(&(stdout(&output) + &stderr(&output)), values);
    }
}

/// What bash offers for the last of `words`, where the host's configuration is `config`.
fn completed(words: &[&str], config: &str) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("mountain")).unwrap();
    fs::write(dir.path().join("mountain/mountain.toml"), config).unwrap();
    // In a mount namespace, the machine's own configuration stays out of it.
    let script = r#"
        mount --bind "$1" /etc && shift
        PATH=$1:$PATH && shift
        source <(mountain completions bash)
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
        _clap_complete_mountain mountain "${!#}" ""
        printf '%s\n' "${COMPREPLY[@]}"
    "#;
    let programs = std::path::Path::new(MOUNTAIN).parent().unwrap();
    let mut bash = Command::new("unshare");
    bash.args(["--mount", "bash", "-c", script, "bash"]);
    let output = bash.args([dir.path(), programs]).args(words).output();
    let output = output.unwrap();
    assert!(output.stderr.is_empty(), "{output:?}");
    stdout(&output).lines().map(str::to_owned).collect()
}

#[test]
fn completions_list_the_names_of_paths_and_what_else_can_be_chosen() {
    let config = "[[path]]\ndev = \"eth0\"\nname = \"dsl\"\n[[path]]\ndev = \"wwan0\"\n";
    let of = |words: &[&str]| completed(words, config);
    assert_eq!(of(&["mountain", "ping", "--path", ""]), ["dsl", "wwan0"]);
    assert_eq!(of(&["mountain", "ping", "--path", "d"]), ["dsl"]);
    let policies = of(&["mountain", "policy", ""]);
    assert!(policies.contains(&"min-rtt".into()), "{policies:?}");
    let backends = of(&["mountain", "redirect", "add", "--backend", ""]);
    assert!(backends.contains(&"module".into()), "{backends:?}");
    // A configuration that cannot be read names no path, and says nothing between the words.
    assert!(!completed(&["mountain", "ping", "--path", ""], "[[").contains(&"dsl".into()));
}
