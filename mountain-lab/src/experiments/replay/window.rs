// SPDX-License-Identifier: GPL-2.0-or-later
//! What is replayed: windows in which every path does something to what is sent over it.

use std::rc::Rc;

use super::made::MadePath;
use crate::recording::playback::Playback;
use crate::recording::{Recording, Stalls};
use crate::scenario::chance;
use crate::scenario::schedule::Schedule;

/// What one path does to what is sent over it. Times are µs since the window's begin, delays are
/// round trips in µs; `None`: lost.
#[derive(Clone, Debug)]
pub enum PathTrace {
    /// A recording; the path's index.
    Recorded(Playback, usize),
    /// Drawn for a scenario; the path's index.
    Scheduled(Rc<Schedule>, usize),
    Made(MadePath),
    /// One after another, each by the time of its begin.
    Joined(Vec<(u64, PathTrace)>),
}

impl PathTrace {
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
            PathTrace::Recorded(played, index) => drawn(played.at(at_us), *index, at_us, kind),
            PathTrace::Scheduled(schedule, path) => {
                let trip = schedule.drawn_trip((*path, *path), at_us as i64, kind);
                trip.map(|trip| trip.rtt_us())
            }
            PathTrace::Made(path) => path.draw(at_us, kind),
            PathTrace::Joined(parts) => {
                let (begin_us, part) = part_at(parts, at_us)?;
                part.draw(at_us - begin_us, kind)
            }
        }
    }

    /// What who knows the path would expect of a packet sent at a time. A lost one is later than
    /// any other.
    pub fn expected_us(&self, at_us: u64) -> u32 {
        match self {
            PathTrace::Recorded(played, _) => expected_us(played.at(at_us)),
            PathTrace::Scheduled(schedule, path) => {
                schedule.expected_us((*path, *path), at_us as i64)
            }
            PathTrace::Made(path) => path.expected_us(at_us),
            PathTrace::Joined(parts) => match part_at(parts, at_us) {
                Some((begin_us, part)) => part.expected_us(at_us - begin_us),
                None => u32::MAX,
            },
        }
    }
}

/// What a packet of the `kind`-th sort meets where a recording has this round trip and loss.
fn drawn((rtt_us, loss): (u32, f64), index: usize, at_us: u64, kind: u64) -> Option<u32> {
    let is_lost = chance::is_lost([0, index as u64, at_us, kind], loss);
    (!is_lost).then_some(rtt_us)
}

fn expected_us((rtt_us, loss): (u32, f64)) -> u32 {
    match loss >= 1.0 {
        true => u32::MAX,
        false => chance::expected_us(f64::from(rtt_us), loss),
    }
}

/// The part that a time falls into, and when it begins.
fn part_at(parts: &[(u64, PathTrace)], at_us: u64) -> Option<(u64, &PathTrace)> {
    let next = parts.partition_point(|(begin, _)| *begin <= at_us);
    let (begin_us, part) = parts.get(next.checked_sub(1)?)?;
    Some((*begin_us, part))
}

/// Some seconds during which something is known of all paths; a trace for each path.
#[derive(Clone, Debug)]
pub struct Window {
    pub length_us: u64,
    pub paths: Vec<PathTrace>,
}

/// What `replay` plays at a time: a recording, or what was made up.
#[derive(Clone, Debug)]
pub struct Input {
    pub name: String,
    pub paths: Vec<String>,
    pub windows: Vec<Window>,
}

impl Input {
    pub fn recorded(recording: Recording, stalls: Stalls) -> Self {
        let window = |w: crate::recording::RecordedWindow| {
            let paths = (0..).zip(w.paths);
            Window {
                length_us: w.length_us,
                paths: paths
                    .map(|(index, series)| {
                        PathTrace::Recorded(Playback::whole(series, stalls), index)
                    })
                    .collect(),
            }
        };
        Input {
            name: recording.name,
            paths: recording.paths,
            windows: recording.windows.into_iter().map(window).collect(),
        }
    }
}

/// Windows one after another as one.
pub fn joined(windows: &[Window]) -> Option<Window> {
    let mut length_us = 0;
    let mut parts = vec![Vec::new(); windows.first()?.paths.len()];
    for window in windows {
        for (all, trace) in parts.iter_mut().zip(&window.paths) {
            all.push((length_us, trace.clone()));
        }
        length_us += window.length_us;
    }
    let paths = parts.into_iter().map(PathTrace::Joined).collect();
    Some(Window { length_us, paths })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_joined_without_a_gap() {
        let text = "window,t_ms,path,rtt_ms\n3,0,a,20\n3,0,b,30\n3,250,a,\n3,250,b,31\n\
                    7,0,a,1\n7,0,b,2\n7,10,a,3\n";
        let recording = Recording::parse("r", text).unwrap();
        let input = Input::recorded(recording, Stalls::Hold);
        let joined = joined(&input.windows).unwrap();
        assert_eq!(joined.length_us, 260_000);
        let a = &joined.paths[0];
        assert_eq!(
            (a.packet(0), a.probe(249_999)),
            (Some(20_000), Some(20_000))
        );
        assert_eq!(a.packet(250_000), Some(1_000));
        assert_eq!(a.packet(260_000), Some(3_000));
        let lost = &input.windows[0].paths[0];
        assert_eq!(
            (lost.packet(250_000), lost.expected_us(250_000)),
            (None, u32::MAX)
        );
    }
}
