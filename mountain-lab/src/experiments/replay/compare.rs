// SPDX-License-Identifier: GPL-2.0-or-later
//! What a run on recordings in real time has shown, beside a replay of the same stretch.
//!
//! Both begin at the same moment of the recordings and carry what was learnt from window to window. They
//! differ in what a replay leaves out: the daemon's timers, the emulator, packets that wait for those
//! before them, and flows that a hash spreads unevenly.

use std::path::Path;

use anyhow::{ensure, Context, Result};
use mountain::report::table::{align, head, row as cells, Words};
use mountain_lab::result::{RunResult, FILE_NAME};

use super::chooser::ChooserKind;
use super::score::{play, Score};
use super::window::{PathTrace, Window};
use crate::scenario::Scenario;

/// Differences up to this share are called none.
const ALIKE: f64 = 0.1;
/// So are differences in µs up to this: what the emulator and the kernels add.
const ALIKE_US: f64 = 1000.0;

/// One figure of one policy.
struct Row {
    policy: String,
    figure: &'static str,
    run: f64,
    replay: f64,
    /// Differences up to this are none.
    slack: f64,
}

impl Row {
    fn is_alike(&self) -> bool {
        let difference = (self.run - self.replay).abs();
        difference <= self.slack || difference <= ALIKE * self.replay
    }
}

/// Plays what `folder`'s run has played; returns the table.
///
/// # Errors
/// The folder has no result of such a run, or its recordings are gone.
pub fn compare(folder: &Path, seed: u64) -> Result<String> {
    let file = folder.join(FILE_NAME);
    let result = RunResult::read(&file)?;
    let shown = file.display();
    let scenario = result.environment.get("scenario");
    let scenario = scenario.with_context(|| format!("{shown}: is not of `mountain-lab run`"))?;
    let mut scenario: Scenario = serde_json::from_value(scenario.clone())?;
    ensure!(
        scenario.repeats == 1,
        "{shown}: has {} repeats; use --repeat 1 --seconds 1200",
        scenario.repeats
    );
    // The result does not say where the scenario's file is.
    scenario.folder = Scenario::find(&scenario.name)?.folder;
    scenario.read_traces()?;
    let paths = scenario.paths.iter().enumerate().map(|(index, path)| {
        let playback = path.playback.clone();
        let playback =
            playback.with_context(|| format!("path {} plays no recording", path.name))?;
        Ok(PathTrace::Recorded(playback, index))
    });
    let window = Window {
        length_us: (scenario.segment_seconds() * 1e6) as u64,
        paths: paths.collect::<Result<_>>()?,
    };
    let warm_up_us = (scenario.discard_seconds * 1e6) as u64;
    let mut rows = Vec::new();
    for name in result.policies.keys() {
        let Some(kind) = replayed(name) else { continue };
        let chooser = kind.chooser(window.paths.len(), seed);
        rows.extend(compared(&result, name, &play(&window, chooser, warm_up_us)));
    }
    Ok(text(&scenario, &rows))
}

/// The chooser that stands for a policy of `run`.
fn replayed(policy: &str) -> Option<ChooserKind> {
    match policy {
        "ecmp" | "none" => Some(ChooserKind::Hash),
        _ => ChooserKind::parse(policy).ok(),
    }
}

fn compared(result: &RunResult, policy: &str, score: &Score) -> Vec<Row> {
    let figures = score.figures();
    // A run counts what comes after a second as lost.
    let answered = |p: f64| score.answered_ms(p, 1000) * 1e3;
    let all = [
        ("rtt_p50_us", answered(0.5), ALIKE_US),
        ("rtt_p95_us", answered(0.95), ALIKE_US),
        ("rtt_p99_us", answered(0.99), ALIKE_US),
        ("above_200_ms", figures.above_percent[1] / 100.0, 0.0002),
        ("moves_per_flow_minute", figures.moves_per_flow_minute, 0.5),
        ("share_path0", figures.share_percent[0] / 100.0, 0.05),
    ];
    all.into_iter()
        .filter_map(|(figure, replay, slack)| {
            Some(Row {
                policy: policy.to_owned(),
                figure,
                run: result.metric(policy, figure)?.median,
                replay,
                slack,
            })
        })
        .collect()
}

fn text(scenario: &Scenario, rows: &[Row]) -> String {
    let mut table = vec![head("policy|figure|run|replay|run / replay|")];
    for row in rows {
        let shown = |value: f64| match row.figure.strip_suffix("_us") {
            Some(_) => format!("{:.1} ms", value / 1e3),
            None => format!("{value:.4}"),
        };
        let ratio = match row.replay {
            0.0 => "-".to_owned(),
            replay => format!("{:.2}", row.run / replay),
        };
        let verdict = if row.is_alike() { "" } else { "differs" };
        let figure = row.figure.trim_end_matches("_us");
        let (run, replay) = (shown(row.run), shown(row.replay));
        table.push(cells([
            &row.policy,
            &figure,
            &run,
            &replay,
            &ratio,
            &verdict,
        ]));
    }
    format!(
        "{}: {:.0} s in real time beside a replay of them\n\n{}",
        scenario.name,
        scenario.seconds,
        align(&table, Words::All)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_differences_are_none() {
        let row = |run, replay| Row {
            policy: "mountain".to_owned(),
            figure: "rtt_p99_us",
            run,
            replay,
            slack: ALIKE_US,
        };
        assert!(row(20_900.0, 20_000.0).is_alike());
        assert!(row(219_000.0, 200_000.0).is_alike());
        assert!(!row(221_000.0, 200_000.0).is_alike());
        assert!(!row(2_000.0, 0.0).is_alike());
    }
}
