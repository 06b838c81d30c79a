// SPDX-License-Identifier: GPL-2.0-or-later
//! Recordings of paths: how long packets took, by the time at which they were sent.
//!
//! A recording is CSV, gzipped if its name ends in `.gz`. Lines that begin with `#` say where it is
//! from. The first other line names the columns, in any order:
//!
//! | column | value |
//! |---|---|
//! | `t_s`, `t_ms` or `t_us` | time of sending; zero is the window's begin, or 1970 |
//! | `rtt_…` or `delay_…` | round trip, or delay of one direction, in `s`, `ms` or `us`; empty: lost |
//! | `loss` or `loss_percent` | share of the packets that are lost meanwhile (not needed) |
//! | `path` | name of the path (not needed where there is one) |
//! | `window` | number of the window (not needed where there is one) |
//!
//! Windows do not follow on one another in time. Rows are in order of window and time; a row holds until
//! the path's next one.

pub mod import;
pub mod playback;

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use anyhow::{bail, ensure, Context, Result};
use serde::{Deserialize, Serialize};

/// Bytes of a file, unpacked: an hour of 16 paths at 100 probes a second is 150 MB.
const MOST_BYTES: u64 = 512 << 20;
const MOST_PATHS: usize = 16;
/// Of a time, µs: the year 2200. Microseconds up to it are whole numbers in an f64.
const MOST_TIME_US: f64 = 7.3e15;
/// Of a delay, µs.
const MOST_DELAY_US: f64 = 600e6;

/// What a packet meets from `at_us` on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Since the window's begin.
    pub at_us: u64,
    pub rtt_us: u32,
    /// Share of the packets that are lost; 1: all.
    pub loss: f64,
}

/// One path during a window, in order of time; never empty.
pub type Series = Arc<[Sample]>;

/// Some seconds during which all paths were recorded.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordedWindow {
    /// Time of its first row, as it stands in the file.
    pub begin_us: u64,
    pub length_us: u64,
    pub paths: Vec<Series>,
}

/// One file.
#[derive(Clone, Debug, PartialEq)]
pub struct Recording {
    pub name: String,
    pub paths: Vec<String>,
    pub windows: Vec<RecordedWindow>,
}

/// What is between two samples of which the second is smaller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Stalls {
    /// The first one holds until the second.
    #[default]
    Hold,
    /// What was sent while a path stood still arrives together when it goes on: the delay falls by a
    /// millisecond in a millisecond.
    Sawtooth,
}

impl Recording {
    /// # Errors
    /// The file cannot be read, or a line is not what the header says; names file and line.
    pub fn load(file: &Path) -> Result<Self> {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let name = name.trim_end_matches(".gz").trim_end_matches(".csv");
        Self::parse(name, &read_text(file)?).with_context(|| file.display().to_string())
    }

    /// Reads a recording; `name` names its path where no column does.
    ///
    /// # Errors
    /// A line is not what the header says; names the line.
    pub fn parse(name: &str, text: &str) -> Result<Self> {
        let mut lines = (1..)
            .zip(text.lines())
            .filter(|(_, line)| !line.starts_with('#') && !line.trim().is_empty());
        let (number, header) = lines.next().context("it is empty")?;
        let columns = Columns::of(header).with_context(|| format!("line {number}"))?;
        let mut reader = Reader {
            columns,
            name,
            paths: Vec::new(),
            windows: Vec::new(),
        };
        for (number, line) in lines {
            reader.row(line).with_context(|| format!("line {number}"))?;
        }
        reader.finish()
    }

    /// Its windows one after another as one; that keeps its times where it is the only one.
    pub fn joined(mut self) -> RecordedWindow {
        if self.windows.len() == 1 {
            return self.windows.remove(0);
        }
        let mut length_us = 0;
        let mut paths = vec![Vec::new(); self.paths.len()];
        for window in &self.windows {
            for (all, series) in paths.iter_mut().zip(&window.paths) {
                // Its first sample holds from the window's begin on.
                let moved = series.iter().enumerate().map(|(i, sample)| Sample {
                    at_us: length_us + if i == 0 { 0 } else { sample.at_us },
                    ..*sample
                });
                all.extend(moved);
            }
            length_us += window.length_us;
        }
        RecordedWindow {
            begin_us: 0,
            length_us,
            paths: paths.into_iter().map(Series::from).collect(),
        }
    }
}

