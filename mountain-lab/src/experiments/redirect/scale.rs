// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab redirect scale`: many rules against one, and how long adding one takes.
//!
//! Two rigs at the same time, one with a single rule and one with all: so segments alternate, and no
//! rules are loaded between them.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::OwnedFd;

use anyhow::{ensure, Context, Result};
use mountain::redirect::{Backend, Rule};
use mountain_lab::result::RunResult;
use mountain_lab::workload::metrics::{put, Figures};
use mountain_lab::workload::sys::enter_netns;
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;

use super::contender::{self, Contender};
use super::load::{OfferedLoad, FLOWS};
use super::programs::{RigPrograms, MAX_FLOWS};
use super::rig::{RouterRig, FIRST_PORT, ROUTER, SERVER};
use super::rules;
use super::segment::{LoadGenerators, LoadSegment};
use super::{chosen, relative, RedirectArgs, Table};
use crate::driver::{CommonArgs, Experiment, Refused, Session};
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
const SIDES: [&str; 3] = [ONE, SOME, UNIFORM];

/// The i-th of many rules. No two have the same target: clients' ports would then have to differ.
fn many(rig: &RouterRig, i: usize) -> Rule {
    Rule {
        from: from(i).into(),
        to: SocketAddrV4::new(SERVER, (i % 65_535 + 1) as u16).into(),
        ..contender::rule(rig, None)
    }
}

fn from(i: usize) -> SocketAddrV4 {
    let address = u32::from(ROUTER) + 100 + (i / PER_ADDRESS) as u32;
    SocketAddrV4::new(Ipv4Addr::from(address), (1_024 + i % PER_ADDRESS) as u16)
}

pub fn run(args: &RedirectArgs, session: &mut Session) -> Result<Table> {
    let backends = chosen(&args.rows, &super::plain_ways()[1..])?;
    let count = args.common.quick_or(1_024, mountain::redirect::MAX_RULES);
    session.result.note("rules", count);
    for way in backends {
        let Contender::Backend(backend) = way else {
            continue;
        };
        session.message(&format!("{way}: adding {count} rules"));
        // Fresh hosts for each: no rule of another can be in the way.
        let rigs = [RouterRig::build("a")?, RouterRig::build("b")?];
        if let Err(error) = one_backend(&rigs, backend, count, args, session) {
            let Refused(why) = error.downcast().with_context(|| way.to_string())?;
            session.result.refuse(way.to_string(), &why);
        }
        checks(&mut session.result, way, count);
    }
    Ok(Box::new(RunResult::table))
}

fn checks(result: &mut RunResult, way: Contender, count: usize) {
    let name = format!("router time, {way}, {count} rules, {ACTIVE} in use");
    let found = result.metric(&way.to_string(), &format!("{SOME}_x"));
    let check = relative(&name, found, MAX_OVER_ONE, "one rule");
    result.checks.push(check);
    let name = format!("ms to add a rule to {count}, {way}");
    result.at_most(&name, result.median(&way.to_string(), "add_ms"), MAX_ADD_MS);
}

/// Measures one backend.
fn one_backend(
    rigs: &[RouterRig; 2],
    backend: Backend,
    count: usize,
    args: &RedirectArgs,
    session: &mut Session,
) -> Result<()> {
    let [one, all] = rigs;
    for rig in rigs {
        rig.thread_napi()?;
        for i in 0..count.div_ceil(PER_ADDRESS) {
            let (address, near) = (from(i * PER_ADDRESS), &rig.near);
            let add = format!("addr add {}/24 dev {near}", address.ip());
            rig.router.ip(&add)?;
        }
    }
    let _one = rules::add(one, &many(one, 0), backend)?;
    // The last ones are added one by one.
    let adds = ADDS.min(count / 2);
    let most: Vec<Rule> = (0..count - adds).map(|i| many(all, i)).collect();
    let _all = rules::load(all, &most, backend)?;
    let mut took = vec![];
    for i in count - adds..count {
        ensure!(!stopped(), "interrupted");
        took.push(rules::add_timed(all, &many(all, i), backend)?.as_secs_f64() * 1e3);
    }
    let (name, n) = (backend.to_string(), adds as u64);
    session.result.put_values(&name, "add_ms", "ms", &took, n);
    // On a thread of its own, which moves between the rigs' clients.
    one.client.enter(|| {
        let mut tables = Tables::new(rigs, backend, count, &args.common)?;
        session.interleave(&mut tables)
    })
}

