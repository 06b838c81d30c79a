// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab redirect scale`: many rules against one, and how long adding one takes.
//!
//! Two rigs at the same time, one with a single rule and one with all: so segments alternate, and no
//! rules are loaded between them.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::Path;
use std::process::ExitCode;
use std::thread;

use anyhow::{anyhow, ensure, Context, Result};
use mountain::redirect::{Backend, Rule};
use mountain_lab::result::{Check, CheckSpec, Metric, Op, RunResult, VoidRun};
use mountain_lab::workload::metrics::{Figure, Figures};
use mountain_lab::workload::sys::{enter_netns, NoHalt};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use serde_json::json;

use super::load::{Load, FLOWS};
use super::programs::{Program, Programs, MAX_FLOWS};
use super::rig::{Rig, FIRST_PORT, ROUTER, SERVER};
use super::rules::{self, Added};
use super::segment::{Segment, Sources};
use super::way::{self, Way};
use super::{chosen, header, refusals, refused, RedirectArgs, REPEATS};
use crate::stopped;

/// Rules whose traffic is measured.
const ACTIVE: usize = 64;
/// Rules a port of which each address of the router has.
const PER_ADDRESS: usize = 32_768;
/// Single `add`s that are timed.
const ADDS: usize = 20;
const MAX_OVER_ONE: f64 = 1.2;
const MAX_ADD_MS: f64 = 5.0;

/// Who is measured: what is in the router, and what of it has traffic.
const ONE: &str = "one_rule";
const SOME: &str = "64_of_all";
const UNIFORM: &str = "uniform";

/// The i-th of many rules. No two have the same target: clients' ports would then have to differ.
fn many(rig: &Rig, i: usize) -> Rule {
    Rule {
        from: from(i).into(),
        to: SocketAddrV4::new(SERVER, (i % 65_535 + 1) as u16).into(),
        ..way::rule(rig, None)
    }
}

fn from(i: usize) -> SocketAddrV4 {
    let address = u32::from(ROUTER) + 100 + (i / PER_ADDRESS) as u32;
    SocketAddrV4::new(Ipv4Addr::from(address), (1_024 + i % PER_ADDRESS) as u16)
}

pub fn run(args: &RedirectArgs, out: &Path) -> Result<ExitCode> {
    let backends = chosen(&args.rows, &super::plain_ways()[1..])?;
    let repeats = args.repeats(2, REPEATS);
    let count = if args.quick {
        1_024
    } else {
        mountain::redirect::MAX_RULES
    };
    let mut result = RunResult::new("redirect-scale", &header(args, "scale"), args.seed, repeats);
    result.environment.insert("quick".into(), json!(args.quick));
    result.environment.insert("rules".into(), json!(count));
    let _awake = NoHalt::hold();
    for way in backends {
        let Way::Backend(backend) = way else { continue };
        eprintln!("{way}: {count} rules");
        // Fresh hosts for each: no rule of another can be in the way.
        let rigs = [Rig::build("a")?, Rig::build("b")?];
        let measured = one_backend(&rigs, backend, count, repeats, args, &mut result);
        if let Some(why) = measured.with_context(|| way.name())? {
            refused(&mut result, way, &why);
        }
        checks(&mut result, way, count);
    }
    result.judge(args.too_short(REPEATS));
    print!("{}{}", result.table(), refusals(&result));
    println!("{}", result.write(out)?.display());
    Ok(result.exit_code(args.check))
}

fn checks(result: &mut RunResult, way: Way, count: usize) {
    let found = result.metric(&way.name(), &format!("{SOME}_x"));
    let (figure, interval) = match found {
        Some(m) => (Some(m.median), format!(" [{:.2}-{:.2}]", m.lo, m.hi)),
        None => (None, String::new()),
    };
    let name = format!("router time, {way}, {count} rules, {ACTIVE} in use{interval}");
    let check = Check::new(&name, figure, Op::AtMost, MAX_OVER_ONE, Some("one rule"));
    result.checks.push(check);
    result.evaluate(&[CheckSpec {
        name: Some(format!("ms to add a rule to {count}, {way}")),
        policy: way.name(),
        metric: "add_ms".into(),
        op: Op::AtMost,
        limit: MAX_ADD_MS,
        reference: None,
    }]);
}

