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

use anyhow::{ensure, Context, Result};
use mountain_lab::result::VoidRun;
use mountain_lab::workload::metrics::Figures;
use serde::Serialize;
use serde_json::json;

use crate::driver::{CommonArgs, Session};
use crate::experiments::probing::ab::LEAST_ROUNDS;
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

/// Rounds of a claim's test; that many on each side are to come.
pub fn plan(session: &mut Session) -> u32 {
    let rounds = session.args.quick_or(LEAST_ROUNDS, ROUNDS);
    session.more(u64::from(rounds) * 2);
    let result = &mut session.result;
    result.repeats = result.repeats.max(rounds);
    rounds
}

/// Pings of one side in a round. Below 1,000 answers a side there is no P99.
pub fn block(args: &CommonArgs) -> Block {
    let usual = Block::of(args.quick_or(140, 250));
    Block {
        interval: args.quick_or(Duration::from_millis(2), usual.interval),
        ..usual
    }
}

/// Segments of two sides in so many rounds that count, in the order A B, B A; their figures. `measure`
/// gets side and attempt, and says why a segment is void. A round with a void segment is made up
/// for; as many again may be void.
pub fn pairs(
    session: &mut Session,
    claim: u8,
    names: [String; 2],
    mut measure: impl FnMut(usize, u32) -> Result<Result<Figures, String>>,
) -> Result<Vec<[Figures; 2]>> {
    let rounds = plan(session);
    let (mut pairs, mut void) = (vec![], String::new());
    for attempt in 0..rounds * 2 {
        let number = pairs.len() as u32;
        if number == rounds {
            break;
        }
        // By the rounds that count: a void one is made up for in the same order.
        let of_side = |side| measure(side, attempt);
        let what = format!("claim {claim}");
        let seen = session.round(&what, &names, number, of_side)?;
        let mut seen = seen.into_iter();
        match (seen.next(), seen.next()) {
            (Some(Ok(a)), Some(Ok(b))) => {
                session.result.add(&names[0], number, &a);
                session.result.add(&names[1], number, &b);
                pairs.push([a, b]);
            }
            both => {
                for (name, side) in names.iter().zip(<[_; 2]>::from(both)) {
                    let Some(Err(reason)) = side else { continue };
                    void.clone_from(&reason);
                    session.result.void.push(VoidRun {
                        policy: name.clone(),
                        repeat: number,
                        reason,
                    });
                }
            }
        }
    }
    let n = pairs.len();
    if (n as u32) < rounds {
        let why = format!("only {n} of {rounds} rounds can be used ({void})");
        return Err(ClaimVerdict::NotShown(why).into());
    }
    Ok(pairs)
}

/// A figure of both sides in each of the rounds.
fn values(pairs: &[[Figures; 2]], name: &str) -> Vec<[f64; 2]> {
    let of = |pair: &[Figures; 2]| pair.each_ref().map(|side| side[name].value);
    pairs.iter().map(of).collect()
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
    // Its result's repeats are the most rounds that anything here takes.
    let mut session = Session::begin("claims", common, LEAST_ROUNDS, controls::steps());
    let controls = controls::run(&mut session).context("controls")?;
    let answers = answers(&mut session, &args.only, controls.iter().all(|c| c.holds));
    ensure!(!stopped(), "stopped");
    for control in &controls {
        let name = format!("control: {}", control.name);
        let figure = f64::from(u8::from(control.holds));
        session.result.at_least(&name, Some(figure), 1.0);
    }
    let mut result = session.judge(&[]);
    let all = json!({ "controls": controls, "claims": answers });
    for part in ["controls", "claims"] {
        result.note(part, &all[part]);
    }
    let path = result.write(&common.out("claims"))?;
    if args.json {
        println!("{all:#}");
    } else {
        print!("{}", text(&controls, &answers));
        println!("{}", path.display());
    }
    Ok(match result.missed().is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// `only`: these; empty: all.
fn answers(session: &mut Session, only: &[u8], controls_hold: bool) -> Vec<Answer> {
    let answer = |claim: &registry::Claim| Answer {
        number: claim.number,
        claim: claim.text,
        verdict: match controls_hold {
            true => claim.run(session).of(session.args.quick),
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

    pub fn session() -> Session {
        Session::begin("claims", &CommonArgs::test(true), LEAST_ROUNDS, 0)
    }

    /// Both sides of eight rounds, whose noise they share in part.
    pub fn pairs(middle: [f64; 2], noise: f64) -> Vec<[f64; 2]> {
        let drawn = |i: u32, side: usize| f64::from((i * 7 + side as u32 * 3) % 5) - 2.0;
        let pair = |i: u32| [0, 1].map(|s| middle[s] + drawn(i, s) * noise);
        (0..8).map(pair).collect()
    }

    #[test]
    fn a_void_round_is_made_up_for_and_stands_in_the_result() {
        let mut session = session();
        let names = ["a", "b"].map(str::to_owned);
        let pairs = super::pairs(&mut session, 4, names, |side, attempt| {
            Ok(match (side, attempt) {
                (1, 2) => Err("late".to_owned()),
                _ => Ok(Figures::new()),
            })
        });
        assert_eq!(pairs.unwrap().len(), LEAST_ROUNDS as usize);
        let expected = VoidRun {
            policy: "b".into(),
            repeat: 2,
            reason: "late".into(),
        };
        assert_eq!(session.result.void, [expected]);
    }

    #[test]
    fn failing_controls_leave_nothing_shown() {
        let mut session = session();
        let answers = answers(&mut session, &[], false);
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
        let some = super::answers(&mut session, &[4, 2], false);
        let numbers: Vec<u8> = some.iter().map(|a| a.number).collect();
        assert_eq!(numbers, [2, 4]);
    }
}