/// What is in a file, unpacked if its name ends in `.gz`.
///
/// # Errors
/// It cannot be read, or holds too much; names the file.
pub fn read_text(file: &Path) -> Result<String> {
    let shown = file.display();
    let open = File::open(file).with_context(|| shown.to_string())?;
    let mut text = String::new();
    let read = match file.extension().is_some_and(|e| e == "gz") {
        // All members: logs that were packed one by one may stand in one file.
        true => flate2::read::MultiGzDecoder::new(open)
            .take(MOST_BYTES + 1)
            .read_to_string(&mut text),
        false => open.take(MOST_BYTES + 1).read_to_string(&mut text),
    };
    read.with_context(|| shown.to_string())?;
    ensure!(
        text.len() as u64 <= MOST_BYTES,
        "{shown}: more than {} MB",
        MOST_BYTES >> 20
    );
    Ok(text)
}

/// Where each value stands in a row, and what makes it µs.
struct Columns {
    count: usize,
    window: Option<usize>,
    path: Option<usize>,
    time: (usize, f64),
    /// Makes it a round trip.
    delay: (usize, f64),
    /// Makes it a share.
    loss: Option<(usize, f64)>,
}

impl Columns {
    fn of(header: &str) -> Result<Self> {
        let names: Vec<&str> = header.split(',').map(str::trim).collect();
        for (i, name) in names.iter().enumerate() {
            ensure!(!names[..i].contains(name), "two columns are named {name:?}");
        }
        let at = |wanted: &str| names.iter().position(|name| *name == wanted);
        let scaled = |prefix: &str| -> Option<(usize, f64)> {
            let units = [("s", 1e6), ("ms", 1e3), ("us", 1.0)];
            let mut found = units
                .iter()
                .filter_map(|(unit, us)| Some((at(&format!("{prefix}_{unit}"))?, *us)));
            found.next()
        };
        let one_way = scaled("delay").map(|(i, us)| (i, 2.0 * us));
        let percent = at("loss_percent").map(|i| (i, 0.01));
        let columns = Columns {
            count: names.len(),
            window: at("window"),
            path: at("path"),
            time: scaled("t").context("no column t_s, t_ms or t_us")?,
            delay: scaled("rtt")
                .or(one_way)
                .context("no column rtt_s, rtt_ms, rtt_us, delay_s, delay_ms or delay_us")?,
            loss: at("loss").map(|i| (i, 1.0)).or(percent),
        };
        let used = [
            columns.window,
            columns.path,
            Some(columns.time.0),
            Some(columns.delay.0),
            columns.loss.map(|(i, _)| i),
        ];
        for (i, name) in names.iter().enumerate() {
            ensure!(
                used.contains(&Some(i)),
                "column {name:?} is unknown, or says again what another one says"
            );
        }
        Ok(columns)
    }
}

/// Builds a recording row by row.
struct Reader<'a> {
    columns: Columns,
    name: &'a str,
    paths: Vec<String>,
    /// Number, time of the first and of the last row, samples by path.
    windows: Vec<(u64, u64, u64, Vec<Vec<Sample>>)>,
}

