//! `mountain-lab redirect pps`: the router's processor time per delivered packet.

use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::{bail, ensure, Context, Result};
use mountain_lab::result::{Metric, RunResult, VoidRun};
use mountain_lab::workload::sys::NoHalt;

use super::load::{Load, Source};
use super::programs::Programs;
use super::rig::{Rig, TO};
use super::segment::{Segment, Sources};
use super::way::{install, Ready, Way};
use super::RedirectArgs;
use crate::stopped;

/// Below saturation of every row, packets per second.
const FIXED_PPS: u32 = 100_000;

/// What is offered to each row.
fn loads(quick: bool) -> Vec<Load> {
    let packets = if quick { 32_768 } else { 131_072 };
    let mut loads = vec![];
    for source in [Source::Live, Source::Socket] {
        for payload in [64, 1_400] {
            for pps in [None, Some(FIXED_PPS)] {
                loads.push(Load {
                    source,
                    payload,
                    pps,
                    // Faster, and so shorter.
                    packets: if pps.is_none() { packets * 4 } else { packets },
                });
            }
        }
    }
    loads
}

/// Segments that count, by row and load; a value a repeat.
type Measured = BTreeMap<(usize, usize), Vec<Option<Segment>>>;

pub fn run(args: &RedirectArgs) -> Result<ExitCode> {
    let ways = chosen(&args.rows)?;
    let loads = loads(args.quick);
    let repeats = args.repeat.unwrap_or(if args.quick { 2 } else { 9 });
    let mut result = RunResult::new("redirect-pps", "", args.seed, repeats);
    let _awake = NoHalt::hold();
    let rig = Rig::build()?;
    rig.thread_napi()?;
    let measured = rig.client.enter(|| {
        let programs = Programs::load(&rig, TO)?;
        let mut sources = Sources::new(programs, args.seed)?;
        measure(&rig, &mut sources, &ways, &loads, repeats, &mut result)
    })?;
    for ((w, l), segments) in &measured {
        let (way, load) = (ways[*w], loads[*l]);
        let n = segments.iter().flatten().map(|s| s.seen.packets).sum();
        let mut put = |name: &str, unit: &str, of: &dyn Fn(&Segment) -> f64| {
            let values = segments.iter().map(|s| s.as_ref().map(of)).collect();
            let metric = Metric::of_repeats(unit, values, n, args.seed);
            let all = result.policies.entry(way.name()).or_default();
            all.insert(format!("{}_{name}", load.name()), metric);
        };
        put("ns", "ns", &Segment::ns);
        put("server_ns", "ns", &Segment::server_ns);
        put("pps", "pps", &Segment::pps);
        put("busy", "ratio", &Segment::busy);
        put("waited", "ratio", &Segment::waited);
    }
    print!("{}", result.table());
    println!("{}", result.write(&args.out)?.display());
    Ok(result.exit_code(args.check))
}

fn chosen(names: &[String]) -> Result<Vec<Way>> {
    if names.is_empty() {
        return Ok(Way::ALL.into());
    }
    let find = |name: &String| {
        let found = Way::ALL.into_iter().find(|w| w.name() == *name);
        found.with_context(|| format!("no row {name}: `mountain-lab redirect --list`"))
    };
    names.iter().map(find).collect()
}

fn measure(
    rig: &Rig,
    sources: &mut Sources,
    ways: &[Way],
    loads: &[Load],
    repeats: u32,
    result: &mut RunResult,
) -> Result<Measured> {
    let mut measured = Measured::new();
    for repeat in 0..repeats {
        for i in 0..ways.len() {
            // Another order each time, so that a trend favours nobody.
            let w = (i + repeat as usize) % ways.len();
            let way = ways[w];
            let installed = match install(rig, &sources.programs, way)? {
                Ready::Yes(installed) => installed,
                Ready::Refused(why) => {
                    result
                        .environment
                        .insert(format!("refused {way}"), why.into());
                    continue;
                }
            };
            for (l, load) in loads.iter().enumerate() {
                ensure!(!stopped(), "interrupted");
                let segment = sources
                    .run(rig, load, way.addressed())
                    .with_context(|| format!("{way}, {}", load.name()))?;
                eprintln!("{way} {} {segment:?}", load.name());
                let void = segment.void(load.pps.is_some());
                if let Some(reason) = &void {
                    result.void.push(VoidRun {
                        policy: format!("{way} {}", load.name()),
                        repeat,
                        reason: reason.clone(),
                    });
                }
                let values = measured.entry((w, l)).or_default();
                values.resize(repeat as usize, None);
                values.push(void.is_none().then_some(segment));
            }
            drop(installed);
        }
    }
    if measured.is_empty() {
        bail!("no row could be measured");
    }
    Ok(measured)
}
