// SPDX-License-Identifier: GPL-2.0-or-later
//! Whether the A/B finds what is there, and only that: the same tool, frame and verdict as for the
//! claims, on paths whose difference is known.

use std::cell::Cell;

use anyhow::Result;
use serde::Serialize;

use super::Bench;
use crate::experiments::probing::ab::{interleaved, AbSide, BlockTurn, Judgement, LEAST_ROUNDS};
use crate::experiments::probing::lane::{Delay, Lane};
use crate::experiments::probing::tool::Tool;

/// The paths, one way, so that round trips take 20 ms ± 2 ms and 22 ms ± 2 ms.
const PATHS: [Delay; 2] = [
    Delay {
        ms: 10.0,
        noise_ms: 1.0,
    },
    Delay {
        ms: 11.0,
        noise_ms: 1.0,
    },
];

/// A known difference, and what the A/B said of it.
#[derive(Serialize)]
pub struct Control {
    pub name: &'static str,
    /// Whether it said so.
    pub holds: bool,
    pub said: String,
    pub judgement: Judgement,
}

/// What has to be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    Worse,
    NoDifference,
}

struct Spec {
    name: &'static str,
    /// Names of the sides in the result, and the path of each.
    sides: [(&'static str, usize); 2],
    expected: Expected,
}

const SPECS: [Spec; 2] = [
    Spec {
        name: "a path with +2 ms is found worse",
        sides: [("path", 0), ("path +2 ms", 1)],
        expected: Expected::Worse,
    },
    Spec {
        name: "the same path twice shows no difference",
        sides: [("path again, A", 0), ("path again, B", 0)],
        expected: Expected::NoDifference,
    },
];

/// Blocks that all controls take together.
pub fn steps() -> u64 {
    SPECS.len() as u64 * u64::from(LEAST_ROUNDS) * 2
}

/// Runs the controls.
pub fn run(bench: &mut Bench) -> Result<Vec<Control>> {
    let block = bench.block();
    let mut lane = Lane::build(&PATHS, block.seconds() + 2.0, bench.seed)?;
    let dir = bench.scratch.path().to_owned();
    let mut controls = vec![];
    for (i, spec) in SPECS.iter().enumerate() {
        let path = Cell::new(0);
        let (mut a, mut b) = (
            choose(&path, spec.sides[0].1),
            choose(&path, spec.sides[1].1),
        );
        let sides = [
            AbSide {
                name: spec.sides[0].0,
                set_up: &mut a,
            },
            AbSide {
                name: spec.sides[1].0,
                set_up: &mut b,
            },
        ];
        let mut measure = |turn: BlockTurn| {
            bench.step(&format!("control: {}, round {}", spec.name, turn.round))?;
            // Delays of its own for each block: equal ones would make equal paths too equal.
            let number = (i as u32 * LEAST_ROUNDS + turn.round) * 2 + turn.side as u32;
            lane.play(number)?;
            let target = lane.target(path.get());
            Tool::MountainIcmp.measure(lane.client(), target, &block, &dir)
        };
        let blocks = interleaved(sides, LEAST_ROUNDS, &mut measure)?;
        bench.blocks(&blocks);
        let judgement = blocks.judge()?;
        controls.push(Control {
            name: spec.name,
            holds: holds(spec.expected, &judgement.better, &judgement.worse),
            said: judgement.text(),
            judgement,
        });
    }
    Ok(controls)
}

fn choose(path: &Cell<usize>, i: usize) -> impl FnMut() -> Result<()> + '_ {
    move || {
        path.set(i);
        Ok(())
    }
}

fn holds(expected: Expected, better: &[String], worse: &[String]) -> bool {
    match expected {
        Expected::Worse => better.is_empty() && worse.iter().any(|row| row == "Median"),
        Expected::NoDifference => better.is_empty() && worse.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_control_has_to_find() {
        let rows = |rows: &[&str]| rows.iter().map(|r| r.to_string()).collect::<Vec<_>>();
        let (none, median, loss) = (rows(&[]), rows(&["Median", "P99"]), rows(&["Loss"]));
        assert!(holds(Expected::Worse, &none, &median));
        assert!(!holds(Expected::Worse, &median, &none));
        assert!(!holds(Expected::Worse, &none, &none));
        assert!(!holds(Expected::Worse, &none, &loss));
        assert!(!holds(Expected::Worse, &loss, &median));
        assert!(holds(Expected::NoDifference, &none, &none));
        assert!(!holds(Expected::NoDifference, &none, &loss));
        assert!(!holds(Expected::NoDifference, &loss, &none));
    }
}
