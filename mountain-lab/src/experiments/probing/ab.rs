// SPDX-License-Identifier: GPL-2.0-or-later
//! Two things measured in turn and held against each other: the frame of every controlled A/B.
//!
//! Rounds alternate A B, B A, so that a trend over the run favours neither. What differs is judged by
//! the rounds in pairs ([`mountain::measure::paired`]): whatever else changes between measurements (a
//! neighbour of the machine, where a process was put) changes between rounds too.

use std::slice;

use anyhow::{ensure, Result};
use mountain::measure::compare::{self, compare, CompareOptions, HEADLINE};
use mountain::measure::paired::{sign_flips, MOST_ROUNDS};
use mountain::measure::runfile::RunFile;
use mountain::measure::stats::Unit;
use mountain::measure::verdict::{holm, Interval, RowVerdict, LEVEL};
use serde::Serialize;

use crate::driver::Session;
use crate::experiments::probing::pool::{put, table};

/// With fewer rounds no difference can be shown in pairs: the least p-value is 2 / 2^rounds, and
/// Holm's correction takes three times that.
pub const LEAST_ROUNDS: u32 = 8;
/// What an A/B has shown.
#[derive(Clone, Debug, Serialize)]
pub struct Judgement {
    /// Rows of the headline in which B is better.
    pub better: Vec<String>,
    /// Rows in which B is worse.
    pub worse: Vec<String>,
    pub paired: Vec<Paired>,
    /// B against A, round by round.
    pub compared: compare::Comparison,
}

/// A row round by round.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Paired {
    pub row: String,
    /// B − A of each round, in the row's unit (µs, %).
    pub differences: Vec<f64>,
    /// Two-sided p-value of the mean difference, over all choices of the differences' signs.
    pub p: f64,
    /// After Holm's correction.
    pub p_holm: f64,
    /// Of A and of B, over the rounds: their difference is the one that is tested.
    #[serde(skip)]
    pub means: [f64; 2],
}

/// Both sides' blocks, in the order of rounds.
pub struct Blocks {
    pub names: [String; 2],
    pub runs: [Vec<RunFile>; 2],
}

/// Measures two sides in turn, whose figures go into the result. `measure` gets the side (0: A, 1: B) and the
/// round.
pub fn interleaved(
    session: &mut Session,
    what: &str,
    names: [String; 2],
    rounds: u32,
    measure: impl FnMut(usize, u32) -> Result<RunFile>,
) -> Result<Blocks> {
    ensure!(
        (LEAST_ROUNDS..=MOST_ROUNDS).contains(&rounds) && rounds.is_multiple_of(2),
        "an A/B takes an even number of rounds, {LEAST_ROUNDS} to {MOST_ROUNDS}"
    );
    let runs = session.rounds(what, &names, rounds, measure)?;
    for (name, blocks) in names.iter().zip(&runs) {
        put(&mut session.result, name, blocks);
    }
    Ok(Blocks { names, runs })
}

impl Blocks {
    /// Holds B against A.
    pub fn judge(&self) -> Result<Judgement> {
        let [a, b] = &self.runs;
        let sides = [0, 1].map(|i| compare::Side {
            name: self.names[i].clone(),
            runs: self.runs[i].clone(),
        });
        let options = CompareOptions {
            paired: true,
            ..CompareOptions::default()
        };
        let compared = compare(&sides, &options)?;
        let rows = HEADLINE.map(|row| {
            let of = |run: &RunFile| {
                let rows = table(slice::from_ref(run), false).rows();
                rows.into_iter().find(|r| r.name == row)?.value
            };
            // A round in which a side had no answer has no median, but its loss counts.
            let pairs = a.iter().zip(b).filter_map(|(a, b)| Some([of(a)?, of(b)?]));
            (row, pairs.collect())
        });
        let shown = |verdict: RowVerdict| {
            let tests = compared.headlines[0].tests.iter();
            let shown = tests.filter(|t| t.verdict == verdict);
            shown.map(|t| t.row.clone()).collect()
        };
        Ok(Judgement {
            better: shown(RowVerdict::Better),
            worse: shown(RowVerdict::Worse),
            paired: paired(rows),
            compared,
        })
    }
}

