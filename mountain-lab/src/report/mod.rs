// SPDX-License-Identifier: GPL-2.0-or-later
//! The report: one self-contained HTML page and the raw samples beside it.
//!
//! The page needs no network and no script: the plots are inline SVG, coloured by style sheet so
//! that they follow the reader's light or dark setting.

mod page;
mod plots;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Result;
use mountain_lab::result::{write_atomically, RunResult};
use mountain_lab::workload::game::Packet;

use crate::scenario::schedule::ScheduledEvent;

/// The packets of one policy in one repeat.
#[derive(Debug, Clone, Default)]
pub struct DrawnSegment {
    /// Policy, as in the result. `oracle` is drawn as the bound.
    pub policy: String,
    /// The repeat, from 0.
    pub repeat: u32,
    /// Time 0 of the segment, `CLOCK_MONOTONIC`: its schedule starts here.
    pub start_ns: u64,
    /// The packets that count (those of the first seconds after a change left out).
    pub packets: Vec<Packet>,
}

/// What the plots are drawn from.
#[derive(Debug, Clone, Default)]
pub struct PlotData {
    /// All segments that are not void.
    pub segments: Vec<DrawnSegment>,
    /// What the emulator did to the paths in each repeat, shaded in its time-lines.
    pub events: Vec<(u32, ScheduledEvent)>,
    /// Names of the paths by index.
    pub paths: Vec<String>,
}

/// Writes `dir/index.html` and `dir/samples.csv`; returns the page's path.
pub fn write_html(result: &RunResult, samples: &PlotData, dir: &Path) -> Result<PathBuf> {
    let page = dir.join("index.html");
    write_atomically(&dir.join("samples.csv"), csv(samples).as_bytes())?;
    write_atomically(&page, page::render(result, samples)?.as_bytes())?;
    Ok(page)
}

/// The raw samples, one line a packet; empty cells where there is no value.
fn csv(samples: &PlotData) -> String {
    let mut out = String::from(
        "policy,repeat,flow,seq,t_us,rtt_us,user_rtt_us,forward_us,backward_us,path,reordered,late_us\n",
    );
    let cell = |v: Option<u32>| v.map_or_else(String::new, |v| v.to_string());
    for segment in &samples.segments {
        for p in &segment.packets {
            let t_us = p.sent_ns.saturating_sub(segment.start_ns) / 1_000;
            let _ = writeln!(
                out,
                "{},{},{},{},{t_us},{},{},{},{},{},{},{}",
                segment.policy,
                segment.repeat,
                p.flow,
                p.seq,
                cell(p.rtt_us),
                cell(p.user_rtt_us),
                cell(p.forward_us),
                cell(p.backward_us),
                cell(p.path.map(u32::from)),
                u8::from(p.reordered),
                p.late_us
            );
        }
    }
    out
}

#[cfg(test)]
mod tests;
