// SPDX-License-Identifier: GPL-2.0-or-later
//! Commands that are killed, devices and targets that go, many commands at once and in a row.

use std::os::unix::process::ExitStatusExt;
use std::thread;

use mountain::redirect::actions::{self, Added, Wanted};
use mountain::redirect::{Backend, Proto, Rule, Snat};

use super::RULE;
use crate::net::{ask_in_vain, assert_answers, command, Net};
use crate::support::{assert_has, stderr, wait_until, LEAVE, MOUNTAIN};

impl Net {
    /// A command that ends by SIGKILL after one of its steps.
    fn killed(&self, args: &str, after: &str) {
        let mut mountain = self.router.command(MOUNTAIN);
        mountain.args(command(args).split_whitespace());
        let output = mountain.env("MOUNTAIN_DIE_AFTER", after).output();
        let output = output.unwrap();
        assert_eq!(output.status.signal(), Some(libc::SIGKILL), "{after}");
    }

    /// What the next command says of it.
    fn next(&self, args: &str) -> String {
        let output = self.router.mountain(&command(args));
        assert!(output.status.success(), "{output:?}");
        stderr(&output)
    }
}

/// Root of a container, mostly.
#[test]
fn who_may_change_no_network_begins_nothing() {
    let net = Net::serving();
    let add = command(&format!("add {RULE} --to 10.0.1.2:8083"));
    let mut args = vec![
        "--bounding-set=-net_admin",
        "--inh-caps=-net_admin",
        MOUNTAIN,
    ];
    args.extend(add.split_whitespace());
    let output = net.router.output("setpriv", &args);
    assert!(!output.status.success());
    let said = stderr(&output);
    assert_has(
        &said,
        &["this needs CAP_NET_ADMIN, which this process lacks"],
    );
    assert_eq!(said.lines().count(), 1, "{said}");
    assert_eq!(net.next("list"), "", "nothing is to be taken back");
    net.assert_clean();
}

#[test]
fn a_killed_add_is_taken_back() {
    let net = Net::serving();
    let add = format!("add {RULE} --to 10.0.1.2:8083");
    let other = "--proto udp --from 10.0.8.17:9 --to 10.0.1.2:8083";
    let socket = net.client.udp("10.0.8.18:0");
    for beside in [false, true] {
        if beside {
            net.redirect(&format!("add {other}"));
        }
        for step in ["journal", "fixes", "table", "install"] {
            if beside && step == "table" {
                continue;
            }
            let add_other = "add --proto tcp --from 10.0.8.17:1 --to 10.0.1.2:1";
            for next in ["list", "stats", "del --all", add_other] {
                if beside && next == "del --all" {
                    continue;
                }
                net.killed(&add, step);
                let said = net.next(next);
                assert_has(&said, &["while it added rule", "taken back"]);
                ask_in_vain(&socket, "10.0.8.17:8080");
                if next.starts_with("add") {
                    net.redirect("del --proto tcp --from 10.0.8.17:1");
                }
                assert_eq!(net.next("list"), "", "said once");
                assert_eq!(net.rules(), usize::from(beside));
                match beside {
                    true => assert_answers(&socket, "10.0.8.17:9", "server"),
                    false => net.assert_clean(),
                }
            }
        }
    }
    // And it can be added.
    net.killed(&add, "install");
    let said = net.next(&add);
    assert!(said.contains("taken back"), "{said}");
    assert_answers(&socket, "10.0.8.17:8080", "server");
}

#[test]
fn killed_commands_lose_no_rule_that_there_was() {
    let net = Net::serving();
    let add = format!("add {RULE} --to 10.0.1.2:8083");
    // Of a rule that works, its record is written anew.
    net.redirect(&format!("{add} --backend auto"));
    net.killed(&format!("{add} --backend nft"), "replace");
    assert_eq!(net.next("list"), "");
    net.reaches("server");
    assert_eq!(net.rules(), 1);
    // Something has removed the table, and the command that makes it anew is killed half-way.
    net.router.run("nft delete table inet mountain_redirect");
    let other = "add --proto udp --from 10.0.8.17:9 --to 10.0.1.2:8083";
    net.killed(other, "table");
    net.next("list");
    net.says("list", "NOT IN FORCE");
    net.restores_one();
    net.reaches("server");
}

/// A rule is to be brought back, and the command that does so is killed half-way.
#[test]
fn a_killed_restore_loses_no_rule() {
    let net = Net::serving();
    net.redirect(&format!("add {RULE} --to 10.0.1.2:8083 --backend tcx"));
    let none = tempfile::NamedTempFile::new().unwrap();
    let restore = format!("restore --config {}", none.path().display());
    for step in ["del-flows", "renew", "fixes"] {
        net.router.ip("link del rc");
        net.join_client();
        net.killed(&restore, step);
        assert_eq!(net.next("list"), "", "{step}: half done");
        net.says("list", "NOT IN FORCE");
        net.says(&restore, "brought back 1 rule");
        net.reaches("server");
    }
    net.redirect("del --all");
    net.assert_clean();
}