/// Few and many rules of one backend.
struct Tables<'a> {
    rigs: &'a [RouterRig; 2],
    name: String,
    sources: Vec<LoadGenerators>,
    _sinks: Vec<OwnedFd>,
    load: OfferedLoad,
    /// Rules of the flows, by side.
    rules: [Vec<usize>; 3],
    /// What counts of the repeat under way.
    ran: Vec<(usize, LoadSegment)>,
}

impl<'a> Tables<'a> {
    fn new(
        rigs: &'a [RouterRig; 2],
        backend: Backend,
        count: usize,
        args: &CommonArgs,
    ) -> Result<Self> {
        let any = SocketAddrV4::new(SERVER, 0);
        let (mut sources, mut sinks) = (vec![], vec![]);
        for rig in rigs {
            enter_netns(&rig.client.path())?;
            let programs = RigPrograms::load(rig, any)?;
            sinks.extend(programs.sinks(rig)?);
            sources.push(LoadGenerators::new(programs, args.seed)?);
        }
        let mut rng = Pcg64Mcg::seed_from_u64(args.seed);
        let chosen: Vec<usize> = (0..ACTIVE).map(|_| rng.random_range(0..count)).collect();
        let uniform = (0..MAX_FLOWS).map(|_| rng.random_range(0..count)).collect();
        // As many flows as elsewhere, by the rules in use; a flow and a packet or so for each of many.
        let flows = 0..usize::from(FLOWS);
        let some = flows.clone().map(|i| chosen[i * 7 % ACTIVE]).collect();
        Ok(Tables {
            rigs,
            name: backend.to_string(),
            sources,
            _sinks: sinks,
            load: OfferedLoad::judged(args.quick),
            rules: [flows.map(|_| 0).collect(), some, uniform],
            ran: vec![],
        })
    }
}

impl Experiment for Tables<'_> {
    type Segment = LoadSegment;

    fn sides(&self) -> Vec<String> {
        let name = |what: &&str| format!("{} {what}", self.name);
        SIDES.iter().map(name).collect()
    }

    fn measure(&mut self, _: &Session, side: usize, _: u32) -> Result<LoadSegment> {
        let at = usize::from(SIDES[side] != ONE);
        let (rig, sources) = (&self.rigs[at], &mut self.sources[at]);
        enter_netns(&rig.client.path())?;
        let port = |i: usize| FIRST_PORT + (i % usize::from(FLOWS)) as u16;
        let rules = self.rules[side].iter().enumerate();
        let headers: Vec<[u8; 42]> = rules
            .map(|(i, rule)| rig.headers(port(i), from(*rule), self.load.payload))
            .collect();
        sources.programs.set_flows(&headers)?;
        sources.measure(rig, &self.load, headers.len() as u32)
    }

    fn void(&self, _: usize, segment: &LoadSegment) -> Option<String> {
        segment.void(&self.load)
    }

    fn keep(&mut self, _: &mut RunResult, side: usize, _: u32, segment: LoadSegment) {
        self.ran.push((side, segment));
    }

    fn repeated(&mut self, result: &mut RunResult, repeat: u32, _: bool) {
        let ran = std::mem::take(&mut self.ran);
        let one = ran.iter().find(|(side, _)| SIDES[*side] == ONE);
        let mut figures = Figures::new();
        for (side, segment) in &ran {
            let (what, n) = (SIDES[*side], segment.seen.packets);
            let mut put = |key: &str, unit, value| {
                put(&mut figures, &format!("{what}_{key}"), unit, value, n);
            };
            put("ns", "ns", segment.ns());
            if let (true, Some((_, one))) = (what != ONE, one) {
                put("x", "x", segment.ns() / one.ns());
            }
        }
        result.add(&self.name, repeat, &figures);
    }
}
