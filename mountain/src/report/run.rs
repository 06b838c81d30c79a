// SPDX-License-Identifier: GPL-2.0-or-later
//! What the report needs of each run: its name and colour, sorted RTTs, rows, outliers.

use std::collections::HashSet;

use crate::host::stdout::plain;
use crate::measure::runfile::{RunFile, Samples};
use crate::measure::stats::{ascending, choose_thresholds, far_out, quantile, Table};

use super::plots::{RGBColor, SERIES};

/// So many of the outliers are marked.
pub(crate) const MARKED: usize = 20;

/// A run, prepared.
pub(crate) struct PreparedRun<'a> {
    /// Different from the other runs'.
    pub name: String,
    pub colour: RGBColor,
    pub file: &'a RunFile,
    /// RTTs of the answered probes, ascending, µs.
    pub sorted: Vec<f64>,
    /// The rows of its table.
    pub table: Table,
    /// The rows of what user space saw, where that is known.
    pub user: Option<Table>,
    /// How many RTTs are above [`far_out`].
    pub outliers: usize,
    /// The largest of them: (s, ms), at most [`MARKED`].
    pub marks: Vec<(f64, f64)>,
}

impl<'a> PreparedRun<'a> {
    /// All runs, in order, with the same thresholds: those that suit the first one with answers.
    pub(crate) fn all(runs: &'a [(String, RunFile)]) -> Vec<Self> {
        let rtts = |run: &RunFile| ascending(run.samples.rtt_us.iter().copied().flatten());
        let sorted: Vec<Vec<f64>> = runs.iter().map(|(_, run)| rtts(run)).collect();
        let median = sorted.iter().find_map(|s| quantile(s, 0.5));
        let thresholds = median.map_or_else(Vec::new, |m| choose_thresholds(m).to_vec());
        runs.iter()
            .zip(names(runs))
            .zip(sorted)
            .enumerate()
            .map(|(i, (((_, file), name), sorted))| {
                let (outliers, marks) = outliers(&file.samples, &sorted);
                let (table, user) = file.samples.tables(&thresholds);
                Self {
                    name,
                    colour: SERIES[i % SERIES.len()],
                    table,
                    user,
                    file,
                    sorted,
                    outliers,
                    marks,
                }
            })
            .collect()
    }

    /// The end of the time axis: the last probe, or the last interval of the CPU's, s.
    pub(crate) fn until_s(&self) -> f64 {
        let times = self.file.samples.sent_us.iter().chain(&self.file.cpu.at_us);
        times.copied().fold(0.0, f64::max) / 1e6
    }
}

/// Labels, else the files' names; a number where two are alike.
fn names(runs: &[(String, RunFile)]) -> Vec<String> {
    let mut seen = HashSet::new();
    let unlike = |(file, run): &(String, RunFile)| {
        // XML, and so SVG, has no way to write control characters.
        let name = plain(run.label.as_deref().unwrap_or(file));
        let numbered = (2..).map(|n| format!("{name} ({n})"));
        let mut candidates = std::iter::once(name.to_string()).chain(numbered);
        let free = candidates.find(|name| seen.insert(name.clone()));
        free.expect("numbers do not end")
    };
    runs.iter().map(unlike).collect()
}

/// How many outliers there are, and the largest with their moments (s, ms).
fn outliers(samples: &Samples, sorted: &[f64]) -> (usize, Vec<(f64, f64)>) {
    let Some(limit) = far_out(sorted) else {
        return (0, Vec::new());
    };
    let count = sorted.len() - sorted.partition_point(|&v| v <= limit);
    let Some(least) = count.min(MARKED).checked_sub(1) else {
        return (0, Vec::new());
    };
    let least = sorted[sorted.len() - 1 - least];
    let marks = samples
        .sent_us
        .iter()
        .zip(&samples.rtt_us)
        .filter_map(|(at_us, rtt)| {
            rtt.filter(|&v| v >= least && v > limit)
                .map(|v| (at_us / 1e6, v / 1e3))
        })
        .take(MARKED)
        .collect();
    (count, marks)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(label: Option<&str>, rtts: &[Option<f64>]) -> (String, RunFile) {
        let samples = Samples {
            sent_us: (0..rtts.len()).map(|i| i as f64 * 1e4).collect(),
            rtt_us: rtts.to_vec(),
            ..Samples::default()
        };
        let file = RunFile {
            label: label.map(str::to_owned),
            samples,
            ..RunFile::default()
        };
        ("file".into(), file)
    }

    #[test]
    fn names_differ() {
        let runs = [run(None, &[]), run(Some("a"), &[]), run(Some("file"), &[])];
        assert_eq!(names(&runs), ["file", "a", "file (2)"]);
        let runs = ["a", "a", "a (2)"].map(|label| run(Some(label), &[]));
        assert_eq!(names(&runs), ["a", "a (2)", "a (2) (2)"]);
    }

    #[test]
    fn the_largest_outliers_are_marked() {
        let mut rtts: Vec<Option<f64>> = (0..1000).map(|i| Some(1000.0 + f64::from(i))).collect();
        rtts.push(None);
        let plain = [run(None, &rtts)];
        assert_eq!(PreparedRun::all(&plain)[0].outliers, 0, "evenly spread");
        for i in 0..30 {
            rtts[100 + i * 10] = Some(50_000.0 + i as f64);
        }
        let runs = [run(None, &rtts)];
        let run = &PreparedRun::all(&runs)[0];
        assert_eq!((run.outliers, run.marks.len()), (30, MARKED));
        assert_eq!(run.marks[0], (2.0, 50.01), "the smaller ten are left out");
        assert_eq!(run.marks[19], (3.9, 50.029));
        assert_eq!(run.table.lost(), 1);
    }

    #[test]
    fn thresholds_suit_the_first_run_with_answers() {
        let runs = [
            run(None, &[None, None]),
            run(None, &[Some(1000.0), Some(2000.0), Some(1000.0)]),
        ];
        let all = PreparedRun::all(&runs);
        let rows = |i: usize| -> Vec<String> {
            let rows = all[i].table.rows();
            rows.into_iter().map(|r| r.name).collect()
        };
        assert_eq!(rows(0), rows(1));
        assert!(rows(0).contains(&"> 2 ms".to_owned()), "{:?}", rows(0));
        assert_eq!((all[0].outliers, all[0].marks.len()), (0, 0));
    }
}
