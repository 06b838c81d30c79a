// SPDX-License-Identifier: GPL-2.0-or-later
//! The firewall is loaded anew: the table that keeps forwarded connections where they began is made again.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::thread;
use std::time::{Duration, Instant};

use mountain::bpf::hooks::DeviceHook;
use nix::sys::signal::Signal;

use crate::net::*;
use crate::support::*;

/// A home that forwards, connections of the network behind it by both uplinks, and the firewall's own rules.
fn forwarding() -> (Home, Flows, Vec<Seen>, String) {
    let net = Home::new().with_lan().running();
    let mut flows = net.inner_flows();
    let opened = flows.open_by_both(&["tcp"], SERVER[0]);
    let rules = net.home.run("nft list table inet home");
    (net, flows, opened, rules)
}

/// What `systemctl reload nftables` does: all is flushed and the same rules are made again, in one step.
#[test]
fn forwarded_connections_go_on_when_the_firewall_is_loaded_anew() {
    let (net, mut flows, opened, rules) = forwarding();
    let took = [(); 3].map(|()| {
        net.home.nft(&format!("flush ruleset\n{rules}"));
        let flushed = Instant::now();
        wait_until("the table is back", LEAVE, || net.has_table());
        let took = flushed.elapsed();
        net.wait_forwarding();
        assert_eq!(flows.ask(), opened, "and those that run go on");
        took
    });
    // A busy machine may be late once; after a look, the next one is always 5 s away.
    let soon = took.iter().filter(|t| **t < Duration::from_secs(3)).count();
    assert!(soon >= 2, "not by the look every 5 s: {took:?}");
    // While there is no table, or an empty one, nothing new is marked.
    let table = words_of_table(&net);
    for what in ["delete", "flush"] {
        net.home.nft(&format!("{what} table inet mountain_start"));
        wait_until("it is back", LEAVE, || {
            net.has_table() && words_of_table(&net) == table
        });
        net.wait_forwarding();
        net.inner_flows().open_by_both(&["tcp"], SERVER[0]);
    }
    assert_eq!(net.refused(), 0);
}

/// As after an upgrade of the package.
#[test]
fn busy_connections_of_an_earlier_run_go_on_when_the_firewall_is_loaded_anew() {
    let (net, mut flows, opened, rules) = forwarding();
    net.home.end_daemon(Signal::SIGUSR1);
    net.up();
    net.wait_forwarding();
    let load = format!("flush ruleset\n{rules}");
    busy(&mut flows, &opened, || net.home.nft(&load));
    assert_eq!(net.refused(), 0);
}

/// The same, as a rule of the firewall's leaves new ones to the kernel.
#[test]
fn busy_connections_of_an_earlier_run_go_on_when_new_ones_are_the_kernels() {
    let (net, mut flows, opened, rules) = forwarding();
    let load = format!("flush ruleset\n{rules}\n{HOLDS}");
    net.home.nft(&load);
    wait_left(&net);
    net.home.end_daemon(Signal::SIGUSR1);
    net.start();
    wait_left(&net);
    busy(&mut flows, &opened, || net.home.nft(&load));
    assert_eq!(net.refused(), 0);
}

/// The same, of an uplink whose default route was away as Mountain started again.
#[test]
fn busy_connections_of_an_earlier_run_go_on_by_an_uplink_that_came_back() {
    let (net, mut flows, opened, rules) = forwarding();
    let routes = net.home.ip("route show default dev u1");
    net.home.end_daemon(Signal::SIGUSR1);
    net.home.ip("route del default dev u1");
    net.start();
    let paths = || net.home.status().paths.len();
    wait_until("the uplink is away", LEAVE, || paths() == 3);
    net.home.ip(&format!("route add {} dev u1", routes.trim()));
    net.wait_good();
    net.wait_forwarding();
    assert_eq!(flows.ask(), opened);
    let load = format!("flush ruleset\n{rules}");
    busy(&mut flows, &opened, || net.home.nft(&load));
    assert_eq!(net.refused(), 0);
}

/// The program has not seen what began meanwhile, so it learns of all connections anew.
#[test]
fn busy_connections_go_on_when_the_program_was_off_for_a_while() {
    let (net, mut flows, opened, rules) = forwarding();
    let is_there = || {
        net.home
            .with(|| tcx::loaded(DeviceHook::TcxIngress, "lan0").len() == 1)
    };
    assert!(is_there());
    assert!(tcx::cut_links(net.home.pid(), "tcx") >= 1);
    wait_until("it is attached again", LEAVE, is_there);
    // Who is answered comes after what was begun then.
    net.wait_forwarding();
    let load = format!("flush ruleset\n{rules}");
    busy(&mut flows, &opened, || net.home.nft(&load));
    assert_eq!(net.refused(), 0);
}

/// A rule for which new ones are left to the kernel.
const HOLDS: &str = "insert rule inet home post oifname u0 ip daddr 198.51.100.7 return\n";

/// Because of it.
fn wait_left(net: &Home) {
    wait_until("new ones are the kernel's", LEAVE, || {
        let left = net.placement().left.join("\n");
        left.contains("forwarded connections are left to the kernel: the firewall treats u0")
    });
}

