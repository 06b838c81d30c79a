// SPDX-License-Identifier: GPL-2.0-or-later
//! Random hosts: Mountain does with each packet what the kernel alone might have done.
//!
//! Theory. A seed gives a small host (`host.rs`) and flows of all sorts (`packets.rs`). The host is
//! built in namespaces of its own, its devices' far ends are in the hand of the test (`rig.rs`). First
//! the packets are sent without Mountain (`kernel.rs`): on the host as it is, and with each member of
//! each group as its only next hop. Then Mountain runs and paths lose their probes in turn, so that
//! it moves flows; each flow sends a packet in every round. The verdict (`verdict.rs`):
//!
//! - each packet leaves where it left without Mountain, or by another member of the same group, with
//!   the look that it has there when the kernel alone chooses that member;
//! - in the latter case its source is the member's own or one that belongs to no single uplink;
//! - it leaves if, and only if, it left without Mountain (where new flows choose their uplink before they are
//!   routed: if it left by that uplink), with all of its fragments, once, and so does what a forwarded one is answered;
//! - a connection keeps its source, a translated one also its exit;
//! - after Mountain has ended, the host's routes, rules and firewall are what they were.
//!
//! A group is a multipath route, or the default routes of a family with `--adopt` where the kernel's own choice is a
//! plain uplink. No model says which packets use it: where the choice of a member makes no difference, no move is
//! allowed.
//!
//! `MOUNTAIN_RANDOM_HOSTS` and `MOUNTAIN_RANDOM_SEED` choose others than the usual ones,
//! `MOUNTAIN_RANDOM_WITHOUT` leaves kinds out, `MOUNTAIN_RANDOM_KINDS` names some that each host has,
//! `MOUNTAIN_RANDOM_MODULES` adds those that need a kernel with modules (tests/kernels/random),
//! `MOUNTAIN_RANDOM_PARALLEL` says how many are built at once, `MOUNTAIN_RANDOM_PROGRAM` is another mountain.
//! A failure prints the host as a script, and its seed.

mod choices;
mod devices;
mod dice;
mod extras;
mod firewall;
mod host;
mod kernel;
mod mountain;
mod packets;
pub mod rig;
mod routes;
mod rules;
mod script;
mod verdict;

use std::collections::BTreeSet;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use host::{Host, Kind};
use kernel::{by_flow, Reference, Sender, Sent};
use mountain::Daemon;
use packets::{By, Flow};
use rig::{Pinned, Rig};
use verdict::{Judge, Tally};

/// Flows of a host.
const FLOWS: usize = 40;
/// Hosts of which a failure prints everything.
const PRINTED: usize = 8;

fn setting(name: &str, default: u64) -> u64 {
    match std::env::var(format!("MOUNTAIN_RANDOM_{name}")) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|e| panic!("MOUNTAIN_RANDOM_{name}={text}: {e}")),
        Err(_) => default,
    }
}

/// The kinds that hosts may have, and whether they have to.
fn kinds() -> Vec<(Kind, bool)> {
    let list = |name: &str| {
        let names = std::env::var(format!("MOUNTAIN_RANDOM_{name}")).unwrap_or_default();
        let names = names.split(',').map(str::to_owned);
        names.collect::<Vec<String>>()
    };
    let (without, needed) = (list("WITHOUT"), list("KINDS"));
    let modules = setting("MODULES", 0) != 0;
    let all = Kind::value_variants().iter();
    let all = all.filter(|kind| modules || !kind.needs_modules());
    let all = all.map(|kind| (*kind, format!("{kind:?}")));
    all.filter(|(_, name)| !without.contains(name))
        .map(|(kind, name)| (kind, needed.contains(&name)))
        .collect()
}

/// What became of one host.
struct Result {
    faults: Vec<String>,
    tally: Tally,
    steered: bool,
    refused: bool,
    script: String,
    log: String,
}

/// A host whose flows are known in part, and what is held against it.
struct Trial<'a> {
    rig: Rig,
    sender: Sender,
    flows: &'a [Flow],
    known: BTreeSet<u16>,
    judge: Judge<'a>,
}

impl Trial<'_> {
    /// One packet of each flow that is known, judged.
    fn round(&mut self, what: &str) {
        let sent = self.send();
        let muted = &self.rig.muted;
        self.judge.round(what, &self.known, &sent, muted);
    }

    fn send(&mut self) -> Sent {
        let _pinned = Pinned::new();
        self.rig.forget_late();
        for flow in self.flows.iter().filter(|f| self.known.contains(&f.id)) {
            self.sender.send(&self.rig, flow);
        }
        by_flow(self.flows, self.rig.collect())
    }

    /// Judges what is left of Mountain. `before`: what the host was set to.
    fn end(&mut self, before: &str) {
        self.sender = Sender::default();
        self.rig.collect();
        rig::flush_conntrack();
        let after = rig::settings();
        let sent = kernel::try_all(&mut self.rig, self.flows);
        self.judge.ended(&sent, before, &after);
    }
}

