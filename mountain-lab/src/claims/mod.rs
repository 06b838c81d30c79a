//! `mountain-lab claims`: re-tests what was published about this design. Method: docs/claims.md.

mod controls;
mod registry;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{bail, Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use mountain_lab::result::{Check, Op, RunResult};
use mountain_lab::workload::sys::NoHalt;
use serde::Serialize;
use serde_json::json;
use tempfile::TempDir;

use crate::probing::ab::LEAST_ROUNDS;
use crate::stopped;
use controls::Control;
use registry::{Verdict, CLAIMS};

#[derive(clap::Args)]
pub struct ClaimsArgs {
    /// Shorter: to see whether it works, not to claim anything.
    #[arg(long)]
    quick: bool,
    /// Where result.json goes.
    #[arg(long, default_value = "out")]
    out: PathBuf,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Decides every random choice.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// What tests of claims share.
pub struct Bench {
    pub quick: bool,
    pub seed: u64,
    /// For files under way.
    pub scratch: TempDir,
    bar: ProgressBar,
}

impl Bench {
    fn new(quick: bool, seed: u64, steps: u64) -> Result<Self> {
        let bar = ProgressBar::new(steps);
        let style =
            ProgressStyle::with_template("claims [{bar:40}] {percent}% {msg} (left: {eta})")
                .expect("a literal template");
        bar.set_style(style.progress_chars("=> "));
        Ok(Bench {
            quick,
            seed,
            scratch: tempfile::tempdir().context("no folder for files under way")?,
            bar,
        })
    }

    /// Says what comes next; fails when the user wants an end.
    pub fn step(&self, what: &str) -> Result<()> {
        if stopped() {
            bail!("stopped");
        }
        self.bar.inc(1);
        self.bar.set_message(what.to_owned());
        Ok(())
    }
}

/// A claim as it is reported.
#[derive(Serialize)]
struct Answer {
    number: u8,
    claim: &'static str,
    #[serde(flatten)]
    verdict: Verdict,
}

/// `mountain-lab claims`. Exit code 1: the controls failed, so nothing can be said.
pub fn claims(args: &ClaimsArgs) -> Result<ExitCode> {
    let _awake = NoHalt::hold();
    let quick = if args.quick { " --quick" } else { "" };
    let command = format!("mountain-lab claims{quick} --seed {}", args.seed);
    let mut result = RunResult::new("claims", &command, args.seed, LEAST_ROUNDS);
    let mut bench = Bench::new(args.quick, args.seed, controls::steps())?;
    let controls = controls::run(&mut bench, &mut result).context("controls")?;
    let answers = answers(&mut bench, controls.iter().all(|c| c.holds));
    bench.bar.finish_and_clear();
    for control in &controls {
        let name = format!("control: {}", control.name);
        let figure = f64::from(u8::from(control.holds));
        let check = Check::new(&name, Some(figure), Op::AtLeast, 1.0, None);
        result.checks.push(check);
    }
    let (controls_json, claims_json) = (json!(controls), json!(answers));
    let environment = &mut result.environment;
    environment.insert("quick".into(), json!(args.quick));
    environment.insert("controls".into(), controls_json.clone());
    environment.insert("claims".into(), claims_json.clone());
    let path = result.write(&args.out)?;
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

fn answers(bench: &mut Bench, controls_hold: bool) -> Vec<Answer> {
    let answer = |claim: &registry::Claim| Answer {
        number: claim.number,
        claim: claim.text,
        verdict: match controls_hold {
            true => claim.run(bench),
            false => Verdict::NotShown("the controls failed".into()),
        },
    };
    CLAIMS.iter().map(answer).collect()
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
mod tests {
    use super::*;

    #[test]
    fn failing_controls_leave_nothing_shown() {
        let mut bench = Bench::new(true, 1, 0).unwrap();
        let answers = answers(&mut bench, false);
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
    }
}