/// While something is done twenty times, flows send.
fn busy(flows: &mut Flows, expected: &[Seen], then: impl Fn() + Sync) {
    thread::scope(|scope| {
        let doing = scope.spawn(|| {
            for _ in 0..20 {
                then();
                thread::sleep(Duration::from_millis(100));
            }
        });
        while !doing.is_finished() {
            assert_eq!(flows.ask(), expected);
        }
    });
}

/// They send while the table is not there.
#[test]
fn busy_forwarded_connections_go_on_when_the_firewall_is_loaded_anew() {
    let (net, mut flows, opened, rules) = forwarding();
    let load = |more: &str| net.home.nft(&format!("flush ruleset\n{rules}\n{more}"));
    busy(&mut flows, &opened, || load(""));
    // While new ones are left to the kernel, and after that.
    load(HOLDS);
    wait_left(&net);
    busy(&mut flows, &opened, || load(HOLDS));
    net.home.mountain_ok("policy ecmp");
    busy(&mut flows, &opened, || load(HOLDS));
    net.home.mountain_ok("policy mountain");
    load("");
    net.wait_forwarding();
    busy(&mut flows, &opened, || load(""));
    assert_eq!(net.refused(), 0);
}

/// Those that began before by the same ports went by the other uplink. No ephemeral ports: one of the flows that the
/// home was tried with could still hold one in TIME-WAIT.
#[test]
fn busy_connections_that_are_the_kernels_go_on_when_the_firewall_is_loaded_anew() {
    let (net, mut flows, _, rules) = forwarding();
    let load = |more: &str| net.home.nft(&format!("flush ruleset\n{rules}\n{more}"));
    let mut open = || {
        flows.close();
        flows.open_with("tcp", EACH, SERVER[0], "bind=192.168.7.2/21000")
    };
    assert_by_both(&open());
    load(HOLDS);
    wait_left(&net);
    let opened = open();
    assert_eq!(by_uplink(&opened), [EACH, 0]);
    busy(&mut flows, &opened, || load(HOLDS));
    assert_eq!(net.refused(), 0);
}

/// Files that the daemon has read so far.
fn reads(net: &Home) -> u64 {
    let io = fs::read_to_string(format!("/proc/{}/io", net.home.pid())).unwrap();
    let count = io.lines().find_map(|line| line.strip_prefix("syscr: "));
    count.unwrap().parse().unwrap()
}

/// A reload after which new ones are left to the kernel, and then another one: those that run stand on the table.
#[test]
fn forwarded_connections_that_run_go_on_when_new_ones_are_the_kernels() {
    let (net, mut flows, opened, rules) = forwarding();
    let load = |more: &str| net.home.nft(&format!("flush ruleset\n{rules}\n{more}"));
    for _ in 0..2 {
        load(HOLDS);
        wait_until("the table is back", LEAVE, || net.has_table());
        wait_left(&net);
        assert_eq!(flows.ask(), opened);
    }
    // What was begun is over: it is not looked at again and again.
    let before = reads(&net);
    thread::sleep(Duration::from_secs(3));
    let read = reads(&net) - before;
    assert!(read < 200, "{read}");
    load("");
    net.wait_forwarding();
    assert_eq!(flows.ask(), opened);
    assert_eq!(net.refused(), 0);
}

/// The kernel takes some 10 ms to attach to each, while the daemon answers; and they stay attached while new ones are
/// the kernel's.
#[test]
fn many_inner_devices_are_attached_to_little_by_little() {
    let net = Home::new().with_lan();
    for i in 0..40 {
        net.home
            .ip(&format!("link add v{i} up type veth peer x{i}"));
        net.home.ip(&format!("link set x{i} up"));
    }
    net.up();
    wait_until("all are attached to", 3 * LEAVE, || {
        net.placement().inner_devices.len() == 81
    });
    let rules = net.home.run("nft list table inet home");
    net.home.nft(HOLDS);
    wait_until("new ones are the kernel's", LEAVE, || {
        !net.placement().forwarding
    });
    net.inner_flows()
        .assert_opens("tcp", EACH, SERVER[0], [EACH, 0]);
    net.home.nft(&format!("delete table inet home\n{rules}"));
    wait_until("all at once", 3 * LEAVE, || net.placement().forwarding);
    assert_eq!(net.placement().inner_devices.len(), 81);
    net.inner_flows().open_by_both(&["tcp"], SERVER[0]);
}

/// As firewalld does it, or `systemctl restart nftables`: what was there is removed, and made a moment later.
#[test]
fn forwarded_connections_go_on_when_the_firewall_is_made_anew_in_steps() {
    let (net, mut flows, opened, rules) = forwarding();
    let is_there = || net.home.run("nft list tables").contains("mountain_start");
    for removed in ["flush ruleset", "delete table inet home"] {
        // What acknowledges the last answers would leave untranslated.
        thread::sleep(Duration::from_millis(500));
        net.home.nft(removed);
        wait_until("the table is back", LEAVE, is_there);
        wait_until("nothing is placed", LEAVE, || !net.placement().forwarding);
        // Time enough to read the firewall, and to take the table out.
        thread::sleep(Duration::from_secs(2));
        assert!(is_there(), "{removed}");
        net.home.nft(&rules);
        assert_eq!(flows.ask(), opened, "{removed}");
        wait_until("new ones are placed", LEAVE, || net.placement().forwarding);
        assert_eq!(flows.ask(), opened, "{removed}");
    }
    assert_eq!(net.refused(), 0);
    // Where nothing is translated any more, the table is of no use.
    net.home.nft("delete table inet home");
    wait_until("it is gone", LEAVE, || !is_there());
}