/// An earlier version had chosen BPF for a rule by itself. The process that gives the rule to nft is killed half-way.
#[test]
fn a_rule_on_its_way_to_nft_is_not_taken_for_one_in_force() {
    let net = Net::serving();
    // Another one that nft has.
    net.redirect("add --proto udp --from 10.0.8.17:9 --to 10.0.1.2:9");
    net.router.with(|| {
        let [from, to] = ["10.0.8.17:8080", "10.0.1.2:8083"].map(|at| at.parse().unwrap());
        let wanted = Wanted {
            rule: Rule::new(Proto::Udp, from, to),
            backend: Some(Backend::Tcx),
            fix: false,
        };
        let mut store = actions::open(true).unwrap();
        let planned = actions::plan(&store, &[wanted]).remove(0).unwrap();
        let Added::New(mut planned) = planned else {
            panic!("it is there already");
        };
        planned.fixed = false;
        actions::put(&mut store, vec![planned]).unwrap();
    });
    net.killed("watch", "renew");
    let list = net.list();
    let of = |id: usize| (list[id].installed.plan.backend, list[id].active);
    assert_eq!(of(0), (Backend::Nft, true));
    assert_eq!(of(1), (Backend::Nft, false));
    net.restores_one();
    net.reaches("server");
}

#[test]
fn a_killed_del_is_finished() {
    let net = Net::serving();
    let socket = net.client.udp("10.0.8.18:0");
    for step in ["del-journal", "del-remove", "del-flows", "del-fixes"] {
        net.redirect(&format!("add {RULE} --to 10.0.1.2:8083"));
        assert_answers(&socket, "10.0.8.17:8080", "server");
        net.killed(&format!("del {RULE}"), step);
        let said = net.next("list");
        assert_has(&said, &["while it deleted rule 0", "finished"]);
        ask_in_vain(&socket, "10.0.8.17:8080");
        net.assert_clean();
    }
}

/// The rule is carried by something faster than nft, beside another one.
#[test]
fn a_killed_del_leaves_no_running_flow_either() {
    let net = Net::serving();
    for (port, to) in [(8080, 8083), (8081, 8084)] {
        let rule = format!("--proto udp --from 10.0.8.17:{port} --to 10.0.1.2:{to}");
        net.redirect(&format!("add {rule} --backend auto"));
    }
    let _watch = net.router.start(MOUNTAIN, &["redirect", "watch"]);
    wait_until("both are fast", LEAVE, || {
        let mut rules = net.list().into_iter();
        rules.all(|rule| rule.carried_by == Backend::TcxPeer)
    });
    let socket = net.client.udp("10.0.8.18:0");
    for _ in 0..3 {
        assert_answers(&socket, "10.0.8.17:8080", "server");
    }
    net.killed(&format!("del {RULE}"), "del-entries");
    let said = net.next("list");
    assert_has(&said, &["while it deleted rule 0", "finished"]);
    ask_in_vain(&socket, "10.0.8.17:8080");
    net.redirect("del --all");
    net.assert_clean();
}

#[test]
fn a_device_that_goes_and_comes_back() {
    let net = Net::serving();
    net.redirect(&format!("add {RULE} --to 10.0.1.2:8083 --dev rc"));
    net.router.ip("link del rc");
    assert_eq!(net.rules(), 1);
    assert_eq!(net.counted(0), [0; 4]);
    net.join_client();
    // A rule names its device: another one of that name is it.
    net.reaches("server");
    net.router.ip("link del rc");
    net.redirect(&format!("del {RULE} --dev rc"));
    net.assert_clean();
}

#[test]
fn commands_at_once_do_not_get_in_each_others_way() {
    let net = Net::new();
    thread::scope(|scope| {
        for port in 0..8 {
            let net = &net;
            scope.spawn(move || {
                for i in 0..3 {
                    let rule = format!("--proto udp --from 10.0.8.17:{}", 9000 + 10 * port + i);
                    net.redirect(&format!("add {rule} --to 10.0.1.2:8083"));
                    if i == 1 {
                        net.redirect(&format!("del {rule}"));
                    }
                }
            });
        }
    });
    assert_eq!(net.rules(), 16);
    let mut ids: Vec<u32> = net.list().iter().map(|r| r.installed.id).collect();
    ids.dedup();
    assert_eq!(ids.len(), 16, "numbers differ");
    net.redirect("del --all");
    net.assert_clean();
}

#[test]
fn a_thousand_cycles_leave_nothing() {
    let net = Net::serving();
    let before = net.router.run("nft list ruleset");
    for round in 0..10 {
        // In this process: starting a debug build a thousand times takes longer than all the rest.
        net.router.with(move || {
            for i in 0..100 {
                let wanted = Wanted {
                    rule: Rule {
                        proto: if i % 2 == 0 { Proto::Udp } else { Proto::Tcp },
                        from: "10.0.8.17:8080".parse().unwrap(),
                        to: "10.0.1.2:8083".parse().unwrap(),
                        dev: (i % 3 == 0).then(|| "rc".to_owned()),
                        snat: if i % 5 == 0 { Snat::Always } else { Snat::Auto },
                        log: None,
                    },
                    // By BPF the programs are loaded anew each time, which takes longer.
                    backend: Some([Backend::Nft, Backend::Tcx][(round == 0) as usize]),
                    fix: false,
                };
                let mut store = actions::open(true).unwrap();
                let Added::New(planned) = actions::plan(&store, &[wanted]).remove(0).unwrap()
                else {
                    panic!("round {round}, {i}: something is left");
                };
                let rules = actions::put(&mut store, vec![planned]).unwrap();
                assert_eq!((rules[0].id, store.len()), (0, 1));
                actions::del(&mut store, &rules).unwrap();
            }
        });
        net.redirect(&format!("add {RULE} --to 10.0.1.2:8083"));
        net.reaches("server");
        net.redirect(&format!("del {RULE}"));
    }
    assert_eq!(net.router.run("nft list ruleset"), before);
    assert_eq!(net.router.run("cat /proc/net/nf_conntrack"), "");
    assert_eq!(net.rules(), 0);
    net.assert_clean();
}
