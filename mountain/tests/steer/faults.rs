// SPDX-License-Identifier: GPL-2.0-or-later
//! Hosts that are not as simple as those of `up.rs`, and bad input to a running daemon.

use std::io::{Read, Write};
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::thread;

use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;

use crate::support::*;

/// Two devices without link-layer headers, in two namespaces, joined by a program that carries the
/// packets of one to the other.
fn tunnel(a: (&Ns, &'static str), b: (&Ns, &'static str)) -> Worker<()> {
    let ends = [a, b].map(|(ns, name)| ns.with(move || tun::attach(name)));
    Worker::start(move |stop| {
        let mut packet = vec![0; 65536];
        while !stop.is_set() {
            let ready = tun::readable(ends.each_ref(), 20);
            for (n, _) in ready.into_iter().enumerate().filter(|(_, ready)| *ready) {
                // A device that is down or gone is a cable that is cut.
                if let Ok(len) = (&ends[n]).read(&mut packet) {
                    assert!(matches!(packet[0] >> 4, 4 | 6), "{:02x?}", &packet[..len]);
                    let _ = (&ends[1 - n]).write(&packet[..len]);
                }
            }
        }
    })
}

#[test]
fn a_path_without_link_layer_headers_is_measured_and_its_packets_are_left_alone() {
    let net = Net::new();
    net.client.ip("link del u1");
    let _tunnel = tunnel((&net.client, "u1"), (&net.server, "s1"));
    net.addresses(1);
    // Nothing is lost while the process that carries the packets waits for its CPU.
    net.client.ip("link set u1 txqueuelen 10000");
    net.server.ip("link set s1 txqueuelen 10000");
    net.multipath();
    let traffic = Traffic::start(&net, SERVER4, 20);
    let before = traffic.during(HALF);
    assert!(before.by_both(), "{before:?}");
    // The tunnel is a process, and late when that waits for its CPU: no matter here.
    let file = config("[steer]\ntolerance_ms = 1000\n");
    net.client
        .mountain_ok(&format!("up --config {}", file.path().display()));
    net.wait_used("u0");
    net.wait_used("u1");
    // Past the time after which a gateway that cannot be resolved counts as down.
    wait_until("it is measured for 3 s", 3 * LEAVE, || {
        net.path("u1").probes.answered > 60
    });
    assert_eq!(net.path("u1").judged.state, "good");
    net.client.wait_settled();

    // Whatever the hash of the program would choose, each flow stays where the kernel has it.
    let both = traffic.during(HALF).assert_in_order("while both are good");
    // The share of what is sent that comes by a path.
    let share = |c: &Counts, path: usize| f64::from(c.by_path[path]) / f64::from(c.sent);
    let moved = (share(&both, 1) - share(&before, 1)).abs();
    assert!(moved < 0.01, "{both:?} {before:?}");

    // Neither to it nor from it: what the kernel sends by the path that works arrives, on both.
    for bad in 0..2 {
        net.lose(bad as u32);
        let counts = traffic.during(HALF);
        assert_eq!(counts.by_path[bad], 0, "{counts:?}");
        let good = 1 - bad;
        let moved = (share(&counts, good) - share(&before, good)).abs();
        assert!(moved < 0.01, "u{bad} is lost: {counts:?} {before:?}");
        net.server.no_hole();
        net.wait_used(&format!("u{bad}"));
    }
    assert!(net.counter("pass_neigh") > 0);
    assert_eq!(net.counter("redirected"), 0);

    net.client.mountain_ok("down");
    traffic.during(HALF).assert_in_order("after down");
}

