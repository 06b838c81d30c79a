// SPDX-License-Identifier: GPL-2.0-or-later
//! Recordings of real paths: round trips of several paths at once, in windows that do not follow
//! on one another.
//!
//! The file is CSV, gzipped if its name ends in `.gz`. Lines that begin with `#` say where it is
//! from. The header is `window,t_ms,path,rtt_ms`; an empty `rtt_ms` is a lost probe. Rows are in
//! order of window and time.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::rc::Rc;

use anyhow::{bail, ensure, Context, Result};

use super::made::MadePath;
use crate::schedule::Schedule;

/// A path of which nothing is recorded yet.
const EMPTY: Trace = Trace::Recorded(Vec::new());
const HEADER: &str = "window,t_ms,path,rtt_ms";
/// Bytes of a file, unpacked: an hour of 16 paths at 100 probes a second is 150 MB.
const MOST_BYTES: u64 = 512 << 20;

/// What one path does to what is sent over it. Times are µs since the window's begin, delays are
/// round trips in µs; `None`: lost.
#[derive(Clone, Debug, PartialEq)]
pub enum Trace {
    /// By the time at which each probe was sent. The last one holds until the next.
    Recorded(Vec<(u64, Option<u32>)>),
    /// Drawn for a scenario; the path's index.
    Scheduled(Rc<Schedule>, usize),
    Made(MadePath),
    /// One after another, each by the time of its begin.
    Joined(Vec<(u64, Trace)>),
}

impl Trace {
    /// What a flow's packet meets that is sent at a time.
    pub fn packet(&self, at_us: u64) -> Option<u32> {
        self.draw(at_us, 0)
    }

    /// What a probe meets. Where noise is drawn for each packet, a probe draws its own.
    pub fn probe(&self, at_us: u64) -> Option<u32> {
        self.draw(at_us, 1)
    }

    fn draw(&self, at_us: u64, kind: u64) -> Option<u32> {
        match self {
            Trace::Recorded(samples) => {
                let next = samples.partition_point(|(t, _)| *t <= at_us);
                samples.get(next.saturating_sub(1))?.1
            }
            Trace::Scheduled(schedule, path) => {
                let trip = schedule.trip(*path, *path, at_us as i64);
                trip.map(|trip| trip.rtt_us())
            }
            Trace::Made(path) => path.draw(at_us, kind),
            Trace::Joined(parts) => {
                let (begin_us, part) = part_at(parts, at_us)?;
                part.draw(at_us - begin_us, kind)
            }
        }
    }

    /// What who knows the path would expect of a packet sent at a time. A lost one is later than
    /// any other.
    pub fn expected_us(&self, at_us: u64) -> u32 {
        match self {
            Trace::Made(path) => path.expected_us(at_us),
            Trace::Joined(parts) => part_at(parts, at_us).map_or(u32::MAX, |(begin_us, part)| {
                part.expected_us(at_us - begin_us)
            }),
            _ => self.packet(at_us).unwrap_or(u32::MAX),
        }
    }
}

/// The part that a time falls into, and when it begins.
fn part_at(parts: &[(u64, Trace)], at_us: u64) -> Option<(u64, &Trace)> {
    let next = parts.partition_point(|(begin, _)| *begin <= at_us);
    let (begin_us, part) = parts.get(next.checked_sub(1)?)?;
    Some((*begin_us, part))
}

/// Some seconds during which all paths were recorded; a trace for each path.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Window {
    pub length_us: u64,
    pub paths: Vec<Trace>,
}

/// One file.
#[derive(Clone, Debug)]
pub struct Recording {
    pub name: String,
    pub paths: Vec<String>,
    pub windows: Vec<Window>,
}

