// SPDX-License-Identifier: GPL-2.0-or-later
//! How often `mountain compare` and `mountain ab` call equal runs different, and how often they find
//! a difference that is there: on made-up delays that drift and burst, and on recordings of loopback
//! and of a veth with a busy neighbour.

use std::net::{IpAddr, Ipv4Addr};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result};
use mountain::measure::compare::{compare, CompareOptions, Comparison, Side};
use mountain::measure::runfile::RunFile;
use mountain::measure::verdict::RowVerdict;
use mountain_lab::result::RunResult;
use mountain_lab::workload::stats::quantile_of;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, Exp, Normal};
use rand_pcg::Pcg64;

use crate::driver::{CommonArgs, Session};
use crate::emulate::netns::{Netns, Running};
use crate::emulate::wire::lan;
use crate::experiments::probing::pool::{gaver_lewis, made_up};
use crate::experiments::probing::tool::{Block, Tool};

/// Rounds of an A/B, and the share of each half that is left out as its settle time.
const ROUNDS: usize = 8;
const SETTLE: usize = 6;
/// Probes of a made-up run.
const MADE_UP: usize = 1_000;

/// Pairs of each kind that is recorded, and A/Bs cut out of each long recording.
fn recordings(args: &CommonArgs) -> u64 {
    args.quick_or(4, 100)
}

/// Repeats and steps.
pub fn extent(args: &CommonArgs) -> (u32, u64) {
    (1, 6 + 2 * (recordings(args) + 1))
}

pub fn run(session: &mut Session) -> Result<()> {
    // Seeds that nothing was chosen by.
    let first = 1_000_000 + session.args.seed * 100_000;
    let seeds = |quick: u64, full| first..first + session.args.quick_or(quick, full);
    for (name, series) in MODELS {
        session.step(&format!("made up: {name}"))?;
        let pairs = seeds(20, 200).map(|seed| {
            let [a, b] = [0, 1].map(|i| vec![made_up(series(MADE_UP, 2 * seed + i))]);
            judge(a, b, false)
        });
        let rates = Rates::of(pairs)?;
        rates.report(&format!("compare, {name}"), &mut session.result);
    }
    session.step("power")?;
    let path = |seed| gaver_lewis(MADE_UP, seed, 0.01);
    let found = Rates::of(seeds(10, 50).map(|seed| {
        let (a, b) = (path(2 * seed), path(2 * seed + 1));
        judge(vec![made_up(a)], vec![later(&b, 5e3)], false)
    }))?;
    let what = "`compare` finds 5 ms more on a path of 20 ms";
    session.result.at_least(what, Some(found.headline), 0.9);
    for (name, series) in MODELS {
        let found = Rates::of(seeds(10, 50).map(|seed| {
            let delays = series(2 * ROUNDS * 500, seed);
            ab(&delays, 0.1)
        }))?;
        let what = format!("`ab` finds 10% of the median more, {name}");
        session.result.at_least(&what, Some(found.headline), 0.8);
    }
    recorded(session)
}

/// Pairs and long recordings of loopback and of a veth with a neighbour that floods now and then.
fn recorded(session: &mut Session) -> Result<()> {
    let (args, n) = (&session.args, recordings(&session.args));
    let (here, there) = (Netns::create("here")?, Netns::create("there")?);
    lan((&here, "v0", HERE), (&there, "v1", THERE))?;
    let targets: [(&str, IpAddr); 2] = [
        ("loopback", [127, 0, 0, 1].into()),
        ("busy veth", THERE.into()),
    ];
    let short = Block {
        interval: Duration::from_millis(5),
        ..Block::of(args.quick_or(200, 1_000))
    };
    // Of an A/B that is cut out: both halves of each round.
    let probes = 2 * ROUNDS * args.quick_or(50, 375);
    let long = Block {
        interval: Duration::from_millis(1),
        ..Block::of(n as usize * probes)
    };
    let (mut pairs, mut abs) = (vec![], vec![]);
    for (name, target) in targets {
        let flood = (name != "loopback").then(|| flood(&there)).transpose()?;
        let measure = |block: &Block| Tool::MountainIcmp.measure(&here, target, block);
        for i in 0..n {
            session.step(&format!("{name}: pair {}", i + 1))?;
            let (a, b) = (measure(&short)?, measure(&short)?);
            pairs.push(judge(vec![a], vec![b], false));
        }
        session.step(&format!("{name}: one long recording"))?;
        let long = measure(&long)?.samples.rtt_us;
        drop(flood);
        let pieces = long.chunks_exact(probes);
        abs.extend(pieces.clone().map(|piece| ab(piece, 0.0)));
        let found = Rates::of(pieces.map(|piece| ab(piece, 0.1)))?;
        let (policy, found) = (format!("ab, {name}"), [found.headline]);
        let (name, result) = ("found_10_percent", &mut session.result);
        result.put_values(&policy, name, "ratio", &found, n);
    }
    Rates::of(pairs.into_iter())?.report("compare, recorded", &mut session.result);
    Rates::of(abs.into_iter())?.report("ab, recorded", &mut session.result);
    Ok(())
}

/// How often a difference was found.
#[derive(Default)]
struct Rates {
    pairs: u64,
    headline: f64,
    /// By row.
    rows: Vec<(String, f64)>,
}