fn run(seed: u64, kinds: &[(Kind, bool)]) -> Result {
    let host = Host::random(seed, kinds);
    let flows = packets::flows(&host, FLOWS);
    let mut rig = Rig::new(&host);
    let forwarded = |flow: &&Flow| matches!(flow.by, By::Forwarded { .. });
    rig.answered = flows.iter().filter(forwarded).map(|f| f.id).collect();
    let reference = Reference::new(&mut rig, &host, &flows);
    let mut trial = Trial {
        rig,
        sender: Sender::default(),
        flows: &flows,
        known: flows.iter().filter(|f| f.old).map(|f| f.id).collect(),
        judge: Judge::new(&host, &flows, &reference),
    };
    trial.round("before");
    kernel::shake();
    let sent = trial.send();
    trial.judge.shaken(sent);
    let before = rig::settings();
    let daemon = Daemon::start(&mut trial.rig, &host);
    let refused = daemon.is_none();
    let (mut steered, mut log) = (false, String::new());
    if let Some(mut daemon) = daemon {
        trial.round("at the start");
        steered = daemon.settle(&mut trial.rig);
        let third = FLOWS as u16 / 3;
        trial.known.extend(1..=third);
        trial.round("all paths good");
        if steered {
            for (n, uplink) in host.uplinks.iter().take(2).enumerate() {
                trial.rig.muted = vec![uplink.name.clone()];
                daemon.wait_for_paths(&mut trial.rig);
                trial.known.extend(1..=third * (2 + n as u16));
                trial.round(&format!("{} silent", uplink.name));
            }
        }
        let ended = daemon.stop();
        log = daemon.said();
        trial.judge.faults.extend(ended.err());
    }
    trial.end(&before);
    let Judge { tally, faults, .. } = trial.judge;
    Result {
        faults,
        tally,
        steered,
        refused,
        script: host.script(),
        log,
    }
}

#[test]
fn every_packet_goes_where_the_kernel_might_have_sent_it() {
    let hosts = setting("HOSTS", 200);
    let first = setting("SEED", 201);
    let parallel = setting("PARALLEL", 10).min(hosts);
    let kinds = kinds();
    println!(
        "random hosts: seeds {first} to {}, {:?}",
        first + hosts - 1,
        kinds.iter().map(|(kind, _)| kind).collect::<Vec<_>>()
    );
    let (next, failures) = (AtomicU64::new(first), AtomicUsize::new(0));
    let results = Mutex::new(Vec::new());
    let began = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..parallel {
            scope.spawn(|| loop {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed >= first + hosts {
                    return;
                }
                // Each on a thread of its own, which its namespaces do not outlive.
                let try_once = || {
                    let done = std::thread::scope(|inner| {
                        let host =
                            inner.spawn(|| catch_unwind(AssertUnwindSafe(|| run(seed, &kinds))));
                        host.join().expect("caught")
                    });
                    tell_failure(seed, &done, &kinds, &failures);
                    done
                };
                let mut done = try_once();
                for _ in 1..TRIES {
                    if !is_well(&done) {
                        done = try_once();
                    }
                }
                results.lock().unwrap().push((seed, done));
            });
        }
    });
    let mut results = results.into_inner().unwrap();
    results.sort_by_key(|(seed, _)| *seed);
    report(&results, began.elapsed());
}

type Done = (u64, std::thread::Result<Result>);

fn is_well(result: &std::thread::Result<Result>) -> bool {
    matches!(result, Ok(result) if result.faults.is_empty())
}

/// A host counts as failing when it fails so often in a row: on a busy machine a packet that is late is taken for
/// one that went elsewhere. Each failure is printed, as what fails now and then may be a fault all the same.
const TRIES: usize = 3;

/// Prints a host that fails, the first ones whole.
fn tell_failure(
    seed: u64,
    done: &std::thread::Result<Result>,
    kinds: &[(Kind, bool)],
    before: &AtomicUsize,
) {
    if is_well(done) {
        return;
    }
    let mut text = format!("seed {seed} fails\n");
    match done {
        Ok(result) if before.fetch_add(1, Ordering::Relaxed) < PRINTED => {
            text += &result.script;
            text += &format!(
                "\nMountain said:\n{}\n{}\n",
                result.log,
                result.faults.join("\n")
            );
        }
        Ok(_) => {}
        Err(panic) => {
            text += panic.downcast_ref::<String>().map_or("", |t| t.as_str());
            text += &format!("\n{}", Host::random(seed, kinds).script());
        }
    }
    print!("{text}");
}

fn report(results: &[Done], took: Duration) {
    let whole = || results.iter().filter_map(|(_, r)| r.as_ref().ok());
    let sum = |of: fn(&Result) -> usize| whole().map(of).sum::<usize>();
    let some_moved = |r: &Result| usize::from(!r.tally.flows_moved.is_empty());
    println!(
        "{} hosts in {:.0} s: {} steered, {} refused, {} with flows that moved; {} packets, {} by another member; {} flows moved",
        results.len(),
        took.as_secs_f64(),
        sum(|r| r.steered.into()),
        sum(|r| r.refused.into()),
        sum(some_moved),
        sum(|r| r.tally.packets),
        sum(|r| r.tally.moved),
        sum(|r| r.tally.flows_moved.len()),
    );
    let failed: Vec<u64> = (results.iter())
        .filter(|(_, result)| !is_well(result))
        .map(|(seed, _)| *seed)
        .collect();
    assert!(failed.is_empty(), "seeds that fail: {failed:?}");
    let steered = sum(|r| r.steered.into());
    let moved = sum(some_moved);
    assert!(moved * 2 > steered, "too few to prove anything: {moved}");
}