/// What becomes of forwarded flows while u1 is a black hole. `translated`: the sources that `mountain` finds to be
/// translated.
fn forwarded(source: Option<&str>, config: &str, translated: &[&str]) -> Counts {
    let mut net = Net::new();
    if source == Some("192.0.2.88") {
        // An address of the client, but of no uplink.
        net.client.ip("addr add 192.0.2.88/32 dev lo");
    }
    let inner = net.inner();
    if let Some(source) = source {
        let (hook, rule) = ("nat hook postrouting priority 100", "iifname lan snat to");
        net.client
            .chain("ip t out", hook, &format!("{rule} {source}"));
    }
    net.start_configured(config);
    net.wait_used("u0");
    net.wait_used("u1");
    net.client.wait_settled();
    let traffic = Traffic::between(&inner, &net.server, SERVER4, 20, None);
    let before = traffic.during(HALF).assert_whole("while all is good");
    assert!(before.by_both(), "{before:?}");
    net.lose(1);
    let counts = traffic.during(HALF);
    let sources = || -> Vec<String> {
        let sources = net.client.status().translated_sources;
        sources.iter().map(IpAddr::to_string).collect()
    };
    let what = format!("{source:?}, {config:?}: {translated:?} are translated");
    wait_until(&what, LEAVE, || sources() == translated);
    counts
}

/// The source that NAT gives forwarded flows, the configuration, whether they move, and the sources that are found
/// to be translated.
const FORWARDED: [(Option<&str>, &str, bool, &[&str]); 5] = [
    (None, "", true, &[]),
    // On no device.
    (Some("192.0.2.77"), "", false, &["192.0.2.77"]),
    // The uplink's, known without.
    (Some("10.30.1.1"), "", false, &[]),
    // Movable.
    (Some("192.0.2.77"), MOVABLE, true, &[]),
    (Some("192.0.2.88"), "", true, &[]),
];
const MOVABLE: &str = "[steer]\nmovable_sources = [\"192.0.2.64/27\"]\n";

#[test]
fn forwarded_flows_move_where_nat_has_not_given_them_an_uplinks_address() {
    let check = |(source, config, moves, expected): (_, _, _, &[&str])| {
        let counts = forwarded(source, config, expected);
        let what = format!("{source:?}, {config:?}");
        match moves {
            true => counts.assert_arrived(&what),
            false => counts.assert_lost(&format!("moved off their uplink: {what}")),
        };
    };
    thread::scope(|scope| {
        for case in FORWARDED {
            scope.spawn(move || check(case));
        }
    });
}

#[test]
fn a_next_hop_without_gateway_is_named_and_the_others_are_used() {
    let net = Net::new();
    net.client.ip("-6 route del 2001:db8:98::/64");
    let hops = "src 10.98.0.1 nexthop via 10.30.0.2 dev u0 nexthop dev u1";
    let route = format!("route replace 203.0.113.0/24 {hops}");
    net.client.ip(&route);
    let said = net.client.mountain_fails("up", "no multipath route");
    assert_has(&said, &["next hop on u1 has no gateway"]);
    net.join(2);
    net.client
        .ip(&format!("{route} nexthop via 10.30.2.2 dev u2"));
    net.up();
    let status = net.client.status();
    let paths: Vec<_> = status.paths.iter().map(|p| &p.device).collect();
    assert_eq!(paths, ["u0", "u2"], "{status:#?}");
    assert_has(&status.skipped.join("\n"), &["the others are used"]);
}

/// As in a debugger, in a frozen cgroup, or by a fault of its own.
#[test]
fn while_the_daemon_stands_still_the_kernel_decides() {
    let net = Net::new();
    net.up();
    net.wait_good();
    net.lose(1);
    let traffic = Traffic::start(&net, SERVER4, 20);
    traffic.during(HALF).assert_by(0, "it is steered");
    let stopped = net.client.stop_daemon();
    net.client.mountain_fails("status", "did not answer");
    wait_until("the kernel decides", LEAVE, || {
        traffic.during(HALF).many_lost()
    });
    // What changes meanwhile is followed before anything is moved: here, a route into the black hole.
    let route = "203.0.113.0/25 via 10.30.1.2 dev u1 src 10.98.0.1";
    net.client.ip(&format!("route add {route}"));
    drop(stopped);
    let counts = traffic.during(HALF);
    assert!(counts.sent > 100 && counts.arrived() == 0, "{counts:?}");
    assert!(net.counter("pass_unattended") > 0);
    net.client.ip(&format!("route del {route}"));
    wait_until("it is steered again", LEAVE, || {
        traffic.during(HALF).nearly_all_arrived()
    });
}