/// The firewall and Mountain restart at once, as where both are upgraded.
#[test]
fn forwarded_connections_go_on_when_mountain_restarts_while_the_firewall_is_away() {
    let (net, mut flows, opened, rules) = forwarding();
    // What acknowledges the last answers would leave untranslated.
    thread::sleep(Duration::from_millis(500));
    net.home.nft("delete table inet home");
    net.home.end_daemon(Signal::SIGUSR1);
    net.start();
    assert!(net.has_table(), "an earlier run's");
    net.home.nft(&rules);
    net.wait_forwarding();
    assert_eq!(flows.ask(), opened);
    assert_eq!(net.refused(), 0);
    // Without a firewall it goes as any other.
    net.home.nft("delete table inet home");
    wait_until("it is gone", LEAVE, || !net.has_table());
}

/// What nft prints of the table, in no order.
fn words_of_table(net: &Home) -> Vec<String> {
    let text = net.home.run("nft list table inet mountain_start");
    let words = text.split(|c: char| c.is_whitespace() || c == ',');
    let mut words: Vec<String> = words.map(str::to_owned).collect();
    words.sort();
    words
}

/// Whoever saves what `nft list ruleset` prints saves Mountain's table with it, as it was that day.
#[test]
fn a_table_from_a_file_does_not_take_the_place_of_the_present_one() {
    let (net, mut flows, opened, rules) = forwarding();
    let table = words_of_table(&net);
    let kept = "table inet mountain_start {\n chain prerouting {\n  \
                type filter hook prerouting priority mangle;\n }\n}\n";
    net.home.nft(&format!("flush ruleset\n{rules}\n{kept}"));
    wait_until("the present one is back", LEAVE, || {
        words_of_table(&net) == table
    });
    wait_until("new ones are placed", LEAVE, || net.placement().forwarding);
    assert_eq!(flows.ask(), opened);
    net.inner_flows().open_by_both(&["tcp"], SERVER[0]);
    assert_eq!(net.refused(), 0);
}

/// nft takes longer to start than a connection is silent: the table is made without it.
#[test]
fn the_table_is_made_again_as_it_was_and_without_nft() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("nft");
    let net = Home::with_config("reset_stuck_s = 3\n").with_lan();
    let real = stdout(&net.home.output("sh", &["-c", "command -v nft"]));
    let real = real.trim();
    let script = format!("#!/bin/sh\n[ -e \"$0.off\" ] && exit 1\nexec {real} \"$@\"\n");
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();

    let path = std::env::var("PATH").unwrap();
    net.start_with_env("PATH", &format!("{}:{path}", folder.path().display()));
    net.wait_good();
    let mut flows = net.inner_flows();
    let opened = flows.open_by_both(&["tcp"], SERVER[0]);
    let table = words_of_table(&net);
    let rules = net.home.run("nft list table inet home");
    fs::write(folder.path().join("nft.off"), "").unwrap();
    for _ in 0..2 {
        net.home.nft(&format!("flush ruleset\n{rules}"));
        wait_until("the table is back", LEAVE, || net.has_table());
        assert_eq!(words_of_table(&net), table);
        net.wait_forwarding();
        assert_eq!(flows.ask(), opened);
    }
    assert_eq!(net.refused(), 0);
}

/// As while firewalld is started anew. The table of Mountain's has the kernel keep them in mind as they began.
#[test]
fn flows_that_began_while_nothing_was_translated_work_afterwards() {
    let (net, _flows, _opened, rules) = forwarding();
    // Another one that translates stays, such as Docker's.
    let other = "table ip other {\nchain post {\ntype nat hook postrouting priority 100;\n\
                 ip saddr 172.17.0.0/16 masquerade\n}\n}\n";
    for (removed, stays) in [
        ("delete table inet home", ""),
        ("flush ruleset", ""),
        ("delete table inet home", other),
    ] {
        net.home.nft(&format!("{stays}{removed}"));
        wait_until("nothing is placed", LEAVE, || {
            let placement = net.placement();
            !placement.forwarding || !placement.left.is_empty()
        });
        let mut flows = net.inner_flows();
        let begun = flows.open("udp", EACH, SERVER[0]);
        // A port that was used before may have its connection still.
        let answered: usize = by_uplink(&begun).iter().sum();
        assert!(answered < EACH / 4, "{begun:?}");
        net.home.nft(&rules);
        wait_until("they are answered", LEAVE, || {
            by_uplink(&flows.ask()).iter().sum::<usize>() == EACH
        });
    }
}
