// SPDX-License-Identifier: GPL-2.0-or-later
//! Recordings of several paths on one clock, played again and again.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{ensure, Context, Result};
use serde::{Deserialize, Serialize};

use super::{RecordedWindow, Recording, Series, Stalls};

/// Least time that recordings have to have in common, µs.
const LEAST_OVERLAP_US: u64 = 15_000_000;

/// Which windows of a recording, in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Half {
    First,
    Second,
    #[default]
    All,
}

impl Half {
    pub fn of<T>(self, windows: &[T]) -> &[T] {
        let (first, second) = windows.split_at(windows.len() / 2);
        match self {
            Half::First => first,
            Half::Second => second,
            Half::All => windows,
        }
    }
}

/// One path of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct PlaybackSource {
    pub file: PathBuf,
    /// Not needed where the file has one path alone.
    pub path: String,
    pub stalls: Stalls,
}

/// A recorded path, or the part of it from the time on at which all of a scenario's recordings have begun.
#[derive(Clone, Debug, PartialEq)]
pub struct Playback {
    series: Series,
    stalls: Stalls,
    from_us: u64,
    length_us: u64,
}

impl Playback {
    /// All of a series, and its last sample for ever.
    pub fn whole(series: Series, stalls: Stalls) -> Self {
        Playback {
            series,
            stalls,
            from_us: 0,
            length_us: u64::MAX,
        }
    }

    /// The shortest round trip, µs.
    pub fn least_us(&self) -> u32 {
        let answered = self.series.iter().filter(|s| s.loss < 1.0);
        answered.map(|s| s.rtt_us).min().unwrap_or(0)
    }

    /// Round trip in µs and share lost of what is sent at a time; after the end it begins again. The first
    /// sample holds before it, too.
    pub fn at(&self, at_us: u64) -> (u32, f64) {
        let at_us = self.from_us + at_us % self.length_us;
        let next = self.series.partition_point(|s| s.at_us <= at_us);
        let now = self.series[next.saturating_sub(1)];
        let later = self.series.get(next).filter(|s| s.loss < 1.0);
        let rtt_us = match (self.stalls, later) {
            (Stalls::Sawtooth, Some(later)) => {
                let passed_us = at_us.saturating_sub(now.at_us).min(u64::from(u32::MAX));
                let fallen_us = now.rtt_us.saturating_sub(passed_us as u32);
                fallen_us.max(now.rtt_us.min(later.rtt_us))
            }
            _ => now.rtt_us,
        };
        (rtt_us, now.loss)
    }
}

/// Loads the sources and keeps them aligned: by their times, and window by window within a file.
///
/// # Errors
/// A file cannot be read, lacks the path, or the recordings have too little time in common.
pub fn load(sources: &[PlaybackSource], half: Half) -> Result<Vec<Playback>> {
    let mut files: BTreeMap<&PathBuf, (Vec<String>, RecordedWindow)> = BTreeMap::new();
    for source in sources {
        if !files.contains_key(&source.file) {
            let mut recording = Recording::load(&source.file)?;
            recording.windows = half.of(&recording.windows).to_vec();
            let shown = source.file.display();
            ensure!(
                !recording.windows.is_empty(),
                "{shown}: no window is left of the half that is asked for"
            );
            let paths = recording.paths.clone();
            files.insert(&source.file, (paths, recording.joined()));
        }
    }
    let begin_us = files.values().map(|(_, w)| w.begin_us).max().unwrap_or(0);
    let ends = files.values().map(|(_, w)| w.begin_us + w.length_us);
    let length_us = ends.min().unwrap_or(0).saturating_sub(begin_us);
    ensure!(
        sources.is_empty() || length_us >= LEAST_OVERLAP_US,
        "the recordings have {:.1} s in common; {} s are needed",
        length_us as f64 / 1e6,
        LEAST_OVERLAP_US / 1_000_000
    );
    let playback = |source: &PlaybackSource| {
        let (paths, window) = &files[&source.file];
        let only = (paths.len() == 1).then_some(0);
        let named = paths.iter().position(|p| *p == source.path);
        let index = only.or(named).with_context(|| {
            let (shown, there) = (source.file.display(), paths.join(", "));
            format!("{shown}: no path {:?}; there are {there}", source.path)
        })?;
        Ok(Playback {
            series: window.paths[index].clone(),
            stalls: source.stalls,
            from_us: begin_us - window.begin_us,
            length_us,
        })
    };
    sources.iter().map(playback).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(dir: &tempfile::TempDir, name: &str, path: &str, text: &str) -> PlaybackSource {
        let file = dir.path().join(name);
        std::fs::write(&file, text).unwrap();
        PlaybackSource {
            file,
            path: path.to_owned(),
            stalls: Stalls::Hold,
        }
    }

    #[test]
    fn recordings_of_several_files_are_aligned_by_their_times() {
        let dir = tempfile::tempdir().unwrap();
        let a = source(
            &dir,
            "a.csv",
            "x",
            "t_s,rtt_ms\n1000,10\n1020,20\n1040,30\n",
        );
        let b = source(
            &dir,
            "b.csv",
            "y",
            "t_s,rtt_ms\n1015,50\n1021,60\n1036,70\n",
        );
        let both = load(&[a.clone(), b], Half::All).unwrap();
        let at = |s: f64| {
            let at_us = (s * 1e6) as u64;
            [both[0].at(at_us).0 / 1000, both[1].at(at_us).0 / 1000]
        };
        // Both have 1015 s to 1036 s.
        assert_eq!(at(0.0), [10, 50]);
        assert_eq!(at(5.5), [20, 50]);
        assert_eq!(at(6.5), [20, 60]);
        assert_eq!(at(21.0), [10, 50], "it begins again");
        let far = source(&dir, "far.csv", "z", "t_s,rtt_ms\n1030,1\n1100,2\n");
        let error = format!("{:#}", load(&[a, far], Half::All).unwrap_err());
        assert!(error.contains("10.0 s in common"), "{error}");
    }

    #[test]
    fn a_path_is_found_by_its_name_and_a_half_by_its_windows() {
        let dir = tempfile::tempdir().unwrap();
        let mut text = "window,t_ms,path,rtt_ms\n".to_owned();
        for window in 0..4 {
            for t in [0, 20_000] {
                text += &format!("{window},{t},a,{window}\n{window},{t},b,{}\n", window + 10);
            }
        }
        let b = source(&dir, "ab.csv", "b", &text);
        let second = load(std::slice::from_ref(&b), Half::Second).unwrap();
        assert_eq!(second[0].at(0).0, 12_000);
        assert_eq!(second[0].at(20_000_000).0, 13_000);
        assert_eq!(second[0].at(40_000_000).0, 12_000);
        let c = PlaybackSource {
            path: "c".to_owned(),
            ..b
        };
        let error = format!("{:#}", load(&[c], Half::All).unwrap_err());
        assert!(error.contains("no path \"c\"; there are a, b"), "{error}");
    }
}