/// Measures one backend; why it is refused otherwise.
fn one_backend(
    rigs: &[Rig; 2],
    backend: Backend,
    count: usize,
    repeats: u32,
    args: &RedirectArgs,
    result: &mut RunResult,
) -> Result<Option<String>> {
    let [one, all] = rigs;
    for rig in rigs {
        rig.thread_napi()?;
        for i in 0..count.div_ceil(PER_ADDRESS) {
            let address = format!("{}/24", from(i * PER_ADDRESS).ip());
            rig.router.ip(["addr", "add", &address, "dev", &rig.near])?;
        }
    }
    let _one = match rules::add(one, &many(one, 0), backend)? {
        Added::Yes(guard) => guard,
        Added::Refused(why) => return Ok(Some(why)),
    };
    // The last ones are added one by one.
    let adds = ADDS.min(count / 2);
    let most: Vec<Rule> = (0..count - adds).map(|i| many(all, i)).collect();
    let _all = match rules::load(all, &most, backend)? {
        Added::Yes(guard) => guard,
        Added::Refused(why) => return Ok(Some(why)),
    };
    let mut took = vec![];
    for i in count - adds..count {
        ensure!(!stopped(), "interrupted");
        took.push(Some(
            rules::add_timed(all, &many(all, i), backend)?.as_secs_f64() * 1e3,
        ));
    }
    let name = backend.to_string();
    let metrics = result.policies.entry(name.clone()).or_default();
    metrics.insert(
        "add_ms".into(),
        Metric::of_repeats("ms", took, adds as u64, args.seed),
    );
    let measured = thread::scope(|scope| {
        let run = || segments(rigs, count, repeats, args, &name, result);
        let joined = scope.spawn(run).join();
        joined.map_err(|_| anyhow!("the measurement panicked"))?
    });
    measured.map(|()| None)
}

/// All segments; moves the calling thread between the rigs' clients.
fn segments(
    rigs: &[Rig; 2],
    count: usize,
    repeats: u32,
    args: &RedirectArgs,
    name: &str,
    result: &mut RunResult,
) -> Result<()> {
    let any = SocketAddrV4::new(SERVER, 0);
    let mut sources = vec![];
    let mut sinks = vec![];
    for rig in rigs {
        enter_netns(&rig.client.path())?;
        let programs = Programs::load(rig, any)?;
        let server = rig.index(&rig.server, &rig.server_dev)?;
        for sink in [Program::XdpSink, Program::TcSink] {
            sinks.push(programs.attach(sink, &rig.server, server)?);
        }
        sources.push(Sources::new(programs, args.seed)?);
    }
    let mut rng = Pcg64Mcg::seed_from_u64(args.seed);
    let chosen: Vec<usize> = (0..ACTIVE).map(|_| rng.random_range(0..count)).collect();
    let uniform: Vec<usize> = (0..MAX_FLOWS).map(|_| rng.random_range(0..count)).collect();
    let load = Load::judged(args.quick);
    // As many flows as elsewhere, by the rules in use; a flow and a packet or so for each of many.
    let flows = usize::from(FLOWS);
    let ports = |i: usize| FIRST_PORT + (i % flows) as u16;
    let headers = |rig: &Rig, n: usize, rule: &dyn Fn(usize) -> usize| -> Vec<[u8; 42]> {
        (0..n)
            .map(|i| rig.headers(ports(i), from(rule(i)), load.payload))
            .collect()
    };
    let mut order = [ONE, SOME, UNIFORM];
    for repeat in 0..repeats {
        let mut ran: Vec<(&str, Segment)> = vec![];
        for what in order {
            ensure!(!stopped(), "interrupted");
            let at = usize::from(what != ONE);
            let (rig, sources) = (&rigs[at], &mut sources[at]);
            enter_netns(&rig.client.path())?;
            let headers = match what {
                ONE => headers(rig, flows, &|_| 0),
                SOME => headers(rig, flows, &|i| chosen[i * 7 % ACTIVE]),
                _ => headers(rig, MAX_FLOWS, &|i| uniform[i]),
            };
            sources.programs.set_flows(&headers)?;
            let segment = sources.measure(rig, &load, headers.len() as u32)?;
            match segment.void(true) {
                Some(reason) => result.void.push(VoidRun {
                    policy: format!("{name} {what}"),
                    repeat,
                    reason,
                }),
                None => ran.push((what, segment)),
            }
        }
        order.rotate_left(1);
        let find = |what: &str| ran.iter().find(|(w, _)| *w == what).map(|(_, s)| s);
        let mut figures = Figures::new();
        for (what, segment) in &ran {
            let n = segment.seen.packets;
            let mut put = |key: &str, unit, value| {
                figures.insert(format!("{what}_{key}"), Figure { unit, value, n });
            };
            put("ns", "ns", segment.ns());
            if let (true, Some(one)) = (*what != ONE, find(ONE)) {
                put("x", "x", segment.ns() / one.ns());
            }
        }
        result.add(name, repeat, &figures);
    }
    Ok(())
}
