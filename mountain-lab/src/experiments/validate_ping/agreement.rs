// SPDX-License-Identifier: GPL-2.0-or-later
//! Whether `mountain ping` agrees with ping(8) and irtt: the same path in the same minutes, in
//! blocks, each tool in each place of the order equally often.

use std::time::Duration;

use anyhow::Result;
use mountain::measure::runfile::RunFile;
use mountain_lab::result::{Check, LimitKind, Metric, RunResult};
use serde_json::json;

use super::{Validation, DELAY};
use crate::experiments::probing::lane::Lane;
use crate::experiments::probing::pool::{delays, metrics, pooled, table};
use crate::experiments::probing::tool::{Block, IrttServer, Tool};

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

/// How long and how often.
pub struct AgreementPlan {
    /// A multiple of four, so that each of four tools takes each place equally often.
    pub rounds: u32,
    pub block: usize,
}

impl AgreementPlan {
    pub fn new(quick: bool) -> Self {
        match quick {
            true => AgreementPlan {
                rounds: 4,
                block: 100,
            },
            // Some more than 10,000 in all, for those that get lost or that irtt leaves out.
            false => AgreementPlan {
                rounds: 20,
                block: 520,
            },
        }
    }

    pub fn steps(&self) -> u64 {
        u64::from(self.rounds) * 7
    }
}

/// The blocks of one tool, one a round.
struct Series {
    tool: Tool,
    blocks: Vec<RunFile>,
}

/// The order of `n` tools in a round: each takes each place in turn.
pub fn order(n: usize, round: u32) -> impl Iterator<Item = usize> {
    (0..n).map(move |place| (place + round as usize) % n)
}

/// What was measured: blocks over the path and over the loopback, and the emulator's own errors by round, µs.
struct Measurement {
    path: Vec<Series>,
    loopback: Vec<Series>,
    errors: Vec<Vec<f64>>,
}

pub fn run(bench: &mut Validation, result: &mut RunResult) -> Result<()> {
    let mut tools = vec![Tool::MountainIcmp, Tool::Ping, Tool::MountainUdp];
    if Tool::Irtt.version().is_some() {
        tools.push(Tool::Irtt);
    } else {
        bench.say("irtt is not installed (apt install irtt): the comparison with it is not shown");
    }
    let versions: Vec<String> = tools.iter().filter_map(|t| t.version()).collect();
    result
        .environment
        .insert("tools".into(), json!({ "versions": versions }));
    let measured = measure(bench, &tools)?;
    emulator(result, &measured.errors, bench.seed);
    for (place, series) in [("", &measured.path), ("loopback ", &measured.loopback)] {
        for s in series.iter() {
            let blocks: Vec<_> = s.blocks.iter().cloned().map(Some).collect();
            let name = format!("{place}{}", s.tool.name());
            let metrics = metrics(&blocks, bench.seed);
            result.policies.entry(name).or_default().extend(metrics);
        }
    }
    result.checks.extend(checks(&measured, bench.quick));
    Ok(())
}

fn measure(bench: &mut Validation, tools: &[Tool]) -> Result<Measurement> {
    let plan = AgreementPlan::new(bench.quick);
    let block = Block {
        count: plan.block,
        ..Block::default()
    };
    let fast = Block {
        interval: LOOPBACK_INTERVAL,
        ..block
    };
    let dir = bench.scratch.path().to_owned();
    let mut lane = Lane::build(&[DELAY], block.seconds() + 3.0, bench.seed)?;
    let target = lane.target(0);
    let _reflector = lane.reflector(0, &dir)?;
    let _irtt = match tools.contains(&Tool::Irtt) {
        true => Some(IrttServer::start(lane.server(), target)?),
        false => None,
    };
    let mut path = empty(tools);
    let mut loopback = empty(&[Tool::MountainIcmp, Tool::Ping]);
    let mut errors = vec![];
    for round in 0..plan.rounds {
        for i in order(path.len(), round) {
            bench.step(&format!("round {round}: {}", path[i].tool.name()))?;
            // The same delays for each tool of a round.
            lane.play(round)?;
            let run = path[i].tool.measure(lane.client(), target, &block, &dir)?;
            path[i].blocks.push(run);
        }
        for i in order(loopback.len(), round) {
            let tool = loopback[i].tool;
            bench.step(&format!("round {round}: {} on loopback", tool.name()))?;
            let to = [127, 0, 0, 1].into();
            let run = tool.measure(lane.client(), to, &fast, &dir)?;
            loopback[i].blocks.push(run);
        }
        bench.step(&format!("round {round}: the emulator itself"))?;
        errors.push(lane.emulator_error_us(REFERENCE_PROBES, &dir)?);
    }
    Ok(Measurement {
        path,
        loopback,
        errors,
    })
}

fn checks(measured: &Measurement, quick: bool) -> Vec<Check> {
    let Measurement { path, loopback, .. } = measured;
    let figures = |series: &[Series], tool: Tool| {
        let series = series.iter().find(|s| s.tool == tool)?;
        Some(Figures::of(&pooled(&series.blocks)))
    };
    let mut checks = vec![];
    for (ours, theirs) in [
        (Tool::MountainIcmp, Tool::Ping),
        (Tool::MountainUdp, Tool::Irtt),
    ] {
        let (a, b) = (figures(path, ours), figures(path, theirs));
        checks.extend(agree(ours, theirs, a.as_ref(), b.as_ref()));
    }
    let (a, b) = (
        figures(loopback, Tool::MountainIcmp),
        figures(loopback, Tool::Ping),
    );
    checks.push(steadier(a.as_ref(), b.as_ref()));
    if !quick {
        let answers = path.iter().chain(loopback);
        let answers = answers.map(|s| Figures::of(&pooled(&s.blocks)).n as f64);
        let fewest = answers.reduce(f64::min);
        let name = "answers of the tool that has the fewest";
        checks.push(Check::new(name, fewest, LimitKind::AtLeast, LEAST, None));
    }
    checks
}

