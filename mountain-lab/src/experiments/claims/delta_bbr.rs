// SPDX-License-Identifier: GPL-2.0-or-later
//! Claim 4: delta-BBR as published against the kernel's BBR, on a link whose rate drops.
//!
//! Segments in pairs, in the order A B, B A; the rows are figures of a segment and not of single
//! probes, so the question of pairs alone is asked of them (see [`crate::experiments::probing::ab`]), with Holm's
//! correction of the two.

use anyhow::{Context, Result};
use mountain_lab::workload::metrics::{put, Figures};
use mountain_lab::workload::stats::percentile;

use super::registry::ClaimVerdict;
use super::{pairs, values};
use crate::driver::Session;
use crate::experiments::cc::{
    figures, void_reason, Available, Cc, CcRig, CcSegment, Cell, WARM_UP_US,
};
use crate::experiments::probing::ab::paired;

/// 50 Mbit/s, then 10: where a queue builds up if the sender is late to notice.
const CELL: &str = "step-50-10";
const SIDES: [Cc; 2] = [Cc::Bbr, Cc::Published];
/// Time in the queue over the segment from the warm-up on, the drop in it, 95th percentile.
const DELAY: &str = "queue_p95_us";
const GOODPUT: &str = "goodput";

pub fn test(session: &mut Session) -> Result<ClaimVerdict> {
    let cell = Cell::find(CELL).context("its cell is gone")?;
    let rig = CcRig::build()?;
    let mut sides = vec![];
    for cc in SIDES {
        sides.push(Available::new(cc).with_context(|| cc.name())?);
    }
    let (seed, quick) = (session.args.seed, session.args.quick);
    let pairs = pairs(session, 4, SIDES.map(Cc::name), |side, attempt| {
        let seed = seed.wrapping_mul(1_000).wrapping_add(attempt.into());
        let segment = rig.run(&cell, &mut sides[side], seed, quick)?;
        Ok(match void_reason(&segment) {
            Some(reason) => Err(reason),
            None => Ok(of_segment(&cell, &segment)?),
        })
    })?;
    let delay = values(&pairs, &key(DELAY));
    Ok(judge(delay, values(&pairs, &key(GOODPUT))))
}

fn key(name: &str) -> String {
    format!("{CELL}/{name}")
}

/// The figures of the cell, and the delay over the whole of it.
fn of_segment(cell: &Cell, segment: &CcSegment) -> Result<Figures> {
    let mut queue = segment.link.queue_us(WARM_UP_US, segment.length_us);
    let value = percentile(&mut queue, 0.95).context("the link saw no packet")?;
    let mut all = figures(cell, segment);
    put(&mut all, &key(DELAY), "us", value, queue.len() as u64);
    Ok(all)
}

/// By both sides of each round: delay in µs, goodput as a share of the link's rate. The claim is about the
/// delay alone. What it costs in goodput is said with it. Tested are the means of the differences, so
/// what is said are means, too: their difference is the same.
fn judge(delay_us: Vec<[f64; 2]>, goodput: Vec<[f64; 2]>) -> ClaimVerdict {
    let rounds = delay_us.len();
    let rows = paired([("queueing-delay p95", delay_us), ("goodput", goodput)]);
    let [delay, goodput] = [0, 1].map(|row: usize| rows[row].means);
    let cost = match rows[1].lower() {
        Some(true) => "less",
        Some(false) => "more",
        None => "no difference shown",
    };
    let detail = format!(
        "{CELL}, {rounds} rounds, means, kernel's BBR → published: queueing-delay p95 {:.1} → {:.1} ms; \
         goodput {:.1} → {:.1} % of the link ({cost})",
        delay[0] / 1e3,
        delay[1] / 1e3,
        goodput[0] * 100.0,
        goodput[1] * 100.0
    );
    ClaimVerdict::by(rows[0].lower(), detail)
}

#[cfg(test)]
mod tests {
    use super::super::tests::pairs;
    use super::*;

    fn judged(delay_us: [f64; 2], goodput: [f64; 2]) -> ClaimVerdict {
        judge(pairs(delay_us, 1e3), pairs(goodput, 1e-3))
    }

    #[test]
    fn the_delay_decides_and_the_cost_is_said() {
        let lower = judged([90e3, 60e3], [0.9, 0.8]).to_string();
        assert!(lower.starts_with("shown: step-50-10, 8 rounds"), "{lower}");
        assert!(lower.contains("% of the link (less)"), "{lower}");
        let higher = judged([60e3, 90e3], [0.8, 0.9]).to_string();
        assert!(
            higher.starts_with("refuted") && higher.contains("(more)"),
            "{higher}"
        );
        let same = judged([60e3, 60e3], [0.9, 0.9]).to_string();
        assert!(same.starts_with("no difference shown"), "{same}");
        assert!(same.contains("(no difference shown)"), "{same}");
        // A better goodput is not what was claimed.
        let goodput = judged([60e3, 60e3], [0.8, 0.9]).to_string();
        assert!(goodput.starts_with("no difference shown"), "{goodput}");
    }

    #[test]
    fn what_one_round_shows_is_nothing() {
        let goodput = pairs([0.9, 0.9], 1e-3);
        let mut delay = pairs([60e3, 60e3], 1e3);
        delay[3][1] = 1.0;
        let verdict = judge(delay.clone(), goodput.clone());
        assert!(matches!(verdict, ClaimVerdict::NoDifference(_)));
        let few = judge(delay[..1].to_vec(), goodput[..1].to_vec());
        assert!(matches!(few, ClaimVerdict::NoDifference(_)), "too few");
    }

    #[test]
    fn what_is_said_goes_with_what_is_tested() {
        // Seven rounds of a little less and one of far more: in the medians less, in what is tested
        // more.
        let mut delay = vec![[60e3, 59e3]; 8];
        delay[3][1] = 91e3;
        let said = judge(delay, pairs([0.9, 0.9], 1e-3)).to_string();
        assert!(said.contains("means, kernel's BBR"), "{said}");
        assert!(said.contains("p95 60.0 → 63.0 ms"), "{said}");
    }
}
