// SPDX-License-Identifier: GPL-2.0-or-later
//! Whether the A/B finds what is there, and only that: the same tool, frame and verdict as for the
//! claims, on paths whose difference is known.

use anyhow::Result;
use serde::Serialize;

use super::block;
use crate::driver::Session;
use crate::experiments::probing::ab::{interleaved, Judgement, LEAST_ROUNDS};
use crate::experiments::probing::lane::{Delay, Lane, USUAL};
use crate::experiments::probing::tool::Tool;

/// The second path's round trips take 2 ms more.
const LONGER: Delay = Delay { ms: 11.0, ..USUAL };

/// A known difference, and what the A/B said of it.
#[derive(Serialize)]
pub struct Control {
    pub name: &'static str,
    /// Whether it said so.
    pub holds: bool,
    pub said: String,
    pub judgement: Judgement,
}

struct Spec {
    name: &'static str,
    /// Names of the sides in the result, and the path of each.
    sides: [(&'static str, usize); 2],
    /// Whether the second has to be found worse; else, no difference.
    worse: bool,
}

const SPECS: [Spec; 2] = [
    Spec {
        name: "a path with +2 ms is found worse",
        sides: [("path", 0), ("path +2 ms", 1)],
        worse: true,
    },
    Spec {
        name: "the same path twice shows no difference",
        sides: [("path again, A", 0), ("path again, B", 0)],
        worse: false,
    },
];

/// Blocks that all controls take together.
pub fn steps() -> u64 {
    SPECS.len() as u64 * u64::from(LEAST_ROUNDS) * 2
}

/// Runs the controls.
pub fn run(session: &mut Session) -> Result<Vec<Control>> {
    let (block, seed) = (block(&session.args), session.args.seed);
    let mut lane = Lane::build(&[USUAL, LONGER], block.seconds() + 2.0, seed)?;
    let mut controls = vec![];
    for (i, spec) in SPECS.iter().enumerate() {
        let what = format!("control: {}", spec.name);
        let names = spec.sides.map(|(name, _)| name.to_owned());
        let blocks = interleaved(session, &what, names, LEAST_ROUNDS, |side, round| {
            // Delays of its own for each block: equal ones would make equal paths too equal.
            let number = (i as u32 * LEAST_ROUNDS + round) * 2 + side as u32;
            lane.play(number)?;
            let target = lane.hosts.gateway(spec.sides[side].1);
            Tool::MountainIcmp.measure(&lane.hosts.client, target, &block)
        })?;
        let judgement = blocks.judge()?;
        controls.push(Control {
            name: spec.name,
            holds: holds(spec.worse, &judgement.better, &judgement.worse),
            said: judgement.text(),
            judgement,
        });
    }
    Ok(controls)
}

fn holds(found: bool, better: &[String], worse: &[String]) -> bool {
    let median = worse.iter().any(|row| row == "Median");
    better.is_empty() && if found { median } else { worse.is_empty() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_control_has_to_find() {
        let rows = |rows: &[&str]| rows.iter().map(|r| r.to_string()).collect::<Vec<_>>();
        let (none, median, loss) = (rows(&[]), rows(&["Median", "P99"]), rows(&["Loss"]));
        assert!(holds(true, &none, &median));
        assert!(!holds(true, &median, &none));
        assert!(!holds(true, &none, &none));
        assert!(!holds(true, &none, &loss));
        assert!(!holds(true, &loss, &median));
        assert!(holds(false, &none, &none));
        assert!(!holds(false, &none, &loss));
        assert!(!holds(false, &loss, &none));
    }
}