impl Reader<'_> {
    fn row(&mut self, line: &str) -> Result<()> {
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        let columns = &self.columns;
        ensure!(
            fields.len() == columns.count,
            "{} columns, not {}",
            fields.len(),
            columns.count
        );
        let window = match columns.window {
            Some(i) => fields[i].parse().context("window is not a number")?,
            None => 0,
        };
        let (i, scale) = columns.time;
        let at_us = number(fields[i], scale, MOST_TIME_US).context("time")? as u64;
        let (i, scale) = columns.delay;
        let rtt_us = match fields[i] {
            "" => None,
            text => Some(number(text, scale, MOST_DELAY_US).context("delay")? as u32),
        };
        let loss = match (rtt_us, columns.loss) {
            (None, _) => 1.0,
            (Some(_), Some((i, scale))) => {
                let share = fields[i].parse::<f64>().context("loss")? * scale;
                ensure!(
                    (0.0..=1.0).contains(&share),
                    "loss: {} is out of range",
                    fields[i]
                );
                share
            }
            (Some(_), None) => 0.0,
        };
        let path = columns.path.map_or(self.name, |i| fields[i]);
        let path = self.path(path)?;
        match self.windows.last() {
            Some((last, ..)) if *last == window => {}
            Some((last, ..)) if *last > window => bail!("windows are out of order"),
            _ => self.windows.push((window, at_us, at_us, Vec::new())),
        }
        let Some((_, begin_us, end_us, paths)) = self.windows.last_mut() else {
            bail!("no window");
        };
        ensure!(at_us >= *end_us, "times of a window are out of order");
        *end_us = at_us;
        if paths.len() <= path {
            paths.resize(path + 1, Vec::new());
        }
        // What is lost has no delay: that of before holds, for what is between it and the next.
        let before = paths[path].last().map_or(0, |s: &Sample| s.rtt_us);
        paths[path].push(Sample {
            at_us: at_us - *begin_us,
            rtt_us: rtt_us.unwrap_or(before),
            loss,
        });
        Ok(())
    }

    fn path(&mut self, name: &str) -> Result<usize> {
        if let Some(index) = self.paths.iter().position(|p| p == name) {
            return Ok(index);
        }
        ensure!(
            self.paths.len() < MOST_PATHS,
            "more than {MOST_PATHS} paths"
        );
        self.paths.push(name.to_owned());
        Ok(self.paths.len() - 1)
    }

    fn finish(self) -> Result<Recording> {
        let all = self.paths.len();
        ensure!(all > 0, "it has no rows");
        let windows = self
            .windows
            .into_iter()
            .map(|(number, begin_us, end_us, mut paths)| {
                paths.resize(all, Vec::new());
                if let Some(i) = paths.iter().position(Vec::is_empty) {
                    bail!("window {number} has no row of path {:?}", self.paths[i]);
                }
                Ok(RecordedWindow {
                    begin_us,
                    length_us: end_us - begin_us,
                    paths: paths.into_iter().map(Series::from).collect(),
                })
            });
        Ok(Recording {
            name: self.name.to_owned(),
            windows: windows.collect::<Result<_>>()?,
            paths: self.paths,
        })
    }
}

