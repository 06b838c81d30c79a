// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab redirect pps`: the router's processor time per delivered packet.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::{ensure, Result};
use mountain::report::table::{align, row, Words};
use mountain_lab::result::{Check, LimitKind, Metric, RunResult};
use serde_json::json;

use super::contender::{install, Contender, RowSetup};
use super::load::{LoadSource, OfferedLoad, FLOWS, LIVE_PPS, SOCKET_PPS};
use super::programs::RigPrograms;
use super::rig::{RouterRig, TO};
use super::segment::{LoadGenerators, LoadSegment};
use super::{chosen, RedirectArgs, Row, Table, RETRIES};
use crate::driver::{Experiment, Session};

/// The load of the checks, [`OfferedLoad::judged`]. At full speed slow rows are saturated, and share their
/// ring with a source that finds it full; fast ones are not.
const CHECKED: &str = "live_64_fixed";
/// Most router time, relative to [`NETFILTER`].
const LIMITS: [(&str, f64); 3] = [("xdp-redirect", 0.40), ("tcx-peer", 0.50), ("xdp", 0.70)];
/// The least that Netfilter takes; our own nft backend counts packets and knows devices besides.
const NETFILTER: &str = "dnat";
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

/// Segments of a row and a load, one a repeat; `None`: void.
type Segments = Vec<Option<LoadSegment>>;

/// What was measured, by row and load.
#[derive(Default)]
pub struct PacketRates(BTreeMap<(String, String), Segments>);

impl PacketRates {
    fn put(&mut self, way: Contender, load: &OfferedLoad, repeat: u32, segment: LoadSegment) {
        let values = self.0.entry((way.name(), load.name())).or_default();
        values.resize(repeat as usize, None);
        values.push(Some(segment));
    }

    fn get(&self, row: &str, load: &str) -> Option<&Segments> {
        self.0.get(&(row.to_owned(), load.to_owned()))
    }

    /// Router time of one row relative to another's in the same repeat.
    pub fn ratios(&self, row: &str, reference: &str, load: &str) -> Vec<Option<f64>> {
        let (Some(a), Some(b)) = (self.get(row, load), self.get(reference, load)) else {
            return vec![];
        };
        let pairs = a.iter().zip(b);
        pairs
            .map(|(a, b)| Some(a.as_ref()?.ns() / b.as_ref()?.ns()))
            .collect()
    }
}

pub fn run(args: &RedirectArgs, session: &Session, result: &mut RunResult) -> Result<Table> {
    let ways = chosen(&args.rows, &Contender::ALL)?;
    let loads = loads(args.common.quick);
    for (name, value) in [
        ("client_flows", json!(FLOWS)),
        ("live_fixed_pps", json!(LIVE_PPS)),
        ("socket_fixed_pps", json!(SOCKET_PPS)),
    ] {
        result.environment.insert(name.into(), value);
    }
    let rig = RouterRig::build("")?;
    rig.thread_napi()?;
    let measured = rig.client.enter(|| {
        let mut rows = PpsRows {
            sources: LoadGenerators::new(RigPrograms::load(&rig, TO)?, args.common.seed)?,
            rig: &rig,
            ways: &ways,
            loads: &loads,
            installed: None,
            measured: PacketRates::default(),
        };
        session.interleave(result, &mut rows)?;
        Ok(rows.measured)
    })?;
    ensure!(
        !measured.0.is_empty(),
        "no row could be measured: {}",
        result.notes().trim()
    );
    fill(result, &measured);
    result.checks = checks(result);
    Ok(Box::new(move |result| table(result, &ways, &loads)))
}

/// Rows by loads. A row's loads come one after the other, so that it is set up once a repeat.
struct PpsRows<'a> {
    rig: &'a RouterRig,
    sources: LoadGenerators,
    ways: &'a [Contender],
    loads: &'a [OfferedLoad],
    /// The row that the router has now, if it can have it.
    installed: Option<(Contender, Row<RowSetup<'a>>)>,
    measured: PacketRates,
}

impl PpsRows<'_> {
    fn of(&self, side: usize) -> (Contender, OfferedLoad) {
        let loads = self.loads.len();
        (self.ways[side / loads], self.loads[side % loads])
    }
}

