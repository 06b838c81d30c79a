// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab redirect pps`: the router's processor time per delivered packet.

use std::fmt::Write as _;

use anyhow::{ensure, Result};
use mountain::redirect::Backend;
use mountain::report::table::{align, head, row, Words};
use mountain_lab::result::{Check, RunResult};
use mountain_lab::workload::metrics::{put, Figures};

use super::contender::{install, Contender, RowSetup};
use super::load::{LoadSource, OfferedLoad, FLOWS, LIVE_PPS, SOCKET_PPS};
use super::programs::{RigProgram, RigPrograms};
use super::rig::{RouterRig, TO};
use super::segment::{LoadGenerators, LoadSegment};
use super::{chosen, relative, RedirectArgs, Table};
use crate::driver::{Experiment, Session};

/// The load of the checks, [`OfferedLoad::judged`]. At full speed slow rows are saturated, and share their
/// ring with a source that finds it full; fast ones are not.
const CHECKED: &str = "live_64_fixed";
/// Most router time, relative to [`NETFILTER`].
const LIMITS: [(&str, f64); 3] = [("xdp-redirect", 0.40), ("tcx-peer", 0.50), ("xdp", 0.70)];
/// The least that Netfilter takes; our own nft backend counts packets and knows devices besides.
const NETFILTER: &str = "dnat";
/// What rows are held against, by the names of the ratios.
const REFERENCES: [(&str, Contender); 4] = [
    ("x_dnat", Contender::Dnat),
    ("x_nft", Contender::Backend(Backend::Nft)),
    ("x_route", Contender::Route),
    ("x_bare", Contender::Rig(RigProgram::BareXdp)),
];
/// Most router time of xdp-redirect, relative to the same move without look-up and rewriting.
const MAX_OVER_BARE: f64 = 1.25;

/// What is offered to each row.
pub fn loads(quick: bool) -> Vec<OfferedLoad> {
    let mut loads = vec![];
    for (source, pps) in [
        (LoadSource::Live, LIVE_PPS),
        (LoadSource::Socket, SOCKET_PPS),
    ] {
        for payload in [64, 1_400] {
            for pps in [Some(pps), None] {
                loads.push(OfferedLoad::new(source, payload, pps, quick));
            }
        }
    }
    loads
}

pub fn run(args: &RedirectArgs, session: &mut Session) -> Result<Table> {
    let ways = chosen(&args.rows, &Contender::ALL)?;
    let loads = loads(args.common.quick);
    session.result.note("client_flows", FLOWS);
    session.result.note("live_fixed_pps", LIVE_PPS);
    session.result.note("socket_fixed_pps", SOCKET_PPS);
    let rig = RouterRig::build("")?;
    rig.thread_napi()?;
    rig.client.enter(|| {
        let mut rows = PpsRows {
            sources: LoadGenerators::new(RigPrograms::load(&rig, TO)?, args.common.seed)?,
            rig: &rig,
            ways: &ways,
            loads: &loads,
            installed: None,
            ran: vec![],
        };
        session.interleave(&mut rows)
    })?;
    let result = &mut session.result;
    ensure!(
        !result.policies.is_empty(),
        "no row could be measured: {}",
        result.notes().trim()
    );
    result.checks = checks(result);
    Ok(Box::new(move |result| table(result, &ways, &loads)))
}

/// Rows by loads. A row's loads come one after the other, so that it is set up once a repeat.
struct PpsRows<'a> {
    rig: &'a RouterRig,
    sources: LoadGenerators,
    ways: &'a [Contender],
    loads: &'a [OfferedLoad],
    /// The row that the router has now.
    installed: Option<(Contender, RowSetup<'a>)>,
    /// What counts of the repeat under way, by side.
    ran: Vec<(usize, LoadSegment)>,
}

impl PpsRows<'_> {
    fn of(&self, side: usize) -> (Contender, OfferedLoad) {
        let loads = self.loads.len();
        (self.ways[side / loads], self.loads[side % loads])
    }
}

