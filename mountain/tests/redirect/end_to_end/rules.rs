// SPDX-License-Identifier: GPL-2.0-or-later
//! What `add` refuses, and how rules are kept: `save`, `restore`, `check`.

use std::fs;
use std::io::{self, Read};
use std::os::fd::AsRawFd;

use mountain::redirect::Backend;
use nix::sys::signal::Signal;

use super::RULE;
use crate::net::{ask_in_vain, assert_answers, configured, Net};
use crate::support::{self, assert_has, stderr, stdout, wait_until, Guard, LEAVE, MOUNTAIN};

#[test]
fn what_cannot_be_is_refused_with_the_reason() {
    let net = Net::new();
    let add = format!("add {RULE} --to 10.0.1.2:8083");
    net.redirect(&add);
    for (rule, part) in [
        ("udp 10.0.8.17:0 10.0.1.2:1", "0 is not a port"),
        ("udp 10.0.8.17:1 10.0.1.2:0", "0 is not a port"),
        ("udp 10.0.8.17:1 10.0.8.17:1", "are the same"),
        ("udp 10.0.8.17:1 [fd01::2]:1", "different families"),
        ("udp 10.0.8.17:1 224.0.0.1:1", "multicast"),
        ("udp 0.0.0.0:1 10.0.1.2:1", "a rule is for one address"),
        ("udp 10.0.8.17:1 127.0.0.1:1", "loopback"),
        ("udp 10.0.8.17:1 10.0.1.2:1 --dev no", "no device no"),
        (
            "udp 10.0.8.17:1 203.0.113.1:1 --backend tcx",
            "not possible",
        ),
        // Loops and chains.
        ("udp 10.0.1.2:8083 10.0.8.17:8080", "the target of rule 0"),
        ("udp 10.0.1.2:8083 10.0.1.2:1", "the target of rule 0"),
        (
            "udp 10.0.8.17:9 10.0.8.17:8080",
            "straight to 10.0.1.2:8083",
        ),
        // The same packets.
        ("udp 10.0.8.17:8080 10.0.1.2:1", "rule 0 is there already"),
        ("udp 10.0.8.17:8080 10.0.1.2:8083 --snat always", "already"),
        ("udp 10.0.8.17:8080 10.0.1.2:8083 --dev rc", "every device"),
        ("udp 10.0.8.17:1 10.0.1.2:1 --log", "only the BPF backends"),
        ("udp 10.0.8.17:1 10.0.1.2:1 --backend warp", "xdp-redirect"),
        ("udp nonsense 10.0.1.2:1", "write ADDRESS:PORT"),
    ] {
        let [proto, from, to] = *rule.splitn(3, ' ').collect::<Vec<_>>() else {
            panic!("{rule}");
        };
        let line = format!("add --proto {proto} --from {from} --to {to}");
        net.refuses(&line, part);
    }
    assert_eq!(net.rules(), 1);
    // The very same is no error, and nothing new.
    net.says(&add, "rule 0 is already there");
    let json: serde_json::Value = net.json(&add);
    assert_eq!((&json["new"], &json["id"]), (&false.into(), &0.into()));
    assert_eq!(net.rules(), 1);
    // Nor is the other protocol the same.
    net.redirect("add --proto tcp --from 10.0.1.2:8083 --to 10.0.8.17:8080");
    assert_eq!(net.rules(), 2);
}

#[test]
fn without_a_route_nothing_is_left() {
    let net = Net::new();
    net.router.ip("route add unreachable 203.0.113.0/24");
    net.refuses(&format!("add {RULE} --to 203.0.113.1:1"), "203.0.113.1");
    net.assert_clean();
}

#[test]
fn check_says_what_each_backend_would_do() {
    let net = Net::new();
    let rule = format!("{RULE} --to 10.0.1.2:8083");
    let text = net.redirect(&format!("check {rule}"));
    // This kernel has no such module.
    assert_has(&text, &["✓ nft", "✗ module"]);
    let findings = net.check(&rule);
    assert_eq!(findings.len(), 6);
    assert_eq!(findings[4].backend, Backend::Nft);
    assert_eq!(findings[5].backend, Backend::Module);
    let plan = findings[4].plan.as_ref().unwrap();
    assert_eq!(plan.target_dev.as_ref().unwrap().name, "rs");
    // None is possible: what would have to be logged, nft cannot.
    let line = format!("redirect check {rule} --log --backend nft");
    let output = net.router.mountain(&line);
    assert_eq!(output.status.code(), Some(1));
    let (why, todo) = ("✗ nft  only the BPF backends log", "→ leave --log out");
    assert_has(&stdout(&output), &[why, todo]);
    let named = format!("add {rule} --backend module");
    net.refuses(&named, "mountain_redirect is not loaded");
    net.assert_clean();
}