impl Recording {
    /// # Errors
    /// The file cannot be read, or a line is not what the header says; names file and line.
    pub fn load(file: &Path) -> Result<Self> {
        let shown = file.display();
        let open = File::open(file).with_context(|| shown.to_string())?;
        let mut text = String::new();
        let read = match file.extension().is_some_and(|e| e == "gz") {
            true => flate2::read::GzDecoder::new(open)
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
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let name = name.trim_end_matches(".gz").trim_end_matches(".csv");
        Self::parse(name, &text).with_context(|| shown.to_string())
    }

    fn parse(name: &str, text: &str) -> Result<Self> {
        let mut lines = (1..)
            .zip(text.lines())
            .filter(|(_, line)| !line.starts_with('#') && !line.is_empty());
        let header = lines.next().map(|(_, line)| line);
        ensure!(header == Some(HEADER), "its first line is not {HEADER}");
        let mut recording = Recording {
            name: name.to_owned(),
            paths: Vec::new(),
            windows: Vec::new(),
        };
        let mut window = None;
        for (number, line) in lines {
            recording
                .row(line, &mut window)
                .with_context(|| format!("line {number}"))?;
        }
        for window in &mut recording.windows {
            ensure!(
                window.paths.len() == recording.paths.len()
                    && window.paths.iter().all(|trace| *trace != EMPTY),
                "a window has no probe of one of its paths"
            );
        }
        ensure!(recording.paths.len() >= 2, "fewer than two paths");
        Ok(recording)
    }

    fn row(&mut self, line: &str, window: &mut Option<u64>) -> Result<()> {
        let columns: Vec<&str> = line.split(',').collect();
        let [number, t_ms, path, rtt_ms] = columns[..] else {
            bail!("{} columns, not 4", columns.len());
        };
        let number: u64 = number.parse().context("window is not a number")?;
        if *window != Some(number) {
            ensure!(
                window.is_none_or(|last| number > last),
                "windows are out of order"
            );
            *window = Some(number);
            self.windows.push(Window::default());
        }
        let at_us = us(t_ms).context("t_ms")?;
        let rtt_us = match rtt_ms {
            "" => None,
            text => Some(u32::try_from(us(text).context("rtt_ms")?).context("rtt_ms")?),
        };
        let index = match self.paths.iter().position(|p| p == path) {
            Some(index) => index,
            None => {
                ensure!(self.paths.len() < 16, "more than 16 paths");
                self.paths.push(path.to_owned());
                self.paths.len() - 1
            }
        };
        let window = self.windows.last_mut().expect("one was pushed");
        if window.paths.len() <= index {
            window.paths.resize(index + 1, EMPTY);
        }
        ensure!(
            at_us >= window.length_us,
            "times of a window are out of order"
        );
        window.length_us = at_us;
        if let Trace::Recorded(samples) = &mut window.paths[index] {
            samples.push((at_us, rtt_us));
        }
        Ok(())
    }

    /// The windows one after another as one.
    pub fn joined(windows: &[Window]) -> Option<Window> {
        let mut length_us = 0;
        let mut parts = vec![Vec::new(); windows.first()?.paths.len()];
        for window in windows {
            for (all, trace) in parts.iter_mut().zip(&window.paths) {
                all.push((length_us, trace.clone()));
            }
            length_us += window.length_us;
        }
        let paths = parts.into_iter().map(Trace::Joined).collect();
        Some(Window { length_us, paths })
    }
}

/// Milliseconds as text, in µs; at most a day.
fn us(text: &str) -> Result<u64> {
    let ms: f64 = text.parse()?;
    ensure!((0.0..=86_400_000.0).contains(&ms), "{text} is out of range");
    Ok((ms * 1e3).round() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "# from somewhere\nwindow,t_ms,path,rtt_ms\n\
        3,0,a,20\n3,50,b,30.5\n3,200,a,\n3,250,b,31\n7,0,a,1\n7,10,b,2\n";

    #[test]
    fn the_last_sample_holds_and_windows_stay_apart() {
        let recording = Recording::parse("r", GOOD).unwrap();
        assert_eq!(recording.paths, ["a", "b"]);
        assert_eq!(recording.windows.len(), 2);
        let window = &recording.windows[0];
        assert_eq!(window.length_us, 250_000);
        let [a, b] = &window.paths[..] else { panic!() };
        assert_eq!(
            (a.packet(0), a.probe(199_999)),
            (Some(20_000), Some(20_000))
        );
        assert_eq!(a.packet(200_000), None, "lost");
        assert_eq!(b.packet(0), Some(30_500), "the first holds before it, too");
        let joined = Recording::joined(&recording.windows).unwrap();
        assert_eq!(joined.length_us, 260_000);
        assert_eq!(joined.paths[0].packet(250_000), Some(1_000));
    }

    #[test]
    fn a_bad_line_is_named() {
        let error = |from: &str, to: &str| {
            let text = GOOD.replacen(from, to, 1);
            assert_ne!(text, GOOD);
            format!("{:#}", Recording::parse("r", &text).unwrap_err())
        };
        assert!(error("3,0,a,20", "3,0,a,-1").starts_with("line 3: rtt_ms: -1 is out"));
        assert!(error("3,200,a,", "3,40,a,").starts_with("line 5: times"));
        assert!(error("7,0,a,1", "2,0,a,1").starts_with("line 7: windows"));
        assert!(error("3,0,a,20", "3,0,a").starts_with("line 3: 3 columns"));
        assert!(error("rtt_ms", "rtt").contains(HEADER));
        assert!(error("7,10,b,2\n", "").contains("no probe of one of its paths"));
    }
}