/// A number of text in µs, from 0 to `most`.
fn number(text: &str, us: f64, most: f64) -> Result<f64> {
    let value: f64 = text.parse().with_context(|| format!("{text:?}"))?;
    let value = (value * us).round();
    ensure!((0.0..=most).contains(&value), "{text} is out of range");
    Ok(value)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::playback::Playback;
    use super::*;

    const GOOD: &str = "# from somewhere\nwindow,t_ms,path,rtt_ms\n\
        3,0,a,20\n3,50,b,30.5\n3,200,a,\n3,250,b,31\n7,0,a,1\n7,10,b,2\n";

    fn held(series: &Series, at_us: u64) -> Option<u32> {
        let (rtt_us, loss) = Playback::whole(series.clone(), Stalls::Hold).at(at_us);
        (loss < 1.0).then_some(rtt_us)
    }

    #[test]
    fn the_last_sample_holds_and_windows_stay_apart() {
        let recording = Recording::parse("r", GOOD).unwrap();
        assert_eq!(recording.paths, ["a", "b"]);
        assert_eq!(recording.windows.len(), 2);
        let window = &recording.windows[0];
        assert_eq!(window.length_us, 250_000);
        let [a, b] = &window.paths[..] else { panic!() };
        assert_eq!((held(a, 0), held(a, 199_999)), (Some(20_000), Some(20_000)));
        assert_eq!(held(a, 200_000), None, "lost");
        assert_eq!(held(b, 0), Some(30_500), "the first holds before it, too");
        let joined = recording.joined();
        assert_eq!(joined.length_us, 260_000);
        assert_eq!(held(&joined.paths[0], 250_000), Some(1_000));
        assert_eq!(held(&joined.paths[1], 250_000), Some(2_000));
    }

    #[test]
    fn units_and_columns_are_what_the_header_says() {
        let text = "t_s,delay_us,loss_percent\n1700000000.25,15000,0\n1700000001.25,20000,50\n";
        let recording = Recording::parse("wan", text).unwrap();
        assert_eq!(recording.paths, ["wan"]);
        let window = &recording.windows[0];
        assert_eq!(window.begin_us, 1_700_000_000_250_000);
        let second = Sample {
            at_us: 1_000_000,
            rtt_us: 40_000,
            loss: 0.5,
        };
        assert_eq!(window.paths[0][1], second);
    }

    #[test]
    fn a_stall_falls_by_a_millisecond_in_a_millisecond_if_asked() {
        let text = "t_ms,rtt_ms\n0,300\n200,40\n400,40\n600,90\n";
        let recording = Recording::parse("a", text).unwrap();
        let series = recording.windows[0].paths[0].clone();
        let at = |ms: u64, stalls| Playback::whole(series.clone(), stalls).at(ms * 1000).0 / 1000;
        assert_eq!(at(150, Stalls::Hold), 300);
        assert_eq!(at(150, Stalls::Sawtooth), 150);
        assert_eq!(at(199, Stalls::Sawtooth), 101);
        assert_eq!(
            at(500, Stalls::Sawtooth),
            40,
            "what rises is not known before"
        );
        assert_eq!(at(700, Stalls::Sawtooth), 90);
    }

    #[test]
    fn a_packed_file_may_have_several_members() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.csv.gz");
        let mut packed = Vec::new();
        for part in ["t_ms,rtt_ms\n0,20\n", "100,30\n"] {
            let level = flate2::Compression::fast();
            let mut member = flate2::write::GzEncoder::new(Vec::new(), level);
            member.write_all(part.as_bytes()).unwrap();
            packed.extend(member.finish().unwrap());
        }
        std::fs::write(&file, packed).unwrap();
        let recording = Recording::load(&file).unwrap();
        assert_eq!(recording.name, "a");
        assert_eq!(recording.windows[0].paths[0].len(), 2);
    }

    #[test]
    fn a_bad_line_is_named() {
        let error = |from: &str, to: &str| {
            let text = GOOD.replacen(from, to, 1);
            assert_ne!(text, GOOD);
            format!("{:#}", Recording::parse("r", &text).unwrap_err())
        };
        assert!(error("3,0,a,20", "3,0,a,-1").starts_with("line 3: delay: -1 is out"));
        assert!(error("3,0,a,20", "3,0,a,1e300").starts_with("line 3: delay: 1e300 is out"));
        assert!(error("3,0,a,20", "3,nan,a,20").starts_with("line 3: time: nan is out"));
        assert!(error("3,200,a,", "3,40,a,").starts_with("line 5: times"));
        assert!(error("7,0,a,1", "2,0,a,1").starts_with("line 7: windows"));
        assert!(error("3,0,a,20", "3,0,a").starts_with("line 3: 3 columns"));
        assert!(error("rtt_ms", "rtt").starts_with("line 2: no column rtt_s"));
        assert!(error("path,rtt_ms", "path,rtt_ms,odd").starts_with("line 2: column \"odd\""));
        assert!(error("7,10,b,2\n", "").contains("window 7 has no row of path \"b\""));
        assert!(Recording::parse("r", "").is_err());
        assert!(Recording::parse("r", "t_ms,rtt_ms\n").is_err());
    }
}
