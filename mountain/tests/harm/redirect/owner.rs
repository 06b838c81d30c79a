// SPDX-License-Identifier: GPL-2.0-or-later
//! What the owner has, has changed since, or has to get rid of.

use std::fs;
use std::process::Command;

use mountain::bpf::foreign::egress_program;
use mountain::bpf::hooks::{programs, DeviceHook, Order};
use mountain::redirect::{Installed, ListedRule, Snat};

use super::net::{ask_in_vain, assert_answers, command, Net};
use crate::firewall::programs::give_up_sys_admin;
use crate::support::tcx::link_passing;
use crate::support::{assert_has, stderr, stdout, texts, Ns, MOUNTAIN};

/// A rule of one device, and its end.
const ADD: &str = "add --proto udp --from 10.0.8.17:8080 --to 10.0.1.2:8083 --dev rc \
    --backend tcx --fix";
const DEL: &str = "del --proto udp --from 10.0.8.17:8080 --dev rc";

/// Of one without privileges on the machine, as of most containers.
#[test]
fn root_of_a_user_namespace_may_redirect() {
    let script = r#"
        mount -t tmpfs none /run && ip link set lo up || exit 9
        "$0" redirect add --proto udp --from 127.0.0.1:99 --to 127.0.0.1:98 || exit 1
        "$0" redirect list && nft list ruleset && "$0" redirect del --all && [ -z "$(nft list tables)" ]
    "#;
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--net", "--mount"]);
    let output = command.args(["sh", "-c", script, MOUNTAIN]).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_has(&stdout(&output), &["127.0.0.1:99", "127.0.0.1 . 98"]);
}

fn setting(ns: &Ns, path: &'static str) -> String {
    let read = move || fs::read_to_string(format!("/proc/sys/net/ipv4/{path}")).unwrap();
    ns.with(read).trim().to_owned()
}

/// `--fix` made a device forward; then something such as Docker makes all of them forward.
#[test]
fn forwarding_that_others_rely_on_by_now_stays() {
    for since in [false, true] {
        let net = Net::new();
        net.router.sysctl("net.ipv4.ip_forward", "0");
        net.redirect(ADD);
        assert_eq!(setting(&net.router, "conf/rs/forwarding"), "1");
        if since {
            net.router.sysctl("net.ipv4.ip_forward", "1");
        }
        net.redirect(DEL);
        let left = if since { "1" } else { "0" };
        for path in ["conf/rc/forwarding", "conf/rs/forwarding"] {
            assert_eq!(setting(&net.router, path), left, "{path}");
        }
    }
}

/// The daemon's unit lacks the privilege to read names, and must not take a redirect's program for somebody else's.
#[test]
fn a_redirects_program_is_known_without_its_name() {
    let net = Net::new();
    net.redirect(ADD);
    let at_rc = || programs(DeviceHook::TcxEgress, testkit::ifindex("rc")).unwrap();
    assert_eq!(net.router.with(at_rc).len(), 1);
    let others = || {
        net.router.with(|| {
            give_up_sys_admin();
            egress_program(testkit::ifindex("rc")).unwrap()
        })
    };
    assert_eq!(others(), None);
    // What nobody has noted may be anybody's.
    fs::remove_file(format!("{}/programs", net.record())).unwrap();
    assert_eq!(others().as_deref(), Some(""));
    net.redirect(DEL);
    net.assert_clean();
}

/// What another version has attached cannot be read, and must not keep its rules from being deleted.
#[test]
fn what_another_version_has_attached_is_taken_off() {
    for backend in ["auto", "nft"] {
        let net = Net::serving();
        let rule = "--proto udp --from 10.0.8.17:8080 --to 10.0.1.2:8083";
        net.redirect(&format!("add {rule} --backend {backend}"));
        let at_rc = || programs(DeviceHook::TcxIngress, testkit::ifindex("rc")).unwrap();
        // Of this name, and without the maps of this version.
        let name = c"mtn_redirect_in";
        let attach = || link_passing(DeviceHook::TcxIngress, "rc", name, Order::First);
        let _link = net.router.with(attach);
        let list = net.router.mountain("redirect list");
        let (listed, said) = texts(&list);
        assert!(said.contains("another version"), "{said}");
        let row = listed.lines().nth(1).unwrap_or_default();
        assert!(row.contains("10.0.8.17:8080"), "{listed}");
        assert_eq!(net.router.with(at_rc).len(), 1);
        assert_eq!(net.redirect("del --all"), "deleted 1 rule\n", "{backend}");
        assert!(net.router.with(at_rc).is_empty());
        net.assert_clean();
    }
}