impl Judgement {
    /// In a line.
    pub fn text(&self) -> String {
        let rows = |rows: &[String]| rows.join(", ");
        let said = match (&self.better[..], &self.worse[..]) {
            ([], []) => return "no difference shown".into(),
            (better, []) => format!("better ({})", rows(better)),
            ([], worse) => format!("worse ({})", rows(worse)),
            (better, worse) => format!("better ({}), worse ({})", rows(better), rows(worse)),
        };
        let shift = |row: &String| {
            let row = self.compared.rows.iter().find(|r| r.name == *row)?;
            let d = row.against_first[0].difference?.interval;
            let (unit, by) = match row.unit {
                Unit::Microseconds => ("ms", 1e-3),
                _ => ("%", 1.0),
            };
            let (low, high) = (d.low * by, d.high * by);
            Some(format!("{} {low:+.3} … {high:+.3} {unit}", row.name))
        };
        let rows = self.better.iter().chain(&self.worse);
        let shifts: Vec<String> = rows.filter_map(shift).collect();
        format!("{said}: {}", shifts.join(", "))
    }

    /// Both sides' answers and headline figures, A → B.
    pub fn figures(&self) -> String {
        let [a, b] = [0, 1].map(|i| self.compared.runs[i].answered);
        let row = |row: &compare::Compared| {
            let of = |i: usize| row.unit.text(row.values[i]);
            format!("{} {} → {}", row.name, of(0), of(1))
        };
        let shown = self.compared.rows.iter();
        let shown = shown.filter(|r| HEADLINE.contains(&r.name.as_str()));
        let rows: Vec<String> = shown.map(row).collect();
        format!("n = {a} → {b}, {}", rows.join(", "))
    }

    /// Whether all that the data allow of this row's difference lies within this share of A's value, by the
    /// 95% interval of the rounds.
    pub fn within(&self, row: &str, share: f64) -> bool {
        let Some(row) = self.compared.rows.iter().find(|r| r.name == row) else {
            return false;
        };
        let (Some(value), Some(difference)) = (row.values[0], row.against_first[0].difference)
        else {
            return false;
        };
        let Interval { low, high, .. } = difference.interval;
        low.abs().max(high.abs()) <= share * value
    }
}

impl Paired {
    /// Whether B is lower than A; `None`: no difference is shown.
    pub fn lower(&self) -> Option<bool> {
        let sum: f64 = self.differences.iter().sum();
        (self.p_holm < LEVEL && sum != 0.0).then_some(sum < 0.0)
    }
}