impl Experiment for PpsRows<'_> {
    type Segment = LoadSegment;

    fn sides(&self) -> Vec<String> {
        let all = 0..self.ways.len() * self.loads.len();
        all.map(|side| self.of(side))
            .map(|(way, load)| format!("{way} {}", load.name()))
            .collect()
    }

    fn row(&self, side: usize) -> String {
        self.of(side).0.to_string()
    }

    fn turn(&self, i: usize, repeat: u32) -> usize {
        let loads = self.loads.len();
        (i / loads + repeat as usize) % self.ways.len() * loads + i % loads
    }

    fn measure(&mut self, _: &Session, side: usize, _: u32) -> Result<LoadSegment> {
        let (way, load) = self.of(side);
        if self.installed.as_ref().is_none_or(|(old, _)| *old != way) {
            // The old one goes first.
            self.installed = None;
            let installed = install(self.rig, &self.sources.programs, way)?;
            self.installed = Some((way, installed));
        }
        self.sources.run(self.rig, &load, way.addressed())
    }

    fn void(&self, side: usize, segment: &LoadSegment) -> Option<String> {
        segment.void(&self.of(side).1)
    }

    fn keep(&mut self, _: &mut RunResult, side: usize, _: u32, segment: LoadSegment) {
        self.ran.push((side, segment));
    }

    fn repeated(&mut self, result: &mut RunResult, repeat: u32, _: bool) {
        // The last row of a repeat may be the first of the next one, which starts afresh as all do.
        self.installed = None;
        let ran = std::mem::take(&mut self.ran);
        for (side, segment) in &ran {
            let (way, load) = self.of(*side);
            let (name, n) = (load.name(), segment.seen.packets);
            let mut figures = Figures::new();
            let mut put = |what: &str, unit, value| {
                put(&mut figures, &format!("{name}_{what}"), unit, value, n);
            };
            put("ns", "ns", segment.ns());
            put("server_ns", "ns", segment.server_ns());
            put("pps", "pps", segment.pps());
            put("busy", "ratio", segment.busy());
            put("waited", "ratio", segment.waited());
            // Relative to others in the same repeat.
            for (what, reference) in REFERENCES {
                let is_it = |other: usize| self.of(other) == (reference, load);
                let found = ran.iter().find(|(other, _)| is_it(*other));
                if let (Some((_, other)), true) = (found, way != reference) {
                    put(what, "x", segment.ns() / other.ns());
                }
            }
            result.add(&way.to_string(), repeat, &figures);
        }
    }
}

fn checks(result: &RunResult) -> Vec<Check> {
    let check = |row: &str, what: &str, ratio: &str, limit, reference: &str| {
        let found = result.metric(row, &format!("{CHECKED}_{ratio}"));
        let what = format!("router time per packet, {row}{what}");
        relative(&what, found, limit, reference)
    };
    let backends = LIMITS.iter();
    let backends = backends.map(|(row, limit)| check(row, "", "x_dnat", *limit, NETFILTER));
    let (row, what) = ("xdp-redirect", " with rewriting");
    let bare = check(row, what, "x_bare", MAX_OVER_BARE, "bare-xdp");
    backends.chain([bare]).collect()
}

/// A table a load: a row a way.
fn table(result: &RunResult, ways: &[Contender], loads: &[OfferedLoad]) -> String {
    let mut out = format!(
        "{}: {} repeats, seed {}, {FLOWS} client flows; router time per delivered packet, ns\n",
        result.scenario, result.repeats, result.seed
    );
    for load in loads {
        let load = load.name();
        let titles = "|median|min|max|x dnat [95%]|kpps|server|busy%|waited%|n";
        let mut rows = vec![head(titles)];
        for way in ways {
            let name = way.to_string();
            let metric = |what: &str| result.metric(&name, &format!("{load}_{what}"));
            let Some(ns) = metric("ns") else {
                rows.push(row([&name, &"-"]));
                continue;
            };
            let values = ns.values.iter().copied().flatten();
            let ratio = metric("x_dnat").map_or("-".into(), |m| {
                format!("{:.2} [{:.2}-{:.2}]", m.median, m.lo, m.hi)
            });
            let figure = |value: f64, digits: usize| format!("{value:.digits$}");
            let median = |what: &str, factor: f64, digits| {
                figure(metric(what).map_or(f64::NAN, |m| m.median * factor), digits)
            };
            rows.push(row([
                &name,
                &figure(ns.median, 0),
                &figure(values.clone().fold(f64::NAN, f64::min), 0),
                &figure(values.clone().fold(f64::NAN, f64::max), 0),
                &ratio,
                &median("pps", 1e-3, 0),
                &median("server_ns", 1.0, 0),
                &median("busy", 100.0, 1),
                &median("waited", 100.0, 1),
                &values.count(),
            ]));
        }
        let _ = write!(out, "\n{load}\n{}", align(&rows, Words::In(&[0])));
    }
    out.push('\n');
    out + &result.notes()
}