#[test]
fn rules_are_saved_and_restored() {
    let net = Net::serving();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("m.toml");
    let config = format!("--config {}", file.display());
    let said = net.redirect(&format!("save {config}"));
    assert!(said.contains("nothing to save"), "{said}");
    assert!(!file.exists(), "no file without a rule");
    let mine = "# mine\n[steer]\ncost_weight = 5\n";
    fs::write(&file, mine).unwrap();
    net.redirect(&format!("add {RULE} --to 10.0.1.2:8083"));
    net.redirect("add --proto tcp --from [fd08::17]:1 --to [fd01::2]:2 --dev rc --snat always");
    let said = net.redirect(&format!("save {config}"));
    assert!(said.starts_with("saved 2 rules in "), "{said}");
    let before = net.list();
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.starts_with(mine), "{text}");

    net.redirect("del --all");
    net.assert_clean();
    let said = net.redirect(&format!("restore {config}"));
    assert_eq!(said, "2 rules added, 0 already there, 0 not possible\n");
    assert_eq!(net.list(), before);
    let socket = net.client.udp("10.0.8.18:0");
    assert_answers(&socket, "10.0.8.17:8080", "server");
    let said = net.redirect(&format!("restore {config}"));
    assert_eq!(said, "0 rules added, 2 already there, 0 not possible\n");

    // One that is not possible by now does not keep the others out.
    net.redirect("del --all");
    fs::write(&file, text.replace("\"rc\"", "\"gone0\"")).unwrap();
    let output = net.router.mountain(&format!("redirect restore {config}"));
    assert_eq!(output.status.code(), Some(1));
    let rule = "redirect 2 (tcp [fd08::17]:1 => [fd01::2]:2 in by gone0)";
    let why = format!("{rule}: there is no device gone0");
    assert_has(&stderr(&output), &[&why]);
    assert_eq!(net.rules(), 1);
    assert_answers(&socket, "10.0.8.17:8080", "server");

    let no_target = "[[redirect]]\nproto = \"udp\"\nfrom = \"10.0.0.1:1\"\n";
    fs::write(&file, no_target).unwrap();
    let error = net.refuses(&format!("restore {config}"), "m.toml:1: redirect 1");
    assert!(error.contains("missing field `to`"), "{error}");
    // systemd does not try again.
    for command in ["restore", "watch --restore"] {
        let output = net.router.mountain(&format!("redirect {command} {config}"));
        assert_eq!(output.status.code(), Some(78), "{command}");
    }
    net.refuses(&format!("save {config}"), "missing field `to`");
}

/// A rule that was added without `--fix` may rely on what was changed for another one.
#[test]
fn rules_that_rely_on_what_another_one_has_changed_are_restored_with_that() {
    let net = Net::serving();
    net.router.sysctl("net.ipv4.ip_forward", "0");
    let dir = tempfile::tempdir().unwrap();
    let config = format!("--config {}", dir.path().join("m.toml").display());
    let other = "--proto udp --from 10.0.8.17:9090 --to 10.0.1.2:8084";
    let add_other = format!("add {other} --fix");
    net.refuses(&format!("add {RULE} --to 10.0.1.2:8083"), "forwarding");
    net.redirect(&add_other);
    // Nothing is to be done where it is there already.
    let again = net.router.mountain(&format!("redirect {add_other}"));
    assert_eq!(
        (again.status.code(), stderr(&again)),
        (Some(0), String::new())
    );
    net.redirect(&format!("add {RULE} --to 10.0.1.2:8083"));
    let save = || stderr(&net.router.mountain(&format!("redirect save {config}")));
    assert_eq!(save(), "");
    net.redirect("del --all");
    // Whatever stands first in the file.
    let said = net.redirect(&format!("restore {config}"));
    assert_eq!(said, "2 rules added, 0 already there, 0 not possible\n");
    net.redirect("del --proto udp --from 10.0.8.17:9090");
    let socket = net.client.udp("10.0.8.18:0");
    assert_answers(&socket, "10.0.8.17:8080", "server");
    assert_has(
        &save(),
        &["relies on what --fix has changed for another rule"],
    );

    net.router.run("nft delete table inet mountain_redirect");
    let counted = net.redirect("stats");
    assert_has(&counted, &["NOT IN FORCE", "`mountain redirect restore`"]);
    assert!(!net.stats()[0].active);
}

/// What is not possible is said at the start. The stop is no failure, to systemd either.
#[test]
fn who_watches_beside_a_rule_that_is_not_possible_ends_well() {
    let net = Net::new();
    let file = support::config(&(configured(1) + &configured(2) + "dev = \"gone0\"\n"));
    let path = file.path().display().to_string();
    let watch = ["redirect", "watch", "--restore", "--config", &path];
    let watching = Guard::piped(net.router.command(MOUNTAIN).args(watch));
    wait_until("it watches", LEAVE, || {
        let mut rules = net.list().into_iter();
        rules.any(|rule| rule.carried_by == Backend::TcxPeer)
    });
    watching.signal(Signal::SIGTERM);
    let output = watching.finish();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let why = "udp 10.0.8.17:2 => 10.0.1.2:2 in by gone0): there is no device gone0";
    assert_has(&stderr(&output), &[why]);
    assert_has(&stdout(&output), &["1 rule added", "1 not possible"]);
    net.redirect("del --all");
    net.assert_clean();
}