/// As in a container of LXC's or CRIU's: the daemon's clock is not the programs'.
#[test]
fn the_same_in_a_time_namespace() {
    let net = Net::new();
    let up = ["--time", "--fork", "--monotonic", "1000", MOUNTAIN, "up"];
    let output = net.client.output("unshare", &up);
    assert!(output.status.success(), "{output:?}");
    net.wait_good();
    net.lose(1);
    let traffic = Traffic::start(&net, SERVER4, 20);
    traffic.during(HALF).assert_by(0, "it is steered");
    let stopped = net.client.stop_daemon();
    wait_until("the kernel decides", LEAVE, || {
        traffic.during(HALF).many_lost()
    });
    drop(stopped);
    wait_until("it is steered again", LEAVE, || {
        traffic.during(HALF).nearly_all_arrived()
    });
}

#[test]
fn a_program_that_somebody_takes_off_is_attached_again() {
    let mut net = Net::new();
    let log = net.start("up --foreground");
    wait_said(&log, "running");
    assert_eq!(tcx::cut_links(net.client.pid(), "tcx"), 2);
    wait_said(&log, "taken the steering program off");
    wait_until("it is attached again", LEAVE, || {
        let attached = net.client.with(|| ["u0", "u1"].map(tcx::programs_on));
        attached == [1, 1]
    });
    wait_said(&log, "steering goes on");
}

#[test]
fn a_daemon_that_stands_still_is_to_be_killed() {
    let net = Net::new();
    net.up();
    let pid = Pid::from_raw(net.client.pid());
    let stopped = net.client.stop_daemon();
    let said = net.client.mountain_fails("down", "did not answer");
    assert_has(&said, &[&format!("`kill -9 {pid}`")]);
    assert!(!said.contains("os error"), "{said}");
    kill(pid, Signal::SIGKILL).unwrap();
    drop(stopped);
    net.client.mountain_ok("down");
}

#[test]
fn a_daemon_whose_socket_was_removed_is_told_and_ended() {
    let mut net = Net::new();
    let log = net.start("up --foreground --wait");
    wait_said(&log, "running");
    std::fs::remove_file(net.client.control_socket()).unwrap();
    let said = net
        .client
        .mountain_fails("status", "its socket was removed");
    assert_has(&said, &["`mountain down` ends it"]);
    net.client.mountain_says("down", "mountain is down");
    wait_said(&log, "SIGTERM asks to stop");
    (net.client).mountain_fails("status", "mountain is not running");
}

#[test]
fn nonsense_on_the_control_socket_is_refused_and_the_daemon_goes_on() {
    let net = Net::new();
    net.up();
    let pid = net.client.pid();
    let socket = net.client.control_socket();
    let ask = |text: &[u8]| {
        let mut stream = UnixStream::connect(&socket).unwrap();
        stream.set_read_timeout(Some(LEAVE)).unwrap();
        // It may have closed its end before all is written.
        let _ = stream.write_all(text);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        answer
    };
    for text in [
        &b"hello\n"[..],
        b"{\"cmd\":\"reboot\"}\n",
        b"{\"cmd\":\"explain\"}\n",
        b"\xff\n",
    ] {
        let answer = ask(text);
        let refused = answer.is_empty() || answer.contains("not understood");
        assert!(refused, "{answer}");
    }
    assert!(ask(b"{\"cmd\":\"reboot\"}\n").contains("not understood"));
    assert!(ask(b"{\"cmd\":\"policy\",\"name\":\"best\"}\n").contains("unknown variant"));
    assert_eq!(ask(b""), "");
    assert!(!ask(&vec![b'x'; 1 << 20]).contains("\"ok\""));
    assert!(ask(b"{\"cmd\":\"status\"}\n").contains("\"ok\""));
    assert_eq!(net.client.pid(), pid);
}

