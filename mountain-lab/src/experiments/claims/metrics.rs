// SPDX-License-Identifier: GPL-2.0-or-later
//! Claims 1 and 2: pings with the metrics patch off (A) and on (B), by its switches on one kernel.
//!
//! On: metrics are kept, and next hops chosen by the originally published rule.

use std::slice;

use anyhow::Result;
use mountain::measure::runfile::RunFile;
use mountain::measure::stats::{ascending, far_out};

use super::block;
use super::registry::ClaimVerdict;
use super::switches::{off_on, Switches};
use crate::driver::Session;
use crate::emulate::netns::Netns;
use crate::experiments::probing::ab::{paired, Blocks, Judgement, Paired};
use crate::experiments::probing::lane::{Lane, USUAL};
use crate::experiments::probing::pool::{delays, table};
use crate::experiments::probing::tool::Tool;

pub const METRICS: &str = "net.ipv4.path_metrics";
pub const SCORE: &str = "net.ipv4.fib_multipath_score";
const SIDES: [&[&str]; 2] = [&["0", "0"], &["1", "1"]];

/// Pings over a WAN are unchanged when what the data allow is within these shares; those by which
/// `mountain ping` agrees with other tools (docs/validate-ping.md).
const ALIKE: [(&str, f64); 2] = [("Median", 0.01), ("P99", 0.05)];

/// Claim 1: of loopback.
pub fn local(session: &mut Session) -> Result<ClaimVerdict> {
    let host = Netns::create("local")?;
    let switches = Switches::hold(Some(&host), &[METRICS, SCORE])?;
    let (block, target) = (block(&session.args), "127.0.0.1".parse()?);
    let measure = || Tool::MountainIcmp.measure(&host, target, &block);
    let blocks = off_on(session, "local", &switches, SIDES, measure)?;
    Ok(spread(&blocks))
}

/// Claim 2: over two emulated paths of the same cost.
pub fn wan(session: &mut Session) -> Result<ClaimVerdict> {
    let block = block(&session.args);
    let mut lane = Lane::build(&[USUAL; 2], block.seconds() + 2.0, session.args.seed)?;
    let mut number = 0;
    let switches = Switches::hold(Some(&lane.hosts.client), &[METRICS, SCORE])?;
    let measure = || {
        lane.play(number)?;
        number += 1;
        let hosts = &lane.hosts;
        Tool::MountainIcmp.measure(&hosts.client, hosts.server_addr(), &block)
    };
    let blocks = off_on(session, "wan", &switches, SIDES, measure)?;
    Ok(unchanged(&blocks.judge()?))
}

/// Standard deviation and outliers of each round, by the question of pairs alone: they are figures of a
/// block. The claim is of both; either of them higher refutes it.
fn spread(blocks: &Blocks) -> ClaimVerdict {
    let [a, b] = &blocks.runs;
    let stdev = |run: &RunFile| delays(&table(slice::from_ref(run), false), |d| d.stdev);
    let pairs = a.iter().zip(b);
    let stdevs = pairs.filter_map(|(a, b)| Some([stdev(a)?, stdev(b)?]));
    let stdevs: Vec<[f64; 2]> = stdevs.collect();
    let outliers: Vec<[f64; 2]> = a.iter().zip(b).map(|(a, b)| outliers([a, b])).collect();
    let rows = paired([("stdev", stdevs), ("outliers", outliers)]);
    let [stdev, outliers] = [0, 1].map(|row: usize| rows[row].means);
    let said = |row: &Paired| match row.lower() {
        Some(true) => "lower",
        Some(false) => "higher",
        None => "no difference shown",
    };
    let n: usize = a.iter().map(|run| run.samples.len()).sum();
    let detail = format!(
        "loopback, {} rounds, {n} pings a side, means, off → on: stdev {:.2} → {:.2} us ({}); outliers \
         {:.2} → {:.2} % ({})",
        a.len(),
        stdev[0],
        stdev[1],
        said(&rows[0]),
        outliers[0] * 100.0,
        outliers[1] * 100.0,
        said(&rows[1]),
    );
    let lower: Vec<Option<bool>> = rows.iter().map(Paired::lower).collect();
    let claimed = match &lower[..] {
        [Some(true), Some(true)] => Some(true),
        rows if rows.contains(&Some(false)) => Some(false),
        _ => None,
    };
    ClaimVerdict::by(claimed, detail)
}

/// Share of each side's answers that lie far out, by the quartiles of both sides together: those of
/// its own would move with what is being counted.
fn outliers(runs: [&RunFile; 2]) -> [f64; 2] {
    let rtts = runs.map(|run| run.samples.rtt_us.iter().flatten().copied());
    let both = ascending(rtts.iter().cloned().flatten());
    let limit = far_out(&both).unwrap_or(f64::INFINITY);
    rtts.map(|rtts| {
        let n = rtts.clone().count().max(1);
        rtts.filter(|&rtt| rtt > limit).count() as f64 / n as f64
    })
}