/// Rules whose backend is named go on when Mountain is replaced by another version. Neither a refused change of
/// one nor a killed one of the version before keeps the owner from deleting all.
#[test]
fn named_rules_of_another_version_go_on_until_all_are_deleted() {
    let net = Net::serving();
    net.serve(&net.server, "other", "10.0.1.2:8084");
    let before = |args: &str, dies: &str| {
        let mut mountain = net.router.command(MOUNTAIN);
        mountain.args(command(args).split_whitespace());
        mountain.env("MOUNTAIN_REDIRECT_VERSION", "7");
        mountain.env("MOUNTAIN_DIE_AFTER", dies);
        mountain.output().unwrap()
    };
    let rule = |port, to| {
        let from = format!("--proto udp --from 10.0.8.17:{port}");
        format!("{from} --to 10.0.1.2:{to} --backend tcx")
    };
    let at_rc = || programs(DeviceHook::TcxIngress, testkit::ifindex("rc")).unwrap();
    let socket = net.client.udp("10.0.8.18:0");
    let one = "--proto udp --from 10.0.8.17:8080";
    for damaged in [false, true] {
        for (port, to) in [(8080, 8083), (8081, 8084)] {
            let added = before(&format!("add {}", rule(port, to)), "");
            assert!(added.status.success(), "{added:?}");
        }
        let go_on = || {
            assert_answers(&socket, "10.0.8.17:8080", "server");
            assert_answers(&socket, "10.0.8.17:8081", "other");
        };
        let other_version = "another version";
        net.refuses(&format!("add {}", rule(8082, 8085)), other_version);
        net.refuses(&format!("del {one}"), other_version);
        net.refuses("list", other_version);
        go_on();
        let told = before("list", "");
        let told = texts(&told);
        let whole = told.0.matches("tcx").count() == 2;
        assert!(whole, "nothing is half done: {told:?}");
        before(&format!("del {one}"), "del-journal");
        let nft = "add --proto tcp --from 10.0.8.17:1 --to 10.0.1.2:1";
        let added = net.router.mountain(&command(nft));
        assert!(added.status.success(), "{added:?}");
        let told = ["while it deleted rule 0", other_version];
        assert_has(&stderr(&added), &told);
        // What is half done is not there.
        let again = format!("add {}", rule(8080, 8083));
        net.refuses(&again, "rule 0 is the same, and a command was ended");
        go_on();
        let mut deleted = "deleted 3 rules\n";
        if damaged {
            fs::write(format!("{}/index", net.record()), [7; 640]).unwrap();
            // What is by nft can be read.
            deleted = "deleted 1 rule\n";
        }
        assert_eq!(net.redirect("del --all"), deleted);
        assert!(net.router.with(at_rc).is_empty());
        ask_in_vain(&socket, "10.0.8.17:8081");
        net.assert_clean();
        let _ = fs::remove_dir_all(format!("{}.damaged", net.record()));
    }
}

/// The journal is damaged, cut short or lost: rules are listed as the kernel has them, and go.
#[test]
fn a_damaged_journal_locks_nobody_out() {
    let net = Net::serving();
    net.serve(&net.server, "other", "10.0.1.2:8084");
    type Damage = fn(&str);
    let damages: [(&str, Damage); 4] = [
        ("another version", |dir| {
            fs::write(format!("{dir}/index"), [7; 640]).unwrap();
        }),
        ("cut short", |dir| {
            let file = fs::File::options()
                .write(true)
                .open(format!("{dir}/rules-0"));
            file.unwrap().set_len(10).unwrap();
        }),
        ("no index", |dir| {
            fs::remove_file(format!("{dir}/index")).unwrap()
        }),
        ("lost", |dir| fs::remove_dir_all(dir).unwrap()),
    ];
    for (what, damage) in damages {
        for add in [
            "udp --from 10.0.8.17:8080 --to 10.0.1.2:8083 --backend auto",
            "tcp --from [fd08::17]:80 --to [fd01::2]:80 --snat always --backend auto",
            "udp --from 10.0.8.17:9 --to 10.0.1.2:9 --dev rc --snat never --backend nft",
            "udp --from 10.0.8.17:8081 --to 10.0.1.2:8084 --backend tcx-peer",
        ] {
            net.redirect(&format!("add --proto {add}"));
        }
        let by_from = |net: &Net| {
            let mut rules = net.list();
            rules.sort_by_key(|rule| rule.installed.rule.from);
            let named = |ListedRule { installed, .. }| {
                let Installed { mut rule, plan, .. } = installed;
                // Snat of a rule with a device cannot be told from what the kernel has.
                if rule.snat == Snat::Never {
                    rule.snat = Snat::Auto;
                }
                (rule, plan.backend, plan.snat)
            };
            rules.into_iter().map(named).collect::<Vec<_>>()
        };
        let before = by_from(&net);
        damage(&net.record());
        let told = stderr(&net.router.mountain("redirect list"));
        assert!(told.contains("made anew"), "{what}: {told}");
        assert_eq!(by_from(&net), before, "{what}");
        let socket = net.client.udp("10.0.8.18:0");
        assert_answers(&socket, "10.0.8.17:8080", "server");
        assert_answers(&socket, "10.0.8.17:8081", "other");
        assert_eq!(net.redirect("del --all"), "deleted 4 rules\n", "{what}");
        ask_in_vain(&net.client.udp("10.0.8.18:0"), "10.0.8.17:8080");
        net.assert_clean();
        let _ = fs::remove_dir_all(format!("{}.damaged", net.record()));
    }
}

/// Removing the package takes back what commands in other network namespaces have added.
///
/// In namespaces of mounts and processes of its own, so that those of others are out of reach.
#[test]
fn removal_takes_back_redirects_in_every_network_namespace() {
    const SCRIPT: &str = r#"
        mount -t tmpfs none /run
        mkdir -p /run/netns /run/mountain/redirect-1
        for n in a b c; do
            ip netns add $n
            ip -n $n link set lo up
            ip -n $n addr add 10.0.0.1/24 dev lo
        done
        for n in a b; do
            nsenter --net=/run/netns/$n "$0" redirect add --proto udp --from 10.0.0.1:1 \
                --to 10.0.0.1:2
        done
        "$0" redirect del --all --all-namespaces
        for n in a b c; do nsenter --net=/run/netns/$n nft list tables; done
        ls /run/mountain
    "#;
    let mut unshare = std::process::Command::new("unshare");
    unshare.args(["--net", "--mount", "--pid", "--fork", "--mount-proc"]);
    let output = unshare.args(["sh", "-ec", SCRIPT, MOUNTAIN]).output();
    let output = output.unwrap();
    let (said, error) = texts(&output);
    assert!(output.status.success(), "{said}{error}");
    let last: Vec<&str> = said.lines().skip(2).collect();
    assert_eq!(last, ["deleted 2 rules in 2 network namespaces"], "{error}");
}