fn empty(tools: &[Tool]) -> Vec<Series> {
    let series = |&tool: &Tool| Series {
        tool,
        blocks: vec![],
    };
    tools.iter().map(series).collect()
}

/// The emulator's own error on the idle path, by round.
fn emulator(result: &mut RunResult, errors: &[Vec<f64>], seed: u64) {
    let n = errors.iter().map(|e| e.len() as u64).sum();
    for (name, p) in [("error_p50_us", 0.5), ("error_p99_us", 0.99)] {
        let at = |errors: &Vec<f64>| {
            let mut sorted = errors.clone();
            sorted.sort_by(f64::total_cmp);
            mountain::measure::stats::quantile(&sorted, p)
        };
        let values = errors.iter().map(at).collect();
        let metric = Metric::of_repeats("us", values, n, seed);
        result.emulator.insert(name.into(), metric);
    }
}

/// What is compared of a tool's blocks together; µs.
#[derive(Clone, Debug, Default, PartialEq)]
struct Figures {
    n: u64,
    /// By kernel timestamps throughout.
    kernel: bool,
    median: Option<f64>,
    p99: Option<f64>,
    stdev: Option<f64>,
}

impl Figures {
    fn of(run: &RunFile) -> Self {
        let table = table(run, false);
        Figures {
            n: table.count,
            kernel: run.clock == "kernel",
            median: delays(&table, |d| d.median),
            p99: delays(&table, |d| d.p99),
            stdev: delays(&table, |d| d.stdev),
        }
    }
}

/// Whether two tools say the same of one path. `None`: that tool did not run.
fn agree(ours: Tool, theirs: Tool, a: Option<&Figures>, b: Option<&Figures>) -> [Check; 2] {
    let both = |of: fn(&Figures) -> Option<f64>| Some((of(a?)?, of(b?)?));
    let missing = match b {
        None => format!(" ({} is not installed)", theirs.name()),
        Some(_) => String::new(),
    };
    let (ours, theirs) = (ours.name(), theirs.name());
    let median = both(|f| f.median);
    let limit = MEDIAN_US + median.map_or(0.0, |(_, other)| MEDIAN_SHARE * other);
    [
        Check::new(
            &format!("median of {ours} from that of {theirs}, us{missing}"),
            median.map(|(a, b)| (a - b).abs()),
            LimitKind::AtMost,
            limit,
            None,
        ),
        Check::new(
            &format!("p99 of {ours} from that of {theirs}, share{missing}"),
            both(|f| f.p99).map(|(a, b)| (a / b - 1.0).abs()),
            LimitKind::AtMost,
            P99_SHARE,
            None,
        ),
    ]
}

/// Whether the loopback's delays vary less by kernel timestamps than as ping(8) sees them.
fn steadier(ours: Option<&Figures>, ping: Option<&Figures>) -> Check {
    let ratio = || Some(ours.filter(|f| f.kernel)?.stdev? / ping?.stdev?);
    Check::new(
        "stdev on loopback, mountain icmp (kernel timestamps) / ping(8)",
        ratio(),
        LimitKind::AtMost,
        1.0,
        None,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tool_takes_each_place_equally_often() {
        for (n, rounds) in [
            (4, AgreementPlan::new(true).rounds),
            (4, AgreementPlan::new(false).rounds),
        ] {
            let mut places = vec![vec![0; n]; n];
            for round in 0..rounds {
                let order: Vec<usize> = order(n, round).collect();
                assert!((0..n).all(|tool| order.contains(&tool)));
                (0..n).for_each(|place| places[order[place]][place] += 1);
            }
            let each = rounds as usize / n;
            assert!(places.iter().flatten().all(|&p| p == each), "{places:?}");
        }
        let full = AgreementPlan::new(false);
        assert!(full.rounds as usize * full.block > LEAST as usize);
    }

    #[test]
    fn limits_of_agreement() {
        let figures = |median: f64, p99: f64| Figures {
            n: 1,
            kernel: true,
            median: Some(median),
            p99: Some(p99),
            stdev: Some(1.0),
        };
        let met = |a, b| {
            let checks = agree(Tool::MountainIcmp, Tool::Ping, Some(&a), Some(&b));
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
        let silent = Figures::default();
        assert_eq!(met(silent, other.clone()), [None; 2]);
        let [median, _] = agree(Tool::MountainUdp, Tool::Irtt, Some(&other), None);
        assert_eq!(median.met, None);
        assert!(
            median.name.ends_with("(irtt is not installed)"),
            "{median:?}"
        );
    }

    #[test]
    fn more_spread_than_ping_is_a_miss() {
        let stdev = |stdev| Figures {
            kernel: true,
            stdev: Some(stdev),
            ..Figures::default()
        };
        let met = |a, b| steadier(Some(&stdev(a)), Some(&stdev(b))).met;
        assert_eq!(met(3.0, 3.0), Some(true));
        assert_eq!(met(3.1, 3.0), Some(false));
        assert_eq!(steadier(None, Some(&stdev(1.0))).met, None);
        let user = Figures {
            kernel: false,
            ..stdev(1.0)
        };
        assert_eq!(steadier(Some(&user), Some(&stdev(2.0))).met, None);
    }
}
