// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain-lab claims`: re-tests what was published about this design. Method: docs/claims.md.

mod controls;
mod delta_bbr;
mod metrics;
mod napi;
mod redirection;
mod registry;
mod switches;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{bail, Context, Result};
use mountain_lab::result::{Check, LimitKind, Metrics};
use mountain_lab::workload::metrics::Figures;
use serde::Serialize;
use serde_json::json;
use tempfile::TempDir;

use crate::driver::{CommonArgs, Session};
use crate::experiments::probing::ab::{Blocks, LEAST_ROUNDS};
use crate::experiments::probing::pool::metrics as of_blocks;
use crate::experiments::probing::tool::Block;
use crate::stopped;
use controls::Control;
use registry::{ClaimVerdict, CLAIMS};

/// Of a claim's test; with `--quick` [`LEAST_ROUNDS`].
const ROUNDS: u32 = 12;

#[derive(clap::Args)]
pub struct ClaimsArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Test only these claims, by number; the controls run in any case.
    #[arg(long, value_delimiter = ',', value_name = "N", value_parser = clap::value_parser!(u8).range(1..=5))]
    only: Vec<u8>,
}

/// What tests of claims share.
pub struct Bench {
    pub quick: bool,
    pub seed: u64,
    /// The most rounds that anything here takes.
    pub rounds: u32,
    /// For files under way.
    pub scratch: TempDir,
    session: Session,
    /// Figures of the claims' tests: side, round, figures.
    measured: Vec<(String, u32, Figures)>,
    /// Those of a side's blocks of pings.
    pings: Vec<(String, Metrics)>,
}

impl Bench {
    fn new(quick: bool, seed: u64, session: Session) -> Result<Self> {
        Ok(Bench {
            quick,
            seed,
            rounds: LEAST_ROUNDS,
            scratch: tempfile::tempdir().context("no folder for files under way")?,
            session,
            measured: vec![],
            pings: vec![],
        })
    }

    /// Rounds of a claim's test; that many on each side are to come.
    pub fn plan(&mut self) -> u32 {
        let rounds = if self.quick { LEAST_ROUNDS } else { ROUNDS };
        self.more(u64::from(rounds) * 2);
        self.rounds = self.rounds.max(rounds);
        rounds
    }

    /// Pings of one side in a round. Of P99 nothing is said below 1,000 answers a side.
    pub fn block(&self) -> Block {
        match self.quick {
            true => Block {
                count: 140,
                interval: Duration::from_millis(2),
                ..Block::default()
            },
            false => Block {
                count: 250,
                ..Block::default()
            },
        }
    }

    /// Keeps the figures of both sides' pings for the result.
    pub fn blocks(&mut self, blocks: &Blocks) {
        for (name, runs) in blocks.names.iter().zip(&blocks.runs) {
            let runs: Vec<_> = runs.iter().cloned().map(Some).collect();
            self.pings.push((name.clone(), of_blocks(&runs, self.seed)));
        }
    }

    /// So many steps are to come.
    pub fn more(&self, steps: u64) {
        self.session.more(steps);
    }

    /// Keeps the figures of a side in a round for the result.
    pub fn measured(&mut self, side: &str, round: u32, figures: Figures) {
        self.measured.push((side.to_owned(), round, figures));
    }

    /// Says what comes next; fails when the user wants an end.
    pub fn step(&self, what: &str) -> Result<()> {
        self.session.step(what)
    }
}

/// A claim as it is reported.
#[derive(Serialize)]
struct Answer {
    number: u8,
    claim: &'static str,
    #[serde(flatten)]
    verdict: ClaimVerdict,
}

/// `mountain-lab claims`. Exit code 1: the controls failed, so nothing can be said. Not with `--quick`,
/// which is too short to judge them.
pub fn claims(args: &ClaimsArgs) -> Result<ExitCode> {
    let common = &args.common;
    let (session, mut result) = Session::begin("claims", common, LEAST_ROUNDS, controls::steps());
    let mut bench = Bench::new(common.quick, common.seed, session)?;
    let controls = controls::run(&mut bench).context("controls")?;
    let answers = answers(&mut bench, &args.only, controls.iter().all(|c| c.holds));
    if stopped() {
        bail!("stopped");
    }
    result.repeats = bench.rounds;
    for (side, round, figures) in &bench.measured {
        result.add(side, *round, figures);
    }
    result.policies.extend(std::mem::take(&mut bench.pings));
    for control in &controls {
        let name = format!("control: {}", control.name);
        let figure = f64::from(u8::from(control.holds));
        let check = Check::new(&name, Some(figure), LimitKind::AtLeast, 1.0, None);
        result.checks.push(check);
    }
    bench.session.judge(&mut result, &[]);
    let (controls_json, claims_json) = (json!(controls), json!(answers));
    let environment = &mut result.environment;
    environment.insert("controls".into(), controls_json.clone());
    environment.insert("claims".into(), claims_json.clone());
    let path = result.write(&common.out("claims"))?;
    if args.json {
        let all = json!({ "controls": controls_json, "claims": claims_json });
        println!("{all:#}");
    } else {
        print!("{}", text(&controls, &answers));
        println!("{}", path.display());
    }
    Ok(match result.check() {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    })
}

/// `only`: these; empty: all.
fn answers(bench: &mut Bench, only: &[u8], controls_hold: bool) -> Vec<Answer> {
    let answer = |claim: &registry::Claim| Answer {
        number: claim.number,
        claim: claim.text,
        verdict: match controls_hold {
            true => claim.run(bench).of(bench.quick),
            false => ClaimVerdict::NotShown("the controls failed".into()),
        },
    };
    let wanted = |c: &&registry::Claim| only.is_empty() || only.contains(&c.number);
    CLAIMS.iter().filter(wanted).map(answer).collect()
}

fn text(controls: &[Control], answers: &[Answer]) -> String {
    let mut out = String::new();
    for c in controls {
        let held = if c.holds { "yes" } else { "NO" };
        out += &format!("control: {}: {held} ({})\n", c.name, c.said);
    }
    for a in answers {
        out += &format!("\n({}) {}\n    {}\n", a.number, a.claim, a.verdict);
    }
    out
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn bench() -> Bench {
        let args = CommonArgs {
            quick: true,
            seed: 1,
            out: None,
        };
        let (session, _) = Session::begin("claims", &args, 1, 0);
        Bench::new(true, 1, session).unwrap()
    }

    #[test]
    fn failing_controls_leave_nothing_shown() {
        let mut bench = bench();
        let answers = answers(&mut bench, &[], false);
        assert_eq!(answers.len(), 5);
        for answer in &answers {
            let said = answer.verdict.to_string();
            assert_eq!(said, "not shown: the controls failed");
        }
        let text = text(&[], &answers);
        assert!(text.contains("(3) XDP redirection"), "{text}");
        let json = json!(answers);
        assert_eq!(json[4]["verdict"], "not shown");
        assert_eq!(json[4]["detail"], "the controls failed");
        assert_eq!(json[4]["number"], 5);
        let some = super::answers(&mut bench, &[4, 2], false);
        let numbers: Vec<u8> = some.iter().map(|a| a.number).collect();
        assert_eq!(numbers, [2, 4]);
    }
}