#[test]
fn a_list_that_is_read_page_by_page_keeps_no_command_waiting() {
    let net = Net::new();
    let file = support::config(&(1..=80).map(configured).collect::<String>());
    net.redirect(&format!("restore --config {}", file.path().display()));

    let (mut reader, writer) = io::pipe().unwrap();
    // SAFETY: it takes a number. The list is longer than this.
    let size = unsafe { libc::fcntl(writer.as_raw_fd(), libc::F_SETPIPE_SZ, 4096) };
    assert_eq!(size, 4096);
    let mut command = net.router.command(MOUNTAIN);
    command.args(["redirect", "list"]).stdout(writer);
    let mut list = command.spawn().unwrap();
    drop(command);
    reader.read_exact(&mut [0]).unwrap();
    assert_eq!(net.redirect("del --all"), "deleted 80 rules\n");
    let mut rest = String::new();
    reader.read_to_string(&mut rest).unwrap();
    assert!(list.wait().unwrap().success());
    assert_eq!(rest.lines().count(), 81);
    net.assert_clean();
}

#[test]
fn what_something_else_removed_is_said_and_comes_back() {
    let net = Net::serving();
    net.redirect(&format!("add {RULE} --to 10.0.1.2:8083"));
    let empty = tempfile::NamedTempFile::new().unwrap();
    let restore = format!("restore --config {}", empty.path().display());
    // The latter two leave the sets and their elements.
    for flush in [
        "ruleset",
        "table inet mountain_redirect",
        "chain inet mountain_redirect prerouting",
    ] {
        net.router.run(&format!("nft flush {flush}"));
        assert!(!net.list()[0].active, "{flush}");
        net.says("list", "NOT IN FORCE");
        ask_in_vain(&net.client.udp("10.0.8.18:0"), "10.0.8.17:8080");
        let back = "brought back 1 rule that something had removed";
        net.says(&restore, back);
        net.reaches("server");

        // Another rule brings it back as well.
        net.router.run(&format!("nft flush {flush}"));
        net.redirect("add --proto udp --from 10.0.8.17:1 --to 10.0.1.2:1");
        net.reaches("server");
        net.redirect("del --proto udp --from 10.0.8.17:1");
        net.reaches("server");
    }
    net.router.run("nft flush ruleset");
    net.redirect("del --all");
    net.assert_clean();
}

/// What takes out one rule leaves the first of them, and the counters of the others.
#[test]
fn a_single_rule_that_is_gone_is_said_and_comes_back() {
    let net = Net::serving();
    net.serve(&net.server, "six", "[fd01::2]:9");
    net.redirect("add --proto udp --from [fd08::17]:9 --to [fd01::2]:9");
    net.redirect(&format!("add {RULE} --to 10.0.1.2:8083"));
    assert_answers(&net.client.udp("[fd08::18]:0"), "[fd08::17]:9", "six");
    let is_active = || net.list().iter().map(|r| r.active).collect::<Vec<_>>();
    assert_eq!(is_active(), [true, true]);
    net.router.run("nft flush map inet mountain_redirect to4");
    assert_eq!(is_active(), [true, false]);
    net.restores_one();
    assert_eq!(is_active(), [true, true]);
    assert_answers(&net.client.udp("10.0.8.18:0"), "10.0.8.17:8080", "server");
    assert_eq!(net.counted(0)[0], 1, "its table was not made anew");
}

/// The unit adds what the file names and watches, so that it is put back after nftables has been loaded
/// anew, and takes all away.
#[test]
fn the_service_restores() {
    let unit = include_str!("../../../../packaging/mountain-redirect.service");
    for line in [
        "Type=notify",
        "ExecStart=/usr/bin/mountain redirect watch --restore $MOUNTAIN_REDIRECT_ARGS",
        "ExecReload=/usr/bin/mountain redirect restore $MOUNTAIN_REDIRECT_ARGS",
        "ExecStop=/usr/bin/mountain redirect del --all",
        "RestartPreventExitStatus=2 78",
    ] {
        assert!(unit.lines().any(|l| l == line), "{line}");
    }
}

/// Both units run as root, with as little of root's power as their work needs.
#[test]
fn the_services_are_confined() {
    for unit in [
        include_str!("../../../../packaging/mountain-redirect.service"),
        include_str!("../../../../packaging/mountain-cc.service"),
    ] {
        for line in [
            "SystemCallFilter=@system-service bpf setns membarrier",
            "ProtectSystem=strict",
            "PrivateDevices=yes",
            "ProtectKernelModules=yes",
            "ProtectKernelLogs=yes",
            "RestrictNamespaces=net",
            "NoNewPrivileges=yes",
            "UMask=0077",
        ] {
            assert!(unit.lines().any(|l| l == line), "{line}");
        }
        assert!(!unit.contains("CAP_SYS_MODULE"));
    }
}
