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

use anyhow::{bail, ensure, Context, Result};

const HEADER: &str = "window,t_ms,path,rtt_ms";
/// Bytes of a file, unpacked: an hour of 16 paths at 100 probes a second is 150 MB.
const MOST_BYTES: u64 = 512 << 20;

/// What one path did, by the probes sent over it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// When each was sent, µs since the window's begin, and its round trip, µs; `None`: lost.
    samples: Vec<(u64, Option<u32>)>,
}

impl Trace {
    /// What a packet sent at a time meets: the last sample holds until the next one.
    pub fn at(&self, at_us: u64) -> Option<u32> {
        let next = self.samples.partition_point(|(t, _)| *t <= at_us);
        self.samples.get(next.saturating_sub(1))?.1
    }
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
            window.paths.resize(recording.paths.len(), Trace::default());
            ensure!(
                window.paths.iter().all(|trace| !trace.samples.is_empty()),
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
            window.paths.resize(index + 1, Trace::default());
        }
        ensure!(
            at_us >= window.length_us,
            "times of a window are out of order"
        );
        window.length_us = at_us;
        window.paths[index].samples.push((at_us, rtt_us));
        Ok(())
    }

    /// The windows one after another as one, at most `gap_us` apart.
    pub fn joined(windows: &[Window]) -> Option<Window> {
        let mut joined = Window {
            length_us: 0,
            paths: vec![Trace::default(); windows.first()?.paths.len()],
        };
        for window in windows {
            for (all, trace) in joined.paths.iter_mut().zip(&window.paths) {
                let moved = trace.samples.iter();
                all.samples
                    .extend(moved.map(|(t, rtt)| (t + joined.length_us, *rtt)));
            }
            joined.length_us += window.length_us;
        }
        Some(joined)
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
        assert_eq!((a.at(0), a.at(199_999)), (Some(20_000), Some(20_000)));
        assert_eq!(a.at(200_000), None, "lost");
        assert_eq!(b.at(0), Some(30_500), "the first holds before it, too");
        let joined = Recording::joined(&recording.windows).unwrap();
        assert_eq!(joined.length_us, 260_000);
        assert_eq!(joined.paths[0].at(250_000), Some(1_000));
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
