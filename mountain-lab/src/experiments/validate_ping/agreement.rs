// SPDX-License-Identifier: GPL-2.0-or-later
//! Whether `mountain ping` agrees with ping(8) and irtt: the same path in the same minutes, in
//! blocks, each tool in each place of the order equally often.

use std::time::Duration;

use anyhow::{Context, Result};
use mountain::measure::runfile::RunFile;
use mountain::measure::stats::Delays;
use mountain_lab::result::{Check, Metric, RunResult};
use mountain_lab::workload::stats::quantile_of;
use serde_json::json;

use crate::driver::{CommonArgs, Session};
use crate::experiments::probing::lane::{Lane, USUAL};
use crate::experiments::probing::pool::{delays, put, table};
use crate::experiments::probing::tool::{irtt_server, Block, Tool};
use crate::policy_ctl::reflect;

/// Medians may differ by this much …
const MEDIAN_US: f64 = 20.0;
/// … and this share of the other tool's.
const MEDIAN_SHARE: f64 = 0.01;
const P99_SHARE: f64 = 0.05;
/// Answers of each tool that the promise asks for.
const LEAST: f64 = 10_000.0;
/// The emulator's own error is looked at in each round by so many probes.
const REFERENCE_PROBES: usize = 100;
/// Far-apart probes are for the path; the loopback takes them faster.
const LOOPBACK_INTERVAL: Duration = Duration::from_millis(4);

/// Repeats and steps. A multiple of four, so that each of four tools takes each place equally often.
pub fn extent(args: &CommonArgs) -> (u32, u64) {
    let rounds = args.quick_or(4, 20);
    (rounds, u64::from(rounds) * 7)
}

/// Probes of a block: some more than 10,000 in all, for those that get lost or that irtt leaves out.
fn probes(args: &CommonArgs) -> usize {
    args.quick_or(100, 520)
}

/// The blocks of one tool, one a round.
type Series = (Tool, Vec<RunFile>);

/// What was measured: blocks over the path and over the loopback, and the emulator's own errors by round, µs.
struct Measurement {
    path: Vec<Series>,
    loopback: Vec<Series>,
    errors: Vec<Vec<f64>>,
}

pub fn run(session: &mut Session) -> Result<()> {
    let mut tools = vec![Tool::MountainIcmp, Tool::Ping, Tool::MountainUdp];
    if Tool::Irtt.version().is_some() {
        tools.push(Tool::Irtt);
    } else {
        let missing =
            "irtt is not installed (apt install irtt): the comparison with it is not shown";
        session.say(missing);
    }
    let versions: Vec<String> = tools.iter().filter_map(|t| t.version()).collect();
    let tools_json = json!({ "versions": versions });
    session.result.note("tools", tools_json);
    let measured = measure(session, &tools)?;
    let result = &mut session.result;
    emulator(result, &measured.errors);
    for (place, series) in [("", &measured.path), ("loopback ", &measured.loopback)] {
        for (tool, blocks) in series.iter() {
            put(result, &format!("{place}{}", tool.name()), blocks);
        }
    }
    let checks = checks(&measured, session.args.quick);
    result.checks.extend(checks);
    Ok(())
}

fn measure(session: &Session, tools: &[Tool]) -> Result<Measurement> {
    let (rounds, _) = extent(&session.args);
    let block = Block::of(probes(&session.args));
    let fast = Block {
        interval: LOOPBACK_INTERVAL,
        ..block
    };
    let logs = tempfile::tempdir().context("no folder for files under way")?;
    let mut lane = Lane::build(&[USUAL], block.seconds() + 3.0, session.args.seed)?;
    let target = lane.hosts.gateway(0);
    let _reflector = reflect(&lane.hosts.server, "server", &[target], logs.path())?;
    let irtt = tools.contains(&Tool::Irtt);
    let _irtt = irtt
        .then(|| irtt_server(&lane.hosts.server, target))
        .transpose()?;
    let empty = |tool: &Tool| (*tool, vec![]);
    let mut path: Vec<Series> = tools.iter().map(empty).collect();
    let mut loopback = vec![empty(&Tool::MountainIcmp), empty(&Tool::Ping)];
    let mut errors = vec![];
    for round in 0..rounds {
        one_round(session, "path", &mut path, round, |tool| {
            // The same delays for each tool of a round.
            lane.play(round)?;
            tool.measure(&lane.hosts.client, target, &block)
        })?;
        one_round(session, "loopback", &mut loopback, round, |tool| {
            let to = [127, 0, 0, 1].into();
            tool.measure(&lane.hosts.client, to, &fast)
        })?;
        session.step(&format!("round {round}: the emulator itself"))?;
        errors.push(lane.emulator_error_us(REFERENCE_PROBES)?);
    }
    Ok(Measurement {
        path,
        loopback,
        errors,
    })
}

/// A block of each tool, in the order of this round.
fn one_round(
    session: &Session,
    what: &str,
    series: &mut [Series],
    round: u32,
    mut measure: impl FnMut(Tool) -> Result<RunFile>,
) -> Result<()> {
    let tools: Vec<Tool> = series.iter().map(|(tool, _)| *tool).collect();
    let names: Vec<&str> = tools.iter().map(|tool| tool.name()).collect();
    let of_tool = |i: usize| measure(tools[i]);
    let blocks = session.round(what, &names, round, of_tool)?;
    for ((_, all), block) in series.iter_mut().zip(blocks) {
        all.push(block);
    }
    Ok(())
}