impl Rates {
    fn of(comparisons: impl Iterator<Item = Result<Comparison>>) -> Result<Self> {
        let mut rates = Rates::default();
        for comparison in comparisons {
            let comparison = comparison?;
            rates.pairs += 1;
            let headline = &comparison.headlines[0];
            rates.headline += f64::from(u8::from(headline.better || headline.worse));
            // The thresholds are others for each run.
            let judged = comparison.rows.iter().skip(1);
            for (i, row) in judged.filter(|row| !row.name.starts_with('>')).enumerate() {
                let verdict = row.against_first[0].verdict;
                let shown = matches!(verdict, RowVerdict::Better | RowVerdict::Worse);
                if rates.rows.len() == i {
                    rates.rows.push((row.name.clone(), 0.0));
                }
                rates.rows[i].1 += f64::from(u8::from(shown));
            }
        }
        let n = rates.pairs.max(1) as f64;
        rates.headline /= n;
        rates.rows.iter_mut().for_each(|(_, rate)| *rate /= n);
        Ok(rates)
    }

    /// As false verdicts, with what is promised of them.
    fn report(&self, name: &str, result: &mut RunResult) {
        let rates = self.rows.iter().map(|(_, rate)| *rate);
        let mean = rates.clone().sum::<f64>() / self.rows.len().max(1) as f64;
        let most = rates.fold(0.0, f64::max);
        for (what, rate, limit) in [
            ("mean of all rows", mean, 0.06),
            ("the row that errs most", most, 0.10),
            ("the headline", self.headline, 0.07),
        ] {
            let what = format!("{name}: equal called different, {what}");
            result.at_most(&what, Some(rate), limit);
        }
        let all = self.rows.iter().map(|(row, rate)| (row.as_str(), *rate));
        for (row, rate) in all.chain([("headline", self.headline)]) {
            let row = format!("false_{row}");
            result.put_values(name, &row, "ratio", &[rate], self.pairs);
        }
        result.note(&format!("{name}: pairs"), self.pairs);
    }
}

fn judge(a: Vec<RunFile>, b: Vec<RunFile>, paired: bool) -> Result<Comparison> {
    let side = |name: &str, runs| Side {
        name: name.into(),
        runs,
    };
    let options = CompareOptions {
        paired,
        ..CompareOptions::default()
    };
    compare(&[side("A", a), side("B", b)], &options)
}

/// Halves in the order of `mountain ab`, cut out of one series; B's are later by a share of the median.
fn ab(series: &[Option<f64>], more: f64) -> Result<Comparison> {
    let answered: Vec<f64> = series.iter().flatten().copied().collect();
    let shift = more * quantile_of(&answered, 0.5).context("no answers")?;
    let half = series.len() / (2 * ROUNDS);
    let mut sides = [vec![], vec![]];
    for (i, half) in series.chunks_exact(half).take(2 * ROUNDS).enumerate() {
        let side = [0, 1, 1, 0][i % 4];
        let measured = &half[half.len() / SETTLE..];
        sides[side].push(later(measured, shift * side as f64));
    }
    let [a, b] = sides;
    judge(a, b, true)
}

fn later(rtts: &[Option<f64>], by_us: f64) -> RunFile {
    let later = rtts.iter().map(|rtt| rtt.map(|us| us + by_us));
    made_up(later.collect())
}

type Series = fn(usize, u64) -> Vec<Option<f64>>;

const MODELS: [(&str, Series); 4] = [
    // 1% lost.
    ("20 ms and queues, AR 0.5", |n, seed| {
        gaver_lewis(n, seed, 0.01)
    }),
    ("20 ms, AR 0.98", autocorrelated),
    ("bursts", |n, seed| bursts(n, 200.0, 10.0, seed)),
    ("rare bursts", |n, seed| bursts(n, 1_000.0, 50.0, seed)),
];

/// 20 ms, give or take 2 ms, AR(1) with 0.98.
fn autocorrelated(n: usize, seed: u64) -> Vec<Option<f64>> {
    let mut rng = Pcg64::seed_from_u64(seed);
    let noise = Normal::new(0.0, 2e3).expect("a deviation");
    let mut value: f64 = noise.sample(&mut rng);
    let fresh = (1.0 - 0.98f64.powi(2)).sqrt();
    let rtt = |_| {
        value = 0.98 * value + fresh * noise.sample(&mut rng);
        Some(20e3 + value)
    };
    (0..n).map(rtt).collect()
}

/// 20 ms, and every so many probes a burst of so many that are 5 to 40 ms late, a fifth of them lost.
fn bursts(n: usize, every: f64, length: f64, seed: u64) -> Vec<Option<f64>> {
    let mut rng = Pcg64::seed_from_u64(seed);
    let length = Exp::new(1.0 / length).expect("a positive mean");
    let jitter = Exp::new(1.0 / 1e3).expect("a positive mean");
    let (mut left, mut height) = (0, 0.0);
    let rtt = |_| {
        if left == 0 && rng.random_bool(1.0 / every) {
            left = length.sample(&mut rng) as usize + 1;
            height = rng.random_range(10e3..40e3);
        }
        let rtt = 20e3 + jitter.sample(&mut rng);
        if left == 0 {
            return Some(rtt);
        }
        left -= 1;
        (!rng.random_bool(0.2)).then(|| rtt + height * rng.random_range(0.5..1.0))
    };
    (0..n).map(rtt).collect()
}

/// Addresses of a veth pair.
const HERE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const THERE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);

/// A neighbour that floods for a while, again and again.
fn flood(there: &Netns) -> Result<Running> {
    let script = "while :; do n=$(($(od -An -N1 -tu1 /dev/urandom) % 9 + 1)); \
                  timeout 0.$n ping -f -q -s 1400 192.0.2.1 > /dev/null; sleep 0.$((10 - n)); done";
    let mut command = there.command("sh");
    command.args(["-c", script]).stdin(Stdio::null());
    command.stdout(Stdio::null()).stderr(Stdio::null());
    Ok(Running(command.spawn().context("the busy neighbour")?))
}