impl Experiment for PpsRows<'_> {
    type Segment = Row<LoadSegment>;
    const RETRIES: u32 = RETRIES;

    fn sides(&self) -> Vec<String> {
        let all = 0..self.ways.len() * self.loads.len();
        all.map(|side| self.of(side))
            .map(|(way, load)| format!("{way} {}", load.name()))
            .collect()
    }

    fn turn(&self, i: usize, repeat: u32) -> usize {
        let loads = self.loads.len();
        (i / loads + repeat as usize) % self.ways.len() * loads + i % loads
    }

    fn measure(&mut self, _: &Session, side: usize, _: u32) -> Result<Row<LoadSegment>> {
        let (way, load) = self.of(side);
        if self.installed.as_ref().is_none_or(|(old, _)| *old != way) {
            // The old one goes first.
            self.installed = None;
            let installed = install(self.rig, &self.sources.programs, way)?;
            self.installed = Some((way, installed));
        }
        if let Some((_, Err(why))) = &self.installed {
            return Ok(Err(why.clone()));
        }
        let segment = self.sources.run(self.rig, &load, way.addressed())?;
        Ok(Ok(segment))
    }

    fn void(&self, side: usize, segment: &Row<LoadSegment>) -> Option<String> {
        let rate = self.of(side).1.rate();
        segment.as_ref().ok()?.void(rate)
    }

    fn keep(&mut self, result: &mut RunResult, side: usize, repeat: u32, row: Row<LoadSegment>) {
        let (way, load) = self.of(side);
        match row {
            Ok(segment) => self.measured.put(way, &load, repeat, segment),
            Err(why) => result.refuse(way.name(), &why),
        }
    }

    fn repeated(&mut self, _: &mut RunResult, _: u32, _: bool) {
        // The last row of a repeat may be the first of the next one, which starts afresh as all do.
        self.installed = None;
    }
}

/// Puts the figures into the result.
fn fill(result: &mut RunResult, measured: &PacketRates) {
    let seed = result.seed;
    for ((row, load), segments) in &measured.0 {
        let n = segments.iter().flatten().map(|s| s.seen.packets).sum();
        let all = result.policies.entry(row.clone()).or_default();
        let mut put = |name: &str, unit: &str, values: Vec<Option<f64>>| {
            let metric = Metric::of_repeats(unit, values, n, seed);
            all.insert(format!("{load}_{name}"), metric);
        };
        let of =
            |f: &dyn Fn(&LoadSegment) -> f64| segments.iter().map(|s| s.as_ref().map(f)).collect();
        put("ns", "ns", of(&LoadSegment::ns));
        put("server_ns", "ns", of(&LoadSegment::server_ns));
        put("pps", "pps", of(&LoadSegment::pps));
        put("busy", "ratio", of(&LoadSegment::busy));
        put("waited", "ratio", of(&LoadSegment::waited));
        for (name, reference) in [
            ("x_dnat", NETFILTER),
            ("x_nft", "nft"),
            ("x_route", "route"),
            ("x_bare", "bare-xdp"),
        ] {
            let ratios = measured.ratios(row, reference, load);
            if !ratios.is_empty() && row != reference {
                put(name, "x", ratios);
            }
        }
    }
}

fn checks(result: &RunResult) -> Vec<Check> {
    let median = |row: &str, name: &str| {
        let metric = result.metric(row, &format!("{CHECKED}_{name}"))?;
        Some((metric.median, metric.lo, metric.hi))
    };
    let check = |name: String, found: Option<(f64, f64, f64)>, limit, reference| {
        let name = match found {
            Some((_, lo, hi)) => format!("{name} [{lo:.2}-{hi:.2}]"),
            None => name,
        };
        Check::new(
            &name,
            found.map(|f| f.0),
            LimitKind::AtMost,
            limit,
            Some(reference),
        )
    };
    let mut checks: Vec<Check> = LIMITS
        .iter()
        .map(|(row, limit)| {
            let name = format!("router time per packet, {row}");
            check(name, median(row, "x_dnat"), *limit, NETFILTER)
        })
        .collect();
    let name = "router time per packet, xdp-redirect with rewriting".to_owned();
    let found = median("xdp-redirect", "x_bare");
    checks.push(check(name, found, MAX_OVER_BARE, "bare-xdp"));
    checks
}

/// A table a load: a row a way.
fn table(result: &RunResult, ways: &[Contender], loads: &[OfferedLoad]) -> String {
    let mut out = format!(
        "{}: {} repeats, seed {}, {FLOWS} client flows; router time per delivered packet, ns\n",
        result.scenario, result.repeats, result.seed
    );
    for load in loads {
        let load = load.name();
        let head = [
            "",
            "median",
            "min",
            "max",
            "x dnat [95%]",
            "kpps",
            "server",
            "busy%",
            "waited%",
            "n",
        ];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        for way in ways {
            let name = way.name();
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