fn checks(measured: &Measurement, quick: bool) -> Vec<Check> {
    let Measurement { path, loopback, .. } = measured;
    let mut checks = vec![];
    for (ours, theirs) in [
        (Tool::MountainIcmp, Tool::Ping),
        (Tool::MountainUdp, Tool::Irtt),
    ] {
        let (a, b) = (of_tool(path, ours), of_tool(path, theirs));
        checks.extend(agree(ours, theirs, a, b));
    }
    let [a, b] = [Tool::MountainIcmp, Tool::Ping].map(|tool| of_tool(loopback, tool));
    checks.push(steadier(a, b));
    if !quick {
        let answers = path.iter().chain(loopback);
        let answers = answers.map(|(_, blocks)| table(blocks, false).count as f64);
        let fewest = answers.reduce(f64::min);
        let name = "answers of the tool that has the fewest";
        checks.push(Check::at_least(name, fewest, LEAST));
    }
    checks
}

/// The blocks of a tool, if it ran.
fn of_tool(series: &[Series], tool: Tool) -> Option<&[RunFile]> {
    let found = series.iter().find(|(of, _)| *of == tool);
    found.map(|(_, blocks)| &blocks[..])
}

/// The emulator's own error on the idle path, by round.
fn emulator(result: &mut RunResult, errors: &[Vec<f64>]) {
    let n = errors.iter().map(|e| e.len() as u64).sum();
    for (name, p) in [("error_p50_us", 0.5), ("error_p99_us", 0.99)] {
        let values = errors.iter().map(|e| quantile_of(e, p)).collect();
        let metric = Metric::of_repeats("us", values, n, result.seed);
        result.emulator.insert(name.into(), metric);
    }
}

/// A figure of a tool's blocks together, µs.
fn figure(blocks: &[RunFile], of: fn(&Delays) -> f64) -> Option<f64> {
    delays(&table(blocks, false), of)
}

/// Whether two tools say the same of one path. `None`: that tool did not run.
fn agree(ours: Tool, theirs: Tool, a: Option<&[RunFile]>, b: Option<&[RunFile]>) -> [Check; 2] {
    let both = |of: fn(&Delays) -> f64| Some((figure(a?, of)?, figure(b?, of)?));
    let missing = match b {
        None => format!(" ({} is not installed)", theirs.name()),
        Some(_) => String::new(),
    };
    let of = format!("of {} from that of {}", ours.name(), theirs.name());
    let median = both(|f| f.median);
    let limit = MEDIAN_US + median.map_or(0.0, |(_, other)| MEDIAN_SHARE * other);
    let apart = median.map(|(a, b)| (a - b).abs());
    let p99 = both(|f| f.p99).map(|(a, b)| (a / b - 1.0).abs());
    [
        Check::at_most(&format!("median {of}, us{missing}"), apart, limit),
        Check::at_most(&format!("p99 {of}, share{missing}"), p99, P99_SHARE),
    ]
}

/// Whether the loopback's delays vary less by kernel timestamps than as ping(8) sees them.
fn steadier(ours: Option<&[RunFile]>, ping: Option<&[RunFile]>) -> Check {
    let stdev = |blocks| figure(blocks, |d| d.stdev);
    // Only by kernel timestamps throughout.
    let ours = ours.filter(|blocks| blocks.iter().all(|b| b.clock == "kernel"));
    let ratio = || Some(stdev(ours?)? / stdev(ping?)?);
    let what = "stdev on loopback, mountain icmp (kernel timestamps) / ping(8)";
    Check::at_most(what, ratio(), 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::probing::pool::made_up;

    #[test]
    fn each_of_four_tools_can_take_each_place_equally_often() {
        let [quick, full] = [true, false].map(CommonArgs::test);
        let rounds = |args: &CommonArgs| extent(args).0;
        assert!(rounds(&quick).is_multiple_of(4) && rounds(&full).is_multiple_of(4));
        assert!(rounds(&full) as usize * probes(&full) > LEAST as usize);
    }

    #[test]
    fn limits_of_agreement() {
        let figures = |median: f64, p99: f64| {
            let rtts = [vec![median; 99], vec![p99; 2]].concat();
            made_up(rtts.into_iter().map(Some).collect())
        };
        let met = |a, b| {
            let checks = agree(Tool::MountainIcmp, Tool::Ping, Some(&[a]), Some(&[b]));
            checks.map(|c| c.met)
        };
        let other = figures(20_000.0, 22_000.0);
        // 20 µs and 1% of 20 ms.
        let near = figures(20_219.0, 23_000.0);
        assert_eq!(met(near, other.clone()), [Some(true); 2]);
        let far = figures(20_221.0, 23_200.0);
        assert_eq!(met(far, other.clone()), [Some(false); 2]);
        assert_eq!(
            met(figures(19_700.0, 20_800.0), other.clone()),
            [Some(false); 2],
            "too low is no better"
        );
        let silent = RunFile::default();
        assert_eq!(met(silent, other.clone()), [None; 2]);
        let [median, _] = agree(Tool::MountainUdp, Tool::Irtt, Some(&[other]), None);
        assert_eq!(median.met, None);
        assert!(
            median.name.ends_with("(irtt is not installed)"),
            "{median:?}"
        );
    }

    #[test]
    fn more_spread_than_ping_is_a_miss() {
        let stdev = |stdev: f64| RunFile {
            clock: "kernel".into(),
            ..made_up(vec![Some(20.0 - stdev), Some(20.0 + stdev)])
        };
        let met = |a, b| steadier(Some(&[stdev(a)]), Some(&[stdev(b)])).met;
        assert_eq!(met(3.0, 3.0), Some(true));
        assert_eq!(met(3.1, 3.0), Some(false));
        assert_eq!(steadier(None, Some(&[stdev(1.0)])).met, None);
        let user = RunFile {
            clock: "user".into(),
            ..stdev(1.0)
        };
        assert_eq!(steadier(Some(&[user]), Some(&[stdev(2.0)])).met, None);
    }
}