/// As far as a mount namespace can pretend: the version that the kernel tells, and no BTF.
#[test]
fn a_kernel_that_is_too_old_or_has_no_btf_is_named() {
    let net = Net::new();
    let after = |prepare: &str, command: &str| {
        let script = format!("mount --make-rprivate / && {prepare} && exec {MOUNTAIN} {command}");
        let args = ["--mount", "sh", "-c", &script];
        let output = net.client.output("unshare", &args);
        (output.status.code(), stdout(&output) + &stderr(&output))
    };
    let check = |prepare: &str| after(prepare, "check");
    let version = config("6.1.0-28-amd64\n");
    let old_on = |os_release: &str| {
        let os_release = config(os_release);
        let (code, text) = check(&format!(
            "mount --bind {} /proc/sys/kernel/osrelease && mount --bind {} /etc/os-release",
            version.path().display(),
            os_release.path().display()
        ));
        assert_eq!(code, Some(1), "{text}");
        assert_has(&text, &["✗ kernel", "6.1.0-28-amd64 is older than 6.6"]);
        text
    };
    let text = old_on("ID=debian\nVERSION_ID=\"12\"\n");
    assert_has(&text, &["enable bookworm-backports", "linux-image-"]);
    let text = old_on("ID=fedora\nVERSION_ID=42\n");
    assert_has(&text, &["install Linux 6.6 or newer"]);
    assert!(!text.contains("apt install"), "{text}");
    let (code, text) = check("mount -t tmpfs none /sys/kernel/btf");
    assert_eq!(code, Some(1), "{text}");
    assert_has(&text, &["✗ BTF", "CONFIG_DEBUG_INFO_BTF=y"]);
    let (code, text) = check("mount -t tmpfs -o ro none /run");
    assert_eq!(code, Some(1), "{text}");
    assert_has(&text, &["✗ /run", "it is read-only"]);
    // A switch that cannot be read may be on.
    let of_processes = "mount -t proc -o subset=pid none /proc";
    let (code, text) = check(of_processes);
    assert_eq!(code, Some(1), "{text}");
    assert_has(
        &text,
        &[
            "✗ /proc/sys",
            "forwarding: No such file",
            "`ProcSubset=pid`",
        ],
    );
    let (code, text) = after(of_processes, "up");
    assert_eq!(code, Some(1), "{text}");
    assert_has(
        &text,
        &["`mountain check` says what is missing", "/proc/sys/net/"],
    );
    // Whoever has made the folder may have put links there.
    let of_others = "mount -t tmpfs -o mode=1777 none /run && mkdir /run/mountain";
    for (theirs, said) in [
        ("chown 1000", "/run/mountain belongs to user 1000"),
        (
            "ln -s /etc /run/mountain/cc.lock && chown -h 1000 /run/mountain/cc.lock && chmod 777",
            "/run/mountain/cc.lock belongs to user 1000",
        ),
    ] {
        let prepare = format!("{of_others} && {theirs} /run/mountain");
        for command in [
            "up",
            "status",
            "redirect list",
            "redirect watch",
            "cc enable",
        ] {
            let (code, text) = after(&prepare, command);
            assert_eq!(code, Some(1), "{text}");
            assert_has(&text, &[said]);
        }
        let (code, text) = after(&prepare, "import --help");
        assert_eq!(code, Some(0), "{text}");
    }
    let open = format!("{of_others} && chmod 777 /run/mountain");
    let (_, text) = after(&open, "status");
    assert_has(&text, &["mountain is not running"]);
    let add = "redirect add --proto udp --from 127.0.0.1:7000 --to 127.0.0.1:8000";
    let (code, text) = after(of_processes, add);
    assert_eq!(code, Some(1), "{text}");
    assert_has(&text, &["it is unknown what is switched on"]);
    let (_, text) = check("mount -t tmpfs none /proc");
    assert_has(&text, &["✓ privileges", "✗ /proc/sys"]);
    // Without the pretence none is found.
    let (_, text) = check("true");
    assert!(!text.contains('✗'), "{text}");
}
