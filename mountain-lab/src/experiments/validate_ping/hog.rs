// SPDX-License-Identifier: GPL-2.0-or-later
//! Whether kernel timestamps keep the program's own scheduling out of the figures: `mountain ping`
//! alone on its processor, and with a busy loop beside it, in turn.

use std::process::Stdio;

use anyhow::{Context, Result};
use mountain::measure::runfile::RunFile;
use mountain_lab::result::{Check, Metric};
use nix::sched::sched_getaffinity;
use nix::unistd::Pid;
use serde_json::json;

use crate::driver::{CommonArgs, Session};
use crate::emulate::netns::{die_with_parent, Running};
use crate::experiments::probing::lane::{Delay, Lane, USUAL};
use crate::experiments::probing::pool::{delays, put, table};
use crate::experiments::probing::tool::{pin, Block, Tool};

/// Of what user space's p99 rises by, so much at most may show in the kernel's.
const SHARE: f64 = 0.1;
/// A smaller rise of user space's p99 is no disturbance to be kept out, µs.
const LEAST_RISE_US: f64 = 100.0;

/// Repeats and steps.
pub fn extent(args: &CommonArgs) -> (u32, u64) {
    let rounds = args.quick_or(4, 12);
    (rounds, u64::from(rounds) * 2)
}

const NAMES: [&str; 2] = ["pinned alone", "pinned beside a hog"];

pub fn run(session: &mut Session) -> Result<()> {
    let args = &session.args;
    let ((rounds, _), seed) = (extent(args), args.seed);
    let cpu = last_cpu()?;
    let block = Block {
        cpu: Some(cpu),
        ..Block::of(args.quick_or(200, 500))
    };
    // Without noise: the path's own spread would hide what the hog adds.
    let delay = Delay {
        noise_ms: 0.0,
        ..USUAL
    };
    let lane = Lane::build(&[delay], block.seconds(), seed)?;
    let blocks = session.rounds("a ping", &NAMES, rounds, |side, _| {
        let _hog = (side == 1).then(|| hog(cpu)).transpose()?;
        Tool::MountainIcmp.measure(&lane.hosts.client, lane.hosts.gateway(0), &block)
    })?;
    let result = &mut session.result;
    for (name, blocks) in NAMES.iter().zip(&blocks) {
        put(result, name, blocks);
    }
    // Of each round, as it is only in pairs that the machine was the same.
    let by_round = |user: bool| {
        let pairs = blocks[0].chunks(1).zip(blocks[1].chunks(1));
        let values = pairs.map(|(alone, beside)| rise(alone, beside, user));
        let n = blocks.iter().flatten().map(|b| b.samples.len() as u64);
        Metric::of_repeats("us", values.collect(), n.sum(), seed)
    };
    let (kernel_rounds, user_rounds) = (by_round(false), by_round(true));
    let [alone, beside] = &blocks;
    // Where the driver gave no stamps, both columns are user space's.
    let stamped = blocks.iter().flatten().all(|b| b.clock == "kernel");
    let kernel = rise(alone, beside, false).filter(|_| stamped);
    let user = rise(alone, beside, true);
    result.checks.push(check(kernel, user, user_rounds.lo));
    result.put(NAMES[1], "rise_p99_us", kernel_rounds);
    result.put(NAMES[1], "rise_user_p99_us", user_rounds);
    result.note("hog", json!({ "cpu": cpu }));
    Ok(())
}

/// By how much the 99th percentile is higher beside the hog, µs.
fn rise(alone: &[RunFile], beside: &[RunFile], user: bool) -> Option<f64> {
    let p99 = |blocks: &[RunFile]| delays(&table(blocks, user), |d| d.p99);
    Some(p99(beside)? - p99(alone)?)
}

/// Rises of the 99th percentiles over all rounds, and the lower end of the interval of user space's
/// by round, µs.
fn check(kernel: Option<f64>, user: Option<f64>, user_low: f64) -> Check {
    let disturbed = user.filter(|rise| *rise >= LEAST_RISE_US && user_low > 0.0);
    let why = match (user, disturbed) {
        (Some(_), None) => " (the hog is not shown to disturb user space)",
        _ => "",
    };
    let what = format!("rise of the p99 by a CPU hog, kernel timestamps / user space{why}");
    let share = kernel.zip(disturbed).map(|(kernel, user)| kernel / user);
    Check::at_most(&what, share, SHARE)
}

/// The last processor that this process may run on: interrupts tend to prefer the first.
fn last_cpu() -> Result<usize> {
    let set = sched_getaffinity(Pid::from_raw(0))?;
    let cpus = 0..nix::sched::CpuSet::count();
    cpus.rev()
        .find(|cpu| set.is_set(*cpu) == Ok(true))
        .context("this process may run on no processor")
}

/// A process that takes all of one processor that it can get.
fn hog(cpu: usize) -> Result<Running> {
    let mut command = std::process::Command::new("sh");
    command.args(["-c", "while :; do :; done"]);
    command.stdin(Stdio::null());
    die_with_parent(&mut command);
    pin(&mut command, cpu)?;
    Ok(Running(command.spawn().context("cannot start sh")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rise_in_the_kernels_figure_is_a_miss() {
        let met = |kernel| check(Some(kernel), Some(4_000.0), 1_000.0).met;
        assert_eq!(met(399.0), Some(true));
        assert_eq!(met(-20.0), Some(true));
        assert_eq!(met(401.0), Some(false));
    }

    #[test]
    fn a_hog_without_effect_shows_nothing() {
        let small = check(Some(0.0), Some(50.0), 40.0);
        assert_eq!(small.met, None);
        assert!(small.name.contains("not shown to disturb"), "{small:?}");
        let by_chance = check(Some(0.0), Some(4_000.0), -100.0);
        assert_eq!(by_chance.met, None, "not in every round");
        assert_eq!(check(None, Some(4_000.0), 1_000.0).met, None);
        assert_eq!(check(Some(1.0), None, f64::NAN).met, None);
    }

    #[test]
    fn the_hog_is_on_its_processor_and_ends() {
        let cpu = last_cpu().unwrap();
        let hog = hog(cpu).unwrap();
        let status = format!("/proc/{}/status", hog.0.id());
        let text = std::fs::read_to_string(&status).unwrap();
        let allowed = text
            .lines()
            .find_map(|l| l.strip_prefix("Cpus_allowed_list:"));
        assert_eq!(allowed.unwrap().trim(), cpu.to_string());
        drop(hog);
        assert!(!std::path::Path::new(&status).exists());
    }
}
