// SPDX-License-Identifier: GPL-2.0-or-later
//! Claim 4: delta-BBR as published against the kernel's BBR, on a link whose rate drops.
//!
//! Segments in pairs, in the order A B, B A; the rows are figures of a segment and not of single
//! probes, so the question of pairs alone is asked of them (see [`crate::experiments::probing::ab`]), with Holm's
//! correction of the two.

use anyhow::{Context, Result};
use mountain_lab::workload::metrics::{Figure, Figures};
use mountain_lab::workload::stats::percentile;

use super::registry::ClaimVerdict;
use super::Bench;
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

/// Both sides of a round: delay in µs, goodput as a share of the link's rate.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Pair {
    delay_us: [f64; 2],
    goodput: [f64; 2],
}

pub fn test(bench: &mut Bench) -> Result<ClaimVerdict> {
    let cell = Cell::find(CELL).context("its cell is gone")?;
    let rounds = bench.plan();
    // As many again may be void.
    let attempts = rounds * 2;
    let rig = CcRig::build()?;
    let mut sides = vec![];
    for cc in SIDES {
        sides.push(Available::new(cc).with_context(|| cc.name())?);
    }
    let (mut pairs, mut void) = (vec![], None);
    for round in 0..attempts {
        if pairs.len() as u32 == rounds {
            break;
        }
        let mut pair = [None, None];
        for place in 0..2 {
            // By the rounds that count: a void one is made up for in the same order.
            let side = (place + pairs.len()) % 2;
            bench.step(&format!("claim 4: {}, round {round}", SIDES[side].name()))?;
            let seed = bench.seed.wrapping_mul(1_000).wrapping_add(round.into());
            let segment = rig.run(&cell, &mut sides[side], seed, bench.quick)?;
            match void_reason(&segment) {
                Some(reason) => void = Some(reason),
                None => pair[side] = Some(of_segment(&cell, &segment)?),
            }
        }
        if let [Some(a), Some(b)] = pair {
            let number = pairs.len() as u32;
            for (cc, figures) in SIDES.iter().zip([&a, &b]) {
                bench.measured(cc.name(), number, figures.clone());
            }
            let value = |name: &str| [&a, &b].map(|f| f[&key(name)].value);
            pairs.push(Pair {
                delay_us: value(DELAY),
                goodput: value(GOODPUT),
            });
        }
    }
    Ok(match void {
        Some(reason) if (pairs.len() as u32) < rounds => ClaimVerdict::NotShown(format!(
            "only {} of {rounds} rounds can be used ({reason})",
            pairs.len()
        )),
        _ => judge(&pairs),
    })
}

fn key(name: &str) -> String {
    format!("{CELL}/{name}")
}

/// The figures of the cell, and the delay over the whole of it.
fn of_segment(cell: &Cell, segment: &CcSegment) -> Result<Figures> {
    let mut queue = segment.link.queue_us(WARM_UP_US, segment.length_us);
    let value = percentile(&mut queue, 0.95).context("the link saw no packet")?;
    let mut all = figures(cell, segment);
    let delay = Figure {
        unit: "us",
        value,
        n: queue.len() as u64,
    };
    all.insert(key(DELAY), delay);
    Ok(all)
}

/// The claim is about the delay alone. What it costs in goodput is said with it. Tested are the means
/// of the differences, so what is said are means, too: their difference is the same.
fn judge(pairs: &[Pair]) -> ClaimVerdict {
    let differences = |of: fn(&Pair) -> [f64; 2]| -> Vec<f64> {
        pairs.iter().map(|p| of(p)[1] - of(p)[0]).collect()
    };
    let rows = paired([
        ("queueing-delay p95", differences(|p| p.delay_us)),
        ("goodput", differences(|p| p.goodput)),
    ]);
    let means = |of: fn(&Pair) -> [f64; 2]| [0, 1].map(|side| mean(pairs, |p| of(p)[side]));
    let ([delay_a, delay_b], [goodput_a, goodput_b]) =
        (means(|p| p.delay_us), means(|p| p.goodput));
    let cost = match rows[1].lower() {
        Some(true) => "less",
        Some(false) => "more",
        None => "no difference shown",
    };
    let detail = format!(
        "{CELL}, {} rounds, means, kernel's BBR → published: queueing-delay p95 {:.1} → {:.1} ms; \
         goodput {:.1} → {:.1} % of the link ({cost})",
        pairs.len(),
        delay_a / 1e3,
        delay_b / 1e3,
        goodput_a * 100.0,
        goodput_b * 100.0
    );
    match rows[0].lower() {
        Some(true) => ClaimVerdict::Shown(detail),
        Some(false) => ClaimVerdict::Refuted(detail),
        None => ClaimVerdict::NoDifference(detail),
    }
}

fn mean(pairs: &[Pair], of: impl Fn(&Pair) -> f64) -> f64 {
    pairs.iter().map(of).sum::<f64>() / pairs.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Eight rounds whose noise both sides share in part.
    fn pairs(delay_us: [f64; 2], goodput: [f64; 2]) -> Vec<Pair> {
        let noise = |i: u32, side: usize| f64::from((i * 7 + side as u32 * 3) % 5) - 2.0;
        let pair = |i: u32| Pair {
            delay_us: [0, 1].map(|s| delay_us[s] + noise(i, s) * 1e3),
            goodput: [0, 1].map(|s| goodput[s] + noise(i, s) * 1e-3),
        };
        (0..8).map(pair).collect()
    }

    #[test]
    fn the_delay_decides_and_the_cost_is_said() {
        let lower = judge(&pairs([90e3, 60e3], [0.9, 0.8])).to_string();
        assert!(lower.starts_with("shown: step-50-10, 8 rounds"), "{lower}");
        assert!(lower.contains("% of the link (less)"), "{lower}");
        let higher = judge(&pairs([60e3, 90e3], [0.8, 0.9])).to_string();
        assert!(
            higher.starts_with("refuted") && higher.contains("(more)"),
            "{higher}"
        );
        let same = judge(&pairs([60e3, 60e3], [0.9, 0.9])).to_string();
        assert!(same.starts_with("no difference shown"), "{same}");
        assert!(same.contains("(no difference shown)"), "{same}");
        // A better goodput is not what was claimed.
        let goodput = judge(&pairs([60e3, 60e3], [0.8, 0.9])).to_string();
        assert!(goodput.starts_with("no difference shown"), "{goodput}");
    }

    #[test]
    fn what_one_round_shows_is_nothing() {
        let mut pairs = pairs([60e3, 60e3], [0.9, 0.9]);
        pairs[3].delay_us[1] = 1.0;
        assert!(matches!(judge(&pairs), ClaimVerdict::NoDifference(_)));
        assert!(
            matches!(judge(&pairs[..1]), ClaimVerdict::NoDifference(_)),
            "too few"
        );
    }

    #[test]
    fn what_is_said_goes_with_what_is_tested() {
        // Seven rounds of a little less and one of far more: in the medians less, in what is tested
        // more.
        let mut pairs = pairs([60e3, 60e3], [0.9, 0.9]);
        for pair in &mut pairs {
            pair.delay_us = [60e3, 59e3];
        }
        pairs[3].delay_us[1] = 91e3;
        let said = judge(&pairs).to_string();
        assert!(said.contains("means, kernel's BBR"), "{said}");
        assert!(said.contains("p95 60.0 → 63.0 ms"), "{said}");
        assert!(mean(&[], |p| p.delay_us[0]).is_nan());
    }
}