/// Judges rows (name, A and B of each round) by the question of pairs, with Holm's correction of all of them.
pub fn paired<'a>(rows: impl IntoIterator<Item = (&'a str, Vec<[f64; 2]>)>) -> Vec<Paired> {
    let of_row = |(row, pairs): (&str, Vec<[f64; 2]>)| {
        let differences: Vec<f64> = pairs.iter().map(|[a, b]| b - a).collect();
        let sum = |side: usize| pairs.iter().map(|pair| pair[side]).sum::<f64>();
        Paired {
            row: row.into(),
            p: sign_flips(&differences),
            p_holm: 1.0,
            differences,
            means: [0, 1].map(|side| sum(side) / pairs.len() as f64),
        }
    };
    let mut rows: Vec<Paired> = rows.into_iter().map(of_row).collect();
    let p: Vec<f64> = rows.iter().map(|r| r.p).collect();
    for (row, p_holm) in rows.iter_mut().zip(holm(&p)) {
        row.p_holm = p_holm;
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::CommonArgs;
    use crate::experiments::probing::pool::made_up;
    use rand::{RngExt, SeedableRng};
    use rand_pcg::Pcg64;

    /// 20 ms and up to 4 ms more, by `shift_us` later.
    fn block(seed: u64, shift_us: f64) -> RunFile {
        let mut rng = Pcg64::seed_from_u64(seed);
        let rtts = (0..200).map(|_| Some(20e3 + rng.random_range(0.0..4e3) + shift_us));
        made_up(rtts.collect())
    }

    fn measured(rounds: u32, measure: impl FnMut(usize, u32) -> Result<RunFile>) -> Result<Blocks> {
        let mut session = Session::begin("ab", &CommonArgs::test(true), rounds, 0);
        let names = ["A", "B"].map(str::to_owned);
        interleaved(&mut session, "x", names, rounds, measure)
    }

    /// Eight rounds; `shift` gets side and round.
    fn ab(shift: impl Fn(usize, u32) -> f64) -> Judgement {
        let blocks = measured(8, |side, round| {
            let seed = u64::from(round) * 2 + side as u64;
            Ok(block(seed, shift(side, round)))
        });
        blocks.unwrap().judge().unwrap()
    }

    #[test]
    fn each_side_goes_first_half_of_the_time() {
        let mut log = String::new();
        let blocks = measured(8, |side, _| {
            log.push_str(["a", "b"][side]);
            Ok(block(1, 0.0))
        });
        let blocks = blocks.unwrap();
        assert_eq!(log, "abba".repeat(4));
        assert_eq!(blocks.runs.map(|r| r.len()), [8, 8]);
    }

    #[test]
    fn a_shift_is_found_in_its_direction() {
        let by_side = |us: f64| move |side: usize, _: u32| us * side as f64;
        let worse = ab(by_side(1_000.0));
        assert_eq!(worse.worse, ["Median", "P99"]);
        assert!(worse.better.is_empty());
        let text = worse.text();
        assert!(text.starts_with("worse (Median, P99): Median +"), "{text}");
        let better = ab(by_side(-1_000.0));
        assert_eq!((better.better.len(), better.worse.len()), (2, 0));
        assert_eq!(better.paired[0].differences.len(), 8);
    }

    #[test]
    fn alike_sides_and_a_trend_show_no_difference() {
        let same = ab(|_, _| 0.0);
        assert_eq!(same.text(), "no difference shown");
        // Slower and slower, for both.
        let trend = ab(|_, round| f64::from(round) * 500.0);
        assert_eq!(trend.text(), "no difference shown");
    }

    #[test]
    fn what_one_round_alone_shows_is_no_difference() {
        let judgement = ab(|side, round| match (side, round) {
            (1, 3) => 100e3,
            _ => 0.0,
        });
        let p99 = judgement.compared.rows.iter().find(|r| r.name == "P99");
        assert!(p99.unwrap().values[1] > Some(30e3), "its mean is higher");
        assert_eq!(judgement.text(), "no difference shown");
    }

    #[test]
    fn rows_in_pairs_are_corrected_for_how_many_they_are() {
        let seven = |sign: f64| {
            let mut d = vec![[0.0, sign]; 8];
            d[0][1] = -sign * 0.1;
            d
        };
        let alone = &paired([("x", seven(-1.0))])[0];
        assert_eq!((alone.p, alone.p_holm), (4.0 / 256.0, 4.0 / 256.0));
        assert_eq!(alone.lower(), Some(true));
        let names = ["a", "b", "c", "d"];
        let rows = paired(names.map(|n| (n, seven(1.0))));
        assert!(rows
            .iter()
            .all(|r| r.p_holm == 16.0 / 256.0 && r.lower().is_none()));
        assert_eq!(paired([("none", vec![[0.0; 2]; 8])])[0].lower(), None);
        let up = &paired([("up", vec![[2.0, 3.0]; 8])])[0];
        assert_eq!((up.lower(), up.means), (Some(false), [2.0, 3.0]));
        let none = &paired([("x", vec![])])[0];
        assert!(none.means.iter().all(|mean| mean.is_nan()));
    }

    #[test]
    fn alike_is_said_by_what_the_data_allow() {
        let same = ab(|_, _| 0.0);
        // 20 to 24 ms: what is left open is some hundredth.
        assert!(same.within("Median", 0.05) && !same.within("Median", 1e-6));
        assert!(!same.within("Nonesuch", 1.0));
        let worse = ab(|side, _| side as f64 * 1_000.0);
        assert!(!worse.within("Median", 0.01), "5% more");
        let text = worse.figures();
        assert!(text.starts_with("n = 1600 → 1600, Median 2"), "{text}");
        assert!(
            text.contains("P99 2") && text.ends_with("Loss 0.00 % → 0.00 %"),
            "{text}"
        );
    }

    #[test]
    fn too_few_rounds_are_refused() {
        for rounds in [0, 6, 9, 22] {
            let refused = measured(rounds, |_, _| Ok(block(1, 0.0)));
            assert!(refused.is_err(), "{rounds}");
        }
    }
}