/// That nothing differs is not that it is unchanged: what the data leave open has to be little, too.
fn unchanged(judgement: &Judgement) -> ClaimVerdict {
    let detail = format!(
        "20 ms ± 2 ms by either of two paths, off → on: {}; {}",
        judgement.figures(),
        judgement.text()
    );
    let differs = judgement.better.len() + judgement.worse.len() > 0;
    let mut rows = ALIKE.into_iter();
    let alike = rows.all(|(row, share)| judgement.within(row, share));
    let claimed = match differs {
        true => Some(false),
        false => alike.then_some(true),
    };
    ClaimVerdict::by(claimed, detail)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::probing::pool::made_up;
    use rand::{RngExt, SeedableRng};
    use rand_pcg::Pcg64;

    /// Eight rounds of 200 pings of some 30 us each side: noise of so many us, and one in so many is far
    /// out (0: none).
    fn blocks(noise: [f64; 2], far: [usize; 2]) -> Blocks {
        let run = |round: usize, side: usize| {
            let rtt = |i: usize| {
                let spread = ((i * 7 + round * 3) % 11) as f64 / 10.0 - 0.5;
                let is_far = far[side] > 0 && (i + round).is_multiple_of(far[side]);
                let late = if is_far { 500.0 } else { 0.0 };
                Some(30.0 + noise[side] * (1.0 + round as f64 / 50.0) * spread + late)
            };
            made_up((0..200).map(rtt).collect())
        };
        Blocks {
            names: ["off", "on"].map(str::to_owned),
            runs: [0, 1].map(|side| (0..8).map(|round| run(round, side)).collect()),
        }
    }

    #[test]
    fn both_rows_have_to_be_lower() {
        let lower = spread(&blocks([4.0, 2.0], [20, 100])).to_string();
        assert!(
            lower.starts_with("shown: loopback, 8 rounds, 1600 pings"),
            "{lower}"
        );
        assert!(lower.contains("outliers 5.00 → 1.00 % (lower)"), "{lower}");
        // Fewer of the same spread: its stdev is less, but there are no outliers on either side.
        let one = spread(&blocks([4.0, 2.0], [0, 0])).to_string();
        assert!(
            one.starts_with("no difference shown") && one.contains("(lower)"),
            "{one}"
        );
    }

    #[test]
    fn either_row_higher_refutes_it() {
        let more = spread(&blocks([2.0, 2.0], [100, 20]));
        assert!(matches!(more, ClaimVerdict::Refuted(_)), "{more}");
        let wider = spread(&blocks([2.0, 4.0], [0, 0]));
        assert!(matches!(wider, ClaimVerdict::Refuted(_)), "{wider}");
        let same = spread(&blocks([2.0, 2.0], [20, 20]));
        assert!(matches!(same, ClaimVerdict::NoDifference(_)), "{same}");
    }

    #[test]
    fn sides_without_answers_have_no_outliers() {
        let none = RunFile::default();
        assert_eq!(outliers([&none, &none]), [0.0, 0.0]);
    }

    /// 20 ms and up to so many ms more, on one side longer by `more` ms.
    fn judged(noise: f64, more: f64) -> Judgement {
        let mut rng = Pcg64::seed_from_u64(1);
        let mut blocks = blocks([0.0; 2], [0, 0]);
        for (side, runs) in blocks.runs.iter_mut().enumerate() {
            let rtts = runs.iter_mut().flat_map(|r| &mut r.samples.rtt_us);
            for rtt in rtts {
                let ms = 20.0 + rng.random_range(0.0..noise) + more * side as f64;
                *rtt = Some(ms * 1e3);
            }
        }
        blocks.judge().unwrap()
    }

    #[test]
    fn unchanged_takes_more_than_no_difference() {
        let same = unchanged(&judged(2.0, 0.0)).to_string();
        assert!(same.starts_with("shown: 20 ms ± 2 ms"), "{same}");
        assert!(same.contains("n = 1600 → 1600"), "{same}");
        let longer = unchanged(&judged(2.0, 1.0));
        assert!(matches!(longer, ClaimVerdict::Refuted(_)), "{longer}");
        let shorter = unchanged(&judged(2.0, -1.0));
        assert!(matches!(shorter, ClaimVerdict::Refuted(_)), "{shorter}");
        let unknown = unchanged(&judged(30.0, 0.0));
        assert!(
            matches!(unknown, ClaimVerdict::NoDifference(_)),
            "{unknown}"
        );
    }
}
