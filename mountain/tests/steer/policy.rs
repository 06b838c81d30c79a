// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain policy` on a running daemon: the baseline with a program of its own takes over and gives back.

use std::collections::BTreeSet;
use std::fs::DirEntry;

use crate::support::tcx::program_ids_on;
use crate::support::*;
use mountain::control::status::Counters;
use mountain::steer::PolicyKind;

/// The programs at the egress of both uplinks.
fn programs(net: &Net) -> [Vec<u32>; 2] {
    ["u0", "u1"].map(|dev| net.client.with(move || program_ids_on(dev)))
}

/// Counters of flows that started or moved.
fn starts_and_moves(net: &Net) -> Counters {
    let mut all = net.client.status().counters.unwrap();
    all.retain(|name, _| name.starts_with("flow_") || name.starts_with("move_"));
    all
}

#[test]
fn a_switch_to_argmax_load_keeps_flows_where_they_are() {
    let net = Net::steered();
    let traffic = Traffic::start(&net, SERVER4, 20);
    wait_until("all flows are known", LEAVE, || {
        net.counter("flow_new") >= 20
    });
    let (steering, before) = (programs(&net), starts_and_moves(&net));
    let redirected = net.counter("redirected");
    assert_eq!(net.path("u0").averages, None);

    net.client.mountain_ok("policy argmax-load");
    let baseline = programs(&net);
    assert!((0..2).all(|i| baseline[i].len() == 1 && baseline[i] != steering[i]));
    traffic.during(HALF).assert_in_order("by argmax-load");
    assert_eq!(starts_and_moves(&net), before, "flows started or moved");
    let counted = net.counter("redirected") > redirected;
    assert!(counted, "nothing is counted any more");
    assert!(net.path("u0").averages.is_some());

    // A run-time switch: the program stays.
    net.client
        .mountain_says("policy ecmp", "the policy is ecmp now, until");
    assert_eq!(programs(&net), steering);
    net.client
        .mountain_says("policy mountain", "the policy is mountain now");
    assert_eq!(programs(&net), steering);
    traffic.during(HALF).assert_in_order("by mountain again");
    assert_eq!(starts_and_moves(&net), before, "flows started or moved");
    assert_eq!(traffic.finish().reordered, 0);
}

#[test]
fn what_the_kernel_does_not_carry_out_is_called_so() {
    let net = Net::steered();
    assert!(net.path("u0").flows.is_some());
    let explain = || net.client.mountain_ok("explain");
    net.client.mountain_ok("policy ecmp");
    net.lose(1);
    let status = net.client.mountain_ok("status");
    let said = "the kernel decides: what follows is not carried out";
    assert_has(&status, &[said]);
    assert_eq!(net.path("u1").flows, None);
    let (now, then) = (
        "the kernel decides now: policy ecmp",
        "not carried out: policy ecmp",
    );
    assert_has(&explain(), &[now, then]);

    net.client.mountain_ok("policy mountain");
    let (status, decisions) = (net.client.mountain_ok("status"), explain());
    assert!(
        !status.contains(said) && !decisions.contains(now),
        "{status}{decisions}"
    );
    assert_has(&decisions, &[then]);

    // The baseline takes no dead path either.
    net.client.mountain_ok("policy argmax-load");
    net.client.mountain_says(
        "status",
        "new flows take the living path with the most load",
    );
    let decided = || explain().matches("u0 for ").count();
    let before = decided();
    net.lose(0);
    wait_until("a dead path is left", LEAVE, || decided() > before);
    assert!(!explain().contains("argmax-load"));
}

#[test]
fn a_switch_that_fails_leaves_the_policy_in_force_and_a_kill_leaves_nothing() {
    let net = Net::steered();
    let before = programs(&net);
    let pid = net.client.pid();
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let number = |fd: std::io::Result<DirEntry>| fd.unwrap().file_name().to_str()?.parse().ok();
    let open: BTreeSet<u64> = open.filter_map(number).collect();
    // Four more are enough for the connection that asks, not for the maps of another program.
    let few = (0..).filter(|fd| !open.contains(fd)).nth(4).unwrap();
    let usual = limit_descriptors(pid, few);
    let why = "cannot switch to argmax-load: the policy mountain stays in force";
    net.client.mountain_fails("policy argmax-load", why);
    limit_descriptors(pid, usual);
    assert_eq!(net.client.status().policy, PolicyKind::Mountain);
    assert_eq!(programs(&net), before);
    // It was for want of descriptors only.
    net.client.mountain_ok("policy argmax-load");
    assert_ne!(programs(&net), before);
    assert_eq!(net.client.status().policy, PolicyKind::ArgmaxLoad);

    // Killed under it, the daemon leaves nothing; the kernel releases links of a dead process in its own time.
    net.kill_daemon();
    wait_until("nothing is attached", LEAVE, || {
        programs(&net).iter().all(Vec::is_empty)
    });
}
